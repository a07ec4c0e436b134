"""Choose the cases that tests/on_gpu.sh runs under compute-sanitizer: `make sanitizer-cases`.

Every declared case runs on the emulator, on the portable text, which is what a GPU without block-scaled MMAs runs.
Counted are the instructions that its threads execute and the places (see ptx_coverage.py) at which it touches memory or
threads meet: sanitizers see nothing else. Chosen are few cases that are small together and reach every such place that
any case reaches: each time the one that reaches the most new places for what it costs, and in the end none whose places
the others reach, too. They are written to sanitizer_cases.txt, a kernel and a case to a line, the smallest first.

    python tests/sanitizer_cases.py [--jobs N]
"""

import argparse
import os
import pickle
import re
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHOSEN = Path(__file__).with_name("sanitizer_cases.txt")
sys.path.insert(0, str(ROOT))

TOUCHES = re.compile(
    r"(?!ld\.param)(ld|st|atom|red|cp|ldmatrix|stmatrix|shfl|vote|match|redux|bar|barrier|mbarrier|elect)\b"
)
# What a case costs beside its instructions, in instructions: a launch, and the instrumentation of its unit's code.
LAUNCH, PTX_LINE = 2_000_000, 200


def cases():
    """Every (kernel, id of a case)."""
    import ptxrt

    return [(kernel.name, case.id) for kernel in ptxrt.kernels().values() for case in kernel.cases]


def chosen() -> list[tuple[str, str]]:
    """The cases that were chosen, as the file names them."""
    return [
        (name, case)
        for name, _, case in (line.partition(" ") for line in CHOSEN.read_text(encoding="utf-8").splitlines())
    ]


@cache
def _module(path: Path):
    from ptxrt.ptx.parse import parse

    return parse(path.read_text(), path.name)


@cache
def _places(path: Path, entry: str) -> dict:
    """{PTX line of an entry: the source lines of its place}, of lines that touch memory or where threads meet."""
    from ptx_coverage import place_of
    from ptxrt.ptx.ir import Instruction
    from ptxrt.ptx.parse import body

    module = _module(path)
    statements = body(module, module.functions[entry]).statements
    touching = [s for s in statements if isinstance(s, Instruction) and TOUCHES.match(s.opcode)]
    return {s.line: place.path for s in touching if (place := place_of(module, s))}


def measure(kernel_name: str) -> list[tuple[str, str, int, set]]:
    """(kernel, case, cost, places) of every case of a kernel."""
    import ptxrt
    from ptxrt import units
    from ptxrt.emulator.check import collector, line_counts

    kernel, found = ptxrt.kernels()[kernel_name], []
    # Counts go on growing; this process may have run other kernels before.
    before = {(unit, entry, id(code)): list(counts) for unit, entry, code, counts in collector().entries}
    for case in kernel.cases:
        with ptxrt.using("emulator", ptx="portable", checks=False):
            kernel(**kernel.example(case))
        cost, places = LAUNCH, set()
        for unit, entry, code, counts in collector().entries:
            key = (unit, entry, id(code))
            new = [count - earlier for count, earlier in zip(counts, before.get(key, [0] * len(counts)))]
            before[key] = list(counts)
            if any(new):
                path = units.MODULES / unit
                where = _places(path, entry)
                lines = line_counts(code, new)
                cost += sum(lines.values()) + PTX_LINE * len(_module(path).line_starts)
                places |= {where[line] for line, count in lines.items() if count and line in where}
        found.append((kernel_name, case.id, cost, places))
    return found


def cover(measured: list[tuple[str, str, int, set]]) -> list[tuple[str, str, int, set]]:
    """Few cases that are small together and reach every place."""
    left, taken = set().union(*(places for *_, places in measured)), []
    while left:
        best = max(measured, key=lambda case: len(case[3] & left) / case[2])
        taken.append(best)
        left -= best[3]
    for case in sorted(taken, key=lambda case: -case[2]):
        if case[3] <= set().union(*(other[3] for other in taken if other is not case)):
            taken.remove(case)
    return taken


def main() -> int:
    parser = argparse.ArgumentParser(description="Choose the cases for compute-sanitizer.")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N", help="processes (default: cores)")
    parser.add_argument(
        "--keep", type=Path, metavar="FILE", help="also write what was measured, to try other ways to choose"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as counts:
        os.environ["PTXRT_COVERAGE"] = counts
        names = list(dict.fromkeys(name for name, _ in cases()))
        measured = []
        with ProcessPoolExecutor(options.jobs) as pool:
            for name, of_kernel in zip(names, pool.map(measure, names)):
                measured += of_kernel
                print(f"{name}: {len(of_kernel)} cases", flush=True)
    if options.keep:
        options.keep.write_bytes(pickle.dumps(measured))
    taken = cover(measured)
    CHOSEN.write_text(
        "".join(f"{name} {case}\n" for name, case, *_ in sorted(taken, key=lambda case: case[2])), encoding="utf-8"
    )
    count = len(set().union(*(places for *_, places in measured)))
    print(
        f"{len(taken)} of {len(measured)} cases reach all {count} places at "
        f"{sum(c[2] for c in taken) / sum(c[2] for c in measured):.1%} of the cost"
    )
    for name, case, cost, _ in sorted(taken, key=lambda case: -case[2])[:12]:
        print(f"  {name} {case}: {cost / 1e6:.1f} million instructions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
