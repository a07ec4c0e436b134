"""What a module needs of modules above it: the package says where it is, and it is loaded at first use.

A module may import only what stands below it (CONTRIBUTING.md). A few methods, as `DeviceArray.copy`, are built on what
stands above: they ask here for it by name.
"""

from collections.abc import Callable
from typing import Any

_LOADERS: dict[str, Callable[[], Any]] = {}


def provide(name: str, load: Callable[[], Any]) -> None:
    """Say how to load what `provided(name)` gives."""
    _LOADERS[name] = load


def provided(name: str) -> Any:
    """What was provided by this name."""
    return _LOADERS[name]()
