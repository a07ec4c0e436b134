"""docs/fragments.md: where matrix instructions have their elements and scales, drawn from what the probes find.

The probes (ptxrt.ops.probes) know no layout: they find which element of A meets which element of B in which output, and
which scale multiplies them. Rows, columns and k get their names from `probe_fragments`, which reports where the tile code of
the kernels brings them; `Kind` raises a ValueError where the two contradict each other.
"""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

import ptxrt
from ptxrt import atlas

LANES = 32

#: Kernel, instruction, elements in a register, byte selectors of the scales.
KINDS = (
    ("probe_mma_bf16", "mma.sync m16n8k16, bf16", 2, ()),
    ("probe_mma_f16", "mma.sync m16n8k16, f16", 2, ()),
    ("probe_mma_mxf8f6f4", "mma.sync kind::mxf8f6f4 m16n8k32, scale_vec::1X", 4, (0, 1, 2, 3)),
    ("probe_mma_mxf4", "mma.sync kind::mxf4 m16n8k64, scale_vec::2X", 8, (0, 2)),
    ("probe_mma_mxf4nvf4", "mma.sync kind::mxf4nvf4 m16n8k64, scale_vec::4X", 8, (0,)),
)
LOADS = (
    ("m8n8", "ldmatrix m8n8.x4.b16", 1),
    ("m8n8_trans", "ldmatrix m8n8.x4.trans.b16", 1),
    ("m16n16_trans_b8", "ldmatrix m16n16.x2.trans.b8", 1),
    ("m8n16_b4x16_p64", "ldmatrix m8n16.x4.b8x16.b4x16_p64", 2),
)
STORES = (
    ("stored_m8n8", "stmatrix m8n8.x4.b16"),
    ("stored_m8n8_trans", "stmatrix m8n8.x4.trans.b16"),
    ("stored_m16n8_trans_b8", "stmatrix m16n8.x4.trans.b8"),
)


def findings(name: str) -> dict[str, np.ndarray]:
    """Outputs by name of one probe on the current machine."""
    kernel = ptxrt.kernels()[name]
    got = kernel(**{output.name: True for output in kernel.outputs if output.optional})
    return dict(zip((output.name for output in kernel.outputs), got if isinstance(got, tuple) else (got,)))


def the_one(values: np.ndarray, what: str) -> int:
    """The number that all values are; ValueError where they differ."""
    found = np.unique(values)
    if len(found) != 1:
        raise ValueError(f"{what}: {len(found)} different answers, {found[:5].tolist()}")
    return int(found[0])


@dataclass(frozen=True)
class Kind:
    """What is known of an MMA from its probe's findings and those of `probe_fragments`. Elements go by number."""

    name: str
    width: int
    found: dict = field(repr=False)
    tiles: dict = field(repr=False)

    @property
    def depth(self) -> int:
        return 8 * self.width

    @cached_property
    def b(self) -> np.ndarray:
        """Column and k of each element of B, (elements, 2): k as the tile code loads it, the column where its products go."""
        lane, register, element = self.where(np.arange(64 * self.width), 2)
        byte = self.tiles["b"][lane, 0, register, element * 4 // self.width]
        k = byte % 32 * self.width // 4 + (element % 2 if self.width == 8 else 0)
        columns = [
            the_one(
                self.tiles["accumulator"][..., 1][(self.found["meets"] == f).any(axis=0)],
                f"{self.name}, columns of B's element {f}",
            )
            for f in range(len(k))
        ]
        if (np.array(columns) != byte // 32).any():
            raise ValueError(f"{self.name}: tile/ loads columns of B to where other columns are multiplied")
        return np.stack([columns, k], axis=-1)

    @cached_property
    def a(self) -> np.ndarray:
        """Row and k of each element of A, (elements, 2): the row where its products go, k that of the elements of B it meets."""
        meets, places = self.found["meets"], []
        for number, met in enumerate(meets):
            if (met < -1).any() or (met >= 0).sum() != 8:
                raise ValueError(
                    f"{self.name}: element {number} of A does not meet one element of B in each of 8 outputs"
                )
            what = f"{self.name}, element {number} of A"
            places.append(
                (the_one(self.tiles["accumulator"][..., 0][met >= 0], what), the_one(self.b[met[met >= 0], 1], what))
            )
        return np.array(places)

    def where(self, number: np.ndarray, registers: int) -> tuple:
        """Lane, register and position in it of numbered elements."""
        return number // (registers * self.width), number // self.width % registers, number % self.width

    def scale(self, operand: str, row: int, block: int, selector: int, thread: int) -> int:
        """The number of the scale of a row of A (column of B) and a block of k."""
        places = self.a if operand == "a" else self.b
        inside = (places[:, 0] == row) & (places[:, 1] * self.blocks // self.depth == block)
        registers = np.unique(np.flatnonzero(inside) // self.width)
        return the_one(
            self.found[f"scales_{operand}"][selector, thread][registers],
            f"{self.name}, scale of {operand} {row}, block {block}",
        )

    @property
    def blocks(self) -> int:
        """Scales of a row: 32 k to a ue8m0 scale, 16 to a ue4m3 one, which has a single byte selector."""
        return {4: 1, 2: 2, 1: 4}[len(self.found["scales_a"])]


def grid(corner: str, columns: list[str], rows: list[tuple[str, list[str]]]) -> str:
    """A table in monospaced text."""
    text = "\n".join("  ".join(line).rstrip() for line in atlas.grid(corner, columns, rows))
    return f"```\n{text}\n```\n"


def operand_table(kind: Kind, operand: str) -> str:
    """A by rows, B by columns, along k."""
    places, registers = (kind.a, 4) if operand == "a" else (kind.b, 2)
    table = [[None] * kind.depth for _ in range(16 if operand == "a" else 8)]
    for number, (row, k) in enumerate(places.tolist()):
        lane, register, element = kind.where(number, registers)
        table[row][k] = f"{lane}.{operand}{register}", element
    return grid("row\\k" if operand == "a" else "col\\k", *atlas.runs(table, kind.width))


def accumulator_table(tiles: dict) -> str:
    names = {tuple(tiles["accumulator"][lane, i].tolist()): f"{lane}.c{i}" for lane in range(LANES) for i in range(4)}
    return grid("row\\col", [str(c) for c in range(8)], [(str(r), [names[r, c] for c in range(8)]) for r in range(16)])


def scale_tables(kind: Kind, selectors: tuple) -> str:
    """By selectors, the lane of each row's (column's) scales and their bytes."""
    text = ""
    for operand, count, threads in (("a", 16, 2), ("b", 8, 4)):
        rows = []
        for thread in range(threads):
            lanes = [
                the_one(
                    np.array(
                        [
                            kind.scale(operand, row, block, s, thread) // 4
                            for block in range(kind.blocks)
                            for s in range(len(selectors))
                        ]
                    ),
                    f"lane of row {row}",
                )
                for row in range(count)
            ]
            rows.append((f"thread {thread}", [str(lane) for lane in lanes]))
        text += f"Lanes with the scales of {'the rows of A' if operand == 'a' else 'the columns of B'}:\n\n"
        text += grid("row" if operand == "a" else "col", [str(row) for row in range(count)], rows) + "\n"
    size = kind.depth // kind.blocks
    rows = []
    for index, selector in enumerate(selectors):
        bytes = []
        for block in range(kind.blocks):
            numbers = [
                kind.scale(o, row, block, index, t) % 4
                for o, n, ts in (("a", 16, 2), ("b", 8, 4))
                for row in range(n)
                for t in range(ts)
            ]
            bytes.append(str(the_one(np.array(numbers), f"{kind.name}, byte of block {block}")))
        rows.append((f"byte {selector}", bytes))
    return (
        text
        + "Bytes of that lane's register, for A and for B:\n\n"
        + grid("k", [f"{size * b}-{size * (b + 1) - 1}" for b in range(kind.blocks)], rows)
    )


def load_table(found: np.ndarray, per_byte: int) -> str:
    """By row and byte (nibble) in memory, the register and byte where it comes."""
    table = [[None] * 16 for _ in range(LANES)]
    for lane, register, byte in np.ndindex(found.shape):
        row, place = divmod(int(found[lane, register, byte]), 16 * per_byte)
        table[row][place] = f"{lane}.r{register}", byte
    return grid("row\\byte" if per_byte == 1 else "row\\nibble", *atlas.runs(table, 4))


def store_table(found: np.ndarray) -> str:
    """By row and byte in memory, the register and byte that came there."""
    table = [[(f"{n // 16}.r{n // 4 % 4}", n % 4) for n in row] for row in found.tolist()]
    return grid("row\\byte", *atlas.runs(table, 4))


HEAD = """# Fragments

Where the matrix instructions have their elements and scales. This file is written by `make docs` from what the probes find
on the emulator; `ptxrt check probe_mma_mxf4` (and so on) asks a card the same. A probe knows no layout: it sets one element of
A at a time, one register of B, one lane's scales, and looks which outputs change. Rows, columns and k are named as the tile
code of the kernels loads them; a test compares the two.

`5.a2` is register 2 of A in lane 5, its elements in order from the lowest bits on; `5.r2.1` is byte 1 of register 2.

"""


def all_findings() -> dict[str, dict[str, np.ndarray]]:
    """What every probe finds on the current machine, by its name."""
    return {name: findings(name) for name in ("probe_fragments", *(kind[0] for kind in KINDS), "probe_ldmatrix")}


def fragments_markdown(found: dict[str, dict[str, np.ndarray]]) -> str:
    """The document, from all findings."""
    tiles = found["probe_fragments"]
    parts, drawn = [HEAD, "## Accumulators of all kinds\n\n", accumulator_table(tiles)], {}
    for name, title, width, selectors in KINDS:
        kind = Kind(title, width, found[name], tiles)
        tables = operand_table(kind, "a"), operand_table(kind, "b")
        same = drawn.setdefault(tables, name)
        parts.append(f"\n## {title}\n\nFound by `{name}`. ")
        parts.append(
            f"A and B are as `{same}` finds them.\n" if same != name else f"A:\n\n{tables[0]}\nB:\n\n{tables[1]}"
        )
        if selectors:
            parts.append(f"\n{scale_tables(kind, selectors)}")
    found = found["probe_ldmatrix"]
    parts.append(
        "\n## Loads of matrices\n\nFound by `probe_ldmatrix`. Lane i gives the address of row i; `5.r2` is register 2 of lane 5.\n"
    )
    for name, title, per_byte in LOADS:
        parts.append(f"\n### {title}\n\n{load_table(found[name], per_byte)}")
    parts.append("\n## Stores of matrices\n")
    for name, title in STORES:
        parts.append(f"\n### {title}\n\n{store_table(found[name])}")
    return "".join(parts)
