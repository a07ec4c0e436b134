"""Pictures of tables, by matplotlib, which is needed for nothing else; a file appears whole or not at all."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any, Mapping, Sequence

from ..errors import ArgumentError
from ..files import write_atomically

# Sizes in inches: of a panel's axes, and of one group of bars.
PANEL_HEIGHT, GROUP_WIDTH, LEAST_WIDTH = 3.2, 0.9, 5.0


def check(path: Path) -> None:
    """Say what keeps a picture from being written, before anything is measured for it: ArgumentError."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise ArgumentError(f"--plot needs matplotlib ({error}); pip install 'ptxrt[plots]'") from error
    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        there = ", ".join(f".{kind}" for kind in kinds)
        raise ArgumentError(f"--plot {path}: matplotlib writes no {path.suffix or 'file without a suffix'}; there is {there}")
    if not path.parent.is_dir():
        raise ArgumentError(f"--plot {path}: there is no folder {path.parent}")


def figure_of(rows: int, columns: int, groups: int):
    """A figure without a window, and its panels as a list of lists."""
    from matplotlib.figure import Figure

    width = max(LEAST_WIDTH, GROUP_WIDTH * groups + 1)
    figure = Figure(figsize=(width * columns, PANEL_HEIGHT * rows + 0.6), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, sharey=True)


def save(figure, path: Path, legend_of=None) -> None:
    """Write a figure to a file of the kind that its name says, with the legend of one of its panels beside them."""
    check(path)
    if legend_of is not None:
        figure.legend(*legend_of.get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    data = BytesIO()
    figure.savefig(data, format=path.suffix[1:].lower(), dpi=150)
    write_atomically(path, data.getvalue())


def grouped_bars(axes, groups: Sequence[str], series: Mapping[str, Sequence[float | None]]) -> None:
    """Bars side by side in each group, one of each series; None leaves a gap."""
    width = 0.8 / max(len(series), 1)
    for i, (name, values) in enumerate(series.items()):
        there = [(group, value) for group, value in enumerate(values) if value is not None]
        places = [group + (i - (len(series) - 1) / 2) * width for group, _ in there]
        axes.bar(places, [value for _, value in there], width, label=name)
    axes.set_xticks(range(len(groups)), groups, rotation=20, ha="right", rotation_mode="anchor")


def bars(path: Path, rows: Sequence[Mapping[str, Any]], name: str, value: str, label: str, title: str) -> None:
    """Lying bars of one value of each row, to a file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 1.0 + 0.4 * len(rows)), layout="constrained")
    axes = figure.subplots()
    axes.barh([row[name] for row in rows], [row[value] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.set_title(title, fontsize="medium")
    save(figure, path)
