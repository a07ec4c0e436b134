"""`AttentionWay`: checks a call of `attention`, prepares its operands and launches its kernel, for one choice of
formats."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from operator import ge
from typing import TYPE_CHECKING, Any

import numpy as np

from ..array import DeviceArray
from ..errors import ArgumentError
from ..formats import Format, bf16, f16, f32, format_of
from ..kernel import Kernel
from .attention_blocks import BLOCK_ATTENTION, DIMS, MEAN_SCORES
from .attention_kernels import SPLIT_UNIT, attention_bf16, attention_merge, attention_mxfp4_bf16_in_kernel, in_mxfp4
from .few import FewOperands, families, launch_few, only, sinks_on
from .operands import Operand, quantize_operand, with_whole_rows
from .pages import holds_of
from .place import ROW_UNIT, Place, converted, is_loadable
from .quantize import dequantize
from .smoothing import row_dot

if TYPE_CHECKING:
    from ..typing import StreamLike
    from .attention_call import Call

# How many blocks fill a GPU (an H200 has 132 multiprocessors with room for two each, an RTX 5090 has 170), the rows of
# a block, and the fewest units of keys that are worth a block. More rows than half a block are dearer to merge: their
# runs have more units, unless the runs are long in any case.
_FILLING_BLOCKS, _BLOCK_ROWS, _FEWEST_UNITS = 264, 128, 5
_FEWEST_OF_MANY_ROWS, _LONG_RUN = 8, 20


class AttentionWay(ABC):
    """One way to compute attention, for one choice of formats.

    asked: the (qk, pv, quantize) of calls that it serves. kernel: the kernel. formats: operand name -> format, for the
    operands that may be quantized before. outputs: the types of results that the kernel writes. lacks: options of
    `attention` that it does not support. has_few: whether `attention_few` serves few queries. sums: the outputs of
    split launches, beside `partial` and `row_max`, that an lse needs.
    """

    formats: Mapping[str, str] = {}
    outputs: tuple[Format, ...] = (bf16, f16, f32)
    lacks: tuple[str, ...] = ()
    sums: tuple[str, ...] = ("row_sum",)
    has_few = False

    def __init__(self, qk: str, pv: str, quantize: str | None, kernel: Kernel):
        self.asked, self.kernel = (qk, pv, quantize), kernel

    def __str__(self) -> str:
        return spelled(*self.asked)

    def check(self, call: Call) -> None:
        """Raise ArgumentError if the kernel does not support a checked call."""

    @abstractmethod
    def prepare(self, call: Call, place: Place) -> dict[str, Any]:
        """Return the kernel's operands by argument name, for a call with q, k and v on the device."""

    def few_operands(self, call: Call, place: Place) -> FewOperands:
        """Return the operands of `attention_few` in the same way; only if `has_few`."""
        raise NotImplementedError

    def launch(self, call: Call, stream: StreamLike) -> tuple:
        """Launch a call. Return the output, then the lse or the row maxima and sums, if requested."""
        return launched(call, stream)

    @abstractmethod
    def values(self, q, k, v, cu_seqlens_k=None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return on the host the values that are multiplied for q, k and v, arrays or operands; for references."""

    def multiplied(self, call: Call) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the q, k and v on the host from which exact attention computes the kernel's scores and output."""
        return self.values(call.q, call.k, call.v)


def spelled(qk, pv, quantize=None) -> str:
    """Return formats as arguments of a call."""
    return f"qk={qk!r}, pv={pv!r}" + (f", quantize={quantize!r}" if quantize is not None else "")


class FloatAttention(AttentionWay):
    """Operands of a 16-bit format: the arrays themselves if kernels can load them, else converted copies."""

    lacks = ("smooth_k", "smooth_q")

    def __init__(self, member: Format):
        super().__init__(member.name, member.name, None, attention_bf16)
        self.member = member

    def prepare(self, call: Call, place: Place) -> dict[str, Any]:
        """Return q, k and v as the kernel takes them."""
        return _loadable(call, self.member, place)

    def values(self, q, k, v, cu_seqlens_k=None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the arrays rounded to the format."""
        with np.errstate(over="ignore"):
            return tuple(np.asarray(x).astype(self.member.dtype) for x in (q, k, v))


def _loadable(call: Call, member: Format, place: Place) -> dict[str, DeviceArray]:
    """Return q, k and v in a format: the arrays themselves if kernels can load them, else converted copies."""
    named = zip("qkv", (call.q, call.k, call.v))
    arrays = {name: x if member.holds(x.dtype) and is_loadable(x) else converted(x, member, place) for name, x in named}
    return {**arrays, "q": call.grouped(arrays["q"])}


class InKernelAttention(AttentionWay):
    """Operands that the kernel quantizes as it loads them: arrays are passed unchanged."""

    lacks = ("smooth_k", "smooth_q")

    def __init__(self):
        super().__init__("mxfp4", "bf16", "in_kernel", attention_mxfp4_bf16_in_kernel)

    def prepare(self, call: Call, place: Place) -> dict[str, Any]:
        """Return q, k and v in their type, or in float32 if their types differ."""
        members = {format_of(x.dtype) for x in (call.q, call.k, call.v)}
        return _loadable(call, members.pop() if len(members) == 1 else f32, place)

    def values(self, q, k, v, cu_seqlens_k=None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the values that Q and K are quantized to, and V rounded."""
        return in_mxfp4(q), in_mxfp4(k), np.asarray(v).astype(bf16.dtype)


class BlockAttention(AttentionWay):
    """Operands in block formats. Arrays are quantized for the call; operands that are already quantized are used as
    they are."""

    sums = ("row_sum", "exact_sum")
    has_few = True

    def __init__(self, qk: str, pv: str):
        super().__init__(qk, pv, None, BLOCK_ATTENTION[qk, pv])
        self.qk, self.pv, self.formats = qk, pv, dict(q=qk, k=qk, v=pv)

    def check(self, call: Call) -> None:
        """Raise ArgumentError if no kernel has the head dimensions that keys and values were quantized for."""
        self.dims(call.k, call.v)

    def dims(self, k, v) -> tuple[int, int]:
        """Return the compiled head dimensions of keys and of values: those they were quantized for, else the smallest
        that hold both."""
        compiled = DIMS[self.qk, self.pv]
        packed_dims = [x.dim if isinstance(x, Operand) else None for x in (k, v)]
        least = [dim or x.shape[-1] for dim, x in zip(packed_dims, (k, v))]
        holding = sorted((pair for pair in compiled if all(map(ge, pair, least))), key=prod)
        fitting = [pair for pair in holding if all(size in (None, dim) for size, dim in zip(packed_dims, pair))]
        if fitting:
            return fitting[0]
        found = " and ".join(
            f"{name} has tiles of head dimension {size}" for name, size in zip("kv", packed_dims) if size
        )
        dims = " and ".join(f"{dim} for {name}" for name, dim in zip("kv", holding[0]))
        change = " and ".join(
            f"{name} with dim={dim}"
            for name, size, dim in zip("kv", packed_dims, holding[0])
            if size not in (None, dim)
        )
        raise ArgumentError(f"attention: {found}; the nearest kernel has {dims}: quantize {change}")

    def prepare(self, call: Call, place: Place) -> dict[str, Any]:
        """Return codes and scales of q, tiles of k and v, global scales, and the score terms that smoothing removed."""
        q, k, v = self._on_device(call, place)
        dim, dim_v = k.dim, v.dim
        levels = {f"{x.role}_global": x.global_scale.reshape(1) for x in (q, k, v) if x.global_scale is not None}
        codes = dict(q_codes=call.grouped(q.codes), q_scales=call.grouped(q.scales), k_tiles=k.codes, v_tiles=v.codes)
        smoothed = {}
        if q.mean is not None:
            smoothed["mean_scores"] = self._mean_scores(call, q.mean, k.codes, levels.get("q_global"), dim, place)
        if k.mean is not None and call.shows_scores:
            smoothed["row_shift"] = self._row_shift(call, k, place)
        return {**codes, **levels, **smoothed, "keys": k.shape[2], "dim": dim, "dim_v": dim_v}

    def few_operands(self, call: Call, place: Place) -> FewOperands:
        """Return queries expanded from codes and scales to 16 bits, and the tiles of keys and values."""
        q, k, v = self._on_device(call, place)
        of_f16 = not isinstance(call.q, Operand) and call.q.dtype == np.float16 and {self.qk, self.pv} == {"nvfp4"}
        values, level = q.expanded(f16 if of_f16 else bf16, place.stream)
        if not is_loadable(values):
            values = converted(values, f16 if of_f16 else bf16, place)
        named = dict(q=call.grouped(values), k=k.codes, v=v.codes, k_tile=k.dim, v_tile=v.dim)
        named |= dict(k_holds=holds_of(self.qk), v_holds=holds_of(self.pv))
        named |= {f"{n}_global": x.reshape(1) for n, x in (("q", level), ("k", k.global_scale)) if x is not None}
        shift = self._row_shift(call, k, place) if k.mean is not None and call.shows_scores else None
        return FewOperands(named, shift, None if v.global_scale is None else v.global_scale.reshape(1))

    def _on_device(self, call: Call, place: Place) -> tuple[Operand, Operand, Operand]:
        """Return q, k and v as operands; arrays are quantized."""
        (dim, dim_v), packed = self.dims(call.k, call.v), call.cu_seqlens_k is not None
        lengths = call.cu_seqlens_k if packed else call.sequences.get("key_ends")
        options = {} if lengths is None else {"cu_seqlens" if packed else "key_lengths": place.put(lengths)}
        of_blocks = dict(cu_seqlens=place.put(call.cu_seqlens_q)) if packed and call.smooth_q else {}
        q = self._quantized("q", call.q, call, place, smooth=call.smooth_q, **of_blocks)
        k = self._quantized("k", call.k, call, place, smooth=call.smooth_k, dim=dim, **options)
        return q, k, self._quantized("v", call.v, call, place, dim=dim_v, **options)

    def _row_shift(self, call: Call, k: Operand, place: Place) -> DeviceArray:
        """Return for each row of q the scaled product with the mean that was subtracted from the keys: what its scores
        lack."""
        values = (
            dequantize(call.q, stream=place.stream)
            if isinstance(call.q, Operand)
            else with_whole_rows(call.q, place.stream)
        )
        starts = place.put(call.sequences["query_starts"]) if call.cu_seqlens_k is not None else None
        return row_dot(call.grouped(values), k.mean, starts, scale=call.scale, stream=place.stream)

    def _mean_scores(self, call: Call, mean, k_tiles, q_global, dim: int, place: Place):
        """Return the products of the means of blocks of queries with all keys."""
        batch, heads, blocks, cols = mean.shape
        grouped = mean.reshape(batch, heads // call.group, call.group, blocks, cols)
        return MEAN_SCORES[self.qk](grouped, k_tiles, q_global, dim=dim, stream=place.stream)

    def _quantized(self, role: str, x, call: Call, place: Place, **options) -> Operand:
        if isinstance(x, Operand):
            return x
        x, layout = (x.transpose(0, 2, 1, 3), "bshd") if call.transposed else (x, "bhsd")
        return quantize_operand(x, self.formats[role], role=role, layout=layout, **options, stream=place.stream)

    def values(self, q, k, v, cu_seqlens_k=None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the values of the operands on the host."""
        return tuple(np.asarray(x) for x in self._operands(q, k, v, cu_seqlens_k=cu_seqlens_k))

    def multiplied(self, call: Call) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return q, k and v on the host whose products are the kernel's scores. The mean of the keys is multiplied with
        queries before their quantization: it becomes extra columns."""
        lengths = None if call.cu_seqlens_k is not None else call.sequences.get("key_ends")
        operands = self._operands(
            call.q, call.k, call.v, call.cu_seqlens_q, call.cu_seqlens_k, lengths, call.smooth_q, call.smooth_k
        )
        q, k, v = (np.asarray(x) for x in operands)
        if operands[1].mean is None or isinstance(call.q, Operand):
            return q, k, v
        rounded_away, mean = np.asarray(call.q, np.float32) - q, operands[1].to_numpy().mean_of_rows()
        return np.concatenate([q, rounded_away], axis=-1), np.concatenate([k, mean], axis=-1), v

    def _operands(
        self, q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, key_lengths=None, smooth_q=None, smooth_k=None
    ) -> tuple[Operand, ...]:
        """Return q, k and v as operands; arrays are quantized."""
        ends = dict(cu_seqlens=cu_seqlens_k, key_lengths=key_lengths)
        options = dict(
            q=dict(smooth=smooth_q, cu_seqlens=cu_seqlens_q if smooth_q else None),
            k=dict(smooth=smooth_k, **ends),
            v=ends,
        )
        return tuple(
            x if isinstance(x, Operand) else quantize_operand(x, self.formats[role], role=role, **options[role])
            for role, x in zip("qkv", (q, k, v))
        )


def splits_for(heads_kv: int, rows: int, keys: int) -> int:
    """Return how many runs the keys are split into, so that few rows still fill a GPU; 1 for many rows.

    rows: queries times heads of a group. The result depends neither on the batch nor on the machine, because another
    split rounds sums differently: a batch equals its items, and machines agree. Every run has keys.
    """
    units = -(-keys // SPLIT_UNIT)
    blocks = heads_kv * max(-(-rows // _BLOCK_ROWS), 1)
    most = max(1, min(_FILLING_BLOCKS // blocks, units // _FEWEST_UNITS))
    if 2 * rows > _BLOCK_ROWS and units // most < _LONG_RUN:
        halves = blocks if rows <= _BLOCK_ROWS else heads_kv * -(-2 * rows // _BLOCK_ROWS)
        most = max(1, min(_FILLING_BLOCKS // halves, units // _FEWEST_OF_MANY_ROWS))
        if rows > _BLOCK_ROWS and most == 2:
            most = 1
    return -(-units // -(-units // most))


def launched(call: Call, stream: StreamLike) -> tuple:
    """Launch conversions, the kernels for few and for many queries, and the merge if keys are split or sums requested.

    Return the output, then the lse or the row maxima and sums, if requested.
    """
    place = Place([*call.arrays.values(), call.out], stream)
    q, k, v = (place.put(x) for x in (call.q, call.k, call.v))
    (batch, heads, queries, _), dim_v = q.shape, v.shape[-1]
    on_device = replace(call, q=q, k=k, v=v)
    if isinstance(call.out, DeviceArray):
        target = call.out
    elif call.transposed:
        target = place.empty((batch, queries, heads, dim_v), call.output).transpose(0, 2, 1, 3)
    else:
        target = place.empty((batch, heads, queries, dim_v), call.output)
    names = ("lse",) if call.return_lse else () if call.normalize else ("merged_max", "merged_sum")
    figures = {name: place.empty((batch, heads, queries), f32) for name in names}
    few, others = families(call) if call.way.has_few else (False, True)
    if few:
        of_few = only(on_device, True) if others else on_device
        launch_few(of_few, call.way.few_operands(of_few, place), place, others, target, figures)
    if others:
        _launch_others(only(on_device, False) if few else on_device, place, target, figures, few)
    return (_handed_back(call, place, target), *(place.back(x) for x in figures.values()))


def _launch_others(call: Call, place: Place, target: DeviceArray, figures: dict, partly: bool) -> None:
    """Launch attention of many queries into target and figures. partly: whether other rows of target and figures are
    already written and must stay."""
    packed = "query_starts" in call.sequences
    rows = (call.q.shape[0], call.k.shape[1], call.group, call.q.shape[2])
    splits = 1 if packed else splits_for(call.k.shape[1], call.group * call.q.shape[2], call.k.shape[2])
    if splits > 1 or not call.normalize:
        width = -(-target.shape[-1] // ROW_UNIT) * ROW_UNIT
        sums = call.way.sums if call.return_lse else ("row_sum",)
        parts = {name: place.empty((splits, *rows), f32) for name in ("row_max", *sums)}
        parts["partial"] = place.empty((splits, *rows, width), f32)
        call.way.kernel(**call.way.prepare(call, place), **_options(call, place), **parts, stream=place.stream)
        whole = (splits, rows[0], rows[1] * rows[2], rows[3])
        parts = {name: x.reshape(*whole, *x.shape[5:]) for name, x in parts.items()}
        attention_merge(**parts, **{f"out_{call.output}": target}, **figures, complete=1, stream=place.stream)
        return
    arguments = call.way.prepare(call, place) | _options(call, place)
    fits = is_loadable(target)
    direct = (
        target if fits else place.empty((*target.shape[:-1], -(-target.shape[-1] // ROW_UNIT) * ROW_UNIT), call.output)
    )
    if partly and not fits:
        converted(target, call.output, place, direct)
    lse = {name: x.reshape(rows) for name, x in figures.items()}
    call.way.kernel(**arguments, **{f"out_{call.output}": call.grouped(direct)}, **lse, splits=1, stream=place.stream)
    if not fits:
        converted(direct, call.output, place, target)


def _options(call: Call, place: Place) -> dict[str, Any]:
    """Return the kernels' arguments besides operands and outputs."""
    batch, heads, queries, keys = *call.q.shape[:3], call.k.shape[2]
    options = {name: place.put(array) for name, array in call.sequences.items()}
    options["sequences"] = next((x.shape[0] for x in options.values()), batch)
    if call.mask is not None:
        mask = place.put(call.mask)
        hides = mask.dtype == np.bool_
        if not hides and mask.dtype != np.float32:
            mask = converted(mask, f32, place, place.empty(mask.shape, f32))
        whole = call.grouped((mask.view(np.uint8) if hides else mask).broadcast_to((batch, heads, queries, keys)))
        options["allowed" if hides else "mask"] = whole
    if call.sinks is not None:
        options["sinks"] = sinks_on(call.sinks, place).reshape(call.k.shape[1], call.group)
    return options | dict(scale=call.scale, softcap=call.softcap, left=call.left, right=call.right)


def _handed_back(call: Call, place: Place, target: DeviceArray):
    """Return the output in the caller's layout and type."""
    if isinstance(call.out, DeviceArray):
        return call.callers_out
    result = place.back(target.transpose(0, 2, 1, 3) if call.transposed else target)
    if call.callers_out is None:
        return result
    np.copyto(call.callers_out, result)
    return call.callers_out
