"""Endings: the block formats that kernels may quantize their float32 results to, and a kernel that only does this."""

import numpy as np

from ..blocks import BLOCK_FORMATS
from ..declaration import In, Out, Scalar
from ..formats import bf16, f16, f32, i32, u8
from ..kernel import kernel
from .quantized import layout_of

# The block formats that a kernel can quantize its results to. Kernels take the number of one, from 1 on, and 0 for
# none.
ENDINGS = ("mxfp8", "mxfp4", "nvfp4")
# How a lane holds values: loads of 8, loads of 16, or accumulators of MMAs.
WAYS = ("eights", "sixteens", "accumulators")


def ending_layout(format: str, shape: tuple[int, ...], swizzled: bool):
    """Return the layout of quantized rows."""
    return layout_of("ending", BLOCK_FORMATS[format], shape, -1, "128x4" if swizzled else "linear")


def _case(format: str, rows: int, cols: int, swizzled: int = 0, **rest) -> dict:
    layout = ending_layout(format, (rows, cols), bool(swizzled))
    sizes = dict(code_bytes=layout.code_bytes, scale_bytes=int(np.prod(layout.scales_shape)))
    return dict(
        rows=rows,
        cols=cols,
        ending=ENDINGS.index(format) + 1,
        swizzled=swizzled,
        codes=True,
        scales=True,
        **sizes,
        **rest,
    )


def _values(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    """Examples: normal values of many magnitudes, and a block with a value that is not finite."""
    x = np.ldexp(rng.standard_normal(shape), rng.integers(-9, 9, (shape[0], 1))).astype(np.float32)
    x[shape[0] // 2, :2] = np.inf, -np.inf
    return x


@kernel(
    grid="cols rows",
    cases=[
        *(dict(rows=70, cols=100, out_bf16=True, way=way, code_bytes=1, scale_bytes=1) for way in range(3)),
        dict(rows=3, cols=64, out_f16=True, way=0, code_bytes=1, scale_bytes=1),
        dict(rows=65, cols=129, out_f32=True, way=2, code_bytes=1, scale_bytes=1),
        *(_case(name, 70, 160, way=way, rule=rule) for name in ENDINGS for way, rule in zip(range(3), (1, 0, 1))),
        *(_case(name, 130, 144, 1, way=way, rule=rule) for name in ENDINGS for way, rule in zip(range(3), (0, 1, 0))),
        *(_case(name, 17, 32, way=way, rule=rule) for name in ENDINGS[:2] for way, rule in ((1, 2), (2, 3))),
        dict(rows=3, cols=61, out_f32=True, way=0, code_bytes=1, scale_bytes=1),
    ],
    draw=dict(x=_values),
)
def probe_ending(
    x: In[f32, "rows cols"],
    out_bf16: Out[bf16, "rows cols"] = None,
    out_f16: Out[f16, "rows cols"] = None,
    out_f32: Out[f32, "rows cols"] = None,
    codes: Out[u8, "rows code_bytes"] = None,
    scales: Out[u8, "scale_bytes"] = None,
    *,
    ending: Scalar[i32, 0, 1, 2, 3] = 0,
    rule: Scalar[i32, 0, 1, 2, 3] = 0,
    swizzled: Scalar[i32, 0, 1] = 0,
    way: Scalar[i32, 0, 1, 2],
    global_scale: Scalar[f32] = 1.0,
):
    """Write rows as kernels write results: in 16 or 32 bits, or as codes and scales with the bytes of `quantize`.

    Without an ending, values are rounded to nearest, ties to even, to the first of out_bf16, out_f16 and out_f32 that
    is given. ending: 0 none, 1 mxfp8, 2 mxfp4, 3 nvfp4; rule: the number of its scale rule; swizzled: scales in 128x4
    tiles. A row that ends within a block is padded with zeros. way: a lane holds 0 loads of 8 values of a row, 1 loads
    of 16, 2 accumulators of MMAs.
    """
    for out in (out_bf16, out_f16, out_f32):
        if out is not None:
            with np.errstate(over="ignore"):
                out[:] = x.astype(out.dtype)
    if ending:
        name = ENDINGS[int(ending) - 1]
        layout, block = ending_layout(name, x.shape, bool(swizzled)), BLOCK_FORMATS[name]
        padded = np.pad(x, [(0, 0), (0, layout.padded - layout.length)])
        codes[:], plain = block.encode(padded, *([global_scale] if block.two_level else []), block.rules[int(rule)])
        scales[:] = layout.stored_scales(plain).reshape(-1)
