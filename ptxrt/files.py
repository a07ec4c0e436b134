"""Files: checked paths, atomic writes, and the kinds of compiled files."""

from __future__ import annotations

import errno
import os
import platform
import re
import stat
import struct
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from .errors import FileError

# The name of a file that is being written; it holds the host and the process.
_PART = re.compile(r"\.ptxrt-([0-9a-f]{8})-(\d+)-[0-9a-f]{32}\.part")


def checked_path(path) -> Path:
    """Return the path as a Path; FileError for anything else, such as a number, which `open` takes for a file
    descriptor."""
    try:
        name = os.fsdecode(path)
    except TypeError:
        raise FileError(f"{path!r} is a {type(path).__name__}; pass the name of a file as a string or a Path") from None
    if "\0" in name:
        raise FileError(f"{name!r} holds a zero byte, which no file's name has; pass another name")
    return Path(name)


def cannot(path: Path, what: str, error: OSError) -> FileError:
    """Make the FileError that says why a file cannot be `read` or `written`, with its folder."""
    folder = Path(os.path.realpath(path)).parent
    if not os.path.isdir(folder):
        trouble = (
            "is no folder"
            if os.path.exists(folder)
            else "does not exist" + ("; create it first" if what == "written" else "")
        )
        reason = f"the folder {folder} {trouble}"
    elif isinstance(error, FileNotFoundError):
        reason = f"it does not exist in the folder {folder}"
    elif os.path.isdir(path):
        reason = f"it is a folder, in {folder}; give the name of a file"
    elif error.errno == errno.ENAMETOOLONG:
        reason = f"its name is longer than the file system of {folder} allows"
    elif what == "written" and isinstance(error, PermissionError):
        reason = f"no permission to write into {folder}; choose another folder"
    else:
        reason = f"{error.strerror or error} (in the folder {folder})"
    return FileError(f"{path} cannot be {what}: {reason}")


def check_writeable(path) -> None:
    """Raise FileError if the folder of `path` takes no file of that name. Commands check this before they compute."""
    path = checked_path(path)
    folder = Path(os.path.realpath(path)).parent
    if not os.path.isdir(folder):
        raise cannot(path, "written", FileNotFoundError())
    if os.path.isdir(path):
        raise cannot(path, "written", IsADirectoryError())
    try:
        os.lstat(path)
    except FileNotFoundError:
        pass
    except OSError as error:  # such as a name that is too long
        raise cannot(path, "written", error) from error
    device = os.path.exists(path) and not os.path.isfile(path)  # it is written to, not replaced
    if not device and not os.access(folder, os.W_OK):
        raise cannot(path, "written", PermissionError())


@contextmanager
def reading(path) -> Iterator[IO[bytes]]:
    """Open a file to read its bytes; FileError if it cannot be read."""
    path = checked_path(path)
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise cannot(path, "read", error) from error


def read_bytes(path) -> bytes:
    """Return the bytes of a file; FileError if it cannot be read."""
    with reading(path) as file:
        return file.read()


@contextmanager
def replacing(path) -> Iterator[IO[bytes]]:
    """Open a file to write; it replaces `path` as a whole when the block ends, and changes nothing after an error.

    A symbolic link stays, and its target is replaced. The new file has the mode of the old one. Devices and pipes are
    written to directly. FileError if that is impossible or the file is read-only. A process that is killed while it
    writes leaves a file `.ptxrt-*.part`; the next process that writes into the folder removes it.
    """
    path = checked_path(path)
    try:
        target = Path(os.path.realpath(path))
        mode = target.stat().st_mode if os.path.exists(target) else None
        if mode is not None and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            with open(target, "wb") as file:
                yield file
            return
        if mode is not None and not os.access(target, os.W_OK) and not os.path.isdir(target):
            raise FileError(
                f"{path} cannot be written: it is read-only, in the folder {target.parent}; remove it first, or give "
                "another name"
            )
        if os.path.isdir(target):
            raise IsADirectoryError
        remove_parts(target.parent)
        # The temporary name does not contain the target's, which may have the greatest length that is allowed.
        temporary = target.with_name(f".ptxrt-{_host()}-{os.getpid()}-{uuid.uuid4().hex}.part")
        try:
            with open(temporary, "xb") as file:
                if mode is not None:
                    os.chmod(temporary, stat.S_IMODE(mode))
                yield file
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise cannot(path, "written", error) from error


def write_atomically(path, data: bytes) -> None:
    """Write `data` to `path` as `replacing` does."""
    with replacing(path) as file:
        file.write(data)


def remove_parts(folder: Path) -> None:
    """Remove the half-written files in a folder whose processes, of this host, have ended."""
    try:
        names = os.listdir(folder)
    except OSError:
        return  # the folder may be writeable but not readable
    for name in names:
        match = _PART.fullmatch(name)
        if match and match[1] == _host() and not _runs(int(match[2])):
            try:
                os.unlink(folder / name)
            except OSError:
                pass  # another process has removed it, or it belongs to another user


def _host() -> str:
    """Return eight hexadecimal digits for this host, because a process number is valid on its own host alone."""
    return f"{zlib.crc32(platform.node().encode()):08x}"


def _runs(process: int) -> bool:
    """Return whether a process exists; on Windows, whether it is this one.

    On Windows `os.kill(process, 0)` is no query but a signal. The query is not needed there: Windows refuses to remove
    a file that another process has open.
    """
    if os.name == "nt":
        return process == os.getpid()
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def module_kind(path, data: bytes) -> str:
    """Return the kind of a compiled file: "ptx", "fatbin" or "cubin"; FileError for others and for truncated binaries.

    The lengths in a binary are checked here, because the driver trusts them.
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


def _whole(kind: str, path, data: bytes, expected: int) -> str:
    if len(data) < expected:
        raise FileError(f"{path} is a truncated {kind}: {len(data)} bytes of {expected}; compile it again")
    return kind
