"""Arrays in files: .npy for one array and .npz for several. The sizes in a file are checked against its length before
memory is allocated.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import IO

import ml_dtypes
import numpy as np

from .errors import FileError
from .files import check_writeable, checked_path, reading, replacing
from .formats import in_native_order

# Deflate encodes at most 1032 bytes in one; the rest is slack for small members.
_RATIO, _REST = 1032, 1024
_NPY, _ZIP = b"\x93NUMPY", b"PK"


class Header:
    """The header of an array in a file: dtype, shape, whether the order is column-major, and the bytes of the data."""

    def __init__(self, stream: IO[bytes]):
        version = np.lib.format.read_magic(stream)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"its format is {version[0]}.{version[1]}, where 1.0 and 2.0 are known")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        self.shape, self.columns, self.dtype = read(stream)
        if self.dtype.hasobject:
            raise ValueError("it holds pickled objects, which are never loaded, where an array of numbers is due")
        if any(size < 0 for size in self.shape):
            raise ValueError(f"its shape is {list(self.shape)}")
        self.nbytes = prod(self.shape) * self.dtype.itemsize

    def read(self, stream: IO[bytes]) -> np.ndarray:
        """Read the array behind the header; ValueError if the stream ends early."""
        array = np.empty(self.shape[::-1] if self.columns else self.shape, self.dtype)
        rest = memoryview(array.reshape(-1).view(np.uint8)) if array.nbytes else memoryview(b"")
        while rest:
            count = stream.readinto(rest)  # type: ignore[attr-defined]
            if not count:
                raise ValueError(f"it ends {len(rest)} bytes early")
            rest = rest[count:]
        return array.T if self.columns else array


class Archive:
    """The arrays of an .npz by name. An array is inflated when it is read, and no further than its header says."""

    def __init__(self, file: IO[bytes]):
        self._zip = zipfile.ZipFile(file)
        members = [info for info in self._zip.infolist() if info.filename.endswith(".npy")]
        self._members = {info.filename[:-4]: info for info in members}
        if len(self._members) != len(members):
            raise ValueError("it holds two arrays of one name")
        self.names = tuple(self._members)

    def header(self, name: str) -> Header:
        """Read the header of an array; ValueError unless its size agrees with the size that the archive declares."""
        with self._open(name) as stream:
            return self._header(name, stream)

    def read(self, name: str) -> np.ndarray:
        """Read an array, in native byte order."""
        with self._open(name) as stream:
            array = self._header(name, stream).read(stream)
            stream.read(1)  # zipfile compares the checksum when it reaches the end
        return in_native_order(array)

    def _open(self, name: str) -> IO[bytes]:
        info = self._members[name]
        if info.flag_bits & 1:
            raise ValueError(f"its {name} is encrypted")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(
                f"its {name} is compressed by method {info.compress_type}; numpy.savez and savez_compressed use others"
            )
        if info.file_size > _RATIO * info.compress_size + _REST:
            raise ValueError(
                f"its {name} is said to be {info.file_size} bytes, which {info.compress_size} "
                "compressed ones cannot hold"
            )
        return self._zip.open(info)

    def _header(self, name: str, stream: IO[bytes]) -> Header:
        header = Header(stream)
        if stream.tell() + header.nbytes != self._members[name].file_size:
            raise ValueError(
                f"its {name} of {header.dtype} {list(header.shape)} takes {header.nbytes} bytes, "
                f"the archive has {self._members[name].file_size - stream.tell()}"
            )
        return header


@contextmanager
def understood(path, what: str, advice: str) -> Iterator[None]:
    """Turn every error of NumPy and zipfile on a damaged file into a FileError: `PATH WHAT: reason. ADVICE`.

    Their parsers raise nearly any error for random bytes, including RecursionError and NotImplementedError.
    """
    try:
        yield
    except FileError:
        raise
    except MemoryError as error:
        raise FileError(f"{path} {what}: there is no memory for what it says it holds ({error}). {advice}") from error
    except Exception as error:
        reason = str(error) or type(error).__name__
        if "allow_pickle" in reason or "Object arrays" in reason:
            reason = "it holds pickled objects, which are never loaded, where an array of numbers is due"
        raise FileError(f"{path} {what}: {reason}. {advice}") from error


@contextmanager
def opened(path, what: str, advice: str) -> Iterator["Archive | IO[bytes]"]:
    """Open a file of arrays: an Archive, or the file itself if it holds one array; FileError as of `understood`."""
    with reading(path) as file, understood(path, what, advice):
        magic = file.read(len(_NPY))
        file.seek(0)
        if magic.startswith(_ZIP):
            yield Archive(file)
        elif magic == _NPY:
            yield file
        else:
            raise ValueError("it is empty" if not magic else "it is not in .npy format, and no .npz")


def read_array(path, member: str) -> np.ndarray:
    """Read the array in an .npy file, or the one called `member` in an .npz; native byte order.

    NumPy saves bfloat16 as two untyped bytes (V2), so items of that dtype are taken for bfloat16.
    FileError if the file or the array is missing, or if it holds pickled objects.
    """
    with opened(path, "cannot be read", "Write it with numpy.save.") as file:
        if isinstance(file, Archive):
            if member not in file.names:
                raise FileError(f"{path} holds no array called {member}; it holds {', '.join(file.names) or 'nothing'}")
            return file.read(member)
        header = Header(file)
        remaining = os.fstat(file.fileno()).st_size - file.tell()
        if header.nbytes > remaining:
            raise ValueError(
                f"its {header.dtype} {list(header.shape)} takes {header.nbytes} bytes, {remaining} are there"
            )
        return in_native_order(header.read(file))


def check_target(path: Path, arrays: int) -> None:
    """Raise FileError if `path` cannot take that many arrays. Commands check this before they compute."""
    suffix = ".npy" if arrays == 1 else ".npz"
    checked_path(path)
    if path.suffix != suffix:
        what = "one array" if arrays == 1 else f"{arrays} arrays"
        raise FileError(f"{path} is to hold {what}; give it a name that ends in {suffix}")
    check_writeable(path)


def storable(array: np.ndarray) -> np.ndarray:
    """Return the array with a dtype that .npy supports: bfloat16 as float32, which is exact."""
    return array.astype(np.float32) if array.dtype == ml_dtypes.bfloat16 else array


def write_arrays(path, arrays: Mapping[str, np.ndarray], *, archive: bool | None = None) -> None:
    """Write arrays as `replacing` writes files: one as .npy, several as .npz. FileError if that fails.

    archive: True writes .npz, False writes .npy.
    """
    stored = {name: storable(array) for name, array in arrays.items()}
    with replacing(path) as file:
        if archive if archive is not None else len(stored) != 1:
            np.savez(file, **stored)
        else:
            np.save(file, *stored.values(), allow_pickle=False)
