"""Write docs/kernels.md from the declarations and the records of the build and of machine code, docs/fragments.md and
its pages from the probes, and docs/lessons/ from runs of small kernels; run by `make docs`."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import fragments
import lessons

import ptxrt
from ptxrt.describe import TARGETS, kernels_markdown

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    try:
        kernels = kernels_markdown(ptxrt.kernels(), recorded_figures())
        with ptxrt.using("emulator"):
            found = fragments.pages(fragments.all_findings())
        taught = lessons.pages()
    except ptxrt.BuildError as error:
        print(f"{Path(__file__).name} needs all kernels: {error}", file=sys.stderr)
        return 1
    write("kernels.md", kernels)
    fragments.write(found, Path(__file__).parent)
    print(f"wrote {len(found)} files of fragments")
    for name, text in taught.items():
        write(name, text)
    return 0


def recorded_figures() -> dict:
    """Registers and spills of every entry on all targets, from the record of machine code."""
    record = json.loads((ROOT / "tests" / "sass_figures.json").read_text(encoding="utf-8"))
    return {target: record[target] for target in TARGETS}


def write(name: str, text: str):
    target = Path(__file__).parent / name
    target.write_text(text, encoding="utf-8", newline="\n")
    print(f"wrote {target}")


if __name__ == "__main__":
    sys.exit(main())
