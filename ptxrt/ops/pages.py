"""Declarations of the kernels that copy or expand rows of pages, and of the one that finds slots."""

import numpy as np

from ..blocks import BLOCK_FORMATS
from ..declaration import In, InOut, Out, Scalar, in_parts, loose, strided, unaligned
from ..formats import bf16, f16, f32, i32, i64, u8, u32
from ..kernel import kernel

# Formats of rows of pages, indexed by the kernels' scalars.
ROW_FORMATS = ("plain", "mxfp8", "mxfp4", "nvfp4")


def holds_of(format: str) -> int:
    """Return the number of a row format in kernels."""
    return ROW_FORMATS.index(format) if format in ROW_FORMATS else 0


def _pages(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    return rng.permutation(axes["pages"])[: shape[0]].astype(np.int32)


@kernel(
    grid="count",
    cases=[dict(count=3, pages=9, heads=2, page=5, width=width, counts=width == 64) for width in (64, 4, 6)],
    draw=dict(
        counts=lambda rng, member, shape, axes: np.arange(shape[0], dtype=np.int32) * 4,
        sources=lambda rng, member, shape, axes: np.arange(shape[0], dtype=np.int32),
        targets=lambda rng, member, shape, axes: np.arange(
            axes["pages"] - 1, axes["pages"] - 1 - shape[0], -1, dtype=np.int32
        ),
    ),
)
def copy_rows(
    sources: In[i32, "count", unaligned],
    targets: In[i32, "count", unaligned],
    counts: In[i32, "count", unaligned] = None,
    *,
    rows: InOut[u8, "pages heads page width", loose],
):
    """Copy page sources[i] to page targets[i] for every i: the whole page, or its first counts[i] rows.

    No page is a target twice, and no page is both a source and a target."""
    for i, (source, target) in enumerate(zip(sources, targets)):
        last = rows.shape[2] if counts is None else int(counts[i])
        rows[target, :, :last] = rows[source, :, :last]


@kernel(
    grid="sequences*keys heads",
    cases=[dict(sequences=2, table=4, pages=9, heads=2, page=5, keys=17, width=width) for width in (64, 4, 6)],
    draw=dict(
        block_table=lambda rng, member, shape, axes: rng.integers(0, axes["pages"], shape, dtype=np.int32),
        key_ends=lambda rng, member, shape, axes: np.array([axes["keys"], 7], np.int32)[: shape[0]],
    ),
)
def unpack_pages(
    rows: In[u8, "pages heads page width", in_parts(loose)],
    block_table: In[i32, "sequences table", loose],
    key_ends: In[i32, "sequences", unaligned],
    out: Out[u8, "sequences heads keys width"],
):
    """Copy the rows of sequences out of pages, one after the other: key j of sequence s is row j % page of page
    block_table[s, j // page].

    Rows from key_ends[s] on are zeros; their pages are not read.
    """
    out[:] = 0
    for sequence, end in enumerate(key_ends):
        for key in range(min(int(end), out.shape[2])):
            out[sequence, :, key] = rows[block_table[sequence, key // rows.shape[2]], :, key % rows.shape[2]]


@kernel(
    grid="tokens",
    cases=[dict(tokens=1, sequences=1, table=1, page=1), dict(tokens=200, sequences=3, table=5, page=16)],
    draw=dict(
        sequence_ids=lambda rng, member, shape, axes: rng.integers(-1, axes["sequences"] + 1, shape, dtype=np.int32),
        positions=lambda rng, member, shape, axes: rng.integers(-3, axes["table"] * 16 + 3, shape, dtype=np.int32),
    ),
)
def find_slots(
    block_table: In[i32, "sequences table", loose],
    sequence_ids: In[i32, "tokens", unaligned],
    positions: In[i32, "tokens", unaligned],
    slots: Out[i64, "tokens"],
    *,
    page: Scalar[i32],
):
    """Give the slot of each token: position p of sequence s has the slot block_table[s, p // page] page + p % page.

    The slot is -1 if the sequence or the position is outside the table, or if its page there is negative.
    """
    for token, (sequence, place) in enumerate(zip(sequence_ids, positions)):
        inside = 0 <= sequence < block_table.shape[0] and 0 <= place < block_table.shape[1] * page
        number = int(block_table[sequence, place // page]) if inside else -1
        slots[token] = number * int(page) + int(place) % int(page) if number >= 0 else -1


def _rows(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    """Examples of bytes that are finite in every format."""
    return rng.integers(0, 0x40, shape, dtype=np.uint8)


def _spoiled(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    """Examples of bytes, a few of which, more in the first columns, are infinities and NaN in bfloat16, float16 or
    e4m3."""
    codes = _rows(rng, member, shape, axes)
    pairs = codes.view("<u2")
    chosen = rng.random(pairs.shape) < np.where(np.arange(pairs.shape[-1]) < 4, 0.3, 0.002)
    pairs[chosen] = rng.choice(np.uint16([0x7F80, 0xFF80, 0x7FC0, 0x7C00, 0xFC00, 0x7E00]), chosen.sum())
    return codes


def _expanded(**sizes) -> dict:
    """A declared case."""
    return dict(dict(pages=9, heads=2, page=5, sequences=2, table=4, keys=17), **sizes)


def _decoded(holds: int, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the values of rows of codes."""
    block = BLOCK_FORMATS[ROW_FORMATS[holds]]
    return block.decode(codes, scales, *([1.0] if block.two_level else []))


@kernel(
    grid="keys sequences heads",
    cases=[
        _expanded(width=128, dim=64, holds=0),
        _expanded(width=96, blocks=3, dim=96, holds=1, scales=True, starts=True, ends=True, cleared=True),
        _expanded(width=80, blocks=5, dim=160, holds=2, scales=True),
        _expanded(width=128, dim=64, holds=0, marks=True),
        _expanded(width=32, blocks=4, dim=64, holds=3, scales=True, starts=True, ends=True),
    ],
    derived=dict(blocks=lambda axes: axes.get("blocks", 0) or 1),
    draw=dict(
        codes=_spoiled,
        marks=lambda rng, member, shape, axes: np.array([[0, 2], [2, 0]], np.uint32),
        scales=lambda rng, member, shape, axes: rng.integers(0x70, 0x7F, shape, dtype=np.uint8),
        block_table=lambda rng, member, shape, axes: rng.integers(0, axes["pages"], shape, dtype=np.int32),
        key_ends=lambda rng, member, shape, axes: np.array([axes["keys"] + 3, 7], np.int32)[: shape[0]],
    ),
)
def expand_pages(
    codes: In[u8, "pages heads page width", in_parts(strided)],
    scales: In[u8, "pages heads page blocks", in_parts(loose)] = None,
    *,
    block_table: In[i32, "sequences table", loose],
    key_ends: In[i32, "sequences", unaligned],
    out: InOut[bf16 | f16, "heads sequences keys dim"],
    starts: Out[i32, "sequences"] = None,
    ends: Out[i32, "sequences"] = None,
    cleared: Out[u32, "heads sequences"] = None,
    marks: InOut[u32, "heads sequences"] = None,
    holds: Scalar[i32, 0, 1, 2, 3],
):
    """Expand the rows of sequences to 16 bits, one after the other: codes times scales, rounded if out cannot represent
    them.

    holds: 0 for 16-bit rows, which are copied, 1 for mxfp8, 2 for mxfp4, 3 for nvfp4. Rows of out from key_ends of
    their sequence on are not written. starts, ends: the bounds of each sequence's keys among sequences * keys rows.
    cleared becomes 0. With marks, infinities and NaN become 0 in out, and the marks of their heads and sequences get
    bit 0.
    """
    if cleared is not None:
        cleared[:] = 0
    for sequence, end in enumerate(key_ends):
        end = min(int(end), out.shape[2])
        for key in range(end):
            at = block_table[sequence, key // codes.shape[2]], slice(None), key % codes.shape[2]
            if holds == 0:
                out[:, sequence, key] = codes[at].view(out.dtype)
                continue
            out[:, sequence, key] = _decoded(holds, codes[at], scales[at])
        if marks is not None:
            bad = ~np.isfinite(out[:, sequence, :end].astype(np.float32))
            out[:, sequence, :end][bad] = 0
            marks[:, sequence] |= bad.any(axis=(1, 2))
        if starts is not None:
            starts[sequence], ends[sequence] = sequence * out.shape[2], sequence * out.shape[2] + end


_SHARES = (0.6, 0.38, 0.01, 0.01)


def _nonfinite(width, dim_v, holds, **sizes) -> dict:
    """A declared case."""
    sizes = dict(pages=9, heads_kv=2, page=5, sequences=2, table=4, batch=2, group=3, queries=40) | sizes
    return dict(dict(keys=17, left=2**31 - 1, right=0), **sizes, width=width, dim_v=dim_v, holds=holds)


@kernel(
    grid="queries heads_kv sequences",
    cases=[
        _nonfinite(128, 64, 0, is_f16=0, out_bf16=True),
        _nonfinite(128, 64, 0, is_f16=1, out_f16=True, left=5, right=3),
        _nonfinite(
            96, 96, 1, blocks=3, scales=True, is_f16=0, out_f32=True, batch=1, query_starts=True, query_ends=True
        ),
        _nonfinite(32, 64, 3, blocks=4, scales=True, is_f16=1, out_f32=True, group=1),
    ],
    derived=dict(blocks=lambda axes: axes.get("blocks", 0) or 1),
    draw=dict(
        codes=_spoiled,
        scales=lambda rng, member, shape, axes: rng.choice(np.uint8([0x70, 0x78, 0x7F, 0xFF]), shape, p=_SHARES),
        block_table=lambda rng, member, shape, axes: rng.integers(0, axes["pages"], shape, dtype=np.int32),
        key_ends=lambda rng, member, shape, axes: np.array([20, 7], np.int32),
        marks=lambda rng, member, shape, axes: np.arange(np.prod(shape), dtype=np.uint32).reshape(shape) % 4,
        query_starts=lambda rng, member, shape, axes: np.array([0, 3], np.int32),
        query_ends=lambda rng, member, shape, axes: np.array([3, axes["queries"] - 1], np.int32),
    ),
)
def add_nonfinite(
    codes: In[u8, "pages heads_kv page width", in_parts(strided)],
    scales: In[u8, "pages heads_kv page blocks", in_parts(loose)] = None,
    *,
    block_table: In[i32, "sequences table", loose],
    key_ends: In[i32, "sequences", unaligned],
    marks: In[u32, "heads_kv sequences"],
    query_starts: In[i32, "sequences", unaligned] = None,
    query_ends: In[i32, "sequences", unaligned] = None,
    out_bf16: InOut[bf16, "batch heads_kv group queries dim_v", strided] = None,
    out_f16: InOut[f16, "batch heads_kv group queries dim_v", strided] = None,
    out_f32: InOut[f32, "batch heads_kv group queries dim_v", strided] = None,
    holds: Scalar[i32, 0, 1, 2, 3],
    is_f16: Scalar[i32, 0, 1],
    keys: Scalar[i32],
    left: Scalar[i32],
    right: Scalar[i32],
):
    """Add infinities and NaN of values in pages to attention of the same values with zeros in their place.

    An output element gets the values of its column that are not finite, of the keys that its query sees: it becomes
    NaN, or an infinity if all have its sign and it was not NaN before. Other elements are not written. holds: as in
    `expand_pages`. is_f16: 1 where values are float16, 0 where they are bfloat16. marks: heads and sequences with a
    mark of 0 are left out. Windows and packed sequences are those of `attention_bf16`; each sequence has at most `keys`
    keys.
    """
    (out,) = (x for x in (out_bf16, out_f16, out_f32) if x is not None)
    element = np.float16 if is_f16 else bf16.dtype
    for head, sequence in zip(*np.nonzero(marks)):
        end = min(int(key_ends[sequence]), int(keys))
        begin, stop = 0, out.shape[3]
        if query_starts is not None:
            begin, stop = int(query_starts[sequence]), int(query_ends[sequence])
        places = [(block_table[sequence, key // codes.shape[2]], head, key % codes.shape[2]) for key in range(end)]
        with np.errstate(over="ignore"):
            values = (
                np.array(
                    [codes[at].view(element) if holds == 0 else _decoded(holds, codes[at], scales[at]) for at in places]
                )
                .astype(element)
                .astype(np.float32)[:, : out.shape[4]]
            )
        bad = np.where(np.isfinite(values), np.float32(0), values)
        for query in range(stop - begin):
            at = end - (stop - begin) + query
            with np.errstate(invalid="ignore"):
                total = bad[max(at - int(left), 0) : max(min(at + int(right) + 1, end), 0)].sum(axis=0)
            spoiled = ~np.isfinite(total)
            of_query = out[0 if query_starts is not None else sequence, head, :, begin + query]
            with np.errstate(invalid="ignore"):
                of_query[:, spoiled] = of_query[:, spoiled].astype(np.float32) + total[spoiled]
