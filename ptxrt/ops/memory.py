"""Memory of arrays of a call: what overlaps what, and whether results can be written."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..array import DeviceArray, check_forward, overlap, same_memory
from ..errors import ArgumentError
from .quantized import QuantizedArray


def parts_of(name: str, out) -> dict[str, Any]:
    """Return the arrays of an output by name."""
    if isinstance(out, QuantizedArray):
        return {f"{name}.codes": out.codes, f"{name}.scales": out.scales}
    return {name: out}


def check_parts(function: str, out, arrays: dict[str, Any], in_place: str | None = None) -> None:
    """Raise ArgumentError if results cannot be written to `out`, an array or a QuantizedArray; else as `check_memory`.

    Kernels write codes and scales in place, so that those on a device must be aligned.
    """
    parts = parts_of("out", out)
    check_memory(function, parts, arrays, in_place)
    if isinstance(out, QuantizedArray):
        if overlap(*parts.values()):
            raise ArgumentError(f"{function}: {' overlaps '.join(parts)}; pass memory of its own for each")
        check_aligned(function, **parts)


def check_aligned(function: str, **arrays) -> None:
    """Raise ArgumentError for device arrays to write to that are not in row-major order from a multiple of 16 bytes
    on."""
    for name, x in arrays.items():
        if isinstance(x, DeviceArray) and not (x.is_contiguous and x.signature.is_aligned):
            found = f"begins at {x.address:#x}" if x.is_contiguous else f"has strides of {list(x.strides)} bytes"
            expected = "row-major order, beginning at a multiple of 16 bytes, as ptxrt.empty makes it"
            raise ArgumentError(f"{function}: {name} {list(x.shape)} {found}; pass an array in {expected}")


def check_memory(function: str, parts: dict[str, Any], arrays: dict[str, Any], in_place: str | None = None) -> None:
    """Raise ArgumentError if results cannot be written to `parts` while `arrays` are read, both by name.

    in_place: the name of the array that a part may coincide with exactly.
    """
    for name, part in parts.items():
        for other, x in arrays.items():
            if isinstance(part, np.ndarray) and isinstance(x, DeviceArray):
                raise ArgumentError(
                    f"{function}: {name} is a NumPy array, {other} is on the device; pass both on one side"
                )
            same = other == in_place and same_memory(part, x)
            if not same and overlap(part, x):
                but = f" ({in_place} may be exactly out)" if other == in_place else ""
                raise ArgumentError(f"{function}: {name} overlaps {other}; pass memory of its own{but}")
        if not (part.flags.writeable if isinstance(part, np.ndarray) else part.writeable):
            raise ArgumentError(f"{function}: {name} is read-only; pass an array that can be written")
        if any(size > 1 and not stride for size, stride in zip(part.shape, part.strides)) and 0 not in part.shape:
            found = f"{name} {list(part.shape)} has strides of {list(part.strides)} bytes"
            raise ArgumentError(f"{function}: {found}; pass an array whose elements have memory of their own")
    check_forward(function, **parts)
