"""Triton kernels on the emulator: compiled by Triton's own compiler, run on arrays of the CPU, with every check.

    @triton.jit
    def add(x, y, out, n, BLOCK: tl.constexpr): ...

    ptxrt.triton.run(add, (4,), x, y, out, 1000, BLOCK=256)          # NumPy arrays, changed in place
    with ptxrt.triton.emulated():
        add[(4,)](x, y, out, 1000, BLOCK=256)                        # the same, as on a GPU

No GPU is needed, neither to compile nor to run. Triton is imported at the first use (`pip install ptxrt[triton]`). The
kernel runs on the current emulator, or, if a GPU is current, on that of `ptxrt.using("emulator")`. With
`ptxrt.using("emulator", strict=True)` races are found, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np

from .errors import ArgumentError, MachineError
from .program import emulate

#: Triton's name of each element type.
_TYPES = {
    **{np.dtype(f"i{size}"): f"i{8 * size}" for size in (1, 2, 4, 8)},
    **{np.dtype(f"u{size}"): f"u{8 * size}" for size in (1, 2, 4, 8)},
    np.dtype(bool): "i1", np.dtype("f2"): "fp16", np.dtype("f4"): "fp32", np.dtype("f8"): "fp64",
    np.dtype(ml_dtypes.bfloat16): "bf16", np.dtype(ml_dtypes.float8_e4m3fn): "fp8e4nv",
    np.dtype(ml_dtypes.float8_e5m2): "fp8e5",
}  # fmt: skip
#: Targets of `run`: compute capabilities times 10.
TARGETS = (80, 86, 89, 120)
_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion", "debug", "sanitize_overflow")
_ALIGNMENT = 16  # bytes of an address, or a divisor of an integer, for which Triton's compiler specializes


def run(kernel: Any, grid: Any, *arguments: Any, target: int = 120, **named: Any) -> None:
    """Compile a Triton kernel and run it on the emulator; it changes arrays in place.

    Args:
        kernel: A kernel of `triton.jit`, also under `triton.heuristics` or `triton.autotune`, of which the first
            configuration is taken.
        grid: One to three numbers, or a function of the constants.
        arguments: NumPy arrays (or arrays of the CPU with `numpy()`, such as PyTorch's), numbers, None.
        target: The GPU that the code is for: 80, 86, 89 or 120.
        named: Constants (`tl.constexpr`) and other arguments by name, and the compiler's num_warps, num_stages,
            maxnreg.

    Raises:
        ArgumentError: An argument is invalid; the message names it.
        MachineError: Triton is not installed.
        EmulatorFault: The emulator found an error of the kernel.
        Unsupported: The kernel uses what the emulator does not implement.
    """
    _triton()
    if target not in TARGETS:
        raise ArgumentError(f"target is {target!r}; kernels are compiled for {', '.join(map(str, TARGETS))}")
    with emulated(target=target):
        kernel[grid](*arguments, **named)


@contextmanager
def emulated(*, target: int = 120) -> Iterator[None]:
    """Run `kernel[grid](...)` of every Triton kernel on the emulator within the block, as `run` does.

    The block takes effect in all threads of the process.
    """
    jit = _triton().runtime.jit.JITFunction
    tuner = _triton().runtime.autotuner.Autotuner
    before = jit.run, tuner.run

    def launch(kernel, *arguments, grid, warmup=False, **named):
        if not warmup:
            _launch(kernel, grid, arguments, named, target)

    def first(kernel, *arguments, **named):
        """Run an autotuned kernel in its first configuration, because the emulator times nothing."""
        config = kernel.configs[0]
        return kernel.fn.run(*arguments, **named, **config.all_kwargs())

    jit.run, tuner.run = launch, first
    try:
        yield
    finally:
        jit.run, tuner.run = before


def _triton() -> Any:
    """Import Triton; MachineError if it is not installed."""
    try:
        import triton
        import triton.runtime.autotuner
    except ImportError as error:
        raise MachineError(f"Triton is not installed ({error}); pip install ptxrt[triton]") from error
    return triton


def _launch(kernel: Any, grid: Any, arguments: tuple, named: dict[str, Any], target: int) -> None:
    options = {name: named.pop(name) for name in _OPTIONS if name in named and name not in kernel.arg_names}
    values = _bound(kernel, arguments, named)
    signature, constants, attributes, passed = {}, {}, {}, []
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[(index,)] = "constexpr", value
            continue
        value = _on_the_cpu(value)
        signature[parameter.name] = _type_of(parameter.name, value)
        aligned = isinstance(value, np.ndarray) or (isinstance(value, int) and value % _ALIGNMENT == 0)
        if aligned and not parameter.do_not_specialize and not isinstance(value, bool):
            attributes[(index,)] = [["tt.divisibility", _ALIGNMENT]]
        passed.append((signature[parameter.name], value))
    grid = grid({**values, **options}) if callable(grid) else grid
    grid = tuple(int(size) for size in (grid if isinstance(grid, (tuple, list)) else (grid,)))
    if 0 in grid:
        return
    compiled = _compile(kernel, signature, constants, attributes, options, target)
    metadata = compiled.metadata
    if getattr(metadata, "num_ctas", 1) != 1:
        raise ArgumentError(
            f"{kernel.__name__}: num_ctas is {metadata.num_ctas}; a cluster has one block on the emulator"
        )
    entry = emulate(compiled.asm["ptx"], f"{kernel.__name__}.ptx")[metadata.name]
    places = [_scalar(type, value) for type, value in passed]
    blocks = int(np.prod(grid))
    for size in (metadata.global_scratch_size, metadata.profile_scratch_size):
        # Scratch memory of the kernel, whose contents are discarded.
        places.append(np.zeros(size * blocks, np.uint8) if size else None)
    entry(grid, 32 * metadata.num_warps, *places, shared_bytes=metadata.shared)


def _bound(kernel: Any, arguments: tuple, named: Mapping[str, Any]) -> dict[str, Any]:
    """The value of every parameter, with the defaults."""
    try:
        bound = kernel.signature.bind(*arguments, **named)
    except TypeError as error:
        raise ArgumentError(
            f"{kernel.__name__}({', '.join(kernel.arg_names)}): {error}; the compiler knows {', '.join(_OPTIONS)}"
        ) from error
    bound.apply_defaults()
    return dict(bound.arguments)


def _on_the_cpu(value: Any) -> Any:
    """NumPy's view of an array of the CPU; numbers as they are."""
    if isinstance(value, (np.ndarray, np.generic, bool, int, float)):
        return value
    if hasattr(value, "numpy"):
        try:
            return value.numpy()
        except TypeError:  # PyTorch's bfloat16, which NumPy does not have
            if str(getattr(value, "dtype", "")) == "torch.bfloat16":
                import torch

                return value.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
            raise
    raise ArgumentError(
        f"an argument is a {type(value).__name__}; pass NumPy arrays, arrays with numpy(), numbers or None"
    )


def _type_of(name: str, value: Any) -> str:
    """Triton's type of an argument."""
    if isinstance(value, np.ndarray):
        if value.dtype not in _TYPES:
            raise ArgumentError(f"{name} has elements of {value.dtype}; Triton has {', '.join(map(str, _TYPES))}")
        return "*" + _TYPES[value.dtype]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise ArgumentError(f"{name} is {value}; numbers have at most 64 bits")
        return "i32" if -(2**31) <= value < 2**31 else "i64" if value < 2**63 else "u64"
    if isinstance(value, float):
        return "fp32"
    return _TYPES[value.dtype]


def _scalar(type: str, value: Any) -> Any:
    """Return a number as the parameter that Triton's entry has for its type."""
    if isinstance(value, np.ndarray):
        return value
    if type == "i1":
        return np.int8(bool(value))
    if type in ("fp16", "bf16"):
        return np.asarray(value).view(np.uint16)[()] if isinstance(value, np.generic) else value
    dtype = next(dtype for dtype, name in _TYPES.items() if name == type)
    return dtype.type(value)


def _compile(kernel: Any, signature, constants, attributes, options, target: int) -> Any:
    """Compile a kernel. Triton's compiler caches its results on disk."""
    triton = _triton()
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
