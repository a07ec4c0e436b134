"""Thousands of random wrong calls of the runtime: each raises ArgumentError, MachineError or OutOfMemory with an
informative message."""

import random

import ml_dtypes
import numpy as np
import pytest

import ptxrt
from ptxrt import backend, selection
from test_driver import cuda, install  # noqa: F401

transpose = ptxrt.kernels()["transpose_naive"]


class Odd:
    """An object that no parameter accepts."""

    def __repr__(self):
        return "Odd()"


class Stream:
    """A broken stream of another library."""

    def __init__(self, value):
        self.value = value

    def __cuda_stream__(self):
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


class Interface:
    """A broken array of another library."""

    def __init__(self, **fields):
        self.__cuda_array_interface__ = (
            dict(version=3, shape=(2, 3), typestr="<f4", data=(4096, False), strides=None, stream=1) | fields
        )


X = np.arange(6, dtype=np.float32).reshape(2, 3)
ODD = [
    None,
    True,
    0,
    -1,
    2**70,
    1.5,
    np.nan,
    "text",
    b"b",
    (),
    [],
    {},
    [1, [2]],
    Odd(),
    type,
    np.array(["a"]),
    np.array([None]),
    np.float64(2),
    1j,
    range(3),
]
STREAMS = ODD + [Stream(v) for v in (None, 3, (0,), (0, "x"), (0, -5), (0, 1, 2), RuntimeError("gone"))]
ARRAYS = ODD + [
    X,
    X.T,
    X.astype(np.float64),
    X[0],
    X.astype(ml_dtypes.bfloat16),
    np.float32(3),
    X.astype("S2"),
    X > 0,
    np.ma.masked_array(X, X > 2),
]
BROKEN = [dict(shape=None), dict(shape=("a",)), dict(shape=(-1, 3)), dict(typestr="?x"), dict(typestr=3), dict(typestr=None), dict(typestr='|O'), dict(data=None), dict(data=("a", 0)), dict(data=(4097, 0)), dict(strides=(1,)), dict(strides="ab"), dict(stream="x"), dict(stream=-4), dict(mask=X)]  # fmt: skip
SHAPES = ODD + [(2, 3), 5, (-1,), (2.5,), ("a",), (2**40, 2**40), (None, 2), np.array([2, 3]), (True, 2)]
DTYPES = ODD + [np.float32, "bfloat16", "f4", "O", "S3", np.dtype([("a", "f4")]), ml_dtypes.float8_e4m3fn]
DEVICES = [None, 0, 1, -1, 2**70, "0", 1.0, True, Odd(), [0]]


def outcome(function, *arguments, **named):
    """The result, or None if the call raised a typed error with an informative message."""
    try:
        return function(*arguments, **named)
    except (ptxrt.ArgumentError, ptxrt.MachineError, ptxrt.OutOfMemory) as error:
        assert len(str(error)) > 20, repr(error)
        return None


@pytest.fixture(params=["emulator", "fake"])
def either(request):
    """The emulator, and the stand-in for a GPU."""
    if request.param == "emulator":
        with ptxrt.using("emulator") as chosen:
            yield chosen
    else:
        request.getfixturevalue("cuda")
        yield selection.current()


def foreign(rng):
    return Interface(**rng.choice(BROKEN))


def test_arrays(either):
    rng = random.Random(1)
    for _ in range(2000):
        x = rng.choice([*ARRAYS, foreign(rng)])
        array = outcome(ptxrt.to_device, x, **({"stream": rng.choice(STREAMS)} if rng.random() < 0.3 else {}))
        if isinstance(array, ptxrt.DeviceArray) and array.memory.is_owned:
            outcome(array.reshape, rng.choice(SHAPES))
            outcome(array.view, rng.choice(DTYPES))
        outcome(ptxrt.empty, rng.choice(SHAPES), rng.choice(DTYPES))


def test_places_and_streams(either):
    rng = random.Random(2)
    for _ in range(800):
        device = rng.choice(DEVICES[:2] + DEVICES[3:])
        outcome(ptxrt.empty, (2, 3), np.float32, device=device)
        outcome(ptxrt.memory_info, device=device)
        outcome(ptxrt.synchronize, rng.choice(STREAMS))
        stream = outcome(ptxrt.Stream, device=device, priority=rng.choice(ODD))
        if stream is not None:
            outcome(stream.wait, rng.choice(STREAMS))
            outcome(ptxrt.Event().record, rng.choice(STREAMS))
        before = backend.enter()
        outcome(
            ptxrt.using,
            rng.choice(["emulator", "portable", "native", *ODD]),
            **rng.choice([{}, {"device": device}, {"nothing": 1}]),
        )
        backend.leave(before, "backend")


def test_launches(either):
    rng, x = random.Random(3), ptxrt.to_device(X)
    y = ptxrt.empty((3, 2), np.float32)
    prepared = ptxrt.prepare(transpose, x, y=y)
    given = 0
    for _ in range(2000):
        stream = rng.choice(STREAMS) if rng.random() < 0.5 else None
        source = rng.choice([*[x] * 20, *ARRAYS, foreign(rng)])
        target = rng.choice([*[y] * 20, True, *ARRAYS])
        given += outcome(transpose, source, y=target, stream=stream) is not None
        outcome(prepared, source, y=target, stream=stream)
        outcome(
            ptxrt.prepare,
            rng.choice([transpose, lambda a: ptxrt.quantize(a, "mxfp4"), lambda *a: x, lambda a: a.to_numpy()]),
            source,
        )
        if rng.random() < 0.2:
            g = ptxrt.graph()

            def gather():
                with g:
                    transpose(source, y=target, stream=stream)

            outcome(gather)
            outcome(g.launch, stream)
    assert given > 100
    np.testing.assert_array_equal(transpose(x).to_numpy(), X.T)
