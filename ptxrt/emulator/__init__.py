"""The emulator: execute PTX text on NumPy arrays, and check bounds, alignment, uninitialized reads, deadlocks and more.

emulator = Emulator()
module = emulator.load_text(text, "kernel.ptx")
a = emulator.alloc(nbytes); emulator.write(a, array)
emulator.launch(module.entries["kernel"], grid=(8, 1, 1), block=(128, 1, 1), params=packed)
emulator.read(a, array)

This module holds the public classes. From a text to a result, the modules work in this order:

    ptx/parse.py, ptx/lower.py      text -> instructions -> basic blocks
    decode.py                       instruction + its definition (instruction.py and the families) -> typed operands
    translate.py, codegen.py        basic block -> one Python function over arrays with one element per thread
    machine.py, calls.py            run these functions: batches of thread blocks, scheduling, faults
    memory.py                       global, shared and local memory, with the state of each byte
    check.py, progress.py, profile.py   coverage, bank conflicts and races; progress of long launches; timing

backend.py puts the emulator behind the interface that the GPU has, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from ..errors import EmulatorFault

if TYPE_CHECKING:
    import numpy as np

    from ..errors import Unsupported
    from ..ptx.ir import Function, Module
    from .profile import Profile
    from .translate import Code

__all__ = ["Emulator", "EmulatorFault", "LoadedModule"]

_BUDGET = 20_000_000
_VARIABLE_BYTES = 1 << 32  # the most that the variables of one text may take

#: Translated entries, by everything that their code depends on. An entry lives as long as an emulator uses it.
_translations: "WeakValueDictionary[tuple, Code]" = WeakValueDictionary()


def _to_stdout(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


class LoadedModule:
    """A module loaded into one emulator: the declarations of its text, and the addresses of its variables.

    refused: for each entry that the emulator cannot run, the reason as an Unsupported error, by name.
    """

    def __init__(self, emulator: "Emulator", module: "Module", refused: dict[str, "Unsupported"]):
        self.emulator = emulator
        self.module = module
        self.refused = refused
        self.addresses: dict[str, int] = {}
        self._codes: dict[str, Code] = {}
        self.counts: dict[str, list[int]] = {}
        self.conflicts: dict[str, dict[int, int]] = {}
        self._place_variables()

    @property
    def name(self) -> str:
        return self.module.name

    @property
    def entries(self) -> dict[str, "Function"]:
        """The kernels by name."""
        return {name: Entry(self, function) for name, function in self.module.entries.items()}

    @property
    def variables(self):
        """The module's variables by name."""
        return self.module.variables

    def constant(self, name: str) -> bytes:
        """The initial bytes of a `.const` or `.global` variable."""
        return self.module.constant(name)

    def address(self, name: str) -> int:
        """The address of a `.global` or `.const` variable, to read or write it from the host."""
        if name not in self.addresses:
            raise EmulatorFault(f"{self.name} has no variable '{name}' in global or constant memory")
        return self.addresses[name]

    def source_of(self, location) -> str:
        """file:line of a source position, without what it was inlined into."""
        return f"{self.module.files.get(location.file, '?')}:{location.line}" if location is not None else ""

    def _place_variables(self) -> None:
        memory = self.emulator.memory
        placed = [variable for variable in self.module.variables.values() if variable.space in ("global", "const")]
        total = sum(variable.bytes for variable in placed)
        if total > _VARIABLE_BYTES:
            largest = max(placed, key=lambda variable: variable.bytes)
            raise EmulatorFault(
                f"{self.name}:{largest.line}: variables in global and constant memory have {total} bytes, "
                f"'{largest.name}' {largest.bytes} of them; the emulator keeps {_VARIABLE_BYTES} at most",
                line=largest.line,
            )
        for variable in placed:
            if variable.linkage == "extern":
                raise EmulatorFault(
                    f"{self.name}:{variable.line}: '{variable.name}' is defined in another module; link first"
                )
            self.addresses[variable.name] = memory.alloc(
                variable.bytes, f"the variable '{variable.name}'", variable.space == "const"
            )
        for variable in placed:
            if variable.bytes:
                memory.fill(self.addresses[variable.name], self._initial(variable))

    def _initial(self, variable) -> bytes:
        from ..ptx.ir import Symbol, type_bytes

        size = type_bytes(variable.type)
        data = bytearray()
        for value in variable.values:
            if isinstance(value, Symbol):
                if value.name not in self.addresses or size != 8:
                    raise EmulatorFault(
                        f"{self.name}:{variable.line}: the initializer of '{variable.name}' holds the address of "
                        f"'{value.name}', which is not supported"
                    )
                value = self.addresses[value.name] + value.offset
            data += (value & (1 << 8 * size) - 1).to_bytes(size, "little")
        return bytes(data[: variable.bytes])

    def code(self, entry: str) -> "Code":
        """The translation of an entry, made on first use."""
        code = self._codes.get(entry)
        if code is None:
            if entry in self.refused:
                raise self.refused[entry]
            from .check import collector, text_key

            code = self._codes[entry] = self._translation(entry)
            self.counts[entry] = [0] * len(code.blocks)
            if collector() is not None:
                collector().add(text_key(self.name, self.module.text), entry, code, self.counts[entry], self)
        return code

    def _translation(self, entry: str) -> "Code":
        """The translation of an entry, shared with other emulators for which it is the same."""
        if self.emulator.profile is not None:
            return self._translate(entry)
        # A variable whose name stands in the text once is declared but never used: its address is not part of the key.
        used = tuple(address for name, address in self.addresses.items() if self.module.text.count(name) > 1)
        key = (self.module.text, self.name, entry, self.emulator.arithmetic, self.emulator.param_address, used)
        code = _translations.get(key)
        if code is None:
            code = _translations[key] = self._translate(entry)
        return code

    def _translate(self, entry: str) -> "Code":
        from ..ptx.lower import lower
        from .memory import LOCAL_BASE, SHARED_BASE
        from .translate import Translator, kind_of

        program = lower(self.module, self.module.functions[entry], kind_of)
        first = self.emulator.param_address
        parameters = {parameter.name: first + parameter.offset for parameter in program.entry.params}
        extents = {name: (first, first + program.entry.param_bytes) for name in parameters}
        for name, address in self.addresses.items():
            extents.setdefault(name, (address, address + self.variables[name].bytes))
        # Not this object: what is shared must not keep an emulator's memory.
        module, addresses = self.name, self.addresses

        def address_of(name: str, line: int) -> int:
            if name in program.shared:
                return SHARED_BASE + program.shared[name]
            if name in program.frame:
                return LOCAL_BASE + program.frame[name]
            if name in parameters:
                return parameters[name]
            if name in addresses:
                return addresses[name]
            raise EmulatorFault(f"{module}:{line}: '{name}' is not defined, or its address is not supported here")

        profile = self.emulator.profile

        def number_of(instruction) -> int:
            return profile.number(self.name, instruction, self.source_of(instruction.location))

        translator = Translator(program, address_of, extents, self.emulator.arithmetic, self.name)
        if profile is not None:
            translator.profile(profile.mark, number_of)
        return translator.translate()


@dataclass(frozen=True)
class Entry:
    """A kernel of a loaded module, to launch; its parameters and directives are those of the text."""

    module: LoadedModule
    function: "Function"

    def __getattr__(self, name: str):
        return getattr(self.function, name)


class Emulator:
    """An emulated GPU with its own memory.

    arithmetic: "float64" or "hardware", how tensor-core sums are rounded.
    checks: track which bytes were written; a read of other bytes is a fault (bounds and alignment are always checked).
    budget: instructions that a batch of blocks may issue; more count as an endless loop.
    timeout: seconds that a launch may take; None for no limit.
    bank_conflicts: count shared-memory bank conflicts per PTX line (property `bank_conflicts`).
    races: find races between threads in shared memory, and between blocks in global memory; slow, for small shapes.
        "strict": stores of equal bytes to one place by several threads are races, too. The list `undecided` describes
        the pairs of accesses that may or may not be a race.
    strict: checks, races, and every launch twice from the same memory, once in each schedule; the results are those of
        `schedule`.
    profile: measure where emulation time goes (`profile`, see profile.py).
    progress: called as progress(kernel, share done, seconds left) about once a second during long launches, with
        estimates (see progress.py); by default a terminal on stderr shows them.
    lanes: threads that run together, in one batch of blocks.
    output: called with the text that kernels print; by default it goes to sys.stdout.
    schedule: "together" runs all threads at the same basic block at once, which is fast and hides a missing barrier;
        "warps" runs one warp at a time, as far as it can go, which exposes a missing barrier.
    """

    def __init__(
        self,
        arithmetic: str = "float64",
        checks: bool = True,
        budget: int | None = None,
        *,
        bank_conflicts: bool = False,
        races: "bool | str" = False,
        profile: bool = False,
        progress: Callable[[str, float, float], None] | None = None,
        lanes: int = 16384,
        schedule: str = "together",
        timeout: float | None = None,
        output: Callable[[str], object] | None = None,
        strict: bool = False,
    ):
        from .machine import PARAM_BYTES
        from .memory import GlobalMemory

        if arithmetic not in ("float64", "hardware"):
            raise EmulatorFault(f"arithmetic is {arithmetic!r}; there is 'float64' and 'hardware'")
        self.arithmetic = arithmetic
        self.checks = checks = checks or strict
        self.budget = _BUDGET if budget is None else budget
        self.timeout = timeout
        self.output = output or _to_stdout
        self.count_conflicts = bank_conflicts
        self.strict = strict
        self.find_races = bool(races) or strict
        self.strict_races = races == "strict"
        self.undecided: list[str] = []
        self.profile: "Profile" | None = None
        if profile:
            from .profile import Profile

            self.profile = Profile()
        self.progress = progress
        if schedule not in ("together", "warps"):
            raise EmulatorFault(f"schedule is {schedule!r}; there is 'together' and 'warps'")
        self.schedule = schedule
        self.lanes_per_batch = lanes
        self.memory = GlobalMemory(checks)
        self.param_address = self.memory.alloc(PARAM_BYTES, "the kernel's parameters", read_only=True)
        self.modules: list[LoadedModule] = []

    # -- memory -------------------------------------------------------------------------------------------------

    def alloc(self, nbytes: int) -> int:
        """Reserve uninitialized device memory; returns its address."""
        return self.memory.alloc(nbytes)

    def free(self, address: int) -> None:
        """Free an allocation."""
        self.memory.free(address)

    def write(self, address: int, data) -> None:
        """Copy an array or bytes to the device."""
        self.memory.write(address, data)

    def read(self, address: int, out: "np.ndarray") -> "np.ndarray":
        """Copy from the device into a C-contiguous array; returns it. With checks, uninitialized bytes are a fault."""
        return self.memory.read(address, out)

    # -- modules and launches -----------------------------------------------------------------------------------

    def load_text(self, text: str, name: str = "<ptx>", whole: bool = False) -> LoadedModule:
        """Load a PTX text. Entries that it cannot execute are refused, by name and line: see `LoadedModule.refused`.

        whole: check the operands of every instruction now; otherwise the first launch of an entry checks them.
        Raises PtxSyntaxError for a text that is not PTX, Unsupported where every entry is refused.
        """
        from ..ptx.parse import parse, refusals
        from .instruction import resolve
        from .verify import problem

        module = parse(text, name)
        refused = refusals(module, resolve, problem if whole else None)
        if refused and len(refused) == len(module.entries):
            raise next(iter(refused.values()))
        loaded = LoadedModule(self, module, refused)
        self.modules.append(loaded)
        return loaded

    def unload(self, module: LoadedModule) -> None:
        """Drop a module: free the memory of its variables and forget its counts."""
        self.modules.remove(module)
        for address in module.addresses.values():
            self.memory.free(address)

    def launch(self, entry: Entry, grid, block, shared_bytes: int = 0, params: bytes = b"") -> None:
        """Run a kernel to its end.

        `grid` and `block` are (x, y, z); `params` is the packed `.param` space. Raises EmulatorFault with kernel,
        block, thread, PTX line and source line.
        """
        from .machine import launch

        if self.strict:
            self._rehearse(entry, grid, block, shared_bytes, params)
        launch(self, entry, grid, block, shared_bytes, params)

    def _rehearse(self, entry: Entry, grid, block, shared_bytes: int, params: bytes) -> None:
        """Run a kernel in the other schedule; then restore memory and drop its output. Faults are raised."""
        from .machine import launch

        before, schedule, output, said = self.memory.copy(), self.schedule, self.output, len(self.undecided)
        self.schedule, self.output = ("warps" if schedule == "together" else "together"), lambda text: None
        try:
            launch(self, entry, grid, block, shared_bytes, params)
        finally:
            self.schedule, self.output = schedule, output
        self.memory.restore(before)
        del self.undecided[said:]

    # -- counts -------------------------------------------------------------------------------------------------

    def labels(self) -> list[tuple[str, LoadedModule]]:
        """(label, module) of each loaded module. The label is its name, or `name #2` for another text of that name."""
        known: dict[str, list[str]] = {}
        found = []
        for module in self.modules:
            texts = known.setdefault(module.name, [])
            if module.module.text not in texts:
                texts.append(module.module.text)
            number = texts.index(module.module.text) + 1
            found.append((module.name if number == 1 else f"{module.name} #{number}", module))
        return found

    def coverage(self) -> dict[str, dict[str, dict[int, int]]]:
        """Threads that executed each PTX line: {module: {entry: {line: threads}}}, of entries that were launched.

        Several loads of one text are summed. The module keys are those of `labels`.
        """
        from .check import add_counts, line_counts

        total: dict[str, dict[str, dict[int, int]]] = {}
        for label, module in self.labels():
            total.setdefault(label, {})
            for entry, code in module._codes.items():
                add_counts(total, label, entry, line_counts(code, module.counts[entry]))
        return total

    @property
    def bank_conflicts(self) -> dict[str, dict[str, dict[int, int]]]:
        """Extra passes of shared-memory accesses: {module: {entry: {PTX line: passes}}}, with the keys of `coverage`.

        Empty unless the emulator was made with bank_conflicts=True.
        """
        from .check import add_counts

        total: dict[str, dict[str, dict[int, int]]] = {}
        for label, module in self.labels():
            total.setdefault(label, {})
            for entry, lines in module.conflicts.items():
                add_counts(total, label, entry, lines)
        return total
