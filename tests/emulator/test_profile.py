"""The profile lists every executed instruction with its line, and the sums agree."""

import numpy as np
import pytest
from click.testing import CliRunner
from programs import launch, program

from ptxrt import selection
from ptxrt.commands import main
from ptxrt.emulator import Emulator
from ptxrt.emulator.check import conflicts_table

LOOP = """
    mov.u32 %r1, 0;
again:
    add.u32 %r1, %r1, %r0;
    add.u32 %r2, %r1, 1;
    setp.lt.u32 %p1, %r1, 100;
    st.global.u64 [%rd0], %rd0;
    @%p1 bra again;
"""


def test_rows():
    emulator = Emulator(profile=True)
    out = np.zeros(32, np.uint64)
    text = program(LOOP.replace("%r1, %r1, %r0", "%r1, %r1, 10"))
    launch(text, "k", out, emulator=emulator, name="loop.ptx")
    profile = emulator.profile
    families = {row.name: row for row in profile.by_family()}
    assert (
        families["setp"].calls == 10
        and families["add"].calls >= 20
        and families["translation"].calls == 4
        and "bra" not in families
    )
    lines = {row.name: row for row in profile.by_line()}
    line = text[: text.index("st.global")].count("\n") + 1
    assert lines[f"loop.ptx:{line}"].calls == 10 and lines[f"loop.ptx:{line}"].opcode == "st.global.u64"
    for rows in (profile.by_family(), profile.by_line(), profile.by_source()):
        assert sum(row.seconds for row in rows) == pytest.approx(profile.total) and all(
            row.seconds >= 0 for row in rows
        )
        assert [row.seconds for row in rows] == sorted((row.seconds for row in rows), reverse=True)
    assert Emulator().profile is None


def test_command():
    done = CliRunner().invoke(main, ["--profile", "check", "transpose_tiled"])
    assert done.exit_code == 0 and "by source lines" in done.output and "transpose.cuh:" in done.output
    done = CliRunner().invoke(main, ["--profile", "--machine", "native", "check", "transpose_tiled"])
    assert done.exit_code == 1 and "profile" in done.output


def test_tables_of_conflicts_and_coverage(monkeypatch):
    for name in ("_opened", "_kept", "_defaults"):  # an emulator that no other test has used
        monkeypatch.setattr(selection, name, type(getattr(selection, name))())
    done = CliRunner().invoke(main, ["--coverage", "--bank-conflicts", "check", "transpose_tiled"])
    assert done.exit_code == 0
    said = done.stderr.splitlines()
    assert said[0].split() == ["module", "entry", "lines", "run", "of", "not", "run"]
    assert said[1].split()[:2] == ["transpose_tiled.ptx", "transpose_tiled"]
    assert said[2].split() == ["module", "entry", "PTX", "line", "source", "extra", "passes"] and len(said) == 3
    done = CliRunner().invoke(main, ["--machine", "native", "--coverage", "check", "transpose_tiled"])
    assert done.exit_code and "--coverage is counted on the emulator" in done.output + done.stderr


def test_counts_of_texts_of_one_name():
    """Counts of repeated loads of one text add up; another text of the same name gets its own key."""
    body = "shl.b32 %r1, %r0, 3; mov.u32 %r2, box; add.u32 %r1, %r1, %r2; st.shared.u32 [%r1], %r0; {} st.global.u32 [%rd0], %r0;"
    emulator = Emulator(bank_conflicts=True)
    texts = [program(body.format(more), before=".shared .b8 box[256];") for more in ("", "", "mov.u32 %r3, 1;")]
    for text in texts:
        launch(text, "k", np.zeros(32, np.uint64), emulator=emulator, name="a.ptx")
    conflicts, coverage = emulator.bank_conflicts, emulator.coverage()
    assert set(conflicts) == set(coverage) == {"a.ptx", "a.ptx #2"}
    (line,) = conflicts["a.ptx"]["k"]
    assert conflicts["a.ptx"]["k"][line] == 2 * conflicts["a.ptx #2"]["k"][line] > 0
    assert coverage["a.ptx"]["k"][line] == 64 and coverage["a.ptx #2"]["k"][line] == 32
    table = conflicts_table(emulator)
    assert len(table) == 3 and table[1].split()[0] == "a.ptx" and table[2].split()[:2] == ["a.ptx", "#2"]
