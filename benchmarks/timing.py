"""Median device times of calls on one stream, taken in turns so that all sides meet the same machine."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Callable, Mapping

from cuda.bindings import driver


@dataclass(frozen=True)
class Times:
    """Milliseconds of the single repetitions."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle sample, in milliseconds."""
        return median(self.samples)

    @property
    def spread(self) -> str:
        """Fastest and slowest sample, in milliseconds."""
        return f"{min(self.samples):.4f}..{max(self.samples):.4f}"


def _check(result):
    if int(result[0]):
        raise RuntimeError(f"the driver says {result[0]}")
    return result[1] if len(result) == 2 else None


def paired(
    calls: Mapping[str, Callable[[], object]],
    stream: int,
    keep_busy: Callable[[], object],
    repeat: int = 20,
    warm_up: int = 3,
) -> dict[str, Times]:
    """Time each call `repeat` times by events on `stream`, which all of them must use; sides alternate call by call.

    `keep_busy` starts work on the stream that outlasts the host's part of a call, so that device time alone is
    counted: without it the device waits for the host between the two events.
    """
    start, stop = (_check(driver.cuEventCreate(0)) for _ in range(2))
    for call in calls.values():
        for _ in range(warm_up):
            call()
    samples = {name: [] for name in calls}
    for _ in range(repeat):
        for name, call in calls.items():
            keep_busy()
            _check(driver.cuEventRecord(start, stream))
            call()
            _check(driver.cuEventRecord(stop, stream))
            _check(driver.cuEventSynchronize(stop))
            samples[name].append(_check(driver.cuEventElapsedTime(start, stop)))
    return {name: Times(tuple(values)) for name, values in samples.items()}
