"""Triton kernels on the emulator: compiled without a GPU, against NumPy; a race that is found; wrong calls."""

import ml_dtypes
import numpy as np
import pytest

import ptxrt

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
triton = pytest.importorskip("triton", reason="Triton (1 GB) is not installed: pip install ptxrt[triton]; .ci/run does")
import triton.language as tl  # noqa: E402

BF16, E4M3, E5M2 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
TARGETS = [120, 80]


@pytest.fixture(autouse=True)
def machine_of_tests(emulator):
    """Use the emulator even if there is a GPU."""


@triton.jit
def add_kernel(x, y, out, n, scale, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    tl.store(out + i, tl.load(x + i, mask=inside) + scale * tl.load(y + i, mask=inside, other=0.0), mask=inside)


@triton.jit
def softmax_kernel(x, out, n, BLOCK: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    v = tl.load(x + row * n + i, mask=i < n, other=-float("inf"))
    e = tl.exp(v - tl.max(v, 0))
    tl.store(out + row * n + i, e / tl.sum(e, 0), mask=i < n)


@triton.jit
def scan_kernel(x, sums, largest, where, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    v = tl.load(x + i)
    tl.store(sums + i, tl.cumsum(v, 0))
    tl.store(largest, tl.max(v, 0))
    tl.store(where, tl.argmax(v, 0))


@triton.jit
def sort_kernel(x, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.sort(tl.load(x + i)))


@triton.jit
def histogram_kernel(x, counts, places, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i)
    tl.atomic_add(counts + v, 1)
    tl.store(places + tl.program_id(0) * 32 + tl.arange(0, 32), tl.histogram(v, 32))


@triton.jit
def lock_kernel(lock, count):
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    tl.store(count, tl.load(count, volatile=True) + 1)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


@triton.jit
def dot_kernel(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TYPE: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), TYPE)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        total = tl.dot(tl.load(a + m[:, None] * K + k[None, :]), tl.load(b + k[:, None] * N + n[None, :]), total)
    tl.store(c + m[:, None] * N + n[None, :], total)


@triton.jit
def dot_scaled_kernel(
    a,
    sa,
    b,
    sb,
    c,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    PA: tl.constexpr,
    PB: tl.constexpr,
):
    m, n = tl.arange(0, M), tl.arange(0, N)
    ka, kb, ks = tl.arange(0, K // PA), tl.arange(0, K // PB), tl.arange(0, K // 32)
    va, vb = tl.load(a + m[:, None] * (K // PA) + ka[None, :]), tl.load(b + kb[:, None] * N + n[None, :])
    fa, fb = tl.load(sa + m[:, None] * (K // 32) + ks[None, :]), tl.load(sb + n[:, None] * (K // 32) + ks[None, :])
    tl.store(c + m[:, None] * N + n[None, :], tl.dot_scaled(va, fa, A, vb, fb, B))


@triton.jit
def attention_kernel(q, k, v, out, N, scale, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr):
    m, d = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D)
    Q = tl.load(q + m[:, None] * D + d[None, :])
    top, weight, total = (
        tl.full((BM,), -float("inf"), tl.float32),
        tl.zeros((BM,), tl.float32),
        tl.zeros((BM, D), tl.float32),
    )
    for start in range(0, N, BN):
        n = start + tl.arange(0, BN)
        s = tl.dot(Q, tl.load(k + n[None, :] * D + d[:, None])) * scale
        new = tl.maximum(top, tl.max(s, 1))
        p, decay = tl.exp2(s - new[:, None]), tl.exp2(top - new)
        weight = weight * decay + tl.sum(p, 1)
        V = tl.load(v + n[:, None] * D + d[None, :])
        total = tl.dot(p.to(V.dtype), V, total * decay[:, None])
        top = new
    tl.store(out + m[:, None] * D + d[None, :], (total / weight[:, None]).to(out.dtype.element_ty))


@triton.jit
def convert_kernel(x, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i).to(out.dtype.element_ty))


@triton.jit
def count_kernel(x, counts, BLOCK: tl.constexpr):
    """Add without an atomic: two concurrent programs lose a count."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.sum(tl.load(x + i), 0)
    tl.store(counts, tl.load(counts) + n)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
def test_elementwise(rng, dtype, target):
    x, y = rng.standard_normal((2, 1000)).astype(dtype)
    out = np.full(1024, 7, dtype)
    ptxrt.triton.run(add_kernel, (4,), x, y, out, 1000, 2.0, BLOCK=256, target=target)
    expected = x.astype(np.float32) + 2 * y.astype(np.float32)
    np.testing.assert_allclose(out[:1000].astype(np.float32), expected.astype(dtype).astype(np.float32), rtol=0, atol=0)
    assert (out[1000:] == 7).all()


@pytest.mark.parametrize("target", TARGETS)
def test_softmax(rng, target):
    x = rng.standard_normal((6, 300)).astype(np.float32)
    out = np.zeros_like(x)
    ptxrt.triton.run(softmax_kernel, 6, x, out, 300, BLOCK=512, num_warps=8, target=target)
    e = np.exp(x.astype(float) - x.max(axis=1, keepdims=True))
    np.testing.assert_allclose(out, e / e.sum(axis=1, keepdims=True), rtol=2e-6)
    assert ptxrt.last_launches()[-1].block == (256, 1, 1)


@pytest.mark.parametrize("target", TARGETS)
def test_scan_reduce_sort(rng, target):
    x = rng.integers(-1000, 1000, 512).astype(np.int32)
    sums, largest, where, ordered = (
        np.zeros(512, np.int32),
        np.zeros(1, np.int32),
        np.zeros(1, np.int32),
        np.zeros(512, np.int32),
    )
    ptxrt.triton.run(scan_kernel, 1, x, sums, largest, where, BLOCK=512, target=target)
    assert (sums == np.cumsum(x)).all() and largest == x.max() and where == x.argmax()
    ptxrt.triton.run(sort_kernel, 1, x, ordered, BLOCK=512, target=target)
    assert (ordered == np.sort(x)).all()


@pytest.mark.parametrize("target", TARGETS)
def test_atomics_histogram_and_locks(rng, target):
    x = rng.integers(0, 32, 4 * 256).astype(np.int32)
    counts, places = np.zeros(32, np.int32), np.zeros((4, 32), np.int32)
    ptxrt.triton.run(histogram_kernel, 4, x, counts, places, BLOCK=256, target=target)
    assert (counts == np.bincount(x, minlength=32)).all()
    assert (places == [np.bincount(part, minlength=32) for part in x.reshape(4, 256)]).all()
    lock, count = np.zeros(1, np.int32), np.zeros(1, np.int32)
    ptxrt.triton.run(lock_kernel, 40, lock, count, target=target)
    assert count == 40 and lock == 0


DOTS = {
    "bf16": (BF16, 0),
    "fp16": (np.float16, 0),
    "tf32": (np.float32, 2e-3),
    "e4m3": (E4M3, 0),
    "e5m2": (E5M2, 0),
    "fp64": (np.float64, 1e-13),
    "int8": (np.int8, 0),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", DOTS)
def test_dot(rng, name, target):
    """Products of small integers are exact in all formats; tf32 and float64 get a tolerance."""
    dtype, tolerance = DOTS[name]
    if target == 80 and name in ("e4m3", "e5m2"):
        pytest.skip("sm_80 has no such matrix instruction, and Triton refuses it")
    a, b = (rng.integers(-8, 9, shape).astype(np.float32).astype(dtype) for shape in ((64, 96), (96, 32)))
    if name in ("tf32", "fp64"):
        a, b = (rng.standard_normal(each.shape).astype(dtype) for each in (a, b))
    wide = np.int32 if name == "int8" else np.float64 if name == "fp64" else np.float32
    types = {np.int32: tl.int32, np.float64: tl.float64, np.float32: tl.float32}
    c = np.zeros((64, 32), wide)
    ptxrt.triton.run(dot_kernel, (2, 1), a, b, c, 64, 32, 96, BM=32, BN=32, BK=32, TYPE=types[wide], target=target)
    expected = a.astype(np.float64) @ b.astype(np.float64)
    assert np.abs(c - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("a_type, b_type", [("e4m3", "e4m3"), ("e2m1", "e2m1"), ("e5m2", "e4m3"), ("e4m3", "e2m1")])
def test_dot_scaled(rng, a_type, b_type):
    """mma with block scales; e2m1 is packed along k, the first of a pair in the low bits."""
    M, N, K = 64, 32, 128
    dtypes = {"e4m3": E4M3, "e5m2": E5M2}
    table = np.arange(16, dtype=np.uint8).view(np.uint8)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = np.concatenate([values, -values])

    def operand(type, shape, axis):
        if type == "e2m1":
            codes = rng.choice(table, shape)
            low, high = (np.take(codes, range(start, shape[axis], 2), axis) for start in (0, 1))
            return low | high << 4, values[codes], 2
        numbers = rng.integers(-4, 5, shape).astype(np.float32).astype(dtypes[type])
        return numbers, numbers.astype(np.float64), 1

    a, va, pa = operand(a_type, (M, K), 1)
    b, vb, pb = operand(b_type, (K, N), 0)
    sa, sb = (
        rng.integers(124, 131, (M, K // 32)).astype(np.uint8),
        rng.integers(124, 131, (N, K // 32)).astype(np.uint8),
    )
    c = np.zeros((M, N), np.float32)
    ptxrt.triton.run(dot_scaled_kernel, 1, a, sa, b, sb, c, M=M, N=N, K=K, A=a_type, B=b_type, PA=pa, PB=pb)
    scale_a, scale_b = (np.repeat(2.0 ** (each.astype(float) - 127), 32, axis=1) for each in (sa, sb))
    np.testing.assert_allclose(c, (va * scale_a) @ (vb * scale_b.T), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("target", TARGETS)
def test_attention(rng, target):
    q, k, v = rng.standard_normal((3, 128, 64)).astype(BF16)
    out = np.zeros_like(q)
    ptxrt.triton.run(attention_kernel, 2, q, k, v, out, 128, 0.125 * 1.4427, BM=64, BN=64, D=64, target=target)
    wide = [each.astype(np.float64) for each in (q, k, v)]
    p = np.exp(wide[0] @ wide[1].T * 0.125 * 1.4427 * np.log(2))
    expected = p / p.sum(axis=1, keepdims=True) @ wide[2]
    assert np.linalg.norm(out.astype(np.float64) - expected) < 6e-3 * np.linalg.norm(expected)


@pytest.mark.parametrize(
    "source, destination",
    [(np.float32, E4M3), (BF16, E4M3), (BF16, E5M2), (E4M3, BF16), (E5M2, np.float16), (E4M3, np.float32)],
)
def test_conversions(rng, source, destination):
    x = rng.standard_normal(256).astype(np.float32).astype(source)
    out = np.zeros(256, destination)
    ptxrt.triton.run(convert_kernel, 1, x, out, BLOCK=256)
    assert (out.view(np.uint8) == x.astype(np.float32).astype(destination).view(np.uint8)).all()


def test_within_emulated_kernels_run_as_on_a_gpu(rng):
    x, y, out = rng.standard_normal(512).astype(np.float32), np.ones(512, np.float32), np.zeros(512, np.float32)
    with ptxrt.triton.emulated():
        add_kernel[lambda meta: (triton.cdiv(512, meta["BLOCK"]),)](x, y, out, 512, scale=3.0, BLOCK=128)
    assert (out == x + 3).all()


def test_autotuned_kernels_and_heuristics(rng):
    tuned = triton.autotune(
        configs=[triton.Config({"BLOCK": 64}, num_warps=2), triton.Config({"BLOCK": 128})], key=["n"]
    )(add_kernel)
    x, out = rng.standard_normal(256).astype(np.float32), np.zeros(256, np.float32)
    ptxrt.triton.run(tuned, lambda meta: (triton.cdiv(256, meta["BLOCK"]),), x, x, out, 256, 1.0)
    assert (out == 2 * x).all() and ptxrt.last_launches()[-1].block == (64, 1, 1)
    chosen = triton.heuristics({"BLOCK": lambda arguments: 32})(add_kernel)
    out[:] = 0
    ptxrt.triton.run(chosen, (8,), x, x, out, 256, 1.0)
    assert (out == 2 * x).all()


def test_a_race_between_programs_is_found():
    x, counts = np.ones(4 * 128, np.int32), np.zeros(1, np.int32)
    with ptxrt.using("emulator", strict=True):
        ptxrt.triton.run(count_kernel, 1, x[:128], counts, BLOCK=128)
        assert counts == 128
        with pytest.raises(
            ptxrt.EmulatorFault,
            match=r"count_kernel: .* a race, no atomic and no fence lies between the two blocks .*test_triton.py:\d+",
        ):
            ptxrt.triton.run(count_kernel, 4, x, counts, BLOCK=128)


def test_an_access_out_of_bounds_names_its_line():
    x = np.ones(100, np.float32)
    with pytest.raises(ptxrt.EmulatorFault, match=r"convert_kernel: .* past the end .*test_triton.py:\d+"):
        ptxrt.triton.run(convert_kernel, 1, x, np.zeros(128, np.float32), BLOCK=128)


def test_wrong_calls():
    x = np.ones(128, np.float32)
    with pytest.raises(ptxrt.ArgumentError, match="convert_kernel.x, out, BLOCK.: missing a required argument: 'out'"):
        ptxrt.triton.run(convert_kernel, 1, x, BLOCK=128)
    with pytest.raises(ptxrt.ArgumentError, match="x has elements of complex64; Triton has int8"):
        ptxrt.triton.run(convert_kernel, 1, x.astype(np.complex64), x, BLOCK=128)
    with pytest.raises(ptxrt.ArgumentError, match="an argument is a list; pass NumPy arrays"):
        ptxrt.triton.run(convert_kernel, 1, [1.0], x, BLOCK=128)
    with pytest.raises(ptxrt.ArgumentError, match="target is 90; kernels are compiled for 80, 86, 89, 120"):
        ptxrt.triton.run(convert_kernel, 1, x, x, BLOCK=128, target=90)


def test_the_guide_runs(tmp_path, capsys):
    """The kernel of docs/guides/triton_and_numba.md as printed there, and with the atomic that the page recommends."""
    import re
    import runpy
    from pathlib import Path

    page = (Path(__file__).parent.parent / "docs" / "guides" / "triton_and_numba.md").read_text(encoding="utf-8")
    (block,) = re.findall(r'```python title="count.py"\n(.*?)```', page, re.S)
    path = tmp_path / "count.py"
    path.write_text(block)
    runpy.run_path(str(path))
    said = r"count: thread .* reads 4 bytes of an allocation .* a race, no atomic and no fence lies between the two blocks .*count.py:\d+"
    assert re.match(said, capsys.readouterr().out, re.S)
    path.write_text(block.replace("tl.store(total, tl.load(total) + ", "tl.atomic_add(total, "))
    assert runpy.run_path(str(path))["total"][0] == 1024 and capsys.readouterr().out == ""
