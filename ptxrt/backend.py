"""The Backend protocol, a small seam above the driver API; and choosing the machine that runs.

Machines: `native` (sm_120 and sm_121 code on such a GPU), `portable` (the same sources on any GPU from
sm_80 on) and `emulator` (the PTX text on the CPU). Nothing above this seam asks which one it has.
"""

from __future__ import annotations

import os
import re
import struct
from abc import ABC, abstractmethod
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from inspect import signature
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, Mapping, Protocol, Sequence
from weakref import WeakValueDictionary

import numpy as np

from .errors import AbiError, ArgumentError, MachineError, remedy

if TYPE_CHECKING:
    from .driver import Probe

MACHINES = ("native", "portable", "emulator")
NATIVE_CAPABILITIES = ((12, 0), (12, 1))
PORTABLE_CAPABILITY = (8, 0)


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
    """A compiled entry: its parameters in order, their bytes together, the backend's own handle, and what keeps it valid."""

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
        """From the parameters as a record of the build holds them, such as "u64.ptr f32 b8[64]@8"; AbiError for other words."""
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
    """

    __slots__ = ("backend", "handle", "native", "lasting", "owner", "__weakref__")

    def __init__(self, backend: "Backend", handle: int, native: Any = None, lasting: bool = True, owner: Any = None):
        self.backend = backend
        self.handle = handle
        self.native = handle if native is None else native
        self.lasting = lasting
        self.owner = owner

    def __repr__(self) -> str:
        return f"stream {self.handle:#x} of {self.backend.describe()}"


class Packet(ABC):
    """One launch with everything but its arguments filled in.

    words: the parameters as a memoryview of 64-bit words, for addresses. raw: the same as bytes. `call()` launches in the
    queue of the latest `bind`; where it gives anything but (0,), `retry()` does it with care, or says why not.
    A packet belongs to one thread at a time.
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
    """Bytes of a machine's memory: in use by live arrays, kept for reuse, and (on a GPU) free and in all by the driver's count."""

    machine: str
    used: int
    cached: int
    free: int | None = None
    total: int | None = None


class Remembered:
    """What is known of earlier calls on one device, so that the next one like them is quick. It goes with the device's backend.

    signatures: of arrays; plans: of launches; calls: of functions, as launches.
    """

    __slots__ = ("signatures", "plans", "calls")
    LIMIT = 8192

    def __init__(self):
        self.signatures: dict[Any, Any] = {}
        self.plans: dict[Any, Any] = {}
        self.calls: dict[Any, Any] = {}

    @classmethod
    def add(cls, known: dict[Any, Any], key: Any, value: Any) -> Any:
        """Put a value into one of these, the oldest out where it is full; gives what is there now, which another thread may have put."""
        if len(known) >= cls.LIMIT:
            with suppress(RuntimeError, StopIteration):  # another thread has just changed it
                known.pop(next(iter(known)), None)
        return known.setdefault(key, value)


class Backend(Protocol):
    """What a machine can do, for one device of it.

    A stream is None (that of the enclosing `with stream:`, else the library's own), an integer handle, an object with
    `__cuda_stream__`, or the Queue of one of them. A mark is a Queue that lasts (its end when somebody waits) or an
    event. Everything but `read`, `write` and `synchronize` returns without waiting.
    """

    name: str
    is_cuda: bool
    ordinal: int
    multiprocessors: int
    remembered: Remembered

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

    def alloc(self, nbytes: int, queue: Queue | None = None) -> int:
        """The address of new memory, for work in a queue."""
        ...

    def free(self, address: int, marks: tuple = (), shared: bool = False) -> None:
        """Give memory back, whose last uses are `marks`; `shared` with others, whose uses nobody knows. Never waits."""
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

    def packet(self, entry: Entry, grid, block, shared_bytes: int, params: bytes) -> Packet:
        """A launch of an entry, ready to be repeated; `params` is its .param space."""
        ...

    def launch(self, entry: Entry, grid, block, shared_bytes: int, params: bytes, stream=None) -> None:
        """Run an entry once."""
        ...

    def queue(self, stream=None) -> Queue:
        """The queue of a stream."""
        ...

    def new_queue(self, priority: int = 0) -> Queue:
        """A new stream, in no order with others."""
        ...

    def synchronize(self, stream=None) -> None:
        """Wait for everything in the stream."""
        ...

    def is_idle(self, queue: Queue) -> bool:
        """Whether everything in the queue is done."""
        ...

    def mark(self, stream=None) -> Any:
        """The present end of a stream."""
        ...

    def wait(self, stream, mark: Any) -> None:
        """Let a stream wait for a mark; nothing to do for None or a mark of the same stream."""
        ...

    def gather(self, marks: tuple) -> tuple:
        """Few marks that are reached when all of these are; none where all are reached already. Never waits."""
        ...

    def timed_event(self, queue: Queue) -> Any:
        """An event at the end of a queue that knows its time."""
        ...

    def event_done(self, event: Any, wait: bool) -> bool:
        """Whether an event is reached, having waited for it if asked to."""
        ...

    def milliseconds(self, start: Any, stop: Any) -> float:
        """Between two events that are reached."""
        ...

    def begin_capture(self, queue: Queue) -> None:
        """Gather what is launched in a queue instead of running it."""
        ...

    def end_capture(self, queue: Queue, keep: bool) -> Any:
        """What was gathered, ready for `replay`; nothing unless it is to be kept."""
        ...

    def replay(self, captured: Any, queue: Queue) -> None:
        """Run what was gathered."""
        ...

    def is_capturing(self, queue: Queue) -> bool:
        """Whether launches in a queue are gathered, by anyone."""
        ...


@dataclass(frozen=True)
class Machine:
    """Whether a machine is there. detail: what it is, or why it is not."""

    name: str
    available: bool
    detail: str
    device: str | None = None
    compute_capability: tuple[int, int] | None = None

    def __str__(self) -> str:
        return f"{self.name}: {'' if self.available else 'not available: '}{self.detail}"


def machines() -> dict[str, Machine]:
    """Every machine by name: what is there and, for what is not, why."""
    from .driver import probe

    found = probe()
    emulator = Machine("emulator", True, "executes the PTX text on the CPU")
    return {"native": _gpu_machine("native", found), "portable": _gpu_machine("portable", found), "emulator": emulator}


def _gpu_machine(name: str, found: Probe) -> Machine:
    if found.problem:
        return Machine(name, False, found.problem)
    for device in found.devices:
        if _suits(name, device.capability):
            detail = f"{device.name}, {device.target}, driver for CUDA {found.version}"
            return Machine(name, True, detail, device.name, device.capability)
    needs = "sm_120 or sm_121" if name == "native" else "sm_80 or newer"
    there = ", ".join(f"{device.name} ({device.target})" for device in found.devices)
    return Machine(name, False, f"needs {needs}; there is {there}")


def _suits(name: str, capability: tuple[int, int]) -> bool:
    return capability in NATIVE_CAPABILITIES if name == "native" else capability >= PORTABLE_CAPABILITY


@dataclass(frozen=True)
class Scope:
    """What holds for the calls of a thread or task: the machine of `using`, the stream of `with stream:`, and whoever records."""

    backend: Backend | None = None
    queue: Queue | None = None
    recorder: Any = None


_scope: ContextVar[Scope] = ContextVar("ptxrt_scope", default=Scope())
# Backends by machine, device and options, while something refers to them; and those that live on by themselves: of
# GPUs all, of emulators, each of which has its own memory and modules, those asked for last.
_opened: WeakValueDictionary[Any, Backend] = WeakValueDictionary()
_kept: dict[Backend, None] = {}
EMULATORS = 8
_opening = RLock()


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


def current() -> Backend:
    """The backend that calls use now: of `using`, else PTXRT_MACHINE, else native, portable or emulator.

    The emulator is taken unasked only where there is no CUDA device or driver at all.
    """
    return _scope.get().backend or backend_for(default_machine())


def place(device: int | None = None) -> Backend:
    """The current machine, on the device of that number where one is named."""
    backend = current()
    return backend if device is None else backend.on_device(device)


def default_machine() -> str:
    """The name of the machine that is used where `using` says nothing; MachineError where a GPU is there but unusable."""
    asked = os.environ.get("PTXRT_MACHINE")
    if asked:
        return asked
    from .driver import probe

    return _best_machine(probe())


def default_problem() -> str | None:
    """What is wrong with the machine that PTXRT_MACHINE names; None where it is there, or nothing is named."""
    asked = os.environ.get("PTXRT_MACHINE")
    if not asked or asked == "emulator":
        return None
    if asked not in MACHINES:
        return f"PTXRT_MACHINE is {asked!r}; set it to {', '.join(MACHINES[:-1])} or {MACHINES[-1]}, or unset it"
    machine = machines()[asked]
    if machine.available:
        return None
    return f"PTXRT_MACHINE asks for {asked}, which is not available ({machine.detail}); unset it, or name another machine"


@lru_cache(maxsize=None)
def _best_machine(found: Probe) -> str:
    if found.absent:
        return "emulator"
    there = {name: _gpu_machine(name, found) for name in ("native", "portable")}
    for name, machine in there.items():
        if machine.available:
            return name
    raise MachineError(f"{there['portable'].detail}. To run on the CPU all the same, say ptxrt.using('emulator').")


def backend_for(name: str, device: int | None = None, **options) -> Backend:
    """The backend of a machine; the same object for the same options. MachineError where it is not there."""
    if name not in MACHINES:
        raise ArgumentError(f"the machine is {name!r}; there is {', '.join(MACHINES)} (ptxrt.using or PTXRT_MACHINE)")
    if device is not None and (isinstance(device, bool) or not isinstance(device, (int, np.integer)) or device < 0):
        raise ArgumentError(f"device is {device!r}; pass the number of a device, from 0 on")
    if name == "emulator":
        options = _emulator_options(options)
    elif options:
        raise ArgumentError(f"using: {name} takes no options but device, {', '.join(options)} came")
    said = sorted((option, repr(value)) for option, value in options.items())
    key = (name, None if device is None else int(device), *said)
    with _opening:
        backend = _opened.get(key)
        if backend is None:
            ordinal = _ordinal(name, device)
            whole = (name, ordinal, *said)
            backend = _opened.get(whole) or _open(name, ordinal, options)
            _opened[key] = _opened[whole] = backend
        _keep(backend)
        return backend


def _keep(backend: Backend) -> None:
    """Let a backend live on, and the emulators that were asked for longest ago go with what refers to them."""
    _kept.pop(backend, None)
    _kept[backend] = None
    emulators = [kept for kept in _kept if not kept.is_cuda]
    for old in emulators[:-EMULATORS]:
        del _kept[old]


def _after_fork() -> None:
    """A thread that was opening a machine does not exist in a forked process."""
    global _opening
    _opening = RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _emulator_options(options: dict[str, Any]) -> dict[str, Any]:
    """All options of the emulator, with their defaults where nothing else is said."""
    from .emulator.backend import EmulatorBackend

    known = {name: p.default for name, p in signature(EmulatorBackend).parameters.items() if name != "ordinal"}
    unknown = [option for option in options if option not in known]
    if unknown:
        raise ArgumentError(f"using: the emulator knows no option {', '.join(unknown)}; it has {', '.join(known)}")
    return {**known, **options}


def _ordinal(name: str, device: int | None) -> int:
    """The number of the device to use: the one asked for, else the first that the machine runs on."""
    if name == "emulator":
        return int(device or 0)
    from .driver import probe

    machine = machines()[name]
    if not machine.available:
        raise MachineError(f"the machine {name} is not available: {machine.detail}")
    there = probe().devices
    if device is None:
        return next(d.ordinal for d in there if _suits(name, d.capability))
    if device >= len(there):
        raise MachineError(f"there is no device {device}; this computer has {len(there)}, numbered from 0")
    if not _suits(name, there[device].capability):
        needs = "sm_120 or sm_121" if name == "native" else "sm_80 or newer"
        raise MachineError(f"{name} needs {needs}; device {device} is {there[device].name} ({there[device].target})")
    return int(device)


def _open(name: str, ordinal: int, options: dict[str, Any]) -> Backend:
    if name == "emulator":
        from .emulator.backend import EmulatorBackend

        return EmulatorBackend(ordinal=ordinal, **options)
    from .driver import DriverBackend, probe

    return DriverBackend(name, probe().devices[ordinal])


class using:
    """Choose the machine: `using("emulator")` from here on, `with using("emulator"):` for a block.

    device: the number of the device, as CUDA counts them; where left out, the first that the machine runs on. The
    choice holds for the current thread or task; elsewhere PTXRT_MACHINE and the default hold. Options of the
    emulator: arithmetic="float64" or "hardware" (the tensor cores' own sums), ptx="native" or
    "portable" (which text), checks=True, budget=None (instructions at most), bank_conflicts=False,
    races=False, profile=False, schedule="together" or "warps"; docs/emulator.md says what each does.
    """

    def __init__(self, machine: str, *, device: int | None = None, **options):
        self.backend = backend_for(machine, device, **options)
        self._before = enter(backend=self.backend)

    def __enter__(self) -> Backend:
        return self.backend

    def __exit__(self, *exception) -> None:
        leave(self._before, "backend")

    def __repr__(self) -> str:
        return f"using({self.backend.describe()})"
