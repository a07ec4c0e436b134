"""Races in shared memory, detected by happens-before: every seeded race is found. (test_kernels.py checks the
kernels.)"""

import re
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import ptxrt
from ptxrt.commands import main
from ptxrt.emulator import Emulator
from ptxrt.emulator.tensor_map import encode_tiled
from ptxrt.errors import EmulatorFault

sys.path.append(str(Path(__file__).parent / "emulator"))
from programs import launch, program, text

pytestmark = pytest.mark.races


def test_command():
    done = CliRunner().invoke(main, ["check", "--races", "transpose_tiled"])
    assert done.exit_code == 0 and "4 of 4 cases passed" in done.output
    done = CliRunner().invoke(main, ["--machine", "native", "check", "--races", "transpose_tiled"])
    assert done.exit_code and "races" in done.output


# A ring of tensor copies (tests/data/async.cu), each time without one of its lines


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
    """The entry `ring` alone: other entries have the same lines."""
    source = text("async.ptx")
    return source[: source.index(".visible .entry")] + source[source.index(".visible .entry ring") :]


@pytest.mark.parametrize("schedule", ["together", "warps"])
@pytest.mark.parametrize(
    "line, nth, new",
    [
        (r"bar\.sync\s+0;|barrier\.sync\s+0;|bar\.sync \s*0;", 0, ""),  # barriers are used uninitialized
        (r"bar\.sync 1, 128;", 0, ""),  # the tile is copied out before all threads have written it
        (r"cp\.async\.bulk\.wait_group\.read\s+0;", 0, ""),  # the tile is reused before it has been copied out
        (r"fence\.proxy\.async\.shared::cta;", 0, ""),  # the copy out does not see the threads' writes
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


# Small programs: the same accesses with and without synchronization


BEFORE = ".shared .align 16 .b8 box[4096];\n.shared .align 8 .b64 bar;"
# Each thread stores its word, and reads the one of another thread.
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
# A bulk copy writes sixteen bytes that the threads stored or read before; then all threads read them.
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
        (
            EXCHANGE.replace("and.b32 %r3, %r3, 63", "xor.b32 %r3, %r0, 16").replace("{distance}", "0"),
            "bar.warp.sync 0xffffffff;",
            False,
        ),
        (
            EXCHANGE.replace("and.b32 %r3, %r3, 63", "xor.b32 %r3, %r0, 16").replace("{distance}", "0"),
            "shfl.sync.idx.b32 %r9, %r0, 0, 31, 0xffffffff;",
            True,
        ),
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


# Stores of equal bytes, and pairs of two warps


SAME = "mov.u32 %r2, box; {value} st.shared.u32 [%r2], %r3; {order} st.global.u32 [%rd0], %r0;"


@pytest.mark.parametrize("schedule", ["together", "warps"])
@pytest.mark.parametrize(
    "value, races, found",
    [
        ("mov.u32 %r3, 7;", True, False),
        ("mov.u32 %r3, 7;", "strict", True),
        ("shr.u32 %r3, %r0, 5;", True, True),
        ("and.b32 %r3, %r0, 31;", True, True),
        ("shr.u32 %r3, %r0, 5; and.b32 %r3, %r3, 0xfffffffe;", True, False),
    ],
)
def test_several_warps_store_to_one_place(value, races, found, schedule):
    """Triton's histograms do this. If lanes of one warp store different values, PTX allows any of them to remain."""
    launch_small(SAME.format(value=value, order=""), races, found, schedule)


@pytest.mark.parametrize(
    "store", ["st.shared.u32 [%r2], 7;", "st.shared.u8 [%r2], 7; st.shared.u8 [%r2+1], 0; st.shared.u16 [%r2+2], 0;"]
)
def test_equal_bytes_of_two_instructions(store):
    """Two warps store the same bytes by different instructions."""
    body = (
        f"mov.u32 %r2, box; setp.ge.u32 %p1, %r0, 32; @%p1 bra S; st.shared.u32 [%r2], 7; bra E; S: {store} E: "
        "st.global.u32 [%rd0], %r0;"
    )
    for schedule in ("together", "warps"):
        launch_small(body, True, False, schedule)
        launch_small(body, "strict", True, schedule)
        launch_small(body.replace(", 7; bra E", ", 8; bra E"), True, True, schedule)


def test_a_pair_of_two_warps_is_named_first():
    body = """mov.u32 %r2, box; shl.b32 %r1, %r0, 2; add.u32 %r1, %r1, %r2; st.shared.u32 [%r1], %r0; bar.sync 0;
        add.u32 %r3, %r0, 1; and.b32 %r3, %r3, 63; st.shared.u32 [%r1], %r3; shl.b32 %r3, %r3, 2; add.u32 %r3, %r3, %r2;
        ld.shared.u32 %r4, [%r3]; st.global.u32 [%rd0], %r4;"""
    with pytest.raises(EmulatorFault, match=r"thread \(31, 0, 0\) .* and thread 32 \(warp 1\) wrote"):
        launch_small(body, True, False, "together")


def launch_small(body, races, found, schedule, grid=1, before=BEFORE, block=64, **options):
    emulator = Emulator(races=races, schedule=schedule, **options)
    module = emulator.load_text(program(body, before=before), "small.ptx")
    out = emulator.alloc(1024 * 8)
    emulator.write(out, np.zeros(1024, np.uint64))
    parameters = struct.pack("<Q", out)
    if not found:
        emulator.launch(module.entries["k"], grid, block, 0, parameters)
        return emulator
    with pytest.raises(EmulatorFault, match="a race"):
        emulator.launch(module.entries["k"], grid, block, 0, parameters)
    return emulator


# Global memory, between blocks. %rd2 is the array; thread 0 of each block accesses it.

WHERE = "ld.param.u64 %rd2, [out]; mov.u32 %r5, %ctaid.x; setp.ne.u32 %p1, %r0, 0; @%p1 bra E; setp.ne.u32 %p2, %r5, 0;"
OWN = "mul.wide.u32 %rd3, %r5, 8; add.s64 %rd3, %rd3, %rd2;"
GLOBAL = {
    "stores of other bytes": ("st.global.u32 [%rd2], %r5;", True),
    "stores of equal bytes": ("st.global.u32 [%rd2], 7;", False),
    "stores to places of their own": (OWN + "st.global.u32 [%rd3], %r5;", False),
    "a load of what another block stores": (
        "@!%p2 st.global.u32 [%rd2], 9; @%p2 ld.global.u32 %r6, [%rd2]; st.global.u32 [%rd2+64], 0;",
        True,
    ),
    "a store where another block loaded": ("@%p2 st.global.u32 [%rd2], 9; @!%p2 ld.global.u32 %r6, [%rd2];", True),
    "a store of what is there where another block loaded": (
        "@%p2 st.global.u32 [%rd2], 0; @!%p2 ld.global.u32 %r6, [%rd2];",
        True,
    ),
    "loads": ("ld.global.u32 %r6, [%rd2];", False),
    "atomics": ("atom.global.add.u32 %r6, [%rd2], %r5;", False),
    "reductions": ("red.global.add.u32 [%rd2], %r5;", False),
    "a flag by a releasing store": (
        "@%p2 bra R; st.global.u32 [%rd2], 9; st.release.gpu.global.u32 [%rd2+8], 1; bra E; R: "
        "ld.acquire.gpu.global.u32 %r6, [%rd2+8];"
        "setp.eq.u32 %p3, %r6, 0; @%p3 bra R; ld.global.u32 %r7, [%rd2];",
        False,
    ),
    "a flag by a fence and volatile": (
        "@%p2 bra R; st.global.u32 [%rd2], 9; membar.gl; st.volatile.global.u32 [%rd2+8], 1; bra E; R: "
        "ld.volatile.global.u32 %r6, [%rd2+8];"
        "setp.eq.u32 %p3, %r6, 0; @%p3 bra R; ld.global.u32 %r7, [%rd2];",
        False,
    ),
    "a fence on one side alone": (
        "@%p2 bra R; st.global.u32 [%rd2], 9; membar.gl; bra E; R: ld.global.u32 %r7, [%rd2];",
        True,
    ),
    "a fence in front of the store": (
        "@%p2 bra R; membar.gl; st.global.u32 [%rd2], 9; bra E; R: membar.gl; ld.global.u32 %r7, [%rd2];",
        True,
    ),
}


@pytest.mark.parametrize("lanes", [16384, 64])
@pytest.mark.parametrize("schedule", ["together", "warps"])
@pytest.mark.parametrize("what", GLOBAL)
def test_blocks_in_global_memory(what, schedule, lanes):
    """A race is found whether the blocks run together or one after the other."""
    body, found = GLOBAL[what]
    if "flag" in what or lanes == 16384:
        emulator = launch_small(WHERE + body + "E:", True, found, schedule, grid=3)
        assert bool(emulator.undecided) == ("flag" in what)
    else:
        launch_small(WHERE + body + "E:", True, found, schedule, grid=3, lanes=lanes)


def test_equal_bytes_of_blocks_are_a_race_where_asked_for():
    launch_small(WHERE + GLOBAL["stores of equal bytes"][0] + "E:", "strict", True, "together", grid=3)


def test_what_is_said_of_blocks():
    emulator = Emulator(races=True)
    module = emulator.load_text(program(WHERE + "st.global.u32 [%rd2+4], %r5; E:"), "small.ptx")
    out = emulator.alloc(512)
    emulator.write(out, np.zeros(64, np.uint64))
    said = r"k: thread \(0, 0, 0\) of block \(\d, 0, 0\) writes 4 bytes of an allocation \(512 bytes at 0x[0-9a-f]+\), and block \(\d, 0, 0\) writes with the same instruction the byte at 0x[0-9a-f]+: a race, no atomic and no fence lies between the two blocks at PTX line \d+ \(st.global.u32\)"
    with pytest.raises(EmulatorFault, match=said):
        emulator.launch(module.entries["k"], 3, 32, 0, struct.pack("<Q", out))


# strict


MISSING = """mov.u32 %r2, box; setp.eq.u32 %p1, %r0, 0; @%p1 st.shared.u32 [%r2], 5; {} ld.shared.u32 %r3, [%r2]; st.global.u32 [%rd0], %r3;"""


def test_strict_is_checks_races_and_both_schedules():
    printed = []
    for order, found in (("", True), ("bar.sync 0;", False)):
        launch_small(MISSING.format(order), False, False, "together", checks=False)
        launch_small(MISSING.format(order), False, found, "together", strict=True, checks=False)
    increments = "ld.global.u32 %r1, [%rd0]; add.u32 %r1, %r1, 1; st.global.u32 [%rd0], %r1;"
    emulator = Emulator(strict=True, output=printed.append)
    out = np.zeros(64, np.uint64)
    launch(program(increments), "k", out, block=64, emulator=emulator)
    assert (out == 1).all(), "both runs begin with the same memory"


def test_strict_runs_on_the_kernels(emulator):
    x = np.random.default_rng(1).standard_normal((64, 64)).astype(np.float32)
    plain = ptxrt.quantize(x, "mxfp8")
    with ptxrt.using("emulator", strict=True) as backend:
        strict = ptxrt.quantize(x, "mxfp8")
        assert backend.emulator.find_races and backend.emulator.checks
    assert (strict.codes == plain.codes).all() and (strict.scales == plain.scales).all()
    with pytest.raises(ptxrt.ArgumentError, match="strict=True checks what was written; leave checks out"):
        ptxrt.using("emulator", strict=True, checks=False)
    with pytest.raises(ptxrt.ArgumentError, match="races is 'always'; pass True, False or \"strict\""):
        ptxrt.using("emulator", races="always")


def test_strict_says_once_what_is_undecided():
    emulator = Emulator(strict=True)
    for launches in (1, 2):
        launch(
            program(WHERE + GLOBAL["a flag by a releasing store"][0] + "E:"),
            "k",
            np.zeros(64, np.uint64),
            grid=3,
            block=64,
            emulator=emulator,
        )
        assert len(emulator.undecided) == launches
    assert (
        "bytes of global memory were stored by one block and stored or loaded by another, first at test.ptx:"
        in emulator.undecided[0]
    )


def test_command_strict():
    done = CliRunner().invoke(main, ["check", "--strict", "transpose_tiled"])
    assert done.exit_code == 0 and "4 of 4 cases passed" in done.output


@pytest.mark.parametrize("flag", ["--races", "--strict"])
def test_slow_checks_run_one_case_of_each_size(flag, monkeypatch, emulator):
    import importlib

    seen = []
    module = importlib.import_module("ptxrt.commands.check")
    row = {"ok": True, "figures": "", "seconds": 0.0, "machine": "emulator"}
    monkeypatch.setattr(module, "check_case", lambda kernel, case, seed: seen.append(case) or row)
    assert CliRunner().invoke(main, ["check", flag, "quantize_mxfp8"]).exit_code == 0
    sizes = [tuple(case.axes.items()) for case in seen]
    assert len(sizes) == len(set(sizes)) < len(ptxrt.kernels()["quantize_mxfp8"].cases)
