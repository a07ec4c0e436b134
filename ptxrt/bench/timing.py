"""Times of alternating calls, so that all sides of a comparison run on the machine in the same state.

`Clock` measures device time between two events; `turns` measures host time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

import numpy as np

from ..array import DeviceArray, empty, to_device
from ..backend import Backend
from ..errors import ArgumentError, MachineError
from ..formats import bf16
from ..ops.probes import mma_rate_bf16
from ..ops.scales import amax, fill_f32
from ..selection import current
from ..stream import Event

Name = TypeVar("Name", bound=Hashable)

REPEAT = 20
WARM_UP = 3
# The state of the L2 cache when a call begins: warm from the same call, or flushed.
WARM, FLUSHED = "warm", "flushed"
L2_STATES = (WARM, FLUSHED)
# To flush the cache, four times its size is read, because it need not evict the oldest lines.
FLUSH_CACHES = 4
# How long the device is kept busy while the host enqueues work: longer than any call takes to be launched.
BUSY_MILLISECONDS = 1.0


def gpu(what: str) -> Backend:
    """Return the current machine; MachineError if it is not a GPU."""
    backend = current()
    if not backend.is_cuda:
        raise MachineError(
            f"{what}: the machine is the emulator, whose speed says nothing about a GPU; choose a GPU machine (`ptxrt "
            "devices` lists them)"
        )
    return backend


def about(backend: Backend) -> dict[str, Any]:
    """Return a description of the machine: machine, card, device, target, multiprocessors, l2_bytes."""
    device = backend.device
    return {
        **{"machine": backend.name, "card": device.name, "device": device.ordinal, "target": device.target},
        **{
            "multiprocessors": backend.attribute("MULTIPROCESSOR_COUNT"),
            "l2_bytes": backend.attribute("L2_CACHE_SIZE"),
        },
    }


def title(machine: Mapping[str, Any]) -> str:
    """Return `about` in words."""
    number = f" (device {machine['device']})" if machine["device"] else ""
    cache = f"L2 of {machine['l2_bytes'] / 2**20:g} MiB"
    return (
        f"{machine['machine']}, {machine['card']}{number}, {machine['target']}, {machine['multiprocessors']} "
        f"multiprocessors, {cache}"
    )


def checked_repeat(what: str, repeat: int) -> int:
    """Return the number of repetitions; ArgumentError below 1."""
    if repeat < 1:
        raise ArgumentError(f"{what}: each call would be timed {repeat} times; pass a number from 1 on")
    return repeat


def checked_states(what: str, states: Iterable[str]) -> tuple[str, ...]:
    """Return states of the L2 cache; ArgumentError for others."""
    states = tuple(states)
    unknown = [state for state in states if state not in L2_STATES]
    if unknown:
        raise ArgumentError(f"{what}: the L2 cannot be {unknown[0]!r}; there is {', '.join(L2_STATES)}")
    return states


def check_fits(what: str, nbytes: int, backend: Backend) -> None:
    """Raise ArgumentError if arrays of `nbytes` bytes do not fit on the device, before the host makes them."""
    free = backend.memory_info().free
    if nbytes > free:
        sizes = f"the arrays take {nbytes / 2**30:.1f} GiB, {backend.describe()} has {free / 2**30:.1f} GiB free"
        raise ArgumentError(f"{what}: {sizes}; pass a smaller shape")


@dataclass(frozen=True)
class Times:
    """The milliseconds of each repetition."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median sample, in milliseconds."""
        return median(self.samples)

    @property
    def spread(self) -> str:
        """Fastest and slowest sample, in milliseconds."""
        return f"{min(self.samples):.4f}..{max(self.samples):.4f}"

    def fields(self) -> dict[str, Any]:
        """Return the fields of a table row: milliseconds (the median), fastest, slowest, repeat."""
        return {
            "milliseconds": self.median,
            "fastest": min(self.samples),
            "slowest": max(self.samples),
            "repeat": len(self.samples),
        }


class Clock:
    """Device times of calls on one stream of a GPU, with all launches of a call and without host time.

    stream: the stream that all calls use: a Stream, an integer handle or an object with `__cuda_stream__`; None is the
    library's own. repeat: samples of each call.
    """

    def __init__(self, stream=None, repeat: int = REPEAT):
        self.backend = gpu("Clock")
        self.stream = stream
        self.repeat = checked_repeat("Clock", repeat)
        self._start, self._stop = Event(device=self.backend.ordinal), Event(device=self.backend.ordinal)
        rng = np.random.default_rng(0)
        operands = (rng.standard_normal(shape, np.float32).astype(bf16.dtype) for shape in ((2, 16, 16), (4, 8, 16)))
        self._operands = [to_device(operand, device=self.backend.ordinal) for operand in operands]
        self._sums = mma_rate_bf16(*self._operands, blocks=1, steps=1)
        large = empty(
            (FLUSH_CACHES * self.backend.attribute("L2_CACHE_SIZE") // 4,), np.float32, device=self.backend.ordinal
        )
        self._large = fill_f32(x=large, value=1.0, count=large.size)
        self._partial = amax(large, blocks=4 * self.backend.attribute("MULTIPROCESSOR_COUNT"))
        self.backend.finish()  # later work may be on another stream
        self._steps = 4096
        spent = self._time(self.keep_busy)
        self._steps = max(int(self._steps * BUSY_MILLISECONDS / max(spent, 1e-3)), 1)

    def keep_busy(self) -> None:
        """Keep one block busy in registers for about a millisecond, so that the host gets ahead and the caches do not
        change.
        """
        mma_rate_bf16(*self._operands, c=self._sums, blocks=1, steps=self._steps, stream=self.stream)

    def flush(self) -> None:
        """Flush the L2 by reading a large buffer. Unlike writing, this leaves no dirty lines."""
        amax(self._large, partial=self._partial, blocks=self._partial.size, stream=self.stream)

    def times(self, calls: Mapping[Name, Callable[[], Any]], l2: str = WARM) -> dict[Name, Times]:
        """Return the times of each call by name; the sides alternate call by call.

        l2: "warm": the same call has just run. "flushed": a buffer of four times the L2's size has been read.
        """
        (l2,) = checked_states("Clock.times", [l2])
        samples: dict[Name, list[float]] = {name: [] for name in calls}
        for turn in range(-WARM_UP, self.repeat):
            for name, call in calls.items():
                if l2 == WARM:
                    call()
                else:
                    self.flush()
                self.keep_busy()
                spent = self._time(call)
                if turn >= 0:
                    samples[name].append(spent)
        return {name: Times(tuple(values)) for name, values in samples.items()}

    def _time(self, call: Callable[[], Any]) -> float:
        """Return the milliseconds between two events around a call."""
        self._start.record(self.stream)
        call()
        self._stop.record(self.stream)
        return self._start.elapsed_time(self._stop)


def copy_call(x: DeviceArray, y: DeviceArray) -> Callable[[], Any]:
    """Return a driver copy of x to y on the device: the reference for kernels that only move memory."""
    backend = x.backend
    return lambda: backend.copy(y.address, backend, x.address, x.nbytes, backend.own_queue)


def turns(
    sides: Mapping[str, Callable[[], Any]], calls: int, rounds: int, settle: Callable[[], Any]
) -> dict[str, list[float]]:
    """Return the host microseconds of one call of each side, by round; in a round each side makes `calls` calls in
    turn.

    settle: called between turns, outside of the measured time; it waits until the device is idle.
    """
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(-2, rounds):
        for name, call in sides.items():
            settle()
            start = time.perf_counter_ns()
            for _ in range(calls):
                call()
            spent = time.perf_counter_ns() - start
            if turn >= 0:
                samples[name].append(spent / calls / 1e3)
    settle()
    return samples
