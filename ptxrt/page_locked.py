"""`PageLocked`: arrays of the host that a device copies to and from by itself, in a stream or as a part of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

from .array import DeviceArray, checked_array
from .backend import recorded_use, refuse_pickle, scope
from .errors import ArgumentError
from .selection import place

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from .typing import StreamLike


class PageLocked:
    """An array of the host in page-locked memory, for copies that do not wait and that graphs can contain.

        sent, received = ptxrt.PageLocked((16,), np.int32), ptxrt.PageLocked((384,), np.float32)
        with ptxrt.graph() as g:
            sent.send(x)                       # copies sent.array to x
            received.receive(function(x))      # copies the result to received.array
        sent.array[:] = ids
        g.launch()
        ptxrt.synchronize()
        use(received.array)

    Nothing orders the host with these copies: write to `array` only after earlier copies from it, and read it only
    after copies to it, as `ptxrt.synchronize` or an Event shows. Page-locked memory is scarce.

    Args:
        shape: As in `ptxrt.empty`.
        dtype: As in `ptxrt.empty`.
        device: The CUDA number of the device; None is the current device.

    Attributes:
        array: The NumPy array. Its elements are uninitialized. It keeps its memory, which copies on the way keep, too.
    """

    def __init__(self, shape: SupportsIndex | Sequence[SupportsIndex], dtype: DTypeLike, *, device: int | None = None):
        sizes, dtype, nbytes = checked_array("PageLocked", shape, dtype)
        self.backend = place(device)
        self.array: np.ndarray = self.backend.host_memory(nbytes).view(dtype).reshape(sizes)

    def send(self, target: DeviceArray, *, stream: StreamLike = None) -> None:
        """Copy `array` to a device array of its shape and dtype, in row-major order."""
        self._copy("send", target, True, stream)

    def receive(self, source: DeviceArray, *, stream: StreamLike = None) -> None:
        """Copy a device array of the shape and dtype of `array` there; the device array is in row-major order."""
        self._copy("receive", source, False, stream)

    def __repr__(self) -> str:
        return f"PageLocked({self.array.dtype} {list(self.array.shape)} for {self.backend.describe()})"

    def __reduce__(self) -> Any:
        refuse_pickle(self, "pickle its array")

    def _copy(self, what: str, array: Any, write: bool, stream: StreamLike) -> None:
        mine = self.array
        if not isinstance(array, DeviceArray) or (array.shape, array.dtype) != (mine.shape, mine.dtype):
            came = repr(array) if isinstance(array, DeviceArray) else f"a {type(array).__name__}"
            raise ArgumentError(f"PageLocked.{what}: {came} came; pass a device array {mine.dtype} {list(mine.shape)}")
        if not array.is_contiguous or (write and not array.writeable):
            why = "is read-only" if array.is_contiguous else "has gaps between its elements"
            raise ArgumentError(f"PageLocked.{what}: {array!r} {why}; pass the whole array, or a copy()")
        backend = self.backend
        if array.backend is not backend:
            where = f"{array!r} is on {array.backend.describe()}, the page-locked array is of {backend.describe()}"
            raise ArgumentError(f"PageLocked.{what}: {where}; bring it there")
        if not mine.nbytes:
            return
        queue, recorder = backend.queue(stream), scope().recorder
        start = partial(backend.write if write else backend.read, array.address, mine, is_locked=True)
        if recorder is None:
            array.memory.acquire(queue, write)
            with recorded_use(backend, queue):
                start(queue)
                array.memory.release(queue, backend.mark(queue), write)
            return
        record = getattr(recorder, "add_copy", None)
        if record is None:
            raise ArgumentError(f"{recorder.name} records launches; PageLocked.{what} is a copy. Put it into a graph.")
        record(array, write, start, queue)
