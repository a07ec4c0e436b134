"""The rules of the tree: which layer may use which, in kernels_cu and in the package."""

import ast
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import ptxrt

ROOT = Path(__file__).parent.parent
KERNELS = ROOT / "kernels_cu"
PACKAGE = ROOT / "ptxrt"

# What each folder of kernels_cu may include, besides headers of CUDA and of its own folder.
LAYERS = {"ptx": set(), "tile": {"ptx"}, "op": {"tile", "ptx"}, ".": {"op", "tile", "kernel.cuh"}}

# What each module of the package may import from the package. `.` is the package itself.
MODULES = {
    "errors": set(),
    "dims": set(),
    "formats": set(),
    "blocks": {"formats"},
    "sequences": set(),
    "tiles": {"blocks", "formats", "sequences"},
    "accuracy": {"errors"},
    "files": {"errors"},
    "units": {"errors"},
    "backend": {"errors"},
    "selection": {"errors", "backend", "driver", "emulator"},
    "turns": {"errors"},
    "provided": set(),
    "ptx": {"errors"},
    "pool": {"errors", "backend", "turns"},
    "staging": {"backend"},
    "driver": {"errors", "backend", "files", "pool", "staging", "turns", "units", "ptx"},
    "emulator": {"errors", "backend", "files", "turns", "units", "ptx"},
    "array": {"errors", "backend", "binder", "formats", "dlpack", "provided", "selection"},
    "copies": {"errors", "array", "formats", "ops"},
    "page_locked": {"errors", "array", "backend", "selection"},
    "dlpack": {"errors", "array", "backend", "turns"},
    "stream": {"errors", "backend", "selection"},
    "atlas": {"errors"},
    "given_registers": {"atlas", "formats"},
    "summation": {"atlas", "formats"},
    "trials": {"atlas", "errors", "formats", "given_registers", "summation"},
    "declaration": {"accuracy", "dims", "formats"},
    "binder": {"errors", "declaration", "dims", "formats"},
    "launch": {"errors", "array", "backend", "binder", "declaration", "selection"},
    "kernel": {"accuracy", "binder", "declaration", "formats", "launch", "prepared"},
    "program": {"errors", "array", "backend", "files", "formats", "launch", "selection"},
    "triton": {"errors", "program"},
    "numba": {"errors", "program"},
    "prepared": {"errors", "array", "backend", "declaration", "formats", "launch"},
    "graphs": {"errors", "array", "backend", "launch", "selection", "turns"},
    "tracing": {"backend", "describe", "launch"},
    "ops": {
        "prepared",
        "errors",
        "accuracy",
        "array",
        "atlas",
        "blocks",
        "declaration",
        "formats",
        "given_registers",
        "kernel",
        "npy",
        "sequences",
        "tiles",
    },
    "bench": {
        "errors",
        "accuracy",
        "array",
        "backend",
        "blocks",
        "describe",
        "files",
        "formats",
        "kernel",
        "launch",
        "ops",
        "prepared",
        *("declaration", "graphs", "selection", "stream", "units"),
    },
    "npy": {"errors", "files", "formats"},
    "disassembly": {"errors"},
    # Whole launches take the blocks that `launch` chooses.
    "speed": {"errors", "backend", "declaration", "disassembly", "kernel", "launch", "units"},
    "describe": {"errors", "backend", "declaration", "declaration", "kernel", "units"},
}
# Modules on top of all others: no other module imports them.
TOP = {"__init__", "__main__", "commands"}
# Imports against the direction: inside a function, or for type checkers only.
DEFERRED = {("array", "dlpack")}
POSIX_ONLY = {"fcntl", "grp", "posix", "pwd", "pty", "resource", "syslog", "termios", "tty"}

needs_sources = pytest.mark.skipif(not KERNELS.is_dir(), reason="the kernels' sources are not here")


def layer_of(path: Path) -> str:
    """The folder of kernels_cu that contains a file; "." for files at the top."""
    relative = path.relative_to(KERNELS)
    return relative.parts[0] if len(relative.parts) > 1 else "."


def included(path: Path) -> list[str]:
    """Files of kernels_cu that a file includes, relative to kernels_cu."""
    names = re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.M)
    found = []
    for name in names:
        near, far = (path.parent / name).resolve(), (KERNELS / name).resolve()
        target = near if near.exists() else far
        assert target.exists(), f"{path} includes {name}, which is not there"
        found.append(str(target.relative_to(KERNELS)))
    return found


@needs_sources
def test_includes_point_down():
    for path in sorted(KERNELS.rglob("*.cu*")):
        layer = layer_of(path)
        for target in included(path):
            top = Path(target).parts[0]
            allowed = LAYERS[layer] | ({layer} if layer != "." else set())
            if layer != ".":
                allowed = allowed | {"kernel.cuh"}
            assert top in allowed, f"{path.relative_to(ROOT)} includes {target}; {layer} may include {sorted(allowed)}"


@needs_sources
def test_asm_stands_in_ptx_alone():
    for path in sorted(KERNELS.rglob("*.cu*")):
        code = re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.S)
        if layer_of(path) != "ptx":
            assert not re.search(r"\basm\b", code), f"{path.relative_to(ROOT)} contains asm"


@needs_sources
def test_only_target_reads_the_architecture():
    for path in sorted(KERNELS.rglob("*.cu*")):
        code = re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.S)
        if path.relative_to(KERNELS) != Path("ptx/target.cuh"):
            assert "__CUDA_ARCH" not in code, f"{path.relative_to(ROOT)} reads __CUDA_ARCH"


# Kernels about lanes themselves.
LANES = {"identity", "probe", "probe_fragments", "probe_ldmatrix", "probe_registers"}


@needs_sources
def test_algorithms_ask_for_no_target_and_compute_with_no_lanes():
    """op/ takes what depends on the target or on lanes from tile/: shapes of blocks, stages, element positions."""
    for path in sorted((KERNELS / "op").glob("*.cuh")):
        code = re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.S)
        found = re.search(r"ptx::(has_\w+|architecture\w*)|\bHAS_\w+|\bsm_\d+", code)
        assert not found, f"{path.relative_to(ROOT)} asks for the target: {found.group()}"
        found = re.search(r"\b(laneid|lanemask_\w+)\b", code)
        assert not found or path.stem in LANES, f"{path.relative_to(ROOT)} computes with {found.group()}"
        assert found or path.stem not in LANES, f"{path.stem} needs no exception"


@needs_sources
def test_entry_files_hold_no_logic():
    for path in sorted(KERNELS.glob("*.cu")):
        code = re.sub(r"//[^\n]*|/\*.*?\*/|^#(if|else|endif)\b[^\n]*", "", path.read_text(), flags=re.S | re.M)
        found = re.search(r"\b(for|while|if|threadIdx)\b", code)
        assert not found, f"{path.relative_to(ROOT)} contains `{found.group()}`"


@needs_sources
def test_every_declaration_has_its_source_and_every_source_its_declaration():
    assert sorted(ptxrt.kernels()) == sorted(path.stem for path in KERNELS.glob("*.cu"))


@needs_sources
def test_variants_are_those_of_the_sources():
    for kernel in ptxrt.kernels().values():
        text = (KERNELS / f"{kernel.name}.cu").read_text()
        found = {
            axes: [tuple(map(int, value.split())) for value in values.split(",")]
            for axes, values in re.findall(r"^VARIANTS\(([\w ]+),([^)]*)\)", text, re.M)
        }
        assert found == {
            axes: [v if isinstance(v, tuple) else (v,) for v in values] for axes, values in kernel.variants.items()
        }


@needs_sources
def test_every_file_opens_with_what_lives_in_it():
    for path in sorted(KERNELS.rglob("*.cu*")):
        assert path.read_text().startswith("// "), f"{path.relative_to(ROOT)} does not open with a sentence"
    for path in sorted([*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py")]):
        assert path.read_text().startswith(('"""', "#!")), f"{path.relative_to(ROOT)} does not open with a docstring"


def package_modules():
    """The name and the files of every module of the package that has a rule."""
    for name in MODULES:
        path = PACKAGE / f"{name}.py"
        yield name, [path] if path.exists() else sorted((PACKAGE / name).rglob("*.py"))


@cache
def imports(path: Path) -> list[tuple[str, bool, bool]]:
    """For each import of a file: the top-level name, whether it is deferred, and whether it is from the package
    itself."""
    return list(_imports(path))


def _imports(path: Path):
    tree = ast.parse(path.read_text())
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    depth = len(path.relative_to(PACKAGE).parts)
    for node in ast.walk(tree):
        inside = node
        while inside in parents and not _defers(inside):
            inside = parents[inside]
        deferred = _defers(inside)
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.split(".")[0], deferred, False
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.split(".")[0], deferred, False
        elif isinstance(node, ast.ImportFrom) and node.level == depth:
            for name in [node.module.split(".")[0]] if node.module else [alias.name for alias in node.names]:
                yield name, deferred, True


def _defers(node: ast.AST) -> bool:
    """Whether the contents of a node do not run at import."""
    for_types = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return for_types or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))


def test_dependencies_of_the_package_go_one_way():
    for name, files in package_modules():
        for path in files:
            for target, deferred, ours in imports(path):
                if not ours or target == name:
                    continue
                where = f"{path.relative_to(ROOT)} imports {target}"
                if "typing" in (name, target):  # types of everything, for type checkers only
                    assert deferred, f"{where}, which names types; import it under TYPE_CHECKING"
                    continue
                assert target in MODULES[name], f"{where}; {name} may import {sorted(MODULES[name])}"
                if (name, target) in DEFERRED:
                    assert deferred, f"{where} at the top; it must not run on import"


def test_every_module_has_its_rule():
    there = {path.stem for path in PACKAGE.glob("*.py")} | {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert there - TOP - {"typing"} == set(MODULES)
    for path in sorted(set(PACKAGE.rglob("*.py")) - {PACKAGE / "__main__.py"}):  # which starts the commands
        for target, _deferred, ours in imports(path):
            assert not ours or target not in TOP - {"__init__"}, f"{path.relative_to(ROOT)} imports {target}"


def test_backends_have_what_the_protocol_lists():
    """The backends have the same members with the same parameters, and the protocol's table names each member."""
    import inspect

    from ptxrt.backend import Backend
    from ptxrt.driver import DriverBackend
    from ptxrt.emulator.backend import EmulatorBackend

    methods = {
        name: item for name, item in vars(Backend).items() if inspect.isfunction(item) and not name.startswith("_")
    }
    assert len(methods) <= 25
    table = re.findall(
        r"\w+", "".join(line.split("|")[2] for line in Backend.__doc__.splitlines() if line.count("|") == 4)
    )
    assert set(table) - {"members"} == {*methods, *Backend.__annotations__}
    for machine in (DriverBackend, EmulatorBackend):
        for name, wanted in methods.items():
            there = list(inspect.signature(getattr(machine, name)).parameters)
            assert there[: len(inspect.signature(wanted).parameters)] == list(inspect.signature(wanted).parameters), (
                machine,
                name,
            )


def test_no_module_needs_posix():
    for path in sorted(PACKAGE.rglob("*.py")):
        for target, _deferred, ours in imports(path):
            assert ours or target not in POSIX_ONLY, f"{path.relative_to(ROOT)} imports {target}"


def test_only_the_driver_module_imports_cuda():
    for path in sorted(PACKAGE.rglob("*.py")):
        for target, deferred, ours in imports(path):
            if not ours and target == "cuda":
                assert path.name == "driver.py" and deferred, f"{path.relative_to(ROOT)} imports cuda"


def test_nothing_reads_package_metadata():
    for path in sorted(PACKAGE.rglob("*.py")):
        assert "importlib.metadata" not in path.read_text(), f"{path.relative_to(ROOT)} queries package metadata"


def test_import_touches_no_cuda_and_parses_no_ptx():
    code = (
        "import sys, time, numpy; start = time.perf_counter(); import ptxrt; took = time.perf_counter() - start;"
        "print(took); print(*[m for m in sys.modules if m.split('.')[0] in ('cuda', 'ml_dtypes', 'click') or "
        "m.startswith('ptxrt.')])"
    )
    best = 1.0
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        took, loaded = done.stdout.splitlines()
        best = min(best, float(took))
        assert loaded == "ptxrt.provided"  # a module of ten lines
    assert best < 0.050


def test_the_declarations_load_without_cuda():
    code = (
        "import sys, ptxrt; ptxrt.kernels(); print(any(m.split('.')[0] == 'cuda' or m.startswith('ptxrt.ptx') for m "
        "in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_public_names_exist_and_are_listed():
    for name in ptxrt.__all__:
        assert getattr(ptxrt, name) is not None
    assert set(ptxrt.__all__) <= set(dir(ptxrt))
    with pytest.raises(AttributeError, match="no attribute 'quantise'; did you mean 'quantize'\\?"):
        ptxrt.quantise
    with pytest.raises(AttributeError, match="no attribute 'xyzzy'$"):
        ptxrt.xyzzy


def test_a_new_file_in_ops_registers_itself(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "ptxrt", ignore=shutil.ignore_patterns("modules", "__pycache__"))
    (tmp_path / "ptxrt" / "ops" / "fresh.py").write_text(
        "from ..declaration import In, Out\nfrom ..formats import f32\nfrom ..kernel import kernel\n\n\n"
        '@kernel(grid="n", cases=[dict(n=1)])\ndef fresh_kernel(x: In[f32, "n"], y: Out[f32, "n"]):\n    """Copy."""\n    y[:] = x\n'
    )
    code = "import ptxrt; print('fresh_kernel' in ptxrt.kernels(), ptxrt.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", str(tmp_path / "ptxrt" / "__init__.py")]
