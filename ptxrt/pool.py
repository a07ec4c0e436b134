"""A pool of device memory that is reused in stream order. It calls CUDA through `Source` alone.

A freed block keeps the marks of its last uses. The same stream may reuse it at once. Another stream may reuse it once
those uses are done; if the device is out of memory, that stream waits for them on the device. A call that stays in one
stream thus allocates and frees without a driver call. cuMemAllocAsync needs two driver calls, adds nodes to every
captured graph, and is not available on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
    """Return the size of the block that holds nbytes: at most an eighth more, or 2 MiB."""
    if nbytes <= SMALLEST:
        return SMALLEST
    step = PAGE if nbytes > LARGE else max(SMALLEST, 1 << ((nbytes - 1).bit_length() - 4))
    return -(-nbytes // step) * step


class Source(Protocol):
    """The interface of a device to its pool."""

    def take(self, nbytes: int) -> int:
        """Allocate memory from the driver; OutOfMemory if it has none."""
        ...

    def give(self, address: int) -> None:
        """Give memory back to the driver; this waits for the device."""
        ...

    def settle(self, mark: Any) -> Any:
        """Return a fixed mark: an event at the present end of a queue, or the event that was given.

        A queue that is being captured has no such mark and is returned itself.
        """
        ...

    def everything(self) -> Any:
        """Return an event after all present work of the device, or None if no such event can be recorded."""
        ...

    def reached(self, mark: Any) -> bool:
        """Whether a mark from `settle` is reached; never waits."""
        ...

    def wait(self, queue: Queue, mark: Any) -> None:
        """Make a queue wait for a mark."""
        ...

    def finish(self) -> None:
        """Wait for the whole device."""
        ...

    def is_capturing(self, queue: Queue) -> bool:
        """Return whether a queue captures a graph, where waits for work outside of the graph are not allowed."""
        ...


@dataclass(eq=False)
class Block:
    """Unused memory, with the marks of its last uses."""

    address: int
    size: int
    marks: tuple[Any, ...]
    shared: bool = False


def _taken_out(blocks: list[Block], i: int, suits: Callable[[Block], bool]) -> Block | None:
    """Remove block i and return it, if it suits; None if it does not, or is not there any more.

    A block is out of the list while the driver is called, which may run finalizers, which may allocate.
    """
    try:
        block = blocks[i]
        if suits(block) and blocks[i] is block:
            del blocks[i]
            return block
    except IndexError:
        pass
    return None


class Pool:
    """The memory of one device. The garbage collector may call `free` at any statement.

    A block that one queue alone has used stays in `Queue.blocks`. `free` appends it there and `alloc` pops it; both are
    atomic and need no lock. Everything else runs under a lock (turns.py). queues: a function that lists the queues of
    the device.
    """

    def __init__(self, source: Source, queues: Callable[[], Iterable[Queue]], keep: bool = True):
        self.keep = keep
        self._source = source
        self._queues = queues
        self._taken = 0  # from the driver, in bytes
        self._bins: dict[int, list[Block]] = {}
        self._turn = Turn(self._take_back)
        self._sizes: dict[int, int] = {}

    def size_of(self, nbytes: int) -> int:
        """Return the size of the block that holds nbytes here."""
        size = self._sizes.get(nbytes)
        if size is None:
            if len(self._sizes) >= 4096:
                self._sizes.clear()
            size = self._sizes[nbytes] = rounded(nbytes) if self.keep else nbytes
        return size

    def alloc(self, nbytes: int, queue: Queue) -> int:
        """Return the address of a block for work in `queue`; OutOfMemory if the memory does not suffice even without
        the blocks kept for reuse.
        """
        size = self.size_of(nbytes)
        ready = queue.blocks and queue.blocks.get(size)
        if ready:
            try:
                return ready.pop()
            except IndexError:  # another thread took the last one
                pass
        with self._turn:
            address = self._reuse(size, queue) if self.keep else None
            return self._take(size, nbytes, queue) if address is None else address

    def free(self, address: int, nbytes: int, writer: Any, readers: tuple, shared: bool) -> None:
        """Take a block back after its last uses: the writer's, and those of readers, as (queue, mark).

        shared: whether other libraries may have used it in ways that are not recorded. With keep=False the driver gets
        it at once, or at the pool's next use if a thread has the lock.
        """
        size = self.size_of(nbytes)
        if not readers and not shared and self.keep and type(writer) is Queue and writer.backend is self._source:
            blocks = writer.blocks
            if blocks is not None:
                ready = blocks.get(size)
                if ready is None:
                    ready = blocks.setdefault(size, [])
                ready.append(address)
                return
        marks = tuple(mark for _, mark in readers)
        self._turn.leave(Block(address, size, marks if writer is None else (writer, *marks), shared))
        if not self.keep:
            self._turn.settle()

    def reclaim(self, queue: Queue, blocks: dict[int, list[int]]) -> None:
        """Take back the blocks that a queue kept; they may be reused after its present end."""
        for size, addresses in blocks.items():
            for address in addresses:
                self._turn.leave(Block(address, size, (queue,)))

    def trim(self) -> None:
        """Wait for the device and return all kept blocks to the driver."""
        with self._turn:
            self._trim()

    def count(self) -> tuple[int, int]:
        """Return the bytes in use and the bytes kept."""
        with self._turn:
            cached = self._cached()
            return self._taken - cached, cached

    def _cached(self) -> int:
        kept = sum(block.size for blocks in self._bins.values() for block in blocks)
        return kept + sum(
            size * len(ready) for queue in self._queues() for size, ready in list((queue.blocks or {}).items())
        )

    def _take_back(self, block: Block) -> None:
        """Put a block that was freed into its bin."""
        if not self.keep:
            self._give(block.address, block.size)
            return
        if block.shared:
            try:
                self._settle_shared(block)
            except BaseException:
                self._turn.leave(block)
                raise
        self._bins.setdefault(block.size, []).append(block)

    def _settle_shared(self, block: Block) -> None:
        """Mark a block with an event after all present work of the device, if that event can be recorded."""
        event = self._source.everything()
        if event is not None:
            block.marks, block.shared = (event,), False

    def _give(self, address: int, size: int) -> None:
        """Give a block to the driver."""
        with suppress(LaunchError):  # a failed machine has reported its failure already
            self._source.give(address)
        self._taken -= size

    def _collect(self, size: int) -> list[Block]:
        """Move the blocks of a size from all queues into their bin and return the bin."""
        found = self._bins.setdefault(size, [])
        for queue in self._queues():
            ready = (queue.blocks or {}).get(size)
            while ready:
                try:
                    found.append(Block(ready.pop(), size, (queue,)))
                except IndexError:  # another thread took the last one
                    break
        return found

    def _reuse(self, size: int, queue: Queue) -> int | None:
        """Return the newest block that `queue` may reuse at once, else one whose last uses are done, else None."""
        blocks = self._collect(size)
        for i in range(len(blocks) - 1, -1, -1):
            block = _taken_out(blocks, i, lambda block: not block.shared and all(mark is queue for mark in block.marks))
            if block is not None:
                return block.address
        for i in range(len(blocks)):
            block = _taken_out(blocks, i, lambda block: True)
            if block is None:
                break
            done = False
            try:
                done = self._is_done(block)
            finally:
                if not done:
                    blocks.insert(i, block)
            if done:
                return block.address
        return None

    def _is_done(self, block: Block) -> bool:
        if block.shared:
            self._settle_shared(block)
            if block.shared:
                return False
        block.marks = tuple(self._source.settle(mark) for mark in block.marks)
        return all(self._source.reached(mark) for mark in block.marks)

    def _take(self, size: int, nbytes: int, queue: Queue) -> int:
        """Allocate from the driver. If it has no memory, make the queue wait for a kept block of this size; if there is
        none, return all kept blocks to the driver and try again.
        """
        try:
            return self._take_new(size)
        except OutOfMemory as error:
            refused = error
        blocks = self._collect(size) if self.keep and not self._source.is_capturing(queue) else []
        for i in range(len(blocks)):
            block = _taken_out(blocks, i, lambda block: not block.shared)
            if block is not None:
                try:
                    for mark in block.marks:
                        self._source.wait(queue, mark)
                except BaseException:
                    blocks.insert(i, block)
                    raise
                return block.address
        if not self._cached() or self._source.is_capturing(queue):
            raise refused
        self._trim()
        return self._take_new(size)

    def _take_new(self, size: int) -> int:
        address = self._source.take(size)
        self._taken += size
        return address

    def _trim(self) -> None:
        self._source.finish()
        sizes = {*self._bins, *(size for queue in self._queues() for size in list(queue.blocks or ()))}
        for size in sizes:
            blocks = self._collect(size)
            while blocks:
                self._give(blocks.pop().address, size)
        self._bins.clear()
