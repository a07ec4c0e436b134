"""Properties of attention in every format on small problems: batches, groups, order of keys, truncation, segments."""

import ml_dtypes
import numpy as np
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import ptxrt
from attention_arrays import BLOCK_WAYS, WAYS, bits, block_of, operands, random_qkv, relative

#: Each example makes two or more calls, each of one or two tenths of a second if operands are quantized. Shrinking a
#: failing example would take minutes.
few = settings(max_examples=12, deadline=None, phases=[phase for phase in Phase if phase is not Phase.shrink])


@st.composite
def problems(draw, ways=WAYS):
    """Small problems of any shape in any format: (random generator, q, k, v, options that apply to each batch and
    head)."""
    qk, pv = draw(st.sampled_from(ways))
    batch, heads_kv, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    queries, keys, dim = draw(st.integers(1, 40)), draw(st.integers(1, 140)), draw(st.sampled_from([24, 32, 64]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    arrays = random_qkv(rng, batch, heads_kv * group, queries, keys, dim, heads_kv=heads_kv, dtype=ml_dtypes.bfloat16)
    options = dict(qk=qk, pv=pv, causal=draw(st.booleans()), softcap=draw(st.sampled_from([0.0, 1.5])))
    if draw(st.booleans()):
        options["window"] = draw(st.tuples(*(st.none() | st.integers(0, 50) for _ in range(2))))
    return rng, *arrays, options


def unmasked(options) -> dict:
    """The options under which all keys are equivalent."""
    return {name: options[name] for name in ("qk", "pv", "softcap")}


@few
@given(problem=problems())
def test_a_batch_and_its_heads_equal_their_items(problem):
    """Bit for bit, including lse; a repeated call gives the same bits."""
    _, q, k, v, options = problem
    with ptxrt.using("emulator"):
        out, lse = ptxrt.attention(q, k, v, return_lse=True, **options)
        again, its_lse = ptxrt.attention(q, k, v, return_lse=True, **options)
        np.testing.assert_array_equal(bits(again), bits(out))
        np.testing.assert_array_equal(its_lse, lse)
        batch, head = len(q) - 1, k.shape[1] - 1
        heads = slice(head * (q.shape[1] // k.shape[1]), None)
        alone, its_lse = ptxrt.attention(
            q[batch:, heads], k[batch:, head:], v[batch:, head:], return_lse=True, **options
        )
        np.testing.assert_array_equal(bits(out[batch:, heads]), bits(alone))
        np.testing.assert_array_equal(lse[batch:, heads], its_lse)


@few
@given(problem=problems())
def test_grouped_heads_equal_repeated_ones(problem):
    _, q, k, v, options = problem
    group = q.shape[1] // k.shape[1]
    with ptxrt.using("emulator"):
        out = ptxrt.attention(q, k, v, **options)
        np.testing.assert_array_equal(
            bits(out), bits(ptxrt.attention(q, k.repeat(group, 1), v.repeat(group, 1), **options))
        )


@few
@given(problem=problems(), data=st.data())
def test_key_lengths_truncate(problem, data):
    """Bit for bit, whatever the keys beyond the length hold."""
    _, q, k, v, options = problem
    lengths = data.draw(st.lists(st.integers(1, k.shape[2]), min_size=len(q), max_size=len(q)))
    for batch, length in enumerate(lengths):
        k[batch, :, length:], v[batch, :, length:] = data.draw(
            st.sampled_from([(np.nan, np.inf), (1e30, np.nan), (-np.inf, -1e30)])
        )
    with ptxrt.using("emulator"):
        out, lse = ptxrt.attention(q, k, v, key_lengths=lengths, return_lse=True, **options)
        for batch, length in enumerate(lengths):
            items = q[batch : batch + 1], *(x[batch : batch + 1, :, :length] for x in (k, v))
            alone, its_lse = ptxrt.attention(*items, return_lse=True, **options)
            np.testing.assert_array_equal(bits(out[batch : batch + 1]), bits(alone))
            np.testing.assert_array_equal(lse[batch : batch + 1], its_lse)


@few
@given(problem=problems())
def test_keys_may_be_permuted_with_their_values(problem):
    """Without a mask, permuting keys within a block that shares scales changes only the order of float32 sums."""
    rng, q, k, v, options = problem
    keys, block = k.shape[2], block_of(options["pv"])
    if block == 1:
        order = rng.permutation(keys)
    else:
        order = np.concatenate(
            [rng.permutation(np.arange(first, min(first + block, keys))) for first in range(0, keys, block)]
        )
    call = dict(unmasked(options), out_dtype=np.float32)
    if (options["qk"], options["pv"]) in BLOCK_WAYS:
        call["smooth_k"] = False  # the mean is another sum whose order would change
    with ptxrt.using("emulator"):
        got = ptxrt.attention(q, k[:, :, order], v[:, :, order], **call)
        assert relative(got, ptxrt.attention(q, k, v, **call)) < 1e-5


@settings(max_examples=25, deadline=None)
@given(
    problem=problems([way for way in WAYS if way not in BLOCK_WAYS]),
    at=st.floats(0, 1),
    factor=st.sampled_from([1, 5, 20]),
)
def test_segments_merge_to_the_whole(problem, at, factor):
    """Merged segments equal one pass: weights are rounded alike, whatever the maximum they are relative to.

    The bound of 1e-5 allows for float32 sums in another order, with terms of both signs. One weight in a thousand
    rounded to the other side would cost 1e-4.
    """
    _, q, k, v, options = problem
    cut = max(1, min(k.shape[2] - 1, round(at * k.shape[2])))
    options = dict(unmasked(options), scale=factor * q.shape[-1] ** -0.5)
    with ptxrt.using("emulator"):
        whole, whole_lse = ptxrt.attention(q, k, v, return_lse=True, out_dtype=np.float32, **options)
        parts = [slice(0, cut), slice(cut, None)] if k.shape[2] > 1 else [slice(None)]
        outs, lses = zip(
            *(
                ptxrt.attention(q, k[:, :, p], v[:, :, p], return_lse=True, out_dtype=np.float32, **options)
                for p in parts
            )
        )
        sums = zip(*(ptxrt.attention(q, k[:, :, p], v[:, :, p], normalize=False, **options) for p in parts))
        merged = ptxrt.merge(outs, lses), ptxrt.merge(next(sums), row_max=next(sums), row_sum=next(sums))
    for out, lse in merged:
        assert relative(out, whole) < 1e-5
        np.testing.assert_allclose(lse, whole_lse, rtol=1e-5, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(
    *(st.sampled_from(BLOCK_WAYS), st.integers(1, 40), st.integers(2, 6), st.integers(1, 32), st.floats(0, 1)),
    *(st.sampled_from([0.5, 1, 4]), st.sampled_from([0, 3, 12]), st.integers(0, 2**32)),
)
def test_segments_of_block_formats_merge_to_the_whole(formats, queries, runs, last, at, spread, rise, seed):
    """Segments merged by row_max and row_sum equal one pass: codes of weights do not depend on the maximum they are
    relative to.

    Only the order of float32 sums differs: 1e-5. If the scores of a row are far apart, weights and scales of weights
    below 2^-14 of the largest are subnormal in e4m3: 1e-3. Segments are whole blocks of 32 keys; scores rise along the
    keys by `rise`.
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
                ptxrt.quantize_operand(
                    x[:, :, part], whole.format, role=whole.role, global_scale=whole.global_scale, **more
                )
                for x, whole, more in ((k, of_k, dict(smooth=False)), (v, of_v, {}))
            ]
            segments.append(ptxrt.attention(of_q, *of, qk=qk, pv=pv, normalize=False))
        outs, maxima, sums = zip(*segments)
        out, lse = ptxrt.merge(outs, row_max=maxima, row_sum=sums)
    steps = np.ptp(q @ k.swapaxes(-1, -2), axis=-1).max() * 64**-0.5 / np.log(2)  # 13: codes move them by less than one
    bound = 1e-3 if steps > 13 and pv in ("mxfp8", "nvfp4") else 1e-5
    assert relative(out, whole / row_sum[..., None]) < bound
    np.testing.assert_allclose(lse, (row_max + np.log2(row_sum)) * np.log(2), rtol=1e-5, atol=bound)
