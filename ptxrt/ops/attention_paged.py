"""The declarations of attention on pages of keys and values, and its reference in float64."""

import numpy as np

from ..accuracy import Tolerance
from ..blocks import BLOCK_FORMATS
from ..declaration import In, InOut, Out, Scalar, in_parts, loose, strided, unaligned
from ..formats import bf16, f16, f32, i32
from ..kernel import Kernel, kernel
from ..sequences import ends_of, starts_of
from .attention_kernels import LOG2_E, OPEN, ROW_SUMS, exact_sums

# Head dimensions that are compiled; others are filled up with zeros.
PAGED_DIMS = ((64, 64), (128, 128), (256, 256))
# Keys of a node, the part of a sequence of which a block writes sums.
NODE_KEYS = 1024

_PAGED = """Add up attention of few queries over nodes of 1024 keys, on pages of keys and values in {name}.

Key j of sequence s is row j % page of page block_table[s, j // page]; key_ends are the lengths of the sequences. Entries of the table
behind a sequence's last key are not read, nor are rows behind it. {values}
Rows, windows, soft caps and sequences of queries are those of `attention_bf16`. Node i is keys 1024 i to 1024 i + 1023: for each row
partial is the sum of weights times values, not divided, relative to 2**row_max, a whole number, and row_sum that of the
weights; `attention_merge` finishes. Where a row sees no key of a node row_max is -inf, row_sum 0, and partial stays as it is.
row_shift: what the scaled scores of a row lack, which a soft cap sees. splits: how many runs of nodes have blocks of their own;
no result depends on it."""

_PLAIN_VALUES = "Q and K are multiplied in their type, weights are rounded to it for the product with V."
_BLOCK_VALUES = """Codes times scales, and k_global
for each head of K, are what is multiplied: in q's type, to which they are expanded without rounding; weights are rounded to the
same."""
_NARROW_VALUES = """Codes times scales, and k_global
for each head of K, are what is multiplied: in bfloat16, to which they are expanded without rounding for scales from 2**-117 to
2**119; weights are rounded to it."""

_PARTIAL = Tolerance("weights are rounded to 16 bits before the second product", relative_l2=2.5e-3, cosine=0.99999, gain=1e-3)


def exact_nodes(q, k, v, block_table, key_ends, query_starts, query_ends, k_global, row_shift, parts, **options) -> None:
    """What the kernels write to parts (partial, row_max and row_sum), from rows [pages, heads_kv, page, dim] as they are multiplied."""
    partial, row_max, row_sum = parts
    row_max[:], row_sum[:] = -np.inf, 0
    page, scale, softcap = k.shape[2], float(options["scale"]), float(options["softcap"])
    for i, length in enumerate(key_ends):
        pages = block_table[i, : -(-int(length) // page)]
        keys, values = (x[pages].swapaxes(0, 1).reshape(1, x.shape[1], -1, x.shape[-1])[:, :, :length].astype(np.float64) for x in (k, v))
        if k_global is not None:
            keys = keys * k_global[:, None, None]
        rows = slice(0, q.shape[3]) if query_starts is None else slice(int(query_starts[i]), int(query_ends[i]))
        at = (slice(i, i + 1) if query_starts is None else slice(0, 1), slice(None), slice(None), rows)
        more = None
        if softcap and row_shift is not None:
            more = np.broadcast_to(row_shift[at][..., None], (*q[at].shape[:4], keys.shape[2]))
        rest = dict(scale=scale, softcap=softcap, left=int(options["left"]), right=int(options["right"]), more=more)
        for node in range(len(row_max)):
            top, total, weighted = exact_sums(q[at], keys, values, part=slice(node * NODE_KEYS, (node + 1) * NODE_KEYS), **rest)
            seen = top != -np.inf
            unit = np.ceil(top * LOG2_E)
            factor = np.exp2(np.where(seen, top * LOG2_E - np.where(seen, unit, 0), 0))
            row_max[node][at], row_sum[node][at] = unit, total * factor
            partial[node][at] = np.where(seen[..., None], weighted * factor[..., None], partial[node][at])


def _table(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    """Examples of tables: pages in any order, of which sequences may share some."""
    return rng.integers(0, axes["pages"], shape, dtype=np.int32)


def _codes(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    """Examples of codes, none of which is NaN in e4m3."""
    return np.where((codes := rng.integers(0, 256, shape, dtype=np.uint8)) & 0x7F == 0x7F, np.uint8(0x40), codes)


# By format the bytes of scales, from and to, under which any codes are values of a few units.
_SCALES = {"nvfp4": (0x28, 0x38), "mxfp4": (123, 127), "mxfp8": (117, 120)}


def _lengths(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    """Examples of lengths: the whole table, none, and some between."""
    room = axes["table"] * axes["page"]
    return np.array([0 if i == 1 else max(room - i * room * 3 // 7, 0) for i in range(shape[0])], np.int32)


def _case(batch=1, heads_kv=1, group=1, queries=1, dim=64, dim_v=None, pages=40, page=16, table=21, splits=1, **rest) -> dict:
    sizes = dict(batch=batch, heads_kv=heads_kv, group=group, queries=queries, dim=dim, dim_v=dim_v or dim, pages=pages, page=page)
    sizes |= dict(table=table, sequences=rest.pop("sequences", batch), splits=splits, nodes=-(-table * page // NODE_KEYS))
    return {**sizes, "scale": dim**-0.5, "left": OPEN, "right": 0, **rest}


_PACKED = dict(query_starts=True, query_ends=True)
_CASES = [
    *(_case(dim=dim, group=8) for dim, _ in PAGED_DIMS),
    _case(batch=3, heads_kv=2, group=3, queries=4, page=7, table=40, left=90, k_global=True),
    _case(heads_kv=2, group=2, queries=9, sequences=4, **_PACKED, softcap=2.0, row_shift=True, format="bf16"),
    _case(batch=2, group=2, page=48, table=30, format="bf16"),
    _case(dim=32, dim_v=96, group=5, page=256, table=9, splits=2, right=OPEN, format="bf16"),
    _case(dim=128, dim_v=64, group=4, page=64, table=17, splits=2, format="f16"),
]


def _declared(format: str, body, values: str) -> Kernel:
    """Declare a body as attention on pages in a format."""

    def scales(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
        """Examples of scales of moderate size."""
        return rng.integers(*_SCALES[format], shape, dtype=np.uint8)

    mx = format in BLOCK_FORMATS and not BLOCK_FORMATS[format].two_level
    cases = [{name: value for name, value in case.items() if name != "format"} for case in _CASES] if mx else _CASES
    body.__name__ = body.__qualname__ = f"attention_paged_{format}"
    body.__doc__ = _PAGED.format(name=format if format in BLOCK_FORMATS else "bf16 or f16", values=values)
    return kernel(
        grid="splits*heads_kv group*queries sequences",
        variants={"dim dim_v": PAGED_DIMS},
        filled=True,
        derived=dict(splits=lambda axes: axes["splits"]),
        cases=cases,
        tolerance=dict(partial=_PARTIAL, row_sum=ROW_SUMS),
        draw=dict(
            query_starts=starts_of("queries"),
            query_ends=ends_of("queries"),
            block_table=_table,
            key_ends=_lengths,
            k_global=lambda rng, member, shape, axes: rng.uniform(0.5, 2, shape).astype(np.float32),
            **({} if format not in BLOCK_FORMATS else dict(k=_codes, v=_codes, k_scales=scales, v_scales=scales)),
        ),
    )(body)


def _declare_plain() -> Kernel:
    """Declare the kernel for 16-bit caches."""

    def body(
        q: In[bf16 | f16, "batch heads_kv group queries dim", strided],
        k: In[bf16 | f16, "pages heads_kv page dim", in_parts(strided)],
        v: In[bf16 | f16, "pages heads_kv page dim_v", in_parts(strided)],
        block_table: In[i32, "sequences table", loose],
        key_ends: In[i32, "sequences", unaligned],
        query_starts: In[i32, "sequences", unaligned] = None,
        query_ends: In[i32, "sequences", unaligned] = None,
        k_global: In[f32, "heads_kv", unaligned] = None,
        row_shift: In[f32, "batch heads_kv group queries"] = None,
        *,
        partial: InOut[f32, "nodes batch heads_kv group queries dim_v"],
        row_max: Out[f32, "nodes batch heads_kv group queries"],
        row_sum: Out[f32, "nodes batch heads_kv group queries"],
        scale: Scalar[f32],
        softcap: Scalar[f32] = 0.0,
        left: Scalar[i32],
        right: Scalar[i32],
    ):
        sequences = (block_table, key_ends, query_starts, query_ends)
        options = dict(scale=scale, softcap=softcap, left=left, right=right)
        exact_nodes(q, k, v, *sequences, k_global, row_shift, (partial, row_max, row_sum), **options)

    return _declared("bf16", body, _PLAIN_VALUES)


def _declare_blocks(format: str) -> Kernel:
    """Declare the kernel for caches in a block format."""
    block = BLOCK_FORMATS[format]
    code, packed = block.element.storage, "" if block.bits == 8 else "/2"

    def body(
        q: In[bf16 | f16 if block.two_level else bf16, "batch heads_kv group queries dim", strided],
        k: In[code, f"pages heads_kv page dim{packed}", in_parts(strided)],
        k_scales: In[block.scale, f"pages heads_kv page dim/{block.block}", in_parts(loose)],
        v: In[code, f"pages heads_kv page dim_v{packed}", in_parts(strided)],
        v_scales: In[block.scale, f"pages heads_kv page dim_v/{block.block}", in_parts(loose)],
        block_table: In[i32, "sequences table", loose],
        key_ends: In[i32, "sequences", unaligned],
        query_starts: In[i32, "sequences", unaligned] = None,
        query_ends: In[i32, "sequences", unaligned] = None,
        k_global: In[f32, "heads_kv", unaligned] = None,
        row_shift: In[f32, "batch heads_kv group queries"] = None,
        *,
        partial: InOut[f32, "nodes batch heads_kv group queries dim_v"],
        row_max: Out[f32, "nodes batch heads_kv group queries"],
        row_sum: Out[f32, "nodes batch heads_kv group queries"],
        scale: Scalar[f32],
        softcap: Scalar[f32] = 0.0,
        left: Scalar[i32],
        right: Scalar[i32],
    ):
        one = [1.0] if block.two_level else []
        sequences = (block_table, key_ends, query_starts, query_ends)
        options = dict(scale=scale, softcap=softcap, left=left, right=right)
        k, v = block.decode(k, k_scales, *one), block.decode(v, v_scales, *one)
        exact_nodes(q, k, v, *sequences, k_global, row_shift, (partial, row_max, row_sum), **options)

    return _declared(format, body, _BLOCK_VALUES if block.two_level else _NARROW_VALUES)


# Format of a cache -> the kernel that reads it.
PAGED_ATTENTION = {"bf16": _declare_plain(), **{format: _declare_blocks(format) for format in ("mxfp8", "mxfp4", "nvfp4")}}
