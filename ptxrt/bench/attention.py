"""Fused attention: time, TFLOPS, the share of the card's measured MMA rate, and the error, by formats, operands and
shapes.

Memory-bound cases, the quantization of operands and decoding, are compared with a copy on the device.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..accuracy import compare
from ..array import empty, to_device
from ..backend import Backend
from ..describe import text_table
from ..errors import ArgumentError
from ..formats import FORMATS, bf16
from ..kernel import Kernel
from ..ops.attention import ATTENTION, attention, exact_attention
from ..ops.attention_blocks import BLOCK_ATTENTION
from ..ops.attention_kernels import OPEN, visible_pairs
from ..ops.operands import quantize_operand
from ..ops.probes import mma_rate_bf16, mma_rate_mxf4, mma_rate_mxf4nvf4, mma_rate_mxf8f6f4_e4m3
from ..prepared import prepare
from . import plots
from .rates import Rate
from .timing import FLUSHED, REPEAT, WARM, Clock, Times, about, check_fits, checked_repeat, copy_call, gpu, title

# (format of Q and K, format of V) -> the probes of the MMAs of Q K^T and P V on sm_12x. f16 has the rate of bf16.
RATES: dict[tuple[str, str], tuple[Kernel, Kernel]] = {
    ("bf16", "bf16"): (mma_rate_bf16, mma_rate_bf16),
    ("f16", "f16"): (mma_rate_bf16, mma_rate_bf16),
    ("mxfp8", "mxfp8"): (mma_rate_mxf8f6f4_e4m3, mma_rate_mxf8f6f4_e4m3),
    ("nvfp4", "nvfp4"): (mma_rate_mxf4nvf4, mma_rate_mxf4nvf4),
    ("nvfp4", "mxfp8"): (mma_rate_mxf4nvf4, mma_rate_mxf8f6f4_e4m3),
    ("nvfp4", "bf16"): (mma_rate_mxf4nvf4, mma_rate_bf16),
    ("mxfp8", "bf16"): (mma_rate_mxf8f6f4_e4m3, mma_rate_bf16),
    ("mxfp4", "mxfp4"): (mma_rate_mxf4, mma_rate_mxf4),
    ("mxfp4", "mxfp8"): (mma_rate_mxf4, mma_rate_mxf8f6f4_e4m3),
    ("mxfp4", "bf16"): (mma_rate_mxf4, mma_rate_bf16),
}
# The formats that are measured by default.
COMBINATIONS = tuple(RATES)
# What a call receives: operands quantized before, so that only the kernel is timed; arrays, which the call quantizes
# first; or arrays that the kernel quantizes as it loads them (one pair of formats).
QUANTIZED, ARRAYS, IN_KERNEL = "quantized", "arrays", "in_kernel"
# A further measurement: the quantization of the operands, without attention.
PROLOGUE = "prologue"
COPY = "copy"
# At most this many queries on more keys are decoding, bound by the memory bandwidth for K and V.
DECODING_QUERIES = 16
# Queries whose results are compared with float64.
CHECKED_QUERIES = 64


def parse_combination(text: str) -> tuple[str, str]:
    """Parse (qk, pv) from QK+PV, or from one format for both; ArgumentError for anything else."""
    words = text.split("+")
    if not all(words) or len(words) > 2:
        raise ArgumentError(f"the formats of an attention are {text!r}; write QK+PV, such as mxfp4+bf16")
    return words[0], words[-1]


@dataclass(frozen=True)
class Shape:
    """The sizes of one attention. As text: b4h32s2048d128 or, with fewer heads of keys and other keys,
    b1h32g8q16k32768d128.
    """

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
        """Parse letters and numbers: b batch, h heads, g heads of keys (default h), s length or q queries and k keys, d
        dim.
        """
        words = text.replace(" ", "")
        found = re.findall(r"([bhgsqkd])([1-9]\d*)", words)
        sizes = {letter: int(number) for letter, number in found}
        lengths = {"s"} if "s" in sizes else {"q", "k"}
        whole = "".join(letter + number for letter, number in found) == words and len(found) == len(sizes)
        if not whole or sizes.keys() - {"g"} != {"b", "h", "d"} | lengths:
            raise ArgumentError(
                f"the shape of an attention is {text!r}; write b4h32s2048d128, or b1h32g8q16k32768d128 "
                "with g heads of keys"
            )
        queries, keys = (sizes["s"], sizes["s"]) if "s" in sizes else (sizes["q"], sizes["k"])
        return cls(sizes["b"], sizes["h"], sizes.get("g", sizes["h"]), queries, keys, sizes["d"])

    def arrays(self, seed: int = 0) -> list[np.ndarray]:
        """Return random normal Q, K and V, float32."""
        rng = np.random.default_rng(seed)
        keys = (self.batch, self.kv_heads, self.keys, self.dim)
        return [
            rng.standard_normal(shape, np.float32)
            for shape in ((self.batch, self.heads, self.queries, self.dim), keys, keys)
        ]

    def flops(self, causal: bool) -> int:
        """Return the flops of one of the two products: a multiplication and an addition for each visible pair and
        element."""
        return (
            2 * self.batch * self.heads * visible_pairs(self.queries, self.keys, right=0 if causal else OPEN) * self.dim
        )

    @property
    def decodes(self) -> bool:
        """Whether this is decoding: few queries on many keys."""
        return self.queries <= DECODING_QUERIES < self.keys

    def bytes(self, itemsize: int, out_itemsize: int = 2) -> int:
        """Return the bytes of Q, K and V and of the output, each once."""
        keys = 2 * self.batch * self.kv_heads * self.keys * self.dim
        return keys * itemsize + self.batch * self.heads * self.queries * self.dim * (itemsize + out_itemsize)


SHAPES = (
    *map(Shape.parse, ("b4h32s2048d128", "b1h32s4096d128", "b1h16s8192d128", "b4h32s2048d64", "b1h32s512d128")),
    *map(Shape.parse, ("b1h32g8q1k32768d128", "b1h64g8q1k32768d128", "b1h32g8q16k32768d128", "b1h64g8q16k32768d128")),
)


def rates_of(pair: tuple[str, str], backend: Backend) -> tuple[Kernel, Kernel]:
    """Return the probes of the MMAs of both products on a machine; the portable machine multiplies all formats in 16
    bits."""
    return RATES[pair if backend.name == "native" else ("bf16", "bf16")]


def operands_of(pair: tuple[str, str]) -> tuple[str, ...]:
    """Return what calls in these formats can receive."""
    kinds = (QUANTIZED, ARRAYS) if pair in BLOCK_ATTENTION else (ARRAYS,)
    return (*kinds, IN_KERNEL) if (*pair, IN_KERNEL) in ATTENTION else kinds


def quantize_of(operands: str) -> str | None:
    """Return the argument `quantize` of a call that receives these."""
    return IN_KERNEL if operands == IN_KERNEL else None


def quantized_operands(q, k, v, qk: str, pv: str) -> tuple:
    """Quantize q, k and v as `attention` does in a call."""
    q, k = quantize_operand(q, qk, role="q"), quantize_operand(k, qk, role="k")
    return q, k, quantize_operand(v, pv, role="v", dim=k.dim)


def sides_of(combinations: Sequence[tuple[str, str]]) -> list[tuple[str, str, str]]:
    """Return (qk, pv, operands) of all measurements; ArgumentError for formats without a kernel."""
    for qk, pv in combinations:
        if (qk, pv) not in RATES:
            known = ", ".join("+".join(pair) for pair in RATES)
            raise ArgumentError(f"bench attention: there is no attention in {qk}+{pv}; there is {known}")
    return [(*pair, operands) for pair in combinations for operands in operands_of(pair)]


def attention_rows(
    combinations: Sequence[tuple[str, str]] = (),
    dtypes: Sequence[str] = (),
    shapes: Sequence[Shape] = (),
    causal: Sequence[bool] = (False, True),
    repeat: int = REPEAT,
) -> list[dict[str, Any]]:
    """Time `attention` on the current GPU machine; one row for each (qk, pv), operands, dtype, Shape, and causal or
    not.

    Empty choices mean COMBINATIONS, bf16, SHAPES. All sides of a shape, the MMA rates, and a copy of K on the device
    are timed in turns. The L2 is warm from the same call; for decoding shapes it is flushed, and there is no mask.
    Fields: qk, pv, operands ("quantized": only the kernel, on operands quantized before; "arrays": all launches of a
    call on arrays; "in_kernel": the same, quantized as the kernel loads them; "prologue": only the quantization of the
    operands, once for both masks, with causal None), dtype, shape (by name), causal, l2, milliseconds (median),
    fastest, slowest, repeat, tflops (4 flops for each visible pair and element), mma_tflops (of each rate probe, by
    name), share_of_mma_rate (time of the two products at these rates / measured time), relative_l2 (of the last queries
    of the first head, against float64 attention of the inputs), bytes (decoding: Q, K, V and the output, each once;
    prologue: what its launches read and write, a second read included), gb_per_s, copy_gb_per_s, share_of_copy, refused
    (why `attention` raises, in a row without results). Fields that do not apply are None. ArgumentError if `attention`
    refuses all choices; MachineError on the emulator.
    """
    backend = gpu("bench attention")
    clock = Clock(repeat=checked_repeat("bench attention", repeat))
    combinations = tuple(combinations) or COMBINATIONS
    measured = sides_of(combinations)
    rates = {kernel: Rate.of(kernel, backend) for pair in combinations for kernel in rates_of(pair, backend)}
    rows, refusals = [], []
    for shape in shapes or SHAPES:
        # Each side has an output and copies of its operands, of 16 bits at most; K is copied once.
        check_fits("bench attention", shape.bytes(4) + (len(measured) + 1) * shape.bytes(2), backend)
        arrays = shape.arrays()
        for dtype in dtypes or ("bf16",):
            host = [array.astype(FORMATS[dtype].dtype) for array in arrays]
            given = [to_device(array, device=backend.ordinal) for array in host]
            copy = {COPY: copy_call(given[1], empty(given[1].shape, given[1].dtype, device=backend.ordinal))}
            place = {"dtype": dtype, "shape": vars(shape)}
            if not shape.decodes:
                rows += _prologue_rows(
                    clock, given, [pair for pair in combinations if pair in BLOCK_ATTENTION], copy, place
                )
            for masked in (False,) if shape.decodes else causal:
                outputs = {side: empty(given[0].shape, bf16.dtype, device=backend.ordinal) for side in measured}
                operands_of_sides, calls, refused = _tried(given, outputs, masked)
                refusals += refused.values()
                l2 = FLUSHED if shape.decodes else WARM
                times = clock.times({**calls, **{kernel: rate.call for kernel, rate in rates.items()}, **copy}, l2)
                tflops = {kernel: rate.flops / times[kernel].median / 1e9 for kernel, rate in rates.items()}
                for side in measured:
                    qk, pv, operands = side
                    of_side = {"qk": qk, "pv": pv, "operands": operands, **place, "causal": bool(masked), "l2": l2}
                    if side in refused:
                        rows.append(
                            {
                                **of_side,
                                **_NO_FIGURES,
                                "repeat": clock.repeat,
                                "refused": str(refused[side]).splitlines()[0],
                            }
                        )
                        continue
                    used = [(kernel, tflops[kernel]) for kernel in rates_of((qk, pv), backend)]
                    moved = sum(x.nbytes for x in (*operands_of_sides[side], outputs[side])) if shape.decodes else None
                    rows.append(
                        {
                            **of_side,
                            **_figures(shape, masked, times[side], *(rate for _, rate in used)),
                            "mma_tflops": {kernel.name: rate for kernel, rate in used},
                            "relative_l2": _error(outputs[side].to_numpy(), host, masked),
                            **_rates_of_bytes(moved, times[side], times[COPY], 2 * given[1].nbytes),
                            "refused": None,
                        }
                    )
    if refusals and all(row["refused"] or row["operands"] == PROLOGUE for row in rows):
        raise refusals[0]
    return rows


_RATES_OF_BYTES = ("bytes", "gb_per_s", "copy_gb_per_s", "share_of_copy")
_NO_FIGURES = {
    **dict.fromkeys(
        ("milliseconds", "fastest", "slowest", "tflops", "share_of_mma_rate", "relative_l2", *_RATES_OF_BYTES)
    ),
    "mma_tflops": {},
}


def _tried(given: Sequence, outputs: dict, masked: bool) -> tuple[dict, dict, dict]:
    """Return by side what its calls receive, the calls, and the ArgumentError of sides that `attention` refuses."""
    operands, calls, refused = {}, {}, {}
    for side, out in outputs.items():
        try:
            operands[side] = _given(given, side)
            calls[side] = _prepared(operands[side], side, masked, out)
        except ArgumentError as error:
            refused[side] = error
    return operands, calls, refused


def _prologue_rows(
    clock: Clock, arrays: Sequence, pairs: Sequence[tuple[str, str]], copy: dict, place: dict
) -> Iterator[dict[str, Any]]:
    """Return a row for each pair of formats: the quantization of q, k and v as in a call on arrays."""
    calls = {pair: prepare(quantized_operands, *arrays, *pair) for pair in pairs}
    times = clock.times({**{pair: (lambda call=call: call(*arrays)) for pair, call in calls.items()}, **copy})
    for (qk, pv), call in calls.items():
        moved = sum(launch.bytes_moved for launch in call.launches)
        yield {
            **{"qk": qk, "pv": pv, "operands": PROLOGUE, **place, "causal": None, "l2": WARM},
            **{
                **times[qk, pv].fields(),
                "tflops": None,
                "share_of_mma_rate": None,
                "mma_tflops": {},
                "relative_l2": None,
            },
            **_rates_of_bytes(moved, times[qk, pv], times[COPY], 2 * arrays[1].nbytes),
            "refused": None,
        }


def _rates_of_bytes(moved: int | None, times: Times, copied: Times, copied_bytes: int) -> dict[str, Any]:
    """Return bytes per second and those of the copy; None for all if nothing is counted."""
    if moved is None:
        return dict.fromkeys(_RATES_OF_BYTES)
    rate, copy_rate = moved / times.median / 1e6, copied_bytes / copied.median / 1e6
    return {"bytes": moved, "gb_per_s": rate, "copy_gb_per_s": copy_rate, "share_of_copy": rate / copy_rate}


def _given(arrays: Sequence, side: tuple[str, str, str]) -> Sequence:
    """Return what a side's calls receive."""
    qk, pv, operands = side
    return quantized_operands(*arrays, qk, pv) if operands == QUANTIZED else arrays


def _prepared(given: Sequence, side: tuple[str, str, str], causal: bool, out) -> Callable[[], Any]:
    qk, pv, operands = side
    call = prepare(attention, *given, qk=qk, pv=pv, quantize=quantize_of(operands), causal=causal, out=out)
    return lambda: call(*given)


def _figures(shape: Shape, causal: bool, times: Times, qk_rate: float, pv_rate: float) -> dict[str, Any]:
    flops = shape.flops(causal)
    at_full_rate = (flops / qk_rate + flops / pv_rate) / 1e9
    return {
        **times.fields(),
        "tflops": 2 * flops / times.median / 1e9,
        "share_of_mma_rate": at_full_rate / times.median,
    }


def _error(out: np.ndarray, host: list[np.ndarray], causal: bool) -> float:
    """Return the relative L2 error of the last queries of the first head. Causal masks are aligned there, so these
    queries see the same keys."""
    q, k, v = (x[:1, :1] for x in host)
    want, _ = exact_attention(q[:, :, -CHECKED_QUERIES:], k, v, causal=causal)
    return compare(out[:1, :1, -CHECKED_QUERIES:], want).relative_l2


def attention_report(**choices) -> dict[str, Any]:
    """Return `attention_rows` and their machine: machine, rows."""
    rows = attention_rows(**choices)
    return {"operation": "attention", "machine": about(gpu("bench attention")), "rows": rows}


_TABLE_FIGURES = {
    "tflops": ".1f",
    "share_of_mma_rate": ".1%",
    "gb_per_s": ".0f",
    "share_of_copy": ".1%",
    "relative_l2": ".2e",
}


def attention_table(report: dict[str, Any]) -> Iterator[str]:
    """Format a report for a terminal."""
    rows = report["rows"]
    yield f"attention on {title(report['machine'])}"
    yield (
        f"medians of {rows[0]['repeat']}, all sides of a shape, the MMAs' rates and a copy in turns; L2 warm, for "
        "decoding flushed"
    )
    head = [
        "qk+pv",
        "operands",
        "input",
        "shape",
        "mask",
        "ms",
        "fastest..slowest",
        "TFLOPS",
        "of MMA rate",
        "GB/s",
        "of copy",
    ]
    head += ["relative L2", "MMA TFLOPS"]
    masks = {True: "causal", False: "none", None: "any"}
    body = []
    for row in rows:
        cells = [
            f"{row['qk']}+{row['pv']}",
            row["operands"],
            row["dtype"],
            str(Shape(**row["shape"])),
            masks[row["causal"]],
        ]
        if row["refused"]:
            body.append([*cells, *[""] * (len(head) - len(cells) - 1), f"refused: {row['refused']}"])
            continue
        cells += [f"{row['milliseconds']:.4f}", f"{row['fastest']:.4f}..{row['slowest']:.4f}"]
        cells += ["" if row[name] is None else f"{row[name]:{form}}" for name, form in _TABLE_FIGURES.items()]
        body.append(
            [
                *cells,
                ", ".join(f"{name.removeprefix('mma_rate_')} {rate:.0f}" for name, rate in row["mma_tflops"].items()),
            ]
        )
    yield from text_table([head, *body])


# What bars show: the field of a row, the field of the share, and their labels.
MULTIPLYING = ("tflops", "share_of_mma_rate", "TFLOPS", "the MMA rate")
DECODING = ("gb_per_s", "share_of_copy", "GB/s", "a copy's rate")


def draw_attention(path: Path, report: dict[str, Any]) -> None:
    """Draw a report: a panel for each shape, mask and dtype, with bars for each pair of formats and its operands.

    Bars are TFLOPS with the share of the MMA rate; for decoding GB/s with the share of a copy.
    """
    rows = [row for row in report["rows"] if row["tflops"] is not None]
    pairs = list(dict.fromkeys(_pair(row) for row in rows))
    kinds = list(dict.fromkeys(row["operands"] for row in rows))
    by_place = {(_group(row), row["dtype"], _pair(row), row["operands"]): row for row in rows}
    places = list(dict.fromkeys(place[:2] for place in by_place))
    figure, panels = plots.figure_of_lines(len(places), len(pairs) * len(kinds))
    figure.suptitle(f"attention: {title(report['machine'])}", fontsize="medium")
    for axes, (group, dtype) in zip(panels, places):
        found = {kind: [by_place.get((group, dtype, pair, kind)) for pair in pairs] for kind in kinds}
        decodes = any(row and row["share_of_copy"] is not None for kind in found.values() for row in kind)
        value, share, unit, whole = DECODING if decodes else MULTIPLYING
        plots.lying_bars(
            axes,
            pairs,
            {kind: [row and row[value] for row in chosen] for kind, chosen in found.items()},
            {kind: [row and f"{row[value]:.0f}, {row[share]:.0%}" for row in chosen] for kind, chosen in found.items()},
        )
        axes.set_title(f"{group}, {dtype} input", fontsize="medium")
        axes.set_xlabel(f"{unit}, share of {whole}")
    plots.save(figure, path, panels[0])


def _group(row: dict[str, Any]) -> str:
    return f"{Shape(**row['shape'])}{' causal' if row['causal'] else ''}"


def _pair(row: dict[str, Any]) -> str:
    return f"{row['qk']}+{row['pv']}"
