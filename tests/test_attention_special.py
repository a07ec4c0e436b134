"""NaN and infinities in any place with any option, and values of any magnitude, in every pair of formats, against
float64."""

from dataclasses import replace
from itertools import product

import ml_dtypes
import numpy as np
import pytest

import ptxrt
from attention_arrays import WAYS, bits, held, operands, random_qkv, relative, rounding, way_of
from ptxrt.backend import Param
from ptxrt.blocks import BLOCK_FORMATS
from ptxrt.launch import LARGEST_SIZE, _integer_bytes
from ptxrt.ops.attention import exact_attention
from ptxrt.ops.attention_kernels import OPEN
from ptxrt.tiles import tile_layout
from tests.fuzz import exact

BF16 = ml_dtypes.bfloat16
QUERIES = 20

# Option -> its arguments for `heads` heads and `keys` keys.
OPTIONS = {
    "plain": lambda rng, heads, keys: {},
    "causal": lambda rng, heads, keys: dict(causal=True),
    "window": lambda rng, heads, keys: dict(window=(20, 9)),
    "softcap": lambda rng, heads, keys: dict(softcap=3.0),
    "bool mask": lambda rng, heads, keys: dict(mask=rng.random((1, heads, QUERIES, keys)) < 0.7),
    "float mask": lambda rng, heads, keys: dict(mask=normal(rng, 1, heads, QUERIES, keys)),
    "scale 0": lambda rng, heads, keys: dict(scale=0.0),
    "scale below 0": lambda rng, heads, keys: dict(scale=-0.2),
    "sinks": lambda rng, heads, keys: dict(sinks=normal(rng, heads)),
    "key_lengths": lambda rng, heads, keys: dict(key_lengths=np.array([keys - 10])),
    "all": lambda rng, heads, keys: dict(
        mask=normal(rng, 1, heads, QUERIES, keys), softcap=3.0, causal=True, sinks=normal(rng, heads), scale=-0.2
    ),
}
# Where a special value is put: the array, and the index within a head. Row 5 of q sees keys 0 and 70, except under
# windows.
PLACES = {
    "q": ("q", (5, 3)),
    "first key": ("k", (0, 3)),
    "second tile": ("k", (70, 3)),
    "a late key": ("k", (-13, 3)),
    "every key": ("k", (slice(None), 3)),
    "v": ("v", (70, 3)),
    "mask": ("mask", (5, 70)),
    "masks of a row": ("mask", (5, slice(None))),
    "sinks": ("sinks", ()),
}
SPECIAL = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}
CASES = list(product(PLACES, SPECIAL))


def normal(rng, *shape):
    """Normal float32 numbers."""
    return rng.standard_normal(shape, dtype=np.float32)


def each_way(test):
    """Run a test on every pair of formats."""
    return pytest.mark.parametrize("way", [pytest.param(dict(qk=qk, pv=pv), id=f"{qk}-{pv}") for qk, pv in WAYS])(test)


def smallest_dim(qk, pv):
    """The smallest head dimension of a format pair."""
    return min(np.ravel(list(way_of(qk, pv).kernel.variants.values())[0]))


def spoiled(option: str, way: dict, keys: int):
    """(arrays, options, which cases apply) of a call in which every case has its own head."""
    rng = np.random.default_rng(5)
    arrays = dict(zip("qkv", random_qkv(rng, 1, len(CASES), QUERIES, keys, smallest_dim(**way))))
    options = OPTIONS[option](rng, len(CASES), keys)
    applies = []
    for head, (place, special) in enumerate(CASES):
        name, index = PLACES[place]
        array = (arrays | options).get(name)
        applies.append(array is not None and array.dtype != bool)
        if applies[-1]:
            array[(head, *index) if name == "sinks" else (0, head, *index)] = SPECIAL[special]
    return arrays, options, applies


@each_way
@pytest.mark.parametrize(
    "option, keys",
    [*((option, 150) for option in OPTIONS), *((option, 700) for option in ("plain", "float mask", "sinks"))],
)
def test_no_nan_and_no_infinity_is_lost(machine, way, option, keys):
    """A row is NaN where float64 attention of the operands' values is, in the output and in lse; other rows are
    unaffected."""
    arrays, options, applies = spoiled(option, way, keys)
    if way["qk"] in BLOCK_FORMATS:
        arrays = dict(zip("qkv", operands(*arrays.values(), **way, dim=smallest_dim(**way), smooth=False)))
    out, lse = ptxrt.attention(**arrays, **options, **way, return_lse=True, out_dtype=np.float32)
    q, k, v = held(*arrays.values(), **way)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        want, want_lse = exact_attention(q, k, v, **options)
        weights, _ = exact_attention(q, k, np.broadcast_to(np.eye(keys)[:, 70:71], (1, len(CASES), keys, 1)), **options)
    for head, (place, special) in enumerate(CASES):
        if not applies[head]:
            continue
        case = f"{special} in {place} beside {option}"
        got, expected = out[0, head], want[0, head]
        if place == "v":  # 0 * NaN is NaN: whether NaN reaches rows that do not see the key is unspecified
            sees = weights[0, head, :, 0] > 2.0**-20
            column = got[:, 3]
            assert not np.isfinite(column[sees]).any(), case
            assert (
                np.isfinite(lse[0, head]).all()
                and np.isfinite(np.delete(got, 3, axis=1)).all()
                or way["pv"] in ("mxfp8", "mxfp4", "nvfp4")
            ), case
            continue
        nan = np.isnan(expected).all(axis=1)
        np.testing.assert_array_equal(np.isnan(got), np.isnan(expected), err_msg=case)
        np.testing.assert_array_equal(np.isnan(lse[0, head]), np.isnan(want_lse[0, head]), err_msg=case)
        np.testing.assert_array_equal(lse[0, head] == -np.inf, want_lse[0, head] == -np.inf, err_msg=case)
        if not nan.all() and np.abs(expected[~nan]).max() > 0:
            assert relative(got[~nan], expected[~nan]) <= 2 * rounding(**way), case


@each_way
@pytest.mark.parametrize("keys", [20, 150])
def test_masks_of_minus_infinity_beside_products_beyond_float32(machine, way, keys):
    """A float mask is added: -inf plus a product of +inf is NaN, plus -inf it hides the key. A bool mask always hides
    it."""
    dim = smallest_dim(**way)
    q, k, v = np.zeros((1, 1, 2, dim), np.float32), np.zeros((1, 1, keys, dim), np.float32), np.ones((1, 1, keys, dim))
    q[0, 0, :, 0], k[0, 0, 3, 0] = (2, -2), 2e38
    arrays = [q, k, v.astype(np.float32)]
    if way["qk"] in BLOCK_FORMATS:
        arrays = operands(*arrays, **way, dim=dim, smooth=False)
    shown = np.arange(keys)[None, None, None] != 3
    added = np.where(shown, 0, -np.inf).astype(np.float32)
    for mask, want in ((added, (np.nan, 1)), (shown, (1, 1))):
        with np.errstate(over="ignore"):  # K overflows f16
            out = ptxrt.attention(*arrays, **way, scale=1.0, mask=mask, out_dtype=np.float32)
        np.testing.assert_array_equal(out[0, 0], np.broadcast_to(np.float32(want)[:, None], (2, dim)))


def test_random_calls_expect_either_of_a_mask_of_minus_infinity_beside_a_product_beyond_float32():
    """For a row that sees nothing else both NaN and 0 are right, whatever the product scaled in float64."""
    scores = np.full((1, 1, 1, 4), 4e37)
    arguments = dict(pv="bf16", out_dtype="float32", shown=np.ones(scores.shape, bool), spans=[(0, 0, 4)])
    values = np.ones((1, 1, 4, 8))
    for mask, reach, either in ((-np.inf, 4e38, True), (-np.inf, 1.0, False), (0.0, 4e38, True)):
        expected = exact.attention(
            scores, scores, np.full(scores.shape, reach), values, **arguments, mask=np.full(scores.shape, mask)
        )
        assert expected.either.item() is either


# Values of any magnitude


def with_magnitudes(rng, keys: int, columns: int, low: int, high: int) -> np.ndarray:
    """Normal values [1, 1, keys, columns] with magnitudes from 2**low to 2**high by column; the last column is
    zeros."""
    exponents = np.linspace(low, high, columns - 1).round()
    x = np.ldexp(
        np.float64(rng.uniform(0.5, 1, (keys, columns - 1)) * rng.choice([-1, 1], (keys, columns - 1))),
        exponents.astype(int),
    )
    return np.pad(x, [(0, 0), (0, 1)]).astype(np.float32)[None, None]


def errors_by_column(got, want):
    """The relative L2 of each column of the last axis; 0 for columns of zeros."""
    got, want = (np.asarray(x, np.float64).reshape(-1, x.shape[-1]) for x in (got, want))
    norm = np.linalg.norm(want, axis=0)
    return np.linalg.norm(got - want, axis=0) / np.where(norm == 0, 1, norm)


VALUE_OPTIONS = {
    "plain": {},
    "causal": dict(causal=True),
    "softcap": dict(softcap=5.0),
    "sinks": dict(sinks=np.float32([3.0])),
    "key_lengths": dict(key_lengths=np.array([90])),
}


@pytest.mark.parametrize("qk", ["bf16", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("option, keys", [*((option, 150) for option in VALUE_OPTIONS), ("plain", 700)])
def test_values_of_any_magnitude_in_bf16(machine, rng, qk, option, keys):
    """Columns of V with magnitudes from 2^-112 to the largest side by side: each has the error of ordinary columns, and
    zeros stay zeros.

    Outputs of the smallest column are normal numbers. Splits merge unnormalized sums: with them columns go up to 2^110.
    """
    dim = smallest_dim(qk, "bf16")
    q, k, _ = random_qkv(rng, 1, 1, QUERIES, keys, dim)
    v = with_magnitudes(rng, keys, dim, -112, 127 if keys == 150 else 110)
    options = VALUE_OPTIONS[option]
    ordinary = np.ldexp(np.float64(v), -np.frexp(np.abs(v).max(axis=2, keepdims=True))[1]).astype(np.float32)
    for dtype in (np.float32, BF16):
        got, usual = (
            ptxrt.attention(q, k, x, qk=qk, pv="bf16", smooth_k=False, out_dtype=dtype, **options)
            for x in (v, ordinary)
        )
        error = errors_by_column(got, exact_attention(*held(q, k, v, qk, "bf16"), **options)[0])
        usual_error = errors_by_column(usual, exact_attention(*held(q, k, ordinary, qk, "bf16"), **options)[0])
        assert (error <= 1.05 * usual_error + 1e-6).all()
        assert not got[..., -1].astype(np.float32).any()


OUTPUTS = {"outputs": ("out_bf16", "out_f16", "out_f32", "lse"), "parts": ("partial", "row_max", "row_sum")}


@pytest.mark.parametrize("text", ["native", "portable"])
@pytest.mark.parametrize("asked", OUTPUTS)
@pytest.mark.parametrize("qk", ["bf16", "mxfp8", "mxfp4", "nvfp4", "in_kernel"])
def test_kernels_compute_small_sums_again(rng, text, asked, qk):
    """Of V in bf16 with columns from 2^-112 on, for each output; the parts of a wide head too in the portable text,
    which loops over its columns."""
    names = {"bf16": "attention_bf16", "in_kernel": "attention_mxfp4_bf16_in_kernel"}
    name = names.get(qk, f"attention_{qk}_bf16")
    kernel = ptxrt.kernels()[name]
    wide = [256 if qk == "in_kernel" else 192] if (text, asked) == ("portable", "parts") and qk != "bf16" else []
    for dim in (kernel.cases[0].axes["dim"], *wide):
        case = next(case for case in kernel.cases if case.axes["dim"] == case.axes["dim_v"] == dim)
        case = replace(case, axes={**case.axes, "queries": 9})
        call = {key: value for key, value in kernel.example(case).items() if value is not True}
        call.pop("query_blocks", None)  # follows from the queries
        call |= dict.fromkeys(OUTPUTS[asked], True) | dict(sinks=normal(rng, 1, 1))
        v = with_magnitudes(rng, case.axes["keys"], dim, -112, 10)
        if qk in names:
            call |= {x: call[x].astype(np.float32 if (qk, asked) == ("in_kernel", "parts") else BF16) for x in "qk"}
            call["v"] = v.astype(call["k"].dtype)
        else:
            call["v_tiles"] = tile_layout("bf16", "v", dim).encode(v)
        want = kernel.reference(**call)
        with ptxrt.using("emulator", ptx=text):
            results = dict(zip(want, kernel(**call)))
        for output, got in results.items():
            got, exact = (np.asarray(x, np.float64) for x in (got, want[output]))
            if output.startswith("out") or output == "partial":
                error, size = (np.linalg.norm(x.reshape(-1, dim), axis=0) for x in (got - exact, exact))
            else:
                error, size = np.abs(got - exact), np.abs(exact)
            lost = 0.0 if output in ("out_f32", "out_bf16", "partial") else 0.01  # in f16, and near 0
            assert (error <= 0.01 * size + lost).all(), output


# Format of V -> powers of two that multiply all of V. Block formats sum V times weights of up to 2^8 or 2^11 before
# they divide, and codes under the smallest scales are subnormal.
FACTORS = {
    "bf16": (-118, -60, 60, 120),
    "f16": (-16, 12),
    "mxfp8": (-110, 100),
    "mxfp4": (-110, 110),
    "nvfp4": (-100, 110),
}


@each_way
@pytest.mark.parametrize("keys", [150, 700])
def test_values_times_a_power_of_two_give_as_much_of_the_output(machine, rng, way, keys):
    """Up to rounding of sums, at both ends of the range of each format of V."""
    dim = smallest_dim(**way)
    q, k, v = random_qkv(rng, 1, 1, QUERIES, keys, dim)
    v = np.round(64 * v) / 64
    want = ptxrt.attention(q, k, v, **way, smooth_k=False, out_dtype=np.float32)
    for power in FACTORS[way["pv"]]:
        got = ptxrt.attention(q, k, np.ldexp(v, power), **way, smooth_k=False, out_dtype=np.float32)
        assert relative(np.ldexp(np.float64(got), -power), want) <= 2e-6


def test_values_at_the_end_of_float32_do_not_overflow_where_keys_are_split(machine, rng):
    """Splits write unnormalized sums: those of large values are scaled down, and their maxima raised by as much."""
    q, k, _ = random_qkv(rng, 1, 1, 8, 700, 32)
    v = np.full((1, 1, 700, 32), BF16(3e38)).astype(np.float32)
    out, lse = ptxrt.attention(q, k, v, out_dtype=np.float32, return_lse=True)
    np.testing.assert_allclose(out, v[:, :, :8], rtol=2e-3)
    assert np.abs(lse - exact_attention(*held(q, k, v, "bf16", "bf16"))[1]).max() < 1e-4
    parts, maxima, sums = ptxrt.attention(q, k, v, normalize=False)
    assert np.isfinite(parts).all()
    np.testing.assert_allclose(parts / sums[..., None], out, rtol=1e-5)
    np.testing.assert_allclose((maxima + np.log2(sums)) * np.log(2), lse, atol=1e-4)


# Sizes near the end of 32 bits


def bounds(query: int, queries: int, keys: int, left: int, right: int) -> tuple[int, int]:
    """The keys [first, end) that a query sees, by the sums of op/problem.cuh, each checked to fit 32 bits."""
    first_offset = fits(fits(keys - queries) - min(left, keys))
    end_offset = fits(fits(fits(keys - queries) + min(right, queries - 1)) + 1)
    return max(fits(query + first_offset), 0), min(fits(query + end_offset), keys)


def fits(value: int) -> int:
    """Assert that a value fits a C int, and return it."""
    assert -(2**31) <= value < 2**31
    return value


# The limit of a grid of 65535 blocks with at most 256 rows each.
MOST_QUERIES = 65535 * 256
SIZES = [1, 2, 63, 64, 65, 2**16, 2**30 - 1, 2**30, 2**30 + 1, 2**31 - 2**25, LARGEST_SIZE - 1, LARGEST_SIZE]


def test_windows_of_any_keys_fit_32_bits():
    """The bounds of op/problem.cuh equal those of the definition, and no sum overflows 32 bits, up to the largest
    accepted size."""
    sides = [0, 1, 100, 2**30, 2**31 - 2, OPEN]
    for keys, queries in product(SIZES, [n for n in SIZES if n <= MOST_QUERIES] + [MOST_QUERIES]):
        for left, right, query in product(sides, sides, sorted({0, queries // 2, queries - 1})):
            place = query + keys - queries
            first, end = bounds(query, queries, keys, left, right)
            assert (first, end) == (max(place - left, 0), min(place + right + 1, keys))


def test_tiles_and_splits_of_any_keys_fit_32_bits():
    """Numbers that kernels derive from the key count: tiles rounded up, ends of splits, tiles of packed sequences,
    indices of gathered scores."""
    for keys, sequences, splits in product(SIZES, (1, 65535), (1, 264)):
        split_keys = fits(fits(fits(keys + 63) // 64 + splits - 1) // splits * 64)
        fits(fits((splits - 1) * split_keys) + split_keys)
        tiles = fits(fits(keys + 63) // 64 + sequences - 1)
        fits(tiles * 64)
        fits(keys // 64 + sequences)
        fits(keys + 256 - 1)  # rows rounded up to a block


def test_sizes_that_leave_no_room_are_refused(emulator):
    """Every kernel refuses them before it launches. Keys that repeat one row take no memory."""
    param = Param("u32", 4, 0)
    assert _integer_bytes("kernel", 3, param, LARGEST_SIZE) == LARGEST_SIZE.to_bytes(4, "little")
    words = f"does not fit parameter 3 of 4 bytes, at most {LARGEST_SIZE} is passed in 32 bits; split the call"
    with pytest.raises(ptxrt.ArgumentError, match=f"the size {LARGEST_SIZE + 1} {words}"):
        _integer_bytes("kernel", 3, param, LARGEST_SIZE + 1)
    assert _integer_bytes("kernel", 3, Param("u64", 8, 0), 2**40) == (2**40).to_bytes(8, "little")
    q, row = (ptxrt.to_device(np.zeros((1, 1, 1, 32), BF16)) for _ in range(2))
    keys = row.broadcast_to((1, 1, LARGEST_SIZE + 1, 32))
    with pytest.raises(ptxrt.ArgumentError, match=f"attention_bf16: the size {LARGEST_SIZE + 1} does not fit"):
        ptxrt.attention(q, keys, keys)


def test_views_that_go_backwards_are_refused_by_the_function_that_was_called(machine, rng):
    q, k, v = (ptxrt.to_device(x) for x in random_qkv(rng, 1, 2, 70, 70, 32))
    mask = ptxrt.to_device(np.ones((70, 70), bool))
    sinks = ptxrt.to_device(np.ones(2, np.float32))
    for name, x in dict(q=q, k=k, v=v, mask=mask, sinks=sinks, out=ptxrt.empty((1, 2, 70, 32), BF16)).items():
        backwards = x[..., ::-1, :] if x.ndim > 1 else x[::-1]
        with pytest.raises(
            ptxrt.ArgumentError, match=rf"^attention: {name} \[.*\] has strides of .* copy it so that they go from 0 on"
        ):
            ptxrt.attention(**{**dict(q=q, k=k, v=v), name: backwards})
    for role in "qkv":
        with pytest.raises(ptxrt.ArgumentError, match=r"^quantize_operand: x \[.*\] has strides of"):
            ptxrt.quantize_operand(q[:, :, ::-1], "mxfp8", role=role)
    with pytest.raises(ptxrt.ArgumentError, match=r"^merge: outputs\[1\] \[.*\] has strides of"):
        ptxrt.merge([q, q[:, :, ::-1]], [sinks[:, None].broadcast_to((1, 2, 70))] * 2)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16], ids=lambda d: np.dtype(d).name)
def test_operands_from_any_address(machine, rng, dtype, queries):
    """q, k and v not aligned to 16 bytes, of one row or more, give the same bits as aligned ones, in every block
    format."""
    x = random_qkv(rng, 1, 1, queries, queries, 64, dtype=dtype)
    off = [ptxrt.to_device(np.concatenate([np.zeros(1, dtype), a.ravel()]))[1:].reshape(a.shape) for a in x]
    assert all(a.address % 16 for a in off)
    for formats in (dict(qk="mxfp8"), dict(qk="nvfp4"), dict(qk="bf16")):
        got = ptxrt.attention(*off, **formats).to_numpy()
        np.testing.assert_array_equal(bits(got), bits(ptxrt.attention(*x, **formats)))
