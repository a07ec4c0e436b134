"""Calls of the public interface for type checkers: tests/test_types.py expects an error in each line marked as wrong
and in no other."""

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import ptxrt
from ptxrt.typing import Array, BlockFormatName

x: NDArray[np.float32] = np.zeros((2, 64), np.float32)
q: NDArray[np.float16] = np.zeros((1, 2, 8, 64), np.float16)
d: ptxrt.DeviceArray = ptxrt.to_device(x)
dq: ptxrt.DeviceArray = ptxrt.to_device(q)

# Quantizing
packed: ptxrt.QuantizedArray = ptxrt.quantize(x, "mxfp4")
ptxrt.quantize(
    d, "nvfp4", axis=0, scale_rule="four_over_six", scale_layout="128x4", global_scale=0.5, pad=True, out=None
)
ptxrt.quantize(x, "mxfp9")  # wrong: no such format
ptxrt.quantize(x)  # wrong: no format
ptxrt.quantize("x", "mxfp4")  # wrong: no array
ptxrt.quantize(x, "mxfp4", scale_rule="nearest")  # wrong: no such rule
ptxrt.quantize(x, "mxfp4", scale_layout="4x128")  # wrong: no such layout
ptxrt.quantize(x, "mxfp4", rule="floor")  # wrong: no such option
ptxrt.quantize(x, "mxfp4", -1)  # wrong: options have names
ptxrt.quantize(x, "mxfp4", axis="last")  # wrong: no whole number
host: NDArray[Any] = ptxrt.dequantize(packed, np.float16, out=x)
on_device: ptxrt.DeviceArray = ptxrt.dequantize(packed, out=d)
ptxrt.dequantize(x)  # wrong: no QuantizedArray
packed.save("x.npz")
packed.save(3)  # wrong: no path
loaded: ptxrt.QuantizedArray = ptxrt.QuantizedArray.load("x.npz")
number: float = ptxrt.compare(host, x).relative_l2
number = ptxrt.compare(host, x).relative_l3  # wrong: no such figure
swizzled: NDArray[Any] = ptxrt.swizzle_scales(packed.scales)
scales: ptxrt.DeviceArray = ptxrt.unswizzle_scales(d, (2, 2), axis=0)


def words(name: BlockFormatName, array: Array) -> ptxrt.QuantizedArray:
    """Names of formats have types, too."""
    return ptxrt.quantize(array, name)


words("nvfp4", d)
words("fp4", d)  # wrong: no such format

# Attention
out: NDArray[Any] = ptxrt.attention(q, q, q, causal=True, window=(256, None), scale=0.1, softcap=30.0)
pair: tuple[NDArray[Any], NDArray[Any]] = ptxrt.attention(q, q, q, qk="nvfp4", pv="mxfp8", return_lse=True)
sums: tuple[NDArray[Any], NDArray[Any], NDArray[Any]] = ptxrt.attention(q, q, q, normalize=False)
there: ptxrt.DeviceArray = ptxrt.attention(dq, dq, dq, key_lengths=[8], sinks=[0.0, 1.0], out_dtype=ml_dtypes.bfloat16)
both: tuple[ptxrt.DeviceArray, ptxrt.DeviceArray] = ptxrt.attention(
    dq, dq, dq, return_lse=True, mask=np.ones((8, 8), bool)
)
lone: NDArray[Any] = ptxrt.attention(q, q, q, return_lse=True)  # wrong: two results
ptxrt.attention(q, q)  # wrong: no v
ptxrt.attention(q, q, "v")  # wrong: no array
ptxrt.attention(q, q, q, qk="fp8")  # wrong: no such format
ptxrt.attention(q, q, q, layout="bsd")  # wrong: no such layout
ptxrt.attention(q, q, q, window=3)  # wrong: no pair
ptxrt.attention(q, q, q, casual=True)  # wrong: no such option
k: ptxrt.Operand = ptxrt.quantize_operand(q, "nvfp4", role="k", smooth=True)
ptxrt.attention(q, k, k, qk="nvfp4", smooth_q=True)
ptxrt.quantize_operand(q, "nvfp4")  # wrong: no role
ptxrt.quantize_operand(q, "nvfp4", role="keys")  # wrong: no such role
ptxrt.quantize_operand(q, "mxfp6_e3m2", role="k")  # wrong: no such operand
merged: tuple[NDArray[Any], NDArray[Any]] = ptxrt.merge([out, out], [pair[1], pair[1]])
ptxrt.merge([out, out], lse=[pair[1]])  # wrong: no such option

# Products
ptxrt.matmul(x, x, bias=x[0], activation=("swiglu", dict(limit=7.0)), out_format="nvfp4")
ptxrt.matmul(x, x, activation="sigmoid")  # wrong: no such activation
ptxrt.matmul(x, "x")  # wrong: no array
ptxrt.matmul(x, x, transpose=True)  # wrong: no such option

product: NDArray[Any] = ptxrt.matmul(x, x, transpose_b=True, alpha=2.0)
narrow: ptxrt.QuantizedArray = ptxrt.matmul(d, packed, out_format="mxfp8")
ptxrt.matmul(x, x, out_format="bf16")  # wrong: a result in no block format
routing = ptxrt.route(np.zeros((4, 2), np.int32), 8)
rows: ptxrt.DeviceArray = ptxrt.matmul_grouped(d, packed, routing.starts, rows=routing.order, alpha=d)
ptxrt.matmul_grouped(d, packed)  # wrong: no groups
ptxrt.matmul_grouped(d, packed, [0, 2], transpose_a=True)  # wrong: no such option
ptxrt.route(np.zeros((4, 2), np.int32))  # wrong: no number of experts
summed: NDArray[Any] = ptxrt.combine(x, routing, x)
ptxrt.combine(x, x, x)  # wrong: no routing
woven: NDArray[Any] = ptxrt.interleave_rows(x, x)
ptxrt.interleave_rows(x, packed)  # wrong: an array beside a QuantizedArray

# Norms, gates, activations, rows
normed: NDArray[Any] = ptxrt.rmsnorm(x, x[0], eps=1e-5, offset=1.0, rounding="16")
ready: ptxrt.QuantizedArray = ptxrt.rmsnorm(d, format="nvfp4", global_scale=1.0, scale_layout="128x4")
quantized, total = ptxrt.rmsnorm(d, residual=d, format="mxfp8")
total.to_numpy()
total.save("x.npz")  # wrong: an array, no QuantizedArray
ptxrt.rmsnorm(x, rounding="32")  # wrong: no such rounding
ptxrt.rmsnorm(x, format="mxfp6_e3m2")  # wrong: no format of results
centered: ptxrt.DeviceArray = ptxrt.layernorm(d, bias=d)
ptxrt.layernorm(d, offset=1.0)  # wrong: no such option
gated: ptxrt.DeviceArray = ptxrt.swiglu(d, interleaved=True, limit=7.0, row_weights=d)
ptxrt.swiglu(d, weights=d)  # wrong: no such option
activated: ptxrt.QuantizedArray = ptxrt.gelu(x, approximate="tanh", format="mxfp4")
ptxrt.gelu(x, approximate="erf")  # wrong: no such function
taken: NDArray[Any] = ptxrt.take_rows(x, [0, 1])
means: ptxrt.DeviceArray = ptxrt.mean_rows(d, [0, 2], normalize=False)
ptxrt.mean_rows(d)  # wrong: no sequences
largest: NDArray[Any] = ptxrt.argmax_rows(x)
angles: NDArray[Any] = ptxrt.rope_table(64, 128, yarn=dict(factor=2.0, length=64))
ptxrt.rope_table(64, "long")  # wrong: no whole number
turned: ptxrt.DeviceArray = ptxrt.rope(d, angles, [0, 1], style="pairs", first=2, inverse=True)
ptxrt.rope(d, angles, [0, 1], format="nvfp4", global_scale=1.0).save("x.npz")
ptxrt.rope(d, angles)  # wrong: no positions
ptxrt.rope(d, angles, [0, 1], style="quarters")  # wrong: no such style

# Caches in pages
cache = ptxrt.KVCache(8, 16, 2, 64, format="nvfp4", k_mean=x)
ptxrt.KVCache(8, 16, 2, 64, format="mxfp6_e3m2")  # wrong: no such cache
slots: NDArray[Any] = ptxrt.slots_of(np.zeros((1, 2), np.int32), [0], [0], 16)
cache.append(q[0], q[0], slots)
cache.append(q[0], slots)  # wrong: no v
paged: NDArray[Any] = ptxrt.attention_paged(q, cache, slots, [8], window=(15, 0), splits=2)
paged, paged_lse = ptxrt.attention_paged(q, cache, slots, [8], return_lse=True)
there = ptxrt.attention_paged(dq, cache, d, d, sinks=[0.0, 1.0])
appended: NDArray[Any] = ptxrt.append_qkv(x, cache, slots, [0, 1], angles, heads=4, style="pairs", q_weight=x[0])
queries: ptxrt.Operand = ptxrt.append_qkv((d, d, d), cache, d, d, d, heads=4, q_format="nvfp4", q_global=1.0)
ptxrt.append_qkv(x, cache, slots, [0, 1], angles)  # wrong: no number of heads
ptxrt.append_qkv(x, cache, slots, [0, 1], angles, heads=4, q_format="bf16")  # wrong: no format of queries
ptxrt.attention_paged(q, cache, slots)  # wrong: no lengths
ptxrt.attention_paged(q, cache, slots, [8], qk="nvfp4")  # wrong: the cache has the format
ptxrt.attention_paged(q, x, slots, [8])  # wrong: no cache

# Prepared calls, graphs, streams
prepared = ptxrt.prepare(ptxrt.quantize, d, "mxfp4", out=packed)
again: ptxrt.QuantizedArray = prepared(d)
count: int = len(prepared.launches)
ptxrt.prepare(ptxrt.quantize, d, "mxfp5")  # wrong: no such format
ptxrt.prepare(ptxrt.quantize, d, "mxfp4", axes=0)  # wrong: no such option
with ptxrt.graph() as g, ptxrt.Stream() as stream:
    ptxrt.quantize(d, "mxfp4", out=packed, stream=stream)
g.launch(stream)
g.launch("stream")  # wrong: no stream
with ptxrt.using("emulator"), ptxrt.trace(timing=True) as trace:
    ptxrt.synchronize()
ptxrt.using("gpu")  # wrong: no such machine
print(trace.rows(), ptxrt.machines()["native"].available, ptxrt.last_launches()[-1].grid, ptxrt.memory_info().used)
ptxrt.kernels()["transpose_naive"](d)

# Arrays
d[0, ...] = 2.5
d[...] = x
d["first"] = 1  # wrong: no index
copied: ptxrt.DeviceArray = ptxrt.zeros((2, 3), np.float16).T.astype(np.float32).copy()
shape: tuple[int, ...] = d.shape
view: ptxrt.DeviceArray = d[0, ::2, None, ...].reshape(-1, 1).transpose(1, 0)
d["first"]  # wrong: no index
d.reshape("all")  # wrong: no shape
d.sum()  # wrong: not there
ptxrt.empty((2, 3), np.float32).to_numpy().astype(np.float64)
ptxrt.to_device(x, device="first")  # wrong: no number
ptxrt.quantise(x, "mxfp4")  # wrong: no such function
try:
    ptxrt.load("kernel.ptx")["entry"]((1, 1, 1), 32, d, 3)
except ptxrt.EmulatorFault as fault:
    print(fault.line)
