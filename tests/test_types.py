"""Type checkers know the public interface: they report exactly the wrong calls of a file."""

import inspect
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import ptxrt
from ptxrt import typing

HERE = Path(__file__).parent
CALLS = HERE / "data" / "typed_calls.py"


def marked() -> set[int]:
    """The lines marked as wrong."""
    lines = CALLS.read_text(encoding="utf-8").splitlines()
    return {number for number, line in enumerate(lines, 1) if "# wrong: " in line}


def report(*command: str) -> str:
    """The output of a checker; its exit status only tells whether there are errors."""
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=HERE.parent, capture_output=True, text=True, timeout=500
    )
    assert done.returncode in (0, 1), done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def needs(module: str) -> None:
    if find_spec(module) is None:
        pytest.skip(f"{module} is not installed: pip install 'ptxrt[types]'")


def test_mypy_reports_wrong_calls_alone(tmp_path):
    needs("mypy")
    found = report(
        "mypy",
        "--strict",
        "--no-error-summary",
        "--hide-error-context",
        "--cache-dir",
        str(tmp_path),
        "--output",
        "json",
        str(CALLS),
    )
    errors = [json.loads(line) for line in found.splitlines()]
    assert {Path(error["file"]).name for error in errors} == {CALLS.name}, [
        error for error in errors if Path(error["file"]).name != CALLS.name
    ][:3]
    at = {error["line"] for error in errors if error["severity"] == "error"}
    assert at == marked(), f"not reported: {sorted(marked() - at)}; reported though right: {sorted(at - marked())}"


def test_pyright_reports_wrong_calls_alone():
    needs("pyright")
    found = json.loads(report("pyright", "--outputjson", "--pythonpath", sys.executable, str(CALLS)))
    errors = [item for item in found["generalDiagnostics"] if item["severity"] == "error"]
    at = {item["range"]["start"]["line"] + 1 for item in errors}
    lines = {
        line for item in errors for line in range(item["range"]["start"]["line"] + 1, item["range"]["end"]["line"] + 2)
    }
    assert at <= marked() and marked() <= lines, (
        f"not reported: {sorted(marked() - lines)}; reported though right: {sorted(at - marked())}"
    )


# Function -> (type of its options, keyword arguments that only its overloads name).
OPTIONS = {
    "attention": (typing.AttentionOptions, ("return_lse", "normalize")),
    "attention_paged": (typing.PagedOptions, ("return_lse", "normalize")),
    "matmul": (typing.MatrixOptions, ("out_format",)),
    "matmul_grouped": (typing.GroupedOptions, ("out_format",)),
    "rmsnorm": (typing.RootNormOptions, ("residual", "format")),
    "layernorm": (typing.NormOptions, ("residual", "format")),
    "swiglu": (typing.GateOptions, ("format",)),
    "gelu": (typing.ActivationOptions, ("format",)),
    "rope": (typing.RotationOptions, ("format",)),
    "append_qkv": (typing.AppendOptions, ("heads", "q_format")),
    "take_rows": (typing.ProducedOptions, ("format",)),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_arguments(name):
    """The option types and the overloads name exactly the keyword arguments of the function."""
    options, beside = OPTIONS[name]
    arguments = [
        p.name for p in inspect.signature(getattr(ptxrt, name)).parameters.values() if p.kind is p.KEYWORD_ONLY
    ]
    named = {key for part in (options, *options.__mro__) for key in getattr(part, "__annotations__", ())}
    assert sorted({*named, *beside}) == sorted(arguments)


def test_types_name_what_there_is():
    """The literal types have exactly the words that functions accept."""
    from typing import get_args

    from ptxrt.blocks import BLOCK_FORMATS
    from ptxrt.ops.attention import ATTENTION
    from ptxrt.ops.endings import ENDINGS
    from ptxrt.ops.operands import ROLES
    from ptxrt.ops.produce import ROUNDINGS
    from ptxrt.ops.quantized import SCALE_LAYOUTS
    from ptxrt.ops.rotation import STYLES
    from ptxrt.selection import MACHINES
    from ptxrt.tiles import TILE_DIMS

    assert set(get_args(typing.BlockFormatName)) == set(BLOCK_FORMATS)
    assert set(get_args(typing.OperandFormatName)) == set(TILE_DIMS)
    assert set(get_args(typing.AttentionFormatName)) == {word for formats in ATTENTION for word in formats[:2]}
    assert set(get_args(typing.ScaleRule)) == {rule for block in BLOCK_FORMATS.values() for rule in block.rules}
    assert set(get_args(typing.ScaleLayout)) == set(SCALE_LAYOUTS) and set(get_args(typing.Role)) == set(ROLES)
    assert set(get_args(typing.MachineName)) == set(MACHINES)
    assert set(get_args(typing.ProducedFormatName)) == set(ENDINGS) and set(get_args(typing.Rounding)) == set(ROUNDINGS)
    assert set(get_args(typing.RotationStyle)) == set(STYLES)


def test_every_public_name_is_exported_to_type_checkers():
    text = Path(ptxrt.__file__).read_text(encoding="utf-8")
    missing = [
        name for name in ptxrt.__all__ if f"import {name} as {name}\n" not in text and f"def {name}(" not in text
    ]
    assert not missing, missing
