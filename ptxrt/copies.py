"""Copies of device arrays and writes to them: `copy`, `astype` and `a[...] = x` of a DeviceArray, and `zeros`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

from .array import (
    DeviceArray,
    allocate,
    as_arrays,
    checked_array,
    empty,
    overlap,
    recorded_use,
    refuse_recording,
    upload,
)
from .errors import ArgumentError
from .formats import bf16, format_of
from .ops.cast import cast
from .ops.copy import copy_bytes

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from .typing import StreamLike

# The most blocks of a grid along y and z, and the most bytes of the pattern that fills an array.
_GRID, _PATTERN = 65535, 4096
_WRITES = "an array would be written to from the host, which is no launch"


def zeros(
    shape: SupportsIndex | Sequence[SupportsIndex], dtype: DTypeLike = np.float32, *, device: int | None = None
) -> DeviceArray:
    """Allocate a device array of zeros on the current machine, or on device number `device` of it."""
    checked_array("zeros", shape, dtype)
    array = empty(shape, dtype, device=device)
    assign(array, 0)
    return array


def copy(array: DeviceArray, stream: StreamLike = None) -> DeviceArray:
    """Copy the elements to new memory of the same device, in row-major order, without waiting."""
    target = allocate(array.backend, array.shape, array.dtype, array.backend.queue(stream))
    move(array, target, stream)
    return target


def astype(array: DeviceArray, dtype: DTypeLike, stream: StreamLike = None) -> DeviceArray:
    """Convert to float32, float16 or bfloat16, rounded to nearest even, in new memory in row-major order."""
    try:
        member = format_of(dtype)
    except TypeError:
        member = None
    if np.dtype(array.dtype) == (None if member is None else member.dtype):
        return copy(array, stream)
    if member is None or format_of(array.dtype) is None:
        words = f"{array!r} to {dtype!r}; devices convert float32, float16 and bfloat16"
        raise ArgumentError(f"astype: {words}, the host all others: ptxrt.to_device(x.to_numpy().astype(...))")
    target = allocate(array.backend, array.shape, member.dtype, array.backend.queue(stream))
    source = array if all(stride >= 0 for stride in array.strides) else copy(array, stream)
    for x, y in _pieces(source, target, 4):
        cast(x, **{f"y_{member}": y}, stream=stream)
    return target


def assign(target: DeviceArray, value: Any) -> None:
    """Write an array that broadcasts, or a number, to every element of `target`; see `DeviceArray.__setitem__`."""
    if not target.writeable:
        raise ArgumentError(f"{target!r} is read-only; write to the array that it was made of, or to a copy()")
    if type(value) is np.ndarray and value.shape == target.shape and value.dtype == target.dtype:
        if target.is_contiguous and value.dtype.isnative:  # most writes
            refuse_recording(_WRITES)
            _write(target, value)
            return
    elif isinstance(value, (bool, int, float, np.generic)) and not isinstance(value, np.void):
        value = _number(target, value)
    (value,) = as_arrays("a[...] = x", x=value)
    if isinstance(value, np.ndarray):
        refuse_recording(_WRITES)
        value = _converted(target, value)
        extra = value.ndim - target.ndim
        if target.is_contiguous and value.shape == (1,) * extra + target.shape:
            _write(target, value)
            return
        value = _uploaded(target, value)
    elif value.dtype != target.dtype:
        raise ArgumentError(f"a[...] = x: x is {value!r}, a {target.dtype}; write x.astype({target.dtype.name!r})")
    if value.backend is not target.backend:
        raise ArgumentError(
            f"a[...] = x: x is on {value.backend.describe()}, a on {target.backend.describe()}; bring "
            "x there by to_device"
        )
    extra = value.ndim - target.ndim
    if extra > 0 and all(size == 1 for size in value.shape[:extra]):
        value = value.reshape(value.shape[extra:])
    value = value.broadcast_to(target.shape)
    if (value.memory is target.memory and value.memory.nbytes) or overlap(value, target):
        value = copy(value)
    move(value, target)


def _number(target: DeviceArray, value: Any) -> np.ndarray:
    """Return a number in the array's dtype; ArgumentError if the dtype is not numeric, is of a lesser kind, or cannot
    hold the number."""
    with np.errstate(over="ignore", invalid="ignore"):
        try:
            kinds = [_KINDS.index(_kind(dtype)) for dtype in (np.asarray(value).dtype, target.dtype)]
            if kinds[0] > kinds[1] and not (kinds == [1, 0] and value in (0, 1)):
                raise TypeError("it is of another kind")
            exact = isinstance(value, np.generic) and value.dtype.kind in "iu"  # NumPy would drop bits of others
            return np.asarray(int(value) if exact else value, target.dtype)
        except (TypeError, ValueError, OverflowError) as error:
            raise ArgumentError(
                f"a[...] = {value!r}: {target.dtype} holds no such number ({error}); write one that it holds"
            ) from error


# Kinds of numbers, each of which holds those before.
_KINDS = "bifc"


def _kind(dtype: np.dtype) -> str:
    """Return the kind of numbers of a dtype, of _KINDS: floats that NumPy does not know are floats, too."""
    kind = {"u": "i", "V": "f"}.get(dtype.kind, dtype.kind)
    if kind not in _KINDS:
        raise TypeError(f"{dtype} is no dtype of numbers")
    return kind


def _converted(target: DeviceArray, value: np.ndarray) -> np.ndarray:
    """Convert an array of the host to the target's dtype as NumPy does within a kind."""
    if value.dtype == target.dtype:
        return value
    is_narrower = value.dtype.kind == "c" != target.dtype.kind  # ml_dtypes would drop the imaginary parts
    of_kind = np.can_cast(value.dtype, target.dtype, "same_kind") or _are_floats(value.dtype, target.dtype)
    if is_narrower or not of_kind:
        raise ArgumentError(f"a[...] = x: x is {value.dtype}, a {target.dtype}; write x.astype({target.dtype.name!r})")
    with np.errstate(over="ignore", invalid="ignore"):
        return value.astype(target.dtype)


def _write(target: DeviceArray, value: np.ndarray) -> None:
    """Copy an array of the host to a row-major target of its size and dtype, in the current stream."""
    if not value.nbytes:
        return
    backend, memory = target.backend, target.memory
    queue = backend.queue()
    crossing = memory.writer is not queue or memory.readers  # else there is nothing to wait for or to record
    if crossing:
        memory.acquire(queue, True)
    with recorded_use(backend, queue):
        backend.write(target.address, value if value.flags.c_contiguous else np.ascontiguousarray(value), queue)
        if crossing:
            memory.release(queue, backend.mark(queue), True)


def _uploaded(target: DeviceArray, value: np.ndarray) -> DeviceArray:
    """Upload an array of the target's dtype to the target's device.

    A single number fills a row-major target here. The result is then a part of the target.
    """
    if (
        value.size == 1 and target.size > 1 and target.is_contiguous
    ):  # fills by a pattern of many values, so that a thread moves 16 bytes
        count = max(1, min(_PATTERN // value.dtype.itemsize, target.size))
        whole = upload(target.backend, np.full(count, value.reshape(())))
        runs, rest = divmod(target.size, count)
        flat = target.reshape(target.size)
        if runs:
            move(whole.broadcast_to((runs, count)), flat[: runs * count].reshape(runs, count))
        if rest:
            move(whole[:rest], flat[runs * count :])
        return flat[:1].reshape((1,) * target.ndim)  # the caller writes the same values there again
    return upload(target.backend, value)


def _are_floats(*dtypes) -> bool:
    """Return whether all are float dtypes. NumPy's kind of bfloat16 is not "f"."""
    return all(dtype.kind == "f" or dtype == bf16.dtype for dtype in dtypes)


def move(source: DeviceArray, target: DeviceArray, stream: StreamLike = None) -> None:
    """Copy elements of one type between arrays of one shape on one device that share no memory."""
    if not source.nbytes:
        return
    size = source.dtype.itemsize
    for x, y in _pieces(_in_bytes(source), _in_bytes(target), 4, size):
        copy_bytes(x, y=y, stream=stream)


def _in_bytes(array: DeviceArray) -> DeviceArray:
    """The array with its elements as a last axis of bytes."""
    strides = (*array.strides, 1)
    return DeviceArray(
        array.memory, array.address, (*array.shape, array.dtype.itemsize), np.dtype(np.uint8), strides, array.writeable
    )


def _pieces(
    source: DeviceArray, target: DeviceArray, most: int, kept: int = 1
) -> Iterator[tuple[DeviceArray, DeviceArray]]:
    """Cut both arrays into pairs of views with `most` axes, which kernels take. Axes that lie like one axis are joined;
    the host loops over those that are left."""
    axes = [list(axis) for axis in zip(source.shape, source.strides, target.strides) if axis[0] != 1]
    at = [source.address, target.address]
    for axis in axes:
        if axis[1] < 0 and axis[2] < 0 or (axis[1] < 0 and axis[2] == 0):  # both run backward: start at the other end
            at = [address + (axis[0] - 1) * stride for address, stride in zip(at, axis[1:])]
            axis[1:] = [-axis[1], -axis[2]]
    walked = [axis for axis in axes if axis[1] < 0 or axis[2] < 0]
    axes = [axis for axis in axes if axis not in walked]
    axes.sort(key=lambda axis: -axis[2])
    joined: list[list[int]] = []
    for size, *strides in axes:
        if joined and all(outer == size * inner for outer, inner in zip(joined[-1][1:], strides)):
            joined[-1] = [joined[-1][0] * size, *strides]
        else:
            joined.append([size, *strides])
    # The last axis has the smallest stride in the target. The longest other axis counts rows, the next two are axes of
    # the grid.
    last = joined.pop() if joined else [1, source.dtype.itemsize, target.dtype.itemsize]
    joined.sort(key=lambda axis: -axis[0])
    grid, walked = joined[: most - 1], walked + joined[most - 1 :]
    for axis in [axis for axis in grid[1:] if axis[0] > _GRID]:
        grid.remove(axis)
        walked.append(axis)
    grid = [[1, 0, 0]] * (most - 1 - len(grid)) + grid[::-1]
    shape = tuple(axis[0] for axis in (*grid, last))
    strides = [tuple(axis[side] for axis in (*grid, last)) for side in (1, 2)]
    for place in np.ndindex(*(axis[0] for axis in walked)):
        addresses = [
            address + sum(i * axis[side] for i, axis in zip(place, walked))
            for side, address in ((1, at[0]), (2, at[1]))
        ]
        yield (
            DeviceArray(source.memory, addresses[0], shape, source.dtype, strides[0], source.writeable),
            DeviceArray(target.memory, addresses[1], shape, target.dtype, strides[1], target.writeable),
        )
