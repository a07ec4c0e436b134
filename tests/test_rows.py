"""Gathered table rows, means of sequences and indices of largest values, against NumPy."""

import ml_dtypes
import numpy as np
import pytest

import ptxrt
from ptxrt.errors import ArgumentError

BF16 = ml_dtypes.bfloat16
TYPES = [np.float32, np.float16, BF16]


def normal(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


# take_rows


@pytest.mark.parametrize("dtype", TYPES, ids=lambda t: np.dtype(t).name)
def test_rows_of_a_table_are_those_of_numpy(text_machine, dtype):
    for cols in (64, 33, 1):
        table = normal(9, cols, dtype=dtype)
        for ids in (np.array([[8, 0, 3], [3, 3, 1]]), np.arange(9, dtype=np.uint8), np.array(4), [0, 8]):
            got = ptxrt.take_rows(table, ids)
            assert got.dtype == dtype
            np.testing.assert_array_equal(got, table[np.asarray(ids)])
    assert ptxrt.take_rows(table, [1], out_dtype=np.float32).dtype == np.float32


@pytest.mark.parametrize("layout", ["linear", "128x4"])
@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "nvfp4"])
def test_rows_of_a_table_with_the_bytes_of_quantize(text_machine, format, layout):
    table, ids = normal(9, 72, dtype=BF16), [8, 1, 1, 5]
    level = dict(global_scale=0.01) if format == "nvfp4" else {}
    rule = {"mxfp8": "rceil", "mxfp4": "even", "nvfp4": "amax"}[format]
    taken = table[ids].astype(np.float32)
    want = ptxrt.quantize(taken, format, scale_rule=rule, scale_layout=layout, pad=True, **level)
    got = ptxrt.take_rows(table, ids, format=format, scale_layout=layout, **level)
    np.testing.assert_array_equal(got.codes, want.codes)
    np.testing.assert_array_equal(got.scales, want.scales)


@pytest.mark.parametrize("global_scale", [1.0, 0.3, 0.013, 1 + 5 * 2.0**-23, 1.5 - 7 * 2.0**-23])
def test_values_near_ties_have_the_codes_of_quantize(text_machine, global_scale):
    """Quotients are computed in fewer steps than in `quantize`, but for the last two scales, which need all steps."""
    largest = np.float32(6 * global_scale) * np.arange(1, 2, 1 / 8, dtype=np.float32)
    steps = largest / np.float32(6)
    ties = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
    near = np.float32(steps[:, None] * ties).view(np.int32)[..., None] + np.arange(-7, 8, dtype=np.int32)
    table = np.concatenate(
        [np.broadcast_to(largest[:, None, None, None], (8, 7, 1, 1)), near.view(np.float32)[:, :, None]], -1
    )
    table = np.concatenate([table, -table], axis=2).reshape(-1, 32)
    got = ptxrt.take_rows(table, np.arange(len(table)), format="nvfp4", global_scale=global_scale)
    want = ptxrt.quantize(table, "nvfp4", global_scale=global_scale)
    for part in ("codes", "scales"):
        np.testing.assert_array_equal(getattr(got, part), getattr(want, part))


def test_ids_on_the_device_that_are_no_rows_give_zeros(text_machine):
    table = normal(5, 40)
    ids = np.array([4, -1, 0, 5, -(2**31), 2**31 - 1, 2], np.int32)
    got = ptxrt.take_rows(ptxrt.to_device(table), ptxrt.to_device(ids)).to_numpy()
    there = (ids >= 0) & (ids < 5)
    np.testing.assert_array_equal(got[there], table[ids[there]])
    assert not got[~there].any()


def test_rows_of_a_table_of_any_strides_where_the_caller_wants_them(text_machine):
    table = normal(12, 90, dtype=BF16)
    ids = np.array([[3, 0], [1, 2]], np.int32)
    for view in (np.s_[::2, 3:67], np.s_[:, ::2], np.s_[4:9, :1]):
        on_device = ptxrt.to_device(table)[view]
        np.testing.assert_array_equal(ptxrt.take_rows(table[view], ids), table[view][ids])
        whole = ptxrt.to_device(np.zeros((2, 2, 200), np.float32))
        out = whole[..., 5 : 5 + table[view].shape[1]]
        assert ptxrt.take_rows(on_device, ptxrt.to_device(ids), out=out) is out
        np.testing.assert_array_equal(out.to_numpy(), table[view][ids].astype(np.float32))
    assert ptxrt.take_rows(table, np.zeros((0, 3), int)).shape == (0, 3, 90)
    assert ptxrt.take_rows(table[:, :0], [1]).shape == (1, 0)


# mean_rows


def exact_means(x, bounds, normalize):
    """Means in float64, normalized to length 1 if asked."""
    x, means = x.astype(np.float64), np.zeros((len(bounds) - 1, x.shape[1]))
    for i, (begin, end) in enumerate(zip(bounds, bounds[1:])):
        if end > begin:
            means[i] = x[begin:end].sum(axis=0) / (end - begin)
    if not normalize:
        return means
    length = np.sqrt((means**2).sum(axis=1, keepdims=True))
    return np.divide(means, length, out=np.zeros_like(means), where=length != 0)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dtype", TYPES, ids=lambda t: np.dtype(t).name)
def test_means_against_float64(text_machine, dtype, normalize):
    for cols in (200, 5) + (2077,) * (dtype is BF16):
        x, bounds = normal(40, cols, dtype=dtype), [0, 1, 1, 30, 40]
        want = exact_means(x, bounds, normalize)
        got = ptxrt.mean_rows(x, bounds, normalize=normalize, out_dtype=np.float32)
        assert got.dtype == np.float32 and not got[1].any()
        assert ptxrt.compare(got, want).relative_l2 < 4e-7
        got = ptxrt.mean_rows(x, bounds, normalize=normalize)
        assert got.dtype == dtype
        assert ptxrt.compare(got, want).relative_l2 < {np.float32: 4e-7, np.float16: 5e-4, BF16: 3e-3}[dtype]


def test_a_mean_depends_on_its_sequence_alone(text_machine):
    x, bounds = normal(120, 72, dtype=BF16), [0, 50, 57, 120]
    whole = ptxrt.mean_rows(x, bounds, out_dtype=np.float32)
    for i, (begin, end) in enumerate(zip(bounds, bounds[1:])):
        alone = ptxrt.mean_rows(x[begin:end], [0, end - begin], out_dtype=np.float32)
        np.testing.assert_array_equal(alone[0], whole[i])


def test_means_of_what_is_exact_or_not_finite(text_machine):
    x = np.zeros((6, 12), np.float32)
    x[0, 3], x[1, 3] = 1, 3  # their mean is 2, with a norm of 2
    x[2, 1], x[3, 2], x[3, 5] = np.nan, np.inf, 1  # each row is a sequence
    x[4, 7], x[5, 7] = 1, -1  # their mean is zero
    bounds = [0, 2, 3, 4, 6]
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(ptxrt.mean_rows(x, bounds, normalize=False), exact_means(x, bounds, False))
        np.testing.assert_array_equal(ptxrt.mean_rows(x, bounds), exact_means(x, bounds, True))
    assert ptxrt.mean_rows(x, bounds)[0, 3] == 1 and not ptxrt.mean_rows(x, bounds)[3].any()
    assert ptxrt.mean_rows(x[:0], [0]).shape == (0, 12) and ptxrt.mean_rows(x[:, :0], [0, 6]).shape == (1, 0)
    assert not ptxrt.mean_rows(x[:0], [0, 0, 0]).any()


def test_bounds_on_the_device_are_kept_within_the_rows(text_machine):
    x = normal(10, 40)
    bounds = ptxrt.to_device(np.array([-5, 4, 99, 3, 10], np.int32))
    got = ptxrt.mean_rows(ptxrt.to_device(x)[:, :33], bounds, normalize=False).to_numpy()
    for i, (begin, end) in {0: (0, 4), 1: (4, 10), 3: (3, 10)}.items():
        np.testing.assert_allclose(got[i], x[begin:end, :33].mean(axis=0, dtype=np.float64), rtol=1e-6, atol=1e-7)
    assert not got[2].any()


# argmax_rows


@pytest.mark.parametrize("dtype", TYPES, ids=lambda t: np.dtype(t).name)
def test_places_of_the_largest_are_those_of_numpy(text_machine, dtype):
    for shape in ((2, 3, 100), (4, 1), (2, 16401), (1, 32832), (7,)):
        x = normal(*shape, dtype=dtype)
        for x in (x, np.round(x), -np.abs(np.round(x)), np.zeros_like(x) * x):  # with ties, and zeros of both signs
            got = ptxrt.argmax_rows(x)
            assert got.dtype == np.int32
            np.testing.assert_array_equal(got, np.argmax(x.astype(np.float32), axis=-1))


def test_places_of_nan_and_infinities(text_machine):
    x = np.tile(np.arange(40, dtype=np.float32), (5, 1))
    x[0, [7, 30]], x[1, [33, 12]], x[1, 3], x[2] = np.nan, np.inf, -np.nan, -np.inf
    x[3, 39], x[4, 2] = -np.inf, np.inf
    np.testing.assert_array_equal(ptxrt.argmax_rows(x), np.argmax(x, axis=1))
    np.testing.assert_array_equal(ptxrt.argmax_rows(x.astype(np.float16)[:, ::3]), np.argmax(x[:, ::3], axis=1))


def test_places_where_the_caller_wants_them(text_machine):
    x = ptxrt.to_device(normal(6, 40))
    out = ptxrt.empty((6,), np.int32)
    assert ptxrt.argmax_rows(x, out=out) is out
    np.testing.assert_array_equal(out.to_numpy(), np.argmax(x.to_numpy(), axis=1))
    assert ptxrt.argmax_rows(np.zeros((0, 5), np.float32)).shape == (0,)
    assert ptxrt.argmax_rows(np.zeros((0, 0), np.float32)).shape == (0,)


def test_a_step_in_a_graph(text_machine):
    """From token ids to the next ids, all on the device."""
    table, ids = ptxrt.to_device(normal(40, 32, dtype=BF16)), ptxrt.to_device(np.array([3, 7], np.int32))
    with ptxrt.graph() as graph:
        ptxrt.argmax_rows(ptxrt.take_rows(table, ids), out=ids)
    want = ids.to_numpy()
    for _ in range(2):
        graph.launch()
        want = np.argmax(table.to_numpy()[want].astype(np.float32), axis=1)
        np.testing.assert_array_equal(ids.to_numpy(), want)
    prepared = ptxrt.prepare(ptxrt.mean_rows, table, ptxrt.to_device(np.array([0, 4, 40], np.int32)))
    assert len(prepared.launches) == 1
    np.testing.assert_array_equal(prepared(table).to_numpy(), ptxrt.mean_rows(table.to_numpy(), [0, 4, 40]))


X = normal(6, 64)


@pytest.mark.parametrize(
    "words, call",
    [
        ("two axes", lambda: ptxrt.take_rows(X[0], [1])),
        ("ids go from 0 to 6; the table has rows 0 to 5", lambda: ptxrt.take_rows(X, [0, 6])),
        ("ids go from -1", lambda: ptxrt.take_rows(X, -1)),
        ("ids is float64", lambda: ptxrt.take_rows(X, [0.0])),
        ("convert it to float32", lambda: ptxrt.take_rows(X.astype(int), [0])),
        ("out has shape", lambda: ptxrt.take_rows(X, [0, 1], out=np.empty((1, 64), np.float32))),
        ("overlaps table", lambda: ptxrt.take_rows(X, range(6), out=X)),
        ("strides", lambda: ptxrt.take_rows(ptxrt.to_device(X), ptxrt.to_device(np.zeros((4, 2), np.int32))[:, 0])),
        ("two axes", lambda: ptxrt.mean_rows(X[0], [0, 1])),
        ("rise from 0 to 6", lambda: ptxrt.mean_rows(X, [0, 5])),
        ("rise from 0 to 6", lambda: ptxrt.mean_rows(X, [0, 4, 3, 6])),
        ("rise from 0 to 6", lambda: ptxrt.mean_rows(X, [[0, 6]])),
        ("rise from 0 to 6", lambda: ptxrt.mean_rows(X, np.zeros(0, int))),
        ("normalize is 1", lambda: ptxrt.mean_rows(X, [0, 6], normalize=1)),
        ("rows without values", lambda: ptxrt.argmax_rows(X[:, :0])),
        ("out is int64", lambda: ptxrt.argmax_rows(X, out=np.zeros(6, np.int64))),
        ("row-major", lambda: ptxrt.argmax_rows(ptxrt.to_device(X), out=ptxrt.empty((6, 2), np.int32)[:, 0])),
    ],
)
def test_wrong_calls(words, call):
    with ptxrt.using("emulator"), pytest.raises(ArgumentError, match=words):
        call()
