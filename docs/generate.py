"""Write docs/kernels.md from the declarations and the records of the build, docs/fragments.md from the probes; for `make docs`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import fragments  # noqa: E402

import ptxrt  # noqa: E402
from ptxrt.describe import kernels_markdown  # noqa: E402


def main():
    write("kernels.md", kernels_markdown(ptxrt.kernels()))
    with ptxrt.using("emulator"):
        write("fragments.md", fragments.fragments_markdown(fragments.all_findings()))


def write(name: str, text: str):
    target = Path(__file__).with_name(name)
    target.write_text(text, encoding="utf-8", newline="\n")
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
