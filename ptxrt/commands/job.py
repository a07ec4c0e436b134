"""Jobs of `run`: files and a call, run, reported and compared."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from .group import choose_machine, print_json
from .names import summary_of


@dataclass
class Job:
    """One call of `run`.

    kernel: a prefix of the name of the kernel that the report names; the call may launch others, too. inputs: name ->
    (file, array). outputs: the number of arrays that it writes. call: returns results by name, or a QuantizedArray.
    reference: returns the wanted results by name, given the results. exact: returns, given the results, the name of one
    of them, its value, and the value without any quantization; None if there is no such value.
    """

    kernel: str
    inputs: Mapping[str, tuple[Path, Any]]
    outputs: int
    call: Callable[[], Any]
    reference: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    exact: Callable[[Any], tuple[str, Any, Any]] | None = None
    notes: list[str] = field(default_factory=list)


def job_command(
    name: str, manual: str, params: list[click.Parameter], make: Callable[..., Job], quantizes=False
) -> click.Command:
    """Make a command that makes a Job from its own options, runs it and reports. The options of every job are appended.

    manual: the docstring, whose line breaks are kept. quantizes: whether the loss of quantization can be reported.
    """

    @click.pass_context
    def callback(ctx, output, compare, trace, json_output, format_limit=None, **options):
        if format_limit is not None and not compare:
            raise click.UsageError("--format-limit is a limit of --compare: add --compare")
        choose_machine(ctx)
        job = make(**options)
        run_job(job, output, compare, format_limit, trace, json_output)

    common = [
        click.Option(
            ["-o", "--output"], type=click.Path(path_type=Path), help="Write the results: .npy, or .npz for several."
        ),
        click.Option(["--compare"], is_flag=True, help="Compare with the reference; fail beyond its tolerance."),
        click.Option(["--trace"], is_flag=True, help="Also list every launch, with its time on the device."),
        click.Option(["--json", "json_output"], is_flag=True, help="Print one JSON object instead."),
    ]
    if quantizes:
        common.insert(
            2,
            click.Option(
                ["--format-limit"],
                type=float,
                help="With --compare: the largest relative L2 that quantization may cost.",
            ),
        )
    help = "\n\n".join(f"\b\n{paragraph}" for paragraph in manual.split("\n\n"))
    return click.Command(name, callback=callback, params=[*params, *common], help=help, short_help=summary_of(manual))


def run_job(
    job: Job, output: Path | None, compare: bool, format_limit: float | None, trace: bool, json_output: bool
) -> None:
    """Run a job, write its results, and report; exit with 1 if a comparison fails."""
    from .. import trace as collect
    from ..npy import check_target, storable, write_arrays

    if output:
        check_target(output, job.outputs)
    replaced = output is not None and os.path.isfile(output)
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
        **{
            name: getattr(launch, name, None)
            for name in ("machine", "detail", "entry", "grid", "block", "shared_bytes")
        },
        "seconds": seconds,
        "inputs": {
            name: {"file": str(path), "shape": array.shape, "dtype": dtype_name(array)}
            for name, (path, array) in job.inputs.items()
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
    """Return the figures of every result against the reference and the exact answer, and the failures: figures beyond
    their limit, in words.
    """
    from .. import compare, kernels
    from ..accuracy import EXACT

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
            failures.append(
                f"quantization costs {name} a relative L2 of {figures.relative_l2:.3e}, above the limit "
                f"{format_limit:g}"
            )
    return rows, failures


def print_report(report: Mapping[str, Any], notes: list[str]) -> None:
    """Print the kernel, the machine, the time, and the figures of a comparison."""
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
        click.echo(
            f"  {name:7} {item['dtype']} "
            f"{list(item['shape'])}{written}{' to ' + report['file'] if report['file'] else ''}"
        )
    if report["replaced"]:
        click.echo(f"  note    {report['file']} was there before and is replaced")
    click.echo(f"  time    {report['seconds']:.3f} s with copies")
    for note in notes:
        click.echo(f"  note    {note}")
    for name, figures in report.get("compare", {}).items():
        click.echo(f"  {name}")
        click.echo(
            f"    relative L2 {figures['relative_l2']:.3e}   cosine {figures['cosine']:.8f}   gain "
            f"{figures['gain']:.6f}"
        )
        where = list(figures["worst_index"])
        if figures["size"]:
            click.echo(f"    worst element {where}: {figures['worst_got']:.6g}, wanted {figures['worst_want']:.6g}")
        if figures.get("tolerance"):
            click.echo(f"    tolerance: {figures['tolerance']}")
        elif figures.get("limit") is not None:
            click.echo(f"    limit: relative L2 <= {figures['limit']:g}")


def file_option(name: str, help: str, required: bool = True) -> click.Option:
    return click.Option(
        [f"--{name.replace('_', '-')}", name], type=click.Path(path_type=Path), required=required, help=help
    )


def read_inputs(paths: Mapping[str, Path], dtype: str | None) -> tuple[dict[str, tuple[Path, Any]], list[str]]:
    """Read the arrays in files, converted to `dtype` if it is given, with notes on the conversions.

    FileError for arrays of anything but numbers.
    """
    import numpy as np

    from ..formats import FORMATS
    from ..npy import read_array

    inputs, notes = {}, []
    for name, path in paths.items():
        array = read_array(path, name)
        _check_numbers(path, name, array)
        result = FORMATS[dtype].dtype if dtype else array.dtype
        if array.dtype != result and array.dtype.kind in "fV":
            notes.append(f"{name} converted from {array.dtype} to {result}")
            with np.errstate(over="ignore"):
                array = array.astype(result)
        inputs[name] = path, array
    return inputs, notes


def _check_numbers(path: Path, name: str, array) -> None:
    """Raise FileError for an array of untyped bytes, as which NumPy saves float8, or of structures."""
    import numpy as np

    from ..errors import FileError

    if array.dtype.type is not np.void:
        return
    if array.dtype.names:
        advice = "structures; save one of the fields by itself"
    else:
        advice = "untyped bytes; save values as x.astype(numpy.float32), codes as x.view(numpy.uint8)"
    raise FileError(f"{path}: {name} is {array.dtype} {list(array.shape)}, {advice}")
