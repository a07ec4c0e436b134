"""Kernels that probe the hardware: identity registers, scores before the softmax, rates and layouts of MMAs."""

from typing import NamedTuple

import numpy as np

from .. import given_registers
from ..accuracy import Tolerance
from ..atlas import KINDS, Kind, fragment_place, output_place, scale_lane
from ..blocks import mxfp4
from ..declaration import Case, In, Out, Scalar
from ..formats import bf16, e2m1, e2m1x2, e4m3, f16, f32, i32, u8, u32
from ..kernel import Kernel, kernel

IDENTITY_BLOCK = (8, 4, 3)
# Head dimensions whose scores are probed: a row has half a word of scales, one word, one and a half, and two.
SCORE_DIMS = (64, 128, 192, 256)


@kernel(
    grid="blocks_x blocks_y blocks_z",
    fixed=dict(threads=96),
    cases=[dict(blocks_x=1, blocks_y=1, blocks_z=1), dict(blocks_x=3, blocks_y=2, blocks_z=4)],
)
def thread_identity(identity: Out[i32, "blocks_z blocks_y blocks_x threads 16"]):
    """Report the identity registers of every thread, in blocks of 8 x 4 x 3 threads.

    The last axis holds tid, ntid, ctaid and nctaid (x, y, z each), laneid, lanemask_eq, lanemask_lt and the linear
    index of the thread in its block; threads are ordered by that index. %warpid is left out, because it is the slot in
    which a warp runs and differs between machines: on an H200 the first warp of a block can have 3. Source: PTX ISA,
    special registers.
    """
    blocks = identity.shape[2::-1]
    thread = np.arange(identity.shape[3])
    z, y, x = np.unravel_index(thread, IDENTITY_BLOCK[::-1])
    lane = thread % 32
    identity[..., 0], identity[..., 1], identity[..., 2] = x, y, z
    identity[..., 3:6] = IDENTITY_BLOCK
    for field, axis in zip((6, 7, 8), (2, 1, 0)):
        identity[..., field] = np.expand_dims(np.arange(identity.shape[axis]), [a for a in range(4) if a != axis])
    identity[..., 9:12] = blocks
    identity[..., 12] = lane
    identity[..., 13] = (np.int64(1) << lane).astype(np.int32)
    identity[..., 14] = ((np.int64(1) << lane) - 1).astype(np.int32)
    identity[..., 15] = thread


@kernel(
    grid="heads queries batch",
    variants=dict(dim=SCORE_DIMS),
    cases=[dict(batch=1, heads=1, queries=70, keys=130, dim=dim) for dim in SCORE_DIMS]
    + [
        dict(batch=1, heads=2, queries=64, keys=64, dim=64, format="bf16"),
        dict(batch=2, heads=1, queries=1, keys=1, dim=64, format="f32"),
    ],
    tolerance=Tolerance(
        "products are exact; float32 sums of up to 256 of them, truncated by the tensor cores",
        relative_l2=1e-5,
        cosine=1 - 1e-9,
        gain=1e-5,
    ),
    flops="2*batch*heads*queries*keys*dim",
)
def probe_scores_mxfp4(
    q: In[f32 | f16 | bf16, "batch heads queries dim"],
    k: In[f32 | f16 | bf16, "batch heads keys dim"],
    scores: Out[f32, "batch heads queries keys"],
):
    """Compute the unscaled scores Q K^T of MXFP4-quantized Q and K with the tile code of attention.

    Q and K are quantized as `quantize_mxfp4` does. A NaN or an infinity in a block makes the whole row of scores (for
    Q) or column of scores (for K) NaN.
    """
    q, k = (mxfp4.decode(*mxfp4.encode(x)).astype(np.float64) for x in (q, k))
    scores[:] = q @ np.swapaxes(k, -1, -2)


# Small integers, so that sums are exact in any order and precision.
def _small_integers(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    return rng.integers(-4, 5, shape).astype(member.dtype)


def _containers(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    return rng.integers(0, 16, shape, dtype=np.uint8) << np.uint8(2)


def _integer_codes(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    """e4m3 codes of the integers with four bits."""
    return e4m3.encode(rng.integers(-15, 16, shape).astype(np.float32))


def _any_bytes(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    return rng.integers(0, 256, shape, dtype=np.uint8)


def _packed_values(codes: np.ndarray) -> np.ndarray:
    """Values of e2m1 codes, two to a byte, the first in the low nibble."""
    return e2m1.values[np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)].astype(np.float64)


def _chains(a: np.ndarray, b: np.ndarray, flip: int, steps: int, values) -> np.ndarray:
    """Return the sums [8, 16, 8] of A B over steps, float64. After each step the bits `flip` of A's 32-bit words
    change. values: decodes the stored operands."""
    flipped = (np.ascontiguousarray(a).view(np.uint32) ^ np.uint32(flip)).view(a.dtype)
    both = [np.einsum("imk,jnk->ijmn", values(left), values(b)) for left in (a, flipped)]
    return ((steps + 1) // 2 * both[0] + steps // 2 * both[1]).reshape(8, 16, 8)


def _declare_rate(depth: int, draw, cases):
    """Return the decorator of a probe of an MMA of this depth, with its flops."""
    return kernel(
        grid="blocks",
        fixed=dict(warps=8),
        cases=[dict(blocks=blocks, steps=steps, flip=flip) for blocks, steps, flip in cases],
        flops=lambda *, blocks, warps, steps, flip: 2 * 16 * 8 * depth * 8 * int(steps) * warps * blocks,
        draw=dict(a=draw, b=draw),
    )


@_declare_rate(16, _small_integers, [(1, 1, 0), (2, 5, 0x80000000), (1, 4, 0x00008000)])
def mma_rate_bf16(
    a: In[bf16, "2 16 16"],
    b: In[bf16, "4 8 16"],
    c: Out[f32, "blocks warps 8 16 8"],
    *,
    steps: Scalar[i32],
    flip: Scalar[u32] = 0x80008000,
):
    """Multiply 2 fragments of A with 4 of B, `steps` times, by mma.m16n8k16 on registers alone, to time the
    instruction.

    Each of 8 warps of a block sums 8 chains: chain 4 i + j is the sum of A[i] (rows x k) times B[j] (columns x k).
    After each step the bits `flip` of every 32-bit word of A change, so that consecutive steps differ.
    """
    c[:] = _chains(a, b, flip, steps, lambda x: x.astype(np.float64))


@_declare_rate(32, _containers, [(1, 1, 0), (2, 5, 0x00200004), (1, 4, 0x20000000)])
def mma_rate_mxf8f6f4_e2m1(
    a: In[u8, "2 16 32"],
    b: In[u8, "4 8 32"],
    c: Out[f32, "blocks warps 8 16 8"],
    *,
    steps: Scalar[i32],
    flip: Scalar[u32] = 0x20202020,
):
    """Do as `mma_rate_bf16` with mma.m16n8k32 of kind::mxf8f6f4 on e2m1 codes in bits 5 to 2 of bytes, all scales 1.

    On the portable machine this measures the substitute: f16 MMAs and the conversion of their operands.
    """
    c[:] = _chains(a, b, flip, steps, lambda x: e2m1.values[x >> 2 & 15].astype(np.float64))


@_declare_rate(32, _integer_codes, [(1, 1, 0), (2, 5, 0x00200004), (1, 4, 0x20000000)])
def mma_rate_mxf8f6f4_e4m3(
    a: In[u8, "2 16 32"],
    b: In[u8, "4 8 32"],
    c: Out[f32, "blocks warps 8 16 8"],
    *,
    steps: Scalar[i32],
    flip: Scalar[u32] = 0x80808080,
):
    """Do as `mma_rate_bf16` with mma.m16n8k32 of kind::mxf8f6f4 on e4m3 codes, all scales 1.

    On the portable machine this measures the substitute: f16 MMAs and the conversion of their operands.
    """
    c[:] = _chains(a, b, flip, steps, lambda x: e4m3.values[x].astype(np.float64))


@_declare_rate(64, _any_bytes, [(1, 1, 0), (2, 5, 0x00800001), (1, 4, 0x20000000)])
def mma_rate_mxf4(
    a: In[e2m1x2, "2 16 32"],
    b: In[e2m1x2, "4 8 32"],
    c: Out[f32, "blocks warps 8 16 8"],
    *,
    steps: Scalar[i32],
    flip: Scalar[u32] = 0x88888888,
):
    """Do as `mma_rate_bf16` with mma.m16n8k64 of kind::mxf4 on pairs of e2m1 codes, all scales 1.

    On the portable machine this measures the substitute: f16 MMAs and the conversion of their operands.
    """
    c[:] = _chains(a, b, flip, steps, _packed_values)


@_declare_rate(64, _any_bytes, [(1, 1, 0), (2, 5, 0x00800001), (1, 4, 0x20000000)])
def mma_rate_mxf4nvf4(
    a: In[e2m1x2, "2 16 32"],
    b: In[e2m1x2, "4 8 32"],
    c: Out[f32, "blocks warps 8 16 8"],
    *,
    steps: Scalar[i32],
    flip: Scalar[u32] = 0x88888888,
):
    """Do as `mma_rate_mxf4` with mma.m16n8k64 of kind::mxf4nvf4, all scales 1 in ue4m3.

    On the portable machine this measures the substitute: f16 MMAs and the conversion of their operands.
    """
    c[:] = _chains(a, b, flip, steps, _packed_values)


# Layouts of MMAs, found by experiment. Elements of an operand are numbered by lane, then register, then position in the
# register from the lowest bits on; scales by lane, then byte of the scale register.


def _meets(width):
    """Return for each element of A and each output the element of B that is multiplied with A's and added to this
    output, or -1: (elements, 32, 4)."""
    depth = 8 * width
    row_a, k_a = fragment_place(np.arange(128 * width), width, 4, depth)
    element_b = np.arange(64 * width)
    column_b, k_b = fragment_place(element_b, width, 2, depth)
    at = np.empty((depth, 8), np.int32)
    at[k_b, column_b] = element_b
    row, column = output_place(*np.meshgrid(np.arange(32), np.arange(4), indexing="ij"))
    return np.where(row == row_a[:, None, None], at[k_a[:, None, None], column], -1)


def _scale_numbers(operand, width, blocks):
    """Return the number of the scale of each register's elements, by selectors: (byte selectors, thread selectors,
    registers). blocks: scales of a row.

    Source: PTX ISA 9.0, 9.7.14.3.
    """
    registers, threads = (4, 2) if operand == "a" else (2, 4)
    row, k = fragment_place(width * np.arange(32 * registers), width, registers, 8 * width)
    byte = np.arange(0, 4, blocks)[:, None, None] + k * blocks // (8 * width)
    thread = np.arange(threads)[:, None]
    return 4 * scale_lane(operand, row, thread) + byte


@kernel(grid="elements_a", fixed=dict(elements_a=256), cases=[dict()])
def probe_mma_bf16(meets: Out[i32, "elements_a 32 4"]):
    """Find which elements mma.sync m16n8k16 of bf16 multiplies with each other, and which output receives the product.

    Elements of A are numbered by lane, register and half. One at a time is 1 and the others are 0. B holds the numbers
    from 1 on in half of its registers, chosen by a bit of the register's number; each bit is tried. For output i of a
    lane, `meets` is the number of B's element whose product it received, -1 for none, -2 for several or for another
    product.
    Source: PTX ISA 9.0, 9.7.14.5.
    """
    meets[:] = _meets(2)


@kernel(grid="elements_a", fixed=dict(elements_a=256), cases=[dict()])
def probe_mma_f16(meets: Out[i32, "elements_a 32 4"]):
    """Find which elements mma.sync m16n8k16 of f16 multiplies with which, as `probe_mma_bf16` does.

    Source: PTX ISA 9.0, 9.7.14.5.
    """
    meets[:] = _meets(2)


#: Formats in containers, in the order of the probes' numbers.
CONTAINERS = ("e4m3", "e5m2", "e2m1", "e3m2", "e2m3")
WITH_SCALES = (0, 3, 4)
_PAIRS = [(a, b) for a in range(len(CONTAINERS)) for b in range(len(CONTAINERS))]


class Form(NamedTuple):
    """A form of mma.sync without `.kind`: its kind in the atlas, elements in a register, types in words."""

    kind: str
    width: int
    types: str


#: The forms, in the order of the numbers of `probe_mma_plain`.
FORMS = (
    Form("f16_f16", 2, "f16 in f16"),
    Form("tf32", 1, "tf32"),
    Form("int8", 4, "s8"),
    Form("int8", 4, "u8"),
    Form("fp8", 4, "e4m3"),
    Form("fp8", 4, "e5m2"),
    Form("fp8_f16", 4, "e4m3 in f16"),
    Form("fp8_f16", 4, "e5m2 in f16"),
)


@kernel(
    grid="elements_a",
    fixed=dict(elements_a=512, bytes=4, registers_a=128, registers_b=64),
    cases=[dict(scales_a=True, scales_b=True, format_a=each, format_b=each) for each in WITH_SCALES]
    + [dict(format_a=a, format_b=b) for a, b in _PAIRS if a != b or a not in WITH_SCALES],
)
def probe_mma_mxf8f6f4(
    meets: Out[i32, "elements_a 32 4"],
    scales_a: Out[i32, "bytes 2 registers_a"] = None,
    scales_b: Out[i32, "bytes 4 registers_b"] = None,
    format_a: Scalar[i32, 0, 1, 2, 3, 4] = 0,
    format_b: Scalar[i32, 0, 1, 2, 3, 4] = 0,
):
    """Find which elements and scales mma.sync kind::mxf8f6f4 multiplies, as `probe_mma_mxf4` does.

    Elements are numbered by lane, register and byte; `format_a` and `format_b` are 0 for e4m3, 1 for e5m2, 2 for e2m1,
    3 for e3m2 and 4 for e2m3, in containers. There are four byte selectors, 0 to 3. To find scales, elements are e3m2
    or e2m3 if both formats are, else e4m3.
    Source: PTX ISA 9.0, 9.7.14.3 and 9.7.14.5.
    """
    meets[:] = _meets(4)
    if scales_a is not None:
        scales_a[:] = _scale_numbers("a", 4, 1)
    if scales_b is not None:
        scales_b[:] = _scale_numbers("b", 4, 1)


@kernel(
    grid="elements_a",
    fixed=dict(elements_a=512),
    cases=[dict(format_a=a, format_b=b, **accumulator) for accumulator in ({}, dict(in_f16=1)) for a, b in _PAIRS],
)
def probe_mma_f8f6f4(
    meets: Out[i32, "elements_a 32 4"],
    format_a: Scalar[i32, 0, 1, 2, 3, 4] = 0,
    format_b: Scalar[i32, 0, 1, 2, 3, 4] = 0,
    in_f16: Scalar[i32, 0, 1] = 0,
):
    """Find which elements mma.sync kind::f8f6f4 m16n8k32 multiplies with which, as `probe_mma_bf16` does.

    Formats are numbered as in `probe_mma_mxf8f6f4`. With in_f16=1 accumulators are f16, and output i is the half i % 2
    of register i // 2. On the portable machine this finds the layout of the substitute, an f16 MMA.
    Source: PTX ISA 9.0, 9.7.14.5.
    """
    meets[:] = _meets(4)


@kernel(
    grid="elements_a",
    cases=[dict(form=number, elements_a=128 * form.width) for number, form in enumerate(FORMS)],
)
def probe_mma_plain(meets: Out[i32, "elements_a 32 4"], form: Scalar[i32, 0, 1, 2, 3, 4, 5, 6, 7]):
    """Find which elements mma.sync multiplies with which in forms without a kind, as `probe_mma_bf16` does.

    `form` is 0 for m16n8k16 of f16 with f16 accumulators, 1 for m16n8k8 of tf32, 2 and 3 for m16n8k32 of s8 and of u8,
    4 and 5 for m16n8k32 of e4m3 and of e5m2, 6 and 7 for the same with f16 accumulators. A has 256 elements, with tf32
    128, with bytes 512. Below sm_89 forms 4 and 5 run as an f16 MMA; forms 6 and 7 do on every machine but `native`.
    Source: PTX ISA 9.0, 9.7.14.5.
    """
    meets[:] = _meets(meets.shape[0] // 128)


@kernel(grid="elements_a", fixed=dict(elements_a=1024, bytes=2, registers_a=128, registers_b=64), cases=[dict()])
def probe_mma_mxf4(
    meets: Out[i32, "elements_a 32 4"],
    scales_a: Out[i32, "bytes 2 registers_a"],
    scales_b: Out[i32, "bytes 4 registers_b"],
):
    """Find which elements and scales mma.sync kind::mxf4 multiplies, and which output receives the product.

    `meets` is as in `probe_mma_bf16`, with elements numbered by lane, register and nibble. `scales_a` has, for each
    register of A, numbered by lane, and each pair of selectors, byte 0 or 2 and thread 0 or 1, the number (lane, byte)
    of the scale that multiplies all its elements. To find it, half of the lanes, chosen by a bit of the lane's number,
    hold four different scales other than 1; each bit is tried. `scales_b` is the same for B with threads 0 to 3. -2
    means several or none.
    Source: PTX ISA 9.0, 9.7.14.3 and 9.7.14.5.
    """
    meets[:] = _meets(8)
    scales_a[:], scales_b[:] = _scale_numbers("a", 8, 2), _scale_numbers("b", 8, 2)


@kernel(grid="elements_a", fixed=dict(elements_a=1024, bytes=1, registers_a=128, registers_b=64), cases=[dict()])
def probe_mma_mxf4nvf4(
    meets: Out[i32, "elements_a 32 4"],
    scales_a: Out[i32, "bytes 2 registers_a"],
    scales_b: Out[i32, "bytes 4 registers_b"],
):
    """Find which elements and scales mma.sync kind::mxf4nvf4 with ue4m3 scales multiplies, as `probe_mma_mxf4` does.

    There is one byte selector, 0.
    Source: PTX ISA 9.0, 9.7.14.3 and 9.7.14.5.
    """
    meets[:] = _meets(8)
    scales_a[:], scales_b[:] = _scale_numbers("a", 8, 4), _scale_numbers("b", 8, 4)


@kernel(grid="elements_a", fixed=dict(elements_a=1024, bytes=2, registers_a=128, registers_b=64), cases=[dict()])
def probe_mma_mxf4nvf4_2x(
    meets: Out[i32, "elements_a 32 4"],
    scales_a: Out[i32, "bytes 2 registers_a"],
    scales_b: Out[i32, "bytes 4 registers_b"],
):
    """Find which elements and scales mma.sync kind::mxf4nvf4 with ue8m0 scales multiplies, as `probe_mma_mxf4` does.

    Source: PTX ISA 9.0, 9.7.14.3 and 9.7.14.5.
    """
    meets[:] = _meets(8)
    scales_a[:], scales_b[:] = _scale_numbers("a", 8, 2), _scale_numbers("b", 8, 2)


#: Forms of mma.sync, in the order of the numbers of `probe_mma_registers`: the kind of the atlas, and the type of A and
#: B.
GIVEN_FORMS = (
    *(("bf16", "bf16"), ("f16", "f16"), ("f16_f16", "f16"), ("tf32", "tf32"), ("int8", "s8"), ("int8", "u8")),
    *((kind, type) for kind in ("fp8", "fp8_f16") for type in ("e4m3", "e5m2")),
    *((kind, type) for kind in ("f8f6f4", "f8f6f4_f16", "mxf8f6f4") for type in CONTAINERS),
    *((kind, "e2m1") for kind in ("mxf4", "mxf4nvf4", "mxf4nvf4_2x")),
)


def _sparse_rows(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    """Registers of A whose bytes have only bits 5 to 2: finite numbers in every format, with zero padding bits.

    The high bytes of 16-bit and 32-bit elements are 0 or have bit 5, as in B. Then products are normal numbers, or so
    small that they round to 0. Machines differ in rounding to subnormals.
    """
    bits = rng.integers(0, 16, (*shape, 4), dtype=np.uint8)
    bits[..., 1::2] |= (bits[..., 1::2] > 0) * np.uint8(8)
    return (bits << 2).view(np.uint32)[..., 0]


def _one_of_each_column(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    """Registers of B in which one byte of each column is not 0, so that a sum has one product, or two of 4-bit
    elements."""
    b = np.zeros(shape, np.uint32)
    b[:, ::4, 0] = rng.integers(8, 16, b[:, ::4, 0].shape, dtype=np.uint32) << 26
    return b


def _both_scales(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    """Scales of A and B from 1 to 4 as ue4m3; as ue8m0 their products are near 1 too. Bit 7 is set in those of B."""
    bytes = np.array([0x38, 0xB8], np.uint8)[:, None] + rng.integers(0, 3, (*shape, 4), dtype=np.uint8) * np.uint8(8)
    return bytes.view(np.uint32)[..., 0]


@kernel(
    grid="trials",
    cases=[dict(trials=2, form=form) for form in range(len(GIVEN_FORMS))],
    draw=dict(
        a=_sparse_rows,
        b=_one_of_each_column,
        scales=_both_scales,
        c=lambda rng, member, shape, axes: np.zeros(shape, "u4"),
    ),
)
def probe_mma_registers(
    a: In[u32, "trials 32 4"],
    b: In[u32, "trials 32 2"],
    c: In[u32, "trials 32 4"],
    scales: In[u32, "trials 32 2"],
    d: Out[u32, "trials 32 4"],
    form: Scalar[(i32, *range(28))] = 0,
):
    """Write the accumulator of mma.sync for registers given bit by bit: one warp and one instruction for each trial.

    `form` is a number in `GIVEN_FORMS`: the kind and the type of A and B. `scales` holds the scale registers of A and
    B, which forms without scales ignore; the selectors are 0. f16 accumulators are the first two registers of four; the
    other two are copied. The reference is exact if no sum is rounded except to D. Other sums depend on the machine;
    ptxrt.summation has candidates for its rule.
    Source: PTX ISA 9.0, 9.7.14.3 and 9.7.14.5.
    """
    kind, type = GIVEN_FORMS[int(form)]
    d[:] = given_registers.multiply(KINDS[kind], type, a, b, c, scales)


def cases_of(kind: Kind) -> tuple[Kernel, list[Case]]:
    """Return the probe of a kind, and its cases for this kind."""
    probe = {each.name: each for each in PROBES}[kind.probe]
    if probe is probe_mma_plain:
        return probe, [case for case in probe.cases if FORMS[case.scalars["form"]].kind == kind.name]
    if probe is probe_mma_f8f6f4:
        return probe, [case for case in probe.cases if bool(case.scalars.get("in_f16")) == (kind.accumulator == "f16")]
    return probe, list(probe.cases)


PROBES = (
    probe_mma_bf16,
    probe_mma_f16,
    probe_mma_plain,
    probe_mma_f8f6f4,
    probe_mma_mxf8f6f4,
    probe_mma_mxf4,
    probe_mma_mxf4nvf4,
    probe_mma_mxf4nvf4_2x,
)


# Matrices in shared memory


def _lanes_registers_bytes():
    return np.meshgrid(np.arange(32), np.arange(4), np.arange(4), indexing="ij")


@kernel(grid="lanes", fixed=dict(lanes=32), cases=[dict()])
def probe_ldmatrix(
    m8n8: Out[i32, "lanes 4 4"],
    m8n8_trans: Out[i32, "lanes 4 4"],
    m16n16_trans_b8: Out[i32, "lanes 4 4"],
    m8n16_b4x16_p64: Out[i32, "lanes 4 4"],
    stored_m8n8: Out[i32, "lanes 16"],
    stored_m8n8_trans: Out[i32, "lanes 16"],
    stored_m16n8_trans_b8: Out[i32, "lanes 16"],
):
    """Find which bytes ldmatrix loads to which registers, and where stmatrix stores them, in every form with most
    registers.

    Lane i gives the address of the 16 bytes of row i. The loads report, for each lane, register and byte, its source:
    16 row + byte; for 4-bit elements 32 row + nibble. The stores report, for each row and byte, its source: 16 lane + 4
    register + byte.
    Source: PTX ISA 9.0, 9.7.14.5.15 and 9.7.14.5.16.
    """
    lane, register, byte = _lanes_registers_bytes()
    group, thread = lane // 4, lane % 4
    m8n8[:] = 16 * (8 * register + group) + 4 * thread + byte
    m8n8_trans[:] = 16 * (8 * register + 2 * thread + byte // 2) + 2 * group + byte % 2
    m16n16_trans_b8[:] = 16 * (16 * (register // 2) + 4 * thread + byte) + group + 8 * (register % 2)
    m8n16_b4x16_p64[:] = 32 * (8 * register + group) + 4 * thread + byte
    row, byte = np.meshgrid(np.arange(32), np.arange(16), indexing="ij")
    matrix, row = row // 8, row % 8
    stored_m8n8[:] = 16 * (4 * row + byte // 4) + 4 * matrix + byte % 4
    stored_m8n8_trans[:] = 16 * (4 * (byte // 2) + row // 2) + 4 * matrix + 2 * (row % 2) + byte % 2
    stored_m16n8_trans_b8[:] = 16 * (4 * (byte % 8) + row // 2) + 4 * matrix + 2 * (byte // 8) + row % 2


@kernel(grid="lanes", fixed=dict(lanes=32), cases=[dict()])
def probe_fragments(
    accumulator: Out[i32, "lanes 4 2"],
    a: Out[i32, "lanes 4 4"],
    b: Out[i32, "lanes 2 2 4"],
    b_transposed: Out[i32, "lanes 2 2 4"],
    scale_a: Out[i32, "lanes 4"],
    scale_b: Out[i32, "lanes 4"],
):
    """Report where the kernels' tile code places elements and scales, for comparison with the findings of the other
    probes.

    `accumulator` holds row and column of each output. `a`, `b` (two neighboring B) and `b_transposed` hold, for each
    lane, register and byte, 32 row + byte of a tile of 16 rows of 32 bytes in shared memory. `scale_a` and `scale_b`
    hold, for each lane and byte, the number of its scale, for rows with 8 and 4 scales: 8 row + block and 4 row +
    block.
    Source: PTX ISA 9.0, 9.7.14.3 and 9.7.14.5.
    """
    lane, register, byte = _lanes_registers_bytes()
    group, thread = lane // 4, lane % 4
    accumulator[:] = np.stack(output_place(lane[..., 0], register[..., 0]), axis=-1)
    a[:] = 32 * (group + 8 * (register % 2)) + 16 * (register // 2) + 4 * thread + byte
    b[:] = (32 * (group + 8 * (register // 2)) + 16 * (register % 2) + 4 * thread + byte).reshape(32, 2, 2, 4)
    k = 8 * (register % 2) + 2 * thread + byte // 2
    b_transposed[:] = (32 * k + 16 * (register // 2) + 2 * group + byte % 2).reshape(32, 2, 2, 4)
    lane, byte = np.meshgrid(np.arange(32), np.arange(4), indexing="ij")
    group, thread = lane // 4, lane % 4
    scale_a[:] = 8 * (group + 8 * (thread % 2)) + 4 * (thread // 2) + byte
    scale_b[:] = 4 * (8 * thread + group) + byte
