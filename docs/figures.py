"""The pictures of the pages, drawn from the code that they show: python docs/figures.py writes docs/figures/.

`attention_error.png` is what the blocks of docs/tutorial/attention.md draw.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path[:0] = [str(ROOT), str(DOCS)]

import matplotlib  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.patches import FancyBboxPatch, Rectangle  # noqa: E402

from ptxrt.blocks import BLOCK_FORMATS, swizzled_offsets  # noqa: E402
from ptxrt.tiles import TILE_KEYS, tile_layout  # noqa: E402

# SVG text stays text, in the reader's font. The salt makes equal input give equal bytes.
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "ptxrt", "font.family": "sans-serif", "font.size": 9}
LIGHT, MIDDLE, DARK, WARM = "#d6e4f5", "#8fb4de", "#2a5a94", "#f3c77b"


def figure_of(width: float, height: float):
    """Return a figure with one panel without axes."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.set_axis_off()
    return figure, axes


def blocks() -> Figure:
    """Draw rows of 64 values: codes, blocks, scales."""
    figure, axes = figure_of(9, 2.6)
    for row, name in enumerate(("mxfp4", "nvfp4")):
        form, top = BLOCK_FORMATS[name], -3.2 * row
        axes.text(-1, top + 0.9, name, ha="right", va="center", weight="bold")
        for i in range(64):
            axes.add_patch(
                Rectangle(
                    (i, top), 1, 0.8, facecolor=(LIGHT, MIDDLE)[i // form.block % 2], edgecolor="white", linewidth=0.5
                )
            )
        for block in range(64 // form.block):
            middle = (block + 0.5) * form.block
            axes.add_patch(Rectangle((middle - 1.5, top + 1.3), 3, 0.8, facecolor=WARM, edgecolor="white"))
            axes.text(middle, top + 1.7, f"s{block}", ha="center", va="center")
            axes.plot(
                [block * form.block + 0.3, (block + 1) * form.block - 0.3], [top + 1.05] * 2, color=DARK, linewidth=1
            )
        bits = (
            f"{form.element.name} codes of {form.bits} bits; one {form.scale.name} scale of 8 bits "
            f"for {form.block} values"
        )
        axes.text(0, top - 0.5, bits + ("; one float32 scale for the array" if form.two_level else ""), va="center")
    axes.set(xlim=(-7, 64.5), ylim=(-4.2, 2.4))
    return figure


def scales() -> Figure:
    """Draw the byte of each scale in a tile of 128 rows and 4 blocks, from the library's own layout."""
    places = swizzled_offsets(128, 4)
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    axes = figure.subplots()
    shown = places.reshape(4, 32, 4).transpose(1, 0, 2).reshape(32, 16)  # row r % 32, four columns for each r / 32
    axes.imshow(shown[:8], cmap="Blues", aspect="auto", vmin=-20, vmax=260)
    for row in range(8):
        for column in range(16):
            axes.text(column, row, shown[row, column], ha="center", va="center", fontsize=8)
    axes.set_xticks(range(16), [f"b{i % 4}" for i in range(16)])
    axes.set_yticks(range(8), [f"r mod 32 = {i}" for i in range(8)])
    for group in range(1, 4):
        axes.axvline(4 * group - 0.5, color="white", linewidth=3)
    axes.secondary_xaxis("top").set_xticks(
        [1.5 + 4 * i for i in range(4)], [f"rows {32 * i} to {32 * i + 31}" for i in range(4)]
    )
    axes.set_title("Byte of the scale of row r and block b (first 8 of 32 lines)")
    return figure


def tile() -> Figure:
    """Draw which 16-byte chunk of a key tile holds each chunk of a row."""
    layout = tile_layout("nvfp4", "k", 128)
    places = layout.codes_places[:, ::16] // 16
    chunks = places.shape[1]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 2))
    left.imshow(places[:16] % chunks, cmap="Blues", aspect="auto", vmin=-1, vmax=2 * chunks)
    for row in range(16):
        for chunk in range(chunks):
            left.text(chunk, row, places[row, chunk] % chunks, ha="center", va="center", fontsize=8)
    left.set(xlabel="chunk of the row", ylabel="key", xticks=range(chunks), title="Place of a chunk in its row")
    right.set_axis_off()
    right.set(
        xlim=(0, layout.nbytes),
        ylim=(-1.6, 2),
        title=f"A tile of {TILE_KEYS} keys, head dimension {layout.dim}, nvfp4: {layout.nbytes} bytes",
    )
    right.add_patch(Rectangle((0, 0), layout.code_bytes, 1, facecolor=LIGHT, edgecolor=DARK))
    right.add_patch(
        Rectangle((layout.code_bytes, 0), layout.nbytes - layout.code_bytes, 1, facecolor=WARM, edgecolor=DARK)
    )
    row_bytes = layout.code_bytes // TILE_KEYS
    for row in range(1, TILE_KEYS):
        right.plot([row * row_bytes] * 2, [0, 1], color="white", linewidth=0.6)
    right.text(layout.code_bytes / 2, 0.5, f"codes: {TILE_KEYS} rows of {row_bytes} bytes", ha="center", va="center")
    right.text(layout.code_bytes, 1.25, f"scales: {layout.nbytes - layout.code_bytes} bytes", ha="center")
    right.text(0, -0.5, "0", ha="center")
    right.text(layout.code_bytes, -0.5, layout.code_bytes, ha="center")
    right.text(layout.nbytes, -0.5, layout.nbytes, ha="right")
    return figure


def stages_of(format: str, dim: int) -> int:
    """Return the number of stages of a block of attention on sm_120a, as BlockTiling computes it."""
    source = (ROOT / "kernels_cu" / "op" / "attention_blocks.cuh").read_text(encoding="utf-8")
    kilobytes, reserve, most = map(
        int, re.search(r"budget = (\d+) \* 1024 / Shape::blocks - (\d+);.*?< (\d+) \?", source, re.S).groups()
    )
    stage = sum(tile_layout(format, role, dim).nbytes for role in "kv")
    return min(most, (kilobytes * 1024 - reserve) // stage)


def pipeline() -> Figure:
    """Draw copies, MMAs and softmax of two warps over the tiles, with the waits at the barriers of the stages."""
    stages, tiles, ahead = stages_of("nvfp4", 128), 6, 2
    figure, axes = figure_of(9, 3.2)
    lanes = {"copies": 3, "warp 0": 2, "warp 1": 1}
    for name, y in lanes.items():
        axes.text(-0.3, y + 0.4, name, ha="right", va="center", weight="bold")

    def box(start, y, width, text, color):
        axes.add_patch(
            FancyBboxPatch(
                (start, y),
                width - 0.08,
                0.75,
                boxstyle="round,pad=0,rounding_size=0.06",
                facecolor=color,
                edgecolor=DARK,
                linewidth=0.6,
            )
        )
        axes.text(start + (width - 0.08) / 2, y + 0.375, text, ha="center", va="center", fontsize=8)

    taken = {i: 2.0 + 3.0 * i for i in range(tiles)}  # start of each tile in the first warp
    free = 0.0
    for i in range(tiles):
        # take() of a tile starts the copy of the one `ahead` of it.
        start = max(free, taken[i - ahead] if i >= ahead else 0.0)
        box(start, lanes["copies"], 1.0, f"K{i} V{i}", WARM)
        axes.text(start + 0.46, lanes["copies"] + 0.95, f"stage {i % stages}", ha="center", fontsize=7)
        free = start + 1.0
    for warp in range(2):
        for i in range(tiles):
            start = taken[i] + 1.5 * warp
            y = lanes[f"warp {warp}"]
            box(start, y, 0.9, f"Q K{i}ᵀ", MIDDLE)
            box(start + 0.9, y, 1.2, "softmax", "white")
            box(start + 2.1, y, 0.9, f"P V{i}", MIDDLE)
    end = taken[tiles - 1] + 4.6
    axes.annotate("", (end, 0.55), (0, 0.55), arrowprops=dict(arrowstyle="->", color="black"))
    axes.text(end / 2, 0.2, "time", ha="center")
    axes.set(xlim=(-2.2, end), ylim=(0, 4.4), title=f"{stages} stages, {ahead} tiles in flight; blue: tensor cores")
    return figure


def layers() -> Figure:
    """Draw the layers of the package and of the kernels."""
    python = [
        ("commands, tests", "the command line"),
        ("ops", "functions and declarations"),
        ("kernel, prepared, launch", "binding, recorded calls, grids"),
        ("array, selection", "device arrays, the choice of a machine"),
        ("driver | emulator", "CUDA driver API | PTX on the CPU"),
        ("backend", "what a machine must do"),
    ]
    kernels = [
        ("*.cu", "entries: instances and launch facts, no logic"),
        ("op/", "algorithms: no asm, no lane numbers"),
        ("tile/", "where elements, codes and scales lie"),
        ("ptx/", "one instruction for each function, portable stand-ins"),
    ]
    figure, axes = figure_of(9, 3.6)
    for column, (title, rows, color) in enumerate(
        (("Python: ptxrt/", python, LIGHT), ("CUDA: kernels_cu/", kernels, WARM))
    ):
        x, height = 5.2 * column, 6.0 / len(rows)
        axes.text(x + 2.4, 6.25, title, ha="center", weight="bold")
        for i, (name, words) in enumerate(rows):
            y = 6.0 - (i + 1) * height
            axes.add_patch(
                FancyBboxPatch(
                    (x, y + 0.08),
                    4.8,
                    height - 0.2,
                    boxstyle="round,pad=0,rounding_size=0.06",
                    facecolor=color,
                    edgecolor=DARK,
                    linewidth=0.6,
                )
            )
            axes.text(x + 2.4, y + height / 2 + 0.14, name, ha="center", va="center", weight="bold")
            axes.text(x + 2.4, y + height / 2 - 0.22, words, ha="center", va="center", fontsize=8)
    for x in (-0.25, 10.25):
        axes.annotate("", (x, 0), (x, 6), arrowprops=dict(arrowstyle="->", color=DARK))
    axes.text(-0.4, 3, "imports", rotation=90, va="center", ha="right")
    axes.text(10.4, 3, "includes", rotation=90, va="center", ha="left")
    axes.set(xlim=(-0.9, 10.9), ylim=(-0.1, 6.6))
    return figure


FIGURES = {"blocks": blocks, "scales": scales, "tile": tile, "pipeline": pipeline, "layers": layers}


def write(folder: Path) -> list[Path]:
    """Draw all figures that depend on code alone."""
    written = []
    with matplotlib.rc_context(STYLE):
        for name, draw in FIGURES.items():
            path = folder / f"{name}.svg"
            draw().savefig(path, metadata={"Date": None})
            # Matplotlib writes trailing blanks.
            path.write_text(
                "\n".join(line.rstrip() for line in path.read_text(encoding="utf-8").splitlines()) + "\n",
                encoding="utf-8",
                newline="\n",
            )
            written.append(path)
    return written


def of_tutorial(folder: Path) -> None:
    """Run the page of attention in the folder of its picture."""
    import tempfile

    import pages

    import ptxrt

    with tempfile.TemporaryDirectory() as name, ptxrt.using("emulator"):
        place = Path(name)
        (place / "data").symlink_to(ROOT / "data", target_is_directory=True)
        before = Path.cwd()
        os.chdir(place)
        try:
            pages.run(DOCS / "tutorial" / "attention.md", place, frozenset({"matplotlib"}))
        finally:
            os.chdir(before)
        (folder / "attention_error.png").write_bytes((place / "attention_error.png").read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=DOCS / "figures")
    folder = parser.parse_args().folder
    folder.mkdir(exist_ok=True)
    of_tutorial(folder)
    for path in write(folder):
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
