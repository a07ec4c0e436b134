"""The choice of the machine that runs kernels: the available ones, `using`, the environment, the default.

Machines: `native` (sm_120 and sm_121 code on such a GPU), `portable` (the same sources on any GPU from sm_80 on) and
`emulator` (the PTX text on the CPU). Callers do not depend on which one they have.
"""

from __future__ import annotations

import os
import sys
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from inspect import signature
from threading import RLock
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np

from .backend import Backend, enter, enter_block, leave_block, scope
from .errors import ArgumentError, MachineError

if TYPE_CHECKING:
    from .driver import Probe
    from .typing import MachineName

MACHINES = ("native", "portable", "emulator")
NATIVE_CAPABILITIES = ((12, 0), (12, 1))
PORTABLE_CAPABILITY = (8, 0)

# Backends by machine, device and options, as weak references. `_kept` keeps those of GPUs alive, and the latest
# EMULATORS emulators alone, because each of them has its own memory and modules.
_opened: WeakValueDictionary[Any, Backend] = WeakValueDictionary()
_kept: dict[Backend, None] = {}
EMULATORS = 8
# The default backend for each value of PTXRT_MACHINE.
_defaults: dict[str | None, Backend] = {}
_opening = RLock()


@dataclass(frozen=True)
class Machine:
    """Whether a machine is available. detail: its description, or why it is not available."""

    name: str
    available: bool
    detail: str
    device: str | None = None
    compute_capability: tuple[int, int] | None = None

    def __str__(self) -> str:
        return f"{self.name}: {'' if self.available else 'not available: '}{self.detail}"


class Machines(dict[str, Machine]):
    """Machines by name, which prints as a table."""

    def __str__(self) -> str:
        rows = [("machine", "available", "what it is, or why it is not")]
        rows += [(m.name, "yes" if m.available else "no", m.detail) for m in self.values()]
        return "\n".join(f"{name:10}{availability:11}{detail}".rstrip() for name, availability, detail in rows)

    __repr__ = __str__


def machines() -> Machines:
    """Return every machine by name: its description, or why it is not available. The result prints as a table."""
    from .driver import probe

    found = probe()
    emulator = Machine("emulator", True, "executes the PTX text on the CPU")
    return Machines(native=_gpu_machine("native", found), portable=_gpu_machine("portable", found), emulator=emulator)


def _gpu_machine(name: str, found: Probe) -> Machine:
    if found.problem:
        return Machine(name, False, found.problem)
    for device in found.devices:
        if _suits(name, device.capability):
            detail = f"{device.name}, {device.target}, driver for CUDA {found.version}"
            return Machine(name, True, detail, device.name, device.capability)
    needs = "sm_120 or sm_121" if name == "native" else "sm_80 or newer"
    devices = ", ".join(f"{device.name} ({device.target})" for device in found.devices)
    return Machine(name, False, f"needs {needs}; there is {devices}")


def _suits(name: str, capability: tuple[int, int]) -> bool:
    return capability in NATIVE_CAPABILITIES if name == "native" else capability >= PORTABLE_CAPABILITY


def current() -> Backend:
    """Return the backend of `using`, else of PTXRT_MACHINE, else the default (native, portable or emulator)."""
    return scope().backend or _default()


def _default() -> Backend:
    """Return the backend that is used without `using`."""
    asked = os.environ.get("PTXRT_MACHINE")
    backend = _defaults.get(asked)
    if backend is None:
        backend = _defaults[asked] = backend_for(default_machine())
        if not asked and backend.name == "emulator":
            _notice()
    return backend


def _notice() -> None:
    """Print once a process, to a terminal, that the emulator runs because there is no GPU."""
    if sys.stderr is not None and sys.stderr.isatty() and not os.environ.get("PTXRT_QUIET"):
        words = "ptxrt: no NVIDIA GPU is here, so kernels run on the emulator, on the CPU"
        print(f"{words}; ptxrt.using('emulator') or PTXRT_QUIET=1 leaves this out", file=sys.stderr)


def place(device: int | None = None) -> Backend:
    """Return the backend of the current machine, on device number `device` if one is given."""
    backend = current()
    return backend if device is None else backend.on_device(_checked_device(device))


def _checked_device(device: Any) -> int:
    """Return the number of a device as an int."""
    if isinstance(device, bool) or not isinstance(device, (int, np.integer)) or device < 0:
        raise ArgumentError(f"device is {device!r}; pass the number of a device, from 0 on")
    return int(device)


def default_machine() -> str:
    """Return the name of the machine that is used without `using`; MachineError if there is a GPU that cannot be
    used."""
    asked = os.environ.get("PTXRT_MACHINE")
    if asked:
        return asked
    from .driver import probe

    return _best_machine(probe())


def default_problem() -> str | None:
    """Return what is wrong with the machine that PTXRT_MACHINE names; None if it is available, or none is named."""
    asked = os.environ.get("PTXRT_MACHINE")
    if not asked or asked == "emulator":
        return None
    if asked not in MACHINES:
        return f"PTXRT_MACHINE is {asked!r}; set it to {', '.join(MACHINES[:-1])} or {MACHINES[-1]}, or unset it"
    machine = machines()[asked]
    if machine.available:
        return None
    return (
        f"PTXRT_MACHINE asks for {asked}, which is not available ({machine.detail}); unset it, or name another machine"
    )


@cache
def _best_machine(found: Probe) -> str:
    if found.absent:
        return "emulator"
    machines = {name: _gpu_machine(name, found) for name in ("native", "portable")}
    for name, machine in machines.items():
        if machine.available:
            return name
    raise MachineError(f"{machines['portable'].detail}. To run on the CPU all the same, say ptxrt.using('emulator').")


def backend_for(name: str, device: int | None = None, **options) -> Backend:
    """Return the backend of a machine, one object for equal options. MachineError if the machine is not available."""
    if name not in MACHINES:
        raise ArgumentError(f"the machine is {name!r}; there is {', '.join(MACHINES)} (ptxrt.using or PTXRT_MACHINE)")
    device = None if device is None else _checked_device(device)
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
    """Keep a backend alive, and drop the emulators that were asked for longest ago."""
    _kept.pop(backend, None)
    _kept[backend] = None
    emulators = [kept for kept in _kept if not kept.is_cuda]
    for old in emulators[:-EMULATORS]:
        del _kept[old]


def _after_fork() -> None:
    """Replace the lock in a forked process, where a thread that held it does not exist."""
    global _opening
    _opening = RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _emulator_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return all options of the emulator, defaults included; ArgumentError for an unknown one."""
    from .emulator.backend import EmulatorBackend

    known = {
        name: p.default
        for name, p in signature(EmulatorBackend).parameters.items()
        if name not in ("ordinal", "on_device")
    }
    unknown = [option for option in options if option not in known]
    if unknown:
        raise ArgumentError(f"using: the emulator knows no option {', '.join(unknown)}; it has {', '.join(known)}")
    return {**known, **options}


def _ordinal(name: str, device: int | None) -> int:
    """Return the number of the device to use: the one asked for, else the first that the machine runs on."""
    if name == "emulator":
        return int(device or 0)
    from .driver import probe

    machine = machines()[name]
    if not machine.available:
        raise MachineError(f"the machine {name} is not available: {machine.detail}")
    devices = probe().devices
    if device is None:
        return next(d.ordinal for d in devices if _suits(name, d.capability))
    if device >= len(devices):
        raise MachineError(f"there is no device {device}; this computer has {len(devices)}, numbered from 0")
    if not _suits(name, devices[device].capability):
        needs = "sm_120 or sm_121" if name == "native" else "sm_80 or newer"
        raise MachineError(
            f"{name} needs {needs}; device {device} is {devices[device].name} ({devices[device].target})"
        )
    return int(device)


def _open(name: str, ordinal: int, options: dict[str, Any]) -> Backend:
    if name == "emulator":
        from .emulator.backend import EmulatorBackend

        return EmulatorBackend(ordinal=ordinal, on_device=partial(backend_for, name, **options), **options)
    from .driver import DriverBackend, probe

    return DriverBackend(name, probe().devices[ordinal], partial(backend_for, name))


# The object of this thread or task that has chosen a machine and begun no block, and the scope before it.
_latest: ContextVar[tuple[Any, Any]] = ContextVar("ptxrt_latest", default=(None, None))


class using:
    """Choose the machine: `using("emulator")` from now on, `with using("emulator"):` for a block.

    The choice holds for the current thread or task; elsewhere PTXRT_MACHINE and the default hold. docs/emulator.md
    describes the options of the emulator: arithmetic="float64" or "hardware" (the sums of tensor cores), ptx="native"
    or "portable", checks=True, budget=None (the most instructions), timeout=None (the most seconds of a launch),
    bank_conflicts=False, races=False (or True, or "strict"), strict=False (races and both schedules), profile=False,
    schedule="together" or "warps".

    Args:
        machine: "native", "portable" or "emulator".
        device: The CUDA number of a device; None is the first device that the machine runs on.
        options: Options of the emulator.

    Raises:
        MachineError: The machine is not available.
        ArgumentError: The emulator has no such option.
    """

    def __init__(self, machine: MachineName, *, device: int | None = None, **options: Any):
        self.backend = backend_for(machine, device, **options)
        _latest.set((self, enter(backend=self.backend)))

    def __enter__(self) -> Backend:
        # The first block restores what held before the object was made, if the object's choice still holds.
        made, before = _latest.get()
        if made is self and scope().backend is self.backend:
            _latest.set((None, None))
        else:
            before = enter(backend=self.backend)
        enter_block(self, before)
        return self.backend

    def __exit__(self, *exception: object) -> None:
        leave_block(self, "backend")

    def __repr__(self) -> str:
        return f"using({self.backend.describe()})"
