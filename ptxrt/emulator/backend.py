"""The Backend on the emulator: compiled units by their PTX text, one address space, everything done on return."""

from __future__ import annotations

from pathlib import Path
from threading import RLock

import numpy as np

from .. import units
from ..backend import Entry, Facts
from ..errors import AbiError, ArgumentError, FileError
from ..files import module_kind
from . import Emulator

TEXTS = ("native", "portable")
ARITHMETICS = ("float64", "hardware")
SCHEDULES = ("together", "warps")


class EmulatorModule:
    """A loaded text: its entries, and the launch facts that stand in it."""

    def __init__(self, name: str, module):
        self.name = name
        self.entries = {name: Entry.from_text(function, function) for name, function in module.entries.items()}
        self._module = module

    def facts(self, entry: str) -> Facts:
        """The launch facts of an entry; AbiError where the text has none."""
        name = f"{entry}_launch"
        if name not in self._module.variables:
            raise AbiError(f"{self.name} has no constant {name}; declare the entry with KERNEL() and run `make`")
        return Facts.read(entry, self._module.constant(name))


class EmulatorBackend:
    """An emulator with the given options; calls from several threads take turns.

    ptx: the text of the units that runs, "native" or "portable". arithmetic: of tensor-core sums,
    "float64" or "hardware". checks: track which memory was written. budget: instructions at most.
    bank_conflicts: count them per line. races: find races in shared memory. profile: note where time goes. schedule: "together" runs all warps side by side, "warps" each
    as far as it can alone, which shows a missing barrier. `emulator` is the Emulator itself, with its counts.
    """

    name = "emulator"
    is_cuda = False

    def __init__(
        self,
        *,
        ptx: str = "native",
        arithmetic: str = "float64",
        checks: bool = True,
        budget: int | None = None,
        bank_conflicts: bool = False,
        races: bool = False,
        profile: bool = False,
        schedule: str = "together",
    ):
        for name, value, known in (("ptx", ptx, TEXTS), ("arithmetic", arithmetic, ARITHMETICS), ("schedule", schedule, SCHEDULES)):
            if value not in known:
                raise ArgumentError(f"using: {name} is {value!r}; there is {', '.join(known)}")
        self.ptx = ptx
        self.arithmetic = arithmetic
        self.emulator = Emulator(
            arithmetic, checks, budget, bank_conflicts=bank_conflicts, races=races, profile=profile, schedule=schedule
        )
        self._modules: dict[str, EmulatorModule] = {}
        self._turn = RLock()

    def describe(self) -> str:
        """Machine, text and arithmetic."""
        return f"emulator, {self.ptx} PTX, {self.arithmetic} arithmetic"

    def module(self, unit: str) -> EmulatorModule:
        """Load a compiled unit's text once."""
        with self._turn:
            if unit not in self._modules:
                path = units.text_path(unit, self.ptx == "portable")
                self._modules[unit] = EmulatorModule(unit, self.emulator.load_text(units.read(path).decode(), name=path.name))
            return self._modules[unit]

    def open(self, path: Path) -> EmulatorModule:
        """Load any PTX text; FileError for binaries, which only a GPU runs."""
        path = Path(path)
        data = path.read_bytes()
        kind = module_kind(path, data)
        if kind != "ptx":
            raise FileError(f"{path} is a {kind}; the emulator runs PTX text: compile with nvcc -ptx, or choose a GPU machine")
        with self._turn:
            return EmulatorModule(path.name, self.emulator.load_text(data.decode("utf-8", "replace"), name=path.name))

    def alloc(self, nbytes: int) -> int:
        """New memory, which nothing has written."""
        with self._turn:
            return self.emulator.alloc(nbytes)

    def free(self, address: int) -> None:
        """Give memory back."""
        with self._turn:
            self.emulator.free(address)

    def write(self, address: int, host: np.ndarray, stream=None) -> None:
        """Copy a contiguous array in."""
        with self._turn:
            self.emulator.write(address, host.reshape(-1).view(np.uint8))

    def read(self, address: int, host: np.ndarray, stream=None) -> None:
        """Copy into a contiguous array."""
        with self._turn:
            self.emulator.read(address, host.reshape(-1).view(np.uint8))

    def launch(self, entry: Entry, grid, block, shared_bytes: int, params: bytes, stream=None) -> None:
        """Execute to the end."""
        with self._turn:
            self.emulator.launch(entry.handle, grid=grid, block=block, shared_bytes=shared_bytes, params=params)

    def synchronize(self, stream=None) -> None:
        """Nothing to wait for: a launch is over when it returns."""

    def stream_handle(self, stream=None) -> int:
        """Streams have no meaning here."""
        return 0

    def mark(self, stream=None) -> None:
        """Everything is done already."""

    def wait(self, stream, mark) -> None:
        """Everything is done already."""
