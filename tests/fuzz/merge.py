"""Calls of `merge` on a few segments, by log-sum-exps and by maxima and sums, with infinities and NaN in these."""

from __future__ import annotations

import random

import numpy as np

from .common import DTYPES, ODD, maybe, shares
from .engine import Kind

SPOILS = ["-np.inf", "-np.inf", "np.nan", "np.inf", "80.0", "-300.0", "3e38", "0.0"]
WRONG = [
    "beside['lses'] = None; beside['row_max'] = None",
    "beside['lses'] = beside['row_sum'] = [x[..., 0] for x in outputs]",
    "beside['lses'] = beside['row_max'] = beside['row_sum'] = [x[..., 0] for x in outputs]",
    "outputs = []",
    "outputs = [*outputs, outputs[0]]",
    "outputs = [x[..., 0] for x in outputs]",
    "outputs = ['a']",
    "outputs = [np.asarray(x).astype(np.float64) if isinstance(x, np.ndarray) else None for x in outputs]",
    "beside[next(iter(beside))] = [np.zeros(99, np.float32)] * len(outputs)",
    "beside[next(iter(beside))] = 'lse'",
    "more['out_dtype'] = np.int32",
    "more['out_dtype'] = 'wide'",
    "more['stream'] = 'default'",
]


def draw(rng: random.Random) -> dict:
    """Draw a recipe of a few segments."""
    rank = rng.choice([0, 1, 2, 2])
    recipe = dict(seed=rng.randrange(2**32), segments=rng.choice([1, 2, 3, 4, 5, 8, 9]), rows=rng.choice([1, 2, 7, 33]))
    recipe |= dict(front=[rng.choice([1, 2, 3]) for _ in range(rank)], cols=rng.choice([1, 2, 5, 8, 32, 33, 64, 100]))
    recipe["dtype"] = rng.choice([*DTYPES])
    maybe(rng, recipe, 0.4, sums=True)
    maybe(rng, recipe, 0.5, spread=rng.choice([0.1, 1.0, 10.0, 100.0]))
    maybe(rng, recipe, 0.4, out_dtype=rng.choice([*DTYPES]))
    maybe(rng, recipe, 0.3, device=True)
    maybe(rng, recipe, 0.3, stacked=True)
    if rng.random() < 0.5:
        recipe["spoils"] = [[rng.randrange(10**6), rng.choice(SPOILS)] for _ in range(rng.choice([1, 2, 8, 40]))]
    kind = shares(rng)
    if kind == "wrong":
        recipe["wrong"] = rng.choice(WRONG)
    elif kind == "odd":
        place = rng.choice(
            [
                "outputs = {}",
                "outputs = [{}, *list(outputs)[1:]]",
                "beside[next(iter(beside))] = {}",
                "more['out_dtype'] = {}",
                "more['stream'] = {}",
            ]
        )
        recipe["odd"] = place.replace("{}", rng.choice(ODD))
    return recipe


def program(recipe: dict) -> str:
    """The call as code."""
    at = recipe.get
    rows = (*recipe["front"], recipe["rows"])
    shape = (recipe["segments"], *rows)
    spread = at("spread", 1.0)
    lines = [f"rng = np.random.default_rng({recipe['seed']})"]
    lines.append(
        f"outputs = rng.standard_normal({(*shape, recipe['cols'])}, dtype=np.float32).astype({DTYPES[recipe['dtype']]})"
    )
    first = "row_max" if at("sums") else "lses"
    lines.append(f"counts = np.float32({spread}) * rng.standard_normal({shape}, dtype=np.float32)")
    lines += ["counts = np.rint(counts)"] if at("sums") else []
    lines += [
        f"counts.flat[{place} % counts.size] = {value}"
        for place, value in at("spoils", ())
        if not at("sums") or value != "np.inf"
    ]
    lines.append(f"beside = dict({first}=counts)")
    lines += [f"beside['row_sum'] = rng.random({shape}, dtype=np.float32) + np.float32(0.5)"] if at("sums") else []
    if at("device"):
        lines.append(
            "outputs, beside = ptxrt.to_device(outputs), {name: ptxrt.to_device(x) for name, x in beside.items()}"
        )
    if not at("stacked"):
        lines.append("outputs, beside = list(outputs), {name: list(x) for name, x in beside.items()}")
    lines.append(f"more = dict(out_dtype={DTYPES[at('out_dtype', 'float32')]})")
    lines += [recipe[name] for name in ("wrong", "odd") if name in recipe]
    lines += ["odd = True"] if "odd" in recipe else []
    return "\n".join([*lines, "out, lse = ptxrt.merge(outputs, **beside, **more)"])


def check(names: dict) -> None:
    """Check that both results equal float64's within rounding."""
    if names.get("odd"):
        return
    outputs = np.float64(_host(names["outputs"]))
    counts = {name: np.float64(_host(x)) for name, x in names["beside"].items()}
    out, lse = names["out"], names["lse"]
    out, lse = (x.to_numpy() if hasattr(x, "to_numpy") else x for x in (out, lse))
    by_sums = "row_sum" in counts
    with np.errstate(all="ignore"):
        exponents = counts["row_max"] * np.log(2) if by_sums else counts["lses"]
        nothing = np.isneginf(exponents)
        top = exponents.max(axis=0)
        weights = np.where(nothing, 0.0, np.exp(exponents - np.where(np.isneginf(top), 0.0, top)))
        total = (weights * (counts["row_sum"] if by_sums else 1.0)).sum(axis=0)
        counted = np.where(nothing[..., None], 0.0, outputs)
        divisor = np.where(total == 0, 1.0, total)[..., None]
        want = (weights[..., None] * counted).sum(axis=0) / divisor
        size = (weights[..., None] * np.abs(counted)).sum(axis=0) / divisor
        want_lse = np.where(np.isneginf(top), -np.inf, top + np.log(total))
    # Exponents are float32 numbers: their rounding error grows with their magnitude.
    steps = np.where(np.isfinite(top), np.abs(top), 0.0) * 2.0**-23
    unit = {"float32": 2.0**-23, "float16": 2.0**-11, "bfloat16": 2.0**-8}[str(out.dtype)]
    bound = (
        (4e-6 + 2 * steps[..., None]) * size
        + 1.01 * unit * np.abs(want)
        + {"float16": 2.0**-25}.get(str(out.dtype), 1e-38)
    )
    _close("out", np.float64(out), want, bound)
    _close("lse", np.float64(lse), want_lse, 1e-5 * np.maximum(1.0, np.abs(want_lse)) + 2 * steps)


def _close(name: str, got, want, bound) -> None:
    with np.errstate(all="ignore"):
        agrees = (got == want) | (np.isnan(got) & np.isnan(want)) | (np.abs(got - want) <= bound)
    assert got.shape == want.shape, f"{name} has shape {got.shape}, not {want.shape}"
    if not agrees.all():
        at = tuple(int(i) for i in np.argwhere(~agrees)[0])
        raise AssertionError(
            f"{name} at {list(at)} is {got[at]:.9g}, wanted {want[at]:.9g} within {bound[at]:.3g}; {(~agrees).sum()} "
            f"of {want.size} are wrong"
        )


def _host(arrays) -> np.ndarray:
    """All segments in one host array."""
    if isinstance(arrays, list):
        return np.stack([_host(x) for x in arrays])
    return arrays.to_numpy() if hasattr(arrays, "to_numpy") else arrays


KIND = Kind("merge", draw, program, check, needed=("segments", "rows", "front", "cols", "dtype"))
