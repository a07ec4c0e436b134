"""Recorded calls, prepared or remembered, whose arrays share memory: a function may decide by that."""

import numpy as np
import pytest

import ptxrt
from ptxrt.errors import ArgumentError
from ptxrt.ops import gemm

D = ptxrt.to_device


def drawn(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float16)


A, B, ADDED = drawn(6, 48), drawn(40, 48), drawn(6, 40)


@pytest.fixture
def want(emulator):
    return ptxrt.matmul(A, B, residual=ADDED)


@pytest.mark.parametrize("order", [(1, 1, 1, 0, 0, 0, 1), (0, 0, 0, 1, 1, 1, 0)], ids=["in place", "apart"])
def test_remembered_calls_know_whether_out_is_the_residual(want, order):
    a, b = D(A), D(B)
    for in_place in order:
        added = D(ADDED)
        out = added if in_place else D(np.full_like(ADDED, 7))
        ptxrt.matmul(a, b, residual=added, out=out)
        np.testing.assert_array_equal(out.to_numpy(), want)
        np.testing.assert_array_equal(added.to_numpy(), want if in_place else ADDED)


def test_both_ways_are_remembered(emulator, monkeypatch):
    """Each way has a record of its own, so that calls that alternate do not run the function."""
    a, b, calls = D(drawn(3, 56)), D(drawn(24, 56)), []  # shapes that no other test has
    run = gemm._run
    monkeypatch.setattr(gemm, "_run", lambda *x: (calls.append(1), run(*x))[1])
    for _ in range(5):
        for in_place in (True, False):
            added, other = D(drawn(3, 24)), D(drawn(3, 24))
            ptxrt.matmul(a, b, residual=added, out=added if in_place else other)
    assert len(calls) == 4  # for each way once, and once to record


def test_prepared_calls_know_whether_out_is_the_residual(want):
    a, b, added, out = D(A), D(B), D(ADDED), D(np.zeros_like(ADDED))
    apart = ptxrt.prepare(ptxrt.matmul, a, b, residual=added, out=out)
    in_place = ptxrt.prepare(ptxrt.matmul, a, b, residual=added, out=added)
    for _ in range(2):
        np.testing.assert_array_equal(apart().to_numpy(), want)
        np.testing.assert_array_equal(apart(residual=D(ADDED), out=out).to_numpy(), want)
        other = D(ADDED)
        np.testing.assert_array_equal(in_place(residual=other, out=other).to_numpy(), want)
    for call, words in [
        (lambda: in_place(residual=D(ADDED), out=out), "out and residual share no memory, those of the example do"),
        (lambda: in_place(out=out), "out and residual share no memory"),
        (lambda: apart(out=added), "out and residual overlap in memory, those of the example do not. Prepare another"),
    ]:
        with pytest.raises(ArgumentError, match=words):
            call()


def test_functions_of_ones_own_with_a_residual_of_their_own(want):
    """The residual is no argument of the function, and in no launch: the product reads it from `out`."""
    a, b, added = D(A), D(B), D(ADDED)
    for _ in range(3):  # the product in it is remembered from the second call on
        prepared = ptxrt.prepare(lambda a, out: ptxrt.matmul(a, b, residual=added, out=out), a, added)
        with pytest.raises(ArgumentError, match="argument 1 must lie where the function has it already"):
            prepared(a, D(ADDED))
        np.testing.assert_array_equal(prepared(a, added[:]).to_numpy(), want)
        added[...] = ADDED
        ptxrt.matmul(a, b, residual=added, out=added)
        added[...] = ADDED


def test_remembered_calls_refuse_overlaps_of_what_they_convert(emulator):
    """The product reads a copy of a, whose rows have no multiple of 16 bytes: no launch has both `out` and a."""
    a, b, out = D(drawn(40, 43)), D(drawn(43, 43)), D(drawn(40, 43))
    with pytest.raises(ArgumentError, match="out overlaps a"):
        ptxrt.matmul(a, b, out=a)
    for _ in range(3):
        ptxrt.matmul(a, b, out=out)
    with pytest.raises(ArgumentError, match="out overlaps a"):
        ptxrt.matmul(a, b, out=a)
    with pytest.raises(ArgumentError, match="out and argument 0 overlap in memory"):
        ptxrt.prepare(ptxrt.matmul, a, b, out=out)(out=a)
