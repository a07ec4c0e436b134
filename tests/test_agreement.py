"""The portable build on a GPU against the emulator, which runs the text that it was assembled from, with sums in tensor
core arithmetic.

Codes, scales and scores are bit-identical; only results of approximate functions may differ.
"""

import ml_dtypes
import numpy as np
import pytest

import ptxrt
from ptxrt.blocks import BLOCK_FORMATS
from ptxrt.ops.attention_kernels import OPEN, attention_mxfp4_bf16_in_kernel
from ptxrt.ops.probes import SCORE_DIMS, probe_scores_mxfp4
from ptxrt.ops.quantizers import DEQUANTIZE, QUANTIZE

pytestmark = pytest.mark.gpu
DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]


@pytest.fixture
def both(on_machine):
    """Call a function on the GPU and on the emulator; return both results."""

    def call(function):
        with on_machine("portable"):
            on_gpu = function()
        with ptxrt.using("emulator", ptx="portable", arithmetic="hardware"):
            return on_gpu, function()

    return call


def wide_values(rng, shape, dtype):
    """Values over many binades, with zeros, subnormals, a NaN and an infinity."""
    x = rng.standard_normal(shape).astype(np.float32) * np.exp2(
        rng.integers(-30, 14, shape[:-1] + (1,)), dtype=np.float32
    )
    x[0, ::3] = -0.0
    x[1] = 0
    x[2] *= np.float32(2.0**-110)
    x[3, 5], x[4, 40] = np.nan, np.inf
    with np.errstate(over="ignore"):
        return x.astype(dtype)


@pytest.mark.parametrize(
    "f, rule", [(f, rule) for f in BLOCK_FORMATS.values() for rule in range(len(f.rules))], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantizer_bytes(both, rng, f, rule, dtype):
    x = wide_values(rng, (150, 1056), dtype)
    level = (np.float32([0.01]),) if f.two_level else ()
    for on_gpu, emulated in zip(*both(lambda: QUANTIZE[f.name](x, *level, rule=rule))):
        np.testing.assert_array_equal(on_gpu, emulated)


@pytest.mark.parametrize("f", BLOCK_FORMATS.values(), ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantizer_bits(both, rng, f, dtype):
    codes = rng.integers(0, 256, (256, 1024 * f.bits // 8), np.uint8)
    scales = rng.integers(0, 256, (256, 1024 // f.block), np.uint8)
    level = (np.float32([0.01]),) if f.two_level else ()
    on_gpu, emulated = both(lambda: DEQUANTIZE[f.name](codes, scales, *level, dtype=dtype))
    np.testing.assert_array_equal(on_gpu.view(np.uint8), emulated.view(np.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", SCORE_DIMS)
def test_score_bits(both, rng, dim, dtype):
    q, k = (rng.standard_normal((1, 2, n, dim), dtype=np.float32) for n in (150, 170))
    q *= np.exp2(rng.integers(-6, 7, (1, 2, 150, 1)), dtype=np.float32)
    k[..., :32] *= np.exp2(rng.integers(-6, 7, (1, 2, 170, 1)), dtype=np.float32)
    on_gpu, emulated = both(lambda: probe_scores_mxfp4(q.astype(dtype), k.astype(dtype)))
    np.testing.assert_array_equal(on_gpu.view(np.uint32), emulated.view(np.uint32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "dim, queries, keys, causal",
    [(32, 256, 256, True), (64, 70, 333, False), (128, 200, 150, True), (256, 130, 100, False)],
)
def test_attention(both, rng, dim, queries, keys, causal, dtype):
    q, k, v = (rng.standard_normal((1, 2, n, dim), dtype=np.float32).astype(dtype) for n in (queries, keys, keys))
    options = dict(scale=dim**-0.5, left=OPEN, right=0 if causal else OPEN, sequences=1, splits=1)
    (on_gpu, its_lse), (emulated, lse) = both(
        lambda: attention_mxfp4_bf16_in_kernel(q[:, :, None], k, v, out_f32=True, lse=True, **options)
    )
    assert ptxrt.compare(on_gpu, emulated).relative_l2 <= 1e-3
    # A weight may round to the other neighboring bfloat16: the weighted mean of |v| bounds the effect.
    magnitude = attention_mxfp4_bf16_in_kernel.reference(q[:, :, None], k, np.abs(v), out_f32=True, **options)[
        "out_f32"
    ]
    assert (np.abs(on_gpu.astype(np.float64) - emulated) <= 2.0**-7 * magnitude).all()
    seen = np.isfinite(lse)
    np.testing.assert_array_equal(seen, np.isfinite(its_lse))
    np.testing.assert_allclose(its_lse[seen], lse[seen], rtol=0, atol=2e-6 * np.maximum(1, np.abs(lse[seen])).max())


CACHES = ["bf16", "f16", "mxfp8", "mxfp4", "nvfp4"]


@pytest.mark.parametrize("format", CACHES)
def test_cache_bytes(both, rng, format):
    """What `append` writes to pages, and what `read` makes of it."""
    k, v = (wide_values(rng, (176, 2 * 96), ml_dtypes.bfloat16).reshape(176, 2, 96) for _ in range(2))
    slots = rng.permutation(176)

    def call():
        cache = ptxrt.KVCache(11, 16, 2, 96, format=format)
        cache.append(k, v, slots)
        read = cache.read(np.arange(11, dtype=np.int32)[None], np.int32([176]))
        return [np.asarray(x.to_numpy()) for x in cache.arrays.values() if x is not None], [np.asarray(x) for x in read]

    (its_pages, its_values), (pages, values) = both(call)
    for got, want in zip([*its_pages, *its_values], [*pages, *values], strict=True):
        np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


@pytest.mark.parametrize("dim", [64, 128])
# attention_one, attention_few, and on expanded pages attention_bf16 and attention_adjusted
@pytest.mark.parametrize("queries, levels", [(1, 1.0), (6, 1.0), (40, 1.0), (40, (0.75, 1.5))], ids=str)
@pytest.mark.parametrize("format", CACHES)
def test_attention_on_pages(both, rng, format, queries, levels, dim):
    k, v = (rng.standard_normal((700, 2, dim), dtype=np.float32).astype(ml_dtypes.bfloat16) for _ in range(2))
    q = rng.standard_normal((1, 8, queries, dim), dtype=np.float32).astype(ml_dtypes.bfloat16)

    def call():
        cache = ptxrt.KVCache(44, 16, 2, dim, format=format, k_global=levels)
        cache.append(k, v, np.arange(700))
        table = np.arange(44, dtype=np.int32)[None]
        return ptxrt.attention_paged(q, cache, table, np.int32([700]), return_lse=True, out_dtype=np.float32)

    (on_gpu, its_lse), (emulated, lse) = both(call)
    assert ptxrt.compare(on_gpu, emulated).relative_l2 <= 1e-3
    np.testing.assert_allclose(its_lse, lse, rtol=0, atol=2e-6 * np.abs(lse).max())
