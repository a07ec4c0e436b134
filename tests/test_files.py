"""Reading and writing of files: hostile archives, and writes that must leave existing files intact."""

import io
import os
import signal
import stat
import struct
import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

import ptxrt
from ptxrt import files, npy
from ptxrt.ops.quantize import quantize_reference

ROOT = Path(__file__).resolve().parent.parent
posix = pytest.mark.skipif(os.name == "nt", reason="modes, links and signals of POSIX")


@pytest.fixture
def q(rng):
    return quantize_reference(rng.standard_normal((4, 64)).astype(np.float32), "mxfp4")


def member(array):
    """The bytes of an .npy file."""
    data = io.BytesIO()
    np.save(data, array)
    return data.getvalue()


def header(dtype, shape, data=b""):
    """An .npy file whose header does not match its data."""
    words = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(words)) + words.encode() + data


def archive(path, members, method=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", method) as file:
        for name, data in members.items():
            file.writestr(f"{name}.npy", data)
    return path


def members_of(q):
    fields = dict(
        codes=q.codes, scales=q.scales, format=np.array(q.format), shape=np.array(q.shape), axis=np.array(q.axis)
    )
    return {name: member(array) for name, array in {**fields, "scale_layout": np.array("linear")}.items()}


# Reading files from elsewhere


def every_load(path):
    """The messages of every function that reads an archive; each must raise FileError."""
    with pytest.raises(ptxrt.FileError) as first:
        ptxrt.QuantizedArray.load(path)
    with pytest.raises(ptxrt.FileError) as second:
        npy.read_array(path, "codes")
    return str(first.value), str(second.value)


@pytest.mark.parametrize("method", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_other_compressions_are_file_errors(q, tmp_path, method):
    for message in every_load(archive(tmp_path / "x.npz", members_of(q), method)):
        assert f"compressed by method {method}" in message


def patched(path, offset, value):
    """Write a 16-bit word into the local and the central header of every member of an archive."""
    data = bytearray(path.read_bytes())
    for mark, shift in ((b"PK\x03\x04", 0), (b"PK\x01\x02", 2)):
        at = data.find(mark)
        while at >= 0:
            struct.pack_into("<H", data, at + offset + shift, value)
            at = data.find(mark, at + 4)
    path.write_bytes(data)
    return path


def test_encrypted_members_are_file_errors(q, tmp_path):
    for message in every_load(patched(archive(tmp_path / "x.npz", members_of(q)), 6, 1)):
        assert "encrypted" in message


def test_unknown_compressions_are_file_errors(q, tmp_path):
    for message in every_load(patched(archive(tmp_path / "x.npz", members_of(q)), 8, 99)):
        assert "compressed by method 99" in message


def test_damaged_lzma_is_a_file_error(q, tmp_path):
    path = archive(tmp_path / "x.npz", members_of(q), zipfile.ZIP_LZMA)
    data = bytearray(path.read_bytes())
    data[70:200] = bytes(130)
    path.write_bytes(data)
    every_load(path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_members_of_one_name_are_a_file_error(q, tmp_path):
    path = archive(tmp_path / "x.npz", members_of(q))
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("codes.npy", member(q.codes))
    for message in every_load(path):
        assert "two arrays of one name" in message


@pytest.mark.parametrize(
    "codes, words",
    [
        (header("|u1", (1 << 40,), bytes(64)), "takes 1099511627776 bytes"),
        (header("|u1", (4, 1 << 62, 4), bytes(64)), "takes"),
        (header("|u1", (4, -16), bytes(64)), "shape is"),
        (header("|O", (1,), b"cos\nsystem\n."), "pickled objects, which are never loaded"),
        (header("|u1", (4, 16), bytes(63)), "takes 64 bytes"),
        (header("|u1", (4, 16), bytes(65)), "takes 64 bytes"),
        (b"\x93NUMPY\x09\x00" + bytes(80), "9.0"),
        (b"\x93NUMPY\x01\x00" + struct.pack("<H", 9000) + b"(" * 9000, ""),
        (b"\x93NUMPY\x01\x00" + struct.pack("<H", 60000) + b" " * 60000, ""),
        (b"", ""),
    ],
)
def test_headers_that_lie_are_file_errors(q, tmp_path, codes, words):
    for message in every_load(archive(tmp_path / "x.npz", {**members_of(q), "codes": codes})):
        assert words in message
    single = tmp_path / "x.npy"
    single.write_bytes(codes)
    if codes != header("|u1", (4, 16), bytes(65)):  # bytes after a single array are not read
        with pytest.raises(ptxrt.FileError):
            npy.read_array(single, "x")


def peak(call):
    """(peak of allocated bytes, message) of a call that ends in a FileError."""
    tracemalloc.start()
    try:
        with pytest.raises(ptxrt.FileError) as caught:
            call()
        return tracemalloc.get_traced_memory()[1], str(caught.value)
    finally:
        tracemalloc.stop()


BOMB = np.zeros((1 << 13, 1 << 13), np.uint8)


def test_nothing_is_inflated_before_names_and_sizes_fit(q, tmp_path):
    zeros = member(BOMB)
    for name, change in {
        "more": {"more": zeros},
        "codes": {"codes": zeros},
        "format": {"format": zeros},
        "shape": {"shape": zeros},
    }.items():
        path = archive(tmp_path / f"{name}.npz", {**members_of(q), **change}, zipfile.ZIP_DEFLATED)
        assert path.stat().st_size < 100_000
        memory, message = peak(lambda: ptxrt.QuantizedArray.load(path))
        assert memory < 1 << 20 and name in message
    missing = archive(tmp_path / "missing.npz", {"other": zeros}, zipfile.ZIP_DEFLATED)
    assert peak(lambda: npy.read_array(missing, "x"))[0] < 1 << 20


def test_a_size_that_cannot_be_is_not_asked_for(q, tmp_path):
    """The sizes in the archive's directory and in the header agree, but so few bytes cannot inflate to so many."""
    path = archive(tmp_path / "x.npz", {**members_of(q), "codes": header("|u1", (1 << 31,))}, zipfile.ZIP_DEFLATED)
    data = bytearray(path.read_bytes())
    for mark, shift in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        at = data.find(mark)
        length = len(header("|u1", (1 << 31,)))
        struct.pack_into("<I", data, at + shift, (1 << 31) + length)
    path.write_bytes(data)
    memory, message = peak(lambda: npy.read_array(path, "codes"))
    assert memory < 1 << 20 and "cannot hold" in message


def test_arrays_of_every_order_and_type_come_back(tmp_path, rng):
    arrays = {
        "plain": rng.standard_normal((3, 5)).astype(np.float32),
        "columns": np.asfortranarray(rng.standard_normal((3, 5, 2))),
        "big": rng.standard_normal((2, 3)).astype(">f8"),
        "none": np.zeros((3, 0), np.int32),
        "number": np.array(7, np.int64),
        "words": np.array(["a", "bcd"]),
        "empty": np.array("", "U0") if np.array("").dtype.itemsize == 0 else np.array(""),
        "mask": rng.random((4, 4)) < 0.5,
    }
    np.savez_compressed(tmp_path / "x.npz", **arrays)
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
        for path in (tmp_path / "x.npz", tmp_path / f"{name}.npy"):
            got = npy.read_array(path, name)
            np.testing.assert_array_equal(got, array)
            assert got.dtype == array.dtype.newbyteorder("=") and got.dtype.isnative


def test_the_array_that_is_missing_is_named(tmp_path):
    np.savez(tmp_path / "x.npz", a=np.ones(3), b=np.ones(3))
    with pytest.raises(ptxrt.FileError) as caught:
        npy.read_array(tmp_path / "x.npz", "q")
    assert str(caught.value) == f"{tmp_path / 'x.npz'} holds no array called q; it holds a, b"


# Paths


@pytest.mark.parametrize("path", [True, False, 1, 2.5, None, object(), "a\0b"])
def test_what_is_no_path_is_a_file_error(q, path):
    for call in (
        ptxrt.QuantizedArray.load,
        q.save,
        ptxrt.load,
        lambda x: npy.read_array(x, "x"),
        lambda x: npy.write_arrays(x, {"x": np.ones(2)}),
    ):
        with pytest.raises(ptxrt.FileError, match="pass"):
            call(path)
    os.fstat(1)  # standard output is still open


def test_missing_places_are_file_errors_that_name_the_folder(q, tmp_path):
    (tmp_path / "file").touch()
    for call in (ptxrt.QuantizedArray.load, ptxrt.load, lambda path: npy.read_array(path, "x")):
        for path, words in [
            (tmp_path / "x.npz", f"cannot be read: it does not exist in the folder {tmp_path}"),
            (tmp_path / "no" / "x.npz", f"cannot be read: the folder {tmp_path / 'no'} does not exist"),
            (tmp_path / "file" / "x.npz", f"cannot be read: the folder {tmp_path / 'file'} is no folder"),
            (tmp_path, "it is a folder"),
        ]:
            with pytest.raises(ptxrt.FileError) as caught:
                call(path)
            assert words in str(caught.value)
    for call in (q.save, lambda path: npy.write_arrays(path, {"x": np.ones(2)})):
        for path, words in [
            (
                tmp_path / "no" / "x.npz",
                f"cannot be written: the folder {tmp_path / 'no'} does not exist; create it first",
            ),
            (tmp_path / "file" / "x.npz", "is no folder"),
            (tmp_path, "it is a folder"),
            (tmp_path / ("x" * 300), "longer than the file system"),
        ]:
            with pytest.raises(ptxrt.FileError) as caught:
                call(path)
            assert words in str(caught.value)


def test_a_relative_name_has_its_folder_named(q, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ptxrt.FileError, match=f"x.npz cannot be read: it does not exist in the folder {tmp_path}"):
        ptxrt.QuantizedArray.load("x.npz")
    q.save("x.npz")
    assert ptxrt.QuantizedArray.load(b"x.npz").shape == q.shape


# Writing


@posix
def test_the_mode_of_a_file_is_kept(q, tmp_path):
    path = tmp_path / "x.npz"
    mask = os.umask(0o027)
    try:
        q.save(path)
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    for mode in (0o600, 0o666, 0o755):
        path.chmod(mode)
        q.save(path)
        assert stat.S_IMODE(path.stat().st_mode) == mode


@posix
def test_links_stay(q, tmp_path):
    (tmp_path / "there").mkdir()
    link, target = tmp_path / "x.npz", tmp_path / "there" / "y.npz"
    link.symlink_to(Path("there") / "y.npz")
    for _ in range(2):  # the first time it points to nothing
        q.save(link)
        assert link.is_symlink() and not target.is_symlink() and ptxrt.QuantizedArray.load(target).shape == q.shape
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["there", "x.npz", "y.npz"]
    link.unlink()
    link.symlink_to(tmp_path / "no" / "y.npz")
    with pytest.raises(ptxrt.FileError, match="the folder .*no does not exist"):
        q.save(link)


@posix
def test_a_device_is_written_to_and_stays(q, tmp_path):
    pipe = tmp_path / "x.npy"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE)
    with files.replacing(pipe) as file:
        file.write(b"data")
    assert reader.communicate(timeout=30)[0] == b"data" and stat.S_ISFIFO(pipe.stat().st_mode)
    files.write_atomically("/dev/null", b"data")
    assert not stat.S_ISREG(os.stat("/dev/null").st_mode)


@posix
def test_a_read_only_file_is_refused(q, tmp_path, monkeypatch):
    path = tmp_path / "x.npz"
    path.write_bytes(b"before")
    monkeypatch.setattr(os, "access", lambda asked, mode: Path(asked) != path)
    with pytest.raises(ptxrt.FileError, match="read-only"):
        q.save(path)
    assert path.read_bytes() == b"before"


def test_names_as_long_as_the_file_system_allows(q, tmp_path):
    for name in ("x" * 255, "x" * 251 + ".npz"):
        try:
            (tmp_path / name).touch()
        except OSError:
            pytest.skip("this file system has shorter names")
        q.save(tmp_path / name)
        assert ptxrt.QuantizedArray.load(tmp_path / name).shape == q.shape


KILLED = """
import os, signal, sys
from ptxrt.files import replacing
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
with replacing(sys.argv[1]) as file:
    file.write(b"half")
    file.flush()
    print("writing", flush=True)
    signal.pause()
"""


@posix
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL] + ([signal.SIGHUP] if os.name != "nt" else []))
def test_what_a_killed_process_leaves_is_removed_by_the_next(q, tmp_path, number):
    path = tmp_path / "x.npz"
    path.write_bytes(b"before")
    command = [sys.executable, "-c", KILLED, str(path)]
    other, killed = (subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) for _ in range(2))
    for process in (other, killed):
        assert process.stdout.readline() == b"writing\n"
    killed.send_signal(number)
    killed.wait(60)
    assert path.read_bytes() == b"before"
    q.save(path)
    (left,) = tmp_path.glob(".ptxrt-*.part")  # the one of the process that is still writing
    assert str(other.pid) in left.name
    other.kill()
    other.wait()
    q.save(tmp_path / "y.npz")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["x.npz", "y.npz"]


def test_parts_of_other_hosts_stay(tmp_path):
    others = tmp_path / f".ptxrt-{'0' * 8}-999999999-{'0' * 32}.part"
    others.touch()
    (tmp_path / ".ptxrt-notes.part").touch()
    files.write_atomically(tmp_path / "x", b"")
    assert others.exists() and (tmp_path / ".ptxrt-notes.part").exists()
