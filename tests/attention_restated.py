"""The algorithm of the attention kernels restated in NumPy: tiles of keys, an integer running maximum, rounded weights.

A kernel differs from it only in the order of float32 sums and in the last bits of exponentials.
"""

import numpy as np

from ptxrt.formats import bf16, e2m1, e4m3
from ptxrt.ops.attention_kernels import OPEN, visible

TILE = 64
LOG2_E = np.float32(1.4426950408889634)


def restated(q, k, v, dtype, *, scale=None, left=OPEN, right=OPEN, softcap=0.0, mask=None, sinks=None, lengths=None):
    """Output (float32) and lse of q [B, H, Sq, D], k and v [B, Hkv, Sk, D]; mask broadcasts to [B, H, Sq, Sk]."""
    q, k, v = (np.asarray(x).astype(dtype).astype(np.float32) for x in (q, k, v))
    scale = np.float32(q.shape[-1] ** -0.5 if scale is None else scale)
    group = q.shape[1] // k.shape[1]
    out, lse = np.zeros((*q.shape[:-1], v.shape[-1]), np.float32), np.full(q.shape[:-1], -np.inf, np.float32)
    mask = None if mask is None else np.broadcast_to(mask, (*q.shape[:-1], k.shape[2]))
    for batch, head in np.ndindex(*q.shape[:2]):
        keys = k.shape[2] if lengths is None else int(lengths[batch])
        rows = q[batch, head]
        shown = visible(len(rows), keys, left, right)
        top, total = np.full(len(rows), -np.inf, np.float32), np.zeros(len(rows), np.float32)
        values = np.zeros((len(rows), v.shape[-1]), np.float32)
        for first in range(0, keys, TILE):
            tile = slice(first, min(first + TILE, keys))
            scores = rows @ k[batch, head // group, tile].T * scale
            if softcap:
                scores = np.float32(softcap) * np.tanh(scores / np.float32(softcap))
            if mask is not None:
                added = mask[batch, head, :, tile]
                scores = (
                    np.where(added, scores, np.float32(-np.inf))
                    if mask.dtype == bool
                    else scores + added.astype(np.float32)
                )
            with np.errstate(over="ignore"):  # a large finite mask stays finite: if all keys have it, V is averaged
                scores = np.where(scores == -np.inf, scores, np.maximum(scores * LOG2_E, np.finfo(np.float32).min))
            scores = np.where(shown[:, tile], scores, np.float32(-np.inf))
            new_top = np.maximum(top, np.ceil(scores.max(axis=1)))
            top, total, values = rescaled(top, new_top, total, values)
            base = np.where(top == -np.inf, np.float32(0), top)
            weights = np.exp2(scores - base[:, None])
            total += weights.sum(axis=1, dtype=np.float32)
            values += weights.astype(dtype).astype(np.float32) @ v[batch, head // group, tile]
        if sinks is not None:
            sink = np.float32(sinks[head]) * LOG2_E
            top, total, values = rescaled(top, np.maximum(top, np.ceil(sink)), total, values)
            total += np.exp2(sink - top)
        seen = total > 0
        out[batch, head][seen] = values[seen] / total[seen, None]
        with np.errstate(divide="ignore"):
            lse[batch, head] = (top + np.log2(total)) * np.float32(np.log(2))
    return out, lse


def rescaled(top, new_top, total, values):
    """Rescale sums to a new maximum. The factor is a power of two, so this is exact."""
    with np.errstate(invalid="ignore", over="ignore"):
        factor = np.exp2(np.where(top == new_top, 0, top - new_top)).astype(np.float32)
    return new_top, total * factor, values * factor[:, None]


def in_e4m3(weights):
    """Weights rounded to e4m3 without a scale; they are at most 2^8, and e4m3 ends at 448."""
    return e4m3.values[e4m3.encode(weights)]


def in_mxfp4(weights):
    """Weights rounded to e2m1: 32 neighboring keys share the smallest power of two >= 2^-40 with which none
    saturates."""
    blocks = weights.reshape(*weights.shape[:-1], -1, 32)
    with np.errstate(divide="ignore"):
        exponent = np.maximum(np.ceil(np.log2(blocks.max(axis=-1, keepdims=True) / 6)), -40)
    scale = np.exp2(exponent).astype(np.float32)
    return (e2m1.values[e2m1.encode(blocks / scale)] * scale).reshape(weights.shape)


def in_nvfp4(weights):
    """Weights rounded to e2m1 under max(largest / 6, 2^-40) of 16 neighboring keys, times that scale rounded to
    e4m3."""
    blocks = weights.reshape(*weights.shape[:-1], -1, 16)
    scale = np.maximum(blocks.max(axis=-1, keepdims=True) / np.float32(6), np.float32(2.0**-40))
    return (e2m1.values[e2m1.encode(blocks / scale)] * e4m3.values[e4m3.encode(scale)]).reshape(weights.shape)


def in_bf16(weights):
    return weights.astype(bf16.dtype).astype(np.float32)


# V's format -> (rounding of weights, headroom: how far scores may exceed the running maximum, depth: how far a raised
# maximum lies below the largest score), in units of log2.
WEIGHTS = {"mxfp8": (in_e4m3, 8, 7), "mxfp4": (in_mxfp4, 8, 0), "nvfp4": (in_nvfp4, 11, 9), "bf16": (in_bf16, 0, 0)}


def restated_blocks(q, k, v, pv, *, causal=False, window=None, softcap=0.0, sinks=None, shift=None):
    """Output and lse (float32) of operands in block formats, by their values: q [B, H, Sq, D], k and v [B, Hkv, Sk, D].

    shift: [B, H, Sq], what smoothing subtracts from all scores of a row. Weights are computed from scores without it,
    unless there is a softcap.
    """
    rounded_weights, headroom, depth = WEIGHTS[pv]
    left, right = window or (OPEN, 0 if causal else OPEN)
    scale = np.float32(q.shape[-1] ** -0.5)
    group = q.shape[1] // k.shape[1]
    out, lse = np.zeros((*q.shape[:-1], v.shape[-1]), np.float32), np.full(q.shape[:-1], -np.inf, np.float32)
    shown = visible(q.shape[2], k.shape[2], left, right)
    for batch, head in np.ndindex(*q.shape[:2]):
        rows = q[batch, head]
        base_score = (
            np.zeros(len(rows), np.float32) if shift is None or softcap else np.float32(shift[batch, head]) * LOG2_E
        )
        top, total, exact = (
            np.full(len(rows), -np.inf, np.float32),
            np.zeros(len(rows), np.float32),
            np.zeros(len(rows), np.float32),
        )
        values = np.zeros((len(rows), v.shape[-1]), np.float32)
        for first in range(0, k.shape[2], TILE):
            tile = slice(first, min(first + TILE, k.shape[2]))
            scores = np.full((len(rows), TILE), -np.inf, np.float32)
            found = rows @ k[batch, head // group, tile].T * scale
            if softcap:
                found = np.float32(softcap) * np.tanh(found / np.float32(softcap))
            scores[:, : found.shape[1]] = np.where(
                shown[:, tile], found * LOG2_E - base_score[:, None], np.float32(-np.inf)
            )
            largest = scores.max(axis=1)
            new_top = np.where(largest > top + np.float32(headroom), np.ceil(largest) - np.float32(depth), top)
            top, total, both = rescaled(top, new_top, total, np.concatenate([values, exact[:, None]], axis=1))
            values, exact = both[:, :-1], both[:, -1]
            base = np.where(top == -np.inf, np.float32(0), top)
            weights = np.exp2(scores - base[:, None])
            exact = exact + weights.sum(axis=1, dtype=np.float32)
            weights = rounded_weights(weights)
            total = total + weights.sum(axis=1, dtype=np.float32)
            values = values + weights[:, : found.shape[1]] @ v[batch, head // group, tile]
        if sinks is not None:
            sink = np.float32(sinks[head]) * LOG2_E - base_score
            top, total, both = rescaled(
                top, np.maximum(top, np.ceil(sink)), total, np.concatenate([values, exact[:, None]], axis=1)
            )
            share = np.exp2(sink - top)
            total, values, exact = total + share, both[:, :-1], both[:, -1] + share
        seen, divisor = total > 0, exact if pv == "bf16" else total
        out[batch, head][seen] = values[seen] / divisor[seen, None]
        with np.errstate(divide="ignore"):
            lse[batch, head] = (top + np.log2(exact) + base_score) * np.float32(np.log(2))
    return out, lse
