"""One call: bound arguments -> packed parameters -> grid -> backend -> results."""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass
from typing import Any, Mapping, Sequence

import numpy as np

from .array import DeviceArray, after_launch, allocate, as_arrays, as_output, before_launch, upload
from .backend import Backend, Entry, Facts, Module, Param, current
from .binder import Bound
from .errors import AbiError, ArgumentError
from .kernel import Kernel, Parameter

# Limits of grid x, y, z: CUDA programming guide, compute capabilities from 3.0 on.
GRID_LIMITS = (2**31 - 1, 65535, 65535)


@dataclass(frozen=True)
class Launch:
    """The receipt of one launch.

    kernel: name of the declaration (or file); machine: emulator, portable or native; detail: the
    device, or the emulator's text and arithmetic; bytes_moved, flops: from the declaration, or None.
    """

    kernel: str
    machine: str
    detail: str
    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    bytes_moved: int | None = None
    flops: int | None = None

    def __str__(self) -> str:
        sizes = f"grid {self.grid}, block {self.block}, {self.shared_bytes} bytes of shared memory"
        return f"{self.entry} on {self.machine} ({self.detail}): {sizes}"


_launches: deque[Launch] = deque(maxlen=256)


def last_launches() -> tuple[Launch, ...]:
    """The latest launches of this process, the newest last; 256 are kept."""
    return tuple(_launches)


def run(kernel: Kernel, arrays: Sequence[Any], named: Mapping[str, Any], stream=None) -> dict[str, Any]:
    """Bind, launch and give the outputs by name; see `Kernel.__call__`."""
    arrays = as_arrays_of(kernel, arrays)
    named = {name: _argument(kernel, name, value) for name, value in named.items()}
    bound = kernel.bind(*arrays, **named)
    backend = current()
    on_device = _check_places(bound, backend)
    plan = None if _is_empty(bound) else plan_launch(bound, backend)

    inputs = {name: a if isinstance(a, DeviceArray) else upload(backend, a, stream) for name, a in bound.inputs.items()}
    outputs = {a.name: _output_buffer(bound, a, backend) for a in kernel.outputs}
    present = {name: array for name, array in outputs.items() if array is not None}
    if plan:
        used = [*inputs.values(), *present.values()]
        before_launch(backend, stream, used)
        execute(plan, bound, {**inputs, **outputs}, backend, stream)
        after_launch(backend, stream, used, present.values())
    if on_device:
        return present
    # Every result is here before the first is handed out: an output is written whole or not at all.
    results = {name: array.to_numpy(stream=stream) for name, array in present.items()}
    for name, result in results.items():
        if bound.outputs[name] is not True:
            np.copyto(bound.outputs[name], result)
            results[name] = bound.outputs[name]
    return results


def as_arrays_of(kernel: Kernel, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """Positional inputs as NumPy or device arrays; surplus ones are left for `bind` to refuse."""
    names = [a.name for a in kernel.inputs]
    return tuple(_argument(kernel, name, value) for name, value in zip(names, arrays)) + tuple(arrays[len(names) :])


def _argument(kernel: Kernel, name: str, value):
    """One argument by name: arrays become NumPy or device arrays, the rest stays as it is."""
    declared = kernel.by_name.get(name)
    if declared is None or declared.direction == "scalar" or value is None or isinstance(value, bool):
        return value
    if declared.direction == "out":
        return as_output(kernel.name, name, value)
    return as_arrays(kernel.name, **{name: value})[0]


def _is_empty(bound: Bound) -> bool:
    return any(size == 0 for size in bound.axes.values())


def _check_places(bound: Bound, backend: Backend) -> bool:
    """Whether results stay on the device; ArgumentError for arrays of another machine, overlaps and mixtures."""
    given = {**bound.inputs, **{name: a for name, a in bound.outputs.items() if a is not None and a is not True}}
    on_device = {name: array for name, array in given.items() if isinstance(array, DeviceArray)}
    name = bound.kernel.name
    for argument, array in on_device.items():
        if array.backend is not backend:
            raise ArgumentError(
                f"{name}: {argument} is on {array.backend.describe()}, but the call runs on {backend.describe()}; "
                "create it there, or go through to_numpy()"
            )
    for argument in (a.name for a in bound.kernel.outputs if a.name in given):
        array = given[argument]
        if on_device and argument not in on_device:
            raise ArgumentError(f"{name}: {argument} is a NumPy array, but {next(iter(on_device))} is on the device; pass a device array")
        if argument in on_device and not array.writeable:
            raise ArgumentError(f"{name}: {argument} is read-only; pass an array that can be written")
        for other, its in on_device.items():
            if other != argument and argument in on_device and _overlap(array, its):
                raise ArgumentError(f"{name}: {argument} and {other} overlap in memory; pass separate arrays")
    return bool(on_device)


def _overlap(a: DeviceArray, b: DeviceArray) -> bool:
    return a.address < b.address + b.nbytes and b.address < a.address + a.nbytes


def _output_buffer(bound: Bound, argument, backend: Backend) -> DeviceArray | None:
    wanted = bound.outputs[argument.name]
    if wanted is None or isinstance(wanted, DeviceArray):
        return wanted
    return allocate(backend, bound.shape_of(argument), bound.format_of(argument).dtype)


@dataclass(frozen=True)
class Plan:
    """What a bound call launches: entry, facts and grid."""

    entry: Entry
    facts: Facts
    grid: tuple[int, int, int]


def plan_launch(bound: Bound, backend: Backend) -> Plan:
    """Load the module, compare declaration and entry, and size the grid; nothing is allocated or launched."""
    module = backend.module(bound.unit)
    entry = checked_entry(bound.kernel, module, bound.entry)
    facts = module.facts(bound.entry)
    return Plan(entry, facts, grid_of(bound, facts.tile))


def grid_of(bound: Bound, tile: tuple[int, int, int]) -> tuple[int, int, int]:
    """Blocks along x, y, z that cover the declared axes by tiles; ArgumentError beyond the hardware's limits."""
    sizes = [dim.size(bound.axes) for dim in bound.kernel.grid]
    blocks = [-(-size // covered) for size, covered in zip(sizes, tile)]
    for axis, dim, count, limit in zip("xyz", bound.kernel.grid, blocks, GRID_LIMITS):
        if count > limit:
            raise ArgumentError(
                f"{bound.kernel.name}: {dim} is {dim.size(bound.axes)}, which takes {count} blocks along {axis}, "
                f"where {limit} are allowed; split the call"
            )
    return tuple(blocks + [1] * (3 - len(blocks)))


# PTX types by what they can carry.
_INTEGERS = {f"{kind}{bits}" for kind in "sub" for bits in (8, 16, 32, 64)}
_FLOATS = {"f16", "f32", "f64", "b16", "b32", "b64"}


def checked_entry(kernel: Kernel, module: Module, name: str) -> Entry:
    """The entry, once its parameter list is known to be the declared one; AbiError with both lists otherwise."""
    entry = module.entries.get(name)
    if entry is None:
        there = ", ".join(module.entries) or "none"
        raise AbiError(f"{module.name} holds no entry {name}, which {kernel.name} declares; it holds {there}. Run `make`.")
    fits = len(entry.params) == len(kernel.parameters) and all(map(_fits, kernel.parameters, entry.params))
    if not fits:
        declared = ", ".join(map(str, kernel.parameters))
        compiled = ", ".join(f"{p.type or 'unknown'} ({p.size} bytes)" for p in entry.params)
        raise AbiError(
            f"{name}: declaration and compiled entry disagree.\n  declared: {declared}\n  compiled: {compiled}\n"
            f"Make the parameters in kernels_cu/{kernel.name}.cu and the annotations agree, then run `make`."
        )
    return entry


def _fits(declared: Parameter, param: Param) -> bool:
    if param.is_struct or param.is_pointer > (declared.kind == "array"):
        return False
    if declared.kind == "array":
        return param.size == 8 and param.type in _INTEGERS
    if declared.kind == "axis":
        return param.size in (4, 8) and param.type in _INTEGERS
    kinds = _FLOATS if declared.format.kind == "float" else _INTEGERS
    return param.size == declared.format.itemsize and param.type in kinds


def execute(plan: Plan, bound: Bound, arrays: Mapping[str, DeviceArray | None], backend: Backend, stream) -> None:
    """Pack the parameters, launch, and keep the receipt."""
    values = []
    for parameter in bound.kernel.parameters:
        if parameter.kind == "array":
            array = arrays[parameter.name]
            values.append(np.uint64(0 if array is None else array.address))
        else:
            values.append(bound.scalars[parameter.name] if parameter.kind == "scalar" else bound.axes[parameter.name])
    params = pack(bound.kernel.name, plan.entry, values)
    facts = plan.facts
    backend.launch(plan.entry, plan.grid, facts.threads, facts.shared_bytes, params, stream)
    keep_receipt(
        Launch(
            bound.kernel.name,
            backend.name,
            backend.describe(),
            plan.entry.name,
            plan.grid,
            facts.threads,
            facts.shared_bytes,
            bound.bytes_moved,
            bound.flops,
        )
    )


def keep_receipt(launch: Launch) -> None:
    """Remember a launch for `last_launches`."""
    _launches.append(launch)


def pack(kernel: str, entry: Entry, values: Sequence[Any]) -> bytes:
    """The entry's .param space: NumPy scalars as their bytes, Python integers in the parameter's size.

    ArgumentError for a number that its parameter cannot hold.
    """
    space = bytearray(entry.param_bytes)
    for index, (param, value) in enumerate(zip(entry.params, values)):
        data = value.tobytes() if isinstance(value, np.generic) else _integer_bytes(kernel, index, param, value)
        space[param.offset : param.offset + param.size] = data
    return bytes(space)


_CODES = {1: "b", 2: "h", 4: "i", 8: "q"}


def _integer_bytes(kernel: str, index: int, param: Param, value: int) -> bytes:
    try:
        return struct.pack("<" + _CODES[param.size], value)
    except struct.error:
        raise ArgumentError(f"{kernel}: the size {value} does not fit parameter {index} of {param.size} bytes; split the call") from None
