"""`speed`: the speed of a kernel's machine code on a card, by the static model."""

from __future__ import annotations

from typing import Any

import click

from .group import as_json, main, print_json
from .names import complete_kernels, find_units

# The cards of ptxrt/speed/rates.py, which a test compares. They are repeated here so that `--help` imports nothing.
CARDS = ("RTX 5090", "RTX 5080", "RTX 5070 Ti", "RTX PRO 6000", "DGX Spark", "H200")


@main.command()
@click.argument("kernel", shell_complete=complete_kernels)
@click.option(
    "--card",
    type=click.Choice(CARDS, case_sensitive=False),
    default=CARDS[0],
    show_default=True,
    help="The modeled card.",
)
@click.option("--launches", is_flag=True, help="Also model whole launches of attention of many queries.")
@click.option("--doubts", is_flag=True, help="Also show the plain path with other values of uncertain rates.")
@as_json
def speed(kernel, card, launches, doubts, json_output):
    """Estimate the speed of KERNEL's machine code on a card by a static model; nothing runs.

    KERNEL is a name, one of its variants as in 'attention_nvfp4[dim=128,dim_v=128]', or a unit. For attention every
    path of a tile is listed: plain; raising, if a row's maximum grows; masked, as by causal masks; sums, with
    return_lse; smooth_q; smooth_sums, as smooth_q with return_lse. Kernels list the paths that they have: those of 16
    bits have no smooth_q, those with weights in 16 bits no sums, and the code for an H200 has fewer loops and so fewer
    paths. Attention of one query lists a whole tile as plain. For other kernels plain is the steady loop. Entries that
    end in _half have blocks of half the rows, which short launches take; --launches chooses between both.

    TFLOPS count useful work, mean and range over 16 starts of the warps. docs/speed.md describes what the model covers
    and what it does not. Needs NVIDIA's cuobjdump.
    """
    from ..speed import CARDS as cards
    from ..speed import Machine, doubts_of, entries_of, launches_of, speeds_of, with_halves

    of_card = cards[card]
    machine = Machine(of_card)
    found: list[dict[str, Any]] = []
    launched = False
    _, chosen = find_units(kernel)
    for unit in chosen:
        entries = list(entries_of(unit.name, of_card))
        halves = {entry.name: half for entry, half in with_halves(entries)}
        for entry in entries:
            warps, blocks = entry.resident(of_card)
            speeds = speeds_of(entry, machine)
            row: dict[str, Any] = {
                "entry": entry.name,
                "card": card,
                "warps": warps * blocks,
                "registers": entry.registers,
            }
            row["paths"] = {name: speed.as_dict() for name, speed in speeds.items()}
            tiled = entry.is_attention and next(iter(speeds.values())).unit == "TFLOPS"
            if launches and tiled and entry.name in halves:
                by_shape = launches_of(entry, halves[entry.name], machine)
                row["launches"] = {shape: round(tflops, 1) for shape, tflops in by_shape.items()}
                launched = True
            if doubts:
                row["doubts"] = {name: round(value, 1) for name, value in doubts_of(entry, machine).items()}
            found.append(row)
            if not json_output:
                print_entry(row, speeds)
    if json_output:
        print_json({"card": vars(of_card), "entries": found})
    elif launches and not launched:
        click.echo(f"no launches of {kernel} are modeled: only those of attention of many queries, in whole blocks")


def print_entry(row: dict, speeds: dict) -> None:
    """The lines of one entry."""
    half = " (half blocks, for short launches)" if row["entry"].endswith("_half") else ""
    click.echo(f"{row['entry']}{half} on {row['card']}: {row['warps']} warps to a part, {row['registers']} registers")
    for name, speed in speeds.items():
        pipes = "  ".join(f"{pipe} {cycles:.0f}" for pipe, cycles in speed.pipes.items())
        click.echo(
            f"  {name:11} {speed.speed:7.0f} {speed.unit} ({speed.lowest:.0f}..{speed.highest:.0f}), "
            f"{100 * speed.share:.0f} % of {speed.peak:.0f}; "
            f"{speed.instructions} instructions; cycles of a warp's trip: {pipes}"
        )
    for title, word in (("launches", "launch"), ("doubts", "doubt")):
        for name, value in row.get(title, {}).items():
            click.echo(f"  {word:11} {name:24} {value:7.0f} {next(iter(speeds.values())).unit}")
