"""SIMD video instructions in isolation, against the pseudocode of the PTX ISA in Python integers."""

import random

import numpy as np
import pytest

from ptxrt.emulator.instruction import Unsupported, resolve
from ptxrt.ptx import PtxSyntaxError

OPERATIONS = {
    "vadd": lambda a, b: a + b,
    "vsub": lambda a, b: a - b,
    "vavrg": lambda a, b: (a + b + 1) >> 1 if a + b >= 0 else (a + b) >> 1,
    "vabsdiff": lambda a, b: abs(a - b),
    "vmin": min,
    "vmax": max,
}
COMPARISONS = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}  # fmt: skip


def extract(a, b, selector, bits, signed):
    """Selected elements, lowest first. The selector lists digits highest first; digits index the elements of a, then of
    b."""
    both, found = a | b << 32, []
    for digit in reversed(selector):
        value = both >> bits * int(digit) & (1 << bits) - 1
        found.append(value - (1 << bits) if signed and value >> bits - 1 else value)
    return found


def expected(lanes, operation, types, a, b, c, *, clamp=None, add=False, mask=None, of_a=None, of_b=None):
    bits = 32 // lanes
    left = extract(a, b, of_a or "3210"[4 - lanes :], bits, types[0] == "s32")
    right = extract(a, b, of_b or ("7654" if lanes == 4 else "32"), bits, types[1] == "s32")
    old = extract(c, 0, "3210"[4 - lanes :], bits, False)
    word = c if add else 0
    for lane in range(lanes):
        chosen = mask is None or str(lane) in mask
        result = int(operation(left[lane], right[lane]))
        if clamp == "u32":
            result = min(max(result, 0), (1 << bits) - 1)
        if clamp == "s32":
            result = min(max(result, -(1 << bits - 1)), (1 << bits - 1) - 1)
        if add:
            word += result if chosen else 0
        else:
            word |= (result if chosen else old[lane]) % (1 << bits) << bits * lane
    return word % (1 << 32)


def words(seed):
    """(a, b, c) of 64 threads: range limits and random values."""
    source = random.Random(seed)
    edges = [0, 0xFFFFFFFF, 0x80808080, 0x7F7F7F7F, 0x80000001, 0x7FFF8000, 0x01FF00FE, 0x12345678]
    pairs = [(a, b) for a in edges for b in edges]
    return [(a, b, source.getrandbits(32)) for a, b in pairs[:48]] + [
        tuple(source.getrandbits(32) for _ in "abc") for _ in range(16)
    ]


def run(execute, text, cases):
    columns = {name: ("b32", np.array(values, np.uint32)) for name, values in zip("abc", zip(*cases))}
    return execute(text, columns, {"d": "b32"})["d"].tolist()


@pytest.mark.parametrize(
    "types", [("u32", "u32", "u32"), ("s32", "s32", "s32"), ("s32", "u32", "s32"), ("u32", "s32", "u32")]
)
@pytest.mark.parametrize("form", ["", ".sat", ".add"])
@pytest.mark.parametrize("lanes", [2, 4])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(execute, name, lanes, form, types):
    cases = words(lanes)
    found = run(execute, f"{name}{lanes}.{'.'.join(types)}{form} %d, %a, %b, %c;", cases)
    clamp = types[0] if form == ".sat" else None
    assert found == [
        expected(lanes, OPERATIONS[name], types[1:], *case, clamp=clamp, add=form == ".add") for case in cases
    ]


@pytest.mark.parametrize("types", [("u32", "u32"), ("s32", "s32"), ("u32", "s32")])
@pytest.mark.parametrize("form", ["", ".add"])
@pytest.mark.parametrize("lanes", [2, 4])
@pytest.mark.parametrize("comparison", COMPARISONS)
def test_comparisons(execute, comparison, lanes, form, types):
    cases = words(lanes)
    found = run(execute, f"vset{lanes}.{'.'.join(types)}.{comparison}{form} %d, %a, %b, %c;", cases)
    assert found == [expected(lanes, COMPARISONS[comparison], types, *case, add=form == ".add") for case in cases]


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(
    "lanes, mask, of_a, of_b",
    [
        (4, "20", "7061", "3333"),
        (4, "3210", "0123", "4567"),
        (4, "1", "", "5210"),
        (2, "1", "30", "21"),
        (2, "0", "", "00"),
        (2, "", "11", ""),
    ],
)
def test_selectors(execute, lanes, mask, of_a, of_b, add):
    letter, cases = "h" if lanes == 2 else "b", words(7)
    d, a, b = (f"%{name}.{letter}{digits}" if digits else f"%{name}" for name, digits in zip("dab", (mask, of_a, of_b)))
    found = run(execute, f"vsub{lanes}.s32.u32.s32{'.add' if add else ''} {d}, {a}, {b}, %c;", cases)
    options = dict(add=add, mask=mask or None, of_a=of_a, of_b=of_b)
    assert found == [expected(lanes, OPERATIONS["vsub"], ("u32", "s32"), *case, **options) for case in cases]


def test_by_hand(execute):
    """The results that CUDA's documentation states for __vabsdiffu4 and __vsadu4, which compile to these
    instructions."""
    case = [(0x00FF1020, 0x01002010, 0)] * 32
    assert set(run(execute, "mov.u32 %d, 0; vabsdiff4.u32.u32.u32 %d, %a, %b, %d;", case)) == {0x01FF1010}
    assert set(run(execute, "mov.u32 %d, 0; vabsdiff4.u32.u32.u32.add %d, %a, %b, %d;", case)) == {
        0x01 + 0xFF + 0x10 + 0x10
    }


@pytest.mark.parametrize(
    "opcode",
    [
        "vadd4.u32.u32",
        "vabsdiff4.u32.u32.u32.sat.add",
        "vadd2.u16.u16.u16",
        "vset4.u32.u32",
        "vset2.u32.u32.u32.eq",
        "vset4.u32.u32.eq.sat",
    ],
)
def test_other_forms_are_refused(opcode):
    with pytest.raises(Unsupported, match=f"{opcode} is not implemented: expected"):
        resolve(opcode)


@pytest.mark.parametrize(
    "operands", ["%d.b02, %a, %b", "%d.h10, %a, %b", "%d, %a.b321, %b", "%d, %a.b8210, %b", "%d.b4, %a, %b"]
)
def test_selectors_that_do_not_exist_are_refused(execute, operands):
    with pytest.raises(PtxSyntaxError, match="has a selector that vadd4.u32.u32.u32 does not know"):
        run(execute, f"vadd4.u32.u32.u32 {operands}, %c;", words(1))
