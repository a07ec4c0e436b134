"""A pool of device memory that is reused in the order of streams; nothing here waits, or knows CUDA.

A freed block keeps the marks of its last uses. Work in the same stream may have it at once, work in another once those
uses are done, or, where the device has no more memory, after a wait of that stream for them. So the usual call, in one
stream, takes and gives memory without a call of the driver; cuMemAllocAsync would need two, would become part of every
graph that is captured, and is not there on every device.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from .backend import Queue
from .errors import LaunchError, OutOfMemory
from .turns import Turn

SMALLEST = 512
# Above this, sizes are whole pages of the device (2 MiB); below, there are eight sizes to each power of two.
LARGE, PAGE = 1 << 26, 1 << 21


def rounded(nbytes: int) -> int:
    """The size of the block that holds nbytes: at most an eighth more, or 2 MiB."""
    if nbytes <= SMALLEST:
        return SMALLEST
    step = PAGE if nbytes > LARGE else max(SMALLEST, 1 << ((nbytes - 1).bit_length() - 4))
    return -(-nbytes // step) * step


class Source(Protocol):
    """What the pool needs of a device."""

    def take(self, nbytes: int) -> int:
        """New memory from the driver; OutOfMemory where there is none."""
        ...

    def give(self, address: int) -> None:
        """Memory back to the driver; waits for the device."""
        ...

    def settle(self, mark: Any) -> Any:
        """A mark that moves no more: an event at the present end of a queue, an event as it is.

        A queue that is being captured has no such mark and comes back itself.
        """
        ...

    def everything(self) -> Any:
        """An event after all work of the device up to now, or None where there is no such thing."""
        ...

    def reached(self, mark: Any) -> bool:
        """Whether a mark from `settle` is reached; never waits."""
        ...

    def wait(self, queue: Queue, mark: Any) -> None:
        """Let a queue wait for a mark."""
        ...

    def finish(self) -> None:
        """Wait for the whole device."""
        ...

    def is_capturing(self, queue: Queue) -> bool:
        """Whether a queue gathers a graph, where waits for work outside of it are not allowed."""
        ...


@dataclass
class Block:
    """Memory that nobody uses, and the marks of its last uses."""

    address: int
    size: int
    marks: tuple[Any, ...]
    shared: bool = False


class Pool:
    """The memory of one device. `free` may be called by the garbage collector in the middle of anything."""

    def __init__(self, source: Source, keep: bool = True):
        self.keep = keep
        self.used = 0
        self.cached = 0
        self._source = source
        self._sizes: dict[int, int] = {}
        self._bins: dict[int, list[Block]] = {}
        self._turn = Turn(self._take_back)

    def alloc(self, nbytes: int, queue: Queue) -> int:
        """The address of a block for work in `queue`; OutOfMemory where even giving back all that is kept does not help."""
        size = rounded(nbytes) if self.keep else nbytes
        with self._turn:
            address = self._reuse(size, queue) if self.keep else None
            if address is None:
                address = self._take(size, nbytes, queue)
            self._sizes[address] = size
            self.used += size
            return address

    def free(self, address: int, marks: tuple = (), shared: bool = False) -> None:
        """Take a block back, whose last uses are `marks`; `shared` where others used it in ways that nobody knows.

        With keep=False it goes to the driver at once, or, where a thread is in the pool, with the pool's next use.
        """
        self._turn.leave((address, marks, shared))
        if not self.keep:
            self._turn.settle()

    def trim(self) -> None:
        """Wait for the device and give it everything that is kept."""
        with self._turn:
            self._trim()

    def count(self) -> tuple[int, int]:
        """Bytes in use and bytes kept."""
        with self._turn:
            return self.used, self.cached

    def _take_back(self, freed: tuple[int, tuple, bool]) -> None:
        """Put a block that was freed into its bin."""
        address, marks, shared = freed
        size = self._sizes.pop(address)
        self.used -= size
        if not self.keep:
            with suppress(LaunchError):  # a machine that failed has said so where it failed
                self._source.give(address)
            return
        if shared:
            event = self._source.everything()
            marks, shared = (marks, True) if event is None else ((event,), False)
        self.cached += size
        self._bins.setdefault(size, []).append(Block(address, size, marks, shared))

    def _reuse(self, size: int, queue: Queue) -> int | None:
        """The newest block that `queue` may have at once, or any whose last uses are done."""
        blocks = self._bins.get(size, ())
        for i in range(len(blocks) - 1, -1, -1):
            block = blocks[i]
            if not block.shared and all(mark is queue for mark in block.marks):
                return self._pop(blocks, i)
        for i, block in enumerate(blocks):
            if self._is_done(block):
                return self._pop(blocks, i)
        return None

    def _pop(self, blocks: list[Block], i: int) -> int:
        block = blocks.pop(i)
        self.cached -= block.size
        return block.address

    def _is_done(self, block: Block) -> bool:
        if block.shared:
            return False
        block.marks = tuple(self._source.settle(mark) for mark in block.marks)
        return all(self._source.reached(mark) for mark in block.marks)

    def _take(self, size: int, nbytes: int, queue: Queue) -> int:
        """Memory from the driver; where it has none, a block after a wait on the device, then all that is kept."""
        try:
            return self._source.take(size)
        except OutOfMemory as error:
            refused = error
        blocks = self._bins.get(size, []) if self.keep and not self._source.is_capturing(queue) else []
        for i, block in enumerate(blocks):
            if not block.shared:
                for mark in block.marks:
                    self._source.wait(queue, mark)
                return self._pop(blocks, i)
        if not self.cached or self._source.is_capturing(queue):
            raise refused
        self._trim()
        return self._source.take(size)

    def _trim(self) -> None:
        self._source.finish()
        for blocks in self._bins.values():
            while blocks:
                self._source.give(self._pop(blocks, -1))
        self._bins.clear()
