"""The public functions of quantization: `quantize`, `dequantize` and conversions between layouts of scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

import numpy as np

from ..array import DeviceArray, aligned, as_arrays, as_output, to_device
from ..blocks import BlockFormat, swizzled_bytes
from ..errors import ArgumentError
from ..formats import format_of, to_convert, u8, ue4m3, ue8m0
from ..prepared import remembered
from .levels import given_level, store_level, written_level
from .memory import check_aligned, check_memory, check_parts
from .place import Place
from .quantized import (
    Layout,
    Packed,
    QuantizedArray,
    block_format,
    checked_axis,
    checked_global_scale,
    checked_shape,
    fitted,
    layout_of,
    shaped,
    swizzle,
    unquantized,
    unswizzle,
)
from .quantizers import QUANTIZE, QUANTIZE_COLUMNS, tiled
from .scales import AMAX_RUN, amax, fill_f32, nvfp4_global_scale

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from ..typing import Array, BlockFormatName, Flag, HostArray, Number, ScaleLayout, ScaleRule, StreamLike

# The most parts of an array for `amax`: enough to fill a GPU, few enough for one block of threads to finish.
_AMAX_PARTS = 1024


@remembered
def quantize(
    x: Array,
    format: BlockFormatName,
    *,
    axis: SupportsIndex = -1,
    scale_rule: ScaleRule | None = None,
    scale_layout: ScaleLayout = "linear",
    global_scale: Number | Array | None = None,
    pad: Flag = False,
    out: QuantizedArray | None = None,
    stream: StreamLike = None,
) -> QuantizedArray:
    """Quantize x in blocks along one axis.

    The documentation of the kernel `quantize_NAME` defines rounding, ties, saturation, zeros and NaN. NumPy arrays give
    NumPy codes and scales. Device arrays stay on the device; the call does not wait.

    Args:
        x: float32, float16 or bfloat16 on any strides. On a device, an array that is not in row-major order or begins
            at no multiple of 16 bytes is copied first.
        format: "mxfp4", "mxfp8" (e4m3), "mxfp8_e5m2", "mxfp6_e3m2" or "mxfp6_e2m3" in blocks of 32, "nvfp4" in blocks
            of 16.
        axis: The axis that is cut into blocks. Its length is a multiple of the block, unless `pad` is set.
        scale_rule: "floor" (default), "ceil", "rceil" or "even"; for nvfp4 "amax" (default) or "four_over_six".
        scale_layout: "linear", or "128x4" for the tiles that cuBLAS and CUTLASS take.
        global_scale: For nvfp4: a positive number or a float32 device scalar, which the result refers to and no call
            writes. None computes it from the largest finite magnitude; 1 leaves only the block scales.
        pad: Whether the axis is padded with zeros to whole blocks.
        out: A QuantizedArray of the same format, shape, axis and layout to write to. On a device its codes and scales
            are in row-major order and begin at multiples of 16 bytes. Its global scale is written, too: on a device in
            the scalar that it was made with, or in one of its own if it refers to that of an earlier call. A device
            scalar as global_scale replaces it; a prepared call copies its value instead, unless `out` refers to a
            scalar already.
        stream: A stream of the device; None is the library's own.

    Returns:
        Codes and scales with their format, shape and layout.

    Raises:
        ArgumentError: An argument is invalid; the message names it and a valid one.
    """
    block = block_format("quantize", format)
    rule = rule_number("quantize", block, scale_rule)
    (x,) = unquantized("quantize", x=x)
    layout = _checked_layout(x, block, axis, scale_layout, pad)
    on_host = isinstance(x, np.ndarray)
    checked_level = given_global_scale("quantize", block, global_scale, on_host)
    if out is not None:
        _check_quantized_out(out, layout, x, on_host)
    target = None if on_host else out

    source = to_device(x, stream=stream) if on_host else aligned(x, stream)
    arrays = [fitted(source, layout, layout.length, layout.padded, stream)]
    if block.two_level:
        level = _device_global_scale(source, checked_level, target, stream)
        arrays.append(level.reshape(1))
    matrix, options = layout.matrix(layout.padded), {}
    kernel, axes = (QUANTIZE, "rows cols") if len(matrix) == 2 else (QUANTIZE_COLUMNS, "outer rows cols")
    scales_matrix = layout.matrix(layout.blocks)
    if scale_layout != "linear":
        options = tiled(format, dict(zip(axes.split(), matrix)))
        scales_matrix = tuple(size for axis, size in options.items() if axis.startswith("scale_"))
    if target:
        options["codes"] = shaped(target.codes, layout.matrix(layout.code_bytes))
        options["scales"] = shaped(target.scales, scales_matrix)
    codes, scales = kernel[format](*arrays, **options, rule=rule, stream=stream)
    if target:
        if block.two_level:
            store_level(target, level, isinstance(checked_level, DeviceArray))
        return target
    result = QuantizedArray(
        codes.reshape(layout.codes_shape),
        scales.reshape(layout.scales_shape),
        format=format,
        shape=layout.shape,
        axis=layout.axis,
        scale_layout=scale_layout,
        global_scale=level if block.two_level else None,
    )
    if not on_host:
        return result
    result = result.to_numpy(stream=stream)
    return result if out is None else _copy_to(out, result)


@overload
def dequantize(q: Packed, dtype: DTypeLike = ..., *, out: HostArray, stream: StreamLike = ...) -> HostArray: ...
@overload
def dequantize(q: Packed, dtype: DTypeLike = ..., *, out: DeviceArray, stream: StreamLike = ...) -> DeviceArray: ...
@overload
def dequantize(q: Packed, dtype: DTypeLike = ..., *, out: Array | None = ..., stream: StreamLike = ...) -> Any: ...
@remembered
def dequantize(q, dtype=np.float32, *, out=None, stream=None):
    """Return the values of a QuantizedArray or an Operand.

    float32 values of the MX formats are exact; those of nvfp4 come from two rounded float32 products. float16 and
    bfloat16 are rounded once more, to nearest even. NumPy arrays give a NumPy array, device arrays a device array.

    Args:
        q: A QuantizedArray or an Operand.
        dtype: float32, float16 or bfloat16.
        out: An array of q's shape to write to, which shares no memory with q; its dtype replaces `dtype`. On a device
            the values of a QuantizedArray need one in row-major order from a multiple of 16 bytes on.
        stream: A stream of the device; None is the library's own.

    Raises:
        ArgumentError: An argument is invalid; the message names it.
    """
    if not isinstance(q, Packed):
        raise ArgumentError(f"dequantize: q is a {type(q).__name__}; pass a QuantizedArray or an Operand")
    on_host = not q.on_device
    if out is not None:
        out = as_output("dequantize", "out", out)
        _check_side("dequantize", "out", out, on_host, "q")
        if tuple(out.shape) != q.shape:
            raise ArgumentError(f"dequantize: out has shape {list(out.shape)}; q has shape {list(q.shape)}")
        check_memory("dequantize", dict(out=out), {f"q.{name}": array for name, array in q.arrays.items()})
        if isinstance(q, QuantizedArray):
            check_aligned("dequantize", out=out)
        dtype = out.dtype
    try:
        member = format_of(dtype)
    except TypeError:
        member = None
    if member is None:
        raise ArgumentError(f"dequantize: dtype is {dtype!r}; pass float32, float16 or bfloat16")
    return q.dequantized(member, out, stream)


def quantize_reference(
    x, format, *, axis=-1, scale_rule=None, scale_layout="linear", global_scale=None, pad=False
) -> QuantizedArray:
    """Compute on the host, directly from the definitions, what `quantize` gives for NumPy arrays."""
    block = block_format("quantize", format)
    rule = block.rules[rule_number("quantize", block, scale_rule)]
    layout = _checked_layout(x, block, axis, scale_layout, pad)
    widths = [(0, 0)] * len(layout.shape)
    widths[layout.axis] = (0, layout.padded - layout.length)
    level = ()
    if block.two_level:
        magnitudes = np.abs(x.astype(np.float32))
        finite = magnitudes[np.isfinite(magnitudes)]
        checked_level = given_global_scale("quantize", block, global_scale, True)
        level = (block.global_scale(finite.max(initial=0)) if checked_level is None else checked_level,)
    codes, scales = block.encode(np.pad(x, widths), *level, rule, axis=layout.axis)
    fields = dict(format=format, shape=layout.shape, axis=layout.axis, scale_layout=scale_layout)
    return QuantizedArray(codes, layout.stored_scales(scales), **fields, global_scale=level[0] if level else None)


@overload
def swizzle_scales(scales: HostArray, *, axis: SupportsIndex = ..., stream: StreamLike = ...) -> HostArray: ...
@overload
def swizzle_scales(scales: DeviceArray, *, axis: SupportsIndex = ..., stream: StreamLike = ...) -> DeviceArray: ...
@overload
def swizzle_scales(scales: Array, *, axis: SupportsIndex = ..., stream: StreamLike = ...) -> Any: ...
def swizzle_scales(scales, *, axis=-1, stream=None):
    """Arrange block scales in the 128x4 tiles that cuBLAS and CUTLASS take.

    NumPy arrays give NumPy arrays. Device arrays stay on the device; the call does not wait. Kernel: `swizzle_scales`.

    Args:
        scales: uint8 (or ue8m0, e4m3 of ml_dtypes) whose `axis` counts blocks; all other axes are rows. The matrix is
            padded with 0x00 to multiples of 128 rows and 4 blocks.
        axis: The axis that counts blocks.
        stream: A stream of the device; None is the library's own.

    Returns:
        uint8, with one axis.

    Raises:
        ArgumentError: An argument is invalid; the message names it.
    """
    (scales,) = as_arrays("swizzle_scales", scales=scales)
    outer, blocks, inner = _scale_matrix("swizzle_scales", tuple(scales.shape), axis)
    bytes_ = _scale_bytes("swizzle_scales", "scales", scales, stream)
    swizzled = swizzle(bytes_, outer, blocks, inner, stream)
    return swizzled.to_numpy(stream=stream) if isinstance(scales, np.ndarray) else swizzled


@overload
def unswizzle_scales(
    swizzled: HostArray, shape: Sequence[int], *, axis: SupportsIndex = ..., stream: StreamLike = ...
) -> HostArray: ...
@overload
def unswizzle_scales(
    swizzled: DeviceArray, shape: Sequence[int], *, axis: SupportsIndex = ..., stream: StreamLike = ...
) -> DeviceArray: ...
@overload
def unswizzle_scales(
    swizzled: Array, shape: Sequence[int], *, axis: SupportsIndex = ..., stream: StreamLike = ...
) -> Any: ...
def unswizzle_scales(swizzled, shape, *, axis=-1, stream=None):
    """Convert block scales from 128x4 tiles to linear order: the inverse of `swizzle_scales`.

    NumPy arrays give NumPy arrays. Device arrays stay on the device; the call does not wait. Kernel:
    `unswizzle_scales`.

    Args:
        swizzled: As many bytes as the tiles of `shape` have, in any shape.
        shape: The shape of the scales.
        axis: The axis of `shape` that counts blocks.
        stream: A stream of the device; None is the library's own.

    Returns:
        uint8 scales of `shape`.

    Raises:
        ArgumentError: An argument is invalid; the message names it.
    """
    (swizzled,) = as_arrays("unswizzle_scales", bytes=swizzled)
    shape = checked_shape("unswizzle_scales", shape)
    outer, blocks, inner = _scale_matrix("unswizzle_scales", shape, axis)
    expected = swizzled_bytes(outer * inner, blocks)
    if swizzled.size != expected:
        raise ArgumentError(
            f"unswizzle_scales: {swizzled.size} bytes came; scales of shape {list(shape)} have "
            f"{expected} in 128x4 tiles"
        )
    bytes_ = _scale_bytes("unswizzle_scales", "bytes", swizzled, stream)
    scales = unswizzle(bytes_.reshape(expected), outer, blocks, inner, stream).reshape(shape)
    return scales.to_numpy(stream=stream) if isinstance(swizzled, np.ndarray) else scales


# Shared by the calls


def rule_number(function: str, block: BlockFormat, rule, prefix: str = "") -> int:
    """Return the kernels' number of a rule. prefix: of the argument's name, such as `out_`."""
    if rule is None:
        return 0
    if not isinstance(rule, str) or rule not in block.rules:
        known = ", ".join(map(repr, block.rules))
        raise ArgumentError(f"{function}: {prefix}scale_rule is {rule!r}; {block.name} has {known}")
    return block.rules.index(rule)


def _checked_layout(x, block: BlockFormat, axis, scale_layout, pad) -> Layout:
    """Return the layout of the codes and scales of x; ArgumentError if x cannot be cut into blocks."""
    if not isinstance(pad, (bool, np.bool_)):
        raise ArgumentError(f"quantize: pad is {pad!r}; pass True or False")
    if format_of(x.dtype) is None:
        raise ArgumentError(f"quantize: x is {x.dtype} {list(x.shape)}; {to_convert('x')}")
    if not x.shape:
        raise ArgumentError("quantize: x is a single number; pass an array with at least one axis")
    layout = layout_of("quantize", block, tuple(x.shape), axis, scale_layout)
    size, below = layout.padded, layout.padded - block.block
    if size == layout.length or pad:
        return layout
    advice = f"Pass pad=True to have it padded with zeros to {size}" + (f", or cut it to {below}." if below else ".")
    raise ArgumentError(
        f"quantize: axis {layout.axis} of x {list(layout.shape)} has length {layout.length}; "
        f"{block.name} needs a multiple of {block.block}. {advice}"
    )


def given_global_scale(function: str, block: BlockFormat, value, on_host: bool, prefix: str = ""):
    """Return a given global scale as an array without axes; None if none is given.

    prefix: of the argument's name, such as `out_`.
    """
    if value is None:
        return None
    if not block.two_level:
        raise ArgumentError(f"{function}: {prefix}global_scale is {value!r}; {block.name} has none, pass None")
    level = checked_global_scale(function, value, f"{prefix}global_scale")
    if on_host and isinstance(level, DeviceArray):
        raise ArgumentError(
            f"{function}: {prefix}global_scale is on the device, the input is a NumPy array; pass a number"
        )
    return level


def _device_global_scale(source: DeviceArray, level, out: QuantizedArray | None, stream) -> DeviceArray:
    """Return the global scale on the device, without waiting: the given one, or one from the array's largest finite
    magnitude."""
    place = Place([source], stream)
    if isinstance(level, DeviceArray):
        return given_level(level, place, out, [source])
    if level is None and source.size:
        parts = min(-(-source.size // AMAX_RUN), _AMAX_PARTS)
        partial = amax(source.reshape(source.size), blocks=parts, stream=stream)
        return written_level(lambda x: nvfp4_global_scale(partial, global_scale=x, stream=stream), place, out, [source])
    value = 1.0 if level is None else float(level)
    return written_level(lambda x: fill_f32(x=x, value=value, stream=stream), place, out, [source])


def _scale_matrix(function: str, shape: tuple[int, ...], axis) -> tuple[int, int, int]:
    """Return the sizes before, along and after the axis that counts blocks."""
    axis = checked_axis(function, axis, shape) + len(shape)
    return int(np.prod(shape[:axis])), shape[axis], int(np.prod(shape[axis + 1 :]))


def _scale_bytes(function: str, name: str, array, stream) -> DeviceArray:
    """Return scales on the device as uint8."""
    if not any(member.holds(array.dtype) for member in (u8, ue8m0, ue4m3)):
        raise ArgumentError(f"{function}: {name} is {array.dtype} {list(array.shape)}; pass uint8")
    return to_device(array.view(np.uint8) if isinstance(array, np.ndarray) else array, stream=stream).view(np.uint8)


def _check_quantized_out(out, layout: Layout, x, on_host: bool) -> None:
    if not isinstance(out, QuantizedArray) or out.layout != layout:
        axis = f", axis {layout.axis}" if layout.axis != -1 else ""
        scales = f", scale layout {layout.scale_layout}" if layout.scale_layout != "linear" else ""
        expected = f"{layout.format.name} and shape {list(layout.shape)}{axis}{scales}"
        raise ArgumentError(f"quantize: out is {out!r}; pass a QuantizedArray of {expected}, or None")
    _check_side("quantize", "out.codes", out.codes, on_host, "x")
    check_parts("quantize", out, dict(x=x))


def _check_side(function: str, name: str, array, on_host: bool, other: str) -> None:
    """Raise ArgumentError unless an array to write to is on the side of the input, the host or the device."""
    if isinstance(array, np.ndarray) != on_host:
        other_side, here = ("on the device", "a NumPy array") if on_host else ("a NumPy array", "on the device")
        raise ArgumentError(f"{function}: {name} is {other_side}, {other} is {here}; pass both on one side")


def _copy_to(out: QuantizedArray, result: QuantizedArray) -> QuantizedArray:
    """Copy finished results to the arrays of `out`."""
    np.copyto(out.codes.view(np.uint8), result.codes)
    np.copyto(out.scales.view(np.uint8), result.scales)
    out.global_scale = result.global_scale
    return out
