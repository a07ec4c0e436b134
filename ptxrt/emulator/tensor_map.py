"""Tensor maps: the descriptions of tensors in global memory for cp.async.bulk.tensor (PTX ISA 5.5, tensors).

`encode_tiled` and `encode_im2col` take the fields of the driver's cuTensorMapEncodeTiled and cuTensorMapEncodeIm2col.
They return 128 opaque bytes in a format of this module: only the emulator can read them, a GPU cannot. A kernel
receives them as a `const __grid_constant__` parameter of 128 bytes, or by an address that is a multiple of 64. bulk.py
decodes them into a `TensorMap`, which locates the elements of a box in global and in shared memory.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..errors import ArgumentError

BYTES = 128
ALIGNMENT = 64
_MAGIC = b"ptxrtmap"
_FORMAT = "<8sQBBBBBxxx5Q4Q5H5B6h"

#: By type: bytes of an element, and the bits of the NaN that fills (None for integers). The NaN of f16 was read from an
#: H200. The bits of the others are not documented; the canonical NaN stands for them.
TYPES: dict[str, tuple[int, int | None]] = {
    "u8": (1, None), "u16": (2, None), "u32": (4, None), "s32": (4, None), "u64": (8, None), "s64": (8, None),
    "f16": (2, 0x7FF7), "bf16": (2, 0x7FFF), "f32": (4, 0x7FFFFFFF), "f32_ftz": (4, 0x7FFFFFFF),
    "tf32": (4, 0x7FFFFFFF),
    "tf32_ftz": (4, 0x7FFFFFFF), "f64": (8, 0x7FF8000000000000),
}  # fmt: skip
_TYPE_NAMES = tuple(TYPES)
#: By swizzle, its span in bytes: the most bytes of a row of the box (0: no limit).
SWIZZLES = {"none": 0, "32b": 32, "64b": 64, "128b": 128}
_SWIZZLE_NAMES = tuple(SWIZZLES)
FILLS = ("zero", "nan")
#: The range of an im2col box's corners, by rank.
_CORNERS = {3: 1 << 15, 4: 1 << 7, 5: 1 << 4}


def swizzled(address: np.ndarray, swizzle: str) -> np.ndarray:
    """The swizzled shared address of bytes of a box. It permutes chunks of 16 bytes:

    128b: address bits 6..4 ^= bits 9..7; 64b: bits 5..4 ^= bits 8..7; 32b: bit 4 ^= bit 7.
    Source: PTX ISA 5.5.6, swizzling modes.
    """
    if swizzle == "none":
        return address
    return address ^ (((address >> 7) & (SWIZZLES[swizzle] // 16 - 1)) << 4)


@dataclass(frozen=True)
class TensorMap:
    """A decoded tiled map. All sizes are innermost first: dims, box and steps in elements, strides in bytes from
    dimension 1 on."""

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
        """The bytes that a copy of one box completes, including those outside of the tensor."""
        return int(np.prod(self.counts)) * self.element_bytes

    @property
    def counts(self) -> tuple[int, ...]:
        """Elements of a box per dimension; the element stride of the innermost one has no effect without interleave."""
        return (self.box[0], *(-(-size // step) for size, step in zip(self.box[1:], self.steps[1:])))

    @property
    def unit(self) -> int:
        """Bytes of a unit: the most, up to 16, of which all or none are inside the tensor."""
        return int(np.gcd(16, self.dims[0] * self.element_bytes))

    @property
    def pitch(self) -> int:
        """Bytes of shared memory from one row of the box to the next: at least the span of the swizzle."""
        return max(self.counts[0] * self.element_bytes, SWIZZLES[self.swizzle])

    def refusal(self, coordinates: Sequence[int]) -> str:
        """The reason why a box cannot begin at these coordinates; empty if it can. An H200 stops with an illegal
        instruction in that case."""
        first = coordinates[0] * self.element_bytes
        return f"begins at byte {first} of a row, which is no multiple of 16" if first % 16 else ""

    @lru_cache(maxsize=16)
    def places(self, unit: int) -> np.ndarray:
        """The offset of each unit of the box in shared memory, before the swizzle."""
        rows = np.arange(int(np.prod(self.counts[1:])))[:, None] * self.pitch
        return (rows + np.arange(0, self.counts[0] * self.element_bytes, unit)).ravel()

    def positions(self, coordinates: Sequence[int], offsets: Sequence[int]) -> list[np.ndarray]:
        """The coordinates of each row of the box, one array per dimension from 1 on."""
        if self.rank == 1:
            return []
        index = np.unravel_index(np.arange(int(np.prod(self.counts[1:]))), self.counts[1:], order="F")
        return [coordinates[axis] + index[axis - 1] * self.steps[axis] for axis in range(1, self.rank)]

    def locate(
        self, coordinates: Sequence[int], unit: int, offsets: Sequence[int] = ()
    ) -> tuple[np.ndarray, np.ndarray]:
        """(global addresses, whether inside the tensor) of the units of the box at these coordinates."""
        byte = coordinates[0] * self.element_bytes + np.arange(0, self.counts[0] * self.element_bytes, unit)
        inside, address = (byte >= 0) & (byte < self.dims[0] * self.element_bytes), byte + self.address
        for axis, position in enumerate(self.positions(coordinates, offsets), 1):
            position = position[:, None]
            inside = inside & (position >= 0) & (position < self.dims[axis])
            address = address + position * self.strides[axis - 1]
        return address.ravel().astype(np.uint64), inside.ravel()

    def filling(self, unit: int) -> np.ndarray:
        """The bytes of a unit outside of the tensor."""
        if self.fill == "zero":
            return np.zeros(unit, np.uint8)
        size, bits = TYPES[self.dtype]
        return np.frombuffer(bits.to_bytes(size, "little") * (unit // size), np.uint8)


@dataclass(frozen=True)
class Im2colMap(TensorMap):
    """A decoded im2col map: its boxes are sequences of pixels of an NWC, NHWC or NDHWC tensor.

    box: (channels, pixels). lower, upper: offsets, in W, H and D, from the first and the last pixel of an image to the
    first and the last pixel of the region that boxes walk through.
    """

    lower: tuple[int, ...]
    upper: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Channels and pixels of a box."""
        return self.box

    def refusal(self, coordinates: Sequence[int]) -> str:
        """The reason why a column of pixels cannot begin at these coordinates; empty if it can."""
        for axis, (at, first, last) in enumerate(zip(coordinates[1:], self.lower, self.upper)):
            if not first <= at < self.dims[axis + 1] + last:
                return (
                    f"begins at {'WHD'[axis]} = {at}, outside of {first} to {self.dims[axis + 1] - 1 + last}, where "
                    "the map's pixels lie"
                )
        return super().refusal(coordinates)

    def positions(self, coordinates: Sequence[int], offsets: Sequence[int]) -> list[np.ndarray]:
        """The coordinates of each pixel, one array each for W, H, D and N.

        The walk starts at the given coordinates and advances by `steps` along W. At the end of the region in W it
        returns to the start in W and advances one step in H, and so on through D to the next image. `offsets` are added
        to each position.
        Source: PTX ISA 5.5.4, im2col mode.
        """
        here, found = list(coordinates[1:]), []
        for _ in range(self.box[1]):
            found.append([at + offset for at, offset in zip(here, (*offsets, 0))])
            for axis, (first, last) in enumerate(zip(self.lower, self.upper)):
                here[axis] += self.steps[axis + 1]
                if here[axis] < self.dims[axis + 1] + last:
                    break
                here[axis] = first
            else:
                here[-1] += 1
        return list(np.array(found).T)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ArgumentError(f"tensor map: {message}")


def encode_tiled(
    dtype: str,
    address: int,
    dims: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    element_strides: Sequence[int] | None = None,
    *,
    interleave: str = "none",
    swizzle: str = "none",
    fill: str = "zero",
) -> bytes:
    """The 128 bytes of a tensor map for boxes of a tensor with one to five dimensions, innermost first.

    dtype: a name of `TYPES`. address: of the tensor, a multiple of 16. dims: elements per dimension. strides: bytes
    between elements of dimension 1, 2, ..., multiples of 16. box: elements of one copy, at most 256 per dimension. A
    row of the box has a multiple of 16 bytes, and with a swizzle at most its span. Shorter rows are one span apart; the
    gap is not written. element_strides: from 1 to 8. fill: of elements outside of the tensor, "zero" or, for floats,
    "nan".

    Raises ArgumentError for what cuTensorMapEncodeTiled refuses, and for interleaved layouts.
    Source: CUDA driver API, cuTensorMapEncodeTiled; CUDA C++ Programming Guide, tensor memory access, swizzle modes.
    """
    rank = len(dims)
    _require(1 <= rank <= 5, f"{rank} dimensions; there are 1 to 5")
    _require(len(box) == rank, f"box {tuple(box)} for {rank} dimensions")
    _require(all(1 <= size <= 256 for size in box), f"the box is {tuple(box)}; each size lies between 1 and 256")
    return _encode(dtype, address, dims, strides, box, element_strides, interleave, swizzle, fill)


def encode_im2col(
    dtype: str,
    address: int,
    dims: Sequence[int],
    strides: Sequence[int],
    lower: Sequence[int],
    upper: Sequence[int],
    channels: int,
    pixels: int,
    element_strides: Sequence[int] | None = None,
    *,
    interleave: str = "none",
    swizzle: str = "none",
    fill: str = "zero",
) -> bytes:
    """The 128 bytes of a tensor map for columns of pixels of images: dims are (C, W, N), (C, W, H, N) or
    (C, W, H, D, N).

    lower, upper: offsets, in W, H and D, from the first and the last pixel of an image to those of the region that the
    pixels come from; for a convolution -padding, and padding less the reach of the filter. channels: elements of a
    pixel, at most 256. pixels: pixels of a copy, at most 1024. The other arguments are those of `encode_tiled`.

    Raises ArgumentError for what cuTensorMapEncodeIm2col refuses, and for interleaved layouts.
    Source: CUDA driver API, cuTensorMapEncodeIm2col; PTX ISA 5.5.4. An H200 copies the same.
    """
    rank = len(dims)
    _require(3 <= rank <= 5, f"{rank} dimensions; im2col has 3 to 5")
    _require(
        len(lower) == len(upper) == rank - 2,
        f"corners {tuple(lower)} and {tuple(upper)} for {rank - 2} dimensions of an image",
    )
    reach = _CORNERS[rank]
    _require(
        all(-reach <= at < reach for at in (*lower, *upper)),
        f"corners are {tuple(lower)} and {tuple(upper)}; they lie from {-reach} to {reach - 1}",
    )
    _require(1 <= channels <= 256, f"{channels} channels of a pixel; there are 1 to 256")
    _require(1 <= pixels <= 1024, f"{pixels} pixels of a column; there are 1 to 1024")
    return _encode(
        dtype, address, dims, strides, (channels, pixels), element_strides, interleave, swizzle, fill, lower, upper
    )


def _encode(
    dtype, address, dims, strides, box, element_strides, interleave, swizzle, fill, lower=(), upper=()
) -> bytes:
    """The 128 bytes of a map, after the checks that both modes share."""
    rank = len(dims)
    steps = tuple(element_strides) if element_strides is not None else (1,) * rank
    _require(dtype in TYPES, f"dtype is {dtype!r}; there is {', '.join(TYPES)}")
    _require(interleave == "none", f"interleave is {interleave!r}; only 'none' is emulated")
    _require(swizzle in SWIZZLES, f"swizzle is {swizzle!r}; there is {', '.join(SWIZZLES)}")
    _require(fill in FILLS, f"fill is {fill!r}; there is {', '.join(FILLS)}")
    _require(fill == "zero" or TYPES[dtype][1] is not None, f"{dtype} has no NaN to fill with")
    _require(len(strides) == rank - 1, f"{len(strides)} strides for {rank} dimensions; one less is expected")
    _require(len(steps) == rank, f"element strides {steps} for {rank} dimensions")
    _require(address % 16 == 0, f"the address 0x{address:x} is no multiple of 16")
    _require(all(1 <= size <= 1 << 32 for size in dims), f"dims are {tuple(dims)}; each lies between 1 and 2**32")
    _require(
        all(0 < s < 1 << 40 and s % 16 == 0 for s in strides),
        f"strides are {tuple(strides)}; each is a multiple of 16 below 2**40",
    )
    _require(all(1 <= step <= 8 for step in steps), f"element strides are {steps}; each lies between 1 and 8")
    row = box[0] * TYPES[dtype][0]
    _require(row % 16 == 0, f"rows of the box have {row} bytes; a multiple of 16 is expected")
    _require(
        swizzle == "none" or row <= SWIZZLES[swizzle],
        f"rows of the box have {row} bytes; swizzle {swizzle} spans {SWIZZLES[swizzle]}",
    )

    def padded(values: Sequence[int], count: int) -> list[int]:
        return [*map(int, values), *[0] * (count - len(values))]

    codes = _TYPE_NAMES.index(dtype), rank, _SWIZZLE_NAMES.index(swizzle), FILLS.index(fill), bool(lower)
    sizes = (
        *padded(dims, 5),
        *padded(strides, 4),
        *padded(box, 5),
        *padded(steps, 5),
        *padded(lower, 3),
        *padded(upper, 3),
    )
    return struct.pack(_FORMAT, _MAGIC, int(address), *codes, *sizes).ljust(BYTES, b"\0")


@lru_cache(maxsize=256)
def decode(data: bytes) -> TensorMap:
    """The map in 128 bytes; ArgumentError for bytes that neither `encode_tiled` nor `encode_im2col` made."""
    magic, address, dtype, rank, swizzle, fill, im2col, *sizes = struct.unpack_from(_FORMAT, data)
    if magic != _MAGIC:
        raise ArgumentError("these 128 bytes are no tensor map of ptxrt.emulator.tensor_map")
    dims, strides, box, steps, lower, upper = (
        sizes[a:b] for a, b in ((0, 5), (5, 9), (9, 14), (14, 19), (19, 22), (22, 25))
    )
    common = _TYPE_NAMES[dtype], address, tuple(dims[:rank]), tuple(strides[: rank - 1])
    looks = tuple(steps[:rank]), _SWIZZLE_NAMES[swizzle], FILLS[fill]
    if im2col:
        return Im2colMap(*common, tuple(box[:2]), *looks, tuple(lower[: rank - 2]), tuple(upper[: rank - 2]))
    return TensorMap(*common, tuple(box[:rank]), *looks)
