"""The layout of keys and values of attention in tiles of 64 keys: `TileLayout`, the twin of
kernels_cu/tile/block_tiles.cuh.

A layout is two tables of places in a tile: of each byte of the plain codes, and of each scale. Plain codes and scales
are those of `blocks.py`, with blocks along the last axis for keys and along the keys for values.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from .blocks import BLOCK_FORMATS, BlockFormat
from .formats import FORMATS, Format
from .sequences import first_units, units_of

# Keys of a tile.
TILE_KEYS = 64
_CHUNK = 16  # bytes, the unit of every swizzle
_ALL, _WHOLE_DEPTHS = (32, 64, 96, 128, 192, 256), (64, 128, 192, 256)
# Format -> the head dimensions that tiles are compiled for: whole steps of its matrix instruction.
TILE_DIMS = {"mxfp8": _ALL, "mxfp4": _WHOLE_DEPTHS, "nvfp4": _WHOLE_DEPTHS, "bf16": _ALL}
# Values that the matrix instruction of a block format multiplies at once, along the blocks.
_DEPTHS = {"mxfp8": 32, "mxfp4": 64, "nvfp4": 64}
# The scale bytes of the value 1.
_ONES = {"mxfp8": 0x7F, "mxfp4": 0x7F, "nvfp4": 0x38}


def tile_dim(format: str, cols: int) -> int:
    """Return the smallest compiled head dimension that holds `cols`, or `cols` itself if none does."""
    return min((dim for dim in TILE_DIMS[format] if dim >= cols), default=cols)


def tiles_of(keys: int, sequences: int = 1) -> int:
    """Return how many tiles hold `keys` keys of so many packed sequences, each of which begins with its own tile."""
    return units_of(keys, TILE_KEYS, sequences)


def swizzled(rows: int, row_chunks: int, xor, place=lambda row: row) -> np.ndarray:
    """Return the place of byte b of row r, [rows, 16 row_chunks]: in chunk (b / 16) ^ xor(r) of the place(r)-th row."""
    row, byte = np.ogrid[:rows, : row_chunks * _CHUNK]
    return (place(row) * row_chunks + (byte // _CHUNK ^ xor(row))) * _CHUNK + byte % _CHUNK


def _power(row_chunks: int) -> int:
    """Return log2 of the largest power of two, at most 8, that divides the chunks of a row."""
    return next(power for power in (3, 2, 1, 0) if row_chunks % (1 << power) == 0)


def shared_tile(rows: int, row_bytes: int) -> np.ndarray:
    """Return the places of a SharedTile (kernels_cu/tile/shared.cuh): [rows, row_bytes]."""
    power = _power(row_bytes // _CHUNK)
    return swizzled(rows, row_bytes // _CHUNK, lambda row: row >> (3 - power) & ((1 << power) - 1))


@dataclass(frozen=True)
class TileLayout:
    """Tiles of `role` "k" or "v" in a format: "mxfp8", "mxfp4", "nvfp4" or, for values, "bf16".

    dim: the head dimension compiled for. codes_places: of keys [64, bytes of a row], of values in block formats
    [bytes of a column, dim], in 16 bits [64, 2 dim]. scale_places: of keys [64, dim / block], of values
    [64 / block, dim]. nbytes: bytes of a tile. Unused bytes are 0.
    """

    format: str
    role: str
    dim: int

    @property
    def block(self) -> BlockFormat | None:
        """The block format; None in 16 bits."""
        return BLOCK_FORMATS.get(self.format)

    @property
    def element(self) -> Format:
        """The 16-bit format of the values."""
        return FORMATS[self.format]

    @property
    def axis(self) -> int:
        """The axis of [..., keys, dim] along which blocks lie."""
        return -1 if self.role == "k" else -2

    @cached_property
    def code_bytes(self) -> int:
        """Bytes of the codes of a tile. The scales follow them."""
        return TILE_KEYS * self.dim * (self.block.bits if self.block else 16) // 8

    @cached_property
    def codes_places(self) -> np.ndarray:
        """Return the places of the bytes of plain codes in a tile."""
        if not self.block:
            return shared_tile(TILE_KEYS, 2 * self.dim)
        if self.role == "v":
            return shared_tile(self.dim, TILE_KEYS * self.block.bits // 8).T
        row_chunks = self.dim * self.block.bits // 8 // _CHUNK
        power = max(_power(row_chunks), 1)

        def xor(row):
            far = row >> 4 if power == 1 else (row >> 3 & 3) << (power > 2)
            return (row >> (3 - power) ^ far) & ((1 << power) - 1)

        def place(row):
            return row ^ (row >> 3 & 1) << 1 if power == 1 else row

        return swizzled(TILE_KEYS, row_chunks, xor, place)

    @cached_property
    def scale_places(self) -> np.ndarray:
        """Return the places of the plain scales in a tile; none in 16 bits."""
        if not self.block:
            return np.zeros((0, self.dim), np.int64)
        if self.role == "k":
            row, block = np.ogrid[:TILE_KEYS, : self.dim // self.block.block]
            return self.code_bytes + row * self._words * 4 + block
        block, column = np.ogrid[: TILE_KEYS // self.block.block, : self.dim]
        tile, lane = column // 8, 4 * (column % 8) + column // 8 % 4
        step, group = block // self._step_blocks, tile // 4 // self._columns_per_word
        byte = tile // 4 % self._columns_per_word * self._step_blocks + block % self._step_blocks
        return self.code_bytes + 4 * ((step * self._groups + group) * 32 + lane) + byte

    @property
    def _words(self) -> int:
        """Return the 32-bit words that the scales of a key fill."""
        return -(-self.dim // self.block.block // 4)

    @property
    def _step_blocks(self) -> int:
        """Return the scales of a column of values for one matrix instruction."""
        return _DEPTHS[self.format] // self.block.block

    @property
    def _columns_per_word(self) -> int:
        return 4 // self._step_blocks

    @property
    def _groups(self) -> int:
        return -(-self.dim // (32 * self._columns_per_word))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of a tile."""
        if not self.block:
            return self.code_bytes
        if self.role == "k":
            return self.code_bytes + TILE_KEYS * self._words * 4
        return self.code_bytes + TILE_KEYS // _DEPTHS[self.format] * self._groups * 128

    def join(self, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """Make tiles [..., nbytes] of the plain codes and scales of each tile (uint8, in the shapes of the places)."""
        tiles = np.zeros((*codes.shape[:-2], self.nbytes), np.uint8)
        tiles[..., self.codes_places] = codes
        tiles[..., self.scale_places] = scales
        return tiles

    def split(self, tiles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the plain codes and scales of each tile: the inverse of `join`."""
        return tiles[..., self.codes_places], tiles[..., self.scale_places]

    def encode(
        self, x: np.ndarray, *, rule: str | None = None, mean=None, global_scale=None, key_starts=None, key_ends=None
    ) -> np.ndarray:
        """Encode x [batch, heads, keys, cols] as tiles [batch, heads, tiles, nbytes], padded with zeros.

        key_ends: [batch]; keys from there on are zeros. key_starts: with key_ends, [sequences], the starts of packed
        sequences in a batch of one; each begins with its own tile. mean: [batch or sequences, heads, cols], subtracted
        first, in float32. A block without values of x has a scale of 1.
        """
        batch, heads, keys, cols = x.shape
        packed = key_starts is not None
        tiles = tiles_of(keys, len(key_starts) if packed else 1)
        present = np.zeros((batch, heads, tiles * TILE_KEYS, self.dim), bool)
        whole = np.zeros(present.shape, np.float32)
        starts = key_starts if packed else np.zeros(batch, np.int64)
        rows = first_units(starts, TILE_KEYS) * TILE_KEYS if packed else starts
        for i, (start, row) in enumerate(zip(starts, rows)):
            count = max((keys if key_ends is None else min(key_ends[i], keys)) - start, 0)
            source = (0 if packed else i, slice(None), slice(start, start + count))
            target = (*source[:2], slice(row, row + count), slice(cols))
            whole[target], present[target] = x[source], True
            if mean is not None:
                with np.errstate(invalid="ignore"):
                    whole[target] -= mean[i][:, None]
        if not self.block:
            with np.errstate(over="ignore"):
                codes = whole.astype(self.element.dtype).view(np.uint8)
            return self.join(self._by_tile(codes, tiles), np.zeros((batch, heads, tiles, 0, self.dim), np.uint8))
        level = () if not self.block.two_level else (1 if global_scale is None else global_scale,)
        codes, scales = self.block.encode(whole, *level, rule or self.block.rules[0], axis=self.axis)
        starts = present[..., :: self.block.block] if self.role == "k" else present[..., :: self.block.block, :]
        scales = np.where(starts, scales, np.uint8(_ONES[self.format]))
        return self.join(self._by_tile(codes, tiles), self._by_tile(scales, tiles))

    def decode(self, tiles: np.ndarray, global_scale=None) -> np.ndarray:
        """Decode tiles to values [batch, heads, 64 tiles, dim]: float32, or of the 16-bit type."""
        codes, scales = (self._by_head(part) for part in self.split(tiles))
        if not self.block:
            return np.ascontiguousarray(codes).view(self.element.dtype)
        level = () if not self.block.two_level else (1 if global_scale is None else global_scale,)
        return self.block.decode(codes, scales, *level, axis=self.axis)

    @staticmethod
    def _by_tile(plain: np.ndarray, tiles: int) -> np.ndarray:
        """[batch, heads, rows, cols] as [batch, heads, tiles, rows of a tile, cols]."""
        return plain.reshape(*plain.shape[:2], tiles, -1 if plain.size else 0, plain.shape[-1])

    @staticmethod
    def _by_head(plain: np.ndarray) -> np.ndarray:
        """The inverse."""
        return plain.reshape(*plain.shape[:2], plain.shape[2] * plain.shape[3], plain.shape[4])


@cache
def tile_layout(format: str, role: str, dim: int) -> TileLayout:
    """The layout, made once."""
    return TileLayout(format, role, dim)
