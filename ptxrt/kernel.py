"""Callable kernels: declarations with binding, reference and launch, and the registry of all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from .accuracy import EXACT, Tolerance
from .binder import Bound, bind
from .declaration import Argument, Declaration
from .formats import Format
from .launch import run
from .prepared import remembered

REGISTRY: dict[str, "Kernel"] = {}


def kernel(
    *,
    grid: str,
    variants: Mapping[str, Sequence[int | tuple[int, ...]]] | None = None,
    filled: bool = False,
    halved: bool = False,
    packed: bool = False,
    fixed: Mapping[str, int] | None = None,
    multiples: Mapping[str, int] | None = None,
    derived: Mapping[str, Callable[[Mapping[str, int]], int]] | None = None,
    cases: Sequence[Mapping[str, Any]] = (),
    tolerance: Tolerance | Mapping[str, Tolerance] | None = None,
    flops: str | Callable[..., int] | None = None,
    draw: Mapping[str, Callable[[np.random.Generator, Format, Sequence[int], Mapping[str, int]], np.ndarray]]
    | None = None,
) -> Callable[[Callable], "Kernel"]:
    """Declare a kernel; the decorated function becomes a callable `Kernel` in REGISTRY.

    grid: words for grid x, y, z, each an axis or a product of axes, covered by tiles.
    variants: axes that are compiled in, with the values that exist; several axes with the combinations that exist
        are one key, "dim dim_v": ((64, 64), (192, 128)).
    filled: whether a compiled size may be larger than the arrays': the smallest that holds them is chosen, the entry
        receives the arrays' own sizes and pads with zeros.
    halved: whether each entry has a variant ENTRY_half with the same parameters and bitwise equal results, whose
        blocks cover less of the grid. Launches of few blocks take it (launch.suits_halves). Targets where its blocks
        would cover as much do not have it.
    packed: whether the second word of the grid counts rows of `sequences` sequences that are packed in one item of the
        batch. No block has rows of two of them, so that there may be a block more for each (sequences.py).
    fixed: axes that have one size and need not be given.
    multiples: axes whose sizes must be multiples of these numbers, and no shape says so.
    derived: for axes that depend on others, functions that return the size from the axes known so far, in an order
        in which all can be computed. The known axes include the axis itself if the call gives it. A derived axis may
        be an axis of no array; the entry does not receive such an axis.
    cases: sizes of axes, values of scalars, optional arrays (name=True) and, to restrict it, the
        format of the unions (format="bf16"); tests, `check` and the documentation loop over them.
    tolerance: for all outputs or by output; absent means exact.
    flops: a product of axes, or a function of axes and scalars by keyword.
    draw: functions that draw the examples of inputs that cannot have arbitrary contents:
        (rng, format, shape, axes) -> array.
    """

    def declare(function: Callable) -> Kernel:
        if function.__name__ in REGISTRY:
            raise ValueError(f"a kernel called {function.__name__} is declared already")
        declared = Kernel(
            function,
            grid,
            variants or {},
            filled,
            halved,
            packed,
            fixed or {},
            multiples or {},
            derived or {},
            cases,
            tolerance,
            flops,
            draw or {},
        )
        REGISTRY[declared.name] = declared
        return declared

    return declare


class Kernel(Declaration):
    """A declared kernel. Calling it launches it on the current machine (see `__call__`)."""

    def bind(self, *arrays, dtype=None, **named) -> Bound:
        """Check a call against the declaration and solve for its sizes. Nothing is launched.

        Positional arguments are the inputs in order. Named arguments are inputs (None omits an optional one), scalars,
        axes that no array fixes, and outputs (an array to write to, True to allocate, None or False to omit an optional
        one). `dtype` chooses the format if only outputs have a choice. ArgumentError, with the declaration in words.
        """
        return bind(self, arrays, dtype, named)

    def reference(self, *arrays: Any, dtype: Any = None, **named: Any) -> dict[str, np.ndarray]:
        """Compute the outputs by name from NumPy inputs, by the body of the declaration.

        If the kernel has a tolerance, float outputs are float64, so that the reference adds no rounding of its own;
        else they are of the declared format. Arrays that are changed in place are copied and returned whole.
        """
        bound = self.bind(*arrays, dtype=dtype, **named)
        asked = {a: bound.outputs[a.name] is not None for a in self.outputs}
        outputs = {a.name: self._reference_buffer(bound, a) if asked[a] else None for a in self.outputs}
        inputs = {a.name: bound.inputs[a.name] for a in self.written if a.is_given}
        changed = {name: np.array(array) for name, array in inputs.items() if array is not None}
        axes = {axis: bound.axes[axis] for axis in self.body_axes}
        self.function(**bound.inputs | outputs | changed, **bound.scalars, **axes)
        results = outputs | changed
        return {a.name: results[a.name] for a in self.written if results.get(a.name) is not None}

    def _reference_buffer(self, bound: Bound, a: Argument) -> np.ndarray:
        member = bound.format_of(a)
        precise = member.kind == "float" and self.tolerance(a.name) is not EXACT
        return np.empty(bound.shape_of(a), np.float64 if precise else member.dtype)

    def __call__(self, *arrays: Any, dtype: Any = None, stream: Any = None, **named: Any) -> Any:
        """Launch on the current machine; arguments as for `bind`, results in the order of the declaration.

        A single output is returned by itself, several as a tuple without omitted ones. NumPy inputs give NumPy results.
        If any array is a device array, results stay on the device and the call does not wait. Arrays that are changed
        in place are among the results.
        """
        if dtype is not None:
            named["dtype"] = dtype
        if stream is not None:
            named["stream"] = stream
        return self._remembered(*arrays, **named)

    def _launch(self, *arrays, stream=None, **named):
        results = tuple(run(self, arrays, named, stream).values())
        return results[0] if len(results) == 1 else results

    @cached_property
    def _remembered(self) -> Callable:
        return remembered(self._launch, self.scalar_names)
