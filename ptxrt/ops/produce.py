"""Norms, gates and activations for callers: the operations between two matrix products, in one read and one write."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from ..array import DeviceArray, as_output, check_forward
from ..errors import ArgumentError
from ..formats import Format, f32, format_of, to_convert
from ..prepared import remembered
from .attention_call import output_format
from .gemm_kernels import ACTIVATIONS
from .memory import check_memory, parts_of
from .operands import is_number
from .outputs import Ending, Target, check_out, checked_ending
from .place import Place, as_rows, copied_to
from .produce_kernels import activate_rows, gate_rows, norm_blocks, norm_rows, room_for, share_blocks, written_rows
from .quantized import QuantizedArray, unquantized

if TYPE_CHECKING:
    from numpy.typing import DTypeLike
    from typing_extensions import Unpack

    from ..typing import (
        ActivationOptions,
        Array,
        Flag,
        GateOptions,
        HostArray,
        NormOptions,
        Number,
        ProducedFormatName,
        RootNormOptions,
        Rounding,
        ScaleLayout,
        ScaleRule,
        StreamLike,
    )

ROUNDINGS = ("once", "16")


@overload
def rmsnorm(
    x: HostArray,
    weight: Array | None = ...,
    *,
    residual: None = ...,
    format: None = ...,
    **options: Unpack[RootNormOptions],
) -> HostArray: ...
@overload
def rmsnorm(
    x: DeviceArray,
    weight: Array | None = ...,
    *,
    residual: None = ...,
    format: None = ...,
    **options: Unpack[RootNormOptions],
) -> DeviceArray: ...
@overload
def rmsnorm(
    x: HostArray,
    weight: Array | None = ...,
    *,
    residual: None = ...,
    format: ProducedFormatName,
    **options: Unpack[RootNormOptions],
) -> QuantizedArray: ...
@overload
def rmsnorm(
    x: DeviceArray,
    weight: Array | None = ...,
    *,
    residual: None = ...,
    format: ProducedFormatName,
    **options: Unpack[RootNormOptions],
) -> QuantizedArray: ...
@overload
def rmsnorm(
    x: HostArray, weight: Array | None = ..., *, residual: Array, format: None = ..., **options: Unpack[RootNormOptions]
) -> tuple[HostArray, HostArray]: ...
@overload
def rmsnorm(
    x: DeviceArray,
    weight: Array | None = ...,
    *,
    residual: Array,
    format: None = ...,
    **options: Unpack[RootNormOptions],
) -> tuple[DeviceArray, DeviceArray]: ...
@overload
def rmsnorm(
    x: HostArray,
    weight: Array | None = ...,
    *,
    residual: Array,
    format: ProducedFormatName,
    **options: Unpack[RootNormOptions],
) -> tuple[QuantizedArray, HostArray]: ...
@overload
def rmsnorm(
    x: DeviceArray,
    weight: Array | None = ...,
    *,
    residual: Array,
    format: ProducedFormatName,
    **options: Unpack[RootNormOptions],
) -> tuple[QuantizedArray, DeviceArray]: ...
@overload
def rmsnorm(
    x: Array,
    weight: Array | None = ...,
    *,
    residual: Array | None = ...,
    format: ProducedFormatName | None = ...,
    **options: Unpack[RootNormOptions],
) -> Any: ...
@remembered
def rmsnorm(
    x: Array,
    weight: Array | None = None,
    *,
    eps: Number = 1e-6,
    residual: Array | None = None,
    offset: Number = 0.0,
    rounding: Rounding = "once",
    format: ProducedFormatName | None = None,
    out_dtype: DTypeLike | None = None,
    scale_rule: ScaleRule | None = None,
    scale_layout: ScaleLayout = "linear",
    global_scale: Number | Array | None = None,
    out: Array | QuantizedArray | None = None,
    residual_out: Array | None = None,
    stream: StreamLike = None,
) -> Any:
    """Normalize rows of x [.., n] by their root mean square: y = v / sqrt(mean(v^2) + eps) (weight + offset).

    All arithmetic is float32; the bits of a row depend on no other row. A row whose sum of squares overflows float32
    becomes zeros (n equal values beyond 1.8e19 / sqrt(n)); squares of values below 2.6e-23 are 0. A NaN makes its row
    NaN; an infinity becomes NaN and the rest of its row zeros. Empty arrays give empty results. NumPy arrays give NumPy
    results. Device arrays stay on the device; the call does not wait. Kernel: `norm_rows`.

    Args:
        x: float32, float16 or bfloat16 on any strides (on a device none below 0).
        weight: Floats [n]; None is 1, without an offset.
        eps: A number from 0 on.
        residual: An array of x's shape and type. v is then x + residual, and the result is (y, v in x's type); without
            it v is x.
        offset: Added to the weight.
        rounding: "once" rounds only y; "16" also rounds v, and the values that the weight multiplies, to x's type, as
            published models do.
        format: None gives floats of out_dtype; "mxfp8", "mxfp4" or "nvfp4" gives a QuantizedArray with the bytes of
            `quantize(y, pad=True)` on the float32 values of y.
        out_dtype: float32, float16 or bfloat16; None is x's.
        scale_rule: As in `quantize`, but None is "rceil" for mxfp8 and "even" for mxfp4.
        scale_layout: "linear" or "128x4".
        global_scale: Required for nvfp4: a positive number (1 for a single level of scales) or a float32 device scalar,
            as in `quantize`.
        out: An array or QuantizedArray to write y to, as in `quantize`. It must not share memory with an argument.
        residual_out: An array of x's type to write v to. It must not share memory with an argument.
        stream: A stream of the device; None is the library's own.

    Raises:
        ArgumentError: An argument is invalid; the message names it.
    """
    return _norm(
        "rmsnorm",
        x,
        weight,
        None,
        eps,
        residual,
        offset,
        rounding,
        0,
        (out_dtype, format, scale_rule, scale_layout, global_scale),
        out,
        residual_out,
        stream,
    )


@overload
def layernorm(
    x: HostArray,
    weight: Array | None = ...,
    bias: Array | None = ...,
    *,
    residual: None = ...,
    format: None = ...,
    **options: Unpack[NormOptions],
) -> HostArray: ...
@overload
def layernorm(
    x: DeviceArray,
    weight: Array | None = ...,
    bias: Array | None = ...,
    *,
    residual: None = ...,
    format: None = ...,
    **options: Unpack[NormOptions],
) -> DeviceArray: ...
@overload
def layernorm(
    x: HostArray,
    weight: Array | None = ...,
    bias: Array | None = ...,
    *,
    residual: None = ...,
    format: ProducedFormatName,
    **options: Unpack[NormOptions],
) -> QuantizedArray: ...
@overload
def layernorm(
    x: DeviceArray,
    weight: Array | None = ...,
    bias: Array | None = ...,
    *,
    residual: None = ...,
    format: ProducedFormatName,
    **options: Unpack[NormOptions],
) -> QuantizedArray: ...
@overload
def layernorm(
    x: HostArray,
    weight: Array | None = ...,
    bias: Array | None = ...,
    *,
    residual: Array,
    format: None = ...,
    **options: Unpack[NormOptions],
) -> tuple[HostArray, HostArray]: ...
@overload
def layernorm(
    x: DeviceArray,
    weight: Array | None = ...,
    bias: Array | None = ...,
    *,
    residual: Array,
    format: None = ...,
    **options: Unpack[NormOptions],
) -> tuple[DeviceArray, DeviceArray]: ...
@overload
def layernorm(
    x: HostArray,
    weight: Array | None = ...,
    bias: Array | None = ...,
    *,
    residual: Array,
    format: ProducedFormatName,
    **options: Unpack[NormOptions],
) -> tuple[QuantizedArray, HostArray]: ...
@overload
def layernorm(
    x: DeviceArray,
    weight: Array | None = ...,
    bias: Array | None = ...,
    *,
    residual: Array,
    format: ProducedFormatName,
    **options: Unpack[NormOptions],
) -> tuple[QuantizedArray, DeviceArray]: ...
@overload
def layernorm(
    x: Array,
    weight: Array | None = ...,
    bias: Array | None = ...,
    *,
    residual: Array | None = ...,
    format: ProducedFormatName | None = ...,
    **options: Unpack[NormOptions],
) -> Any: ...
@remembered
def layernorm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    eps: Number = 1e-5,
    residual: Array | None = None,
    format: ProducedFormatName | None = None,
    out_dtype: DTypeLike | None = None,
    scale_rule: ScaleRule | None = None,
    scale_layout: ScaleLayout = "linear",
    global_scale: Number | Array | None = None,
    out: Array | QuantizedArray | None = None,
    residual_out: Array | None = None,
    stream: StreamLike = None,
) -> Any:
    """Normalize rows of x [.., n]: y = (v - m) / sqrt(mean((v - m)^2) + eps) weight + bias, with m the mean of the row
    v.

    A NaN or an infinity makes its row NaN. Everything else is as in `rmsnorm` with rounding="once". Kernel:
    `norm_rows`.

    Args:
        x: float32, float16 or bfloat16 on any strides (on a device none below 0).
        weight: Floats [n]; None is 1.
        bias: Floats [n]; None is 0.

    Raises:
        ArgumentError: An argument is invalid; the message names it.
    """
    return _norm(
        "layernorm",
        x,
        weight,
        bias,
        eps,
        residual,
        0.0,
        "once",
        1,
        (out_dtype, format, scale_rule, scale_layout, global_scale),
        out,
        residual_out,
        stream,
    )


@overload
def swiglu(x: HostArray, *, format: None = ..., **options: Unpack[GateOptions]) -> HostArray: ...
@overload
def swiglu(x: DeviceArray, *, format: None = ..., **options: Unpack[GateOptions]) -> DeviceArray: ...
@overload
def swiglu(
    x: HostArray | DeviceArray, *, format: ProducedFormatName, **options: Unpack[GateOptions]
) -> QuantizedArray: ...
@overload
def swiglu(x: Array, *, format: ProducedFormatName | None = ..., **options: Unpack[GateOptions]) -> Any: ...
@remembered
def swiglu(
    x: Array,
    *,
    interleaved: Flag = False,
    limit: Number | None = None,
    alpha: Number = 1.0,
    offset: Number = 0.0,
    row_weights: Array | None = None,
    rounding: Rounding = "once",
    format: ProducedFormatName | None = None,
    out_dtype: DTypeLike | None = None,
    scale_rule: ScaleRule | None = None,
    scale_layout: ScaleLayout = "linear",
    global_scale: Number | Array | None = None,
    out: Array | QuantizedArray | None = None,
    stream: StreamLike = None,
) -> Any:
    """Gate the values of x [.., 2 n]: y = g sigmoid(alpha g) (u + offset), of shape [.., n].

    All arithmetic is float32, with the functions of `matmul` with activation="swiglu". y is NaN if g or u is NaN, and
    where the formula has infinity times 0, such as for g = -infinity with alpha above 0; docs/numerics.md lists the
    cases. Arguments that are not listed are those of `rmsnorm`. Kernel: `gate_rows`.

    Args:
        x: float32, float16 or bfloat16 on any strides (on a device none below 0): g is the first half of each row, u
            the second.
        interleaved: Whether column i is computed from columns 2 i (g) and 2 i + 1 (u) instead.
        limit: A number from 0 on: g is at most `limit`, and u within [-limit, limit]. None is no limit. (gpt-oss:
            interleaved, limit 7, alpha 1.702, offset 1.)
        alpha: A number.
        offset: Added to u.
        row_weights: Floats of x's shape without its last axis, factors of y.
        rounding: "16" rounds y to x's type before it is quantized.

    Raises:
        ArgumentError: An argument is invalid; the message names it.
    """
    name = "swiglu"
    x = taken(name, "x", x)
    if x.shape[-1] % 2:
        received = f"x has shape {list(x.shape)}; its last axis holds a gate for each value"
        raise ArgumentError(f"{name}: {received}: pass an even one")
    shape = (*x.shape[:-1], x.shape[-1] // 2)
    numbers = dict(limit=math.inf if limit is None else checked_number(name, "limit", limit, 0))
    numbers |= dict(gate_alpha=checked_number(name, "alpha", alpha), offset=checked_number(name, "offset", offset))
    options = dict(interleaved=checked_flag(name, "interleaved", interleaved), **numbers)
    options |= dict(rounds=checked_rounding(name, rounding))
    if row_weights is not None:
        row_weights = float_array(name, "row_weights", row_weights, shape[:-1])
    requested = out_dtype, format, scale_rule, scale_layout, global_scale
    call = produced_call(name, dict(x=x, row_weights=row_weights), shape, requested, out)
    place = call.place(stream)
    if row_weights is not None:
        options["row_weights"] = as_vector(row_weights, place, f32)
    return call.run(place, gate_rows, share_blocks, (rows_of(x, place),), options)


@overload
def gelu(x: HostArray, *, format: None = ..., **options: Unpack[ActivationOptions]) -> HostArray: ...
@overload
def gelu(x: DeviceArray, *, format: None = ..., **options: Unpack[ActivationOptions]) -> DeviceArray: ...
@overload
def gelu(
    x: HostArray | DeviceArray, *, format: ProducedFormatName, **options: Unpack[ActivationOptions]
) -> QuantizedArray: ...
@overload
def gelu(x: Array, *, format: ProducedFormatName | None = ..., **options: Unpack[ActivationOptions]) -> Any: ...
@remembered
def gelu(
    x: Array,
    *,
    approximate: Literal["none", "tanh"] | None = None,
    format: ProducedFormatName | None = None,
    out_dtype: DTypeLike | None = None,
    scale_rule: ScaleRule | None = None,
    scale_layout: ScaleLayout = "linear",
    global_scale: Number | Array | None = None,
    out: Array | QuantizedArray | None = None,
    stream: StreamLike = None,
) -> Any:
    """Apply GELU to every value of x: y = x Phi(x), with erf or its tanh approximation.

    All arithmetic is float32, with the functions of `matmul` for "gelu" and "gelu_tanh". y is NaN for NaN and for
    -infinity (-infinity times 0). Arguments that are not listed are those of `rmsnorm`. Kernel: `activate_rows`.

    Args:
        x: float32, float16 or bfloat16 on any strides (on a device none below 0).
        approximate: None or "none" for erf, "tanh" for the approximation.

    Raises:
        ArgumentError: An argument is invalid; the message names it.
    """
    x = taken("gelu", "x", x)
    if approximate is not None and (not isinstance(approximate, str) or approximate not in ("none", "tanh")):
        raise ArgumentError(f"gelu: approximate is {approximate!r}; pass None or 'tanh'")
    activation = ACTIVATIONS.index("gelu_tanh" if approximate == "tanh" else "gelu")
    requested = out_dtype, format, scale_rule, scale_layout, global_scale
    call = produced_call("gelu", dict(x=x), tuple(x.shape), requested, out)
    place = call.place(stream)
    return call.run(place, activate_rows, share_blocks, (rows_of(x, place),), dict(activation=activation))


def _norm(name, x, weight, bias, eps, residual, offset, rounding, centered, requested, out, residual_out, stream):
    """Run `rmsnorm` or `layernorm`."""
    x = taken(name, "x", x)
    cols = x.shape[-1:]
    options: dict[str, Any] = dict(
        eps=checked_number(name, "eps", eps, 0), offset=checked_number(name, "offset", offset)
    )
    options |= dict(rounds=checked_rounding(name, rounding), centered=centered)
    vectors = {key: v for key, v in dict(weight=weight, bias=bias).items() if v is not None}
    vectors = {key: float_array(name, key, v, cols) for key, v in vectors.items()}
    if weight is None and options["offset"]:
        raise ArgumentError(f"{name}: offset is {offset!r}, which is added to a weight; pass one, or leave out offset")
    if residual is not None:
        (residual,) = unquantized(name, residual=residual)
        if tuple(residual.shape) != tuple(x.shape) or residual.dtype != x.dtype:
            received = f"residual is {residual.dtype} {list(residual.shape)}"
            raise ArgumentError(f"{name}: {received}; pass {x.dtype} {list(x.shape)}, as x has")
    call = produced_call(name, dict(x=x, residual=residual, **vectors), tuple(x.shape), requested, out)
    caller_out = None if residual_out is None else as_output(name, "residual_out", residual_out)
    if caller_out is not None:
        if residual is None:
            raise ArgumentError(f"{name}: residual_out came without a residual; pass one, or leave it out")
        if tuple(caller_out.shape) != tuple(x.shape) or caller_out.dtype != x.dtype:
            received = f"residual_out is {caller_out.dtype} {list(caller_out.shape)}"
            raise ArgumentError(f"{name}: {received}; pass {x.dtype} {list(x.shape)}, as x has")
        check_memory(name, dict(residual_out=caller_out), {**call.read, **call.parts})
    place = call.place(stream, caller_out)
    rows = rows_of(x, place)
    total = None
    if residual is not None:
        options["residual"] = rows_of(residual, place)
        total = _target(caller_out, place, tuple(x.shape), format_of(x.dtype))
        options["total"] = as_rows(total.direct)
    for key, vector in vectors.items():
        options[f"{key}_{format_of(vector.dtype)}"] = as_vector(vector, place, format_of(vector.dtype))
    y = call.run(place, norm_rows, norm_blocks, (rows,), options)
    return y if total is None else (y, total.handed_back())


# Shared by the calls


def _target(caller_out, place: Place, shape: tuple[int, ...], member: Format, lead=None) -> Target:
    """Return a float result that kernels write as rows."""
    return Target(caller_out, place, shape, member, lambda x: as_rows(x, lead) is not None)


@dataclass(frozen=True)
class _Call:
    """A checked call. output: the type of the result, None if `ending` quantizes it."""

    name: str
    read: dict[str, Any]
    shape: tuple[int, ...]
    output: Format | None
    ending: Ending | None
    out: Any

    @property
    def parts(self) -> dict[str, Any]:
        """The output arrays by name."""
        return {} if self.out is None else parts_of("out", self.out)

    def place(self, stream, *others) -> Place:
        """Return the place where the call runs."""
        place = Place([*self.read.values(), *self.parts.values(), *others], stream)
        place.put(next(iter(self.read.values())))
        return place

    def run(self, place: Place, kernel, blocks, inputs, options: dict[str, Any], lead: tuple[int, ...] | None = None):
        """Launch a kernel on rows and return the result.

        blocks: function of rows, columns and room for blocks that gives the blocks of threads; None for kernels that
        derive them. lead: the axes of rows, if there are several.
        """
        if blocks:
            rows, cols = math.prod(self.shape[:-1]), self.shape[-1]
            swizzled = self.ending is not None and self.ending.layout.scale_layout != "linear"
            room = room_for(kernel.name, inputs[0].dtype.itemsize, place.backend.multiprocessors)
            options = dict(options, blocks=max(blocks(written_rows(rows, swizzled), cols, room), 1))
        if self.ending:
            level = self.ending.level(place, self.out, self.read.values())
            codes, scales = self.ending.buffers(place, self.out)
            if codes.size:
                kernel(*inputs, **options, **self.ending.arguments(codes, scales, level), stream=place.stream)
            return self.ending.handed_back(place, codes, scales, level, self.out)
        target = _target(self.out, place, self.shape, self.output, lead)
        if target.whole.size:
            kernel(*inputs, **options, **{f"out_{self.output}": as_rows(target.direct, lead)}, stream=place.stream)
        return target.handed_back()


def produced_call(name: str, arrays: dict[str, Any], shape: tuple[int, ...], requested, out) -> _Call:
    """Check the output of a call; its default type is that of the first array.

    requested: out_dtype, format, scale_rule, scale_layout, global_scale.
    """
    x = next(iter(arrays.values()))
    on_host = isinstance(x, np.ndarray)
    out_dtype, format, rule, scale_layout, global_scale = requested
    caller_out = out if out is None or isinstance(out, QuantizedArray) else as_output(name, "out", out)
    ending = checked_ending(name, on_host, shape, caller_out, out_dtype, format, rule, scale_layout, global_scale)
    output = None if ending else output_format(name, out_dtype, caller_out, format_of(x.dtype))
    read = {key: array for key, array in arrays.items() if array is not None}
    if ending and ending.global_scale is not None:
        read["global_scale"] = ending.global_scale
    check_forward(name, **read)
    call = _Call(name, read, shape, output, ending, caller_out)
    check_out(name, caller_out, ending, shape, read)
    return call


def taken(name: str, key: str, x):
    """Return the argument `key` as an array of floats with at least one axis."""
    (x,) = unquantized(name, **{key: x})
    if format_of(x.dtype) is None:
        raise ArgumentError(f"{name}: {key} is {x.dtype} {list(x.shape)}; {to_convert(key, False)}")
    if not x.shape:
        raise ArgumentError(f"{name}: {key} is one number; pass an array with at least one axis")
    return x


def rows_of(x, place: Place, lead: tuple[int, ...] | None = None) -> DeviceArray:
    """Return the rows of an array on the device, as `as_rows` does; a copy if that fails."""
    x = place.put(x)
    rows = as_rows(x, lead)
    return as_rows(copied_to(x, format_of(x.dtype), place), lead) if rows is None else rows


def float_array(name: str, key: str, value, shape: tuple[int, ...]):
    """Return floats of a shape; NumPy float64 is rounded to float32."""
    (value,) = unquantized(name, **{key: value})
    if isinstance(value, np.ndarray) and value.dtype == np.float64:
        with np.errstate(over="ignore"):
            value = value.astype(np.float32)
    if tuple(value.shape) != tuple(shape) or format_of(value.dtype) is None:
        raise ArgumentError(f"{name}: {key} is {value.dtype} {list(value.shape)}; pass floats of shape {list(shape)}")
    return value


def as_vector(value, place: Place, member: Format) -> DeviceArray:
    """Return floats on the device in one axis without gaps, in a format."""
    value = place.put(value)
    if value.is_contiguous and member.holds(value.dtype):
        return value.reshape(value.size)
    return copied_to(value, member, place).reshape(value.size)


def checked_number(name: str, key: str, value, least: float | None = None) -> float:
    """Return a number that is finite in float32; ArgumentError for others."""
    try:
        number = float(value) if is_number(value) else None
    except (TypeError, ValueError, OverflowError):
        number = None
    with np.errstate(over="ignore"):
        finite = number is not None and np.isfinite(np.float32(number))
    if number is None or not finite or (least is not None and number < least):
        expected = "a number that is finite in float32" + (f", from {least} on" if least is not None else "")
        raise ArgumentError(f"{name}: {key} is {value!r}; pass {expected}")
    return number


def checked_flag(name: str, key: str, value) -> int:
    if not isinstance(value, (bool, np.bool_)):
        raise ArgumentError(f"{name}: {key} is {value!r}; pass True or False")
    return int(value)


def checked_rounding(name: str, rounding) -> int:
    if not isinstance(rounding, str) or rounding not in ROUNDINGS:
        raise ArgumentError(f"{name}: rounding is {rounding!r}; pass 'once' or '16'")
    return ROUNDINGS.index(rounding)
