"""Measured MMA rates of the current card, with which products and attention are compared."""

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

# Steps of a probe: a few tenths of a millisecond on every card, longer than the launch of its blocks.
RATE_STEPS = 4096


@dataclass(frozen=True)
class Rate:
    """A call of an MMA rate probe that fills the card, and its flops."""

    name: str
    call: Callable[[], Any]
    flops: int

    @classmethod
    def of(cls, kernel: Kernel, backend: Backend) -> "Rate":
        """Make it with random operands: on constants a card needs less power and computes faster."""
        a, b = (to_device(_operand(kernel, name), device=backend.ordinal) for name in ("a", "b"))
        # Two blocks for each multiprocessor, as the kernel is compiled for.
        call = prepare(kernel, a, b, blocks=2 * backend.attribute("MULTIPROCESSOR_COUNT"), steps=RATE_STEPS)
        return cls(kernel.name, lambda: call(a, b), sum(launch.flops for launch in call.launches))


def _operand(kernel: Kernel, name: str) -> np.ndarray:
    """Return normal values if the probe takes numbers, else examples of the probe: not every byte is a valid code."""
    argument = kernel.by_name[name]
    if argument.formats[0].kind == "float":
        return random_array(np.random.default_rng(0), argument.formats[0], argument.shape.sizes({}))
    return kernel.example(kernel.cases[0])[name]
