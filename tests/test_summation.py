"""Probes of registers given bit by bit: codes, padding and NaN, and candidate rules of summation."""

from fractions import Fraction
from functools import partial

import numpy as np
import pytest

import ptxrt
from ptxrt import atlas, given_registers, summation, trials
from ptxrt.commands import probe as command
from ptxrt.launch import run
from ptxrt.ops.probes import GIVEN_FORMS, probe_mma_registers
from ptxrt.summation import Rule


def multiply(kind, type, text, a, b, c, scales):
    """Run the probe on the emulator on one PTX text, in tensor core arithmetic."""
    form = GIVEN_FORMS.index((kind, type))
    with ptxrt.using("emulator", ptx=text, arithmetic="hardware"):
        return run(probe_mma_registers, (), dict(a=a, b=b, c=c, scales=scales, form=form))["d"]


def found(kind, type, text="native"):
    """The candidate rules that agree with the emulator."""
    given = trials.operands(atlas.KINDS[kind], type)
    d = trials.sums(partial(multiply, kind, type, text), atlas.KINDS[kind], type, given)
    results = given_registers.sums(atlas.KINDS[kind], d).reshape(-1)
    finite = np.isfinite(results)
    terms = trials.terms(atlas.KINDS[kind], type, given)
    return summation.agreeing(atlas.KINDS[kind], type, terms[finite], results[finite])


@pytest.mark.parametrize(
    "kind, type, text, rule",
    [
        ("bf16", "bf16", "native", Rule(1, 16, "neighbors", 25, "zero", "fields", "first", "zero")),
        ("tf32", "tf32", "native", Rule(1, 8, "neighbors", 25, "zero", "fields", "first", "zero")),
        ("f8f6f4_f16", "e3m2", "native", Rule(1, 32, "neighbors", 25, "zero", "fields", "first", "f16")),
        ("f8f6f4_f16", "e3m2", "portable", Rule(1, 16, "neighbors", 25, "zero", "factors", "first", "zero f16")),
        ("mxf8f6f4", "e2m1", "native", Rule(1, 32, "neighbors", 25, "zero", "fields", "first", "zero")),
        ("mxf8f6f4", "e5m2", "portable", Rule(1, 16, "neighbors", 25, "zero", "fields", "last", "zero")),
        ("mxf4", "e2m1", "native", Rule(16, 64, "neighbors", 35, "zero", "scales", "first", "zero")),
        ("mxf4nvf4", "e2m1", "native", Rule(16, 64, "neighbors", 35, "zero", "scales", "first", "zero")),
        ("mxf4nvf4", "e2m1", "portable", Rule(1, 16, "words", 25, "zero", "factors", "first", "zero")),
    ],
)
def test_the_rule_of_the_emulator_is_found_among_all(kind, type, text, rule):
    """docs/numerics.md states the rules of the instructions, ptx/portable those of the stand-ins."""
    assert found(kind, type, text) == [rule]


@pytest.mark.parametrize(
    "kind, type, rule",
    [
        ("f16", "f16", Rule(1, 4, "neighbors", 23, "zero", "fields", "first", "zero")),
        ("f16", "f16", Rule(1, 8, "neighbors", 24, "zero", "values", "first", "nearest")),
        ("bf16", "bf16", Rule(1, 8, "strided", 26, "nearest", "fields", "first", "zero")),
        ("bf16", "bf16", Rule(1, 16, "neighbors", 26, "down", "factors", "last", "zero")),
        ("fp8", "e4m3", Rule(1, 32, "neighbors", 13, "zero", "fields", "first", "short")),
        ("fp8", "e4m3", Rule(1, 16, "words", 25, "zero", "factors", "first", "zero")),
        ("mxf4", "e2m1", Rule(32, 64, "neighbors", 35, "zero", "values", "first", "nearest")),
    ],
)
def test_other_machines_are_told_apart(kind, type, rule):
    """Results computed by a rule leave that rule as the only candidate."""
    terms = trials.terms(atlas.KINDS[kind], type, trials.operands(atlas.KINDS[kind], type))
    results = summation.evaluate(atlas.KINDS[kind], rule, terms)[0]
    finite = np.isfinite(results)
    left = summation.agreeing(atlas.KINDS[kind], type, terms[finite], results[finite])
    assert left == [rule]


def test_a_rule_by_fractions(rng):
    """Two sums of four products each, in exact arithmetic."""
    rule = Rule(1, 4, "neighbors", 24, "zero", "values", "first", "zero")
    a, b = np.ldexp(rng.integers(-99, 99, (2, 50, 8)), rng.integers(-20, 20, (2, 50, 8)))
    c = np.ldexp(rng.integers(1, 1 << 24, 50), rng.integers(-40, 10, 50))
    terms = summation.terms_of(atlas.KINDS["tf32"], "tf32", a, b, c)
    want = []
    for row in range(50):
        total = Fraction(c[row])
        for first in (0, 4):
            parts = [total, *(Fraction(x) * Fraction(y) for x, y in zip(a[row, first:][:4], b[row, first:][:4]))]
            unit = Fraction(2) ** (max(int(np.frexp(float(part))[1]) - 1 for part in parts if part) - 24)
            total = unit * sum(int(part / unit) for part in parts)
            last = Fraction(2) ** (int(np.frexp(float(total))[1]) - 24) if total else 1
            total = last * int(total / last)
        want.append(float(total))
    assert summation.evaluate(atlas.KINDS["tf32"], rule, terms)[0].tolist() == want


def test_a_result_that_no_candidate_gives():
    kind = atlas.KINDS["tf32"]
    given = trials.operands(kind, "tf32")
    d = trials.sums(partial(multiply, "tf32", "tf32", "native"), kind, "tf32", given)
    (line,) = trials.told_by_sums(kind, "tf32", given, d)
    assert line.startswith(
        "8 products and C at once, aligned to the largest of the exponents as stored, cut off toward"
    )
    d[3, 1, 1] ^= 1
    assert trials.told_by_sums(kind, "tf32", given, d) == ["no candidate gives all sums"]


def test_integers_wrap_or_saturate():
    kind = atlas.KINDS["int8"]
    given = trials.operands(kind, "u8")
    d = trials.sums(partial(multiply, "int8", "u8", "native"), kind, "u8", given)
    assert trials.told_by_sums(kind, "u8", given, d) == ["sums are exact, and D wraps"]
    a, b = (each.astype(np.int64) for each in (given.a, given.b))
    nearest = np.clip(a @ b + given.c.astype(np.int32), -(1 << 31), (1 << 31) - 1).astype(np.uint32)
    assert trials.told_by_sums(kind, "u8", given, nearest) == ["sums are exact, and D is the nearest s32"]


def told(kind, type, machine):
    return trials.told_by_codes(atlas.KINDS[kind], type, list(trials.codes(machine, atlas.KINDS[kind], type)))


def test_codes_of_the_emulator():
    lines = told("mxf8f6f4", "e2m1", partial(multiply, "mxf8f6f4", "e2m1", "native"))
    assert lines == [
        "A and B: bits 5..2 matter",
        "A and B: the emulator takes codes with bits 7..6, 1..0 for a fault",
        "scales of A and B: bits 7..0 matter",
        "scales of A and B: 0xff give NaN, 0x7fffffff",
    ]
    lines = told("mxf4nvf4", "e2m1", partial(multiply, "mxf4nvf4", "e2m1", "native"))
    assert lines[0] == "A and B: bits 3..0 matter"
    assert lines[1:] == [
        "scales of A and B: bits 6..0 matter, 7 are ignored",
        "scales of A and B: 0x7f, 0xff give NaN, 0x7fffffff",
    ]
    lines = told("fp8", "e5m2", partial(multiply, "fp8", "e5m2", "portable"))
    assert "A and B: 0x7c, 0xfc give infinities, 0x7f800000, 0xff800000" in lines


def test_padding_that_a_machine_ignores_or_not():
    """A machine that ignores padding, and one where bit 6 of A doubles a product."""
    kind = atlas.KINDS["f8f6f4"]
    ignores = partial(given_registers.multiply, kind, "e2m1")
    assert told("f8f6f4", "e2m1", ignores) == ["A and B: bits 5..2 matter, 7..6, 1..0 are ignored"]

    def doubles(a, b, c, scales):
        twice = given_registers.take(kind, "a", a)[:, :, :1] >> np.uint32(6) & np.uint32(1)
        d = given_registers.sums(kind, given_registers.take(kind, "c", ignores(a, b, c, scales)))
        return given_registers.put(kind, "c", given_registers.codes_of_sums(kind, d * (1 + twice)))

    assert told("f8f6f4", "e2m1", doubles) == [
        "A: bits 6..2 matter, 7, 1..0 are ignored",
        "A: padding bit 6 changes 112 of 128 codes",
        "B: bits 5..2 matter, 7..6, 1..0 are ignored",
    ]


def test_registers_go_there_and_back(rng):
    for name, operand in (("f16_f16", "c"), ("mxf4", "b"), ("tf32", "a"), ("mxf4nvf4", "scales_b")):
        kind = atlas.KINDS[name]
        bits = 8 if operand.startswith("scales") else kind.bits(operand)
        codes = rng.integers(0, 1 << bits, (3, *kind.shape(operand))).astype(np.uint32)
        assert (given_registers.take(kind, operand, given_registers.put(kind, operand, codes)) == codes).all()


def test_differences_from_the_emulator_are_listed():
    """The f16 stand-in of fp8 sums 16 products at once, the instruction 32; both read codes alike."""
    kind = atlas.KINDS["fp8_f16"]
    one, other = (partial(multiply, "fp8_f16", "e4m3", text) for text in ("portable", "native"))
    row = command.compared(command.sums, kind, "e4m3", one, other)
    assert row["differences"] and row["error"] is None
    assert row["differences"][0].startswith("trial ") and ", in the emulator 0x" in row["differences"][0]
    assert command.compared(command.codes, kind, "e4m3", one, other)["differences"] == []
    assert command.compared(command.sums, kind, "e4m3", one, one)["differences"] == []


def test_every_form_has_its_kind_and_types():
    assert len(set(GIVEN_FORMS)) == len(GIVEN_FORMS) == 28
    assert {kind for kind, _ in GIVEN_FORMS} == set(atlas.KINDS)
    assert all(type in atlas.KINDS[kind].types for kind, type in GIVEN_FORMS)
