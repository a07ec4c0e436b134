"""Declarations of the attention kernels for block formats, one for each compiled pair of formats, and of
`mean_scores_NAME`."""

import numpy as np

from ..accuracy import Tolerance
from ..blocks import BLOCK_FORMATS
from ..declaration import Axis, In, Out, Scalar, loose, scattered, strided, unaligned
from ..formats import bf16, f16, f32, i32, u8
from ..kernel import Kernel, kernel
from ..sequences import ends_of, rows_in_units, starts_of, unit_of_each, units_axis, units_of
from ..tiles import TILE_DIMS, TILE_KEYS, tile_layout, tiles_of
from .attention_kernels import (
    HEAD_DIMS,
    OPEN,
    PACKED,
    PARTIAL,
    ROW_SUMS,
    STORED_COLUMNS,
    SUMS,
    attend,
    example_flags,
    example_masks,
    visible_flops,
)
from .smoothing import SMOOTH_QUERIES

# (format of Q and K, format of V) of each kernel.
FORMATS = (
    *(("mxfp8", "mxfp8"), ("mxfp4", "mxfp4"), ("nvfp4", "nvfp4")),
    *(("nvfp4", "mxfp8"), ("mxfp4", "mxfp8"), ("nvfp4", "bf16"), ("mxfp4", "bf16"), ("mxfp8", "bf16")),
)
# By the format of V: a row_max that is an output is this many steps of log2 below the largest score.
HEADROOM = {"mxfp8": 8, "mxfp4": 8, "nvfp4": 11, "bf16": 0}

# (format of Q and K, format of V) -> compiled head dimensions (of Q and K, of V): those of 16-bit attention that tiles
# support.
DIMS = {
    (qk, pv): tuple((dim, dim_v) for dim, dim_v in HEAD_DIMS if dim in TILE_DIMS[qk] and dim_v in TILE_DIMS[pv])
    for qk, pv in FORMATS
}

_TEXT = """Compute softmax(scale Q K^T) V with Q and K in {qk}, weights and V in {pv}; a head of K and V serves a group
of heads of Q.

q_codes and q_scales are those of `quantize` along the last axis, k_tiles those of `pack_keys_{qk}`, v_tiles those of
`pack_values_{pv}`. The tiles hold `keys` keys without padding; the first `cols` columns of V are used. Tiles of packed
sequences must be packed with the same key_starts. q_global, k_global, v_global: the global scales of NVFP4, 1 if
omitted.
Smoothed operands: mean_scores, as `mean_scores_{qk}` returns them, are added to q.k before any scale; a query takes
those of its block, numbered as in `less_block_means`. row_shift is added to all scaled scores of a row.
Weights are rounded to {weights}.
Sums and softmax are float32. The denominator is the sum of the {divisor} weights. lse and exact_sum, an output beside
row_sum, are computed from the unrounded weights.
Everything else is as in `attention_bf16`, except that row_max = ceil(m) - {headroom}, where m is the largest score of a
row in units of log2. Without a softcap, row_shift and the rest of m are rounded up separately.
The reference is float64 attention of the decoded operands."""
_WEIGHTS = {
    "mxfp8": "e4m3",
    "mxfp4": "e2m1 with one power-of-two scale for 32 keys, under which none saturates",
    "nvfp4": "e2m1 with one ue4m3 scale for 16 keys, under which the largest becomes 6",
    "bf16": "bf16",
}
# By the format of V: the relative L2 error against unrounded weights, for normal scores. Measured errors are two thirds
# of these. In bf16 a weight that outweighs all others may be off by 2^-8.
_ROUNDING = {"mxfp8": 0.04, "mxfp4": 0.25, "nvfp4": 0.13, "bf16": 6e-3}


def _normal(rng: np.random.Generator, *shape) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def _operands(qk: str, pv: str) -> dict:
    """Functions that draw examples, by operand."""
    block = BLOCK_FORMATS[qk]

    def codes(rng, member, shape, axes):
        # Codes of normal values. Their own scales are dropped: `scales` draws others.
        return block.encode(
            _normal(rng, *shape[:-1], shape[-1] * 8 // block.bits), *([1.0] if block.two_level else [])
        )[0]

    def scales(rng, member, shape, axes):
        values = np.full((*shape[:-1], shape[-1] * block.block), 2.0, np.float32) * np.exp2(
            rng.integers(-1, 2, (*shape[:-1], 1))
        )
        return block.encode(values, *([1.0] if block.two_level else []))[1]

    def tiles(format, role, axis):
        def draw(rng, member, shape, axes):
            x, packed = _normal(rng, *shape[:2], axes["keys"], axes[axis]), {}
            if axes["sequences"] != axes["batch"]:
                sizes = (axes["sequences"],)
                packed = {
                    name: of("keys")(rng, i32, sizes, axes)
                    for name, of in (("key_starts", starts_of), ("key_ends", ends_of))
                }
            return tile_layout(format, role, axes[axis]).encode(x, **packed)

        return draw

    return dict(q_codes=codes, q_scales=scales, k_tiles=tiles(qk, "k", "dim"), v_tiles=tiles(pv, "v", "dim_v"))


def _derived(qk: str, pv: str) -> dict:
    """Derived axes: `dim` and `dim_v` from the bytes of a tile and back, and the numbers of blocks and tiles."""
    block = BLOCK_FORMATS[qk]

    def of_tiles(format, role, axis):
        def dim(axes):
            sizes = {tile_layout(format, role, dim).nbytes: dim for dim in TILE_DIMS[format]}
            return sizes.get(axes[f"{role}_bytes"], axes.get(axis, 0))

        return {
            axis: dim,
            f"{role}_bytes": lambda axes: tile_layout(format, role, axes[axis]).nbytes if axes[axis] else 0,
        }

    return dict(
        **of_tiles(qk, "k", "dim"),
        **of_tiles(pv, "v", "dim_v"),
        q_blocks=lambda axes: axes["q_bytes"] * 8 // block.bits // block.block,
        query_blocks=units_axis(SMOOTH_QUERIES, "queries"),
        tiles=units_axis(TILE_KEYS),
    )


def _cases(qk: str, pv: str) -> list[dict]:
    block, dims, smoothed = BLOCK_FORMATS[qk], DIMS[qk, pv], dict(row_shift=True, mean_scores=True)
    smallest, largest = dims[0][0], dims[-1][0]

    def case(
        batch=1,
        heads_kv=1,
        group=1,
        queries=70,
        keys=130,
        dims=dims[0],
        q_cols=None,
        cols=None,
        sequences=None,
        splits=1,
        **rest,
    ) -> dict:
        dim, dim_v = dims
        q_cols = q_cols or dim
        sizes = dict(q_bytes=q_cols * block.bits // 8, q_blocks=q_cols // block.block)
        sizes |= dict(
            tiles=tiles_of(keys, sequences or 1), query_blocks=units_of(queries, SMOOTH_QUERIES, sequences or 1)
        )
        tiles = dict(k_bytes=tile_layout(qk, "k", dim).nbytes, v_bytes=tile_layout(pv, "v", dim_v).nbytes)
        axes = dict(
            batch=batch,
            heads_kv=heads_kv,
            group=group,
            queries=queries,
            keys=keys,
            dim=dim,
            dim_v=dim_v,
            cols=cols or dim_v,
        )
        return {
            **axes,
            **sizes,
            **tiles,
            "sequences": sequences or batch,
            "splits": splits,
            "scale": dim**-0.5,
            "left": OPEN,
            "right": OPEN,
            **rest,
        }

    return [
        *(case(dims=pair, right=0, out_bf16=True, lse=True) for pair in dims),
        case(
            q_cols=smallest - 32 or 32,
            cols=24,
            batch=2,
            heads_kv=2,
            group=3,
            queries=25,
            keys=70,
            out_f32=True,
            sinks=True,
            softcap=2.0,
            **smoothed,
        ),
        case(
            dims=dims[-1],
            q_cols=largest - 32,
            cols=200,
            group=2,
            queries=5,
            keys=100,
            out_f16=True,
            out_f32=True,
            sinks=True,
            **smoothed,
        ),
        case(batch=2, group=2, keys=100, mask=True, out_f16=True, lse=True, left=40, right=7, mean_scores=True),
        case(group=2, keys=100, allowed=True, key_ends=True, out_bf16=True, out_f16=True, out_f32=True, lse=True),
        case(
            dims=(64, 64),
            batch=3,
            queries=5,
            keys=150,
            right=0,
            key_ends=True,
            out_f32=True,
            lse=True,
            **smoothed,
            q_global=True,
            k_global=True,
            v_global=True,
        ),
        case(
            heads_kv=2, group=2, queries=75, keys=230, sequences=3, right=0, **PACKED, mask=True, out_f32=True, lse=True
        ),
        case(
            group=2,
            queries=9,
            keys=330,
            sequences=2,
            splits=3,
            sinks=True,
            mean_scores=True,
            **PACKED,
            **PARTIAL,
            exact_sum=True,
        ),
        case(heads_kv=2, group=4, queries=3, keys=330, splits=3, sinks=True, **smoothed, **PARTIAL, exact_sum=True),
        # Smoothed queries without masks; a group with more heads than a stage has room for mean scores.
        case(group=2, queries=70, keys=200, out_f32=True, mean_scores=True),
        case(group=20, queries=4, keys=140, out_bf16=True, mean_scores=True),
        # Launches that take whole blocks of 128 or of 192 rows although half blocks exist: the emulator's one
        # multiprocessor has less work with them.
        *(
            case(dims=(dim, dim), heads_kv=2, queries=queries, keys=100, out_f16=True)
            for dim, queries in ((64, 65), (128, 65), (128, 129))
        ),
        case(queries=1, keys=1, out_bf16=True, lse=True),
        case(queries=1, keys=400, out_bf16=True),  # all stages are refilled
        # Tiles without masks, each in the loop that its unit has for them. A row alone also has tiles in which no
        # maximum grows.
        *[case(dims=(192, 192), queries=1, keys=330, out_f16=True, q_global=True, k_global=True, v_global=True)]
        * (qk != "nvfp4" or qk == pv),
        *(
            case(dims=pair, queries=queries, keys=330, out_bf16=True, mean_scores=smooth)
            for pair, queries, smooth in {
                ("mxfp8", "mxfp8"): (((128, 128), 5, True), *(((256, 256), queries, True) for queries in (1, 5))),
                ("mxfp4", "mxfp4"): (((128, 128), 5, False), ((192, 192), 70, False)),
                ("nvfp4", "nvfp4"): (((192, 128), 1, False), ((192, 192), 70, False), ((192, 192), 5, True)),
            }.get((qk, pv), ())
        ),
    ]


def _declare(qk: str, pv: str) -> Kernel:
    block, weights = BLOCK_FORMATS[qk], _ROUNDING[pv]

    def body(
        q_codes: In[u8, "batch heads_kv group queries q_bytes", loose],
        q_scales: In[u8, "batch heads_kv group queries q_blocks", loose],
        k_tiles: In[u8, "batch heads_kv tiles k_bytes"],
        v_tiles: In[u8, "batch heads_kv tiles v_bytes"],
        q_global: In[f32, "1", unaligned] = None,
        k_global: In[f32, "1", unaligned] = None,
        v_global: In[f32, "1", unaligned] = None,
        mean_scores: In[f32, "batch heads_kv tiles query_blocks group 64"] = None,
        row_shift: In[f32, "batch heads_kv group queries"] = None,
        mask: In[f32, "batch heads_kv group queries keys", scattered] = None,
        allowed: In[u8, "batch heads_kv group queries keys", scattered] = None,
        sinks: In[f32, "heads_kv group", unaligned] = None,
        query_starts: In[i32, "sequences", unaligned] = None,
        query_ends: In[i32, "sequences", unaligned] = None,
        key_starts: In[i32, "sequences", unaligned] = None,
        key_ends: In[i32, "sequences", unaligned] = None,
        out_bf16: Out[bf16, "batch heads_kv group queries cols", strided] = None,
        out_f16: Out[f16, "batch heads_kv group queries cols", strided] = None,
        out_f32: Out[f32, "batch heads_kv group queries cols", strided] = None,
        lse: Out[f32, "batch heads_kv group queries"] = None,
        partial: Out[f32, "splits batch heads_kv group queries cols"] = None,
        row_max: Out[f32, "splits batch heads_kv group queries"] = None,
        row_sum: Out[f32, "splits batch heads_kv group queries"] = None,
        exact_sum: Out[f32, "splits batch heads_kv group queries"] = None,
        *,
        scale: Scalar[f32],
        softcap: Scalar[f32] = 0.0,
        left: Scalar[i32],
        right: Scalar[i32],
        keys: Axis,
        dim: Axis,
        dim_v: Axis,
        cols: Axis,
    ):
        outputs, parts = (out_bf16, out_f16, out_f32), (partial, row_max, row_sum, exact_sum)
        q = block.decode(q_codes, q_scales, *([1.0] if block.two_level else []))
        q = np.pad(q, [(0, 0)] * 4 + [(0, dim - q.shape[-1])])
        k, v = tile_layout(qk, "k", dim).decode(k_tiles), tile_layout(pv, "v", dim_v).decode(v_tiles)[..., :cols]
        q, k, v = (
            x if level is None else x * np.float64(level) for x, level in ((q, q_global), (k, k_global), (v, v_global))
        )
        added = None if row_shift is None else row_shift[..., None]
        rows = slice(keys) if key_starts is None else rows_in_units(key_starts, keys, TILE_KEYS)
        if mean_scores is not None:
            levels = [np.float64(level) for level in (q_global, k_global) if level is not None]
            vectors = np.moveaxis(mean_scores, (2, 4), (4, 2)).reshape(*q.shape[:3], mean_scores.shape[3], -1)
            of_rows = vectors[:, :, :, unit_of_each(query_starts, q.shape[3], SMOOTH_QUERIES)][..., rows]
            added = of_rows * np.float64(scale) * np.prod(levels) + (0 if added is None else added)
        added = None if added is None else np.broadcast_to(added, (*q.shape[:4], keys))
        options = dict(scale=scale, softcap=softcap, left=left, right=right, mask=mask, allowed=allowed, sinks=sinks)
        sequences = dict(query_starts=query_starts, query_ends=query_ends, key_starts=key_starts, key_ends=key_ends)
        attend(q, k[:, :, rows], v[:, :, rows], options, sequences, outputs, lse, parts, HEADROOM[pv], added, row_shift)

    body.__name__ = body.__qualname__ = f"attention_{qk}" + (f"_{pv}" if pv != qk else "")
    divisor = "rounded" if pv in BLOCK_FORMATS else "unrounded"
    body.__doc__ = _TEXT.format(qk=qk, pv=pv, weights=_WEIGHTS[pv], divisor=divisor, headroom=HEADROOM[pv])
    element = BLOCK_FORMATS[pv].element.name if pv in BLOCK_FORMATS else pv
    rounded = Tolerance(f"weights are rounded to {element}, the reference's are not", relative_l2=weights)
    return kernel(
        grid="splits*heads_kv group*queries sequences",
        variants={"dim dim_v": DIMS[qk, pv]},
        halved=True,
        multiples=dict(cols=STORED_COLUMNS),
        derived=_derived(qk, pv),
        cases=_cases(qk, pv),
        tolerance=dict(
            out_bf16=rounded,
            out_f16=rounded,
            out_f32=rounded,
            partial=rounded,
            row_sum=rounded,
            exact_sum=ROW_SUMS,
            lse=SUMS,
        ),
        flops=visible_flops,
        draw=dict(
            **_operands(qk, pv),
            mean_scores=_mean_scores,
            row_shift=lambda rng, member, shape, axes: 3 * _normal(rng, *shape),
            q_global=_level,
            k_global=_level,
            v_global=_level,
            query_starts=starts_of("queries"),
            query_ends=ends_of("queries"),
            key_starts=starts_of("keys"),
            key_ends=ends_of("keys"),
            mask=example_masks,
            allowed=example_flags,
        ),
    )(body)


def _mean_scores(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    """Examples of mean scores that change the scores noticeably."""
    return np.float32(np.sqrt(axes["dim"])) * _normal(rng, *shape)


def _level(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    return np.exp2(rng.integers(-1, 2, shape)).astype(np.float32)


# (format of Q and K, format of V) -> the kernel.
BLOCK_ATTENTION = {formats: _declare(*formats) for formats in FORMATS}


_MEAN_TEXT = """Multiply the means of blocks of queries by keys in {format}: the part of the scores that smoothing
removes.

k_tiles are those of `pack_keys_{format}`, decoded without their global scale; padding has scores of 0. A mean is
multiplied as a sum of two bfloat16 values, which is within 2^-17 of it. Products are exact, sums are float32.
Scores are divided by q_global: attention adds them to products of codes and scales, to which global scales are applied
later. The scores of all heads of a group, for one tile and one block of queries, are contiguous."""


def _declare_mean_scores(format: str) -> Kernel:
    """Declare the kernel for keys of a format."""
    dims = TILE_DIMS[format]
    sizes = {dim: dict(dim=dim, k_bytes=tile_layout(format, "k", dim).nbytes) for dim in dims}

    def body(
        mean: In[f32, "batch heads_kv group blocks cols"],
        k_tiles: In[u8, "batch heads_kv tiles k_bytes"],
        q_global: In[f32, "1", unaligned] = None,
        *,
        scores: Out[f32, "batch heads_kv tiles blocks group 64"],
        dim: Axis,
    ):
        keys = tile_layout(format, "k", dim).decode(k_tiles)[:, :, None, :, : mean.shape[-1]]
        of_keys = mean.astype(np.float64) @ keys.swapaxes(-1, -2) / (1 if q_global is None else np.float64(q_global))
        scores[:] = np.moveaxis(of_keys.reshape(*mean.shape[:-1], -1, TILE_KEYS), (2, 4), (4, 2))

    body.__name__ = body.__qualname__ = f"mean_scores_{format}"
    body.__doc__ = _MEAN_TEXT.format(format=format)
    tiles = _operands(format, format)["k_tiles"]
    return kernel(
        grid="tiles heads_kv batch",
        variants={"dim": dims},
        derived={name: size for name, size in _derived(format, format).items() if name in ("dim", "k_bytes")},
        cases=[
            *(dict(batch=1, heads_kv=1, group=1, blocks=3, cols=dim, tiles=2, **sizes[dim]) for dim in dims),
            dict(batch=2, heads_kv=2, group=5, blocks=14, cols=dims[0] - 3, tiles=3, **sizes[dims[0]], q_global=True),
        ],
        tolerance=Tolerance("float32 sums; a vector is rounded to 16 bits", relative_l2=1e-5),
        draw=dict(
            k_tiles=lambda rng, member, shape, axes: tiles(
                rng, member, shape, {**axes, "keys": 64 * axes["tiles"], "sequences": axes["batch"]}
            ),
            q_global=_level,
        ),
    )(body)


# Format of K -> the kernel.
MEAN_SCORES = {format: _declare_mean_scores(format) for format in dict.fromkeys(qk for qk, _ in FORMATS)}
