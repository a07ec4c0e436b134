"""The Backend on the CUDA driver: native and portable machines. The only module that imports CUDA."""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import numpy as np

from . import units
from .backend import Entry, Facts, MemoryInfo, Packet, Param, Queue, Remembered, scope
from .errors import AbiError, ArgumentError, DriverError, MachineError, OutOfMemory, PtxError
from .files import module_kind, read_bytes
from .pool import Pool
from .ptx import parse
from .staging import Staging
from .turns import FORKED, End, Turn

# The driver API version that toolkit 13.0 needs, and the driver that has it.
MINIMUM_VERSION, MINIMUM_DRIVER = 13000, "580"
# Dynamic shared memory above this needs a raised limit of the function (`_allow_shared`).
DEFAULT_SHARED_BYTES = 48 * 1024
# cuLaunchKernel's `extra`: these words, each followed by a pointer (cuda.h).
LAUNCH_PARAM_END, LAUNCH_PARAM_BUFFER_POINTER, LAUNCH_PARAM_BUFFER_SIZE = 0, 1, 2
# Constant handles of a stream that never ends: 0 and 1 are the legacy default stream (cuda.h). 2 is not among them: it
# names a different stream in each thread, so that another thread cannot record its end.
LEGACY_STREAMS = (0, 1)
# The most queues that are kept of streams given as integer handles.
HANDLES = 256

_LOST = "the context is lost: restart the process; ptxrt.using('emulator') may show the faulty access"
_HINTS = {
    "CUDA_ERROR_OUT_OF_MEMORY": "free device arrays, or split the call",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": (
        "the module holds no code for this GPU; native code is for sm_120 and sm_121, ptxrt.using('portable') runs "
        "from sm_80 on"
    ),
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": f"the PTX is newer than the driver; install driver {MINIMUM_DRIVER} or newer",
    "CUDA_ERROR_INVALID_PTX": "ptxas -arch=sm_XX FILE tells where the text is wrong",
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": "the block needs more registers, threads or shared memory than the GPU has",
    "CUDA_ERROR_ILLEGAL_ADDRESS": _LOST,
    "CUDA_ERROR_MISALIGNED_ADDRESS": _LOST,
    "CUDA_ERROR_ILLEGAL_INSTRUCTION": _LOST,
    "CUDA_ERROR_LAUNCH_FAILED": _LOST,
    "CUDA_ERROR_LAUNCH_TIMEOUT": _LOST,
    "CUDA_ERROR_HARDWARE_STACK_ERROR": _LOST,
    "CUDA_ERROR_INVALID_ADDRESS_SPACE": _LOST,
    "CUDA_ERROR_INVALID_PC": _LOST,
    "CUDA_ERROR_NOT_INITIALIZED": "a process that was forked cannot use CUDA; use the start method spawn",
}


@dataclass(frozen=True)
class Device:
    """A CUDA device: ordinal, name and compute capability."""

    ordinal: int
    name: str
    capability: tuple[int, int]

    @property
    def target(self) -> str:
        """The capability as nvcc names it, such as sm_120."""
        return f"sm_{self.capability[0]}{self.capability[1]}"


@dataclass(frozen=True)
class Probe:
    """The CUDA that is installed. problem: why nothing can run, or empty. absent: whether driver or device is
    missing.
    """

    devices: tuple[Device, ...] = ()
    version: str = ""
    problem: str = ""
    absent: bool = False


@cache
def probe() -> Probe:
    """Look for a driver and its devices, once per process; raises nothing."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        if _driver_has_devices():
            return Probe(
                problem=f"there is a GPU, but cuda-python cannot be imported ({error}); pip install cuda-python"
            )
        return Probe(problem=f"no CUDA device, and cuda-python cannot be imported ({error})", absent=True)
    try:
        result = driver.cuInit(0)[0]
    except RuntimeError:
        # cuda-python loads the driver library at its first call and raises a RuntimeError if there is none.
        return Probe(problem="no CUDA driver on this computer", absent=True)
    if result.name in ("CUDA_ERROR_NO_DEVICE", "CUDA_ERROR_STUB_LIBRARY"):
        return Probe(problem=f"no CUDA device on this computer (cuInit: {result.name})", absent=True)
    try:
        if result != driver.CUresult.CUDA_SUCCESS:
            raise _error("cuInit", result)
        number = _call("cuDriverGetVersion")
        version = f"{number // 1000}.{number % 1000 // 10}"
        if number < MINIMUM_VERSION:
            return Probe(
                problem=f"the driver supports CUDA {version}; driver {MINIMUM_DRIVER} or newer is needed (CUDA 13.0)",
                version=version,
            )
        return Probe(tuple(_device(i) for i in range(_call("cuDeviceGetCount"))), version)
    except DriverError as error:
        return Probe(problem=str(error))


@cache
def _library() -> ctypes.CDLL:
    """Load the driver library itself, for calls that cuda-python lacks or answers wrongly; OSError if there is none."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def _driver_has_devices() -> bool:
    """Return whether the driver library, without cuda-python, counts any device."""
    if sys.platform == "darwin":
        return False
    try:
        library, count = _library(), ctypes.c_int(0)
        return library.cuInit(0) == 0 and library.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
    except (OSError, AttributeError):
        return False


def _device(ordinal: int) -> Device:
    from cuda.bindings.driver import CUdevice_attribute as attribute

    handle = _call("cuDeviceGet", ordinal)
    name = _call("cuDeviceGetName", 256, handle)
    major = _call("cuDeviceGetAttribute", attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, handle)
    minor = _call("cuDeviceGetAttribute", attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, handle)
    return Device(ordinal, name.split(b"\0")[0].decode(), (major, minor))


def _call(function: str, *arguments, about: str = "") -> Any:
    """Call the driver and return its one result, or None; DriverError with the CUresult's name on failure."""
    from cuda.bindings import driver

    if _is_forked:
        raise MachineError(FORKED)
    result, *values = getattr(driver, function)(*arguments)
    if result != driver.CUresult.CUDA_SUCCESS:
        raise _error(function, result, about)
    return values[0] if values else None


class _NoDriver:
    """A replacement for the driver in a forked process. Driver calls are undefined there, because the process lacks
    part of the driver's memory.
    """

    def __getattr__(self, name: str):
        raise MachineError(FORKED)


_backends: WeakSet["DriverBackend"] = WeakSet()
_is_forked = False


def _after_fork() -> None:
    """Keep a forked process from calling the driver if its parent did."""
    global _is_forked
    for backend in list(_backends):
        _is_forked = True
        backend.lose()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _error(function: str, result, about: str = "") -> DriverError:
    from cuda.bindings import driver

    name = getattr(result, "name", str(result))
    found, text = driver.cuGetErrorString(result)
    words = text.decode() if found == driver.CUresult.CUDA_SUCCESS and text else "unknown error"
    hint = f"; {_HINTS[name]}" if name in _HINTS else ""
    where = f" ({about})" if about else ""
    kind = OutOfMemory if name == "CUDA_ERROR_OUT_OF_MEMORY" else DriverError
    return kind(f"{function}{where} returned {name}: {words}{hint}", result=name, code=int(result), call=function)


def digest_of(data: bytes) -> str:
    """Return the SHA-256 of a module's file."""
    return hashlib.sha256(data).hexdigest()


def _parsed(data: bytes, name: str):
    """Return the parsed text; None if this package's parser refuses it. The GPU may still run such a text."""
    try:
        return parse(data.decode("utf-8", "replace"), name)
    except PtxError:
        return None


class DriverModule:
    """A loaded module: the entries of a unit, a text, or a binary whose parameter types are unknown.

    launches: of a unit of this project, the nine launch facts of each entry. Entries keep the module loaded.
    """

    def __init__(
        self, name: str, entries: dict[str, Entry], digest: str, launches: Mapping[str, Sequence[int]] | None = None
    ):
        self.name = name
        self.digest = digest
        self.entries = entries
        self._launches = launches or {}

    def facts(self, entry: str) -> Facts:
        """Return the launch facts of an entry; AbiError if they are unknown."""
        if entry not in self._launches:
            raise AbiError(
                f"{self.name} does not say how {entry} launches; declare the entry with KERNEL() and run `make`"
            )
        return Facts.of(entry, self._launches[entry])


class _Handle:
    """A handle of the driver that is destroyed when nothing refers to this object.

    waits: whether the device must first finish the work that uses the handle. Streams and graphs need no wait: the
    driver completes their work before it releases them.
    """

    __slots__ = ("backend", "handle", "_destroy", "_end")
    waits = False

    def __init__(self, backend: "DriverBackend", handle, destroy: Callable[[Any], Any]):
        self.backend, self.handle, self._destroy = backend, handle, destroy

    def __del__(self):
        if self._destroy is not None:
            self._end = End(self.backend.leave_handle, self.handle, self._destroy, self.waits)


class Image(_Handle):
    """A module in the driver. Its entries refer to it, so that it is unloaded after the last of them.

    raised: by entry, the raised limit of the function's dynamic shared memory in bytes.
    """

    __slots__ = ("raised",)
    waits = True

    def __init__(self, backend: "DriverBackend", handle):
        super().__init__(backend, handle, backend.binding("cuModuleUnload"))
        self.raised: dict[str, int] = {}

    def unload(self) -> None:
        """Unload it now, before anything of it was launched."""
        with suppress(DriverError):
            _call("cuModuleUnload", self.handle)
        self._destroy = None

    def function(self, name: str):
        """Return the handle of a function."""
        return _call("cuModuleGetFunction", self.handle, name.encode(), about=name)

    def functions(self) -> list:
        """Return the handles of all functions."""
        count = _call("cuModuleGetFunctionCount", self.handle)
        return _call("cuModuleEnumerateFunctions", count, self.handle) if count else []


class HostMemory(_Handle):
    """Page-locked memory. Copies of the device may be under way when the last array over it ends."""

    __slots__ = ()
    waits = True


class Event:
    """A CUDA event that was recorded at the end of `queue`. Its handle is reused once nothing refers to this object."""

    __slots__ = ("handle", "backend", "timed", "queue", "_end")

    def __init__(self, backend: "DriverBackend", handle, timed: bool, queue: Queue | None = None):
        self.backend, self.handle, self.timed, self.queue = backend, handle, timed, queue

    def milliseconds_after(self, start: "Event") -> float:
        """Return the milliseconds between two timed events that are reached."""
        with self.backend.entered():
            return float(_call("cuEventElapsedTime", start.handle, self.handle))

    def __del__(self):
        # A pending wait keeps the record that it was made for, so that the event may be recorded again.
        self._end = End((self.backend._spare_timers if self.timed else self.backend._spare_events).append, self.handle)


class DriverPacket(Packet):
    """A launch through cuLaunchKernel's buffer of packed parameters, which the driver copies before it returns.

    extra: the address of the words that describe the buffer.
    """

    __slots__ = ("_backend", "_sizes", "extra", "_keep", "_name", "_entry", "_config", "__weakref__")

    def __init__(self, backend: "DriverBackend", entry: Entry, grid, block, shared_bytes: int, params: bytes):
        super().__init__(params)
        self._backend = backend
        self._name = entry.name
        self._entry = entry  # its module must stay loaded
        self._config: Any = None  # of early launches in a stream
        self._sizes = (entry.handle, *map(int, grid), *map(int, block), int(shared_bytes))
        buffer = (ctypes.c_char * len(self.raw)).from_buffer(self.raw)
        size = ctypes.c_size_t(self.size)
        words = (ctypes.c_void_p * 5)(
            LAUNCH_PARAM_BUFFER_POINTER,
            ctypes.addressof(buffer),
            LAUNCH_PARAM_BUFFER_SIZE,
            ctypes.addressof(size),
            LAUNCH_PARAM_END,
        )
        self._keep = (buffer, size, words)
        self.extra = ctypes.addressof(words) if self.size else 0
        backend.packets.add(self)

    def bind(self, queue: Queue) -> None:
        """Set all arguments of cuLaunchKernel at once.

        The call does not check the current context, which would cost up to a tenth of a launch. If another context, or
        none, is current, the driver refuses the launch, and `retry` makes the right one current.

        An entry that waits may begin before the launch ahead has ended if that one is known: it waits for this launch
        alone, and another library's kernel may end before those ahead of it.
        """
        driver = self._backend._driver
        if self.follows and self._entry.waits:
            if self._config is None:
                self._config = self._early()
            self._config.hStream = queue.native
            self.call = partial(driver.cuLaunchKernelEx, self._config, self._sizes[0], 0, self.extra)
        else:
            self.call = partial(driver.cuLaunchKernel, *self._sizes, queue.native, 0, self.extra)
        self.queue = queue
        self._backend._latest = self._name

    def record(self, queue: Queue) -> None:
        """Launch in a queue that a graph captures. An entry that waits may begin before the launch ahead has ended."""
        if not self._entry.waits:
            self.launch(queue)
            return
        config = self._early()
        config.hStream = queue.native
        with self._backend._entered():
            _call("cuLaunchKernelEx", config, self._sizes[0], 0, self.extra, about=self._name)

    def _early(self) -> Any:
        """Make the configuration of a launch that may begin before the launch ahead has ended, without a stream."""
        driver = self._backend._driver
        early, config = driver.CUlaunchAttribute(), driver.CUlaunchConfig()
        value = driver.CUlaunchAttributeValue()
        value.programmaticStreamSerializationAllowed = 1
        early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value = value
        _, *sizes, config.sharedMemBytes = self._sizes
        for name, size in zip(("gridDim", "blockDim"), (sizes[:3], sizes[3:])):
            for axis, count in zip("XYZ", size):
                setattr(config, name + axis, count)
        config.attrs, config.numAttrs = [early], 1
        return config

    def retry(self) -> None:
        """Launch in the device's context; DriverError if that does not help."""
        sizes = self._sizes
        about = f"{self._name}, grid {sizes[1:4]}, block {sizes[4:7]}, {sizes[7]} bytes of shared memory"
        with self._backend._entered():
            _call("cuLaunchKernel", *sizes, self.queue.native, 0, self.extra, about=about)


_PRESENT = nullcontext()  # the block of a context that is current already


class DriverBackend:
    """One CUDA device by its primary context, with a stream of the library's own. Safe to use from any thread."""

    is_cuda = True

    def __init__(self, name: str, device: Device, on_device: Callable[[int], "DriverBackend"]):
        """on_device: gives the same machine on another of its devices."""
        from cuda.bindings import driver

        self.name = name
        self.device = device
        self._on_device = on_device
        self._driver = driver
        self._modules: dict[str, DriverModule] = {}
        self.remembered = Remembered()
        self._turn = Turn(self._destroy)
        self._latest = "nothing yet"
        self._spare_events: deque = deque()
        self._spare_timers: deque = deque()
        self._lent: deque = deque()  # (events, what must live until they are reached)
        self._by_handle: dict[int, Queue] = {}
        self._by_lender: WeakValueDictionary[int, Queue] = WeakValueDictionary()
        self._by_object: WeakValueDictionary[int, Queue] = WeakValueDictionary()
        self._queues: WeakValueDictionary[int, Queue] = WeakValueDictionary()
        self._pool = Pool(self, self._all_queues, keep=os.environ.get("PTXRT_POOL", "1") != "0")
        self._context = _call("cuDevicePrimaryCtxRetain", _call("cuDeviceGet", device.ordinal))
        self._context_number = int(self._context)
        self.packets: WeakSet[DriverPacket] = WeakSet()
        _backends.add(self)
        self.own_queue = self.new_queue()
        self._gathering: Queue | None = None
        self._staging = Staging(self)
        self._captures: list[Queue] = []  # queues that graphs of this library capture
        self._handles_captured: set[int] = set()  # captured streams of other libraries; see `everything`

    def lose(self) -> None:
        """Make every later call raise MachineError, without a driver call. Forked processes do this."""
        self._driver = _NoDriver()
        for packet in list(self.packets):
            packet.queue = None  # it is bound again before the next launch, which then fails
        for queue in self._all_queues():
            queue.blocks = {}

    @property
    def ordinal(self) -> int:
        """The device's number."""
        return self.device.ordinal

    def on_device(self, ordinal: int) -> "DriverBackend":
        """The same machine on another device."""
        return self if ordinal == self.device.ordinal else self._on_device(ordinal)

    def device_at(self, address: int) -> int:
        """The number of the device where an address lies."""
        if len(probe().devices) == 1:
            return self.device.ordinal
        # cuda-python returns 0 for every address (github.com/NVIDIA/cuda-python/issues/2928), so this calls the driver
        # library directly.
        which, ordinal = self._driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, ctypes.c_int(-1)
        with self._entered():
            code = _library().cuPointerGetAttribute(ctypes.byref(ordinal), int(which), ctypes.c_uint64(address))
        if code:
            raise _error("cuPointerGetAttribute", self._driver.CUresult(code), f"{address:#x}")
        return ordinal.value

    def _entered(self):
        """Make the device's context current in the calling thread for a `with` block that begins at once, and restore
        the thread's own afterwards.

        A thread without a context keeps this one, as with the CUDA runtime: pushing and popping would cost more than a
        launch.
        """
        result, *values = self._driver.cuCtxGetCurrent()
        if not result.value and int(values[0]) == self._context_number:
            return _PRESENT
        return self._switched()

    @contextmanager
    def _switched(self):
        """Do the same where another context, or none, is current."""
        if not int(_call("cuCtxGetCurrent")):
            _call("cuCtxSetCurrent", self._context)
            yield
        else:
            _call("cuCtxPushCurrent", self._context)
            try:
                yield
            finally:
                _call("cuCtxPopCurrent")

    def entered(self):
        """Make the device's context current in a block, for other libraries that use the current context."""
        return self._entered()

    def describe(self) -> str:
        """Describe machine and device, with the device's number unless it is the first."""
        number = f" (device {self.device.ordinal})" if self.device.ordinal else ""
        return f"{self.name}, {self.device.name}{number}"

    def binding(self, function: str):
        """Return a function of cuda-python, for benchmarks that compare with it."""
        return getattr(self._driver, function)

    def attribute(self, name: str) -> int:
        """Return an attribute of the device, by CUDA's name without CU_DEVICE_ATTRIBUTE_; for the heads of
        benchmarks."""
        which = getattr(self._driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(_call("cuDeviceGetAttribute", which, _call("cuDeviceGet", self.device.ordinal)))

    @cached_property
    def multiprocessors(self) -> int:
        """The number of multiprocessors of the device."""
        return self.attribute("MULTIPROCESSOR_COUNT")

    # Modules

    def leave_handle(self, handle, destroy: Callable[[Any], Any], waits: bool) -> None:
        """Leave a handle to be destroyed later; finalizers call this."""
        self._turn.leave((handle, destroy, waits, None))

    def _destroy(self, left: tuple) -> None:
        """Destroy a handle. A handle that waits is destroyed once all work that the device had at the first attempt is
        done.
        """
        handle, destroy, waits, event = left
        if waits:
            done = False
            try:
                event = event or self.everything()
                done = event is not None and self.reached(event)
            finally:
                if not done:
                    self._turn.leave((handle, destroy, waits, event))
            if not done:
                return
        with self._relaxed(), suppress(DriverError):  # a lost context has been reported already
            destroy(handle)

    def module(self, unit: str) -> DriverModule:
        """Load a compiled unit of this project once."""
        with self._turn:
            if unit not in self._modules:
                self._modules[unit] = self._load(unit)
            return self._modules[unit]

    def _load(self, unit: str) -> DriverModule:
        portable = self.name == "portable"
        binary = units.image(unit, portable, self.device.capability)
        launches = units.launches(unit, units.compute_of(unit, portable, self.device.capability))
        with self._loaded(binary, f"{unit}, {self.name}") as image:
            entries = {
                name: Entry.from_record(
                    name, launch["parameters"], image.function(name), image, launch.get("waits", False)
                )
                for name, launch in launches.items()
            }
        return DriverModule(
            unit, entries, digest_of(binary), {name: launch["launch"] for name, launch in launches.items()}
        )

    def open(self, path: Path) -> DriverModule:
        """Load any PTX, fatbin or cubin. It is unloaded when nothing refers to the result or its entries."""
        data = read_bytes(path)
        kind = module_kind(path, data)
        text = _parsed(data, path.name) if kind == "ptx" else None
        with self._turn, self._loaded(data.rstrip(b"\0") + b"\0" if kind == "ptx" else data, path.name) as image:
            if text is not None:
                entries = {name: Entry.from_text(f, image.function(name), image) for name, f in text.entries.items()}
            else:
                entries = {entry.name: entry for entry in (self._binary_entry(f, image) for f in image.functions())}
        return DriverModule(path.name, entries, digest_of(data))

    @contextmanager
    def _loaded(self, binary: bytes, about: str):
        """Load a module in the device's context; unload it at once if the block fails."""
        with self._entered():
            image = Image(self, _call("cuModuleLoadData", binary, about=about))
            try:
                yield image
            except BaseException:
                image.unload()
                raise

    def _binary_entry(self, function, image: Image) -> Entry:
        """Make an entry whose parameters come from the binary alone: offsets and sizes, no types."""
        params = []
        while True:
            try:
                offset, size = self._param_info(function, len(params))
            except DriverError as error:
                if error.result != "CUDA_ERROR_INVALID_VALUE":
                    raise
                break
            params.append(Param(None, size, offset))
        last = params[-1] if params else Param(None, 0, 0)
        return Entry(_call("cuFuncGetName", function).decode(), tuple(params), last.offset + last.size, function, image)

    def _param_info(self, function, index: int) -> tuple[int, int]:
        result, *values = self._driver.cuFuncGetParamInfo(function, index)
        if result != self._driver.CUresult.CUDA_SUCCESS:
            raise _error("cuFuncGetParamInfo", result)
        return int(values[0]), int(values[1])

    # Memory

    def alloc(self, nbytes: int, queue: Queue | None = None) -> int:
        """Allocate memory for work in a queue from the pool; OutOfMemory leaves everything else usable."""
        if self._lent or self._turn.left:
            self._tidy()
        return self._pool.alloc(nbytes, queue or self.queue())

    def free(self, memory: Any) -> None:
        """Return memory to the pool, for reuse in stream order; nothing waits."""
        self._pool.free(memory.address, memory.nbytes, memory.writer, memory.readers, memory.shared)

    def reclaim(self, queue: Queue, blocks: dict[int, list[int]]) -> None:
        """Return memory to the pool from a queue that has ended."""
        self._pool.reclaim(queue, blocks)

    def memory_info(self) -> MemoryInfo:
        """Return the pool's count and the driver's."""
        used, cached = self._pool.count()
        with self._entered():
            result, *values = self._driver.cuMemGetInfo()
            if result != self._driver.CUresult.CUDA_SUCCESS:
                raise _error("cuMemGetInfo", result, self.blame())
        return MemoryInfo(self.describe(), used, cached, int(values[0]), int(values[1]))

    def restore_after_faults(self, memory: Any) -> None:
        """Do nothing: a fault ends the context."""

    def trim(self) -> None:
        """Wait for the device and give it all memory that is kept for reuse."""
        self.finish()
        self._tidy()
        self._pool.trim()

    def keep_until(self, marks: tuple, owner: Any) -> None:
        """Keep an object alive until marks are reached; `_tidy` checks them. This call makes no driver call."""
        self._lent.append((marks, owner))

    def _tidy(self) -> None:
        """Release borrowed memory that is no longer used, and handles without references."""
        if self._lent:
            self._give_back()
        if self._turn.left:
            self._turn.settle()

    def _give_back(self) -> None:
        for _ in range(len(self._lent)):
            try:
                marks, owner = self._lent.popleft()
            except IndexError:
                return
            done = False
            try:
                marks = tuple(self.settle(mark) for mark in marks)
                done = all(self.reached(mark) for mark in marks)
            finally:
                if not done:
                    self._lent.append((marks, owner))

    # The pool's `Source`. Its calls must not invalidate a capture of another library, hence the relaxed mode.

    @contextmanager
    def _relaxed(self):
        mode = self._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        with self._entered():
            before = _call("cuThreadExchangeStreamCaptureMode", mode)
            try:
                yield
            finally:
                _call("cuThreadExchangeStreamCaptureMode", before)

    def take(self, nbytes: int) -> int:
        """Allocate memory from the driver."""
        with self._relaxed():
            return int(_call("cuMemAlloc", nbytes, about=f"{nbytes} bytes on {self.describe()}"))

    def give(self, address: int) -> None:
        """Return memory to the driver. The driver waits for the work that may use it."""
        with self._relaxed():
            _call("cuMemFree", address)

    def settle(self, mark: Any) -> Any:
        """Return an event for a mark. The mark's own device records it, because an event belongs to one context.

        A queue that is being captured is returned itself: its event would become part of the graph.
        """
        if not isinstance(mark, Queue) or mark.backend.is_capturing(mark):
            return mark
        return mark.backend._record(mark)

    def everything(self) -> Event | None:
        """Record an event after all work of the context, by any library; None if the driver cannot.

        While a stream of the context is captured, cuCtxRecordEvent would invalidate the capture (cuda.h). A capture of
        another library is known only if a call here used a stream of it. A stream given as a bare handle may be
        destroyed by now and is not queried: the state that the latest call in it found counts.
        """
        lasting = (queue for queue in self._all_queues() if queue.lasting)
        if self._captures or self._handles_captured or any(map(self.is_capturing, lasting)):
            return None
        with self._relaxed():
            handle = self._spare_event()
            (result,) = self._driver.cuCtxRecordEvent(self._context, handle)[:1]
        if result != self._driver.CUresult.CUDA_SUCCESS:
            self._spare_events.append(handle)
            return None
        return Event(self, handle, False)

    def reached(self, mark: Any, wait: bool = False) -> bool:
        """Return whether an event, or a queue's present work, is done; with `wait`, wait for it.

        A queue that is being captured counts as not done.
        """
        if isinstance(mark, Queue):
            if wait:
                self.synchronize(mark)
                return True
            with self._entered():
                return not self.is_capturing(mark) and self._is_done("cuStreamQuery", mark.native)
        with self._relaxed():
            if wait:
                _call("cuEventSynchronize", mark.handle, about=self.blame())
                return True
            return self._is_done("cuEventQuery", mark.handle)

    def finish(self) -> None:
        """Wait for everything on the device."""
        with self._entered():
            _call("cuCtxSynchronize", about=self.blame())

    def write(self, address: int, host: np.ndarray, stream=None, is_locked: bool = False) -> None:
        """Copy a contiguous array to the device; `host` may change afterwards.

        Small arrays go by way of page-locked memory, without a wait; others wait for the stream. In a stream that is
        captured the driver refuses this wait, so that no graph copies from memory that changes.
        """
        queue = self.queue(stream)
        with self._entered():
            if is_locked:
                self.copy_from_host(address, host.ctypes.data, host.nbytes, queue)
            elif host.nbytes <= Staging.LARGEST and not self._is_capturing(queue):
                self._staging.write(address, host, queue)
            else:
                self.copy_from_host(address, host.ctypes.data, host.nbytes, queue)
                self.wait_for(queue)

    def copy_from_host(self, address: int, source: int, nbytes: int, queue: Queue) -> None:
        """Start a copy of the host's bytes at `source`, in the device's context."""
        self.do("cuMemcpyHtoDAsync", address, source, nbytes, queue.native)

    def page_locked(self, nbytes: int) -> int:
        """Allocate memory of the host that the device reads directly."""
        with self._relaxed():
            return int(_call("cuMemHostAlloc", nbytes, 0, about=f"{nbytes} bytes of page-locked memory"))

    def read(self, address: int, host: np.ndarray, stream=None, is_locked: bool = False) -> None:
        """Fill a contiguous array from the device, and wait for it unless it is page-locked."""
        queue = self.queue(stream)
        with self._entered():
            if is_locked:
                self.copy_to_host(host.ctypes.data, address, host.nbytes, queue)
            elif host.nbytes <= Staging.LARGEST:
                self._staging.read(address, host, queue)
            else:
                self.copy_to_host(host.ctypes.data, address, host.nbytes, queue)
                self.wait_for(queue)

    def host_memory(self, nbytes: int) -> np.ndarray:
        """Allocate page-locked memory. It is freed once no array lies over it and the work until then is done."""
        if not nbytes:
            return np.empty(0, np.uint8)
        buffer: Any = (ctypes.c_char * nbytes).from_address(self.page_locked(nbytes))
        buffer.owner = HostMemory(self, ctypes.addressof(buffer), self.binding("cuMemFreeHost"))
        return np.frombuffer(buffer, np.uint8)

    def copy_to_host(self, target: int, address: int, nbytes: int, queue: Queue) -> None:
        """Start a copy to the host's bytes at `target`, in the device's context."""
        self.do("cuMemcpyDtoHAsync", target, address, nbytes, queue.native)

    def copy(self, address: int, source: "DriverBackend", source_address: int, nbytes: int, queue: Queue) -> None:
        """Copy between devices, or on this one."""
        with self._entered():
            if source is self:
                _call("cuMemcpyDtoDAsync", address, source_address, nbytes, queue.native, about=self.blame())
            else:
                places = (address, self._context, source_address, source._context)
                _call("cuMemcpyPeerAsync", *places, nbytes, queue.native, about=self.blame())

    # Launching

    def packet(self, entry: Entry, grid, block, shared_bytes: int, params: bytes) -> DriverPacket:
        """Make a launch that can be bound. Raise the function's limit of shared memory if the launch needs more."""
        if shared_bytes > DEFAULT_SHARED_BYTES:
            with self._entered():
                self._allow_shared(entry, shared_bytes)
        return DriverPacket(self, entry, grid, block, shared_bytes, params)

    def _allow_shared(self, entry: Entry, shared_bytes: int) -> None:
        """Raise the function's limit of dynamic shared memory if the launch needs it."""
        if shared_bytes <= max(DEFAULT_SHARED_BYTES, entry.owner.raised.get(entry.name, 0)):
            return
        device = _call("cuDeviceGet", self.device.ordinal)
        which = self._driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        limit = _call("cuDeviceGetAttribute", which, device)
        about = (
            f"{entry.name} needs {shared_bytes} bytes of shared memory, {self.device.name} gives a "
            f"block at most {limit}"
        )
        which = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _call("cuFuncSetAttribute", entry.handle, which, shared_bytes, about=about)
        entry.owner.raised[entry.name] = shared_bytes

    # Streams

    def queue(self, stream=None, lasting: bool = False) -> Queue:
        """Return the queue of a stream: None is that of `with stream:` or the library's own; else a handle or
        `__cuda_stream__`.

        lasting: the handle is known to live as long as its user.
        """
        if stream is None:
            queue = scope().queue
            return queue if queue is not None and queue.backend is self else self.own_queue
        kind = type(stream)
        if kind is Queue:
            return self._mine(stream)
        if kind is int and 0 <= stream < 2**64:
            return self._queue_of(stream, lasting)
        if isinstance(stream, (int, np.integer)) and not isinstance(stream, bool) and 0 <= stream < 2**64:
            return self._queue_of(int(stream), lasting)
        own = getattr(stream, "queue", None)
        if isinstance(own, Queue):
            return self._mine(own)
        protocol = getattr(stream, "__cuda_stream__", None)
        if protocol is None:
            raise ArgumentError(f"stream is {stream!r}; pass None, an integer handle or an object with __cuda_stream__")
        try:
            _version, handle = protocol() if callable(protocol) else protocol
            handle = int(handle)
            if not 0 <= handle < 2**64:
                raise ValueError(f"the handle {handle}")
        except Exception as error:  # a stream of another library may raise anything
            raise ArgumentError(
                f"stream is {stream!r}, whose __cuda_stream__ gives no pair of version and handle: {error}"
            ) from error
        if handle in LEGACY_STREAMS or handle == 2:
            return self._queue_of(handle, lasting)
        queue = self._by_object.get(handle)
        if queue is None:
            queue = self._by_object[handle] = self._known(
                Queue(self, handle, self._driver.CUstream(handle), True, stream)
            )
        return queue

    def _mine(self, queue: Queue) -> Queue:
        if queue.backend is not self:
            raise ArgumentError(
                f"stream is a {queue!r}, but the call runs on {self.describe()}; pass a stream of that device"
            )
        return queue

    def _queue_of(self, handle: int, lasting: bool) -> Queue:
        """Return the queue of an integer handle. The stream may have ended by the time of a later wait.

        A handle that lasts as long as its user is kept no longer than that user, since a query of a stream that ended
        crashes.
        """
        if lasting and handle != 2 and handle not in LEGACY_STREAMS:
            queue = self._by_lender.get(handle)
            return queue or self._by_lender.setdefault(handle, self._new_queue_of(handle, True))
        queue = self._by_handle.get(handle)
        if queue is None:
            if len(self._by_handle) >= HANDLES:
                self._by_handle.clear()  # memory and launches hold the queues that are in use
            queue = self._by_handle.setdefault(handle, self._new_queue_of(handle, handle in LEGACY_STREAMS))
        return queue

    def _new_queue_of(self, handle: int, lasting: bool) -> Queue:
        return self._known(Queue(self, handle, self._driver.CUstream(handle), lasting))

    def new_queue(self, priority: int = 0) -> Queue:
        """Make a stream that is destroyed with its last reference."""
        flags = self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        self._tidy()
        with self._relaxed():
            if priority:
                native = _call("cuStreamCreateWithPriority", flags, priority)
            else:
                native = _call("cuStreamCreate", flags)
        return self._known(Queue(self, int(native), native, True, _Handle(self, native, self._driver.cuStreamDestroy)))

    def _known(self, queue: Queue) -> Queue:
        """List a queue, so that the pool finds its blocks when another queue needs them."""
        self._queues[id(queue)] = queue
        return queue

    def _all_queues(self) -> list[Queue]:
        return [queue for queue in (reference() for reference in self._queues.valuerefs()) if queue is not None]

    def synchronize(self, stream=None) -> None:
        """Wait for a stream. Errors of kernels are reported here."""
        queue = self.queue(stream)
        with self._entered():
            self.wait_for(queue)
        self._tidy()

    def _is_done(self, function: str, *arguments) -> bool:
        (result,) = getattr(self._driver, function)(*arguments)[:1]
        if result == self._driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        if result != self._driver.CUresult.CUDA_SUCCESS:
            raise _error(function, result, self.blame())
        return True

    def wait_for(self, queue: Queue) -> None:
        """Wait for a queue's present work, in the device's context."""
        self.do("cuStreamSynchronize", queue.native)

    def do(self, function: str, *arguments) -> None:
        """Call the driver, in the device's context; a failure may be that of an earlier launch. This is `_call` without
        its result, for calls that are made often.
        """
        (result,) = getattr(self._driver, function)(*arguments)[:1]
        if result.value:
            raise _error(function, result, self.blame())

    def blame(self) -> str:
        """Return the words that messages about asynchronous errors add."""
        return f"latest launch: {self._latest}"

    def mark(self, stream=None) -> Any:
        """Return the end of a stream: a lasting stream itself, whose end is recorded when a wait needs it, or an event
        that is recorded now.
        """
        queue = self.queue(stream)
        if queue.lasting:
            return queue
        self.is_capturing(queue)  # records the state, for `everything`
        return self._record(queue)

    def wait(self, stream, mark: Any) -> None:
        """Make a stream wait, on the device, for a mark of another.

        A stream that is being captured and one that is not cannot wait for each other, so that this returns without a
        wait: the library that captures must order such work. Graphs of `ptxrt.graph` wait when they are launched.
        """
        queue = self.queue(stream)
        if mark is None or mark is queue:
            return
        is_queue = isinstance(mark, Queue)
        source = mark if is_queue else mark.queue
        if source is not None and source.handle == queue.handle and source.backend is self:
            return
        if self.is_capturing(queue) != (is_queue and mark.backend.is_capturing(mark)):
            return
        event = mark.backend._record(mark) if is_queue else mark
        with self._entered():
            _call("cuStreamWaitEvent", queue.native, event.handle, 0)

    def gather(self, marks: tuple) -> tuple:
        """Return one event after all of these marks that are not reached, and the queues that are being captured."""
        waiting = [mark for mark in map(self.settle, marks) if not self.reached(mark)]
        events = [mark for mark in waiting if not isinstance(mark, Queue)]
        captured = tuple(mark for mark in waiting if isinstance(mark, Queue))
        if not events:
            return captured
        if self._gathering is None:
            self._gathering = self.new_queue()
        for event in events:
            self.wait(self._gathering, event)
        return self._record(self._gathering), *captured

    def _spare_event(self):
        try:
            return self._spare_events.popleft()
        except IndexError:
            return _call("cuEventCreate", self._driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)

    def _record(self, queue: Queue) -> Event:
        with self._entered():
            event = Event(self, self._spare_event(), False, queue)
            _call("cuEventRecord", event.handle, queue.native)
        return event

    def record(self, queue: Queue, event: Event | None) -> Event:
        """Record the end of a queue in an event that nothing waits for, or in a new one that does not refer to the
        queue. The device's context is current.
        """
        event = event or Event(self, self._spare_event(), False)
        self.do("cuEventRecord", event.handle, queue.native)
        return event

    def timed_event(self, queue: Queue) -> Event:
        """Record an event with a time at the end of a queue."""
        with self._entered():
            try:
                handle = self._spare_timers.popleft()
            except IndexError:
                handle = _call("cuEventCreate", self._driver.CUevent_flags.CU_EVENT_DEFAULT)
            event = Event(self, handle, True, queue)
            _call("cuEventRecord", handle, queue.native)
        return event

    # Graphs

    def is_capturing(self, queue: Queue) -> bool:
        """Return whether a stream is being captured, by any library."""
        with self._entered():
            return self._is_capturing(queue)

    def _is_capturing(self, queue: Queue) -> bool:
        """Do the same in the device's context."""
        result, *values = self._driver.cuStreamIsCapturing(queue.native)
        if result.value:
            if result.name == "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT":
                return False  # the legacy stream, while another stream is captured in global mode
            raise _error("cuStreamIsCapturing", result)
        capturing = values[0].value != 0  # CU_STREAM_CAPTURE_STATUS_NONE
        if not queue.lasting:
            (self._handles_captured.add if capturing else self._handles_captured.discard)(queue.handle)
        return capturing

    def capture(self, queue: Queue) -> "_Capture":
        """Capture the launches in a stream, in relaxed mode, so that other threads and the pool can continue."""
        mode = self._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        with self._entered():
            _call("cuStreamBeginCapture", queue.native, mode)
        self._captures.append(queue)
        return _Capture(self, queue)

    def captured(self, queue: Queue) -> None:
        """Note that a capture has ended."""
        self._captures.remove(queue)


class _Capture:
    """A stream that is being captured."""

    def __init__(self, backend: DriverBackend, queue: Queue):
        self._backend, self._queue = backend, queue

    def end(self, keep: bool) -> "_Graph | None":
        """End the capture and return the graph; None unless it is kept."""
        backend = self._backend
        with backend.entered():
            try:
                result, *values = backend.binding("cuStreamEndCapture")(self._queue.native)
            finally:
                backend.captured(self._queue)
            if result.value:
                if keep:
                    raise _error("cuStreamEndCapture", result, backend.blame())
                return None
            try:
                return _Graph(backend, _call("cuGraphInstantiate", values[0], 0)) if keep else None
            finally:
                if values[0]:
                    _call("cuGraphDestroy", values[0])


class _Graph(_Handle):
    """A graph that can be launched."""

    __slots__ = ()

    def __init__(self, backend: DriverBackend, handle):
        super().__init__(backend, handle, backend.binding("cuGraphExecDestroy"))

    def launch(self, queue: Queue) -> None:
        """Run it in a queue."""
        with self.backend.entered():
            self.backend.do("cuGraphLaunch", self.handle, queue.native)
