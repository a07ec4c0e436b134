"""What the tests of attention share: the ways to compute it, random arrays, operands quantized before, comparisons."""

import numpy as np

import ptxrt
from ptxrt.blocks import BLOCK_FORMATS
from ptxrt.ops.attention import ATTENTION

# (format of Q and K, format of V) of every way that takes all options, and of those whose operands may be quantized
# before.
WAYS = [formats[:2] for formats in ATTENTION if formats[2] is None]
BLOCK_WAYS = [(qk, pv) for qk, pv in WAYS if ATTENTION[qk, pv, None].formats]


def way_of(qk: str, pv: str):
    """The entry of the table."""
    return ATTENTION[qk, pv, None]


def largest_dim(qk: str, pv: str) -> int:
    """The largest head dimension of a way."""
    return max(np.ravel(list(way_of(qk, pv).kernel.variants.values())[0]))


def rounding(qk: str, pv: str) -> float:
    """The relative L2 that rounding the weights may cost, float32 output against float64 of what the operands hold."""
    return way_of(qk, pv).kernel.tolerance("out_f32").relative_l2


def block_of(format: str) -> int:
    """Values that share a scale; 1 in 16 bits."""
    return BLOCK_FORMATS[format].block if format in BLOCK_FORMATS else 1


def random_qkv(rng, batch, heads, queries, keys, dim, *, heads_kv=None, dim_v=None, dtype=np.float32):
    """Normal q, k and v; heads_kv and dim_v are those of q where they are not given."""
    heads_kv, dim_v = heads_kv or heads, dim_v or dim
    shapes = (batch, heads, queries, dim), (batch, heads_kv, keys, dim), (batch, heads_kv, keys, dim_v)
    return tuple(rng.standard_normal(shape, dtype=np.float32).astype(dtype) for shape in shapes)


def operands(q, k, v, qk, pv, dim=None, **options):
    """q, k and v quantized before; `smooth` goes to k alone."""
    smooth = options.pop("smooth", None)
    return [
        ptxrt.quantize_operand(q, qk, role="q", **options),
        ptxrt.quantize_operand(k, qk, role="k", smooth=smooth, dim=dim, **options),
        ptxrt.quantize_operand(v, pv, role="v", dim=dim, **options),
    ]


def held(q, k, v, qk, pv) -> tuple:
    """What is multiplied where q, k and v come as arrays or operands."""
    return way_of(qk, pv).values(q, k, v)


def relative(got, want) -> float:
    """The relative L2 between two arrays."""
    return ptxrt.compare(got, want).relative_l2


def bits(x: np.ndarray) -> np.ndarray:
    """Elements as whole numbers, so that NaN and signed zeros compare."""
    return x.view({2: np.uint16, 4: np.uint32}[x.itemsize])
