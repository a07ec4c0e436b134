"""The kernels of smoothing: the mean of the keys, and what subtracting it takes from the scores of each query."""

import numpy as np

from ..accuracy import Tolerance
from ..formats import bf16, f16, f32, i32
from ..kernel import In, Out, Scalar, kernel, loose, unaligned

# Keys that a block of `sum_keys` sums.
SUM_RUN = 256

_SUMS = Tolerance("float32 sums of up to 256 values, in another order", relative_l2=3e-7)
_CASES = [
    *(dict(batch=1, heads=2, keys=keys, cols=cols) for keys, cols in [(1, 8), (300, 64), (256, 128), (513, 256), (70, 20), (40, 300)]),
    dict(batch=3, heads=2, keys=270, cols=96, key_ends=True),
]


def _key_ends(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    """Examples of where the keys of batches end: from none to all."""
    return np.linspace(0, axes["keys"], shape[0]).astype(np.int32)


@kernel(grid="runs heads batch", derived=dict(runs=lambda axes: -(-axes["keys"] // SUM_RUN)), cases=_CASES, tolerance=_SUMS, draw=dict(key_ends=_key_ends))
def sum_keys(
    x: In[f32 | f16 | bf16, "batch heads keys cols", loose],
    key_ends: In[i32, "batch", unaligned] = None,
    *,
    partial: Out[f32, "runs batch heads cols"],
):
    """Sum the keys of each head over runs of 256; keys from key_ends of their batch on are left out.

    Sums are float32 in a fixed order. `mean_keys` finishes.
    """
    whole = np.zeros((*x.shape[:2], partial.shape[0] * SUM_RUN, x.shape[3]))
    for i, end in enumerate(key_ends if key_ends is not None else [x.shape[2]] * len(x)):
        whole[i, :, : min(end, x.shape[2])] = x[i, :, : min(end, x.shape[2])]
    partial[:] = np.moveaxis(whole.reshape(*x.shape[:2], -1, SUM_RUN, x.shape[3]).sum(axis=3), 2, 0)


@kernel(
    grid="heads*cols batch",
    cases=[dict(runs=1, batch=1, heads=1, cols=5, keys=7), dict(runs=19, batch=2, heads=3, cols=40, keys=4800), dict(runs=2, batch=3, heads=2, cols=32, keys=270, key_ends=True)],
    tolerance=Tolerance("float32 sums of few values, in another order", relative_l2=3e-7),
    draw=dict(key_ends=lambda rng, member, shape, axes: (np.arange(shape[0]) * 100).astype(np.int32)),
)
def mean_keys(
    partial: In[f32, "runs batch heads cols"],
    key_ends: In[i32, "batch", unaligned] = None,
    *,
    mean: Out[f32, "batch heads cols"],
    keys: Scalar[i32],
):
    """Give the mean of the keys of each head from their sums over runs: over `keys`, or key_ends where that is less.

    0 where there are no keys. Sums are float32 in a fixed order.
    """
    count = np.full(mean.shape[0], keys) if key_ends is None else np.minimum(key_ends, keys)
    mean[:] = np.where(count > 0, partial.sum(axis=0, dtype=np.float64).T / np.maximum(count, 1), 0).T


@kernel(
    grid="group*queries heads_kv batch",
    cases=[
        *(dict(batch=2, heads_kv=3, group=2, queries=37, cols=cols, scale=0.5) for cols in (8, 64, 128, 256, 20)),
        dict(batch=1, heads_kv=1, group=1, queries=1, cols=1, scale=-1.0, add=True),
        dict(batch=1, heads_kv=2, group=4, queries=9, cols=96, scale=0.1, add=True),
    ],
    tolerance=Tolerance("float32 sums in another order; terms of both signs cancel", absolute=2e-5),
    draw=dict(add=lambda rng, member, shape, axes: np.where(rng.random(shape) < 0.2, -np.inf, rng.standard_normal(shape)).astype(np.float32)),
)
def row_dot(
    q: In[f32 | f16 | bf16, "batch heads_kv group queries cols", loose],
    y: In[f32, "batch heads_kv cols"],
    add: In[f32, "batch heads_kv group queries"] = None,
    *,
    out: Out[f32, "batch heads_kv group queries"],
    scale: Scalar[f32] = 1.0,
):
    """Give scale q.y of each row of q with the vector of its head, plus `add` where that is given; -inf stays.

    With y the mean that was taken from the keys and add the log-sum-exp of the scores that are left, that of all scores.
    """
    dots = np.float64(scale) * np.einsum("bhgqc,bhc->bhgq", q.astype(np.float64), y.astype(np.float64))
    out[:] = dots if add is None else np.where(add == -np.inf, add, add + dots)
