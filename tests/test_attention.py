"""`attention` in bf16 and f16 on every machine: every option against a restatement of the algorithm and against
float64."""

import itertools

import ml_dtypes
import numpy as np
import pytest

import ptxrt
from attention_arrays import bits, bits_by_blocks, random_qkv, relative
from attention_restated import restated
from ptxrt import launch
from ptxrt.backend import Facts
from ptxrt.launch import grid_of, suits_halves, takes_halves
from ptxrt.ops.attention import ATTENTION, exact_attention
from ptxrt.ops.attention_kernels import HEAD_DIMS, OPEN, SPLIT_UNIT, exact_quotient, exact_sums, visible, visible_pairs
from ptxrt.ops.attention_way import InKernelAttention, splits_for

BF16 = ml_dtypes.bfloat16
DTYPES = {"bf16": BF16, "f16": np.float16}
# Relative L2 against the restatement. Rounding to a bfloat16 output costs 1.7e-3. Where a sum of products or an
# exponential differs in its last bit, a weight near a rounding boundary may round to either side.
RESTATED = 2.5e-3
# Relative L2 against float64 attention of the rounded inputs: each weight is rounded to 8 or 11 bits.
EXACT = {"bf16": 4e-3, "f16": 3e-3}

# Scores are in units of log2, which float32 bounds: larger penalties are clamped.
LEAST_LSE = float(np.finfo(np.float32).min) * np.log(2)


def rounded(format, *arrays):
    """The values of operands in a format."""
    return tuple(np.asarray(x).astype(DTYPES[format]) for x in arrays)


def assert_lse(got, want):
    """Float32 sums and an approximate logarithm: 1e-4 of the larger of 1 and |lse|."""
    assert got.dtype == np.float32
    seen = np.isfinite(want)
    np.testing.assert_array_equal(got[~seen], want[~seen])
    assert (np.abs(got[seen] - want[seen]) <= 1e-4 * np.maximum(1, np.abs(want[seen]))).all()


def check(q, k, v, format="bf16", **options):
    """Compare a call with the restatement and with float64; return its output."""
    out, lse = ptxrt.attention(q, k, v, qk=format, return_lse=True, out_dtype=BF16, **options)
    causal, window = options.get("causal", False), options.get("window")
    left, right = (OPEN if side is None else side for side in window or (None, None))
    again = {name: options[name] for name in ("scale", "softcap", "mask", "sinks") if name in options}
    same, same_lse = restated(
        q, k, v, DTYPES[format], left=left, right=0 if causal else right, lengths=options.get("key_lengths"), **again
    )
    want, want_lse = exact_attention(
        *rounded(format, q, k, v), causal=causal, window=window, key_lengths=options.get("key_lengths"), **again
    )
    assert out.dtype == BF16 and relative(out, same) <= RESTATED and relative(out, want) <= EXACT[format]
    assert_lse(lse, same_lse)
    assert_lse(lse, np.where(want_lse == -np.inf, want_lse, np.maximum(want_lse, LEAST_LSE)).astype(np.float32))
    assert not out.astype(np.float32)[want_lse == -np.inf].any()
    return out


# The grid: the lengths that FlashAttention, FlashInfer and SageAttention test, each with some of the options

LENGTHS = [(1, 1), (1, 239), (3, 17), (17, 3), (113, 203), (127, 64), (203, 113), (239, 128)]
OPTIONS = [
    dict(),
    dict(causal=True),
    dict(window=(20, 5)),
    dict(window=(11, None), causal=True),
    dict(window=(None, 30)),
    dict(window=(0, 0)),
    dict(softcap=0.7),
    dict(scale=0.9, causal=True),
]


@pytest.mark.parametrize("index, lengths", list(enumerate(LENGTHS)), ids=str)
def test_lengths(machine, rng, index, lengths):
    """Every pair of lengths with two of the options; over all pairs every option occurs twice."""
    for options in (OPTIONS[index % len(OPTIONS)], OPTIONS[(3 * index + 1) % len(OPTIONS)]):
        check(*random_qkv(rng, 1, 1, *lengths, 32), **options)


@pytest.mark.parametrize("dim, dim_v", [(1, 1), (20, 20), (64, 40), (72, 128), (96, 96), (128, 128), (192, 128)])
@pytest.mark.parametrize("format", DTYPES)
def test_head_dims(machine, rng, dim, dim_v, format):
    check(*random_qkv(rng, 1, 1, 19, 70, dim, dim_v=dim_v), format, causal=True)


@pytest.mark.parametrize("heads, heads_kv", [(2, 1), (3, 1), (4, 1), (6, 1), (8, 1), (6, 2), (4, 4)])
def test_grouped_heads(machine, rng, heads, heads_kv):
    check(*random_qkv(rng, 2, heads, 7, 66, 32, heads_kv=heads_kv), causal=True)


MASKS = {
    "bool": lambda rng, shape: rng.random(shape) < 0.6,
    "infinite": lambda rng, shape: rng.choice(np.float32([0, -np.inf]), shape),
    "large": lambda rng, shape: rng.choice(np.float32([0, -1e30, -3e38]), shape),
    "bias": lambda rng, shape: (3 * rng.standard_normal(shape)).astype(np.float32),
}


@pytest.mark.parametrize("shape", [(17, 90), (1, 90), (2, 1, 1, 90), (4, 17, 1), (2, 4, 17, 90), ()], ids=str)
def test_masks_broadcast(machine, rng, shape):
    for kind in ("bool", "bias"):
        check(*random_qkv(rng, 2, 4, 17, 90, 32, heads_kv=2), mask=MASKS[kind](rng, shape))


@pytest.mark.parametrize("kind", MASKS)
def test_masks_with_all_else(machine, rng, kind):
    """With windows, a softcap and sinks at once; the mask hides every key of the last row."""
    mask = MASKS[kind](rng, (33, 130))
    if kind != "bias":
        mask[-1] = mask.min()
    check(*random_qkv(rng, 1, 2, 33, 130, 32), mask=mask, window=(90, 4), softcap=2.0)
    check(*random_qkv(rng, 1, 2, 33, 130, 32), mask=mask, causal=True, sinks=np.float32([0.3, -2]))


def test_masks_of_other_types(machine, rng):
    q, k, v = random_qkv(rng, 1, 2, 9, 40, 32)
    bias = rng.integers(-8, 9, (9, 40)) / np.float32(4)  # exact in every dtype
    want = ptxrt.attention(q, k, v, mask=bias)
    for dtype in (np.float16, BF16, np.float64):
        np.testing.assert_array_equal(ptxrt.attention(q, k, v, mask=bias.astype(dtype)), want)


def test_large_finite_masks_are_relative(machine, rng):
    """A row whose keys all have the same large penalty is as without it, within the resolution of float32 at that
    magnitude."""
    q, k, v = random_qkv(rng, 1, 1, 8, 100, 32)
    mask = np.full((8, 100), -1e4, np.float32)
    assert relative(ptxrt.attention(q, k, v, mask=mask), ptxrt.attention(q, k, v)) < 5e-3
    mask[:, 50:] = -1e30
    assert relative(ptxrt.attention(q, k, v, mask=mask), ptxrt.attention(q, k[:, :, :50], v[:, :, :50])) < 5e-3
    mask[:] = -1e30  # scores vanish beside it: the mean of all values
    assert (
        relative(ptxrt.attention(q, k, v, mask=mask), np.broadcast_to(v.mean(axis=2, keepdims=True), (1, 1, 8, 32)))
        < 5e-3
    )


@pytest.mark.parametrize("sinks", [[0.0, 5.0], [-np.inf, 2.0], [60.0, -60.0]], ids=str)
def test_sinks(machine, rng, sinks):
    sinks = np.float32(sinks)
    q, k, v = random_qkv(rng, 2, 2, 30, 70, 32)
    check(q, k, v, sinks=sinks)
    out, lse = ptxrt.attention(
        q, k[:, :, :5], v[:, :, :5], causal=True, sinks=sinks, return_lse=True
    )  # 25 rows see no key
    assert not out[:, :, :25].astype(np.float32).any()
    np.testing.assert_allclose(lse[:, :, :25], np.broadcast_to(sinks[:, None], (2, 2, 25)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("formats", ["bf16", "mxfp8"])
def test_a_sink_that_is_nan_makes_its_head_nan(machine, rng, formats):
    q, k, v = random_qkv(rng, 1, 2, 5, 40, 32)
    out, lse = ptxrt.attention(q, k, v, qk=formats, sinks=np.float32([np.nan, 1]), return_lse=True)
    for result in (out.astype(np.float32), lse):
        assert np.isnan(result[:, 0]).all() and np.isfinite(result[:, 1]).all()


def test_key_lengths_hide_what_lies_behind(machine, rng):
    """NaN and infinities in K or V beyond the key length do not change a bit."""
    q, k, v = random_qkv(rng, 5, 2, 9, 140, 32)
    lengths = np.array([140, 64, 65, 1, 0])
    for causal in (False, True):
        out = check(q, k, v, key_lengths=lengths, causal=causal)
        for batch, length in enumerate(lengths):
            k[batch, :, length:], v[batch, :, length:] = np.nan, np.inf
        again = ptxrt.attention(q, k, v, key_lengths=lengths, causal=causal, out_dtype=out.dtype)
        np.testing.assert_array_equal(bits(again), bits(out))
        k, v = np.nan_to_num(k), np.nan_to_num(v, posinf=0)
    assert not out[4].astype(np.float32).any()


@pytest.mark.parametrize(
    "options", [dict(), dict(causal=True), dict(window=(9, 3)), dict(sinks=np.float32([1, -1, 0, 2]))], ids=str
)
def test_packed_sequences_equal_separate_calls(machine, rng, options):
    cu_q, cu_k = [0, 5, 5, 75, 90], [0, 70, 80, 90, 220]
    q, k, v = (x.transpose(0, 2, 1, 3) for x in random_qkv(rng, 1, 4, 90, 220, 32, heads_kv=2))
    layout = dict(layout="bshd", return_lse=True, **options)
    out, lse = ptxrt.attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **layout)
    assert out.shape == (1, 90, 4, 32) and lse.shape == (1, 4, 90)
    for i in range(4):
        rows, columns = slice(*cu_q[i : i + 2]), slice(*cu_k[i : i + 2])
        alone, its_lse = ptxrt.attention(q[:, rows], k[:, columns], v[:, columns], **layout)
        np.testing.assert_array_equal(out[:, rows].view(np.uint16), alone.view(np.uint16))
        np.testing.assert_array_equal(lse[..., rows], its_lse)
    want, _ = exact_attention(
        *(x.transpose(0, 2, 1, 3) for x in rounded("bf16", q, k, v)), cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options
    )
    assert relative(out.transpose(0, 2, 1, 3), want) <= EXACT["bf16"]


@pytest.mark.parametrize("sequences", [1, 3, 33, 1025])
def test_blocks_of_packed_sequences_grow_with_the_rows(machine, rng, sequences):
    """A block finds its sequence among any number, empty ones included, and every row of a group is computed."""
    kernel, rows = ptxrt.kernels()["attention_bf16"], max(150, sequences * 3 // 2)
    starts, key_starts = (
        np.concatenate([[0], np.sort(rng.integers(0, n + 1, sequences - 1)), [n]]).astype(np.int32)
        for n in (rows, rows + 50)
    )
    q, k, v = random_qkv(rng, 1, 2, rows, rows + 50, 32, heads_kv=1)
    grouped = q.reshape(1, 1, 2, rows, 32).astype(BF16)
    ends = dict(query_starts=starts[:-1], query_ends=starts[1:], key_starts=key_starts[:-1], key_ends=key_starts[1:])
    with ptxrt.trace() as trace:
        out = kernel(
            *(grouped, k.astype(BF16), v.astype(BF16)),
            **(ends | dict(out_f32=True, scale=32**-0.5, left=OPEN, right=OPEN, splits=1)),
        )
    want, _ = exact_attention(*rounded("bf16", q, k, v), cu_seqlens_q=starts, cu_seqlens_k=key_starts)
    assert relative(out.reshape(want.shape), want) <= EXACT["bf16"]
    (grid,) = (launch.grid for launch in trace.launches)
    assert grid[0] == grid[2] == 1 and grid[1] <= 2 * rows // 16 + sequences


@pytest.mark.parametrize("format", ["bf16", "mxfp8"])
def test_masks_of_packed_sequences_have_the_whole_lengths(machine, rng, format):
    """Sequence i uses the part of the mask at its own rows and keys."""
    cu_q, cu_k = [0, 1, 9, 20], [0, 5, 70, 100]
    q, k, v = random_qkv(rng, 1, 2, 20, 100, 32)
    mask = np.where(rng.random((20, 100)) < 0.3, -np.inf, rng.standard_normal((20, 100)) * 2).astype(np.float32)
    for mask in (mask, mask > 0):
        got = ptxrt.attention(q, k, v, qk=format, mask=mask, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
        for rows, keys in zip(map(slice, cu_q, cu_q[1:]), map(slice, cu_k, cu_k[1:])):
            alone = ptxrt.attention(q[:, :, rows], k[:, :, keys], v[:, :, keys], qk=format, mask=mask[rows, keys])
            np.testing.assert_array_equal(got[:, :, rows].view(np.uint16), alone.view(np.uint16))


# Inputs with known results


@pytest.mark.parametrize("format", DTYPES)
def test_values_of_one_give_one(machine, rng, format):
    """Within 2**-7, an ulp of bfloat16, and with a small mean error: the weights are divided by their own sum."""
    q, k, v = random_qkv(rng, 1, 2, 40, 150, 32)
    for options in (dict(), dict(causal=True), dict(softcap=1.0)):
        got = ptxrt.attention(3 * q, k, np.ones_like(v), qk=format, **options).astype(np.float32)
        assert (np.abs(got - 1) <= 2.0**-7).all() and abs(got.mean() - 1) < 2.0**-9


def test_values_of_the_identity_show_the_weights(machine, rng):
    """V = identity, causal: each output is a row of weights, so that a misplaced key shows."""
    q, k, _ = random_qkv(rng, 1, 1, 64, 64, 64)
    got = ptxrt.attention(q, k, np.eye(64, dtype=np.float32)[None, None], causal=True, out_dtype=np.float32)[0, 0]
    scores = np.where(
        visible(64, 64, right=0),
        q[0, 0].astype(BF16).astype(np.float64) @ k[0, 0].astype(BF16).astype(np.float64).T / 8,
        -np.inf,
    )
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    assert (got[~visible(64, 64, right=0)] == 0).all()
    np.testing.assert_allclose(got, weights, rtol=2.0**-8 + 1e-5)  # one rounding of each weight to 8 bits


def test_one_hot_rows_choose_their_key(machine):
    """Row i of Q matches key (7 i + 3) % 70 alone, with 2000 times the weight of all others together."""
    keys = np.eye(70, 128, dtype=np.float32)
    rows = (7 * np.arange(70) + 3) % 70
    values = np.random.default_rng(5).integers(-8, 9, (70, 128)).astype(np.float32)
    out = ptxrt.attention(
        12 * keys[rows][None, None], keys[None, None], values[None, None], scale=1.0, out_dtype=np.float32
    )
    np.testing.assert_allclose(out[0, 0], values[rows], rtol=0, atol=8 * (2.0**-8 + 2 * 70 * np.exp(-12)))


def test_block_structured_queries(machine, rng):
    """Blocks of 16 queries that each match one block of keys: a row of another block shows at once."""
    blocks = np.kron(np.eye(8, dtype=np.float32), np.ones((16, 8), np.float32))[None, None]
    v = rng.standard_normal((1, 1, 128, 64), dtype=np.float32)
    got = ptxrt.attention(10 * blocks, blocks, v, scale=1.0, out_dtype=np.float32)
    want = v.astype(BF16).astype(np.float32).reshape(8, 16, 64).mean(axis=1).repeat(16, axis=0)
    assert relative(got[0, 0], want) < 2e-3


def test_a_shift_of_all_keys_changes_nothing(machine, rng):
    """Adding a constant vector to all keys does not change the softmax; K and Q can represent the sums exactly."""
    q, k, v = random_qkv(rng, 1, 1, 20, 90, 32)
    q, k = np.round(q * 4) / 4, np.round(k * 4) / 4
    want, want_lse = ptxrt.attention(q, k, v, return_lse=True)
    shifted, lse = ptxrt.attention(q, k + 8, v, return_lse=True)
    assert relative(shifted, want) < 5e-3  # two roundings of the weights and two of the output
    np.testing.assert_allclose(lse - want_lse, (8 * q.sum(axis=-1)) * 32**-0.5, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("format", DTYPES)
def test_scores_up_to_60(machine, rng, format):
    q, k, v = random_qkv(rng, 1, 1, 40, 130, 32)
    scores = q[0, 0] @ k[0, 0].T
    check(q * np.float32(60 / np.abs(scores).max() * 32**0.5), k, v, format)
    for sign in (-1, 1):
        ramp = np.linspace(0, 60, 130, dtype=np.float32)[None, None, :, None] * np.eye(1, 32, dtype=np.float32)
        check(np.full((1, 1, 5, 32), sign, np.float32), ramp, v, format, scale=1.0)


@pytest.mark.parametrize(
    "options",
    [dict(), dict(causal=True), dict(mask=np.zeros((1, 100), np.float32))],
    ids=["plain", "masked", "transformed"],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_scores_far_from_zero(machine, rng, sign, options):
    """Rows whose largest scores are near a power of two, up to magnitudes where float32 resolves no integers; two keys
    share the weight."""
    powers = 2.0 ** np.float32([10, 20, 27, 28, 29, 30, 31, 33, 60, 100])
    k = np.zeros((1, 1, 100, 32), np.float32)
    k[0, 0, :, 0] = sign - 2.0**-6 * rng.integers(1, 9, 100)
    k[0, 0, [7, 80], 0] = sign
    q, v = (
        powers[None, None, :, None] * np.eye(1, 32, dtype=np.float32),
        rng.standard_normal((1, 1, 100, 32), dtype=np.float32),
    )
    out, lse = ptxrt.attention(q, k, v, scale=1.0, return_lse=True, out_dtype=np.float32, **options)
    want = v.astype(BF16).astype(np.float32)[0, 0, [7, 80]].mean(axis=0)
    assert all(relative(row, want) < 2.5e-3 for row in out[0, 0])
    assert_lse(lse[0, 0], np.float32(sign * powers + np.log(2)))
    _, _, row_sum = ptxrt.attention(q, k, v, scale=1.0, normalize=False, **options)
    assert ((1 <= row_sum) & (row_sum <= 2)).all()  # two weights in (1/2, 1]


@pytest.mark.parametrize("bits", [8, 11, 14])
def test_one_key_above_all_others(machine, rng, bits):
    """A sink key with 2**bits times the weight of each of 1023 others: the share of the others must survive."""
    k = np.zeros((1, 1, 1024, 32), np.float32)
    k[0, 0, 7, 0] = bits / np.log2(np.e)
    q, v = np.eye(1, 32, dtype=np.float32)[None, None], rng.standard_normal((1, 1, 1024, 32), dtype=np.float32)
    k = k.astype(BF16)
    got = ptxrt.attention(q, k, v, scale=1.0, out_dtype=np.float32)
    want, _ = exact_attention(q, k, v.astype(BF16), scale=1.0)
    assert relative(got, want) < 4e-3


@pytest.mark.parametrize("scale", [0.0, 1.0, -0.3])
def test_any_scale(machine, rng, scale):
    check(*random_qkv(rng, 1, 1, 24, 70, 32), scale=scale)


# NaN


def test_nan_propagates_to_the_rows_that_see_it(machine, rng):
    q, k, v = random_qkv(rng, 1, 1, 70, 70, 32)
    clean = ptxrt.attention(q, k, v)
    spoiled = q.copy()
    spoiled[0, 0, 5, 3] = np.nan
    got, lse = ptxrt.attention(spoiled, k, v, return_lse=True)
    assert np.isnan(got[0, 0, 5].astype(np.float32)).all() and np.isnan(lse[0, 0, 5])
    np.testing.assert_array_equal(
        np.delete(got, 5, axis=2).view(np.uint16), np.delete(clean, 5, axis=2).view(np.uint16)
    )
    spoiled = k.copy()
    spoiled[0, 0, 40, 3] = np.nan
    got = ptxrt.attention(q, spoiled, v, causal=True).astype(np.float32)
    assert np.isfinite(got[0, 0, :40]).all() and np.isnan(got[0, 0, 40:]).all()


# Splits, sums and merging


@pytest.mark.parametrize("format", DTYPES)
def test_weights_are_rounded_alike_under_any_maximum(machine, rng, format):
    """V = identity shows the weights: those of 63 keys, and the same beside a 64th key whose score is 8 in units of
    log2. All 30000 are bit-identical."""
    q, k, _ = random_qkv(rng, 1, 1, 512, 64, 64)
    q /= 2  # so that all weights are normal float16 numbers
    q[..., 0], k[..., 0] = 4, 0
    k[0, 0, 63] = np.float32(8 * np.log(2) * 64**0.5 / 4) * np.eye(1, 64, dtype=np.float32)
    v = np.eye(64, dtype=np.float32)[None, None]
    beside, its_max, _ = ptxrt.attention(q, k, v, qk=format, normalize=False)
    alone, row_max, _ = ptxrt.attention(q, k[:, :, :63], v[:, :, :63], qk=format, normalize=False)
    assert (its_max > row_max).mean() > 0.9
    np.testing.assert_array_equal(beside[..., :63] * np.exp2(its_max - row_max)[..., None], alone[..., :63])


@pytest.mark.parametrize("format", ["bf16", "f16", "mxfp8", "nvfp4"])
def test_weights_are_rounded_alike_whatever_came_first(machine, rng, format):
    """A tile of keys before or after another whose scores are 7 higher in units of log2; V shows the weights of the
    former.

    The order of sums differs; a weight that rounds differently would differ by 2**-11 or more.
    """
    q, k, _ = random_qkv(rng, 1, 1, 128, 128, 64)
    q[..., :32] = q[..., :32].clip(-1, 1) / 2  # so that all weights are normal numbers of float16 and e4m3
    q[..., 32:], k[..., 32:] = 0, 0
    q[..., 32], k[:, :, 64:, 32] = 4, np.float32(7 * np.log(2) * 64**0.5 / 4)
    v = np.eye(128, 64, dtype=np.float32)[None, None]
    behind = ptxrt.attention(q, k, v, qk=format, smooth_k=False, out_dtype=np.float32)
    before = ptxrt.attention(
        q, np.roll(k, 64, axis=2), np.roll(v, 64, axis=2), qk=format, smooth_k=False, out_dtype=np.float32
    )
    np.testing.assert_allclose(before, behind, rtol=1e-5)


@pytest.mark.parametrize("qk", ["bf16", "mxfp8"])
def test_values_of_any_size(machine, rng, qk):
    """V times a power of two gives the output times that power, bit for bit. Unnormalized sums of large values may be
    scaled down by 2**32, with maxima 32 higher."""
    q, k, v = random_qkv(rng, 1, 1, 20, 100, 32)
    whole, (sums, maxima, _) = (
        ptxrt.attention(q, k, v, qk=qk, pv="bf16", out_dtype=np.float32, normalize=n) for n in (True, False)
    )
    for power in (-30, 120):
        scaled = v * np.float32(2.0**power)
        got = ptxrt.attention(q, k, scaled, qk=qk, pv="bf16", out_dtype=np.float32)
        np.testing.assert_array_equal(got, whole * np.float32(2.0**power))
        got, higher, _ = ptxrt.attention(q, k, scaled, qk=qk, pv="bf16", normalize=False)
        assert ((higher == maxima) | (higher == maxima + 32)).all()
        np.testing.assert_array_equal(
            np.ldexp(np.float64(got), (higher - maxima).astype(int)[..., None]), np.ldexp(np.float64(sums), power)
        )


def test_few_rows_are_split_by_shapes_alone():
    assert splits_for(8, 1, 32768) == 32 and splits_for(8, 128, 32768) == 32
    assert splits_for(32, 512, 512) == 1 and splits_for(32, 2048, 2048) == 1 and splits_for(1, 1, 100) == 1
    # Many rows are split only into runs that are worth the merge.
    assert splits_for(32, 512, 1024) == splits_for(16, 512, 2048) == splits_for(24, 512, 2048) == 1
    assert splits_for(8, 512, 2048) == splits_for(32, 128, 2048) == 4
    assert splits_for(16, 512, 8192) == 4 and splits_for(8, 512, 32768) == 8
    for heads_kv in (1, 2, 8, 200):
        for rows in (1, 64, 65, 5000):
            for keys in (1, 63, 64, 65, 1000, 4097, 10**6):
                units, splits = -(-keys // SPLIT_UNIT), splits_for(heads_kv, rows, keys)
                run = -(-units // splits)
                assert (splits - 1) * run < units <= splits * run, "every run has keys, and together they have all"


def test_few_rows_give_the_bits_that_they_have_among_many(rng):
    """On the portable machine the warps of a block share few rows; of many rows each warp has two slices."""
    q, k, v = random_qkv(rng, 1, 2, 100, 90, 32, dtype=BF16)
    with ptxrt.using("emulator", ptx="portable"):
        many, many_lse = ptxrt.attention(q, k, v, return_lse=True)
        few, few_lse = ptxrt.attention(q[:, :, :40], k, v, return_lse=True)
    np.testing.assert_array_equal(many[:, :, :40].view(np.uint16), few.view(np.uint16))
    np.testing.assert_array_equal(many_lse[:, :, :40], few_lse)


def test_half_blocks_give_the_bits_of_whole_ones(rng, monkeypatch):
    """On the portable machine, with race checks: more tiles than stages, masked and plain tiles, a partial last tile,
    and rows without keys."""
    q, k, v = random_qkv(rng, 1, 1, 70, 330, 32, dtype=BF16)
    for options in (dict(), dict(causal=True, window=(200, None), key_lengths=[60])):
        with ptxrt.using("emulator", ptx="portable", races=True) as backend:
            half, whole = (bits_by_blocks(backend, monkeypatch, halved, q, k, v, **options) for halved in (True, False))
        assert half[2] == whole[2] + "_half"
        for mine, others in zip(half[:2], whole[:2]):
            np.testing.assert_array_equal(mine, others)


@pytest.mark.parametrize(
    "heads, queries, keys, columns, options",
    [
        (2, 70, 130, 32, dict()),  # idle warps, and a warp whose rows exist in part
        (2, 70, 130, 32, dict(causal=True, key_lengths=[60])),  # rows without keys
        (2, 70, 130, 24, dict()),  # columns that do not exist
        (1, 5, 700, 32, dict()),  # split keys
        (4, 1, 700, 32, dict()),  # of one query of heads that share keys
        (4, 5, 700, 32, dict(return_lse=True)),
        (4, 5, 700, 24, dict(normalize=False)),
        (2, 5, 130, 32, dict(sinks=np.float32([1.0, -2.0]))),
        (2, 5, 130, 32, dict(out_dtype=np.float16)),
    ],
)
def test_half_blocks_end_as_whole_ones(rng, monkeypatch, heads, queries, keys, columns, options):
    """On the portable machine in bf16, with race checks: a launch whose sums are ordinary, too small, too large, zero
    or NaN, in one block or in some of its warps, has the bits of one with whole blocks."""
    q, k, v = random_qkv(rng, 1, heads, queries, keys, 32, dim_v=columns, heads_kv=1, dtype=BF16)
    small, large, zero, not_a_number = (np.array(v) for _ in range(4))
    small[..., 3::5] *= BF16(2.0**-120)
    large[..., 2] = BF16(3e38)
    zero[..., 7:] = 0
    not_a_number[0, 0, keys // 2, 1] = np.nan
    for values in (v, small, large, zero, not_a_number, np.zeros_like(v)):
        with ptxrt.using("emulator", ptx="portable", races=True) as backend:
            ends = []
            for halved in (True, False):
                monkeypatch.setattr(launch, "takes_halves", lambda *_, halved=halved: halved)
                backend.remembered.calls.clear()
                with ptxrt.trace() as trace:
                    got = ptxrt.attention(q, k, values, **options)
                entries = {run.entry for run in trace.launches if run.kernel == "attention_bf16"}
                assert [entry.endswith("_half") for entry in entries] == [halved]
                ends.append(got if isinstance(got, tuple) else (got,))
            backend.remembered.calls.clear()
        for mine, others in zip(*ends):
            np.testing.assert_array_equal(bits(mine), bits(others))


@pytest.mark.gpu
@pytest.mark.parametrize("dim, dim_v", HEAD_DIMS)
@pytest.mark.parametrize("causal", [False, True])
def test_half_blocks_of_every_head_dimension(gpu, rng, monkeypatch, dim, dim_v, causal):
    q, k, v = random_qkv(rng, 2, 4, 515, 700, dim, dim_v=dim_v, heads_kv=2, dtype=BF16)
    half, whole = (bits_by_blocks(gpu, monkeypatch, halved, q, k, v, causal=causal) for halved in (True, False))
    assert not whole[2].endswith("_half")
    for mine, others in zip(half[:2], whole[:2]):
        np.testing.assert_array_equal(mine, others)


@pytest.mark.parametrize(
    "heads, heads_kv, batch, queries, keys, multiprocessors, halved",
    [
        (32, 32, 1, 512, 512, 132, True),  # 128 whole blocks
        (32, 32, 1, 512, 512, 170, True),
        (32, 32, 1, 512, 512, 108, False),
        (32, 32, 4, 2048, 2048, 132, False),
        (32, 8, 1, 1, 32768, 132, True),  # decoding: half a block holds all rows
        (32, 8, 1, 16, 32768, 170, True),
        (64, 8, 1, 16, 32768, 132, False),  # only a whole block holds all rows here
    ],
)
def test_few_rows_and_few_blocks_take_half_blocks(heads, heads_kv, batch, queries, keys, multiprocessors, halved):
    kernel = ptxrt.kernels()["attention_bf16"]
    group = heads // heads_kv
    q = np.broadcast_to(BF16(0), (batch, heads_kv, group, queries, 128))
    k = np.broadcast_to(BF16(0), (batch, heads_kv, keys, 128))
    splits = splits_for(heads_kv, group * queries, keys)
    bound = kernel.bind(q, k, k, out_bf16=True, scale=1.0, left=OPEN, right=OPEN, sequences=batch, splits=splits)

    def facts(rows: int) -> Facts:
        return Facts((128, 1, 1), 98304, tuple(rows if "queries" in dim.axes else 1 for dim in kernel.grid), 2, 0)

    grid = grid_of(bound, facts(128).tile)
    assert suits_halves(bound, grid, facts(128), facts(64), multiprocessors) == halved
    assert not suits_halves(bound, grid, facts(128), facts(128), multiprocessors), (
        "halves that are no smaller are empty"
    )


@pytest.mark.parametrize(
    "rows, resident, heads, queries, multiprocessors, halved",
    [
        (128, 2, 32, 512, 170, True),  # 128 whole blocks, of which multiprocessors would have one
        (128, 2, 32, 1024, 170, False),  # 256: most have two, as many as fit
        (128, 2, 32, 1024, 300, True),
        (128, 2, 32, 64, 84, True),  # no row of a half block is empty
        (128, 2, 32, 4096, 170, False),
        (192, 1, 32, 512, 170, True),
        (192, 1, 32, 1024, 170, True),  # 192 whole blocks in two rounds, or 512 half blocks in two of fewer rows
        (192, 1, 28, 1024, 170, True),  # 168 whole blocks, one round
        (192, 1, 24, 4608, 170, False),
        (192, 1, 40, 32760, 170, False),
        (192, 1, 1, 193, 1, True),  # of two whole blocks one is nearly empty
        (64, 2, 1, 64, 170, False),  # half blocks that are no smaller
    ],
)
def test_the_multiprocessor_with_most_blocks_decides(rows, resident, heads, queries, multiprocessors, halved):
    """Blocks of attention in block formats on sm_120a: `resident` of `rows` rows to a multiprocessor, or two half
    blocks of 64 rows."""
    whole, half = (Facts((32 * r // 16, 1, 1), 0, (1, r, 1), n, 0) for r, n in ((rows, resident), (64, 2)))
    blocks, halves = (heads * -(-queries // facts.tile[1]) for facts in (whole, half))
    assert takes_halves(blocks, halves, whole, half, multiprocessors) == halved


def test_split_keys_give_what_one_pass_gives(machine, rng):
    """Rows few enough for splits, against float64 and against one pass."""
    q, k, v = random_qkv(rng, 1, 2, 3, 1000, 32, heads_kv=1, dtype=BF16)
    sinks = np.float32([1.0, -1.0])
    for options in (
        dict(),
        dict(causal=True, sinks=sinks),
        dict(window=(300, 0)),
        dict(mask=rng.random((3, 1000)) < 0.5),
        dict(softcap=1.0),
    ):
        with ptxrt.trace() as trace:
            got, lse = ptxrt.attention(q, k, v, return_lse=True, out_dtype=np.float32, **options)
        assert [launch.kernel for launch in trace.launches] == ["attention_bf16", "attention_merge"]
        want, want_lse = exact_attention(q, k, v, **options)
        assert relative(got, want) < 2.5e-3
        assert_lse(lse, want_lse.astype(np.float32))
    whole = ptxrt.kernels()["attention_bf16"]
    one, its_lse = whole(
        q.reshape(1, 1, 2, 3, 32),
        k,
        v,
        out_f32=True,
        lse=True,
        scale=32**-0.5,
        left=OPEN,
        right=OPEN,
        sequences=1,
        splits=1,
    )
    assert relative(ptxrt.attention(q, k, v, out_dtype=np.float32), one.reshape(q.shape)) < 1e-5


@pytest.mark.parametrize("keys", [40, 1000])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_sums_before_the_division(machine, rng, keys, layout):
    q, k, v = random_qkv(rng, 2, 2, 5, keys, 32, dim_v=20)
    want, want_lse = exact_attention(*rounded("bf16", q, k, v), causal=True)
    given = (q, k, v) if layout == "bhsd" else tuple(x.transpose(0, 2, 1, 3) for x in (q, k, v))
    out, row_max, row_sum = ptxrt.attention(*given, normalize=False, causal=True, layout=layout)
    out = out if layout == "bhsd" else out.transpose(0, 2, 1, 3)
    assert out.dtype == row_max.dtype == row_sum.dtype == np.float32 and (row_max == np.ceil(row_max)).all()
    assert relative(out / row_sum[..., None], want) < 2.5e-3
    assert_lse(((row_max + np.log2(row_sum)) * np.log(2)).astype(np.float32), want_lse.astype(np.float32))


def test_rows_without_keys_have_no_sums(machine, rng):
    out, row_max, row_sum = ptxrt.attention(*random_qkv(rng, 1, 1, 20, 8, 32), normalize=False, causal=True)
    assert not out[:, :, :12].any() and (row_max[:, :, :12] == -np.inf).all() and not row_sum[:, :, :12].any()
    assert (row_sum[:, :, 12:] > 0).all()


def merged(outs, lses):
    """The definition of `merge` in float64."""
    outs, lses = (np.asarray([np.asarray(x, np.float64) for x in group]) for group in (outs, lses))
    top = lses.max(axis=0)
    weights = np.exp(lses - np.where(np.isfinite(top), top, 0))
    total = weights.sum(axis=0)
    with np.errstate(divide="ignore"):
        return (weights[..., None] * outs).sum(axis=0) / np.where(total, total, 1)[..., None], top + np.log(total)


@pytest.mark.parametrize("shape", [(2, 3, 17, 64), (1, 1, 5, 21), (4, 8), (3, 9, 128)], ids=str)
@pytest.mark.parametrize("spread", [1, 30, 1000])
def test_merge_is_its_formula(machine, rng, shape, spread):
    """Relative L2 of 1e-6: float32 sums of four terms, and exponentials within 2**-21."""
    outs = [rng.standard_normal(shape, dtype=np.float32) for _ in range(4)]
    lses = [(spread * rng.standard_normal(shape[:-1])).astype(np.float32) for _ in range(4)]
    lses[0][..., 0], lses[2][..., 1] = -np.inf, -np.inf
    for i in range(4):
        lses[i][..., 2] = -np.inf
    want, want_lse = merged(outs, lses)
    for given in (
        (outs, lses),
        (np.stack(outs), np.stack(lses)),
        (list(map(ptxrt.to_device, outs)), list(map(ptxrt.to_device, lses))),
    ):
        out, lse = (x if isinstance(x, np.ndarray) else x.to_numpy() for x in ptxrt.merge(*given))
        assert out.dtype == lse.dtype == np.float32 and relative(out, want) < 1e-6 and relative(lse, want_lse) < 1e-6
        assert not out[..., 2, :].any() and (lse[..., 2] == -np.inf).all()


def test_merge_by_maxima_and_sums_is_its_formula(machine, rng):
    """Unnormalized outputs, with maxima in units of log2."""
    outs = [rng.standard_normal((2, 3, 17, 64), dtype=np.float32) for _ in range(4)]
    maxima = [rng.integers(-30, 30, (2, 3, 17)).astype(np.float32) for _ in outs]
    sums = [rng.uniform(1, 100, (2, 3, 17)).astype(np.float32) for _ in outs]
    maxima[1][..., 0], outs[1][..., 0, :] = -np.inf, np.nan  # has no weight, whatever its output
    weights = np.exp2(np.float64(maxima) - 30)
    total = (weights * sums).sum(axis=0)
    want = (weights[..., None] * np.nan_to_num(outs)).sum(axis=0) / total[..., None]
    for given in (
        (outs, maxima, sums),
        (np.stack(outs), np.stack(maxima), np.stack(sums)),
        tuple(list(map(ptxrt.to_device, x)) for x in (outs, maxima, sums)),
    ):
        out, lse = (
            x if isinstance(x, np.ndarray) else x.to_numpy()
            for x in ptxrt.merge(given[0], row_max=given[1], row_sum=given[2])
        )
        assert (
            out.dtype == lse.dtype == np.float32
            and relative(out, want) < 1e-6
            and relative(lse, np.log(total) + 30 * np.log(2)) < 1e-6
        )


def test_merge_without_columns_is_of_lses(machine, rng):
    """Outputs without columns have no elements; their lse counts as usual."""
    lses = [rng.standard_normal((2, 3, 5)).astype(np.float32) for _ in range(3)]
    lses[1][0, 0, 0] = lses[2][0, 0, 0] = lses[0][0, 0, 0] = -np.inf
    outs = [np.empty((2, 3, 5, 0), dtype) for dtype in (np.float32, np.float16, BF16)]
    out, lse = ptxrt.merge(outs, lses, out_dtype=np.float16)
    assert out.shape == (2, 3, 5, 0) and out.dtype == np.float16
    np.testing.assert_allclose(lse, merged([np.zeros((2, 3, 5, 1))] * 3, lses)[1], rtol=1e-6)
    out, lse = ptxrt.merge(outs, row_max=[np.ceil(x) for x in lses], row_sum=[np.ones_like(x) for x in lses])
    np.testing.assert_allclose(lse, np.log(2) * np.log2(np.exp2(np.ceil(lses)).sum(axis=0)), rtol=1e-6)
    on_device = ptxrt.merge([ptxrt.to_device(x) for x in outs], [ptxrt.to_device(x) for x in lses])
    assert on_device[0].shape == (2, 3, 5, 0) and np.isfinite(np.delete(on_device[1].to_numpy().ravel(), 0)).all()


def test_segments_merge_however_far_their_lses_are_apart(machine):
    """A difference times log2(e) beyond 2^127 overflows: such a segment has weight 0."""
    outs, lses = np.float32([[[1.0]], [[2.0]], [[4.0]]]), np.float32([[3e38], [-3e38], [3.0]])
    for order in ([0, 1, 2], [1, 2, 0], [2, 0, 1]):
        out, lse = ptxrt.merge(outs[order], lses[order])
        assert out == 1 and lse == np.float32(3e38)


@pytest.mark.parametrize("text", ["native", "portable"])
def test_merge_writes_columns_that_lie_apart(text, rng):
    """Every other column of an array, stored one by one: the same bits as contiguous columns."""
    merge, shape = ptxrt.kernels()["attention_merge"], (1, 1, 3, 8)
    segments = rng.standard_normal((2, *shape), dtype=np.float32), np.zeros((2, *shape[:3]), np.float32)
    with ptxrt.using("emulator", ptx=text):
        whole = merge(*segments, out_bf16=True, out_f16=True, out_f32=True, dim_v=8)
        apart = [ptxrt.to_device(np.zeros((*shape[:3], 16), x.dtype)) for x in whole]
        merge(
            *map(ptxrt.to_device, segments),
            out_bf16=apart[0][..., ::2],
            out_f16=apart[1][..., ::2],
            out_f32=apart[2][..., ::2],
        )
        for got, want in zip(apart, whole):
            np.testing.assert_array_equal(bits(got.to_numpy())[..., ::2], bits(want))
            assert not bits(got.to_numpy())[..., 1::2].any()
        apart = ptxrt.to_device(np.zeros((*shape[:3], 16), BF16))
        sums = np.ones((2, *shape[:3]), np.float32)
        merge(*map(ptxrt.to_device, (*segments, sums)), out_bf16=apart[..., ::2], complete=1)
        np.testing.assert_array_equal(bits(apart.to_numpy())[..., ::2], bits(whole[0]))


@pytest.mark.parametrize("splits", [1, 3, 32, 64, 65])
def test_complete_segments_merge_as_others(machine, rng, splits):
    """The same bits as without the promise, whatever segments without keys hold, in some rows all of them."""
    merge, shape = ptxrt.kernels()["attention_merge"], (splits, 2, 3, 2)
    partial, row_sum = rng.standard_normal((*shape, 12), np.float32), rng.uniform(1, 9, shape).astype(np.float32)
    row_max = rng.integers(-9, 9, shape).astype(np.float32)
    row_max[rng.random(shape) < 0.3] = -np.inf
    row_max[:, 0, 1] = -np.inf
    partial[row_max == -np.inf] = np.nan
    for step in (0.0, 0.25):  # maxima that are no integers
        given = [partial, row_max + np.float32(step), row_sum]
        for out in ("out_bf16", "out_f16"):
            want, got = (merge(*given, **{out: True}, dim_v=8, complete=complete) for complete in (0, 1))
            np.testing.assert_array_equal(bits(got), bits(want))
            assert not np.isnan(got.astype(np.float32)).any() and not bits(got)[0, 1].any()


def test_merge_takes_and_gives_other_types(machine, rng):
    outs = [rng.standard_normal((1, 2, 5, 32)).astype(dtype) for dtype in (BF16, np.float16, np.float32)]
    lses = [rng.standard_normal((1, 2, 5)).astype(np.float32) for _ in outs]
    out, lse = ptxrt.merge(outs, lses, out_dtype=BF16)
    want, want_lse = merged(outs, lses)
    assert out.dtype == BF16 and relative(out, want) < 3e-3 and relative(lse, want_lse) < 1e-6
    same, its_lse = ptxrt.merge(outs[2:], lses[2:])
    np.testing.assert_array_equal(same, outs[2])
    np.testing.assert_allclose(its_lse, lses[2], rtol=1e-6)


# Layouts, dtypes, addresses


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16], ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("format", DTYPES)
def test_inputs_of_every_type(machine, rng, dtype, format):
    q, k, v = random_qkv(rng, 1, 2, 20, 40, 24, dtype=dtype)
    got = ptxrt.attention(q, k, v, qk=format)
    assert got.dtype == q.dtype
    np.testing.assert_array_equal(
        bits(got), bits(ptxrt.attention(*rounded(format, q, k, v), qk=format, out_dtype=q.dtype))
    )
    mixed = ptxrt.attention(q.astype(DTYPES[format]), k, v.astype(DTYPES[format]), qk=format, out_dtype=q.dtype)
    np.testing.assert_array_equal(bits(mixed), bits(got))


def test_what_is_computed_and_given_where_nothing_is_asked_for(machine, rng):
    """Defaults: compute in f16 if q, k and v are all float16, else in bf16; the result has q's dtype, or bfloat16 if q
    is an operand or no kernel writes q's dtype."""
    arrays = random_qkv(rng, 1, 2, 5, 40, 32)
    for dtypes in itertools.product((np.float16, BF16, np.float32), repeat=3):
        given = [x.astype(dtype) for x, dtype in zip(arrays, dtypes)]
        got = ptxrt.attention(*given)
        assert got.dtype == dtypes[0]
        format = "f16" if dtypes == (np.float16,) * 3 else "bf16"
        np.testing.assert_array_equal(
            bits(got), bits(ptxrt.attention(*given, qk=format, pv=format, out_dtype=dtypes[0]))
        )
    halves = [x.astype(np.float16) for x in arrays]
    np.testing.assert_array_equal(
        bits(ptxrt.attention(*map(ptxrt.to_device, halves)).to_numpy()), bits(ptxrt.attention(*halves))
    )
    exact, _ = exact_attention(*halves)
    assert relative(ptxrt.attention(*halves), exact) < 6e-4
    for q, dtype in (
        (arrays[0], np.float32),
        (halves[0], np.float16),
        (ptxrt.quantize_operand(arrays[0], "mxfp8", role="q"), BF16),
    ):
        assert ptxrt.attention(q, *arrays[1:], qk="mxfp8").dtype == dtype
    assert ptxrt.attention(*halves, normalize=False)[0].dtype == np.float32
    in_kernel = dict(qk="mxfp4", pv="bf16", quantize="in_kernel")
    assert [ptxrt.attention(x, x, x, **in_kernel).dtype for x in (arrays[0], halves[0])] == [np.float32, np.float16]


def test_a_layout_is_strides_alone(machine, rng):
    """q, k and v are views of one buffer [B, S, 3, H, D]: nothing is copied, and the result equals that of separate
    arrays."""
    whole = rng.standard_normal((2, 40, 3, 4, 32), dtype=np.float32).astype(BF16)
    q, k, v = (whole[:, :, i] for i in range(3))
    want = ptxrt.attention(*(x.transpose(0, 2, 1, 3) for x in (q, k, v)), causal=True)
    there = ptxrt.to_device(whole)
    with ptxrt.trace() as trace:
        got = ptxrt.attention(there[:, :, 0], there[:, :, 1], there[:, :, 2], causal=True, layout="bshd")
        views = ptxrt.attention(*(there[:, :, i].transpose(0, 2, 1, 3) for i in range(3)), causal=True)
    assert [launch.kernel for launch in trace.launches] == ["attention_bf16"] * 2
    assert got.shape == (2, 40, 4, 32) and got.is_contiguous
    np.testing.assert_array_equal(bits(got.to_numpy().transpose(0, 2, 1, 3)), bits(want))
    np.testing.assert_array_equal(bits(views.to_numpy()), bits(want))
    np.testing.assert_array_equal(
        bits(ptxrt.attention(q, k, v, causal=True, layout="bshd").transpose(0, 2, 1, 3)), bits(want)
    )


def test_rows_that_kernels_cannot_load_are_copied(machine, rng):
    """Device arrays with odd strides, odd offsets and repeated heads."""
    whole = rng.standard_normal((2, 30, 81), dtype=np.float32).astype(BF16)
    there = ptxrt.to_device(whole)
    x, device_x = whole[:, None, :, 3:35], there[:, None, :, 3:35]
    np.testing.assert_array_equal(
        bits(ptxrt.attention(device_x, device_x, device_x).to_numpy()), bits(ptxrt.attention(x, x, x))
    )
    q = np.broadcast_to(whole[:, None, :, :32], (2, 3, 30, 32))
    once = ptxrt.to_device(np.ascontiguousarray(whole[:, None, :, :32]))
    np.testing.assert_array_equal(
        bits(ptxrt.attention(once.broadcast_to((2, 3, 30, 32)), once, once).to_numpy()),
        bits(ptxrt.attention(q, q[:, :1], q[:, :1])),
    )


@pytest.mark.parametrize("dim_v", [32, 20])
@pytest.mark.parametrize("keys", [40, 1000])
def test_out_is_written_wherever_it_lies(machine, rng, dim_v, keys):
    q, k, v = random_qkv(rng, 1, 2, 7, keys, 32, dim_v=dim_v, dtype=BF16)
    for dtype in (BF16, np.float16, np.float32):
        want = ptxrt.attention(q, k, v, out_dtype=dtype)
        out = np.empty_like(want)
        assert ptxrt.attention(q, k, v, out=out) is out
        np.testing.assert_array_equal(bits(out), bits(want))
        place = ptxrt.to_device(np.zeros((1, 2, 7, dim_v + 12), dtype))
        target = place[..., 4 : dim_v + 4]
        device = tuple(map(ptxrt.to_device, (q, k, v)))
        assert ptxrt.attention(*device, out=target) is target
        np.testing.assert_array_equal(bits(target.to_numpy()), bits(want))
        assert not place.to_numpy()[..., dim_v + 4 :].any() and not place.to_numpy()[..., :4].any()
        turned = ptxrt.empty((1, 7, 2, dim_v), dtype)
        ptxrt.attention(*device, out=turned.transpose(0, 2, 1, 3))
        np.testing.assert_array_equal(bits(turned.to_numpy().transpose(0, 2, 1, 3)), bits(want))


def test_device_arrays_of_lengths_masks_and_sinks(machine, rng):
    q, k, v = random_qkv(rng, 2, 4, 9, 70, 32, heads_kv=2)
    options = dict(
        key_lengths=np.int32([60, 5]), mask=rng.random((2, 1, 9, 70)) < 0.7, sinks=np.float32([0, 1, -1, 0.5])
    )
    want = ptxrt.attention(q, k, v, **options)
    device = {name: ptxrt.to_device(array) for name, array in options.items()}
    got = ptxrt.attention(*map(ptxrt.to_device, (q, k, v)), **device)
    assert isinstance(got, ptxrt.DeviceArray)
    np.testing.assert_array_equal(bits(got.to_numpy()), bits(want))
    half = dict(
        device,
        sinks=ptxrt.to_device(options["sinks"].astype(np.float16)),
        mask=ptxrt.to_device(np.where(options["mask"], 0, -np.inf).astype(BF16)),
    )
    np.testing.assert_array_equal(
        bits(ptxrt.attention(*map(ptxrt.to_device, (q, k, v)), **half).to_numpy()), bits(want)
    )


def test_prepared_calls_and_graphs(machine, rng):
    """A graph records splits, casts and views, too."""
    for keys, dtype in ((40, BF16), (1000, np.float32)):
        first, second = (
            [ptxrt.to_device(x) for x in random_qkv(rng, 1, 4, 5, keys, 32, heads_kv=2, dtype=dtype)] for _ in range(2)
        )
        options = dict(causal=True, window=(300, None), layout="bhsd", return_lse=True)
        out = ptxrt.empty((1, 4, 5, 32), BF16)
        prepared = ptxrt.prepare(ptxrt.attention, *first, out=out, **options)
        got, lse = prepared(*second)
        want, want_lse = ptxrt.attention(*second, out_dtype=BF16, **options)
        np.testing.assert_array_equal(bits(got.to_numpy()), bits(want.to_numpy()))
        np.testing.assert_array_equal(lse.to_numpy(), want_lse.to_numpy())
        with ptxrt.graph() as graph:
            again, _ = ptxrt.attention(*second, out_dtype=BF16, **options)
        graph.launch()
        np.testing.assert_array_equal(bits(again.to_numpy()), bits(want.to_numpy()))


def test_prepared_results_may_be_views(machine, rng):
    x = [ptxrt.to_device(a) for a in random_qkv(rng, 1, 3, 3, 8, 32, dtype=BF16)]
    prepared = ptxrt.prepare(
        lambda q, k, v, out: ptxrt.attention(q, k, v, out=out).transpose(0, 2, 1, 3),
        *x,
        ptxrt.empty((1, 3, 3, 32), BF16),
    )
    out = ptxrt.empty((1, 3, 3, 32), BF16)
    np.testing.assert_array_equal(bits(prepared(*x, out).to_numpy()), bits(out.to_numpy().transpose(0, 2, 1, 3)))


def test_remembered_calls_know_their_options(machine, rng):
    """Calls with `out` that differ only in a window, a layout or strides."""
    q, k, v = (ptxrt.to_device(x) for x in random_qkv(rng, 1, 8, 8, 8, 32, dtype=BF16))
    out = ptxrt.empty((1, 8, 8, 32), BF16)
    for _ in range(2):
        for options in (dict(), dict(window=(1, 0)), dict(window=(0, 1)), dict(layout="bshd")):
            for there in (out, out.transpose(0, 2, 1, 3)):
                want = ptxrt.attention(q, k, v, **options).to_numpy()
                np.testing.assert_array_equal(
                    bits(ptxrt.attention(q, k, v, out=there, **options).to_numpy()), bits(want)
                )


def test_empty_calls(emulator):
    x = np.zeros((0, 2, 16, 32), np.float32)
    out, lse = ptxrt.attention(x, x, x, return_lse=True)
    assert out.shape == (0, 2, 16, 32) and lse.shape == (0, 2, 16)
    assert ptxrt.attention(np.zeros((1, 2, 0, 20), np.float32), *(np.zeros((1, 2, 5, 20), np.float32),) * 2).shape == (
        1,
        2,
        0,
        20,
    )


# Wrong calls


def test_wrong_calls_say_what_to_do(emulator, rng):
    q, k, v = random_qkv(rng, 1, 4, 16, 24, 32, heads_kv=2)
    two = random_qkv(rng, 2, 2, 16, 24, 32)
    device = list(map(ptxrt.to_device, (q, k, v)))
    for call, words in [
        (
            lambda: ptxrt.attention(q, k, v, qk="nvfp9"),
            "no kernel for qk='nvfp9', pv='nvfp9'; nearest: .*There is qk='bf16', pv='bf16'",
        ),
        (lambda: ptxrt.attention(q, k, v, pv=["bf16"]), "no kernel for"),
        (lambda: ptxrt.attention(q, k, v, pv="f16"), "no kernel for qk='bf16', pv='f16'; nearest: "),
        (
            lambda: ptxrt.attention(q, k, v, quantize="in_kernel"),
            "nearest: qk='mxfp4', pv='bf16', quantize='in_kernel'",
        ),
        (lambda: ptxrt.attention(q, k, v, qk="mxfp8", quantize=True), "nearest: qk='mxfp8', pv='mxfp8'. There is"),
        (lambda: ptxrt.attention(q, k, v, qk="mxfp4", pv="bf17"), "nearest: qk='mxfp4', pv='bf16'"),
        (lambda: ptxrt.attention(q, k, v, qk="fp8"), "nearest: qk='mxfp8', pv='mxfp8'"),
        (lambda: ptxrt.attention(q, k, v, qk="NVFP4"), "nearest: qk='nvfp4', pv='nvfp4'"),
        (lambda: ptxrt.attention(q, k, v, qk=np.float16), "nearest: qk='bf16'"),
        (lambda: ptxrt.attention(q, k, v, smooth_k=True), "has no smooth_k; nearest: qk='nvfp4', pv='bf16'"),
        (lambda: ptxrt.attention(q, k, v, smooth_k="on"), "smooth_k is 'on'; pass True or False, or 'auto'"),
        (lambda: ptxrt.attention(q, k, v, smooth_q=True), "has no smooth_q"),
        (lambda: ptxrt.attention(q, k, v, scale=float("nan")), "scale is nan"),
        (lambda: ptxrt.attention(q, k, v, scale="1"), "scale is '1'"),
        (lambda: ptxrt.attention(q, k, v, scale=10**400), "scale is 1000"),
        (lambda: ptxrt.attention(q, k, v, scale=np.array(0.5)), r"scale is array\(0.5\); pass a finite number"),
        (lambda: ptxrt.attention(q, k, v, softcap=np.array("1")), "softcap is array"),
        (lambda: ptxrt.attention(q, k, v, scale=1e300), "scale is 1e\\+300"),
        (lambda: ptxrt.attention(q, k, v, softcap=-1), "softcap is -1; pass a number above 0, or 0 for none"),
        (lambda: ptxrt.attention(q, k, v, softcap=np.inf), "softcap is inf"),
        (lambda: ptxrt.attention(q, k, v, causal="yes"), "causal is 'yes'; pass True or False"),
        (lambda: ptxrt.attention(q, k, v, window=3), "window is 3; pass \\(left, right\\)"),
        (lambda: ptxrt.attention(q, k, v, window=(-1, 0)), "window is \\(-1, 0\\).*None for open"),
        (lambda: ptxrt.attention(q, k, v, window=(1.5, 0)), "window is \\(1.5, 0\\)"),
        (lambda: ptxrt.attention(q, k, v, layout="bsd"), "layout is 'bsd'; pass 'bhsd' or 'bshd'"),
        (lambda: ptxrt.attention(q, k, v, out_dtype=np.float64), "bfloat16, float16 or float32"),
        (lambda: ptxrt.attention(q, k, v, out_dtype="nothing"), "bfloat16, float16 or float32"),
        (
            lambda: ptxrt.attention(q, k, v, out=np.empty(q.shape, np.float32), out_dtype=BF16),
            "out has the dtype asked for",
        ),
        (lambda: ptxrt.attention(q, k, v, out=[0]), "out is a list"),
        (
            lambda: ptxrt.attention(q, k, v, out=np.empty((1, 4, 16, 31), BF16)),
            r"out has shape \[1, 4, 16, 31\], not \[1, 4, 16, 32\]",
        ),
        (lambda: ptxrt.attention(q, k, v, out=np.broadcast_to(BF16(0), q.shape)), "out is read-only"),
        (lambda: ptxrt.attention(*device, out=np.empty(q.shape, BF16)), "out is a NumPy array, q is on the device"),
        (
            lambda: ptxrt.attention(*device, out=device[0].view(np.uint16).view(BF16).reshape(1, 4, 16, 64)),
            r"out has shape|float32",
        ),
        (lambda: ptxrt.attention(q, k, v, normalize=False, out_dtype=BF16), "normalize=False gives float32"),
        (
            lambda: ptxrt.attention(q, k, v, normalize=False, return_lse=True),
            "row_max and row_sum in place of an lse; leave out return_lse",
        ),
        (
            lambda: ptxrt.attention(q[0], k, v),
            r"q has shape \[4, 16, 32\], 3 dimensions where 4 are needed; reshape it to \[B, H, S, D\]",
        ),
        (lambda: ptxrt.attention(q, k[..., :16], v), "q and k have one head dimension; 32 and 16 came"),
        (lambda: ptxrt.attention(q, k, v[:, :, :20]), "k and v the same heads and keys"),
        (lambda: ptxrt.attention(q, two[1], two[2]), "one batch"),
        (
            lambda: ptxrt.attention(q[:, :3], k, v),
            "3 heads of q are no multiple of 2 heads of k and v; nearest: 2 or 4",
        ),
        (lambda: ptxrt.attention(q[:, :1], k, v), "nearest: 2; there are"),
        (lambda: ptxrt.attention(q, k[:, :0], v[:, :0]), "no multiple of 0 heads"),
        (
            lambda: ptxrt.attention(*(np.zeros((1, 1, 4, 288), np.float32) for _ in range(3))),
            "head dimensions go up to 256",
        ),
        (
            lambda: ptxrt.attention(*(np.zeros((1, 1, 4, 257), np.float32) for _ in range(3)), qk="nvfp4"),
            "head dimensions go up to 256",
        ),
        (lambda: ptxrt.attention(q, k[:, :, :0], v[:, :, :0]), "there are no keys; pass at least one"),
        (lambda: ptxrt.attention(q, k, v[..., :0]), "a head dimension is 0"),
        (
            lambda: ptxrt.attention(q.astype(np.float64), k, v),
            "q is float64.*convert it to float32, float16 or bfloat16",
        ),
        (lambda: ptxrt.attention(q, None, v), "k is None"),
        (
            lambda: ptxrt.attention(q, k, v, mask=np.zeros((16, 23), bool)),
            r"mask is bool \[16, 23\]; pass bool or float that broadcasts to \[B, H, Sq, Sk\]",
        ),
        (
            lambda: ptxrt.attention(q, k, v, mask=np.zeros((16, 24), np.int32)),
            "mask is int32 .*; mask != 0 makes one of whole numbers",
        ),
        (
            lambda: ptxrt.attention(q, k, v, mask=np.zeros((16, 24), np.uint8)),
            "mask is uint8 .*; mask != 0 makes one of whole numbers",
        ),
        (lambda: ptxrt.attention(q, k, v, mask=np.zeros((1, 1, 1, 16, 24), bool)), "mask is bool"),
        (
            lambda: ptxrt.attention(q, k, v, sinks=np.zeros(2, np.float32)),
            r"sinks are float32 \[2\]; pass one float for each of 4 heads of q",
        ),
        (
            lambda: ptxrt.attention(q, k, v, key_lengths=[25]),
            r"key_lengths is \[25\]; pass a whole number from 0 to 24 for each of 1 batches",
        ),
        (lambda: ptxrt.attention(q, k, v, key_lengths=[1, 2]), "key_lengths is"),
        (lambda: ptxrt.attention(q, k, v, key_lengths=[1.5]), "key_lengths is float64"),
        (
            lambda: ptxrt.attention(q, k, v, key_lengths=ptxrt.to_device(np.int64([3]))),
            "key_lengths is int64.*pass int32",
        ),
        (lambda: ptxrt.attention(q, k, v, cu_seqlens_q=[0, 16]), "one of cu_seqlens_q and cu_seqlens_k came"),
        (
            lambda: ptxrt.attention(q, k, v, cu_seqlens_q=[0, 16], cu_seqlens_k=[0, 24], key_lengths=[3]),
            "no key_lengths",
        ),
        (
            lambda: ptxrt.attention(q, k, v, cu_seqlens_q=[0, 15], cu_seqlens_k=[0, 24]),
            r"cu_seqlens_q is \[0, 15\]; pass N \+ 1 whole numbers that rise from 0 to 16",
        ),
        (
            lambda: ptxrt.attention(q, k, v, cu_seqlens_q=[0, 9, 5, 16], cu_seqlens_k=[0, 1, 2, 24]),
            "that rise from 0 to 16",
        ),
        (
            lambda: ptxrt.attention(q, k, v, cu_seqlens_q=[0, 5, 16], cu_seqlens_k=[0, 24]),
            "cu_seqlens_q has 3 numbers, cu_seqlens_k 2",
        ),
        (
            lambda: ptxrt.attention(*two, cu_seqlens_q=[0, 16], cu_seqlens_k=[0, 24]),
            "packed sequences have a batch of 1, 2 came",
        ),
        (lambda: ptxrt.merge([], []), "outputs is list without segments"),
        (lambda: ptxrt.merge([q], [q[..., 0], q[..., 0]]), "1 outputs of .* have 1 lses"),
        (lambda: ptxrt.merge([q], [q]), r"lses\[0\] has shape \[1, 4, 16, 32\]"),
        (lambda: ptxrt.merge([q], [q[..., 0].astype(np.float16)]), r"lses\[0\] is float16"),
        (lambda: ptxrt.merge([q[0, 0, 0]], [q[0, 0, 0, 0]]), "fewer axes in front of S"),
        (lambda: ptxrt.merge([q]), "neither came beside outputs; pass lses, or row_max and row_sum"),
        (
            lambda: ptxrt.merge([q], row_max=[q[..., 0]]),
            "row_max came beside outputs; pass lses, or row_max and row_sum",
        ),
        (lambda: ptxrt.merge([q], [q[..., 0]], row_sum=[q[..., 0]]), "lses and row_sum came beside outputs"),
        (
            lambda: ptxrt.merge([q], row_max=[q[..., 0]], row_sum=[q]),
            r"row_sum\[0\] has shape \[1, 4, 16, 32\].* have 1 row_max and row_sum of",
        ),
        (lambda: ptxrt.merge([q], [q[..., 0]], out_dtype=int), "merge: out_dtype=<class 'int'>"),
    ]:
        with pytest.raises(ptxrt.ArgumentError, match=words) as caught:
            call()
        assert str(caught.value).split(":")[0] in ("attention", "merge", "attention_bf16")


@pytest.mark.parametrize("name", [name for name, kernel in ptxrt.kernels().items() if kernel.multiples])
def test_kernels_refuse_columns_that_they_store_past_a_row(name):
    """They store eight columns at a time. `attention` pads; a view of one key or of wide rows fits the strides."""
    kernel, keys = ptxrt.kernels()[name], np.zeros((1, 1, 1, 24), np.float16)
    axes = dict(sequences=1, splits=1, scale=1.0, left=OPEN, right=OPEN)
    calls = {"dim_v": lambda cols: kernel.bind(keys[None], keys, keys[..., :cols], out_f32=True, **axes)}
    if "cols" in kernel.axes:
        case = next(case for case in kernel.cases if "out_f32" in case.optional)
        calls = {"cols": lambda cols: kernel.bind(**{**kernel.example(case), "cols": cols})}
    ((axis, call),) = calls.items()
    assert call(16).axes[axis] == 16
    words = rf"^{name}: {axis} is 20 in .*; it must be a multiple of 8\. Pad it to 24 or cut it to 16\.$"
    with pytest.raises(ptxrt.ArgumentError, match=words):
        call(20)


# The references


def test_visible_pairs_are_counted():
    for queries in range(1, 8):
        for keys in range(1, 8):
            for left in (OPEN, 0, 2):
                for right in (OPEN, 0, 1):
                    assert visible_pairs(queries, keys, left, right) == visible(queries, keys, left, right).sum()


def test_the_reference_agrees_with_a_plain_loop(rng):
    """All options at once, in scalar code."""
    q, k, v = (x.astype(np.float64) for x in random_qkv(rng, 2, 4, 5, 6, 3, heads_kv=2, dim_v=2))
    mask, sinks, lengths = rng.standard_normal((2, 4, 5, 6)), rng.standard_normal(4), [6, 4]
    options = dict(scale=0.7, window=(2, 1), softcap=1.2, mask=mask, sinks=sinks, key_lengths=lengths)
    out, lse = exact_attention(q, k, v, **options)
    for b, h, i in np.ndindex(2, 4, 5):
        total, value = np.exp(sinks[h]), np.zeros(2)
        for j in range(lengths[b]):
            if -2 <= j - (i + lengths[b] - 5) <= 1:
                weight = np.exp(1.2 * np.tanh(0.7 * (q[b, h, i] @ k[b, h // 2, j]) / 1.2) + mask[b, h, i, j])
                total, value = total + weight, value + weight * v[b, h // 2, j]
        np.testing.assert_allclose(out[b, h, i], value / total, rtol=1e-12)
        np.testing.assert_allclose(lse[b, h, i], np.log(total), rtol=1e-12)


def test_parts_of_the_reference_add_up(rng):
    q, k, v = random_qkv(rng, 1, 2, 4, 200, 8)
    whole = exact_sums(q[:, :, None], k, v, scale=0.5, right=0)
    parts = [
        exact_sums(q[:, :, None], k, v, scale=0.5, right=0, part=slice(a, b))
        for a, b in ((0, 64), (64, 128), (128, 192), (192, 256))
    ]
    outs, lses = zip(*(exact_quotient(*part) for part in parts))
    for got, want in zip(merged(outs, lses), exact_quotient(*whole)):
        np.testing.assert_allclose(got, want, rtol=1e-12)


def test_every_way_is_reached_by_its_name():
    for (qk, pv, quantize), way in ATTENTION.items():
        assert way.kernel.name in ptxrt.kernels()
        assert (quantize == "in_kernel") == isinstance(way, InKernelAttention)
