"""Write the Python function of a basic block over NumPy vectors.

`BlockWriter` turns the decoded instructions of a block (decode.py) into one function of (R, K, M): the register rows,
the uniform values, and the executing threads. translate.py compiles it, machine.py calls it; the helpers that it calls
are in calls.py. Every array has one element per thread. A register that lives across blocks is a row of a (rows, lanes)
array. A register of one block is a local variable of the function; its name is reused when the value is dead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..ptx.ir import Address, Immediate, Instruction, Negated, Register, Special, Symbol, Vector
from ..ptx.lower import Branch, Switch
from .decode import KINDS, SIZES, UNSIGNED, WIDTHS, Decoded, register_bytes
from .instruction import Operand, Semantics

if TYPE_CHECKING:
    from .translate import Translator

#: Special registers with one value for all threads of a launch.
UNIFORM_SPECIALS = frozenset(
    [f"{name}.{axis}" for name in ("ntid", "nctaid", "cluster_ctaid", "cluster_nctaid", "nclusterid") for axis in "xyz"]
    + "nwarpid nsmid gridid is_explicit_cluster cluster_ctarank cluster_nctarank".split()
    + "total_smem_size aggr_smem_size dynamic_smem_size reserved_smem_offset_begin reserved_smem_offset_end".split()
    + "reserved_smem_offset_cap reserved_smem_offset_0 reserved_smem_offset_1".split()
    + [f"envreg{number}" for number in range(32)]
)


class _Value:
    """The value of a block-local register: kind -> the name of the variable that holds this view of it."""

    __slots__ = ("views", "version")

    def __init__(self, views: dict[str, str], version: int):
        self.views = views
        self.version = version


class BlockWriter:
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
        self.uniform_names: dict[int, str] = {}  # slot -> name
        self.special_names: dict[tuple[str, str], str] = {}
        self.values: dict[str, _Value] = {}  # block-local registers
        self.row_cache: dict[str, dict[str, str]] = {}  # narrowed or derived copies of rows
        self.versions: dict[str, int] = {}
        self.prepared: dict[object, str] = {}
        self.free_names: list[str] = []
        self.name_count = 0
        self.current: Instruction | None = None

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
        """The source of the function of the block; it returns the predicate of a branch, the index of a switch or
        None."""
        self.last_use, self.row_writes = {}, {}
        for position, item in enumerate(self.items):
            if item.uniform:
                continue
            for register in item.reads:
                self.last_use[register.name] = position
            for register in item.writes:
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
            if self.translator.number_of is not None:
                self.emit(f"mark({self.translator.number_of(item.instruction)})")
            self.translate_item(item)
            for register in set(item.reads) | set(item.writes):
                if self.last_use.get(register.name) == position and register.name in self.values:
                    self.release(self.values.pop(register.name))
        self.position = len(self.items)
        self.current = self.block.end or (self.items[-1].instruction if self.items else None)
        if ending is not None:
            kind = "b1" if isinstance(self.block.terminator, Branch) else "u4"
            self.emit(f"return {self.view(ending, kind)}")
        return self.finish()

    def find_prepared(self) -> None:
        """Find the last use of each prepared operand, which frees its variable."""
        self.prepared_last: dict[object, int] = {}
        versions: dict[str, int] = {}
        for position, item in enumerate(self.items):
            if item.uniform:
                continue
            prepare = item.semantics.option("prepare") if item.semantics else None
            for prepared, source in zip(prepare or (), item.sources):
                if prepared is not None:
                    elements = source.elements if isinstance(source, Vector) else (source,)
                    key = (
                        prepared,
                        tuple((e.name, versions.get(e.name, 0)) if isinstance(e, Register) else e for e in elements),
                    )
                    self.prepared_last[key] = position
            for register in item.writes:
                versions[register.name] = versions.get(register.name, 0) + 1

    def subject(self):
        terminator = self.block.terminator
        if isinstance(terminator, Branch):
            return terminator.predicate
        return terminator.index if isinstance(terminator, Switch) else None

    def finish(self) -> str:
        """The source of the function: look-ups of rows, uniform values and special registers, then the body."""
        head = ["def block(R, K, M):"]
        for kind, rows in _grouped(self.row_views).items():
            head.append(self.look_up([f"{kind}_{row}" for row in rows], f"R.{kind}", rows))
        if self.uniform_names:
            head.append(self.look_up(list(self.uniform_names.values()), "K", tuple(self.uniform_names)))
        head += [f" {name} = M.special('{special}', '{kind}')" for (special, kind), name in self.special_names.items()]
        shift = len(head)
        self.line_map = {line + shift: instruction for line, instruction in self.line_map.items()}
        return "\n".join(head + [" " + line for line in self.lines] + [" return None", ""])

    def look_up(self, names: list[str], source: str, places: tuple[int, ...]) -> str:
        """A line that assigns elements of a list or dict to names. One call for all: an assignment for each would be a
        quarter of what is compiled."""
        if len(names) == 1:
            return f" {names[0]} = {source}[{places[0]}]"
        return f" {', '.join(names)} = {self.translator.getter(places)}({source})"

    # -- sources ------------------------------------------------------------------------------------------------

    def row(self, register: Register, kind: str, write: bool = False) -> str:
        translator = self.translator
        row = translator.row_of[register.name]
        unsigned = UNSIGNED[register_bytes(register.type)]
        self.row_views.add((kind, row))
        (self.written_rows if write else self.read_rows).add((unsigned, row))
        return f"{kind}_{row}"

    def is_row(self, register: Register) -> bool:
        return self.translator.lives(register.name, self.index)

    def view(self, operand, kind: str) -> str:
        """An expression for an operand as an array (or 0-d array) of a kind; emits conversions first."""
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
        width = WIDTHS[register.type]
        size = SIZES[kind]
        if register.name in translator.uniform:
            slot = translator.uniform_slot(register.name, kind)
            if slot not in self.uniform_names:
                self.uniform_names[slot] = f"q{len(self.uniform_names)}"
            return self.uniform_names[slot]
        if self.is_row(register):
            if size == width:
                return self.row(register, kind)
            cache = self.row_cache.setdefault(register.name, {})
            if kind not in cache:
                # The copy is valid until the row is written again (see `assigned`).
                self.emit_narrow(cache, self.row(register, UNSIGNED[width]), kind, size)
            return cache[kind]
        value = self.values.get(register.name)
        if value is None:
            # An uninitialized register: any value is correct.
            value = self.values[register.name] = _Value({}, 0)
            name = self.fresh()
            unsigned = UNSIGNED[width]
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
        unsigned = first if first_kind[0] == "u" else self.register_view(register, UNSIGNED[width])
        self.emit_narrow(value.views, unsigned, kind, size)
        return value.views[kind]

    def emit_narrow(self, cache: dict[str, str], source: str, kind: str, size: int) -> None:
        name = self.fresh()
        unsigned = f"u{size}"
        self.emit(f"{name} = {source}.astype('{unsigned}')" + (f".view('{kind}')" if kind != unsigned else ""))
        cache[kind] = name

    def is_scalar(self, operand) -> bool:
        """Whether the expression of an operand is 0-d: all threads share the value."""
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
        if (
            spec.optional
            and isinstance(operand, (Register, Negated))
            and getattr(operand, "register", operand).type == "pred"
        ):
            return self.view(operand, "b1")  # cp.async: a size or a predicate; the opcode does not determine which
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
            if self.is_scalar(base):
                name = f"full(M.count, {name}, '{kind}')"
            return name
        value = translator.constant_value(base, "u8", self.current) + operand.offset
        kind = "u4" if spec.type in ("shared", "local") and 0 <= value < 1 << 32 else "u8"
        return f"full(M.count, {translator.constant(value, kind)}, '{kind}')"

    # -- destinations -------------------------------------------------------------------------------------------

    def assigned(self, register: Register) -> None:
        """A register gets a new value: drop the copies that were derived from the old one."""
        self.versions[register.name] = self.versions.get(register.name, 0) + 1
        for name in self.row_cache.pop(register.name, {}).values():
            self.free_names.append(name)

    def result_kind(self, register: Register, type: str) -> tuple[str, str]:
        """(kind of the result, kind of the register view that it is stored to)."""
        kind = KINDS[type]
        width = WIDTHS[register.type]
        if width == 0:
            return "b1", "b1"
        size = int(kind[1:])
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
        """Assign an expression of `type` to a register where a predicate holds."""
        if not isinstance(register, Register):
            return
        kind, target = self.result_kind(register, type)
        if kind != target and kind[0] == "f":
            expression = f"{expression}.view('u{kind[1:]}')"
        if self.is_row(register):
            self.emit(
                f"copyto({self.row(register, target, write=True)}, {expression}, where={predicate}, casting='unsafe')"
            )
            self.row(register, target)
            self.assigned(register)
            return
        old = self.register_view(register, target)
        name = self.fresh()
        self.emit(
            f"{name} = where({predicate}, {expression}, {old})" + (f".astype('{target}')" if kind != target else "")
        )
        self.assigned(register)
        value = self.values.pop(register.name, None)
        if value:
            self.release(value)
        self.values[register.name] = _Value({target: name}, 0)

    def alias_is_safe(self, operand) -> bool:
        """Whether the array of a source is unchanged in the rest of the block, so that a register may alias it."""
        if not isinstance(operand, Register) or operand.name in self.translator.uniform:
            return True
        if self.is_row(operand):
            return not any(position >= self.position for position in self.row_writes.get(operand.name, ()))
        return True

    # -- instructions -------------------------------------------------------------------------------------------

    def translate_item(self, item: Decoded) -> None:
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

    def guard_name(self, item: Decoded) -> str | None:
        if item.instruction.guard is None:
            return None
        register, negated = item.instruction.guard
        name = self.view(register, "b1")
        return f"lnot({name})" if negated else name

    def translate_mov(self, item: Decoded) -> None:
        guard = self.guard_name(item)
        words = item.instruction.opcode.split(".")
        size = register_bytes(words[1])
        targets, sources = item.destinations, item.sources
        if len(targets) == len(sources) == 1:
            source = sources[0]
            kind = UNSIGNED[size]
            if (
                isinstance(source, Register)
                and source.name in self.values
                and not guard
                and not self.is_row(targets[0])
            ):
                kind = next(
                    known
                    for known in self.values[source.name].views
                    if (0 if known == "b1" else int(known[1:])) == size
                )
            type = {"b1": "pred", "u": f"u{8 * size}", "i": f"s{8 * size}", "f": f"f{8 * size}"}[
                "b1" if kind == "b1" else kind[0]
            ]
            expression = self.view(source, kind)
            if self.loose(source) and isinstance(targets[0], Register) and not self.loose(targets[0]):
                type = f"u{8 * size}"
                expression = f"canonical({self.view(source, f'f{size}')}).view('{UNSIGNED[size]}')"
            if guard:
                self.store_guarded(targets[0], type, expression, guard)
                return
            if not self.is_row(targets[0]) and not self.is_scalar(source) and not self.alias_is_safe(source):
                expression += ".copy()"
            self.store(targets[0], type, expression, self.is_scalar(source))
            return
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
                piece = f"{fetch(source, UNSIGNED[part])}.astype('u{size}')"
                if position:
                    piece = f"({piece} << {self.translator.constant(8 * part * position, f'u{size}')})"
                pieces.append(piece)
            names = [" | ".join(pieces)]
            types = [f"u{8 * size}"]
        else:
            part = size // len(targets)
            whole = fetch(sources[0], UNSIGNED[size])
            types = [f"u{8 * part}"] * len(targets)
            for position, target in enumerate(targets):
                if not isinstance(target, Register):
                    names.append("")
                    continue
                piece = (
                    f"({whole} >> {self.translator.constant(8 * part * position, f'u{size}')})" if position else whole
                )
                name = self.fresh()
                self.emit(f"{name} = {piece}.astype('u{part}')")
                names.append(name)
        for target, type, name in zip(targets, types, names):
            if isinstance(target, Register):
                if guard:
                    self.store_guarded(target, type, f"({name})", guard)
                else:
                    self.store(target, type, f"({name})", scalar)

    def arguments(self, item: Decoded, dense: bool) -> list[str]:
        """The argument expressions of a call; `dense` makes every register operand a full array."""
        semantics = item.semantics
        arguments = []
        for spec, source in zip(semantics.sources, item.sources):
            if source is None:
                arguments.append("None")
            elif spec.count:
                parts = [
                    self.dense(self.source(element, spec, semantics), element, spec, dense)
                    for element in source.elements
                ]
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

    def translate_lanes(self, item: Decoded) -> None:
        """A call on all executing threads; a guard selects which results are stored."""
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

    def translate_results(
        self, item: Decoded, call: str, types: list[str], guard: str | None, scalar: bool = False
    ) -> None:
        """Assign the tuple that a call returns."""
        if not item.destinations:
            self.emit(call)
            return
        names = [self.fresh() for _ in item.destinations]
        self.emit(f"{', '.join(names)}{',' if len(names) == 1 else ''} = {call}")
        read = {register.name for register in item.reads}
        for position, (register, name) in enumerate(zip(item.destinations, names)):
            # A result may alias a source: copy it before a destination overwrites that source.
            if position and isinstance(register, Register) and any(earlier.name in read for earlier in item.writes):
                self.emit(f"{name} = {name}.copy()")
        for register, type, name in zip(item.destinations, types, names):
            if guard:
                self.store_guarded(register, type, name, guard)
            else:
                self.store(register, type, name, scalar)
        self.free_names += names

    def translate_warps(self, item: Decoded) -> None:
        """A call of `calls.warps`. Prepared operands that a later instruction uses, too, stay in a variable."""
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

    def translate_memory(self, item: Decoded) -> None:
        """A call with the memory of the executing threads; with a guard, only for the threads where it holds."""
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
                self.store(item.destinations[0], types[0], call, False) if isinstance(
                    item.destinations[0], Register
                ) else self.emit(call)
            else:
                self.translate_results(item, call, types, None)
            return
        group = self.fresh()
        # Views of the destinations are made before the branch, on which both paths depend.
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

    def translate_blocking(self, item: Decoded) -> None:
        """A call of `calls.blocking`. The instruction writes its destinations itself, as rows, maybe after a wait."""
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
