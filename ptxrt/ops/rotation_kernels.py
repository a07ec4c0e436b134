"""The declaration of the kernel that rotates pairs of values by the angles of positions."""

import numpy as np

from ..declaration import In, Out, Scalar, loose, unaligned
from ..formats import bf16, f16, f32, i32, u8
from ..kernel import kernel
from .gemm_kernels import example_levels
from .produce_kernels import OUTPUTS, derived_blocks, ending_case, norm_blocks, small_values, write


def example_table(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    """Examples of tables: any angles; if rows are quantized, exact quarter turns."""
    quarters = axes.get("code_bytes", 1) > 1
    angles = (
        rng.integers(0, 4, (shape[0], shape[1] // 2)) * (np.pi / 2)
        if quarters
        else rng.uniform(0, 2 * np.pi, (shape[0], shape[1] // 2))
    )
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    return (np.round(table) if quarters else table).astype(member.dtype)


def example_positions(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    """Examples of positions, all inside the table."""
    return rng.integers(0, axes["length"], shape).astype(np.int32)


def turned(x: np.ndarray, table: np.ndarray, positions: np.ndarray, first: int, pairs, inverse=0) -> np.ndarray:
    """Return x [tokens, heads, cols], float64, rotated by the positions of tokens; NaN for positions
    outside the table."""
    y = x.astype(np.float64)
    width = table.shape[1]
    inside = (positions >= 0) & (positions < len(table))
    angles = np.where(inside[:, None], table[np.where(inside, positions, 0)].astype(np.float64), np.nan)[:, None]
    cosines, sines = angles[..., : width // 2], angles[..., width // 2 :] * (-1 if inverse else 1)
    part = y[..., first : first + width]
    one, other = (part[..., 0::2], part[..., 1::2]) if pairs else (part[..., : width // 2], part[..., width // 2 :])
    with np.errstate(invalid="ignore", over="ignore"):
        both = one * cosines - other * sines, other * cosines + one * sines
    whole = np.stack(both, axis=-1).reshape(part.shape) if pairs else np.concatenate(both, axis=-1)
    y[..., first : first + width] = whole
    return y


def _case(tokens: int, heads: int, cols: int, width: int, ending=None, swizzled: int = 0, **rest) -> dict:
    """A declared case."""
    rest |= dict(tokens=tokens, heads=heads, width=width, length=9)
    case = ending_case(tokens * heads, cols, ending, swizzled, **rest)
    del case["rows"]
    return case


@kernel(
    grid="blocks",
    derived=derived_blocks(norm_blocks, ("tokens", "heads")),
    cases=[
        _case(3, 2, 64, 64, out_f32=True),
        _case(5, 3, 128, 64, out_bf16=True, first=64, inverse=1),
        _case(3, 2, 100, 38, out_f32=True, first=3),
        _case(3, 2, 100, 38, out_f32=True, first=3, pairs=1, inverse=1),
        _case(7, 1, 80, 64, out_f16=True, first=12, pairs=1),
        _case(2, 1, 8300, 96, out_f32=True, first=8192),
        _case(70, 1, 96, 96, "mxfp8", 1, pairs=1),
        _case(5, 3, 64, 64, "mxfp4", rule=3, rounds=1),
        _case(13, 10, 128, 64, "nvfp4", 1, out_global=True, first=64),
    ],
    tolerance=OUTPUTS,
    draw=dict(x=small_values, table=example_table, positions=example_positions, out_global=example_levels),
)
def rope_rows(
    x: In[f32 | f16 | bf16, "tokens heads cols", loose],
    table: In[f32, "length width", unaligned],
    positions: In[i32, "tokens", unaligned],
    out_global: In[f32, "level_count", unaligned] = None,
    out_f32: Out[f32, "tokens heads cols", loose] = None,
    out_f16: Out[f16, "tokens heads cols", loose] = None,
    out_bf16: Out[bf16, "tokens heads cols", loose] = None,
    codes: Out[u8, "tokens*heads code_bytes"] = None,
    scales: Out[u8, "scale_bytes"] = None,
    *,
    first: Scalar[i32] = 0,
    pairs: Scalar[i32, 0, 1] = 0,
    inverse: Scalar[i32, 0, 1] = 0,
    rounds: Scalar[i32, 0, 1] = 0,
    ending: Scalar[i32, 0, 1, 2, 3] = 0,
    rule: Scalar[i32, 0, 1, 2, 3] = 0,
    swizzled: Scalar[i32, 0, 1] = 0,
):
    """Rotate the columns first to first + width - 1 of rows, by the table's angles at the tokens' positions.

    For each position the table has width / 2 cosines c, then width / 2 sines s. A pair (a, b) becomes (a c - b s, b c +
    a s), with s negated if `inverse`. Pairs are columns i and i + width / 2 of the rotated ones, or 2 i and 2 i + 1 if
    `pairs`. In float32 the second product is rounded, then its sum with the first. For a position outside the table the
    rotated values are NaN. rounds: the result is rounded to x's type first.

    Values are rounded once, to nearest, ties to even, to the type of the output among out_f32, out_f16 and out_bf16. Or
    they are quantized with the bytes of `quantize` of the float32 values: ending 1 mxfp8, 2 mxfp4, 3 nvfp4 under
    `out_global` (1 if missing), by the rule of that number, scales in 128x4 tiles if `swizzled`. A row that ends within
    a block is padded with zeros.
    """
    y = turned(x, table, positions, int(first), pairs, inverse)
    y = y.astype(np.float32).astype(x.dtype).astype(np.float64) if rounds else y
    outputs = dict(out_f32=out_f32, out_f16=out_f16, out_bf16=out_bf16, codes=codes, scales=scales)
    write(y.reshape(-1, x.shape[-1]), outputs, dict(ending=ending, rule=rule, swizzled=swizzled, out_global=out_global))
