"""Lower one entry to basic blocks: inline calls, place parameters, number blocks so that divergent threads reconverge.

Blocks are in reverse postorder, with every loop before the blocks that follow it. If the lowest block always runs
first, divergent threads reconverge at the earliest block that they share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Union

from ..errors import Unsupported
from .ir import (
    TYPE_BITS,
    Address,
    Function,
    Immediate,
    Instruction,
    List,
    Module,
    Negated,
    Pair,
    PtxSyntaxError,
    Register,
    Special,
    Symbol,
    Variable,
    Vector,
    type_bytes,
)  # fmt: skip
from .parse import CALL_DEPTH, INLINED, SYSTEM_CALLS, Body, Label, body, damage


class Jump(NamedTuple):
    """Continue at a block."""

    target: int


class Branch(NamedTuple):
    """Go to `taken` if the predicate (inverted if `negated`) holds, else to `otherwise`."""

    predicate: Register
    negated: bool
    taken: int
    otherwise: int


class Switch(NamedTuple):
    """brx.idx: go to targets[index]."""

    index: Union[Register, Immediate]
    targets: tuple[int, ...]


class Exit(NamedTuple):
    """The thread ends."""


Terminator = Union[Jump, Branch, Switch, Exit]


@dataclass
class Block:
    """A basic block: its instructions, and where the thread continues.

    `end` is the branch instruction (for its line), None if the block falls through to the next one.
    """

    instructions: list[Instruction]
    terminator: Terminator
    end: Instruction | None = None


@dataclass
class Program:
    """One entry, ready for execution. Offsets and sizes are bytes.

    `frame` has the offsets of local variables in each thread's local memory, `shared` those of shared variables.
    Dynamic shared memory (`dynamic`: names) starts at the next multiple of `dynamic_align` after the static one.
    `specials` are the special registers that the entry reads.
    """

    entry: Function
    blocks: list[Block]
    registers: dict[str, str]
    frame: dict[str, int] = field(default_factory=dict)
    frame_bytes: int = 0
    shared: dict[str, int] = field(default_factory=dict)
    shared_bytes: int = 0
    dynamic: tuple[str, ...] = ()
    dynamic_align: int = 16
    specials: frozenset[str] = frozenset()


_LOCAL_BYTES = 512 * 1024  # of a thread: CUDA C++ programming guide, compute capabilities

#: Returns the class of an opcode: "plain", "collective" (a warp executes it together, so that a guard becomes a branch)
#: or "blocking" (collective, and it ends a block).
Kind = Callable[[str], str]


def lower(module: Module, entry: Function, kind: Kind) -> Program:
    """Lower an entry of a module.

    Raises Unsupported for calls that cannot be inlined, PtxSyntaxError for a text that is no PTX.
    """
    with damage(lambda message: PtxSyntaxError(f"{module.name}:{entry.line}: '{entry.name}': {message}")):
        return _lowered(module, entry, kind)


def _lowered(module: Module, entry: Function, kind: Kind) -> Program:
    inliner = _Inliner(module)
    statements = inliner.expand(entry, "", {}, ())
    statements = _promote_parameters(statements, inliner)
    blocks = _order(_merge(_split(statements, kind, inliner.tables)))
    program = Program(entry, blocks, inliner.registers)
    _lay_out(program, inliner, module)
    return program


# ---------------------------------------------------------------------------------------------------------------
# Inlining


class _Inliner:
    """Expands calls; every instance of a callee gets its own registers, labels and local variables."""

    def __init__(self, module: Module):
        self.module = module
        self.bodies: dict[str, Body] = dict(module.bodies)
        self.registers: dict[str, str] = {}
        self.locals: dict[str, Variable] = {}  # .local of all instances, and parameters of calls
        self.shared: dict[str, Variable] = {}
        self.parameters: set[str] = set()  # names in `locals` that are parameters of calls
        self.tables: dict[str, tuple[str, ...]] = {}
        self.instances = self.inlined = 0

    def error(self, message: str, line: int) -> Unsupported:
        return Unsupported(f"{self.module.name}:{line}: {message}", line=line)

    def body(self, function: Function) -> Body:
        if function.name not in self.bodies:
            self.bodies[function.name] = body(self.module, function)
        return self.bodies[function.name]

    def expand(self, function: Function, prefix: str, names: dict[str, Symbol], stack: tuple[str, ...]) -> list:
        """Return the statements of one instance; `names` maps its parameters to the caller's variables."""
        read = self.body(function)
        self.inlined += len(read.statements)
        if self.inlined > INLINED:
            raise self.error(
                f"more than {INLINED} instructions are there once calls are inlined, the last of '{function.name}'",
                function.line,
            )
        names = dict(names)
        for variable in read.variables:
            if variable.space == "shared":
                unique = f"{function.name}::{variable.name}"
                self.shared[unique] = variable
            else:
                unique = prefix + variable.name
                self.locals[unique] = variable
                if variable.space == "param":
                    self.parameters.add(unique)
            names[variable.name] = Symbol(unique)
        labels = {statement.name for statement in read.statements if isinstance(statement, Label)}
        for label in labels:
            names[label] = Symbol(prefix + label)
        for label, targets in read.tables.items():
            self.tables[prefix + label] = tuple(prefix + target for target in targets)
        rename = _Renamer(prefix, names, self.registers)
        after = Label(f"{prefix}<return>", function.line)
        statements: list = []
        for statement in read.statements:
            if isinstance(statement, Label):
                statements.append(Label(prefix + statement.name, statement.line))
            elif statement.opcode.split(".")[0] == "call":
                statements += self.call(rename.instruction(statement), stack + (function.name,))
            elif statement.opcode.split(".")[0] == "ret" and stack:
                guard = rename.guard(statement.guard)
                statements.append(Instruction("bra", (Symbol(after.name),), guard, statement.line, statement.location))
            else:
                statements.append(rename.instruction(statement))
        if stack:
            statements.append(after)
        return statements

    def call(self, call: Instruction, stack: tuple[str, ...]) -> list:
        operands = list(call.operands)
        results = operands.pop(0).elements if operands and isinstance(operands[0], List) else ()
        target = operands.pop(0) if operands else None
        arguments = operands.pop(0).elements if operands and isinstance(operands[0], List) else ()
        function = self.module.functions.get(target.name) if isinstance(target, Symbol) else None
        if function is None:
            raise self.error(f"{call.opcode} through a register is not supported", call.line)
        if function.body is None and function.name not in SYSTEM_CALLS:
            raise self.error(f"'{function.name}' is called and has no body here", call.line)
        if function.name in stack:
            raise self.error(f"'{function.name}' calls itself; recursion is not supported", call.line)
        if len(stack) >= CALL_DEPTH:
            raise self.error(
                f"a chain of more than {CALL_DEPTH} calls ends in '{function.name}'; no more are inlined", call.line
            )
        if len(arguments) != len(function.params) or len(results) != len(function.results):
            raise self.error(f"'{function.name}' is called with other arguments than it has", call.line)
        self.instances += 1
        prefix = f"{function.name}#{self.instances}:"
        if function.body is None:
            return self.system_call(prefix, function, results, arguments, call)
        names, before, behind = {}, [], []
        for parameter, argument in zip(function.params, arguments):
            if parameter.register:
                before.append(self.copy(prefix, parameter, argument, "ld", call))
                continue
            names[parameter.name] = self.pass_argument(prefix, parameter, argument, before, "st", call)
        for parameter, result in zip(function.results, results):
            if parameter.register:
                if result != Symbol("_"):
                    behind.append(self.copy(prefix, parameter, result, "st", call))
                continue
            names[parameter.name] = self.pass_argument(prefix, parameter, result, behind, "ld", call)
        statements = before + self.expand(function, prefix, names, stack) + behind
        if call.guard:
            skip = Label(f"{prefix}<skip>", call.line)
            register, negated = call.guard
            around = Instruction("bra", (Symbol(skip.name),), (register, not negated), call.line, call.location)
            statements = [around, *statements, skip]
        return statements

    def system_call(self, prefix: str, function: Function, results, arguments, call: Instruction) -> list:
        """Lower a call of a system function to one instruction, with its arguments and results in registers."""
        before, operands, behind = [], [], []

        def held(parameter, operand, verb: str, copies: list):
            if not (isinstance(operand, Symbol) and operand.name in self.parameters):
                return operand
            register = Register(prefix + parameter.name, f"b{8 * parameter.bytes}")
            self.registers[register.name] = register.type
            pair = (register, Address(operand)) if verb == "ld" else (Address(operand), register)
            copies.append(Instruction(f"{verb}.param.{register.type}", pair, call.guard, call.line, call.location))
            return register

        for parameter, result in zip(function.results, results):
            operands.append(held(parameter, result, "st", behind))
        for parameter, argument in zip(function.params, arguments):
            operands.append(held(parameter, argument, "ld", before))
        return [
            *before,
            Instruction(f"call.{function.name}", tuple(operands), call.guard, call.line, call.location),
            *behind,
        ]

    def copy(self, prefix: str, parameter, operand, verb: str, call: Instruction) -> Instruction:
        """The instruction that sets a parameter in a register before the call ("ld"), or a result behind it ("st")."""
        register = Register(prefix + parameter.name, parameter.type)
        self.registers[register.name] = register.type
        bits = TYPE_BITS[parameter.type]
        type = parameter.type if parameter.type in ("pred", "f32", "f64") else f"b{bits}"
        opcode = f"mov.{type}"
        if isinstance(operand, Symbol) and operand.name in self.parameters:
            opcode, operand = f"{verb}.param.b{bits}", Address(operand)
        pair = (register, operand) if verb == "ld" else (operand, register)
        return Instruction(opcode, pair, None, call.line, call.location)

    def pass_argument(self, prefix: str, parameter, operand, copies: list, verb: str, call: Instruction) -> Symbol:
        if isinstance(operand, Symbol) and operand.name in self.parameters:
            return operand
        unique = prefix + parameter.name
        self.locals[unique] = Variable(unique, "param", parameter.type, max(parameter.count, 1), parameter.align)
        self.parameters.add(unique)
        address = Address(Symbol(unique))
        pair = (address, operand) if verb == "st" else (operand, address)
        copies.append(Instruction(f"{verb}.param.{parameter.type}", pair, None, call.line, call.location))
        return Symbol(unique)


class _Renamer:
    """Renames one instance's registers and symbols, and records the registers."""

    def __init__(self, prefix: str, names: dict[str, Symbol], registers: dict[str, str]):
        self.prefix = prefix
        self.names = names
        self.registers = registers
        self.cache: dict[object, object] = {}

    def guard(self, guard):
        return guard and (self.operand(guard[0]), guard[1])

    def instruction(self, instruction: Instruction) -> Instruction:
        cache = self.cache
        operands, same = [], True
        for operand in instruction.operands:
            renamed = cache.get(operand)
            if renamed is None or type(renamed) is not type(operand):
                renamed = cache[operand] = self.operand(operand)
            same = same and renamed is operand
            operands.append(renamed)
        guard = self.guard(instruction.guard)
        if same and guard == instruction.guard:
            return instruction
        return Instruction(
            instruction.opcode, tuple(operands), guard, instruction.line, instruction.location, instruction.used
        )

    def operand(self, operand):
        kind = type(operand)
        if kind is Register:
            renamed = Register(self.prefix + operand.name, operand.type) if self.prefix else operand
            self.registers[renamed.name] = renamed.type
            return renamed
        if kind is Symbol:
            target = self.names.get(operand.name)
            return operand if target is None else Symbol(target.name, target.offset + operand.offset)
        if kind is Address:
            return Address(self.operand(operand.base), operand.offset)
        if kind is Vector or kind is List:
            return kind(tuple(self.operand(element) for element in operand.elements))
        if kind is Pair:
            return Pair(self.operand(operand.first), self.operand(operand.second))
        if kind is Negated:
            return Negated(self.operand(operand.register))
        return operand


# ---------------------------------------------------------------------------------------------------------------
# Parameters of calls


def _promote_parameters(statements: list, inliner: _Inliner) -> list:
    """Turn parameters of calls into registers, one for each piece that all accesses read or write as a whole.

    Parameters with other accesses stay in local memory.
    """
    if not inliner.parameters:
        return statements
    pieces: dict[str, dict[int, int]] = {}
    memory: set[str] = set()
    for statement in statements:
        if isinstance(statement, Label):
            continue
        access = _parameter_access(statement, inliner.parameters)
        for position, operand in enumerate(statement.operands):
            for symbol in _symbols(operand):
                if symbol.name in inliner.parameters and (access is None or position != access[0]):
                    memory.add(symbol.name)
        if access is None:
            continue
        _, name, offset, type, registers = access
        bits = TYPE_BITS[type]
        known = pieces.setdefault(name, {})
        for index, register in enumerate(registers):
            start = offset + index * bits // 8
            whole = bits >= 16 and (not isinstance(register, Register) or TYPE_BITS[register.type] == bits)
            if not whole or known.setdefault(start, bits) != bits:
                memory.add(name)
    for name, known in pieces.items():
        spans = sorted((start, start + bits // 8) for start, bits in known.items())
        if any(left[1] > right[0] for left, right in zip(spans, spans[1:])):
            memory.add(name)
    result = []
    for statement in statements:
        access = None if isinstance(statement, Label) else _parameter_access(statement, inliner.parameters)
        if access is None:
            result.append(statement)
            continue
        position, name, offset, type, registers = access
        if name in memory:
            words = statement.opcode.split(".")
            words[1] = "local"
            words = [word for word in words if not word.startswith("param")]
            result.append(statement._replace(opcode=".".join(words)))
            continue
        bits = TYPE_BITS[type]
        for index, register in enumerate(registers):
            piece = Register(f"{name}+{offset + index * bits // 8}", f"b{bits}")
            inliner.registers[piece.name] = piece.type
            pair = (piece, register) if position == 0 else (register, piece)
            result.append(Instruction(f"mov.b{bits}", pair, statement.guard, statement.line, statement.location))
    for name in inliner.parameters - memory:
        del inliner.locals[name]
    return result


def _parameter_access(instruction: Instruction, parameters: set[str]):
    """(position of the address, name, offset, type, registers) of a ld.param or st.param on a call's parameter."""
    words = instruction.opcode.split(".")
    if words[0] not in ("ld", "st") or len(words) < 3 or not words[1].startswith("param") or words[-1] not in TYPE_BITS:
        return None
    position = 1 if words[0] == "ld" else 0
    if len(instruction.operands) != 2 or not isinstance(instruction.operands[position], Address):
        return None
    address, value = instruction.operands[position], instruction.operands[1 - position]
    if not isinstance(address.base, Symbol) or address.base.name not in parameters:
        return None
    registers = value.elements if isinstance(value, Vector) else (value,)
    return position, address.base.name, address.base.offset + address.offset, words[-1], registers


def _symbols(operand) -> list[Symbol]:
    if isinstance(operand, Symbol):
        return [operand]
    if isinstance(operand, Address):
        return _symbols(operand.base)
    if isinstance(operand, (Vector, List)):
        return [symbol for element in operand.elements for symbol in _symbols(element)]
    return []


# ---------------------------------------------------------------------------------------------------------------
# Basic blocks


class _Draft:
    """A block under construction."""

    def __init__(self):
        self.instructions: list[Instruction] = []
        self.end: Instruction | None = None
        self.form: str = "jump"  # jump, branch, switch, exit
        self.subject: object = None
        self.successors: list["_Draft"] = []
        self.sealed = False  # ends with a blocking instruction: not to be merged with the next block


def _split(statements: list, kind: Kind, tables: dict[str, tuple[str, ...]]) -> list[_Draft]:
    """Cut statements at labels and branches; `tables` are the lists of labels that brx.idx may name."""
    by_label: dict[str, _Draft] = {}
    drafts = [_Draft()]
    pending: list[tuple[_Draft, list[str]]] = []
    kinds: dict[str, str] = {}

    def next_draft() -> _Draft:
        drafts.append(_Draft())
        return drafts[-1]

    for statement in statements:
        current = drafts[-1]
        if isinstance(statement, Label):
            if current.instructions or current.end or current.form != "jump":
                following = next_draft()
                current.successors = [following]
                current = following
            by_label[statement.name] = current
            continue
        base = statement.opcode.split(".")[0]
        if base == "bra":
            target = statement.operands[0].name
            current.end = statement
            following = next_draft()
            if statement.guard:
                current.form, current.subject = "branch", statement.guard
                pending.append((current, [target, following]))
            else:
                pending.append((current, [target]))
        elif base == "brx":
            current.end = statement
            if statement.guard:
                raise PtxSyntaxError(f"line {statement.line}: a guard on {statement.opcode} is not supported")
            current.form, current.subject = "switch", statement
            next_draft()
            pending.append((current, [statement.operands[1].name]))
        elif base in ("ret", "exit"):
            current.end = statement
            following = next_draft()
            if statement.guard:
                leave = next_draft()
                leave.form = "exit"
                drafts[-2], drafts[-1] = leave, following
                current.form, current.subject = "branch", statement.guard
                pending.append((current, [leave, following]))
            else:
                current.form = "exit"
        else:
            found = kinds.get(statement.opcode)
            if found is None:
                found = kinds[statement.opcode] = kind(statement.opcode)
            if found == "plain":
                current.instructions.append(statement)
                continue
            if statement.guard:
                register, negated = statement.guard
                guarded = next_draft()
                following = _Draft()
                current.form, current.subject = "branch", (register, negated)
                current.successors = [guarded, following]
                guarded.instructions.append(statement._replace(guard=None))
                guarded.successors = [following]
                guarded.sealed = found == "blocking"
                drafts.append(following)
            else:
                current.instructions.append(statement)
                if found == "blocking":
                    current.sealed = True
                    current.successors = [next_draft()]
    last = drafts[-1]
    if last.form == "jump" and not last.successors:
        last.form = "exit"
    for draft, targets in pending:
        if draft.form == "switch":
            if targets[0] not in tables:
                raise PtxSyntaxError(f"line {draft.subject.line}: '{targets[0]}' is no .branchtargets")
            draft.successors = [by_label[name] for name in tables[targets[0]]]
        else:
            draft.successors = [target if isinstance(target, _Draft) else by_label[target] for target in targets]
    # A draft that has no successor yet falls through to the next one.
    for draft, following in zip(drafts, drafts[1:]):
        if draft.form == "jump" and not draft.successors:
            draft.successors = [following]
    return drafts


def _reachable(start: _Draft) -> list[_Draft]:
    seen, stack, found = {id(start)}, [start], []
    while stack:
        draft = stack.pop()
        found.append(draft)
        for successor in draft.successors:
            if id(successor) not in seen:
                seen.add(id(successor))
                stack.append(successor)
    return found


def _merge(drafts: list[_Draft]) -> _Draft:
    """Skip empty blocks and join chains of blocks; return the first block."""

    def target_of(draft: _Draft) -> _Draft:
        seen = set()
        while draft.form == "jump" and not draft.instructions and not draft.end and id(draft) not in seen:
            seen.add(id(draft))
            draft = draft.successors[0]
        return draft

    start = drafts[0]
    for draft in _reachable(start):
        draft.successors = [target_of(successor) for successor in draft.successors]
    incoming: dict[int, int] = {id(start): 1}
    live = _reachable(start)
    for draft in live:
        for successor in draft.successors:
            incoming[id(successor)] = incoming.get(id(successor), 0) + 1
    for draft in live:
        while draft.form == "jump" and not draft.sealed:
            following = draft.successors[0]
            if incoming[id(following)] != 1 or following is draft:
                break
            if draft.end is not None:
                draft.instructions.append(draft.end)
            draft.instructions += following.instructions
            draft.end, draft.form, draft.subject = following.end, following.form, following.subject
            draft.successors, draft.sealed = following.successors, following.sealed
            following.instructions, following.form, following.successors = [], "merged", []
    return start


def _order(start: _Draft) -> list[Block]:
    """Number the blocks: reverse postorder, every loop before the blocks that follow it."""
    drafts = _reachable(start)
    numbers = {id(draft): index for index, draft in enumerate(drafts)}
    successors = [[numbers[id(successor)] for successor in draft.successors] for draft in drafts]
    loops = _loops(successors)
    order = _postorder(successors, lambda block, following: len(loops[block] - loops[following]))
    order.reverse()
    position = {block: index for index, block in enumerate(order)}
    blocks = []
    for block in order:
        draft = drafts[block]
        targets = [position[following] for following in successors[block]]
        terminator: Terminator
        if draft.form == "exit":
            terminator = Exit()
        elif draft.form == "branch" and targets[0] != targets[1]:
            terminator = Branch(draft.subject[0], draft.subject[1], targets[0], targets[1])
        elif draft.form == "switch":
            terminator = Switch(draft.subject.operands[0], tuple(targets))
        else:
            terminator = Jump(targets[0])
        blocks.append(Block(draft.instructions, terminator, draft.end))
    return blocks


def _postorder(successors: list[list[int]], leaving: Callable[[int, int], int]) -> list[int]:
    """Depth-first postorder from block 0. Successors that leave more loops are visited first."""
    seen, order = {0}, []
    stack = [(0, iter(sorted(successors[0], key=lambda following: -leaving(0, following))))]
    while stack:
        block, rest = stack[-1]
        for following in rest:
            if following not in seen:
                seen.add(following)
                stack.append(
                    (following, iter(sorted(successors[following], key=lambda other: -leaving(following, other))))
                )
                break
        else:
            order.append(block)
            stack.pop()
    return order


def _loops(successors: list[list[int]]) -> list[frozenset[int]]:
    """Return, for each block, the headers of the natural loops that contain it."""
    count = len(successors)
    predecessors: list[list[int]] = [[] for _ in range(count)]
    for block, targets in enumerate(successors):
        for target in targets:
            predecessors[target].append(block)
    order = _postorder(successors, lambda block, following: 0)
    rank = {block: index for index, block in enumerate(order)}
    dominator = {0: 0}
    changed = True
    while changed:
        changed = False
        for block in reversed(order):
            if block == 0:
                continue
            new = None
            for before in predecessors[block]:
                if before in dominator:
                    new = before if new is None else _common(new, before, dominator, rank)
            if dominator.get(block) != new:
                dominator[block] = new
                changed = True
    members: list[set[int]] = [set() for _ in range(count)]
    for block, targets in enumerate(successors):
        for header in targets:
            if not _dominates(header, block, dominator):
                continue
            stack, seen = [block], {header}
            while stack:
                inside = stack.pop()
                if inside not in seen:
                    seen.add(inside)
                    stack += predecessors[inside]
            for inside in seen:
                members[inside].add(header)
    return [frozenset(headers) for headers in members]


def _common(left: int, right: int, dominator: dict[int, int], rank: dict[int, int]) -> int:
    while left != right:
        while rank[left] < rank[right]:
            left = dominator[left]
        while rank[right] < rank[left]:
            right = dominator[right]
    return left


def _dominates(header: int, block: int, dominator: dict[int, int]) -> bool:
    while True:
        if block == header:
            return True
        if block == 0:
            return False
        block = dominator[block]


# ---------------------------------------------------------------------------------------------------------------
# Placing variables


def _lay_out(program: Program, inliner: _Inliner, module: Module) -> None:
    """Assign offsets to the local and shared variables that are used."""
    used: dict[str, None] = {}
    specials: set[str] = set()
    for block in program.blocks:
        for instruction in block.instructions:
            for operand in instruction.operands:
                if isinstance(operand, Special):
                    specials.add(operand.name)
                for symbol in _symbols(operand):
                    used[symbol.name] = None
    program.specials = frozenset(specials)
    offset = 0
    for name, variable in inliner.locals.items():
        if name in used:
            offset = -(-offset // variable.align) * variable.align
            program.frame[name] = offset
            offset += type_bytes(variable.type) * variable.count
    if offset > _LOCAL_BYTES:
        raise inliner.error(
            f"'{program.entry.name}' has {offset} bytes of local memory a thread; at most {_LOCAL_BYTES} are there",
            program.entry.line,
        )
    program.frame_bytes = offset
    offset, dynamic, align = 0, [], 16
    for name in used:
        variable = inliner.shared.get(name) or module.variables.get(name)
        if variable is None or variable.space != "shared":
            continue
        if variable.count == 0:
            dynamic.append(name)
            align = max(align, variable.align)
            continue
        offset = -(-offset // variable.align) * variable.align
        program.shared[name] = offset
        offset += type_bytes(variable.type) * variable.count
    program.shared_bytes = offset
    program.dynamic, program.dynamic_align = tuple(dynamic), align
    for name in dynamic:
        program.shared[name] = -(-offset // align) * align
