"""Arrays in the memory of a machine, and their exchange with NumPy, DLPack and `__cuda_array_interface__`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from operator import index
from reprlib import repr as shortened
from threading import RLock
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex, Union

import ml_dtypes
import numpy as np

from .backend import Backend, Queue, Remembered, enter, leave, recorded_use, refuse_pickle, refuse_recording, scope
from .binder import ALIGNMENT, row_major_strides
from .errors import ArgumentError, OutOfMemory
from .formats import dtype_of, in_native_order
from .provided import provided
from .selection import current, place

if TYPE_CHECKING:
    from types import EllipsisType

    from numpy.typing import DTypeLike

    from .typing import Array, StreamLike

    Key = Union[SupportsIndex, slice, EllipsisType, None, tuple[SupportsIndex | slice | EllipsisType | None, ...]]

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# The legacy default stream, as `__cuda_array_interface__`, DLPack and the driver number it.
LEGACY_STREAM = 1


class Copies(Protocol):
    """The interface of `ptxrt.copies`, which copies, converts and writes arrays by launches. It imports this module,
    so that this module cannot import it at the top.
    """

    def copy(self, array: DeviceArray, stream: StreamLike = None) -> DeviceArray: ...
    def astype(self, array: DeviceArray, dtype: DTypeLike, stream: StreamLike = None) -> DeviceArray: ...
    def assign(self, target: DeviceArray, value: Any) -> None: ...


def _copies() -> Copies:
    return provided("copies")


# The most uses of one memory that are recorded one by one. Further uses replace them by one event.
USES = 8
noting = RLock()  # the collector may run finalizers that launch at any statement


def _after_fork() -> None:
    """Replace the lock in a forked process, where a thread that held it does not exist."""
    global noting
    noting = RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def with_use(backend: Backend, uses: tuple, queue: Queue, mark: Any) -> tuple:
    """Add a use in `queue` to the uses of a memory, each (queue, mark), and return them. If they are too many, one
    event replaces the earlier ones.
    """
    if len(uses) < USES or any(known is queue for known, _ in uses):
        return (*((known, its) for known, its in uses if known is not queue), (queue, mark))
    return *((None, gathered) for gathered in backend.gather(tuple(its for _, its in uses))), (queue, mark)


def add_use(memory: Memory, uses: str, queue: Queue, mark: Any) -> None:
    """Add a use to an attribute of a memory, "readers" say. The driver is not called under the lock."""
    while True:
        before = getattr(memory, uses)
        after = with_use(memory.backend, before, queue, mark)
        with noting:
            if getattr(memory, uses) is before:  # else another thread, or a finalizer of this one, was here
                setattr(memory, uses, after)
                changes.count += 1
                return


class Changes:
    """count: how often the uses of any memory have changed. A call that passed its tests at a count need not repeat
    them while the count is the same.
    """

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


changes = Changes()


class Memory:
    """Bytes of a machine that this object owns, with their latest uses. The finalizer frees them.

    writer: the mark that every use of the contents waits for. readers: (queue, mark) of later reads in other queues, at
    most USES. A tuple of readers is replaced and never changed, so that iteration needs no lock. shared: whether
    another library has received the address and may use it in ways that are not recorded here.
    """

    __slots__ = ("backend", "address", "nbytes", "writer", "readers", "shared", "__weakref__")
    is_owned = True

    def __init__(self, backend: Backend, address: int, nbytes: int, writer: Any = None):
        self.backend = backend
        self.address = address
        self.nbytes = nbytes
        self.writer = writer
        self.readers: tuple[tuple[Queue | None, Any], ...] = ()
        self.shared = False

    def acquire(self, queue: Queue, write: bool) -> None:
        """Make a queue wait for the writer of the memory and, before a write, for its readers."""
        writer, readers = self.writer, self.readers
        if not write and readers and any(reader is queue for reader, _ in readers):
            return  # the queue has waited for the writer already
        wait = queue.backend.wait  # of the queue's device: a copy between devices involves two
        if writer is not queue and writer is not None:
            wait(queue, writer)
        if write:
            for reader, mark in readers:
                if reader is not queue:
                    wait(queue, mark)

    def release(self, queue: Queue, mark: Any, write: bool) -> None:
        """Record a use whose end in `queue` is `mark`."""
        if self.writer is mark and not (write and self.readers):
            return
        if not write and self.readers and any(its is mark for _, its in self.readers):
            return
        if not write:
            return add_use(self, "readers", queue, mark)
        with noting:
            self.writer, self.readers = mark, ()
            changes.count += 1  # afterwards, so that a test that begins at the new count sees the new uses

    def __del__(self, is_finalizing=sys.is_finalizing):
        # At interpreter exit the driver may be gone already; the memory goes with the process.
        if not is_finalizing():
            self.backend.free(self)


class Borrowed(Memory):
    """Memory of another library, kept alive by `owner`.

    lender: the queue of the lender, or None if the lender asks for no order. Every launch that uses the memory waits
    for the work in flight in that queue, and the queue waits for the launch.
    """

    __slots__ = ("owner", "lender")
    is_owned = False

    def __init__(self, backend: Backend, address: int, nbytes: int, owner: Any, lender: Queue | None):
        super().__init__(backend, address, nbytes, lender)
        self.owner = owner
        self.lender = lender

    def release(self, queue: Queue, mark: Any, write: bool) -> None:
        """Make the lender wait for a use of its memory."""
        if self.lender is None:
            super().release(queue, mark, write)
        elif self.lender is not queue:
            self.backend.wait(self.lender, mark)

    def __del__(self):
        pass


class Signature:
    """The properties of a device array that a plan depends on; arrays with equal properties share one object.

    strides: in bytes, None for row-major order. steps: the strides in bytes, also of row-major order. nbytes: bytes of
    all elements. box: where the elements lie.
    """

    __slots__ = (
        "backend",
        "shape",
        "dtype",
        "strides",
        "steps",
        "is_contiguous",
        "is_aligned",
        "writeable",
        "nbytes",
        "_box",
    )

    def __init__(self, backend, shape, dtype, strides, is_aligned, writeable):
        self.backend, self.shape, self.dtype, self.strides = backend, shape, dtype, strides
        self.steps = row_major_strides(shape, dtype.itemsize) if strides is None else strides
        self.is_contiguous, self.is_aligned, self.writeable = strides is None, is_aligned, writeable
        self.nbytes = prod(shape) * dtype.itemsize
        self._box: Box | None = None

    @property
    def box(self) -> "Box":
        """Return how the elements lie in memory."""
        if self._box is None:
            self._box = _box_of(self)
        return self._box

    def __str__(self) -> str:
        words = [f"{self.dtype} {list(self.shape)} on {self.backend.describe()}"]
        words += [] if self.is_contiguous else [f"with strides of {list(self.strides)} bytes"]
        words += [] if self.is_aligned else [f"not aligned to {ALIGNMENT} bytes"]
        return ", ".join(words + ([] if self.writeable else ["read-only"]))


def _signature(backend: Backend, *key) -> Signature:
    known = backend.remembered.signatures
    return known.get(key) or Remembered.add(known, key, Signature(backend, *key))


def _not_of_views(key: object) -> str | None:
    """Name a mask or an array of indices, whose elements no view can select; None for other keys."""
    dtype = getattr(key, "dtype", None)
    if isinstance(key, (bool, np.bool_)) or dtype == np.bool_:
        return "a mask needs a copy: use to_numpy()[mask]"
    if isinstance(key, list) or (dtype is not None and getattr(key, "shape", ())):
        if isinstance(key, list) and key and all(isinstance(x, (bool, np.bool_)) for x in key):
            return "a mask needs a copy: use to_numpy()[mask]"
        return "an array of indices needs a copy: use ptxrt.take_rows, which gathers rows"
    return None


class DeviceArray:
    """An array in the memory of one machine. Its address, shape and dtype never change.

    The memory is owned (allocated here, freed with the last array that refers to it) or borrowed (from an object with
    `__cuda_array_interface__` or `__dlpack__`, which is kept alive). Uses in several streams are ordered: a launch
    waits, on the device, for earlier launches of this library that write its inputs or use its outputs.

    Attributes:
        address: The address of the first element.
        shape: The size of each axis.
        dtype: A dtype of NumPy or ml_dtypes.
        strides: The stride of each axis in bytes.
        writeable: Whether launches may write to it.
    """

    __slots__ = ("backend", "memory", "address", "shape", "dtype", "strides", "writeable", "signature", "__weakref__")

    # None makes NumPy operators refuse a device array instead of wrapping it into an object array.
    __array_ufunc__ = None

    def __init__(
        self,
        memory: Memory,
        address: int,
        shape: tuple[int, ...],
        dtype: DTypeLike,
        strides: Sequence[int] | None = None,
        writeable: bool = True,
    ):
        self.backend = memory.backend
        self.memory = memory
        self.address = address
        self.shape = shape = tuple(shape)
        self.dtype = dtype = np.dtype(dtype)
        self.writeable = writeable
        gaps = None if strides is None or _is_row_major(shape, strides, dtype.itemsize) else tuple(strides)
        self.signature = _signature(memory.backend, shape, dtype, gaps, address % ALIGNMENT == 0, writeable)
        self.strides = self.signature.steps if strides is None else tuple(strides)

    @classmethod
    def of(cls, memory: Memory, address: int, signature: Signature) -> "DeviceArray":
        """Make an array of a known signature, at an address that is aligned as the signature says."""
        array = cls.__new__(cls)
        array.backend, array.memory, array.address, array.signature = signature.backend, memory, address, signature
        array.shape, array.dtype, array.strides, array.writeable = (
            signature.shape, signature.dtype, signature.steps, signature.writeable
        )  # fmt: skip
        return array

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in row-major order without gaps."""
        return self.signature.is_contiguous

    @property
    def machine(self) -> str:
        """The machine whose memory this is: emulator, portable or native."""
        return self.backend.name

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.signature.nbytes

    @property
    def device(self) -> int:
        """The number of the device whose memory this is."""
        return self.backend.ordinal

    def __repr__(self) -> str:
        number = f" (device {self.device})" if self.device else ""
        return f"DeviceArray({self.dtype} {list(self.shape)} on {self.machine}{number} at {self.address:#x})"

    def __copy__(self) -> "DeviceArray":
        return self[...]

    def __deepcopy__(self, memo: Any) -> "DeviceArray":
        return self.copy()

    def __reduce__(self) -> Any:
        refuse_pickle(self, "pickle its to_numpy()")

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a DeviceArray without axes has no length")
        return self.shape[0]

    # Python's defaults would compare objects, where NumPy compares elements.

    def __eq__(self, other: object) -> bool:
        is_sequence = hasattr(other, "__iter__") and not isinstance(other, (str, bytes))
        if self is other or not (
            is_sequence or hasattr(other, "__array__") or isinstance(other, (int, float, complex))
        ):
            return NotImplemented
        raise TypeError("a DeviceArray is not in host memory; compare its .to_numpy(), or objects with `is`")

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        raise TypeError("a DeviceArray is not in host memory; take the truth of its .to_numpy(), or test `is not None`")

    def __contains__(self, item: object) -> bool:
        raise TypeError("a DeviceArray is not in host memory; search its .to_numpy()")

    def __array_function__(self, function: Any, types: Any, arguments: Any, named: Any) -> Any:
        if function in _OF_NUMPY:
            return _OF_NUMPY[function](*arguments, **named)
        raise TypeError(f"numpy.{function.__name__}: a DeviceArray is not in host memory; download it with .to_numpy()")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        raise TypeError("a DeviceArray is not in host memory; download it with .to_numpy()")

    def to_numpy(self, *, stream: StreamLike = None) -> np.ndarray:
        """Download into a new NumPy array in row-major order. The call waits for the launches that write the elements.

        A view with gaps is read piece by piece. If the pieces are many and small, `copy` the view on the device first.
        """
        refuse_recording("to_numpy waits for the device")
        host = host_array("to_numpy", self.shape, self.dtype)
        if host.nbytes:
            queue = self.backend.queue(stream)
            self.memory.acquire(queue, False)
            if self.is_contiguous:
                self.backend.read(self.address, host, queue)
            else:
                host[...] = self._read_pieces(queue)
        return host

    def _read_pieces(self, queue: Queue) -> np.ndarray:
        """Read the elements of a view into an array that broadcasts to its shape; repeated elements are read once."""
        once = self[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in self.strides)]
        order = sorted(range(self.ndim), key=lambda axis: -once.strides[axis])
        sorted_view = once.transpose(order)
        outer = next(i for i in range(self.ndim + 1) if sorted_view[(0,) * i].is_contiguous)
        host = host_array("to_numpy", sorted_view.shape, self.dtype)
        for piece in np.ndindex(host.shape[:outer]):
            self.backend.read(sorted_view[piece].address, host[(*piece, ...)], queue)
        return host.transpose(np.argsort(order))

    # Copies and writes, by launches: see `ptxrt.copies`

    def copy(self, *, stream: StreamLike = None) -> "DeviceArray":
        """Copy the elements to new memory of the same device, in row-major order; the call does not wait.

        It takes a launch, and one for each index of an axis that runs backward.
        """
        return _copies().copy(self, stream)

    def astype(self, dtype: DTypeLike, *, stream: StreamLike = None) -> "DeviceArray":
        """Convert to float32, float16 or bfloat16, rounded to nearest even, in new memory in row-major order.

        The call does not wait. Values beyond float16 become infinite, NaN stays NaN. ArgumentError for other dtypes;
        convert those on the host.
        """
        return _copies().astype(self, dtype, stream)

    def __setitem__(self, key: Key, value: Array | Sequence[Any] | float) -> None:
        """Write a number, or an array of the host or the device that broadcasts, to a part; `a[...] = x` writes all.

        The write runs in the current stream, after earlier uses of the part and before later ones. A graph that is
        launched again thus reads the new inputs. Numbers and host arrays are converted to the array's dtype as NumPy
        does within a kind; device arrays must have that dtype. A graph or a prepared call records writes of device
        arrays. ArgumentError there for numbers and host arrays, and anywhere for masks and lists as keys, for a
        read-only array, and for values that do not fit.
        """
        _copies().assign(self if key is Ellipsis else self[key], value)

    # Views: the same memory, nothing is copied

    @property
    def T(self) -> "DeviceArray":
        """View the same memory with its axes reversed."""
        return self.transpose()

    def transpose(self, *axes: SupportsIndex | Sequence[SupportsIndex]) -> "DeviceArray":
        """View the same memory with its axes in the order of `axes`, or reversed."""
        if len(axes) == 1 and axes[0] is None:
            axes = ()
        try:
            order = tuple(map(index, axes[0] if len(axes) == 1 and hasattr(axes[0], "__iter__") else axes))
        except TypeError:
            order = (self.ndim,)
        order = tuple(axis + self.ndim if axis < 0 else axis for axis in order) or tuple(range(self.ndim))[::-1]
        if sorted(order) != list(range(self.ndim)):
            raise ArgumentError(
                f"transpose: the axes are {shortened(list(axes))}; pass each of the {self.ndim} axes of {self!r} once"
            )
        shape, strides = (tuple(item[axis] for axis in order) for item in (self.shape, self.strides))
        return DeviceArray(self.memory, self.address, shape, self.dtype, strides, self.writeable)

    def broadcast_to(self, shape: SupportsIndex | Sequence[SupportsIndex]) -> "DeviceArray":
        """View the same memory, read-only, with axes added in front and axes of size 1 repeated, as in NumPy."""
        sizes = _checked_shape("broadcast_to", shape)
        added = len(sizes) - self.ndim
        if added < 0 or any(mine not in (1, target) for mine, target in zip(self.shape, sizes[added:])):
            raise ArgumentError(
                f"broadcast_to: {self!r} does not broadcast to {list(sizes)}; axes of size 1 are repeated, others stay"
            )
        check_size("broadcast_to", sizes, self.dtype)
        kept = tuple(
            stride if mine == target else 0 for mine, target, stride in zip(self.shape, sizes[added:], self.strides)
        )
        return DeviceArray(self.memory, self.address, sizes, self.dtype, (0,) * added + kept, False)

    def __getitem__(self, key: Key) -> "DeviceArray":
        """View a part, by whole numbers, slices, None and `...`, as in NumPy.

        ArgumentError for anything else, also for True and False, which NumPy takes for masks.
        """
        keys = list(key) if isinstance(key, tuple) else [key]
        axes = [k for k in keys if k is not None and k is not Ellipsis]
        whole = [slice(None)] * (self.ndim - len(axes))
        if len(axes) > self.ndim or sum(k is Ellipsis for k in keys) > 1:
            why = f"there are {self.ndim} axes" if len(axes) > self.ndim else "... may stand once"
            raise ArgumentError(f"{self!r} is cut by whole numbers, slices, None and ...; {shortened(key)} came: {why}")
        at = next((i for i, k in enumerate(keys) if k is Ellipsis), len(keys))
        keys = keys[:at] + whole + keys[at + 1 :]
        shape, strides, address, axis = [], [], self.address, 0
        try:
            for k in keys:
                if isinstance(k, (bool, np.bool_)):
                    raise TypeError
                if k is None:
                    shape.append(1)
                    strides.append(0)
                    continue
                size, stride = self.shape[axis], self.strides[axis]
                inside = range(size)[k if isinstance(k, slice) else index(k)]  # raises for a key that is invalid
                first = inside if isinstance(inside, int) else inside.start
                if isinstance(inside, range):
                    shape.append(len(inside))
                    strides.append(stride * inside.step)
                address += first * stride if size else 0
                axis += 1
        except (IndexError, TypeError, ValueError) as error:
            why = next(filter(None, map(_not_of_views, keys)), error)
            raise ArgumentError(
                f"{self!r} is cut by whole numbers, slices, None and ...; {shortened(key)} came: {why}"
            ) from None
        check_size("a view", shape, self.dtype)
        return DeviceArray(self.memory, address, shape, self.dtype, strides, self.writeable)

    def __iter__(self) -> Iterator["DeviceArray"]:
        return (self[i] for i in range(len(self)))

    def reshape(self, *shape: SupportsIndex | Sequence[SupportsIndex]) -> "DeviceArray":
        """View the same memory under another shape of as many elements; one size may be -1.

        ArgumentError if no strides describe the elements of a view in that shape.
        """
        try:
            sizes = tuple(map(index, shape[0] if len(shape) == 1 and hasattr(shape[0], "__iter__") else shape))
        except TypeError:
            raise ArgumentError(f"reshape: the shape is {list(shape)}; pass one whole number for each axis") from None
        if sizes == self.shape:
            return self
        check_size("reshape", [max(size, 1) for size in sizes], np.dtype(np.uint8))
        known = prod(size for size in sizes if size != -1)
        if sizes.count(-1) == 1 and known and self.size % known == 0:
            sizes = tuple(self.size // known if size == -1 else size for size in sizes)
        fits = -1 not in sizes and prod(sizes) == self.size
        strides = _reshaped_strides(self.shape, self.strides, sizes) if fits and not self.is_contiguous else None
        if not fits or (strides is None and not self.is_contiguous):
            raise ArgumentError(
                f"reshape: {self!r} with strides of {list(self.strides)} bytes has no view of shape {list(shape)}"
                + ("" if not fits else "; reshape its copy()")
            )
        return DeviceArray(self.memory, self.address, sizes, self.dtype, strides, self.writeable)

    def view(self, dtype: DTypeLike) -> "DeviceArray":
        """View the same memory under another dtype. As in NumPy, the last axis grows or shrinks with the item's
        size."""
        dtype = _checked_dtype("view", dtype)
        if dtype.itemsize == self.dtype.itemsize:
            return DeviceArray(self.memory, self.address, self.shape, dtype, self.strides, self.writeable)
        length, rest = divmod(self.shape[-1] * self.dtype.itemsize if self.shape else 0, dtype.itemsize)
        if not self.shape or not self.is_contiguous or rest:
            raise ArgumentError(
                f"view: {dtype} has {dtype.itemsize} bytes, which does not fit the last axis of {self!r}; view its "
                "copy(), which is in row-major order"
            )
        return DeviceArray(self.memory, self.address, (*self.shape[:-1], length), dtype, None, self.writeable)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3 of the interface, with the library's own stream. bfloat16 has no type code there and is exported
        as '<u2'.

        AttributeError on the emulator, whose addresses are no CUDA addresses.
        """
        if not self.backend.is_cuda:
            raise AttributeError(
                "__cuda_array_interface__: the emulator's memory is no CUDA memory; use .to_numpy() or DLPack"
            )
        # The consumer waits for the library's own stream, so that stream must first wait for the array's uses.
        # PyTorch ignores "stream" and uses the legacy default stream, which must therefore wait as well.
        own = self.backend.own_queue
        self.memory.shared = True
        self.memory.acquire(own, True)
        self.backend.wait(LEGACY_STREAM, own)
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": "<u2" if self.dtype == _BFLOAT16 else self.dtype.newbyteorder("<").str,
            "data": (self.address, not self.writeable),
            "strides": None if self.is_contiguous else self.strides,
            "stream": own.handle,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return (2, device) for CUDA memory, or (1, 0), the CPU, on the emulator, which exports a copy."""
        from . import dlpack

        return dlpack.device_of(self)

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: bool | None = None
    ) -> Any:
        """Return a DLPack capsule of the same memory, or of a copy on the emulator; see `ptxrt.dlpack.give`."""
        from . import dlpack

        return dlpack.give(self, stream, max_version, dl_device, copy)


# NumPy's functions that need no element.
_OF_NUMPY: dict[Any, Any] = {
    np.shape: lambda a: a.shape,
    np.ndim: lambda a: a.ndim,
    np.size: lambda a, axis=None: a.size if axis is None else a.shape[axis],
    np.transpose: lambda a, axes=None: a.transpose(axes),
    np.moveaxis: lambda a, source, destination: a.transpose(_moved(a.ndim, source, destination)),
    np.reshape: lambda a, shape, order="C": a.reshape(shape),
    np.broadcast_to: lambda array, shape, subok=False: array.broadcast_to(shape),
    np.iscomplexobj: lambda x: x.dtype.kind == "c",
    np.isrealobj: lambda x: x.dtype.kind != "c",
    np.result_type: lambda *items: np.result_type(*(x.dtype if isinstance(x, DeviceArray) else x for x in items)),
}


def _moved(ndim: int, source: Any, destination: Any) -> list[int]:
    """Return the order of axes of `np.moveaxis`."""
    sizes = np.broadcast_to(np.uint8(0), range(1, ndim + 1))  # each axis by its size
    return [size - 1 for size in np.moveaxis(sizes, source, destination).shape]


@dataclass(frozen=True)
class Box:
    """The bytes of an array: runs of `width` bytes, repeated along axes of (size, stride in bytes).

    Strides are above 0; the largest comes first.
    """

    axes: tuple[tuple[int, int], ...]
    width: int

    @classmethod
    def of(cls, array: DeviceArray) -> "Box":
        """Return the box of a device array. It depends on the array's signature alone."""
        return array.signature.box

    @cached_property
    def extent(self) -> int:
        """Return the bytes from the first byte to the last, gaps included."""
        return self.width + sum((size - 1) * stride for size, stride in self.axes)

    def overlaps(self, other: "Box", distance: int) -> bool:
        """Return whether two boxes share a byte if the other begins `distance` bytes after this one.

        The test is conservative: False is certain, True may be wrong. Interleaved arrays, such as the codes and the
        scales of each page of a cache, do not overlap if they have the same stride and lie apart within each step.
        Other arrays whose extents meet count as overlapping.
        """
        if distance >= self.extent or distance <= -other.extent:
            return False
        if not self.axes or not other.axes or self.axes[0][1] != other.axes[0][1]:
            return True
        stride = self.axes[0][1]
        mine, theirs, behind = Box(self.axes[1:], self.width), Box(other.axes[1:], other.width), distance % stride
        if max(mine.extent, theirs.extent) > stride:
            return True
        return mine.overlaps(theirs, behind) or mine.overlaps(theirs, behind - stride)


def _box_of(signature: Signature) -> Box:
    """Return the box of arrays with a signature. Elements without gaps are one run."""
    if not signature.nbytes:
        return Box((), 0)
    strides = signature.strides or row_major_strides(signature.shape, signature.dtype.itemsize)
    axes, width = [], signature.dtype.itemsize
    for size, stride in sorted(zip(signature.shape, strides), key=lambda axis: axis[1]):
        if size > 1 and stride > 0:
            if stride == width and not axes:
                width *= size
            else:
                axes.append((size, stride))
    return Box(tuple(reversed(axes)), width)


# How far `overlap` searches for a common byte of two views of the host before it says that there is one.
_SEARCHED = 10_000


def overlap(x, y) -> bool:
    """Return whether two arrays, of the host or of a device, share memory. False is certain, True may be wrong for
    views with gaps."""
    if isinstance(x, np.ndarray) and isinstance(y, np.ndarray):
        try:
            return np.shares_memory(x, y, max_work=_SEARCHED)
        except (RuntimeError, OverflowError):  # too hard to tell
            return True
    if not isinstance(x, DeviceArray) or not isinstance(y, DeviceArray) or x.backend is not y.backend:
        return False
    return bool(x.size and y.size) and Box.of(x).overlaps(Box.of(y), y.address - x.address)


def same_memory(x, y) -> bool:
    """Return whether two arrays have the same address, shape, strides and dtype."""
    if isinstance(x, np.ndarray) or isinstance(y, np.ndarray):
        where = [z.__array_interface__["data"] if isinstance(z, np.ndarray) else None for z in (x, y)]
    else:
        where = [z.address for z in (x, y)]
    return where[0] == where[1] and x.shape == y.shape and x.strides == y.strides and x.dtype == y.dtype


def _is_row_major(shape, strides, itemsize: int) -> bool:
    row_major = row_major_strides(shape, itemsize)
    return 0 in shape or all(s == w for s, w, n in zip(strides, row_major, shape) if n != 1)


def _reshaped_strides(shape, strides, sizes) -> tuple[int, ...] | None:
    """Return the strides of a view under the shape `sizes`, which has as many elements; None if there are none.

    Both shapes are cut into the shortest runs of equal size. A run of the old axes must lie like a single axis.
    """
    old, new = [(size, stride) for size, stride in zip(shape, strides) if size != 1], list(sizes)
    found: list[int] = []
    while old:
        run, cut = [old.pop(0)], [new.pop(0)]
        while prod(cut) != prod(size for size, _ in run):
            if prod(cut) < prod(size for size, _ in run):
                cut.append(new.pop(0))
            else:
                run.append(old.pop(0))
        if any(stride != size * inner for (_, stride), (size, inner) in zip(run, run[1:])):
            return None
        found += [run[-1][1] * prod(cut[i + 1 :]) for i in range(len(cut))]
    return (*found, *(0 for _ in new))


def is_prepared() -> bool:
    """Return whether `ptxrt.prepare` records the present call. Memory that it allocates then belongs to the record."""
    return getattr(scope().recorder, "keep", False)


def is_numeric(dtype: np.dtype) -> bool:
    """Return whether a dtype is one of numbers: of NumPy, or of another package, whose kind is V."""
    return dtype.kind in "biufcV" and dtype.type is not np.void


def _checked_dtype(function: str, dtype) -> np.dtype:
    """Return the NumPy dtype; ArgumentError for anything that is no dtype of numbers."""
    try:
        found = None if dtype is None else dtype_of(dtype)
    except (TypeError, ValueError):
        found = None
    if found is None or not is_numeric(found):
        raise ArgumentError(f"{function}: dtype is {dtype!r}; pass a dtype of numbers")
    return found


def _checked_shape(function: str, shape) -> tuple[int, ...]:
    """Return a shape as a tuple of whole numbers from 0 on; ArgumentError for anything else."""
    try:
        items = tuple(shape) if hasattr(shape, "__iter__") else (shape,)
        sizes = tuple(map(index, items))
    except TypeError:
        sizes = (-1,)
    if any(size < 0 for size in sizes) or isinstance(shape, (str, bytes, bool)):
        raise ArgumentError(f"{function}: shape is {shape!r}; pass one whole number for each axis, from 0 on")
    return sizes


# The most axes of an array, as in NumPy 2, and the most bytes, so that sums of sizes stay within 64 bits.
AXES, BYTES = 64, 2**62


def check_size(function: str, shape, dtype: np.dtype) -> None:
    """Raise ArgumentError for more axes or bytes than an array may have. As in NumPy, the product leaves out sizes
    of 0.
    """
    if len(shape) > AXES:
        raise ArgumentError(f"{function}: the shape has {len(shape)} axes; arrays have at most {AXES}")
    if prod(size for size in shape if size) * dtype.itemsize > BYTES:
        raise ArgumentError(
            f"{function}: {dtype} {list(shape)} takes more than {BYTES} bytes, which no memory holds; split the call"
        )


def host_array(function: str, shape, dtype: np.dtype) -> np.ndarray:
    """Allocate an array of the host; OutOfMemory if the host has too little memory."""
    try:
        return np.empty(shape, dtype)
    except MemoryError as error:
        raise OutOfMemory(
            f"{function}: the host has no {prod(shape) * dtype.itemsize} bytes for {dtype} "
            f"{list(shape)}; split the call"
        ) from error


def empty(
    shape: SupportsIndex | Sequence[SupportsIndex], dtype: DTypeLike, *, device: int | None = None
) -> DeviceArray:
    """Allocate a device array on the current machine, or on device number `device` of it. Its elements are
    uninitialized.
    """
    sizes, dtype, _ = checked_array("empty", shape, dtype)
    return allocate(place(device), sizes, dtype)


def checked_array(function: str, shape, dtype) -> tuple[tuple[int, ...], np.dtype, int]:
    """Return shape, dtype and bytes of a new array; ArgumentError for those that no array has."""
    sizes, dtype = _checked_shape(function, shape), _checked_dtype(function, dtype)
    if len(sizes) > AXES or 0 in sizes:
        check_size(function, sizes, dtype)
    nbytes = prod(sizes) * dtype.itemsize
    if nbytes > BYTES:
        check_size(function, sizes, dtype)
    return sizes, dtype, nbytes


def allocate(backend: Backend, shape: tuple[int, ...], dtype: np.dtype, queue: Queue | None = None) -> DeviceArray:
    """Allocate a device array on `backend` for work in `queue`. An empty array has no memory and address 0."""
    nbytes = prod(shape) * dtype.itemsize
    if nbytes > BYTES:
        check_size("allocation", shape, dtype)
    if not nbytes:
        return DeviceArray(Borrowed(backend, 0, 0, None, None), 0, shape, dtype)
    queue, recorder = queue or backend.queue(), scope().recorder
    memory = new_memory(backend, nbytes, queue) if recorder is None else recorder.new_memory(backend, nbytes, queue)
    return DeviceArray(memory, memory.address, shape, dtype)


def new_memory(backend: Backend, nbytes: int, queue: Queue) -> Memory:
    """Allocate memory for work in a queue."""
    return Memory(backend, backend.alloc(nbytes, queue), nbytes, queue if queue.lasting else None)


def upload(backend: Backend, host: np.ndarray, stream=None) -> DeviceArray:
    """Copy `host` to a new device array in row-major order; `host` may change afterwards."""
    if not is_numeric(host.dtype):
        what = "Python objects" if host.dtype.hasobject else "no numbers"
        raise ArgumentError(f"an array of {host.dtype} holds {what}; pass an array of numbers")
    refuse_recording("a NumPy array would be copied")
    host = np.asarray(host)
    if not host.flags.c_contiguous:
        rows = host_array("to_device", host.shape, host.dtype)
        np.copyto(rows, host)
        host = rows
    queue = backend.queue(stream)
    array = allocate(backend, host.shape, host.dtype, queue)
    if host.nbytes:
        with recorded_use(backend, queue):
            backend.write(array.address, host, queue)
            if not queue.lasting:  # else the queue is the mark that the new memory has
                array.memory.release(queue, backend.mark(queue), True)
    return array


def table_on(backend: Backend, make: Callable[..., np.ndarray], *arguments: Any) -> DeviceArray:
    """Return the constants `make(*arguments)` on a device, where they stay. While calls are recorded they are uploaded
    ahead of the launches."""
    tables, key = backend.remembered.tables, (make, *arguments)
    if (table := tables.get(key)) is None:
        before = enter(recorder=None)
        try:
            table = Remembered.add(tables, key, upload(backend, make(*arguments)))
        finally:
            leave(before, "recorder")
    return table


def to_device(x: Array | Sequence[Any] | float, *, device: int | None = None, stream: StreamLike = None) -> DeviceArray:
    """Put x on the current machine: NumPy arrays are copied, CUDA arrays of other libraries are borrowed.

    Borrowed memory stays alive with the result. Launches that use it wait for the work in flight in the lender's
    stream, and that stream waits for the launches. The lender's stream is the one that its `__cuda_array_interface__`
    names, else the legacy default stream.

    Args:
        x: An array, or anything that NumPy converts to one.
        device: The CUDA number of a device. An array on another device is copied there. None sends NumPy arrays to the
            current device and leaves device arrays where they are.
        stream: A stream of the device; None is that of `with stream:`, else the library's own.

    Raises:
        ArgumentError: x is no array that a device can hold.
    """
    (array,) = as_arrays("to_device", x=x)
    target = place(device)
    if not isinstance(array, DeviceArray):
        return upload(target, array, stream)
    source = array.backend
    if source is target or (device is None and source.on_device(target.ordinal) is target):
        return array
    if source.on_device(target.ordinal) is not target:
        raise ArgumentError(
            f"to_device: x is on {source.describe()}, another machine than {target.describe()}; go through to_numpy()"
        )
    return _copy(array, target, stream)


def _copy(array: DeviceArray, target: Backend, stream=None) -> DeviceArray:
    """Copy to this or another device of the same machine, in the order of the target's stream."""
    if not array.is_contiguous:
        raise ArgumentError(
            f"to_device: strides of {list(array.strides)} bytes; only row-major arrays go to another "
            "device: pass its copy()"
        )
    refuse_recording("an array would be copied")
    queue = target.queue(stream)
    copied = allocate(target, array.shape, array.dtype, queue)
    if array.nbytes:
        array.memory.acquire(queue, False)
        with recorded_use(target, queue):
            target.copy(copied.address, array.backend, array.address, array.nbytes, queue)
            array.memory.release(queue, target.mark(queue), False)
    return copied


def as_arrays(function: str, **arguments) -> tuple[Any, ...]:
    """Return each argument as a NumPy array or a DeviceArray; CUDA arrays of other libraries are borrowed."""
    return tuple(
        [value if type(value) is DeviceArray else _as_array(function, name, value) for name, value in arguments.items()]
    )


def _interface(value):
    """Return the `__cuda_array_interface__` of a value; None if it has none or raises."""
    try:
        return getattr(value, "__cuda_array_interface__", None)
    except Exception:  # PyTorch raises RuntimeError for tensors that need gradients; its DLPack error names the remedy
        return None


def is_foreign(value) -> bool:
    """Return whether a value is an array of another library, on a device or with DLPack."""
    return (hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__")) or _interface(value) is not None


def aligned(x: DeviceArray, stream) -> DeviceArray:
    """Return an array in row-major order from a multiple of 16 bytes on: x itself, or a copy."""
    return x if x.is_contiguous and x.signature.is_aligned else x.copy(stream=stream)


def check_forward(function: str, **arrays) -> None:
    """Raise ArgumentError for a view of device memory with a negative stride, which no kernel supports."""
    for name, x in arrays.items():
        if (
            isinstance(x, DeviceArray)
            and 0 not in x.shape
            and any(size > 1 and stride < 0 for size, stride in zip(x.shape, x.strides))
        ):
            found = f"{name} {list(x.shape)} has strides of {list(x.strides)} bytes"
            raise ArgumentError(f"{function}: {found}; copy it so that they go from 0 on")


def as_output(function: str, name: str, value):
    """Return an array to write to, as a NumPy array or a DeviceArray; refuse anything that would have to be copied."""
    if isinstance(value, (np.ndarray, DeviceArray)):
        return _unmasked(function, name, value)
    if is_foreign(value) and not isinstance(value, np.generic):
        return _as_array(function, name, value)
    raise ArgumentError(
        f"{function}: {name} is a {type(value).__name__}; pass a NumPy array or a device array to write to"
    )


def _unmasked(function: str, name: str, value):
    """Return an array without mask; raise ArgumentError for a masked array, whose mask would be ignored."""
    if isinstance(value, np.ma.MaskedArray):
        raise ArgumentError(f"{function}: {name} is a masked array; pass x.filled(value), or x.data to ignore the mask")
    return value


def _as_array(function: str, name: str, value):
    if type(value) is np.ndarray:
        return in_native_order(value)
    if isinstance(value, DeviceArray):
        return value
    if isinstance(value, np.ndarray):
        return in_native_order(np.asarray(_unmasked(function, name, value)))  # a numpy.matrix, say, as a plain array
    if isinstance(value, (str, bytes, os.PathLike)):
        what = "bytes" if isinstance(value, bytes) else "a string" if isinstance(value, str) else "a path"
        raise ArgumentError(
            f"{function}: {name} is {what}, {value!r}; pass an array: numpy.load({value!r}) where "
            "it names a file of one"
        )
    if isinstance(value, np.generic):
        return np.asarray(value)
    # The interface is preferred if it names the lender's stream. With DLPack the lender orders its stream before ours.
    interface = _interface(value)
    if interface is not None and ("stream" in interface or not hasattr(value, "__dlpack__")):
        return _borrow(function, name, value, interface)
    if hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
        from . import dlpack

        return dlpack.take(function, name, value)
    if value is None:
        raise ArgumentError(f"{function}: {name} is None; pass a NumPy array or a device array")
    try:
        return np.asarray(value)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{function}: {name} is a {type(value).__name__} and no array: {error}") from error


def foreign_backend(function: str, name: str, device: int | None = None) -> Backend:
    """Return the machine that borrows CUDA memory, on the device of that memory; raise ArgumentError on the
    emulator."""
    backend = current()
    if not backend.is_cuda:
        raise ArgumentError(
            f"{function}: {name} is a CUDA array, but the machine is the emulator; pass NumPy arrays or "
            "choose a GPU machine"
        )
    return backend if device is None else backend.on_device(device)


def _borrow(function: str, name: str, value, interface) -> DeviceArray:
    """Make a DeviceArray over memory that `value` owns. Its uses wait for the work in flight in the lender's stream."""
    backend = foreign_backend(function, name)
    try:
        shape = tuple(int(size) for size in interface["shape"])
        address, read_only = interface["data"]
        typestr, strides = interface["typestr"], interface.get("strides")
        if not isinstance(typestr, str):
            raise TypeError(f"typestr {typestr!r}")
        strides = None if strides is None else tuple(map(index, strides))
        if min(shape, default=0) < 0 or (strides is not None and len(strides) != len(shape)):
            raise ValueError(f"shape {shape} with strides {strides}")
        # PyTorch exports bfloat16 as '<V2', the name that ml_dtypes has for it.
        dtype = _BFLOAT16 if typestr == "<V2" else np.dtype(typestr)
        if not isinstance(typestr, str) or dtype.hasobject or not dtype.itemsize:
            raise TypeError(f"typestr {typestr!r}")
        address = int(address or 0)
        # An interface without a stream (version 2, PyTorch's) counts as one of the legacy default stream.
        stream = interface.get("stream", LEGACY_STREAM)
        if stream is not None and int(stream) < 0:
            raise ValueError(f"stream {stream}")
    except (KeyError, TypeError, ValueError) as error:
        raise ArgumentError(
            f"{function}: {name} has a __cuda_array_interface__ that cannot be read: {error!r}"
        ) from error
    check_size(f"{function}: {name}", shape, dtype)
    if interface.get("mask") is not None:
        raise ArgumentError(f"{function}: {name} is masked; pass an array without a mask")
    backend = backend.on_device(backend.device_at(address)) if address else backend
    lender = None if stream is None else backend.queue(int(stream), lasting=True)
    memory = Borrowed(backend, address, prod(shape) * dtype.itemsize, value, lender)
    return DeviceArray(memory, address, shape, dtype, strides, not read_only)
