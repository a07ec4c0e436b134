"""Packed sequences, which lie one after the other, cut into units (tiles, runs) of one sequence each.

The twin of kernels_cu/op/sequences.cuh. The first unit of sequence i has the number floor(start / size) + i, so that no
prefix sum over the units of the sequences is needed.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


def units_of(elements: int, size: int, sequences: int = 1) -> int:
    """Return how many units of `size` suffice for the elements of the sequences, whatever their lengths."""
    return -(-elements // size) + sequences - 1 if elements else 0


def first_units(starts, size: int) -> np.ndarray:
    """Return the number of the first unit of each sequence."""
    starts = np.asarray(starts, np.int64)
    return starts // size + np.arange(len(starts))


def sequences_of(starts, elements: int) -> np.ndarray:
    """Return the sequence of each element, [elements]. If several sequences begin at an element, it belongs to the
    last: the others are empty.
    """
    return np.maximum(np.searchsorted(np.asarray(starts), np.arange(elements), side="right") - 1, 0)


def unit_of_each(starts, elements: int, size: int) -> np.ndarray:
    """Return the unit of each element, [elements]; without starts all belong to one sequence."""
    return (np.arange(elements) if starts is None else rows_in_units(starts, elements, size)) // size


def rows_in_units(starts, elements: int, size: int) -> np.ndarray:
    """Return the place of each element, [elements], among the places of all units."""
    sequence = sequences_of(starts, elements)
    return (first_units(starts, size) * size - np.asarray(starts))[sequence] + np.arange(elements)


# Axes and examples of kernels. Without packed sequences each entry of the batch is one sequence, so that `sequences`
# alone gives a kernel the number of units.


def sequences_axis(axes: Mapping[str, int]) -> int:
    """The axis `sequences`: the number of packed sequences in a batch of one, else the batch."""
    return axes.get("sequences", 1) if axes["batch"] == 1 else axes["batch"]


def units_axis(size: int, elements: str = "keys"):
    """Return a function that gives the number of units for the elements of a batch from the axes."""
    return lambda axes: units_of(axes[elements], size, 1 + axes["sequences"] - axes["batch"])


def starts_of(axis: str):
    """Return a function that draws the starts of sequences along an axis; with `ends_of` they share it evenly."""
    return lambda rng, member, shape, axes: (np.arange(shape[0]) * axes[axis] // shape[0]).astype(np.int32)


def ends_of(axis: str):
    """Return a function that draws the ends of these sequences."""
    return lambda rng, member, shape, axes: (np.arange(1, shape[0] + 1) * axes[axis] // shape[0]).astype(np.int32)
