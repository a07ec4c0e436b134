"""Find for each bug of seeded_bugs.py a check that catches it, the cheapest one: seeded_bug_checks.json.

test_seeded_bugs.py runs that check first. A bug without an entry, or one that its check misses, meets all checks of its
kernel, so that the file saves time and decides nothing. To write it anew takes twenty minutes of a core:

    python tests/seeded_bug_checks.py
"""

import json
import sys
import tempfile
import time
from pathlib import Path

CHOSEN = Path(__file__).with_suffix(".json")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def chosen() -> dict[str, str]:
    """{bug: name of its check}."""
    return json.loads(CHOSEN.read_text(encoding="utf-8"))


def main():
    from test_seeded_bugs import BUGS, CHECKS, compile_with, fails, on_modules

    found, seconds = {}, {}
    for bug in sorted(BUGS, key=lambda bug: bug.kernel):
        if bug.kernel not in seconds:
            with on_modules(bug.kernel):
                seconds[bug.kernel] = {}
                for name in CHECKS[bug.kernel]:
                    start = time.perf_counter()
                    assert not fails(bug.kernel, name), f"{bug.kernel}: {name} fails without a bug"
                    seconds[bug.kernel][name] = time.perf_counter() - start
        with tempfile.TemporaryDirectory() as folder:
            modules = compile_with(bug, bug.kernel, Path(folder))
            with on_modules(bug.kernel, modules):
                names = sorted(CHECKS[bug.kernel], key=seconds[bug.kernel].get)
                found[str(bug)] = next(name for name in names if fails(bug.kernel, name))
        print(f"{bug}: {found[str(bug)]}", flush=True)
    order = {str(bug): found[str(bug)] for bug in BUGS}
    CHOSEN.write_text(json.dumps(order, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
