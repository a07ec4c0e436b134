"""Decoding on paged caches in every format, and appending, compared with a copy on the same device.

    python benchmarks/cache.py [--batch 32] [--keys 8192] [--heads 8] [--group 4] [--dim 128] [--page 16] [--repeat 20]

Decoding has one query for each sequence. Its rate counts the bytes of K and V, scales included; that of the copy counts
its reads and writes. Appending writes 8192 tokens in bfloat16; its rate counts reads and writes. The L2 is flushed
before each call.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

import ptxrt
from ptxrt.bench.timing import FLUSHED, Clock, about, copy_call, gpu, title
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
    for what in ("decode", "append"):
        sides = {
            format: decoding(format, options.batch, options.keys, *sizes)
            if what == "decode"
            else appending(format, APPENDED, options.heads, options.dim, options.page)
            for format in FORMATS
        }
        source = ptxrt.empty((max(moved for _, moved in sides.values()) // 2,), np.uint8)
        sides["copy"] = copy_call(source, ptxrt.empty(source.shape, np.uint8)), 2 * source.nbytes
        times = clock.times({name: call for name, (call, _) in sides.items()}, FLUSHED)
        rates = {name: moved / times[name].median / 1e6 for name, (_, moved) in sides.items()}
        for name, rate in rates.items():
            faster = times["bf16"].median / times[name].median
            found.append(
                [
                    what,
                    name,
                    f"{times[name].median:.4f}",
                    times[name].spread,
                    f"{rate:.0f}",
                    f"{rate / rates['copy']:.2f}",
                    f"{faster:.2f}",
                ]
            )
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in dict(batch=32, keys=8192, heads=8, group=4, dim=128, page=16, repeat=20).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    print(f"caches in pages on {title(about(gpu('benchmarks/cache.py')))}; medians of {options.repeat}, L2 flushed")
    head = ["call", "format", "ms", "fastest..slowest", "GB/s", "of copy", "x bf16"]
    print("\n".join(text_table([head, *rows(options)])))


if __name__ == "__main__":
    main()
