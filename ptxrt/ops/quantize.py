"""Quantization: declarations, references, `QuantizedArray` and the friendly `quantize` and `dequantize`."""

import io
import zipfile
import zlib
from math import prod

import numpy as np

from ..array import as_arrays, as_output
from ..errors import ArgumentError, FileError
from ..files import write_atomically
from ..formats import BLOCK_FORMATS, bf16, e2m1x2, f16, f32, format_of, mxfp4, ue8m0
from ..kernel import In, Out, kernel

_CASES = [dict(rows=4, cols=64), dict(rows=1, cols=32), dict(rows=3, cols=96), dict(rows=130, cols=256)]


@kernel(grid="rows*cols", cases=_CASES)
def quantize_mxfp4(
    x: In[f32 | f16 | bf16, "rows cols"],
    codes: Out[e2m1x2, "rows cols/2"],
    scales: Out[ue8m0, "rows cols/32"],
):
    """Round each run of 32 values along `cols` to E2M1 under one shared power-of-two scale.

    The scale is the exponent of the largest magnitude less 2, no less than 2**-127 (the floor rule).
    Codes round to nearest, ties to even, saturate at 6 and keep the sign of zero; the even element
    lies in the low nibble. A run of zeros gets scale byte 0, a run with a NaN or an infinity scale
    byte 0xff and codes 0. Everything is computed in float32 and exact but for the one rounding.
    Source: OCP Microscaling Formats (MX) v1.0, section 6.3.
    """
    codes[:], scales[:] = mxfp4.encode(x)


@kernel(grid="rows*cols", cases=_CASES)
def dequantize_mxfp4(
    codes: In[e2m1x2, "rows cols/2"],
    scales: In[ue8m0, "rows cols/32"],
    x: Out[f32 | f16 | bf16, "rows cols"],
):
    """Give the values of MXFP4 codes: E2M1 times 2**(scale - 127).

    float32 is exact, and infinite from 2**128 on; float16 and bfloat16 are that value rounded to
    nearest, ties to even, so that float16 overflows early. A scale byte of 0xff makes its 32 values NaN.
    Source: OCP Microscaling Formats (MX) v1.0, sections 5.3 and 6.3.
    """
    with np.errstate(over="ignore"):
        x[:] = mxfp4.decode(codes, scales.view(np.uint8)).astype(x.dtype)


# format -> its pair of kernels.
QUANTIZE = {"mxfp4": quantize_mxfp4}
DEQUANTIZE = {"mxfp4": dequantize_mxfp4}


# What NumPy and zipfile raise for files that are foreign, truncated, or pretend to a size that does not fit.
_DAMAGE = (
    *(ValueError, TypeError, EOFError, SyntaxError, OverflowError, MemoryError, NotImplementedError),
    *(zipfile.BadZipFile, zlib.error),
)


def _block_format(name, function: str):
    if not isinstance(name, str) or name not in BLOCK_FORMATS:
        raise ArgumentError(f"{function}: format is {name!r}; there is {', '.join(map(repr, BLOCK_FORMATS))}")
    return BLOCK_FORMATS[name]


class QuantizedArray:
    """Codes and scales of an array of `shape`, quantized in blocks along its last axis.

    codes: uint8 [..., K / 2], two per byte, the even element in the low nibble.
    scales: uint8 [..., K / 32], one ue8m0 byte per block.
    global_scale: None for the formats there are. format: "mxfp4". shape: [..., K].
    Both arrays are NumPy arrays or both are device arrays. `np.asarray(q)` gives float32 values,
    decoded on the host.
    """

    def __init__(self, codes, scales, *, format, shape, global_scale=None):
        block = _block_format(format, "QuantizedArray")
        self.codes, self.scales = as_arrays("QuantizedArray", codes=codes, scales=scales)
        self.format = format
        self.shape = _as_shape(shape)
        if not self.shape or self.shape[-1] % block.block:
            raise ArgumentError(
                f"QuantizedArray: shape is {list(self.shape)}; {format} needs a last axis that is a multiple of {block.block}"
            )
        if global_scale is not None:
            raise ArgumentError(f"QuantizedArray: global_scale is {global_scale!r}; {format} has none, pass None")
        self.global_scale = None
        *leading, length = self.shape
        self._check("codes", self.codes, e2m1x2, (*leading, length // 2))
        self._check("scales", self.scales, ue8m0, (*leading, length // block.block))
        if isinstance(self.codes, np.ndarray) != isinstance(self.scales, np.ndarray):
            raise ArgumentError("QuantizedArray: codes and scales are on different machines; pass both from one")

    def _check(self, name, array, member, shape):
        if tuple(array.shape) != shape or not member.holds(array.dtype):
            raise ArgumentError(
                f"QuantizedArray: {name} is {array.dtype} {list(array.shape)}; "
                f"{self.format} of shape {list(self.shape)} has {name} of uint8 {list(shape)}"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return prod(self.codes.shape) + prod(self.scales.shape)

    def __repr__(self) -> str:
        return f"QuantizedArray({self.format}, shape={list(self.shape)}, {self.nbytes} bytes)"

    def to_numpy(self) -> "QuantizedArray":
        """The same with NumPy arrays; itself where it holds them already."""
        if isinstance(self.codes, np.ndarray):
            return self
        codes, scales = self.codes.to_numpy(), self.scales.to_numpy()
        return QuantizedArray(codes, scales, format=self.format, shape=self.shape)

    def __array__(self, dtype=None, copy=None):
        if copy is False:
            raise ValueError("a QuantizedArray has no float array to share; leave out copy=False")
        host = self.to_numpy()
        values = BLOCK_FORMATS[self.format].decode(host.codes.view(np.uint8), host.scales.view(np.uint8))
        return values if dtype is None else values.astype(dtype)

    def save(self, path) -> None:
        """Write to `path` as .npz (the name is used as given); the file appears whole or not at all."""
        host = self.to_numpy()
        buffer = io.BytesIO()
        np.savez(
            buffer,
            codes=host.codes.view(np.uint8),
            scales=host.scales.view(np.uint8),
            format=np.array(self.format),
            shape=np.array(self.shape, np.int64),
        )
        write_atomically(path, buffer.getvalue())

    @classmethod
    def load(cls, path) -> "QuantizedArray":
        """Read what `save` wrote; FileError for a file that is foreign, damaged or does not fit its own shape."""
        try:
            archive = np.load(path, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("it holds a single array")
            with archive:
                fields = {name: archive[name] for name in ("codes", "scales", "format", "shape")}
            if fields["format"].shape != () or fields["format"].dtype.kind != "U" or fields["shape"].dtype.kind != "i":
                raise ValueError("its format is no name or its shape no list of whole numbers")
            shape = tuple(fields["shape"].tolist())
            return cls(fields["codes"], fields["scales"], format=str(fields["format"]), shape=shape)
        except KeyError as error:
            raise FileError(f"{path} is no quantized array: {error.args[0]}. Write one with QuantizedArray.save.") from error
        except _DAMAGE as error:
            raise FileError(f"{path} is no quantized array: {error}. Write one with QuantizedArray.save.") from error


def _as_shape(shape) -> tuple[int, ...]:
    try:
        sizes = tuple(int(size) for size in shape)
        if any(size < 0 or size != given for size, given in zip(sizes, shape)):
            raise ValueError
    except (TypeError, ValueError):
        raise ArgumentError(f"QuantizedArray: shape is {shape!r}; pass a tuple of whole numbers") from None
    return sizes


def quantize(x, format, *, out=None, stream=None) -> QuantizedArray:
    """Quantize x [..., K] of float32, float16 or bfloat16 in blocks along its last axis.

    format: "mxfp4": K is a multiple of 32; see `quantize_mxfp4` for rounding, zeros and NaN.
    out: a QuantizedArray of the same format and shape to write to. stream: of the device.
    NumPy arrays give NumPy codes and scales; device arrays stay on the device, without waiting.
    """
    _block_format(format, "quantize")
    (x,) = as_arrays("quantize", x=x)
    shape = tuple(x.shape)
    if not shape:
        raise ArgumentError("quantize: x is a single number; pass an array with at least one axis")
    if out is None:
        codes, scales = QUANTIZE[format](_rows(x), stream=stream)
        leading = shape[:-1]
        codes, scales = (a.reshape(*leading, a.shape[-1]) for a in (codes, scales))
        return QuantizedArray(codes, scales, format=format, shape=shape)
    if not isinstance(out, QuantizedArray) or (out.format, out.shape) != (format, shape):
        raise ArgumentError(f"quantize: out is {out!r}; pass a QuantizedArray of {format} and shape {list(shape)}, or None")
    QUANTIZE[format](_rows(x), codes=_rows(out.codes, "out.codes"), scales=_rows(out.scales, "out.scales"), stream=stream)
    return out


def dequantize(q, dtype=np.float32, *, out=None, stream=None):
    """Give the values of a QuantizedArray as float32 (exact), float16 or bfloat16 (rounded to nearest even).

    out: an array of q's shape to write to, whose dtype decides. stream: of the device.
    A QuantizedArray of NumPy arrays gives a NumPy array, one of device arrays a device array.
    """
    if not isinstance(q, QuantizedArray):
        raise ArgumentError(f"dequantize: q is a {type(q).__name__}; pass a QuantizedArray")
    buffers = {}
    if out is not None:
        out = as_output("dequantize", "out", out)
        if tuple(out.shape) != q.shape:
            raise ArgumentError(f"dequantize: out has shape {list(out.shape)}; q has shape {list(q.shape)}")
        buffers, dtype = {"x": _rows(out, "out")}, out.dtype
    try:
        member = format_of(dtype)
    except TypeError:
        member = None
    if member is None:
        raise ArgumentError(f"dequantize: dtype is {dtype!r}; pass float32, float16 or bfloat16")
    values = DEQUANTIZE[q.format](_rows(q.codes), _rows(q.scales), **buffers, dtype=member.dtype, stream=stream)
    return values.reshape(q.shape) if out is None else out


def _rows(array, written: str | None = None):
    """The array as a matrix whose columns are its last axis; `written` names one that must not be copied for it."""
    rows = array.reshape(prod(array.shape[:-1]), array.shape[-1])
    if written and isinstance(array, np.ndarray) and not np.shares_memory(rows, array):
        raise ArgumentError(f"{written} has strides of {list(array.strides)} bytes; pass an array in row-major order")
    return rows
