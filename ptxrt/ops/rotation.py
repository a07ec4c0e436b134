"""Tables of the angles by which rotary position embeddings turn pairs of values."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Mapping

import numpy as np

from ..errors import ArgumentError

if TYPE_CHECKING:
    from ..typing import HostArray, Number

_YARN = dict(factor=None, length=None, beta_fast=32.0, beta_slow=1.0, truncate=True, magnitude=False)


def rope_table(
    dim: int, length: int, base: Number = 10000.0, *, yarn: Mapping[str, Any] | None = None
) -> HostArray:
    """Tabulate rotary embeddings: float32 [length, dim], of each position dim / 2 cosines, then as many sines.

    Pair i of position p is turned by p base^(-2 i / dim). dim: of the values that are rotated, even. All is worked out
    in float64 and rounded once.
    yarn: None, or a mapping of `factor`, by which the context grows, and `length`, the context before; and, where they
    are others, beta_fast=32, beta_slow=1, truncate=True, magnitude=False. Angles of pairs that turn less than
    beta_slow times in the old context are divided by the factor, those that turn more than beta_fast times are not, and
    those between are mixed; the bounds are whole pairs, rounded outwards, where `truncate` (gpt-oss: False). magnitude:
    what multiplies cosines and sines, True for 0.1 ln(factor) + 1.
    ArgumentError for sizes and numbers that fit no table. Source: Su et al., RoFormer; Peng et al., YaRN.
    """
    dim, length = _whole("dim", dim, 2), _whole("length", length, 0)
    if dim % 2:
        raise ArgumentError(f"rope_table: dim is {dim}; pairs of values are rotated: pass an even one")
    base = _positive("base", base)
    if base <= 1:
        raise ArgumentError(f"rope_table: base is {base!r}; pass a number above 1")
    pairs = np.arange(dim // 2, dtype=np.float64)
    angles = base ** (-2 * pairs / dim)
    magnitude = 1.0
    if yarn is not None:
        options = _yarn_options(yarn)
        low, high = (
            dim * math.log(options["length"] / (options[key] * 2 * math.pi)) / (2 * math.log(base))
            for key in ("beta_fast", "beta_slow")
        )
        if options["truncate"]:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        share = np.clip((pairs - low) / max(high - low, 1e-3), 0, 1)   # of the angle that is divided
        angles = angles / options["factor"] * share + angles * (1 - share)
        magnitude = options["magnitude"]
    turned = np.arange(length, dtype=np.float64)[:, None] * angles
    return (magnitude * np.concatenate([np.cos(turned), np.sin(turned)], axis=1)).astype(np.float32)


def _yarn_options(yarn) -> dict[str, Any]:
    """The numbers of YaRN, checked."""
    known = ", ".join(_YARN)
    if not isinstance(yarn, Mapping) or not yarn.keys() <= _YARN.keys() or not {"factor", "length"} <= yarn.keys():
        raise ArgumentError(f"rope_table: yarn is {yarn!r}; pass a mapping with factor and length, of {known}")
    options: dict[str, Any] = {**_YARN, **yarn}
    for key in ("factor", "length", "beta_fast", "beta_slow"):
        options[key] = _positive(f"{key} of yarn", options[key])
    if not isinstance(options["truncate"], (bool, np.bool_)):
        raise ArgumentError(f"rope_table: truncate of yarn is {options['truncate']!r}; pass True or False")
    asked = options["magnitude"]
    if isinstance(asked, (bool, np.bool_)):
        options["magnitude"] = 0.1 * math.log(options["factor"]) + 1 if asked else 1.0
    else:
        options["magnitude"] = _positive("magnitude of yarn", asked)
    return options


def _whole(name: str, value, least: int) -> int:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < least:
        raise ArgumentError(f"rope_table: {name} is {value!r}; pass a whole number from {least} on")
    return int(value)


def _positive(name: str, value) -> float:
    number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        raise ArgumentError(f"rope_table: {name} is {value!r}; pass a positive number")
    return float(value)
