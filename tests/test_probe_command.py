"""`ptxrt probe`: findings compared with the atlas, differences as text, and the file with all findings."""

import base64
import json
import zlib

import numpy as np
import pytest
from click.testing import CliRunner

import ptxrt
from ptxrt import atlas
from ptxrt.commands import main
from ptxrt.ops import probes


def run(*arguments):
    with ptxrt.using("emulator"):
        return CliRunner().invoke(main, ["--machine", "emulator", "probe", *map(str, arguments)])


def test_a_kind_and_its_file(tmp_path):
    done = run("tf32", "--json", tmp_path / "found.json")
    assert done.exit_code == 0, done.output
    assert done.output.startswith(
        "ok      tf32  probe_mma_plain tf32\nok      tf32  probe_mma_registers codes of tf32\n"
    )
    assert "        A and B: bits 31..13 matter, 12..0 are ignored\n" in done.output
    assert "ok      tf32  probe_mma_registers sums of tf32\n        8 products and C at once, aligned" in done.output
    assert done.output.endswith("3 of 3 findings are as the atlas and the emulator have them, on emulator\n")
    report = json.loads((tmp_path / "found.json").read_text())
    row, of_codes, of_sums = report["findings"]
    assert set(of_codes["found"]) == {"a", "b"} and len(of_sums["told"]) == 1
    assert set(row) == set(of_codes) == set(of_sums)
    meets = np.frombuffer(zlib.decompress(base64.b64decode(row["found"]["meets"]["int32"])), "<i4")
    assert (meets.reshape(row["found"]["meets"]["shape"]) == probes._meets(1)).all()
    assert report["ptxrt"] == ptxrt.__version__ and row["differences"] == [] and row["error"] is None


def test_a_file_that_cannot_be_written_is_found_first(monkeypatch, tmp_path):
    monkeypatch.setattr("ptxrt.commands.probe.examine", lambda *arguments: pytest.fail("a probe ran"))
    done = run("tf32", "--json", tmp_path / "nowhere" / "found.json")
    assert done.exit_code == 1 and "nowhere does not exist; create it first" in done.output


def test_differences_are_listed_and_fail(monkeypatch, tmp_path):
    """An atlas that has the upper half of A's rows first."""
    place = probes.fragment_place

    def wrong(number, width, registers, depth):
        row, k = place(number, width, registers, depth)
        return ((row + 8) % 16, k) if registers == 4 else (row, k)

    monkeypatch.setattr(probes, "fragment_place", wrong)
    done = run("bf16", "--json", tmp_path / "found.json")
    assert done.exit_code == 1
    assert "DIFFERS bf16  probe_mma_bf16" in done.output and "2 of 3 findings are as the atlas and" in done.output
    assert "    meets[0, 0, 0] is 0, in the atlas nothing\n" in done.output
    row = json.loads((tmp_path / "found.json").read_text())["findings"][0]
    assert f"and {len(row['differences']) - 20} more" in done.output


def test_what_stops_the_machine_is_a_finding(monkeypatch):
    from ptxrt.errors import EmulatorFault

    def launch(*arguments):
        raise EmulatorFault("the instruction is not there")

    monkeypatch.setattr("ptxrt.launch.run", launch)
    done = run("mxf4nvf4_2x")
    assert done.exit_code == 1 and "    the instruction is not there\n" in done.output


def test_every_kind_has_a_probe_and_every_case_a_kind():
    seen = {}
    for kind in atlas.KINDS.values():
        probe, cases = probes.cases_of(kind)
        assert cases, kind.name
        seen.setdefault(probe.name, []).extend(cases)
    for name, cases in seen.items():
        assert sorted(case.id for case in cases) == sorted(case.id for case in ptxrt.kernels()[name].cases)
    pairs = {(case.scalars["format_a"], case.scalars["format_b"]) for case in seen["probe_mma_mxf8f6f4"]}
    assert len(pairs) == 25


@pytest.mark.parametrize(
    "arguments, part",
    [
        (["mxf5"], "no kind of mma.sync is called 'mxf5'"),
        (["mxf4", "--all"], "name mxf4 or pass --all"),
    ],
)
def test_wrong_calls(arguments, part):
    done = run(*arguments)
    assert done.exit_code not in (0, None) and part in done.output


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["portable", "native"])
def test_all_on_a_card(name, on_machine, tmp_path):
    with on_machine(name):
        done = CliRunner().invoke(main, ["--machine", name, "probe", "--all", "--json", str(tmp_path / "found.json")])
    findings = json.loads((tmp_path / "found.json").read_text())["findings"]
    wrong = {(row["kind"], row["case"]) for row in findings if row["differences"] or row["error"]}
    if ptxrt.machines()[name].compute_capability == (9, 0):
        # sm_90 has no mma.sync of 8-bit floats: ptxas emits two f16 MMAs, of halves of the registers, and adds the
        # results.
        wrong -= {("fp8", "sums of e4m3"), ("fp8", "sums of e5m2")}
    assert not wrong, done.output
