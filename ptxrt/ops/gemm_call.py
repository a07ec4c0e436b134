"""`Call` and `GroupedCall`: the arguments of `matmul` and `matmul_grouped`, checked before anything is uploaded."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..array import DeviceArray, as_arrays, as_output, check_forward
from ..blocks import BLOCK_FORMATS
from ..errors import ArgumentError
from ..formats import Format, bf16, format_of, to_convert
from .attention_call import output_format
from .gemm_kernels import ACTIVATIONS
from .operands import is_number, operand_rule, whole_numbers
from .outputs import Ending, check_out, checked_ending
from .produce import checked_number, float_array
from .quantize import given_global_scale, rule_number
from .quantized import Packed, QuantizedArray, unquantized

# Up to this many rows K is split, in a way that depends only on K and the formats.
FEW_ROWS = 64
_GATE = dict(limit=math.inf, alpha=1.0, offset=0.0)


@dataclass(frozen=True)
class Operand:
    """A or B of a product: an array or a QuantizedArray [.., rows, K], its format, and how an array is quantized."""

    name: str
    values: Any
    format: str
    rule: str | None
    global_scale: Any

    @property
    def quantizes(self) -> bool:
        """Whether the call quantizes an array."""
        return self.format in BLOCK_FORMATS and not isinstance(self.values, QuantizedArray)


@dataclass(frozen=True)
class Call:
    """A checked call of `matmul`.

    a [.., M, K], b [.., N, K]. batch: the leading axes of C. width: the columns of C, N or N / 2. output: the type of
    C, or None if `ending` quantizes it. norm, eps: `a_norm` and `a_eps`.
    """

    a: Operand
    b: Operand
    batch: tuple[int, ...]
    rows: int
    cols: int
    depth: int
    width: int
    alpha: float
    bias: Any
    activation: int
    gate: dict[str, float]
    residual: Any
    output: Format | None
    ending: Ending | None
    splits: int | None
    out: Any
    norm: Any = None
    eps: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of C."""
        return (*self.batch, self.rows, self.width)

    @property
    def arrays(self) -> dict[str, Any]:
        """All input arrays by name."""
        named = dict(a=self.a.values, b=self.b.values, bias=self.bias, residual=self.residual, a_norm=self.norm)
        named |= {f"{x.name}_global_scale": x.global_scale for x in (self.a, self.b)}
        if self.ending:
            named["out_global_scale"] = self.ending.global_scale
        return arrays_in(named)


def arrays_in(named: dict[str, Any]) -> dict[str, Any]:
    """Return arguments that are arrays, and the arrays of a QuantizedArray under names such as a.scales."""
    found = {}
    for name, x in named.items():
        parts = {f"{name}.{key}": part for key, part in x.arrays.items()} if isinstance(x, Packed) else {name: x}
        found |= {key: part for key, part in parts.items() if isinstance(part, (np.ndarray, DeviceArray))}
    return found


def gemm_call(
    products,
    a,
    b,
    *,
    a_format,
    b_format,
    transpose_b,
    alpha,
    bias,
    activation,
    residual,
    out_format,
    out_scale_rule,
    out_scale_layout,
    out_global_scale,
    a_scale_rule,
    b_scale_rule,
    a_global_scale,
    b_global_scale,
    out_dtype,
    splits,
    out,
    a_norm=None,
    a_eps=0.0,
    on_host=True,
) -> Call:
    """Check the arguments of `matmul`. products: (format of a, format of b) -> kernels. on_host: whether arguments that
    are not named here are on the host."""
    a, b = _with_rows("a", a), _rows_of_b(_with_rows("b", b), transpose_b, b_format)
    formats = _format_of("a", a, a_format, products), _format_of("b", b, b_format, products)
    check_pair(products, *formats, held=(isinstance(_held(a), QuantizedArray), isinstance(_held(b), QuantizedArray)))
    caller_out = None if out is None else out if isinstance(out, QuantizedArray) else as_output("matmul", "out", out)
    on_host = on_host and not _on_device(_held(a), _held(b), bias, residual, a_norm)
    a = _operand("a", a, formats[0], a_scale_rule, a_global_scale, on_host)
    b = _operand("b", b, formats[1], b_scale_rule, b_global_scale, on_host)
    (*batch_a, rows, depth), (*batch_b, cols, depth_b) = a.values.shape, b.values.shape
    if depth != depth_b:
        order = "[.., N, K]" if transpose_b else "[.., K, N]"
        near = (
            "; its last axes match K the other way round: pass transpose_b=False"
            if transpose_b and cols == depth
            else ""
        )
        shapes = f"a {list(a.values.shape)} has K = {depth}, b {order} has K = {depth_b}"
        raise ArgumentError(f"matmul: {shapes}; pass a and b of one K{near}")
    try:
        batch = np.broadcast_shapes(tuple(batch_a), tuple(batch_b))
    except ValueError:
        shapes = f"a has {batch_a}, b {batch_b}"
        raise ArgumentError(
            f"matmul: leading axes do not broadcast: {shapes}; each is alike, or 1 in one of them"
        ) from None
    if not _is_finite(alpha):
        raise ArgumentError(f"matmul: alpha is {alpha!r}; pass a number that is finite in float32")
    if splits is not None and not (
        isinstance(splits, (int, np.integer)) and not isinstance(splits, bool) and splits == 1
    ):
        raise ArgumentError(f"matmul: splits is {splits!r}; pass None, or 1 so that K is not cut")
    number, gate = checked_activation(activation)
    gated = ACTIVATIONS[number] == "swiglu"
    if gated and cols % 2:
        raise ArgumentError(
            f"matmul: activation 'swiglu' makes one column of two, N is {cols}; pass an even N (interleave_rows)"
        )
    width = cols // 2 if gated else cols
    shape = (*batch, rows, width)
    output, ending = _output(
        a, on_host, caller_out, out_dtype, shape, out_format, out_scale_rule, out_scale_layout, out_global_scale
    )
    call = Call(
        a,
        b,
        batch,
        rows,
        cols,
        depth,
        width,
        float(alpha),
        checked_bias(bias, (cols,), gated),
        number,
        gate,
        _checked_residual(residual, shape),
        output,
        ending,
        splits,
        caller_out,
        *_checked_norm(a, a_norm, a_eps, depth),
    )
    if not isinstance(a.values, _Shape):
        check_output(call)
    return call


def _on_device(*arguments) -> bool:
    """Return whether any argument is on a device."""
    return any(x.on_device if isinstance(x, Packed) else isinstance(x, DeviceArray) for x in arguments)


def _with_rows(name: str, x):
    """Return an array or a QuantizedArray with rows of K values."""
    if isinstance(x, _Shape):
        return x
    if isinstance(x, Packed):
        if not isinstance(x, QuantizedArray):
            raise ArgumentError(f"matmul: {name} is {x!r}, an operand of attention; quantize it with ptxrt.quantize")
        if x.axis != -1:
            near = f"quantize({name}, {x.format!r}) has them along the last axis"
            raise ArgumentError(
                f"matmul: {name} is {x!r}, whose blocks lie along axis {x.axis}; products take axis -1: {near}"
            )
    else:
        (x,) = as_arrays("matmul", **{name: x})
    if len(x.shape) < 2:
        raise ArgumentError(f"matmul: {name} has shape {list(x.shape)}; pass at least two axes, [.., rows, K]")
    return x


def _rows_of_b(b, transpose_b, b_format):
    """Return b as [.., N, K], whichever way it came."""
    if not isinstance(transpose_b, (bool, np.bool_)):
        raise ArgumentError(f"matmul: transpose_b is {transpose_b!r}; pass True for b [N, K] or False for b [K, N]")
    if transpose_b or isinstance(b, _Shape):
        return b
    if isinstance(b, QuantizedArray) or (isinstance(b_format, str) and b_format in BLOCK_FORMATS):
        received = b_format or f"a QuantizedArray of {b.format}"
        raise ArgumentError(
            f"matmul: transpose_b=False takes b of 16 bits, b is {received}; pass b [N, K], blocks along K"
        )
    return b.transpose(*range(len(b.shape) - 2), -1 % len(b.shape), -2 % len(b.shape))


def _format_of(name: str, x, asked, products) -> str:
    """Return the format in which an operand is multiplied."""
    known = dict.fromkeys(pair["ab".index(name)] for pair in products)
    if asked is not None and (not isinstance(asked, str) or asked not in known):
        raise ArgumentError(f"matmul: {name}_format is {asked!r}; there are {', '.join(map(repr, known))}")
    x = _held(x)
    if isinstance(x, QuantizedArray):
        if asked not in (None, x.format):
            raise ArgumentError(f"matmul: {name} is {x!r}, {name}_format {asked!r}; leave out {name}_format")
        return x.format
    member = format_of(x.dtype)
    if member is None:
        advice = (
            f"convert it to float16 or bfloat16, {name}.astype(numpy.float16), or to float32 beside {name}_format; "
            "--dtype f16 on the command line"
        )
        raise ArgumentError(
            f"matmul: {name} is {x.dtype} {list(x.shape)}; {advice if asked is None else to_convert(name)}"
        )
    if asked is None and member.itemsize == 4:
        raise ArgumentError(f"matmul: {name} is float32; say {name}_format: there are {', '.join(map(repr, known))}")
    return asked or member.name


def check_pair(products, a: str, b: str, held: tuple[bool, bool] = (False, False)) -> None:
    """Raise ArgumentError for a pair of formats without a kernel; the message names the nearest pair.

    held: whether each operand is quantized already, so that its format stays.
    """
    if (a, b) in products:
        return

    def nearness(pair: tuple[str, str]) -> int:
        found = 0
        for ours, asked, stays in zip(pair, (a, b), held):
            found += (8 if stays else 2) * (ours == asked) + ((ours in BLOCK_FORMATS) == (asked in BLOCK_FORMATS))
        return found

    nearest = max(products, key=nearness)
    why = ""
    if "nvfp4" in (a, b) and any(name.startswith("mx") for name in (a, b)):
        why = ": scales of nvfp4 and of the MX formats are of other kinds and lengths"
    known = ", ".join(f"{x} x {y}" for x, y in products)
    raise ArgumentError(
        f"matmul: there is no product {a} x {b}{why}; nearest: {nearest[0]} x {nearest[1]}. There is {known}"
    )


def _operand(name: str, x, format: str, rule, global_scale, on_host: bool) -> Operand:
    quantizes = format in BLOCK_FORMATS and not isinstance(_held(x), QuantizedArray)
    if not quantizes and (rule is not None or global_scale is not None):
        what = f"{name}_scale_rule" if rule is not None else f"{name}_global_scale"
        raise ArgumentError(f"matmul: {what} came, but {name} is not quantized in this call; leave it out")
    if quantizes:
        block = BLOCK_FORMATS[format]
        rule = operand_rule(format) if rule is None else rule
        rule_number("matmul", block, rule, f"{name}_")
        global_scale = given_global_scale("matmul", block, global_scale, on_host, f"{name}_")
    return Operand(name, x, format, rule, global_scale)


def checked_activation(activation) -> tuple[int, dict[str, float]]:
    """Return the number of an activation and the parameters of its gate."""
    options: Any = {}
    if isinstance(activation, (tuple, list)) and len(activation) == 2:
        activation, options = activation
    known = isinstance(activation, (str, type(None))) and activation in ACTIVATIONS
    fits = isinstance(options, dict) and options.keys() <= _GATE.keys() and (not options or activation == "swiglu")
    if not known or not fits:
        names = ", ".join(map(repr, ACTIVATIONS))
        received = activation if fits else (activation, options)
        raise ArgumentError(
            f"matmul: activation is {received!r}; pass one of {names}, or ('swiglu', dict(limit=, alpha=, offset=)), "
            "on the command line swiglu(limit=7,alpha=1,offset=0)"
        )
    numbers = _GATE | options
    for name, number in numbers.items():
        if not (_is_finite(number) or (name == "limit" and number == math.inf)) or (name == "limit" and number < 0):
            expected = "a number that is finite in float32" + ", from 0 on" * (name == "limit")
            raise ArgumentError(f"matmul: {name} of swiglu is {number!r}; pass {expected}")
    return ACTIVATIONS.index(activation), dict(
        limit=numbers["limit"], gate_alpha=numbers["alpha"], offset=numbers["offset"]
    )


def checked_bias(bias, shape: tuple[int, ...], gated: bool):
    """Return the bias, one number for each column before the activation."""
    if bias is None:
        return None
    bias = _added("bias", bias)
    if tuple(bias.shape) != shape or format_of(bias.dtype) is None:
        half = " (swiglu adds it before the gate)" if gated else ""
        raise ArgumentError(
            f"matmul: bias is {bias.dtype} {list(bias.shape)}; pass float {list(shape)}, one for each row of b{half}"
        )
    return bias


def _added(name: str, x):
    """Return an array of floats that is added to C; float64 of the host is rounded to float32."""
    (x,) = unquantized("matmul", **{name: x})
    if isinstance(x, np.ndarray) and x.dtype == np.float64:
        with np.errstate(over="ignore"):
            x = x.astype(np.float32)
    return x


def _checked_residual(residual, shape: tuple[int, ...]):
    if residual is None:
        return None
    residual = _added("residual", residual)
    if tuple(residual.shape) != shape or format_of(residual.dtype) is None:
        received = f"{residual.dtype} {list(residual.shape)}"
        raise ArgumentError(
            f"matmul: residual is {received}; pass float32, float16 or bfloat16 of C's shape {list(shape)}"
        )
    return residual


def _checked_norm(a: Operand, weight, eps, depth: int) -> tuple[Any, float]:
    """Return the weights of the norm of A's rows, and its epsilon."""
    number = checked_number("matmul", "a_eps", eps, 0)
    if weight is None:
        return None, number
    if isinstance(_held(a.values), QuantizedArray):
        raise ArgumentError(f"matmul: a_norm came, but a is {_held(a.values)!r}; pass floats, which are normed")
    if a.format == "nvfp4" and a.global_scale is None:
        raise ArgumentError("matmul: a_norm came without a_global_scale; pass one (1 for a single level of scales)")
    return float_array("matmul", "a_norm", weight, (depth,)), number


def _output(a: Operand, on_host, caller_out, out_dtype, shape, out_format, rule, scale_layout, global_scale):
    """Return the type of C, or how C is quantized."""
    values = _held(a.values)
    requested = (shape, caller_out, out_dtype, out_format, rule, scale_layout, global_scale)
    ending = checked_ending("matmul", on_host, *requested, "out_")
    if ending:
        return None, ending
    default = bf16 if isinstance(values, QuantizedArray) else format_of(values.dtype)
    return output_format("matmul", out_dtype, caller_out, default), None


def check_output(call: Call, **others) -> None:
    """Raise ArgumentError if kernels cannot read the arrays of a call, or cannot write C to `out`. others: arrays that
    are read besides."""
    arrays = {**call.arrays, **arrays_in(others)}
    check_forward("matmul", **arrays)
    check_out("matmul", call.out, call.ending, call.shape, arrays, "residual")


def _is_finite(value) -> bool:
    """Return whether a value is a number that is finite in float32."""
    try:
        if not is_number(value) or not math.isfinite(value):
            return False
        with np.errstate(over="ignore"):
            return bool(np.isfinite(np.float32(value)))
    except (TypeError, ValueError, OverflowError):
        return False


@dataclass(frozen=True)
class GroupedCall:
    """A checked call of `matmul_grouped`. product: what all groups have in common, as a product of all rows by one
    matrix."""

    product: Call
    groups: int
    starts: Any
    order: Any
    alphas: Any

    def launches(self, kernels) -> list[tuple]:
        """Return (kernel, least rows, most rows) of groups for each launch; kernels without groups are left out if
        sizes are known."""
        most = 2**31 - 1
        if self.product.splits is not None:
            return [(kernels.tiles, 1, most)]
        both = [(kernels.few, 1, FEW_ROWS), (kernels.tiles, FEW_ROWS + 1, most)]
        if not isinstance(self.starts, np.ndarray):
            return both if self.product.rows > FEW_ROWS else both[:1]
        sizes = np.diff(self.starts)
        return [x for x in both if ((x[1] <= sizes) & (sizes <= x[2])).any()]


def grouped_call(products, a, b, starts, order, **options) -> GroupedCall:
    """Check the arguments of `matmul_grouped`."""
    try:
        return _grouped_call(products, a, b, starts, order, **options)
    except ArgumentError as error:  # gemm_call names its own function
        if str(error).startswith("matmul: "):
            raise ArgumentError(str(error).replace("matmul: ", "matmul_grouped: ", 1)) from error.__cause__
        raise


def _grouped_call(
    products, a, b, starts, order, *, b_format, transpose_b, alpha, bias, out_format, out_global_scale, **options
):
    """Check the arguments; `gemm_call` checks `options`."""
    a, b = _with_rows("a", a), _with_rows("b", b)
    if len(a.shape) != 2 or len(b.shape) != 3:
        axes = "[groups, N, K]" if transpose_b else "[groups, K, N]"
        raise ArgumentError(
            f"matmul_grouped: a has shape {list(a.shape)}, b {list(b.shape)}; pass a [T, K] and b {axes}"
        )
    b = _rows_of_b(b, transpose_b, b_format)
    groups, tokens = b.shape[0], a.shape[0]
    starts = _whole_numbers("group_starts", starts, (groups + 1,))
    rows = tokens
    if order is not None:
        order = _whole_numbers("rows", order, None)
        rows = order.shape[0]
        if isinstance(order, np.ndarray) and order.size and not (0 <= order.min() and order.max() < tokens):
            raise ArgumentError(
                f"matmul_grouped: rows go from {order.min()} to {order.max()}; a has rows 0 to {tokens - 1}"
            )
    if isinstance(starts, np.ndarray) and (starts[0] != 0 or starts[-1] != rows or (np.diff(starts) < 0).any()):
        rising, name = starts[0] == 0 and not (np.diff(starts) < 0).any(), "a" if order is None else "rows"
        near = f"; leave out what lies behind: {name}[:{starts[-1]}]" if rising and starts[-1] < rows else ""
        raise ArgumentError(
            f"matmul_grouped: group_starts are {starts.tolist()}; they begin at 0, never fall and end at {rows}{near}"
        )
    alphas = None
    if not _is_finite(alpha):
        alphas = _number_for_each("alpha", alpha, groups)
        if isinstance(alphas, np.ndarray) and alphas.dtype.kind == "f":
            with np.errstate(over="ignore"):
                alphas = alphas.astype(np.float32)
        finite = not isinstance(alphas, np.ndarray) or (alphas.dtype.kind == "f" and np.isfinite(alphas).all())
        if (
            tuple(alphas.shape) != (groups,)
            or not finite
            or (not isinstance(alphas, np.ndarray) and alphas.dtype != np.float32)
        ):
            words = f"pass a number that is finite in float32, or one for each group, float32 [{groups}]"
            raise ArgumentError(f"matmul_grouped: alpha is {alpha!r}; {words}")
        alpha = 1.0
    levels = None
    out = options.get("out")
    format = out.format if isinstance(out, QuantizedArray) else out_format
    if out_global_scale is not None and isinstance(format, str) and format == "nvfp4":
        array = _number_for_each("out_global_scale", out_global_scale, groups)
        if isinstance(array, np.ndarray) and array.dtype.kind == "f":
            with np.errstate(over="ignore", under="ignore"):
                array = array.astype(np.float32)
        if tuple(array.shape) == (groups,) or array.size != 1:
            if tuple(array.shape) != (groups,) or array.dtype != np.float32:
                raise ArgumentError(
                    f"matmul_grouped: out_global_scale is {array.dtype} {list(array.shape)}; pass one number, or "
                    f"float32 [{groups}]"
                )
            if isinstance(array, np.ndarray) and not ((array > 0) & np.isfinite(array)).all():
                raise ArgumentError("matmul_grouped: out_global_scale holds what is not positive and finite")
            levels, out_global_scale = array, 1.0
    one = _Shape(b, b.shape[1:])
    biases = None
    if bias is not None:
        biases = _added("bias", bias)
        if len(biases.shape) == 2:
            biases = checked_bias(biases, (groups, b.shape[1]), False)
            bias = None
        else:
            biases = None
    call = gemm_call(
        products,
        _Shape(a, (rows, a.shape[1])),
        one,
        b_format=b_format,
        transpose_b=transpose_b,
        alpha=alpha,
        bias=bias,
        out_format=out_format,
        out_global_scale=out_global_scale,
        on_host=not _on_device(starts, order, alphas, levels, biases),
        **options,
    )
    quantizing = call.ending if levels is None else replace(call.ending, global_scale=levels)
    call = replace(
        call,
        a=replace(call.a, values=a),
        b=replace(call.b, values=b),
        bias=call.bias if biases is None else biases,
        ending=quantizing,
    )
    check_output(call, group_starts=starts, rows=order, alpha=alphas)
    return GroupedCall(call, groups, starts, order, alphas)


def _number_for_each(name: str, x, groups: int):
    """Return an array of numbers, one or one for each group."""
    if x is None or isinstance(x, (str, bytes, bool)):
        words = f"pass a number, or one for each group, float32 [{groups}]"
        raise ArgumentError(f"matmul_grouped: {name} is {x!r}; {words}")
    return as_arrays("matmul_grouped", **{name: x})[0]


class _Shape:
    """An operand under another shape, while a call is checked; b has its rows along N already."""

    def __init__(self, values, shape):
        self.values, self.shape, self.dtype = values, tuple(shape), getattr(values, "dtype", None)


def _held(x):
    """Return the array of an operand."""
    return x.values if isinstance(x, _Shape) else x


def _whole_numbers(name: str, x, shape):
    """Return int32 with one axis. Host arrays may have any integer type; device arrays must be int32."""
    expected = str(list(shape)) if shape else "of one axis"
    (array,) = as_arrays("matmul_grouped", **{name: x})
    if isinstance(array, np.ndarray) and array.dtype.kind in "iu" and array.size:
        least, most = int(array.min()), int(array.max())
        if least < -(2**31) or most >= 2**31:
            received = f"{array.dtype} {list(array.shape)} with {most if most >= 2**31 else least}"
            raise ArgumentError(f"matmul_grouped: {name} is {received}; pass int32 {expected}, which holds less")
    x = whole_numbers("matmul_grouped", name, x, expected)
    if len(x.shape) != 1 or (shape and tuple(x.shape) != shape):
        raise ArgumentError(f"matmul_grouped: {name} are {x.dtype} {list(x.shape)}; pass int32 {expected}")
    return x
