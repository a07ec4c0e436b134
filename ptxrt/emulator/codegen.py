"""Translate the basic blocks of a lowered entry into Python functions over NumPy vectors.

A block becomes one function of (R, K, M): the register rows, the uniform values, and the executing threads. Every
array has one element per thread. A register that lives across blocks is a row of a (rows, lanes) array; rows are shared
by registers that are never alive together. A register of one block is a local variable of the function. A register
that is written once, from constants and parameters only, is uniform: it is computed once per launch and never per
thread.

The line of a fault in the generated text leads back to the PTX line (`Code.lines`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable, Optional, Union

import numpy as np

from ..ptx.ir import (
    TYPE_BITS, Address, Immediate, Instruction, List, Negated, Pair, PtxError, Register, Special, Symbol, Vector, type_bytes,
)  # fmt: skip
from ..ptx.lower import Branch, Program, Switch
from . import machine as _machine
from .instruction import DTYPES, Operand, Semantics, Unsupported, resolve

#: The name of a register row's array by width in bytes, and of its views.
_UNSIGNED = {0: "b1", 1: "u1", 2: "u2", 4: "u4", 8: "u8"}
UNIFORM_SPECIALS = frozenset(
    [f"{name}.{axis}" for name in ("ntid", "nctaid", "cluster_ctaid", "cluster_nctaid", "nclusterid") for axis in "xyz"]
    + "nwarpid nsmid gridid is_explicit_cluster cluster_ctarank cluster_nctarank".split()
    + "total_smem_size aggr_smem_size dynamic_smem_size reserved_smem_offset_begin reserved_smem_offset_end".split()
    + "reserved_smem_offset_cap".split()
)


#: The carry flag CC.CF of add.cc and the like, as a register.
_CARRY = Register("%carry", "pred")


#: Operands that stand for one value.
_SINGLE = frozenset({Register, Special, Immediate, Symbol, Negated})


def kind_of(opcode: str) -> str:
    """What the lowering wants to know about an opcode: "plain", "collective" or "blocking"."""
    if opcode.startswith("mov."):
        return "plain"
    semantics = resolve(opcode)
    if semantics.kind == "blocking":
        return "blocking"
    return "collective" if semantics.kind == "warps" or semantics.option("warps") else "plain"


#: The kind of view of every operand type, and the width in bytes of every register type (0 for predicates).
_KINDS = {type: dtype.str[1:] for type, dtype in DTYPES.items()}
_SIZES = {"b1": 0, **{f"{letter}{size}": size for letter in "uif" for size in (1, 2, 4, 8)}}
_WIDTHS = {type: 0 if type == "pred" else bits // 8 for type, bits in TYPE_BITS.items()}


def register_bytes(type: str) -> int:
    """Width of a register in bytes; 0 for predicates."""
    return _WIDTHS[type]


@dataclass
class BlockCode:
    """One basic block; `function` and what belongs to it are made when the block first runs.

    `reads` and `writes`: unsigned kind -> rows that the function uses or assigns; `views`: (kind, row) that it looks up.
    `collective`: whole warps must be together; `blocking`: threads may have to wait at its end; `size`: instructions.
    """

    collective: bool
    blocking: bool
    size: int
    function: Optional[Callable] = None
    source: str = ""
    reads: dict[str, tuple[int, ...]] = field(default_factory=dict)
    writes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    views: tuple[tuple[str, int], ...] = ()
    lines: dict[int, Instruction] = field(default_factory=dict)  # line of the source -> instruction


class Code:
    """A translated entry: blocks, uniform values, and how many register rows of each kind it needs."""

    def __init__(self, translator: "Translator"):
        self.program = translator.program
        self.rows = {kind: len(ends) for kind, ends in translator.row_ends.items()}
        self.blocks = [translator.describe(index) for index in range(len(self.program.blocks))]
        self._translator = translator
        self._uniform_count = 0

    def compiled(self, index: int) -> BlockCode:
        """A block with its function."""
        block = self.blocks[index]
        if block.function is None:
            self._translator.compile(index, block)
        return block

    def uniforms(self, launch, known: list[np.ndarray]) -> list[np.ndarray]:
        """The uniform values of a launch, as far as the blocks that are compiled use them; `known` grows in place."""
        return self._translator.evaluate_uniforms(launch, known)


class _Value:
    """Where a block-local register's value is: the variable names of its views."""

    __slots__ = ("views", "version")

    def __init__(self, views: dict[str, str], version: int):
        self.views = views
        self.version = version


class Translator:
    """Translates one program. `addresses` gives the address of each variable in its space."""

    def __init__(self, program: Program, addresses: Callable[[str, int], int], arithmetic: str, name: str = "<ptx>"):
        self.program = program
        self.addresses = addresses
        self.arithmetic = arithmetic
        self.name = name
        self.constants: dict[object, str] = {}
        self.namespace: dict[str, object] = {"full": _full, "guard": _machine.guard, "pick": _machine.pick, "within": _machine.within, "copyto": np.copyto,
                                             "where": np.where, "lnot": np.logical_not, "warps": _machine.warps,
                                             "prepared": _machine.prepared, "blocking": _machine.blocking, "canonical": _canonical}  # fmt: skip
        self.functions: dict[object, str] = {}
        self.uniform: dict[str, int] = {}
        self.uniform_slots: dict[tuple[str, str], int] = {}
        self.uniform_order: list[tuple[Instruction, Semantics]] = []

    # -- analysis -----------------------------------------------------------------------------------------------

    def translate(self) -> Code:
        """Analyze the program; its blocks are compiled when they first run."""
        self.decoded = [[self.decode(instruction) for instruction in block.instructions] for block in self.program.blocks]
        self.find_uniform()
        self.find_loose_nan()
        self.find_lifetimes()
        self.assign_rows()
        return Code(self)

    def describe(self, index: int) -> BlockCode:
        """What the scheduler has to know about a block."""
        kinds = [item.semantics for item in self.decoded[index] if item.semantics is not None]
        blocking = any(semantics.kind == "blocking" for semantics in kinds)
        collective = any(semantics.kind == "warps" or semantics.option("warps") or semantics.option("aligned") for semantics in kinds)
        block = self.program.blocks[index]
        return BlockCode(collective, blocking, len(block.instructions) + (block.end is not None))

    def compile(self, index: int, block: BlockCode) -> None:
        """Write and compile the function of a block."""
        writer = _BlockWriter(self, index)
        block.source = writer.write()
        scope: dict[str, object] = {}
        exec(compile(block.source, f"<{self.name} block {index}>", "exec"), self.namespace, scope)
        block.reads, block.writes = writer.rows_read(), writer.rows_written()
        block.views, block.lines = tuple(sorted(writer.row_views)), writer.line_map
        block.function = scope["block"]

    def decode(self, instruction: Instruction) -> "_Decoded":
        words = instruction.opcode.split(".")
        if words[0] == "mov":
            return _Decoded(instruction, None, *self.decode_mov(instruction))
        if words[0] == "bra":
            return _Decoded(instruction, None, [], [])
        semantics = resolve(instruction.opcode)
        single = semantics.option("single")
        if single is not None and not any(isinstance(operand, Pair) for operand in instruction.operands):
            semantics = single
        operands = instruction.operands
        if semantics.option("carry_out"):
            operands = (operands[0], _CARRY, *operands[1:])
        if semantics.option("carry_in"):
            operands = (*operands, _CARRY)
        split = len(semantics.destinations)
        if semantics.plain and len(operands) == split + len(semantics.sources):
            destinations, sources = operands[:split], operands[split:]
            if all(type(found) in _SINGLE for found in sources) and all(type(found) is Register for found in destinations):
                return _Decoded(instruction, semantics, destinations, sources)
        return _Decoded(instruction, semantics, *self.match_operands(instruction, list(operands), semantics))

    def error(self, instruction: Instruction, message: str) -> PtxError:
        return PtxError(f"{self.name}:{instruction.line}: {instruction.opcode}: {message}")

    def decode_mov(self, instruction: Instruction):
        """mov takes the shape of its operands: plain, packing {a, b} or unpacking into it."""
        if len(instruction.operands) != 2:
            raise self.error(instruction, "expected two operands")
        target, source = instruction.operands
        destinations = list(target.elements) if isinstance(target, Vector) else [target]
        sources = list(source.elements) if isinstance(source, Vector) else [source]
        for register in destinations:
            if not (isinstance(register, Register) or (isinstance(register, Symbol) and register.name == "_")):
                raise self.error(instruction, f"{register} is no register")
        return destinations, sources

    def match_operands(self, instruction: Instruction, operands: list, semantics: Semantics):
        """Line the operands up with the signature; returns flat destination registers and the source operands."""
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
                if isinstance(found, Vector):
                    raise self.error(instruction, "expected one destination, found a vector")
                destinations.append(found)
            if second is not None:
                destinations.append(second)
        for register in destinations:
            if not (isinstance(register, Register) or (isinstance(register, Symbol) and register.name == "_")):
                raise self.error(instruction, f"a destination is a register, found {register}")
        sources: list = []
        # The first optional sources are there as far as the number of operands goes.
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
            if operand.count:
                if isinstance(found, Vector) and len(found.elements) == operand.count:
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
                raise self.error(instruction, f"expected a {operand.type} operand, found {type(found).__name__.lower()}")
            else:
                sources.append(found)
        if operands:
            raise self.error(instruction, f"{len(operands)} operands too many")
        return destinations, sources

    def find_uniform(self) -> None:
        """Registers that are written once, from constants alone."""
        writes: dict[str, int] = {}
        for block in self.decoded:
            for item in block:
                for register in item.registers_written():
                    writes[register.name] = writes.get(register.name, 0) + 1
        changed = True
        remaining = [item for block in self.decoded for item in block if self.may_be_uniform(item, writes)]
        while changed:
            changed = False
            later = []
            for item in remaining:
                if all(register.name in self.uniform for register in item.registers_read()):
                    for register in item.registers_written():
                        self.uniform[register.name] = len(self.uniform)
                    item.uniform = True
                    self.uniform_order.append(item)
                    changed = True
                else:
                    later.append(item)
            remaining = later

    def may_be_uniform(self, item: "_Decoded", writes: dict[str, int]) -> bool:
        if item.instruction.guard or not item.destinations:
            return False
        if any(writes[register.name] != 1 for register in item.registers_written()) or not item.registers_written():
            return False
        if any(isinstance(source, Special) and source.name not in UNIFORM_SPECIALS for source in item.flat):
            return False
        if item.semantics is None:
            return True
        if item.semantics.kind == "lanes":
            return True
        return bool(item.semantics.option("constant")) and isinstance(item.sources[0].base, Symbol)

    def find_loose_nan(self) -> None:
        """Registers that may hold a NaN with other bits than PTX gives: results of float arithmetic, and copies."""
        loose: set[str] = set()
        copies: list[tuple[Register, list[Register]]] = []
        for block in self.decoded:
            for item in block:
                semantics = item.semantics
                if semantics is not None and semantics.option("loose_nan"):
                    loose.update(register.name for register in item.registers_written())
                elif item.copies:
                    written = item.registers_written()
                    if len(written) == 1:
                        copies.append((written[0], item.registers_read()))
        changed = True
        while changed:
            changed = False
            for target, sources in copies:
                if target.name not in loose and any(source.name in loose for source in sources):
                    loose.add(target.name)
                    changed = True
        self.loose = loose - set(self.uniform)

    def find_lifetimes(self) -> None:
        """Which registers live across blocks, and the range of blocks in which each does."""
        count = len(self.decoded)
        numbers: dict[str, int] = {}
        types: dict[int, str] = {}

        def bit(register: Register) -> int:
            number = numbers.setdefault(register.name, len(numbers))
            types[number] = register.type
            return 1 << number

        uses, defines, every = [0] * count, [0] * count, [0] * count
        for index, block in enumerate(self.decoded):
            use = define = 0
            for item in block:
                if item.uniform:
                    continue
                for register in item.registers_read():
                    if register.name not in self.uniform and not define & bit(register):
                        use |= bit(register)
                guard = item.instruction.guard
                for register in item.registers_written():
                    if guard and not define & bit(register):
                        use |= bit(register)
                    define |= bit(register)
            terminator = self.program.blocks[index].terminator
            subject = terminator.predicate if isinstance(terminator, Branch) else terminator.index if isinstance(terminator, Switch) else None
            if isinstance(subject, Register) and subject.name not in self.uniform and not define & bit(subject):
                use |= bit(subject)
            uses[index], defines[index] = use, define
        live_in, live_out = list(uses), [0] * count
        changed = True
        while changed:
            changed = False
            for index in range(count - 1, -1, -1):
                out = 0
                for target in _targets(self.program.blocks[index].terminator):
                    out |= live_in[target]
                new = uses[index] | (out & ~defines[index])
                if out != live_out[index] or new != live_in[index]:
                    live_out[index], live_in[index] = out, new
                    changed = True
        self.live_out: list[set[str]] = []
        self.live_in: list[set[str]] = []
        names = list(numbers)
        spans: dict[str, list[int]] = {}
        for index in range(count):
            inside = [names[number] for number in _bits(live_in[index])]
            outside = [names[number] for number in _bits(live_out[index])]
            self.live_in.append(set(inside))
            self.live_out.append(set(outside))
            for name in inside:
                span = spans.setdefault(name, [index, index])
                span[0], span[1] = min(span[0], index), max(span[1], index)
            for name in outside:
                span = spans.setdefault(name, [index, index])
                span[0], span[1] = min(span[0], index), max(span[1], index)
        self.spans = spans
        self.types = {name: types[number] for name, number in numbers.items()}

    def assign_rows(self) -> None:
        """Give every register that crosses blocks a row; registers whose ranges do not meet share one."""
        self.row_of: dict[str, int] = {}
        self.row_ends: dict[str, list[int]] = {}
        free: dict[str, list[tuple[int, int]]] = {}
        import heapq

        for name, (start, end) in sorted(self.spans.items(), key=lambda entry: (entry[1][0], entry[1][1])):
            kind = _UNSIGNED[register_bytes(self.types[name])]
            ends = self.row_ends.setdefault(kind, [])
            heap = free.setdefault(kind, [])
            if heap and heap[0][0] < start:
                _, row = heapq.heappop(heap)
                ends[row] = end
            else:
                row = len(ends)
                ends.append(end)
            heapq.heappush(heap, (end, row))
            self.row_of[name] = row

    # -- names --------------------------------------------------------------------------------------------------

    def constant(self, value, kind: str) -> str:
        """The name of a 0-d array that holds a constant."""
        key = (kind, value)
        name = self.constants.get(key)
        if name is None:
            name = self.constants[key] = f"c{len(self.constants)}"
            dtype = np.dtype(kind)
            if kind == "b1":
                array = np.array(bool(value))
            else:
                array = np.array(value & ((1 << 8 * dtype.itemsize) - 1), f"u{dtype.itemsize}").view(dtype)
            array.setflags(write=False)
            self.namespace[name] = array
        return name

    def function(self, function: Callable) -> str:
        """The name under which generated code calls a function."""
        name = self.functions.get(function)
        if name is None:
            label = getattr(function, "__name__", "function")
            label = label if label.isidentifier() else "function"
            name = self.functions[function] = f"{label}_{len(self.functions)}"
            self.namespace[name] = function
        return name

    def semantics(self, semantics: Semantics) -> str:
        """The name under which generated code hands a meaning to the machine."""
        name = f"m{id(semantics)}"
        self.namespace[name] = semantics
        return name

    def uniform_view(self, name: str, kind: str) -> str:
        slot = self.uniform_slots.setdefault((name, kind), len(self.uniform_slots))
        return f"K[{slot}]"

    # -- uniform values -----------------------------------------------------------------------------------------

    def evaluate_uniforms(self, launch, known: list[np.ndarray]) -> list[np.ndarray]:
        """Append the uniform values that blocks compiled since the last call look up."""
        missing = list(self.uniform_slots)[len(known) :]
        if not missing:
            return known
        values: dict[str, np.ndarray] = {}
        with np.errstate(all="ignore"):
            for item in self.uniform_order:
                self.evaluate(item, values, launch)
        for name, kind in missing:
            raw = values[name]
            dtype = np.dtype(kind)
            if kind != "b1" and dtype.itemsize < raw.dtype.itemsize:
                raw = raw.astype(f"u{dtype.itemsize}")
            view = raw.view(bool if kind == "b1" else dtype).reshape(())
            view.setflags(write=False)
            known.append(view)
        return known

    def evaluate(self, item: "_Decoded", values: dict[str, np.ndarray], launch) -> None:
        """Compute one uniform instruction on (1,) arrays."""
        instruction, semantics = item.instruction, item.semantics

        def fetch(operand, kind: str) -> np.ndarray:
            dtype = np.dtype(kind)
            if isinstance(operand, Negated):
                return ~values[operand.register.name]
            if isinstance(operand, Register):
                raw = values[operand.name]
                if kind != "b1" and dtype.itemsize < raw.dtype.itemsize:
                    raw = raw.astype(f"u{dtype.itemsize}")
                return raw.view(dtype)
            if isinstance(operand, Special):
                return np.array([launch.special(operand.name)]).astype(f"u{dtype.itemsize}").view(dtype)
            value = self.constant_value(operand, kind, instruction)
            return np.array([value & ((1 << 8 * dtype.itemsize) - 1)], f"u{dtype.itemsize}").view(dtype) if kind != "b1" else np.array([bool(value)])

        if semantics is None:
            for register, value in zip(item.destinations, _mov_values(item, fetch)):
                if isinstance(register, Register):
                    values[register.name] = value
            return
        if semantics.option("constant"):
            address = item.sources[0]
            results = semantics.option("constant")(launch, address.base.name, address.offset + address.base.offset)
        else:
            arguments = []
            for operand, source in zip(semantics.sources, item.sources):
                if source is None:
                    arguments.append(None)
                elif operand.count:
                    arguments.append(tuple(fetch(element, operand.kind) for element in source.elements))
                elif operand.is_immediate:
                    arguments.append(source.value)
                else:
                    arguments.append(fetch(source, operand.kind))
            results = semantics.bound(self.arithmetic)(*arguments)
            if len(item.destinations) == 1:
                results = (results,)
        types = semantics.result_types
        for register, type, result in zip(item.destinations, types, results):
            if isinstance(register, Register):
                result = np.broadcast_to(np.asarray(result), (1,))
                if semantics.option("loose_nan"):
                    result = _canonical(result.view(DTYPES[type]), type)
                values[register.name] = _widened(result, type, register.type)

    def constant_value(self, operand, kind: str, instruction: Instruction) -> int:
        """The bits of an immediate or the address of a symbol, as a value of `kind`."""
        if isinstance(operand, Symbol):
            return self.addresses(operand.name, instruction.line) + operand.offset
        if not isinstance(operand, Immediate):
            raise self.error(instruction, f"the operand {operand} is not supported here")
        size = 1 if kind == "b1" else int(kind[1:])
        if operand.float_bits:
            if operand.float_bits // 8 == size:
                return operand.value
            value = np.array(operand.value, f"u{operand.float_bits // 8}").view(f"f{operand.float_bits // 8}")
            if kind[0] == "f" or (operand.float_bits == 64 and size == 4):
                return int(value.astype(f"f{size}").view(f"u{size}"))
            raise self.error(instruction, "a float literal stands where an integer is expected")
        if kind[0] == "f":
            return int(np.array(operand.value, f"f{size}").view(f"u{size}"))
        return operand.value


def _targets(terminator) -> tuple[int, ...]:
    if isinstance(terminator, Branch):
        return terminator.taken, terminator.otherwise
    if isinstance(terminator, Switch):
        return terminator.targets
    return (terminator.target,) if hasattr(terminator, "target") else ()


def _bits(mask: int):
    """The positions of the bits of a mask."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _widened(result: np.ndarray, type: str, register: str) -> np.ndarray:
    """A result of `type` as the raw bits of a register."""
    if register == "pred":
        return result.astype(bool)
    width = register_bytes(register)
    if result.dtype.itemsize == width:
        return result.view(f"u{width}")
    if result.dtype.kind == "f":
        result = result.view(f"u{result.dtype.itemsize}")
    return result.astype(f"{result.dtype.kind}{width}").view(f"u{width}")


def _full(count: int, value, dtype: str) -> np.ndarray:
    """A scalar result for every thread."""
    return np.full(count, value, dtype)


def _canonical(value: np.ndarray, type: str = "f32") -> np.ndarray:
    """Floats with every NaN as PTX writes it; the array itself if there is none."""
    bad = np.isnan(value)
    if not bad.any():
        return value
    bits = {2: 0x7FFF, 4: 0x7FFFFFFF, 8: 0x7FF8000000000000}[value.dtype.itemsize]
    unsigned = np.dtype(f"u{value.dtype.itemsize}")
    return np.where(bad, unsigned.type(bits), value.view(unsigned)).view(value.dtype)


def _mov_values(item: "_Decoded", fetch) -> list[np.ndarray]:
    """mov on arrays: plain copies, packing and unpacking. Returns raw unsigned arrays per destination."""
    type_size = register_bytes(item.instruction.opcode.split(".")[1])
    targets, sources = item.destinations, item.sources
    if len(targets) == len(sources):
        return [fetch(source, _UNSIGNED[type_size // len(targets) if type_size else 0]) for source in sources]
    if len(sources) > 1:
        part = type_size // len(sources)
        total = None
        for position, source in enumerate(sources):
            piece = fetch(source, _UNSIGNED[part]).astype(f"u{type_size}") << np.array(8 * part * position, f"u{type_size}")
            total = piece if total is None else total | piece
        return [total]
    part = type_size // len(targets)
    whole = fetch(sources[0], _UNSIGNED[type_size])
    return [(whole >> np.array(8 * part * position, f"u{type_size}")).astype(f"u{part}") for position in range(len(targets))]


class _Decoded:
    """An instruction with its semantics (None: mov or bra), flat destinations and sources."""

    __slots__ = ("instruction", "semantics", "destinations", "sources", "flat", "uniform", "copies", "_reads", "_writes")

    def __init__(self, instruction: Instruction, semantics: Optional[Semantics], destinations: list, sources: list):
        self.instruction = instruction
        self.semantics = semantics
        self.destinations = destinations
        self.sources = sources
        self.uniform = False
        self.copies = (semantics is None and len(destinations) == len(sources)) or (semantics is not None and bool(semantics.option("copies")))
        self._writes = [register for register in destinations if isinstance(register, Register)]
        reads = [instruction.guard[0]] if instruction.guard else []
        self.flat = self._flat_sources()
        for source in self.flat:
            if isinstance(source, Register):
                reads.append(source)
            elif isinstance(source, Negated):
                reads.append(source.register)
        self._reads = reads

    def _flat_sources(self) -> list:
        found = []
        for source in self.sources:
            if isinstance(source, Vector):
                found += source.elements
            elif isinstance(source, Address):
                found.append(source.base)
            else:
                found.append(source)
        return found

    def registers_written(self) -> list[Register]:
        return self._writes

    def registers_read(self) -> list[Register]:
        return self._reads


class _BlockWriter:
    """Writes the function of one block."""

    def __init__(self, translator: Translator, index: int):
        self.translator = translator
        self.index = index
        self.items = translator.decoded[index]
        self.block = translator.program.blocks[index]
        self.lines: list[str] = []
        self.line_map: dict[int, Instruction] = {}
        self.row_views: set[tuple[str, int]] = set()
        self.written_rows: set[tuple[str, int]] = set()
        self.read_rows: set[tuple[str, int]] = set()
        self.uniform_names: dict[str, str] = {}
        self.special_names: dict[tuple[str, str], str] = {}
        self.values: dict[str, _Value] = {}  # block-local registers
        self.row_cache: dict[str, dict[str, str]] = {}  # narrowed or derived copies of rows
        self.versions: dict[str, int] = {}
        self.prepared: dict[object, str] = {}
        self.free_names: list[str] = []
        self.name_count = 0
        self.current: Optional[Instruction] = None

    # -- names and lines ----------------------------------------------------------------------------------------

    def emit(self, line: str) -> None:
        self.lines.append(line)
        self.line_map[len(self.lines)] = self.current

    def fresh(self) -> str:
        if self.free_names:
            return self.free_names.pop()
        self.name_count += 1
        return f"t{self.name_count}"

    def release(self, value: _Value) -> None:
        self.free_names += value.views.values()

    def rows_read(self) -> dict[str, tuple[int, ...]]:
        return _grouped(self.read_rows)

    def rows_written(self) -> dict[str, tuple[int, ...]]:
        return _grouped(self.written_rows)

    # -- the function -------------------------------------------------------------------------------------------

    def write(self) -> str:
        translator = self.translator
        self.live_in, self.live_out = translator.live_in[self.index], translator.live_out[self.index]
        self.last_use, self.row_writes = {}, {}
        for position, item in enumerate(self.items):
            if item.uniform:
                continue
            for register in item.registers_read():
                self.last_use[register.name] = position
            for register in item.registers_written():
                self.last_use.setdefault(register.name, position)
                self.last_use[register.name] = max(self.last_use[register.name], position)
                self.row_writes.setdefault(register.name, []).append(position)
        self.find_prepared()
        ending = self.subject()
        if isinstance(ending, Register):
            self.last_use[ending.name] = len(self.items)
        for position, item in enumerate(self.items):
            self.position = position
            self.current = item.instruction
            if item.uniform or item.instruction.opcode.startswith("bra"):
                continue
            self.translate_item(item)
            for register in set(item.registers_read()) | set(item.registers_written()):
                if self.last_use.get(register.name) == position and register.name in self.values:
                    self.release(self.values.pop(register.name))
        self.position = len(self.items)
        self.current = self.block.end or (self.items[-1].instruction if self.items else None)
        if self.current is None:
            self.current = None
        if ending is not None:
            kind = "b1" if isinstance(self.block.terminator, Branch) else "u4"
            self.emit(f"return {self.view(ending, kind)}")
        return self.finish()

    def find_prepared(self) -> None:
        """Where each prepared operand is used last, so that it is kept no longer."""
        self.prepared_last: dict[object, int] = {}
        versions: dict[str, int] = {}
        for position, item in enumerate(self.items):
            if item.uniform:
                continue
            prepare = item.semantics.option("prepare") if item.semantics else None
            for prepared, source in zip(prepare or (), item.sources):
                if prepared is not None:
                    elements = source.elements if isinstance(source, Vector) else (source,)
                    key = (prepared, tuple((e.name, versions.get(e.name, 0)) if isinstance(e, Register) else e for e in elements))
                    self.prepared_last[key] = position
            for register in item.registers_written():
                versions[register.name] = versions.get(register.name, 0) + 1

    def subject(self):
        terminator = self.block.terminator
        if isinstance(terminator, Branch):
            return terminator.predicate
        return terminator.index if isinstance(terminator, Switch) else None

    def finish(self) -> str:
        """Put the look-ups of rows and uniform values before the body."""
        head = ["def block(R, K, M):"]
        kinds = sorted({kind for kind, _ in self.row_views})
        head += [f" {kind} = R.{kind}" for kind in kinds]
        head += [f" {kind}_{row} = {kind}[{row}]" for kind, row in sorted(self.row_views)]
        head += [f" {name} = {source}" for source, name in self.uniform_names.items()]
        head += [f" {name} = M.special('{special}', '{kind}')" for (special, kind), name in self.special_names.items()]
        shift = len(head)
        self.line_map = {line + shift: instruction for line, instruction in self.line_map.items()}
        return "\n".join(head + [" " + line for line in self.lines] + [" return None", ""])

    # -- sources ------------------------------------------------------------------------------------------------

    def row(self, register: Register, kind: str, write: bool = False) -> str:
        translator = self.translator
        row = translator.row_of[register.name]
        unsigned = _UNSIGNED[register_bytes(register.type)]
        self.row_views.add((kind, row))
        (self.written_rows if write else self.read_rows).add((unsigned, row))
        return f"{kind}_{row}"

    def is_row(self, register: Register) -> bool:
        return register.name in self.live_in or register.name in self.live_out

    def view(self, operand, kind: str) -> str:
        """An expression for an operand as an array (or 0-d array) of a kind; conversions are emitted before."""
        translator = self.translator
        if isinstance(operand, Negated):
            name = self.view(operand.register, "b1")
            return f"lnot({name})"
        if isinstance(operand, Register):
            return self.register_view(operand, kind)
        if isinstance(operand, Special):
            key = (operand.name, kind)
            if key not in self.special_names:
                self.special_names[key] = f"s{len(self.special_names)}"
            return self.special_names[key]
        return translator.constant(translator.constant_value(operand, kind, self.current), kind)

    def register_view(self, register: Register, kind: str) -> str:
        translator = self.translator
        width = _WIDTHS[register.type]
        size = _SIZES[kind]
        if (width == 0) != (size == 0) or size > width:
            raise translator.error(self.current, f"the {register.type} register {register.name} is read as {8 * size or 1} bits")
        if register.name in translator.uniform:
            source = translator.uniform_view(register.name, kind)
            if source not in self.uniform_names:
                self.uniform_names[source] = f"q{len(self.uniform_names)}"
            return self.uniform_names[source]
        if self.is_row(register):
            if size == width:
                return self.row(register, kind)
            cache = self.row_cache.setdefault(register.name, {})
            if kind not in cache:
                # The copy stays right until the row is written again (see `assigned`).
                self.emit_narrow(cache, self.row(register, _UNSIGNED[width]), kind, size)
            return cache[kind]
        value = self.values.get(register.name)
        if value is None:
            # Read before anything wrote it: any value will do.
            value = self.values[register.name] = _Value({}, 0)
            name = self.fresh()
            unsigned = _UNSIGNED[width]
            self.emit(f"{name} = full(M.count, 0, '{unsigned}')")
            value.views[unsigned] = name
        if kind in value.views:
            return value.views[kind]
        first_kind, first = next(iter(value.views.items()))
        for known_kind, known in value.views.items():
            if (0 if known_kind == "b1" else int(known_kind[1:])) == width:
                first_kind, first = known_kind, known
                break
        if size == width:
            name = self.fresh()
            self.emit(f"{name} = {first}.view('{kind}')")
            value.views[kind] = name
            return name
        unsigned = first if first_kind[0] == "u" else self.register_view(register, _UNSIGNED[width])
        self.emit_narrow(value.views, unsigned, kind, size)
        return value.views[kind]

    def emit_narrow(self, cache: dict[str, str], source: str, kind: str, size: int) -> None:
        name = self.fresh()
        unsigned = f"u{size}"
        self.emit(f"{name} = {source}.astype('{unsigned}')" + (f".view('{kind}')" if kind != unsigned else ""))
        cache[kind] = name

    def is_scalar(self, operand) -> bool:
        """Whether an operand's expression is 0-d."""
        if isinstance(operand, Negated):
            operand = operand.register
        if isinstance(operand, Register):
            return operand.name in self.translator.uniform
        if isinstance(operand, Special):
            return operand.name in UNIFORM_SPECIALS
        return True

    def loose(self, operand) -> bool:
        return isinstance(operand, Register) and operand.name in self.translator.loose

    def source(self, operand, spec: Operand, semantics: Semantics) -> str:
        """The expression for one register-like source of a signature."""
        kind = spec.kind
        if spec.optional and isinstance(operand, (Register, Negated)) and getattr(operand, "register", operand).type == "pred":
            return self.view(operand, "b1")  # cp.async: a size or a predicate, which the opcode does not tell
        name = self.view(operand, kind)
        if self.loose(operand) and kind[0] != "f" and not semantics.option("copies"):
            width = register_bytes(operand.type)
            floats = self.view(operand, f"f{width}")
            name = f"canonical({floats}).view('{kind}')" if spec.dtype.itemsize == width else name
        return name

    def version(self, operand) -> object:
        if isinstance(operand, Register):
            return operand.name, self.versions.get(operand.name, 0)
        return operand

    def address(self, operand: Address, spec: Operand) -> str:
        """An address expression: uint32 from 32-bit registers, uint64 from 64-bit ones."""
        translator = self.translator
        base = operand.base
        if isinstance(base, Register):
            kind = "u4" if register_bytes(base.type) == 4 and spec.type in ("shared", "local") else "u8"
            if kind == "u8" and register_bytes(base.type) == 4:
                name = f"{self.view(base, 'u4')}.astype('u8')"
            else:
                name = self.view(base, kind)
            if operand.offset:
                name = f"add({name}, {translator.constant(operand.offset, kind)})"
                translator.namespace["add"] = np.add
            if self.is_scalar(base):
                name = f"full(M.count, {name}, '{kind}')"
            return name
        value = translator.constant_value(base, "u8", self.current) + operand.offset
        kind = "u4" if spec.type in ("shared", "local") and 0 <= value < 1 << 32 else "u8"
        return f"full(M.count, {translator.constant(value, kind)}, '{kind}')"

    # -- destinations -------------------------------------------------------------------------------------------

    def assigned(self, register: Register) -> None:
        """A register gets a new value: what was derived from the old one is void."""
        self.versions[register.name] = self.versions.get(register.name, 0) + 1
        for name in self.row_cache.pop(register.name, {}).values():
            self.free_names.append(name)

    def result_kind(self, register: Register, type: str) -> tuple[str, str]:
        """(kind of the result, kind of the register view that takes it)."""
        kind = _KINDS[type]
        width = _WIDTHS[register.type]
        if (width == 0) != (kind == "b1"):
            raise self.translator.error(self.current, f"a {type} result does not go into the {register.type} register {register.name}")
        if width == 0:
            return "b1", "b1"
        size = int(kind[1:])
        if size > width:
            raise self.translator.error(self.current, f"a {type} result does not fit the {register.type} register {register.name}")
        if size == width:
            return kind, kind
        return kind, f"i{width}" if kind[0] == "i" else f"u{width}"

    def store(self, register, type: str, expression: str, scalar: bool, fresh: bool = True) -> None:
        """Assign an expression of `type` to a register."""
        if not isinstance(register, Register):
            return
        kind, target = self.result_kind(register, type)
        if kind != target and kind[0] == "f":
            expression = f"{expression}.view('u{kind[1:]}')"
        if self.is_row(register):
            self.emit(f"{self.row(register, target, write=True)}[...] = {expression}")
            self.assigned(register)
            return
        self.assigned(register)
        old = self.values.pop(register.name, None)
        name = self.fresh()
        if scalar:
            self.emit(f"{name} = full(M.count, {expression}, '{target}')")
        elif kind != target:
            self.emit(f"{name} = {expression}.astype('{target}')")
        else:
            self.emit(f"{name} = {expression}")
        if old:
            self.release(old)
        self.values[register.name] = _Value({target: name}, 0)

    def store_guarded(self, register, type: str, expression: str, predicate: str) -> None:
        """Assign where a predicate holds."""
        if not isinstance(register, Register):
            return
        kind, target = self.result_kind(register, type)
        if kind != target and kind[0] == "f":
            expression = f"{expression}.view('u{kind[1:]}')"
        if self.is_row(register):
            self.emit(f"copyto({self.row(register, target, write=True)}, {expression}, where={predicate}, casting='unsafe')")
            self.row(register, target)
            self.assigned(register)
            return
        old = self.register_view(register, target)
        name = self.fresh()
        self.emit(f"{name} = where({predicate}, {expression}, {old})" + (f".astype('{target}')" if kind != target else ""))
        self.assigned(register)
        value = self.values.pop(register.name, None)
        if value:
            self.release(value)
        self.values[register.name] = _Value({target: name}, 0)

    def alias_is_safe(self, operand) -> bool:
        """Whether the array of a source stays as it is for the rest of the block."""
        if not isinstance(operand, Register) or operand.name in self.translator.uniform:
            return True
        if self.is_row(operand):
            return not any(position >= self.position for position in self.row_writes.get(operand.name, ()))
        return True

    # -- instructions -------------------------------------------------------------------------------------------

    def translate_item(self, item: _Decoded) -> None:
        semantics = item.semantics
        if semantics is None:
            self.translate_mov(item)
        elif semantics.kind == "lanes":
            self.translate_lanes(item)
        elif semantics.kind == "warps":
            self.translate_warps(item)
        elif semantics.kind == "memory":
            self.translate_memory(item)
        else:
            self.translate_blocking(item)

    def guard_name(self, item: _Decoded) -> Optional[str]:
        if item.instruction.guard is None:
            return None
        register, negated = item.instruction.guard
        name = self.view(register, "b1")
        return f"lnot({name})" if negated else name

    def translate_mov(self, item: _Decoded) -> None:
        guard = self.guard_name(item)
        words = item.instruction.opcode.split(".")
        size = register_bytes(words[1])
        targets, sources = item.destinations, item.sources
        if len(targets) == len(sources) == 1:
            width = register_bytes(targets[0].type) if isinstance(targets[0], Register) else size
            source = sources[0]
            if isinstance(source, Register) and register_bytes(source.type) != size:
                raise self.translator.error(item.instruction, f"{source.name} has not {8 * size} bits")
            if width != size:
                raise self.translator.error(item.instruction, f"{targets[0].name} has not {8 * size} bits")
            kind = _UNSIGNED[size]
            if isinstance(source, Register) and source.name in self.values and not guard and not self.is_row(targets[0]):
                kind = next(known for known in self.values[source.name].views if (0 if known == "b1" else int(known[1:])) == size)
            type = {"b1": "pred", "u": f"u{8 * size}", "i": f"s{8 * size}", "f": f"f{8 * size}"}["b1" if kind == "b1" else kind[0]]
            expression = self.view(source, kind)
            if guard:
                self.store_guarded(targets[0], type, expression, guard)
                return
            if not self.is_row(targets[0]) and not self.is_scalar(source) and not self.alias_is_safe(source):
                expression += ".copy()"
            self.store(targets[0], type, expression, self.is_scalar(source))
            return
        if len(targets) == len(sources):
            raise self.translator.error(item.instruction, "a vector is moved into a vector")
        scalar = all(self.is_scalar(source) for source in sources)
        names = []

        def fetch(operand, kind: str) -> str:
            if self.loose(operand) and kind != "b1":
                width = register_bytes(operand.type)
                return f"canonical({self.view(operand, f'f{width}')}).view('{kind}')"
            return self.view(operand, kind)

        if len(sources) > 1:
            part = size // len(sources)
            pieces = []
            for position, source in enumerate(sources):
                piece = f"{fetch(source, _UNSIGNED[part])}.astype('u{size}')"
                if position:
                    piece = f"({piece} << {self.translator.constant(8 * part * position, f'u{size}')})"
                pieces.append(piece)
            names = [" | ".join(pieces)]
            types = [f"u{8 * size}"]
        else:
            part = size // len(targets)
            whole = fetch(sources[0], _UNSIGNED[size])
            types = [f"u{8 * part}"] * len(targets)
            for position, target in enumerate(targets):
                if not isinstance(target, Register):
                    names.append("")
                    continue
                piece = f"({whole} >> {self.translator.constant(8 * part * position, f'u{size}')})" if position else whole
                name = self.fresh()
                self.emit(f"{name} = {piece}.astype('u{part}')")
                names.append(name)
        for target, type, name in zip(targets, types, names):
            if isinstance(target, Register):
                if guard:
                    self.store_guarded(target, type, f"({name})", guard)
                else:
                    self.store(target, type, f"({name})", scalar)

    def arguments(self, item: _Decoded, dense: bool) -> list[str]:
        """The argument expressions of a call; `dense` makes every register operand a full array."""
        semantics = item.semantics
        arguments = []
        for spec, source in zip(semantics.sources, item.sources):
            if source is None:
                arguments.append("None")
            elif spec.count:
                parts = [self.dense(self.source(element, spec, semantics), element, spec, dense) for element in source.elements]
                arguments.append("(" + ", ".join(parts) + ",)")
            elif spec.is_address:
                arguments.append(self.address(source, spec))
            elif spec.is_immediate:
                arguments.append(str(source.value))
            else:
                arguments.append(self.dense(self.source(source, spec, semantics), source, spec, dense))
        return arguments

    def dense(self, expression: str, operand, spec: Operand, dense: bool) -> str:
        if dense and self.is_scalar(operand) and not isinstance(operand, (Immediate, Symbol)):
            return f"full(M.count, {expression}, '{spec.kind}')"
        return expression

    def translate_lanes(self, item: _Decoded) -> None:
        semantics, translator = item.semantics, self.translator
        function = translator.function(semantics.bound(translator.arithmetic))
        guard = self.guard_name(item)
        arguments = self.arguments(item, dense=not semantics.option("out") and not semantics.option("scalars"))
        types = semantics.result_types
        scalar = all(source is None or self.is_scalar(source) for source in item.flat)
        if len(item.destinations) == 1:
            register, type = item.destinations[0], types[0]
            if not isinstance(register, Register):
                return
            kind, target = self.result_kind(register, type)
            if guard:
                self.store_guarded(register, type, f"{function}({', '.join(arguments)})", guard)
            elif semantics.option("out") and kind == target and self.is_row(register) and not scalar:
                self.emit(f"{function}({', '.join(arguments)}, out={self.row(register, target, write=True)})")
                self.assigned(register)
            else:
                expression = f"{function}({', '.join(arguments)})"
                safe = semantics.option("out") or all(self.alias_is_safe(source) for source in item.flat)
                if not safe and not self.is_row(register) and kind == target:
                    expression += ".copy()"
                self.store(register, type, expression, scalar)
            return
        self.translate_results(item, f"{function}({', '.join(arguments)})", types, guard, scalar)

    def translate_results(self, item: _Decoded, call: str, types: list[str], guard: Optional[str], scalar: bool = False) -> None:
        """Assign the tuple that a call returns."""
        if not item.destinations:
            self.emit(call)
            return
        names = [self.fresh() for _ in item.destinations]
        self.emit(f"{', '.join(names)}{',' if len(names) == 1 else ''} = {call}")
        read = {register.name for register in item.registers_read()}
        for position, (register, name) in enumerate(zip(item.destinations, names)):
            # A result may be one of the sources itself: it is copied before a row that is a source changes.
            if position and isinstance(register, Register) and any(earlier.name in read for earlier in item.registers_written()):
                self.emit(f"{name} = {name}.copy()")
        for register, type, name in zip(item.destinations, types, names):
            if guard:
                self.store_guarded(register, type, name, guard)
            else:
                self.store(register, type, name, scalar)
        self.free_names += names

    def translate_warps(self, item: _Decoded) -> None:
        semantics, translator = item.semantics, self.translator
        if item.instruction.guard:
            raise translator.error(item.instruction, "a guard on an instruction of the whole warp is not supported")
        function = translator.function(semantics.bound(translator.arithmetic))
        prepare = semantics.option("prepare") or (None,) * len(semantics.sources)
        arguments = self.arguments(item, dense=True)
        spent: list[str] = []
        for position, (prepared, source) in enumerate(zip(prepare, item.sources)):
            if prepared is None:
                continue
            elements = source.elements if isinstance(source, Vector) else (source,)
            key = (prepared, tuple(self.version(element) for element in elements))
            call = f"prepared(M, {translator.function(prepared)}, {arguments[position]})"
            last = self.prepared_last.get(key, self.position)
            if key not in self.prepared and last > self.position:
                self.prepared[key] = self.fresh()
                self.emit(f"{self.prepared[key]} = {call}")
            arguments[position] = self.prepared.get(key, call)
            if key in self.prepared and last == self.position:
                spent.append(self.prepared.pop(key))
        options = translator.semantics(semantics)
        call = f"warps(M, {function}, ({', '.join(arguments)}{',' if arguments else ''}), {options})"
        self.translate_results(item, call, semantics.result_types, None)
        self.free_names += spent

    def translate_memory(self, item: _Decoded) -> None:
        semantics, translator = item.semantics, self.translator
        function = translator.function(semantics.bound(translator.arithmetic))
        types = semantics.result_types
        guard = self.guard_name(item)
        if semantics.option("warps"):
            arguments = self.arguments(item, dense=True)
            options = translator.semantics(semantics)
            call = f"warps(M, {function}, ({', '.join(arguments)}{',' if arguments else ''}), {options})"
            self.translate_results(item, call, types, None)
            return
        arguments = self.arguments(item, dense=True)
        if guard is None:
            call = f"{function}(M{''.join(', ' + argument for argument in arguments)})"
            if len(types) == 1:
                self.store(item.destinations[0], types[0], call, False) if isinstance(item.destinations[0], Register) else self.emit(call)
            else:
                self.translate_results(item, call, types, None)
            return
        group = self.fresh()
        # Views of the destinations are made outside of the branch, where every path passes.
        targets = []
        for register, type in zip(item.destinations, types):
            if not isinstance(register, Register):
                targets.append(None)
                continue
            kind, target = self.result_kind(register, type)
            if self.is_row(register):
                self.row(register, target)
                targets.append(self.row(register, target, write=True))
            else:
                old = self.register_view(register, target)
                name = self.fresh()
                self.emit(f"{name} = {old}.copy()")
                targets.append(name)
        self.emit(f"{group} = guard(M, {guard})")
        self.emit(f"if {group} is not None:")
        call = f"within({group}[0], {function}{''.join(', ' + _pick(argument, group) for argument in arguments)})"
        if not any(targets):
            self.emit(f" {call}")
        else:
            result = self.fresh()
            self.emit(f" {result} = {call}")
            for position, (target, register, type) in enumerate(zip(targets, item.destinations, types)):
                if target is None:
                    continue
                element = result if len(types) == 1 else f"{result}[{position}]"
                kind, wide = self.result_kind(register, type)
                if kind != wide and kind[0] == "f":
                    element = f"{element}.view('u{kind[1:]}')"
                self.emit(f" {target}[{group}[1]] = {element}")
            self.free_names.append(result)
        self.free_names.append(group)
        for target, register, type in zip(targets, item.destinations, types):
            if target is None:
                continue
            self.assigned(register)
            if not self.is_row(register):
                old = self.values.pop(register.name, None)
                if old:
                    self.release(old)
                self.values[register.name] = _Value({self.result_kind(register, type)[1]: target}, 0)

    def translate_blocking(self, item: _Decoded) -> None:
        semantics, translator = item.semantics, self.translator
        function = translator.function(semantics.bound(translator.arithmetic))
        arguments = self.arguments(item, dense=False)
        targets = []
        for register, type in zip(item.destinations, semantics.result_types):
            if isinstance(register, Register) and self.is_row(register):
                _, target = self.result_kind(register, type)
                targets.append(f"('{target}', {translator.row_of[register.name]})")
        self.emit(
            f"blocking(M, {function}, ({', '.join(arguments)}{',' if arguments else ''}), "
            f"({', '.join(targets)}{',' if targets else ''}), {bool(semantics.option('aligned'))})"
        )


def _grouped(rows: set[tuple[str, int]]) -> dict[str, tuple[int, ...]]:
    grouped: dict[str, list[int]] = {}
    for kind, row in sorted(rows):
        grouped.setdefault(kind, []).append(row)
    return {kind: tuple(found) for kind, found in grouped.items()}


def _pick(argument: str, group: str) -> str:
    """The argument of a guarded access, for the threads whose guard holds."""
    if argument == "None" or argument.lstrip("-").isdigit():
        return argument
    return f"pick({argument}, {group}[1])"
