"""Barriers in isolation (PTX ISA 9.7.13.1): which threads wait, the results of reductions, faults, and what
they order."""

import re

import numpy as np
import pytest
from programs import launch, program

from ptxrt.emulator import Emulator
from ptxrt.emulator.instruction import Unsupported, resolve
from ptxrt.errors import EmulatorFault

THREADS = 96


def threads(count=THREADS):
    return {"t": ("b32", np.arange(count, dtype=np.uint32) % count)}


# Every thread stores a number, waits, and reads the number of its neighbor in the next warp.
EXCHANGE = """
    .shared .align 4 .b8 box[1024];
    .reg .b32 %box, %place;
    mov.u32 %box, box;
    mad.lo.u32 %place, %thread, 4, %box;
    {delay}
    st.shared.b32 [%place], %t;
    {barrier}
    add.u32 %place, %thread, 32;
    rem.u32 %place, %place, {count};
    mad.lo.u32 %place, %place, 4, %box;
    ld.shared.b32 %d, [%place];
"""
# The last warp takes a detour, so that the others reach the barrier first.
DETOUR = """
    .reg .pred %late;
    .reg .b32 %turns;
    setp.ge.u32 %late, %t, 64;
    mov.u32 %turns, 0;
    @!%late bra there;
again:
    add.u32 %turns, %turns, 1;
    setp.lt.u32 %late, %turns, 50;
    @%late bra again;
there:
"""


@pytest.mark.parametrize(
    "barrier",
    ["bar.sync 0;", "bar.cta.sync 0;", "barrier.sync 5;", "barrier.cta.sync.aligned 15, 96;", "bar.sync 3, 96;"],
)
@pytest.mark.parametrize("delay", ["", DETOUR])
def test_all_threads_wait(execute, barrier, delay):
    found = execute(EXCHANGE.format(delay=delay, barrier=barrier, count=96), threads(), {"d": "b32"}, block=96)["d"]
    assert (found == (np.arange(96) + 32) % 96).all()


def test_a_block_that_is_no_multiple_of_32(execute):
    """40 threads: a barrier without a count waits for all 40; with a count it waits for whole warps, 64."""
    body = EXCHANGE.format(delay="", barrier="{barrier}", count=40)
    for barrier in ("bar.sync 0;", "bar.sync 0, 64;"):
        found = execute(body.replace("{barrier}", barrier), threads(40), {"d": "b32"}, block=40)["d"]
        assert (found == (np.arange(40) + 32) % 40).all()


def test_barriers_are_apart_by_block(execute):
    numbers = {"t": ("b32", np.arange(4 * 64, dtype=np.uint32))}
    exchange = EXCHANGE.replace("%thread", "%here").format(delay="", barrier="bar.sync 0;", count=64)
    found = execute(f".reg .b32 %here; mov.u32 %here, %tid.x; {exchange}", numbers, {"d": "b32"}, block=64)["d"]
    linear = np.arange(256)
    assert (found == linear // 64 * 64 + (linear % 64 + 32) % 64).all()


@pytest.mark.parametrize("delay", ["", DETOUR])
def test_threads_that_exited_are_not_waited_for(execute, delay):
    """The last warp stores its result and exits, before or after the others reach the barrier."""
    body = f"""
        {delay}
        .reg .b64 %where;
        ld.param.u64 %where, [param_out_d];
        mad.lo.u64 %where, %index, 4, %where;
        setp.ge.u32 %p, %t, 64;
        @%p st.global.b32 [%where], 3;
        @%p exit;
        bar.sync 0;
        mov.u32 %d, 4;
    """
    found = execute(body, threads() | {"p": ("pred", np.zeros(96))}, {"d": "b32"}, block=96)["d"]
    assert (found == np.where(np.arange(96) < 64, 4, 3)).all()


def test_named_barriers_join_some_warps(execute):
    """Warps 0 and 1 meet at barrier 1; warp 2 does not take part."""
    body = """
        setp.ge.u32 %p, %t, 64;
        mov.u32 %d, 5;
        @%p bra out;
        bar.sync 1, 64;
        mov.u32 %d, 6;
    out:
    """
    found = execute(body, threads() | {"p": ("pred", np.zeros(96))}, {"d": "b32"}, block=96)["d"]
    assert (found == np.where(np.arange(96) < 64, 6, 5)).all()


def test_producer_arrives_and_consumer_waits(execute):
    """Warp 0 stores, arrives and continues; warps 1 and 2 wait for it, whether they reach the barrier before or
    after."""
    body = """
        .shared .align 4 .b8 box[4];
        setp.ge.u32 %p, %t, 32;
        mov.u32 %d, 0;
        @%p bra consume;
        setp.eq.u32 %p, %t, 0;
        @%p st.shared.b32 [box], 77;
        bar.arrive 2, 96;
        bra out;
    consume:
        bar.sync 2, 96;
        ld.shared.b32 %d, [box];
    out:
    """
    found = execute(body, threads() | {"p": ("pred", np.zeros(96))}, {"d": "b32"}, block=96)["d"]
    assert (found == np.where(np.arange(96) < 32, 0, 77)).all()


@pytest.mark.parametrize("delay", ["", DETOUR])
@pytest.mark.parametrize("name", ["bar", "barrier.cta"])
def test_reductions(execute, name, delay):
    votes = np.zeros(2 * 96)
    votes[[3, 40, 90]] = 1
    votes[96:] = 1
    inputs = {"t": ("b32", np.tile(np.arange(96, dtype=np.uint32), 2)), "v": ("pred", votes)}
    body = (
        f"{delay} {name}.red.popc.u32 %n, 0, %v; {name}.red.and.pred %all, 1, 96, %v; {name}.red.or.pred %any, 1, !%v;"
    )
    results = execute(body, inputs, {"n": "b32", "all": "pred", "any": "pred"}, block=96)
    assert (results["n"] == np.repeat([3, 96], 96)).all()
    assert (results["all"] == np.repeat([False, True], 96)).all() and (
        results["any"] == np.repeat([True, False], 96)
    ).all()


def test_a_barrier_is_reused(execute):
    """In each round every thread adds its neighbor's number of the previous round."""
    body = """
        .shared .align 4 .b8 box[512];
        .reg .b32 %mine, %next, %round, %other;
        mov.u32 %mine, box;
        add.u32 %next, %thread, 1;
        rem.u32 %next, %next, 96;
        mad.lo.u32 %next, %next, 4, %mine;
        mad.lo.u32 %mine, %thread, 4, %mine;
        mov.u32 %d, %t;
        mov.u32 %round, 0;
    again:
        st.shared.b32 [%mine], %d;
        bar.sync 0;
        ld.shared.b32 %other, [%next];
        bar.sync 0;
        add.u32 %d, %d, %other;
        add.u32 %round, %round, 1;
        setp.lt.u32 %p, %round, 6;
        @%p bra again;
    """
    found = execute(body, threads() | {"p": ("pred", np.zeros(96))}, {"d": "b32"}, block=96)["d"]
    expected = list(range(96))
    for _ in range(6):
        expected = [expected[thread] + expected[(thread + 1) % 96] for thread in range(96)]
    assert found.tolist() == expected


@pytest.mark.parametrize(
    "body, message",
    [
        ("bar.sync 16;", "16 barriers"),
        ("bar.sync 0, 40;", "multiple of 32"),
        ("bar.sync 0, 0;", "multiple of 32"),
        ("@%p bar.sync 0; @!%p bar.sync 1;", "threads of its warp"),
        ("bar.arrive 1, 128; bar.arrive 1, 128;", "again"),
        (
            "setp.lt.u32 %p, %t, 64; @%p bra low; bar.sync 0, 96; bra out; low: bar.sync 0, 64; out:",
            "another thread count",
        ),
        (
            "setp.lt.u32 %p, %t, 64; @%p bra low; bar.red.popc.u32 %t, 0, %p; bra out; low: bar.sync 0; out:",
            "another operation",
        ),
        ("bar.sync 1, 64;", "more threads"),
        ("bar.sync 1, 128;", "(?i)deadlock|wait"),  # too few threads: they wait forever
        ("setp.lt.u32 %p, %t, 32; @%p bra low; bar.sync 1; bra out; low: bar.sync 2; out:", "(?i)deadlock|wait"),
    ],
)
def test_faults(execute, body, message):
    with pytest.raises(EmulatorFault, match=message):
        execute(body, threads() | {"p": ("pred", np.arange(96) % 2)}, {"t": "b32"}, block=96)


def test_unaligned_barrier_takes_the_lanes_of_a_warp_one_by_one(execute):
    body = """
        setp.lt.u32 %p, %t, 10;
        @%p bra low;
        barrier.sync 0;
        bra out;
    low:
        barrier.sync 0;
    out:
        mov.u32 %d, 1;
    """
    assert execute(body, threads() | {"p": ("pred", np.zeros(96))}, {"d": "b32"}, block=96)["d"].all()


# ---------------------------------------------------------------------------------------------------------------
# Races: a thread that only arrives publishes what it did before, and learns nothing of the others

# Thread 0 stores `word` before a barrier of all. %p5, %p6, %p7: the thread is the first of warp 0, 1, 2.
FIRSTS = """
    mov.u32 %r2, word; setp.eq.u32 %p5, %r0, 0; setp.eq.u32 %p6, %r0, 32; setp.eq.u32 %p7, %r0, 64;
    @%p5 st.shared.u32 [%r2], 99; bar.sync 0;
    setp.lt.u32 %p1, %r0, 32; setp.lt.u32 %p2, %r0, 64; @%p1 bra ZERO; @%p2 bra ONE; bra TWO;
"""
# What each warp does, and whether it is a race.
PAIRS = {
    "store before the arrive": ("bar.sync 1, 64; {load0}", "{store1} bar.arrive 1, 64;", "", False),
    "store after the arrive": ("bar.sync 1, 64; {load0}", "bar.arrive 1, 64; {store1}", "", True),
    "load before the arrive": ("bar.sync 1, 64; {store0}", "{load1} bar.arrive 1, 64;", "", False),
    "load after the arrive": ("bar.sync 1, 64; {store0}", "bar.arrive 1, 64; {load1}", "", True),
    "load of what is stored before the wait": ("{store0} bar.sync 1, 64;", "bar.arrive 1, 64; {load1}", "", True),
    "the buffer is full, then empty": (
        "bar.sync 1, 64; {load0} bar.arrive 2, 64;",
        "{store1} bar.arrive 1, 64; bar.sync 2, 64; {store1}",
        "",
        False,
    ),
    "no wait until the buffer is empty": (
        "bar.sync 1, 64; {load0} bar.arrive 2, 64;",
        "{store1} bar.arrive 1, 64; {store1} bar.sync 2, 64;",
        "",
        True,
    ),
    "a chain": ("bar.sync 2, 64; {load0}", "bar.sync 1, 64; bar.arrive 2, 64;", "{store2} bar.arrive 1, 64;", False),
    "a broken chain": (
        "bar.sync 2, 64; {load0}",
        "bar.sync 1, 64; bar.arrive 2, 64;",
        "bar.arrive 1, 64; {store2}",
        True,
    ),
    "two wait for one": ("{store0} bar.sync 1, 96;", "bar.arrive 1, 96;", "bar.sync 1, 96; {load2}", False),
    "all wait": ("bar.sync 1, 64; {load0}", "{store1} bar.sync 1, 64;", "", False),
    "all but one exited": ("bar.sync 1, 64; {load0}", "{store1} bar.arrive 1, 64; exit;", "exit;", False),
}


@pytest.mark.parametrize("options", [dict(races=True), dict(races="strict"), dict(strict=True)])
@pytest.mark.parametrize("schedule", ["together", "warps"])
@pytest.mark.parametrize("kind", ["bar.{}", "barrier.cta.{}"])
@pytest.mark.parametrize("what", PAIRS)
def test_what_an_arrival_orders(what, kind, schedule, options):
    *warps, races = PAIRS[what]
    accesses = {f"load{warp}": f"@%p{5 + warp} ld.shared.u32 %r3, [%r2];" for warp in range(3)}
    accesses |= {f"store{warp}": f"@%p{5 + warp} st.shared.u32 [%r2], %r0;" for warp in range(3)}
    zero, one, two = (
        re.sub(r"bar\.(sync|arrive)", lambda found: kind.format(found[1]), warp.format(**accesses)) for warp in warps
    )
    body = f"{FIRSTS} ZERO: {zero} bra E; ONE: {one} bra E; TWO: {two} E:"
    text = program(body, before=".shared .align 4 .b32 word;", params=".param .u64 out")
    run = lambda: launch(text, "k", np.zeros(96), block=96, emulator=Emulator(schedule=schedule, **options))
    if not races:
        run()
        return
    with pytest.raises(EmulatorFault, match=r"(reads|writes) 4 bytes .* thread \d+ \(warp \d\) (wrote|read) .* a race"):
        run()


RING = """
    .reg .b32 %slot; mov.u32 %r2, ring; mov.u32 %r5, 0; setp.lt.u32 %p1, %r0, 32; and.b32 %r6, %r0, 31;
    mad.lo.u32 %r2, %r6, 4, %r2; @%p1 bra CONSUME;
PRODUCE:
    and.b32 %slot, %r5, 1; mad.lo.u32 %r7, %slot, 128, %r2; add.u32 %r8, %slot, 1; add.u32 %r9, %slot, 3;
    setp.lt.u32 %p2, %r5, 2; @%p2 bra FREE; {wait} FREE:
    st.shared.u32 [%r7], %r5; bar.arrive %r8, 64;
    add.u32 %r5, %r5, 1; setp.lt.u32 %p3, %r5, 8; @%p3 bra PRODUCE; bra E;
CONSUME:
    and.b32 %slot, %r5, 1; xor.b32 %r6, %r0, 1; mov.u32 %r2, ring; mad.lo.u32 %r2, %r6, 4, %r2;
    mad.lo.u32 %r7, %slot, 128, %r2; add.u32 %r8, %slot, 1; add.u32 %r9, %slot, 3;
    bar.sync %r8, 64; ld.shared.u32 %r4, [%r7]; setp.ge.u32 %p2, %r5, 6; @%p2 bra LAST; bar.arrive %r9, 64; LAST:
    add.u32 %r5, %r5, 1; setp.lt.u32 %p3, %r5, 8; @%p3 bra CONSUME;
E:
"""


@pytest.mark.parametrize("schedule", ["together", "warps"])
def test_a_ring_of_two_buffers(schedule):
    """A producer fills two buffers in turn; for each there is a barrier "full" and a barrier "empty"."""

    def run(wait: str) -> None:
        text = program(RING.format(wait=wait), before=".shared .align 4 .b32 ring[64];")
        launch(text, "k", np.zeros(64), block=64, emulator=Emulator(races=True, schedule=schedule))

    run("bar.sync %r9, 64;")
    with pytest.raises(EmulatorFault, match="a race|again before it completes|more threads arrive"):
        run("")


@pytest.mark.parametrize("opcode", ["bar.wait", "bar.sync.aligned", "bar.red.xor.pred", "bar.red.popc.pred"])
def test_other_forms_are_refused(opcode):
    with pytest.raises(Unsupported, match="is not implemented"):
        resolve(opcode)
