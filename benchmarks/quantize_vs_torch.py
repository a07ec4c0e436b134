"""MXFP4 and NVFP4 quantizers, compared with torch.compile of plain PyTorch ones and with PyTorch's copy, in one run.

    python benchmarks/quantize_vs_torch.py [--machine portable] [--shape 8192x8192]... [--repeat 20] [--json]

Needs PyTorch for CUDA. Rates count the bytes that a quantizer must move: x, codes and scales once, and x once more if
the NVFP4 global scale is computed from it. `differing` counts bytes of codes and scales that differ between the sides:
Triton's division is not correctly rounded by default. Docs: docs/benchmarks.md.
"""

from __future__ import annotations

import numpy as np
import peers

import ptxrt
from ptxrt.bench.quantizers import SHAPES, parse_shape
from ptxrt.bench.timing import L2_STATES, Clock, about, title
from ptxrt.describe import text_table
from ptxrt.formats import FORMATS


def cases(x, scale):
    """Yield (format, source of its global scale, options of our call, PyTorch's function and arguments, bytes of x
    read).
    """
    import torch_quantizers

    ours, theirs = scale
    yield "mxfp4", None, {}, torch_quantizers.mxfp4, (x,), x.nbytes
    yield "nvfp4", "given", {"global_scale": ours}, torch_quantizers.nvfp4, (x, theirs), x.nbytes
    yield "nvfp4", "computed", {}, torch_quantizers.nvfp4_of_own_scale, (x,), 2 * x.nbytes


def measure(torch, shapes, repeat: int) -> list[dict]:
    """Return a row for each shape, dtype, format and state of the L2."""
    stream, side = peers.common_stream(torch)
    rows = []
    with stream, torch.cuda.stream(side):
        clock = Clock(stream, repeat)
        for shape in shapes:
            host = np.random.default_rng(0).standard_normal(shape, np.float32)
            for dtype in ("f32", "bf16"):
                array, x = peers.both(torch, host.astype(FORMATS[dtype].dtype), stream)
                y = torch.empty_like(x)
                scale = peers.both(torch, ptxrt.quantize(array, "nvfp4").global_scale.to_numpy(), stream)
                for format, source, given, peer, arguments, read in cases(x, scale):
                    torch.compiler.reset()  # compile separately for each shape and dtype
                    compiled = torch.compile(peer, dynamic=False)
                    theirs = compiled(*arguments)
                    out = ptxrt.quantize(array, format, **given)
                    got = [torch.from_dlpack(a.view(np.uint8)) for a in (out.codes, out.scales)]
                    differing = sum(int((a != b.view(torch.uint8)).sum()) for a, b in zip(got, theirs))
                    prepared = ptxrt.prepare(ptxrt.quantize, array, format, **given, out=out)
                    sides = {
                        "ptxrt": lambda: prepared(array),
                        "torch": lambda: compiled(*arguments),
                        "copy": lambda: y.copy_(x),
                    }
                    moved = read + sum(a.nbytes for a in got)
                    for l2 in L2_STATES:
                        times = clock.times(sides, l2)
                        rate = {
                            name: (2 * x.nbytes if name == "copy" else moved) / t.median / 1e6
                            for name, t in times.items()
                        }
                        rows.append(
                            {
                                **{
                                    "format": format,
                                    "global_scale": source,
                                    "dtype": dtype,
                                    "shape": list(shape),
                                    "l2": l2,
                                    "bytes": moved,
                                },
                                **{"gb_per_s": rate, "times": {name: t.fields() for name, t in times.items()}},
                                **{
                                    "share_of_copy": rate["ptxrt"] / rate["copy"],
                                    "times_torch": rate["ptxrt"] / rate["torch"],
                                },
                                "differing": differing,
                            }
                        )
    return rows


def table(head: dict, rows: list[dict]):
    """Format the rows for a terminal."""
    yield f"quantize on {title(head['machine'])}; PyTorch {head['torch']}"
    yield (
        f"medians of {rows[0]['times']['copy']['repeat']} (fastest..slowest ms), the three sides in turns; GB/s of "
        "bytes read and written"
    )
    names = ("ptxrt", "torch", "copy")
    cells = [
        [
            "format",
            "dtype",
            "shape",
            "L2",
            "ptxrt GB/s",
            "torch.compile GB/s",
            "copy GB/s",
            "of copy",
            "x torch",
            "differing",
        ]
    ]
    for row in rows:
        times = row["times"]
        sides = [f"{row['gb_per_s'][n]:.0f} ({times[n]['fastest']:.4f}..{times[n]['slowest']:.4f})" for n in names]
        source = f", scale {row['global_scale']}" if row["global_scale"] else ""
        shape = "x".join(map(str, row["shape"]))
        cells.append(
            [
                *(row["format"] + source, row["dtype"], shape, row["l2"], *sides),
                *(f"{row['share_of_copy']:.1%}", f"{row['times_torch']:.2f}", str(row["differing"])),
            ]
        )
    yield from text_table(cells)


def main() -> None:
    """Print the table."""
    torch, options, backend = peers.torch_on_gpu(__doc__, parse_shape)
    head = {"machine": about(backend), "torch": torch.__version__}
    rows = measure(torch, options.shape or SHAPES, options.repeat)
    peers.report(options, head, rows, table(head, rows))


if __name__ == "__main__":
    main()
