"""Grouped products compared with one product of as many bytes or rows; a quantizing gate compared with separate
launches.

    python benchmarks/gemm_groups.py [--machine portable] [--repeat 20] [--json]

- decode: 32 tokens choose 6 of 128 experts each, with weights of 4096 x 4096 in nvfp4; compared with one product of 16
  rows by as many weights in one matrix. Experts that no token chose are not read: rates are bytes per second.
- prefill: 8 groups of 1024 rows, compared with one product of 8192 rows by one of the matrices.
- gate: a product of 4096 rows that gates and quantizes to mxfp8; compared with the plain product, and with product,
  `swiglu` and `quantize` as separate launches.

Docs: docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from peers import skip

import ptxrt
from ptxrt.bench.products import operand
from ptxrt.bench.timing import REPEAT, Clock, about, title
from ptxrt.formats import bf16

Calls = dict[str, Callable[[], Any]]


def normal(*shape: int) -> ptxrt.DeviceArray:
    """Return normal values in bf16 on the device; at most a million different ones, repeated."""
    some = np.random.default_rng(len(shape)).standard_normal(min(math.prod(shape), 1_000_003), np.float32)
    return ptxrt.to_device(np.resize(some.astype(bf16.dtype), shape))


def decode(experts: int = 128, tokens: int = 32, chosen: int = 6, size: int = 4096) -> tuple[Calls, dict[str, int]]:
    """Return a grouped product of few rows and one product of 16 rows by as many matrices as were chosen, with the
    bytes of weights."""
    rng = np.random.default_rng(0)
    ids = np.array([rng.choice(experts, chosen, replace=False) for _ in range(tokens)], np.int32)
    routing = ptxrt.route(ptxrt.to_device(ids), experts)
    used = len(np.unique(ids))
    values = normal(experts, size, size)
    x, weights = normal(tokens, size), operand(values, "nvfp4")
    flat, rows = operand(values[:used].reshape(used * size, size), "nvfp4"), normal(16, size)
    out, one = (ptxrt.empty(shape, bf16.dtype) for shape in ((ids.size, size), (16, used * size)))
    grouped = dict(rows=routing.order, a_format="nvfp4", a_global_scale=1.0, out=out)
    alone = dict(a_format="nvfp4", a_global_scale=1.0, out=one)
    calls: Calls = {
        "groups": lambda: ptxrt.matmul_grouped(x, weights, routing.starts, **grouped),
        "one product": lambda: ptxrt.matmul(rows, flat, **alone),
    }
    return calls, {"groups": weights.nbytes * used // experts, "one product": flat.nbytes}


def prefill(groups: int = 8, rows: int = 1024, size: int = 4096) -> tuple[Calls, dict[str, int]]:
    """Return a product of groups of many rows and one product of as many rows, with their flops."""
    x, weights = operand(normal(groups * rows, size), "nvfp4"), operand(normal(groups, size, size), "nvfp4")
    one = operand(normal(size, size), "nvfp4")
    starts = ptxrt.to_device(np.arange(groups + 1, dtype=np.int32) * rows)
    out = ptxrt.empty((groups * rows, size), bf16.dtype)
    calls: Calls = {
        "groups": lambda: ptxrt.matmul_grouped(x, weights, starts, out=out),
        "one product": lambda: ptxrt.matmul(x, one, out=out),
    }
    return calls, dict.fromkeys(calls, 2 * groups * rows * size * size)


def gate(rows: int = 4096, cols: int = 8192, size: int = 4096) -> tuple[Calls, dict[str, int]]:
    """Return a product that gates and quantizes, the plain one, and the three equivalent launches, with their flops."""
    a, b = operand(normal(rows, size), "mxfp8"), operand(normal(cols, size), "mxfp8")
    c, gated = ptxrt.empty((rows, cols), bf16.dtype), normal(rows, cols // 2)
    ended, quantized = (ptxrt.quantize(gated, "mxfp8") for _ in range(2))

    def apart():
        ptxrt.matmul(a, b, out=c)
        ptxrt.swiglu(c, interleaved=True, out=gated)
        return ptxrt.quantize(gated, "mxfp8", scale_rule="rceil", out=quantized)

    calls: Calls = {
        "gated and quantized": lambda: ptxrt.matmul(a, b, activation="swiglu", out=ended),
        "plain product": lambda: ptxrt.matmul(a, b, out=c),
        "three launches": apart,
    }
    return calls, dict.fromkeys(calls, 2 * rows * cols * size)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", choices=["native", "portable"], help="the best that is there by default")
    parser.add_argument("--repeat", type=int, default=REPEAT, help="how often each call is timed (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args()
    there = ptxrt.machines()
    machine = options.machine or next((name for name in ("native", "portable") if there[name].available), "portable")
    if not there[machine].available:
        skip(f"no GPU machine: {there[machine].detail}")
    rows = []
    with ptxrt.using(machine) as backend:
        clock = Clock(repeat=options.repeat)
        for make in (decode, prefill, gate):
            calls, work = make()
            times = clock.times(calls)
            for name, time in times.items():
                rate = work[name] / time.median / 1e6  # GB/s or GFLOPS
                rows.append({"part": make.__name__, "side": name, **time.fields(), "work": work[name], "rate": rate})
        head = {"machine": about(backend)}
    if options.json:
        print(json.dumps({**head, "rows": rows}, indent=1))
        return
    print(title(head["machine"]))
    for row in rows:
        unit = f"{row['rate']:.0f} GB/s of weights" if row["part"] == "decode" else f"{row['rate'] / 1e3:.1f} TFLOPS"
        print(f"{row['part']:8} {row['side']:20} {row['milliseconds']:.4f} ms  {unit}")


if __name__ == "__main__":
    main()
