"""Declarations of the kernels that pack keys and values into the tiles of `tiles.py`, generated from its tables, and of
the kernel that unpacks them.
"""

import numpy as np

from ..blocks import BLOCK_FORMATS
from ..declaration import Axis, In, Out, Scalar, loose, unaligned
from ..formats import bf16, f16, f32, i32, u8, u32
from ..kernel import Kernel, kernel
from ..sequences import ends_of, rows_in_units, sequences_axis, starts_of, units_axis, units_of
from ..tiles import TILE_DIMS, TILE_KEYS, tile_dim, tile_layout
from .quantizers import positive

_PACK_KEYS = """Quantize keys to {element} in blocks of {block} along the head dimension, as tiles of 64 keys that
attention reads.

Codes and scales are those of `quantize_{name}` by the same `rule`, of x - mean in float32. x is padded with zeros to
whole tiles and to `dim`. Keys of a batch item from its key_ends on are padding too. A block of padding alone has a
scale of 1.{level}
{packed}
Bytes of a tile: `KeyTile` in kernels_cu/tile/block_tiles.cuh, `ptxrt.tiles.TileLayout` in Python."""

_PACK_VALUES = """Quantize values to {element} in blocks of {block} along the keys, as transposed tiles of 64 keys that
attention reads.

Codes and scales are those of `quantize_{name}_columns` by the same `rule`. x is padded with zeros to whole tiles and
to `dim`. Keys of a batch item from its key_ends on are padding too. A block of padding alone has a scale of 1.{level}
{packed}
Bytes of a tile: `ValueTile` in kernels_cu/tile/block_tiles.cuh, `ptxrt.tiles.TileLayout` in Python."""

_PACK_ROWS = """Round values to {name}, to nearest, ties to even, as tiles of 64 keys that attention reads.

x is padded with zeros to whole tiles and to `dim`. Keys of a batch item from its key_ends on are padding too.
{packed}
Bytes of a tile: `SharedTile` in kernels_cu/tile/shared.cuh, `ptxrt.tiles.TileLayout` in Python."""

_PACKED = """Packed sequences: with key_starts, sequence i is keys key_starts[i] to key_ends[i] of a batch of one. It
begins with tile floor(key_starts[i] / 64) + i, so that no two sequences share a tile; key_starts[0] is 0. A tile
without keys holds zeros."""

_LEVEL = "\nThe global scale is 1 if omitted."


def _key_ends(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    """Examples of key_ends: no keys, some, all, and past the last; for packed sequences without gaps."""
    if axes["sequences"] != axes["batch"]:
        return ends_of("keys")(rng, member, shape, axes)
    return (np.arange(shape[0])[::-1] * axes["keys"] * 3 // 4).astype(np.int32)


def _derived(format: str, role: str) -> dict:
    """Derived axes. `dim`: the smallest compiled one that holds the array, or a larger one given by the call."""
    return dict(
        dim=lambda axes: axes["dim"] if axes.get("dim", 0) >= axes["cols"] else tile_dim(format, axes["cols"]),
        sequences=sequences_axis,
        tiles=units_axis(TILE_KEYS),
        tile_bytes=lambda axes: (
            tile_layout(format, role, axes["dim"]).nbytes if axes["dim"] in TILE_DIMS[format] else 0
        ),
    )


def _cases(format: str, role: str) -> list[dict]:
    """Cases: all compiled sizes in all types; then ragged keys and columns, optional arguments, and all rules."""
    sizes = TILE_DIMS[format]
    small, size = sizes[0], dict(batch=1, heads=2, keys=70, sequences=1)
    block, members = BLOCK_FORMATS.get(format), ["bf16", "f32", "f16"]
    cases = [dict(size, cols=dim, dim=dim, format=member) for dim, member in zip(sizes, members * 2)]
    level = dict(global_scale=block.two_level if block else False)
    # The other types, padded to a larger dim than the smallest that holds them; the two smallest dims have all types
    # below.
    rest = [(dim, member) for i, dim in enumerate(sizes) for member in members if i > 1 and member != members[i % 3]]
    cases += [dict(size, heads=1, keys=40, cols=sizes[1] - 25, dim=dim, format=member, **level) for dim, member in rest]
    cases += [dict(size, batch=3, sequences=3, cols=small - 8, dim=small, key_ends=True)]
    cases += [dict(size, keys=1, cols=small - 27, dim=small, format="f16")]
    cases += [dict(size, keys=130, cols=small + 8, dim=sizes[1])]
    packed = dict(size, keys=330, cols=small, dim=small, sequences=4, key_starts=True, key_ends=True)
    cases += [dict(packed, format="f32")]
    if not block:
        return cases
    options = dict(level, mean=role == "k")
    cases += [
        dict(size, cols=small - 13, dim=small, **options),
        dict(size, cols=small, dim=small, key_ends=True, **options),
    ]
    cases += [dict(packed, format="bf16", **options)]
    cases += [dict(size, cols=small, dim=small, rule=rule, **options) for rule in range(1, len(block.rules))]
    if block.two_level:  # wide tiles, whose blocks are encoded one by one
        cases += [
            dict(size, heads=1, keys=40, cols=sizes[1], dim=sizes[1], rule=rule, format="f32", **options)
            for rule in range(1, len(block.rules))
        ]
    return cases


def _declare(format: str, role: str, text: str, body) -> Kernel:
    """Declare `body` as the kernel that packs this role in this format."""
    block = BLOCK_FORMATS.get(format)
    body.__name__ = body.__qualname__ = f"pack_{'keys' if role == 'k' else 'values'}_{format}"
    element = block.element.name.upper() if block else ""
    level = _LEVEL if block and block.two_level else ""
    body.__doc__ = text.format(
        name=format, element=element, block=block.block if block else "", level=level, packed=_PACKED
    )
    return kernel(
        grid="tiles heads batch",
        variants={"dim": TILE_DIMS[format]},
        derived=_derived(format, role),
        cases=[{name: value for name, value in case.items() if value is not False} for case in _cases(format, role)],
        draw=dict(key_starts=starts_of("keys"), key_ends=_key_ends, global_scale=positive),
    )(body)


def _packer(format: str, role: str) -> Kernel:
    """Declare the kernel of a block format for one role."""
    block = BLOCK_FORMATS[format]
    rules = Scalar[(i32, *range(len(block.rules)))]

    def encode(packed, x, dim, rule, **others):
        packed[:] = tile_layout(format, role, dim).encode(x, rule=block.rules[rule], **others)

    def keys_mx(
        x: In[f32 | f16 | bf16, "batch heads keys cols", loose],
        mean: In[f32, "sequences heads cols"] = None,
        key_starts: In[i32, "sequences", unaligned] = None,
        key_ends: In[i32, "sequences", unaligned] = None,
        *,
        packed: Out[u8, "batch heads tiles tile_bytes"],
        rule: rules = 0,
        dim: Axis,
    ):
        encode(packed, x, dim, rule, mean=mean, key_starts=key_starts, key_ends=key_ends)

    def keys_nv(
        x: In[f32 | f16 | bf16, "batch heads keys cols", loose],
        mean: In[f32, "sequences heads cols"] = None,
        global_scale: In[f32, "1"] = None,
        key_starts: In[i32, "sequences", unaligned] = None,
        key_ends: In[i32, "sequences", unaligned] = None,
        *,
        packed: Out[u8, "batch heads tiles tile_bytes"],
        rule: rules = 0,
        dim: Axis,
    ):
        encode(packed, x, dim, rule, mean=mean, global_scale=global_scale, key_starts=key_starts, key_ends=key_ends)

    def values_mx(
        x: In[f32 | f16 | bf16, "batch heads keys cols", loose],
        key_starts: In[i32, "sequences", unaligned] = None,
        key_ends: In[i32, "sequences", unaligned] = None,
        *,
        packed: Out[u8, "batch heads tiles tile_bytes"],
        rule: rules = 0,
        dim: Axis,
    ):
        encode(packed, x, dim, rule, key_starts=key_starts, key_ends=key_ends)

    def values_nv(
        x: In[f32 | f16 | bf16, "batch heads keys cols", loose],
        global_scale: In[f32, "1"] = None,
        key_starts: In[i32, "sequences", unaligned] = None,
        key_ends: In[i32, "sequences", unaligned] = None,
        *,
        packed: Out[u8, "batch heads tiles tile_bytes"],
        rule: rules = 0,
        dim: Axis,
    ):
        encode(packed, x, dim, rule, global_scale=global_scale, key_starts=key_starts, key_ends=key_ends)

    body = {"k": (keys_mx, keys_nv), "v": (values_mx, values_nv)}[role][block.two_level]
    return _declare(format, role, _PACK_KEYS if role == "k" else _PACK_VALUES, body)


def _rounding_packer(format: str) -> Kernel:
    """Declare the kernel that rounds values to a format of 16 bits."""

    def values(
        x: In[f32 | f16 | bf16, "batch heads keys cols", loose],
        key_starts: In[i32, "sequences", unaligned] = None,
        key_ends: In[i32, "sequences", unaligned] = None,
        *,
        packed: Out[u8, "batch heads tiles tile_bytes"],
        dim: Axis,
    ):
        packed[:] = tile_layout(format, "v", dim).encode(x, key_starts=key_starts, key_ends=key_ends)

    return _declare(format, "v", _PACK_ROWS, values)


# Format -> the kernel that packs keys, and the one that packs values.
PACK_KEYS = {format: _packer(format, "k") for format in BLOCK_FORMATS if format in TILE_DIMS}
PACK_VALUES = {
    format: (_packer(format, "v") if format in BLOCK_FORMATS else _rounding_packer(format)) for format in TILE_DIMS
}


@kernel(
    grid="keys heads",
    derived=dict(rows=lambda axes: units_of(axes["keys"], TILE_KEYS, axes["sequences"]) * TILE_KEYS),
    cases=[
        dict(heads=2, keys=330, sequences=4, rows=576, words=33),
        dict(heads=1, keys=3, sequences=5, rows=320, words=8),
    ],
    draw=dict(key_starts=starts_of("keys")),
)
def unpack_rows(
    x: In[u32, "heads rows words"], key_starts: In[i32, "sequences", unaligned], *, y: Out[u32, "heads keys words"]
):
    """Copy the rows of packed sequences out of tiles of 64 rows, one after the other; each sequence starts a new tile.

    Row j of sequence i is row 64 (floor(key_starts[i] / 64) + i) + j of the tiles. key_starts rise from 0, and
    sequences do not overlap.
    """
    y[:] = x[:, rows_in_units(key_starts, y.shape[1], TILE_KEYS)]
