"""Progress of a launch: within the first batch by its loops, in later ones by instructions; with a simulated clock."""

import numpy as np
import pytest
from programs import launch, program

from ptxrt.emulator import Emulator, progress


class Clock:
    """A clock that advances by 1 / `steps` seconds at each reading."""

    def __init__(self, steps):
        self.now, self.tick = 0.0, 1 / steps

    def monotonic(self):
        self.now += self.tick
        return self.now


@pytest.fixture
def shares(monkeypatch):
    """shares(text, ...) launches and returns the listener's reports, (share, seconds left), and the final time."""

    def run(text, *arguments, steps=20, **facts):
        heard, clock = [], Clock(steps)
        monkeypatch.setattr(progress, "time", clock)
        emulator = Emulator(
            progress=lambda name, share, left: heard.append((name, share, left)), lanes=facts.pop("lanes", 8192)
        )
        launch(text, "k", *arguments, emulator=emulator, **facts)
        assert all(name == "k" for name, _, _ in heard)
        return [(share, left) for _, share, left in heard], clock.now

    return run


def loop(trips, body="add.u32 %r5, %r5, 3;", name="top", counter="%r1"):
    return f"mov.u32 {counter}, 0; {name}: {body} add.s32 {counter}, {counter}, 1; setp.ne.s32 %p1, {counter}, {trips}; @%p1 bra {name};"


def test_batches_are_counted():
    calls = []
    meter = progress.Progress("k", 100, lambda *arguments: calls.append(arguments))
    meter.started -= 10
    meter.shown -= 10
    meter.begin(0, 25)
    meter.end(1000)
    meter.begin(25, 1)
    meter.end(1000)
    assert len(calls) == 1 and calls[0][:2] == ("k", 0.25) and calls[0][2] == pytest.approx(30, abs=1)


@pytest.mark.parametrize("bound", ["3000", "%r9"])
def test_one_batch_tells_by_its_loop(shares, bound):
    """A loop of 3000 trips: shares increase throughout, and in the second half the estimates are accurate."""
    body = f"ld.global.u32 %r9, [%rd0]; mov.u32 %r5, 0; {loop(bound)} st.global.u64 [%rd0], %rd1;"
    heard, end = shares(program(body), np.full(32, 3000, np.uint64))
    share = [share for share, _ in heard]
    assert len(heard) >= 5 and share == sorted(share) and 0 < share[0] < 0.5 and share[-1] > 0.85
    total = [left / (1 - share) for share, left in heard]
    assert all(abs(each - end) < 0.1 * end for each in total[len(total) // 2 :])


def test_the_outermost_loop_decides(shares):
    """Thirty trips around an inner loop that restarts each time."""
    inner = loop(100, name="inner", counter="%r2")
    heard, end = shares(
        program(f"mov.u32 %r5, 0; {loop(30, inner)} st.global.u64 [%rd0], %rd1;"), np.zeros(32, np.uint64), steps=2
    )
    late = heard[2:]
    assert len(late) >= 3 and all(abs(left / (1 - share) - end) < 0.2 * end for share, left in late)


def test_threads_with_different_counts(shares):
    """The thread with the most trips determines the share."""
    heard, end = shares(
        program(
            f"mul.lo.u32 %r9, %r0, 100; add.u32 %r9, %r9, 1; mov.u32 %r5, 0; {loop('%r9')} st.global.u64 [%rd0], %rd1;"
        ),
        np.zeros(32, np.uint64),
    )
    assert len(heard) >= 5 and all(abs(left / (1 - share) - end) < 0.2 * end for share, left in heard[3:])


def test_later_batches_are_measured_by_the_first(shares):
    """A loop ended by a float comparison: the first of four batches gives no reports, later ones give shares."""
    body = "mov.f32 %f1, 0f00000000; top: add.f32 %f1, %f1, 0f3F800000; setp.lt.f32 %p1, %f1, 0f45BB8000; @%p1 bra top; st.global.u64 [%rd0], %rd1;"
    heard, _ = shares(program(body), np.zeros(32, np.uint64), grid=4, lanes=32, steps=30)
    share = [share for share, _ in heard]
    assert share == sorted(share) and share[0] >= 0.25 and sum(each % 0.25 > 0.02 for each in share) >= 3


def test_short_launches_and_those_without_listeners_are_left_alone(shares, monkeypatch):
    text = program(f"mov.u32 %r5, 0; {loop(100)} st.global.u64 [%rd0], %rd1;")
    assert shares(text, np.zeros(32, np.uint64))[0] == []
    monkeypatch.setattr(progress.Progress, "passed", None)  # not called
    launch(text, "k", np.zeros(32, np.uint64))


def test_loops_that_tell_nothing_do_no_harm(shares):
    """The loop's final branch compares values that never change; another branch in its middle leaves it."""
    body = """mov.u32 %r9, %ntid.x; mov.u32 %r5, 0;
    top: add.u32 %r5, %r5, 1; setp.ge.u32 %p2, %r5, 3000; @%p2 bra done; setp.ne.s32 %p1, %r9, 0; @%p1 bra top;
    done: st.global.u64 [%rd0], %rd1;"""
    heard, end = shares(program(body), np.zeros(32, np.uint64))
    assert heard == [] and end > 1  # the clock was read: the loops were monitored
