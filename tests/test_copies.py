"""Copies of device arrays, writes to parts of them, conversions and zeros, against NumPy, on every machine."""

import copy
import itertools
import pickle

import ml_dtypes
import numpy as np
import pytest

import ptxrt

BF16 = ml_dtypes.bfloat16
DTYPES = [np.float32, np.float16, BF16, np.uint8, np.int32, np.int64, np.bool_, np.complex128]
# Index expressions for an array [6, 8, 10].
PARTS = ["...", "2", "1:5, ::2", ":, 3", "..., 4", "::-1", ":, ::-2, 1:9:3", "0:0", "5, 7, 9", "None, 2:4", "..., ::-1"]


def numbers(shape, dtype):
    return (np.arange(int(np.prod(shape))) % 113).astype(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("part", PARTS)
def test_copies_and_writes_are_numpys(machine, dtype, part):
    """Of any part, dtype and layout; the rest of the array is unchanged."""
    host = numbers((6, 8, 10), dtype)
    key = eval(f"np.index_exp[{part}]")
    device = ptxrt.to_device(host)
    copied = device[key].copy()
    assert copied.is_contiguous and copied.memory is not device.memory
    np.testing.assert_array_equal(copied.to_numpy(), host[key])
    np.testing.assert_array_equal(device.T[..., 1].copy().to_numpy(), host.T[..., 1])
    value = numbers(host[key].shape, dtype)[..., ::-1] if host[key].ndim else dtype(3)
    want = host.copy()
    want[key] = value
    device[key] = value
    np.testing.assert_array_equal(device.to_numpy(), want)
    again = ptxrt.to_device(host)
    again[key] = ptxrt.to_device(np.asarray(value))
    np.testing.assert_array_equal(again.to_numpy(), want)
    again[key] = dtype(1)
    want[key] = dtype(1)
    np.testing.assert_array_equal(again.to_numpy(), want)


def test_values_broadcast(machine):
    host = numbers((3, 4, 5), np.float32)
    for shape in [(), (1,), (5,), (4, 1), (3, 1, 1), (1, 1, 4, 5)]:
        value = numbers(shape, np.float32) + 7
        for given in (value, ptxrt.to_device(value)):
            device, want = ptxrt.to_device(host), host.copy()
            device[...] = given
            want[...] = value
            np.testing.assert_array_equal(device.to_numpy(), want)


def test_parts_of_one_array_may_overlap(machine):
    host = numbers((4, 9), np.int32)
    for to, of in itertools.permutations(["::-1", "1:", ":-1", "..."], 2):
        host, device = numbers((9,), np.int32), ptxrt.to_device(numbers((9,), np.int32))
        to, of = (eval(f"np.index_exp[{part}]") for part in (to, of))
        if host[to].shape == host[of].shape:
            host[to] = host[of].copy()
            device[to] = device[of]
            np.testing.assert_array_equal(device.to_numpy(), host)


def test_many_axes_and_large_ones(machine):
    host = numbers((2, 3, 2, 3, 2, 3, 2), np.uint8)
    order = (3, 0, 6, 2, 5, 1, 4)
    np.testing.assert_array_equal(ptxrt.to_device(host).transpose(order).copy().to_numpy(), host.transpose(order))
    host = numbers((70001, 3, 2), np.uint8)
    np.testing.assert_array_equal(ptxrt.to_device(host).transpose(1, 2, 0).copy().to_numpy(), host.transpose(1, 2, 0))


@pytest.mark.parametrize("source, target", list(itertools.product([np.float32, np.float16, BF16], repeat=2)))
def test_astype_rounds_as_numpy_does(machine, rng, source, target):
    host = (rng.standard_normal((3, 4, 5)) * np.exp2(rng.integers(-20, 20, (3, 4, 5)))).astype(source)
    host[0, 0, :4] = np.nan, np.inf, -0.0, 70000
    device = ptxrt.to_device(host)
    for view, wanted in ((device, host), (device.T, host.T), (device[::-1, :, ::2], host[::-1, :, ::2])):
        with np.errstate(over="ignore"):
            want = wanted.astype(target)
        got = view.astype(target).to_numpy()
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64))
    empty = ptxrt.empty((0, 3), source).astype(target)
    assert empty.shape == (0, 3) and empty.dtype == target


def test_zeros_and_numbers(machine):
    for shape, dtype in [
        ((3, 5), np.float32),
        ((), np.int8),
        ((0, 2), BF16),
        ((5000,), BF16),
        ((3, 1367), np.complex64),
        (7, np.bool_),
    ]:
        array = ptxrt.zeros(shape, dtype)
        assert array.dtype == dtype
        np.testing.assert_array_equal(array.to_numpy(), np.zeros(shape, dtype))
        array[...] = 1
        np.testing.assert_array_equal(array.to_numpy(), np.ones(shape, dtype))
    assert ptxrt.zeros(4).dtype == np.float32


def test_a_graph_gets_new_lengths_and_inputs(machine, rng):
    """The second launch reads what was written after the first, and the first is not affected even if it is still
    running."""
    q, k, v = (ptxrt.to_device(rng.standard_normal((1, 2, n, 64), dtype=np.float32)) for n in (5, 90, 90))
    lengths = ptxrt.to_device(np.int32([90]))
    out = ptxrt.empty(q.shape, np.float32)
    with ptxrt.graph() as graph:
        ptxrt.attention(q, k, v, key_lengths=lengths, out=out)
    stream = ptxrt.Stream()
    for length in (3, 64, 65, 90):
        host = rng.standard_normal(q.shape, dtype=np.float32)
        lengths[...] = [length]
        q[...] = host
        graph.launch(stream)
        want = ptxrt.attention(ptxrt.to_device(host), k, v, key_lengths=[length])
        np.testing.assert_array_equal(out.to_numpy(), want.to_numpy())


def test_wrong_writes_say_what_to_do(emulator):
    device, host = ptxrt.to_device(numbers((3, 4), np.float32)), numbers((3, 4), np.float32)
    for call, words in [
        (lambda: device.__setitem__(host > 3, 0), "is cut by whole numbers.*a mask needs a copy"),
        (
            lambda: device.__setitem__([0, 1], 0),
            "slices, None and.*an array of indices needs a copy: use ptxrt.take_rows",
        ),
        (lambda: device.__setitem__(..., np.zeros((2, 4))), r"does not broadcast to \[3, 4\]"),
        (lambda: device.__setitem__(..., np.zeros((3, 4), complex)), "x is complex128, a float32; write x.astype"),
        (lambda: ptxrt.zeros(3, np.int32).__setitem__(..., 2.5 + 1j), "holds no such number|complex"),
        (lambda: ptxrt.zeros(3, np.uint8).__setitem__(..., 300), "holds no such number"),
        *(
            (lambda dtype=dtype, x=x: ptxrt.zeros(3, dtype).__setitem__(..., x), "holds no such number")
            for dtype, x in [
                (np.uint8, np.int64(-1)),
                (np.uint8, np.int64(300)),
                (np.int32, np.float64(1e20)),
                (np.int64, np.uint64(2**63 + 5)),
                (np.int8, 1.5),
                (np.int8, np.float32(3)),
                (bool, 0.5),
                (bool, 2),
                (np.float32, np.complex64(1)),
                (np.float32, np.str_("3")),
                (np.int32, np.datetime64(5, "s")),
            ]
        ),
        *((lambda dtype=dtype: ptxrt.zeros(3, dtype), "pass a dtype of numbers") for dtype in ("U3", "V4", "M8[s]")),
        *(
            (lambda x=x: ptxrt.to_device(x), "holds no numbers")
            for x in (np.array(["ab"]), np.zeros(3, "V4"), np.zeros(2, [("a", "f4")]))
        ),
        (lambda: device.__setitem__(..., ptxrt.zeros((3, 4), np.float16)), r"a float32; write x.astype\('float32'\)"),
        (lambda: device.__setitem__(..., "text"), "a string"),
        (lambda: device.__setitem__(..., None), "x is None"),
        (lambda: device.broadcast_to((2, 3, 4)).__setitem__(0, 1), "is read-only"),
        (lambda: device.astype(np.int32), r"astype: .* the host all others: ptxrt.to_device\(x.to_numpy\(\).astype"),
        (lambda: device.astype("nothing"), "devices convert float32, float16 and bfloat16"),
        (lambda: ptxrt.zeros("a"), "shape is 'a'"),
        (lambda: device.T.reshape(12), r"reshape its copy\(\)"),
        (lambda: device[:, ::2].view(np.uint8), r"view its copy\(\)"),
        (lambda: ptxrt.kernels()["transpose_naive"](device.T), r"Pass its copy\(\), which is in row-major order"),
    ]:
        with pytest.raises(ptxrt.ArgumentError, match=words):
            call()
    before = device.to_numpy()
    with ptxrt.graph():
        with pytest.raises(ptxrt.ArgumentError, match="records launches .*Do it before, or after"):
            device[...] = 1
    with pytest.raises(ptxrt.ArgumentError, match="records launches"):
        ptxrt.prepare(lambda x: x.__setitem__(..., 1), device)
    np.testing.assert_array_equal(device.to_numpy(), before)


def test_bfloat16_that_numpy_saved_is_bfloat16(emulator, tmp_path):
    """NumPy saves bfloat16 as void of 2 bytes; arguments and `to_device` take such arrays as bfloat16."""
    x = numbers((4, 64), BF16)
    np.save(tmp_path / "x.npy", x)
    loaded = np.load(tmp_path / "x.npy")
    assert loaded.dtype == np.dtype("V2")
    assert ptxrt.to_device(loaded).dtype == BF16
    got, want = ptxrt.quantize(loaded, "mxfp8"), ptxrt.quantize(x, "mxfp8")
    np.testing.assert_array_equal(got.codes, want.codes)
    q = loaded.reshape(1, 1, 4, 64)
    out = ptxrt.attention(q, q, q)
    assert out.dtype == BF16
    np.testing.assert_array_equal(out, ptxrt.attention(*(x.reshape(1, 1, 4, 64),) * 3))
    device = ptxrt.zeros((4, 64), BF16)
    device[...] = loaded
    np.testing.assert_array_equal(device.to_numpy(), x)


def test_elements_are_not_compared_on_a_device(emulator):
    """Python's defaults would answer for the objects; NumPy answers for elements."""
    x, host = ptxrt.to_device(np.ones((2, 3), np.float32)), np.ones((2, 3), np.float32)
    for call in (
        lambda: x == host,
        lambda: host == x,
        lambda: x != 1,
        lambda: x == np.float32(1),
        lambda: x == x[...],
        lambda: x == [1, 2],
        lambda: [x[...], x].index(x),
        lambda: bool(x),
        lambda: 1.0 in x,
        lambda: np.array_equal(x, host),
        lambda: np.sum(x),
        lambda: np.concatenate([host, x]),
        lambda: np.asarray(x),
    ):
        with pytest.raises(TypeError, match="a DeviceArray is not in host memory; .*to_numpy()"):
            call()
    assert x == x and x in [x] and x is not None and x != "x" and not x == None and {x: 1}[x] == 1  # noqa: E711
    assert not np.iscomplexobj(x) and np.isrealobj(x) and np.result_type(x, np.float64(1)) == np.float64
    assert [np.shape(x), np.ndim(x), np.size(x), np.size(x, 1)] == [(2, 3), 2, 6, 3]
    for got, want in [
        (np.transpose(x), host.T),
        (x.transpose(None), host.T),
        (np.moveaxis(x, 0, -1), host.T),
        (np.reshape(x, (3, 2), order="C"), host.reshape(3, 2)),
        (np.broadcast_to(x, (2, 2, 3)), np.broadcast_to(host, (2, 2, 3))),
    ]:
        np.testing.assert_array_equal(got.to_numpy(), want)


def test_what_belongs_to_a_device_is_not_pickled(emulator):
    x = ptxrt.to_device(np.ones((2, 64), np.float32))
    cache, locked = ptxrt.KVCache(2, 16, 1, 64, format="bf16"), ptxrt.PageLocked((2, 3), np.int32)
    for item in (x, ptxrt.quantize(x, "mxfp8"), cache, ptxrt.Stream(), ptxrt.Event(), locked):
        for call in (pickle.dumps, copy.deepcopy):
            if call is copy.deepcopy and (item is x or isinstance(item, ptxrt.QuantizedArray)):
                continue
            with pytest.raises(
                ptxrt.ArgumentError, match="belongs to a device and cannot be pickled or copied deeply; "
            ):
                call(item)
    assert copy.copy(x).address == x.address and copy.copy(cache).arrays["k"] is cache.arrays["k"]
    q = ptxrt.quantize(x, "nvfp4")
    again = copy.deepcopy([x, q])
    x[...] = 0
    assert (again[0].to_numpy() == 1).all() and again[1].global_scale.address != q.global_scale.address
    assert repr(locked) == f"PageLocked(int32 [2, 3] for {locked.backend.describe()})"


def test_global_scales_are_checked_where_they_are_stored(emulator):
    x = np.ones((2, 64), np.float32)
    for q in (ptxrt.quantize(x, "nvfp4"), ptxrt.quantize(ptxrt.to_device(x), "nvfp4")):
        before = np.asarray(ptxrt.dequantize(q) if not q.on_device else ptxrt.dequantize(q).to_numpy())
        level = np.asarray(q.global_scale if not q.on_device else q.global_scale.to_numpy())
        q.global_scale = 2 * float(level)
        assert isinstance(q.global_scale, ptxrt.DeviceArray) == q.on_device
        after = np.asarray(ptxrt.dequantize(q) if not q.on_device else ptxrt.dequantize(q).to_numpy())
        np.testing.assert_array_equal(after, 2 * before)
        for wrong in (None, "x", -1.0, np.nan, np.ones(2), ptxrt.to_device(np.ones(2, np.float32))):
            with pytest.raises(ptxrt.ArgumentError, match="global_scale"):
                q.global_scale = wrong
    with pytest.raises(ptxrt.ArgumentError, match="global_scale is on the device, codes are not"):
        ptxrt.quantize(x, "nvfp4").global_scale = ptxrt.to_device(np.float32(1))
    level = ptxrt.to_device(np.float32(1))
    for value in (1, level):
        for place in (np.asarray, ptxrt.to_device):
            with pytest.raises(ptxrt.ArgumentError, match="mxfp8 has no global_scale; .* came"):
                ptxrt.quantize(place(x), "mxfp8").global_scale = value
    with ptxrt.using("emulator", races=True):
        other = ptxrt.quantize(ptxrt.to_device(x), "nvfp4")
    with pytest.raises(ptxrt.ArgumentError, match="global_scale is on .*, codes on .*races=True; bring it there"):
        other.global_scale = level


def test_writes_of_device_arrays_are_recorded(machine):
    x, y = ptxrt.to_device(np.zeros((4, 6), np.float32)), ptxrt.to_device(np.ones((4, 3), np.float32))

    def write(y):
        x[:, ::2] = y
        x[:, 1::2] = x[:, ::2]

    with ptxrt.graph() as g:
        write(y)
        for value in (3, np.float32(3), np.ones((4, 6), np.float32)):
            with pytest.raises(ptxrt.ArgumentError, match="would be written to from the host"):
                x[...] = value
    z = ptxrt.to_device(np.arange(6, dtype=np.float32))

    def shift(a, b):
        a[1:3] = b[0:2]

    ptxrt.prepare(shift, z, z)()
    np.testing.assert_array_equal(z.to_numpy(), [0, 0, 1, 3, 4, 5])
    prepared = ptxrt.prepare(write, y)
    for launch in (g.launch, prepared):
        for value in (5, 7):
            y[...] = value
            launch()
            assert (x.to_numpy() == value).all()


@pytest.mark.parametrize("dtype", [BF16, ml_dtypes.float8_e4m3fn, np.float16, np.float32, np.int32])
def test_imaginary_parts_are_never_dropped(emulator, dtype):
    x = ptxrt.to_device(np.zeros(3, dtype))
    for value in (3 + 4j, np.complex64(1j), np.full(3, 2 + 1j)):
        with pytest.raises(ptxrt.ArgumentError, match="complex"):
            x[...] = value
    assert (x.to_numpy() == np.zeros(3, dtype)).all()
