"""mbarrier in isolation (PTX ISA 9.7.13.15): phases, counts, which threads wait, visibility after a wait, and
faults."""

import numpy as np
import pytest

from ptxrt.emulator.instruction import Unsupported, resolve
from ptxrt.errors import EmulatorFault

NUMBERS = {"t": ("b32", np.arange(96, dtype=np.uint32))}
# Thread 0 initializes a barrier for {count} arrivals; %bar is its address, %at the thread's own word of `box`.
SETUP = """
    .shared .align 8 .b64 bar; .shared .align 16 .b8 box[1024];
    .reg .b32 %bar, %at, %other; .reg .b64 %s; .reg .pred %first;
    mov.u32 %bar, bar;
    mov.u32 %at, box;
    mad.lo.u32 %at, %thread, 4, %at;
    setp.eq.u32 %first, %t, 0;
    @%first mbarrier.init.shared::cta.b64 [%bar], {count};
    fence.mbarrier_init.release.cluster;
    bar.sync 0;
"""
WAIT = """
{name}:
    mbarrier.{wait}.parity{words}.shared::cta.b64 %p, [%bar], {parity}{hint};
    @!%p bra {name};
"""
P = {"p": ("pred", np.zeros(96))}


def wait(parity, name="again", form="try_wait", words="", hint=""):
    return WAIT.format(name=name, wait=form, words=words, parity=parity, hint=hint)


def run(execute, body, outputs, count=96, **options):
    return execute(SETUP.format(count=count) + body, NUMBERS | P, outputs, block=96, **options)


NEIGHBOR = """
    st.shared.b32 [%at], %t;
    {arrive}
    {wait}
    add.u32 %other, %t, 32; rem.u32 %other, %other, 96; mov.u32 %at, box; mad.lo.u32 %at, %other, 4, %at;
    ld.shared.b32 %d, [%at];
"""


@pytest.mark.parametrize(
    "arrive",
    [
        "mbarrier.arrive.shared::cta.b64 %s, [%bar];",
        "mbarrier.arrive.shared.b64 _, [%bar];",
        "mbarrier.arrive.release.cta.shared::cta.b64 %s, [%bar], 1;",
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%bar];",
        "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 %s, [%bar], 0;",
    ],
)
@pytest.mark.parametrize(
    "form, words, hint",
    [
        ("try_wait", "", ""),
        ("try_wait", ".acquire.cta", ", 1000"),
        ("test_wait", "", ""),
        ("test_wait", ".acquire.cta", ""),
    ],
)
@pytest.mark.parametrize("schedule", ["together", "warps"])
def test_all_threads_meet(execute, arrive, form, words, hint, schedule):
    body = NEIGHBOR.format(arrive=arrive, wait=wait(0, form=form, words=words, hint=hint))
    assert (run(execute, body, {"d": "b32"}, schedule=schedule)["d"] == (np.arange(96) + 32) % 96).all()


@pytest.mark.parametrize("form", ["try_wait", "test_wait"])
def test_state_form(execute, form):
    body = NEIGHBOR.format(
        arrive="mbarrier.arrive.shared::cta.b64 %s, [%bar];",
        wait=f"again: mbarrier.{form}.shared::cta.b64 %p, [%bar], %s; @!%p bra again;",
    )
    assert (run(execute, body, {"d": "b32"})["d"] == (np.arange(96) + 32) % 96).all()


def test_generic_addresses(execute):
    body = """
        .reg .b64 %generic; .reg .b64 %zero;
        cvt.u64.u32 %generic, %bar;
        cvta.shared.u64 %generic, %generic;
        mbarrier.arrive.b64 %s, [%generic];
        again: mbarrier.try_wait.b64 %p, [%generic], %s; @!%p bra again;
        mov.u32 %d, 1;
    """
    assert run(execute, body, {"d": "b32"})["d"].all()


def test_sleeping_costs_no_instructions(execute):
    """Two warps wait while the third counts to 20000: only the third uses the instruction budget."""
    body = f"""
        setp.lt.u32 %p, %t, 64; mov.u32 %d, 0; @%p bra sleep;
        count: add.u32 %d, %d, 1; setp.lt.u32 %p, %d, 20000; @%p bra count;
        mbarrier.arrive.shared::cta.b64 _, [%bar];
        sleep: {wait(0)}
    """
    assert (
        run(execute, body, {"d": "b32"}, count=32, budget=80000)["d"] == np.where(np.arange(96) < 64, 0, 20000)
    ).all()


def test_phases_follow_each_other(execute):
    """In each round every thread adds its neighbor's number; a second barrier separates reads from writes."""
    body = f"""
        .shared .align 8 .b64 done; .reg .b32 %next, %done, %round, %mine, %parity;
        mov.u32 %done, done;
        @%first mbarrier.init.shared.b64 [%done], 96;
        bar.sync 0;
        add.u32 %next, %t, 1; rem.u32 %next, %next, 96; mov.u32 %mine, box; mad.lo.u32 %next, %next, 4, %mine;
        mov.u32 %d, %t; mov.u32 %round, 0;
    again:
        and.b32 %parity, %round, 1;
        st.shared.b32 [%at], %d;
        mbarrier.arrive.shared.b64 _, [%bar];
        {wait("%parity", "ready")}
        ld.shared.b32 %other, [%next];
        mbarrier.arrive.shared.b64 _, [%done];
        free: mbarrier.try_wait.parity.shared.b64 %p, [%done], %parity; @!%p bra free;
        add.u32 %d, %d, %other;
        add.u32 %round, %round, 1; setp.lt.u32 %p, %round, 6; @%p bra again;
    """
    expected = list(range(96))
    for _ in range(6):
        expected = [expected[i] + expected[(i + 1) % 96] for i in range(96)]
    for schedule in ("together", "warps"):
        assert run(execute, body, {"d": "b32"}, schedule=schedule)["d"].tolist() == expected


@pytest.mark.parametrize("schedule", ["together", "warps"])
@pytest.mark.parametrize("form", ["try_wait", "test_wait"])
def test_a_warp_waits_for_the_lane_that_waits(execute, form, schedule):
    """Lane 0 waits for the other warps. Its own warp then meets at bar.warp.sync, where the other lanes wait first, and
    sees the data that lane 0 waited for."""
    body = f"""
        .reg .pred %warp; .reg .b32 %mask;
        setp.lt.u32 %warp, %t, 32;
        st.shared.b32 [%at], %t;
        @!%warp mbarrier.arrive.shared.b64 _, [%bar];
        @!%first bra behind;
        {wait(0, form=form)}
    behind:
        @!%warp bra done;
        bar.warp.sync 0xffffffff;
        ld.shared.b32 %d, [%at+128];
        activemask.b32 %mask; setp.ne.u32 %p, %mask, 0xffffffff; @%p trap;
    done:
        @%warp bra end; mov.u32 %d, %t;
    end:
    """
    assert (run(execute, body, {"d": "b32"}, count=64, schedule=schedule)["d"] == np.r_[32:64, 32:96]).all()


def test_one_thread_after_the_other_completes_phases(execute):
    """With a count of 1, 96 arrivals of one instruction complete 96 phases; the states count them in any order of
    threads."""
    body = "mbarrier.arrive.shared.b64 %s, [%bar]; cvt.u32.u64 %d, %s;"
    assert sorted(run(execute, body, {"d": "b32"}, count=1)["d"].tolist()) == list(range(96))


def test_pending_count(execute):
    """The state holds the count before the arrival: 100, 99, ... pending."""
    body = "mbarrier.arrive.noComplete.shared.b64 %s, [%bar], 1; mbarrier.pending_count.b64 %d, %s;"
    assert sorted(run(execute, body, {"d": "b32"}, count=100)["d"].tolist()) == list(range(5, 101))


def test_counts(execute):
    """Thread 5 arrives with a count of 60, 36 other threads with 1 each."""
    body = f"""
        setp.eq.u32 %p, %t, 5; @%p mbarrier.arrive.shared.b64 %s, [%bar], 60;
        setp.ge.u32 %p, %t, 60; @%p mbarrier.arrive.shared.b64 %s, [%bar];
        {wait(0)} mov.u32 %d, 1;
    """
    assert run(execute, body, {"d": "b32"})["d"].all()


def test_arrive_drop(execute):
    """Sixteen threads drop out of phase 0; phase 1 completes without them."""
    body = f"""
        .reg .pred %leaves; setp.lt.u32 %leaves, %t, 16;
        @%leaves mbarrier.arrive_drop.shared.b64 _, [%bar];
        @!%leaves mbarrier.arrive.shared.b64 _, [%bar];
        {wait(0)}
        @!%leaves mbarrier.arrive.shared.b64 _, [%bar];
        {wait(1, "later")} mov.u32 %d, 1;
    """
    assert run(execute, body, {"d": "b32"})["d"].all()


def test_test_wait_says_no(execute):
    """test_wait on an incomplete phase returns false; on the parity before it, true."""
    body = """
        .reg .pred %before; .reg .b32 %e;
        mbarrier.test_wait.parity.shared.b64 %p, [%bar], 0; selp.u32 %d, 1, 0, %p;
        mbarrier.test_wait.parity.shared.b64 %before, [%bar], 1; selp.u32 %e, 2, 0, %before; add.u32 %d, %d, %e;
    """
    assert (run(execute, body, {"d": "b32"})["d"] == 2).all()


def test_tx_count(execute):
    """The phase also waits for bytes: expect_tx announces them, complete_tx completes them."""
    body = f"""
        @%first mbarrier.arrive.expect_tx.shared.b64 _, [%bar], 100;
        bar.sync 0;
        mov.u32 %d, 0;
        setp.ge.u32 %p, %t, 32; @%p bra sleep;
        mbarrier.test_wait.parity.shared.b64 %p, [%bar], 0; selp.u32 %d, 10, 1, %p;
        @%first mbarrier.expect_tx.relaxed.cta.shared.b64 [%bar], 28;
        bar.warp.sync 0xffffffff;
        mbarrier.complete_tx.shared.b64 [%bar], 4;
        sleep: {wait(0)} add.u32 %d, %d, 1;
    """
    assert (run(execute, body, {"d": "b32"}, count=1)["d"] == np.where(np.arange(96) < 32, 2, 1)).all()


def test_barrier_can_be_made_again(execute):
    body = f"""
        mbarrier.arrive.shared.b64 _, [%bar];
        {wait(0)}
        bar.sync 0;
        @%first mbarrier.inval.shared.b64 [%bar];
        @%first st.shared.b64 [%bar], 7;
        bar.sync 0;
        ld.shared.b32 %d, [%bar];
        bar.sync 0;
        @%first mbarrier.init.shared.b64 [%bar], 1;
        bar.sync 0;
        @%first mbarrier.arrive.shared.b64 _, [%bar];
        {wait(0, "anew")}
    """
    assert (run(execute, body, {"d": "b32"})["d"] == 7).all()


# cp.async.mbarrier.arrive

COPY = """
    .reg .b64 %from; .reg .pred %copies;
    st.shared.b32 [%at], 0;
    setp.lt.u32 %copies, %t, 64;
    ld.param.u64 %from, [param_t]; mad.lo.u64 %from, %index, 4, %from;
    @%copies cp.async.ca.shared.global [%at], [%from], 4;
"""


@pytest.mark.parametrize("noinc, count", [("", 96), (".noinc", 96 + 64)])
def test_copies_arrive(execute, noinc, count):
    body = NEIGHBOR.format(
        arrive=f"{COPY} @%copies cp.async.mbarrier.arrive{noinc}.shared::cta.b64 [%bar]; mbarrier.arrive.shared.b64 _, [%bar];",
        wait=wait(0),
    ).replace("st.shared.b32 [%at], %t;", "")
    other = (np.arange(96) + 32) % 96
    assert (run(execute, body, {"d": "b32"}, count=count)["d"] == np.where(other < 64, other, 0)).all()


def test_copies_land_when_somebody_waits(execute):
    """Without checks a thread sees the old bytes before the wait, and after it those of a copy issued after the
    arrival."""
    body = f"""
        {COPY} @%copies cp.async.mbarrier.arrive.noinc.shared.b64 [%bar];
        st.shared.b32 [%at + 512], 5;
        @%copies cp.async.ca.shared.global [%at + 512], [%from], 4;
        ld.shared.b32 %d, [%at];
        {wait(0)}
        ld.shared.b32 %e, [%at]; ld.shared.b32 %f, [%at + 512];
    """
    found = run(execute, body, {"d": "b32", "e": "b32", "f": "b32"}, count=64, checks=False)
    assert not found["d"].any() and (found["f"] == 5).all()
    assert (found["e"] == np.where(np.arange(96) < 64, np.arange(96), 0)).all()


@pytest.mark.parametrize(
    "body, message",
    [
        (wait(0), r"deadlock.*96 threads wait at the mbarrier at 0x400 \(phase 0 lacks 96 of 96 arrivals and 0 bytes\)"),
        (wait(0, form="test_wait"), "stopped after|deadlock"),
        ("@%first mbarrier.arrive.shared.b64 _, [%bar], 96; @%first mbarrier.expect_tx.shared.b64 [%bar], 8;" + wait(1), "lacks 96 of 96 arrivals and 8 bytes"),
        ("mbarrier.arrive.shared.b64 _, [%bar + 8];", "not initialized"),
        ("mbarrier.arrive.shared.b64 _, [%bar + 4];", "no multiple of 8"),
        ("@%first mbarrier.init.shared.b64 [%bar], 1;", "initialized already"),
        ("@%first mbarrier.init.shared.b64 [%bar + 8], 0;", "count outside"),
        ("mbarrier.arrive.shared.b64 _, [%bar], 0;", "between 1"),
        ("mbarrier.arrive.shared.b64 _, [%bar], 97;", "more than are pending"),
        ("mbarrier.arrive.noComplete.shared.b64 %s, [%bar], 1;", "noComplete"),
        ("mbarrier.test_wait.parity.shared.b64 %p, [%bar], 2;", "neither 0 nor 1"),
        ("mov.u64 %s, 5; mbarrier.test_wait.shared.b64 %p, [%bar], %s;", "neither of the current"),
        ("@%first mbarrier.expect_tx.shared.b64 [%bar], 1048576;", "tx-count"),
        ("ld.shared.b32 %d, [%bar];", "belong to an mbarrier"),
        ("st.shared.b32 [%bar], 1;", "belong to an mbarrier"),
        ("@%first mbarrier.inval.shared.b64 [%bar]; bar.sync 0; mbarrier.arrive.shared.b64 _, [%bar];", "not initialized"),
        ("@%first mbarrier.inval.shared.b64 [%bar]; bar.sync 0; ld.shared.b32 %d, [%bar];", "nothing wrote"),
    ],
)  # fmt: skip
def test_faults(execute, body, message):
    with pytest.raises(EmulatorFault, match=message):
        run(execute, body + " mov.u32 %d, 1;", {"d": "b32"}, budget=200_000)


@pytest.mark.parametrize(
    "opcode",
    [
        "mbarrier.init.b32",
        "mbarrier.arrive.acquire.cta.b64",
        "mbarrier.arrive.expect_tx.noComplete.shared.b64",
        "mbarrier.wait.b64",
        "mbarrier.try_wait.release.b64",
    ],
)
def test_other_forms_are_refused(opcode):
    with pytest.raises(Unsupported, match="is not implemented"):
        resolve(opcode)
