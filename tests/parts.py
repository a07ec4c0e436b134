"""Parts of long lists of tests. A run takes one part: another one after each change of the kernels or of the emulator;
with ALL=1 in the environment it takes all."""

import hashlib
import os
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent


@cache
def _number() -> int:
    """A number that follows from the bytes of the kernels and of the emulator."""
    files = [path for folder in ("kernels_cu", "ptxrt/emulator") for path in (ROOT / folder).rglob("*.*")]
    sources = sorted(path for path in files if path.suffix in (".cu", ".cuh", ".py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).digest()[0]


def part_of_this_run(items: list, parts: int) -> list:
    """Every `parts`-th item, or all."""
    return items if os.environ.get("ALL") else items[_number() % parts :: parts]
