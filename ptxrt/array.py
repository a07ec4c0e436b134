"""Arrays in the memory of a machine: address, shape, dtype; from and to NumPy and `__cuda_array_interface__`."""

from __future__ import annotations

import weakref
from functools import cached_property
from math import prod
from typing import Any, Iterable

import ml_dtypes
import numpy as np

from .backend import Backend, Mark, current
from .errors import ArgumentError, LaunchError

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# The legacy default stream, as `__cuda_array_interface__` and the driver number it.
_LEGACY_STREAM = 1


class Memory:
    """Bytes of a machine that this object owns; freed when nothing refers to it, or with the process."""

    def __init__(self, backend: Backend, nbytes: int):
        self.address = backend.alloc(nbytes)
        # A finalizer, not __del__: it holds the backend alive, and it is skipped at interpreter exit,
        # where the driver may be gone already and frees everything by itself.
        weakref.finalize(self, _release, backend, self.address).atexit = False


def _release(backend: Backend, address: int) -> None:
    try:
        backend.free(address)
    except LaunchError:
        pass  # A machine that failed has said so where it failed; its memory goes with the process.


class DeviceArray:
    """An array in the memory of one machine.

    address: of the first element. shape: sizes. dtype: NumPy's or ml_dtypes'. strides: in bytes.
    The memory is owned (made here, freed with the last array that refers to it) or borrowed (from
    an object with `__cuda_array_interface__`, which is kept alive).
    mark: what must be done before the array may be read. lender_stream: the stream of whoever lent
    the memory, which waits for every launch that uses it; None for owned memory.
    """

    # NumPy operators leave a device array alone instead of wrapping it into an object array.
    __array_ufunc__ = None

    def __init__(
        self,
        backend: Backend,
        address: int,
        shape: tuple[int, ...],
        dtype,
        *,
        strides: tuple[int, ...] | None = None,
        owner: Any = None,
        mark: Mark | None = None,
        writeable: bool = True,
        lender_stream: int | None = None,
    ):
        self.backend = backend
        self.address = address
        self.shape = tuple(shape)
        self.dtype = np.dtype(dtype)
        self.strides = _row_major(self.shape, self.dtype.itemsize) if strides is None else tuple(strides)
        self.writeable = writeable
        self.mark = mark
        self.lender_stream = lender_stream
        self._owner = owner

    @property
    def machine(self) -> str:
        """The machine whose memory this is: emulator, portable or native."""
        return self.backend.name

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @cached_property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.dtype.itemsize

    @cached_property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in row-major order without gaps."""
        wanted = _row_major(self.shape, self.dtype.itemsize)
        return self.size == 0 or all(s == w for s, w, n in zip(self.strides, wanted, self.shape) if n != 1)

    def __repr__(self) -> str:
        return f"DeviceArray({self.dtype} {list(self.shape)} on {self.machine} at {self.address:#x})"

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a DeviceArray without axes has no length")
        return self.shape[0]

    def __array__(self, dtype=None, copy=None):
        raise TypeError("a DeviceArray is not in host memory; download it with .to_numpy()")

    def to_numpy(self, *, stream=None) -> np.ndarray:
        """Download into a new NumPy array, after everything that writes it; this waits."""
        if not self.is_contiguous:
            raise ArgumentError(f"to_numpy: strides of {list(self.strides)} bytes; only row-major arrays are downloaded")
        host = np.empty(self.shape, self.dtype)
        if host.nbytes:
            self.backend.wait(stream, self.mark)
            self.backend.read(self.address, host, stream)
        return host

    def reshape(self, *shape) -> "DeviceArray":
        """The same memory under another shape of as many elements; one size may be -1."""
        sizes = list(shape[0] if len(shape) == 1 and not isinstance(shape[0], (int, np.integer)) else shape)
        known = prod(size for size in sizes if size != -1)
        if sizes.count(-1) == 1 and known and self.size % known == 0:
            sizes[sizes.index(-1)] = self.size // known
        if not self.is_contiguous or -1 in sizes or prod(sizes) != self.size:
            raise ArgumentError(f"reshape: {self!r} has no row-major view of shape {list(shape)}")
        return self._view(tuple(sizes), self.dtype)

    def view(self, dtype) -> "DeviceArray":
        """The same memory under another dtype of the same item size."""
        dtype = np.dtype(dtype)
        if dtype.itemsize != self.dtype.itemsize:
            raise ArgumentError(f"view: {dtype} has {dtype.itemsize} bytes, {self.dtype} has {self.dtype.itemsize}")
        return self._view(self.shape, dtype, self.strides)

    def _view(self, shape, dtype, strides=None) -> "DeviceArray":
        return DeviceArray(
            self.backend,
            self.address,
            shape,
            dtype,
            strides=strides,
            owner=self._owner,
            mark=self.mark,
            writeable=self.writeable,
            lender_stream=self.lender_stream,
        )

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3, ordered by the library's own stream; bfloat16, which has no code there, goes out as '<u2'.

        AttributeError on the emulator, whose addresses are no CUDA addresses.
        """
        if not self.backend.is_cuda:
            raise AttributeError("__cuda_array_interface__: the emulator's memory is no CUDA memory; use .to_numpy()")
        # The consumer orders itself after the library's own stream, so that one must follow the array's writer.
        # PyTorch reads no stream from here: the legacy default stream, which it uses unasked, follows as well.
        self.backend.wait(None, self.mark)
        self.backend.wait(_LEGACY_STREAM, self.backend.mark(None))
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": "<u2" if self.dtype == _BFLOAT16 else self.dtype.newbyteorder("<").str,
            "data": (self.address, not self.writeable),
            "strides": None if self.is_contiguous else self.strides,
            "stream": self.backend.stream_handle(None),
        }


def _row_major(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides, step = [], itemsize
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def empty(shape, dtype) -> DeviceArray:
    """A new device array on the current machine whose elements nothing has written yet."""
    sizes = tuple(int(size) for size in (shape if hasattr(shape, "__iter__") else (shape,)))
    return allocate(current(), sizes, np.dtype(dtype))


def allocate(backend: Backend, shape: tuple[int, ...], dtype: np.dtype) -> DeviceArray:
    """A new device array on `backend`; an empty one has no memory and address 0."""
    nbytes = prod(shape) * dtype.itemsize
    if nbytes < 0:
        raise ArgumentError(f"a device array cannot have the shape {list(shape)}")
    memory = Memory(backend, nbytes) if nbytes else None
    return DeviceArray(backend, memory.address if memory else 0, shape, dtype, owner=memory)


def upload(backend: Backend, host: np.ndarray, stream=None) -> DeviceArray:
    """A new device array with the contents of `host`, in row-major order; `host` may change afterwards."""
    if host.dtype.hasobject:
        raise ArgumentError(f"an array of {host.dtype} holds Python objects; pass numbers")
    host = np.ascontiguousarray(host).reshape(host.shape)
    array = allocate(backend, host.shape, host.dtype)
    if host.nbytes:
        backend.write(array.address, host, stream)
    return array


def to_device(x, *, stream=None) -> DeviceArray:
    """Put x on the current machine: NumPy arrays are copied, CUDA arrays of anyone's are borrowed as they are.

    Borrowed memory stays alive with the result. The device waits for what its lender's stream has in
    flight, and that stream for our launches: the one its interface names, else the legacy default stream.
    """
    (array,) = as_arrays("to_device", x=x)
    if isinstance(array, DeviceArray):
        if array.backend is not current():
            raise ArgumentError(f"to_device: x is on {array.machine}, another machine than {current().name}; go through to_numpy()")
        return array
    return upload(current(), array, stream)


def before_launch(backend: Backend, stream, arrays: Iterable[DeviceArray]) -> None:
    """Let a stream wait for whatever still writes the arrays."""
    for array in arrays:
        backend.wait(stream, array.mark)


def after_launch(backend: Backend, stream, arrays: Iterable[DeviceArray], written: Iterable[DeviceArray]) -> None:
    """Mark the written arrays, and let those who lent memory wait until the launch is done with it."""
    mark = backend.mark(stream)
    for array in written:
        array.mark = mark
    for lender in {array.lender_stream for array in arrays} - {None}:
        backend.wait(lender, mark)


def as_arrays(function: str, **arguments) -> tuple[Any, ...]:
    """Each argument as a NumPy array or a DeviceArray; anyone's CUDA arrays become borrowed DeviceArrays."""
    return tuple(_as_array(function, name, value) for name, value in arguments.items())


def as_output(function: str, name: str, value):
    """An array to write to as a NumPy array or a DeviceArray; anything that would have to be copied is refused."""
    if isinstance(value, (np.ndarray, DeviceArray)) or hasattr(value, "__cuda_array_interface__"):
        return _as_array(function, name, value)
    raise ArgumentError(f"{function}: {name} is a {type(value).__name__}; pass a NumPy array or a device array to write to")


def _as_array(function: str, name: str, value):
    if isinstance(value, (np.ndarray, DeviceArray)):
        return value
    interface = getattr(value, "__cuda_array_interface__", None)
    if interface is not None:
        return _borrow(function, name, value, interface)
    if value is None:
        raise ArgumentError(f"{function}: {name} is None; pass a NumPy array or a device array")
    try:
        return np.asarray(value)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{function}: {name} is a {type(value).__name__} and no array: {error}") from error


def _borrow(function: str, name: str, value, interface) -> DeviceArray:
    """A DeviceArray over memory that `value` owns, after what its stream has in flight."""
    backend = current()
    if not backend.is_cuda:
        raise ArgumentError(
            f"{function}: {name} is a CUDA array, but the machine is the emulator; pass NumPy arrays or choose a GPU machine"
        )
    try:
        shape = tuple(int(size) for size in interface["shape"])
        address, read_only = interface["data"]
        typestr, strides = interface["typestr"], interface.get("strides")
        # PyTorch hands out bfloat16 as '<V2', as ml_dtypes names it.
        dtype = _BFLOAT16 if typestr == "<V2" else np.dtype(typestr)
    except (KeyError, TypeError, ValueError) as error:
        raise ArgumentError(f"{function}: {name} has a __cuda_array_interface__ that cannot be read: {error!r}") from error
    if interface.get("mask") is not None:
        raise ArgumentError(f"{function}: {name} is masked; pass an array without a mask")
    # An interface that says nothing of streams (version 2, PyTorch's) is taken for the legacy default stream's.
    stream = interface.get("stream", _LEGACY_STREAM)
    return DeviceArray(
        backend,
        int(address or 0),
        shape,
        dtype,
        strides=strides,
        owner=value,
        mark=None if stream is None else backend.mark(int(stream)),
        writeable=not read_only,
        lender_stream=None if stream is None else int(stream),
    )
