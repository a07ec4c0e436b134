"""How instructions are defined: operand types, NumPy functions, and a registry of instructions by mnemonic.

A family module (`cvt.py`, `mma.py`, ...; see `FAMILIES`) registers a *resolver* per mnemonic. The resolver receives
the modifiers (the dotted words after the registered name) and returns a `Semantics`: the operand types and the
function of the instruction. It raises `Unsupported` for modifiers that are not implemented; the loader then refuses
the entry. `resolve` caches the result per dotted opcode.

    @define("ex2")
    def ex2(modifiers):
        '''ex2.approx{.ftz}.f32: 2 ** a.'''
        if modifiers not in {("approx", "f32"), ("approx", "ftz", "f32")}:
            raise Unsupported("expected ex2.approx{.ftz}.f32")
        return Lanes("f32", "f32", np.exp2)

    @define("shfl.sync")
    def shfl_sync(modifiers):
        '''shfl.sync.mode.b32 d|p, a, b, c, membermask.'''
        return Warps("b32|pred?", "b32, b32, b32, b32", SHUFFLES[modifiers], mask=3)

Operand types
    A signature is a comma separated list in the order of the PTX text: destinations, then sources.

    f32 u8 s64 pred ...   one register, immediate or special register, as arrays of `DTYPES[type]`: signed and
                          unsigned integers, np.float32, np.float64, np.float16 for f16, bool for pred. Packed and
                          foreign formats (bf16, f16x2, bf16x2, e2m1x2, tf32, b32, ...) are unsigned raw bits.
    f32*4                 a vector operand {a, b, c, d}: a tuple of four arrays
    b32|pred              two destinations written d|p
    [shared] [global] [generic] [local]   an address operand: byte addresses in that space, displacement included:
                          uint64, or uint32 where the text has a 32-bit register for shared or local memory
    imm                   an immediate: a Python int
    any of these with `?` optional: an absent source is None (if operands are missing, the last optional sources are
                          absent); the result for an absent destination, also `_`, is dropped, so the function always
                          returns it. A predicate may replace an optional integer source; it is an array of bool.

    Registers may be wider than the type (`cvt.u32.u8 %r1, %r2`): generated code truncates sources and sign- or
    zero-extends results, as the type demands. Immediates are 0-d arrays of the type and broadcast. Functions must not
    write into their arguments.

What a function returns
    One array (or scalar) per destination register, in the dtype of its type: the array itself for a single
    destination, one flat tuple for several (a destination `f32*4` is four of them). 0-d and (1,) results are
    broadcast.

Kinds
    Lanes      function(*sources) on arrays of shape (n,): any n, any mix of threads. Pure.
    Warps      function(*sources) on arrays of shape (warps, 32), lanes of a warp in the last axis. With
               `aligned=True` (mma, ldmatrix) fewer than 32 executing lanes are a fault. With `mask=i` source i is the
               membermask: calls.py checks that it names each executing lane and no lane that is elsewhere, and
               calls the function with `active=`, a (warps, 32) bool array, or None if all lanes execute. Results of
               inactive lanes are dropped; their inputs are unspecified.
    Memory     function(memory, *sources) for instructions that read or write memory (see `Access` in memory.py), on
               (n,) arrays, or on (warps, 32) with `warps=True`.
    Blocking   function(threads, *sources) for instructions whose threads may have to wait (bar, barrier, mbarrier
               waits), on (n,) arrays; see `Threads` in calls.py. It ends a basic block.

A `function` may be a dict {"float64": f, "hardware": g}; the emulator's `arithmetic` selects one.

`prepare` (Warps) is a sequence with one entry per source: a pure function of that operand, or None. Its result
replaces the operand. The code generator reuses it within a basic block while the operand's registers are unchanged:
a fragment that enters sixteen MMAs is decoded once.

Faults: raise `Fault(message, where)`; `where` marks the threads at fault: a bool array of the shape of the sources,
or the position of one thread. machine.py adds kernel, block, thread, PTX line and source line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import import_module
from typing import Union

import numpy as np

from ..errors import Unsupported

Function = Union[Callable, Mapping[str, Callable]]


class Fault(Exception):
    """An error that an instruction finds; machine.py turns it into an `EmulatorFault` that names the place.

    `where` is a bool array over the executing threads, the position of one of them, or None (the first).
    """

    def __init__(self, message: str, where=None):
        super().__init__(message)
        self.message = message
        self.where = where
        self.lane_ids = None  # ids of the threads that `where` indexes; None: the executing threads


_INTEGER_BITS = (8, 16, 32, 64)

#: The NumPy dtype in which a function receives and returns each operand type.
DTYPES: dict[str, np.dtype] = {
    "pred": np.dtype(bool),
    "f16": np.dtype(np.float16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    **{f"s{bits}": np.dtype(f"i{bits // 8}") for bits in _INTEGER_BITS},
    **{f"{kind}{bits}": np.dtype(f"u{bits // 8}") for kind in "ub" for bits in _INTEGER_BITS},
    **dict.fromkeys(("bf16", "e4m3x2", "e5m2x2", "ue8m0x2", "e2m1x4"), np.dtype(np.uint16)),
    **dict.fromkeys(("e2m1x2", "e2m3", "e3m2"), np.dtype(np.uint8)),
    **dict.fromkeys(("e2m3x2", "e3m2x2"), np.dtype(np.uint16)),
    **dict.fromkeys(("f16x2", "bf16x2", "tf32", "e4m3x4", "e5m2x4", "e2m3x4", "e3m2x4"), np.dtype(np.uint32)),
    **dict.fromkeys(("f32x2",), np.dtype(np.uint64)),
}

SPACES = ("shared", "global", "generic", "local", "const", "param")


@dataclass(frozen=True)
class Operand:
    """One operand of a signature: its type, its number of registers, and its form in the text."""

    type: str
    count: int = 0  # 0: a plain operand; n: a vector of n registers
    optional: bool = False
    joined: bool = False  # a second destination, written after `|`

    @cached_property
    def is_address(self) -> bool:
        return self.type in SPACES

    @cached_property
    def is_immediate(self) -> bool:
        return self.type == "imm"

    @cached_property
    def dtype(self) -> np.dtype:
        return np.dtype(np.uint64) if self.is_address else DTYPES[self.type]

    @cached_property
    def kind(self) -> str:
        """The dtype in short: `u4`, `i8`, `f4`, `b1`."""
        return self.dtype.str[1:]


_OPERAND = re.compile(r"(\[(?P<space>\w+)\]|(?P<type>\w+))(\*(?P<count>\d+))?(?P<optional>\?)?")


@cache
def signature(text: str) -> tuple[Operand, ...]:
    """Parse a signature such as `"b32|pred?, f32*4, [shared]"`; raises ValueError for unknown operand types."""
    operands = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        for position, piece in enumerate(part.split("|")):
            match = _OPERAND.fullmatch(piece.strip())
            known = match and (
                match["space"] in SPACES if match["space"] else match["type"] in DTYPES or match["type"] == "imm"
            )
            if not known:
                raise ValueError(f"'{piece}' in the signature '{text}' is no operand type")
            operands.append(
                Operand(
                    match["space"] or match["type"], int(match["count"] or 0), bool(match["optional"]), position > 0
                )
            )
    return tuple(operands)


@dataclass(frozen=True)
class Semantics:
    """The definition of one dotted opcode: operand types and a function. Made by `Lanes`, `Warps`, `Memory`,
    `Blocking`."""

    kind: str
    destinations: tuple[Operand, ...]
    sources: tuple[Operand, ...]
    function: Function
    options: Mapping[str, object] = field(default_factory=dict, hash=False, compare=False)

    @cached_property
    def plain(self) -> bool:
        """Whether every operand is a single value: no vector, address, immediate, pair or optional operand."""
        operands = self.destinations + self.sources
        return not any(o.count or o.optional or o.joined or o.is_address or o.is_immediate for o in operands)

    @cached_property
    def one_form(self) -> bool:
        """Whether the operands alone, as they are written, decide how the instruction is decoded."""
        return not any(self.options.get(name) for name in ("single", "using", "carry_out", "carry_in"))

    @cached_property
    def result_types(self) -> list[str]:
        """The type of every destination register; a vector has one entry per element."""
        return [operand.type for operand in self.destinations for _ in range(max(operand.count, 1))]

    def bound(self, arithmetic: str) -> Callable:
        """The function for this arithmetic (`"float64"` or `"hardware"`)."""
        return self.function[arithmetic] if isinstance(self.function, Mapping) else self.function

    def option(self, name: str, default=None):
        return self.options.get(name, default)


def Lanes(
    destinations: str,
    sources: str,
    function: Function,
    *,
    out: bool = False,
    scalars: bool = False,
    loose_nan: bool = False,
    copies: bool = False,
) -> Semantics:
    """A pure instruction on single threads.

    out: the function is a ufunc or takes `out=` like one. scalars (implied by `out`): sources may be 0-d arrays;
    otherwise only immediates are 0-d. loose_nan: float results may hold any NaN; the code generator makes them
    canonical where their bits become visible. copies: results are bits of the sources.
    """
    options = {"out": out, "scalars": scalars or out, "loose_nan": loose_nan, "copies": copies}
    return Semantics("lanes", signature(destinations), signature(sources), function, options)


def Warps(
    destinations: str,
    sources: str,
    function: Function,
    *,
    aligned: bool = False,
    mask: int | None = None,
    prepare: Sequence[Callable | None] | None = None,
    orders: bool = False,
) -> Semantics:
    """A pure instruction that a warp executes together, on arrays of shape (warps, 32).

    orders: it is a barrier: earlier accesses of the threads of the membermask happen before their later ones.
    """
    options = {"aligned": aligned, "mask": mask, "prepare": prepare, "orders": orders}
    return Semantics("warps", signature(destinations), signature(sources), function, options)


def Memory(
    destinations: str,
    sources: str,
    function: Function,
    *,
    warps: bool = False,
    aligned: bool = False,
    constant: Callable | None = None,
    using: Callable[[int], Semantics] | None = None,
) -> Semantics:
    """An instruction that reads or writes memory: function(memory, *sources).

    constant: for loads of parameters and constants; constant(launch, name, offset) reads a named variable and returns
    the tuple of results, once per launch. using: using(mask) returns the semantics of a load of which only some bytes
    are used; bit i of the mask stands for byte i.
    """
    options = {"warps": warps, "aligned": aligned, "constant": constant, "using": using}
    return Semantics("memory", signature(destinations), signature(sources), function, options)


def Blocking(destinations: str, sources: str, function: Function, *, aligned: bool = False) -> Semantics:
    """An instruction whose threads may have to wait: function(threads, *sources); it ends a basic block."""
    return Semantics("blocking", signature(destinations), signature(sources), function, {"aligned": aligned})


def distinct(numbers: np.ndarray) -> np.ndarray:
    """The distinct values of small integers from 0 up, ascending. Faster than np.unique, which sorts or hashes."""
    return np.flatnonzero(np.bincount(numbers))


Resolver = Callable[[tuple[str, ...]], Semantics]
REGISTRY: dict[str, Resolver] = {}

#: The modules that define instructions, in the order in which they are read.
FAMILIES = (
    "alu",
    "video",
    "control",
    "access",
    "mma",
    "ldmatrix",
    "cp_async",
    "cvt",
    "math",
    "warp",
    "barrier",
    "mbarrier",
    "bulk",
    "cluster",
    "registers",
    "system",
)


def define(*names: str) -> Callable[[Resolver], Resolver]:
    """Register a resolver under dotted names (`"ex2"`, `"shfl.sync"`, `"cp.async"`); `resolve` takes the longest
    match."""

    def register(resolver: Resolver) -> Resolver:
        for name in names:
            if name in REGISTRY:
                raise ValueError(f"{name} is defined twice: {REGISTRY[name].__module__} and {resolver.__module__}")
            REGISTRY[name] = resolver
        return resolver

    return register


def load_families() -> None:
    """Import every family; each registers its instructions."""
    for family in FAMILIES:
        import_module(f"{__package__}.{family}")


@cache
def resolve(opcode: str) -> Semantics:
    """The semantics of a dotted opcode such as `add.rn.f32`; raises `Unsupported` with the reason."""
    load_families()
    words = opcode.split(".")
    for length in range(len(words), 0, -1):
        resolver = REGISTRY.get(".".join(words[:length]))
        if resolver is not None:
            try:
                return resolver(tuple(words[length:]))
            except Unsupported as error:
                raise Unsupported(f"{opcode} is not implemented: {error}") from None
            except (ArithmeticError, LookupError, TypeError, ValueError):  # a resolver met modifiers it cannot read
                raise Unsupported(
                    f"{opcode} is not implemented: '{'.'.join(words[length:])}' is not understood"
                ) from None
    related = sorted(name for name in REGISTRY if name.split(".")[0] == words[0])
    reason = f"there is {', '.join(related)}" if related else f"no instruction is called '{words[0]}'"
    raise Unsupported(f"{opcode} is not implemented: {reason}")
