"""Plots of tables. Only this module needs matplotlib; a file is written atomically."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from ..errors import ArgumentError
from ..files import write_atomically

# Sizes in inches: height of a panel's axes, width of one group of bars, least width of a panel.
PANEL_HEIGHT, GROUP_WIDTH, LEAST_WIDTH = 3.2, 0.9, 5.0
# The same for horizontal bars: height of a bar, width of a panel, and the number of panels side by side.
LINE_HEIGHT, PANEL_WIDTH, PANELS_BESIDE = 0.17, 5.5, 2


def check(path: Path, option: str = "--plot") -> None:
    """Raise ArgumentError if a plot cannot be written, before anything is measured for it.

    option: the flag that requested the plot.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise ArgumentError(f"{option} needs matplotlib ({error}); pip install 'ptxrt[plots]'") from error
    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        there = ", ".join(f".{kind}" for kind in kinds)
        raise ArgumentError(
            f"{option} {path}: matplotlib writes no {path.suffix or 'file without a suffix'}; there is {there}"
        )
    if not path.parent.is_dir():
        raise ArgumentError(f"{option} {path}: there is no folder {path.parent}")


def figure_of(rows: int, columns: int, groups: int):
    """Return a figure without a window, and its panels as a list of lists."""
    from matplotlib.figure import Figure

    width = max(LEAST_WIDTH, GROUP_WIDTH * groups + 1)
    figure = Figure(figsize=(width * columns, PANEL_HEIGHT * rows + 0.6), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, sharey=True)


def figure_of_lines(panels: int, lines: int):
    """Return a figure without a window for horizontal bars, and the list of its panels of `lines` lines each."""
    from matplotlib.figure import Figure

    columns = min(panels, PANELS_BESIDE)
    rows = -(-panels // columns)
    figure = Figure(
        figsize=(PANEL_WIDTH * columns + 1.2, (LINE_HEIGHT * lines + 1.0) * rows + 0.4), layout="constrained"
    )
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for empty in axes[panels:]:
        empty.set_axis_off()
    return figure, list(axes[:panels])


def save(figure, path: Path, legend_of=None) -> None:
    """Write a figure to a file, in the format of the file's suffix, with the legend of one of its panels
    beside them."""
    check(path)
    if legend_of is not None:
        figure.legend(*legend_of.get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    data = BytesIO()
    figure.savefig(data, format=path.suffix[1:].lower(), dpi=150)
    write_atomically(path, data.getvalue())


def grouped_bars(axes, groups: Sequence[str], series: Mapping[str, Sequence[float | None]]) -> None:
    """Draw bars side by side in each group, one of each series; None leaves a gap."""
    width = 0.8 / max(len(series), 1)
    for i, (name, values) in enumerate(series.items()):
        present = [(group, value) for group, value in enumerate(values) if value is not None]
        places = [group + (i - (len(series) - 1) / 2) * width for group, _ in present]
        axes.bar(places, [value for _, value in present], width, label=name)
    axes.set_xticks(range(len(groups)), groups, rotation=20, ha="right", rotation_mode="anchor")


def lying_bars(
    axes, lines: Sequence[str], series: Mapping[str, Sequence[float | None]], notes: Mapping[str, Sequence[str | None]]
) -> None:
    """Draw horizontal bars below each other for each line, one of each series, each with a note; None leaves a gap."""
    height = 0.84 / max(len(series), 1)
    for i, (name, values) in enumerate(series.items()):
        present = [(line, value) for line, value in enumerate(values) if value is not None]
        places = [line + (i - (len(series) - 1) / 2) * height for line, _ in present]
        drawn = axes.barh(places, [value for _, value in present], height, label=name)
        axes.bar_label(drawn, [note for note in notes[name] if note is not None], padding=2, fontsize="x-small")
    axes.margins(x=0.2)
    axes.set_yticks(range(len(lines)), lines, fontsize="small")
    axes.invert_yaxis()


def heat_map(
    path: Path, rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float]], label: str
) -> None:
    """Write values above 0 by row and column to a file, as colors on a logarithmic scale and as numbers."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    flat = [value for line in values for value in line]
    norm = LogNorm(min(flat), max(flat))
    figure = Figure(figsize=(2.4 + 1.05 * len(columns), 1.5 + 0.32 * len(rows)), layout="constrained")
    axes = figure.subplots()
    drawn = axes.imshow(values, norm=norm, cmap="viridis_r", aspect="auto")
    for i, line in enumerate(values):
        for j, value in enumerate(line):
            color = "white" if norm(value) > 0.55 else "black"
            axes.text(j, i, f"{value:.2g}", ha="center", va="center", color=color, fontsize="small")
    axes.set_xticks(range(len(columns)), [name.replace(", ", ",\n") for name in columns], fontsize="small")
    axes.set_yticks(range(len(rows)), rows, fontsize="small")
    axes.tick_params(length=0)
    figure.colorbar(drawn, ax=axes, label=label)
    save(figure, path)


def colored_table(
    path: Path, title: str, words: Sequence[Sequence[str]], colors: Sequence[Sequence[tuple[int, int, int]]]
) -> None:
    """Write a table of words to a file; all cells except the heads have a background color (three numbers
    up to 255)."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    widths = [max(len(line[column]) for line in words) + 2 for column in range(len(words[0]))]
    lefts = [sum(widths[:column]) for column in range(len(widths))]
    figure = Figure(
        figsize=(max(0.085 * sum(widths), 0.075 * len(title)) + 0.3, 0.2 * len(words) + 0.6), layout="constrained"
    )
    axes = figure.subplots()
    for line, texts in enumerate(words):
        for column, text in enumerate(texts):
            left, width = lefts[column], widths[column]
            if line and column:
                face = [part / 255 for part in colors[line - 1][column - 1]]
                axes.add_patch(Rectangle((left, line), width, 1, facecolor=face, edgecolor="white"))
            axes.text(
                left + width / 2, line + 0.5, text.strip(), ha="center", va="center", family="monospace", fontsize=7
            )
    axes.set(xlim=(0, sum(widths)), ylim=(len(words), 0))
    axes.set_title(title, fontsize=8, family="monospace")
    axes.set_axis_off()
    save(figure, path)


def bars(path: Path, rows: Sequence[Mapping[str, Any]], name: str, value: str, label: str, title: str) -> None:
    """Write horizontal bars of one value of each row to a file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 1.0 + 0.4 * len(rows)), layout="constrained")
    axes = figure.subplots()
    axes.barh([row[name] for row in rows], [row[value] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.set_title(title, fontsize="medium")
    save(figure, path)
