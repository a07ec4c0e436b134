"""Finite and endless loops; spinning threads; partial warps at aligned barriers."""

import time

import numpy as np
import pytest
from programs import launch, program

from ptxrt.emulator import Emulator
from ptxrt.errors import EmulatorFault

ENDLESS = {
    "an empty loop": "L: bra L;",
    "a flag that nobody sets": "L: ld.volatile.global.u32 %r1, [%rd0]; setp.eq.u32 %p1, %r1, 0; @%p1 bra L;",
    "a store of the same value": "L: st.global.u32 [%rd0], 5; bra L;",
    "a lock that is never free": "L: atom.global.cas.b32 %r1, [%rd0], 1, 2; setp.eq.u32 %p1, %r1, 0; @%p1 bra L;",
    "a value that comes and goes": "mov.u32 %r1, 0; L: xor.b32 %r1, %r1, 1; bra L;",
    "a counter that begins anew": "mov.u32 %r1, 0; L: add.u32 %r1, %r1, 1; and.b32 %r1, %r1, 63; bra L;",
    "one thread, the others exit": "setp.ne.u32 %p1, %r0, 40; @%p1 bra E; L: bra L; E:",
    "one thread, the others wait for it": "setp.ne.u32 %p1, %r0, 40; @%p1 bra E; L: bra L; E: bar.warp.sync 0xffffffff; barrier.sync 0;",
    "two loops": """and.b32 %r2, %r0, 1; setp.eq.u32 %p1, %r2, 0; @%p1 bra M; L: ld.volatile.global.u32 %r1, [%rd0]; bra L;
        M: ld.volatile.global.u32 %r3, [%rd0]; setp.eq.u32 %p2, %r3, 0; @%p2 bra M;""",
    "every warp waits for the next one": """mov.u64 %rd3, %rd0; xor.b32 %r1, %r0, 32; mul.wide.u32 %rd4, %r1, 8; ld.param.u64 %rd5, [out]; add.s64 %rd4, %rd4, %rd5;
        L: ld.acquire.gpu.global.u32 %r2, [%rd4]; setp.eq.u32 %p1, %r2, 0; @%p1 bra L; st.release.gpu.global.u32 [%rd3], 1;""",
}


@pytest.mark.parametrize("schedule", ["together", "warps"])
@pytest.mark.parametrize("what", ENDLESS)
def test_an_endless_loop_is_found(what, schedule):
    begin = time.process_time()
    with pytest.raises(
        EmulatorFault,
        match="is in an endless loop: it comes to the same place with the same registers, no memory changes.*at PTX line",
    ):
        launch(
            program(ENDLESS[what]),
            "k",
            np.zeros(64, np.uint64),
            block=64,
            emulator=Emulator(schedule=schedule, budget=10**12),
        )
    assert time.process_time() - begin < 2


ENDING = {
    "a counter": "mov.u32 %r1, 0; L: add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 40000; @%p1 bra L;",
    "a counter in shared memory": """mov.u32 %r1, box; st.shared.u32 [%r1], 0; bar.sync 0;
        L: ld.shared.u32 %r2, [%r1]; add.u32 %r2, %r2, 1; bar.sync 0; st.shared.u32 [%r1], %r2; bar.sync 0; setp.lt.u32 %p1, %r2, 1200; @%p1 bra L;""",
    "a counter in global memory": "L: ld.global.u32 %r2, [%rd0]; add.u32 %r2, %r2, 1; st.global.u32 [%rd0], %r2; setp.lt.u32 %p1, %r2, 20000; @%p1 bra L;",
    "a counter by atomics": "L: atom.global.add.u32 %r2, [%rd0], 1; setp.lt.u32 %p1, %r2, 9000; @%p1 bra L;",
    "a clock": "mov.u64 %rd2, %clock64; L: mov.u64 %rd3, %clock64; sub.u64 %rd4, %rd3, %rd2; setp.lt.u64 %p1, %rd4, 100000; @%p1 bra L;",
    "a timer": "mov.u64 %rd2, %globaltimer; L: mov.u64 %rd3, %globaltimer; sub.u64 %rd4, %rd3, %rd2; setp.lt.u64 %p1, %rd4, 500000000; @%p1 bra L;",
    "a flag of a thread that takes its time": """setp.eq.u32 %p1, %r0, 40; ld.param.u64 %rd2, [out]; @%p1 bra W;
        L: ld.volatile.global.u32 %r1, [%rd2]; setp.eq.u32 %p2, %r1, 0; @%p2 bra L; bra E;
        W: mov.u32 %r2, 0; C: add.u32 %r2, %r2, 1; setp.lt.u32 %p3, %r2, 30000; @%p3 bra C; st.volatile.global.u32 [%rd2], 1; E:""",
    "a long period": "mov.u32 %r1, 1; L: mul.lo.u32 %r1, %r1, 1664525; add.u32 %r1, %r1, 1013904223; and.b32 %r2, %r1, 0xffff; setp.ne.u32 %p1, %r2, 0; @%p1 bra L;",
}


@pytest.mark.parametrize("schedule", ["together", "warps"])
@pytest.mark.parametrize("what", ENDING)
def test_a_loop_that_ends_does(what, schedule):
    emulator = Emulator(schedule=schedule, budget=10**12)
    launch(program(ENDING[what], before=".shared .u32 box;"), "k", np.zeros(64, np.uint64), block=64, emulator=emulator)


LOCK = """ld.param.u64 %rd2, [out]; setp.ne.u32 %p1, %r0, 0; @%p1 bra E;
    L: atom.acquire.gpu.global.cas.b32 %r1, [%rd2], 0, 1; setp.eq.u32 %p2, %r1, 1; @%p2 bra L;
    ld.volatile.global.u32 %r2, [%rd2+8]; add.u32 %r2, %r2, 1; st.volatile.global.u32 [%rd2+8], %r2;
    atom.release.gpu.global.exch.b32 %r3, [%rd2], 0; E: bar.sync 0;"""


@pytest.mark.parametrize("schedule", ["together", "warps"])
def test_a_lock_takes_time_by_the_number_of_its_users(schedule):
    """A spinning thread yields to the holder of the lock: without that, 120 blocks took more than ten seconds."""
    out, begin = np.zeros(64, np.uint64), time.process_time()
    launch(program(LOCK), "k", out, block=64, grid=120, emulator=Emulator(schedule=schedule))
    assert out[:2].tolist() == [0, 120] and time.process_time() - begin < 3


# Aligned barriers

HALF = "setp.ge.u32 %p1, %r0, 16; @%p1 bra M; {barrier} M: st.global.u32 [%rd0], %r0;"


@pytest.mark.parametrize("schedule", ["together", "warps"])
@pytest.mark.parametrize("more", ["", "setp.eq.u32 %p2, %r0, 99; @%p2 bra E; st.global.u32 [%rd0], %r0; E:"])
def test_lanes_that_ran_past_an_aligned_barrier_and_exited(schedule, more):
    message = "executes an aligned barrier with 16 of the 32 threads of its warp: others ran past it and exited"
    with pytest.raises(EmulatorFault, match=message):
        launch(
            program(HALF.format(barrier="bar.sync 0;") + more),
            "k",
            np.zeros(32, np.uint64),
            emulator=Emulator(schedule=schedule),
        )
    launch(
        program(HALF.format(barrier="barrier.sync 0, 32;").replace("0, 32", "0") + more),
        "k",
        np.zeros(32, np.uint64),
        emulator=Emulator(schedule=schedule),
    )


@pytest.mark.parametrize("schedule", ["together", "warps"])
@pytest.mark.parametrize(
    "body",
    [
        "setp.ge.u32 %p1, %r0, 16; @%p1 bra E; bar.sync 0; st.global.u32 [%rd0], %r0; E:",
        "setp.ge.u32 %p1, %r0, 16; @!%p1 bra L; st.global.u32 [%rd0], %r0; bra E; L: bar.sync 0; st.global.u32 [%rd0], %r0; E:",
        """mov.u32 %r1, 0; L: st.global.u32 [%rd0], %r1; add.u32 %r1, %r1, 1; setp.gt.u32 %p1, %r1, %r0; @%p1 bra E; bar.sync 0; bra L; E:""",
    ],
)
def test_lanes_that_exited_before_an_aligned_barrier(body, schedule):
    """A barrier does not wait for lanes that returned early, even if they did other work first or left a loop."""
    launch(program(body), "k", np.zeros(32, np.uint64), emulator=Emulator(schedule=schedule))
