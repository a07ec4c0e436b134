"""Clusters of one thread block: barrier.cluster, mapa, getctarank (PTX ISA 9.7.13.4, 9.7.9.23, 9.7.9.24).

Launches with larger clusters are refused. In a cluster of one, .shared::cluster is the block's own shared memory, and
the rank of the block is 0.
"""

from __future__ import annotations

import numpy as np

from .barrier import CLUSTER, names
from .instruction import Blocking, Fault, Lanes, Semantics, Unsupported, define

_WARP = 32


class _ClusterBarrier:
    """The cluster barriers of a batch: for each block, the threads that arrived in this phase and those that wait."""

    def __init__(self, batch):
        self.batch = batch
        shape = (batch.blocks, batch.warps * _WARP)
        self.lanes = np.arange(batch.lanes).reshape(shape)
        self.names = names(CLUSTER, batch.blocks)
        self.arrived, self.waiting = np.zeros(shape, bool), np.zeros(shape, bool)
        self.done = np.zeros(shape, bool)  # the phase of the arrival is complete; the wait is still to come
        batch.on_exit(lambda lanes: self.release(np.unique(lanes // shape[1])))

    def at(self, lanes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.divmod(lanes, self.lanes.shape[1])

    def arrive(self, threads) -> None:
        where = self.at(threads.lane)
        again = self.arrived[where] | self.done[where]
        if again.any():
            raise Fault("arrives at the barrier of its cluster twice without a wait", again)
        self.arrived[where] = True
        self.batch.released(threads.lane, self.names[where[0]])  # with .relaxed, too: a fence may release before it
        self.release(np.unique(where[0]))

    def wait(self, threads) -> None:
        where = self.at(threads.lane)
        if not (self.arrived[where] | self.done[where]).all():
            raise Fault(
                "waits at the barrier of its cluster without arriving first", ~(self.arrived[where] | self.done[where])
            )
        stays = ~self.done[where]
        self.done[where] = False
        self.batch.acquired(threads.lane[~stays], self.names[where[0][~stays]])
        if stays.any():
            self.waiting.reshape(-1)[threads.lane[stays]] = True
            self.batch.park(threads.lane[stays], "the barrier of the cluster")

    def release(self, blocks: np.ndarray) -> None:
        """Complete the phase in those of `blocks` where every thread arrived or exited."""
        alive = self.batch.alive.reshape(self.lanes.shape)[blocks]
        arrived = self.arrived[blocks]
        blocks = blocks[(arrived | ~alive).all(axis=1) & arrived.any(axis=1)]
        if not len(blocks):
            return
        waiting = self.waiting[blocks]
        woken = self.lanes[blocks][waiting]
        self.done[blocks] = self.arrived[blocks] & ~waiting
        self.arrived[blocks] = self.waiting[blocks] = False
        self.batch.wake(woken)
        for name in self.names[blocks].tolist():
            self.batch.completed(name)
        self.batch.acquired(woken, self.names[self.batch.block[woken]])


def _barrier(batch) -> _ClusterBarrier:
    if "cluster" not in batch.state:
        batch.state["cluster"] = _ClusterBarrier(batch)
    return batch.state["cluster"]


@define("barrier.cluster")
def barrier_cluster(modifiers: tuple[str, ...]) -> Semantics:
    """barrier.cluster.arrive{.release|.relaxed}{.aligned} and barrier.cluster.wait{.acquire}{.aligned}."""
    words = tuple(word for word in modifiers if word != "aligned")
    aligned = len(words) < len(modifiers)
    if words in (("arrive",), ("arrive", "release"), ("arrive", "relaxed")):
        return Blocking("", "", lambda threads: _barrier(threads.batch).arrive(threads), aligned=aligned)
    if words in (("wait",), ("wait", "acquire")):
        return Blocking("", "", lambda threads: _barrier(threads.batch).wait(threads), aligned=aligned)
    raise Unsupported("expected .arrive{.release|.relaxed} or .wait{.acquire}")


@define("mapa")
def mapa(modifiers: tuple[str, ...]) -> Semantics:
    """mapa{.shared::cluster}.{u32|u64} d, a, rank: the address a in the block of a rank; only rank 0 is valid."""
    words = modifiers[1:] if modifiers[:1] == ("shared::cluster",) else modifiers
    if words not in (("u32",), ("u64",)):
        raise Unsupported("expected mapa{.shared::cluster}.{u32|u64}")

    def map(address, rank):
        if np.any(rank):
            raise Fault("maps an address to another block of its cluster, which has one", np.asarray(rank) != 0)
        return np.array(address)

    return Lanes(words[0], f"{words[0]}, u32", map)


@define("getctarank")
def getctarank(modifiers: tuple[str, ...]) -> Semantics:
    """getctarank{.shared::cluster}.{u32|u64} d, a: the rank of the block that owns an address; always 0."""
    words = modifiers[1:] if modifiers[:1] == ("shared::cluster",) else modifiers
    if words not in (("u32",), ("u64",)):
        raise Unsupported("expected getctarank{.shared::cluster}.{u32|u64}")
    return Lanes("u32", words[0], lambda address: np.zeros(np.shape(address), np.uint32))
