"""Decode instructions: match the operands of the text with the signature of the opcode (instruction.py).

The result is a `Decoded` per instruction, from which translate.py and codegen.py make code. Errors within one
instruction are raised here, before any code is generated: too many operands, a vector in place of a register,
registers that are too narrow.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import PtxError, PtxSyntaxError, Unsupported
from ..ptx.ir import (
    TYPE_BITS,
    Address,
    Immediate,
    Instruction,
    List,
    Negated,
    Pair,
    Register,
    Special,
    Symbol,
    Vector,
)
from ..ptx.parse import STUMBLES, damaged
from .instruction import DTYPES, Semantics, resolve

#: The carry flag CC.CF of add.cc and similar instructions, as a register.
_CARRY = Register("%carry", "pred")

#: Operands that stand for one value.
_SINGLE = frozenset({Register, Special, Immediate, Symbol, Negated})
_REGISTER = frozenset({Register})

#: The unsigned kind (see KINDS) of a register by its width in bytes; 0 stands for predicates.
UNSIGNED = {0: "b1", 1: "u1", 2: "u2", 4: "u4", 8: "u8"}

#: The kind of every operand type: its dtype in short, `u4`, `i8`, `f4`, `b1`. SIZES: bytes of each kind, 0 for `b1`.
#: WIDTHS: bytes of each register type, 0 for predicates.
KINDS = {type: dtype.str[1:] for type, dtype in DTYPES.items()}

SIZES = {"b1": 0, **{f"{letter}{size}": size for letter in "uif" for size in (1, 2, 4, 8)}}

WIDTHS = {type: 0 if type == "pred" else bits // 8 for type, bits in TYPE_BITS.items()}


def register_bytes(type: str) -> int:
    """Width of a register in bytes; 0 for predicates."""
    return WIDTHS[type]


class Decoded:
    """An instruction with its semantics (None: mov or bra), its destination registers and its source operands.

    flat: the sources with vectors spread out and addresses replaced by their base. uniform: computed once per launch,
    not per thread. copies: the results are bits of the sources. reads, writes: the registers that it reads, with its
    guard, and writes.
    """

    __slots__ = (
        "instruction",
        "semantics",
        "destinations",
        "sources",
        "flat",
        "uniform",
        "copies",
        "reads",
        "writes",
    )

    def __init__(self, instruction: Instruction, semantics: Semantics | None, destinations: list, sources: list):
        self.instruction = instruction
        self.semantics = semantics
        self.destinations = destinations
        self.sources = sources
        self.uniform = False
        self.copies = (semantics is None and len(destinations) == len(sources)) or (
            semantics is not None and bool(semantics.option("copies"))
        )
        self.writes = [register for register in destinations if register.__class__ is Register]
        self.reads = reads = [instruction.guard[0]] if instruction.guard else []
        self.flat = flat = []
        for source in sources:
            kind = source.__class__
            if kind is Register:
                flat.append(source)
                reads.append(source)
            elif kind is Vector:
                flat += source.elements
                for element in source.elements:
                    if element.__class__ is Register:
                        reads.append(element)
                    elif element.__class__ is Negated:
                        reads.append(element.register)
            elif kind is Address:
                flat.append(source.base)
                if source.base.__class__ is Register:
                    reads.append(source.base)
            else:
                flat.append(source)
                if kind is Negated:
                    reads.append(source.register)


class Decoder:
    """Decodes the instructions of one text. `name` is the name of the text in errors."""

    def __init__(self, name: str):
        self.name = name

    def decode(self, instruction: Instruction) -> Decoded:
        """The instruction with its semantics. Raises Unsupported for unknown opcodes and for operands that do not
        fit."""
        try:
            return self._decode(instruction)
        except PtxError:
            raise
        except STUMBLES as stumble:
            raise self.error(instruction, damaged(stumble)) from stumble

    def _decode(self, instruction: Instruction) -> Decoded:
        words = instruction.opcode.split(".")
        if words[0] == "mov":
            return Decoded(instruction, None, *self.decode_mov(instruction, words))
        if words[0] == "bra":
            return Decoded(instruction, None, [], [])
        semantics = resolve(instruction.opcode)
        operands = instruction.operands
        if not semantics.one_form:
            single = semantics.option("single")
            if single is not None and not any(isinstance(operand, Pair) for operand in operands):
                semantics = single
            if instruction.used is not None and semantics.option("using") is not None:
                semantics = semantics.option("using")(instruction.used)
            if semantics.option("carry_out"):
                operands = (operands[0], _CARRY, *operands[1:])
            if semantics.option("carry_in"):
                operands = (*operands, _CARRY)
        split = len(semantics.destinations)
        if semantics.plain and len(operands) == split + len(semantics.sources):
            destinations, sources = operands[:split], operands[split:]
            if _SINGLE.issuperset(map(type, sources)) and _REGISTER.issuperset(map(type, destinations)):
                self.check_widths(instruction, semantics, destinations, sources)
                return Decoded(instruction, semantics, destinations, sources)
        destinations, sources = self.match_operands(instruction, list(operands), semantics)
        self.check_widths(instruction, semantics, destinations, sources)
        return Decoded(instruction, semantics, destinations, sources)

    def check_widths(
        self, instruction: Instruction, semantics: Semantics, destinations: Sequence, sources: Sequence
    ) -> None:
        """Check that registers are at least as wide as the types of the opcode, and predicates are predicates."""
        for register, type in zip(destinations, semantics.result_types):
            if register.__class__ is not Register or register.type == type:
                continue
            size, width = SIZES[KINDS[type]], WIDTHS[register.type]
            if (width == 0) != (size == 0):
                raise self.error(
                    instruction, f"a {type} result does not go into the {register.type} register {register.name}"
                )
            if size > width:
                raise self.error(
                    instruction, f"a {type} result does not fit the {register.type} register {register.name}"
                )
            if size < width and _is_exact(instruction, semantics):
                raise self.wrong(
                    instruction, f"the {type} result goes into the wider {register.type} register {register.name}"
                )
        for spec, source in zip(semantics.sources, sources):
            if spec.is_address or spec.is_immediate:
                base = source.base if source.__class__ is Address else None
                if base.__class__ is Register and WIDTHS[base.type] not in (4, 8):
                    raise self.error(instruction, f"the {base.type} register {base.name} is no address")
                continue
            for operand in source.elements if source.__class__ is Vector else (source,):
                if operand.__class__ is Immediate:
                    self.check_literal(instruction, spec.type, operand)
                    continue
                register = operand.register if operand.__class__ is Negated else operand
                if (
                    register.__class__ is not Register
                    or register.type == spec.type
                    or (spec.optional and register.type == "pred")
                ):
                    continue
                size, width = SIZES[spec.kind], WIDTHS[register.type]
                if (width == 0) != (size == 0) or size > width:
                    raise self.error(
                        instruction, f"the {register.type} register {register.name} is read as {8 * size or 1} bits"
                    )
                if size < width and _is_exact(instruction, semantics):
                    raise self.wrong(
                        instruction,
                        f"the {register.type} register {register.name} is wider than its {spec.type} operand",
                    )

    def check_literal(self, instruction: Instruction, type: str, literal: Immediate) -> None:
        """Check that f32 and f64 operands are float literals, and that integers are none."""
        if literal.float_bits == 0 and type in ("f32", "f64"):
            raise self.wrong(instruction, f"the integer {literal.value} stands where a {type} literal is expected")
        if literal.float_bits and (type[0] in "us" or (type[0] == "b" and 8 * SIZES[KINDS[type]] < literal.float_bits)):
            raise self.wrong(instruction, f"a float literal stands where a {type} operand is expected")

    def wrong(self, instruction: Instruction, message: str) -> PtxSyntaxError:
        """An error in an instruction that PTX does not allow."""
        return PtxSyntaxError(f"{self.name}:{instruction.line}: {instruction.opcode}: {message}")

    def error(self, instruction: Instruction, message: str) -> Unsupported:
        """An error that names the text, the line and the opcode."""
        return Unsupported(f"{self.name}:{instruction.line}: {instruction.opcode}: {message}", line=instruction.line)

    def decode_mov(self, instruction: Instruction, words: Sequence[str]):
        """(destinations, sources) of mov: a plain copy, a pack of {a, b} or an unpack into {a, b}."""
        resolve(instruction.opcode)
        if len(instruction.operands) != 2:
            raise self.error(instruction, "expected two operands")
        target, source = instruction.operands
        destinations = list(target.elements) if isinstance(target, Vector) else [target]
        sources = list(source.elements) if isinstance(source, Vector) else [source]
        for register in destinations:
            if not (isinstance(register, Register) or (isinstance(register, Symbol) and register.name == "_")):
                raise self.error(instruction, f"{_described(register)} is no register")
        for operand in sources:
            if operand.__class__ not in _SINGLE:
                raise self.error(instruction, f"expected registers, found {_described(operand)}")
            if operand.__class__ is Immediate and len(sources) == 1:
                self.check_literal(instruction, words[1], operand)
        if len(destinations) == len(sources) > 1:
            raise self.error(instruction, "a vector is moved into a vector")
        if max(len(destinations), len(sources)) not in (1, 2, 4, 8):
            raise self.error(instruction, f"a vector of {max(len(destinations), len(sources))} elements is moved")
        size = register_bytes(words[1])
        parts = (size // len(sources), size // len(destinations))
        if 0 in parts and size or len(destinations) * len(sources) > 1 and not size:
            raise self.error(instruction, "a vector has more elements than the value has bytes")
        for operands, width in ((destinations, parts[1]), (sources, parts[0])):
            for operand in operands:
                register = operand.register if operand.__class__ is Negated else operand
                if register.__class__ is Register and WIDTHS[register.type] != width:
                    raise self.error(instruction, f"{register.name} has not {8 * width or 1} bits")
        return destinations, sources

    def match_operands(self, instruction: Instruction, operands: list, semantics: Semantics):
        """Match the operands with the signature; returns flat destination registers and the source operands."""
        destinations: list = []
        wanted = list(semantics.destinations)
        while wanted:
            operand = wanted.pop(0)
            if not operands:
                raise self.error(instruction, "a destination is missing")
            found = operands.pop(0)
            second = None
            if wanted and wanted[0].joined:
                joined = wanted.pop(0)
                if isinstance(found, Pair):
                    found, second = found.first, found.second
                elif not joined.optional:
                    raise self.error(instruction, "expected two destinations d|p")
                else:
                    second = Symbol("_")
            elif isinstance(found, Pair):
                raise self.error(instruction, "one destination, not d|p, is expected")
            if operand.count:
                if not isinstance(found, Vector) or len(found.elements) != operand.count:
                    if operand.count == 1 and not isinstance(found, Vector):
                        found = Vector((found,))
                    else:
                        raise self.error(instruction, f"expected a vector of {operand.count} destinations")
                destinations += found.elements
            else:
                found = _only(found)
                if isinstance(found, Vector):
                    raise self.error(instruction, "expected one destination, found a vector")
                destinations.append(found)
            if second is not None:
                destinations.append(second)
        for register in destinations:
            if not (isinstance(register, Register) or (isinstance(register, Symbol) and register.name == "_")):
                raise self.error(instruction, f"a destination is a register, found {_described(register)}")
        sources: list = []
        # `spare` operands are left for optional sources; the first optional sources get them.
        spare = len(operands) - sum(not operand.optional for operand in semantics.sources)
        if spare < 0:
            raise self.error(instruction, f"expected {len(semantics.sources)} sources, found {len(operands)}")
        for operand in semantics.sources:
            if operand.optional:
                if not spare:
                    sources.append(None)
                    continue
                spare -= 1
            found = operands.pop(0)
            if not operand.count:
                found = _only(found)
            if operand.count:
                if isinstance(found, Vector) and len(found.elements) == operand.count:
                    if any(element.__class__ not in _SINGLE for element in found.elements):
                        raise self.error(instruction, f"expected a vector of {operand.type} operands")
                    sources.append(found)
                elif operand.count == 1 and not isinstance(found, Vector):
                    sources.append(Vector((found,)))
                else:
                    raise self.error(instruction, f"expected a vector of {operand.count}")
            elif operand.is_address:
                if not isinstance(found, Address):
                    raise self.error(instruction, "expected an address [..]")
                sources.append(found)
            elif operand.is_immediate:
                if not isinstance(found, Immediate):
                    raise self.error(instruction, "expected an immediate")
                sources.append(found)
            elif isinstance(found, (Vector, Address, List, Pair)):
                raise self.error(
                    instruction, f"expected a {operand.type} operand, found {type(found).__name__.lower()}"
                )
            else:
                sources.append(found)
        if operands:
            raise self.error(instruction, f"{len(operands)} operands too many")
        return destinations, sources


def _is_exact(instruction: Instruction, semantics: Semantics) -> bool:
    """Whether registers have to be as wide as the types of the opcode: not in conversions, and only in instructions on
    registers alone."""
    return semantics.kind == "lanes" and not instruction.opcode.startswith("cvt.")


def _only(operand):
    """The element of a vector of length one; any other operand unchanged."""
    return operand.elements[0] if isinstance(operand, Vector) and len(operand.elements) == 1 else operand


def _described(operand) -> str:
    """The name of an operand in error messages."""
    if isinstance(operand, (Register, Symbol, Special)):
        return f"'{operand.name}'"
    if isinstance(operand, Immediate):
        return "a number"
    return {Pair: "d|p", List: "(...)", Address: "an address", Negated: "!p"}.get(
        type(operand), type(operand).__name__.lower()
    )
