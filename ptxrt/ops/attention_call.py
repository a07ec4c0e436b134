"""`Call`: the arguments of `attention`, checked against each other before anything is uploaded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

import numpy as np

from ..array import DeviceArray, as_arrays, as_output, check_forward
from ..blocks import BLOCK_FORMATS
from ..errors import ArgumentError
from ..formats import Format, bf16, dtype_of, f32, format_of, to_convert
from .attention_kernels import HEAD_DIMS, OPEN
from .attention_way import AttentionWay, spelled
from .operands import Operand, checked_cu_seqlens, is_number, shown, whole_numbers
from .quantized import Packed

if TYPE_CHECKING:
    Array = np.ndarray | DeviceArray


# Kernels divide by the soft cap. Smaller caps are raised to this one: the scores stay so near 0 that the softmax does
# not change.
LEAST_SOFTCAP = 2.0**-100


@dataclass(frozen=True)
class Call:
    """A checked call of `attention`. q, k, v and out have the axes [batch, heads, length, dim].

    smooth_k: whether the mean of the keys is subtracted before they are multiplied. smooth_q: whether the means of
    blocks of 64 queries are subtracted before they are multiplied. callers_out: the array that the caller passed as
    out, in the caller's layout; it is returned. sequences: starts and ends of rows and keys, by the kernel's argument
    names. cu_seqlens_q, cu_seqlens_k: bounds of packed sequences of queries and of keys, or None.
    """

    way: AttentionWay
    q: Array | Operand
    k: Array | Operand
    v: Array | Operand
    scale: float
    softcap: float
    left: int
    right: int
    smooth_k: bool
    smooth_q: bool
    mask: Array | None
    sinks: Array | None
    sequences: dict[str, Array]
    cu_seqlens_q: Array | None
    cu_seqlens_k: Array | None
    return_lse: bool
    normalize: bool
    transposed: bool
    output: Format
    out: Array | None
    callers_out: Array | None

    @property
    def group(self) -> int:
        """Heads of q for each head of k and v."""
        return self.q.shape[1] // max(self.k.shape[1], 1)

    @property
    def shows_scores(self) -> bool:
        """Whether a result depends on the scores themselves, not only on their differences within a row."""
        return self.softcap > 0 or self.sinks is not None or self.return_lse or not self.normalize

    @property
    def arrays(self) -> dict[str, Array]:
        """Every array of the call, by name."""
        named = dict(q=self.q, k=self.k, v=self.v, mask=self.mask, sinks=self.sinks, **self.sequences)
        arrays = {name: x.codes if isinstance(x, Operand) else x for name, x in named.items()}
        return {name: array for name, array in arrays.items() if array is not None}

    def grouped(self, x):
        """An array [batch, heads, ...] with heads as [heads_kv, group]."""
        return x.reshape(x.shape[0], self.k.shape[1], self.group, *x.shape[2:])


def attention_call(
    ways: Mapping[tuple, AttentionWay],
    *,
    q,
    k,
    v,
    qk,
    pv,
    quantize,
    causal,
    window,
    scale,
    softcap,
    mask,
    sinks,
    key_lengths,
    cu_seqlens_q,
    cu_seqlens_k,
    smooth_k,
    smooth_q,
    return_lse,
    normalize,
    layout,
    out_dtype,
    out,
) -> Call:
    """Check the arguments of `attention`. ways: the implementations of `attention`, by (qk, pv, quantize)."""
    if qk is None:
        q, k, v = (
            x if isinstance(x, Packed) else as_arrays("attention", **{name: x})[0] for name, x in zip("qkv", (q, k, v))
        )
        qk = "f16" if all(getattr(x, "dtype", None) == np.float16 for x in (q, k, v)) else "bf16"
    way = _way(ways, qk, pv, quantize)
    if not isinstance(layout, str) or layout not in ("bhsd", "bshd"):
        raise ArgumentError(f"attention: layout is {layout!r}; pass 'bhsd' or 'bshd'")
    transposed = layout == "bshd"
    named = dict(q=q, k=k, v=v)
    q, k, v = (_operand_or_array(ways, way, name, named, transposed) for name in named)
    _check_shapes(q, k, v, layout)
    (batch, heads, queries, dim), (_, _, keys, dim_v) = q.shape, v.shape
    if scale is None:
        scale = 1 / math.sqrt(dim)
    if not _is_finite(scale):
        raise ArgumentError(f"attention: scale is {scale!r}; pass a finite number, or None for 1 / sqrt(D)")
    if softcap is None or not _is_finite(softcap) or softcap < 0:
        raise ArgumentError(f"attention: softcap is {softcap!r}; pass a number above 0, or 0 for none")
    softcap = max(float(softcap), LEAST_SOFTCAP) if softcap else 0.0
    left, right = checked_window("attention", window, _flag("causal", causal))
    return_lse, normalize = _flag("return_lse", return_lse), _flag("normalize", normalize)
    if return_lse and not normalize:
        words = "normalize=False returns row_max and row_sum in place of an lse; leave out return_lse"
        raise ArgumentError(f"attention: {words}")
    callers_out = None if out is None else as_output("attention", "out", out)
    check_forward("attention", out=callers_out)
    member = output_format("attention", out_dtype, callers_out, _usual_output(way, q) if normalize else f32)
    if not normalize and member is not f32:
        raise ArgumentError(f"attention: normalize=False gives float32; {member.dtype} was asked for")
    automatic = isinstance(smooth_k, str) and smooth_k == "auto"
    smooth_k, smooth_q = not automatic and _flag("smooth_k", smooth_k, ", or 'auto'"), _flag("smooth_q", smooth_q)
    options = dict(
        mask=mask,
        sinks=sinks,
        key_lengths=key_lengths,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        window=window,
    )
    flags = dict(softcap=softcap, normalize=not normalize, layout=transposed, smooth_k=smooth_k, smooth_q=smooth_q)
    _check_lacks(
        ways, way, [n for n, option in options.items() if option is not None] + [n for n, flag in flags.items() if flag]
    )
    smooth_k, smooth_q = _smooths_keys(way, k, None if automatic else smooth_k), _smooths_queries(q, smooth_q)
    sequences, cu_q, cu_k = _checked_sequences(key_lengths, cu_seqlens_q, cu_seqlens_k, batch, queries, keys)
    if smooth_q:
        _check_packing("q", q, "cu_seqlens_q", cu_q)
    for name, x in (("k", k), ("v", v)):
        _check_packing(name, x, "cu_seqlens_k", cu_k)
    call = Call(
        way=way,
        q=q,
        k=k,
        v=v,
        scale=scale,
        softcap=softcap,
        left=left,
        right=right,
        smooth_k=smooth_k,
        smooth_q=smooth_q,
        mask=_checked_mask(mask, (batch, heads, queries, keys)),
        sinks=checked_sinks("attention", sinks, heads),
        sequences=sequences,
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        return_lse=return_lse,
        normalize=normalize,
        transposed=transposed,
        output=member,
        out=None if callers_out is None else _in_order("out", callers_out, transposed),
        callers_out=callers_out,
    )
    way.check(call)
    _check_out(call, (batch, heads, queries, dim_v))
    return call


def _way(ways, qk, pv, quantize):
    """Return the implementation for formats; ArgumentError with the nearest formats if there is none."""
    asked = (qk, qk if pv is None else pv, quantize)
    words = all(isinstance(word, (str, type(None))) for word in asked)
    if words and asked in ways:
        return ways[asked]
    nearest = _nearest(ways, asked)
    known = "; ".join(spelled(*formats) for formats in ways)
    raise ArgumentError(f"attention: no kernel for {spelled(*asked)}; nearest: {spelled(*nearest)}. There is {known}")


def _usual_output(way, q) -> Format:
    """Return the default type of results: q's, or bfloat16 if q is an operand or the kernel cannot write q's type."""
    member = None if isinstance(q, Operand) else format_of(q.dtype)
    return member if member in way.outputs else bf16


def _likeness(known, asked) -> float:
    """Return the similarity of a known and a given word: 1 if they are equal, else less."""
    if isinstance(known, str) and isinstance(asked, str):
        return 1.0 if known == asked else 0.9 * SequenceMatcher(None, known, asked.lower()).ratio()
    return float(known is None and asked is None)


def _nearest(ways: Iterable[tuple], asked: tuple) -> tuple:
    """Return the formats that are most like the given ones."""
    return max(ways, key=lambda known: sum(map(_likeness, known, asked)))


def _check_lacks(ways, way, options: list[str]) -> None:
    """Raise ArgumentError for an option that the implementation lacks; the message names the most similar with it."""
    formats = next(formats for formats, known in ways.items() if known is way)
    for name in options:
        if name in way.lacks:
            others = [formats for formats, known in ways.items() if name not in known.lacks]
            advice = f"nearest: {spelled(*_nearest(others, formats))}" if others else "leave it out"
            raise ArgumentError(f"attention: {way} has no {name}; {advice}")


def _operand_or_array(ways, way: AttentionWay, name: str, named: Mapping, transposed: bool):
    """Return q, k or v: an array [batch, heads, length, dim], or an operand in the format of the implementation."""
    x = named[name]
    if not isinstance(x, Packed):
        (x,) = as_arrays("attention", **{name: x})
        check_forward("attention", **{name: x})
        return _in_order(name, x, transposed)
    format = way.formats.get(name)
    if not isinstance(x, Operand) or x.role != name or x.format != format:
        takes = f"quantize_operand({name}, {format!r}, role={name!r})" if format else f"{name} as an array"
        raise ArgumentError(f"attention: {name} is {x!r}; {way} takes {takes}{_formats_of_operands(ways, way, named)}")
    return x


def _formats_of_operands(ways, way: AttentionWay, named: Mapping) -> str:
    """Return advice on the formats that take all operands of a call as they are; empty if there are none."""
    operands = {name: x for name, x in named.items() if isinstance(x, Packed)}
    if not all(isinstance(x, Operand) and x.role == name for name, x in operands.items()):
        return ""
    fits = lambda known: all(known.formats.get(name) == x.format for name, x in operands.items())
    others = [asked for asked, known in ways.items() if fits(known)]
    return f"; for these operands pass {spelled(*_nearest(others, way.asked))}" if others else ""


def _smooths_keys(way, k, asked: bool | None) -> bool:
    """Return whether keys are smoothed: as the call asks, else as the operand was quantized, else whether the format
    has 4 bits."""
    formats = way.formats
    if isinstance(k, Operand):
        smoothed = k.mean is not None
        if asked is not None and asked != smoothed:
            raise ArgumentError(
                f"attention: smooth_k is {asked}, but k is {k!r}; quantize it with smooth={asked}, "
                "or leave out smooth_k"
            )
        return smoothed
    return bool(formats) and BLOCK_FORMATS[formats["k"]].bits == 4 if asked is None else asked


def _smooths_queries(q, asked: bool) -> bool:
    """Return whether queries are smoothed: as the call asks, or as the operand was quantized."""
    smoothed = isinstance(q, Operand) and q.mean is not None
    if asked and isinstance(q, Operand) and not smoothed:
        raise ArgumentError(
            f"attention: smooth_q is True, but q is {q!r}; quantize it with smooth=True, or leave out smooth_q"
        )
    return asked or smoothed


def _in_order(name: str, x, transposed: bool):
    """Return an array in the caller's layout as [batch, heads, length, dim]."""
    if len(x.shape) != 4:
        found = f"{name} has shape {list(x.shape)}, {len(x.shape)} dimensions where 4 are needed"
        raise ArgumentError(f"attention: {found}; reshape it to {'[B, S, H, D]' if transposed else '[B, H, S, D]'}")
    return x.transpose(0, 2, 1, 3) if transposed else x


def _check_shapes(q, k, v, layout: str) -> None:
    """Raise ArgumentError if the types or shapes of q, k and v do not match, or if no kernel supports them."""

    def fail(what: str):
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in zip("qkv", (q, k, v)))
        order = "" if layout == "bhsd" else ", here as [B, H, S, D]"
        raise ArgumentError(f"attention: {what}; there are {shapes}{order}")

    for name, x in zip("qkv", (q, k, v)):
        if not isinstance(x, Operand) and format_of(x.dtype) is None:
            raise ArgumentError(f"attention: {name} is {x.dtype} {list(x.shape)}; {to_convert(name)}")
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


def checked_window(function: str, window, causal) -> tuple[int, int]:
    """Return (left, right): how many keys a query sees to each side of its own position; OPEN for no limit."""
    sides = (
        window
        if isinstance(window, (tuple, list)) and len(window) == 2
        else (None, None)
        if window is None
        else (False,)
    )
    whole = all(
        side is None or (isinstance(side, (int, np.integer)) and not isinstance(side, bool) and side >= 0)
        for side in sides
    )
    if not whole or len(sides) != 2:
        raise ArgumentError(
            f"{function}: window is {window!r}; pass (left, right), each a whole number from 0 on, or None for open"
        )
    left, right = (OPEN if side is None else min(int(side), OPEN) for side in sides)
    return left, 0 if causal else right


def _checked_mask(mask, shape: tuple[int, ...]):
    """Return the mask with four axes, bool or float; ArgumentError if it does not broadcast to `shape`."""
    if mask is None:
        return None
    (mask,) = as_arrays("attention", mask=mask)
    check_forward("attention", mask=mask)
    if isinstance(mask, np.ndarray) and mask.dtype == np.float64:
        with np.errstate(over="ignore"):
            mask = mask.astype(np.float32)
    fits = len(mask.shape) <= 4 and all(size in (1, expected) for size, expected in zip(mask.shape[::-1], shape[::-1]))
    if not fits or (mask.dtype != np.bool_ and format_of(mask.dtype) is None):
        expected = f"bool or float that broadcasts to [B, H, Sq, Sk], {list(shape)}"
        hint = (
            "; mask != 0 makes one of whole numbers: True where a key is seen"
            if fits and mask.dtype.kind in "iu"
            else ""
        )
        raise ArgumentError(f"attention: mask is {mask.dtype} {list(mask.shape)}; pass {expected}{hint}")
    return mask.reshape((1,) * (4 - len(mask.shape)) + tuple(mask.shape))


def checked_sinks(function: str, sinks, heads: int):
    """Return sinks as an array of any float type, one for each head; ArgumentError for others."""
    if sinks is None:
        return None
    (sinks,) = as_arrays(function, sinks=sinks)
    check_forward(function, sinks=sinks)
    if isinstance(sinks, np.ndarray) and sinks.dtype == np.float64:
        with np.errstate(over="ignore"):
            sinks = sinks.astype(np.float32)
    if tuple(sinks.shape) != (heads,) or format_of(sinks.dtype) is None:
        raise ArgumentError(
            f"{function}: sinks are {sinks.dtype} {list(sinks.shape)}; pass one float for each of {heads} heads of q"
        )
    return sinks


def _checked_sequences(
    key_lengths, cu_q, cu_k, batch: int, queries: int, keys: int
) -> tuple[dict[str, Array], Array | None, Array | None]:
    """Return where sequences begin and end, by the kernel's names, and those of packed queries and keys as one array
    each.
    """
    if cu_q is None and cu_k is None:
        if key_lengths is None:
            return {}, None, None
        lengths = whole_numbers("attention", "key_lengths", key_lengths, f"one for each of {batch} batches")
        if lengths.shape != (batch,) or (
            isinstance(lengths, np.ndarray) and not ((0 <= lengths) & (lengths <= keys)).all()
        ):
            expected = f"a whole number from 0 to {keys} for each of {batch} batches"
            raise ArgumentError(f"attention: key_lengths {shown(lengths)}; pass {expected}")
        return dict(key_ends=lengths), None, None
    if cu_q is None or cu_k is None or key_lengths is not None:
        what = "one of cu_seqlens_q and cu_seqlens_k" if key_lengths is None else "key_lengths beside cu_seqlens"
        raise ArgumentError(f"attention: {what} came; packed sequences need both cu_seqlens and no key_lengths")
    cu_q = checked_cu_seqlens("attention", "cu_seqlens_q", cu_q, batch, queries)
    cu_k = checked_cu_seqlens("attention", "cu_seqlens_k", cu_k, batch, keys)
    if cu_q.shape != cu_k.shape:
        raise ArgumentError(
            f"attention: cu_seqlens_q has {cu_q.shape[0]} numbers, cu_seqlens_k {cu_k.shape[0]}; pass as many"
        )
    return dict(query_starts=cu_q[:-1], query_ends=cu_q[1:], key_starts=cu_k[:-1], key_ends=cu_k[1:]), cu_q, cu_k


def _check_packing(name: str, x, option: str, cu) -> None:
    """Raise ArgumentError if an operand was quantized for other sequences than the call's, as far as that is
    visible."""
    if not isinstance(x, Operand) or (x.sequences is None and cu is None):
        return
    if cu is None:
        both = "cu_seqlens_q and cu_seqlens_k"
        raise ArgumentError(
            f"attention: {name} is {x!r}; pass {both}, the cu_seqlens it was quantized with as {option}"
        )
    differ = x.sequences != cu.shape[0] - 1
    if not differ and isinstance(cu, np.ndarray) and isinstance(x.cu_seqlens, np.ndarray):
        differ = (x.cu_seqlens != cu).any()
    if differ:
        raise ArgumentError(f"attention: {name} is {x!r}, {option} {shown(cu)}; quantize it with cu_seqlens={option}")


def _check_out(call: Call, shape: tuple[int, ...]) -> None:
    """Raise ArgumentError if results cannot be written to `out`."""
    if call.out is None:
        return
    if tuple(call.out.shape) != shape:
        expected = (shape[0], shape[2], shape[1], shape[3]) if call.transposed else shape
        raise ArgumentError(
            f"attention: out has shape {list(call.callers_out.shape)}, not {list(expected)}; pass "
            "an array of that shape"
        )
    if isinstance(call.out, np.ndarray):
        device = next((name for name, array in call.arrays.items() if isinstance(array, DeviceArray)), None)
        if device:
            raise ArgumentError(f"attention: out is a NumPy array, {device} is on the device; pass both on one side")
        if not call.out.flags.writeable:
            raise ArgumentError("attention: out is read-only; pass an array that can be written")


def _flag(name: str, value, others: str = "") -> bool:
    if not isinstance(value, (bool, np.bool_)) and not (isinstance(value, int) and value in (0, 1)):
        raise ArgumentError(f"attention: {name} is {value!r}; pass True or False{others}")
    return bool(value)


def _is_finite(value) -> bool:
    try:
        return is_number(value) and math.isfinite(value)
    except (TypeError, ValueError, OverflowError):
        return False


def output_format(function: str, asked, out, default: Format) -> Format:
    """Return the format of results: that of `out` if there is an array, else the dtype asked for, else the default."""
    try:
        dtype = None if asked is None else dtype_of(asked)
    except (TypeError, ValueError):
        dtype = asked
    of_out = getattr(out, "dtype", None)
    result = of_out if dtype is None and of_out is not None else default.dtype if dtype is None else dtype
    member = format_of(result) if isinstance(result, np.dtype) else None
    if member is None or (of_out is not None and of_out != result):
        found = f"out_dtype={asked!r}" + (f" with out of {of_out}" if of_out is not None else "")
        raise ArgumentError(
            f"{function}: {found}; results are bfloat16, float16 or float32, and out has the dtype asked for"
        )
    return member
