"""Tables of rotary embeddings, against their formulas evaluated pair by pair."""

import math

import numpy as np
import pytest

import ptxrt
from ptxrt.errors import ArgumentError, OutOfMemory
from ptxrt.ops import rotation


@pytest.mark.parametrize("dim, length, base", [(2, 1, 10000.0), (64, 300, 10000.0), (128, 50, 1e6), (96, 0, 500000)])
def test_cosines_then_sines(dim, length, base):
    table = ptxrt.rope_table(dim, length, base)
    assert table.shape == (length, dim) and table.dtype == np.float32
    for position in range(0, length, 17):
        for pair in range(dim // 2):
            angle = position / base ** (2 * pair / dim)
            assert table[position, pair] == pytest.approx(math.cos(angle), abs=6e-8)
            assert table[position, dim // 2 + pair] == pytest.approx(math.sin(angle), abs=6e-8)


def test_rounded_once_at_any_position():
    """Angles of 2^17 radians keep float32 accuracy."""
    table = ptxrt.rope_table(64, 131073)[-1]
    for pair in range(32):
        angle = 131072 * math.pow(10000.0, -pair / 32)
        want = np.float32(math.cos(angle)), np.float32(math.sin(angle))
        assert abs(table[pair] - want[0]) <= 2e-7 and abs(table[32 + pair] - want[1]) <= 2e-7
    assert table[0] == np.float32(math.cos(131072)) and table[32] == np.float32(math.sin(131072))


# The first case is gpt-oss: dim 64, base 150000, length 4096 times 32, beta 32 and 1, not truncated, with the
# magnitude.
@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(
    "dim, base, factor, length", [(64, 150000.0, 32.0, 4096), (128, 10000.0, 4.0, 32768), (8, 100.0, 2.0, 64)]
)
def test_yarn(dim, base, factor, length, truncate):
    yarn = dict(factor=factor, length=length, truncate=truncate, magnitude=True)
    table = ptxrt.rope_table(dim, 5, base, yarn=yarn)
    low, high = (dim * math.log(length / (beta * 2 * math.pi)) / (2 * math.log(base)) for beta in (32, 1))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    magnitude = 0.1 * math.log(factor) + 1
    seen = set()
    for pair in range(dim // 2):
        share = min(max((pair - low) / max(high - low, 1e-3), 0), 1)
        seen.add(0 if share == 0 else 1 if share == 1 else 2)
        angle = base ** (-2 * pair / dim)
        angle = angle / factor * share + angle * (1 - share)
        for position in range(5):
            assert table[position, pair] == pytest.approx(magnitude * math.cos(position * angle), abs=1.5e-7)
            assert table[position, dim // 2 + pair] == pytest.approx(magnitude * math.sin(position * angle), abs=1.5e-7)
    assert 2 in seen
    plain = ptxrt.rope_table(dim, 5, base, yarn=dict(yarn, magnitude=False))
    np.testing.assert_allclose(plain * magnitude, table, rtol=2e-7)
    np.testing.assert_array_equal(ptxrt.rope_table(dim, 5, base, yarn=dict(yarn, magnitude=2.0)), 2 * plain)


@pytest.mark.parametrize(
    "words, call",
    [
        ("even one", lambda table: table(7, 3)),
        ("dim is 0", lambda table: table(0, 3)),
        ("dim is True", lambda table: table(True, 3)),
        ("length is -1", lambda table: table(8, -1)),
        ("length is 2.5", lambda table: table(8, 2.5)),
        ("base is nan", lambda table: table(8, 3, math.nan)),
        ("above 1", lambda table: table(8, 3, 1.0)),
        ("yarn is .*factor and length", lambda table: table(8, 3, yarn=dict(factor=2))),
        ("yarn is", lambda table: table(8, 3, yarn=dict(factor=2, length=4, beta=1))),
        ("yarn is 2", lambda table: table(8, 3, yarn=2)),
        ("factor of yarn is 0", lambda table: table(8, 3, yarn=dict(factor=0, length=4))),
        ("truncate of yarn", lambda table: table(8, 3, yarn=dict(factor=2, length=4, truncate=1))),
        ("magnitude of yarn", lambda table: table(8, 3, yarn=dict(factor=2, length=4, magnitude=-1))),
        ("float32 holds", lambda table: table(8, 3, yarn=dict(factor=2, length=4, magnitude=1e300))),
    ],
)
def test_wrong_calls(words, call):
    with pytest.raises(ArgumentError, match=words):
        call(ptxrt.rope_table)


def test_tables_that_memory_does_not_hold():
    with pytest.raises(OutOfMemory, match="rope_table: the host has no .* bytes"):
        ptxrt.rope_table(2**20, 2**38)


def test_parts_of_a_table_are_those_of_one(monkeypatch):
    want = ptxrt.rope_table(6, 50)
    for count in (1, 7, 60):
        monkeypatch.setattr(rotation, "_ELEMENTS_AT_ONCE", count)
        np.testing.assert_array_equal(ptxrt.rope_table(6, 50), want)
