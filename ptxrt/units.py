"""The compiled modules on disk: the files of a unit, and checks that they are unchanged and made of present sources."""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from .errors import BuildError, remedy

MODULES = Path(__file__).parent / "modules"
CHECKOUT = Path(__file__).parent.parent

# The compute capabilities whose GPUs run code of sm_80. On all others but 9.0 the driver compiles a text; 8.7 is among
# them, because GPUs of Tegra run no code of other GPUs.
OF_SM_80 = ((8, 0), (8, 6), (8, 9))

# The fields of a record and their types.
_PARTS = {"variant": dict, "sources": dict, "entries": dict, "sha256": dict, "texts": dict}


def text_path(unit: str, portable: bool) -> Path:
    """The path of a unit's PTX text: of compute_120f, or of compute_90 for the portable build."""
    return MODULES / f"{unit}{'.portable' if portable else ''}.ptx"


def fatbin_path(unit: str, portable: bool) -> Path:
    """The path of a unit's binary: sm_120a and sm_121a, or, portable, sm_90 and sm_80."""
    return MODULES / f"{unit}{'.portable' if portable else ''}.fatbin"


def text(unit: str, portable: bool) -> str:
    """Return the PTX text of a unit; BuildError if it is missing, stale, or not as built.

    An installed package has native texts in packs, one for each kernel, and no portable ones.
    """
    path = text_path(unit, portable)
    if portable and _index(MODULES) is not None:
        raise BuildError(
            f"the portable PTX text of {unit} is no part of the installed package, which holds the native one: "
            "use that (ptx='native'), or run from a checkout, where `make` builds both"
        )
    try:
        return _contents(path).decode()
    except UnicodeDecodeError as error:
        raise BuildError(f"{path} is damaged: it is no UTF-8 text ({error}); {remedy()}") from error


def binary(unit: str, portable: bool) -> bytes:
    """Return the fatbin of a unit; BuildError if it is missing, stale, or not as built.

    An installed package has each in a pack of its own.
    """
    return _contents(fatbin_path(unit, portable))


def image(unit: str, portable: bool, capability: tuple[int, int]) -> bytes:
    """Return what the driver of a device of a compute capability loads: the unit's fatbin, or a text that the driver
    compiles, where the portable fatbin has no machine code for the device; BuildError as by `binary`."""
    if compute_of(unit, portable, capability) != "compute_80" or capability in OF_SM_80:
        return binary(unit, portable)
    return _contents(MODULES / f"{unit}.compute_80.ptx") + b"\0"


def absolute(text: str) -> str:
    """Return a PTX text with the numbers of its registers and labels, from one that `relative` in build.py wrote."""
    latest: dict[str, int] = {}

    def number(match: re.Match) -> str:
        kind, sign, distance = match.groups()
        base = latest.get(kind, 0)
        if sign == "~":
            return f"{kind}{base - int(distance)}"
        latest[kind] = base + (int(distance) if sign else 1)
        return f"{kind}{latest[kind]}"

    return re.sub(r"(%[a-z]+|\$L__BB\d+_)(?:([@~])(-?\d+)|!)", number, text)


@contextmanager
def fatbin_file(unit: str, portable: bool) -> Iterator[Path]:
    """Provide a file that holds a fatbin, for programs that read one; in an installed package a temporary file."""
    data, path = binary(unit, portable), fatbin_path(unit, portable)
    if _index(MODULES) is None:
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, path.name)
        copy.write_bytes(data)
        yield copy


def _contents(path: Path) -> bytes:
    """Return the bytes of a file of a unit, from a checkout or from the packs of an installed package."""
    if _index(MODULES) is None:
        return read(path)
    unit, _, suffix = path.name.partition(".")
    record(unit)
    if path.suffix == ".ptx":
        return _verified(unit, path, _packed_text(unit, f".{suffix}"))
    return _verified(unit, path, _unpacked(Path(f"{path}.xz")))


def _packed_text(unit: str, suffix: str) -> bytes:
    """Return a text of an installed package."""
    found = record(unit)
    texts = _unpacked_texts(MODULES / f"{found['name']}{suffix}.xz")
    try:
        offset, length = map(int, found["slices"][suffix])
    except (KeyError, TypeError, ValueError) as error:
        raise BuildError(f"{MODULES / 'index.json'} is damaged ({error}); {remedy()}") from error
    return absolute(texts[offset : offset + length].decode("utf-8", "replace")).encode()


@lru_cache(maxsize=2)
def _unpacked_texts(path: Path) -> bytes:
    """Unpack the texts of a kernel, one after the other; the latest two packs are kept."""
    return _unpacked(path)


def _unpacked(path: Path) -> bytes:
    """Return the contents of a pack; BuildError if it is missing or damaged."""
    try:
        return lzma.decompress(path.read_bytes())
    except FileNotFoundError:
        raise BuildError(f"{path.name} is missing from {path.parent}; {remedy()}") from None
    except (lzma.LZMAError, EOFError) as error:
        raise BuildError(f"{path} is damaged ({error}); {remedy()}") from error


def read(path: Path) -> bytes:
    """Return a file of a fresh unit; BuildError if it is missing, stale, or its digest is not that of the record.

    `PTXRT_VERIFY=0` in the environment skips the digest.
    """
    unit = path.name.split(".")[0]
    check_fresh(unit)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise BuildError(f"{path.name} is missing from {path.parent}; {remedy()}") from None
    return _verified(unit, path, data)


def _verified(unit: str, path: Path, data: bytes) -> bytes:
    """Return the bytes of a file of a unit after a check of its digest."""
    if os.environ.get("PTXRT_VERIFY") != "0" and hashlib.sha256(data).hexdigest() != record(unit)["sha256"].get(
        path.name
    ):
        raise BuildError(f"{path} is not the file that was built: its digest differs from the record's; {remedy()}")
    return data


def record(unit: str) -> dict:
    """Return the record of the build: variant, sources and files with their digests, registers, launch facts."""
    index = _index(MODULES)
    path = MODULES / (f"{unit}.json" if index is None else "index.json")
    if index is None:
        try:
            found = _json(path)
        except FileNotFoundError:
            raise BuildError(f"the module {unit} is not built: {path} is missing; {remedy()}") from None
    elif unit in index:
        found = index[unit]
    else:
        raise BuildError(f"the module {unit} is not in {path}; {remedy()}")
    if not isinstance(found, dict):
        raise BuildError(
            f"{path} is damaged: it holds {'null' if found is None else f'a {type(found).__name__}'}, "
            f"no record; {remedy()}"
        )
    lacking = [part for part, kind in _PARTS.items() if not isinstance(found.get(part), kind)]
    if lacking:
        raise BuildError(f"{path} is damaged: it lacks {', '.join(lacking)}; {remedy()}")
    return found


@lru_cache(maxsize=4)
def _index(modules: Path) -> dict | None:
    """Return the records of an installed package by unit; None in a checkout, where each unit has its own file."""
    path = modules / "index.json"
    try:
        found = _json(path)
    except FileNotFoundError:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("units"), dict):
        raise BuildError(f"{path} is damaged: it is no index of units; {remedy()}")
    return found["units"]


def _json(path: Path) -> Any:
    """Return the contents of a JSON file."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise BuildError(f"{path} is damaged ({error}); {remedy()}") from error


def compute_of(unit: str, portable: bool, capability: tuple[int, int]) -> str:
    """Return the virtual architecture of the code that a device of a compute capability runs.

    Of the portable build, devices of 9.0 run the code of compute_90, all others that of compute_80. A quick build has
    compute_90 alone.
    """
    if not portable:
        return "compute_120f"
    return "compute_90" if capability == (9, 0) or "compute_80" not in record(unit)["texts"] else "compute_80"


def launches(unit: str, compute: str) -> dict[str, dict]:
    """Return the launch facts of a unit's entries for `compute`: {entry: {"parameters": words, "launch": nine
    ints}}."""
    path = MODULES / f"{unit}.json"
    found = record(unit)["texts"].get(compute)
    if found is None:
        raise BuildError(f"the module {unit} was not compiled for {compute}; {remedy()}")
    fine = isinstance(found, dict) and all(
        isinstance(launch, dict)
        and isinstance(launch.get("parameters"), str)
        and isinstance(launch.get("launch"), list)
        for launch in found.values()
    )
    if not fine:
        raise BuildError(f"{path} is damaged: its record of {compute} is not a table of entries; {remedy()}")
    return found


@cache
def check_fresh(unit: str) -> None:
    """Raise BuildError if a checkout's sources differ from those that the unit was compiled from.

    An installed package has no sources to compare. The check runs once per unit and process.
    """
    sources = record(unit)["sources"]
    if not (CHECKOUT / "kernels_cu").is_dir():
        return
    for name, digest in sources.items():
        if _digest(CHECKOUT / name) != digest:
            raise BuildError(
                f"the module {unit} was built from another {name}; run `make` (or `python build.py --only ...`)"
            )


def _digest(path: Path) -> str | None:
    """Return the SHA-256 of a source; None if it does not exist."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError:
        return None
