"""Fused attention: declarations, references and the friendly `attention`."""

import math

import numpy as np

from ..accuracy import Tolerance
from ..array import as_arrays, as_output
from ..blocks import mxfp4
from ..errors import ArgumentError
from ..formats import bf16, f16, f32, format_of, i32
from ..kernel import In, Out, Scalar, kernel
from ..prepared import remembered

DIMS = tuple(range(32, 257, 32))


def visible(queries: int, keys: int, causal: bool) -> np.ndarray:
    """Which keys a query sees, bool [queries, keys]; causal is aligned at the bottom right.

    Key j is visible to query i if j <= i + keys - queries, so the last query sees every key.
    """
    if not causal:
        return np.ones((queries, keys), bool)
    return np.arange(keys) <= np.arange(queries)[:, None] + keys - queries


def visible_pairs(queries: int, keys: int, causal: bool) -> int:
    """How many pairs of query and key are visible."""
    if not causal:
        return queries * keys
    first = max(keys - queries + 1, 0)  # keys that the first query sees, or 0
    rows = min(queries, keys)  # queries that see at least one key
    return rows * (keys + max(first, 1)) // 2


def exact_attention(q, k, v, scale: float, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """Attention in float64: output [B, H, Sq, D] and log of the sum of exponentials [B, H, Sq].

    Rows that see no key give 0 and -inf. NaN in a visible score gives NaN in its row.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out, lse = np.zeros(q.shape), np.full(q.shape[:-1], -np.inf)
    shown = visible(q.shape[2], k.shape[2], causal)
    rows = shown.any(axis=1)
    with np.errstate(invalid="ignore"):
        for head in np.ndindex(*q.shape[:2]):
            scores = np.where(shown[rows], (q[head][rows] @ k[head].T) * scale, -np.inf)
            top = scores.max(axis=1, keepdims=True)
            weights = np.exp(scores - top)
            total = weights.sum(axis=1, keepdims=True)
            out[head][rows] = (weights @ v[head]) / total
            lse[head][rows] = (top + np.log(total))[:, 0]
    return out, lse


def _flops(*, batch, heads, queries, keys, dim, causal, scale):
    """Two products of `dim` multiply-adds for each visible pair."""
    return 4 * batch * heads * dim * visible_pairs(queries, keys, bool(causal))


_BF16_REASON = "weights are rounded to bfloat16 before the second product"


@kernel(
    grid="queries heads batch",
    variants=dict(dim=DIMS),
    cases=[
        *(
            dict(batch=1, heads=1, queries=70, keys=130, dim=dim, scale=dim**-0.5, **rest)
            for dim in DIMS
            # The compiler makes a path of its own for each choice of outputs, and one for masks that are not causal.
            for rest in (
                dict(causal=1, out_bf16=True),
                dict(causal=1, out_f32=True),
                dict(causal=0, out_f32=True, lse=True),
                dict(causal=1, out_bf16=True, out_f32=True, lse=True),
            )
        ),
        dict(batch=1, heads=2, queries=64, keys=128, dim=64, scale=0.125, causal=0, out_f32=True, lse=True),
        dict(batch=2, heads=1, queries=40, keys=72, dim=32, scale=0.2, causal=1, out_bf16=True, lse=True, format="f16"),
        dict(batch=1, heads=1, queries=136, keys=40, dim=32, scale=0.2, causal=1, out_f32=True, lse=True, format="f32"),
        dict(batch=1, heads=1, queries=1, keys=1, dim=32, scale=1.0, causal=0, out_f32=True, lse=True, format="f32"),
    ],
    tolerance=dict(
        out_bf16=Tolerance(_BF16_REASON + ", as is the result", relative_l2=3e-3, cosine=0.99999, gain=1e-3),
        out_f32=Tolerance(_BF16_REASON, relative_l2=2.5e-3, cosine=0.99999, gain=1e-3),
        lse=Tolerance("float32 scores and sums, approximate exponentials and logarithm", relative_l2=1e-5, absolute=1e-4),
    ),
    flops=_flops,
)
def attention_mxfp4_bf16(
    q: In[f32 | f16 | bf16, "batch heads queries dim"],
    k: In[f32 | f16 | bf16, "batch heads keys dim"],
    v: In[f32 | f16 | bf16, "batch heads keys dim"],
    out_bf16: Out[bf16, "batch heads queries dim"] = None,
    out_f32: Out[f32, "batch heads queries dim"] = None,
    lse: Out[f32, "batch heads queries"] = None,
    *,
    scale: Scalar[f32],
    causal: Scalar[i32] = 0,
):
    """Compute softmax(scale Q K^T) V with Q and K in MXFP4, weights and V in bfloat16.

    Q and K are quantized in the kernel, to the bytes that `quantize_mxfp4` gives. Sums and softmax are
    float32. With `causal` query i sees key j where j <= i + keys - queries; rows without keys give 0 and an
    `lse` of -inf. `lse` is the natural logarithm of the sum of exponentials of the scaled scores. NaN propagates;
    a block of Q or K with an infinity counts as NaN.
    The reference is float64 attention of the dequantized Q and K and of V rounded to bfloat16.
    """
    q, k = (mxfp4.decode(*mxfp4.encode(x)) for x in (q, k))
    out, sums = exact_attention(q, k, np.asarray(v, bf16.dtype), float(scale), bool(causal))
    for buffer in (out_bf16, out_f32):
        if buffer is not None:
            buffer[:] = out
    if lse is not None:
        lse[:] = sums


# (qk, pv, quantize) -> the kernel that computes it.
ATTENTION = {("mxfp4", "bf16", "in_kernel"): attention_mxfp4_bf16}


@remembered
def attention(
    q,
    k,
    v,
    *,
    qk="mxfp4",
    pv="bf16",
    quantize="in_kernel",
    causal=False,
    scale=None,
    return_lse=False,
    out_dtype=None,
    out=None,
    stream=None,
):
    """Compute softmax(scale Q K^T) V for q [B, H, Sq, D] and k, v [B, H, Sk, D] of float32, float16 or bfloat16.

    qk, pv, quantize: formats of the two products, and where the inputs are quantized.
    causal: query i sees key j where j <= i + Sk - Sq; rows without keys give 0 (and an lse of -inf).
    scale: finite; 1 / sqrt(D) where None.
    return_lse: also return the natural logarithm of the sum of exponentials, float32 [B, H, Sq].
    out_dtype: bfloat16 (where None) or float32; out: an array to write to, whose dtype then decides.
    stream: of the device; None is the library's own.

    Sq and Sk are at least 1, D is a multiple of 32 up to 256. NaN propagates. NumPy arrays give NumPy
    results; device arrays give device arrays, without waiting. ArgumentError for anything that does not fit.
    """
    chosen, arguments = attention_call(q, k, v, qk, pv, quantize, causal, scale, return_lse, out_dtype, out)
    return chosen(**arguments, stream=stream)


def attention_call(q, k, v, qk, pv, quantize, causal, scale, return_lse, out_dtype, out):
    """The kernel that `attention` runs and the arguments, by name, that it runs with; both as checked as there."""
    wanted = (qk, pv, quantize)
    chosen = ATTENTION.get(wanted) if all(isinstance(word, str) for word in wanted) else None
    if chosen is None:
        known = "; ".join(f"qk={a!r}, pv={b!r}, quantize={c!r}" for a, b, c in ATTENTION)
        raise ArgumentError(f"attention: no kernel for qk={qk!r}, pv={pv!r}, quantize={quantize!r}; there is {known}")
    q, k, v = as_arrays("attention", q=q, k=k, v=v)
    if scale is None:
        scale = 1 / math.sqrt(q.shape[-1]) if q.shape and q.shape[-1] else 1.0
    if not _is_finite(scale):
        raise ArgumentError(f"attention: scale is {scale!r}; pass a finite number, or None for 1 / sqrt(D)")
    if out is not None:
        out = as_output("attention", "out", out)
    output = _output_argument(chosen, out, out_dtype)
    outputs = {output: True if out is None else out, "lse": bool(return_lse)}
    return chosen, dict(q=q, k=k, v=v, **outputs, scale=scale, causal=bool(causal))


def _is_finite(value) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, ValueError, OverflowError):
        return False


def _output_argument(chosen, out, out_dtype) -> str:
    """The name of the output that has the dtype asked for; bfloat16 where nothing says otherwise."""
    try:
        asked = None if out_dtype is None else np.dtype(out_dtype)
    except TypeError:
        asked = out_dtype
    given = getattr(out, "dtype", None)
    dtype = given if asked is None and given is not None else bf16.dtype if asked is None else asked
    member = format_of(dtype, (bf16, f32)) if isinstance(dtype, np.dtype) else None
    if member is None or (given is not None and given != dtype):
        came = f"out_dtype={out_dtype!r}" + (f" with out of {given}" if given is not None else "")
        raise ArgumentError(f"attention: {came}; results are bfloat16 or float32, and out has the dtype asked for")
    return f"out_{member.name}"
