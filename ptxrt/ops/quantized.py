"""Quantized arrays: the base class `Packed`, `QuantizedArray`, the layout of codes and scales in memory, and files."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from operator import index
from typing import TYPE_CHECKING, Any, ClassVar, SupportsIndex

import numpy as np

from ..array import DeviceArray, aligned, as_arrays, empty, to_device, upload
from ..blocks import BLOCK_FORMATS, BlockFormat, swizzled_bytes, swizzled_offsets
from ..errors import ArgumentError
from ..formats import Format, f32
from ..npy import Archive, Header, opened, write_arrays
from .quantizers import DEQUANTIZE, DEQUANTIZE_COLUMNS
from .scales import pad_last, swizzle_scales, unswizzle_scales

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..typing import Array, BlockFormatName, Number, ScaleLayout, StreamLike

SCALE_LAYOUTS = ("linear", "128x4")


@dataclass(frozen=True)
class Layout:
    """The layout of codes and scales of an array; it depends on the format, the shape, the axis and the scale layout.

    axis: the axis that is cut into blocks, counted from the end (-1 is the last). The array is then [outer, length,
    inner], and `length` is padded with zeros to a multiple of the block.
    """

    format: BlockFormat
    shape: tuple[int, ...]
    axis: int
    scale_layout: str

    @cached_property
    def outer(self) -> int:
        """Elements of the axes before the block axis."""
        return prod(self.shape[: self.axis])

    @property
    def length(self) -> int:
        """The length of the axis that is cut into blocks."""
        return self.shape[self.axis]

    @cached_property
    def inner(self) -> int:
        """Elements of the axes after the block axis."""
        return prod(self.shape[len(self.shape) + self.axis + 1 :])

    @cached_property
    def padded(self) -> int:
        """The length padded to whole blocks."""
        return self.format.padded(self.length)

    @cached_property
    def blocks(self) -> int:
        """Blocks along the axis."""
        return self.padded // self.format.block

    @cached_property
    def code_bytes(self) -> int:
        """Bytes of codes along the axis."""
        return self.padded * self.format.bits // 8

    def _with_length(self, length: int) -> tuple[int, ...]:
        sizes = list(self.shape)
        sizes[self.axis] = length
        return tuple(sizes)

    @cached_property
    def codes_shape(self) -> tuple[int, ...]:
        """The shape of the packed codes."""
        return self._with_length(self.code_bytes)

    @cached_property
    def linear_scales_shape(self) -> tuple[int, ...]:
        """The shape of the scales, one per block, before any swizzle."""
        return self._with_length(self.blocks)

    @cached_property
    def scales_shape(self) -> tuple[int, ...]:
        """The shape of the scales as they are stored: the bytes of all tiles where they are swizzled."""
        return (
            self.linear_scales_shape
            if self.scale_layout == "linear"
            else (swizzled_bytes(self.outer * self.inner, self.blocks),)
        )

    def matrix(self, length: int) -> tuple[int, ...]:
        """Return the shape that kernels take for `length` items along the axis: two axes if nothing follows the
        blocks.
        """
        return (self.outer, length) if self.inner == 1 else (self.outer, length, self.inner)

    def linear_scales(self, scales: np.ndarray) -> np.ndarray:
        """Return stored scales (NumPy) in their linear shape."""
        if self.scale_layout == "linear":
            return scales
        matrix = scales[swizzled_offsets(self.outer * self.inner, self.blocks)]
        return np.moveaxis(matrix.reshape(self.outer, self.inner, self.blocks), 2, 1).reshape(self.linear_scales_shape)

    def stored_scales(self, scales: np.ndarray) -> np.ndarray:
        """Return linear scales (NumPy) as they are stored; bytes of tiles without a scale are 0x00."""
        if self.scale_layout == "linear":
            return scales
        rows = self.outer * self.inner
        stored = np.zeros(self.scales_shape, np.uint8)
        stored[swizzled_offsets(rows, self.blocks)] = np.moveaxis(
            scales.reshape(self.outer, self.blocks, self.inner), 1, 2
        ).reshape(rows, self.blocks)
        return stored


def block_format(function: str, name) -> BlockFormat:
    """Return the block format called `name`; ArgumentError with all names if there is none."""
    if not isinstance(name, str) or name not in BLOCK_FORMATS:
        raise ArgumentError(f"{function}: format is {name!r}; there are {', '.join(map(repr, BLOCK_FORMATS))}")
    return BLOCK_FORMATS[name]


def checked_scale_layout(function: str, scale_layout, prefix: str = "") -> None:
    """Raise ArgumentError for a scale layout that does not exist. prefix: of the argument's name."""
    if not isinstance(scale_layout, str) or scale_layout not in SCALE_LAYOUTS:
        raise ArgumentError(
            f"{function}: {prefix}scale_layout is {scale_layout!r}; pass {' or '.join(map(repr, SCALE_LAYOUTS))}"
        )


def layout_of(
    function: str, format: BlockFormat, shape: tuple[int, ...], axis, scale_layout, prefix: str = ""
) -> Layout:
    """Return the layout of an array; ArgumentError for an axis or a scale layout that does not exist.

    prefix: of the argument's name, such as `out_`.
    """
    checked_scale_layout(function, scale_layout, prefix)
    return _layout(format, shape, checked_axis(function, axis, shape), scale_layout)


_layout = lru_cache(maxsize=1024)(Layout)


def checked_axis(function: str, axis, shape: tuple[int, ...]) -> int:
    """Return the axis counted from the end; ArgumentError if `shape` does not have it."""
    rank, number = len(shape), whole_number(axis)
    if number is None or not -rank <= number < rank:
        raise ArgumentError(f"{function}: axis is {axis!r}; an array of shape {list(shape)} has {_axes(rank)}")
    return number if number < 0 else number - rank


def whole_number(value: Any) -> int | None:
    """Return a whole number, of Python or of another library, as an int; None for anything else, True and False
    included."""
    if isinstance(value, (bool, np.bool_)):
        return None
    try:
        return index(value)
    except TypeError:
        return None


def _axes(rank: int) -> str:
    return f"axes {-rank} to {rank - 1}" if rank else "no axes, pass one with at least one"


def checked_shape(function: str, shape) -> tuple[int, ...]:
    """Return the shape as a tuple of ints; ArgumentError if it is none."""
    try:
        sizes = tuple(int(size) for size in shape)
        if any(size < 0 or size != size_of_axis for size, size_of_axis in zip(sizes, shape)):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise ArgumentError(f"{function}: shape is {shape!r}; pass a tuple of whole numbers") from None
    return sizes


def checked_global_scale(function: str, value, name: str = "global_scale"):
    """Return a global scale as a float32 array without axes; ArgumentError unless it is one positive number.

    The value of a device scalar is not checked, because reading it would wait.
    name: the argument's.
    """
    (array,) = as_arrays(function, **{name: value})
    if array.size != 1 or isinstance(value, (str, bytes)):
        raise ArgumentError(f"{function}: {name} has shape {list(array.shape)}; pass one positive number")
    if isinstance(array, DeviceArray):
        if not f32.holds(array.dtype):
            raise ArgumentError(f"{function}: {name} is {array.dtype}; pass a float32 device scalar or a number")
        return array.reshape(())
    with np.errstate(over="ignore", under="ignore"):
        number = array.reshape(()).astype(np.float32) if array.dtype.kind in "fiuV" else np.array(np.nan, np.float32)
    if not 0 < number < np.inf:
        raise ArgumentError(f"{function}: {name} is {value!r}; pass one positive number that float32 holds")
    return number


class Packed(ABC):
    """The base of quantized arrays, `QuantizedArray` and `Operand`: codes, their scales, and their layout.

    codes: uint8; all arrays are NumPy arrays or all are device arrays. scales: uint8, or None if the codes contain
    them. global_scale: a float32 array without axes, or None. layout: the layout of the codes.
    """

    codes: Any
    scales: Any
    global_scale: Any
    layout: Any

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "global_scale" and name in self.__dict__ and not self._is_level(value):
            if (value is None) != (self.global_scale is None):
                has = "no global_scale" if self.global_scale is None else "a global_scale"
                raise ArgumentError(f"{type(self).__name__}: {self.format} has {has}; {value!r} came")
            value = None if value is None else self._placed_global_scale(value)
        super().__setattr__(name, value)

    def _is_level(self, value: Any) -> bool:
        """Whether a value is a scalar beside codes on a device, such as calls store."""
        if type(value) is not DeviceArray or value.shape or not f32.holds(value.dtype) or self.global_scale is None:
            return False
        return self.on_device and value.backend is self.codes.backend

    def _checked_global_scale(self, block: BlockFormat | None, value):
        """Return None, or the global scale as an array without axes on the side of the codes."""
        name = type(self).__name__
        if block is None or not block.two_level:
            if value is not None:
                raise ArgumentError(f"{name}: global_scale is {value!r}; {self.format} has none, pass None")
            return None
        if value is None:
            raise ArgumentError(
                f"{name}: {self.format} has a global_scale; pass it, or 1 where there is a single level"
            )
        return self._placed_global_scale(value)

    def _placed_global_scale(self, value):
        """Return a global scale as an array without axes on the side of the codes."""
        name = type(self).__name__
        scale = checked_global_scale(name, value)
        if isinstance(self.codes, DeviceArray) and isinstance(scale, np.ndarray):
            return upload(self.codes.backend, scale)
        if isinstance(self.codes, np.ndarray) and isinstance(scale, DeviceArray):
            raise ArgumentError(f"{name}: global_scale is on the device, codes are not; pass a number")
        if isinstance(scale, DeviceArray) and scale.backend is not self.codes.backend:
            where = f"{scale.backend.describe()}, codes on {self.codes.backend.describe()}"
            raise ArgumentError(f"{name}: global_scale is on {where}; bring it there, or pass a number")
        return scale

    # The version of the order of bytes in codes, which files name; None where the format itself defines the order.
    code_order: ClassVar[int | None] = None

    @property
    @abstractmethod
    def format(self) -> str:
        """The name of the format."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values."""
        return self.layout.shape

    @property
    def on_device(self) -> bool:
        """Whether the arrays are device arrays."""
        return isinstance(self.codes, DeviceArray)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(prod(array.shape) for array in (self.codes, self.scales) if array is not None)

    @property
    @abstractmethod
    def arrays(self) -> dict[str, Any]:
        """The arrays that are not None, by the constructor's names."""

    @property
    @abstractmethod
    def description(self) -> dict[str, Any]:
        """The other arguments of the constructor, by name."""

    @abstractmethod
    def dequantized(self, member: Format, out, stream) -> Any:
        """Dequantize by kernels to a format, where the codes are; into `out` if it is given. See `dequantize`."""

    @abstractmethod
    def decoded(self) -> np.ndarray:
        """Decode the values as float32 on the host."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError(f"a {type(self).__name__} has no float array to share; leave out copy=False")
        values = np.ascontiguousarray(self.to_numpy().decoded())
        return values if dtype is None else values.astype(dtype)

    def with_arrays(self, arrays: Mapping[str, Any]) -> Self:
        """Return a copy with other arrays, by the constructor's names, such as the same arrays on another machine."""
        return type(self)(**{"scales": None, **arrays}, **self.description)

    def to_numpy(self, *, stream: StreamLike = None) -> Self:
        """Return a copy with NumPy arrays; itself if it already has them."""
        if not self.on_device:
            return self
        return self.with_arrays({name: array.to_numpy(stream=stream) for name, array in self.arrays.items()})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to `path` as .npz. The name is used as given, and the file is written atomically.

        An existing file is replaced and keeps its mode; a symbolic link stays. FileError, which names the folder, if
        `path` cannot be written.
        """
        numbers = ("global_scale", "mean", "cu_seqlens")
        fields = {
            name: array if name in numbers else array.view(np.uint8) for name, array in self.to_numpy().arrays.items()
        }
        for name, value in {**self.description, "code_order": self.code_order}.items():
            if value is not None:
                fields[name] = np.array(value, np.int64 if isinstance(value, (int, tuple)) else None)
        write_arrays(path, fields, archive=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote; FileError for a file that is missing, foreign, damaged or of another class.

        Names, types and sizes are checked before any array is inflated. The names in a file tell its class. A quantized
        array without axis and scale_layout has blocks along the last axis and linear scales.
        """
        writer = "QuantizedArray" if cls is Packed else cls.__name__
        with opened(path, "is no quantized array", f"Write one with {writer}.save.") as archive:
            if not isinstance(archive, Archive):
                raise ValueError("it holds a single array")
            made = _class_of(archive)
            if not issubclass(made, cls):
                raise ValueError(f"it holds {made.__name__} data, which {made.__name__}.load reads")
            headers = {name: archive.header(name) for name in archive.names}
            small = {
                name: archive.read(name)
                for name in archive.names
                if name in _SMALL and _checked_small(name, headers[name])
            }
            order = small.pop("code_order", None)
            if made.code_order is not None and (order is None or order.shape != () or order != made.code_order):
                raise ValueError(
                    f"its codes have order {1 if order is None else order} of bytes, where {made.code_order} is read; "
                    "quantize the values again with this version"
                )
            description = _described(small)
            # Placeholders without memory have the shapes of the file's arrays, so that a mismatch is refused before
            # data are read.
            made(
                **{
                    name: np.broadcast_to(np.zeros((), h.dtype), h.shape)
                    for name, h in headers.items()
                    if name not in _SMALL
                },
                **description,
            )
            return made(**{name: archive.read(name) for name in archive.names if name not in _SMALL}, **description)


# {required names: (class, optional names)}
_FILES: dict[frozenset[str], tuple[type[Packed], frozenset[str]]] = {}


def stored_as(*required: str, optional: tuple[str, ...]):
    """Register a class for `load`, by the names of the arrays in its files."""

    def enter(made):
        _FILES[frozenset(required)] = made, frozenset(optional)
        return made

    return enter


def unquantized(function: str, **arguments) -> tuple[Any, ...]:
    """Return arrays as `as_arrays` does; ArgumentError for quantized ones, which NumPy would decode."""
    for name, x in arguments.items():
        if isinstance(x, Packed):
            raise ArgumentError(f"{function}: {name} is {x!r}; pass floats (ptxrt.dequantize gives them)")
    return as_arrays(function, **arguments)


@stored_as("codes", "scales", "format", "shape", optional=("global_scale",))  # files of version 0.1.0
@stored_as("codes", "scales", "format", "shape", "axis", "scale_layout", optional=("global_scale",))
class QuantizedArray(Packed):
    """Codes and scales of an array, quantized in blocks along one axis.

    All arrays are NumPy arrays, or all are device arrays. `numpy.asarray(q)` gives float32 values, decoded on the host.

    Args:
        codes: uint8, of `shape` except for `axis`, which holds the packed codes of whole blocks: two e2m1 to a byte,
            four 6-bit codes to three bytes.
        scales: uint8, one for each block along `axis`; with the scale layout "128x4" the bytes of its tiles.
        format: "mxfp4", "mxfp8", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3" or "nvfp4".
        shape: The shape of the values. A length that is no multiple of the block is padded with zeros in codes and
            scales.
        axis: The axis that is cut into blocks.
        scale_layout: "linear" or "128x4".
        global_scale: The float32 scale of nvfp4; None of the others.

    Raises:
        ArgumentError: The arrays do not have the shapes of the format.
    """

    def __init__(
        self,
        codes: Array,
        scales: Array,
        *,
        format: BlockFormatName,
        shape: Sequence[int],
        axis: SupportsIndex = -1,
        scale_layout: ScaleLayout = "linear",
        global_scale: Number | Array | None = None,
    ):
        name = "QuantizedArray"
        block = block_format(name, format)
        self.layout = layout_of(name, block, checked_shape(name, shape), axis, scale_layout)
        self.codes, self.scales = as_arrays(name, codes=codes, scales=scales)
        self._check("codes", self.codes, block.element.storage, self.layout.codes_shape)
        self._check("scales", self.scales, block.scale, self.layout.scales_shape)
        self.global_scale = self._checked_global_scale(block, global_scale)
        if isinstance(self.codes, np.ndarray) != isinstance(self.scales, np.ndarray):
            raise ArgumentError(f"{name}: codes and scales are on different machines; pass both from one")

    def _check(self, name, array, member, shape):
        if tuple(array.shape) != shape or not member.holds(array.dtype):
            raise ArgumentError(
                f"QuantizedArray: {name} is {array.dtype} {list(array.shape)}; "
                f"{self.format} of shape {list(self.shape)} has {name} of uint8 {list(shape)}"
            )

    @property
    def format(self) -> str:
        """The name of the block format."""
        return self.layout.format.name

    @property
    def axis(self) -> int:
        """The axis cut into blocks, counted from the end."""
        return self.layout.axis

    @property
    def scale_layout(self) -> str:
        """ "linear" or "128x4"."""
        return self.layout.scale_layout

    def __repr__(self) -> str:
        remarks = (f", axis={self.axis}" if self.axis != -1 else "") + (
            f", scales {self.scale_layout}" if self.scale_layout != "linear" else ""
        )
        return f"QuantizedArray({self.format}, shape={list(self.shape)}{remarks}, {self.nbytes} bytes)"

    @property
    def arrays(self) -> dict[str, Any]:
        """The arrays that are not None, by the constructor's names."""
        level = {} if self.global_scale is None else {"global_scale": self.global_scale}
        return {"codes": self.codes, "scales": self.scales, **level}

    @property
    def description(self) -> dict[str, Any]:
        """The other arguments of the constructor, by name."""
        return dict(format=self.format, shape=self.shape, axis=self.axis, scale_layout=self.scale_layout)

    def decoded(self) -> np.ndarray:
        """Decode the values as float32 on the host; of NumPy arrays."""
        return decoded(self.layout, self.codes, self.scales, self.global_scale)

    def dequantized(self, member: Format, out, stream) -> Any:
        """Dequantize by kernels to a format, where the codes are; into `out` if it is given. See `dequantize`."""
        layout, on_host = self.layout, not self.on_device
        target = None if on_host else out

        codes, scales = (
            to_device(a, stream=stream) if on_host else aligned(a, stream) for a in (self.codes, self.scales)
        )
        if layout.scale_layout != "linear":
            scales = unswizzle(scales, layout.outer, layout.blocks, layout.inner, stream)
        arrays = [shaped(codes, layout.matrix(layout.code_bytes)), shaped(scales, layout.matrix(layout.blocks))]
        if self.global_scale is not None:
            arrays.append((to_device(self.global_scale, stream=stream) if on_host else self.global_scale).reshape(1))
        whole = layout.padded == layout.length
        buffers = {"x": shaped(target, layout.matrix(layout.length))} if target is not None and whole else {}
        kernel = (DEQUANTIZE if layout.inner == 1 else DEQUANTIZE_COLUMNS)[self.format]
        values = kernel(*arrays, **buffers, dtype=member.dtype, stream=stream)
        if not whole:
            values = fitted(values, layout, layout.padded, layout.length, stream, target)
        if target is not None:
            return target
        values = values.reshape(self.shape)
        if not on_host:
            return values
        values = values.to_numpy(stream=stream)
        if out is None:
            return values
        np.copyto(out, values)
        return out


def decoded(layout: Layout, codes: np.ndarray, scales: np.ndarray, global_scale) -> np.ndarray:
    """Decode codes and scales of a layout as float32 on the host."""
    scales = layout.linear_scales(scales.view(np.uint8))
    level = () if global_scale is None else (global_scale,)
    values = layout.format.decode(codes.view(np.uint8), scales, *level, axis=layout.axis)
    return values.take(range(layout.length), layout.axis) if layout.padded != layout.length else values


# On the device


def fitted(
    array: DeviceArray, layout: Layout, length: int, rows: int, stream, target: "DeviceArray | None" = None
) -> DeviceArray:
    """Return `array` with `rows` of `length` items along the block axis, padded or cut, in the shape that
    kernels take.
    """
    if length == rows:
        return shaped(array, layout.matrix(length))
    item = layout.inner * array.dtype.itemsize
    source = array.reshape(layout.outer, length * layout.inner).view(np.uint8)
    if target is None:
        target = empty((layout.outer, rows * layout.inner), array.dtype, device=array.device)
    pad_last(
        source,
        y=target.reshape(layout.outer, rows * layout.inner).view(np.uint8),
        target_bytes=rows * item,
        stream=stream,
    )
    return target.reshape(layout.matrix(rows))


def shaped(array, shape: tuple[int, ...]):
    """Reshape an array; itself if it already has the shape."""
    return array if array.shape == shape else array.reshape(shape)


def swizzle(scales: DeviceArray, outer: int, blocks: int, inner: int, stream) -> DeviceArray:
    """Arrange scales on the device in 128x4 tiles."""
    source = scales.view(np.uint8).reshape(outer, blocks, inner)
    return swizzle_scales(source, bytes=swizzled_bytes(outer * inner, blocks), stream=stream)


def unswizzle(swizzled: DeviceArray, outer: int, blocks: int, inner: int, stream) -> DeviceArray:
    """Convert scales on the device from 128x4 tiles to linear order."""
    return unswizzle_scales(swizzled.view(np.uint8), outer=outer, blocks=blocks, cols=inner, stream=stream)


# Files

# Arrays that are read before all others, with the most bytes of each; bounds of packed sequences are checked by value.
_NUMBERS = ("format", "role", "shape", "axis", "scale_layout", "dim", "global_scale", "code_order")
_SMALL = dict.fromkeys(_NUMBERS, 4096) | {"cu_seqlens": 1 << 26}
_KINDS = dict(format="U", role="U", scale_layout="U", axis="i", dim="i", global_scale="f")


def _class_of(archive: Archive) -> type[Any]:
    """Return the class whose files hold the names of an archive; ValueError if there is none."""
    names = frozenset(archive.names)
    for members, (made, optional) in _FILES.items():
        if names - optional == members:
            return made
    nearest = max(_FILES, key=lambda members: len(members & names) - len(members - names))
    raise ValueError(
        f"it holds {', '.join(archive.names) or 'nothing'} where {', '.join(sorted(nearest))} are expected"
    )


def _checked_small(name: str, header: Header) -> bool:
    """Return True; ValueError for an array that is too large for its name."""
    if header.nbytes > _SMALL[name]:
        raise ValueError(
            f"its {name} is {header.dtype} {list(header.shape)}, {header.nbytes} bytes, where "
            f"{_SMALL[name]} are the most"
        )
    return True


def _described(small: dict[str, np.ndarray]) -> dict:
    """Return arguments of a constructor from the small arrays of a file; ValueError if one is not what `save`
    writes."""
    if small["shape"].dtype.kind != "i" or small["shape"].ndim != 1:
        raise ValueError("its shape is no list of whole numbers")
    arguments: dict = {**small, "shape": tuple(small["shape"].tolist())}
    for name in _KINDS.keys() & small.keys():
        if small[name].shape != () or small[name].dtype.kind != _KINDS[name]:
            raise ValueError(f"its {name} is no {'name' if _KINDS[name] == 'U' else 'number'}")
        arguments[name] = small[name].item()
    return arguments
