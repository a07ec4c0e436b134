"""Files: writing them whole or not at all, and telling what a compiled one is."""

from __future__ import annotations

import os
import struct
import uuid
from pathlib import Path

from .errors import FileError


def write_atomically(path, data: bytes) -> None:
    """Write `data` to a new file beside `path` and rename it into place; on failure nothing is left behind."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def module_kind(path, data: bytes) -> str:
    """What a compiled file is: "ptx", "fatbin" or "cubin"; FileError for anything else and for truncated binaries.

    The driver trusts the lengths that stand in a binary, so they are checked here.
    """
    if data[:4] == b"\x7fELF":
        if len(data) < 64 or data[4] != 2:
            raise FileError(f"{path} is no 64-bit cubin; compile it again with nvcc -cubin")
        (sections,) = struct.unpack_from("<Q", data, 40)
        size, count = struct.unpack_from("<HH", data, 58)
        return _whole("cubin", path, data, sections + size * count)
    if data[:4] == b"\x50\xed\x55\xba":
        if len(data) < 16:
            raise FileError(f"{path} is a truncated fatbin; compile it again")
        header, size = struct.unpack_from("<HQ", data, 6)
        return _whole("fatbin", path, data, header + size)
    if b".version" in data and b".target" in data and b"\0" not in data.rstrip(b"\0"):
        return "ptx"
    raise FileError(f"{path} is neither PTX text nor a fatbin or cubin; make one with nvcc -ptx, -fatbin or -cubin")


def _whole(kind: str, path, data: bytes, wanted: int) -> str:
    if len(data) < wanted:
        raise FileError(f"{path} is a truncated {kind}: {len(data)} bytes of {wanted}; compile it again")
    return kind
