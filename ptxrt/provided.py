"""Modules of higher layers by name, loaded at first use.

A module may import only modules of lower layers (CONTRIBUTING.md). A few methods, such as `DeviceArray.copy`, need a
module of a higher layer. The package registers its loader here, and the method looks it up by name.
"""

from collections.abc import Callable
from typing import Any

_LOADERS: dict[str, Callable[[], Any]] = {}
_LOADED: dict[str, Any] = {}


def provide(name: str, load: Callable[[], Any]) -> None:
    """Register the loader for `provided(name)`."""
    _LOADERS[name] = load


def provided(name: str) -> Any:
    """Return what the loader of this name returned at its first use."""
    try:
        return _LOADED[name]
    except KeyError:
        return _LOADED.setdefault(name, _LOADERS[name]())
