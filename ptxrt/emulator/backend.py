"""The `Backend` of the emulator: the interface through which the package runs kernels, here on `Emulator`.

It loads compiled units as PTX text. Every call is complete on return, so streams, events and graphs have nothing to
do. Calls from several threads take turns.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from .. import units
from ..backend import Entry, Facts, MemoryInfo, Packet, Queue, Remembered, scope
from ..errors import AbiError, ArgumentError, EmulatorFault, FileError, OutOfMemory
from ..files import module_kind, read_bytes
from ..turns import Turn
from . import Emulator, LoadedModule

TEXTS = ("native", "portable")
ARITHMETICS = ("float64", "hardware")
SCHEDULES = ("together", "warps")
_TEXTS_KEPT = 64


class EmulatorModule:
    """A loaded text: its entries and their launch facts."""

    def __init__(self, name: str, module, digest: str, owner: "_File | None" = None):
        self.name = name
        self.digest = digest
        self.entries = {
            name: Entry.from_text(function, function, owner)
            for name, function in module.entries.items()
            if name not in module.refused
        }
        self.refused = module.refused
        self._module = module

    def facts(self, entry: str) -> Facts:
        """The launch facts of an entry; AbiError where the text has none."""
        name = f"{entry}_launch"
        if name not in self._module.variables:
            raise AbiError(f"{self.name} has no constant {name}; declare the entry with KERNEL() and run `make`")
        return Facts.read(entry, self._module.constant(name))


class _File:
    """A text of `ptxrt.load`. Its entries refer to it; when the last of them is gone, the emulator unloads it."""

    __slots__ = ("turn", "module")

    def __init__(self, turn: Turn, module: LoadedModule):
        self.turn, self.module = turn, module

    def __del__(self, is_finalizing=sys.is_finalizing):
        if not is_finalizing():
            self.turn.leave(self.module)


class EmulatorPacket(Packet):
    """A launch on the emulator."""

    __slots__ = ("_backend", "_entry", "_sizes")

    def __init__(self, backend: "EmulatorBackend", entry: Entry, grid, block, shared_bytes: int, params: bytes):
        super().__init__(params)
        self._backend, self._entry, self._sizes = backend, entry, (grid, block, shared_bytes)

    def bind(self, queue: Queue) -> None:
        """Set the queue; all queues of the emulator behave alike."""
        self.call, self.queue = self._execute, queue

    def _execute(self) -> tuple[int]:
        self._backend.execute(self._entry, *self._sizes, self.raw[: self.size].tobytes())
        return (0,)


class EmulatorBackend:
    """An emulator with the given options; calls from several threads take turns.

    ptx: which text of the units runs, "native" or "portable". on_device: returns the emulator of the same kind with a
    device number; each has its own memory. ordinal: the number of this one. The other options are those of `Emulator`:

    arithmetic: rounding of tensor-core sums, "float64" or "hardware". checks: track which bytes were written. budget:
    the most instructions that a batch of blocks may issue. timeout: the most seconds that a launch may take.
    bank_conflicts: count them per PTX line. races: find unordered accesses of two threads to shared memory and of two
    blocks to global memory (slow); "strict": stores of equal bytes count, too. strict: checks, races, and every launch
    once in each schedule. profile: measure where time goes. schedule: "together" runs all warps side by side; "warps"
    runs one warp at a time as far as it can go, which exposes a missing barrier.

    `emulator` is the Emulator, with its counts.
    """

    name = "emulator"
    is_cuda = False
    multiprocessors = 1

    def __init__(
        self,
        *,
        ptx: str = "native",
        arithmetic: str = "float64",
        checks: bool = True,
        budget: int | None = None,
        timeout: float | None = None,
        bank_conflicts: bool = False,
        races: bool | str = False,
        strict: bool = False,
        profile: bool = False,
        schedule: str = "together",
        ordinal: int = 0,
        on_device: Callable[[int], "EmulatorBackend"] | None = None,
    ):
        for name, value, known in (
            ("ptx", ptx, TEXTS),
            ("arithmetic", arithmetic, ARITHMETICS),
            ("schedule", schedule, SCHEDULES),
        ):
            if value not in known:
                raise ArgumentError(f"using: {name} is {value!r}; there is {', '.join(known)}")
        self.ordinal = ordinal
        self._on_device = on_device
        for name, value in (
            ("checks", checks),
            ("bank_conflicts", bank_conflicts),
            ("strict", strict),
            ("profile", profile),
        ):
            if not isinstance(value, bool):
                raise ArgumentError(f"using: {name} is {value!r}; pass True or False")
        if not isinstance(races, bool) and races != "strict":
            raise ArgumentError(f'using: races is {races!r}; pass True, False or "strict"')
        if strict and not checks:
            raise ArgumentError("using: strict=True checks what was written; leave checks out")
        if budget is not None and (not isinstance(budget, int) or isinstance(budget, bool) or budget < 1):
            raise ArgumentError(
                f"using: budget is {budget!r}; pass a whole number of instructions of at least 1, or None"
            )
        is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
        if timeout is not None and not (is_number and 0 < timeout < float("inf")):
            raise ArgumentError(f"using: timeout is {timeout!r}; pass a number of seconds above 0, or None")
        self.ptx = ptx
        self.arithmetic = arithmetic
        chosen = dict(
            checks=checks, budget=budget, timeout=timeout, bank_conflicts=bank_conflicts, races=races, strict=strict,
            profile=profile, schedule=schedule,
        )  # fmt: skip
        usual = dict(checks=True, schedule="together")
        self._chosen = [
            f"{name}={value}" for name, value in chosen.items() if value not in (usual.get(name, False), None)
        ]
        self.emulator = Emulator(
            arithmetic, checks, budget,
            timeout=timeout, bank_conflicts=bank_conflicts, races=races, profile=profile, schedule=schedule,
            strict=strict,
        )  # fmt: skip
        self._constant: WeakKeyDictionary[Any, np.ndarray] = WeakKeyDictionary()
        self._modules: dict[str, EmulatorModule] = {}
        self._sizes: dict[int, int] = {}
        self._texts: dict[tuple[str, str], EmulatorModule] = {}
        self.remembered = Remembered()
        self._turn = Turn(self._give_back, survives_fork=True)
        self.own_queue = self.new_queue()

    def describe(self) -> str:
        """A text with machine, device number (unless 0), kind of PTX, arithmetic, and options that are no defaults."""
        number = f" (device {self.ordinal})" if self.ordinal else ""
        return ", ".join((f"emulator{number}", f"{self.ptx} PTX", f"{self.arithmetic} arithmetic", *self._chosen))

    def on_device(self, ordinal: int) -> "EmulatorBackend":
        """The emulator of the same kind with a device number; it has its own memory."""
        return self if ordinal == self.ordinal else self._on_device(ordinal)

    def module(self, unit: str) -> EmulatorModule:
        """Load the text of a compiled unit; later calls return the same module."""
        with self._turn:
            if unit not in self._modules:
                portable = self.ptx == "portable"
                text = units.text(unit, portable)
                loaded = self.emulator.load_text(text, name=units.text_path(unit, portable).name)
                self._modules[unit] = EmulatorModule(unit, loaded, hashlib.sha256(text.encode()).hexdigest())
            return self._modules[unit]

    def open(self, path: Path) -> EmulatorModule:
        """Load any PTX file; raises FileError for binaries, which only a GPU runs.

        The emulator unloads it, with its counts, when nothing refers to the result or its entries.
        """
        data = read_bytes(path)
        kind = module_kind(path, data)
        if kind != "ptx":
            raise FileError(
                f"{path} is a {kind}; the emulator runs PTX text: compile with nvcc -ptx, or choose a GPU machine"
            )
        return self.open_text(data.decode("utf-8", "replace"), path.name, hashlib.sha256(data).hexdigest())

    def kept_text(self, text: str, name: str) -> EmulatorModule:
        """Load a PTX text from memory. The latest `_TEXTS_KEPT` texts stay loaded, for compilers that load the same
        text again."""
        digest = hashlib.sha256(text.encode()).hexdigest()
        with self._turn:
            module = self._texts.pop((name, digest), None) or self.open_text(text, name, digest)
            self._texts[name, digest] = module  # the most recently used text is last
            if len(self._texts) > _TEXTS_KEPT:
                del self._texts[next(iter(self._texts))]
            return module

    def open_text(self, text: str, name: str, digest: str) -> EmulatorModule:
        """Load a PTX text from memory, as `open` does; messages use `name`."""
        with self._turn:
            loaded = self.emulator.load_text(text, name=name, whole=True)
            return EmulatorModule(name, loaded, digest, _File(self._turn, loaded))

    def alloc(self, nbytes: int, queue: Queue | None = None) -> int:
        """Allocate uninitialized memory. Addresses are never reused, so that every use after free is a fault."""
        with self._turn:
            try:
                address = self.emulator.alloc(nbytes)
            except MemoryError as error:
                raise OutOfMemory(
                    f"the emulator asked the host for {nbytes} bytes and got none; free arrays, or split the call"
                ) from error
            self._sizes[address] = nbytes
            return address

    def free(self, memory: Any) -> None:
        """Free memory, before the next call of the emulator. Finalizers call this, so it takes no lock."""
        self._turn.leave(memory.address)

    def reclaim(self, queue: Queue, blocks: dict[int, list[int]]) -> None:
        """Nothing to do: queues keep no memory."""

    def _give_back(self, left: int | LoadedModule) -> None:
        """Free what a finalizer queued: the memory of an array, or a text."""
        if isinstance(left, LoadedModule):
            self.emulator.unload(left)
        else:
            del self._sizes[left]
            self.emulator.free(left)

    def memory_info(self) -> MemoryInfo:
        """Bytes of live arrays; the limit is unknown (0)."""
        with self._turn:
            return MemoryInfo(self.describe(), sum(self._sizes.values()), 0)

    def restore_after_faults(self, memory: Any) -> None:
        """Write the present contents again after each launch that faults."""
        contents = np.empty(memory.nbytes, np.uint8)
        self.read(memory.address, contents)
        self._constant[memory] = contents

    def trim(self) -> None:
        """Nothing to do: freed memory is not kept."""

    def write(self, address: int, host: np.ndarray, stream=None, is_locked: bool = False) -> None:
        """Copy a contiguous array in."""
        with self._turn:
            self.emulator.write(address, host.reshape(-1).view(np.uint8))

    def read(self, address: int, host: np.ndarray, stream=None, is_locked: bool = False) -> None:
        """Copy into a contiguous array."""
        with self._turn:
            self.emulator.read(address, host.reshape(-1).view(np.uint8))

    def host_memory(self, nbytes: int) -> np.ndarray:
        """Allocate memory of the host; none is page-locked here."""
        return np.empty(nbytes, np.uint8)

    def copy(self, address: int, source: "EmulatorBackend", source_address: int, nbytes: int, queue: Queue) -> None:
        """Copy from this or another emulator."""
        host = np.empty(nbytes, np.uint8)
        source.read(source_address, host)
        self.write(address, host)

    def packet(self, entry: Entry, grid, block, shared_bytes: int, params: bytes) -> EmulatorPacket:
        """A prepared launch."""
        return EmulatorPacket(self, entry, grid, block, shared_bytes, params)

    def execute(self, entry: Entry, grid, block, shared_bytes: int, params: bytes) -> None:
        """Run an entry to its end."""
        with self._turn:
            try:
                self.emulator.launch(entry.handle, grid=grid, block=block, shared_bytes=shared_bytes, params=params)
            except EmulatorFault:
                for memory, contents in list(self._constant.items()):
                    self.emulator.write(memory.address, contents)
                raise
            except MemoryError as error:
                raise OutOfMemory(
                    f"the host has no memory for a launch of {entry.name} on the emulator; launch fewer blocks or "
                    "threads at once"
                ) from error

    # Streams. Every call is complete on return, so a stream imposes no order.

    def queue(self, stream=None) -> Queue:
        """The queue of a stream. None: the queue of `with stream:`, or else the emulator's own. Integer handles and
        objects with `__cuda_stream__`: the emulator's own."""
        if stream is None:
            queue = scope().queue
            return queue if queue is not None and queue.backend is self else self.own_queue
        queue = stream if isinstance(stream, Queue) else getattr(stream, "queue", None)
        if isinstance(queue, Queue):
            if queue.backend is not self:
                raise ArgumentError(
                    f"stream is a {queue!r}, but the call runs on {self.describe()}; pass a stream of that device"
                )
            return queue
        if (isinstance(stream, (int, np.integer)) and not isinstance(stream, bool) and stream >= 0) or hasattr(
            stream, "__cuda_stream__"
        ):
            return self.own_queue
        raise ArgumentError(f"stream is {stream!r}; pass None, an integer handle or an object with __cuda_stream__")

    def new_queue(self, priority: int = 0) -> Queue:
        """A new queue; it behaves like every other one."""
        return Queue(self, 0)

    def synchronize(self, stream=None) -> None:
        """Nothing to wait for: launches are complete on return."""
        self.queue(stream)

    def reached(self, mark: Any, wait: bool = False) -> bool:
        """Always True: work is complete on return."""
        return True

    def mark(self, stream=None) -> Queue:
        """The queue of the stream; work is complete already."""
        return self.queue(stream)

    def wait(self, stream, mark: Any) -> None:
        """Nothing to wait for: work is complete already."""

    def gather(self, marks: tuple) -> tuple:
        """No marks to wait for: work is complete already."""
        return ()

    def timed_event(self, queue: Queue) -> "Moment":
        """The time now."""
        return Moment(time.perf_counter())

    # Graphs. graphs.py records the launches of a graph and runs them again one by one.

    def capture(self, queue: Queue) -> "Capture":
        """Start a capture. graphs.py records the launches itself."""
        return Capture()

    def is_capturing(self, queue: Queue) -> bool:
        """Always False."""
        return False


@dataclass(frozen=True)
class Moment:
    """A point of the host's clock, in seconds."""

    seconds: float

    def milliseconds_after(self, start: "Moment") -> float:
        """Milliseconds from `start` to this moment."""
        return (self.seconds - start.seconds) * 1e3


class Capture:
    """A capture on the emulator, which has no graphs of its own."""

    def end(self, keep: bool) -> None:
        """Nothing to instantiate: graphs.py holds the record."""
