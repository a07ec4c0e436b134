"""`list`, `show`, `devices` and `completion`."""

from __future__ import annotations

import inspect
import shutil
import sys
import textwrap
from collections.abc import Mapping

import click

from .functions import FUNCTIONS
from .group import as_json, main, print_json
from .names import complete_names, find_units, manual_of, public_functions, summary_of

ARCHS = ("sm_120a", "sm_121a", "sm_90", "sm_80")


@main.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell):
    """Print the shell code that completes commands, options, and names of functions, kernels and formats.

    \b
    bash   eval "$(ptxrt completion bash)"         in ~/.bashrc
    zsh    eval "$(ptxrt completion zsh)"          in ~/.zshrc
    fish   ptxrt completion fish | source         in ~/.config/fish/config.fish
    """
    from click.shell_completion import get_completion_class

    click.echo(get_completion_class(shell)(main, {}, "ptxrt", "_PTXRT_COMPLETE").source())


def in_lines(title: str, rows: Mapping[str, str], width: int) -> None:
    """Print a title and a line with a text for each name. Lines wrap at spaces to the width of the terminal."""
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
    indent = " " * (width + 4)
    click.echo(title)
    for name, words in rows.items():
        room = max(columns, len(indent) + 20)
        lines = textwrap.wrap(words, room - len(indent), break_long_words=False, break_on_hyphens=False) or [""]
        click.echo(f"  {name:{width}}  {lines[0]}")
        for line in lines[1:]:
            click.echo(indent + line)


@main.command("list")
@as_json
def list_command(json_output):
    """List functions and kernels."""
    from .. import kernels

    functions = {name: summary_of(manual_of(function)) for name, function in public_functions().items()}
    summaries = {name: kernel.summary for name, kernel in kernels().items()}
    if json_output:
        print_json({"functions": functions, "kernels": summaries})
        return
    width = max(map(len, {**functions, **summaries}))
    in_lines("functions that `run` takes", {name: functions[name] for name in FUNCTIONS}, width)
    in_lines("\nfunctions", {name: words for name, words in functions.items() if name not in FUNCTIONS}, width)
    groups: dict[str, dict[str, str]] = {}
    for name, kernel in kernels().items():
        groups.setdefault(kernel.__module__.rpartition(".")[2].removesuffix("_kernels"), {})[name] = summaries[name]
    for group, rows in groups.items():
        in_lines(f"\nkernels: {group.replace('_', ' ')}", rows, width)


@main.command()
@click.argument("name", shell_complete=complete_names)
@click.option(
    "--ptx", is_flag=True, help="Print the PTX text instead: the native one, or after `ptxrt --ptx portable` the other."
)
@click.option(
    "--sass",
    type=click.Choice(ARCHS),
    is_flag=False,
    flag_value=ARCHS[0],
    help="Print the machine code instead, for sm_120a where no target is named; needs NVIDIA's cuobjdump.",
)
@click.pass_context
def show(ctx, name, ptx, sass):
    """Show a function or a kernel: arguments, meaning, tolerances, cases, and the compiler's figures.

    NAME is that of a function, a kernel, one of its variants as in 'attention_bf16[dim=64,dim_v=64]', or a unit such as
    attention_bf16_dim64_dim_v64.
    """
    from .. import kernels, units

    functions = public_functions()
    if name in functions and not ptx and not sass:
        click.echo(f"{name}{inspect.signature(functions[name])}\n\n{manual_of(functions[name])}")
        if name not in kernels():
            return
        click.echo("\nThe kernel of that name:\n")
    elif name in functions and name not in kernels():
        raise click.UsageError(f"{name} is a function; --ptx and --sass are of kernels")
    kernel, chosen = find_units(name, functions)
    for unit in chosen:
        if ptx:
            click.echo(units.text(unit.name, ctx.obj[1].get("ptx") == "portable"))
        if sass:
            from ..disassembly import sass_of

            with units.fatbin_file(unit.name, sass in ("sm_90", "sm_80")) as fatbin:
                click.echo(sass_of(fatbin, sass))
    if not ptx and not sass:
        from ..describe import kernel_lines

        for line in kernel_lines(kernel, chosen):
            click.echo(line)


@main.command()
@as_json
def devices(json_output):
    """List the machines, whether each is available, and why it is not."""
    from ..errors import PtxError
    from ..selection import default_machine, default_problem, machines

    found, default = machines(), None
    problem = default_problem()
    if problem is None:
        try:
            default = default_machine()
        except PtxError as error:
            problem = str(error)
    if problem is not None:
        click.echo(f"no default: {problem}", err=True)
    if json_output:
        print_json({"default": default, "problem": problem, "machines": {m.name: vars(m) for m in found.values()}})
        return
    for machine in found.values():
        click.echo(f"{machine}{' (the default)' if machine.name == default else ''}")
