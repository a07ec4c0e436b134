"""One call of a kernel: bound arguments -> packed parameters -> grid -> backend -> results.

A Plan is a launch without its addresses and numbers. prepared.py records the plans of a call for later calls.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from .array import Box, DeviceArray, allocate, as_arrays, as_output, upload
from .backend import Backend, Entry, Facts, Module, Packet, Param, Queue, _scope, wait_out
from .binder import Bound, bind, scalar_value
from .declaration import Argument, Declaration, Parameter, half_of
from .errors import AbiError, ArgumentError, remedy
from .selection import current

# Limits of grid x, y, z: CUDA programming guide, compute capabilities from 3.0 on.
GRID_LIMITS = (2**31 - 1, 65535, 65535)
# The largest size that kernels take in 32 bits: sums with it stay below 2^31 (docs/numerics.md, "Sizes").
LARGEST_SIZE = 2**31 - 2**24


@dataclass(frozen=True)
class Launch:
    """The receipt of one launch.

    Attributes:
        kernel: The name of the declaration, or of the file.
        machine: "emulator", "portable" or "native".
        detail: The device, or the emulator's text and arithmetic.
        entry: The name of the entry.
        grid: Blocks along x, y and z.
        block: Threads along x, y and z.
        shared_bytes: Dynamic shared memory of a block.
        bytes_moved: The bytes that the declaration counts, or None.
        flops: The operations that the declaration counts, or None.
        module: SHA-256 of the file that was loaded.
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
    module: str = ""

    def __str__(self) -> str:
        sizes = f"grid {self.grid}, block {self.block}, {self.shared_bytes} bytes of shared memory"
        return f"{self.entry} on {self.machine} ({self.detail}): {sizes}"


_launches: deque[Launch] = deque(maxlen=256)
# Observers of every launch of the process; `ptxrt.trace` adds itself.
observers: list[Any] = []


def last_launches() -> tuple[Launch, ...]:
    """Return the receipts of the latest launches of this process, the newest last; 256 are kept."""
    return tuple(_launches)


def announce(receipt: Launch, backend: Backend, queue: Queue, action, *arguments) -> None:
    """Run the action of a receipt and keep the receipt. Observers are called before and after it, and may time it."""
    if observers:
        watching = list(observers)
        started = [observer.before(backend, queue) for observer in watching]
        action(*arguments)
        for observer, start in zip(watching, started):
            observer.after(receipt, backend, queue, start)
    else:
        action(*arguments)
    _launches.append(receipt)


class Scalar:
    """The place of a number among the parameters, and its packing."""

    __slots__ = ("kernel", "argument", "name", "offset", "pack_into", "kinds")

    def __init__(self, kernel: Declaration, argument: Argument, offset: int):
        dtype = argument.formats[0].dtype
        self.kernel, self.argument, self.name, self.offset = kernel, argument, argument.name, offset
        self.pack_into = struct.Struct("<" + np.dtype(dtype).char).pack_into if dtype.char in "efdbBhHiIlLqQ" else None
        if dtype.char in "lL":
            self.pack_into = struct.Struct("<" + {"l": "q", "L": "Q"}[dtype.char]).pack_into
        self.kinds = (float, int) if dtype.kind == "f" else (int, bool)

    def put(self, packet: Packet, value: Any) -> Any:
        """Pack a value and return it as a number; ArgumentError for a value that the parameter cannot hold."""
        choices = self.argument.choices
        if self.pack_into is not None and type(value) in self.kinds and (not choices or value in choices):
            try:
                self.pack_into(packet.raw, self.offset, value)
                return value
            except (struct.error, OverflowError):
                pass  # scalar_value raises the error with its message
        number = scalar_value(self.kernel, self.argument, value)
        data = number.tobytes()
        packet.raw[self.offset : self.offset + len(data)] = data
        return number


class Plan:
    """A launch of one entry with one grid, for any arrays and numbers.

    slots: for each array the 64-bit word of the parameters that takes its address. writes: whether it is written.
    boxes: how its elements lie. scalars: the numbers. receipt: of a launch, given the numbers.
    """

    __slots__ = (
        "backend",
        "entry",
        "grid",
        "block",
        "shared_bytes",
        "template",
        "names",
        "slots",
        "writes",
        "boxes",
        "pairs",
        *("scalars", "bound", "_spare", "_receipts", "_describe"),
    )

    def __init__(
        self, backend: Backend, entry: Entry, grid, block, shared_bytes: int, template: bytes, arrays, scalars, describe
    ):
        """Take arrays as (name, byte offset, whether written, Box) and `describe`, which makes a receipt of scalars."""
        self.backend, self.entry, self.grid, self.block, self.shared_bytes = backend, entry, grid, block, shared_bytes
        self.template = template
        self.names = tuple(name for name, *_ in arrays)
        self.slots = tuple(offset // 8 for _, offset, *_ in arrays)
        self.writes = tuple(write for _, _, write, _ in arrays)
        self.boxes = tuple(box for *_, box in arrays)
        self.pairs = tuple(
            (i, j)
            for i, write in enumerate(self.writes)
            if write
            for j in range(len(self.writes))
            if j != i and not (self.writes[j] and j < i)
        )
        self.scalars = tuple(scalars)
        self.bound: Bound | None = None
        self._spare: list[Packet] = []
        self._receipts: dict[tuple, Launch] = {}
        self._describe = describe

    def packet(self) -> Packet:
        """Return parameters to fill in and launch."""
        try:
            return self._spare.pop()
        except IndexError:
            return self.backend.packet(self.entry, self.grid, self.block, self.shared_bytes, self.template)

    def receipt(self, values: tuple = ()) -> Launch:
        """Return the receipt of a launch with these scalars, one object for equal values."""
        found = self._receipts.get(values)
        if found is None:
            if len(self._receipts) >= 64:
                self._receipts.clear()
            found = self._receipts[values] = self._describe(values)
        return found

    def check_overlap(self, arrays: Sequence[DeviceArray]) -> None:
        """Raise ArgumentError if an output overlaps another array."""
        boxes = self.boxes
        for i, j in self.pairs:
            if boxes[i].overlaps(boxes[j], arrays[j].address - arrays[i].address):
                raise ArgumentError(
                    f"{self.receipt_name}: {self.names[i]} and {self.names[j]} overlap in memory; pass separate arrays"
                )

    @property
    def receipt_name(self) -> str:
        """Return the name of the launch in messages."""
        return self.bound.kernel.name if self.bound is not None else self.entry.name

    def launch(self, arrays: Sequence[DeviceArray], values: tuple, queue: Queue, recorder: Any = None) -> None:
        """Launch on arrays and numbers in the order of `names` and `scalars`, after what they depend on."""
        packet = self.packet()
        words = packet.words
        for slot, array in zip(self.slots, arrays):
            words[slot] = array.address
        values = tuple(scalar.put(packet, value) for scalar, value in zip(self.scalars, values))
        if recorder is not None:
            recorder.add(self, packet, arrays, values, queue)
            return
        crossing = None
        for array, write in zip(arrays, self.writes):
            memory = array.memory
            if memory.writer is not queue or memory.readers:
                memory.acquire(queue, write)
                crossing = True
        try:
            if observers:
                announce(self.receipt(values), self.backend, queue, packet.launch, queue)
            else:
                packet.launch(queue)
                _launches.append(self.receipt(values))
            # A capture of another library runs when that library launches it, so that no mark can stand for its end.
            if crossing and not self.backend.is_capturing(queue):
                mark = self.backend.mark(queue)
                for array, write in zip(arrays, self.writes):
                    array.memory.release(queue, mark, write)
        except BaseException:
            if crossing:  # as in `recorded_use`, which would cost time here
                wait_out(self.backend, queue)
            raise
        self._spare.append(packet)

    def keep(self, packet: Packet) -> None:
        """Take back a packet whose parameters have been read."""
        self._spare.append(packet)


def run(kernel: Declaration, arrays: Sequence[Any], named: Mapping[str, Any], stream=None) -> dict[str, Any]:
    """Bind and launch a call, and return the outputs by name; see `Kernel.__call__`."""
    arrays = as_arrays_of(kernel, arrays)
    named = {name: _argument(kernel, name, value) for name, value in named.items()}
    bound = bind(kernel, arrays, named.pop("dtype", None), named)
    backend, on_device = _check_places(bound)
    recorder = _scope.get().recorder
    if recorder is not None and not on_device:
        raise ArgumentError(
            f"{recorder.name} records launches on device arrays; {kernel.name} was given none. Use ptxrt.to_device."
        )
    queue = backend.queue(stream)
    inputs = {a.name: _on_device(a, bound.inputs[a.name], backend, queue) for a in kernel.inputs}
    plan = None if _is_empty(bound) else plan_launch(replace(bound, inputs=inputs), backend)

    outputs = {a.name: _output_buffer(bound, a, backend, queue) for a in kernel.outputs}
    placed = {**inputs, **outputs}
    present = {a.name: placed[a.name] for a in kernel.written if placed[a.name] is not None}
    if plan:
        values = tuple(bound.scalars[scalar.name] for scalar in plan.scalars)
        plan.launch([placed[name] for name in plan.names], values, queue, recorder)
    if on_device:
        return present
    # All results are downloaded before the first is written back: an output is written whole or not at all.
    results = {name: array.to_numpy(stream=queue) for name, array in present.items()}
    for name, result in results.items():
        callers = bound.given(kernel.by_name[name])
        if callers is not True:
            np.copyto(callers, result)
            results[name] = callers
    return results


def as_arrays_of(kernel: Declaration, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """Return positional inputs as NumPy or device arrays; `bind` refuses surplus ones."""
    names = [a.name for a in kernel.inputs]
    return tuple(_argument(kernel, name, value) for name, value in zip(names, arrays)) + tuple(arrays[len(names) :])


def _argument(kernel: Declaration, name: str, value):
    """Return one argument: arrays become NumPy or device arrays, other values stay as they are."""
    declared = kernel.by_name.get(name)
    if declared is None or declared.direction == "scalar" or value is None or isinstance(value, bool):
        return value
    if declared.is_written:
        return as_output(kernel.name, name, value)
    return as_arrays(kernel.name, **{name: value})[0]


def _is_empty(bound: Bound) -> bool:
    return any(size == 0 for size in bound.axes.values())


def check_machine(kernel: str, argument: str, backend: Backend, chosen: Backend) -> None:
    """Raise ArgumentError unless `backend` is a device of the chosen machine."""
    if chosen.on_device(backend.ordinal) is not backend:
        raise ArgumentError(
            f"{kernel}: {argument} is on {backend.describe()}, but the call runs on {chosen.describe()}; "
            "create it there, or go through to_numpy()"
        )


def _check_places(bound: Bound) -> tuple[Backend, bool]:
    """Choose the device of a call and whether its results stay there: that of its device arrays, else the current one.

    ArgumentError for arrays of another machine than the chosen one, several devices, overlaps and mixtures.
    """
    arrays = {a.name: bound.given(a) for a in bound.present if bound.given(a) is not True}
    on_device = {name: array for name, array in arrays.items() if isinstance(array, DeviceArray)}
    name = bound.kernel.name
    if not on_device:
        return current(), False
    first, backend = next((argument, array.backend) for argument, array in on_device.items())
    chosen = _scope.get().backend
    for argument, array in on_device.items():
        if chosen is not None:
            check_machine(name, argument, array.backend, chosen)
        if array.backend is not backend:
            raise ArgumentError(
                f"{name}: {argument} is on {array.backend.describe()}, but {first} on {backend.describe()}; "
                "bring them to one device with ptxrt.to_device(..., device=)"
            )
    for argument in (a.name for a in bound.kernel.written if a.name in arrays):
        array = arrays[argument]
        if argument not in on_device:
            raise ArgumentError(
                f"{name}: {argument} is a NumPy array, but {first} is on the device; pass a device array"
            )
        if not array.writeable:
            raise ArgumentError(f"{name}: {argument} is read-only; pass an array that can be written")
        for other, its in on_device.items():
            if other != argument and Box.of(array).overlaps(Box.of(its), its.address - array.address):
                raise ArgumentError(f"{name}: {argument} and {other} overlap in memory; pass separate arrays")
    return backend, True


def _on_device(argument: Argument, array, backend: Backend, queue: Queue) -> DeviceArray | None:
    """Bring an input to the device. If the kernel takes any strides, repeated elements of a NumPy array are uploaded
    once."""
    if array is None or isinstance(array, DeviceArray):
        return array
    if argument.placement.strides != "all" or argument.is_written:
        return upload(backend, array, queue)
    once = array[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in array.strides)]
    return upload(backend, once, queue).broadcast_to(array.shape)


def _output_buffer(bound: Bound, argument, backend: Backend, queue: Queue) -> DeviceArray | None:
    asked = bound.given(argument)
    if asked is None or isinstance(asked, DeviceArray):
        return asked
    return allocate(backend, bound.shape_of(argument), bound.format_of(argument).dtype, queue)


def plan_launch(bound: Bound, backend: Backend) -> Plan:
    """Load the module, compare declaration and entry, and size the grid; nothing is allocated or launched."""
    kernel = bound.kernel
    module = backend.module(bound.unit)
    entry = checked_entry(kernel, module, bound.entry)
    facts = module.facts(bound.entry)
    grid = grid_of(bound, facts.tile)
    half = half_of(bound.entry)
    if (
        kernel.halved
        and half in module.entries
        and suits_halves(bound, grid, facts, module.facts(half), backend.multiprocessors)
    ):
        entry = checked_entry(kernel, module, half)
        facts = module.facts(entry.name)
        grid = grid_of(bound, facts.tile)
    template = bytearray(entry.param_bytes)
    arrays, scalars = [], []
    for index, (parameter, param) in enumerate(zip(kernel.parameters, entry.params)):
        argument = kernel.by_name.get(parameter.name)
        if parameter.kind == "scalar":
            scalars.append(Scalar(kernel, argument, param.offset))
        elif parameter.kind in ("axis", "stride"):
            value = (
                bound.axes[parameter.name] if parameter.kind == "axis" else bound.strides_of(argument)[parameter.dim]
            )
            template[param.offset : param.offset + param.size] = _integer_bytes(kernel.name, index, param, value)
        elif bound.given(argument) is not None:
            arrays.append((argument.name, param.offset, argument.is_written, _box(bound, argument)))
    # A plan outlives the call and must not hold its arrays.
    bytes_moved, axes = bound.bytes_moved, bound.axes

    def describe(values: tuple) -> Launch:
        numbers = {scalar.name: scalar_value(kernel, scalar.argument, value) for scalar, value in zip(scalars, values)}
        return Launch(
            *(kernel.name, backend.name, backend.describe(), entry.name, grid, facts.threads, facts.shared_bytes),
            *(bytes_moved, kernel.count_flops(axes, numbers), module.digest),
        )

    plan = Plan(backend, entry, grid, facts.threads, facts.shared_bytes, bytes(template), arrays, scalars, describe)
    inputs = {name: None for name in bound.inputs}
    outputs = {
        name: output if output is None else True if output is True else output.dtype
        for name, output in bound.outputs.items()
    }
    plan.bound = Bound(kernel, bound.axes, bound.format, inputs, outputs, {})
    return plan


def _box(bound: Bound, argument: Argument) -> Box:
    """How the elements of an array lie."""
    array = bound.given(argument)
    if isinstance(array, DeviceArray):
        return Box.of(array)
    return Box((), prod(bound.shape_of(argument)) * bound.format_of(argument).itemsize)


def grid_of(bound: Bound, tile: tuple[int, int, int]) -> tuple[int, int, int]:
    """Blocks along x, y, z that cover the declared axes by tiles; ArgumentError beyond the hardware's limits."""
    sizes = [dim.size(bound.axes) for dim in bound.kernel.grid]
    blocks = [-(-size // covered) for size, covered in zip(sizes, tile)]
    if bound.kernel.packed:
        blocks[1] += max(bound.axes["sequences"] - bound.axes["batch"], 0)
    for axis, dim, count, limit in zip("xyz", bound.kernel.grid, blocks, GRID_LIMITS):
        if count > limit:
            raise ArgumentError(
                f"{bound.kernel.name}: {dim} is {dim.size(bound.axes)}, which takes {count} blocks along {axis}, "
                f"where {limit} are allowed; split the call"
            )
    return tuple(blocks + [1] * (3 - len(blocks)))


def suits_halves(bound: Bound, grid: tuple[int, int, int], whole: Facts, half: Facts, multiprocessors: int) -> bool:
    """Return whether a launch with `grid` whole blocks should take half blocks instead."""
    return takes_halves(prod(grid), prod(grid_of(bound, half.tile)), whole, half, multiprocessors)


# The time of a round of blocks beyond that of their rows, in rows: prologue, epilogue, and latencies that few warps do
# not hide. The recorded speeds of launches depend on this number and on takes_halves(): after a change of one of them a
# test asks for a new record (`make speed RECORD=1`).
_ROUND = 64


def takes_halves(blocks: int, halves: int, whole: Facts, half: Facts, multiprocessors: int) -> bool:
    """Return whether `halves` half blocks are faster than `blocks` whole ones.

    Half blocks are faster in three cases. As many half blocks as whole ones cover the problem, with fewer empty rows.
    Or each multiprocessor would have at most one whole block. Or the busiest multiprocessor has less work with half
    blocks. A half block that covers as many elements as a whole one is never faster. The choice changes no result,
    except which rows a NaN or an infinity in V reaches although they do not see its key.
    """

    def longest(count: int, facts: Facts) -> int:
        """The time of the multiprocessor with most blocks, in rows; its blocks run in rounds of as many as it holds."""
        most = -(-count // multiprocessors)
        return most * prod(facts.tile) + _ROUND * -(-most // facts.min_blocks)

    return prod(half.tile) < prod(whole.tile) and (
        blocks <= multiprocessors or halves == blocks or longest(halves, half) < longest(blocks, whole)
    )


# PTX types that can pass integers, and those that can pass floats.
_INTEGERS = {f"{kind}{bits}" for kind in "sub" for bits in (8, 16, 32, 64)}
_FLOATS = {"f16", "f32", "f64", "b16", "b32", "b64"}


def checked_entry(kernel: Declaration, module: Module, name: str) -> Entry:
    """Return the entry if its parameter list is the declared one; AbiError with both lists otherwise."""
    entry = module.entries.get(name)
    if entry is None:
        names = ", ".join(module.entries) or "none"
        raise AbiError(
            f"{module.name} holds no entry {name}, which {kernel.name} declares; it holds {names}; {remedy()}"
        )
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
    if declared.kind == "stride":
        return param.size == 8 and param.type in _INTEGERS
    kinds = _FLOATS if declared.format.kind == "float" else _INTEGERS
    return param.size == declared.format.itemsize and param.type in kinds


_CODES = {1: "b", 2: "h", 4: "i", 8: "q"}


def _integer_bytes(kernel: str, index: int, param: Param, value: int) -> bytes:
    try:
        if param.size > 4 or value <= LARGEST_SIZE:
            return struct.pack("<" + _CODES[param.size], value)
    except struct.error:
        pass
    most = f"at most {LARGEST_SIZE} is passed in 32 bits" if param.size == 4 else "its sizes are smaller"
    raise ArgumentError(
        f"{kernel}: the size {value} does not fit parameter {index} of {param.size} bytes, {most}; split the call"
    )
