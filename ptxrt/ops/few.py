"""`attention` with few queries: launches `attention_few` for the nodes of all sequences, then merges
them, unless their blocks do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..array import DeviceArray
from ..formats import f32
from .attention_few import (
    FEW_QUERIES,
    MIXED_DIM,
    MOST_NODES,
    attention_few,
    nodes_of,
    splits_of_nodes,
    writes_outputs,
)
from .attention_kernels import attention_merge
from .place import ROW_UNIT, Place, converted
from .scales import fill_f32

if TYPE_CHECKING:
    from .attention_call import Call


@dataclass(frozen=True)
class FewOperands:
    """The arguments of `attention_few` by name, and those of the merge."""

    named: dict[str, Any]
    row_shift: DeviceArray | None = None
    v_global: DeviceArray | None = None


def families(call: Call) -> tuple[bool, bool]:
    """Return whether `attention_few` serves some sequences of a call, and whether some are left for the other kernel.

    `attention_few` serves sequences of at most FEW_QUERIES queries. It serves no calls with a mask, with smoothed
    queries, with more keys than one merge takes, or with 16-bit values and tiles of more than MIXED_DIM columns; and no
    packed sequences with lengths on a device or with normalize=False.
    """
    if call.way.pv == "bf16" and max(call.way.dims(call.k, call.v)) > MIXED_DIM:
        return False, True
    if call.mask is not None or call.smooth_q or nodes_of(call.k.shape[2]) > MOST_NODES or 0 in call.q.shape:
        return False, True
    if call.cu_seqlens_q is None:
        return call.q.shape[2] <= FEW_QUERIES, call.q.shape[2] > FEW_QUERIES
    if isinstance(call.cu_seqlens_q, DeviceArray) or not call.normalize:
        return False, True
    few = np.diff(call.cu_seqlens_q) <= FEW_QUERIES
    return bool(few.any()), not few.all()


def only(call: Call, few: bool) -> Call:
    """Return a packed call with only its sequences of few queries, or only the others; the rest get no queries."""
    starts, counts = call.cu_seqlens_q[:-1], np.diff(call.cu_seqlens_q)
    ends = starts + np.where((counts <= FEW_QUERIES) == few, counts, 0)
    return replace(call, sequences=dict(call.sequences, query_ends=ends.astype(np.int32)))


def sinks_on(sinks, place: Place) -> DeviceArray:
    """Return sinks of any float type on the device, float32 [heads]."""
    sinks = place.put(sinks)
    if sinks.dtype == np.float32:
        return sinks
    heads = sinks.shape[0]
    return converted(sinks[None, None, None], f32, place, place.empty((1, 1, 1, heads), f32)).reshape(heads)


def launch_few(
    call: Call, operands: FewOperands, place: Place, others: bool, target: DeviceArray, figures: dict
) -> None:
    """Compute a call on the device: write target [batch, heads, queries, dim_v], and figures [batch, heads, queries] by
    the merge's argument names.

    others: whether the call has other sequences, whose rows another kernel writes afterwards.
    """
    (batch, heads, queries, _), (_, heads_kv, keys, dim_v) = call.q.shape, call.v.shape
    rows, nodes = (batch, heads_kv, call.group, queries), nodes_of(keys)
    sums = {name: place.empty((nodes, *rows), f32) for name in ("row_max", "row_sum")}
    sums["partial"] = place.empty((nodes, *rows, -(-dim_v // ROW_UNIT) * ROW_UNIT), f32)
    options = {name: place.put(x) for name, x in call.sequences.items()}
    sequences = next((x.shape[0] for x in options.values()), batch)
    row_blocks = -(-call.group * min(queries, FEW_QUERIES) // 16)
    splits = splits_of_nodes(nodes, heads_kv * row_blocks * sequences, sums["partial"].backend.multiprocessors)
    numbers = dict(
        scale=call.scale, softcap=call.softcap, left=call.left, right=call.right, most_keys=keys, sequences=sequences
    )
    ending = {}
    if call.sinks is not None:
        ending["sinks"] = sinks_on(call.sinks, place)
    if operands.v_global is not None:
        ending["v_global"] = operands.v_global
    shift = operands.row_shift
    finishes = splits == 1 and writes_outputs(nodes, target) and not others
    if finishes:
        outputs = {f"out_{call.output}": target.reshape(*rows, dim_v)}
        options |= outputs | {name: x.reshape(rows) for name, x in figures.items()} | ending
        if "sinks" in ending:
            options["sinks"] = ending["sinks"].reshape(heads_kv, call.group)
    elif others:  # nodes that are not written are skipped by the merge
        fill_f32(x=sums["row_max"].reshape(sums["row_max"].size), value=-np.inf, stream=place.stream)
    if shift is not None and (call.softcap or finishes):
        options["row_shift"] = shift
    attention_few(**operands.named, **options, **numbers, **sums, splits=splits, stream=place.stream)
    if finishes:
        return
    if shift is not None and not call.softcap:
        ending["row_shift"] = shift.reshape(batch, heads, queries)
    arguments = {name: x.reshape(nodes, batch, heads, *x.shape[4:]) for name, x in sums.items()}
    attention_merge(**arguments, **ending, **{f"out_{call.output}": target}, **figures, stream=place.stream)
