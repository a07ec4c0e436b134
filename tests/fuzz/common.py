"""Shared by several kinds of calls: formats, values that no parameter accepts, random array contents."""

from __future__ import annotations

import random

import numpy as np

# As code, so that printed programs show them.
ODD = [
    "None",
    "True",
    "0",
    "-1",
    "2**70",
    "1.5",
    "np.nan",
    "'text'",
    "b'b'",
    "()",
    "[]",
    "{}",
    "[1, [2]]",
    "object()",
    "type",
    "1j",
    "range(3)",
]
ODD += [
    "np.array(['a'])",
    "np.array([None])",
    "np.float64(2)",
    "np.zeros((2, 2))",
    "np.ma.masked_array([1.0], [True])",
    "np.zeros(0)",
]
ODD += [
    "np.zeros((2, 64), '>f4')",
    "np.zeros(3, [('a', 'f4')])",
    "np.zeros((2, 64), complex)",
    "slice(3)",
    "'mxfp4'",
    "np.str_('linear')",
]
SPOILS = ["np.nan", "np.inf", "-np.inf", "3e38", "-3e38", "1e-40", "65504", "0.0", "-0.0", "2.0**-127", "6.0", "1.0"]
DTYPES = {"float32": "np.float32", "float16": "np.float16", "bfloat16": "ml_dtypes.bfloat16"}


def shares(rng: random.Random, wrong: float = 0.2, odd: float = 0.1) -> str:
    """Choose whether a call is "right", "wrong", or "odd"."""
    return rng.choices(["right", "wrong", "odd"], [1 - wrong - odd, wrong, odd])[0]


def maybe(rng: random.Random, recipe: dict, chance: float, **values) -> None:
    """Add values to a recipe with a probability of `chance`."""
    if rng.random() < chance:
        recipe.update(values)


def values_of(recipe: dict, name: str, shape: tuple[int, ...], dtype: str) -> list[str]:
    """Code that makes an array of normal numbers, with magnitudes over the recipe's `spread` and its `spoils` at single
    places."""
    lines = [f"{name} = rng.standard_normal({shape}, dtype=np.float32)"]
    if "spread" in recipe:
        low, high = recipe["spread"]
        lines.append(f"{name} = {name} * np.exp2(rng.integers({low}, {high + 1}, {name}.shape).astype(np.float32))")
    lines.append(f"{name} = np.asarray({name}).astype({DTYPES[dtype]})")
    for place, value in recipe.get("spoils", ()):
        lines += [f"{name}.flat[{place} % {name}.size] = {value}"] if 0 not in shape else []
    return lines


def draw_values(rng: random.Random, recipe: dict) -> None:
    """Draw the values of a recipe that `values_of` reads."""
    maybe(
        rng,
        recipe,
        0.3,
        spread=sorted(rng.randrange(-150, 120) if rng.random() < 0.5 else rng.randrange(-8, 8) for _ in range(2)),
    )
    count = rng.choice([0, 0, 1, 3])
    if count:
        recipe["spoils"] = [[rng.randrange(10**6), rng.choice(SPOILS)] for _ in range(count)]


def host_of(x) -> np.ndarray:
    """An array of any machine as a NumPy array."""
    return x.to_numpy() if hasattr(x, "to_numpy") else np.asarray(x)
