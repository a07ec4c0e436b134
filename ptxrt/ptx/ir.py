"""A PTX text as plain data: modules, variables, functions, instructions and their operands.

Source: PTX ISA 9.0, chapters 4 (syntax), 5 (state spaces, types, variables) and 11 (directives).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Union

from ..errors import PtxError, PtxSyntaxError

__all__ = [
    "Address", "Function", "Immediate", "Instruction", "List", "Location", "Module", "Negated", "Operand", "Pair",
    "Parameter", "PtxError", "PtxSyntaxError", "Register", "Special", "Symbol", "TYPE_BITS", "Variable", "Vector",
    "type_bytes",
]  # fmt: skip


TYPE_BITS: dict[str, int] = {
    "pred": 1, "b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16, "b32": 32,
    "u32": 32, "s32": 32,
    "f32": 32, "f16x2": 32, "bf16x2": 32, "tf32": 32, "b64": 64, "u64": 64, "s64": 64, "f64": 64, "f32x2": 64,
    "b128": 128,
}  # fmt: skip


def type_bytes(type: str) -> int:
    """The size of a value of a fundamental type in memory, in bytes."""
    return max(TYPE_BITS[type] // 8, 1)


class Location(NamedTuple):
    """A source position from `.loc`, and the position it was inlined at (None at the outermost)."""

    file: int
    line: int
    column: int
    inlined_at: "Location" | None = None


class Register(NamedTuple):
    """A register of a function: its name made unique over nested scopes, and its declared type."""

    name: str
    type: str


class Special(NamedTuple):
    """A read-only special register: `%tid.x` is Special("tid.x")."""

    name: str


class Immediate(NamedTuple):
    """A literal. `float_bits` is 32 or 64 when `value` holds the bits of a float literal, else 0."""

    value: int
    float_bits: int = 0


class Symbol(NamedTuple):
    """A variable, parameter, function or label, plus a byte displacement."""

    name: str
    offset: int = 0


class Address(NamedTuple):
    """[base + offset]; the base is a Register, a Symbol or an Immediate."""

    base: Union[Register, Symbol, Immediate]
    offset: int = 0


class Vector(NamedTuple):
    """{a, b, ...}"""

    elements: tuple


class Pair(NamedTuple):
    """d|p: two destinations."""

    first: object
    second: object


class Negated(NamedTuple):
    """!p: a predicate source, inverted."""

    register: Register


class List(NamedTuple):
    """(a, b, ...): the arguments or results of a call."""

    elements: tuple


Operand = Union[Register, Special, Immediate, Symbol, Address, Vector, Pair, Negated, List]


class Instruction(NamedTuple):
    """One instruction: `guard` is (register, negated) or None; `line` counts from 1 in the text.

    `used`: bit i is set if byte i of a load matters (`.pragma "used_bytes_mask N"`); None if all bytes do.
    """

    opcode: str
    operands: tuple
    guard: tuple[Register, bool] | None
    line: int
    location: Location | None
    used: int | None = None


@dataclass(frozen=True)
class Variable:
    """A variable in a state space. `count` 0 is an array of unknown length (`extern .shared x[]`).

    `values` is the flat initializer, without padding: ints (bits), or Symbols that stand for their addresses (byte
    masks such as `0xFF(x)` are refused).
    """

    name: str
    space: str
    type: str
    count: int
    align: int
    values: tuple = ()
    linkage: str = ""
    line: int = 0

    @property
    def bytes(self) -> int:
        return type_bytes(self.type) * self.count


@dataclass(frozen=True)
class Parameter:
    """A parameter of an entry or function: `offset` and `bytes` in the packed `.param` space.

    register: it is declared in `.reg`, as a device function may have it; it has no place in memory then.
    """

    name: str
    type: str
    count: int
    align: int
    offset: int
    pointer: bool = False
    register: bool = False

    @property
    def bytes(self) -> int:
        return type_bytes(self.type) * max(self.count, 1)

    @property
    def size(self) -> int:
        return self.bytes


@dataclass
class Function:
    """An `.entry` or `.func`: its signature, performance directives, and the position of its body in the text.

    `body` is the (start, end) of the text between the braces, None for a declaration.
    """

    name: str
    is_entry: bool
    params: tuple[Parameter, ...]
    results: tuple[Parameter, ...] = ()
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)
    linkage: str = ""
    body: tuple[int, int] | None = None
    line: int = 0

    @property
    def param_bytes(self) -> int:
        """The size of the packed parameters."""
        return self.params[-1].offset + self.params[-1].bytes if self.params else 0

    @property
    def maxntid(self) -> tuple[int, int, int] | None:
        """`.maxntid`, else `.reqntid`, as three numbers; None if neither is given."""
        threads = self.directives.get("maxntid") or self.directives.get("reqntid")
        return None if threads is None else (tuple(threads) + (1, 1, 1))[:3]


@dataclass
class Module:
    """A parsed text. Bodies of functions are read on demand by `parse.body`."""

    name: str
    text: str  # without comments, same lines
    version: str
    target: str
    variables: dict[str, Variable]
    functions: dict[str, Function]
    files: dict[int, str]
    line_starts: Sequence[int]
    bodies: dict[str, object] = field(default_factory=dict)  # bodies that were read and are kept (emulator/verify.py)

    @property
    def entries(self) -> dict[str, Function]:
        """The kernels of this module by name, in the order of the text."""
        return {name: function for name, function in self.functions.items() if function.is_entry}

    def constant(self, name: str) -> bytes:
        """The initial bytes of a `.const` or `.global` variable, padded with zeros to its size."""
        variable = self.variables.get(name)
        if variable is None:
            raise PtxError(
                f"{self.name} has no variable '{name}'; it has {', '.join(sorted(self.variables)) or 'none'}"
            )
        if any(isinstance(value, Symbol) for value in variable.values):
            raise PtxError(f"{self.name}: '{name}' holds addresses, which are known only where the module is loaded")
        size = type_bytes(variable.type)
        data = b"".join((value & (1 << 8 * size) - 1).to_bytes(size, "little") for value in variable.values)
        return data.ljust(variable.bytes, b"\0")
