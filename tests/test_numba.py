"""Numba's CUDA kernels on the emulator, against NumPy; a race that is found; wrong calls."""

import numpy as np
import pytest

import ptxrt

pytest.importorskip("numba", reason="Numba is not installed: pip install ptxrt[numba]; .ci/run does")
from numba import cuda, float32, int32
from numba.cuda.cudadrv import nvvm

pytestmark = pytest.mark.skipif(not nvvm.is_available(), reason="Numba finds no NVVM; it comes with a CUDA toolkit")


@pytest.fixture(autouse=True)
def machine_of_tests(emulator):
    """Use the emulator even if there is a GPU."""


@cuda.jit
def saxpy(x, y, a):
    i = cuda.grid(1)
    if i < y.shape[0]:
        y[i] = a * x[i] + y[i]


@cuda.jit
def transpose(x, out):
    tile = cuda.shared.array((16, 17), float32)
    i, j = cuda.grid(2)
    if i < x.shape[0] and j < x.shape[1]:
        tile[cuda.threadIdx.x, cuda.threadIdx.y] = x[i, j]
    cuda.syncthreads()
    if i < x.shape[0] and j < x.shape[1]:
        out[j, i] = tile[cuda.threadIdx.x, cuda.threadIdx.y]


@cuda.jit
def total(x, out):
    part = cuda.shared.array(128, int32)
    t = cuda.threadIdx.x
    part[t] = x[cuda.grid(1)]
    step = 64
    while step:
        cuda.syncthreads()
        if t < step:
            part[t] += part[t + step]
        step //= 2
    if t == 0:
        cuda.atomic.add(out, 0, part[0])


@cuda.jit
def total_without_a_barrier(x, out):
    part = cuda.shared.array(128, int32)
    t = cuda.threadIdx.x
    part[t] = x[t]
    if t < 64:
        out[t] = part[t] + part[t + 64]


@cuda.jit
def types(a, b, c, out):
    out[0] = a
    out[1] = b
    out[2] = c


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32])
def test_saxpy(rng, dtype):
    x, y = (rng.standard_normal((2, 1000)) * 100).astype(dtype)
    expected = dtype(3) * x + y
    ptxrt.numba.run(saxpy, 8, 128, x, y, dtype(3))
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-4)  # one rounding where NumPy has two


def test_within_emulated_kernels_run_as_on_a_gpu(rng):
    x = rng.standard_normal((33, 50)).astype(np.float32)
    out = np.zeros((50, 33), np.float32)
    with ptxrt.numba.emulated():
        transpose[(3, 4), (16, 16)](x, out)
    assert (out == x.T).all()


def test_arrays_of_any_strides(rng):
    x = rng.standard_normal((40, 40)).astype(np.float32)
    out = np.zeros((80, 40), np.float32)
    ptxrt.numba.run(transpose, (3, 3), (16, 16), x.T, out[::2])
    assert (out[::2] == x).all() and (out[1::2] == 0).all()


def test_reduction_with_strict_checks(rng):
    x, out = rng.integers(-100, 100, 512).astype(np.int32), np.zeros(1, np.int32)
    with ptxrt.using("emulator", strict=True):
        ptxrt.numba.run(total, 4, 128, x, out)
    assert out[0] == x.sum()


def test_a_missing_barrier_is_found():
    x, out = np.ones(128, np.int32), np.zeros(64, np.int32)
    ptxrt.numba.run(total_without_a_barrier, 1, 128, x, out)
    with ptxrt.using("emulator", strict=True), pytest.raises(ptxrt.EmulatorFault, match="(a race|nothing wrote)"):
        ptxrt.numba.run(total_without_a_barrier, 1, 128, x, out)


def test_numbers():
    out = np.zeros(3)
    ptxrt.numba.run(types, 1, 1, 2**40, 0.1, True, out)
    assert out.tolist() == [2**40, 0.1, 1]
    ptxrt.numba.run(types, 1, 1, np.int16(-5), np.float32(0.5), np.uint8(200), out)
    assert out.tolist() == [-5, 0.5, 200]


def test_wrong_calls():
    x = np.ones(4, np.float32)
    with pytest.raises(ptxrt.ArgumentError, match="saxpy: argument 0 is a object; pass NumPy arrays and numbers"):
        ptxrt.numba.run(saxpy, 1, 32, object(), x, 1.0)
    with pytest.raises(ptxrt.ArgumentError, match="saxpy: argument 2 is a complex128 for Numba"):
        ptxrt.numba.run(saxpy, 1, 32, x, x, 1j)
    with pytest.raises(ptxrt.ArgumentError, match=r"target is \(9, 0\); kernels are compiled for"):
        ptxrt.numba.run(saxpy, 1, 32, x, x, 1.0, target=(9, 0))
