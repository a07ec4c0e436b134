"""`check`: the declared cases of kernels against their references."""

from __future__ import annotations

import sys
import time
from typing import Any

import click

from .group import as_json, choose_machine, main, print_json
from .names import complete_kernels, find_units


@main.command()
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=complete_kernels)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the random inputs.")
@click.option("--races", is_flag=True, help="Check for races on the emulator, with one case of each size.")
@click.option(
    "--strict",
    is_flag=True,
    help="Check for races and run both schedules on the emulator, with one case of each size.",
)
@as_json
@click.pass_context
def check(ctx, names, seed, races, strict, json_output):
    """Run the declared cases of every kernel, or of those named, against their references.

    NAME may be a variant, as in 'attention_bf16[dim=64,dim_v=64]'.
    """
    from .. import kernels

    chosen = [find_units(name) for name in names] or [(kernel, kernel.units) for kernel in kernels().values()]
    choose_machine(ctx, **({"strict": True} if strict else {"races": True} if races else {}))
    rows = []
    for kernel, units in chosen:
        asked = [case for case in kernel.cases if kernel.unit_for({**kernel.fixed, **case.axes}) in units]
        for case in one_of_each_size(asked) if races or strict else asked:
            row = check_case(kernel, case, seed)
            rows.append(row)
            if not json_output:
                verdict = click.style("ok    ", fg="green") if row["ok"] else click.style("FAILED", fg="red")
                click.echo(f"{verdict} {kernel.name} {case.id}  {row['figures']}  {row['seconds']:.2f} s")
    failed = sum(not row["ok"] for row in rows)
    if json_output:
        print_json({"cases": rows, "failed": failed})
    else:
        machine = f" on {rows[-1]['machine']}" if rows else ""
        click.echo(f"{len(rows) - failed} of {len(rows)} cases passed{machine}")
    if failed:
        sys.exit(1)


def one_of_each_size(cases) -> list:
    """Return the first case of each shape. Formats and optional outputs do not change how threads synchronize."""
    first: dict[Any, Any] = {}
    for case in cases:
        first.setdefault(tuple(case.axes.items()), case)
    return list(first.values())


def check_case(kernel, case, seed: int) -> dict[str, Any]:
    """Run one declared case. A fault during the launch is a failed case; other errors stop the check."""
    from .. import last_launches
    from ..errors import BuildError, LaunchError, MachineError
    from ..launch import run as launch

    arguments = kernel.example(case, seed)
    want = kernel.reference(**arguments)  # before the launch, which may change arguments in place
    start = time.perf_counter()
    row = {"kernel": kernel.name, "case": case.id, "machine": None}
    try:
        results = launch(kernel, (), arguments)
    except (BuildError, MachineError):
        raise
    except LaunchError as error:
        return {**row, "ok": False, "figures": str(error), "seconds": time.perf_counter() - start}
    seconds = time.perf_counter() - start
    checked = kernel.check(results, want)
    missed = [f"{name}: {words}" for name, (_, misses) in checked.items() for words in misses]
    figures = ", ".join(f"{name} {short(figures)}" for name, (figures, _) in checked.items())
    row["machine"] = last_launches()[-1].machine
    return {**row, "ok": not missed, "figures": "; ".join(missed) or figures, "seconds": seconds}


def short(figures) -> str:
    """Return a comparison as a short text."""
    return "equal" if figures.mismatches == 0 else f"relative L2 {figures.relative_l2:.1e}"
