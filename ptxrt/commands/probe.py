"""`probe`: measurements of matrix instructions on the current machine, compared with the atlas."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from .group import choose_machine, main, plain
from .layout import complete_kinds

_SHOWN = 20  # differences of one case that are printed; a file has all findings
_OTHERS = (
    "probe_ldmatrix",
    "probe_fragments",
)  # the probes that --all adds: matrices in shared memory, and the tile code of the kernels


@main.command()
@click.argument("kind", required=False, shell_complete=complete_kinds)
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Every kind, loads and stores of matrices, and the tile code of the kernels.",
)
@click.option("--json", "file", type=click.Path(path_type=Path, dir_okay=False), help="Write all findings to a file.")
@click.pass_context
def probe(ctx, kind, everything, file):
    """Measure where a matrix instruction holds its elements and scales, and compare with the atlas.

    \b
    ptxrt probe mxf4
    ptxrt probe --all --json findings.json

    Without KIND all kinds of `ptxrt layout` are probed. A probe assumes no layout: it sets one element of A at a time
    and observes which outputs change. Then it measures the value of every code, which bits of a container matter, and
    the rule by which products add up: it names the candidates that reproduce every sum to the bit. It prints each
    difference from the atlas, and from the emulator with the arithmetic of tensor cores; the exit status is 1 if there
    is one. On the emulator a probe finds the emulator's rules. On the portable machine, if the chip lacks the
    instruction, it finds those of the code in its place. Neither result holds for other silicon.
    """
    from .. import atlas, kernels
    from ..files import check_writeable, write_atomically
    from ..ops.probes import GIVEN_FORMS, cases_of
    from ..selection import current

    if kind is not None and everything:
        raise click.UsageError(f"name {kind} or pass --all")
    if file:
        check_writeable(file)
    chosen = [atlas.find(kind)] if kind else list(atlas.KINDS.values())
    choose_machine(ctx)
    work = [(each.name, *cases_of(each)) for each in chosen]
    if everything:
        work += [(name, kernels()[name], list(kernels()[name].cases)) for name in _OTHERS]
    report: list[dict[str, Any]] = []
    for name, kernel, cases in work:
        for case in cases:
            report.append(examine(name, kernel, case))
            say(report[-1])
        for form, (of, type) in enumerate(GIVEN_FORMS):
            for look in (codes, sums) if of == name else ():
                report.append(beside_the_emulator(look, form, atlas.KINDS[of], type))
                say(report[-1])
    failed = sum(bool(row["differences"] or row["error"]) for row in report)
    machine = current().name
    click.echo(
        f"{len(report) - failed} of {len(report)} findings are as the atlas and the emulator have them, on {machine}"
    )
    if file:
        write_atomically(file, as_file(report, machine))
    if failed:
        sys.exit(1)


def examine(name: str, kernel, case) -> dict[str, Any]:
    """Run one case of a probe; return its findings, and their differences from the atlas in words."""
    import numpy as np

    from ..errors import LaunchError
    from ..launch import run as launch

    arguments = kernel.example(case, 0)
    want = kernel.reference(**arguments)
    row: dict[str, Any] = {
        "kind": name,
        "probe": kernel.name,
        "case": named(case),
        "found": {},
        "told": [],
        "differences": [],
        "error": None,
    }
    try:
        row["found"] = launch(kernel, (), arguments)
    except LaunchError as error:
        return {**row, "error": str(error)}
    for output, found in row["found"].items():
        found = row["found"][output] = np.asarray(found)
        for place in map(tuple, np.argwhere(found != want[output]).tolist()):
            where = ", ".join(map(str, place))
            row["differences"].append(
                f"{output}[{where}] is {meaning(found[place])}, in the atlas {meaning(want[output][place])}"
            )
    return row


def beside_the_emulator(look, form: int, kind, type: str) -> dict[str, Any]:
    """Return the findings of `look` on one form of mma.sync with given registers, and their differences from the
    emulator, which runs the same text with the tensor cores' arithmetic."""
    import numpy as np

    from .. import using
    from ..errors import LaunchError
    from ..launch import run as launch
    from ..ops.probes import probe_mma_registers
    from ..selection import current

    machine = current()
    on_emulator = machine.name == "emulator"
    text = machine.ptx if on_emulator else machine.name

    def multiply(a, b, c, scales):
        return np.asarray(launch(probe_mma_registers, (), dict(a=a, b=b, c=c, scales=scales, form=form))["d"])

    def emulate(*registers):
        with using("emulator", ptx=text, arithmetic="hardware"):
            return multiply(*registers)

    row = {"kind": kind.name, "probe": probe_mma_registers.name, "case": f"{look.__name__} of {type}"}
    try:
        return row | compared(look, kind, type, emulate if on_emulator else multiply, None if on_emulator else emulate)
    except LaunchError as error:
        return {**row, "found": {}, "told": [], "differences": [], "error": str(error)}


def compared(look, kind, type: str, multiply, emulate=None) -> dict[str, Any]:
    """Return the findings of `look` on multiply(a, b, c, scales), also in words, and the results that differ from those
    of `emulate`.

    Without `emulate` nothing is compared.
    """
    import numpy as np

    found, told, meaning_of = look(multiply, kind, type)
    row: dict[str, Any] = {"found": found, "told": told, "differences": [], "error": None}
    want = look(emulate, kind, type, say=False)[0] if emulate else {}
    for output, known in want.items():
        known = known.reshape(-1)  # without the codes that the emulator refuses, which are last
        measured = found[output].reshape(-1)[: len(known)]
        row["differences"] += [
            f"{meaning_of(output, place)}: D is {number(kind, measured[place])}, in the emulator "
            f"{number(kind, known[place])}"
            for place in np.flatnonzero(measured != known).tolist()
        ]
    return row


def codes(multiply, kind, type: str, say: bool = True):
    """Try codes and scales in products with 1; return D by operand, lines, and a function that names the place of a
    result.
    """
    from .. import trials

    found = {each.operand: each for each in trials.codes(multiply, kind, type)}
    return (
        {operand: each.d for operand, each in found.items()},
        trials.told_by_codes(kind, type, list(found.values())) if say else [],
        lambda operand, place: f"{operand}, code {found[operand].codes[place]:#x}",
    )


def sums(multiply, kind, type: str, say: bool = True):
    """Try sums whose operands distinguish the rules; return D, the rules that agree, and a function that names the
    place of a sum.
    """
    from .. import trials

    operands = trials.operands(kind, type)
    d = trials.sums(multiply, kind, type, operands)
    lines = trials.told_by_sums(kind, type, operands, d) if say else []
    return {"d": d}, lines, lambda output, place: f"trial {place // 128}, row {place // 8 % 16}, column {place % 8}"


def number(kind, bits) -> str:
    """A result in words: its bits and its number."""
    import numpy as np

    from .. import given_registers

    return f"{int(bits):#x} ({given_registers.sums(kind, np.array([bits]))[0]:g})"


def named(case) -> str:
    """The name of a case: the types of A and B, and of the accumulators if these are f16."""
    from ..ops.probes import CONTAINERS, FORMS

    numbers = case.scalars
    if "form" in numbers:
        return FORMS[numbers["form"]].types
    if "format_a" not in numbers:
        return case.id
    words = f"{CONTAINERS[numbers['format_a']]} x {CONTAINERS[numbers['format_b']]}"
    return words + (" in f16" if numbers.get("in_f16") else "") + (", scales" if case.optional else "")


def meaning(number) -> str:
    """A finding in words."""
    return {-1: "nothing", -2: "several, or another product"}.get(int(number), str(int(number)))


def say(row: dict[str, Any]) -> None:
    """Print the findings of one case."""
    wrong = row["differences"]
    verdict = click.style("DIFFERS", fg="red") if wrong or row["error"] else click.style("ok     ", fg="green")
    click.echo(f"{verdict} {row['kind']}  {row['probe']} {row['case']}".rstrip())
    for line in row["told"]:
        click.echo(f"        {line}")
    for line in [row["error"]] if row["error"] else wrong[:_SHOWN]:
        click.echo(f"    {line}")
    if len(wrong) > _SHOWN:
        click.echo(f"    and {len(wrong) - _SHOWN} more")


def as_file(report: list[dict[str, Any]], machine: str) -> bytes:
    """Return all findings as JSON. An array is its shape and its int32 numbers in row-major order, by zlib, in
    base64.
    """
    import base64
    import json
    import platform
    import zlib

    from .. import __version__, machines

    def packed(array) -> dict[str, Any]:
        data = zlib.compress(array.astype("<i4").tobytes(), 9)
        return {"shape": list(array.shape), "int32": base64.b64encode(data).decode()}

    rows = [{**row, "found": {name: packed(array) for name, array in row["found"].items()}} for row in report]
    about = {name: str(each) for name, each in machines().items()}
    whole = {
        "ptxrt": __version__,
        "machine": machine,
        "machines": about,
        "system": platform.platform(),
        "findings": rows,
    }
    return (json.dumps(plain(whole), indent=1) + "\n").encode()
