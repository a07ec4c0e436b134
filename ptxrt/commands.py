"""The command line. Every command is made from the declarations; what it computes is done elsewhere.

Only click is imported before a command runs, so that `--help` answers at once.
"""

from __future__ import annotations

import difflib
import inspect
import json
import math
import re
import shutil
import sys
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping

import click

from . import __version__

_BLOCK_FORMAT = "mxfp4"


class Commands(click.Group):
    """A group that says an error of this package, or of a file, in one message and without a traceback."""

    def invoke(self, ctx):
        from .errors import PtxError

        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # whoever reads the output has had enough; click ends in silence
        except (PtxError, OSError) as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--machine", type=click.Choice(["native", "portable", "emulator"]), help="Where kernels run; see `devices`. Without it PTXRT_MACHINE decides, else the best that is there.")
@click.option("--arithmetic", type=click.Choice(["float64", "hardware"]), help="How the emulator rounds the sums of tensor cores: float64 (the default) or as the hardware does.")
@click.option("--ptx", type=click.Choice(["native", "portable"]), help="Which build's PTX the emulator executes: native (the default) or portable.")
@click.option("--no-checks", is_flag=True, help="Let the emulator skip its tracking of memory that nothing wrote.")
@click.option("--profile", is_flag=True, help="Say on stderr where the emulator's time went.")
@click.option("--bank-conflicts", is_flag=True, help="List on stderr the lines with bank conflicts, on the emulator.")
@click.option("--coverage", is_flag=True, help="List on stderr the entries that ran and their lines that did not, on the emulator.")
@click.version_option(__version__, prog_name="ptxrt")
@click.pass_context
def main(ctx, machine, arithmetic, ptx, no_checks, profile, bank_conflicts, coverage):
    """Low-precision CUDA kernels on NumPy files: on a GPU, or on an emulator where there is none.

    \b
    ptxrt list                                            what there is
    ptxrt run quantize --x x.npy -o q.npz --compare       run it on a file
    ptxrt run quantize --help                             its options
    """
    options = {"arithmetic": arithmetic, "ptx": ptx, "checks": False if no_checks else None}
    options |= {"profile": profile or None, "bank_conflicts": bank_conflicts or None}
    ctx.meta[_COVERAGE] = coverage
    ctx.obj = machine, {name: value for name, value in options.items() if value is not None}


def choose_machine(ctx, **more) -> None:
    """Make what the options before the command, and `more`, ask for the current machine; options alone mean the emulator."""
    machine, options = ctx.obj
    options = {**options, **more}
    coverage = ctx.meta[_COVERAGE]
    if machine or options or coverage:
        from . import using

        if coverage and machine not in (None, "emulator"):
            raise click.UsageError(f"--coverage is counted on the emulator, not on {machine}")
        backend = ctx.with_resource(using(machine or "emulator", **options))  # given back when the command is over
        if "profile" in options:
            ctx.call_on_close(lambda: print_lines(backend.emulator.profile.table()))
        if options.keys() & {"races", "strict"}:
            ctx.call_on_close(lambda: print_lines(backend.emulator.undecided))
        if coverage or "bank_conflicts" in options:
            from .emulator.check import conflicts_table, coverage_table

            tables = [coverage_table] * coverage + [conflicts_table] * ("bank_conflicts" in options)
            ctx.call_on_close(lambda: print_lines(line for table in tables for line in table(backend.emulator)))


_COVERAGE = "ptxrt.coverage"


def print_lines(lines) -> None:
    """Write lines on stderr, beside what a command prints."""
    for line in lines:
        click.echo(line, err=True)


def plain(value: Any) -> Any:
    """The value as JSON knows it: sequences as lists, infinities and NaN as words."""
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


# ---------------------------------------------------------------------------------------------------------------------
# list, show, devices

ARCHS = ("sm_120a", "sm_121a", "sm_90", "sm_80")


def complete_names(ctx, param, incomplete: str) -> list[str]:
    """Names of functions and kernels that begin so, for the shell."""
    from . import kernels

    return [name for name in dict.fromkeys([*public_functions(), *kernels()]) if name.startswith(incomplete)]


def complete_kernels(ctx, param, incomplete: str) -> list[str]:
    """Names of kernels that begin so, for the shell."""
    from . import kernels

    return [name for name in kernels() if name.startswith(incomplete)]


def complete_formats(ctx, param, incomplete: str) -> list[str]:
    """Names of block formats that begin so, for the shell."""
    from .blocks import BLOCK_FORMATS

    return [name for name in BLOCK_FORMATS if name.startswith(incomplete)]


@main.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell):
    """Print what makes a shell complete commands, options, and names of functions, kernels and formats.

    \b
    bash   eval "$(ptxrt completion bash)"         in ~/.bashrc
    zsh    eval "$(ptxrt completion zsh)"          in ~/.zshrc
    fish   ptxrt completion fish | source         in ~/.config/fish/config.fish
    """
    from click.shell_completion import get_completion_class

    click.echo(get_completion_class(shell)(main, {}, "ptxrt", "_PTXRT_COMPLETE").source())


def find_kernel(name: str, functions: Iterable[str] = ()):
    """The declared kernel; a usage error that names the nearest ones, and the nearest of `functions`, otherwise."""
    from . import kernels

    there = kernels()
    if name not in there:
        near = difflib.get_close_matches(name, [*functions, *there], 3, 0.4)
        raise click.UsageError(f"no kernel is called {name}; {'near: ' + ', '.join(near) if near else 'see `ptxrt list`'}")
    return there[name]


def find_units(word: str, functions: Iterable[str] = ()) -> tuple[Any, list]:
    """The kernel and the units that NAME, NAME[axis=value,...] or a unit's own name say; a usage error where there are none."""
    from . import kernels

    for kernel in kernels().values():
        units = [unit for unit in kernel.units if unit.name == word]
        if units and word != kernel.name:
            return kernel, units
    match = re.fullmatch(r"(\w+)(?:\[([\w=, ]+)\])?", word)
    if not match:
        raise click.UsageError(f"{word}: expected NAME or NAME[axis=value]")
    kernel = find_kernel(match[1], functions)
    wanted = dict(part.strip().partition("=")[::2] for part in match[2].split(",")) if match[2] else {}
    units = [unit for unit in kernel.units if all(str(unit.variant.get(axis)) == value for axis, value in wanted.items())]
    if not units:
        there = ", ".join(unit.name for unit in kernel.units)
        raise click.UsageError(f"{word}: {kernel.name} is not compiled for that; its units are {there}")
    return kernel, units


def public_functions() -> dict[str, Any]:
    """The functions of the package by name, in the order of its interface."""
    import ptxrt

    named = {name: getattr(ptxrt, name) for name in ptxrt.__all__}
    # Classes that are used as functions are, `using` for one, have names like theirs.
    return {name: value for name, value in named.items() if callable(value) and name.islower()}


def in_lines(title: str, rows: Mapping[str, str], width: int) -> None:
    """Print a title and a line for each name, with what there is to say of it; broken at spaces where a terminal is narrower."""
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
    from . import kernels

    functions = {name: manual_of(function).split("\n", 1)[0] for name, function in public_functions().items()}
    there = {name: kernel.summary for name, kernel in kernels().items()}
    if json_output:
        print_json({"functions": functions, "kernels": there})
        return
    width = max(map(len, {**functions, **there}))
    in_lines("functions that `run` takes", {name: functions[name] for name in FUNCTIONS}, width)
    in_lines("\nfunctions", {name: words for name, words in functions.items() if name not in FUNCTIONS}, width)
    groups: dict[str, dict[str, str]] = {}
    for name, kernel in kernels().items():
        groups.setdefault(kernel.__module__.rpartition(".")[2].removesuffix("_kernels"), {})[name] = there[name]
    for group, rows in groups.items():
        in_lines(f"\nkernels: {group.replace('_', ' ')}", rows, width)


@main.command()
@click.argument("name", shell_complete=complete_names)
@click.option("--ptx", is_flag=True, help="Print the PTX text instead: the native one, or after `ptxrt --ptx portable` the other.")
@click.option("--sass", type=click.Choice(ARCHS), is_flag=False, flag_value=ARCHS[0], help="Print the machine code instead, for sm_120a where no target is named; needs NVIDIA's cuobjdump.")
@click.pass_context
def show(ctx, name, ptx, sass):
    """Show a function or a kernel: arguments, meaning, tolerances, cases, and what the compiler made of it.

    NAME is that of a function, a kernel, one of its variants as in 'attention_bf16[dim=64,dim_v=64]', or a unit such as
    attention_bf16_dim64_dim_v64.
    """
    from . import kernels, units

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
            from .disassembly import sass_of

            click.echo(sass_of(units.checked_fatbin(unit.name, sass in ("sm_90", "sm_80")), sass))
    if not ptx and not sass:
        from .describe import kernel_lines

        for line in kernel_lines(kernel, chosen):
            click.echo(line)


@main.command()
@as_json
def devices(json_output):
    """Say which machines are there and, for those that are not, why."""
    from .errors import PtxError
    from .selection import default_machine, default_problem, machines

    there, default = machines(), None
    problem = default_problem()
    if problem is None:
        try:
            default = default_machine()
        except PtxError as error:
            problem = str(error)
    if problem is not None:
        click.echo(f"no default: {problem}", err=True)
    if json_output:
        print_json({"default": default, "problem": problem, "machines": {m.name: vars(m) for m in there.values()}})
        return
    for machine in there.values():
        click.echo(f"{machine}{' (the default)' if machine.name == default else ''}")


# ---------------------------------------------------------------------------------------------------------------------
# run


@dataclass
class Job:
    """One call that `run` makes.

    kernel: how the name begins of the kernel that does the work, where others may run beside it. inputs: name -> (file, array). outputs: how many arrays it writes. call: results by name, or a QuantizedArray.
    reference: the wanted results by name, given the results. exact: what no quantization would give, and against
    which of the results that is held; None where the question makes no sense.
    """

    kernel: str
    inputs: Mapping[str, tuple[Path, Any]]
    outputs: int
    call: Callable[[], Any]
    reference: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    exact: Callable[[Any], tuple[str, Any, Any]] | None = None
    notes: list[str] = field(default_factory=list)


def manual_of(function) -> str:
    """The docstring of a function, or what stands for it where Python leaves docstrings out."""
    from .declaration import manual_of

    return manual_of(function)


class RunGroup(click.Group):
    """One subcommand for each function and each declared kernel, made when it is asked for."""

    def list_commands(self, ctx):
        from . import kernels

        return [*FUNCTIONS, *kernels()]

    def get_command(self, ctx, name):
        if name in FUNCTIONS:
            return FUNCTION_COMMANDS[name]()
        return kernel_command(find_kernel(name, FUNCTIONS))


@main.group(cls=RunGroup)
def run():
    """Run a function or a kernel on .npy files."""


def job_command(name: str, manual: str, params: list[click.Parameter], make: Callable[..., Job], quantizes=False) -> click.Command:
    """A command that makes a Job from its own options, runs it and reports; the options of every job come last.

    manual: the docstring, whose lines are kept as they are. quantizes: whether the loss by it can be told.
    """

    @click.pass_context
    def callback(ctx, output, compare, trace, json_output, format_limit=None, **options):
        if format_limit is not None and not compare:
            raise click.UsageError("--format-limit is a limit of --compare: add --compare")
        choose_machine(ctx)
        job = make(**options)
        run_job(job, output, compare, format_limit, trace, json_output)

    common = [
        click.Option(["-o", "--output"], type=click.Path(path_type=Path), help="Write the results: .npy, or .npz for several."),
        click.Option(["--compare"], is_flag=True, help="Compare with the reference; fail beyond its tolerance."),
        click.Option(["--trace"], is_flag=True, help="Also list every launch, with its time on the device."),
        click.Option(["--json", "json_output"], is_flag=True, help="Print one JSON object instead."),
    ]
    if quantizes:
        common.insert(2, click.Option(["--format-limit"], type=float, help="With --compare: the largest relative L2 that quantization may cost."))
    help = "\n\n".join(f"\b\n{paragraph}" for paragraph in manual.split("\n\n"))
    return click.Command(name, callback=callback, params=[*params, *common], help=help, short_help=manual.split("\n", 1)[0])


def run_job(job: Job, output: Path | None, compare: bool, format_limit: float | None, trace: bool, json_output: bool) -> None:
    """Run a job, write its results, and say what happened; exit with 1 where a comparison fails."""
    from . import trace as collect
    from .npy import check_target, storable, write_arrays

    if output:
        check_target(output, job.outputs)
    replaced = output is not None and output.exists()
    start = time.perf_counter()
    with collect(timing=trace) as traced:
        results = job.call()
    seconds = time.perf_counter() - start
    # Empty results need no launch.
    launch = next((launch for launch in reversed(traced.launches) if launch.kernel.startswith(job.kernel)), None)
    arrays = results if isinstance(results, Mapping) else {"codes": results.codes, "scales": results.scales}
    if output:
        if isinstance(results, Mapping):
            write_arrays(output, results)
        else:
            results.save(output)

    report = {
        "kernel": launch.kernel if launch else job.kernel,
        **{name: getattr(launch, name, None) for name in ("machine", "detail", "entry", "grid", "block", "shared_bytes")},
        "seconds": seconds,
        "inputs": {
            name: {"file": str(path), "shape": array.shape, "dtype": dtype_name(array)} for name, (path, array) in job.inputs.items()
        },
        "outputs": {
            name: {"shape": array.shape, "dtype": dtype_name(array), "stored": str(storable(array).dtype)}
            for name, array in arrays.items()
        },
        "file": str(output) if output else None,
        "replaced": replaced,
    }
    if trace:
        report["launches"] = traced.rows()
    failures: list[str] = []
    if compare:
        comparison, failures = compare_job(job, report["kernel"], results, arrays, format_limit)
        report["compare"] = comparison
    if json_output:
        print_json({**report, "failures": failures})
    else:
        print_report(report, job.notes)
        if trace:
            click.echo(traced)
    if failures:
        for failure in failures:
            click.echo(f"Error: {failure}", err=True)
        sys.exit(1)


def dtype_name(array) -> str:
    return str(getattr(array, "dtype", None) or array.format)


def compare_job(job: Job, kernel_name: str, results, arrays, format_limit) -> tuple[dict[str, Any], list[str]]:
    """The figures of every result against the reference and the exact answer, and what exceeds its limit."""
    from . import compare, kernels
    from .accuracy import EXACT

    declared = kernels().get(kernel_name)
    rows, failures = {}, []
    for name, want in job.reference(arrays).items():
        figures = compare(arrays[name], want.reshape(arrays[name].shape))
        tolerance = declared.tolerance(name) if declared else EXACT
        missed = tolerance.misses(figures)
        rows[f"{name} against the reference"] = {**vars(figures), "tolerance": str(tolerance)}
        failures += [f"{name} differs from the reference: {words}" for words in missed]
    if job.exact:
        name, got, want = job.exact(results)
        figures = compare(got, want)
        rows[f"{name} against the unquantized inputs"] = {**vars(figures), "limit": format_limit}
        if format_limit is not None and not figures.relative_l2 <= format_limit:
            failures.append(f"quantization costs {name} a relative L2 of {figures.relative_l2:.3e}, above the limit {format_limit:g}")
    return rows, failures


def print_report(report: Mapping[str, Any], notes: list[str]) -> None:
    """Print what ran, on what, how long, and the figures of a comparison."""
    if report["entry"]:
        sizes = "grid {} x {} x {}, block {} x {} x {}".format(*report["grid"], *report["block"])
        click.echo(f"{report['kernel']} on {report['detail']}")
        click.echo(f"  entry   {report['entry']}, {sizes}, {report['shared_bytes']} bytes of shared memory")
    else:
        click.echo(f"{report['kernel']}: an axis is 0, nothing was launched")
    for name, item in report["inputs"].items():
        click.echo(f"  {name:7} {item['dtype']} {list(item['shape'])} from {item['file']}")
    for name, item in report["outputs"].items():
        written = f" written as {item['stored']}" if report["file"] and item["stored"] != item["dtype"] else ""
        click.echo(f"  {name:7} {item['dtype']} {list(item['shape'])}{written}{' to ' + report['file'] if report['file'] else ''}")
    if report["replaced"]:
        click.echo(f"  note    {report['file']} was there before and is replaced")
    click.echo(f"  time    {report['seconds']:.3f} s with copies")
    for note in notes:
        click.echo(f"  note    {note}")
    for name, figures in report.get("compare", {}).items():
        click.echo(f"  {name}")
        click.echo(f"    relative L2 {figures['relative_l2']:.3e}   cosine {figures['cosine']:.8f}   gain {figures['gain']:.6f}")
        where = list(figures["worst_index"])
        if figures["size"]:
            click.echo(f"    worst element {where}: {figures['worst_got']:.6g}, wanted {figures['worst_want']:.6g}")
        if figures.get("tolerance"):
            click.echo(f"    tolerance: {figures['tolerance']}")
        elif figures.get("limit") is not None:
            click.echo(f"    limit: relative L2 <= {figures['limit']:g}")


def file_option(name: str, help: str, required: bool = True) -> click.Option:
    return click.Option([f"--{name.replace('_', '-')}", name], type=click.Path(path_type=Path), required=required, help=help)


def read_inputs(paths: Mapping[str, Path], dtype: str | None) -> tuple[dict[str, tuple[Path, Any]], list[str]]:
    """The arrays in the files, floating ones converted to `dtype` where it is given, and notes on what was converted."""
    import numpy as np

    from .formats import FORMATS
    from .npy import read_array

    inputs, notes = {}, []
    for name, path in paths.items():
        array = read_array(path, name)
        wanted = FORMATS[dtype].dtype if dtype else array.dtype
        if array.dtype != wanted and array.dtype.kind in "fV":
            notes.append(f"{name} converted from {array.dtype} to {wanted}")
            with np.errstate(over="ignore"):
                array = array.astype(wanted)
        inputs[name] = path, array
    return inputs, notes


_DTYPE_HELP = "Convert floating-point inputs to this format first."


# A kernel


def kernel_command(kernel) -> click.Command:
    """The command of a declared kernel: a file for each input, numbers for scalars and axes, flags for optional outputs."""
    fixed = {axis for a in kernel.inputs if not a.optional for axis in a.shape.axes} | set(kernel.fixed)
    may_fix = {axis for a in kernel.inputs for axis in a.shape.axes}
    params: list[click.Parameter] = [file_option(a.name, f"The .npy of {a.name}: {a}.", not a.optional) for a in kernel.inputs]
    params += [click.Option([f"--{a.name.replace('_', '-')}", a.name], is_flag=True, help=f"Write {a.name}: {a}.") for a in kernel.outputs if a.optional]
    for a in kernel.scalars:
        number = float if a.formats[0].kind == "float" else int
        default = {"required": True} if a.default is None else {"default": a.default, "show_default": True}
        params.append(click.Option([f"--{a.name.replace('_', '-')}", a.name], type=number, help=f"A number of {a}.", **default))
    for axis in (axis for axis in kernel.axes if axis not in fixed):
        help = "Size of this axis" + (", where no file fixes it." if axis in may_fix else "; it follows from the others." if axis in kernel.derived else ".")
        params.append(click.Option([f"--{axis.replace('_', '-')}", axis], type=int, required=axis not in may_fix and axis not in kernel.derived, help=help))
    if kernel.unions:
        names = [f.name for f in kernel.unions]
        params.append(click.Option(["--dtype"], type=click.Choice(names), help=_DTYPE_HELP if any(a.is_union for a in kernel.inputs) else "The format to write."))
    return job_command(kernel.name, kernel.__doc__, params, lambda **options: kernel_job(kernel, options))


def kernel_job(kernel, options: Mapping[str, Any]) -> Job:
    """The Job of a declared kernel from the values of its options."""
    import numpy as np

    from .formats import FORMATS
    from .launch import run as launch

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
        raise click.UsageError(f"{kernel.name} writes only what is asked for: add {' or '.join('--' + n.replace('_', '-') for n in optional)}")


    def run():
        """Launch on copies of what is changed in place, since the reference takes it as it was."""
        return launch(kernel, (), arguments | {name: np.array(arguments[name]) for name in changed})

    count = len(outputs) + len(changed)
    return Job(kernel.name, inputs, count, run, lambda _: kernel.reference(**arguments), notes=notes)


# The friendly functions


def _attention():
    from .ops.attention import attention

    return attention


def _quantize():
    from .ops.quantize import quantize

    return quantize


def _dequantize():
    from .ops.quantize import dequantize

    return dequantize


def _dtype_option(help: str) -> click.Option:
    return click.Option(["--dtype"], type=click.Choice(["f32", "f16", "bf16"]), help=help)


# What `run attention` says of the keyword arguments of `ptxrt.attention`, by their kind of option.
_ATTENTION_WORDS = {
    "qk": "Format of q and k in their product; f16 where q, k and v all are float16, else bf16.",
    "pv": "Format of the weights and v in theirs; that of --qk by default.",
    "quantize": "in_kernel: quantize q and k as they are loaded.",
    "smooth_k": "Subtract the mean key: auto, true or false.",
    "layout": "Order of the axes: bhsd or bshd.",
}
_ATTENTION_NUMBERS = {"scale": "Factor of the scores; 1 / sqrt(dim) by default.", "softcap": "Scores become softcap tanh(score / softcap)."}
_ATTENTION_FLAGS = {
    "causal": "Hide later keys from each query; aligned at the bottom right.",
    "smooth_q": "Subtract the mean of each 64 queries.",
    "return_lse": "Write lse, too: the logarithm of the sum of exponentials.",
    "normalize": "Divide the output by the sums; else write row_max and row_sum, too.",
}
_ATTENTION_FILES = {
    "mask": "The .npy of a mask of bool or float that broadcasts to [B, H, Sq, Sk].",
    "sinks": "The .npy of one logit for each head of q.",
    "key_lengths": "The .npy of the number of keys of each batch.",
    "cu_seqlens_q": "The .npy of where packed sequences begin and end in q.",
    "cu_seqlens_k": "The .npy of where they do in k and v.",
}


class Window(click.ParamType):
    """LEFT,RIGHT: whole numbers, or nothing for an open side."""

    name = "left,right"

    def convert(self, value, param, ctx):
        try:
            left, right = (int(side) if side.strip() else None for side in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not LEFT,RIGHT, such as 128,0 or 128, for open on the right", param, ctx)
        return left, right


def attention_command() -> click.Command:
    """`run attention`: its options are the keyword arguments of `ptxrt.attention`."""
    function = _attention()
    params: list[click.Parameter] = []
    for p in inspect.signature(function).parameters.values():
        option = f"--{p.name.replace('_', '-')}"
        if p.kind is p.POSITIONAL_OR_KEYWORD:
            params.append(file_option(p.name, f"The .npy of {p.name}."))
        elif p.name in _ATTENTION_FILES:
            params.append(file_option(p.name, _ATTENTION_FILES[p.name], False))
        elif p.name in _ATTENTION_NUMBERS:
            params.append(click.Option([option], type=float, default=p.default, help=_ATTENTION_NUMBERS[p.name]))
        elif p.name in _ATTENTION_FLAGS:
            names = f"{option}/--no-{option[2:]}" if p.default else option
            params.append(click.Option([names], is_flag=True, default=p.default, help=_ATTENTION_FLAGS[p.name]))
        elif p.name in _ATTENTION_WORDS:
            params.append(click.Option([option], default=p.default, show_default=p.default is not None, help=_ATTENTION_WORDS[p.name]))
        elif p.name == "window":
            params.append(click.Option([option], type=Window(), help="How far each query sees; a side without a number is open."))
        elif p.name == "out_dtype":
            params.append(click.Option([option], type=click.Choice(["bfloat16", "float16", "float32"]), help="That of q by default."))
    params.append(_dtype_option("Convert q, k and v to this format first."))
    return job_command("attention", manual_of(function), params, attention_job, quantizes=True)


def attention_job(q, k, v, dtype, out_dtype, **options) -> Job:
    """The Job of `run attention`: held against exact attention of what the formats hold, and of q, k and v themselves."""
    import numpy as np

    from .formats import bf16
    from .ops.attention import call_of, exact_attention

    inputs, notes = read_inputs({"q": q, "k": k, "v": v}, dtype)
    further, _ = read_inputs({name: options.pop(name) for name in _ATTENTION_FILES if options[name] or options.pop(name)}, None)
    arrays = [array for _, array in inputs.values()]
    options |= {name: array for name, (_, array) in further.items()}
    options["smooth_k"] = {"true": True, "false": False}.get(options["smooth_k"], options["smooth_k"])
    options["out_dtype"] = bf16.dtype if out_dtype == "bfloat16" else out_dtype
    call = call_of(*arrays, **options)
    names = [f"out_{call.output}", *(["row_max", "row_sum"] if not call.normalize else ["lse"] if call.return_lse else [])]

    def run():
        results = _attention()(*arrays, **options)
        return dict(zip(names, results if isinstance(results, tuple) else (results,)))

    meant = ("causal", "window", "softcap", *further)

    def wanted(results, *operands):
        out, lse = exact_attention(*operands, scale=call.scale, **{name: options[name] for name in meant})
        if not call.normalize:
            sums = np.exp(lse - np.where(np.isfinite(lse), results["row_max"], 0) * np.log(2))
            out, lse = out * sums[..., None], sums
        out = out.transpose(0, 2, 1, 3) if call.transposed else out
        return {names[0]: out, names[-1]: lse} if len(names) > 1 else {names[0]: out}

    def exact(results):
        return names[0], results[names[0]], wanted(results, call.q, call.k, call.v)[names[0]]

    def reference(results):
        return wanted(results, *call.way.operands.multiplied(call))

    return Job(call.way.kernel.name, {**inputs, **further}, len(names), run, reference, exact, notes)


def quantize_command() -> click.Command:
    """`run quantize`: an .npy in, the .npz of a QuantizedArray out."""
    params = [
        file_option("x", "The file to quantize."),
        click.Option(["--format"], default=_BLOCK_FORMAT, show_default=True, help="The block format.", shell_complete=complete_formats),
        click.Option(["--axis"], type=int, default=-1, show_default=True, help="The axis that is cut into blocks."),
        click.Option(["--scale-rule"], help="How scales are chosen."),
        click.Option(["--scale-layout"], default="linear", show_default=True, help="How scales lie: linear or 128x4."),
        click.Option(["--global-scale"], type=float, help="Of nvfp4; computed where it is not given."),
        click.Option(["--pad"], is_flag=True, help="Pad the axis with zeros to whole blocks."),
        _dtype_option("Convert x to this format first."),
    ]
    return job_command("quantize", manual_of(_quantize()), params, quantize_job, quantizes=True)


def quantize_job(x, format, dtype, **options) -> Job:
    """The Job of `run quantize`, also held against x itself."""
    import numpy as np

    from .ops.quantize import quantize_reference

    inputs, notes = read_inputs({"x": x}, dtype)
    array = inputs["x"][1]

    def reference(_):
        wanted = quantize_reference(array, format, **options)
        return {"codes": wanted.codes, "scales": wanted.scales}

    def exact(q):
        return "values", np.asarray(q), array

    return Job(f"quantize_{format}", inputs, 2, lambda: _quantize()(array, format, **options), reference, exact, notes)


def dequantize_command() -> click.Command:
    """`run dequantize`: the .npz of a QuantizedArray in, an .npy out."""
    params = [
        file_option("q", "The .npz of a quantized array."),
        _dtype_option("What to write; float32 by default."),
    ]
    return job_command("dequantize", manual_of(_dequantize()), params, dequantize_job)


def dequantize_job(q, dtype) -> Job:
    """The Job of `run dequantize`."""
    import numpy as np

    from .formats import FORMATS
    from .ops.quantized import Packed

    array = Packed.load(q)
    wanted = FORMATS[dtype or "f32"].dtype

    def reference(_):
        with np.errstate(over="ignore"):
            return {"x": np.asarray(array).astype(wanted)}

    return Job(f"dequantize_{array.format}", {"q": (q, array)}, 1, lambda: {"x": _dequantize()(array, wanted)}, reference)


FUNCTIONS = {"attention": _attention, "quantize": _quantize, "dequantize": _dequantize}
FUNCTION_COMMANDS = {"attention": attention_command, "quantize": quantize_command, "dequantize": dequantize_command}


# ---------------------------------------------------------------------------------------------------------------------
# check


@main.command()
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=complete_kernels)
@click.option("--seed", default=0, show_default=True, help="Of the random inputs.")
@click.option("--races", is_flag=True, help="Look for races, on the emulator; one case of each size.")
@click.option("--strict", is_flag=True, help="Look for races, and run each case in both schedules, on the emulator; one of each size.")
@as_json
@click.pass_context
def check(ctx, names, seed, races, strict, json_output):
    """Run the declared cases of every kernel, or of those named, against their references.

    NAME may be a variant, as in 'attention_bf16[dim=64,dim_v=64]'.
    """
    from . import kernels

    chosen = [find_units(name) for name in names] or [(kernel, kernel.units) for kernel in kernels().values()]
    choose_machine(ctx, **({"strict": True} if strict else {"races": True} if races else {}))
    rows = []
    for kernel, units in chosen:
        asked = [case for case in kernel.cases if kernel.unit_for({**kernel.fixed, **case.axes}) in units]
        for case in one_of_each_size(asked) if races else asked:
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
    """The first case of each shape: formats and optional outputs change nothing about who waits for whom."""
    first: dict[Any, Any] = {}
    for case in cases:
        first.setdefault(tuple(case.axes.items()), case)
    return list(first.values())


def check_case(kernel, case, seed: int) -> dict[str, Any]:
    """Run one declared case; a fault of the machine is a failed case, anything else stops the check."""
    from . import last_launches
    from .errors import BuildError, LaunchError, MachineError
    from .launch import run as launch

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
    """A comparison in one or two words."""
    return "equal" if figures.mismatches == 0 else f"relative L2 {figures.relative_l2:.1e}"


# ---------------------------------------------------------------------------------------------------------------------
# bench


@main.group()
def bench():
    """Measure on a GPU, both sides of a comparison in one run. docs/benchmarks.md says what each column means."""


def with_plot(function):
    return click.option("--plot", type=click.Path(path_type=Path), help="Draw the figures to a file, whose suffix says its kind (needs matplotlib).")(function)


def with_repeat(function):
    return click.option("--repeat", default=20, show_default=True, help="How often each call is timed.")(function)


def with_dtypes(help: str):
    return click.option("--dtype", "dtypes", multiple=True, type=click.Choice(["f32", "f16", "bf16"]), help=help)


def measure(ctx, plot: Path | None, json_output: bool, report: Callable[[], Mapping[str, Any]], table, draw) -> None:
    """Choose the machine, measure, and print the report as JSON or as the lines of its table; what a picture lacks is said before."""
    from .bench import plots

    choose_machine(ctx)
    if plot:
        plots.check(plot)
    measured = report()
    if plot:
        draw(plot, measured)
    if json_output:
        print_json(measured)
    else:
        for line in table(measured):
            click.echo(line)


@bench.command("launch")
@click.option("--calls", default=200, show_default=True, help="Calls of one side before it is another's turn.")
@click.option("--rounds", default=60, show_default=True, help="How often each side has its turn.")
@with_plot
@as_json
@click.pass_context
def bench_launch(ctx, calls, rounds, plot, json_output):
    """Time what the host does for one launch of quantize_mxfp4: bare, prepared, by the friendly function, and by CuPy."""
    from .bench.launches import draw_launches, launch_report, launch_table

    measure(ctx, plot, json_output, lambda: launch_report(calls, rounds), launch_table, draw_launches)


def bench_quantizers(operation: str, help: str) -> None:
    """The command that measures quantizers, or their inverses."""

    @bench.command(operation, help=help)
    @click.option("--format", "formats", multiple=True, help="A block format; may be repeated. All by default.")
    @with_dtypes("The dtype of the values; may be repeated. All by default.")
    @click.option("--shape", "shapes", multiple=True, metavar="ROWSxCOLS", help="The shape of the values, such as 8192x8192; may be repeated. Five from 1024x1024 to 8192x8192 by default.")
    @click.option("--axis", type=click.IntRange(-2, -1), default=-1, show_default=True, help="The axis that is cut into blocks.")
    @click.option("--l2", multiple=True, type=click.Choice(["warm", "flushed"]), help="What the L2 cache holds before each call: what the call before left there, or nothing of it. Both by default.")
    @with_repeat
    @with_plot
    @as_json
    @click.pass_context
    def command(ctx, plot, json_output, shapes, **choices):
        from .bench.quantizers import draw_quantizers, parse_shape, quantizer_report, quantizer_table

        choices["shapes"] = [parse_shape(shape) for shape in shapes]
        measure(ctx, plot, json_output, lambda: quantizer_report(operation, **choices), quantizer_table, draw_quantizers)


bench_quantizers("quantize", "Time quantizers beside a copy on the device: bytes per second, each read and write counted once.")
bench_quantizers("dequantize", "Time the inverses of quantizers beside a copy on the device.")


@bench.command("attention")
@click.option("--format", "combinations", multiple=True, metavar="QK+PV", help="Formats of the two products, such as mxfp4+bf16; may be repeated. All by default.")
@with_dtypes("The dtype of q, k and v; may be repeated. bf16 by default.")
@click.option("--shape", "shapes", multiple=True, metavar="SHAPE", help="Sizes such as b4h32s2048d128, or b1h32g8q16k32768d128 with g heads of keys; may be repeated.")
@click.option("--causal/--no-causal", default=None, help="Only with, or only without the causal mask. Both by default.")
@with_repeat
@with_plot
@as_json
@click.pass_context
def bench_attention(ctx, combinations, shapes, causal, plot, json_output, **choices):
    """Time fused attention beside the card's own rate of MMAs, and hold a slice of the result against float64."""
    from .bench.attention import Shape, attention_report, attention_table, draw_attention, parse_combination

    choices["combinations"] = [parse_combination(text) for text in combinations]
    choices["shapes"] = [Shape.parse(text) for text in shapes]
    if causal is not None:
        choices["causal"] = [causal]
    measure(ctx, plot, json_output, lambda: attention_report(**choices), attention_table, draw_attention)


if __name__ == "__main__":
    main()
