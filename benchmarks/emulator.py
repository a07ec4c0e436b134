"""How long the emulator takes: the quantizer, the attention, and the first launch of an entry in a fresh process.

    python benchmarks/emulator.py

Prints the best and the median of five launches, and for the first launch what it takes beyond its run time.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time

import numpy as np

import ptxrt

REPEATS = 5
FIRST_DIMS = (32, 128, 256)
FIRST = {"qk": "mxfp4", "pv": "bf16", "quantize": "in_kernel"}


def times(call) -> list[float]:
    """Seconds of each of some calls, after one that is not counted."""
    call()
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


def random(*shape) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape, np.float32)


def report(name: str, seconds: list[float]) -> None:
    print(f"{name:42} best {min(seconds):.3f} s   median {statistics.median(seconds):.3f} s")


def first_launch(dim: int) -> None:
    """Print what the first launch of the attention of one head dimension adds, loading included."""
    x = random(1, 1, 1, dim)
    start = time.perf_counter()
    ptxrt.attention(x, x, x, **FIRST)
    first = time.perf_counter() - start
    beyond = first - min(times(lambda: ptxrt.attention(x, x, x, **FIRST)))
    (counts,) = ptxrt.backend.current().emulator.coverage()[f"attention_mxfp4_bf16_dim{dim}.ptx"].values()
    print(f"first launch, attention d={dim:<3} ({len(counts)} PTX lines) {'':4}beyond its run time {beyond:.3f} s", flush=True)


def main() -> None:
    ptxrt.using("emulator")
    if len(sys.argv) == 2:
        first_launch(int(sys.argv[1]))
        return
    load = f", load average {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    print(f"{os.cpu_count()} processors{load}, Python {platform.python_version()}, NumPy {np.__version__}")
    x = random(1024, 1024)
    report("quantize_mxfp4 of 1024 x 1024 float32", times(lambda: ptxrt.quantize(x, "mxfp4")))
    q, k, v = random(3, 1, 4, 512, 128)
    report("attention h=4 s=512 d=128 float32", times(lambda: ptxrt.attention(q, k, v, **FIRST)))
    for dim in FIRST_DIMS:
        subprocess.run([sys.executable, __file__, str(dim)], check=True)


if __name__ == "__main__":
    main()
