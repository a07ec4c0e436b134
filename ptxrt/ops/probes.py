"""Kernels that show what the hardware does: identity registers, and scores before the softmax."""

import numpy as np

from ..accuracy import Tolerance
from ..blocks import mxfp4
from ..formats import bf16, f16, f32, i32
from ..kernel import In, Out, kernel
from .attention_kernels import DIMS

IDENTITY_BLOCK = (8, 4, 3)


@kernel(
    grid="blocks_x blocks_y blocks_z",
    fixed=dict(threads=96),
    cases=[dict(blocks_x=1, blocks_y=1, blocks_z=1), dict(blocks_x=3, blocks_y=2, blocks_z=4)],
)
def thread_identity(identity: Out[i32, "blocks_z blocks_y blocks_x threads 16"]):
    """Report the identity registers of every thread, in blocks of 8 x 4 x 3 threads.

    The last axis holds tid, ntid, ctaid and nctaid (x, y, z each), laneid, lanemask_eq,
    lanemask_lt and the linear index of the thread in its block; threads lie in the order of that index.
    %warpid is left out: it is where a warp happens to run, and an H200 gives a block's first warp 3, say.
    Source: PTX ISA, special registers.
    """
    blocks = identity.shape[2::-1]
    thread = np.arange(identity.shape[3])
    z, y, x = np.unravel_index(thread, IDENTITY_BLOCK[::-1])
    lane = thread % 32
    identity[..., 0], identity[..., 1], identity[..., 2] = x, y, z
    identity[..., 3:6] = IDENTITY_BLOCK
    for field, axis in zip((6, 7, 8), (2, 1, 0)):
        identity[..., field] = np.expand_dims(np.arange(identity.shape[axis]), [a for a in range(4) if a != axis])
    identity[..., 9:12] = blocks
    identity[..., 12] = lane
    identity[..., 13] = (np.int64(1) << lane).astype(np.int32)
    identity[..., 14] = ((np.int64(1) << lane) - 1).astype(np.int32)
    identity[..., 15] = thread


@kernel(
    grid="queries heads batch",
    variants=dict(dim=DIMS),
    cases=[dict(batch=1, heads=1, queries=70, keys=130, dim=dim) for dim in DIMS]
    + [
        dict(batch=1, heads=2, queries=64, keys=64, dim=64, format="bf16"),
        dict(batch=2, heads=1, queries=1, keys=1, dim=32, format="f32"),
    ],
    tolerance=Tolerance(
        "products are exact; float32 sums of up to 256 of them, truncated by the tensor cores",
        relative_l2=1e-5,
        cosine=1 - 1e-9,
        gain=1e-5,
    ),
    flops="2*batch*heads*queries*keys*dim",
)
def probe_scores_mxfp4(
    q: In[f32 | f16 | bf16, "batch heads queries dim"],
    k: In[f32 | f16 | bf16, "batch heads keys dim"],
    scores: Out[f32, "batch heads queries keys"],
):
    """Write the scores Q K^T of MXFP4-quantized Q and K, by the tile code of the attention, unscaled.

    Q and K are quantized as `quantize_mxfp4` does. A block with a NaN or an infinity makes its whole
    row of Q, or column of scores, NaN.
    """
    q, k = (mxfp4.decode(*mxfp4.encode(x)).astype(np.float64) for x in (q, k))
    scores[:] = q @ np.swapaxes(k, -1, -2)
