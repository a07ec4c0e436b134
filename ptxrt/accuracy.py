"""Measures of how close a result is to the wanted one, and the tolerances of declarations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import ArgumentError


@dataclass(frozen=True)
class Comparison:
    """Figures of `got` against `want`, in float64. Infinities and NaN that agree are left out of the sums.

    Attributes:
        relative_l2: |got - want| / |want|.
        cosine: Cosine of the angle between them.
        gain: The factor f that minimizes |got - f * want| (least squares); 1 is right.
        worst_error: The largest absolute error.
        worst_index: The index of that element.
        worst_got: The value there.
        worst_want: The wanted value there.
        mismatches: Elements that differ, or are NaN on one side alone.
        size: Elements in all.
    """

    relative_l2: float
    cosine: float
    gain: float
    worst_error: float
    worst_index: tuple[int, ...]
    worst_got: float
    worst_want: float
    mismatches: int
    size: int

    def __str__(self) -> str:
        return (
            f"relative L2 {self.relative_l2:.3e}, cosine {self.cosine:.8f}, gain {self.gain:.6f}, "
            f"worst {self.worst_error:.3e} at {list(self.worst_index)} "
            f"({self.worst_got:.6g}, wanted {self.worst_want:.6g})"
        )


def compare(got: Any, want: Any) -> Comparison:
    """Compare two arrays of one shape; device arrays are downloaded first, quantized ones decoded.

    An element that is NaN or infinite on one side and differs from the other makes relative_l2 and worst_error
    infinite.

    Raises:
        ArgumentError: The shapes differ, or an argument is not an array of numbers.
    """
    got, want = _numbers("got", got), _numbers("want", want)
    if got.shape != want.shape:
        raise ArgumentError(f"compare: got has shape {list(got.shape)}, want {list(want.shape)}; give equal shapes")
    if got.size == 0:
        return Comparison(0.0, 1.0, 1.0, 0.0, (), 0.0, 0.0, 0, 0)
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    finite = np.isfinite(got) & np.isfinite(want)
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.where(same, 0.0, np.where(finite, np.abs(got - want), np.inf))
    worst = np.unravel_index(int(np.argmax(error)), got.shape)
    g, w = np.where(finite, got, 0.0).ravel(), np.where(finite, want, 0.0).ravel()
    # Both are scaled by one power of two, so that squares neither overflow nor vanish.
    _, exponent = np.frexp(max(np.abs(g).max(), np.abs(w).max()))
    g, w = np.ldexp(g, -exponent), np.ldexp(w, -exponent)
    gg, ww, gw = g @ g, w @ w, g @ w
    distance = np.sqrt(np.sum((g - w) ** 2)) if (same | finite).all() else np.inf
    return Comparison(
        relative_l2=float(distance / np.sqrt(ww)) if ww else (0.0 if distance == 0 else float("inf")),
        cosine=float(gw / np.sqrt(gg * ww)) if gg and ww else float(gg == ww),
        gain=float(gw / ww) if ww else float(gg == ww),
        worst_error=float(error[worst]),
        worst_index=tuple(int(i) for i in worst),
        worst_got=float(got[worst]),
        worst_want=float(want[worst]),
        mismatches=int(got.size - np.count_nonzero(same)),
        size=got.size,
    )


def _numbers(name: str, x) -> np.ndarray:
    """Convert an array of any kind, or anything that NumPy converts to one, to float64."""
    if isinstance(x, np.ma.MaskedArray):
        raise ArgumentError(f"compare: {name} is a masked array; pass x.filled(value), or x.data to ignore the mask")
    try:
        host = np.asarray(x.to_numpy() if hasattr(x, "to_numpy") else x)
        if host.dtype.kind in "biufV":
            with np.errstate(over="ignore"):
                return host.astype(np.float64)
    except (TypeError, ValueError, OverflowError):
        pass
    raise ArgumentError(
        f"compare: {name} is a {type(x).__name__} that holds no real numbers; give an array of them"
    ) from None


@dataclass(frozen=True)
class Tolerance:
    """Bounds on the error of a result, and their reason. Every bound that is not None must hold."""

    reason: str
    relative_l2: float | None = None
    cosine: float | None = None
    gain: float | None = None
    absolute: float | None = None

    def misses(self, comparison: Comparison) -> list[str]:
        """Return the bounds that `comparison` breaks, in words; empty if all hold."""
        bounds = [
            (self.relative_l2, comparison.relative_l2, "relative L2"),
            (None if self.cosine is None else 1 - self.cosine, 1 - comparison.cosine, "1 - cosine"),
            (self.gain, abs(comparison.gain - 1), "|gain - 1|"),
            (self.absolute, comparison.worst_error, "worst error"),
        ]
        return [
            f"{name} {value:.3e} > {bound:.3e}"
            for bound, value, name in bounds
            if bound is not None and not value <= bound
        ]

    def __str__(self) -> str:
        parts = [
            ("relative L2 <= ", self.relative_l2),
            ("cosine >= ", self.cosine),
            ("gain 1 +- ", self.gain),
            ("absolute <= ", self.absolute),
        ]
        return ", ".join(f"{name}{value:.10g}" for name, value in parts if value is not None) + f" ({self.reason})"


EXACT = Tolerance("codes, integers and exact conversions", absolute=0.0)
