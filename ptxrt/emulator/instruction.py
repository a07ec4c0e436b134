"""How an instruction is defined: operand types, a pure NumPy function, and a registry by mnemonic.

A family module (`cvt.py`, `mma.py`, ...) registers a *resolver* per mnemonic. The resolver receives the
modifiers, the dotted words after the registered name, and returns what the instruction means; it raises
`Unsupported` for what is not implemented, which refuses a module when it is loaded. Nothing is resolved
twice: one dotted opcode has one meaning, however often it stands in a text.

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
    any of these with `?` optional: an absent source arrives as None (the first optional ones are present as far as
                          the number of operands goes); an absent destination, also `_`, is dropped, so the function
                          always returns it. A predicate may stand for an optional integer source, and arrives as bool.

    Registers may be wider than the type (`cvt.u32.u8 %r1, %r2`): the machine truncates sources, and extends
    destinations by sign or zero as the type says. Immediates arrive as 0-d arrays of the type: let
    broadcasting do its work. Arrays are read-only by convention: never write into an argument.

What a function returns
    An array (or scalar) per destination register in the dtype of its type: a single destination returns the
    array itself, several return one flat tuple (a destination `f32*4` is four of them). A 0-d or (1,) result
    is broadcast.

Kinds
    Lanes      function(*sources) on arrays of shape (n,): any n, any mix of threads. Pure.
    Warps      function(*sources) on arrays of shape (warps, 32), lanes of a warp in the last axis. All 32
               lanes execute; `aligned=True` (mma, ldmatrix) makes anything less a fault. With `mask=i` source i is the
               membermask: the machine checks that it names the executing lanes and nobody who is elsewhere, and
               the function is called with `active=` a (warps, 32) bool array (or None when every lane is there);
               results of inactive lanes are dropped, their inputs are unspecified.
    Memory     a `memory=` first argument (see `Access` in memory.py) for what reads or writes memory:
               function(memory, *sources), on (n,) arrays, or (warps, 32) with `warps=True`.
    Blocking   function(threads, *sources): what may have to wait (bar, barrier, mbarrier waits). It ends a basic
               block; see `Threads` in calls.py. Sources are (n,) arrays.

A `function` may be a dict {"float64": f, "hardware": g}: the emulator's `arithmetic` picks.

`prepare` (Warps) names, per source operand, a pure function applied to that operand alone first, or None. Its
result replaces the operand. The code generator keeps it while the operand's registers stay unchanged within a
basic block: a fragment that enters sixteen MMAs is decoded once.

Faults: raise `Fault(message, where)`; `where` is a bool array shaped as the sources (or the position of a thread in
it) that says who is at fault. The machine adds kernel, block, thread, PTX line and source line.
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
    """What an instruction found wrong; the machine turns it into an `EmulatorFault` that names the place.

    `where` is a bool array over the executing threads, the position of one of them, or None (the first).
    """

    def __init__(self, message: str, where=None):
        super().__init__(message)
        self.message = message
        self.where = where
        self.lane_ids = None  # set where `where` does not count the executing threads


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
    """One operand of a signature: its type, how many registers, and how it stands in the text."""

    type: str
    count: int = 0  # 0: a plain operand; n: a vector of n registers
    optional: bool = False
    joined: bool = False  # written after `|` behind the operand before it

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
    """Read `"b32|pred?, f32*4, [shared]"` into operands; raises ValueError for what it is not."""
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
    """What one dotted opcode means: operand types and a function. Made by `Lanes`, `Warps`, `Memory`, `Blocking`."""

    kind: str
    destinations: tuple[Operand, ...]
    sources: tuple[Operand, ...]
    function: Function
    options: Mapping[str, object] = field(default_factory=dict, hash=False, compare=False)

    @cached_property
    def plain(self) -> bool:
        """Whether every operand is one register or the like, none of them optional."""
        operands = self.destinations + self.sources
        return not any(o.count or o.optional or o.joined or o.is_address or o.is_immediate for o in operands)

    @cached_property
    def result_types(self) -> list[str]:
        """The type of every destination register, vectors spread out."""
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

    `out=True`: the function is a ufunc or takes `out=` like one. `scalars=True` (implied by `out`): it takes 0-d arrays
    among its sources; otherwise only immediates are 0-d. `loose_nan=True`: float results may hold any NaN; the code
    generator makes them canonical where their bits become visible. `copies=True`: results are bits of the sources.
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

    `orders=True`: what the threads of the membermask did before happens before what they do next.
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

    `constant` reads memory that no thread changes, at a variable that is named in the text: constant(launch, name,
    offset) returns the tuple of results, once per launch. `using` gives the same for a load of which only some bytes
    matter: bit i of its argument stands for byte i.
    """
    options = {"warps": warps, "aligned": aligned, "constant": constant, "using": using}
    return Semantics("memory", signature(destinations), signature(sources), function, options)


def Blocking(destinations: str, sources: str, function: Function, *, aligned: bool = False) -> Semantics:
    """An instruction whose threads may have to wait: function(threads, *sources); it ends a basic block."""
    return Semantics("blocking", signature(destinations), signature(sources), function, {"aligned": aligned})


def distinct(numbers: np.ndarray) -> np.ndarray:
    """The different values among small integers from 0 up, in order: np.unique sorts or hashes, which takes longer."""
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
    """Register a resolver under dotted names (`"ex2"`, `"shfl.sync"`, `"cp.async"`); the longest match wins."""

    def register(resolver: Resolver) -> Resolver:
        for name in names:
            if name in REGISTRY:
                raise ValueError(f"{name} is defined twice: {REGISTRY[name].__module__} and {resolver.__module__}")
            REGISTRY[name] = resolver
        return resolver

    return register


def load_families() -> None:
    """Import every family once, which fills the registry."""
    for family in FAMILIES:
        import_module(f"{__package__}.{family}")


@cache
def resolve(opcode: str) -> Semantics:
    """The meaning of a dotted opcode such as `add.rn.f32`; raises `Unsupported` with the reason."""
    load_families()
    words = opcode.split(".")
    for length in range(len(words), 0, -1):
        resolver = REGISTRY.get(".".join(words[:length]))
        if resolver is not None:
            try:
                return resolver(tuple(words[length:]))
            except Unsupported as error:
                raise Unsupported(f"{opcode} is not implemented: {error}") from None
            except (ArithmeticError, LookupError, TypeError, ValueError):  # modifiers that a resolver takes for granted
                raise Unsupported(
                    f"{opcode} is not implemented: '{'.'.join(words[length:])}' is not understood"
                ) from None
    related = sorted(name for name in REGISTRY if name.split(".")[0] == words[0])
    reason = f"there is {', '.join(related)}" if related else f"no instruction is called '{words[0]}'"
    raise Unsupported(f"{opcode} is not implemented: {reason}")
