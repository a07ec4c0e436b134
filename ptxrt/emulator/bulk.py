"""Bulk copies: cp.async.bulk and cp.reduce.async.bulk, with and without tensors (PTX ISA 9.7.9.25.4 and 9.7.9.25.5).

A copy into shared memory completes bytes on an mbarrier. It lands when a thread waits for that phase (see mbarrier.py).
A copy out of shared memory belongs to a bulk group of its thread. It reads its source at wait_group.read and writes its
destination at wait_group, no earlier; the exit of the thread does both. Until then an access to these bytes is a fault
with `checks` or `races`.

A cluster has one block, so .shared::cluster is the block's own shared memory, and a multicast goes to that block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

import numpy as np

from ..errors import ArgumentError
from .access import combination
from .check import READS_IN_BULK, WRITES_IN_BULK
from .instruction import Blocking, Fault, Memory, Semantics, Unsupported, define
from .mbarrier import Transfer, barriers
from .memory import IN_FLIGHT, WRITTEN, Part
from .tensor_map import ALIGNMENT, BYTES, Im2colMap, TensorMap, decode, swizzled

_CHUNK = 16
_BOX_ALIGNMENT = 128
_COMPLETES = "mbarrier::complete_tx::bytes"
_MULTICAST = "multicast::cluster"
_SHARED = ("shared::cta", "shared::cluster")
_INTO_GLOBAL = {
    "add": ("u32", "s32", "u64", "f32", "f64", "f16", "bf16"),
    **dict.fromkeys(("min", "max"), ("u32", "s32", "u64", "s64", "f16", "bf16")),
    **dict.fromkeys(("inc", "dec"), ("u32",)),
    **dict.fromkeys(("and", "or", "xor"), ("b32", "b64")),
}
_INTO_SHARED = {
    "add": ("u32", "s32", "u64"),
    **dict.fromkeys(("min", "max"), ("u32", "s32")),
    **dict.fromkeys(("inc", "dec"), ("u32",)),
    **dict.fromkeys(("and", "or", "xor"), ("b32",)),
}


def _values(parts: list[Part], count: int, unit: int) -> np.ndarray:
    """The elements of parts as bytes (count, unit); elements that no part covers are zero."""
    values = np.zeros((count, unit), np.uint8)
    for region, index, where in parts:
        found = region.elements(unit).take(index).view(np.uint8).reshape(-1, unit)
        values[slice(None) if where is None else where] = found
    return values


class _Update:
    """An operation of cp.reduce.async.bulk on elements of a type: (old bytes, new bytes) -> bytes."""

    def __init__(self, operation: str, type: str):
        self.dtype, self.function = combination(operation, type)

    def __call__(self, old: np.ndarray, new: np.ndarray) -> np.ndarray:
        left, right = (np.ascontiguousarray(side).reshape(-1).view(self.dtype) for side in (old, new))
        return np.ascontiguousarray(self.function(left, right)).view(np.uint8).reshape(old.shape)


class _Side:
    """The source or the destination of one thread's copy: elements of `unit` bytes, checked when the copy is issued.

    updated: a destination that is read, too, for a reduction.
    """

    def __init__(
        self, threads, position: int, space: str, address: np.ndarray, unit: int, verb: str, updated: bool = False
    ):
        access = threads.executing
        self.unit, self.count = unit, len(address)
        try:
            self.parts = access.locate(space, address, unit, np.full(len(address), position), verb)
            if updated or verb in ("reads", READS_IN_BULK):
                for region, index, where in self.parts:
                    access._check_readable(region, index, unit, space, address, where)
        except Fault as fault:
            raise Fault(f"starts a copy that {fault.message}", position) from None

    def mark(self, state: int) -> None:
        for region, index, _ in self.parts:
            if region.states is not None:
                region.mark(index, self.unit, state)

    def read(self) -> np.ndarray:
        return _values(self.parts, self.count, self.unit)

    def write(self, values: np.ndarray) -> None:
        for region, index, where in self.parts:
            elements = np.ascontiguousarray(values if where is None else values[where]).reshape(-1)
            region.elements(self.unit)[index] = elements.view(region.elements(self.unit).dtype)
        self.mark(WRITTEN)

    @property
    def places(self) -> np.ndarray:
        """Byte offsets of the elements in the shared memory of the batch."""
        return self.parts[0].index * self.unit if self.parts else np.zeros(0, np.int64)


def _chunks(address: int, size: int) -> np.ndarray:
    return np.uint64(address) + np.arange(0, size, _CHUNK, dtype=np.uint64)


# ---------------------------------------------------------------------------------------------------------------
# Into shared memory


def _await(
    threads,
    position: int,
    target: _Side,
    source: _Side,
    barrier: int,
    bytes: int,
    inside=None,
    filling=None,
    update=None,
) -> None:
    """Queue a copy that completes on an mbarrier; with an `_Update` it combines the source with the target.

    inside: mask of the elements that come from the source; the others get the bytes of `filling`. None: all do.
    """
    batch, lane = threads.batch, int(threads.lane[position])
    if update is None:
        target.mark(IN_FLIGHT)
        batch.guarded = True

    def land(barrier: int) -> None:
        values = source.read()
        if inside is not None:
            whole = np.broadcast_to(filling, (target.count, target.unit)).copy()
            whole[inside] = values
            values = whole
        target.write(values if update is None else update(target.read(), values))
        if batch.observer is not None:
            batch.observer.landed(np.full(target.count, lane), target.places, target.unit, barrier)

    barriers(batch).transfers.setdefault(barrier, deque()).append(Transfer(land, bytes))


def _flat(value, threads) -> list[int]:
    """An operand as a list with one Python number per thread."""
    return np.broadcast_to(np.asarray(value), len(threads.lane)).tolist()


def _check_chunks(position: int, *numbers: int) -> None:
    if any(number % _CHUNK for number in numbers):
        raise Fault("starts a bulk copy whose addresses and size are not all multiples of 16", position)


def _check_multicast(threads, mask) -> None:
    """Check that the mask of a multicast names block 0, the only block of the cluster."""
    wrong = np.broadcast_to(np.asarray(mask) != 1, len(threads.lane))
    if wrong.any():
        found = np.broadcast_to(mask, len(wrong))[int(np.argmax(wrong))]
        raise Fault(f"multicasts to the blocks 0x{int(found):x} of its cluster, which has one (0x1)", wrong)


def _load(space: str, multicast: bool = False, update: _Update | None = None):
    def load(threads, target, source, size, mbarrier, *options):
        if multicast:
            _check_multicast(threads, options[0])
        here = barriers(threads.batch)
        barrier = here.find(threads.executing, "shared", mbarrier)
        for position, (to, at, bytes, on) in enumerate(
            zip(_flat(target, threads), _flat(source, threads), _flat(size, threads), barrier.tolist())
        ):
            _check_chunks(position, to, at, bytes)
            if bytes:
                verb = READS_IN_BULK if space == "shared" else "reads"
                source_side = _Side(threads, position, space, _chunks(at, bytes), _CHUNK, verb)
                target_side = _Side(
                    threads, position, "shared", _chunks(to, bytes), _CHUNK, WRITES_IN_BULK, bool(update)
                )
                _await(threads, position, target_side, source_side, on, bytes, update=update)
        here.settle(np.unique(barrier))

    return load


# ---------------------------------------------------------------------------------------------------------------
# Out of shared memory


class _Store:
    """A copy out of shared memory: `read` reads the source, `write` writes the destination later."""

    def __init__(
        self,
        threads,
        position: int,
        group: int,
        source: _Side,
        target: _Side,
        inside=None,
        update: _Update | None = None,
    ):
        self.update = update
        self.lane, self.group = int(threads.lane[position]), group
        self.observer = threads.batch.observer
        self.source, self.target, self.inside = source, target, inside
        self.values: np.ndarray | None = None
        if update is None:  # not for reductions: several may update the same elements
            target.mark(IN_FLIGHT)
        if self.observer is not None:
            self.observer.lent(self.lane, source.places, source.unit)

    def read(self) -> None:
        if self.values is None:
            values = self.source.read()
            self.values = values if self.inside is None else values[self.inside]
            if self.observer is not None:
                self.observer.returned(self.lane, self.source.places, self.source.unit)

    def write(self) -> None:
        self.read()
        self.target.write(self.values if self.update is None else self.update(self.target.read(), self.values))


class _Stores:
    """The pending copies out of shared memory of a batch, and the number of groups that each thread committed."""

    def __init__(self, batch):
        self.batch = batch
        self.pending: list[_Store] = []
        self.committed = np.zeros(batch.lanes, np.int64)
        batch.on_exit(lambda lanes: self.finish(lanes, self.committed + 1))

    def finish(self, lanes: np.ndarray, limit: np.ndarray, read_only: bool = False) -> None:
        """Perform the copies of these threads whose group number is below `limit` of the thread; with `read_only`, read
        their sources only."""
        if not self.pending:
            return
        chosen = np.zeros(self.batch.lanes, bool)
        chosen[lanes] = True
        left = []
        for store in self.pending:
            due = chosen[store.lane] and store.group < limit[store.lane]
            if due:
                store.read() if read_only else store.write()
            if read_only or not due:
                left.append(store)
        self.pending = left


def _stores(batch) -> _Stores:
    if "stores" not in batch.state:
        batch.state["stores"] = _Stores(batch)
    return batch.state["stores"]


def _store(update: _Update | None = None):
    def store(threads, target, source, size, policy=None) -> None:
        stores = _stores(threads.batch)
        for position, (to, at, bytes) in enumerate(
            zip(_flat(target, threads), _flat(source, threads), _flat(size, threads))
        ):
            _check_chunks(position, to, at, bytes)
            if bytes:
                source_side = _Side(threads, position, "shared", _chunks(at, bytes), _CHUNK, "reads")
                verb = "updates" if update else "writes"
                target_side = _Side(threads, position, "global", _chunks(to, bytes), _CHUNK, verb, bool(update))
                group = int(stores.committed[threads.lane[position]])
                stores.pending.append(_Store(threads, position, group, source_side, target_side, update=update))

    return store


# ---------------------------------------------------------------------------------------------------------------
# Tensors


def _map(threads, position: int, address: int, rank: int, im2col: bool = False) -> TensorMap:
    """The tensor map at a generic address; a fault unless it has the rank and the mode of the instruction."""
    memory = threads.batch.memory
    allocation = memory.find(address)
    offset = address - allocation.base if allocation is not None else 0
    if allocation is None or offset + BYTES > allocation.limit or address % ALIGNMENT:
        raise Fault(
            f"uses a tensor map at 0x{address:x}: 128 bytes of memory at a multiple of {ALIGNMENT} are expected",
            position,
        )
    try:
        found = decode(allocation.data[offset : offset + BYTES].tobytes())
    except ArgumentError as error:
        raise Fault(f"uses a tensor map at 0x{address:x}: {error}", position) from None
    if found.rank != rank:
        raise Fault(f"copies {rank} dimensions with a tensor map of {found.rank}", position)
    if isinstance(found, Im2colMap) != im2col:
        raise Fault(f"copies by .{_mode(im2col)} with a tensor map for .{_mode(not im2col)}", position)
    return found


def _mode(im2col: bool) -> str:
    return "im2col" if im2col else "tile"


def _box(threads, position: int, map: TensorMap, shared: int, coordinates: list[int], offsets: Sequence[int] = ()):
    """(unit, shared addresses, global addresses, mask inside the tensor or None for all) of the box at these
    coordinates."""
    if shared % _BOX_ALIGNMENT:
        raise Fault(
            f"copies a box at 0x{shared:x} of shared memory, which is no multiple of {_BOX_ALIGNMENT}", position
        )
    if refusal := map.refusal(coordinates):
        raise Fault(f"copies a box that {refusal}", position)
    unit = map.unit
    remote, inside = map.locate(coordinates, unit, offsets)
    places = swizzled(shared + map.places(unit), map.swizzle).astype(np.uint64)
    return unit, places, remote, None if inside.all() else inside


def _tensor_update(operation: str, dtype: str, position: int) -> _Update:
    """The operation on elements of the type of a tensor map."""
    type = f"b{dtype[1:]}" if operation in ("and", "or", "xor") and dtype[0] in "us" else dtype
    if type not in _INTO_GLOBAL[operation] or dtype == "f64":
        raise Fault(f"reduces a box with .{operation}, which there is not for a tensor of {dtype}", position)
    return _Update(operation, type)


def _coordinates(vector, threads) -> list[list[int]]:
    return list(zip(*(_flat(each, threads) for each in vector)))


def _load_tensor(rank: int, multicast: bool, im2col: bool):
    def load(threads, target, map, coordinates, mbarrier, *options):
        offsets, *options = options if im2col else ((), *options)
        if multicast:
            _check_multicast(threads, options[0])
        here = barriers(threads.batch)
        barrier = here.find(threads.executing, "shared", mbarrier)
        corners = _coordinates(coordinates, threads)
        moves = _coordinates(offsets, threads) if im2col else [()] * len(corners)
        operands = zip(_flat(target, threads), _flat(map, threads), corners, moves, barrier.tolist())
        for position, (to, address, corner, move, on) in enumerate(operands):
            tensor = _map(threads, position, address, rank, im2col)
            unit, places, remote, inside = _box(threads, position, tensor, to, corner, move)
            source = _Side(threads, position, "global", remote if inside is None else remote[inside], unit, "reads")
            side = _Side(threads, position, "shared", places, unit, WRITES_IN_BULK)
            _await(threads, position, side, source, on, tensor.box_bytes, inside, tensor.filling(unit))
        here.settle(np.unique(barrier))

    return load


def _store_tensor(rank: int, operation: str = ""):
    def store(threads, map, coordinates, source, policy=None):
        stores = _stores(threads.batch)
        operands = zip(_flat(map, threads), _coordinates(coordinates, threads), _flat(source, threads))
        for position, (address, corner, at) in enumerate(operands):
            tensor = _map(threads, position, address, rank)
            update = _tensor_update(operation, tensor.dtype, position) if operation else None
            unit, places, remote, inside = _box(threads, position, tensor, at, corner)
            side = _Side(threads, position, "shared", places, unit, "reads")
            written, verb = remote if inside is None else remote[inside], "updates" if update else "writes"
            target = _Side(threads, position, "global", written, unit, verb, bool(update))
            group = int(stores.committed[threads.lane[position]])
            stores.pending.append(_Store(threads, position, group, side, target, inside, update))

    return store


# ---------------------------------------------------------------------------------------------------------------
# Instructions


def _without_hints(modifiers: tuple[str, ...], *hints: str) -> tuple[tuple[str, ...], set[str]]:
    """Return the modifiers that are no hints, and the hints among them."""
    return tuple(word for word in modifiers if word not in hints), {word for word in modifiers if word in hints}


def _nothing(*_) -> None:
    """A prefetch has no effect."""


@define("cp.async.bulk")
def cp_async_bulk(modifiers: tuple[str, ...]) -> Semantics:
    """cp.async.bulk.shared::cta.{global|shared::cta}.mbarrier::complete_tx::bytes [dst], [src], size, [mbar]{, policy}.

    cp.async.bulk.global.shared::cta.bulk_group [dst], [src], size{, policy}; cp.async.bulk.prefetch.L2.global [src],
    size.
    """
    words, hints = _without_hints(modifiers, "L2::cache_hint")
    policy = ", b64" if hints else ""
    for target in _SHARED:
        for source in ("global", "shared::cta"):
            if words == (target, source, _COMPLETES):
                space = source.partition(":")[0]
                return Blocking("", f"[shared], [{space}], u32, [shared]{policy}", _load(space))
    if words == ("shared::cluster", "global", _COMPLETES, _MULTICAST):
        return Blocking("", f"[shared], [global], u32, [shared], b16{policy}", _load("global", multicast=True))
    if words == ("global", "shared::cta", "bulk_group"):
        return Blocking("", f"[global], [shared], u32{policy}", _store())
    if words == ("prefetch", "L2", "global"):
        return Memory("", f"[global], u32{policy}", _nothing)
    raise Unsupported(
        f"expected cp.async.bulk.shared::cta.{{global|shared::cta}}.{_COMPLETES}, .global.shared::cta.bulk_group or "
        ".prefetch.L2.global"
    )


@define("cp.async.bulk.tensor")
def cp_async_bulk_tensor(modifiers: tuple[str, ...]) -> Semantics:
    """cp.async.bulk.tensor.{1d..5d}.shared::cta.global{.tile}.mbarrier::complete_tx::bytes [dst], [map, {c}], [mbar]{,
    policy}.

    cp.async.bulk.tensor.{3d..5d}.shared::cta.global.im2col.mbarrier::complete_tx::bytes [dst], [map, {c}], [mbar],
    {o}{, policy}; cp.async.bulk.tensor.{1d..5d}.global.shared::cta{.tile}.bulk_group [map, {c}], [src]{, policy}
    """
    words, hints = _without_hints(modifiers, "L2::cache_hint", "tile", "im2col")
    policy = ", b64" if "L2::cache_hint" in hints else ""
    rank, im2col = _rank(words[:1], hints), "im2col" in hints
    offsets = f", u16*{rank - 2}" if im2col else ""
    if words[1:] in [(target, "global", _COMPLETES) for target in _SHARED]:
        return Blocking(
            "", f"[shared], [generic], s32*{rank}, [shared]{offsets}{policy}", _load_tensor(rank, False, im2col)
        )
    if words[1:] == ("shared::cluster", "global", _COMPLETES, _MULTICAST):
        return Blocking(
            "", f"[shared], [generic], s32*{rank}, [shared]{offsets}, b16{policy}", _load_tensor(rank, True, im2col)
        )
    if words[1:] == ("global", "shared::cta", "bulk_group") and not im2col:
        return Blocking("", f"[generic], s32*{rank}, [shared]{policy}", _store_tensor(rank))
    raise Unsupported(
        f"expected .shared::cta.global{{.tile|.im2col}}.{_COMPLETES}, "
        f".shared::cluster.global{{.tile|.im2col}}.{_COMPLETES}{{.{_MULTICAST}}} "
        "or .global.shared::cta{.tile}.bulk_group"
    )


@define("cp.reduce.async.bulk")
def cp_reduce_async_bulk(modifiers: tuple[str, ...]) -> Semantics:
    """cp.reduce.async.bulk.global.shared::cta.bulk_group.op{.noftz}.type [dst], [src], size{, policy}.

    cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.op.type [dst], [src], size, [mbar]
    """
    words, hints = _without_hints(modifiers, "L2::cache_hint")
    known = {
        ("global", "shared::cta", "bulk_group"): _INTO_GLOBAL,
        ("shared::cluster", "shared::cta", _COMPLETES): _INTO_SHARED,
    }.get(words[:3])
    if known is not None:
        operation, type = words[3] if len(words) > 3 else "", words[-1]
        noftz = ("noftz",) if operation == "add" and type in ("f16", "bf16") else ()
        if type not in known.get(operation, ()) or words[4:-1] != noftz:
            forms = "; ".join(f".{name} of {', '.join(types)}" for name, types in known.items())
            raise Unsupported(f"expected one of {forms} (.add.noftz of f16 and bf16)")
        update = _Update(operation, type)
        if known is _INTO_GLOBAL:
            return Blocking("", "[global], [shared], u32" + (", b64" if hints else ""), _store(update))
        if not hints:
            return Blocking("", "[shared], [shared], u32, [shared]", _load("shared", update=update))
    raise Unsupported(
        f"expected .global.shared::cta.bulk_group.op.type or .shared::cluster.shared::cta.{_COMPLETES}.op.type"
    )


@define("cp.reduce.async.bulk.tensor")
def cp_reduce_async_bulk_tensor(modifiers: tuple[str, ...]) -> Semantics:
    """cp.reduce.async.bulk.tensor.{1d..5d}.global.shared::cta.op{.tile}.bulk_group [map, {c}], [src]{, policy}."""
    words, hints = _without_hints(modifiers, "L2::cache_hint", "tile")
    rank = _rank(words[:1])
    if (
        len(words) != 5
        or words[1:3] != ("global", "shared::cta")
        or words[3] not in _INTO_GLOBAL
        or words[4] != "bulk_group"
    ):
        raise Unsupported(f"expected .global.shared::cta.{{{'|'.join(_INTO_GLOBAL)}}}{{.tile}}.bulk_group")
    policy = ", b64" if "L2::cache_hint" in hints else ""
    return Blocking("", f"[generic], s32*{rank}, [shared]{policy}", _store_tensor(rank, words[3]))


def _rank(words: tuple[str, ...], hints: Collection[str] = ()) -> int:
    if "im2col" in hints and ("tile" in hints or words[:1] not in [("3d",), ("4d",), ("5d",)]):
        raise Unsupported("expected .tile, or .im2col of .3d to .5d")
    if not words or words[0] not in ("1d", "2d", "3d", "4d", "5d"):
        raise Unsupported("expected .1d to .5d")
    return int(words[0][0])


@define("cp.async.bulk.prefetch.tensor")
def prefetch_tensor(modifiers: tuple[str, ...]) -> Semantics:
    """cp.async.bulk.prefetch.tensor.{1d..5d}.L2.global{.tile|.im2col} [map, {c}]{, {o}}{, policy}: no effect."""
    words, hints = _without_hints(modifiers, "L2::cache_hint", "tile", "im2col")
    rank = _rank(words[:1], hints)
    if words[1:] != ("L2", "global"):
        raise Unsupported("expected .L2.global{.tile|.im2col}")
    offsets = f", u16*{rank - 2}" if "im2col" in hints else ""
    return Memory("", f"[generic], s32*{rank}{offsets}" + (", b64" if "L2::cache_hint" in hints else ""), _nothing)


@define("cp.async.bulk.commit_group")
def commit_group(modifiers: tuple[str, ...]) -> Semantics:
    """Make the copies out of shared memory issued since the last commit a group of this thread."""
    if modifiers:
        raise Unsupported("expected no modifiers")

    def commit(memory) -> None:
        _stores(memory.batch).committed[memory.lane_ids] += 1

    return Memory("", "", commit)


@define("cp.async.bulk.wait_group")
def wait_group(modifiers: tuple[str, ...]) -> Semantics:
    """cp.async.bulk.wait_group{.read} N: perform all but the latest N groups of this thread, with .read their reads."""
    if modifiers not in ((), ("read",)):
        raise Unsupported("expected .read or no modifier")

    def wait(memory, groups: int) -> None:
        stores = _stores(memory.batch)
        stores.finish(memory.lane_ids, stores.committed - groups, read_only=bool(modifiers))

    return Memory("", "imm", wait)


@define("tensormap.replace")
def tensormap_replace(modifiers: tuple[str, ...]) -> Semantics:
    """tensormap.replace: refused, because maps have the format of tensor_map.py, not that of a GPU."""
    raise Unsupported(
        "tensor maps are not changed by kernels here; encode one for each shape (ptxrt.emulator.tensor_map) and pass it"
    )
