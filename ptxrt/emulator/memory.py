"""Memory of the emulated machine: global allocations, shared and local memory, and the accesses of threads to them.

Addresses. Global variables and allocations, constants and kernel parameters lie in one generic address space. Each
allocation has its own buffer. Gaps separate the addresses of allocations, and freed addresses are not reused, so that
an access just past an allocation or to a freed one is always a fault. Shared and local memory have offsets of their own
(from `SHARED_BASE` and `LOCAL_BASE`; 0 is never valid) and appear in the generic space inside windows of 4 GiB.

`Region` is a flat buffer, viewed as elements of the access size, with one state per byte: NEVER (not written yet),
WRITTEN, IN_FLIGHT (the target of an asynchronous copy) or OPAQUE (part of an mbarrier). `GlobalMemory` holds the
allocations. `Access` is the memory of a set of executing threads: it locates addresses, checks them, loads and stores.
`CopyQueue` holds the cp.async copies in flight.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from ..errors import EmulatorFault
from .instruction import Fault

GLOBAL_BASE = 0x7000_0000_0000
SHARED_WINDOW = 0x7F00_0000_0000
LOCAL_WINDOW = SHARED_WINDOW + (1 << 32)
WINDOWS_END = LOCAL_WINDOW + (1 << 32)
SHARED_BASE = 1024  # where shared variables start on sm_90 and newer
LOCAL_BASE = 1024
ALIGNMENT = 512
_GAP = 512
UNNAMED = "an allocation"

NEVER, WRITTEN, IN_FLIGHT, OPAQUE = 0, 1, 2, 3

#: Element types by access size. complex128 stands for 16 raw bytes.
ELEMENTS = {
    1: np.dtype("u1"),
    2: np.dtype("u2"),
    4: np.dtype("u4"),
    8: np.dtype("u8"),
    16: np.dtype("c16"),
    32: np.dtype("V32"),
}
_SHIFTS = {1: 0, 2: 1, 4: 2, 8: 3, 16: 4, 32: 5}
_ALL_WRITTEN = {size: int.from_bytes(bytes([WRITTEN]) * min(size, 8), "little") for size in ELEMENTS}
_CONSTANTS = {
    (dtype, value): np.array(value, dtype)
    for dtype in (np.dtype("u4"), np.dtype("u8"))
    for value in (SHARED_BASE, 1, 2, 3, 4, 5, 7, 15, 31)
}


def bytes_of_mask(used: int, size: int) -> np.ndarray:
    """A mask as bools (size,): bit i stands for byte i."""
    return (used >> np.arange(size)) & 1 != 0


class Region:
    """A flat buffer of `limit` bytes with the state of each byte; `states` is None where all bytes count as written."""

    __slots__ = ("data", "limit", "states", "_views", "_state_views")

    def __init__(self, limit: int, tracked: bool, data: np.ndarray | None = None):
        capacity = -(-max(limit, 1) // 32) * 32
        self.limit = limit
        self.data = np.zeros(capacity, np.uint8) if data is None else data
        self.states = np.zeros(capacity, np.uint8) if tracked else None
        self._views: dict[int, np.ndarray] = {}
        self._state_views: dict[int, np.ndarray] = {}

    def elements(self, size: int) -> np.ndarray:
        """The buffer as elements of `size` bytes."""
        view = self._views.get(size)
        if view is None:
            view = self._views[size] = self.data.view(ELEMENTS[size])
        return view

    def element_states(self, size: int) -> np.ndarray:
        """The states per element of the buffer: one unsigned integer, (n,), or above 8 bytes (n, size // 8) of them."""
        view = self._state_views.get(size)
        if view is None:
            view = self.states.view(f"u{min(size, 8)}")
            view = self._state_views[size] = view.reshape(-1, size // 8) if size > 8 else view
        return view

    def mark(self, index: np.ndarray, size: int, state: int) -> None:
        """Set the state of the elements at `index`."""
        self.element_states(size)[index] = int.from_bytes(bytes([state]) * min(size, 8), "little")

    def wrong(self, index: np.ndarray, size: int, used: int | None = None) -> np.ndarray | None:
        """Which elements hold bytes that may not be read, among those of the mask `used`; None if there are none."""
        if self.states is None:
            return None
        found = self.element_states(size).take(index, axis=0)
        if used is not None:
            found = np.where(bytes_of_mask(used, size), found.view(np.uint8).reshape(-1, size), np.uint8(WRITTEN)).view(
                found.dtype
            )
            found = found if size > 8 else found.reshape(-1)
        good = found == _ALL_WRITTEN[size]
        if good.all():
            return None
        return ~(good.all(axis=-1) if size > 8 else good)


class Allocation(Region):
    """One range of global memory."""

    __slots__ = ("base", "name", "read_only")

    def __init__(self, base: int, size: int, tracked: bool, name: str, read_only: bool = False):
        super().__init__(size, tracked)
        self.base = base
        self.name = name
        self.read_only = read_only

    def __str__(self) -> str:
        return f"{self.name} ({self.limit} bytes at 0x{self.base:x})"


class GlobalMemory:
    """All allocations, by address."""

    def __init__(self, checks: bool = True):
        self.checks = checks
        self.bases: list[int] = []
        self.allocations: list[Allocation] = []
        self._next = GLOBAL_BASE

    def alloc(self, size: int, name: str = UNNAMED, read_only: bool = False) -> int:
        """Reserve `size` uninitialized bytes; returns the address, a multiple of 512."""
        if size < 0:
            raise EmulatorFault(f"an allocation of {size} bytes was asked for")
        base = self._next
        allocation = Allocation(base, size, self.checks, name, read_only)
        self._next = -(-(base + size + _GAP) // ALIGNMENT) * ALIGNMENT
        self.bases.append(base)
        self.allocations.append(allocation)
        return base

    def free(self, address: int) -> None:
        """Free an allocation; its addresses stay invalid."""
        position = bisect_right(self.bases, address) - 1
        if position < 0 or self.bases[position] != address:
            raise EmulatorFault(f"0x{address:x} is freed and is no allocation (freed twice?)")
        del self.bases[position], self.allocations[position]

    def copy(self) -> list[tuple[Allocation, np.ndarray, np.ndarray | None]]:
        """The contents of all allocations that kernels may write, for `restore`."""
        kept = [allocation for allocation in self.allocations if not allocation.read_only]
        return [(each, each.data.copy(), None if each.states is None else each.states.copy()) for each in kept]

    def restore(self, before: list[tuple[Allocation, np.ndarray, np.ndarray | None]]) -> None:
        """Restore the contents of allocations that `copy` returned."""
        for allocation, data, states in before:
            allocation.data[:] = data
            if states is None:
                allocation.states = None
            else:
                allocation.states[:] = states

    def find(self, address: int) -> Allocation | None:
        """The allocation that holds an address (its end included), or None."""
        position = bisect_right(self.bases, address) - 1
        if position < 0:
            return None
        allocation = self.allocations[position]
        return allocation if address <= allocation.base + allocation.limit else None

    def _span(self, address: int, size: int, verb: str) -> tuple[Allocation, int]:
        allocation = self.find(address)
        offset = address - allocation.base if allocation else 0
        if allocation is None or offset + size > allocation.limit:
            raise EmulatorFault(f"the host {verb} {size} bytes at 0x{address:x}, which lie in no allocation")
        return allocation, offset

    def write(self, address: int, data) -> None:
        """Copy bytes or an array from the host."""
        raw = np.frombuffer(
            np.ascontiguousarray(data).tobytes() if isinstance(data, np.ndarray) else bytes(data), np.uint8
        )
        if raw.size == 0:
            return
        allocation, offset = self._span(address, raw.size, "writes")
        allocation.data[offset : offset + raw.size] = raw
        if allocation.states is not None:
            if raw.size == allocation.limit:
                allocation.states = None
            else:
                allocation.states[offset : offset + raw.size] = WRITTEN

    def fill(self, address: int, start: bytes) -> None:
        """Initialize a new allocation: the bytes of `start`, then zeros."""
        allocation = self.find(address)
        allocation.data[: len(start)] = np.frombuffer(start, np.uint8)
        allocation.states = None

    def read(self, address: int, out: np.ndarray) -> np.ndarray:
        """Copy into a C-contiguous array of the host; returns it. With checks, uninitialized bytes are a fault."""
        raw = out.reshape(-1).view(np.uint8)
        if raw.size == 0:
            return out
        allocation, offset = self._span(address, raw.size, "reads")
        if allocation.states is not None:
            states = allocation.states[offset : offset + raw.size]
            if (states == WRITTEN).all():
                if raw.size == allocation.limit:
                    allocation.states = None
            else:
                first = int(np.argmax(states != WRITTEN))
                raise EmulatorFault(
                    f"the host reads {allocation} where no kernel wrote: {int((states != WRITTEN).sum())} of "
                    f"{raw.size} bytes, "
                    f"the first at byte {offset + first}"
                )
        raw[:] = allocation.data[offset : offset + raw.size]
        return out


class Part(NamedTuple):
    """The elements `index` of one region that an access touches; `where` are their positions in the access (None: all,
    in order)."""

    region: Region
    index: np.ndarray
    where: np.ndarray | None


class Access:
    """The memory of a set of executing threads: the `memory` argument of `Memory` instructions.

    lanes: the ids of the threads in the batch, None for all of them.
    """

    def __init__(self, batch, lanes: np.ndarray | None):
        self.batch = batch
        self.lanes = lanes
        self.count = batch.lanes if lanes is None else len(lanes)
        self.checks = batch.checks
        self._bases: dict[tuple[str, np.dtype], np.ndarray] = {}
        self._storing: np.ndarray | None = None  # the values of the latest store, for the race checks

    @property
    def lane_ids(self) -> np.ndarray:
        """The ids of the threads in the batch."""
        return self.batch.lane_ids if self.lanes is None else self.lanes

    @property
    def copies(self) -> "BoundCopies":
        """The asynchronous copies (cp.async) of these threads."""
        return BoundCopies(self)

    def subset(self, positions: np.ndarray) -> "Access":
        """The memory of the threads at these positions among the executing ones."""
        return type(self)(self.batch, self.lane_ids[positions])

    # -- called by instruction families -------------------------------------------------------------------------

    def load(self, space: str, address: np.ndarray, size: int, lane: np.ndarray | None = None) -> np.ndarray:
        """Read `size` bytes (1, 2, 4, 8, 16, 32) at each address; returns uint8 of shape (*address.shape, size).

        `lane` has the shape of `address` and holds the position of the reading thread among the executing ones; by
        default all of them read, in order. Faults: out of bounds, misaligned, bytes that are uninitialized or that a
        copy in flight writes.
        """
        found = self._of_lane(lane, self.gather, space, address.reshape(-1), size)
        return found.view(np.uint8).reshape(*address.shape, size)

    def store(self, space: str, address: np.ndarray, data: np.ndarray, lane: np.ndarray | None = None) -> None:
        """Write uint8 data of shape (*address.shape, size) at each address; of equal addresses the last thread wins."""
        size = data.shape[-1]
        values = np.ascontiguousarray(data).reshape(-1).view(ELEMENTS[size])
        self._of_lane(lane, self.scatter, space, address.reshape(-1), values, size)

    def _of_lane(self, lane: np.ndarray | None, access, *arguments):
        """Call an access; a fault names the thread that `lane` holds at its position."""
        if lane is None:
            return access(*arguments)
        lane = lane.reshape(-1)
        try:
            return access(*arguments, lane)
        except Fault as fault:
            raise _moved(fault, lane) from None

    def gather(
        self,
        space: str,
        address: np.ndarray,
        size: int,
        lane: np.ndarray | None = None,
        used: int | None = None,
        strong: bool = False,
    ) -> np.ndarray:
        """`load` on (n,) addresses: returns (n,) elements of `ELEMENTS[size]`. Bytes outside of the mask `used` are not
        checked.

        strong: the load may order accesses of other blocks before later ones of this block (see `GlobalRaces`).
        """
        parts = self.locate(space, address, size, lane, "reads", used)
        if self.batch.global_races is not None:
            self._note_global(parts, size, lane, "reads", strong)
        if len(parts) == 1 and parts[0].where is None:
            region, index, _ = parts[0]
            self._check_readable(region, index, size, space, address, None, used)
            return region.elements(size).take(index)
        values = np.zeros(len(address), ELEMENTS[size])
        for region, index, where in parts:
            self._check_readable(region, index, size, space, address, where, used)
            values[where] = region.elements(size).take(index)
        return values

    def scatter(
        self,
        space: str,
        address: np.ndarray,
        values: np.ndarray,
        size: int,
        lane: np.ndarray | None = None,
        strong: bool = False,
    ) -> None:
        """`store` of (n,) elements (or one for all) of `ELEMENTS[size]` at (n,) addresses.

        strong: the store may order earlier accesses of this block before those of other blocks (see `GlobalRaces`).
        """
        batch = self.batch
        self._storing = values
        parts = self.locate(space, address, size, lane, "writes")
        if batch.global_races is not None:
            self._note_global(parts, size, lane, "writes", strong, values)
        for region, index, where in parts:
            here = values if where is None or values.ndim == 0 else values[where]
            elements = region.elements(size)
            if not batch.compares or (elements[index] != here).any() or region.wrong(index, size) is not None:
                batch.changes += 1
            elements[index] = here
            if region.states is not None:
                self._check_not_in_flight(region, index, size, address, where)
                region.mark(index, size, WRITTEN)

    def _note_global(self, parts: list["Part"], size: int, lane, verb: str, strong: bool, values=None) -> None:
        """Report an access to allocations to the check for races between blocks."""
        races = self.batch.global_races
        for region, index, where in parts:
            if not isinstance(region, Allocation) or region.read_only:
                continue
            if strong:
                races.synchronizes(self.batch, self.lane_ids, releases=verb == "writes", acquires=verb == "reads")
                continue
            here = values if values is None or where is None or values.ndim == 0 else values[where]
            races.access(self, region, index, size, where, lane, verb, here)

    # -- finding the bytes --------------------------------------------------------------------------------------

    def locate(
        self, space: str, address: np.ndarray, size: int, lane: np.ndarray | None, verb: str, used: int | None = None
    ) -> list[Part]:
        """The elements at (n,) addresses, after the checks of bounds and alignment."""
        if space == "shared":
            parts = [self._locate_private("shared", address, size, lane, verb, used)]
        elif space == "generic":
            parts = self._locate_generic(address, size, lane, verb, used)
        elif space == "local":
            parts = [self._locate_private("local", address, size, lane, verb, used)]
        else:
            parts = self._locate_global(address, size, verb)
        return parts

    def _locate_private(self, space: str, address: np.ndarray, size: int, lane, verb: str, used: int | None) -> Part:
        batch = self.batch
        region, limit = (batch.shared, batch.shared_bytes) if space == "shared" else (batch.local, batch.local_bytes)
        dtype = address.dtype
        offset = address - _CONSTANTS[dtype, SHARED_BASE]
        if len(offset) and int(offset.max()) > limit - size or limit < size:
            self._out_of_bounds(space, address, offset, limit, size, verb)
        if size > 1 and int(np.bitwise_or.reduce(offset)) & (size - 1):
            self._misaligned(space, address, offset, size, verb)
        if batch.observer is not None and space == "shared":
            values = self._storing if verb == "writes" else None
            if values is not None and values.ndim and len(values) != len(offset):
                values = None  # one part of a store to several spaces: its values are not known here
            batch.observer.access(self, offset, size, lane, verb, used, values)
        base = self._bases.get((space, dtype))
        if base is None:
            base = self._bases[space, dtype] = self._private_base(space).astype(dtype)
        offset = offset + (base if lane is None else base[lane])
        if size > 1:
            offset = np.right_shift(offset, _CONSTANTS[dtype, _SHIFTS[size]])
        return Part(region, offset.view(np.int64) if dtype.itemsize == 8 else offset.astype(np.int64), None)

    def _private_base(self, space: str) -> np.ndarray:
        batch = self.batch
        if space == "shared":
            return batch.block[self.lane_ids] * batch.shared_stride
        return self.lane_ids * batch.local_stride

    def _locate_global(self, address: np.ndarray, size: int, verb: str) -> list[Part]:
        if not len(address):
            return []
        memory = self.batch.memory
        if address.dtype != np.uint64:
            address = address.astype(np.uint64)
        allocation = memory.find(int(address[0]))
        if allocation is not None and allocation.limit >= size:
            offset = address - np.uint64(allocation.base)
            if int(offset.max()) <= allocation.limit - size:
                if size > 1:
                    if int(np.bitwise_or.reduce(offset)) & (size - 1):
                        self._misaligned("global", address, offset, size, verb)
                    offset = np.right_shift(offset, _CONSTANTS[offset.dtype, _SHIFTS[size]])
                if allocation.read_only and verb != "reads":
                    raise Fault(f"{verb} {size} bytes in {allocation}, which is constant")
                return [Part(allocation, offset.view(np.int64), None)]
        return self._locate_scattered(address, size, verb)

    def _locate_scattered(self, address: np.ndarray, size: int, verb: str) -> list[Part]:
        """Locate global addresses that lie in several allocations, or in none."""
        memory = self.batch.memory
        position = np.searchsorted(np.array(memory.bases, np.uint64), address, side="right").astype(np.int64) - 1
        parts = []
        for slot in np.unique(position):
            where = np.flatnonzero(position == slot)
            some = address[where]
            allocation = memory.allocations[slot] if slot >= 0 else None
            limit = allocation.limit if allocation else 0
            offset = some - np.uint64(allocation.base if allocation else 0)
            bad = (offset > np.uint64(max(limit - size, 0))) | (limit < size)
            if bad.any():
                self._outside(address, where[bad], size, verb)
            if int(np.bitwise_or.reduce(offset)) & (size - 1):
                self._misaligned("global", address, address, size, verb)
            if allocation.read_only and verb != "reads":
                raise Fault(f"{verb} {size} bytes in {allocation}, which is constant", int(where[0]))
            parts.append(Part(allocation, (offset >> np.uint64(_SHIFTS[size])).view(np.int64), where))
        return parts

    def _locate_generic(self, address: np.ndarray, size: int, lane, verb: str, used: int | None) -> list[Part]:
        if not len(address):
            return []
        low, high = int(address.min()), int(address.max())
        if high < SHARED_WINDOW or low >= WINDOWS_END:
            return self._locate_global(address, size, verb)
        if low >= SHARED_WINDOW and high < LOCAL_WINDOW:
            return [self._locate_private("shared", address - np.uint64(SHARED_WINDOW), size, lane, verb, used)]
        if low >= LOCAL_WINDOW and high < WINDOWS_END:
            return [self._locate_private("local", address - np.uint64(LOCAL_WINDOW), size, lane, verb, used)]
        parts = []
        lane = np.arange(len(address)) if lane is None else lane
        shared = (address >= SHARED_WINDOW) & (address < LOCAL_WINDOW)
        local = (address >= LOCAL_WINDOW) & (address < WINDOWS_END)
        for mask, space, window in ((shared, "shared", SHARED_WINDOW), (local, "local", LOCAL_WINDOW)):
            where = np.flatnonzero(mask)
            if len(where):
                try:
                    part = self._locate_private(
                        space, address[where] - np.uint64(window), size, lane[where], verb, used
                    )
                except Fault as fault:
                    raise _moved(fault, where) from None
                parts.append(part._replace(where=where))
        where = np.flatnonzero(~(shared | local))
        if len(where):
            try:
                found = self._locate_global(address[where], size, verb)
            except Fault as fault:
                raise _moved(fault, where) from None
            parts += [part._replace(where=where if part.where is None else where[part.where]) for part in found]
        return parts

    # -- faults -------------------------------------------------------------------------------------------------

    def _check_readable(
        self, region: Region, index, size: int, space: str, address: np.ndarray, where, used: int | None = None
    ) -> None:
        if region.states is None or not self.checks:
            return
        wrong = region.wrong(index, size, used)
        if wrong is None:
            return
        first = int(np.argmax(wrong))
        states = region.element_states(size)[index[first]].reshape(-1).view(np.uint8)
        states = states if used is None else states[bytes_of_mask(used, size)]
        position = first if where is None else int(where[first])
        what = "that nothing wrote"
        for state, words in (
            (IN_FLIGHT, "that an asynchronous copy is still writing"),
            (OPAQUE, "that belong to an mbarrier"),
        ):
            what = words if (states == state).any() else what
        name = f" of {region}" if isinstance(region, Allocation) else f" of {space} memory"
        good = states == WRITTEN
        rest = int((~good).sum())
        hint = ""
        if good[0] and good[: len(good) - rest].all() and not states[-rest:].any():
            hint = ", the last ones (so do copies of a whole struct look that has padding behind its last field)"
        raise Fault(f"reads {size} bytes at 0x{int(address[position]):x}{name}, {rest} of them {what}{hint}", position)

    def _check_not_in_flight(self, region: Region, index, size: int, address: np.ndarray, where) -> None:
        if region is not self.batch.shared or not self.batch.guarded:
            return
        states = region.element_states(size).take(index, axis=0)
        taken = (states & (_ALL_WRITTEN[size] * IN_FLIGHT)) != 0  # the bit that IN_FLIGHT and OPAQUE share
        if taken.any():
            first = int(np.argmax(taken.reshape(len(index), -1).any(axis=1)))
            position = first if where is None else int(where[first])
            opaque = (states[first].reshape(-1).view(np.uint8) == OPAQUE).any()
            what = "belong to an mbarrier" if opaque else "an asynchronous copy is still writing"
            raise Fault(f"writes {size} bytes of shared memory at 0x{int(address[position]):x} that {what}", position)

    def _out_of_bounds(self, space: str, address, offset, limit: int, size: int, verb: str) -> None:
        bad = offset.astype(np.uint64) + np.uint64(size) > np.uint64(limit)
        bad |= offset > np.iinfo(offset.dtype).max - 4096  # wrapped: below the base
        position = int(np.argmax(bad))
        raise Fault(
            f"{verb} {size} bytes at 0x{int(address[position]):x} of {space} memory, which holds "
            f"0x{SHARED_BASE:x} to 0x{SHARED_BASE + limit:x} ({limit} bytes)",
            bad,
        )

    def _misaligned(self, space: str, address, offset, size: int, verb: str) -> None:
        bad = (offset & offset.dtype.type(size - 1)) != 0
        first = int(address[int(np.argmax(bad))])
        place = f"{space} memory"
        if space == "global" and (name := self.batch.memory.find(first).name) != UNNAMED:
            place = name
        raise Fault(f"{verb} {size} bytes at 0x{first:x} of {place}, which is no multiple of {size}", bad)

    def _outside(self, address: np.ndarray, where: np.ndarray, size: int, verb: str) -> None:
        first = int(address[where[0]])
        memory = self.batch.memory
        nearest = min(
            memory.allocations,
            key=lambda allocation: max(allocation.base - first, first + size - allocation.base - allocation.limit),
            default=None,
        )
        hint = ""
        if nearest is not None:
            past, before = first + size - nearest.base - nearest.limit, nearest.base - first
            distance = f"{before} bytes before the start" if before > 0 else f"{past} bytes past the end"
            hint = f"; the nearest is {nearest}, {distance}" if max(past, before) < 1 << 24 else ""
        raise Fault(f"{verb} {size} bytes at 0x{first:x}, which lie in no allocation{hint}", int(where[0]))


def _moved(fault: Fault, where: np.ndarray) -> Fault:
    """A fault of a subset of threads, with its position among all: `where` holds the positions of the subset."""
    at = fault.where
    if at is None:
        position = 0
    elif isinstance(at, np.ndarray) and at.dtype == bool:
        position = int(np.argmax(at))
    else:
        position = int(at)
    return Fault(fault.message, int(where[position]))


# ---------------------------------------------------------------------------------------------------------------
# Asynchronous copies


class _Copy(NamedTuple):
    """The copies of one instruction: per thread its id, its group and the target element; the sources by part."""

    lanes: np.ndarray
    group: np.ndarray
    target: np.ndarray
    size: int
    sources: list[Part]
    taken: np.ndarray | None  # bytes of each copy that come from the source (the rest is zero); None for all
    serial: int  # number of the issuing instruction, in order of issue


class CopyQueue:
    """The cp.async copies in flight. A copy lands when its thread waits for it, no earlier.

    Source: PTX ISA, cp.async: completion is only guaranteed by cp.async.wait_group, wait_all or an mbarrier.
    """

    def __init__(self, batch):
        self.batch = batch
        self.pending: list[_Copy] = []
        self.committed = np.zeros(batch.lanes, np.int64)
        self.serial = 0

    def land_before(self, lanes: np.ndarray, serial: int, barrier: int) -> None:
        """Perform the copies that these threads issued before a serial number; they complete on the mbarrier."""
        self.batch.changes += 1
        chosen = np.zeros(self.batch.lanes, bool)
        chosen[lanes] = True
        left = []
        for copy in self.pending:
            due = chosen[copy.lanes] if copy.serial < serial else None
            rest = copy if due is None or not due.any() else self.land(copy, due, barrier)
            if rest is not None:
                left.append(rest)
        self.pending[:] = left

    def land(self, copy: _Copy, due: np.ndarray, barrier: int | None = None) -> _Copy | None:
        """Perform the copies that are due (bool per thread); returns the rest, None if there is none.

        The completion is known to the issuing thread; with `barrier`, to the threads that wait for that mbarrier.
        """
        whole = bool(due.all())
        shared = self.batch.shared
        values = np.zeros(len(copy.lanes), ELEMENTS[copy.size])
        for region, index, where in copy.sources:
            values[slice(None) if where is None else where] = region.elements(copy.size).take(index)
        if copy.taken is not None:
            raw = values.view(np.uint8).reshape(-1, copy.size)
            raw[np.arange(copy.size) >= copy.taken[:, None]] = 0
        target = copy.target if whole else copy.target[due]
        shared.elements(copy.size)[target] = values if whole else values[due]
        if shared.states is not None:
            shared.mark(target, copy.size, WRITTEN)
        if self.batch.observer is not None:
            self.batch.observer.landed(copy.lanes if whole else copy.lanes[due], target * copy.size, copy.size, barrier)
        if whole:
            return None
        rest = np.flatnonzero(~due)
        return copy._replace(
            lanes=copy.lanes[rest],
            group=copy.group[rest],
            target=copy.target[rest],
            sources=[part for part in (_rest_of(part, rest, len(due)) for part in copy.sources) if part is not None],
            taken=None if copy.taken is None else copy.taken[rest],
        )


def _rest_of(part: Part, rest: np.ndarray, count: int) -> Part | None:
    if part.where is None:
        return Part(part.region, part.index[rest], None)
    position = np.full(count, -1)
    position[rest] = np.arange(len(rest))
    moved = position[part.where]
    keep = np.flatnonzero(moved >= 0)
    return Part(part.region, part.index[keep], moved[keep]) if len(keep) else None


class BoundCopies:
    """The copy queue for the executing threads: `memory.copies`."""

    def __init__(self, access: Access):
        self.access = access
        self.queue: CopyQueue = access.batch.copies

    def issue(
        self, destination: np.ndarray, source: np.ndarray, size: int, source_bytes: np.ndarray | None = None
    ) -> None:
        """Queue a copy of `size` bytes (4, 8, 16) from global to shared memory.

        `source_bytes`: how many come from the source, the rest is zero; (n,) or scalar, None for all. Bounds,
        alignment and the states of the source are checked at once.
        """
        access, queue = self.access, self.queue
        count = access.count
        destination = np.broadcast_to(destination, count)
        source = np.broadcast_to(source, count)
        region, target, _ = access.locate("shared", destination, size, None, "copies to")[0]
        taken = None
        if source_bytes is not None:
            taken = np.broadcast_to(source_bytes, count).astype(np.int64)
            if (taken > size).any():
                raise Fault(
                    f"copies {int(taken.max())} of {size} bytes: the source size is larger than the copy", taken > size
                )
            if (taken == size).all():
                taken = None
        if taken is None:
            sources = self._checked(source, size, None)
        else:
            sources = self._checked(source, size, np.flatnonzero(taken == size))
            partial = np.flatnonzero((taken > 0) & (taken < size))
            if len(partial):
                sources += self._partial(source, size, partial, taken)
        if region.states is not None:
            region.mark(target, size, IN_FLIGHT)
        lanes = access.lane_ids
        queue.pending.append(_Copy(lanes, queue.committed[lanes], target, size, sources, taken, queue.serial))
        queue.serial += 1
        access.batch.guarded = True

    def _checked(self, source: np.ndarray, size: int, where: np.ndarray | None) -> list[Part]:
        access = self.access
        some = source if where is None else source[where]
        try:
            parts = access.locate("global", some, size, None, "reads")
            for region, index, inside in parts:
                access._check_readable(region, index, size, "global", some, inside)
        except Fault as fault:
            raise (fault if where is None else _moved(fault, where)) from None
        if where is None:
            return parts
        return [part._replace(where=where if part.where is None else where[part.where]) for part in parts]

    def _partial(self, source: np.ndarray, size: int, where: np.ndarray, taken: np.ndarray) -> list[Part]:
        """Sources of which only the first bytes are read. Their values are read at once, byte by byte, into a new
        region."""
        values = np.zeros((len(where), size), np.uint8)
        for byte in range(size):
            reading = np.flatnonzero(taken[where] > byte)
            if len(reading):
                at = source[where[reading]] + np.uint64(byte)
                parts = self._checked(at, 1, None)
                for region, index, inside in parts:
                    values[reading if inside is None else reading[inside], byte] = region.data[index]
        region = Region(values.size, False)
        region.data[: values.size] = values.reshape(-1)
        return [Part(region, np.arange(len(where)), where)]

    def commit(self) -> None:
        """Close the group of the copies that these threads issued since their last commit."""
        self.queue.committed[self.access.lane_ids] += 1

    def wait(self, groups: int) -> None:
        """Perform all but the latest `groups` committed groups of these threads."""
        self._land(self.queue.committed - int(groups))

    def wait_all(self) -> None:
        """Perform all copies that these threads issued."""
        self._land(self.queue.committed + 1)

    def _land(self, limit: np.ndarray) -> None:
        queue, access = self.queue, self.access
        access.batch.changes += len(queue.pending)
        waiting = None
        if access.lanes is not None:
            waiting = np.zeros(access.batch.lanes, bool)
            waiting[access.lanes] = True
        left = []
        for copy in queue.pending:
            due = copy.group < limit[copy.lanes]
            if waiting is not None:
                due &= waiting[copy.lanes]
            rest = queue.land(copy, due) if due.any() else copy
            if rest is not None:
                left.append(rest)
        queue.pending[:] = left
