"""`bench`: measurements on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from .group import as_json, choose_machine, main, print_json


@main.group()
def bench():
    """Measure on a GPU, both sides of a comparison in one run. docs/benchmarks.md explains the columns."""


def with_plot(function):
    return click.option(
        "--plot",
        type=click.Path(path_type=Path),
        help="Draw the figures to a file, whose suffix says its kind (needs matplotlib).",
    )(function)


def with_repeat(function):
    return click.option("--repeat", default=20, show_default=True, help="How often each call is timed.")(function)


def with_dtypes(help: str):
    return click.option("--dtype", "dtypes", multiple=True, type=click.Choice(["f32", "f16", "bf16"]), help=help)


def measure(ctx, plot: Path | None, json_output: bool, report: Callable[[], Mapping[str, Any]], table, draw) -> None:
    """Choose the machine, measure, and print the report as JSON or as the lines of its table.

    Errors about the plot are raised before the measurement.
    """
    from ..bench import plots

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
@click.option("--calls", default=200, show_default=True, help="Calls of one implementation in each round.")
@click.option("--rounds", default=60, show_default=True, help="Number of rounds.")
@with_plot
@as_json
@click.pass_context
def bench_launch(ctx, calls, rounds, plot, json_output):
    """Time the host's work for one launch of quantize_mxfp4: bare, prepared, by the friendly function, and by
    CuPy."""
    from ..bench.launches import draw_launches, launch_report, launch_table

    measure(ctx, plot, json_output, lambda: launch_report(calls, rounds), launch_table, draw_launches)


def bench_quantizers(operation: str, help: str) -> None:
    """Make the command that measures quantizers, or their inverses."""

    @bench.command(operation, help=help)
    @click.option("--format", "formats", multiple=True, help="A block format; may be repeated. All by default.")
    @with_dtypes("The dtype of the values; may be repeated. All by default.")
    @click.option(
        "--shape",
        "shapes",
        multiple=True,
        metavar="ROWSxCOLS",
        help=(
            "The shape of the values, such as 8192x8192; may be repeated. Five from 1024x1024 to 8192x8192 by default."
        ),
    )
    @click.option(
        "--axis", type=click.IntRange(-2, -1), default=-1, show_default=True, help="The axis that is cut into blocks."
    )
    @click.option(
        "--l2",
        multiple=True,
        type=click.Choice(["warm", "flushed"]),
        help=("State of the L2 cache before each call: warm from the previous call, or flushed. Both by default."),
    )
    @with_repeat
    @with_plot
    @as_json
    @click.pass_context
    def command(ctx, plot, json_output, shapes, **choices):
        from ..bench.quantizers import (
            draw_quantizers,
            parse_shape,
            quantizer_report,
            quantizer_table,
        )

        choices["shapes"] = [parse_shape(shape) for shape in shapes]
        measure(
            ctx, plot, json_output, lambda: quantizer_report(operation, **choices), quantizer_table, draw_quantizers
        )


bench_quantizers(
    "quantize", "Time quantizers beside a copy on the device: bytes per second, each read and write counted once."
)
bench_quantizers("dequantize", "Time the inverses of quantizers beside a copy on the device.")


@bench.command("attention")
@click.option(
    "--format",
    "combinations",
    multiple=True,
    metavar="QK+PV",
    help="Formats of the two products, such as mxfp4+bf16; may be repeated. All by default.",
)
@with_dtypes("The dtype of q, k and v; may be repeated. bf16 by default.")
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    metavar="SHAPE",
    help="Sizes such as b4h32s2048d128, or b1h32g8q16k32768d128 with g heads of keys; may be repeated.",
)
@click.option("--causal/--no-causal", default=None, help="Only with, or only without the causal mask. Both by default.")
@with_repeat
@with_plot
@as_json
@click.pass_context
def bench_attention(ctx, combinations, shapes, causal, plot, json_output, **choices):
    """Time fused attention beside the card's own rate of MMAs, and compare a slice of the result with float64."""
    from ..bench.attention import (
        Shape,
        attention_report,
        attention_table,
        draw_attention,
        parse_combination,
    )

    choices["combinations"] = [parse_combination(text) for text in combinations]
    choices["shapes"] = [Shape.parse(text) for text in shapes]
    if causal is not None:
        choices["causal"] = [causal]
    measure(ctx, plot, json_output, lambda: attention_report(**choices), attention_table, draw_attention)


@bench.command("gemm")
@click.option(
    *("--format", "pairs"),
    multiple=True,
    metavar="A+B",
    help="Formats of the operands, such as mxfp8+mxfp4; may be repeated. All by default.",
)
@click.option(
    *("--shape", "shapes"),
    multiple=True,
    metavar="SHAPE",
    help="Sizes such as m8192n8192k8192: C has m rows and n columns; may be repeated.",
)
@with_repeat
@with_plot
@as_json
@click.pass_context
def bench_gemm(ctx, pairs, shapes, plot, json_output, **choices):
    """Time matrix products beside the card's own rate of MMAs; few rows in a graph, beside a kernel that only reads."""
    from ..bench.products import (
        Shape,
        draw_products,
        parse_pair,
        product_report,
        product_table,
    )

    choices["pairs"] = [parse_pair(text) for text in pairs]
    choices["shapes"] = [Shape.parse(text) for text in shapes]
    measure(ctx, plot, json_output, lambda: product_report(**choices), product_table, draw_products)


@bench.command("produce")
@click.option(
    "--function", "functions", multiple=True, help="A function such as rmsnorm; may be repeated. All by default."
)
@click.option(
    "--format", "formats", multiple=True, help="Format of the results: bf16 or a block format. All by default."
)
@click.option(
    *("--shape", "shapes"),
    multiple=True,
    metavar="ROWSxCOLS",
    help="The shape of results, such as 8192x8192; may be repeated.",
)
@click.option("--l2", multiple=True, type=click.Choice(["warm", "flushed"]), help="As in `bench quantize`.")
@with_repeat
@with_plot
@as_json
@click.pass_context
def bench_produce(ctx, plot, json_output, shapes, **choices):
    """Time norms, gates, activations, rotations and `append_qkv` beside a copy on the device."""
    from ..bench.producers import draw_producers, producer_report, producer_table
    from ..bench.quantizers import parse_shape

    choices["shapes"] = [parse_shape(shape) for shape in shapes]
    measure(ctx, plot, json_output, lambda: producer_report(**choices), producer_table, draw_producers)
