"""Matrix products in every pair of formats, compared with torch.matmul in bf16, in one run.

    python benchmarks/gemm_vs_torch.py [--machine portable] [--shape m8192n8192k8192]... [--repeat 20] [--json]

Needs PyTorch for CUDA. Operands are quantized before; C is bf16. Up to 64 rows, each call multiplies by several
matrices of weights in turn, together four times the size of the L2, so that they are read from memory; GB/s count each
side's own weights. Shapes are those of `ptxrt bench gemm`. Docs: docs/benchmarks.md.
"""

from __future__ import annotations

import peers

from ptxrt.bench.products import PRODUCTS, READ, SHAPES, Shape, Side, read_call
from ptxrt.bench.timing import FLUSH_CACHES, Clock, about, title
from ptxrt.describe import text_table
from ptxrt.formats import bf16, f16

TORCH = "torch.matmul bf16"


def torch_side(torch, a, b, count) -> Side:
    """Return torch.matmul by several copies of the weights; `count` gives their number from their bytes."""
    weights = [b, *(b.clone() for _ in range(count(b.nbytes) - 1))]
    out = torch.empty((a.shape[0], b.shape[0]), dtype=torch.bfloat16, device="cuda")

    def call():
        for x in weights:
            torch.matmul(a, x.T, out=out)

    return Side(call, len(weights), len(weights) * b.nbytes, out)


def measure(torch, backend, shapes, repeat: int) -> list[dict]:
    """Return a row for each shape and side."""
    import numpy as np

    stream, side = peers.common_stream(torch)
    caches = FLUSH_CACHES * backend.attribute("L2_CACHE_SIZE")
    rows = []
    with stream, torch.cuda.stream(side):
        clock = Clock(stream, repeat)
        for shape in shapes:
            sizes = (shape.rows, shape.depth), (shape.cols, shape.depth)
            host = [np.random.default_rng(i).standard_normal(size, np.float32) for i, size in enumerate(sizes)]
            (a, a_torch), (b, b_torch) = (peers.both(torch, x.astype(bf16.dtype), stream) for x in host)
            halves = [peers.both(torch, x.astype(f16.dtype), stream)[0] for x in host]
            count = (lambda nbytes: -(-caches // nbytes)) if shape.few else (lambda nbytes: 1)
            sides = {TORCH: torch_side(torch, a_torch, b_torch, count)}
            sides |= {"+".join(pair): Side.of(*(halves if "f16" in pair else (a, b)), pair, count) for pair in PRODUCTS}
            calls = {name: side.call for name, side in sides.items()}
            if shape.few:
                calls[READ] = read_call(max(side.bytes for side in sides.values()), backend)
            times = clock.times(calls)
            for name, side in sides.items():
                spent = times[name].median / side.weights
                row = {"side": name, "shape": vars(shape), "weights": side.weights, **times[name].fields()}
                row |= {"milliseconds_each": spent, "tflops": shape.flops / spent / 1e9}
                row["gb_per_s"] = side.bytes / times[name].median / 1e6 if shape.few else None
                if shape.few:
                    row["read_gb_per_s"] = max(side.bytes for side in sides.values()) / times[READ].median / 1e6
                row["times_torch"] = times[TORCH].median / sides[TORCH].weights / spent
                rows.append(row)
    return rows


def table(head: dict, rows: list[dict]):
    """Format the rows for a terminal."""
    yield f"matrix products on {title(head['machine'])}; PyTorch {head['torch']}"
    yield f"medians of {rows[0]['repeat']}, all sides of a shape in turns"
    cells = [["shape", "side", "ms", "TFLOPS", "GB/s", "a read's", "x torch"]]
    for row in rows:
        of_bytes = ["", ""] if row["gb_per_s"] is None else [f"{row['gb_per_s']:.0f}", f"{row['read_gb_per_s']:.0f}"]
        cells.append(
            [
                *(str(Shape(**row["shape"])), row["side"], f"{row['milliseconds_each']:.4f}", f"{row['tflops']:.1f}"),
                *(*of_bytes, f"{row['times_torch']:.2f}"),
            ]
        )
    yield from text_table(cells)


def main() -> None:
    """Print the table."""
    torch, options, backend = peers.torch_on_gpu(__doc__, Shape.parse)
    head = {"machine": about(backend), "torch": torch.__version__}
    rows = measure(torch, backend, options.shape or SHAPES, options.repeat)
    peers.report(options, head, rows, table(head, rows))


if __name__ == "__main__":
    main()
