"""docs/lessons/: lessons on small kernels, with counts from runs on the emulator; for `make docs`.

All numbers are counts from running the shipped PTX, or that of docs/lessons/lessons.cu: executed instructions, sectors
of global memory and bank conflicts of shared memory, each by line. None is a time of a machine.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

import ptxrt
from ptxrt import units
from ptxrt.emulator import memory
from ptxrt.emulator.check import current_line
from ptxrt.formats import bf16
from ptxrt.ops.attention import exact_attention

FOLDER = Path(__file__).resolve().parent / "lessons"
EMULATOR = dict(bank_conflicts=True)
SECTOR = 32


class Line(NamedTuple):
    """An executed PTX line: its text and how many threads executed it. For global memory: requests of warps, the
    sectors of 32 bytes that they touched, and the bytes that threads accessed. For shared memory: the extra passes of
    bank conflicts."""

    text: str
    threads: int
    requests: int = 0
    sectors: int = 0
    bytes: int = 0
    passes: int = 0


class Run(NamedTuple):
    """The executed lines of one entry, and the number of elements that it processed."""

    lines: list[Line]
    elements: int

    @property
    def instructions(self) -> float:
        """Instructions executed by threads, for each element."""
        return sum(line.threads for line in self.lines) / self.elements

    def share(self, *classes: str) -> float:
        """Return the share of instructions in some classes."""
        chosen = sum(line.threads for line in self.lines if class_of(line.text) in classes)
        return chosen / sum(line.threads for line in self.lines)

    def sectors(self, what: str) -> float:
        """Return the sectors of each request of global loads ("ld") or stores ("st")."""
        found = [line for line in self.lines if line.requests and unguarded(line.text).startswith(what)]
        return sum(line.sectors for line in found) / sum(line.requests for line in found)

    def wasted(self) -> float:
        """Return the bytes of sectors for each byte that threads accessed."""
        return SECTOR * sum(line.sectors for line in self.lines) / sum(line.bytes for line in self.lines)

    @property
    def passes(self) -> int:
        return sum(line.passes for line in self.lines)


_CLASSES = {
    "global memory": r"(ld|st)\.(volatile\.|weak\.)?global",
    "shared memory": r"(ld|st)\.shared",
    "parameters": r"ld\.param",
    "shuffles": r"shfl",
    "conversions to codes": r"cvt\.rn\.satfinite",
    "barriers": r"bar",
    "branches": r"(bra|ret|exit)",
    "floats": r"\w+(\.\w+)*\.f(32|16x2|16)\b",
}


def class_of(text: str) -> str:
    """Return the class of a PTX line; the last class is the computation of addresses, counters and bits."""
    words = unguarded(text)
    return next((name for name, pattern in _CLASSES.items() if re.match(pattern, words)), "integers and addresses")


def unguarded(text: str) -> str:
    """Return a PTX line without its predicate, and without the register declarations at the start of inline code."""
    return re.sub(r"^(@!?%\w+\s+|\{\.reg [^;]*;\s*)", "", text)


@contextmanager
def sectors_by_line():
    """Context manager that counts requests, sectors and bytes of global memory by PTX line."""
    found: dict[int, np.ndarray] = {}
    locate = memory.Access.locate

    def counting(self, space, address, size, lane=None, verb="reads", used=None):
        if space == "global":
            lanes = self.lane_ids if lane is None else self.lane_ids[lane]
            touched = np.concatenate([address // SECTOR, (address + (size - 1)) // SECTOR]).astype(np.int64)
            pairs = np.unique(np.stack([np.tile(lanes // 32, 2), touched]), axis=1)
            counts = found.setdefault(current_line(self.batch), np.zeros(3, np.int64))
            counts += len(np.unique(lanes // 32)), pairs.shape[1], size * len(lanes)
        return locate(self, space, address, size, lane, verb, used)

    memory.Access.locate = counting
    try:
        yield found
    finally:
        memory.Access.locate = locate


def measured(entry: str, text: str, elements: int, call: Callable[[], object]) -> Run:
    """Run a call that launches an entry of a PTX text once, on the emulator, and count."""
    with ptxrt.using("emulator", **EMULATOR) as backend:
        emulator = backend.emulator

        def counts(table):
            return {line: count for entries in table.values() for line, count in entries.get(entry, {}).items()}

        call()  # this run translates and records; the second one is counted
        before, before_passes = counts(emulator.coverage()), counts(emulator.bank_conflicts)
        with sectors_by_line() as sectors:
            call()
        after, passes = counts(emulator.coverage()), counts(emulator.bank_conflicts)
    rows = text.splitlines()
    lines = []
    for number in sorted(after):
        threads = after[number] - before.get(number, 0)
        if threads:
            told = sectors.get(number, np.zeros(3, np.int64)).tolist()
            extra = passes.get(number, 0) - before_passes.get(number, 0)
            lines.append(Line(rows[number - 1].strip().rstrip(";"), threads, *told, extra))
    return Run(lines, elements)


def shipped(entry: str, elements: int, call: Callable[[], object], unit: str | None = None) -> Run:
    """Return the run of a kernel of the package."""
    return measured(entry, units.text(unit or entry, portable=False), elements, call)


def own(entry: str, elements: int, grid, block, *arguments) -> Run:
    """Return the run of a kernel of lessons.cu."""
    path = FOLDER / "lessons.ptx"
    with ptxrt.using("emulator", **EMULATOR):
        program = ptxrt.load(path)  # its counts exist as long as the program
        return measured(entry, path.read_text(), elements, lambda: program[entry](grid, block, *arguments))


def table(heads: list[str], rows: list[tuple]) -> str:
    """Return a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def beside(runs: dict[str, Run], width: int = 56) -> str:
    """Return the executed PTX lines of the runs side by side, with the mean number of executions by each thread of the
    launch. A single run fills two columns."""
    most = {name: max(line.threads for line in run.lines) for name, run in runs.items()}
    first = {name: run.lines[0].threads for name, run in runs.items()}
    columns = []
    for name, run in runs.items():
        words = [f"{name}, times a thread", ""]
        for line in run.lines:
            times = f"{line.threads / first[name]:.2g}".rjust(max(2, len(f"{most[name] / first[name]:g}")))
            words.append(f"{times} {' '.join(line.text.split())}"[: width - 2])
        columns.append(words)
    if len(columns) == 1:
        (words,) = columns
        half = 2 + (len(words) - 1) // 2
        columns = [words[:half], ["", "", *words[half:]]]
    count = max(map(len, columns))
    rows = [[column[i] if i < len(column) else "" for column in columns] for i in range(count)]
    return "```\n" + "\n".join("".join(cell.ljust(width) for cell in row).rstrip() for row in rows) + "\n```\n"


def shares(runs: dict[str, Run]) -> str:
    """Return a table of the shares of instructions by class."""
    classes = [*_CLASSES, "integers and addresses"]
    rows = [
        (name, *(f"{100 * run.share(name):.0f} %" for run in runs.values()))
        for name in classes
        if any(run.share(name) for run in runs.values())
    ]
    total = ("instructions of a thread for each value", *(f"{run.instructions:.2f}" for run in runs.values()))
    return table(["", *(f"`{name}`" for name in runs)], [total, *rows])


_COUNTED = (
    "All numbers on this page are counts from the emulator, which executed the native PTX. None is a measured time.\n"
    "`make docs` writes this page.\n"
)


# ---------------------------------------------------------------------------------------------------------------------
# Pages


def threads_page() -> str:
    """Return the page on identities of threads."""
    kernel = ptxrt.kernels()["thread_identity"]
    with ptxrt.using("emulator"):
        found = np.asarray(kernel(blocks_x=3, blocks_y=2, blocks_z=4))
    rows = []
    for block, thread in (((0, 0, 0), 0), ((0, 0, 0), 1), ((0, 0, 0), 8), ((0, 0, 0), 32), ((3, 1, 2), 95)):
        numbers = found[block][thread].tolist()
        tid, ctaid = (", ".join(map(str, numbers[i : i + 3])) for i in (0, 6))
        mask = numbers[13] & 0xFFFFFFFF
        rows.append((numbers[15], tid, ctaid, numbers[15] // 32, numbers[12], f"`{mask:#010x}`"))
    run = shipped("thread_identity", found[..., 0].size, lambda: kernel(blocks_x=1, blocks_y=1, blocks_z=1))
    registers = sorted({word for line in run.lines for word in re.findall(r"%[a-z_]+(?:\.[xyz])?", line.text)})
    registers = [word for word in registers if word.lstrip("%").partition(".")[0] in _IDENTITY]
    words = textwrap.fill(f"Registers that the kernel reads: {' '.join(f'`{word}`' for word in registers)}.", 118)
    return f"""# Who is this thread

Each thread of `thread_identity` writes its identity registers. Run this kernel first on a new machine: if its results
are right, launches, grids and stores work.

{_COUNTED}
A launch of 3 x 2 x 4 blocks of 8 x 4 x 3 threads returns, among others:

{table(["thread of its block", "%tid x, y, z", "%ctaid x, y, z", "warp", "%laneid", "%lanemask_eq"], rows)}
## What it teaches

- x varies fastest: thread (x, y, z) of a block of X x Y x Z threads has the index x + X y + X Y z.
- A warp is 32 threads with consecutive indices; x alone does not determine the warp. Here a row of 8 threads is a
  quarter of a warp. Threads that read neighboring addresses should be neighbors in x.
- %laneid is the index modulo 32. The masks follow from it: %lanemask_eq is 1 << %laneid.
- The kernel does not report %warpid. %warpid is the hardware slot in which a warp runs: on an H200 the first warp of a
  block can have 3. The number of a warp in its block is the index divided by 32.
- The order in which blocks run is undefined. %ctaid identifies a block; it does not tell when the block runs.

{words}

## The PTX

{beside({"thread_identity": run})}
The next lessons: [a transposition](transpose.md), [a quantizer](quantizer.md), [attention in one
launch](fused_attention.md).
"""


_IDENTITY = {"tid", "ntid", "ctaid", "nctaid", "laneid", "lanemask_eq", "lanemask_lt"}


def transpose_page() -> str:
    """Return the page on transposition: naive, through shared memory, and through shared memory without padding."""
    size = 64
    x = np.arange(size * size, dtype=np.float32).reshape(size, size)
    kernels, y = ptxrt.kernels(), np.zeros((size, size), np.float32)
    runs = {name: shipped(name, x.size, lambda name=name: kernels[name](x)) for name in _TRANSPOSES[:2]}
    runs["transpose_unpadded"] = own("transpose_unpadded", x.size, (2, 2), (32, 8), x, y, size, size)
    if not (y == x.T).all():
        raise ValueError("transpose_unpadded does not transpose")
    rows = [
        ("sectors a load touches", *(f"{run.sectors('ld'):g}" for run in runs.values())),
        ("sectors a store touches", *(f"{run.sectors('st'):g}" for run in runs.values())),
        ("bytes of sectors for a byte wanted", *(f"{run.wasted():g}" for run in runs.values())),
        ("extra passes of shared memory", *(f"{run.passes}" for run in runs.values())),
        (
            "a warp's access of the tile, in passes",
            "none",
            "1 to write, 1 to read",
            f"1 to write, {1 + runs['transpose_unpadded'].passes * 32 // x.size} to read",
        ),
    ]
    pairs = [{name: runs[name] for name in names} for names in (_TRANSPOSES[:2], _TRANSPOSES[1:])]
    return f"""# A transposition: coalescing and banks

Three kernels transpose a matrix of {size} x {size} float32. Their results are equal. They differ in the addresses that
the 32 threads of a warp access in one instruction.

{_COUNTED}
{table(["", *(f"`{name}`" for name in runs)], rows)}
- **Coalescing.** A warp that loads or stores 4 bytes per thread accesses 128 bytes. Global memory moves in sectors of
  32 bytes: 4 sectors suffice if the threads' addresses are consecutive. `transpose_naive` writes a column: its 32
  addresses are {size * 4} bytes apart and touch 32 sectors, and the warp uses an eighth of each.
- **A tile in shared memory.** `transpose_tiled` reads rows of x and writes rows of y. The transposition happens in
  shared memory: a warp writes a row of the tile and reads a column.
- **Banks.** Shared memory has 32 banks, and consecutive words of 4 bytes lie in consecutive banks.
  `transpose_unpadded` has 32 floats in a row: a column of the tile lies in one bank, and a warp needs 32 passes to
  read it. With 33 floats in a row, the words of a column lie in 32 different banks.
- **A barrier.** Threads read words of the tile that other threads wrote. Without `bar.sync` the emulator reports a race
  (`using("emulator", races=True)`).

The tile costs more instructions and a barrier. It pays off because both kernels are bound by global memory, not by
instructions.

## Shares of instructions

{shares(runs)}
## The PTX side by side

{beside(pairs[0])}
Padding changes the addresses of the tile alone: a row is 33 floats, 132 bytes, and not 128.

{beside(pairs[1])}
`ptxrt --bank-conflicts run transpose_tiled ...` counts passes of any call; `ptxrt show transpose_tiled --ptx` prints
the whole text. `transpose_unpadded` is in `docs/lessons/lessons.cu`.
"""


_TRANSPOSES = ("transpose_naive", "transpose_tiled", "transpose_unpadded")


def quantizer_page() -> str:
    """Return the page on the MXFP4 quantizer: one thread for each block of values, one warp for each, and
    as shipped."""
    x = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    blocks = x.size // 32
    want_codes, want_scales = (np.asarray(each) for each in ptxrt.kernels()["quantize_mxfp4"].reference(x).values())
    runs = {}
    for name, threads in (("quantize_by_thread", blocks), ("quantize_by_warp", 32 * blocks)):
        codes, scales = np.zeros((blocks, 16), np.uint8), np.zeros(blocks, np.uint8)
        runs[name] = own(name, x.size, (threads // 128,), (128,), x, codes, scales, blocks)
        if (codes.reshape(want_codes.shape) != want_codes).any() or (scales != want_scales.reshape(-1)).any():
            raise ValueError(f"{name} gives other bytes than quantize")
    runs["quantize_mxfp4_f32"] = shipped(
        "quantize_mxfp4_f32", x.size, lambda: ptxrt.kernels()["quantize_mxfp4"](x), "quantize_mxfp4"
    )
    requests = {
        name: sum(line.requests for line in run.lines if unguarded(line.text).startswith("ld")) / (x.nbytes / 128)
        for name, run in runs.items()
    }
    rows = [
        ("sectors a load touches", *(f"{run.sectors('ld'):g}" for run in runs.values())),
        ("loads for each 128 bytes of x", *(f"{requests[name]:g}" for name in runs)),
        ("sectors a store touches", *(f"{run.sectors('st'):.3g}" for run in runs.values())),
        ("bytes of sectors for a byte wanted", *(f"{run.wasted():.3g}" for run in runs.values())),
        ("instructions of a thread for each value", *(f"{run.instructions:.1f}" for run in runs.values())),
    ]
    pair, shipped_run = {name: runs[name] for name in list(runs)[:2]}, runs["quantize_mxfp4_f32"]
    per_thread = x.size // shipped_run.lines[0].threads
    return f"""# A quantizer: one thread, one warp, as shipped

MXFP4 divides a row into blocks of 32 values with one scale byte each. Three kernels quantize
{x.shape[0]} x {x.shape[1]} float32 to the same bytes.

{_COUNTED}
{table(["", *(f"`{name}`" for name in runs)], rows)}
- **One thread per block** is the obvious first version. Neighboring threads load from addresses 128 bytes apart: a
  warp touches 32 sectors and uses an eighth of each. Each value is read twice. Caches hide part of this cost until many
  warps share them.
- **One warp per block** reads 128 consecutive bytes. The maximum takes five shuffles of all 32 lanes. Half of the lanes
  are idle when pairs of codes become bytes, and all but one when the scale is stored.
- **As shipped**, a lane holds eight neighboring values, which are one sector of 32 bytes. Four lanes share a block,
  and two shuffles find its maximum. A load of 16 bytes reads half of each sector; the next load reads the other half
  while the sector is in the L1 cache. The table counts both. Eight loads are in flight before the first value is used,
  and codes are stored as words.

The lesson: give each lane as many neighboring values as one sector holds, and share a block among as few lanes as
possible.

## Shares of instructions

{shares(runs)}
## The PTX side by side

{beside(pair)}
The kernel as shipped, whose threads each take {per_thread} values:

{beside({"quantize_mxfp4_f32": shipped_run})}
`ptxrt show quantize_mxfp4 --ptx` prints the shipped text, and [one kernel from call to
SASS](../explanation/one_kernel.md) explains it. The other two are in `docs/lessons/lessons.cu`.
"""


def unfused_page() -> str:
    """Return the page that compares attention in three launches with one."""
    batch, heads, queries, dim = 1, 2, 64, 64
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((batch, heads, queries, dim)).astype(bf16.dtype) for _ in range(3))
    with ptxrt.using("emulator"):
        program = ptxrt.load(FOLDER / "lessons.ptx")
        with ptxrt.trace() as three:
            scores = ptxrt.matmul(q, k, alpha=dim**-0.5, out_dtype=np.float32)
            weights = np.zeros(scores.shape, np.uint16)
            rows = scores.size // queries
            program["softmax_rows"]((rows // 4,), (128,), scores, weights, rows, queries)
            unfused = ptxrt.matmul(weights.view(bf16.dtype), v, transpose_b=False)
        with ptxrt.trace() as one:
            fused = ptxrt.attention(q, k, v)
    exact, _ = exact_attention(q, k, v)
    distances = [ptxrt.compare(each, exact).relative_l2 for each in (unfused, fused)]

    def moved(length, head_dim, heads=32):
        small, square = 2 * heads * length * head_dim, heads * length * length
        return {
            "Q K^T": 2 * small + 4 * square,
            "softmax": 4 * square + 2 * square,
            "P V": 2 * square + 2 * small,
        }, 4 * small

    rows = []
    for length in (512, 2048, 8192):
        parts, whole = moved(length, 128)
        total = sum(parts.values())
        flops = 4 * 32 * length * length * 128
        rows.append(
            (
                length,
                *(f"{part / 2**20:.0f} MiB" for part in parts.values()),
                f"{whole / 2**20:.0f} MiB",
                f"{total / whole:.0f}",
                f"{1e6 * total / _BANDWIDTH:.0f}",
                f"{1e6 * flops / _RATE:.0f}",
                f"{1e6 * flops / fused_rate():.0f}",
            )
        )
    return f"""# Attention in one launch

This lesson compares softmax(Q K^T) V in three launches with `attention`, which is one launch. Both ran on the emulator
for {heads} heads of {queries} queries and keys of {dim} columns in bf16:

{
        table(
            ["", "launches", "relative L2 against float64"],
            [
                (
                    "`matmul`, `softmax_rows`, `matmul`",
                    ", ".join(f"`{launch.entry}`" for launch in three),
                    f"{distances[0]:.1e}",
                ),
                (
                    "`attention`",
                    ", ".join(f"`{launch.entry}`" for launch in one),
                    f"{distances[1]:.1e}",
                ),
            ],
        )
    }
`softmax_rows` is in `docs/lessons/lessons.cu`; the other kernels are part of the package. `make docs` writes this page.

## Bytes

Three launches write and read float32 scores, then write and read 16-bit weights: 2 x 4 + 2 x 2 = 12 bytes for each pair
of query and key, whatever the head dimension. The fused kernel keeps a tile of scores in registers, so that only Q, K,
V and O move through memory. For 32 heads of 128 columns, computed from the shapes:

{
        table(
            [
                "queries and keys",
                "Q K^T",
                "softmax",
                "P V",
                "fused",
                "times fewer bytes",
                "unfused: bytes alone, us",
                "products alone, us",
                "fused by the model, us",
            ],
            rows,
        )
    }
The last three columns are computed for an RTX 5090, and no such card was measured. They take bytes at 1792 GB/s,
products at 209.5 TFLOPS in bf16, and the fused kernel from the [static model](../speed.md), which is
{model_errors()} too fast on the H200. The times of the bytes and of the products are lower bounds of the three
launches; caches absorb part of the bytes while the scores of a head fit into them. (`softmax_rows` reads a row three
times. Two of the reads hit caches and are not counted.)

## What fusing needs

- **An online softmax.** The maximum of a row is final only after its last key. The fused kernel keeps a running maximum
  and rescales its sums when the maximum grows ([numerics](../numerics.md)).
- **Scores in the layout of the next operand.** The accumulator of Q K^T, packed to 16 bits, is the A operand of P V:
  the [pages of fragments](../fragments.md) show that the two layouts are the same.
- **Loads that overlap products.** A block copies the next keys to shared memory while it multiplies
  ([the pipeline](../explanation/pipeline.md)).
- **Fewer roundings.** Weights are rounded once, before P V, and sums stay in float32 until the end.
"""


_BANDWIDTH, _RATE = 1792e9, 209.5e12  # RTX 5090, bytes and bf16 flops per second: NVIDIA's whitepaper


def model_errors() -> str:
    """Return between which errors the model's attention lies on the H200, as the page of the model states it."""
    page = (FOLDER.parent / "speed.md").read_text(encoding="utf-8")
    (errors,) = re.findall(r"model of attention is too fast everywhere, by ([^.]+)\.", page)
    return errors


@cache
def fused_rate() -> float:
    """Return the model's useful flops per second of bf16 attention at head dimension 128 on an RTX 5090."""
    record = json.loads((FOLDER.parent.parent / "tests" / "speed_figures.json").read_text(encoding="utf-8"))
    return 1e12 * record["entries"]["attention_bf16_dim128_dim_v128_bf16"]["paths"]["plain"][0]


PAGES = {
    "threads.md": threads_page,
    "transpose.md": transpose_page,
    "quantizer.md": quantizer_page,
    "fused_attention.md": unfused_page,
}


def pages() -> dict[str, str]:
    """Return all pages, by path below docs/."""
    return {f"lessons/{name}": page() for name, page in PAGES.items()}
