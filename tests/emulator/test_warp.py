"""Shuffles, votes, matches and reductions in isolation, against the pseudocode of PTX ISA 9.7.9.6 and 9.7.13 in
Python."""

import operator
import random
from functools import reduce

import numpy as np
import pytest

from ptxrt.emulator.instruction import Unsupported, resolve
from ptxrt.errors import EmulatorFault

ALL = 0xFFFFFFFF
WARPS = 3


def words(seed, count=32 * WARPS, bits=32):
    return np.random.default_rng(seed).integers(0, 1 << bits, count, dtype=np.uint32 if bits <= 32 else np.uint64)


# shfl


def shuffled(mode, lane, b, c):
    """(source lane, predicate) of PTX ISA 9.7.9.6, shfl.sync."""
    bval, cval, segmask = b & 0x1F, c & 0x1F, (c >> 8) & 0x1F
    max_lane = (lane & segmask) | (cval & ~segmask)
    min_lane = lane & segmask
    if mode == "up":
        j = lane - bval
        pval = j >= max_lane
    elif mode == "down":
        j = lane + bval
        pval = j <= max_lane
    elif mode == "bfly":
        j = lane ^ bval
        pval = j <= max_lane
    else:
        j = min_lane | (bval & ~segmask)
        pval = j <= max_lane
    return (j if pval else lane), pval


def clamp(mode, width):
    return ((32 - width) << 8) | (0 if mode == "up" else 31)


@pytest.mark.parametrize("width", [32, 16, 8, 4, 1])
@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shuffle_by_a_constant(execute, mode, width):
    a = words(1)
    for distance in (0, 1, 2, 5, 16, 31):
        body = f"shfl.sync.{mode}.b32 %d|%p, %a, {distance}, {clamp(mode, width)}, {ALL - (1 << 32)};"
        results = execute(body, {"a": ("b32", a)}, {"d": "b32", "p": "pred"})
        for thread in range(len(a)):
            source, valid = shuffled(mode, thread % 32, distance, clamp(mode, width))
            assert results["d"][thread] == a[thread - thread % 32 + source] and results["p"][thread] == valid


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shuffle_by_registers(execute, mode):
    """Distance and clamp differ between lanes; their upper bits are ignored; without a predicate output."""
    generator = random.Random(mode)
    a = words(2)
    b = np.array([generator.randrange(32) | 0xFFFFFF00 for _ in a], np.uint32)
    c = np.array([generator.choice([0x1F, 0x101F, 0x181F, 0x1807, 0x0, 0x1C03]) | 0xFFFF0000 for _ in a], np.uint32)
    inputs = {"a": ("b32", a), "b": ("b32", b), "c": ("b32", c)}
    found = execute(f"shfl.sync.{mode}.b32 %d, %a, %b, %c, -1;", inputs, {"d": "b32"})["d"]
    for thread in range(len(a)):
        source, _ = shuffled(mode, thread % 32, int(b[thread]), int(c[thread]))
        assert found[thread] == a[thread - thread % 32 + source], thread


def test_halves_of_a_warp_shuffle_apart(execute):
    """Each half names its own lanes, as tiles of cooperative groups do."""
    a = words(3, 32)
    mask = np.where(np.arange(32) < 16, 0x0000FFFF, 0xFFFF0000).astype(np.uint32)
    found = execute("shfl.sync.bfly.b32 %d, %a, 3, 4127, %m;", {"a": ("b32", a), "m": ("b32", mask)}, {"d": "b32"})["d"]
    assert (found == a[np.arange(32) ^ 3]).all()


def test_shuffle_within_part_of_a_warp(execute):
    a = words(4, 32)
    body = """
        mov.u32 %d, 7;
        setp.lt.u32 %p, %lane, 8;
        @%p shfl.sync.idx.b32 %d, %a, 5, 31, 255;
    """
    inputs = {"a": ("b32", a), "lane": ("b32", np.arange(32, dtype=np.uint32)), "p": ("pred", np.zeros(32))}
    found = execute(body, inputs, {"d": "b32"})["d"]
    assert (found[:8] == a[5]).all() and (found[8:] == 7).all()


def test_reading_a_lane_outside_the_mask_is_a_fault(execute):
    body = "setp.lt.u32 %p, %lane, 8; @%p shfl.sync.down.b32 %lane, %lane, 1, 31, 255;"
    with pytest.raises(EmulatorFault, match="thread.*7"):
        execute(body, {"lane": ("b32", np.arange(32, dtype=np.uint32)), "p": ("pred", np.zeros(32))}, {"lane": "b32"})


@pytest.mark.parametrize(
    "instruction",
    ["shfl.sync.idx.b32 %a, %a, %a, 31, 255;", "vote.sync.ballot.b32 %a, 1, 255;", "redux.sync.add.u32 %a, %a, 255;"],
)
def test_a_mask_that_misses_its_own_lane_is_a_fault(execute, instruction):
    with pytest.raises(EmulatorFault):
        execute(instruction, {"a": ("b32", np.zeros(32, np.uint32))}, {"a": "b32"})


@pytest.mark.parametrize(
    "instruction", ["shfl.sync.idx.b32 %a, %a, 0, 31, -1;", "vote.sync.ballot.b32 %a, 1, -1;", "bar.warp.sync -1;"]
)
def test_a_mask_that_names_an_absent_lane_is_a_fault(execute, instruction):
    """Half of the warp waits for the other half at another instruction."""
    body = f"""
        setp.lt.u32 %p, %a, 16;
        @%p bra low;
        {instruction}
        bra end;
    low:
        bar.warp.sync 65535;
        {instruction.replace("-1", "65535")}
    end:
    """
    with pytest.raises(EmulatorFault):
        execute(body, {"a": ("b32", np.arange(32, dtype=np.uint32)), "p": ("pred", np.zeros(32))}, {"a": "b32"})


# Votes


VOTE_MASKS = [ALL, 0x0000FFFF, 0x80000001]


def restricted(instruction, mask):
    """`instruction` executed by the lanes of `mask` alone."""
    return f"""
        mov.u32 %word, %laneid;
        shr.u32 %word, {mask}, %word;
        and.b32 %word, %word, 1;
        setp.ne.u32 %q, %word, 0;
        @%q {instruction}
    """


@pytest.mark.parametrize("mask", VOTE_MASKS)
def test_votes(execute, mask):
    votes = np.concatenate([np.ones(32), np.zeros(32), np.arange(32) % 3 == 0, np.arange(32) == 31, np.arange(32) != 0])
    members = [lane for lane in range(32) if mask >> lane & 1]
    results = {}
    for kind in ("all", "any", "uni"):
        body = restricted(f"vote.sync.{kind}.pred %d, %a, {mask};", mask)
        inputs = {"a": ("pred", votes), "q": ("pred", votes * 0), "d": ("pred", votes * 0)}
        results[kind] = execute(body, inputs, {"d": "pred"})["d"]
    inputs = {"a": ("pred", votes), "q": ("pred", votes * 0), "d": ("b32", np.full(len(votes), 9, np.uint32))}
    ballots = execute(restricted(f"vote.sync.ballot.b32 %d, %a, {mask};", mask), inputs, {"d": "b32"})["d"]
    for warp in range(len(votes) // 32):
        true = [bool(votes[32 * warp + lane]) for lane in members]
        for lane in range(32):
            thread = 32 * warp + lane
            if lane not in members:
                assert ballots[thread] == 9
                continue
            assert results["all"][thread] == all(true) and results["any"][thread] == any(true)
            assert results["uni"][thread] == (len(set(true)) == 1)
            assert ballots[thread] == sum(1 << member for member, vote in zip(members, true) if vote)


def test_negated_vote(execute):
    votes = np.zeros(32)
    votes[4] = 1
    assert (
        execute("vote.sync.ballot.b32 %d, !%a, -1;", {"a": ("pred", votes)}, {"d": "b32"})["d"] == ALL - (1 << 4)
    ).all()


def test_each_half_votes_by_itself(execute):
    mask = np.where(np.arange(32) < 16, 0x0000FFFF, 0xFFFF0000).astype(np.uint32)
    inputs = {"a": ("pred", np.arange(32) < 20), "m": ("b32", mask)}
    found = execute("vote.sync.ballot.b32 %d, %a, %m;", inputs, {"d": "b32"})["d"]
    assert (found[:16] == 0xFFFF).all() and (found[16:] == 0xF0000).all()


def test_activemask(execute):
    body = "mov.u32 %d, 0; setp.lt.u32 %q, %a, 5; @%q activemask.b32 %d;"
    inputs = {"a": ("b32", np.arange(32, dtype=np.uint32)), "q": ("pred", np.zeros(32))}
    found = execute(body, inputs, {"d": "b32"})["d"]
    assert (found[:5] == 31).all() and not found[5:].any()
    assert (execute("activemask.b32 %d;", {"a": inputs["a"]}, {"d": "b32"})["d"] == ALL).all()


# Matches and reductions


@pytest.mark.parametrize("register", ["b32", "b64"])
@pytest.mark.parametrize("mask", [ALL, 0x00FF00F0])
def test_match_any(execute, mask, register):
    a = words(5, 64) % 5
    a = a.astype(np.uint64) << np.uint64(33) if register == "b64" else a
    inputs = {"a": (register, a), "q": ("pred", np.zeros(64)), "d": ("b32", np.zeros(64, np.uint32))}
    found = execute(restricted(f"match.any.sync.{register} %d, %a, {mask};", mask), inputs, {"d": "b32"})["d"]
    for thread in range(64):
        first = thread - thread % 32
        same = sum(1 << lane for lane in range(32) if mask >> lane & 1 and a[first + lane] == a[thread])
        assert found[thread] == (same if mask >> thread % 32 & 1 else 0)


@pytest.mark.parametrize("register", ["b32", "b64"])
def test_match_all(execute, register):
    a = np.concatenate([np.full(32, 6), np.arange(32) == 17, np.full(32, 0)]).astype(register.replace("b", "uint"))
    results = execute(f"match.all.sync.{register} %d|%p, %a, -1;", {"a": (register, a)}, {"d": "b32", "p": "pred"})
    for warp, same in enumerate([True, False, True]):
        part = slice(32 * warp, 32 * warp + 32)
        assert (results["p"][part] == same).all() and (results["d"][part] == (ALL if same else 0)).all()


def signed(number):
    return number - (1 << 32) if number >> 31 else number


REDUCTIONS = {
    "add.u32": lambda items: sum(items) & ALL,
    "add.s32": lambda items: sum(items) & ALL,
    "min.u32": min,
    "max.u32": max,
    "min.s32": lambda items: min(map(signed, items)) & ALL,
    "max.s32": lambda items: max(map(signed, items)) & ALL,
    "and.b32": lambda items: reduce(operator.and_, items),
    "or.b32": lambda items: reduce(operator.or_, items),
    "xor.b32": lambda items: reduce(operator.xor, items),
}


@pytest.mark.parametrize("mask", [ALL, 0x0F0F0F01])
@pytest.mark.parametrize("operation", REDUCTIONS)
def test_redux(execute, operation, mask):
    a = words(6)
    inputs = {"a": ("b32", a), "q": ("pred", np.zeros(len(a))), "d": ("b32", np.zeros(len(a), np.uint32))}
    found = execute(restricted(f"redux.sync.{operation} %d, %a, {mask};", mask), inputs, {"d": "b32"})["d"]
    for thread in range(len(a)):
        first = thread - thread % 32
        items = [int(a[first + lane]) for lane in range(32) if mask >> lane & 1]
        assert found[thread] == (REDUCTIONS[operation](items) if mask >> thread % 32 & 1 else 0)


def test_elect(execute):
    results = execute("elect.sync %d|%p, -1;", {"a": ("b32", words(7, 64))}, {"d": "b32", "p": "pred"})
    assert not results["d"].any() and np.flatnonzero(results["p"]).tolist() == [0, 32]
    body = restricted("elect.sync _|%p, 0xf0;", 0xF0)
    results = execute(body, {"q": ("pred", np.zeros(32)), "p": ("pred", np.zeros(32))}, {"p": "pred"})
    assert np.flatnonzero(results["p"]).tolist() == [4]


def test_bar_warp_sync_passes_what_is_together(execute):
    a = words(8, 32)
    assert (execute("bar.warp.sync -1; mov.u32 %d, %a;", {"a": ("b32", a)}, {"d": "b32"})["d"] == a).all()


@pytest.mark.parametrize(
    "opcode",
    [
        "shfl.bfly.b32",
        "shfl.sync.bfly.b64",
        "vote.all.pred",
        "redux.sync.max.f32",
        "redux.sync.and.u32",
        "match.any.b32",
    ],
)
def test_other_forms_are_refused(opcode):
    with pytest.raises(Unsupported, match="is not implemented"):
        resolve(opcode)


@pytest.mark.parametrize("mode, type_", [("all", "pred"), ("any", "pred"), ("uni", "pred"), ("ballot", "b32")])
def test_votes_with_the_mode_first(execute, rng, mode, type_):
    """vote.ballot.sync.b32, as CUB and Thrust write it, is vote.sync.ballot.b32."""
    votes = {"a": ("pred", rng.integers(0, 2, 64).astype(bool) | (np.arange(64) < 32))}
    found = [
        execute(f"{opcode} %d, %a, 0xffffffff;", votes, {"d": type_})["d"]
        for opcode in (f"vote.{mode}.sync.{type_}", f"vote.sync.{mode}.{type_}")
    ]
    assert (found[0] == found[1]).all()
    with pytest.raises(Unsupported, match=f"vote.{mode}.sync.u16 is not implemented"):
        resolve(f"vote.{mode}.sync.u16")
