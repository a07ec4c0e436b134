"""The Backend on the CUDA driver: native and portable machines. The only module that imports CUDA."""

from __future__ import annotations

import ctypes
import sys
import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from . import units
from .backend import Entry, Facts, Param
from .errors import AbiError, ArgumentError, DriverError, PtxError
from .files import module_kind
from .ptx import parse

# What toolkit 13.0 needs, and the driver that brings it.
MINIMUM_VERSION, MINIMUM_DRIVER = 13000, "580"
# Dynamic shared memory above this is only given to functions that ask for it.
DEFAULT_SHARED_BYTES = 48 * 1024
# cuLaunchKernel's `extra`: these words, each followed by a pointer (cuda.h).
LAUNCH_PARAM_END, LAUNCH_PARAM_BUFFER_POINTER, LAUNCH_PARAM_BUFFER_SIZE = 0, 1, 2

_LOST = "the context is lost: restart the process; ptxrt.using('emulator') may show the faulty access"
_HINTS = {
    "CUDA_ERROR_OUT_OF_MEMORY": "free device arrays, or split the call",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": (
        "the module holds no code for this GPU; native code is for sm_120 and sm_121, ptxrt.using('portable') runs from sm_80 on"
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
    """What CUDA there is. `absent`: no driver or no device at all; `problem`: why nothing can run, or empty."""

    devices: tuple[Device, ...] = ()
    version: str = ""
    problem: str = ""
    absent: bool = False


@lru_cache(maxsize=None)
def probe() -> Probe:
    """Look for a driver and its devices, once per process; raises nothing."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        if _driver_has_devices():
            return Probe(problem=f"there is a GPU, but cuda-python cannot be imported ({error}); pip install cuda-python")
        return Probe(problem=f"no CUDA device, and cuda-python cannot be imported ({error})", absent=True)
    try:
        result = driver.cuInit(0)[0]
    except RuntimeError:
        # cuda-python looks for the driver library at the first call, and what it raises is a kind of RuntimeError.
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
                problem=f"the driver supports CUDA {version}; driver {MINIMUM_DRIVER} or newer is needed (CUDA 13.0)", version=version
            )
        return Probe(tuple(_device(i) for i in range(_call("cuDeviceGetCount"))), version)
    except DriverError as error:
        return Probe(problem=str(error))


def _driver_has_devices() -> bool:
    """Whether the driver library by itself, without cuda-python, counts any device."""
    if sys.platform == "darwin":
        return False
    try:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        count = ctypes.c_int(0)
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
    """Call the driver and give its one result (or None); DriverError with the CUresult's name otherwise."""
    from cuda.bindings import driver

    result, *values = getattr(driver, function)(*arguments)
    if result != driver.CUresult.CUDA_SUCCESS:
        raise _error(function, result, about)
    return values[0] if values else None


def _error(function: str, result, about: str = "") -> DriverError:
    from cuda.bindings import driver

    name = getattr(result, "name", str(result))
    found, text = driver.cuGetErrorString(result)
    words = text.decode() if found == driver.CUresult.CUDA_SUCCESS and text else "unknown error"
    hint = f"; {_HINTS[name]}" if name in _HINTS else ""
    where = f" ({about})" if about else ""
    return DriverError(f"{function}{where} returned {name}: {words}{hint}", result=name, code=int(result), call=function)


def _parsed(data: bytes, name: str):
    """The parsed text, or None where it holds what this package's parser does not know: the GPU may run it all the same."""
    try:
        return parse(data.decode("utf-8", "replace"), name)
    except PtxError:
        return None


@dataclass(frozen=True)
class StreamMark:
    """The end of a stream when it was taken; without an event, of the library's own stream, which never ends."""

    stream: int
    event: Any = None


class DriverModule:
    """A loaded module: the entries of a text, or of a binary whose parameter types are unknown."""

    def __init__(self, backend: "DriverBackend", name: str, handle, entries: dict[str, Entry], text=None):
        self.name = name
        self.entries = entries
        self._backend, self._handle, self._text = backend, handle, text
        self._facts: dict[str, Facts] = {}

    def facts(self, entry: str) -> Facts:
        """The launch facts as the loaded code states them; AbiError where the text kept for it says otherwise."""
        if entry not in self._facts:
            facts = Facts.read(entry, self._backend.constant(self._handle, f"{entry}_launch"))
            if self._text is not None:
                written = Facts.read(entry, self._text.constant(f"{entry}_launch"))
                if written != facts:
                    raise AbiError(f"{entry}: the loaded code says {facts}, its text {written}; run `make`")
            self._facts[entry] = facts
        return self._facts[entry]


class DriverBackend:
    """One CUDA device by its primary context, with a stream of the library's own. Safe to use from any thread."""

    is_cuda = True

    def __init__(self, name: str, device: Device):
        from cuda.bindings import driver

        self.name = name
        self.device = device
        self._driver = driver
        self._modules: dict[str, DriverModule] = {}
        self._loading = Lock()
        self._shared_bytes: dict[int, int] = {}
        self._latest = "nothing yet"
        self._context = _call("cuDevicePrimaryCtxRetain", _call("cuDeviceGet", device.ordinal))
        with self._entered():
            stream = _call("cuStreamCreate", driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self._own_stream = int(stream)

    @contextmanager
    def _entered(self):
        """Make the device's context the calling thread's, and give the thread back what it had."""
        if int(_call("cuCtxGetCurrent")) == int(self._context):
            yield
            return
        _call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            _call("cuCtxPopCurrent")

    def describe(self) -> str:
        """Machine and device."""
        return f"{self.name}, {self.device.name}"

    # Modules

    def module(self, unit: str) -> DriverModule:
        """Load a compiled unit of this project once."""
        with self._loading:
            if unit not in self._modules:
                self._modules[unit] = self._load(unit)
            return self._modules[unit]

    def _load(self, unit: str) -> DriverModule:
        portable = self.name == "portable"
        binary = units.read(units.fatbin_path(unit, portable))
        text = parse(units.read(units.text_path(unit, portable)).decode(), f"{unit}.ptx")
        with self._entered():
            handle = _call("cuModuleLoadData", binary, about=f"{unit}, {self.name}")
            entries = {name: Entry.from_text(f, self._function(handle, name)) for name, f in text.entries.items()}
        # The portable text is that of compute_90: code for other devices may have its own launch facts.
        same_target = not portable or self.device.capability == (9, 0)
        return DriverModule(self, unit, handle, entries, text if same_target else None)

    def open(self, path: Path) -> DriverModule:
        """Load any PTX, fatbin or cubin."""
        path = Path(path)
        data = path.read_bytes()
        kind = module_kind(path, data)
        text = _parsed(data, path.name) if kind == "ptx" else None
        image = data.rstrip(b"\0") + b"\0" if kind == "ptx" else data
        with self._entered():
            handle = _call("cuModuleLoadData", image, about=path.name)
            if text is not None:
                entries = {name: Entry.from_text(f, self._function(handle, name)) for name, f in text.entries.items()}
            else:
                count = _call("cuModuleGetFunctionCount", handle)
                functions = _call("cuModuleEnumerateFunctions", count, handle) if count else []
                entries = {entry.name: entry for entry in map(self._binary_entry, functions)}
        return DriverModule(self, path.name, handle, entries, text)

    def _function(self, module, name: str):
        return _call("cuModuleGetFunction", module, name.encode(), about=name)

    def _binary_entry(self, function) -> Entry:
        """An entry whose parameters only the binary tells: offsets and sizes, no types."""
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
        return Entry(_call("cuFuncGetName", function).decode(), tuple(params), last.offset + last.size, function)

    def _param_info(self, function, index: int) -> tuple[int, int]:
        result, *values = self._driver.cuFuncGetParamInfo(function, index)
        if result != self._driver.CUresult.CUDA_SUCCESS:
            raise _error("cuFuncGetParamInfo", result)
        return int(values[0]), int(values[1])

    def constant(self, module, name: str) -> bytes:
        """The bytes of a variable in a loaded module; AbiError where it has none of that name."""
        with self._entered():
            result, *values = self._driver.cuModuleGetGlobal(module, name.encode())
            if result == self._driver.CUresult.CUDA_ERROR_NOT_FOUND:
                raise AbiError(f"the loaded module has no constant {name}; declare the entry with KERNEL() and run `make`")
            if result != self._driver.CUresult.CUDA_SUCCESS:
                raise _error("cuModuleGetGlobal", result, name)
            host = np.empty(int(values[1]), np.uint8)
            _call("cuMemcpyDtoH", host.ctypes.data, values[0], host.nbytes, about=name)
        return host.tobytes()

    # Memory

    def alloc(self, nbytes: int) -> int:
        """New device memory; DriverError (CUDA_ERROR_OUT_OF_MEMORY) leaves everything else usable."""
        with self._entered():
            return int(_call("cuMemAlloc", nbytes, about=f"{nbytes} bytes"))

    def free(self, address: int) -> None:
        """Free memory; the driver waits for the work that may use it."""
        with self._entered():
            _call("cuMemFree", address)

    def write(self, address: int, host: np.ndarray, stream=None) -> None:
        """Copy a contiguous array to the device and wait, so that `host` may change."""
        handle = self.stream_handle(stream)
        with self._entered():
            _call("cuMemcpyHtoDAsync", address, host.ctypes.data, host.nbytes, handle, about=self._blame())
            self._wait_for(handle)

    def read(self, address: int, host: np.ndarray, stream=None) -> None:
        """Fill a contiguous array from the device and wait for it."""
        handle = self.stream_handle(stream)
        with self._entered():
            _call("cuMemcpyDtoHAsync", host.ctypes.data, address, host.nbytes, handle, about=self._blame())
            self._wait_for(handle)

    # Launching

    def launch(self, entry: Entry, grid, block, shared_bytes: int, params: bytes, stream=None) -> None:
        """Launch with the packed parameters as they are."""
        handle = self.stream_handle(stream)
        # The driver copies the parameters before it returns; these locals keep them alive until then.
        buffer = ctypes.create_string_buffer(params, len(params)) if params else None
        size = ctypes.c_size_t(len(params))
        words = (ctypes.c_void_p * 5)(
            LAUNCH_PARAM_BUFFER_POINTER,
            ctypes.addressof(buffer) if params else None,
            LAUNCH_PARAM_BUFFER_SIZE,
            ctypes.addressof(size),
            LAUNCH_PARAM_END,
        )
        extra = ctypes.addressof(words) if params else 0
        sizes = f"{entry.name}, grid {tuple(grid)}, block {tuple(block)}, {shared_bytes} bytes of shared memory"
        with self._entered():
            self._allow_shared(entry, shared_bytes)
            _call("cuLaunchKernel", entry.handle, *grid, *block, shared_bytes, handle, 0, extra, about=sizes)
        self._latest = entry.name

    def _allow_shared(self, entry: Entry, shared_bytes: int) -> None:
        """Raise the function's limit of dynamic shared memory where the launch needs it."""
        key = int(entry.handle)
        if shared_bytes <= max(DEFAULT_SHARED_BYTES, self._shared_bytes.get(key, 0)):
            return
        device = _call("cuDeviceGet", self.device.ordinal)
        which = self._driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        limit = _call("cuDeviceGetAttribute", which, device)
        about = f"{entry.name} needs {shared_bytes} bytes of shared memory, {self.device.name} gives a block at most {limit}"
        which = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _call("cuFuncSetAttribute", entry.handle, which, shared_bytes, about=about)
        self._shared_bytes[key] = shared_bytes

    # Streams

    def stream_handle(self, stream=None) -> int:
        """The handle of a stream: the library's own for None, integers as they are, else `__cuda_stream__`."""
        if stream is None:
            return self._own_stream
        if isinstance(stream, (int, np.integer)) and not isinstance(stream, bool) and stream >= 0:
            return int(stream)
        protocol = getattr(stream, "__cuda_stream__", None)
        if protocol is None:
            raise ArgumentError(f"stream is {stream!r}; pass None, an integer handle or an object with __cuda_stream__")
        _version, handle = protocol() if callable(protocol) else protocol
        return int(handle)

    def synchronize(self, stream=None) -> None:
        """Wait for a stream; what a kernel did wrong shows here."""
        handle = self.stream_handle(stream)
        with self._entered():
            self._wait_for(handle)

    def _wait_for(self, handle: int) -> None:
        _call("cuStreamSynchronize", handle, about=self._blame())

    def _blame(self) -> str:
        return f"latest launch: {self._latest}"

    def mark(self, stream=None) -> StreamMark:
        """The end of a stream; of a stream that may be destroyed later an event is kept."""
        handle = self.stream_handle(stream)
        return StreamMark(handle, None if handle == self._own_stream else self._record(handle))

    def wait(self, stream, mark: StreamMark | None) -> None:
        """Let a stream wait, on the device, for a mark of another."""
        handle = self.stream_handle(stream)
        if mark is None or mark.stream == handle:
            return
        event = mark.event or self._record(mark.stream)
        with self._entered():
            _call("cuStreamWaitEvent", handle, event.handle, 0)

    def _record(self, handle: int) -> "_Event":
        with self._entered():
            event = _Event(_call("cuEventCreate", self._driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))
            _call("cuEventRecord", event.handle, handle)
        return event


class _Event:
    """A CUDA event, destroyed when nothing refers to it; the driver keeps what still waits for it."""

    def __init__(self, handle):
        self.handle = handle
        weakref.finalize(self, _destroy_event, handle).atexit = False


def _destroy_event(handle) -> None:
    from cuda.bindings import driver

    driver.cuEventDestroy(handle)
