"""Attention in float64, written from its definition alone, and how far a result may be from it.

A bound is of each element, from how the kernels round (docs/numerics.md); it holds for every input, not only on
average.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Weights:
    """What rounding costs weights of a format at most.

    share: relative to the weight itself, half a unit in the last place. largest: relative to the largest of `run`
    neighboring keys. floor: in units of 2^m, where codes or scales are subnormal; m lies `headroom` below the largest
    score. divides: whether the sum that outputs are divided by is of rounded weights, too.
    """

    share: float
    largest: float = 0.0
    run: int = 1
    floor: float = 0.0
    headroom: int = 0
    divides: bool = True


# e2m1 rounds by half of its widest step, 2 of 6, under a scale with which the largest weight of a block is at least 3
# (mxfp4), or 6 by a scale that is rounded to ue4m3, by up to 1 / 16 (nvfp4).
WEIGHTS = {
    "bf16": Weights(2.0**-8, divides=False),
    "f16": Weights(2.0**-11, floor=2.0**-25, divides=False),
    "mxfp8": Weights(2.0**-4, floor=2.0**-10, headroom=8),
    "mxfp4": Weights(0.0, 1 / 3, 32, 2.0**-41),
    "nvfp4": Weights(2.0**-4, 1 / 6, 16, 6 * 2.0**-10, 11),
}
# Half a unit in the last place of results, and their largest value.
OUTPUTS = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
LARGEST = {"float32": 3.4028234e38, "float16": 65504.0, "bfloat16": 3.3895314e38}
# Scores below this count as this: the end of float32 in units of log2.
LOWEST = float(np.float32(-3.4028234663852886e38) * np.float32(np.log(2)))
LN2 = float(np.log(2))


@dataclass
class Exact:
    """Attention of [B, H] by rows, in float64: output, lse, how far each may be off, and where NaN is in order.

    out, bound, likely: [B, H, Sq, Dv], likely is the deviation that independent errors of weights add up to; lse,
    lse_bound: [B, H, Sq]. nan: rows that must be NaN. either: rows whose values depend on what is not stated.
    column_nan, column_either: elements of which an infinity or a NaN in V makes no number, or may.
    """

    out: np.ndarray
    bound: np.ndarray
    likely: np.ndarray
    lse: np.ndarray
    lse_bound: np.ndarray
    nan: np.ndarray
    either: np.ndarray
    column_nan: np.ndarray
    column_either: np.ndarray


def attention(
    scores, sizes, reach, v, *, pv, out_dtype, softcap=0.0, mask=None, sinks=None, shown, spans, shift=0.0
) -> Exact:
    """Attention from scores [B, H, Sq, Sk], float64, before the cap, and values [B, H, Sk, Dv], heads repeated.

    sizes: the sums of magnitudes that the scores were summed from, times 2^-24 what each of their roundings costs.
    reach: the same before the scale, whose products kernels keep in float32. mask broadcasts. shift: [B, H, Sq], the
    size of what smoothing takes from all scores of a row, beside which sinks and results are rounded. shown: bool [B,
    H, Sq, Sk], keys that sequences and windows let a row see. spans: first and last key of each sequence in its batch,
    in which blocks of keys are counted.
    """
    rounds = WEIGHTS[pv]
    with np.errstate(all="ignore"):
        error = sizes * 2.0**-24 * 16 + np.abs(scores) * 2.0**-22
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
            error = np.minimum(error + np.abs(scores) * 2.0**-20 + softcap * 2.0**-21, 2 * softcap)
        hidden = ~shown
        beyond = shown & ((sizes > 1e38) | (reach > 1e38))  # products that may be infinite in float32
        if mask is not None and mask.dtype == bool:
            hidden = hidden | ~mask
        elif mask is not None:
            mask = np.broadcast_to(np.asarray(mask, np.float64), scores.shape)
            # A score that is no number, or no float32, under a mask of -inf: both readings are fair.
            doubtful = (mask == -np.inf) & (beyond | ~(scores < np.inf)) & shown
            error = error + (np.abs(scores) + np.abs(mask)) * 2.0**-22
            scores = scores + mask
        doubtful = np.zeros_like(shown) if mask is None or mask.dtype == bool else doubtful
        overflows = ~hidden & beyond & np.isfinite(scores)
        scores = np.where(hidden, -np.inf, np.where(scores == -np.inf, scores, np.maximum(scores, LOWEST)))
        sink = (
            np.full(scores.shape[:-1], -np.inf)
            if sinks is None
            else np.broadcast_to(np.asarray(sinks, np.float64)[:, None], scores.shape[:-1])
        )
        top = np.maximum(scores.max(axis=-1, initial=-np.inf), sink)
        base = np.where(np.isneginf(top), 0.0, top)
        weights = np.where(np.isneginf(scores), 0.0, np.exp(scores - base[..., None]))
        total = weights.sum(axis=-1) + np.exp(sink - base)
        lse = np.where(np.isneginf(top), -np.inf, top + np.log(total))

        finite_v = np.where(np.isfinite(v), v, 0.0)
        divisor = np.where(total == 0, 1.0, total)[..., None]
        out = weights @ finite_v / divisor
        magnitude = weights @ np.abs(finite_v) / divisor
        largest = _largest_of_runs(weights, spans, rounds.run) if rounds.largest else 0.0
        seen_error = np.where(hidden | ~np.isfinite(scores) | ~np.isfinite(error), 0.0, error) * (weights > 2.0**-60)
        sizes_of_row = np.abs(np.where(np.isfinite(base), base, 0.0)) + np.where(np.isfinite(shift), shift, 0.0)
        worst = seen_error.max(axis=-1, initial=0.0) + sizes_of_row * 2.0**-22
        factor = np.expm1(np.minimum(2 * worst + 2.0**-16, 50.0))[..., None]
        unit_of_floor = np.maximum(2.0**-rounds.headroom, 2 * np.exp(np.minimum(sink - base, 0.0)))[..., None]
        costs = (
            weights * rounds.share
            + largest * rounds.largest
            + (2.0**-44 + rounds.floor * unit_of_floor) * (shown & ~hidden)
        )
        of_divisor = costs.sum(axis=-1, keepdims=True) / divisor * np.abs(out) if rounds.divides else 0.0
        plain = factor * magnitude + (OUTPUTS[out_dtype] + 2.0**-22) * np.abs(out)
        smallest = {"float16": 2.0**-25, "bfloat16": 1e-38, "float32": 1e-38}[out_dtype]
        bound = 1.1 * (costs @ np.abs(finite_v) / divisor + of_divisor + plain) + smallest
        likely = np.sqrt((costs * costs) @ (finite_v * finite_v)) / divisor + of_divisor + plain + smallest
        lse_bound = 1e-4 * np.maximum(1.0, np.abs(lse)) + 2 * worst

    nan_score = np.isnan(scores) | np.isposinf(scores)
    nan = np.isnan(np.where(doubtful, 0.0, np.where(np.isposinf(scores), np.nan, scores))).any(axis=-1) | np.isnan(sink)
    either = (
        doubtful.any(axis=-1)
        | overflows.any(axis=-1)
        | (worst > 1.0)
        | np.isposinf(sink)
        | (np.abs(np.where(np.isfinite(sink), sink, 0)) > 2.3e38)
    )
    either |= (nan_score & overflows).any(axis=-1) | ~np.isfinite(shift)
    seen = ~np.isneginf(np.where(np.isnan(scores), 0.0, scores))
    poison = ~np.isfinite(v)
    column_nan = (seen.astype(np.float64) @ poison.astype(np.float64)) > 0
    # Sums of weights times V overflow before they are divided (docs/numerics.md, Edges).
    with np.errstate(all="ignore"):
        beyond_float32 = (
            np.abs(np.where(np.isfinite(v), v, 0.0)).sum(axis=-2, keepdims=True) * 2.0 ** (rounds.headroom + 1)
        ) > 3e38
    column_either = np.broadcast_to(poison.any(axis=-2, keepdims=True), out.shape) & ~column_nan
    column_either = column_either | (np.broadcast_to(beyond_float32, out.shape) & ~column_nan)
    return Exact(out, bound, likely, lse, lse_bound, nan, either, column_nan, column_either)


def _largest_of_runs(weights: np.ndarray, spans, run: int) -> np.ndarray:
    """By key the largest weight of the run that it belongs to; runs begin with each sequence."""
    largest = np.zeros_like(weights)
    for batch, first, last in spans:
        for start in range(first, last, run):
            part = (batch, ..., slice(start, min(start + run, last)))
            largest[part] = weights[part].max(axis=-1, keepdims=True)
    return largest


def compare(exact: Exact, out, lse=None, out_dtype="float32") -> None:
    """AssertionError that shows the worst element where a result is not within the bounds."""
    got = np.asarray(out).astype(np.float64)
    assert got.shape == exact.out.shape, f"shape {got.shape}, not {exact.out.shape}"
    free = exact.either[..., None] | exact.column_either
    must_nan = exact.nan[..., None] & ~exact.either[..., None]
    _first("output where NaN is due", must_nan & ~np.isnan(got), got, exact.out)
    spoiled = exact.column_nan & ~free & ~must_nan
    _first("output where V is no number", spoiled & np.isfinite(got), got, exact.out)
    plain = ~(free | exact.nan[..., None] | exact.column_nan)
    with np.errstate(all="ignore"):
        too_large = np.abs(exact.out) + exact.bound >= LARGEST[out_dtype]
        wrong = plain & ~too_large & ~(np.abs(got - exact.out) <= exact.bound)
    _first("output", wrong, got, exact.out, exact.bound)
    usual = plain & ~too_large
    if usual.sum() >= 256:
        off, likely = (np.sqrt(np.mean(np.square(x[usual]))) for x in (got - exact.out, exact.likely))
        assert off <= likely, (
            f"the outputs are {off:.3g} off in the mean square, {likely:.3g} is the most that rounding explains"
        )
    if lse is None:
        return
    lse = np.asarray(lse).astype(np.float64)
    assert lse.shape == exact.lse.shape, f"lse has shape {lse.shape}, not {exact.lse.shape}"
    _first("lse where NaN is due", exact.nan & ~exact.either & ~np.isnan(lse), lse, exact.lse)
    with np.errstate(all="ignore"):
        agrees = (lse == exact.lse) | (np.abs(lse - exact.lse) <= exact.lse_bound)
    _first("lse", ~exact.nan & ~exact.either & ~agrees, lse, exact.lse, exact.lse_bound)


def _first(what: str, wrong: np.ndarray, got, want, bound=None) -> None:
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        near = "" if bound is None else f" within {bound[at]:.3g}"
        raise AssertionError(
            f"{what} at {list(at)} is {got[at]:.9g}, wanted {want[at]:.9g}{near}; {int(wrong.sum())} of "
            f"{wrong.size} are wrong"
        )
