"""Units of packed sequences: for any lengths they do not overlap, and the stated number of units holds all
sequences."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ptxrt.sequences import first_units, rows_in_units, sequences_of, units_of

LENGTHS = st.lists(st.one_of(st.integers(0, 5), st.integers(60, 68), st.integers(0, 300)), min_size=1, max_size=12)


@given(LENGTHS, st.sampled_from([64, 256]))
def test_units_do_not_overlap(lengths, size):
    starts, total = np.cumsum([0, *lengths[:-1]]), sum(lengths)
    last = 0
    for first, length in zip(first_units(starts, size), lengths):
        assert first >= last
        last = first + -(-length // size)
    assert last <= units_of(total, size, len(lengths)) or total == 0


@given(LENGTHS)
def test_elements_stand_in_the_units_of_their_sequence(lengths):
    starts, total = np.cumsum([0, *lengths[:-1]]), sum(lengths)
    np.testing.assert_array_equal(sequences_of(starts, total), np.repeat(np.arange(len(lengths)), lengths))
    want = [
        row for first, length in zip(first_units(starts, 64), lengths) for row in range(64 * first, 64 * first + length)
    ]
    np.testing.assert_array_equal(rows_in_units(starts, total, 64), want)
