"""The Backend protocol, a small seam above the driver API; and choosing the machine that runs.

Machines: `native` (sm_120 and sm_121 code on such a GPU), `portable` (the same sources on any GPU from
sm_80 on) and `emulator` (the PTX text on the CPU). Nothing above this seam asks which one it has.
"""

from __future__ import annotations

import os
import struct
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Mapping, Protocol

import numpy as np

from .errors import AbiError, ArgumentError, MachineError

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
            raise AbiError(f"{entry}_launch has {len(data)} bytes, {cls.SIZE} are expected; run `make`")
        words = struct.unpack("<9i", data.ljust(cls.SIZE, b"\0"))
        threads, tile = (tuple(max(word, 1) for word in group) for group in (words[0:3], words[4:7]))
        return cls(threads, words[3], tile, max(words[7], 1), words[8])


@dataclass(frozen=True)
class Entry:
    """A compiled entry: its parameters in order, their bytes together, and the backend's own handle."""

    name: str
    params: tuple[Param, ...]
    param_bytes: int
    handle: Any

    @classmethod
    def from_text(cls, function, handle: Any) -> "Entry":
        """From an entry of a parsed PTX text (`ptxrt.ptx.ir.Function`)."""
        params = tuple(Param(p.type, p.size, p.offset, p.pointer, p.count > 0) for p in function.params)
        return cls(function.name, params, function.param_bytes, handle)


class Module(Protocol):
    """A loaded module. `entries` are in the order of the text, where there is one."""

    name: str
    entries: Mapping[str, Entry]

    def facts(self, entry: str) -> Facts:
        """The launch facts of one of this project's entries; AbiError where the module has none."""
        ...


class Mark(Protocol):
    """A point in a stream's order that another stream can wait for."""


class Backend(Protocol):
    """What a machine can do. Streams are None (the library's own), an integer handle or an object with `__cuda_stream__`.

    Everything but `read`, `write` and `synchronize` returns without waiting.
    """

    name: str
    is_cuda: bool

    def describe(self) -> str:
        """What ran, for receipts: the device, or the emulator's text and arithmetic."""
        ...

    def module(self, unit: str) -> Module:
        """The compiled unit of this project; loaded once."""
        ...

    def open(self, path: Path) -> Module:
        """Any file of PTX, or, on GPUs, a fatbin or cubin."""
        ...

    def alloc(self, nbytes: int) -> int:
        """The address of new memory."""
        ...

    def free(self, address: int) -> None:
        """Give memory back once the work that uses it is done."""
        ...

    def write(self, address: int, host: np.ndarray, stream=None) -> None:
        """Copy a contiguous array to the machine; `host` may change on return."""
        ...

    def read(self, address: int, host: np.ndarray, stream=None) -> None:
        """Fill a contiguous array from the machine, after everything before it in the stream."""
        ...

    def launch(self, entry: Entry, grid, block, shared_bytes: int, params: bytes, stream=None) -> None:
        """Run an entry; `params` is its .param space."""
        ...

    def synchronize(self, stream=None) -> None:
        """Wait for everything in the stream."""
        ...

    def stream_handle(self, stream=None) -> int:
        """The integer handle of a stream."""
        ...

    def mark(self, stream=None) -> Mark | None:
        """The present end of a stream."""
        ...

    def wait(self, stream, mark: Mark | None) -> None:
        """Let a stream wait for a mark; nothing to do for None or a mark of the same stream."""
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


_chosen: ContextVar[Backend | None] = ContextVar("ptxrt_machine", default=None)
_opened: dict[Any, Backend] = {}
_opening = Lock()


def current() -> Backend:
    """The backend that calls use now: of `using`, else PTXRT_MACHINE, else native, portable or emulator.

    The emulator is taken unasked only where there is no CUDA device or driver at all.
    """
    return _chosen.get() or backend_for(default_machine())


def default_machine() -> str:
    """The name of the machine that is used where `using` says nothing; MachineError where a GPU is there but unusable."""
    asked = os.environ.get("PTXRT_MACHINE")
    if asked:
        return asked
    from .driver import probe

    return _best_machine(probe())


@lru_cache(maxsize=None)
def _best_machine(found: Probe) -> str:
    if found.absent:
        return "emulator"
    there = {name: _gpu_machine(name, found) for name in ("native", "portable")}
    for name, machine in there.items():
        if machine.available:
            return name
    raise MachineError(f"{there['portable'].detail}. To run on the CPU all the same, say ptxrt.using('emulator').")


def backend_for(name: str, **options) -> Backend:
    """The backend of a machine; the same object for the same options. MachineError where it is not there."""
    if name not in MACHINES:
        raise ArgumentError(f"the machine is {name!r}; there is {', '.join(MACHINES)} (ptxrt.using or PTXRT_MACHINE)")
    key = (name, *sorted(options.items()))
    with _opening:
        if key not in _opened:
            _opened[key] = _open(name, options)
        return _opened[key]


def _open(name: str, options: dict[str, Any]) -> Backend:
    if name == "emulator":
        from .emulator.backend import EmulatorBackend

        known = signature(EmulatorBackend).parameters
        unknown = [option for option in options if option not in known]
        if unknown:
            raise ArgumentError(f"using: the emulator knows no option {', '.join(unknown)}; it has {', '.join(known)}")
        return EmulatorBackend(**options)
    if options:
        raise ArgumentError(f"using: {name} takes no options, {', '.join(options)} came")
    machine = machines()[name]
    if not machine.available:
        raise MachineError(f"the machine {name} is not available: {machine.detail}")
    from .driver import DriverBackend, probe

    device = next(d for d in probe().devices if _suits(name, d.capability))
    return DriverBackend(name, device)


class using:
    """Choose the machine: `using("emulator")` from here on, `with using("emulator"):` for a block.

    It holds for the current thread or task; elsewhere PTXRT_MACHINE and the default hold. Options of the
    emulator: arithmetic="float64" or "hardware" (the tensor cores' own sums), ptx="native" or
    "portable" (which text), checks=True, budget=None (instructions at most), bank_conflicts=False,
    races=False (find races in shared memory), profile=False (note where time goes), schedule="together".
    """

    def __init__(self, machine: str, **options):
        self._before = _chosen.get()
        self.backend = backend_for(machine, **options)
        _chosen.set(self.backend)

    def __enter__(self) -> Backend:
        return self.backend

    def __exit__(self, *exception) -> None:
        _chosen.set(self._before)

    def __repr__(self) -> str:
        return f"using({self.backend.describe()})"
