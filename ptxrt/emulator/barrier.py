"""Barriers of a block: the sync, arrive and red forms of bar and barrier (PTX ISA 9.7.13.1).

A block has 16 barriers. Without a thread count, a barrier waits for every thread of the block that has not exited (as
on compute capability 7.0 and newer). With a thread count, it waits for that many threads; a warp of which all live
threads arrived counts as 32. `bar` is `barrier.aligned`: the threads of a warp arrive together.
"""

from __future__ import annotations

import numpy as np

from .instruction import Blocking, Fault, Semantics, Unsupported, define, distinct

_BARRIERS = 16
_WARP = 32
_EVERYBODY = 0  # the count of a barrier without a thread count
_IDLE = -1
CLUSTER = _BARRIERS  # stands for the barrier of the cluster in `names`

#: The result of a reduction for each block, from votes and arrivals of shape (blocks, lanes).
_REDUCTIONS = {
    "popc": lambda votes, arrived: (votes & arrived).sum(-1).astype(np.uint32),
    "and": lambda votes, arrived: (votes | ~arrived).all(-1),
    "or": lambda votes, arrived: (votes & arrived).any(-1),
}


def names(number: int, blocks: int) -> np.ndarray:
    """The names of a barrier by block, for the race checks: negative numbers, unlike those of mbarriers."""
    return -1 - number - (CLUSTER + 1) * np.arange(blocks)


class _Barrier:
    """One barrier number in all blocks of a batch: the threads that arrived and that wait, their votes, the count."""

    def __init__(self, number: int, batch):
        self.number = number
        self.batch = batch
        shape = (batch.blocks, batch.warps * _WARP)
        self.lanes = np.arange(batch.blocks * batch.warps * _WARP).reshape(shape)
        self.arrived = np.zeros(shape, bool)
        self.waiting = np.zeros(shape, bool)
        self.votes = np.zeros(shape, bool)
        self.count = np.full(batch.blocks, _IDLE)  # expected threads, _EVERYBODY or _IDLE
        self.reduction = np.full(batch.blocks, "", "U4")
        self.names = names(number, batch.blocks)
        self.results: list = []  # (threads, block, lanes) that await the result of a reduction

    def arrive(self, threads, chosen: np.ndarray, count: np.ndarray, *, waits: bool, reduction: str, votes) -> None:
        """Let threads arrive. chosen: positions (n,) among the executing threads. count: their thread counts (n,)."""
        lanes = threads.lane[chosen]
        block, lane = np.divmod(lanes, self.lanes.shape[1])

        def refuse(wrong: np.ndarray, message: str) -> None:
            if wrong.any():
                where = np.zeros(threads.lane.shape, bool)
                where[chosen[wrong]] = True
                raise Fault(message, where)

        refuse(self.arrived[block, lane], f"arrives at barrier {self.number} again before it completes")
        idle = self.count[block] == _IDLE
        self.count[block[idle]], self.reduction[block[idle]] = count[idle], reduction
        refuse(self.count[block] != count, f"barrier {self.number} is in use with another thread count")
        refuse(self.reduction[block] != reduction, f"barrier {self.number} is in use for another operation")

        self.arrived[block, lane] = True
        self.waiting[block, lane] = waits
        if reduction:
            self.votes[block, lane] = votes
            self.results.append((threads, block, lanes))
        if not waits:
            self.batch.released(lanes, self.names[block])

    def release(self, blocks: np.ndarray) -> None:
        """Complete the barrier in those of `blocks` where enough threads arrived, and wake the waiting threads."""
        blocks = blocks[self.count[blocks] != _IDLE]
        alive = self.batch.alive.reshape(self.lanes.shape)
        arrived = self.arrived[blocks]
        arrived_or_exited = arrived | ~alive[blocks]
        done = arrived_or_exited.all(-1)
        count = self.count[blocks]
        named = count != _EVERYBODY
        if named.any():
            by_warp = (len(blocks), self.batch.warps, _WARP)
            arrivals = arrived.reshape(by_warp).sum(-1)
            complete = arrived_or_exited.reshape(by_warp).all(-1) & (arrivals > 0)
            total = np.where(complete, _WARP, arrivals).sum(-1)
            if (named & (total > count)).any():
                raise Fault(f"more threads arrive at barrier {self.number} than the count it was given")
            done = np.where(named, total == count, done)
        blocks, arrived = blocks[done], arrived[done]
        if not blocks.size:
            return

        self._deliver(blocks)
        waiting = self.waiting[blocks]
        woken = self.lanes[blocks][waiting]
        self.arrived[blocks] = self.waiting[blocks] = self.votes[blocks] = False
        self.count[blocks], self.reduction[blocks] = _IDLE, ""
        self.batch.wake(woken)
        if self.batch.observer is not None:
            self._order(blocks, arrived, waiting)

    def _order(self, blocks: np.ndarray, arrived: np.ndarray, waiting: np.ndarray) -> None:
        """Order the accesses of the threads that met, for the race checks.

        Threads that waited continue after what all threads did before they arrived. A thread that only arrived
        continues without knowing what the others did.
        """
        parted = (arrived != waiting).any(-1)
        self.batch.synchronized(self.lanes[blocks[~parted]][arrived[~parted]])
        if parted.any():
            lanes, phases = self.lanes[blocks[parted]][waiting[parted]], self.names[blocks[parted]]
            self.batch.released(lanes, self.names[self.batch.block[lanes]])
            for phase in phases.tolist():
                self.batch.completed(phase)
            self.batch.acquired(lanes, self.names[self.batch.block[lanes]])
            self.batch.renewed(phases)

    def _deliver(self, completed: np.ndarray) -> None:
        """Write the results of reductions to the threads of completed blocks."""
        kept = []
        for threads, block, lanes in self.results:
            ready = np.isin(block, completed)
            if ready.any():
                reduce = _REDUCTIONS[str(self.reduction[block[ready][0]])]
                values = reduce(self.votes, self.arrived)
                threads.write(values[block[ready]], lanes[ready])
            if not ready.all():
                kept.append((threads, block[~ready], lanes[~ready]))
        self.results = kept


def _barriers(batch) -> dict[int, _Barrier]:
    """The barriers of a batch by number; `_arrive` adds one on its first use."""
    if "barriers" not in batch.state:
        barriers = batch.state["barriers"] = {}

        def after_exit(lanes: np.ndarray) -> None:
            blocks = distinct(np.asarray(lanes) // (batch.warps * _WARP))
            for barrier in barriers.values():
                barrier.release(blocks)

        batch.on_exit(after_exit)
    return batch.state["barriers"]


def _arrive(threads, number, count=None, *, waits: bool = True, reduction: str = "", votes=None) -> None:
    n = len(threads.lane)
    numbers = np.broadcast_to(np.asarray(number).astype(np.int64), n)
    if (numbers >= _BARRIERS).any():
        raise Fault(f"a block has {_BARRIERS} barriers, there is none {numbers.max()}", numbers >= _BARRIERS)
    counts = np.broadcast_to(np.asarray(_EVERYBODY if count is None else count).astype(np.int64), n)
    if count is not None and ((counts % _WARP != 0) | (counts == 0)).any():
        raise Fault(
            "the thread count of a barrier is no positive multiple of 32", (counts % _WARP != 0) | (counts == 0)
        )
    votes = None if votes is None else np.broadcast_to(votes, n)
    if waits:
        threads.park(f"barrier {numbers[0]}")
    barriers = _barriers(threads.batch)
    for each in distinct(numbers).tolist():
        chosen = np.flatnonzero(numbers == each)
        if each not in barriers:
            barriers[each] = _Barrier(each, threads.batch)
        barriers[each].arrive(
            threads,
            chosen,
            counts[chosen],
            waits=waits,
            reduction=reduction,
            votes=None if votes is None else votes[chosen],
        )
        barriers[each].release(distinct(threads.block[chosen]))


@define("bar")
def bar(modifiers: tuple[str, ...]) -> Semantics:
    """bar{.cta}.{sync|arrive|red}: as `barrier` with .aligned."""
    return _barrier_semantics("bar", modifiers, aligned=True)


@define("barrier")
def barrier(modifiers: tuple[str, ...]) -> Semantics:
    """barrier{.cta}.sync{.aligned} a{, b}: wait at barrier a, for b threads or for all.

    barrier{.cta}.arrive{.aligned} a, b: arrive without waiting.
    barrier{.cta}.red.popc{.aligned}.u32 d, a{, b}, p: wait, then d is the number of threads with p.
    barrier{.cta}.red.{and|or}{.aligned}.pred q, a{, b}, p: wait, then q is whether all, or any, of the threads have p.
    """
    words = tuple(word for word in modifiers if word != "aligned")
    return _barrier_semantics("barrier", words, aligned=len(words) < len(modifiers))


def _barrier_semantics(name: str, modifiers: tuple[str, ...], aligned: bool) -> Semantics:
    words = modifiers[1:] if modifiers[:1] == ("cta",) else modifiers
    if words == ("sync",):
        return Blocking("", "u32, u32?", _arrive, aligned=aligned)
    if words == ("arrive",):
        return Blocking("", "u32, u32", lambda threads, a, b: _arrive(threads, a, b, waits=False), aligned=aligned)
    if words in (("red", "popc", "u32"), ("red", "and", "pred"), ("red", "or", "pred")):

        def reduce(threads, a, b, votes):
            _arrive(threads, a, b, reduction=words[1], votes=votes)

        return Blocking(words[2], "u32, u32?, pred", reduce, aligned=aligned)
    raise Unsupported(f"expected {name}{{.cta}}.sync, .arrive, .red.popc.u32, .red.and.pred or .red.or.pred")
