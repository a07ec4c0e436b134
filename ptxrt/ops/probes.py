"""Kernels that show what the hardware does: identity registers, scores before the softmax, the rates of tensor cores."""

import numpy as np

from ..accuracy import Tolerance
from ..blocks import mxfp4
from ..formats import bf16, e2m1, f16, f32, i32, u8, u32
from ..kernel import In, Out, Scalar, kernel
from .attention import DIMS

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


# Small integers: all sums are exact, in whatever order and precision they are taken.
def _small_integers(rng: np.random.Generator, member, shape) -> np.ndarray:
    return rng.integers(-4, 5, shape).astype(member.dtype)


def _containers(rng: np.random.Generator, member, shape) -> np.ndarray:
    return rng.integers(0, 16, shape, dtype=np.uint8) << np.uint8(2)


def _chains(a: np.ndarray, b: np.ndarray, flip: int, steps: int, values) -> np.ndarray:
    """Sums [8, 16, 8] in float64 of A B over steps, after each of which bits of A's 32-bit words flip; `values` of what is stored."""
    flipped = (np.ascontiguousarray(a).view(np.uint32) ^ np.uint32(flip)).view(a.dtype)
    both = [np.einsum("imk,jnk->ijmn", values(left), values(b)) for left in (a, flipped)]
    return ((steps + 1) // 2 * both[0] + steps // 2 * both[1]).reshape(8, 16, 8)


def _declare_rate(depth: int, draw, cases):
    """The decorator of a probe of an MMA of this depth, and its flops."""
    return kernel(
        grid="blocks",
        fixed=dict(warps=8),
        cases=[dict(blocks=blocks, steps=steps, flip=flip) for blocks, steps, flip in cases],
        flops=lambda *, blocks, warps, steps, flip: 2 * 16 * 8 * depth * 8 * int(steps) * warps * blocks,
        draw=dict(a=draw, b=draw),
    )


@_declare_rate(16, _small_integers, [(1, 1, 0), (2, 5, 0x80000000), (1, 4, 0x00008000)])
def mma_rate_bf16(
    a: In[bf16, "2 16 16"],
    b: In[bf16, "4 8 16"],
    c: Out[f32, "blocks warps 8 16 8"],
    *,
    steps: Scalar[i32],
    flip: Scalar[u32] = 0x80008000,
):
    """Multiply 2 fragments of A with 4 of B, `steps` times, by mma.m16n8k16 on registers alone, to time the instruction.

    Each of 8 warps to a block sums 8 chains: chain 4 i + j is the sum of A[i] (rows x k) times B[j] (columns x k). After
    each step the bits `flip` of every 32-bit word of A change, so that no step is like the one before.
    """
    c[:] = _chains(a, b, flip, steps, lambda x: x.astype(np.float64))


@_declare_rate(32, _containers, [(1, 1, 0), (2, 5, 0x00200004), (1, 4, 0x20000000)])
def mma_rate_mxf8f6f4_e2m1(
    a: In[u8, "2 16 32"],
    b: In[u8, "4 8 32"],
    c: Out[f32, "blocks warps 8 16 8"],
    *,
    steps: Scalar[i32],
    flip: Scalar[u32] = 0x20202020,
):
    """Do what `mma_rate_bf16` does by mma.m16n8k32 of kind::mxf8f6f4 on e2m1 codes in bits 5 to 2 of bytes, all scales 1.

    On the portable machine this is the rate of the stand-in: bf16 MMAs and the conversions of their operands.
    """
    c[:] = _chains(a, b, flip, steps, lambda x: e2m1.values[x >> 2 & 15].astype(np.float64))
