"""Low-precision CUDA kernels for consumer Blackwell, run from NumPy on a GPU or on an emulator.

    import numpy as np, ptxrt
    q = ptxrt.quantize(np.random.randn(128, 256).astype(np.float32), "mxfp4")
    x = ptxrt.dequantize(q)

Names are imported on first use, so that `import ptxrt` is cheap.
"""

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .provided import provide as _provide

__version__ = "0.2.0"

# Public name -> the module that defines it.
_HOME = {
    "attention": "ops.attention",
    "merge": "ops.attention",
    "matmul": "ops.gemm",
    "rmsnorm": "ops.produce",
    "layernorm": "ops.produce",
    "swiglu": "ops.produce",
    "gelu": "ops.produce",
    "take_rows": "ops.rows",
    "mean_rows": "ops.rows",
    "argmax_rows": "ops.rows",
    "rope_table": "ops.rotation",
    "rope": "ops.rotation",
    "append_qkv": "ops.append_qkv",
    "KVCache": "ops.cache",
    "attention_paged": "ops.paged",
    "block_table_from_csr": "ops.cache",
    "slots_of": "ops.cache",
    "matmul_grouped": "ops.gemm",
    "interleave_rows": "ops.gemm",
    "route": "ops.route",
    "combine": "ops.route",
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
    "PageLocked": "page_locked",
    "zeros": "copies",
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
    "Unsupported": "errors",
    "PtxSyntaxError": "errors",
}
# Submodules for kernels of other compilers.
_EXTRAS = ("triton", "numba")

__all__ = ["kernels", "synchronize", *_EXTRAS, *_HOME]

if TYPE_CHECKING:
    from . import numba as numba
    from . import triton as triton

    # "X as X" tells type checkers that the module re-exports X.
    from .accuracy import Comparison as Comparison
    from .accuracy import compare as compare
    from .array import DeviceArray as DeviceArray
    from .array import empty as empty
    from .array import to_device as to_device
    from .copies import zeros as zeros
    from .errors import AbiError as AbiError
    from .errors import ArgumentError as ArgumentError
    from .errors import BuildError as BuildError
    from .errors import DriverError as DriverError
    from .errors import EmulatorFault as EmulatorFault
    from .errors import FileError as FileError
    from .errors import LaunchError as LaunchError
    from .errors import MachineError as MachineError
    from .errors import OutOfMemory as OutOfMemory
    from .errors import PtxError as PtxError
    from .errors import PtxSyntaxError as PtxSyntaxError
    from .errors import Unsupported as Unsupported
    from .graphs import graph as graph
    from .kernel import Kernel
    from .launch import last_launches as last_launches
    from .ops.append_qkv import append_qkv as append_qkv
    from .ops.attention import attention as attention
    from .ops.attention import merge as merge
    from .ops.cache import KVCache as KVCache
    from .ops.cache import block_table_from_csr as block_table_from_csr
    from .ops.cache import slots_of as slots_of
    from .ops.gemm import interleave_rows as interleave_rows
    from .ops.gemm import matmul as matmul
    from .ops.gemm import matmul_grouped as matmul_grouped
    from .ops.operands import Operand as Operand
    from .ops.operands import quantize_operand as quantize_operand
    from .ops.paged import attention_paged as attention_paged
    from .ops.produce import gelu as gelu
    from .ops.produce import layernorm as layernorm
    from .ops.produce import rmsnorm as rmsnorm
    from .ops.produce import swiglu as swiglu
    from .ops.quantize import dequantize as dequantize
    from .ops.quantize import quantize as quantize
    from .ops.quantize import swizzle_scales as swizzle_scales
    from .ops.quantize import unswizzle_scales as unswizzle_scales
    from .ops.quantized import QuantizedArray as QuantizedArray
    from .ops.rotation import rope as rope
    from .ops.rotation import rope_table as rope_table
    from .ops.route import combine as combine
    from .ops.route import route as route
    from .ops.rows import argmax_rows as argmax_rows
    from .ops.rows import mean_rows as mean_rows
    from .ops.rows import take_rows as take_rows
    from .page_locked import PageLocked as PageLocked
    from .prepared import prepare as prepare
    from .program import load as load
    from .selection import machines as machines
    from .selection import using as using
    from .stream import Event as Event
    from .stream import Stream as Stream
    from .stream import memory_info as memory_info
    from .stream import trim_memory as trim_memory
    from .tracing import trace as trace
    from .typing import StreamLike


_provide("copies", lambda: import_module(f"{__name__}.copies"))


def kernels() -> "dict[str, Kernel]":
    """Return every declared kernel by name, as a `ptxrt.kernel.Kernel`."""
    import_module(f"{__name__}.ops")
    return dict(import_module(f"{__name__}.kernel").REGISTRY)


def synchronize(stream: "StreamLike" = None) -> None:
    """Wait until everything in a stream is done on its machine.

    None is the stream of `with stream:`, else the library's own. ArgumentError while `graph` or `prepare` records.
    """
    _module("backend").refuse_recording("synchronize waits for the device")
    backend = getattr(stream, "backend", None) or _module("selection").current()
    backend.synchronize(stream)


@cache
def _module(name: str) -> Any:
    """Return a module of the package; an import in each call would take longer than the driver's part of a wait."""
    return import_module(f"{__name__}.{name}")


if not TYPE_CHECKING:  # hidden from type checkers, so that they report unknown names

    def __getattr__(name: str) -> Any:
        if name in _EXTRAS:
            return import_module(f"{__name__}.{name}")
        if name not in _HOME:
            from difflib import get_close_matches

            near = get_close_matches(name, __all__, 1, 0.6)
            raise AttributeError(
                f"module {__name__!r} has no attribute {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
            )
        value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> "list[str]":
    return sorted({*globals(), *__all__})
