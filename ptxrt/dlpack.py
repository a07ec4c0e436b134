"""DLPack in and out, through ctypes: capsules of version 1 and of the unversioned kind.

A capsule's struct lies in memory of the C allocator, because its consumer may read it after the end of Python. At
interpreter exit the deleters of structs that are still in use are removed, and their memory ends with the process.
Source: DLPack 1.1, dlpack.h; Python specification of `__dlpack__` (data-apis array API 2024.12).
"""

from __future__ import annotations

import atexit
import ctypes
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from .array import LEGACY_STREAM, Borrowed, DeviceArray, add_use, check_size, foreign_backend, refuse_recording
from .errors import ArgumentError
from .turns import End

if TYPE_CHECKING:
    from .backend import Backend

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
VERSION = (1, 1)
READ_ONLY, IS_COPIED = 1, 2

# DLDataTypeCode; those of NARROW came with 1.1.
_CODES = {"i": 0, "u": 1, "f": 2, "b": 6, "c": 5}
_BFLOAT = 4
NARROW = {
    "float8_e3m4": 7,
    "float8_e4m3": 8,
    "float8_e4m3b11fnuz": 9,
    "float8_e4m3fn": 10,
    "float8_e4m3fnuz": 11,
    "float8_e5m2": 12,
    "float8_e5m2fnuz": 13,
    "float8_e8m0fnu": 14,
}
_FLOAT4 = 17


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


# The names of a capsule, before and after it was taken.
_KINDS = {b"dltensor": (_Managed, b"used_dltensor"), b"dltensor_versioned": (_Versioned, b"used_dltensor_versioned")}
# Capsules hold pointers to their names, so that these strings must stay alive.
_NAMES = {name: ctypes.create_string_buffer(name) for kind in _KINDS.items() for name in (kind[0], kind[1][1])}


def _python(name: str, result, *arguments):
    function = getattr(ctypes.pythonapi, name)
    # A function object of its own, because other packages set argument types on the shared one.
    return ctypes.PYFUNCTYPE(result, *arguments)(ctypes.cast(function, ctypes.c_void_p).value)


_new_capsule = _python("PyCapsule_New", ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_is_capsule = _python("PyCapsule_IsValid", ctypes.c_int, ctypes.py_object, ctypes.c_void_p)
_pointer_of = _python("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
_rename = _python("PyCapsule_SetName", ctypes.c_int, ctypes.py_object, ctypes.c_void_p)
_malloc = _python("PyMem_RawMalloc", ctypes.c_void_p, ctypes.c_size_t)
_free = _python("PyMem_RawFree", None, ctypes.c_void_p)

# By the address of an exported struct: its type and the owner of its memory; and its capsule, until it is known to be
# consumed.
_given: dict[int, tuple[type, Any]] = {}
_untaken: dict[int, Any] = {}
# The reference count, in the loop of _sweep, of a capsule that only _untaken holds: dict, list, variable and call.
_REFERENCES = 4


@_DELETER
def _delete(address):
    """Release the memory. Consumers call this when they are done, with or without the GIL. A second call does
    nothing.
    """
    _untaken.pop(address, None)
    _let_go(address)


def _let_go(block: int) -> None:
    """Free a struct and drop the owner of its memory, unless that is done already."""
    if _given.pop(block, None) is not None:
        _free(block)


def _sweep() -> None:
    """Free the structs of capsules that no library consumed and that only `_untaken` refers to.

    Capsules have no destructor, because it would be Python code. If a capsule dies while another error is raised (by a
    consumer that refuses its type), running that code would lose the error.
    """
    for block, capsule in list(_untaken.items()):
        if not any(_is_capsule(capsule, ctypes.addressof(_NAMES[name])) for name in _KINDS):
            _untaken.pop(block, None)  # consumed: the consumer calls the deleter
        elif sys.getrefcount(capsule) <= _REFERENCES:
            _untaken.pop(block, None)
            _let_go(block)


@atexit.register
def _forget() -> None:
    """Remove the deleters of structs that are still in use: they are Python code, which cannot run after exit."""
    for address, (kind, _) in list(_given.items()):
        kind.from_address(address).deleter = None


def _data_type(dtype: np.dtype, version: tuple[int, int]) -> _DataType:
    """Return the DLPack type of a dtype: for narrow floats their own type if the consumer knows it, else uint8."""
    if dtype == ml_dtypes.bfloat16:
        return _DataType(_BFLOAT, 16, 1)
    if dtype.name in NARROW:
        return _DataType(NARROW[dtype.name] if version >= (1, 1) else _CODES["u"], 8, 1)
    if dtype.kind in _CODES and dtype.isnative and dtype.itemsize <= 16:
        return _DataType(_CODES[dtype.kind], dtype.itemsize * 8, 1)
    raise BufferError(f"DLPack has no type for {dtype}")


def _dtype(data: _DataType) -> np.dtype | None:
    """Return the dtype of a DLPack type, or None. Two E2M1 codes in a byte become uint8."""
    if (data.code, data.bits, data.lanes) == (_FLOAT4, 4, 2):
        return np.dtype(np.uint8)
    if data.lanes != 1 or data.bits % 8:
        return None
    if (data.code, data.bits) == (_BFLOAT, 16):
        return np.dtype(ml_dtypes.bfloat16)
    for name, code in NARROW.items():
        if (data.code, data.bits) == (code, 8):
            return np.dtype(getattr(ml_dtypes, name))
    kind = next((kind for kind, code in _CODES.items() if code == data.code), None)
    try:
        return None if kind is None else np.dtype(f"{kind}{data.bits // 8}")
    except TypeError:
        return None


def device_of(array: DeviceArray) -> tuple[int, int]:
    """Return the DLPack device of an array."""
    return (CUDA, array.backend.ordinal) if array.backend.is_cuda else (CPU, 0)


def give(array: DeviceArray, stream=None, max_version=None, dl_device=None, copy=None):
    """Return a capsule of an array, as `__dlpack__` is specified.

    stream: the consumer's, for CUDA memory: None or 1 is the legacy default stream, 2 the thread's, -1 asks for no
    order, else a handle. It waits, on the device, for earlier uses of the array. max_version: None asks for an
    unversioned capsule. dl_device: (1, 0) asks for a copy in host memory; the emulator gives only copies. BufferError
    for requests that cannot be met.
    """
    try:
        version = (0, 0) if max_version is None else tuple(int(x) for x in max_version)
        target = device_of(array) if dl_device is None else tuple(int(x) for x in dl_device)
    except Exception as error:  # numbers of other libraries may raise anything
        raise BufferError(
            f"max_version is {max_version!r}, dl_device {dl_device!r}; pass pairs of whole numbers, or None"
        ) from error
    if target not in (device_of(array), (CPU, 0)):
        there = " or ".join(dict.fromkeys(map(str, (device_of(array), (CPU, 0)))))
        raise BufferError(f"{array!r} cannot be given to the DLPack device {target}; it goes to {there}")
    to_host = target == (CPU, 0)
    if to_host and copy is False:
        raise BufferError(f"{array!r} can only be copied to host memory; leave out copy=False")
    if not array.is_contiguous and (to_host or copy):
        raise BufferError(f"{array!r} is not in row-major order, and only such arrays are copied; give its copy()")
    if to_host:
        if stream is not None and not array.backend.is_cuda:
            raise BufferError(f"stream is {stream!r}; the emulator has none, pass None")
        host = array.to_numpy()
        return _capsule(host, host.ctypes.data, host.shape, host.strides, host.dtype, (CPU, 0), IS_COPIED, version)

    if (
        not isinstance(stream, (int, np.integer, type(None)))
        or isinstance(stream, bool)
        or (stream is not None and (stream == 0 or stream < -1))
    ):
        raise BufferError(
            f"stream is {stream!r}; pass None or 1 (the legacy default stream), 2, -1 (no order), or a "
            "handle, as DLPack says"
        )
    refuse_recording("an array would be handed out")
    flags = 0
    if copy:
        from .array import _copy

        array, flags = _copy(array, array.backend), IS_COPIED
    if not array.writeable:
        if version < (1, 0):
            raise BufferError(f"{array!r} is read-only, which DLPack can only say from version 1 on")
        flags |= READ_ONLY
    array.memory.shared = True
    if stream != -1:
        consumer = array.backend.queue(LEGACY_STREAM if stream is None else int(stream))
        array.memory.acquire(consumer, True)
    return _capsule(array, array.address, array.shape, array.strides, array.dtype, target, flags, version)


def _capsule(owner, address, shape, strides, dtype, device, flags, version):
    """Make a capsule over memory that `owner` holds; strides are in bytes."""
    _sweep()
    kind, name = (_Versioned, b"dltensor_versioned") if version >= (1, 0) else (_Managed, b"dltensor")
    data_type = _data_type(dtype, version)
    numbers = max(len(shape), 1) * 2
    block = _malloc(ctypes.sizeof(kind) + numbers * 8)
    if not block:
        raise MemoryError
    sizes = (ctypes.c_int64 * numbers).from_address(block + ctypes.sizeof(kind))
    sizes[: len(shape)] = shape
    half = numbers // 2
    sizes[half : half + len(shape)] = [step // dtype.itemsize for step in strides]
    base = ctypes.addressof(sizes)
    int64s = ctypes.POINTER(ctypes.c_int64)
    shape_at, strides_at = (ctypes.cast(at, int64s) for at in (base, base + half * 8))
    tensor = _Tensor(address or None, _Device(*device), len(shape), data_type, shape_at, strides_at, 0)
    deleter = ctypes.cast(_delete, ctypes.c_void_p)
    managed = kind.from_address(block)
    if kind is _Versioned:
        managed.major, managed.minor = min(version, VERSION) if version < (2, 0) else VERSION
        managed.flags = flags
    managed.manager, managed.deleter, managed.tensor = None, deleter, tensor
    _given[block] = kind, owner
    try:
        capsule = _new_capsule(block, ctypes.addressof(_NAMES[name]), None)
    except BaseException:
        _let_go(block)
        raise
    _untaken[block] = capsule
    return capsule


class _Taken:
    """A DLPack tensor that was taken. The lender's deleter is called once, at the end of this object."""

    __slots__ = ("_address", "_deleter", "_end")

    def __init__(self, address: int, deleter: int | None):
        self._address, self._deleter = address, deleter

    def __del__(self):
        if self._deleter:
            self._end = End(_DELETER(self._deleter), self._address)


class _TakenMemory(Borrowed):
    """Memory of a DLPack lender. It is released only when its uses here are done, because the lender does not know
    them.

    handed: the queue that the lender made wait for its work, in whichever stream that work is.
    """

    __slots__ = ("handed", "uses")

    def __init__(self, backend, address, nbytes, owner, lender, handed):
        super().__init__(backend, address, nbytes, owner, lender)
        self.handed = handed
        self.uses: tuple = ()

    def acquire(self, queue, write) -> None:
        """Make a queue wait for the lender."""
        super().acquire(queue, write)
        if queue is not self.handed and self.handed.lasting:
            queue.backend.wait(queue, self.handed)

    def release(self, queue, mark, write) -> None:
        """Make the lender wait, and record the use."""
        super().release(queue, mark, write)
        if queue is not self.lender:
            add_use(self, "uses", queue, mark)

    def __del__(self, is_finalizing=sys.is_finalizing):
        if self.uses and not is_finalizing():
            self.backend.keep_until(tuple(mark for _, mark in self.uses), self.owner)


def take(function: str, name: str, value) -> Any:
    """Take the array of an object's `__dlpack__`: a DeviceArray for CUDA memory, a NumPy array for host memory."""

    def refuse(why: object):
        raise ArgumentError(f"{function}: {name} is a {type(value).__name__} that DLPack cannot bring in: {why}")

    try:
        kind, ordinal = (int(x) for x in value.__dlpack_device__())
    except Exception as error:
        refuse(f"__dlpack_device__ raised {error!r}")
    if kind in (CUDA, CUDA_MANAGED):
        backend = foreign_backend(function, name, ordinal)
        queue = backend.queue()
        stream = {0: LEGACY_STREAM}.get(queue.handle, queue.handle)
        place = backend.entered()  # PyTorch exports tensors of the current device alone
    elif kind in (CPU, CUDA_HOST):
        backend, queue, stream, place = None, None, None, nullcontext()
    else:
        refuse(f"it lies on the DLPack device {kind}; pass an array of the host or of CUDA")
    try:
        with place:
            capsule = _ask(value, stream)
    except Exception as error:
        refuse(error)
    return _open(function, name, capsule, backend, queue, refuse)


def _ask(value, stream):
    """Request a capsule from an object, of version 1 if the object supports that."""
    named = {} if stream is None else {"stream": stream}
    try:
        return value.__dlpack__(max_version=VERSION, **named)
    except TypeError as error:
        if "max_version" not in str(error) and "keyword" not in str(error):
            raise
    return value.__dlpack__(**named)


def _open(function: str, name: str, capsule, backend: "Backend | None", queue, refuse):
    """Consume a capsule. Its owner is then a `_Taken`, which calls the deleter."""
    label = next((label for label in _KINDS if _is_capsule(capsule, ctypes.addressof(_NAMES[label]))), None)
    if label is None:
        refuse("__dlpack__ gave no capsule that is still to be taken")
    kind, used = _KINDS[label]
    address = _pointer_of(capsule, ctypes.addressof(_NAMES[label]))
    managed = kind.from_address(address)
    if kind is _Versioned and managed.major > VERSION[0]:
        refuse(f"its capsule is of DLPack {managed.major}.{managed.minor}; {VERSION[0]}.x is known here")
    tensor = managed.tensor
    dtype = _dtype(tensor.dtype)
    if dtype is None:
        refuse(
            f"its type (code {tensor.dtype.code}, {tensor.dtype.bits} bits, {tensor.dtype.lanes} "
            "lanes) is not known here"
        )
    check_size(f"{function}: {name}", tensor.shape[: tensor.ndim] if tensor.ndim else (), dtype)
    _rename(capsule, ctypes.addressof(_NAMES[used]))
    owner = _Taken(address, managed.deleter)
    shape = tuple(tensor.shape[: tensor.ndim]) if tensor.ndim else ()
    strides = (
        tuple(step * dtype.itemsize for step in tensor.strides[: tensor.ndim])
        if tensor.strides and tensor.ndim
        else None
    )
    start = (tensor.data or 0) + tensor.byte_offset
    writeable = not (kind is _Versioned and managed.flags & READ_ONLY)
    if backend is None:
        return _host_array(owner, start, shape, strides, dtype, writeable)
    nbytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    lender = backend.queue(LEGACY_STREAM, lasting=True)
    memory = _TakenMemory(backend, start, nbytes, owner, lender, queue)
    return DeviceArray(memory, start, shape, dtype, strides, writeable)


class _HostMemory:
    """Memory of the host with NumPy's array interface. An array over it keeps it alive."""

    def __init__(self, owner, address, shape, strides, writeable):
        self.owner = owner
        # Plain bytes, because the array interface has no names for the types of ml_dtypes.
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "data": (address, not writeable),
            "shape": shape,
            "strides": strides,
        }


def _host_array(owner, start, shape, strides, dtype, writeable) -> np.ndarray:
    """A NumPy array over memory of the host."""
    if 0 in shape or not start:
        return np.empty(shape, dtype)
    raw = _HostMemory(owner, start, (*shape, dtype.itemsize), None if strides is None else (*strides, 1), writeable)
    array = np.asarray(raw).view(dtype)
    return array.reshape(shape) if array.shape != shape and not shape else array[..., 0]
