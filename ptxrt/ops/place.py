"""The device of a call of a public function, and conversions to arrays that kernels can load."""

from __future__ import annotations

import math

from ..array import DeviceArray, allocate, to_device, upload
from ..errors import ArgumentError
from ..formats import Format
from .cast import cast
from .quantized import Packed

# Kernels load 16 bytes at a time: rows of 16-bit elements start at multiples of this many.
ROW_UNIT = 8


class Place:
    """The place of a call: the device of its device arrays. Without device arrays it is the current machine, and
    results become NumPy arrays."""

    def __init__(self, arrays, stream):
        self.stream = stream
        self.backend = next((x.backend for x in arrays if isinstance(x, DeviceArray)), None)
        self.on_host = self.backend is None

    def put(self, x):
        """Bring an array, a QuantizedArray or an Operand to the device."""
        if isinstance(x, DeviceArray):
            return x
        if isinstance(x, Packed):
            return x if x.on_device else x.with_arrays({name: self.put(array) for name, array in x.arrays.items()})
        placed = to_device(x, stream=self.stream) if self.backend is None else upload(self.backend, x, self.stream)
        self.backend = placed.backend
        return placed

    def empty(self, shape: tuple[int, ...], member: Format) -> DeviceArray:
        """Allocate an array on the device."""
        return allocate(self.backend, shape, member.dtype, self.backend.queue(self.stream))

    def back(self, x: DeviceArray):
        """Return a result in the form that the caller gets."""
        return x.to_numpy(stream=self.stream) if self.on_host else x


def is_loadable(x: DeviceArray) -> bool:
    """Return whether kernels can load or store rows of an array 16 bytes at a time."""
    moving = [stride for size, stride in zip(x.shape[:-1], x.strides) if size > 1]
    whole = x.address % 16 == 0 and all(stride >= 0 and stride % 16 == 0 for stride in moving)
    return whole and (x.shape[-1] == 1 or x.strides[-1] == x.dtype.itemsize) and x.shape[-1] % ROW_UNIT == 0


def converted(x: DeviceArray, member: Format, place: Place, target: DeviceArray | None = None) -> DeviceArray:
    """Convert four axes to a format by the kernel `cast`: into `target`, or into rows padded with zeros for kernels to
    load.
    """
    if target is None:
        target = place.empty((*x.shape[:-1], -(-x.shape[-1] // ROW_UNIT) * ROW_UNIT), member)
    if 0 not in target.shape:
        cast(x, **{f"y_{member}": target}, stream=place.stream)
    return target


def copied_to(x: DeviceArray, member: Format, place: Place, target: DeviceArray | None = None) -> DeviceArray:
    """Convert any number of axes to a format by the kernel `cast`: into `target`, or into a new array without gaps."""
    if target is None:
        target = place.empty(x.shape, member)
    if len(x.shape) > 4:
        for i in range(x.shape[0]):
            copied_to(x[i], member, place, target[i])
        return target
    axes = 4 - len(x.shape)
    shape, strides = (1,) * axes + target.shape, (0,) * axes + target.strides
    four = DeviceArray(target.memory, target.address, shape, target.dtype, strides)
    converted(x.broadcast_to((1,) * axes + x.shape) if axes else x, member, place, four)
    return target


def loadable(x: DeviceArray, member: Format, place: Place) -> DeviceArray:
    """Return an array of any shape in a format, with rows that kernels can load: x itself, or a padded copy."""
    if member.holds(x.dtype) and is_loadable(x):
        return x
    return copied_to(x, member, place, place.empty((*x.shape[:-1], -(-x.shape[-1] // ROW_UNIT) * ROW_UNIT), member))


def without_gaps(x, place: Place) -> DeviceArray:
    """Return an array on the device in row-major order."""
    x = place.put(x)
    return x if x.is_contiguous else x.copy(stream=place.stream)


def has_whole_rows(x: DeviceArray) -> bool:
    """Return whether the elements of each row are contiguous."""
    return x.shape[-1] <= 1 or x.strides[-1] == x.dtype.itemsize


def as_rows(x: DeviceArray, lead: tuple[int, ...] | None = None) -> DeviceArray | None:
    """View an array as rows [*lead, columns]; None if one stride cannot describe them or rows have gaps.

    lead: the axes of rows; None for a single axis of all rows.
    """
    try:
        rows = x.reshape(*(lead or (math.prod(x.shape[:-1]),)), x.shape[-1])
    except ArgumentError:
        return None
    forward = all(size <= 1 or stride >= 0 for size, stride in zip(rows.shape, rows.strides[:-1]))
    return rows if has_whole_rows(rows) and forward else None
