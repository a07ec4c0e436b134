"""Declarations of `attention_bf16`, `attention_merge` and the kernel that quantizes as it loads, and float64 attention,
their reference."""

import math

import numpy as np

from ..accuracy import Tolerance
from ..blocks import mxfp4
from ..declaration import In, Out, Scalar, loose, scattered, strided, unaligned
from ..formats import bf16, f16, f32, i32, u8
from ..kernel import kernel
from ..sequences import ends_of, starts_of

# Compiled head dimensions (of Q and K, of V).
HEAD_DIMS = ((32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
# A side of a window without limit; no key is this far away.
OPEN = 2**31 - 1
# Kernels store rows of an output in runs of so many columns.
STORED_COLUMNS = 8
# Keys of a unit; splits are whole units.
SPLIT_UNIT = 64
LOG2_E = math.log2(math.e)


def visible(queries: int, keys: int, left: int = OPEN, right: int = OPEN) -> np.ndarray:
    """Return which keys each query sees, bool [queries, keys]; windows are aligned at the bottom right.

    Key j is visible to query i if -left <= j - (i + keys - queries) <= right; causal is right = 0.
    """
    distance = np.arange(keys) - (np.arange(queries)[:, None] + keys - queries)
    return (-left <= distance) & (distance <= right)


def visible_pairs(queries: int, keys: int, left: int = OPEN, right: int = OPEN) -> int:
    """The number of visible pairs of query and key."""
    place = np.arange(queries, dtype=np.int64) + keys - queries
    return int(np.maximum(np.minimum(place + right + 1, keys) - np.maximum(place - left, 0), 0).sum())


def exact_sums(
    q,
    k,
    v,
    *,
    scale,
    left=OPEN,
    right=OPEN,
    softcap=0.0,
    mask=None,
    allowed=None,
    sinks=None,
    spans=None,
    part=slice(None),
    added=None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute attention in float64 before the division. Return for each row the largest score, the sum of exponentials,
    and the exponentials times V.

    q: [batch, heads_kv, group, queries, dim], k and v: [batch, heads_kv, keys, dim], where a head of k and v serves a
    group of heads of q. mask, allowed: [batch, heads_kv, group, queries, keys]; sinks: [heads_kv, group]. spans: for
    each sequence its batch index and the slices of its queries and keys; None takes each batch whole. part: a slice of
    each sequence's keys. A score is scale q.k plus `added` (of the shape of a mask), if given. It is capped to softcap
    tanh(score / softcap), then the mask is added. Exponentials are relative to the largest score. Rows without keys
    have a largest score of -inf and sums of 0. A NaN in a visible score makes its row NaN.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    top, total = np.full(q.shape[:-1], -np.inf), np.zeros(q.shape[:-1])
    weighted = np.zeros((*q.shape[:-1], v.shape[-1]))
    for batch, rows, columns in spans or [(b, slice(0, q.shape[3]), slice(0, k.shape[2])) for b in range(q.shape[0])]:
        shown = visible(rows.stop - rows.start, columns.stop - columns.start, left, right)[:, part]
        columns = slice(columns.start, columns.stop)
        for head, member in np.ndindex(*q.shape[1:3]):
            at = (batch, head, member, rows)
            keys, values = k[batch, head, columns][part], v[batch, head, columns][part]
            with np.errstate(invalid="ignore", over="ignore"):
                scores = q[at] @ keys.T * scale
                if added is not None:
                    scores = scores + np.asarray(added[at][:, columns][:, part], np.float64)
                if softcap:
                    scores = softcap * np.tanh(scores / softcap)
                if mask is not None:
                    scores = scores + np.asarray(mask[at][:, columns][:, part], np.float64)
                hidden = ~shown if allowed is None else ~shown | (np.asarray(allowed[at][:, columns][:, part]) == 0)
                scores = np.where(hidden, -np.inf, scores)
                sink = -np.inf if sinks is None else float(sinks[head, member])
                top[at] = np.maximum(scores.max(axis=1, initial=-np.inf), sink)
                base = np.where(top[at] == -np.inf, 0.0, top[at])
                weights = np.exp(scores - base[:, None])
                total[at] = weights.sum(axis=1) + np.exp(sink - base)
                weighted[at] = weights @ values
    return top, total, weighted


def exact_quotient(top: np.ndarray, total: np.ndarray, weighted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the output and the natural logarithm of the sum of exponentials from `exact_sums`; 0 and -inf for rows
    without keys."""
    with np.errstate(divide="ignore"):
        return weighted / np.where(total == 0, 1.0, total)[..., None], top + np.log(total)


def spans_of(
    sequences: int, queries: int, keys: int, query_starts=None, query_ends=None, key_starts=None, key_ends=None
) -> list:
    """Return the spans of `exact_sums` from a kernel's arguments."""
    spans = []
    for i in range(sequences):
        first, last = (0 if a is None else int(a[i]) for a in (query_starts, key_starts))
        ends = (whole if a is None else int(a[i]) for a, whole in ((query_ends, queries), (key_ends, keys)))
        rows, columns = (slice(start, end) for start, end in zip((first, last), ends))
        spans.append((i if query_starts is None else 0, rows, columns))
    return spans


def attend(
    q, k, v, options: dict, sequences: dict, outputs, lse, parts, headroom: int = 0, added=None, row_shift=None
) -> None:
    """Write what attention kernels write: `outputs` and `lse`, or only `parts`. q, k and v hold the values that are
    multiplied.

    parts: partial, row_max, row_sum and, for kernels that round weights before they sum them, exact_sum. options,
    sequences: the arguments of the kernels by name. headroom: how many steps of log2 row_max lies below the largest
    score rounded up to a whole number; row_max is never below a sink. added: added to scores before a cap, as in
    `exact_sums`. row_shift: the part of `added` that is the same for all scores of a row. Without a cap, row_shift and
    the rest of the score are rounded up separately.
    """
    rest = {name: options[name] for name in ("mask", "allowed")}
    rest |= dict(
        scale=float(options["scale"]),
        softcap=float(options["softcap"]),
        left=int(options["left"]),
        right=int(options["right"]),
    )
    count = next((len(x) for x in sequences.values() if x is not None), len(q))
    rest |= dict(spans=spans_of(count, q.shape[3], k.shape[2], **sequences), added=added)
    if all(buffer is None for buffer in parts):
        out, sums = exact_quotient(*exact_sums(q, k, v, sinks=options["sinks"], **rest))
        _store(out, *outputs)
        _store(sums, lse)
        return
    splits = next(len(x) for x in parts if x is not None)
    run = -(-(-(-k.shape[2] // SPLIT_UNIT)) // splits) * SPLIT_UNIT
    for i in range(splits):
        part, sinks = slice(i * run, (i + 1) * run), options["sinks"] if i == 0 else None
        top, total, weighted = exact_sums(q, k, v, sinks=sinks, part=part, **rest)
        of_scores = exact_sums(q, k, v, part=part, **rest)[0] * LOG2_E
        shift = (
            np.zeros_like(top)
            if row_shift is None or rest["softcap"]
            else np.where(of_scores == -np.inf, 0, row_shift * LOG2_E)
        )
        unit = np.ceil(of_scores - shift) - headroom
        if sinks is not None:
            unit = np.maximum(unit, np.ceil(np.float64(sinks)[..., None] * LOG2_E - shift))
        unit += np.ceil(shift)
        factor = np.exp2(np.where(top == -np.inf, 0.0, top * LOG2_E - np.where(top == -np.inf, 0.0, unit)))
        for buffer, values in zip(parts, (weighted * factor[..., None], unit, total * factor, total * factor)):
            if buffer is not None:
                buffer[i] = values


def visible_flops(*, batch, heads_kv, group, queries, keys, dim, dim_v, sequences, left, right, **others):
    """Return the flops of both products: two for each visible pair and element, padding included; None for packed
    sequences."""
    if sequences != batch:
        return None
    return 2 * batch * heads_kv * group * (dim + dim_v) * visible_pairs(queries, keys, int(left), int(right))


def example_masks(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    """Examples of masks: small numbers, large finite ones, and infinities."""
    return rng.choice(np.array([0, 0.5, -1.25, -3e38, -np.inf], np.float32), shape, p=(0.5, 0.2, 0.2, 0.05, 0.05))


def example_flags(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    return (rng.random(shape) < 0.8).astype(np.uint8)


def example_factors(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    """Examples of global scales."""
    return rng.uniform(0.5, 2, shape).astype(np.float32)


def example_shifts(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    """Examples of what smoothing takes from the scores of rows."""
    return 3 * rng.standard_normal(shape).astype(np.float32)


def _case(
    batch=1, heads_kv=1, group=1, queries=70, keys=130, dim=32, dim_v=None, sequences=None, splits=1, **rest
) -> dict:
    axes = dict(batch=batch, heads_kv=heads_kv, group=group, queries=queries, dim=dim, keys=keys, dim_v=dim_v or dim)
    numbers = dict(scale=dim**-0.5, left=OPEN, right=OPEN)
    return {**axes, "sequences": sequences or batch, "splits": splits, **numbers, **rest}


PACKED = dict(query_starts=True, query_ends=True, key_starts=True, key_ends=True)
_EXAMPLES = dict(
    query_starts=starts_of("queries"),
    query_ends=ends_of("queries"),
    key_starts=starts_of("keys"),
    key_ends=ends_of("keys"),
    mask=example_masks,
    allowed=example_flags,
)
PARTIAL = dict(partial=True, row_max=True, row_sum=True)
_BF16_OUTPUT = Tolerance(
    "weights are rounded to 16 bits before the second product, as is the result",
    relative_l2=3e-3,
    cosine=0.99999,
    gain=1e-3,
)
_OUTPUT = Tolerance(
    "weights are rounded to 16 bits before the second product", relative_l2=2.5e-3, cosine=0.99999, gain=1e-3
)
SUMS = Tolerance(
    "float32 scores and sums, exponents in steps of 2^-17, approximate exponentials and logarithm", absolute=5e-5
)
ROW_SUMS = Tolerance("float32 scores and sums, exponents in steps of 2^-17, approximate exponentials", relative_l2=1e-5)


@kernel(
    grid="splits*heads_kv group*queries batch",
    variants={"dim dim_v": HEAD_DIMS},
    filled=True,
    multiples=dict(dim_v=STORED_COLUMNS),
    halved=True,
    packed=True,
    cases=[
        *(_case(dim=dim, dim_v=dim_v, right=0, out_bf16=True, lse=True) for dim, dim_v in HEAD_DIMS),
        _case(
            dim=24, dim_v=16, batch=2, heads_kv=2, group=3, queries=25, keys=70, out_f32=True, sinks=True, softcap=2.0
        ),
        _case(batch=2, group=2, keys=100, mask=True, out_f16=True, lse=True, left=40, right=7, format="f16"),
        _case(
            group=2,
            keys=100,
            allowed=True,
            key_ends=True,
            out_bf16=True,
            out_f16=True,
            out_f32=True,
            lse=True,
            format="bf16",
        ),
        _case(batch=3, queries=5, keys=150, right=0, key_ends=True, out_f32=True, lse=True, format="bf16"),
        _case(heads_kv=2, group=2, queries=225, keys=240, sequences=3, right=0, **PACKED, out_f32=True, lse=True),
        # more sequences than lanes of a warp, which searches them
        _case(group=4, queries=300, keys=95, sequences=70, **PACKED, out_f32=True, format="bf16"),
        _case(
            heads_kv=2,
            group=2,
            queries=75,
            keys=95,
            sequences=3,
            **PACKED,
            mask=True,
            allowed=True,
            out_f32=True,
            lse=True,
            format="bf16",
        ),
        _case(heads_kv=2, group=4, queries=3, keys=330, splits=3, sinks=True, **PARTIAL),
        _case(queries=1, keys=1, out_bf16=True, lse=True, format="f16"),
        _case(queries=70, keys=200, dim=128, out_f16=True, format="f16"),
        _case(queries=70, keys=330, splits=2, **PARTIAL, format="bf16"),
        # Launches that take whole blocks although half blocks exist: there are more whole blocks than the emulator's
        # one multiprocessor, and half as many as half blocks.
        *(
            _case(dim=dim, dim_v=dim, heads_kv=2, queries=65, keys=100, out_f16=True, format=format)
            for dim in (64, 96, 128)
            for format in ("bf16", "f16")
        ),
        # few rows
        _case(group=2, queries=9, keys=200, out_bf16=True, out_f16=True, out_f32=True, sinks=True, format="bf16"),
        _case(
            group=2,
            queries=9,
            keys=200,
            mask=True,
            allowed=True,
            softcap=2.0,
            left=190,
            right=7,
            out_bf16=True,
            lse=True,
            format="f16",
        ),
        _case(
            heads_kv=2,
            group=2,
            queries=20,
            keys=95,
            sequences=3,
            right=0,
            **PACKED,
            out_f32=True,
            lse=True,
            format="bf16",
        ),
        # all stages are refilled, in half blocks and in whole ones
        *(
            _case(heads_kv=heads, queries=queries, keys=400, out_bf16=True, format="f16")
            for heads, queries in ((1, 5), (2, 65))
        ),
        _case(heads_kv=2, queries=65, keys=40, **PARTIAL, format="f16"),  # less than a tile
    ],
    tolerance=dict(
        out_bf16=_BF16_OUTPUT, out_f16=_OUTPUT, out_f32=_OUTPUT, partial=_OUTPUT, lse=SUMS, row_sum=ROW_SUMS
    ),
    flops=visible_flops,
    draw=_EXAMPLES,
)
def attention_bf16(
    q: In[bf16 | f16, "batch heads_kv group queries dim", strided],
    k: In[bf16 | f16, "batch heads_kv keys dim", strided],
    v: In[bf16 | f16, "batch heads_kv keys dim_v", strided],
    mask: In[f32, "batch heads_kv group queries keys", scattered] = None,
    allowed: In[u8, "batch heads_kv group queries keys", scattered] = None,
    sinks: In[f32, "heads_kv group", unaligned] = None,
    query_starts: In[i32, "sequences", unaligned] = None,
    query_ends: In[i32, "sequences", unaligned] = None,
    key_starts: In[i32, "sequences", unaligned] = None,
    key_ends: In[i32, "sequences", unaligned] = None,
    out_bf16: Out[bf16, "batch heads_kv group queries dim_v", strided] = None,
    out_f16: Out[f16, "batch heads_kv group queries dim_v", strided] = None,
    out_f32: Out[f32, "batch heads_kv group queries dim_v", strided] = None,
    lse: Out[f32, "batch heads_kv group queries"] = None,
    partial: Out[f32, "splits batch heads_kv group queries dim_v"] = None,
    row_max: Out[f32, "splits batch heads_kv group queries"] = None,
    row_sum: Out[f32, "splits batch heads_kv group queries"] = None,
    *,
    scale: Scalar[f32],
    softcap: Scalar[f32] = 0.0,
    left: Scalar[i32],
    right: Scalar[i32],
):
    """Compute softmax(scale Q K^T) V with 16-bit operands; a head of K and V serves a group of heads of Q.

    Sums and softmax are float32. Weights are rounded to the operands' type before the second product.
    softcap: if above 0, scores become softcap tanh(score / softcap). Then the mask is added. A key is hidden by a mask
    of -inf, by a 0 in `allowed`, or by the window: key j of a sequence is visible to its query i if -left <= j - (i +
    keys - queries) <= right. sinks: one logit for each head; its exponential is added to the denominator.
    Sequences: each batch item, or with query_starts and query_ends, runs of rows of a single batch item, one after the
    other. key_ends without the others is the number of keys of each batch item. Rows outside of all sequences are not
    written. `lse` is the natural logarithm of the denominator; rows without keys give 0 and -inf. partial, row_max and
    row_sum replace all other outputs: the keys of each sequence are split into `splits` runs of whole units of 64, and
    each run is summed separately, relative to 2**row_max with a whole row_max. `attention_merge` finishes.
    """
    options = dict(scale=scale, softcap=softcap, left=left, right=right, mask=mask, allowed=allowed, sinks=sinks)
    sequences = dict(query_starts=query_starts, query_ends=query_ends, key_starts=key_starts, key_ends=key_ends)
    attend(q, k, v, options, sequences, (out_bf16, out_f16, out_f32), lse, (partial, row_max, row_sum))


_ADJUSTED = dict(dim=64, heads_kv=2, group=2, k_global=True, out_f32=True, lse=True)


@kernel(
    grid="splits*heads_kv group*queries batch",
    variants={"dim dim_v": ((64, 64), (128, 128), (256, 256))},
    filled=True,
    multiples=dict(dim_v=STORED_COLUMNS),
    packed=True,
    cases=[
        *(_case(**_ADJUSTED | dict(dim=dim), queries=75, keys=100, right=0, format="bf16") for dim in (64, 128, 256)),
        *(_case(**_ADJUSTED, queries=20, keys=100, left=30, format=format) for format in ("bf16", "f16")),
        _case(**_ADJUSTED, batch=2, keys=150, key_ends=True, softcap=2.0, row_shift=True, sinks=True, format="bf16"),
        _case(**_ADJUSTED, queries=150, keys=170, sequences=3, right=0, **PACKED, softcap=2.0, row_shift=True),
        _case(dim=40, dim_v=24, queries=20, softcap=2.0, row_shift=True, out_f16=True, lse=True, format="f16"),
        _case(dim=128, heads_kv=3, queries=20, keys=330, k_global=True, splits=3, **PARTIAL, format="bf16"),
    ],
    tolerance=dict(
        out_bf16=_BF16_OUTPUT, out_f16=_OUTPUT, out_f32=_OUTPUT, partial=_OUTPUT, lse=SUMS, row_sum=ROW_SUMS
    ),
    flops=visible_flops,
    draw=_EXAMPLES | dict(k_global=example_factors, row_shift=example_shifts),
)
def attention_adjusted(
    q: In[bf16 | f16, "batch heads_kv group queries dim", strided],
    k: In[bf16 | f16, "batch heads_kv keys dim", strided],
    v: In[bf16 | f16, "batch heads_kv keys dim_v", strided],
    k_global: In[f32, "heads_kv", unaligned] = None,
    row_shift: In[f32, "batch heads_kv group queries"] = None,
    mask: In[f32, "batch heads_kv group queries keys", scattered] = None,
    allowed: In[u8, "batch heads_kv group queries keys", scattered] = None,
    sinks: In[f32, "heads_kv group", unaligned] = None,
    query_starts: In[i32, "sequences", unaligned] = None,
    query_ends: In[i32, "sequences", unaligned] = None,
    key_starts: In[i32, "sequences", unaligned] = None,
    key_ends: In[i32, "sequences", unaligned] = None,
    out_bf16: Out[bf16, "batch heads_kv group queries dim_v", strided] = None,
    out_f16: Out[f16, "batch heads_kv group queries dim_v", strided] = None,
    out_f32: Out[f32, "batch heads_kv group queries dim_v", strided] = None,
    lse: Out[f32, "batch heads_kv group queries"] = None,
    partial: Out[f32, "splits batch heads_kv group queries dim_v"] = None,
    row_max: Out[f32, "splits batch heads_kv group queries"] = None,
    row_sum: Out[f32, "splits batch heads_kv group queries"] = None,
    *,
    scale: Scalar[f32],
    softcap: Scalar[f32] = 0.0,
    left: Scalar[i32],
    right: Scalar[i32],
):
    """Compute `attention_bf16` with adjusted scores, as caches of keys need them.

    k_global: factors of K, above 0; scale times such a factor is one float32 number. row_shift: added to the scaled
    scores of a row; without a soft cap it changes `lse` and row_max alone, and the shares of sinks. Everything else is
    as in `attention_bf16`.
    """
    if k_global is not None:
        k = np.asarray(k, np.float64) * k_global[:, None, None]
    added = None
    if row_shift is not None:
        added = np.broadcast_to(np.asarray(row_shift, np.float64)[..., None], (*q.shape[:4], k.shape[2]))
    options = dict(scale=scale, softcap=softcap, left=left, right=right, mask=mask, allowed=allowed, sinks=sinks)
    sequences = dict(query_starts=query_starts, query_ends=query_ends, key_starts=key_starts, key_ends=key_ends)
    outputs, parts = (out_bf16, out_f16, out_f32), (partial, row_max, row_sum)
    attend(q, k, v, options, sequences, outputs, lse, parts, added=added, row_shift=row_shift)


def _store(values: np.ndarray, *buffers) -> None:
    for buffer in buffers:
        if buffer is not None:
            buffer[...] = values


def _maxima(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    """Examples of maxima: integers, of seven segments also halves, and -inf for segments without keys."""
    whole = np.where(rng.random(shape) < 0.1, -np.inf, rng.integers(-20, 20, shape)).astype(np.float32)
    return whole if axes["splits"] != 7 else whole + rng.choice(np.float32([0, 0.5]), shape)


def _positive_sums(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    return rng.uniform(1, 100, shape).astype(np.float32)


_EXACT_MERGE = Tolerance("float32 sums of a few terms, approximate exponentials", relative_l2=1e-6)
_ROUNDED_MERGE = Tolerance("the result is rounded", relative_l2=3e-3)


@kernel(
    grid="team*batch*heads*queries*dim_v",
    cases=[
        dict(
            splits=3,
            batch=2,
            heads=3,
            queries=7,
            width=64,
            dim_v=64,
            row_sum=True,
            out_f32=True,
            out_bf16=True,
            out_f16=True,
            lse=True,
        ),
        dict(splits=5, batch=1, heads=2, queries=9, width=24, dim_v=21, out_f32=True, lse=True, natural=1),
        dict(
            splits=1,
            batch=1,
            heads=1,
            queries=40,
            width=16,
            dim_v=12,
            row_sum=True,
            out_f32=True,
            merged_max=True,
            merged_sum=True,
        ),
        dict(
            splits=3,
            batch=1,
            heads=2,
            queries=9,
            width=16,
            dim_v=16,
            row_sum=True,
            exact_sum=True,
            out_f32=True,
            lse=True,
        ),
        dict(
            splits=9,
            batch=1,
            heads=2,
            queries=3,
            width=5,
            dim_v=5,
            row_sum=True,
            exact_sum=True,
            out_bf16=True,
            out_f16=True,
            out_f32=True,
            lse=True,
            merged_max=True,
            merged_sum=True,
        ),
        *(
            dict(
                splits=2,
                batch=1,
                heads=1,
                queries=9,
                width=8,
                dim_v=dim_v,
                exact_sum=True,
                out_f32=True,
                lse=True,
                natural=1,
            )
            for dim_v in (8, 7)
        ),
        dict(splits=19, batch=1, heads=1, queries=3, width=8, dim_v=8, row_sum=True, out_f32=True, lse=True),
        *(
            dict(splits=splits, batch=2, heads=3, queries=3, width=16, dim_v=8, row_sum=True, **more)
            for splits, more in (
                (2, dict(out_bf16=True, complete=1)),
                (7, dict(out_f16=True, complete=1)),
                (7, dict(out_bf16=True)),
                (33, dict(out_bf16=True, complete=1)),
            )
        ),
        dict(
            splits=150,
            batch=1,
            heads=2,
            queries=2,
            width=4,
            dim_v=4,
            row_sum=True,
            sinks=True,
            row_shift=True,
            out_f32=True,
            lse=True,
        ),
        *(
            dict(
                splits=splits,
                batch=2,
                heads=6,
                queries=2,
                width=12,
                heads_kv=2,
                dim_v=9,
                row_sum=True,
                sinks=True,
                **rest,
            )
            for splits, rest in (
                (6, dict(v_global=True, row_shift=True, out_f32=True, merged_max=True, merged_sum=True)),
                (45, dict(v_global=True, out_bf16=True, lse=True)),
            )
        ),
        # Columns four at a time and one by one: maxima that are not whole, units of e in a team, many segments.
        *(
            dict(splits=splits, batch=1, heads=1, queries=3, width=width, dim_v=width, row_sum=True, out_f32=True, **e)
            for width in (8, 5)
            for splits, e in ((7, {}), (9, dict(natural=1)))
        ),
        dict(splits=150, batch=1, heads=1, queries=2, width=5, dim_v=5, row_sum=True, out_f32=True),
    ],
    tolerance=dict(
        out_bf16=_ROUNDED_MERGE,
        out_f16=Tolerance("the result is rounded", relative_l2=4e-4),
        out_f32=_EXACT_MERGE,
        lse=Tolerance("approximate logarithm", relative_l2=1e-6),
        merged_sum=_EXACT_MERGE,
    ),
    derived=dict(
        heads_kv=lambda axes: axes.get("heads_kv") or axes["heads"],
        team=lambda axes: min(1 << (-(-axes["splits"] // 4) - 1).bit_length(), 16),
    ),
    draw=dict(row_max=_maxima, row_sum=_positive_sums, exact_sum=_positive_sums, v_global=_positive_sums),
)
def attention_merge(
    partial: In[f32, "splits batch heads queries width"],
    row_max: In[f32, "splits batch heads queries"],
    row_sum: In[f32, "splits batch heads queries"] = None,
    exact_sum: In[f32, "splits batch heads queries"] = None,
    sinks: In[f32, "heads", unaligned] = None,
    row_shift: In[f32, "batch heads queries"] = None,
    v_global: In[f32, "heads_kv", unaligned] = None,
    out_bf16: Out[bf16, "batch heads queries dim_v", scattered] = None,
    out_f16: Out[f16, "batch heads queries dim_v", scattered] = None,
    out_f32: Out[f32, "batch heads queries dim_v", scattered] = None,
    lse: Out[f32, "batch heads queries"] = None,
    merged_max: Out[f32, "batch heads queries"] = None,
    merged_sum: Out[f32, "batch heads queries"] = None,
    *,
    natural: Scalar[i32, 0, 1] = 0,
    complete: Scalar[i32, 0, 1] = 0,
):
    """Merge attention over up to 4096 segments of the keys, in a fixed order, as a binary tree.

    The denominator of a segment's row is 2**row_max row_sum, with exp(row_max) in place of 2**row_max if `natural`.
    Without `row_sum` it is 2**row_max or exp(row_max), and `partial` is already divided by row_sum. Neighbors (0, 1),
    (2, 3), ... are added relative to the larger of their maxima, then their sums in the same way; subtrees left over at
    the end are added from the smallest on. Segments with a row_max of -inf are skipped, and their partial is not read.
    The first dim_v of the `width` columns are merged. complete: whether partial is written in all segments, so that it
    may be read together with row_max, which takes less time; no result depends on it.
    sinks: one logit for each head; its exponential is added to the denominator. row_shift: what all scores of a row
    lack; sinks count relative to it, and lse and merged_max include it. v_global: factors of the outputs, one for each
    heads / heads_kv heads. lse: the natural logarithm of the denominator, with `exact_sum`, if given, in place of
    row_sum. merged_max: the largest row_max, rounded up to a whole number. merged_sum: the denominator relative to
    2**merged_max; if it is requested, outputs are not divided. Rows whose segments all have a row_max of -inf give 0
    and -inf.
    """
    shift = np.zeros(row_max.shape[1:]) if row_shift is None else row_shift.astype(np.float64)
    unit = 1.0 if natural else math.log(2)
    top = row_max.max(axis=0).astype(np.float64)
    if not natural:
        top = np.ceil(top)
    shift = np.where(top == -np.inf, 0.0, shift)
    if sinks is not None:
        top = np.maximum(top, np.ceil((sinks[:, None] - shift) / unit))
    base = np.where(top == -np.inf, 0.0, top)
    weights = np.exp((row_max.astype(np.float64) - base) * unit)
    joins = np.zeros_like(top) if sinks is None else np.exp(sinks[:, None] - shift - base * unit)
    total = (weights if row_sum is None else weights * row_sum).sum(axis=0) + joins
    exact = total if exact_sum is None else (weights * exact_sum).sum(axis=0) + joins
    counted = np.where(weights[..., None] == 0, 0.0, partial.astype(np.float64))
    merged = np.einsum("s...,s...d->...d", weights, counted)[..., : _width(out_bf16, out_f16, out_f32)]
    if v_global is not None:
        merged = merged * np.repeat(v_global, row_max.shape[2] // len(v_global))[:, None, None]
    whole = np.ceil(shift / unit)
    left = np.exp(shift - whole * unit)  # the fraction of the shift; its whole part goes to merged_max
    divided = merged / np.where(total == 0, 1.0, total)[..., None]
    _store(divided if merged_sum is None else merged * left[..., None], out_bf16, out_f16, out_f32)
    with np.errstate(divide="ignore"):
        _store(top * unit + np.log(exact) + shift, lse)
    _store(top + whole, merged_max)
    _store(total * left, merged_sum)


def _width(*buffers) -> int | None:
    return next((buffer.shape[-1] for buffer in buffers if buffer is not None), None)


def in_mxfp4(x: np.ndarray) -> np.ndarray:
    """Return an array's values after rounding to MXFP4 in blocks along the last axis, padded with zeros to whole
    blocks.
    """
    x = np.asarray(x)
    filled = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % mxfp4.block)])
    return mxfp4.decode(*mxfp4.encode(filled))[..., : x.shape[-1]]


# Compiled head dimensions (of Q and K, of V) of attention that quantizes as it loads. It takes twice as long to compile
# as other attention, so heads of 192 are padded to 256.
IN_KERNEL_DIMS = ((64, 64), (128, 128), (256, 256))


@kernel(
    grid="splits*heads_kv group*queries sequences",
    variants={"dim dim_v": IN_KERNEL_DIMS},
    filled=True,
    multiples=dict(dim_v=STORED_COLUMNS),
    cases=[
        *(_case(dim=dim, dim_v=dim_v, right=0, out_bf16=True, lse=True) for dim, dim_v in IN_KERNEL_DIMS),
        _case(dim=64, queries=20, out_f32=True),
        _case(
            dim=24,
            dim_v=16,
            batch=2,
            heads_kv=2,
            group=3,
            queries=25,
            keys=70,
            out_f32=True,
            sinks=True,
            softcap=2.0,
            format="f32",
        ),
        _case(dim=64, batch=2, group=2, keys=100, mask=True, out_f16=True, lse=True, left=40, right=7, format="f16"),
        _case(
            dim=64,
            group=2,
            keys=100,
            allowed=True,
            key_ends=True,
            out_bf16=True,
            out_f16=True,
            out_f32=True,
            lse=True,
            format="bf16",
        ),
        _case(dim=64, batch=3, queries=5, keys=150, right=0, key_ends=True, out_f32=True, lse=True, format="bf16"),
        _case(
            dim=64,
            heads_kv=2,
            group=2,
            queries=75,
            keys=95,
            sequences=3,
            right=0,
            **PACKED,
            out_f32=True,
            lse=True,
            format="f32",
        ),
        _case(
            dim=64,
            heads_kv=2,
            group=2,
            queries=75,
            keys=95,
            sequences=3,
            **PACKED,
            mask=True,
            allowed=True,
            out_f32=True,
            lse=True,
            format="bf16",
        ),
        _case(dim=64, heads_kv=2, group=4, queries=3, keys=330, splits=3, sinks=True, **PARTIAL, format="f16"),
        _case(dim=64, batch=8, heads_kv=2, queries=1, keys=40, out_bf16=True, lse=True, format="f32"),
        _case(dim=64, queries=1, keys=400, out_bf16=True, format="bf16"),  # all stages are refilled
        _case(dim=20, dim_v=24, queries=5, keys=20, out_f32=True, format="bf16"),  # rows without whole chunks
        _case(dim=256, queries=5, keys=20, out_f16=True, out_f32=True, format="f16"),
    ],
    tolerance=dict(
        out_bf16=_BF16_OUTPUT, out_f16=_OUTPUT, out_f32=_OUTPUT, partial=_OUTPUT, lse=SUMS, row_sum=ROW_SUMS
    ),
    flops=visible_flops,
    draw=_EXAMPLES,
)
def attention_mxfp4_bf16_in_kernel(
    q: In[f32 | f16 | bf16, "batch heads_kv group queries dim", loose],
    k: In[f32 | f16 | bf16, "batch heads_kv keys dim", loose],
    v: In[f32 | f16 | bf16, "batch heads_kv keys dim_v", loose],
    mask: In[f32, "batch heads_kv group queries keys", scattered] = None,
    allowed: In[u8, "batch heads_kv group queries keys", scattered] = None,
    sinks: In[f32, "heads_kv group", unaligned] = None,
    query_starts: In[i32, "sequences", unaligned] = None,
    query_ends: In[i32, "sequences", unaligned] = None,
    key_starts: In[i32, "sequences", unaligned] = None,
    key_ends: In[i32, "sequences", unaligned] = None,
    out_bf16: Out[bf16, "batch heads_kv group queries dim_v", strided] = None,
    out_f16: Out[f16, "batch heads_kv group queries dim_v", strided] = None,
    out_f32: Out[f32, "batch heads_kv group queries dim_v", strided] = None,
    lse: Out[f32, "batch heads_kv group queries"] = None,
    partial: Out[f32, "splits batch heads_kv group queries dim_v"] = None,
    row_max: Out[f32, "splits batch heads_kv group queries"] = None,
    row_sum: Out[f32, "splits batch heads_kv group queries"] = None,
    *,
    scale: Scalar[f32],
    softcap: Scalar[f32] = 0.0,
    left: Scalar[i32],
    right: Scalar[i32],
):
    """Compute softmax(scale Q K^T) V with Q and K in MXFP4, weights and V in bfloat16; the kernel quantizes Q and K and
    rounds V as it loads them.

    Q and K become the bytes that `quantize_mxfp4` gives; V is rounded to nearest, ties to even. All values of a block
    of Q or K with a NaN or an infinity become NaN. Everything else is as in `attention_bf16`. The reference is float64
    attention of the dequantized Q and K and of V rounded to bfloat16.
    """
    options = dict(scale=scale, softcap=softcap, left=left, right=right, mask=mask, allowed=allowed, sinks=sinks)
    sequences = dict(query_starts=query_starts, query_ends=query_ends, key_starts=key_starts, key_ends=key_ends)
    v = np.asarray(v).astype(bf16.dtype)
    attend(
        in_mxfp4(q), in_mxfp4(k), v, options, sequences, (out_bf16, out_f16, out_f32), lse, (partial, row_max, row_sum)
    )
