"""Listings of machine code from the disassembler of the CUDA toolkit, which drivers do not include."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from .errors import BuildError

WHEELS = "nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"


def _folders() -> Iterator[Path]:
    """Folders that may hold a toolkit's programs: CUDA_HOME, PATH, wheels in this Python's environment."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        yield Path(home) / "bin"
    for name in ("cuobjdump", "nvcc"):
        on_path = shutil.which(name)
        if on_path:
            yield from (Path(on_path).parent, Path(on_path).resolve().parent)
    for folder in sys.path:
        yield from sorted((Path(folder or ".") / "nvidia").glob("*/bin"))


def find_disassembler() -> Path:
    """Return the folder that holds cuobjdump and, beside it, nvdisasm, which cuobjdump calls; BuildError if there is
    none."""
    for folder in _folders():
        if all(shutil.which(name, path=str(folder)) for name in ("cuobjdump", "nvdisasm")):
            return folder
    raise BuildError(f"no cuobjdump with nvdisasm found: run {sys.executable} -m pip install {WHEELS}")


def sass_of(fatbin: Path, arch: str, encodings: bool = False) -> str:
    """The machine code in a fatbin for one architecture, such as "sm_120a", with its encodings or without them.

    BuildError if it holds no code for that architecture.
    """
    folder = find_disassembler()
    program = shutil.which("cuobjdump", path=str(folder))
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}", "LC_ALL": "C"}
    done = subprocess.run(
        [str(program), "-sass", "-arch", arch, str(fatbin)],
        env=environment,
        capture_output=True,
        text=True,
        errors="replace",
    )
    if done.returncode:
        raise BuildError(f"cuobjdump failed on {fatbin}: {(done.stderr or done.stdout).strip()}")
    listing = done.stdout
    if not encodings:
        lines = (re.sub(r"\s*/\* 0x[0-9a-f]{16} \*/", "", line) for line in listing.splitlines())
        listing = "\n".join(line for line in lines if line.strip())
    if "Function :" not in listing:
        raise BuildError(f"{fatbin} holds no code for {arch}; build it for every target with `make`")
    return listing
