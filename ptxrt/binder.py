"""Binding: check a call against its declaration, solve for the sizes of its axes, choose its entry. It has no side
effects, and every mismatch is an ArgumentError.

Messages are made from the declaration: they name the kernel and the argument, what was passed, what is declared and
what to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NoReturn

import numpy as np

from .declaration import Argument, Declaration
from .dims import Dim, DimensionError, multiple_of
from .errors import ArgumentError
from .formats import Format, dtype_of

# Kernels load and store 16 bytes at a time; a view of another library's memory may start anywhere.
ALIGNMENT = 16


@dataclass(frozen=True)
class Bound:
    """A call whose arguments fit the declaration; nothing is allocated or launched yet.

    inputs: arrays by name, None if omitted. outputs: by name an array to write to, True to allocate, None to omit.
    """

    kernel: Declaration
    axes: Mapping[str, int]
    format: Format | None
    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]
    scalars: Mapping[str, Any]

    @cached_property
    def unit(self) -> str:
        """The compiled module that holds the entry."""
        return self.kernel.unit_name(self.axes)

    @cached_property
    def entry(self) -> str:
        """The entry that runs."""
        return self.kernel.entry_name(self.axes, self.format)

    def shape_of(self, argument: Argument) -> tuple[int, ...]:
        """The actual shape of a declared array."""
        return argument.shape.sizes(self.axes)

    def format_of(self, argument: Argument) -> Format:
        """The format of an argument in this call."""
        return self.format if argument.is_union else argument.formats[0]

    @property
    def present(self) -> tuple[Argument, ...]:
        """The arrays that take part: those that are not omitted."""
        return tuple(a for a in self.kernel.arrays if self.given(a) is not None)

    def given(self, argument: Argument):
        """The array of an argument; True for an output to allocate, None for an omitted argument."""
        return (self.inputs if argument.is_given else self.outputs)[argument.name]

    @cached_property
    def bytes_moved(self) -> int:
        """Return the bytes of all arrays that take part, which is the least that the kernel must move.

        Repeated elements count once. Arrays that are touched in parts do not count: the contents of other arrays decide
        how much of them is touched.
        """
        return sum(self._distinct(a) * self.format_of(a).itemsize for a in self.present if not a.placement.in_parts)

    def _distinct(self, argument: Argument) -> int:
        """How many elements an array has in memory."""
        shape, strides = self.shape_of(argument), getattr(self.given(argument), "strides", None)
        return prod(size for size, stride in zip(shape, strides or shape) if stride or not size)

    def strides_of(self, argument: Argument) -> tuple[int, ...]:
        """The strides, in elements, that the kernel receives for an argument; zeros if it is omitted."""
        array = self.given(argument)
        if array is None:
            return (0,) * len(argument.strides)
        sizes = self.shape_of(argument)
        if array is True:
            return tuple(prod(sizes[i + 1 :]) for i in range(len(argument.strides)))
        return tuple(stride // array.dtype.itemsize for stride in array.strides[: len(argument.strides)])

    @cached_property
    def flops(self) -> int | None:
        """Floating-point operations as declared, or None."""
        return self.kernel.count_flops(self.axes, self.scalars)


def bind(kernel: Declaration, arrays: Sequence[Any], dtype, named: Mapping[str, Any]) -> Bound:
    """Fit positional inputs and named arguments to a declaration; see `Kernel.bind`."""
    by_name = _by_name(kernel, arrays, named)
    inputs = {a.name: _input(kernel, a, by_name) for a in kernel.inputs}
    outputs = {a.name: _output(kernel, a, by_name) for a in kernel.outputs}
    scalars = {a.name: _scalar(kernel, a, by_name) for a in kernel.scalars}
    member = _choose_format(kernel, inputs, outputs, dtype)
    axes = _Axes(kernel, inputs, outputs, by_name).solve()
    bound = Bound(kernel, axes, member, inputs, outputs, scalars)
    for a in kernel.inputs:
        if a.below:
            _check_indices(kernel, a, inputs[a.name], axes[a.below])
    for a in kernel.outputs:
        array = outputs[a.name]
        if array is not None and array is not True and tuple(array.shape) != bound.shape_of(a):
            sizes = ", ".join(f"{axis}={axes[axis]}" for axis in a.shape.axes)
            _fail(
                kernel,
                a,
                f"has shape {list(array.shape)}, not {list(bound.shape_of(a))} ({sizes})",
                "Pass an array of that shape.",
            )
    return bound


def _fail(kernel: Declaration, argument: Argument, found: str, advice: str) -> NoReturn:
    raise ArgumentError(f"{kernel.name}: {argument.name} {found}; declared as {argument}. {advice}")


def _by_name(kernel: Declaration, arrays: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments by name; ArgumentError for surplus, repeated and unknown ones."""
    if len(arrays) > len(kernel.inputs):
        raise ArgumentError(
            f"{kernel.name} takes {len(kernel.inputs)} inputs, {len(arrays)} came; declared: {kernel.declaration}"
        )
    values = dict(zip((a.name for a in kernel.inputs), arrays))
    twice = values.keys() & named.keys()
    unknown = named.keys() - kernel.by_name.keys() - set(kernel.axes)
    if twice or unknown:
        what = f"{sorted(twice)} twice" if twice else f"{sorted(unknown)}, which it does not know"
        raise ArgumentError(f"{kernel.name} was given {what}; declared: {kernel.declaration}")
    return {**values, **named}


def _input(kernel: Declaration, a: Argument, values: Mapping[str, Any]):
    array = values.get(a.name)
    if array is None:
        if a.optional:
            return None
        _fail(kernel, a, "is missing", f"Call {kernel.declaration}.")
    if not _is_array(array):
        _fail(kernel, a, f"is a {type(array).__name__}", "Pass a NumPy array or a device array.")
    _check_array(kernel, a, array)
    if a.is_written:
        _check_writeable(kernel, a, array)
    return array


def _output(kernel: Declaration, a: Argument, values: Mapping[str, Any]):
    """An array to write to, True to allocate, None to omit."""
    output = values.get(a.name, None if a.optional else True)
    if output is None or output is False:
        if not a.optional:
            _fail(kernel, a, "is omitted", "It is no optional output: leave it out to have it allocated.")
        return None
    if output is True:
        return True
    if not _is_array(output):
        _fail(
            kernel, a, f"is a {type(output).__name__}", "Pass an array to write to, True to allocate or None to omit."
        )
    _check_array(kernel, a, output)
    _check_writeable(kernel, a, output)
    return output


def _check_indices(kernel: Declaration, a: Argument, array, size: int) -> None:
    """Check that the numbers of a NumPy array are below `size`; those of a device array are not read."""
    if isinstance(array, np.ndarray) and array.size and array.max() >= size:
        _fail(kernel, a, f"goes up to {array.max()}, {a.below} is {size}", "Pass numbers below.")


def _check_writeable(kernel: Declaration, a: Argument, array) -> None:
    """Check that a NumPy array that is written is writeable; launch.py checks device arrays."""
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        _fail(kernel, a, "is read-only", "Pass an array that can be written.")


def _is_array(value) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape")


def _check_array(kernel: Declaration, a: Argument, array) -> None:
    """Check the dtype, rank, alignment and strides of one array."""
    if not any(f.holds(array.dtype) for f in a.formats):
        *others, last = dict.fromkeys(f.dtype.name for f in a.formats)
        accepted = f"{', '.join(others)} or {last}" if others else last
        _fail(kernel, a, f"is {array.dtype} {list(array.shape)}", f"Convert it to {accepted}.")
    rank, declared_rank = len(array.shape), len(a.shape)
    if rank != declared_rank:
        found = f"has shape {list(array.shape)}, {rank} dimension{'s' * (rank != 1)} where {declared_rank} are needed"
        _fail(kernel, a, found, "Reshape it.")
    # NumPy arrays may have any layout, because uploading copies them; a device array is used in place.
    alignment = ALIGNMENT if a.placement.aligned else array.dtype.itemsize
    if getattr(array, "address", 0) % alignment:
        found = f"starts at {array.address:#x}, which is no multiple of {alignment} bytes"
        _fail(kernel, a, found, "Copy it to memory of its own first.")
    if a.strides or not getattr(array, "is_contiguous", True):
        _check_strides(kernel, a, array, alignment)


def _check_strides(kernel: Declaration, a: Argument, array, alignment: int) -> None:
    """Check that the strides are supported and that rows start at multiples of `alignment` bytes."""
    itemsize, shape = array.dtype.itemsize, tuple(array.shape)
    strides = array.strides if hasattr(array, "address") else row_major_strides(shape, itemsize)
    found = f"{list(shape)} has strides of {list(strides)} bytes"
    axes = list(zip(shape, strides))
    free_axes, rest = axes[: len(a.strides)], axes[len(a.strides) :]
    if 0 in shape:
        return
    if not a.strides or any(size > 1 and stride != itemsize for size, stride in rest):
        advice = (
            "Pass its copy(), which is in row-major order."
            if not a.strides
            else "Pass its copy(), whose last axis lies without gaps."
        )
        _fail(kernel, a, found, advice)
    if any(size > 1 and (stride < 0 or stride % alignment) for size, stride in free_axes):
        _fail(kernel, a, found, f"Copy it so that they are multiples of {alignment}, from 0 on.")
    if a.is_written and _repeats(axes, itemsize):
        _fail(kernel, a, found, "Pass an array whose elements do not share memory.")


def row_major_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The strides in bytes of an array without gaps whose last axis moves fastest."""
    strides, step = [], itemsize
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _repeats(axes: Sequence[tuple[int, int]], itemsize: int) -> bool:
    """Return whether elements of (size, stride) axes may share bytes: whether the stride of an axis is smaller than
    the extent of the axes within it.
    """
    covered = itemsize
    for size, stride in sorted(axes, key=lambda axis: axis[1]):
        if size > 1 and stride < covered:
            return True
        covered += (size - 1) * stride
    return False


def _scalar(kernel: Declaration, a: Argument, values: Mapping[str, Any]):
    """Return a NumPy scalar of the declared format; ArgumentError if that format cannot hold the number."""
    return scalar_value(kernel, a, values.get(a.name, a.default))


def scalar_value(kernel: Declaration, a: Argument, value: Any):
    """A number as the NumPy scalar that its parameter takes."""
    if value is None:
        _fail(kernel, a, "is missing", f"Pass {a.name}=...")
    dtype = a.formats[0].dtype
    try:
        number = value.item() if isinstance(value, (np.generic, np.ndarray)) else value
        result = _float_of(dtype, float(number)) if dtype.kind == "f" else _integer_of(dtype, number)
    except (TypeError, ValueError, OverflowError):
        _fail(kernel, a, f"is {value!r}", f"Pass a number that {dtype} holds.")
    if a.choices and result not in a.choices:
        _fail(kernel, a, f"is {value!r}", "Pass one of these numbers.")
    return result


def _float_of(dtype: np.dtype, number: float):
    with np.errstate(over="ignore"):
        rounded = dtype.type(number)
    if np.isinf(rounded) and not np.isinf(number):
        raise OverflowError
    return rounded


def _integer_of(dtype: np.dtype, number):
    limits = np.iinfo(dtype)
    if int(number) != number or not limits.min <= int(number) <= limits.max:
        raise ValueError
    return dtype.type(int(number))


def _choose_format(kernel: Declaration, inputs: Mapping[str, Any], outputs: Mapping[str, Any], dtype) -> Format | None:
    """Return the member of the unions that this call uses: the format of its arrays, else that of `dtype`."""
    chosen: Format | None = None
    chooser = ""
    for a in kernel.arrays:
        array = (inputs if a.is_given else outputs)[a.name]
        if not a.is_union or array is None or array is True:
            continue
        member = next(f for f in a.formats if f.holds(array.dtype))
        if chosen is not None and member is not chosen:
            _fail(kernel, a, f"is {array.dtype}, but {chooser} is {chosen.dtype}", "Convert them to one dtype.")
        chosen, chooser = member, a.name
    if dtype is not None:
        try:
            asked = dtype_of(dtype)
        except (TypeError, ValueError):
            raise ArgumentError(
                f"{kernel.name}: dtype is {dtype!r}, which NumPy does not know; pass one of its dtypes"
            ) from None
        member = next((f for f in kernel.unions if f.holds(asked)), None)
        if member is None or (chosen is not None and member is not chosen):
            choice = chosen.dtype.name if chosen else ", ".join(f.dtype.name for f in kernel.unions) or "nothing"
            raise ArgumentError(
                f"{kernel.name}: dtype is {asked}; the call allows {choice}. Declared: {kernel.declaration}"
            )
        chosen = member
    if chosen is None and kernel.unions:
        choice = ", ".join(f.dtype.name for f in kernel.unions)
        raise ArgumentError(f"{kernel.name}: no argument says which format to write; pass dtype= one of {choice}")
    return chosen


class _Axes:
    """A solver for the axes of one call, from the axes given by name, the inputs' shapes, fixed axes, derived axes and
    the shapes of given outputs.
    """

    def __init__(
        self, kernel: Declaration, inputs: Mapping[str, Any], outputs: Mapping[str, Any], values: Mapping[str, Any]
    ):
        self.kernel = kernel
        self.arrays = {**inputs, **{name: array for name, array in outputs.items() if array is not True}}
        self.axes: dict[str, int] = {}
        self.origin: dict[str, str] = {}  # axis -> the argument that fixed it, for messages
        for axis in kernel.axes:
            if axis in values:
                self._give(axis, values[axis])

    def _give(self, axis: str, size) -> None:
        if not isinstance(size, (int, np.integer)) or isinstance(size, bool) or size < 0:
            raise ArgumentError(f"{self.kernel.name}: the axis {axis} is {size!r}; pass a whole number of at least 1")
        self.axes[axis], self.origin[axis] = int(size), "the call"

    def solve(self) -> dict[str, int]:
        """The sizes of all axes, checked against every input, the variants and all quotients."""
        kernel, axes = self.kernel, self.axes
        self._solve_arrays(kernel.inputs)
        for axis, size in kernel.fixed.items():
            if axes.setdefault(axis, size) != size:
                raise ArgumentError(
                    f"{kernel.name}: the axis {axis} is {axes[axis]} in {self.origin[axis]}; it is always {size}"
                )
        self._derive()
        if any(axis not in axes for axis in kernel.axes):
            self._solve_arrays(kernel.outputs)
        missing = [axis for axis in kernel.axes if axis not in axes]
        if missing:
            words = ", ".join(f"{axis}=..." for axis in missing)
            raise ArgumentError(
                f"{kernel.name}: no array fixes {', '.join(missing)}; pass {words}. Declared: {kernel.declaration}"
            )
        self._check_variants()
        for axis, step in kernel.multiples.items():
            if axes[axis] % step:
                self._fail_size(axis, step)
        for a in kernel.arrays:
            for dim in a.shape.dims:
                try:
                    dim.size(axes)
                except DimensionError:
                    self._fail_multiple(dim, a)
        empty = [axis for axis in kernel.axes if axes[axis] == 0]
        if empty and not all(0 in a.shape.sizes(axes) for a in kernel.outputs):
            source = self.origin[empty[0]]
            raise ArgumentError(
                f"{kernel.name}: {empty[0]} is 0 in {source}, but the result is not empty; pass at least 1"
            )
        return axes

    def _derive(self) -> None:
        """Fix the axes that follow from those known so far, and check those that are given."""
        axes = self.axes
        for axis, size_of in self.kernel.derived.items():
            try:
                size = size_of(axes)
            except KeyError:  # an axis that it depends on is missing, which `solve` reports
                continue
            if axes.setdefault(axis, size) != size:
                raise ArgumentError(
                    f"{self.kernel.name}: the axis {axis} is {axes[axis]} in {self.origin[axis]}; "
                    f"it must be {size} here"
                )
            self.origin.setdefault(axis, "the sizes of the arrays")

    def _solve_arrays(self, arguments: Sequence[Argument]) -> None:
        """Solve for the axes that the shapes of given arrays determine, and check the other dimensions."""
        dims = [
            (a, i, dim) for a in arguments if self.arrays.get(a.name) is not None for i, dim in enumerate(a.shape.dims)
        ]
        # Dimensions of a single axis come first, so that products and quotients are checked against them.
        pending = sorted(dims, key=lambda entry: not entry[2].is_axis)
        progress = True
        while pending and progress:
            waiting = [entry for entry in pending if not self._settle(*entry)]
            progress, pending = len(waiting) < len(pending), waiting

    def _settle(self, a: Argument, i: int, dim: Dim) -> bool:
        """Check one dimension or solve it for its one unknown axis; return False if other axes must be known first."""
        size = int(self.arrays[a.name].shape[i])
        if all(axis in self.axes for axis in dim.axes):
            self._check_size(a, i, dim, size)
            return True
        try:
            solved = dim.solve(size, self.axes)
        except DimensionError as error:
            _fail(
                self.kernel, a, f"has shape {list(self.arrays[a.name].shape)}: {error}", "Give it a size that divides."
            )
        if solved:
            axis, value = solved
            self.axes[axis], self.origin[axis] = value, a.name
        return bool(solved)

    def _check_size(self, a: Argument, i: int, dim: Dim, size: int) -> None:
        """Check that a dimension whose axes are all known has the size that follows from them."""
        try:
            expected = dim.size(self.axes)
        except DimensionError:
            self._fail_multiple(dim, a)
        if expected != size:
            known = ", ".join(f"{axis} is {self.axes[axis]} in {self.origin[axis]}" for axis in dim.axes)
            reason = f", since {known}" if known else ""
            found = (
                f"has shape {list(self.arrays[a.name].shape)}, where dimension {i} ({dim}) must be {expected}{reason}"
            )
            _fail(self.kernel, a, found, "Pass arrays that agree.")

    def _fail_multiple(self, dim: Dim, a: Argument) -> NoReturn:
        """Raise for an axis that does not divide as `a` needs, naming the sizes that would."""
        axis = dim.axes[0]
        shapes = (x.shape for x in self.kernel.arrays)
        step = multiple_of(axis, shapes) if len(dim.axes) == 1 else dim.denominator
        self._fail_size(axis, step, f", as {a.name} is declared {a}")

    def _fail_size(self, axis: str, step: int, reason: str = "") -> NoReturn:
        """Raise for an axis that is no multiple of `step`, naming the nearest sizes."""
        size = self.axes[axis]
        below, above = size // step * step, -(-size // step) * step
        advice = f"Pad it to {above}" + (f" or cut it to {below}." if below else ".")
        raise ArgumentError(
            f"{self.kernel.name}: {axis} is {size} in {self.origin[axis]}; it must be a multiple of {step}{reason}. "
            f"{advice}"
        )

    def _check_variants(self) -> None:
        kernel = self.kernel
        if kernel.unit_for(self.axes):
            return
        for words, there in kernel.variants.items():
            axes = words.split()
            found = ", ".join(f"{axis} is {self.axes[axis]} in {self.origin[axis]}" for axis in axes)
            choices = [values if isinstance(values, tuple) else (values,) for values in there]
            sizes = [self.axes[axis] for axis in axes]
            above = [choice for choice in choices if all(value >= size for value, size in zip(choice, sizes))]
            if above and (kernel.filled or tuple(sizes) in choices):
                continue
            compiled = ", ".join(" x ".join(map(str, choice)) for choice in choices)
            nearest = " x ".join(map(str, above[0] if above else choices[-1]))
            advice = f"pad it with zeros to {nearest}" if above else f"the largest is {nearest}"
            raise ArgumentError(f"{kernel.name}: {found}; compiled for {compiled}. Nearest: {advice}.")
