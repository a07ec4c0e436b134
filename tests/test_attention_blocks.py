"""Attention on block formats: against float64 and a restatement of the algorithm, from prequantized operands, with
smoothing, and errors."""

import ml_dtypes
import numpy as np
import pytest

import ptxrt
from attention_arrays import BLOCK_WAYS, bits_by_blocks, block_of, held, operands, random_qkv, relative, rounding
from attention_restated import restated_blocks
from ptxrt import units
from ptxrt.blocks import BLOCK_FORMATS
from ptxrt.ops.attention import exact_attention
from ptxrt.ops.attention_kernels import visible

each_format = pytest.mark.parametrize("qk, pv", BLOCK_WAYS, ids=lambda name: name)


@each_format
@pytest.mark.parametrize(
    "shape, options",
    [
        ((1, 2, 70, 130, 64), {}),
        ((2, 2, 33, 100, 64), dict(causal=True)),
        ((1, 2, 100, 70, 96), dict(window=(40, 3))),
        ((1, 1, 17, 64, 40), dict(softcap=3.0)),
        ((1, 2, 19, 65, 64), dict(sinks=np.float32([0.5, 3]))),
    ],
    ids=str,
)
def test_the_algorithm_restated(machine, rng, qk, pv, shape, options):
    """The restatement rounds weights as the kernels do: only the order of float32 sums and ties of single codes
    differ."""
    arrays = [
        x * np.exp2(rng.integers(-1, 2, (*x.shape[:-1], 1)), dtype=np.float32) for x in random_qkv(rng, *shape)
    ]  # scales of many magnitudes
    given = operands(*arrays, qk, pv, smooth=False, dim=128 if shape[-1] == 96 and qk != "mxfp8" else None)
    got, lse = ptxrt.attention(*given, qk=qk, pv=pv, out_dtype=np.float32, return_lse=True, **options)
    want, want_lse = restated_blocks(*(np.asarray(x) for x in given), pv, **options)
    assert relative(got, want) <= 2.5e-3
    seen = np.isfinite(want_lse)
    np.testing.assert_array_equal(lse[~seen], want_lse[~seen])
    assert (
        np.abs(lse[seen] - want_lse[seen]).max() <= 1e-4 * np.abs(want_lse[seen]).max()
    )  # approximate exponentials and logarithm


@each_format
def test_each_row_raises_its_own_maximum(machine, qk, pv):
    """In each tile but the first the score of one row grows by 14 in units of log2, and that of no other row of its
    warp, each by a key in a different place of its tile."""
    rows = np.array([0, 8, 3, 11, 15])
    keys = 64 * np.arange(1, 6) + rows * 37 % 64
    q, k, v = (np.zeros((1, 1, count, 64), np.float32) for count in (16, 384, 384))
    q[0, 0, rows, rows], k[0, 0, keys, rows] = 1, 14 * np.log(2) * 8
    v[0, 0, keys, rows] = 1
    got, lse = ptxrt.attention(q, k, v, qk=qk, pv=pv, smooth_k=False, return_lse=True, out_dtype=np.float32)
    want, want_lse = exact_attention(*(np.asarray(x) for x in operands(q, k, v, qk, pv, smooth=False)))
    assert relative(got, want) <= 0.1  # mxfp4 rounds the one weight; a missed maximum gives 1
    assert np.abs(lse - want_lse).max() <= 1e-3 * np.abs(want_lse).max()


@each_format
@pytest.mark.parametrize("step", [0.5, 1.5, 3, 9])
def test_maxima_that_rise_slowly(machine, rng, qk, pv, step):
    """The largest score grows by `step` in units of log2 from tile to tile, below and beyond the headroom of row_max,
    in other tiles for other rows; far weights have the restatement's codes and scales."""
    q, k, v = random_qkv(rng, 1, 2, 70, 640, 64)
    q *= 0.25
    q[..., 0] = 1 + rng.integers(0, 2, q.shape[:-1])
    k[..., 0] = np.floor(np.arange(640) / 64) * step * np.log(2) * 8
    given = operands(q, k, v, qk, pv, smooth=False)
    got, lse = ptxrt.attention(*given, qk=qk, pv=pv, out_dtype=np.float32, return_lse=True)
    want, want_lse = restated_blocks(*(np.asarray(x) for x in given), pv)
    assert relative(got, want) <= 2.5e-3
    assert np.abs(lse - want_lse).max() <= 1e-4 * np.abs(want_lse).max()


@each_format
def test_arrays_are_quantized_as_quantize_operand_does(machine, rng, qk, pv):
    q, k, v = random_qkv(rng, 2, 4, 40, 100, 64, heads_kv=2)
    whole = ptxrt.attention(q, k, v, qk=qk, pv=pv, return_lse=True)
    given = operands(q, k, v, qk, pv)
    from_operands = ptxrt.attention(q, *given[1:], qk=qk, pv=pv, return_lse=True)
    for got, want in zip(from_operands, whole):
        np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(ptxrt.attention(*given, qk=qk, pv=pv, out_dtype=np.float32), whole[0])
    on_device = [
        ptxrt.quantize_operand(ptxrt.to_device(x), f, role=r) for x, f, r in zip((q, k, v), (qk, qk, pv), "qkv")
    ]
    np.testing.assert_array_equal(ptxrt.attention(*on_device, qk=qk, pv=pv, out_dtype=np.float32).to_numpy(), whole[0])


@pytest.mark.parametrize("qk, pv, dim", [*((*formats, 128) for formats in BLOCK_WAYS), ("nvfp4", "nvfp4", 64)])
def test_half_blocks_give_the_bits_of_whole_ones(rng, monkeypatch, qk, pv, dim):
    """In the native text, at head dimension 64 with race checks: rows of a half block and of a part of another, more
    tiles than stages, tiles of every kind, warps and rows without keys, and smoothed queries."""
    q, k, v = random_qkv(rng, 1, 2, 50, 330, dim, heads_kv=1)
    k *= np.linspace(0.5, 2, 330, dtype=np.float32)[:, None]  # maxima grow
    with ptxrt.using("emulator", races=dim == 64) as backend:
        for options in (dict(), dict(causal=True, window=(200, None), key_lengths=[130], smooth_q=True)):
            half, whole = (
                bits_by_blocks(backend, monkeypatch, halved, q, k, v, qk=qk, pv=pv, **options)
                for halved in (True, False)
            )
            assert half[2] == whole[2] + "_half"
            for mine, others in zip(half[:2], whole[:2]):
                np.testing.assert_array_equal(mine, others)


@each_format
def test_nan_propagates_to_the_rows_that_see_it(machine, rng, qk, pv):
    """Also where weights are e2m1, which has no NaN: then their scale is NaN."""
    q, k, v = random_qkv(rng, 1, 1, 20, 70, 64)
    q[0, 0, 5, 3] = k[0, 0, 60, 3] = np.nan
    got = ptxrt.attention(q, k, v, qk=qk, pv=pv, causal=True, smooth_k=False)
    rows = np.arange(20)  # row 10 is the first that sees key 60
    np.testing.assert_array_equal(
        np.isnan(got[0, 0].astype(np.float32)), np.repeat((rows[:, None] == 5) | (rows[:, None] >= 10), 64, axis=1)
    )


@each_format
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=lambda d: np.dtype(d).name)
def test_a_layout_is_strides_alone(machine, rng, qk, pv, dtype):
    q, k, v = random_qkv(rng, 2, 2, 40, 70, 64, dtype=dtype)
    want = ptxrt.attention(q, k, v, qk=qk, pv=pv)
    turned = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in (q, k, v)]
    np.testing.assert_array_equal(ptxrt.attention(*turned, qk=qk, pv=pv, layout="bshd").transpose(0, 2, 1, 3), want)
    on_device = ptxrt.attention(*map(ptxrt.to_device, turned), qk=qk, pv=pv, layout="bshd")
    np.testing.assert_array_equal(on_device.to_numpy().transpose(0, 2, 1, 3), want)


@each_format
@pytest.mark.parametrize("dim, dim_v", [(64, 32), (40, 100), (20, 20)])
def test_head_dims(machine, rng, qk, pv, dim, dim_v):
    q, k, v = random_qkv(rng, 1, 2, 30, 70, dim, dim_v=dim_v)
    got = ptxrt.attention(q, k, v, qk=qk, pv=pv, out_dtype=np.float32)
    want, _ = exact_attention(*(np.asarray(x) for x in operands(q, k, v, qk, pv)))
    assert got.shape == want.shape and relative(got, want) <= rounding(qk, pv)


@pytest.mark.parametrize(
    "fmt, dim, dim_v, keys",
    [("nvfp4", 192, 128, 200), ("nvfp4", 256, 256, 200), ("nvfp4", 160, 160, 200), ("mxfp8", 256, 256, 460)],
)
def test_wide_heads(machine, rng, fmt, dim, dim_v, keys):
    """Full tiles, which fill each stage again, and masked ones; values with their own head dimension, or padded."""
    q, k, v = random_qkv(rng, 1, 2, 30, keys, dim, dim_v=dim_v)
    given = operands(q, k, v, fmt, fmt)
    assert [x.dim for x in given[1:]] == [-(-dim // 64) * 64, -(-dim_v // 64) * 64]
    options = dict(qk=fmt, causal=True, out_dtype=np.float32)
    got, lse = ptxrt.attention(*given, **options, return_lse=True)
    want, want_lse = exact_attention(*(np.asarray(x) for x in given), causal=True)
    assert got.shape == want.shape and relative(got, want) <= rounding(fmt, fmt)
    assert np.abs(lse - want_lse).max() <= 1e-4 * np.abs(want_lse).max()  # approximate exponentials and logarithm
    np.testing.assert_array_equal(ptxrt.attention(q, k, v, **options), got)


@pytest.mark.parametrize("qk, pv", [("mxfp8", "mxfp8"), ("nvfp4", "bf16")])
def test_narrow_values_beside_wide_keys(machine, rng, qk, pv):
    """D = 192 and Dv = 128: from arrays, from independently quantized operands, and with few rows, whose keys are
    split."""
    q, k, v = random_qkv(rng, 1, 2, 9, 700, 192, heads_kv=1, dim_v=128)
    given = operands(q, k, v, qk, pv, smooth=False)
    assert [x.dim for x in given] == [None, 192, 128]
    call = dict(qk=qk, pv=pv, causal=True, smooth_k=False, return_lse=True, out_dtype=np.float32)
    want, want_lse = exact_attention(*(np.asarray(x) for x in given), causal=True)
    got, lse = ptxrt.attention(*given, **call)
    assert got.shape == want.shape and relative(got, want) <= rounding(qk, pv)
    assert np.abs(lse - want_lse).max() <= 1e-4 * np.abs(want_lse).max()  # approximate exponentials and logarithm
    filled = ptxrt.quantize_operand(v, pv, role="v", dim=192)
    for arrays in ((q, k, v), (*given[:2], filled)):  # the same products in the same order
        np.testing.assert_array_equal(ptxrt.attention(*arrays, **call)[0], got)


@each_format
@pytest.mark.parametrize("keys", [130, 1000])
def test_smoothing_is_undone_in_the_log_sum_exp(machine, rng, qk, pv, keys):
    """Keys with a bias per channel: smoothing makes scores far more accurate, and lse is that of the original
    scores."""
    q, k, v = random_qkv(rng, 1, 2, 20, keys, 64)
    k += 6 * rng.standard_normal((1, 2, 1, 64)).astype(np.float32)
    want, want_lse = exact_attention(q, k, v)
    smooth, lse = ptxrt.attention(q, k, v, qk=qk, pv=pv, smooth_k=True, return_lse=True)
    plain, plain_lse = ptxrt.attention(q, k, v, qk=qk, pv=pv, smooth_k=False, return_lse=True)
    assert relative(smooth, want) < 0.5 * relative(plain, want)
    assert (
        np.abs(lse - want_lse).mean() <= 0.06 < np.abs(plain_lse - want_lse).mean()
    )  # 0.06 is 1.5 times the error without a bias
    given = operands(q, k, v, qk, pv, smooth=True)
    held, held_lse = exact_attention(*(np.asarray(x) for x in given))
    _, lse = ptxrt.attention(*given, qk=qk, pv=pv, return_lse=True)
    assert np.abs(lse - held_lse).max() <= 1e-4 * max(1, np.abs(held_lse).max())  # 1000 keys are split


def packed_qkv(rng, dim=64):
    """(cu_seqlens of queries, of keys, q, k with a bias, v): sequences around the length of a tile, and of 0 queries or
    keys."""
    cu_q, cu_k = (
        np.concatenate([[0], np.cumsum(lengths)]) for lengths in ([3, 63, 0, 20, 65, 2], [1, 63, 64, 130, 65, 0])
    )
    q, k, v = random_qkv(rng, 1, 2, cu_q[-1], cu_k[-1], dim, heads_kv=1)
    return cu_q, cu_k, q, k + 3 * rng.standard_normal((1, 1, 1, dim)).astype(np.float32), v


@each_format
@pytest.mark.parametrize(
    "options",
    [dict(causal=True, smooth_k=True, return_lse=True), dict(window=(40, 9), sinks=np.float32([1, -1]), smooth_q=True)],
    ids=str,
)
def test_packed_sequences_equal_separate_calls(machine, rng, qk, pv, options):
    """Bit for bit, including the lse of smoothed scores, and for queries less the block means of their own sequence."""
    cu_q, cu_k, *arrays = packed_qkv(rng)
    q, k, v = (x.transpose(0, 2, 1, 3) for x in arrays)
    options = dict(options, qk=qk, pv=pv, layout="bshd")
    whole = ptxrt.attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)
    out, *lse = whole if isinstance(whole, tuple) else (whole,)
    for rows, keys in zip(map(slice, cu_q, cu_q[1:]), map(slice, cu_k, cu_k[1:])):
        if keys.start == keys.stop:
            assert not out[:, rows].astype(np.float32).any() and all((x[..., rows] == -np.inf).all() for x in lse)
        elif rows.start < rows.stop:
            alone = ptxrt.attention(q[:, rows], k[:, keys], v[:, keys], **options)
            alone, *its_lse = alone if isinstance(alone, tuple) else (alone,)
            np.testing.assert_array_equal(out[:, rows].view(np.uint16), alone.view(np.uint16))
            np.testing.assert_array_equal([x[..., rows] for x in lse], its_lse)


@each_format
def test_packed_operands_are_quantized_once(machine, rng, qk, pv):
    """Operands store their sequences: attention over an operand equals attention over its values."""
    cu_q, cu_k, q, k, v = packed_qkv(rng, 40)
    of_k, of_v = (
        ptxrt.quantize_operand(x, format, role=role, cu_seqlens=cu_k)
        for x, format, role in ((k, qk, "k"), (v, pv, "v"))
    )
    options = dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, normalize=of_k.mean is not None)
    got = ptxrt.attention(q, of_k, of_v, qk=qk, pv=pv, **options, out_dtype=np.float32)
    for x, want in zip(got, ptxrt.attention(q, k, v, qk=qk, pv=pv, **options, out_dtype=np.float32)):
        np.testing.assert_array_equal(x, want)
    if not options.pop("normalize"):
        got = got[0] / np.where(got[2] == 0, 1, got[2])[..., None]
    want, _ = exact_attention(
        *(np.asarray(x) for x in (ptxrt.quantize_operand(q, qk, role="q"), of_k, of_v)), **options
    )
    assert (
        relative(got, want) <= {"mxfp8": 0.04, "mxfp4": 0.25, "nvfp4": 0.13, "bf16": 2.5e-3}[pv]
    )  # weights are rounded


def test_packed_sequences_on_the_device(machine, rng):
    """Calls do not wait for the device, so that a prepared call serves other lengths with the same number of
    sequences."""
    cu_q, cu_k, *arrays = packed_qkv(rng)
    others = [cu[-1] - cu[::-1] for cu in (cu_q, cu_k)]
    q, k, v = map(ptxrt.to_device, arrays)
    first, second = ([ptxrt.to_device(cu.astype(np.int32)) for cu in pair] for pair in ((cu_q, cu_k), others))
    out = ptxrt.empty(q.shape, np.float32)
    options = dict(qk="nvfp4", pv="mxfp8")
    call = ptxrt.prepare(
        lambda q, k, v, a, b, out: ptxrt.attention(q, k, v, cu_seqlens_q=a, cu_seqlens_k=b, out=out, **options),
        q,
        k,
        v,
        *first,
        out,
    )
    for pair, lengths in ((first, (cu_q, cu_k)), (second, others)):
        call(q, k, v, *pair, out)
        want = ptxrt.attention(
            *arrays, cu_seqlens_q=lengths[0], cu_seqlens_k=lengths[1], out_dtype=np.float32, **options
        )
        np.testing.assert_array_equal(out.to_numpy(), want)


@each_format
def test_values_of_one_give_one(machine, rng, qk, pv):
    q, k, _ = random_qkv(rng, 1, 2, 30, 100, 64)
    out = ptxrt.attention(q, k, np.ones((1, 2, 100, 64), np.float32), qk=qk, pv=pv, out_dtype=np.float32)
    assert np.abs(out - 1).max() <= 2**-8  # a bf16 ulp


# Inputs with known results


@each_format
def test_one_hot_rows_choose_their_key(machine, rng, qk, pv):
    """Row i of Q matches key (7 i + 3) % 60 alone; each other key has e^-12 of its weight, or twice that after
    rounding."""
    keys, rows = np.eye(60, 64, dtype=np.float32)[None, None], (7 * np.arange(60) + 3) % 60
    given = operands(12 * keys[:, :, rows], keys, *random_qkv(rng, 1, 1, 1, 60, 64)[2:], qk, pv, smooth=False)
    got, values = ptxrt.attention(*given, qk=qk, pv=pv, scale=1.0, out_dtype=np.float32), held(*given, qk, pv)[2]
    np.testing.assert_allclose(got, values[:, :, rows], rtol=0, atol=np.abs(values).max() * 2 * 60 * np.exp(-12))


@each_format
def test_block_structured_queries(machine, rng, qk, pv):
    """Blocks of 16 queries that each match one block of 16 keys equally: the output is the mean of their values.

    Exact up to float32 sums where weights are divided by the sum of rounded weights; 16-bit formats divide by the
    unrounded sum.
    """
    blocks = np.kron(np.eye(4, dtype=np.float32), np.ones((16, 16), np.float32))[None, None]
    given = operands(8 * blocks, blocks, *random_qkv(rng, 1, 1, 1, 64, 64)[2:], qk, pv, smooth=False)
    want = np.float64(held(*given, qk, pv)[2]).reshape(4, 16, 64).mean(axis=1).repeat(16, axis=0)
    assert relative(ptxrt.attention(*given, qk=qk, pv=pv, scale=1.0, out_dtype=np.float32)[0, 0], want) < (
        1e-6 if block_of(pv) > 1 else 2.0**-8
    )


@each_format
def test_values_of_the_identity_show_the_weights(machine, rng, qk, pv):
    """V = identity, causal: each output is a row of weights, so that a misplaced key shows."""
    q, k, _ = random_qkv(rng, 1, 1, 64, 64, 64)
    given = operands(q, k, np.eye(64, dtype=np.float32)[None, None], qk, pv, smooth=False)
    got = ptxrt.attention(*given, qk=qk, pv=pv, causal=True, out_dtype=np.float32)
    want, _ = exact_attention(*held(*given, qk, pv), causal=True)
    assert not got[0, 0][~visible(64, 64, right=0)].any()
    assert relative(got, want) <= rounding(qk, pv)


@each_format
def test_a_shift_of_all_keys_changes_nothing(machine, rng, qk, pv):
    """Smoothing removes the shift, except that keys eight times as large lose low bits, which seldom crosses a tie;
    both outputs are rounded."""
    q, k, v = random_qkv(rng, 1, 1, 20, 90, 64)
    call = dict(qk=qk, pv=pv, smooth_k=True)
    assert relative(ptxrt.attention(q, k + 8, v, **call), ptxrt.attention(q, k, v, **call)) < 5e-3


@each_format
def test_scores_up_to_60(machine, rng, qk, pv):
    q, k, v = random_qkv(rng, 1, 1, 20, 130, 64)
    ramp = np.linspace(0, 60, 130, dtype=np.float32)[None, None, :, None] * np.eye(1, 64, dtype=np.float32)
    large = q * np.float32(60 / np.abs(q[0, 0] @ k[0, 0].T).max())
    for arrays in ((large, k, v), *((np.full((1, 1, 5, 64), sign, np.float32), ramp, v) for sign in (-1, 1))):
        given = operands(*arrays, qk, pv, smooth=False)
        want, _ = exact_attention(*held(*given, qk, pv), scale=1.0)
        assert relative(ptxrt.attention(*given, qk=qk, pv=pv, scale=1.0, out_dtype=np.float32), want) <= rounding(
            qk, pv
        )


@each_format
def test_large_finite_masks_are_relative(machine, rng, qk, pv):
    """A row whose keys all have the same large penalty is as without it, within the resolution of float32 at that
    magnitude."""
    q, k, v = random_qkv(rng, 1, 1, 8, 100, 64)
    q, k, v = given = operands(q, k, v, qk, pv, smooth=False)
    values = held(*given, qk, pv)
    call = dict(qk=qk, pv=pv, out_dtype=np.float32)
    mask = np.full((8, 100), -1e4, np.float32)
    assert relative(ptxrt.attention(*given, mask=mask, **call), exact_attention(*values)[0]) < 1.2 * rounding(qk, pv)
    for large in (-1e30, -3e38):
        mask[:, 50:] = large
        want, _ = exact_attention(values[0], *(x[:, :, :50] for x in values[1:]))
        assert relative(ptxrt.attention(*given, mask=mask, **call), want) < 1.2 * rounding(qk, pv)
        mean = np.broadcast_to(
            np.float64(values[2]).mean(axis=2, keepdims=True), (1, 1, 8, 64)
        )  # the scores vanish beside the mask
        assert relative(ptxrt.attention(*given, mask=np.full_like(mask, large), **call), mean) < 1e-6


# Scales


# Bytes of the scales 1 and 8, in ue8m0 and in nvfp4's ue4m3.
ONE_AND_EIGHT = {format: (0x38, 0x50) if block.two_level else (127, 130) for format, block in BLOCK_FORMATS.items()}


def with_scales(x, byte: int):
    """An operand with all its scale bytes set to `byte`."""
    arrays = {name: array.copy() for name, array in x.arrays.items()}
    if x.role == "q":
        arrays["scales"][:] = byte
    else:
        arrays["codes"][..., x.layout.tile.scale_places] = byte
    return ptxrt.Operand(**arrays, **x.description)


@each_format
def test_scales_eight_times_as_large(machine, rng, qk, pv):
    """On Q and K: bit-identical to 64 times the softmax scale; on V: 8 times the output."""
    given = operands(*random_qkv(rng, 1, 2, 20, 100, 64), qk, pv, smooth=False)
    one, eight = ONE_AND_EIGHT[qk]
    call = dict(qk=qk, pv=pv, return_lse=True, out_dtype=np.float32)
    small, large = ([with_scales(x, byte) for x in given[:2]] for byte in (one, eight))
    want = ptxrt.attention(*small, given[2], **call, scale=64 * 2.0**-9)
    for got, same in zip(ptxrt.attention(*large, given[2], **call, scale=2.0**-9), want):
        np.testing.assert_array_equal(got, same)
    if block_of(pv) > 1:
        small, large = (with_scales(given[2], byte) for byte in ONE_AND_EIGHT[pv])
        got, want = (ptxrt.attention(*given[:2], v, qk=qk, pv=pv, out_dtype=np.float32) for v in (large, small))
        np.testing.assert_array_equal(got, 8 * want)


@each_format
def test_scaled_arrays_have_scaled_results(machine, rng, qk, pv):
    """Powers of two on rows of Q and on V scale the results bit for bit; 2^10 on Q and K stays finite."""
    q, k, v = random_qkv(rng, 1, 2, 10, 100, 64)
    call = dict(qk=qk, pv=pv, smooth_k=False, out_dtype=np.float32)
    want = ptxrt.attention(q, k, v, **call)
    np.testing.assert_array_equal(ptxrt.attention(1024 * q, k / 1024, v, **call), want)
    np.testing.assert_array_equal(ptxrt.attention(q, k, 1024 * v, **call), 1024 * want)
    powers = np.exp2(np.arange(10) % 3 - 1, dtype=np.float32)[:, None]
    rows = ptxrt.attention(powers * q, k, v, **call)
    for i in range(3):
        np.testing.assert_array_equal(
            rows[:, :, i::3], ptxrt.attention(q, k, v, scale=powers[i, 0] / 8, **call)[:, :, i::3]
        )
    huge = operands(1024 * q, 1024 * k, 1024 * v, qk, pv, smooth=False)
    assert relative(
        ptxrt.attention(*huge, qk=qk, pv=pv, out_dtype=np.float32), exact_attention(*held(*huge, qk, pv))[0]
    ) <= rounding(qk, pv)


# Calls


@each_format
def test_prepared_calls_take_operands(machine, rng, qk, pv):
    arrays = random_qkv(rng, 1, 2, 20, 70, 64)
    given = operands(*map(ptxrt.to_device, arrays), qk, pv)
    out = ptxrt.empty((1, 2, 20, 64), np.float32)
    want = ptxrt.attention(*given, qk=qk, pv=pv, out_dtype=np.float32).to_numpy()
    call = ptxrt.prepare(ptxrt.attention, *given, qk=qk, pv=pv, out=out)
    call(*given, out=out)
    np.testing.assert_array_equal(out.to_numpy(), want)
    for _ in range(2):  # the second call is the remembered one
        np.testing.assert_array_equal(ptxrt.attention(*given, qk=qk, pv=pv, out=out).to_numpy(), want)


def test_wrong_calls_say_what_to_do(emulator, rng):
    q, k, v = random_qkv(rng, 1, 2, 20, 70, 64)
    of_q, of_k, of_v = operands(q, k, v, "nvfp4", "mxfp8")

    def refused(match, *arrays, **options):
        with pytest.raises(ptxrt.ArgumentError, match=match):
            ptxrt.attention(*arrays, **options)

    mixed = dict(qk="nvfp4", pv="mxfp8")
    near = "for these operands pass qk='nvfp4', pv="
    refused(rf"k is Operand.*takes quantize_operand\(k, 'mxfp8', role='k'\); {near}'mxfp8'", q, of_k, v, qk="mxfp8")
    refused(r"v is Operand.*role='k'.*takes quantize_operand\(v, 'mxfp8', role='v'\)", q, k, of_k, **mixed)
    refused(f"qk='bf16', pv='bf16' takes k as an array; {near}'bf16'", q, of_k, v)
    refused(f"qk='bf16', pv='bf16' takes q as an array; {near}'mxfp8'", of_q, of_k, of_v)
    refused(
        r"v is QuantizedArray.*takes quantize_operand\(v, 'mxfp8', role='v'\)",
        q,
        k,
        ptxrt.quantize(v, "mxfp8"),
        **mixed,
    )
    refused("smooth_k is False, but k is Operand.*quantize it with smooth=False", q, of_k, v, **mixed, smooth_k=False)
    refused("smooth_q is True, but q is Operand.*quantize it with smooth=True", of_q, k, v, **mixed, smooth_q=True)
    wide = ptxrt.quantize_operand(v, "mxfp8", role="v", dim=128)
    match = (
        "k has tiles of head dimension 64 and v has tiles of head dimension 128; the nearest kernel has 128 for k and "
        "128 for v: quantize k with dim=128"
    )
    refused(match, q, of_k, wide, **mixed)
    narrow = ptxrt.quantize_operand(v[..., :32], "mxfp8", role="v")
    refused(
        "v has tiles of head dimension 32; the nearest kernel has 64 for k and 64 for v: quantize v with dim=64",
        q,
        k,
        narrow,
        **mixed,
    )
    refused(
        "q and k have one head dimension; 32 and 64 came",
        ptxrt.quantize_operand(q[..., :32], "nvfp4", role="q"),
        of_k,
        of_v,
        **mixed,
    )
    packed = [
        ptxrt.quantize_operand(x, format, role=role, cu_seqlens=[0, 30, 70])
        for x, format, role in ((k, "nvfp4", "k"), (v, "mxfp8", "v"))
    ]
    two = dict(mixed, cu_seqlens_q=[0, 5, 20], cu_seqlens_k=[0, 30, 70])
    refused(
        "k is .* of 2 packed sequences, less their mean, .*; pass cu_seqlens_q and cu_seqlens_k, the cu_seqlens it .* "
        "as cu_seqlens_k",
        q,
        *packed,
        **mixed,
    )
    refused(
        r"v is .* of 2 packed sequences.*cu_seqlens_k is \[0, 70\]; quantize it with cu_seqlens=cu_seqlens_k",
        q,
        k,
        packed[1],
        **mixed,
        cu_seqlens_q=[0, 20],
        cu_seqlens_k=[0, 70],
    )
    refused(
        r"k is .*cu_seqlens_k is \[0, 31, 70\]; quantize it with", q, *packed, **dict(two, cu_seqlens_k=[0, 31, 70])
    )
    refused(r"k is Operand\(nvfp4.*quantize it with cu_seqlens=cu_seqlens_k", q, of_k, packed[1], **two)
    refused("key_lengths beside cu_seqlens came", q, *packed, **two, key_lengths=[70])
    smooth = ptxrt.quantize_operand(q, "nvfp4", role="q", smooth=True)
    refused(
        r"q is Operand.*, cu_seqlens_q is \[0, 5, 20\]; quantize it with cu_seqlens=cu_seqlens_q",
        smooth,
        *packed,
        **two,
    )
    smooth = ptxrt.quantize_operand(q, "nvfp4", role="q", smooth=True, cu_seqlens=[0, 5, 20])
    refused(
        "q is .* of 2 packed sequences.*; pass cu_seqlens_q and cu_seqlens_k, the cu_seqlens it .* as cu_seqlens_q",
        smooth,
        k,
        v,
        **mixed,
    )
    assert ptxrt.attention(of_q, of_k, of_v, **mixed).shape == (1, 2, 20, 64)


@pytest.mark.parametrize("format, dim", [("mxfp8", 32), ("mxfp8", 96), ("nvfp4", 64), ("mxfp4", 128), ("mxfp4", 192)])
def test_fragments_are_loaded_without_bank_conflicts(rng, format, dim):
    with ptxrt.using("emulator", bank_conflicts=True) as backend:
        ptxrt.attention(*random_qkv(rng, 1, 1, 70, 200, dim), qk=format, pv=format)
        module = f"attention_{format}_dim{dim}_dim_v{dim}.ptx"
        (counted,) = backend.emulator.bank_conflicts[module].values()
    text = (units.MODULES / module).read_text().splitlines()
    loads = {number for number, line in enumerate(text, 1) if line.lstrip().startswith("ldmatrix")}
    assert loads and not loads & counted.keys()
