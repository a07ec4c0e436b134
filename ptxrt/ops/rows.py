"""Rows of tables for callers: take rows, average the rows of sequences, find the largest value of a row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import numpy as np

from ..array import DeviceArray, as_output, check_forward
from ..errors import ArgumentError
from ..formats import f32, i32
from ..prepared import remembered
from . import rows_kernels as kernels
from .memory import check_memory
from .operands import shown, whole_numbers
from .place import Place
from .produce import checked_flag, produced_call, rows_of, taken
from .produce_kernels import share_blocks
from .scales import fill_f32

if TYPE_CHECKING:
    from numpy.typing import DTypeLike
    from typing_extensions import Unpack

    from ..typing import (
        Array,
        Flag,
        HostArray,
        Number,
        ProducedFormatName,
        ProducedOptions,
        ScaleLayout,
        ScaleRule,
        StreamLike,
        WholeNumbers,
    )
    from .quantized import QuantizedArray


@overload
def take_rows(
    table: HostArray, ids: WholeNumbers, *, format: None = ..., **options: Unpack[ProducedOptions]
) -> HostArray: ...
@overload
def take_rows(
    table: DeviceArray, ids: WholeNumbers, *, format: None = ..., **options: Unpack[ProducedOptions]
) -> DeviceArray: ...
@overload
def take_rows(
    table: HostArray | DeviceArray, ids: WholeNumbers, *, format: ProducedFormatName, **options: Unpack[ProducedOptions]
) -> QuantizedArray: ...
@overload
def take_rows(
    table: Array, ids: WholeNumbers, *, format: ProducedFormatName | None = ..., **options: Unpack[ProducedOptions]
) -> Any: ...
@remembered
def take_rows(
    table: Array,
    ids: WholeNumbers,
    *,
    format: ProducedFormatName | None = None,
    out_dtype: DTypeLike | None = None,
    scale_rule: ScaleRule | None = None,
    scale_layout: ScaleLayout = "linear",
    global_scale: Number | Array | None = None,
    out: Array | QuantizedArray | None = None,
    stream: StreamLike = None,
) -> Any:
    """Take rows of a table [entries, n] by their numbers: y[..] = table[ids[..]], of shape [*ids.shape, n].

    Empty arrays give empty results. Arguments that are not listed are those of `rmsnorm`; results in the table's type
    are exact copies. Kernel: `take_rows`.

    Args:
        table: float32, float16 or bfloat16 on any strides (on a device none below 0).
        ids: Whole numbers, int32 on a device. On the host an id outside the table is an ArgumentError. A device array
            is not checked; such an id gives a row of zeros.

    Raises:
        ArgumentError: An argument is invalid; the message names it.
    """
    name = "take_rows"
    table = taken(name, "table", table)
    if len(table.shape) != 2:
        raise ArgumentError(f"{name}: table has shape {list(table.shape)}; pass two axes: [entries, n]")
    ids = whole_numbers(name, "ids", ids, "one for each row of the result")
    entries, cols = table.shape
    if isinstance(ids, np.ndarray) and ids.size and not 0 <= ids.min() <= ids.max() < entries:
        raise ArgumentError(f"{name}: ids go from {ids.min()} to {ids.max()}; the table has rows 0 to {entries - 1}")
    requested = out_dtype, format, scale_rule, scale_layout, global_scale
    call = produced_call(name, dict(table=table, ids=ids), (*ids.shape, cols), requested, out)
    place = call.place(stream)
    numbers = place.put(ids)
    if not numbers.is_contiguous:
        raise ArgumentError(f"{name}: ids {list(ids.shape)} have strides of {list(ids.strides)} bytes; pass ids.copy()")
    rows = rows_of(table, place)
    return call.run(place, kernels.take_rows, share_blocks, (rows, numbers.reshape(numbers.size)), {})


@overload
def mean_rows(
    x: HostArray,
    cu_seqlens: WholeNumbers,
    *,
    normalize: Flag = ...,
    out_dtype: DTypeLike | None = ...,
    out: Array | None = ...,
    stream: StreamLike = ...,
) -> HostArray: ...
@overload
def mean_rows(
    x: DeviceArray,
    cu_seqlens: WholeNumbers,
    *,
    normalize: Flag = ...,
    out_dtype: DTypeLike | None = ...,
    out: Array | None = ...,
    stream: StreamLike = ...,
) -> DeviceArray: ...
@overload
def mean_rows(
    x: Array,
    cu_seqlens: WholeNumbers,
    *,
    normalize: Flag = ...,
    out_dtype: DTypeLike | None = ...,
    out: Array | None = ...,
    stream: StreamLike = ...,
) -> Any: ...
@remembered
def mean_rows(
    x: Array,
    cu_seqlens: WholeNumbers,
    *,
    normalize: Flag = True,
    out_dtype: DTypeLike | None = None,
    out: Array | None = None,
    stream: StreamLike = None,
) -> Any:
    """Average the rows of each sequence of x [T, n]: y[i] is the mean of rows cu_seqlens[i] to cu_seqlens[i + 1].

    Sums are float32; the bits of a row depend on its sequence alone. The mean of no rows is zeros. A normalized mean
    becomes zeros if its sum of squares overflows float32, or if its squares are all 0 (values below 2.6e-23). NaN and
    infinities give what the formula gives. Empty arrays give empty results. Kernel: `mean_rows`.

    Args:
        x: float32, float16 or bfloat16 on any strides (on a device none below 0), sequences one after the other.
        cu_seqlens: N + 1 whole numbers that rise from 0 to T. On a device they are int32 and are not checked: rows
            outside of x do not count.
        normalize: Whether means are divided by their Euclidean length. A mean of length 0 gives zeros.
        out_dtype: float32, float16 or bfloat16; None is x's.
        out: An array [N, n] to write to, which shares no memory with an argument.
        stream: A stream of the device; None is the library's own.

    Raises:
        ArgumentError: An argument is invalid; the message names it.
    """
    name = "mean_rows"
    x = taken(name, "x", x)
    if len(x.shape) != 2:
        raise ArgumentError(f"{name}: x has shape {list(x.shape)}; pass two axes: [T, n]")
    tokens, cols = x.shape
    options = dict(normalize=checked_flag(name, "normalize", normalize))
    bounds = whole_numbers(name, "cu_seqlens", cu_seqlens, "N + 1 for N sequences")
    known = isinstance(bounds, np.ndarray) and bounds.ndim == 1 and bounds.size
    falls = known and (bounds[0] != 0 or bounds[-1] != tokens or (np.diff(bounds) < 0).any())
    if len(bounds.shape) != 1 or not bounds.shape[0] or falls:
        received = f"cu_seqlens {shown(bounds)}"
        raise ArgumentError(f"{name}: {received}; pass N + 1 whole numbers that rise from 0 to {tokens}")
    shape = (bounds.shape[0] - 1, cols)
    call = produced_call(name, dict(x=x, cu_seqlens=bounds), shape, (out_dtype, None, None, "linear", None), out)
    place = call.place(stream)
    starts = place.put(bounds)
    if not starts.is_contiguous:
        raise ArgumentError(f"{name}: cu_seqlens has a stride of {starts.strides[0]} bytes; pass cu_seqlens.copy()")
    if tokens or not cols:
        rows = rows_of(x, place)
    else:  # kernels take no empty arrays; one row of zeros gives the same means
        rows = fill_f32(x=place.empty((cols,), f32), value=0.0, stream=stream).reshape(1, cols)
    return call.run(place, kernels.mean_rows, None, (rows, starts), options)


@overload
def argmax_rows(x: HostArray, *, out: Array | None = ..., stream: StreamLike = ...) -> HostArray: ...
@overload
def argmax_rows(x: DeviceArray, *, out: Array | None = ..., stream: StreamLike = ...) -> DeviceArray: ...
@overload
def argmax_rows(x: Array, *, out: Array | None = ..., stream: StreamLike = ...) -> Any: ...
@remembered
def argmax_rows(x: Array, *, out: Array | None = None, stream: StreamLike = None) -> Any:
    """Find the column of the largest value of each row of x [.., n]: int32 [..].

    Of equal values the first counts; zeros of both signs are equal. A NaN is above every number, as in `numpy.argmax`.
    Kernel: `argmax_rows`.

    Args:
        x: float32, float16 or bfloat16 on any strides (on a device none below 0). n is at least 1, unless there are no
            rows.
        out: int32 in row-major order to write to, which shares no memory with x.
        stream: A stream of the device; None is the library's own.

    Raises:
        ArgumentError: An argument is invalid; the message names it.
    """
    name = "argmax_rows"
    x = taken(name, "x", x)
    shape = tuple(x.shape[:-1])
    if not x.shape[-1] and 0 not in shape:
        raise ArgumentError(f"{name}: x has shape {list(x.shape)}; rows without values have no largest one")
    check_forward(name, x=x)
    caller_out = None if out is None else as_output(name, "out", out)
    if caller_out is not None:
        whole = not isinstance(caller_out, DeviceArray) or caller_out.is_contiguous
        if tuple(caller_out.shape) != shape or caller_out.dtype != np.int32 or not whole:
            received = (
                f"out is {caller_out.dtype} {list(caller_out.shape)}, strides of {list(caller_out.strides)} bytes"
            )
            raise ArgumentError(f"{name}: {received}; pass int32 {list(shape)} in row-major order")
        check_memory(name, dict(out=caller_out), dict(x=x))
    place = Place([x, caller_out], stream)
    rows = rows_of(x, place)
    places = caller_out if isinstance(caller_out, DeviceArray) else place.empty(shape, i32)
    if places.size:
        kernels.argmax_rows(rows, places=places.reshape(places.size), stream=stream)
    if isinstance(caller_out, DeviceArray):
        return caller_out
    result = place.back(places)
    if caller_out is None:
        return result
    np.copyto(caller_out, result)
    return caller_out
