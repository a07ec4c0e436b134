"""An instruction family has the same name in three places: the header that emits it, the emulator's module, its
test."""

from pathlib import Path

import pytest

from ptxrt.emulator.instruction import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
HEADERS = ROOT / "kernels_cu" / "ptx"
#: Families without a header: nvcc emits them itself. (target.cuh is the header that guards targets.)
COMPILER_ONLY = {"video", "system"}
#: Further headers of a family, besides the one with its name.
MORE = {
    "access_early": "access",
    "access_early_if": "access",
    "access_no_value": "access",
    "atom": "access",
    "cp_async_all": "cp_async",
    "cp_async_once": "cp_async",
    "cp_async_if": "cp_async",
    "cp_async_or_none": "cp_async",
    "cvt_scaled": "cvt",
    "exit": "control",
    "griddepcontrol": "control",
    "mma_plain": "mma",
    "named_barrier": "barrier",
    "roots": "math",
}
#: Families that the emulator has although no kernel of the collection uses them, and why.
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
