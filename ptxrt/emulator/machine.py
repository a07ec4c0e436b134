"""Run a translated entry: batches of thread blocks, the scheduler over basic blocks, waiting threads, faults.

All threads of a batch are lanes of NumPy arrays. Threads at the same basic block run it together. If all threads of the
batch are at that block, the function of the block works on the register rows in place; otherwise the rows of the
executing threads are gathered first and scattered afterwards. The lowest basic block runs first, so that diverged
threads reconverge (see lower.py). A block that whole warps must execute together waits for the rest of each warp.

`launch` is the entry point. translate.py makes the functions of the blocks, calls.py is their run time, memory.py
their memory.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np

from ..errors import EmulatorFault
from ..ptx.lower import Branch, Exit, Jump, Switch
from .calls import FULL_MASK, WARP
from .check import GlobalRaces, Observer
from .instruction import Fault, distinct
from .memory import SHARED_BASE, WRITTEN, Access, CopyQueue, GlobalMemory, Region
from .profile import SCHEDULING, TRANSLATION
from .progress import Progress

_NOWHERE = np.iinfo(np.int32).max  # the key (next basic block) of a thread that waits or has exited
PARAM_BYTES = 32764  # the most that the PTX ISA allows
_SHARED_LIMIT = 227 * 1024  # the most shared memory a block has on any GPU
_FAIRNESS = 64  # of so many steps over diverged threads, one runs the block that ran least recently
_RACE_BYTES = (
    1 << 28
)  # the most for the readers of every word of shared memory; four times as much once bytes are tracked
_RESERVED_BYTES = 1024  # of shared memory that the driver keeps, and cooperative groups use
_WORKSPACE = {
    "envreg1": 32,
    "envreg2": 0,
}  # the halves of the address of a grid's workspace (cooperative_groups/details)
_WORKSPACE_BYTES = 64
_BATCH_BYTES = 1 << 32  # the most for the registers, shared and local memory of a batch
_CLOCK_STEPS = 16  # basic blocks between two checks of the time limit
_LOOK = 255  # mask: the search for endless loops runs every 256 steps
_LONG = 1 << 15  # after so many steps of a batch, a store of the value that is there already is not a change
_CALM = 8192  # steps without any change before the search for endless loops compares states
_PATIENCE = 256  # with schedule="warps": turns of one warp before the next one's, and steps per turn


class Launch:
    """The parameters and values that all threads of a launch share."""

    def __init__(self, emulator, module, code, grid, block, shared_bytes: int):
        self.emulator = emulator
        self.module = module
        self.code = code
        self.memory: GlobalMemory = emulator.memory
        self.counts: list[int] = module.counts[code.program.entry.name]
        self.conflict_lines: dict[int, int] = module.conflicts.setdefault(code.program.entry.name, {})
        self.grid = grid
        self.block = block
        self.threads = block[0] * block[1] * block[2]
        self.warps = -(-self.threads // WARP)
        self.blocks = grid[0] * grid[1] * grid[2]
        self.dynamic_bytes = shared_bytes
        program = code.program
        start = program.shared[program.dynamic[0]] if program.dynamic else program.shared_bytes
        self.shared_bytes = (start if program.dynamic else program.shared_bytes) + shared_bytes
        # The shared memory that the driver reserves is placed after the block's own, if the entry asks for it.
        self.reserved = None
        if program.specials & {"reserved_smem_offset_0", "reserved_smem_offset_1"}:
            self.reserved = -(-self.shared_bytes // 128) * 128
            self.shared_bytes = self.reserved + _RESERVED_BYTES
        self.local_bytes = program.frame_bytes
        self.global_races = (
            GlobalRaces(self, emulator.strict_races) if emulator.find_races and self.blocks > 1 else None
        )
        self.workspace = 0  # of the grid, for cooperative groups
        self.uniform: list[np.ndarray] = []
        self.uniform_values: dict[str, np.ndarray] = {}  # by register; evaluated once per launch
        self.meter: Progress | None = None
        self.deadline = None if emulator.timeout is None else time.monotonic() + emulator.timeout

    @property
    def block_bytes(self) -> int:
        """Host bytes per block: registers, shared and local memory, and with checks the state of each byte."""
        states = 2 if self.emulator.checks else 1
        registers = sum(max(int(kind[1:]), 1) * count for kind, count in self.code.rows.items())
        return self.warps * WARP * (registers + states * self.local_bytes) + states * self.shared_bytes

    def special(self, name: str) -> int:
        """A special register that all threads share."""
        word, _, axis = name.partition(".")
        if axis:
            values = {"ntid": self.block, "nctaid": self.grid, "nclusterid": self.grid, "cluster_nctaid": (1, 1, 1)}
            return values.get(word, (0, 0, 0))["xyz".index(axis)]
        total = self.shared_bytes + SHARED_BASE
        if name in ("reserved_smem_offset_0", "reserved_smem_offset_1"):
            return SHARED_BASE + self.reserved
        if name in _WORKSPACE:
            return self.workspace >> _WORKSPACE[name] & FULL_MASK
        return {
            "nwarpid": self.warps, "nsmid": 1, "cluster_nctarank": 1, "total_smem_size": total, "aggr_smem_size": total,
            "dynamic_smem_size": self.dynamic_bytes, "reserved_smem_offset_end": SHARED_BASE,
            "reserved_smem_offset_cap": SHARED_BASE,
        }.get(name, 0)  # fmt: skip

    def address_of(self, name: str) -> int:
        """The generic address of a parameter or of a variable in constant memory."""
        for parameter in self.code.program.entry.params:
            if parameter.name == name:
                return self.emulator.param_address + parameter.offset
        return self.module.address(name)

    def source_of(self, location) -> str:
        """A source position, followed by the positions where it was inlined."""
        places = []
        while location is not None:
            places.append(self.module.source_of(location))
            location = location.inlined_at
        return ", inlined at ".join(places)

    def read_constant(self, address: int, size: int) -> bytes:
        """Read bytes of a parameter or a constant."""
        return self.memory.read(address, np.empty(size, np.uint8)).tobytes()


class _Rows:
    """Register rows of all lanes: `rows.u4[3]` is row 3 of the 32-bit registers as unsigned words."""

    def __init__(self, rows: dict[str, int], lanes: int):
        self.arrays = {kind: np.zeros((count, lanes), bool if kind == "b1" else kind) for kind, count in rows.items()}

    def __getattr__(self, kind: str):
        base = "b1" if kind == "b1" else "u" + kind[1:]
        found = list(self.arrays[base].view(bool if kind == "b1" else kind))
        setattr(self, kind, found)
        return found


class _GatheredRows:
    """Rows of some lanes: `provide` gathers those that a block needs, `flush` scatters those that were written."""

    def __init__(self, full: _Rows, lanes: np.ndarray):
        self.full = full
        self.lanes = lanes
        self.held: dict[tuple[str, int], np.ndarray] = {}
        self.dirty: set[tuple[str, int]] = set()

    def provide(self, block) -> None:
        held, lanes, arrays = self.held, self.lanes, self.full.arrays
        for kind, rows in block.reads.items():
            array = arrays[kind]
            for row in rows:
                if (kind, row) not in held:
                    held[kind, row] = array[row].take(lanes)
        for kind, rows in block.writes.items():
            for row in rows:
                if (kind, row) not in held:
                    held[kind, row] = np.empty(len(lanes), arrays[kind].dtype)
                self.dirty.add((kind, row))
        for kind, row in block.views:
            views = self.__dict__.setdefault(kind, {})
            if row not in views:
                base = held["b1" if kind == "b1" else "u" + kind[1:], row]
                views[row] = base if kind == "b1" else base.view(kind)

    def flush(self) -> None:
        for kind, row in self.dirty:
            self.full.arrays[kind][row][self.lanes] = self.held[kind, row]
        self.dirty.clear()


class Executing(Access):
    """The threads that execute a basic block: memory (see `Access`), special registers, whole warps."""

    def __init__(self, batch: "Batch", lanes: np.ndarray | None):
        super().__init__(batch, lanes)
        self._specials: dict[tuple[str, str], np.ndarray] = {}
        self._whole: bool | None = None

    @property
    def whole(self) -> bool:
        """Whether the threads are whole warps, in lane order."""
        if self._whole is None:
            lanes = self.lanes
            if lanes is None:
                self._whole = True
            elif len(lanes) % WARP:
                self._whole = False
            else:
                rows = lanes.reshape(-1, WARP)
                self._whole = bool((rows[:, 0] % WARP == 0).all() and (rows[:, -1] - rows[:, 0] == WARP - 1).all())
        return self._whole

    def special(self, name: str, kind: str) -> np.ndarray:
        """A special register as an array over the threads, or 0-d if they share it."""
        key = (name, kind)
        found = self._specials.get(key)
        if found is None:
            value = self.batch.special(name)
            if np.ndim(value) and self.lanes is not None:
                value = value[self.lanes]
            dtype = np.dtype(kind)
            value = np.asarray(value).astype(f"u{dtype.itemsize}").view(dtype)
            if name.startswith(("clock", "globaltimer")):
                self.batch.changes += 1  # threads that wait for a time make progress
                return value
            found = self._specials[key] = value
        return found


class _State:
    """A snapshot of a batch: the next basic block of every thread, and all register rows."""

    def __init__(
        self, step: int, block: int | None, lanes: np.ndarray | None, key: np.ndarray, rows: dict[str, np.ndarray]
    ):
        self.step, self.block, self.lanes, self.key, self.rows = step, block, lanes, key, rows
        self.samples, self.limit = 0, 1

    def is_like(self, other: "_State") -> bool:
        """Whether execution continues identically from both, given unchanged memory."""
        if self.block != other.block or not np.array_equal(self.key, other.key):
            return False
        if self.block is not None and not np.array_equal(self.lanes, other.lanes):
            return False
        return all(np.array_equal(rows, other.rows[kind]) for kind, rows in self.rows.items())


class Batch:
    """Thread blocks that run together. Lane = (block * warps + warp) * 32 + lane in the warp."""

    def __init__(self, launch: Launch, first: int, blocks: int):
        self.launch = launch
        self.code = launch.code
        self.memory = launch.memory
        self.first = first
        self.blocks, self.threads, self.warps = blocks, launch.threads, launch.warps
        self.lanes = lanes = blocks * self.warps * WARP
        self.checks = launch.emulator.checks
        self.observer: Observer | None = None
        self.global_races = launch.global_races
        self.lane_ids = np.arange(lanes)
        self.block = self.lane_ids // (self.warps * WARP)
        self.thread = self.lane_ids % (self.warps * WARP)
        self.alive = self.thread < self.threads
        self.shared_bytes, self.local_bytes = launch.shared_bytes, launch.local_bytes
        self.shared_stride = -(-self.shared_bytes // 32) * 32
        self.local_stride = -(-self.local_bytes // 32) * 32
        self.shared = Region(self.shared_stride * blocks, self.checks)
        self.local = Region(self.local_stride * lanes, self.checks)
        if launch.reserved is not None and self.checks:
            shared = self.shared.states.reshape(-1)[: self.shared_stride * blocks].reshape(blocks, -1)
            shared[:, launch.reserved :] = WRITTEN
        self.copies = CopyQueue(self)
        self.printed: list[tuple[int, int, str]] = []  # thread, number, text
        if self.shared_bytes and (launch.emulator.count_conflicts or launch.emulator.find_races):
            self.observer = Observer(
                self, launch.emulator.count_conflicts, launch.emulator.find_races, launch.emulator.strict_races
            )
        self.state: dict = {}
        self.guarded = False  # whether parts of shared memory may not be written: copies in flight, mbarriers
        self.exit_callbacks: list[Callable[[np.ndarray], None]] = []
        self.idle_callbacks: list[Callable[[], bool]] = []
        self.rows = _Rows(self.code.rows, lanes)
        self.gathered: _GatheredRows | None = None
        self.executing: Executing | None = None
        self.key = np.where(self.alive, 0, _NOWHERE).astype(np.int32)
        self.resume = np.zeros(lanes, np.int32)
        self.parked = np.zeros(lanes, bool)
        self.parking: np.ndarray | None = None
        self.reasons: dict[str, np.ndarray] = {}
        self.issued = 0
        self.last_run: dict[int, int] = {}
        self.turns = self.steps = 0
        self.collective = np.array([block.collective for block in self.code.blocks])
        self.one_by_one = launch.emulator.schedule == "warps"
        self.focus, self.patience = 0, _PATIENCE
        # Of the last choice: the lowest block of the threads that were not chosen, and whether any was woken since.
        self.others_at, self.woken = -1, False
        # `changes` counts events that may release another thread or end a loop; `look` uses it.
        self.changes = 0
        self.quiet: dict[int, int] = {}  # for each block that watches memory: `changes` after its last run
        self.calm_since = self.calm_changes = 0
        self.suspect: _State | None = None
        self.compares = False  # whether a store compares with memory: equal values are not a change
        self.current = 0
        # For each block, whether it is past an aligned barrier; for each thread, the last such block that it ran in a
        # step without all other threads (-1: none).
        self.behind_barriers = self.code.behind_barriers
        self.last_behind = None if self.behind_barriers is None else np.full(lanes, -1, np.int32)

    # -- called by instruction families -------------------------------------------------------------------------

    def park(self, lanes: np.ndarray, why: str) -> None:
        """Make these executing threads wait before their next instruction, until `wake`."""
        if self.parking is None:
            self.parking = np.zeros(self.lanes, bool)
        self.parking[lanes] = True
        self.explain(lanes, why)

    def wake(self, lane_ids: np.ndarray) -> None:
        """Let parked threads continue."""
        self.changes += 1
        self.woken = True
        lane_ids = np.asarray(lane_ids)
        if self.parking is not None:
            self.parking[lane_ids] = False
        waiting = lane_ids[self.parked[lane_ids]]
        self.parked[waiting] = False
        self.key[waiting] = self.resume[waiting]

    def passed(self, lanes: np.ndarray) -> np.ndarray:
        """For each of these threads at an aligned barrier: whether other threads of its warp passed it and exited."""
        past = self.code.blocks[self.current].past
        if self.last_behind is None or past is None:
            return np.zeros(len(lanes), bool)
        gone = ~self.alive & (self.last_behind >= 0) & past[self.last_behind]
        return gone.reshape(-1, WARP).any(axis=1)[lanes // WARP]

    def prints(self, lane: int, text: str) -> None:
        """Record printed text of a thread; `show_printed` writes it after the batch."""
        self.printed.append((lane, len(self.printed), text))

    def show_printed(self) -> None:
        """Write the printed text, sorted by block and thread."""
        if self.printed:
            self.printed.sort()
            self.launch.emulator.output("".join(text for _, _, text in self.printed))
            self.printed = []

    def on_exit(self, callback: Callable[[np.ndarray], None]) -> None:
        """Register a callback for exits; it gets the ids of the threads."""
        self.exit_callbacks.append(callback)

    def on_idle(self, callback: Callable[[], bool]) -> None:
        """Register a callback for the case that no thread can run; it returns whether it woke one."""
        self.idle_callbacks.append(callback)

    def explain(self, lanes: np.ndarray, why: str) -> None:
        """Set what these waiting threads wait for, as the message of a deadlock states it."""
        for other in self.reasons.values():
            other[lanes] = False
        self.reasons.setdefault(why, np.zeros(self.lanes, bool))[lanes] = True

    # Events that order accesses, for the race checks (check.py). An mbarrier is named by its place in shared memory, a
    # barrier at which threads only arrive by a negative number (barrier.py).

    def released(self, lane_ids: np.ndarray, barrier: np.ndarray) -> None:
        """Each thread arrives: its accesses happen before the end of the current phase of its barrier."""
        if self.observer is not None:
            self.observer.released(lane_ids, barrier)

    def completed(self, barrier: int) -> None:
        """The current phase of a barrier is complete."""
        if self.observer is not None:
            self.observer.completed(barrier)

    def acquired(self, lane_ids: np.ndarray, barrier: np.ndarray) -> None:
        """Each thread has observed the completion of a phase of its barrier."""
        if self.observer is not None:
            self.observer.acquired(lane_ids, barrier)

    def fenced(self, lane_ids: np.ndarray) -> None:
        """A proxy fence: all accesses that happened before it are visible to later bulk copies of these threads."""
        if self.observer is not None:
            self.observer.fenced(lane_ids)

    def synchronizes(self, lane_ids: np.ndarray) -> None:
        """These threads execute an atomic or a fence, which may order accesses of blocks to global memory."""
        if self.global_races is not None:
            self.global_races.synchronizes(self, lane_ids, releases=True, acquires=True)

    def renewed(self, barrier: np.ndarray) -> None:
        """These barriers start anew."""
        if self.observer is not None:
            self.observer.renewed(barrier)

    def synchronized(self, lane_ids: np.ndarray) -> None:
        """These threads waited for each other: all their earlier accesses happen before all their later ones."""
        if self.observer is not None:
            self.observer.synchronized(lane_ids)

    # -- registers ----------------------------------------------------------------------------------------------

    def write_row(self, kind: str, row: int, lane_ids: np.ndarray, value) -> None:
        """Write a register row for some threads, between basic blocks or at the end of one."""
        if self.gathered is not None:
            self.gathered.flush()
            self.gathered = None
        getattr(self.rows, kind)[row][lane_ids] = value

    def special(self, name: str):
        """A special register over all lanes, or one number that all threads share."""
        word, _, axis = name.partition(".")
        if word == "tid":
            x, y, _ = self.launch.block
            return (self.thread % x, self.thread // x % y, self.thread // (x * y))["xyz".index(axis)]
        if word in ("ctaid", "clusterid"):
            x, y, _ = self.launch.grid
            number = self.first + self.block
            return (number % x, number // x % y, number // (x * y))["xyz".index(axis)]
        if name == "laneid":
            return self.lane_ids % WARP
        if name == "warpid":
            return self.thread // WARP
        if name.startswith("lanemask_"):
            bit = np.uint64(1) << (self.lane_ids % WARP).astype(np.uint64)
            below = bit - np.uint64(1)
            mask = {"eq": bit, "lt": below, "le": below | bit, "gt": ~(below | bit), "ge": ~below}[name[9:]]
            return mask & np.uint64(FULL_MASK)
        if name in ("clock", "clock64", "clock_hi"):
            return np.uint64(self.issued >> 32 if name == "clock_hi" else self.issued)
        if name.startswith("globaltimer"):
            now = time.monotonic_ns()
            return np.uint64(
                now >> 32 if name.endswith("_hi") else now & (FULL_MASK if name.endswith("_lo") else -1 & (1 << 64) - 1)
            )
        return np.uint64(self.launch.special(name))

    # -- scheduling ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run all threads to their end. Raises EmulatorFault."""
        while True:
            choice = self.choose()
            if choice is None:
                return
            block, lanes, together = choice
            self.keep_rows(lanes)
            steps = _PATIENCE if self.one_by_one else sys.maxsize
            while block is not None:
                block = self.step(block, lanes, together)
                steps -= 1
                self.steps += 1
                if self.steps & _LOOK == 0:
                    self.look(block if together else None, lanes, together)
                if steps <= 0 and block is not None:
                    self.key[slice(None) if lanes is None else lanes] = block
                    self.patience = 0
                    break

    def choose(self) -> tuple[int, np.ndarray | None, bool] | None:
        """The basic block to run next, its threads (None: all lanes), and whether no other thread can run."""
        key = able = self.key_of_whole_warps()
        if self.one_by_one:
            key = self.key_of_one_warp(able)
        low = int(key.min())
        if low == _NOWHERE:
            if not self.alive.any():
                return None
            if any([callback() for callback in self.idle_callbacks]):
                return self.choose()
            if able is self.key:
                raise self.deadlock()
            # The missing threads can never arrive: run anyway, so that the instruction reports them.
            key, low = self.key, int(self.key.min())
        lanes = np.flatnonzero(key == low)
        if len(lanes) == self.lanes:
            return low, None, True
        ready = int(np.count_nonzero(key != _NOWHERE))
        if len(lanes) == ready:
            return low, lanes, True
        self.turns += 1
        candidates = distinct(key[key != _NOWHERE]).tolist()
        if self.turns % _FAIRNESS == 0:
            candidates.sort(key=lambda block: self.last_run.get(block, 0))
        elif self.quiet:  # threads that poll unchanged memory go last
            candidates.sort(key=lambda block: self.quiet.get(block) == self.changes)
        self.woken = False
        for block in candidates:
            lanes = here = np.flatnonzero(key == block)
            if self.code.blocks[block].collective:
                lanes = self.complete_warps(here)
            if len(lanes):
                self.last_run[block] = self.turns
                rest = [other for other in candidates if other != block or len(lanes) < len(here)]
                self.others_at = -1 if self.one_by_one else min(rest)
                return block, lanes, False
        self.others_at = -1
        return low, np.flatnonzero(key == low), False

    def chosen_again(self, block: int, target: int) -> bool:
        """Whether `choose` would select the same threads again: those that ran `block` and all continue at `target`.

        Other threads wait at `others_at` or later blocks. If one of them was woken, the next choice may be another.
        """
        if target >= self.others_at or self.woken or self.code.blocks[block].blocking:
            return False
        if self.collective[target] and not self.executing.whole:
            return False
        if self.quiet.get(target) == self.changes or (self.turns + 1) % _FAIRNESS == 0:
            return False
        self.turns += 1
        self.last_run[target] = self.turns
        return True

    def key_of_whole_warps(self) -> np.ndarray:
        """The key, with `_NOWHERE` for threads at a .sync instruction while other threads of their warp are parked."""
        if not self.parked.any():
            return self.key
        able = self.key != _NOWHERE
        waits = np.repeat(self.parked.reshape(-1, WARP).any(axis=1), WARP) & able
        if waits.any():
            waits[waits] = self.collective[self.key[waits]]
        return np.where(waits, np.int32(_NOWHERE), self.key) if waits.any() else self.key

    def key_of_one_warp(self, key: np.ndarray) -> np.ndarray:
        """The key of one warp, with `_NOWHERE` for all others: the first warp that can run, until it waits or exits.

        No other warp catches up meanwhile, so a missing barrier shows. A warp that spins until another one makes
        progress loses its turn after `_PATIENCE` turns.
        """
        able = (key != _NOWHERE).reshape(-1, WARP).any(axis=1)
        if not able.any():
            return key
        self.patience -= 1
        if not able[self.focus] or self.patience < 0:
            following = np.flatnonzero(able)
            later = following[following > self.focus] if self.patience < 0 else following
            self.focus, self.patience = int((later if len(later) else following)[0]), _PATIENCE
        alone = np.full_like(key, _NOWHERE)
        warp = slice(self.focus * WARP, (self.focus + 1) * WARP)
        alone[warp] = key[warp]
        return alone

    def complete_warps(self, lanes: np.ndarray) -> np.ndarray:
        """Of these lanes, those whose warp is complete: all its threads that can run are here or at a later collective
        block.

        Threads at a later collective block cannot arrive: they wait for the rest of their warp themselves. So the
        lowest collective instruction runs without them, and reports them if its membermask names them.
        """
        warps = self.lanes // WARP
        block = int(self.key[lanes[0]])
        here = np.bincount(lanes // WARP, minlength=warps)
        able = self.key != _NOWHERE
        further = able & (self.key > block)
        further[further] = self.collective[self.key[further]]
        here += further.reshape(-1, WARP).sum(axis=1)
        return lanes[(here == able.reshape(-1, WARP).sum(axis=1))[lanes // WARP]]

    def keep_rows(self, lanes: np.ndarray | None) -> None:
        """Scatter the rows gathered for the threads that ran last, unless the same threads continue."""
        executing = self.executing
        if executing is None:
            return
        before = executing.lanes
        if before is lanes or (before is not None and lanes is not None and np.array_equal(before, lanes)):
            return
        if self.gathered is not None:
            self.gathered.flush()
            self.gathered = None
        self.executing = None

    def step(self, number: int, lanes: np.ndarray | None, together: bool) -> int | None:
        """Run one basic block. Returns the next block if the same threads run it next, else None."""
        block = self.code.blocks[number]
        self.current = number
        if lanes is not None and self.behind_barriers is not None and self.behind_barriers[number]:
            self.last_behind[lanes] = number
        profile = self.launch.emulator.profile
        if block.function is None:
            if profile is not None:
                profile.mark(TRANSLATION)
            block = self.code.compiled(number)
            self.code.uniforms(self.launch, self.launch.uniform)
            if profile is not None:
                profile.mark(SCHEDULING)
        executing = self.executing
        if executing is None:
            executing = self.executing = Executing(self, lanes)
        rows = self.rows
        if lanes is not None:
            if self.gathered is None:
                self.gathered = _GatheredRows(rows, lanes)
            rows = self.gathered
            rows.provide(block)
        try:
            result = block.function(rows, self.launch.uniform, executing)
        except Fault as fault:
            raise self.located(fault, number, executing) from None
        except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise self.located(
                Fault(f"stopped the emulator: {type(error).__name__}: {error}"), number, executing, error
            ) from error
        if profile is not None:
            profile.mark(SCHEDULING)
        self.count(number, executing, block.size)
        if block.watches:
            if self.one_by_one and self.quiet.get(number) == self.changes:
                self.patience = 0
            self.quiet[number] = self.changes
        elif block.blocking:
            self.changes += 1
        if self.launch.meter is not None:
            self.launch.meter.passed(self, number)
        terminator = self.code.program.blocks[number].terminator
        if self.parking is not None or isinstance(terminator, Exit):
            self.settle(terminator, lanes)
            return None
        if isinstance(terminator, Jump):
            target = terminator.target
        elif isinstance(terminator, Branch):
            target = self.branch(terminator, result, lanes)
        else:
            target = self.switch(number, terminator, result, lanes)
        if target is None:
            return None
        if together and not block.blocking and not (self.collective[target] and self.parked.any()):
            return target
        self.key[slice(None) if lanes is None else lanes] = target
        return target if not together and self.chosen_again(number, target) else None

    def branch(self, terminator: Branch, predicate: np.ndarray, lanes: np.ndarray | None) -> int | None:
        """The common target of all threads; None if they diverge, after setting the key of each."""
        taken, otherwise = terminator.taken, terminator.otherwise
        if terminator.negated:
            taken, otherwise = otherwise, taken
        if predicate.all():
            return taken
        if not predicate.any():
            return otherwise
        self.key[slice(None) if lanes is None else lanes] = np.where(predicate, np.int32(taken), np.int32(otherwise))
        return None

    def switch(self, number: int, terminator: Switch, index: np.ndarray, lanes: np.ndarray | None) -> int | None:
        """As `branch`, for the brx.idx at the end of a block. Raises EmulatorFault for an index without a target."""
        targets = np.array(terminator.targets, np.int32)
        outside = index >= len(targets)
        if outside.any():
            position = int(np.argmax(outside))
            raise self.fault_at(
                f"branches with index {int(index.reshape(-1)[position])} of {len(targets)} targets",
                position if lanes is None else int(lanes[position]),
                self.code.program.blocks[number].end,
            )
        found = targets[index]
        if np.ndim(found) == 0 or (found == found[0]).all():
            return int(found if np.ndim(found) == 0 else found[0])
        self.key[slice(None) if lanes is None else lanes] = found
        return None

    def settle(self, terminator, lanes: np.ndarray | None) -> None:
        """Update the threads after a blocking instruction, or at their exit."""
        ids = self.lane_ids if lanes is None else lanes
        self.changes += 1
        if isinstance(terminator, Exit):
            self.key[ids] = _NOWHERE
            self.alive[ids] = False
            for callback in self.exit_callbacks:
                callback(ids)
            return
        parking = self.parking[ids]
        self.parking = None
        self.key[ids] = np.where(parking, _NOWHERE, np.int32(terminator.target))
        self.resume[ids] = terminator.target
        self.parked[ids] = parking

    def count(self, number: int, executing: Executing, size: int) -> None:
        """Count the execution of a basic block; a fault if the budget or the time limit is exceeded."""
        launch = self.launch
        launch.counts[number] += executing.count
        self.issued += size
        if self.issued > launch.emulator.budget:
            raise self.endless(
                f"the budget of {launch.emulator.budget} instructions per batch of blocks", number, executing
            )
        if launch.deadline is not None:
            if self.steps % _CLOCK_STEPS == 0 and time.monotonic() > launch.deadline:
                raise self.endless(f"the time limit of {launch.emulator.timeout:g} seconds", number, executing)

    # -- faults -------------------------------------------------------------------------------------------------

    def located(
        self, fault: Fault, number: int, executing: Executing, error: BaseException | None = None
    ) -> EmulatorFault:
        """The fault as an EmulatorFault that names kernel, block, thread, PTX line and source line."""
        marker = f" block {number}>"
        line = 0
        trace = (error or fault).__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename.endswith(marker):
                line = trace.tb_lineno
            trace = trace.tb_next
        instruction = self.code.blocks[number].lines.get(line)
        where = fault.where
        if where is None:
            position = 0
        elif isinstance(where, np.ndarray) and where.dtype == bool:
            position = int(np.argmax(where.reshape(-1)))
        else:
            position = int(np.asarray(where).reshape(-1)[0])
        ids = executing.lane_ids if fault.lane_ids is None else fault.lane_ids
        lane = int(ids[min(position, len(ids) - 1)])
        return self.fault_at(fault.message, lane, instruction)

    def fault_at(self, message: str, lane: int, instruction) -> EmulatorFault:
        launch, name = self.launch, self.code.program.entry.name
        x, y, _ = launch.grid
        number = self.first + int(self.block[lane])
        block = (number % x, number // x % y, number // (x * y))
        x, y, _ = launch.block
        index = int(self.thread[lane])
        thread = (index % x, index // x % y, index // (x * y))
        place, source, line = "", "", 0
        if instruction is not None:
            line = instruction.line
            source = launch.source_of(instruction.location)
            place = f" at PTX line {line} ({instruction.opcode})" + (f", {source}" if source else "")
        return EmulatorFault(
            f"{name}: thread {thread} of block {block} {message}{place}",
            kernel=name,
            block=block,
            thread=thread,
            line=line,
            source=source,
        )

    def look(self, block: int | None, lanes: np.ndarray | None, together: bool) -> None:
        """Raise a fault if all threads are in endless loops: the batch is in the same state as at an earlier step.

        A state (`_State`) is the position of each thread and its registers. States are compared only while `changes`
        is constant: no change in memory, no thread parked, woken or exited, no read of a clock. Between the two
        states every thread that can run must have had a turn.
        """
        self.compares = self.steps >= _LONG
        if self.changes != self.calm_changes:
            self.calm_changes, self.calm_since, self.suspect = self.changes, self.steps, None
            return
        if self.steps - self.calm_since < _CALM:
            return
        if self.gathered is not None:
            self.gathered.flush()
        now = _State(
            self.steps, block, lanes, self.key.copy(), {kind: rows.copy() for kind, rows in self.rows.arrays.items()}
        )
        before = self.suspect
        if before is None:
            self.suspect = now
            return
        if now.step - before.step >= self.horizon(together) and now.is_like(before):
            lane = int(self.lane_ids[0] if lanes is None else lanes[0])
            number = int(self.key[lane]) if block is None else block
            instructions = self.code.program.blocks[number if number != _NOWHERE else self.current].instructions
            raise self.fault_at(
                "is in an endless loop: it comes to the same place with the same registers, no memory changes, and no "
                "other thread can get on,",
                lane,
                instructions[0] if instructions else self.code.program.blocks[self.current].end,
            )
        before.samples += 1
        if before.samples >= before.limit and now.step - before.step >= self.horizon(together):
            now.limit = 2 * before.limit
            self.suspect = now

    def horizon(self, together: bool) -> int:
        """The number of steps within which every thread that can run gets a turn."""
        if together:
            return 1
        ready = self.key[self.key != _NOWHERE]
        if self.one_by_one:
            warps = int(np.count_nonzero((self.key != _NOWHERE).reshape(-1, WARP).any(axis=1)))
            return (warps + 1) * (_PATIENCE + 1)
        return _FAIRNESS * (len(distinct(ready)) + 1)

    def endless(self, limit: str, number: int, executing: Executing) -> EmulatorFault:
        instructions = self.code.program.blocks[number].instructions
        return self.fault_at(
            f"does not end within {limit}, which can be raised,",
            int(executing.lane_ids[0]),
            instructions[0] if instructions else None,
        )

    def deadlock(self) -> EmulatorFault:
        """The fault for a batch in which no thread can run."""
        parts = []
        first = None
        for why, lanes in self.reasons.items():
            stuck = np.flatnonzero(lanes & self.parked & self.alive)
            if not len(stuck):
                continue
            if first is None:
                first = stuck[0]
            parts.append(f"{len(stuck)} threads wait at {why}")
        lane = int(first if first is not None else np.flatnonzero(self.alive)[0])
        block = int(self.block[lane])
        inside = self.block == block
        waiting = int(np.count_nonzero(inside & self.parked & self.alive))
        gone = self.threads - int(np.count_nonzero(inside & self.alive))
        instruction = self.before(int(self.resume[lane]))
        return self.fault_at(
            f"is in a deadlock: no thread can run; {'; '.join(parts) or 'nobody waits'}. "
            f"In this block {waiting} of {self.threads} threads wait and {gone} have exited",
            lane,
            instruction,
        )

    def before(self, target: int):
        """The blocking instruction that ends the block before `target`; None if there is none."""
        for index, block in enumerate(self.code.program.blocks):
            if (
                self.code.blocks[index].blocking
                and isinstance(block.terminator, Jump)
                and block.terminator.target == target
            ):
                return block.instructions[-1]
        return None


# ---------------------------------------------------------------------------------------------------------------
# Launching


def _three(value, what: str, limits: tuple[int, int, int]) -> tuple[int, int, int]:
    """A size of one to three positive numbers as (x, y, z); raises EmulatorFault outside of `limits`."""
    numbers = (value,) if isinstance(value, (int, np.integer)) else tuple(value)
    numbers = tuple(int(number) for number in numbers) + (1, 1, 1)[len(numbers) :]
    if len(numbers) != 3 or any(number < 1 or number > limit for number, limit in zip(numbers, limits)):
        raise EmulatorFault(f"{what} is {value}; each of x, y, z lies between 1 and {limits}")
    return numbers


def launch(emulator, entry, grid, block, shared_bytes: int, params: bytes) -> None:
    """Check the arguments of a launch, then run all blocks in batches. Raises EmulatorFault."""
    module, name = entry.module, entry.name
    if module.emulator is not emulator:
        raise EmulatorFault(f"{name} was loaded into another emulator")
    grid = _three(grid, f"{name}: grid", (2**31 - 1, 65535, 65535))
    block = _three(block, f"{name}: block", (1024, 1024, 64))
    threads = block[0] * block[1] * block[2]
    if threads > 1024:
        raise EmulatorFault(f"{name}: a block of {threads} threads; there are at most 1024")
    required, most = entry.directives.get("reqntid"), entry.directives.get("maxntid")
    if required and (tuple(required) + (1, 1, 1))[:3] != block:
        raise EmulatorFault(f"{name}: a block of {block} threads, and the text requires {required}")
    if most and threads > int(np.prod(most)):
        raise EmulatorFault(f"{name}: a block of {threads} threads, and the text allows {int(np.prod(most))}")
    if entry.param_bytes > PARAM_BYTES:
        raise EmulatorFault(f"{name}: {entry.param_bytes} bytes of parameters; there are at most {PARAM_BYTES}")
    if len(params) != entry.param_bytes:
        raise EmulatorFault(f"{name}: {len(params)} bytes of parameters, and the text declares {entry.param_bytes}")
    profile = emulator.profile
    if profile is not None:
        profile.start()
        profile.mark(TRANSLATION)
    code = module.code(name)
    if profile is not None:
        profile.mark(SCHEDULING)
    region = emulator.memory.find(emulator.param_address)
    region.limit = len(params)
    region.data[: len(params)] = np.frombuffer(params, np.uint8)
    if region.states is not None:
        region.states[:] = 0
        region.states[: len(params)] = 1
    run = Launch(emulator, module, code, grid, block, shared_bytes)
    if run.shared_bytes > _SHARED_LIMIT:
        raise EmulatorFault(
            f"{name}: {run.shared_bytes} bytes of shared memory per block; there are at most {_SHARED_LIMIT}"
        )
    if run.block_bytes > _BATCH_BYTES:
        raise EmulatorFault(
            f"{name}: a block takes {run.block_bytes} bytes of the host's memory; the emulator takes "
            f"{_BATCH_BYTES} at most"
        )
    per_batch = max(1, min(emulator.lanes_per_batch // (run.warps * WARP), _BATCH_BYTES // max(run.block_bytes, 1)))
    if emulator.find_races:
        per_batch = max(1, min(per_batch, _RACE_BYTES // max(run.shared_bytes * run.warps * WARP, 1)))
    if code.program.specials & _WORKSPACE.keys():
        if run.blocks > per_batch:
            raise EmulatorFault(
                f"{name} synchronizes its grid: all {run.blocks} blocks of {run.threads} threads have to run together, "
                f"and {per_batch} do; launch {per_batch} blocks at most"
            )
        run.workspace = emulator.memory.alloc(_WORKSPACE_BYTES, "the workspace of the grid")
        emulator.memory.write(run.workspace, bytes(_WORKSPACE_BYTES))
    meter = Progress(name, run.blocks, emulator.progress)
    run.meter = meter if meter.listened else None
    try:
        code.uniforms(run, run.uniform)
        with np.errstate(all="ignore"):
            for first in range(0, run.blocks, per_batch):
                batch = Batch(run, first, min(per_batch, run.blocks - first))
                meter.begin(first, batch.blocks)
                try:
                    batch.run()
                finally:
                    batch.show_printed()
                    batch.observer = None  # its records are large, and the batch waits for the garbage collector
                meter.end(batch.issued)
    finally:
        if run.global_races is not None and run.global_races.undecided:
            emulator.undecided.append(run.global_races.describe())
        meter.close()
        if run.workspace:
            emulator.memory.free(run.workspace)
