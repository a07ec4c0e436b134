"""Operands of attention, quantized before the call: `Operand`, a QuantizedArray with a role, and `quantize_operand`,
which makes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from ..array import DeviceArray, allocate, as_arrays, check_forward, empty, table_on, to_device, upload
from ..blocks import BLOCK_FORMATS, BlockFormat
from ..errors import ArgumentError
from ..formats import Format, f32, format_of, to_convert
from ..sequences import rows_in_units, sequences_of, unit_of_each, units_of
from ..tiles import TILE_DIMS, TILE_KEYS, TileLayout, tile_dim, tile_layout, tiles_of
from .cast import cast
from .importing import operand_of
from .packers import PACK_KEYS, PACK_VALUES, unpack_rows
from .quantize import given_global_scale, quantize, rule_number
from .quantized import Packed, QuantizedArray, checked_shape, decoded, stored_as, unquantized
from .quantizers import DEQUANTIZE, DEQUANTIZE_COLUMNS
from .scales import fill_f32, gather_bytes
from .smoothing import SMOOTH_QUERIES, add_mean, less_block_means, mean_keys, operand_scale, scan_keys

if TYPE_CHECKING:
    from ..typing import Array, AxisOrder, Flag, Number, OperandFormatName, Role, ScaleRule, StreamLike, WholeNumbers

ROLES = ("q", "k", "v")
# Scale rules of operands where they differ from the defaults of `quantize`. Under "floor" the largest values of a block
# saturate, all in one direction: outputs become too small and log-sum-exps wrong. docs/accuracy.md compares the rules.
_RULES = {"mxfp8": "rceil", "mxfp4": "even"}


@dataclass(frozen=True)
class Tiled:
    """The layout of keys or values [batch, heads, length, dim] in tiles of 64; a packed sequence starts a new tile."""

    tile: TileLayout
    shape: tuple[int, ...]
    sequences: int = 1

    @property
    def format(self) -> BlockFormat | None:
        """The block format; None in 16 bits."""
        return self.tile.block

    @property
    def axis(self) -> int:
        """The axis that is cut into blocks."""
        return self.tile.axis

    @property
    def scale_layout(self) -> str:
        """The tiles contain the scales."""
        return "tiles"

    @property
    def codes_shape(self) -> tuple[int, ...]:
        """The shape of the tiles."""
        batch, heads, length, _ = self.shape
        return (batch, heads, tiles_of(length, self.sequences), self.tile.nbytes)


_tiled = lru_cache(maxsize=1024)(Tiled)


@stored_as(
    "codes", "format", "role", "shape", optional=("code_order", "scales", "dim", "global_scale", "mean", "cu_seqlens")
)
class Operand(Packed):
    """Queries, keys or values [batch, heads, length, dim] as attention reads them.

    Queries have codes and scales as `quantize` gives them along the last axis. Keys and values are stored in tiles of
    64: codes are uint8 [batch, heads, ceil(length / 64), bytes of a tile], scales is None, and `layout.tile.dim` is the
    head dimension that tiles are padded to. `dequantize` and `numpy.asarray` give the values, with `mean` added.

    Args:
        codes: The codes, or the tiles.
        scales: The scales of queries; None for keys and values.
        format: "mxfp8", "mxfp4" or "nvfp4"; of values also "bf16".
        role: "q", "k" or "v".
        shape: [batch, heads, length, dim] of the values.
        dim: The head dimension that tiles are padded to; None for queries.
        global_scale: The global scale of nvfp4.
        mean: What was subtracted, float32: from keys [batch, heads, dim]; from queries one mean for each block of 64,
            [batch, heads, ceil(length / 64), dim]; None if nothing was.
        cu_seqlens: int32 [N + 1], the bounds of N packed sequences in a batch of 1. Each sequence starts a new tile or
            block of queries, so that there are N - 1 more of them. Keys have one mean for each sequence, [N, heads,
            dim]. Queries have cu_seqlens only together with a mean.

    Raises:
        ArgumentError: The arrays do not have the shapes of the format.
    """

    code_order = 2  # that of keys in tiles whose rows have 32 or 96 bytes was another one in 1

    def __init__(
        self,
        codes: Array,
        scales: Array | None = None,
        *,
        format: OperandFormatName,
        role: Role,
        shape: Sequence[int],
        dim: int | None = None,
        global_scale: Number | Array | None = None,
        mean: Array | None = None,
        cu_seqlens: WholeNumbers | None = None,
    ):
        _check_role("Operand", role, format)
        shape = checked_shape("Operand", shape)
        if len(shape) != 4:
            raise ArgumentError(f"Operand: shape is {list(shape)}; pass [batch, heads, length, dim]")
        self.role, self.mean, self.cu_seqlens = role, None, None
        if role == "q":
            plain = QuantizedArray(codes, scales, format=format, shape=shape, global_scale=global_scale)
            self.codes, self.scales, self.global_scale, self.layout = (
                plain.codes,
                plain.scales,
                plain.global_scale,
                plain.layout,
            )
            if dim is not None or (cu_seqlens is not None and mean is None):
                raise ArgumentError("Operand: queries have no dim, and cu_seqlens beside a mean alone; leave them out")
            self._take_sequences(cu_seqlens, shape)
            self.mean = None if mean is None else self._checked_mean(mean)
            return
        if scales is not None:
            raise ArgumentError(f"Operand: scales of role {role!r} stand in the tiles; pass None")
        (self.codes,), self.scales = as_arrays("Operand", codes=codes), None
        self._take_sequences(cu_seqlens, shape)
        self.layout = _tiled(
            tile_layout(format, role, checked_dim("Operand", format, shape[-1], dim)), shape, self.sequences or 1
        )
        if tuple(self.codes.shape) != self.layout.codes_shape or self.codes.dtype != np.uint8:
            raise ArgumentError(
                f"Operand: codes are {self.codes.dtype} {list(self.codes.shape)}; role {role!r} in {format} of shape "
                f"{list(shape)} "
                f"padded to {self.layout.tile.dim}{self._of_sequences} has uint8 {list(self.layout.codes_shape)}"
            )
        self.global_scale = self._checked_global_scale(self.layout.tile.block, global_scale)
        self.mean = None if mean is None else self._checked_mean(mean)

    @classmethod
    def of(
        cls,
        codes: Array,
        scales: Array | None = None,
        *,
        format: OperandFormatName,
        role: Role,
        axis: int = -1,
        global_scale: Number | Array | None = None,
        dim: int | None = None,
        stream: StreamLike = None,
    ) -> "Operand":
        """Make an operand from codes and scales of another library, on their device, without quantizing again.

        Scales are in linear order; call `unswizzle_scales` on those in 128x4 tiles first.

        Args:
            codes: Bytes [B, H, S, D] of "mxfp8" (e4m3), [B, H, S, D / 2] of "mxfp4" and "nvfp4" (two e2m1 codes, the
                first in the low nibble). With axis=-2 [B, H, S, D] or [B, H, S / 2, D].
            scales: Bytes [B, H, S, D / 32], for nvfp4 [B, H, S, D / 16]; with axis=-2 [B, H, S / 32 or 16, D]. None
                means 1 for all blocks, as in plain FP8. Bytes are uint8, or float8_e4m3fn for e4m3 codes and scales of
                nvfp4, float8_e8m0fnu for scales of MX formats.
            format: "mxfp8", "mxfp4" or "nvfp4".
            role: "q", "k" or "v".
            axis: -1, or -2 for values with scales along the keys. Values with scales along the head dimension become
                16-bit values, code times scale, for attention with pv="bf16". This is exact for scales from 2**-117 to
                2**119; a global scale that is no power of two rounds once.
            global_scale: For nvfp4, the factor of codes times scales; None is 1.
            dim: As in `quantize_operand`.
            stream: A stream of the device; None is the library's own.

        Raises:
            ArgumentError: An argument is invalid; the message names it.
        """
        return operand_of(cls, codes, scales, format, role, axis, global_scale, dim, stream)

    def _take_sequences(self, cu_seqlens, shape: tuple[int, ...]) -> None:
        if cu_seqlens is None:
            return
        self.cu_seqlens = checked_cu_seqlens("Operand", "cu_seqlens", cu_seqlens, shape[0], shape[2])
        if isinstance(self.cu_seqlens, DeviceArray) != self.on_device:
            raise ArgumentError("Operand: codes and cu_seqlens are on different machines; pass both from one")

    def _checked_mean(self, mean):
        (mean,) = as_arrays("Operand", mean=mean)
        (batch, heads, length, dim), role = self.shape, self.role
        blocks = units_of(length, SMOOTH_QUERIES, self.sequences or 1)
        expected = (batch, heads, blocks, dim) if role == "q" else (self.sequences or batch, heads, dim)
        if role == "v" or tuple(mean.shape) != expected or not f32.holds(mean.dtype):
            takes = "it has None" if role == "v" else f"it has float32 {list(expected)} or None"
            raise ArgumentError(f"Operand: mean of role {role!r} is {mean.dtype} {list(mean.shape)}; {takes}")
        if isinstance(mean, DeviceArray) != self.on_device:
            raise ArgumentError("Operand: codes and mean are on different machines; pass both from one")
        return mean

    @property
    def format(self) -> str:
        """The name of the format."""
        return self.layout.format.name if self.role == "q" else self.layout.tile.format

    @property
    def dim(self) -> int | None:
        """The head dimension that tiles are padded to; None for queries."""
        return None if self.role == "q" else self.layout.tile.dim

    @property
    def sequences(self) -> int | None:
        """The number of packed sequences; None without packing."""
        return None if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def _of_sequences(self) -> str:
        return f" of {self.sequences} packed sequences" if self.sequences else ""

    def __repr__(self) -> str:
        remarks = self._of_sequences + (", less their mean" if self.mean is not None else "")
        return f"Operand({self.format}, role={self.role!r}, shape={list(self.shape)}{remarks}, {self.nbytes} bytes)"

    @property
    def description(self) -> dict:
        """The constructor's arguments that are not arrays, by name."""
        return dict(format=self.format, role=self.role, shape=self.shape, dim=self.dim)

    def mean_of_rows(self) -> np.ndarray:
        """Return what was subtracted from each row, float32 [batch, heads, length, dim], on the host."""
        mean, cu_seqlens = (None if x is None else np.asarray(x) for x in (self.mean, self.cu_seqlens))
        if self.role == "q":
            return mean[
                :, :, unit_of_each(None if cu_seqlens is None else cu_seqlens[:-1], self.shape[2], SMOOTH_QUERIES)
            ]
        if cu_seqlens is not None:
            return mean[sequences_of(cu_seqlens[:-1], self.shape[2])].transpose(1, 0, 2)[None]
        return np.broadcast_to(mean[:, :, None], self.shape)

    @property
    def arrays(self) -> dict[str, Any]:
        """The arrays that are not None, by the constructor's names."""
        names = ("codes", "scales", "global_scale", "mean", "cu_seqlens")
        return {name: array for name in names if (array := getattr(self, name)) is not None}

    def decoded(self) -> np.ndarray:
        """Decode the values as float32 on the host; only for NumPy arrays."""
        length, dim = self.shape[2:]
        if self.role == "q":
            values = decoded(self.layout, self.codes, self.scales, self.global_scale)
        else:
            rows = slice(length) if self.cu_seqlens is None else rows_in_units(self.cu_seqlens[:-1], length, TILE_KEYS)
            values = self.layout.tile.decode(self.codes, self.global_scale)[:, :, rows, :dim].astype(np.float32)
        return values if self.mean is None else values + self.mean_of_rows()

    def expanded(self, member: Format, stream) -> tuple[DeviceArray, DeviceArray | None]:
        """Return queries on a device in 16 bits and their factor, float32 [1] or None for 1.

        They are codes times scales, which the format represents exactly. Smoothed queries are values with their mean,
        rounded once, with a factor of 1."""
        if self.mean is not None:
            return _values_of_queries(self, self.arrays, member, stream), None
        parts = {name: self.arrays[name] for name in ("codes", "scales")}
        if self.global_scale is None:
            return _values_of_queries(self, parts, member, stream), None
        parts["global_scale"] = fill_f32(x=empty((1,), np.float32, device=self.codes.device), value=1.0, stream=stream)
        return _values_of_queries(self, parts, member, stream), self.global_scale.reshape(1)

    def dequantized(self, member: Format, out, stream) -> Any:
        """Dequantize by kernels to a format, on the device of the codes; into `out` if given. See `dequantize`."""
        device = {name: to_device(array, stream=stream) for name, array in self.arrays.items()}
        values = (
            _values_of_queries(self, device, member, stream)
            if self.role == "q"
            else _values_of_tiles(self, device, member, stream)
        )
        if self.on_device:
            if out is None:
                return values
            if values.size:
                cast(values, **{f"y_{member}": out}, stream=stream)
            return out
        values = values.to_numpy(stream=stream)
        if out is None:
            return values
        np.copyto(out, values)
        return out


def quantize_operand(
    x: Array,
    format: OperandFormatName,
    *,
    role: Role,
    smooth: Flag | None = None,
    layout: AxisOrder = "bhsd",
    scale_rule: ScaleRule | None = None,
    global_scale: Number | Array | None = None,
    key_lengths: WholeNumbers | None = None,
    cu_seqlens: WholeNumbers | None = None,
    dim: int | None = None,
    stream: StreamLike = None,
) -> Operand:
    """Quantize queries, keys or values for attention: x [B, H, S, D], D up to 256.

    Queries and keys have blocks along D, values along S. Keys and values are stored in tiles of 64, padded with zeros.
    NumPy arrays give an Operand of NumPy arrays. Device arrays stay on the device; the call does not wait. Kernels:
    `pack_keys_NAME`, `pack_values_NAME`; for means `scan_keys` and `mean_keys`, or `less_block_means`; for the global
    scale `scan_keys` and `operand_scale`, a second read of x (for smoothed keys `mean_keys` gives it).

    Args:
        x: float32, float16 or bfloat16.
        format: "mxfp8", "mxfp4" or "nvfp4"; for values also "bf16", which only rounds.
        role: "q", "k" or "v".
        smooth: Whether a mean is subtracted first, which attention compensates: for keys the mean over S, for queries
            the mean of each block of 64 of a head. None smooths keys of 4-bit formats.
        layout: "bhsd", or "bshd" for x [B, S, H, D]. The result has the shape [B, H, S, D] either way.
        scale_rule: As in `quantize`, but None is "rceil" for mxfp8 and "even" for mxfp4, which preserve the magnitude
            of attention outputs.
        global_scale: For nvfp4: a positive number or a float32 device scalar. None takes the smallest 2**n / 6 under
            which no finite value saturates, so that a batch has the codes of its items.
        key_lengths: [B] whole numbers, int32 on a device. Keys and values after these lengths count as zeros, whatever
            they hold.
        cu_seqlens: With B = 1, packed sequences: sequence i is rows cu[i] to cu[i + 1]; N + 1 whole numbers from 0 to
            S. Each sequence is quantized, and smoothed, separately. Pass the operand to calls with this cu_seqlens_k,
            or smoothed queries to calls with this cu_seqlens_q.
        dim: The head dimension that tiles are padded to, one of the compiled ones; None takes the smallest that holds
            D. Keys and values of one call have the same, or 192 and 128.
        stream: A stream of the device; None is the library's own.

    Raises:
        ArgumentError: An argument is invalid; the message names it.
    """
    name = "quantize_operand"
    _check_role(name, role, format)
    block = BLOCK_FORMATS.get(format)
    scale_rule = operand_rule(format) if scale_rule is None else scale_rule
    rule = rule_number(name, block, scale_rule) if block else None
    if not block and (scale_rule is not None or global_scale is not None):
        raise ArgumentError(f"{name}: {format} has no scales; leave out scale_rule and global_scale")
    smooth = _checked_smooth(smooth, role, block)
    if not isinstance(layout, str) or layout not in ("bhsd", "bshd"):
        raise ArgumentError(f"{name}: layout is {layout!r}; pass 'bhsd' or 'bshd'")
    (x,) = unquantized(name, x=x)
    check_forward(name, x=x)
    if format_of(x.dtype) is None:
        raise ArgumentError(f"{name}: x is {x.dtype} {list(x.shape)}; {to_convert('x', False)}")
    if len(x.shape) != 4:
        raise ArgumentError(f"{name}: x has shape {list(x.shape)}; pass four axes, [{', '.join(layout).upper()}]")
    if role == "q" and any(option is not None for option in (dim, key_lengths, None if smooth else cu_seqlens)):
        raise ArgumentError(
            f"{name}: queries have no dim and no key_lengths, and cu_seqlens where smooth=True alone; leave them out"
        )
    shape = tuple(x.shape) if layout == "bhsd" else tuple(x.shape[i] for i in (0, 2, 1, 3))
    checked = checked_dim(name, format, shape[-1], dim)
    on_host = isinstance(x, np.ndarray)
    level = None if block is None else given_global_scale(name, block, global_scale, on_host)
    ends, starts = _checked_lengths(name, key_lengths, shape, on_host), None
    if cu_seqlens is not None:
        cu_seqlens = checked_cu_seqlens(name, "cu_seqlens", cu_seqlens, shape[0], shape[2])
        if ends is not None:
            raise ArgumentError(f"{name}: key_lengths beside cu_seqlens came; pass one of them")
        if on_host and isinstance(cu_seqlens, DeviceArray):
            raise ArgumentError(f"{name}: cu_seqlens is on the device, x is a NumPy array; pass both from one side")

    source = to_device(x, stream=stream) if on_host else x
    source = with_whole_rows(source, stream)
    rows = source if layout == "bhsd" else source.transpose(0, 2, 1, 3)
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens if isinstance(cu_seqlens, DeviceArray) else upload(source.backend, cu_seqlens, stream)
        starts, ends = cu_seqlens[:-1], cu_seqlens[1:]
    ends = None if ends is None else to_device(ends, stream=stream)
    block_means = None
    if role == "q" and smooth:
        block_means, source = _less_block_means(rows, starts, ends, stream)
        rows, layout = source, "bhsd"
        starts = ends = None
    mean, scale = _scanned(rows, starts, ends, smooth and role == "k", block, level, stream)
    if role == "q":
        plain = quantize(
            _contiguous(source, stream), format, scale_rule=scale_rule, global_scale=scale, pad=True, stream=stream
        )
        parts = (
            (plain.codes, plain.scales)
            if layout == "bhsd"
            else (a.transpose(0, 2, 1, 3) for a in (plain.codes, plain.scales))
        )
        result = Operand(
            *parts,
            format=format,
            role=role,
            shape=shape,
            global_scale=plain.global_scale,
            mean=block_means,
            cu_seqlens=cu_seqlens,
        )
    else:
        arguments = dict(key_starts=starts, key_ends=ends, dim=checked, stream=stream)
        if block:
            arguments["rule"] = rule
        if scale is not None:
            arguments["global_scale"] = scale.reshape(1)
        if mean is not None:
            arguments["mean"] = mean
        codes = (PACK_KEYS if role == "k" else PACK_VALUES)[format](rows, **arguments)
        result = Operand(
            codes,
            format=format,
            role=role,
            shape=shape,
            dim=checked,
            global_scale=scale,
            mean=mean,
            cu_seqlens=cu_seqlens,
        )
    return result.to_numpy(stream=stream) if on_host else result


def _values_of_queries(q: Operand, device: dict, member: Format, stream) -> DeviceArray:
    """Dequantize queries to values [batch, heads, length, dim]."""
    codes, scales = device["codes"], device["scales"]
    turned = not codes.is_contiguous
    if turned:  # codes of an array with layout "bshd"
        codes, scales = (a.transpose(0, 2, 1, 3) for a in (codes, scales))
    codes, scales = (_contiguous(a, stream) for a in (codes, scales))
    matrix = [a.reshape(prod(a.shape[:-1]), a.shape[-1]) for a in (codes, scales)]
    level = [device["global_scale"].reshape(1)] if "global_scale" in device else []
    result = f32 if "mean" in device else member
    values = DEQUANTIZE[q.format](*matrix, *level, dtype=result.dtype, stream=stream)
    values = values.reshape(*codes.shape[:-1], values.shape[-1])[..., : q.shape[-1]]
    values = values.transpose(0, 2, 1, 3) if turned else values
    return (
        values
        if "mean" not in device
        else _as(member, _with_mean(values, device["mean"], _starts_of(device), SMOOTH_QUERIES, stream), stream)
    )


def _starts_of(device: dict) -> DeviceArray | None:
    """Return the starts of an operand's packed sequences, or None."""
    return device["cu_seqlens"][:-1] if "cu_seqlens" in device else None


def _with_mean(values: DeviceArray, mean: DeviceArray, starts, run: int, stream) -> DeviceArray:
    """Add the means of runs of rows, or of packed sequences, to float32 values."""
    return add_mean(values, mean, starts, run=run, stream=stream) if values.size else values


def _as(member: Format, values: DeviceArray, stream) -> DeviceArray:
    """Convert values to a format, in row-major order."""
    if values.is_contiguous and member.holds(values.dtype):
        return values
    target = empty(values.shape, member.dtype, device=values.device)
    if values.size:
        cast(values, **{f"y_{member}": target}, stream=stream)
    return target


def _places(tile: TileLayout, name: str) -> np.ndarray:
    return getattr(tile, name).astype(np.int32).reshape(-1)


def _values_of_tiles(q: Operand, device: dict, member: Format, stream) -> DeviceArray:
    """Dequantize keys or values to [batch, heads, length, dim], with the subtracted mean added."""
    tile, (batch, heads, length, dim) = q.layout.tile, q.shape
    if 0 in q.shape:
        return empty(q.shape, member.dtype, device=device["codes"].device)
    tiles = device["codes"]
    count = prod(tiles.shape[:3])
    tiles = tiles.reshape(count, tile.nbytes)

    def plain(name: str) -> DeviceArray:
        where = table_on(tiles.backend, _places, tile, name)
        return gather_bytes(tiles, where, stream=stream).reshape(count, *getattr(tile, name).shape)

    result = f32 if "mean" in device else member
    codes = plain("codes_places")
    if tile.block is None:
        values, result = codes.reshape(count * TILE_KEYS, 2 * tile.dim).view(tile.element.dtype), tile.element
    else:
        scales = plain("scale_places")
        level = [device["global_scale"].reshape(1)] if "global_scale" in device else []
        if q.role == "k":
            codes, scales = (a.reshape(count * TILE_KEYS, a.shape[-1]) for a in (codes, scales))
        kernel = (DEQUANTIZE if q.role == "k" else DEQUANTIZE_COLUMNS)[q.format]
        values = kernel(codes, scales, *level, dtype=result.dtype, stream=stream)
    values = values.reshape(batch, heads, q.layout.codes_shape[2] * TILE_KEYS, tile.dim)
    starts = _starts_of(device)
    if starts is not None:
        values = unpack_rows(values[0].view(np.uint32), starts, keys=length, stream=stream).view(result.dtype)[None]
    values = values[:, :, :length, :dim]
    if "mean" in device:
        mean = device["mean"]
        values = _with_mean(values, mean.reshape(*mean.shape[:2], 1, dim), starts, length, stream)
    return _as(member, values, stream)


# Checks


def operand_rule(format: str) -> str | None:
    """Return the default scale rule of operands; None for a format without scales."""
    return _RULES.get(format, BLOCK_FORMATS[format].rules[0]) if format in BLOCK_FORMATS else None


def checked_dim(function: str, format: str, cols: int, dim) -> int:
    """Return the head dimension that tiles are padded to; ArgumentError if no compiled one holds `cols`."""
    compiled = TILE_DIMS[format]
    if cols < 1 or cols > compiled[-1]:
        raise ArgumentError(f"{function}: the head dimension is {cols}; {format} takes 1 to {compiled[-1]}")
    if dim is None:
        return tile_dim(format, cols)
    if not isinstance(dim, (int, np.integer)) or isinstance(dim, bool) or dim not in compiled or dim < cols:
        raise ArgumentError(
            f"{function}: dim is {dim!r} for a head dimension of {cols}; {format} has "
            f"{', '.join(str(d) for d in compiled if d >= cols)}"
        )
    return int(dim)


def _check_role(function: str, role, format) -> None:
    """Raise ArgumentError for a role that does not exist, or that the format does not support."""
    if not isinstance(role, str) or role not in ROLES:
        raise ArgumentError(f"{function}: role is {role!r}; pass 'q', 'k' or 'v'")
    formats = TILE_DIMS if role == "v" else PACK_KEYS
    if not isinstance(format, str) or format not in formats:
        plain = (
            f"; attention takes {'queries' if role == 'q' else 'keys'} in {format} as they are"
            if isinstance(format, str) and format in ("bf16", "f16")
            else ""
        )
        raise ArgumentError(
            f"{function}: format is {format!r}; role {role!r} has {', '.join(map(repr, formats))}{plain}"
        )


def _checked_smooth(smooth, role: str, block: BlockFormat | None) -> bool:
    if smooth is None:
        return role == "k" and block.bits == 4
    if not isinstance(smooth, (bool, np.bool_)):
        raise ArgumentError(f"quantize_operand: smooth is {smooth!r}; pass True, False or None")
    if smooth and role == "v":
        raise ArgumentError("quantize_operand: smooth=True with role 'v'; only queries and keys are smoothed")
    return bool(smooth)


def _checked_lengths(function: str, lengths, shape: tuple[int, ...], on_host: bool):
    """Return the number of keys of each batch item, int32; None for all."""
    if lengths is None:
        return None
    (array,) = as_arrays(function, key_lengths=lengths)
    whole = array.dtype == np.int32 or (isinstance(array, np.ndarray) and array.dtype.kind in "iu")
    if tuple(array.shape) != shape[:1] or not whole:
        raise ArgumentError(
            f"{function}: key_lengths is {array.dtype} {list(array.shape)}; pass a whole number (int32) for each of "
            f"{shape[0]} batches"
        )
    if isinstance(array, DeviceArray):
        if on_host:
            raise ArgumentError(
                f"{function}: key_lengths is on the device, x is a NumPy array; pass both from one side"
            )
        return array
    if array.size and not (0 <= array.min() and array.max() <= shape[2]):
        raise ArgumentError(f"{function}: key_lengths is {array.tolist()}; x has {shape[2]} keys")
    return array.astype(np.int32)


def checked_cu_seqlens(function: str, name: str, value, batch: int, whole: int):
    """Return the bounds of packed sequences, int32 [N + 1]; ArgumentError unless they rise from 0 to `whole`. Values on
    a device are not checked.
    """
    if batch != 1:
        advice = "reshape [total, H, D] to [1, total, H, D], layout='bshd'"
        raise ArgumentError(f"{function}: packed sequences have a batch of 1, {batch} came; {advice}")
    cu = whole_numbers(function, name, value, "N + 1 for N sequences")
    known = isinstance(cu, np.ndarray) and len(cu.shape) == 1 and len(cu) >= 2
    if len(cu.shape) != 1 or cu.shape[0] < 2 or (known and (cu[0] != 0 or cu[-1] != whole or (np.diff(cu) < 0).any())):
        raise ArgumentError(f"{function}: {name} {shown(cu)}; pass N + 1 whole numbers that rise from 0 to {whole}")
    return cu


def is_number(value) -> bool:
    """Return whether a value may be one real number: no bool, text, complex number or array."""
    others = (bool, np.bool_, str, bytes, complex, np.complexfloating, np.ndarray, DeviceArray)
    return not isinstance(value, others)


def whole_numbers(function: str, name: str, value, expected: str):
    """Return an int32 array; host arrays may have any integer type, and lists may be empty."""
    (array,) = as_arrays(function, **{name: value})
    if array.shape == (0,) and not hasattr(value, "dtype"):  # NumPy takes an empty list for float64
        array = array.astype(np.int32)
    if (
        isinstance(array, np.ndarray)
        and array.dtype.kind in "iu"
        and (array.size == 0 or -(2**31) <= array.min() <= array.max() < 2**31)
    ):
        return array.astype(np.int32)
    if isinstance(array, np.ndarray) and array.dtype.kind in "iu":
        beyond = next(n for n in (int(array.min()), int(array.max())) if not -(2**31) <= n < 2**31)
        raise ArgumentError(f"{function}: {name} has {beyond}; pass numbers that int32 holds, {expected}")
    if isinstance(array, np.ndarray) or array.dtype != np.int32:
        raise ArgumentError(f"{function}: {name} is {array.dtype} {list(array.shape)}; pass int32, {expected}")
    return array


def shown(numbers) -> str:
    """Describe whole numbers for a message; values on a device are not read."""
    few = isinstance(numbers, np.ndarray) and numbers.size <= 16
    return f"is {numbers.tolist()}" if few else f"is {numbers.dtype} {list(numbers.shape)}"


# Before packing


def with_whole_rows(x: DeviceArray, stream) -> DeviceArray:
    """Return x, or a copy if its rows have gaps or strides are negative."""
    whole = x.shape[-1] == 1 or x.strides[-1] == x.dtype.itemsize
    return x if whole and min(x.strides) >= 0 else x.copy(stream=stream)


def _contiguous(x: DeviceArray, stream) -> DeviceArray:
    """Return x, or a copy in row-major order aligned to 16 bytes, as kernels of whole arrays need it."""
    return x if x.is_contiguous and x.signature.is_aligned else _copied(x, stream)


def _copied(x: DeviceArray, stream) -> DeviceArray:
    target = empty(x.shape, x.dtype, device=x.device)
    if x.size:
        cast(x, **{f"y_{format_of(x.dtype)}": target}, stream=stream)
    return target


def _less_block_means(x: DeviceArray, starts, ends, stream) -> tuple[DeviceArray, DeviceArray]:
    """Return the means of blocks of queries, and the queries minus these means, float32; zeros outside of packed
    sequences."""
    if x.size:
        left = (
            {}
            if starts is None
            else dict(
                y=fill_f32(x=empty((x.size,), np.float32, device=x.device), value=0.0, stream=stream).reshape(x.shape)
            )
        )
        return less_block_means(x, starts, ends, **left, stream=stream)
    batch, heads, queries, dim = x.shape
    blocks = units_of(queries, SMOOTH_QUERIES, 1 if starts is None else starts.shape[0])
    return tuple(empty((batch, heads, rows, dim), np.float32, device=x.device) for rows in (blocks, queries))


def _scanned(x: DeviceArray, starts, ends, smooth: bool, block: BlockFormat | None, level, stream):
    """Return the mean of the keys, if smoothed, and the global scale, if the format has one: the given one, or one from
    a single read of x."""
    two_level = block is not None and block.two_level

    def filled(shape: tuple[int, ...], value: float) -> DeviceArray:
        numbers = allocate(x.backend, shape, f32.dtype, x.backend.queue(stream))
        return fill_f32(x=numbers.reshape(numbers.size), value=value, stream=stream).reshape(shape)

    if isinstance(level, np.ndarray):
        level = filled((), float(level))
    if not x.size:
        sequences = x.shape[0] if starts is None else starts.shape[0]
        mean_shape = (sequences, x.shape[1], x.shape[3])
        mean = allocate(x.backend, mean_shape, f32.dtype, x.backend.queue(stream)) if smooth else None
        if mean is not None and mean.size:
            mean = filled(mean_shape, 0.0)
        return mean, filled((), 1.0) if two_level and level is None else level
    outputs = dict(sums=smooth, largest=two_level and level is None)
    outputs = {name: True for name, asked in outputs.items() if asked}
    if not outputs:
        return None, level
    results = scan_keys(x, key_starts=starts, key_ends=ends, **outputs, stream=stream)
    found = dict(zip(outputs, results if isinstance(results, tuple) else (results,)))
    if not smooth:
        return None, operand_scale(found["largest"].reshape(prod(found["largest"].shape)), stream=stream).reshape(())
    if "largest" not in found:
        return mean_keys(found["sums"], starts, ends, keys=x.shape[2], stream=stream), level
    # A key minus the mean is at most twice the largest magnitude: its own plus that of the mean.
    mean, level = mean_keys(
        found["sums"], starts, ends, found["largest"], global_scale=True, keys=x.shape[2], factor=2.0, stream=stream
    )
    return mean, level.reshape(())
