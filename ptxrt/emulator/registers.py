"""setmaxnreg: warps release registers to a pool of their block, or take registers from it (PTX ISA 9.7.19.5).

A thread starts with the registers of its entry: .maxnreg, or the share of 65536 registers that .maxntid and
.minnctapersm leave. In an entry with none of these directives ptxas ignores setmaxnreg, and so does the emulator. A
warp that asks for more registers than the pool holds waits, as on hardware, until other warps release some or exit.
"""

from __future__ import annotations

import numpy as np

from .instruction import Blocking, Fault, Semantics, Unsupported, define, distinct

_FILE = 65536
_GRANULE = 8
_MOST = 256
_WARP = 32


def entry_registers(directives) -> int | None:
    """Registers per thread at entry, rounded to the allocation granule; None without the directives."""
    if directives.get("maxnreg"):
        return -(-int(np.prod(directives["maxnreg"])) // _GRANULE) * _GRANULE
    threads = directives.get("maxntid") or directives.get("reqntid")
    if not threads:
        return None
    blocks = int(np.prod(directives.get("minnctapersm") or 1))
    each = _FILE // (-(-int(np.prod(threads)) // _WARP) * _WARP * blocks)
    return min(_MOST, each // _GRANULE * _GRANULE)


class _Pool:
    """Registers per thread of every warp, and the free registers of each block in the same unit (per thread of one
    warp)."""

    def __init__(self, batch, first: int):
        self.batch = batch
        self.held = np.full(batch.blocks * batch.warps, first)
        self.left = np.zeros(batch.blocks, np.int64)
        self.waiting: list[tuple[int, int]] = []  # (warp, requested registers)
        batch.on_exit(self.exited)

    def exited(self, lanes: np.ndarray) -> None:
        for warp in distinct(lanes // _WARP).tolist():
            if not self.batch.alive[warp * _WARP : (warp + 1) * _WARP].any():
                self.left[warp // self.batch.warps] += self.held[warp]
                self.held[warp] = 0
        self.serve()

    def serve(self) -> None:
        """Wake the waiting warps whose request fits the free registers."""
        still = []
        for warp, requested in self.waiting:
            if self.take(warp, requested):
                self.batch.wake(np.arange(warp * _WARP, (warp + 1) * _WARP))
            else:
                still.append((warp, requested))
        self.waiting = still

    def take(self, warp: int, requested: int) -> bool:
        block, added = warp // self.batch.warps, requested - self.held[warp]
        if added > self.left[block]:
            return False
        self.left[block] -= added
        self.held[warp] = requested
        return True


def _set(threads, count: int, grows: bool) -> None:
    first = entry_registers(threads.batch.code.program.entry.directives)
    if count % _GRANULE or not 24 <= count <= _MOST:
        raise Fault(f"asks for {count} registers; a multiple of 8 from 24 to 256 is expected")
    if first is None:
        return
    batch = threads.batch
    if "registers" not in batch.state:
        batch.state["registers"] = _Pool(batch, first)
    pool = batch.state["registers"]
    for warp in distinct(threads.lane // _WARP).tolist():
        here = threads.lane // _WARP == warp
        if (pool.held[warp] > count) if grows else (pool.held[warp] < count):
            raise Fault(f"has {pool.held[warp]} registers and would {'grow' if grows else 'shrink'} to {count}", here)
        if not pool.take(warp, count):
            pool.waiting.append((warp, count))
            batch.park(threads.lane[here], f"setmaxnreg.inc to {count} registers, of which the block has too few left")
    if not grows:
        pool.serve()


@define("setmaxnreg")
def setmaxnreg(modifiers: tuple[str, ...]) -> Semantics:
    """setmaxnreg.{inc|dec}.sync.aligned.u32 n: set the registers per thread of this warp to n."""
    if modifiers[1:] != ("sync", "aligned", "u32") or modifiers[0] not in ("inc", "dec"):
        raise Unsupported("expected setmaxnreg.{inc|dec}.sync.aligned.u32")
    return Blocking("", "imm", lambda threads, count: _set(threads, count, modifiers[0] == "inc"), aligned=True)
