"""Translate a lowered entry: decode its instructions, find uniform registers, allocate register rows, compile blocks.

A register that lives across basic blocks has a row: an array with one element per thread. Registers of one width share
a row if their live ranges do not overlap. A register is uniform if it is written once, from constants, parameters and
special registers that all threads share: it is computed once per launch, not per thread. codegen.py writes the Python
function of a block when the block first runs. `BlockCode.lines` maps a line of that function back to the PTX
instruction, for faults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from heapq import heappop, heappush
from operator import itemgetter
from threading import Lock

import numpy as np

from ..errors import Unsupported
from ..ptx.ir import Immediate, Instruction, Register, Special, Symbol
from ..ptx.lower import Branch, Program, Switch
from ..ptx.parse import damage
from .calls import NAMESPACE
from .codegen import UNIFORM_SPECIALS, BlockWriter
from .decode import UNSIGNED, Decoded, Decoder, register_bytes
from .instruction import DTYPES, Semantics, resolve
from .uniform import evaluator


def kind_of(opcode: str) -> str:
    """The class of an opcode for the lowering: "plain", "collective" (whole warps) or "blocking" (may wait)."""
    if opcode.startswith("mov."):
        return "plain"
    semantics = resolve(opcode)
    if semantics.kind == "blocking":
        return "blocking"
    return "collective" if semantics.kind == "warps" or semantics.option("warps") else "plain"


@dataclass
class BlockCode:
    """One basic block. The fields from `function` on are set when the block first runs.

    collective: whole warps execute the block together. blocking: threads may have to wait at its end. size: its
    instructions. watches: it reads memory that other threads may change meanwhile (atomics; volatile, relaxed and
    acquiring loads). past: only if the block ends with an aligned barrier; for each block of the entry, whether it is
    reachable from the barrier and the barrier is not reachable from it; bool [blocks].
    reads, writes: unsigned kind -> rows that the function reads or assigns. views: (kind, row) that it looks up.
    """

    collective: bool
    blocking: bool
    size: int
    watches: bool = False
    past: np.ndarray | None = None
    function: Callable | None = None
    source: str = ""
    reads: dict[str, tuple[int, ...]] = field(default_factory=dict)
    writes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    views: tuple[tuple[str, int], ...] = ()
    lines: dict[int, Instruction] = field(default_factory=dict)  # line of the source -> instruction


class Code:
    """A translated entry: its blocks, its uniform registers, and the number of register rows of each kind.

    Several emulators may share it, also in several threads: a lock guards compilation.
    """

    def __init__(self, translator: "Translator"):
        self.program = translator.program
        self.rows = {kind: len(ends) for kind, ends in translator.row_ends.items()}
        self.blocks = [translator.describe(index) for index in range(len(self.program.blocks))]
        behind = [block.past for block in self.blocks if block.past is not None]
        # For each block, whether it is past some aligned barrier, bool [blocks]; None without such a barrier.
        self.behind_barriers = np.logical_or.reduce(behind) if behind else None
        self._translator = translator
        self._turn = Lock()

    def compiled(self, index: int) -> BlockCode:
        """A block, compiled on first use."""
        block = self.blocks[index]
        if block.function is None:
            with self._turn:
                if block.function is None:
                    self._translator.compile(index, block)
        return block

    def uniforms(self, launch, known: list[np.ndarray]) -> list[np.ndarray]:
        """The uniform values of a launch that the blocks compiled so far use. Appends to `known` and returns it."""
        return self._translator.evaluate_uniforms(launch, known)

    @property
    def decoded(self) -> list[list["Decoded"]]:
        """The instructions of each block."""
        return self._translator.decoded

    def row(self, register: Register) -> int | None:
        """The row of a register that lives across blocks."""
        return self._translator.row_of.get(register.name)

    def kept(self, operand) -> bool:
        """Whether an operand is a register whose value is still available after a block that reads it."""
        return isinstance(operand, Register) and (
            self.row(operand) is not None or operand.name in self._translator.uniform
        )

    def uniform_value(self, register: Register, launch) -> np.ndarray:
        """The value of a uniform register in a launch. A block that has run must use the register."""
        slots = self._translator.uniform_slots
        return next(launch.uniform[slot] for (name, _), slot in slots.items() if name == register.name)


class Translator:
    """Translates one program.

    addresses(name, line): the address of a variable in its space. extents: for parameters and for variables in global
    and constant memory, by name, the first address that a load by this name may read, and the one after the last.
    """

    def __init__(
        self,
        program: Program,
        addresses: Callable[[str, int], int],
        extents: Mapping[str, tuple[int, int]],
        arithmetic: str,
        name: str = "<ptx>",
    ):
        self.program = program
        self.addresses = addresses
        self.extents = extents
        self.arithmetic = arithmetic
        self.name = name
        self.decoder = Decoder(name)
        self.constants: dict[object, str] = {}
        self.namespace: dict[str, object] = dict(NAMESPACE)
        self.functions: dict[object, str] = {}
        self.uniform: dict[str, int] = {}  # register -> place in uniform_order of the instruction that writes it
        self.uniform_slots: dict[tuple[str, str], int] = {}
        self.uniform_order: list[Decoded] = []
        self.evaluators: dict[int, Callable] = {}  # place in uniform_order -> function, made on first use
        self.number_of: Callable[[Instruction], int] | None = None

    def profile(self, mark: Callable[[int], None], number_of: Callable[[Instruction], int]) -> None:
        """Make generated code call mark(number) before every instruction."""
        self.namespace["mark"], self.number_of = mark, number_of

    def error(self, instruction: Instruction, message: str) -> Unsupported:
        """An error that names the text, the line and the opcode."""
        return self.decoder.error(instruction, message)

    # -- analysis -----------------------------------------------------------------------------------------------

    def translate(self) -> Code:
        """Analyze the program; its blocks are compiled when they first run."""
        decode = self.decoder.decode
        self.decoded = [[decode(instruction) for instruction in block.instructions] for block in self.program.blocks]
        self.find_uniform()
        self.find_loose_nan()
        self.find_lifetimes()
        self.assign_rows()
        return Code(self)

    def describe(self, index: int) -> BlockCode:
        """The properties of a block that the scheduler needs."""
        kinds = [item.semantics for item in self.decoded[index] if item.semantics is not None]
        blocking = any(semantics.kind == "blocking" for semantics in kinds)
        collective = any(
            semantics.kind == "warps" or semantics.option("warps") or semantics.option("aligned") for semantics in kinds
        )
        block = self.program.blocks[index]
        watches = any(_watches(instruction.opcode) for instruction in block.instructions)
        aligned = any(semantics.kind == "blocking" and semantics.option("aligned") for semantics in kinds)
        past = self.past(index) if aligned else None
        return BlockCode(collective, blocking, len(block.instructions) + (block.end is not None), watches, past)

    def past(self, index: int) -> np.ndarray:
        """For each block: it is reachable from block `index`, does not lead back to it and is not empty; bool
        [blocks]."""
        past = np.array([bool(block.instructions) for block in self.program.blocks])
        targets, sources = self.edges
        return past & _reached(index, targets) & ~_reached(index, sources)

    @cached_property
    def edges(self) -> tuple[list[list[int]], list[list[int]]]:
        """(successors, predecessors) of each block."""
        targets = [list(_targets(block.terminator)) for block in self.program.blocks]
        sources: list[list[int]] = [[] for _ in targets]
        for index, found in enumerate(targets):
            for target in found:
                sources[target].append(index)
        return targets, sources

    def compile(self, index: int, block: BlockCode) -> None:
        """Write and compile the function of a block."""
        writer = BlockWriter(self, index)
        with damage(lambda message: self.error(writer.current or self.program.blocks[index].instructions[0], message)):
            block.source = writer.write()
        scope: dict[str, object] = {}
        exec(compile(block.source, f"<{self.name} block {index}>", "exec"), self.namespace, scope)
        block.reads, block.writes = writer.rows_read(), writer.rows_written()
        block.views, block.lines = tuple(sorted(writer.row_views)), writer.line_map
        block.function = scope["block"]

    def find_uniform(self) -> None:
        """Find the registers that are written once, from launch-wide values only (see the module's docstring)."""
        writes: dict[str, int] = {}
        for block in self.decoded:
            for item in block:
                for register in item.writes:
                    writes[register.name] = writes.get(register.name, 0) + 1
        changed = True
        uniform = self.uniform
        remaining = [item for block in self.decoded for item in block if self.may_be_uniform(item, writes)]
        while changed:
            changed = False
            later = []
            for item in remaining:
                for register in item.reads:
                    if register.name not in uniform:
                        later.append(item)
                        break
                else:
                    for register in item.writes:
                        uniform[register.name] = len(self.uniform_order)
                    item.uniform = True
                    self.uniform_order.append(item)
                    changed = True
            remaining = later

    def may_be_uniform(self, item: "Decoded", writes: dict[str, int]) -> bool:
        written = item.writes
        if item.instruction.guard or not written:
            return False
        for register in written:
            if writes[register.name] != 1:
                return False
        for source in item.flat:
            if source.__class__ is Special and source.name not in UNIFORM_SPECIALS:
                return False
        if item.semantics is None:
            return True
        if item.semantics.kind == "lanes":
            return True
        constant = item.semantics.option("constant") and isinstance(item.sources[0].base, Symbol)
        return bool(constant) and self.is_inside(item)

    def is_inside(self, item: "Decoded") -> bool:
        """Whether a load of a parameter or a constant is aligned and in bounds; any other one is left to the threads,
        for which it is a fault."""
        address = item.sources[0]
        size = sum(DTYPES[type].itemsize for type in item.semantics.result_types)
        first, end = self.extents.get(address.base.name, (0, 0))
        at = self.constant_value(address.base, "u8", item.instruction) + address.offset
        return first <= at <= end - size and at % size == 0

    def find_loose_nan(self) -> None:
        """Find the "loose" registers: results of float arithmetic, and copies of them, whose NaN may not be canonical.

        NumPy's NaN bits differ from those of PTX; code generation makes them canonical where the bits are visible. A
        register without a float type that also gets other values is not loose, because those may look like a NaN. A
        move from a loose register into it makes NaN canonical.
        """
        arithmetic: set[str] = set()
        others: set[str] = set()  # written by instructions that are neither float arithmetic nor copies
        copies: list[tuple[Register, list[Register], bool]] = []
        for block in self.decoded:
            for item in block:
                semantics = item.semantics
                written = item.writes
                if semantics is not None and semantics.option("loose_nan"):
                    arithmetic.update(register.name for register in written)
                elif item.copies and len(written) == 1:
                    copies.append((written[0], item.reads, semantics is None))
                else:
                    others.update(register.name for register in written)

        readers: dict[str, list[tuple[str, bool]]] = {}  # source -> (target, whether the copy is a move)
        for target, sources, is_move in copies:
            for source in sources:
                readers.setdefault(source.name, []).append((target.name, is_move))

        def spread(kept: set[str]) -> set[str]:
            loose, fresh = set(arithmetic), list(arithmetic)
            while fresh:
                for target, is_move in readers.get(fresh.pop(), ()):
                    if target not in loose and not (is_move and target in kept):
                        loose.add(target)
                        fresh.append(target)
            return loose

        loose = spread(set())
        others |= {target.name for target, sources, _ in copies if not any(source.name in loose for source in sources)}
        mixed = {target.name for target, *_ in copies if target.type[0] != "f" and target.name in others}
        self.loose = (spread(mixed) if mixed & loose else loose) - set(self.uniform)

    def find_lifetimes(self) -> None:
        """Liveness analysis: the registers that live across blocks, and the first and last block of each live range."""
        count = len(self.decoded)
        numbers: dict[str, int] = {}
        types: dict[str, str] = {}
        uniform = self.uniform

        def number_of(register: Register) -> int:
            name = register.name
            number = numbers.get(name)
            if number is None:
                number = numbers[name] = len(numbers)
                types[name] = register.type
            return number

        uses, defines = [0] * count, [0] * count
        for index, block in enumerate(self.decoded):
            use: set[int] = set()
            define: set[int] = set()
            for item in block:
                if item.uniform:
                    continue
                for register in item.reads:
                    if register.name not in uniform and (number := number_of(register)) not in define:
                        use.add(number)
                guard = item.instruction.guard
                for register in item.writes:
                    number = number_of(register)
                    if guard and number not in define:
                        use.add(number)
                    define.add(number)
            terminator = self.program.blocks[index].terminator
            subject = (
                terminator.predicate
                if isinstance(terminator, Branch)
                else terminator.index
                if isinstance(terminator, Switch)
                else None
            )
            if isinstance(subject, Register) and subject.name not in self.uniform:
                if (number := number_of(subject)) not in define:
                    use.add(number)
            uses[index], defines[index] = _mask(use), _mask(define)
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
        names = list(numbers)
        alive = [inside | outside for inside, outside in zip(live_in, live_out)]
        spans: dict[str, list[int]] = {}
        seen = 0
        for index in range(count):
            spans.update((names[number], [index, index]) for number in _bits(alive[index] & ~seen))
            seen |= alive[index]
        seen = 0
        for index in range(count - 1, -1, -1):
            for number in _bits(alive[index] & ~seen):
                spans[names[number]][1] = index
            seen |= alive[index]
        self.numbers, self.alive, self.spans = numbers, alive, spans
        self.types = types

    def lives(self, name: str, index: int) -> bool:
        """Whether a register is live at the start or at the end of a block."""
        return name in self.numbers and bool(self.alive[index] >> self.numbers[name] & 1)

    def assign_rows(self) -> None:
        """Linear scan: assign a row to every register that lives across blocks; disjoint live ranges share rows."""
        self.row_of: dict[str, int] = {}
        self.row_ends: dict[str, list[int]] = {}
        free: dict[str, list[tuple[int, int]]] = {}
        for name, (start, end) in sorted(self.spans.items(), key=lambda entry: (entry[1][0], entry[1][1])):
            kind = UNSIGNED[register_bytes(self.types[name])]
            ends = self.row_ends.setdefault(kind, [])
            heap = free.setdefault(kind, [])
            if heap and heap[0][0] < start:
                _, row = heappop(heap)
                ends[row] = end
            else:
                row = len(ends)
                ends.append(end)
            heappush(heap, (end, row))
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
        """The name of a function in generated code."""
        name = self.functions.get(function)
        if name is None:
            label = getattr(function, "__name__", "function")
            label = label if label.isidentifier() else "function"
            name = self.functions[function] = f"{label}_{len(self.functions)}"
            self.namespace[name] = function
        return name

    def semantics(self, semantics: Semantics) -> str:
        """The name of a `Semantics` object in generated code, which passes it to the run time (calls.py)."""
        name = f"m{id(semantics)}"
        self.namespace[name] = semantics
        return name

    def getter(self, places: tuple[int, ...]) -> str:
        """The name of a function that returns these elements of a list or dict, in generated code."""
        return self.function(itemgetter(*places))

    def uniform_slot(self, name: str, kind: str) -> int:
        """The place of a uniform value among those of a launch."""
        return self.uniform_slots.setdefault((name, kind), len(self.uniform_slots))

    # -- uniform values -----------------------------------------------------------------------------------------

    def evaluate_uniforms(self, launch, known: list[np.ndarray]) -> list[np.ndarray]:
        """Append the uniform values that the blocks compiled since the last call use."""
        missing = list(self.uniform_slots)[len(known) :]
        if not missing:
            return known
        values = launch.uniform_values
        with np.errstate(all="ignore"):
            for place in self.places_behind([name for name, _ in missing], values):
                evaluate = self.evaluators.get(place)
                if evaluate is None:
                    evaluate = self.evaluators[place] = evaluator(self, self.uniform_order[place])
                evaluate(values, launch)
        for name, kind in missing:
            raw = values[name]
            dtype = np.dtype(kind)
            if kind != "b1" and dtype.itemsize < raw.dtype.itemsize:
                raw = raw.astype(f"u{dtype.itemsize}")
            view = raw.view(bool if kind == "b1" else dtype).reshape(())
            view.setflags(write=False)
            known.append(view)
        return known

    def places_behind(self, names: list[str], values: dict[str, np.ndarray]) -> list[int]:
        """The places in uniform_order of the instructions that compute these registers, without those in `values`."""
        places: set[int] = set()
        todo = [name for name in names if name not in values]
        while todo:
            place = self.uniform[todo.pop()]
            if place not in places:
                places.add(place)
                read = self.uniform_order[place].reads
                todo += [register.name for register in read if register.name not in values]
        return sorted(places)

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


_STRONG = {"volatile", "relaxed", "acquire", "mmio"}


@cache
def _watches(opcode: str) -> bool:
    words = opcode.split(".")
    return words[0] == "atom" or (words[0] == "ld" and not _STRONG.isdisjoint(words))


def _reached(index: int, edges: list[list[int]]) -> np.ndarray:
    """For each block, whether it is reachable from block `index` along `edges`; `index` itself is. bool [blocks]."""
    reached = np.zeros(len(edges), bool)
    reached[index] = True
    stack = [index]
    while stack:
        for target in edges[stack.pop()]:
            if not reached[target]:
                reached[target] = True
                stack.append(target)
    return reached


def _targets(terminator) -> tuple[int, ...]:
    if isinstance(terminator, Branch):
        return terminator.taken, terminator.otherwise
    if isinstance(terminator, Switch):
        return terminator.targets
    return (terminator.target,) if hasattr(terminator, "target") else ()


def _mask(positions: set[int]) -> int:
    """The number whose bits at these positions are set. One pass over its bytes: a bit at a time would copy the whole
    number for each."""
    if not positions:
        return 0
    bits = np.zeros(max(positions) + 1, bool)
    bits[list(positions)] = True
    return int.from_bytes(np.packbits(bits, bitorder="little").tobytes(), "little")


def _bits(mask: int) -> list[int]:
    """The positions of the bits of a mask, in ascending order."""
    data = np.frombuffer(mask.to_bytes((mask.bit_length() + 7) // 8, "little"), np.uint8)
    positions: list[int] = np.flatnonzero(np.unpackbits(data, bitorder="little")).tolist()
    return positions
