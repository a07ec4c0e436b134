"""Attention that quantizes Q and K while loading them, on every machine: exact scores, every option, ragged sizes, NaN,
errors."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import ptxrt
from ptxrt.ops.attention import ATTENTION, exact_attention
from ptxrt.ops.attention_kernels import HEAD_DIMS, OPEN, attention_mxfp4_bf16_in_kernel, visible
from ptxrt.ops.probes import SCORE_DIMS, probe_scores_mxfp4

BF16 = ml_dtypes.bfloat16
DTYPES = [np.float32, np.float16, BF16]


def reference(q, k, v, **options):
    """Float64 attention, out and lse, of the dequantized Q and K and of V rounded to bfloat16."""
    return exact_attention(*ATTENTION["mxfp4", "bf16", "in_kernel"].values(q, k, v), **options)


def attention(q, k, v, **options):
    """`ptxrt.attention` by this kernel."""
    return ptxrt.attention(q, k, v, **{"qk": "mxfp4", "pv": "bf16", "quantize": "in_kernel", **options})


def assert_close(got, want):
    """Check the tolerance of the declaration, with the gain of one rounded weight for rows of few keys."""
    output = "out_f32" if got.dtype == np.float32 else "out_bf16"
    comparison = ptxrt.compare(got, want)
    missed = replace(attention_mxfp4_bf16_in_kernel.tolerance(output), gain=2.0**-9).misses(comparison)
    assert not missed, f"{', '.join(missed)}; {comparison}"


def assert_lse(got, want):
    assert got.dtype == np.float32
    seen = np.isfinite(want)
    np.testing.assert_array_equal(got[~seen], want[~seen])
    missed = attention_mxfp4_bf16_in_kernel.tolerance("lse").misses(ptxrt.compare(got[seen], want[seen]))
    assert not missed, missed


def random_qkv(rng, batch, heads, queries, keys, dim, dtype=np.float32, heads_kv=None, dim_v=None):
    shapes = ((heads, queries, dim), (heads_kv or heads, keys, dim), (heads_kv or heads, keys, dim_v or dim))
    return tuple(rng.standard_normal((batch, *shape), dtype=np.float32).astype(dtype) for shape in shapes)


# Scores


def test_identities_give_the_identity(machine):
    eye = np.eye(64, dtype=np.float32)[None, None]
    np.testing.assert_array_equal(probe_scores_mxfp4(eye, eye)[0, 0], np.eye(64))


@pytest.mark.parametrize("value, want", [(1.0, 64.0), (2.0, 256.0), (6.0, 36 * 64.0)])
def test_constant_inputs_give_constant_scores(machine, value, want):
    x = np.full((1, 1, 16, 64), value, np.float32)
    np.testing.assert_array_equal(probe_scores_mxfp4(x, x), np.full((1, 1, 16, 16), want))


def test_scales_multiply_on_both_sides(machine):
    ones = np.ones((1, 1, 16, 64), np.float32)
    np.testing.assert_array_equal(probe_scores_mxfp4(8 * ones, ones), np.full((1, 1, 16, 16), 512.0))
    np.testing.assert_array_equal(probe_scores_mxfp4(ones, 8 * ones), np.full((1, 1, 16, 16), 512.0))


@pytest.mark.parametrize("dim", SCORE_DIMS)
def test_small_integers_give_exact_scores(machine, rng, dim):
    q, k = (rng.integers(-2, 3, (1, 1, n, dim)).astype(np.float32) for n in (48, 56))
    # Every block holds a 2, so that none of its values is rounded.
    q[..., ::32] = 2
    k[..., ::32] = -2
    want = q.astype(np.float64) @ k.astype(np.float64).swapaxes(-1, -2)
    np.testing.assert_array_equal(probe_scores_mxfp4(q, k), want)


def test_blocks_of_different_scales_keep_apart(machine, rng):
    """Each row and each block of 32 has its own power of two, so that a scale of the wrong lane shows."""
    q, k = (rng.integers(-2, 3, (1, 1, 64, 128)).astype(np.float32) for _ in range(2))
    q[..., ::32], k[..., ::32] = 2, 2
    blocks = np.arange(128) // 32
    q *= 2.0 ** ((np.arange(64)[:, None] * 3 + blocks) % 7)
    k *= 2.0 ** -((np.arange(64)[:, None] * 5 + 2 * blocks) % 5)
    want = q.astype(np.float64) @ k.astype(np.float64).swapaxes(-1, -2)
    np.testing.assert_array_equal(probe_scores_mxfp4(q, k), want)


# Attention


@pytest.mark.parametrize(
    "dim, keys, batch, heads",
    [(128, 64, 1, 1), (128, 128, 1, 1), (64, 64, 1, 1), (64, 128, 1, 1), (128, 128, 1, 4), (128, 128, 2, 4)],
)
def test_configurations_on_halves(machine, rng, dim, keys, batch, heads):
    halves = np.array([-1, -0.5, 0, 0.5, 1], np.float32)
    q, k, v = (rng.choice(halves, (batch, heads, n, dim)) for n in (64, keys, keys))
    want, _ = reference(q, k, v)
    assert_close(attention(q, k, v), want)
    assert_close(attention(q, k, v, out_dtype=np.float32), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_random_inputs_and_the_error_of_the_format(machine, rng, dtype, capsys):
    q, k, v = random_qkv(rng, 1, 2, 96, 160, 64, dtype)
    got, lse = attention(q, k, v, out_dtype=np.float32, return_lse=True)
    want, want_lse = reference(q, k, v)
    assert_close(got, want)
    assert_lse(lse, want_lse)
    plain, _ = exact_attention(q, k, v, scale=0.125)
    with capsys.disabled():
        print(f"\n{np.dtype(dtype).name}: against the unquantized inputs {ptxrt.compare(got, plain)}")
    assert ptxrt.compare(got, plain).relative_l2 < 0.25


@pytest.mark.parametrize(
    "queries, keys, causal",
    [
        *(
            (queries, keys, False)
            for queries, keys in [(1, 1), (1, 65), (7, 3), (17, 63), (65, 1), (129, 64), (130, 131)]
        ),
        *(
            (queries, keys, True)
            for queries, keys in [(1, 1), (1, 70), (64, 64), (70, 70), (33, 100), (100, 33), (140, 5), (129, 200)]
        ),
    ],
)
def test_ragged_and_causal_shapes(machine, rng, queries, keys, causal):
    q, k, v = random_qkv(rng, 1, 2, queries, keys, 32)
    want, want_lse = reference(q, k, v, causal=causal)
    got, lse = attention(q, k, v, causal=causal, return_lse=True, out_dtype=np.float32)
    assert_close(got, want)
    assert_lse(lse, want_lse)
    hidden = ~visible(queries, keys, right=0 if causal else OPEN).any(axis=1)
    assert not got[:, :, hidden].any() and (lse[:, :, hidden] == -np.inf).all()


def test_rows_without_keys_are_zero_in_bfloat16_too(machine, rng):
    q, k, v = random_qkv(rng, 1, 1, 20, 8, 32)
    got, lse = attention(q, k, v, causal=True, return_lse=True, out_dtype=BF16)
    assert got.dtype == BF16 and not got[:, :, :12].astype(np.float32).any()
    assert (lse[:, :, :12] == -np.inf).all() and np.isfinite(lse[:, :, 12:]).all()


@pytest.mark.parametrize("dim", [64, 256])
def test_large_scores_stay_finite(machine, rng, dim):
    q, k, v = random_qkv(rng, 1, 1, 40, 72, dim)
    q, k = 30 * q, 30 * k
    got, lse = attention(q, k, v, return_lse=True)
    want, want_lse = reference(q, k, v)
    assert_close(got, want)
    assert ptxrt.compare(lse, want_lse).relative_l2 < 1e-5


@pytest.mark.parametrize("scale", [0.0, 0.05, 1.0, -0.3])
def test_any_scale(machine, rng, scale):
    q, k, v = random_qkv(rng, 1, 1, 24, 40, 32)
    want, want_lse = reference(q, k, v, scale=np.float32(scale))
    got, lse = attention(q, k, v, scale=scale, out_dtype=np.float32, return_lse=True)
    assert_close(got, want)
    assert_lse(lse, want_lse)


def test_rows_grow_along_the_keys(machine):
    """Scores increase from tile to tile: every new maximum rescales the sums."""
    q = np.ones((1, 1, 16, 32), np.float32)
    k = np.repeat(np.arange(1, 201, dtype=np.float32)[:, None] / 16, 32, 1)[None, None]
    v = np.broadcast_to(np.linspace(-1, 1, 200, dtype=np.float32)[:, None], (1, 1, 200, 32))
    for keys in (k, k[:, :, ::-1]):
        want, want_lse = reference(q, keys, v)
        got, lse = attention(q, keys, v, out_dtype=np.float32, return_lse=True)
        assert_close(got, want)
        assert_lse(lse, want_lse)


ALL = dict(
    window=dict(window=(40, 5)),
    softcap=dict(softcap=2.0, causal=True),
    mask=dict(mask="mask"),
    allowed=dict(mask="allowed", window=(None, 3)),
    sinks=dict(sinks="sinks"),
    key_lengths=dict(key_lengths="key_lengths", causal=True),
    packed=dict(cu_seqlens_q="cu_q", cu_seqlens_k="cu_k", causal=True),
    together=dict(mask="mask", sinks="sinks", softcap=3.0, window=(60, 2), scale=0.3),
)


@pytest.mark.parametrize("text", ["native", "portable"])
@pytest.mark.parametrize("name", ALL)
def test_every_option(rng, name, text):
    """Grouped heads, a Dv that no tile has, and one or several options, on both texts."""
    options, batch = ALL[name], 1 if name == "packed" else 2
    q, k, v = random_qkv(rng, batch, 4, 21, 150, 60, np.float16, heads_kv=2, dim_v=44)
    given = dict(
        mask=rng.standard_normal((batch, 4, 21, 150), dtype=np.float32),
        allowed=rng.random((21, 150)) < 0.7,
        sinks=rng.standard_normal(4, dtype=np.float32),
        key_lengths=np.array([133, 70], np.int32),
        cu_q=np.array([0, 9, 9, 21], np.int32),
        cu_k=np.array([0, 70, 90, 150], np.int32),
    )
    options = {key: given[value] if isinstance(value, str) else value for key, value in options.items()}
    want, want_lse = reference(q, k, v, **options)
    with ptxrt.using("emulator", ptx=text):
        got, lse = attention(q, k, v, return_lse=True, out_dtype=np.float32, **options)
    assert_close(got, want)
    assert_lse(lse, want_lse)


@pytest.mark.parametrize("dim, dim_v", HEAD_DIMS)
def test_every_head_dimension(machine, rng, dim, dim_v):
    q, k, v = random_qkv(rng, 1, 2, 20, 100, dim, BF16, heads_kv=1, dim_v=dim_v)
    for cut in (0, 7):  # whole rows, and rows that need padding
        some = [np.ascontiguousarray(x[..., : x.shape[-1] - cut]) for x in (q, k, v)]
        assert_close(attention(*some, causal=True, out_dtype=np.float32), reference(*some, causal=True)[0])


def test_few_rows_are_split(machine, rng):
    """Many keys in several splits, merged; and unnormalized results of two halves."""
    q, k, v = random_qkv(rng, 1, 4, 2, 900, 64, heads_kv=1)
    options = dict(causal=True, sinks=rng.standard_normal(4, dtype=np.float32))
    want, want_lse = reference(q, k, v, **options)
    got, lse = attention(q, k, v, return_lse=True, out_dtype=np.float32, **options)
    assert [launch.kernel for launch in ptxrt.last_launches()][-1] == "attention_merge"
    assert_close(got, want)
    assert_lse(lse, want_lse)
    out, row_max, row_sum = attention(q, k, v, normalize=False, **options)
    assert (row_max == np.round(row_max)).all()
    assert_close(out / row_sum[..., None], want)
    halves = [attention(q, k[:, :, part], v[:, :, part], normalize=False) for part in (slice(500), slice(500, None))]
    whole, _ = ptxrt.merge([x[0] for x in halves], row_max=[x[1] for x in halves], row_sum=[x[2] for x in halves])
    assert_close(whole, reference(q, k, v)[0])


def test_layouts_and_views(machine, rng):
    """The same values in [B, S, H, D], as views, and in rows not aligned to 16 bytes give the same bits."""
    q, k, v = random_qkv(rng, 2, 2, 20, 70, 64, np.float16)
    want = attention(q, k, v)
    got = attention(*(x.swapaxes(1, 2) for x in (q, k, v)), layout="bshd")
    np.testing.assert_array_equal(got.swapaxes(1, 2), want)
    buffers = [np.zeros((*x.shape[:-1], 77), np.float16) for x in (q, k, v)]
    for buffer, x in zip(buffers, (q, k, v)):
        buffer[..., 5:69] = x
    views = [ptxrt.to_device(buffer)[..., 5:69] for buffer in buffers]
    np.testing.assert_array_equal(attention(*views).to_numpy(), want)


def test_a_kernel_takes_rows_at_any_address(machine, rng):
    """The kernel itself on rows not aligned to 16 bytes, where it loads every element separately."""
    q, k, v = (
        ptxrt.to_device(np.pad(x, [(0, 0)] * 3 + [(3, 2)]))[..., 3:67] for x in random_qkv(rng, 1, 1, 20, 70, 64)
    )
    options = dict(scale=0.125, left=OPEN, right=0, sequences=1, splits=1)
    got = attention_mxfp4_bf16_in_kernel(q[:, :, None], k, v, out_f32=True, **options)
    assert_close(got.to_numpy()[:, :, 0], reference(*(x.to_numpy() for x in (q, k, v)), causal=True)[0])


def test_types_may_differ(machine, rng):
    q, k, v = random_qkv(rng, 1, 1, 20, 70, 64)
    mixed = q, k.astype(np.float16), v.astype(BF16)
    got = attention(*mixed)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, attention(*(x.astype(np.float32) for x in mixed)))


def test_values_of_any_size(machine, rng):
    """Sums of values near both ends of bfloat16 have the usual relative error."""
    q, k, v = random_qkv(rng, 1, 1, 20, 200, 64)
    want, _ = reference(q, k, v)
    for power in (-112, -60, 60, 120):
        factor = np.float32(2.0**power)
        got = attention(q, k, np.asarray(v.astype(BF16), np.float32) * factor, out_dtype=np.float32)
        assert_close(got.astype(np.float64) / np.float64(factor), want)


# NaN


def test_what_lies_behind_the_last_key_cannot_matter(machine, rng):
    """The second head's memory follows the first one's: its NaN must not reach the first."""
    q, k, v = random_qkv(rng, 1, 2, 20, 37, 32)
    want, _ = reference(q, k, v)
    k[:, 1], v[:, 1] = np.nan, np.nan
    got = attention(q, k, v, out_dtype=np.float32)
    assert_close(got[:, 0], want[:, 0])
    assert np.isnan(got[:, 1]).all()


def test_nan_and_infinity_propagate(machine, rng):
    q, k, v = random_qkv(rng, 1, 1, 70, 70, 32)
    for special in (np.nan, np.inf):
        spoiled = q.copy()
        spoiled[0, 0, 5, 3] = special
        got, lse = attention(spoiled, k, v, return_lse=True, out_dtype=np.float32)
        assert np.isnan(got[0, 0, 5]).all() and np.isnan(lse[0, 0, 5])
        assert np.isfinite(np.delete(got, 5, axis=2)).all()
        spoiled = k.copy()
        spoiled[0, 0, 9, 3] = special
        got, lse = attention(q, spoiled, v, return_lse=True)
        assert np.isnan(got.astype(np.float32)).all() and np.isnan(lse).all()
    spoiled = v.copy()
    spoiled[0, 0, 9, 3] = np.nan
    got = attention(q, k, spoiled, out_dtype=np.float32)
    assert np.isnan(got[..., 3]).all() and np.isfinite(np.delete(got, 3, axis=3)).all()


def test_a_key_that_the_mask_hides_may_be_nan(machine, rng):
    q, k, v = random_qkv(rng, 1, 1, 70, 70, 32)
    want, _ = reference(q, k, v, causal=True)
    k[0, 0, 69] = np.nan
    got = attention(q, k, v, causal=True, out_dtype=np.float32)
    assert_close(got[:, :, :69], want[:, :, :69])
    assert np.isnan(got[:, :, 69]).all()


# Outputs and errors


def test_out_decides_the_dtype_and_is_returned(machine, rng):
    q, k, v = random_qkv(rng, 1, 1, 16, 16, 32)
    for dtype in (np.float32, BF16):
        out = np.empty((1, 1, 16, 32), dtype)
        assert attention(q, k, v, out=out) is out
        assert_close(out, reference(q, k, v)[0])


def test_device_arrays_give_device_arrays(machine, rng):
    q, k, v = random_qkv(rng, 1, 2, 16, 24, 32)
    got, lse = attention(*map(ptxrt.to_device, (q, k, v)), return_lse=True)
    assert isinstance(got, ptxrt.DeviceArray) and isinstance(lse, ptxrt.DeviceArray)
    want, want_lse = reference(q, k, v)
    assert_close(got.to_numpy(), want)
    assert_lse(lse.to_numpy(), want_lse)


def test_what_it_lacks_is_named_with_what_has_it(emulator, rng):
    q, k, v = random_qkv(rng, 1, 2, 16, 24, 64)
    for call, words in [
        (lambda: attention(q, k, v, smooth_k=True), "has no smooth_k; nearest: qk='mxfp4', pv='bf16'"),
        (lambda: attention(q, k, v, smooth_q=True), "has no smooth_q; nearest: qk='mxfp4', pv='bf16'"),
        (
            lambda: attention(q, k, v, pv="bf17"),
            "no kernel for qk='mxfp4', pv='bf17', quantize='in_kernel'; nearest: qk='mxfp4', pv='bf16'",
        ),
        (lambda: attention(q, ptxrt.quantize_operand(k, "mxfp4", role="k"), v), "takes k as an array"),
    ]:
        with pytest.raises(ptxrt.ArgumentError, match=words):
            call()


def test_an_empty_batch_gives_an_empty_result(emulator):
    x = np.zeros((0, 2, 16, 32), np.float32)
    out, lse = attention(x, x, x, return_lse=True)
    assert out.shape == (0, 2, 16, 32) and lse.shape == (0, 2, 16)


# Shared memory


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("dim", [64, 128])
def test_no_bank_conflicts(rng, dim, dtype):
    """The native text, with whole and ragged tiles: each access to shared memory takes the fewest passes that its width
    allows.

    Wider keys have two words of scales per row, which take two passes in every 4-bit format.
    """
    with ptxrt.using("emulator", bank_conflicts=True) as backend:
        attention(*random_qkv(rng, 1, 1, 70, 150, dim, dtype), causal=True, return_lse=True)
        entry = ptxrt.last_launches()[-1].entry
        counted = backend.emulator.bank_conflicts[f"attention_mxfp4_bf16_in_kernel_dim{dim}_dim_v{dim}.ptx"]
    assert counted[entry] == {}
