"""cp.async: asynchronous copies of one thread from global to shared memory (PTX ISA 9.7.9.25.3).

A copy lands as late as the program allows: at the wait that covers it. Until then the destination keeps its old
contents, so that a missing or wrong wait shows. `memory.copies` (memory.py) holds the copies in flight.
"""

from __future__ import annotations

import numpy as np

from .instruction import Fault, Memory, Semantics, Unsupported, define

_SIZES = {"ca": (4, 8, 16), "cg": (16,)}
_PREFETCHES = ("L2::64B", "L2::128B", "L2::256B")


def _copy(cache: str, modifiers: tuple[str, ...]) -> Semantics:
    words = list(modifiers)
    if words[-1:] and words[-1] in _PREFETCHES:
        words.pop()  # a prefetch into L2, without effect on values
    policy = words[-1:] == ["L2::cache_hint"]
    if policy:
        words.pop()
    if words not in (["shared", "global"], ["shared::cta", "global"]):
        raise Unsupported(
            f"expected cp.async.{cache}.shared{{::cta}}.global{{.L2::cache_hint}}{{.L2::64B|.L2::128B|.L2::256B}}"
        )

    def copy(memory, destination, source, size, available=None, policy=None):
        if size not in _SIZES[cache]:
            raise Fault(f"cp.async.{cache} copies {' or '.join(map(str, _SIZES[cache]))} bytes, not {size}")
        if available is not None and available.dtype == bool:  # ignore-src: all of the destination becomes zero
            available = np.where(available, np.uint32(0), np.uint32(size))
        memory.copies.issue(destination, source, size, available)

    return Memory("", "[shared], [global], imm, u32?" + (", b64" if policy else ""), copy)


@define("cp.async.ca")
def cp_async_ca(modifiers: tuple[str, ...]) -> Semantics:
    """cp.async.ca.shared.global [dst], [src], {4|8|16}{, src-size | ignore-src}{, cache-policy}.

    Bytes from src-size on are zero. If ignore-src is true, all bytes are zero and the source is not read.
    """
    return _copy("ca", modifiers)


@define("cp.async.cg")
def cp_async_cg(modifiers: tuple[str, ...]) -> Semantics:
    """cp.async.cg.shared.global [dst], [src], 16{, src-size | ignore-src}{, cache-policy}; cached in L2 only."""
    return _copy("cg", modifiers)


@define("cp.async.commit_group")
def commit_group(modifiers: tuple[str, ...]) -> Semantics:
    """Make the copies issued since the last commit a group of this thread."""
    _plain(modifiers)
    return Memory("", "", lambda memory: memory.copies.commit())


@define("cp.async.wait_group")
def wait_group(modifiers: tuple[str, ...]) -> Semantics:
    """cp.async.wait_group N: all but the latest N groups of this thread have landed."""
    _plain(modifiers)
    return Memory("", "imm", lambda memory, groups: memory.copies.wait(groups))


@define("cp.async.wait_all")
def wait_all(modifiers: tuple[str, ...]) -> Semantics:
    """All copies of this thread have landed, committed or not."""
    _plain(modifiers)
    return Memory("", "", lambda memory: memory.copies.wait_all())


def _plain(modifiers: tuple[str, ...]) -> None:
    if modifiers:
        raise Unsupported("expected no modifiers")
