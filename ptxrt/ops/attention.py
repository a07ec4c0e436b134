"""The friendly functions of attention, `attention` and `merge`, and `exact_attention`, what they compute in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Callable, Sequence

import numpy as np

from ..array import DeviceArray, allocate, as_arrays, as_output, to_device, upload
from ..blocks import BLOCK_FORMATS, mxfp4
from ..errors import ArgumentError
from ..formats import Format, bf16, f16, f32, format_of
from ..kernel import Kernel
from ..prepared import remembered
from .attention_blocks import BLOCK_ATTENTION
from .attention_kernels import HEAD_DIMS, OPEN, SPLIT_UNIT, attention_bf16, attention_merge, attention_mxfp4_bf16, exact_quotient, exact_sums, spans_of
from .cast import cast
from .operands import Operand, quantize_operand, with_whole_rows
from .quantize import dequantize
from .quantized import QuantizedArray
from .smoothing import row_dot

# Kernels load 16 bytes at a time: rows of 16-bit elements start at multiples of this many.
_ROW_UNIT = 8
# Blocks that fill a GPU (an RTX 5090 has 170 multiprocessors, an H200 132), the rows of one, and the fewest units of keys
# that are worth a block of their own.
_FILLING_BLOCKS, _BLOCK_ROWS, _FEWEST_UNITS = 160, 64, 4


@dataclass(frozen=True)
class Way:
    """One way to compute attention: the kernel, how its operands are made, and what they hold.

    operands: (call, q, k, v on the device, stream) -> arguments of the kernel by name. values: (q, k, v as NumPy arrays) ->
    what the operands hold, for references. output: the type of results where none is asked for. lacks: options of
    `attention` that the kernel does not have. run: what to do in place of `_run`. formats: by the names of operands that may be
    quantized before, their formats.
    """

    kernel: Kernel
    operands: Callable[..., dict[str, Any]] | None
    values: Callable[..., tuple]
    output: Format
    lacks: tuple[str, ...] = ("smooth_k", "smooth_q")
    run: Callable[..., tuple] | None = None
    formats: dict[str, str] = field(default_factory=dict)


@remembered
def attention(
    q,
    k,
    v,
    *,
    qk="bf16",
    pv=None,
    quantize=None,
    causal=False,
    window=None,
    scale=None,
    softcap=0.0,
    mask=None,
    sinks=None,
    key_lengths=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    smooth_k="auto",
    smooth_q=False,
    return_lse=False,
    normalize=True,
    layout="bhsd",
    out_dtype=None,
    out=None,
    stream=None,
):
    """Compute softmax(scale Q K^T) V for q [B, H, Sq, D], k [B, Hkv, Sk, D] and v [B, Hkv, Sk, Dv]; H is a multiple of Hkv.

    q, k and v are float32, float16 or bfloat16, on any strides; D and Dv up to 256; B, H and S change places with
    layout="bshd". Heads h of q with the same h // (H / Hkv) share a head of k and v.
    qk, pv: formats of the operands of the two products, "bf16" or "f16"; pv is qk's where None. float32, and a 16-bit type that
    is not the format's, are rounded to it. qk="mxfp4", pv="bf16", quantize="in_kernel": Q and K quantized as they are loaded.
    "mxfp8", "mxfp4", "nvfp4", and "nvfp4" with pv="mxfp8": q, k and v are quantized first, as `quantize_operand` does; what it gives
    may stand in their place, so that K and V are quantized once and used many times.
    scale: finite; 1 / sqrt(D) where None. softcap: above 0, scores become softcap tanh(score / softcap).
    causal: query i sees key j where j <= i + Sk - Sq. window: (left, right), whole numbers from 0 on or None for
    open; i sees j where -left <= j - (i + Sk - Sq) <= right. With causal, right is 0.
    mask: bool (False hides a key) or float (added to the scores), broadcast to [B, H, Sq, Sk].
    sinks: [H], one logit for each head that joins the denominator alone.
    key_lengths: [B] whole numbers: only the first keys of each batch are there, and Sk is that number.
    cu_seqlens_q, cu_seqlens_k: packed sequences: q, k and v have B = 1, sequence i is rows cu[i] to cu[i + 1] of each;
    N + 1 whole numbers from 0 to the whole length. Sq and Sk are then those of the sequence; masks go by whole rows.
    smooth_k: for block formats, whether the mean of the keys is subtracted before they are quantized; lse is that of the scores as
    they were. "auto" does so for 4-bit qk where there are neither softcap nor sinks, and normalize is True.
    smooth_q: for block formats; False does nothing.
    return_lse: also return the natural logarithm of each row's denominator, float32 [B, H, Sq].
    normalize: where False, return (out, row_max, row_sum), all float32: out / row_sum is the output, the denominator is
    2**row_max row_sum, and row_max is a whole number.
    out_dtype: float32, float16 or bfloat16; bfloat16 where None, or float16 for pv="f16". out: an array of the output's
    shape to write to, whose dtype then decides. stream: of the device; None is the library's own.

    Rows that see no key give 0, and an lse of -inf (or their sink). NaN in a row of Q, or in a key that it sees, gives NaN. Results do not
    depend on the rest of the batch: each item's are those of a call of its own, bit for bit. NumPy arrays give NumPy
    results; with any device array results stay on the device, without waiting. ArgumentError for what does not fit.
    """
    call = attention_call(
        *(q, k, v, qk, pv, quantize, causal, window, scale, softcap, mask, sinks, key_lengths, cu_seqlens_q, cu_seqlens_k),
        *(smooth_k, smooth_q, return_lse, normalize, layout, out_dtype, out),
    )
    results = (call.way.run or _run)(call, stream)
    return results[0] if len(results) == 1 else results


def merge(outputs, lses, *, out_dtype=np.float32, stream=None):
    """Merge attention over segments of the keys: (output, lse) of all, from the outputs and lses of each.

    outputs: a sequence of arrays [..., S, D], or one with the segments in front; float32, float16 or bfloat16. lses:
    their `return_lse` results [..., S], float32. output is the sum of exp(lse_i - lse) output_i, of `out_dtype`; lse the
    logarithm of the sum of exp(lse_i), float32. A segment with an lse of -inf counts nothing; rows that are so in all give 0
    and -inf. Sums are float32, in the order of the segments.
    NumPy arrays give NumPy results; device arrays stay on the device, without waiting.
    """
    parts, logs = _segments("outputs", outputs), _segments("lses", lses)
    shape = tuple(parts[0].shape)
    for name, group, wanted in (("outputs", parts, shape), ("lses", logs, shape[:-1])):
        for i, item in enumerate(group):
            if tuple(item.shape) != wanted or len(group) != len(parts):
                raise ArgumentError(
                    f"merge: {name}[{i}] has shape {list(item.shape)} of {len(group)}; {len(parts)} outputs of {list(shape)} "
                    f"have {len(parts)} lses of {list(shape[:-1])}"
                )
            if format_of(item.dtype, (f32, f16, bf16) if name == "outputs" else (f32,)) is None:
                raise ArgumentError(f"merge: {name}[{i}] is {item.dtype}; outputs are float32, float16 or bfloat16, lses float32")
    if not 2 <= len(shape) <= 4:
        raise ArgumentError(f"merge: outputs[0] has shape {list(shape)}; pass [B, H, S, D], or fewer axes in front of S")
    member = _output_format("merge", out_dtype, None, f32)
    place = _Place([*parts, *logs], stream)
    rows = (1,) * (4 - len(shape)) + shape[:-1]
    partial = _stacked([place.put(x).reshape(*rows, shape[-1]) for x in parts], place)
    maxima = _stacked([place.put(x).reshape(*rows, 1) for x in logs], place).reshape(len(logs), *rows)
    if 0 in partial.shape:
        return tuple(place.back(place.empty(s, m)) for s, m in ((shape, member), (shape[:-1], f32)))
    merged = {f"out_{member}": place.empty((*rows, shape[-1]), member), "lse": place.empty(rows, f32)}
    attention_merge(partial, maxima, **merged, natural=1, stream=stream)
    return tuple(place.back(x.reshape(s)) for x, s in zip(merged.values(), (shape, shape[:-1])))


def exact_attention(
    q,
    k,
    v,
    *,
    scale=None,
    causal=False,
    window=None,
    softcap=0.0,
    mask=None,
    sinks=None,
    key_lengths=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
) -> tuple[np.ndarray, np.ndarray]:
    """What `attention` computes, in float64 on the host: output [B, H, Sq, Dv] and lse [B, H, Sq], in the layout "bhsd"."""
    q, k, v = (np.asarray(x) for x in (q, k, v))
    heads, group = k.shape[1], q.shape[1] // k.shape[1]
    left, right = _checked_window(window, causal)

    def grouped(x, *axes):
        return None if x is None else np.broadcast_to(x, (q.shape[0], q.shape[1], *axes)).reshape(q.shape[0], heads, group, *axes)

    spans = None
    if cu_seqlens_q is not None:
        ends = [(cu[:-1], cu[1:]) for cu in (np.asarray(cu_seqlens_q), np.asarray(cu_seqlens_k))]
        spans = spans_of(len(ends[0][0]), 0, 0, *ends[0], *ends[1])
    elif key_lengths is not None:
        spans = spans_of(len(q), q.shape[2], k.shape[2], key_ends=np.asarray(key_lengths))
    hides = mask is not None and np.asarray(mask).dtype == bool
    sums = exact_sums(
        *(grouped(q, *q.shape[2:]), k, v),
        **dict(scale=q.shape[-1] ** -0.5 if scale is None else scale, left=left, right=right, softcap=softcap, spans=spans),
        mask=None if hides else grouped(mask, q.shape[2], k.shape[2]),
        allowed=grouped(mask, q.shape[2], k.shape[2]) if hides else None,
        sinks=None if sinks is None else np.asarray(sinks).reshape(heads, group),
    )
    out, lse = exact_quotient(*sums)
    return out.reshape(*q.shape[:-1], v.shape[-1]), lse.reshape(q.shape[:-1])


def splits_for(heads_kv: int, rows: int, keys: int) -> int:
    """Into how many runs the keys of a call are split so that few rows still fill a GPU; 1 where many rows do.

    rows: queries times heads of a group. It depends neither on the batch nor on the machine, since sums are rounded
    differently in other splits: a batch equals its items, and machines agree. Every run has keys.
    """
    units = -(-keys // SPLIT_UNIT)
    blocks = heads_kv * max(-(-rows // _BLOCK_ROWS), 1)
    wanted = max(1, min(_FILLING_BLOCKS // blocks, units // _FEWEST_UNITS))
    return -(-units // -(-units // wanted))


# A call


@dataclass(frozen=True)
class Call:
    """A call of `attention` whose arguments fit each other. q, k, v and out are in the order [batch, heads, length, dim].

    given: the array that the caller passed as out, which is returned. sequences: starts and ends of rows and keys by the
    kernel's names for them.
    """

    way: Way
    q: Any
    k: Any
    v: Any
    scale: float
    softcap: float
    left: int
    right: int
    smooth: bool
    mask: Any
    sinks: Any
    sequences: dict[str, Any]
    return_lse: bool
    normalize: bool
    transposed: bool
    output: Format
    out: Any
    given: Any

    @property
    def group(self) -> int:
        """Heads of q for each of k and v."""
        return self.q.shape[1] // max(self.k.shape[1], 1)

    @property
    def arrays(self) -> dict[str, Any]:
        """Every array of the call, by name."""
        named = dict(q=self.q, k=self.k, v=self.v, mask=self.mask, sinks=self.sinks, **self.sequences)
        codes = {name: x.codes if isinstance(x, Operand) else x for name, x in named.items()}
        return {name: array for name, array in codes.items() if array is not None}

    def grouped(self, x):
        """An array [batch, heads, ...] with heads as [heads_kv, group]."""
        return x.reshape(x.shape[0], self.k.shape[1], self.group, *x.shape[2:])


def attention_call(
    q,
    k,
    v,
    qk="bf16",
    pv=None,
    quantize=None,
    causal=False,
    window=None,
    scale=None,
    softcap=0.0,
    mask=None,
    sinks=None,
    key_lengths=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    smooth_k="auto",
    smooth_q=False,
    return_lse=False,
    normalize=True,
    layout="bhsd",
    out_dtype=None,
    out=None,
) -> Call:
    """The arguments of `attention`, checked; nothing is uploaded or launched."""
    way = _way(qk, pv, quantize)
    _check_options(
        *(way, (qk, pv, quantize), smooth_k),
        dict(window=window, softcap=softcap, mask=mask, sinks=sinks, key_lengths=key_lengths, cu_seqlens_q=cu_seqlens_q),
        dict(cu_seqlens_k=cu_seqlens_k, smooth_q=smooth_q, normalize=normalize, layout=layout),
    )
    if not isinstance(layout, str) or layout not in ("bhsd", "bshd"):
        raise ArgumentError(f"attention: layout is {layout!r}; pass 'bhsd' or 'bshd'")
    transposed = layout == "bshd"
    q, k, v = (_taken(way, (qk, pv, quantize), name, x, transposed) for name, x in zip("qkv", (q, k, v)))
    _check_shapes(way, q, k, v, layout)
    (batch, heads, queries, dim), (_, heads_kv, keys, dim_v) = q.shape, v.shape
    if scale is None:
        scale = 1 / math.sqrt(dim)
    if not _is_finite(scale):
        raise ArgumentError(f"attention: scale is {scale!r}; pass a finite number, or None for 1 / sqrt(D)")
    if softcap is None or not _is_finite(softcap) or softcap < 0:
        raise ArgumentError(f"attention: softcap is {softcap!r}; pass a number above 0, or 0 for none")
    left, right = _checked_window(window, _flag("causal", causal))
    return_lse, normalize = _flag("return_lse", return_lse), _flag("normalize", normalize)
    if return_lse and not normalize:
        raise ArgumentError("attention: normalize=False returns row_max and row_sum, of which lse is (row_max + log2 row_sum) ln 2; leave out return_lse")
    given = None if out is None else as_output("attention", "out", out)
    member = _output_format("attention", out_dtype, given, way.output if normalize else f32)
    if not normalize and member is not f32:
        raise ArgumentError(f"attention: normalize=False gives float32; {member.dtype} was asked for")
    smooth = _smooths(way, k, smooth_k, dict(softcap=bool(softcap), sinks=sinks is not None, normalize=not normalize))
    call = Call(
        *(way, q, k, v, scale, softcap, left, right, smooth),
        mask=_checked_mask(mask, (batch, heads, queries, keys)),
        sinks=_checked_sinks(sinks, heads),
        sequences=_checked_sequences(key_lengths, cu_seqlens_q, cu_seqlens_k, batch, queries, keys),
        **dict(return_lse=return_lse, normalize=normalize, transposed=transposed, output=member),
        out=None if given is None else _in_order("out", given, transposed),
        given=given,
    )
    _check_out(call, (batch, heads, queries, dim_v))
    return call


def _way(qk, pv, quantize) -> Way:
    """The way that is asked for; ArgumentError that names the nearest one otherwise."""
    pv = qk if pv is None else pv
    asked = (qk, pv, quantize)
    way = ATTENTION.get(asked) if all(isinstance(word, (str, type(None))) for word in asked) else None
    if way is None:
        nearest = max(ATTENTION, key=lambda known: sum(a == b for a, b in zip(known, asked) if isinstance(b, (str, type(None)))))
        raise ArgumentError(
            f"attention: no kernel for {_spelled(*asked)}; nearest: {_spelled(*nearest)}. There is {'; '.join(_spelled(*known) for known in ATTENTION)}"
        )
    return way


def _spelled(qk, pv, quantize) -> str:
    """A choice of formats as it is written in a call."""
    return f"qk={qk!r}, pv={pv!r}" + (f", quantize={quantize!r}" if quantize is not None else "")


_DEFAULTS = dict(softcap=(0.0, None), normalize=(True,), layout=("bhsd",), smooth_q=(False,))


def _check_options(way: Way, asked, smooth_k, *options) -> None:
    """ArgumentError for an option that the kernel does not have."""
    if not (isinstance(smooth_k, (bool, np.bool_)) or (isinstance(smooth_k, str) and smooth_k == "auto")):
        raise ArgumentError(f"attention: smooth_k is {smooth_k!r}; pass True, False or 'auto'")
    wanted = {name: value for group in options for name, value in group.items() if not any(value is d or (np.isscalar(value) and value == d) for d in _DEFAULTS.get(name, (None,)))}
    if smooth_k is True or isinstance(smooth_k, np.bool_) and smooth_k:
        wanted["smooth_k"] = smooth_k
    for name in wanted:
        if name in way.lacks:
            others = [known for known, other in ATTENTION.items() if name not in other.lacks]
            advice = f"nearest: {_spelled(*others[0])}" if others else "leave it out"
            raise ArgumentError(f"attention: {_spelled(asked[0], asked[1] or asked[0], asked[2])} has no {name}; {advice}")


def _taken(way: Way, asked, name: str, x, transposed: bool):
    """q, k or v: an array [batch, heads, length, dim], or an operand of the format that the way takes."""
    if not isinstance(x, QuantizedArray):
        (x,) = as_arrays("attention", **{name: x})
        return _in_order(name, x, transposed)
    wanted = way.formats.get(name)
    if x.role != name or x.format != wanted:
        takes = f"quantize_operand({name}, {wanted!r}, role={name!r})" if wanted else "an array: pass what was quantized, or ptxrt.dequantize of it"
        raise ArgumentError(f"attention: {name} is {x!r}; {_spelled(asked[0], asked[1] or asked[0], asked[2])} takes {takes}")
    return x


def _smooths(way: Way, k, smooth_k, hindrances: dict[str, bool]) -> bool:
    """Whether the keys are less their mean; ArgumentError where that was asked for and cannot be, or was not and is."""
    if not way.formats:
        return False
    there = [name for name, active in hindrances.items() if active]
    hindered = f"with {' and '.join(there)} the scores must be those of the keys as they are"
    if isinstance(k, Operand):
        smoothed = k.mean is not None
        if smooth_k != "auto" and bool(smooth_k) != smoothed:
            raise ArgumentError(f"attention: smooth_k is {smooth_k!r}, k is {k!r}; quantize it with smooth={bool(smooth_k)}, or leave out smooth_k")
        if smoothed and there:
            raise ArgumentError(f"attention: k is {k!r}; {hindered}: quantize it with smooth=False")
        return smoothed
    if smooth_k != "auto" and smooth_k and there:
        raise ArgumentError(f"attention: smooth_k is {smooth_k!r}; {hindered}: leave out smooth_k")
    return not there and BLOCK_FORMATS[way.formats["k"]].bits == 4 if smooth_k == "auto" else bool(smooth_k)


def _in_order(name: str, x, transposed: bool):
    """An array of the caller's layout as [batch, heads, length, dim]."""
    if len(x.shape) != 4:
        order = "[B, S, H, D]" if transposed else "[B, H, S, D]"
        raise ArgumentError(f"attention: {name} has shape {list(x.shape)}, {len(x.shape)} dimensions where 4 are needed; reshape it to {order}")
    return x.transpose(0, 2, 1, 3) if transposed else x


def _check_shapes(way: Way, q, k, v, layout: str) -> None:
    """ArgumentError where q, k and v do not fit each other, or no kernel holds them."""

    def fail(what: str):
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in zip("qkv", (q, k, v)))
        order = "" if layout == "bhsd" else ", here as [B, H, S, D]"
        raise ArgumentError(f"attention: {what}; there are {shapes}{order}")

    for name, x in zip("qkv", (q, k, v)):
        if not isinstance(x, Operand) and format_of(x.dtype) is None:
            raise ArgumentError(f"attention: {name} is {x.dtype} {list(x.shape)}; convert it to float32, float16 or bfloat16")
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3]:
        fail("q, k and v have one batch, and k and v the same heads and keys")
    heads, heads_kv, dim, dim_v = q.shape[1], k.shape[1], q.shape[3], v.shape[3]
    if k.shape[3] != dim:
        fail(f"q and k have one head dimension; {dim} and {k.shape[3]} came")
    if heads_kv == 0 or heads % heads_kv:
        below = f"{heads // heads_kv * heads_kv} or " if heads_kv and heads > heads_kv else ""
        near = f"{below}{(heads // heads_kv + 1) * heads_kv}" if heads_kv else "1 head of k or more"
        fail(f"{heads} heads of q are no multiple of {heads_kv} heads of k and v; nearest: {near}")
    if k.shape[2] == 0:
        fail("there are no keys; pass at least one")
    if min(dim, dim_v) == 0:
        fail("a head dimension is 0; pass at least 1")
    largest = max(HEAD_DIMS)
    if dim > largest[0] or dim_v > largest[1]:
        fail(f"head dimensions go up to {largest[0]}; split the heads")
    if way.formats:
        _block_dim(way.kernel, k, v)


def _checked_window(window, causal) -> tuple[int, int]:
    """How far to the left and right of its place a query sees."""
    sides = window if isinstance(window, (tuple, list)) and len(window) == 2 else (None, None) if window is None else (False,)
    whole = all(side is None or (isinstance(side, (int, np.integer)) and not isinstance(side, bool) and side >= 0) for side in sides)
    if not whole or len(sides) != 2:
        raise ArgumentError(f"attention: window is {window!r}; pass (left, right), each a whole number from 0 on, or None for open")
    left, right = (OPEN if side is None else min(int(side), OPEN) for side in sides)
    return left, 0 if causal else right


def _checked_mask(mask, shape: tuple[int, ...]):
    """A mask of bool or float that broadcasts to `shape`, with four axes."""
    if mask is None:
        return None
    (mask,) = as_arrays("attention", mask=mask)
    if isinstance(mask, np.ndarray) and mask.dtype == np.float64:
        with np.errstate(over="ignore"):
            mask = mask.astype(np.float32)
    fits = len(mask.shape) <= 4 and all(size in (1, wanted) for size, wanted in zip(mask.shape[::-1], shape[::-1]))
    if not fits or (mask.dtype != np.bool_ and format_of(mask.dtype) is None):
        raise ArgumentError(f"attention: mask is {mask.dtype} {list(mask.shape)}; pass bool or float that broadcasts to [B, H, Sq, Sk], {list(shape)}")
    return mask.reshape((1,) * (4 - len(mask.shape)) + tuple(mask.shape))


def _checked_sinks(sinks, heads: int):
    if sinks is None:
        return None
    (sinks,) = as_arrays("attention", sinks=sinks)
    if isinstance(sinks, np.ndarray) and sinks.dtype == np.float64:
        sinks = sinks.astype(np.float32)
    if tuple(sinks.shape) != (heads,) or format_of(sinks.dtype) is None:
        raise ArgumentError(f"attention: sinks are {sinks.dtype} {list(sinks.shape)}; pass one float for each of {heads} heads of q")
    return sinks


def _checked_sequences(key_lengths, cu_q, cu_k, batch: int, queries: int, keys: int) -> dict[str, Any]:
    """Where sequences begin and end, by the kernel's names."""
    if cu_q is None and cu_k is None:
        if key_lengths is None:
            return {}
        lengths = _whole_numbers("key_lengths", key_lengths, f"one for each of {batch} batches")
        if lengths.shape != (batch,) or (isinstance(lengths, np.ndarray) and not ((0 <= lengths) & (lengths <= keys)).all()):
            raise ArgumentError(f"attention: key_lengths {_shown(lengths)}; pass a whole number from 0 to {keys} for each of {batch} batches")
        return dict(key_ends=lengths)
    if cu_q is None or cu_k is None or key_lengths is not None:
        what = "one of cu_seqlens_q and cu_seqlens_k" if key_lengths is None else "key_lengths beside cu_seqlens"
        raise ArgumentError(f"attention: {what} came; packed sequences need both cu_seqlens and no key_lengths")
    if batch != 1:
        raise ArgumentError(f"attention: packed sequences have a batch of 1, {batch} came; reshape [total, H, D] to [1, total, H, D], layout='bshd'")
    edges = []
    for name, cu, whole in (("cu_seqlens_q", cu_q, queries), ("cu_seqlens_k", cu_k, keys)):
        cu = _whole_numbers(name, cu, "N + 1 for N sequences")
        known = isinstance(cu, np.ndarray) and len(cu.shape) == 1 and len(cu) >= 2
        if len(cu.shape) != 1 or cu.shape[0] < 2 or (known and (cu[0] != 0 or cu[-1] != whole or (np.diff(cu) < 0).any())):
            raise ArgumentError(f"attention: {name} {_shown(cu)}; pass N + 1 whole numbers that rise from 0 to {whole}")
        edges.append(cu)
    if edges[0].shape != edges[1].shape:
        raise ArgumentError(f"attention: cu_seqlens_q has {edges[0].shape[0]} numbers, cu_seqlens_k {edges[1].shape[0]}; pass as many")
    return dict(query_starts=edges[0][:-1], query_ends=edges[0][1:], key_starts=edges[1][:-1], key_ends=edges[1][1:])


def _whole_numbers(name: str, value, wanted: str):
    """An array of int32; what lies on the host may be of any whole type."""
    (array,) = as_arrays("attention", **{name: value})
    if isinstance(array, np.ndarray) and array.dtype.kind in "iu" and (array.size == 0 or -(2**31) <= array.min() <= array.max() < 2**31):
        return array.astype(np.int32)
    if isinstance(array, np.ndarray) or array.dtype != np.int32:
        raise ArgumentError(f"attention: {name} is {array.dtype} {list(array.shape)}; pass int32, {wanted}")
    return array


def _shown(numbers) -> str:
    """Whole numbers as messages show them; what lies on a device is not looked at."""
    return f"is {numbers.tolist()}" if isinstance(numbers, np.ndarray) and numbers.size <= 16 else f"is {numbers.dtype} {list(numbers.shape)}"


def _check_out(call: Call, shape: tuple[int, ...]) -> None:
    """ArgumentError where results cannot be written to `out`."""
    if call.out is None:
        return
    if tuple(call.out.shape) != shape:
        wanted = (shape[0], shape[2], shape[1], shape[3]) if call.transposed else shape
        raise ArgumentError(f"attention: out has shape {list(call.given.shape)}, not {list(wanted)}; pass an array of that shape")
    if isinstance(call.out, np.ndarray):
        device = next((name for name, array in call.arrays.items() if isinstance(array, DeviceArray)), None)
        if device:
            raise ArgumentError(f"attention: out is a NumPy array, {device} is on the device; pass both on one side")
        if not call.out.flags.writeable:
            raise ArgumentError("attention: out is read-only; pass an array that can be written")


def _flag(name: str, value) -> bool:
    if not isinstance(value, (bool, np.bool_)) and not (isinstance(value, int) and value in (0, 1)):
        raise ArgumentError(f"attention: {name} is {value!r}; pass True or False")
    return bool(value)


def _is_finite(value) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, ValueError, OverflowError):
        return False


def _output_format(function: str, asked, given, default: Format) -> Format:
    """The format of results: that of `given`, where there is an array, else the dtype asked for, else the default."""
    try:
        dtype = None if asked is None else np.dtype(asked)
    except (TypeError, ValueError):
        dtype = asked
    there = getattr(given, "dtype", None)
    wanted = there if dtype is None and there is not None else default.dtype if dtype is None else dtype
    member = format_of(wanted) if isinstance(wanted, np.dtype) else None
    if member is None or (there is not None and there != wanted):
        came = f"out_dtype={asked!r}" + (f" with out of {there}" if there is not None else "")
        raise ArgumentError(f"{function}: {came}; results are bfloat16, float16 or float32, and out has the dtype asked for")
    return member


# What a call does on a machine


class _Place:
    """Where a call runs: on the device of its device arrays, else on the current machine, with NumPy results."""

    def __init__(self, arrays, stream):
        self.stream = stream
        self.backend = next((x.backend for x in arrays if isinstance(x, DeviceArray)), None)
        self.on_host = self.backend is None

    def put(self, x):
        """An array or an operand on the device."""
        if isinstance(x, DeviceArray):
            return x
        if isinstance(x, Operand):
            return x if x.on_device else Operand(**{name: self.put(array) for name, array in x.arrays.items()}, **x.description)
        placed = to_device(x, stream=self.stream) if self.backend is None else upload(self.backend, x, self.stream)
        self.backend = placed.backend
        return placed

    def empty(self, shape: tuple[int, ...], member: Format) -> DeviceArray:
        """A new array there."""
        return allocate(self.backend, shape, member.dtype, self.backend.queue(self.stream))

    def back(self, x: DeviceArray):
        """A result as the caller gets it."""
        return x.to_numpy(stream=self.stream) if self.on_host else x


def _is_loadable(x: DeviceArray) -> bool:
    """Whether kernels can load or store rows of an array 16 bytes at a time."""
    moving = [stride for size, stride in zip(x.shape[:-1], x.strides) if size > 1]
    whole = x.address % 16 == 0 and all(stride >= 0 and stride % 16 == 0 for stride in moving)
    return whole and (x.shape[-1] == 1 or x.strides[-1] == x.dtype.itemsize) and x.shape[-1] % _ROW_UNIT == 0


def _converted(x: DeviceArray, member: Format, place: _Place, target: DeviceArray | None = None) -> DeviceArray:
    """Four axes in a format, by the kernel `cast`: in `target`, or in rows filled up with zeros so that kernels can load them."""
    if target is None:
        target = place.empty((*x.shape[:-1], -(-x.shape[-1] // _ROW_UNIT) * _ROW_UNIT), member)
    if 0 not in target.shape:
        cast(x, **{f"y_{member}": target}, stream=place.stream)
    return target


@dataclass(frozen=True)
class _Floats:
    """Operands of a 16-bit format: the arrays themselves where kernels can load them, else converted copies."""

    member: Format

    def __call__(self, call: Call, q: DeviceArray, k: DeviceArray, v: DeviceArray, place: _Place) -> dict[str, Any]:
        """q, k and v as the kernel takes them."""
        q, k, v = (x if self.member.holds(x.dtype) and _is_loadable(x) else _converted(x, self.member, place) for x in (q, k, v))
        return dict(q=call.grouped(q), k=k, v=v)

    def values(self, *operands) -> tuple:
        """What the operands hold."""
        with np.errstate(over="ignore"):
            return tuple(np.asarray(x).astype(self.member.dtype) for x in operands)


def _block_dim(kernel: Kernel, k, v) -> int:
    """The head dimension of a kernel on block formats for keys and values; ArgumentError where operands were not quantized for it."""
    there = kernel.variants["dim"]
    smallest = min(dim for dim in there if dim >= max(k.shape[-1], v.shape[-1]))
    given = {name: x.dim for name, x in (("k", k), ("v", v)) if isinstance(x, Operand)}
    dim = max(given.values(), default=smallest)
    if set(given.values()) - {dim} or dim < smallest or dim not in there:
        came = " and ".join(f"{name} for {size}" for name, size in given.items())
        wanted = max(dim, smallest)
        wanted = min(size for size in there if size >= wanted)
        raise ArgumentError(f"attention: {came} were quantized, which take one head dimension; quantize_operand(..., dim={wanted})")
    return dim


@dataclass(frozen=True)
class _Blocks:
    """Operands of block formats: those quantized before, else quantized here."""

    kernel: Kernel
    formats: dict[str, str]

    def __call__(self, call: Call, q, k, v, place: _Place) -> dict[str, Any]:
        """Codes and scales of q, tiles of k and v, and the mean that was taken from k."""
        dim = _block_dim(self.kernel, k, v)
        ends = call.sequences.get("key_ends")
        options = dict(dim=dim, key_lengths=None if ends is None else place.put(ends))
        q = self._quantized("q", q, call, place)
        k = self._quantized("k", k, call, place, smooth=call.smooth, **options)
        v = self._quantized("v", v, call, place, **options)
        levels = {f"{name}_global": x.global_scale.reshape(1) for name, x in (("q", q), ("k", k), ("v", v)) if x.global_scale is not None}
        arguments = dict(q_codes=call.grouped(q.codes), q_scales=call.grouped(q.scales), k_tiles=k.codes, v_tiles=v.codes)
        return {**arguments, **levels, "keys": k.shape[2], "dim": dim, "mean": k.mean}

    def _quantized(self, role: str, x, call: Call, place: _Place, **options) -> Operand:
        if isinstance(x, Operand):
            return x
        x, layout = (x.transpose(0, 2, 1, 3), "bshd") if call.transposed else (x, "bhsd")
        return quantize_operand(x, self.formats[role], role=role, layout=layout, **options, stream=place.stream)

    def values(self, *operands) -> tuple:
        """What the operands hold."""
        return tuple(np.asarray(x if isinstance(x, Operand) else quantize_operand(x, self.formats[role], role=role)) for role, x in zip("qkv", operands))


def _true_lse(call: Call, q, mean: DeviceArray, lse: DeviceArray, place: _Place) -> DeviceArray:
    """The log-sum-exp of all scores, from that of the scores with keys less their mean."""
    values = dequantize(q, stream=place.stream) if isinstance(q, Operand) else with_whole_rows(q, place.stream)
    return row_dot(call.grouped(values), mean, add=lse, scale=call.scale, stream=place.stream)


def _run(call: Call, stream) -> tuple:
    """Launch what a call needs: conversions, the kernel, and where keys are split or sums wanted, the merge."""
    place = _Place([*call.arrays.values(), call.out], stream)
    q, k, v = (place.put(x) for x in (call.q, call.k, call.v))
    arguments = call.way.operands(call, q, k, v, place) | _options(call, place)
    mean = arguments.pop("mean", None)
    packed = "query_starts" in call.sequences
    (batch, heads, queries, _), dim_v = q.shape, v.shape[-1]
    rows = (batch, k.shape[1], call.group, queries)
    splits = 1 if packed else splits_for(k.shape[1], call.group * queries, k.shape[2])

    target = call.out if isinstance(call.out, DeviceArray) else None
    if target is None:
        target = place.empty((batch, queries, heads, dim_v), call.output).transpose(0, 2, 1, 3) if call.transposed else place.empty((batch, heads, queries, dim_v), call.output)
    lse = place.empty(rows, f32) if call.return_lse else None
    if splits > 1 or not call.normalize:
        figures = _run_in_splits(call, place, arguments, splits, rows, target, lse)
    else:
        figures = () if lse is None else (lse,)
        direct = target if _is_loadable(target) else place.empty((*target.shape[:-1], -(-dim_v // _ROW_UNIT) * _ROW_UNIT), call.output)
        call.way.kernel(**arguments, **{f"out_{call.output}": call.grouped(direct)}, lse=lse, splits=1, stream=stream)
        if direct is not target:
            _converted(direct, call.output, place, target)
    if mean is not None and lse is not None:
        figures = (_true_lse(call, q, mean, figures[0].reshape(rows), place),)
    figures = tuple(place.back(x.reshape(batch, heads, queries)) for x in figures)
    return (_handed_back(call, place, target), *figures)


def _run_in_splits(call: Call, place: _Place, arguments, splits: int, rows: tuple[int, ...], target: DeviceArray, lse) -> tuple:
    """Launch on several runs of the keys and merge them; gives (lse,), (row_max, row_sum) or nothing."""
    width = -(-target.shape[-1] // _ROW_UNIT) * _ROW_UNIT
    partial = place.empty((splits, *rows, width), f32)
    row_max, row_sum = place.empty((splits, *rows), f32), place.empty((splits, *rows), f32)
    call.way.kernel(**arguments, partial=partial, row_max=row_max, row_sum=row_sum, stream=place.stream)
    whole = (rows[0], rows[1] * rows[2], rows[3])
    figures = {} if lse is None else dict(lse=lse.reshape(whole))
    if not call.normalize:
        figures = dict(merged_max=place.empty(whole, f32), merged_sum=place.empty(whole, f32))
    parts = (partial.reshape(splits, *whole, width), row_max.reshape(splits, *whole), row_sum.reshape(splits, *whole))
    attention_merge(*parts, **{f"out_{call.output}": target}, **figures, stream=place.stream)
    return tuple(figures.values())


def _options(call: Call, place: _Place) -> dict[str, Any]:
    """What kernels take beside their operands and outputs."""
    batch, heads, queries, keys = *call.q.shape[:3], call.k.shape[2]
    options = {name: place.put(array) for name, array in call.sequences.items()}
    options["sequences"] = next((x.shape[0] for x in options.values()), batch)
    if call.mask is not None:
        mask = place.put(call.mask)
        hides = mask.dtype == np.bool_
        if not hides and mask.dtype != np.float32:
            mask = _converted(mask, f32, place, place.empty(mask.shape, f32))
        whole = call.grouped((mask.view(np.uint8) if hides else mask).broadcast_to((batch, heads, queries, keys)))
        options["allowed" if hides else "mask"] = whole
    if call.sinks is not None:
        sinks = place.put(call.sinks)
        if sinks.dtype != np.float32:
            sinks = _converted(sinks[None, None, None], f32, place, place.empty((1, 1, 1, heads), f32))
        options["sinks"] = sinks.reshape(call.k.shape[1], call.group)
    return options | dict(scale=call.scale, softcap=call.softcap, left=call.left, right=call.right)


def _handed_back(call: Call, place: _Place, target: DeviceArray):
    """The output as the caller gets it."""
    if isinstance(call.out, DeviceArray):
        return call.given
    result = place.back(target.transpose(0, 2, 1, 3) if call.transposed else target)
    if call.given is None:
        return result
    np.copyto(call.given, result)
    return call.given


def _run_in_kernel(call: Call, stream) -> tuple:
    """Launch the first attention, which takes what it is given as it is."""
    first = _spelled("mxfp4", "bf16", "in_kernel")
    if call.output is f16:
        raise ArgumentError(f"attention: {first} takes out_dtype bfloat16 or float32; nearest: {_spelled('f16', 'f16', None)}")
    if call.group != 1:
        raise ArgumentError(f"attention: {first} takes as many heads in k and v as in q; nearest: {_spelled('bf16', 'bf16', None)}")
    if call.v.shape[3] != call.q.shape[3]:
        raise ArgumentError(f"attention: {first} takes v of q's head dimension; nearest: {_spelled('bf16', 'bf16', None)}")
    outputs = {f"out_{call.output}": True if call.out is None else call.out, "lse": call.return_lse}
    results = call.way.kernel(q=call.q, k=call.k, v=call.v, **outputs, scale=call.scale, causal=call.right == 0, stream=stream)
    return results if call.return_lse else (results,)


def _quantized_in_kernel(q, k, v) -> tuple:
    """What the first attention multiplies."""
    return *(mxfp4.decode(*mxfp4.encode(x)) for x in (q, k)), np.asarray(v).astype(bf16.dtype)


def _segments(name: str, arrays) -> list:
    """The arrays of a sequence, or of one array's first axis."""
    if isinstance(arrays, (list, tuple)):
        there = list(arrays)
    else:
        (whole,) = as_arrays("merge", **{name: arrays})
        there = [whole[i] for i in range(whole.shape[0])] if whole.shape else []
    if not there:
        raise ArgumentError(f"merge: {name} is {type(arrays).__name__} without segments; pass one array or more")
    return list(as_arrays("merge", **{f"{name}[{i}]": x for i, x in enumerate(there)}))


def _stacked(parts: Sequence[DeviceArray], place: _Place) -> DeviceArray:
    """Arrays of four axes one after the other, as float32."""
    stacked = place.empty((len(parts), *parts[0].shape), f32)
    for part, target in zip(parts, stacked):
        _converted(part, f32, place, target)
    return stacked


_FIRST_LACKS = ("window", "softcap", "mask", "sinks", "key_lengths", "cu_seqlens_q", "cu_seqlens_k", "smooth_k", "smooth_q", "normalize", "layout")



def _on_blocks(qk: str, pv: str) -> Way:
    """Attention on operands in block formats."""
    kernel, formats = BLOCK_ATTENTION[qk, pv], dict(q=qk, k=qk, v=pv)
    operands = _Blocks(kernel, formats)
    return Way(kernel, operands, operands.values, bf16, ("smooth_q", "cu_seqlens_q", "cu_seqlens_k"), formats=formats)


# (qk, pv, quantize) -> how it is computed. Another format is another line.
ATTENTION = {
    ("bf16", "bf16", None): Way(attention_bf16, _Floats(bf16), _Floats(bf16).values, bf16),
    ("f16", "f16", None): Way(attention_bf16, _Floats(f16), _Floats(f16).values, f16),
    **{(qk, pv, None): _on_blocks(qk, pv) for qk, pv in BLOCK_ATTENTION},
    ("mxfp4", "bf16", "in_kernel"): Way(attention_mxfp4_bf16, None, _quantized_in_kernel, bf16, _FIRST_LACKS, _run_in_kernel),
}
