"""What holds for every format of attention and any small problem: batches, groups, order, truncation, segments."""

import ml_dtypes
import numpy as np
from attention_arrays import BLOCK_WAYS, WAYS, bits, block_of, random_qkv, relative, rounding
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import ptxrt

#: Two calls and more to an example, each a tenth of a second or two where operands are quantized.
#: To make a failing example smaller would take minutes.
few = settings(max_examples=12, deadline=None, phases=[phase for phase in Phase if phase is not Phase.shrink])


@st.composite
def problems(draw, ways=WAYS):
    """Small problems of any shape in any format: random numbers, the arrays, and options that hold for each batch and head."""
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
    """The options that do not tell one key from another."""
    return {name: options[name] for name in ("qk", "pv", "softcap")}


@few
@given(problem=problems())
def test_a_batch_and_its_heads_equal_their_items(problem):
    """Bit for bit, lse too; and so does the same call made again."""
    _, q, k, v, options = problem
    with ptxrt.using("emulator"):
        out, lse = ptxrt.attention(q, k, v, return_lse=True, **options)
        again, its_lse = ptxrt.attention(q, k, v, return_lse=True, **options)
        np.testing.assert_array_equal(bits(again), bits(out))
        np.testing.assert_array_equal(its_lse, lse)
        batch, head = len(q) - 1, k.shape[1] - 1
        heads = slice(head * (q.shape[1] // k.shape[1]), None)
        alone, its_lse = ptxrt.attention(q[batch:, heads], k[batch:, head:], v[batch:, head:], return_lse=True, **options)
        np.testing.assert_array_equal(bits(out[batch:, heads]), bits(alone))
        np.testing.assert_array_equal(lse[batch:, heads], its_lse)


@few
@given(problem=problems())
def test_grouped_heads_equal_repeated_ones(problem):
    _, q, k, v, options = problem
    group = q.shape[1] // k.shape[1]
    with ptxrt.using("emulator"):
        out = ptxrt.attention(q, k, v, **options)
        np.testing.assert_array_equal(bits(out), bits(ptxrt.attention(q, k.repeat(group, 1), v.repeat(group, 1), **options)))


@few
@given(problem=problems(), data=st.data())
def test_key_lengths_truncate(problem, data):
    """Bit for bit, whatever lies behind the last key."""
    _, q, k, v, options = problem
    lengths = data.draw(st.lists(st.integers(1, k.shape[2]), min_size=len(q), max_size=len(q)))
    for batch, length in enumerate(lengths):
        k[batch, :, length:], v[batch, :, length:] = data.draw(st.sampled_from([(np.nan, np.inf), (1e30, np.nan), (-np.inf, -1e30)]))
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
    """Without a mask the order of keys, within a block that shares scales, changes nothing but that of float32 sums."""
    rng, q, k, v, options = problem
    keys, block = k.shape[2], block_of(options["pv"])
    if block == 1:
        order = rng.permutation(keys)
    else:
        order = np.concatenate([rng.permutation(np.arange(first, min(first + block, keys))) for first in range(0, keys, block)])
    call = dict(unmasked(options), out_dtype=np.float32)
    if (options["qk"], options["pv"]) in BLOCK_WAYS:
        call["smooth_k"] = False  # the mean is one more sum whose order changes
    with ptxrt.using("emulator"):
        got = ptxrt.attention(q, k[:, :, order], v[:, :, order], **call)
        assert relative(got, ptxrt.attention(q, k, v, **call)) < 1e-5


@settings(few, derandomize=True)  # a single code over a tie is too much for a row of few keys: rare, but not in every run
@given(problem=problems(), at=st.floats(0, 1))
def test_segments_merge_to_the_whole(problem, at):
    """Segments that begin where a tile does equal one pass, from sums before the division and, by `merge`, from outputs.

    Weights are rounded alike, whatever the maximum they are relative to, but for those so near a tie that the float32 rounding of
    their exponents, relative to another maximum, moves them over it: in 16 bits seldom more than one in a thousand, and by
    one bit, hence 1e-4 and not 1e-5. A code of a block format is coarser: 1e-3. There lse is of the weights before they are
    rounded, by which `merge` weighs the segments: as good as the rounding.
    """
    _, q, k, v, options = problem
    is_block = (options["qk"], options["pv"]) in BLOCK_WAYS
    keys = k.shape[2]
    cut = round(at * keys)
    cut = 64 * max(1, round(cut / 64)) if is_block else max(1, cut)
    parts = [slice(0, cut), slice(cut, None)] if cut < keys else [slice(None)]
    call, bound = unmasked(options), 1e-3 if is_block else 1e-4
    of_merge = rounding(options["qk"], options["pv"]) if is_block else bound
    with ptxrt.using("emulator"):
        whole, whole_max, whole_sum = ptxrt.attention(q, k, v, normalize=False, **call)
        outs, maxima, sums = zip(*(ptxrt.attention(q, k[:, :, p], v[:, :, p], normalize=False, **call) for p in parts))
        unsmoothed = dict(smooth_k=False) if is_block else {}  # each segment would lose a mean of its own
        found = (ptxrt.attention(q, k[:, :, p], v[:, :, p], return_lse=True, out_dtype=np.float32, **call, **unsmoothed) for p in parts)
        merged, lse = ptxrt.merge(*zip(*found))
    shares = np.exp2(np.float64(maxima) - np.max(maxima, axis=0))
    total = (shares * sums).sum(axis=0)
    assert relative((shares[..., None] * outs).sum(axis=0) / total[..., None], whole / whole_sum[..., None]) < bound
    assert relative(merged, whole / whole_sum[..., None]) < of_merge
    if not is_block:  # there sums before the division are of rounded weights
        np.testing.assert_allclose(lse, (whole_max + np.log2(whole_sum)) * np.log(2), rtol=1e-5, atol=1e-5)
