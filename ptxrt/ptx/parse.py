"""Parse PTX text strictly: unknown text is an error that names the line, and is never skipped.

`parse` reads the declarations of a module and only locates the bodies; `opcodes` lists the distinct opcodes of a
function; `body` reads one function. The cost of a module is one pass for comments and braces, its declarations, and
the bodies that are launched.
"""

from __future__ import annotations

import re
import struct
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from math import prod
from sys import intern
from typing import NamedTuple, Union

import numpy as np

from ..errors import PtxError, Unsupported
from .ir import (
    TYPE_BITS,
    Address,
    Function,
    Immediate,
    Instruction,
    List,
    Location,
    Module,
    Negated,
    Pair,
    Parameter,
    PtxSyntaxError,
    Register,
    Special,
    Symbol,
    Variable,
    Vector,
    type_bytes,
)  # fmt: skip

_IDENTIFIER = r"[A-Za-z_$%][\w$]*"
_COMMENT = re.compile(r'"[^"\n]*"|//[^\n]*|/\*.*?\*/', re.S)
_QUOTED_BRACE = re.compile(r'"[^"\n{}]*[{}][^"\n]*"')

#: Directives that stand before `.entry`, `.func` or a variable.
_LINKAGE = ("visible", "extern", "weak", "common")
#: Performance-tuning directives of an entry, with numbers.
_TUNING = ("maxntid", "reqntid", "minnctapersm", "maxnreg", "maxnctapersm", "reqnctapercluster", "maxclusterrank")
_FLAGS = ("noreturn", "explicitcluster", "blocksareclusters", "unified")


def _without_comments(text: str) -> str:
    """Blank comments; strings and line breaks stay."""

    def blank(match: re.Match) -> str:
        found = match.group()
        return found if found[0] == '"' else " " + "\n" * found.count("\n")

    return _COMMENT.sub(blank, text)


def parse(text: str, name: str = "<ptx>") -> Module:
    """Read the declarations of a PTX text. name: the name of the text in error messages.

    Raises PtxSyntaxError for a directive, type or form that is not known.
    """
    text = _without_comments(text.replace("\r\n", "\n").rstrip("\0"))
    reader = _ModuleReader(text, name)
    with damage(reader.error):
        return reader.read()


#: Errors of Python if a damaged text breaks an assumption of the reader.
STUMBLES = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)


@contextmanager
def damage(error: Callable[[str], Exception]) -> Iterator[None]:
    """Turn an error of Python on a damaged text into an error of this package, which names the line."""
    try:
        yield
    except PtxError:
        raise
    except STUMBLES as stumble:
        raise error(damaged(stumble)) from stumble


def damaged(stumble: Exception) -> str:
    """The message that replaces one of STUMBLES."""
    return f"the text is damaged here ({type(stumble).__name__}: {str(stumble)[:120]})"


def line_of(module: Module, position: int) -> int:
    """The line, from 1, of a position in the module's text."""
    return bisect_right(module.line_starts, position)


def source_of(module: Module, line: int) -> str:
    """` (kernel.cu:12)`: the source position of a line of the text; "" if no `.loc` of its function precedes it."""
    position = module.line_starts[line - 1] + 1
    bodies = [function.body for function in module.functions.values() if function.body is not None]
    start = max((start for start, _ in bodies if start <= position), default=position)
    marks = list(_MARK.finditer(module.text, start, module.line_starts[line - 1]))
    return f" ({module.files.get(int(marks[-1][1]), '?')}:{marks[-1][2]})" if marks else ""


_MARK = re.compile(r"\.loc\s+(\d+)\s+(\d+)")


# ---------------------------------------------------------------------------------------------------------------
# Literals and small forms

_LITERAL = (
    r"(?:0[fF](?P<single>[0-9a-fA-F]{8})|0[dD](?P<double>[0-9a-fA-F]{16})"
    r"|(?P<real>\d+\.\d*(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+)"
    r"|0[xX](?P<hex>[0-9a-fA-F]+)U?|0[bB](?P<binary>[01]+)U?|(?P<octal>0[0-7]*)U?|(?P<decimal>[1-9]\d*)U?)"
)
_NUMBER = re.compile(r"(?P<sign>-?)\s*" + _LITERAL)


def _number(text: str) -> Immediate | None:
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    kind = match.lastgroup
    digits = match[kind]
    negative = bool(match["sign"])
    if kind in ("single", "double"):
        bits = 32 if kind == "single" else 64
        return Immediate(int(digits, 16) ^ (negative << (bits - 1)), bits)
    if kind == "real":
        value = -float(digits) if negative else float(digits)
        return Immediate(struct.unpack("<Q", struct.pack("<d", value))[0], 64)
    if len(digits) > _DIGITS:
        return None
    value = int(digits, {"hex": 16, "binary": 2, "octal": 8, "decimal": 10}[kind])
    return Immediate(-value if negative else value)


_DIGITS = 80  # more than any number of 64 bits has, in any base


# ---------------------------------------------------------------------------------------------------------------
# Constant expressions (PTX ISA 4.5.4 to 4.5.6), on integers of 64 bits

_EXPRESSION = re.compile(r"[-+~!(\s]*(?:\(?\.[su]64\s*\)[-+~!(\s]*)*(?:\d|WARP_SZ\b)")  # how it begins
_TOKEN = re.compile(
    rf"\s*(?:(?P<cast>\(\s*\.[su]64\s*\))|(?P<operator><<|>>|[<>=!]=|&&|\|\||[-+*/%<>&|^~!?:()])"
    rf"|(?P<literal>{_LITERAL}(?![\w.])|WARP_SZ\b))\s*"
)
_LEVELS = {
    operator: level
    for level, operators in enumerate(("||", "&&", "|", "^", "&", "== !=", "< > <= >=", "<< >>", "+ -", "* / %"), 1)
    for operator in operators.split()
}
_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "+": int.__add__,
    "-": int.__sub__,
    "*": int.__mul__,
    "/": lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    "<": int.__lt__,
    ">": int.__gt__,
    "<=": int.__le__,
    ">=": int.__ge__,
    "==": int.__eq__,
    "!=": int.__ne__,
}
_BITWISE: dict[str, Callable[[int, int], int]] = {"&": int.__and__, "|": int.__or__, "^": int.__xor__}


class _Constant(NamedTuple):
    """An integer of 64 bits, signed or unsigned."""

    value: int
    signed: bool

    def as_signed(self, signed: bool) -> "_Constant":
        value = self.value & (1 << 64) - 1
        return _Constant(value - (1 << 64) if signed and value >> 63 else value, signed)


class _Calculator:
    """Evaluates a constant expression. Raises ValueError for any other text, ZeroDivisionError."""

    def __init__(self, text: str):
        self.tokens: list[re.Match] = []
        position = 0
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                raise ValueError(text[position:])
            self.tokens.append(match)
            position = match.end()
        self.at = 0

    def result(self) -> int:
        value = self.choice().value
        if self.at < len(self.tokens):
            raise ValueError(self.tokens[self.at][0])
        return value

    def take(self, *operators: str) -> str | None:
        """The next token if it is one of these operators, and step over it."""
        found = self.tokens[self.at]["operator"] if self.at < len(self.tokens) else None
        if found not in operators:
            return None
        self.at += 1
        return found

    def expect(self, operator: str) -> None:
        if not self.take(operator):
            raise ValueError(f"'{operator}' is missing")

    def choice(self) -> _Constant:
        """a ? b : c, or a binary expression."""
        condition = self.binary(1)
        if not self.take("?"):
            return condition
        one = self.choice()
        self.expect(":")
        other = self.choice()
        return one if condition.value else other

    def binary(self, level: int) -> _Constant:
        """Operators of this level and of those that bind closer, from left to right."""
        if level > max(_LEVELS.values()):
            return self.unary()
        left = self.binary(level + 1)
        while operator := self.take(*[each for each, its_level in _LEVELS.items() if its_level == level]):
            left = self.apply(operator, left, self.binary(level + 1))
        return left

    def apply(self, operator: str, left: _Constant, right: _Constant) -> _Constant:
        if operator in ("&&", "||"):
            truths = (left.value != 0, right.value != 0)
            return _Constant(int(all(truths) if operator == "&&" else any(truths)), True)
        if operator in ("<<", ">>"):
            count = right.value & 63
            value = left.value << count if operator == "<<" else left.value >> count
            return _Constant(value, True).as_signed(left.signed)
        if operator in _BITWISE:
            return _Constant(_BITWISE[operator](left.value, right.value), False).as_signed(False)
        if operator == "%":
            return _Constant(left.as_signed(False).value % right.as_signed(False).value, True).as_signed(True)
        signed = left.signed and right.signed
        value = int(_ARITHMETIC[operator](left.as_signed(signed).value, right.as_signed(signed).value))
        return _Constant(value, signed).as_signed(signed or operator not in ("+", "-", "*", "/"))

    def unary(self) -> _Constant:
        if self.at >= len(self.tokens):
            raise ValueError("an operand is missing")
        if operator := self.take("+", "-", "~", "!"):
            operand = self.unary()
            if operator == "!":
                return _Constant(int(operand.value == 0), True)
            if operator == "~":
                return _Constant(~operand.value, False).as_signed(False)
            return operand if operator == "+" else _Constant(-operand.value, True).as_signed(operand.signed)
        if self.take("("):
            inner = self.choice()
            self.expect(")")
            return inner
        token = self.tokens[self.at]
        self.at += 1
        if token["cast"]:
            return self.unary().as_signed("s" in token["cast"])
        literal = token["literal"] or ""
        number = Immediate(32) if literal == "WARP_SZ" else _number(literal)
        if number is None or number.float_bits:
            raise ValueError(token[0])
        signed = not literal.endswith("U") and number.value < 1 << 63
        return _Constant(number.value, signed).as_signed(signed)


def constant(text: str) -> Immediate | None:
    """The value of a constant expression of integers; None for any other text."""
    if not _EXPRESSION.match(text):
        return None
    try:
        return Immediate(_Calculator(text).result())
    except (ValueError, ZeroDivisionError, RecursionError):
        return None


class _ModuleReader:
    """Reads the top level of a text from left to right."""

    def __init__(self, text: str, name: str):
        self.text = text
        self.name = name
        self.position = 0
        self.characters = np.frombuffer(text.encode("latin-1", "replace"), np.uint8)
        starts = np.flatnonzero(self.characters == ord("\n")) + 1
        self.line_starts = array("I", [0, *starts.tolist()])
        self.closing = self._match_braces()
        self.variables: dict[str, Variable] = {}
        self.functions: dict[str, Function] = {}
        self.files: dict[int, str] = {}
        self.version = self.target = ""

    def _match_braces(self) -> dict[int, int]:
        """{position of each '{': position of its '}'}; braces in strings do not count."""
        quoted = {at for match in _QUOTED_BRACE.finditer(self.text) for at in range(*match.span())}
        closing, open_braces = {}, []
        for position in np.flatnonzero((self.characters == ord("{")) | (self.characters == ord("}"))).tolist():
            if position in quoted:
                continue
            if self.text[position] == "{":
                open_braces.append(position)
            elif open_braces:
                closing[open_braces.pop()] = position
            else:
                raise self.error("'}' without '{'", position)
        if open_braces:
            raise self.error("'{' is never closed; the text is cut off", open_braces[-1])
        return closing

    def end_of_braces(self) -> int:
        """The position of the brace that closes the one at the current position."""
        if self.position not in self.closing:
            raise self.error("'{' stands in a string that is not closed")
        return self.closing[self.position]

    def error(self, message: str, position: int | None = None) -> PtxSyntaxError:
        position = self.position if position is None else position
        return PtxSyntaxError(f"{self.name}:{bisect_right(self.line_starts, position)}: {message}")

    def match(self, pattern: str, flags: int = 0) -> re.Match | None:
        """Match a pattern at the current position and step over the match."""
        match = _compiled(pattern, flags).match(self.text, self.position)
        if match:
            self.position = match.end()
        return match

    def expect(self, pattern: str, what: str) -> re.Match:
        match = self.match(pattern)
        if match is None:
            found = self.text[self.position : self.position + 40].strip().split("\n")[0]
            raise self.error(f"expected {what}, found '{found}'")
        return match

    def read(self) -> Module:
        while not self.match(r"\s*\Z"):
            self.statement()
        if not self.version or not self.target:
            raise self.error("a PTX text starts with .version and .target; this is none", 0)
        return Module(
            self.name,
            self.text,
            self.version,
            self.target,
            self.variables,
            self.functions,
            self.files,
            self.line_starts,
        )

    def statement(self) -> None:
        self.match(r"\s*")
        start = self.position
        word = self.expect(r"\s*\.([a-z_]+)\b", "a directive")[1]
        linkage = ""
        while word in _LINKAGE:
            linkage = word
            word = self.expect(r"\s*\.([a-z_]+)\b", "a directive")[1]
        if word == "version":
            self.version = self.expect(r"\s*(\d+\.\d+)", "a version")[1]
        elif word == "target":
            self.target = self.expect(r"[ \t]*([\w, \t]+)", "a target")[1].split(",")[0].strip()
        elif word == "address_size":
            size = self.expect(r"\s*(\d+)", "an address size")[1]
            if size != "64":
                raise self.error(f"addresses of 64 bits are supported, this text has {size}")
        elif word == "file":
            match = self.expect(r'[ \t]*(\d+)[ \t]+"([^"\n]*)"[^\n]*', "a file number and name")
            self.files[int(match[1])] = match[2]
        elif word == "section":
            self.expect(r"\s*\.?[\w.]+\s*(?=\{)", "a section name and '{'")
            self.position = self.end_of_braces() + 1
        elif word == "pragma":
            self.expect(r'\s*"[^"\n]*"\s*;', 'a string and ";"')
        elif word in ("entry", "func"):
            self.function(word == "entry", linkage, start)
        elif word in ("const", "global", "shared", "local"):
            end = self.text.find(";", self.position)
            if end < 0:
                raise self.error(f"the .{word} declaration has no ';'")
            self.variable(word, self.text[self.position : end], linkage, start)
            self.position = end + 1
        else:
            raise self.error(f"the directive .{word} is not known here", start)

    def variable(self, space: str, text: str, linkage: str, start: int) -> None:
        line = bisect_right(self.line_starts, start)
        for variable in variables(space, text, linkage, line, lambda message: self.error(message, start)):
            known = self.variables.get(variable.name)
            if known is None or known.linkage == "extern":
                self.variables[variable.name] = variable

    def function(self, is_entry: bool, linkage: str, start: int) -> None:
        line = bisect_right(self.line_starts, start)
        results: tuple[Parameter, ...] = ()
        if not is_entry:
            match = self.match(r"\s*\(([^)]*)\)")
            if match:
                results = self.parameters(match[1])
        name = self.expect(rf"\s*({_IDENTIFIER})", "a name")[1]
        match = self.match(r"\s*\(([^)]*)\)")
        params = self.parameters(match[1]) if match else ()
        directives: dict[str, tuple[int, ...]] = {}
        while True:
            match = self.match(r"\s*\.([a-z]+)\b[ \t]*([\d, \t]*)")
            if match is None:
                break
            if match[1] == "pragma":
                self.expect(r'\s*"[^"\n]*"\s*;', 'a string and ";"')
            elif match[1] in _TUNING or match[1] in _FLAGS:
                directives[match[1]] = tuple(int(number) for number in match[2].replace(",", " ").split())
            else:
                raise self.error(f"the directive .{match[1]} is not known on '{name}'", match.start(1))
        function = Function(name, is_entry, params, results, directives, linkage, None, line)
        if self.match(r"\s*;"):
            self.functions.setdefault(name, function)
            return
        self.expect(r"\s*(?=\{)", "'{' and a body")
        end = self.end_of_braces()
        function.body = (self.position + 1, end)
        self.position = end + 1
        known = self.functions.get(name)
        if known is not None and known.body is not None:
            raise self.error(f"'{name}' is defined twice", start)
        self.functions[name] = function

    def parameters(self, text: str) -> tuple[Parameter, ...]:
        result, offset = [], 0
        for part in filter(None, (part.strip() for part in text.split(","))):
            parameter = read_parameter(part, offset)
            if parameter is None:
                raise self.error(f"'{part}' is no parameter")
            offset = parameter.offset + parameter.bytes
            result.append(parameter)
        return tuple(result)


@cache
def _compiled(pattern: str, flags: int) -> re.Pattern:
    return re.compile(pattern, flags)


_PARAMETER = re.compile(
    rf"\.(?P<space>param|reg)\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>\w+)\s+"
    rf"(?P<pointer>\.ptr(?:\s+\.(?:global|const|shared|local|param))?(?:\s+\.align\s+\d+)?\s+)?"
    rf"(?P<name>{_IDENTIFIER})\s*(?:\[(?P<count>\d*)\])?"
)


def read_parameter(text: str, offset: int) -> Parameter | None:
    """Read `.param .align 8 .b8 name[24]` and place it at or after `offset`; None if it is no parameter."""
    match = _PARAMETER.fullmatch(text)
    if match is None or match["type"] not in TYPE_BITS:
        return None
    if any(len(match[number] or "") > _SIZE_DIGITS for number in ("align", "count")):
        return None
    align, count = int(match["align"] or 1), int(match["count"] or 0)
    if not _is_alignment(align) or count * type_bytes(match["type"]) > _PARAMETER_BYTES:
        return None
    align = max(align, type_bytes(match["type"]))
    offset = -(-offset // align) * align
    register = match["space"] == "reg"
    return Parameter(match["name"], match["type"], count, align, offset, bool(match["pointer"]), register)


_SIZE_DIGITS = 20
_PARAMETER_BYTES = 32764  # the most that the PTX ISA allows
_VARIABLE_BYTES = 1 << 48  # more than any machine addresses


def _is_alignment(align: int) -> bool:
    return align > 0 and align & (align - 1) == 0


_VARIABLE = re.compile(
    r"\s*(?P<managed>\.attribute\(\.managed\)\s+)?(?:\.align\s+(?P<align>\d+)\s+)?(?:\.(?P<vector>v[24])\s+)?\.(?P<type>\w+)\s+(?P<rest>.*)",
    re.S,
)
_DECLARATOR = re.compile(rf"\s*(?P<name>{_IDENTIFIER})\s*(?P<dims>(?:\[\s*\d*\s*\]\s*)*)(?:=\s*(?P<init>.*))?\s*", re.S)


def variables(space: str, text: str, linkage: str, line: int, error) -> list[Variable]:
    """Read the declarations between a state space word and the semicolon."""
    match = _VARIABLE.fullmatch(text)
    if match is None or match["type"] not in TYPE_BITS:
        raise error(f"'.{space} {' '.join(text.split())[:60]}' is no variable declaration")
    lanes = int((match["vector"] or "v1")[1])
    align = int((match["align"] or "")[:_SIZE_DIGITS] or type_bytes(match["type"]) * lanes)
    if not _is_alignment(align) or align > 1 << 20:
        raise error(f"'.align {match['align']}' is no power of two that memory has")
    found = []
    for part in _split(match["rest"]):
        declarator = _DECLARATOR.fullmatch(part)
        if declarator is None:
            raise error(f"'{part.strip()[:60]}' is no variable declaration")
        sizes = re.findall(r"\[\s*(\d*)\s*\]", declarator["dims"])
        values = _initializer(declarator["init"], match["type"], error) if declarator["init"] else ()
        count = lanes
        for position, size in enumerate(sizes):
            count *= int(size[: _SIZE_DIGITS + 1]) if size else (len(values) if values and position == 0 else 0)
        if count * type_bytes(match["type"]) > _VARIABLE_BYTES:
            raise error(f"'{part.strip()[:60]}' is larger than any memory")
        if all(sizes) and len(values) > count:
            raise error(f"'{declarator['name']}' has {count} elements, and its initializer {len(values)}")
        found.append(Variable(declarator["name"], space, match["type"], count, align, values, linkage, line))
    return found


def _initializer(text: str, type: str, error) -> tuple:
    """Flatten an initializer into integers (bits) and Symbols."""
    values = []
    for item in filter(None, (item.strip() for item in text.replace("{", " ").replace("}", " ").split(","))):
        number = _number(item) or constant(item)
        if number is not None:
            values.append(_bits_as(number, type))
            continue
        match = re.fullmatch(rf"(?:generic\(\s*({_IDENTIFIER})\s*\)|({_IDENTIFIER}))\s*([+-].*)?", item, re.S)
        offset = constant(match[3] or "0") if match else None
        if offset is None:
            raise error(f"'{item}' in an initializer is not supported: expected a number, a name or generic(name)")
        values.append(Symbol(match[1] or match[2], offset.value))
    return tuple(values)


def _bits_as(number: Immediate, type: str) -> int:
    """The bits of a literal as a value of `type`."""
    if type in ("f32", "f64"):
        value = float(number.value) if not number.float_bits else float_value(number)
        with np.errstate(over="ignore"):
            return int(np.float32(value).view(np.uint32)) if type == "f32" else int(np.float64(value).view(np.uint64))
    return number.value


def float_value(number: Immediate) -> float:
    """The value of a float literal."""
    code = {32: ("<I", "<f"), 64: ("<Q", "<d")}[number.float_bits]
    return struct.unpack(code[1], struct.pack(code[0], number.value))[0]


def _split(text: str) -> list[str]:
    """Split at the commas that are outside brackets."""
    if not any(bracket in text for bracket in "{[("):
        return text.split(",")
    parts, depth, start = [], 0, 0
    for match in re.finditer(r"[{}\[\](),]", text):
        found = match.group()
        if found in "{[(":
            depth += 1
        elif found in "}])":
            depth -= 1
        elif depth == 0:
            parts.append(text[start : match.start()])
            start = match.end()
    parts.append(text[start:])
    return parts


def _opened(part: str) -> list[str]:
    """The operands in one part of an instruction: `[map, {coordinates}]` is an address and a vector."""
    part = part.strip()
    if not part.startswith("[") or "," not in part:
        return [part]
    base, *coordinates = _split(part[1:-1])
    return [f"[{base}]", *coordinates]


# ---------------------------------------------------------------------------------------------------------------
# Opcodes of a text

# A statement starts after `;`, a brace, a `.loc` line or a label. A name before `,` or `}` is an element of a vector.
_HEAD = re.compile(
    r"[;{}]\s*(?:\.loc\b[^\n]*\n\s*|[A-Za-z_$%][\w$]*\s*:(?!:)\s*)*(?:@!?[\w$%]+\s+)?([a-z]\w*(?:\.\w+(?:::\w+)*)*)(?=\s*;|\s+[^\s,}:])"
)


_BODY_DIRECTIVE = re.compile(r"[;{}\n]\s*\.([a-z]+)\b")
_BODY_DIRECTIVES = frozenset({"reg", "local", "shared", "param", "pragma", "loc", "branchtargets"})
_CALL = re.compile(r"(call(?<![\w$%.]call)(?:\.uni)?)\s+(?:\([^)]*\)\s*,\s*)?([\w$%]+)")

#: Functions without a body that the machine provides. emulator/system.py implements them.
SYSTEM_CALLS = frozenset({"vprintf", "__assertfail"})
CALL_DEPTH = 64
INLINED = 1 << 18  # the most instructions of an entry with all its calls inlined


class Uses(NamedTuple):
    """What one function uses: callees with the positions of their calls, and about how many instructions it has.

    problem: why the function itself, without its callees, cannot run; None if it can.
    """

    callees: dict[str, list[int]]
    size: int
    problem: Unsupported | None


def refusals(
    module: Module, check: Callable[[str], None], read: Callable[[Module, Function], Unsupported | None] | None = None
) -> dict[str, Unsupported]:
    """Return why entries cannot run, by name; {} if all can.

    check: raises Unsupported for an opcode that cannot run. read: reads a body and returns its problem, or None;
    without it the bodies are only searched for opcodes, directives and calls. An entry is refused if it, or a function
    that it calls, uses an unknown opcode or directive, or calls through a register or a function without a body. It is
    also refused if its calls are recursive, make a chain of more than 64 functions, or have more instructions than are
    inlined.
    """
    checked: dict[str, str | None] = {}

    def problem_of(opcode: str) -> str | None:
        if opcode not in checked:
            checked[opcode] = None
            try:
                check(opcode)
            except Unsupported as error:
                checked[opcode] = str(error)
        return checked[opcode]

    used = {
        name: _uses(module, function, problem_of)
        for name, function in module.functions.items()
        if function.body is not None
    }
    if read is not None:
        for name, uses in used.items():
            if uses.problem is None:
                used[name] = uses._replace(problem=read(module, module.functions[name]))
    found = {}
    for name in module.entries:
        problem = (
            _refusal(module, name, used)
            if name in used
            else _unsupported(module, module.functions[name].line, "has no body")
        )
        if problem is not None:
            found[name] = problem
    return found


def _unsupported(module: Module, line: int, message: str) -> Unsupported:
    return Unsupported(f"{module.name}:{line}: {message}{source_of(module, line)}", line=line)


def _uses(module: Module, function: Function, problem_of: Callable[[str], str | None]) -> Uses:
    """Find the opcodes and calls of a function, and its first problem."""
    start, end = function.body
    problems: list[tuple[int, str]] = []
    for opcode, position in opcodes(module, function).items():
        problem = problem_of(opcode)
        if problem is not None:
            problems.append((position, problem))
    for match in _BODY_DIRECTIVE.finditer(module.text, start - 1, end):
        if match[1] not in _BODY_DIRECTIVES:
            problems.append(
                (match.start(1), f"the directive .{match[1]} is not known in a function (in '{function.name}')")
            )
            break
    callees: dict[str, list[int]] = {}
    for match in _CALL.finditer(module.text, start, end):
        opcode, name = match[1], match[2]
        if name not in module.functions:
            problems.append((
                match.start(),
                f"{opcode} through '{name}' (a pointer to a function, or a virtual function) is not supported: "
                "only functions of this text are called, by their names",
            ))  # fmt: skip
        elif module.functions[name].body is None and name not in SYSTEM_CALLS:
            problems.append((match.start(), f"{opcode}: '{name}' is called and has no body here"))
        elif name not in SYSTEM_CALLS:
            callees.setdefault(name, []).append(match.start())
    if not problems:
        return Uses(callees, module.text.count(";", start, end), None)
    position, message = min(problems)
    return Uses(callees, 0, _unsupported(module, line_of(module, position), message))


def opcodes(module: Module, function: Function) -> dict[str, int]:
    """The distinct opcodes of a function with a body, each with the position of its first use."""
    found: dict[str, int] = {}
    start, end = function.body
    for match in _HEAD.finditer(module.text, start - 1, end):
        found.setdefault(match[1], match.start(1))
    return found


def _refusal(module: Module, entry: str, used: dict[str, Uses]) -> Unsupported | None:
    """Return why an entry is refused: clusters, a problem of a function that it reaches, or its calls; None if it is
    not.
    """
    function = module.functions[entry]
    blocks = prod(function.directives.get("reqnctapercluster", ()))
    if blocks > 1:
        message = (
            f"'{entry}' requires clusters of {blocks} blocks; a cluster has one block here: leave __cluster_dims__ out"
        )
        return _unsupported(module, function.line, message)
    reached = [entry]
    for name in reached:
        if used[name].problem is not None:
            return used[name].problem
        reached += [callee for callee in used[name].callees if callee not in reached]
    # Callees before callers: the length of each function's longest chain of calls, and its instructions with all calls
    # inlined.
    depth: dict[str, int] = {}
    size: dict[str, int] = {}
    path, stack = [entry], [(entry, iter(used[entry].callees.items()))]
    while stack:
        name, rest = stack[-1]
        for callee, positions in rest:
            if callee in path:
                line = line_of(module, positions[0])
                way = " and ".join(path[path.index(callee) :])
                return _unsupported(
                    module, line, f"'{callee}' calls itself, by way of {way}; recursion is not supported"
                )
            if callee not in depth:
                path.append(callee)
                stack.append((callee, iter(used[callee].callees.items())))
                break
        else:
            callees = used[name].callees
            depth[name] = 1 + max((depth[callee] for callee in callees), default=0)
            size[name] = used[name].size + sum(size[callee] * len(positions) for callee, positions in callees.items())
            stack.pop()
            path.pop()
    line = function.line
    if depth[entry] > CALL_DEPTH:
        return _unsupported(
            module,
            line,
            f"'{entry}' begins a chain of {depth[entry]} functions that call each other; at most "
            f"{CALL_DEPTH} are inlined",
        )
    if size[entry] > INLINED:
        return _unsupported(
            module,
            line,
            f"'{entry}' has about {size[entry]:.3g} instructions once its calls are inlined; at most "
            f"{INLINED} are executed",
        )
    return None


# ---------------------------------------------------------------------------------------------------------------
# Bodies


class Label(NamedTuple):
    """A label with its unique name."""

    name: str
    line: int


class Body(NamedTuple):
    """A function's body: instructions and labels in order, and its declarations."""

    statements: list[Union[Instruction, Label]]
    variables: list[Variable]  # .local .shared .param, names made unique
    tables: dict[str, tuple[str, ...]]  # .branchtargets: unique label -> unique labels


class _Scope:
    """Names declared between one pair of braces."""

    def __init__(self, parent: "_Scope" | None):
        self.parent = parent
        self.names: dict[str, Union[Register, Symbol]] = {}
        self.ranges: dict[str, tuple[int, str, str]] = {}  # prefix -> (count, type, unique prefix)
        self.members: dict[str, Register] = {}  # of ranges, those that were found
        self.labels: dict[str, str] = {}
        self.cache: dict[str, object] = {}

    def find(self, name: str) -> Union[Register, Symbol, None]:
        scope: _Scope | None = self
        while scope is not None:
            found = scope.names.get(name)
            if found is not None:
                return found
            if scope.ranges:
                found = scope.members.get(name)
                if found is not None:
                    return found
                match = _INDEXED.fullmatch(name)
                if match and match[1] in scope.ranges:
                    count, type, unique = scope.ranges[match[1]]
                    if int(match[2]) < count:
                        found = scope.members[name] = Register(unique + match[2], type)
                        return found
            scope = scope.parent
        return None

    def known(self, text: str) -> object:
        """An operand that an outer scope has read and that means the same here: a register; else None."""
        if text[:1] != "%" or "|" in text:
            return None
        scope = self
        while scope.parent is not None and not scope.ranges and text not in scope.names:
            scope = scope.parent
            found = scope.cache.get(text)
            if found is not None:
                return found
        return None

    def find_label(self, name: str) -> str | None:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.labels:
                return scope.labels[name]
            scope = scope.parent
        return None


_INDEXED = re.compile(r"(.*?)(0|[1-9]\d*)")
_STATEMENT = re.compile(
    r"""\s*(?:
      \.loc\b(?P<loc>[^\n]*)
    | (?P<brace>[{}])
    | (?P<label>[A-Za-z_$%][\w$]*)\s*:(?!:)
    | \.(?P<directive>[a-z]+)\b(?P<rest>[^;]*);
    | (?:@(?P<guard>!?\s*[\w$%]+)\s+)?(?P<opcode>[a-z][\w.:]*)(?P<operands>[^;]*);
    )""",
    re.X,
)
_LOC = re.compile(
    r"\s+(\d+)\s+(\d+)\s+(\d+)\s*(?:,\s*function_name\s+([\w$]+(?:\s*\+\s*\d+)?)\s*,\s*inlined_at\s+(\d+)\s+(\d+)\s+(\d+)\s*)?"
)
_REG = re.compile(r"\s*\.(?P<type>\w+)\s+(?P<names>.*)", re.S)
_PLUS = re.compile(rf"({_IDENTIFIER})\s*([+-].*)", re.S)
_STEP = re.compile(r"([+-])\s*(-?)\s*(0[xX][0-9a-fA-F]+|0|[1-9]\d*)")
_NAME = re.compile(_IDENTIFIER)
_SELECTED = re.compile(r"(.*[^.])\.([bh])(\d+)\s*", re.S)
#: A mask of 32 bits: which bytes of the load that follows matter. Before any other instruction the pragma has no effect
#: (PTX ISA 12, pragma strings).
_USED_BYTES = re.compile(r'"\s*used_bytes_mask\s+(0[xX][0-9a-fA-F]+|\d+)\s*"')

#: Special registers by name; those with a component carry it: tid.x.
SPECIALS = frozenset(
    [
        f"{name}.{axis}"
        for name in ("tid", "ntid", "ctaid", "nctaid", "clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid")
        for axis in "xyz"
    ]
    + "laneid warpid nwarpid smid nsmid gridid is_explicit_cluster cluster_ctarank cluster_nctarank".split()
    + [f"lanemask_{kind}" for kind in ("eq", "le", "lt", "ge", "gt")]
    + "clock clock_hi clock64 globaltimer globaltimer_lo globaltimer_hi".split()
    + "total_smem_size aggr_smem_size dynamic_smem_size reserved_smem_offset_begin reserved_smem_offset_end".split()
    + "reserved_smem_offset_cap reserved_smem_offset_0 reserved_smem_offset_1".split()
    + [f"envreg{number}" for number in range(32)]
)
_BRANCHES = ("bra", "brx")
_CLOSING = {"{": "}", "[": "]", "(": ")"}


def body(module: Module, function: Function) -> Body:
    """Read one function's body. PtxSyntaxError names the line of text that is not understood."""
    reader = _BodyReader(module, function)
    with damage(reader.error):
        return reader.read()


class _BodyReader:
    def __init__(self, module: Module, function: Function):
        self.module = module
        self.function = function
        self.statements: list[Union[Instruction, Label]] = []
        self.variables: list[Variable] = []
        self.tables: dict[str, tuple[tuple[str, ...], _Scope]] = {}
        self.branches: list[tuple[int, _Scope]] = []
        self.used: dict[str, int] = {}  # name -> how often it was declared
        self.scope = _Scope(None)
        for parameter in function.params + function.results:
            name = self.unique(parameter.name) if parameter.register else parameter.name
            self.scope.names[parameter.name] = Register(name, parameter.type) if parameter.register else Symbol(name)
        self.locations: dict[tuple[int, int, int], Location] = {}
        self.inlined: dict[
            tuple[str, tuple[int, int, int]], Location
        ] = {}  # (function, place where it is inlined) -> the location of that place
        self.places: dict[tuple[tuple[int, int, int], int], Location] = {}  # one object for equal locations
        self.location: Location | None = None
        self.used_bytes: int | None = None  # of the next load
        self.line = function.line

    def error(self, message: str) -> PtxSyntaxError:
        return PtxSyntaxError(f"{self.module.name}:{self.line}: {message} (in '{self.function.name}')")

    def read(self) -> Body:
        text, (position, end) = self.module.text, self.function.body
        line_starts = self.module.line_starts
        match = _STATEMENT.match
        while True:
            found = match(text, position, end)
            if found is None:
                break
            position = found.end()
            kind = found.lastgroup
            self.line = bisect_right(line_starts, found.start(kind))
            if kind == "operands":
                self.instruction(found)
            elif kind == "loc":
                self.loc(found["loc"])
            elif kind == "label":
                self.label(found["label"])
            elif kind == "rest":
                self.directive(found["directive"], found["rest"])
            elif found["brace"] == "{":
                self.scope = _Scope(self.scope)
            else:
                if self.scope.parent is None:
                    raise self.error("'}' without '{'")
                self.scope = self.scope.parent
        rest = text[position:end].strip()
        if rest:
            self.line = bisect_right(line_starts, text.find(rest[0], position))
            raise self.error(f"'{rest.splitlines()[0][:60]}' is not understood")
        self.resolve_labels()
        tables = {
            name: tuple(self.label_of(label, scope) for label in labels)
            for name, (labels, scope) in self.tables.items()
        }
        return Body(self.statements, self.variables, tables)

    def unique(self, name: str) -> str:
        """Make a name unique within the function, because each copy of inline assembly declares the same names."""
        number = self.used.get(name, 0) + 1
        candidate = name if number == 1 else f"{name}@{number}"
        self.used[name] = number
        return candidate

    def loc(self, text: str) -> None:
        match = _LOC.fullmatch(text)
        if match is None:
            raise self.error(f"'.loc{text}' is not understood")
        file, line, column = here = int(match[1]), int(match[2]), int(match[3])
        known = self.locations.get(here)
        outer = known.inlined_at if known is not None else None  # nvcc may repeat a position without its inlined_at
        if match[4] is not None:
            caller = (int(match[5]), int(match[6]), int(match[7]))
            # The `.loc` right before gives the inlining of that place in turn, but only once. Later it is the one that
            # was recorded for this function and place.
            if self.location is not None and self.location[:3] == caller:
                outer = self.location
            else:
                outer = self.inlined.get((match[4], caller)) or self.locations.get(caller) or Location(*caller)
            if _depth(outer) > 64:
                outer = Location(*caller)
            self.inlined[match[4], caller] = outer
        place = self.places.get((here, id(outer)))
        if place is None:
            place = self.places[here, id(outer)] = Location(file, line, column, outer)
        self.location = self.locations[here] = place

    def label(self, name: str) -> None:
        if name in self.scope.labels:
            raise self.error(f"the label '{name}' is defined twice in one scope")
        unique = self.scope.labels[name] = self.unique(name)
        self.statements.append(Label(unique, self.line))

    def directive(self, word: str, rest: str) -> None:
        if word == "reg":
            self.registers(rest)
        elif word in ("local", "shared", "param"):
            for variable in variables(word, rest, "", self.line, self.error):
                self.check_new(variable.name)
                name = self.unique(variable.name)
                self.scope.names[variable.name] = Symbol(name)
                self.variables.append(
                    Variable(
                        name,
                        word,
                        variable.type,
                        max(variable.count, 1),
                        variable.align,
                        variable.values,
                        "",
                        self.line,
                    )
                )
                if variable.count == 0 and rest.rstrip().endswith("]"):
                    raise self.error(f"'{variable.name}' has no length")
            self.scope.cache.clear()
        elif word == "branchtargets":
            if not self.statements or not isinstance(self.statements[-1], Label):
                raise self.error(".branchtargets without a label")
            self.tables[self.statements[-1].name] = (tuple(name.strip() for name in rest.split(",")), self.scope)
        elif word == "pragma":
            match = _USED_BYTES.search(rest)
            if match:
                self.used_bytes = int(match[1], 0)
        else:
            raise self.error(f"the directive .{word} is not known in a function")

    def check_new(self, name: str) -> None:
        """Raise an error for a name that this scope has declared."""
        match = _INDEXED.fullmatch(name)
        count = self.scope.ranges[match[1]][0] if match and match[1] in self.scope.ranges else 0
        if name in self.scope.names or (match and int(match[2]) < count):
            raise self.error(f"'{name}' is declared twice in one scope")

    def registers(self, rest: str) -> None:
        match = _REG.fullmatch(rest)
        if match and match["type"] in ("v2", "v4"):
            raise Unsupported(
                f"{self.module.name}:{self.line}: '.reg{rest}': registers that are vectors are not supported",
                line=self.line,
            )
        if match is None or match["type"] not in TYPE_BITS:
            raise self.error(f"'.reg{rest}' is no register declaration")
        for name in (name.strip() for name in match["names"].split(",")):
            ranged = re.fullmatch(rf"({_IDENTIFIER})<(\d+)>", name)
            if ranged:
                if ranged[1] in self.scope.ranges:
                    raise self.error(f"'{name}' is declared twice in one scope")
                self.scope.ranges[ranged[1]] = (int(ranged[2]), match["type"], self.unique(ranged[1]))
            elif _NAME.fullmatch(name):
                self.check_new(name)
                self.scope.names[name] = Register(self.unique(name), match["type"])
            else:
                raise self.error(f"'{name}' is no register name")
        self.scope.cache.clear()

    def instruction(self, found: re.Match) -> None:
        guard = None
        if found["guard"]:
            name = found["guard"]
            negated = name[0] == "!"
            register = self.scope.find(name[1:].strip() if negated else name)
            if not isinstance(register, Register) or register.type != "pred":
                raise self.error(f"the guard '@{name}' is no declared predicate")
            guard = (register, negated)
        opcode, text = found["opcode"], found["operands"].strip()
        cache = self.scope.cache
        operands, selectors = [], []
        if text:
            parts = text.split(",") if "{" not in text and "[" not in text and "(" not in text else _split(text)
            if "[" in text:
                parts = [piece for part in parts for piece in _opened(part)]
            if opcode[0] == "v" and "." in text:
                parts, selectors = self.without_selectors(opcode, parts)
            for part in parts:
                part = part.strip()
                operand = cache.get(part)
                if operand is None:
                    operand = cache[part] = self.scope.known(part) or self.operand(part)
                operands.append(operand)
            operands += selectors
            if "(" in text and not opcode.startswith("call"):  # parentheses around an expression
                operands = [_inside(operand) for operand in operands]
        if opcode.startswith(_BRANCHES):
            self.branches.append((len(self.statements), self.scope))
        used, self.used_bytes = self.used_bytes if opcode.startswith("ld") else None, None
        self.statements.append(Instruction(intern(opcode), tuple(operands), guard, self.line, self.location, used))

    def without_selectors(self, opcode: str, parts: list[str]) -> tuple[list[str], list[Immediate]]:
        """Split the operands d.b10, a.b3210, b.b7654, ... of a SIMD video instruction into operands and selectors.

        The selectors become three immediates: for d a bit for each element that is written, for a and b a hexadecimal
        digit per element.
        """
        letter, defaults = (
            ("b", ("3210", "3210", "7654")) if opcode.split(".")[0].endswith("4") else ("h", ("10", "10", "32"))
        )
        lanes, known = len(defaults[0]), set(defaults[1] + defaults[2])
        found = [_SELECTED.fullmatch(part) for part in parts[:3]]
        mask, *sources = [match[3] if match else default for match, default in zip(found, defaults)]
        if (
            any(match and match[2] != letter for match in found)
            or any(len(digits) != lanes or not known.issuperset(digits) for digits in sources)
            or list(mask) != sorted(set(mask) & set(defaults[0]), reverse=True)
        ):
            raise self.error(
                f"'{', '.join(part.strip() for part in parts)}' has a selector that {opcode} does not know"
            )
        parts = [match[1] if match else part for match, part in zip(found, parts)] + parts[3:]
        return parts, [
            Immediate(sum(1 << int(digit) for digit in mask)),
            *(Immediate(int(digits, 16)) for digits in sources),
        ]

    def operand(self, text: str):
        """One operand; names that are declared nowhere stay Symbols (labels, functions, module variables)."""
        if not text:
            raise self.error("an operand is missing")
        first = text[0]
        if first == "%" and "|" not in text:
            return self.register(text)
        number = _number(text)
        if number is None and first != "[" and not (first == "(" and _in_parentheses(text)):
            number = constant(text)
        if number is not None:
            return number
        if first in _CLOSING and (text[-1] != _CLOSING[first] or len(text) < 2):
            raise self.error(f"the operand '{text[:60]}' is not closed by '{_CLOSING[first]}'")
        if first == "{":
            elements = tuple(self.operand(part.strip()) for part in _split(text[1:-1]))
            if any(isinstance(element, (Vector, Address, List, Pair)) for element in elements):
                raise self.error(f"the vector '{text[:60]}' has elements that are no registers or numbers")
            return Vector(elements)
        if first == "[":
            return self.address(text[1:-1].strip())
        if first == "(":
            inner = text[1:-1].strip()
            return List(tuple(self.operand(part.strip()) for part in _split(inner)) if inner else ())
        if first == "!":
            register = self.operand(text[1:].strip())
            if not isinstance(register, Register) or register.type != "pred":
                raise self.error(f"'{text}' is no predicate")
            return Negated(register)
        if "|" in text:
            left, right = text.split("|", 1)
            return Pair(self.operand(left.strip()), self.operand(right.strip()))
        if _NAME.fullmatch(text):
            return self.scope.find(text) or Symbol(text)
        match = _PLUS.fullmatch(text)
        if match:
            base, offset = self.scope.find(match[1]) or Symbol(match[1]), _displacement(match[2])
            if isinstance(base, Symbol) and offset is not None:
                return Symbol(base.name, base.offset + offset)
        raise self.error(f"the operand '{text}' is not understood")

    def register(self, text: str) -> Union[Register, Symbol, Special]:
        """The register of a name that begins with %, declared or special."""
        if text[1:] in SPECIALS:
            return Special(text[1:])
        register = self.scope.find(text)
        if register is None:
            raise self.error(f"the register '{text}' is not declared and no special register that is known")
        return register

    def address(self, text: str) -> Address:
        match = _PLUS.fullmatch(text)
        base, offset = (self.operand(match[1]), _displacement(match[2])) if match else (self.operand(text), 0)
        if offset is None:
            raise self.error(f"the displacement of '[{text[:60]}]' is not understood")
        if isinstance(base, Symbol):
            return Address(Symbol(base.name), base.offset + offset)
        if not isinstance(base, (Register, Immediate)):
            raise self.error(f"the address '[{text}]' is not supported")
        return Address(base, offset)

    def label_of(self, name: str, scope: _Scope) -> str:
        label = scope.find_label(name)
        if label is None:
            raise self.error(f"the label '{name}' is not defined")
        return label

    def resolve_labels(self) -> None:
        """Replace the labels of branches by their unique names. A branch may name a label further down in its scope."""
        for index, scope in self.branches:
            instruction = self.statements[index]
            self.line = instruction.line
            targets = [operand for operand in instruction.operands if isinstance(operand, Symbol)]
            expected = 2 if instruction.opcode.startswith("brx") else 1
            if len(instruction.operands) != expected or not targets or instruction.operands[-1] is not targets[-1]:
                raise self.error(f"{instruction.opcode} names no label")
            operands = tuple(
                Symbol(self.label_of(operand.name, scope)) if isinstance(operand, Symbol) else operand
                for operand in instruction.operands
            )
            self.statements[index] = instruction._replace(operands=operands)


def _displacement(text: str) -> int | None:
    """The value of `+ 4`, `+-4` or `- 2*4` behind a name; None if it is no constant expression."""
    simple = _STEP.fullmatch(text)
    if simple:
        return int(simple[3], 0) * (1 if (simple[1] == "-") == bool(simple[2]) else -1)
    found = constant(text)
    return None if found is None else found.value


def _in_parentheses(text: str) -> bool:
    """Whether the parenthesis at the start of a text is closed at its end."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return position == len(text) - 1
    return False


def _inside(operand):
    """The operand in parentheses, alone; any other operand unchanged."""
    while isinstance(operand, List) and len(operand.elements) == 1:
        operand = operand.elements[0]
    return operand


def _depth(location: Location | None) -> int:
    depth = 0
    while location is not None:
        location, depth = location.inlined_at, depth + 1
    return depth
