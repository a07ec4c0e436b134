"""The run time of generated code: the functions that a basic block calls, by the names of `NAMESPACE`.

They take the executing threads (`Executing` in machine.py) and call the function of an instruction (instruction.py)
with the arguments of its kind: the threads whose guard holds, whole warps as (warps, 32) arrays, or threads that may
have to wait. This module depends neither on code generation nor on scheduling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .instruction import Fault, Semantics, distinct
from .memory import Access

if TYPE_CHECKING:
    from .machine import Executing

WARP = 32
FULL_MASK = 0xFFFFFFFF


class Threads:
    """The threads that execute a blocking instruction: the first argument of its function."""

    def __init__(self, executing: Executing, targets: tuple[tuple[str, int], ...]):
        self.executing = executing
        self.batch = executing.batch
        self.targets = targets
        self.lane = executing.lane_ids

    @property
    def block(self) -> np.ndarray:
        """Number of each thread's block in the batch."""
        return self.batch.block[self.lane]

    @property
    def thread(self) -> np.ndarray:
        """Linear index of each thread in its block."""
        return self.batch.thread[self.lane]

    @property
    def warp(self) -> np.ndarray:
        """Number of each thread's warp in the batch."""
        return self.lane // WARP

    def park(self, why: str) -> None:
        """Make all of these threads wait before the next instruction, until `Batch.wake`."""
        self.batch.park(self.lane, why)

    def write(self, values, lane_ids: np.ndarray) -> None:
        """Set the destination of this instruction for some of these threads; also valid while they wait."""
        values = values if isinstance(values, tuple) else (values,)
        for (kind, row), value in zip(self.targets, values):
            self.batch.write_row(kind, row, lane_ids, value)


def full(count: int, value, dtype: str) -> np.ndarray:
    """An array (count,) of one value, for results that all threads share."""
    return np.full(count, value, dtype)


def canonical(value: np.ndarray, type: str = "f32") -> np.ndarray:
    """Floats with every NaN replaced by the canonical one of PTX; the array itself if it has no NaN."""
    bad = np.isnan(value)
    if not bad.any():
        return value
    bits = {2: 0x7FFF, 4: 0x7FFFFFFF, 8: 0x7FF8000000000000}[value.dtype.itemsize]
    unsigned = np.dtype(f"u{value.dtype.itemsize}")
    return np.where(bad, unsigned.type(bits), value.view(unsigned)).view(value.dtype)


def guard(executing: Executing, predicate: np.ndarray):
    """(threads, positions) where a guard holds; None if it holds nowhere, positions slice(None) if everywhere."""
    if predicate.ndim == 0:
        return (executing, slice(None)) if predicate else None
    if predicate.all():
        return executing, slice(None)
    positions = np.flatnonzero(predicate)
    return (executing.subset(positions), positions) if len(positions) else None


def pick(value, positions):
    """The elements of an argument at positions; 0-d values are unchanged."""
    if isinstance(value, tuple):
        return tuple(pick(element, positions) for element in value)
    return value if np.ndim(value) == 0 else value[positions]


def within(access: Access, function: Callable, *arguments):
    """Call a memory function for the threads whose guard holds."""
    try:
        return function(access, *arguments)
    except Fault as fault:
        if fault.lane_ids is None:
            fault.lane_ids = access.lane_ids
        raise


def _shaped(value):
    if isinstance(value, tuple):
        return tuple(_shaped(element) for element in value)
    if isinstance(value, np.ndarray) and value.ndim == 1:
        return value.reshape(-1, WARP)
    return value


def prepared(executing: Executing, function: Callable, operand):
    """Apply the `prepare` function of a warp instruction to one operand, as (warps, 32) arrays."""
    if not executing.whole:
        raise Fault(_not_whole(executing))
    return function(_shaped(operand))


def _not_whole(executing: Executing) -> str:
    lanes = executing.lane_ids
    counts = np.bincount(lanes // WARP)
    count = int(counts[counts > 0].min())
    return f"executes an instruction for whole warps with {count} of {WARP} threads of its warp"


def warps(executing: Executing, function: Callable, arguments: tuple, semantics: Semantics) -> tuple:
    """Call a function of whole warps; returns a flat tuple of (n,) results."""
    options = semantics.options
    mask_at = options.get("mask")
    if options.get("orders") and executing.batch.observer is not None:
        executing.batch.observer.met_in_warps(executing.lane_ids, np.broadcast_to(arguments[mask_at], executing.count))
    memory = (executing,) if semantics.kind == "memory" else ()
    if executing.whole:
        shaped = tuple(
            [
                argument
                if argument.__class__ is not tuple and not isinstance(argument, np.ndarray)
                else _shaped(argument)
                for argument in arguments
            ]
        )
        if mask_at is None:
            results = function(*memory, *shaped)
        else:
            if mask_at >= 0:
                mask = shaped[mask_at]
                if not (mask.ndim == 0 and int(mask) == FULL_MASK):
                    _check_mask(
                        executing, np.broadcast_to(mask, (executing.count // WARP, WARP)), executing.lane_ids, np.True_
                    )
            results = function(*memory, *shaped, active=None)
        return _flat(results, executing.count)
    if options.get("aligned") or semantics.kind == "memory":
        lanes = executing.lane_ids
        counts = np.bincount(lanes // WARP)
        fault = Fault(_not_whole(executing), counts[lanes // WARP] < WARP)
        raise fault
    lanes = executing.lane_ids
    present = distinct(lanes // WARP)
    slot = np.searchsorted(present, lanes // WARP) * WARP + lanes % WARP
    shape = (len(present), WARP)
    active = np.zeros(shape, bool)
    active.reshape(-1)[slot] = True

    def expanded(value):
        if isinstance(value, tuple):
            return tuple(expanded(element) for element in value)
        if not isinstance(value, np.ndarray) or value.ndim == 0:
            return value
        full = np.zeros(shape, value.dtype)
        full.reshape(-1)[slot] = value
        return full

    shaped = tuple(expanded(argument) for argument in arguments)
    if mask_at is None:
        results = function(*shaped)
    else:
        if mask_at >= 0:
            ids = (present[:, None] * WARP + np.arange(WARP)).reshape(-1)
            _check_mask(executing, np.broadcast_to(shaped[mask_at], shape), ids, active)
        results = function(*shaped, active=active)
    return tuple(result[slot] for result in _flat(results, shape[0] * WARP))


def _check_mask(executing: Executing, mask: np.ndarray, ids: np.ndarray, active) -> None:
    """Check that each membermask names its own thread, and otherwise only threads that execute with it or exited."""
    bits = np.uint32(1) << np.arange(WARP, dtype=np.uint32)
    here = np.broadcast_to(active, mask.shape)
    missing_self = here & ((mask & bits) == 0)
    if missing_self.any():
        raise _fault_of("executes a .sync instruction whose membermask does not name it", missing_self, ids)
    exited = ~executing.batch.alive[ids].reshape(mask.shape)
    allowed = (np.where(here | exited, bits, np.uint32(0))).sum(axis=1, dtype=np.uint32)
    absent = here & ((mask & ~allowed[:, None]) != 0)
    if absent.any():
        position = np.unravel_index(int(np.argmax(absent)), absent.shape)
        names = int(mask[position] & ~allowed[position[0]])
        raise _fault_of(
            f"executes a .sync instruction whose membermask 0x{int(mask[position]):08x} names "
            "threads that are elsewhere "
            f"(lanes 0x{names:08x})",
            absent,
            ids,
        )


def _fault_of(message: str, where: np.ndarray, ids: np.ndarray) -> Fault:
    fault = Fault(message, where)
    fault.lane_ids = ids
    return fault


def _flat(results, count: int) -> tuple:
    if results is None:
        return ()
    if not isinstance(results, tuple):
        results = (results,)
    return tuple(
        [
            result.reshape(-1)
            if np.size(result) == count
            else np.broadcast_to(result, (count // WARP, WARP)).reshape(-1)
            for result in results
        ]
    )


def blocking(executing: Executing, function: Callable, arguments: tuple, targets: tuple, aligned: bool) -> None:
    """Call the function of a blocking instruction; an aligned one must have all live threads of each warp."""
    batch = executing.batch
    if aligned and executing.lanes is not None:
        lanes = executing.lanes
        here = np.bincount(lanes // WARP, minlength=batch.lanes // WARP)
        alive = batch.alive.reshape(-1, WARP).sum(axis=1)
        wrong = (here != alive)[lanes // WARP]
        if wrong.any():
            warp = int(lanes[int(np.argmax(wrong))]) // WARP
            raise Fault(
                f"executes an aligned barrier with {int(here[warp])} of the {int(alive[warp])} threads of its warp",
                wrong,
            )
        passed = batch.passed(lanes)
        if passed.any():
            warp = int(lanes[int(np.argmax(passed))]) // WARP
            raise Fault(
                f"executes an aligned barrier with {int(here[warp])} of the {WARP} threads of its warp: others ran "
                "past it and exited",
                passed,
            )
    function(Threads(executing, targets), *arguments)


#: The global names of generated code.
NAMESPACE = {
    "full": full,
    "canonical": canonical,
    "copyto": np.copyto,
    "where": np.where,
    "add": np.add,
    "lnot": np.logical_not,
    **{function.__name__: function for function in (guard, pick, within, warps, prepared, blocking)},
}
