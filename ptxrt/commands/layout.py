"""`layout`: where a matrix instruction holds its elements and scales."""

from __future__ import annotations

from pathlib import Path

import click

from .group import as_json, main, print_json

OPERANDS = ("a", "b", "c", "scales_a", "scales_b")


def complete_kinds(ctx, param, incomplete: str) -> list[str]:
    """Return the names of kinds with this beginning, for the shell."""
    from .. import atlas

    return [name for name in atlas.KINDS if name.startswith(incomplete)]


class Pair(click.ParamType):
    """Two whole numbers, as `1,0`."""

    name = "two numbers"

    def convert(self, value, param, ctx):
        try:
            first, second = (int(word) for word in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r}: expected two whole numbers with a comma between, such as 1,0", param, ctx)
        return first, second


@main.command()
@click.argument("kind", required=False, shell_complete=complete_kinds)
@click.option("--operand", type=click.Choice(OPERANDS), help="One operand; all operands by default.")
@click.option(
    "--selectors", type=Pair(), metavar="BYTE,THREAD", help="Byte and thread selectors of scales; 0,0 by default."
)
@click.option("--element", type=Pair(), metavar="R,C", help="Print the lane and register that hold this element.")
@click.option("--svg", type=click.Path(path_type=Path, dir_okay=False), help="Write the map of --operand as SVG.")
@click.option(
    "--png",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the map of --operand as PNG (needs matplotlib).",
)
@as_json
def layout(kind, operand, selectors, element, svg, png, json_output):
    """Show where a kind of mma.sync holds its elements and scales; without KIND list the kinds.

    \b
    ptxrt layout mxf4                                  all operands, in color
    ptxrt layout mxf4 --operand b --element 17,3       who holds row (k) 17, column 3 of B
    ptxrt layout mxf4 --operand scales_a --selectors 2,1
    ptxrt layout mxf8f6f4 --operand a --svg a.svg --png a.png

    A is 16 x K, B is K x 8, C and D are 16 x 8. `5.a2` is register 2 of A in lane 5, its elements in order from the
    lowest bits on; `5.a2.1` is its element 1, `5.s2` byte 2 of the scales in lane 5. The hue shows the lane of a quad,
    the lightness the register. Source: PTX ISA 9.0, 9.7.14; `ptxrt probe` measures the current machine.
    """
    from .. import atlas

    if kind is None:
        if operand or selectors or element or svg or png:
            raise click.UsageError(f"name a kind: {', '.join(atlas.KINDS)}")
        list_kinds(json_output)
        return
    found = atlas.find(kind)
    if (element or svg or png or selectors) and operand is None:
        raise click.UsageError(
            f"--element, --selectors, --svg and --png want one operand: --operand {'|'.join(OPERANDS)}"
        )
    byte, thread = selectors or (0, 0)
    shown = [operand] if operand else [each for each in OPERANDS if found.scales or not each.startswith("scales")]
    if element:
        place = found.who_holds(operand, *element, byte, thread)
        if json_output:
            print_json(place._asdict())
        else:
            click.echo(f"{operand}[{element[0]}, {element[1]}] of {kind}: {place}")
    elif json_output:
        print_json(
            {
                "kind": kind,
                "instruction": found.instruction,
                "places": {each: found.places(each, byte, thread).tolist() for each in shown},
            }
        )
    elif not svg and not png:
        click.echo("\n\n".join(in_color(atlas.draw(found, each, byte, thread)) for each in shown))
    if svg or png:
        write(atlas.draw(found, operand, byte, thread), svg, png)


def list_kinds(json_output: bool) -> None:
    """Print the kinds: name, instruction, types of A and B, and the probe that measures each."""
    from .. import atlas

    if json_output:
        print_json(
            {
                name: {"instruction": kind.instruction, "types": kind.types, "probe": kind.probe}
                for name, kind in atlas.KINDS.items()
            }
        )
        return
    width = max(map(len, atlas.KINDS))
    for name, kind in atlas.KINDS.items():
        click.echo(f"{name.ljust(width)}  {kind.instruction}  ({', '.join(kind.types)})")


def in_color(drawn) -> str:
    """Return a map as text with colors, which click omits if the output is no terminal."""
    from .. import atlas

    words = atlas.grid(drawn.corner, drawn.heads, [(name, [cell.text for cell in cells]) for name, cells in drawn.rows])
    lines = [drawn.title, "  ".join(words[0])]
    for line, (_, cells) in zip(words[1:], drawn.rows):
        painted = [click.style(f"  {word}", fg=(0, 0, 0), bg=atlas.color(cell)) for word, cell in zip(line[1:], cells)]
        lines.append(line[0] + "".join(painted))
    return "\n".join(lines)


def write(drawn, svg: Path | None, png: Path | None) -> None:
    """Write the requested pictures of a map. The PNG's requirements are checked before anything is written."""
    from .. import atlas
    from ..bench import plots
    from ..files import write_atomically

    if png:
        plots.check(png, "--png")
    if svg:
        write_atomically(svg, atlas.svg(drawn).encode())
    if png:
        words = [[drawn.corner, *drawn.heads], *([name, *(cell.text for cell in cells)] for name, cells in drawn.rows)]
        plots.colored_table(png, drawn.title, words, [[atlas.color(cell) for cell in cells] for _, cells in drawn.rows])
