"""Damaged files and paths that cannot be written: `.npz` of quantized arrays, `.npy` and `.npz` of the command line."""

from __future__ import annotations

import io
import os
import random
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np

import ptxrt
from ptxrt.npy import read_array
from ptxrt.ops.quantize import quantize_reference

from .engine import Kind

# The most bytes that an array loaded from a damaged file may have.
_MOST_BYTES = 64 << 20


def draw(rng: random.Random) -> dict:
    """Draw a recipe of a file and its damage."""
    recipe = dict(
        seed=rng.randrange(2**32),
        whole=rng.choice(["mxfp4", "nvfp4", "operand", "npy", "npz", "compressed", "bfloat16"]),
    )
    recipe["damage"] = [_damage(rng) for _ in range(rng.choice([1, 1, 2, 5]))]
    recipe["odd"] = "a damaged file"
    if rng.random() < 0.1:
        del recipe["odd"]
        recipe["damage"] = []
    elif rng.random() < 0.15:
        recipe["damage"], recipe["wrong"] = [], rng.choice(WRONG)
        del recipe["odd"]
    return recipe


WRONG = [
    "ptxrt.QuantizedArray.load(folder / 'absent.npz')",
    "ptxrt.QuantizedArray.load(folder)",
    "ptxrt.QuantizedArray.load(folder / 'absent' / 'x.npz')",
    "ptxrt.QuantizedArray.load('')",
    "ptxrt.QuantizedArray.load(None)",
    "ptxrt.QuantizedArray.load(True)",
    "ptxrt.QuantizedArray.load(3)",
    "ptxrt.QuantizedArray.load('a\\0b')",
    "ptxrt.QuantizedArray.load(b'\\xff')",
    "quantized.save(folder / 'absent' / 'x.npz')",
    "quantized.save(folder)",
    "quantized.save('')",
    "quantized.save(None)",
    "quantized.save(7)",
    "quantized.save(folder / ('n' * 300))",
    "quantized.save('a\\0b')",
    "quantized.save(path / 'below.npz')",
    "ptxrt.load(folder / 'absent.ptx')",
    "ptxrt.load(folder)",
    "ptxrt.load(None)",
    "ptxrt.load(path)",
]


def _damage(rng: random.Random) -> list:
    kind = rng.choice(["flip", "flip", "cut", "drop", "insert", "zero", "repeat", "member", "header", "size", "rename"])
    return [kind, rng.random(), rng.randrange(1, 256), rng.randrange(1, 64)]


def program(recipe: dict) -> str:
    """Writing, damaging and reading a file, as code."""
    lines = [
        "import pathlib, tempfile",
        "from tests.fuzz import files",
        "keeper = tempfile.TemporaryDirectory()",
        "folder = pathlib.Path(keeper.name)",
    ]
    lines.append(f"path, quantized, arrays = files.written(folder, {recipe['whole']!r}, {recipe['seed']})")
    lines += [f"files.damage(path, {recipe['damage']!r})"] if recipe["damage"] else []
    lines.append("before = files.listing(folder)")
    lines += (
        ["try:", f"    {recipe['wrong']}", "finally:", "    files.check_listing(folder, before)"]
        if "wrong" in recipe
        else []
    )
    lines.append(f"loaded = files.read(path, {recipe['whole']!r})")
    lines += ["odd = True"] if "odd" in recipe else []
    return "\n".join(lines)


def written(folder: Path, whole: str, seed: int):
    """(path of a file of this kind, its quantized array, {name: array} if it holds plain arrays)."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((4, 64), dtype=np.float32)
    path, quantized, arrays = folder / "x.npz", None, {}
    if whole in ("mxfp4", "nvfp4"):
        quantized = quantize_reference(x, whole)
    elif whole == "operand":
        quantized = _operand()
    if quantized is not None:
        quantized.save(path)
        return path, quantized, arrays
    quantized = quantize_reference(x, "mxfp4")
    arrays = dict(x=x) if whole != "bfloat16" else dict(x=x.astype(ptxrt.formats.bf16.dtype))
    if whole in ("npy", "bfloat16"):
        path = folder / "x.npy"
        np.save(path, arrays["x"])
    else:
        (np.savez_compressed if whole == "compressed" else np.savez)(path, y=x[0], **arrays)
    return path, quantized, arrays


_OPERAND: list = []


def _operand():
    if not _OPERAND:
        x = np.random.default_rng(1).standard_normal((1, 1, 3, 32), dtype=np.float32)
        _OPERAND.append(ptxrt.quantize_operand(x, "mxfp4", role="k"))
    return _OPERAND[0]


def damage(path: Path, steps: list) -> None:
    """Apply the damage steps to the bytes of a file."""
    data = bytearray(path.read_bytes())
    for kind, share, value, length in steps:
        at = int(share * len(data))
        if kind == "flip" and data:
            data[min(at, len(data) - 1)] ^= value
        elif kind == "cut":
            del data[at:]
        elif kind == "drop":
            del data[at : at + length]
        elif kind == "insert":
            data[at:at] = bytes([value]) * length
        elif kind == "zero":
            data[at : at + length] = bytes(len(data[at : at + length]))
        elif kind == "repeat":
            data += data[at : at + length]
        elif data[:2] == b"PK":
            data = _changed_archive(data, kind, share, value)
        elif data[:1] == b"\x93":
            data = bytearray(_changed_header(bytes(data), kind, value))
    path.write_bytes(data)


def _changed_archive(data: bytearray, kind: str, share: float, value: int) -> bytearray:
    """A valid archive with one member changed: its bytes, its array's header, or its name."""
    target = io.BytesIO()
    try:
        with (
            zipfile.ZipFile(io.BytesIO(data)) as source,
            zipfile.ZipFile(
                target, "w", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA][value % 3]
            ) as copy,
        ):
            chosen = int(share * len(source.namelist()))
            for i, name in enumerate(source.namelist()):
                content = source.read(name)
                if i == chosen:
                    if kind == "rename":
                        name = ["codes.npy", "../up.npy", "", "x", "scales.npy", "a" * 300][value % 6]
                    elif kind == "member":
                        content = [b"", content * 2, content[:40], b"\x93NUMPY\x01\x00", bytes(200)][value % 5]
                    else:
                        content = _changed_header(content, kind, value)
                copy.writestr(name, content)
    except Exception:  # too damaged to open
        return data
    return bytearray(target.getvalue())


def _changed_header(content: bytes, kind: str, value: int) -> bytes:
    """The bytes of an .npy file with another header."""
    if content[:6] != b"\x93NUMPY" or len(content) < 12:
        return content
    (length,) = struct.unpack_from("<H", content, 8)
    kinds = ["<f4", "|u1", "|O", "<f8", "<U4", "|V2", ">f4", "<c8", "nothing", "<U99999999"]
    shapes = [
        "(4, 64)",
        "(2147483648, 4096)",
        "(-1,)",
        "()",
        "(0,)",
        "(10**30,)",
        "(1.5,)",
        "None",
        "(4,)",
        "(1,) * 70",
    ]
    text = (
        f"{{'descr': '{kinds[value % 10]}', 'fortran_order': {value % 2 == 0}, 'shape': {shapes[value // 10 % 10]}, }}"
    )
    if kind == "size":
        text = content[10 : 10 + length].decode("latin-1").replace("(", f"({value * 10**6}, ", 1).strip()
    text = text.ljust(118) + "\n"
    return content[:8] + struct.pack("<H", len(text)) + text.encode("latin-1") + content[10 + length :]


def read(path: Path, whole: str):
    """Load a file with the reader of its kind."""
    if whole in ("npy", "npz", "compressed", "bfloat16"):
        return read_array(path, "x")
    return (ptxrt.Operand if whole == "operand" else ptxrt.QuantizedArray).load(path)


def listing(folder: Path) -> dict:
    """{name: checksum of a file, None of anything else} in a folder."""
    return {
        name: zlib.crc32(Path(folder, name).read_bytes()) if Path(folder, name).is_file() else None
        for name in sorted(os.listdir(folder))
    }


def check_listing(folder: Path, before: dict) -> None:
    """Raise RuntimeError if a refused call changed the folder, OSError if it closed standard output."""
    os.fstat(1)
    after = listing(folder)
    if after != before:
        raise RuntimeError(f"the folder held {before}, and now {after}")


def check(names: dict) -> None:
    """An undamaged file gives back the arrays written; a damaged file that loads gives arrays that are consistent."""
    loaded = names["loaded"]
    if isinstance(loaded, (ptxrt.QuantizedArray, ptxrt.Operand)):
        values = np.asarray(loaded)
        assert values.shape == loaded.shape, f"{loaded!r} has values of shape {values.shape}"
        if not names.get("odd"):
            assert repr(loaded) == repr(names["quantized"]) and np.array_equal(
                loaded.codes, names["quantized"].codes
            ), "other codes came back"
        return
    assert isinstance(loaded, np.ndarray) and not loaded.dtype.hasobject, (
        f"{type(loaded).__name__} {getattr(loaded, 'dtype', '')}"
    )
    assert loaded.nbytes < _MOST_BYTES, f"{loaded.nbytes} bytes came of a file of {names['path'].stat().st_size}"
    if not names.get("odd"):
        assert np.array_equal(loaded.view(np.uint8), names["arrays"]["x"].view(np.uint8)), "other bytes came back"


def peak_of(path: Path, whole: str) -> int:
    """The peak of bytes allocated while reading a file."""
    import tracemalloc

    tracemalloc.start()
    try:
        read(path, whole)
    except ptxrt.PtxError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


KIND = Kind("files", draw, program, check, needed=("whole", "damage"))
