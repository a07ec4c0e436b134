"""A stand-in for `cuda.bindings.driver`: host memory for device memory, references for kernels.

It takes and returns what cuda-python does, so that driver.py and everything above it run without a GPU.
Launches decode the packed parameters as a device would and run the reference of the declared kernel.
"""

import ctypes
from math import prod

import cuda.bindings.driver as real
import numpy as np

import ptxrt
from ptxrt import ptx, units

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
    """The functions that driver.py uses. `fail` maps a function's name to the CUresult it gives."""

    CUresult = real.CUresult
    CUdevice_attribute = real.CUdevice_attribute
    CUfunction_attribute = real.CUfunction_attribute
    CUstream_flags = real.CUstream_flags
    CUevent_flags = real.CUevent_flags

    def __init__(self, capability=(9, 0), version=13000, devices=1):
        self.capability, self.version, self.devices = capability, version, devices
        self.fail = {}
        self.calls = []
        self.memory = {}
        self.primary = Handle()
        self.contexts = []
        self.programs = {}

    def __getattribute__(self, name):
        value = object.__getattribute__(self, name)
        if not name.startswith("cu"):
            return value

        def call(*arguments):
            self.calls.append((name, arguments))
            failing = self.fail.get(name)
            if isinstance(failing, Exception):
                raise failing
            if failing is not None:
                return failing, None
            result = value(*arguments)
            if isinstance(result, real.CUresult):
                return result, None
            values = result if isinstance(result, tuple) else () if result is None else (result,)
            return SUCCESS, *values

        return call

    def names(self):
        """The functions called, in order."""
        return [name for name, _ in self.calls]

    # What the driver says about itself and its devices.

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
        }[attribute]

    # Contexts.

    def cuDevicePrimaryCtxRetain(self, device):
        return self.primary

    def cuCtxGetCurrent(self):
        return self.contexts[-1] if self.contexts else 0

    def cuCtxPushCurrent(self, context):
        self.contexts.append(context)

    def cuCtxPopCurrent(self):
        return self.contexts.pop()

    def _in_context(self):
        assert int(self.contexts[-1]) == int(self.primary), "called without the context"

    # Modules.

    def cuModuleLoadData(self, image):
        self._in_context()
        for portable in (False, True):
            for unit in units.MODULES.glob("*.json"):
                binary = units.fatbin_path(unit.stem, portable)
                if binary.read_bytes() == image:
                    text = units.text_path(unit.stem, portable)
                    return Handle(text=ptx.parse(text.read_text(), text.name))
        if bytes(image).endswith(b"\0") and b".version" in image:
            return Handle(text=ptx.parse(image[:-1].decode(), "loaded"))
        raise AssertionError("an image of no module")

    def cuModuleGetFunction(self, module, name):
        assert isinstance(name, bytes)
        return Handle(entry=module.text.entries[name.decode()])

    def cuModuleGetFunctionCount(self, module):
        return len(module.text.entries)

    def cuModuleEnumerateFunctions(self, count, module):
        return [Handle(entry=entry) for entry in list(module.text.entries.values())[:count]]

    def cuFuncGetName(self, function):
        return function.entry.name.encode()

    def cuFuncGetParamInfo(self, function, index):
        params = function.entry.params
        if index >= len(params):
            return real.CUresult.CUDA_ERROR_INVALID_VALUE
        return params[index].offset, params[index].size

    def cuModuleGetGlobal(self, module, name):
        data = module.text.constant(name.decode())
        address = self.cuMemAlloc(len(data))[1]
        ctypes.memmove(address, data, len(data))
        return address, len(data)

    def cuFuncSetAttribute(self, function, attribute, value):
        assert attribute == real.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        function.shared_bytes = value

    # Memory.

    def cuMemAlloc(self, nbytes):
        self._in_context()
        assert nbytes > 0
        buffer = ctypes.create_string_buffer(nbytes + 255)
        address = -(-ctypes.addressof(buffer) // 256) * 256
        self.memory[address] = buffer
        return address

    def cuMemFree(self, address):
        self._in_context()
        del self.memory[address]

    def cuMemcpyHtoDAsync(self, to, host, nbytes, stream):
        ctypes.memmove(to, host, nbytes)

    def cuMemcpyDtoHAsync(self, host, address, nbytes, stream):
        ctypes.memmove(host, address, nbytes)

    def cuMemcpyDtoH(self, host, address, nbytes):
        ctypes.memmove(host, address, nbytes)

    # Streams and events.

    def cuStreamCreate(self, flags):
        assert flags == real.CUstream_flags.CU_STREAM_NON_BLOCKING
        return Handle()

    def cuStreamSynchronize(self, stream):
        assert isinstance(stream, int)

    def cuEventCreate(self, flags):
        return Handle()

    def cuEventRecord(self, event, stream):
        event.stream = stream

    def cuEventDestroy(self, event):
        pass

    def cuStreamWaitEvent(self, stream, event, flags):
        assert flags == 0

    # Launching.

    def cuLaunchKernel(self, function, gx, gy, gz, bx, by, bz, shared_bytes, stream, params, extra):
        self._in_context()
        assert params == 0 and shared_bytes <= getattr(function, "shared_bytes", 49152)
        words = (ctypes.c_void_p * 5).from_address(extra)
        assert (words[0], words[2], words[4]) == (1, 2, None)
        size = ctypes.c_size_t.from_address(words[3]).value
        assert size == function.entry.param_bytes
        space = ctypes.string_at(words[1], size)
        values = [space[p.offset : p.offset + p.size] for p in function.entry.params]
        if function.entry.name in self.programs:
            self.programs[function.entry.name](*values)
        else:
            self._run_reference(function.entry.name, values)

    def _run_reference(self, name, values):
        """Run the declared kernel's body on the arrays at the addresses that were passed."""
        kernel = max((k for k in ptxrt.kernels().values() if name.startswith(k.name)), key=lambda k: len(k.name))
        member = next((m for m in kernel.unions if name.endswith(f"_{m}")), None)
        by_name = dict(zip((p.name for p in kernel.parameters), values))
        axes = {axis: int.from_bytes(by_name[axis], "little") for axis in kernel.axes}
        arguments = {a.name: np.frombuffer(by_name[a.name], a.formats[0].dtype)[0] for a in kernel.scalars}
        for a in kernel.arrays:
            address = int.from_bytes(by_name[a.name], "little")
            dtype = (member if a.is_union else a.formats[0]).dtype
            arguments[a.name] = view(address, a.shape.sizes(axes), dtype) if address else None
        kernel.function(**arguments)


def view(address, shape, dtype):
    """The memory at an address as a NumPy array."""
    nbytes = prod(shape) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * nbytes).from_address(address), np.uint8).view(dtype).reshape(shape)
