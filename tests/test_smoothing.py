"""Attention on smoothed operands: a cap, a sink and unnormalized sums see the scores of the operands' values."""

import ml_dtypes
import numpy as np
import pytest

import ptxrt
from attention_restated import restated_blocks
from ptxrt.ops.attention import exact_attention

FORMATS = [("mxfp8", "mxfp8"), ("mxfp4", "mxfp4"), ("nvfp4", "nvfp4"), ("nvfp4", "mxfp8")]
each_format = pytest.mark.parametrize("qk, pv", FORMATS, ids=lambda name: name)
each_qk = pytest.mark.parametrize("qk", ["mxfp8", "mxfp4", "nvfp4"])
# Bounds for rounded weights; the error on normal scores is two thirds of these.
ROUNDING = {"mxfp8": 0.04, "mxfp4": 0.25, "nvfp4": 0.13}


def biased(rng, batch, heads, queries, keys, dim, *, heads_kv=None, dtype=np.float32):
    """q, k and v; q and k have a bias per head and channel, k's with three times the deviation of its values."""
    shapes = (heads, queries, dim), (heads_kv or heads, keys, dim), (heads_kv or heads, keys, dim)
    q, k, v = (rng.standard_normal((batch, *shape)) for shape in shapes)
    q += 2 * rng.standard_normal((1, heads, 1, dim)) * rng.standard_normal((batch, 1, 1, 1))
    k += 3 * rng.standard_normal((1, heads_kv or heads, 1, dim))
    return [x.astype(dtype) for x in (q, k, v)]


def relative(got, want):
    return np.linalg.norm(np.float64(got) - want) / np.linalg.norm(want)


def smoothed(q, k, v, qk, pv, smooth_q=True, **options):
    """Operands of q, k and v, with the means subtracted from q and k."""
    return [
        ptxrt.quantize_operand(q, qk, role="q", smooth=smooth_q),
        ptxrt.quantize_operand(k, qk, role="k", smooth=True, **options),
        ptxrt.quantize_operand(v, pv, role="v", **options),
    ]


def shift_of(q, k):
    """What smoothing subtracts from the scores of a row: scale * q * (mean of the keys), with q's operand values."""
    mean = np.repeat(k.mean, q.shape[1] // k.shape[1], axis=1)
    return np.einsum("bhqd,bhd->bhq", np.asarray(q, np.float64), mean) * q.shape[-1] ** -0.5


def close(lse, want):
    """Within 1e-4 of the log-sum-exp: float32 sums, approximate exponentials and logarithm."""
    seen = np.isfinite(want)
    np.testing.assert_array_equal(lse[~seen], want[~seen])
    assert (np.abs(lse[seen] - want[seen]) <= 1e-4 * np.maximum(1, np.abs(want[seen]))).all()


@each_format
@pytest.mark.parametrize(
    "shape, options",
    [
        ((1, 2, 70, 100, 64), dict(causal=True)),
        ((1, 1, 17, 70, 40), dict(softcap=8.0)),
        ((1, 2, 19, 65, 64), dict(sinks=np.float32([-8, 12]))),
    ],
    ids=str,
)
@pytest.mark.parametrize("smooth_q", [False, True], ids=["k", "qk"])
def test_the_algorithm_restated(machine, rng, qk, pv, shape, options, smooth_q):
    """The restatement rounds weights as the kernels do: only the order of float32 sums and ties of single codes
    differ."""
    given = smoothed(*biased(rng, *shape), qk, pv, smooth_q)
    got, lse = ptxrt.attention(*given, qk=qk, pv=pv, out_dtype=np.float32, return_lse=True, **options)
    want, want_lse = restated_blocks(*(np.asarray(x) for x in given), pv, **options, shift=shift_of(*given[:2]))
    assert relative(got, want) <= 2.5e-3
    close(lse, want_lse)


CALLS = {
    "groups": (dict(batch=2, heads=4, heads_kv=2, queries=33, keys=90), dict(causal=True)),
    "lengths": (dict(batch=2, heads=2, queries=20, keys=130), dict(key_lengths=[130, 7], sinks=np.float32([1, -3]))),
    "mask": (dict(batch=1, heads=2, queries=70, keys=70), dict(mask=True, softcap=10.0)),
    "decode": (dict(batch=1, heads=4, heads_kv=1, queries=1, keys=900), dict(sinks=np.float32([-10, 0, 10, 20]))),
    "split": (dict(batch=1, heads=2, queries=3, keys=600), dict(softcap=6.0, sinks=np.float32([0, 3]))),
}


@each_format
@pytest.mark.parametrize("name", CALLS)
def test_against_float64(machine, rng, qk, pv, name):
    """Output, lse and unnormalized sums, against attention of the operands' values; some calls split the keys."""
    sizes, options = CALLS[name]
    q, k, v = biased(rng, **{"heads_kv": None, "dim": 64, **sizes})
    if "mask" in options:
        options = {**options, "mask": rng.choice(np.float32([0, -1, -np.inf]), (1, 2, q.shape[2], k.shape[2]))}
    lengths = {name: options[name] for name in ("key_lengths",) if name in options}
    given = smoothed(q, k, v, qk, pv, **lengths)
    want, want_lse = exact_attention(*(np.asarray(x) for x in given), **options)
    got, lse = ptxrt.attention(*given, qk=qk, pv=pv, out_dtype=np.float32, return_lse=True, **options)
    # Scores are spread over several units: few weights count, so that their rounding matters more.
    assert relative(got, want) <= 1.5 * ROUNDING[pv]
    close(lse, want_lse)
    out, row_max, row_sum = ptxrt.attention(*given, qk=qk, pv=pv, normalize=False, **options)
    seen = np.isfinite(want_lse)
    np.testing.assert_array_equal(row_max[seen], np.round(row_max[seen]))
    np.testing.assert_allclose(
        (out[seen] / row_sum[seen][..., None]), got[seen], rtol=1e-5, atol=5e-4
    )  # the division happens elsewhere; weights far below the largest have more bits if maxima are an output
    log_sum = (row_max + np.log2(row_sum, where=seen, out=np.zeros_like(row_sum))) * np.log(2)
    assert np.abs(log_sum - want_lse)[seen].mean() <= ROUNDING[pv]  # the sum is of rounded weights


@each_qk
def test_scores_are_better_for_it(machine, rng, qk):
    """With a bias on q and k, smoothing keys reduces the error, and smoothing queries reduces it again, also that of
    lse.

    The rounding error of keys is multiplied by whole queries in either case, so that smoothing queries gains less than
    half.
    """
    q, k, v = (rng.standard_normal((1, 2, length, 64)).astype(np.float32) for length in (70, 200, 200))
    q = 0.25 * q + 2 * rng.standard_normal((1, 2, 1, 64)).astype(np.float32)
    k = k + 6 * rng.standard_normal((1, 2, 1, 64)).astype(np.float32)
    want, want_lse = exact_attention(q, k, v)
    errors, of_lse = [], []
    for options in (dict(smooth_k=False), dict(smooth_k=True), dict(smooth_k=True, smooth_q=True)):
        got, lse = ptxrt.attention(
            q, k, v, qk=qk, pv="mxfp8" if qk == "nvfp4" else None, return_lse=True, out_dtype=np.float32, **options
        )
        errors.append(relative(got, want))
        of_lse.append(np.abs(lse - want_lse).mean())
    assert errors[0] > 2 * errors[1] and errors[1] > 1.1 * errors[2]
    assert of_lse[0] > 2 * of_lse[1] and of_lse[1] > of_lse[2]


@pytest.mark.parametrize(
    "options", [dict(), dict(sinks=np.float32([4, 9])), dict(softcap=20.0), dict(normalize=False)], ids=str
)
def test_automatic_smoothing_has_no_exceptions(machine, rng, options):
    """4-bit keys are smoothed by default with every option; 8-bit keys are not."""
    q, k, v = biased(rng, 1, 2, 20, 70, 64)
    for qk, smooth_k in (("nvfp4", True), ("mxfp4", True), ("mxfp8", False)):
        automatic, asked, other = (
            ptxrt.attention(q, k, v, qk=qk, **options, **smoothing)
            for smoothing in ({}, dict(smooth_k=smooth_k), dict(smooth_k=not smooth_k))
        )
        np.testing.assert_array_equal(automatic[0], asked[0])
        assert (automatic[0] != other[0]).any()


@each_qk
@pytest.mark.parametrize("queries", [1, 64, 130])
def test_queries_less_the_means_of_blocks(machine, rng, qk, queries):
    """An operand holds the means and the codes of the differences; its values are the sums of both."""
    x = biased(rng, 2, 2, queries, 70, 40)[0]
    operand = ptxrt.quantize_operand(x, qk, role="q", smooth=True)
    means = np.stack([x[:, :, i : i + 64].mean(axis=2, dtype=np.float64) for i in range(0, queries, 64)], axis=2)
    assert np.abs(operand.mean - means).max() <= 3e-6  # float32 sums of 64 numbers up to 10
    left = x - operand.mean.repeat(64, axis=2)[:, :, :queries]
    plain = ptxrt.quantize_operand(left, qk, role="q", global_scale=operand.global_scale)
    np.testing.assert_array_equal(operand.codes, plain.codes)
    np.testing.assert_array_equal(operand.scales, plain.scales)
    values = np.asarray(plain) + operand.mean.repeat(64, axis=2)[:, :, :queries]
    np.testing.assert_array_equal(np.asarray(operand), values)
    np.testing.assert_array_equal(ptxrt.dequantize(operand), values)
    np.testing.assert_array_equal(ptxrt.dequantize(operand, ml_dtypes.bfloat16), values.astype(ml_dtypes.bfloat16))
    if queries == 1:
        np.testing.assert_array_equal(values, x)  # the difference of a single query is zero


@each_qk
def test_queries_of_packed_sequences(machine, rng, qk, tmp_path):
    """Each sequence has its own blocks: codes, means, values and scores equal those of each sequence alone."""
    cu_q, cu_k = (np.concatenate([[0], np.cumsum(lengths)]) for lengths in ([3, 63, 0, 64, 70], [70, 5, 9, 64, 1]))
    q, k, v = biased(rng, 1, 2, cu_q[-1], cu_k[-1], 40)
    whole = ptxrt.quantize_operand(q, qk, role="q", smooth=True, cu_seqlens=cu_q)
    assert whole.mean.shape == (1, 2, -(-200 // 64) + 4, 40)
    means, values = np.zeros_like(whole.mean), np.empty_like(q)
    for i, rows in enumerate(map(slice, cu_q, cu_q[1:])):
        alone = ptxrt.quantize_operand(q[:, :, rows], qk, role="q", smooth=True, global_scale=whole.global_scale)
        np.testing.assert_array_equal(whole.codes[:, :, rows], alone.codes)
        np.testing.assert_array_equal(whole.scales[:, :, rows], alone.scales)
        first = cu_q[i] // 64 + i
        means[:, :, first : first + alone.mean.shape[2]] = alone.mean
        values[:, :, rows] = np.asarray(alone)
    np.testing.assert_array_equal(whole.mean, means)
    whole.save(tmp_path / "q.npz")
    for got in (whole, ptxrt.dequantize(whole), ptxrt.Operand.load(tmp_path / "q.npz")):
        np.testing.assert_array_equal(np.asarray(got), values)
    short = ptxrt.to_device(np.int32([0, *cu_q[1:3]]))  # on the device, rows after the last sequence are ignored
    few = ptxrt.quantize_operand(
        ptxrt.to_device(q), qk, role="q", smooth=True, cu_seqlens=short, global_scale=whole.global_scale
    )
    np.testing.assert_array_equal(few.codes.to_numpy()[:, :, : cu_q[2]], whole.codes[:, :, : cu_q[2]])
    of_k, of_v = (ptxrt.quantize_operand(x, qk, role=role, cu_seqlens=cu_k) for role, x in (("k", k), ("v", v)))
    options = dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True)
    want, want_lse = exact_attention(values, np.asarray(of_k), np.asarray(of_v), **options)
    got, lse = ptxrt.attention(whole, of_k, of_v, qk=qk, return_lse=True, out_dtype=np.float32, **options)
    assert relative(got, want) <= 1.5 * ROUNDING[qk]
    close(lse, want_lse)


@each_qk
def test_arrays_operands_and_layouts(machine, rng, qk):
    """Arrays, operands, strides, host and device give the same result; inputs are unchanged."""
    arrays = biased(rng, 2, 4, 70, 90, 64, heads_kv=2, dtype=np.float16)
    before = [x.copy() for x in arrays]
    options = dict(qk=qk, sinks=np.float32([1, 2, 3, 4]))
    want = ptxrt.attention(*arrays, smooth_k=True, smooth_q=True, **options)
    for x, kept in zip(arrays, before):
        np.testing.assert_array_equal(x, kept)
    np.testing.assert_array_equal(
        ptxrt.attention(arrays[0], *smoothed(*arrays, qk, qk)[1:], smooth_q=True, **options), want
    )
    turned = [ptxrt.to_device(np.ascontiguousarray(x.transpose(0, 2, 1, 3))) for x in arrays]
    got = ptxrt.attention(*turned, layout="bshd", smooth_k=True, smooth_q=True, **options)
    np.testing.assert_array_equal(got.to_numpy().transpose(0, 2, 1, 3), want)
    for x, kept in zip(turned, before):
        np.testing.assert_array_equal(x.to_numpy(), kept.transpose(0, 2, 1, 3))
    operand = ptxrt.quantize_operand(turned[0], qk, role="q", smooth=True, layout="bshd")
    np.testing.assert_array_equal(np.asarray(operand), np.asarray(smoothed(*arrays, qk, qk)[0]))


@each_qk
def test_rows_smoothed_by_themselves(machine, rng, qk):
    """A batch equals its items bit for bit, and heads that share keys equal heads with separate keys."""
    q, k, v = biased(rng, 2, 4, 70, 90, 64, heads_kv=2)
    options = dict(qk=qk, smooth_k=True, smooth_q=True, return_lse=True, sinks=np.float32([1, 2, 3, 4]))
    whole = ptxrt.attention(q, k, v, **options)
    for i in range(2):
        for got, want in zip(whole, ptxrt.attention(*(x[i : i + 1] for x in (q, k, v)), **options)):
            np.testing.assert_array_equal(got[i], want[0])
    alone = ptxrt.attention(q, *(x.repeat(2, axis=1) for x in (k, v)), **options)
    for got, want in zip(whole, alone):
        np.testing.assert_array_equal(got, want)


def test_rows_without_keys(machine, rng):
    """Rows without visible keys, here before a causal mask, give 0 and -inf, or the sink."""
    q, k, v = biased(rng, 1, 2, 100, 20, 64)
    for options in (dict(), dict(sinks=np.float32([2, -1]))):
        out, lse = ptxrt.attention(q, k, v, qk="nvfp4", causal=True, smooth_q=True, return_lse=True, **options)
        assert (out[:, :, :80] == 0).all()
        np.testing.assert_allclose(
            lse[0, :, :80],
            np.full((2, 80), -np.inf) if not options else options["sinks"][:, None].repeat(80, 1),
            rtol=1e-6,
        )
    _, row_max, row_sum = ptxrt.attention(q, k, v, qk="nvfp4", causal=True, smooth_q=True, normalize=False)
    assert (row_max[:, :, :80] == -np.inf).all() and (row_sum[:, :, :80] == 0).all()


def test_prepared_calls(machine, rng):
    q, k, v = map(ptxrt.to_device, biased(rng, 1, 2, 70, 90, 64))
    options = dict(qk="nvfp4", smooth_q=True, softcap=5.0)
    want = ptxrt.attention(q, k, v, **options).to_numpy()
    call = ptxrt.prepare(ptxrt.attention, q, k, v, **options)
    np.testing.assert_array_equal(call(q, k, v).to_numpy(), want)
    given = smoothed(q, k, v, "nvfp4", "nvfp4")
    want = ptxrt.attention(*given, qk="nvfp4", softcap=5.0, out=ptxrt.empty((1, 2, 70, 64), np.float32)).to_numpy()
    for _ in range(2):  # the second call is the remembered one
        np.testing.assert_array_equal(
            ptxrt.attention(*given, qk="nvfp4", softcap=5.0, out_dtype=np.float32).to_numpy(), want
        )


def test_files_keep_the_means_of_queries(emulator, rng, tmp_path):
    operand = ptxrt.quantize_operand(biased(rng, 1, 2, 70, 20, 40)[0], "nvfp4", role="q", smooth=True)
    operand.save(tmp_path / "q.npz")
    back = ptxrt.Operand.load(tmp_path / "q.npz")
    assert repr(back) == repr(operand) and "less their mean" in repr(back)
    np.testing.assert_array_equal(np.asarray(back), np.asarray(operand))


@pytest.mark.parametrize("shape", [(1, 2, 0, 64), (0, 2, 70, 64)], ids=str)
def test_no_queries(emulator, shape):
    operand = ptxrt.quantize_operand(np.zeros(shape, np.float32), "mxfp8", role="q", smooth=True)
    assert ptxrt.dequantize(operand).shape == np.asarray(operand).shape == shape
    k = np.ones((shape[0], 2, 70, 64), np.float32)
    assert ptxrt.attention(operand, k, k, qk="mxfp8").shape == shape


def test_wrong_calls_say_what_to_do(emulator, rng):
    q, k, v = biased(rng, 1, 2, 20, 70, 64)
    plain, smooth = (ptxrt.quantize_operand(q, "mxfp8", role="q", smooth=smooth) for smooth in (False, True))
    for match, call in (
        (
            "smooth_q is True, but q is Operand.*quantize it with smooth=True",
            lambda: ptxrt.attention(plain, k, v, qk="mxfp8", smooth_q=True),
        ),
        ("has no smooth_q; nearest: qk='nvfp4', pv='bf16'", lambda: ptxrt.attention(q, k, v, smooth_q=True)),
        ("smooth_q is 'on'; pass True or False", lambda: ptxrt.attention(q, k, v, qk="mxfp8", smooth_q="on")),
        (
            "mean of role 'q' is float32 .*it has float32 .1, 2, 1, 64.",
            lambda: type(smooth)(**{**smooth.arrays, "mean": smooth.mean[:, :, 0]}, **smooth.description),
        ),
        (
            "queries have .* cu_seqlens where smooth=True alone",
            lambda: ptxrt.quantize_operand(q, "mxfp8", role="q", cu_seqlens=[0, 20]),
        ),
        ("only queries and keys are smoothed", lambda: ptxrt.quantize_operand(v, "mxfp8", role="v", smooth=True)),
    ):
        with pytest.raises(ptxrt.ArgumentError, match=match):
            call()
