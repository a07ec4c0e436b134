"""Command line: python -m tests.fuzz [KIND...] [--calls N] [--minutes M] [--seed S] [--machine NAME] [--process I/N]
[--report FILE]"""

from __future__ import annotations

import argparse
import json
import re
import secrets
import sys
import time

import ptxrt

from . import attention, dlpack, engine, files, graphs, merge, operands, pages, products, quantize, texts, views

KINDS = {
    module.KIND.name: module.KIND
    for module in (attention, dlpack, files, graphs, merge, operands, pages, products, quantize, texts, views)
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description="Random calls against float64, and wrong ones."
    )
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"{', '.join(KINDS)}; all where none is named")
    parser.add_argument("--calls", type=int, default=1000, help="calls of each kind, 1000")
    parser.add_argument("--minutes", type=float, help="for as long as this, in rounds of 100 calls of each kind")
    parser.add_argument("--seed", type=int, help="another than a random one; it is printed")
    parser.add_argument("--call", type=int, help="this call alone, printed as code")
    parser.add_argument("--machine", default="emulator", help="emulator, portable or native")
    parser.add_argument("--process", default="0/1", metavar="I/N", help="of N processes that share the calls, number I")
    parser.add_argument("--report", help="a JSON file for the counts and failures")
    asked = parser.parse_args()
    unknown = [name for name in asked.kinds if name not in KINDS]
    if unknown:
        parser.error(f"no kind {', '.join(unknown)}; there are {', '.join(KINDS)}")
    kinds = [KINDS[name] for name in asked.kinds or KINDS]
    seed = secrets.randbelow(2**31) if asked.seed is None else asked.seed
    process = re.fullmatch(r"(\d+)/([1-9]\d*)", asked.process)
    if not process or int(process[1]) >= int(process[2]):
        parser.error(f"--process is {asked.process!r}; pass I/N with I from 0 to N - 1, such as 0/4")
    first, step = map(int, process.groups())
    try:
        machine = ptxrt.using(asked.machine)
    except ptxrt.PtxError as error:
        parser.error(str(error))
    print(f"seed {seed}, machine {asked.machine}", flush=True)
    tallies = {kind.name: engine.Tally(kind.name, seed) for kind in kinds}
    with machine:
        if asked.call is not None:
            for kind in kinds:
                recipe = kind.draw(engine.random_of(kind, seed, asked.call))
                print(recipe, engine.program_of(kind, recipe), engine.outcome(kind, recipe), sep="\n")
            return 0
        if asked.minutes is None:
            rounds = [range(first, asked.calls, step)]
        else:
            rounds = (range(start + first, start + 100 * step, step) for start in range(0, 10**9, 100 * step))
        ends = None if asked.minutes is None else time.monotonic() + 60 * asked.minutes
        for calls in rounds:
            for kind in kinds:
                left = None if ends is None else ends - time.monotonic()
                if left is not None and left <= 0:
                    break
                part = engine.run(kind, seed=seed, calls=calls, machine=asked.machine, seconds=left)
                whole = tallies[kind.name]
                whole.outcomes += part.outcomes
                whole.failures += part.failures
                whole.seconds += part.seconds
                for failure in part.failures:
                    print(failure, flush=True)
            if (ends is not None and time.monotonic() >= ends) or sum(len(t.failures) for t in tallies.values()) >= 20:
                break
    for tally in tallies.values():
        print(tally)
    if asked.report:
        with open(asked.report, "w", encoding="utf-8") as file:
            json.dump([{**vars(t), "machine": asked.machine, "process": asked.process} for t in tallies.values()], file)
    return int(any(t.failures for t in tallies.values()))


if __name__ == "__main__":
    sys.exit(main())
