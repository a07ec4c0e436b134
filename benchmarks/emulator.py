"""Times of the emulator: the quantizer, the attention, and the first launch of an entry in a fresh process.

    python benchmarks/emulator.py

Prints the best and the median of five launches, and for the first launch its time beyond the run time. Values are in
seconds; in brackets CPU seconds, which other work on the machine hardly changes. With a head dimension as argument only
the first launch of that attention is measured.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time

import click
import numpy as np

import ptxrt

REPEATS = 5
FIRST_DIMS = (64, 128, 256)
FIRST = {"qk": "mxfp4", "pv": "bf16", "quantize": "in_kernel"}


def timed(call) -> np.ndarray:
    """Return (seconds, CPU seconds) of a call."""
    start = time.perf_counter(), time.process_time()
    call()
    return np.array([time.perf_counter() - start[0], time.process_time() - start[1]])


def times(call) -> np.ndarray:
    """Return `timed` of several calls, after one that is not counted: (calls, 2)."""
    call()
    return np.array([timed(call) for _ in range(REPEATS)])


def said(seconds: np.ndarray) -> str:
    return "{:.3f} s ({:.3f})".format(*seconds)


def random(*shape) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape, np.float32)


def report(name: str, seconds: np.ndarray) -> None:
    print(f"{name:46} best {said(seconds.min(axis=0))}   median {said(np.median(seconds, axis=0))}")


def first_launch(dim: int) -> None:
    """Print the extra time of the first launch of attention at one head dimension, loading included."""
    x = random(1, 1, 1, dim)
    first = timed(lambda: ptxrt.attention(x, x, x, **FIRST))
    beyond = first - times(lambda: ptxrt.attention(x, x, x, **FIRST)).min(axis=0)
    unit = f"attention_mxfp4_bf16_in_kernel_dim{dim}_dim_v{dim}"
    (counts,) = ptxrt.selection.current().emulator.coverage()[f"{unit}.ptx"].values()
    print(
        f"first launch, attention d={dim:<3} ({len(counts)} PTX lines) {'':4}beyond its run time {said(beyond)}",
        flush=True,
    )


@click.command(help=__doc__)
@click.argument("dim", type=int, required=False)
def main(dim: int | None) -> None:
    ptxrt.using("emulator")
    if dim:
        first_launch(dim)
        return
    load = f", load average {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    print(f"{os.cpu_count()} processors{load}, Python {platform.python_version()}, NumPy {np.__version__}")
    x = random(1024, 1024)
    report("quantize_mxfp4 of 1024 x 1024 float32", times(lambda: ptxrt.quantize(x, "mxfp4")))
    q, k, v = random(3, 1, 4, 512, 128)
    report("attention h=4 s=512 d=128 float32", times(lambda: ptxrt.attention(q, k, v, **FIRST)))
    with ptxrt.using("emulator", checks=False):
        q, k, v = random(3, 1, 8, 1024, 128)
        name, call = (
            "attention h=8 s=1024 d=128 causal, no checks",
            lambda: ptxrt.attention(q, k, v, causal=True, **FIRST),
        )
        print(f"{name:46} with its translation {said(timed(call))}")
        report(name, times(call))
    for dim in FIRST_DIMS:
        subprocess.run([sys.executable, __file__, str(dim)], check=True)


if __name__ == "__main__":
    main()
