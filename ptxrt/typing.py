"""The types of the public functions' arguments, for readers and type checkers: arrays, names, and options.

from ptxrt.typing import Array, BlockFormatName
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, Union

import numpy as np
from numpy.typing import DTypeLike, NDArray

if TYPE_CHECKING:
    from .array import DeviceArray
    from .backend import Queue
    from .ops.quantized import QuantizedArray
    from .stream import Stream

# Formats, in this order: of `quantize`, of operands of attention, of the operands of its two products, of 16 bits, and
# of the quantized results of other functions.
BlockFormatName = Literal["mxfp4", "mxfp8", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "nvfp4"]
OperandFormatName = Literal["mxfp8", "mxfp4", "nvfp4", "bf16"]
AttentionFormatName = Literal["bf16", "f16", "mxfp8", "mxfp4", "nvfp4"]
FloatFormatName = Literal["bf16", "f16"]
ProducedFormatName = Literal["mxfp8", "mxfp4", "nvfp4"]
Rounding = Literal["once", "16"]
RotationStyle = Literal["halves", "pairs"]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "swiglu"]
ScaleRule = Literal["floor", "ceil", "rceil", "even", "amax", "four_over_six"]
ScaleLayout = Literal["linear", "128x4"]
Role = Literal["q", "k", "v"]
AxisOrder = Literal["bhsd", "bshd"]
MachineName = Literal["native", "portable", "emulator"]


class SupportsDLPack(Protocol):
    """An array of a library that supports DLPack, such as PyTorch, JAX and CuPy."""

    def __dlpack__(self, *, stream: Any = ...) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, Any]: ...


class SupportsCudaArray(Protocol):
    """An array with the CUDA array interface, such as Numba's."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


class SupportsCudaStream(Protocol):
    """A stream of a library with CUDA's stream protocol."""

    def __cuda_stream__(self) -> tuple[int, int]: ...


HostArray = NDArray[Any]
# The types that functions take as an array. Lists are not among them, because they have no dtype.
Array = Union[HostArray, "DeviceArray", SupportsDLPack, SupportsCudaArray]
WholeNumbers = Union[Array, Sequence[int]]
Numbers = Union[Array, Sequence[float]]
# A stream of this library or of another one, or a handle; None is that of `with stream:`, else the library's own.
StreamLike = Union["Stream", "Queue", SupportsCudaStream, int, None]
Number = Union[float, np.floating[Any], np.integer[Any]]
Flag = Union[bool, np.bool_]


class AttentionOptions(TypedDict, total=False):
    """Keyword arguments of `attention` except `return_lse` and `normalize`, which decide the type of its result."""

    qk: AttentionFormatName | None
    pv: AttentionFormatName | None
    quantize: Literal["in_kernel"] | None
    causal: Flag
    window: tuple[int | None, int | None] | None
    scale: Number | None
    softcap: Number
    mask: Array | None
    sinks: Numbers | None
    key_lengths: WholeNumbers | None
    cu_seqlens_q: WholeNumbers | None
    cu_seqlens_k: WholeNumbers | None
    smooth_k: Flag | Literal["auto"]
    smooth_q: Flag
    layout: AxisOrder
    out_dtype: DTypeLike | None
    out: Array | None
    stream: StreamLike


class PagedOptions(TypedDict, total=False):
    """Keyword arguments of `attention_paged` except `return_lse` and `normalize`, which decide its result's type."""

    cu_seqlens_q: WholeNumbers | None
    causal: Flag
    window: tuple[int | None, int | None] | None
    scale: Number | None
    softcap: Number
    sinks: Numbers | None
    layout: AxisOrder
    out_dtype: DTypeLike | None
    splits: int | None
    out: Array | None
    stream: StreamLike


class ProducedOptions(TypedDict, total=False):
    """Keyword arguments of norms, gates and activations that describe their result, except `format`."""

    out_dtype: DTypeLike | None
    scale_rule: ScaleRule | None
    scale_layout: ScaleLayout
    global_scale: Number | Array | None
    out: Array | QuantizedArray | None
    stream: StreamLike


class NormOptions(ProducedOptions, total=False):
    """Keyword arguments of `layernorm` except `residual` and `format`."""

    eps: Number
    residual_out: Array | None


class RootNormOptions(NormOptions, total=False):
    """Keyword arguments of `rmsnorm` except `residual` and `format`."""

    offset: Number
    rounding: Rounding


class GateOptions(ProducedOptions, total=False):
    """Keyword arguments of `swiglu` except `format`."""

    interleaved: Flag
    limit: Number | None
    alpha: Number
    offset: Number
    row_weights: Array | None
    rounding: Rounding


class RotationOptions(ProducedOptions, total=False):
    """Keyword arguments of `rope` except `format`."""

    style: RotationStyle
    first: int
    inverse: Flag
    rounding: Rounding


class AppendOptions(TypedDict, total=False):
    """Keyword arguments of `append_qkv` except `heads` and `q_format`."""

    style: RotationStyle
    first: int
    q_weight: Array | None
    k_weight: Array | None
    eps: Number
    q_global: Number | Array | None
    stream: StreamLike


class ActivationOptions(ProducedOptions, total=False):
    """Keyword arguments of `gelu` except `format`."""

    approximate: Literal["none", "tanh"] | None


class ProductOptions(TypedDict, total=False):
    """Keyword arguments of `matmul` and `matmul_grouped` except `out_format`, which decides the type of the result."""

    a_format: FloatFormatName | OperandFormatName | None
    b_format: FloatFormatName | OperandFormatName | None
    transpose_b: bool
    bias: Array | None
    activation: Activation | tuple[Activation, dict[str, float]] | None
    residual: Array | None
    out_scale_rule: ScaleRule | None
    out_scale_layout: ScaleLayout
    out_global_scale: Number | Array | None
    a_scale_rule: ScaleRule | None
    b_scale_rule: ScaleRule | None
    a_global_scale: Number | Array | None
    b_global_scale: Number | Array | None
    out_dtype: DTypeLike | None
    splits: int | None
    out: Array | QuantizedArray | None
    stream: StreamLike


class MatrixOptions(ProductOptions, total=False):
    """Keyword arguments of `matmul` except `out_format`."""

    alpha: Number
    a_norm: Array | None
    a_eps: Number


class GroupedOptions(ProductOptions, total=False):
    """Keyword arguments of `matmul_grouped` except `out_format`."""

    rows: WholeNumbers | None
    alpha: Number | Array
