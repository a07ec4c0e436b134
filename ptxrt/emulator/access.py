"""Loads, stores, atomics and address conversions: ld, ldu, st, atom, red, cvta, isspacep, createpolicy.

Cache hints, eviction priorities and memory orders have no effect on values, because memory is always in order. (Memory
orders count for the race checks.) memory.py checks bounds, alignment and uninitialized reads.

Source: PTX ISA 9.0, sections 9.7.9 (data movement) and 9.7.13.13 (atom), 9.7.13.14 (red).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from .alu import bf16_add, bf16x2_add, f16_add, f16x2_add
from .floats import float_extreme, flushed, small_function
from .instruction import DTYPES, Lanes, Memory, Semantics, Unsupported, define
from .memory import ELEMENTS, LOCAL_WINDOW, SHARED_WINDOW, WINDOWS_END, Access

_WORDS = {  # modifiers of ld and st without effect on values
    "weak", "relaxed", "acquire", "release", "volatile", "mmio", "cta", "cluster", "gpu", "sys",
    "ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc",
    "L1::evict_normal", "L1::evict_unchanged", "L1::evict_first", "L1::evict_last", "L1::no_allocate",
    "L2::evict_normal",
    "L2::evict_first", "L2::evict_last", "L2::64B", "L2::128B", "L2::256B", "unified",
}  # fmt: skip
_SPACES = {
    "global": "global", "shared": "shared", "shared::cta": "shared", "shared::cluster": "shared", "local": "local",
    "const": "const", "param": "param",
    "param::entry": "param", "param::func": "param",
}  # fmt: skip
_TYPES = {f"{kind}{bits}" for kind in "bus" for bits in (8, 16, 32, 64)} | {
    "f32",
    "f64",
    "f16",
    "f16x2",
    "bf16",
    "bf16x2",
}


#: Modifiers with which a load or store may order the accesses of different blocks.
_STRONG = {"volatile", "relaxed", "acquire", "release", "mmio"}


def _read_modifiers(modifiers: tuple[str, ...], extra: frozenset[str] = frozenset()) -> tuple[str, int, str, bool]:
    """(space, vector length, type, whether there is a cache policy operand) of a load or store."""
    space, lanes, type, policy = "generic", 1, "", False
    for word in modifiers:
        if word in _SPACES:
            space = _SPACES[word]
        elif word in ("v2", "v4", "v8"):
            lanes = int(word[1])
        elif word in _TYPES:
            type = word
        elif word == "L2::cache_hint":
            policy = True
        elif word not in _WORDS and word not in extra:
            raise Unsupported(f"the modifier .{word} is not known")
    if not type:
        raise Unsupported("no type that is known")
    size = DTYPES[type].itemsize * lanes
    if size > 32 or (size == 32 and space not in ("global", "generic")):
        raise Unsupported(f"an access of {size} bytes in the space '{space}'")
    return space, lanes, type, policy


def _bits(type: str) -> str:
    """The type of a memory access: signed types are kept, since they sign-extend; all others are raw bits."""
    return type if type[0] == "s" else f"b{8 * DTYPES[type].itemsize}"


@cache
def _load(space: str, lanes: int, type: str, used: int | None = None, strong: bool = False) -> Callable:
    """A function that loads `lanes` elements per thread. Bit i of `used`: byte i is used; None: all bytes are."""
    element = DTYPES[type]
    size = element.itemsize * lanes
    where = "generic" if space in ("const", "param") else space
    if used is not None:
        used &= (1 << size) - 1

    def load(memory: Access, address: np.ndarray, policy=None):
        found = memory.gather(where, address, size, used=used, strong=strong)
        if lanes == 1:
            return found.view(element)
        return tuple(np.ascontiguousarray(found.view(element).reshape(-1, lanes).T))

    return load


@define("ld")
def ld(modifiers: tuple[str, ...]) -> Semantics:
    """ld{.order}{.scope}{.space}{.nc}{.cache}{.vec}.type d, [a]{, policy}."""
    space, lanes, type, policy = _read_modifiers(modifiers)
    constant = None
    if space in ("param", "const"):
        constant = _constant_load(lanes, _bits(type))
    operand = "generic" if space in ("const", "param") else space
    count = f"*{lanes}" if lanes > 1 else ""

    def using(used: int | None) -> Semantics:
        function = _load(space, lanes, _bits(type), used, not _STRONG.isdisjoint(modifiers))
        return Memory(
            _bits(type) + count, f"[{operand}]" + (", b64" if policy else ""), function, constant=constant, using=using
        )

    return using(None)


@define("ldu")
def ldu(modifiers: tuple[str, ...]) -> Semantics:
    """ldu{.space}{.vec}.type: the same as ld."""
    return ld(modifiers)


@cache
def _constant_load(lanes: int, type: str) -> Callable:
    element = DTYPES[type]

    def load(launch, name: str, offset: int) -> tuple:
        raw = launch.read_constant(launch.address_of(name) + offset, element.itemsize * lanes)
        return tuple(np.frombuffer(raw, element).reshape(lanes, 1))

    return load


@cache
def _store(space: str, lanes: int, type: str, strong: bool = False) -> Callable:
    element = DTYPES[type]
    size = element.itemsize * lanes

    def store(memory: Access, address: np.ndarray, value, policy=None) -> None:
        if lanes > 1:
            packed = np.empty((len(address), lanes), element)
            for position, part in enumerate(value):
                packed[:, position] = part
            value = packed.reshape(-1).view(ELEMENTS[size])
        elif value.ndim:
            value = np.ascontiguousarray(value).view(ELEMENTS[size])
        memory.scatter(space, address, value, size, strong=strong)

    return store


@define("st")
def st(modifiers: tuple[str, ...]) -> Semantics:
    """st{.order}{.scope}{.space}{.cache}{.vec}.type [a], b{, policy}."""
    space, lanes, type, policy = _read_modifiers(modifiers)
    if space == "const":
        raise Unsupported("constant memory is not written")
    bits = f"b{8 * DTYPES[type].itemsize}"
    operand = "generic" if space == "param" else space
    count = f"*{lanes}" if lanes > 1 else ""
    return Memory(
        "",
        f"[{operand}], {bits}{count}" + (", b64" if policy else ""),
        _store(operand, lanes, bits, not _STRONG.isdisjoint(modifiers)),
    )


# ---------------------------------------------------------------------------------------------------------------
# Address conversions


_WINDOWS = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW}


@define("cvta")
def cvta(modifiers: tuple[str, ...]) -> Semantics:
    """cvta{.to}.space.size: from an address in a space to its generic address, or with .to the reverse."""
    to = modifiers[:1] == ("to",)
    words = modifiers[1:] if to else modifiers
    if len(words) != 2 or words[0] not in _SPACES or words[1] not in ("u64", "u32"):
        raise Unsupported("expected cvta{.to}.space.u64")
    window = _WINDOWS.get(_SPACES[words[0]], 0)
    if words[1] == "u32":
        raise Unsupported("generic addresses of 32 bits")
    offset = np.array(window, np.uint64)

    def convert(address, out=None):
        if not window:
            return np.add(address, offset, out=out)
        return np.subtract(address, offset, out=out) if to else np.add(address, offset, out=out)

    return Lanes("u64", "u64", convert, out=True)


@define("isspacep")
def isspacep(modifiers: tuple[str, ...]) -> Semantics:
    """isspacep.space p, a: whether a generic address lies in a space. Parameters lie in global memory, too."""
    if len(modifiers) != 1 or modifiers[0] not in _SPACES:
        raise Unsupported("expected isspacep.space")
    space = _SPACES[modifiers[0]]
    if space in _WINDOWS:
        low = np.uint64(_WINDOWS[space])
        return Lanes(
            "pred", "u64", lambda address: (address >= low) & (address < low + np.uint64(1 << 32)), scalars=True
        )

    def test(memory: Access, address: np.ndarray) -> np.ndarray:
        parameters = memory.batch.launch.emulator.param_address
        wanted = "param" if space == "param" else "const"
        outside = (address < np.uint64(SHARED_WINDOW)) | (address >= np.uint64(WINDOWS_END))
        found = np.zeros(len(address), bool)
        for each in memory.batch.memory.allocations:
            if each.read_only and wanted == ("param" if each.base == parameters else "const"):
                found |= (address >= np.uint64(each.base)) & (address < np.uint64(each.base + each.limit))
        return outside & ~found if space == "global" else found

    return Memory("pred", "u64", test)


# ---------------------------------------------------------------------------------------------------------------
# Atomics

_ATOMIC_WORDS = {"relaxed", "acquire", "release", "acq_rel", "cta", "gpu", "sys", "cluster", "noftz", "L2::cache_hint"}


def _inc(old, limit):
    return np.where(old >= limit, old.dtype.type(0), old + old.dtype.type(1))


def _dec(old, limit):
    return np.where((old == 0) | (old > limit), limit, old - old.dtype.type(1))


def _exchange(old, new):
    return new


_OPERATIONS: dict[str, tuple[Callable, frozenset[str]]] = {
    "add": (np.add, frozenset({"u32", "s32", "u64", "s64", "f32", "f64", "f16", "f16x2", "bf16", "bf16x2"})),
    "min": (np.minimum, frozenset({"u32", "s32", "u64", "s64"})),
    "max": (np.maximum, frozenset({"u32", "s32", "u64", "s64"})),
    "and": (np.bitwise_and, frozenset({"b32", "b64"})),
    "or": (np.bitwise_or, frozenset({"b32", "b64"})),
    "xor": (np.bitwise_xor, frozenset({"b32", "b64"})),
    "exch": (_exchange, frozenset({"b32", "b64"})),
    "inc": (_inc, frozenset({"u32"})),
    "dec": (_dec, frozenset({"u32"})),
}
_PACKED_ADD = {"f16": f16_add, "bf16": bf16_add, "f16x2": f16x2_add, "bf16x2": bf16x2_add}
#: Lengths and operations of vector atomics by type.
_VECTORS: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "f32": ((2, 4), ("add",)),
    **dict.fromkeys(("f16", "bf16"), ((2, 4, 8), ("add", "min", "max"))),
    **dict.fromkeys(("f16x2", "bf16x2"), ((2, 4), ("add", "min", "max"))),
}


def _compare_and_swap(old, compare, new):
    return np.where(old == compare, new, old)


def _flushing_add(old, new):
    """add.f32 in global memory: subnormal operands and results are flushed to zero."""
    return flushed(np.add(flushed(old), flushed(new)))


def combination(operation: str, type: str) -> tuple[np.dtype, Callable]:
    """(dtype of the elements, function (old, new) -> updated) of an atomic operation."""
    size = DTYPES[type].itemsize
    kind = "i" if type[0] == "s" else "f" if type in ("f32", "f64") else "u"
    apply = _compare_and_swap if operation == "cas" else _OPERATIONS[operation][0]
    if "f16" in type:
        apply = _PACKED_ADD[type] if operation == "add" else small_function(type, float_extreme(operation))
    return np.dtype(f"{kind}{size}"), apply


def _ordered(elements: np.ndarray, index: np.ndarray, apply: Callable, value: np.ndarray, wants_old: bool):
    """Apply a read-modify-write in thread order; returns the old value of each thread, (n,).

    Threads with the same address take turns: each round updates every address at most once.
    """
    old = np.empty(len(index), elements.dtype)
    order = np.argsort(index, kind="stable")
    grouped = index[order]
    starts = np.flatnonzero(np.r_[True, grouped[1:] != grouped[:-1]])
    lengths = np.diff(np.r_[starts, len(grouped)])
    by_length = np.argsort(-lengths, kind="stable")
    starts, lengths = starts[by_length], lengths[by_length]
    for turn in range(int(lengths[0]) if len(lengths) else 0):
        now = order[starts[: int(np.searchsorted(-lengths, -turn, side="left"))] + turn]
        found = elements[index[now]]
        old[now] = found
        elements[index[now]] = apply(found, *(part[now] for part in value))
    return old


def _prefix_add(elements: np.ndarray, index: np.ndarray, value: np.ndarray) -> np.ndarray:
    """atom.add of integers: old values as running sums per address; returns them, (n,)."""
    order = np.argsort(index, kind="stable")
    grouped, sums = index[order], np.cumsum(value[order], dtype=value.dtype)
    first = np.r_[True, grouped[1:] != grouped[:-1]]
    starts = np.flatnonzero(first)
    before = sums - value[order]
    base = np.repeat(before[starts], np.diff(np.r_[starts, len(grouped)]))
    old = np.empty_like(value)
    old[order] = elements[grouped] + (before - base)
    np.add.at(elements, index, value)
    return old


def _atomic(name: str, modifiers: tuple[str, ...]) -> Semantics:
    space, operation, type, lanes, policy = "generic", "", "", 1, False
    for word in modifiers:
        if word in ("v2", "v4", "v8"):
            lanes = int(word[1])
        elif word in ("global", "shared", "shared::cta", "shared::cluster"):
            space = _SPACES[word]
        elif word in _OPERATIONS or word == "cas":
            operation = word
        elif word in _TYPES:
            type = word
        elif word in _ATOMIC_WORDS:
            policy = policy or word == "L2::cache_hint"
        else:
            raise Unsupported(f"the modifier .{word} is not known")
    if lanes > 1:
        lengths, operations = _VECTORS.get(type, ((), ()))
        if lanes not in lengths or operation not in operations or space == "shared":
            raise Unsupported(
                f"{operation} on .v{lanes}.{type} in {space} memory; in global memory there is .add on "
                ".v2 and .v4 of .f32, "
                "and .add, .min and .max on .v2 and .v4 of .f16x2 and .bf16x2 and on .v2, .v4 and .v8 of .f16 and .bf16"
            )
    elif operation == "cas":
        if name == "red" or type not in ("b16", "b32", "b64"):
            raise Unsupported(f"{name}.cas.{type}")
    elif operation == "exch" and name == "red":
        raise Unsupported("red has no exch")
    elif operation not in _OPERATIONS or type not in _OPERATIONS[operation][1]:
        raise Unsupported(f"{operation or 'no operation'} on {type or 'no type'}")
    bits = 8 * DTYPES[type].itemsize
    wants_old = name == "atom"

    dtype, apply = combination(operation, type)
    integer_add = operation == "add" and type[0] in "us"

    def run(memory: Access, address: np.ndarray, *values):
        values = [np.broadcast_to(value, len(address)).view(dtype) for value in values if value is not None][
            : 2 if operation == "cas" else 1
        ]
        result = np.empty(len(address), dtype)
        size = bits // 8
        if space != "shared":
            memory.batch.synchronizes(memory.lane_ids)
        for region, index, where in memory.locate(space, address, size, None, "updates"):
            memory._check_readable(region, index, size, space, address, where)
            elements = region.elements(size).view(dtype)
            here = [value if where is None else value[where] for value in values]
            batch = memory.batch
            if integer_add:
                batch.changes += bool(here[0].any())
            else:
                before = elements[index]
            if integer_add and not wants_old:
                np.add.at(elements, index, here[0])
                continue
            if integer_add:
                found = _prefix_add(elements, index, here[0])
            else:
                flushes = apply is np.add and type == "f32" and region is not memory.batch.shared
                found = _ordered(elements, index, _flushing_add if flushes else apply, here, wants_old)
                batch.changes += bool((elements[index] != before).any())
            if where is None:
                result = found
            else:
                result[where] = found
        return result.view(f"u{size}") if wants_old else None

    def run_vector(memory: Access, address: np.ndarray, values: tuple, policy=None):
        # Each element is updated separately, but the address must be aligned to the size of the vector.
        memory.locate("global", address, bits // 8 * lanes, None, "updates")
        olds = [run(memory, address + np.uint64(bits // 8 * lane), value) for lane, value in enumerate(values)]
        return tuple(olds) if wants_old else None

    count = f"*{lanes}" if lanes > 1 else ""
    operands = f"[{space}], b{bits}{count}" + (f", b{bits}" if operation == "cas" else "") + (", b64" if policy else "")
    return Memory(f"b{bits}{count}" if wants_old else "", operands, run_vector if count else run)


@define("atom")
def atom(modifiers: tuple[str, ...]) -> Semantics:
    """atom{.sem}{.scope}{.space}.op{.vec}.type d, [a], b{, c}: threads that run together update in thread order."""
    return _atomic("atom", modifiers)


@define("red")
def red(modifiers: tuple[str, ...]) -> Semantics:
    """red{.sem}{.scope}{.space}.op{.vec}.type [a], b."""
    if modifiers[:1] == ("async",):
        raise Unsupported("red.async")
    return _atomic("red", modifiers)


@define("createpolicy")
def createpolicy(modifiers: tuple[str, ...]) -> Semantics:
    """createpolicy.fractional: a cache policy; it has no effect, and its value is 0."""
    if modifiers[:1] != ("fractional",):
        raise Unsupported("expected .fractional")
    return Lanes("b64", "f32?", lambda fraction=None: np.zeros((), np.uint64), scalars=True)
