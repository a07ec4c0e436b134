"""Names that commands take: kernels, their variants and units, functions; and how a shell completes them."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterable
from typing import Any

import click


def complete_names(ctx, param, incomplete: str) -> list[str]:
    """Return the names of functions, classes and kernels with this beginning, for the shell."""
    from .. import kernels

    known = dict.fromkeys([*public_functions(), *public_classes(), *kernels()])
    return [name for name in known if name.startswith(incomplete)]


def complete_kernels(ctx, param, incomplete: str) -> list[str]:
    """Return the names of kernels with this beginning, for the shell."""
    from .. import kernels

    return [name for name in kernels() if name.startswith(incomplete)]


def complete_formats(ctx, param, incomplete: str) -> list[str]:
    """Return the names of block formats with this beginning, for the shell."""
    from ..blocks import BLOCK_FORMATS

    return [name for name in BLOCK_FORMATS if name.startswith(incomplete)]


def complete_operand_formats(ctx, param, incomplete: str) -> list[str]:
    """Return the names of the formats of attention and of products with this beginning, for the shell."""
    from typing import get_args

    from ..typing import AttentionFormatName

    return [name for name in get_args(AttentionFormatName) if name.startswith(incomplete)]


def find_kernel(name: str, functions: Iterable[str] = ()):
    """Return the declared kernel, or raise a usage error that names the nearest kernels and the nearest of
    `functions`."""
    from .. import kernels

    known = kernels()
    if name not in known:
        near = difflib.get_close_matches(name, [*functions, *known], 3, 0.4)
        raise click.UsageError(
            f"no kernel is called {name}; {'near: ' + ', '.join(near) if near else 'see `ptxrt list`'}"
        )
    return known[name]


def find_units(word: str, functions: Iterable[str] = ()) -> tuple[Any, list]:
    """Return the kernel and the units that NAME, NAME[axis=value,...] or a unit's own name selects; a usage error if
    there are none.
    """
    from .. import kernels

    for kernel in kernels().values():
        units = [unit for unit in kernel.units if unit.name == word]
        if units and word != kernel.name:
            return kernel, units
    match = re.fullmatch(r"(\w+)(?:\[([\w=, ]+)\])?", word)
    if not match:
        raise click.UsageError(f"{word}: expected NAME or NAME[axis=value]")
    kernel = find_kernel(match[1], functions)
    sizes = dict(part.strip().partition("=")[::2] for part in match[2].split(",")) if match[2] else {}
    units = [
        unit for unit in kernel.units if all(str(unit.variant.get(axis)) == value for axis, value in sizes.items())
    ]
    if not units:
        names = ", ".join(unit.name for unit in kernel.units)
        raise click.UsageError(f"{word}: {kernel.name} is not compiled for that; its units are {names}")
    return kernel, units


def public_functions() -> dict[str, Any]:
    """The functions of the package by name, in the order of its interface."""
    import ptxrt

    named = {name: getattr(ptxrt, name) for name in ptxrt.__all__}
    # Classes that are used like functions, such as `using`, have lower-case names, too.
    return {name: value for name, value in named.items() if callable(value) and name.islower()}


def public_modules() -> dict[str, Any]:
    """The modules of the package's interface by name."""
    import ptxrt

    return {name: item for name in ptxrt.__all__ if inspect.ismodule(item := getattr(ptxrt, name))}


def public_classes() -> dict[str, type]:
    """The classes of the package by name, in the order of its interface, errors last."""
    import ptxrt

    named = {name: getattr(ptxrt, name) for name in ptxrt.__all__ if not name.islower()}
    return {name: value for name, value in named.items() if isinstance(value, type)}


def manual_of(function) -> str:
    """Return the docstring of a function, or a note if Python leaves docstrings out."""
    from ..declaration import manual_of

    return manual_of(function)


def summary_of(manual: str) -> str:
    """The first sentence of a docstring."""
    from ..declaration import summary_of

    return summary_of(manual)
