"""Declarations of all quantizers and dequantizers, generated from the table of block formats.

Each format has four kernels: `quantize_NAME` and `dequantize_NAME` on blocks along the columns of a
matrix, and the same with `_columns` on blocks along the middle axis of three. Quantizers write scales in
the order of the blocks or in 128x4 tiles.
"""

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

import numpy as np

from ..blocks import BLOCK_FORMATS, TILE_BLOCKS, TILE_BYTES, TILE_ROWS, BlockFormat, swizzled_offsets
from ..declaration import In, Out, Scalar
from ..errors import ArgumentError
from ..formats import bf16, f16, f32, i32
from ..kernel import Kernel, kernel

# Words of tiles without a scale that a thread without values fills, roughly.
_FILLED = 8


class _Blocks(NamedTuple):
    """The position of blocks in an array.

    values: the axes of the array. axis: the axis that is cut into blocks. grid: the axes that a grid covers. scales:
    the axes of the scales that a quantizer writes. tile: the most elements of the grid's first side that a block of
    threads of a quantizer covers. threads: threads of a block.
    """

    values: str
    axis: str
    grid: str
    scales: str
    tile: int
    threads: int

    def linear(self, f: BlockFormat, axes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of scales in the order of the blocks."""
        return tuple(axes[axis] // (f.block if axis == self.axis else 1) for axis in self.values.split())

    def tiles(self, f: BlockFormat, axes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of scales in tiles, with one row for each row of tiles."""
        rows, blocks = self._matrix(f, axes)
        shape = (-(-rows // TILE_ROWS), -(-blocks // TILE_BLOCKS) * TILE_BYTES)
        return (1,) * (len(self.scales.split()) - len(shape)) + shape

    def covered(self, axes: Mapping[str, int]) -> int:
        """Return how many elements the grid's first side must cover."""
        return prod(axes[axis] for axis in self.grid.split()[0].split("*"))

    def tiled(self, f: BlockFormat, axes: Mapping[str, int]) -> dict[str, int]:
        """Return the arguments with which a quantizer writes tiles.

        The grid then has blocks of threads without values if tiles have places without a scale.
        """
        rows, blocks = self._matrix(f, axes)
        columns = -(-blocks // TILE_BLOCKS)  # of tiles
        # Words without a scale: those of padding rows, and of rows that end within a tile.
        places = TILE_ROWS * columns * (rows % TILE_ROWS > 0) + rows * (blocks % TILE_BLOCKS > 0)
        covered = self.covered(axes)
        if places and covered:
            # A step along the grid's first side adds one block of threads for each position of the other sides.
            threads = self.threads * (columns * axes["outer"] if "outer" in axes else 1)
            covered += self.tile * max(places // (_FILLED * threads), 1)
        return dict(swizzled=1, covered=covered) | dict(zip(self.scales.split(), self.tiles(f, axes)))

    def _matrix(self, f: BlockFormat, axes: Mapping[str, int]) -> tuple[int, int]:
        """Return the number of rows of scales, and of the blocks of each row."""
        return prod(axes[axis] for axis in self.values.split() if axis != self.axis), axes[self.axis] // f.block


_ROWS = _Blocks("rows cols", "cols", "rows*cols", "scale_rows scale_cols", 16384, 256)
_COLUMNS = _Blocks("outer rows cols", "rows", "cols rows outer", "scale_outer scale_rows scale_cols", 128, 128)

_PACKING = {
    4: "two codes to a byte, the first in the low nibble",
    6: "four codes to three bytes, code i in bits 6i to 6i + 5 of the little-endian word",
    8: "one code to a byte",
}

_QUANTIZE_MX = """Round each run of 32 values along `{axis}` to {element} under one shared power-of-two scale.

`rule` derives the scale from the largest magnitude: 0 floor, 1 ceil, 2 rceil, 3 even; it is at least
2**-127. Codes are rounded to nearest, ties to even, saturate at {largest:g} and keep the sign of zero. They lie
along `{axis}`, {packing}.
A run of zeros has scale byte 0. A run with a NaN or an infinity has scale byte 0xff and codes 0, and so has
a run whose largest magnitude `even` rounds to infinity. Arithmetic is float32 and exact up to the rounding of codes.
Scales have the shape [{linear}]. With `swizzled` they lie in 128x4 tiles, as `swizzle_scales` arranges
them. The call then passes their shape, [{tiles}], and a `covered` above {grid}: the additional
threads write 0x00 to the places of the tiles without a scale.
Source: OCP Microscaling Formats (MX) v1.0, section 6.3; torchao, ScaleCalculationMode."""

_QUANTIZE_NV = """Round each run of 16 values along `{axis}` to {element} under one shared UE4M3 scale s and the global
scale g.

s is blockmax / 6 / g, clamped to [2**-9, 448] and rounded to E4M3. A code is x / (g * s) rounded to E2M1.
Every operation is in float32, to nearest, ties to even, and keeps subnormals. Codes saturate at 6 and keep the
sign of zero; all are 0 where g * s is 0. They lie along `{axis}`, {packing}.
A run with a NaN or an infinity has scale byte 0x7f and codes 0. rule: 0 amax, 1 four_over_six, which
scales a run to 4 instead of 6 if that makes the sum of its squared errors smaller. g is positive.
Scales have the shape [{linear}]. With `swizzled` they lie in 128x4 tiles, as `swizzle_scales` arranges
them. The call then passes their shape, [{tiles}], and a `covered` above {grid}: the additional
threads write 0x00 to the places of the tiles without a scale.
Source: NVIDIA, Introducing NVFP4; Four Over Six, arXiv 2512.02010."""

_DEQUANTIZE_MX = """Return the values of {name} codes: {element} times 2**(scale - 127).

float32 values are exact, and infinite from 2**128 on. float16 and bfloat16 values are the float32 values rounded
to nearest, ties to even; float16 is infinite from 65520 on. A scale byte of 0xff makes its 32 values NaN.
Source: OCP Microscaling Formats (MX) v1.0, sections 5.3 and 6.3."""

_DEQUANTIZE_NV = """Return the values of {name} codes: {element} times (g * s), both products in float32.

float16 and bfloat16 values are the float32 values rounded to nearest, ties to even. A scale byte of 0x7f makes its
16 values NaN; bit 7 of a scale is ignored.
Source: NVIDIA, Introducing NVFP4."""


def positive(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    """Examples of global scales: positive, near those of normal values."""
    return np.exp2(rng.uniform(-12, 2, shape)).astype(np.float32)


def _declare(f: BlockFormat, name: str, text: str, layout: _Blocks, body, cases, **options) -> Kernel:
    """Declare `body` as the kernel `name`. text: the template of its docstring, filled with facts of the format."""
    body.__name__ = body.__qualname__ = name
    body.__doc__ = text.format(
        name=f.name.upper(),
        element=f.element.name.upper(),
        largest=f.element.largest,
        axis=layout.axis,
        packing=_PACKING[f.bits],
        linear=_shapes(f, layout)[2].replace(" ", ", "),
        tiles=", ".join(["1"] * (len(layout.scales.split()) - 2) + ["row tiles", "512 * column tiles"]),
        grid=layout.grid.split()[0],
    )
    return kernel(cases=cases, **options)(body)


def _shapes(f: BlockFormat, layout: _Blocks) -> tuple[str, str, str]:
    """The shapes of values, codes and scales as declared."""
    values, axis = layout.values, layout.axis
    return values, values.replace(axis, f"{axis}*{f.bits}/8"), values.replace(axis, f"{axis}/{f.block}")


def _cases(f: BlockFormat, layout: _Blocks) -> list[dict[str, int]]:
    """Cases with sizes at and beside the edges of tiles; the last ones exercise all rules of a quantizer."""
    n = f.block
    if layout is _ROWS:
        return [dict(rows=4, cols=2 * n), dict(rows=1, cols=n), dict(rows=3, cols=3 * n), dict(rows=130, cols=256)]
    return [
        dict(outer=1, rows=n, cols=1),
        dict(outer=2, rows=3 * n, cols=5),
        dict(outer=3, rows=2 * n, cols=64),
        dict(outer=1, rows=5 * n, cols=130),
    ]


def _with_rules(f: BlockFormat, layout: _Blocks) -> list[dict[str, int]]:
    """The cases with the default rule, the third one also with all others, and some with scales in tiles."""
    n, cases = f.block, _cases(f, layout)
    rules = [dict(cases[2], rule=rule) for rule in range(1, len(f.rules))]
    if layout is _ROWS:
        sizes = [dict(rows=5, cols=3 * n), dict(rows=130, cols=4 * n), dict(rows=128, cols=6 * n)]
    else:
        sizes = [dict(outer=2, rows=3 * n, cols=5), dict(outer=2, rows=4 * n, cols=68), dict(outer=1, rows=n, cols=128)]
    tiled = [dict(axes, **layout.tiled(f, axes)) for axes in sizes]
    return cases + rules + tiled + [dict(case, rule=1) for case in tiled[:2]]


def _derived(f: BlockFormat, layout: _Blocks, name: str) -> dict:
    """Derived axes: the sizes of a quantizer's scales and of its grid; linear unless the call gives those of tiles."""
    names = layout.scales.split()

    def size_of(i: int):
        def size(axes: Mapping[str, int]) -> int:
            length, block = axes[layout.axis], f.block
            if length % block:
                above, below = -(-length // block) * block, length // block * block
                advice = f"Pad it to {above}" + (f" or cut it to {below}." if below else ".")
                found = f"{name}: {layout.axis} is {length} in x; it must be a multiple of {block}"
                raise ArgumentError(f"{found}, of which each has a scale. {advice}")
            linear, requested = layout.linear(f, axes)[i], axes.get(names[i])
            return linear if requested != layout.tiles(f, axes)[i] else requested

        return size

    sizes = {axis: size_of(i) for i, axis in enumerate(names)}
    return sizes | dict(covered=lambda axes: max(axes.get("covered", 0), layout.covered(axes)))


def _quantizer(f: BlockFormat, layout: _Blocks, suffix: str) -> Kernel:
    x_shape, codes_shape, _ = _shapes(f, layout)
    axis = layout.values.split().index(layout.axis)
    rules = Scalar[(i32, *range(len(f.rules)))]

    def store(scales, linear, swizzled):
        if swizzled:
            matrix = np.moveaxis(linear, axis, -1).reshape(-1, linear.shape[axis])
            in_tiles = np.zeros(scales.size, scales.dtype)
            in_tiles[swizzled_offsets(*matrix.shape)] = matrix
            linear = in_tiles.reshape(scales.shape)
        scales[:] = linear

    def quantize_mx(
        x: In[f32 | f16 | bf16, x_shape],
        codes: Out[f.element.storage, codes_shape],
        scales: Out[f.scale, layout.scales],
        *,
        rule: rules = 0,
        swizzled: Scalar[i32, 0, 1] = 0,
    ):
        codes[:], linear = f.encode(x, f.rules[rule], axis)
        store(scales, linear, swizzled)

    def quantize_nv(
        x: In[f32 | f16 | bf16, x_shape],
        global_scale: In[f32, "1"],
        codes: Out[f.element.storage, codes_shape],
        scales: Out[f.scale, layout.scales],
        *,
        rule: rules = 0,
        swizzled: Scalar[i32, 0, 1] = 0,
    ):
        codes[:], linear = f.encode(x, global_scale, f.rules[rule], axis)
        store(scales, linear, swizzled)

    cases, name = _with_rules(f, layout), f"quantize_{f.name}{suffix}"
    first, *others = layout.grid.split()
    options: dict = dict(grid=" ".join(["covered", *others]), derived=_derived(f, layout, name))
    text, body = (_QUANTIZE_NV, quantize_nv) if f.two_level else (_QUANTIZE_MX, quantize_mx)
    if f.two_level:
        options["draw"] = dict(global_scale=positive)
    return _declare(f, name, text, layout, body, cases, **options)


def _dequantizer(f: BlockFormat, layout: _Blocks, suffix: str) -> Kernel:
    x_shape, codes_shape, scales_shape = _shapes(f, layout)
    axis = layout.values.split().index(layout.axis)

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
        draw = dict(global_scale=positive)
        return _declare(f, name, _DEQUANTIZE_NV, layout, dequantize_nv, cases, grid=layout.grid, draw=draw)
    return _declare(f, name, _DEQUANTIZE_MX, layout, dequantize_mx, cases, grid=layout.grid)


# Format -> its kernel, for blocks along the last axis of two and along the middle axis of three.
QUANTIZE = {name: _quantizer(f, _ROWS, "") for name, f in BLOCK_FORMATS.items()}
DEQUANTIZE = {name: _dequantizer(f, _ROWS, "") for name, f in BLOCK_FORMATS.items()}
QUANTIZE_COLUMNS = {name: _quantizer(f, _COLUMNS, "_columns") for name, f in BLOCK_FORMATS.items()}
DEQUANTIZE_COLUMNS = {name: _dequantizer(f, _COLUMNS, "_columns") for name, f in BLOCK_FORMATS.items()}


def tiled(format: str, axes: Mapping[str, int]) -> dict[str, int]:
    """Return the arguments with which the quantizer of a format writes 128x4 tiles, for the axes of its x."""
    return (_COLUMNS if "outer" in axes else _ROWS).tiled(BLOCK_FORMATS[format], axes)
