"""Find for each bug of seeded_bugs.py a check that catches it, the cheapest one: seeded_bug_checks.json.

test_seeded_bugs.py runs that check first, on the entries it launches. A bug that is not in the file, or that
its check misses, meets all checks of its whole unit, so that the file saves time and decides nothing. Without --all
only the bugs that the file lacks, or whose check is gone, are run; all take twenty minutes of a core:

    python tests/seeded_bug_checks.py [--all]
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

CHOSEN = Path(__file__).with_suffix(".json")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def chosen() -> dict[str, list[str]]:
    """{bug: [name of its check, each entry that the check needs]}."""
    return json.loads(CHOSEN.read_text(encoding="utf-8"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="run every bug, not only those that the file lacks")
    anew = parser.parse_args().all

    import ptxrt
    from test_seeded_bugs import BUGS, CHECKS, compile_with, fails, on_modules

    kept = {} if anew else chosen()
    found = {str(bug): kept[str(bug)] for bug in BUGS if kept.get(str(bug), [None])[0] in CHECKS[bug.kernel]}
    seconds, entries = {}, {}
    for bug in sorted((bug for bug in BUGS if str(bug) not in found), key=lambda bug: bug.kernel):
        if bug.kernel not in seconds:
            with on_modules(bug.kernel):
                seconds[bug.kernel] = {}
                for name in CHECKS[bug.kernel]:
                    start = time.perf_counter()
                    with ptxrt.trace() as launches:
                        assert not fails(bug.kernel, name), f"{bug.kernel}: {name} fails without a bug"
                    seconds[bug.kernel][name] = time.perf_counter() - start
                    launched = {launch.entry for launch in launches}
                    # A launch of half blocks compares them with the entry of whole ones.
                    entries[bug.kernel, name] = sorted(launched | {entry.removesuffix("_half") for entry in launched})
        with tempfile.TemporaryDirectory() as folder:
            modules = compile_with(bug, bug.kernel, Path(folder))
            with on_modules(bug.kernel, modules):
                names = sorted(CHECKS[bug.kernel], key=seconds[bug.kernel].get)
                name = next((name for name in names if fails(bug.kernel, name)), None)
        if name is None:
            print(f"{bug}: NOT CAUGHT", flush=True)
            continue
        found[str(bug)] = [name, *entries[bug.kernel, name]]
        print(f"{bug}: {name}", flush=True)
    lines = [f" {json.dumps(str(bug))}: {json.dumps(found[str(bug)])}" for bug in BUGS if str(bug) in found]
    CHOSEN.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
