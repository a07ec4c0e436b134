"""Compiled kernels of other projects: load PTX, a fatbin or a cubin and launch its entries on arrays and scalars."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .array import Box, DeviceArray, as_arrays, is_foreign, overlap, same_memory, upload
from .backend import Backend, Entry, Param, scope
from .errors import ArgumentError, LaunchError
from .files import checked_path
from .formats import in_native_order
from .launch import GRID_LIMITS, Launch, Plan
from .selection import backend_for, current

if TYPE_CHECKING:
    from .typing import StreamLike

_STRUCT_CODES = {
    **{"u8": "B", "s8": "b", "u16": "H", "s16": "h", "u32": "I", "s32": "i", "u64": "Q", "s64": "q"},
    **{"f16": "e", "f32": "f", "f64": "d"},
}


def load(path: str | os.PathLike[str]) -> "Program":
    """Load a `.ptx` file on the current machine. GPU machines also load a fatbin or cubin.

    `program["name"](grid, block, *arguments, shared_bytes=0, stream=None)` launches an entry. `program.refused` maps
    entries with instructions that the emulator does not implement to the error, with the instruction and its line.

    Raises:
        FileError: The file is missing, of another kind, or one that the machine cannot run.
        Unsupported: The machine can run none of the entries.
        PtxSyntaxError: The text is not PTX.
    """
    path = checked_path(path)
    backend = current()
    return Program(backend, backend.open(path))


def emulate(text: str, name: str) -> "Program":
    """Load a PTX text on the current emulator, or on that of `using("emulator")` if a GPU is current."""
    backend = current()
    if backend.name != "emulator":
        backend = backend_for("emulator")
    return Program(backend, backend.kept_text(text, name))


class Program(Mapping[str, "ProgramEntry"]):
    """A loaded file: a mapping from entry names to launchable entries.

    refused: by name, the errors of entries that the machine cannot run. A lookup of such an entry raises its error.
    """

    def __init__(self, backend: Backend, module):
        self.name = module.name
        self.refused: dict[str, LaunchError] = dict(getattr(module, "refused", {}))
        self._entries = {name: ProgramEntry(backend, module, entry) for name, entry in module.entries.items()}

    def __getitem__(self, name: str) -> "ProgramEntry":
        try:
            return self._entries[name]
        except KeyError:
            if name in self.refused:
                raise self.refused[name] from None
            raise KeyError(f"{self.name} has no entry {name!r}; it has {', '.join(self._entries) or 'none'}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"<program {self.name}: {', '.join(self._entries)}>"


class ProgramEntry:
    """An entry of a loaded file, on the machine that loaded it."""

    def __init__(self, backend: Backend, module, entry: Entry):
        self.name = entry.name
        self._backend, self._program, self._digest, self._entry = backend, module.name, module.digest, entry

    def __repr__(self) -> str:
        types = ", ".join(p.type or f"{p.size} bytes" for p in self._entry.params)
        return f"<entry {self.name}({types}) of {self._program}>"

    def __call__(
        self,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        *arguments: Any,
        shared_bytes: int = 0,
        stream: StreamLike = None,
    ) -> None:
        """Launch with one argument for each parameter.

        grid, block: one to three numbers. An argument is a NumPy array (uploaded, and copied back after the launch if
        it is writeable; arrays that overlap are the same array, or read-only), a device array (used in place), None (a
        null pointer), a NumPy scalar of the parameter's size, bytes or a structured scalar for a struct by value, or,
        if the PTX text declares the type, a Python number. The call waits if it has NumPy arrays.
        """
        grid, block = _three("grid", grid), _three("block", block)
        for axis, count, limit in zip("xyz", grid, GRID_LIMITS):
            if count > limit:
                raise ArgumentError(f"{self.name}: grid {axis} is {count}; at most {limit} are allowed")
        params = self._entry.params
        if len(arguments) != len(params):
            raise ArgumentError(f"{self!r} takes {len(params)} arguments, {len(arguments)} came")
        values = [_place(self.name, i, param, value) for i, (param, value) in enumerate(zip(params, arguments))]
        backend = self._backend
        for value in values:
            if isinstance(value, DeviceArray) and value.backend is not backend:
                raise ArgumentError(
                    f"{self.name}: {value!r} is on another machine than {backend.describe()}; go through to_numpy()"
                )

        queue = backend.queue(stream)
        of_host = self._of_host(values)
        uploaded = {i: upload(backend, in_native_order(values[i]), queue) for i in set(of_host.values())}
        places = [uploaded[of_host[i]] if i in of_host else value for i, value in enumerate(values)]
        space = bytearray(self._entry.param_bytes)
        used = []
        for index, (param, place) in enumerate(zip(params, places)):
            if isinstance(place, bytes):
                space[param.offset : param.offset + param.size] = place
            else:
                # It is unknown which arrays an entry writes; any may be written.
                box = Box.of(place) if isinstance(place, DeviceArray) else Box((), place.nbytes)
                used.append((f"argument {index}", param.offset, True, box))
        receipt = Launch(
            *(self._program, backend.name, backend.describe(), self.name, grid, block, int(shared_bytes)),
            module=self._digest,
        )
        plan = Plan(backend, self._entry, grid, block, int(shared_bytes), bytes(space), used, (), lambda _: receipt)
        plan.launch([place for place in places if isinstance(place, DeviceArray)], (), queue, scope().recorder)

        # All results are downloaded before the first is written back.
        targets = {first: values[i] for i, first in of_host.items() if values[i].flags.writeable}
        results = {first: uploaded[first].to_numpy(stream=queue) for first in targets}
        for first, target in targets.items():
            np.copyto(target, results[first])

    def _of_host(self, values: Sequence[Any]) -> dict[int, int]:
        """Return for each argument that is a NumPy array the first one that is the same array.

        ArgumentError for others that overlap: each is uploaded, so that a write to one would not reach the other.
        """
        found: dict[int, int] = {}
        for i, value in enumerate(values):
            if not isinstance(value, np.ndarray):
                continue
            for j in found:
                if same_memory(values[j], value):
                    found[i] = found[j]
                    break
                if (value.flags.writeable or values[j].flags.writeable) and overlap(values[j], value):
                    raise ArgumentError(
                        f"{self.name}: arguments {j} and {i} are NumPy arrays that overlap, and each is uploaded; pass "
                        "views of one device array, see ptxrt.to_device"
                    )
            found.setdefault(i, i)
        return found


def _three(name: str, value) -> tuple[int, int, int]:
    """A grid or block of one to three positive numbers, padded with ones."""
    numbers = tuple(value) if hasattr(value, "__iter__") else (value,)
    fine = 1 <= len(numbers) <= 3 and all(isinstance(n, (int, np.integer)) and n >= 1 for n in numbers)
    if not fine:
        raise ArgumentError(f"{name} is {value!r}; pass one to three whole numbers of at least 1")
    return (*map(int, numbers), *(1,) * (3 - len(numbers)))


def _place(entry: str, index: int, param: Param, value: Any):
    """Return an argument as a NumPy array, a DeviceArray or the bytes of its parameter."""

    def refuse(found: str, advice: str):
        declared = f"{param.type}, {param.size} bytes" if param.type else f"{param.size} bytes"
        raise ArgumentError(f"{entry}: argument {index} is {found}; the parameter is {declared}. {advice}")

    if (
        value is None
        or isinstance(value, (np.ndarray, DeviceArray))
        or (is_foreign(value) and not isinstance(value, np.generic))
    ):
        what = "None" if value is None else "an array"
        if param.size != 8 or param.is_struct or param.type in ("f64", "f32x2"):
            refuse(what, "Pass a scalar of that size, such as array[()] of a NumPy array without axes.")
        if value is None:
            return bytes(8)
        (array,) = as_arrays(entry, **{f"argument {index}": value})
        if array.size == 0:
            return bytes(8)
        return value if isinstance(value, np.ndarray) else array  # results are written back to the caller's array
    if isinstance(value, (np.generic, bytes, bytearray)):
        data = value.tobytes() if isinstance(value, np.generic) else bytes(value)
        if param.is_pointer:
            refuse(f"{value!r}, a {type(value).__name__}", "Pass an array or None for an address.")
        if len(data) != param.size:
            refuse(f"{value!r}, a {type(value).__name__} of {len(data)} bytes", f"Pass one of {param.size} bytes.")
        return data
    if not isinstance(value, (int, float)):
        refuse(f"a {type(value).__name__}", "Pass an array, None, a NumPy scalar or a number.")
    if param.is_pointer:
        refuse(repr(value), "Pass an array or None for an address.")
    code = None if param.is_struct else _STRUCT_CODES.get(param.type)
    if code is None:
        refuse(repr(value), "Its type is not known here: pass a NumPy scalar of that size.")
    try:
        return struct.pack("<" + code, value)
    except (struct.error, OverflowError):
        refuse(repr(value), "Pass a number that it holds.")
