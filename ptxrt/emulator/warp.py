"""Warp-level exchange, votes and reductions: shfl, vote, match, redux, elect, activemask, bar.warp
(PTX ISA 9.7.9.6 shfl.sync, 9.7.13 vote, match, redux, elect, activemask, bar.warp.sync).

Arrays are (warps, 32). The group of a lane is the lanes of its membermask; lanes of one warp may have different masks
and so form several groups. calls.py has checked that the lanes of a mask execute together; `active` is True for lanes
that execute (None: all). A read from a lane outside of the group is a fault, because its result is undefined.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from .instruction import Fault, Semantics, Unsupported, Warps, define

_LANES = np.arange(32)
_BIT = np.uint32(1) << np.arange(32, dtype=np.uint32)
_ALL = np.uint32(0xFFFFFFFF)


def _bits(lanes: np.ndarray) -> np.ndarray:
    """Pack bool (..., 32) into uint32 (...), lane 0 lowest."""
    return np.packbits(lanes, axis=-1, bitorder="little").view("<u4")[..., 0].astype(np.uint32, copy=False)


def _group(mask, active) -> np.ndarray:
    """The group of each lane as a bit mask: the executing lanes of its membermask. Shape () or (warps, 32)."""
    mask = np.asarray(mask, np.uint32)
    return mask if active is None else mask & _bits(active)[:, None]


# shfl

_SHUFFLES = ("up", "down", "bfly", "idx")


def _source_lanes(mode: str, b, c) -> tuple[np.ndarray, np.ndarray]:
    """(source lane, whether it is in range) of each lane; a lane whose source is out of range reads itself."""
    lane = _LANES
    distance, clamp, segment = b & 31, c & 31, (c >> 8) & 31
    first = lane & segment
    bound = first | (clamp & ~segment)
    if mode == "up":
        source = lane - distance
        valid = source >= bound
    else:
        source = {"down": lane + distance, "bfly": lane ^ distance, "idx": first | (distance & ~segment)}[mode]
        valid = source <= bound
    if mode == "idx" and np.ndim(clamp) == 0 and clamp == 31:
        return source, np.True_  # the source is always within the segment
    return np.where(valid, source, lane), valid


@cache
def _constant_source_lanes(mode: str, b: int, c: int) -> tuple[np.ndarray, np.ndarray]:
    return _source_lanes(mode, b, c)


@define("shfl.sync")
def shfl_sync(modifiers: tuple[str, ...]) -> Semantics:
    """shfl.sync.{up|down|bfly|idx}.b32 d|p, a, b, c, membermask: d is the a of another lane; p: that lane is in range.

    b is the distance or the lane. c holds the clamp (bits 4..0) and the segment mask (bits 12..8).
    """
    if len(modifiers) != 2 or modifiers[0] not in _SHUFFLES or modifiers[1] != "b32":
        raise Unsupported("expected shfl.sync.{up|down|bfly|idx}.b32")
    mode = modifiers[0]

    def shuffle(a, b, c, mask, active=None):
        c = int(c) if np.ndim(c) == 0 else c.astype(np.int64)
        if np.ndim(b) == 0 and isinstance(c, int):
            source, valid = _constant_source_lanes(mode, int(b), c)
        else:
            source, valid = _source_lanes(mode, np.asarray(b).astype(np.int64), c)
        result = _gathered(a, source)
        group = _group(mask, active)
        if group.ndim or group != _ALL:
            outside = (group >> source.astype(np.uint32)) & np.uint32(1) == 0
            if active is not None:
                outside = outside & active
            if outside.any():
                raise Fault(
                    f"shfl.sync.{mode} reads from a lane that its membermask does not name or that does not execute",
                    outside,
                )
        return result, valid

    return Warps("b32|pred?", "b32, b32, b32, b32", shuffle, mask=3)


def _gathered(a, source: np.ndarray):
    """a[warp, source[warp, lane]]; `source` may be the same for all warps, `a` the same for all lanes."""
    if np.ndim(a) == 0:
        return a
    if source.ndim == 1:
        return a.take(source, axis=1)
    return a.take(source + 32 * np.arange(len(a))[:, None])


# Votes

_VOTES = {
    "all": lambda votes, group: votes == group,
    "any": lambda votes, group: votes != 0,
    "uni": lambda votes, group: (votes == group) | (votes == 0),
}


@define("vote.sync")
def vote_sync(modifiers: tuple[str, ...]) -> Semantics:
    """vote.sync.{all|any|uni}.pred p, a, membermask and vote.sync.ballot.b32 d, a, membermask.

    The mode may also stand before .sync, as in vote.ballot.sync.b32.
    """
    if modifiers == ("ballot", "b32"):
        return Warps("b32", "pred, b32", _ballot, mask=1)
    if len(modifiers) != 2 or modifiers[0] not in _VOTES or modifiers[1] != "pred":
        raise Unsupported("expected vote.sync.{all|any|uni}.pred or vote.sync.ballot.b32")
    decide = _VOTES[modifiers[0]]

    def vote(a, mask, active=None):
        return decide(_ballot(a, mask, active), _group(mask, active))

    return Warps("pred", "pred, b32", vote, mask=1)


def _mode_first(mode: str):
    """Define vote.ballot.sync.b32 and similar: the word order of CUB and Thrust, which ptxas accepts."""
    define(f"vote.{mode}.sync")(lambda modifiers: vote_sync((mode, *modifiers)))


for _mode in (*_VOTES, "ballot"):
    _mode_first(_mode)


def _ballot(a, mask, active=None) -> np.ndarray:
    """The lanes of the group whose `a` is true, as bits; (warps, 32) or broadcastable to it."""
    votes = _bits(np.broadcast_to(a, (*np.shape(a)[:-1], 32)))[..., None]
    return votes & _group(mask, active)


@define("activemask")
def activemask(modifiers: tuple[str, ...]) -> Semantics:
    """activemask.b32 d: the lanes that execute this instruction together."""
    if modifiers != ("b32",):
        raise Unsupported("expected activemask.b32")
    return Warps("b32", "", lambda active=None: _ALL if active is None else _bits(active)[:, None], mask=-1)


# Comparison and reduction


def _members(group: np.ndarray) -> np.ndarray:
    """Groups as bool (..., 32): whether lane j is in the group."""
    return (np.asarray(group)[..., None] & _BIT) != 0


def _equal_lanes(a, group: np.ndarray) -> np.ndarray:
    """For each lane, the lanes of its group with the same `a`, as a bit mask (warps, 32)."""
    a = np.asarray(a)
    if a.ndim == 0:
        return group
    return _bits((a[..., :, None] == a[..., None, :]) & _members(group))


@define("match.any.sync")
def match_any(modifiers: tuple[str, ...]) -> Semantics:
    """match.any.sync.{b32|b64} d, a, membermask: the lanes of the group that hold the same a."""
    type_ = _bit_type("match.any.sync", modifiers)
    return Warps("b32", f"{type_}, b32", lambda a, mask, active=None: _equal_lanes(a, _group(mask, active)), mask=1)


@define("match.all.sync")
def match_all(modifiers: tuple[str, ...]) -> Semantics:
    """match.all.sync.{b32|b64} d|p, a, membermask: d is the group and p true if all its lanes hold the same a; else 0
    and false."""
    type_ = _bit_type("match.all.sync", modifiers)

    def match(a, mask, active=None):
        group = _group(mask, active)
        same = _equal_lanes(a, group) == group
        return np.where(same, group, np.uint32(0)), same

    return Warps("b32|pred?", f"{type_}, b32", match, mask=1)


def _bit_type(name: str, modifiers: tuple[str, ...]) -> str:
    if modifiers not in (("b32",), ("b64",)):
        raise Unsupported(f"expected {name}.{{b32|b64}}")
    return modifiers[0]


_REDUCTIONS = {
    **{(op, type_): op for op in ("add", "min", "max") for type_ in ("s32", "u32")},
    **{(op, "b32"): op for op in ("and", "or", "xor")},
}
#: By operation: the reduction over the last axis, and its neutral element for lanes outside of the group.
_REDUCE = {
    "add": (lambda a: a.sum(-1, dtype=a.dtype), lambda type_: 0),
    "min": (lambda a: a.min(-1), lambda type_: np.iinfo(type_).max),
    "max": (lambda a: a.max(-1), lambda type_: np.iinfo(type_).min),
    "and": (lambda a: np.bitwise_and.reduce(a, -1), lambda type_: np.iinfo(type_).max),
    "or": (lambda a: np.bitwise_or.reduce(a, -1), lambda type_: 0),
    "xor": (lambda a: np.bitwise_xor.reduce(a, -1), lambda type_: 0),
}


@define("redux.sync")
def redux_sync(modifiers: tuple[str, ...]) -> Semantics:
    """redux.sync.{add|min|max}.{s32|u32} and redux.sync.{and|or|xor}.b32 d, a, membermask; add wraps."""
    if modifiers not in _REDUCTIONS:
        raise Unsupported("expected redux.sync.{add|min|max}.{s32|u32} or redux.sync.{and|or|xor}.b32")
    reduce, neutral = _REDUCE[modifiers[0]]

    def redux(a, mask, active=None):
        a, group = np.asarray(a), _group(mask, active)
        a = np.broadcast_to(a, (*a.shape[:-1], 32))
        if group.ndim == 0 and group == _ALL:
            return reduce(a)[..., None]
        return reduce(np.where(_members(group), a[..., None, :], a.dtype.type(neutral(a.dtype))))

    return Warps(modifiers[1], f"{modifiers[1]}, b32", redux, mask=1)


@define("elect.sync")
def elect_sync(modifiers: tuple[str, ...]) -> Semantics:
    """elect.sync d|p, membermask: d is the lowest lane of the group; p: whether this thread is that lane."""
    if modifiers:
        raise Unsupported("expected elect.sync without modifiers")

    def elect(mask, active=None):
        leader = _members(_group(mask, active)).argmax(-1).astype(np.uint32)
        return leader, leader == _LANES

    return Warps("b32|pred", "b32", elect, mask=0)


@define("bar.warp.sync")
def bar_warp_sync(modifiers: tuple[str, ...]) -> Semantics:
    """bar.warp.sync membermask: the lanes of the mask wait for each other; the scheduler has them together already."""
    if modifiers:
        raise Unsupported("expected bar.warp.sync without modifiers")
    return Warps("", "b32", lambda mask, active=None: None, mask=0, orders=True)
