"""The wrappers of kernels_cu/ptx: they assemble for every target, their stand-ins compute what the instructions do, and
wrong uses give an explanation.

These tests compile tests/data/wrappers.cu, which needs CUDA 13.0, and run the texts on the emulator.
"""

import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from ptxrt.emulator import Emulator
from scripts import script
from tests.emulator.programs import launch

build = script("build.py")
ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "tests" / "data" / "wrappers.cu"

ASSEMBLED = {"compute_120f": ("sm_120a", "sm_121a"), "compute_90": ("sm_90",), "compute_80": ("sm_80",)}
NATIVE, PORTABLE = "compute_120f", ("compute_90", "compute_80")


@cache
def toolkit():
    try:
        return build.find_toolchain()
    except build.ToolchainMissing as missing:
        return missing


pytestmark = pytest.mark.skipif(
    isinstance(toolkit(), Exception) or not (ROOT / "kernels_cu").is_dir(), reason="no CUDA 13.0 toolkit here"
)


def nvcc(source: Path, target: str, output: Path):
    """Compile to PTX as build.py does."""
    flags = ["-ptx", f"-arch={target}", *build.NVCC_FLAGS, "-I", ROOT / "kernels_cu"]
    return subprocess.run(
        [toolkit().nvcc, *flags, source, "-o", output], capture_output=True, text=True, env=build.environment()
    )


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """The PTX text's path for every target."""
    folder = tmp_path_factory.mktemp("wrappers")
    paths = {}
    for target in ASSEMBLED:
        paths[target] = folder / f"{target}.ptx"
        done = nvcc(SOURCE, target, paths[target])
        assert done.returncode == 0, done.stderr
    return paths


@pytest.fixture(scope="session")
def run(texts):
    """run(target, entry, *arguments, ...): launch an entry of a text, in float64 arithmetic by default."""
    modules = {}

    def launch_one(target, entry, *arguments, arithmetic="float64", **options):
        if (target, arithmetic) not in modules:
            emulator = Emulator(arithmetic=arithmetic)
            modules[target, arithmetic] = emulator, emulator.load_text(texts[target].read_text(), f"{target}.ptx")
        emulator, module = modules[target, arithmetic]
        launch(None, entry, *arguments, emulator=emulator, module=module, **options)

    return launch_one


@pytest.mark.parametrize("target, architecture", [(target, a) for target, found in ASSEMBLED.items() for a in found])
def test_every_wrapper_assembles(texts, target, architecture, tmp_path):
    command = [toolkit().ptxas, f"-arch={architecture}", texts[target], "-o", tmp_path / "cubin"]
    done = subprocess.run(command, capture_output=True, text=True, env=build.environment())
    assert done.returncode == 0, done.stderr


# Refused combinations


MMA = "float c[4] = {}; uint32_t a[4] = {}, b[2] = {};"
REFUSED = {
    "mma_m16n8k32_mxf8f6f4<ptx::E4m3, ptx::E4m3, 4, 0, 0, 0>(c, a, b, 0, 0)": "scale_vec::1X reads one byte: name byte 0, 1, 2 or 3",
    "mma_m16n8k32_mxf8f6f4<ptx::E4m3, ptx::E4m3, 0, 2, 0, 0>(c, a, b, 0, 0)": "thread_a is 0 or 1",
    "mma_m16n8k32_mxf8f6f4<ptx::E4m3, ptx::E4m3, 0, 0, 0, 4>(c, a, b, 0, 0)": "thread_b is 0, 1, 2 or 3",
    "mma_m16n8k32_mxf8f6f4<ptx::E4m3, ptx::E4m3, 0, 0, -1, 0>(c, a, b, 0, 0)": "name byte 0, 1, 2 or 3",
    "mma_m16n8k32_mxf8f6f4<ptx::E4m3, float, 0, 0, 0, 0>(c, a, b, 0, 0)": "kind::mxf8f6f4 multiplies e4m3, e5m2, e3m2, e2m3 and e2m1",
    "mma_m16n8k32_mxf8f6f4<ptx::E4m3, ptx::E4m3, 0, 0, 0, 0>(c, a, b, 0)": "a is what prepare_mxf8f6f4_a returns",
    "mma_m16n8k64_mxf4<1, 0, 0, 0>(c, a, b, 0, 0)": "scale_vec::2X reads bytes 0 and 1, or 2 and 3: name byte 0 or 2",
    "mma_m16n8k64_mxf4<0, 0, 3, 0>(c, a, b, 0, 0)": "name byte 0 or 2",
    "mma_m16n8k64_mxf4<0, 2, 0, 0>(c, a, b, 0, 0)": "A's scales stand in one of the two lane pairs of a quad",
    "mma_m16n8k64_mxf4nvf4<0, 4>(c, a, b, 0, 0)": "B's scales stand in one lane of a quad",
    "mma_m16n8k64_mxf4nvf4<2, 0>(c, a, b, 0, 0)": "thread_a is 0 or 1",
    "mma_m16n8k64_mxf4nvf4<0, 0>(c, a, b, 0)": "a is what prepare_mxf4nvf4_a returns",
}
REFUSED_BELOW_90 = {
    "mbarrier_init(0, 1)": "need sm_90: choose cp.async by",
    "mbarrier_wait_parity(0, 1)": "need sm_90",
    "cp_async_bulk_shared_global(0, nullptr, 16, 0)": "cp.async.bulk needs sm_90: choose cp.async",
}


def refused(call, target, folder):
    source = folder / "refused.cu"
    headers = "".join(f'#include "ptx/{name}.cuh"\n' for name in ("mma", "mbarrier", "bulk"))
    source.write_text(
        f"// A wrong call.\n{headers}__global__ void wrong() {{ {MMA if 'mma' in call else ''} ptx::{call}; }}\n"
    )
    done = nvcc(source, target, folder / "refused.ptx")
    assert done.returncode != 0
    return done.stderr


@pytest.mark.parametrize("target", [NATIVE, "compute_90"])
@pytest.mark.parametrize("call", REFUSED)
def test_a_combination_that_there_is_not_is_refused_with_the_reason(call, target, tmp_path):
    assert REFUSED[call] in refused(call, target, tmp_path)


@pytest.mark.parametrize("call", REFUSED_BELOW_90)
def test_what_needs_sm_90_says_so_below(call, tmp_path):
    assert REFUSED_BELOW_90[call] in refused(call, "compute_80", tmp_path)


# MMA


def codes(generator, form, shape):
    """Registers of random elements: every code of a format except NaN and infinities."""
    bytes = generator.integers(0, 256, (*shape, 4), dtype=np.uint8)
    if form == "E4m3":
        bytes[bytes & 0x7F == 0x7F] = 0x08
    if form == "E5m2":
        bytes[bytes & 0x7C == 0x7C] = 0x08
    if form in ("E3m2", "E2m3"):
        bytes &= 0x3F
    if form == "E2m1":
        bytes &= 0x3C
    return np.ascontiguousarray(bytes).view(np.uint32)[..., 0]


WARPS = 12
FORMS = ("E4m3", "E5m2", "E2m1", "E3m2", "E2m3")
MMAS = {f"mxf8f6f4_{a}_{b}": (a, b, "ue8m0") for a in FORMS for b in FORMS}
UNSCALED = (
    *("f8f6f4_E4m3_E2m1", "f8f6f4_E5m2_E3m2", "f8f6f4_E3m2_E2m3", "f8f6f4_E2m3_E4m3", "f8f6f4_E2m1_E5m2"),
    *("fp8_E4m3_E5m2", "fp8_E5m2_E4m3"),
)
MMAS |= {entry: (*entry.split("_")[1:], "ue8m0") for entry in UNSCALED}
MMAS |= {f"mxf4nvf4_2x_{selectors}": ("packed", "packed", "ue8m0") for selectors in ("0123", "2001")}
MMAS |= {f"mxf4_{selectors}": ("packed", "packed", "ue8m0") for selectors in ("0000", "2103", "0122", "2021")}
MMAS |= {f"mxf4nvf4_{selectors}": ("packed", "packed", "ue4m3") for selectors in ("00", "11", "02", "13")}


def operands(entry, seed, span=12):
    """Registers of one MMA per warp: scale bytes are random in every lane, so that a wrong read shows."""
    a, b, scale_type = MMAS.get(entry, ("E2m1", "E2m1", "ue8m0"))
    generator = np.random.default_rng(seed)
    scales = generator.integers(
        *((127 - span, 128 + span) if scale_type == "ue8m0" else (0, 127)), (2, WARPS, 32, 4), dtype=np.uint8
    )
    if scale_type == "ue4m3":
        scales |= generator.integers(0, 2, scales.shape, dtype=np.uint8) << 7  # the sign bit is ignored
    scales = scales.view(np.uint32)[..., 0]
    c = generator.standard_normal((WARPS, 32, 4)).astype(np.float32)
    return [
        codes(generator, a, (WARPS, 32, 4)),
        codes(generator, b, (WARPS, 32, 2)),
        scales[0].copy(),
        scales[1].copy(),
        c,
    ]


@pytest.mark.parametrize("target", PORTABLE)
@pytest.mark.parametrize("entry", MMAS)
def test_stand_ins_multiply_as_the_instruction_does(run, entry, target):
    """Products are exact in both. For each block of k the stand-in rounds p = A B to float32, then C + p."""
    arguments = operands(entry, len(entry))
    want, got, size = (arguments[4].copy() for _ in range(3))
    run(NATIVE, entry, *arguments[:4], want, grid=WARPS)
    run(target, entry, *arguments[:4], got, grid=WARPS)
    # The sum of magnitudes: the same MMA without signs.
    signs = {"packed": 0x77777777, "E2m1": 0x1C1C1C1C, "E3m2": 0x1F1F1F1F, "E2m3": 0x1F1F1F1F}
    a, b = (arguments[i] & np.uint32(signs.get(MMAS[entry][i], 0x7F7F7F7F)) for i in (0, 1))
    size = np.abs(size)
    run(NATIVE, entry, a, b, *arguments[2:4], size, grid=WARPS)
    assert np.isfinite(want).all() and (np.abs(got - want) <= 6 * 2.0**-24 * size).all()


@pytest.mark.parametrize("target", PORTABLE)
@pytest.mark.parametrize("entry", MMAS)
def test_stand_ins_equal_the_instruction_where_no_sum_is_rounded(run, entry, target):
    """A row of A and a column of B have one element each: every output is a single product, under any scales."""
    arguments = operands(entry, len(entry), span=50)
    generator = np.random.default_rng(1)
    for i in (0, 1):  # one lane of each quad, one register and one element of it
        lanes = generator.integers(0, 4, (WARPS, 8))
        kept = np.zeros((WARPS, 8, 4, arguments[i].shape[-1]), np.uint32)
        element = (
            0xF << 4 * int(generator.integers(0, 8))
            if MMAS[entry][i] == "packed"
            else 0xFF << 8 * int(generator.integers(0, 4))
        )
        kept[np.arange(WARPS)[:, None], np.arange(8), lanes] = element
        arguments[i] &= kept.reshape(arguments[i].shape)
    arguments[4][:] = 0
    want, got = arguments[4].copy(), arguments[4].copy()
    run(NATIVE, entry, *arguments[:4], want, grid=WARPS)
    run(target, entry, *arguments[:4], got, grid=WARPS)
    assert np.count_nonzero(want) > 50 and (want == got).all()


@pytest.mark.parametrize("target", PORTABLE)
@pytest.mark.parametrize(
    "entry", ["f8f6f4_f16_E2m1_E3m2", "f8f6f4_f16_E2m3_E2m1", "f8f6f4_f16_E4m3_E4m3", "fp8_f16_E4m3_E4m3"]
)
def test_stand_ins_with_f16_accumulators(run, entry, target):
    """The instruction rounds the exact sum once, the stand-in rounds a float32 sum: they differ by at most one step.

    Sums that underflow are +0 in both: an accumulator of -0 and products of tiny negative numbers.
    """
    a_form, b_form = entry.split("_")[2:]
    generator = np.random.default_rng(len(entry))
    a, b = codes(generator, a_form, (WARPS, 32, 4)), codes(generator, b_form, (WARPS, 32, 2))
    if a_form == "E4m3":
        a, b = a & np.uint32(0xC7C7C7C7), b & np.uint32(0xC7C7C7C7)  # exponents 0 and 8: sums stay below 65504
    c = generator.standard_normal((WARPS, 32, 4)).astype(np.float16).astype(np.float32)
    none = np.zeros((WARPS, 32), np.uint32)
    want, got = c.copy(), c.copy()
    run(NATIVE, entry, a, b, none, none, want, grid=WARPS)
    run(target, entry, a, b, none, none, got, grid=WARPS)
    assert np.isfinite(want).all() and (want != c).mean() > 0.9
    assert (np.abs(got - want) <= np.spacing(np.abs(want).astype(np.float16)).astype(np.float32)).all() and (
        got == want
    ).mean() > 0.99
    zeros = np.full_like(c, -0.0)
    run(target, entry, np.zeros_like(a), np.zeros_like(b), none, none, zeros, grid=WARPS)
    assert (zeros == 0).all() and not np.signbit(zeros).any()


@pytest.mark.parametrize("target", PORTABLE)
@pytest.mark.parametrize("entry, largest, smallest", [
    ("mxf8f6f4_E5m2_E5m2", 91, -117), ("mxf8f6f4_E4m3_E4m3", 105, -127), ("mxf8f6f4_E2m1_E2m1", 117, -127), ("mxf4_0000", 117, -127),
])  # fmt: skip
def test_the_range_of_scales_that_stand_ins_take(run, entry, largest, smallest, target):
    """The limits stated in the header: largest products under the largest scale of A, and the smallest product under
    the smallest."""
    full = {"E5m2": 0x7B, "E4m3": 0x7E, "E2m1": 0x1C, "packed": 0x77}[MMAS[entry][0]]
    least = {"E5m2": 0x01, "E4m3": 0x01, "E2m1": 0x04, "packed": 0x11}[MMAS[entry][0]]
    for code, exponent in ((full, largest), (least, smallest)):
        a, b = (np.full((1, 32, count), code * 0x01010101, np.uint32) for count in (4, 2))
        scales = [
            np.full((1, 32), (127 + e) * 0x01010101, np.uint32)
            for e in (exponent, -exponent if exponent > -127 else 127)
        ]
        want, got = np.zeros((1, 32, 4), np.float32), np.zeros((1, 32, 4), np.float32)
        run(NATIVE, entry, a, b, *scales, want)
        run(target, entry, a, b, *scales, got)
        assert np.isfinite(want).all() and (want > 0).all() and (want == got).all()


@pytest.mark.parametrize("target", PORTABLE)
@pytest.mark.parametrize("entry", ["mxf8f6f4_E4m3_E5m2", "mxf4_2103", "mxf4nvf4_11"])
def test_nan_scales_poison_the_stand_ins_as_well(run, entry, target):
    arguments = operands(entry, 3)
    for scales, nan in ((arguments[2], 0xFF), (arguments[3], 0x7F if "nvf4" in entry else 0xFF)):
        scales[np.random.default_rng(nan).random(scales.shape) < 0.1] = nan * 0x01010101
    want, got = arguments[4].copy(), arguments[4].copy()
    run(NATIVE, entry, *arguments[:4], want, grid=WARPS)
    run(target, entry, *arguments[:4], got, grid=WARPS)
    assert 0 < np.isnan(want).sum() < want.size and (np.isnan(want) == np.isnan(got)).all()


@pytest.mark.parametrize("entry, one, many", [("f16", 0x3C00, 0x5640), ("bf16", 0x3F80, 0x42C8)])
@pytest.mark.parametrize("target", ASSEMBLED)
def test_f16_and_bf16(run, target, entry, one, many):
    """A of ones, B of hundreds: D = 16 * 100 + C."""
    a, b = np.full((1, 32, 4), one * 0x10001, np.uint32), np.full((1, 32, 2), many * 0x10001, np.uint32)
    c = np.full((1, 32, 4), 0.5, np.float32)
    run(target, entry, a, b, np.zeros(32, np.uint32), np.zeros(32, np.uint32), c)
    assert (c == 1600.5).all()


@pytest.mark.parametrize("target", ASSEMBLED)
def test_preparing_a_changes_no_bit(run, target):
    arguments = operands("mxf8f6f4_E2m1_E2m1", 5)
    for scales in arguments[2:4]:
        scales &= np.uint32(0x7F7F7F7F)
        scales[scales.view(np.uint8).reshape(*scales.shape, 4).max(axis=-1) == 0x7F] = 0x38383838
    prepared, unprepared = arguments[4].copy(), arguments[4].copy()
    run(target, "prepared", *arguments[:4], prepared, grid=WARPS)
    run(target, "unprepared", *arguments[:4], unprepared, grid=WARPS)
    assert np.isfinite(prepared).all() and (prepared == unprepared).all() and (prepared != arguments[4]).any()


# Matrices


ORDER = ((11 * np.arange(32) + 5) % 32).astype(np.uint32)


@pytest.mark.parametrize("target", PORTABLE)
def test_stand_ins_load_the_same_registers(run, target):
    rows = np.random.default_rng(0).integers(0, 256, 512, dtype=np.uint8)
    want, got = np.zeros((8, 4, 32), np.uint32), np.zeros((8, 4, 32), np.uint32)
    run(NATIVE, "loads", rows, ORDER, want)
    run(target, "loads", rows, ORDER, got)
    assert (want == got).all() and all(want[form].any() for form in range(8))


@pytest.mark.parametrize("target", PORTABLE)
def test_stand_ins_store_the_same_bytes(run, target):
    registers = np.random.default_rng(1).integers(1, 256, 512, dtype=np.uint8)
    want, got = np.zeros((9, 512), np.uint8), np.zeros((9, 512), np.uint8)
    run(NATIVE, "stores", registers, ORDER, want)
    run(target, "stores", registers, ORDER, got)
    assert (want == got).all()
    assert [np.count_nonzero(form) for form in want] == [128, 256, 512, 256, 512, 128, 256, 512, 128]


# Conversions


@pytest.mark.parametrize("target", PORTABLE)
def test_stand_ins_convert_scales_to_the_same_bits(run, target):
    edges = [0.0, 2.0**-149, 2.0**-128, 2.0**-127, 2.0**-126, 1.0, 448.0, 464.0, 2.0**127, 3.4e38, np.inf, np.nan]
    edges = np.array(edges, np.float32)
    near = np.concatenate([edges, np.nextafter(edges, np.float32(0)), np.nextafter(edges, np.float32(np.inf))])
    bits = np.random.default_rng(2).integers(0, 1 << 32, 4000, dtype=np.uint32).view(np.float32)
    values = np.concatenate([near, -near, bits, np.arange(0, 500, 0.25, dtype=np.float32) * np.float32(2.0**-9)])
    pairs = np.stack([values, np.roll(values, 7)], axis=-1)
    pairs = np.concatenate(
        [pairs, (np.arange(1 << 16, dtype=np.uint32) << 16)[:, None].view(np.float32).repeat(2, axis=1)]
    )
    want, got = np.zeros((len(pairs), 4), np.uint32), np.zeros((len(pairs), 4), np.uint32)
    for target, results in ((NATIVE, want), (target, got)):
        run(target, "scales", pairs.astype(np.float32), results, len(pairs), grid=-(-len(pairs) // 256), block=256)
    assert (want == got).all()


@pytest.mark.parametrize("target", ASSEMBLED)
def test_codes_become_f16(run, target):
    """Expected values by definition: e2m1 by its eight magnitudes, ue4m3 by its fields."""
    words = np.random.default_rng(3).integers(0, 1 << 32, 1 << 14, dtype=np.uint32)
    words[: 1 << 8] = np.arange(1 << 8) * 0x01010101
    ue4m3, e4m3, e2m1 = (np.zeros((len(words), n), np.uint32) for n in (1, 2, 4))
    run(target, "from_codes", words, ue4m3, e4m3, e2m1, grid=len(words) // 32)
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    values = [magnitudes[code & 7] * (-1 if code & 8 else 1) for code in range(16)]
    found = e2m1.view(np.float16)
    assert all((found[:, i] == np.array(values)[words >> np.uint32(4 * i) & np.uint32(15)]).all() for i in range(8))
    assert (np.signbit(found[0]) == 0).all() and np.signbit(found[0x88]).all()

    def scale(code):
        code &= 0x7F
        return float("nan") if code == 0x7F else (8 * (code > 7) + code % 8) * 2.0 ** (max(code >> 3, 1) - 10)

    table = np.array([scale(code) for code in range(256)], np.float32)
    for i in range(2):
        np.testing.assert_array_equal(
            ue4m3.view(np.float16).reshape(-1, 2)[:, i].astype(np.float32),
            table[words >> np.uint32(8 * i) & np.uint32(255)],
        )
    signed = np.where(np.arange(256) < 128, table, -table)
    codes = words[:, None] >> np.arange(0, 32, 8, dtype=np.uint32) & np.uint32(255)
    np.testing.assert_array_equal(e4m3.view(np.float16).astype(np.float32), signed[codes])


@pytest.mark.parametrize("target", ASSEMBLED)
@pytest.mark.parametrize("count", [32, 7, 0])
def test_chunks_behind_the_end_are_zeros(run, target, count):
    """Of copies of runs and of predicated loads; the source ends where they end."""
    source = np.random.default_rng(4).integers(1, 1 << 32, (32, 4), dtype=np.uint32)
    copied, loaded = np.ones((2, 32, 4), np.uint32)
    run(target, "present_chunks", source[: max(count, 1)].copy(), copied, loaded, count)
    want = np.where(np.arange(32)[:, None] < count, source, 0)
    assert (copied == want).all() and (loaded == want).all()


# Warps and copies


@pytest.mark.parametrize("target", ASSEMBLED)
def test_lanes_agree(run, target):
    says = np.zeros((4, 32), np.int32)
    says[1], says[2, 7], says[3, 1:] = 1, -5, 1
    results = np.zeros((4, 32, 4), np.uint32)
    run(target, "agreement", says, results, grid=4)
    for warp in range(4):
        ballot = sum(1 << lane for lane in range(32) if says[warp, lane])
        assert (results[warp, :, 0] == (ballot != 0)).all() and (results[warp, :, 1] == (ballot == 0xFFFFFFFF)).all()
        assert (results[warp, :, 2] == ballot).all()
        elected = set(results[warp, :, 3].tolist())
        assert len(elected) == 1 and elected.pop().bit_count() == 1


@pytest.mark.parametrize("runs", [1, 2, 7])
@pytest.mark.parametrize("target", ASSEMBLED)
def test_copies_through_a_ring(run, target, runs):
    source = np.random.default_rng(4).integers(0, 1 << 32, (runs, 64, 4), dtype=np.uint32)
    copied = np.zeros_like(source)
    run(target, "copies", source, copied, runs, block=64)
    assert (copied == source[:, ::-1]).all()
