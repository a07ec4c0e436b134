"""Decoding on paged caches in every format, and appending, compared with a copy on the same device.

    python benchmarks/cache.py [--batch 32] [--keys 8192] [--heads 8] [--group 4] [--dim 128] [--page 16] [--repeat 20]

Decoding has one query for each sequence. Its rate counts the bytes of K and V, scales included; that of the copy counts
its reads and writes. Appending writes 8192 tokens in bfloat16; its rate counts reads and writes. The L2 is flushed
before each call. "layers" are calls of decoding on several caches, one behind the other in a graph, as the layers of a
model; their keys and values together are larger than the L2, and the time is that of one call.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from peers import skip

import ptxrt
from ptxrt.bench.timing import FLUSH_CACHES, FLUSHED, WARM, Clock, about, copy_call, gpu, title
from ptxrt.describe import text_table

FORMATS = ("bf16", "mxfp8", "mxfp4", "nvfp4")
APPENDED = 8192

Call = tuple[Callable[[], Any], int]


def filled(format: str, pages: int, page: int, heads: int, dim: int) -> ptxrt.KVCache:
    """Return a cache with all rows written, page by page."""
    cache = ptxrt.KVCache(pages, page, heads, dim, format=format)
    rng, tokens = np.random.default_rng(0), min(pages * page, 4096)
    rows = [
        ptxrt.to_device(rng.standard_normal((tokens, heads, dim), dtype=np.float32).astype(ml_dtypes.bfloat16))
        for _ in "kv"
    ]
    for first in range(0, pages * page, tokens):
        slots = np.arange(first, first + tokens)
        cache.append(*rows, np.where(slots < pages * page, slots, -1))
    return cache


def decoding(format: str, batch: int, keys: int, heads: int, group: int, dim: int, page: int) -> Call:
    """Return a call with one query for each sequence on its own pages in any order, and the bytes of K and V."""
    rng, table = np.random.default_rng(1), -(-keys // page)
    cache = filled(format, batch * table, page, heads, dim)
    pages = ptxrt.to_device(rng.permutation(batch * table).astype(np.int32).reshape(batch, table))
    lengths = ptxrt.to_device(np.full(batch, keys, np.int32))
    q = ptxrt.to_device(
        rng.standard_normal((batch, heads * group, 1, dim), dtype=np.float32).astype(ml_dtypes.bfloat16)
    )
    out = ptxrt.empty(q.shape, q.dtype)
    return lambda: ptxrt.attention_paged(q, cache, pages, lengths, out=out), cache.nbytes


def layers(count: int, *shape) -> Callable[[], Any]:
    """Return the launch of a graph with `count` calls of `decoding`, each on a cache of its own."""
    calls = [decoding(*shape)[0] for _ in range(count)]
    for call in calls:
        call()  # loads modules
    with ptxrt.graph() as found:
        for call in calls:
            call()
    return found.launch


def appending(format: str, tokens: int, heads: int, dim: int, page: int) -> Call:
    """Return a call that appends tokens to a cache, and the bytes that it reads and writes."""
    rng, cache = np.random.default_rng(2), ptxrt.KVCache(-(-tokens // page), page, heads, dim, format=format)
    k, v = (
        ptxrt.to_device(rng.standard_normal((tokens, heads, dim), dtype=np.float32).astype(ml_dtypes.bfloat16))
        for _ in "kv"
    )
    slots = ptxrt.to_device(rng.permutation(tokens).astype(np.int64))
    return lambda: cache.append(k, v, slots), k.nbytes + v.nbytes + cache.nbytes


def rows(options: argparse.Namespace) -> list[list[str]]:
    """Return a row of the table for each format and call."""
    clock, found = Clock(repeat=options.repeat), []
    sizes = (options.heads, options.group, options.dim, options.page)
    decode = {format: decoding(format, options.batch, options.keys, *sizes) for format in FORMATS}
    append = {format: appending(format, APPENDED, options.heads, options.dim, options.page) for format in FORMATS}
    for what, sides in dict(decode=decode, append=append).items():
        found += rows_of(what, clock, {name: (call, moved, 1) for name, (call, moved) in sides.items()}, FLUSHED)
    flushing = FLUSH_CACHES * clock.backend.attribute("L2_CACHE_SIZE")
    counts = {format: max(-(-flushing // moved), 2) for format, (_, moved) in decode.items()}
    graphs = {
        format: (layers(count, format, options.batch, options.keys, *sizes), decode[format][1], count)
        for format, count in counts.items()
    }
    return found + rows_of("layers", clock, graphs, WARM)


def rows_of(what: str, clock: Clock, sides: dict[str, tuple[Callable[[], Any], int, int]], l2: str) -> list[list[str]]:
    """Time a call of each format and a copy. sides: format -> the call, the bytes that one of its parts moves, and how
    many parts it has."""
    source = ptxrt.empty((max(moved for _, moved, _ in sides.values()) // 2,), np.uint8)
    sides = {**sides, "copy": (copy_call(source, ptxrt.empty(source.shape, np.uint8)), 2 * source.nbytes, 1)}
    times = clock.times({name: call for name, (call, _, _) in sides.items()}, l2)
    medians = {name: times[name].median / parts for name, (_, _, parts) in sides.items()}
    rates = {name: moved / medians[name] / 1e6 for name, (_, moved, _) in sides.items()}
    return [
        [
            *(what, name, f"{medians[name]:.4f}"),
            "..".join(f"{end(times[name].samples) / parts:.4f}" for end in (min, max)),
            *(f"{rates[name]:.0f}", f"{rates[name] / rates['copy']:.2f}", f"{medians['bf16'] / medians[name]:.2f}"),
        ]
        for name, (_, _, parts) in sides.items()
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in dict(batch=32, keys=8192, heads=8, group=4, dim=128, page=16, repeat=20).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    try:
        where = title(about(gpu("benchmarks/cache.py")))
    except ptxrt.MachineError as error:
        skip(str(error))
    print(f"caches in pages on {where}; medians of {options.repeat}; the L2 holds no keys or values when a call begins")
    head = ["call", "format", "ms", "fastest..slowest", "GB/s", "of copy", "x bf16"]
    print("\n".join(text_table([head, *rows(options)])))


if __name__ == "__main__":
    main()
