"""Traces: the receipts of all launches in a block, with times on request, as a table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from . import launch
from .backend import Backend, Queue
from .launch import Launch


class trace:
    """Collect a receipt of every launch of this process in a block.

        with ptxrt.trace(timing=True) as t:
            ptxrt.quantize(x, "mxfp4")
        print(t)                # a table
        t.rows()                # a list of dicts; t.json() the same as text

    Args:
        timing: Whether each launch is also measured between two events in its stream, on the emulator by the host's
            clock. Reading the times waits for the events. Without timing a trace adds no work to a stream.
    """

    def __init__(self, *, timing: bool = False):
        self.timing = timing
        self._records: list[tuple[Launch, Backend, Any, Any]] = []

    def __enter__(self) -> "trace":
        launch.observers.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        launch.observers.remove(self)

    def before(self, backend: Backend, queue: Queue):
        """Run before each launch."""
        return backend.timed_event(queue) if self.timing and not backend.is_capturing(queue) else None

    def after(self, receipt: Launch, backend: Backend, queue: Queue, start) -> None:
        """Run after each launch."""
        self._records.append((receipt, backend, start, None if start is None else backend.timed_event(queue)))

    def __repr__(self) -> str:
        return f"<trace of {len(self)} launches{', timed' if self.timing else ''}>"

    @property
    def launches(self) -> tuple[Launch, ...]:
        """The receipts, in the order of the launches."""
        return tuple(record[0] for record in self._records)

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Launch]:
        return iter(self.launches)

    def milliseconds(self) -> list[float | None]:
        """Return the milliseconds of each launch, None if it was not measured. Waits for launches that still run."""
        times: list[float | None] = []
        for _, backend, start, stop in self._records:
            if start is None:
                times.append(None)
            else:
                backend.reached(stop, wait=True)
                times.append(stop.milliseconds_after(start))
        return times

    def rows(self) -> list[dict[str, Any]]:
        """One dict for each launch: kernel, machine, detail, module, entry, grid, block, shared_bytes, bytes, flops,
        milliseconds."""
        return [
            {
                **{"kernel": r.kernel, "machine": r.machine, "detail": r.detail, "module": r.module, "entry": r.entry},
                **{"grid": list(r.grid), "block": list(r.block), "shared_bytes": r.shared_bytes},
                **{"bytes": r.bytes_moved, "flops": r.flops, "milliseconds": time},
            }
            for r, time in zip(self.launches, self.milliseconds())
        ]

    def json(self) -> str:
        """The rows as JSON text."""
        return json.dumps(self.rows(), indent=1)

    def __str__(self) -> str:
        from .describe import product, text_table

        head = ["kernel", "entry", "machine", "module", "grid", "block", "shared", "bytes", "flops", "ms", "GB/s"]
        body = [
            [
                row["kernel"],
                row["entry"],
                row["machine"],
                row["module"][:12],
                product(row["grid"]),
                product(row["block"]),
                str(row["shared_bytes"]),
                *("" if row[name] is None else str(row[name]) for name in ("bytes", "flops")),
                *_rates(row),
            ]
            for row in self.rows()
        ]
        return "\n".join(text_table([head, *body]))


def _rates(row: dict[str, Any]) -> tuple[str, str]:
    """The milliseconds and GB/s of a row as text; empty if they are unknown."""
    time = row["milliseconds"]
    if time is None:
        return "", ""
    rate = "" if not time or row["bytes"] is None else f"{row['bytes'] / time / 1e6:.1f}"
    return f"{time:.4f}", rate
