"""Fragment layouts: where every kind of mma.sync holds its elements and scales, and drawings of that.

`KINDS` are the kinds by name. A `Map` shows an operand of one of them as text, as SVG, or as a table of colored cells.

Source: PTX ISA 9.0, 9.7.14.5 (fragments of m16n8k8, m16n8k16, m16n8k32 and m16n8k64) and 9.7.14.3 (scales). The probes
(ptxrt.ops.probes, `ptxrt probe`) measure the same layouts on the machine where they run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple
from xml.sax.saxutils import escape

import numpy as np

from .errors import ArgumentError

LANES = 32
ROWS, COLUMNS = 16, 8
OPERANDS = ("a", "b", "c", "scales_a", "scales_b")


def fragment_place(number, width: int, registers: int, depth: int):
    """Row (A) or column (B), and k, of an element: `width` elements in each of `registers` registers, `depth` k in all.

    Elements are numbered by lane, then register, then from a register's lowest bits on. Source: PTX ISA 9.0, 9.7.14.5.
    """
    lane, register, element = number // (registers * width), number // width % registers, number % width
    upper, half = (register % 2, register // 2) if registers == 4 else (0, register)
    return lane // 4 + 8 * upper, lane % 4 * width + element + depth // 2 * half


def output_place(lane, i):
    """Row and column of output i of a lane."""
    return lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2


def scale_lane(operand: str, row, thread):
    """The lane that holds the scales of a row of A ("a") or a column of B ("b") under a thread selector.

    Source: PTX ISA 9.0, 9.7.14.3.
    """
    return 4 * (row % 8) + 2 * thread + row // 8 if operand == "a" else 4 * row + thread


@dataclass(frozen=True)
class Scales:
    """The scales of a kind: their type, the blocks of k in a row or column, and the valid byte selectors."""

    type: str
    blocks: int
    bytes: tuple[int, ...]


@dataclass(frozen=True)
class Kind:
    """A kind of mma.sync.

    instruction: one opcode of it. types: those that A and B may have. accumulator: the type of C and D. width: elements
    in a 32-bit register of A and B. probe: the kernel that measures its layout.
    """

    name: str
    instruction: str
    types: tuple[str, ...]
    accumulator: str
    width: int
    scales: Scales | None = None
    probe: str = ""

    @property
    def depth(self) -> int:
        """The length of k of one instruction."""
        return 8 * self.width

    def shape(self, operand: str) -> tuple[int, int]:
        """Rows and columns of an operand: A [row, k], B [k, column], C and scales of A by row, scales of B by
        column."""
        blocks = self.scales.blocks if self.scales else 0
        return {
            "a": (ROWS, self.depth),
            "b": (self.depth, COLUMNS),
            "c": (ROWS, COLUMNS),
            "scales_a": (ROWS, blocks),
            "scales_b": (blocks, COLUMNS),
        }[operand]

    def places(self, operand: str, byte: int = 0, thread: int = 0) -> np.ndarray:
        """(lane, register, position in the register) of each element of an operand, int64 [rows, columns, 3].

        byte, thread: the selectors of scales. ArgumentError for an operand or selectors that the kind does not have.
        """
        self.check(operand, byte, thread)
        table = np.empty((*self.shape(operand), 3), np.int64)
        if operand in ("a", "b"):
            registers = 4 if operand == "a" else 2
            number = np.arange(LANES * registers * self.width)
            row, k = fragment_place(number, self.width, registers, self.depth)
            place = np.stack(
                [number // (registers * self.width), number // self.width % registers, number % self.width], -1
            )
            table[(row, k) if operand == "a" else (k, row)] = place
        elif operand == "c":
            lane, i = np.meshgrid(np.arange(LANES), np.arange(4), indexing="ij")
            pair = self.accumulator == "f16"
            table[output_place(lane, i)] = np.stack([lane, i // 2 if pair else i, i % 2 if pair else 0 * i], -1)
        else:
            rows, blocks = (ROWS, COLUMNS)[operand == "scales_b"], self.scales.blocks
            row, block = np.meshgrid(np.arange(rows), np.arange(blocks), indexing="ij")
            place = np.stack([scale_lane(operand[-1], row, thread), 0 * row, byte + block], -1)
            table[:] = place if operand == "scales_a" else place.swapaxes(0, 1)
        return table

    def check(self, operand: str, byte: int, thread: int) -> None:
        """ArgumentError for an operand or selectors that this kind does not have."""
        if operand not in OPERANDS:
            raise ArgumentError(f"operand is {operand!r}; there is {', '.join(OPERANDS)}")
        if not operand.startswith("scales"):
            if (byte, thread) != (0, 0):
                raise ArgumentError(
                    f"selectors {byte},{thread} choose scales; {operand} of {self.name} has none, leave them out"
                )
            return
        if self.scales is None:
            scaled = ", ".join(kind.name for kind in KINDS.values() if kind.scales)
            raise ArgumentError(f"{self.name} has no scales; kinds with scales are {scaled}")
        threads = 2 if operand == "scales_a" else 4
        if byte not in self.scales.bytes or thread not in range(threads):
            raise ArgumentError(
                f"selectors of {operand} of {self.name} are {byte},{thread}; the byte is one of "
                f"{', '.join(map(str, self.scales.bytes))}, the thread one of {', '.join(map(str, range(threads)))}"
            )

    def who_holds(self, operand: str, row: int, column: int, byte: int = 0, thread: int = 0) -> "Place":
        """Return the place of an element. ArgumentError for a row or column outside the operand."""
        table = self.places(operand, byte, thread)
        rows, columns = table.shape[:2]
        if not (0 <= row < rows and 0 <= column < columns):
            raise ArgumentError(
                f"element {row},{column} of {operand} of {self.name}: it has {rows} rows and {columns} columns"
            )
        lane, register, position = table[row, column].tolist()
        bits = 8 if operand.startswith("scales") else self.bits(operand)
        return Place(lane, register, position, bits)

    def bits(self, operand: str) -> int:
        """Bits of an element's container in a register."""
        if operand == "c":
            return 16 if self.accumulator == "f16" else 32
        return 32 // self.width


class Place(NamedTuple):
    """An element: the lane, its register, the position from the lowest bits on, and the bits of its container."""

    lane: int
    register: int
    position: int
    bits: int

    def __str__(self) -> str:
        first = self.position * self.bits
        return f"lane {self.lane}, register {self.register}, bits {first + self.bits - 1}..{first}"


_NARROW = ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1")
_MMA = "mma.sync.aligned"

#: Every kind of mma.sync that sm_120a has and the emulator executes, m16n8 with the deepest k; tf32 at m16n8k8.
KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("bf16", f"{_MMA}.m16n8k16.row.col.f32.bf16.bf16.f32", ("bf16",), "f32", 2, probe="probe_mma_bf16"),
        Kind("f16", f"{_MMA}.m16n8k16.row.col.f32.f16.f16.f32", ("f16",), "f32", 2, probe="probe_mma_f16"),
        Kind("f16_f16", f"{_MMA}.m16n8k16.row.col.f16.f16.f16.f16", ("f16",), "f16", 2, probe="probe_mma_plain"),
        Kind("tf32", f"{_MMA}.m16n8k8.row.col.f32.tf32.tf32.f32", ("tf32",), "f32", 1, probe="probe_mma_plain"),
        Kind("fp8", f"{_MMA}.m16n8k32.row.col.f32.e4m3.e4m3.f32", ("e4m3", "e5m2"), "f32", 4, probe="probe_mma_plain"),
        Kind(
            "fp8_f16", f"{_MMA}.m16n8k32.row.col.f16.e4m3.e4m3.f16", ("e4m3", "e5m2"), "f16", 4, probe="probe_mma_plain"
        ),
        Kind("int8", f"{_MMA}.m16n8k32.row.col.s32.s8.s8.s32", ("s8", "u8"), "s32", 4, probe="probe_mma_plain"),
        Kind(
            "f8f6f4",
            f"{_MMA}.kind::f8f6f4.m16n8k32.row.col.f32.e4m3.e4m3.f32",
            _NARROW,
            "f32",
            4,
            probe="probe_mma_f8f6f4",
        ),
        Kind(
            "f8f6f4_f16",
            f"{_MMA}.kind::f8f6f4.m16n8k32.row.col.f16.e4m3.e4m3.f16",
            _NARROW,
            "f16",
            4,
            probe="probe_mma_f8f6f4",
        ),
        Kind(
            "mxf8f6f4",
            f"{_MMA}.kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col.f32.e4m3.e4m3.f32.ue8m0",
            _NARROW,
            "f32",
            4,
            Scales("ue8m0", 1, (0, 1, 2, 3)),
            "probe_mma_mxf8f6f4",
        ),
        Kind(
            "mxf4",
            f"{_MMA}.kind::mxf4.block_scale.scale_vec::2X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue8m0",
            ("e2m1",),
            "f32",
            8,
            Scales("ue8m0", 2, (0, 2)),
            "probe_mma_mxf4",
        ),
        Kind(
            "mxf4nvf4",
            f"{_MMA}.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3",
            ("e2m1",),
            "f32",
            8,
            Scales("ue4m3", 4, (0,)),
            "probe_mma_mxf4nvf4",
        ),
        Kind(
            "mxf4nvf4_2x",
            f"{_MMA}.kind::mxf4nvf4.block_scale.scale_vec::2X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue8m0",
            ("e2m1",),
            "f32",
            8,
            Scales("ue8m0", 2, (0, 2)),
            "probe_mma_mxf4nvf4_2x",
        ),
    )
}


# ---------------------------------------------------------------------------------------------------------------------
# Maps


class Cell(NamedTuple):
    """The drawing of one or several neighboring elements: text, and the lane and register that give the color."""

    text: str
    lane: int
    register: int


class Map(NamedTuple):
    """A picture of an operand as a table: title, word in the corner, heads of columns, and rows with their names."""

    title: str
    corner: str
    heads: list[str]
    rows: list[tuple[str, list[Cell]]]


def span(first: int, length: int) -> str:
    """Some numbers in order: `5`, or `5-7`."""
    return str(first) if length == 1 else f"{first}-{first + length - 1}"


def runs(table: Sequence[Sequence[tuple[str, int]]], whole: int) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Heads and rows of a table of (register, position in it).

    Neighboring columns are joined if in every row they continue the same register at the next position. A cell names
    its positions unless it covers all `whole` positions of the register.
    """
    count = len(table[0])

    def goes_on(line, column):
        return line[column] == (line[column - 1][0], line[column - 1][1] + 1)

    starts = [column for column in range(count) if column == 0 or not all(goes_on(line, column) for line in table)]
    ends = [*starts[1:], count]
    rows = []
    for row, line in enumerate(table):
        cells = [(line[start], end - start) for start, end in zip(starts, ends)]
        rows.append(
            (
                str(row),
                [name if length == whole else f"{name}.{span(first, length)}" for (name, first), length in cells],
            )
        )
    return [span(start, end - start) for start, end in zip(starts, ends)], rows


def draw(kind: Kind, operand: str, byte: int = 0, thread: int = 0) -> Map:
    """Draw the map of an operand: A, C and the scales of A by rows, B and its scales by columns."""
    table = kind.places(operand, byte, thread)
    across = operand in ("b", "scales_b")  # a register holds elements of one column: columns are drawn as lines
    table = table.swapaxes(0, 1) if across else table
    if operand.startswith("scales"):
        size = kind.depth // kind.scales.blocks
        heads = [span(size * block, size) for block in range(kind.scales.blocks)]
        rows = [
            (str(row), [Cell(f"{lane}.s{each}", lane, each) for lane, _, each in line])
            for row, line in enumerate(table.tolist())
        ]
    else:
        named = [
            [(f"{lane}.{operand}{register}", position) for lane, register, position in line] for line in table.tolist()
        ]
        heads, texts = runs(named, 32 // kind.bits(operand))
        firsts = [int(head.partition("-")[0]) for head in heads]  # of the elements that a cell stands for
        rows = [
            (row, [Cell(text, *line[first][:2].tolist()) for text, first in zip(cells, firsts)])
            for (row, cells), line in zip(texts, table)
        ]
    words = {"a": "A", "b": "B", "c": "C and D", "scales_a": "scales of A", "scales_b": "scales of B"}[operand]
    chosen = f", byte {byte}, thread {thread}" if operand.startswith("scales") else ""
    corner = ("col" if across else "row") + "\\" + ("col" if operand == "c" else "k")
    return Map(f"{words} of {kind.name}{chosen}: {kind.instruction}", corner, heads, rows)


#: Colors by lane % 4, to be mixed with white by register.
_HUES = ((86, 160, 233), (235, 160, 40), (60, 175, 110), (214, 110, 170))
_WHITE = (0.25, 0.45, 0.62, 0.78)


def color(cell: Cell) -> tuple[int, int, int]:
    """Red, green and blue of a cell, from 0 to 255: the hue shows lane % 4, the lightness the register."""
    white = _WHITE[cell.register % 4]
    return tuple(round(part + (255 - part) * white) for part in _HUES[cell.lane % 4])  # type: ignore[return-value]


def grid(corner: str, heads: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> list[list[str]]:
    """The cells of a table, heads included, as words of equal width in each column."""
    widths = [max(len(corner), *(len(name) for name, _ in rows))]
    widths += [max(len(head), *(len(cells[i]) for _, cells in rows)) for i, head in enumerate(heads)]
    lines = [[corner, *heads], *([name, *cells] for name, cells in rows)]
    return [[cell.rjust(width) for cell, width in zip(line, widths)] for line in lines]


def svg(drawn: Map) -> str:
    """The map as an SVG picture."""
    words = grid(drawn.corner, drawn.heads, [(name, [cell.text for cell in cells]) for name, cells in drawn.rows])
    letter, height, pad = 7.0, 20, 8
    widths = [round(len(word) * letter + 2 * pad) for word in words[0]]
    lefts = [sum(widths[:column]) for column in range(len(widths))]
    whole = max(sum(widths), round(len(drawn.title) * letter) + 2 * pad)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{whole}" height="{height * (len(words) + 1) + pad}" '
        'font-family="monospace" font-size="11.5" text-anchor="middle">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{pad}" y="{height - 6}" text-anchor="start">{escape(drawn.title)}</text>',
    ]
    for line, texts in enumerate(words, 1):
        for column, text in enumerate(texts):
            left, top = lefts[column], line * height
            if line > 1 and column > 0:
                red, green, blue = color(drawn.rows[line - 2][1][column - 1])
                fill = f"rgb({red},{green},{blue})"
                box = f'x="{left}" y="{top}" width="{widths[column]}" height="{height}"'
                parts.append(f'<rect {box} fill="{fill}" stroke="white"/>')
            parts.append(
                f'<text x="{left + widths[column] / 2:g}" y="{top + height - 6}">{escape(text.strip())}</text>'
            )
    return "\n".join([*parts, "</svg>\n"])


@cache
def find(name: str) -> Kind:
    """Return the kind of this name; ArgumentError that lists all names."""
    if name not in KINDS:
        raise ArgumentError(f"no kind of mma.sync is called {name!r}; there is {', '.join(KINDS)}")
    return KINDS[name]
