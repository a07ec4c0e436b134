"""The declarations of every quantizer and dequantizer, made from the table of block formats.

Each format has four kernels: `quantize_NAME` and `dequantize_NAME` on blocks along the columns of a
matrix, and the same with `_columns` on blocks along the middle axis of three.
"""

import numpy as np

from ..blocks import BLOCK_FORMATS, BlockFormat
from ..declaration import In, Out, Scalar
from ..formats import bf16, f16, f32, i32
from ..kernel import Kernel, kernel

# Axes of the values, the one of them that is cut into blocks, and the axes that the grid covers.
_ROWS = ("rows cols", "cols", "rows*cols")
_COLUMNS = ("outer rows cols", "rows", "cols rows outer")

_PACKING = {
    4: "two codes to a byte, the first in the low nibble",
    6: "four codes to three bytes, code i in bits 6i to 6i + 5 of the little-endian word",
    8: "one code to a byte",
}

_QUANTIZE_MX = """Round each run of 32 values along `{axis}` to {element} under one shared power-of-two scale.

The scale comes from the largest magnitude by `rule`: 0 floor, 1 ceil, 2 rceil, 3 even; no less than
2**-127. Codes round to nearest, ties to even, saturate at {largest:g} and keep the sign of zero. They lie
along `{axis}`, {packing}.
A run of zeros gets scale byte 0, a run with a NaN or an infinity scale byte 0xff and codes 0, and so does
a run whose largest magnitude `even` rounds to infinity. All in float32 and exact but for the one rounding.
Source: OCP Microscaling Formats (MX) v1.0, section 6.3; torchao, ScaleCalculationMode."""

_QUANTIZE_NV = """Round each run of 16 values along `{axis}` to {element} under one shared UE4M3 scale s and the global
scale g.

s is blockmax / 6 / g rounded to E4M3 between 2**-9 and 448, a code is x / (g * s) rounded to E2M1:
each operation in float32, to nearest, ties to even, subnormals kept. Codes saturate at 6 and keep the
sign of zero; all are 0 where g * s is 0. They lie along `{axis}`, {packing}.
A run with a NaN or an infinity gets scale byte 0x7f and codes 0. rule: 0 amax, 1 four_over_six, which
scales a run to 4 instead of 6 where the sum of its squared errors is then smaller. g is positive.
Source: NVIDIA, Introducing NVFP4; Four Over Six, arXiv 2512.02010."""

_DEQUANTIZE_MX = """Give the values of {name} codes: {element} times 2**(scale - 127).

float32 is exact, and infinite from 2**128 on; float16 and bfloat16 are that value rounded to
nearest, ties to even, so that float16 overflows early. A scale byte of 0xff makes its 32 values NaN.
Source: OCP Microscaling Formats (MX) v1.0, sections 5.3 and 6.3."""

_DEQUANTIZE_NV = """Give the values of {name} codes: {element} times (g * s), both products in float32.

float16 and bfloat16 are that value rounded to nearest, ties to even. A scale byte of 0x7f makes its
16 values NaN; bit 7 of a scale is ignored.
Source: NVIDIA, Introducing NVFP4."""


def positive(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    """Global scales for examples: positive, around those of normal values."""
    return np.exp2(rng.uniform(-12, 2, shape)).astype(np.float32)


def _declare(f: BlockFormat, name: str, text: str, layout: tuple[str, str, str], body, cases, **options) -> Kernel:
    """Declare `body` as the kernel `name`; `text` is its docstring with places for what the format says of itself."""
    values, axis, grid = layout
    body.__name__ = body.__qualname__ = name
    body.__doc__ = text.format(
        name=f.name.upper(),
        element=f.element.name.upper(),
        largest=f.element.largest,
        axis=axis,
        packing=_PACKING[f.bits],
    )
    return kernel(grid=grid, cases=cases, **options)(body)


def _shapes(f: BlockFormat, layout: tuple[str, str, str]) -> tuple[str, str, str]:
    """The shapes of values, codes and scales as declared."""
    values, axis, _ = layout
    return values, values.replace(axis, f"{axis}*{f.bits}/8"), values.replace(axis, f"{axis}/{f.block}")


def _cases(f: BlockFormat, layout: tuple[str, str, str]) -> list[dict[str, int]]:
    """Sizes at and beside the edges of tiles; the last ones exercise every rule of a quantizer."""
    n = f.block
    if layout is _ROWS:
        return [dict(rows=4, cols=2 * n), dict(rows=1, cols=n), dict(rows=3, cols=3 * n), dict(rows=130, cols=256)]
    return [
        dict(outer=1, rows=n, cols=1),
        dict(outer=2, rows=3 * n, cols=5),
        dict(outer=3, rows=2 * n, cols=64),
        dict(outer=1, rows=5 * n, cols=130),
    ]


def _with_rules(f: BlockFormat, cases: list[dict[str, int]]) -> list[dict[str, int]]:
    """The cases under the default rule, and the third one under all others."""
    return cases + [dict(cases[2], rule=rule) for rule in range(1, len(f.rules))]


def _quantizer(f: BlockFormat, layout, suffix: str) -> Kernel:
    x_shape, codes_shape, scales_shape = _shapes(f, layout)
    axis = layout[0].split().index(layout[1])
    rules = Scalar[(i32, *range(len(f.rules)))]

    def quantize_mx(
        x: In[f32 | f16 | bf16, x_shape],
        codes: Out[f.element.storage, codes_shape],
        scales: Out[f.scale, scales_shape],
        *,
        rule: rules = 0,
    ):
        codes[:], scales[:] = f.encode(x, f.rules[rule], axis)

    def quantize_nv(
        x: In[f32 | f16 | bf16, x_shape],
        global_scale: In[f32, "1"],
        codes: Out[f.element.storage, codes_shape],
        scales: Out[f.scale, scales_shape],
        *,
        rule: rules = 0,
    ):
        codes[:], scales[:] = f.encode(x, global_scale, f.rules[rule], axis)

    cases, name = _with_rules(f, _cases(f, layout)), f"quantize_{f.name}{suffix}"
    if f.two_level:
        return _declare(f, name, _QUANTIZE_NV, layout, quantize_nv, cases, draw=dict(global_scale=positive))
    return _declare(f, name, _QUANTIZE_MX, layout, quantize_mx, cases)


def _dequantizer(f: BlockFormat, layout, suffix: str) -> Kernel:
    x_shape, codes_shape, scales_shape = _shapes(f, layout)
    axis = layout[0].split().index(layout[1])

    def dequantize_mx(
        codes: In[f.element.storage, codes_shape],
        scales: In[f.scale, scales_shape],
        x: Out[f32 | f16 | bf16, x_shape],
    ):
        values = f.decode(codes.view(np.uint8), scales.view(np.uint8), axis)
        with np.errstate(over="ignore"):
            x[:] = values.astype(x.dtype)

    def dequantize_nv(
        codes: In[f.element.storage, codes_shape],
        scales: In[f.scale, scales_shape],
        global_scale: In[f32, "1"],
        x: Out[f32 | f16 | bf16, x_shape],
    ):
        values = f.decode(codes.view(np.uint8), scales.view(np.uint8), global_scale, axis)
        with np.errstate(over="ignore"):
            x[:] = values.astype(x.dtype)

    cases, name = _cases(f, layout), f"dequantize_{f.name}{suffix}"
    if f.two_level:
        return _declare(f, name, _DEQUANTIZE_NV, layout, dequantize_nv, cases, draw=dict(global_scale=positive))
    return _declare(f, name, _DEQUANTIZE_MX, layout, dequantize_mx, cases)


# Format -> its kernel, for blocks along the last axis of two and along the middle axis of three.
QUANTIZE = {name: _quantizer(f, _ROWS, "") for name, f in BLOCK_FORMATS.items()}
DEQUANTIZE = {name: _dequantizer(f, _ROWS, "") for name, f in BLOCK_FORMATS.items()}
QUANTIZE_COLUMNS = {name: _quantizer(f, _COLUMNS, "_columns") for name, f in BLOCK_FORMATS.items()}
DEQUANTIZE_COLUMNS = {name: _dequantizer(f, _COLUMNS, "_columns") for name, f in BLOCK_FORMATS.items()}
