"""Attention in float64, written from its definition alone, and bounds on the deviation of a result.

Each element has its own bound, derived from how the kernels round (docs/numerics.md). The bounds hold for every input,
not only on average.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Weights:
    """Bounds on the rounding error of a weight in a format.

    share: relative to the weight itself, half a unit in the last place. largest: relative to the largest of `run`
    neighboring keys. floor: in units of 2^m, where codes or scales are subnormal; m lies at least `depth` below the
    largest score, one less than in docs/numerics.md, because m is a whole number, and at most `headroom`. divides:
    whether outputs are divided by the sum of rounded weights.
    """

    share: float
    largest: float = 0.0
    run: int = 1
    floor: float = 0.0
    depth: int = 0
    headroom: int = 0
    divides: bool = True


# e2m1 rounds by at most half of its widest step, 2 of 6. Under mxfp4's scale the largest weight of a block is at least
# 3; under nvfp4's it is 6, with the scale rounded to ue4m3, an error of up to 1 / 16. Small weights in float16 are
# multiples of 2^-24; they are relative to a power of two that is up to twice the largest weight.
WEIGHTS = {
    "bf16": Weights(2.0**-8, divides=False),
    "f16": Weights(2.0**-11, floor=2.0**-24, divides=False),
    "mxfp8": Weights(2.0**-4, floor=2.0**-10, depth=6, headroom=8),
    "mxfp4": Weights(0.0, 1 / 3, 32, 2.0**-41, depth=-1, headroom=8),
    "nvfp4": Weights(2.0**-4, 1 / 6, 16, 6 * 2.0**-10, depth=8, headroom=11),
}
# Half a unit in the last place of results, relative; and their largest value.
OUTPUTS = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
LARGEST = {"float32": 3.4028234e38, "float16": 65504.0, "bfloat16": 3.3895314e38}
# Lower scores are clamped to this: the end of float32 in units of log2.
LOWEST = float(np.float32(-3.4028234663852886e38) * np.float32(np.log(2)))
LN2 = float(np.log(2))
# Rows whose largest score, without the mask, is beyond this may be zeros, infinite or NaN (docs/numerics.md, Edges).
STEEPEST = 2.0**31 * LN2


@dataclass
class Exact:
    """Attention of [B, H] by rows, in float64: output, lse, bounds on the deviation of each, and where NaN is expected.

    out, bound, likely: [B, H, Sq, Dv]; likely is the deviation if the errors of weights are independent. lse,
    lse_bound: [B, H, Sq]. nan: rows that must be NaN. either: rows whose values are unspecified. column_nan: elements
    that an infinity or a NaN in V makes non-finite. column_either: elements that it may make so.
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

    sizes: for each score the sum of the magnitudes of its terms; times 2^-24 it is the error of one rounding. reach:
    the same before scaling; kernels keep those products in float32. mask broadcasts. shift: [B, H, Sq], the magnitude
    of what smoothing subtracts from all scores of a row; it adds to the rounding error of sinks and results. shown:
    bool [B, H, Sq, Sk], the keys that sequences and windows let a row see. spans: (batch, first key, end) of each
    sequence; blocks of keys start at the first.
    """
    rounds = WEIGHTS[pv]
    with np.errstate(all="ignore"):
        error = sizes * 2.0**-24 * 16 + np.abs(scores) * 2.0**-22
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
            error = np.minimum(error + np.abs(scores) * 2.0**-20 + softcap * 2.0**-21, 2 * softcap)
        hidden = ~shown
        unmasked = scores
        beyond = shown & ((sizes > 1e38) | (reach > 1e38))  # products that may overflow float32
        if mask is not None and mask.dtype == bool:
            hidden = hidden | ~mask
        elif mask is not None:
            mask = np.broadcast_to(np.asarray(mask, np.float64), scores.shape)
            # A score that is NaN, infinite or beyond float32 under a mask of -inf may give NaN or a hidden key: both
            # are right.
            doubtful = (mask == -np.inf) & (beyond | ~(scores < np.inf)) & shown
            error = error + (np.abs(scores) + np.abs(mask)) * 2.0**-22
            scores = scores + mask
        doubtful = np.zeros_like(shown) if mask is None or mask.dtype == bool else doubtful
        overflows = ~hidden & beyond & np.isfinite(scores)
        most = np.where(hidden | (scores == -np.inf), -np.inf, unmasked).max(axis=-1, initial=-np.inf)
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
        unit_of_floor = np.maximum(2.0**-rounds.depth, 2 * np.exp(np.minimum(sink - base, 0.0)))[..., None]
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
        | (np.isfinite(most) & (np.abs(most) > STEEPEST))
        | np.isposinf(sink)
        | (np.abs(np.where(np.isfinite(sink), sink, 0)) > 2.3e38)
    )
    either |= (nan_score & overflows).any(axis=-1) | ~np.isfinite(shift)
    seen = ~np.isneginf(np.where(np.isnan(scores), 0.0, scores))
    poison = ~np.isfinite(v)
    column_nan = (seen.astype(np.float64) @ poison.astype(np.float64)) > 0
    # Sums of weights times V may overflow before the division (docs/numerics.md, Edges).
    with np.errstate(all="ignore"):
        beyond_float32 = (
            np.abs(np.where(np.isfinite(v), v, 0.0)).sum(axis=-2, keepdims=True) * 2.0 ** (rounds.headroom + 1)
        ) > 3e38
    column_either = np.broadcast_to(poison.any(axis=-2, keepdims=True), out.shape) & ~column_nan
    column_either = column_either | (np.broadcast_to(beyond_float32, out.shape) & ~column_nan)
    return Exact(out, bound, likely, lse, lse_bound, nan, either, column_nan, column_either)


def _largest_of_runs(weights: np.ndarray, spans, run: int) -> np.ndarray:
    """For each key the largest weight of its run of keys; runs start at each sequence's first key."""
    largest = np.zeros_like(weights)
    for batch, first, last in spans:
        for start in range(first, last, run):
            part = (batch, ..., slice(start, min(start + run, last)))
            largest[part] = weights[part].max(axis=-1, keepdims=True)
    return largest


def compare(exact: Exact, out, lse=None, out_dtype="float32") -> None:
    """Raise AssertionError with the first element that is outside the bounds."""
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
