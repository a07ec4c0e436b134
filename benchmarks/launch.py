"""What the host spends on one launch: a bare cuLaunchKernel, prepared calls, the friendly function, CuPy; in one run.

    python benchmarks/launch.py [--machine portable]

The same as `ptxrt bench launch`.
"""

from __future__ import annotations

import argparse

import ptxrt
from ptxrt.bench import launch_rows, launch_table


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="portable", choices=["portable", "native"])
    with ptxrt.using(parser.parse_args().machine):
        print(*launch_table(launch_rows()), sep="\n")


if __name__ == "__main__":
    main()
