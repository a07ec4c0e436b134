"""Packed sequences, one behind the other, cut into units (tiles, runs) that no two of them share.

The twin of kernels_cu/op/sequences.cuh. The units of sequence i begin with number floor(start / size) + i, so that
lengths need not be added up.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


def units_of(elements: int, size: int, sequences: int = 1) -> int:
    """Return how many units of `size` hold so many elements of so many sequences, of any lengths."""
    return -(-elements // size) + sequences - 1 if elements else 0


def first_units(starts, size: int) -> np.ndarray:
    """Return the number of the first unit of each sequence."""
    starts = np.asarray(starts, np.int64)
    return starts // size + np.arange(len(starts))


def sequences_of(starts, elements: int) -> np.ndarray:
    """Return the sequence of each of so many elements; of several that begin with it the last, because the others are
    empty.
    """
    return np.maximum(np.searchsorted(np.asarray(starts), np.arange(elements), side="right") - 1, 0)


def unit_of_each(starts, elements: int, size: int) -> np.ndarray:
    """Return the unit of each of so many elements; without starts all are of one sequence."""
    return (np.arange(elements) if starts is None else rows_in_units(starts, elements, size)) // size


def rows_in_units(starts, elements: int, size: int) -> np.ndarray:
    """Return the place of each of so many elements among those of all units."""
    sequence = sequences_of(starts, elements)
    return (first_units(starts, size) * size - np.asarray(starts))[sequence] + np.arange(elements)


# Axes and examples of kernels. Without packed sequences each batch is one, so that a kernel knows how many units there
# are from `sequences` alone.


def sequences_axis(axes: Mapping[str, int]) -> int:
    """The axis `sequences`: any number of packed ones in a batch of one."""
    return axes.get("sequences", 1) if axes["batch"] == 1 else axes["batch"]


def units_axis(size: int, elements: str = "keys"):
    """How many units hold the elements of a batch, from its axes."""
    return lambda axes: units_of(axes[elements], size, 1 + axes["sequences"] - axes["batch"])


def starts_of(axis: str):
    """Examples of where sequences begin along an axis; with `ends_of` they share it evenly."""
    return lambda rng, member, shape, axes: (np.arange(shape[0]) * axes[axis] // shape[0]).astype(np.int32)


def ends_of(axis: str):
    """Examples of where they end."""
    return lambda rng, member, shape, axes: (np.arange(1, shape[0] + 1) * axes[axis] // shape[0]).astype(np.int32)
