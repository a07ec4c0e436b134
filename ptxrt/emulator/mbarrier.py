"""Barriers in shared memory that count arrivals and bytes: mbarrier (PTX ISA 9.7.13.15).

A phase is complete when no arrival is pending and the tx-count is zero. Asynchronous copies (cp.async.mbarrier.arrive,
cp.async.bulk) may supply the missing arrivals or bytes. They land when a thread waits for the phase and only they are
missing, no earlier.

A thread that waits for an incomplete phase sleeps until it completes, so a loop around try_wait or test_wait costs no
instructions. If no thread can run, all sleeping threads continue with the result false, as after a timeout. More than
`_TIMEOUTS` such timeouts without a change on any barrier are a deadlock.

The object is opaque: ld cannot read its bytes. `Barriers` keeps its state beside the memory. A state operand holds the
phase in its low half and the pending count in its high half.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .instruction import Blocking, Fault, Lanes, Memory, Semantics, Unsupported, define
from .memory import NEVER, OPAQUE, SHARED_BASE

MOST = (1 << 20) - 1  # the largest arrival count, and the largest magnitude of the tx-count
_TIMEOUTS = 64
_WORD = 8

_SPACES = {"shared": "shared", "shared::cta": "shared", "shared::cluster": "shared"}
_ORDERS = {"release", "acquire", "relaxed"}
_SCOPES = {"cta", "cluster"}


class _Wait(NamedTuple):
    """Sleeping threads: their instruction, ids, barriers, and the phase number that each barrier must reach."""

    threads: object
    lanes: np.ndarray
    barrier: np.ndarray
    until: np.ndarray
    acquires: bool


class Transfer(NamedTuple):
    """A pending copy that completes `bytes` on a barrier; `land(barrier)` performs it."""

    land: Callable[[int], None]
    bytes: int


class _Arrivals(NamedTuple):
    """Pending arrivals of threads: each takes place when the thread's cp.async copies issued before `serial` land."""

    lanes: np.ndarray
    serial: int


class Barriers:
    """The mbarrier objects of a batch. A barrier is named by its index in shared memory, in words of 8 bytes."""

    def __init__(self, batch):
        self.batch = batch
        words = len(batch.shared.data) // _WORD
        self.valid = np.zeros(words, bool)
        self.count, self.pending, self.tx, self.phase = (np.zeros(words, np.int64) for _ in range(4))
        self.waiters = np.zeros(words, np.int64)
        self.waits: list[_Wait] = []
        self.transfers: dict[int, deque[Transfer]] = {}
        self.arrivals: dict[int, deque[_Arrivals]] = {}
        self.timeouts = 0
        batch.on_idle(self.time_out)

    # -- names --------------------------------------------------------------------------------------------------

    def find(self, access, space: str, address: np.ndarray, verb: str = "updates", fresh: bool = False) -> np.ndarray:
        """The barriers at (n,) addresses; a fault where none is initialized (`fresh`: where one is)."""
        address = np.broadcast_to(address, access.count)
        parts = access.locate(space, address, _WORD, None, verb)
        if len(parts) != 1 or parts[0].region is not self.batch.shared:
            raise Fault("uses an mbarrier outside of shared memory")
        barrier = parts[0].index
        wrong = self.valid[barrier] == fresh
        if wrong.any():
            state = "is initialized already" if fresh else "was not initialized"
            raise Fault(f"uses the mbarrier at 0x{int(address[int(np.argmax(wrong))]):x}, which {state}", wrong)
        return barrier

    def name(self, barrier: int) -> str:
        stride = max(self.batch.shared_stride, 1)
        return f"the mbarrier at 0x{SHARED_BASE + barrier * _WORD % stride:x}"

    def lacks(self, barrier: int) -> str:
        """A barrier and the missing arrivals and bytes of its current phase, for messages."""
        return (
            f"{self.name(barrier)} (phase {self.phase[barrier]} lacks {self.pending[barrier]} of "
            f"{self.count[barrier]} arrivals "
            f"and {self.tx[barrier]} bytes)"
        )

    # -- phases -------------------------------------------------------------------------------------------------

    def expect(self, barrier: np.ndarray, bytes: np.ndarray) -> None:
        """Add to the tx-counts of (n,) barriers."""
        self.timeouts = 0
        np.add.at(self.tx, barrier, bytes)
        wrong = np.abs(self.tx[barrier]) > MOST
        if wrong.any():
            raise Fault(f"makes the tx-count of {self.name(int(barrier[int(np.argmax(wrong))]))} exceed {MOST}", wrong)

    def tokens(self, barrier: np.ndarray) -> np.ndarray:
        """State operands for the current phases of (n,) barriers."""
        return (self.phase[barrier] & 0xFFFFFFFF).astype(np.uint64) | (
            self.pending[barrier].astype(np.uint64) << np.uint64(32)
        )

    def arrive(
        self, threads, barrier: np.ndarray, count: np.ndarray, *, completes: bool, drops: bool, releases: bool
    ) -> np.ndarray:
        """Let each thread arrive `count` times; returns the states before, (n,)."""
        wrong = (count < 1) | (count > MOST)
        if wrong.any():
            raise Fault(f"arrives {int(count[int(np.argmax(wrong))])} times; a count lies between 1 and {MOST}", wrong)
        self.timeouts = 0
        if releases:
            self.batch.released(threads.lane, barrier)
        order = np.argsort(barrier, kind="stable")
        grouped = barrier[order]
        starts = np.flatnonzero(np.r_[True, grouped[1:] != grouped[:-1]])
        each, total = grouped[starts], np.add.reduceat(count[order], starts)
        if (total <= self.pending[each]).all():
            before = np.cumsum(count[order]) - count[order]
            before -= np.repeat(before[starts], np.diff(np.r_[starts, len(grouped)]))
            states = np.empty(len(barrier), np.uint64)
            states[order] = self.tokens(grouped) - (before.astype(np.uint64) << np.uint64(32))
            self.pending[each] -= total
            if drops:
                self.count[each] -= total
            self._refuse_completion(each, barrier, completes)
            self.settle(each)
            return states
        states = np.empty(len(barrier), np.uint64)
        for position, (at, times) in enumerate(zip(barrier.tolist(), count.tolist())):
            if times > self.pending[at]:
                where = np.arange(len(barrier)) == position
                raise Fault(f"arrives at {self.lacks(at)}: {times} arrivals are more than are pending", where)
            states[position] = self.tokens(np.array([at]))[0]
            self.pending[at] -= times
            if drops:
                self.count[at] -= times
            self._refuse_completion(np.array([at]), barrier, completes)
            self.settle(np.array([at]))
        return states

    def _refuse_completion(self, touched: np.ndarray, barrier: np.ndarray, completes: bool) -> None:
        if not completes and (self.pending[touched] == 0).any():
            at = touched[self.pending[touched] == 0][0]
            raise Fault(f"completes a phase of {self.name(int(at))} by an arrival with .noComplete", barrier == at)

    def settle(self, touched: np.ndarray) -> None:
        """Complete the phases of these barriers where nothing is missing, and wake the threads that wait for them."""
        completed = []
        for barrier in touched.tolist():
            if self.waiters[barrier]:
                self.land(barrier)
            if self.pending[barrier] == 0 and self.tx[barrier] == 0:
                self.phase[barrier] += 1
                self.pending[barrier] = self.count[barrier]
                self.batch.completed(barrier)
                completed.append(barrier)
        if completed:
            self.timeouts = 0
            if self.waits:
                self.wake()

    def land(self, barrier: int) -> None:
        """Perform the pending copies of a barrier if its current phase lacks nothing else."""
        arrivals = self.arrivals.get(barrier)
        if arrivals and self.pending[barrier] <= sum(len(each.lanes) for each in arrivals):
            while arrivals and self.pending[barrier]:
                each = arrivals.popleft()
                now, rest = each.lanes[: self.pending[barrier]], each.lanes[self.pending[barrier] :]
                if len(rest):
                    arrivals.appendleft(each._replace(lanes=rest))
                self.batch.copies.land_before(now, each.serial, barrier)
                self.pending[barrier] -= len(now)
        transfers = self.transfers.get(barrier)
        while transfers and self.pending[barrier] == 0 and self.tx[barrier] > 0:
            transfer = transfers.popleft()
            transfer.land(barrier)
            self.tx[barrier] -= transfer.bytes

    # -- waiting ------------------------------------------------------------------------------------------------

    def wait(self, threads, barrier: np.ndarray, until: np.ndarray, acquires: bool) -> None:
        """Write to each thread whether its barrier has reached the phase `until`; the others sleep until it has."""
        missing = self.phase[barrier] < until
        if missing.any():
            awaited = np.unique(barrier[missing])
            self.waiters[awaited] += 1
            self.settle(awaited)
            self.waiters[awaited] -= 1
            missing = self.phase[barrier] < until
        threads.write(~missing, threads.lane)
        if acquires and not missing.all():
            self.batch.acquired(threads.lane[~missing], barrier[~missing])
        if not missing.any():
            return
        for each in np.unique(barrier[missing]).tolist():
            self.batch.park(threads.lane[missing & (barrier == each)], self.name(each))
        np.add.at(self.waiters, barrier[missing], 1)
        self.waits.append(_Wait(threads, threads.lane[missing], barrier[missing], until[missing], acquires))

    def wake(self) -> None:
        """Wake the sleeping threads whose phase is complete."""
        left = []
        for wait in self.waits:
            done = self.phase[wait.barrier] >= wait.until
            if not done.any():
                left.append(wait)
                continue
            self._release(wait, done, True)
            if not done.all():
                rest = ~done
                left.append(wait._replace(lanes=wait.lanes[rest], barrier=wait.barrier[rest], until=wait.until[rest]))
        self.waits = left

    def _release(self, wait: _Wait, chosen: np.ndarray, answer: bool) -> None:
        lanes, barrier = wait.lanes[chosen], wait.barrier[chosen]
        np.subtract.at(self.waiters, barrier, 1)
        wait.threads.write(np.full(len(lanes), answer), lanes)
        if answer and wait.acquires:
            self.batch.acquired(lanes, barrier)
        self.batch.wake(lanes)

    def time_out(self) -> bool:
        """Called when no thread can run: sleeping threads continue with the result false. After `_TIMEOUTS` timeouts
        without a change on any barrier they stay asleep; the scheduler then reports a deadlock."""
        if not self.waits:
            return False
        self.timeouts += 1
        if self.timeouts > _TIMEOUTS:
            for wait in self.waits:
                for each in np.unique(wait.barrier).tolist():
                    self.batch.explain(wait.lanes[wait.barrier == each], self.lacks(each))
            return False
        waits, self.waits = self.waits, []
        for wait in waits:
            self._release(wait, np.ones(len(wait.lanes), bool), False)
        return True


def barriers(batch) -> Barriers:
    """The mbarrier objects of a batch; made on first use."""
    if "mbarriers" not in batch.state:
        batch.state["mbarriers"] = Barriers(batch)
    return batch.state["mbarriers"]


# ---------------------------------------------------------------------------------------------------------------
# Instructions


def _words(modifiers: tuple[str, ...], *allowed: str) -> tuple[str, set[str]]:
    """(state space, other modifiers) of mbarrier.*.b64; raises Unsupported for words that are not known."""
    if modifiers[-1:] != ("b64",):
        raise Unsupported("expected .b64")
    space, found = "generic", set()
    for word in modifiers[:-1]:
        if word in _SPACES:
            space = _SPACES[word]
        elif word in allowed:
            found.add(word)
        else:
            raise Unsupported(f"the modifier .{word} is not known")
    return space, found


def _numbers(value, count: int) -> np.ndarray:
    return np.broadcast_to(np.asarray(value), count).astype(np.int64)


@define("mbarrier.init")
def init(modifiers: tuple[str, ...]) -> Semantics:
    """mbarrier.init{.shared{::cta}}.b64 [addr], count: a barrier for `count` arrivals per phase, in phase 0."""
    space, _ = _words(modifiers)

    def run(memory, address, count):
        here = barriers(memory.batch)
        barrier = here.find(memory, space, address, "writes", fresh=True)
        count = _numbers(count, memory.count)
        if ((count < 1) | (count > MOST)).any():
            raise Fault(f"initializes an mbarrier with a count outside of 1 to {MOST}", (count < 1) | (count > MOST))
        here.valid[barrier] = True
        here.count[barrier] = here.pending[barrier] = count
        here.tx[barrier] = here.phase[barrier] = 0
        memory.batch.renewed(barrier)
        memory.batch.guarded = True
        if memory.batch.shared.states is not None:
            memory.batch.shared.mark(barrier, _WORD, OPAQUE)

    return Memory("", f"[{space}], u32", run)


@define("mbarrier.inval")
def inval(modifiers: tuple[str, ...]) -> Semantics:
    """mbarrier.inval{.shared{::cta}}.b64 [addr]: end the barrier; its bytes are uninitialized afterwards."""
    space, _ = _words(modifiers)

    def run(memory, address):
        here = barriers(memory.batch)
        barrier = here.find(memory, space, address, "writes")
        if here.waiters[barrier].any():
            raise Fault("invalidates an mbarrier for which threads wait", here.waiters[barrier] > 0)
        here.valid[barrier] = False
        if memory.batch.shared.states is not None:
            memory.batch.shared.mark(barrier, _WORD, NEVER)

    return Memory("", f"[{space}]", run)


def _count_bytes(sign: int) -> Callable[[tuple[str, ...]], Semantics]:
    def resolver(modifiers: tuple[str, ...]) -> Semantics:
        """mbarrier.{expect_tx|complete_tx}{.relaxed.scope}{.space}.b64 [addr], bytes: add bytes to the tx-count, or
        subtract them."""
        space, _ = _words(modifiers, "relaxed", *_SCOPES)

        def run(threads, address, bytes):
            here = barriers(threads.batch)
            barrier = here.find(threads.executing, space, address)
            here.expect(barrier, sign * _numbers(bytes, len(barrier)))
            here.settle(np.unique(barrier))

        return Blocking("", f"[{space}], u32", run)

    return resolver


define("mbarrier.expect_tx")(_count_bytes(1))
define("mbarrier.complete_tx")(_count_bytes(-1))


def _arrive(name: str, drops: bool) -> None:
    @define(name)
    def resolver(modifiers: tuple[str, ...]) -> Semantics:
        """mbarrier.arrive{_drop}{.release|.relaxed}{.scope}{.space}.b64 state, [addr]{, count}: arrive; returns the
        state before.

        .expect_tx: the operands are [addr], bytes; first adds bytes to the tx-count. .noComplete: a fault if the
        arrival completes the phase. arrive_drop: later phases expect `count` fewer arrivals.
        """
        space, words = _words(modifiers, "release", "relaxed", "expect_tx", "noComplete", *_SCOPES)
        if {"expect_tx", "noComplete"} <= words or {"release", "relaxed"} <= words:
            raise Unsupported("modifiers that exclude each other")
        expects, completes, releases = "expect_tx" in words, "noComplete" not in words, "relaxed" not in words

        def run(threads, address, number=None):
            here = barriers(threads.batch)
            barrier = here.find(threads.executing, space, address)
            n = len(barrier)
            if expects:
                here.expect(barrier, _numbers(number, n))
            count = np.ones(n, np.int64) if expects or number is None else _numbers(number, n)
            threads.write(
                here.arrive(threads, barrier, count, completes=completes, drops=drops, releases=releases), threads.lane
            )

        return Blocking("b64", f"[{space}], u32" + ("" if expects or not completes else "?"), run)


_arrive("mbarrier.arrive", drops=False)
_arrive("mbarrier.arrive_drop", drops=True)


def _waiting(name: str) -> None:
    @define(name)
    def resolver(modifiers: tuple[str, ...]) -> Semantics:
        """mbarrier.{test_wait|try_wait}{.parity}{.acquire|.relaxed}{.scope}{.space}.b64 done, [addr], phase{, hint}.

        Whether a phase is complete. Without .parity: the phase of a state operand, which must be the current phase or
        the one before it. With .parity: the latest phase of that parity, up to the current one.
        """
        space, words = _words(modifiers, "parity", "acquire", "relaxed", *_SCOPES)
        acquires = "relaxed" not in words

        def by_state(threads, address, state, hint=None):
            here = barriers(threads.batch)
            barrier = here.find(threads.executing, space, address)
            asked = np.broadcast_to(state, len(barrier)).astype(np.uint64) & np.uint64(0xFFFFFFFF)
            behind = (here.phase[barrier] - asked.astype(np.int64)) & 0xFFFFFFFF
            if (behind > 1).any():
                raise Fault(
                    "waits with a state that is neither of the current phase nor of the one before it", behind > 1
                )
            here.wait(threads, barrier, here.phase[barrier] - behind + 1, acquires)

        def by_parity(threads, address, parity, hint=None):
            here = barriers(threads.batch)
            barrier = here.find(threads.executing, space, address)
            parity = _numbers(parity, len(barrier))
            if ((parity < 0) | (parity > 1)).any():
                raise Fault("waits for a phase parity that is neither 0 nor 1", (parity < 0) | (parity > 1))
            phase = here.phase[barrier]
            here.wait(threads, barrier, phase + ((phase & 1) == parity), acquires)

        hint = ", u32?" if name.endswith("try_wait") else ""
        if "parity" in words:
            return Blocking("pred", f"[{space}], u32{hint}", by_parity)
        return Blocking("pred", f"[{space}], b64{hint}", by_state)


_waiting("mbarrier.test_wait")
_waiting("mbarrier.try_wait")


@define("mbarrier.pending_count")
def pending_count(modifiers: tuple[str, ...]) -> Semantics:
    """mbarrier.pending_count.b64 count, state: the pending arrivals that a state operand holds."""
    if modifiers != ("b64",):
        raise Unsupported("expected .b64")
    return Lanes("u32", "b64", lambda state: (np.asarray(state) >> np.uint64(32)).astype(np.uint32))


@define("cp.async.mbarrier.arrive")
def copies_arrive(modifiers: tuple[str, ...]) -> Semantics:
    """cp.async.mbarrier.arrive{.noinc}{.shared{::cta}}.b64 [addr]: arrive when the earlier cp.async copies of this
    thread have landed.

    Without .noinc the pending count first grows by one, so that the count of the barrier need not include the arrival.
    """
    space, words = _words(modifiers, "noinc")

    def run(threads, address):
        here = barriers(threads.batch)
        barrier = here.find(threads.executing, space, address)
        if not words:
            np.add.at(here.pending, barrier, 1)
        serial = threads.batch.copies.serial
        for each in np.unique(barrier).tolist():
            lanes = threads.lane[barrier == each]
            here.arrivals.setdefault(each, deque()).append(_Arrivals(lanes, serial))
        here.settle(np.unique(barrier))

    return Blocking("", f"[{space}]", run)
