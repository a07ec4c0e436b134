"""What `make coverage` counts and when it fails, on two small entries."""

import gc
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import ptx_coverage
import ptxrt
from ptx_coverage import EXPLAINED, ROOT, Coverage, Explained, Place
from ptxrt.emulator import check
from ptxrt.ptx.parse import parse

STORE = """.version 9.0
.target sm_90
.address_size 64
.visible .entry store(.param .u64 .ptr .global .align 4 y)
{
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [y];
    st.global.u32 [%rd1], 7;
    ret;
}
"""
# The ex2 wrapper is inlined at two lines of a function of op/, which also has a line of integer operations alone. Line
# 19 of the text copies line 11.
TEXT = """.version 9.0
.target sm_90
.address_size 64
.visible .entry k_f32(.param .u64 x)
{
    .reg .f32 %f<3>; .reg .b32 %r<3>;
    .loc 1 7 0
    .loc 2 20 5, function_name $a, inlined_at 1 7 0
    add.s32 %r1, %r1, 1;
    .loc 3 5 9, function_name $b, inlined_at 2 20 5
    ex2.approx.ftz.f32 %f1, %f1;
    .loc 2 30 5, function_name $a, inlined_at 1 7 0
    .loc 3 5 9, function_name $b, inlined_at 2 30 5
    ex2.approx.ftz.f32 %f1, %f1;
    .loc 2 40 5, function_name $a, inlined_at 1 7 0
    mov.b32 %r1, %r2;
    .loc 3 0 9
    .loc 3 5 9, function_name $b, inlined_at 2 20 5
    ex2.approx.ftz.f32 %f1, %f1;
    ret;
}
.visible .entry k_f16(.param .u64 x)
{
    .reg .f32 %f<3>;
    .loc 1 8 0
    .loc 2 30 5, function_name $c, inlined_at 1 8 0
    .loc 3 5 9, function_name $d, inlined_at 2 30 5
    ex2.approx.ftz.f32 %f1, %f1;
    ret;
}
.file 1 "kernels_cu/k.cu"
.file 2 "kernels_cu/op/k.cuh"
.file 3 "kernels_cu/ptx/math.cuh"
"""
FIRST, SECOND = (
    Place("ex2.approx.ftz.f32", ("kernels_cu/ptx/math.cuh:5", f"kernels_cu/op/k.cuh:{line}")) for line in (20, 30)
)
INTEGERS = Place("", ("kernels_cu/op/k.cuh:40",))
ALL_OF_F32, ALL_OF_F16 = dict.fromkeys((9, 11, 14, 16, 19, 20), 32), dict.fromkeys((28, 29), 32)


def coverage(f32: dict, f16: dict) -> Coverage:
    """The coverage if these lines of the two entries ran."""
    found, module = Coverage(), parse(TEXT, "k.ptx")
    found.add(module, "k_f32", f32)
    found.add(module, "k_f16", f16)
    return found


@pytest.fixture(autouse=True)
def sources(monkeypatch):
    """Source lines whose text is their own position."""
    monkeypatch.setattr(ptx_coverage, "source_line", lambda name: f"the text of {name}")


def test_a_place_runs_where_any_of_its_copies_does():
    found = coverage({**ALL_OF_F32, 11: 0, 14: 0}, ALL_OF_F16)
    assert found.counted() == {FIRST: True, SECOND: True, INTEGERS: True, Place("", ("kernels_cu/op/k.cuh:20",)): True}
    assert found.lines == {True: 6, False: 2} and found.entries == {"k_f32": True, "k_f16": True}
    assert "lines  75.0% of      8   places 100.0% of     4   entries 2 of 2" == str(found)


def test_a_function_has_places_for_every_line_it_is_inlined_at():
    found = coverage({**ALL_OF_F32, 11: 0, 19: 0, 20: 0}, ALL_OF_F16)
    assert [place for place, ran in found.counted().items() if not ran] == [FIRST]
    found = coverage({**ALL_OF_F32, 16: 0}, ALL_OF_F16)
    assert [place for place, ran in found.counted().items() if not ran] == [INTEGERS]


def exit_code(monkeypatch, found, explanations=(), failed=0) -> int:
    """The exit code of main for this native coverage; the portable text runs completely."""
    both = iter((found, coverage(ALL_OF_F32, ALL_OF_F16)))
    monkeypatch.setattr(ptx_coverage, "run_tests", lambda *arguments: bool(failed))
    monkeypatch.setattr(ptx_coverage, "merged", lambda files: {})
    monkeypatch.setattr(ptx_coverage, "kernel_coverage", lambda kernel, counts, portable: next(both))
    monkeypatch.setattr(ptx_coverage.ptxrt, "kernels", lambda: {"k": SimpleNamespace(name="k")})
    monkeypatch.setattr(ptx_coverage, "EXPLAINED", list(explanations))
    return ptx_coverage.main([])


def test_what_never_runs_fails(monkeypatch, capsys):
    assert exit_code(monkeypatch, coverage(ALL_OF_F32, ALL_OF_F16)) == 0
    assert exit_code(monkeypatch, coverage(ALL_OF_F32, ALL_OF_F16), failed=1) == 1
    capsys.readouterr()
    missing = coverage({**ALL_OF_F32, 11: 0, 19: 0}, ALL_OF_F16)
    assert exit_code(monkeypatch, missing) == 1
    assert (
        "native k: ptx/math.cuh:5 < op/k.cuh:20 (ex2.approx.ftz.f32) never runs: the text of kernels_cu/ptx/math.cuh:5"
        in capsys.readouterr().out
    )
    assert exit_code(monkeypatch, coverage(ALL_OF_F32, {})) == 1  # every place runs in the other entry
    assert "native k: the entry k_f16 is never launched" in capsys.readouterr().out
    assert exit_code(monkeypatch, coverage(ALL_OF_F32, dict.fromkeys(ALL_OF_F16, 0))) == 1


@pytest.mark.parametrize(
    "explanation, code",
    [
        (("k", "native", "math.cuh:5 < k.cuh:20"), 0),
        (("k*", "native portable", "k.cuh:20"), 0),
        (("other", "native", "math.cuh:5 < k.cuh:20"), 1),
        (("k", "portable", "math.cuh:5 < k.cuh:20"), 1),
        (("k", "native", "k.cuh:20 < math.cuh:5"), 1),
        (("k", "native", "math.cuh:5 < k.cuh:30"), 1),
    ],
    ids=str,
)
def test_an_explanation_is_of_its_place_alone(monkeypatch, explanation, code):
    missing = coverage({**ALL_OF_F32, 11: 0, 19: 0}, ALL_OF_F16)
    assert exit_code(monkeypatch, missing, [Explained(*explanation, "why")]) == code


def test_an_explanation_of_what_runs_fails(monkeypatch, capsys):
    explanation = Explained("k", "native", "math.cuh:5 < k.cuh:20", "why")
    assert exit_code(monkeypatch, coverage(ALL_OF_F32, ALL_OF_F16), [explanation]) == 1
    assert "the explanation of 'math.cuh:5 < k.cuh:20' in k is of no place that does not run" in capsys.readouterr().out


def test_every_test_file_runs_but_those_left_out():
    there = {path.stem for path in (ROOT / "tests").glob("test_*.py")}
    files = [path.stem for path in ptx_coverage.test_files()]
    assert files[0] == ptx_coverage.DECLARED and set(files) == there - set(ptx_coverage.LEFT_OUT)
    assert set(ptx_coverage.LEFT_OUT) < there
    assert ptx_coverage.test_files(["tests/test_gemm.py"]) == [Path("tests/test_gemm.py")]


def test_a_kernel_has_the_files_that_launched_it(monkeypatch, tmp_path, capsys):
    """Of test_kernels.py its own cases run, of the others those that launched it or never ran here."""
    monkeypatch.setattr(ptx_coverage, "COUNTS", tmp_path)
    calls = []

    def run(command, *, env, **_):
        calls.append((Path(command[-1]).stem, command[command.index("-k") + 1], Path(env["PTXRT_COVERAGE"]).name))
        return SimpleNamespace(returncode=ptx_coverage.NO_TESTS, stdout="...\n3 passed")

    monkeypatch.setattr(subprocess, "run", run)
    for name, text in ("test_a", "amax"), ("test_b", "cast"), ("test_c", ""):
        (tmp_path / name).mkdir()
        if text:
            (tmp_path / name / "1-1.json").write_text(json.dumps({f"{text}.portable.ptx 0123": {}}))
            (tmp_path / name / "ended").touch()
    files = [Path(f"tests/{name}.py") for name in (ptx_coverage.DECLARED, "test_a", "test_b", "test_c")]
    assert not ptx_coverage.run_tests(files, [ptxrt.kernels()["amax"]], 1)
    plain = "not hardware_arithmetic"
    assert calls == [
        (ptx_coverage.DECLARED, f"{plain} and (-amax-)", ptx_coverage.DECLARED),
        ("test_a", plain, "test_a"),
        ("test_c", plain, "test_c"),
    ]
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        path.name for path in files[:2] + files[3:]
    ]
    calls.clear()
    ptx_coverage.run_tests(files, [], 1)
    assert [call[:2] for call in calls] == [(path.stem, plain) for path in files]


def test_a_failing_test_fails(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(ptx_coverage, "COUNTS", tmp_path)
    result = SimpleNamespace(returncode=1, stdout="what is wrong\n1 failed")
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: result)
    assert ptx_coverage.run_tests([Path("tests/test_a.py")], [], 1)
    assert "what is wrong" in capsys.readouterr().out


def test_counts_of_files_add_up(monkeypatch, tmp_path):
    monkeypatch.setattr(ptx_coverage, "COUNTS", tmp_path)
    for name, count in ("test_a", 32), ("test_b", 64), ("test_c", 128):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1-1.json").write_text(json.dumps({"k.ptx 0123": {"k_f32": {"9": count}}}))
    files = [Path("tests/test_a.py"), Path("tests/test_b.py")]
    assert ptx_coverage.merged(files) == {"k.ptx 0123": {"k_f32": {9: 96}}}


def test_counts_of_a_shipped_text_are_found(tmp_path):
    """A launch runs places of the kernel in the text that was launched, and of no other."""
    program = (
        "import ptxrt\nwith ptxrt.using('emulator'):\n    kernel = ptxrt.kernels()['fill_f32']\n"
        "    kernel(**kernel.example(kernel.cases[0]))\n"
    )
    environment = {**os.environ, "PTXRT_COVERAGE": str(tmp_path), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)
    counts, kernel = ptx_coverage.merge(tmp_path), ptxrt.kernels()["fill_f32"]
    native, portable = (ptx_coverage.kernel_coverage(kernel, counts, which).counted() for which in (False, True))
    assert any(native.values()) and not any(portable.values())


def test_counts_of_a_text_that_is_loaded_again_add_up(monkeypatch, tmp_path):
    """The counts of loads that are gone are kept as one; they are written once."""
    counting, program = check.Coverage(tmp_path / "counts"), tmp_path / "store.ptx"
    monkeypatch.setattr(check, "_collector", counting)
    program.write_text(STORE)
    y = np.zeros(1, np.int32)

    def run():
        loaded = ptxrt.load(program)
        loaded["store"](1, 32, y)
        return loaded

    with ptxrt.using("emulator"):
        for _ in range(5):
            run()
            gc.collect()
        assert len(counting._live) <= 1
        kept = run()
    ((key, entry, _, counts),) = counting.entries
    assert (key.split()[0], entry, set(counts)) == ("store.ptx", "store", {6 * 32})
    counting.write()
    del kept
    gc.collect()
    counting.write()
    (file,) = (tmp_path / "counts").glob("*.json")
    assert set(json.loads(file.read_text())[key]["store"].values()) == {6 * 32}


def test_what_counts_as_an_operation():
    counts = [
        "ld.global.nc.u16",
        "st.shared.v4.u32",
        "cp.async.cg.shared.global",
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
        "bar.sync",
    ]
    counts += [
        "cvt.rn.satfinite.e4m3x2.f32",
        "cvt.rn.bf16x2.f32",
        "fma.rn.f32",
        "max.f32",
        "add.f16x2",
        "mbarrier.try_wait.parity.shared::cta.b64",
    ]
    others = [
        "ld.param.u64",
        "mov.f32",
        "selp.f32",
        "setp.lt.f32",
        "add.s32",
        "bra",
        "bra.uni",
        "cvt.u64.u32",
        "cvta.to.global.u64",
        "prmt.b32",
        "ret",
    ]
    assert all(map(ptx_coverage.OPERATION.match, counts)) and not any(map(ptx_coverage.OPERATION.match, others))


def test_explanations_name_lines_that_are_there():
    lines = {line for path in (ROOT / "kernels_cu").rglob("*.cu*") for line in path.read_text().splitlines()}
    for piece in (piece for explained in EXPLAINED for piece in re.split(" < ", explained.source)):
        assert any(piece in line for line in lines), piece
