"""Analyses beside the results: executions per PTX line (coverage), shared-memory bank conflicts, data races.

`Coverage` collects the counts of a process: if the environment variable PTXRT_COVERAGE names a directory, every process
writes its counts there at exit, and `merge` sums them. `Observer` sees every access of one batch to shared memory: it
counts bank conflicts and finds races between threads. `GlobalRaces` sees the accesses of one launch to global memory:
it finds races between blocks. memory.py and machine.py report accesses and synchronization to both.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import json
import os
import sys
import uuid
import weakref
from pathlib import Path

import numpy as np

from ..errors import ArgumentError
from .instruction import Fault
from .memory import SHARED_BASE, bytes_of_mask

WARP = 32
BANKS = 32

Lines = dict[int, int]
Counts = dict[str, dict[str, Lines]]  # module, or key of its text -> entry -> line -> count

# ---------------------------------------------------------------------------------------------------------------
# Executions per line


def line_counts(code, counts: list[int]) -> Lines:
    """{PTX line: threads that executed it} of a translated entry; copies of an inlined line are summed."""
    found: Lines = {}
    for block, count in zip(code.program.blocks, counts):
        instructions = block.instructions + ([block.end] if block.end is not None else [])
        for line in {instruction.line for instruction in instructions}:
            found[line] = found.get(line, 0) + count
    return found


class Coverage:
    """Counts of all entries that this process launches, written to a directory at exit.

    A text that is loaded again has the same blocks. Its counts are added to those of modules that are gone, so that
    they do not grow with the number of loads.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self._codes: dict[tuple[str, str], object] = {}  # key of a text and entry -> a translation
        self._ended: dict[tuple[str, str], list[int]] = {}  # counts of modules that are gone
        self._live: dict[int, tuple[tuple[str, str], list[int]]] = {}
        self._numbers = itertools.count()
        atexit.register(self.write)

    def add(self, module: str, entry: str, code, counts: list[int], owner) -> None:
        """Register an entry of the text that `text_key` names; its list of counts is read when `owner`, the loaded
        module, is gone, or at exit."""
        number = next(self._numbers)
        self._codes.setdefault((module, entry), code)
        self._live[number] = (module, entry), counts
        weakref.finalize(owner, self._end, number).atexit = False

    def _end(self, number: int) -> None:
        """Keep the counts of a module that is gone, unless they are written."""
        if number in self._live:
            key, counts = self._live.pop(number)
            self._ended[key] = _sums(self._ended.get(key), counts)

    @property
    def entries(self) -> list[tuple[str, str, object, list[int]]]:
        """Key of the text, entry, a translation and the sum of its counts, for each entry of each text."""
        total = dict(self._ended)
        for key, counts in list(self._live.values()):
            total[key] = _sums(total.get(key), counts)
        return [(*key, self._codes[key], counts) for key, counts in total.items()]

    def write(self) -> None:
        """Write one file: {key of a text: {entry: {line: count}}}."""
        entries = self.entries
        if not entries:
            return
        total: Counts = {}
        for module, entry, code, counts in entries:
            add_counts(total, module, entry, line_counts(code, counts))
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"{os.getpid()}-{uuid.uuid4().hex[:8]}.json"
        path.write_text(json.dumps(total))
        for known in (self._codes, self._ended, self._live):
            known.clear()


def _sums(before: list[int] | None, counts: list[int]) -> list[int]:
    return list(counts) if before is None else [a + b for a, b in zip(before, counts, strict=True)]


def text_key(name: str, text: str) -> str:
    """The key of a text's counts: its file name and a digest, since tests also run changed texts of a shipped name."""
    return f"{name} {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def add_counts(total: Counts, module: str, entry: str, lines: Lines) -> None:
    """Add the counts of an entry's lines to `total`, in place."""
    into = total.setdefault(module, {}).setdefault(entry, {})
    for line, count in lines.items():
        into[int(line)] = into.get(int(line), 0) + count


_collector: Coverage | None = None


def collector() -> Coverage | None:
    """The coverage of this process; None unless PTXRT_COVERAGE names a directory."""
    global _collector
    if _collector is None and os.environ.get("PTXRT_COVERAGE"):
        directory = Path(os.environ["PTXRT_COVERAGE"])
        if directory.exists() and not directory.is_dir():
            raise ArgumentError(f"PTXRT_COVERAGE names {directory}, which is a file; name a directory")
        _collector = Coverage(directory)
    return _collector


def merge(directory) -> Counts:
    """The sum of all counts in a directory: {key of a text: {entry: {PTX line: threads}}}; 0 where a line never ran."""
    total: Counts = {}
    for path in sorted(Path(directory).glob("*.json")):
        for module, entries in json.loads(path.read_text()).items():
            for entry, lines in entries.items():
                add_counts(total, module, entry, lines)
    return total


def coverage_table(emulator) -> list[str]:
    """A table as lines of text: for each launched entry, how many of its PTX lines ran, and the lines that did not."""
    rows = [("module", "entry", "lines run", "of", "not run")]
    for module, entries in emulator.coverage().items():
        for entry, lines in entries.items():
            missed = sorted(line for line, count in lines.items() if not count)
            rows.append((module, entry, str(len(lines) - len(missed)), str(len(lines)), _ranges(missed)))
    return _columns(rows)


def conflicts_table(emulator) -> list[str]:
    """A table as lines of text: module, entry, PTX line, source line and extra passes of each line with bank
    conflicts, worst first."""
    rows = []
    labels = dict(reversed(emulator.labels()))
    for module, entries in emulator.bank_conflicts.items():
        for entry, lines in entries.items():
            sources = _sources(labels[module], entry)
            rows += [
                (passes, (module, entry, str(line), sources.get(line, ""), str(passes)))
                for line, passes in lines.items()
            ]
    rows.sort(key=lambda row: (-row[0], row[1]))
    return _columns([("module", "entry", "PTX line", "source", "extra passes"), *(row for _, row in rows)])


def _sources(module, entry: str) -> dict[int, str]:
    """The source position of each PTX line of a translated entry."""
    code = module._codes.get(entry)
    instructions = [each for block in code.program.blocks for each in block.instructions] if code is not None else []
    return {each.line: module.source_of(each.location) for each in instructions}


def _ranges(numbers: list[int]) -> str:
    """Ascending numbers as ranges, such as `3, 5-9, 12`; at most ten ranges."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in parts]
    return ", ".join(words[:10]) + (", ..." if len(words) > 10 else "")


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(word.ljust(width) for word, width in zip(row, widths)).rstrip() for row in rows]


# ---------------------------------------------------------------------------------------------------------------
# Shared memory


def current_line(batch) -> int:
    """The PTX line that generated code executes now, found on the Python stack; 0 outside of generated code."""
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
    """Extra passes of accesses of `size` bytes at shared byte offsets, summed over all warps.

    Shared memory has 32 banks of 4 bytes. An access of a warp takes one phase for up to 4 bytes per lane, two phases of
    16 lanes for 8 bytes, four phases of 8 lanes for 16 bytes. Lanes that access the same word share it (broadcast). A
    phase takes max over banks of (distinct words in the bank) passes; the first pass is not counted.
    Source: CUDA C++ programming guide, shared memory; the phases as in NVIDIA's description of ldmatrix (eight rows of
    16 bytes at a time).
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
    """Observes the accesses of one batch to shared memory: counts bank conflicts and finds races.

    Happens-before is tracked with vector clocks. The clock of a thread holds, for each thread of its block, the latest
    step that happened before the thread's current step. A barrier of the block, of some of its threads or of a warp
    (bar.warp.sync) joins the clocks of the threads that wait for each other. An mbarrier, and a barrier at which some
    threads only arrive, takes the clocks of the threads that arrive at a phase and passes them to the threads that
    observe its completion. Two accesses to a byte by different threads
    are a race if at least one is a write and neither happened before the other. The order in which the emulator runs
    them does not matter.

    An asynchronous copy accesses memory from its issue until its completion is known; any other access in between is
    a race. cp.async completes for its own thread at its wait. A copy that completes on an mbarrier belongs to an agent:
    a pseudo-thread with an index after those of the threads, whose steps become known through that barrier only. Bulk
    copies use the async proxy. They may read or overwrite bytes that a thread wrote only after a fence.proxy.async: the
    second half of each clock holds the steps that are fenced. (Bytes that a thread only read may be overwritten without
    a fence, as in pipelines that return a buffer by an mbarrier alone.)

    A barrier of the whole block orders all earlier accesses before all later ones. An epoch counts these barriers, and
    only accesses of the current epoch are compared by their clocks.
    """

    def __init__(self, batch, count_conflicts: bool, find_races: bool, strict: bool = False):
        self.batch = batch
        self.counts: Lines | None = batch.launch.conflict_lines if count_conflicts else None
        self.races = find_races
        self.strict = strict  # whether stores of equal bytes are races, too
        if find_races:
            self.unit = 4  # bytes of a place, the granularity at which accesses are recorded
            size, self.lanes = len(batch.shared.data) // self.unit, batch.warps * WARP
            self.agents = self.lanes + _AGENTS
            self.clock = np.zeros((batch.blocks, self.lanes, 2 * self.agents), np.int32)
            own = np.arange(self.lanes)
            self.clock[:, own, own] = 1
            self.agent_clock = np.zeros((batch.blocks, _AGENTS), np.int32)
            self.barrier_clocks: dict[
                int, tuple[np.ndarray, np.ndarray]
            ] = {}  # (clock of the current phase, clock of the completed phases)
            self.writer = np.full(size, -1, np.int16)
            self.write_clock = np.zeros(size, np.int32)
            self.write_line = np.zeros(size, np.int32)
            self.atomic = np.zeros(size, bool)
            self.read_clock = np.zeros((size, self.agents), np.int32)
            self.epoch = np.zeros(batch.blocks, np.int32)
            self.write_epoch, self.read_epoch = np.full(size, -1, np.int32), np.full(size, -1, np.int32)
            self.lends = False  # whether any bulk copy has read shared memory

    def access(
        self,
        access,
        offset: np.ndarray,
        size: int,
        lane: np.ndarray | None,
        verb: str,
        used: int | None = None,
        values: np.ndarray | None = None,
    ) -> None:
        """Record an access at byte offsets from the start of each thread's shared memory.

        used: mask of the bytes that count, None for all. values: the stored elements, one or one for each thread; None
        where they are not known.
        """
        lanes = access.lane_ids if lane is None else access.lane_ids[lane]
        if self.counts is not None and verb in ("reads", "writes"):
            found = conflicts(lanes, offset, size)
            if found:
                line = current_line(self.batch)
                self.counts[line] = self.counts.get(line, 0) + found
        if self.races:
            flat = offset.astype(np.int64) + self.batch.block[lanes] * self.batch.shared_stride
            if used is None:
                self.check(
                    lanes, flat, size, verb, None if self.strict or values is None else _values(values, len(flat), size)
                )
                return
            for byte in np.flatnonzero(bytes_of_mask(used, size)).tolist():
                self.check(lanes, flat + byte, 1, verb)

    def places(self, flat: np.ndarray, size: int) -> np.ndarray:
        """The places of elements of `size` bytes at flat byte offsets. A place is a word; after the first access that
        does not cover whole words, it is a byte."""
        flat = np.asarray(flat)
        if self.unit > 1 and (size % self.unit or (flat % self.unit).any()):
            self.split()
        count = size // self.unit
        return flat // self.unit if count == 1 else ((flat // self.unit)[:, None] + np.arange(count)).reshape(-1)

    def split(self) -> None:
        """Record bytes instead of words from now on; each byte starts with the records of its word."""
        unit, self.unit = self.unit, 1
        # Most words are unread, and a page of zeros costs nothing until it is written: only read words are copied.
        read = np.flatnonzero(self.read_epoch >= 0)
        words, self.read_clock = self.read_clock, np.zeros((len(self.writer) * unit, self.agents), np.int32)
        self.read_clock.reshape(-1, unit, self.agents)[read] = words[read, None]
        for name in ("writer", "write_clock", "write_line", "atomic", "write_epoch", "read_epoch"):
            setattr(self, name, np.repeat(getattr(self, name), unit))

    # -- synchronization ----------------------------------------------------------------------------------------

    def synchronized(self, lanes: np.ndarray) -> None:
        """Join the clocks of these threads, separately for each block."""
        if self.races:
            block, thread = np.divmod(np.asarray(lanes), self.lanes)
            for number in np.unique(block):
                here = thread[block == number]
                self.join(number, here)
                if len(here) == self.batch.threads:
                    self.epoch[number] += 1

    def join(self, block: int, threads: np.ndarray) -> None:
        """Join the clocks of these threads of a block, and start a new step of each."""
        self.clock[block, threads] = self.clock[block, threads].max(axis=0)
        self.clock[block, threads, threads] += 1

    def met_in_warps(self, lanes: np.ndarray, mask: np.ndarray) -> None:
        """Join the clocks of the threads that each membermask names; `lanes` and `mask` are (n,) arrays."""
        if self.races:
            block, thread = np.divmod(lanes, self.lanes)
            for number, warp, names in np.unique(np.stack((block, thread // WARP, mask)), axis=1).T.tolist():
                self.join(number, thread[(block == number) & (thread // WARP == warp) & (mask == names)])

    def clocks_of(self, barrier: int) -> tuple[np.ndarray, np.ndarray]:
        """(clock of the current phase, clock of the completed phases) of a barrier."""
        if barrier not in self.barrier_clocks:
            self.barrier_clocks[barrier] = np.zeros(2 * self.agents, np.int32), np.zeros(2 * self.agents, np.int32)
        return self.barrier_clocks[barrier]

    def renewed(self, barriers: np.ndarray) -> None:
        """These barriers start anew: their clocks start from zero."""
        if self.races:
            for barrier in np.unique(barriers).tolist():
                self.barrier_clocks.pop(barrier, None)

    def released(self, lanes: np.ndarray, barriers: np.ndarray) -> None:
        """Each thread arrives at its barrier: the current phase takes its clock."""
        if self.races:
            block, thread = np.divmod(lanes, self.lanes)
            for barrier in np.unique(barriers).tolist():
                here = barriers == barrier
                current, _ = self.clocks_of(barrier)
                np.maximum(current, self.clock[block[here], thread[here]].max(axis=0), out=current)
            self.clock[block, thread, thread] += 1

    def completed(self, barrier: int) -> None:
        """The current phase of a barrier completes."""
        if self.races:
            current, before = self.clocks_of(barrier)
            np.maximum(before, current, out=before)

    def acquired(self, lanes: np.ndarray, barriers: np.ndarray) -> None:
        """Each thread observes the completion of a phase of its barrier: it takes the clock of completed phases."""
        if self.races:
            block, thread = np.divmod(lanes, self.lanes)
            for barrier in np.unique(barriers).tolist():
                here = block[barriers == barrier], thread[barriers == barrier]
                self.clock[here] = np.maximum(self.clock[here], self.clocks_of(barrier)[1])

    # -- asynchronous copies ------------------------------------------------------------------------------------

    def landed(self, lanes: np.ndarray, flat: np.ndarray, size: int, barrier: int | None = None) -> None:
        """Copies into shared memory at flat byte offsets are complete: for their own threads, or with `barrier` for the
        threads that wait for that mbarrier."""
        if not self.races:
            return
        at = self.places(flat, size)
        if barrier is None:
            block, thread = np.divmod(lanes, self.lanes)
            count = size // self.unit
            self.writer[at] = np.repeat(thread, count)
            self.write_clock[at] = np.repeat(self.clock[block, thread, thread], count)
            self.write_epoch[at] = np.repeat(self.epoch[block], count)
            return
        agent, block = barrier % _AGENTS, int(self.batch.block[lanes[0]])
        self.agent_clock[block, agent] += 1
        current, _ = self.clocks_of(barrier)
        current[self.lanes + agent] = self.agent_clock[block, agent]
        self.writer[at], self.write_clock[at] = self.lanes + agent, self.agent_clock[block, agent]
        self.write_epoch[at] = _NEVER_OVER  # a barrier of the block does not order the copy

    def fenced(self, lanes: np.ndarray) -> None:
        """A proxy fence of these threads: copy their clocks into the fenced halves."""
        if self.races:
            block, thread = np.divmod(lanes, self.lanes)
            known = self.clock[block, thread]
            known[:, self.agents :] = np.maximum(known[:, self.agents :], known[:, : self.agents])
            self.clock[block, thread] = known
            self.clock[block, thread, thread] += 1

    def lent(self, lane: int, flat: np.ndarray, size: int) -> None:
        """A bulk copy out of shared memory is issued; it reads these bytes until `returned`."""
        if not self.races:
            return
        at = self.places(flat, size)
        self.check_fenced(np.full(len(at), lane), at, "starts a bulk copy of shared memory", 1)
        self.read_clock[at, lane % self.lanes] = self.read_epoch[at] = _NEVER_OVER
        self.lends = True

    def check_fenced(self, lanes: np.ndarray, at: np.ndarray, does: str, count: int) -> None:
        """Raise a fault if the bulk copy of one of these threads accesses a place with an unfenced write of a thread.

        lanes, at: one thread and one place per element. count: places per thread.
        """
        block, thread = np.divmod(lanes, self.lanes)
        writer = self.writer[at]
        visible = self.clock[block, thread, self.agents + np.maximum(writer, 0)]
        unfenced = (writer >= 0) & (writer < self.lanes) & (self.write_clock[at] > visible)
        if unfenced.any():
            position = int(np.argmax(unfenced))
            place = int(at[position])
            fault = Fault(
                f"{does}, and thread {int(self.writer[place])} wrote the byte at 0x{self.address(place):x} "
                f"at PTX line {int(self.write_line[place])}: a race, no fence.proxy.async lies between",
                position // count,
            )
            fault.lane_ids = lanes[::count]
            raise fault

    def returned(self, lane: int, flat: np.ndarray, size: int) -> None:
        """The copy has read these bytes, and its thread has waited for it."""
        if self.races:
            thread = lane % self.lanes
            at = self.places(flat, size)
            self.read_clock[at, thread] = self.clock[lane // self.lanes, thread, thread]
            self.read_epoch[at] = self.epoch[lane // self.lanes]

    # -- races --------------------------------------------------------------------------------------------------

    def check(
        self, lanes: np.ndarray, flat: np.ndarray, size: int, verb: str, values: np.ndarray | None = None
    ) -> None:
        """Compare accesses with earlier ones to the same bytes, then record them.

        values: the stored bytes. A store of equal bytes is no race with the store before.
        """
        at = self.places(flat, size)
        count = size // self.unit
        owners = np.repeat(lanes, count) if count > 1 else lanes
        block, thread = np.divmod(lanes, self.lanes)
        mine, epoch = self.clock[block, thread, thread], self.epoch[block]
        if count > 1:
            block, thread, mine, epoch = (np.repeat(each, count) for each in (block, thread, mine, epoch))
        if values is not None:
            values = values.view(f"u{self.unit}")
        self.check_writes(lanes, size, verb, block, thread, at, epoch, values)
        if verb in _BULK:
            self.check_fenced(owners, at, f"{verb} {size} bytes of shared memory", count)
        if verb in ("reads", READS_IN_BULK):
            # The clock of a thread only grows, so plain assignment suffices; the maximum keeps reads of bulk copies.
            self.read_clock[at, thread] = np.maximum(self.read_clock[at, thread], mine) if self.lends else mine
            self.read_epoch[at] = np.maximum(self.read_epoch[at], epoch) if self.lends else epoch
            return
        if verb != "updates":
            recent = np.flatnonzero(self.read_epoch[at] >= epoch)
            if len(recent):
                self.check_reads(lanes, size, verb, block[recent], thread[recent], at[recent], recent)
        self.writer[at], self.atomic[at] = thread, verb == "updates"
        lasts = verb in ("copies to", WRITES_IN_BULK)
        self.write_clock[at] = _NEVER_OVER if lasts else mine
        self.write_epoch[at] = _NEVER_OVER if lasts else epoch
        self.write_line[at] = current_line(self.batch)
        if verb == "updates":
            return
        # Stores of one instruction to one place by lanes of one warp are allowed: one of the values is stored.
        both = self.writer[at] // WARP != thread // WARP
        if values is not None and both.any():
            last = np.zeros(len(self.writer), values.dtype)
            last[at] = values
            both &= last[at] != values
        if both.any():
            position = int(np.argmax(both))
            place = int(at[position])
            self.fault(lanes, size, verb, position, place, int(self.writer[place]), "writes with the same instruction")

    def check_writes(self, lanes, size: int, verb: str, block, thread, at: np.ndarray, epoch, values) -> None:
        """Raise a fault if a write of another thread to one of these places did not happen before this access."""
        recent = np.flatnonzero(self.write_epoch[at] >= epoch)
        if not len(recent):
            return
        place, owner = at[recent], thread[recent]
        writer, written = self.writer[place], self.write_clock[place]
        known = self.clock[block[recent], owner, np.maximum(writer, 0)]
        other = (writer >= 0) & (written > known) & ((writer != owner) | (written == _NEVER_OVER))
        if verb == "updates":
            other &= ~self.atomic[place]
        if values is not None and other.any():
            other &= (self.batch.shared.elements(self.unit)[place] != values[recent]) | (written == _NEVER_OVER)
        if other.any():
            found = _first(other, writer // WARP != owner // WARP)
            self.fault(lanes, size, verb, int(recent[found]), int(place[found]), int(writer[found]), "wrote")

    def check_reads(self, lanes, size: int, verb: str, block, thread, at: np.ndarray, positions: np.ndarray) -> None:
        """Raise a fault if a read of another thread from one of these places did not happen before this write.

        positions: the index of each place among those of the access.
        """
        for start in range(0, len(at), _PIECE):
            piece = slice(start, start + _PIECE)
            rows = np.arange(len(at[piece]))
            reads = self.read_clock[at[piece]]
            unseen = reads > self.clock[block[piece], thread[piece], : self.agents]
            unseen[rows, thread[piece]] = reads[rows, thread[piece]] == _NEVER_OVER
            if unseen.any():
                other_warp = np.arange(self.agents) // WARP != thread[piece][:, None] // WARP
                row = _first(unseen.any(axis=1), (unseen & other_warp).any(axis=1))
                other = _first(unseen[row], other_warp[row])
                self.fault(lanes, size, verb, int(positions[start + row]), int(at[start + row]), other, "read")

    def address(self, place: int) -> int:
        """The shared address of a place's first byte."""
        return SHARED_BASE + place * self.unit % max(self.batch.shared_stride, 1)

    def fault(self, lanes, size: int, verb: str, position: int, place: int, other: int, what: str) -> None:
        address = self.address(place)
        where = f" at PTX line {int(self.write_line[place])}" if what == "wrote" and self.write_line[place] else ""
        copy = what == "wrote" and int(self.write_clock[place]) == _NEVER_OVER
        copy = copy or (what == "read" and int(self.read_clock[place, other]) == _NEVER_OVER)
        if other >= self.lanes or copy:
            who = (
                f"an asynchronous copy {what}"
                if other >= self.lanes
                else f"an asynchronous copy of thread {other} {what}"
            )
        else:
            who = f"thread {other} (warp {other // WARP}) {what}"
        fault = Fault(
            f"{verb} {size} bytes of shared memory, and {who} the byte at 0x{address:x}{where}: a race, nothing "
            "orders the two",
            position // (size // self.unit),
        )
        fault.lane_ids = lanes
        raise fault


#: The verbs of accesses by bulk copies.
READS_IN_BULK, WRITES_IN_BULK = "reads in bulk", "overwrites"
_BULK = (READS_IN_BULK, WRITES_IN_BULK)
_AGENTS = 32
_NEVER_OVER = np.iinfo(np.int32).max  # the step of a copy whose completion is not known
_PIECE = 4096  # places that are compared at once


def _first(found: np.ndarray, preferred: np.ndarray) -> int:
    """The first index with `found` and `preferred` (two threads of different warps), or else the first with `found`."""
    best = found & preferred
    return int(np.argmax(best if best.any() else found))


def _values(values: np.ndarray, count: int, size: int) -> np.ndarray:
    """`count` elements of `size` bytes as one flat array of bytes; a single element is repeated."""
    values = np.broadcast_to(values, count)
    return np.ascontiguousarray(values).view(np.uint8).reshape(count * size)


def _bytes_of(flat: np.ndarray, size: int) -> np.ndarray:
    """The bytes of elements at flat byte offsets."""
    return (np.asarray(flat)[:, None] + np.arange(size)).reshape(-1)


class GlobalRaces:
    """Observes the accesses of one launch to global memory: finds races between different blocks.

    A pair of plain accesses to one byte by two blocks conflicts if one is a store and the other a load, or both store
    different values. A conflict is a race if synchronization cannot have ordered the pair. It can only if both hold:

    - the first block executes an atomic, a fence or a releasing store after its access;
    - the second block executes an atomic, a fence or an acquiring load after the first access and before its own.

    If both hold, the order depends on the values that the blocks exchange; `undecided` counts such bytes. Atomics, and
    volatile, relaxed, acquiring and releasing accesses, count as synchronization and are not checked themselves; bulk
    copies are not checked either.

    For each byte the records hold the last block that stored it, and the block that loaded it since, or `_SEVERAL`.
    """

    def __init__(self, launch, strict: bool):
        self.launch, self.strict = launch, strict
        self.step = 0
        # By block, the last step at which it could publish its accesses, and at which it could observe those of others.
        self.released = np.full(launch.blocks, -1, np.int64)
        self.acquired = np.full(launch.blocks, -1, np.int64)
        self.known: dict[int, _Bytes] = {}
        self.undecided = 0
        self.undecided_line = 0

    def synchronizes(self, batch, lanes: np.ndarray, releases: bool, acquires: bool) -> None:
        """These threads execute an atomic, a fence, or a load or store with an ordering."""
        self.step += 1
        blocks = batch.first + batch.block[lanes]
        if releases:
            self.released[blocks] = self.step
        if acquires:
            self.acquired[blocks] = self.step

    def access(self, access, region, index: np.ndarray, size: int, where, lane, verb: str, values=None) -> None:
        """Record loads ("reads") or stores ("writes") of elements of an allocation; raises a fault for a race."""
        batch = access.batch
        self.step += 1
        lanes = access.lane_ids if lane is None else access.lane_ids[lane]
        lanes = lanes if where is None else lanes[where]
        known = self.known.get(region.base)
        if known is None:
            known = self.known[region.base] = _Bytes(region)
        block = np.repeat(batch.first + batch.block[lanes], size).astype(np.int32)
        at = _bytes_of(index * size, size)
        writer, written = known.writer[at], known.written[at]
        other = (writer >= 0) & (writer != block)
        new = None
        if verb == "writes":
            new = _values(values, len(index), size)
            if not self.strict:
                other &= region.data[at] != new
        if other.any():
            self.judge(access, other, block, writer, written, region, at, known, lanes, size, verb, "wrote")
        if verb == "reads":
            reader = known.reader[at]
            known.reader[at] = np.where((reader == _NOBODY) | (reader == block), block, _SEVERAL)
            known.read[at] = self.step
            return
        reader = known.reader[at]
        other = (reader != _NOBODY) & (reader != block)
        if other.any():
            self.judge(access, other, block, reader, known.read[at], region, at, known, lanes, size, verb, "read")
        known.writer[at], known.written[at], known.reader[at] = block, self.step, _NOBODY
        known.line[at] = current_line(batch)
        both = known.writer[at] != block
        if both.any() and not self.strict:
            last = np.zeros(len(known.writer), np.uint8)
            last[at] = new
            both &= last[at] != new
        if both.any():
            self.fault(
                access,
                both,
                block,
                known.writer[at],
                at,
                known,
                region,
                lanes,
                size,
                verb,
                "writes with the same instruction",
            )

    def judge(self, access, other, block, before, when, region, at, known, lanes, size, verb, what) -> None:
        """Raise a fault for conflicts that synchronization cannot have ordered; count the others as undecided."""
        several = before == _SEVERAL
        released = np.where(several, self.released.max(), self.released[np.maximum(before, 0)])
        ordered = (released > when) & (self.acquired[block] > when)
        wrong = other & ~ordered & ~(several & (self.released.max() > when))
        if wrong.any():
            self.fault(access, wrong, block, before, at, known, region, lanes, size, verb, what)
        self.undecided += int(np.count_nonzero(other))
        self.undecided_line = self.undecided_line or current_line(access.batch)

    def describe(self) -> str:
        """A message about the undecided bytes."""
        entry, module = self.launch.code.program.entry.name, self.launch.module.name
        return (
            f"{entry}: {self.undecided} bytes of global memory were stored by one block and stored or loaded by "
            "another, first at "
            f"{module}:{self.undecided_line}; atomics or fences lie between, whether they order the two is undecided"
        )

    def fault(self, access, wrong, block, before, at, known, region, lanes, size, verb, what) -> None:
        position = int(np.argmax(wrong))
        byte, number = int(at[position]), int(before[position])
        x, y, _ = self.launch.grid
        who = f"block {(number % x, number // x % y, number // (x * y))}" if number >= 0 else "other blocks"
        line = f" at PTX line {int(known.line[byte])}" if what == "wrote" and known.line[byte] else ""
        fault = Fault(
            f"{verb} {size} bytes of {region}, and {who} {what} the byte at 0x{region.base + byte:x}{line}: "
            "a race, no atomic and no fence lies between the two blocks",
            position // size,
        )
        fault.lane_ids = lanes
        raise fault


_NOBODY, _SEVERAL = -1, -2


class _Bytes:
    """Records of each byte of an allocation: the block that stored it last and the block that loaded it since, each
    with its step, and the PTX line of the store."""

    def __init__(self, region):
        size = len(region.data)
        self.writer, self.reader = np.full(size, _NOBODY, np.int32), np.full(size, _NOBODY, np.int32)
        self.written, self.read = np.zeros(size, np.int64), np.zeros(size, np.int64)
        self.line = np.zeros(size, np.int32)
