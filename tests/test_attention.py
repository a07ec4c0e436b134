"""Attention on every machine: exact scores, the known configurations, masks, ragged sizes, errors."""

import ml_dtypes
import numpy as np
import pytest

import ptxrt
from ptxrt.ops.attention import DIMS, attention_mxfp4_bf16, exact_attention, visible, visible_pairs
from ptxrt.ops.probes import probe_scores_mxfp4

BF16 = ml_dtypes.bfloat16
DTYPES = [np.float32, np.float16, BF16]


def reference(q, k, v, **options):
    """Float64 attention of the dequantized Q and K and of V rounded to bfloat16, and its lse."""
    options = {"scale": q.shape[-1] ** -0.5, "causal": False, **options}
    want = attention_mxfp4_bf16.reference(q, k, v, out_f32=True, lse=True, **options)
    return want["out_f32"], want["lse"]


def assert_close(got, want):
    """The project's tolerance for attention, from the declaration."""
    output = "out_f32" if got.dtype == np.float32 else "out_bf16"
    comparison = ptxrt.compare(got, want)
    missed = attention_mxfp4_bf16.tolerance(output).misses(comparison)
    assert not missed, f"{', '.join(missed)}; {comparison}"


def assert_lse(got, want):
    assert got.dtype == np.float32
    missed = attention_mxfp4_bf16.tolerance("lse").misses(ptxrt.compare(got, want))
    assert not missed, missed


def random_qkv(rng, batch, heads, queries, keys, dim, dtype=np.float32):
    return tuple(rng.standard_normal((batch, heads, n, dim), dtype=np.float32).astype(dtype) for n in (queries, keys, keys))


# Scores


def test_identities_give_the_identity(machine):
    eye = np.eye(64, dtype=np.float32)[None, None]
    np.testing.assert_array_equal(probe_scores_mxfp4(eye, eye)[0, 0], np.eye(64))


@pytest.mark.parametrize("value, want", [(1.0, 32.0), (2.0, 128.0), (6.0, 36 * 32.0)])
def test_constant_inputs_give_constant_scores(machine, value, want):
    x = np.full((1, 1, 16, 32), value, np.float32)
    np.testing.assert_array_equal(probe_scores_mxfp4(x, x), np.full((1, 1, 16, 16), want))


def test_scales_multiply_on_both_sides(machine):
    ones = np.ones((1, 1, 16, 32), np.float32)
    np.testing.assert_array_equal(probe_scores_mxfp4(8 * ones, ones), np.full((1, 1, 16, 16), 256.0))
    np.testing.assert_array_equal(probe_scores_mxfp4(ones, 8 * ones), np.full((1, 1, 16, 16), 256.0))


@pytest.mark.parametrize("dim", DIMS)
def test_small_integers_give_exact_scores(machine, rng, dim):
    q, k = (rng.integers(-2, 3, (1, 1, n, dim)).astype(np.float32) for n in (48, 56))
    # Every block holds a 2, so that none of its values is rounded.
    q[..., ::32] = 2
    k[..., ::32] = -2
    want = q.astype(np.float64) @ k.astype(np.float64).swapaxes(-1, -2)
    np.testing.assert_array_equal(probe_scores_mxfp4(q, k), want)


def test_blocks_of_different_scales_keep_apart(machine, rng):
    """Each row and each block of 32 has its own power of two: a scale of the wrong lane shows."""
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
    assert_close(ptxrt.attention(q, k, v), want)
    assert_close(ptxrt.attention(q, k, v, out_dtype=np.float32), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_random_inputs_and_the_error_of_the_format(machine, rng, dtype, capsys):
    q, k, v = random_qkv(rng, 1, 2, 96, 160, 64, dtype)
    got, lse = ptxrt.attention(q, k, v, out_dtype=np.float32, return_lse=True)
    want, want_lse = reference(q, k, v)
    assert_close(got, want)
    assert_lse(lse, want_lse)
    plain, _ = exact_attention(q, k, v, 0.125, False)
    with capsys.disabled():
        print(f"\n{np.dtype(dtype).name}: against the unquantized inputs {ptxrt.compare(got, plain)}")
    assert ptxrt.compare(got, plain).relative_l2 < 0.25


@pytest.mark.parametrize(
    "queries, keys, causal",
    [
        *((queries, keys, False) for queries, keys in [(1, 1), (1, 65), (7, 3), (17, 63), (65, 1), (129, 64), (130, 131)]),
        *((queries, keys, True) for queries, keys in [(1, 1), (1, 70), (64, 64), (70, 70), (33, 100), (100, 33), (140, 5), (129, 200)]),
    ],
)
def test_ragged_and_causal_shapes(machine, rng, queries, keys, causal):
    q, k, v = random_qkv(rng, 1, 2, queries, keys, 32)
    want, want_lse = reference(q, k, v, causal=causal)
    got, lse = ptxrt.attention(q, k, v, causal=causal, return_lse=True, out_dtype=np.float32)
    assert_close(got, want)
    assert_lse(lse, want_lse)
    hidden = ~visible(queries, keys, causal).any(axis=1)
    assert not got[:, :, hidden].any() and (lse[:, :, hidden] == -np.inf).all()


def test_rows_without_keys_are_zero_in_bfloat16_too(machine, rng):
    q, k, v = random_qkv(rng, 1, 1, 20, 8, 32)
    got, lse = ptxrt.attention(q, k, v, causal=True, return_lse=True)
    assert got.dtype == BF16 and not got[:, :, :12].astype(np.float32).any()
    assert (lse[:, :, :12] == -np.inf).all() and np.isfinite(lse[:, :, 12:]).all()


@pytest.mark.parametrize("dim", DIMS)
def test_large_scores_stay_finite(machine, rng, dim):
    q, k, v = random_qkv(rng, 1, 1, 40, 72, dim)
    q, k = 30 * q, 30 * k
    got, lse = ptxrt.attention(q, k, v, return_lse=True)
    want, want_lse = reference(q, k, v)
    assert_close(got, want)
    assert ptxrt.compare(lse, want_lse).relative_l2 < 1e-5


@pytest.mark.parametrize("scale", [0.0, 0.05, 1.0, -0.3])
def test_any_scale(machine, rng, scale):
    q, k, v = random_qkv(rng, 1, 1, 24, 40, 32)
    want, want_lse = reference(q, k, v, scale=np.float32(scale))
    got, lse = ptxrt.attention(q, k, v, scale=scale, out_dtype=np.float32, return_lse=True)
    assert_close(got, want)
    assert_lse(lse, want_lse)


def test_rows_grow_along_the_keys(machine):
    """Scores that rise from tile to tile: every new maximum rescales what was summed."""
    q = np.ones((1, 1, 16, 32), np.float32)
    k = np.repeat(np.arange(1, 201, dtype=np.float32)[:, None] / 16, 32, 1)[None, None]
    v = np.broadcast_to(np.linspace(-1, 1, 200, dtype=np.float32)[:, None], (1, 1, 200, 32))
    for keys in (k, k[:, :, ::-1]):
        want, want_lse = reference(q, keys, v)
        got, lse = ptxrt.attention(q, keys, v, out_dtype=np.float32, return_lse=True)
        assert_close(got, want)
        assert_lse(lse, want_lse)


# NaN


def test_what_lies_behind_the_last_key_cannot_matter(machine, rng):
    """The second head starts where the first one ends: its NaN stay its own."""
    q, k, v = random_qkv(rng, 1, 2, 20, 37, 32)
    want, _ = reference(q, k, v)
    k[:, 1], v[:, 1] = np.nan, np.nan
    got = ptxrt.attention(q, k, v, out_dtype=np.float32)
    assert_close(got[:, 0], want[:, 0])
    assert np.isnan(got[:, 1]).all()


def test_nan_and_infinity_propagate(machine, rng):
    q, k, v = random_qkv(rng, 1, 1, 70, 70, 32)
    for special in (np.nan, np.inf):
        spoiled = q.copy()
        spoiled[0, 0, 5, 3] = special
        got, lse = ptxrt.attention(spoiled, k, v, return_lse=True, out_dtype=np.float32)
        assert np.isnan(got[0, 0, 5]).all() and np.isnan(lse[0, 0, 5])
        assert np.isfinite(np.delete(got, 5, axis=2)).all()
        spoiled = k.copy()
        spoiled[0, 0, 9, 3] = special
        got, lse = ptxrt.attention(q, spoiled, v, return_lse=True)
        assert np.isnan(got.astype(np.float32)).all() and np.isnan(lse).all()
    spoiled = v.copy()
    spoiled[0, 0, 9, 3] = np.nan
    got = ptxrt.attention(q, k, spoiled, out_dtype=np.float32)
    assert np.isnan(got[..., 3]).all() and np.isfinite(np.delete(got, 3, axis=3)).all()


def test_a_key_that_the_mask_hides_may_be_nan(machine, rng):
    q, k, v = random_qkv(rng, 1, 1, 70, 70, 32)
    want, _ = reference(q, k, v, causal=True)
    k[0, 0, 69] = np.nan
    got = ptxrt.attention(q, k, v, causal=True, out_dtype=np.float32)
    assert_close(got[:, :, :69], want[:, :, :69])
    assert np.isnan(got[:, :, 69]).all()


# Outputs and errors


def test_out_decides_the_dtype_and_is_returned(machine, rng):
    q, k, v = random_qkv(rng, 1, 1, 16, 16, 32)
    for dtype in (np.float32, BF16):
        out = np.empty((1, 1, 16, 32), dtype)
        assert ptxrt.attention(q, k, v, out=out) is out
        assert_close(out, reference(q, k, v)[0])


def test_device_arrays_give_device_arrays(machine, rng):
    q, k, v = random_qkv(rng, 1, 2, 16, 24, 32)
    got, lse = ptxrt.attention(*map(ptxrt.to_device, (q, k, v)), return_lse=True)
    assert isinstance(got, ptxrt.DeviceArray) and isinstance(lse, ptxrt.DeviceArray)
    want, want_lse = reference(q, k, v)
    assert_close(got.to_numpy(), want)
    assert_lse(lse.to_numpy(), want_lse)


def test_wrong_calls_say_what_to_do(emulator, rng):
    q, k, v = random_qkv(rng, 1, 2, 16, 24, 64)
    for call, words in [
        (lambda: ptxrt.attention(q, k, v, qk="nvfp4"), "no kernel for qk='nvfp4'.*there is qk='mxfp4', pv='bf16', quantize='in_kernel'"),
        (lambda: ptxrt.attention(q, k, v, pv=["bf16"]), "no kernel for"),
        (lambda: ptxrt.attention(q, k, v, scale=float("nan")), "scale is nan"),
        (lambda: ptxrt.attention(q, k, v, scale=float("inf")), "scale is inf"),
        (lambda: ptxrt.attention(q, k, v, scale="1"), "scale is '1'"),
        (lambda: ptxrt.attention(q, k, v, scale=10**400), "scale is 1000"),
        (lambda: ptxrt.attention(q, k, v, scale=1e300), "scale is 1e\\+300"),
        (lambda: ptxrt.attention(q, k, v, out_dtype=np.float16), "bfloat16 or float32"),
        (lambda: ptxrt.attention(q, k, v, out_dtype="nothing"), "bfloat16 or float32"),
        (lambda: ptxrt.attention(q, k, v, out=np.empty(q.shape, np.float32), out_dtype=BF16), "out has the dtype asked for"),
        (lambda: ptxrt.attention(q, k, v, out=q.astype(np.float64)), "bfloat16 or float32"),
        (lambda: ptxrt.attention(q, k, v, out=[0]), "out is a list"),
        (lambda: ptxrt.attention(q, k, v, out=np.empty((1, 2, 16, 32), np.float32)), r"out_f32 has shape \[1, 2, 16, 32\], not \[1, 2, 16, 64\]"),
        (lambda: ptxrt.attention(q[0], k, v), "q has shape .*3 dimensions where 4 are needed"),
        (lambda: ptxrt.attention(q, k[..., :32], v), r"k has shape .*dimension 3 \(dim\) must be 64, since dim is 64 in q"),
        (lambda: ptxrt.attention(q, k, v[:, :, :20]), "must be 24, since keys is 24 in k"),
        (lambda: ptxrt.attention(q, k[:, :1], v), "must be 2, since heads is 2 in q"),
        (lambda: ptxrt.attention(q, k.astype(np.float16), v), "k is float16, but q is float32"),
        (lambda: ptxrt.attention(*(x[..., :48] for x in (q, k, v))), "dim is 48 in q; compiled for 32, 64, .*Nearest: pad it with zeros to 64"),
        (lambda: ptxrt.attention(*(np.zeros((1, 1, 4, 288), np.float32) for _ in range(3))), "Nearest: the largest is 256"),
        (lambda: ptxrt.attention(q, k[:, :, :0], v[:, :, :0]), "keys is 0 in k, but the result is not empty"),
        (lambda: ptxrt.attention(q.astype(np.float64), k, v), "q is float64"),
        (lambda: ptxrt.attention(q, None, v), "k is object|k is"),
    ]:
        with pytest.raises(ptxrt.ArgumentError, match=words):
            call()


def test_an_empty_batch_gives_an_empty_result(emulator):
    x = np.zeros((0, 2, 16, 32), np.float32)
    out, lse = ptxrt.attention(x, x, x, return_lse=True)
    assert out.shape == (0, 2, 16, 32) and lse.shape == (0, 2, 16)


# The reference


def test_visible_pairs_are_counted():
    for queries in range(1, 9):
        for keys in range(1, 9):
            for causal in (False, True):
                assert visible_pairs(queries, keys, causal) == visible(queries, keys, causal).sum()


def test_the_reference_agrees_with_a_plain_loop(rng):
    q, k, v = (x.astype(np.float64) for x in random_qkv(rng, 1, 1, 5, 4, 3))
    out, lse = exact_attention(q, k, v, 0.7, True)
    for i in range(5):
        seen = [j for j in range(4) if j <= i + 4 - 5]
        weights = [np.exp(0.7 * (q[0, 0, i] @ k[0, 0, j])) for j in seen]
        want = sum((w * v[0, 0, j] for w, j in zip(weights, seen)), np.zeros(3)) / (sum(weights) or 1)
        np.testing.assert_allclose(out[0, 0, i], want, rtol=1e-12, atol=1e-300)
        np.testing.assert_allclose(lse[0, 0, i], np.log(sum(weights)) if seen else -np.inf, rtol=1e-12)


# Shared memory


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
def test_no_bank_conflicts(rng, dim, dtype):
    """The native text, with whole and ragged tiles: every access to shared memory takes as few passes as its width allows."""
    with ptxrt.using("emulator", bank_conflicts=True) as backend:
        ptxrt.attention(*random_qkv(rng, 1, 1, 130, 150, dim, dtype), causal=True, return_lse=True)
        entry = ptxrt.last_launches()[-1].entry
        counted = backend.emulator.bank_conflicts[f"attention_mxfp4_bf16_dim{dim}.ptx"]
    assert counted[entry] == {}
