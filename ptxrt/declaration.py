"""Declarations of kernels: annotations, arguments, compilations, cases. They do not depend on a machine.

    @kernel(grid="rows cols", cases=[dict(rows=4, cols=64)])
    def transpose_tiled(x: In[f32, "rows cols"], y: Out[f32, "cols rows"]):
        '''Transpose `x`.'''
        y[:] = x.T

The function's name is the name of the `.cu` file, its annotations are the ABI, its body is the reference.
`ptxrt.kernel` makes it callable.
"""

from __future__ import annotations

import inspect
import itertools
import operator
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from .accuracy import EXACT, Comparison, Tolerance, compare
from .dims import Dim, Shape, parse_shape
from .formats import Format, Union


@dataclass(frozen=True)
class Placement:
    """How the elements of an argument may lie in memory; the third item of an annotation.

    strides: the axes whose strides the kernel gets, in elements: "none" (row-major order), "rows" (all but the last,
    which has no gaps) or "all"; a stride of 0 repeats elements. aligned: whether the kernel moves 16 bytes at a time,
    so that the array, and each row of "rows", must begin at a multiple of 16 bytes. in_parts: whether a launch touches
    only parts of the array, so that its size does not determine the bytes moved.
    """

    strides: str
    aligned: bool
    words: str
    in_parts: bool = False

    def __str__(self) -> str:
        return self.words


row_major = Placement("none", True, "")
unaligned = Placement("none", False, "starting at any element")
strided = Placement("rows", True, "rows of any strides")
loose = Placement("rows", False, "rows of any strides, starting at any element")
scattered = Placement("all", False, "elements at any strides")


def in_parts(placement: Placement) -> Placement:
    """Return the placement of an array of which a launch touches parts, chosen by the contents of other arrays."""
    return replace(placement, words=", ".join(filter(None, (placement.words, "in parts"))), in_parts=True)


@dataclass(frozen=True)
class _Spec:
    """One annotation: In, Out or InOut[formats, shape, placement], or Scalar[format, choices...]."""

    direction: str
    formats: tuple[Format, ...]
    shape: Shape
    choices: tuple[Any, ...] = ()
    placement: Placement = row_major
    below: str = ""


def _formats(item: Format | Union) -> tuple[Format, ...]:
    return item.members if isinstance(item, Union) else (item,)


def _array_spec(
    direction: str, formats: Format | Union, shape: str, placement: Placement = row_major, below: str = ""
) -> _Spec:
    return _Spec(direction, _formats(formats), parse_shape(shape), (), placement, below)


class In:
    """`In[f32 | f16, "rows cols"]`: an array that the kernel reads; `= None` makes it optional.

    A third item says how its elements may lie: `strided`, `loose`, `scattered` or `unaligned`. The default is row-major
    order. A fourth is the axis that the numbers are indices of: in host arrays, numbers from its size on are refused.
    """

    def __class_getitem__(cls, item) -> _Spec:
        return _array_spec("in", *item)


class Out:
    """`Out[f32, "rows cols"]`: an array that the kernel writes whole; `= None` makes it optional. A third item as for
    In.
    """

    def __class_getitem__(cls, item) -> _Spec:
        return _array_spec("out", *item)


class InOut:
    """`InOut[u8, "pages page bytes"]`: an array that the kernel changes in place, in parts.

    The caller passes it like an input. It is never allocated, and the kernel may leave parts of it unwritten. It is
    ordered and checked for overlap like an output, and the whole array is among the results. A third item as for In.
    """

    def __class_getitem__(cls, item) -> _Spec:
        spec = _array_spec("inout", *item)
        return replace(spec, placement=in_parts(spec.placement))


class Scalar:
    """`Scalar[f32]` or `Scalar[i32, 0, 1]`: a number passed by value, any number or one of the listed ones.

    A default in the signature is its default.
    """

    def __class_getitem__(cls, item) -> _Spec:
        member, *choices = item if isinstance(item, tuple) else (item,)
        return _Spec("scalar", _formats(member), parse_shape(""), tuple(choices))


class Axis:
    """`dim: Axis`: the body receives the size of that axis. It is no argument of the kernel."""


@dataclass(frozen=True)
class Argument:
    """One declared argument: its name, direction ("in", "out", "inout", "scalar"), formats and shape.

    `optional`: an array that is omitted is passed as address 0. `choices` are the numbers that a scalar may be, if
    not all. `placement`: where the elements of an array may lie. `below`: the axis whose size the numbers of an array
    are below, or "".
    """

    name: str
    direction: str
    formats: tuple[Format, ...]
    shape: Shape
    optional: bool = False
    default: Any = None
    choices: tuple[Any, ...] = ()
    placement: Placement = row_major
    below: str = ""

    @property
    def strides(self) -> tuple[Dim, ...]:
        """The dimensions whose strides the kernel receives."""
        return self.shape.dims[
            : {"none": 0, "rows": len(self.shape) - 1, "all": len(self.shape)}[self.placement.strides]
        ]

    @property
    def is_given(self) -> bool:
        """Whether the caller passes the array: In and InOut."""
        return self.direction in ("in", "inout")

    @property
    def is_written(self) -> bool:
        """Whether the kernel writes the array: Out and InOut."""
        return self.direction in ("out", "inout")

    @property
    def is_union(self) -> bool:
        """Whether the call chooses among several formats."""
        return len(self.formats) > 1

    def __str__(self) -> str:
        formats = "|".join(f.name for f in self.formats)
        if self.direction == "scalar":
            return formats + (f" of {', '.join(map(str, self.choices))}" if self.choices else "")
        return f"{formats} {self.shape}" + (f", {self.placement}" if self.placement.words else "")


@dataclass(frozen=True)
class Parameter:
    """One parameter of the compiled entry: kind is "array", "scalar", "axis" or "stride" (of which dimension)."""

    kind: str
    name: str
    format: Format | None = None
    dim: int = 0

    def __str__(self) -> str:
        words = {"array": "address of ", "axis": "axis ", "stride": f"stride {self.dim} of "}
        return words.get(self.kind, f"{self.format} ") + self.name


@dataclass(frozen=True)
class Unit:
    """One compilation of a kernel: its file name without suffix and the variant it holds."""

    name: str
    kernel: str
    variant: Mapping[str, int] = field(hash=False)


@dataclass(frozen=True)
class Case:
    """One declared test size: axes, scalars, optional arrays that take part, and the format of the unions."""

    axes: Mapping[str, int] = field(hash=False)
    scalars: Mapping[str, Any] = field(hash=False)
    optional: tuple[str, ...]
    format: Format | None

    @property
    def id(self) -> str:
        """A short name for test ids and reports."""
        parts = [f"{name}{value:g}" for name, value in {**self.axes, **self.scalars}.items()]
        return "-".join(parts + list(self.optional) + ([self.format.name] if self.format else []))


def manual_of(function) -> str:
    """Return the docstring of a function; "" if it has none, a note if Python leaves docstrings out (-OO)."""
    return inspect.getdoc(function) or (
        "" if sys.flags.optimize < 2 else f"No manual: Python -OO leaves docstrings out of {function.__name__}."
    )


def summary_of(manual: str) -> str:
    """The first sentence of a docstring, in one line."""
    return re.split(r"(?<=\.)\s", " ".join(manual.split("\n\n", 1)[0].split()), maxsplit=1)[0]


class Declaration:
    """The declaration of a kernel: its arguments, axes, compilations, cases and tolerances. It runs nothing."""

    def __init__(
        self,
        function,
        grid,
        variants,
        filled,
        halved,
        packed,
        fixed,
        multiples,
        derived,
        cases,
        tolerance,
        flops,
        draw,
    ):
        self.function = function
        self.name = self.__name__ = function.__name__
        self.__doc__ = manual_of(function)
        self.__module__ = function.__module__
        parameters = inspect.signature(function).parameters.values()
        self.arguments = tuple(_argument(p) for p in parameters if p.annotation is not Axis)
        self.body_axes = tuple(p.name for p in parameters if p.annotation is Axis)
        self.by_name = {a.name: a for a in self.arguments}
        self.arrays = tuple(a for a in self.arguments if a.direction != "scalar")
        self.inputs = tuple(a for a in self.arguments if a.is_given)
        self.outputs = tuple(a for a in self.arguments if a.direction == "out")
        self.written = tuple(a for a in self.arguments if a.is_written)
        self.scalars = tuple(a for a in self.arguments if a.direction == "scalar")
        self.scalar_names = frozenset(a.name for a in self.scalars)
        self.derived = dict(derived)
        self.axes = tuple(dict.fromkeys([*(axis for a in self.arrays for axis in a.shape.axes), *self.derived]))
        self.grid: tuple[Dim, ...] = parse_shape(grid).dims
        self.variants = {axes: tuple(values) for axes, values in variants.items()}
        self.filled = filled
        self.halved = halved
        self.packed = packed
        self.fixed = dict(fixed)
        self.multiples = dict(multiples)
        self.unions = next((a.formats for a in self.arguments if a.is_union), ())
        self._tolerance = tolerance
        self._flops = flops
        self._draw = dict(draw)
        self._check_declaration()
        self.cases = tuple(itertools.chain.from_iterable(map(self._expand_case, cases)))

    def _check_declaration(self) -> None:
        """Raise ValueError if the declaration contradicts itself."""
        unknown = [axis for dim in self.grid for axis in dim.axes if axis not in self.axes]
        named = (*" ".join(self.variants).split(), *self.fixed, *self.multiples)
        unknown += [axis for axis in named if axis not in self.axes]
        if unknown or not 1 <= len(self.grid) <= 3:
            raise ValueError(
                f"{self.name}: grid, variants, fixed and multiples name one to three words over {self.axes}; "
                f"{unknown} are none"
            )
        if not self.__doc__:
            raise ValueError(f"{self.name} has no docstring")
        for a in self.arguments:
            if a.is_union and a.formats != self.unions:
                raise ValueError(f"{self.name}: {a.name} chooses among {a}; all choices of one kernel are alike")

    def _expand_case(self, case: Mapping[str, Any]):
        """One Case for every format of the unions (or the one that the case names)."""
        axes = {axis: case[axis] for axis in self.axes if axis in case}
        scalars = {a.name: case[a.name] for a in self.scalars if a.name in case}
        optional = tuple(a.name for a in self.arrays if a.optional and case.get(a.name))
        unknown = set(case) - set(self.axes) - set(self.by_name) - {"format"}
        if unknown:
            raise ValueError(f"{self.name}: a case names {sorted(unknown)}, which is no axis and no argument")
        named = case.get("format")
        for member in self.unions or (None,):
            if named is None or member.name == named:
                yield Case(axes, scalars, optional, member)

    def __repr__(self) -> str:
        return f"<kernel {self.declaration}>"

    @property
    def declaration(self) -> str:
        """The declaration in one line: `name(x: In f32 [rows, cols], y: Out f32 [cols, rows])`."""
        words = {"in": "In ", "out": "Out ", "inout": "InOut ", "scalar": ""}
        parts = (f"{a.name}: {words[a.direction]}{a}{' or None' if a.optional else ''}" for a in self.arguments)
        return f"{self.name}({', '.join(parts)})"

    @property
    def summary(self) -> str:
        """The first sentence of the docstring."""
        return summary_of(self.__doc__)

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """The parameters of the compiled entry: arguments in order, axes in order of first appearance, strides."""
        return (
            *(
                Parameter(*(("scalar", a.name, a.formats[0]) if a.direction == "scalar" else ("array", a.name)))
                for a in self.arguments
            ),
            *(Parameter("axis", axis) for axis in dict.fromkeys(axis for a in self.arrays for axis in a.shape.axes)),
            *(Parameter("stride", a.name, None, i) for a in self.arrays for i in range(len(a.strides))),
        )

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """Every compilation of this kernel, in the order of the variants."""
        choices = [
            [tuple(zip(words.split(), values if isinstance(values, tuple) else (values,))) for values in sizes]
            for words, sizes in self.variants.items()
        ]
        variants = [dict(itertools.chain.from_iterable(choice)) for choice in itertools.product(*choices)]
        return tuple(Unit(self._name_of(v), self.name, v) for v in variants)

    def _name_of(self, variant: Mapping[str, int]) -> str:
        """NAME, then _axisvalue for each axis that is compiled in."""
        return self.name + "".join(f"_{axis}{size}" for axis, size in variant.items())

    def entries(self, unit: Unit) -> tuple[str, ...]:
        """The entries that a unit must hold: one for each format of the unions. It may also hold entries of half
        blocks.
        """
        return tuple(self.entry_name(unit.variant, member) for member in self.unions or (None,))

    def unit_for(self, axes: Mapping[str, int]) -> Unit | None:
        """Return the unit that is compiled for these sizes, or, if the kernel is `filled`, the smallest that holds
        them; else None.
        """
        fits = operator.ge if self.filled else operator.eq
        fitting = [unit for unit in self.units if all(fits(size, axes[axis]) for axis, size in unit.variant.items())]
        return min(fitting, key=lambda unit: prod(unit.variant.values()), default=None)

    def unit_name(self, axes: Mapping[str, int]) -> str:
        """The name of the unit for these sizes. There must be one."""
        return self.unit_for(axes).name

    def entry_name(self, axes: Mapping[str, int], member: Format | None) -> str:
        """The unit's name, then _format if the declaration chooses among formats."""
        return self.unit_name(axes) + (f"_{member}" if member else "")

    def tolerance(self, output: str) -> Tolerance:
        """The tolerance of the named output against the reference."""
        declared = self._tolerance
        if isinstance(declared, Mapping):
            declared = declared.get(output)
        return declared or EXACT

    def check(self, got: Mapping[str, Any], want: Mapping[str, Any]) -> dict[str, tuple[Comparison, list[str]]]:
        """Compare results by name with `reference`'s: by output, the figures and the tolerances that are missed."""
        result = {}
        for name, value in want.items():
            comparison = compare(got[name], value)
            result[name] = comparison, self.tolerance(name).misses(comparison)
        return result

    def count_flops(self, axes: Mapping[str, int], scalars: Mapping[str, Any]) -> int | None:
        """Floating-point operations of one call; None if none are declared."""
        if self._flops is None:
            return None
        return self._flops(**axes, **scalars) if callable(self._flops) else Dim.parse(self._flops).size(axes)

    def example(self, case: Case, seed: int = 0) -> dict[str, Any]:
        """Return keyword arguments of a call at the sizes of `case`, with random inputs, for `__call__` and
        `reference`.
        """
        rng = np.random.default_rng(seed)
        axes = {**self.fixed, **case.axes}
        example: dict[str, Any] = {}
        inputs = [a for a in self.inputs if not a.optional or a.name in case.optional]
        for a in inputs:
            draw = self._draw.get(a.name, random_array)
            example[a.name] = draw(rng, case.format if a.is_union else a.formats[0], a.shape.sizes(axes), axes)
        bound_by_inputs = {axis for a in inputs for dim in a.shape.dims if len(dim.axes) == 1 for axis in dim.axes}
        example.update({axis: size for axis, size in axes.items() if axis not in bound_by_inputs})
        example.update(case.scalars)
        example.update({a.name: True for a in self.outputs if a.name in case.optional})
        if case.format and not any(a.is_union for a in self.inputs):
            example["dtype"] = case.format.dtype
        return example


def half_of(entry: str) -> str:
    """Return the name of the entry with half blocks that belongs to an entry."""
    return entry + "_half"


def _argument(parameter: inspect.Parameter) -> Argument:
    spec = parameter.annotation
    if not isinstance(spec, _Spec):
        raise ValueError(f"{parameter.name} is annotated {spec!r}; use In[...], Out[...], InOut[...] or Scalar[...]")
    has_default = parameter.default is not inspect.Parameter.empty
    optional = spec.direction != "scalar" and has_default
    if optional and parameter.default is not None:
        raise ValueError(
            f"{parameter.name} has the default {parameter.default!r}; an array that may be omitted has None"
        )
    return Argument(
        parameter.name,
        spec.direction,
        spec.formats,
        spec.shape,
        optional,
        parameter.default if has_default and spec.direction == "scalar" else None,
        spec.choices,
        spec.placement,
        spec.below,
    )


def random_array(
    rng: np.random.Generator, member: Format, shape: Sequence[int], axes: Mapping[str, int] | None = None
) -> np.ndarray:
    """Return random contents for one format: normal floats, any bytes for codes, scales around 1."""
    if member.name == "ue8m0":
        return rng.integers(119, 136, shape, dtype=np.uint8)
    if member.kind == "float":
        return rng.standard_normal(shape, dtype=np.float32).astype(member.dtype)
    limits = np.iinfo(member.dtype)
    return rng.integers(limits.min, limits.max, shape, dtype=member.dtype, endpoint=True)
