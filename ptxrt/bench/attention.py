"""Fused attention: time, TFLOPS, the share of the card's own rate of MMAs, and the error, by formats and shapes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

import numpy as np

from ..accuracy import compare
from ..array import empty, to_device
from ..backend import Backend
from ..describe import text_table
from ..errors import ArgumentError
from ..formats import FORMATS, bf16
from ..kernel import Kernel, random_array
from ..ops.attention import attention, exact_attention
from ..ops.attention_kernels import OPEN, visible_pairs
from ..ops.probes import mma_rate_bf16, mma_rate_mxf8f6f4_e2m1
from ..prepared import prepare
from . import plots
from .timing import REPEAT, WARM, Clock, Times, about, check_fits, checked_repeat, gpu, title

# What is measured unasked: formats of the two products, one line each.
COMBINATIONS = (("bf16", "bf16"), ("mxfp4", "bf16"))
# Where operands are quantized as they are loaded.
IN_KERNEL = {("mxfp4", "bf16"): "in_kernel"}
# The probe of the MMA that multiplies each format on sm_12x. The portable machine multiplies them all as bf16.
RATES: dict[str, Kernel] = {
    "bf16": mma_rate_bf16,
    "mxfp4": mma_rate_mxf8f6f4_e2m1,
}
# Some tenths of a millisecond on every card, and more than the launch of its blocks takes.
RATE_STEPS = 4096
# Queries whose results are held against float64.
CHECKED_QUERIES = 64


def parse_combination(text: str) -> tuple[str, str]:
    """(qk, pv) from QK+PV, or from one format for both; ArgumentError for anything else."""
    words = text.split("+")
    if not all(words) or len(words) > 2:
        raise ArgumentError(f"the formats of an attention are {text!r}; write QK+PV, such as mxfp4+bf16")
    return words[0], words[-1]


@dataclass(frozen=True)
class Shape:
    """Sizes of one attention. Its text is, say, b4h32s2048d128 or, with fewer heads of keys and other keys, b1h32g8q16k32768d128."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    dim: int

    def __str__(self) -> str:
        grouped = f" g{self.kv_heads}" if self.kv_heads != self.heads else ""
        length = f"s{self.keys}" if self.queries == self.keys else f"q{self.queries} k{self.keys}"
        return f"b{self.batch} h{self.heads}{grouped} {length} d{self.dim}"

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """From letters and numbers: b batch, h heads, g heads of keys (else h), s length or q queries and k keys, d dim."""
        words = text.replace(" ", "")
        found = re.findall(r"([bhgsqkd])([1-9]\d*)", words)
        sizes = {letter: int(number) for letter, number in found}
        lengths = {"s"} if "s" in sizes else {"q", "k"}
        whole = "".join(letter + number for letter, number in found) == words and len(found) == len(sizes)
        if not whole or sizes.keys() - {"g"} != {"b", "h", "d"} | lengths:
            raise ArgumentError(f"the shape of an attention is {text!r}; write b4h32s2048d128, or b1h32g8q16k32768d128 with g heads of keys")
        queries, keys = (sizes["s"], sizes["s"]) if "s" in sizes else (sizes["q"], sizes["k"])
        return cls(sizes["b"], sizes["h"], sizes.get("g", sizes["h"]), queries, keys, sizes["d"])

    def arrays(self, seed: int = 0) -> list[np.ndarray]:
        """Random normal Q, K and V, float32."""
        rng = np.random.default_rng(seed)
        keys = (self.batch, self.kv_heads, self.keys, self.dim)
        return [rng.standard_normal(shape, np.float32) for shape in ((self.batch, self.heads, self.queries, self.dim), keys, keys)]

    def flops(self, causal: bool) -> int:
        """Of one of the two products: a multiplication and an addition for each visible pair and each element."""
        return 2 * self.batch * self.heads * visible_pairs(self.queries, self.keys, right=0 if causal else OPEN) * self.dim

    def bytes(self, itemsize: int, out_itemsize: int = 2) -> int:
        """Of Q, K and V read and the output written, each once."""
        keys = 2 * self.batch * self.kv_heads * self.keys * self.dim
        return keys * itemsize + self.batch * self.heads * self.queries * self.dim * (itemsize + out_itemsize)


SHAPES = tuple(map(Shape.parse, ("b4h32s2048d128", "b1h32s4096d128", "b1h16s8192d128", "b4h32s2048d64")))


def rate_of(format: str, backend: Backend) -> Kernel:
    """The probe of the MMA that multiplies a format on a machine."""
    if format not in RATES:
        raise ArgumentError(f"bench attention: no MMA's rate is known for {format!r}; there is {', '.join(RATES)}")
    return RATES[format] if backend.name == "native" else RATES["bf16"]


@dataclass(frozen=True)
class Rate:
    """A probe of an MMA's rate that fills the card, and its flops."""

    name: str
    call: Callable[[], Any]
    flops: int

    @classmethod
    def of(cls, kernel: Kernel, backend: Backend) -> "Rate":
        """With random operands: a card computes faster on constants, for it needs less power."""
        a, b = (to_device(_operand(kernel, name), device=backend.ordinal) for name in ("a", "b"))
        # Two blocks to a multiprocessor, as the kernel is compiled for.
        call = prepare(kernel, a, b, blocks=2 * backend.attribute("MULTIPROCESSOR_COUNT"), steps=RATE_STEPS)
        return cls(kernel.name, lambda: call(a, b), sum(launch.flops for launch in call.launches))


def _operand(kernel: Kernel, name: str) -> np.ndarray:
    """Normal values where the probe takes numbers, else what it draws: bytes need not all be codes."""
    argument = kernel.by_name[name]
    if argument.formats[0].kind == "float":
        return random_array(np.random.default_rng(0), argument.formats[0], argument.shape.sizes({}))
    return kernel.example(kernel.cases[0])[name]


def attention_rows(
    combinations: Sequence[tuple[str, str]] = (),
    dtypes: Sequence[str] = (),
    shapes: Sequence[Shape] = (),
    causal: Sequence[bool] = (False, True),
    repeat: int = REPEAT,
) -> list[dict[str, Any]]:
    """Time `attention` on the current GPU machine; a row for each (qk, pv), dtype of the inputs, Shape, and causal or not.

    Empty choices mean COMBINATIONS, bf16, SHAPES. All combinations of a shape, and the MMAs' rates, are timed in turns, with
    what the call just before left in the L2. Fields: qk, pv, dtype, shape (by name), causal, l2, milliseconds (median),
    fastest, slowest, repeat, tflops (4 flops for each visible pair and element), mma_tflops (of each probe of a rate, by
    name), share_of_mma_rate (the time that the two products would take at those rates / the time), relative_l2 (of the
    last queries of the first head, against float64 attention of the inputs).
    ArgumentError for what `attention` refuses; MachineError on the emulator.
    """
    backend = gpu("bench attention")
    clock = Clock(repeat=checked_repeat("bench attention", repeat))
    combinations = tuple(combinations) or COMBINATIONS
    rates = {kernel: Rate.of(kernel, backend) for pair in combinations for kernel in (rate_of(format, backend) for format in pair)}
    rows = []
    for shape in shapes or SHAPES:
        check_fits("bench attention", shape.bytes(4), backend)
        arrays = shape.arrays()
        for dtype in dtypes or ("bf16",):
            host = [array.astype(FORMATS[dtype].dtype) for array in arrays]
            q, k, v = (to_device(array, device=backend.ordinal) for array in host)
            for masked in causal:
                sides, outputs = {}, {}
                for qk, pv in combinations:
                    out = outputs[qk, pv] = empty(q.shape, bf16.dtype, device=backend.ordinal)
                    sides[f"{qk}+{pv}"] = _prepared(q, k, v, qk, pv, masked, out)
                times = clock.times({**sides, **{rate.name: rate.call for rate in rates.values()}})
                measured = {kernel: rate.flops / times[rate.name].median / 1e9 for kernel, rate in rates.items()}
                for qk, pv in combinations:
                    used = {name: measured[rate_of(name, backend)] for name in (qk, pv)}
                    rows.append(
                        {
                            **{"qk": qk, "pv": pv, "dtype": dtype, "shape": vars(shape), "causal": bool(masked), "l2": WARM},
                            **_figures(shape, masked, times[f"{qk}+{pv}"], used[qk], used[pv]),
                            "mma_tflops": {rate_of(name, backend).name: rate for name, rate in used.items()},
                            "relative_l2": _error(outputs[qk, pv].to_numpy(), host, masked),
                        }
                    )
    return rows


def _prepared(q, k, v, qk: str, pv: str, causal: bool, out) -> Callable[[], Any]:
    call = prepare(attention, q, k, v, qk=qk, pv=pv, quantize=IN_KERNEL.get((qk, pv)), causal=causal, out=out)
    return lambda: call(q, k, v)


def _figures(shape: Shape, causal: bool, times: Times, qk_rate: float, pv_rate: float) -> dict[str, Any]:
    flops = shape.flops(causal)
    at_full_rate = (flops / qk_rate + flops / pv_rate) / 1e9
    return {**times.fields(), "tflops": 2 * flops / times.median / 1e9, "share_of_mma_rate": at_full_rate / times.median}


def _error(out: np.ndarray, host: list[np.ndarray], causal: bool) -> float:
    """Relative L2 of the last queries of the first head: causal masks are aligned there, so they see what they saw."""
    q, k, v = (x[:1, :1] for x in host)
    want, _ = exact_attention(q[:, :, -CHECKED_QUERIES:], k, v, causal=causal)
    return compare(out[:1, :1, -CHECKED_QUERIES:], want).relative_l2


def attention_report(**choices) -> dict[str, Any]:
    """`attention_rows` and what they belong to: machine, rows."""
    rows = attention_rows(**choices)
    return {"operation": "attention", "machine": about(gpu("bench attention")), "rows": rows}


def attention_table(report: dict[str, Any]) -> Iterator[str]:
    """A report for a terminal."""
    rows = report["rows"]
    yield f"attention on {title(report['machine'])}"
    yield f"medians of {rows[0]['repeat']}, all formats of a shape and the MMAs' rates in turns, L2 warm"
    head = ["qk+pv", "input", "shape", "mask", "ms", "fastest..slowest", "TFLOPS", "of MMA rate", "relative L2", "MMA TFLOPS"]
    body = [
        [
            *(f"{row['qk']}+{row['pv']}", row["dtype"], str(Shape(**row["shape"])), "causal" if row["causal"] else "none"),
            *(f"{row['milliseconds']:.4f}", f"{row['fastest']:.4f}..{row['slowest']:.4f}", f"{row['tflops']:.1f}"),
            *(f"{row['share_of_mma_rate']:.1%}", f"{row['relative_l2']:.2e}"),
            ", ".join(f"{name.removeprefix('mma_rate_')} {rate:.0f}" for name, rate in row["mma_tflops"].items()),
        ]
        for row in rows
    ]
    yield from text_table([head, *body])


def draw_attention(path: Path, report: dict[str, Any]) -> None:
    """A report as a picture: TFLOPS by shape and formats, with the share of the MMAs' rate on each bar; a panel for each dtype."""
    rows = report["rows"]
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    groups = list(dict.fromkeys(_group(row) for row in rows))
    formats = list(dict.fromkeys(f"{row['qk']}+{row['pv']}" for row in rows))
    by_place = {(row["dtype"], _group(row), f"{row['qk']}+{row['pv']}"): row for row in rows}
    figure, panels = plots.figure_of(len(dtypes), 1, len(groups))
    figure.suptitle(f"attention: {title(report['machine'])}")
    for dtype, (axes,) in zip(dtypes, panels):
        chosen = {name: [by_place.get((dtype, group, name)) for group in groups] for name in formats}
        plots.grouped_bars(axes, groups, {name: [row and row["tflops"] for row in found] for name, found in chosen.items()})
        for bars, found in zip(axes.containers, chosen.values()):
            axes.bar_label(bars, [f"{row['share_of_mma_rate']:.0%}" for row in found if row], fontsize="x-small")
        axes.set_title(f"{dtype} input; on the bars: share of the MMA rate", fontsize="medium")
        axes.set_ylabel("TFLOPS")
    plots.save(figure, path, panels[0][0])


def _group(row: dict[str, Any]) -> str:
    return f"{Shape(**row['shape'])}{' causal' if row['causal'] else ''}"
