"""The friendly functions of matrix products: `matmul`, and `exact_matmul`, what it computes in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..array import DeviceArray
from ..errors import ArgumentError
from ..formats import FORMATS, Format, bf16, f16, f32, format_of
from ..kernel import Kernel
from ..prepared import remembered
from .gemm_call import Call, Operand, gemm_call
from .gemm_kernels import ACTIVATIONS, activate, gemm_bf16
from .outputs import same_memory
from .place import ROW_UNIT, Place, converted, is_loadable
from .quantize import quantize
from .quantized import QuantizedArray
from .scales import fill_f32


@dataclass(frozen=True)
class Product:
    """One pair of formats: the kernel that multiplies them, and how each operand becomes its arguments."""

    kernel: Kernel


if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from ..typing import Activation, Array, FloatFormatName, Number, OperandFormatName, ScaleLayout, ScaleRule, StreamLike


@remembered
def matmul(
    a: Array | QuantizedArray,
    b: Array | QuantizedArray,
    *,
    a_format: FloatFormatName | OperandFormatName | None = None,
    b_format: FloatFormatName | OperandFormatName | None = None,
    transpose_b: bool = True,
    alpha: Number = 1.0,
    bias: Array | None = None,
    activation: Activation | tuple[Activation, dict[str, float]] | None = None,
    residual: Array | None = None,
    out_format: OperandFormatName | None = None,
    out_scale_rule: ScaleRule | None = None,
    out_scale_layout: ScaleLayout = "linear",
    out_global_scale: Number | Array | None = None,
    a_scale_rule: ScaleRule | None = None,
    b_scale_rule: ScaleRule | None = None,
    a_global_scale: Number | Array | None = None,
    b_global_scale: Number | Array | None = None,
    out_dtype: DTypeLike | None = None,
    splits: int | None = None,
    out: Array | QuantizedArray | None = None,
    stream: StreamLike = None,
) -> Any:
    """Compute C = activation(alpha a b^T + bias) + residual for a [.., M, K] and b [.., N, K]; leading axes broadcast.

    a, b: float32, float16 or bfloat16 on any strides (on a device, from 0 on). a_format, b_format: "bf16" or "f16"; an
    array's own
    16-bit type where None. float32, and a 16-bit type that is not the format's, are rounded to it. transpose_b: where
    False, b is
    [.., K, N], which is copied.
    alpha: finite. bias: [N] floats. activation: None, "relu", "gelu" (by erf), "gelu_tanh", "silu", or "swiglu",
        which makes column i
    of columns g = 2 i and u = 2 i + 1, so that C has N / 2: g sigmoid(alpha g) (u + offset), g at most `limit`,
        u within it; other
    numbers than no limit, 1 and 0 as ("swiglu", dict(limit=, alpha=, offset=)). residual: floats of C's shape.
    out_dtype: float32, float16 or bfloat16; that of `a` where None. out: an array of C's shape to write to,
    whose dtype then decides; it may be `residual` itself and overlaps no other argument.
    out_format: "mxfp8", "mxfp4" or "nvfp4": C is a QuantizedArray with the bytes of `quantize` on the unrounded
    float32 values.
    out_scale_rule: as for `quantize`, but None is "rceil" of mxfp8 and "even" of mxfp4. out_scale_layout: "linear" or
    "128x4".
    out_global_scale: of nvfp4, a positive number or a float32 device scalar.
    splits: None, or 1 so that K is cut nowhere. stream: of the device; None is the library's own.

    Products are exact, sums float32 in ascending k, everything behind them float32; C is rounded once. NaN in a row of
    a, or in a row of b,
    makes that row, or column, of C NaN. The bits of a row of C depend neither on the other rows nor on the batch. M or
    N of 0 give
    an empty C, K of 0 gives activation(bias) + residual. NumPy arrays give NumPy results; with any device array results
    stay on the device, without waiting. ArgumentError for what does not fit. Kernels: `gemm_NAME`.
    """
    call = gemm_call(
        *(PRODUCTS, a, b, a_format, b_format, transpose_b, alpha, bias, activation, residual, out_format,
          out_scale_rule),
        *(out_scale_layout, out_global_scale, a_scale_rule, b_scale_rule, a_global_scale, b_global_scale, out_dtype,
          splits, out),
    )
    return _run(call, stream)


def exact_matmul(a, b, *, transpose_b=True, alpha=1.0, bias=None, activation=None, residual=None) -> np.ndarray:
    """What `matmul` computes of the values of a and b, in float64 on the host."""
    a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
    with np.errstate(invalid="ignore", over="ignore"):
        c = alpha * (a @ (b.swapaxes(-1, -2) if transpose_b else b))
    if bias is not None:
        c = c + np.asarray(bias).astype(np.float64)
    name, options = activation if isinstance(activation, (tuple, list)) else (activation, {})
    c = activate(c, name, options.get("limit", np.inf), options.get("alpha", 1.0), options.get("offset", 0.0))
    return c if residual is None else c + np.asarray(residual).astype(np.float64)


# A call on a machine


def _run(call: Call, stream):
    """Launch what a call needs: conversions, quantizers, the product."""
    out = call.out
    parts = [out.codes, out.scales] if isinstance(out, QuantizedArray) else [out]
    place = Place([*call.arrays.values(), *parts], stream)
    a, b = (_loaded(x, place, call.depth) for x in (call.a, call.b))
    options = _options(call, place)
    if call.ending:
        return _run_quantizing(call, place, a, b, options)
    direct = target = out if isinstance(out, DeviceArray) else place.empty(call.shape, call.output)
    if not target.size:
        return _handed_back(call, place, target)
    if target.strides[-1] != target.dtype.itemsize and target.shape[-1] > 1:
        direct = place.empty(call.shape, call.output)
    residual = None if call.residual is None else _with_whole_rows(place.put(call.residual), place)
    if residual is not None and isinstance(out, DeviceArray) and same_memory(residual, direct):
        residual, options["in_place"] = None, 1
    for part in _batches(call, a, b, residual, direct):
        _launch(call, place, options, *part[:3], **{f"out_{call.output}": part[3]})
    if direct is not target:
        _copied_to(direct, call.output, place, target)
    return _handed_back(call, place, target)


def _run_quantizing(call: Call, place: Place, a, b, options):
    """A product whose end quantizes: in one launch where its matrices lie evenly, else of float32 values by `quantize`."""
    layout = call.ending.layout
    out = call.out
    residual = None if call.residual is None else _with_whole_rows(place.put(call.residual), place)
    level = None if call.ending.global_scale is None else place.put(call.ending.global_scale)
    on_device = isinstance(out, QuantizedArray) and out.on_device
    if on_device:
        codes, scales = out.codes, out.scales
    else:
        codes, scales = (place.empty(shape, FORMATS["u8"]) for shape in (layout.codes_shape, layout.scales_shape))
    outer = call.batch or (1,)
    count = int(np.prod(outer))
    spread = [None if x is None else x.broadcast_to((*call.batch, *x.shape[-2:])) for x in (a, b, residual)]
    whole = [_as_batch(x, count) for x in spread]
    if codes.size and all(x is not None or y is None for x, y in zip(whole, (a, b, residual))):
        flat = dict(codes=codes.view(np.uint8).reshape(count * call.rows, layout.code_bytes))
        flat |= dict(scales=scales.view(np.uint8).reshape(scales.size), code_bytes=layout.code_bytes,
                     scale_bytes=scales.size)
        numbers = dict(ending=call.ending.number, rule=call.ending.rule, swizzled=int(layout.scale_layout != "linear"))
        if level is not None:
            flat["out_global"] = level.reshape(1)
        _launch(call, place, options, *whole, **flat, **numbers)
    elif codes.size:
        values = place.empty(call.shape, f32)
        for part in _batches(call, a, b, residual, values):
            _launch(call, place, options, *part[:3], out_f32=part[3])
        rules = dict(scale_rule=layout.format.rules[call.ending.rule], scale_layout=layout.scale_layout)
        target = QuantizedArray(codes, scales, format=layout.format.name, shape=layout.shape,
                                scale_layout=layout.scale_layout,
                                global_scale=level)
        quantize(values, layout.format.name, **rules, global_scale=level, pad=True, out=target, stream=place.stream)
    if on_device:
        if level is not None:
            out.global_scale = level.reshape(())
        return out
    fields = dict(format=layout.format.name, shape=layout.shape, scale_layout=layout.scale_layout)
    result = QuantizedArray(codes, scales, **fields, global_scale=None if level is None else level.reshape(()))
    if not place.on_host:
        return result
    result = result.to_numpy(stream=place.stream)
    if out is None:
        return result
    for name in ("codes", "scales"):
        np.copyto(getattr(out, name).view(np.uint8), getattr(result, name).view(np.uint8))
    out.global_scale = result.global_scale
    return out


def _loaded(x: Operand, place: Place, depth: int) -> DeviceArray:
    """An operand as kernels take it: rows of 16 bits that begin at multiples of 16 bytes."""
    member = FORMATS[x.format]
    if not depth:   # one chunk of zeros gives the same sums
        shape = (*x.values.shape[:-1], ROW_UNIT)
        count = int(np.prod(shape))
        place.put(x.values)
        zeros = place.empty((count // 2,), f32)
        return (fill_f32(x=zeros, value=0.0, stream=place.stream) if count else zeros).view(member.dtype).reshape(shape)
    values = place.put(x.values)
    return values if member.holds(values.dtype) and is_loadable(values) else _copied_to(values, member, place)


def _with_four_axes(x: DeviceArray) -> DeviceArray:
    return x if len(x.shape) == 4 else x.broadcast_to((1,) * (4 - len(x.shape)) + x.shape)


def _copied_to(x: DeviceArray, member: Format, place: Place, target: DeviceArray | None = None) -> DeviceArray:
    """An array of any number of axes in a format, in `target` or in rows that kernels can load."""
    if target is None:
        target = place.empty((*x.shape[:-1], -(-x.shape[-1] // ROW_UNIT) * ROW_UNIT), member)
    for index in np.ndindex(x.shape[:-4]):
        part = target[index] if index else target
        four = DeviceArray(part.memory, part.address, (1,) * (4 - part.ndim) + part.shape, part.dtype,
                           (0,) * (4 - part.ndim) + part.strides)
        converted(_with_four_axes(x[index] if index else x), member, place, four)
    return target


def _with_whole_rows(x: DeviceArray, place: Place) -> DeviceArray:
    """x, or a copy of it where its rows have gaps."""
    if x.shape[-1] <= 1 or x.strides[-1] == x.dtype.itemsize:
        return x
    member = format_of(x.dtype)
    return _copied_to(x, member, place, place.empty(x.shape, member))


def _options(call: Call, place: Place) -> dict[str, Any]:
    """What kernels take beside operands, residual and results."""
    options = dict(alpha=call.alpha, activation=call.activation, **call.gate)
    if call.bias is not None:
        bias = _with_whole_rows(place.put(call.bias), place)
        options[f"bias_{format_of(bias.dtype)}"] = bias
    return options


def _as_batch(x, count: int):
    """Matrices [count, rows, columns] of an array [.., rows, columns] that lie evenly; None otherwise."""
    if x is None:
        return None
    try:
        return x.reshape(count, *x.shape[-2:])
    except ArgumentError:
        return None


def _batches(call: Call, *arrays):
    """The arrays of each launch, [batch, rows, columns]: all in one where the matrices lie evenly, else by parts of the first axis."""

    def parts(batch, arrays):
        count = int(np.prod(batch))
        whole = [_as_batch(x, count) for x in arrays]
        if all(x is not None or y is None for x, y in zip(whole, arrays)):
            yield whole
            return
        for i in range(batch[0]):
            yield from parts(batch[1:], [None if x is None else x[i] for x in arrays])

    yield from parts(call.batch, [None if x is None else x.broadcast_to((*call.batch,
                                                                         *x.shape[-2:])) if i < 2 else x for i,
                                                                             x in enumerate(arrays)])


def _launch(call: Call, place: Place, options, a, b, residual, **outputs) -> None:
    """One launch: a [batch, M, K], b [batch, N, K]."""
    arguments = dict(options, rows=call.rows, width=call.width)
    for name in [name for name in options if name.startswith("bias_")]:
        arguments[name] = options[name].broadcast_to((b.shape[0], call.cols))
    if residual is not None:
        arguments[f"residual_{format_of(residual.dtype)}"] = residual
    PRODUCTS[call.a.format, call.b.format].kernel(a, b, **arguments, **outputs, stream=place.stream)


def _handed_back(call: Call, place: Place, target: DeviceArray):
    """C as the caller gets it."""
    if isinstance(call.out, DeviceArray):
        return call.given
    result = place.back(target)
    if call.given is None:
        return result
    np.copyto(call.given, result)
    return call.given


# (format of a, format of b) -> how they are multiplied. Another pair is another line.
PRODUCTS = {
    ("bf16", "bf16"): Product(gemm_bf16),
    ("f16", "f16"): Product(gemm_bf16),
}
