"""Trials of matrix instructions on registers that are set bit by bit, and conclusions from their results.

`codes` shows the value of each code of a container and of each scale, including padding bits and NaN. `sums` shows how
products and C add up: its operands distinguish the candidates of `ptxrt.summation`. Both run on the current machine and
assume no results. `ptxrt probe` compares the results with the emulator's `hardware` arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from . import formats, given_registers, summation
from .atlas import COLUMNS, ROWS, Kind
from .errors import EmulatorFault

#: Launches a form on registers a, b, c and scales, and returns those of d.
Launch = Callable[..., np.ndarray]

_SCALES = ("scales_a", "scales_b")
_NAMES = {"a": "A", "b": "B", "scales_a": "scales of A", "scales_b": "scales of B"}


@dataclass(frozen=True)
class Codes:
    """Results for codes of one operand. d: the bits (uint32) of D of one product with a 1. numbers: the values of d.
    refused: the codes that the machine refused, with its reason."""

    operand: str
    codes: np.ndarray
    d: np.ndarray
    numbers: np.ndarray
    refused: np.ndarray
    reason: str | None = None


def element_codes(type: str, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """The codes of a container that are tried, without and with padding bits: two arrays of uint32."""
    if bits <= 8:
        code = np.arange(1 << bits, dtype=np.uint32)
        if type in ("s8", "u8"):
            return code, code[:0]
        shift, used = given_registers.shift_of(type, bits), getattr(formats, type).bits
        padded = code & ~np.uint32(((1 << used) - 1) << shift) != 0
        return code[~padded], code[padded]
    mantissa = {"f16": 10, "bf16": 7, "tf32": 23}[type]
    one = int(_encode(type, np.ones(1))[0])
    top = ((1 << bits - 1) - 1) >> mantissa << mantissa
    words = [0, one, *(one ^ 1 << bit for bit in range(bits)), *(1 << bit for bit in range(bits))]
    words += [top | sign << bits - 1 | low for sign in (0, 1) for low in (0, 1, 1 << mantissa - 1, (1 << mantissa) - 1)]
    return np.array(list(dict.fromkeys(words)), np.uint32), np.zeros(0, np.uint32)


def _encode(type: str, values: np.ndarray) -> np.ndarray:
    """Codes of values that a type has, in the lowest bits: not shifted as in a container."""
    if type == "f16":
        return values.astype(np.float16).view(np.uint16).astype(np.uint32)
    if type == "bf16":
        return values.astype(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32)
    if type == "tf32":
        return values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)
    if type in ("s8", "u8"):
        return values.astype(np.int64).astype(np.uint8).astype(np.uint32)
    return getattr(formats, type).encode(values.astype(np.float32)).astype(np.uint32)


def _in_container(type: str, bits: int, values: np.ndarray) -> np.ndarray:
    return _encode(type, values) << np.uint32(given_registers.shift_of(type, bits))


def _multiply(launch: Launch, kind: Kind, a, b, c, scales_a=None, scales_b=None) -> np.ndarray:
    """D's codes [trials, 16, 8] of codes of A, B, C and scales."""
    registers = [given_registers.put(kind, name, codes) for name, codes in (("a", a), ("b", b), ("c", c))]
    scales = np.zeros((len(a), 32, 2), np.uint32)
    if kind.scales:
        for index, (operand, codes) in enumerate(zip(_SCALES, (scales_a, scales_b))):
            scales[..., index] = given_registers.put(kind, operand, codes)[..., 0]
    return given_registers.take(kind, "c", launch(*registers, scales))


def _unit(kind: Kind) -> int:
    return {"ue8m0": 0x7F, "ue4m3": 0x38}[kind.scales.type] if kind.scales else 0


def codes(launch: Launch, kind: Kind, type: str) -> Iterator[Codes]:
    """Multiply every code of A, B and their scales by 1; of types of 16 bits and more, the codes of `element_codes`."""
    clean, padded = element_codes(type, kind.bits("a"))
    for operand in ("a", "b"):
        first = _given(launch, kind, type, operand, clean)
        try:
            second, refused, reason = _given(launch, kind, type, operand, padded), padded[:0], None
        except EmulatorFault as fault:
            second, refused, reason = clean[:0], padded, str(fault)
        tried = np.concatenate([clean, padded if reason is None else padded[:0]])
        d = np.concatenate([first, second])
        yield Codes(operand, tried, d, given_registers.sums(kind, d), refused, reason)
    if kind.scales:
        every = np.arange(256, dtype=np.uint32)
        for operand in _SCALES:
            d = _given(launch, kind, type, operand, every)
            yield Codes(operand, every, d, given_registers.sums(kind, d), every[:0])


def _given(launch: Launch, kind: Kind, type: str, operand: str, tried: np.ndarray) -> np.ndarray:
    """D's codes of one product for each tried code of `operand`. The other factors are 1."""
    if not len(tried):
        return np.zeros(0, np.uint32)
    by_row = operand in ("a", "scales_a")
    lines = ROWS if by_row else COLUMNS
    count = -(-len(tried) // lines)
    in_lines = np.resize(tried, (count, lines))
    one = _in_container(type, kind.bits("a"), np.ones(1))[0]
    a = np.zeros((count, *kind.shape("a")), np.uint32)
    b = np.zeros((count, *kind.shape("b")), np.uint32)
    a[:, :, 0], b[:, 0, :] = one, one
    scales = [np.full((count, *kind.shape(each)), _unit(kind), np.uint32) for each in _SCALES]
    changed = {"a": a[:, :, 0], "b": b[:, 0, :], "scales_a": scales[0][:, :, :1], "scales_b": scales[1][:, :1, :]}
    changed[operand][...] = in_lines.reshape(changed[operand].shape)
    d = _multiply(launch, kind, a, b, np.zeros((count, ROWS, COLUMNS), np.uint32), *scales)
    return (d[:, :, 0] if by_row else d[:, 0, :]).reshape(-1)[: len(tried)]


def told_by_codes(kind: Kind, type: str, found: list[Codes]) -> list[str]:
    """Lines: the bits that matter and those that do not, the effect of padding, and the codes of NaN and infinities.

    A line that holds for both operands appears once.
    """
    told = [(_NAMES[each.operand], _told_of(kind, type, each)) for each in found]
    lines = []
    for (name, first), (other, second) in zip(told[::2], told[1::2]):
        both = {"A": "A and B"}.get(name, "scales of A and B")
        lines += [f"{both}: {line}" for line in first] if first == second else []
        lines += [
            f"{who}: {line}" for who, each in ((name, first), (other, second)) for line in each if first != second
        ]
    return lines


def _told_of(kind: Kind, type: str, found: Codes) -> list[str]:
    """The lines of one operand."""
    bits = 8 if found.operand.startswith("scales") else kind.bits(found.operand)
    result_of = dict(zip(found.codes.tolist(), found.d.tolist()))

    def changes(bit):
        pairs = [(d, result_of[code ^ 1 << bit]) for code, d in result_of.items() if code ^ 1 << bit in result_of]
        return sum(one != other for one, other in pairs) // 2, len(pairs) // 2

    tried = {bit: changes(bit) for bit in range(bits)}
    matter = [bit for bit, (changed, pairs) in tried.items() if changed]
    ignored = [bit for bit, (changed, pairs) in tried.items() if pairs and not changed]
    lines = [f"bits {_spans(matter)} matter" + (f", {_spans(ignored)} are ignored" if ignored else "")]
    if len(found.refused):
        stuck = [bit for bit, (_, pairs) in tried.items() if not pairs]
        lines.append(f"the emulator takes codes with bits {_spans(stuck)} for a fault")
    elif found.operand in ("a", "b") and bits == 8:
        for bit in (bit for bit in _padding(type) if bit in matter):
            lines.append(f"padding bit {bit} changes {tried[bit][0]} of {tried[bit][1]} codes")
    for word, which in (("NaN", np.isnan), ("infinities", np.isinf)):
        special = which(found.numbers)
        if special.any():
            results = ", ".join(f"{each:#x}" for each in np.unique(found.d[special]))
            lines.append(f"{_some(found.codes[special])} give {word}, {results}")
    return lines


def _padding(type: str) -> list[int]:
    """The bits of a byte that belong to no element."""
    if type in ("s8", "u8"):
        return []
    used, shift = getattr(formats, type).bits, given_registers.shift_of(type, 8)
    return [bit for bit in range(8) if not shift <= bit < shift + used]


def _spans(bits: list[int]) -> str:
    """Bits in words, the highest first: `7..2, 0`."""
    if not bits:
        return "none"
    words, run = [], [max(bits)]
    for bit in [*sorted(bits, reverse=True)[1:], -2]:
        if bit == run[-1] - 1:
            run.append(bit)
            continue
        words.append(f"{run[0]}..{run[-1]}" if len(run) > 1 else str(run[0]))
        run = [bit]
    return ", ".join(words)


def _some(numbers: np.ndarray) -> str:
    words = [f"{each:#x}" for each in sorted(numbers.tolist())]
    return ", ".join(words if len(words) <= 8 else [*words[:3], "...", words[-1]])


# ---------------------------------------------------------------------------------------------------------------------
# Sums


@dataclass(frozen=True)
class Operands:
    """Codes of the operands of some instructions: A [trials, 16, K], B [trials, K, 8], C [trials, 16, 8], scales."""

    a: np.ndarray
    b: np.ndarray
    c: np.ndarray
    scales_a: np.ndarray | None = None
    scales_b: np.ndarray | None = None


class _Draw:
    """A source of random operands of a form: elements, C and scales with chosen exponents."""

    def __init__(self, kind: Kind, type: str, rng: np.random.Generator):
        self.kind, self.type, self.rng = kind, type, rng
        self.narrow = type not in ("f16", "bf16", "tf32")
        if self.narrow:
            values = getattr(formats, type).values.astype(np.float64)
            self.pool = np.unique(values[np.isfinite(values) & (values > 0)])
            self.lowest, self.highest = (int(np.frexp(x)[1]) - 1 for x in (self.pool[0], self.pool[-1]))
        else:
            self.mantissa = {"f16": 10, "bf16": 7, "tf32": 10}[type]
            self.lowest, self.highest = (-14, 15) if type == "f16" else (-60, 60)

    def elements(self, shape, low: int, high: int, signs: bool = True) -> np.ndarray:
        """Values with exponents from low to high, as far as the type has them, and random mantissas."""
        low, high = max(low, self.lowest), max(min(high, self.highest), self.lowest)
        low = min(low, high)
        if self.narrow:
            exponents = np.frexp(self.pool)[1] - 1
            values = self.rng.choice(self.pool[(low <= exponents) & (exponents <= high)], shape)
        else:
            part = self.rng.integers(0, 1 << self.mantissa, shape) / (1 << self.mantissa)
            values = np.ldexp(1 + part, self.rng.integers(low, high + 1, shape))
        return values * self.rng.choice([-1.0, 1.0], shape) if signs else values

    def subnormals(self, shape) -> np.ndarray:
        """Positive subnormal values of the type."""
        if self.narrow:
            smallest = 2 - (1 << getattr(formats, self.type).exponent_bits - 1)
            return self.rng.choice(self.pool[self.pool < 2.0**smallest], shape)
        step = {"f16": -24, "bf16": -133, "tf32": -136}[self.type]
        return np.ldexp(self.rng.integers(1, 1 << self.mantissa, shape).astype(float), step)

    def sums(self, exponents: np.ndarray) -> np.ndarray:
        """Values of C with these exponents and random mantissas and signs."""
        bits = 10 if self.kind.accumulator == "f16" else 23
        if self.kind.accumulator == "f16":
            exponents = np.clip(exponents, -24, 14)
        part = self.rng.integers(0, 1 << bits, exponents.shape) / (1 << bits)
        values = np.ldexp((1 + part) * self.rng.choice([-1.0, 1.0], exponents.shape), exponents)
        return given_registers.sums(self.kind, given_registers.codes_of_sums(self.kind, values))

    def scales(self, spread: int) -> list[np.ndarray]:
        """Codes of scales: 1 if spread is 0, else ue8m0 from 2^-spread to 2^spread, or any positive ue4m3."""
        shapes = [(1, *self.kind.shape(each)) for each in _SCALES]
        if not spread:
            return [np.full(shape, _unit(self.kind), np.uint32) for shape in shapes]
        low, high = (127 - spread, 128 + spread) if self.kind.scales.type == "ue8m0" else (1, 0x7F)
        return [self.rng.integers(low, high, shape).astype(np.uint32) for shape in shapes]


def operands(kind: Kind, type: str, seed: int = 0) -> Operands:
    """Operands that distinguish the candidates of a form. Equal seeds give equal operands."""
    if kind.accumulator == "s32":
        return _bytes(kind, np.random.default_rng(seed))
    draw = _Draw(kind, type, np.random.default_rng(seed))
    rng, depth = draw.rng, kind.depth
    shape_a, shape_b, shape_c = ((1, *kind.shape(each)) for each in ("a", "b", "c"))
    top = draw.highest if draw.narrow else 7
    made: list[tuple] = []

    def add(a, b, c, spread=0):
        made.append((a, b, c, draw.scales(spread) if kind.scales else [None, None]))

    for spread in (0, 0, 3, 12) if kind.scales else (0, 0):  # ordinary numbers, with and without C
        a, b = draw.elements(shape_a, -8, 8), draw.elements(shape_b, -8, 8)
        add(a, b, np.zeros(shape_c), spread)
        add(a, b, draw.sums(rng.integers(-6, 28, shape_c)), spread)
        add(a, b, draw.sums(rng.integers(18, 28, shape_c)), spread)
    for each in range(16):  # two large products cancel: how much of C and of a small product is left
        a, b = np.zeros(shape_a), np.ones(shape_b) * draw.elements((1, 1, COLUMNS), top - 1, top)
        subnormal = each % 4 == 3  # subnormal factors, in A or in both
        if subnormal and draw.narrow and each % 8 == 3:
            b = np.ones(shape_b) * draw.subnormals((1, 1, COLUMNS))
        elif subnormal and type in ("bf16", "tf32"):
            b = b * 2.0**100
        far = subnormal and not draw.narrow and each % 8 == 7  # the small product is far below
        if far:
            b[:, -1] *= np.exp2(-rng.integers(18, 30, (1, COLUMNS)))
        for row in range(ROWS):
            first, second, third = rng.choice(depth - far, 3, replace=False)
            value = draw.subnormals(()) if subnormal else draw.elements((), top - 1, top)
            a[0, row, first], a[0, row, second] = value, -value
            if far:
                a[0, row, -1] = draw.subnormals(())
            elif each % 3 == 0:
                a[0, row, third] = draw.subnormals(()) if subnormal else draw.elements((), -30, 0)
        largest = np.frexp(np.abs(a).max(2)[..., None] * np.abs(b).max(1)[:, None])[1] - 1
        below = rng.integers(0, 46, shape_c) if each % 2 == 0 else rng.integers(8, 30, shape_c)
        spread = (0, 0, 4, 12)[each // 4] if kind.scales else 0
        add(a, b, draw.sums(largest - below), spread)
    for each in range(6):  # C cancels a large product: how much of the small ones is left
        a, b = draw.elements(shape_a, -30, 2), draw.elements(shape_b, -8, 4)
        a[rng.random(shape_a) < (0.3, 0.6, 0.9)[each % 3]] = 0
        for row in range(ROWS):
            a[0, row, rng.integers(depth)] = 2.0**top
        b = np.where(each % 2, b, np.exp2(np.floor(np.log2(np.abs(b)))))
        large = a[..., None] * b[:, None]
        c = -np.take_along_axis(large, np.abs(large).argmax(2)[:, :, None], 2)[:, :, 0]
        add(a, b, given_registers.sums(kind, given_registers.codes_of_sums(kind, c)))
    for each in range(3):  # small whole sums beside a C whose last bit is about 1 or more
        a, b = (rng.random(shape_a) < 0.5).astype(float), np.ones(shape_b)
        scale = {"f16": 11, "f32": 24}[kind.accumulator]
        add(a, b, draw.sums(scale - 1 + rng.integers(-1, 4, shape_c)))
    if kind.accumulator == "f16":  # products halfway between two f16: a small C decides, within f32 or below it
        for _ in range(2):
            a, b = np.full(shape_a, 6.0), np.full(shape_b, 6.0)
            a[..., -1], b[:, -1] = 0.5, 0.5 * depth / 16
            add(a * rng.choice([-1.0, 1.0], (1, ROWS, 1)), b, draw.sums(rng.integers(-18, -11, shape_c)))
    if kind.scales and kind.scales.type == "ue8m0" and kind.scales.blocks > 1:  # one block is far below the other
        for each in range(4):
            a, b = draw.elements(shape_a, -9, 9), np.ones(shape_b)
            size = depth // 2
            far = 0 if each % 2 else size
            a[:, :, far : far + size] = 0
            a[:, :, far], a[:, :, far + 1] = 4.0, -4.0
            scales = draw.scales(0)
            for index, codes in enumerate(scales):
                lines = codes if index == 0 else codes.swapaxes(1, 2)
                lines[:, :, int(far > 0)] += rng.integers(16, 20, lines.shape[:2]).astype(np.uint32)
            made.append((a, b, np.zeros(shape_c), scales))
    a, b, c = (np.concatenate([each[i] for each in made]) for i in range(3))
    scales = [np.concatenate([each[3][i] for each in made]) if kind.scales else None for i in range(2)]
    bits = kind.bits("a")
    with np.errstate(over="ignore"):
        return Operands(
            _in_container(type, bits, a), _in_container(type, bits, b), given_registers.codes_of_sums(kind, c), *scales
        )


def _bytes(kind: Kind, rng: np.random.Generator) -> Operands:
    """Random bytes beside C of 0, of all values, and near the limits of 32 bits."""
    a, b, c = (rng.integers(0, 1 << 8, (4, *kind.shape(each))).astype(np.uint32) for each in ("a", "b", "c"))
    c[0] = 0
    c[1] = rng.integers(0, 1 << 32, c[1].shape)
    c[2:] = np.uint32(0x7FFFFF00) + c[2:] * np.uint32(2)
    return Operands(a, b, c)


def sums(launch: Launch, kind: Kind, type: str, given: Operands) -> np.ndarray:
    """D's codes [trials, 16, 8] of the operands on the current machine."""
    return _multiply(launch, kind, given.a, given.b, given.c, given.scales_a, given.scales_b)


def terms(kind: Kind, type: str, given: Operands) -> summation.Terms:
    """The terms of all sums of the operands, in the order of D."""
    bits = kind.bits("a")
    a = given_registers.values(type, bits, given.a)[:, :, None]
    b = given_registers.values(type, bits, given.b).swapaxes(1, 2)[:, None]
    shape = np.broadcast_shapes(a.shape, b.shape)
    parts = [a, b]
    if kind.scales:
        size = kind.depth // kind.scales.blocks
        of_a, of_b = (given_registers.values(kind.scales.type, 8, x) for x in (given.scales_a, given.scales_b))
        parts += [np.repeat(of_a, size, 2)[:, :, None], np.repeat(of_b, size, 1).swapaxes(1, 2)[:, None]]
    flat = [np.broadcast_to(part, shape).reshape(-1, kind.depth) for part in parts]
    c = given_registers.sums(kind, given.c).reshape(-1)
    return summation.terms_of(kind, type, *flat[:2], c, *flat[2:])


def told_by_sums(kind: Kind, type: str, given: Operands, d: np.ndarray) -> list[str]:
    """Lines: the candidates that reproduce all finite sums."""
    if kind.accumulator == "s32":
        a, b = (given_registers.values(type, 8, codes).astype(np.int64) for codes in (given.a, given.b))
        exact = a @ b + given_registers.sums(kind, given.c).astype(np.int64)
        ways = {"wraps": exact, "is the nearest s32": np.clip(exact, -(1 << 31), (1 << 31) - 1)}
        told = [f"sums are exact, and D {way}" for way, sum in ways.items() if (sum.astype(np.uint32) == d).all()]
        return told or ["sums are not exact"]
    results = given_registers.sums(kind, d).reshape(-1)
    finite = np.isfinite(results)
    return summation.in_words(summation.agreeing(kind, type, terms(kind, type, given)[finite], results[finite]))
