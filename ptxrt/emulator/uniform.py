"""Evaluate uniform instructions: those whose results all threads share, once per launch.

`evaluator` makes a function of an instruction, which adds its results to the values of a launch: register name -> its
bits as an unsigned array (1,), bool for predicates. What does not depend on the launch is done when it is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ..ptx.ir import Negated, Register, Special
from .calls import canonical
from .decode import UNSIGNED, Decoded, register_bytes
from .instruction import DTYPES

if TYPE_CHECKING:
    from .machine import Launch
    from .translate import Translator

Values: TypeAlias = dict[str, np.ndarray]
_Source: TypeAlias = "Callable[[Values, Launch], object]"


def evaluator(translator: Translator, item: Decoded) -> Callable[[Values, Launch], None]:
    """The function of a uniform instruction: f(values, launch) reads and extends the values of the launch."""
    semantics = item.semantics
    if semantics is None:
        return _mover(translator, item)
    if constant := semantics.option("constant"):
        address = item.sources[0]
        name, offset = address.base.name, address.offset + address.base.offset
        compute = lambda values, launch: constant(launch, name, offset)
    else:
        function, sources = semantics.bound(translator.arithmetic), _sources(translator, item)
        compute = lambda values, launch: function(*[source(values, launch) for source in sources])
        if len(item.destinations) == 1:
            one = compute
            compute = lambda values, launch: (one(values, launch),)
    loose = semantics.option("loose_nan")
    targets = list(zip(item.destinations, semantics.result_types))

    def evaluate(values: Values, launch: Launch) -> None:
        for (register, type), result in zip(targets, compute(values, launch)):
            if isinstance(register, Register):
                result = np.asarray(result)
                if result.shape != (1,):
                    result = np.broadcast_to(result, (1,))
                if loose:
                    result = canonical(result.view(DTYPES[type]), type)
                values[register.name] = _widened(result, type, register.type)

    return evaluate


def _sources(translator: Translator, item: Decoded) -> list[_Source]:
    """A function for each argument of the instruction's own function."""
    found: list[_Source] = []
    for operand, source in zip(item.semantics.sources, item.sources):
        if source is None or operand.is_immediate:
            found.append(_always(None if source is None else source.value))
        elif operand.count:
            parts = [_fetch(translator, item, element, operand.kind) for element in source.elements]
            found.append(lambda values, launch, parts=parts: tuple([part(values, launch) for part in parts]))
        else:
            found.append(_fetch(translator, item, source, operand.kind))
    return found


def _always(value) -> _Source:
    return lambda values, launch: value


def _fetch(translator: Translator, item: Decoded, operand, kind: str) -> _Source:
    """A function that returns an operand as an array (1,) of a kind."""
    dtype = np.dtype(kind)
    unsigned = dtype if kind == "b1" else np.dtype(f"u{dtype.itemsize}")
    if isinstance(operand, Negated):
        name = operand.register.name
        return lambda values, launch: ~values[name]
    if isinstance(operand, Register):
        name = operand.name
        if kind != "b1" and dtype.itemsize < register_bytes(operand.type):
            return lambda values, launch: values[name].astype(unsigned).view(dtype)
        return lambda values, launch: values[name].view(dtype)
    if isinstance(operand, Special):
        name = operand.name
        return lambda values, launch: np.array([launch.special(name)]).astype(unsigned).view(dtype)
    value = translator.constant_value(operand, kind, item.instruction)
    if kind != "b1":
        value &= (1 << 8 * dtype.itemsize) - 1
    constant = np.array([value], unsigned).view(dtype)
    constant.setflags(write=False)
    return _always(constant)


def _mover(translator: Translator, item: Decoded) -> Callable[[Values, Launch], None]:
    """The function of a mov: plain copies, packing and unpacking."""
    size = register_bytes(item.instruction.opcode.split(".")[1])
    targets, sources = item.destinations, item.sources
    parts = max(len(targets), len(sources))
    part = size // parts
    shifts = [np.array(8 * part * position, f"u{size}") for position in range(parts)] if parts > 1 else []
    split = len(targets) != len(sources) and len(sources) == 1
    kind = UNSIGNED[size if split else part]
    fetched = [_fetch(translator, item, source, kind) for source in sources]

    def moved(values: Values, launch: Launch) -> list:
        pieces = [source(values, launch) for source in fetched]
        if len(targets) == len(sources):
            return pieces
        if split:
            return [(pieces[0] >> shift).astype(f"u{part}") for shift in shifts]
        return [sum(piece.astype(f"u{size}") << shift for piece, shift in zip(pieces, shifts))]

    def evaluate(values: Values, launch: Launch) -> None:
        for register, value in zip(targets, moved(values, launch)):
            if isinstance(register, Register):
                values[register.name] = value

    return evaluate


def _widened(result: np.ndarray, type: str, register: str) -> np.ndarray:
    """A result of `type` as the raw bits of a register."""
    if register == "pred":
        return result.astype(bool)
    width = register_bytes(register)
    if result.dtype.itemsize == width:
        return result.view(f"u{width}")
    if result.dtype.kind == "f":
        result = result.view(f"u{result.dtype.itemsize}")
    return result.astype(f"{result.dtype.kind}{width}").view(f"u{width}")
