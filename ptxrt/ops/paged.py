"""`attention_paged`: attention on a `KVCache`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from ..array import DeviceArray, as_arrays, as_output, check_forward
from ..errors import ArgumentError
from ..formats import Format, bf16, f16, f32, format_of, i32, to_convert, u32
from .attention_call import LEAST_SOFTCAP, checked_sinks, checked_window, output_format
from .attention_few import (
    CHUNK_KEYS,
    FEW_QUERIES,
    MOST_NODES,
    NODE_KEYS,
    ONE_DIMS,
    ONE_ROWS,
    attention_few,
    attention_one,
    blocks_of_one,
    nodes_of,
    splits_of_nodes,
    takes_chunks,
    writes_outputs,
)
from .attention_kernels import attention_adjusted, attention_bf16, attention_merge
from .cache import KVCache, as_bytes, checked_tables, overlapping, share_memory
from .few import sinks_on
from .operands import checked_cu_seqlens, is_number, with_whole_rows
from .pages import add_nonfinite, expand_pages, holds_of
from .place import Place, converted, is_loadable
from .quantized import Packed
from .scales import fill_f32
from .smoothing import row_dot

if TYPE_CHECKING:
    from numpy.typing import DTypeLike
    from typing_extensions import Unpack

    from ..typing import Array, AxisOrder, Flag, HostArray, Number, Numbers, PagedOptions, StreamLike, WholeNumbers


@dataclass(frozen=True)
class _Paged:
    """A checked call; q and out have the axes [batch, heads, length, dim]."""

    q: Any
    cache: KVCache
    table: Any
    lengths: Any
    cu_seqlens: Any
    scale: float
    softcap: float
    left: int
    right: int
    sinks: Any
    return_lse: bool
    normalize: bool
    transposed: bool
    output: Format
    splits: int | None
    out: Any
    caller_out: Any

    @property
    def group(self) -> int:
        """Heads of q for each head of the cache."""
        return self.q.shape[1] // self.cache.heads


@overload
def attention_paged(
    q: HostArray,
    cache: KVCache,
    block_table: Array,
    key_lengths: WholeNumbers,
    *,
    return_lse: Literal[False] = ...,
    normalize: Literal[True] = ...,
    **options: Unpack[PagedOptions],
) -> HostArray: ...
@overload
def attention_paged(
    q: HostArray,
    cache: KVCache,
    block_table: Array,
    key_lengths: WholeNumbers,
    *,
    return_lse: Literal[True],
    normalize: Literal[True] = ...,
    **options: Unpack[PagedOptions],
) -> tuple[HostArray, HostArray]: ...
@overload
def attention_paged(
    q: HostArray,
    cache: KVCache,
    block_table: Array,
    key_lengths: WholeNumbers,
    *,
    return_lse: Literal[False] = ...,
    normalize: Literal[False],
    **options: Unpack[PagedOptions],
) -> tuple[HostArray, HostArray, HostArray]: ...
@overload
def attention_paged(
    q: DeviceArray,
    cache: KVCache,
    block_table: Array,
    key_lengths: WholeNumbers,
    *,
    return_lse: Literal[False] = ...,
    normalize: Literal[True] = ...,
    **options: Unpack[PagedOptions],
) -> DeviceArray: ...
@overload
def attention_paged(
    q: DeviceArray,
    cache: KVCache,
    block_table: Array,
    key_lengths: WholeNumbers,
    *,
    return_lse: Literal[True],
    normalize: Literal[True] = ...,
    **options: Unpack[PagedOptions],
) -> tuple[DeviceArray, DeviceArray]: ...
@overload
def attention_paged(
    q: DeviceArray,
    cache: KVCache,
    block_table: Array,
    key_lengths: WholeNumbers,
    *,
    return_lse: Literal[False] = ...,
    normalize: Literal[False],
    **options: Unpack[PagedOptions],
) -> tuple[DeviceArray, DeviceArray, DeviceArray]: ...
@overload
def attention_paged(
    q: Array,
    cache: KVCache,
    block_table: Array,
    key_lengths: WholeNumbers,
    *,
    return_lse: Flag = ...,
    normalize: Flag = ...,
    **options: Unpack[PagedOptions],
) -> Any: ...
def attention_paged(
    q: Array,
    cache: KVCache,
    block_table: Array,
    key_lengths: WholeNumbers,
    *,
    cu_seqlens_q: WholeNumbers | None = None,
    causal: Flag = True,
    window: tuple[int | None, int | None] | None = None,
    scale: Number | None = None,
    softcap: Number = 0.0,
    sinks: Numbers | None = None,
    return_lse: Flag = False,
    normalize: Flag = True,
    layout: AxisOrder = "bhsd",
    out_dtype: DTypeLike | None = None,
    splits: int | None = None,
    out: Array | None = None,
    stream: StreamLike = None,
) -> Any:
    """Compute softmax(scale Q K^T) V for q [B, H, Sq, D] on the pages of a `KVCache`; H is a multiple of the cache's
    heads.

    Query i of sequence b has position key_lengths[b] - Sq + i. Results depend bit for bit only on a sequence's own
    queries, keys and values: not on the batch and its order, the size and order of pages, the width of the table, the
    splits, or the device's number of multiprocessors. Up to 16 queries at the end of a sequence have the bits of calls
    of one query at a time; with cu_seqlens_q on a device only if the call has at most 16 queries for each sequence on
    average. A length of 0 gives 0 and an lse of -inf (or the sink). A NaN in a row of K, and a NaN or an infinity in a
    row of V, reaches only the queries that see it. A NumPy array q gives NumPy results.

    Args:
        q: float32, float16 or bfloat16, on any strides; a copy is made if strides on a device are negative. Q and K,
            and P and V, are multiplied in the format cache.multiplied(q.dtype): bfloat16 or float16.
        cache: Keys and values.
        block_table: int32 [B, pages of a sequence]: key j of sequence b is row j % page_size of page block_table[b, j
            // page_size]. Entries after a sequence's last page are not read.
        key_lengths: int32 [B]: the number of keys of each sequence, including tokens just appended.
        cu_seqlens_q: int32 [B + 1]: queries are packed, q is [1, H, total, D], and sequence b has rows cu_seqlens_q[b]
            to cu_seqlens_q[b + 1].
        causal: As in `attention`.
        window: As in `attention`; (W - 1, 0) is a window of W keys that ends at the query's own.
        scale: As in `attention`.
        softcap: As in `attention`.
        sinks: As in `attention`.
        return_lse: As in `attention`.
        normalize: As in `attention`.
        layout: As in `attention`.
        out_dtype: float32, float16 or bfloat16; None is q's.
        splits: The most parts of the keys with blocks of their own; a part has whole runs of 1024 keys. None takes a
            number that suits the device, and parts of 256 keys where that is faster. Results do not depend on it.
        out: An array of the output's shape to write to, which overlaps no input. Strides on a device are from 0 on.
        stream: A stream of the device; None is the library's own. Values of block_table, key_lengths and cu_seqlens_q
            on a device are not checked, so that a graph of a call serves all lengths up to the table's width. Calls on
            one cache whose keys are split run one after another, in whatever streams, since they count in its memory.

    Raises:
        ArgumentError: An argument is invalid; the message names it.
    """
    call = _checked(
        q,
        cache,
        block_table,
        key_lengths,
        cu_seqlens_q,
        causal,
        window,
        scale,
        softcap,
        sinks,
        return_lse,
        normalize,
        layout,
        out_dtype,
        splits,
        out,
    )
    results = _run(call, stream)
    return results[0] if len(results) == 1 else results


def _fail(what: str):
    raise ArgumentError(f"attention_paged: {what}")


def _finite(name: str, value, expected: str) -> float:
    """Return a number that is finite in float32; ArgumentError for anything else."""
    try:
        with np.errstate(over="ignore"):
            if is_number(value) and np.isfinite(np.float32(value)):
                return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    _fail(f"{name} is {value!r}; pass {expected}")


def _flag(name: str, value) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        _fail(f"{name} is {value!r}; pass True or False")
    return bool(value)


def _checked(
    q,
    cache,
    block_table,
    key_lengths,
    cu_seqlens_q,
    causal,
    window,
    scale,
    softcap,
    sinks,
    return_lse,
    normalize,
    layout,
    out_dtype,
    splits,
    out,
) -> _Paged:
    """Check the arguments of `attention_paged` against each other; nothing is uploaded or launched."""
    if not isinstance(cache, KVCache):
        _fail(f"cache is a {type(cache).__name__}; pass a ptxrt.KVCache")
    if not isinstance(layout, str) or layout not in ("bhsd", "bshd"):
        _fail(f"layout is {layout!r}; pass 'bhsd' or 'bshd'")
    transposed = layout == "bshd"
    if isinstance(q, Packed):
        _fail(f"q is {q!r}; pass an array, such as ptxrt.dequantize(q)")
    (q,) = as_arrays("attention_paged", q=q)
    if format_of(q.dtype) is None:
        _fail(f"q is {q.dtype} {list(q.shape)}; {to_convert('q', False)}")
    if len(q.shape) != 4:
        _fail(f"q has shape {list(q.shape)}; pass four axes, {'[B, S, H, D]' if transposed else '[B, H, S, D]'}")
    q = q.transpose(0, 2, 1, 3) if transposed else q
    batch, heads, queries, dim = q.shape
    if dim != cache.dim:
        _fail(f"q has a head dimension of {dim}, the cache {cache.dim}; pass queries of {cache.dim}")
    if not heads or heads % cache.heads:
        near = " or ".join(
            str(n) for n in (heads // cache.heads * cache.heads, (heads // cache.heads + 1) * cache.heads) if n
        )
        _fail(f"{heads} heads of q are no multiple of the {cache.heads} of the cache; nearest: {near}")
    table, lengths = checked_tables("attention_paged", cache, block_table, key_lengths)
    sequences = table.shape[0]
    if cu_seqlens_q is not None:
        cu_seqlens_q = checked_cu_seqlens("attention_paged", "cu_seqlens_q", cu_seqlens_q, batch, queries)
        if cu_seqlens_q.shape[0] != sequences + 1:
            _fail(
                f"cu_seqlens_q has {cu_seqlens_q.shape[0]} numbers; {sequences} rows of block_table need "
                f"{sequences + 1}"
            )
    elif sequences != batch:
        _fail(
            f"block_table has {sequences} rows, q a batch of {batch}; pass as many, or cu_seqlens_q for packed queries"
        )
    if -(-table.shape[1] * cache.page_size // NODE_KEYS) > MOST_NODES:
        _fail(
            f"block_table has room for {table.shape[1] * cache.page_size} keys; a call takes {MOST_NODES * NODE_KEYS}"
        )
    scale = 1 / math.sqrt(dim) if scale is None else _finite("scale", scale, "a finite number, or None for 1 / sqrt(D)")
    softcap = _finite("softcap", softcap, "a number above 0, or 0 for none")
    if softcap < 0:
        _fail(f"softcap is {softcap!r}; pass a number above 0, or 0 for none")
    softcap = max(softcap, LEAST_SOFTCAP) if softcap else 0.0
    left, right = checked_window("attention_paged", window, _flag("causal", causal))
    return_lse, normalize = _flag("return_lse", return_lse), _flag("normalize", normalize)
    if return_lse and not normalize:
        _fail(
            "normalize=False returns row_max and row_sum, of which lse is (row_max + log2 row_sum) ln 2; "
            "leave out return_lse"
        )
    if splits is not None and (not isinstance(splits, (int, np.integer)) or isinstance(splits, bool) or splits < 1):
        _fail(f"splits is {splits!r}; pass a whole number of at least 1, or None")
    sinks = checked_sinks("attention_paged", sinks, heads)
    caller_out = None if out is None else as_output("attention_paged", "out", out)
    check_forward("attention_paged", out=caller_out)
    inputs = dict(q=q, block_table=table, key_lengths=lengths, cu_seqlens_q=cu_seqlens_q, sinks=sinks)
    for name, x in dict(inputs, out=caller_out).items():
        if isinstance(x, DeviceArray) and x.backend is not cache.backend:
            _fail(f"{name} is on {x.backend.describe()}, the cache on {cache.backend.describe()}; bring it there")
    member = output_format("attention_paged", out_dtype, caller_out, format_of(q.dtype) if normalize else f32)
    if not normalize and member is not f32:
        _fail(f"normalize=False gives float32; {member.dtype} was asked for")
    target = None
    if caller_out is not None:
        expected = (batch, queries, heads, cache.dim_v) if transposed else (batch, heads, queries, cache.dim_v)
        if tuple(caller_out.shape) != expected:
            _fail(f"out has shape {list(caller_out.shape)}, not {list(expected)}; pass an array of that shape")
        if isinstance(caller_out, np.ndarray) == isinstance(q, DeviceArray):
            _fail("out and q are a NumPy array and a device array; pass both on one side")
        if not (caller_out.writeable if isinstance(caller_out, DeviceArray) else caller_out.flags.writeable):
            _fail("out is read-only; pass an array that can be written")
        if isinstance(caller_out, DeviceArray) and (shared := overlapping(cache, caller_out)):
            _fail(f"out and {shared} of the cache overlap in memory; pass separate arrays")
        for name, x in inputs.items():
            if isinstance(x, DeviceArray) and isinstance(caller_out, DeviceArray) and share_memory(x, caller_out):
                _fail(f"out and {name} overlap in memory; pass separate arrays")
        target = caller_out.transpose(0, 2, 1, 3) if transposed else caller_out
    return _Paged(
        q,
        cache,
        table,
        lengths,
        cu_seqlens_q,
        scale,
        softcap,
        left,
        right,
        sinks,
        return_lse,
        normalize,
        transposed,
        member,
        None if splits is None else int(splits),
        target,
        caller_out,
    )


def _run(call: _Paged, stream) -> tuple:
    """Launch a call: conversions, the nodes of all sequences, their merge."""
    cache, (batch, heads, queries, _) = call.cache, call.q.shape
    place = Place([call.q, call.table, call.lengths, call.out, cache.k], stream)
    place.on_host = not isinstance(call.q, DeviceArray)
    rows, dim_v = (batch, cache.heads, call.group, queries), cache.dim_v
    if isinstance(call.out, DeviceArray):
        target = call.out
    elif call.transposed:
        target = place.empty((batch, queries, heads, dim_v), call.output).transpose(0, 2, 1, 3)
    else:
        target = place.empty((batch, heads, queries, dim_v), call.output)
    figures = {}
    if call.return_lse:
        figures = dict(lse=place.empty((batch, heads, queries), f32))
    elif not call.normalize:
        figures = {name: place.empty((batch, heads, queries), f32) for name in ("merged_max", "merged_sum")}

    held = {name: getattr(call, name) for name in ("table", "lengths", "cu_seqlens", "sinks")}
    in_order = {name: with_whole_rows(x, stream) for name, x in held.items() if isinstance(x, DeviceArray)}
    call, q = replace(call, **in_order), place.put(call.q)
    if min(q.strides, default=0) < 0:
        q = q.copy(stream=stream)
    if not call.table.shape[1] and call.table.shape[0]:  # no keys: a page that no length reaches
        pages = np.zeros((call.table.shape[0], 1), np.int32)
        call = replace(call, table=pages if isinstance(call.table, np.ndarray) else place.put(pages))
    if 0 not in (*rows, call.table.shape[0]):
        options = _options(call, place, q)
        _attend(call, place, _multiplied(call, place, q), options, rows, target, figures)
    return _handed_back(call, place, target, figures)


def _attend(
    call: _Paged, place: Place, q: DeviceArray, options: dict, rows: tuple, target: DeviceArray, figures: dict
) -> None:
    """Launch attention of sequences with few queries, of those with many, and the merge of their sums."""
    cache, (few, many), stream = call.cache, _families(call), place.stream
    (batch, heads_kv, group, queries), dim_v, fits = rows, cache.dim_v, is_loadable(target)
    numbers = dict(scale=call.scale, softcap=call.softcap, left=call.left, right=call.right)
    # Whether the kernels for many queries need no merge.
    finishes = call.normalize and "row_shift" not in options and cache.v_global is None
    of_many = options
    if few and many:
        counts = np.diff(call.cu_seqlens)
        for_rows = [
            (call.cu_seqlens[:-1] + counts * chosen).astype(np.int32)
            for chosen in (counts <= FEW_QUERIES, counts > FEW_QUERIES)
        ]
        options, of_many = (dict(options, query_ends=place.put(ends)) for ends in for_rows)
    if few or not finishes:
        few_alone = few and not many
        division = _divided(call, q, options, rows, target, few_alone) if few else _Division()
        nodes = division.nodes
        sums = {name: place.empty((nodes, *rows), f32) for name in ("row_max", "row_sum")}
        sums["partial"] = place.empty((nodes, *rows, dim_v), f32)
        if few and many:  # nodes that few queries do not write are skipped by the merge
            fill_f32(x=sums["row_max"].reshape(sums["row_max"].size), value=-np.inf, stream=stream)
        ending = {}
        if call.sinks is not None:
            ending["sinks"] = sinks_on(call.sinks, place)
        if cache.v_global is not None:
            ending["v_global"] = cache.v_global
        if division.finishes:
            outputs = {f"out_{call.output}": target.reshape(*rows, dim_v)}
            outputs |= {name: x.reshape(rows) for name, x in figures.items()}
            if "sinks" in ending:
                ending["sinks"] = ending["sinks"].reshape(heads_kv, group)
            _attend_few(call, place, q, options, division, **sums, **numbers, **outputs, **ending)
            return
        if few:
            _attend_few(call, place, q, options, division, **sums, **numbers)
        if many and not finishes:
            _attend_many(call, place, q, of_many, **{name: x[:1] for name, x in sums.items()}, **numbers)
        merged = {name: x.reshape(nodes, batch, heads_kv * group, *x.shape[4:]) for name, x in sums.items()}
        if "row_shift" in options and not call.softcap:
            merged["row_shift"] = options["row_shift"].reshape(batch, heads_kv * group, queries)
        attention_merge(**merged, **ending, **{f"out_{call.output}": target}, **figures, stream=stream)
    if many and finishes:
        direct = target if fits else place.empty(target.shape, call.output)
        if not fits and few:
            converted(target, call.output, place, direct)
        outputs = {f"out_{call.output}": direct.reshape(*rows, dim_v)} | {
            n: x.reshape(rows) for n, x in figures.items()
        }
        sinks = {} if call.sinks is None else dict(sinks=sinks_on(call.sinks, place).reshape(heads_kv, group))
        _attend_many(call, place, q, of_many, **outputs, **sinks, splits=1, **numbers)
        if not fits:
            converted(direct, call.output, place, target)


def _handed_back(call: _Paged, place: Place, target: DeviceArray, figures: dict) -> tuple:
    """Return results in the form that the caller gets."""
    figures = tuple(place.back(x) for x in figures.values())
    if isinstance(call.out, DeviceArray):
        return (call.caller_out, *figures)
    result = place.back(target.transpose(0, 2, 1, 3) if call.transposed else target)
    if call.caller_out is not None:
        np.copyto(call.caller_out, result)
        result = call.caller_out
    return (result, *figures)


def _options(call: _Paged, place: Place, q: DeviceArray) -> dict[str, Any]:
    """Return the kernels' arguments for sequences, and the products of q with the mean of the keys if a result depends
    on them."""
    cache, options = call.cache, dict(block_table=place.put(call.table), key_ends=place.put(call.lengths))
    if call.cu_seqlens is not None:
        cu = place.put(call.cu_seqlens)
        options |= dict(query_starts=cu[:-1], query_ends=cu[1:])
    shows = call.softcap > 0 or call.sinks is not None or call.return_lse or not call.normalize
    if cache.k_mean is not None and shows:
        sequences = options["key_ends"].shape[0]
        mean = place.empty((1, sequences, cache.heads, cache.dim), f32)
        converted(cache.k_mean.broadcast_to(mean.shape), f32, place, mean)
        values = with_whole_rows(q, place.stream)
        grouped = values.reshape(values.shape[0], cache.heads, call.group, *values.shape[2:])
        options["row_shift"] = row_dot(
            grouped, mean[0], options.get("query_starts"), scale=call.scale, stream=place.stream
        )
    return options


def _families(call: _Paged) -> tuple[bool, bool]:
    """Return whether sequences have few queries, and whether some have many.

    For packed queries with bounds on the device, all sequences count as many if there are more than FEW_QUERIES rows
    for each on average.
    """
    queries = call.q.shape[2]
    if isinstance(call.cu_seqlens, np.ndarray):
        counts = np.diff(call.cu_seqlens)
        return bool(((0 < counts) & (counts <= FEW_QUERIES)).any()), bool((counts > FEW_QUERIES).any())
    most = FEW_QUERIES * (1 if call.cu_seqlens is None else call.table.shape[0])
    return queries <= most, queries > most


def _multiplied(call: _Paged, place: Place, q: DeviceArray) -> DeviceArray:
    """Return queries [batch, heads_kv, group, queries, dim] in the type of their MMAs."""
    member = call.cache.multiplied(call.q.dtype)
    q = q if member.holds(q.dtype) and is_loadable(q) else converted(q, member, place)
    return q.reshape(q.shape[0], call.cache.heads, call.group, *q.shape[2:])


@dataclass(frozen=True)
class _Division:
    """How the kernel for few queries divides the keys of a sequence. finishes: whether it writes the outputs itself."""

    nodes: int = 1
    splits: int = 1
    node_keys: int = NODE_KEYS
    arrivals: DeviceArray | None = None
    finishes: bool = False


def _divided(call: _Paged, q: DeviceArray, options: dict, rows: tuple, target: DeviceArray, alone: bool) -> _Division:
    """Divide the keys. alone: whether no other kernel serves sequences of the call."""
    cache, takes_one = call.cache, _takes_one(call, q)
    keys = call.table.shape[1] * cache.page_size
    queries = q.shape[3] if call.cu_seqlens is None else min(q.shape[3], FEW_QUERIES)
    sequences, row_blocks = options["key_ends"].shape[0], -(-call.group * queries // 16)
    blocks, multiprocessors = cache.heads * row_blocks * sequences, cache.backend.multiprocessors
    nodes, chunks, arrivals = nodes_of(keys), nodes_of(keys, CHUNK_KEYS), cache.arrivals(rows)
    counts, held = alone and arrivals is not None, holds_of(cache.format) + 1
    if takes_one and counts and call.splits is None and writes_outputs(chunks, target):
        if takes_chunks(chunks, blocks, multiprocessors, held):
            return _Division(chunks, chunks, CHUNK_KEYS, arrivals, True)
    resident = dict(resident=blocks_of_one(q, held)) if takes_one else {}
    splits = splits_of_nodes(nodes, blocks, multiprocessors, call.splits, **resident)
    if not alone or not writes_outputs(nodes, target) or (splits > 1 and arrivals is None):
        return _Division(nodes, splits)
    return _Division(nodes, splits, arrivals=arrivals if splits > 1 else None, finishes=True)


def _attend_few(call: _Paged, place: Place, q: DeviceArray, options: dict, division: _Division, **rest) -> None:
    """Launch `attention_few`, or `attention_one` if it serves the call, on the nodes of all sequences."""
    cache = call.cache
    arrays: dict[str, Any] = {name: as_bytes(x) for name, x in cache.arrays.items() if x is not None}
    if cache.k_global is not None:
        arrays["k_global"] = cache.k_global
    if division.arrivals is not None:
        arrays["arrivals"] = division.arrivals
    rest["splits"], k_holds = division.splits, holds_of(cache.format)
    if _takes_one(call, q):
        del rest["softcap"]
        rest["node_keys"] = division.node_keys
        attention_one(q, **arrays, **options, **rest, held=k_holds + 1, stream=place.stream)
        return
    holds = dict(k_holds=k_holds, v_holds=holds_of(cache.format_v))
    attention_few(q, **arrays, **options, **holds, **rest, stream=place.stream)


def _takes_one(call: _Paged, q: DeviceArray) -> bool:
    """Return whether `attention_one` serves a call for few queries."""
    cache = call.cache
    fits = cache.dim in ONE_DIMS and call.group <= ONE_ROWS and q.shape[3] == 1 and bf16.holds(q.dtype)
    scores_need_a_factor = not call.softcap and call.scale > 0
    alike = cache.dim == cache.dim_v and cache.format == cache.format_v
    return fits and scores_need_a_factor and alike and call.cu_seqlens is None


def _attend_many(call: _Paged, place: Place, q: DeviceArray, options: dict, **rest) -> None:
    """Launch attention of many queries on keys and values expanded to 16 bits.

    Values that are not finite are expanded to zeros, since a hidden key's weight of 0 would make NaN of them, and are
    added to the queries that see them afterwards.
    """
    cache, member, lengths = call.cache, call.cache.multiplied(call.q.dtype), call.lengths
    options = dict(options)
    shift, table, ends = options.pop("row_shift", None), options.pop("block_table"), options["key_ends"]
    keys = table.shape[1] * cache.page_size if isinstance(lengths, DeviceArray) else int(lengths.max(initial=1))
    packed, sequences, dense = "query_starts" in options, table.shape[0], {}
    if packed:
        options |= {name: place.empty((sequences,), i32) for name in ("key_starts", "key_ends")}
    marks = place.empty((cache.heads, sequences), u32)  # where values are not finite
    for name, dim in (("k", cache.dim), ("v", cache.dim_v)):
        format = cache.format if name == "k" else cache.format_v
        out = place.empty((cache.heads, sequences, keys, dim), member)
        where = dict(cleared=marks) if name == "k" else dict(marks=marks)
        if packed and name == "k":
            where |= dict(starts=options["key_starts"], ends=options["key_ends"])
        rows, scales = as_bytes(cache.arrays[name]), cache.arrays[f"{name}_scales"]
        scales = None if scales is None else as_bytes(scales)
        expand_pages(
            rows,
            scales,
            block_table=table,
            key_ends=ends,
            out=out,
            **where,
            holds=holds_of(format),
            stream=place.stream,
        )
        dense[name] = out.reshape(1, cache.heads, sequences * keys, dim) if packed else out.transpose(1, 0, 2, 3)
    adjustments = {} if cache.k_global is None else dict(k_global=cache.k_global)
    if rest["softcap"] and shift is not None:
        adjustments["row_shift"] = shift
    attend = attention_adjusted if adjustments else attention_bf16
    attend(q, **dense, **adjustments, **options, sequences=sequences, **rest, stream=place.stream)
    outputs = {name: x for name, x in rest.items() if name.startswith("out_")} or dict(out_f32=rest["partial"][0])
    add_nonfinite(
        rows,
        scales,
        block_table=table,
        key_ends=ends,
        marks=marks,
        **{name: options[name] for name in ("query_starts", "query_ends") if packed},
        **outputs,
        holds=holds_of(cache.format_v),
        is_f16=int(member is f16),
        keys=keys,
        left=rest["left"],
        right=rest["right"],
        stream=place.stream,
    )
