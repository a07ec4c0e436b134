"""The command line on files: what it writes and prints, and how it refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

import ptxrt
from ptxrt.commands import main
from ptxrt.ops.attention import exact_attention
from scripts import script

build = script("build.py")
ROOT = Path(__file__).resolve().parent.parent


def call(*arguments):
    """Run the command line in this process on the emulator."""
    with ptxrt.using("emulator"):  # restores the previous machine
        return CliRunner().invoke(main, ["--machine", "emulator", *map(str, arguments)])


def succeed(*arguments):
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def refuse(*arguments, part):
    """Check that the call fails with a message that contains `part`, without a traceback."""
    result = call(*arguments)
    assert result.exit_code not in (0, None) and isinstance(result.exception, SystemExit), result.output
    assert part in result.output and "Traceback" not in result.output
    return result.output


@pytest.fixture
def x(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, np.random.default_rng(1).standard_normal((33, 64), np.float32))
    return path


@pytest.fixture
def qkv(tmp_path):
    rng = np.random.default_rng(2)
    for name, rows in zip("qkv", (40, 72, 72)):
        np.save(tmp_path / f"{name}.npy", rng.standard_normal((1, 2, rows, 32)).astype(np.float16))
    return [word for name in "qkv" for word in (f"--{name}", tmp_path / f"{name}.npy")]


FIRST = ["--qk", "mxfp4", "--pv", "bf16", "--quantize", "in_kernel"]


# Looking around


def test_list_names_every_kernel_and_function():
    listed = json.loads(succeed("list", "--json"))
    assert listed["kernels"].keys() == ptxrt.kernels().keys()
    assert {"attention", "quantize", "dequantize", "merge", "quantize_operand"} <= listed["functions"].keys()
    text = succeed("list")
    assert all(name in text and kernel.summary in text for name, kernel in ptxrt.kernels().items())


@pytest.mark.parametrize("name", ptxrt.kernels())
def test_show_prints_the_declaration_and_the_build(name):
    kernel = ptxrt.kernels()[name]
    text = succeed("show", name)
    assert kernel.declaration in text and kernel.__doc__ in text
    assert all(entry in text for unit in kernel.units for entry in kernel.entries(unit))


def test_show_prints_a_function():
    assert "return_lse" in succeed("show", "attention")


def test_names_that_do_not_exist():
    refuse("show", "transpose_tilde", part="near: transpose_tiled")
    refuse("run", "transpose_tilde", part="near: transpose_tiled")
    refuse("run", "atention", part="near: attention")
    refuse("check", "zzz", part="no kernel is called zzz; see `ptxrt list`")


def test_devices_says_what_is_there_and_why():
    there = json.loads(succeed("devices", "--json"))["machines"]
    assert list(there) == ["native", "portable", "emulator"]
    assert there["emulator"]["available"]
    assert all(machine["detail"] for machine in there.values())
    assert "emulator: executes" in succeed("devices")


@pytest.mark.parametrize(
    "asked, said",
    [
        (
            "portable",
            "no default: PTXRT_MACHINE asks for portable, which is not available (no driver today); unset it, or name "
            "another machine",
        ),
        ("cuda", "no default: PTXRT_MACHINE is 'cuda'; set it to native, portable or emulator, or unset it"),
    ],
)
def test_devices_says_what_is_wrong_with_the_machine_that_is_asked_for(monkeypatch, asked, said):
    from ptxrt import selection

    there = {name: selection.Machine(name, name == "emulator", "no driver today") for name in selection.MACHINES}
    monkeypatch.setattr(selection, "machines", lambda: there)
    monkeypatch.setenv("PTXRT_MACHINE", asked)
    done = call("devices")
    assert done.exit_code == 0 and said in done.output.splitlines() and "(the default)" not in done.output
    assert json.loads(call("devices", "--json").stdout)["problem"] == said.removeprefix("no default: ")
    monkeypatch.setenv("PTXRT_MACHINE", "emulator")
    assert "emulator: no driver today (the default)" in succeed("devices")


@pytest.mark.parametrize("name", [*ptxrt.kernels(), "attention", "quantize", "dequantize"])
def test_help_of_every_command_comes_from_its_docstring(name):
    text = succeed("run", name, "--help")
    kernel = ptxrt.kernels().get(name)
    assert (kernel.summary if kernel else "--compare") in " ".join(text.split())
    for argument in kernel.inputs if kernel else ():
        assert f"--{argument.name.replace('_', '-')} " in text


def test_checkout_script_and_package_are_one_program():
    outputs = [
        subprocess.run(
            [sys.executable, *program, "--help"], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout
        for program in (["cli.py"], ["-m", "ptxrt.commands"], ["-m", "ptxrt"])
    ]
    assert "Run a function or a kernel" in outputs[0]
    assert len({output.split("\n", 1)[1] for output in outputs}) == 1


def test_help_loads_no_numpy():
    code = "import sys; from ptxrt.commands import main; assert 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# Running


def test_run_transpose(x, tmp_path):
    text = succeed("run", "transpose_tiled", "--x", x, "-o", tmp_path / "y.npy", "--compare")
    assert np.array_equal(np.load(tmp_path / "y.npy"), np.load(x).T)
    for part in (
        "transpose_tiled on emulator",
        "float32 [33, 64]",
        "float32 [64, 33]",
        str(tmp_path / "y.npy"),
        " s with copies",
    ):
        assert part in text
    assert "relative L2 0.000e+00" in text


def test_run_with_axes(tmp_path):
    succeed(
        "run",
        "thread_identity",
        "--blocks-x",
        2,
        "--blocks-y",
        1,
        "--blocks-z",
        3,
        "-o",
        tmp_path / "i.npy",
        "--compare",
    )
    assert np.load(tmp_path / "i.npy").shape == (3, 1, 2, 96, 16)


def test_traces_list_every_launch(x, tmp_path):
    report = json.loads(succeed("run", "quantize", "--x", x, "--format", "nvfp4", "--trace", "--json"))
    assert [launch["kernel"] for launch in report["launches"]] == ["amax", "nvfp4_global_scale", "quantize_nvfp4"]
    assert all(launch["milliseconds"] >= 0 and len(launch["module"]) == 64 for launch in report["launches"])
    text = succeed("run", "transpose_tiled", "--x", x, "--trace")
    assert "GB/s" in text and text.count("transpose_tiled") >= 3


def test_benchmarks_of_launches_need_a_gpu():
    refuse("--machine", "emulator", "bench", "launch", part="choose a GPU machine")


def test_quantize_and_back(x, tmp_path):
    report = json.loads(succeed("run", "quantize", "--x", x, "-o", tmp_path / "q.npz", "--compare", "--json"))
    assert report["kernel"] == "quantize_mxfp4" and report["failures"] == []
    assert report["compare"]["codes against the reference"]["mismatches"] == 0
    assert 0.05 < report["compare"]["values against the unquantized inputs"]["relative_l2"] < 0.2
    stored = ptxrt.QuantizedArray.load(tmp_path / "q.npz")
    wanted = np.asarray(stored)
    succeed("run", "dequantize", "--q", tmp_path / "q.npz", "-o", tmp_path / "y.npy", "--compare")
    assert np.array_equal(np.load(tmp_path / "y.npy"), wanted)
    # The kernel itself takes the members of the file by name.
    arguments = ["--codes", tmp_path / "q.npz", "--scales", tmp_path / "q.npz", "--dtype", "bf16"]
    text = succeed("run", "dequantize_mxfp4", *arguments, "-o", tmp_path / "z.npy")
    assert "bfloat16 [33, 64] written as float32" in text
    loaded = np.load(tmp_path / "z.npy")
    assert loaded.dtype == np.float32 and np.array_equal(loaded, wanted.astype(ml_dtypes.bfloat16).astype(np.float32))


@pytest.fixture
def ab(tmp_path):
    rng = np.random.default_rng(4)
    for name, rows in (("a", 6), ("b", 40)):
        np.save(tmp_path / f"{name}.npy", rng.standard_normal((rows, 64)).astype(np.float16))
    return [word for name in "ab" for word in (f"--{name}", tmp_path / f"{name}.npy")]


def test_matmul(ab, tmp_path):
    report = json.loads(succeed("run", "matmul", *ab, "-o", tmp_path / "c.npy", "--compare", "--json"))
    assert report["kernel"] == "gemm_few_bf16" and report["failures"] == []
    a, b = (np.load(path) for path in ab[1::2])
    assert np.array_equal(np.load(tmp_path / "c.npy"), ptxrt.matmul(a, b))
    ptxrt.quantize(b, "mxfp4").save(tmp_path / "b.npz")
    mixed = [*ab[:3], tmp_path / "b.npz", "--a-format", "mxfp8", "--a-scale-rule", "even", "--splits", 1]
    report = json.loads(succeed("run", "matmul", *mixed, "--compare", "--json"))
    assert report["kernel"] == "gemm_mxfp8_mxfp4" and report["failures"] == []
    assert report["inputs"]["b"]["dtype"] == "mxfp4"


def test_matmul_takes_an_epilogue(ab, tmp_path):
    np.save(tmp_path / "bias.npy", np.linspace(-1, 1, 40))
    np.save(tmp_path / "residual.npy", np.ones((6, 20), np.float32))
    options = ["--bias", tmp_path / "bias.npy", "--residual", tmp_path / "residual.npy", "--activation", "swiglu"]
    levels = ["--a-format", "nvfp4", "--b-format", "nvfp4", "--a-global-scale", 0.5, "--alpha", 2]
    report = json.loads(succeed("run", "matmul", *ab, *options, *levels, "--compare", "--format-limit", 0.3, "--json"))
    assert report["failures"] == [] and report["outputs"]["out_f16"]["shape"] == [6, 20]
    assert 0.01 < report["compare"]["out_f16 against the unquantized inputs"]["relative_l2"]


def test_matmul_takes_the_numbers_of_an_activation(ab, tmp_path):
    arguments = "run", "matmul", *ab, "--activation"
    succeed(*arguments, "swiglu(limit=0.5, alpha=1.702,offset=1)", "-o", tmp_path / "c.npy", "--compare")
    a, b = (np.load(path) for path in ab[1::2])
    want = ptxrt.matmul(a, b, activation=("swiglu", dict(limit=0.5, alpha=1.702, offset=1)))
    np.testing.assert_array_equal(np.load(tmp_path / "c.npy"), want)
    refuse(*arguments, "relu(limit=1)", part="('relu', {'limit': 1.0})")
    for wrong in ("swiglu(limit)", "swiglu(limit=x)", "swiglu(limit=1", "swiglu(limit=1)x"):
        refuse(*arguments, wrong, part="such as swiglu(limit=7,offset=1)")


@pytest.mark.parametrize("formats", [[], ["--a-format", "mxfp8", "--b-format", "mxfp8"]])
def test_matmul_norms_the_rows_of_a(ab, tmp_path, formats):
    weight = np.linspace(0.5, 2, 64, dtype=np.float32)
    np.save(tmp_path / "norm.npy", weight)
    norm = ["--a-norm", tmp_path / "norm.npy", "--a-eps", 0.25, "--out-dtype", "float32"]
    report = json.loads(succeed("run", "matmul", *ab, *norm, *formats, "-o", tmp_path / "c.npy", "--compare", "--json"))
    assert report["failures"] == [] and report["inputs"]["a_norm"]["shape"] == [64]
    a, b = (np.load(path).astype(np.float64) for path in ab[1::2])
    want = (a / np.sqrt((a * a).mean(-1, keepdims=True) + 0.25) * weight) @ b.T
    assert ptxrt.compare(np.load(tmp_path / "c.npy"), want).relative_l2 < (0.05 if formats else 1e-3)
    exact = report["compare"].get("out_f32 against the unquantized inputs")
    assert exact is None if not formats else 0.001 < exact["relative_l2"] < 0.05


def test_matmul_converts_and_refuses(ab, tmp_path):
    double = tmp_path / "double.npy"
    np.save(double, np.ones((6, 64)))
    refuse("run", "matmul", "--a", double, *ab[2:], part="--dtype f16 on the command line")
    text = succeed("run", "matmul", "--a", double, *ab[2:], "--dtype", "bf16", "--compare")
    assert "a converted from float64 to bfloat16" in text and "gemm_few_bf16" in text
    refuse("run", "matmul", *ab, "--splits", 2, part="splits is 2; pass None, or 1")
    refuse("run", "matmul", *ab, "--a-format", "nvfp4", "--b-format", "mxfp8", part="nearest: mxfp8 x mxfp8")
    refuse("run", "matmul", *ab, "--alpha", "nan", part="alpha is nan")
    refuse("run", "matmul", *ab, "--a-norm", ab[1], part="a_norm is float16 [6, 64]; pass floats of shape [64]")
    refuse("run", "matmul", *ab, "--a-eps", -1, part="a_eps is -1.0")
    refuse("run", "matmul", *ab, "--b-global-scale", 2, part="b is not quantized in this call")


def test_matmul_has_the_options_of_the_function():
    """All but those of quantized results, which the command does not write."""
    import inspect

    names = {p.name for p in main.get_command(None, "run").get_command(None, "matmul").params}
    missing = set(inspect.signature(ptxrt.matmul).parameters) - names - {"stream", "out"}
    assert missing == {"out_format", "out_scale_rule", "out_scale_layout", "out_global_scale"}


def test_attention(qkv, tmp_path):
    report = json.loads(
        succeed("run", "attention", *qkv, "--causal", "--return-lse", "-o", tmp_path / "o.npz", "--compare", "--json")
    )
    assert report["entry"] == "attention_bf16_dim32_dim_v32_f16" and report["failures"] == []
    with np.load(tmp_path / "o.npz") as stored:
        out, lse = stored["out_f16"], stored["lse"]
    arrays = [np.load(path) for path in qkv[1::2]]
    want, want_lse = exact_attention(*arrays, scale=32**-0.5, causal=True)
    assert out.dtype == np.float16 and ptxrt.compare(out, want).relative_l2 < 1e-3
    assert ptxrt.compare(lse, want_lse).relative_l2 < 1e-3


def test_attention_takes_every_option(qkv, tmp_path):
    rng = np.random.default_rng(3)
    np.save(tmp_path / "mask.npy", rng.random((40, 72)) < 0.5)
    np.save(tmp_path / "sinks.npy", np.float32([0.5, -1]))
    np.save(tmp_path / "lengths.npy", np.array([50]))
    options = [
        "--window",
        "30,2",
        "--softcap",
        3,
        "--mask",
        tmp_path / "mask.npy",
        "--sinks",
        tmp_path / "sinks.npy",
        "--qk",
        "f16",
    ]
    report = json.loads(
        succeed(
            "run",
            "attention",
            *qkv,
            *options,
            "--key-lengths",
            tmp_path / "lengths.npy",
            "--return-lse",
            "--compare",
            "--json",
        )
    )
    assert (
        report["failures"] == [] and report["entry"].endswith("_f16") and list(report["outputs"]) == ["out_f16", "lse"]
    )
    assert report["inputs"]["mask"]["shape"] == [40, 72] and "lse against the reference" in report["compare"]
    refuse("run", "attention", *qkv, "--window", "3", part="is not LEFT,RIGHT")
    refuse("run", "attention", *qkv, "--softcap", -1, part="softcap is -1.0; pass a number above 0")
    for path in qkv[1::2]:
        np.save(path, np.load(path).transpose(0, 2, 1, 3))
    text = succeed(
        "run",
        "attention",
        *qkv,
        "--no-normalize",
        "--causal",
        "--layout",
        "bshd",
        "--compare",
        "-o",
        tmp_path / "sums.npz",
    )
    with np.load(tmp_path / "sums.npz") as stored:
        assert sorted(stored.files) == ["out_f32", "row_max", "row_sum"] and stored["out_f32"].shape == (1, 40, 2, 32)
    assert "row_sum against the reference" in text


def test_attention_on_packed_sequences(qkv, tmp_path):
    """Compared with sequences quantized separately: a mean and scales of the whole would be .18 off."""
    for name, cu in (("q", [0, 1, 30, 40]), ("k", [0, 5, 50, 72])):
        np.save(tmp_path / f"cu_{name}.npy", np.array(cu))
    options = ["--qk", "nvfp4", "--cu-seqlens-q", tmp_path / "cu_q.npy", "--cu-seqlens-k", tmp_path / "cu_k.npy"]
    report = json.loads(succeed("run", "attention", *qkv, *options, "--compare", "--json"))
    assert report["failures"] == [] and report["compare"]["out_f16 against the reference"]["relative_l2"] < 0.13
    biased = np.load(tmp_path / "k.npy") + 5  # smoothing removes the mean, and lse gets it back
    biased[:, :, 50:] = np.nan
    np.save(tmp_path / "biased.npy", biased)
    np.save(tmp_path / "lengths.npy", np.array([50]))
    biased = [tmp_path / "biased.npy" if str(x).endswith("k.npy") else x for x in qkv]
    options = ["--qk", "nvfp4", "--key-lengths", tmp_path / "lengths.npy", "--return-lse"]
    succeed("run", "attention", *biased, *options, "--compare", "-o", tmp_path / "o.npz")


def test_dtype_converts_and_says_so(qkv, tmp_path):
    text = succeed(
        "run", "attention", *qkv, "--dtype", "bf16", "--out-dtype", "float32", "-o", tmp_path / "o.npy", "--compare"
    )
    assert "attention_bf16_dim32_dim_v32_bf16" in text
    assert "q converted from float16 to bfloat16" in text


def test_files_that_numpy_cannot_name_are_read(tmp_path):
    big_endian, bfloat16 = tmp_path / "big.npy", tmp_path / "bf16.npy"
    np.save(big_endian, np.ones((2, 32), ">f4"))
    np.save(bfloat16, np.ones((2, 32), ml_dtypes.bfloat16))
    succeed("run", "quantize", "--x", big_endian, "--compare")
    assert "quantize_mxfp4_bf16" in succeed("run", "quantize", "--x", bfloat16, "--compare")


@pytest.mark.parametrize("converts", [[], ["--dtype", "f16"]], ids=["", "converted"])
@pytest.mark.parametrize(
    "dtype, words",
    [
        (ml_dtypes.float8_e4m3fn, "x is |V1 [2, 32], untyped bytes; save values as x.astype(numpy.float32), codes as"),
        ("V4", "x is |V4 [2, 32], untyped bytes"),
        ([("a", "f4"), ("b", "u1")], "x is [('a', '<f4'), ('b', 'u1')] [2, 32], structures; save one of the fields"),
        ([("a", "u1"), ("b", "u1")], "structures; save one of the fields by itself"),
    ],
    ids=str,
)
def test_files_without_numbers_are_refused(tmp_path, dtype, words, converts):
    np.save(tmp_path / "x.npy", np.zeros((2, 32), dtype))
    assert "--dtype" not in refuse("run", "quantize", "--x", tmp_path / "x.npy", *converts, part=words)


def test_places_outside_of_the_rows_are_refused(tmp_path):
    arrays = dict(x=np.ones((8, 4), np.float32), places=np.full((4, 2), 8, np.int32), weights=np.ones((4, 2), "f4"))
    options = []
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
        options += [f"--{name}", tmp_path / f"{name}.npy"]
    refuse("run", "add_experts", *options, part="places goes up to 8, rows is 8")
    np.save(tmp_path / "places.npy", arrays["places"] - 9)
    succeed("run", "add_experts", *options, "--compare")


def test_a_comparison_beyond_its_limit_fails(qkv, tmp_path):
    arguments = ["run", "attention", *qkv, *FIRST, "--compare", "--format-limit"]
    refuse(*arguments, "1e-6", part="quantization costs out_f16 a relative L2 of")
    succeed(*arguments, "0.5")


def test_empty_arrays_launch_nothing(tmp_path):
    np.save(tmp_path / "x.npy", np.ones((0, 64), np.float32))
    text = succeed("run", "quantize", "--x", tmp_path / "x.npy", "-o", tmp_path / "q.npz", "--compare")
    assert "nothing was launched" in text
    report = json.loads(
        succeed("run", "dequantize", "--q", tmp_path / "q.npz", "-o", tmp_path / "y.npy", "--compare", "--json")
    )
    assert report["kernel"] == "dequantize_mxfp4" and report["entry"] is None and report["failures"] == []
    assert np.load(tmp_path / "y.npy").shape == (0, 64)


def test_a_conversion_may_overflow(tmp_path, recwarn):
    np.save(tmp_path / "x.npy", np.full((2, 32), 1e300))
    succeed("run", "quantize", "--x", tmp_path / "x.npy", "--dtype", "f16", "-o", tmp_path / "q.npz")
    assert (ptxrt.QuantizedArray.load(tmp_path / "q.npz").scales == 0xFF).all() and not recwarn.list


def test_options_of_the_emulator(x):
    runner = CliRunner()
    with ptxrt.using("emulator"):
        result = runner.invoke(
            main, ["--arithmetic", "hardware", "--ptx", "portable", "run", "quantize", "--x", str(x), "--json"]
        )
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert report["machine"] == "emulator" and "hardware" in report["detail"] and "portable" in report["detail"]


# Refusing


def test_bad_files(x, tmp_path):
    missing = tmp_path / "missing.npy"
    truncated, text, empty, pickled, double, zipped = (
        tmp_path / f"{n}.npy" for n in ("short", "text", "empty", "obj", "f64", "zip")
    )
    truncated.write_bytes(x.read_bytes()[:-100])
    text.write_text("1 2 3")
    empty.touch()
    np.save(pickled, np.array([{}]), allow_pickle=True)
    np.save(double, np.ones((4, 64)))
    np.savez(tmp_path / "zip.npz", other=np.ones(3))
    (tmp_path / "zip.npz").rename(zipped)
    output = tmp_path / "y.npy"
    output.write_text("what was here before")
    for path, part in [
        (missing, "does not exist"),
        (truncated, "cannot be read"),
        (text, "cannot be read"),
        (empty, "cannot be read"),
        (pickled, "pickled objects, which are never loaded"),
        (double, "Convert it to float32"),
        (zipped, "holds no array called x; it holds other"),
        (tmp_path, "cannot be read"),
    ]:
        refuse("run", "transpose_tiled", "--x", path, "-o", output, part=part)
    assert output.read_text() == "what was here before"
    assert not list(tmp_path.glob(".*.part"))


def test_bad_quantized_files(x, tmp_path):
    refuse("run", "dequantize", "--q", x, part="x.npy is no quantized array: it holds a single array")
    for path in (tmp_path / "missing.npz", tmp_path):
        refuse("run", "dequantize", "--q", path, part=f"{path} cannot be read")


def test_bad_targets(x, tmp_path):
    refuse("run", "transpose_tiled", "--x", x, "-o", tmp_path / "y.npz", part="give it a name that ends in .npy")
    refuse("run", "quantize", "--x", x, "-o", tmp_path / "q.npy", part="give it a name that ends in .npz")
    refuse("run", "quantize", "--x", x, "-o", tmp_path / "no" / "q.npz", part="does not exist")
    refuse("run", "quantize", "--x", x, "-o", tmp_path / f"{'q' * 300}.npz", part="its name is longer than the file")
    (tmp_path / "q.npz").mkdir()
    refuse("run", "quantize", "--x", x, "-o", tmp_path / "q.npz", part="it is a folder")


def test_folders_that_cannot_be_written(x, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    refuse("run", "quantize", "--x", x, "-o", tmp_path / "q.npz", part="no permission to write")
    assert not (tmp_path / "q.npz").exists()


def test_bad_options(x, qkv):
    refuse("run", "transpose_tiled", part="Missing option '--x'")
    refuse("run", "quantize", "--x", x, "--format", "fp3", part="'mxfp4'")
    refuse("run", "attention", *qkv, "--qk", "fp3", part="no kernel for qk='fp3'")
    refuse("run", "quantize", "--x", x, "--format-limit", 0.1, part="add --compare")
    q = qkv[1].with_name("in_groups.npy")
    np.save(q, np.load(qkv[1])[:, :, None])
    numbers = ["--splits", 1, "--scale", 1, "--left", 9, "--right", 9]
    refuse("run", "attention_mxfp4_bf16_in_kernel", "--q", q, *qkv[2:], *numbers, part="add --out-bf16 or --out-f16")


def test_shapes_are_checked_against_the_declaration(tmp_path):
    np.save(tmp_path / "x.npy", np.ones((3, 33), np.float32))
    refuse("run", "quantize", "--x", tmp_path / "x.npy", part="multiple of 32")
    np.save(tmp_path / "v.npy", np.ones(3, np.float32))
    refuse("run", "transpose_naive", "--x", tmp_path / "v.npy", part="1 dimension where 2 are needed")


def test_machines_that_are_not_there(x):
    if not ptxrt.machines()["native"].available:
        result = CliRunner().invoke(main, ["--machine", "native", "run", "transpose_tiled", "--x", str(x)])
        assert result.exit_code == 1 and "native is not available" in result.output


# Checking


def test_check_one_kernel():
    text = succeed("check", "transpose_naive", "transpose_tiled")
    assert "8 of 8 cases passed on emulator" in text and text.count("equal") == 8


def test_check_reports_failures(monkeypatch):
    kernel = ptxrt.kernels()["transpose_naive"]
    monkeypatch.setattr(kernel, "function", lambda x, y: np.copyto(y, x.T + 1))
    result = call("check", "transpose_naive", "--json")
    assert result.exit_code == 1
    report = json.loads(result.output)
    assert report["failed"] == 4 and all("worst error" in row["figures"] for row in report["cases"])


# Documentation


def test_kernel_documentation_is_fresh():
    """Its figures are those of the record, in a quick build as in a full one."""
    from ptxrt.describe import TARGETS, kernels_markdown

    page = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    record = json.loads((ROOT / "tests" / "sass_figures.json").read_text(encoding="utf-8"))
    recorded = {target: record[target] for target in TARGETS}
    assert page == kernels_markdown(ptxrt.kernels(), recorded), "run `make docs`"


# Parts of the tree, and other ways to run Python


def test_docstrings_may_be_left_out():
    code = (
        "import sys, numpy as np, ptxrt; from ptxrt.commands import main; from click.testing import CliRunner\n"
        "ptxrt.kernels()\n"
        "for words in (['list'], ['show', 'quantize'], ['show', 'transpose_naive'], ['run', '--help'], ['run', "
        "'quantize', '--help'], ['run', 'cast', '--help']):\n"
        "    result = CliRunner().invoke(main, words)\n"
        "    if result.exit_code or not result.output: sys.exit(f'{words}: {result.output} {result.exception!r}')\n"
        "with ptxrt.using('emulator'):\n"
        "    x = np.eye(32, dtype=np.float32)\n"
        "    if not np.array_equal(ptxrt.dequantize(ptxrt.quantize(x, 'mxfp4')), x): sys.exit('wrong values')\n"
    )
    done = subprocess.run([sys.executable, "-OO", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def few_modules(monkeypatch, tmp_path):
    """A folder of modules as after `make demo`: the native text of one unit, no machine code."""
    from ptxrt import units

    (unit,) = build.select(build.find_units(build.SOURCES), ["attention_mxfp4_bf16_in_kernel[dim=64]"])
    record = units.record(unit.unit)
    text = f"{unit.unit}.ptx"
    (tmp_path / text).write_bytes((units.MODULES / text).read_bytes())
    record["entries"] = dict.fromkeys(record["entries"], {})
    for part, kept in (("texts", "compute_120f"), ("bytes", text), ("sha256", text)):
        record[part] = {kept: record[part][kept]}
    (tmp_path / f"{unit.unit}.json").write_text(json.dumps(record))
    monkeypatch.setattr(units, "MODULES", tmp_path)
    monkeypatch.setattr(build, "MODULES", tmp_path)
    units.check_fresh.cache_clear()
    yield tmp_path
    units.check_fresh.cache_clear()


def test_show_after_the_demo(few_modules):
    text = succeed("show", "attention_mxfp4_bf16_in_kernel")
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert (
        "not assembled" in rows["attention_mxfp4_bf16_in_kernel_dim64_dim_v64_bf16"]
        and "128" in rows["attention_mxfp4_bf16_in_kernel_dim64_dim_v64_bf16"]
    )
    assert rows["attention_mxfp4_bf16_in_kernel_dim128_dim_v128"].endswith("not built: run `make`")
    assert "not built" in succeed("show", "transpose_naive")


def test_documentation_asks_for_a_whole_build(few_modules, capsys, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    import generate

    assert generate.main() == 1
    assert "generate.py needs all kernels" in (message := capsys.readouterr().err) and "run `make`" in message


def test_check_lines_up(monkeypatch):
    kernel = ptxrt.kernels()["transpose_naive"]
    kept, calls = kernel.function, iter(range(100))
    monkeypatch.setattr(kernel, "function", lambda x, y: np.copyto(y, x.T + 1) if next(calls) % 2 else kept(x, y))
    for color in (False, True):
        result = CliRunner().invoke(main, ["check", "transpose_naive"], color=color)
        lines = [click.unstyle(line) for line in result.output.splitlines() if "transpose_naive" in line]
        assert {line.index("transpose_naive") for line in lines} == {7} and {line.split()[0] for line in lines} == {
            "ok",
            "FAILED",
        }


def test_list_groups_and_shows_every_name():
    lines = succeed("list").splitlines()
    shown = [line.split()[0] for line in lines if line.startswith("  ")]
    functions = {n for n in ptxrt.__all__ if n.islower() and callable(getattr(ptxrt, n))}
    classes = {"QuantizedArray", "Operand", "KVCache", "DeviceArray", "PageLocked", "Comparison", "Stream", "Event"}
    assert set(shown) == {*ptxrt.kernels(), *functions, *classes}
    assert {name for name in shown if shown.count(name) > 1} == {*ptxrt.kernels()} & {*ptxrt.__all__}
    titles = {"functions that `run` takes", "functions", "classes", "kernels: attention", "kernels: smoothing"}
    assert titles <= set(lines)


@pytest.mark.parametrize("columns", [10, 60, 100])
def test_list_fits_a_terminal_without_breaking_words(monkeypatch, columns):
    from ptxrt.commands import show as commands

    words = "Quantize x of float32 in-place-words bfloat16 supercalifragilisticexpialidocious along one axis."
    lines = []
    monkeypatch.setattr(commands.sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(commands.shutil, "get_terminal_size", lambda: os.terminal_size((columns, 24)))
    monkeypatch.setattr(commands.click, "echo", lines.append)
    commands.in_lines("title", {"name": words}, 8)
    assert " ".join(" ".join(lines[1:]).split()) == f"name {words}"
    assert all(len(line) <= max(columns, 32) or len(line.split()) == 1 for line in lines[2:])
    assert len(lines) == 2 if columns > 115 else len(lines) > 2


def test_show_knows_every_function():
    for name in ("merge", "quantize_operand", "attention", "using", "load"):
        text = succeed("show", name)
        assert text.startswith(f"{name}(") and len(text.splitlines()) > 2
    refuse("show", "merge", "--ptx", part="merge is a function")
    refuse("show", "mergge", part="near: merge")
    text = succeed("show", "matmul")
    assert "a: Array | QuantizedArray," in text and all(len(line) <= 120 for line in text.splitlines())


def test_show_knows_every_class():
    classes = [name for name in ptxrt.__all__ if not name.islower()]
    for name in classes:
        text = succeed("show", name)
        assert text.startswith(f"class {name}") and getattr(ptxrt, name).__doc__.split()[0] in text
    text = succeed("show", "KVCache")
    for part in ("class KVCache(pages: int, page_size: int,", "KVCache.over(k_codes: Array,", "KVCache.nbytes\n"):
        assert part in text
    assert "__init__" not in text and "_claims" not in text
    refuse("show", "KVCache", "--sass", part="KVCache is a class")
    refuse("show", "KvCache", part="near: KVCache")


def test_show_takes_variants_and_units():
    whole = succeed("show", "attention_bf16")
    for word in ("attention_bf16[dim=64]", "attention_bf16[dim=64, dim_v=64]", "attention_bf16_dim64_dim_v64"):
        text = succeed("show", word)
        assert "attention_bf16_dim64_dim_v64_bf16 " in text and "attention_bf16_dim128_dim_v128_bf16 " in whole
        assert "attention_bf16_dim128_dim_v128_bf16 " not in text
    refuse("show", "attention_bf16[dim=63]", part="its units are attention_bf16_dim32_dim_v32, ")
    refuse("show", "attention_bf16[", part="expected NAME or NAME[axis=value]")


def test_show_prints_the_texts():
    from ptxrt import units

    assert succeed("show", "transpose_naive", "--ptx") == units.text("transpose_naive", False) + "\n"
    with ptxrt.using("emulator"):
        result = CliRunner().invoke(main, ["--ptx", "portable", "show", "transpose_naive", "--ptx"])
    assert result.output == units.text("transpose_naive", True) + "\n"


def test_show_prints_machine_code(monkeypatch, tmp_path):
    from ptxrt import disassembly

    try:
        disassembly.find_disassembler()
    except ptxrt.BuildError as missing:
        pytest.skip(str(missing))
    text = succeed("show", "transpose_naive", "--sass")
    assert "arch = sm_120a" in text and "Function : transpose_naive" in text and "EXIT" in text and "/* 0x" not in text
    monkeypatch.setattr(disassembly, "_folders", lambda: iter(()))
    refuse("show", "transpose_naive", "--sass", part="pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")


def test_check_takes_variants():
    text = succeed("check", "attention_bf16[dim=96]")
    assert "dim96" in text and "dim64" not in text and "cases passed" in text


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell):
    assert "_PTXRT_COMPLETE" in succeed("completion", shell)


@pytest.mark.parametrize(
    "words, incomplete, wanted",
    [
        (["show"], "quant", {"quantize", "quantize_operand", "quantize_mxfp4"}),
        (["show"], "KV", {"KVCache"}),
        (["check"], "transpose", {"transpose_naive", "transpose_tiled"}),
        (["run", "quantize", "--format"], "mxfp6", {"mxfp6_e3m2", "mxfp6_e2m3"}),
        (["run", "attention", "--qk"], "mx", {"mxfp8", "mxfp4"}),
        (["run", "matmul", "--b-format"], "", {"bf16", "f16", "nvfp4"}),
        (["run"], "dequantize_mxfp4", {"dequantize_mxfp4", "dequantize_mxfp4_columns"}),
        ([], "comp", {"completion"}),
    ],
)
def test_names_are_completed(words, incomplete, wanted):
    from click.shell_completion import BashComplete

    found = {
        item.value for item in BashComplete(main, {}, "ptxrt", "_PTXRT_COMPLETE").get_completions(words, incomplete)
    }
    assert wanted <= found and all(name.startswith(incomplete) for name in found)


def test_a_file_that_is_replaced_is_said_to_be(x, tmp_path):
    arguments = ["run", "transpose_tiled", "--x", x, "-o", tmp_path / "y.npy"]
    assert "is replaced" not in succeed(*arguments)
    assert f"{tmp_path / 'y.npy'} was there before and is replaced" in succeed(*arguments)
    assert json.loads(succeed(*arguments, "--json"))["replaced"] is True


def test_machines_print_as_a_table():
    lines = str(ptxrt.machines()).splitlines()
    assert [line.split()[0] for line in lines] == ["machine", "native", "portable", "emulator"]
    assert len({line.index(line.split()[1]) for line in lines}) == 1 and repr(ptxrt.machines()) == str(ptxrt.machines())
    assert ptxrt.machines()["emulator"].available


@pytest.mark.skipif(os.name == "nt", reason="a terminal is made by POSIX")
@pytest.mark.parametrize("environment, said", [({}, 1), ({"PTXRT_QUIET": "1"}, 0), ({"PTXRT_MACHINE": "emulator"}, 0)])
def test_the_emulator_is_noticed_once_on_a_terminal(environment, said):
    import pty

    code = "import numpy as np, ptxrt\nfor _ in range(2): ptxrt.quantize(np.ones((2, 32), np.float32), 'mxfp4')\n"
    if ptxrt.machines()["portable"].available:
        pytest.skip("there is a GPU")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PTXRT_")}
    leader, follower = pty.openpty()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stderr=follower, env={**kept, **environment})
    os.close(follower)
    try:
        text = os.read(leader, 1 << 16).decode()
    except OSError:  # empty terminal
        text = ""
    os.close(leader)
    assert done.returncode == 0 and text.count("kernels run on the emulator") == said
    assert (
        "emulator"
        not in subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=kept).stderr
    )
