"""Tensor maps: what cp.async.bulk.tensor knows of a tensor in global memory (PTX ISA 5.5, tensors).

`encode_tiled` takes the fields of the driver's cuTensorMapEncodeTiled. The 128 bytes that it returns are opaque, as the
driver's are, and of a format of our own: the emulator reads them, a GPU does not. A kernel receives them as a
`const __grid_constant__` parameter of 128 bytes, or by an address that is a multiple of 64.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Optional, Sequence

import numpy as np

from ..errors import ArgumentError

BYTES = 128
ALIGNMENT = 64
_MAGIC = b"ptxrtmap"
_FORMAT = "<8sQBBBBxxxx5Q4Q5H5B"

#: Bytes of an element, and the bits of its NaN (None: an integer), by type.
TYPES: dict[str, tuple[int, Optional[int]]] = {
    "u8": (1, None), "u16": (2, None), "u32": (4, None), "s32": (4, None), "u64": (8, None), "s64": (8, None),
    "f16": (2, 0x7FFF), "bf16": (2, 0x7FFF), "f32": (4, 0x7FFFFFFF), "f32_ftz": (4, 0x7FFFFFFF), "tf32": (4, 0x7FFFFFFF),
    "tf32_ftz": (4, 0x7FFFFFFF), "f64": (8, 0x7FF8000000000000),
}  # fmt: skip
_TYPE_NAMES = tuple(TYPES)
#: Bytes of a row of the box, and the address bits that bits 6..4 are combined with, by swizzle.
SWIZZLES = {"none": 0, "32b": 32, "64b": 64, "128b": 128}
_SWIZZLE_NAMES = tuple(SWIZZLES)
FILLS = ("zero", "nan")


def swizzled(address: np.ndarray, swizzle: str) -> np.ndarray:
    """Where a byte of a box lies in shared memory.

    Chunks of 16 bytes change places: 128b: bits 6..4 of the address are xored with bits 9..7; 64b: bits 5..4 with bits
    8..7; 32b: bit 4 with bit 7. Source: PTX ISA 5.5.6, swizzling modes.
    """
    if swizzle == "none":
        return address
    return address ^ (((address >> 7) & (SWIZZLES[swizzle] // 16 - 1)) << 4)


@dataclass(frozen=True)
class TensorMap:
    """A decoded map. Sizes are innermost first: dims, box and steps in elements, strides in bytes from dimension 1 on."""

    dtype: str
    address: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...]
    swizzle: str
    fill: str

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def element_bytes(self) -> int:
        return TYPES[self.dtype][0]

    @property
    def box_bytes(self) -> int:
        """What a copy of one box completes, including what lies outside of the tensor."""
        return int(np.prod(self.counts)) * self.element_bytes

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Elements of a box per dimension; the element stride of the innermost one has no effect without interleave."""
        return (self.box[0], *(-(-size // step) for size, step in zip(self.box[1:], self.steps[1:])))

    def unit(self, first: int) -> int:
        """The most bytes, up to 16, that stay together where a row starts at element `first`."""
        size = self.element_bytes
        return int(np.gcd.reduce([16, first * size, self.dims[0] * size]))

    @lru_cache(maxsize=16)
    def places(self, unit: int) -> tuple[np.ndarray, ...]:
        """For each unit of the box: its offset in shared memory, then per dimension how far it lies from the first element.

        In bytes for the innermost dimension, in elements for the others.
        """
        row = self.counts[0] * self.element_bytes
        sizes = (*reversed(self.counts[1:]), row // unit)
        index = np.indices(sizes).reshape(len(sizes), -1)[::-1]
        offset = np.arange(index.shape[1]) * unit
        return (offset, index[0] * unit, *(index[axis] * self.steps[axis] for axis in range(1, self.rank)))

    def locate(self, coordinates: Sequence[int], unit: int) -> tuple[np.ndarray, np.ndarray]:
        """(global addresses, whether inside the tensor) of the units of the box at these coordinates."""
        _, inner, *outer = self.places(unit)
        byte = inner + coordinates[0] * self.element_bytes
        inside = (byte >= 0) & (byte < self.dims[0] * self.element_bytes)
        address = byte + self.address
        for axis, distance in enumerate(outer, 1):
            position = distance + coordinates[axis]
            inside &= (position >= 0) & (position < self.dims[axis])
            address = address + position * self.strides[axis - 1]
        return address.astype(np.uint64), inside

    def filling(self, unit: int) -> np.ndarray:
        """The bytes of a unit outside of the tensor."""
        if self.fill == "zero":
            return np.zeros(unit, np.uint8)
        size, bits = TYPES[self.dtype]
        return np.frombuffer(bits.to_bytes(size, "little") * (unit // size), np.uint8)


def encode_tiled(
    dtype: str,
    address: int,
    dims: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    element_strides: Optional[Sequence[int]] = None,
    *,
    interleave: str = "none",
    swizzle: str = "none",
    fill: str = "zero",
) -> bytes:
    """The 128 bytes of a tensor map for boxes of a tensor of one to five dimensions, innermost first.

    dtype: a name of `TYPES`. address: of the tensor, a multiple of 16. dims: elements. strides: bytes between elements of
    dimension 1, 2, ..., multiples of 16. box: elements of one copy, at most 256 per dimension; its rows are a multiple
    of 16 bytes, and with a swizzle exactly its span. element_strides: from 1 to 8. fill: "zero" or, for floats, "nan".

    Raises ArgumentError for what cuTensorMapEncodeTiled refuses, for interleaved layouts, and for rows shorter than the
    span of their swizzle.
    """
    rank = len(dims)
    steps = tuple(element_strides) if element_strides is not None else (1,) * rank

    def require(holds: bool, message: str) -> None:
        if not holds:
            raise ArgumentError(f"tensor map: {message}")

    require(dtype in TYPES, f"dtype is {dtype!r}; there is {', '.join(TYPES)}")
    require(interleave == "none", f"interleave is {interleave!r}; only 'none' is emulated")
    require(swizzle in SWIZZLES, f"swizzle is {swizzle!r}; there is {', '.join(SWIZZLES)}")
    require(fill in FILLS, f"fill is {fill!r}; there is {', '.join(FILLS)}")
    require(fill == "zero" or TYPES[dtype][1] is not None, f"{dtype} has no NaN to fill with")
    require(1 <= rank <= 5, f"{rank} dimensions; there are 1 to 5")
    require(len(strides) == rank - 1, f"{len(strides)} strides for {rank} dimensions; one less is expected")
    require(len(box) == rank and len(steps) == rank, f"box {tuple(box)} and element strides {steps} for {rank} dimensions")
    require(address % 16 == 0, f"the address 0x{address:x} is no multiple of 16")
    require(all(1 <= size <= 1 << 32 for size in dims), f"dims are {tuple(dims)}; each lies between 1 and 2**32")
    require(all(0 < s < 1 << 40 and s % 16 == 0 for s in strides), f"strides are {tuple(strides)}; each is a multiple of 16 below 2**40")
    require(all(1 <= size <= 256 for size in box), f"the box is {tuple(box)}; each size lies between 1 and 256")
    require(all(1 <= step <= 8 for step in steps), f"element strides are {steps}; each lies between 1 and 8")
    row = box[0] * TYPES[dtype][0]
    require(row % 16 == 0, f"rows of the box have {row} bytes; a multiple of 16 is expected")
    require(swizzle == "none" or row == SWIZZLES[swizzle], f"rows of the box have {row} bytes; swizzle {swizzle} expects {SWIZZLES[swizzle]}")

    def padded(values: Sequence[int], count: int) -> list[int]:
        return [*map(int, values), *[0] * (count - len(values))]

    codes = _TYPE_NAMES.index(dtype), rank, _SWIZZLE_NAMES.index(swizzle), FILLS.index(fill)
    sizes = (*padded(dims, 5), *padded(strides, 4), *padded(box, 5), *padded(steps, 5))
    return struct.pack(_FORMAT, _MAGIC, int(address), *codes, *sizes).ljust(BYTES, b"\0")


@lru_cache(maxsize=256)
def decode(data: bytes) -> TensorMap:
    """The map in 128 bytes; ArgumentError for bytes that `encode_tiled` did not make."""
    magic, address, dtype, rank, swizzle, fill, *sizes = struct.unpack_from(_FORMAT, data)
    if magic != _MAGIC:
        raise ArgumentError("these 128 bytes are no tensor map of ptxrt.emulator.tensor_map.encode_tiled")
    dims, strides, box, steps = sizes[:5], sizes[5:9], sizes[9:14], sizes[14:19]
    return TensorMap(
        _TYPE_NAMES[dtype], address, tuple(dims[:rank]), tuple(strides[: rank - 1]), tuple(box[:rank]), tuple(steps[:rank]),
        _SWIZZLE_NAMES[swizzle], FILLS[fill],
    )  # fmt: skip
