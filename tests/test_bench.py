"""`ptxrt bench` and what it is made of: on the stand-in for the driver, whose every time is 0.25 ms, and at tiny sizes on a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from test_driver import cuda, install  # noqa: F401

import fake_cuda  # noqa: E402
import ptxrt
import ptxrt.formats
from ptxrt import backend
from ptxrt.bench import attention as bench_attention
from ptxrt.bench import plots, quantizers, timing
from ptxrt.commands import main

ROOT = Path(__file__).resolve().parent.parent
MACHINE = {"machine", "card", "device", "target", "multiprocessors", "l2_bytes"}
TIMES = {"milliseconds", "fastest", "slowest", "repeat"}
QUANTIZER_ROW = TIMES | {
    *("operation", "format", "global_scale", "dtype", "shape", "axis", "l2", "bytes", "gb_per_s", "copy_gb_per_s", "share_of_copy"),
}
ATTENTION_ROW = TIMES | {
    *("qk", "pv", "dtype", "shape", "causal", "l2", "tflops", "share_of_mma_rate", "mma_tflops", "relative_l2"),
}
LAUNCH_ROW = {"side", "microseconds", "fastest", "slowest", "ratio", "machine", "shape"}

QUANTIZE = ("bench", "quantize", "--shape", "32x64", "--repeat", "2")
ATTENTION = ("bench", "attention", "--shape", "b1h2s32d32", "--repeat", "2")
LAUNCH = ("bench", "launch", "--calls", "2", "--rounds", "3")


def call(*arguments):
    """Run the command line in this process, on the machine that is current."""
    with ptxrt.using(backend.current().name):
        return CliRunner().invoke(main, list(map(str, arguments)))


def report(*arguments):
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refuse(*arguments, part):
    """The call fails with a message that holds `part`, without a traceback."""
    result = call(*arguments)
    assert result.exit_code not in (0, None) and isinstance(result.exception, SystemExit), result.output
    assert part in result.output and "Traceback" not in result.output
    return result.output


# Reports


@pytest.mark.parametrize("operation", ["quantize", "dequantize"])
def test_quantizers_report_every_format_dtype_shape_and_state(cuda, operation):  # noqa: F811
    found = report("bench", operation, "--shape", "32x64", "--shape", "64x128", "--dtype", "f32", "--dtype", "bf16", "--repeat", "2")
    assert set(found) == {"operation", "machine", "rows"} and found["operation"] == operation
    assert found["machine"] == dict(machine="portable", card="Fake GPU", device=0, target="sm_90", multiprocessors=2, l2_bytes=8192)
    sources = ["given", "computed"] if operation == "quantize" else [None]
    sides = [("copy", None), *((f, s) for f in ptxrt.ops.quantize.QUANTIZE for s in (sources if f == "nvfp4" else [None]))]
    wanted = [
        (shape, dtype, state, *side)
        for shape in ([32, 64], [64, 128]) for dtype in ("f32", "bf16") for state in ("warm", "flushed") for side in sides
    ]  # fmt: skip
    assert [(r["shape"], r["dtype"], r["l2"], r["format"], r["global_scale"]) for r in found["rows"]] == wanted
    for row in found["rows"]:
        assert set(row) == QUANTIZER_ROW and row["milliseconds"] == row["fastest"] == row["slowest"] == 0.25 and row["repeat"] == 2
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / 0.25 / 1e6)
        assert row["share_of_copy"] == pytest.approx(row["gb_per_s"] / row["copy_gb_per_s"])
    assert all(r["share_of_copy"] == 1 for r in found["rows"] if r["format"] == "copy")


@pytest.mark.parametrize("axis", [-1, -2])
def test_bytes_are_what_is_read_and_written_each_once(cuda, axis):  # noqa: F811
    rows = quantizers.quantizer_rows("quantize", ["mxfp4", "mxfp6_e3m2", "nvfp4"], ["bf16"], [(64, 128)], axis, ["warm"], 1)
    count = 64 * 128
    x, level, parts = 2 * count, 4, 2 * 4  # amax is written in two parts and read again
    quantized = x + count // 2 + count // 16 + level
    assert {(r["format"], r["global_scale"]): r["bytes"] for r in rows} == {
        ("copy", None): 2 * x,
        ("mxfp4", None): x + count // 2 + count // 32,
        ("mxfp6_e3m2", None): x + count * 3 // 4 + count // 32,
        ("nvfp4", "given"): quantized,
        ("nvfp4", "computed"): quantized + x + 2 * parts + level,
    }


def test_attention_reports_rates_and_errors(cuda):  # noqa: F811
    found = report(*ATTENTION, "--shape", "b1h1q1k64d64", "--dtype", "bf16", "--dtype", "f32")
    assert set(found) == {"operation", "machine", "rows"} and set(found["machine"]) == MACHINE
    rows = found["rows"]
    assert [(r["shape"]["dim"], r["dtype"], r["causal"]) for r in rows] == [
        (dim, dtype, causal) for dim in (32, 64) for dtype in ("bf16", "f32") for causal in (False, True)
    ]  # fmt: skip
    for row in rows:
        assert set(row) == ATTENTION_ROW and (row["qk"], row["pv"]) == ("mxfp4", "bf16") and row["l2"] == "warm"
        assert set(row["mma_tflops"]) == {"mma_rate_bf16"}  # all that the portable machine multiplies with
        assert 0.05 < row["relative_l2"] < 0.5  # that of MXFP4 scores on normal values; a wrong slice gives 1.4
    # 2 heads, 32 x 32 pairs, 32 elements, 2 products of 2 flops, in 0.25 ms; with the mask 33 / 64 of the pairs.
    assert rows[0]["tflops"] == pytest.approx(2 * 32 * 32 * 32 * 4 / 0.25e-3 / 1e12)
    assert rows[1]["tflops"] == pytest.approx(rows[0]["tflops"] * 33 / 64)
    (rate,) = rows[0]["mma_tflops"].values()
    # 2 multiprocessors with 2 blocks of 8 warps each, 8 chains of MMAs of 2 x 16 x 8 x 16 flops.
    assert rate == pytest.approx(4 * 8 * 8 * bench_attention.RATE_STEPS * 4096 / 0.25e-3 / 1e12)
    assert rows[0]["share_of_mma_rate"] == pytest.approx(rows[0]["tflops"] / rate)


def test_native_machines_are_held_against_the_mma_of_each_format(install):  # noqa: F811
    install(fake_cuda.FakeCuda(capability=(12, 0)))
    with ptxrt.using("native"):
        rows = bench_attention.attention_rows(shapes=[bench_attention.Shape.parse("b1h1s32d32")], causal=[True], repeat=1)
    (row,) = rows
    e2m1, bf16 = row["mma_tflops"]["mma_rate_mxf8f6f4_e2m1"], row["mma_tflops"]["mma_rate_bf16"]
    assert e2m1 == 2 * bf16  # by the stand-in, for which everything takes as long
    assert row["share_of_mma_rate"] == pytest.approx(row["tflops"] / 2 * (1 / e2m1 + 1 / bf16))


def test_launches_pair_their_sides(cuda):  # noqa: F811
    found = report(*LAUNCH)
    rows = found["rows"]
    assert set(found["machine"]) == MACHINE and all(set(row) == LAUNCH_ROW for row in rows)
    assert rows[0]["ratio"] == 1 and [row["side"] for row in rows][:4] == [
        *("bare cuLaunchKernel", "prepared quantize", "prepared kernel", "quantize(out=)"),
    ]
    assert all(row["fastest"] <= row["microseconds"] <= row["slowest"] for row in rows)


def test_tables_name_card_machine_and_state(cuda):  # noqa: F811
    text = call(*QUANTIZE, "--format", "mxfp4", "--axis", "-2", "--dtype", "f16").stdout
    assert "quantize along axis -2 on portable, Fake GPU, sm_90, 2 multiprocessors, L2 of 0.0078125 MiB" in text and "medians of 2" in text
    assert [line.split()[:4] for line in text.splitlines()[3:]] == [
        [name, "f16", "32x64", state] for state in ("warm", "flushed") for name in ("copy", "mxfp4")
    ]  # fmt: skip
    text = call(*ATTENTION, "--no-causal").stdout
    assert "attention on portable, Fake GPU" in text and len(text.splitlines()) == 4 and "b1 h2 s32 d32  none" in text
    assert "Fake GPU" in call(*LAUNCH).stdout


# How times are taken


def test_sides_alternate_after_what_their_state_asks_for(cuda):  # noqa: F811
    clock, seen = timing.Clock(repeat=2), []
    sides = {name: lambda name=name: seen.append(name) for name in "ab"}
    assert clock.times(sides, "warm")["a"].samples == (0.25, 0.25)
    assert seen == list("aabb") * (2 + timing.WARM_UP)
    seen.clear()
    cuda.calls.clear()
    clock.times(sides, "flushed")
    assert seen == list("ab") * (2 + timing.WARM_UP)
    launched = [arguments[0].entry.name for name, arguments in cuda.calls if name == "cuLaunchKernel"]
    assert launched == ["amax_f32", "mma_rate_bf16"] * len(seen)
    # Nothing is launched between the events but the call: both are recorded after what keeps the device busy.
    order = [name for name in cuda.names() if name in ("cuLaunchKernel", "cuEventRecord", "cuEventSynchronize")]
    assert order[:4] == ["cuLaunchKernel", "cuLaunchKernel", "cuEventRecord", "cuEventRecord"]


def test_a_clock_uses_the_stream_of_its_calls(cuda):  # noqa: F811
    clock = timing.Clock(stream=4711, repeat=1)
    cuda.calls.clear()
    clock.times({"a": lambda: None}, "flushed")
    assert {int(arguments[8]) for name, arguments in cuda.calls if name == "cuLaunchKernel"} == {4711}
    timed = [arguments for name, arguments in cuda.calls if name == "cuEventRecord" and arguments[0].timed]
    assert {int(stream) for _, stream in timed} == {4711} and len(timed) == 2 * (1 + timing.WARM_UP)


def test_times_know_their_middle_and_spread():
    times = timing.Times((3.0, 1.0, 2.0, 10.0))
    assert times.median == 2.5 and times.spread == "1.0000..10.0000"
    assert times.fields() == dict(milliseconds=2.5, fastest=1.0, slowest=10.0, repeat=4)


# What is refused


@pytest.mark.parametrize("command", [QUANTIZE, ("bench", "dequantize"), ATTENTION, LAUNCH])
def test_the_emulator_is_refused_in_one_line(emulator, command):
    text = refuse(*command, part="the emulator, whose speed says nothing about a GPU; choose a GPU machine")
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("quantize", "--format", "mxfp5"), "mxfp5"),
        (("quantize", "--shape", "64"), "write ROWSxCOLS"),
        (("quantize", "--shape", "0x64"), "write ROWSxCOLS"),
        (("quantize", "--shape", "64x-3"), "write ROWSxCOLS"),
        (("quantize", "--shape", "64x50"), "needs a multiple of 32"),
        (("dequantize", "--shape", "50x64", "--axis", "-2"), "needs a multiple of 32"),
        (("quantize", "--shape", "9999999x9999999"), "pass a smaller shape"),
        (("quantize", "--axis", "0"), "--axis"),
        (("quantize", "--dtype", "f64"), "f64"),
        (("quantize", "--l2", "cold"), "cold"),
        (("quantize", "--repeat", "0"), "pass a number from 1 on"),
        (("attention", "--repeat", "-1"), "pass a number from 1 on"),
        (("attention", "--format", "mxfp4+"), "write QK+PV"),
        (("attention", "--format", "mxfp4+bf16+bf16"), "write QK+PV"),
        (("attention", "--format", "int4+bf16"), "no MMA's rate is known for 'int4'"),
        (("attention", "--format", "bf16+mxfp4", "--shape", "b1h1s32d32"), "no kernel for qk='bf16', pv='mxfp4'"),
        (("attention", "--shape", "b4h32d128"), "write b4h32s2048d128"),
        (("attention", "--shape", "b4h32s32q32k32d128"), "write b4h32s2048d128"),
        (("attention", "--shape", "b4b4h32s32d128"), "write b4h32s2048d128"),
        (("attention", "--shape", "4x32x2048x128"), "write b4h32s2048d128"),
        (("attention", "--shape", "b99999h99999s99999d128"), "pass a smaller shape"),
        (("launch", "--calls", "0"), "0 calls"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_wrong_options_are_refused_in_words(cuda, arguments, words):  # noqa: F811
    refuse("bench", *arguments, part=words)


def test_wrong_choices_are_refused_in_python(cuda):  # noqa: F811
    with pytest.raises(ptxrt.ArgumentError, match="the L2 cannot be 'cold'"):
        quantizers.quantizer_rows("quantize", l2=["cold"])


@pytest.mark.parametrize("text, shape", [("b4h32s2048d128", (4, 32, 32, 2048, 2048, 128)), ("b1 h32 g8 q16 k32768 d128", (1, 32, 8, 16, 32768, 128)), ("d64b1h2k3q4", (1, 2, 2, 4, 3, 64))])  # fmt: skip
def test_shapes_of_attention_are_read_back(text, shape):
    parsed = bench_attention.Shape.parse(text)
    assert parsed == bench_attention.Shape(*shape) == bench_attention.Shape.parse(str(parsed))


# Pictures


@pytest.fixture
def matplotlib():
    return pytest.importorskip("matplotlib")


@pytest.mark.parametrize("command", [QUANTIZE, ("bench", "dequantize", *QUANTIZE[2:]), ATTENTION, LAUNCH], ids=lambda c: c[1])
@pytest.mark.parametrize("suffix, magic", [(".png", b"\x89PNG\r\n\x1a\n"), (".svg", b"<?xml"), (".PDF", b"%PDF")])
def test_pictures_are_written_whole(cuda, matplotlib, tmp_path, command, suffix, magic):  # noqa: F811
    path = tmp_path / f"picture{suffix}"
    result = call(*command, "--plot", path)
    assert result.exit_code == 0 and len(result.stdout.splitlines()) > 2, result.output
    data = path.read_bytes()
    assert data.startswith(magic) and list(tmp_path.iterdir()) == [path]
    if suffix == ".png":
        assert data.endswith(b"IEND\xaeB`\x82")


def test_pictures_say_what_they_show(cuda, matplotlib, tmp_path):  # noqa: F811
    path = tmp_path / "picture.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        assert call(*QUANTIZE, "--plot", path).exit_code == 0
        text = path.read_text()
        for words in ("Fake GPU", "portable", "85%", "L2 flushed", "nvfp4, scale computed", "mxfp8_e5m2", "bf16"):
            assert words in text, words
        assert call(*ATTENTION, "--plot", path).exit_code == 0
    text = path.read_text()
    for words in ("Fake GPU", "mxfp4+bf16", "TFLOPS", "b1 h2 s32 d32 causal", "share of the MMA rate"):
        assert words in text, words


@pytest.mark.parametrize("name, words", [("picture.xyz", "matplotlib writes no .xyz"), ("picture", "file without a suffix"), ("nowhere/picture.png", "there is no folder")])  # fmt: skip
def test_pictures_that_cannot_be_written_are_refused_before_anything_is_measured(cuda, matplotlib, tmp_path, name, words):  # noqa: F811
    refuse(*QUANTIZE, "--plot", tmp_path / name, part=words)
    assert not list(tmp_path.iterdir()) and "cuLaunchKernel" not in cuda.names()


def test_a_picture_without_matplotlib_names_the_extra(cuda, monkeypatch, tmp_path):  # noqa: F811
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    refuse(*QUANTIZE, "--plot", tmp_path / "picture.png", part="pip install 'ptxrt[plots]'")
    assert not list(tmp_path.iterdir())


def test_a_picture_that_fails_leaves_what_was_there(cuda, matplotlib, monkeypatch, tmp_path):  # noqa: F811
    path = tmp_path / "picture.png"
    path.write_bytes(b"before")
    monkeypatch.setattr(plots, "write_atomically", lambda *arguments: (_ for _ in ()).throw(OSError("the disk is full")))
    refuse(*QUANTIZE, "--plot", path, part="the disk is full")
    assert path.read_bytes() == b"before" and list(tmp_path.iterdir()) == [path]


# The scripts in benchmarks/


@pytest.mark.parametrize("script", ["quantize_vs_torch", "attention_vs_torch"])
def test_side_by_side_scripts_say_in_one_line_what_they_lack(script):
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, ROOT / "benchmarks" / f"{script}.py"], env=hidden, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr and done.stdout.startswith("skipped: ") and len(done.stdout.splitlines()) == 1


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_plain_pytorch_quantizers_give_the_same_bytes(emulator, monkeypatch, dtype):
    """What the quantizers are timed against computes the same, ties and zero blocks included."""
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import torch_quantizers

    x = np.random.default_rng(3).standard_normal((64, 96), np.float32) * np.exp2(np.arange(64, dtype=np.float32) - 32)[:, None]
    x[0], x[1, :32] = 0, np.tile([0.25, -0.75, 1.25, 1.75, -2.5, 3.5, 5, 6], 4)
    x = x.astype(ptxrt.formats.FORMATS[dtype].dtype)
    theirs = torch.from_numpy(x.astype(np.float32)).to(torch.float32 if dtype == "f32" else torch.bfloat16)
    scale = torch_quantizers.nvfp4_global_scale(theirs)
    for format, given, peer, arguments in [
        ("mxfp4", None, torch_quantizers.mxfp4, (theirs,)),
        ("nvfp4", None, torch_quantizers.nvfp4_of_own_scale, (theirs,)),
        ("nvfp4", 0.125, torch_quantizers.nvfp4, (theirs, torch.tensor(0.125))),
    ]:
        q = ptxrt.quantize(x, format, global_scale=given)
        if format == "nvfp4" and given is None:
            assert q.global_scale == scale.numpy()
        for ours, got in zip((q.codes, q.scales), peer(*arguments)):
            np.testing.assert_array_equal(got.view(torch.uint8).numpy(), ours.view(np.uint8))


# On a GPU


@pytest.fixture(params=["portable", "native"])
def gpu(request):
    """The GPU machines."""
    there = ptxrt.machines()[request.param]
    if not there.available:
        pytest.skip(str(there))
    with ptxrt.using(request.param) as chosen:
        yield chosen


@pytest.mark.gpu
def test_tiny_shapes_run_on_a_gpu(gpu):
    for operation in ("quantize", "dequantize"):
        for axis in (-1, -2):
            rows = report("bench", operation, "--shape", "64x128", "--axis", axis, "--repeat", "3")["rows"]
            assert all(set(row) == QUANTIZER_ROW and 0 < row["fastest"] <= row["milliseconds"] <= row["slowest"] < 100 for row in rows)
    rows = report("bench", "attention", "--shape", "b1h2s128d64", "--repeat", "3")["rows"]
    assert all(set(row) == ATTENTION_ROW and row["share_of_mma_rate"] > 0 and row["relative_l2"] < 0.5 for row in rows)
    assert report(*LAUNCH)["rows"]


@pytest.mark.gpu
def test_a_clock_counts_the_device_alone(gpu):
    """A host that is late does not count; twice the work takes about twice as long."""
    clock = timing.Clock(repeat=5)
    kernel = ptxrt.kernels()["mma_rate_bf16"]
    a, b = (ptxrt.to_device(np.ones(shape, np.float32).astype("bfloat16")) for shape in ((2, 16, 16), (4, 8, 16)))
    c = kernel(a, b, blocks=1, steps=1)
    once, twice = (lambda: kernel(a, b, c=c, blocks=1, steps=20000)), (lambda: kernel(a, b, c=c, blocks=1, steps=40000))
    times = clock.times({"once": once, "twice": twice})
    assert 1.7 < times["twice"].median / times["once"].median < 2.3
    # An empty call takes next to no time although the host spends some on its events.
    assert clock.times({"nothing": lambda: None})["nothing"].median < 0.02
