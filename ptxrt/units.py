"""The compiled modules on disk: which files a unit has, and whether they are as new as their sources."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path

from .errors import BuildError, remedy

MODULES = Path(__file__).parent / "modules"
CHECKOUT = Path(__file__).parent.parent


def text_path(unit: str, portable: bool) -> Path:
    """The PTX text of a unit: of compute_120f, or of compute_90 for the portable build."""
    return MODULES / f"{unit}{'.portable' if portable else ''}.ptx"


def fatbin_path(unit: str, portable: bool) -> Path:
    """The binary of a unit: sm_120a and sm_121a, or sm_90, sm_80 and PTX of compute_80 for the portable build."""
    return MODULES / f"{unit}{'.portable' if portable else ''}.fatbin"


def read(path: Path) -> bytes:
    """A file of a unit, once the unit is known to be fresh; BuildError where it is missing or stale."""
    check_fresh(path.name.split(".")[0])
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise BuildError(f"{path.name} is missing from {path.parent}; {remedy()}") from None


def record(unit: str) -> dict:
    """What the build wrote down about a unit: variant, sources and their hashes, flags, registers, bytes."""
    path = MODULES / f"{unit}.json"
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise BuildError(f"the module {unit} is not built: {path} is missing; {remedy()}") from None
    except ValueError as error:
        raise BuildError(f"{path} is damaged ({error}); {remedy()}") from error


@lru_cache(maxsize=None)
def check_fresh(unit: str) -> None:
    """Raise BuildError where a checkout's sources differ from those that the unit was compiled from.

    An installed package has no sources beside it, and nothing to compare. Asked once per unit and process.
    """
    sources = record(unit)["sources"]
    if not (CHECKOUT / "kernels_cu").is_dir():
        return
    for name, digest in sources.items():
        if _digest(CHECKOUT / name) != digest:
            raise BuildError(f"the module {unit} is older than {name}; run `make` (or `python build.py --only ...`)")


def _digest(path: Path) -> str | None:
    """SHA-256 of a source, or None where it is gone."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError:
        return None
