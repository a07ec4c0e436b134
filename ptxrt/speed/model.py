"""Speed of a kernel's machine code on a card, by simulating its warps: TFLOPS of useful work, or GB/s.

Useful work is the products Q K^T and P V. In block formats P is also multiplied by a column of ones for the
denominator; this takes time, but does not count as work.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

from .. import units
from ..backend import Facts
from ..declaration import half_of
from ..disassembly import sass_of
from ..errors import BuildError
from ..kernel import REGISTRY
from ..launch import takes_halves
from . import rates
from .listing import Instruction, parse
from .paths import decoding_path, is_mma, plain_path, tile_paths, without_absent
from .rates import MULTIPROCESSORS, PIPES, Card
from .simulate import Machine, Trip, alone, simulate

RESERVED_SHARED = 1024  # bytes that the system reserves in each block
PARAMETERS = {"sm_120a": 0x380, "sm_121a": 0x380, "sm_90": 0x210}  # where parameters begin in the constant bank
BLOCK_FORMATS = ("mxfp8", "mxfp4", "nvfp4")
DECODED_KEYS = 64  # keys of a tile of attention_one: tile::tile_keys
LANES = 32


@dataclass(frozen=True)
class Entry:
    """An entry as built for a card: its code and its launch constants."""

    name: str
    unit: str
    kernel: str
    variant: Mapping[str, int]
    code: tuple[Instruction, ...]
    threads: int
    rows: int  # rows of a block, for kernels that work on tiles
    registers: int
    shared_bytes: int
    least_blocks: int = 1  # resident blocks for which it was compiled

    @property
    def facts(self) -> Facts:
        """The launch facts that decide between whole and half blocks."""
        return Facts((self.threads, 1, 1), self.shared_bytes, (1, self.rows, 1), self.least_blocks, 0)

    def blocks(self, card: Card) -> int:
        """Resident blocks of a multiprocessor."""
        room, warps = MULTIPROCESSORS[card.target], -(-self.threads // LANES)
        registers = max(-(-self.registers // 8) * 8 * LANES * warps, 1)
        return max(
            1,
            min(
                room.registers // registers,
                room.shared_bytes // (self.shared_bytes + RESERVED_SHARED),
                room.warps // warps,
                room.blocks,
            ),
        )

    def resident(self, card: Card) -> tuple[int, int]:
        """Return the warps of a block in each part of a multiprocessor, and the number of such blocks."""
        warps, blocks = self.threads // LANES, self.blocks(card)
        if warps >= 4:
            return warps // 4, blocks
        return 1, max(1, warps * blocks // 4)

    @property
    def dims(self) -> tuple[int, int]:
        """The head dimensions of Q and of V of an attention entry."""
        dim = int(self.variant["dim"])
        return dim, int(self.variant.get("dim_v", dim))

    @property
    def is_attention(self) -> bool:
        """Whether it is attention of many queries over tiles of keys: not for one or few, not on pages, not a merge."""
        return (
            self.kernel.startswith("attention_")
            and "dim" in self.variant
            and not {"paged", "few", "one"} & set(self.kernel.split("_"))
        )

    @property
    def decodes(self) -> bool:
        """Whether it is attention of one query for each sequence, on pages."""
        return self.kernel == "attention_one"

    @property
    def rounds_weights(self) -> bool:
        """Whether it is attention with weights in a block format, summed by multiplication with a column of ones."""
        return self.is_attention and self.kernel.rsplit("_", 1)[-1] in BLOCK_FORMATS

    @property
    def useful(self) -> float:
        """The useful share of the MMAs' work."""
        if self.rounds_weights:
            return sum(self.dims) / (sum(self.dims) + 8)
        return 1.0


def entries_of(unit: str, card: Card) -> Iterator[Entry]:
    """Yield the entries of a built unit as a card runs them; BuildError without code for the card or without a
    disassembler."""
    record = units.record(unit)
    portable = card.target == "sm_90"
    # One PTX text is assembled for both targets of the family, to the same instructions; quick builds have only the
    # first.
    for target in dict.fromkeys((card.target, "sm_120a") if not portable else (card.target,)):
        if any(target in usage for usage in record["entries"].values()):
            break
    else:
        raise BuildError(f"{unit} has no code for {card.target}: build it for every target with `make`")
    text = record["texts"]["compute_90" if portable else "compute_120f"]
    digest = record["sha256"].get(units.fatbin_path(unit, portable).name, "")
    functions = _functions(unit, portable, target, digest)
    for name, code in functions.items():
        usage, facts = record["entries"][name].get(target), Facts.of(name, text[name]["launch"])
        if usage is None:
            continue
        yield Entry(
            name,
            unit,
            record["name"],
            record["variant"],
            code,
            prod(facts.threads),
            facts.tile[1],
            usage["registers"],
            usage["shared_bytes"] + facts.shared_bytes,
            facts.min_blocks,
        )


@lru_cache(maxsize=8)
def _functions(unit: str, portable: bool, target: str, digest: str) -> dict[str, tuple[Instruction, ...]]:
    """Return the instructions of each entry of a unit. digest: the hash of its fatbin, a key of the cache."""
    with units.fatbin_file(unit, portable) as fatbin:
        listing = sass_of(fatbin, target, encodings=True)
    return {name: tuple(code) for name, code in parse(listing).items()}


# ---------------------------------------------------------------------------------------------------------------------
# One path


@dataclass(frozen=True)
class PathSpeed:
    """The steady trip of all resident warps of a part through one path, and the resulting speed on the card."""

    path: str
    instructions: int
    pipes: dict[str, float]  # cycles for which one warp's trip occupies each pipe
    trip: Trip
    work: float  # useful flops or bytes of one warp's trip
    unit: str  # "TFLOPS" or "GB/s"
    speed: float  # mean over the start offsets
    lowest: float
    highest: float
    peak: float  # upper bound by the pipe of the work: tensor cores or memory

    @property
    def share(self) -> float:
        return self.speed / self.peak

    @property
    def bound_by(self) -> str:
        """The busiest pipe."""
        return max(self.pipes, key=self.pipes.__getitem__)

    def as_dict(self) -> dict:
        return {
            "instructions": self.instructions,
            "pipes": {name: round(cycles, 1) for name, cycles in self.pipes.items()},
            "bound_by": self.bound_by,
            "cycles": [round(x, 1) for x in (self.trip.cycles, self.trip.fastest, self.trip.slowest)],
            self.unit: [round(x, 1) for x in (self.speed, self.lowest, self.highest)],
            "peak": round(self.peak, 1),
            "share": round(self.share, 4),
        }


def pipe_cycles(path, machine: Machine) -> dict[str, float]:
    """Return the cycles for which one warp's trip occupies each pipe; ISSUE is one cycle for each instruction."""
    found = {"ISSUE": float(len(path))}
    for instruction in path:
        pipe = rates.rate_of(instruction.opcode, instruction.guard).pipe
        found[pipe] = found.get(pipe, 0.0) + machine.cycles(instruction)
    return {name: found[name] for name in PIPES if name in found}


_TRIPS: dict[tuple, Trip] = {}


def trip_of(entry: Entry, name: str, path, machine: Machine, blocks: int, streams: bool) -> Trip:
    """Return the steady trip of a path; results are cached for equal rates."""
    card = machine.card
    of_card = (
        card if streams else (card.target, card.halves_sums)
    )  # without memory traffic clock and size of the card do not matter
    key = entry.unit, entry.name, name, hash(entry.code), of_card, machine.doubted(card=None), blocks
    if key not in _TRIPS:
        _TRIPS[key] = simulate(path, machine, entry.resident(card)[0], blocks, streams=streams)
    return _TRIPS[key]


def speed_of_path(entry: Entry, name: str, path, machine: Machine, blocks: int | None = None) -> PathSpeed:
    """Return the speed of a path with all resident warps of a multiprocessor, or with those of `blocks` blocks."""
    card = machine.card
    flops = sum(rates.mma_flops(instruction.opcode) for instruction in path if is_mma(instruction))
    warps, resident = entry.resident(card)
    resident = blocks or resident
    pipes = pipe_cycles(path, machine)
    parts = card.parts * card.hertz
    if flops:
        work, unit, scale = flops * entry.useful, "TFLOPS", 1e12
        peak = flops / pipes["MMA"] * parts / scale
    else:
        moved = [i for i in path if i.stem in ("LDG", "STG", "LDGSTS") and i.guard != "@!PT"]
        work, unit, scale = sum(rates.warp_bytes(i.opcode) for i in moved), "GB/s", 1e9
        peak = card.memory_gb_per_s
        pipes["MEMORY"] = work / (peak * 1e9 / parts)
    trip = trip_of(entry, name, path, machine, resident, not flops)
    speed, lowest, highest = (
        min(work * warps * resident / cycles * parts / scale, peak)  # starts and ends of a few trips overlap
        for cycles in (trip.cycles, trip.slowest, trip.fastest)
    )
    return PathSpeed(name, len(path), pipes, trip, work, unit, speed, lowest, highest, peak)


TILE_PATHS = ("plain", "raising", "masked", "sums", "smooth_q", "smooth_sums")


def paths_of(entry: Entry) -> dict[str, list[Instruction]]:
    """Return the paths through an entry by name: for attention those of tile_paths(), for decoding the whole code of a
    tile as "plain", for others the steady path as "plain"."""
    if entry.is_attention and any(map(is_mma, entry.code)):
        found = tile_paths(list(entry.code))
        if not entry.rounds_weights:
            found.pop("sums", None)  # 16-bit weights are divided by the sum that lse needs anyway
        if "plain" in found:
            return found
    if entry.decodes and (tile := decoding_path(list(entry.code), DECODED_KEYS, entry.dims[0])):
        return {"plain": tile}
    return {"plain": plain_path(list(entry.code))}


def speeds_of(entry: Entry, machine: Machine, wanted: tuple[str, ...] = TILE_PATHS) -> dict[str, PathSpeed]:
    """Return the speed of each path of a tile that the entry has."""
    paths = paths_of(entry)
    return {name: speed_of_path(entry, name, paths[name], machine) for name in wanted if name in paths}


# ---------------------------------------------------------------------------------------------------------------------
# Whole launches


@dataclass(frozen=True)
class Shape:
    """The shape of an attention launch: as many keys as queries, and separate keys for every head."""

    batch: int
    heads: int
    length: int
    causal: bool = False

    def __str__(self) -> str:
        return f"b{self.batch} h{self.heads} s{self.length}{' causal' if self.causal else ''}"

    def flops(self, dims: tuple[int, int]) -> float:
        pairs = self.length * (self.length + 1) / 2 if self.causal else self.length**2
        return 2.0 * self.batch * self.heads * pairs * sum(dims)


SHAPES = (
    Shape(4, 32, 2048),
    Shape(4, 32, 2048, True),
    Shape(1, 32, 512),
    Shape(1, 32, 1024),
    Shape(1, 32, 4096),
    Shape(1, 32, 4096, True),
    Shape(1, 32, 8192, True),
    Shape(1, 24, 4608),
    Shape(1, 40, 32760),
)


@dataclass(frozen=True)
class LaunchTimes:
    """Times of the blocks of a launch: cycles of a trip by the number of resident blocks, and cycles
    outside of trips."""

    keys: int  # keys of a trip
    plain: tuple[float, ...]  # cycles of a trip with 1, 2, ... resident blocks
    raising: tuple[float, ...]
    masked: tuple[float, ...]
    around: float  # until the block has loaded Q and its first tile, and of the epilogue


def launch_times(entry: Entry, machine: Machine) -> LaunchTimes:
    """Return the times from which those of whole launches are computed."""
    paths = paths_of(entry)
    warps, resident = entry.resident(machine.card)
    rows = entry.rows / (entry.threads / LANES)
    flops = sum(rates.mma_flops(i.opcode) for i in paths["plain"] if is_mma(i)) * entry.useful
    keys = round(flops / (2 * rows * sum(entry.dims)))

    def cycles(name: str) -> tuple[float, ...]:
        path = paths.get(name) or paths["plain"]
        return tuple(trip_of(entry, name, path, machine, blocks, False).cycles for blocks in range(1, resident + 1))

    around = _cycles_to_the_first_tile(entry, paths.get("prologue", []), machine)
    around += alone(paths["epilogue"], machine, warps) if "epilogue" in paths else 0
    return LaunchTimes(keys, cycles("plain"), cycles("raising"), cycles("masked"), around)


def _cycles_to_the_first_tile(entry: Entry, prologue: list[Instruction], machine: Machine) -> float:
    """Return the cycles until a block has passed its prologue and its first tile is in shared memory.

    The copy of the tile starts after the prologue's last barrier of the block, or after its last group of cp.async. The
    launch gives the operands, global scales, and an output in bf16.
    """
    warps = entry.resident(machine.card)[0]
    arrays = REGISTRY[entry.kernel].arrays
    given = {array.name for array in arrays if not array.optional or array.name.endswith(("_global", "out_bf16"))}
    first = PARAMETERS[machine.card.target]
    path = without_absent(prologue, {first + 8 * i for i, array in enumerate(arrays) if array.name not in given})
    starts = [i + 1 for i, instruction in enumerate(path) if instruction.stem in ("BAR", "LDGDEPBAR")] or [len(path)]
    copied = alone(path[: starts[-1]], machine, warps) if path else 0.0
    return max(alone(path, machine, warps) if path else 0.0, copied + rates.COPY_LATENCY)


def block_cycles(entry: Entry, shape: Shape, times: LaunchTimes, row_block: int, resident: int) -> float:
    """Return the cycles of one block of rows with `resident` blocks on its multiprocessor. Its first trip raises
    maxima."""
    rows, warps = entry.rows, entry.threads // LANES
    first = row_block * rows
    if not shape.causal:
        whole, masked = shape.length // times.keys, float(shape.length % times.keys > 0)
    else:
        whole = (first + 1) // times.keys
        # A warp skips trips whose keys are hidden from all its rows.
        ends = (min(first + rows * (warp + 1) // warps, shape.length) for warp in range(warps))
        masked = sum(max(-(-end // times.keys) - whole, 0) for end in ends) / warps
    raising = min(whole, 1)
    at = resident - 1
    return times.around + (whole - raising) * times.plain[at] + raising * times.raising[at] + masked * times.masked[at]


def launch_cycles(entry: Entry, shape: Shape, times: LaunchTimes, card: Card) -> float:
    """Return the cycles from the start of the first block to the end of the last. Blocks start in order, as room
    becomes free.

    The rate of a block depends on the number of resident blocks and changes as they start and end.
    """
    resident = len(times.plain)
    row_blocks = -(-shape.length // entry.rows)
    costs = [[block_cycles(entry, shape, times, i, r) for r in range(1, resident + 1)] for i in range(row_blocks)]
    queue = (i for i in reversed(range(row_blocks)) for _ in range(shape.batch * shape.heads))
    running: list[list[list]] = [
        [] for _ in range(card.multiprocessors)
    ]  # for each multiprocessor [remaining work, its costs]
    since = [0.0] * card.multiprocessors
    version = [0] * card.multiprocessors
    events: list[tuple[float, int, int]] = []

    def advance(place: int, now: float) -> None:
        beside = len(running[place]) - 1
        for block in running[place]:
            block[0] -= (now - since[place]) / block[1][beside]
        since[place] = now

    def plan(place: int) -> None:
        version[place] += 1
        if running[place]:
            beside = len(running[place]) - 1
            end = since[place] + min(left * cost[beside] for left, cost in running[place])
            heapq.heappush(events, (end, place, version[place]))

    def fill(places: list[int]) -> None:
        """Assign blocks to multiprocessors in turns: first to all with room for one, then to those with room for
        another."""
        for free in range(resident, 0, -1):
            for place in places:
                if resident - len(running[place]) >= free and (block := next(queue, None)) is not None:
                    running[place].append([1.0, costs[block]])
        for place in places:
            plan(place)

    fill(list(range(card.multiprocessors)))
    now = 0.0
    while events:
        now = events[0][0]
        freed: list[int] = []
        while events and events[0][0] <= now + 1e-6:  # blocks that end at the same time
            _, place, number = heapq.heappop(events)
            if number == version[place]:
                advance(place, now)
                running[place] = [block for block in running[place] if block[0] > 1e-9]
                freed.append(place)
        fill(freed)
    return now


def launch_tflops(entry: Entry, shape: Shape, times: LaunchTimes, card: Card) -> float:
    """Return the useful TFLOPS of a whole launch, without host time."""
    return shape.flops(entry.dims) / (launch_cycles(entry, shape, times, card) / card.hertz) / 1e12


def launches_of(entry: Entry, half: Entry | None, machine: Machine) -> dict[str, float]:
    """Return the useful TFLOPS of a whole launch at each of SHAPES, of whole blocks or of half blocks, whichever a
    launch takes on the card."""
    card = machine.card
    times = {chosen.name: launch_times(chosen, machine) for chosen in (entry, half) if chosen}

    def chosen(shape: Shape) -> Entry:
        if half is None:
            return entry
        blocks, halves = (shape.batch * shape.heads * -(-shape.length // e.rows) for e in (entry, half))
        return half if takes_halves(blocks, halves, entry.facts, half.facts, card.multiprocessors) else entry

    taken = {shape: chosen(shape) for shape in SHAPES}
    return {str(shape): launch_tflops(which, shape, times[which.name], card) for shape, which in taken.items()}


def with_halves(entries: Iterable[Entry]) -> list[tuple[Entry, Entry | None]]:
    """Return each entry of a unit with that of its half blocks, if it has any; these are left out themselves."""
    by_name = {entry.name: entry for entry in entries}
    halves = {half_of(name) for name in by_name} & set(by_name)
    return [(entry, by_name.get(half_of(name))) for name, entry in by_name.items() if name not in halves]


# ---------------------------------------------------------------------------------------------------------------------
# Doubts

DOUBTS: dict[str, dict[str, Any]] = {
    "MUFU 16 cycles": dict(special_cycles=16.0),
    "MUFU 4 cycles": dict(special_cycles=4.0),
    "F2FP 8 cycles": dict(convert_cycles=8.0),
    "FMNMX 1 cycle": dict(extreme_cycles=1.0),
    "two MMAs queue": dict(mma_queue=2),
    "latencies 1.5 times": dict(latency=1.5),
}


def doubts_of(entry: Entry, machine: Machine) -> dict[str, float]:
    """Return the speed of the plain path with each of the uncertain numbers changed in turn."""
    path = paths_of(entry)["plain"]
    return {
        name: speed_of_path(entry, "plain", path, machine.doubted(**change)).speed for name, change in DOUBTS.items()
    }
