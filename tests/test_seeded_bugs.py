"""Every bug of seeded_bugs.py, compiled into a copy of the kernels and emulated, is caught; the unpatched copy passes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from seeded_bugs import ATTENTION, BLOCKS, BUGS, PRODUCT

import ptxrt
from ptxrt import backend, units
from ptxrt.emulator.backend import EmulatorBackend
from ptxrt.ops.attention_kernels import attention_mxfp4_bf16
from ptxrt.ops.quantizers import DEQUANTIZE, QUANTIZE

KERNELS = ptxrt.kernels()

ROOT = Path(__file__).parent.parent
DIM = 64
quantize_mxfp4, dequantize_mxfp4 = QUANTIZE["mxfp4"], DEQUANTIZE["mxfp4"]
QUANTIZERS = ("quantize_mxfp4", "quantize_mxfp6_e3m2", "quantize_mxfp4_columns", "quantize_nvfp4")
# Kernels whose declared cases are their checks, in the smallest variant.
DECLARED = (
    *(PRODUCT, BLOCKS, "attention_merge", "cast", "mma_rate_bf16"),
    *("pack_keys_mxfp4", "pack_values_nvfp4", "scan_keys", "operand_scale", "row_dot", "less_block_means", "mean_scores_mxfp4"),
)
UNITS = {**{name: name for name in (*QUANTIZERS, "dequantize_mxfp4", *DECLARED)}, ATTENTION: f"{ATTENTION}[dim={DIM}]"}
UNITS |= {PRODUCT: f"{PRODUCT}[dim=32]", BLOCKS: f"{BLOCKS}[dim=32]", "mean_scores_mxfp4": "mean_scores_mxfp4[dim=64]"}
UNITS |= {"pack_keys_mxfp4": "pack_keys_mxfp4[dim=64]", "pack_values_nvfp4": "pack_values_nvfp4[dim=64]"}


def compile_with(bug, kernel: str, folder: Path) -> Path:
    """A folder of modules from a copy of kernels_cu with one bug (or none): the native text of what the kernel's checks run."""
    sources, modules = folder / "kernels_cu", folder / "modules"
    shutil.copytree(ROOT / "kernels_cu", sources)
    if bug is not None:
        path = sources / bug.file
        text = path.read_text()
        assert text.count(bug.old) == 1, f"{bug}: its line is no longer in {bug.file}, or stands there twice"
        path.write_text(text.replace(bug.old, bug.new))
    command = [sys.executable, str(ROOT / "build.py"), "--ptx-only", "--sources", str(sources), "--out", str(modules)]
    done = subprocess.run([*command, "--only", UNITS[kernel]], capture_output=True, text=True)
    assert done.returncode == 0, f"{bug} does not compile:\n{done.stdout}{done.stderr}"
    return modules


@pytest.fixture
def modules(monkeypatch):
    """Run calls on the modules of a folder instead of the project's."""

    def use(folder: Path):
        monkeypatch.setattr(units, "MODULES", folder)
        monkeypatch.setattr(units, "CHECKOUT", folder)   # its sources are patched on purpose
        units.check_fresh.cache_clear()

    before = backend.enter(backend=EmulatorBackend(schedule="warps"))
    yield use
    backend.leave(before, "backend")
    units.check_fresh.cache_clear()


def quantizer_inputs(dtype):
    """Two runs and a ragged tail: values over a wide range, ties, signed zeros, a zero block, a NaN and an infinity."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal((17, 96)).astype(np.float32) * np.exp2(rng.integers(-9, 9, (17, 1)), dtype=np.float32)
    x[1, :8] = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    x[1, 8:32] = -0.0
    x[2, 32:64] = 0
    x[3, 40], x[4, 70] = np.nan, -np.inf
    return x.astype(dtype)


def what_fails(kernel: str) -> str | None:
    """The first check of a kernel that fails, or None; an emulator fault is a failure."""
    try:
        for name, check in CHECKS[kernel].items():
            if not check():
                return name
    except ptxrt.EmulatorFault as fault:
        return str(fault).splitlines()[0]
    return None


def quantizes(name, dtype, rule=0):
    """Bytes equal to the reference's, from rows or, for a kernel of columns, from a batch of one matrix."""
    inputs = [quantizer_inputs(dtype)]
    if name.endswith("_columns"):
        inputs = [np.ascontiguousarray(inputs[0].T)[None]]
    if "nvfp4" in name:
        inputs.append(np.array([0.003], np.float32))
    want = KERNELS[name].reference(*inputs, rule=rule)
    got = KERNELS[name](*inputs, rule=rule)
    return all(np.array_equal(a, b) for a, b in zip(got, want.values()))


def dequantizes(dtype):
    packed = quantize_mxfp4.reference(quantizer_inputs(np.float32))
    want = dequantize_mxfp4.reference(packed["codes"], packed["scales"], dtype=dtype)["x"]
    got = dequantize_mxfp4(packed["codes"], packed["scales"], dtype=dtype)
    seen = ~np.isnan(want)
    return np.array_equal(got, want, equal_nan=True) and np.array_equal(np.signbit(got[seen]), np.signbit(want[seen]))


def attends(queries, keys, causal, dtype):
    """Against the reference; scales differ from row to row and block to block, and later keys score higher."""
    rng = np.random.default_rng(11)
    q, k, v = (rng.standard_normal((1, 2, n, DIM), dtype=np.float32) for n in (queries, keys, keys))
    k *= np.linspace(0.5, 2, keys, dtype=np.float32)[:, None]
    q[..., 32:] *= 2
    k[..., :32] *= np.exp2(rng.integers(-1, 2, (keys, 1)), dtype=np.float32)
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    arguments = dict(scale=DIM**-0.5, causal=causal)
    out, lse = attention_mxfp4_bf16(q, k, v, out_f32=True, lse=True, **arguments)
    want = attention_mxfp4_bf16.reference(q, k, v, out_f32=True, lse=True, **arguments)
    checks = attention_mxfp4_bf16.check({"out_f32": out, "lse": lse}, want)
    return not any(missed for _, missed in checks.values())


def passes(kernel, case):
    """A declared case, against the reference."""
    example = kernel.example(case)
    got, want = kernel(**example), kernel.reference(**example)
    results = dict(zip(want, got if isinstance(got, tuple) else (got,)))
    return not any(missed for _, missed in kernel.check(results, want).values())


def declared_cases(name):
    """Checks by name: every case of the smallest variant."""
    kernel = KERNELS[name]
    cases = [case for case in kernel.cases if kernel.unit_name(case.axes) == kernel.units[0].name]
    return {case.id: lambda case=case: passes(kernel, case) for case in cases}


CHECKS = {
    **{
        name: {
            "float32": lambda name=name: quantizes(name, np.float32),
            "bfloat16": lambda name=name: quantizes(name, ml_dtypes.bfloat16),
            "another rule": lambda name=name: quantizes(name, np.float32, rule=1),
        }
        for name in QUANTIZERS
    },
    "dequantize_mxfp4": {
        "float32": lambda: dequantizes(np.float32),
        "float16": lambda: dequantizes(np.float16),
    },
    ATTENTION: {
        "ragged": lambda: attends(70, 130, False, np.float32),
        "causal": lambda: attends(40, 72, True, ml_dtypes.bfloat16),
        "rows without keys": lambda: attends(136, 40, True, np.float16),
    },
    **{name: declared_cases(name) for name in DECLARED},
}


@pytest.mark.parametrize("kernel", CHECKS)
def test_the_unpatched_copy_passes(modules, tmp_path, kernel):
    modules(compile_with(None, kernel, tmp_path))
    assert what_fails(kernel) is None


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_bug_is_caught(modules, tmp_path, bug):
    modules(compile_with(bug, bug.kernel, tmp_path))
    assert what_fails(bug.kernel) is not None


def test_there_are_enough():
    """At least four bugs in each part of the kernels."""
    parts = [bug.part for bug in BUGS]
    assert {part: parts.count(part) >= 4 for part in parts} == dict.fromkeys(("quantizer", "loads", "mma", "softmax", "options", "around", "operands"), True)
