"""Every bug of seeded_bugs.py, compiled into a copy of the kernels and emulated, is caught; the kernels themselves
pass.

A run compiles a sixth of the bugs (parts.py). All take ten minutes of a core.
"""

from __future__ import annotations

import re
import shutil
import warnings
from contextlib import contextmanager
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import ptxrt
from attention_restated import restated_blocks
from parts import part_of_this_run
from ptxrt import backend, units
from ptxrt.blocks import BLOCK_FORMATS
from ptxrt.emulator.backend import EmulatorBackend
from ptxrt.ops.attention import exact_attention
from ptxrt.ops.attention_kernels import OPEN, attention_mxfp4_bf16_in_kernel
from ptxrt.ops.quantizers import DEQUANTIZE, QUANTIZE, tiled
from ptxrt.tiles import tile_layout
from scripts import script
from seeded_bug_checks import chosen
from seeded_bugs import (
    ATTENTION,
    BUGS,
    FEW,
    MXFP4,
    MXFP8,
    NVFP4,
    ONE,
    PORTABLE,
    PORTABLE_FEW_ROWS,
    PRODUCT,
    SPARING,
    WIDE,
    WOVEN,
)

build = script("build.py")

KERNELS = ptxrt.kernels()
CAUGHT_BY = chosen()

ROOT = Path(__file__).parent.parent
DIM = 64
quantize_mxfp4, dequantize_mxfp4 = QUANTIZE["mxfp4"], DEQUANTIZE["mxfp4"]
QUANTIZERS = ("quantize_mxfp4", "quantize_mxfp6_e3m2", "quantize_mxfp4_columns", "quantize_nvfp4")
# Kernels that are checked by their declared cases, in the smallest variant.
DECLARED = (
    *(
        PRODUCT,
        "attention_adjusted",
        "attention_merge",
        "cast",
        "mma_rate_bf16",
        "probe_ending",
        FEW,
        ONE,
        "claim_slots",
        "append_nvfp4",
    ),
    *("norm_rows", "gate_rows", "activate_rows", "rope_rows", "argmax_rows", "append_qkv"),
    *("gemm_bf16", "gemm_few_bf16", "gemm_few_bf16_nvfp4", "gemm_few_mxfp4", "gemm_few_mxfp8", "gemm_nvfp4"),
    "pack_keys_mxfp4",
    "pack_values_nvfp4",
    "scan_keys",
    "mean_keys",
    "operand_scale",
    "row_dot",
    "less_block_means",
    "mean_scores_mxfp4",
    "expand_pages",
    "add_nonfinite",
)
UNITS = {**{name: name for name in (*QUANTIZERS, "dequantize_mxfp4", *DECLARED)}, ATTENTION: f"{ATTENTION}[dim={DIM}]"}
UNITS |= {name: f"{name}[dim={DIM}]" for name in (MXFP8, MXFP4, NVFP4, "mean_scores_mxfp4", FEW, "attention_adjusted")}
UNITS |= {
    PRODUCT: f"{PRODUCT}[dim=32]",
    "pack_keys_mxfp4": "pack_keys_mxfp4[dim=64]",
    "pack_values_nvfp4": "pack_values_nvfp4[dim=64]",
}
UNITS |= {"gemm_bf16": "gemm_bf16[tile=64]", "gemm_nvfp4": "gemm_nvfp4[tile=64]"}
UNITS |= {ONE: f"{ONE}[dim=128,held=4]"}
UNITS |= {PORTABLE_FEW_ROWS: "gemm_few_bf16", WIDE: "gemm_wide_mxfp4", WOVEN: f"{PRODUCT}[dim={DIM}]"}
UNITS |= {SPARING: "gemm_bf16[tile=128]"}
# By whether a kernel's name ends with PORTABLE: one text.
EXTENTS = {False: build.PTX_ONLY, True: build.PTX_ONLY._replace(texts=("compute_90",))}


# Appended to kernel.cuh: an entry without a macro WANTED_ENTRY becomes a template that nothing instantiates.
SELECTION = """
#undef KERNEL_EXPANDED
#define KERNEL_EXPANDED(name, ...) SECOND_OF(WANTED_##name, UNWANTED, )(name, __VA_ARGS__)
#define SECOND_OF(...) SECOND_OF_EXPANDED(__VA_ARGS__)
#define SECOND_OF_EXPANDED(a, b, ...) b
#define UNWANTED(name, ...) template <int> __device__ void name
#define WANTED(name, ...) """


def select_entries(header: Path, entries) -> None:
    """Change a copy of kernel.cuh so that these entries alone are compiled."""
    text = header.read_text()
    definition = text.split("#define KERNEL_EXPANDED(name, ...)")[1].split("\n\n")[0]
    wanted = "".join(f"#define WANTED_{entry} ~, WANTED\n" for entry in entries)
    header.write_text(f"{text}{SELECTION}{definition.lstrip()}\n{wanted}")


def units_of(kernel: str) -> list[str]:
    """The units that a kernel's checks run: those that UNITS selects."""
    return [unit.unit for unit in build.select(build.find_units(ROOT / "kernels_cu"), [UNITS[kernel]])]


def compile_with(bug, kernel: str, folder: Path, entries=()) -> Path:
    """A folder of modules from a copy of kernels_cu with one bug (or none): the texts of the units that the kernel's
    checks run. With entries, these alone, without line numbers: they take time, and no check reads them."""
    sources, modules = folder / "kernels_cu", folder / "modules"
    shutil.copytree(ROOT / "kernels_cu", sources)
    if bug is not None:
        path = sources / bug.file
        path.write_text(bug.planted_in(path.read_text()))
    only = units_of(kernel)
    if entries:
        select_entries(sources / "kernel.cuh", entries)
        only = [unit for unit in only if any(entry == unit or entry.startswith(f"{unit}_") for entry in entries)]
    extent = EXTENTS[kernel.endswith(PORTABLE)]._replace(lines=not entries)
    build.build(sources, modules, only, extent)
    return modules


def functions(text: str) -> dict[str, str]:
    """The code of each entry of a text, without line numbers and without numbers that count the entries before it."""
    text = re.sub(r"^\s*(\.loc\s.*|\$L__tmp\w+:|// \.globl.*)\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"(\$L__BB|__local_depot)\d+", r"\1", text)
    code = re.split(r"^(?=\s*\.(?:file|section)\s)", text, maxsplit=1, flags=re.MULTILINE)[0]
    return {
        found[1]: found[2]
        for found in re.finditer(r"^\.visible \.entry (\w+)(.*?)(?=^\.visible|\Z)", code, re.M | re.S)
    }


@contextmanager
def on_modules(kernel: str, folder: Path | None = None):
    """Run calls on the modules of a folder, or on the project's, in the text that the kernel names. Kernels whose warps
    wait for stages run with race checks."""
    own = units.MODULES, units.CHECKOUT
    races = kernel in (ATTENTION, MXFP8, MXFP4, NVFP4, PORTABLE_FEW_ROWS, SPARING, WIDE, WOVEN)
    text = "portable" if kernel.endswith(PORTABLE) else "native"
    before = backend.enter(backend=EmulatorBackend(schedule="warps", races=races, ptx=text))
    if folder is not None:
        units.MODULES = units.CHECKOUT = folder  # the patched sources must not count as stale
    units.check_fresh.cache_clear()
    try:
        yield
    finally:
        units.MODULES, units.CHECKOUT = own
        units.check_fresh.cache_clear()
        backend.leave(before, "backend")


def quantizer_inputs(dtype):
    """Two runs and a ragged tail: values over a wide range, ties, signed zeros, a zero block, a NaN and an infinity."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal((17, 96)).astype(np.float32) * np.exp2(rng.integers(-9, 9, (17, 1)), dtype=np.float32)
    x[1, :8] = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    x[1, 8:32] = -0.0
    x[2, 32:64] = 0
    x[3, 40], x[4, 70] = np.nan, -np.inf
    return x.astype(dtype)


def fails(kernel: str, name: str) -> bool:
    """Whether a check of a kernel fails; an emulator fault is a failure."""
    try:
        return not CHECKS[kernel][name]()
    except ptxrt.EmulatorFault:
        return True


def what_fails(kernel: str) -> str | None:
    """Return the name of the first check of a kernel that fails, or None."""
    return next((name for name in CHECKS[kernel] if fails(kernel, name)), None)


def quantizes(name, dtype, rule=0, in_tiles=False):
    """Whether bytes equal the reference's. Input is a matrix; for a kernel of columns a batch of one, or of two with
    scales in tiles."""
    inputs = [quantizer_inputs(dtype)]
    if name.endswith("_columns"):
        inputs = [np.ascontiguousarray(inputs[0].T)[None].repeat(2 if in_tiles else 1, axis=0)]
    if "nvfp4" in name:
        inputs.append(np.array([0.003], np.float32))
    axes = dict(zip(("outer", "rows", "cols")[-inputs[0].ndim :], inputs[0].shape))
    options = tiled(name.removeprefix("quantize_").removesuffix("_columns"), axes) if in_tiles else {}
    want = KERNELS[name].reference(*inputs, **options, rule=rule)
    got = KERNELS[name](*inputs, **options, rule=rule)
    return all(np.array_equal(a, b) for a, b in zip(got, want.values()))


def dequantizes(dtype):
    packed = quantize_mxfp4.reference(quantizer_inputs(np.float32))
    want = dequantize_mxfp4.reference(packed["codes"], packed["scales"], dtype=dtype)["x"]
    got = dequantize_mxfp4(packed["codes"], packed["scales"], dtype=dtype)
    seen = ~np.isnan(want)
    return np.array_equal(got, want, equal_nan=True) and np.array_equal(np.signbit(got[seen]), np.signbit(want[seen]))


def attends(queries, keys, causal, dtype):
    """Whether results equal the reference's. Scales differ between rows and blocks, and later keys score higher."""
    rng = np.random.default_rng(11)
    q, k, v = (rng.standard_normal((1, 2, n, DIM), dtype=np.float32) for n in (queries, keys, keys))
    k *= np.linspace(0.5, 2, keys, dtype=np.float32)[:, None]
    q[..., 32:] *= 2
    k[..., :32] *= np.exp2(rng.integers(-1, 2, (keys, 1)), dtype=np.float32)
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    q = q[:, :, None]
    arguments = dict(scale=DIM**-0.5, left=OPEN, right=0 if causal else OPEN, sequences=1, splits=1)
    out, lse = attention_mxfp4_bf16_in_kernel(q, k, v, out_f32=True, lse=True, **arguments)
    want = attention_mxfp4_bf16_in_kernel.reference(q, k, v, out_f32=True, lse=True, **arguments)
    checks = attention_mxfp4_bf16_in_kernel.check({"out_f32": out, "lse": lse}, want)
    return not any(missed for _, missed in checks.values())


def in_blocks(format: str, q, k, v, **arguments):
    """Run `attention_FORMAT` on arrays quantized on the host; return its results and the operands' values.

    q: [1, heads_kv, group, queries, dim]; global scales of 2, 0.5 and 4 multiply the values of codes and tiles.
    """
    block, level = BLOCK_FORMATS[format], ()
    if block.two_level:
        level = (1.0,)
    codes, scales = block.encode(q, *level)
    tiles = {f"{role}_tiles": tile_layout(format, role, DIM).encode(x) for role, x in (("k", k), ("v", v))}
    globals = dict(q_global=2.0, k_global=0.5, v_global=4.0)
    shape = dict(keys=k.shape[2], dim=DIM, dim_v=DIM, cols=DIM, sequences=1, splits=1, scale=DIM**-0.5)
    given = {name: np.float32([value]) for name, value in globals.items()}
    results = KERNELS[f"attention_{format}"](codes, scales, *tiles.values(), **given, **shape, **arguments)
    held = [block.decode(codes, scales, *level)]
    held += [tile_layout(format, role, DIM).decode(tiles[f"{role}_tiles"])[:, :, : k.shape[2]] for role in "kv"]
    held = [x * np.float32(level) for x, level in zip(held, globals.values())]
    return results, [held[0].reshape(1, -1, *q.shape[3:]), *held[1:]]


def attends_in_blocks(format, queries=20, window=(200, 0)):
    """Compare with the restatement, with every kind of tile: hidden, partly hidden, plain, causal and ragged.

    Without a window no tile is hidden.

    There are more tiles than stages; scales differ between rows and blocks, and later keys score higher.
    """
    rng = np.random.default_rng(13)
    shapes = (1, 2, queries), (1, 330), (1, 330)
    q, k, v = (rng.standard_normal((1, *shape, DIM), dtype=np.float32) for shape in shapes)
    k *= np.linspace(0.5, 2, 330, dtype=np.float32)[:, None] * np.exp2(
        rng.integers(-1, 2, (330, 2)), dtype=np.float32
    ).repeat(DIM // 2, axis=1)
    q *= np.exp2(rng.integers(-1, 2, (1, 1, 2, queries, 1)), dtype=np.float32)
    v *= np.exp2(rng.integers(-2, 3, (DIM,)), dtype=np.float32)
    left, right = window or (OPEN, OPEN)
    (out, lse), held = in_blocks(format, q, k, v, left=left, right=right, out_bf16=True, lse=True)
    want, want_lse = restated_blocks(*held, format, window=window)
    close = np.abs(lse.reshape(want_lse.shape) - want_lse) <= 1e-4 * np.maximum(1, np.abs(want_lse))
    return ptxrt.compare(out.reshape(want.shape), want).relative_l2 <= 2.5e-3 and close.all()


def keeps_the_tail(format):
    """One key of the first tile scores 11 in units of log2 above 1023 others, which have a third of the weight and all
    nonzero values. Compare with float64 attention of the operands' values."""
    rng = np.random.default_rng(17)
    q, k, v = (np.zeros((1, *shape, DIM), np.float32) for shape in ((1, 1, 3), (1, 1024), (1, 1024)))
    q[..., :2], k[..., 1] = 1, 4 * rng.standard_normal(1024)  # weights that round up and down
    k[..., 5, :2] = 11 * np.log(2) * DIM**0.5, 0
    v += rng.standard_normal((1, 1, 1, DIM), np.float32) + rng.standard_normal(v.shape, np.float32) / 4
    v[..., 5, :] = 0
    out, held = in_blocks(format, q, k, v, left=OPEN, right=OPEN, out_f32=True)
    return (
        ptxrt.compare(out.reshape(1, 1, 3, DIM), exact_attention(*held)[0]).relative_l2 <= 0.1
    )  # one weight's rounding error; 1 if the tail is lost


def raises_rows_one_by_one(format, steps=14):
    """In each tile but the first the score of one row grows by 14 in units of log2, each by a key in a different place
    of its tile."""
    rows = np.arange(16)
    keys = 64 * (rows + 1) + rows * 37 % 64
    q, k, v = (np.zeros((1, *shape, DIM), np.float32) for shape in ((1, 1, 16), (1, 17 * 64), (1, 17 * 64)))
    q[0, 0, 0, rows, rows], k[0, 0, keys, rows] = 1, steps * np.log(2) * DIM**0.5
    v[0, 0, keys, rows] = 1
    out, held = in_blocks(format, q, k, v, left=OPEN, right=OPEN, out_f32=True)
    return (
        ptxrt.compare(out.reshape(1, 1, 16, DIM), exact_attention(*held)[0]).relative_l2 <= 0.1
    )  # one weight's rounding error; 1 if a row misses its maximum


def keeps_rows_to_themselves(format):
    """The bits of a row do not depend on another row of its warp whose maximum grows by 16, while that of the row
    grows by 1.5, in units of log2. Weights of 2^-15 to 2^-17 of the maximum have other codes or scales under another
    running maximum."""
    rng, step = np.random.default_rng(19), np.log(2) * DIM**0.5
    q, k, v = (np.zeros((1, *shape, DIM), np.float32) for shape in ((1, 1, 2), (1, 512), (1, 512)))
    q[..., 0], q[..., 0, 1] = 1, 1
    k[..., 0] = -step * rng.uniform(15, 17, 512)
    k[..., 3, 0], k[..., 70, 0], k[..., 71, 1] = 0, 1.5 * step, 40 * step
    v += rng.standard_normal(v.shape, np.float32)
    alone, both = (in_blocks(format, rows, k, v, left=OPEN, right=OPEN, out_f32=True)[0] for rows in (q[..., 1:, :], q))
    return np.array_equal(alone[..., 0, :], both[..., 1, :])


def passes(kernel, case):
    """Whether a declared case equals the reference."""
    example = kernel.example(case)
    want, got = kernel.reference(**example), kernel(**example)
    results = dict(zip(want, got if isinstance(got, tuple) else (got,)))
    return not any(missed for _, missed in kernel.check(results, want).values())


def merges_as_a_tree():
    """Merging pairs of segments, and then the results, gives the same bits as merging all at once, also with a
    remainder."""
    merge, rng = KERNELS["attention_merge"], np.random.default_rng(3)
    for splits in (2, 4, 7, 16, 29, 64, 330):
        given = [
            rng.standard_normal((splits, 1, 1, 3, 8), dtype=np.float32),
            np.float32(rng.integers(-9, 9, (splits, 1, 1, 3))),
        ]
        given.append(rng.uniform(1, 100, given[1].shape).astype(np.float32))
        wanted = dict(out_f32=True, merged_max=True, merged_sum=True)
        whole, pairs = merge(*given, **wanted, dim_v=8), []
        for first in range(0, splits, 2):
            pairs.append(merge(*(np.ascontiguousarray(x[first : first + 2]) for x in given), **wanted, dim_v=8))
        nodes = [np.stack(parts) for parts in zip(*pairs)]
        if any((got != want).any() for got, want in zip(merge(*nodes, **wanted, dim_v=8), whole)):
            return False
    return True


def attends_as_declared(format, *words):
    """Whether the declared cases of attention in a format pass, those of the compiled variant whose ids contain these
    words."""
    kernel = KERNELS[f"attention_{format}"]
    cases = [case for case in kernel.cases if case.axes["dim"] == DIM and all(word in case.id for word in words)]
    assert cases
    return all(passes(kernel, case) for case in cases)


def declared_cases(name):
    """The checks of a kernel by name: every case of its units."""
    kernel, names = KERNELS[name], units_of(name)
    cases = [case for case in kernel.cases if kernel.unit_name(case.axes) in names]
    return {case.id: lambda case=case: passes(kernel, case) for case in cases}


def keeps_to_its_group(name):
    """With groups of 5 and 3 rows, only the rows of the first are written, despite later blocks."""
    a, b = (np.ones((n, rows, 40), ml_dtypes.bfloat16) for n, rows in ((1, 10), (2, 24)))
    out = ptxrt.to_device(np.full((1, 10, 24), 5, np.float32))
    variant = {} if "few" in name else dict(tile=64)
    KERNELS[name](a, b, group_starts=np.array([0, 5, 8], np.int32), least_rows=5, out_f32=out, **variant)
    got = out.to_numpy()[0]
    return (got[:5] == 40).all() and (got[5:] == 5).all()


def multiplies_few(rows, name="gemm_few_bf16", cols=24, depth=616):
    """Whether a product of some rows in bf16 equals the reference's, with several steps of a ragged depth."""
    rng, kernel = np.random.default_rng(23), KERNELS[name]
    a, b = (rng.standard_normal((1, n, depth)).astype(ml_dtypes.bfloat16) for n in (rows, cols))
    want, got = kernel.reference(a, b, out_f32=True), kernel(a, b, out_f32=True)
    return not any(missed for _, missed in kernel.check({"out_f32": got}, want).values())


def multiplies_wide(rows):
    """Whether the declared case of wide blocks with so many rows, and a residual, passes."""
    kernel = KERNELS["gemm_wide_mxfp4"]
    (case,) = (x for x in kernel.cases if x.axes["rows"] == rows and x.axes["batch"] == 2)
    return passes(kernel, case)


def walks(cols, depth):
    """Whether a product whose blocks walk over large tiles equals the reference's."""
    rng, kernel = np.random.default_rng(23), KERNELS["gemm_bf16"]
    a, b = (rng.standard_normal((1, n, depth)).astype(ml_dtypes.bfloat16) for n in (520, cols))
    want, got = kernel.reference(a, b, out_f32=True), kernel(a, b, out_f32=True, tile=128, multiprocessors=1)
    return not any(missed for _, missed in kernel.check({"out_f32": got}, want).values())


def attends_in_woven_tiles(queries, keys):
    """Whether attention of bf16 equals the reference's, where copies of the next tile stand between MMAs."""
    rng = np.random.default_rng(19)
    q, k, v = (rng.standard_normal((1, 1, n, DIM)).astype(ml_dtypes.bfloat16) for n in (queries, keys, keys))
    arguments = dict(scale=DIM**-0.5, left=OPEN, right=OPEN, sequences=1, splits=1, out_f32=True, lse=True)
    kernel = KERNELS[PRODUCT]
    want, got = kernel.reference(q[:, :, None], k, v, **arguments), kernel(q[:, :, None], k, v, **arguments)
    return not any(missed for _, missed in kernel.check(dict(zip(("out_f32", "lse"), got)), want).values())


def attends_in_splits(group, queries):
    """Whether parts of attention of bf16 equal the reference's, in several half blocks of rows for each of two heads."""
    rng, kernel = np.random.default_rng(20), KERNELS[PRODUCT]
    q, k, v = (
        rng.standard_normal((1, 2, *rows, DIM)).astype(ml_dtypes.bfloat16)
        for rows in ((group, queries), (330,), (330,))
    )
    wanted = dict(partial=True, row_max=True, row_sum=True)
    arguments = dict(scale=DIM**-0.5, left=OPEN, right=OPEN, sequences=1, splits=3, **wanted)
    want, got = kernel.reference(q, k, v, **arguments), kernel(q, k, v, **arguments)
    return not any(missed for _, missed in kernel.check(dict(zip(want, got)), want).values())


CHECKS = {
    **{
        name: {
            "float32": lambda name=name: quantizes(name, np.float32),
            "bfloat16": lambda name=name: quantizes(name, ml_dtypes.bfloat16),
            "another rule": lambda name=name: quantizes(name, np.float32, rule=1),
            "tiles": lambda name=name: quantizes(name, np.float32, in_tiles=True),
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
    MXFP8: {
        "tiles of every kind": lambda: attends_in_blocks("mxfp8"),
        "sink": lambda: keeps_the_tail("mxfp8"),
        "rows one by one": lambda: raises_rows_one_by_one("mxfp8"),
        "rows by a few steps": lambda: raises_rows_one_by_one("mxfp8", 3),
    },
    MXFP4: {
        "tiles of every kind": lambda: attends_in_blocks("mxfp4"),
        "packed": lambda: attends_as_declared("mxfp4", "key_starts", "lse"),
        "smoothed": lambda: attends_as_declared("mxfp4", "mean_scores"),
        "rows one by one": lambda: raises_rows_one_by_one("mxfp4"),
    },
    NVFP4: {
        "tiles of every kind": lambda: attends_in_blocks("nvfp4"),
        "two half blocks": lambda: attends_in_blocks("nvfp4", 40),
        "sums of plain tiles": lambda: attends_in_blocks("nvfp4", window=None),
        "sink": lambda: keeps_the_tail("nvfp4"),
        "rows one by one": lambda: raises_rows_one_by_one("nvfp4"),
        "rows to themselves": lambda: keeps_rows_to_themselves("nvfp4"),
        "parts": lambda: attends_as_declared("nvfp4", "row_max"),
    },
    **{name: declared_cases(name) for name in DECLARED},
    PORTABLE_FEW_ROWS: {
        "three fragments of eight": lambda: multiplies_few(20),
        "seven fragments of eight": lambda: multiplies_few(50),
    },
    WIDE: {
        "a ragged half": lambda: multiplies_wide(33),
        "several blocks of columns": lambda: multiplies_wide(50),
    },
    SPARING: {"a walk to columns that end amid a tile": lambda: walks(270, 200)},
    WOVEN: {
        "tiles of 64 keys": lambda: attends_in_woven_tiles(130, 200),
        "splits of groups": lambda: attends_in_splits(3, 50),
        "splits of one query": lambda: attends_in_splits(5, 1),
    },
}
CHECKS["attention_merge"] |= {"the tree": lambda: merges_as_a_tree()}
for name in ("gemm_bf16", "gemm_few_bf16"):
    CHECKS[name] = {"one group": lambda name=name: keeps_to_its_group(name), **CHECKS[name]}


@pytest.mark.parametrize("kernel", CHECKS)
def test_the_kernel_passes(kernel):
    """A declared case is checked here if a bug meets it; all declared cases pass in test_kernels.py."""
    elsewhere = declared_cases(kernel) if kernel in DECLARED else {}
    met = {CAUGHT_BY[str(bug)][0] for bug in BUGS if bug.kernel == kernel and str(bug) in CAUGHT_BY}
    with on_modules(kernel):
        assert [name for name in CHECKS[kernel] if name in met or name not in elsewhere if fails(kernel, name)] == []


def test_an_unpatched_copy_is_the_kernel(tmp_path):
    """This ensures that failures in a copy come from its bug."""
    text = "quantize_mxfp4.ptx"
    assert (compile_with(None, "quantize_mxfp4", tmp_path) / text).read_bytes() == (units.MODULES / text).read_bytes()


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_a_bug_has_its_place(bug):
    text = (ROOT / "kernels_cu" / bug.file).read_text()
    assert bug.planted_in(text) != text


@pytest.mark.parametrize("kernel", ["norm_rows", ATTENTION])
def test_selected_entries_are_those_of_the_kernel(tmp_path, kernel):
    """The code of an entry does not depend on the others in its unit."""
    (unit,) = units_of(kernel)
    whole = functions((units.MODULES / f"{unit}.ptx").read_text())
    entry = list(whole)[1]
    text = (compile_with(None, kernel, tmp_path, [entry]) / f"{unit}.ptx").read_text()
    assert len(whole) > 1 and functions(text) == {entry: whole[entry]}


@pytest.mark.parametrize("bug", part_of_this_run(BUGS, 6), ids=str)
def test_bug_is_caught(tmp_path, bug):
    """Its first check runs on a unit with the entries that it launches. Only if that passes, the whole unit meets
    all checks; one that fails must pass without the bug."""
    check, *entries = CAUGHT_BY.get(str(bug), (None,))
    if check in CHECKS[bug.kernel]:
        with on_modules(bug.kernel, compile_with(bug, bug.kernel, tmp_path / "entries", entries)):
            if fails(bug.kernel, check):
                return
        warnings.warn(
            f"its first check misses it: take {bug} out of seeded_bug_checks.json and find another", stacklevel=1
        )
    with on_modules(bug.kernel, compile_with(bug, bug.kernel, tmp_path / "unit")):
        caught = what_fails(bug.kernel)
    assert caught is not None
    with on_modules(bug.kernel):
        assert not fails(bug.kernel, caught)


def test_each_bug_has_a_check_to_begin_with():
    """Those of bugs and checks that there are; `python tests/seeded_bug_checks.py` adds the missing ones."""
    assert list(CAUGHT_BY) == [str(bug) for bug in BUGS]
    assert [bug for bug in BUGS if CAUGHT_BY[str(bug)][0] not in CHECKS[bug.kernel]] == []


def test_there_are_enough():
    """At least four bugs in each part of the kernels."""
    parts = [bug.part for bug in BUGS]
    assert {part: parts.count(part) >= 4 for part in parts} == dict.fromkeys(
        (
            "quantizer",
            "loads",
            "mma",
            "softmax",
            "blocks",
            "options",
            "around",
            "operands",
            "ending",
            "products",
            "produce",
            "cache",
        ),
        True,
    )
