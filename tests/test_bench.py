"""`ptxrt bench` and its parts: on the stand-in for the driver, where every measured time is 0.25 ms, and at tiny sizes
on a GPU."""

import json
import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

import fake_cuda
import ptxrt
import ptxrt.formats
from ptxrt import selection
from ptxrt.bench import attention as bench_attention
from ptxrt.bench import plots, producers, products, quantizers, rates, timing
from ptxrt.commands import main
from ptxrt.tiles import tile_layout
from test_driver import cuda, install  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def without_cupy_on_the_stand_in(request, monkeypatch):
    """If CuPy is installed, it would take the stand-in's host addresses for device addresses."""
    if "cuda" in request.fixturenames:
        monkeypatch.setitem(sys.modules, "cupy", None)


MACHINE_OF_TABLES = dict(machine="portable", card="a card", device=0, target="sm_90", multiprocessors=1, l2_bytes=2**20)
MACHINE = {"machine", "card", "device", "target", "multiprocessors", "l2_bytes"}
TIMES = {"milliseconds", "fastest", "slowest", "repeat"}
QUANTIZER_ROW = TIMES | {
    "operation",
    "format",
    "global_scale",
    "dtype",
    "shape",
    "axis",
    "l2",
    "bytes",
    "gb_per_s",
    "copy_gb_per_s",
    "share_of_copy",
}
ATTENTION_ROW = TIMES | {
    "qk",
    "pv",
    "operands",
    "dtype",
    "shape",
    "causal",
    "l2",
    "tflops",
    "share_of_mma_rate",
    "mma_tflops",
    "relative_l2",
    *("bytes", "gb_per_s", "copy_gb_per_s", "share_of_copy", "refused"),
}
LAUNCH_ROW = {"side", "microseconds", "fastest", "slowest", "ratio", "machine", "shape"}

QUANTIZE = ("bench", "quantize", "--shape", "32x64", "--repeat", "2")
ATTENTION = ("bench", "attention", "--shape", "b1h2s32d32", "--repeat", "2")
# What `bench attention` measures by default: formats of the two products, and the kind of operands.
SIDES = [
    *(("bf16", "bf16", "arrays"), ("f16", "f16", "arrays")),
    *(
        (*pair, operands)
        for pair in (("mxfp8", "mxfp8"), ("nvfp4", "nvfp4"), ("nvfp4", "mxfp8"), ("nvfp4", "bf16"))
        for operands in ("quantized", "arrays")
    ),
    *(
        (*pair, operands)
        for pair in (("mxfp8", "bf16"), ("mxfp4", "mxfp4"), ("mxfp4", "mxfp8"), ("mxfp4", "bf16"))
        for operands in ("quantized", "arrays")
    ),
    ("mxfp4", "bf16", "in_kernel"),
]
# Quantizing of operands, which is timed separately.
PROLOGUES = [(qk, pv, "prologue") for qk, pv, operands in SIDES if operands == "quantized"]
# Bounds of relative L2 for normal values with few keys: half of the smallest and twice the largest value observed at
# the shapes below. A wrong slice gives 1.4.
ERRORS = {
    ("bf16", "bf16"): (7e-4, 7e-3),
    ("f16", "f16"): (7e-4, 7e-3),
    ("mxfp8", "mxfp8"): (0.02, 0.13),
    ("nvfp4", "nvfp4"): (0.06, 0.32),
    ("nvfp4", "mxfp8"): (0.05, 0.27),
    ("nvfp4", "bf16"): (0.05, 0.27),
    ("mxfp8", "bf16"): (0.01, 0.13),
    ("mxfp4", "mxfp4"): (0.08, 0.48),
    ("mxfp4", "mxfp8"): (0.05, 0.40),
    ("mxfp4", "bf16"): (0.05, 0.32),
}
LAUNCH = ("bench", "launch", "--calls", "2", "--rounds", "3")
PRODUCT_ROW = TIMES | {
    *("a", "b", "shape", "l2", "weights", "tflops", "mma_tflops", "share_of_mma_rate", "relative_l2"),
    *("bytes", "gb_per_s", "read_gb_per_s", "share_of_read", "node_read_gb_per_s", "share_of_node_read"),
    "stream_milliseconds",
}
GEMM = ("bench", "gemm", "--shape", "m70n40k64", "--repeat", "2")
# Bounds of relative L2 for products of normal values, chosen like ERRORS.
PRODUCT_ERRORS = {
    **{"bf16": (1e-3, 6e-3), "f16": (1e-3, 6e-3), "mxfp8": (0.01, 0.1)},
    **{"mxfp4": (0.05, 0.4), "nvfp4": (0.03, 0.3)},
}


def call(*arguments):
    """Run the command line in this process, on the current machine."""
    with ptxrt.using(selection.current().name):
        return CliRunner().invoke(main, list(map(str, arguments)))


def report(*arguments):
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refuse(*arguments, part):
    """Check that the call fails with a message that contains `part`, without a traceback."""
    result = call(*arguments)
    assert result.exit_code not in (0, None) and isinstance(result.exception, SystemExit), result.output
    assert part in result.output and "Traceback" not in result.output
    return result.output


# Reports


@pytest.mark.parametrize("operation", ["quantize", "dequantize"])
def test_quantizers_report_every_format_dtype_shape_and_state(cuda, operation):
    found = report(
        "bench",
        operation,
        "--shape",
        "32x64",
        "--shape",
        "64x128",
        "--dtype",
        "f32",
        "--dtype",
        "bf16",
        "--repeat",
        "2",
    )
    assert set(found) == {"operation", "machine", "rows"} and found["operation"] == operation
    assert found["machine"] == dict(
        machine="portable", card="Fake GPU", device=0, target="sm_90", multiprocessors=2, l2_bytes=8192
    )
    sources = ["given", "computed"] if operation == "quantize" else [None]
    sides = [
        ("copy", None),
        *((f, s) for f in ptxrt.ops.quantize.QUANTIZE for s in (sources if f == "nvfp4" else [None])),
    ]
    wanted = [
        (shape, dtype, state, *side)
        for shape in ([32, 64], [64, 128]) for dtype in ("f32", "bf16") for state in ("warm", "flushed") for side in sides
    ]  # fmt: skip
    assert [(r["shape"], r["dtype"], r["l2"], r["format"], r["global_scale"]) for r in found["rows"]] == wanted
    for row in found["rows"]:
        assert (
            set(row) == QUANTIZER_ROW
            and row["milliseconds"] == row["fastest"] == row["slowest"] == 0.25
            and row["repeat"] == 2
        )
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / 0.25 / 1e6)
        assert row["share_of_copy"] == pytest.approx(row["gb_per_s"] / row["copy_gb_per_s"])
    assert all(r["share_of_copy"] == 1 for r in found["rows"] if r["format"] == "copy")


@pytest.mark.parametrize("axis", [-1, -2])
def test_bytes_are_what_is_read_and_written_each_once(cuda, axis):
    rows = quantizers.quantizer_rows(
        "quantize", ["mxfp4", "mxfp6_e3m2", "nvfp4"], ["bf16"], [(64, 128)], axis, ["warm"], 1
    )
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


def test_attention_reports_rates_and_errors(cuda):
    found = report(*ATTENTION, "--shape", "b1h1q1k64d64", "--dtype", "bf16", "--dtype", "f32")
    assert set(found) == {"operation", "machine", "rows"} and set(found["machine"]) == MACHINE
    rows = found["rows"]
    assert [(r["shape"]["dim"], r["dtype"], r["causal"], r["qk"], r["pv"], r["operands"]) for r in rows] == [
        (dim, dtype, causal, *side)
        for dim in (32, 64)
        for dtype in ("bf16", "f32")
        for causal, sides in ([(None, PROLOGUES), (False, SIDES), (True, SIDES)] if dim == 32 else [(False, SIDES)])
        for side in sides
    ]
    for row in rows:
        decodes = row["shape"]["dim"] == 64
        assert set(row) == ATTENTION_ROW and row["l2"] == ("flushed" if decodes else "warm")
        if decodes or row["causal"] is None:
            assert row["gb_per_s"] == pytest.approx(row["bytes"] / 0.25 / 1e6)
            assert row["share_of_copy"] == pytest.approx(row["gb_per_s"] / row["copy_gb_per_s"])
        else:
            assert row["bytes"] is row["gb_per_s"] is row["copy_gb_per_s"] is row["share_of_copy"] is None
        if row["causal"] is None:
            assert row["tflops"] is row["share_of_mma_rate"] is row["relative_l2"] is None and row["mma_tflops"] == {}
            continue
        assert set(row["mma_tflops"]) == {"mma_rate_bf16"}  # the portable machine multiplies with this alone
        least, most = ERRORS[row["qk"], row["pv"]]
        assert least < row["relative_l2"] < most
    # Decoding moves Q, K, V and the output: K and V of 64 keys, one query and one result, of 64 elements of 2 bytes.
    assert next(r["bytes"] for r in rows if r["shape"]["dim"] == 64) == 2 * 64 * (64 + 64 + 1 + 1)
    # 2 heads, 32 x 32 pairs, 32 elements, 2 products of 2 flops, in 0.25 ms; the causal mask leaves 33 / 64 of the
    # pairs.
    plain, masked = (next(r for r in rows if r["causal"] is causal) for causal in (False, True))
    assert plain["tflops"] == pytest.approx(2 * 32 * 32 * 32 * 4 / 0.25e-3 / 1e12)
    assert masked["tflops"] == pytest.approx(plain["tflops"] * 33 / 64)
    (rate,) = plain["mma_tflops"].values()
    # 2 multiprocessors with 2 blocks of 8 warps each, 8 chains of MMAs of 2 x 16 x 8 x 16 flops.
    assert rate == pytest.approx(4 * 8 * 8 * rates.RATE_STEPS * 4096 / 0.25e-3 / 1e12)
    assert plain["share_of_mma_rate"] == pytest.approx(plain["tflops"] / rate)


def test_quantized_operands_are_those_that_a_call_on_arrays_makes(cuda):
    rows = report(*ATTENTION, "--format", "nvfp4+mxfp8", "--format", "mxfp4")["rows"]
    given, arrays = ([r for r in rows if r["operands"] == operands] for operands in ("quantized", "arrays"))
    assert len(given) == len(arrays) == 4
    assert [r["relative_l2"] for r in given] == [r["relative_l2"] for r in arrays]


def test_what_attention_refuses_is_a_row_that_says_why(cuda, monkeypatch):
    prepared = ptxrt.bench.attention._prepared

    def refusing(given, side, masked, out):
        if side[:2] == ("mxfp4", "bf16"):
            raise ptxrt.ArgumentError("attention: not these heads\nand more")
        return prepared(given, side, masked, out)

    monkeypatch.setattr(ptxrt.bench.attention, "_prepared", refusing)
    grouped = ("bench", "attention", "--repeat", "1", "--no-causal", "--shape", "b1h2g1s32d32")
    rows = report(*grouped, "--format", "bf16", "--format", "mxfp4+bf16")["rows"]
    assert all(set(row) == ATTENTION_ROW for row in rows)
    rows = [row for row in rows if row["operands"] != "prologue"]
    assert [(r["qk"], r["pv"], r["operands"], r["refused"] is None, r["tflops"] is None) for r in rows] == [
        ("bf16", "bf16", "arrays", True, False),
        *(("mxfp4", "bf16", operands, False, True) for operands in ("quantized", "arrays", "in_kernel")),
    ]
    assert rows[1]["refused"] == "attention: not these heads"
    lines = call(*grouped, "--format", "bf16", "--format", "mxfp4+bf16").stdout.splitlines()
    said = [f"refused: {rows[1]['refused']}" in line for line in lines[-5:]]
    assert said == [False, False, True, True, True]
    refuse(*grouped, "--format", "mxfp4+bf16", part="not these heads")


@pytest.mark.parametrize("operands, packs", [("quantized", 0), ("arrays", 2)])
def test_quantized_operands_leave_the_kernel_alone_to_be_timed(cuda, operands, packs):
    arrays = [ptxrt.to_device(x) for x in bench_attention.Shape.parse("b1h1s32d64").arrays()]
    side = ("mxfp4", "mxfp4", operands)
    call = bench_attention._prepared(
        bench_attention._given(arrays, side), side, True, ptxrt.empty((1, 1, 32, 64), np.float32)
    )
    cuda.calls.clear()
    call()
    names = [arguments[0].entry.name for name, arguments in cuda.calls if name == "cuLaunchKernel"]
    assert [name.split("_")[0] for name in names].count("pack") == packs and names[-1].startswith("attention_mxfp4")
    assert operands == "arrays" or len(names) == 1


def test_every_attention_is_measured():
    assert set(ptxrt.ops.attention.ATTENTION) == {
        (qk, pv, bench_attention.quantize_of(operands)) for qk, pv, operands in SIDES
    }
    assert [
        (*pair, given) for pair in bench_attention.COMBINATIONS for given in bench_attention.operands_of(pair)
    ] == SIDES


def test_native_machines_are_held_against_the_mma_of_each_product(install):
    install(fake_cuda.FakeCuda(capability=(12, 0)))
    with ptxrt.using("native"):
        rows = bench_attention.attention_rows(
            shapes=[bench_attention.Shape.parse("b1h1s32d32")], causal=[True], repeat=1
        )
    rows = [row for row in rows if row["operands"] != "prologue"]
    assert len(rows) == len(SIDES)
    by_formats = {(row["qk"], row["pv"]): row for row in rows}
    bf16 = by_formats["bf16", "bf16"]["mma_tflops"]["mma_rate_bf16"]
    # Rates relative to bf16's. On the stand-in all launches take the same time, so these are the depths of the
    # instructions.
    depths = {
        "mma_rate_bf16": 1,
        "mma_rate_mxf8f6f4_e2m1": 2,
        "mma_rate_mxf8f6f4_e4m3": 2,
        "mma_rate_mxf4": 4,
        "mma_rate_mxf4nvf4": 4,
    }
    for pair, products in {
        ("bf16", "bf16"): ("bf16", "bf16"),
        ("f16", "f16"): ("bf16", "bf16"),
        ("mxfp8", "mxfp8"): ("mxf8f6f4_e4m3", "mxf8f6f4_e4m3"),
        ("nvfp4", "nvfp4"): ("mxf4nvf4", "mxf4nvf4"),
        ("nvfp4", "mxfp8"): ("mxf4nvf4", "mxf8f6f4_e4m3"),
        ("nvfp4", "bf16"): ("mxf4nvf4", "bf16"),
        ("mxfp8", "bf16"): ("mxf8f6f4_e4m3", "bf16"),
        ("mxfp4", "mxfp8"): ("mxf4", "mxf8f6f4_e4m3"),
        ("mxfp4", "mxfp4"): ("mxf4", "mxf4"),
        ("mxfp4", "bf16"): ("mxf4", "bf16"),
    }.items():
        row, names = by_formats[pair], [f"mma_rate_{product}" for product in products]
        assert row["mma_tflops"] == {name: depths[name] * bf16 for name in names}
        assert row["share_of_mma_rate"] == pytest.approx(
            row["tflops"] / bf16 * sum(1 / depths[name] for name in names) / 2
        )


def test_few_rows_are_nodes_of_a_graph(cuda, monkeypatch):
    found, gathered = [], products.Side.gathered
    monkeypatch.setattr(products.Side, "gathered", lambda side: found.append((side, gathered(side))) or found[-1][1])
    report(*GEMM, "--shape", "m1n64k64", "--format", "bf16")
    ((side, launch),) = found  # of the one shape of few rows
    assert len(launch.__self__.launches) == side.weights > 1


def test_reads_of_a_graph_are_of_different_memory(cuda, monkeypatch):
    nodes, read, amax = [], [], products.amax

    def read_nodes(nbytes, count, backend):
        with monkeypatch.context() as inside:
            inside.setattr(products, "amax", lambda x, **named: read.append((x.address, x.nbytes)) or amax(x, **named))
            nodes.append((nbytes, count, of_reads(nbytes, count, backend)))
        return nodes[-1][2]

    of_reads = products.read_nodes
    monkeypatch.setattr(products, "read_nodes", read_nodes)
    report(*GEMM, "--shape", "m1n64k64", "--format", "mxfp4")
    ((nbytes, count, launch),) = nodes
    assert nbytes == 64 * (32 + 2) and count == len(launch.__self__.launches) == -(-4 * 8192 // nbytes)
    assert len(set(read)) == count and {size for _, size in read} == {nbytes}


def test_products_report_rates_of_mmas_and_of_weights(cuda):
    found = report(*GEMM, "--shape", "m1n64k64")
    rows, pairs = found["rows"], list(products.PRODUCTS)
    assert set(found) == {"operation", "machine", "rows"} and set(found["machine"]) == MACHINE
    wanted = [(rows_of_c, *pair) for rows_of_c in (70, 1) for pair in pairs]
    assert [(r["shape"]["rows"], r["a"], r["b"]) for r in rows] == wanted
    for row in rows:
        few = row["shape"]["rows"] == 1
        assert set(row) == PRODUCT_ROW and row["l2"] == ("rotating" if few else "warm")
        flops = 2 * row["shape"]["rows"] * row["shape"]["cols"] * 64
        assert row["milliseconds"] == pytest.approx(0.25 / row["weights"])
        assert row["tflops"] == pytest.approx(flops / (0.25e-3 / row["weights"]) / 1e12)
        (rate,) = row["mma_tflops"].values()
        assert row["share_of_mma_rate"] == pytest.approx(row["tflops"] / rate)
        least, most = (max(PRODUCT_ERRORS[x][i] for x in (row["a"], row["b"])) for i in range(2))
        assert least < row["relative_l2"] < 2 * most, row
        if not few:
            assert row["weights"] == 1 and row["bytes"] is row["gb_per_s"] is row["share_of_read"] is None
            assert row["stream_milliseconds"] is None
            continue
        block = ptxrt.blocks.BLOCK_FORMATS.get(row["b"])
        nbytes = 64 * 64 * 2 if block is None else 64 * (64 * block.bits // 8 + 64 // block.block)
        assert row["bytes"] == nbytes and row["weights"] == -(-4 * 8192 // nbytes)
        assert row["gb_per_s"] == pytest.approx(nbytes * row["weights"] / 0.25 / 1e6)
        assert row["share_of_read"] == row["share_of_node_read"] == pytest.approx(1)
        assert row["node_read_gb_per_s"] == pytest.approx(row["gb_per_s"])
        assert row["stream_milliseconds"] == pytest.approx(0.25 / row["weights"])


def test_producers_report_every_function_and_format(cuda):
    options = ("--l2", "warm", "--repeat", "1", "--format", "bf16", "--format", "nvfp4")
    found = report("bench", "produce", "--shape", "2x128", *options)
    rows, names = found["rows"], [*producers.FUNCTIONS]
    assert set(found) == {"machine", "rows", "tokens"} and set(found["machine"]) == MACHINE
    assert {(r["function"], r["format"]) for r in rows} == {("copy", "bf16"), *product(names, ("bf16", "nvfp4"))}
    assert [row["function"] for row in found["tokens"]] == [producers.BARE, *names]
    for row in found["tokens"]:
        assert row["node"] == 0.25e3 / producers.IN_TURN and row["times_node"] == 1 and row["repeat"] == 1
        assert row["call"] > 0 and row["times_call"] == pytest.approx(row["call"] / found["tokens"][0]["call"])
    moved = {(r["function"], r["format"]): r["bytes"] for r in rows}
    assert moved["copy", "bf16"] == moved["gelu", "bf16"] == 2 * 2 * 128 * 2
    assert moved["gelu", "nvfp4"] == 2 * (2 * 128 + 64 + 8) + 4
    assert moved["append_qkv", "nvfp4"] == 2 * 128 * (48 * 2 + 32 * 2) + 2 * 16 * (64 + 8)
    for row in rows:
        assert row["shape"] == [2, 128] and row["milliseconds"] == 0.25
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / 0.25 / 1e6)
        assert row["share_of_copy"] == pytest.approx(row["gb_per_s"] / row["copy_gb_per_s"])


def test_launches_pair_their_sides(cuda):
    found = report(*LAUNCH)
    rows = found["rows"]
    assert set(found["machine"]) == MACHINE and all(set(row) == LAUNCH_ROW for row in rows)
    assert rows[0]["ratio"] == 1 and [row["side"] for row in rows][:4] == [
        *("bare cuLaunchKernel", "prepared quantize", "prepared kernel", "quantize(out=)"),
    ]
    assert all(row["fastest"] <= row["microseconds"] <= row["slowest"] for row in rows)


def test_tables_name_card_machine_and_state(cuda):
    text = call(*QUANTIZE, "--format", "mxfp4", "--axis", "-2", "--dtype", "f16").stdout
    assert (
        "quantize along axis -2 on portable, Fake GPU, sm_90, 2 multiprocessors, L2 of 0.0078125 MiB" in text
        and "medians of 2" in text
    )
    assert [line.split()[:4] for line in text.splitlines()[3:]] == [
        [name, "f16", "32x64", state] for state in ("warm", "flushed") for name in ("copy", "mxfp4")
    ]  # fmt: skip
    text = call(*ATTENTION, "--no-causal").stdout
    lines = text.splitlines()
    shown = PROLOGUES + SIDES
    assert "attention on portable, Fake GPU" in text and len(lines) == 3 + len(shown)
    assert [tuple(line.split()[:3]) for line in lines[3:]] == [
        (f"{qk}+{pv}", operands, "bf16") for qk, pv, operands in shown
    ]
    assert all(
        f"b1 h2 s32 d32  {mask}" in line
        for line, mask in zip(lines[3:], ["any "] * len(PROLOGUES) + ["none"] * len(SIDES))
    )
    assert "Fake GPU" in call(*LAUNCH).stdout


# Timing


def test_sides_alternate_after_what_their_state_asks_for(cuda):
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
    # Only the call is launched between the events: both are recorded after the work that keeps the device busy.
    order = [name for name in cuda.names() if name in ("cuLaunchKernel", "cuEventRecord", "cuEventSynchronize")]
    assert order[:4] == ["cuLaunchKernel", "cuLaunchKernel", "cuEventRecord", "cuEventRecord"]


def test_a_clock_uses_the_stream_of_its_calls(cuda):
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


# Refusals


@pytest.mark.parametrize("command", [QUANTIZE, ("bench", "dequantize"), ATTENTION, LAUNCH, GEMM, ("bench", "produce")])
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
        (("attention", "--format", "int4+bf16"), "there is no attention in int4+bf16; there is bf16+bf16"),
        (("attention", "--format", "bf16+mxfp4", "--shape", "b1h1s32d32"), "there is no attention in bf16+mxfp4"),
        (("attention", "--shape", "b4h32d128"), "write b4h32s2048d128"),
        (("attention", "--shape", "b4h32s32q32k32d128"), "write b4h32s2048d128"),
        (("attention", "--shape", "b4b4h32s32d128"), "write b4h32s2048d128"),
        (("attention", "--shape", "4x32x2048x128"), "write b4h32s2048d128"),
        (("attention", "--shape", "b99999h99999s99999d128"), "pass a smaller shape"),
        (("launch", "--calls", "0"), "0 calls"),
        (("gemm", "--format", "nvfp4+mxfp8"), "there is no product 'nvfp4+mxfp8'; write A+B, of which there is bf16+bf16"),
        (("gemm", "--shape", "8192x8192x8192"), "write m8192n8192k8192"),
        (("gemm", "--shape", "m9999999n9999999k9999"), "pass a smaller shape"),
        (("gemm", "--repeat", "0"), "pass a number from 1 on"),
        (("produce", "--function", "silu"), "function is 'silu'; there are 'rmsnorm'"),
        (("produce", "--format", "mxfp6_e3m2"), "format is 'mxfp6_e3m2'; there are 'bf16'"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_wrong_options_are_refused_in_words(cuda, arguments, words):
    refuse("bench", *arguments, part=words)


def test_wrong_choices_are_refused_in_python(cuda):
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


PRODUCE = ("bench", "produce", "--shape", "2x128", "--l2", "warm", "--repeat", "1", "--function", "gelu")


PNG, SVG, PDF = (".png", b"\x89PNG\r\n\x1a\n"), (".svg", b"<?xml"), (".PDF", b"%PDF")


# Every command, and every kind of file: what writes the file is the same for all commands.
@pytest.mark.parametrize(
    "command, suffix, magic",
    [
        (QUANTIZE, *PNG),
        (("bench", "dequantize", *QUANTIZE[2:]), *SVG),
        (ATTENTION, *PDF),
        (LAUNCH, *PNG),
        (LAUNCH, *SVG),
        (LAUNCH, *PDF),
        (GEMM, *SVG),
        (PRODUCE, *PDF),
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) else value if isinstance(value, str) else "",
)
def test_pictures_are_written_whole(cuda, matplotlib, tmp_path, command, suffix, magic):
    path = tmp_path / f"picture{suffix}"
    result = call(*command, "--plot", path)
    assert result.exit_code == 0 and len(result.stdout.splitlines()) > 2, result.output
    data = path.read_bytes()
    assert data.startswith(magic) and list(tmp_path.iterdir()) == [path]
    if suffix == ".png":
        assert data.endswith(b"IEND\xaeB`\x82")


def test_pictures_say_what_they_show(cuda, matplotlib, tmp_path):
    path = tmp_path / "picture.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        assert call(*QUANTIZE, "--plot", path).exit_code == 0
        text = path.read_text()
        for words in ("Fake GPU", "portable", "85%", "L2 flushed", "nvfp4, scale computed", "mxfp8_e5m2", "bf16"):
            assert words in text, words
        assert call(*ATTENTION, "--plot", path).exit_code == 0
    text = path.read_text()
    for words in (
        "Fake GPU",
        "mxfp4+bf16",
        "nvfp4+mxfp8",
        "arrays",
        "quantized",
        "TFLOPS",
        "b1 h2 s32 d32 causal",
        "share of the MMA rate",
    ):
        assert words in text, words


@pytest.mark.parametrize("name, words", [("picture.xyz", "matplotlib writes no .xyz"), ("picture", "file without a suffix"), ("nowhere/picture.png", "there is no folder")])  # fmt: skip
def test_pictures_that_cannot_be_written_are_refused_before_anything_is_measured(
    cuda, matplotlib, tmp_path, name, words
):
    refuse(*QUANTIZE, "--plot", tmp_path / name, part=words)
    assert not list(tmp_path.iterdir()) and "cuLaunchKernel" not in cuda.names()


def test_a_picture_without_matplotlib_names_the_extra(cuda, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    refuse(*QUANTIZE, "--plot", tmp_path / "picture.png", part="pip install 'ptxrt[plots]'")
    assert not list(tmp_path.iterdir())


def test_a_picture_that_fails_leaves_what_was_there(cuda, matplotlib, monkeypatch, tmp_path):
    path = tmp_path / "picture.png"
    path.write_bytes(b"before")
    monkeypatch.setattr(
        plots, "write_atomically", lambda *arguments: (_ for _ in ()).throw(OSError("the disk is full"))
    )
    refuse(*QUANTIZE, "--plot", path, part="the disk is full")
    assert path.read_bytes() == b"before" and list(tmp_path.iterdir()) == [path]


# The scripts in benchmarks/


@pytest.mark.parametrize(
    "script", ["quantize_vs_torch", "attention_vs_torch", "gemm_vs_torch", "models_vs_torch", "gemm_groups", "cache"]
)
def test_side_by_side_scripts_say_in_one_line_what_they_lack(script):
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / f"{script}.py"], env=hidden, capture_output=True, text=True
    )
    assert (
        done.returncode == 0
        and not done.stderr
        and done.stdout.startswith("skipped: ")
        and len(done.stdout.splitlines()) == 1
    )


def test_the_first_launch_of_each_head_dimension_is_timed():
    """benchmarks/emulator.py: in a process of its own, since a text is translated once."""
    script = ROOT / "benchmarks" / "emulator.py"
    path = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, script, "64"], env=path, capture_output=True, text=True)
    assert done.returncode == 0 and re.search(r"first launch, attention d=64 .*PTX lines.* s", done.stdout), done.stderr


@pytest.mark.parametrize("dtype, pairs", [("bf16", None), ("f16", [("f16", "f16")])])
def test_side_by_side_attention_has_every_side(emulator, monkeypatch, dtype, pairs):
    """Each side returns the result of attention in the dtype of its inputs, and reports the bytes of K and V that it
    reads."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import attention_vs_torch

    shape = bench_attention.Shape.parse("b1h1q16k128d64")
    element = ptxrt.formats.FORMATS[dtype].dtype
    arrays = [ptxrt.to_device(x.astype(element)) for x in shape.arrays()]
    with_tensors_for_arrays = SimpleNamespace(from_dlpack=lambda array: array)
    wanted_sides = [side for side in SIDES if not pairs or side[:2] in pairs]
    asked = dict(combinations=pairs) if pairs else {}
    sides = attention_vs_torch.our_sides(with_tensors_for_arrays, arrays, False, **asked)
    assert list(sides) == [f"ptxrt {qk}+{pv}, {operands}" for qk, pv, operands in wanted_sides]
    for (qk, pv, operands), side in zip(wanted_sides, sides.values()):
        options = dict(qk=qk, pv=pv, quantize=bench_attention.quantize_of(operands))
        wanted = ptxrt.attention(*arrays, **options, out=ptxrt.empty(arrays[0].shape, element))
        np.testing.assert_array_equal(side.call().to_numpy().view(np.uint16), wanted.to_numpy().view(np.uint16))
        tiles = (
            2 * (tile_layout(qk, "k", 64).nbytes + tile_layout(pv, "v", 64).nbytes) if operands == "quantized" else None
        )
        assert side.key_bytes == (tiles or 2 * 128 * 64 * 2)


def test_groups_and_gates_compute_what_stands_beside_them(emulator, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import gemm_groups

    calls, weights = gemm_groups.decode(experts=4, tokens=3, chosen=2, size=64)
    assert weights["groups"] == weights["one product"] and calls["groups"]().shape == (6, 64)
    assert calls["one product"]().shape[0] == 16
    calls, _ = gemm_groups.prefill(groups=2, rows=66, size=64)
    assert calls["groups"]().shape == calls["one product"]().shape == (132, 64)
    calls, _ = gemm_groups.gate(rows=70, cols=64, size=64)
    assert calls["plain product"]().shape == (70, 64)
    # "three launches" rounds to bf16 before the gate.
    gated, apart = (np.asarray(calls[name]().to_numpy()) for name in ("gated and quantized", "three launches"))
    assert ptxrt.compare(gated, apart).relative_l2 < 0.03


def test_layers_decode_caches_of_their_own(emulator, monkeypatch):
    """benchmarks/cache.py counts the bytes of whole pages, and a graph of layers has as many calls as asked for."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import cache

    shape = 2, 70, 2, 3, 64, 16  # batch, keys, heads, group, dim, page
    for format, bytes_of_row in dict(bf16=128, mxfp8=66, nvfp4=36).items():
        call, moved = cache.decoding(format, *shape)
        assert moved == 2 * (2 * 80 * 2) * bytes_of_row and call().shape == (2, 6, 1, 64)
    one, three = (cache.layers(count, "nvfp4", *shape).__self__ for count in (1, 3))
    assert len(three.launches) == 3 * len(one.launches)
    three.launch()


def small_models(monkeypatch):
    """benchmarks/models_vs_torch.py, and sizes and weights of both models that are small enough for the emulator."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import models_vs_torch

    sizes = models_vs_torch.Sizes(passages=3, length=5, sentence=4, prompt=6, tokens=1, context=32)
    encoder = dict(layers=1, width=64, hidden=96, heads=2, vocabulary=50, context=16, eps=1e-12)
    language = dict(layers=1, width=64, hidden=96, heads=2, kv_heads=1, dim=64, vocabulary=50, context=64)
    weights = [models_vs_torch.drawn("encoder", encoder)]
    weights.append(models_vs_torch.drawn("language model", dict(language, base=1e3, eps=1e-5)))
    return models_vs_torch, sizes, *weights


def test_side_by_side_models_have_rows_of_every_side(emulator, monkeypatch, tmp_path):
    monkeypatch.setenv("PTXRT_CACHE", str(tmp_path))
    script, sizes, encoder, language = small_models(monkeypatch)
    ids = np.arange(15, dtype=np.int32).reshape(3, 5)
    makers = script.our_encoding(encoder, ids) | script.our_encoding(encoder, ids[:1, :4])
    makers |= {"fails": lambda: 1 / 0}
    sides, refused = script.made(makers, lambda: None)
    assert list(sides) == ["ptxrt bf16", "ptxrt bf16, a graph"] and refused == {"fails": "division by zero"}
    rows = script.rows_of("sentence", {"a": sides["ptxrt bf16, a graph"]}, 1, lambda: None)
    assert rows[0]["agreement"] > 0.9999 and rows[0]["launches"] <= 7 + 4
    sides, refused = script.made(script.our_generation(language, ids[0], sizes), lambda: None)
    rows = script.rows_of("generation", sides, 1, lambda: None)
    assert [row["side"] for row in rows] == list(script.GENERATED) and not refused
    assert sides["ptxrt bf16"].call().shape == (2,) and rows[0]["agreement"] == 1
    assert "gemm_few_bf16_bf16" in rows[0]["kernels"] and "gemm_few_bf16_nvfp4" in rows[1]["kernels"]
    assert rows[0]["launches"] <= 9 + 4 and rows[1]["bytes"] < rows[0]["bytes"]
    rows = [dict(row, tokens_per_second=1.0) for row in rows] + [dict(case="generation", side="x", refused="why")]
    head = dict(machine=MACHINE_OF_TABLES, torch="2", weights="drawn", sizes=vars(sizes))
    assert any("refused: why" in line for line in script.table(head, rows))
    assert script.agreement(np.int32([1, 2, 3, 4]), np.int32([1, 2, 5, 4])) == 0.5


def test_plain_pytorch_models_give_what_ours_give(emulator, monkeypatch, tmp_path):
    """With bf16 weights, PyTorch on the CPU gives the same tokens and nearly the same embeddings."""
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("PTXRT_CACHE", str(tmp_path))
    script, sizes, encoder, language = small_models(monkeypatch)
    for ids in (np.arange(15, dtype=np.int32).reshape(3, 5), np.int32([[3, 1, 4, 1]])):
        (ours,) = script.our_encoding(encoder, ids).values()
        (theirs,) = script.torch_encoding(torch, encoder, ids, [script.EAGER], "cpu").values()
        assert script.agreement(ours().call(), theirs().call()) > 0.999
    prompt = np.int32([3, 14, 15, 9, 26, 5])
    ours = script.our_generation(language, prompt, sizes)["ptxrt bf16"]()
    (theirs,) = script.torch_generation(torch, language, prompt, sizes, [script.EAGER], "cpu").values()
    assert script.agreement(ours.call(), theirs().call()) == 1


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_plain_pytorch_quantizers_give_the_same_bytes(emulator, monkeypatch, dtype):
    """The PyTorch quantizers of the benchmarks compute the same bytes, including ties and zero blocks."""
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import torch_quantizers

    x = (
        np.random.default_rng(3).standard_normal((64, 96), np.float32)
        * np.exp2(np.arange(64, dtype=np.float32) - 32)[:, None]
    )
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


@pytest.mark.gpu
def test_tiny_shapes_run_on_a_gpu(gpu):
    for operation in ("quantize", "dequantize"):
        for axis in (-1, -2):
            rows = report("bench", operation, "--shape", "64x128", "--axis", axis, "--repeat", "3")["rows"]
            assert all(
                set(row) == QUANTIZER_ROW and 0 < row["fastest"] <= row["milliseconds"] <= row["slowest"] < 100
                for row in rows
            )
    rows = report("bench", "attention", "--shape", "b1h2s128d64", "--repeat", "3")["rows"]
    assert all(set(row) == ATTENTION_ROW for row in rows)
    prologues = [row for row in rows if row["operands"] == "prologue"]
    assert prologues and all(row["share_of_copy"] > 0 for row in prologues)
    attended = [row for row in rows if row not in prologues]
    assert all(row["share_of_mma_rate"] > 0 and row["relative_l2"] < 0.5 for row in attended)
    assert len(attended) == 2 * len(SIDES)
    assert report(*LAUNCH)["rows"]
    rows = report(*GEMM, "--shape", "m16n256k256")["rows"]
    assert len(rows) == 2 * len(products.PRODUCTS)
    assert all(set(row) == PRODUCT_ROW and row["share_of_mma_rate"] > 0 for row in rows)


@pytest.mark.gpu
def test_a_clock_counts_the_device_alone(gpu):
    """Delays of the host do not count; twice the work takes about twice as long.

    The test takes the fastest of many samples: on a shared card most samples include work of other processes.
    """
    clock = timing.Clock(repeat=40)
    kernel = ptxrt.kernels()["mma_rate_bf16"]
    a, b = (ptxrt.to_device(np.ones(shape, np.float32).astype("bfloat16")) for shape in ((2, 16, 16), (4, 8, 16)))
    c = kernel(a, b, blocks=1, steps=1)
    once, twice = (lambda: kernel(a, b, c=c, blocks=1, steps=20000)), (lambda: kernel(a, b, c=c, blocks=1, steps=40000))
    times = {name: min(times.samples) for name, times in clock.times({"once": once, "twice": twice}).items()}
    assert 1.7 < times["twice"] / times["once"] < 2.3
    # An empty call takes almost no time, although the host spends time on its events.
    assert min(clock.times({"nothing": lambda: None})["nothing"].samples) < 0.02
