"""The public functions of attention: `attention`, `merge`, and `exact_attention`, a float64 reference on the host."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from ..array import DeviceArray, as_arrays, check_forward
from ..errors import ArgumentError
from ..formats import bf16, f16, f32, format_of
from ..prepared import remembered
from .attention_blocks import BLOCK_ATTENTION
from .attention_call import Call, attention_call, checked_window, output_format
from .attention_few import MOST_NODES
from .attention_kernels import attention_merge, exact_quotient, exact_sums, spans_of
from .attention_way import AttentionWay, BlockAttention, FloatAttention, InKernelAttention
from .operands import Operand
from .place import Place, converted

if TYPE_CHECKING:
    from numpy.typing import DTypeLike
    from typing_extensions import Unpack

    from ..typing import Array, AttentionOptions, HostArray, StreamLike

    Given = Array | Operand


@overload
def attention(
    q: HostArray,
    k: HostArray,
    v: HostArray,
    *,
    return_lse: Literal[False] = ...,
    normalize: Literal[True] = ...,
    **options: Unpack[AttentionOptions],
) -> HostArray: ...
@overload
def attention(
    q: HostArray,
    k: HostArray,
    v: HostArray,
    *,
    return_lse: Literal[True],
    normalize: Literal[True] = ...,
    **options: Unpack[AttentionOptions],
) -> tuple[HostArray, HostArray]: ...
@overload
def attention(
    q: HostArray,
    k: HostArray,
    v: HostArray,
    *,
    return_lse: Literal[False] = ...,
    normalize: Literal[False],
    **options: Unpack[AttentionOptions],
) -> tuple[HostArray, HostArray, HostArray]: ...
@overload
def attention(
    q: DeviceArray,
    k: Given,
    v: Given,
    *,
    return_lse: Literal[False] = ...,
    normalize: Literal[True] = ...,
    **options: Unpack[AttentionOptions],
) -> DeviceArray: ...
@overload
def attention(
    q: DeviceArray,
    k: Given,
    v: Given,
    *,
    return_lse: Literal[True],
    normalize: Literal[True] = ...,
    **options: Unpack[AttentionOptions],
) -> tuple[DeviceArray, DeviceArray]: ...
@overload
def attention(
    q: DeviceArray,
    k: Given,
    v: Given,
    *,
    return_lse: Literal[False] = ...,
    normalize: Literal[False],
    **options: Unpack[AttentionOptions],
) -> tuple[DeviceArray, DeviceArray, DeviceArray]: ...
@overload
def attention(
    q: Given, k: Given, v: Given, *, return_lse: bool = ..., normalize: bool = ..., **options: Unpack[AttentionOptions]
) -> Any: ...
@remembered
def attention(
    q,
    k,
    v,
    *,
    qk=None,
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
    """Compute softmax(scale Q K^T) V for q [B, H, Sq, D], k [B, Hkv, Sk, D] and v [B, Hkv, Sk, Dv].

    H is a multiple of Hkv: head h of q uses head h // (H / Hkv) of k and v. D and Dv are up to 256. Arrays may have any
    strides; on a device none below 0. The result of each batch item is bit for bit that of a call with this item alone;
    a NaN or an infinity in V may reach other rows that do not see its key. A row without visible keys gives 0 and an
    lse of -inf (or its sink). A NaN in a row of Q, in a key that the row sees, or in its sink makes the row NaN. If all
    arrays are NumPy arrays, results are NumPy arrays. If any is a device array, results stay on the device and the call
    does not wait.

    Args:
        q: float32, float16 or bfloat16, or an `Operand`.
        k: As q.
        v: As q.
        qk: The format of Q and K: "bf16", "f16", "mxfp8", "mxfp4" or "nvfp4". None is "f16" if q, k and v all are
            float16, else "bf16". Arrays of another type are rounded, or quantized as `quantize_operand` does.
        pv: The format of P and V; None is qk's. Mixed pairs (qk, pv): "mxfp4" or "nvfp4" with "mxfp8"; "mxfp8", "mxfp4"
            or "nvfp4" with "bf16".
        quantize: "in_kernel", with qk="mxfp4" and pv="bf16": the kernel quantizes Q and K as it loads them, under the
            rule "floor" of `quantize` and without smoothing. None quantizes arrays in separate launches.
        causal: Query i sees key j where j <= i + Sk - Sq.
        window: (left, right), each a whole number from 0 on, or None for no limit: query i sees key j where -left <= j
            - (i + Sk - Sq) <= right. With `causal`, right is 0.
        scale: A finite number; None is 1 / sqrt(D).
        softcap: If above 0, scores become softcap tanh(score / softcap).
        mask: bool (False hides a key) or float (added to the scores), broadcastable to [B, H, Sq, Sk].
        sinks: [H], one logit for each head. Its exponential is added to the denominator of the softmax.
        key_lengths: [B] whole numbers: Sk of each item. Host values are checked. A device array is int32, and its
            values are not checked.
        cu_seqlens_q: Packed sequences, with B = 1: sequence i is rows cu[i] to cu[i + 1] of q. It has N + 1 whole
            numbers that rise from 0 to the length of q, and is checked as key_lengths is. Sq and Sk are then those of
            the sequence; masks cover all rows and keys. Block formats quantize each sequence separately. With numbers
            on a device, sequences of up to 16 queries are rounded as many queries are ("few queries" in the numerics).
        cu_seqlens_k: The same for keys. Operands must have been quantized with this cu_seqlens.
        smooth_k: In block formats, whether the mean of the keys is subtracted before they are quantized. This does not
            change the softmax. softcap, sinks, lse and row_max apply to the original scores, whose part of the mean is
            that of the given q, or of the dequantized q of an `Operand`: lse and row_max, and under softcap or sinks
            also outputs, differ between arrays and operands. A NaN or an infinity in K makes every row of its head NaN,
            because the mean is NaN. "auto" smooths for 4-bit qk.
        smooth_q: In block formats, whether the mean of each block of 64 queries of a head is subtracted before they are
            quantized. The kernel adds the scores of the means. This takes time, and Sq Sk / 16 bytes a head (for packed
            sequences of their whole lengths). Operands are used as they were quantized.
        return_lse: Whether to return also the natural logarithm of each row's denominator, float32 [B, H, Sq].
        normalize: False returns (out, row_max, row_sum), all float32, for `merge`: the output is out / row_sum, the
            denominator is 2**row_max row_sum, and row_max is a whole number.
        layout: "bhsd", or "bshd" for arrays with the axes H and S swapped.
        out_dtype: float32, float16 or bfloat16. None is q's type, or bfloat16 if q is an Operand or the kernel has no
            output of q's type.
        out: An array of the output's shape to write to; its dtype replaces `out_dtype`.
        stream: A stream of the device; None is the library's own.

    Returns:
        The output [B, H, Sq, Dv]; a tuple with `return_lse` or `normalize=False`.

    Raises:
        ArgumentError: An argument is invalid; the message names it.
    """
    call = attention_call(
        ATTENTION,
        q=q,
        k=k,
        v=v,
        qk=qk,
        pv=pv,
        quantize=quantize,
        causal=causal,
        window=window,
        scale=scale,
        softcap=softcap,
        mask=mask,
        sinks=sinks,
        key_lengths=key_lengths,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        smooth_k=smooth_k,
        smooth_q=smooth_q,
        return_lse=return_lse,
        normalize=normalize,
        layout=layout,
        out_dtype=out_dtype,
        out=out,
    )
    results = call.way.launch(call, stream)
    return results[0] if len(results) == 1 else results


def call_of(*arguments, **options) -> Call:
    """Describe a call of `attention` with all its arguments except `stream`; nothing is uploaded or launched."""
    bound = inspect.signature(attention).bind(*arguments, **options)
    bound.apply_defaults()
    del bound.arguments["stream"]
    return attention_call(ATTENTION, **bound.arguments)


@overload
def merge(
    outputs: HostArray | Sequence[HostArray],
    lses: HostArray | Sequence[HostArray] | None = ...,
    *,
    row_max: HostArray | Sequence[HostArray] | None = ...,
    row_sum: HostArray | Sequence[HostArray] | None = ...,
    out_dtype: DTypeLike = ...,
    stream: StreamLike = ...,
) -> tuple[HostArray, HostArray]: ...
@overload
def merge(
    outputs: DeviceArray | Sequence[DeviceArray],
    lses: Array | Sequence[Array] | None = ...,
    *,
    row_max: Array | Sequence[Array] | None = ...,
    row_sum: Array | Sequence[Array] | None = ...,
    out_dtype: DTypeLike = ...,
    stream: StreamLike = ...,
) -> tuple[DeviceArray, DeviceArray]: ...
@overload
def merge(
    outputs: Array | Sequence[Array],
    lses: Array | Sequence[Array] | None = ...,
    *,
    row_max: Array | Sequence[Array] | None = ...,
    row_sum: Array | Sequence[Array] | None = ...,
    out_dtype: DTypeLike = ...,
    stream: StreamLike = ...,
) -> Any: ...
def merge(outputs, lses=None, *, row_max=None, row_sum=None, out_dtype=np.float32, stream=None):
    """Merge attention over segments of the keys into (output, lse) over all of them.

    From lses: lse = log(sum(exp(lse_i))) and output = sum(exp(lse_i - lse) output_i). From the results of
    `normalize=False`: output = sum(2**row_max_i output_i) / sum(2**row_max_i row_sum_i), and lse is the natural
    logarithm of that denominator. Segments with an lse or a row_max of -inf are skipped; rows for which all segments
    are skipped give 0 and -inf.
    In block formats row_sum adds the rounded weights, and lse the exact ones. Segments merged by row_max and row_sum
    differ from one pass over all keys by float32 sums alone; segments merged by lses differ also by the rounding of the
    weights. Sums are float32, in a binary tree. NumPy arrays give NumPy results. Device arrays stay on the device; the
    call does not wait.

    Args:
        outputs: A sequence of arrays [..., S, D], or one array with the segments along its first axis; float32, float16
            or bfloat16.
        lses: The `return_lse` results [..., S] of the segments, float32. Pass these, or row_max and row_sum.
        row_max: The second results of `normalize=False`, float32 [..., S].
        row_sum: The third results of `normalize=False`, float32 [..., S].
        out_dtype: The type of output. lse is float32.
        stream: A stream of the device; None is the library's own.

    Raises:
        ArgumentError: An argument is invalid; the message names it.
    """
    figures_given = {name: x for name, x in dict(lses=lses, row_max=row_max, row_sum=row_sum).items() if x is not None}
    if list(figures_given) not in (["lses"], ["row_max", "row_sum"]):
        found = " and ".join(figures_given) or "neither"
        raise ArgumentError(
            f"merge: {found} came beside outputs; pass lses, or row_max and row_sum as normalize=False gives them"
        )
    parts, figures = _segments("outputs", outputs), {name: _segments(name, x) for name, x in figures_given.items()}
    shape = tuple(parts[0].shape)
    for name, group in dict(outputs=parts, **figures).items():
        expected, members = (shape, (f32, f16, bf16)) if name == "outputs" else (shape[:-1], (f32,))
        for i, item in enumerate(group):
            if tuple(item.shape) != expected or len(group) != len(parts):
                raise ArgumentError(
                    f"merge: {name}[{i}] has shape {list(item.shape)} of {len(group)}; {len(parts)} outputs of "
                    f"{list(shape)} "
                    f"have {len(parts)} {' and '.join(figures)} of {list(shape[:-1])}"
                )
            if format_of(item.dtype, members) is None:
                raise ArgumentError(
                    f"merge: {name}[{i}] is {item.dtype}; outputs are float32, float16 or bfloat16, "
                    f"{' and '.join(figures)} float32"
                )
    if len(parts) > MOST_NODES:
        raise ArgumentError(
            f"merge: {len(parts)} segments came; a call takes {MOST_NODES}: merge some with normalize=False first, or "
            "by their lses"
        )
    if not 2 <= len(shape) <= 4:
        raise ArgumentError(
            f"merge: outputs[0] has shape {list(shape)}; pass [B, H, S, D], or fewer axes in front of S"
        )
    member = output_format("merge", out_dtype, None, f32)
    place = Place([*parts, *sum(figures.values(), [])], stream)
    rows = (1,) * (4 - len(shape)) + shape[:-1]
    if shape[-1]:
        partial = _stacked([place.put(x).reshape(*rows, shape[-1]) for x in parts], place)
    else:  # no columns: the merge still computes lse
        partial = place.put(np.zeros((len(parts), *rows, 1), np.float32))
    maxima, *sums = (
        _stacked([place.put(x).reshape(*rows, 1) for x in group], place).reshape(len(parts), *rows)
        for group in figures.values()
    )
    if 0 in partial.shape:
        return tuple(place.back(place.empty(s, m)) for s, m in ((shape, member), (shape[:-1], f32)))
    merged = {f"out_{member}": place.empty(partial.shape[1:], member), "lse": place.empty(rows, f32)}
    attention_merge(partial, maxima, *sums, **merged, natural=int(lses is not None), stream=stream)
    out, lse = merged.values()
    return place.back(out[..., : shape[-1]].reshape(shape)), place.back(lse.reshape(shape[:-1]))


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
    """Compute `attention` in float64 on the host: output [B, H, Sq, Dv] and lse [B, H, Sq], in the layout "bhsd"."""
    q, k, v = (np.asarray(x) for x in (q, k, v))
    heads, group = k.shape[1], q.shape[1] // k.shape[1]
    left, right = checked_window("exact_attention", window, causal)

    def grouped(x, *axes):
        return (
            None
            if x is None
            else np.broadcast_to(x, (q.shape[0], q.shape[1], *axes)).reshape(q.shape[0], heads, group, *axes)
        )

    spans = None
    if cu_seqlens_q is not None:
        ends = [(cu[:-1], cu[1:]) for cu in (np.asarray(cu_seqlens_q), np.asarray(cu_seqlens_k))]
        spans = spans_of(len(ends[0][0]), 0, 0, *ends[0], *ends[1])
    elif key_lengths is not None:
        spans = spans_of(len(q), q.shape[2], k.shape[2], key_ends=np.asarray(key_lengths))
    hides = mask is not None and np.asarray(mask).dtype == bool
    sums = exact_sums(
        *(grouped(q, *q.shape[2:]), k, v),
        **dict(
            scale=q.shape[-1] ** -0.5 if scale is None else scale, left=left, right=right, softcap=softcap, spans=spans
        ),
        mask=None if hides else grouped(mask, q.shape[2], k.shape[2]),
        allowed=grouped(mask, q.shape[2], k.shape[2]) if hides else None,
        sinks=None if sinks is None else np.asarray(sinks).reshape(heads, group),
    )
    out, lse = exact_quotient(*sums)
    return out.reshape(*q.shape[:-1], v.shape[-1]), lse.reshape(q.shape[:-1])


def _segments(name: str, arrays) -> list:
    """Return the segments as a list: the items of a sequence, or an array's items along its first axis."""
    if isinstance(arrays, (list, tuple)):
        segments = list(arrays)
    else:
        (whole,) = as_arrays("merge", **{name: arrays})
        segments = [whole[i] for i in range(whole.shape[0])] if whole.shape else []
    if not segments:
        raise ArgumentError(f"merge: {name} is {type(arrays).__name__} without segments; pass one array or more")
    named = {f"{name}[{i}]": x for i, x in enumerate(segments)}
    arrays = as_arrays("merge", **named)
    check_forward("merge", **dict(zip(named, arrays)))
    return list(arrays)


def _stacked(parts: Sequence[DeviceArray], place: Place) -> DeviceArray:
    """Stack arrays of four axes along a new first axis, as float32."""
    stacked = place.empty((len(parts), *parts[0].shape), f32)
    for part, target in zip(parts, stacked):
        converted(part, f32, place, target)
    return stacked


# The implementations of `attention`, by (qk, pv, quantize). A new combination of formats is a new object here.
_WAYS: tuple[AttentionWay, ...] = (
    FloatAttention(bf16),
    FloatAttention(f16),
    *(BlockAttention(qk, pv) for qk, pv in BLOCK_ATTENTION),
    InKernelAttention(),
)
ATTENTION = {way.asked: way for way in _WAYS}
