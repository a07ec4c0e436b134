"""Run the tests that launch kernels and print how much of each kernel's PTX they executed: `make coverage`.

    python tests/ptx_coverage.py [--only KERNEL]... [--jobs N] [TEST FILE]...

Every test file runs but those of LEFT_OUT, so that a new one counts from the start. Each has a pytest process of its
own, `--jobs` of them at a time, and a line when it is done. Its counts stay in .coverage-ptx/NAME. With `--only`, or
`make coverage KERNEL=NAME`, the report is of that kernel (a pattern such as 'append_*' names several). Then of
test_kernels.py only the kernel's own cases run, and of the other files those that launched the kernel when they last
ran here, or that never did.

Three figures for each kernel, of its native and of its portable text:

- lines: the share of PTX lines that ran. A line counts once per entry. nvcc emits a source line many times: for every
  variant, element type and unrolled copy, with remainder loops for trip counts that no tile has. Each option is tested
  in one variant, so kernels with variants stay far below 100 %. This figure has no threshold.
- places: the share of places that ran in any entry, variant or copy. A place is an operation that accesses memory,
  synchronizes with other threads or computes in floating point, with its source line in kernels_cu and the lines it was
  inlined at, up to the entry. A function called for masked and for plain tiles thus has its places twice. A line of
  integer operations and moves alone is one place; in other lines these compute addresses and do not count. All places
  except those of EXPLAINED must run. In functions of SHARED, which many kernels inline, a place may also run elsewhere
  in the same text, in another kernel or at another call, if of this call something runs here.
- entries: the entries that were launched. All must be.

The exit code is 1 if the tests fail, if an entry never ran, if a place never ran that EXPLAINED does not name, or if
EXPLAINED names a place that does run.

docs/emulator.md lists what this does not measure.
"""

import argparse
import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import ptxrt  # noqa: E402
from ptxrt import units  # noqa: E402
from ptxrt.declaration import half_of  # noqa: E402
from ptxrt.emulator.check import Counts, add_counts, merge, text_key  # noqa: E402
from ptxrt.ptx.ir import Instruction  # noqa: E402
from ptxrt.ptx.parse import body, parse  # noqa: E402

COUNTS = ROOT / ".coverage-ptx"
DECLARED = "test_kernels"
# The test files that do not run, and why.
LEFT_OUT = {
    "test_seeded_bugs": "runs kernels with bugs, whose counts are not those of the shipped texts",
    "test_smollm2": "runs a whole model for nine minutes, on kernels that other files run with fewer values",
    "test_bench": "measures launches that other files compare",
}
OPERATION = re.compile(
    r"(?!ld\.param|mov|selp|setp)((ld|st|atom|red|cp|ldmatrix|mma|shfl|vote|match|redux|bar|barrier|mbarrier|elect|trap)\b|.*\.([bt]?f\d+|e\dm\d)(x\d)?\b)"
)


# Headers whose functions many kernels inline, each at several lines.
SHARED = re.compile(r"kernels_cu/(tile/|ptx/|op/(activation|append|ending|epilogue|layout|merge|produce)\.cuh)")


class Explained(NamedTuple):
    """Places that no test runs, and why: in the kernels that match `kernels`, in the PTX texts named, with `source` in
    their lines."""

    kernels: str
    texts: str  # "native", "portable" or both
    source: str  # a part of the source line, or parts of it and of lines it was inlined at, as "inner < outer"
    why: str


NO_TESTS = 5  # pytest's exit code where nothing was chosen


EXPLAINED = [
    Explained(
        "gemm_few_*",
        "native portable",
        "epilogue.finish(",
        "Products have one epilogue, all of which the cases of gemm_bf16 run; those of other operands run its parts.",
    ),
    Explained(
        "gemm_*",
        "portable",
        "target[i] = Element(values[i / 8][i % 8]) < store_share(reinterpret_cast<float *>(target), 16, values)",
        "Rows that are stored in chunks are aligned to 16 bytes. store_share() asks for that again.",
    ),
    Explained(
        "gemm_few_*",
        "portable",
        "more_type < if (end_elements<Runs>(shared.warp, options, elements, rows_of(place), warp)) return;",
        "A residual is added here in up to eight rows alone, and these are more: nvcc does not see that it never is.",
    ),
    Explained(
        "gemm_few_*",
        "portable",
        "more_type < load_more(); < elements.load(options, place);",
        "The loads of that residual.",
    ),
    *(
        Explained(
            "attention_one",
            "portable",
            line,
            "Its keys lie in rows. In the portable text nvcc does not see that there are no tiles.",
        )
        for line in (
            "return Units::copy_columns(target, format, tile, part, source.tile_dim);",
            "Units::copy_rows(target, format, keys, [&](int row, int chunk) {",
            "? tile + 16 * rows.index(first_row + row, chunk) : nullptr;",
            "if (format == RowFormat::plain) return;",
            "Units::copy_scales(unit, format, blocks, true, false, [&](int row) { return scales + row * step; });",
        )
    ),
    Explained(
        "attention_bf16",
        "portable",
        "before_last() < multiply_scores<Element, Tiling::dim, KeyTile>(s, q, k + current, [&] {",
        "A branch that is never taken, since no launch has less than no keys. It keeps ptxas from loading ahead of it.",
    ),
]


class Place(NamedTuple):
    """An operation of a source line, FILE:LINE, and the lines it was inlined at, innermost first; for a line of integer
    operations and moves alone, "" and the line."""

    operation: str
    path: tuple[str, ...]

    def __str__(self) -> str:
        return " < ".join(name.removeprefix("kernels_cu/") for name in self.path) + (
            f" ({self.operation})" if self.operation else ""
        )


@dataclass
class Coverage:
    """What ran in the entries of one kernel, native or portable."""

    lines: Counter = field(default_factory=Counter)  # {whether a line ran: number of PTX lines}
    entries: dict[str, bool] = field(default_factory=dict)  # whether each entry ran
    places: dict[Place, bool] = field(default_factory=dict)

    def add(self, module, entry: str, executed: dict[int, int]) -> None:
        """Add an entry of a parsed text, given how often each of its lines was executed."""
        self.entries[entry] = any(executed.values())
        ran = {}
        for statement in body(module, module.functions[entry]).statements:
            if isinstance(statement, Instruction):
                ran[statement.line] = bool(executed.get(statement.line))
                if place := place_of(module, statement):
                    self.places[place] = self.places.get(place, False) or ran[statement.line]
        self.lines.update(ran.values())

    def counted(self) -> dict[Place, bool]:
        """The places, without integer operations and moves of lines that have a counted operation."""
        operate = {place.path[0] for place in self.places if place.operation}
        return {place: ran for place, ran in self.places.items() if place.operation or place.path[0] not in operate}

    def insides(self) -> set[Place]:
        """What ran in functions of SHARED: each place with the lines up to the call of such a function."""
        found = set()
        for place in (place for place, ran in self.places.items() if ran):
            for end, line in enumerate(place.path, 1):
                if not SHARED.match(line):
                    break
                found.add(Place(place.operation, place.path[:end]))
        return found

    def calls(self) -> set[tuple[str, ...]]:
        """The calls of which something ran: the lines from a call up to the entry."""
        return {
            place.path[begin:]
            for place, ran in self.places.items()
            if ran and place.operation
            for begin in range(1, len(place.path))
        }

    def __str__(self) -> str:
        places, entries = Counter(self.counted().values()), Counter(self.entries.values())
        return (
            f"lines {self.lines[True] / self.lines.total():6.1%} of {self.lines.total():6}   "
            f"places {places[True] / max(places.total(), 1):6.1%} of {places.total():5}   entries {entries[True]} of "
            f"{entries.total()}"
        )


def place_of(module, instruction) -> Place | None:
    """The place of an instruction in the sources; None if nvcc gives it no line.

    The path leaves out CUDA's headers and the files at the top of kernels_cu: those are the entries themselves, so that
    entries of different types, and copies of compile-time loops, have the same places. It also leaves out what lies
    between two occurrences of one line, since a text does not always tell at which copy of a line something was
    inlined.
    """
    location, path = instruction.location, []
    while location is not None and location.line:
        path.append(f"{module.files.get(location.file, '?')}:{location.line}")
        location = location.inlined_at
    own = [name for name in path if re.match("kernels_cu/.*/", name)] or path[:1]
    once = []
    for name in own:
        if name in once:
            del once[once.index(name) + 1 :]
        else:
            once.append(name)
    if not once:
        return None
    return Place(instruction.opcode, tuple(once)) if OPERATION.match(instruction.opcode) else Place("", (once[0],))


def runs_elsewhere(place: Place, insides: set[Place], calls: set[tuple[str, ...]]) -> bool:
    """Whether a place that did not run is inside a function of SHARED, of whose call something ran, and ran at another
    call of it."""
    if not place.operation:  # of the line alone it is known, not of its calls
        return place in insides
    return any(
        Place(place.operation, place.path[:end]) in insides and place.path[end:] in calls
        for end in range(1, len(place.path))
    )


@cache
def source_line(name: str) -> str:
    """The source text of FILE:LINE, or "" if there is none."""
    file, line = name.rsplit(":", 1)
    path = ROOT / file
    lines = path.read_text().splitlines() if path.is_file() else []
    return lines[int(line) - 1].strip() if int(line) <= len(lines) else ""


def explains(explained: Explained, kernel: str, text: str, place: Place) -> bool:
    """Whether an explanation applies to a place: its parts occur in lines of the path, in order."""
    if not fnmatch.fnmatchcase(kernel, explained.kernels) or text not in explained.texts.split():
        return False
    lines = map(source_line, place.path)
    return all(any(piece in line for line in lines) for piece in explained.source.split(" < "))


def test_files(named=()) -> list[Path]:
    """The test files to run: those named, or all but LEFT_OUT; first the one that takes longest."""
    files = [Path(name) for name in named] or [
        path for path in (ROOT / "tests").glob("test_*.py") if path.stem not in LEFT_OUT
    ]
    return sorted(files, key=lambda path: (path.stem != DECLARED, path.name))


def launched(path: Path, kernels) -> bool:
    """Whether a test file launched one of these kernels when it last ran here; True if it never did."""
    counts = COUNTS / path.stem
    if not (counts / "ended").exists():
        return True
    texts = {
        units.text_path(unit.name, portable).name for kernel in kernels for unit in kernel.units for portable in (0, 1)
    }
    return any(key.split()[0] in texts for file in counts.glob("*.json") for key in json.loads(file.read_text()))


def run_file(path: Path, kernels) -> int:
    """Run one test file with counting, of test_kernels.py the cases of these kernels; return pytest's exit code."""
    counts = COUNTS / path.stem
    shutil.rmtree(counts, ignore_errors=True)
    counts.mkdir(parents=True)
    chosen = "not hardware_arithmetic"  # these run the same lines again
    if path.stem == DECLARED and kernels:
        chosen += f" and ({' or '.join(f'-{kernel.name}-' for kernel in kernels)})"
    begin = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "--quiet", "-p", "no:cacheprovider", "-m", "not gpu", "-k", chosen, str(path)],
        cwd=ROOT,
        env={**os.environ, "PTXRT_COVERAGE": str(counts), "ALL": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    code = 0 if ended.returncode == NO_TESTS else ended.returncode
    last = ended.stdout.rstrip().rpartition("\n")[2]
    print(f"{path.name:44} {time.monotonic() - begin:5.0f} s  {last}", flush=True)
    if code:
        print(ended.stdout, flush=True)
    (counts / "ended").touch()
    return code


def merged(files) -> Counts:
    """The sum of what these test files counted."""
    total: Counts = {}
    for path in files:
        for key, entries in merge(COUNTS / path.stem).items():
            for entry, lines in entries.items():
                add_counts(total, key, entry, lines)
    return total


def run_tests(files, kernels, jobs) -> bool:
    """Run test files, `jobs` at a time, for these kernels or, without any, for all; return whether a test failed."""
    if kernels:
        files = [path for path in files if path.stem == DECLARED or launched(path, kernels)]
    with ThreadPoolExecutor(jobs) as pool:
        return any([code for code in pool.map(lambda path: run_file(path, kernels), files)])


def kernel_coverage(kernel, counts, portable: bool) -> Coverage:
    """What ran in one kernel."""
    found = Coverage()
    for unit in kernel.units:
        path = units.text_path(unit.name, portable)
        text = path.read_text()
        module = parse(text, path.name)
        executed = counts.get(text_key(path.name, module.text), {})  # of the text as read, as the emulator counts it
        halves = [entry for entry in map(half_of, kernel.entries(unit)) if entry in module.functions]
        for entry in (*kernel.entries(unit), *halves):
            found.add(module, entry, executed.get(entry, {}))
    return found


def report(coverages, explanations, shown=None) -> list[str]:
    """Print the table of {(text, kernel): Coverage} and which gaps are explained; return the errors. shown: the names
    of the kernels in the table, or None for all. An explanation of no gap is an error where all are."""
    wrong, used, before = [], Counter(), None
    insides: dict[str, set[Place]] = {}
    for (text, _), found in coverages.items():
        insides.setdefault(text, set()).update(found.insides())
    for (text, kernel), found in coverages.items():
        if shown is not None and kernel not in shown:
            continue
        if text != before:
            print(f"\n{text} texts")
            before = text
        calls = found.calls()
        idle = sorted(place for place, ran in found.counted().items() if not ran)
        left = [place for place in idle if not runs_elsewhere(place, insides[text], calls)]
        elsewhere = f"   {len(idle) - len(left)} run elsewhere" if len(left) < len(idle) else ""
        print(f"  {kernel:30} {found}{elsewhere}")
        wrong += [
            f"{text} {kernel}: the entry {entry} is never launched" for entry, ran in found.entries.items() if not ran
        ]
        for place in left:
            reasons = [number for number, each in enumerate(explanations) if explains(each, kernel, text, place)]
            used.update(reasons)
            print(f"    {place}: {'explained' if reasons else 'NOT RUN'}: {source_line(place.path[0])}")
            if not reasons:
                wrong.append(f"{text} {kernel}: {place} never runs: {source_line(place.path[0])}")
    print("\nWhy places do not run:")
    for number, each in enumerate(explanations):
        if used[number]:
            print(f"  {each.kernels}, {each.texts}: {each.source}: {used[number]} places\n    {each.why}")
        elif shown is None:
            wrong.append(f"the explanation of '{each.source}' in {each.kernels} is of no place that does not run")
    return wrong


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description="Count which places of the kernels the tests run.")
    parser.add_argument("files", nargs="*", metavar="FILE", help="test files (default: all but LEFT_OUT)")
    parser.add_argument("--only", action="append", default=[], metavar="KERNEL", help="report this kernel (repeatable)")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 8), metavar="N", help="processes")
    options = parser.parse_args(arguments)
    every = ptxrt.kernels().values()
    kernels = [kernel for kernel in every if any(fnmatch.fnmatchcase(kernel.name, name) for name in options.only)]
    if options.only and not kernels:
        parser.error(f"no kernel is named {' or '.join(options.only)}")
    files = test_files(options.files)
    failed = run_tests(files, kernels, options.jobs)
    counts = merged(files)
    texts = {"native": False, "portable": True}
    coverages = {
        (text, kernel.name): kernel_coverage(kernel, counts, portable)
        for text, portable in texts.items()
        for kernel in every
    }
    wrong = report(coverages, EXPLAINED, [kernel.name for kernel in kernels] if kernels else None)
    print("\n" + ("\n".join(wrong) if wrong else "every entry and every place runs, or is explained"))
    return 1 if failed or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
