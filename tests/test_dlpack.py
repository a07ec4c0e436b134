"""DLPack import and export, version 1 and older: ownership of memory, stream order, and what cannot be exchanged."""

import ctypes
import gc
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import ptxrt
from ptxrt import dlpack, ops, selection
from test_driver import cuda, install, waits  # noqa: F401

transpose = ops.transpose.transpose_naive


class Legacy:
    """An object with the old protocol alone."""

    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, stream=None):
        return self.array.__dlpack__(stream=stream) if stream is not None else self.array.__dlpack__()


class Foreign:
    """An object with DLPack and no other interface."""

    def __init__(self, array):
        self.array = array
        self.asked = None

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **named):
        self.asked = named
        return self.array.__dlpack__(**named)


def numbers(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Every test starts without DLPack structs of earlier tests."""
    gc.collect()
    dlpack._sweep()


# From the emulator: copies in host memory


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64, np.uint8, np.bool_, np.complex64])
@pytest.mark.parametrize("shape", [(3, 4), (), (0, 2), (5,)])
def test_numpy_takes_what_the_emulator_gives(emulator, lent, dtype, shape):
    x = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    array = ptxrt.to_device(x)
    assert array.__dlpack_device__() == (1, 0)
    got = np.from_dlpack(array)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, x)
    del got
    gc.collect()
    assert not lent()


@pytest.mark.parametrize("wrap", [Legacy, Foreign])
@pytest.mark.parametrize(
    "dtype", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu, np.uint8]
)
def test_what_goes_out_comes_in(emulator, lent, wrap, dtype):
    x = (numbers(4, 6) - 9).astype(dtype)
    array = ptxrt.to_device(x)
    (got,) = ptxrt.array.as_arrays("test", x=wrap(array))
    narrow_as_bytes = wrap is Legacy and np.dtype(dtype).name in dlpack.NARROW
    assert got.dtype == (np.uint8 if narrow_as_bytes else dtype) and isinstance(got, np.ndarray)
    np.testing.assert_array_equal(got.view(np.uint8), x.view(np.uint8))
    assert lent() == 1
    del got
    gc.collect()
    assert not lent()


def test_foreign_host_arrays_are_shared_not_copied(emulator):
    x = numbers(4, 6)
    for view in (x, x[:, ::2], x.T, x[1:3]):
        (got,) = ptxrt.array.as_arrays("test", x=Foreign(view))
        assert np.shares_memory(got, x) and got.strides == view.strides
        np.testing.assert_array_equal(transpose(Foreign(view)), view.T)
    fixed = x.copy()
    fixed.flags.writeable = False
    (got,) = ptxrt.array.as_arrays("test", x=Foreign(fixed))
    assert not got.flags.writeable


def test_a_capsule_that_nobody_takes_is_let_go(emulator, lent):
    array = ptxrt.to_device(numbers(3))
    for version in (None, (1, 0)):
        capsule = array.__dlpack__(max_version=version)
        dlpack._sweep()
        assert lent() == 1
        del capsule
        dlpack._sweep()
        assert not lent() and not dlpack._untaken


def test_a_capsule_dies_quietly_in_the_middle_of_an_error(emulator, lent):
    array = ptxrt.to_device(numbers(3).astype(ml_dtypes.bfloat16))
    for _ in range(3):
        with pytest.raises((BufferError, RuntimeError, TypeError), match="dtype"):
            np.from_dlpack(array)  # NumPy's DLPack has no bfloat16
    dlpack._sweep()
    assert not lent()


def test_what_the_emulator_cannot_give(emulator):
    array = ptxrt.to_device(numbers(3))
    for named, words in [
        (dict(copy=False), "can only be copied to host memory"),
        (dict(stream=1), "the emulator has none"),
        (dict(dl_device=(2, 0)), r"DLPack device \(2, 0\)"),
    ]:
        with pytest.raises(BufferError, match=words):
            array.__dlpack__(**named)
    assert np.from_dlpack(array, copy=True).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "device, capsule, words",
    [
        ((8, 0), None, "DLPack device 8"),
        ((2, 0), None, "machine is the emulator"),
        ("here", None, "__dlpack_device__ raised"),
        ((1, 0), 3, "no capsule"),
        ((1, 0), RuntimeError("broken"), "broken"),
    ],
)
def test_what_cannot_come_in_is_an_argument_error(emulator, device, capsule, words):
    class Broken:
        def __dlpack_device__(self):
            return device

        def __dlpack__(self, **named):
            if isinstance(capsule, Exception):
                raise capsule
            return capsule

    with pytest.raises(ptxrt.ArgumentError, match=words):
        ptxrt.to_device(Broken())


def test_a_capsule_is_taken_once(emulator):
    capsule = ptxrt.to_device(numbers(3)).__dlpack__(max_version=(1, 1))

    class Twice:
        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, **named):
            return capsule

    ptxrt.array.as_arrays("test", x=Twice())
    with pytest.raises(ptxrt.ArgumentError, match="no capsule that is still to be taken"):
        ptxrt.array.as_arrays("test", x=Twice())


def test_deleters_of_others_are_called_once(emulator):
    """A struct as a C library makes it, with a deleter that records its calls."""
    calls = []
    deleter = dlpack._DELETER(calls.append)
    data = numbers(4)
    shape = (ctypes.c_int64 * 1)(4)
    tensor = dlpack._Tensor(data.ctypes.data, dlpack._Device(1, 0), 1, dlpack._DataType(2, 32, 1), shape, None, 0)
    managed = dlpack._Managed(tensor, None, ctypes.cast(deleter, ctypes.c_void_p))

    class Theirs:
        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self):
            return dlpack._new_capsule(ctypes.addressof(managed), ctypes.addressof(dlpack._NAMES[b"dltensor"]), None)

    (got,) = ptxrt.array.as_arrays("test", x=Theirs())
    part = got[1:]
    np.testing.assert_array_equal(got, data)
    del got
    gc.collect()
    assert calls == []
    del part
    gc.collect()
    assert calls == [ctypes.addressof(managed)]


def test_what_is_out_at_exit_harms_nobody():
    code = (
        "import numpy as np, ptxrt; ptxrt.using('emulator');"
        "x = ptxrt.to_device(np.zeros(3, np.float32)); kept = np.from_dlpack(x); c = x.__dlpack__();"
        "import builtins; builtins.kept, builtins.c = kept, c; y = ptxrt.to_device(np.ones(3))"
    )
    done = subprocess.run([sys.executable, "-X", "faulthandler", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# CUDA memory


def test_cuda_memory_is_shared(cuda):
    x = ptxrt.to_device(numbers(4, 6))
    assert x.__dlpack_device__() == (2, 0)
    theirs = Foreign(x)
    y = ptxrt.to_device(theirs)
    own = selection.current().own_queue.handle
    assert y.address == x.address and theirs.asked == dict(max_version=(1, 1), stream=own)
    np.testing.assert_array_equal(transpose(theirs).to_numpy(), numbers(4, 6).T)
    assert ptxrt.to_device(Legacy(x)).address == x.address


def test_bfloat16_and_views_of_cuda_memory(cuda):
    x = ptxrt.to_device(numbers(4, 6).astype(ml_dtypes.bfloat16))
    y = ptxrt.to_device(Foreign(x))
    assert y.dtype == ml_dtypes.bfloat16 and y.is_contiguous and y.writeable
    assert ptxrt.to_device(Foreign(ptxrt.to_device(np.zeros((2, 0), np.float32)))).shape == (2, 0)


@pytest.mark.parametrize("stream, waiting", [(None, 1), (1, 1), (66, 66), (2, 2), (-1, None)])
def test_the_taker_waits_for_the_writer(cuda, stream, waiting):
    y = transpose(ptxrt.to_device(numbers(2, 3)), stream=55)
    cuda.calls.clear()
    y.__dlpack__(stream=stream)
    assert waits(cuda) == ([] if waiting is None else [(waiting, 55)])


@pytest.mark.parametrize("stream", [0, -2, "one", 1.0, True])
def test_streams_that_mean_nothing_are_refused(cuda, stream):
    with pytest.raises(BufferError, match="stream is"):
        ptxrt.to_device(numbers(2, 3)).__dlpack__(stream=stream)


def test_copies_are_said_to_be_copies(cuda):
    x = ptxrt.to_device(numbers(2, 3))
    host = np.from_dlpack(x, device="cpu")
    np.testing.assert_array_equal(host, numbers(2, 3))
    capsule = x.__dlpack__(copy=True, max_version=(1, 0))
    managed = dlpack._Versioned.from_address(
        dlpack._pointer_of(capsule, ctypes.addressof(dlpack._NAMES[b"dltensor_versioned"]))
    )
    assert managed.flags == dlpack.IS_COPIED and managed.tensor.data != x.address
    with pytest.raises(BufferError):
        x.__dlpack__(dl_device=(1, 0), copy=False)


def test_read_only_memory_is_said_to_be_so(cuda):
    x = ptxrt.to_device(numbers(2, 3))
    fixed = ptxrt.array.DeviceArray(x.memory, x.address, x.shape, x.dtype, None, False)
    assert not ptxrt.to_device(Foreign(fixed)).writeable
    with pytest.raises(BufferError, match="read-only"):
        fixed.__dlpack__()


def test_lenders_by_dlpack_wait_for_launches_and_get_memory_back_after_them(cuda, lent):
    x = ptxrt.to_device(numbers(4, 4))
    stream = ptxrt.Stream()
    cuda.calls.clear()
    y = transpose(Foreign(x), stream=stream)
    assert waits(cuda)[-1] == (1, stream.handle) and lent() == 1
    gc.collect()
    ptxrt.empty(3, np.float32)
    assert lent() == 1, "given back while a launch still reads it"
    np.testing.assert_array_equal(y.to_numpy(), numbers(4, 4).T)
    stream.synchronize()
    ptxrt.empty(3, np.float32)
    assert not lent()


def test_a_graph_hands_nothing_out(cuda):
    x = ptxrt.to_device(numbers(2, 3))
    with pytest.raises(ptxrt.ArgumentError, match="handed out"), ptxrt.graph():
        x.__dlpack__()
