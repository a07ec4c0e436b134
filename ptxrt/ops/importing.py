"""Operands from codes and scales of other libraries: the kernel that arranges them in tiles, and `operand_of`."""

from typing import TYPE_CHECKING, Any

import numpy as np

from ..array import DeviceArray, as_arrays, empty, table_on, to_device, upload
from ..blocks import BLOCK_FORMATS
from ..declaration import In, Out, Scalar, loose
from ..errors import ArgumentError
from ..formats import bf16, i32, u8
from ..kernel import kernel
from ..tiles import TILE_KEYS, TileLayout, tile_layout, tiles_of
from .quantized import checked_global_scale
from .quantizers import DEQUANTIZE
from .scales import fill_f32

if TYPE_CHECKING:
    from .operands import Operand

# Format -> the byte of a scale of 1.
_ONES = {"mxfp8": 0x7F, "mxfp4": 0x7F, "nvfp4": 0x38}


def tile_sources(layout: TileLayout) -> np.ndarray:
    """Return the source of each byte of a tile, int32: kind << 28 | row << 12 | column of codes (kind 1) or scales
    (kind 2).

    It is 0 for a byte without source.
    """
    sources = np.zeros(layout.nbytes, np.int32)
    for kind, places in ((1, layout.codes_places), (2, layout.scale_places)):
        rows, columns = np.indices(places.shape)
        sources[places] = kind << 28 | rows << 12 | columns
    return sources


def _example_sources(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    return tile_sources(tile_layout("nvfp4", "k", 64))


@kernel(
    grid="tile_bytes*count heads batch",
    cases=[
        dict(
            batch=2,
            heads=3,
            code_rows=70,
            code_columns=32,
            scale_rows=70,
            scale_columns=4,
            tile_bytes=2304,
            count=2,
            scales=True,
        ),
        dict(batch=1, heads=1, code_rows=64, code_columns=24, scale_rows=1, scale_columns=1, tile_bytes=2304, count=1),
    ],
    derived=dict(
        scale_rows=lambda axes: axes.get("scale_rows", 1), scale_columns=lambda axes: axes.get("scale_columns", 1)
    ),
    draw=dict(sources=_example_sources),
)
def tile_codes(
    codes: In[u8, "batch heads code_rows code_columns", loose],
    scales: In[u8, "batch heads scale_rows scale_columns", loose] = None,
    *,
    sources: In[i32, "tile_bytes"],
    tiles: Out[u8, "batch heads count tile_bytes"],
    code_step: Scalar[i32] = 64,
    scale_step: Scalar[i32] = 64,
    one: Scalar[i32] = 0x38,
):
    """Arrange codes and scales in tiles of keys or of values.

    sources: for each byte of a tile kind << 28 | row << 12 | column of the tile's codes (kind 1) or scales (kind 2); 0
    gives the byte 0. A tile has code_step rows of codes and scale_step rows of scales. Missing codes become 0, missing
    scales `one`.
    """
    kinds, rows, columns = sources >> 28, sources >> 12 & 0xFFFF, sources & 0xFFF
    for tile in range(tiles.shape[2]):
        for kind, plain, step, missing in ((0, None, 1, 0), (1, codes, code_step, 0), (2, scales, scale_step, one)):
            chosen = np.flatnonzero(kinds == kind)
            tiles[:, :, tile, chosen] = missing
            if plain is not None:
                at, column = rows[chosen] + tile * step, columns[chosen]
                present = (at < plain.shape[2]) & (column < plain.shape[3])
                tiles[:, :, tile, chosen[present]] = plain[:, :, at[present], column[present]]


def operand_of(made: type, codes, scales, format, role, axis, global_scale, dim, stream) -> "Operand":
    """Make an operand for `Operand.of`. made: the class."""
    from .operands import checked_dim, quantize_operand  # circular: these import this module

    function = "Operand.of"
    if not isinstance(format, str) or format not in _ONES:
        raise ArgumentError(f"{function}: format is {format!r}; pass 'mxfp8', 'mxfp4' or 'nvfp4'")
    block = BLOCK_FORMATS[format]
    if not isinstance(role, str) or role not in ("q", "k", "v"):
        raise ArgumentError(f"{function}: role is {role!r}; pass 'q', 'k' or 'v'")
    whole = isinstance(axis, (int, np.integer)) and not isinstance(axis, bool)
    if not whole or axis not in (-1, -2, 3, 2) or (axis in (-2, 2) and role != "v"):
        raise ArgumentError(
            f"{function}: axis is {axis!r}; scales of queries and keys lie along -1, those of values along -1 or -2"
        )
    along_keys = axis in (-2, 2)
    arrays = dict(codes=codes) | ({} if scales is None else dict(scales=scales))
    arrays = dict(zip(arrays, as_arrays(function, **arrays)))
    for name, x in arrays.items():
        member = block.element.storage if name == "codes" else block.scale
        if len(x.shape) != 4 or not member.holds(x.dtype):
            takes = f"{member.dtype} with four axes, the bytes of {member.name}"
            hint = "" if x.dtype.itemsize != 1 or member.holds(x.dtype) else "; x.view(numpy.uint8) has them"
            raise ArgumentError(f"{function}: {name} is {x.dtype} {list(x.shape)}; pass {takes}{hint}")
    sides = {isinstance(x, DeviceArray) for x in arrays.values()}
    backends = [x.backend for x in arrays.values() if isinstance(x, DeviceArray)]
    if len(sides) > 1 or any(backend is not backends[0] for backend in backends):
        raise ArgumentError(f"{function}: codes and scales are on different machines; pass both from one")
    if role == "q" and dim is not None:
        raise ArgumentError(f"{function}: dim is {dim!r}; queries have no dim, leave it out")
    packed = 8 // block.bits
    batch, heads, *inner = arrays["codes"].shape
    length, cols = (inner[0] * packed, inner[1]) if along_keys else (inner[0], inner[1] * packed)
    cut = (length, block.block) if along_keys else (cols, block.block)
    if cut[0] % cut[1]:
        raise ArgumentError(
            f"{function}: codes {list(arrays['codes'].shape)} have {cut[0]} values along axis {axis}, no "
            f"multiple of {cut[1]}"
        )
    expected = (
        (batch, heads, length // block.block, cols) if along_keys else (batch, heads, length, cols // block.block)
    )
    if scales is not None and tuple(arrays["scales"].shape) != expected:
        raise ArgumentError(
            f"{function}: scales have shape {list(arrays['scales'].shape)}; codes {list(arrays['codes'].shape)} take "
            f"{list(expected)}"
        )
    shape, on_host = (batch, heads, length, cols), sides == {False}
    if global_scale is not None and not block.two_level:
        raise ArgumentError(f"{function}: global_scale is {global_scale!r}; {format} has none")
    level = global_scale if global_scale is None else checked_global_scale(function, global_scale)
    if isinstance(level, DeviceArray) and any(level.backend is not backend for backend in backends):
        where = f"global_scale is on {level.backend.describe()}, codes on {backends[0].describe()}"
        raise ArgumentError(f"{function}: {where}; bring it there")
    if block.two_level and level is None:
        level = 1.0
    device = {name: _forward(to_device(x, stream=stream), stream).view(np.uint8) for name, x in arrays.items()}
    backend = device["codes"].backend
    if role == "q" or (role == "v" and not along_keys):
        whole = {name: _row_major(x, stream) for name, x in device.items()}
        if "scales" not in whole:
            whole["scales"] = _filled(backend, expected, _ONES[format], stream)
    if role == "q":
        result = made(*whole.values(), format=format, role=role, shape=shape, global_scale=level)
    elif not along_keys and role == "v":
        matrix = [x.reshape(-1, x.shape[-1]) for x in whole.values()]
        numbers = [] if level is None else [_scalar(backend, level, stream)]
        values = DEQUANTIZE[format](*matrix, *numbers, dtype=bf16.dtype, stream=stream).reshape(*shape)
        result = quantize_operand(values, "bf16", role="v", dim=dim, stream=stream)
    else:
        layout = tile_layout(format, role, checked_dim(function, format, cols, dim))
        steps = dict(code_step=layout.codes_places.shape[0], scale_step=layout.scale_places.shape[0], one=_ONES[format])
        if along_keys and block.bits == 8:
            steps["code_step"] = TILE_KEYS
        tiles = empty((batch, heads, tiles_of(length), layout.nbytes), np.uint8, device=backend.ordinal)
        if tiles.size:
            tile_codes(
                *device.values(), sources=table_on(backend, tile_sources, layout), tiles=tiles, **steps, stream=stream
            )
        result = made(tiles, format=format, role=role, shape=shape, dim=layout.dim, global_scale=level)
    return result.to_numpy(stream=stream) if on_host and result.on_device else result


def _forward(x: DeviceArray, stream) -> DeviceArray:
    """Return x, or a copy of it if strides are negative."""
    return x if min(x.strides) >= 0 else x.copy(stream=stream)


def _row_major(x: DeviceArray, stream) -> DeviceArray:
    """Return x, or a copy of it in row-major order."""
    return x if x.is_contiguous else x.copy(stream=stream)


def _filled(backend, shape: tuple[int, ...], byte: int, stream) -> DeviceArray:
    """Allocate an array filled with one byte."""
    count = int(np.prod(shape))
    words = empty((-(-count // 4),), np.float32, device=backend.ordinal)
    if count:
        fill_f32(x=words, value=float(np.uint32(byte * 0x01010101).view(np.float32)), stream=stream)
    return words.view(np.uint8)[:count].reshape(shape)


def _scalar(backend, level: Any, stream) -> DeviceArray:
    """Copy a global scale to the device as float32 [1]."""
    return level.reshape(1) if isinstance(level, DeviceArray) else upload(backend, np.float32(level).reshape(1), stream)
