"""build.py on small kernel trees of the test: what it writes, when it recompiles, and what it refuses."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptxrt import units
from scripts import script

build = script("build.py")
ROOT = Path(__file__).resolve().parent.parent

HEADER = """\
#pragma once
#include "kernel.cuh"
namespace { __device__ __noinline__ float twice(float x) { return x * FACTOR; } }
"""

SCALE = """\
#define FACTOR 2.0f
#include "scale.cuh"
#include <cuda_bf16.h>
VARIANTS(step, 1, 2)
VARIANTS(dim, 32)
KERNEL(ENTRY(_f32), .threads = {32}, .tile = {64})(float *x) {
    x[threadIdx.x * VARIANT_step] = twice(__bfloat162float(__float2bfloat16(x[VARIANT_dim])));
}
"""

PLAIN = """\
#include "kernel.cuh"
KERNEL(plain, .threads = {32, 2}, .shared_bytes = 128)(int *x) { x[threadIdx.x] = 1; }
"""

# Three blocks of 512 threads per multiprocessor leave 42 registers per thread for 64 live values.
SPILLING = """\
#include "kernel.cuh"
KERNEL(spilling, .threads = {512}, .min_blocks = 3, .spill_bytes = SPILL_BYTES)(float *x) {
    float kept[64];
    static_for<64>([&](auto i) { kept[i] = x[threadIdx.x + i * 1024]; });
    __syncthreads();
    static_for<64>([&](auto i) { x[threadIdx.x * 64 + i] = kept[63 - i] - 3 * kept[i]; });
}
"""


def write_tree(folder, **sources):
    """Write a kernels_cu below `folder`, with the project's kernel.cuh and the given sources by stem."""
    tree = folder / "kernels_cu"
    tree.mkdir(parents=True)
    shutil.copy(ROOT / "kernels_cu" / "kernel.cuh", tree)
    for stem, text in sources.items():
        suffix = ".cuh" if text is HEADER else ".cu"
        (tree / f"{stem}{suffix}").write_text(text)
    return tree


def contents(modules):
    return {file.name: file.read_bytes() for file in modules.iterdir()}


@pytest.fixture(scope="session")
def toolchain():
    try:
        return build.find_toolchain()
    except build.ToolchainMissing as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def built(toolchain, tmp_path_factory):
    """A tree with variants, a shared header, internal linkage and a toolkit header, and its built modules."""
    folder = tmp_path_factory.mktemp("built")
    tree = write_tree(folder, scale=SCALE, plain=PLAIN)
    (tree / "scale.cuh").write_text(HEADER)
    build.build(tree, folder / "modules")
    return tree, folder / "modules"


@pytest.fixture
def copy(built, tmp_path):
    """A copy of `built` that the test may change."""
    tree, modules = built
    shutil.copytree(tree, tmp_path / "kernels_cu")
    shutil.copytree(modules, tmp_path / "modules")
    return tmp_path / "kernels_cu", tmp_path / "modules"


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setattr(build, "toolkit_folders", lambda: iter(()))


# Building


def test_variants_are_every_combination_in_order():
    text = "VARIANTS(dim, 32, 64)\nVARIANTS( stages,1 )\n// VARIANTS(no, 1)\n"
    assert build.variants_of(text) == [{"dim": 32, "stages": 1}, {"dim": 64, "stages": 1}]
    assert build.variants_of("KERNEL(x)") == [{}]


@pytest.mark.parametrize(
    "only, chosen",
    [
        ([], ["plain", "scale_step1_dim32", "scale_step2_dim32"]),
        (["scale"], ["scale_step1_dim32", "scale_step2_dim32"]),
        (["scale[step=2]"], ["scale_step2_dim32"]),
        (["scale[step=1, dim=32]", "plain"], ["plain", "scale_step1_dim32"]),
        (["scale_step1_dim32"], ["scale_step1_dim32"]),
    ],
)
def test_only_selects(built, only, chosen):
    assert [unit.unit for unit in build.select(build.find_units(built[0]), only)] == chosen


@pytest.mark.parametrize(
    "only, part", [("scalle", "near: scale"), ("scale[step=9]", "no such unit"), ("a b", "expected NAME")]
)
def test_only_refuses_what_is_not_there(built, only, part):
    with pytest.raises(build.BuildFailure, match=part):
        build.select(build.find_units(built[0]), [only])


def test_files_and_record(built):
    tree, modules = built
    assert sorted(contents(modules)) == sorted(
        unit + suffix
        for unit in ("plain", "scale_step1_dim32", "scale_step2_dim32")
        for suffix in (".ptx", ".portable.ptx", ".compute_80.ptx", ".fatbin", ".portable.fatbin", ".json")
    )
    record = json.loads((modules / "scale_step2_dim32.json").read_text())
    assert (record["name"], record["unit"]) == ("scale", "scale_step2_dim32")
    assert record["variant"] == {"step": 2, "dim": 32}
    assert sorted(record["sources"]) == ["kernels_cu/kernel.cuh", "kernels_cu/scale.cu", "kernels_cu/scale.cuh"]
    assert "-DVARIANT_step=2" in record["flags"]
    assert record["compiler"].startswith("13.0.")
    figures = record["entries"]["scale_step2_dim32_f32"]
    assert sorted(figures) == ["sm_120a", "sm_121a", "sm_80", "sm_90"]
    assert all(found["registers"] > 0 and found["spill_store_bytes"] == 0 for found in figures.values())
    assert record["bytes"]["scale_step2_dim32.ptx"] == (modules / "scale_step2_dim32.ptx").stat().st_size
    assert record["sha256"] == {
        name: hashlib.sha256(data).hexdigest()
        for name, data in contents(modules).items()
        if name.startswith("scale_step2_dim32") and not name.endswith(".json")
    }
    assert set(record["texts"]) == {"compute_120f", "compute_90", "compute_80"}
    for launches in record["texts"].values():
        found = launches["scale_step2_dim32_f32"]
        assert found["launch"] == [32, 1, 1, 0, 64, 1, 1, 1, 0] and found["parameters"] in ("u64", "u64.ptr")


def test_texts_are_for_their_machines_and_name_no_folder(built):
    tree, modules = built
    native = (modules / "scale_step1_dim32.ptx").read_text()
    portable = (modules / "scale_step1_dim32.portable.ptx").read_text()
    assert ".target sm_120f" in native and ".target sm_90" in portable
    for text in (native, portable):
        files = [line.split('"')[1] for line in text.splitlines() if line.lstrip().startswith(".file")]
        assert {"kernels_cu/scale.cu", "kernels_cu/scale.cuh", "cuda/include/cuda_bf16.hpp"} <= set(files)
        assert not any(name.startswith("/") or ":" in name for name in files)
    for name, data in contents(modules).items():
        assert str(tree.parent).encode() not in data, name


def test_what_a_unit_is_made_of_is_known_for_every_target(tmp_path):
    tree = tmp_path / "kernels_cu"
    (tree / "op").mkdir(parents=True)
    (tree / "one.cu").write_text(
        '#include "op/both.cuh"\n#include <cuda_bf16.h>\n#include "cuda_fp16.h"\n// #include "no.cuh"\n'
    )
    (tree / "op" / "both.cuh").write_text(
        '#if __CUDA_ARCH__ >= 900\n  #  include "beside.cuh"\n#endif\n#include "below.cuh"\n'
    )
    (tree / "op" / "beside.cuh").write_text('#include "../one.cu"\n#include "both.cuh"\n')
    for name in ("beside.cuh", "below.cuh", "no.cuh"):
        (tree / name).touch()
    assert build.files_of(tree / "one.cu", tree) == ["below.cuh", "one.cu", "op/beside.cuh", "op/both.cuh"]


def test_lines_are_kept_for_the_emulator_alone(built):
    """Line information would double the size of the compute_80 text, which drivers compile and no tool here reads."""
    for suffix, there in ((".ptx", True), (".portable.ptx", True), (".compute_80.ptx", False)):
        assert ("\t.loc\t" in (built[1] / f"plain{suffix}").read_text()) == there
    assert b".version" not in (built[1] / "plain.portable.fatbin").read_bytes()
    lines = {target.compute: bool(target.lines) for target in build.TARGETS}
    assert lines == {"compute_120f": True, "compute_90": True, "compute_80": False}


def test_parameters_are_read_from_the_text():
    text = """
.visible .entry k(
	.param .align 64 .b8 k_param_0[128],
	.param .u64 .ptr .global .align 16 k_param_1,
	.param .f32 k_param_2
)
.entry none()
.entry line(.param .u32 a, .param .b8 b[3])
"""
    assert build.parameters_of(text) == {"k": "b8[128]@64 u64.ptr f32", "none": "", "line": "u32 b8[3]@1"}


def test_launch_facts_are_read_from_the_text(built):
    unit = build.select(build.find_units(built[0]), ["plain"])[0]
    facts = build.launch_facts((built[1] / "plain.ptx").read_text(), unit)
    assert facts == {"plain": [32, 2, 1, 128, 1, 1, 1, 1, 0]}


def test_same_bytes_in_another_folder(built, tmp_path):
    tree, modules = built
    other = tmp_path / "some where" / "else"
    shutil.copytree(tree, other / "kernels_cu")
    build.build(other / "kernels_cu", tmp_path / "out", jobs=1)
    assert contents(tmp_path / "out") == contents(modules)


# When it is built again


def test_fresh_needs_no_compiler(built, no_compiler, capsys):
    tree, modules = built
    assert build.build(tree, modules)[0] == []
    assert build.main(["--sources", str(tree), "--out", str(modules)]) == 0
    assert "built 0 of 3" in capsys.readouterr().out


def test_touching_a_file_is_no_change(copy, no_compiler):
    tree, modules = copy
    os.utime(tree / "scale.cuh", (1, 1))
    assert build.build(tree, modules)[0] == []


def test_a_changed_header_rebuilds_its_users_alone(copy):
    tree, modules = copy
    before = contents(modules)
    (tree / "scale.cuh").write_text(HEADER.replace("x * FACTOR", "x + FACTOR"))
    todo = build.stale(build.find_units(tree), tree, modules, build.FULL)
    assert [unit.unit for unit in todo] == ["scale_step1_dim32", "scale_step2_dim32"]
    built, _ = build.build(tree, modules, only=["scale[step=1]"])
    assert [unit.unit for unit in built] == ["scale_step1_dim32"]
    after = contents(modules)
    changed = {name.split(".")[0] for name in after if after[name] != before[name]}
    assert changed == {"scale_step1_dim32"}


def test_a_missing_or_damaged_file_is_built_again(copy):
    tree, modules = copy
    (modules / "plain.fatbin").unlink()
    (modules / "scale_step1_dim32.ptx").write_text("half")
    (modules / "scale_step2_dim32.json").write_text("{")
    todo = build.stale(build.find_units(tree), tree, modules, build.FULL)
    assert [unit.unit for unit in todo] == ["plain", "scale_step1_dim32", "scale_step2_dim32"]


def test_a_file_of_the_same_size_with_other_bytes_is_built_again(copy):
    tree, modules = copy
    data = bytearray((modules / "plain.fatbin").read_bytes())
    data[-100] ^= 1
    (modules / "plain.fatbin").write_bytes(data)
    todo = build.stale(build.find_units(tree), tree, modules, build.FULL)
    assert [unit.unit for unit in todo] == ["plain"]


@pytest.mark.parametrize("record", ["{}", "[]", "null", "0", '{"unit": "plain"}', b"\xff", "[" * 100_000])
def test_a_damaged_record_is_built_again(copy, record):
    tree, modules = copy
    (modules / "plain.json").write_bytes(record if isinstance(record, bytes) else record.encode())
    todo = build.stale(build.find_units(tree), tree, modules, build.FULL)
    assert [unit.unit for unit in todo] == ["plain"]


def test_units_without_a_source_are_removed(copy, no_compiler):
    tree, modules = copy
    (tree / "plain.cu").unlink()
    build.build(tree, modules)
    assert not list(modules.glob("plain*"))


def test_ptx_only(toolchain, copy, tmp_path):
    tree, modules = copy
    out = tmp_path / "out"
    arguments = ["--sources", str(tree), "--out", str(out), "--ptx-only", "--only", "plain"]
    assert build.main(arguments) == 0
    assert sorted(contents(out)) == ["plain.json", "plain.ptx"]
    assert (out / "plain.ptx").read_bytes() == (modules / "plain.ptx").read_bytes()
    units = build.select(build.find_units(tree), ["plain"])
    assert not build.stale(units, tree, out, build.PTX_ONLY)
    assert build.stale(units, tree, out, build.QUICK) and build.stale(units, tree, out, build.FULL)


def test_quick(toolchain, copy, tmp_path):
    """A quick build has code for one card and a text for newer ones, equal to those of a full build; it does not
    rebuild a full build."""
    tree, modules = copy
    out = tmp_path / "out"
    arguments = ["--sources", str(tree), "--out", str(out), "--quick", "--only", "plain"]
    assert build.main(arguments) == 0
    full, quick = (
        {name: data for name, data in contents(folder).items() if name.startswith("plain")} for folder in (modules, out)
    )
    assert quick.keys() == full.keys() - {"plain.compute_80.ptx"}
    for name in ("plain.ptx", "plain.portable.ptx"):
        assert quick[name] == full[name]
    record, whole = (json.loads(found["plain.json"]) for found in (quick, full))
    assert record["cubins"] == {"sm_120a": whole["cubins"]["sm_120a"]} and record["flags"] == whole["flags"]
    assert record["texts"] == {name: whole["texts"][name] for name in ("compute_120f", "compute_90")}
    assert record["entries"]["plain"] == {"sm_120a": whole["entries"]["plain"]["sm_120a"]}
    units = build.select(build.find_units(tree), ["plain"])
    for extent, states in (
        (build.PTX_ONLY, [False, False]),
        (build.QUICK, [False, False]),
        (build.FULL, [True, False]),
    ):
        assert [bool(build.stale(units, tree, folder, extent)) for folder in (out, modules)] == states
    assert b"\x7fELF" not in quick["plain.portable.fatbin"] and len(quick["plain.fatbin"]) < len(full["plain.fatbin"])
    assert build.main(["--sources", str(tree), "--out", str(out), "--only", "plain"]) == 0
    assert {name: data for name, data in contents(out).items()} == full


def test_a_quick_build_does_not_assemble_what_is_on_record(toolchain, copy, tmp_path, monkeypatch):
    """It takes the figures of the record, unless the text, line numbers aside, or the compiler is another one."""
    tree, modules = copy
    out = tmp_path / "out"
    (unit,) = build.select(build.find_units(tree), ["plain"])
    whole = build.record_of(unit, modules)
    usage = whole["entries"]["plain"]["sm_120a"]
    dynamic = whole["texts"]["compute_120f"]["plain"]["launch"][build.SHARED_BYTES]
    figures = {"registers": usage["registers"], "spill_bytes": 0, "shared_bytes": usage["shared_bytes"] + dynamic}
    key = build.text_key((modules / "plain.ptx").read_text(), whole["compiler"])
    known = {"text": key, "cubin": whole["cubins"]["sm_120a"]}
    on_record = {"sm_120a": {"plain": figures}, "code": {"plain": known}}
    monkeypatch.setattr(build, "code_record", lambda: on_record)
    quick = ["--sources", str(tree), "--out", str(out), "--quick", "--only", "plain"]
    assert build.main(quick) == 0
    assert sorted(contents(out)) == sorted(["plain.json", *build.QUICK.outputs(unit)])
    assert b"\x7fELF" not in contents(out)["plain.fatbin"]  # the text, in place of the code
    record = build.assembled(unit, out)
    assert record["cubins"] == {"sm_120a": known["cubin"]} and record["texts"].keys() == {"compute_120f", "compute_90"}
    assert {name: record["entries"]["plain"]["sm_120a"][name] for name in usage if name != "stack_bytes"} == {
        name: value for name, value in usage.items() if name != "stack_bytes"
    }
    assert not build.stale([unit], tree, out, build.QUICK) and build.stale([unit], tree, out, build.FULL)

    source = (tree / "plain.cu").read_text()
    (tree / "plain.cu").write_text("// a line more\n" + source)
    assert build.main(quick) == 0 and build.extent_of(build.record_of(unit, out)) is build.KNOWN  # the same code
    known["text"] = "of another text"
    assert build.stale([unit], tree, out, build.QUICK)
    assert build.main(quick) == 0 and b"\x7fELF" in contents(out)["plain.fatbin"]
    assert build.assembled(unit, out)["cubins"] == record["cubins"]
    assert key != build.text_key((modules / "plain.ptx").read_text(), "14.0.1")


def test_list_says_what_is_fresh(copy, no_compiler, capsys):
    tree, modules = copy
    build.remove("plain", modules)
    (tree / "scale.cu").write_text(SCALE + "\n")
    assert build.main(["--list", "--sources", str(tree), "--out", str(modules)]) == 0
    lines = [line.split(None, 1) for line in capsys.readouterr().out.splitlines()]
    assert lines == [["plain", "not built"], ["scale_step1_dim32", "stale"], ["scale_step2_dim32", "stale"]]


# Removing


PRECIOUS = {
    "package.json": '{"name": "mine"}',
    "notes.txt": "mine",
    "plain.txt": "mine",
    "list.json": "[1]",
    "unit.json": '{"unit": "unit"}',
}


def clean(tree, modules):
    return build.main(["--clean", "--sources", str(tree), "--out", str(modules)])


def test_clean_removes_what_a_build_wrote_alone(copy, capsys):
    tree, modules = copy
    for name, text in PRECIOUS.items():
        (modules / name).write_text(text)
    (modules / "folder").mkdir()
    (modules / "folder" / "plain.ptx").write_text("mine")
    (modules / "plain.json").write_text("{")  # still recognized by its source
    assert clean(tree, modules) == 0
    assert {path.name: path.read_text() for path in modules.iterdir() if path.is_file()} == PRECIOUS
    assert (modules / "folder" / "plain.ptx").read_text() == "mine"
    assert (
        "removed 18 files of 3 units" in (output := capsys.readouterr().out)
        and "left what no build wrote: folder, list.json" in output
    )


def test_clean_removes_the_units_that_are_named(copy, capsys):
    tree, modules = copy
    before = set(contents(modules))
    assert build.main(["--clean", "--only", "plain", "--sources", str(tree), "--out", str(modules)]) == 0
    assert "removed 6 files of 1 units" in capsys.readouterr().out
    assert before - set(contents(modules)) == {name for name in before if name.split(".")[0] == "plain"}


def test_clean_removes_a_folder_that_is_empty_then(copy, capsys):
    tree, modules = copy
    (modules / f"{build.staging_prefix().rsplit('-', 2)[0]}-999999999-abc").mkdir()
    assert clean(tree, modules) == 0 and not modules.exists()
    assert clean(tree, modules) == 0 and "nothing to remove" in capsys.readouterr().out


@pytest.mark.skipif(os.name == "nt", reason="symbolic links need a privilege there")
def test_clean_leaves_what_links_point_to(copy, tmp_path, capsys):
    tree, modules = copy
    link = tmp_path / "link"
    link.symlink_to(modules, target_is_directory=True)
    before = contents(modules)
    assert clean(tree, link) == 1 and "symbolic link" in capsys.readouterr().err
    assert contents(modules) == before and link.is_symlink()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "data").write_text("mine")
    (modules / "plain.ptx").rename(elsewhere / "plain.ptx")
    (modules / "plain.ptx").symlink_to(elsewhere / "plain.ptx")
    (modules / "plain.fatbin").unlink()
    (modules / "plain.fatbin").symlink_to(elsewhere, target_is_directory=True)
    staging = modules / f"{build.staging_prefix().rsplit('-', 2)[0]}-999999999-abc"
    staging.symlink_to(elsewhere, target_is_directory=True)
    assert clean(tree, modules) == 0
    assert sorted(path.name for path in elsewhere.iterdir()) == ["data", "plain.ptx"] and os.listdir(modules) == [
        staging.name
    ]


def test_a_build_leaves_files_that_it_did_not_write(copy, no_compiler):
    tree, modules = copy
    for name, text in PRECIOUS.items():
        (modules / name).write_text(text)
    build.build(tree, modules)
    assert {name: (modules / name).read_text() for name in PRECIOUS} == PRECIOUS


@pytest.mark.skipif(os.name == "nt", reason="processes are asked for by a signal")
@pytest.mark.parametrize("number", ["SIGTERM", "SIGHUP", "SIGKILL"])
def test_what_a_killed_build_leaves_is_removed_by_the_next(toolchain, copy, tmp_path, number):
    tree, modules = copy
    build.remove("plain", modules)
    path = tmp_path / "slow" / "bin"
    path.mkdir(parents=True)
    for name in ("nvcc", "ptxas", "fatbinary"):  # a compiler that reports its version, else runs until killed
        answer = f"'{getattr(toolchain, name)}' \"$@\""
        (path / name).write_text(
            f"#!/bin/sh\ncase $1 in --version|--dryrun) exec {answer};; esac\necho $$ > '{tmp_path}/pid'\nexec sleep 60\n"
        )
        (path / name).chmod(0o755)
    command = [sys.executable, str(ROOT / "build.py"), "--sources", str(tree), "--out", str(modules), "--jobs", "1"]
    process = subprocess.Popen(
        command,
        env={**os.environ, "CUDA_HOME": str(path.parent)},
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # nohup ignores it
    )
    pid = tmp_path / "pid"
    while not (pid.exists() and pid.read_text().strip()):
        assert process.poll() is None
        time.sleep(0.02)
    (left,) = modules.glob(".staging-*")
    assert f"-{process.pid}-" in left.name
    build.remove_staging(modules)
    assert left.is_dir()  # it belongs to a running build
    process.send_signal(getattr(signal, number))
    process.wait()
    os.kill(int(pid.read_text()), signal.SIGKILL)
    build.build(tree, modules)
    assert not list(modules.glob(".staging-*")) and (modules / "plain.fatbin").is_file()


# Requirements


@pytest.mark.parametrize("name", ["build", "toolkit"])
def test_requirements_have_versions_and_hashes(name):
    text = (ROOT / "requirements" / f"{name}.txt").read_text().replace("\\\n", "")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    for line in lines:
        wheel, *hashes = line.split()
        assert (
            re.fullmatch(r"[\w.\[\],-]+==[\w.]+", wheel)
            and hashes
            and all(re.fullmatch("--hash=sha256:[0-9a-f]{64}", h) for h in hashes)
        )
    wheels = [line.split()[0] for line in lines]
    if name == "toolkit":
        assert build.toolkit_wheels() == wheels and any(
            wheel.startswith(f"cuda-toolkit[nvcc,cccl]=={build.TOOLKIT}.") for wheel in wheels
        )
    else:
        assert any(wheel.startswith("hatchling==1.") for wheel in wheels)


def test_requires_says_how_pip_installs_a_toolkit(monkeypatch, capsys):
    monkeypatch.setattr(build, "stale", lambda *_, **__: ["unit"])
    monkeypatch.setattr(build, "toolkit_folders", lambda: iter(()))
    assert build.main(["--requires"]) == 0
    monkeypatch.chdir(ROOT)
    assert capsys.readouterr().out == f"--require-hashes -r {Path('requirements', 'toolkit.txt')}\n"
    monkeypatch.setattr(build, "stale", lambda *_, **__: [])
    assert build.main(["--requires"]) == 0 and capsys.readouterr().out == "\n"


def test_a_missing_host_compiler_asks_for_no_toolkit(monkeypatch, capsys):
    def find():
        raise build.HostCompilerMissing("install g++")

    monkeypatch.setattr(build, "stale", lambda *_, **__: ["unit"])
    monkeypatch.setattr(build, "find_toolchain", find)
    assert build.main(["--requires"]) == 1
    out, err = capsys.readouterr()
    assert not out and "install g++" in err


@pytest.mark.parametrize("folder", ["plain", "größe", "a b", "日本"])
def test_paths_in_texts_are_relative_in_any_folder(tmp_path, folder):
    """nvcc writes bytes beyond ASCII as octal numbers."""
    sources, top = tmp_path / folder / "kernels_cu", tmp_path / folder / "cuda"
    for path, want in (
        (sources / "op" / "x.cuh", "kernels_cu/op/x.cuh"),
        (top / "targets" / "x86" / "include" / "y.h", "cuda/include/y.h"),
        ("/usr/include/z.h", "system/z.h"),
    ):
        octal = "".join(chr(byte) if byte < 128 else f"\\{byte:03o}" for byte in str(path).encode())
        for text in (str(path), octal):
            assert build.quiet_path(text, str(sources), str(top)) == want


# Refusals


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--only", "attention_bf16[dim]"], "--only attention_bf16[dim]: expected NAME or NAME[axis=value]"),
        (["--only", "attention_bf16[dim=64,]"], "expected NAME or NAME[axis=value]"),
        (["--jobs", "0"], "argument --jobs: 0 is no number of processes"),
        (["--jobs", "-1"], "argument --jobs: -1"),
        (["--table", "--quick"], "argument --table: tables are of whole builds"),
        (["--table", "--ptx-only"], "argument --table"),
        (["--clean", "--only", "nothing_of_that_name"], "no such unit"),
    ],
)
def test_wrong_options(copy, tmp_path, capsys, arguments, words):
    (tmp_path / "out").mkdir()
    try:
        code = build.main([*arguments, "--sources", str(copy[0]), "--out", str(tmp_path / "out")])
    except SystemExit as ended:
        code = ended.code
    assert code in (1, 2) and words in capsys.readouterr().err


@pytest.mark.parametrize(
    "data", [b"VARIANTS(dim dim_v, 64, 128)\n", b"VARIANTS(dim, 64, x)\n", "// größe\n".encode("latin-1")]
)
def test_sources_that_cannot_be_read_are_named(copy, capsys, data):
    (copy[0] / "wrong.cu").write_bytes(data)
    assert build.main(["--list", "--sources", str(copy[0])]) == 1
    assert f"BuildFailure: {copy[0] / 'wrong.cu'}: " in capsys.readouterr().err


def test_no_toolkit_says_what_to_do(copy, monkeypatch, tmp_path, capsys):
    tree, modules = copy
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", [])
    assert build.main(["--sources", str(tree), "--out", str(tmp_path / "none")]) == 1
    message = capsys.readouterr().err
    assert (
        "ToolchainMissing" in message
        and "CUDA_HOME" in message
        and "--require-hashes -r" in message
        and "toolkit.txt" in message
    )


@pytest.mark.skipif(os.name == "nt", reason="the stand-in for nvcc is a shell script")
def test_another_release_is_passed_over(monkeypatch, tmp_path):
    old = tmp_path / "old" / "bin"
    old.mkdir(parents=True)
    for name in ("nvcc", "ptxas", "fatbinary"):
        (old / name).write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.8, V12.8.93'\n")
        (old / name).chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(old.parent))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(build.ToolchainMissing, match=r"old.bin \(CUDA_HOME\) is 12\.8"):
        build.find_toolchain()


@pytest.mark.skipif(os.name == "nt", reason="the stand-in for nvcc is a shell script")
def test_wheels_of_the_environment_are_found(monkeypatch, tmp_path):
    folder = tmp_path / "nvidia" / "cu13" / "bin"
    folder.mkdir(parents=True)
    for name in ("nvcc", "ptxas", "fatbinary"):
        (folder / name).write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
        (folder / name).chmod(0o755)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(build.shutil, "which", _which_without_nvcc_on_path(build.shutil.which))
    found = build.find_toolchain()
    assert (found.version, found.origin) == ("13.0.88", f"PyPI: {folder}")


def _which_without_nvcc_on_path(which):
    return lambda name, path=None: None if name == "nvcc" and path is None else which(name, path=path)


def test_undeclared_spills_fail_and_declared_ones_pass(toolchain, tmp_path):
    tree = write_tree(tmp_path, spilling=SPILLING.replace("SPILL_BYTES", "0"))
    with pytest.raises(build.SpillFailure, match=r"spilling on sm_12[01]a spills \d+ bytes .* declared: 0\."):
        build.build(tree, tmp_path / "modules")
    assert not list((tmp_path / "modules").glob("spilling*"))
    (tree / "spilling.cu").write_text(SPILLING.replace("SPILL_BYTES", "4096"))
    build.build(tree, tmp_path / "modules")
    record = json.loads((tmp_path / "modules" / "spilling.json").read_text())
    assert 0 < record["entries"]["spilling"]["sm_120a"]["spill_store_bytes"] <= 4096


def test_performance_loss_fails(built):
    unit = build.find_units(built[0])[0]
    log = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    with pytest.raises(build.PerformanceFailure, match="plain on sm_90: .*serialized"):
        build.check_assembly(unit, "sm_90", log, {}, None)


@pytest.mark.parametrize(
    "name, source, failure, part",
    [
        ("warned", '#include "kernel.cuh"\nKERNEL(warned)(int *x) { int unused = 1; }', "CompileFailure", "unused"),
        ("other", PLAIN, "ContractFailure", "entry plain should be named other or other_DTYPE"),
        ("empty", "__global__ void f();", "ContractFailure", "no entry"),
        ("bare", 'extern "C" __global__ void bare(int *x) { *x = 1; }', "ContractFailure", "no constant bare_launch"),
        ("gemm_nvfp4", PLAIN.replace("plain", "gemm_nvfp4"), "ContractFailure", "no block-scaled MMA"),
        (
            "broken",
            PLAIN.replace("plain", "broken").replace("x[threadIdx.x] = 1", 'asm("nonsense;")'),
            "CompileFailure",
            "nonsense",
        ),
    ],
)
def test_refusals(toolchain, tmp_path, name, source, failure, part):
    tree = write_tree(tmp_path, **{name: source})
    with pytest.raises(build.BuildFailure) as caught:
        build.build(tree, tmp_path / "modules", extent=build.FULL if name == "broken" else build.PTX_ONLY)
    assert failure in (type(caught.value).__name__, "CompileFailure")
    assert part in str(caught.value) and name in str(caught.value)
    assert not list((tmp_path / "modules").iterdir())


def test_a_folder_that_cannot_be_written_is_a_message(toolchain, copy, capsys):
    tree, modules = copy
    (modules / "file").touch()
    assert build.main(["--sources", str(tree), "--out", str(modules / "file" / "modules")]) == 1
    assert "NotADirectoryError" in capsys.readouterr().err


def test_one_failure_keeps_the_others(toolchain, copy):
    tree, modules = copy
    build.remove("plain", modules)
    (tree / "wrong.cu").write_text("int x = ;")
    with pytest.raises(build.CompileFailure, match="wrong: nvcc failed"):
        build.build(tree, modules)
    assert (
        (modules / "plain.fatbin").is_file()
        and not list(modules.glob("wrong*"))
        and not list(modules.glob(".staging*"))
    )


# The project itself


def test_it_imports_nothing_of_the_package():
    code = f"import sys; sys.argv = ['build.py', '--list']; import runpy; runpy.run_path({str(ROOT / 'build.py')!r}, run_name='x')"
    code += "; assert not [m for m in sys.modules if m.split('.')[0] in ('ptxrt', 'numpy', 'hatchling')]"
    subprocess.run([sys.executable, "-I", "-c", code], check=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of the project as it stands."""
    pytest.importorskip("hatchling")
    if build.stale(build.find_units(build.SOURCES), build.SOURCES, build.MODULES, build.FULL):
        pytest.skip("the modules are not built for every target, or older than their sources: run make")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (path,) = folder.glob("ptxrt-*-py3-none-any.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The folder of the unpacked wheel."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


NAMES = st.builds("{}{}".format, st.sampled_from(["%r", "%rd", "%f", "$L__BB0_", "$L__BB11_"]), st.integers(0, 2000))


@given(st.lists(NAMES | st.sampled_from([".entry", " ", ",", "-3", "!", "@", "\n", "%tid.x", "7"]), max_size=60))
def test_relative_names_become_absolute_again(words):
    """Words stand apart, as in PTX: no name is followed by a sign of relative ones."""
    text = " ".join(words)
    assert units.absolute(build.relative(text)) == text


def test_names_are_relative_to_the_latest_new_one(built):
    text = "add %r1, %r1, 7; add %r2, %r1, %r900; add %r3, %r2, %r1; .entry add %r3, %r3, 7;"
    assert (
        build.relative(text)
        == "add %r!, %r~0, 7; add %r!, %r~1, %r@898; add %r@-897, %r~1, %r~2; .entry add %r@0, %r~0, 7;"
    )
    assert build.relative("mov %r1000, %r1, %r1000, %r1;") == "mov %r@1000, %r@-999, %r1000, %r~0;"
    for unit in ("plain", "scale_step2_dim32"):
        for suffix in (".ptx", ".compute_80.ptx"):
            whole = (built[1] / f"{unit}{suffix}").read_text()
            assert units.absolute(build.relative(whole)) == whole


# Limits of a wheel, in bytes. Today's kernels take 23.9 million, and 25.7 million installed.
WHEEL, INSTALLED = 32e6, 55e6


@pytest.mark.slow
def test_wheel_holds_the_modules_and_no_stray_names(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        entry_points = archive.read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
        assert wheel.stat().st_size < WHEEL and sum(info.file_size for info in archive.infolist()) < INSTALLED
    assert {name.split("/")[0].split("-")[0] for name in names} == {"ptxrt"}
    assert "ptxrt = ptxrt.commands:main" in entry_points
    assert "ptxrt/py.typed" in names
    units = build.find_units(build.SOURCES)
    wanted = {unit.unit + suffix for unit in units for suffix in (".fatbin.xz", ".portable.fatbin.xz")}
    wanted |= {unit.name + suffix for unit in units for suffix in (".ptx.xz", ".compute_80.ptx.xz")} | {"index.json"}
    assert {name.rpartition("/")[2] for name in names if name.startswith("ptxrt/modules/")} == wanted


def run_installed(folder, code):
    """Run Python code with the installed package outside the checkout; return its output."""
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_an_installed_package_runs_without_a_checkout(installed):
    code = """
import numpy as np, ptxrt
from ptxrt import units
assert ptxrt.__file__.startswith(INSTALLED) and not (units.CHECKOUT / "kernels_cu").exists()
x = np.eye(32, dtype=np.float32)
with ptxrt.using("emulator"):
    assert np.array_equal(ptxrt.dequantize(ptxrt.quantize(x, "nvfp4")), x)
with ptxrt.using("emulator", ptx="portable"):
    try:
        ptxrt.quantize(x, "mxfp4")
    except ptxrt.BuildError as error:
        print(error)
try:
    units.text("no_such_unit", False)
except ptxrt.BuildError as error:
    print(error)
""".replace("INSTALLED", repr(str(installed)))
    portable, missing = run_installed(installed, code).splitlines()
    assert (
        portable.startswith("the portable PTX text of quantize_mxfp4 is no part of the installed package")
        and "from a checkout" in portable
    )
    assert "no_such_unit is not in" in missing and "reinstall" in missing


@pytest.mark.slow
def test_an_installed_package_knows_what_the_records_say(installed):
    """The index describes every entry of every text, and the packs hold every native text, as in the checkout."""
    code = """
import json, sys, time
from ptxrt import units
facts = {unit: {part: units.record(unit)[part] for part in ("variant", "entries", "texts")} for unit in json.loads(sys.argv[1])}
longest = 0
for unit in facts:
    units.text(unit, False)  # read once, so that the file is in memory
    units._unpacked_texts.cache_clear()
    start = time.process_time()
    facts[unit]["sha256"] = units.hashlib.sha256(units.text(unit, False).encode()).hexdigest()
    longest = max(longest, time.process_time() - start)
    for portable in (False, True):
        with units.fatbin_file(unit, portable) as file:
            assert units.hashlib.sha256(file.read_bytes()).hexdigest() == units.record(unit)["sha256"][file.name]
for unit in list(facts)[::16]:
    facts[unit]["text"] = units.hashlib.sha256(units.image(unit, True, (10, 0))[:-1]).hexdigest()
print(json.dumps([facts, longest]))
"""
    names = [unit.unit for unit in build.find_units(build.SOURCES)]
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(names)], cwd=installed, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    facts, longest = json.loads(done.stdout)
    for place, unit in enumerate(build.find_units(build.SOURCES)):
        record = build.record_of(unit, build.MODULES)
        want = {part: record[part] for part in ("variant", "entries", "texts")}
        if place % 16 == 0:
            want["text"] = record["sha256"][f"{unit.unit}.compute_80.ptx"]
        assert facts[unit.unit] == {**want, "sha256": record["sha256"][f"{unit.unit}.ptx"]}
    assert longest < 0.2, "a pack is to be unpacked in 50 ms of an idle core; this one may be busy"


@pytest.mark.slow
@pytest.mark.parametrize(
    "call, name",
    [
        ("text('transpose_naive', False)", "transpose_naive.ptx.xz"),
        ("image('transpose_naive', False, (12, 0))", "transpose_naive.fatbin.xz"),
        ("image('transpose_naive', True, (9, 0))", "transpose_naive.portable.fatbin.xz"),
        ("image('transpose_naive', True, (10, 0))", "transpose_naive.compute_80.ptx.xz"),
    ],
)
@pytest.mark.parametrize(
    "damage, part", [(b"", "is damaged"), (b"\xfd7zXZ\0 and so on", "is damaged"), (None, "is missing")]
)
def test_a_damaged_pack_is_a_build_error(installed, tmp_path, call, name, damage, part):
    of_others = {file.name for file in (installed / "ptxrt" / "modules").glob("*.fatbin.xz")} - {name}
    shutil.copytree(installed / "ptxrt", tmp_path / "ptxrt", ignore=shutil.ignore_patterns(*of_others))
    pack = tmp_path / "ptxrt" / "modules" / name
    pack.unlink() if damage is None else pack.write_bytes(damage)
    code = f"""
from ptxrt import BuildError, units
try:
    units.{call}
except BuildError as error:
    print(error)
"""
    assert part in (message := run_installed(tmp_path, code)) and "reinstall" in message


@pytest.mark.slow
def test_a_damaged_index_is_a_build_error(installed, tmp_path):
    shutil.copytree(installed / "ptxrt", tmp_path / "ptxrt", ignore=shutil.ignore_patterns("*.fatbin.xz"))
    for content in (
        "",
        "{",
        "[]",
        "null",
        '{"units": []}',
        '{"units": {"transpose_naive": []}}',
        '{"units": {"transpose_naive": {}}}',
    ):
        (tmp_path / "ptxrt" / "modules" / "index.json").write_text(content)
        code = "from ptxrt import BuildError, units\ntry: units.text('transpose_naive', False)\nexcept BuildError as error: print(error)"
        assert "index.json is damaged" in run_installed(tmp_path, code)
