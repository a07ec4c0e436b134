"""The command line as a whole: its group, the options before a command, and how results are printed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import click

from .. import __version__


class Commands(click.Group):
    """A group that reports an error of this package, or of a file, as one message without a traceback."""

    def invoke(self, ctx):
        from ..errors import PtxError

        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # the reader closed the pipe; click then ends without a message
        except (PtxError, OSError) as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option(
    "--machine",
    type=click.Choice(["native", "portable", "emulator"]),
    help="Where kernels run; see `devices`. Default: PTXRT_MACHINE, else the best available machine.",
)
@click.option(
    "--arithmetic",
    type=click.Choice(["float64", "hardware"]),
    help="How the emulator rounds the sums of tensor cores: float64 (the default) or as the hardware does.",
)
@click.option(
    "--ptx",
    type=click.Choice(["native", "portable"]),
    help="Which build's PTX the emulator executes: native (the default) or portable.",
)
@click.option("--no-checks", is_flag=True, help="Do not track uninitialized memory on the emulator.")
@click.option("--profile", is_flag=True, help="Print a profile of the emulator to stderr.")
@click.option("--bank-conflicts", is_flag=True, help="List on stderr the lines with bank conflicts, on the emulator.")
@click.option(
    "--coverage",
    is_flag=True,
    help="List on stderr the entries that ran on the emulator and the lines of them that did not run.",
)
@click.version_option(__version__, prog_name="ptxrt")
@click.pass_context
def main(ctx, machine, arithmetic, ptx, no_checks, profile, bank_conflicts, coverage):
    """Low-precision CUDA kernels on NumPy files: on a GPU, or without one on an emulator.

    \b
    ptxrt list                                            what there is
    ptxrt run quantize --x x.npy -o q.npz --compare       run it on a file
    ptxrt run quantize --help                             its options
    """
    options = {"arithmetic": arithmetic, "ptx": ptx, "checks": False if no_checks else None}
    options |= {"profile": profile or None, "bank_conflicts": bank_conflicts or None}
    ctx.meta[_COVERAGE] = coverage
    ctx.obj = machine, {name: value for name, value in options.items() if value is not None}


def choose_machine(ctx, **of_emulator) -> None:
    """Make the machine of the options before the command, and of `of_emulator`, the current one. Options without a
    machine select the emulator.
    """
    machine, options = ctx.obj
    options = {**options, **of_emulator}
    coverage = ctx.meta[_COVERAGE]
    if machine or options or coverage:
        from .. import using

        if coverage and machine not in (None, "emulator"):
            raise click.UsageError(f"--coverage is counted on the emulator, not on {machine}")
        backend = ctx.with_resource(using(machine or "emulator", **options))  # left when the command ends
        if "profile" in options:
            ctx.call_on_close(lambda: print_lines(backend.emulator.profile.table()))
        if options.keys() & {"races", "strict"}:
            ctx.call_on_close(lambda: print_lines(backend.emulator.undecided))
        if coverage or "bank_conflicts" in options:
            from ..emulator.check import conflicts_table, coverage_table

            tables = [coverage_table] * coverage + [conflicts_table] * ("bank_conflicts" in options)
            ctx.call_on_close(lambda: print_lines(line for table in tables for line in table(backend.emulator)))


_COVERAGE = "ptxrt.coverage"


def print_lines(lines) -> None:
    """Write lines to stderr, apart from the output of a command."""
    for line in lines:
        click.echo(line, err=True)


def plain(value: Any) -> Any:
    """Return the value in types of JSON: sequences as lists, infinities and NaN as strings."""
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def print_json(value: Any) -> None:
    click.echo(json.dumps(plain(value), indent=1))


def as_json(function):
    return click.option("--json", "json_output", is_flag=True, help="Print one JSON object instead.")(function)
