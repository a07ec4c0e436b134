"""How fast the kernels of the first release run on this GPU, beside PyTorch's on the same tensors in the same run.

    python benchmarks/first_light.py [--machine portable]

Needs PyTorch for tensors, for the copy that stands for the memory's speed, and for its FlashAttention-2.
"""

from __future__ import annotations

import argparse

import torch
from timing import paired
from torch.nn.attention import SDPBackend, sdpa_kernel

import ptxrt

TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def keep_busy() -> None:
    """About a millisecond of nothing on the current stream."""
    torch.cuda._sleep(2_000_000)


def attention_row(batch, heads, seq, dim, causal, dtype, stream) -> str:
    """One shape of attention: TFLOPS of ours and of FlashAttention-2 (on bfloat16 of the same tensors)."""
    q, k, v = (torch.randn(batch, heads, seq, dim, device="cuda").to(TYPES[dtype]) for _ in range(3))
    out = torch.empty(batch, heads, seq, dim, device="cuda", dtype=torch.bfloat16)
    ours = [ptxrt.to_device(x) for x in (q, k, v, out)]
    peer = [x.to(torch.bfloat16) for x in (q, k, v)]

    def flash_attention_2():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            torch.nn.functional.scaled_dot_product_attention(*peer, is_causal=causal)

    times = paired(
        {
            "ptxrt": lambda: ptxrt.attention(*ours[:3], qk="mxfp4", pv="bf16", quantize="in_kernel", causal=causal, out=ours[3], stream=stream),
            "fa2": flash_attention_2,
        },
        stream,
        keep_busy,
    )
    flops = 4 * batch * heads * seq * seq * dim / (2 if causal else 1)
    rate = {name: flops / t.median / 1e9 for name, t in times.items()}
    shape = f"b{batch} h{heads} s{seq} d{dim}{' causal' if causal else ''}"
    return (
        f"attention mxfp4+bf16 {shape:24} {dtype:9} {rate['ptxrt']:7.1f} TFLOPS "
        f"({times['ptxrt'].spread} ms)   SDPA FlashAttention-2 bf16 {rate['fa2']:7.1f} ({times['fa2'].spread} ms)"
    )


def quantizer_row(rows, cols, dtype, stream) -> str:
    """One shape of quantize and dequantize: bytes read and written per second, beside a device copy."""
    x = torch.randn(rows, cols, device="cuda").to(TYPES[dtype])
    y = torch.empty_like(x)
    codes = torch.empty(rows, cols // 2, device="cuda", dtype=torch.uint8)
    scales = torch.empty(rows, cols // 32, device="cuda", dtype=torch.uint8)
    ours, back = ptxrt.to_device(x), ptxrt.to_device(y)
    packed = ptxrt.QuantizedArray(
        ptxrt.to_device(codes), ptxrt.to_device(scales), format="mxfp4", shape=(rows, cols)
    )
    times = paired(
        {
            "quantize": lambda: ptxrt.quantize(ours, "mxfp4", out=packed, stream=stream),
            "dequantize": lambda: ptxrt.dequantize(packed, dtype=back.dtype, out=back, stream=stream),
            "copy": lambda: y.copy_(x),
        },
        stream,
        keep_busy,
    )
    moved = {"copy": 2 * x.nbytes}
    rates = {n: moved.get(n, x.nbytes + codes.nbytes + scales.nbytes) / t.median / 1e6 for n, t in times.items()}
    figures = "   ".join(f"{n} {rates[n]:6.0f} GB/s ({t.spread} ms)" for n, t in times.items())
    return f"mxfp4 {rows}x{cols} {dtype:9} {figures}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="portable", choices=["portable", "native"])
    machine = parser.parse_args().machine
    print(ptxrt.machines()[machine])
    torch.manual_seed(0)
    side = torch.cuda.Stream()
    with ptxrt.using(machine), torch.cuda.stream(side):
        for dtype in TYPES:
            for batch, heads, seq, dim, causal in (
                (4, 32, 2048, 128, False),
                (4, 32, 2048, 128, True),
                (4, 32, 2048, 64, False),
                (4, 16, 2048, 256, False),
            ):
                print(attention_row(batch, heads, seq, dim, causal, dtype, side.cuda_stream), flush=True)
        for dtype in TYPES:
            print(quantizer_row(8192, 8192, dtype, side.cuda_stream), flush=True)


if __name__ == "__main__":
    main()
