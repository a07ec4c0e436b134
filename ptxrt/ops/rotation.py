"""Rotary position embeddings: tables of angles, and `rope`, which rotates pairs of values by them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from ..array import check_size, host_array
from ..errors import ArgumentError
from ..formats import f32
from ..prepared import remembered
from .operands import whole_numbers
from .place import Place
from .produce import as_vector, checked_flag, checked_rounding, produced_call, rows_of, taken
from .produce_kernels import norm_blocks
from .quantized import unquantized
from .rotation_kernels import rope_rows

if TYPE_CHECKING:
    from numpy.typing import DTypeLike
    from typing_extensions import Unpack

    from ..array import DeviceArray
    from ..typing import (
        Array,
        Flag,
        HostArray,
        Number,
        ProducedFormatName,
        RotationOptions,
        RotationStyle,
        Rounding,
        ScaleLayout,
        ScaleRule,
        StreamLike,
        WholeNumbers,
    )
    from .quantized import QuantizedArray

STYLES = ("halves", "pairs")
# The elements of a table that are computed at a time. In float64 they take twice their memory.
_ELEMENTS_AT_ONCE = 1 << 20

_YARN = dict(factor=None, length=None, beta_fast=32.0, beta_slow=1.0, truncate=True, magnitude=False)


def rope_table(dim: int, length: int, base: Number = 10000.0, *, yarn: Mapping[str, Any] | None = None) -> HostArray:
    """Tabulate rotary embeddings: float32 [length, dim]; for each position dim / 2 cosines, then dim / 2 sines.

    The angle of pair i at position p is p base^(-2 i / dim). Everything is computed in float64 and rounded once.
    Source: Su et al., RoFormer; Peng et al., YaRN.

    Args:
        dim: The number of values that are rotated, even.
        length: The number of positions.
        base: A number above 1.
        yarn: None, or a mapping of `factor`, by which the context grows, and `length`, the context before; optionally
            beta_fast=32, beta_slow=1, truncate=True, magnitude=False. Angles of pairs that make less than beta_slow
            rotations in the old context are divided by the factor. Angles of those that make more than beta_fast are
            kept; between the two they are interpolated. With `truncate` the bounds are rounded outwards to whole pairs
            (gpt-oss: False). magnitude multiplies cosines and sines; True is 0.1 ln(factor) + 1.

    Raises:
        ArgumentError: A size or number is invalid.
    """
    dim, length = _whole("dim", dim, 2), _whole("length", length, 0)
    if dim % 2:
        raise ArgumentError(f"rope_table: dim is {dim}; pairs of values are rotated: pass an even one")
    check_size("rope_table", (length, dim), f32.dtype)
    base = _positive("base", base)
    if base <= 1:
        raise ArgumentError(f"rope_table: base is {base!r}; pass a number above 1")
    pairs = np.arange(dim // 2, dtype=np.float64)
    angles = base ** (-2 * pairs / dim)
    magnitude = 1.0
    if yarn is not None:
        options = _yarn_options(yarn)
        low, high = (
            dim * math.log(options["length"] / (options[key] * 2 * math.pi)) / (2 * math.log(base))
            for key in ("beta_fast", "beta_slow")
        )
        if options["truncate"]:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        share = np.clip((pairs - low) / max(high - low, 1e-3), 0, 1)  # the share of the angle that is divided
        angles = angles / options["factor"] * share + angles * (1 - share)
        magnitude = options["magnitude"]
    table = host_array("rope_table", (length, dim), f32.dtype)
    rows = max(1, _ELEMENTS_AT_ONCE // dim)
    for first in range(0, length, rows):
        turned = np.arange(first, min(first + rows, length), dtype=np.float64)[:, None] * angles
        table[first : first + rows, : dim // 2] = magnitude * np.cos(turned)
        table[first : first + rows, dim // 2 :] = magnitude * np.sin(turned)
    return table


@overload
def rope(
    x: HostArray, table: Array, positions: WholeNumbers, *, format: None = ..., **options: Unpack[RotationOptions]
) -> HostArray: ...
@overload
def rope(
    x: DeviceArray, table: Array, positions: WholeNumbers, *, format: None = ..., **options: Unpack[RotationOptions]
) -> DeviceArray: ...
@overload
def rope(
    x: HostArray | DeviceArray,
    table: Array,
    positions: WholeNumbers,
    *,
    format: ProducedFormatName,
    **options: Unpack[RotationOptions],
) -> QuantizedArray: ...
@overload
def rope(
    x: Array,
    table: Array,
    positions: WholeNumbers,
    *,
    format: ProducedFormatName | None = ...,
    **options: Unpack[RotationOptions],
) -> Any: ...
@remembered
def rope(
    x: Array,
    table: Array,
    positions: WholeNumbers,
    *,
    style: RotationStyle = "halves",
    first: int = 0,
    inverse: Flag = False,
    rounding: Rounding = "once",
    format: ProducedFormatName | None = None,
    out_dtype: DTypeLike | None = None,
    scale_rule: ScaleRule | None = None,
    scale_layout: ScaleLayout = "linear",
    global_scale: Number | Array | None = None,
    out: Array | QuantizedArray | None = None,
    stream: StreamLike = None,
) -> Any:
    """Rotate pairs of values of each row of x [*positions.shape, .., n] by the angles of its position.

    A pair (a, b) with cosine c and sine s becomes (a c - b s, b c + a s). All arithmetic is float32, with two roundings
    for each value. NaN and infinities give what the formula gives, and only in their pair. Empty arrays give empty
    results. Arguments that are not listed are those of `rmsnorm`. Kernel: `rope_rows`.

    Args:
        x: float32, float16 or bfloat16 on any strides (on a device none below 0), such as [tokens, heads, n] with a
            position for each token, or [batch, length, heads, n] with positions [batch, length].
        table: float32 [length, r] of `rope_table`, r even. Columns first to first + r - 1 are rotated, the others
            copied.
        positions: Whole numbers, int32 on a device. On the host a position outside the table is an ArgumentError. A
            device array is not checked; such a position makes the rotated values NaN.
        style: "halves" pairs columns i and i + r / 2 of the rotated ones (Llama, Qwen, gpt-oss), "pairs" columns 2 i
            and 2 i + 1 (GPT-J, DeepSeek).
        first: The first column that is rotated.
        inverse: Whether the sine is -s, which rotates in the opposite direction.
        rounding: "16" rounds the result to x's type before it is quantized.

    Raises:
        ArgumentError: An argument is invalid; the message names it.
    """
    name = "rope"
    x = taken(name, "x", x)
    table, options = checked_rotation(name, table, style, first, x.shape[-1])
    options |= dict(inverse=checked_flag(name, "inverse", inverse), rounds=checked_rounding(name, rounding))
    positions = checked_positions(name, positions, table)
    lead = tuple(positions.shape)
    if lead != tuple(x.shape[:-1])[: len(lead)]:
        received = f"positions have shape {list(lead)}, x {list(x.shape)}"
        raise ArgumentError(f"{name}: {received}; pass a position for each element of x's first axes")
    requested = out_dtype, format, scale_rule, scale_layout, global_scale
    call = produced_call(name, dict(x=x, table=table, positions=positions), tuple(x.shape), requested, out)
    place = call.place(stream)
    if not x.size:
        return call.run(place, rope_rows, None, (), {})
    axes = math.prod(lead), math.prod(x.shape[len(lead) : -1])
    table, positions = placed_rotation(name, table, positions, place)
    return call.run(place, rope_rows, norm_blocks, (rows_of(x, place, axes), table, positions), options, axes)


def checked_rotation(name: str, table, style, first, cols: int) -> tuple[Any, dict[str, int]]:
    """Return a table of rotations and the options of its kernels; ArgumentError if rows of `cols` values do not allow
    them."""
    (table,) = unquantized(name, table=table)
    if len(table.shape) != 2 or table.dtype != np.float32 or not table.shape[1] or table.shape[1] % 2:
        received = f"table is {table.dtype} {list(table.shape)}"
        raise ArgumentError(f"{name}: {received}; pass float32 [length, r] of ptxrt.rope_table, r even")
    if not isinstance(style, str) or style not in STYLES:
        raise ArgumentError(f"{name}: style is {style!r}; pass 'halves' or 'pairs'")
    whole = isinstance(first, (int, np.integer)) and not isinstance(first, bool)
    if not whole or not 0 <= first <= cols - table.shape[1]:
        received = f"first is {first!r}, the table turns {table.shape[1]} columns, rows have {cols}"
        raise ArgumentError(f"{name}: {received}; pass a column from 0 on with room for those behind it")
    return table, dict(first=int(first), pairs=STYLES.index(style))


def checked_positions(name: str, positions, table):
    """Return positions as int32; ArgumentError for host positions outside the table."""
    positions = whole_numbers(name, "positions", positions, "one for each token")
    seen = isinstance(positions, np.ndarray) and positions.size
    if seen and not 0 <= positions.min() <= positions.max() < table.shape[0]:
        received = f"positions go from {positions.min()} to {positions.max()}"
        raise ArgumentError(f"{name}: {received}; the table has {table.shape[0]}, from 0 on")
    return positions


def placed_rotation(name: str, table, positions, place: Place):
    """Return the table and the positions on the device, as kernels take them."""
    table, positions = place.put(table), place.put(positions)
    if not positions.is_contiguous:
        received = f"positions {list(positions.shape)} have strides of {list(positions.strides)} bytes"
        raise ArgumentError(f"{name}: {received}; pass positions.copy()")
    return as_vector(table, place, f32).reshape(*table.shape), positions.reshape(positions.size)


def _yarn_options(yarn) -> dict[str, Any]:
    """Return the checked numbers of YaRN."""
    known = ", ".join(_YARN)
    if not isinstance(yarn, Mapping) or not yarn.keys() <= _YARN.keys() or not {"factor", "length"} <= yarn.keys():
        raise ArgumentError(f"rope_table: yarn is {yarn!r}; pass a mapping with factor and length, of {known}")
    options: dict[str, Any] = {**_YARN, **yarn}
    for key in ("factor", "length", "beta_fast", "beta_slow"):
        options[key] = _positive(f"{key} of yarn", options[key])
    if options["factor"] < 1:
        raise ArgumentError(
            f"rope_table: factor of yarn is {options['factor']!r}; the context grows by it: pass 1 or more"
        )
    if options["beta_fast"] < options["beta_slow"]:
        received = f"beta_fast of yarn is {options['beta_fast']!r}, beta_slow {options['beta_slow']!r}"
        raise ArgumentError(f"rope_table: {received}; beta_fast is at least beta_slow")
    if not isinstance(options["truncate"], (bool, np.bool_)):
        raise ArgumentError(f"rope_table: truncate of yarn is {options['truncate']!r}; pass True or False")
    asked = options["magnitude"]
    if isinstance(asked, (bool, np.bool_)):
        options["magnitude"] = 0.1 * math.log(options["factor"]) + 1 if asked else 1.0
    else:
        options["magnitude"] = _positive("magnitude of yarn", asked)
        if options["magnitude"] > float(np.finfo(np.float32).max):
            raise ArgumentError(f"rope_table: magnitude of yarn is {asked!r}; pass a number that float32 holds")
    return options


def _whole(name: str, value, least: int) -> int:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < least:
        raise ArgumentError(f"rope_table: {name} is {value!r}; pass a whole number from {least} on")
    return int(value)


def _positive(name: str, value) -> float:
    known = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    try:
        number = float(value) if known else math.nan
    except OverflowError:
        number = math.inf
    if not 0 < number < math.inf:
        raise ArgumentError(f"rope_table: {name} is {value!r}; pass a positive number that float64 holds")
    return number
