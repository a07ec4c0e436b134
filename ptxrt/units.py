"""The compiled modules on disk: which files a unit has, and whether they are as they were built, from the present sources."""

from __future__ import annotations

import hashlib
import json
import os
from functools import lru_cache
from pathlib import Path

from .errors import BuildError, remedy

MODULES = Path(__file__).parent / "modules"
CHECKOUT = Path(__file__).parent.parent

# What a record holds, and of which type.
_PARTS = {"variant": dict, "sources": dict, "entries": dict, "sha256": dict, "texts": dict}


def text_path(unit: str, portable: bool) -> Path:
    """The PTX text of a unit: of compute_120f, or of compute_90 for the portable build."""
    return MODULES / f"{unit}{'.portable' if portable else ''}.ptx"


def fatbin_path(unit: str, portable: bool) -> Path:
    """The binary of a unit: sm_120a and sm_121a, or sm_90, sm_80 and PTX of compute_80 for the portable build."""
    return MODULES / f"{unit}{'.portable' if portable else ''}.fatbin"


def text(unit: str, portable: bool) -> str:
    """The PTX text of a unit; BuildError where it is missing, stale, or not what was built."""
    path = text_path(unit, portable)
    try:
        return read(path).decode()
    except UnicodeDecodeError as error:
        raise BuildError(f"{path} is damaged: it is no UTF-8 text ({error}); {remedy()}") from error


def binary(unit: str, portable: bool) -> bytes:
    """The fatbin of a unit; BuildError where it is missing, stale, or not what was built."""
    return read(fatbin_path(unit, portable))


def read(path: Path) -> bytes:
    """A file of a unit that is fresh; BuildError where it is missing, stale, or its digest is not that of the record.

    `PTXRT_VERIFY=0` in the environment leaves the digest out.
    """
    unit = path.name.split(".")[0]
    check_fresh(unit)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise BuildError(f"{path.name} is missing from {path.parent}; {remedy()}") from None
    if os.environ.get("PTXRT_VERIFY") != "0" and hashlib.sha256(data).hexdigest() != record(unit)["sha256"].get(path.name):
        raise BuildError(f"{path} is not the file that was built: its digest differs from the record's; {remedy()}")
    return data


def record(unit: str) -> dict:
    """What the build wrote down about a unit: variant, sources and files with their digests, registers, launch constants."""
    path = MODULES / f"{unit}.json"
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise BuildError(f"the module {unit} is not built: {path} is missing; {remedy()}") from None
    except (ValueError, RecursionError) as error:
        raise BuildError(f"{path} is damaged ({error}); {remedy()}") from error
    if not isinstance(found, dict):
        raise BuildError(f"{path} is damaged: it holds {'null' if found is None else f'a {type(found).__name__}'}, no record; {remedy()}")
    lacking = [part for part, kind in _PARTS.items() if not isinstance(found.get(part), kind)]
    if lacking:
        raise BuildError(f"{path} is damaged: it lacks {', '.join(lacking)}; {remedy()}")
    return found


def launches(unit: str, compute: str) -> dict[str, dict]:
    """How the entries of a unit launch in the text for `compute`: {entry: {"parameters": words, "launch": nine ints}}."""
    path = MODULES / f"{unit}.json"
    found = record(unit)["texts"].get(compute)
    if found is None:
        raise BuildError(f"the module {unit} was not compiled for {compute}; {remedy()}")
    fine = isinstance(found, dict) and all(
        isinstance(launch, dict) and isinstance(launch.get("parameters"), str) and isinstance(launch.get("launch"), list)
        for launch in found.values()
    )
    if not fine:
        raise BuildError(f"{path} is damaged: what it says of {compute} is no table of entries; {remedy()}")
    return found


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
