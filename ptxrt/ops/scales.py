"""Kernels around the quantizers: the global scale of NVFP4, the 128x4 layout of scales, padding and cutting of rows,
gathering of bytes."""

import numpy as np

from ..blocks import nvfp4, swizzled_offsets
from ..declaration import In, Out, Scalar
from ..formats import bf16, f16, f32, i32, u8
from ..kernel import kernel

# Consecutive values that a block of `amax` reads at once.
AMAX_RUN = 4096


@kernel(
    grid="blocks",
    cases=[
        dict(count=1, blocks=1),
        dict(count=4095, blocks=1),
        dict(count=9001, blocks=2),
        dict(count=70003, blocks=5),
    ],
)
def amax(x: In[f32 | f16 | bf16, "count"], partial: Out[f32, "blocks"]):
    """Find the largest finite magnitude in each of `blocks` parts of `x`; 0 if there is none.

    Part b consists of the runs of 4096 consecutive values with the numbers b, b + blocks, b + 2 * blocks and so on. NaN
    and infinities are skipped. `nvfp4_global_scale` finishes the reduction.
    """
    magnitude = np.abs(x.astype(np.float32))
    magnitude[~np.isfinite(magnitude)] = 0
    rounds = -(-x.size // (AMAX_RUN * partial.size))
    whole = np.zeros(rounds * AMAX_RUN * partial.size, np.float32)
    whole[: x.size] = magnitude
    partial[:] = whole.reshape(rounds, partial.size, AMAX_RUN).max(axis=(0, 2))


def _magnitudes(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    return np.abs(rng.standard_normal(shape)).astype(np.float32)


@kernel(grid="1", cases=[dict(blocks=1), dict(blocks=33), dict(blocks=6000)], draw=dict(partial=_magnitudes))
def nvfp4_global_scale(partial: In[f32, "blocks"], global_scale: Out[f32, "1"]):
    """Compute the NVFP4 global scale of an array: max(partial) / 2688 in float32, with `partial` the largest magnitudes
    of its parts.

    2688 is 448 * 6, the largest scale times the largest code. The result is 1 if that quotient is 0.
    """
    global_scale[:] = nvfp4.global_scale(partial.max())


@kernel(grid="count", cases=[dict(count=1, value=0.25), dict(count=1000, value=-3.0)])
def fill_f32(x: Out[f32, "count"], *, value: Scalar[f32]):
    """Set every element to `value`."""
    x[:] = value


_SWIZZLE_CASES = [
    dict(outer=1, blocks=1, cols=1, bytes=512),
    dict(outer=130, blocks=6, cols=1, bytes=2048),
    dict(outer=3, blocks=5, cols=70, bytes=2048),
    dict(outer=256, blocks=4, cols=1, bytes=1024),
    dict(outer=130, blocks=12, cols=1, bytes=3072),
    dict(outer=130, blocks=8, cols=1, bytes=1030),
    dict(outer=2, blocks=3, cols=1, bytes=7),
]


@kernel(grid="bytes", cases=_SWIZZLE_CASES)
def swizzle_scales(scales: In[u8, "outer blocks cols"], swizzled: Out[u8, "bytes"]):
    """Arrange block scales in tiles of 128 rows x 4 blocks, as cuBLAS and CUTLASS take them.

    Row outer * cols + col of the scales' matrix and block b are in tile (row / 128, b / 4), with tiles in row-major
    order over ceil(blocks / 4), at byte row % 32 * 16 + row % 128 / 32 * 4 + b % 4 of its 512. Bytes without a scale
    are 0x00.
    Source: cuBLAS documentation, "1D Block Scaling Factors Layout".
    """
    matrix = np.moveaxis(scales, 1, 2).reshape(-1, scales.shape[1])
    offsets = swizzled_offsets(*matrix.shape)
    inside = offsets < swizzled.size
    swizzled[:] = 0
    swizzled[offsets[inside]] = matrix[inside]


@kernel(grid="outer*blocks*cols", cases=_SWIZZLE_CASES)
def unswizzle_scales(swizzled: In[u8, "bytes"], scales: Out[u8, "outer blocks cols"]):
    """Convert block scales from 128x4 tiles to linear order: the inverse of `swizzle_scales`.

    A scale beyond the given `bytes` is 0x00.
    """
    outer, blocks, cols = scales.shape
    offsets = swizzled_offsets(outer * cols, blocks)
    matrix = np.where(offsets < swizzled.size, swizzled[np.minimum(offsets, swizzled.size - 1)], np.uint8(0))
    scales[:] = np.moveaxis(matrix.reshape(outer, cols, blocks), 2, 1)


@kernel(
    grid="rows*target_bytes",
    cases=[
        dict(rows=1, source_bytes=4, target_bytes=128),
        dict(rows=5, source_bytes=70, target_bytes=128),
        dict(rows=3, source_bytes=4160, target_bytes=4224),
        dict(rows=3, source_bytes=4224, target_bytes=4160),
        dict(rows=7, source_bytes=64, target_bytes=34),
    ],
)
def pad_last(x: In[u8, "rows source_bytes"], y: Out[u8, "rows target_bytes"]):
    """Copy rows of bytes into rows of another length: padded with zeros, or cut."""
    kept = min(x.shape[1], y.shape[1])
    y[:, :kept], y[:, kept:] = x[:, :kept], 0


@kernel(
    grid="rows*count",
    cases=[dict(rows=3, width=100, count=77), dict(rows=1, width=1, count=5), dict(rows=9, width=4096, count=4096)],
    draw=dict(places=lambda rng, member, shape, axes: rng.integers(0, axes["width"], shape).astype(np.int32)),
)
def gather_bytes(x: In[u8, "rows width"], places: In[i32, "count"], y: Out[u8, "rows count"]):
    """Gather the bytes at `places` of every row, in this order; places are from 0 to width - 1."""
    y[:] = x[:, places]
