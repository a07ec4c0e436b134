"""The kernels of what a first read of operands finds, means and global scales, and of what smoothing takes from scores."""

import numpy as np

from ..accuracy import Tolerance
from ..formats import bf16, f16, f32, i32
from ..kernel import In, Out, Scalar, kernel, loose, unaligned

# Keys that a block of `scan_keys` reads.
SCAN_RUN = 256
# Neighbouring queries that share a mean.
SMOOTH_QUERIES = 64

_SUMS = Tolerance("float32 sums of up to 256 values, in another order", relative_l2=3e-7)
_SIZES = [(1, 8), (300, 64), (256, 128), (513, 256), (70, 20), (40, 300)]
_CASES = [
    *(dict(batch=1, heads=2, keys=keys, cols=cols, sums=True, largest=True) for keys, cols in _SIZES),
    dict(batch=3, heads=2, keys=270, cols=96, key_ends=True, sums=True, largest=True),
    dict(batch=2, heads=1, keys=70, cols=40, sums=True),
    dict(batch=2, heads=1, keys=70, cols=40, largest=True),
]


def _key_ends(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    """Examples of where the keys of batches end: from none to all."""
    return np.linspace(0, axes["keys"], shape[0]).astype(np.int32)


def _rows_with_garbage(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    """Examples of keys: a few of the last are not finite, which sums take over and magnitudes pass by."""
    x = rng.standard_normal(shape).astype(np.float32)
    x[:, 0, -1, 0], x[:, 0, -1, -1] = np.nan, np.inf
    return x.astype(member.dtype)


@kernel(
    grid="runs heads batch",
    derived=dict(runs=lambda axes: -(-axes["keys"] // SCAN_RUN)),
    cases=_CASES,
    tolerance=dict(sums=_SUMS),
    draw=dict(key_ends=_key_ends, x=_rows_with_garbage),
)
def scan_keys(
    x: In[f32 | f16 | bf16, "batch heads keys cols", loose],
    key_ends: In[i32, "batch", unaligned] = None,
    sums: Out[f32, "runs batch heads cols"] = None,
    largest: Out[f32, "runs batch heads"] = None,
):
    """Sum the keys of each head over runs of 256, and find their largest finite magnitude; keys from key_ends on are left out.

    Sums are float32 in a fixed order; where the keys of a run have no finite value, `largest` is 0.
    `mean_keys` and `operand_scale` finish.
    """
    runs = next(len(y) for y in (sums, largest) if y is not None)
    whole = np.zeros((*x.shape[:2], runs * SCAN_RUN, x.shape[3]))
    for i, end in enumerate(key_ends if key_ends is not None else [x.shape[2]] * len(x)):
        whole[i, :, : min(end, x.shape[2])] = x[i, :, : min(end, x.shape[2])]
    whole = np.moveaxis(whole.reshape(*x.shape[:2], runs, SCAN_RUN, x.shape[3]), 2, 0)
    if sums is not None:
        with np.errstate(invalid="ignore"):
            sums[:] = whole.sum(axis=3)
    if largest is not None:
        largest[:] = np.where(np.isfinite(whole), np.abs(whole), 0).max(axis=(3, 4))


@kernel(grid="1", cases=[dict(count=1, factor=1.0), dict(count=700, factor=2.0)], draw=dict(largest=lambda rng, member, shape, axes: (np.abs(rng.standard_normal(shape)) * 1e3).astype(np.float32)))
def operand_scale(largest: In[f32, "count"], *, global_scale: Out[f32, "1"], factor: Scalar[f32] = 1.0):
    """Give the smallest 2**n / 6 under which `factor` times the largest magnitude fits NVFP4, is at most 448 * 6; 1 for 0.

    Under another n codes are the same, as long as scales are neither subnormal nor saturated: what a batch is
    quantized to does not depend on the rest of it. A block whose largest value is a power of two has it exactly, as code 6.
    """
    quotient = np.float32(largest.max(initial=0)) / np.float32(448) * np.float32(factor)
    mantissa, exponent = np.frexp(np.maximum(quotient, np.float32(2.0**-123)))
    global_scale[:] = np.ldexp(np.float32(1 / 6), exponent - (mantissa == 0.5)) if largest.any() else 1


@kernel(
    grid="heads*cols batch",
    cases=[dict(runs=1, batch=1, heads=1, cols=5, keys=7), dict(runs=19, batch=2, heads=3, cols=40, keys=4800), dict(runs=2, batch=3, heads=2, cols=32, keys=270, key_ends=True)],
    tolerance=Tolerance("float32 sums of few values, in another order", relative_l2=3e-7),
    draw=dict(key_ends=lambda rng, member, shape, axes: (np.arange(shape[0]) * 100).astype(np.int32)),
)
def mean_keys(
    sums: In[f32, "runs batch heads cols"],
    key_ends: In[i32, "batch", unaligned] = None,
    *,
    mean: Out[f32, "batch heads cols"],
    keys: Scalar[i32],
):
    """Give the mean of the keys of each head from their sums over runs: over `keys`, or key_ends where that is less.

    0 where there are no keys. Sums are float32 in a fixed order.
    """
    count = np.full(mean.shape[0], keys) if key_ends is None else np.minimum(key_ends, keys)
    mean[:] = np.where(count > 0, sums.sum(axis=0, dtype=np.float64).T / np.maximum(count, 1), 0).T


@kernel(
    grid="blocks heads batch",
    derived=dict(blocks=lambda axes: -(-axes["queries"] // SMOOTH_QUERIES)),
    cases=[
        dict(batch=2, heads=2, queries=queries, cols=cols, blocks=-(-queries // SMOOTH_QUERIES))
        for queries, cols in ((1, 8), (64, 64), (130, 128), (70, 20), (65, 300))
    ],
    tolerance=Tolerance("float32 sums of up to 64 values, in another order", relative_l2=3e-7),
)
def less_block_means(
    x: In[f32 | f16 | bf16, "batch heads queries cols", loose],
    *,
    mean: Out[f32, "batch heads blocks cols"],
    y: Out[f32, "batch heads queries cols"],
):
    """Take from the queries of each head the mean of their block of 64; the last block has those that are left.

    Sums are float32 in a fixed order, divided once; y is the float32 difference.
    """
    for block in range(mean.shape[2]):
        rows = slice(block * SMOOTH_QUERIES, (block + 1) * SMOOTH_QUERIES)
        mean[:, :, block] = x[:, :, rows].mean(axis=2, dtype=np.float64)
        y[:, :, rows] = x[:, :, rows].astype(np.float64) - mean[:, :, block, None]


@kernel(
    grid="group*queries heads_kv batch",
    cases=[
        *(dict(batch=2, heads_kv=3, group=2, queries=37, cols=cols, scale=0.5) for cols in (8, 64, 128, 256, 20)),
        dict(batch=1, heads_kv=1, group=1, queries=1, cols=1, scale=-1.0),
    ],
    tolerance=Tolerance("float32 sums in another order; terms of both signs cancel", absolute=2e-5),
)
def row_dot(
    q: In[f32 | f16 | bf16, "batch heads_kv group queries cols", loose],
    y: In[f32, "batch heads_kv cols"],
    *,
    out: Out[f32, "batch heads_kv group queries"],
    scale: Scalar[f32] = 1.0,
):
    """Give scale q.y of each row of q with the vector of its head.

    With y the mean that was taken from the keys, that is what all scores of the row lack.
    """
    out[:] = np.float64(scale) * np.einsum("bhgqc,bhc->bhgq", q.astype(np.float64), y.astype(np.float64))


@kernel(
    grid="keys heads batch",
    cases=[
        dict(batch=2, heads=3, keys=5, width=64, blocks=1, cols=50, run=5),
        dict(batch=1, heads=1, keys=1, width=256, blocks=1, cols=256, run=1),
        dict(batch=2, heads=2, keys=70, width=32, blocks=2, cols=32, run=64),
    ],
)
def add_mean(
    x: In[f32, "batch heads keys width", loose],
    mean: In[f32, "batch heads blocks cols"],
    *,
    y: Out[f32, "batch heads keys cols"],
    run: Scalar[i32],
):
    """Add to the first `cols` of each row the vector of its run of `run` rows, in float32; `blocks` vectors are there for all."""
    y[:] = x[..., : y.shape[-1]] + np.repeat(mean, run, axis=2)[:, :, : y.shape[2]]
