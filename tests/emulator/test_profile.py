"""Where time goes: every instruction that ran is there, with its line, and the sums agree."""

import numpy as np
import pytest
from click.testing import CliRunner
from programs import launch, program

from ptxrt.commands import main
from ptxrt.emulator import Emulator

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
    assert families["setp"].calls == 10 and families["add"].calls >= 20 and families["translation"].calls == 4 and "bra" not in families
    lines = {row.name: row for row in profile.by_line()}
    line = text[: text.index("st.global")].count("\n") + 1
    assert lines[f"loop.ptx:{line}"].calls == 10 and lines[f"loop.ptx:{line}"].opcode == "st.global.u64"
    for rows in (profile.by_family(), profile.by_line(), profile.by_source()):
        assert sum(row.seconds for row in rows) == pytest.approx(profile.total) and all(row.seconds >= 0 for row in rows)
        assert [row.seconds for row in rows] == sorted((row.seconds for row in rows), reverse=True)
    assert Emulator().profile is None


def test_command():
    done = CliRunner().invoke(main, ["--profile", "check", "transpose_tiled"])
    assert done.exit_code == 0 and "by source lines" in done.output and "transpose.cuh:" in done.output
    done = CliRunner().invoke(main, ["--profile", "--machine", "native", "check", "transpose_tiled"])
    assert done.exit_code == 1 and "profile" in done.output
