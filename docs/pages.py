"""Reads the pages of this folder as programs: their code blocks, requirements, and links. For the tests and
docs/figures.py.

A fence is one of

- ```` ```python ````: runs, in order, in one namespace for the page. A ```` ```text ```` fence directly after it is its
  output;
- ```` ```console ````: each line after `$ ` is a command, the lines below it are its output;
- any fence with `title="PATH"`: is written to that file, in the folder in which the page runs.

`...` in an output matches anything. The comment `<!-- needs: gpu, torch -->` above a fence names its requirements; the
fence runs only if all are met.
"""

from __future__ import annotations

import contextlib
import doctest
import functools
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
# Fences that run; others are pictures, grammars and so on.
_RUN = ("python", "console")
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[\w-]*)(?P<rest>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```$", re.M | re.S
)
_NEEDS = re.compile(r"<!-- needs: ([\w, ]+) -->\s*$")
_CHECKER = doctest.OutputChecker()


class Wrong(AssertionError):
    """The output of a block differs from its page."""


@dataclass(frozen=True)
class Block:
    """One fence: its language, its text, the page line where the text begins, and the output and requirements given
    around it."""

    language: str
    text: str
    line: int
    needs: frozenset[str]
    title: str | None
    output: str | None


def pages() -> list[Path]:
    """Return all pages written by hand, with README.md; generated pages have no blocks that run."""
    return sorted({*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"})


def blocks(page: Path) -> list[Block]:
    """Return the fences of a page, each with the output that follows it."""
    text = page.read_text(encoding="utf-8")
    found = list(_FENCE.finditer(text))
    result = []
    for match, following in zip(found, [*found[1:], None]):
        needs = _NEEDS.search(text[: match.start()])
        title = re.search(r'title="([^"]+)"', match["rest"])
        output = None
        if (
            following is not None
            and following["language"] == "text"
            and not text[match.end() : following.start()].strip()
        ):
            output = following["text"]
        line = text.count("\n", 0, match.start("text")) + 1
        names = frozenset(name.strip() for name in needs[1].split(",")) if needs else frozenset()
        result.append(Block(match["language"], match["text"], line, names, title and title[1], output))
    return [block for block in result if block.language in _RUN or block.title]


def is_here(need: str) -> bool:
    """Return whether this machine meets a requirement."""
    if need == "gpu":
        import ptxrt

        return any(machine.available for name, machine in ptxrt.machines().items() if name != "emulator")
    if need == "compiler":
        return nvcc() is not None
    if need == "disassembler":
        from ptxrt.disassembly import find_disassembler
        from ptxrt.errors import BuildError

        with contextlib.suppress(BuildError):
            return bool(find_disassembler())
        return False
    if need == "network":
        return False
    return importlib.util.find_spec(need) is not None


@functools.cache
def nvcc() -> str | None:
    """Return the compiler that build.py uses; it need not be on the path."""
    spec = importlib.util.spec_from_file_location("build_of_pages", ROOT / "build.py")
    build = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    with contextlib.suppress(build.ToolchainMissing):
        return str(build.find_toolchain().nvcc)
    return None


def run(page: Path, folder: Path, needs: frozenset[str] = frozenset()) -> int:
    """Run the blocks of a page whose requirements are in `needs`, in a folder; return their number. Raises Wrong, or
    what a block raises.
    """
    names: dict = {"__name__": "__page__"}
    count = 0
    for block in blocks(page):
        if not block.needs <= needs:
            continue
        count += 1
        if block.title:
            target = folder / block.title
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            _compare(page, block.line, block.output, _printed(page, block, names))
        else:
            for line, command, output in commands(block):
                _compare(page, line, output, _answer(page, line, command, folder))
    return count


def _printed(page: Path, block: Block, names: dict) -> str:
    """Run a Python block and return what it prints. Line numbers in tracebacks are those of the page."""
    code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, names)
    return out.getvalue()


def commands(block: Block) -> Iterator[tuple[int, str, str]]:
    """Yield the commands of a console block: line of the page, command, and the output on the page."""
    command, line, shown = None, 0, []
    for number, text in enumerate(block.text.splitlines(), block.line):
        if text.startswith("$ "):
            if command is not None:
                yield line, command, "".join(shown)
            command, line, shown = text[2:], number, []
        else:
            shown.append(text + "\n")
    if command is not None:
        yield line, command, "".join(shown)


def _answer(page: Path, line: int, command: str, folder: Path) -> str:
    """Run a command and return what it prints. `ptxrt` runs in this process, which saves its start."""
    words = shlex.split(command.partition("  #")[0])
    if words[0] == "ptxrt":
        from click.testing import CliRunner

        from ptxrt.commands import main

        done = CliRunner().invoke(main, words[1:], env={"COLUMNS": "120"}, catch_exceptions=False)
        status, output = done.exit_code, done.output
    else:
        here = {"python": sys.executable, "nvcc": nvcc() if words[0] == "nvcc" else None}
        words = [here.get(word) or word for word in words]
        made = subprocess.run(
            words, cwd=folder, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(folder)}
        )
        status, output = made.returncode, made.stdout + made.stderr
    if status:
        raise Wrong(f"{page.name}:{line}: `{command}` exits with {status}:\n{output[-2000:]}")
    return output


def _compare(page: Path, line: int, shown: str | None, printed: str) -> None:
    """Compare what a block printed with its page."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    if shown and not _CHECKER.check_output(shown, printed, flags):
        raise Wrong(f"{page.relative_to(ROOT)}:{line} prints\n{printed}\nThe page shows\n{shown}")


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as MkDocs makes them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?) *$", _FENCE.sub("", page.read_text(encoding="utf-8")), re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        name = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain.encode("ascii", "ignore").decode()).strip().lower())
        unique, number = name, 0
        while unique in found:
            number += 1
            unique = f"{name}_{number}"
        found.add(unique)
    return found


def links(page: Path) -> list[tuple[int, str]]:
    """Return the relative links and pictures of a page: line and target."""
    text = _FENCE.sub(lambda match: "\n" * match[0].count("\n"), page.read_text(encoding="utf-8"))
    text = re.sub(r"`[^`\n]*`", "", text)
    found = [(text.count("\n", 0, match.start()) + 1, match[1]) for match in re.finditer(r"\]\(([^)\s]+)\)", text)]
    return [(line, target) for line, target in found if not re.match(r"[a-z]+:", target)]


def broken_links(page: Path) -> list[str]:
    """Return the errors in the links of a page, one line for each."""
    wrong = []
    for line, target in links(page):
        path, _, anchor = target.partition("#")
        to = (page.parent / path).resolve() if path else page
        if not to.exists():
            wrong.append(f"{page.relative_to(ROOT)}:{line}: {target} is not there")
        elif anchor and to.suffix == ".md" and anchor not in anchors(to):
            wrong.append(f"{page.relative_to(ROOT)}:{line}: {to.name} has no heading #{anchor}")
    return wrong


def navigation() -> list[str]:
    """Return the pages that mkdocs.yml lists, in order."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    return re.findall(r"^ +- (?:[^:\n]+: )?([\w/]+\.md)$", text, re.M)
