"""Every format over the cases that other libraries test: lengths around tile sizes, head dimensions, groups, masks;
real sizes on a GPU."""

import ml_dtypes
import numpy as np
import pytest

import ptxrt
from attention_arrays import BLOCK_WAYS, WAYS, bits, held, largest_dim, random_qkv, rounding
from ptxrt.accuracy import Tolerance
from ptxrt.ops.attention import exact_attention

# Lengths that FlashAttention, FlashInfer and SageAttention test, with fewer and with more queries than keys; then small
# ones.
REAL = [
    (1, 1),
    (1, 1023),
    (3, 799),
    (17, 513),
    (113, 203),
    (127, 239),
    (203, 127),
    (239, 1),
    (513, 799),
    (799, 513),
    (1023, 1024),
    (1024, 1023),
]
SMALL = [(1, 1), (3, 17), (17, 3), (40, 113), (70, 64), (1, 127)]
OPTIONS = [
    dict(),
    dict(causal=True),
    dict(window=(20, 5)),
    dict(window=(64, None), causal=True),
    dict(window=(None, 30), softcap=3.0),
    dict(window=(0, 0)),
    dict(scale=0.2, causal=True),
]
HEADS = [(2, 2), (2, 1), (3, 1), (4, 1), (6, 1), (8, 1), (6, 2)]
DIMS = (32, 64, 96, 128, 192, 256)


def sample(index: int, qk: str, pv: str, times: int):
    """`times` combinations of options, heads and head dimensions, different for each index of lengths. With D = 192
    every other one has Dv = 128."""
    dims = [dim for dim in DIMS if dim <= largest_dim(qk, pv)]
    for i in range(times * index, times * (index + 1)):
        dim = dims[i % len(dims)]
        dim_v = 128 if dim == 192 and i // len(dims) % 2 == 0 else dim
        yield OPTIONS[i % len(OPTIONS)], HEADS[(3 * i + i // len(OPTIONS)) % len(HEADS)], (dim, dim_v)


def compare(rng, qk, pv, queries, keys, options, heads, dims, again=False):
    """Compare a call with float64 attention of its operands' values.

    The bound of relative L2 is the rounding of weights, plus that of the output to 16 bits; twice that for at most 64
    rows, which average less. The gain detects an error common to all elements; its bound is half of that, since
    four-bit codes lose small weights beside large ones. With `again`, a second call must give the same bits.
    """
    q, k, v = random_qkv(rng, 2, heads[0], queries, keys, dims[0], heads_kv=heads[1], dim_v=dims[1])
    if (qk, pv) in BLOCK_WAYS:
        call = dict(qk=qk, pv=pv, smooth_k=False, out_dtype=ml_dtypes.bfloat16)
    else:
        call = dict(qk=qk, pv=pv, out_dtype=ml_dtypes.bfloat16)
    out, lse = ptxrt.attention(q, k, v, return_lse=True, **call, **options)
    if again:
        for first, second in zip((out, lse), ptxrt.attention(q, k, v, return_lse=True, **call, **options)):
            np.testing.assert_array_equal(bits(first), bits(second))
    want, want_lse = exact_attention(*unsmoothed(q, k, v, qk, pv), **options)
    seen = np.isfinite(want_lse)
    np.testing.assert_array_equal(lse[~seen], want_lse[~seen])
    assert not out.astype(np.float32)[~seen].any()
    assert (
        np.abs(lse[seen] - want_lse[seen]) <= 1e-4 * np.maximum(1, np.abs(want_lse[seen]))
    ).all()  # float32 sums, approximate logarithm
    bound = (rounding(qk, pv) + 2.0**-9) * (1 if seen.sum() > 64 else 2)
    bounds = Tolerance("as above", relative_l2=bound, cosine=1 - bound**2 / 2, gain=bound / 2)
    assert bounds.misses(ptxrt.compare(out, want)) == [], (options, heads, dims)


def unsmoothed(q, k, v, qk, pv):
    """The values that the kernel multiplies, without smoothing of keys."""
    if (qk, pv) in BLOCK_WAYS:
        q, k = ptxrt.quantize_operand(q, qk, role="q"), ptxrt.quantize_operand(k, qk, role="k", smooth=False)
    return held(q, k, v, qk, pv)


@pytest.mark.parametrize("index, lengths", list(enumerate(SMALL)), ids=str)
@pytest.mark.parametrize("qk, pv", BLOCK_WAYS)
def test_small_sizes(emulator, rng, qk, pv, index, lengths):
    """test_attention.py covers the 16-bit formats."""
    for options, heads, dims in sample(index, qk, pv, 1):
        compare(rng, qk, pv, *lengths, options, heads, dims)


@pytest.mark.gpu
@pytest.mark.parametrize("index, lengths", list(enumerate(REAL)), ids=str)
@pytest.mark.parametrize("qk, pv", WAYS)
def test_real_sizes(gpu, rng, qk, pv, index, lengths):
    """Two combinations at each pair of lengths."""
    for options, heads, dims in sample(index, qk, pv, 2):
        compare(rng, qk, pv, *lengths, options, heads, dims, again=True)


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [1, 16])
@pytest.mark.parametrize("qk, pv", WAYS)
def test_long_keys_and_few_rows(gpu, rng, qk, pv, queries):
    """As many splits of the keys as fill a GPU."""
    compare(rng, qk, pv, queries, 16384, dict(causal=True), (8, 2), (128, 128))


def test_the_sample_covers():
    """Over the lengths every format meets every option, head count and head dimension."""
    for qk, pv in WAYS:
        options, heads, dims = zip(*(each for index in range(len(REAL)) for each in sample(index, qk, pv, 2)))
        assert all(option in options for option in OPTIONS) and set(heads) == set(HEADS)
        assert set(dims) == {*((dim, dim) for dim in DIMS if dim <= largest_dim(qk, pv)), (192, 128)}
