"""What is found out beside the result: executions per PTX line, shared-memory bank conflicts, races.

`Coverage` sums executions over processes: with the environment variable PTXRT_COVERAGE every process writes its
counts into that directory when it ends, and `merge` adds them up.

Conflicts and races are found by an `Observer` of one batch, which sees every access to shared memory.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import uuid
from pathlib import Path
from typing import Optional

import numpy as np

from .instruction import Fault
from .memory import SHARED_BASE

WARP = 32
BANKS = 32

Lines = dict[int, int]
Counts = dict[str, dict[str, Lines]]  # module -> entry -> line -> count

# ---------------------------------------------------------------------------------------------------------------
# Executions per line


def line_counts(code, counts: list[int]) -> Lines:
    """{PTX line: threads that executed it} of a translated entry; instances of an inlined line are added up."""
    found: Lines = {}
    for block, count in zip(code.program.blocks, counts):
        instructions = block.instructions + ([block.end] if block.end is not None else [])
        for line in {instruction.line for instruction in instructions}:
            found[line] = found.get(line, 0) + count
    return found


class Coverage:
    """Counts of all entries that this process launches, written to a directory when it ends."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.entries: list[tuple[str, str, object, list[int]]] = []
        atexit.register(self.write)

    def add(self, module: str, entry: str, code, counts: list[int]) -> None:
        """Remember an entry's counts, which go on growing."""
        self.entries.append((module, entry, code, counts))

    def write(self) -> None:
        """Write one file: {module: {entry: {line: count}}}."""
        if not self.entries:
            return
        total: Counts = {}
        for module, entry, code, counts in self.entries:
            _add(total, module, entry, line_counts(code, counts))
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"{os.getpid()}-{uuid.uuid4().hex[:8]}.json"
        path.write_text(json.dumps(total))
        self.entries.clear()


def _add(total: Counts, module: str, entry: str, lines: Lines) -> None:
    into = total.setdefault(module, {}).setdefault(entry, {})
    for line, count in lines.items():
        into[int(line)] = into.get(int(line), 0) + count


_collector: Optional[Coverage] = None


def collector() -> Optional[Coverage]:
    """The process's coverage, if PTXRT_COVERAGE names a directory."""
    global _collector
    if _collector is None and os.environ.get("PTXRT_COVERAGE"):
        _collector = Coverage(Path(os.environ["PTXRT_COVERAGE"]))
    return _collector


def merge(directory) -> Counts:
    """The sum of all counts in a directory: {module: {entry: {PTX line: threads}}}; lines never executed have 0."""
    total: Counts = {}
    for path in sorted(Path(directory).glob("*.json")):
        for module, entries in json.loads(path.read_text()).items():
            for entry, lines in entries.items():
                _add(total, module, entry, lines)
    return total


# ---------------------------------------------------------------------------------------------------------------
# Shared memory


def current_line(batch) -> int:
    """The PTX line that generated code is executing, 0 outside of it."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith("<") and " block " in name:
            number = int(name.rsplit(" ", 1)[1][:-1])
            instruction = batch.code.blocks[number].lines.get(frame.f_lineno)
            return instruction.line if instruction else 0
        frame = frame.f_back
    return 0


def conflicts(lanes: np.ndarray, offset: np.ndarray, size: int) -> int:
    """Extra passes that accesses of `size` bytes at shared byte offsets need, over all warps.

    Thirty-two banks of 4 bytes; a warp's access goes in one phase up to 4 bytes, in two of 16 lanes at 8 bytes, in four of 8
    lanes at 16 bytes; lanes that want the same word share it. Source: CUDA C++ programming guide, shared memory; the
    phases as in NVIDIA's description of ldmatrix (eight rows of 16 bytes at a time).
    """
    words = max(size // 4, 1)
    per_phase = WARP // words
    phase = lanes // per_phase
    word = (offset.astype(np.int64)[:, None] // 4 + np.arange(words)).reshape(-1)
    phase = np.repeat(phase, words)
    pairs = np.unique(phase * (1 << 32) + word)
    phases, banks = pairs >> 32, pairs % BANKS
    used = np.bincount(phases * BANKS + banks).reshape(-1) if len(pairs) else np.zeros(0, int)
    used = np.pad(used, (0, -len(used) % BANKS)).reshape(-1, BANKS).max(axis=1)
    return int(np.maximum(used - 1, 0).sum())


class Observer:
    """Sees the accesses of one batch to shared memory: counts bank conflicts, and finds races.

    Races: every warp has a vector clock (the latest step of every other warp of its block that happened before what it
    does now). A barrier joins the clocks of who meets there. Two accesses to a byte by different warps, at least one of
    them a write, are a race where neither happened before the other. Threads of one warp are not checked against
    each other. The order in which the emulator ran the warps does not matter.
    """

    def __init__(self, batch, count_conflicts: bool, find_races: bool):
        self.batch = batch
        self.counts: Optional[Lines] = batch.launch.conflict_lines if count_conflicts else None
        self.races = find_races
        if find_races:
            size, warps = len(batch.shared.data), batch.warps
            self.clock = np.zeros((batch.blocks, warps, warps), np.int32)
            self.clock[:, np.arange(warps), np.arange(warps)] = 1
            self.writer = np.full(size, -1, np.int16)
            self.write_clock = np.zeros(size, np.int32)
            self.write_line = np.zeros(size, np.int32)
            self.atomic = np.zeros(size, bool)
            self.read_clock = np.zeros((size, warps), np.int32)

    def access(self, access, offset: np.ndarray, size: int, lane: Optional[np.ndarray], verb: str) -> None:
        """Note an access at byte offsets from the start of each thread's shared memory."""
        lanes = access.lane_ids if lane is None else access.lane_ids[lane]
        if self.counts is not None and verb in ("reads", "writes"):
            found = conflicts(lanes, offset, size)
            if found:
                line = current_line(self.batch)
                self.counts[line] = self.counts.get(line, 0) + found
        if self.races:
            flat = offset.astype(np.int64) + self.batch.block[lanes] * self.batch.shared_stride
            self.check(lanes, flat, size, verb)

    def landed(self, lanes: np.ndarray, flat: np.ndarray, size: int) -> None:
        """Note asynchronous copies that are performed now, at flat byte offsets."""
        if self.races:
            self.check(lanes, flat, size, "copies to")

    def synchronized(self, lanes: np.ndarray) -> None:
        """Join the clocks of the warps of these threads, block by block."""
        if not self.races:
            return
        warps = np.unique(np.asarray(lanes) // WARP)
        block, warp = warps // self.batch.warps, warps % self.batch.warps
        for number in np.unique(block):
            here = warp[block == number]
            self.clock[number, here] = self.clock[number, here].max(axis=0)
            self.clock[number, here, here] += 1

    def check(self, lanes: np.ndarray, flat: np.ndarray, size: int, verb: str) -> None:
        """Compare with earlier accesses to the same bytes, and remember these."""
        batch = self.batch
        block = np.repeat(batch.block[lanes], size)
        warp = np.repeat(lanes // WARP % batch.warps, size)
        at = (flat[:, None] + np.arange(size)).reshape(-1)
        seen = self.clock[block, warp]  # (n, warps)
        mine = seen[np.arange(len(at)), warp]
        writer = self.writer[at]
        known = np.where(writer >= 0, seen[np.arange(len(at)), np.maximum(writer, 0)], 0)
        other = (writer >= 0) & (writer != warp) & (self.write_clock[at] > known)
        if verb == "updates":
            other &= ~self.atomic[at]
        if other.any():
            self.fault(lanes, flat, size, verb, int(np.argmax(other)), at, "wrote")
        if verb == "reads":
            self.read_clock[at, warp] = mine
            return
        if verb != "updates":
            unseen = self.read_clock[at] > seen
            unseen[np.arange(len(at)), warp] = False
            if unseen.any():
                self.fault(
                    lanes,
                    flat,
                    size,
                    verb,
                    int(np.argmax(unseen.any(axis=1))),
                    at,
                    "read",
                    int(np.argmax(unseen[int(np.argmax(unseen.any(axis=1)))])),
                )
        self.writer[at], self.write_clock[at], self.atomic[at] = warp, mine, verb == "updates"
        self.write_line[at] = current_line(batch)
        both = self.writer[at] != warp
        if verb != "updates" and both.any():
            self.fault(lanes, flat, size, verb, int(np.argmax(both)), at, "writes with the same instruction")

    def fault(
        self, lanes, flat, size: int, verb: str, position: int, at: np.ndarray, what: str, warp: Optional[int] = None
    ) -> None:
        byte = int(at[position])
        address = SHARED_BASE + byte % max(self.batch.shared_stride, 1)
        other = int(self.writer[byte]) if warp is None else warp
        where = f" at PTX line {int(self.write_line[byte])}" if what == "wrote" and self.write_line[byte] else ""
        fault = Fault(
            f"{verb} {size} bytes of shared memory, and warp {other} {what} the byte at 0x{address:x}{where}: a race, "
            "nothing orders the two",
            position // size,
        )
        fault.lane_ids = lanes
        raise fault
