"""mma.sync in isolation, against the fragment tables of PTX ISA 9.7.14.5 and exact fractions."""

import math
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptxrt.emulator.instruction import Unsupported, resolve
from ptxrt.errors import EmulatorFault

LANES = range(32)


# Number formats by definition: (exponent bits, mantissa bits, bias, kind of special values)
FORMATS = {
    "f32": (8, 23, 127, "ieee"),
    "f16": (5, 10, 15, "ieee"),
    "bf16": (8, 7, 127, "ieee"),
    "tf32": (8, 10, 127, "ieee"),
    "e5m2": (5, 2, 15, "ieee"),
    "e4m3": (4, 3, 7, "nan"),
    "e3m2": (3, 2, 3, None),
    "e2m3": (2, 3, 1, None),
    "e2m1": (2, 1, 1, None),
    "ue4m3": (4, 3, 7, "nan"),  # its sign bit is ignored
}


@cache
def parts(name, code):
    """(signed significand, exponent) of a code, None for infinities and NaN; subnormals have the smallest exponent."""
    exponent_bits, mantissa_bits, bias, specials = FORMATS[name]
    mantissa = code & ((1 << mantissa_bits) - 1)
    field = code >> mantissa_bits & ((1 << exponent_bits) - 1)
    top = field == (1 << exponent_bits) - 1
    if top and (specials == "ieee" or (specials == "nan" and mantissa == (1 << mantissa_bits) - 1)):
        return None
    sign = -1 if code >> (exponent_bits + mantissa_bits) & 1 else 1
    hidden = 1 if field else 0
    return sign * (hidden + Fraction(mantissa, 1 << mantissa_bits)), max(field, 1) - bias


def power(exponent):
    return Fraction(1 << exponent) if exponent >= 0 else Fraction(1, 1 << -exponent)


@cache
def value(name, code):
    significand, exponent = parts(name, code)
    return significand * power(exponent)


# Element positions by the ISA's tables, for the i-th element that a lane holds of A, B and C


def place_a(depth, width, lane, i):
    """(row, k); a register holds `width` elements."""
    group, thread = lane >> 2, lane % 4
    register, element = divmod(i, width)
    row = group if register % 2 == 0 else group + 8
    return row, thread * width + element + (depth // 2 if register >= 2 else 0)


def place_b(depth, width, lane, i):
    """(k, column)"""
    group, thread = lane >> 2, lane % 4
    register, element = divmod(i, width)
    return thread * width + element + (depth // 2 if register >= 1 else 0), group


def place_c(lane, i):
    group, thread = lane >> 2, lane % 4
    return (group if i < 2 else group + 8), thread * 2 + (i & 1)


def pack(codes, width):
    """Codes (warps, 32, elements) as registers: a list of (warps * 32,) uint32."""
    if width == 8:  # two to a byte, the first in the low nibble
        codes, width = codes[..., ::2] | codes[..., 1::2] << 4, 4
    dtype = {1: np.uint32, 2: np.uint16, 4: np.uint8}[width]
    words = np.ascontiguousarray(codes, dtype).view(np.uint32)
    return [words[..., index].reshape(-1) for index in range(words.shape[-1])]


def fragment(matrix, place, depth, width, count):
    """The elements of each lane, (warps, 32, count), from the codes of a (warps, ., .) matrix."""
    codes = np.zeros((len(matrix), 32, count), np.int64)
    for lane in LANES:
        for i in range(count):
            row, column = place(depth, width, lane, i)
            codes[:, lane, i] = matrix[:, row, column]
    return codes


class Form:
    """An mma opcode and the layout of its registers."""

    def __init__(self, opcode, a, b, depth, accumulator="f32", scaled=False, blocks=1, scale_type="ue8m0"):
        self.opcode, self.a, self.b, self.depth, self.accumulator, self.scaled = (
            opcode,
            a,
            b,
            depth,
            accumulator,
            scaled,
        )
        self.blocks, self.scale_type = blocks, scale_type  # scales per row; their type
        self.width = {"bf16": 2, "f16": 2, "tf32": 1}.get(a, 8 if depth == 64 else 4)  # elements per register
        self.shift = {name: 13 if name == "tf32" else 2 if self.width == 4 and name == "e2m1" else 0 for name in (a, b)}

    def __repr__(self):
        return self.opcode

    def run(self, execute, a, b, c, arithmetic, scales=None, selectors=((0, 0), (0, 0))):
        """D (warps, 16, 8) bits from codes of A (warps, 16, k), B (warps, k, 8) and C (warps, 16, 8)."""
        a = np.asarray(a) << self.shift[self.a]
        b = np.asarray(b) << self.shift[self.b]
        return self.run_containers(execute, a, b, c, arithmetic, scales, selectors)

    def run_containers(self, execute, a, b, c, arithmetic, scales=None, selectors=((0, 0), (0, 0))):
        warps, c = len(a), np.asarray(c)
        count = 16 * self.depth // 32  # elements of A per lane
        registers = {}
        for index, word in enumerate(pack(fragment(a, place_a, self.depth, self.width, count), self.width)):
            registers[f"a{index}"] = ("b32", word)
        for index, word in enumerate(pack(fragment(b, place_b, self.depth, self.width, count // 2), self.width)):
            registers[f"b{index}"] = ("b32", word)
        names = {kind: [name for name in registers if name[0] == kind] for kind in "ab"}
        lanes = np.stack(
            [c[:, [place_c(lane, i)[0] for lane in LANES], [place_c(lane, i)[1] for lane in LANES]] for i in range(4)]
        )
        lanes = lanes.reshape(4, warps * 32)
        if self.accumulator == "f32":
            values = [lane.astype(np.uint32).view(np.float32) for lane in lanes]
            registers |= {f"c{i}": ("f32", values[i]) for i in range(4)}
            outputs = {f"d{i}": "f32" for i in range(4)}
        else:
            values = [lanes[0] | lanes[1] << 16, lanes[2] | lanes[3] << 16]
            registers |= {f"c{i}": ("b32", values[i].astype(np.uint32)) for i in range(2)}
            outputs = {f"d{i}": "b32" for i in range(2)}
        names["c"] = [name for name in registers if name[0] == "c"]

        def vector(kind):
            return "{" + ", ".join(f"%{name}" for name in kind) + "}"

        operands = [vector(outputs), vector(names["a"]), vector(names["b"]), vector(names["c"])]
        if self.scaled:
            one = np.full(warps * 32, 0x7F7F7F7F if self.scale_type == "ue8m0" else 0x38383838, np.uint32)
            scale_a, scale_b = scales if scales is not None else (one, one)
            registers["sa"], registers["sb"] = ("b32", scale_a), ("b32", scale_b)
            (byte_a, thread_a), (byte_b, thread_b) = selectors
            operands += ["%sa", f"{{{byte_a}, {thread_a}}}", "%sb", f"{{{byte_b}, {thread_b}}}"]
        results = execute(f"{self.opcode} {', '.join(operands)};", registers, outputs, arithmetic=arithmetic)
        d = np.zeros((warps, 16, 8), np.int64)
        for i in range(4):
            if self.accumulator == "f32":
                bits = results[f"d{i}"].view(np.uint32)
            else:
                bits = results[f"d{i // 2}"] >> np.uint32(16 * (i % 2)) & np.uint32(0xFFFF)
            for lane in LANES:
                row, column = place_c(lane, i)
                d[:, row, column] = bits.reshape(warps, 32)[:, lane]
        return d


def scaled(a, b, scale_vector=".scale_vec::1X"):
    return Form(
        f"mma.sync.aligned.kind::mxf8f6f4.block_scale{scale_vector}.m16n8k32.row.col.f32.{a}.{b}.f32.ue8m0",
        a,
        b,
        32,
        scaled=True,
    )


def packed(kind, vector, scale_type, blocks, modifier=True):
    vector = f".scale_vec::{vector}" if modifier else ""
    opcode = f"mma.sync.aligned.kind::{kind}.block_scale{vector}.m16n8k64.row.col.f32.e2m1.e2m1.f32.{scale_type}"
    return Form(opcode, "e2m1", "e2m1", 64, scaled=True, blocks=blocks, scale_type=scale_type)


BF16 = Form("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "bf16", "bf16", 16)
F16 = Form("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "f16", "f16", 16)
F16_F16 = Form("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16", "f16", "f16", 16, accumulator="f16")
BF16_K8 = Form("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32", "bf16", "bf16", 8)
F16_K8 = Form("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32", "f16", "f16", 8)
F16_F16_K8 = Form("mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16", "f16", "f16", 8, accumulator="f16")
TF32 = Form("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", "tf32", "tf32", 8)
TF32_K4 = Form("mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32", "tf32", "tf32", 4)


def unscaled(a, b, accumulator="f32", depth=32, kind=".kind::f8f6f4"):
    types = f"{accumulator}.{a}.{b}.{accumulator}"
    return Form(f"mma.sync.aligned{kind}.m16n8k{depth}.row.col.{types}", a, b, depth, accumulator=accumulator)


SHAPE_FIRST = Form(
    "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e2m1.e4m3.f32.ue8m0",
    "e2m1",
    "e4m3",
    32,
    scaled=True,
)
CONTAINED = ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1")
E4M3, E5M2_F16 = unscaled("e4m3", "e4m3", kind=""), unscaled("e5m2", "e4m3", "f16", kind="")
E4M3_K16 = unscaled("e4m3", "e5m2", depth=16, kind="")
BYTES = [
    E4M3,
    E5M2_F16,
    E4M3_K16,
    unscaled("e4m3", "e4m3", "f16", 16),
    unscaled("e5m2", "e5m2", kind=""),
    unscaled("e4m3", "e5m2", "f16", kind=""),
]
MIXED = [unscaled(a, b, ("f32", "f16")[(i + j) % 2]) for i, a in enumerate(CONTAINED) for j, b in enumerate(CONTAINED)]
PLAIN = [BF16, F16, F16_F16, BF16_K8, F16_K8, F16_F16_K8, TF32, TF32_K4, *BYTES, *MIXED]
SCALED = [scaled(a, b) for a in CONTAINED for b in CONTAINED] + [scaled("e2m1", "e2m1", ""), SHAPE_FIRST]
MXF4 = packed("mxf4", "2X", "ue8m0", 2)
NVF4 = packed("mxf4nvf4", "4X", "ue4m3", 4)
PACKED = [MXF4, NVF4, packed("mxf4", "2X", "ue8m0", 2, modifier=False), packed("mxf4nvf4", "2X", "ue8m0", 2)]
ARITHMETICS = ["float64", "hardware"]


# Layout


def code_of(name, number):
    """The code of a non-negative number that the format can represent."""
    if number == 0:
        return 0
    _, mantissa_bits, bias, _ = FORMATS[name]
    exponent = math.frexp(number)[1] - 1
    code = ((exponent + bias - 1) << mantissa_bits) + int(number * 2.0 ** (mantissa_bits - exponent))
    assert value(name, code) == number
    return code


@pytest.mark.parametrize(
    "form",
    [
        BF16,
        F16,
        F16_F16,
        BF16_K8,
        TF32,
        TF32_K4,
        E4M3,
        E4M3_K16,
        unscaled("e2m1", "e3m2", "f16"),
        scaled("e4m3", "e4m3"),
        scaled("e2m1", "e4m3"),
        MXF4,
        NVF4,
    ],
    ids=repr,
)
def test_one_element_of_a_selects_a_row_of_b(execute, form):
    """A holds a single 1 per warp, at each place in turn. D's row equals the row of B selected by k, which identifies k
    and the column."""
    places = [(row, k) for row in range(16) for k in range(form.depth)]
    a = np.zeros((len(places), 16, form.depth), np.int64)
    for warp, (row, k) in enumerate(places):
        a[warp, row, k] = code_of(form.a, 1)
    # Powers of two and digits that e2m1 can represent: 0 to 3.
    for digit in (
        lambda k, n: k % 4,
        lambda k, n: k // 4 % 4,
        lambda k, n: k // 16,
        lambda k, n: n % 4,
        lambda k, n: n // 4,
    ):
        numbers = np.array([[digit(k, n) for n in range(8)] for k in range(form.depth)])
        codes = np.vectorize(lambda number: code_of(form.b, int(number)))(numbers)
        b = np.broadcast_to(codes, (len(places), form.depth, 8))
        d = form.run(execute, a, b, np.zeros((len(places), 16, 8), np.int64), "float64")
        for warp, (row, k) in enumerate(places):
            expected = np.zeros((16, 8), np.int64)
            expected[row] = [code_of(form.accumulator, int(number)) for number in numbers[k]]
            assert (d[warp] == expected).all(), (row, k)


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("form", [BF16, F16_F16], ids=repr)
def test_c_passes_at_its_place(execute, form, arithmetic):
    zero = np.zeros((1, 16, 16), np.int64)
    c = np.array(
        [
            [
                [
                    f32_bits(8 * row + column + 1) if form is BF16 else code_of("f16", 8 * row + column + 1)
                    for column in range(8)
                ]
                for row in range(16)
            ]
        ]
    )
    assert (form.run(execute, zero, zero[:, :, :8], c, arithmetic) == c).all()


def f32_bits(number):
    return int(np.float32(number).view(np.uint32))


# Named values


def uniform(form, execute, a, b, scale_a, scale_b, arithmetic="float64"):
    """D of one MMA over constant codes and scale bytes; checks that it is constant."""
    full = [np.full(32, 0x01010101 * byte, np.uint32) for byte in (scale_a, scale_b)]
    d = form.run(
        execute, np.full((1, 16, 32), a), np.full((1, 32, 8), b), np.zeros((1, 16, 8), np.int64), arithmetic, full
    )
    assert (d == d.flat[0]).all()
    return float(np.uint32(d.flat[0]).view(np.float32))


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_named_values(execute, arithmetic):
    e2m1 = scaled("e2m1", "e2m1")
    assert uniform(e2m1, execute, 2, 2, 127, 127, arithmetic) == 32.0  # all 1.0
    assert uniform(e2m1, execute, 4, 4, 127, 127, arithmetic) == 128.0  # all 2.0
    assert uniform(e2m1, execute, 2, 2, 130, 127, arithmetic) == 256.0  # A = 1.0 under scale 8
    assert uniform(scaled("e4m3", "e4m3"), execute, 0x38, 0x38, 127, 127, arithmetic) == 32.0
    assert uniform(scaled("e2m1", "e4m3"), execute, 2, 0x38, 127, 124, arithmetic) == 4.0


@pytest.mark.parametrize(
    "container, number", [(0x08, 1.0), (0x28, -1.0), (0x1C, 6.0), (0x04, 0.5), (0x20, 0.0), (0x3C, -6.0), (0x10, 2.0)]
)
def test_e2m1_lies_in_bits_5_to_2(execute, container, number):
    form = scaled("e2m1", "e2m1")
    a, b = np.zeros((1, 16, 32), np.int64), np.zeros((1, 32, 8), np.int64)
    a[0, 3, 5], b[0, 5, 2] = container, 0x08
    d = form.run_containers(execute, a, b, np.zeros((1, 16, 8), np.int64), "float64")
    expected = np.zeros((16, 8), np.float32)
    expected[3, 2] = number
    assert (d[0].astype(np.uint32).view(np.float32) == expected).all()


@pytest.mark.parametrize("container", [0x01, 0x02, 0x40, 0x80])
def test_bits_around_an_element_are_a_fault(execute, container):
    """The usual mistake leaves the nibble in bits 3..0."""
    form = scaled("e2m1", "e4m3")
    a, b = np.zeros((1, 16, 32), np.int64), np.zeros((1, 32, 8), np.int64)
    a[0, 9, 6] = container  # held by lane 4 * (9 % 8) + 6 // 4
    with pytest.raises(EmulatorFault, match=r"thread \(5, 0, 0\).*outside of the element"):
        form.run_containers(execute, a, b, np.zeros((1, 16, 8), np.int64), "float64")


# Scales


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("thread_b", range(4))
@pytest.mark.parametrize("thread_a", range(2))
def test_scales_come_from_the_selected_lanes(execute, thread_a, thread_b, arithmetic):
    """PTX ISA 9.7.14.3: which lane and byte scales row m and column n. Every other byte is NaN, so that a wrong read
    shows."""
    form = scaled("e4m3", "e4m3")
    byte_a, byte_b = (thread_a + thread_b) % 4, (3 - thread_b + thread_a) % 4
    words = np.full((2, 32, 4), 0xFF, np.uint8)
    for row in range(16):
        words[0, 4 * (row % 8) + 2 * thread_a + row // 8, byte_a] = 120 + row
    for column in range(8):
        words[1, 4 * column + thread_b, byte_b] = 110 + 3 * column
    one = np.full((1, 16, 32), 0x38)
    d = form.run(
        execute, one, np.full((1, 32, 8), 0x38), np.zeros((1, 16, 8), np.int64), arithmetic,
        words.view(np.uint32).reshape(2, 32), ((byte_a, thread_a), (byte_b, thread_b)),
    )  # fmt: skip
    expected = [[32.0 * 2.0 ** (120 + row + 110 + 3 * column - 254) for column in range(8)] for row in range(16)]
    assert (d[0].astype(np.uint32).view(np.float32) == np.array(expected, np.float32)).all()


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("form, byte_a, byte_b", [(MXF4, 0, 0), (MXF4, 0, 2), (MXF4, 2, 0), (NVF4, 0, 0)], ids=repr)
@pytest.mark.parametrize("thread_b", range(4))
@pytest.mark.parametrize("thread_a", range(2))
def test_packed_scales_come_from_the_selected_lanes(execute, thread_a, thread_b, form, byte_a, byte_b, arithmetic):
    """The same with several scales per row, in byte order. B has ones in one block of k at a time."""
    size = form.depth // form.blocks
    bias, nan = (127, 0xFF) if form.scale_type == "ue8m0" else (7, 0x7F)

    def code(exponent):
        return exponent + bias if form.scale_type == "ue8m0" else exponent + bias << 3

    for block in range(form.blocks):
        words = np.full((2, 32, 4), nan, np.uint8)
        for index in range(form.blocks):
            for row in range(16):
                words[0, 4 * (row % 8) + 2 * thread_a + row // 8, byte_a + index] = code(row // 4 - index)
            for column in range(8):
                words[1, 4 * column + thread_b, byte_b + index] = code(column // 2 + 2 * index - 4)
        a, b = np.full((1, 16, 64), 2), np.zeros((1, 64, 8), np.int64)
        b[:, block * size : (block + 1) * size] = 2
        selectors = (byte_a, thread_a), (byte_b, thread_b)
        d = form.run(
            execute, a, b, np.zeros((1, 16, 8), np.int64), arithmetic, words.view(np.uint32).reshape(2, 32), selectors
        )
        expected = [[size * 2.0 ** (row // 4 + block + column // 2 - 4) for column in range(8)] for row in range(16)]
        assert (d[0].astype(np.uint32).view(np.float32) == np.array(expected, np.float32)).all()


@pytest.mark.parametrize(
    "form, selectors",
    [(NVF4, ((1, 0), (0, 0))), (MXF4, ((0, 0), (1, 0))), (MXF4, ((0, 2), (0, 0))), (NVF4, ((0, 0), (0, 4)))],
)
def test_selectors_that_a_kind_does_not_have_are_a_fault(execute, form, selectors):
    zero = np.zeros((1, 16, 64), np.int64)
    with pytest.raises(EmulatorFault, match="of a block-scaled mma is one of"):
        form.run(execute, zero, zero.reshape(1, 64, 16)[..., :8], zero[..., :8], "float64", selectors=selectors)


# Sums


def scale_parts(form, code):
    """(significand, exponent) of a scale."""
    if form.scale_type == "ue8m0":
        return 1, code - 127
    return parts("ue4m3", code & 0x7F)


def scaled_sums(form, a, b, scales):
    """For each block of k the exact sum of its products, and the product of its two scales as (significand,
    exponent)."""
    size = form.depth // form.blocks
    for block, (code_a, code_b) in enumerate(scales):
        here = slice(block * size, (block + 1) * size)
        (sa, ea), (sb, eb) = scale_parts(form, code_a), scale_parts(form, code_b)
        yield sum(value(form.a, x) * value(form.b, y) for x, y in zip(a[here], b[here])), sa * sb, ea + eb


def exact_reference(form, a, b, c, scales):
    """C + A B in fractions, rounded to float64 and then to the type of D."""
    total = value(form.accumulator, c) + sum(
        products * factor * power(exponent) for products, factor, exponent in scaled_sums(form, a, b, scales)
    )
    nearest = float(total)  # Python rounds a Fraction to float64 to nearest even
    with np.errstate(over="ignore"):
        if form.accumulator == "f16":
            return int(np.float64(nearest).astype(np.float16).view(np.uint16))
        return int(np.float64(nearest).astype(np.float32).view(np.uint32))


def packed_hardware_reference(form, a, b, c, scales):
    """Exact sums of 16 products; alignment to the largest exponent of scales and C; truncation at 35 fractional
    bits."""
    significand, exponent = parts("f32", c)
    terms = [(significand, exponent if significand else -126)]
    for group in range(4):
        here, (code_a, code_b) = slice(16 * group, 16 * group + 16), scales[group * form.blocks // 4]
        products = sum(value("e2m1", x) * value("e2m1", y) for x, y in zip(a[here], b[here]))
        (sa, ea), (sb, eb) = scale_parts(form, code_a), scale_parts(form, code_b)
        terms.append((products * sa * sb, (ea if sa else -126) + (eb if sb else -126)))
    largest = max(exponent for _, exponent in terms)
    total = sum(int(significand * power(35 + exponent - largest)) for significand, exponent in terms)  # int() truncates
    return truncated(total * power(largest - 35), "f32")


def hardware_reference(form, a, b, c, scales):
    """Alignment to the largest exponent; truncation at 25 fractional bits; exact sum; truncation to D (RNE for f16)."""
    if form.width == 8:
        return packed_hardware_reference(form, a, b, c, scales)
    scale = sum(scale_parts(form, code)[1] for code in scales[0])
    terms = [parts(form.accumulator, c)]
    for x, y in zip(a, b):
        (sx, ex), (sy, ey) = parts(form.a, x), parts(form.b, y)
        terms.append((sx * sy, ex + ey + scale))
    terms = [(significand, exponent if significand else -126) for significand, exponent in terms]
    largest = max(exponent for _, exponent in terms)
    total = sum(int(significand * power(25 + exponent - largest)) for significand, exponent in terms)  # int() truncates
    return truncated(total * power(largest - 25), form.accumulator)


def truncated(number, name):
    """Bits of a fraction truncated to f32, or rounded to f16."""
    exponent_bits, mantissa_bits, bias, _ = FORMATS[name]
    magnitude = abs(number)
    if not number:
        return 0
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent = max(exponent - (magnitude < power(exponent)), 1 - bias)
    steps = magnitude / power(exponent - mantissa_bits)
    steps = round(steps) if name == "f16" else int(steps)  # round() rounds to even
    if steps == 2 << mantissa_bits:
        steps, exponent = steps // 2, exponent + 1
    if exponent > bias:
        steps, exponent = 1 << mantissa_bits, bias + 1  # infinity
    code = steps + ((exponent + bias - 1) << mantissa_bits)
    return code | ((1 << (exponent_bits + mantissa_bits)) if number < 0 and steps else 0)


REFERENCES = {"float64": exact_reference, "hardware": hardware_reference}


@cache
def finite_codes(name):
    bits = 1 + sum(FORMATS[name][:2])
    codes = np.arange(1 << min(bits, 16)) if bits < 19 else np.r_[0, 1, 2 : 1 << bits : 61]
    return np.array([code for code in codes.tolist() if parts(name, code)])


def narrow(generator, name, shape):
    """Codes of a type with magnitudes around one."""
    exponent_bits, mantissa_bits, bias, _ = FORMATS[name]
    if name in ("f32", "bf16", "f16", "tf32"):
        numbers = generator.standard_normal(shape).astype(np.float32)
        if name == "f16":
            return numbers.astype(np.float16).view(np.uint16).astype(np.int64)
        return (numbers.view(np.uint32) >> {"bf16": 16, "tf32": 13, "f32": 0}[name]).astype(np.int64)
    return generator.choice(finite_codes(name), shape)


def tiles(form, generator, kind):
    """Codes of A, B and C, and scale exponents, for two warps."""
    shape_a, shape_b, shape_c = (2, 16, form.depth), (2, form.depth, 8), (2, 16, 8)
    a, b, c = (
        narrow(generator, form.a, shape_a),
        narrow(generator, form.b, shape_b),
        narrow(generator, form.accumulator, shape_c),
    )
    scales = generator.integers(
        *((120, 134) if form.scale_type == "ue8m0" else (0x28, 0x48)), (2, 2, 32, 4), dtype=np.uint8
    )
    if kind == "wide":  # any finite code, including subnormals and zeros
        a, b = generator.choice(finite_codes(form.a), shape_a), generator.choice(finite_codes(form.b), shape_b)
        if form.accumulator == "f32":
            c = np.where(
                np.isfinite((bits := generator.integers(0, 1 << 32, shape_c, dtype=np.uint32)).view(np.float32)),
                bits,
                0,
            ).astype(np.int64)
        scales = generator.integers(0, 255, (2, 2, 32, 4), dtype=np.uint8)
        scales[scales == 0x7F] = 0 if form.scale_type == "ue4m3" else 0x7F
    if kind == "cancelling":  # the second half of the products cancels the first, except for one small term
        half = form.depth // 2
        a[..., half:] = a[..., :half]
        b[:, half:] = b[:, :half] ^ (1 << sum(FORMATS[form.b][:2]))
        a[..., -1] = finite_codes(form.a)[1]
        c[:] = generator.choice([0, 1, 0x80000001 if form.accumulator == "f32" else 0x8001], shape_c)
    if kind == "far apart":  # C or one product is far larger than the rest
        shift = {"f32": 23, "f16": 10}[form.accumulator]
        c = (c & ~(0xFF << 23)) | (generator.integers(100, 160, shape_c) << shift) if form.accumulator == "f32" else c
    if kind == "tied":  # sums halfway between two f32
        one = code_of(form.a, 1)
        a[:], b[:] = 0, 0
        a[..., 0], b[:, 0] = one, code_of(form.b, 1)
        a[..., 1], b[:, 1] = 1, 1
        c = (
            generator.integers(0x3F800000, 0x3F800008, shape_c)
            if form.accumulator == "f32"
            else generator.integers(0x6800, 0x6808, shape_c)
        )
    return a, b, c, scales


@pytest.mark.parametrize("kind", ["narrow", "wide", "cancelling", "far apart", "tied"])
@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("form", [*PLAIN, *SCALED, *PACKED], ids=repr)
def test_sums_equal_fractions(execute, form, arithmetic, kind):
    generator = np.random.default_rng(sum(map(ord, form.opcode + kind)))
    a, b, c, scales = tiles(form, generator, kind)
    check(execute, form, arithmetic, a, b, c, scales)


def check(execute, form, arithmetic, a, b, c, scales):
    d = form.run(execute, a, b, c, arithmetic, scales.view(np.uint32).reshape(2, -1))
    reference = REFERENCES[arithmetic]
    wrong = []
    for warp in range(len(a)):
        for row in range(16):
            for column in range(8):
                codes = [(127, 127)]
                if form.scaled:
                    of_row, of_column = scales[0, warp, 4 * (row % 8) + row // 8], scales[1, warp, 4 * column]
                    codes = list(zip(of_row[: form.blocks].tolist(), of_column[: form.blocks].tolist()))
                arguments = a[warp, row].tolist(), b[warp, :, column].tolist(), int(c[warp, row, column]), codes
                expected = reference(form, *arguments)
                found = int(d[warp, row, column])
                sign = 0x80000000 if form.accumulator == "f32" else 0x8000
                if found != expected and {found, expected} != {0, sign}:
                    wrong.append((warp, row, column, hex(found), hex(expected), arguments))
    assert not wrong, f"{len(wrong)} wrong, first: {wrong[0]}"


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_bits_equal_fractions(execute, data):
    form = data.draw(st.sampled_from([BF16, F16, scaled("e4m3", "e2m1"), scaled("e5m2", "e3m2"), MXF4, NVF4]))
    arithmetic = data.draw(st.sampled_from(ARITHMETICS))
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    pool_a = generator.choice(finite_codes(form.a), 4)
    pool_b = generator.choice(finite_codes(form.b), 4)
    a, b = generator.choice(pool_a, (1, 16, form.depth)), generator.choice(pool_b, (1, form.depth, 8))
    pool_c = [code for code in generator.integers(0, 1 << 32, 8).tolist() if parts("f32", code)] + [0]
    c = generator.choice(pool_c, (1, 16, 8))
    limits = (60, 190) if form.scale_type == "ue8m0" else (0, 127)
    scales = generator.integers(*limits, (2, 1, 32, 4), dtype=np.uint8)
    check(execute, form, arithmetic, a, b, c, scales)


# Infinities and NaN


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_nan_is_canonical_and_stays_in_its_row_and_column(execute, arithmetic):
    one = 0x3F80
    a, b, c = np.full((1, 16, 16), one), np.full((1, 16, 8), one), np.zeros((1, 16, 8), np.int64)
    a[0, 2, 3], b[0, 5, 4], c[0, 9, 1] = 0xFFC1, 0x7F81, 0xFF800123
    d = BF16.run(execute, a, b, c, arithmetic)[0]
    expected = np.full((16, 8), f32_bits(16.0))
    expected[2], expected[:, 4], expected[9, 1] = 0x7FFFFFFF, 0x7FFFFFFF, 0x7FFFFFFF
    assert (d == expected).all()


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_infinities(execute, arithmetic):
    one, infinity = 0x3F80, 0x7F80
    a, b, c = np.full((1, 16, 16), one), np.full((1, 16, 8), one), np.zeros((1, 16, 8), np.int64)
    a[0, 0, 0] = infinity  # row 0: +inf
    a[0, 1, 0], a[0, 1, 1] = infinity, infinity | 0x8000  # row 1: inf - inf
    a[0, 2, 0], b[0, 0, 3] = infinity, 0  # row 2, column 3: inf * 0
    c[0, 3, 0] = 0xFF800000
    d = BF16.run(execute, a, b, c, arithmetic)[0]
    expected = np.full((16, 8), f32_bits(16.0))
    expected[:, 3] = f32_bits(15.0)
    expected[0] = expected[2] = 0x7F800000
    expected[1] = 0x7FFFFFFF
    expected[0, 3] = expected[2, 3] = 0x7FFFFFFF
    expected[3, 0] = 0xFF800000
    assert (d == expected).all()


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_a_nan_scale_poisons_its_row_or_column(execute, arithmetic):
    """Also if every element is zero."""
    form = scaled("e2m1", "e4m3")
    scales = np.full((2, 32, 4), 127, np.uint8)
    scales[0, 4 * 5 + 1, 0] = 0xFF  # row 13
    scales[1, 4 * 2, 0] = 0xFF  # column 2
    zero = np.zeros((1, 16, 32), np.int64)
    d = form.run(
        execute,
        zero,
        zero.reshape(1, 32, 16)[..., :8],
        zero[..., :8],
        arithmetic,
        scales.view(np.uint32).reshape(2, 32),
    )[0]
    expected = np.zeros((16, 8), np.int64)
    expected[13], expected[:, 2] = 0x7FFFFFFF, 0x7FFFFFFF
    assert (d == expected).all()


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("form", [MXF4, NVF4], ids=repr)
def test_a_nan_scale_of_any_block_poisons(execute, form, arithmetic):
    """On a ue4m3 scale, NaN or not, the sign bit has no effect. Zero and the smallest scale are numbers."""
    nan, unit = (0xFF, 127) if form is MXF4 else (0x7F, 0x38)
    scales = np.full((2, 32, 4), unit, np.uint8)
    scales[0, 4 * 5 + 1, form.blocks - 1] = nan  # row 13
    scales[1, 4 * 2, 0] = nan  # column 2
    scales[0, 0, 0] = 0  # row 0
    if form is NVF4:
        scales[0, 4 * 3, :] |= 0x80  # row 3
        scales[0, 4 * 4, 0] = 0xFF  # row 4
    one = np.full((1, 16, 64), 2)
    d = form.run(
        execute,
        one,
        one.reshape(1, 64, 16)[..., :8],
        np.zeros((1, 16, 8), np.int64),
        arithmetic,
        scales.view(np.uint32).reshape(2, 32),
    )[0]
    expected = np.full((16, 8), f32_bits(64.0))
    expected[0] = (
        f32_bits(48.0) if form is NVF4 else f32_bits(32.0 + 2.0**-122) if arithmetic == "float64" else f32_bits(32.0)
    )
    expected[13], expected[:, 2] = 0x7FFFFFFF, 0x7FFFFFFF
    if form is NVF4:
        expected[4] = 0x7FFFFFFF
    assert (d == expected).all()


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("form", [MXF4, NVF4], ids=repr)
def test_infinities_of_c_pass_a_packed_mma(execute, form, arithmetic):
    zero, c = np.zeros((1, 16, 64), np.int64), np.zeros((1, 16, 8), np.int64)
    c[0, 1, 2], c[0, 3, 4], c[0, 5, 6] = 0x7F800000, 0xFF800000, 0x7FC00001
    d = form.run(execute, zero, zero.reshape(1, 64, 16)[..., :8], c, arithmetic)[0]
    c[0, 5, 6] = 0x7FFFFFFF
    assert (d == c[0]).all()


def test_far_apart_blocks_are_summed_exactly(execute):
    """Under float64 arithmetic 2^100 + 2^-100 - 2^100 gives 2^-100, as the exact sum rounded once does."""
    scales = np.full((2, 32, 4), 127, np.uint8)
    scales[0, :, 0], scales[0, :, 1] = 227, 27
    a, b, c = (
        np.zeros((1, 16, 64), np.int64),
        np.zeros((1, 64, 8), np.int64),
        np.full((1, 16, 8), f32_bits(-(2.0**100))),
    )
    a[0, :, 0] = a[0, :, 63] = b[0, 0] = b[0, 63] = 2
    d = MXF4.run(execute, a, b, c, "float64", scales.view(np.uint32).reshape(2, 32))
    assert (d == f32_bits(2.0**-100)).all()


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_nan_of_e4m3_and_of_f16_accumulators(execute, arithmetic):
    form = scaled("e4m3", "e4m3")
    a = np.full((1, 16, 32), 0x38)
    a[0, 7, 31] = 0xFF
    d = form.run(execute, a, np.full((1, 32, 8), 0x38), np.zeros((1, 16, 8), np.int64), arithmetic)[0]
    assert (d[7] == 0x7FFFFFFF).all() and (np.delete(d, 7, 0) == f32_bits(32)).all()
    c = np.zeros((1, 16, 8), np.int64)
    c[0, 0, 0] = 0xFE00
    zero = np.zeros((1, 16, 16), np.int64)
    d = F16_F16.run(execute, zero, zero[..., :8], c, arithmetic)[0]
    assert d[0, 0] == 0x7FFF and not d.flat[1:].any()


# Underflow with f16 accumulators, lower bits of tf32


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("form", [F16_F16, F16_F16_K8, E5M2_F16], ids=repr)
def test_a_negative_sum_that_underflows_f16_is_positive_zero(execute, form, arithmetic):
    """-2^-14 times 2^-14, as on an H200; the smallest sum that does not underflow keeps its sign."""
    a, b, c = (
        np.zeros((1, 16, form.depth), np.int64),
        np.zeros((1, form.depth, 8), np.int64),
        np.zeros((1, 16, 8), np.int64),
    )
    sign = 1 << sum(FORMATS[form.a][:2])
    tiny = {"f16": (2.0**-14, 2.0**-14), "e5m2": (2.0**-16, 2.0**-9)}[form.a]  # e4m3's smallest value is 2^-9
    a[0, :, 0], b[0, 0] = code_of_tiny(form.a, tiny[0]) | sign, code_of_tiny(form.b, tiny[1])
    assert (form.run(execute, a, b, c, arithmetic) == 0).all()
    a[0, :, 0] = code_of(form.a, 1) | sign
    b[0, 0] = code_of(form.b, 1)
    assert (form.run(execute, a, b, c, arithmetic) == 0xBC00).all()


def code_of_tiny(name, number):
    """The code of a positive number, possibly subnormal."""
    return next(code for code in finite_codes(name).tolist() if value(name, code) == Fraction(number))


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("form", [BF16, BF16_K8, TF32, TF32_K4], ids=repr)
def test_a_product_with_a_zero_does_not_align_a_sum(execute, form, arithmetic):
    """0 times 2^127 plus 2^-130, which an H200 preserves (bf16, measured)."""
    a, b, c = (
        np.zeros((1, 16, form.depth), np.int64),
        np.zeros((1, form.depth, 8), np.int64),
        np.zeros((1, 16, 8), np.int64),
    )
    a[0, :, 0], b[0, 0] = code_of(form.a, 2.0**-65), code_of(form.b, 2.0**-65)
    b[0, 1] = code_of(form.b, 2.0**127)
    assert (form.run(execute, a, b, c, arithmetic) == f32_bits(2.0**-130)).all()


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_the_lower_bits_of_tf32_are_ignored(execute, arithmetic):
    class Whole(Form):
        def run(self, execute, a, b, c, arithmetic):
            return self.run_containers(execute, a, b, c, arithmetic)

    form = Whole(TF32.opcode, "tf32", "tf32", 8)
    one = np.full((1, 16, 8), 0x3F800000)
    exact = form.run(execute, one, one.reshape(1, 8, 16)[..., :8], np.zeros((1, 16, 8), np.int64), arithmetic)
    more = form.run(
        execute, one | 0x1FFF, one.reshape(1, 8, 16)[..., :8] | 0x1FFF, np.zeros((1, 16, 8), np.int64), arithmetic
    )
    assert (exact == f32_bits(8.0)).all() and (more == exact).all()


# Integers and f64


@pytest.mark.parametrize("saturates", ["", ".satfinite"])
@pytest.mark.parametrize("depth", [32, 16])
@pytest.mark.parametrize("a_type, b_type", [("s8", "s8"), ("u8", "u8"), ("s8", "u8"), ("u8", "s8")])
def test_bytes(execute, rng, a_type, b_type, depth, saturates):
    """Against Python integers: random and largest bytes, with accumulators at both ends of the range."""
    warps = 4
    a, b = rng.integers(0, 256, (warps, 16, depth)), rng.integers(0, 256, (warps, depth, 8))
    a[1], b[1] = 0x80 if a_type == "s8" else 0xFF, 0x80 if b_type == "s8" else 0xFF
    a[2], b[2] = 0x7F if a_type == "s8" else 0xFF, 0x80 if b_type == "s8" else 0xFF
    c = rng.integers(-(2**31), 2**31, (warps, 16, 8))
    c[1], c[2] = 2**31 - 1 - rng.integers(0, 9, (16, 8)), -(2**31) + rng.integers(0, 9, (16, 8))
    registers, outputs = {}, {f"d{i}": "b32" for i in range(4)}
    for name, matrix, place, count in (("a", a, place_a, depth // 2), ("b", b, place_b, depth // 4)):
        for index, word in enumerate(pack(fragment(matrix, place, depth, 4, count), 4)):
            registers[f"{name}{index}"] = ("b32", word)
    lanes = np.stack(
        [c[:, [place_c(lane, i)[0] for lane in LANES], [place_c(lane, i)[1] for lane in LANES]] for i in range(4)]
    )
    registers |= {f"c{i}": ("b32", lanes[i].reshape(-1).astype(np.int32).view(np.uint32)) for i in range(4)}
    vectors = [
        "{" + ", ".join(f"%{name}" for name in names if name[0] == kind) + "}"
        for names, kind in ((outputs, "d"), *((registers, kind) for kind in "abc"))
    ]
    found = execute(
        f"mma.sync.aligned.m16n8k{depth}.row.col{saturates}.s32.{a_type}.{b_type}.s32 {', '.join(vectors)};",
        registers,
        outputs,
    )

    def number(byte, type_):
        return byte - 256 if type_ == "s8" and byte > 127 else byte

    for warp in range(warps):
        for lane in LANES:
            for i in range(4):
                row, column = place_c(lane, i)
                total = int(c[warp, row, column])
                total += sum(
                    number(int(x), a_type) * number(int(y), b_type) for x, y in zip(a[warp, row], b[warp, :, column])
                )
                total = min(max(total, -(2**31)), 2**31 - 1) if saturates else (total + 2**31) % 2**32 - 2**31
                assert int(found[f"d{i}"].view(np.int32)[32 * warp + lane]) == total


def test_doubles(execute, rng):
    """m8n8k4, against fractions: a chain of multiply-adds starting at C, in the order of k, each rounded once."""
    warps = 3
    a, b = rng.standard_normal((warps, 8, 4)), rng.standard_normal((warps, 4, 8))
    a *= np.exp2(rng.integers(-30, 30, a.shape))
    c = rng.standard_normal((warps, 8, 8))
    c[1] = -(a[1][:, :1] * b[1][:1])  # cancels the first product
    a[2, 3, 1], b[2, 2, 5], c[2, 7, 7] = np.inf, np.nan, -np.inf
    lane = np.arange(32)
    group, thread = lane >> 2, lane % 4
    registers = {"a0": ("f64", a[:, group, thread].reshape(-1)), "b0": ("f64", b[:, thread, group].reshape(-1))}
    registers |= {f"c{i}": ("f64", c[:, group, 2 * thread + i].reshape(-1)) for i in range(2)}
    found = execute(
        "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%d0, %d1}, {%a0}, {%b0}, {%c0, %c1};",
        registers,
        {"d0": "f64", "d1": "f64"},
    )
    for warp in range(warps):
        for row in range(8):
            for column in range(8):
                got = found[f"d{column % 2}"][32 * warp + 4 * row + column // 2]
                terms = [(a[warp, row, k], b[warp, k, column]) for k in range(4)]
                total = c[warp, row, column]
                if np.isfinite([total, *map(float, np.ravel(terms))]).all():
                    for x, y in terms:
                        total = float(Fraction(float(total)) + Fraction(float(x)) * Fraction(float(y)))
                    assert got == total
                else:
                    with np.errstate(invalid="ignore"):
                        plain = total + sum(x * y for x, y in terms)
                    assert np.array_equal(got, plain, equal_nan=True)
                    assert not np.isnan(got) or got.view(np.uint64) == 0x7FF8000000000000


# Refusals


@pytest.mark.parametrize(
    "opcode",
    [
        "m16n8k16.row.col.f32.tf32.tf32.f32",
        "m16n8k8.row.col.f16.tf32.tf32.f16",
        "m16n8k16.row.col.f16.bf16.bf16.f16",
        "m16n8k16.col.row.f32.bf16.bf16.f32",
        "m16n8k32.row.col.f32.e4m3.e4m3.f16",
        "m16n8k32.row.col.f32.e4m3.e2m1.f32",
        "m16n8k32.row.col.satfinite.f32.e4m3.e4m3.f32",
        "m16n8k32.row.col.f32.f16.f16.f32",
        "m16n8k64.row.col.s32.s8.s8.s32",
        "m16n8k32.row.col.s32.s8.e4m3.s32",
        "m16n8k64.row.col.s32.s4.s4.s32",
        "m8n8k4.row.col.f64.f64.f64.f32",
        "m16n8k8.row.col.f64.f64.f64.f64",
        "kind::mxf8f6f4.block_scale.scale_vec::2X.m16n8k32.row.col.f32.e4m3.e4m3.f32.ue8m0",
        "kind::mxf8f6f4.block_scale.m16n8k32.row.col.f32.e4m3.e4m3.f32.ue4m3",
        "kind::mxf8f6f4.block_scale.m16n8k32.row.col.f16.e4m3.e4m3.f16.ue8m0",
        "kind::mxf4.block_scale.scale_vec::1X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue8m0",
        "kind::mxf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue8m0",
        "kind::mxf4.block_scale.scale_vec::2X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3",
        "kind::mxf4.block_scale.scale_vec::2X.m16n8k32.row.col.f32.e2m1.e2m1.f32.ue8m0",
        "kind::mxf4.block_scale.scale_vec::2X.m16n8k64.row.col.f32.e4m3.e2m1.f32.ue8m0",
        "kind::mxf4nvf4.block_scale.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3",
        "kind::mxf4nvf4.block_scale.scale_vec::2X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3",
        "kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue8m0",
        "kind::mxf4nvf4.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3",
        "kind::f8f6f4.m16n8k64.row.col.f32.e2m1.e2m1.f32",
        "kind::f8f6f4.m16n8k16.row.col.f32.e2m1.e2m1.f32",
        "kind::f8f6f4.m16n8k16.row.col.f32.bf16.bf16.f32",
        "kind::mxf8f6f4.m16n8k32.row.col.f32.e4m3.e4m3.f32.ue8m0",
    ],
)
def test_other_forms_are_refused_by_name(opcode):
    with pytest.raises(Unsupported, match=f"mma.sync.aligned.{opcode} is not implemented"):
        resolve(f"mma.sync.aligned.{opcode}")
