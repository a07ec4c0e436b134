"""Estimate the progress of a long launch: the batches that are done, plus the share of the running batch.

The share of a batch is its executed instructions over those of the batch before. The first batch is measured by its
loops: where a loop ends with a comparison of two integers (`setp.ne.s32 %p, %i, %n; @%p bra top`), the rate at which
|i - n| shrinks gives the time left. Only the outermost such loops count. The first second of a launch, and a launch
without a listener, are not monitored. machine.py calls `Progress` after every basic block.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..ptx.ir import Immediate
from ..ptx.lower import Branch
from .decode import UNSIGNED, register_bytes

Listener = Callable[[str, float, float], None]

_QUIET = 1.0  # seconds at the start of a launch without monitoring, and between two messages
_WORTH = 3.0  # shorter launches, in seconds, show no progress
_STEPS = 64  # basic blocks between two readings of the clock
_PAUSE = 0.05  # seconds between two readings of a loop


class Countdown(NamedTuple):
    """A loop over the blocks `header` to `latch` that ends when two integers, `left` and `right`, meet."""

    header: int
    latch: int
    left: object
    right: object
    dtype: np.dtype

    def inside(self, other: "Countdown") -> bool:
        """Whether this is the other loop or is nested in it."""
        return other.header <= self.header and self.latch <= other.latch

    def distance(self, batch) -> float:
        """The largest |left - right| of the executing threads; valid only right after the block `latch`."""
        values = [
            _value_of(operand, batch).astype(self.dtype).astype(np.float64) for operand in (self.left, self.right)
        ]
        return float(np.abs(values[0] - values[1]).max())


def _value_of(operand, batch) -> np.ndarray:
    """The bits of an operand, for each executing thread."""
    if isinstance(operand, Immediate):
        return np.array(operand.value & 0xFFFF_FFFF_FFFF_FFFF, np.uint64)
    kind, row = UNSIGNED[register_bytes(operand.type)], batch.code.row(operand)
    if row is None:
        return batch.code.uniform_value(operand, batch.launch)
    held = None if batch.gathered is None else batch.gathered.held.get((kind, row))
    if held is not None:
        return held
    values = batch.rows.arrays[kind][row]
    lanes = batch.executing.lanes
    return values if lanes is None else values[lanes]


def countdowns(code) -> dict[int, Countdown]:
    """The outermost loops of an entry that end with a comparison of two integers, by their last block."""
    found = {}
    for latch, block in enumerate(code.program.blocks):
        end = block.terminator
        if not isinstance(end, Branch) or min(end.taken, end.otherwise) > latch:
            continue
        for item in reversed(code.decoded[latch]):
            if any(register.name == end.predicate.name for register in item.writes):
                words = item.instruction.opcode.split(".")
                integers = words[0] == "setp" and len(words) == 3 and words[2][0] in "us" and len(item.sources) == 2
                if (
                    integers
                    and not item.uniform
                    and all(isinstance(each, Immediate) or code.kept(each) for each in item.sources)
                ):
                    dtype = np.dtype(f"{'i' if words[2][0] == 's' else 'u'}{int(words[2][1:]) // 8}")
                    found[latch] = Countdown(min(end.taken, end.otherwise), latch, *item.sources, dtype)
                break
    loops = list(found.values())
    return {loop.latch: loop for loop in loops if not any(loop.inside(other) for other in loops if other is not loop)}


class Progress:
    """Reports the progress of a long launch of `total` blocks: calls the listener, or writes a line to a terminal."""

    def __init__(self, name: str, total: int, listener: Listener | None):
        self.name, self.total, self.listener = name, total, listener
        shown = sys.stderr is not None and sys.stderr.isatty() and not os.environ.get("PTXRT_QUIET")
        self.listened = listener is not None or shown
        self.started = self.shown = self.batch_started = time.monotonic()
        self.visible = False
        self.loops: dict[int, Countdown] | None = None
        self.steps = 0
        self.before = 0  # instructions of the batch before
        self.begin(0, total)

    def begin(self, first: int, count: int) -> None:
        """A batch of `count` blocks starts; `first` blocks are done."""
        self.first, self.count = first, count
        self.batch_started = time.monotonic()
        self.followed: Countdown | None = None
        self.at = self.since = self.way = 0.0

    def end(self, issued: int) -> None:
        """The batch is done; it issued `issued` instructions."""
        self.before = issued
        self.show(self.first + self.count)

    def passed(self, batch, number: int) -> None:
        """A basic block of the batch has run."""
        self.steps += 1
        if self.loops is None or self.before:
            if self.steps % _STEPS:
                return
            if time.monotonic() - self.started < _QUIET:
                return
            if self.before:
                self.show(self.first + self.count * min(batch.issued / self.before, 0.99))
            else:
                self.loops = countdowns(batch.code)
            return
        loop = self.loops.get(number)
        if loop is not None:
            self.turned(loop, batch)

    def turned(self, loop: Countdown, batch) -> None:
        """An iteration of a loop is done: estimate the time left from the distance of its two integers."""
        followed, now = self.followed, time.monotonic()
        if loop is not followed:
            self.followed, self.at, self.since, self.way = loop, now, now, loop.distance(batch)
            return
        if now - self.at < _PAUSE:
            return
        self.at, distance = now, loop.distance(batch)
        if distance >= self.way:
            self.since, self.way = now, distance
            return
        left = distance * (now - self.since) / (self.way - distance)
        spent = now - self.batch_started
        self.show(self.first + self.count * spent / (spent + left))

    def show(self, done: float) -> None:
        """Report that `done` of `total` blocks have run: once a second, for launches estimated above `_WORTH`
        seconds."""
        now = time.monotonic()
        spent = now - self.started
        left = spent / done * (self.total - done)
        if spent + left < _WORTH or now - self.shown < _QUIET or done == self.total:
            return
        self.shown = now
        if self.listener is not None:
            self.listener(self.name, done / self.total, left)
        elif self.listened:
            self.visible = True
            sys.stderr.write(f"\r{self.name}: {100 * done / self.total:.0f} % emulated, about {left:.0f} s left \x1b[K")
            sys.stderr.flush()

    def close(self) -> None:
        if self.visible:
            sys.stderr.write("\r\x1b[K")
