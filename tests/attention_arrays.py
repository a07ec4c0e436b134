"""Shared by the attention tests: format pairs, random arrays, operands quantized beforehand, comparisons."""

import numpy as np

import ptxrt
from ptxrt import launch
from ptxrt.blocks import BLOCK_FORMATS
from ptxrt.ops.attention import ATTENTION

# (format of Q and K, format of V) of every kernel that takes all options; BLOCK_WAYS are those whose operands may be
# quantized beforehand.
WAYS = [formats[:2] for formats in ATTENTION if formats[2] is None]
BLOCK_WAYS = [(qk, pv) for qk, pv in WAYS if ATTENTION[qk, pv, None].formats]


def way_of(qk: str, pv: str):
    """The table entry of a format pair."""
    return ATTENTION[qk, pv, None]


def largest_dim(qk: str, pv: str) -> int:
    """The largest head dimension of a format pair."""
    return max(np.ravel(list(way_of(qk, pv).kernel.variants.values())[0]))


def rounding(qk: str, pv: str) -> float:
    """The relative L2 that rounding the weights may cost: float32 output against float64 attention of the operands'
    values."""
    return way_of(qk, pv).kernel.tolerance("out_f32").relative_l2


def block_of(format: str) -> int:
    """Values that share a scale; 1 in 16-bit formats."""
    return BLOCK_FORMATS[format].block if format in BLOCK_FORMATS else 1


def random_qkv(rng, batch, heads, queries, keys, dim, *, heads_kv=None, dim_v=None, dtype=np.float32):
    """Normal q [B, H, Sq, D], k [B, Hkv, Sk, D] and v [B, Hkv, Sk, Dv]; heads_kv defaults to heads, dim_v to dim."""
    heads_kv, dim_v = heads_kv or heads, dim_v or dim
    shapes = (batch, heads, queries, dim), (batch, heads_kv, keys, dim), (batch, heads_kv, keys, dim_v)
    return tuple(rng.standard_normal(shape, dtype=np.float32).astype(dtype) for shape in shapes)


def operands(q, k, v, qk, pv, dim=None, **options):
    """q, k and v as quantized operands; `smooth` applies to k alone."""
    smooth = options.pop("smooth", None)
    return [
        ptxrt.quantize_operand(q, qk, role="q", **options),
        ptxrt.quantize_operand(k, qk, role="k", smooth=smooth, dim=dim, **options),
        ptxrt.quantize_operand(v, pv, role="v", dim=dim, **options),
    ]


def held(q, k, v, qk, pv) -> tuple:
    """The values that the kernel multiplies, whether q, k and v are arrays or operands."""
    return way_of(qk, pv).values(q, k, v)


def relative(got, want) -> float:
    """The relative L2 between two arrays."""
    return ptxrt.compare(got, want).relative_l2


def bits(x: np.ndarray) -> np.ndarray:
    """The bits of elements as unsigned integers, so that NaN and signed zeros compare."""
    return x.view({2: np.uint16, 4: np.uint32}[x.itemsize])


def bits_by_blocks(backend, monkeypatch, halved: bool, q, k, v, **options):
    """(bits of out, bits of lse, entry of attention) of a launch that takes half blocks if `halved` and the kernel has
    them, else whole blocks."""
    monkeypatch.setattr(launch, "takes_halves", lambda *_: halved)
    backend.remembered.calls.clear()
    try:
        with ptxrt.trace() as trace:
            out, lse = ptxrt.attention(q, k, v, return_lse=True, out_dtype=np.float32, **options)
    finally:
        backend.remembered.calls.clear()
    kernels = [run for run in trace.launches if run.kernel.startswith("attention_")]
    (entry,) = (run.entry for run in kernels if run.kernel != "attention_merge")
    return bits(out), bits(lse), entry
