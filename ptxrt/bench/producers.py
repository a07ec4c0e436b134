"""Norms, gates, rotations and writes to a cache, compared with a copy on the same device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from ..array import DeviceArray, empty, to_device
from ..describe import text_table
from ..errors import ArgumentError
from ..formats import bf16
from ..graphs import graph
from ..launch import plan_launch
from ..ops.append_qkv import append_qkv
from ..ops.cache import KVCache
from ..ops.endings import ENDINGS
from ..ops.produce import gelu, layernorm, rmsnorm, swiglu
from ..ops.rotation import rope, rope_table
from ..ops.scales import fill_f32
from ..prepared import prepare
from . import plots
from .launches import bare_launch
from .timing import (
    L2_STATES,
    REPEAT,
    Clock,
    about,
    check_fits,
    checked_repeat,
    checked_states,
    copy_call,
    gpu,
    title,
    turns,
)

SHAPES = ((8192, 8192), (4096, 14336), (1, 4096))
PLAIN, COPY = "bf16", "copy"
# The heads that rope rotates, and those of the projection whose keys and values are appended.
HEAD, HEADS, HEADS_KV = 128, 32, 8
PAGE = 16
# One token: the columns of its row, and the launches that follow each other in a graph or in a stream.
TOKEN_COLUMNS, IN_TURN = 4096, 100
BARE = "bare launch"


class Side(NamedTuple):
    """One timed call: the function, its output format, the call, and the bytes that it reads and writes."""

    function: str
    format: str
    call: Callable[[], Any]
    bytes: int


def _normal(*shape: int, device: int) -> DeviceArray:
    return to_device(np.random.default_rng(0).standard_normal(shape, np.float32).astype(bf16.dtype), device=device)


def _calls(rows: int, cols: int, device: int) -> dict[str, tuple]:
    """Return the arguments of each function for results of [rows, cols]; for `rope` of whole heads."""
    x, weight = _normal(rows, cols, device=device), _normal(cols, device=device)
    calls = dict(rmsnorm=(rmsnorm, x, weight), layernorm=(layernorm, x, weight, weight), gelu=(gelu, x))
    calls["swiglu"] = swiglu, _normal(rows, 2 * cols, device=device)
    if cols % HEAD == 0:
        table = to_device(rope_table(HEAD, rows), device=device)
        positions = to_device(np.arange(rows, dtype=np.int32), device=device)
        calls["rope"] = rope, x.reshape(rows, cols // HEAD, HEAD), table, positions
    return calls


def _producers(functions: Sequence[str], formats: Sequence[str], rows: int, cols: int, device: int) -> Iterator[Side]:
    for name, (function, *arguments) in _calls(rows, cols, device).items():
        if name not in functions:
            continue
        for format in formats:
            options: dict[str, Any] = {} if format == PLAIN else dict(format=format)
            if format == "nvfp4":
                options["global_scale"] = to_device(np.float32(1), device=device)
            options["out"] = function(*arguments, **options)
            call = prepare(function, *arguments, **options)
            moved = sum(launch.bytes_moved for launch in call.launches)
            yield Side(name, format, lambda call=call, arguments=arguments: call(*arguments), moved)


def _appending(formats: Sequence[str], tokens: int, device: int) -> Iterator[Side]:
    """Yield `append_qkv` of heads with norms, into caches of each format."""
    qkv = _normal(tokens, (HEADS + 2 * HEADS_KV) * HEAD, device=device)
    table = to_device(rope_table(HEAD, tokens), device=device)
    weight = to_device(np.ones(HEAD, np.float32), device=device)
    numbers = np.arange(tokens)
    slots, positions = (to_device(numbers.astype(dtype), device=device) for dtype in (np.int64, np.int32))
    for format in formats:
        cache = KVCache(-(-tokens // PAGE), PAGE, HEADS_KV, HEAD, format=format, device=device)
        written = cache.nbytes // (cache.pages * PAGE) * tokens
        arguments = qkv, cache, slots, positions, table
        # Prepared, since the checks of a call take longer than its launches.
        call = prepare(append_qkv, *arguments, heads=HEADS, q_weight=weight, k_weight=weight)
        moved = qkv.nbytes + 2 * tokens * HEADS * HEAD + written
        yield Side("append_qkv", format, lambda call=call, arguments=arguments: call(*arguments), moved)


FUNCTIONS = ("rmsnorm", "layernorm", "gelu", "swiglu", "rope", "append_qkv")


def producer_rows(
    functions: Sequence[str] = (),
    formats: Sequence[str] = (),
    shapes: Sequence[tuple[int, int]] = (),
    l2: Sequence[str] = (),
    repeat: int = REPEAT,
) -> list[dict[str, Any]]:
    """Time producers of bfloat16 on the current GPU; one row for each function, format, shape and state of the L2.

    Empty choices mean all: FUNCTIONS, "bf16" and the block formats, SHAPES of results ([rows, cols]), the states of the
    L2. append_qkv takes `rows` tokens of 32 heads of 128 with 8 heads of keys and values, with norms. All sides of a
    shape, and a copy of [rows, cols] on the device, are timed in turns; the rows named "copy" are those of the copy.
    Fields: function, format, shape, l2, bytes, milliseconds (median), fastest, slowest, repeat, gb_per_s,
    copy_gb_per_s, share_of_copy. ArgumentError for unknown names; MachineError on the emulator.
    """
    what = "bench produce"
    backend = gpu(what)
    for kind, names, there in (("function", functions, FUNCTIONS), ("format", formats, (PLAIN, *ENDINGS))):
        for name in names:
            if name not in there:
                raise ArgumentError(f"{what}: {kind} is {name!r}; there are {', '.join(map(repr, there))}")
    functions, formats = functions or FUNCTIONS, formats or (PLAIN, *ENDINGS)
    states = checked_states(what, l2) or L2_STATES
    clock = Clock(repeat=checked_repeat(what, repeat))
    rows: list[dict[str, Any]] = []
    for shape in shapes or SHAPES:
        check_fits(what, 10 * shape[0] * max(shape[1], (HEADS + 2 * HEADS_KV) * HEAD), backend)
        device = backend.ordinal
        x, y = (empty(shape, bf16.dtype, device=device) for _ in range(2))
        sides = [Side(COPY, PLAIN, copy_call(x, y), 2 * x.nbytes), *_producers(functions, formats, *shape, device)]
        if "append_qkv" in functions:
            sides += _appending(formats, shape[0], device)
        for state in states:
            times = clock.times({side[:2]: side.call for side in sides}, state)
            rates = {side[:2]: side.bytes / times[side[:2]].median / 1e6 for side in sides}
            copied = rates[COPY, PLAIN]
            rows += [
                {
                    **dict(function=side.function, format=side.format, shape=list(shape), l2=state, bytes=side.bytes),
                    **times[side[:2]].fields(),
                    **dict(gb_per_s=rates[side[:2]], copy_gb_per_s=copied, share_of_copy=rates[side[:2]] / copied),
                }
                for side in sides
            ]
    return rows


def token_rows(functions: Sequence[str] = (), repeat: int = REPEAT) -> list[dict[str, Any]]:
    """Time producers of one token into bfloat16, IN_TURN launches in a row; one row for each function.

    Every launch waits for the one before. Microseconds of one launch: `node`, as a node of a graph, and `call`, as a
    prepared call in a stream, with the host's time and until the device has ended. times_node and times_call are the
    multiples of the row named BARE: a launch of cuLaunchKernel that writes one number.
    """
    backend = gpu("bench produce")
    device = backend.ordinal
    sides = list(_producers(functions or FUNCTIONS, (PLAIN,), 1, TOKEN_COLUMNS, device))
    if "append_qkv" in (functions or FUNCTIONS):
        sides += _appending((PLAIN,), 1, device)
    calls = {side.function: side.call for side in sides}
    one = empty((1,), np.float32, device=device)
    gathered = {
        BARE: _in_turn(partial(fill_f32, x=one, value=0.0)),
        **{name: _in_turn(call) for name, call in calls.items()},
    }
    nodes = Clock(repeat=checked_repeat("bench produce", repeat)).times(gathered)
    calls = {BARE: bare_launch(plan_launch(fill_f32.bind(x=one, value=0.0), backend), [one], value=0.0), **calls}

    def ended(call: Callable[[], Any]) -> None:
        for _ in range(IN_TURN):
            call()
        backend.finish()

    streamed = turns({name: partial(ended, call) for name, call in calls.items()}, 1, repeat, backend.finish)
    node = {name: times.median * 1e3 / IN_TURN for name, times in nodes.items()}
    call = {name: median(times) / IN_TURN for name, times in streamed.items()}
    return [
        dict(
            **dict(function=name, node=node[name], call=call[name], repeat=repeat),
            **dict(times_node=node[name] / node[BARE], times_call=call[name] / call[BARE]),
        )
        for name in calls
    ]


def _in_turn(call: Callable[[], Any]) -> Callable[[], Any]:
    """Return the launch of a graph of IN_TURN calls."""
    with graph() as gathered:
        for _ in range(IN_TURN):
            call()
    return gathered.launch


def producer_report(**choices) -> dict[str, Any]:
    """Return `producer_rows`, `token_rows` and their machine: machine, rows, tokens."""
    rows = producer_rows(**choices)
    tokens = token_rows(choices.get("functions", ()), choices.get("repeat", REPEAT))
    return {"machine": about(gpu("bench produce")), "rows": rows, "tokens": tokens}


def _size(row: dict[str, Any]) -> str:
    return f"{row['shape'][0]}x{row['shape'][1]}"


def producer_table(report: dict[str, Any]) -> Iterator[str]:
    """Format a report for a terminal."""
    rows = report["rows"]
    yield f"between products, of bfloat16, on {title(report['machine'])}"
    yield f"medians of {rows[0]['repeat']}, all rows of a shape in turns; GB/s of bytes read and written"
    head = ["function", "into", "shape", "L2", "MB", "ms", "fastest..slowest", "GB/s", "of copy"]
    body = [
        [
            *(row["function"], row["format"], _size(row), row["l2"], f"{row['bytes'] / 1e6:.2f}"),
            *(f"{row['milliseconds']:.4f}", f"{row['fastest']:.4f}..{row['slowest']:.4f}"),
            *(f"{row['gb_per_s']:.0f}", f"{row['share_of_copy']:.1%}"),
        ]
        for row in rows
    ]
    yield from text_table([head, *body])
    yield ""
    yield f"one token, {IN_TURN} launches in turn: microseconds of a node of a graph, and of a call in a stream"
    head = ["function", "node", "times bare", "call", "times bare"]
    names = ("node", "times_node", "call", "times_call")
    yield from text_table([head, *([t["function"], *(f"{t[n]:.2f}" for n in names)] for t in report["tokens"])])


def draw_producers(path: Path, report: dict[str, Any]) -> None:
    """Draw a report: shares of the copy's speed by function and format; a panel for each shape and state of the L2."""
    rows = [row for row in report["rows"] if row["function"] != COPY]
    sizes, states, formats, names = (
        list(dict.fromkeys(values))
        for values in (map(_size, rows), *((row[key] for row in rows) for key in ("l2", "format", "function")))
    )
    shares = {(_size(row), row["l2"], row["format"], row["function"]): 100 * row["share_of_copy"] for row in rows}
    figure, panels = plots.figure_of(len(sizes), len(states), len(names))
    figure.suptitle(f"between products: {title(report['machine'])}")
    for size, line in zip(sizes, panels):
        for state, axes in zip(states, line):
            bars = {format: [shares.get((size, state, format, name)) for name in names] for format in formats}
            plots.grouped_bars(axes, names, bars)
            axes.set_title(f"{size}, L2 {state}", fontsize="medium")
            axes.set_ylabel("% of a copy's bytes per second")
    plots.save(figure, path, panels[0][0])
