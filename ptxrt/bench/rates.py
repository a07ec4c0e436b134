"""The rates of matrix instructions on the card at hand, which products and attention stand beside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..array import to_device
from ..backend import Backend
from ..declaration import random_array
from ..kernel import Kernel
from ..prepared import prepare

# Some tenths of a millisecond on every card, and more than the launch of its blocks takes.
RATE_STEPS = 4096


@dataclass(frozen=True)
class Rate:
    """A probe of an MMA's rate that fills the card, and its flops."""

    name: str
    call: Callable[[], Any]
    flops: int

    @classmethod
    def of(cls, kernel: Kernel, backend: Backend) -> "Rate":
        """With random operands: a card computes faster on constants, for it needs less power."""
        a, b = (to_device(_operand(kernel, name), device=backend.ordinal) for name in ("a", "b"))
        # Two blocks to a multiprocessor, as the kernel is compiled for.
        call = prepare(kernel, a, b, blocks=2 * backend.attribute("MULTIPROCESSOR_COUNT"), steps=RATE_STEPS)
        return cls(kernel.name, lambda: call(a, b), sum(launch.flops for launch in call.launches))


def _operand(kernel: Kernel, name: str) -> np.ndarray:
    """Normal values where the probe takes numbers, else what it draws: bytes need not all be codes."""
    argument = kernel.by_name[name]
    if argument.formats[0].kind == "float":
        return random_array(np.random.default_rng(0), argument.formats[0], argument.shape.sizes({}))
    return kernel.example(kernel.cases[0])[name]
