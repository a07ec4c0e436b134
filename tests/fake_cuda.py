"""A stand-in for `cuda.bindings.driver`: host memory in place of device memory, references in place of kernels.

It has the signatures of cuda-python, so that driver.py and everything above it run without a GPU. A launch decodes its
packed parameters and runs the reference of the declared kernel. Streams run as late as possible: an operation in a
stream runs only when the host or an awaited event requires it, so that a missing dependency gives wrong numbers.
"""

import ctypes
import threading
from math import prod
from types import SimpleNamespace

import cuda.bindings.driver as real
import numpy as np

import ptxrt
from ptxrt import ptx, units
from ptxrt.declaration import half_of

SUCCESS = real.CUresult.CUDA_SUCCESS


class Handle:
    """An opaque handle that cuda-python would convert with int()."""

    count = 1000

    def __init__(self, **facts):
        Handle.count += 1
        self.number = Handle.count
        self.__dict__.update(facts)

    def __int__(self):
        return self.number


class FakeCuda:
    """The functions that driver.py uses. `fail` maps a function's name to the CUresult that it returns."""

    CUresult = real.CUresult
    CUdevice_attribute = real.CUdevice_attribute
    CUfunction_attribute = real.CUfunction_attribute
    CUstream_flags = real.CUstream_flags
    CUevent_flags = real.CUevent_flags
    CUpointer_attribute = real.CUpointer_attribute
    CUstreamCaptureMode = real.CUstreamCaptureMode
    CUstreamCaptureStatus = real.CUstreamCaptureStatus
    CUlaunchAttributeID = real.CUlaunchAttributeID
    CUlaunchAttribute = CUlaunchAttributeValue = CUlaunchConfig = SimpleNamespace
    CUstream = staticmethod(int)

    def __init__(self, capability=(9, 0), version=13000, devices=1, total=1 << 30):
        self.capability, self.version, self.devices = capability, version, devices
        self.fail = {}
        self.calls = []
        self.memory = {}
        self.owners = {}
        self.total = total
        self.primaries = [Handle(device=i) for i in range(devices)]
        self.primary = self.primaries[0]
        self.local = threading.local()
        self.one_at_a_time = threading.RLock()
        self.streams = {}
        self.homes = {}  # stream -> its context, for streams created here
        self.captures = {}
        self.ahead = {}  # stream -> the entry of its latest operation, None if that is no launch
        self.programs = {}
        self.modules = set()
        self.destroyed = set()  # streams
        self.page_locked = []

    @property
    def contexts(self):
        """The calling thread's stack of contexts."""
        return self.local.__dict__.setdefault("contexts", [])

    def __getattribute__(self, name):
        value = object.__getattribute__(self, name)
        if not name.startswith("cu"):
            return value

        def call(*arguments):
            if name == "cuStreamWaitEvent":  # keep the stream: the event may be recorded again
                stream, event, flags = arguments
                self.calls.append((name, (int(stream), SimpleNamespace(stream=event.stream), flags)))
            else:
                self.calls.append((name, arguments))
            failing = self.fail.get(name)
            if isinstance(failing, Exception):
                raise failing
            if failing is not None:
                return failing, None
            with self.one_at_a_time:  # calls are atomic among threads
                result = value(*arguments)
            if isinstance(result, real.CUresult):
                return result, None
            values = result if isinstance(result, tuple) else () if result is None else (result,)
            return SUCCESS, *values

        return call

    def names(self):
        """The functions called, in order."""
        return [name for name, _ in self.calls]

    # Facts of the driver and its devices.

    def cuInit(self, flags):
        assert flags == 0

    def cuGetErrorString(self, result):
        return b"words of the driver"

    def cuDriverGetVersion(self):
        return self.version

    def cuDeviceGetCount(self):
        return self.devices

    def cuDeviceGet(self, ordinal):
        return ordinal

    def cuDeviceGetName(self, length, device):
        return b"Fake GPU".ljust(length, b"\0")

    def cuDeviceGetAttribute(self, attribute, device):
        which = self.CUdevice_attribute
        return {
            which.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: self.capability[0],
            which.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: self.capability[1],
            which.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: 101376,
            which.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: 2,
            which.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: 8192,
        }[attribute]

    # Contexts.

    def cuDevicePrimaryCtxRetain(self, device):
        return self.primaries[device]

    def cuCtxGetCurrent(self):
        return self.contexts[-1] if self.contexts else 0

    def cuCtxSetCurrent(self, context):
        self.contexts[-1:] = [context]

    def cuCtxPushCurrent(self, context):
        self.contexts.append(context)

    def cuCtxPopCurrent(self):
        return self.contexts.pop()

    def _in_context(self):
        assert self.contexts and self.contexts[-1] in self.primaries, "called without the context"
        return self.contexts[-1]

    def cuCtxSynchronize(self):
        self._in_context()
        for stream in list(self.streams):
            self._run(stream)

    def cuCtxRecordEvent(self, context, event):
        assert context in self.primaries
        if self.captures:  # cuda.h: this ends all captures of the context
            self.captures = {stream: None for stream in self.captures}
            return real.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
        event.stream, event.points = (
            None,
            {stream: len(done) + len(todo) for stream, (done, todo) in self.streams.items()},
        )

    def cuThreadExchangeStreamCaptureMode(self, mode):
        before = self.local.__dict__.get("mode", real.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)
        self.local.mode = mode
        return before

    # Modules.

    def cuModuleLoadData(self, image):
        self._in_context()
        is_fatbin = image[:4] == b"\x50\xed\x55\xba"  # a fatbin may hold text uncompressed
        if not is_fatbin and bytes(image).endswith(b"\0") and b".version" in image[:400]:
            return self._loaded(ptx.parse(image[:-1].decode(), "loaded"))
        for portable in (False, True):
            for unit in units.MODULES.glob("*.json"):
                binary = units.fatbin_path(unit.stem, portable)
                if binary.read_bytes() == image:
                    text = units.text_path(unit.stem, portable)
                    return self._loaded(ptx.parse(text.read_text(), text.name))
        raise AssertionError("an image of no module")

    def _loaded(self, text):
        module = Handle(text=text, loaded=True)
        self.modules.add(module)
        return module

    def cuModuleUnload(self, module):
        self._in_context()
        for done, todo in self.streams.values():
            assert not any(getattr(action, "module", None) is module for action in todo), "unloaded before it has run"
        self.modules.remove(module)
        module.loaded = False

    def cuModuleGetFunction(self, module, name):
        assert isinstance(name, bytes)
        return Handle(entry=module.text.entries[name.decode()], module=module)

    def cuModuleGetFunctionCount(self, module):
        return len(module.text.entries)

    def cuModuleEnumerateFunctions(self, count, module):
        return [Handle(entry=entry, module=module) for entry in list(module.text.entries.values())[:count]]

    def cuFuncGetName(self, function):
        return function.entry.name.encode()

    def cuFuncGetParamInfo(self, function, index):
        params = function.entry.params
        if index >= len(params):
            return real.CUresult.CUDA_ERROR_INVALID_VALUE
        return params[index].offset, params[index].size

    def cuFuncSetAttribute(self, function, attribute, value):
        assert attribute == real.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        function.shared_bytes = value

    # Memory.

    def cuMemAlloc(self, nbytes):
        context = self._in_context()
        assert nbytes > 0
        if nbytes + sum(len(buffer) - 511 for buffer in self.memory.values()) > self.total:
            return real.CUresult.CUDA_ERROR_OUT_OF_MEMORY
        buffer = ctypes.create_string_buffer(b"\xa5" * (nbytes + 511), nbytes + 511)
        address = -(-ctypes.addressof(buffer) // 512) * 512
        self.memory[address] = buffer
        self.owners[address] = context.device
        return address

    def cuMemFree(self, address):
        self._in_context()
        self.cuCtxSynchronize()
        del self.memory[address]

    def cuMemHostAlloc(self, nbytes, flags):
        self._in_context()
        assert nbytes > 0 and not flags
        self.page_locked.append(ctypes.create_string_buffer(b"\xa5" * nbytes, nbytes))
        return ctypes.addressof(self.page_locked[-1])

    def cuMemFreeHost(self, address):
        (buffer,) = [buffer for buffer in self.page_locked if ctypes.addressof(buffer) == address]
        self.page_locked.remove(buffer)
        ctypes.memset(buffer, 0xC3, len(buffer))

    def cuMemGetInfo(self):
        self._in_context()
        return self.total - sum(len(buffer) - 511 for buffer in self.memory.values()), self.total

    def library_pointer_attribute(self, target, attribute, address):
        """cuPointerGetAttribute of the C library, which writes its result through a pointer."""
        assert attribute == int(real.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
        bases = [base for base in self.owners if base <= address.value]
        if not bases:
            return int(real.CUresult.CUDA_ERROR_INVALID_VALUE)
        target._obj.value = self.owners[max(bases)]
        return 0

    def cuMemcpyHtoDAsync(self, to, host, nbytes, stream):
        self._put(stream, lambda: ctypes.memmove(to, host, nbytes))

    def cuMemcpyDtoHAsync(self, host, address, nbytes, stream):
        self._put(stream, lambda: ctypes.memmove(host, address, nbytes))

    def cuMemcpyDtoDAsync(self, to, address, nbytes, stream):
        self._put(stream, lambda: ctypes.memmove(to, address, nbytes))

    def cuMemcpyPeerAsync(self, to, to_context, address, context, nbytes, stream):
        assert to_context in self.primaries and context in self.primaries
        self._put(stream, lambda: ctypes.memmove(to, address, nbytes))

    def cuMemcpyDtoH(self, host, address, nbytes):
        ctypes.memmove(host, address, nbytes)

    # Streams and events: each stream is (operations done, operations to do); an event is a position in such a list.

    def _put(self, stream, action, entry=None):
        stream = int(stream)
        self.ahead[stream] = entry
        assert stream not in self.destroyed, "a stream that is destroyed"
        if stream in self.captures:
            self.captures[stream].append(action)
        else:
            self.streams.setdefault(stream, ([], []))[1].append(action)

    def _run(self, stream, upto=None):
        """Run the pending operations of a stream, up to a position."""
        done, todo = self.streams.setdefault(int(stream), ([], []))
        while todo and (upto is None or len(done) < upto):
            action = todo.pop(0)
            done.append(None)
            action()

    def _reach(self, points):
        for stream, upto in points.items():
            self._run(stream, upto)

    def cuStreamCreate(self, flags):
        assert flags == real.CUstream_flags.CU_STREAM_NON_BLOCKING
        handle = Handle()
        self.homes[int(handle)] = self._in_context()
        return handle

    def cuStreamCreateWithPriority(self, flags, priority):
        return self.cuStreamCreate(flags)[1]

    def cuStreamDestroy(self, stream):
        self.destroyed.add(int(stream))

    def cuStreamSynchronize(self, stream):
        assert int(stream) not in self.captures, "a wait for a stream that is captured"
        self._run(stream)

    def cuStreamQuery(self, stream):
        if self.streams.get(int(stream), ((), ()))[1]:
            return real.CUresult.CUDA_ERROR_NOT_READY

    def cuEventCreate(self, flags):
        return Handle(timed=flags == real.CUevent_flags.CU_EVENT_DEFAULT, home=self._in_context())

    def cuEventRecord(self, event, stream):
        stream = int(stream)
        assert stream not in self.captures, "an event in a capture"
        if self.homes.get(stream, event.home) is not event.home:
            return real.CUresult.CUDA_ERROR_INVALID_HANDLE
        done, todo = self.streams.setdefault(stream, ([], []))
        event.stream, event.points = stream, {stream: len(done) + len(todo)}
        self.ahead[stream] = None

    def cuEventDestroy(self, event):
        pass

    def cuEventQuery(self, event):
        for stream, upto in event.points.items():
            if len(self.streams.get(stream, ((), ()))[0]) < upto:
                return real.CUresult.CUDA_ERROR_NOT_READY

    def cuEventSynchronize(self, event):
        self._reach(event.points)

    def cuEventElapsedTime(self, start, stop):
        assert start.timed and stop.timed
        return 0.25

    def cuStreamWaitEvent(self, stream, event, flags):
        assert flags == 0 and int(stream) not in self.captures
        points = dict(event.points)
        self._put(stream, lambda: self._reach(points))

    # Graphs.

    def cuStreamIsCapturing(self, stream):
        assert int(stream) not in self.destroyed, "a stream that is destroyed"
        status = self.CUstreamCaptureStatus
        active = int(stream) in self.captures
        return status.CU_STREAM_CAPTURE_STATUS_ACTIVE if active else status.CU_STREAM_CAPTURE_STATUS_NONE

    def cuStreamBeginCapture(self, stream, mode):
        assert mode == self.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self.captures[int(stream)] = []

    def cuStreamEndCapture(self, stream):
        actions = self.captures.pop(int(stream))
        return real.CUresult.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED if actions is None else Handle(actions=actions)

    def cuGraphInstantiate(self, graph, flags):
        return Handle(actions=graph.actions)

    def cuGraphDestroy(self, graph):
        pass

    def cuGraphExecDestroy(self, graph):
        pass

    def cuGraphLaunch(self, graph, stream):
        for action in graph.actions:
            self._put(stream, action)

    # Launching.

    def cuLaunchKernel(self, function, gx, gy, gz, bx, by, bz, shared_bytes, stream, params, extra):
        return self._launch(function, (gx, gy, gz), shared_bytes, stream, params, extra)

    def _launch(self, function, blocks, shared_bytes, stream, params, extra):
        if not self.contexts or self.contexts[-1] not in self.primaries:
            return real.CUresult.CUDA_ERROR_INVALID_CONTEXT
        if self.captures.get(int(stream), ()) is None:
            return real.CUresult.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
        assert params == 0 and shared_bytes <= getattr(function, "shared_bytes", 49152)
        words = (ctypes.c_void_p * 5).from_address(extra)
        assert (words[0], words[2], words[4]) == (1, 2, None)
        size = ctypes.c_size_t.from_address(words[3]).value
        assert size == function.entry.param_bytes and function.module.loaded
        space = ctypes.string_at(words[1], size)
        values = [space[p.offset : p.offset + p.size] for p in function.entry.params]

        def action():
            assert action.module.loaded
            if function.entry.name in self.programs:
                self.programs[function.entry.name](*values)
            else:
                self._run_reference(function.entry.name, blocks, values)

        action.module = function.module
        self._put(stream, action, function.entry)

    def cuLaunchKernelEx(self, config, function, params, extra):
        (attribute,) = config.attrs
        early = real.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        assert config.numAttrs == 1 and attribute.id == early
        assert attribute.value.programmaticStreamSerializationAllowed == 1 and function.entry.name
        stream = int(config.hStream)
        assert stream in self.captures or self.ahead.get(stream), "an early launch that follows no launch"
        sizes = [getattr(config, part + axis) for part in ("gridDim", "blockDim") for axis in "XYZ"]
        assert all(size > 0 for size in sizes)
        return self._launch(function, sizes[:3], config.sharedMemBytes, config.hStream, params, extra)

    def _check_inside(self, address, array, what):
        """Check that an array which begins inside an allocation also ends inside it."""
        first, last = np.lib.array_utils.byte_bounds(array)
        for base, buffer in self.memory.items():
            end = ctypes.addressof(buffer) + len(buffer)
            assert not base <= address < end or (base <= first and last <= end), f"{what} reaches beyond its allocation"

    def _run_reference(self, name, blocks, values):
        """Run the declared kernel's Python body on the arrays at the addresses passed."""
        name = name.removesuffix(half_of(""))
        kernel = max((k for k in ptxrt.kernels().values() if name.startswith(k.name)), key=lambda k: len(k.name))
        member = next((m for m in kernel.unions if name.endswith(f"_{m}")), None)
        given = {(p.kind, p.name, p.dim): value for p, value in zip(kernel.parameters, values)}
        unit = max((u for u in kernel.units if name.startswith(u.name)), key=lambda u: len(u.name))
        # Kernels of filled axes receive how much of the variant's size is used.
        axes = unit.variant | {
            axis: int.from_bytes(value, "little") for (kind, axis, _), value in given.items() if kind == "axis"
        }
        shaped = {axis for a in kernel.arrays for axis in a.shape.axes}
        axes.update({axis: size(axes) for axis, size in kernel.derived.items() if axis in shaped - axes.keys()})
        # An axis of the grid alone: as many blocks of one as the other axes of its word leave.
        for word, count in zip(kernel.grid, blocks):
            for axis in set(word.axes) & set(kernel.body_axes) - axes.keys():
                axes[axis] = int(count) // prod(axes[other] for other in word.axes if other != axis)
        arguments = {a.name: np.frombuffer(given["scalar", a.name, 0], a.formats[0].dtype)[0] for a in kernel.scalars}
        for a in kernel.arrays:
            address = int.from_bytes(given["array", a.name, 0], "little")
            dtype = (member if a.is_union else a.formats[0]).dtype
            strides = [int.from_bytes(given["stride", a.name, i], "little") for i in range(len(a.strides))]
            arguments[a.name] = view(address, a.shape.sizes(axes), dtype, strides) if address else None
            if address:
                self._check_inside(address, arguments[a.name], f"{kernel.name}: {a.name} {a.shape.sizes(axes)}")
        kernel.function(**arguments, **{axis: axes[axis] for axis in kernel.body_axes})


def view(address, shape, dtype, strides=()):
    """The memory at an address as a NumPy array. `strides` are those of the first axes, in elements; the other axes are
    row-major."""
    itemsize = np.dtype(dtype).itemsize
    strides = [*strides, *(prod(shape[i + 1 :]) for i in range(len(strides), len(shape)))]
    extent = sum((size - 1) * stride for size, stride in zip(shape, strides)) + 1 if 0 not in shape else 0
    elements = np.frombuffer((ctypes.c_char * (extent * itemsize)).from_address(address), np.uint8).view(dtype)
    return np.lib.stride_tricks.as_strided(elements, shape, [stride * itemsize for stride in strides])
