"""`run`: one command for each function and each declared kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from .functions import FUNCTION_COMMANDS, FUNCTIONS
from .group import main
from .job import Job, file_option, job_command, read_inputs
from .names import find_kernel


class RunGroup(click.Group):
    """One subcommand for each function and each declared kernel, made when it is used."""

    def list_commands(self, ctx):
        from .. import kernels

        return [*FUNCTIONS, *kernels()]

    def get_command(self, ctx, name):
        if name in FUNCTIONS:
            return FUNCTION_COMMANDS[name]()
        return kernel_command(find_kernel(name, FUNCTIONS))


@main.group(cls=RunGroup)
def run():
    """Run a function or a kernel on .npy files."""


_DTYPE_HELP = "Convert floating-point inputs to this format first."


def kernel_command(kernel) -> click.Command:
    """Make the command of a declared kernel: a file for each input, numbers for scalars and axes, flags for optional
    outputs.
    """
    fixed = {axis for a in kernel.inputs if not a.optional for axis in a.shape.axes} | set(kernel.fixed)
    may_fix = {axis for a in kernel.inputs for axis in a.shape.axes}
    params: list[click.Parameter] = [
        file_option(a.name, f"The .npy of {a.name}: {a}.", not a.optional) for a in kernel.inputs
    ]
    params += [
        click.Option([f"--{a.name.replace('_', '-')}", a.name], is_flag=True, help=f"Write {a.name}: {a}.")
        for a in kernel.outputs
        if a.optional
    ]
    for a in kernel.scalars:
        number = float if a.formats[0].kind == "float" else int
        default = {"required": True} if a.default is None else {"default": a.default, "show_default": True}
        params.append(
            click.Option([f"--{a.name.replace('_', '-')}", a.name], type=number, help=f"Value of {a}.", **default)
        )
    for axis in (axis for axis in kernel.axes if axis not in fixed):
        help = "Size of this axis" + (
            ", where no file fixes it."
            if axis in may_fix
            else "; it follows from the others."
            if axis in kernel.derived
            else "."
        )
        params.append(
            click.Option(
                [f"--{axis.replace('_', '-')}", axis],
                type=int,
                required=axis not in may_fix and axis not in kernel.derived,
                help=help,
            )
        )
    if kernel.unions:
        names = [f.name for f in kernel.unions]
        params.append(
            click.Option(
                ["--dtype"],
                type=click.Choice(names),
                help=_DTYPE_HELP if any(a.is_union for a in kernel.inputs) else "The format to write.",
            )
        )
    return job_command(kernel.name, kernel.__doc__, params, lambda **options: kernel_job(kernel, options))


def kernel_job(kernel, options: Mapping[str, Any]) -> Job:
    """Make the Job of a declared kernel from the values of its options."""
    import numpy as np

    from ..formats import FORMATS
    from ..launch import run as launch

    options = dict(options)
    dtype = options.pop("dtype", None)
    converts = any(a.is_union for a in kernel.inputs)
    files = {a.name: options.pop(a.name) for a in kernel.inputs}
    inputs, notes = read_inputs({name: file for name, file in files.items() if file}, dtype if converts else None)
    options = {name: value for name, value in options.items() if value is not None}
    arguments = {name: array for name, (_, array) in inputs.items()} | options
    if dtype and not converts:
        arguments["dtype"] = FORMATS[dtype].dtype
    optional = [a.name for a in kernel.outputs if a.optional]
    outputs = [a.name for a in kernel.outputs if not a.optional or options[a.name]]
    changed = [a.name for a in kernel.written if a.is_given and a.name in arguments]
    if not outputs and not changed:
        raise click.UsageError(
            f"{kernel.name} writes only what is asked for: add "
            f"{' or '.join('--' + n.replace('_', '-') for n in optional)}"
        )

    def run():
        """Launch on copies of the arrays that are changed in place, because the reference needs their old contents."""
        return launch(kernel, (), arguments | {name: np.array(arguments[name]) for name in changed})

    count = len(outputs) + len(changed)
    return Job(kernel.name, inputs, count, run, lambda _: kernel.reference(**arguments), notes=notes)
