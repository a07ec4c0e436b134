"""Shapes as strings: parsing, solving, dividing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptxrt.dims import Dim, DimensionError, multiple_of, parse_shape


def test_words_are_read():
    assert Dim.parse("rows") == Dim(("rows",))
    assert Dim.parse("cols/32") == Dim(("cols",), 1, 32)
    assert Dim.parse("rows*cols") == Dim(("rows", "cols"))
    assert Dim.parse("16") == Dim((), 16)
    assert Dim.parse("3*cols/4") == Dim(("cols",), 3, 4)
    assert Dim.parse("2*cols/4") == Dim(("cols",), 1, 2)


@pytest.mark.parametrize("word", ["", "/2", "a*", "a**b", "a/b", "2/0", "a+b", "A", "0*a", "a b"])
def test_what_is_no_dimension_is_refused(word):
    with pytest.raises(ValueError, match=r"dimension|divides|zero"):
        Dim.parse(word)


@pytest.mark.parametrize("word", ["rows", "cols/32", "rows*cols", "16", "3*cols/4"])
def test_words_print_as_they_were_read(word):
    assert str(Dim.parse(word)) == word


def test_shapes_know_their_axes_in_order():
    shape = parse_shape("batch heads rows*cols/2 rows")
    assert shape.axes == ("batch", "heads", "rows", "cols")
    assert str(shape) == "[batch, heads, rows*cols/2, rows]"
    assert shape.sizes(dict(batch=1, heads=2, rows=3, cols=4)) == (1, 2, 6, 3)


def test_a_division_with_a_rest_says_so():
    with pytest.raises(DimensionError, match="cols/32 is not a whole number for cols=33"):
        parse_shape("cols/32").sizes(dict(cols=33))
    with pytest.raises(DimensionError, match="no whole cols makes 3\\*cols/4 equal to 4"):
        Dim.parse("3*cols/4").solve(4, {})


def test_only_one_unknown_is_solved():
    dim = Dim.parse("rows*cols/2")
    assert dim.solve(6, {}) is None
    assert dim.solve(6, dict(rows=3)) == ("cols", 4)
    assert dim.solve(6, dict(rows=3, cols=4)) is None
    assert dim.solve(6, dict(rows=0)) is None


def test_multiples_combine():
    shapes = [parse_shape("cols/6"), parse_shape("rows cols/4"), parse_shape("rows*cols/7")]
    assert multiple_of("cols", shapes) == 12
    assert multiple_of("rows", shapes) == 1


@given(st.integers(1, 50), st.integers(1, 50), st.integers(1, 50))
def test_solving_inverts_size(numerator, denominator, multiple):
    dim = Dim.parse(f"{numerator}*x/{denominator}")
    x = multiple * denominator
    assert dim.solve(dim.size(dict(x=x)), {}) == ("x", x)
