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
from .names import (
    complete_names,
    find_units,
    manual_of,
    public_classes,
    public_functions,
    public_modules,
    summary_of,
)

ARCHS = ("sm_120a", "sm_121a", "sm_90", "sm_80")
NO_BREAK = "\0"


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
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    columns = shutil.get_terminal_size().columns if is_terminal else 10_000
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
    """List functions, classes and kernels."""
    from .. import kernels

    functions = {name: summary_of(manual_of(function)) for name, function in public_functions().items()}
    summaries = {name: kernel.summary for name, kernel in kernels().items()}
    classes = {
        name: summary_of(manual_of(value))
        for name, value in public_classes().items()
        if not issubclass(value, Exception)
    }
    if json_output:
        print_json({"functions": functions, "classes": classes, "kernels": summaries})
        return
    width = max(map(len, {**functions, **summaries}))
    in_lines("functions that `run` takes", {name: functions[name] for name in FUNCTIONS}, width)
    in_lines("\nfunctions", {name: words for name, words in functions.items() if name not in FUNCTIONS}, width)
    in_lines("\nclasses", classes, width)
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
    """Show a function, a class or a kernel: arguments, meaning, tolerances, cases, and the compiler's figures.

    NAME is that of a function, a class, a kernel, one of its variants as in 'attention_bf16[dim=64,dim_v=64]', or a
    unit such as attention_bf16_dim64_dim_v64.
    """
    from .. import kernels, units

    if ptx and sass:
        raise click.UsageError("--ptx and --sass were given; give one of them")
    functions, classes = public_functions(), public_classes()
    if name in (modules := public_modules()) and not ptx and not sass:
        click.echo(f"ptxrt.{name}\n\n{inspect.getdoc(modules[name])}")
        return
    if name in classes:
        if ptx or sass:
            raise click.UsageError(f"{name} is a class; --ptx and --sass are of kernels")
        show_class(name, classes[name])
        return
    if name in functions and not ptx and not sass:
        click.echo(f"{called(name, functions[name])}\n\n{manual_of(functions[name])}")
        if name not in kernels():
            return
        click.echo("\nThe kernel of that name:\n")
    elif name in functions and name not in kernels():
        raise click.UsageError(f"{name} is a function; --ptx and --sass are of kernels")
    kernel, chosen = find_units(name, [*functions, *classes])
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


class _Written(str):
    """An annotation, which a signature shows as it is written, without quotes."""

    __repr__ = str.__str__

    @classmethod
    def of(cls, annotation) -> "_Written":
        return cls(
            annotation.strip("'\"") if isinstance(annotation, str) else getattr(annotation, "__name__", annotation)
        )


def called(name: str, function) -> str:
    """Return a name with the signature of a function or class, in lines that fit a terminal."""
    signature = inspect.signature(function)
    words: list[str] = []
    for p in signature.parameters.values():
        if p.kind is p.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        words.append(str(p if p.annotation is p.empty else p.replace(annotation=_Written.of(p.annotation))))
    returned = signature.return_annotation
    end = "" if returned is signature.empty else f" -> {_Written.of(returned)}"
    text = f"{name}({', '.join(word.replace(' ', NO_BREAK) for word in words)}){end.replace(' ', NO_BREAK)}"
    lines = textwrap.wrap(text, 110, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace(NO_BREAK, " ")


def show_class(name: str, shown: type) -> None:
    """Print a class with its docstring, then its public methods and properties with theirs."""
    click.echo(f"class {called(name, shown) if '__init__' in vars(shown) else name}\n\n{manual_of(shown)}")
    for title, member in vars(shown).items():
        function = getattr(member, "fget", None) or getattr(member, "__func__", member)
        if title.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
            continue
        place = f"{name}.{title}"
        click.echo("\n" + (place if isinstance(member, property) else called(place, getattr(shown, title))) + "\n")
        click.echo(textwrap.indent(manual_of(function), "    "))


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
