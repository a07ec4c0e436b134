"""Declarations of the kernels that take rows of a table, average rows, and find the largest value of each row."""

import numpy as np

from ..accuracy import Tolerance
from ..declaration import In, Out, Scalar, in_parts, loose, unaligned
from ..formats import bf16, f16, f32, i32, u8
from ..kernel import kernel
from .gemm_kernels import example_levels
from .produce_kernels import derived_blocks, ending_case, share_blocks, write


def _example_ids(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    """Examples of ids, some outside the table."""
    return rng.integers(-1, axes["entries"] + 1, shape).astype(np.int32)


@kernel(
    grid="blocks",
    derived=derived_blocks(share_blocks),
    cases=[
        ending_case(7, 100, entries=5, out_f32=True),
        ending_case(40, 72, entries=90, out_bf16=True),
        ending_case(3, 1, entries=1, out_f16=True),
        ending_case(70, 96, "mxfp8", 1, entries=9),
        ending_case(5, 40, "mxfp4", entries=9, rule=3),
        ending_case(130, 48, "nvfp4", 1, entries=30, out_global=True),
        # Threads that have several shares in turn: rows with and without whole chunks, and whole rows.
        *(
            ending_case(rows, cols, out_f32=True, entries=30, blocks=1, format="bf16")
            for rows, cols in ((70, 40), (70, 61), (130, 32))
        ),
    ],
    draw=dict(ids=_example_ids, out_global=example_levels),
)
def take_rows(
    table: In[f32 | f16 | bf16, "entries cols", in_parts(loose)],
    ids: In[i32, "rows", unaligned],
    out_global: In[f32, "level_count", unaligned] = None,
    out_f32: Out[f32, "rows cols", loose] = None,
    out_f16: Out[f16, "rows cols", loose] = None,
    out_bf16: Out[bf16, "rows cols", loose] = None,
    codes: Out[u8, "rows code_bytes"] = None,
    scales: Out[u8, "scale_bytes"] = None,
    *,
    ending: Scalar[i32, 0, 1, 2, 3] = 0,
    rule: Scalar[i32, 0, 1, 2, 3] = 0,
    swizzled: Scalar[i32, 0, 1] = 0,
):
    """Copy row ids[i] of the table for every i; zeros for an id that is negative or past the end.

    Values are rounded once, to nearest, ties to even, to the type of the output among out_f32, out_f16 and out_bf16. Or
    they are quantized with the bytes of `quantize` of the float32 values: ending 1 mxfp8, 2 mxfp4, 3 nvfp4 under
    `out_global` (1 if missing), by the rule of that number, scales in 128x4 tiles if `swizzled`. A row that ends within
    a block is padded with zeros.
    """
    inside = (ids >= 0) & (ids < len(table))
    y = np.zeros((len(ids), table.shape[1]))
    y[inside] = table[ids[inside]]
    outputs = dict(out_f32=out_f32, out_f16=out_f16, out_bf16=out_bf16, codes=codes, scales=scales)
    write(y, outputs, dict(ending=ending, rule=rule, swizzled=swizzled, out_global=out_global))


def _example_starts(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    """Examples of starts: from 0 to all rows, with some empty sequences."""
    inner = np.sort(rng.integers(0, axes["tokens"] + 1, shape[0] - 2))
    return np.array([0, *inner, axes["tokens"]], np.int32)


def _mean_case(tokens: int, cols: int, sequences: int, **rest) -> dict:
    return dict(tokens=tokens, cols=cols, sequences=sequences, bounds=sequences + 1, **rest)


@kernel(
    grid="sequences",
    derived=dict(sequences=lambda axes: axes["bounds"] - 1),
    cases=[
        _mean_case(40, 72, 4, out_f32=True, normalize=1),
        _mean_case(9, 1, 3, out_f32=True),
        _mean_case(7, 2100, 2, out_f32=True, normalize=1, format="bf16"),
        _mean_case(70, 130, 3, out_f16=True, format="f16"),
        _mean_case(12, 384, 2, out_bf16=True, normalize=1, format="f32"),
    ],
    tolerance=dict(
        out_f32=Tolerance("float32 sums", relative_l2=4e-7),
        out_f16=Tolerance("rounded to float16", relative_l2=5e-4),
        out_bf16=Tolerance("rounded to bfloat16", relative_l2=3e-3),
    ),
    draw=dict(starts=_example_starts),
)
def mean_rows(
    x: In[f32 | f16 | bf16, "tokens cols", loose],
    starts: In[i32, "bounds", unaligned],
    out_f32: Out[f32, "sequences cols", loose] = None,
    out_f16: Out[f16, "sequences cols", loose] = None,
    out_bf16: Out[bf16, "sequences cols", loose] = None,
    *,
    normalize: Scalar[i32, 0, 1] = 0,
):
    """Average the rows starts[i] to before starts[i + 1] of x for every i; `normalize` divides by the mean's length.

    The mean of no rows, or of length 0, is zeros. Rows beyond the array do not count. Sums are float32 in an order that
    depends on `cols` and the number of rows: a result's bits depend on no other sequence. With `normalize` a mean whose
    sum of squares overflows float32, or is 0, becomes zeros. NaN and infinities make their column NaN or infinite. With
    `normalize` a NaN makes its row NaN; an infinity becomes NaN and the rest of its row zeros. Values are rounded once,
    to nearest, ties to even, to the type of the output among out_f32, out_f16 and out_bf16.
    """
    y = np.zeros((len(starts) - 1, x.shape[1]))
    with np.errstate(invalid="ignore", over="ignore"):
        for i, row in enumerate(y):
            rows = x[max(int(starts[i]), 0) : max(int(starts[i + 1]), 0)].astype(np.float64)
            if len(rows):
                row[:] = rows.mean(axis=0)
            length = np.sqrt((row**2).sum()) if normalize else 1.0
            row[:] = row / length if length != 0 else 0.0
    write(y, dict(out_f32=out_f32, out_f16=out_f16, out_bf16=out_bf16, codes=None), {})


def _example_rows(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    """Rows in which several values are the largest, alternately without and with NaN."""
    x = rng.integers(-5, 3, shape).astype(member.dtype)
    x[1::3, shape[1] * 2 // 3 :: 2] = np.nan
    return x


@kernel(
    grid="rows",
    cases=[
        dict(rows=4, cols=100),
        dict(rows=3, cols=1),
        dict(rows=2, cols=17003),
        dict(rows=2, cols=17008, format="f32"),
    ],
    draw=dict(x=_example_rows),
)
def argmax_rows(x: In[f32 | f16 | bf16, "rows cols", loose], places: Out[i32, "rows", unaligned]):
    """Find the column of the largest value of each row: the first of equal ones, or the first NaN if there is one."""
    places[:] = np.argmax(x.astype(np.float32), axis=1)
