"""The Backend protocol, which separates the library from the driver API, and the scope of the calls of a thread."""

from __future__ import annotations

import re
import struct
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np

from .errors import AbiError, ArgumentError, PtxError, remedy


@dataclass(frozen=True)
class Param:
    """One parameter of a compiled entry: PTX type without dot (None where only a binary is known), bytes and offset.

    is_pointer: whether the PTX marks it as `.ptr`. is_struct: whether it is an array of bytes, passed by value.
    """

    type: str | None
    size: int
    offset: int
    is_pointer: bool = False
    is_struct: bool = False


_PARAM_WORD = re.compile(r"([bsuf](?:8|16|32|64))(\.ptr)?(?:\[(\d+)\]@([1-9]\d*))?")


@dataclass(frozen=True)
class Facts:
    """The launch facts of an entry: nine int32 in the constant ENTRY_launch of its module."""

    threads: tuple[int, int, int]
    shared_bytes: int
    tile: tuple[int, int, int]
    min_blocks: int
    spill_bytes: int

    SIZE = 36

    @classmethod
    def read(cls, entry: str, data: bytes) -> "Facts":
        """Unpack the constant; PTX leaves trailing zero bytes out."""
        if len(data) > cls.SIZE:
            raise AbiError(f"{entry}_launch has {len(data)} bytes, {cls.SIZE} are expected; {remedy()}")
        return cls.of(entry, struct.unpack("<9i", data.ljust(cls.SIZE, b"\0")))

    @classmethod
    def of(cls, entry: str, words: Sequence[int]) -> "Facts":
        """Make facts from the nine numbers in a record of the build."""
        if len(words) != cls.SIZE // 4 or not all(isinstance(word, int) for word in words):
            raise AbiError(f"{entry}_launch is {words!r} where nine numbers are expected; {remedy()}")
        threads, tile = (tuple(max(word, 1) for word in group) for group in (words[0:3], words[4:7]))
        return cls(threads, words[3], tile, max(words[7], 1), words[8])


@dataclass(frozen=True)
class Entry:
    """A compiled entry: its parameters in order, their bytes, the backend's handle, and the owner that keeps it
    loaded. waits: whether it waits for the launches ahead before it uses memory, so that it may be launched early.
    """

    name: str
    params: tuple[Param, ...]
    param_bytes: int
    handle: Any
    owner: Any = None
    waits: bool = False

    @classmethod
    def from_text(cls, function, handle: Any, owner: Any = None) -> "Entry":
        """Make an entry from a function of a parsed PTX text (`ptxrt.ptx.ir.Function`)."""
        params = tuple(Param(p.type, p.size, p.offset, p.pointer, p.count > 0) for p in function.params)
        return cls(function.name, params, function.param_bytes, handle, owner)

    @classmethod
    def from_record(cls, name: str, words: str, handle: Any, owner: Any = None, waits: bool = False) -> "Entry":
        """Make an entry from the parameters in a record of the build, such as "u64.ptr f32 b8[64]@8".

        AbiError for other words.
        """
        params: list[Param] = []
        end = 0
        for word in words.split():
            match = _PARAM_WORD.fullmatch(word)
            if not match:
                raise AbiError(f"the record of {name} has a parameter {word!r}, which is not known; {remedy()}")
            type, pointer, count, alignment = match.groups()
            item = int(type.lstrip("bsuf")) // 8
            size, step = (item * int(count), int(alignment)) if count else (item, item)
            params.append(Param(type, size, -(-end // step) * step, bool(pointer), bool(count)))
            end = params[-1].offset + size
        return cls(name, tuple(params), end, handle, owner, waits)


class Module(Protocol):
    """A loaded module. If it has a text, `entries` are in the order of the text."""

    name: str
    entries: Mapping[str, Entry]

    def facts(self, entry: str) -> Facts:
        """Return the launch facts of one of this project's entries; AbiError if the module has none."""
        ...


class Queue:
    """A stream as the backend uses it. A lasting queue is also the mark of its own present end.

    handle: the integer handle. native: the handle in the form that costs the driver's binding least. lasting: whether
    the stream lives as long as this object; an event is then recorded at its end only when a wait needs one, not at
    every launch. blocks: by size, the addresses of freed memory whose last uses are in this queue alone, so that its
    work may reuse them at once. The finalizer sets it to None, because another finalizer that runs at the same time may
    revive the queue as a mark.
    """

    __slots__ = ("backend", "handle", "native", "lasting", "owner", "blocks", "__weakref__")

    def __init__(self, backend: "Backend", handle: int, native: Any = None, lasting: bool = True, owner: Any = None):
        self.backend = backend
        self.handle = handle
        self.native = handle if native is None else native
        self.lasting = lasting
        self.owner = owner
        self.blocks: dict[int, list[int]] | None = {}

    def __del__(self, is_finalizing=sys.is_finalizing):
        blocks, self.blocks = self.blocks, None
        if blocks and not is_finalizing():
            # A new queue of the same stream. It lives until an event is recorded at the end of the stream.
            end = Queue(self.backend, self.handle, self.native, self.lasting, self.owner)
            self.backend.reclaim(end, blocks)

    def __repr__(self) -> str:
        return f"stream {self.handle:#x} of {self.backend.describe()}"


class Packet(ABC):
    """One launch with everything but its arguments filled in.

    words: the parameters as a memoryview of 64-bit words, for addresses. raw: the same as bytes. `call()` launches in
    the queue of the latest `bind`. If it returns anything but (0,), `retry()` launches with full checks or raises the
    reason. A packet belongs to one thread at a time. follows: whether it is always launched right behind another launch
    of the same call, in the same queue; its maker sets this before the first `bind`.
    """

    __slots__ = ("words", "raw", "size", "queue", "call", "follows")

    def __init__(self, params: bytes):
        buffer = bytearray(-(-len(params) // 8) * 8 or 8)
        buffer[: len(params)] = params
        self.size = len(params)
        self.raw = memoryview(buffer)
        self.words = self.raw.cast("Q")
        self.queue: Queue | None = None
        self.call: Any = None
        self.follows = False

    @abstractmethod
    def bind(self, queue: Queue) -> None:
        """Set the queue in which `call` launches."""

    def retry(self) -> None:
        """Launch again what `call` could not."""

    def launch(self, queue: Queue) -> None:
        """Launch in a queue with the parameters as they stand."""
        if self.queue is not queue:
            self.bind(queue)
        if self.call()[0]:
            self.retry()

    def record(self, queue: Queue) -> None:
        """Launch in a queue that a graph captures."""
        self.launch(queue)


@dataclass(frozen=True)
class MemoryInfo:
    """Bytes of a machine's memory: in use by live arrays, kept for reuse, and, on a GPU, free and in total as the
    driver reports them."""

    machine: str
    used: int
    cached: int
    free: int | None = None
    total: int | None = None


class Remembered:
    """Records of earlier calls on one device, owned by the device's backend.

    signatures: those of arrays. calls: the launches of calls of functions (prepared.py). tables: constants on the
    device.
    """

    __slots__ = ("signatures", "calls", "tables")
    LIMIT = 8192

    def __init__(self):
        self.signatures: dict[Any, Any] = {}
        self.calls: dict[Any, Any] = {}
        self.tables: dict[Any, Any] = {}

    @classmethod
    def add(cls, known: dict[Any, Any], key: Any, value: Any) -> Any:
        """Add a value to a table, drop the oldest if it is full, and return the value that is there now.

        Another thread may have added its own first.
        """
        if len(known) >= cls.LIMIT:
            with suppress(RuntimeError, StopIteration):  # another thread has just changed it
                known.pop(next(iter(known)), None)
        return known.setdefault(key, value)


class Timed(Protocol):
    """An event with a time."""

    def milliseconds_after(self, start: Any) -> float:
        """Return the milliseconds since another event of the same machine; both are reached."""
        ...


class Capture(Protocol):
    """A queue whose launches are captured."""

    def end(self, keep: bool) -> Any:
        """End the capture and return the graph, which has a method `launch(queue)`.

        None if it is not kept, or if the machine captures nothing and graphs.py replays its own record.
        """
        ...


class Backend(Protocol):
    """The operations of one device of a machine. A new machine is a class with these members and an entry in
    selection.py; its callers do not depend on which machine they have. `tests/test_rules.py` checks both backends.

    | part | members | what must hold |
    |---|---|---|
    | what it is | name, ordinal, describe, on_device | `on_device` gives one object for one number |
    | | is_cuda | whether addresses are CUDA addresses, which other libraries can share |
    | | multiprocessors, remembered, own_queue | constant |
    | code | module, open, packet | an entry keeps loaded what it needs (`Entry.owner`) |
    | memory | alloc, memory_info, trim, host_memory, write, read, copy | `write` and `read` may wait |
    | | free, reclaim | finalizers call them: no lock, no wait, no reference kept (turns.py) |
    | | restore_after_faults | of memory that every launch leaves as it found it |
    | order | queue, new_queue, mark, wait, gather | work in one queue is in order; `wait` orders two on the device |
    | | reached, synchronize | `synchronize` waits, `reached` only with `wait=True` |
    | time, graphs | timed_event, capture, is_capturing | |

    A stream is None (that of the enclosing `with stream:`, else the library's own), an integer handle, an object with
    `__cuda_stream__`, or the Queue of one of them. A mark is an event, or a lasting Queue, which stands for its end at
    the time of the wait. Everything but `read`, `write`, `synchronize`, `trim` and `reached(wait=True)` returns without
    waiting. Any thread may call any member.
    """

    name: str
    is_cuda: bool
    ordinal: int
    multiprocessors: int
    remembered: Remembered
    own_queue: Queue

    def describe(self) -> str:
        """Describe the machine for receipts: the device, or the emulator's text and arithmetic."""
        ...

    def on_device(self, ordinal: int) -> "Backend":
        """Return the same machine on another of its devices."""
        ...

    def module(self, unit: str) -> Module:
        """Load a compiled unit of this project, once."""
        ...

    def open(self, path: Path) -> Module:
        """Load a file of PTX, or, on GPUs, a fatbin or cubin."""
        ...

    def packet(self, entry: Entry, grid, block, shared_bytes: int, params: bytes) -> Packet:
        """Make a repeatable launch of an entry; `params` is its .param space."""
        ...

    def alloc(self, nbytes: int, queue: Queue | None = None) -> int:
        """Allocate memory for work in a queue and return its address."""
        ...

    def free(self, memory: Any) -> None:
        """Give the memory of an `array.Memory` back after its last uses; keep no reference to it."""
        ...

    def reclaim(self, queue: Queue, blocks: dict[int, list[int]]) -> None:
        """Take back blocks that a queue kept, after the queue's present end."""
        ...

    def memory_info(self) -> MemoryInfo:
        """Return the bytes in use, kept and free."""
        ...

    def restore_after_faults(self, memory: Any) -> None:
        """Record the present contents of memory that every launch leaves unchanged, and write them again after a launch
        that faults."""
        ...

    def trim(self) -> None:
        """Wait for the machine and give everything that is kept for reuse back to it."""
        ...

    def write(self, address: int, host: np.ndarray, stream=None, is_locked: bool = False) -> None:
        """Copy a contiguous array to the machine, in the order of the stream; `host` may change on return.

        is_locked: `host` is of `host_memory`. The call does not wait, and the caller orders the host with the copy. A
        stream that is captured records it.
        """
        ...

    def read(self, address: int, host: np.ndarray, stream=None, is_locked: bool = False) -> None:
        """Fill a contiguous array from the machine, after all before it in the stream. is_locked: as in `write`."""
        ...

    def host_memory(self, nbytes: int) -> np.ndarray:
        """Allocate bytes of the host, page-locked, for `read` and `write`."""
        ...

    def copy(self, address: int, source: "Backend", source_address: int, nbytes: int, queue: Queue) -> None:
        """Copy from memory of this or another device of the machine, in the order of a queue of this one."""
        ...

    def queue(self, stream=None) -> Queue:
        """Return the queue of a stream."""
        ...

    def new_queue(self, priority: int = 0) -> Queue:
        """Make a stream that is not ordered with others."""
        ...

    def mark(self, stream=None) -> Any:
        """Return the present end of a stream."""
        ...

    def wait(self, stream, mark: Any) -> None:
        """Make a stream wait for a mark; do nothing for None or a mark of the same stream."""
        ...

    def gather(self, marks: tuple) -> tuple:
        """Return a few marks that are reached once all of these are; an empty tuple if all are reached already."""
        ...

    def reached(self, mark: Any, wait: bool = False) -> bool:
        """Return whether a mark, or a queue's present work, is done; with `wait`, wait for it."""
        ...

    def synchronize(self, stream=None) -> None:
        """Wait for everything in the stream."""
        ...

    def timed_event(self, queue: Queue) -> Timed:
        """Record an event with a time at the end of a queue."""
        ...

    def capture(self, queue: Queue) -> Capture:
        """Capture the launches in a queue instead of running them."""
        ...

    def is_capturing(self, queue: Queue) -> bool:
        """Return whether launches in a queue are captured, by this or another library."""
        ...


@dataclass(frozen=True)
class Scope:
    """The scope of a thread's or task's calls: the machine of `using`, the stream of `with stream:`, and the recorder
    of a graph or a prepared call.
    """

    backend: Backend | None = None
    queue: Queue | None = None
    recorder: Any = None


_scope: ContextVar[Scope] = ContextVar("ptxrt_scope", default=Scope())


def scope() -> Scope:
    """Return the scope of the present thread or task."""
    return _scope.get()


def refuse_recording(what: str) -> None:
    """Raise ArgumentError while `ptxrt.graph` or `ptxrt.prepare` records, because the action would not be recorded."""
    recorder = scope().recorder
    if recorder is not None:
        raise ArgumentError(f"{recorder.name} records launches on device arrays; {what}. Do it before, or after.")


def refuse_pickle(item: object, advice: str) -> NoReturn:
    """Raise ArgumentError in place of pickling, or of copying deeply, what belongs to a device."""
    raise ArgumentError(f"{item!r} belongs to a device and cannot be pickled or copied deeply; {advice}")


def enter(**changes) -> Scope:
    """Change the scope and return the one before, for `leave`."""
    before = _scope.get()
    _scope.set(replace(before, **changes))
    return before


class recorded_use:
    """A block that begins a use of memory and records it. If it fails, it waits for the queue: a use that was begun and
    not recorded would order nothing."""

    __slots__ = ("_backend", "_queue")

    def __init__(self, backend: Backend, queue: Queue):
        self._backend, self._queue = backend, queue

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, *exception: object) -> None:
        if kind is not None:
            wait_out(self._backend, self._queue)


def wait_out(backend: Backend, queue: Queue) -> None:
    """Wait for a queue after a failure, unless it is captured or has failed itself."""
    with suppress(PtxError):
        if not backend.is_capturing(queue):
            backend.synchronize(queue)


# The blocks of `with` that the thread or task is in: objects, and the scope before each.
_blocks: ContextVar[tuple[tuple[Any, Scope], ...]] = ContextVar("ptxrt_blocks", default=())


def enter_block(block: Any, before: Scope) -> None:
    """Keep the scope before a block. The same object may begin blocks in several threads, and one inside another."""
    _blocks.set((*_blocks.get(), (block, before)))


def leave_block(block: Any, *names: str) -> None:
    """Restore the named fields as they were before the innermost block of an object. A block that another thread or
    task has begun changes nothing here."""
    blocks = _blocks.get()
    for at in range(len(blocks) - 1, -1, -1):
        if blocks[at][0] is block:
            _blocks.set((*blocks[:at], *blocks[at + 1 :]))
            leave(blocks[at][1], *names)
            return


def leave(before: Scope, *names: str) -> None:
    """Restore the named fields of an earlier scope."""
    _scope.set(replace(_scope.get(), **{name: getattr(before, name) for name in names}))
