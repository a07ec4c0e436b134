"""docs/speed.md and its pictures, from tests/speed_figures.json and the table of rates: `make speed RECORD=1`.

python docs/speed.py [--folder DIR]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from ptxrt.bench import plots  # noqa: E402
from ptxrt.speed import CARDS, Card, rates  # noqa: E402

RECORD = ROOT / "tests" / "speed_figures.json"
CONSUMER = [name for name in CARDS if name != "H200"]
DIMS = (64, 128, 256)
PAIRS = ("bf16", "mxfp8", "nvfp4", "mxfp4", "nvfp4_mxfp8", "mxfp4_mxfp8", "nvfp4_bf16", "mxfp4_bf16", "mxfp8_bf16")
WAYS = {
    "plain": "plain",
    "raising": "a maximum grows",
    "masked": "masked by place",
    "sums": "`return_lse`",
    "smooth_q": "`smooth_q`",
    "smooth_sums": "`smooth_q` and `return_lse`",
}
# Bytes of a value in each format, scales included; the pictures compute the arithmetic intensity from them.
BYTES = {"bf16": 2.0, "mxfp8": 1 + 1 / 32, "mxfp4": 0.5 + 1 / 32, "nvfp4": 0.5 + 1 / 16}
ROOFS = {"BF16": "HMMA.16816.F32.BF16", "MXFP8": "QMMA.SF.16832.F32.E4M3.E4M3.E8", "MXFP4, NVFP4": "OMMA.SF.16864"}
# TFLOPS of published matrix products on an RTX 5090, probably limited by its power.
POWER = {"MXFP8": 680, "MXFP4, NVFP4": 1340}

INTRODUCTION = """# Speed, by a model

No figure of an RTX card on this page was measured: no such card was available. A static model computes them from the
machine code that ptxas wrote. For the H200 a section compares the same model with measured times, which shows its
errors. `make speed RECORD=1` generates this page from `tests/speed_figures.json`. A test fails if a kernel is more than
2 % slower than this record.

    ptxrt speed attention_nvfp4                         # every way of a tile, on an RTX 5090
    ptxrt speed 'attention_nvfp4[dim=128,dim_v=128]' --card "DGX Spark" --launches --doubts
    make speed                                          # every kernel against the record

## What is counted

- **Useful work.** Q K^T and P V are 4 flops for each pair of query and key and each element. In block formats P is also
  multiplied with a column of ones, for the denominator. This product takes time but does not count as useful work (3 %
  at head dimension 128, 6 % at 64, 1.5 % at 256).
- **One part of a multiprocessor.** The model simulates one of the four parts, with all the warps that registers and
  shared memory allow. Warps issue in order, with the stall counts and scoreboards that ptxas put into the code, for ten
  trips through the loop, of which seven count (for three trips, of which two count, with more than four warps).
- **16 starts.** The order in which warps start changes a figure by 5 to 8 %: tables give the mean and the range. A
  difference under 10 % between different kernels is not significant. A difference of 2 % between two versions of one
  kernel, over the same starts, is.
- **The paths of a tile.** The plain path; the path on which the maximum of some row grows; the path with keys hidden by
  position, as in causal masks; the path with `return_lse`; the path with `smooth_q`, which with `return_lse`
  is the loop for all tiles, without masks. The model recognizes them by the instructions in their basic blocks.
- **Whole launches.** They last from the start of the first block to the end of the last, without host time. A launch
  takes whole or half blocks as `ptxrt/launch.py` chooses. Blocks start in order as multiprocessors become free. Each
  block has its prologue, tiles and epilogue; its first tile raises maxima, later tiles do not. The first tile is copied
  while Q is loaded. The launch has no masks, packed sequences or row sums: loads that their null pointers switch off
  have no latency.
- **Quantizers, packers, norms.** Loaded and stored bytes per second, at most the bandwidth of memory.

Not modelled: instruction fetch, bank conflicts (loads of fragments have none, as a test counts), waits for bulk copies
of tiles (the model assumes that they complete in time), DRAM, and power. Loops inside prologues and epilogues count
once.

## What is uncertain

| | |
|---|---|
| MUFU | 8 cycles are the guide's; no published measurement on sm_120 was found |
| F2FP | 2 cycles are what ptxas schedules |
| the queue in front of the tensor core | one MMA is assumed to wait there |
| power | published matrix products on an RTX 5090 stop near 680 TFLOPS (MXFP8) and 1340 (NVFP4); so may attention |
| clock | the makers' boost clocks; cards under load run above or below |
"""


def entry(record: dict, pair: str, dim: int) -> dict | None:
    name = f"attention_{pair}_dim{dim}_dim_v{dim}" + ("_bf16" if pair == "bf16" else "")
    return record["entries"].get(name)


def shown(pair: str) -> str:
    return pair.replace("_", "+")


def spread(values) -> str:
    mean, lowest, highest = values[:3]
    return f"{mean:.0f} ({lowest:.0f}..{highest:.0f})"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines) + "\n"


def attention_tables(record: dict) -> str:
    """Return the tables of the paths of a tile on the first card, by head dimension."""
    parts = ["## Attention on an RTX 5090\n\nUseful TFLOPS in a steady loop: mean (range) over 16 starts.\n"]
    for dim in DIMS:
        rows = []
        for pair in PAIRS:
            found = entry(record, pair, dim)
            if found:
                ways = [spread(found["paths"][way]) if way in found["paths"] else "" for way in WAYS]
                rows.append(
                    [
                        shown(pair),
                        str(found["warps"]),
                        *ways,
                        f"{found['peak']:.0f}",
                        f"{100 * found['paths']['plain'][0] / found['peak']:.0f} %",
                    ]
                )
        parts.append(
            f"Head dimension {dim}:\n\n" + table(["qk+pv", "warps", *WAYS.values(), "peak", "plain, of peak"], rows)
        )
    return "\n".join(parts)


def pipe_table(record: dict) -> str:
    rows = []
    pipes = [pipe for pipe in rates.PIPES if pipe != "UDP"]
    for pair in PAIRS:
        found = entry(record, pair, 128)
        if found:
            mma = found["pipes"]["MMA"]
            rows.append(
                [
                    shown(pair),
                    *(
                        f"{cycles:.0f} ({100 * cycles / mma:.0f} %)" if (cycles := found["pipes"].get(pipe, 0)) else ""
                        for pipe in pipes
                    ),
                ]
            )
    return (
        "## Pipes\n\n"
        "Cycles for which one trip of a warp through the plain loop occupies each pipe, and their share of the tensor "
        "core's, at head dimension 128. ISSUE is one cycle for each instruction.\n\n"
        + table(["qk+pv", *pipes], rows)
        + """
Heads of 64 have half the MMAs for the same softmax, so that the other pipes limit them more. A trip of 128 keys would
halve the waits, releases and addresses for each tile. Its best case, two tiles that share them in one stage, was
modelled: nvfp4 1168 -> 1211 TFLOPS, mxfp4 1182 -> 1169, mxfp8 736 -> 727. Only nvfp4 would gain, so a trip has 64 keys.
"""
    )


def card_table(record: dict) -> str:
    rows = []
    for pair in PAIRS:
        for dim in DIMS:
            if found := entry(record, pair, dim):
                first = found["paths"]["plain"]
                cells = [f"{first[0]:.0f} ({100 * first[0] / found['peak']:.0f} %)"]
                cells += [
                    f"{values[0]:.0f} ({100 * values[0] / values[3]:.0f} %)"
                    for name in CONSUMER[1:]
                    for values in [found["cards"][name]]
                ]
                rows.append([shown(pair), str(dim), *cells])
    return (
        "## Attention on other cards\n\nUseful TFLOPS of the plain loop, and their share of the card's peak.\n\n"
        + table(["qk+pv", "dim", *CONSUMER], rows)
    )


def launch_table(record: dict) -> str:
    found = {pair: entry(record, pair, 128) for pair in PAIRS}
    found = {pair: figures for pair, figures in found.items() if figures and "launches" in figures}
    shapes = list(next(iter(found.values()))["launches"])
    rows = [[shape, *(f"{figures['launches'][shape]:.0f}" for figures in found.values())] for shape in shapes]
    return (
        "## Whole launches on an RTX 5090\n\n"
        "Useful TFLOPS at head dimension 128, with operands quantized before. b1 h24 s4608 is the shape of FLUX, b1 h40 "
        "s32760 that of Wan. Two resident blocks of 128 rows read up to 8 bytes of K and V from L2 per clock and "
        "multiprocessor, two half blocks up to 14; published attention kernels reached 24.\n\n"
        + table(["shape", *map(shown, found)], rows)
    )


def doubt_table(record: dict) -> str:
    found = {pair: entry(record, pair, 128) for pair in PAIRS}
    found = {pair: figures for pair, figures in found.items() if figures and "doubts" in figures}
    doubts = list(next(iter(found.values()))["doubts"])
    rows = [["as assumed", *(f"{figures['paths']['plain'][0]:.0f}" for figures in found.values())]]
    rows += [[doubt, *(f"{figures['doubts'][doubt]:.0f}" for figures in found.values())] for doubt in doubts]
    plain = {pair: figures["paths"]["plain"][0] for pair, figures in found.items()}
    rows.append(["a clock 10 % lower", *(f"{0.9 * speed:.0f}" for speed in plain.values())])
    stops = [f"{min(speed, power_of(pair)):.0f}" if power_of(pair) else "" for pair, speed in plain.items()]
    rows.append(["no faster than published products", *stops])
    return (
        "## With other rates\n\n"
        "Useful TFLOPS of the plain loop at head dimension 128 on an RTX 5090. All figures are proportional to the clock. "
        "The last row ends where published matrix products do, at 680 TFLOPS in MXFP8 and 1340 in 4 bits, probably because "
        "of the card's power; for mixtures, where both products end there.\n\n" + table(["", *map(shown, found)], rows)
    )


def power_of(pair: str) -> float | None:
    """Return the TFLOPS at which published products of a pair's formats stop; None if none are known."""
    limits = [
        next((tflops for formats, tflops in POWER.items() if f.upper() in formats), None) for f in pair.split("_")
    ]
    return len(limits) / sum(1 / limit for limit in limits) if all(limits) else None


def headroom_of(format: str) -> tuple[float, float]:
    """Return (headroom, depth) of weights in a format, as kernels_cu/op/weights.cuh declares them."""
    source = (ROOT / "kernels_cu" / "op" / "weights.cuh").read_text(encoding="utf-8")
    found = re.search(
        rf"struct Probabilities<tile::{format.capitalize()}>.*?headroom = (.*?)f, depth = (.*?)f;", source, re.S
    )
    return float(found[1]), float(found[2])


def rising_share(headroom: float, depth: float, deviation: float, keys: int) -> float:
    """Return the share of a warp's tiles behind the first in which the maximum of some row of 16 is raised, for
    independent normal scores; simulated."""
    rng = np.random.default_rng(0)
    raised = []
    for _ in range(40):
        largest = rng.standard_normal((16, keys // 64, 64)).max(axis=-1) * deviation / np.log(2)
        row_max = np.ceil(largest[:, 0]) - depth
        for scores in largest.T[1:]:
            rises = scores > row_max + headroom
            raised.append(rises.any())
            row_max = np.where(rises, np.ceil(scores) - depth, row_max)
    return float(np.mean(raised))


def rising_table(record: dict) -> str:
    """Return how often maxima rise, and the speed of all tiles together."""
    cases = [(deviation, keys) for deviation in (1.0, 2.0) for keys in (2048, 8192)]
    rows = []
    for pair in PAIRS:
        found = entry(record, pair, 128)
        format = pair.split("_")[-1]
        steps = (8.0, 0.0) if format == "bf16" else headroom_of(format)
        if not found or pair.endswith("_bf16"):
            continue
        plain, raising = (found["paths"][way][0] for way in ("plain", "raising"))
        cells = []
        for case in cases:
            share = rising_share(*steps, *case)
            cells.append(f"{100 * share:.0f} %, {1 / ((1 - share) / plain + share / raising):.0f}")
        rows.append([shown(pair), f"{steps[0]:.0f}", f"{steps[1]:.0f}", *cells])
    head = [f"deviation {deviation:.0f}, {keys} keys" for deviation, keys in cases]
    return (
        "## How often maxima rise\n\n"
        'A tile in which the maximum of some row of a warp rises takes longer (the column "a maximum grows" above). A row '
        "keeps its maximum until a score exceeds it by more than the headroom, and a raised maximum lies below the row's "
        "largest score by the depth, in steps of log2 ([Numerics](numerics.md#softmax)). Share of such tiles for "
        "independent normal scores (simulated), and TFLOPS of all tiles together, at head dimension 128 on an RTX "
        "5090.\n\n"
        + table(["qk+pv", "headroom", "depth", *head], rows)
        + """
With a depth equal to the headroom, 40 % of the tiles would rise at a deviation of 1 and 2048 keys, and 50 % at 2. A
smaller depth costs accuracy of weights far below the largest: in nvfp4, whose scales have the range of ue4m3, and in
mxfp8. There the scale of P could take the difference instead of the sums, without a loss of accuracy. In that form the
plain loop of mxfp8 fell from 776 to 724 TFLOPS at 128 and from 736 to 694 at 64, because scales of P are not constants.
"""
    )


def sums_table(record: dict) -> str:
    """Return what `return_lse` costs, in percent of the plain loop's time."""
    columns = [(dim, half) for dim in DIMS for half in ("", "_half")]
    rows = []
    for pair in PAIRS[1:]:
        cells = []
        for dim, half in columns:
            paths = record["entries"].get(f"attention_{pair}_dim{dim}_dim_v{dim}{half}", {}).get("paths", {})
            cells.append(f"{100 * (paths['plain'][0] / paths['sums'][0] - 1):+.1f} %" if "sums" in paths else "")
        if any(cells):
            rows.append([shown(pair), *cells])
    head = [f"{dim}{', half blocks' if half else ''}" for dim, half in columns]
    kept = [i for i in range(len(head)) if any(row[i + 1] for row in rows)]
    return (
        "## What `return_lse` costs\n\n"
        "Time of the path with exact sums, beside the plain path, by head dimension, on an RTX 5090.\n\n"
        + table(["qk+pv", *(head[i] for i in kept)], [[row[0], *(row[i + 1] for i in kept)] for row in rows])
        + """
The goals were 5 % in nvfp4 and mxfp4 and 3 % in mxfp8. Whole blocks meet them at 64 and 128, except mxfp8 at 64. There
32 additions join a trip whose issue slots are occupied, and registers are full, so that the sums cannot have a loop of
their own without making the plain loop slower (plain and with sums 736 and 698 TFLOPS; with such a loop 730 and 676, in
four other forms 715 and 686, 713 and 703, 723 and 676, 716 and 662; other orders of the additions give sums of 695 to
704). The order of the additions and of the tests that choose a loop decides much: in mxfp4 at 128 ten orders of the
same additions give 1298 to 1346 TFLOPS. Half blocks serve short launches. At 256 the loop that serves all options is
faster than the plain one in 4 bits because of the order in which ptxas issues it: in a build whose plain loop does not
overlap, both are slower (nvfp4: 1286 and 1358 TFLOPS in place of 1379 and 1521).

With `smooth_q` and `return_lse` tiles go through the loop that serves all options, with the scores of means in shared
memory (the last column of ways above): in nvfp4 11 % slower at 128 than with `smooth_q` alone, 19 % at 64.
"""
    )


def decoding_table(record: dict) -> str:
    """Return the cycles of a tile of 64 keys of decoding from pages, beside the time of its bytes."""
    card, rows = CARDS[CONSUMER[0]], []
    for dim in (64, 128):
        for held, format in enumerate(("bf16", "mxfp8", "mxfp4", "nvfp4"), start=1):
            found = record["entries"].get(f"attention_one_dim{dim}_held{held}")
            if found:
                per_cycle = found["paths"]["plain"][0] * 1e12 / card.multiprocessors / card.hertz
                cycles = 4 * 8 * 64 * dim / per_cycle
                moved = 2 * 64 * dim * BYTES[format]
                waits = moved / (card.memory_gb_per_s * 1e9 / card.multiprocessors / card.hertz)
                rows.append(
                    [format, str(dim), f"{cycles:.0f}", f"{moved:.0f}", f"{waits:.0f}", f"{100 * cycles / waits:.0f} %"]
                )
    return (
        "## Decoding from pages on an RTX 5090\n\n"
        "Cycles of a multiprocessor for a tile of 64 keys and up to eight rows: both products at the speed of the loop over "
        "keys, and the time in which its share of the memory's 1792 GB/s brings the tile. The softmax of a tile adds some "
        "hundred instructions. Decoding is bound by memory in every format.\n\n"
        + table(["format", "dim", "cycles", "bytes", "cycles of its bytes", "share"], rows)
    )


def errors(record: dict, figure: str = "model") -> str:
    """Return between which errors a figure of the model lies for attention on the H200."""
    found = [each[figure] / each["measured"] - 1 for each in record["H200"].values() if each["unit"] == "TFLOPS"]
    return f"{100 * min(found):.0f} to {100 * max(found):.0f} %"


def h200_table(record: dict) -> str:
    def row(name: str, found: dict, columns: tuple[str, ...]) -> list[str]:
        cells = [f"{found['measured']:.0f}"]
        for column in columns:
            cells += [f"{found[column]:.0f}", f"{100 * (found[column] / found['measured'] - 1):+.0f} %"]
        return [name, *cells]

    attention = [
        row(shown(name.removeprefix("attention_").split("_dim")[0]), found, ("model", "measured rate"))
        for name, found in sorted(record["H200"].items())
        if found["unit"] == "TFLOPS"
    ]
    streams = [
        row(f"`{name}`", found, ("model",)) for name, found in sorted(record["H200"].items()) if found["unit"] == "GB/s"
    ]
    if not attention:
        return ""
    return (
        "## The model beside measured times\n\n"
        "On an H200 the portable build multiplies in 16 bits. The measured figures are those of "
        "[Benchmarks](benchmarks.md): attention at b4 h32 s2048 d128 on operands quantized before, and quantizers, "
        "whose share of a copy's rate is taken of 4250 GB/s.\n\n"
        + table(
            ["qk+pv", "measured TFLOPS", "model", "error", "with the MMA's measured rate", "error"],
            attention,
        )
        + "\n"
        + table(["quantizer", "measured GB/s", "model", "error"], streams)
        + f"""
The model of attention is too fast everywhere, by {errors(record)}. The following effects are missing in the model and
may explain the error; none was measured separately:

- The clock. The model assumes 1.83 GHz; a card that multiplies without pause lowers its clock. `mma_rate_bf16` reaches
  546 TFLOPS, which is 7.25 cycles per MMA at 1.83 GHz; the table has 6.5. The last two columns use 7.25 cycles, and an
  error of {errors(record, "measured rate")} remains.
- The first tile of each block. Loops in prologues and epilogues count once, and the copies of a tile are assumed to be
  complete when the block needs it.
- Conflicts in shared memory, and between warps that read fragments and copies that arrive. The portable builds of block
  formats are bound by shared memory more than by MMAs: they expand each tile there, between barriers of the whole
  block.
- Instruction fetch. Loops of the portable build have 500 to 2000 instructions.

The model of a quantizer ends at the memory's 4800 GB/s, of which a copy reaches 88 to 90 %; the rest of its error is that
of kernels which do not reach a copy's rate.

Kernels that differ by less than the errors do may be in another order than the measured ones: mxfp8 and mxfp4+mxfp8
are.
"""
    )


def stream_table(record: dict) -> str:
    rows = []
    for name, found in sorted(record["entries"].items()):
        if found["unit"] == "GB/s":
            mean = found["paths"]["plain"][0]
            rows.append(
                [
                    f"`{name}`",
                    str(found["warps"]),
                    str(found["instructions"]),
                    found["bound_by"],
                    spread(found["paths"]["plain"]),
                    f"{100 * mean / found['peak']:.0f} %",
                ]
            )
    return (
        "## Quantizers, packers and producers\n\n"
        "GB/s of the steady path on an RTX 5090, whose memory has 1792 GB/s, and the busiest pipe.\n\n"
        + table(["entry", "warps", "instructions", "busiest", "GB/s", "of memory"], rows)
    )


def product_table(record: dict) -> str:
    rows = []
    for name, found in sorted(record["entries"].items()):
        if name.startswith("gemm") and found["unit"] == "TFLOPS":
            cells = [f"{100 * found['paths']['plain'][0] / found['peak']:.0f} %"] + [
                f"{found['cards'][c][0]:.0f}" for c in CONSUMER[1:]
            ]
            rows.append([f"`{name}`", str(found["warps"]), spread(found["paths"]["plain"]), *cells])
    return "## Matrix products\n\nTFLOPS of the steady loop on an RTX 5090, then on other cards.\n\n" + table(
        ["entry", "warps", "RTX 5090", "of peak", *CONSUMER[1:]], rows
    )


def rate_tables() -> str:
    rows = [
        [
            f"`{rate.pattern.replace(chr(92), '').replace('|', ' or ')}`",
            "sm_120a, sm_121a",
            f"{rate.cycles:g}" + (f", {rate.cycles / 2:g} where sums are not halved" if rate.halved else ""),
            rate.source,
        ]
        for rate in rates.MMA_RATES["sm_120a"]
    ]
    rows += [
        [f"`{rate.pattern.replace(chr(92), '')}`", "sm_90", f"{rate.cycles:g}", rate.source]
        for rate in rates.MMA_RATES["sm_90"]
    ]
    others = [
        [
            rate.stems,
            rate.pipe,
            (f"{rate.cycles:g}" if rate.cycles else "bytes / 32")
            + (f", {rate.hopper:g} on sm_90" if rate.hopper else ""),
            rate.source,
        ]
        for rate in rates.RATES
    ]
    cards = [
        [
            card.name,
            card.target,
            str(card.multiprocessors),
            f"{card.gigahertz:g}",
            f"{card.memory_gb_per_s:g}",
            card.source,
        ]
        for card in CARDS.values()
    ]
    sources = rates.__doc__.split("Sources\n")[1].rstrip()
    return (
        "## Rates\n\n"
        "Cycles for which an instruction of a warp occupies its pipe in one of the four parts of a multiprocessor "
        "(`ptxrt/speed/rates.py`).\n\n"
        + table(["matrix instruction", "targets", "cycles", "source"], rows)
        + "\n"
        + table(["instructions", "pipe", "cycles", "source"], others)
        + "\n"
        + table(["card", "code", "multiprocessors", "GHz", "GB/s", "source"], cards)
        + "\nThe sources:\n\n```\n"
        + sources.strip("\n")
        + "\n```\n"
    )


def pictures() -> str:
    lines = [
        "## Rooflines\n\n"
        "Vertical: useful TFLOPS of the plain loop. Horizontal: flops per byte of memory, with each operand and the "
        "output read or written once; attention at b1 h32 s4096 d128, products at 8192 x 8192 x 8192. Dotted lines: "
        "the rates at which published matrix products stop.\n"
    ]
    return "\n".join(lines + [f"![Roofline of the {name}]({picture_of(name)})" for name in CONSUMER]) + "\n"


def picture_of(card: str) -> str:
    return f"speed_{card.lower().replace(' ', '_')}.png"


def page(record: dict) -> str:
    parts = [
        INTRODUCTION,
        attention_tables(record),
        pipe_table(record),
        card_table(record),
        launch_table(record),
        rising_table(record),
        sums_table(record),
        doubt_table(record),
        decoding_table(record),
        h200_table(record),
        product_table(record),
        stream_table(record),
        pictures(),
        rate_tables(),
    ]
    return "\n".join(part for part in parts if part)


def points(record: dict, card: str) -> list[tuple[str, float, float]]:
    """Return (name, flops per byte, TFLOPS) of attention at head dimension 128 and of products."""
    found = []
    length = 4096
    for pair in PAIRS:
        if figures := entry(record, pair, 128):
            qk, _, pv = pair.partition("_")
            moved = 128 * length * (2 * BYTES[qk] + BYTES[pv or qk] + 2)
            speed = figures["paths"]["plain"][0] if card == CONSUMER[0] else figures["cards"][card][0]
            found.append((shown(pair), 4 * length**2 * 128 / moved, speed))
    for format in BYTES:
        candidates = [
            f
            for n, f in record["entries"].items()
            if n.startswith(f"gemm_{format}") and f["unit"] == "TFLOPS" and "few" not in n
        ]
        if candidates:
            speeds = [f["paths"]["plain"][0] if card == CONSUMER[0] else f["cards"][card][0] for f in candidates]
            side = 8192
            found.append((f"gemm {format}", 2 * side**3 / (side**2 * (2 * BYTES[format] + 2)), max(speeds)))
    return found


def draw(record: dict, card: Card, path: Path) -> None:
    figure, ((axes,),) = plots.figure_of(1, 1, 6)
    edge = [100.0, 2e4]
    top = 0.0
    for name, opcode in ROOFS.items():
        peak = rates.mma_flops(opcode) / rates.mma_cycles(opcode, card) * card.parts * card.hertz / 1e12
        top = max(top, peak)
        knee = peak * 1e12 / (card.memory_gb_per_s * 1e9)
        axes.plot(
            [edge[0], knee, edge[1]],
            [edge[0] * card.memory_gb_per_s / 1e3, peak, peak],
            linewidth=1,
            label=f"{name}: {peak:.0f}",
        )
        if card.name == CONSUMER[0] and name in POWER:
            axes.axhline(POWER[name], linestyle=":", linewidth=1, color="gray")
    for i, (name, intensity, speed) in enumerate(sorted(points(record, card.name), key=lambda point: point[2])):
        marker = "s" if name.startswith("gemm") else "o"
        axes.plot(intensity, speed, marker, markersize=4, color="black")
        side = dict(xytext=(5, -2)) if i % 2 else dict(xytext=(-5, -2), ha="right")  # neighbors do not overlap
        axes.annotate(name, (intensity, speed), textcoords="offset points", fontsize=6, **side)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(*edge)
    axes.set_ylim(top / 20, 1.4 * top)
    axes.set_xlabel("flops per byte of memory")
    axes.set_ylabel("TFLOPS")
    axes.set_title(f"{card.name}, by the model")
    axes.legend(fontsize=6, loc="lower right")
    plots.save(figure, path)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write docs/speed.md and its pictures from the record.")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent)
    folder = parser.parse_args().folder
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    for name in CONSUMER:
        draw(record, CARDS[name], folder / picture_of(name))
    (folder / "speed.md").write_text(page(record), encoding="utf-8", newline="\n")
    print(f"wrote {folder / 'speed.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
