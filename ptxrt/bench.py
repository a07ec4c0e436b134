"""Benchmarks that pair both sides in one run: turn by turn, so that all meet the same machine in the same state."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median
from typing import Any, Callable, Iterator, Mapping

import numpy as np

from .array import empty, to_device
from .backend import current
from .describe import text_table
from .errors import ArgumentError
from .launch import Plan, plan_launch
from .ops.quantize import QUANTIZE, quantize
from .prepared import prepare

# Small, so that the device keeps up and the host alone is measured.
ROWS, COLS = 32, 1024


def turns(sides: Mapping[str, Callable[[], Any]], calls: int, rounds: int, settle: Callable[[], Any]) -> dict[str, list[float]]:
    """Microseconds of one call of each side, by round: every side calls `calls` times, then it is another's turn.

    settle: called between turns, outside of the time; it waits until the device has nothing left to do.
    """
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for round in range(-2, rounds):
        for name, call in sides.items():
            settle()
            start = time.perf_counter_ns()
            for _ in range(calls):
                call()
            spent = time.perf_counter_ns() - start
            if round >= 0:
                samples[name].append(spent / calls / 1e3)
    settle()
    return samples


def launch_rows(calls: int = 200, rounds: int = 60) -> list[dict[str, Any]]:
    """The host's time for one launch of quantize_mxfp4 by several ways, as rows: side, microseconds, fastest, slowest, ratio."""
    backend = current()
    if not backend.is_cuda:
        raise ArgumentError("bench launch: the machine is the emulator, which launches nothing; choose a GPU machine")
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


def bare_launch(plan: Plan, arrays: list) -> Callable[[], Any]:
    """cuLaunchKernel of cuda-python with all parameters packed before: what no caller of it can do without."""
    packet = plan.packet()
    for slot, array in zip(plan.slots, arrays):
        packet.words[slot] = array.address
    for scalar in plan.scalars:
        scalar.put(packet, scalar.argument.default)
    function, stream = plan.entry.handle, plan.backend.own_queue.native
    (gx, gy, gz), (bx, by, bz), shared, extra = plan.grid, plan.block, plan.shared_bytes, packet.extra
    launch = plan.backend.binding("cuLaunchKernel")

    def bare():
        launch(function, gx, gy, gz, bx, by, bz, shared, stream, 0, extra)

    bare.packet = packet  # its memory is what `extra` points to
    return bare


def cupy_launch(plan: Plan, arrays: list) -> Callable[[], Any] | None:
    """The same entry by CuPy, on the same memory; None where CuPy is not installed."""
    try:
        import cupy
    except ImportError:
        return None
    from . import units

    path = units.fatbin_path(plan.bound.unit, plan.backend.name == "portable")
    function = cupy.RawModule(path=str(path)).get_function(plan.entry.name)
    values: list[Any] = [cupy.asarray(array) for array in arrays]
    values += [scalar.argument.formats[0].dtype.type(scalar.argument.default) for scalar in plan.scalars]
    axes = plan.entry.params[len(values) :]
    values += [np.dtype(f"i{param.size}").type(plan.bound.axes[axis]) for param, axis in zip(axes, plan.bound.kernel.axes)]
    arguments = tuple(values)
    stream = cupy.cuda.ExternalStream(plan.backend.own_queue.handle)

    def peer():
        with stream:
            function(plan.grid, plan.block, arguments, shared_mem=plan.shared_bytes)

    return peer


def launch_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The rows for a terminal."""
    yield f"one launch of quantize_mxfp4 on float32 {rows[0]['shape']}, time of the host; {rows[0]['machine']}, Python {sys.version.split()[0]}"
    head = ["way", "median us", "fastest", "slowest", "times bare"]
    body = [[r["side"], *(f"{r[name]:.2f}" for name in ("microseconds", "fastest", "slowest", "ratio"))] for r in rows]
    yield from text_table([head, *body])


def draw(path: Path, rows: list[dict[str, Any]], value: str, label: str) -> None:
    """Bars of one value of each row, to a file of any kind that matplotlib writes."""
    try:
        import matplotlib
    except ImportError as error:
        raise ArgumentError(f"--plot needs matplotlib ({error}); pip install 'ptxrt[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 0.6 + 0.4 * len(rows)), layout="constrained")
    axes.barh([row["side"] for row in rows], [row[value] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel(label)
    try:
        figure.savefig(path)
    except ValueError as error:
        raise ArgumentError(f"--plot {path}: {error}") from error
    finally:
        pyplot.close(figure)
