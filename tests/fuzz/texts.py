"""Damaged PTX texts: loading and launching a damaged text succeeds or raises an error of this package.

`run(seed, count)` makes `count` mutants of the committed texts, loads each, translates every entry and launches it
under a small instruction budget. `check(text)` does that for one text.
"""

from __future__ import annotations

import random
import re
from functools import lru_cache
from pathlib import Path

from ptxrt.emulator import Emulator
from ptxrt.errors import PtxError, PtxSyntaxError

from .engine import Kind

DATA = Path(__file__).resolve().parent.parent / "data"
TEXTS = ("control.ptx", "features.ptx", "atomics.ptx", "async.ptx", "faults.ptx")
_LARGEST = 9000  # longest entry that is damaged, in characters
_HEADER = ".version 9.0\n.target sm_120f\n.address_size 64\n"

#: Text pieces to insert or substitute.
_PIECES = [
    "", " ", ";", ",", "{", "}", "[", "]", "(", ")", "|", "!", "@", "%", "+", "-", ":", "\n", "\0", '"', "//", "/*", "\\", "\xff", "0", "1",
    "-1", "08", "0x", "1e999", "0fFFFFFFFF", "0d7FF8000000000000", "18446744073709551616", "9" * 400, "%r1", "%rd1", "%p1", "%tid.x", "_",
    ".b32", ".pred", ".b128", ".f64", ".v4", ".param", ".shared", ".local", ".align 3", ".align 0", "[0]", "[99999999999999999999]", "{%r1}",
    "{%r1, %r2, %r3}", "%r1|%p1|%r2", "[%rd1+%rd2]", "[[%rd1]]", "ret;", "exit;", "bra", "bra %r1;", "call k;", "brx.idx", "mov.b32 %r1, {%r1};",
    ".reg .b32 %r<99999999999>;", ".local .b8 big[99999999999];", ".branchtargets", ".loc 1 2 3", ".pragma", ".entry k()", ".func f",
]  # fmt: skip


def sources() -> list[str]:
    """The entries of the committed texts, each with the declarations of its text."""
    found = []
    for name in TEXTS:
        text = (DATA / name).read_text(encoding="utf-8")
        start = text.index(".version")
        parts = re.split(r"(?m)^(?=\.(?:visible \.entry|weak \.entry|func|visible \.func))", text[start:])
        for part in parts[1:]:
            if part.startswith((".visible .entry", ".weak .entry")) and len(part) < _LARGEST:
                found.append(
                    parts[0]
                    + "".join(each for each in parts[1:] if each.startswith((".func", ".visible .func")))
                    + part
                )
    return found


def _kind(word: str) -> str:
    """The lexical kind of a word."""
    if word[0] in "%.":
        return word[0]
    return "number" if word[0].isdigit() else "opcode" if "." in word else "name"


def mutant(source: str, random: random.Random) -> str:
    """A text with one to four changes: parts removed, repeated, replaced or inserted."""
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        tokens = re.findall(r"\s+|[\w.$%]+|.", source) or ["0"]
        at = random.randrange(len(tokens))
        kind = random.randrange(14)
        if kind == 0:
            tokens[at] = ""
        elif kind == 1:
            tokens[at] = random.choice(_PIECES)
        elif kind == 2:
            tokens.insert(at, random.choice(_PIECES))
        elif kind == 3:
            tokens[at] = random.choice(tokens)
        elif kind == 4:
            end = min(len(tokens), at + random.randrange(1, 40))
            del tokens[at:end]
        elif kind == 5:
            tokens[at] *= random.choice((2, 3, 100))
        elif kind == 6:
            del tokens[at:]
        else:  # replace a word by another of its kind: a register, an opcode, a number, a name
            words = [place for place, token in enumerate(tokens) if re.fullmatch(r"[\w.$%]+", token)] or [at]
            at = random.choice(words)
            like = [tokens[place] for place in words if _kind(tokens[place]) == _kind(tokens[at])]
            tokens[at] = random.choice(like)
        source = "".join(tokens)
    return source


def check(text: str, name: str = "mutant.ptx") -> str:
    """Load, translate and launch a text. Return "ran" or the name of this package's error; raise any other error.

    A PtxSyntaxError that names no line raises AssertionError.
    """
    emulator = Emulator(budget=3000, timeout=5, lanes=64)
    try:
        module = emulator.load_text(text, name, whole=True)
        for entry in module.entries:
            code = module.code(entry)
            for number in range(len(code.blocks)):
                code.compiled(number)
    except PtxError as error:
        if isinstance(error, PtxSyntaxError):
            assert re.match(rf"{re.escape(name)}:\d+: ", str(error)), f"no line: {error}"
        return type(error).__name__
    try:
        for function in module.entries.values():
            block = (function.directives.get("reqntid") or (32,))[0]
            emulator.launch(function, 1, max(1, min(block, 64)), 256, bytes(function.param_bytes))
    except PtxError as error:
        assert "stopped the emulator" not in str(error), str(error)
        return type(error).__name__
    return "ran"


def run(seed: int, count: int) -> dict[str, int]:
    """Check `count` mutants and count their outcomes. A failure names the seed of its mutant."""
    base, counts = sources(), {}
    for number in range(count):
        each = random.Random(f"{seed}-{number}")
        text = mutant(each.choice(base), each)
        try:
            came = check(text)
        except Exception as error:
            raise AssertionError(
                f"mutant {number} of seed {seed}: {type(error).__name__}: {error}\n"
                f"check(mutant(...)) of tests/fuzz/texts.py with random.Random('{seed}-{number}') gives the text"
            ) from error
        counts[came] = counts.get(came, 0) + 1
    return counts


def draw(random: random.Random) -> dict:
    """Draw a recipe of one damaged text, by lines."""
    return dict(lines=mutant(random.choice(_sources()), random).split("\n"), odd="a damaged text")


_sources = lru_cache(maxsize=None)(sources)


def program(recipe: dict) -> str:
    """Loading and launching a text, as code."""
    lines = "".join(f"    {line!r},\n" for line in recipe["lines"])
    return f"from tests.fuzz import texts\nlines = [\n{lines}]\ncame = texts.check('\\n'.join(lines))"


def came_to_an_end(names: dict) -> None:
    """Check that a text ran or raised an error of this package."""
    assert names["came"]


KIND = Kind("texts", draw, program, came_to_an_end, needed=("lines",))
