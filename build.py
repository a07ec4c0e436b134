"""Compile kernels_cu/*.cu into ptxrt/modules/: nvcc, ptxas and fatbinary of one CUDA 13.0 toolkit.

A *unit* is one compilation: a `.cu` file, or one variant of it. A file declares variants with lines such as
`VARIANTS(dim, 32, 64)` at top level; each value is compiled with `-DVARIANT_dim=VALUE` into a unit NAME_dimVALUE.
`VARIANTS(dim dim_v, 64 64, 192 128)` names combinations of two axes, NAME_dim192_dim_v128 for the last. Several such
lines mean all combinations of them. Each unit becomes

    UNIT.ptx              the compute_120f text that ptxas assembles for the `native` machine
    UNIT.fatbin           that text assembled for sm_120a and for sm_121a
    UNIT.portable.ptx     the compute_90 text
    UNIT.portable.fatbin  that text assembled for sm_90, and the compute_80 text for sm_80
    UNIT.compute_80.ptx   the compute_80 text, for every other GPU
    UNIT.json             the record: sources with their hashes, flags, compiler, registers, spills; of every file its
                          size and hash; of every text the parameters and launch constants of its entries

The same sources and compiler give the same bytes on every machine: paths in the texts are relative, and the one
identifier that nvcc derives from the absolute path is replaced. A unit is stale if the hashes of its source, the
headers it includes, its flags or its own files differ from the record. A fresh tree needs no compiler. A different
compiler makes nothing stale: run `--clean` first to compile everything with it.

`python build.py --help` lists the options. As a hatchling build hook this file compiles the kernels into a wheel. It
uses only the standard library and imports nothing from ptxrt.
"""

import argparse
import concurrent.futures
import difflib
import functools
import hashlib
import itertools
import json
import lzma
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent
SOURCES = ROOT / "kernels_cu"
MODULES = ROOT / "ptxrt" / "modules"

TOOLKIT = "13.0"
TOOLKIT_PINS = (
    ROOT / "requirements" / "toolkit.txt"
)  # the toolkit's wheels; without `cccl`, cuda_bf16.h does not compile

NVCC_FLAGS = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", "-Werror", "all-warnings"]
# Since C++17 libstdc++'s <cmath> includes the special functions: an eighth of the time of a small unit. This guard
# leaves them out. It changes no byte of a text, so records do not name it.
QUICKER_FLAGS = ["-D_GLIBCXX_BITS_SPECFUN_H=1"]
# Texts that the emulator runs have line numbers. In binaries they would make up two thirds of the wheel.
LINES_FLAG = "-lineinfo"
PTXAS_FLAGS = ["-suppress-debug-info"]
# The figures of machine code that tests compare. A quick build does not assemble a text again that they were read from.
CODE_RECORD = ROOT / "tests" / "sass_figures.json"
RECIPE = 2  # increase it when this file makes other bytes from the same sources and flags


class Target(NamedTuple):
    """One PTX text that nvcc writes, and the targets that ptxas assembles it for."""

    compute: str  # the virtual architecture of the text
    cubins: tuple  # the real architectures it is assembled for
    native: bool  # whether spills and the kind of the MMAs are checked
    keep: str  # suffix of the text's file
    emulated: bool  # whether the emulator runs the text

    @property
    def lines(self):
        """Return the flag for line numbers if the emulator runs the text."""
        return [LINES_FLAG] if self.emulated else []


# Text with `.target sm_120f` assembles for both members of the family; sm_120a text is refused for sm_121a.
TARGETS = (
    Target("compute_120f", ("sm_120a", "sm_121a"), True, ".ptx", True),
    Target("compute_90", ("sm_90",), False, ".portable.ptx", True),
    Target("compute_80", ("sm_80",), False, ".compute_80.ptx", False),
)
PACKED_TEXTS = (TARGETS[0].keep, TARGETS[2].keep)  # those in a wheel: for the emulator, and for other GPUs


class Extent(NamedTuple):
    """How much of a unit is built."""

    name: str  # the name in records
    texts: tuple  # the virtual architectures that nvcc compiles for
    fatbins: dict  # suffix -> contents: real architectures, or the text of a virtual one
    lines: bool = True  # whether texts that the emulator runs have line numbers

    def outputs(self, unit):
        """Return the names of the files that a build of this extent writes for a unit, except its record."""
        return [
            unit.unit + suffix for suffix in [t.keep for t in TARGETS if t.compute in self.texts] + list(self.fatbins)
        ]

    def holds(self, other):
        """Return whether a build of this extent includes another one."""
        return EXTENTS.index(self) >= EXTENTS.index(other)


# PTX_ONLY serves the emulator on native texts. KNOWN serves tests of a text whose machine code is on record: the text
# stands in place of the code. QUICK serves tests: code for one card, and a text that newer GPUs compile themselves.
# FULL serves releases.
PTX_ONLY = Extent("ptx", ("compute_120f",), {})
KNOWN = Extent(
    "known", ("compute_120f", "compute_90"), {".fatbin": ("compute_120f",), ".portable.fatbin": ("compute_90",)}
)
QUICK = Extent("quick", ("compute_120f", "compute_90"), {".fatbin": ("sm_120a",), ".portable.fatbin": ("compute_90",)})
FULL = Extent(
    "full",
    ("compute_120f", "compute_90", "compute_80"),
    {".fatbin": ("sm_120a", "sm_121a"), ".portable.fatbin": ("sm_90", "sm_80")},
)
EXTENTS = (PTX_ONLY, KNOWN, QUICK, FULL)
LAUNCH_INTS = 9  # threads[3], shared_bytes, tile[3], min_blocks, spill_bytes
SHARED_BYTES, SPILL_BYTES = 3, 8  # indices of these


# ---------------------------------------------------------------------------------------------------------------------
# Errors


class BuildFailure(Exception):
    """The build cannot continue; the message says what to do."""


class ToolchainMissing(BuildFailure):
    """No CUDA 13.0 toolkit, or no host compiler, was found."""


class HostCompilerMissing(ToolchainMissing):
    """nvcc was found, and no host compiler, which no wheel contains."""


class CompileFailure(BuildFailure):
    """nvcc, ptxas or fatbinary refused its input."""


class SpillFailure(BuildFailure):
    """Native code spills more registers than its KERNEL declares."""


class PerformanceFailure(BuildFailure):
    """ptxas reports that it serialized or degraded an instruction."""


class ContractFailure(BuildFailure):
    """A compiled text does not meet what the rest of the project relies on."""


# ---------------------------------------------------------------------------------------------------------------------
# Units


class Unit(NamedTuple):
    """One compilation of one source file."""

    name: str  # the kernel: the stem of its .cu file
    unit: str  # NAME, or NAME_axisvalue for a variant
    variant: dict  # axis -> value
    source: Path

    @property
    def defines(self):
        return [f"-DUNIT={self.unit}", *(f"-DVARIANT_{axis}={value}" for axis, value in self.variant.items())]


def variants_of(text):
    """Return the combinations of a source's VARIANTS lines, as dicts; [{}] without such a line."""
    lines = []
    for axes, values in re.findall(r"^VARIANTS\(([\w\s]+),([^)]*)\)", text, re.MULTILINE):
        lines.append([list(zip(axes.split(), map(int, value.split()), strict=True)) for value in values.split(",")])
    return [dict(itertools.chain.from_iterable(choice)) for choice in itertools.product(*lines)]


def find_units(sources):
    """Return every unit of the sources, in order of name and variant."""
    units = []
    for source in sorted(sources.glob("*.cu")):
        try:
            variants = variants_of(source.read_text(encoding="utf-8"))
        except ValueError as error:  # of the text's encoding, too
            raise BuildFailure(
                f"{source}: {error}; expected UTF-8, and VARIANTS(axes, values) with a number for each "
                "axis, as in VARIANTS(dim dim_v, 64 64, 192 128)"
            ) from error
        for variant in variants:
            suffix = "".join(f"_{axis}{value}" for axis, value in variant.items())
            units.append(Unit(source.stem, source.stem + suffix, variant, source))
    if not units:
        raise BuildFailure(f"no .cu file in {sources}")
    return units


def select(units, wanted):
    """Return the units that the `--only` arguments name: NAME, NAME[axis=value,...] or a unit's own name."""
    if not wanted:
        return units
    chosen = set()
    for word in wanted:
        match = re.fullmatch(r"(\w+)(?:\[([\w=, ]+)\])?", word)
        if not match:
            raise BuildFailure(f"--only {word}: expected NAME or NAME[axis=value]")
        name, inside = match.groups()
        parts = [part.strip().split("=", 1) for part in inside.split(",")] if inside else []
        if any(len(part) < 2 for part in parts):
            raise BuildFailure(f"--only {word}: expected NAME or NAME[axis=value]")
        pairs = dict(parts)
        hits = [
            u.unit
            for u in units
            if name in (u.name, u.unit) and all(str(u.variant.get(axis)) == value for axis, value in pairs.items())
        ]
        if not hits:
            near = difflib.get_close_matches(name, sorted({u.name for u in units} | {u.unit for u in units}), 4, 0.4)
            raise BuildFailure(f"--only {word}: no such unit; near: {', '.join(near) or 'none'}; --list shows all")
        chosen.update(hits)
    return [u for u in units if u.unit in chosen]


# ---------------------------------------------------------------------------------------------------------------------
# Toolchain


class Toolchain(NamedTuple):
    """The three programs of one toolkit."""

    nvcc: str
    ptxas: str
    fatbinary: str
    version: str  # of nvcc, e.g. 13.0.88
    top: str  # the toolkit's root: where its headers lie
    origin: str  # how it was found, for messages


def environment(path=None):
    """Return the environment for the compilers, without variables that add flags or translate messages."""
    hidden = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
    variables = {key: value for key, value in os.environ.items() if key not in hidden} | {"LC_ALL": "C"}
    if path:
        variables["PATH"] = f"{path}{os.pathsep}{variables.get('PATH', '')}"
    return variables


def output_of(command, cwd=None, path=None):
    """Run a command with `path` first on its PATH; return (exit code, standard output and error together)."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environment(path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
        errors="replace",
    )
    return done.returncode, done.stdout


def toolkit_folders():
    """Yield (folder, origin) of all places where a toolkit's programs may be, best first."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        yield Path(home) / "bin", "CUDA_HOME"
    on_path = shutil.which("nvcc")
    if on_path:
        yield Path(on_path).parent, "PATH"
        if Path(on_path).is_symlink():
            yield Path(on_path).resolve().parent, "PATH"
    for folder in sys.path:
        for binaries in sorted((Path(folder or ".") / "nvidia").glob("*/bin")):
            yield binaries, "PyPI"


def find_toolchain():
    """Return the first CUDA 13.0 toolkit; ToolchainMissing lists what was found and what to do."""
    seen = []
    for folder, origin in toolkit_folders():
        programs = [shutil.which(name, path=str(folder)) for name in ("nvcc", "ptxas", "fatbinary")]
        if not all(programs):
            seen.append(f"{folder} ({origin}) lacks nvcc, ptxas or fatbinary, or they are not executable")
            continue
        _, text = output_of([programs[0], "--version"])
        release = re.search(r"release (\d+\.\d+), V([\d.]+)", text)
        if not release or release[1] != TOOLKIT:
            seen.append(f"{folder} ({origin}) is {release[1] if release else 'no working nvcc'}")
            continue
        _, dry = output_of([programs[0], "--dryrun", "-ptx", "none.cu"])
        top = re.search(r"TOP=(.*)", dry)
        root = os.path.realpath(top[1].strip()) if top else str(folder.parent)
        if os.name != "nt" and not shutil.which("g++"):
            raise HostCompilerMissing("nvcc needs a host compiler and there is no g++ on PATH: install g++")
        return Toolchain(*programs, release[2], root, f"{origin}: {folder}")
    found = "".join(f"\n  seen: {line}" for line in seen)
    here = "\n  Programs of this checkout are in .venv/bin: source .venv/bin/activate"
    raise ToolchainMissing(
        f"no CUDA {TOOLKIT} toolkit found (CUDA_HOME, PATH, then PyPI wheels in this Python's environment).{found}\n"
        f"  Install CUDA {TOOLKIT} and set CUDA_HOME, or run: {shlex.quote(sys.executable)} -m pip install "
        f"--require-hashes -r {shlex.quote(str(TOOLKIT_PINS))}{here if (ROOT / '.venv').is_dir() else ''}"
    )


def needs_toolkit():
    """Return whether a build here needs the toolkit's wheels: not if all units are fresh or a toolkit is present."""
    try:
        if SOURCES.is_dir() and not stale(find_units(SOURCES), SOURCES, MODULES, FULL):
            return False
        find_toolchain()
    except HostCompilerMissing:
        raise
    except ToolchainMissing:
        return True
    return False


def toolkit_wheels():
    """Return the toolkit's wheels with versions, as requirements of a build hook: pip allows no hashes there."""
    return re.findall(r"^([\w.\[\],-]+==[\w.]+)", TOOLKIT_PINS.read_text(encoding="utf-8"), re.MULTILINE)


# ---------------------------------------------------------------------------------------------------------------------
# PTX texts


def quiet_path(path, sources, top):
    """Return the machine-independent form of a path in a `.file` directive, where nvcc writes bytes beyond ASCII as
    octal numbers."""
    if re.search(r"\\[0-7]{3}", path):
        escaped = path.encode("utf-8", "surrogateescape")
        plain = re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8) & 255]), escaped)
        path = plain.decode("utf-8", "surrogateescape")
    real = os.path.realpath(path)
    for base, name in ((sources, "kernels_cu"), (top, "cuda")):
        base = os.path.realpath(base)
        if real.startswith(base + os.sep):
            inside = Path(real[len(base) + 1 :]).as_posix()
            # Headers are under targets/PLATFORM/include in the toolkit, and under include in the PyPI wheels.
            return f"{name}/{re.sub(r'^targets/[^/]+/', '', inside) if name == 'cuda' else inside}"
    return f"system/{Path(real).as_posix().rpartition('/include/')[2].lstrip('/')}"


def reproducible(text, unit, sources, top):
    """Replace the parts of a PTX text that depend on the machine: paths, and identifiers made from the absolute path.

    nvcc puts eight hexadecimal digits, a checksum of the source's absolute path, into every mangled name with internal
    linkage, in the code and (as `.b8` numbers) in the debug strings. They are replaced by a checksum of the unit's
    name, which is still unique, and the same everywhere.
    """
    mark = hashlib.sha256(unit.unit.encode()).hexdigest()[:8]
    identifier = re.compile(r"(_INTERNAL_|_GLOBAL__N__)[0-9a-f]{8}(?=_)")

    def debug_strings(match):
        # latin-1 maps 256 bytes to 256 characters and back, so the length does not change
        plain = bytes(map(int, re.findall(r"\b\d+", match[0]))).decode("latin-1")
        numbers = iter(identifier.sub(rf"\g<1>{mark}", plain).encode("latin-1"))
        return re.sub(r"\b\d+", lambda _: str(next(numbers)), match[0])

    def file_directive(match):
        return f'{match[1]}"{quiet_path(match[2], sources, top)}"'

    text = text.replace("\r\n", "\n")
    text = identifier.sub(rf"\g<1>{mark}", text)
    text = re.sub(r"(?:^\s*\.b8 [\d, ]+\n)+", debug_strings, text, flags=re.MULTILINE)
    # Some releases of nvcc append the file's time and size.
    return re.sub(r'^(\s*\.file\s+\d+\s+)"([^"]*)"(?:,[ \d,]+)?', file_directive, text, flags=re.MULTILINE)


def entries_of(text):
    """Return the names of the entries of a PTX text."""
    return re.findall(r"\.entry\s+(\w+)\s*\(", text)


def entries_that_wait(text):
    """Return the names of the entries of a PTX text that wait for the launches ahead, so that they may begin early."""
    bodies = re.split(r"\.entry\s+(\w+)\s*\(", text)[1:]
    return {name for name, body in zip(bodies[::2], bodies[1::2], strict=True) if "griddepcontrol.wait" in body}


def launch_facts(text, unit):
    """Return {entry: nine ints} from the ENTRY_launch constants of a PTX text; ContractFailure if one is missing."""
    entries = entries_of(text)
    if not entries:
        raise ContractFailure(f"{unit.unit}: no entry; {unit.source.name} should define one with KERNEL()")
    facts = {}
    for entry in entries:
        if entry != unit.unit and not entry.startswith(unit.unit + "_"):
            raise ContractFailure(f"{unit.unit}: entry {entry} should be named {unit.unit} or {unit.unit}_DTYPE")
        constant = re.search(rf"\.const\s[^\n]*\b{entry}_launch\[(\d+)\](?:\s*=\s*\{{([^}}]*)\}})?", text)
        if not constant or int(constant[1]) != 4 * LAUNCH_INTS:
            raise ContractFailure(
                f"{unit.unit}: entry {entry} has no constant {entry}_launch[{4 * LAUNCH_INTS}]; define "
                "the entry with KERNEL()"
            )
        # nvcc omits trailing zero bytes.
        data = bytes(int(byte, 0) for byte in (constant[2] or "0").split(",")).ljust(4 * LAUNCH_INTS, b"\0")
        facts[entry] = [int.from_bytes(data[i : i + 4], "little", signed=True) for i in range(0, len(data), 4)]
    return facts


def parameters_of(text):
    """Return {entry: its parameters in order} of a PTX text, in words such as "u64.ptr f32 b8[64]@8".

    The last of these words means 64 bytes passed by value, aligned to 8.
    """
    word = re.compile(
        r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)(\s+\.ptr\b)?[^,\n]*?\w+(?:\[(\d+)\])?\s*(?:,|$)", re.MULTILINE
    )
    lists = re.findall(r"\.entry\s+(\w+)\s*\(([^)]*)\)", text)
    return {
        entry: " ".join(
            f"{kind}{'.ptr' if pointer else ''}" + (f"[{count}]@{align or 1}" if count else "")
            for align, kind, pointer, count in word.findall(inside)
        )
        for entry, inside in lists
    }


def check_block_scaled(unit, text):
    """Raise ContractFailure if a block-scaled kernel uses the portable path in its native text.

    A wrong guard on the architecture causes this without any message. Attention on pages, products of few rows, and
    products with a 16-bit operand are exempt: they multiply in 16 bits.
    """
    if (
        re.match(r"(attention_(?!paged_)|gemm_(?!few_|wide_|bf16_)|probe_).*(mxfp|nvfp)", unit.name)
        and "kind::" not in text
    ):
        raise ContractFailure(
            f"{unit.unit}: the native text has no block-scaled MMA (`kind::`); see the guard in ptx/target.cuh"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Compiling


def files_of(source, sources):
    """Return a source and the files that it includes below `sources`, for all targets, as sorted relative paths.

    A compiler would list those of one target only, and needs another pass over the source.
    """
    sources = sources.resolve()
    found, todo = set(), {source.resolve()}
    while todo:
        file = todo.pop()
        found.add(file)
        for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', file.read_text(encoding="utf-8"), re.MULTILINE):
            places = [(folder / name).resolve() for folder in (file.parent, sources)]
            todo.update([place for place in places if place.is_file() and place.is_relative_to(sources)][:1])
        todo -= found
    return sorted(file.relative_to(sources).as_posix() for file in found)


def usage(log):
    """Return {function: {registers, spill_store_bytes, ...}} from the output of `ptxas -v`; for entries and
    functions."""
    table, current = {}, None
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '(\w+)'", line):
            current = table.setdefault(match[1], {"registers": 0, "shared_bytes": 0})
        elif match := re.search(r"Function properties for (\S+)", line):
            current = table.setdefault(match[1], {})
        elif match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            current.update(zip(("stack_bytes", "spill_store_bytes", "spill_load_bytes"), map(int, match.groups())))
        elif match := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            current.update(registers=int(match[1]), shared_bytes=int(shared[1]) if shared else 0)
    return table


def check_assembly(unit, arch, log, table, facts):
    """Raise for degraded instructions, and for spills that no KERNEL declares."""
    loss = [line.strip() for line in log.splitlines() if "Potential Performance Loss" in line]
    if loss:
        raise PerformanceFailure(f"{unit.unit} on {arch}: " + "\n  ".join(loss))
    if facts is None:
        return
    for function, found in table.items():
        spilled = max(found.get("spill_store_bytes", 0), found.get("spill_load_bytes", 0))
        declared = facts[function][SPILL_BYTES] if function in facts else 0
        if spilled > declared:
            raise SpillFailure(
                f"{function} on {arch} spills {found['spill_store_bytes']} bytes of stores and "
                f"{found['spill_load_bytes']} of loads ({found.get('registers', '?')} registers); declared: "
                f"{declared}. "
                "Lower the register pressure (fewer blocks per SM, smaller tile), or declare spill_bytes in its KERNEL"
            )


class Text(NamedTuple):
    """The result of compiling one unit for one target."""

    target: Target
    text: str
    usage: dict  # arch -> entry -> registers, spills, ...
    cubins: dict  # arch -> SHA-256 of the machine code
    known: str  # the key of a text that was not assembled because its code is known, else ""
    seconds: float


def compile_text(unit, target, sources, tools, folder, extent):
    """Compile one unit for one target into `folder` and assemble the text; return a Text or raise a BuildFailure."""
    start = time.perf_counter()
    ptx = folder / f"{unit.unit}.{target.compute}.ptx"
    lines = target.lines if extent.lines else []
    arch = ["-gencode", f"arch={target.compute},code={target.compute}", *lines]
    files = ["-I", sources.name, f"{sources.name}/{unit.source.name}", "-o", ptx]
    flags = [*NVCC_FLAGS, *QUICKER_FLAGS, *unit.defines]
    code, log = output_of([tools.nvcc, "-ptx", *arch, *flags, *files], cwd=sources.parent)
    if code:
        raise CompileFailure(f"{unit.unit}: nvcc failed for {target.compute}\n{log.strip()}")
    if log.strip():
        print(log.strip(), file=sys.stderr)

    text = reproducible(ptx.read_text(encoding="utf-8"), unit, sources, tools.top)
    ptx.write_bytes(text.encode("utf-8"))
    facts = launch_facts(text, unit)
    if target.native:
        check_block_scaled(unit, text)

    if extent is QUICK and target.native and (code := known_code(unit, text, tools.version, facts)):
        return Text(target, text, *code, time.perf_counter() - start)

    tables, cubins = {}, {}
    wanted = {image for images in extent.fatbins.values() for image in images}
    for cubin in (cubin for cubin in target.cubins if cubin in wanted):
        # The cubin records the command line: use relative names and a fixed folder.
        names = [ptx.name, "-o", f"{unit.unit}.{cubin}.cubin"]
        code, log = output_of([tools.ptxas, "-v", f"-arch={cubin}", *target.lines, *PTXAS_FLAGS, *names], cwd=folder)
        if code:
            raise CompileFailure(f"{unit.unit}: ptxas failed for {cubin}\n{log.strip()}")
        table = usage(log)
        check_assembly(unit, cubin, log, table, facts if target.native else None)
        tables[cubin] = {entry: table[entry] for entry in facts}
        cubins[cubin] = hash_of(folder / names[-1], {})
    return Text(target, text, tables, cubins, "", time.perf_counter() - start)


def text_key(text, compiler):
    """Return a digest of what the machine code of a native text depends on: the text without its line numbers, the
    version of ptxas and its flags."""
    lines = [line for line in text.splitlines() if not line.startswith(("\t.loc", "\t.file"))]
    return hashlib.sha256("\n".join([compiler, *PTXAS_FLAGS, *lines]).encode()).hexdigest()


@functools.cache
def code_record():
    """Return the record of machine code; empty if it is missing, as in a copy of the sources alone."""
    try:
        return json.loads(CODE_RECORD.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {"code": {}}


def known_code(unit, text, compiler, facts):
    """Return (usage, cubins, key) of a native text whose machine code is in the record; None for another text."""
    known, arch = code_record()["code"].get(unit.unit, {}), TARGETS[0].cubins[0]
    key = text_key(text, compiler)
    if known.get("text") != key:
        return None
    usage = {}
    for entry, launch in facts.items():
        figures = code_record()[arch][entry]
        # The record keeps the larger one of the two numbers of spilled bytes.
        spilled = dict.fromkeys(("spill_store_bytes", "spill_load_bytes"), figures["spill_bytes"])
        shared_bytes = figures["shared_bytes"] - launch[SHARED_BYTES]
        usage[entry] = {"registers": figures["registers"], "shared_bytes": shared_bytes, **spilled}
    return {arch: usage}, {arch: known["cubin"]}, key


def link(unit, tools, folder, extent):
    """Write the fatbins of a unit beside its cubins."""
    for suffix, images in extent.fatbins.items():
        words = []
        for image in images:
            kind, arch = image.split("_")
            extension = "cubin" if kind == "sm" else "ptx"
            spec = f"kind={'elf' if kind == 'sm' else 'ptx'},sm={arch},file={unit.unit}.{image}.{extension}"
            words.append(f"--image3={spec}")
        # No compression here: `pack` compresses for wheels, to a sixth less than fatbinary would.
        command = [tools.fatbinary, "-64", "--compress-mode=none", f"--create={unit.unit}{suffix}", *words]
        code, log = output_of(command, cwd=folder)
        if code:
            raise CompileFailure(f"{unit.unit}: fatbinary failed\n{log.strip()}")


# ---------------------------------------------------------------------------------------------------------------------
# Records


def flags_of(unit):
    """Return all flags that affect the bytes of a unit, for its record."""
    targets = [":".join([target.compute, "+".join(target.cubins), *target.lines]) for target in TARGETS]
    return [f"recipe={RECIPE}", *targets, *NVCC_FLAGS, *(f"ptxas {flag}" for flag in PTXAS_FLAGS), *unit.defines]


def hash_of(path, cache):
    """Return the SHA-256 of a file, or None if it does not exist."""
    if path not in cache:
        cache[path] = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
    return cache[path]


def record_of(unit, modules):
    """Return the record of a built unit; None if it is missing, damaged, or lacks fields of the present version."""
    try:
        record = json.loads((modules / f"{unit.unit}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    parts = ("variant", "sources", "entries", "bytes", "sha256", "texts")
    whole = isinstance(record, dict) and all(isinstance(record.get(part), dict) for part in parts)
    return record if whole and record.get("unit") == unit.unit else None


def assembled(unit, modules):
    """Return the record of a unit that is assembled; raise BuildFailure otherwise."""
    record = record_of(unit, modules)
    if not record or extent_of(record) is PTX_ONLY:
        raise BuildFailure(f"{unit.unit} is not built: run build.py --only {unit.unit}")
    return record


def extent_of(record):
    """Return the extent of a record."""
    named = {extent.name: extent for extent in EXTENTS}
    return named.get(record.get("extent"), FULL if len(record["bytes"]) == 4 else PTX_ONLY)


def is_fresh(unit, sources, modules, extent, cache):
    """Return whether a unit's files are unchanged since they were made, with that extent, from the present sources,
    headers and flags.
    """
    record = record_of(unit, modules)
    if not record or record.get("flags") != flags_of(unit):
        return False
    built = extent_of(record)
    if (extent, built) == (QUICK, KNOWN) and record.get("known") == code_record()["code"].get(unit.unit, {}).get(
        "text"
    ):
        extent = KNOWN
    if not built.holds(extent):
        return False
    for name in extent.outputs(unit):
        file = modules / name
        # Compare the size first: it finds most changes at no cost.
        if not file.is_file() or file.stat().st_size != record["bytes"].get(name):
            return False
        if hash_of(file, {}) != record["sha256"].get(name):
            return False
    # Paths in records begin with kernels_cu/, wherever the compiled copy is.
    return all(hash_of(sources / name.split("/", 1)[1], cache) == digest for name, digest in record["sources"].items())


def stale(units, sources, modules, extent):
    """Return the units that need building."""
    cache = {}
    return [unit for unit in units if not is_fresh(unit, sources, modules, extent, cache)]


def launches_of(text, unit):
    """Return {entry: {"parameters": words, "launch": nine ints}}: what launches need of each entry, so that they need
    not parse the text. Entries that wait for the launches ahead also have "waits": True.
    """
    parameters, waits = parameters_of(text), entries_that_wait(text)
    return {
        entry: {"parameters": parameters[entry], "launch": facts} | ({"waits": True} if entry in waits else {})
        for entry, facts in launch_facts(text, unit).items()
    }


def install(unit, texts, sources, tools, folder, modules, extent):
    """Write a unit's record and move its files from the staging folder into the modules."""
    texts = sorted(texts, key=lambda item: TARGETS.index(item.target))
    if known := "".join(item.known for item in texts):
        extent = KNOWN
    for item in texts:
        (folder / f"{unit.unit}{item.target.keep}").write_bytes(item.text.encode("utf-8"))
    link(unit, tools, folder, extent)
    entries = {entry: {} for entry in entries_of(texts[0].text)}
    for item in texts:
        for arch, table in item.usage.items():
            for entry, figures in table.items():
                entries.setdefault(entry, {})[arch] = figures
    cache, outputs = {}, extent.outputs(unit)
    record = {
        "name": unit.name,
        "unit": unit.unit,
        "extent": extent.name,
        "variant": unit.variant,
        "sources": {f"kernels_cu/{name}": hash_of(sources / name, cache) for name in files_of(unit.source, sources)},
        "flags": flags_of(unit),
        "compiler": tools.version,
        "entries": entries,
        "texts": {item.target.compute: launches_of(item.text, unit) for item in texts},
        "bytes": {name: (folder / name).stat().st_size for name in outputs},
        "sha256": {name: hash_of(folder / name, cache) for name in outputs},
        # Hashes of the machine code itself: those of fatbins also depend on the other targets in them.
        "cubins": {arch: digest for item in texts for arch, digest in item.cubins.items()},
    }
    if known:
        record["known"] = known
    staged = folder / f"{unit.unit}.json"
    staged.write_bytes((json.dumps(record, indent=1) + "\n").encode("utf-8"))
    # The record is removed first and written last: a unit whose files are being replaced counts as missing, never as
    # complete.
    remove(unit.unit, modules)
    for name in [*outputs, staged.name]:
        os.replace(folder / name, modules / name)


def remove(unit, modules):
    """Remove the files of a unit, the record first; return how many were there."""
    files = [modules / (unit + suffix) for suffix in (".json", *(t.keep for t in TARGETS), *FULL.fatbins)]
    there = [file for file in files if os.path.lexists(file) and not (file.is_dir() and not file.is_symlink())]
    for file in there:
        file.unlink(missing_ok=True)
    return len(there)


def units_built(known, modules):
    """Return the units that a build of any release wrote into a folder: they have a record, or are known and their
    record is damaged.
    """
    found = []
    for file in sorted(modules.glob("*.json")):
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            record = None
        ours = (
            isinstance(record, dict)
            and record.get("unit") == file.stem
            and {"sources", "flags", "compiler"} <= record.keys()
        )
        if ours or file.stem in known:
            found.append(file.stem)
    return found


def prune(units, modules):
    """Remove the files of units that no source declares any longer."""
    known = {unit.unit for unit in units}
    for unit in units_built(known, modules):
        if unit not in known:
            print(f"removing {unit}: no source asks for it")
            remove(unit, modules)


def clean(sources, modules, wanted=()):
    """Remove what builds wrote into a folder, and the folder if nothing else is in it; print what remains. wanted: of
    these units alone, as `select` takes them.

    Targets of symbolic links are kept: a folder that is a link is refused, a file that is a link is removed as a link.
    """
    if modules.is_symlink():
        raise BuildFailure(f"{modules} is a symbolic link; name the folder itself, or remove the link")
    if not modules.is_dir():
        print(f"nothing to remove: there is no folder {modules}")
        return
    units = find_units(sources) if any(sources.glob("*.cu")) or wanted else []
    built = units_built({unit.unit for unit in units}, modules)
    if wanted:
        chosen = {unit.unit for unit in select(units, wanted)}
        built = [unit for unit in built if unit in chosen]
    count = sum(remove(unit, modules) for unit in built)
    if wanted:
        print(f"removed {count} files of {len(built)} units from {modules}")
        return
    remove_staging(modules)
    left = sorted(os.listdir(modules))
    if not left:
        modules.rmdir()
    print(
        f"removed {count} files of {len(built)} units from {modules}"
        + (f"; left what no build wrote: {', '.join(left[:9])}" if left else "")
    )


# ---------------------------------------------------------------------------------------------------------------------
# Staging


def staging_prefix():
    """Return the prefix of this process's staging folders. It names the host, because process numbers are unique only
    there."""
    return f".staging-{zlib.crc32(platform.node().encode()):08x}-{os.getpid()}-"


def remove_staging(modules):
    """Remove the staging folders of builds on this host that were killed."""
    host = staging_prefix().split("-")[1]
    for folder in modules.glob(".staging-*"):
        match = re.fullmatch(r"\.staging-([0-9a-f]{8})-(\d+)-\w+", folder.name)
        if match and match[1] == host and not folder.is_symlink() and not is_running(int(match[2])):
            shutil.rmtree(folder, ignore_errors=True)


def is_running(process):
    """Return whether a process of that number exists; on Windows, where a check might end it, whether it may exist."""
    if os.name == "nt":
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


# ---------------------------------------------------------------------------------------------------------------------
# Building


class Progress:
    """Show progress: one changing line on a terminal, plain lines elsewhere."""

    def __init__(self, total):
        self.total, self.done, self.start = total, 0, time.perf_counter()

    def step(self, what, seconds):
        self.done += 1
        line = f"[{self.done}/{self.total}] {what}  {seconds:.1f} s"
        if sys.stdout.isatty():
            end = "\n" if self.done == self.total else ""
            print(f"\r\x1b[K{line}", end=end, flush=True)
        else:
            print(line, flush=True)

    def interrupt(self):
        """End the changing line, so that other output can be printed."""
        if sys.stdout.isatty():
            print()


def cores():
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def compile_units(units, sources, modules, extent, jobs):
    """Compile the units in parallel and install each as soon as it is complete; return the failures."""
    tools = find_toolchain()
    targets = [target for target in TARGETS if target.compute in extent.texts]
    print(f"nvcc {tools.version} ({tools.origin}); units: {len(units)}, texts of each: {len(targets)}", flush=True)
    progress, failures, texts = Progress(len(units) * len(targets)), {}, {unit.unit: [] for unit in units}
    modules.mkdir(parents=True, exist_ok=True)
    remove_staging(modules)
    # On the file system of the modules, so that moving a file is atomic.
    with tempfile.TemporaryDirectory(prefix=staging_prefix(), dir=modules) as staging:
        pool = concurrent.futures.ThreadPoolExecutor(jobs)
        try:
            futures = {}
            for unit in units:
                folder = Path(staging) / unit.unit
                folder.mkdir()
                for target in targets:
                    job = pool.submit(compile_text, unit, target, sources, tools, folder, extent)
                    futures[job] = (unit, target, folder)
            for job in concurrent.futures.as_completed(futures):
                unit, target, folder = futures[job]
                try:
                    item = job.result()
                    progress.step(f"{unit.unit} {target.compute}", item.seconds)
                    texts[unit.unit].append(item)
                    if len(texts[unit.unit]) == len(targets):
                        install(unit, texts.pop(unit.unit), sources, tools, folder, modules, extent)
                except BuildFailure as failure:
                    progress.interrupt()
                    print(f"FAILED {unit.unit} {target.compute}", flush=True)
                    failures.setdefault(unit.unit, failure)  # other targets mostly fail in the same way
        finally:
            pool.shutdown(cancel_futures=True)
    return list(failures.values())


def build(sources=SOURCES, modules=MODULES, only=(), extent=FULL, jobs=None):
    """Bring the modules up to date and return (built, selected) units; raise BuildFailure with all failures."""
    sources, modules = Path(sources).resolve(), Path(modules).resolve()
    everything = find_units(sources)
    units = select(everything, only)
    todo = stale(units, sources, modules, extent)
    if todo:
        failures = compile_units(todo, sources, modules, extent, jobs or cores())
        if failures:
            kinds = {type(failure) for failure in failures}
            raise (kinds.pop() if len(kinds) == 1 else BuildFailure)("\n\n".join(map(str, failures)))
    if not only and modules.is_dir():
        prune(everything, modules)
    return todo, units


# ---------------------------------------------------------------------------------------------------------------------
# Wheels


def pack(units, modules, folder):
    """Write the files of built units that a wheel contains; return them.

    index.json has the records of all units, without fields that only a checkout needs. KERNEL.ptx.xz has the native
    texts of all units of a kernel, one after the other, and KERNEL.compute_80.ptx.xz their texts for other GPUs, all by
    `relative`. Variants of a kernel have similar texts, so that together they compress to a fraction of separate files.
    Each fatbin is compressed separately, UNIT.fatbin.xz, because a GPU loads one unit at a time. The portable texts of
    the emulator are left out.
    """
    packs, index = {}, {}
    for name in dict.fromkeys(unit.name for unit in units):
        texts = {suffix: [] for suffix in PACKED_TEXTS}
        for unit in (unit for unit in units if unit.name == name):
            record = assembled(unit, modules)
            slices = {}
            for suffix, parts in texts.items():
                parts.append(relative((modules / (unit.unit + suffix)).read_text(encoding="utf-8")).encode())
                slices[suffix] = [sum(map(len, parts[:-1])), len(parts[-1])]
            for suffix in FULL.fatbins:
                packs[folder / f"{unit.unit}{suffix}.xz"] = (modules / (unit.unit + suffix)).read_bytes()
            index[unit.unit] = {
                **{part: record[part] for part in ("name", "variant", "entries", "texts")},
                "sources": {},
                "sha256": {
                    unit.unit + suffix: record["sha256"][unit.unit + suffix] for suffix in (*texts, *FULL.fatbins)
                },
                "slices": slices,
            }
        for suffix, parts in texts.items():
            packs[folder / f"{name}{suffix}.xz"] = b"".join(parts)
    with concurrent.futures.ThreadPoolExecutor(cores()) as pool:
        for file, data in zip(packs, pool.map(compressed, packs, packs.values())):
            file.write_bytes(data)
    files = list(packs)
    files.append(folder / "index.json")
    files[-1].write_text(json.dumps({"units": index}, separators=(",", ":")), encoding="utf-8")
    return files


def relative(text):
    """Return a PTX text whose numbered names, registers and labels, count from the latest new name of their kind.

    nvcc numbers registers consecutively, so copies of an unrolled statement differ in every number. Relative numbers
    repeat, and the text compresses to a third. N is the number of the latest new name of a kind (%r, %f, $L__BB0_), at
    first 0:

        %r!    a new name: number N + 1
        %r@D   a new name: number N + D, where D may be negative
        %r~D   a name seen before: number N - D, where D may be negative
        %r5    a name seen before whose number is far from N: its number

    A name is new at its first place in an entry. `ptxrt.units.absolute` reverses this.
    """
    latest, seen = {}, set()

    def write(match):
        if match[0] == ".entry":
            seen.clear()
            return match[0]
        kind, number = match[1], int(match[2])
        ahead = number - latest.get(kind, 0)
        if (kind, number) not in seen:
            seen.add((kind, number))
            latest[kind] = number
            return f"{kind}!" if ahead == 1 else f"{kind}@{ahead}"
        return f"{kind}~{-ahead}" if abs(ahead) <= 400 else match[0]  # farther names repeat rather by number

    return re.sub(r"\.entry|(%[a-z]+|\$L__BB\d+_)(\d+)", write, text)


def compressed(file, data):
    """Return what an `.xz` file holds. Machine instructions are 16 bytes long, which the compressor is told (pb); texts
    have no such period."""
    period = 0 if file.name.endswith(".ptx.xz") else 4
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "pb": period}]
    return lzma.compress(data, filters=filters)


# ---------------------------------------------------------------------------------------------------------------------
# Reports


def print_usage(units, modules):
    """Print registers, spilled bytes (stores/loads) and shared memory of each entry on each target."""
    archs = [arch for target in TARGETS for arch in target.cubins]
    rows = []
    for unit in units:
        record = record_of(unit, modules)
        facts = {entry: launch for text in record["texts"].values() for entry, launch in text.items()}
        for entry, found in record["entries"].items():
            if not found:
                continue
            cells = [
                f"{f['registers']} {f['spill_store_bytes']}/{f['spill_load_bytes']}" if f else "-"
                for f in map(found.get, archs)
            ]
            shared = next(iter(found.values()))["shared_bytes"] + facts[entry]["launch"][SHARED_BYTES]
            rows.append([entry, *cells, f"{shared}"])
    if rows:
        print(
            "\nregisters and spilled bytes (stores/loads) by target; shared memory in bytes (native, static + dynamic)"
        )
        print_table([["entry", *archs, "shared"], *rows])


def print_sizes(units, modules):
    """Print the size of each kernel's binaries, and of its texts in the wheel, which `pack` compresses to 2 to 3 %."""
    rows = []
    for name in dict.fromkeys(unit.name for unit in units):
        of_name = [unit.unit for unit in units if unit.name == name]
        sizes = [
            sum((modules / (unit + suffix)).stat().st_size for unit in of_name)
            for suffix in (*FULL.fatbins, *PACKED_TEXTS)
        ]
        rows.append([name, len(of_name), *sizes])
    rows.append(["total", *(sum(row[i] for row in rows) for i in range(1, len(rows[0])))])
    print("\nsize of each kernel's modules, KiB")
    cells = [[name, str(count), *(f"{size / 1024:.0f}" for size in sizes)] for name, count, *sizes in rows]
    print_table([["kernel", "units", "native", "portable", "native texts", "compute_80 texts"], *cells])


def print_table(rows):
    """Print rows of cells, the first column left-aligned, the others right-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))]
        print("  " + "  ".join(cells).rstrip())


def print_list(units, sources, modules, extent):
    """Print each unit with its variant and whether it is built."""
    todo = {unit.unit for unit in stale(units, sources, modules, extent)}
    for unit in units:
        state = "fresh"
        if unit.unit in todo:
            state = "stale" if record_of(unit, modules) else "not built"
        print(f"{unit.unit:44} {state}")


# ---------------------------------------------------------------------------------------------------------------------
# Command line and build hook


def main(arguments=None):
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description="Compile kernels_cu/*.cu into ptxrt/modules/.")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="NAME",
        help="build NAME or 'NAME[axis=value]' alone (repeatable)",
    )
    parser.add_argument("--list", action="store_true", help="list the units and whether they are fresh")
    parser.add_argument("--clean", action="store_true", help="remove the files that builds wrote, or those of --only")
    parser.add_argument("--table", action="store_true", help="print the tables even when nothing was built")
    parser.add_argument("--ptx-only", action="store_true", help="write the native PTX alone: enough for the emulator")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="assemble for sm_120a alone, and only what tests read: enough for tests without a GPU",
    )
    parser.add_argument(
        "--requires",
        action="store_true",
        help="print the options with which pip must install a toolkit before a build, if any",
    )
    parser.add_argument("--sources", type=Path, default=SOURCES, metavar="DIR", help="a copy of kernels_cu")
    parser.add_argument("--out", type=Path, default=MODULES, metavar="DIR", help="where the modules go")
    parser.add_argument("--jobs", type=int, default=None, metavar="N", help="compilations at a time (default: cores)")
    options = parser.parse_args(arguments)
    if options.jobs is not None and options.jobs < 1:
        parser.error(f"argument --jobs: {options.jobs} is no number of processes; pass 1 or more")
    if options.table and (options.ptx_only or options.quick):
        parser.error("argument --table: tables are of whole builds; leave out --ptx-only and --quick")
    sources, modules = options.sources.resolve(), options.out.resolve()
    extent = PTX_ONLY if options.ptx_only else QUICK if options.quick else FULL
    try:
        if options.requires:
            print(f"--require-hashes -r {os.path.relpath(TOOLKIT_PINS)}" if needs_toolkit() else "")
        elif options.clean:
            clean(sources, options.out, options.only)
        elif options.list:
            print_list(select(find_units(sources), options.only), sources, modules, extent)
        else:
            start = time.perf_counter()
            built, units = build(sources, modules, options.only, extent, options.jobs)
            if options.table or (built and extent is FULL):
                print_usage(units, modules)
                print_sizes(units, modules)
            spent = f" in {time.perf_counter() - start:.1f} s" if built else ""
            print(f"built {len(built)} of {len(units)}{spent}, the rest fresh -> {modules}")
    except (BuildFailure, OSError) as failure:
        print(f"\n{type(failure).__name__}: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; what was finished is kept", file=sys.stderr)
        return 130
    return 0


def get_build_hook():
    """Return the hatchling hook that compiles the kernels into a wheel (called by hatchling, never by this file)."""
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface

    class KernelsHook(BuildHookInterface):
        def dependencies(self):
            # Editable installs use the modules built by `make`.
            return toolkit_wheels() if self.target_name == "wheel" and needs_toolkit() else []

        def initialize(self, version, build_data):
            if version == "editable":
                return
            _, units = build()
            self.folder = tempfile.TemporaryDirectory()
            for file in pack(units, MODULES, Path(self.folder.name)):
                build_data["force_include"][str(file)] = f"ptxrt/modules/{file.name}"

        def finalize(self, version, build_data, artifact_path):
            if version != "editable":
                self.folder.cleanup()

    return KernelsHook


if __name__ == "__main__":
    sys.exit(main())
