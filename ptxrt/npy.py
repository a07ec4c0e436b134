"""Arrays in files: what the command line reads and writes, .npy for one array and .npz for several."""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from pathlib import Path
from typing import Mapping

import ml_dtypes
import numpy as np

from .errors import FileError
from .files import write_atomically

# What NumPy raises for files that are truncated, foreign, or pretend to a size that does not fit.
_DAMAGE = (ValueError, TypeError, EOFError, SyntaxError, OverflowError, MemoryError, zipfile.BadZipFile, zlib.error)


def read_array(path, member: str) -> np.ndarray:
    """Read the array in an .npy file, or the one called `member` in an .npz; native byte order.

    NumPy saves bfloat16 as two bytes without meaning, so items of that kind are taken as bfloat16.
    FileError where there is no file, no array, or one that holds pickled objects.
    """
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.lib.npyio.NpzFile):
            with loaded:
                if member not in loaded.files:
                    there = ", ".join(loaded.files) or "nothing"
                    raise FileError(f"{path} holds no array called {member}; it holds {there}")
                loaded = loaded[member]
    except FileNotFoundError:
        raise FileError(f"{path} does not exist; give an .npy file for {member}") from None
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror or error}") from error
    except _DAMAGE as error:
        if "allow_pickle" in str(error):
            reason = "it is not in .npy format, or holds pickled objects, which are never loaded"
        else:
            reason = f"it is damaged or no .npy file ({error or type(error).__name__})"
        raise FileError(f"{path} cannot be read: {reason}. Write it with numpy.save.") from error
    if loaded.dtype == np.dtype("V2"):
        return loaded.view(ml_dtypes.bfloat16)
    return loaded if loaded.dtype.isnative else loaded.astype(loaded.dtype.newbyteorder("="))


def check_target(path: Path, arrays: int) -> None:
    """Raise FileError where `path` cannot take that many arrays: asked before anything is computed."""
    wanted = ".npy" if arrays == 1 else ".npz"
    if path.suffix != wanted:
        what = "one array" if arrays == 1 else f"{arrays} arrays"
        raise FileError(f"{path} is to hold {what}; give it a name that ends in {wanted}")
    if not path.parent.is_dir():
        raise FileError(f"{path} cannot be written: the folder {path.parent} does not exist; create it first")
    if path.is_dir():
        raise FileError(f"{path} cannot be written: it is a folder; give the name of a file")
    if not os.access(path.parent, os.W_OK):
        raise FileError(f"{path} cannot be written: no permission to write into {path.parent}; choose another folder")


def storable(array: np.ndarray) -> np.ndarray:
    """The array with a dtype that .npy knows: bfloat16 as float32, which holds it exactly."""
    return array.astype(np.float32) if array.dtype == ml_dtypes.bfloat16 else array


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write one array as .npy or several as .npz; the file appears whole or not at all."""
    buffer = io.BytesIO()
    stored = {name: storable(array) for name, array in arrays.items()}
    if len(stored) == 1:
        np.save(buffer, *stored.values(), allow_pickle=False)
    else:
        np.savez(buffer, **stored)
    try:
        write_atomically(path, buffer.getvalue())
    except OSError as error:
        raise FileError(f"{path} cannot be written: {error.strerror or error}") from error
