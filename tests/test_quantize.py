"""quantize, dequantize and QuantizedArray: bytes on every machine, shapes, files, errors."""

import io
import zipfile

import ml_dtypes
import numpy as np
import pytest

import exact_mxfp4
import ptxrt

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]


def assert_bytes(q, x):
    codes, scales = exact_mxfp4.encode(np.asarray(x, np.float32).reshape(-1, x.shape[-1]))
    np.testing.assert_array_equal(q.scales.reshape(scales.shape), scales)
    np.testing.assert_array_equal(q.codes.reshape(codes.shape), codes)


def test_hard_blocks_byte_for_byte(machine):
    x = exact_mxfp4.hard_blocks()
    assert_bytes(ptxrt.quantize(x, "mxfp4"), x)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=lambda d: np.dtype(d).name)
def test_every_value_of_a_narrow_dtype(machine, dtype):
    x = np.arange(65536, dtype=np.uint16).view(dtype)
    grouped = x.reshape(-1, 64)
    assert_bytes(ptxrt.quantize(grouped, "mxfp4"), grouped)
    shuffled = np.random.default_rng(1).permutation(x[np.isfinite(x.astype(np.float32))])
    shuffled = shuffled[:8192].reshape(-1, 64)
    assert_bytes(ptxrt.quantize(shuffled, "mxfp4"), shuffled)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_random_values_of_any_size(machine, rng, dtype):
    x = (rng.standard_normal((37, 96)) * 2.0 ** rng.integers(-20, 12, (37, 96))).astype(dtype)
    assert_bytes(ptxrt.quantize(x, "mxfp4"), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_every_code_under_every_scale_dequantizes(machine, dtype):
    codes = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 16, 1)
    got = ptxrt.dequantize(ptxrt.QuantizedArray(codes, scales, format="mxfp4", shape=(256, 512)), dtype)
    e2m1 = np.array([float(v) for v in exact_mxfp4.E2M1] + [-float(v) for v in exact_mxfp4.E2M1])
    with np.errstate(over="ignore"):
        exact = e2m1[np.stack([codes & 15, codes >> 4], -1).reshape(256, 512)] * 2.0 ** (np.arange(256.0)[:, None] - 127)
        want = exact.astype(np.float32).astype(dtype)
    want[255] = np.nan
    bits = f"u{np.dtype(dtype).itemsize}"
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), np.isnan(want.astype(np.float32)))
    np.testing.assert_array_equal(got[:255].view(bits), want[:255].view(bits))


@pytest.mark.parametrize("shape", [(32,), (1, 32), (3, 5, 64), (2, 1, 2, 3, 32), (0, 64), (2, 0, 32), (0,)])
def test_any_leading_axes(machine, rng, shape):
    x = rng.standard_normal(shape).astype(np.float32)
    q = ptxrt.quantize(x, "mxfp4")
    assert q.shape == shape and q.format == "mxfp4" and q.global_scale is None
    assert q.codes.shape == (*shape[:-1], shape[-1] // 2) and q.scales.shape == (*shape[:-1], shape[-1] // 32)
    assert q.nbytes == x.size // 2 + x.size // 32
    y = ptxrt.dequantize(q)
    assert y.shape == shape and y.dtype == np.float32
    np.testing.assert_array_equal(y, np.asarray(q))
    if x.size:
        assert_bytes(q, x)


def test_layouts_of_numpy_do_not_matter(emulator, rng):
    x = rng.standard_normal((64, 96)).astype(np.float32)
    for view in (np.asfortranarray(x), x[::-1, ::-1], x[:, ::3][:, :32], x.T[:, :64]):
        assert_bytes(ptxrt.quantize(view, "mxfp4"), np.ascontiguousarray(view))


def test_out_is_written_and_returned(machine, rng):
    x = rng.standard_normal((4, 64)).astype(np.float32)
    out = ptxrt.quantize(np.zeros_like(x), "mxfp4")
    codes = out.codes
    assert ptxrt.quantize(x, "mxfp4", out=out) is out and out.codes is codes
    assert_bytes(out, x)
    values = np.empty((4, 64), ml_dtypes.bfloat16)
    assert ptxrt.dequantize(out, out=values) is values
    np.testing.assert_array_equal(values, np.asarray(out).astype(ml_dtypes.bfloat16))


def test_out_may_be_a_view(emulator, rng):
    q = ptxrt.quantize(rng.standard_normal((4, 64)).astype(np.float32), "mxfp4")
    out = np.zeros((64, 4), np.float32)
    ptxrt.dequantize(q, out=out.T)
    np.testing.assert_array_equal(out.T, np.asarray(q))


def test_device_arrays_give_device_arrays(machine, rng):
    x = rng.standard_normal((2, 3, 64)).astype(np.float32)
    q = ptxrt.quantize(ptxrt.to_device(x), "mxfp4")
    assert isinstance(q.codes, ptxrt.DeviceArray) and q.codes.shape == (2, 3, 32)
    y = ptxrt.dequantize(q)
    assert isinstance(y, ptxrt.DeviceArray) and y.shape == (2, 3, 64)
    np.testing.assert_array_equal(y.to_numpy(), np.asarray(q))
    assert_bytes(q.to_numpy(), x)


def test_values_are_decoded_on_the_host_in_any_dtype(emulator):
    q = ptxrt.quantize(np.linspace(-6, 6, 32, dtype=np.float32), "mxfp4")
    assert np.asarray(q).dtype == np.float32
    assert np.asarray(q, dtype=np.float64).dtype == np.float64
    np.testing.assert_array_equal(np.asarray(q), ptxrt.dequantize(q))


# Files


@pytest.fixture
def saved(tmp_path, rng):
    codes = rng.integers(0, 256, (2, 3, 32), dtype=np.uint8)
    scales = rng.integers(0, 256, (2, 3, 2), dtype=np.uint8)
    q = ptxrt.QuantizedArray(codes, scales, format="mxfp4", shape=(2, 3, 64))
    path = tmp_path / "q.npz"
    q.save(path)
    return q, path


def test_files_come_back(saved):
    q, path = saved
    again = ptxrt.QuantizedArray.load(path)
    assert (again.format, again.shape, again.global_scale) == (q.format, q.shape, None)
    np.testing.assert_array_equal(again.codes, q.codes)
    np.testing.assert_array_equal(again.scales, q.scales)
    assert [p.name for p in path.parent.iterdir()] == ["q.npz"]


def test_saving_keeps_the_name_and_replaces_whole_files(saved, monkeypatch):
    q, path = saved
    other = path.with_name("weights")
    q.save(other)
    assert ptxrt.QuantizedArray.load(other).shape == q.shape
    before = path.read_bytes()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        q.save(path)
    assert path.read_bytes() == before and sorted(p.name for p in path.parent.iterdir()) == ["q.npz", "weights"]


def test_every_truncation_is_a_file_error(saved):
    _, path = saved
    data = path.read_bytes()
    for length in range(0, len(data), 37):
        path.write_bytes(data[:length])
        with pytest.raises(ptxrt.FileError, match="no quantized array"):
            ptxrt.QuantizedArray.load(path)


def test_damage_is_a_file_error_or_found_by_its_checksum(saved):
    q, path = saved
    data = bytearray(path.read_bytes())
    for position in range(0, len(data), 11):
        damaged = bytearray(data)
        damaged[position] ^= 0xFF
        path.write_bytes(damaged)
        try:
            again = ptxrt.QuantizedArray.load(path)
        except ptxrt.FileError:
            continue
        np.testing.assert_array_equal(again.codes, q.codes)


def _npz(**fields):
    buffer = io.BytesIO()
    np.savez(buffer, **fields)
    return buffer.getvalue()


GOOD = dict(codes=np.zeros((1, 16), np.uint8), scales=np.zeros((1, 1), np.uint8), format=np.array("mxfp4"), shape=np.array([1, 32]))


@pytest.mark.parametrize(
    "fields, words",
    [
        (dict(codes=np.zeros((1, 15), np.uint8)), "codes is uint8 \\[1, 15\\]"),
        (dict(codes=np.zeros((1, 16), np.int16)), "codes is int16"),
        (dict(scales=np.zeros((1, 2), np.uint8)), "scales is uint8 \\[1, 2\\]"),
        (dict(format=np.array("mxfp5")), "format is 'mxfp5'"),
        (dict(format=np.array(4)), "format is no name"),
        (dict(shape=np.array([1.0, 32.0])), "no list of whole numbers"),
        (dict(shape=np.array([1, -32])), "shape is"),
        (dict(shape=np.array([[1, 32]])), "shape is"),
        (dict(shape=np.array(32)), "shape is|not iterable"),
        (dict(codes=np.array([{}], object)), "allow_pickle"),
    ],
)
def test_foreign_contents_are_file_errors(tmp_path, fields, words):
    path = tmp_path / "q.npz"
    path.write_bytes(_npz(**{**GOOD, **fields}))
    with pytest.raises(ptxrt.FileError, match=words):
        ptxrt.QuantizedArray.load(path)


def test_files_of_other_kinds_are_file_errors(tmp_path):
    path = tmp_path / "q.npz"
    np.save(tmp_path / "q.npy", np.zeros(3))
    with zipfile.ZipFile(tmp_path / "plain.zip", "w") as archive:
        archive.writestr("codes", "text")
    contents = [b"", b"PK", b"hello", b"\x93NUMPY", (tmp_path / "q.npy").read_bytes(), (tmp_path / "plain.zip").read_bytes()]
    contents.append(_npz(codes=GOOD["codes"]))
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(ptxrt.FileError):
            ptxrt.QuantizedArray.load(path)
    with pytest.raises(FileNotFoundError):
        ptxrt.QuantizedArray.load(tmp_path / "nothing.npz")


# Errors


def test_wrong_quantize_calls_say_what_to_do(emulator):
    x, cube = np.zeros((4, 64), np.float32), np.zeros((2, 2, 32), np.float32)
    for call, words in [
        (lambda: ptxrt.quantize(x, "mxfp5"), "format is 'mxfp5'; there is 'mxfp4'"),
        (lambda: ptxrt.quantize(x, None), "format is None"),
        (lambda: ptxrt.quantize(x, ["mxfp4"]), "format is"),
        (lambda: ptxrt.quantize(x[:, :40], "mxfp4"), "cols is 40 in x; it must be a multiple of 32.*Pad it to 64 or cut it to 32"),
        (lambda: ptxrt.quantize(x.astype(np.float64), "mxfp4"), "x is float64 .*float32, float16 or bfloat16"),
        (lambda: ptxrt.quantize(np.float32(3), "mxfp4"), "single number"),
        (lambda: ptxrt.quantize("text", "mxfp4"), "single number|x is"),
        (lambda: ptxrt.quantize([[1, 2], [3]], "mxfp4"), "x is a list"),
        (lambda: ptxrt.quantize(x, "mxfp4", out=x), "pass a QuantizedArray of mxfp4"),
        (lambda: ptxrt.quantize(x, "mxfp4", out=ptxrt.quantize(x[:2], "mxfp4")), r"shape \[4, 64\]"),
        (lambda: ptxrt.dequantize(x), "q is a ndarray"),
        (lambda: ptxrt.dequantize(ptxrt.quantize(x, "mxfp4"), np.float64), "dtype is .*float64"),
        (lambda: ptxrt.dequantize(ptxrt.quantize(x, "mxfp4"), "nothing"), "dtype is 'nothing'"),
        (lambda: ptxrt.dequantize(ptxrt.quantize(x, "mxfp4"), out=x[:2]), r"out has shape \[2, 64\]"),
        (lambda: ptxrt.dequantize(ptxrt.quantize(x, "mxfp4"), out=[1]), "out is a list"),
        (lambda: ptxrt.dequantize(ptxrt.quantize(cube, "mxfp4"), out=np.zeros_like(cube).transpose(1, 0, 2)), "out has strides"),
    ]:
        with pytest.raises(ptxrt.ArgumentError, match=words):
            call()


def test_a_quantized_array_checks_its_bytes():
    codes, scales = np.zeros((2, 16), np.uint8), np.zeros((2, 1), np.uint8)

    def make(codes=codes, scales=scales, format="mxfp4", shape=(2, 32), **rest):
        return ptxrt.QuantizedArray(codes, scales, format=format, shape=shape, **rest)

    assert make(scales=scales.view(ml_dtypes.float8_e8m0fnu)).shape == (2, 32)
    for change, words in [
        (dict(codes=codes[:1]), "codes is uint8 \\[1, 16\\]; mxfp4 of shape \\[2, 32\\] has codes of uint8 \\[2, 16\\]"),
        (dict(codes=codes.astype(np.int32)), "codes is int32"),
        (dict(scales=scales[:, :0]), "scales is uint8 \\[2, 0\\]"),
        (dict(shape=(2, 40)), "multiple of 32"),
        (dict(shape=()), "multiple of 32"),
        (dict(shape=7), "pass a tuple"),
        (dict(shape=(2, 32.5)), "pass a tuple"),
        (dict(format="nvfp4"), "format is 'nvfp4'"),
        (dict(global_scale=1.0), "global_scale is 1.0; mxfp4 has none"),
    ]:
        with pytest.raises(ptxrt.ArgumentError, match=words):
            make(**change)
