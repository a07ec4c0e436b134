"""Transposes: simple kernels to read, and the first test of every machine."""

from ..declaration import In, Out
from ..formats import f32
from ..kernel import kernel

_CASES = [dict(rows=4, cols=64), dict(rows=1, cols=1), dict(rows=33, cols=95), dict(rows=128, cols=64)]


@kernel(grid="cols rows", cases=_CASES)
def transpose_naive(x: In[f32, "rows cols"], y: Out[f32, "cols rows"]):
    """Transpose `x`; each thread moves elements directly: reads are coalesced, writes are not."""
    y[:] = x.T


@kernel(grid="cols rows", cases=_CASES)
def transpose_tiled(x: In[f32, "rows cols"], y: Out[f32, "cols rows"]):
    """Transpose `x` through tiles in shared memory, so that both reads and writes are coalesced.

    Rows of a 32 x 32 tile are padded to 33 words, so that a column lies in 32 different banks.
    """
    y[:] = x.T
