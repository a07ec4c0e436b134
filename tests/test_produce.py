"""The kernels between two products: norms, gates and activations against float64, and against the bytes of
`quantize`."""

import math

import ml_dtypes
import numpy as np
import pytest

import ptxrt
from ptxrt import units
from ptxrt.backend import Facts
from ptxrt.errors import ArgumentError
from ptxrt.ops import produce_kernels
from ptxrt.ops.gemm_kernels import activate

BF16 = ml_dtypes.bfloat16
TYPES = [np.float32, np.float16, BF16]
RULES = {"mxfp8": "rceil", "mxfp4": "even", "nvfp4": "amax"}


def normal(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def host(x):
    """A NumPy copy of an array."""
    return x if isinstance(x, np.ndarray) else x.to_numpy()


def to_type(y, dtype):
    """Float64 values rounded as a kernel rounds: to float32, then to dtype."""
    with np.errstate(over="ignore"):
        return y.astype(np.float32).astype(dtype).astype(np.float64)


def exact_norm(x, weight=None, bias=None, *, eps, residual=None, offset=0.0, rounding="once", centered=False):
    """(y, v) in float64, written from the formulas."""
    v = x.astype(np.float64)
    keep = (lambda a: to_type(a, x.dtype)) if rounding == "16" else (lambda a: a)
    v = v if residual is None else keep(v + residual.astype(np.float64))
    off = v - v.mean(axis=-1, keepdims=True) if centered else v
    y = keep(off / np.sqrt((off**2).mean(axis=-1, keepdims=True) + eps))
    y = y if weight is None else y * (weight.astype(np.float64) + offset)
    return (y if bias is None else y + bias.astype(np.float64)), v


def exact_gate(x, *, interleaved=False, limit=None, alpha=1.0, offset=0.0, row_weights=None):
    """The gate in float64."""
    x = x.astype(np.float64)
    half = x.shape[-1] // 2
    g, u = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    if limit is not None:
        g, u = np.minimum(g, limit), np.clip(u, -limit, limit)
    y = g / (1 + np.exp(-alpha * g)) * (u + offset)
    return y if row_weights is None else y * row_weights[..., None].astype(np.float64)


def assert_close(got, want, dtype=np.float32):
    """Check the documented bound in float32, and one rounding in 16 bits."""
    bound = {np.float32: 4e-7, np.float16: 4e-4, BF16: 3e-3}[dtype]
    assert got.dtype == dtype and got.shape == want.shape
    comparison = ptxrt.compare(got, want)
    assert comparison.relative_l2 <= bound, comparison


# Function -> (call of x, float64 reference of x).
CALLS = {
    "rmsnorm": (lambda x, **o: ptxrt.rmsnorm(x, **o), lambda x: exact_norm(x, eps=1e-6)[0]),
    "layernorm": (lambda x, **o: ptxrt.layernorm(x, **o), lambda x: exact_norm(x, eps=1e-5, centered=True)[0]),
    "swiglu": (lambda x, **o: ptxrt.swiglu(x, **o), exact_gate),
    "gelu": (lambda x, **o: ptxrt.gelu(x, **o), lambda x: activate(x.astype(np.float64), "gelu")),
}


@pytest.mark.parametrize("dtype", TYPES, ids=lambda t: np.dtype(t).name)
@pytest.mark.parametrize("name", CALLS)
def test_against_float64(text_machine, name, dtype):
    call, exact = CALLS[name]
    for shape in ((3, 5, 200), (7, 2), (2, 34), (70,), (3, 1026)):
        x = normal(*shape, dtype=dtype)
        assert_close(call(x, out_dtype=np.float32), exact(x))
        assert_close(call(x), exact(x), dtype)


@pytest.mark.parametrize("layout", ["linear", "128x4"])
@pytest.mark.parametrize(
    "format, rule",
    [
        ("mxfp8", None),
        ("mxfp8", "floor"),
        ("mxfp4", None),
        ("mxfp4", "ceil"),
        ("mxfp4", "floor"),
        ("nvfp4", None),
        ("nvfp4", "four_over_six"),
    ],
)
@pytest.mark.parametrize("name", CALLS)
def test_the_bytes_of_quantize(text_machine, name, format, rule, layout):
    call, _ = CALLS[name]
    for shape, dtype in (((5, 14, 96), BF16), ((130, 130), np.float32), ((3, 1100), np.float16)):
        x = normal(*shape, dtype=dtype)
        x *= np.exp2(np.arange(x.shape[-2]) % 7 - 3)[:, None].astype(dtype)
        level = dict(global_scale=0.013) if format == "nvfp4" else {}
        plain = call(x, out_dtype=np.float32)
        got = call(x, format=format, scale_rule=rule, scale_layout=layout, **level)
        want = ptxrt.quantize(plain, format, scale_rule=rule or RULES[format], scale_layout=layout, pad=True, **level)
        np.testing.assert_array_equal(got.codes, want.codes)
        np.testing.assert_array_equal(got.scales, want.scales)
        assert got.layout == want.layout


@pytest.mark.parametrize("dtype", TYPES, ids=lambda t: np.dtype(t).name)
@pytest.mark.parametrize("rounding", ["once", "16"])
def test_rmsnorm_with_all_it_takes(text_machine, rounding, dtype):
    for cols in (64, 577):
        x, residual = (normal(6, cols, dtype=dtype, seed=seed) for seed in range(2))
        weight = normal(cols, dtype=BF16)
        options = dict(eps=1e-5, residual=residual, offset=1.0, rounding=rounding)
        y, v = ptxrt.rmsnorm(x, weight, out_dtype=np.float32, **options)
        want, total = exact_norm(x, weight, **options)
        np.testing.assert_array_equal(v, to_type(total, dtype).astype(dtype))
        if rounding == "once" or dtype is np.float32:
            assert_close(y, want)
        else:  # values halfway between two 16-bit values may round to either
            assert np.mean(np.abs(y - want) > 1e-6 * np.abs(want)) < 0.01
            assert ptxrt.compare(y, want).relative_l2 < {np.float16: 2e-4, BF16: 1.5e-3}[dtype]


def test_rounding_before_the_weight(text_machine):
    """One row with known bits: the root mean square is 1, so that the rounded values are those of x."""
    x = np.array([[1, -1, 1, -1]], BF16)
    weight = np.array([1 + 2**-8, 3, 1, 1], np.float32)
    residual = np.full((1, 4), 3 * 2.0**-10, BF16)
    once, _ = ptxrt.rmsnorm(x, weight, eps=0.0, residual=residual, out_dtype=np.float32)
    rounded, total = ptxrt.rmsnorm(x, weight, eps=0.0, residual=residual, rounding="16", out_dtype=np.float32)
    np.testing.assert_array_equal(total, np.array([[1, -1 + 2.0**-8, 1, -1 + 2.0**-8]], BF16))
    want, _ = exact_norm(x, weight, eps=0.0, residual=residual, rounding="16")
    np.testing.assert_array_equal(rounded, want.astype(np.float32))
    assert (once != rounded).any()


@pytest.mark.parametrize("dtype", TYPES, ids=lambda t: np.dtype(t).name)
def test_layernorm_with_all_it_takes(text_machine, dtype):
    for cols in (384, 130):
        x = (normal(9, cols, dtype=np.float32) + 30).astype(dtype)  # the mean is far larger than the deviation
        residual = normal(9, cols, dtype=dtype, seed=2)
        weight, bias = normal(cols, dtype=np.float32, seed=3), normal(cols, dtype=np.float16, seed=4)
        y, v = ptxrt.layernorm(x, weight, bias, eps=1e-12, residual=residual, out_dtype=np.float32)
        v32 = x.astype(np.float32) + residual.astype(np.float32)
        want, _ = exact_norm(v32, weight, bias, eps=1e-12, centered=True)
        assert_close(y, want)
        np.testing.assert_array_equal(v, v32.astype(dtype))


@pytest.mark.parametrize("cols", [8192, 8208, 9001])
def test_rows_that_registers_hold_and_longer_ones(text_machine, cols):
    x, weight = normal(2, cols), normal(cols, seed=1)
    assert_close(ptxrt.rmsnorm(x, weight), exact_norm(x, weight, eps=1e-6)[0])
    residual = normal(2, cols, seed=2)
    y, v = ptxrt.layernorm(x, weight, eps=1e-5, residual=residual)
    assert_close(y, exact_norm(x + residual, weight, eps=1e-5, centered=True)[0])
    np.testing.assert_array_equal(v, x + residual)


GATES = [dict(), dict(interleaved=True), dict(limit=0.7), dict(alpha=1.702, offset=1.0, limit=7.0, interleaved=True)]


@pytest.mark.parametrize("options", GATES, ids=str)
def test_gates(text_machine, options):
    x = 3 * normal(2, 9, 140)
    weights = normal(2, 9, dtype=np.float64)
    assert_close(ptxrt.swiglu(x, **options), exact_gate(x, **options))
    want = exact_gate(x, row_weights=weights.astype(np.float32), **options)
    assert_close(ptxrt.swiglu(x, row_weights=weights, **options), want)
    x = x.astype(BF16)
    plain = ptxrt.swiglu(x, **options)
    for format in ("mxfp8", "mxfp4"):
        packed = ptxrt.swiglu(x, rounding="16", format=format, **options)
        want = ptxrt.quantize(plain, format, scale_rule=RULES[format], pad=True)
        np.testing.assert_array_equal(packed.codes, want.codes)
        np.testing.assert_array_equal(packed.scales, want.scales)


def test_gates_and_activations_are_those_of_products(text_machine):
    x = normal(20, 64, dtype=BF16)
    eye = np.eye(64, dtype=BF16)
    for activation, call in (
        ("gelu", ptxrt.gelu),
        ("gelu_tanh", lambda x, **o: ptxrt.gelu(x, approximate="tanh", **o)),
        ("swiglu", lambda x, **o: ptxrt.swiglu(x, interleaved=True, **o)),
    ):
        want = ptxrt.matmul(x, eye, activation=activation, out_dtype=np.float32)
        np.testing.assert_array_equal(call(x, out_dtype=np.float32), want)
    want = activate(x.astype(np.float64), "gelu_tanh")
    assert_close(ptxrt.gelu(x, approximate="tanh", out_dtype=np.float32), want)


@pytest.mark.parametrize("name", CALLS)
def test_no_bit_depends_on_other_rows(text_machine, name):
    call, _ = CALLS[name]
    for cols in (40, 640, 2400):
        x = normal(37, cols, dtype=BF16)
        whole = call(x, out_dtype=np.float32)
        for row in (0, 17, 36):
            np.testing.assert_array_equal(call(x[row], out_dtype=np.float32), whole[row])


@pytest.mark.parametrize("name", CALLS)
def test_any_strides(text_machine, name):
    call, _ = CALLS[name]
    x = normal(6, 4, 90, dtype=BF16)
    for view in (np.s_[::2, 1, 3:67], np.s_[:, ::3, :64], np.s_[:, :, ::3], np.s_[:, :1], np.s_[2]):
        want = call(np.ascontiguousarray(x[view]))
        np.testing.assert_array_equal(call(x[view]), want)
        np.testing.assert_array_equal(call(ptxrt.to_device(x)[view]).to_numpy(), want)
    view = x.transpose(1, 0, 2)[::-1]
    np.testing.assert_array_equal(call(view), call(np.ascontiguousarray(view)))


def test_views_of_device_arrays_that_are_refused(emulator):
    """Of every argument of every call that takes views, by name."""
    x, vector = ptxrt.to_device(normal(6, 64)), ptxrt.to_device(normal(64))
    table, ids = ptxrt.to_device(ptxrt.rope_table(64, 6)), ptxrt.to_device(np.arange(6, dtype=np.int32))
    bounds = ptxrt.to_device(np.array([0, 6], np.int32))
    for words, call in {
        "rmsnorm: x": lambda: ptxrt.rmsnorm(x[::-1]),
        "rmsnorm: weight": lambda: ptxrt.rmsnorm(x, vector[::-1]),
        "rmsnorm: residual": lambda: ptxrt.rmsnorm(x, residual=x[:, ::-1]),
        "layernorm: x": lambda: ptxrt.layernorm(x[::-1]),
        "layernorm: weight": lambda: ptxrt.layernorm(x, vector[::-1]),
        "layernorm: bias": lambda: ptxrt.layernorm(x, None, vector[::-1]),
        "swiglu: x": lambda: ptxrt.swiglu(x[::-1]),
        "swiglu: row_weights": lambda: ptxrt.swiglu(x, row_weights=vector[5::-1]),
        "gelu: x": lambda: ptxrt.gelu(x[::-1]),
        "rope: x": lambda: ptxrt.rope(x[::-1], table, ids),
        "rope: table": lambda: ptxrt.rope(x, table[::-1], ids),
        "rope: positions": lambda: ptxrt.rope(x, table, ids[::-1]),
        "take_rows: table": lambda: ptxrt.take_rows(x[::-1], ids),
        "take_rows: ids": lambda: ptxrt.take_rows(x, ids[::-1]),
        "argmax_rows: x": lambda: ptxrt.argmax_rows(x[::-1]),
        "mean_rows: x": lambda: ptxrt.mean_rows(x[::-1], bounds),
        "mean_rows: cu_seqlens": lambda: ptxrt.mean_rows(x, bounds[::-1]),
    }.items():
        with pytest.raises(ArgumentError, match=f"^{words} .* has strides of .*; copy it so that they go from 0 on"):
            call()


@pytest.mark.parametrize("part", ["codes", "scales"])
@pytest.mark.parametrize("gapped", [False, True], ids=["unaligned", "gapped"])
@pytest.mark.parametrize("name", ["rmsnorm", "swiglu", "gelu", "matmul", "quantize", "take_rows"])
def test_calls_that_are_refused_leave_out_as_it_is(emulator, name, part, gapped):
    x, weight = ptxrt.to_device(normal(32, 64)), ptxrt.to_device(normal(64, 64))
    ids = ptxrt.to_device(np.arange(32, dtype=np.int32))
    calls = {
        "rmsnorm": lambda: ptxrt.rmsnorm(x, out=out, global_scale=3.0),
        "swiglu": lambda: ptxrt.swiglu(x, out=out, global_scale=3.0),
        "gelu": lambda: ptxrt.gelu(x, out=out, global_scale=3.0),
        "matmul": lambda: ptxrt.matmul(x, weight, a_format="f16", b_format="f16", out=out, out_global_scale=3.0),
        "quantize": lambda: ptxrt.quantize(x, "nvfp4", out=out, global_scale=3.0),
        "take_rows": lambda: ptxrt.take_rows(x, ids, out=out, global_scale=3.0),
    }
    columns = 32 if name == "swiglu" else 64
    arrays = ptxrt.quantize(ptxrt.to_device(normal(32, columns)), "nvfp4", global_scale=0.5).arrays
    rows, cols = arrays[part].shape
    memory = ptxrt.to_device(np.zeros(2 * rows * cols, np.uint8))
    view = memory.reshape(rows, 2 * cols)[:, :cols] if gapped else memory[1 : 1 + rows * cols].reshape(rows, cols)
    out = ptxrt.QuantizedArray(**arrays | {part: view}, format="nvfp4", shape=(32, columns))
    before = {key: array.to_numpy() for key, array in out.arrays.items()}
    words = "has strides of" if gapped else "begins at 0x"
    expected = "row-major order, beginning at a multiple of 16 bytes"
    with pytest.raises(ArgumentError, match=f"^{name}: out.{part} .*{words}.*; pass an array in {expected}"):
        calls[name]()
    for key, array in before.items():
        np.testing.assert_array_equal(out.arrays[key].to_numpy(), array)


@pytest.mark.parametrize("name", CALLS)
def test_results_where_the_caller_wants_them(text_machine, name):
    call, _ = CALLS[name]
    x = normal(6, 64)
    want = call(x, out_dtype=np.float16)
    for put in (lambda a: a, ptxrt.to_device):
        whole = put(np.full((6, 220), 7, np.float16))
        for given in (whole[:, 10 : 10 + want.shape[1]], whole[:, 80 : 80 + 2 * want.shape[1] : 2]):
            assert call(put(x), out=given) is given
            np.testing.assert_array_equal(host(given), want)
        assert (host(whole)[:, :10] == 7).all() and (host(whole)[:, 81 : 80 + 2 * want.shape[1] : 2] == 7).all()
        packed = call(put(x), format="nvfp4", global_scale=1, scale_layout="128x4")
        out = ptxrt.quantize(put(np.zeros(want.shape, np.float32)), "nvfp4", pad=True, scale_layout="128x4")
        assert call(put(x), out=out, global_scale=1) is out
        for part in ("codes", "scales", "global_scale"):
            np.testing.assert_array_equal(host(getattr(out, part)), host(getattr(packed, part)))


def test_sums_where_the_caller_wants_them(text_machine):
    x, residual = (ptxrt.to_device(normal(5, 48, dtype=BF16, seed=seed)) for seed in (0, 1))
    want, total = ptxrt.rmsnorm(x, residual=residual)
    y, v = (ptxrt.empty((5, 48), BF16) for _ in range(2))
    got = ptxrt.rmsnorm(x, residual=residual, out=y, residual_out=v)
    assert got[0] is y and got[1] is v
    np.testing.assert_array_equal(y.to_numpy(), want.to_numpy())
    np.testing.assert_array_equal(v.to_numpy(), total.to_numpy())


@pytest.mark.parametrize("name", CALLS)
def test_empty_arrays(text_machine, name):
    call, _ = CALLS[name]
    halves = 2 if name == "swiglu" else 1
    for shape in ((0, 64), (3, 0), (2, 0, 64)):
        want = (*shape[:-1], shape[-1] // halves)
        assert call(normal(*shape)).shape == want
        assert call(normal(*shape), format="mxfp8", scale_layout="128x4").shape == want
    if name.endswith("norm"):
        y, v = call(normal(0, 8), residual=normal(0, 8))
        assert y.shape == v.shape == (0, 8)


def test_what_is_not_finite_gives_what_the_formulas_give(text_machine):
    x = normal(6, 96)
    x[0, 3], x[1, 5], x[2, 7], x[3] = np.nan, np.inf, -np.inf, 0
    with np.errstate(invalid="ignore", over="ignore"):
        for name, (call, exact) in CALLS.items():
            got, want = call(x), exact(x)
            np.testing.assert_array_equal(np.isnan(got), np.isnan(want), err_msg=name)
            seen = np.isfinite(want)
            np.testing.assert_allclose(got[seen], want[seen], rtol=2e-6, atol=1e-6)
            np.testing.assert_array_equal(got[~seen & ~np.isnan(want)], want[~seen & ~np.isnan(want)])


def test_activations_of_all_magnitudes(text_machine):
    """Beyond the range of e^x, and for infinities, the results are the limits; for -infinity NaN."""
    large = np.array([100, 1e4, 1e13, 1e20, 3e38, np.inf], np.float32)
    x = np.concatenate([large, -large[:-1]])
    for call in (
        ptxrt.gelu,
        lambda x: ptxrt.gelu(x, approximate="tanh"),
        lambda x: ptxrt.swiglu(np.concatenate([x, np.ones_like(x)])),
    ):
        np.testing.assert_array_equal(call(x), np.maximum(x, 0))
        assert np.isnan(call(np.array([-np.inf, np.nan], np.float32))).all()
    gate = ptxrt.swiglu(np.array([np.inf, -np.inf, 1, 1], np.float32), limit=7.0)
    assert gate[0] == np.float32(7 / (1 + np.exp(-7.0))) and np.isnan(gate[1])


def test_gelu_on_both_sides_of_zero(text_machine):
    """Bounds are relative for positive values, absolute for negative ones."""
    x = np.linspace(-14, 14, 4001).astype(np.float32)
    got, want = ptxrt.gelu(x), activate(x.astype(np.float64), "gelu")
    np.testing.assert_allclose(got[x > 0], want[x > 0], rtol=6e-7, atol=0)
    np.testing.assert_allclose(got[x <= 0], want[x <= 0], rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", CALLS)
def test_prepared_and_in_a_graph(text_machine, name):
    call = getattr(ptxrt, name)
    x = ptxrt.to_device(normal(9, 64, dtype=BF16))
    out = ptxrt.quantize(ptxrt.to_device(np.zeros((9, 32 if name == "swiglu" else 64), np.float32)), "mxfp4")
    want = host(call(x, format="mxfp4").codes)
    prepared = ptxrt.prepare(call, x, out=out)
    prepared(x)
    np.testing.assert_array_equal(host(out.codes), want)
    other = ptxrt.to_device(normal(9, 64, dtype=BF16, seed=5))
    prepared(other)
    np.testing.assert_array_equal(host(out.codes), host(call(other, format="mxfp4").codes))
    levels = ptxrt.prepare(call, x, format="nvfp4", global_scale=0.5)(x)
    np.testing.assert_array_equal(host(levels.codes), host(call(x, format="nvfp4", global_scale=0.5).codes))
    with ptxrt.graph() as graph:
        call(x, out=out)
    graph.launch()
    np.testing.assert_array_equal(host(out.codes), want)


def test_one_launch(text_machine):
    """One launch writes everything, including swizzled scales and the padding of their tiles."""
    x = ptxrt.to_device(normal(9, 64, dtype=BF16))
    for name, (call, _) in CALLS.items():
        assert len(ptxrt.prepare(call, x, format="mxfp4", scale_layout="128x4").launches) == 1, name


@pytest.mark.parametrize("format", [None, "mxfp8", "nvfp4"])
@pytest.mark.parametrize("name", CALLS)
def test_no_bit_depends_on_the_number_of_blocks(text_machine, monkeypatch, name, format):
    """One block takes all rows in turn, with the next ones in flight."""
    x = normal(37, 2 * 288, dtype=BF16)
    options = dict(format=format, **(dict(global_scale=1.0) if format == "nvfp4" else {}))
    arrays = lambda y: [y.codes, y.scales] if format else [y]
    y = arrays(CALLS[name][0](x, **options))
    assert ptxrt.last_launches()[-1].grid[0] > 1
    monkeypatch.setattr(produce_kernels, "_fewer", lambda *blocks: 1)
    for one, other in zip(arrays(CALLS[name][0](x.copy(), **options)), y):
        assert ptxrt.last_launches()[-1].grid[0] == 1
        np.testing.assert_array_equal(one, other)


def few_calls(x, residual, weight, bias):
    """Norms with all options, of weights in float32 and in x's type."""
    dtype = x.dtype
    same = weight.astype(dtype), bias.astype(dtype)
    other = np.float16 if dtype == np.float32 else np.float32
    yield ptxrt.rmsnorm(x)
    yield ptxrt.rmsnorm(x, same[0], offset=1.0, out_dtype=other)
    yield ptxrt.rmsnorm(x, weight, rounding="16", residual=residual)
    yield ptxrt.rmsnorm(x, weight.astype(np.float16), residual=residual, out_dtype=np.float32)
    yield ptxrt.layernorm(x, *same)
    yield ptxrt.layernorm(x, *same, residual=residual)
    yield ptxrt.layernorm(x, weight, bias, residual=residual)
    yield ptxrt.layernorm(x, None, bias.astype(BF16), out_dtype=BF16)


@pytest.mark.parametrize("rows, cols", [(70, 64), (9, 384), (5, 576), (2, 4096)])
@pytest.mark.parametrize("dtype", TYPES, ids=lambda t: np.dtype(t).name)
def test_few_rows_have_the_bits_of_many(text_machine, monkeypatch, dtype, rows, cols):
    """Of few rows each lane has two threads. One block takes all rows in turn."""
    arrays = lambda: (
        *(normal(rows, cols, dtype=dtype, seed=s) for s in (0, 1)),
        *(normal(cols, seed=s) for s in (2, 3)),
    )
    few = list(few_calls(*arrays()))
    assert ptxrt.last_launches()[-1].grid[0] > 1
    monkeypatch.setattr(produce_kernels, "_fewer", lambda *blocks: 1)
    for want, got in zip(few, few_calls(*arrays())):
        assert ptxrt.last_launches()[-1].grid[0] == 1
        for one, other in zip(*(y if isinstance(y, tuple) else (y,) for y in (want, got))):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("cols", [384, 8192])
@pytest.mark.parametrize("eps", [0.0, 1e-12])
def test_rows_of_any_size_have_the_bits_of_sums_with_zeros(text_machine, monkeypatch, cols, eps):
    """Rows in registers take roots without a branch, sums with a residual take them with the compiler's."""
    monkeypatch.setattr(produce_kernels, "_fewer", lambda *blocks: 1)
    with np.errstate(invalid="ignore", over="ignore"):
        sizes = np.array([1, 2.0**-70, 2.0**-40, 2.0**-31, 2.0**31, 2.0**40, 2.0**62, 2.0**70, 0, np.inf, np.nan])
        x = (normal(len(sizes), cols) * sizes[:, None]).astype(BF16)
    weight, bias = (normal(cols, seed=seed) for seed in (3, 4))
    zeros = np.zeros_like(x)
    for call in (
        lambda **residual: ptxrt.rmsnorm(x, weight, eps=eps, **residual),
        lambda **residual: ptxrt.layernorm(x, weight, bias, eps=eps, **residual),
    ):
        one, other = (y.astype(np.float32) for y in (call(), call(residual=zeros)[0]))
        np.testing.assert_array_equal(one, other)


def forms_of(call, x, plain, layout):
    """Check that rows in every form, for each of which kernels of 16-bit rows have a loop, are those of plain values."""
    np.testing.assert_array_equal(call(x, out_dtype=x.dtype), plain.astype(x.dtype))
    np.testing.assert_array_equal(call(x, out_dtype=np.float32), plain)
    for format in ("mxfp8", "mxfp4", "nvfp4"):
        options = dict(scale_layout=layout, **(dict(global_scale=0.013) if format == "nvfp4" else {}))
        got = call(x, format=format, **options)
        want = ptxrt.quantize(plain, format, scale_rule=RULES[format], pad=True, **options)
        np.testing.assert_array_equal(got.codes, want.codes)
        np.testing.assert_array_equal(got.scales, want.scales)


@pytest.mark.parametrize(
    "name, dtype, of_weights",
    [
        ("rmsnorm", np.float16, np.float16),
        ("rmsnorm", BF16, np.float32),
        ("layernorm", np.float16, np.float16),
        ("layernorm", BF16, BF16),
        ("layernorm", BF16, np.float32),
    ],
)
def test_norms_in_every_form(text_machine, monkeypatch, name, dtype, of_weights):
    """Rows of 16 and of 64 lanes. One block takes all rows in turn."""
    monkeypatch.setattr(produce_kernels, "_fewer", lambda *blocks: 1)
    for rows, cols, layout in (18, 512, "128x4"), (5, 1056, "linear"):
        x = normal(rows, cols, dtype=dtype, seed=3)
        weight, bias = (normal(cols, dtype=of_weights, seed=seed) for seed in (3, 4))
        given = (weight, bias)[: 1 + (name == "layernorm")]
        call = lambda x, **options: getattr(ptxrt, name)(x, *given, **options)
        plain = call(x, out_dtype=np.float32)
        options = dict(eps=1e-5, centered=True) if name == "layernorm" else dict(eps=1e-6)
        assert_close(plain, exact_norm(x, *given, **options)[0])
        forms_of(call, x, plain, layout)
    if name == "rmsnorm":
        rounded, want = call(x, rounding="16"), exact_norm(x, weight, eps=1e-6, rounding="16")[0]
        assert (
            np.mean(rounded != to_type(want, dtype).astype(dtype)) < 0.01
        )  # halfway between two values either is right


def test_norms_with_sums_of_long_rows(text_machine):
    """Rows with a residual that are whole and fit, and rows that are read again, rounded and not."""
    for cols, dtype in (1056, np.float16), (9001, BF16):
        x, residual = (normal(3, cols, dtype=dtype, seed=seed) for seed in range(2))
        bias = normal(cols, dtype=np.float32, seed=2)
        y, v = ptxrt.layernorm(x, None, bias, residual=residual, out_dtype=np.float32)
        v32 = x.astype(np.float32) + residual.astype(np.float32)
        assert_close(y, exact_norm(v32, None, bias, eps=1e-5, centered=True)[0])
        np.testing.assert_array_equal(v, v32.astype(dtype))
        y, v = ptxrt.rmsnorm(x, residual=residual, rounding="16", out_dtype=np.float32)
        np.testing.assert_array_equal(v, v32.astype(dtype))
        want, _ = exact_norm(v, eps=1e-6, rounding="16")
        assert np.mean(y != want.astype(np.float32)) < 0.01  # halfway between two values either is right
    options = dict(residual=residual[:, :256], format="mxfp8", scale_layout="128x4")
    got, v = ptxrt.rmsnorm(x[:, :256], **options)
    plain, _ = ptxrt.rmsnorm(x[:, :256], residual=residual[:, :256], out_dtype=np.float32)
    want = ptxrt.quantize(plain, "mxfp8", scale_rule="rceil", scale_layout="128x4")
    np.testing.assert_array_equal(got.codes, want.codes)
    np.testing.assert_array_equal(got.scales, want.scales)


@pytest.mark.parametrize(
    "dtype, options",
    [
        (np.float16, dict(limit=0.7, rounding="16", row_weights=normal(36))),
        (BF16, dict(interleaved=True)),
    ],
    ids=["float16", "bfloat16"],
)
def test_gates_and_activations_in_every_form(text_machine, monkeypatch, dtype, options):
    """One block takes all shares in turn."""
    monkeypatch.setattr(produce_kernels, "_fewer", lambda *blocks: 1)
    x = 3 * normal(36, 256, dtype=dtype)
    call = lambda x, **rest: ptxrt.swiglu(x, **options, **rest)
    once = {name: value for name, value in options.items() if name != "rounding"}
    plain = ptxrt.swiglu(x, **once, out_dtype=np.float32)
    assert_close(plain, exact_gate(x, **once))
    plain = plain.astype(dtype).astype(np.float32) if "rounding" in options else plain
    forms_of(call, x, plain, "linear")
    forms_of(ptxrt.gelu, x, ptxrt.gelu(x, out_dtype=np.float32), "linear")


@pytest.mark.parametrize("blocks, waves", [(produce_kernels.norm_blocks, 1), (produce_kernels.share_blocks, 2)])
def test_whole_waves_of_blocks(blocks, waves):
    """Work of many blocks is spread evenly over one or two times those that a GPU holds; less work keeps its blocks."""
    for rows, cols in (8192, 8192), (4096, 14336), (1 << 17, 576):
        for room in 264, 396, 510:
            assert 0.85 * waves * room < blocks(rows, cols, room) <= waves * room < blocks(rows, cols)
    assert blocks(64, 4096, 396) == blocks(64, 4096) > 1


@pytest.mark.parametrize("name", produce_kernels.HELD)
def test_a_multiprocessor_holds_the_declared_blocks(name):
    launches = units.launches(name, "compute_120f")
    for element, size in ("bf16", 2), ("f16", 2), ("f32", 4):
        entry = f"{name}_{element}"
        assert Facts.of(entry, launches[entry]["launch"]).min_blocks == produce_kernels.room_for(name, size, 1)


X, QUANTIZED = normal(6, 64), ptxrt.quantize


@pytest.mark.parametrize(
    "words, call",
    [
        ("convert|pass float32", lambda: ptxrt.rmsnorm(X.astype(np.int32))),
        ("at least one axis", lambda: ptxrt.gelu(np.float32(3))),
        (r"x is float64 .*bfloat16: x.astype\(numpy.float32\)$", lambda: ptxrt.rmsnorm(X.astype(np.float64))),
        ("dequantize", lambda: ptxrt.gelu(QUANTIZED(X, "mxfp8"))),
        ("weight is .*shape \\[64\\]", lambda: ptxrt.rmsnorm(X, np.ones(63))),
        ("weight is .*int64", lambda: ptxrt.rmsnorm(X, np.ones(64, np.int64))),
        ("bias is", lambda: ptxrt.layernorm(X, None, np.ones(3))),
        ("eps is -1", lambda: ptxrt.rmsnorm(X, eps=-1)),
        ("eps is nan", lambda: ptxrt.layernorm(X, eps=np.nan)),
        ("offset is", lambda: ptxrt.rmsnorm(X, offset=1.0)),
        ("rounding is 16", lambda: ptxrt.rmsnorm(X, rounding=16)),
        ("residual is", lambda: ptxrt.rmsnorm(X, residual=X[:5])),
        ("residual is", lambda: ptxrt.rmsnorm(X, residual=X.astype(BF16))),
        ("without a residual", lambda: ptxrt.rmsnorm(X, residual_out=np.empty_like(X))),
        ("residual_out is", lambda: ptxrt.rmsnorm(X, residual=X, residual_out=np.empty((6, 63), np.float32))),
        ("overlaps x", lambda: ptxrt.rmsnorm(X, residual=X, residual_out=X)),
        ("overlaps x", lambda: ptxrt.gelu(X, out=X)),
        ("even one", lambda: ptxrt.swiglu(X[:, :63])),
        ("limit is -1", lambda: ptxrt.swiglu(X, limit=-1)),
        ("alpha is inf", lambda: ptxrt.swiglu(X, alpha=math.inf)),
        ("interleaved is 1", lambda: ptxrt.swiglu(X, interleaved=1)),
        ("row_weights is", lambda: ptxrt.swiglu(X, row_weights=np.ones(5))),
        ("approximate is 'fast'", lambda: ptxrt.gelu(X, approximate="fast")),
        ("format is 'mxfp6", lambda: ptxrt.gelu(X, format="mxfp6_e3m2")),
        ("needs global_scale", lambda: ptxrt.gelu(X, format="nvfp4")),
        ("global_scale is 1", lambda: ptxrt.gelu(X, global_scale=1)),
        ("global_scale is", lambda: ptxrt.gelu(X, format="mxfp8", global_scale=1)),
        ("scale_rule is 'up'", lambda: ptxrt.gelu(X, format="mxfp8", scale_rule="up")),
        ("scale_rule is 'even'", lambda: ptxrt.gelu(X, scale_rule="even")),
        ("scale_layout is", lambda: ptxrt.gelu(X, format="mxfp8", scale_layout="tiles")),
        ("out_dtype float32 beside format", lambda: ptxrt.gelu(X, format="mxfp8", out_dtype=np.float32)),
        ("out_dtype", lambda: ptxrt.gelu(X, out_dtype=np.int32)),
        ("gelu: out_dtype=np.float16.2", lambda: ptxrt.gelu(X, out_dtype=np.float16(2))),
        ("gelu: out_dtype=array", lambda: ptxrt.gelu(X, out_dtype=X)),
        ("rmsnorm: scale_layout is array", lambda: ptxrt.rmsnorm(X, scale_layout=np.array([1, 2]))),
        ("layernorm: scale_layout is array", lambda: ptxrt.layernorm(X, scale_layout=np.array([1, 2]))),
        ("swiglu: scale_layout is array", lambda: ptxrt.swiglu(X, scale_layout=np.array([1, 2]))),
        ("rmsnorm: eps is np.True_", lambda: ptxrt.rmsnorm(X, eps=np.True_)),
        ("rmsnorm: offset is np.False_", lambda: ptxrt.rmsnorm(X, np.ones(64), offset=np.False_)),
        ("swiglu: limit is np.True_", lambda: ptxrt.swiglu(X, limit=np.True_)),
        ("rmsnorm: residual is Quant.*ptxrt.dequantize", lambda: ptxrt.rmsnorm(X, residual=QUANTIZED(X, "mxfp8"))),
        ("out has shape", lambda: ptxrt.gelu(X, out=np.empty((6, 63), np.float32))),
        ("out is .*the result is", lambda: ptxrt.gelu(X, out=QUANTIZED(X[:3], "mxfp8"))),
        ("leave out format", lambda: ptxrt.gelu(X, format="mxfp4", out=QUANTIZED(X, "mxfp8"))),
    ],
)
def test_wrong_calls(words, call):
    with ptxrt.using("emulator"), pytest.raises(ArgumentError, match=words):
        call()


@pytest.mark.parametrize("name", ["rmsnorm", "gelu", "swiglu", "take_rows", "matmul"])
def test_a_scale_layout_beside_out_is_that_of_out(emulator, name):
    x = np.ones((4, 64), np.float32)
    word, call = {
        "take_rows": ("scale_layout", lambda **options: ptxrt.take_rows(x, np.arange(4), **options)),
        "matmul": (
            "out_scale_layout",
            lambda **options: ptxrt.matmul(x, x, a_format="bf16", b_format="bf16", **options),
        ),
    }.get(name, ("scale_layout", lambda **options: getattr(ptxrt, name)(x, **options)))
    prefix = "out_" if name == "matmul" else ""
    made = {f"{prefix}format": "mxfp8"}
    linear, swizzled = call(**made), call(**made, **{word: "128x4"})
    for out, layout in ((linear, "linear"), (swizzled, "128x4"), (swizzled, "linear")):
        assert call(out=out, **{word: layout}) is out
    for wrong, words in (
        ("128x4", f"{word} '128x4'; leave out {word}"),
        ("bogus", "pass 'linear' or '128x4'"),
        (5, "5"),
    ):
        with pytest.raises(ArgumentError, match=words):
            call(out=linear, **{word: wrong})
