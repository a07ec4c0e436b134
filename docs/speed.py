"""docs/speed.md and its pictures, from tests/speed_figures.json and the table of rates: `make speed RECORD=1`.

python docs/speed.py [--folder DIR]
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
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
PATHS = ("plain", "raising", "masked", "sums", "smooth_q", "smooth_sums")
OTHER_DIMS = ((32, 32), (96, 96), (192, 192), (192, 128))
# The share of time that exact sums may cost, by the format of weights: the goals of the kernels.
SUM_GOALS = {"nvfp4": 0.05, "mxfp4": 0.05, "mxfp8": 0.03}
FASTER = ("MUFU 4 cycles", "FMNMX 1 cycle", "two MMAs queue")  # of DOUBTS, those that make an instruction faster
# Bytes of a value in each format, scales included; the pictures compute the arithmetic intensity from them.
BYTES = {"bf16": 2.0, "mxfp8": 1 + 1 / 32, "mxfp4": 0.5 + 1 / 32, "nvfp4": 0.5 + 1 / 16}
ROOFS = {"BF16": "HMMA.16816.F32.BF16", "MXFP8": "QMMA.SF.16832.F32.E4M3.E4M3.E8", "MXFP4, NVFP4": "OMMA.SF.16864"}
# TFLOPS of published matrix products on an RTX 5090, probably limited by its power.
POWER = {"MXFP8": 680, "MXFP4, NVFP4": 1340}


def introduction(record: dict) -> str:
    """Return what the page is about: what is counted, and what is uncertain."""
    ones = {dim: 100 * 8 / (2 * dim + 8) for dim in DIMS}
    spreads = spreads_of(record)
    mxfp8, four = POWER["MXFP8"], POWER["MXFP4, NVFP4"]
    return f"""# Speed, by a model

No figure of an RTX card on this page was measured: no such card was available. A static model computes them from the
machine code that ptxas wrote. For the H200 a section compares the same model with measured times, which shows its
errors. `make speed RECORD=1` generates this page from `tests/speed_figures.json`. A test fails if a kernel is more than
2 % slower than this record.

    ptxrt speed attention_nvfp4                         # every path of a tile, on an RTX 5090
    ptxrt speed 'attention_nvfp4[dim=128,dim_v=128]' --card "DGX Spark" --launches --doubts
    make speed                                          # every kernel against the record

## Words

- **qk+pv** names the formats of attention: that of Q and K, and that of the weights P and of V. One name stands for
  both.
- A **tile** is 64 keys. A **path** is the code that a warp executes for a tile; which one depends on the options of the
  call and on the scores.
- **Warps** are those of one part of a multiprocessor at the same time. A multiprocessor has four parts, each with its
  own tensor core and one instruction issued per clock.
- A **half block** has half the rows and half the warps of a whole block of threads. Short launches take half blocks, so
  that all multiprocessors have work. Their entries end in `_half`.
- **Peak** is the rate of the tensor cores for the MMAs of the path. That of a mixture lies between those of its formats.

## What is counted

- **Useful work.** Q K^T and P V are 4 flops for each pair of query and key and each element. In block formats P is also
  multiplied with a column of ones, for the denominator. This product takes time but does not count as useful work
  ({ones[128]:.0f} % at head dimension 128, {ones[64]:.0f} % at 64, {ones[256]:.1f} % at 256).
- **One part of a multiprocessor.** The model simulates one of the four parts, with all the warps that registers and
  shared memory allow. Warps issue in order, with the stall counts and scoreboards that ptxas put into the code, for ten
  trips through the loop, of which seven count (for three trips, of which two count, with more than four warps).
- **16 starts.** The order in which warps start changes a figure: tables give the mean and the range. Over the
  {len(spreads)} recorded paths of attention (highest - lowest) / mean has a median of {100 * statistics.median(spreads):.1f} % and
  is at most {100 * max(spreads):.0f} %. A difference under 10 % between different kernels is not significant. A difference of 2 %
  between two versions of one kernel, over the same starts, is. Below, differences of 1 to 2 % are noise of the model:
  another order of issue outweighs them. In the table of [other rates](#with-other-rates) a faster rate lowers a figure
  by up to {noise(record):.1f} %.
- **The paths of a tile**, by the names that `ptxrt speed` prints. The model recognizes them by the instructions in their
  basic blocks. An empty cell means that the kernel has no such path: there is no `smooth_q` in 16 bits, and weights in
  16 bits are divided by the sum that `return_lse` needs anyway.

| path | keys of the tile |
|---|---|
| `plain` | all are seen, and no row's maximum grows |
| `raising` | as `plain`, but the maximum of some row grows |
| `masked` | some are hidden by position, as in causal masks |
| `sums` | as `plain`, with `return_lse`: exact weights are summed, too |
| `smooth_q` | as `plain`, with `smooth_q`: the scores of means are added |
| `smooth_sums` | with both options; the loop for all tiles and options, here without masks |

- **Whole launches.** They last from the start of the first block to the end of the last, without host time. A launch
  takes whole or half blocks as `ptxrt/launch.py` chooses. Blocks start in order as multiprocessors become free. Each
  block has its prologue, tiles and epilogue; its first tile raises maxima, later tiles do not. The first tile is copied
  while Q is loaded. The launch has no masks, packed sequences or row sums: loads that their null pointers switch off
  have no latency.
- **Decoding.** All instructions of a tile ([below](#decoding-from-pages-on-an-rtx-5090)).
- **Quantizers, packers, norms.** Loaded and stored bytes per second, at most the bandwidth of memory.

Not modeled: instruction fetch, bank conflicts (loads of fragments have none, as a test counts), waits for bulk copies
of tiles (the model assumes that they complete in time), DRAM, and power. Loops inside prologues and epilogues count
once.

## What is uncertain

[The sources](#rates) are named in brackets. [With other rates](#with-other-rates) has the figures that follow from the
other values.

| | assumed | other values, and why |
|---|---|---|
| MUFU | 8 cycles: 16 results per clock [guide]. No published measurement on sm_120 was found | 16, if it had half that rate; 4, which ptxas schedules for sm_103 |
| F2FP | 2 cycles, which ptxas schedules [ptxas] | 8, the rate of other conversions [guide] |
| FMNMX | 2 cycles: 64 per clock [guide] | 1, which ptxas schedules on sm_120 [ptxas]: the two sources disagree |
| the queue in front of the tensor core | one MMA waits there | two: its length is not published |
| latencies | those published for Ampere to Hopper [usual]; those of memory accesses vary by 0 to 50 % at random | 1.5 times all of them: none is known for these chips |
| power | no limit | cuBLAS on an RTX 5090 reaches 660 TFLOPS in MXFP8 and 1306 in NVFP4 at 600 W, 552 and 1165 at 400 W [products]; the best published products stop near {mxfp8} and {four}. So may attention |
| clock | the makers' boost clocks | 10 % less; cards under load run above or below |
"""


def spreads_of(record: dict) -> list[float]:
    """Return (highest - lowest) / mean of every recorded path of attention."""
    return [
        (highest - lowest) / mean
        for name, found in record["entries"].items()
        if name.startswith("attention") and found["unit"] == "TFLOPS"
        for mean, lowest, highest in found["paths"].values()
    ]


def noise(record: dict) -> float:
    """Return by how many percent a faster rate lowers a figure at most."""
    changes = [
        100 * (1 - found["doubts"][doubt] / found["paths"]["plain"][0])
        for pair in PAIRS
        if (found := entry(record, pair, 128)) and "doubts" in found
        for doubt in FASTER
    ]
    return max(changes)


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
                paths = [spread(found["paths"][path]) if path in found["paths"] else "" for path in PATHS]
                rows.append(
                    [
                        shown(pair),
                        str(found["warps"]),
                        *paths,
                        f"{found['peak']:.0f}",
                        f"{100 * found['paths']['plain'][0] / found['peak']:.0f} %",
                    ]
                )
        parts.append(f"Head dimension {dim}:\n\n" + table(["qk+pv", "warps", *PATHS, "peak", "plain, of peak"], rows))
    return "\n".join(parts)


def other_table(record: dict) -> str:
    """Return the plain path of other head dimensions and of half blocks."""
    columns = [(f"{dim}" if dim == dim_v else f"{dim} and {dim_v}", dim, dim_v, "") for dim, dim_v in OTHER_DIMS]
    columns += [(f"{dim}, half blocks", dim, dim, "_half") for dim in (64, 128)]
    rows = []
    for pair in PAIRS:
        cells = []
        for _, dim, dim_v, half in columns:
            name = f"attention_{pair}_dim{dim}_dim_v{dim_v}" + ("_bf16" if pair == "bf16" else "") + half
            found = record["entries"].get(name)
            cells.append(
                f"{spread(found['paths']['plain'])}, {100 * found['paths']['plain'][0] / found['peak']:.0f} %"
                if found
                else ""
            )
        rows.append([shown(pair), *cells])
    return (
        "## Other head dimensions, and half blocks\n\nUseful TFLOPS of the plain path on an RTX 5090: mean (range), and "
        "share of peak. Where a cell is empty, operands are padded to the next head dimension, or there are no half "
        "blocks.\n\n" + table(["qk+pv", *(head for head, *_ in columns)], rows)
    )


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
        "Cycles for which one trip of a warp through the plain path occupies each pipe, and their share of the tensor "
        "core's, at head dimension 128. ISSUE is one cycle for each instruction.\n\n"
        + table(["qk+pv", *pipes], rows)
        + """
Heads of 64 have half the MMAs for the same softmax, so that the other pipes limit them more. A trip of 128 keys would
halve the waits, releases and addresses for each tile. Its best case, two tiles that share them in one stage, was
modeled with the kernels of commit 8b6b0e2: nvfp4 1168 -> 1211 TFLOPS, mxfp4 1182 -> 1169, mxfp8 736 -> 727. Only nvfp4
would gain, so a trip has 64 keys.
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
        "## Attention on other cards\n\nUseful TFLOPS of the plain path, and their share of the card's peak.\n\n"
        + table(["qk+pv", "dim", *CONSUMER], rows)
    )


def launch_table(record: dict) -> str:
    found = {pair: entry(record, pair, 128) for pair in PAIRS}
    found = {pair: figures for pair, figures in found.items() if figures and "launches" in figures}
    shapes = list(next(iter(found.values()))["launches"])
    rows = [[shape, *(f"{figures['launches'][shape]:.0f}" for figures in found.values())] for shape in shapes]
    whole, half = (max(l2_bytes(record, pair, suffix) for pair in PAIRS) for suffix in ("", "_half"))
    return (
        "## Whole launches on an RTX 5090\n\n"
        "Useful TFLOPS at head dimension 128, with operands quantized before. b1 h24 s4608 is the shape of FLUX, b1 h40 "
        f"s32760 that of Wan. Whole blocks read up to {whole:.1f} bytes of K and V from L2 per clock and multiprocessor, half "
        f"blocks up to {half:.1f}; the model assumes that L2 gives "
        f"{rates.MULTIPROCESSORS['sm_120a'].l2_bytes_per_clock:g} [attention].\n\n"
        + table(["shape", *map(shown, found)], rows)
    )


def l2_bytes(record: dict, pair: str, suffix: str = "") -> float:
    """Return the bytes of K and V that a multiprocessor reads per clock on the plain path at head dimension 128."""
    name = f"attention_{pair}_dim128_dim_v128" + ("_bf16" if pair == "bf16" else "") + suffix
    found = record["entries"].get(name)
    if not found:
        return 0.0
    card = CARDS[CONSUMER[0]]
    qk, _, pv = pair.partition("_")
    flops_per_clock = found["paths"]["plain"][0] * 1e12 / card.multiprocessors / card.hertz
    return (BYTES[qk] + BYTES[pv or qk]) * flops_per_clock / (4 * found["rows"])


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
        "Useful TFLOPS of the plain path at head dimension 128 on an RTX 5090. All figures are proportional to the clock. "
        f"The last row ends where published matrix products do, at {POWER['MXFP8']} TFLOPS in MXFP8 and "
        f"{POWER['MXFP4, NVFP4']} in 4 bits, probably because of the card's power; for mixtures, where both products end "
        "there. It is empty if a format is bf16, in which products reach their peak. "
        "Changes of 1 to 2 % are noise of the model.\n\n" + table(["", *map(shown, found)], rows)
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
    equal = [100 * rising_share(8.0, 8.0, deviation, 2048) for deviation in (1.0, 2.0)]
    return (
        "## How often maxima rise\n\n"
        "A tile in which the maximum of some row of a warp rises takes longer (the path `raising` above). A row "
        "keeps its maximum until a score exceeds it by more than the headroom, and a raised maximum lies below the row's "
        "largest score by the depth, in steps of log2 ([Numerics](numerics.md#softmax)). Share of such tiles for "
        "independent normal scores (simulated), and TFLOPS of all tiles together, at head dimension 128 on an RTX "
        "5090.\n\n"
        + table(["qk+pv", "headroom", "depth", *head], rows)
        + f"""
With a depth equal to the headroom, {equal[0]:.0f} % of the tiles would rise at a deviation of 1 and 2048 keys, and {equal[1]:.0f} % at 2. A
smaller depth costs accuracy of weights far below the largest: in nvfp4, whose scales have the range of ue4m3, and in
mxfp8. There the scale of P could take the difference instead of the sums, without a loss of accuracy. In that form the
plain path of mxfp8 fell from 776 to 724 TFLOPS at 128 and from 736 to 694 at 64 (kernels of commit 1794cca), because
scales of P are not constants.
"""
    )


def sums_table(record: dict) -> str:
    """Return what `return_lse` costs, in percent of the plain path's time."""
    columns = [(dim, half) for dim in DIMS for half in ("", "_half")]
    rows = []
    met: dict[bool, list[str]] = {True: [], False: []}
    for pair in PAIRS[1:]:
        cells = []
        for dim, half in columns:
            paths = record["entries"].get(f"attention_{pair}_dim{dim}_dim_v{dim}{half}", {}).get("paths", {})
            cost = paths["plain"][0] / paths["sums"][0] - 1 if "sums" in paths else None
            cells.append("" if cost is None else f"{100 * cost:+.1f} %")
            if cost is not None and pair in SUM_GOALS:
                words = f"{pair} at {dim}{' in half blocks' if half else ''}"
                met[cost <= SUM_GOALS[pair]].append(
                    words if cost <= SUM_GOALS[pair] else f"{words} ({100 * cost:+.2f} %)"
                )
        if any(cells):
            rows.append([shown(pair), *cells])
    mxfp8, nvfp4 = (record["entries"][f"attention_{pair}_dim64_dim_v64"]["paths"] for pair in ("mxfp8", "nvfp4"))
    wide = {pair: record["entries"][f"attention_{pair}_dim256_dim_v256"]["paths"] for pair in SUM_GOALS}
    nvfp4_128 = record["entries"]["attention_nvfp4_dim128_dim_v128"]["paths"]
    slower = [f"{100 * (1 - p['smooth_sums'][0] / p['smooth_q'][0]):.0f} %" for p in (nvfp4_128, nvfp4)]
    faster = ", ".join(
        f"{pair} {p['smooth_q'][0]:.0f} and {p['smooth_sums'][0]:.0f}"
        for pair, p in wide.items()
        if p["smooth_sums"][0] > p["smooth_q"][0]
    )
    head = [f"{dim}{', half blocks' if half else ''}" for dim, half in columns]
    kept = [i for i in range(len(head)) if any(row[i + 1] for row in rows)]
    return (
        "## What `return_lse` costs\n\n"
        "Time of the path with exact sums, beside the plain path, by head dimension, on an RTX 5090.\n\n"
        + table(["qk+pv", *(head[i] for i in kept)], [[row[0], *(row[i + 1] for i in kept)] for row in rows])
        + f"""
The goals were {100 * SUM_GOALS["nvfp4"]:.0f} % in nvfp4 and mxfp4 and {100 * SUM_GOALS["mxfp8"]:.0f} % in mxfp8. They are met by {listed(met[True])}. They are missed by
{listed(met[False])}. Half blocks serve short launches.

In mxfp8 at 64, 32 additions join a trip whose issue slots are occupied (plain and with sums {mxfp8["plain"][0]:.0f} and {mxfp8["sums"][0]:.0f} TFLOPS).
Registers are full, so that the sums cannot have a loop of their own without making the plain loop slower. Other forms
of the kernels of commit a8df894 gave 730 and 676, 715 and 686, 713 and 703, 723 and 676, 716 and 662 TFLOPS; other
orders of the additions sums of 695 to 704. The order of the additions and of the tests that choose a loop decides much:
in mxfp4 at 128 ten orders of the same additions gave 1298 to 1346 TFLOPS (commit 20a7702).

At 256 the loop that serves all options may be faster than one that serves some of them, because of the order in which
ptxas issues it. In 4 bits `sums` is faster than `plain`: in a build whose plain loop does not overlap tiles both are slower
(nvfp4, commit c856367: 1286 and 1358 TFLOPS; in the present build {wide["nvfp4"]["plain"][0]:.0f} and {wide["nvfp4"]["sums"][0]:.0f}). For the same reason `smooth_sums`,
which goes through that loop, is faster than `smooth_q`, which has its own, though it computes more ({faster} TFLOPS).

At smaller head dimensions the loop that serves all options, with the scores of means in shared memory, is slower than
the one of `smooth_q`: in nvfp4 by {slower[0]} at 128 and by {slower[1]} at 64.
"""
    )


def listed(names: list[str]) -> str:
    """Return names as "a, b and c"."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names) or "none"


def decoding_table(record: dict) -> str:
    """Return the cycles of a tile of 64 keys of decoding from pages, beside the time of its bytes."""
    card, rows, shares = CARDS[CONSUMER[0]], [], []
    for dim in (64, 128):
        for held, format in enumerate(("bf16", "mxfp8", "mxfp4", "nvfp4"), start=1):
            found = record["entries"].get(f"attention_one_dim{dim}_held{held}")
            if found:
                per_cycle = found["paths"]["plain"][0] * 1e12 / card.multiprocessors / card.hertz
                cycles = 4 * 8 * 64 * dim / per_cycle
                moved = 2 * 64 * dim * BYTES[format]
                waits = moved / (card.memory_gb_per_s * 1e9 / card.multiprocessors / card.hertz)
                shares.append(100 * cycles / waits)
                cells = [found["instructions"], cycles, moved, waits]
                rows.append([format, str(dim), *(f"{cell:.0f}" for cell in cells), f"{shares[-1]:.0f} %"])
    bound = f"takes at most {max(shares):.0f} % of the time of its bytes" if rows else ""
    return (
        "## Decoding from pages on an RTX 5090\n\n"
        "One query for each sequence and up to eight heads that share keys (`attention_one`). Counted are all "
        "instructions of a warp for a tile of 64 keys: the copies into shared memory, the expansion to 16 bits, both "
        "products and the softmax. A tile takes several passes through the loop, first of keys, then of values. The model "
        "strings them together: as many as the MMAs of a tile need, with the copies of whole units and otherwise the "
        "shortest path, without masks and without a maximum that grows. If a batch of keys is a loop of its own, the "
        "shortest batch is assumed, so that its waits and copies count twice. The simulation includes the time and the "
        "latency of copies from L2.\n\n"
        f"Beside it stands the time in which the multiprocessor's share of the memory's {card.memory_gb_per_s:g} GB/s brings "
        f"the tile. A tile {bound}: decoding is bound by memory in every format, if "
        "enough copies are in flight.\n\n"
        + table(["format", "dim", "instructions of a warp", "cycles", "bytes", "cycles of its bytes", "share"], rows)
    )


def errors(record: dict, figure: str = "model", unit: str = "TFLOPS") -> str:
    """Return between which errors a figure of the model lies on the H200, for attention or (GB/s) for quantizers."""
    found = [each[figure] / each["measured"] - 1 for each in record["H200"].values() if each["unit"] == unit]
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

The model of a quantizer ends at the memory's {CARDS["H200"].memory_gb_per_s:g} GB/s, of which a copy reaches 88 to 90 %; the rest of its error
({errors(record, unit="GB/s")}) is that of kernels which do not reach a copy's rate.

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
        "GB/s of the steady path on an RTX 5090, and the busiest pipe. The model ends at the memory's "
        f"{CARDS[CONSUMER[0]].memory_gb_per_s:g} GB/s, which no card reaches: a copy reaches 88 to 90 % on the H200, where the model "
        f"of quantizers is {errors(record, unit='GB/s')} too fast ([above](#the-model-beside-measured-times)). 100 % "
        "therefore means that instructions do not limit the kernel, not that it will run at this rate.\n\n"
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
        + "\n"
        + constant_table()
        + "\nThe sources:\n\n```\n"
        + sources.strip("\n")
        + "\n```\n"
    )


def constant_table() -> str:
    """Return the latencies and sizes that the simulation uses."""
    kinds: dict[str, list[str]] = {}
    for rate in rates.RATES:
        kinds.setdefault(rate.kind, []).extend(rate.stems.split())
    varies = {rate.kind for rate in rates.RATES if rate.pipe == "LSU"}
    rows = [
        [
            f"latency: {kind} ({' '.join(kinds[kind][:4])}{' ...' if len(kinds[kind]) > 4 else ''})",
            f"{cycles} cycles" + (" and 0 to 50 % more" if kind in varies else ""),
            "[usual]",
        ]
        for kind, cycles in rates.LATENCIES.items()
        if kind in kinds and cycles > 4
    ]
    rows += [
        ["latency of all other instructions with a scoreboard", f"{rates.OTHER_LATENCY} cycles", "[usual]"],
        ["until operands of such an instruction are read", f"{rates.READ_LATENCY} cycles", "[usual]"],
        ["cp.async, from L2 to shared memory", f"{rates.COPY_LATENCY} cycles", "[usual]"],
        ["last arrival at a barrier to the next issue", f"{rates.BARRIER_LATENCY} cycles", "[usual]"],
        ["a taken branch, for its warp", f"{rates.BRANCH_CYCLES} cycles", "[usual]"],
        [
            "instructions that wait in front of a pipe",
            ", ".join(f"{pipe} {queue}" for pipe, queue in rates.QUEUES.items()) + ", others 1",
            "[usual]",
        ],
    ]
    for target in ("sm_120a", "sm_90"):
        room = rates.MULTIPROCESSORS[target]
        source = "CUDA Programming Guide, table of technical specifications by compute capability"
        rows += [
            [
                f"multiprocessor of {target}",
                f"{room.registers} registers, {room.shared_bytes} bytes of shared memory, {room.warps} warps, "
                f"{room.blocks} blocks",
                source,
            ],
            [
                f"L2 of {target}",
                f"{room.l2_bytes_per_clock:g} bytes per clock and multiprocessor",
                "the value at which an earlier form of this model fits [attention]"
                if target == "sm_120a"
                else "[usual]",
            ],
        ]
    return (
        "The latencies count from the start in the pipe to the result, for instructions that ptxas guards by scoreboards. "
        "Other instructions have the stall counts of their code.\n\n" + table(["constant", "value", "source"], rows)
    )


def pictures() -> str:
    lines = [
        "## Rooflines\n\n"
        "Vertical: useful TFLOPS of the plain path. Horizontal: flops per byte of memory, with each operand and the "
        "output read or written once; attention at b1 h32 s4096 d128, products at 8192 x 8192 x 8192. Roofs are those of "
        "single formats. The roof of a mixture lies between those of its two formats: half of its flops run at each rate "
        "(the column peak above). Dotted lines, in the first picture only: the rates at which published matrix products "
        "stop on this card.\n"
    ]
    return "\n".join(lines + [f"![Roofline of the {name}]({picture_of(name)})" for name in CONSUMER]) + "\n"


def picture_of(card: str) -> str:
    return f"speed_{card.lower().replace(' ', '_')}.png"


def page(record: dict) -> str:
    parts = [
        introduction(record),
        attention_tables(record),
        other_table(record),
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
