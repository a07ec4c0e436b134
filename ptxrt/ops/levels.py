"""Global scales of results on the device: in a scalar of the call or of `out`, or in one of the caller, which no call
writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ..array import DeviceArray, is_prepared, overlap, same_memory
from ..formats import f32
from ..prepared import note_shared
from .place import Place, copied_to
from .quantized import QuantizedArray

# A QuantizedArray owns its global scale if that is writeable. A result refers to a scalar of the caller by a read-only
# view. Records of calls tell the two apart, because their signatures differ.


def given_level(value: DeviceArray, place: Place, out: QuantizedArray | None, read: Iterable[Any]) -> DeviceArray:
    """Return a scalar of the caller as the global scale of results: a read-only view, unless `out` was made with it.

    A prepared call copies it to the scalar that `out` owns, because it must leave `out` like its example.
    """
    own = _owned(out)
    if own is not None and same_memory(own, value):
        note_shared(own, value)  # a call with another `out` must not leave it this scalar to write to
        return value
    if own is not None and is_prepared() and not _shares(own, read):
        return copied_to(value, f32, place, own)
    return value.broadcast_to(())


def written_level(
    write: Callable[[DeviceArray], DeviceArray], place: Place, out: QuantizedArray | None, read: Iterable[Any]
) -> DeviceArray:
    """Return the global scale that `write` writes to an array [1]: the scalar that `out` owns, or a new one.

    read: arrays that share no memory with what is written, such as the global scale of an input.
    """
    own = _owned(out)
    if own is not None and not _shares(own, read):
        return write(own.reshape(1)).reshape(())
    level = write(place.empty((1,), f32)).reshape(())
    # A prepared call must leave `out` like its example.
    return level.broadcast_to(()) if is_prepared() and out is not None and own is None else level


def store_level(out: QuantizedArray, level: DeviceArray, given: bool) -> None:
    """Store the global scale of results in `out`. given: whether it is a scalar of the caller, which is always stored,
    so that a record of the call stores that of each call."""
    if given or not same_memory(out.global_scale, level):
        out.global_scale = level


def _owned(out: QuantizedArray | None) -> DeviceArray | None:
    """Return the global scale of `out` on the device if `out` owns it."""
    return out.global_scale if out is not None and out.on_device and out.global_scale.writeable else None


def _shares(own: DeviceArray, read: Iterable[Any]) -> bool:
    return any(overlap(own, x) for x in read)
