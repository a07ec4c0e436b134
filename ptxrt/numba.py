"""Numba's CUDA kernels on the emulator: compiled by Numba, run on arrays of the CPU, with every check.

    @cuda.jit
    def add(x, y, out): ...

    ptxrt.numba.run(add, 4, 256, x, y, out)                   # grid, block, NumPy arrays, which are changed in place
    with ptxrt.numba.emulated():
        add[4, 256](x, y, out)                                # the same, as on a GPU

No GPU is needed; Numba compiles with the NVVM library of a CUDA toolkit, which it finds by itself. Numba is imported at
the first use (`pip install ptxrt[numba]`). The kernel runs on the current emulator, or, if a GPU is current, on that of
`ptxrt.using("emulator")`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from .errors import ArgumentError, MachineError
from .program import emulate

#: Compute capabilities that Numba compiles for; the first is the default.
TARGETS = ((8, 0), (8, 6), (8, 9))


def run(
    kernel: Any, grid: Any, block: Any, *arguments: Any, shared_bytes: int = 0, target: tuple[int, int] = TARGETS[0]
) -> None:
    """Compile a kernel of `numba.cuda.jit` and run it on the emulator; it changes arrays in place.

    Args:
        kernel: A kernel of `numba.cuda.jit`.
        grid: One to three numbers.
        block: One to three numbers.
        arguments: NumPy arrays of any strides and numbers. Arrays that are not row-major are copied, and copied back.
        shared_bytes: Bytes of dynamic shared memory.
        target: The compute capability that the code is for.

    Raises:
        ArgumentError: Numba has no type for an argument.
        MachineError: Numba or NVVM is missing.
        EmulatorFault: The emulator found an error of the kernel.
    """
    with emulated(target=target):
        kernel[grid, block, 0, shared_bytes](*arguments)


@contextmanager
def emulated(*, target: tuple[int, int] = TARGETS[0]) -> Iterator[None]:
    """Run `kernel[grid, block](...)` of every kernel of `numba.cuda.jit` on the emulator within the block, as `run`
    does.

    The block takes effect in all threads of the process.
    """
    if target not in TARGETS:
        raise ArgumentError(f"target is {target!r}; kernels are compiled for {', '.join(map(str, TARGETS))}")
    numba = _numba()
    dispatcher = numba.cuda.dispatcher.CUDADispatcher
    before = dispatcher.call, numba.config.CUDA_LOW_OCCUPANCY_WARNINGS

    def call(kernel, arguments, grid, block, stream, shared_bytes):
        _launch(numba, kernel, grid, block, arguments, shared_bytes, target)

    dispatcher.call, numba.config.CUDA_LOW_OCCUPANCY_WARNINGS = call, 0  # small grids are normal on the emulator
    try:
        yield
    finally:
        dispatcher.call, numba.config.CUDA_LOW_OCCUPANCY_WARNINGS = before


def _numba() -> Any:
    """Import Numba with its CUDA target; MachineError if it is not installed."""
    try:
        import numba
        import numba.cuda
        import numba.cuda.dispatcher
    except ImportError as error:
        raise MachineError(f"Numba is not installed ({error}); pip install ptxrt[numba]") from error
    return numba


def _launch(numba: Any, kernel: Any, grid, block, arguments: tuple, shared_bytes: int, target: tuple[int, int]) -> None:
    name = kernel.py_func.__name__
    types, places, copies = [], [], []
    for index, value in enumerate(arguments):
        if isinstance(value, np.ndarray):
            row_major = np.ascontiguousarray(value)
            if row_major is not value and value.flags.writeable:
                copies.append((value, row_major))
            value = row_major
        try:
            types.append(numba.typeof(value))
        except ValueError as error:
            raise ArgumentError(
                f"{name}: argument {index} is a {type(value).__name__}; pass NumPy arrays and numbers"
            ) from error
        places += _places(name, index, value, types[-1])
    options = kernel.targetoptions
    text = _compiled(
        numba, kernel.py_func, tuple(types), target, bool(options.get("fastmath")), bool(options.get("lineinfo", True))
    )
    (entry,) = emulate(text, f"{name}.ptx").values()
    entry(grid, block, *places, shared_bytes=shared_bytes)
    for value, row_major in copies:
        np.copyto(value, row_major)


def _places(name: str, index: int, value: Any, type: Any) -> list[Any]:
    """Return the parameters that Numba passes for an argument: for an array 5 + 2 ndim, for a number the number."""
    if isinstance(value, np.ndarray):
        numbers = [0, 0, value.size, value.itemsize]
        sizes = [*value.shape, *value.strides]
        return [*map(np.int64, numbers), value if value.size else None, *map(np.int64, sizes)]
    if isinstance(value, (bool, np.bool_)):
        return [np.uint8(value)]
    if isinstance(value, np.generic) and value.dtype.kind in "iuf":
        return [value]
    if isinstance(value, int):
        return [np.int64(value) if value < 2**63 else np.uint64(value)]
    if isinstance(value, float):
        return [np.float64(value)]
    raise ArgumentError(
        f"{name}: argument {index} is a {type} for Numba; pass NumPy arrays, integers, floats and bools"
    )


def _compiled(numba: Any, function: Any, types: tuple, target: tuple[int, int], fastmath: bool, lineinfo: bool) -> str:
    """Return the PTX of a kernel for these types; the latest are kept."""
    key = (function, types, target, fastmath, lineinfo)
    if key not in _texts:
        if len(_texts) >= _TEXTS:
            _texts.pop(next(iter(_texts)))
        try:
            _texts[key], _ = numba.cuda.compile_ptx(function, types, cc=target, fastmath=fastmath, lineinfo=lineinfo)
        except numba.cuda.cudadrv.error.NvvmSupportError as error:
            raise MachineError(f"Numba finds no NVVM ({error}); install a CUDA toolkit, or set CUDA_HOME") from error
    return _texts[key]


_texts: dict[tuple, str] = {}
_TEXTS = 256  # the most texts that are kept
