"""The public functions of matrix products: `matmul`, `matmul_grouped`, and `exact_matmul`, a float64 reference on the
host."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from ..array import DeviceArray, aligned, as_arrays, empty, same_memory
from ..errors import ArgumentError
from ..formats import FORMATS, bf16, f32, format_of
from ..kernel import Kernel
from ..prepared import note_shared, remembered
from .gemm_call import FEW_ROWS, Call, GroupedCall, Operand, gemm_call, grouped_call
from .gemm_kernels import (
    ACTIVATIONS,
    BLOCK_GEMM,
    BLOCK_PAIRS,
    FEW_BLOCK_GEMM,
    NORMED_COLS,
    PLAIN,
    WIDE_BLOCK_GEMM,
    activate,
    gemm_bf16,
    gemm_few_bf16,
    gemm_wide_bf16,
    is_wide,
    normed_rows,
)
from .outputs import Target
from .place import ROW_UNIT, Place, copied_to, has_whole_rows, loadable, without_gaps
from .produce import as_vector, rmsnorm
from .quantize import quantize, quantize_reference, swizzle_scales, unswizzle_scales
from .quantized import Packed, QuantizedArray, layout_of
from .scales import AMAX_RUN, amax, fill_f32, pad_last
from .smoothing import operand_scale


@dataclass(frozen=True)
class Product:
    """The kernels of a pair of formats: for whole tiles, for few rows, and for many of these with a short epilogue."""

    tiles: Kernel
    few: Kernel
    wide: Kernel

    def for_call(self, call: Call, quantizes: bool) -> Kernel:
        """Return the kernel for a call. No bit depends on the choice between `few` and `wide`."""
        if not _cuts(call):
            return self.tiles
        short = ACTIVATIONS[call.activation] in PLAIN and not quantizes
        cols = call.cols * math.prod(call.batch)
        return self.wide if short and is_wide(call.a.format, call.b.format, call.rows, cols) else self.few


if TYPE_CHECKING:
    from numpy.typing import DTypeLike
    from typing_extensions import Unpack

    from ..typing import (
        Activation,
        Array,
        FloatFormatName,
        GroupedOptions,
        HostArray,
        MatrixOptions,
        Number,
        OperandFormatName,
        ProducedFormatName,
        ScaleLayout,
        ScaleRule,
        StreamLike,
        WholeNumbers,
    )


@overload
def matmul(
    a: HostArray, b: Array | QuantizedArray, *, out_format: None = ..., **options: Unpack[MatrixOptions]
) -> HostArray: ...
@overload
def matmul(
    a: DeviceArray, b: Array | QuantizedArray, *, out_format: None = ..., **options: Unpack[MatrixOptions]
) -> DeviceArray: ...
@overload
def matmul(
    a: HostArray | DeviceArray,
    b: Array | QuantizedArray,
    *,
    out_format: ProducedFormatName,
    **options: Unpack[MatrixOptions],
) -> QuantizedArray: ...
@overload
def matmul(
    a: Array | QuantizedArray,
    b: Array | QuantizedArray,
    *,
    out_format: ProducedFormatName | None = ...,
    **options: Unpack[MatrixOptions],
) -> Any: ...
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
    out_format: ProducedFormatName | None = None,
    out_scale_rule: ScaleRule | None = None,
    out_scale_layout: ScaleLayout = "linear",
    out_global_scale: Number | Array | None = None,
    a_scale_rule: ScaleRule | None = None,
    b_scale_rule: ScaleRule | None = None,
    a_global_scale: Number | Array | None = None,
    b_global_scale: Number | Array | None = None,
    out_dtype: DTypeLike | None = None,
    splits: int | None = None,
    a_norm: Array | None = None,
    a_eps: Number = 1e-6,
    out: Array | QuantizedArray | None = None,
    stream: StreamLike = None,
) -> Any:
    """Compute C = activation(alpha A B^T + bias) + residual for a [.., M, K] and b [.., N, K]; leading axes broadcast.

    Products are exact, sums are float32 in a fixed order, everything after the sums is float32, and C is rounded once.
    A NaN in a row of a makes that row of C NaN; a NaN in a row of b makes that column NaN. The bits of a row of C
    depend neither on the other rows nor on the batch; only calls of up to 64 rows and calls of more may differ. M or N
    of 0 gives an empty C, K of 0 gives activation(bias) + residual. If all arrays are NumPy arrays, results are NumPy
    arrays. If any is a device array, results stay on the device and the call does not wait. Kernels: `gemm_NAME`, and
    `gemm_few_NAME` or `gemm_wide_NAME` if K is split.

    a and b are both bf16, f16, mxfp8, mxfp4 or nvfp4; or a is mxfp8 and b mxfp4; or a is bf16 and b nvfp4, mxfp4 or
    mxfp8.

    Args:
        a: float32, float16 or bfloat16 on any strides (on a device none below 0), or a QuantizedArray.
        b: The same.
        a_format: "bf16" or "f16", or a block format that the call quantizes to; None is the array's own 16-bit type.
            Arrays of another type are rounded to a_format.
        b_format: The same for b.
        transpose_b: False takes b as [.., K, N] and copies it.
        alpha: A number, finite in float32.
        bias: [N] floats.
        activation: None, "relu", "gelu" (by erf), "gelu_tanh", "silu" or "swiglu". "swiglu" makes column i of C from
            columns g = 2 i and u = 2 i + 1, so that C has N / 2 columns: g sigmoid(alpha g) (u + offset), with g at
            most `limit` and u within [-limit, limit]. Defaults are no limit, alpha 1 and offset 0; others are passed as
            ("swiglu", dict(limit=, alpha=, offset=)).
        residual: Floats of C's shape.
        out_format: "mxfp8", "mxfp4" or "nvfp4": C is a QuantizedArray with the bytes of `quantize` on the unrounded
            float32 values.
        out_scale_rule: As in `quantize`, but None is "rceil" for mxfp8 and "even" for mxfp4.
        out_scale_layout: "linear" or "128x4".
        out_global_scale: The global scale of nvfp4: a positive number or a float32 device scalar, as in `quantize`.
        a_scale_rule: The scale rule of an array that the call quantizes; None as in out_scale_rule.
        b_scale_rule: The same for b.
        a_global_scale: The global scale of an array that the call quantizes to nvfp4; None takes the smallest 2**n / 6
            under which no finite value saturates.
        b_global_scale: The same for b.
        out_dtype: float32, float16 or bfloat16; None is the type of `a`.
        splits: None splits K, for up to 64 rows, into eight runs that depend only on K and the formats and are added in
            a fixed tree; 1 does not split.
        a_norm: Floats [K]: a is first normed as by `rmsnorm(a, a_norm, eps=a_eps)`, and rounded or quantized once.
            Equal in bits to both calls in turn; few rows, multiplied in 16 bits, are one launch. nvfp4 needs
            a_global_scale.
        a_eps: A number from 0 on.
        out: An array of C's shape to write to; its dtype replaces `out_dtype`. Or a QuantizedArray as in
            `quantize`, of C's shape, whose format and layout replace `out_format` and `out_scale_layout`. `out` may be
            `residual` itself and must not overlap any other argument.
        stream: A stream of the device; None is the library's own.

    Raises:
        ArgumentError: An argument is invalid; the message names it.
    """
    call = gemm_call(
        PRODUCTS,
        a,
        b,
        a_format=a_format,
        b_format=b_format,
        transpose_b=transpose_b,
        alpha=alpha,
        bias=bias,
        activation=activation,
        residual=residual,
        out_format=out_format,
        out_scale_rule=out_scale_rule,
        out_scale_layout=out_scale_layout,
        out_global_scale=out_global_scale,
        a_scale_rule=a_scale_rule,
        b_scale_rule=b_scale_rule,
        a_global_scale=a_global_scale,
        b_global_scale=b_global_scale,
        out_dtype=out_dtype,
        splits=splits,
        out=out,
        a_norm=a_norm,
        a_eps=a_eps,
    )
    return _run(call, stream)


@overload
def matmul_grouped(
    a: HostArray,
    b: Array | QuantizedArray,
    group_starts: WholeNumbers,
    *,
    out_format: None = ...,
    **options: Unpack[GroupedOptions],
) -> HostArray: ...
@overload
def matmul_grouped(
    a: DeviceArray,
    b: Array | QuantizedArray,
    group_starts: WholeNumbers,
    *,
    out_format: None = ...,
    **options: Unpack[GroupedOptions],
) -> DeviceArray: ...
@overload
def matmul_grouped(
    a: HostArray | DeviceArray,
    b: Array | QuantizedArray,
    group_starts: WholeNumbers,
    *,
    out_format: ProducedFormatName,
    **options: Unpack[GroupedOptions],
) -> QuantizedArray: ...
@overload
def matmul_grouped(
    a: Array | QuantizedArray,
    b: Array | QuantizedArray,
    group_starts: WholeNumbers,
    *,
    out_format: ProducedFormatName | None = ...,
    **options: Unpack[GroupedOptions],
) -> Any: ...
@remembered
def matmul_grouped(
    a: Array | QuantizedArray,
    b: Array | QuantizedArray,
    group_starts: WholeNumbers,
    *,
    rows: WholeNumbers | None = None,
    a_format: FloatFormatName | OperandFormatName | None = None,
    b_format: FloatFormatName | OperandFormatName | None = None,
    transpose_b: bool = True,
    alpha: Number | Array = 1.0,
    bias: Array | None = None,
    activation: Activation | tuple[Activation, dict[str, float]] | None = None,
    residual: Array | None = None,
    out_format: ProducedFormatName | None = None,
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
    """Multiply groups of rows, each by a matrix of its own: a [T, K], b [groups, N, K], C [T, N].

    Each group has the bits of a product of that group alone. Arguments that are not listed are those of `matmul`.

    Args:
        a: Rows, as in `matmul`.
        b: One matrix for each group, as in `matmul`; with transpose_b=False [groups, K, N], which is copied.
        group_starts: int32 [groups + 1]: rows group_starts[g] to group_starts[g + 1] are multiplied by b[g]. Groups may
            be empty. A host array is checked: it begins at 0, never falls and ends at T. A device array is not checked,
            so that a graph can serve every routing; rows of C after its last number are not written, nor their scales.
            "128x4" scales from row T on, which fill the last tile, are 0. With "swiglu" and an MX format, unless
            splits=1, rows after the last number become zeros: groups of up to 64 rows then need a second launch, which
            quantizes all rows.
        rows: int32 [T']: C has T' rows, and row i is computed from row rows[i] of a. `route` returns it as `order`.
        alpha: One number, or an array of one float32 for each group.
        out_global_scale: The same. With one for each group the global scale of the result is 1, so that its values lack
            the factor of their group: pass the scales as `alpha` of the next product.
        bias: [N], or [groups, N].

    Raises:
        ArgumentError: An argument is invalid; the message names it.
    """
    call = grouped_call(
        PRODUCTS,
        a,
        b,
        group_starts,
        rows,
        a_format=a_format,
        b_format=b_format,
        transpose_b=transpose_b,
        alpha=alpha,
        bias=bias,
        activation=activation,
        residual=residual,
        out_format=out_format,
        out_scale_rule=out_scale_rule,
        out_scale_layout=out_scale_layout,
        out_global_scale=out_global_scale,
        a_scale_rule=a_scale_rule,
        b_scale_rule=b_scale_rule,
        a_global_scale=a_global_scale,
        b_global_scale=b_global_scale,
        out_dtype=out_dtype,
        splits=splits,
        out=out,
    )
    return _run_grouped(call, stream)


@overload
def interleave_rows(gate: HostArray, up: HostArray) -> HostArray: ...
@overload
def interleave_rows(gate: DeviceArray, up: DeviceArray) -> DeviceArray: ...
@overload
def interleave_rows(gate: QuantizedArray, up: QuantizedArray) -> QuantizedArray: ...
def interleave_rows(gate: Array | QuantizedArray, up: Array | QuantizedArray) -> Any:
    """Interleave the rows of two weights, gate i in row 2 i and up i in row 2 i + 1, as activation="swiglu" takes them.

    Args:
        gate: An array [.., N, K], or a QuantizedArray with axis -1.
        up: The same, with gate's shape and dtype, or its format and layout; nvfp4 needs one global scale for both,
            whose values on a device are read unless they are one array. Device arrays are of one device, and the result
            stays there.

    Returns:
        [.., 2 N, K]; scales keep their layout. The global scale is a copy.

    Raises:
        ArgumentError: An argument is invalid; the message names it.
    """
    if isinstance(gate, QuantizedArray) and isinstance(up, QuantizedArray):
        same = gate.layout == up.layout and gate.axis == -1 and gate.on_device == up.on_device
        if not same or len(gate.shape) < 2:
            raise ArgumentError(
                f"interleave_rows: gate is {gate!r}, up {up!r}; pass two of one format, shape and layout, "
                "axis -1, both on the host or both on the device"
            )
        if gate.global_scale is not None and not same_memory(gate.global_scale, up.global_scale):
            levels = [float(x.to_numpy() if gate.on_device else x) for x in (gate.global_scale, up.global_scale)]
            if levels[0] != levels[1]:
                raise ArgumentError(
                    f"interleave_rows: global scales are {levels[0]} and {levels[1]}; quantize both with one"
                )
        codes, scales = (
            [x.view(np.uint8) for x in pair] for pair in ((gate.codes, up.codes), (gate.scales, up.scales))
        )
        shape = (*gate.shape[:-2], 2 * gate.shape[-2], gate.shape[-1])
        fields = dict(format=gate.format, shape=shape, scale_layout=gate.scale_layout, global_scale=gate.global_scale)
        layout = layout_of("interleave_rows", gate.layout.format, shape, -1, gate.scale_layout)
        if not gate.on_device:
            linear = [gate.layout.linear_scales(x) for x in scales]
            return QuantizedArray(_in_turn(*codes), layout.stored_scales(_in_turn(*linear)), **fields)
        swizzled = gate.scale_layout != "linear"
        linear = [unswizzle_scales(x, gate.layout.linear_scales_shape) for x in scales] if swizzled else scales
        whole = _in_turn_on_device(*linear)
        whole = swizzle_scales(whole) if swizzled and whole.size else whole.reshape(layout.scales_shape)
        if gate.global_scale is not None:  # else a later call with out=gate would change the result
            fields["global_scale"] = gate.global_scale.copy()
        return QuantizedArray(_in_turn_on_device(*codes), whole, **fields)
    if not isinstance(gate, Packed) and not isinstance(up, Packed):
        gate, up = as_arrays("interleave_rows", gate=gate, up=up)
    one_side = any(all(isinstance(x, side) for x in (gate, up)) for side in (np.ndarray, DeviceArray))
    if not one_side or len(gate.shape) < 2 or tuple(gate.shape) != tuple(up.shape) or gate.dtype != up.dtype:
        received = " and ".join(
            f"{getattr(x, 'dtype', type(x).__name__)} {list(getattr(x, 'shape', ()))}" for x in (gate, up)
        )
        raise ArgumentError(
            f"interleave_rows: {received} came; pass two arrays [.., N, K] of one shape and dtype, both on the host or "
            "both on the device, or two QuantizedArrays"
        )
    if isinstance(gate, np.ndarray):
        return _in_turn(gate, up)
    if gate.backend is not up.backend:
        where = f"gate is on {gate.backend.describe()}, up on {up.backend.describe()}"
        raise ArgumentError(f"interleave_rows: {where}; bring both to one device")
    return _in_turn_on_device(gate, up)


def _in_turn_on_device(gate: DeviceArray, up: DeviceArray) -> DeviceArray:
    both = empty((*gate.shape[:-2], 2 * gate.shape[-2], gate.shape[-1]), gate.dtype, device=gate.device)
    both[..., 0::2, :], both[..., 1::2, :] = gate, up
    return both


def _in_turn(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return np.stack([first, second], axis=-2).reshape(*first.shape[:-2], 2 * first.shape[-2], first.shape[-1])


def exact_matmul(a, b, *, transpose_b=True, alpha=1.0, bias=None, activation=None, residual=None) -> np.ndarray:
    """Compute what `matmul` computes from the values of a and b, in float64 on the host."""
    a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
    with np.errstate(invalid="ignore", over="ignore"):
        c = alpha * (a @ (b.swapaxes(-1, -2) if transpose_b else b))
    if bias is not None:
        c = c + np.asarray(bias).astype(np.float64)
    name, options = activation if isinstance(activation, (tuple, list)) else (activation, {})
    c = activate(c, name, options.get("limit", np.inf), options.get("alpha", 1.0), options.get("offset", 0.0))
    return c if residual is None else c + np.asarray(residual).astype(np.float64)


def call_of(a, b, **options) -> Call:
    """Describe a call of `matmul` with all options except `stream`; nothing is uploaded or launched."""
    defaults = {p.name: p.default for p in inspect.signature(matmul).parameters.values() if p.kind is p.KEYWORD_ONLY}
    del defaults["stream"]
    return gemm_call(PRODUCTS, a, b, **(defaults | options))


def exact_rmsnorm(x, weight, eps: float) -> np.ndarray:
    """Compute what `rmsnorm` computes, in float64 on the host."""
    v = np.asarray(x).astype(np.float64)
    return v / np.sqrt((v * v).mean(-1, keepdims=True) + eps) * np.asarray(weight).astype(np.float64)


def multiplied(call: Call) -> list[np.ndarray]:
    """Return the values of a and b on the host as a call multiplies them, [.., rows, K]. `rmsnorm` norms the rows of a
    on the current machine if the call norms them."""
    a = call.a
    if call.norm is not None and call.depth:
        a = replace(a, values=_normed(call, a.values, call.norm))
    return [_multiplied(x) for x in (a, call.b)]


def _multiplied(x: Operand) -> np.ndarray:
    if isinstance(x.values, QuantizedArray):
        return np.asarray(x.values)
    values = np.asarray(x.values)
    if not x.quantizes:
        with np.errstate(over="ignore"):
            return values.astype(FORMATS[x.format].dtype)
    level = {}
    if x.format == "nvfp4":
        finite = np.abs(values[np.isfinite(values)]).astype(np.float32).max(initial=0)
        level = dict(
            global_scale=x.global_scale
            if x.global_scale is not None
            else operand_scale.reference(finite[None])["global_scale"][0]
        )
    return np.asarray(quantize_reference(values, x.format, scale_rule=x.rule, pad=True, **level))


# Operands on the device


@dataclass(frozen=True)
class _Floats:
    """16-bit matrices [.., rows, K] whose rows kernels can load. halves: 2 if two of K are the halves of a float32."""

    array: DeviceArray
    halves: int = 1

    def part(self, name: str, batch: tuple[int, ...], prefix: tuple[int, ...]) -> dict[str, Any] | None:
        """Return the kernel's arguments for the matrices of C whose first batch indices are `prefix`; None if one
        stride cannot describe them."""
        whole = _part(self.array.broadcast_to((*batch, *self.array.shape[-2:])), batch, prefix)
        return None if whole is None else {name: whole} | ({"halves": self.halves} if name == "a" else {})


@dataclass(frozen=True)
class _Blocks:
    """Matrices as codes and scales."""

    values: QuantizedArray
    codes: DeviceArray  # [matrices, rows, bytes], a multiple of 16 of them

    def part(self, name: str, batch: tuple[int, ...], prefix: tuple[int, ...]) -> dict[str, Any] | None:
        """As in `_Floats`."""
        layout, rows = self.values.layout, self.values.shape[-2]
        leading = (1,) * (len(batch) + 2 - len(self.values.shape)) + self.values.shape[:-2]
        expected, held = batch[len(prefix) :], leading[len(prefix) :]
        count, items = int(np.prod(expected)), int(np.prod(held))
        if held != expected and items != 1:
            return None
        first = 0
        for index, size in zip(prefix, leading):
            first = first * size + (index if size > 1 else 0)
        codes = self.codes[first * items : (first + 1) * items]
        codes = codes if items == count else codes.broadcast_to((count, *codes.shape[1:]))
        level = self.values.global_scale
        return {
            f"{name}_codes": codes,
            f"{name}_scales": self.values.scales.view(np.uint8).reshape(self.values.scales.size),
            f"{name}_blocks": layout.blocks,
            f"{name}_swizzled": int(layout.scale_layout != "linear"),
            f"{name}_scale_rows": rows if items == count else 0,
            f"{name}_first_row": first * items * rows,
            **({} if level is None else {f"{name}_global": level.reshape(1)}),
        }


def _loaded(x: Operand, call: Call, place: Place) -> _Floats | _Blocks:
    """Return an operand on the device in the form that kernels take."""
    values = x.values
    if not call.depth:  # K = 0: a chunk of zeros gives the same sums
        place.put(values)
        shape = (*values.shape[:-1], ROW_UNIT)
        count = int(np.prod(shape))
        zeros = place.empty((count // 2,), f32)
        zeros = fill_f32(x=zeros, value=0.0, stream=place.stream) if count else zeros
        return _Floats(zeros.view(bf16.dtype).reshape(shape))
    values = place.put(values)
    if x.quantizes:
        values = quantized(values, x.format, x.rule, x.global_scale, place)
    if isinstance(values, QuantizedArray):
        codes = values.codes.view(np.uint8)
        shape = int(np.prod(values.shape[:-2])), values.shape[-2], values.layout.code_bytes
        rest = -shape[-1] % 16
        # Kernels load 16 bytes of a row at a time; rows of other widths are copied into wider ones below.
        gaps = not has_whole_rows(codes) or (not rest and any(stride % 16 for stride in codes.strides[:-1]))
        if codes.address % 16 or gaps or (len(shape) < codes.ndim and not codes.is_contiguous):
            codes = codes.copy(stream=place.stream)
        codes = codes.reshape(shape)
        if not values.scales.is_contiguous:
            values = values.with_arrays(dict(values.arrays, scales=values.scales.copy(stream=place.stream)))
        if rest and codes.size:
            wide = place.empty((codes.shape[0] * codes.shape[1], codes.shape[2] + rest), FORMATS["u8"])
            pad_last(
                codes.reshape(wide.shape[0], codes.shape[2]), y=wide, target_bytes=wide.shape[1], stream=place.stream
            )
            codes = wide.reshape(*codes.shape[:2], wide.shape[1])
        return _Blocks(values, codes)
    if call.norm is not None and x is call.a and f32.holds(values.dtype):
        return _Floats(values.view(FORMATS[x.format].dtype), halves=2)  # the product norms these rows
    return _Floats(loadable(values, FORMATS[x.format], place))


def quantized(x: DeviceArray, format: str, rule: str, global_scale, place: Place) -> QuantizedArray:
    """Quantize an array along its last axis. Without a global scale it is computed as in `quantize_operand`."""
    x = aligned(x, place.stream)
    level = {}
    if format == "nvfp4":
        if global_scale is None and x.size:
            parts = min(-(-x.size // AMAX_RUN), _AMAX_PARTS)
            global_scale = operand_scale(
                amax(x.reshape(x.size), blocks=parts, stream=place.stream), stream=place.stream
            ).reshape(())
        level = dict(global_scale=1.0 if global_scale is None else place.put(global_scale))
    return quantize(x, format, scale_rule=rule, pad=True, **level, stream=place.stream)


def _part(x: DeviceArray, batch: tuple[int, ...], prefix: tuple[int, ...]) -> DeviceArray | None:
    """View the matrices of [*batch, rows, columns] whose first batch indices are `prefix` as [count, rows, columns];
    None if one stride cannot describe them."""
    for index in prefix:
        x = x[index]
    try:
        return x.reshape(int(np.prod(batch[len(prefix) :])), *x.shape[-2:])
    except ArgumentError:
        return None


def _with_whole_rows(x: DeviceArray, place: Place) -> DeviceArray:
    """Return x, or a copy if its rows have gaps."""
    return x if has_whole_rows(x) else copied_to(x, format_of(x.dtype), place)


# Running a call


def _run(call: Call, stream):
    """Launch a call: conversions, quantizers, the product."""
    out = call.out
    parts = [out.codes, out.scales] if isinstance(out, QuantizedArray) else [out]
    place = Place([*call.arrays.values(), *parts], stream)
    if call.norm is not None:
        call = replace(call, a=replace(call.a, values=place.put(call.a.values)))
        if not _norms(call):
            call = _with_normed_rows(call, place)
    a, b = (_loaded(x, call, place) for x in (call.a, call.b))
    options = _options(call, place)
    residual = None if call.residual is None else _with_whole_rows(place.put(call.residual), place)
    if call.ending:
        return _run_quantizing(call, place, a, b, residual, options)
    target = Target(out, place, call.shape, call.output, has_whole_rows)
    if target.whole.size:
        residual, in_place = _added_in_place(residual, target)
        options |= in_place
        for operands, added, part in _launches(call, a, b, residual, target.direct):
            _launch(call, place, options, operands, added, **{f"out_{call.output}": part})
    return target.handed_back()


def _added_in_place(residual: DeviceArray | None, target: Target) -> tuple[DeviceArray | None, dict[str, int]]:
    """Return a residual, or None and a kernel's option to read it from C, if C is written where it lies."""
    if residual is None or not isinstance(target.caller_out, DeviceArray) or not same_memory(residual, target.direct):
        return residual, {}
    note_shared(target.direct, residual)
    return None, dict(in_place=1)


def _run_quantizing(call: Call, place: Place, a, b, residual, options):
    """Run a product with quantized C: in one launch if one stride describes its matrices, else as a float32 product and
    `quantize`."""
    level = call.ending.level(place, call.out, call.arrays.values())
    codes, scales = call.ending.buffers(place, call.out)
    whole = next(_launches(call, a, b, residual), None) if codes.size else None
    halves = _cuts(call) and _has_half_blocks(call)
    if whole and not halves and whole[0]["batch"] == int(np.prod(call.batch)):
        _launch(call, place, options, *whole[:2], **call.ending.arguments(codes, scales, level))
    elif codes.size:
        values = place.empty(call.shape, f32)
        for operands, added, part in _launches(call, a, b, residual, values):
            _launch(call, place, options, operands, added, out_f32=part)
        _quantize(values, call, place, codes, scales, level)
    return call.ending.handed_back(place, codes, scales, level, call.out)


def _has_half_blocks(call: Call) -> bool:
    """Whether blocks of the kernel for few rows would end with half a block of the result's format: with a gate they
    have 16 columns."""
    return ACTIVATIONS[call.activation] == "swiglu" and call.ending.layout.format.block > 16


def _quantize(values: DeviceArray, call: Call, place: Place, codes, scales, level) -> None:
    """Quantize the float32 values of C as the epilogue does."""
    layout = call.ending.layout
    fields = dict(format=layout.format.name, shape=layout.shape, scale_layout=layout.scale_layout)
    result = QuantizedArray(codes, scales, **fields, global_scale=None if level is None else level.reshape(()))
    rules = dict(scale_rule=layout.format.rules[call.ending.rule], scale_layout=layout.scale_layout)
    quantize(values, layout.format.name, **rules, global_scale=level, pad=True, out=result, stream=place.stream)


def _options(call: Call, place: Place) -> dict[str, Any]:
    """Return the kernels' arguments besides operands, residual and results."""
    options = dict(alpha=call.alpha, activation=call.activation, **call.gate)
    if call.norm is not None:
        options |= dict(a_norm=as_vector(call.norm, place, f32), a_eps=call.eps)
    if call.bias is not None:
        bias = _with_whole_rows(place.put(call.bias), place)
        options[f"bias_{format_of(bias.dtype)}"] = bias
    return options


def _launches(call: Call, a, b, residual, out=None, prefix: tuple[int, ...] = ()):
    """Yield the arguments of each launch: operands and their batch, the residual, and C. It is one launch if one stride
    describes the matrices, else one or more for each index of the first axis."""
    parts = [a.part("a", call.batch, prefix), b.part("b", call.batch, prefix)]
    added, part = (None if x is None else _part(x, call.batch, prefix) for x in (residual, out))
    if None not in parts and (added is not None or residual is None) and (part is not None or out is None):
        yield {**parts[0], **parts[1], "batch": int(np.prod(call.batch[len(prefix) :]))}, added, part
        return
    for i in range(call.batch[len(prefix)]):
        yield from _launches(call, a, b, residual, out, (*prefix, i))


def _launch(call: Call, place: Place, options, operands, residual, **outputs) -> None:
    """One launch."""
    arguments = {
        **options,
        **operands,
        "groups": operands["batch"],
        "cols": call.cols,
        "rows": call.rows,
        "width": call.width,
        "multiprocessors": place.backend.multiprocessors,
    }
    for name in [name for name in options if name.startswith("bias_")]:
        arguments[name] = options[name].broadcast_to((operands["batch"], call.cols))
    if residual is not None:
        arguments[f"residual_{format_of(residual.dtype)}"] = residual
    product = PRODUCTS[call.a.format, call.b.format] if call.depth else PRODUCTS["bf16", "bf16"]
    kernel = product.for_call(call, "codes" in outputs)
    kernel(**_accepted(kernel, arguments), **outputs, stream=place.stream)


def _accepted(kernel: Kernel, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments without `halves`, unless the kernel norms rows."""
    return arguments if "halves" in kernel.axes else {name: x for name, x in arguments.items() if name != "halves"}


def _norms(call: Call) -> bool:
    """Whether the product norms rows of A itself: a few of one matrix, which each of its blocks norms anew."""
    a, x = call.a, call.a.values
    wide = f32.holds(x.dtype) and x.is_contiguous and not call.depth % ROW_UNIT and a.format in ("bf16", "f16")
    if math.prod(call.batch) != 1 or not _cuts(call) or not (wide or a.format == format_of(x.dtype).name):
        return False
    fits = call.depth > 0 and call.cols <= NORMED_COLS and call.rows <= normed_rows(call.depth)
    return fits and f32.holds(call.norm.dtype)


def _with_normed_rows(call: Call, place: Place) -> Call:
    """Return a call with the rows of A normed by a launch of their own."""
    if not call.depth:
        return replace(call, norm=None)
    y = _normed(call, call.a.values, place.put(call.norm), place.stream)
    return replace(call, a=replace(call.a, values=y), norm=None)


def _normed(call: Call, values, weight, stream=None):
    """Return the normed rows of A, rounded or quantized to its format."""
    a = call.a
    if a.quantizes:
        ending = dict(format=a.format, scale_rule=a.rule, global_scale=a.global_scale)
    else:
        ending = dict(out_dtype=FORMATS[a.format].dtype)
    return rmsnorm(values, weight, eps=call.eps, **ending, stream=stream)


def _cuts(call: Call) -> bool:
    """Whether K is split: for few rows, unless the call forbids it."""
    return call.splits is None and call.rows <= FEW_ROWS


def _run_grouped(call: GroupedCall, stream):
    """Launch a grouped product. Groups of few rows and groups of many have the kernels that they would have alone."""
    product, out = call.product, call.product.out
    parts = [out.codes, out.scales] if isinstance(out, QuantizedArray) else [out]
    read = [*product.arrays.values(), call.starts, call.order, call.alphas]
    place = Place([*read, *parts], stream)
    a, b = (_loaded(x, product, place) for x in (product.a, product.b))
    operands = {**a.part("a", (1,), ()), **b.part("b", (call.groups,), ()), "batch": 1, "groups": call.groups}
    options = dict(
        activation=product.activation, **product.gate, cols=product.cols, rows=product.rows, width=product.width
    )
    options |= dict(group_starts=without_gaps(call.starts, place), starts=call.groups + 1)
    options |= dict(multiprocessors=place.backend.multiprocessors)
    if call.order is not None:
        options["order"] = without_gaps(call.order, place)
    if call.alphas is not None:
        options |= dict(alphas=without_gaps(call.alphas, place), alpha_count=call.groups)
    else:
        options["alpha"] = product.alpha
    if product.bias is not None:
        bias = _with_whole_rows(place.put(product.bias), place)
        options[f"bias_{format_of(bias.dtype)}"] = bias.broadcast_to((call.groups, product.cols))
    residual = None
    if product.residual is not None:
        residual = _with_whole_rows(place.put(product.residual), place)
    if product.ending:
        of_groups, level = product.ending.is_of_groups, product.ending.global_scale
        level = without_gaps(level, place) if of_groups else product.ending.level(place, out, read)
        codes, scales = product.ending.buffers(place, out)
        results = product.ending.arguments(codes, scales, level) | dict(level_count=1 if level is None else level.size)
    else:
        target = Target(out, place, (product.rows, product.width), product.output, has_whole_rows)
        results = {f"out_{product.output}": target.direct[None]}
        residual, in_place = _added_in_place(residual, target)
        options |= in_place
    if residual is not None:
        options[f"residual_{format_of(residual.dtype)}"] = residual[None]
    kernels = PRODUCTS[product.a.format, product.b.format] if product.depth else PRODUCTS["bf16", "bf16"]
    launches = call.launches(kernels) if product.rows and product.width and call.groups else []
    values = None
    if product.ending and _has_half_blocks(product) and any(kernel is kernels.few for kernel, *_ in launches):
        values = place.empty((product.rows, product.width), f32)
        if not isinstance(call.starts, np.ndarray):  # rows behind the last group
            fill_f32(x=values.reshape(values.size), value=0.0, stream=stream)
        results = dict(out_f32=values[None])
    for kernel, least, most in launches:
        sizes = dict(least_rows=least, most_rows=most, least=least, most=min(most, product.rows))
        kernel(**_accepted(kernel, operands), **options, **results, **sizes, stream=stream)
    if not product.ending:
        return target.handed_back()
    if values is not None:
        _quantize(values, product, place, codes, scales, level)
    if of_groups:  # the caller keeps the scales
        level = product.ending.filled(1.0, place, out, read)
    return product.ending.handed_back(place, codes, scales, level, out)


# The most parts of an array for `amax`: enough to fill a GPU, few enough for one block of threads to finish.
_AMAX_PARTS = 1024

# (format of a, format of b) -> the kernels. A new pair is a new line here.
PRODUCTS = {
    ("bf16", "bf16"): Product(gemm_bf16, gemm_few_bf16, gemm_wide_bf16),
    ("f16", "f16"): Product(gemm_bf16, gemm_few_bf16, gemm_wide_bf16),
    **{pair: Product(BLOCK_GEMM[pair], FEW_BLOCK_GEMM[pair], WIDE_BLOCK_GEMM[pair]) for pair in BLOCK_PAIRS},
}
