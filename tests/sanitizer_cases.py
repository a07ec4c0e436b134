"""Choose the cases that tests/on_gpu.sh runs under compute-sanitizer: `make sanitizer-cases`.

Every declared case runs on the emulator in the portable PTX text, which GPUs without block-scaled MMAs run. The script
counts the instructions that its threads execute and the places (see ptx_coverage.py) at which it accesses memory or
synchronizes threads: sanitizers check nothing else. It chooses a cheap set of cases that covers every such place that
any case reaches. The choice is greedy: each step takes the case with the most new places per cost, and a final pass
drops cases whose places the others cover. The result goes to sanitizer_cases.txt, one kernel and case per line, the
cheapest first.

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
# Fixed cost of a case, in instructions: of a launch, and per PTX line of its unit, for instrumenting the code.
LAUNCH, PTX_LINE = 2_000_000, 200


def cases():
    """(kernel, case id) of every declared case."""
    import ptxrt

    return [(kernel.name, case.id) for kernel in ptxrt.kernels().values() for case in kernel.cases]


def chosen() -> list[tuple[str, str]]:
    """The chosen cases, as listed in the file."""
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
    """{PTX line of an entry: path of its place}, for lines that access memory or synchronize threads."""
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
    # Counts accumulate; this process may have run other kernels before.
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
                path = units.MODULES / unit.split()[0]  # behind its name the key of a text has a digest
                where = _places(path, entry)
                lines = line_counts(code, new)
                cost += sum(lines.values()) + PTX_LINE * len(_module(path).line_starts)
                places |= {where[line] for line, count in lines.items() if count and line in where}
        found.append((kernel_name, case.id, cost, places))
    return found


def cover(measured: list[tuple[str, str, int, set]]) -> list[tuple[str, str, int, set]]:
    """A cheap set of cases that covers every place."""
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
