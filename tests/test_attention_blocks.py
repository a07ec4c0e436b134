"""Attention on block formats: against float64, against its own restatement, from operands quantized before, smoothing, errors."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ptxrt
from attention_restated import restated_blocks
from ptxrt.ops.attention import exact_attention

FORMATS = [("mxfp8", "mxfp8"), ("mxfp4", "mxfp4"), ("nvfp4", "nvfp4"), ("nvfp4", "mxfp8"), ("mxfp4", "mxfp8"), ("nvfp4", "bf16"), ("mxfp8", "bf16")]
# Relative to weights that are not rounded, of normal scores.
ROUNDING = {"mxfp8": 0.04, "mxfp4": 0.25, "nvfp4": 0.13, "bf16": 4e-3}
each_format = pytest.mark.parametrize("qk, pv", FORMATS, ids=lambda name: name)


def random_qkv(rng, batch, heads, queries, keys, dim, *, heads_kv=None, dim_v=None, dtype=np.float32):
    shapes = (heads, queries, dim), (heads_kv or heads, keys, dim), (heads_kv or heads, keys, dim_v or dim)
    return [rng.standard_normal((batch, *shape)).astype(dtype) for shape in shapes]


def relative(got, want):
    return np.linalg.norm(np.float64(got) - want) / np.linalg.norm(want)


def operands(q, k, v, qk, pv, dim=None, **options):
    smooth = options.pop("smooth", None)
    return [
        ptxrt.quantize_operand(q, qk, role="q", **options),
        ptxrt.quantize_operand(k, qk, role="k", smooth=smooth, dim=dim, **options),
        ptxrt.quantize_operand(v, pv, role="v", dim=dim, **options),
    ]


@each_format
@pytest.mark.parametrize(
    "shape, options",
    [
        ((1, 2, 70, 130, 64), {}),
        ((2, 2, 33, 100, 64), dict(causal=True)),
        ((1, 2, 100, 70, 96), dict(window=(40, 3))),
        ((1, 1, 17, 64, 40), dict(softcap=3.0)),
        ((1, 2, 9, 65, 64), dict(sinks=np.float32([0.5, 3]))),
    ],
    ids=str,
)
def test_the_algorithm_restated(machine, rng, qk, pv, shape, options):
    """With weights rounded as the kernels round them, what is left is the order of float32 sums and ties of single codes."""
    given = operands(*random_qkv(rng, *shape), qk, pv, smooth=False, dim=128 if shape[-1] == 96 else None)
    got, lse = ptxrt.attention(*given, qk=qk, pv=pv, out_dtype=np.float32, return_lse=True, **options)
    want, want_lse = restated_blocks(*(np.asarray(x) for x in given), pv, **options)
    assert relative(got, want) <= 2.5e-3
    seen = np.isfinite(want_lse)
    np.testing.assert_array_equal(lse[~seen], want_lse[~seen])
    assert np.abs(lse - want_lse)[seen].max() <= 1e-4 * np.abs(want_lse[seen]).max()  # approximate exponentials and logarithm


@each_format
def test_arrays_are_quantized_as_quantize_operand_does(machine, rng, qk, pv):
    q, k, v = random_qkv(rng, 2, 4, 40, 100, 64, heads_kv=2)
    whole = ptxrt.attention(q, k, v, qk=qk, pv=pv, return_lse=True)
    given = operands(q, k, v, qk, pv)
    from_operands = ptxrt.attention(q, *given[1:], qk=qk, pv=pv, return_lse=True)
    for got, want in zip(from_operands, whole):
        np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(ptxrt.attention(*given, qk=qk, pv=pv), whole[0])
    on_device = [ptxrt.quantize_operand(ptxrt.to_device(x), f, role=r) for x, f, r in zip((q, k, v), (qk, qk, pv), "qkv")]
    np.testing.assert_array_equal(ptxrt.attention(*on_device, qk=qk, pv=pv).to_numpy(), whole[0])


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
def test_a_batch_equals_its_items(machine, rng, qk, pv):
    q, k, v = random_qkv(rng, 3, 2, 20, 90, 64)
    lengths = np.array([90, 1, 64])
    options = dict(qk=qk, pv=pv, key_lengths=lengths, return_lse=True)
    whole = ptxrt.attention(q, k, v, **options)
    for i, length in enumerate(lengths):
        item = ptxrt.attention(q[i : i + 1], k[i : i + 1, :, :length], v[i : i + 1, :, :length], qk=qk, pv=pv, return_lse=True)
        for got, want in zip(whole, item):
            np.testing.assert_array_equal(got[i], want[0])


@each_format
def test_garbage_behind_the_last_key(machine, rng, qk, pv):
    q, k, v = random_qkv(rng, 2, 2, 20, 90, 64)
    want = ptxrt.attention(q, k, v, qk=qk, pv=pv, key_lengths=[40, 70])
    for batch, length in enumerate((40, 70)):
        k[batch, :, length:], v[batch, :, length:] = np.nan, 1e30
    np.testing.assert_array_equal(ptxrt.attention(q, k, v, qk=qk, pv=pv, key_lengths=[40, 70]), want)


@each_format
@pytest.mark.parametrize("dim, dim_v", [(64, 32), (40, 100), (20, 20)])
def test_head_dims(machine, rng, qk, pv, dim, dim_v):
    q, k, v = random_qkv(rng, 1, 2, 30, 70, dim, dim_v=dim_v)
    got = ptxrt.attention(q, k, v, qk=qk, pv=pv, out_dtype=np.float32)
    want, _ = exact_attention(*(np.asarray(x) for x in operands(q, k, v, qk, pv)))
    assert got.shape == want.shape and relative(got, want) <= ROUNDING[pv]


@each_format
@pytest.mark.parametrize("keys", [130, 1000])
def test_smoothing_is_undone_in_the_log_sum_exp(machine, rng, qk, pv, keys):
    """Keys with a bias for each channel: scores are far better with it, and lse is that of the scores as they were."""
    q, k, v = random_qkv(rng, 1, 2, 20, keys, 64)
    k += 6 * rng.standard_normal((1, 2, 1, 64)).astype(np.float32)
    want, want_lse = exact_attention(q, k, v)
    smooth, lse = ptxrt.attention(q, k, v, qk=qk, pv=pv, smooth_k=True, return_lse=True)
    plain, plain_lse = ptxrt.attention(q, k, v, qk=qk, pv=pv, smooth_k=False, return_lse=True)
    assert relative(smooth, want) < 0.5 * relative(plain, want)
    assert np.abs(lse - want_lse).mean() <= 0.06 < np.abs(plain_lse - want_lse).mean()  # half as good again as without a bias
    given = operands(q, k, v, qk, pv, smooth=True)
    held, held_lse = exact_attention(*(np.asarray(x) for x in given))
    _, lse = ptxrt.attention(*given, qk=qk, pv=pv, return_lse=True)
    assert np.abs(lse - held_lse).max() <= 1e-4 * max(1, np.abs(held_lse).max())  # 1000 keys are split


@each_format
def test_values_of_one_give_one(machine, rng, qk, pv):
    q, k, _ = random_qkv(rng, 1, 2, 30, 100, 64)
    out = ptxrt.attention(q, k, np.ones((1, 2, 100, 64), np.float32), qk=qk, pv=pv, out_dtype=np.float32)
    assert np.abs(out - 1).max() <= 2**-8  # a bf16 ulp


@each_format
def test_prepared_calls_take_operands(machine, rng, qk, pv):
    arrays = random_qkv(rng, 1, 2, 20, 70, 64)
    given = operands(*map(ptxrt.to_device, arrays), qk, pv)
    out = ptxrt.empty((1, 2, 20, 64), np.float32)
    want = ptxrt.attention(*given, qk=qk, pv=pv, out_dtype=np.float32).to_numpy()
    call = ptxrt.prepare(ptxrt.attention, *given, qk=qk, pv=pv, out=out)
    call(*given, out=out)
    np.testing.assert_array_equal(out.to_numpy(), want)
    for _ in range(2):  # the second is remembered
        np.testing.assert_array_equal(ptxrt.attention(*given, qk=qk, pv=pv, out=out).to_numpy(), want)


@settings(max_examples=25, deadline=None)
@given(
    *(st.sampled_from(FORMATS), st.integers(1, 40), st.integers(2, 6), st.integers(1, 32), st.floats(0, 1)),
    *(st.sampled_from([0.5, 1, 4]), st.sampled_from([0, 3, 12]), st.integers(0, 2**32)),
)
def test_segments_merge_to_the_whole(formats, queries, runs, last, at, spread, rise, seed):
    """Segments merged by row_max and row_sum equal one pass: codes of weights do not depend on the maximum they are relative to.

    So float32 sums are all that differs, 1e-5. But under large scores there are weights, and scales of weights, of 2^-14 and less
    beside the largest, where e4m3 is subnormal: 1e-3. Segments are whole blocks of 32 keys; scores rise along the keys by `rise`.
    """
    qk, pv = formats
    rng, keys, cut = np.random.default_rng(seed), 32 * (runs - 1) + last, 32 * max(1, round(at * (runs - 1)))
    q, k, v = random_qkv(rng, 1, 2, queries, keys, 64)
    q, k = spread * q, k + rise / keys * np.arange(keys, dtype=np.float32)[:, None] * q.mean(axis=2, keepdims=True)
    with ptxrt.using("emulator"):
        of_q, of_k, of_v = operands(q, k, v, qk, pv, smooth=False)
        whole, row_max, row_sum = ptxrt.attention(of_q, of_k, of_v, qk=qk, pv=pv, normalize=False)
        segments = []
        for part in slice(0, cut), slice(cut, None):
            of = [
                ptxrt.quantize_operand(x[:, :, part], whole.format, role=whole.role, global_scale=whole.global_scale, **more)
                for x, whole, more in ((k, of_k, dict(smooth=False)), (v, of_v, {}))
            ]
            segments.append(ptxrt.attention(of_q, *of, qk=qk, pv=pv, normalize=False))
        outs, maxima, sums = zip(*segments)
        out, lse = ptxrt.merge(outs, row_max=maxima, row_sum=sums)
    bound = 1e-3 if spread == 4 and pv in ("mxfp8", "nvfp4") else 1e-5
    assert relative(out, whole / row_sum[..., None]) < bound
    np.testing.assert_allclose(lse, (row_max + np.log2(row_sum)) * np.log(2), rtol=1e-5, atol=bound)


def test_keys_are_not_smoothed_where_scores_must_be_their_own(machine, rng):
    q, k, v = random_qkv(rng, 1, 2, 20, 70, 64)
    for options in (dict(softcap=2.0), dict(sinks=np.float32([1, 2])), dict(normalize=False)):
        plain = operands(q, k, v, "nvfp4", "nvfp4", smooth=False)
        got, want = (ptxrt.attention(*x, qk="nvfp4", **options) for x in ((q, k, v), plain))
        np.testing.assert_array_equal(got[0], want[0])


def test_wrong_calls_say_what_to_do(emulator, rng):
    q, k, v = random_qkv(rng, 1, 2, 20, 70, 64)
    of_q, of_k, of_v = operands(q, k, v, "nvfp4", "mxfp8")

    def refused(match, *arrays, **options):
        with pytest.raises(ptxrt.ArgumentError, match=match):
            ptxrt.attention(*arrays, **options)

    mixed = dict(qk="nvfp4", pv="mxfp8")
    refused(r"k is Operand.*takes quantize_operand\(k, 'mxfp8', role='k'\)", q, of_k, v, qk="mxfp8")
    refused(r"v is Operand.*role='k'.*takes quantize_operand\(v, 'mxfp8', role='v'\)", q, k, of_k, **mixed)
    refused("qk='bf16', pv='bf16' takes k as an array", q, of_k, v)
    refused(r"v is QuantizedArray.*takes quantize_operand\(v, 'mxfp8', role='v'\)", q, k, ptxrt.quantize(v, "mxfp8"), **mixed)
    refused("smooth_k is False, but k is Operand.*quantize it with smooth=False", q, of_k, v, **mixed, smooth_k=False)
    refused("with softcap scores must be those.*quantize it with smooth=False", q, of_k, v, **mixed, softcap=1.0)
    refused("smooth_k is True; with sinks", q, k, v, **mixed, smooth_k=True, sinks=np.zeros(2, np.float32))
    wide = ptxrt.quantize_operand(v, "mxfp8", role="v", dim=128)
    refused("k for a head dimension of 64 and v for a head dimension of 128 were quantized; these need one of 128", q, of_k, wide, **mixed)
    narrow = ptxrt.quantize_operand(v[..., :32], "mxfp8", role="v")
    refused("v for a head dimension of 32 were quantized; these need one of 64", q, k, narrow, **mixed)
    refused("q and k have one head dimension; 32 and 64 came", ptxrt.quantize_operand(q[..., :32], "nvfp4", role="q"), of_k, of_v, **mixed)
    refused("has no cu_seqlens_q", q, k, v, **mixed, cu_seqlens_q=[0, 20], cu_seqlens_k=[0, 70])
    refused("has no smooth_q", q, k, v, **mixed, smooth_q=True)
    assert ptxrt.attention(of_q, of_k, of_v, **mixed).shape == (1, 2, 20, 64)
