"""Write docs/kernels.md from the declarations and the records of the build; `make docs` runs it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import ptxrt  # noqa: E402
from ptxrt.describe import kernels_markdown  # noqa: E402


def main():
    target = Path(__file__).with_name("kernels.md")
    target.write_text(kernels_markdown(ptxrt.kernels()), encoding="utf-8", newline="\n")
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
