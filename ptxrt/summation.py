"""Candidate rules by which a matrix instruction may add, and a filter for those that agree with a machine's results.

An instruction adds K exact products and C. Machines differ in how many products they add at once, to which exponent
they align them, how many bits they keep, and where they round. `candidates` lists all combinations of the behaviors
known of tensor cores and of similar ones; `agreeing` keeps those that reproduce every result to the bit. The candidates
do not depend on the machine.

Source of the known ones: MMA-Sim (arXiv 2511.10909), "Recovering single precision accuracy from tensor cores" (arXiv
2203.03341), FTTN (arXiv 2403.00232).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from . import formats
from .atlas import Kind

#: Fractional bits that candidates keep below the largest exponent. The last number stands for all bits, because no
#: operands have more.
BITS = (*range(10, 29), 35, 44)
_SCREENS = (24, 400, 1 << 30)  # numbers of results to compare, in stages: few results exclude most candidates
_NOTHING = -4000  # the exponent of a product that is zero


@dataclass(frozen=True)
class Terms:
    """The terms of n sums, float64: products [n, K] without scales, their scales [n, K] (None without), C [n].

    fields: exponents [n, K] of the products: the sum of the exponents that their factors and scales store, where a
    subnormal factor has the smallest exponent. factors: the same with normalized elements; elements of up to 8 bits are
    normalized as in f16. of_scales: exponents of the scales as stored.
    """

    products: np.ndarray
    c: np.ndarray
    fields: np.ndarray
    factors: np.ndarray
    scales: np.ndarray | None = None
    of_scales: np.ndarray | None = None

    def __getitem__(self, chosen) -> Terms:
        parts = (self.products, self.c, self.fields, self.factors, self.scales, self.of_scales)
        return Terms(*(None if part is None else part[chosen] for part in parts))


def terms_of(kind: Kind, type: str, a, b, c, scales_a=None, scales_b=None) -> Terms:
    """The terms of the sums of rows of A and columns of B, all [n, K] in float64, C [n]; scales [n, K]."""
    products = a * b
    zero = products == 0
    if type in ("f16", "bf16", "tf32"):
        smallest = -14 if type == "f16" else -126
        least = -200
    else:
        bias = (1 << getattr(formats, type).exponent_bits - 1) - 1
        smallest, least = 1 - bias, -14
    fields = np.maximum(_exponent(a), smallest) + np.maximum(_exponent(b), smallest)
    factors = np.maximum(_exponent(a), least) + np.maximum(_exponent(b), least)
    scales = of_scales = None
    if scales_a is not None:
        scales = scales_a * scales_b
        smallest = -6 if kind.scales and kind.scales.type == "ue4m3" else -127
        of_scales = np.where(scales == 0, -126, sum(np.maximum(_exponent(x), smallest) for x in (scales_a, scales_b)))
        fields = fields + of_scales
        factors = sum(np.maximum(_exponent(x * y), least) for x, y in ((a, scales_a), (b, scales_b)))
    return Terms(products, c, np.where(zero, _NOTHING, fields), np.where(zero, _NOTHING, factors), scales, of_scales)


@dataclass(frozen=True)
class Rule:
    """A way to add.

    whole: how many neighboring products add up exactly to one term, before scales. at_once: how many products are in
    one sum; each sum adds to the result of the sum before. order: which products share a sum. bits: how many fractional
    bits are kept below the largest exponent. cut: how terms are cut off or rounded to these bits. exponent: which
    exponent of a term counts. joins: where C is added. result: how a sum is rounded.
    """

    whole: int
    at_once: int
    order: str
    bits: int
    cut: str
    exponent: str
    joins: str
    result: str

    def __str__(self) -> str:
        terms = "products" if self.whole == 1 else f"products, by {self.whole} exactly,"
        which = {"neighbors": "", "strided": " at equal distances", "words": " of halves of the registers"}[self.order]
        c = {"first": "and C ", "block": "", "last": ""}[self.joins]
        after = {
            "first": "",
            "block": "; each block times its scales joins C by one rounding to nearest",
            "last": "; C joins last, rounded to nearest",
        }[self.joins]
        cut = {"zero": "cut off toward zero", "down": "cut off downward", "nearest": "rounded to nearest even"}[
            self.cut
        ]
        bits = "all bits kept" if self.bits == BITS[-1] else f"{cut} at {self.bits} bits below it"
        result = {
            "zero": "toward zero to f32",
            "nearest": "to nearest f32",
            "short": "toward zero to 13 fractional bits",
            "f16": "to nearest f16",
            "zero f16": "toward zero to f32 and at the end to f16",
            "nearest f16": "to nearest f32 and at the end to f16",
        }[self.result]
        aligned = {
            "fields": "the exponents as stored",
            "factors": "the exponents of normalized factors",
            "values": "the exponents of the terms' values",
            "scales": "the exponents of the scales",
        }[self.exponent]
        return (
            f"{self.at_once} {terms} {c}at once{which}, aligned to the largest of {aligned}, {bits}, the sum {result}"
            + after
        )


def candidates(kind: Kind, type: str) -> Iterator[Rule]:
    """All candidates for a kind with A and B of a type; none for integers, whose sums are exact."""
    if kind.accumulator == "s32":
        return
    depth = kind.depth
    results = ("f16", "zero f16", "nearest f16") if kind.accumulator == "f16" else ("zero", "nearest")
    if kind.width == 4 and kind.accumulator == "f32":
        results += ("short",)
    enough = _enough_bits(kind, type)
    exponents = ("fields", "values") if type == "e5m2" else ("fields", "factors", "values")
    wholes = (1, 16, 32) if kind.scales and kind.width == 8 else (1,)
    for whole in wholes:
        for at_once in (4, 8, 16, 32, 64):
            if not whole <= at_once <= depth:
                continue
            orders = ["neighbors", "strided"][: 1 + (at_once < depth and whole == 1)]
            if kind.width >= 4 and at_once == 16 and whole == 1:  # as if f16 MMAs each took one half of every register
                orders.append("words")
            several = bool(kind.scales and kind.scales.blocks > 1)
            joins = ["first", "last"] + ["block"] * (several and whole == 1 and at_once * kind.scales.blocks <= depth)
            for order, join in product(orders, joins):
                if join == "block" and order == "strided":
                    continue
                for bits, cut, exponent, result in product(
                    BITS, ("zero", "down", "nearest"), ("scales", "values") if whole > 1 else exponents, results
                ):
                    if bits == BITS[-1] and (cut, exponent) != ("zero", "scales" if whole > 1 else exponents[0]):
                        continue  # nothing is cut off
                    if enough <= bits < BITS[-1] and (join == "block" or join == "last" and not several):
                        continue  # without C, nothing is cut off either
                    yield Rule(whole, at_once, order, bits, cut, exponent, join, result)


def _enough_bits(kind: Kind, type: str) -> int:
    """The number of fractional bits below the largest exponent that holds every product of two elements."""
    if type in ("f16", "bf16", "tf32"):
        return BITS[-1]
    element = getattr(formats, type)
    return 2 * (element.largest_exponent - (int(np.frexp(element.values[1])[1]) - 1))


def agreeing(kind: Kind, type: str, terms: Terms, results: np.ndarray, rules=None) -> list[Rule]:
    """The candidates that reproduce all results (float64 [n], finite) to the bit.

    rules: the rules to test; None for all candidates.
    """
    found = list(candidates(kind, type) if rules is None else rules)
    for count in _SCREENS:
        chosen = slice(None, None, max(1, len(results) // count))
        part, want = terms[chosen], results[chosen]
        families: dict[Rule, list[int]] = {}
        for rule in found:
            families.setdefault(replace(rule, bits=0), []).append(rule.bits)
        found = [
            replace(family, bits=kept)
            for family, bits in families.items()
            for kept, same in zip(bits, (evaluate(kind, family, part, bits) == want).all(1))
            if same
        ]
    return found


def evaluate(kind: Kind, rule: Rule, terms: Terms, bits: Sequence[int] | None = None) -> np.ndarray:
    """The sums of a rule, float64 [bits, n], with each of several numbers of bits in place of the rule's own."""
    with np.errstate(all="ignore"):
        return _evaluate(kind, rule, terms, np.array(bits or [rule.bits])[:, None])


def _evaluate(kind: Kind, rule: Rule, terms: Terms, kept: np.ndarray) -> np.ndarray:
    part, finish = _ROUND[rule.result]
    if rule.joins == "block":
        return finish(_by_block(kind, rule, terms, part, kept))
    values = terms.products if terms.scales is None else terms.products * terms.scales
    exponents = terms.of_scales if rule.exponent == "scales" else getattr(terms, rule.exponent, None)
    if rule.whole > 1:
        shape = (len(values), -1, rule.whole)
        values = terms.products.reshape(shape).sum(-1) * terms.scales.reshape(shape)[..., 0]
        exponents = exponents.reshape(shape)[..., 0] if exponents is not None else None
    if rule.exponent == "values":
        exponents = np.where(values == 0, _NOTHING, _exponent(values))
    start = np.broadcast_to(terms.c if rule.joins == "first" else np.zeros_like(terms.c), (len(kept), len(terms.c)))
    total = _chain(rule, values, exponents, start, kind, part, kept)
    if rule.joins == "last":
        total = _nearest(*_two_sum(total, terms.c))
    return finish(total)


def _chain(rule: Rule, values, exponents, total, kind: Kind, part, bits) -> np.ndarray:
    """A chain of sums [bits, n]: each adds to the result of the sum before."""
    count = values.shape[1]
    size = min(rule.at_once // rule.whole, count)
    place = np.arange(count)
    group = {
        "neighbors": place // size,
        "strided": place % max(1, count // size),
        "words": place // 32 * 2 + place % 8 // 4 if kind.width == 8 else place % 4 // 2,
    }[rule.order]
    smallest, empty = (-14, -200) if kind.accumulator == "f16" else (-126, -126)
    for each in range(count // size):
        inside = group == each
        of_c = np.where(total == 0, empty, np.maximum(_exponent(total), smallest))
        largest = np.maximum(exponents[:, inside].max(1), of_c)
        up = np.ldexp(1.0, bits - largest)
        kept = _CUT[rule.cut](values[:, inside] * up[..., None]).sum(-1) + _CUT[rule.cut](total * up)
        total = part(kept * np.ldexp(1.0, largest - bits))
    return total


def _by_block(kind: Kind, rule: Rule, terms: Terms, part, bits) -> np.ndarray:
    """The sum of each block of one scale starts at zero; a fused multiply-add with the scale adds it to C."""
    size = kind.depth // kind.scales.blocks
    total = np.broadcast_to(terms.c, (len(bits), len(terms.c)))
    if rule.exponent == "values":
        exponents = np.where(terms.products == 0, _NOTHING, _exponent(terms.products))
    else:
        exponents = getattr(terms, rule.exponent) - terms.of_scales
    for first in range(0, kind.depth, size):
        here = slice(first, first + size)
        one = _chain(rule, terms.products[:, here], exponents[:, here], np.zeros_like(total), kind, part, bits)
        total = _nearest(*_two_sum(one * terms.scales[:, first], total))
    return total


def _exponent(values: np.ndarray) -> np.ndarray:
    """floor(log2 |value|); _NOTHING for zero."""
    return np.where(values == 0, _NOTHING, np.frexp(values)[1] - 1)


def _two_sum(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x + y rounded to float64, and the rounding error (Knuth)."""
    total = x + y
    other = total - x
    return total, (x - (total - other)) + (y - other)


def _nearest(total: np.ndarray, rest: np.ndarray | float = 0.0) -> np.ndarray:
    """total + rest, rounded once to the nearest f32: an inexact float64 is rounded to odd first, so that the two
    roundings equal one."""
    odd = (total.view(np.int64) & 1).astype(bool)
    toward = np.where(rest > 0, np.inf, -np.inf)
    moved = np.where((rest != 0) & ~odd, np.nextafter(total, toward), total)
    return moved.astype(np.float32).astype(np.float64)


def _toward_zero(total: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        near = total.astype(np.float32)
    beyond = np.abs(near.astype(np.float64)) > np.abs(total)
    return np.where(beyond, np.nextafter(near, np.float32(0)), near).astype(np.float64)


def _short(total: np.ndarray) -> np.ndarray:
    """Cut off toward zero at 13 fractional bits."""
    return (total.view(np.int64) & ~np.int64((1 << 39) - 1)).view(np.float64)


def _half(total: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return total.astype(np.float16).astype(np.float64)


def _same(total: np.ndarray) -> np.ndarray:
    return total


_CUT = {"zero": np.trunc, "down": np.floor, "nearest": np.rint}
#: By name: the rounding of each sum, and a further rounding of the last.
_ROUND = {
    "zero": (_toward_zero, _same),
    "nearest": (_nearest, _same),
    "short": (_short, _same),
    "f16": (_half, _same),
    "zero f16": (_toward_zero, _half),
    "nearest f16": (_nearest, _half),
}


def in_words(rules: Sequence[Rule], shown: int = 2) -> list[str]:
    """Lines that name the first `shown` rules. Rules that keep more bits and add more products at once come first."""
    if not rules:
        return ["no candidate gives all sums"]
    order = sorted(rules, key=lambda rule: (rule.bits != BITS[-1], -rule.at_once, rule.whole))
    rest = len(rules) - shown
    return [str(rule) for rule in order[:shown]] + [f"and {rest} more that these operands do not tell apart"] * (
        rest > 0
    )
