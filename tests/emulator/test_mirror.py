"""An instruction family has one name in three places: the header that emits it, the emulator's file, its test."""

from pathlib import Path

import pytest

from ptxrt.emulator.instruction import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
HEADERS = ROOT / "kernels_cu" / "ptx"
#: What nvcc emits by itself has no header; target.cuh is the guard.
COMPILER_ONLY = {"alu", "video", "control", "access", "system"}
#: Headers of a family beside the one that has its name.
MORE = {"mma_plain": "mma"}
#: Emulated, and used by no kernel of the collection: why it is there.
UNUSED = {
    "cluster": "kernels for sm_90 and later name addresses and barriers of clusters also where a cluster is one block",
    "registers": "kernels with specialized warps, such as CUTLASS's, move registers between them by setmaxnreg",
}


@pytest.mark.skipif(not HEADERS.is_dir(), reason="an installed package has no kernels_cu")
def test_headers_families_and_tests_have_the_same_names():
    headers = {path.stem for path in HEADERS.glob("*.cuh")} - {"target"} - MORE.keys()
    families = set(FAMILIES) - COMPILER_ONLY
    modules = {path.stem for path in (ROOT / "ptxrt" / "emulator").glob("*.py")}
    tests = {path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")}
    assert set(MORE.values()) <= headers
    assert headers <= families and families - headers <= UNUSED.keys()
    assert families <= modules and families <= tests
