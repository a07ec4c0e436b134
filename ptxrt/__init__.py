"""Low-precision CUDA kernels for consumer Blackwell, run from NumPy on a GPU or on an emulator.

    import numpy as np, ptxrt
    q = ptxrt.quantize(np.random.randn(128, 256).astype(np.float32), "mxfp4")
    x = ptxrt.dequantize(q)

Names are imported on first use, so that `import ptxrt` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> the module that defines it.
_HOME = {
    "attention": "ops.attention",
    "merge": "ops.attention",
    "matmul": "ops.gemm",
    "quantize": "ops.quantize",
    "dequantize": "ops.quantize",
    "QuantizedArray": "ops.quantized",
    "Operand": "ops.operands",
    "quantize_operand": "ops.operands",
    "swizzle_scales": "ops.quantize",
    "unswizzle_scales": "ops.quantize",
    "DeviceArray": "array",
    "to_device": "array",
    "empty": "array",
    "compare": "accuracy",
    "Comparison": "accuracy",
    "load": "program",
    "machines": "selection",
    "using": "selection",
    "last_launches": "launch",
    "Stream": "stream",
    "Event": "stream",
    "memory_info": "stream",
    "trim_memory": "stream",
    "prepare": "prepared",
    "graph": "graphs",
    "trace": "tracing",
    "PtxError": "errors",
    "ArgumentError": "errors",
    "FileError": "errors",
    "BuildError": "errors",
    "AbiError": "errors",
    "LaunchError": "errors",
    "MachineError": "errors",
    "DriverError": "errors",
    "OutOfMemory": "errors",
    "EmulatorFault": "errors",
}

__all__ = ["kernels", "synchronize", *_HOME]

if TYPE_CHECKING:
    from .accuracy import Comparison, compare
    from .array import DeviceArray, empty, to_device
    from .selection import machines, using
    from .errors import (
        AbiError,
        ArgumentError,
        BuildError,
        DriverError,
        EmulatorFault,
        FileError,
        LaunchError,
        MachineError,
        OutOfMemory,
        PtxError,
    )
    from .graphs import graph
    from .launch import last_launches
    from .ops.attention import attention, merge
    from .ops.gemm import matmul
    from .ops.operands import Operand, quantize_operand
    from .ops.quantize import dequantize, quantize, swizzle_scales, unswizzle_scales
    from .ops.quantized import QuantizedArray
    from .prepared import prepare
    from .program import load
    from .stream import Event, Stream, memory_info, trim_memory
    from .tracing import trace


def kernels() -> "dict[str, Any]":
    """Every declared kernel by name, as a `ptxrt.kernel.Kernel`."""
    import_module(f"{__name__}.ops")
    return dict(import_module(f"{__name__}.kernel").REGISTRY)


def synchronize(stream=None) -> None:
    """Wait until everything in the stream is done on its machine; None is that of `with stream:`, else the library's own."""
    backend = getattr(stream, "backend", None) or import_module(f"{__name__}.selection").current()
    backend.synchronize(stream)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        from difflib import get_close_matches

        near = get_close_matches(name, __all__, 1, 0.6)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> "list[str]":
    return sorted({*globals(), *__all__})
