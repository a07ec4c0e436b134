"""Host time of one launch: bare, prepared, by the public function, and by CuPy."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from .. import units
from ..array import empty, to_device
from ..describe import text_table
from ..errors import ArgumentError
from ..launch import Plan, plan_launch
from ..ops.quantize import QUANTIZE, quantize
from ..prepared import prepare
from . import plots
from .timing import about, gpu, title, turns

# Small arrays, so that the device keeps up and only host time is measured.
ROWS, COLS = 32, 1024


def launch_rows(calls: int = 200, rounds: int = 60) -> list[dict[str, Any]]:
    """Measure the host time of one launch of quantize_mxfp4 in several ways; rows of side, microseconds, fastest,
    slowest, ratio.
    """
    backend = gpu("bench launch")
    if calls < 1 or rounds < 1:
        raise ArgumentError(f"bench launch: {calls} calls in {rounds} rounds; pass numbers from 1 on")
    kernel = QUANTIZE["mxfp4"]
    x = to_device(np.random.default_rng(0).standard_normal((ROWS, COLS), dtype=np.float32))
    out = quantize(x, "mxfp4")
    arrays = [x, out.codes, out.scales]
    plan = plan_launch(kernel.bind(x, codes=out.codes, scales=out.scales), backend)
    codes, scales = (empty(a.shape, a.dtype) for a in arrays[1:])
    prepared = prepare(quantize, x, "mxfp4", out=out)
    prepared_kernel = prepare(kernel, x, codes=codes, scales=scales)
    sides: dict[str, Callable[[], Any]] = {
        "bare cuLaunchKernel": bare_launch(plan, arrays),
        "prepared quantize": lambda: prepared(x, "mxfp4", out=out),
        "prepared kernel": lambda: prepared_kernel(x, codes=codes, scales=scales),
        "quantize(out=)": lambda: quantize(x, "mxfp4", out=out),
        "kernel with outputs": lambda: kernel(x, codes=codes, scales=scales),
        "quantize": lambda: quantize(x, "mxfp4"),
    }
    peer = cupy_launch(plan, arrays)
    if peer is not None:
        sides["CuPy RawKernel"] = peer
    samples = turns(sides, calls, rounds, lambda: backend.finish())
    base = median(samples["bare cuLaunchKernel"])
    return [
        {
            **{"side": name, "microseconds": median(times), "fastest": min(times), "slowest": max(times)},
            **{"ratio": median(times) / base, "machine": backend.describe(), "shape": [ROWS, COLS]},
        }
        for name, times in samples.items()
    ]


def bare_launch(plan: Plan, arrays: list, **numbers: float) -> Callable[[], Any]:
    """Return a call of cuda-python's cuLaunchKernel with prepacked parameters: the least that any caller of
    it spends. numbers: those of the kernel, by name, where they are not the defaults."""
    packet = plan.packet()
    for slot, array in zip(plan.slots, arrays):
        packet.words[slot] = array.address
    for scalar in plan.scalars:
        scalar.put(packet, numbers.get(scalar.name, scalar.argument.default))
    function, stream = plan.entry.handle, plan.backend.own_queue.native
    (gx, gy, gz), (bx, by, bz), shared, extra = plan.grid, plan.block, plan.shared_bytes, packet.extra
    launch = plan.backend.binding("cuLaunchKernel")

    def bare():
        launch(function, gx, gy, gz, bx, by, bz, shared, stream, 0, extra)

    bare.packet = packet  # `extra` points to its memory
    return bare


def cupy_launch(plan: Plan, arrays: list) -> Callable[[], Any] | None:
    """Return a launch of the same entry by CuPy on the same memory; None without CuPy."""
    try:
        import cupy
    except ImportError:
        return None
    with units.fatbin_file(plan.bound.unit, plan.backend.name == "portable") as path:
        function = cupy.RawModule(path=str(path)).get_function(plan.entry.name)
    values: list[Any] = [cupy.asarray(array) for array in arrays]
    values += [scalar.argument.formats[0].dtype.type(scalar.argument.default) for scalar in plan.scalars]
    axes = plan.entry.params[len(values) :]
    values += [
        np.dtype(f"i{param.size}").type(plan.bound.axes[axis]) for param, axis in zip(axes, plan.bound.kernel.axes)
    ]
    arguments = tuple(values)
    stream = cupy.cuda.ExternalStream(plan.backend.own_queue.handle)

    def peer():
        with stream:
            function(plan.grid, plan.block, arguments, shared_mem=plan.shared_bytes)

    return peer


def launch_report(calls: int = 200, rounds: int = 60) -> dict[str, Any]:
    """Return `launch_rows` and their machine: operation, machine, rows."""
    rows = launch_rows(calls, rounds)
    return {"operation": "launch", "machine": about(gpu("bench launch")), "rows": rows}


def launch_table(report: dict[str, Any]) -> Iterator[str]:
    """Format a report for a terminal."""
    rows = report["rows"]
    yield (
        f"one launch of quantize_mxfp4 on float32 {rows[0]['shape']}, time of the host; {title(report['machine'])}, "
        f"Python {sys.version.split()[0]}"
    )
    head = ["way", "median us", "fastest", "slowest", "times bare"]
    body = [[r["side"], *(f"{r[name]:.2f}" for name in ("microseconds", "fastest", "slowest", "ratio"))] for r in rows]
    yield from text_table([head, *body])


def draw_launches(path: Path, report: dict[str, Any]) -> None:
    """Draw the medians."""
    heading = f"host time of one launch of quantize_mxfp4\n{title(report['machine'])}"
    plots.bars(path, report["rows"], "side", "microseconds", "microseconds", heading)
