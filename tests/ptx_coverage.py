"""Run the tests that launch kernels and print how much of each kernel's PTX they executed: `make coverage`.

Arguments go to pytest in place of TESTS. Three figures for each kernel, of its native and of its portable text:

- lines: the share of PTX lines that ran. A line counts once per entry. nvcc emits a source line many times: for every
  variant, element type and unrolled copy, with remainder loops for trip counts that no tile has. Each option is tested
  in one variant, so kernels with variants stay far below 100 %. This figure has no threshold.
- places: the share of places that ran in any entry, variant or copy. A place is an operation that accesses memory,
  synchronizes with other threads or computes in floating point, with its source line in kernels_cu and the lines it was
  inlined at, up to the entry. A function called for masked and for plain tiles thus has its places twice. A line of
  integer operations and moves alone is one place; in other lines these compute addresses and do not count. All places
  except those of EXPLAINED must run.
- entries: the entries that were launched. All must be.

The exit code is 1 if the tests fail, if an entry never ran, if a place never ran that EXPLAINED does not name, or if
EXPLAINED names a place that does run.

docs/emulator.md lists what this does not measure.
"""

import fnmatch
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import ptxrt  # noqa: E402
from ptxrt import units  # noqa: E402
from ptxrt.declaration import half_of  # noqa: E402
from ptxrt.emulator.check import merge  # noqa: E402
from ptxrt.ptx.ir import Instruction  # noqa: E402
from ptxrt.ptx.parse import body, parse  # noqa: E402

COUNTS = ROOT / ".coverage-ptx"
# The test files that launch the collection's kernels for their results; the other files test code around them.
TESTS = ["kernels", "quantize", "attention", "attention_blocks", "attention_mxfp4_bf16_in_kernel", "operands", "probes"]
OPERATION = re.compile(
    r"(?!ld\.param|mov|selp|setp)((ld|st|atom|red|cp|ldmatrix|mma|shfl|vote|match|redux|bar|barrier|mbarrier|elect|trap)\b|.*\.([bt]?f\d+|e\dm\d)(x\d)?\b)"
)


class Explained(NamedTuple):
    """Places that no test runs, and why: in the kernels that match `kernels`, in the PTX texts named, with `source` in
    their lines."""

    kernels: str
    texts: str  # "native", "portable" or both
    source: str  # a part of the source line, or parts of it and of lines it was inlined at, as "inner < outer"
    why: str


EXPLAINED = [
    *(
        Explained(
            "pack_*_nvfp4",
            "native",
            f"{plain} < encode_nvfp4_block<false>",
            "Blocks whose scale is a plain one are encoded in a straight line; those that are left over for the loop "
            "behind it, unless "
            "both scales are to be tried, have none, which nvcc cannot know.",
        )
        for plain in ("plain_sixth(amax)", "Divisor::plain(scale.step")
    ),
    *(
        Explained(
            kernels,
            texts,
            source,
            "Products have one epilogue, all of which the cases of gemm_bf16 run; those of other "
            "operands run its parts.",
        )
        for kernels in ("gemm_few_*", "gemm_*fp*")
        for source, texts in (
            *(("epilogue.finish(", "native portable"), ("const Epilogue epilogue(", "native portable")),
            *(("load_share(residual, row_here", "native portable"), ("16; ++i) {", "native")),
            *(("__uint_as_float(words[i]", "native portable"), ("const bool four = better_of_two", "native portable")),
            *(("eight.load(source + 8 * i, here - 8 * i)", "native"), ("values[2 * i] = pair.x;", "portable")),
            *(("values[2 * i + 1] = pair.y;", "portable"), ("portable::f16x2_from_e2m1x2(codes", "portable")),
            *(("(pair & 0xfu) | (pair & 0xf0u) << 12", "portable"), ("(spread & 0x00080008u) << 12", "portable")),
        )
    ),
    Explained(
        "gemm_*fp*",
        "portable",
        "bool there() const",
        "Whether there is a residual or a bias: where it is asked again none of their cases have one.",
    ),
    Explained(
        "gemm_bf16",
        "native portable",
        "plain_sixth(amax * 0x1p64f)",
        "The sixth of maxima below 2^-60, which no product of the cases has; those of the quantizers run it.",
    ),
    Explained(
        "mean_scores_nvfp4",
        "native portable",
        "__half22float2 < unpack_pair(ptx::cvt_rn_f16x2_e4m3x2(code & 0x7fu)",
        "It runs, and is counted where E2m1 is decoded: in all copies of the loop's body but the first, which is for "
        "numbers of iterations "
        "that no tile has, the text does not say anew at which unpack_pair the conversion was inlined.",
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


def run_tests(arguments):
    """Run pytest with counting, one process per core, at most eight; return its exit code."""
    shutil.rmtree(COUNTS, ignore_errors=True)
    environment = {**os.environ, "PTXRT_COVERAGE": str(COUNTS)}
    processes = ["--quiet", "--numprocesses", "auto", "--maxprocesses", "8", "--dist", "worksteal", "-m", "not gpu"]
    chosen = arguments or [
        *(f"tests/test_{name}.py" for name in TESTS),
        "-k",
        "not hardware_arithmetic",
    ]  # these run the same lines again
    return subprocess.run([sys.executable, "-m", "pytest", *processes, *chosen], cwd=ROOT, env=environment).returncode


def kernel_coverage(kernel, counts, portable: bool) -> Coverage:
    """What ran in one kernel."""
    found = Coverage()
    for unit in kernel.units:
        path = units.text_path(unit.name, portable)
        module = parse(path.read_text(), path.name)
        halves = [entry for entry in map(half_of, kernel.entries(unit)) if entry in module.functions]
        for entry in (*kernel.entries(unit), *halves):
            found.add(module, entry, counts.get(path.name, {}).get(entry, {}))
    return found


def report(coverages, explanations) -> list[str]:
    """Print the table of {(text, kernel): Coverage} and which gaps are explained; return the errors."""
    wrong, used, before = [], Counter(), None
    for (text, kernel), found in coverages.items():
        if text != before:
            print(f"\n{text} texts")
            before = text
        print(f"  {kernel:26} {found}")
        idle = [entry for entry, ran in found.entries.items() if not ran]
        wrong += [f"{text} {kernel}: the entry {entry} is never launched" for entry in idle]
        for place in sorted(place for place, ran in found.counted().items() if not ran):
            reasons = [number for number, each in enumerate(explanations) if explains(each, kernel, text, place)]
            used.update(reasons)
            print(f"    {place}: {'explained' if reasons else 'NOT RUN'}: {source_line(place.path[0])}")
            if not reasons:
                wrong.append(f"{text} {kernel}: {place} never runs: {source_line(place.path[0])}")
    print("\nWhy places do not run:")
    for number, each in enumerate(explanations):
        print(f"  {each.kernels}, {each.texts}: {each.source}: {used[number]} places\n    {each.why}")
        if not used[number]:
            wrong.append(f"the explanation of '{each.source}' in {each.kernels} is of no place that does not run")
    return wrong


def main():
    failed = run_tests(sys.argv[1:])
    counts = merge(COUNTS)
    texts = {"native": False, "portable": True}
    coverages = {
        (text, kernel.name): kernel_coverage(kernel, counts, portable)
        for text, portable in texts.items()
        for kernel in ptxrt.kernels().values()
    }
    wrong = report(coverages, EXPLAINED)
    print("\n" + ("\n".join(wrong) if wrong else "every entry and every place runs, or is explained"))
    return 1 if failed or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
