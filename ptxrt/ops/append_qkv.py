"""`append_qkv`: turn the projection of an attention layer into queries and rows of a cache, in one launch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from ..array import DeviceArray, as_arrays, check_forward
from ..blocks import BLOCK_FORMATS
from ..errors import ArgumentError
from ..formats import FORMATS, f32, format_of
from .append_qkv_kernel import CACHE_FORMATS, qkv_blocks
from .append_qkv_kernel import append_qkv as kernel
from .cache import KVCache, as_bytes
from .operands import Operand, operand_rule, shown, with_whole_rows
from .outputs import checked_ending
from .place import Place
from .produce import as_vector, checked_number, float_array, rmsnorm
from .produce_kernels import room_for
from .quantize import quantize
from .quantized import checked_global_scale
from .rotation import checked_positions, checked_rotation, placed_rotation, rope

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..typing import (
        AppendOptions,
        Array,
        HostArray,
        Number,
        ProducedFormatName,
        RotationStyle,
        StreamLike,
        WholeNumbers,
    )

_NAME = "append_qkv"


@overload
def append_qkv(
    qkv: HostArray | tuple[HostArray, HostArray, HostArray],
    cache: KVCache,
    slots: WholeNumbers,
    positions: WholeNumbers,
    table: Array,
    *,
    heads: int,
    q_format: None = ...,
    **options: Unpack[AppendOptions],
) -> HostArray: ...
@overload
def append_qkv(
    qkv: DeviceArray | tuple[DeviceArray, DeviceArray, DeviceArray],
    cache: KVCache,
    slots: WholeNumbers,
    positions: WholeNumbers,
    table: Array,
    *,
    heads: int,
    q_format: None = ...,
    **options: Unpack[AppendOptions],
) -> DeviceArray: ...
@overload
def append_qkv(
    qkv: HostArray
    | DeviceArray
    | tuple[HostArray, HostArray, HostArray]
    | tuple[DeviceArray, DeviceArray, DeviceArray],
    cache: KVCache,
    slots: WholeNumbers,
    positions: WholeNumbers,
    table: Array,
    *,
    heads: int,
    q_format: ProducedFormatName,
    **options: Unpack[AppendOptions],
) -> Operand: ...
@overload
def append_qkv(
    qkv: Array | tuple[Array, Array, Array],
    cache: KVCache,
    slots: WholeNumbers,
    positions: WholeNumbers,
    table: Array,
    *,
    heads: int,
    q_format: ProducedFormatName | None = ...,
    **options: Unpack[AppendOptions],
) -> Any: ...
def append_qkv(
    qkv: Array | tuple[Array, Array, Array],
    cache: KVCache,
    slots: WholeNumbers,
    positions: WholeNumbers,
    table: Array,
    *,
    heads: int,
    style: RotationStyle = "halves",
    first: int = 0,
    q_weight: Array | None = None,
    k_weight: Array | None = None,
    eps: Number = 1e-6,
    q_format: ProducedFormatName | None = None,
    q_global: Number | Array | None = None,
    stream: StreamLike = None,
) -> Any:
    """Normalize and rotate the queries and keys of T tokens, write keys and values to a cache, and return the queries.

    The result has the bytes of these functions called in turn: `rmsnorm`, `rope`, `cache.append`, and for q `quantize`
    along the heads with the rule of `quantize_operand`. NumPy arrays give NumPy results. Device arrays stay on the
    device, their values are not checked, and the call does not wait. It takes one launch, and for more than one token a
    second that finds tokens with the same slot. A cache whose keys and values have two formats takes a launch for each
    of those functions. Kernels: `append_qkv`, `claim_slots`.

    Args:
        qkv: float32, float16 or bfloat16 [T, (H + Hkv) D + Hkv Dv] from one projection: queries, then keys, then
            values; or (q, k, v), each [T, heads, dim] or [T, heads dim], on any strides.
        cache: The cache of keys and values, with Hkv heads.
        slots: One for each token, int64 on a device, as in `KVCache.append`. A token with a negative slot is padding:
            its query is computed, its key and value are not written.
        positions: One for each token, int32 on a device, as in `rope`.
        table: As in `rope`.
        heads: H, a multiple of the cache's heads.
        style: As in `rope`.
        first: As in `rope`.
        q_weight: Floats [D], the weight of a norm over each head of q, as in `rmsnorm`; None means no norm.
        k_weight: The same for k.
        eps: The eps of both norms.
        q_format: None gives q [T, H, D] in the type of qkv; "mxfp8", "mxfp4" or "nvfp4" gives an Operand of role "q"
            and shape [1, H, T, D] for `attention`.
        q_global: The global scale of nvfp4; None is 1.
        stream: A stream of the device; None is the library's own.

    Raises:
        ArgumentError: An argument is invalid; the message names it.
    """
    if not isinstance(cache, KVCache):
        raise ArgumentError(f"{_NAME}: cache is a {type(cache).__name__}; pass a ptxrt.KVCache")
    whole = isinstance(heads, (int, np.integer)) and not isinstance(heads, bool) and heads > 0
    if not whole or heads % cache.heads:
        raise ArgumentError(f"{_NAME}: heads is {heads!r}; pass those of q, a multiple of the cache's {cache.heads}")
    parts = _parts(qkv, cache, int(heads))
    q = parts["q"]
    tokens, dim = q.shape[0], cache.dim
    table, options = checked_rotation(_NAME, table, style, first, dim)
    options["eps"] = checked_number(_NAME, "eps", eps, 0)
    positions = checked_positions(_NAME, positions, table)
    if tuple(positions.shape) != (tokens,):
        received = f"positions have shape {list(positions.shape)}"
        raise ArgumentError(f"{_NAME}: {received}; pass one for each of {tokens} tokens")
    slots = _checked_slots(slots, tokens)
    weights = dict(q_weight=q_weight, k_weight=k_weight)
    weights = {key: float_array(_NAME, key, w, (dim,)) for key, w in weights.items() if w is not None}
    on_host = isinstance(q, np.ndarray)
    if q_format == "nvfp4":
        q_global = checked_global_scale(_NAME, 1.0 if q_global is None else q_global, "q_global")
        if on_host and isinstance(q_global, DeviceArray):
            raise ArgumentError(f"{_NAME}: q_global is on the device, qkv is a NumPy array; pass a number")
    elif q_global is not None:
        raise ArgumentError(f"{_NAME}: q_global is {q_global!r}; it belongs to q_format='nvfp4', leave it out")
    shape = tokens, int(heads), dim
    ending = checked_ending(_NAME, on_host, shape, None, None, q_format, None, "linear", q_global, "q_")
    cache.check_appendable(_NAME)
    arguments = dict(parts, table=table, positions=positions, slots=slots, **weights)
    check_forward(_NAME, **arguments)
    for name, x in arguments.items():
        if isinstance(x, DeviceArray) and x.backend is not cache.backend:
            where = f"{x.backend.describe()}, the cache on {cache.backend.describe()}"
            raise ArgumentError(f"{_NAME}: {name} is on {where}; bring it there")
    place = Place([cache.k], stream)
    place.on_host = on_host
    if not tokens and ending is None:
        return place.back(place.empty(shape, format_of(q.dtype)))

    rows = {name: with_whole_rows(place.put(x), stream) for name, x in parts.items()}
    table, positions = placed_rotation(_NAME, table, positions, place)
    slots = place.put(slots)
    weights = {key: as_vector(w, place, f32) for key, w in weights.items()}
    if tokens and cache.format != cache.format_v:
        norms, turns = dict(eps=options["eps"], **weights), dict(style=style, first=first)
        return _in_turn(rows, cache, slots, positions, table, norms, turns, ending, place)
    options |= weights
    options |= _cache_options(cache)
    room = room_for(kernel.name, q.dtype.itemsize, place.backend.multiprocessors)
    options["grid"] = max(qkv_blocks(tokens, int(heads) + 2 * cache.heads, dim, room), 1)
    if ending is None:
        out = place.empty(shape, format_of(q.dtype))
        with cache.claimed(slots, stream) as claims:
            kernel(*rows.values(), table, positions, slots, claims=claims, out=out, **options, stream=stream)
        return place.back(out)
    level = ending.level(place)
    layout = ending.layout
    codes = place.empty((tokens * heads, layout.code_bytes), FORMATS["u8"])
    scales = place.empty((tokens * heads, layout.blocks), FORMATS["u8"])
    options |= dict(codes=codes, scales=scales, code_bytes=layout.code_bytes, blocks=layout.blocks)
    options |= dict(ending=ending.number, rule=ending.rule)
    if level is not None:
        options["out_global"] = level.reshape(1)
    if tokens:
        with cache.claimed(slots, stream) as claims:
            kernel(*rows.values(), table, positions, slots, claims=claims, **options, stream=stream)
    return _operand(place, codes, scales, level, ending, shape)


def _parts(qkv, cache: KVCache, heads: int) -> dict[str, Any]:
    """Return q, k and v, each [tokens, heads, dim]; ArgumentError for other shapes, differing types, or a mix of host
    and device arrays."""
    sizes = dict(q=(heads, cache.dim), k=(cache.heads, cache.dim), v=(cache.heads, cache.dim_v))
    widths = {name: math.prod(size) for name, size in sizes.items()}
    total = sum(widths.values())
    if isinstance(qkv, (tuple, list)):
        if len(qkv) != 3:
            raise ArgumentError(f"{_NAME}: qkv has {len(qkv)} parts; pass (q, k, v), or one array [tokens, {total}]")
        parts = dict(zip(sizes, as_arrays(_NAME, **dict(zip(sizes, qkv)))))
    else:
        (whole,) = as_arrays(_NAME, qkv=qkv)
        if len(whole.shape) != 2 or whole.shape[1] != total:
            received = f"qkv is {whole.dtype} {list(whole.shape)}"
            raise ArgumentError(f"{_NAME}: {received}; {heads} heads beside this cache have [tokens, {total}]")
        ends = np.cumsum(list(widths.values()))
        parts = {name: whole[:, end - widths[name] : end] for name, end in zip(sizes, ends)}
    q = parts["q"]
    for name, x in parts.items():
        count, dim = sizes[name]
        if format_of(x.dtype) is None or x.dtype != q.dtype or isinstance(x, np.ndarray) != isinstance(q, np.ndarray):
            received = f"{name} is {x.dtype} {'in a NumPy array' if isinstance(x, np.ndarray) else 'on the device'}"
            expected = "q, k and v of one type, float32, float16 or bfloat16, on one side"
            raise ArgumentError(f"{_NAME}: {received}; pass {expected}")
        if tuple(x.shape) not in ((q.shape[0], count, dim), (q.shape[0], count * dim)):
            received = f"{name} has shape {list(x.shape)}"
            raise ArgumentError(f"{_NAME}: {received}; pass [{q.shape[0]}, {count}, {dim}], of q's tokens")
        parts[name] = x if len(x.shape) == 3 else x.reshape(x.shape[0], count, dim)
    return parts


def _checked_slots(slots, tokens: int):
    """Return slots as int64 [tokens]; ArgumentError for others."""
    is_empty_list = not hasattr(slots, "dtype") and np.size(slots) == 0  # NumPy takes it for float64
    (slots,) = as_arrays(_NAME, slots=slots)
    if isinstance(slots, np.ndarray) and (slots.dtype.kind in "iu" or is_empty_list):
        slots = slots.astype(np.int64)
    if tuple(slots.shape) != (tokens,) or slots.dtype != np.int64:
        raise ArgumentError(f"{_NAME}: slots {shown(slots)}; pass int64, one for each of {tokens} tokens")
    return slots


def _cache_options(cache: KVCache) -> dict[str, Any]:
    """The kernel's arguments for a cache of one format."""
    options: dict[str, Any] = dict(holds=CACHE_FORMATS.index(cache.format), k_mean=cache.k_mean)
    options |= dict(k_global=cache.k_global, v_global=cache.v_global)
    for name in ("k", "v"):
        options[f"{name}_codes"] = as_bytes(cache.arrays[name])
        if cache.format in BLOCK_FORMATS:
            options[f"{name}_scales"] = as_bytes(cache.arrays[f"{name}_scales"])
            options[f"{name}_rule"] = BLOCK_FORMATS[cache.format].rules.index(cache.scale_rule[name])
    return {key: value for key, value in options.items() if value is not None}


def _in_turn(rows, cache: KVCache, slots, positions, table, norms, turns, ending, place: Place) -> Any:
    """Return the queries of a call on a cache of two formats, by the functions of each step. norms: eps, and weights of
    q or k; turns: options of `rope`."""
    stream, normed = place.stream, {}
    for name in ("q", "k"):
        weight = norms.get(f"{name}_weight")
        normed[name] = rows[name]
        if weight is not None:
            normed[name] = rmsnorm(rows[name], weight, eps=norms["eps"], stream=stream)
    keys = rope(normed["k"], table, positions, **turns, stream=stream)
    cache.append(keys, rows["v"], slots, stream=stream)
    q = rope(normed["q"], table, positions, **turns, stream=stream)
    if ending is None:
        return place.back(q)
    level, format = ending.level(place), ending.layout.format.name
    rounded = quantize(q, format, scale_rule=operand_rule(format), global_scale=level, pad=True, stream=stream)
    codes, scales = (x.reshape(q.shape[0] * q.shape[1], x.shape[-1]) for x in (rounded.codes, rounded.scales))
    return _operand(place, codes, scales, level, ending, tuple(q.shape))


def _operand(place: Place, codes, scales, level, ending, shape: tuple[int, ...]) -> Operand:
    """Return quantized rows [T H, bytes] as an Operand of queries [1, H, T, D]."""
    tokens, heads, dim = shape
    codes, scales = (x.reshape(1, tokens, heads, x.shape[1]).transpose(0, 2, 1, 3) for x in (codes, scales))
    level = None if level is None else level.reshape(())
    fields = dict(format=ending.layout.format.name, role="q", shape=(1, heads, tokens, dim), global_scale=level)
    result = Operand(codes, scales, **fields)
    return result.to_numpy(stream=place.stream) if place.on_host else result
