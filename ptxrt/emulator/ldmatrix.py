"""Copies of matrices between shared memory and the registers of a warp: ldmatrix, stmatrix, movmatrix
(PTX ISA 9.7.14.5.15 ldmatrix, 9.7.14.5.16 stmatrix, 9.7.14.5.17 movmatrix).

A matrix row is 16 bytes at an address aligned to 16. Lane i supplies the address of row i, counted through all
matrices of the instruction. In registers, lane l holds 4 bytes of row l / 4, from byte 4 (l % 4) on. So 8 rows of 16
bytes in memory order are one 32-bit register of 32 lanes in lane order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from .instruction import Fault, Memory, Semantics, Unsupported, Warps, define

_COUNTS = {"x1": 1, "x2": 2, "x4": 4}


def _space(words: list[str]) -> str:
    """Remove the state space from the modifiers and return it; "generic" if there is none."""
    for name in ("shared", "shared::cta"):
        if name in words:
            words.remove(name)
            return "shared"
    return "generic"


def _suppliers(address: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray | None]:
    """(row addresses (warps, rows), flat index of the lane that supplies each or None for all lanes in order).

    Raises a fault for addresses that are not aligned to 16.
    """
    found = address[:, :rows]
    if int(np.bitwise_or.reduce(found, axis=None)) & 15:
        misaligned = np.zeros(address.shape, bool)
        misaligned[:, :rows] = found & np.uint64(15)
        raise Fault("the address of a matrix row is no multiple of 16", misaligned)
    return found, None if rows == 32 else _lanes(len(address), rows)


@lru_cache(maxsize=64)
def _lanes(warps: int, rows: int) -> np.ndarray:
    """The first `rows` lanes of each warp."""
    return 32 * np.arange(warps)[:, None] + np.arange(rows)


# Functions from the bytes of rows in memory, uint8 (warps, rows, 16), to bytes in register order.


def _row_order(rows: np.ndarray) -> np.ndarray:
    return rows


def _transposed_halfwords(rows: np.ndarray) -> np.ndarray:
    """Transpose each 8 x 8 matrix of 16-bit elements."""
    matrices = rows.view(np.uint16).reshape(rows.shape[0], -1, 8, 8)
    return np.ascontiguousarray(matrices.swapaxes(-1, -2)).view(np.uint8)


def _transposed_bytes(rows: np.ndarray) -> np.ndarray:
    """Transpose each 16 x 16 matrix of bytes; each half of its columns becomes one register."""
    matrices = rows.reshape(rows.shape[0], -1, 16, 16)
    return np.ascontiguousarray(matrices.swapaxes(-1, -2))


# Loads of a row. Rows of 16 elements narrower than a byte are padded to 16 bytes; the padding is not read.


def _load_bytes(memory, space: str, address: np.ndarray, lanes: np.ndarray | None) -> np.ndarray:
    return memory.load(space, address, 16, lane=lanes)


def _load_b4x16_p64(memory, space: str, address: np.ndarray, lanes: np.ndarray | None) -> np.ndarray:
    """8 bytes of 4-bit elements, low nibble first, then 8 of padding. Each element becomes bits 3..0 of a byte."""
    packed = memory.load(space, address, 8, lane=lanes)
    return np.stack((packed & np.uint8(15), packed >> np.uint8(4)), axis=-1).reshape(*address.shape, 16)


def _load_b6x16_p32(memory, space: str, address: np.ndarray, lanes: np.ndarray | None) -> np.ndarray:
    """12 bytes of 6-bit elements, lowest bits first, then 4 bytes of padding. Each element becomes bits 5..0 of a
    byte."""
    packed = np.concatenate(
        (memory.load(space, address, 8, lane=lanes), memory.load(space, address + np.uint64(8), 4, lane=lanes)), axis=-1
    )
    bits = np.unpackbits(packed, axis=-1, bitorder="little").reshape(*address.shape, 16, 6)
    return np.packbits(bits, axis=-1, bitorder="little")[..., 0]


_PADDED = {"b4x16_p64": _load_b4x16_p64, "b6x16_p32": _load_b6x16_p32}

#: (shape, .trans?, element type): rows per matrix, function to register order, allowed numbers of matrices.
_LOADS: dict[tuple[str, bool, str], tuple[int, Callable, tuple[str, ...]]] = {
    ("m8n8", False, "b16"): (8, _row_order, ("x1", "x2", "x4")),
    ("m8n8", True, "b16"): (8, _transposed_halfwords, ("x1", "x2", "x4")),
    ("m16n16", True, "b8"): (16, _transposed_bytes, ("x1", "x2")),
    ("m16n16", True, "b8x16"): (16, _transposed_bytes, ("x1", "x2")),
    ("m8n16", False, "b8x16"): (8, _row_order, ("x1", "x2", "x4")),
}


@define("ldmatrix.sync.aligned")
def ldmatrix(modifiers: tuple[str, ...]) -> Semantics:
    """ldmatrix.sync.aligned.shape.num{.trans}{.shared}.type r, [p]: load 1, 2 or 4 matrices into registers."""
    words = list(modifiers)
    space = _space(words)
    load_row = _load_bytes
    if words and words[-1] in _PADDED:
        load_row = _PADDED[words.pop()]
    transposed = "trans" in words
    if transposed:
        words.remove("trans")
    shape, count, type_ = words if len(words) == 3 else (None, None, None)
    rows_each, reorder, counts = _LOADS.get((shape, transposed, type_), (0, None, ()))
    if count not in counts or (type_ == "b8x16") != (load_row is not _load_bytes):
        raise Unsupported(
            "expected m8n8.{x1|x2|x4}{.trans}.b16, m16n16.{x1|x2}.trans.b8, or m16n16.{x1|x2}.trans or "
            "m8n16.{x1|x2|x4} with .b8x16.{b4x16_p64|b6x16_p32}"
        )
    rows = rows_each * _COUNTS[count]
    registers = rows // 8

    def load(memory, address):
        row_address, lanes = _suppliers(address, rows)
        data = reorder(load_row(memory, space, row_address, lanes))
        words = data.reshape(address.shape[0], -1).view(np.uint32).reshape(-1, registers, 32)
        return tuple(words[:, register] for register in range(registers)) if registers > 1 else words[:, 0]

    return Memory(f"b32*{registers}", f"[{space}]", load, warps=True, aligned=True)


def _columns_of_bytes(rows: np.ndarray) -> np.ndarray:
    """16 x 8 matrices of bytes from the layout of MMA results to rows in memory: 8 columns of 16 bytes each.

    Byte e of lane l is the element in row l / 4 + 8 (e / 2) and column 2 (l % 4) + e % 2.
    """
    pieces = rows.reshape(rows.shape[0], -1, 8, 4, 2, 2)  # row % 8, column / 2, row / 8, column % 2
    return np.ascontiguousarray(pieces.transpose(0, 1, 3, 5, 4, 2))


#: (shape, .trans?, element type): function from bytes in register order to rows in memory.
_STORES: dict[tuple[str, bool, str], Callable] = {
    ("m8n8", False, "b16"): _row_order,
    ("m8n8", True, "b16"): _transposed_halfwords,
    ("m16n8", True, "b8"): _columns_of_bytes,
}


@define("stmatrix.sync.aligned")
def stmatrix(modifiers: tuple[str, ...]) -> Semantics:
    """stmatrix.sync.aligned.{m8n8.num{.trans}{.shared}.b16|m16n8.num.trans{.shared}.b8} [p], r: store matrices."""
    words = list(modifiers)
    space = _space(words)
    transposed = words[2:3] == ["trans"]
    kind = (words[0], transposed, words[-1]) if words else None
    if len(words) != 3 + transposed or words[1] not in _COUNTS or kind not in _STORES:
        raise Unsupported(
            "expected stmatrix.sync.aligned.m8n8.{x1|x2|x4}{.trans}{.shared}.b16 or m16n8.{x1|x2|x4}.trans{.shared}.b8"
        )
    count, reorder = _COUNTS[words[1]], _STORES[kind]

    def store(memory, address, registers):
        row_address, lanes = _suppliers(address, 8 * count)
        data = np.stack([np.broadcast_to(register, address.shape) for register in registers], axis=1)
        rows = data.view(np.uint8).reshape(address.shape[0], 8 * count, 16)
        memory.store(space, row_address, reorder(rows).reshape(rows.shape), lane=lanes)

    return Memory("", f"[{space}], b32*{count}", store, warps=True, aligned=True)


@define("movmatrix.sync.aligned")
def movmatrix(modifiers: tuple[str, ...]) -> Semantics:
    """movmatrix.sync.aligned.m8n8.trans.b16 d, a: transpose an 8 x 8 matrix of 16-bit elements in registers."""
    if modifiers != ("m8n8", "trans", "b16"):
        raise Unsupported("expected movmatrix.sync.aligned.m8n8.trans.b16")

    def transpose(a):
        rows = np.ascontiguousarray(a).view(np.uint8).reshape(-1, 8, 16)
        return _transposed_halfwords(rows).view(np.uint32).reshape(-1, 32)

    return Warps("b32", "b32", transpose, aligned=True)
