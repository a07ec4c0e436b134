"""The declaration of attention for few queries, on pages, arrays and tiles in any format, and its float64 reference."""

import numpy as np

from ..accuracy import Tolerance
from ..array import DeviceArray
from ..blocks import BLOCK_FORMATS
from ..declaration import Axis, In, InOut, Out, Scalar, in_parts, loose, strided, unaligned
from ..formats import bf16, f16, f32, i32, u8
from ..kernel import kernel
from ..sequences import ends_of, first_units, starts_of
from ..tiles import TILE_DIMS, TILE_KEYS, tile_layout, tiles_of
from .attention_kernels import LOG2_E, OPEN, ROW_SUMS, attention_merge, exact_sums, example_factors
from .pages import ROW_FORMATS
from .place import is_loadable

# Compiled head dimensions (of Q and K, of V); others are padded with zeros.
FEW_DIMS = ((64, 64), (128, 128), (256, 256))
# The largest head dimension for which 16-bit keys or values combine with a block format.
MIXED_DIM = 128
# Keys of a node, the part of a sequence whose sums are stored separately.
NODE_KEYS = 1024
# Keys of a chunk, the part of a node that a warp computes, or a block of `attention_one` where blocks are few.
CHUNK_KEYS = 256
# Sequences with at most this many queries use this kernel.
FEW_QUERIES = 16
# Rows of a block: queries of the heads that share a head of keys. Blocks of eight rows keep half as many sums.
BLOCK_ROWS = 8, 16
# The head dimensions of `attention_one`, and the most rows of one head of keys for which calls take it.
ONE_DIMS = 64, 128
ONE_ROWS = 8
# The most nodes of one merge, and of a row whose blocks merge them themselves.
MOST_NODES, FINISHED_NODES = 4096, 16
# The most rows for whose blocks a cache has counters. Calls with more have few splits or none.
ARRIVALS = 8192

_PARTIAL = Tolerance(
    "weights are rounded to 16 bits before the second product", relative_l2=2.5e-3, cosine=0.99999, gain=1e-3
)


def nodes_of(keys: int, node_keys: int = NODE_KEYS) -> int:
    """The number of nodes of so many keys, at least one."""
    return max(-(-keys // node_keys), 1)


def splits_of_nodes(
    nodes: int, blocks: int, multiprocessors: int, requested: int | None = None, resident: int = 2
) -> int:
    """Return into how many parts the nodes are split: `requested`, at most, or else enough to fill the device. A part
    takes `blocks` blocks and has every so-many-th node. resident: blocks that a multiprocessor holds.
    """
    if requested is None:
        # As many as the device holds, if they all start at once and none has much more to do than the average.
        requested = resident * multiprocessors // max(blocks, 1)
        run = -(-nodes // max(min(requested, nodes), 1))
        longest = run * -(-blocks * -(-nodes // run) // multiprocessors)
        if not requested or 10 * longest * multiprocessors > 11 * nodes * blocks:
            requested = -(-8 * multiprocessors // max(blocks, 1))  # else eight, which hide starts and ends
    return -(-nodes // -(-nodes // max(min(requested, nodes), 1)))


def takes_chunks(chunks: int, blocks: int, multiprocessors: int, held: int) -> bool:
    """Return whether `attention_one` gives each chunk of the keys a block of its own.

    There must be a multiprocessor for each block, or half of one in formats of less than 16 bits. blocks: the blocks of
    one chunk. held: the format, as in `attention_one`.
    """
    return 1 < chunks <= FINISHED_NODES and blocks * chunks <= (1 if held == 1 else 2) * multiprocessors


def writes_outputs(nodes: int, target: DeviceArray) -> bool:
    """Return whether `attention_few` itself can write a call's outputs: with few nodes, to rows that it can store."""
    return nodes <= FINISHED_NODES and is_loadable(target)


def _values(codes, scales, holds: int, tile: int, role: str, dim: int, dtype) -> np.ndarray:
    """Decode rows to [pages, heads, page, dim], or tiles to [batch, heads, 64 tiles, dim]."""
    format = ROW_FORMATS[holds]
    if tile:
        return tile_layout("bf16" if format == "plain" else format, role, tile).decode(codes)[..., :dim]
    if format == "plain":
        return np.ascontiguousarray(codes).view(dtype)
    block = BLOCK_FORMATS[format]
    return block.decode(codes, scales, *([1.0] if block.two_level else []))


def _table(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    """Examples of tables: pages in any order, some shared between sequences."""
    return rng.integers(0, axes["pages"], shape, dtype=np.int32)


# Format -> a range of scale bytes in which every code stands for a small value.
_SCALES = {"nvfp4": (0x28, 0x38), "mxfp4": (123, 127), "mxfp8": (117, 120)}


def _held(role: str, axes) -> tuple[str, int]:
    """Return the format of an example's keys or values and the head dimension of its tiles (0 for rows), from the bytes
    of a row.
    """
    width, dim, blocks = axes[f"{role}_width"], axes["dim" if role == "k" else "dim_v"], axes.get(f"{role}_blocks", 1)
    if width > 2 * dim:
        fitting = [
            (f, d) for f in TILE_DIMS for d in TILE_DIMS[f] if f == "bf16" or dim // BLOCK_FORMATS[f].block == blocks
        ]
        return next(
            (f, d) for f, d in fitting if (role == "v" or f != "bf16") and tile_layout(f, role, d).nbytes == width
        )
    return (
        "plain" if width == 2 * dim else "mxfp8" if width == dim else "nvfp4" if blocks == dim // 16 else "mxfp4"
    ), 0


def _codes(role: str):
    def draw(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
        """Examples of rows or tiles of small finite values."""
        format, tile = _held(role, axes)
        if tile:
            x = rng.standard_normal((*shape[:2], shape[2] * TILE_KEYS, tile), dtype=np.float32)
            return tile_layout(format, role, tile).encode(x)
        codes = rng.integers(0, 256, shape, dtype=np.uint8)
        if format == "plain":  # small values in bfloat16 and in float16
            codes[..., 1::2] = (codes[..., 1::2] & 0x80) | rng.integers(
                0x3C, 0x40, codes[..., 1::2].shape, dtype=np.uint8
            )
            return codes
        return np.where(codes & 0x7F == 0x7F, np.uint8(0x40), codes)

    return draw


def _scales(role: str):
    def draw(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
        """Examples of scales of moderate size."""
        return rng.integers(*_SCALES[_held(role, axes)[0]], shape, dtype=np.uint8)

    return draw


def _room(axes) -> int:
    """The most keys of a sequence of an example."""
    if not _held("k", axes)[1]:
        return axes["table"] * axes["page"]
    return (
        (axes["page"] - (axes["sequences"] - 1 if axes["sequences"] != axes["batch"] else 0)) * TILE_KEYS
        - TILE_KEYS
        + 1
    )


def _zeros(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    return np.zeros(shape, np.int32)


def _lengths(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    """Examples of lengths: all keys, none, and some between; for packed sequences without a table their ends."""
    room = _room(axes)
    if axes["sequences"] != axes["batch"] and axes["pages"] == axes["batch"]:
        return ends_of("room")(rng, member, shape, dict(room=room))
    return np.array([0 if i == 1 else max(room - i * room * 3 // 7, 0) for i in range(shape[0])], np.int32)


def _case(
    k="plain",
    v=None,
    batch=1,
    heads_kv=1,
    group=1,
    queries=1,
    dim=64,
    dim_v=None,
    pages=40,
    page=16,
    table=21,
    splits=1,
    **rest,
) -> dict:
    """A case on pages; k and v are formats."""
    sizes = dict(
        batch=batch,
        heads_kv=heads_kv,
        group=group,
        queries=queries,
        dim=dim,
        dim_v=dim_v or dim,
        pages=pages,
        page=page,
    )
    sizes |= dict(
        rows=min(group * queries, 16),
        table=table,
        sequences=rest.pop("sequences", batch),
        splits=splits,
        nodes=nodes_of(table * page),
    )
    case = {**sizes, "scale": dim**-0.5, "left": OPEN, "right": 0, "block_table": True, "key_ends": True, **rest}
    return case | _of_format("k", k, dim) | _of_format("v", v or k, dim_v or dim)


def _of_format(role: str, format: str, dim: int) -> dict:
    """The axes and scalars of rows of a format."""
    holds = {f"{role}_holds": ROW_FORMATS.index(format)}
    if format == "plain":
        return holds | {f"{role}_width": 2 * dim}
    block = BLOCK_FORMATS[format]
    return holds | {
        f"{role}_width": dim * block.bits // 8,
        f"{role}_blocks": dim // block.block,
        f"{role}_scales": True,
    }


def _dense(k="plain", v=None, keys=150, tiles=0, **rest) -> dict:
    """A case without pages: arrays, or tiles padded to the dimension `tiles`."""
    sequences = rest.get("sequences", rest.get("batch", 1))
    case = _case(k, v, table=1, most_keys=keys, **{"key_ends": False, **rest}) | dict(
        nodes=nodes_of(keys), block_table=False
    )
    packed = sequences != case["batch"]
    case |= dict(pages=case["batch"], page=keys) | (dict(key_starts=True, key_ends=True) if packed else {})
    if tiles:
        case |= dict(
            page=tiles_of(keys, sequences if packed else 1), k_tile=tiles, v_tile=tiles, k_scales=False, v_scales=False
        )
        case |= {
            f"{role}_width": tile_layout("bf16" if f == "plain" else f, role, tiles).nbytes
            for role, f in (("k", k), ("v", v or k))
        }
    return case


def _attend(
    q, k, v, k_scales, v_scales, block_table, query_starts, query_ends, key_starts, key_ends, q_global, k_global,
    row_shift, sinks, v_global, outputs, arrivals, partial, row_max, row_sum, scale, softcap, left, right,
    k_holds, v_holds, k_tile, v_tile, most_keys, splits, node_keys,
) -> None:  # fmt: skip
    """Compute what `attention_few` does, for nodes of so many keys."""
    row_max[:], row_sum[:] = -np.inf, 0
    page, sequences = k.shape[2], next((len(x) for x in (block_table, key_ends, query_starts) if x is not None), len(q))
    k = _values(k, k_scales, int(k_holds), int(k_tile), "k", q.shape[-1], q.dtype)
    v = _values(v, v_scales, int(v_holds), int(v_tile), "v", partial.shape[-1], q.dtype)
    first_tiles = None if key_starts is None else first_units(key_starts, TILE_KEYS)
    for i in range(sequences):
        start = 0 if key_starts is None else int(key_starts[i])
        length = (int(most_keys) if key_ends is None else int(key_ends[i])) - start
        if block_table is not None:
            pages = block_table[i, : -(-length // page)]
            keys, values = (
                x[pages].swapaxes(0, 1).reshape(1, x.shape[1], -1, x.shape[-1])[:, :, :length] for x in (k, v)
            )
        else:
            item = slice(i, i + 1) if query_starts is None else slice(0, 1)
            first = [
                int(first_tiles[i]) * TILE_KEYS if tile and key_starts is not None else start
                for tile in (k_tile, v_tile)
            ]
            keys, values = (x[item, :, at : at + length] for x, at in zip((k, v), first))
        keys, values = keys.astype(np.float64), values.astype(np.float64)
        if k_global is not None:
            keys = keys * k_global[:, None, None]  # one scale for all heads, or one for each
        if q_global is not None:
            keys = keys * np.float64(q_global[0])
        rows = slice(0, q.shape[3]) if query_starts is None else slice(int(query_starts[i]), int(query_ends[i]))
        at = (slice(i, i + 1) if query_starts is None else slice(0, 1), slice(None), slice(None), rows)
        shift = None
        if softcap and row_shift is not None:
            shift = np.broadcast_to(row_shift[at][..., None], (*q[at].shape[:4], keys.shape[2]))
        rest = dict(scale=float(scale), softcap=float(softcap), left=int(left), right=int(right), added=shift)
        for node in range(len(row_max)):
            top, total, weighted = exact_sums(
                q[at], keys, values, part=slice(node * node_keys, (node + 1) * node_keys), **rest
            )
            seen = top != -np.inf
            unit = np.ceil(top * LOG2_E)
            factor = np.exp2(np.where(seen, top * LOG2_E - np.where(seen, unit, 0), 0))
            row_max[node][at], row_sum[node][at] = unit, total * factor
            partial[node][at] = np.where(seen[..., None], weighted * factor[..., None], partial[node][at])
    finishes = len(row_max) <= FINISHED_NODES and (splits == 1 or arrivals is not None)
    if finishes and any(x is not None for x in outputs.values()):
        with_heads = {
            name: x if x is None else x.reshape(x.shape[0], -1, *x.shape[3:])
            for name, x in dict(outputs, row_shift=None if softcap else row_shift).items()
        }
        nodes = (x.reshape(len(x), len(q), -1, *x.shape[4:]) for x in (partial, row_max, row_sum))
        attention_merge.function(
            *nodes, None, None if sinks is None else sinks.reshape(-1), v_global=v_global, natural=0, **with_heads
        )


_PACKED = dict(query_starts=True, query_ends=True)


@kernel(
    grid="splits*heads_kv group*queries sequences",
    variants={"dim dim_v rows": tuple((*dims, rows) for dims in FEW_DIMS for rows in BLOCK_ROWS)},
    filled=True,
    derived=dict(
        splits=lambda axes: axes["splits"],
        rows=lambda axes: min(axes["group"] * axes["queries"], 16),
        **{
            name: (lambda axes, name=name: axes.get(name, 0) or 1)
            for name in ("k_blocks", "v_blocks", "table", "levels", "v_levels")
        },
    ),
    cases=[
        *(_case("nvfp4", dim=dim, group=8) for dim, _ in FEW_DIMS),
        *(_case("plain", dim=dim, group=8, format="bf16") for dim, _ in FEW_DIMS),
        *(_case("mxfp8", dim=dim, group=8, format="bf16") for dim, _ in FEW_DIMS),
        *(_dense("mxfp8", dim=dim, keys=130, tiles=dim, format="bf16") for dim, _ in FEW_DIMS[1:]),
        _case(
            "mxfp4",
            batch=3,
            heads_kv=2,
            group=3,
            queries=4,
            page=7,
            table=40,
            left=90,
            k_global=True,
            levels=2,
            format="bf16",
        ),
        _case(
            "nvfp4", heads_kv=2, group=2, queries=9, sequences=4, **_PACKED, softcap=2.0, row_shift=True, format="bf16"
        ),
        _case("plain", group=3, queries=3, table=9, format="bf16"),  # nine rows
        *(_case("mxfp8", dim=dim, group=3, queries=3, table=9, format="bf16") for dim, _ in FEW_DIMS[1:]),
        *(_case("plain", "nvfp4", dim=dim, group=4, queries=4, table=9, format="f16") for dim, _ in FEW_DIMS[1:]),
        _case("plain", page=32, table=35, format="bf16"),
        _case("plain", "nvfp4", batch=2, group=2, page=48, table=30, format="bf16"),
        _case("mxfp8", "mxfp4", dim=32, dim_v=96, group=5, page=256, table=9, splits=2, right=OPEN, format="bf16"),
        _case("mxfp4", "plain", dim=128, dim_v=64, group=4, page=64, table=17, splits=2, format="bf16"),
        _case("nvfp4", "plain", group=4, page=32, format="f16"),
        _case("nvfp4", group=3, batch=2, heads_kv=2, queries=2, out_bf16=True, lse=True, sinks=True, format="bf16"),
        _case(
            "mxfp8",
            "plain",
            dim_v=40,
            group=17,
            heads_kv=2,
            **dict(row_shift=True, v_global=True, v_levels=2, out_f32=True, merged_max=True, merged_sum=True),
            format="bf16",
        ),
        _case("plain", sinks=True, row_shift=True, softcap=2.0, v_global=True, v_levels=1, out_f16=True, lse=True),
        _dense("plain", batch=2, heads_kv=2, group=2, queries=3, dim=40, dim_v=24, key_ends=True, format="f16"),
        _dense("plain", heads_kv=2, queries=12, sequences=3, **_PACKED, format="bf16"),
        _dense("mxfp8", queries=12, keys=458, sequences=3, **_PACKED, format="bf16"),
        _dense(
            "nvfp4",
            batch=2,
            group=2,
            queries=2,
            dim=40,
            dim_v=24,
            keys=300,
            tiles=64,
            key_ends=True,
            q_global=True,
            k_global=True,
            levels=1,
            format="f16",
        ),
        _dense("mxfp4", queries=12, sequences=3, keys=200, tiles=64, **_PACKED, format="bf16"),
        _dense("mxfp4", "mxfp8", group=2, dim=200, keys=200, tiles=256, format="bf16"),
        _dense("nvfp4", dim=136, keys=40, tiles=192, format="f16"),  # rows of six chunks
        _case("nvfp4", dim=160, page=7, table=3, format="f16"),
        _case("nvfp4", dim=128, group=3, queries=3, table=2, format="bf16"),
        _dense("nvfp4", "plain", group=2, dim=64, keys=200, tiles=64, left=70, format="bf16"),
        _dense("mxfp8", dim=96, keys=100, tiles=96, queries=3, format="bf16"),
        # eight rows and sixteen of each format, ends amid a unit; sixteen of wide heads, with a cap; in tiles
        *(_case("mxfp4", batch=3, dim=dim, group=8, table=9, format="bf16") for dim, _ in FEW_DIMS),
        _case("mxfp4", dim=128, group=4, queries=4, table=9, format="bf16"),
        _case("plain", "nvfp4", group=4, queries=4, table=9, format="f16"),
        *(
            _case(format, dim=256, group=4, queries=4, table=9, softcap=2.0, format=kind)
            for format, kind in (("mxfp4", "bf16"), ("nvfp4", "bf16"), ("nvfp4", "f16"))
        ),
        *(
            _dense(format, dim=256, group=4, queries=4, keys=150, tiles=256, format=kind)
            for format, kind in (("mxfp8", "bf16"), ("nvfp4", "f16"))
        ),
        # four nodes and ten, of which a window leaves some without keys for some rows, finished without a merge: by the
        # block of a single split, and by the last one of several
        *(
            _case("nvfp4", group=2, queries=3, page=64, left=1200, out_f32=True, lse=True, sinks=True, **more)
            for more in (
                dict(table=50, format="bf16"),
                dict(heads_kv=2, table=150, splits=3, arrivals=True, format="bf16"),
            )
        ),
        _case("mxfp8", group=5, queries=4, table=90, splits=2, arrivals=True, out_bf16=True, format="bf16"),
    ],
    tolerance=dict(
        partial=_PARTIAL,
        row_sum=ROW_SUMS,
        out_bf16=Tolerance("as partial, and the result is rounded", relative_l2=4e-3, cosine=0.99999),
        out_f16=_PARTIAL,
        out_f32=_PARTIAL,
        lse=ROW_SUMS,
        merged_sum=ROW_SUMS,
    ),
    draw=dict(
        query_starts=starts_of("queries"),
        query_ends=ends_of("queries"),
        key_starts=lambda rng, member, shape, axes: starts_of("room")(rng, member, shape, dict(room=_room(axes))),
        key_ends=_lengths,
        block_table=_table,
        k=_codes("k"),
        v=_codes("v"),
        k_scales=_scales("k"),
        v_scales=_scales("v"),
        q_global=lambda rng, member, shape, axes: np.full(shape, 0.5, np.float32),
        k_global=example_factors,
        v_global=example_factors,
        arrivals=_zeros,
    ),
)
def attention_few(
    q: In[bf16 | f16, "batch heads_kv group queries dim", strided],
    k: In[u8, "pages heads_kv page k_width", in_parts(strided)],
    v: In[u8, "pages heads_kv page v_width", in_parts(strided)],
    k_scales: In[u8, "pages heads_kv page k_blocks", in_parts(loose)] = None,
    v_scales: In[u8, "pages heads_kv page v_blocks", in_parts(loose)] = None,
    block_table: In[i32, "sequences table", loose] = None,
    query_starts: In[i32, "sequences", unaligned] = None,
    query_ends: In[i32, "sequences", unaligned] = None,
    key_starts: In[i32, "sequences", unaligned] = None,
    key_ends: In[i32, "sequences", unaligned] = None,
    q_global: In[f32, "1", unaligned] = None,
    k_global: In[f32, "levels", unaligned] = None,
    row_shift: In[f32, "batch heads_kv group queries"] = None,
    sinks: In[f32, "heads_kv group", unaligned] = None,
    v_global: In[f32, "v_levels", unaligned] = None,
    out_bf16: Out[bf16, "batch heads_kv group queries dim_v", strided] = None,
    out_f16: Out[f16, "batch heads_kv group queries dim_v", strided] = None,
    out_f32: Out[f32, "batch heads_kv group queries dim_v", strided] = None,
    lse: Out[f32, "batch heads_kv group queries"] = None,
    merged_max: Out[f32, "batch heads_kv group queries"] = None,
    merged_sum: Out[f32, "batch heads_kv group queries"] = None,
    *,
    arrivals: InOut[i32, "batch heads_kv group queries"] = None,
    partial: InOut[f32, "nodes batch heads_kv group queries dim_v"],
    row_max: Out[f32, "nodes batch heads_kv group queries"],
    row_sum: Out[f32, "nodes batch heads_kv group queries"],
    scale: Scalar[f32],
    softcap: Scalar[f32] = 0.0,
    left: Scalar[i32],
    right: Scalar[i32],
    k_holds: Scalar[i32, 0, 1, 2, 3],
    v_holds: Scalar[i32, 0, 1, 2, 3],
    k_tile: Scalar[i32] = 0,
    v_tile: Scalar[i32] = 0,
    most_keys: Scalar[i32] = 0,
    splits: Axis,
):
    """Compute partial attention sums of few queries over nodes of 1024 keys, for keys and values in any format.

    k_holds, v_holds: 0 for 16-bit rows in q's type, 1 for mxfp8, 2 for mxfp4, 3 for nvfp4. With float16 queries only 0
    and 3 are valid. Rows of block formats have scales along the head dimension, in k_scales and v_scales.
    With a block_table, key j of sequence s is row j % page of page block_table[s, j // page], and key_ends are the
    lengths of the sequences. Table entries and rows after a sequence's last key are not read.
    Without a block_table, k and v are [batch, heads_kv, keys, ..] with up to most_keys keys; key_ends, and key_starts
    of packed sequences, are those of `attention_bf16`.
    k_tile, v_tile: the head dimension of tiles of 64 keys as operands have them, [batch, heads_kv, tiles, bytes]; 0 for
    rows.
    Q and K are multiplied in q's type, then by q_global and k_global. Codes times scales are expanded to q's type
    without rounding (mxfp8 and mxfp4: for scales from 2**-117 to 2**119). Weights are rounded to q's type for the
    product with V.
    Rows, windows, soft caps and sequences of queries are those of `attention_bf16`. Node i has the 1024 keys from key
    1024 i on. For each row and node, relative to 2**row_max with a whole row_max: partial is the sum of weights times
    values, not divided, and row_sum the sum of weights. If a row sees no key of a node, row_max is -inf, row_sum is 0,
    and partial is not written. `attention_merge` finishes. With up to 16 nodes this kernel can finish itself: out_*,
    lse, merged_max and merged_sum are then the results of `attention_merge` for sinks, v_global (one factor, or one for
    each of heads_kv) and, without a soft cap, row_shift. If there are several splits, it needs `arrivals`, all 0. The
    blocks with the same rows count in the place of the first row how many of them have written their nodes; the last
    one merges the nodes and sets the count to 0. Launches that may run at the same time need separate arrivals.
    row_shift: added to the scaled scores of a row before a soft cap; not used without one. splits: every splits-th
    node has the same blocks; no result depends on it.
    """
    outputs = dict(
        out_bf16=out_bf16, out_f16=out_f16, out_f32=out_f32, lse=lse, merged_max=merged_max, merged_sum=merged_sum
    )
    _attend(
        *(q, k, v, k_scales, v_scales, block_table, query_starts, query_ends, key_starts, key_ends, q_global, k_global),
        *(row_shift, sinks, v_global, outputs, arrivals, partial, row_max, row_sum, scale, softcap, left, right),
        *(k_holds, v_holds, k_tile, v_tile, most_keys, splits, NODE_KEYS),
    )


def _one(format: str, dim: int = 128, **rest) -> dict:
    """A case of `attention_one`."""
    case = _case(format, dim=dim, **rest)
    sizes = dict(held=case["k_holds"] + 1, width=case["k_width"])
    if format != "plain":
        sizes |= dict(blocks=case["k_blocks"], k_scales=True, v_scales=True)
    of_few = "queries dim_v sequences rows k_holds v_holds k_width v_width k_blocks v_blocks block_table key_ends"
    return {name: x for name, x in case.items() if name not in of_few.split()} | sizes


def of_chunks(keys: int) -> dict:
    """The axes and scalars of a case whose nodes are chunks."""
    nodes = nodes_of(keys, CHUNK_KEYS)
    return dict(nodes=nodes, splits=nodes, node_keys=CHUNK_KEYS, arrivals=True)


def _drawn(draw):
    """Return a function that draws examples of `attention_one` as those of keys of `attention_few`."""

    def drawn(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
        sizes = dict(k_width=axes["width"], k_blocks=axes.get("blocks", 1), sequences=axes["batch"])
        return draw(rng, member, shape, {**axes, **sizes})

    return drawn


@kernel(
    grid="splits*heads_kv group*queries batch",
    variants={"dim": ONE_DIMS, "held": (1, 2, 3, 4)},
    fixed=dict(queries=1),
    derived=dict(
        splits=lambda axes: axes["splits"],
        held=lambda axes: axes["held"],
        **{name: (lambda axes, name=name: axes.get(name, 0) or 1) for name in ("blocks", "levels", "v_levels")},
    ),
    cases=[
        *(_one(format, dim=dim, batch=2, group=4, pages=90, table=80) for dim in ONE_DIMS for format in ROW_FORMATS),
        _one("nvfp4", batch=3, heads_kv=2, group=3, page=7, table=40, left=90, k_global=True, levels=2),
        _one("mxfp8", group=8, page=64, table=17, splits=2),
        _one("mxfp8", group=5, page=64, table=16, out_bf16=True),
        _one("mxfp4", heads_kv=2, group=2, out_f16=True, lse=True, sinks=True, row_shift=True),
        _one("nvfp4", group=1, out_f32=True, merged_max=True, merged_sum=True, v_global=True, v_levels=1),
        # five nodes, one, and none, in one split and in several; ten nodes
        *(
            _one("nvfp4", batch=3, page=64, table=66, out_f32=True, lse=True, sinks=True, **splits)
            for splits in ({}, dict(splits=2, arrivals=True))
        ),
        _one("mxfp4", heads_kv=2, group=9, page=64, table=20, splits=2, arrivals=True, out_bf16=True),
        _one("mxfp4", dim=64, page=64, table=150, splits=3, arrivals=True, out_f16=True),
        # nodes of one chunk: of several lengths, with a window that begins amid a chunk; 15 nodes
        *(
            _one(format, batch=3, group=3, page=16, table=40, left=300, **of_chunks(640), out_f32=True, lse=True)
            for format in ROW_FORMATS
        ),
        _one("nvfp4", dim=64, page=64, table=60, **of_chunks(3840), out_bf16=True),
        _one("mxfp8", group=2, page=16, table=30, nodes=2, splits=2, node_keys=256),
        _one("nvfp4", page=16, table=30, nodes=2, node_keys=256, out_f32=True),  # two nodes in one split
    ],
    tolerance=dict(
        partial=_PARTIAL,
        row_sum=ROW_SUMS,
        out_bf16=Tolerance("as partial, and the result is rounded", relative_l2=4e-3, cosine=0.99999),
        out_f16=_PARTIAL,
        out_f32=_PARTIAL,
        lse=ROW_SUMS,
        merged_sum=ROW_SUMS,
    ),
    draw=dict(
        key_ends=_drawn(_lengths),
        block_table=_table,
        k=_drawn(_codes("k")),
        v=_drawn(_codes("k")),
        k_scales=_drawn(_scales("k")),
        v_scales=_drawn(_scales("k")),
        k_global=example_factors,
        v_global=example_factors,
        arrivals=_zeros,
    ),
)
def attention_one(
    q: In[bf16, "batch heads_kv group queries dim", strided],
    k: In[u8, "pages heads_kv page width", in_parts(strided)],
    v: In[u8, "pages heads_kv page width", in_parts(strided)],
    block_table: In[i32, "batch table", loose],
    key_ends: In[i32, "batch", unaligned],
    k_scales: In[u8, "pages heads_kv page blocks", in_parts(loose)] = None,
    v_scales: In[u8, "pages heads_kv page blocks", in_parts(loose)] = None,
    k_global: In[f32, "levels", unaligned] = None,
    row_shift: In[f32, "batch heads_kv group queries"] = None,
    sinks: In[f32, "heads_kv group", unaligned] = None,
    v_global: In[f32, "v_levels", unaligned] = None,
    out_bf16: Out[bf16, "batch heads_kv group queries dim", strided] = None,
    out_f16: Out[f16, "batch heads_kv group queries dim", strided] = None,
    out_f32: Out[f32, "batch heads_kv group queries dim", strided] = None,
    lse: Out[f32, "batch heads_kv group queries"] = None,
    merged_max: Out[f32, "batch heads_kv group queries"] = None,
    merged_sum: Out[f32, "batch heads_kv group queries"] = None,
    *,
    arrivals: InOut[i32, "batch heads_kv group queries"] = None,
    partial: InOut[f32, "nodes batch heads_kv group queries dim"],
    row_max: Out[f32, "nodes batch heads_kv group queries"],
    row_sum: Out[f32, "nodes batch heads_kv group queries"],
    scale: Scalar[f32],
    left: Scalar[i32],
    right: Scalar[i32],
    node_keys: Scalar[i32, 256, 1024] = 1024,
    held: Axis,
    splits: Axis,
):
    """Compute what `attention_few` does, with the same bits, for one query of each sequence, keys and values in pages
    of one format, and a positive scale.

    held: the format, 1 for bfloat16, 2 for mxfp8, 3 for mxfp4, 4 for nvfp4, with scales for the last three. The code
    for one format is short, so that caches of instructions hold it and more warps fit a multiprocessor. Blocks have
    eight rows of a head of keys, and further rows read the keys again.
    node_keys: 1024, or 256 for nodes of one chunk. With 256 each split has one node, so that `splits` is the number of
    nodes; with any other `splits` nodes have 1024 keys, and those behind the last key are empty. The outputs have the
    same bits.
    """
    outputs = dict(
        out_bf16=out_bf16, out_f16=out_f16, out_f32=out_f32, lse=lse, merged_max=merged_max, merged_sum=merged_sum
    )
    _attend(
        *(q, k, v, k_scales, v_scales, block_table, None, None, None, key_ends, None, k_global, row_shift, sinks),
        *(v_global, outputs, arrivals, partial, row_max, row_sum, scale, 0.0, left, right, held - 1, held - 1, 0, 0, 0),
        *(splits, int(node_keys) if splits == len(row_max) else NODE_KEYS),
    )


def blocks_of_one(q: DeviceArray, held: int) -> int:
    """Return how many blocks of `attention_one` a multiprocessor of the queries' device holds."""
    unit = attention_one.entry_name({"dim": q.shape[-1], "held": held}, None)
    return q.backend.module(unit).facts(unit).min_blocks
