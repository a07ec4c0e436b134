"""Kernels of the first read of operands (means, global scales), and of the score terms that smoothing removes."""

import numpy as np

from ..accuracy import Tolerance
from ..declaration import In, Out, Scalar, loose, unaligned
from ..formats import bf16, f16, f32, i32
from ..kernel import kernel
from ..sequences import ends_of, first_units, sequences_axis, sequences_of, starts_of, unit_of_each, units_axis

# Keys that a block of `scan_keys` reads.
SCAN_RUN = 256
# Consecutive queries that share a mean.
SMOOTH_QUERIES = 64

_SUMS = Tolerance("float32 sums of up to 256 values, in another order", relative_l2=3e-7)
_SIZES = [(1, 8), (300, 64), (256, 128), (513, 256), (70, 20), (40, 300)]
_CASES = [
    *(dict(batch=1, heads=2, keys=keys, cols=cols, sums=True, largest=True) for keys, cols in _SIZES),
    dict(batch=3, sequences=3, heads=2, keys=270, cols=96, key_ends=True, sums=True, largest=True),
    dict(batch=1, sequences=3, heads=2, keys=900, cols=24, key_starts=True, key_ends=True, sums=True, largest=True),
    dict(batch=2, heads=1, keys=70, cols=40, sums=True),
    *(dict(batch=2, heads=1, keys=70, cols=cols, largest=True) for cols in (40, 41)),
]


def _key_ends(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    """Examples of key_ends, from none to all keys; for packed sequences without gaps."""
    if axes["sequences"] != axes["batch"]:
        return ends_of("keys")(rng, member, shape, axes)
    return np.linspace(0, axes["keys"], shape[0]).astype(np.int32)


def _rows_with_garbage(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    """Examples of keys: a few of the last are not finite; sums keep them, magnitudes skip them."""
    x = rng.standard_normal(shape).astype(np.float32)
    x[:, 0, -1, 0], x[:, 0, -1, -1] = np.nan, np.inf
    return x.astype(member.dtype)


@kernel(
    grid="runs heads batch",
    derived=dict(sequences=sequences_axis, runs=units_axis(SCAN_RUN)),
    cases=_CASES,
    tolerance=dict(sums=_SUMS),
    draw=dict(key_starts=starts_of("keys"), key_ends=_key_ends, x=_rows_with_garbage),
)
def scan_keys(
    x: In[f32 | f16 | bf16, "batch heads keys cols", loose],
    key_starts: In[i32, "sequences", unaligned] = None,
    key_ends: In[i32, "sequences", unaligned] = None,
    sums: Out[f32, "runs batch heads cols"] = None,
    largest: Out[f32, "runs batch heads"] = None,
):
    """Sum the keys of each head over runs of 256 and find their largest finite magnitude; keys from key_ends on are
    left out.

    Sums are float32 in a fixed order. `largest` is 0 if the keys of a run have no finite value. Packed sequences: with
    key_starts, sequence i is keys key_starts[i] to key_ends[i] of a batch of one. Its first run has number
    floor(key_starts[i] / 256) + i, so that its sums are those of a separate call. `mean_keys` finishes, or
    `operand_scale` without sums.
    """
    runs = next(len(y) for y in (sums, largest) if y is not None)
    whole = np.zeros((*x.shape[:2], runs * SCAN_RUN, x.shape[3]))
    starts = np.zeros(len(x), np.int32) if key_starts is None else key_starts
    rows = starts if key_starts is None else first_units(starts, SCAN_RUN) * SCAN_RUN
    for i, (start, row) in enumerate(zip(starts, rows)):
        batch, end = i if key_starts is None else 0, x.shape[2] if key_ends is None else min(key_ends[i], x.shape[2])
        whole[batch, :, row : row + end - start] = x[batch, :, start:end]
    whole = np.moveaxis(whole.reshape(*x.shape[:2], runs, SCAN_RUN, x.shape[3]), 2, 0)
    if sums is not None:
        with np.errstate(invalid="ignore"):
            sums[:] = whole.sum(axis=3)
    if largest is not None:
        largest[:] = np.where(np.isfinite(whole), np.abs(whole), 0).max(axis=(3, 4))


def _magnitudes(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    """Examples of largest magnitudes."""
    return (np.abs(rng.standard_normal(shape)) * 1e3).astype(np.float32)


@kernel(grid="1", cases=[dict(count=1, factor=1.0), dict(count=700, factor=2.0)], draw=dict(largest=_magnitudes))
def operand_scale(largest: In[f32, "count"], *, global_scale: Out[f32, "1"], factor: Scalar[f32] = 1.0):
    """Compute the smallest scale 2**n / 6 for which factor * max(largest) <= 448 * 6 * scale; 1 if largest is 0.

    Another n gives the same codes, as long as scales are neither subnormal nor saturated: the codes of an item do not
    depend on the rest of its batch. If the largest value of a block is a power of two, it is exact, as code 6.
    """
    global_scale[:] = _scale_of(largest, factor)


def _scale_of(largest: np.ndarray, factor: float) -> np.floating:
    """Return the global scale that `operand_scale` computes."""
    quotient = np.float32(largest.max(initial=0)) / np.float32(448) * np.float32(factor)
    mantissa, exponent = np.frexp(np.maximum(quotient, np.float32(2.0**-123)))
    return np.ldexp(np.float32(1 / 6), exponent - (mantissa == 0.5)) if largest.any() else np.float32(1)


@kernel(
    grid="heads*cols sequences",
    derived=dict(sequences=sequences_axis),
    cases=[
        dict(runs=1, batch=1, heads=1, cols=5, keys=7),
        dict(runs=19, batch=2, heads=3, cols=40, keys=4800),
        dict(runs=2, batch=3, sequences=3, heads=2, cols=32, keys=270, key_ends=True),
        dict(runs=33, batch=1, sequences=3, heads=2, cols=20, keys=7900, key_starts=True, key_ends=True),
        dict(runs=130, batch=1, heads=3, cols=40, keys=33000, largest=True, global_scale=True, factor=2.0),
        dict(runs=1, batch=2, heads=1, cols=8, keys=9, global_scale=True),
    ],
    tolerance=dict(mean=Tolerance("float32 sums of few values, in another order", relative_l2=3e-7)),
    draw=dict(
        largest=_magnitudes,
        key_starts=lambda rng, member, shape, axes: (np.arange(shape[0]) ** 2 * 800).astype(np.int32),
        key_ends=lambda rng, member, shape, axes: (
            np.arange(shape[0]) ** 2 * 1800 + 400 if axes["batch"] == 1 else np.arange(shape[0]) * 100
        ).astype(np.int32),
    ),
)
def mean_keys(
    sums: In[f32, "runs batch heads cols"],
    key_starts: In[i32, "sequences", unaligned] = None,
    key_ends: In[i32, "sequences", unaligned] = None,
    largest: In[f32, "runs batch heads"] = None,
    *,
    mean: Out[f32, "sequences heads cols"],
    global_scale: Out[f32, "1"] = None,
    keys: Scalar[i32],
    factor: Scalar[f32] = 1.0,
):
    """Compute the mean of the keys of each head from their sums over runs; keys from key_ends on do not count.

    The mean of no keys is 0. Sums are float32 in a fixed order. Packed sequences are as in `scan_keys`. `global_scale`
    is the result of `operand_scale` for `largest` and `factor`, in the same launch; 1 if `largest` is omitted.
    """
    if global_scale is not None:
        global_scale[:] = 1 if largest is None else _scale_of(largest, factor)
    starts = np.zeros(len(mean), np.int32) if key_starts is None else key_starts
    counts = np.maximum((keys if key_ends is None else np.minimum(key_ends, keys)) - starts, 0)
    for i, count in enumerate(counts):
        its = sums[:, i] if key_starts is None else sums[first_units(starts, SCAN_RUN)[i] :][: -(-count // SCAN_RUN), 0]
        mean[i] = its.sum(axis=0, dtype=np.float64) / max(count, 1) if count else 0


@kernel(
    grid="blocks heads batch",
    derived=dict(sequences=sequences_axis, blocks=units_axis(SMOOTH_QUERIES, "queries")),
    cases=[
        *(
            dict(batch=2, heads=2, queries=queries, cols=cols, sequences=2, blocks=-(-queries // SMOOTH_QUERIES))
            for queries, cols in ((1, 8), (64, 64), (130, 128), (70, 20), (65, 300))
        ),
        dict(batch=1, heads=2, queries=330, cols=24, sequences=4, blocks=9, query_starts=True, query_ends=True),
    ],
    tolerance=Tolerance("float32 sums of up to 64 values, in another order", relative_l2=3e-7),
    draw=dict(query_starts=starts_of("queries"), query_ends=ends_of("queries")),
)
def less_block_means(
    x: In[f32 | f16 | bf16, "batch heads queries cols", loose],
    query_starts: In[i32, "sequences", unaligned] = None,
    query_ends: In[i32, "sequences", unaligned] = None,
    *,
    mean: Out[f32, "batch heads blocks cols"],
    y: Out[f32, "batch heads queries cols"],
):
    """Subtract from the queries of each head the mean of their block of 64; the last block may have fewer.

    Sums are float32 in a fixed order, divided once; y is the float32 difference. Packed sequences: with query_starts,
    sequence i is queries query_starts[i] to query_ends[i] of a batch of one. Its first block has number
    floor(query_starts[i] / 64) + i. The mean of a block without queries is 0.
    """
    blocks = unit_of_each(query_starts, x.shape[2], SMOOTH_QUERIES)
    for block in range(mean.shape[2]):
        rows = blocks == block
        mean[:, :, block] = x[:, :, rows].mean(axis=2, dtype=np.float64) if rows.any() else 0
        y[:, :, rows] = x[:, :, rows].astype(np.float64) - mean[:, :, block, None]


@kernel(
    grid="queries heads_kv batch",
    derived=dict(sequences=sequences_axis),
    cases=[
        *(
            dict(batch=2, sequences=2, heads_kv=3, group=2, queries=37, cols=cols, scale=0.5)
            for cols in (8, 64, 128, 256, 20)
        ),
        dict(batch=1, sequences=1, heads_kv=1, group=1, queries=1, cols=1, scale=-1.0),
        dict(batch=1, sequences=5, heads_kv=2, group=2, queries=45, cols=40, scale=0.5, query_starts=True),
    ],
    tolerance=Tolerance("float32 sums in another order; terms of both signs cancel", absolute=2e-5),
    draw=dict(query_starts=starts_of("queries")),
)
def row_dot(
    q: In[f32 | f16 | bf16, "batch heads_kv group queries cols", loose],
    y: In[f32, "sequences heads_kv cols"],
    query_starts: In[i32, "sequences", unaligned] = None,
    *,
    out: Out[f32, "batch heads_kv group queries"],
    scale: Scalar[f32] = 1.0,
):
    """Compute scale q.y for each row of q and the vector y of its head.

    If y is the mean that was subtracted from the keys, this is what all scores of the row lack. With query_starts, rows
    of packed sequences in a batch of one use the vector of their sequence.
    """
    y = (
        y[:, :, None, None]
        if query_starts is None
        else y[sequences_of(query_starts, q.shape[3])].transpose(1, 0, 2)[None, :, None]
    )
    out[:] = np.float64(scale) * (q.astype(np.float64) * y.astype(np.float64)).sum(axis=-1)


def _means(axes) -> int:
    """The axis `means`: batch items if `mean` has an entry for each, else sequences."""
    return axes["batch"] if axes["means"] == axes["batch"] else axes["sequences"]


@kernel(
    grid="keys heads batch",
    derived=dict(sequences=sequences_axis, means=_means),
    cases=[
        dict(batch=2, means=2, sequences=2, heads=3, keys=5, width=64, blocks=1, cols=50, run=5),
        dict(batch=1, means=1, sequences=1, heads=1, keys=1, width=256, blocks=1, cols=256, run=1),
        dict(batch=2, means=2, sequences=2, heads=2, keys=70, width=32, blocks=2, cols=32, run=64),
        dict(batch=1, means=3, sequences=3, heads=2, keys=7, width=40, blocks=1, cols=33, run=7, key_starts=True),
        dict(batch=1, means=1, sequences=4, heads=2, keys=50, width=8, blocks=10, cols=8, run=8, key_starts=True),
    ],
    draw=dict(key_starts=starts_of("keys")),
)
def add_mean(
    x: In[f32, "batch heads keys width", loose],
    mean: In[f32, "means heads blocks cols"],
    key_starts: In[i32, "sequences", unaligned] = None,
    *,
    y: Out[f32, "batch heads keys cols"],
    run: Scalar[i32],
):
    """Add to the first `cols` values of each row the vector of its run of `run` rows, in float32; there are `blocks`
    vectors.

    With key_starts, rows of packed sequences in a batch of one use the vectors of their sequence. `means` has one
    vector for each sequence, or, with one entry for all, vectors of units of `run` rows: those of sequence i start at
    number floor(key_starts[i] / run) + i.
    """
    rows = np.arange(y.shape[2])
    if key_starts is None:
        added = mean[:, :, rows // run]
    elif len(mean) < len(key_starts):
        added = mean[:, :, unit_of_each(key_starts, len(rows), run)]
    else:
        sequences = sequences_of(key_starts, len(rows))
        added = mean[sequences, :, (rows - key_starts[sequences]) // run].transpose(1, 0, 2)[None]
    y[:] = x[..., : y.shape[-1]] + added
