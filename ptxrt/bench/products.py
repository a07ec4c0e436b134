"""Matrix products: time, TFLOPS, the share of the card's measured MMA rate; for few rows bytes of weights per second.

Few rows are bound by the bandwidth of the memory with the weights. They are timed as nodes of a graph, as a model that
decodes calls them, and as calls in a stream. They are compared with kernels that only read as many bytes: one kernel
that reads all matrices, and a kernel for each matrix, as nodes of a graph."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..accuracy import compare
from ..array import DeviceArray, empty, to_device
from ..backend import Backend
from ..blocks import BLOCK_FORMATS
from ..describe import text_table
from ..errors import ArgumentError
from ..formats import FORMATS, bf16
from ..graphs import graph
from ..kernel import Kernel
from ..ops.gemm import PRODUCTS, matmul, quantized
from ..ops.gemm_call import FEW_ROWS
from ..ops.operands import operand_rule
from ..ops.place import Place
from ..ops.probes import mma_rate_bf16, mma_rate_mxf4, mma_rate_mxf4nvf4, mma_rate_mxf8f6f4_e4m3
from ..ops.quantized import QuantizedArray
from ..ops.scales import amax, fill_f32
from ..prepared import prepare
from . import plots
from .rates import Rate
from .timing import FLUSH_CACHES, REPEAT, WARM, Clock, about, check_fits, checked_repeat, gpu, title

# (format of A, format of B) -> the probe of their MMA on sm_12x; all others are multiplied in 16 bits.
RATES: dict[tuple[str, str], Kernel] = {
    ("mxfp8", "mxfp8"): mma_rate_mxf8f6f4_e4m3,
    ("mxfp8", "mxfp4"): mma_rate_mxf8f6f4_e4m3,
    ("mxfp4", "mxfp4"): mma_rate_mxf4,
    ("nvfp4", "nvfp4"): mma_rate_mxf4nvf4,
}
# The state of the L2 for few rows: it holds no weights of the next product, because those of other products were read
# since.
ROTATING = "rotating"
READ, NODE_READ = "read", "node_read"
STREAM = "stream"
# What is timed beside few rows of each pair.
BESIDE = STREAM, READ, NODE_READ
# Rows and columns whose results are compared with float64.
CHECKED = 64


@dataclass(frozen=True)
class Shape:
    """The sizes of one product: C [rows, cols], K of `depth`. As text: m8192n8192k8192."""

    rows: int
    cols: int
    depth: int

    def __str__(self) -> str:
        return f"m{self.rows} n{self.cols} k{self.depth}"

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """Parse letters and numbers: m rows, n columns, k depth."""
        found = re.fullmatch(r"m([1-9]\d*)n([1-9]\d*)k([1-9]\d*)", text.replace(" ", ""))
        if not found:
            raise ArgumentError(f"the shape of a product is {text!r}; write m8192n8192k8192")
        return cls(*map(int, found.groups()))

    @property
    def flops(self) -> int:
        """The flops: a multiplication and an addition for each element of A and column of C."""
        return 2 * self.rows * self.cols * self.depth

    @property
    def few(self) -> bool:
        """Whether rows are so few that weights are read once."""
        return self.rows <= FEW_ROWS


SHAPES = tuple(
    Shape(*sizes)
    for sizes in (
        *((8192, 8192, 8192), (512, 4096, 4096), (128, 4096, 4096)),
        *((rows, 8192, 8192) for rows in (64, 16, 4, 1)),
        (1, 4096, 4096),
    )
)


def parse_pair(text: str) -> tuple[str, str]:
    """Parse (format of A, format of B) from A+B, or from one for both; ArgumentError for pairs without a kernel."""
    words = text.split("+")
    pair = words[0], words[-1]
    if len(words) > 2 or pair not in PRODUCTS:
        known = ", ".join("+".join(pair) for pair in PRODUCTS)
        raise ArgumentError(f"bench gemm: there is no product {text!r}; write A+B, of which there is {known}")
    return pair


def operand(x: DeviceArray, format: str) -> DeviceArray | QuantizedArray:
    """Return x as an operand in a format, in memory of its own."""
    if format not in BLOCK_FORMATS:
        return x.copy()
    return quantized(x, format, operand_rule(format), None, Place([x], None))


@dataclass(frozen=True)
class Side:
    """The timed call for a pair of formats: it multiplies by each of `weights` matrices in turn. Also their bytes."""

    call: Callable[[], Any]
    weights: int
    bytes: int
    out: DeviceArray

    @classmethod
    def of(cls, a: DeviceArray, b: DeviceArray, pair: tuple[str, str], count: Callable[[int], int]) -> "Side":
        """Make operands in a pair of formats. count: gives the number of matrices from the bytes of one."""
        first, weights = operand(a, pair[0]), [operand(b, pair[1])]
        weights += [operand(b, pair[1]) for _ in range(count(weights[0].nbytes) - 1)]
        out = empty((a.shape[0], b.shape[0]), bf16.dtype, device=a.device)
        calls = [prepare(matmul, first, x, out=out) for x in weights]

        def call():
            for prepared, x in zip(calls, weights):
                prepared(first, x)

        return cls(call, len(weights), sum(x.nbytes for x in weights), out)

    def gathered(self) -> Callable[[], Any]:
        """Return the launch of a graph of the call."""
        with graph() as found:
            self.call()
        return found.launch


def read_call(nbytes: int, backend: Backend) -> Callable[[], Any]:
    """Return a call that reads `nbytes` bytes and writes almost nothing."""
    x = _read_array(nbytes, backend)
    partial = amax(x, blocks=4 * backend.attribute("MULTIPROCESSOR_COUNT"))
    return lambda: amax(x, partial=partial, blocks=partial.size)


def read_nodes(nbytes: int, count: int, backend: Backend) -> Callable[[], Any]:
    """Return the launch of a graph whose `count` nodes read `nbytes` bytes each, of different memory."""
    parts = [_read_array(nbytes, backend) for _ in range(count)]
    # Short reads are quickest with many blocks, long ones are as quick as with fewer.
    partial = amax(parts[0], blocks=8 * backend.attribute("MULTIPROCESSOR_COUNT"))
    with graph() as found:
        for x in parts:
            amax(x, partial=partial, blocks=partial.size)
    return found.launch


def _read_array(nbytes: int, backend: Backend) -> DeviceArray:
    x = empty((max(nbytes // 4, 1),), np.float32, device=backend.ordinal)
    return fill_f32(x=x, value=1.0, count=x.size)


def product_rows(
    pairs: Sequence[tuple[str, str]] = (), shapes: Sequence[Shape] = (), repeat: int = REPEAT
) -> list[dict[str, Any]]:
    """Time `matmul` on the current GPU machine; one row for each pair of formats and Shape.

    Empty choices mean all pairs with a kernel, and SHAPES. Operands are normal values, quantized before; C is bf16. All
    pairs of a shape and the MMA rates are timed in turns. Up to 64 rows, a call multiplies by several matrices of
    weights, together four times the size of the L2, so that none is cached when it is read; results are those of one
    product. Such a call is a graph of the products; the products in a stream are timed beside it.
    Two reads are timed as well: one kernel that reads the bytes of all matrices, and a graph of kernels that read those
    of one matrix each. Neither begins before the launch ahead has ended.
    Fields: a, b, shape (by name), l2 ("warm" or "rotating"), weights (matrices), milliseconds (median), fastest,
    slowest, repeat, tflops, mma_tflops (of the rate probe, by name), share_of_mma_rate, relative_l2 (of the first 64
    rows and columns, against float64 products of the normal values); for few rows also bytes (codes and scales of the
    weights), gb_per_s, read_gb_per_s (of the kernel that reads all matrices), share_of_read, node_read_gb_per_s (of the
    graph of reads), share_of_node_read, stream_milliseconds (median in a stream). Fields that do not apply are None.
    ArgumentError for invalid shapes; MachineError on the emulator.
    """
    backend = gpu("bench gemm")
    clock = Clock(repeat=checked_repeat("bench gemm", repeat))
    pairs = tuple(pairs) or tuple(PRODUCTS)
    probes = {pair: RATES.get(pair, mma_rate_bf16) if backend.name == "native" else mma_rate_bf16 for pair in pairs}
    rates = {kernel: Rate.of(kernel, backend) for kernel in probes.values()}
    caches = FLUSH_CACHES * backend.attribute("L2_CACHE_SIZE")
    rows = []
    for shape in shapes or SHAPES:
        sizes = (shape.rows, shape.depth), (shape.cols, shape.depth)
        check_fits("bench gemm", 8 * sum(m * n for m, n in sizes) + 2 * shape.rows * shape.cols + 3 * caches, backend)
        host = [np.random.default_rng(i).standard_normal(size, np.float32) for i, size in enumerate(sizes)]
        want = host[0][:CHECKED].astype(np.float64) @ host[1][:CHECKED].astype(np.float64).T
        for dtype, of_dtype in _by_dtype(pairs).items():
            a, b = (to_device(x.astype(FORMATS[dtype].dtype), device=backend.ordinal) for x in host)
            sides = {
                pair: Side.of(a, b, pair, lambda nbytes: -(-caches // nbytes) if shape.few else 1) for pair in of_dtype
            }
            calls = {pair: side.gathered() if shape.few else side.call for pair, side in sides.items()}
            calls |= {kernel: rate.call for kernel, rate in rates.items()}
            if shape.few:
                calls |= {(STREAM, pair): side.call for pair, side in sides.items()}
                calls |= {(READ, pair): read_call(side.bytes, backend) for pair, side in sides.items()}
                calls |= {
                    (NODE_READ, pair): read_nodes(side.bytes // side.weights, side.weights, backend)
                    for pair, side in sides.items()
                }
            times = clock.times(calls, WARM)
            for pair, side in sides.items():
                fields = {
                    name: value / side.weights if isinstance(value, float) else value
                    for name, value in times[pair].fields().items()
                }
                tflops = shape.flops / fields["milliseconds"] / 1e9
                rate = rates[probes[pair]].flops / times[probes[pair]].median / 1e9
                rows.append(
                    {
                        **{"a": pair[0], "b": pair[1], "shape": vars(shape), "l2": ROTATING if shape.few else WARM},
                        **{"weights": side.weights, **fields, "tflops": tflops},
                        **{"mma_tflops": {probes[pair].name: rate}, "share_of_mma_rate": tflops / rate},
                        "relative_l2": compare(side.out.to_numpy()[:CHECKED, :CHECKED], want).relative_l2,
                        **_bytes_of(side, *(times.get(x) for x in (pair, *((kind, pair) for kind in BESIDE)))),
                    }
                )
    order = {pair: i for i, pair in enumerate(pairs)}
    places = {shape: i for i, shape in enumerate(shapes or SHAPES)}
    return sorted(rows, key=lambda row: (places[Shape(**row["shape"])], order[row["a"], row["b"]]))


def _by_dtype(pairs: Sequence[tuple[str, str]]) -> dict[str, list[tuple[str, str]]]:
    """Group pairs by the 16-bit type from which their operands are quantized."""
    found: dict[str, list[tuple[str, str]]] = {}
    for pair in pairs:
        found.setdefault("f16" if "f16" in pair else "bf16", []).append(pair)
    return found


_BYTES = ("bytes", "gb_per_s", "read_gb_per_s", "share_of_read", "node_read_gb_per_s", "share_of_node_read")


def _bytes_of(side: Side, times, stream, read, node_read) -> dict[str, Any]:
    """Return the fields of few rows: bytes of weights per second, those of kernels that only read, and the time in a
    stream; None for all otherwise.
    """
    if read is None:
        return dict.fromkeys((*_BYTES, "stream_milliseconds"))
    rate, of_read, of_nodes = (side.bytes / x.median / 1e6 for x in (times, read, node_read))
    figures = (side.bytes // side.weights, rate, of_read, rate / of_read, of_nodes, rate / of_nodes)
    return {**dict(zip(_BYTES, figures)), "stream_milliseconds": stream.median / side.weights}


def product_report(**choices) -> dict[str, Any]:
    """Return `product_rows` and their machine: operation, machine, rows."""
    rows = product_rows(**choices)
    return {"operation": "gemm", "machine": about(gpu("bench gemm")), "rows": rows}


_TABLE_FIGURES = {
    **{"tflops": ".1f", "share_of_mma_rate": ".1%", "gb_per_s": ".0f", "share_of_read": ".1%"},
    **{"share_of_node_read": ".1%", "stream_milliseconds": ".4f", "relative_l2": ".2e"},
}


def product_table(report: dict[str, Any]) -> Iterator[str]:
    """Format a report for a terminal."""
    rows = report["rows"]
    yield f"matrix products on {title(report['machine'])}"
    turns = "all pairs of a shape and the MMAs' rates in turns"
    yield f"medians of {rows[0]['repeat']}, {turns}; weights of up to {FEW_ROWS} rows come from memory"
    yield f'products of up to {FEW_ROWS} rows are nodes of a graph; "ms in a stream" is of calls in a stream'
    head = ["a+b", "shape", "L2", "weights", "ms", "fastest..slowest", "TFLOPS", "of MMA rate", "GB/s", "of a read"]
    head += ["of read nodes", "ms in a stream", "relative L2", "MMA TFLOPS"]
    body = [
        [
            *(_pair(row), str(Shape(**row["shape"])), row["l2"], str(row["weights"]), f"{row['milliseconds']:.4f}"),
            f"{row['fastest']:.4f}..{row['slowest']:.4f}",
            *("" if row[name] is None else f"{row[name]:{form}}" for name, form in _TABLE_FIGURES.items()),
            ", ".join(f"{name.removeprefix('mma_rate_')} {rate:.0f}" for name, rate in row["mma_tflops"].items()),
        ]
        for row in rows
    ]
    yield from text_table([head, *body])


def draw_products(path: Path, report: dict[str, Any]) -> None:
    """Draw a report: a panel for each shape with the TFLOPS of each pair, for few rows GB/s of weights."""
    rows = report["rows"]
    pairs = list(dict.fromkeys(map(_pair, rows)))
    shapes = list(dict.fromkeys(Shape(**row["shape"]) for row in rows))
    by_place = {(Shape(**row["shape"]), _pair(row)): row for row in rows}
    figure, panels = plots.figure_of_lines(len(shapes), len(pairs))
    figure.suptitle(f"matrix products: {title(report['machine'])}", fontsize="medium")
    for axes, shape in zip(panels, shapes):
        value, share, unit = ("gb_per_s", "share_of_read", "GB/s of weights, share of a read's") if shape.few else (
            "tflops", "share_of_mma_rate", "TFLOPS, share of the MMA rate")  # fmt: skip
        chosen = [by_place.get((shape, pair)) for pair in pairs]
        notes = [row and f"{row[value]:.0f}, {row[share]:.0%}" for row in chosen]
        plots.lying_bars(axes, pairs, {"": [row and row[value] for row in chosen]}, {"": notes})
        axes.set_title(str(shape), fontsize="medium")
        axes.set_xlabel(unit)
    plots.save(figure, path)


def _pair(row: dict[str, Any]) -> str:
    return f"{row['a']}+{row['b']}"
