"""Races in shared memory, by what happened before what: every seeded one is found. (In the kernels, test_kernels.py looks.)"""

import re
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from ptxrt.commands import main
from ptxrt.emulator import Emulator
from ptxrt.emulator.tensor_map import encode_tiled
from ptxrt.errors import EmulatorFault

sys.path.append(str(Path(__file__).parent / "emulator"))
from programs import program, text  # noqa: E402

pytestmark = pytest.mark.races


def test_command():
    done = CliRunner().invoke(main, ["check", "--races", "transpose_tiled"])
    assert done.exit_code == 0 and "4 of 4 cases passed" in done.output
    done = CliRunner().invoke(main, ["--machine", "native", "check", "--races", "transpose_tiled"])
    assert done.exit_code and "races" in done.output


# A ring of tensor copies (tests/data/async.cu) without one of its lines


def run_ring(source: str, schedule: str) -> None:
    emulator = Emulator(races=True, checks=False, schedule=schedule)
    module = emulator.load_text(source, "async.ptx")
    x = np.zeros((56, 64), np.uint16)
    maps = []
    for _ in range(2):
        address = emulator.alloc(x.nbytes)
        emulator.write(address, x)
        maps.append(encode_tiled("u16", address, (64, 56), (128,), (64, 8)))
    emulator.launch(module.entries["ring"], 1, 160, 0, b"".join(maps) + struct.pack("<i", 7))


def ring() -> str:
    """The text from the entry `ring` on: other entries have lines like its own."""
    source = text("async.ptx")
    return source[: source.index(".visible .entry")] + source[source.index(".visible .entry ring") :]


@pytest.mark.parametrize("schedule", ["together", "warps"])
@pytest.mark.parametrize(
    "line, nth, new",
    [
        (r"bar\.sync\s+0;|barrier\.sync\s+0;|bar\.sync \s*0;", 0, ""),  # the barriers are not initialized for everybody
        (r"bar\.sync 1, 128;", 0, ""),  # the tile is copied out before all have written it
        (r"cp\.async\.bulk\.wait_group\.read\s+0;", 0, ""),  # the tile is given back before it was copied out
        (r"fence\.proxy\.async\.shared::cta;", 0, ""),  # the copy out does not see what the threads wrote
        (r"mbarrier\.try_wait\.parity\.shared::cta\.b64\s+(\w+),[^;]*;", 0, r"setp.eq.u32 \1, 0, 0;"),
        (r"mbarrier\.try_wait\.parity\.shared::cta\.b64\s+(\w+),[^;]*;", 1, r"setp.eq.u32 \1, 0, 0;"),
    ],
)
def test_ring_without_a_line(line, nth, new, schedule):
    source = ring()
    run_ring(source, schedule)
    found = list(re.finditer(line, source))
    assert len(found) > nth, f"{line} is not in the text"
    match = found[nth]
    with pytest.raises(EmulatorFault, match="a race|not initialized|deadlock|than are pending"):
        run_ring(source[: match.start()] + match.expand(new) + source[match.end() :], schedule)


# Small programs: two orders of the same accesses, one of them with what orders them


BEFORE = ".shared .align 16 .b8 box[4096];\n.shared .align 8 .b64 bar;"
# Each thread stores its word, and reads the one 16 lanes, or 32 threads, on.
EXCHANGE = """
    shl.b32 %r1, %r0, 2; mov.u32 %r2, box; add.u32 %r1, %r1, %r2;
    st.shared.u32 [%r1], %r0;
    {order}
    add.u32 %r3, %r0, {distance}; and.b32 %r3, %r3, 63; shl.b32 %r3, %r3, 2; add.u32 %r3, %r3, %r2;
    ld.shared.u32 %r4, [%r3];
    st.global.u32 [%rd0], %r4;
"""
COPY = """
    shl.b32 %r1, %r0, 2; mov.u32 %r2, box; add.u32 %r1, %r1, %r2;
    cp.async.ca.shared.global [%r1], [%rd0], 4;
    {order}
    xor.b32 %r3, %r0, 32; shl.b32 %r3, %r3, 2; add.u32 %r3, %r3, %r2;
    ld.shared.u32 %r4, [%r3];
    st.global.u32 [%rd0], %r4;
"""
MBARRIER = """
    mov.u32 %r5, bar; setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared.b64 [%r5], 64; bar.sync 0;
"""
# Sixteen bytes come by a bulk copy over what the threads stored, or read; then all read them.
BULK = """
    mov.u32 %r5, bar; mov.u32 %r2, box; setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared.b64 [%r5], 1;
    and.b32 %r1, %r0, 3; shl.b32 %r1, %r1, 2; add.u32 %r1, %r1, %r2; setp.lt.u32 %p3, %r0, 4; ld.param.u64 %rd2, [out];
    {order}
    @!%p1 bra wait;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r5], 16;
    cp.async.bulk.shared::cta.{source}.mbarrier::complete_tx::bytes [{to}], [{at}], 16, [%r5];
    wait: mbarrier.try_wait.parity.shared.b64 %p2, [%r5], 0; @!%p2 bra wait;
    ld.shared.u32 %r4, [%r1]; bar.sync 0; st.global.u32 [%rd0], %r4;
"""
LOAD = BULK.replace("{source}", "global").replace("{to}", "%r2").replace("{at}", "%rd2")
MOVE = BULK.replace("{source}", "shared::cta").replace("{to}", "%r2+64").replace("{at}", "%r2")
STORE = "@%p3 st.shared.u32 [%r1], %r0;"
ARRIVE = "mbarrier.arrive{}.shared.b64 _, [%r5];"
WAIT = "again: mbarrier.try_wait.parity{}.shared.b64 %p2, [%r5], 0; @!%p2 bra again;"


@pytest.mark.parametrize("schedule", ["together", "warps"])
@pytest.mark.parametrize(
    "body, order, races",
    [
        (EXCHANGE.replace("{distance}", "1"), "", True),
        (EXCHANGE.replace("{distance}", "32"), "bar.sync 0;", False),
        (EXCHANGE.replace("{distance}", "32"), "bar.warp.sync 0xffffffff;", True),
        (EXCHANGE.replace("{distance}", "32"), "fence.acq_rel.cta;", True),
        (EXCHANGE.replace("{distance}", "0"), "", False),
        (EXCHANGE.replace("and.b32 %r3, %r3, 63", "xor.b32 %r3, %r0, 16").replace("{distance}", "0"), "bar.warp.sync 0xffffffff;", False),
        (EXCHANGE.replace("and.b32 %r3, %r3, 63", "xor.b32 %r3, %r0, 16").replace("{distance}", "0"), "shfl.sync.idx.b32 %r9, %r0, 0, 31, 0xffffffff;", True),
        (MBARRIER + EXCHANGE.replace("{distance}", "32"), ARRIVE.format("") + WAIT.format(""), False),
        (MBARRIER + EXCHANGE.replace("{distance}", "32"), ARRIVE.format(".relaxed.cta") + WAIT.format(""), True),
        (MBARRIER + EXCHANGE.replace("{distance}", "32"), ARRIVE.format("") + WAIT.format(".relaxed.cta"), True),
        (MBARRIER + EXCHANGE.replace("{distance}", "32"), ARRIVE.format(""), True),
        (COPY, "cp.async.wait_all; bar.sync 0;", False),
        (COPY, "bar.sync 0; cp.async.wait_all;", True),
        (COPY, "cp.async.wait_all;", True),
        (COPY, "cp.async.commit_group; cp.async.wait_group 1; bar.sync 0;", True),
        (MBARRIER + COPY, "cp.async.mbarrier.arrive.noinc.shared.b64 [%r5];" + WAIT.format(""), False),
        (MBARRIER + COPY, "cp.async.mbarrier.arrive.noinc.shared.b64 [%r5]; bar.sync 0;", True),
        (LOAD, "bar.sync 0;", False),
        (LOAD, STORE + "bar.sync 0;", True),
        (LOAD, STORE + "fence.proxy.async; bar.sync 0;", False),
        (LOAD, STORE + "fence.proxy.async.shared::cta; bar.sync 0;", False),
        (LOAD, STORE + "bar.sync 0; @%p1 fence.proxy.async;", False),
        (LOAD, STORE + "bar.sync 0; @!%p1 fence.proxy.async;", True),
        (LOAD, "fence.proxy.async;" + STORE + "bar.sync 0;", True),
        (LOAD, STORE + "fence.proxy.async;", True),
        (LOAD, STORE + "fence.proxy.async; bar.sync 0; @%p3 ld.shared.u32 %r4, [%r1]; bar.sync 0;", False),
        (LOAD, STORE + "fence.proxy.async; bar.sync 0; @%p3 ld.shared.u32 %r4, [%r1];", True),
        (MOVE, STORE + "bar.sync 0;", True),
        (MOVE, STORE + "fence.proxy.async; bar.sync 0;", False),
    ],
)
def test_small_programs(body, order, races, schedule):
    emulator = Emulator(races=True, checks=False, schedule=schedule)
    module = emulator.load_text(program(body.format(order=order), before=BEFORE), "small.ptx")
    out = emulator.alloc(64 * 8)
    emulator.write(out, np.zeros(64, np.uint64))
    if not races:
        emulator.launch(module.entries["k"], 1, 64, 0, struct.pack("<Q", out))
        return
    with pytest.raises(EmulatorFault, match="a race"):
        emulator.launch(module.entries["k"], 1, 64, 0, struct.pack("<Q", out))


def test_what_is_said_of_a_missing_proxy_fence():
    emulator = Emulator(races=True)
    module = emulator.load_text(program(LOAD.format(order=STORE + "bar.sync 0;"), before=BEFORE), "small.ptx")
    out = emulator.alloc(64 * 8)
    emulator.write(out, np.zeros(64, np.uint64))
    said = r"starts a copy that overwrites 16 bytes of shared memory, and thread 0 wrote the byte at 0x410 at PTX line \d+: a race, no fence.proxy.async lies between"
    with pytest.raises(EmulatorFault, match=said):
        emulator.launch(module.entries["k"], 1, 64, 0, struct.pack("<Q", out))
