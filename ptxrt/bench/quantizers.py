"""Quantizers and dequantizers, compared with a copy on the same device: bytes per second and the share of
the copy's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..array import DeviceArray, empty, to_device
from ..blocks import BLOCK_FORMATS
from ..describe import text_table
from ..errors import ArgumentError
from ..formats import FORMATS
from ..ops.quantize import dequantize, quantize
from ..ops.quantized import block_format
from ..prepared import prepare
from . import plots
from .timing import L2_STATES, REPEAT, Clock, about, check_fits, checked_repeat, checked_states, copy_call, gpu, title

SHAPES = ((8192, 8192), (1024, 1024), (2048, 2048), (4096, 8192), (8192, 4096))
DTYPES = ("f32", "f16", "bf16")
# The share of the copy's bytes per second that a quantizer should reach.
WANTED_SHARE = 0.85

COPY = "copy"


def parse_shape(text: str) -> tuple[int, int]:
    """Parse [rows, cols] from ROWSxCOLS; ArgumentError for anything else."""
    rows, times, cols = text.partition("x")
    if not (times and rows.isdecimal() and cols.isdecimal() and int(rows) and int(cols)):
        raise ArgumentError(f"the shape to measure is {text!r}; write ROWSxCOLS, such as 8192x8192")
    return int(rows), int(cols)


class Side(NamedTuple):
    """One timed call: the format, the source of an NVFP4 global scale (else None), the call, and the bytes that it
    moves.
    """

    format: str
    global_scale: str | None
    call: Callable[[], Any]
    bytes: int

    @property
    def name(self) -> str:
        """The name in tables and plots."""
        return self.format + (f", scale {self.global_scale}" if self.global_scale else "")


def _prepared_side(format: str, source: str | None, function, *arguments, **named) -> Side:
    """Prepare a call; its bytes are those that its launches read and write according to their declarations,
    each once."""
    call = prepare(function, *arguments, **named)
    return Side(format, source, lambda: call(*arguments), sum(launch.bytes_moved for launch in call.launches))


def quantize_sides(x: DeviceArray, y: DeviceArray, formats: Sequence[str], axis: int) -> list[Side]:
    """Return `quantize` to each format; NVFP4 once with a computed global scale, for which x is read twice, and once
    with a given one."""
    sides = []
    for format in formats:
        out = quantize(x, format, axis=axis)
        if BLOCK_FORMATS[format].two_level:
            given = dict(axis=axis, global_scale=to_device(out.global_scale.to_numpy(), device=x.device))
            refers = quantize(x, format, **given)
            sides.append(_prepared_side(format, "given", quantize, x, format, **given, out=refers))
        source = "computed" if BLOCK_FORMATS[format].two_level else None
        sides.append(_prepared_side(format, source, quantize, x, format, axis=axis, out=out))
    return sides


def dequantize_sides(x: DeviceArray, y: DeviceArray, formats: Sequence[str], axis: int) -> list[Side]:
    """Return `dequantize` of each format to y's dtype, all into y."""
    return [_prepared_side(format, None, dequantize, quantize(x, format, axis=axis), out=y) for format in formats]


SIDES = {"quantize": quantize_sides, "dequantize": dequantize_sides}


def quantizer_rows(
    operation: str,
    formats: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    shapes: Sequence[tuple[int, int]] = (),
    axis: int = -1,
    l2: Sequence[str] = (),
    repeat: int = REPEAT,
) -> list[dict[str, Any]]:
    """Time "quantize" or "dequantize" on the current GPU machine; one row for each format, dtype, shape and state of
    the L2.

    Empty choices mean all: the formats, DTYPES, SHAPES ([rows, cols]), the states of the L2 ("warm", "flushed"). All
    sides of a dtype and shape, and a copy of x [rows, cols] on the device, are timed in turns; the rows named "copy"
    are those of the copy. Fields: operation, format, global_scale ("computed", "given" or None), dtype, shape, axis,
    l2, bytes, milliseconds (median), fastest, slowest, repeat, gb_per_s, copy_gb_per_s, share_of_copy. ArgumentError
    for arguments that `quantize` refuses; MachineError on the emulator.
    """
    what = f"bench {operation}"
    backend = gpu(what)
    formats = list(dict.fromkeys(block_format(what, format).name for format in formats)) or list(BLOCK_FORMATS)
    states = checked_states(what, l2) or L2_STATES
    clock = Clock(repeat=checked_repeat(what, repeat))
    rows = []
    for shape in shapes or SHAPES:
        check_fits(what, 2 * 4 * shape[0] * shape[1], backend)
        host = np.random.default_rng(0).standard_normal(shape, np.float32)
        for dtype in dtypes or DTYPES:
            x = to_device(host.astype(FORMATS[dtype].dtype), device=backend.ordinal)
            y = empty(shape, x.dtype, device=backend.ordinal)
            sides = [_copy_side(x, y), *SIDES[operation](x, y, formats, axis)]
            for state in states:
                times = clock.times({side.name: side.call for side in sides}, state)
                rates = {side.name: side.bytes / times[side.name].median / 1e6 for side in sides}
                rows += [
                    {
                        **{"operation": operation, "format": side.format, "global_scale": side.global_scale},
                        **{"dtype": dtype, "shape": list(shape), "axis": axis, "l2": state, "bytes": side.bytes},
                        **times[side.name].fields(),
                        **{
                            "gb_per_s": rates[side.name],
                            "copy_gb_per_s": rates[COPY],
                            "share_of_copy": rates[side.name] / rates[COPY],
                        },
                    }
                    for side in sides
                ]
    return rows


def _copy_side(x: DeviceArray, y: DeviceArray) -> Side:
    """Return the driver's copy of x to y."""
    return Side(COPY, None, copy_call(x, y), 2 * x.nbytes)


def _label(row: dict[str, Any]) -> str:
    return Side(row["format"], row["global_scale"], None, 0).name


def _size(row: dict[str, Any]) -> str:
    return f"{row['shape'][0]}x{row['shape'][1]}"


def quantizer_report(operation: str, **choices) -> dict[str, Any]:
    """Return `quantizer_rows` and their machine: operation, machine, rows."""
    rows = quantizer_rows(operation, **choices)
    return {"operation": operation, "machine": about(gpu(f"bench {operation}")), "rows": rows}


def quantizer_table(report: dict[str, Any]) -> Iterator[str]:
    """Format a report for a terminal."""
    rows = report["rows"]
    yield f"{report['operation']} along axis {rows[0]['axis']} on {title(report['machine'])}"
    yield f"medians of {rows[0]['repeat']}, all rows of a shape and dtype in turns; GB/s of bytes read and written"
    head = ["format", "dtype", "shape", "L2", "MB", "ms", "fastest..slowest", "GB/s", "of copy"]
    body = [
        [
            _label(row),
            row["dtype"],
            _size(row),
            row["l2"],
            f"{row['bytes'] / 1e6:.2f}",
            f"{row['milliseconds']:.4f}",
            *(f"{row['fastest']:.4f}..{row['slowest']:.4f}", f"{row['gb_per_s']:.0f}", f"{row['share_of_copy']:.1%}"),
        ]
        for row in rows
    ]
    yield from text_table([head, *body])


def draw_quantizers(path: Path, report: dict[str, Any]) -> None:
    """Draw a report: shares of the copy's speed by format and dtype; a panel for each shape and state of the L2."""
    rows = [row for row in report["rows"] if row["format"] != COPY]
    sizes, states, dtypes, labels = (
        list(dict.fromkeys(values))
        for values in (map(_size, rows), (r["l2"] for r in rows), (r["dtype"] for r in rows), map(_label, rows))
    )
    shares = {(_size(r), r["l2"], r["dtype"], _label(r)): 100 * r["share_of_copy"] for r in rows}
    figure, panels = plots.figure_of(len(sizes), len(states), len(labels))
    figure.suptitle(f"{report['operation']} along axis {rows[0]['axis']}: {title(report['machine'])}")
    for size, line in zip(sizes, panels):
        for state, axes in zip(states, line):
            plots.grouped_bars(
                axes, labels, {dtype: [shares.get((size, state, dtype, label)) for label in labels] for dtype in dtypes}
            )
            axes.axhline(100 * WANTED_SHARE, color="black", linewidth=1, linestyle="--", label=f"{WANTED_SHARE:.0%}")
            axes.set_title(f"{size}, L2 {state}", fontsize="medium")
            axes.set_ylabel("% of a copy's bytes per second")
    plots.save(figure, path, panels[0][0])
