"""The Backend protocol, a small seam above the driver API; and what holds for the calls of a thread or task."""

from __future__ import annotations

import re
import struct
import sys
from abc import ABC, abstractmethod
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Mapping, Protocol, Sequence

import numpy as np

from .errors import AbiError, remedy


@dataclass(frozen=True)
class Param:
    """One parameter of a compiled entry: PTX type without dot (None where only a binary is known), bytes and offset.

    `is_pointer` is what the text says (`.ptr`); `is_struct` an array of bytes, passed by value.
    """

    type: str | None
    size: int
    offset: int
    is_pointer: bool = False
    is_struct: bool = False


_PARAM_WORD = re.compile(r"([bsuf](?:8|16|32|64))(\.ptr)?(?:\[(\d+)\]@([1-9]\d*))?")


@dataclass(frozen=True)
class Facts:
    """How an entry launches, as its module says in the constant ENTRY_launch: nine int32."""

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
        """From the nine numbers, as a record of the build holds them."""
        if len(words) != cls.SIZE // 4 or not all(isinstance(word, int) for word in words):
            raise AbiError(f"{entry}_launch is {words!r} where nine numbers are expected; {remedy()}")
        threads, tile = (tuple(max(word, 1) for word in group) for group in (words[0:3], words[4:7]))
        return cls(threads, words[3], tile, max(words[7], 1), words[8])


@dataclass(frozen=True)
class Entry:
    """A compiled entry: its parameters in order, their bytes together, the backend's own handle, and what keeps it
    valid."""

    name: str
    params: tuple[Param, ...]
    param_bytes: int
    handle: Any
    owner: Any = None

    @classmethod
    def from_text(cls, function, handle: Any, owner: Any = None) -> "Entry":
        """From an entry of a parsed PTX text (`ptxrt.ptx.ir.Function`)."""
        params = tuple(Param(p.type, p.size, p.offset, p.pointer, p.count > 0) for p in function.params)
        return cls(function.name, params, function.param_bytes, handle, owner)

    @classmethod
    def from_record(cls, name: str, words: str, handle: Any, owner: Any = None) -> "Entry":
        """From the parameters as a record of the build holds them, such as "u64.ptr f32 b8[64]@8"; AbiError for other
        words."""
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
        return cls(name, tuple(params), end, handle, owner)


class Module(Protocol):
    """A loaded module. `entries` are in the order of the text, where there is one."""

    name: str
    entries: Mapping[str, Entry]

    def facts(self, entry: str) -> Facts:
        """The launch facts of one of this project's entries; AbiError where the module has none."""
        ...


class Queue:
    """A stream of one machine as the backend uses it, and, where it lasts, the mark of its own present end.

    handle: the integer handle. native: what the driver takes with the least work. lasting: the stream lives as long
    as this object, so that its end can be recorded when somebody waits for it, not at every launch.
    blocks: by size the addresses of memory that the queue used last and nothing else: work in it may have them at once.
    None once nothing referred to the queue: a finalizer that runs at the same time may bring it back as a mark.
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
            # Another queue of the same stream, which lives until the end of that stream is recorded.
            end = Queue(self.backend, self.handle, self.native, self.lasting, self.owner)
            self.backend.reclaim(end, blocks)

    def __repr__(self) -> str:
        return f"stream {self.handle:#x} of {self.backend.describe()}"


class Packet(ABC):
    """One launch with everything but its arguments filled in.

    words: the parameters as a memoryview of 64-bit words, for addresses. raw: the same as bytes. `call()` launches in
    the queue of the latest `bind`; where it gives anything but (0,), `retry()` does it with care, or says why not. A
    packet belongs to one thread at a time.
    """

    __slots__ = ("words", "raw", "size", "queue", "call")

    def __init__(self, params: bytes):
        buffer = bytearray(-(-len(params) // 8) * 8 or 8)
        buffer[: len(params)] = params
        self.size = len(params)
        self.raw = memoryview(buffer)
        self.words = self.raw.cast("Q")
        self.queue: Queue | None = None
        self.call: Any = None

    @abstractmethod
    def bind(self, queue: Queue) -> None:
        """Let `call` launch in a queue."""

    def retry(self) -> None:
        """Launch again what `call` could not."""

    def launch(self, queue: Queue) -> None:
        """Launch in a queue with the parameters as they stand."""
        if self.queue is not queue:
            self.bind(queue)
        if self.call()[0]:
            self.retry()


@dataclass(frozen=True)
class MemoryInfo:
    """Bytes of a machine's memory: in use by live arrays, kept for reuse, and (on a GPU) free and in all by the
    driver's count."""

    machine: str
    used: int
    cached: int
    free: int | None = None
    total: int | None = None


class Remembered:
    """What is known of earlier calls on one device, so that the next one like them is quick.

    It goes with the device's backend.

    signatures: of arrays; calls: of functions, as what they launch (prepared.py).
    """

    __slots__ = ("signatures", "calls")
    LIMIT = 8192

    def __init__(self):
        self.signatures: dict[Any, Any] = {}
        self.calls: dict[Any, Any] = {}

    @classmethod
    def add(cls, known: dict[Any, Any], key: Any, value: Any) -> Any:
        """Put a value into one of these, the oldest out where it is full; gives what is there now, which another
        thread may have put."""
        if len(known) >= cls.LIMIT:
            with suppress(RuntimeError, StopIteration):  # another thread has just changed it
                known.pop(next(iter(known)), None)
        return known.setdefault(key, value)


class Timed(Protocol):
    """An event that knows its time."""

    def milliseconds_after(self, start: Any) -> float:
        """Since another event of the same machine; both are reached."""
        ...


class Capture(Protocol):
    """A queue whose launches are gathered."""

    def end(self, keep: bool) -> Any:
        """What was gathered, with a method `launch(queue)`.

        None unless it is to be kept, or where there is nothing but the record that graphs.py has.
        """
        ...


class Backend(Protocol):
    """What a machine can do, for one device of it. A new machine is a class with these members and its place in
    selection.py; nothing above asks which one it has. `tests/test_rules.py` holds both backends to this list.

    | part | members | what must hold |
    |---|---|---|
    | what it is | name, ordinal, describe, on_device | `on_device` gives one object for one number |
    | | is_cuda | whether addresses are CUDA's, so that other libraries' arrays come and go |
    | | multiprocessors, remembered, own_queue | constant |
    | code | module, open, packet | an entry keeps loaded what it needs (`Entry.owner`) |
    | memory | alloc, memory_info, trim, write, read, copy | `write` and `read` may wait |
    | | free, reclaim | come from finalizers: no lock, no wait, no reference kept (turns.py) |
    | order | queue, new_queue, mark, wait, gather | work in one queue is in order; `wait` orders two on the device |
    | | reached, synchronize | the only ones that wait for work |
    | time, graphs | timed_event, capture, is_capturing | |

    A stream is None (that of the enclosing `with stream:`, else the library's own), an integer handle, an object with
    `__cuda_stream__`, or the Queue of one of them. A mark is a Queue that lasts (its end when somebody waits) or an
    event. Everything but `read`, `write`, `synchronize`, `trim` and `reached(wait=True)` returns without waiting. Any
    thread may call.
    """

    name: str
    is_cuda: bool
    ordinal: int
    multiprocessors: int
    remembered: Remembered
    own_queue: Queue

    def describe(self) -> str:
        """What ran, for receipts: the device, or the emulator's text and arithmetic."""
        ...

    def on_device(self, ordinal: int) -> "Backend":
        """The same machine on another of its devices."""
        ...

    def module(self, unit: str) -> Module:
        """The compiled unit of this project; loaded once."""
        ...

    def open(self, path: Path) -> Module:
        """Any file of PTX, or, on GPUs, a fatbin or cubin."""
        ...

    def packet(self, entry: Entry, grid, block, shared_bytes: int, params: bytes) -> Packet:
        """A launch of an entry, ready to be repeated; `params` is its .param space."""
        ...

    def alloc(self, nbytes: int, queue: Queue | None = None) -> int:
        """The address of new memory, for work in a queue."""
        ...

    def free(self, memory: Any) -> None:
        """Give the memory of an `array.Memory` back after its last uses; no reference to it is kept."""
        ...

    def reclaim(self, queue: Queue, blocks: dict[int, list[int]]) -> None:
        """Take back blocks after the present end of a queue, which kept them."""
        ...

    def memory_info(self) -> MemoryInfo:
        """What is used, kept and free."""
        ...

    def trim(self) -> None:
        """Wait for the machine and give everything that is kept for reuse back to it."""
        ...

    def write(self, address: int, host: np.ndarray, stream=None) -> None:
        """Copy a contiguous array to the machine; `host` may change on return."""
        ...

    def read(self, address: int, host: np.ndarray, stream=None) -> None:
        """Fill a contiguous array from the machine, after everything before it in the stream."""
        ...

    def copy(self, address: int, source: "Backend", source_address: int, nbytes: int, queue: Queue) -> None:
        """Copy from memory of this or another device of the machine, in the order of a queue of this one."""
        ...

    def queue(self, stream=None) -> Queue:
        """The queue of a stream."""
        ...

    def new_queue(self, priority: int = 0) -> Queue:
        """A new stream, in no order with others."""
        ...

    def mark(self, stream=None) -> Any:
        """The present end of a stream."""
        ...

    def wait(self, stream, mark: Any) -> None:
        """Let a stream wait for a mark; nothing to do for None or a mark of the same stream."""
        ...

    def gather(self, marks: tuple) -> tuple:
        """Few marks that are reached when all of these are; none where all are reached already."""
        ...

    def reached(self, mark: Any, wait: bool = False) -> bool:
        """Whether a mark, or what a queue has to do now, is done; having waited for it if asked to."""
        ...

    def synchronize(self, stream=None) -> None:
        """Wait for everything in the stream."""
        ...

    def timed_event(self, queue: Queue) -> Timed:
        """An event at the end of a queue that knows its time."""
        ...

    def capture(self, queue: Queue) -> Capture:
        """Gather what is launched in a queue instead of running it."""
        ...

    def is_capturing(self, queue: Queue) -> bool:
        """Whether launches in a queue are gathered, by anyone."""
        ...


@dataclass(frozen=True)
class Scope:
    """What holds for the calls of a thread or task: the machine of `using`, the stream of `with stream:`, and whoever
    records."""

    backend: Backend | None = None
    queue: Queue | None = None
    recorder: Any = None


_scope: ContextVar[Scope] = ContextVar("ptxrt_scope", default=Scope())


def scope() -> Scope:
    """What holds for calls here."""
    return _scope.get()


def enter(**changes) -> Scope:
    """Change the scope and give the one before, for `leave`."""
    before = _scope.get()
    _scope.set(replace(before, **changes))
    return before


def leave(before: Scope, *names: str) -> None:
    """Take the named fields of the scope back to what they were before."""
    _scope.set(replace(_scope.get(), **{name: getattr(before, name) for name in names}))
