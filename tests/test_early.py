"""Launches that begin before the one ahead has ended: what their entries may do before they wait, and graphs of them."""

import re

import ml_dtypes
import numpy as np
import pytest

import fake_cuda
import ptxrt
import sass
from ptxrt import units
from test_driver import cuda, install  # noqa: F401

WAIT = "griddepcontrol.wait"
BF16 = np.dtype(ml_dtypes.bfloat16)


def wrong_before_the_wait(body: str) -> list[str]:
    """Return the instructions of an entry that use global memory, or end a thread, on some way from its begin that has
    not met the wait."""
    lines = [line.split("//")[0].strip() for line in re.split(r"[\n;{}]", body)]
    labels = {match[1]: i for i, line in enumerate(lines) if (match := re.match(r"([$\w]+):", line))}
    wrong, seen, todo = [], set(), [0]
    while todo:
        i = todo.pop()
        if i in seen:
            continue
        seen.add(i)
        if i == len(lines):
            wrong.append("the end")
            continue
        guard, opcode, rest = re.match(r"(?:[$\w]+:\s*)?(@!?%?\w+\s+)?(\S*)\s*(.*)", lines[i]).groups()
        if opcode == WAIT and not guard:
            continue
        if opcode in ("ret", "exit", "trap") or opcode.startswith("brx"):
            wrong.append(lines[i])
        elif opcode.startswith("bra"):
            todo.append(labels[rest.strip()])
            if not guard:
                continue
        elif re.match(r"(ldu?|st|atom|red|cp|call|multimem|wmma|tensormap)\b", opcode):
            local = re.match(r"(ld|st|atom|red)(\.\w+)*?\.(param|const|shared|local)\b", opcode)
            if not local and opcode != "cp.async.commit_group" and not opcode.startswith("cp.async.wait"):
                wrong.append(lines[i])
        todo.append(i + 1)
    return wrong


def bodies(text: str) -> dict[str, str]:
    """Return the bodies of the entries of a text. Inline assembler may have braces of its own, behind no empty line."""
    parts = re.split(r"\.entry\s+(\w+)\s*\(", text)[1:]
    return {name: body.split("{", 1)[1].split("\n\n}")[0] for name, body in zip(parts[::2], parts[1::2])}


@pytest.mark.parametrize("portable", [False, True], ids=["native", "portable"])
def test_entries_wait_before_they_use_memory(portable):
    waiting = set()
    for kernel in ptxrt.kernels().values():
        for unit in kernel.units:
            path = units.text_path(unit.name, portable)
            if not path.is_file() or WAIT not in (text := path.read_text()):
                continue
            recorded = units.launches(unit.name, "compute_90" if portable else "compute_120f")
            for name, body in bodies(text).items():
                assert recorded[name].get("waits", False) == (WAIT in body), name
                if WAIT in body:
                    waiting.add(name)
                    assert not wrong_before_the_wait(body), name
    if portable or units.text_path("norm_rows", False).is_file():
        assert {"norm_rows_bf16", "append_qkv_bf16", "gemm_few_bf16_bf16"} <= waiting


@pytest.mark.parametrize(
    "before, wrong",
    [
        ("ld.param.u64 %rd1, [a]; ld.shared.u32 %r1, [%r2]; prefetch.global.L2 [%rd1];", []),
        ("@%p1 bra L; griddepcontrol.wait; ld.global.u32 %r1, [%rd1]; L: add.u32 %r1, %r1, 1;", []),
        ("@%p1 bra L; griddepcontrol.wait; L: ld.global.u32 %r1, [%rd1];", ["L: ld.global.u32 %r1, [%rd1]"]),
        ("@%p1 ret;", ["@%p1 ret"]),
        ("cp.async.cg.shared.global [%r1], [%rd1], 16;", ["cp.async.cg.shared.global [%r1], [%rd1], 16"]),
        ("st.u32 [%rd1], %r1;", ["st.u32 [%rd1], %r1"]),
        ("call f, (%r1);", ["call f, (%r1)"]),
        ("@%p1 griddepcontrol.wait; red.global.add.u32 [%rd1], 1;", ["red.global.add.u32 [%rd1], 1"]),
    ],
)
def test_what_the_rule_finds(before, wrong):
    assert wrong_before_the_wait(f"{before} griddepcontrol.wait; ld.global.u32 %r1, [%rd1]; ret;") == wrong


@pytest.mark.parametrize(
    "lines, wrong",
    [
        (
            ["ISETP.NE.AND P0, PT, R2, RZ, PT", "@P0 BRA 0x0030", "ACQBULK", "LDG.E R2, desc[UR4][R2.64]"],
            ["LDG.E", "EXIT"],
        ),
        (["LDC.64 R2, c[0x0][0x210]", "LDS R4, [R5]", "ACQBULK", "@P0 LDG.E.CONSTANT R2, desc[UR4][R2.64]"], []),
        (["@P0 LDG.E.128.CONSTANT R4, desc[UR4][R2.64]", "ACQBULK"], ["LDG.E.128.CONSTANT"]),
        (["@P0 EXIT", "ACQBULK"], ["EXIT"]),
        (["BRA 0x0020", "LDGSTS.E [R2], desc[UR4][R2.64]", "ACQBULK", "STG.E desc[UR4][R2.64], R0"], []),
    ],
)
def test_what_the_rule_finds_in_machine_code(lines, wrong):
    listing = "".join(f"        /*{16 * i:04x}*/  {line} ;\n" for i, line in enumerate([*lines, "EXIT"]))
    (code,) = sass.parse(f"Function : entry\n{listing}").values()
    assert [one.opcode for one in sass.before_the_wait(code)] == wrong


def test_graphs_launch_early(cuda):
    """Entries that wait, in a graph; all others and single launches outside of graphs are plain launches."""
    x = ptxrt.to_device(np.arange(64, dtype=np.float32).reshape(2, 32).astype(BF16))
    ptxrt.rmsnorm(x)
    assert "cuLaunchKernelEx" not in cuda.names() and "cuLaunchKernel" in cuda.names()
    cuda.calls.clear()
    with ptxrt.graph() as graph:
        y = ptxrt.rmsnorm(x)
        z = y.T.copy()
    names = cuda.names()
    early = [name for name in names if name == "cuLaunchKernelEx"]
    assert len(early) == units.launches("norm_rows", "compute_90")["norm_rows_bf16"].get("waits", False)
    assert names.count("cuLaunchKernel") + len(early) >= 2
    graph.launch()
    assert (z.to_numpy() == y.to_numpy().T).all()


def attention_of_split_keys(repeat: int = 1, **options) -> list[np.ndarray]:
    """Return results of one call that takes two launches, of which the second, the merge, waits."""
    rng = np.random.default_rng(3)
    q, k = (ptxrt.to_device(rng.standard_normal((1, 2, n, 64), np.float32).astype(BF16)) for n in (1, 1300))
    return [ptxrt.attention(q, k, k, qk="bf16", pv="bf16", **options) for _ in range(repeat)]


def launches_of(cuda) -> list[tuple[str, str, int]]:
    """Return function, entry and stream of each launch."""
    places = {"cuLaunchKernel": lambda a: (a[0], a[8]), "cuLaunchKernelEx": lambda a: (a[1], a[0].hStream)}
    found = [(name, *places[name](a)) for name, a in cuda.calls if name in places]
    return [(name, function.entry.name.split("_")[1], int(stream)) for name, function, stream in found]


def test_later_launches_of_a_recorded_call_begin_early(cuda):
    """Where the launch ahead in the stream is the same call's. A call is recorded at its second occurrence."""
    streams = [ptxrt.Stream() for _ in range(2)]
    turns = [streams[i] for i in (0, 0, 0, 1, 1, 0)]
    results = []
    for stream in turns:
        cuda.calls.clear()
        with stream:
            results += attention_of_split_keys()
        plain, early = "cuLaunchKernel", "cuLaunchKernelEx"
        handle, second = stream.queue.handle, early if len(results) > 1 else plain
        assert launches_of(cuda) == [(plain, "bf16", handle), (second, "merge", handle)]
    first, *others = (result.to_numpy() for result in results)
    assert all((other == first).all() for other in others) and np.isfinite(first.astype(np.float32)).all()


@pytest.mark.parametrize("waits", [False, True])
def test_later_launches_of_a_prepared_call_begin_early_if_they_wait(install, monkeypatch, waits):
    """The text of a device before sm_90 has no waits."""
    launches = units.launches

    def without_waits(*of):
        return {name: {key: launch[key] for key in launch if key != "waits"} for name, launch in launches(*of).items()}

    if not waits:
        monkeypatch.setattr(units, "launches", without_waits)
    fake = install(fake_cuda.FakeCuda(capability=(9, 0)))
    with ptxrt.using("portable"):
        rng = np.random.default_rng(3)
        q, k = (ptxrt.to_device(rng.standard_normal((1, 2, n, 64), np.float32).astype(BF16)) for n in (1, 1300))
        prepared = ptxrt.prepare(ptxrt.attention, q, k, k, qk="bf16", pv="bf16")
        fake.calls.clear()
        prepared(q, k, k)
        second = "cuLaunchKernelEx" if waits else "cuLaunchKernel"
        assert [name for name, *_ in launches_of(fake)] == ["cuLaunchKernel", second]


def test_the_first_launch_of_a_call_is_plain(install):
    """What is ahead of it is unknown, also where its entry waits."""
    fake = install(fake_cuda.FakeCuda(capability=(9, 0)))
    with ptxrt.using("portable"):
        x = ptxrt.to_device(np.random.default_rng(3).standard_normal((4, 64), np.float32).astype(BF16))
        prepared = ptxrt.prepare(lambda x: ptxrt.rmsnorm(ptxrt.rmsnorm(x)), x)
        fake.calls.clear()
        prepared(x)
        assert [name for name, *_ in launches_of(fake)] == ["cuLaunchKernel", "cuLaunchKernelEx"]


def test_a_refused_early_launch_is_made_plainly(cuda):
    want = attention_of_split_keys()[0].to_numpy()
    cuda.fail["cuLaunchKernelEx"] = cuda.CUresult.CUDA_ERROR_NOT_SUPPORTED
    results = attention_of_split_keys(3)
    assert "cuLaunchKernelEx" in cuda.names() and all((result.to_numpy() == want).all() for result in results)


@pytest.mark.gpu
def test_graphs_of_early_launches_have_the_bits_of_calls(gpu):
    """Arrays are written right after they were read, and read right after they were written, weights among them."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape, np.float32).astype(BF16)
    host = dict(x=draw(1, 576), y=draw(1, 576), w=draw(576, 576), v=draw(576, 576), h=draw(1, 1536), up=draw(3072, 576))
    host |= dict(down=draw(576, 1536), norm=rng.standard_normal(576, np.float32))

    def step(x, y, w, v, h, up, down, norm):
        for one, other in ((w, v), (v, w)):
            for _ in range(4):
                ptxrt.rmsnorm(x, out=y)
                ptxrt.matmul(y, one, out=x)  # writes what the launch before has read
                ptxrt.rmsnorm(x, out=y)
                ptxrt.matmul(y, up, activation="swiglu", out=h)
                ptxrt.matmul(h, down, out=x)
                ptxrt.rmsnorm(x, out=y)
                ptxrt.matmul(y, other, out=x)
                ptxrt.matmul(x, up, a_norm=norm, activation="swiglu", out=h)
                ptxrt.matmul(h, down, residual=x, out=x)
            ptxrt.rmsnorm(one, out=other)  # the weights of the next launches
            ptxrt.matmul(y, other, out=x)

    sides = [{name: ptxrt.to_device(value) for name, value in host.items()} for _ in range(2)]
    with ptxrt.graph() as graph:
        step(**sides[0])
    for turn in range(300):
        graph.launch()
        step(**sides[1])
        if turn % 20 == 0 or turn > 290:
            for name in host:
                got, want = (side[name].to_numpy().view(np.uint8) for side in sides)
                assert (got == want).all(), (turn, name)


@pytest.mark.gpu
def test_early_launches_of_calls_have_the_bits_of_plain_ones(gpu):
    """Launches under a trace are plain. Calls of one shape alternate, so that segments' memory holds those of another
    call."""
    rng = np.random.default_rng(1)
    draw = lambda *shape: ptxrt.to_device(rng.standard_normal(shape, np.float32).astype(BF16))
    shapes = [(h, d, n) for h, d in ((8, 128), (2, 64)) for n in (1300, 4096, 32768)]
    calls = [(draw(1, h, 1, d), draw(1, h, n, d)) for h, d, n in shapes for _ in range(2)]
    outs = [ptxrt.empty(q.shape, q.dtype) for q, _ in calls]

    def step():
        for (q, k), out in zip(calls, outs):
            ptxrt.attention(q, k, k, qk="bf16", pv="bf16", out=out)

    with ptxrt.trace():
        step()
    want = [out.to_numpy().view(np.uint16) for out in outs]
    for turn in range(300):
        step()
        if turn % 20 == 0 or turn > 290:
            for i, out in enumerate(outs):
                assert (out.to_numpy().view(np.uint16) == want[i]).all(), (turn, i)
