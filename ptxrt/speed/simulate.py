"""Simulation of the warps of one multiprocessor part, issued in order, instruction by instruction, as ptxas scheduled
them.

A warp can issue an instruction when its stall count has run out, the scoreboards that it waits for are released, and
the queue of the pipe has room. If several warps can, the one that issued last continues; otherwise the one that has
waited longest issues. The simulation covers barriers of a block, groups of cp.async, and the bandwidth of L2 and
memory. It does not cover instruction fetch, bank conflicts and the power limit.
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from . import rates
from .listing import Instruction
from .rates import MULTIPROCESSORS, Card

OFFSETS = 16  # start offsets over which a result is averaged
TRIPS, WARM_TRIPS = 10, 3  # trips of each warp; the warm ones are not counted


@dataclass(frozen=True)
class Machine:
    """A card with its rates, or with some of them changed."""

    card: Card
    special_cycles: float | None = None  # of MUFU
    convert_cycles: float | None = None  # of F2FP
    extreme_cycles: float | None = None  # of FMNMX
    mma_cycles: float | None = None  # of all MMAs
    mma_queue: int = 1  # queue length of the tensor core
    latency: float = 1.0  # factor of all latencies

    def doubted(self, **changes) -> Machine:
        return replace(self, **changes)

    def cycles(self, instruction: Instruction) -> float:
        """Return the cycles for which an instruction occupies its pipe."""
        kind = rates.rate_of(instruction.opcode, instruction.guard).kind
        doubted = {"special": self.special_cycles, "extreme": self.extreme_cycles, "mma": self.mma_cycles}.get(kind)
        if instruction.stem == "F2FP":
            doubted = self.convert_cycles
        return rates.cycles_of(instruction.opcode, self.card, instruction.guard) if doubted is None else doubted


PIPE = {name: i for i, name in enumerate(("MMA", "XU", "FMA", "ALU", "LSU", "UDP", "CTL"))}
_PLAIN, _BARRIER, _WAIT_COPIES, _COPY, _STREAM, _GROUP, _MEMORY = range(7)


@dataclass(frozen=True)
class Step:
    """An instruction as the simulation sees it."""

    pipe: int
    cycles: float
    stall: int
    waits: tuple[int, ...]
    sets: int | None
    reads: int | None
    latency: float
    varies: bool  # whether its latency is random: memory accesses
    role: int
    amount: float  # copy: bytes from L2; wait: groups that may stay in flight; global access: bytes


def step_of(instruction: Instruction, machine: Machine, streams: bool = False) -> Step:
    """Return the step of an instruction; its listing must have encodings."""
    control, rate = instruction.control, rates.rate_of(instruction.opcode, instruction.guard)
    if control is None:
        raise ValueError("the listing has no encodings")
    cycles = machine.cycles(instruction)
    role, amount = _PLAIN, 0.0
    if instruction.stem == "BAR" and ".SYNC" in instruction.opcode:
        role = _BARRIER
    elif instruction.stem == "DEPBAR":
        found = re.search(r"SB\d, 0x(\w+)", instruction.operands)
        role, amount = _WAIT_COPIES, int(found[1], 16) if found else 0
    elif rate.kind == "copy":
        role, amount = (_STREAM if streams else _COPY), rates.warp_bytes(instruction.opcode)
    elif instruction.stem == "LDGDEPBAR":
        role = _GROUP
    elif streams and instruction.stem in ("LDG", "STG"):
        role, amount = _MEMORY, rates.warp_bytes(instruction.opcode)
    latency = max(rates.LATENCIES.get(rate.kind, rates.OTHER_LATENCY) * machine.latency, cycles + 8)
    waits = tuple(bit for bit in range(6) if control.waits >> bit & 1)
    return Step(
        PIPE[rate.pipe],
        cycles,
        max(1, control.stall),
        waits,
        control.sets,
        control.reads,
        latency,
        rate.pipe == "LSU",
        role,
        amount,
    )


@dataclass(frozen=True)
class Trip:
    """Cycles in which every resident warp of a part passes a path once."""

    cycles: float  # mean over the start offsets
    fastest: float
    slowest: float


def simulate(
    path: Sequence[Instruction],
    machine: Machine,
    warps: int,
    blocks: int,
    offsets: int = OFFSETS,
    streams: bool = False,
) -> Trip:
    """Return the steady trip of `blocks` blocks with `warps` warps each in this part, averaged over start offsets.

    Warps start at offsets, as shares of the trip that the busiest pipe would allow: 0 in the first run, nearly even
    spacing in the last. streams: whether loads and stores reach memory, whose bandwidth then counts, rather than a
    cache.
    """
    steps = [step_of(instruction, machine, streams) for instruction in path]
    resident = warps * blocks
    bound = max(sum(step.cycles for step in steps if step.pipe == pipe) for pipe in PIPE.values()) * resident
    trips, warm = (TRIPS, WARM_TRIPS) if resident <= 4 else (3, 1)  # many warps average by themselves
    found = [_run(steps, machine, warps, blocks, bound * i / offsets, i, trips, warm) for i in range(offsets)]
    return Trip(offsets / sum(1 / cycles for cycles in found), min(found), max(found))


def alone(path: Sequence[Instruction], machine: Machine, warps: int) -> float:
    """Return the cycles in which the warps of one block pass a path together, once."""
    return _run([step_of(instruction, machine) for instruction in path], machine, warps, 1, 0.0, 0, 1, 0)


def _run(
    steps: list[Step], machine: Machine, warps: int, blocks: int, spread: float, seed: int, trips: int, warm: int
) -> float:
    """Return the cycles of a trip in one run."""
    card = machine.card
    count, resident = len(steps), warps * blocks
    chance = random.Random(seed).random
    depth = [1] * len(PIPE)
    for name, queue in rates.QUEUES.items():
        depth[PIPE[name]] = queue
    depth[PIPE["MMA"]] = machine.mma_queue
    waiting = [deque([0.0] * d, d) for d in depth]  # when the last instructions of each pipe left its queue
    free = [0.0] * len(PIPE)
    l2_rate = MULTIPROCESSORS[card.target].l2_bytes_per_clock / 4
    memory_rate = card.memory_gb_per_s / card.gigahertz / card.parts
    l2_free = memory_free = 0.0
    at = [0] * resident
    clock = [spread * i / resident for i in range(resident)]
    ready = list(clock)  # earliest issue of the next instruction, pipe aside
    boards = [[0.0] * 6 for _ in range(resident)]
    turn: list[float] = [float(i) for i in range(-resident, 0)]  # time of each warp's last issue
    copies: list[list[float]] = [[] for _ in range(resident)]
    latest = [0.0] * resident
    arrived: list[list[int]] = [[] for _ in range(blocks)]
    last, issued, done = -1, -1.0, 0
    begun, begun_at, steps_done = 0.0, resident * warm, 0
    started = warm == 0
    never = float("inf")
    while done < resident * trips:
        warp, key = -1, (never, False, 0.0)
        for i in range(resident):
            t = ready[i]
            if t == never:
                continue
            pipe = steps[at[i]].pipe
            gate = waiting[pipe][0]
            t = max(t, gate, issued + 1)
            if t <= key[0]:
                mine = (t, i != last, turn[i])
                if mine < key:
                    warp, key = i, mine
        t = key[0]
        step = steps[at[warp]]
        pipe, cycles = step.pipe, step.cycles
        issued, last, turn[warp] = t, warp, t
        start = free[pipe] if free[pipe] > t else t
        free[pipe] = start + cycles
        waiting[pipe].append(start + cycles if depth[pipe] == 1 else start)
        board = boards[warp]
        if step.role == _MEMORY or step.role == _STREAM:
            memory_free = max(memory_free, start) + step.amount / memory_rate
        if step.sets is not None:
            latency = step.latency * (1 + chance() / 2) if step.varies else step.latency
            end = memory_free + latency if step.role == _MEMORY else start + latency
            board[step.sets] = max(board[step.sets], end)
        if step.reads is not None:
            board[step.reads] = max(board[step.reads], start + rates.READ_LATENCY)
        if step.role == _COPY:
            l2_free = max(l2_free, start) + step.amount / l2_rate
            latest[warp] = max(latest[warp], l2_free + rates.COPY_LATENCY)
        elif step.role == _STREAM:
            latest[warp] = max(latest[warp], memory_free + rates.COPY_LATENCY)
        elif step.role == _GROUP:
            copies[warp] = copies[warp][-7:] + [latest[warp]]
        now = t + step.stall
        steps_done += started
        at[warp] += 1
        if at[warp] == count:
            at[warp] = 0
            now += rates.BRANCH_CYCLES
            done += 1
            if done == begun_at:
                begun, started = t, True
        clock[warp] = now
        if step.role == _BARRIER:
            here = arrived[warp // warps]
            here.append(warp)
            ready[warp] = never
            if len(here) == warps:
                for i in here:
                    clock[i] = t + rates.BARRIER_LATENCY
                    ready[i] = _next(steps[at[i]], clock[i], boards[i], copies[i])
                here.clear()
        else:
            ready[warp] = _next(steps[at[warp]], now, board, copies[warp])
    return (issued - begun) * resident * count / max(steps_done, 1) if warm else issued


def _next(step: Step, now: float, board: list[float], copies: list[float]) -> float:
    """Return the earliest issue of a warp's next instruction, pipe aside."""
    for bit in step.waits:
        if board[bit] > now:
            now = board[bit]
    if step.role == _WAIT_COPIES and copies:
        keep = int(step.amount)
        old = copies[: len(copies) - keep] if keep else copies
        if old:
            now = max(now, max(old))
    return now
