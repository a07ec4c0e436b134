"""docs/fragments.md and docs/fragments/: the layouts of elements and scales of matrix instructions, found by probes.

The probes (ptxrt.ops.probes) assume no layout: they find which element of A is multiplied with which element of B in
which output, and which scale multiplies them. Rows, columns and k are named by `probe_fragments`, which reports where
the kernels' tile code places them. `Kind` raises a ValueError if the two contradict each other, `contradictions` if the
pictures, which show the atlas, differ from the findings.
"""

import textwrap
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

import ptxrt
from ptxrt import atlas, trials
from ptxrt.launch import run
from ptxrt.ops.probes import GIVEN_FORMS, probe_mma_registers

LANES = 32

#: The arguments of the probe of each kind of the atlas.
KINDS: dict[str, dict[str, int]] = {
    "bf16": {},
    "f16": {},
    "f16_f16": {"form": 0, "elements_a": 256},
    "tf32": {"form": 1, "elements_a": 128},
    "fp8": {"form": 4, "elements_a": 512},
    "fp8_f16": {"form": 6, "elements_a": 512},
    "int8": {"form": 2, "elements_a": 512},
    "f8f6f4": {},
    "f8f6f4_f16": {"in_f16": 1},
    "mxf8f6f4": {},
    "mxf4": {},
    "mxf4nvf4": {},
    "mxf4nvf4_2x": {},
}
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


def findings(name: str, **numbers: int) -> dict[str, np.ndarray]:
    """Return the outputs of one probe on the current machine, by name."""
    kernel = ptxrt.kernels()[name]
    got = kernel(**{output.name: True for output in kernel.outputs if output.optional}, **numbers)
    return dict(zip((output.name for output in kernel.outputs), got if isinstance(got, tuple) else (got,)))


def the_one(values: np.ndarray, what: str) -> int:
    """Return the common value of all numbers; ValueError if they differ."""
    found = np.unique(values)
    if len(found) != 1:
        raise ValueError(f"{what}: {len(found)} different answers, {found[:5].tolist()}")
    return int(found[0])


@dataclass(frozen=True)
class Kind:
    """An MMA as found by its probe and `probe_fragments`. Elements are identified by number."""

    name: str
    width: int
    found: dict = field(repr=False)
    tiles: dict = field(repr=False)

    @property
    def depth(self) -> int:
        return 8 * self.width

    @cached_property
    def b(self) -> np.ndarray:
        """Column and k of each element of B, (elements, 2): k as the tile code loads it, and the column of its
        products."""
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
        """Row and k of each element of A, (elements, 2): the row of its products, and the k of the elements of B that
        it multiplies."""
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
        """Return lane, register and position in the register of numbered elements."""
        return number // (registers * self.width), number // self.width % registers, number % self.width

    def scale(self, operand: str, row: int, block: int, selector: int, thread: int) -> int:
        """Return the number of the scale of a row of A (column of B) and a block of k."""
        places = self.a if operand == "a" else self.b
        inside = (places[:, 0] == row) & (places[:, 1] * self.blocks // self.depth == block)
        registers = np.unique(np.flatnonzero(inside) // self.width)
        return the_one(
            self.found[f"scales_{operand}"][selector, thread][registers],
            f"{self.name}, scale of {operand} {row}, block {block}",
        )

    @property
    def blocks(self) -> int:
        """Scales of a row: one ue8m0 scale for 32 k; one ue4m3 scale for 16 k, with a single byte selector."""
        return {4: 1, 2: 2, 1: 4}[len(self.found["scales_a"])]


def grid(corner: str, columns: list[str], rows: list[tuple[str, list[str]]]) -> str:
    """Return a table in monospaced text."""
    text = "\n".join("  ".join(line).rstrip() for line in atlas.grid(corner, columns, rows))
    return f"```\n{text}\n```\n"


def operand_table(kind: Kind, operand: str) -> str:
    """Return the table of A by rows, or of B by columns, along k."""
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
    """Return by selectors the lane and byte of the scales of each row (column)."""
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
    """Return by row and byte (nibble) in memory the register and byte that it is loaded to."""
    table = [[None] * 16 for _ in range(LANES)]
    for lane, register, byte in np.ndindex(found.shape):
        row, place = divmod(int(found[lane, register, byte]), 16 * per_byte)
        table[row][place] = f"{lane}.r{register}", byte
    return grid("row\\byte" if per_byte == 1 else "row\\nibble", *atlas.runs(table, 4))


def store_table(found: np.ndarray) -> str:
    """Return by row and byte in memory the register and byte that are stored there."""
    table = [[(f"{n // 16}.r{n // 4 % 4}", n % 4) for n in row] for row in found.tolist()]
    return grid("row\\byte", *atlas.runs(table, 4))


class Facts(NamedTuple):
    """Further facts of a kind on its page, besides its layout."""

    sass: str
    rate: str
    order: str
    zero: str
    mistakes: tuple[str, str, str]


_TWO = "The lower half of a register holds the element with the lower k."
_FOUR = "Byte e of a register holds element e: the lowest byte has the lowest k, as in memory."
_EIGHT = (
    "Nibble e of a register holds element e: the low nibble of each byte has the lower k, as in the codes of "
    "`quantize` and in cuda_fp4.h."
)
_CONTAINERS = (
    "all bits of a byte outside of its element. e4m3 and e5m2 fill their byte, e3m2 and e2m3 lie in bits 5 to 0, e2m1 "
    "lies in bits 5 to 2. The effect of other padding on hardware is not documented. The emulator reports it as a "
    "fault; `ptxrt probe` reports what the current machine does."
)
_HALF = (
    "Packing c0 and c2, which belong to one column, into one register: a register holds two neighboring columns of "
    "one row."
)
_REGISTERS = (
    "Taking the registers of A in the order of k: registers 1 and 3 have rows 8 to 15, registers 2 and 3 the second "
    "half of k."
)
_B_BY_COLUMN = (
    "Loading B as rows of k: B is `.col`, and each register of a lane holds neighboring k of one column. A row-major "
    "[k][n] array needs `ldmatrix.trans` or a transposition."
)
_SATURATED = "Expecting a saturated sum: values beyond 65504 become infinite."
_FULL_RATE = (
    "Using it for speed: with f32 accumulators GeForce cards run it at half the rate of `kind::mxf8f6f4`, which "
    "computes the same with scales of 0x7f."
)
_LANE_OF_SCALE = (
    "Passing the scales of A in the lanes that accumulate its rows: the scales of row m are read from lane "
    "4 (m % 8) + m / 8 with thread selector 0, and from the lane two further with selector 1. Other lanes are not read."
)
_SELECTORS = (
    "Passing a selector in a register: selectors are constants of the instruction, and a variable one compiles into a "
    "loop over all values."
)
_NIBBLES = (
    "Packing the first element of one operand into the high nibble: each element is then multiplied with the neighbor "
    "of its partner, and the results look plausible."
)
_K64 = "Passing one element in each byte: that is `kind::mxf8f6f4`, at a quarter of this rate."
_UE8M0 = "Writing 0 for a scale of zero: code 0 is 2^-127, and code 255 is NaN."
_SHIFTED = "Placing e2m1 in the lowest bits, like e3m2 and e2m3: codes of e2m1 are shifted left by two."
_ALL = "nothing; all bits are elements."

FACTS = {
    "bf16": Facts(
        "HMMA.16816.F32.BF16",
        "1",
        _TWO,
        _ALL,
        (_B_BY_COLUMN, _REGISTERS, "Clearing the K tail of one operand alone: 0 times NaN is NaN."),
    ),
    "f16": Facts(
        "HMMA.16816.F32",
        "1",
        _TWO,
        _ALL,
        (
            _B_BY_COLUMN,
            _REGISTERS,
            "Converting inputs beyond 65504: they are infinite before they are multiplied.",
        ),
    ),
    "f16_f16": Facts(
        "HMMA.16816.F16",
        "2",
        _TWO,
        _ALL,
        (_HALF, _SATURATED, "Expecting -0 from a negative sum that underflows: the result is +0 (seen on an H200)."),
    ),
    "tf32": Facts(
        "HMMA.1688.F32.TF32",
        "1/2",
        "One element to a register.",
        "nothing; the lower 13 bits of a register are ignored.",
        (
            "Passing float32 without conversion: its lower 13 bits are ignored. `cvt.rna.tf32` rounds.",
            _B_BY_COLUMN,
            _REGISTERS,
        ),
    ),
    "fp8": Facts(
        "QMMA.16832.F32.E4M3.E4M3",
        "2",
        _FOUR,
        _ALL,
        (_FULL_RATE, "Expecting infinities in e4m3: 0x7f is NaN, and 448 is the largest value.", _B_BY_COLUMN),
    ),
    "fp8_f16": Facts(
        "QMMA.16832.F16.E4M3.E4M3",
        "4",
        _FOUR,
        _ALL,
        (
            _HALF,
            _SATURATED,
            "Comparing results bit by bit with the portable build: it sums in f32 and rounds once.",
        ),
    ),
    "int8": Facts(
        "IMMA.16832.S8.S8",
        "4",
        _FOUR,
        _ALL,
        (
            "Expecting a saturated sum: D wraps, unless `.satfinite` follows `.col`.",
            _B_BY_COLUMN,
            "Mixing s8 and u8: the instruction names the types, and bytes of the other type are misread without an "
            "error.",
        ),
    ),
    "f8f6f4": Facts(
        "QMMA.16832.F32",
        "2",
        _FOUR,
        _CONTAINERS,
        (
            _FULL_RATE,
            _SHIFTED,
            "Passing packed 4-bit codes: each element takes a byte.",
        ),
    ),
    "f8f6f4_f16": Facts(
        "QMMA.16832.F16",
        "4; 2 where both operands have 6 or 4 bits",
        _FOUR,
        _CONTAINERS,
        (_HALF, _SATURATED, _SHIFTED),
    ),
    "mxf8f6f4": Facts(
        "QMMA.SF.16832.F32",
        "4; 2 where both operands have 6 or 4 bits",
        _FOUR,
        _CONTAINERS,
        (_LANE_OF_SCALE, _SELECTORS, _UE8M0),
    ),
    "mxf4": Facts(
        "OMMA.SF.16864.F32.E2M1.E2M1.E8",
        "8",
        _EIGHT,
        _ALL,
        (_NIBBLES, _K64, _LANE_OF_SCALE),
    ),
    "mxf4nvf4": Facts(
        "OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X",
        "8",
        _EIGHT,
        "nothing; all bits are elements, and bit 7 of a scale is ignored.",
        (
            _NIBBLES,
            "Passing a byte selector other than 0: all four bytes of a lane's register are scales.",
            _LANE_OF_SCALE,
        ),
    ),
    "mxf4nvf4_2x": Facts(
        "OMMA.SF.16864.F32.E2M1.E2M1.E8",
        "8",
        _EIGHT,
        _ALL,
        (_NIBBLES, "Choosing it for speed: it compiles to the machine code of `kind::mxf4`.", _UE8M0),
    ),
}

_BY_H200 = (
    "`ptxrt --machine portable probe` found the same layout, codes and rule of sums on an H200. No sm_120 card has "
    "been probed yet."
)
_NO_CARD = (
    "No sm_120 card has been probed yet. Chips without this instruction run a substitute, whose results say nothing "
    "about the instruction."
)
#: Findings on cards, by kind.
SILICON = dict.fromkeys(("bf16", "f16", "f16_f16", "tf32", "int8"), _BY_H200) | {
    "fp8": "No sm_120 card has been probed yet. `ptxrt --machine portable probe` found the same layout and codes on an "
    "H200, but another rule of sums: sm_90 has no such instruction, and ptxas emits two f16 products, of the lower and "
    "of the upper halves of the registers. The first starts from zero, the second adds to its result. Each adds 16 "
    "products at once, cuts off at 25 bits and rounds toward zero to f32. C is added last, rounded to nearest."
}

HEAD = """# Fragments

These pages show the layouts of matrix instructions: the lanes and registers that hold each element and each scale.
Each kind has its own page; the loads and stores of matrices follow below. `make docs` writes the pages from the
findings of probes on the emulator. `ptxrt layout mxf4` prints a layout in a terminal, and `ptxrt probe mxf4` runs the
probes on the current machine.

A probe assumes no layout: it sets one element of A at a time and finds the outputs that change. Rows, columns and k are
named as the tile code of the kernels loads them; a test compares the two. `probe_mma_registers` then tests registers
bit by bit. It finds the value of every code, the effect of padding bits, the codes and scales that are NaN, and the
rule of sums. There are thousands of candidate rules: they differ in the number of products that are added at once, the
exponent to which these are aligned, the number of bits kept, the step that adds C, and the rounding of each step. The
pages show the rules that reproduce every sum bit for bit.

An emulator's map is not silicon's. The pages show that the emulator, the tile code and the PTX ISA (9.0, 9.7.14) agree.
On an H200, with the portable build, 144 of 146 findings of `ptxrt probe --all` equal those of the atlas and the
emulator. The other two are the sums of [fp8](fragments/fp8.md), which sm_90 does not have. Owners of an sm_120 card can
send the file that `ptxrt probe --all --json findings.json` writes.

"""
_RATES = """
Rates are multiples of bf16's dense 209.5 TFLOPS on an RTX 5090, from NVIDIA's RTX Blackwell architecture whitepaper.
Those of `mxf8f6f4`, and of operands of 6 and 4 bits, are from mmapeak on such a card
(main-horse.github.io/posts/5090-mm-perf). None was measured here. [What this chip lacks](fragments/lacking.md) lists
the instructions of other chips and their substitutes here.

`5.a2` is register 2 of A in lane 5, with its elements in order from the lowest bits; `5.r2.1` is byte 1 of register 2.
"""
_LACKING = """# What this chip lacks

sm_120a and sm_121a belong to the Blackwell generation, but all their matrix instructions work on the registers of one
warp. The table lists what sm_90a and sm_100a have in addition, and the substitutes on sm_120a:

| not there | where it is | here |
|---|---|---|
| `tcgen05.mma`: products of one thread for a block, operands in shared memory | sm_100a, sm_103a, sm_110a | `mma.sync`: a warp multiplies registers. `mxf4` and `mxf4nvf4` take the same block-scaled formats |
| tensor memory: 256 KiB of accumulators to a multiprocessor | with tcgen05 | accumulators in registers, 255 to a thread; attention keeps a tile of 16 rows to a warp |
| `wgmma`: products of four warps, B in shared memory | sm_90a | `mma.sync` and `ldmatrix`; loads run behind the products by `cp.async` or bulk copies |
| pairs of blocks that multiply together (`cta_group::2`) | with tcgen05 | one block; larger tiles of a warp read B fewer times |
| multicast of one copy into the shared memory of several blocks | fast on sm_90a and sm_100a alone (PTX ISA 9.0, cp.async.bulk) | each block loads its own; neighbors meet in the L2 cache |
| 227 KiB of shared memory to a block | sm_90a, sm_100a | 99 KiB: two or three stages of a pipeline |

sm_120a does have bulk copies and tensor maps with mbarriers, `setmaxnreg`, `ldmatrix` of bytes and of 4-bit elements,
`stmatrix`, conversions of every narrow format, and every kind of `mma.sync` in [Fragments](../fragments.md).

## Sparse forms

ptxas 13.0 assembles `mma.sp::ordered_metadata` of the block-scaled kinds for sm_120a: m16n8k64 of `kind::mxf8f6f4`
(`QMMA.SF.SP.16864`) and m16n8k128 of `kind::mxf4nvf4` (`OMMA.SF.SP.168128`). Two of four neighboring elements of A are
zero and are not stored (with 4-bit elements, two of four neighboring pairs); metadata names the stored ones. No kernel
here uses these forms, and the emulator rejects them with an error that names them.

## Forms described differently elsewhere

- `m16n8k64` needs a block-scaled kind and the suffix of `sm_120a` or `sm_120f`; plain `sm_120` rejects it.
- `scale_vec::2X` exists for `kind::mxf4` and `kind::mxf4nvf4` with ue8m0. It does not exist for `kind::mxf8f6f4`, whose
  32 k are one block.
- Integers of 4 bits (`m16n8k64` of s4) compile into a call of a function that emulates them with s8.
"""


def all_findings() -> dict[str, dict[str, np.ndarray]]:
    """Return the findings of all probes on the current machine: by kind, and by name for probes without a kind."""
    found = {name: findings(name) for name in ("probe_fragments", "probe_ldmatrix")}
    return found | {kind: findings(atlas.KINDS[kind].probe, **numbers) for kind, numbers in KINDS.items()}


@cache
def told(name: str) -> str:
    """Return the emulator's treatment of codes and sums of a kind as lines: codes of every type, and the rounding rule
    of the first."""

    def multiply(form):
        def launch(a, b, c, scales):
            with ptxrt.using("emulator", arithmetic="hardware"):
                return run(probe_mma_registers, (), dict(a=a, b=b, c=c, scales=scales, form=form))["d"]

        return launch

    kind, lines, rule = atlas.KINDS[name], [], ""
    for form, (of, type) in enumerate(GIVEN_FORMS):
        if of != name:
            continue
        codes = list(trials.codes(multiply(form), kind, type))
        lines += [f"{type}: {line}" for line in trials.told_by_codes(kind, type, codes)]
        if not rule:
            given = trials.operands(kind, type)
            rule = "; or ".join(trials.told_by_sums(kind, type, given, trials.sums(multiply(form), kind, type, given)))
    common = {}
    for line in lines:
        type, _, words = line.partition(": ")
        common.setdefault(words, []).append(type)
    parts = [f"- {', '.join(types)}: {words}." for words, types in common.items()]
    return "\n".join(wrapped(part, "  ") for part in [*parts, f"- Sums: {rule}."]) + "\n"


def kind_of(found: dict[str, dict[str, np.ndarray]], name: str) -> Kind:
    """Return a kind with the findings of its probe."""
    return Kind(name, atlas.KINDS[name].width, found[name], found["probe_fragments"])


def picture(kind: atlas.Kind, operand: str) -> tuple[str, str]:
    """Return the name and the text of the picture of an operand; kinds with the same layout share it."""
    rows, columns = kind.shape(operand)
    width = 32 // kind.bits(operand)
    drawn = atlas.draw(kind, operand)
    title = (
        f"{operand.upper()}, {rows} x {columns}, {width} to a register"
        if width > 1
        else f"{operand.upper()}, {rows} x {columns}"
    )
    return f"{operand}_{rows}x{columns}_{width}.svg", atlas.svg(drawn._replace(title=title))


def wrapped(words: str, indent: str = "") -> str:
    """Wrap a paragraph to lines of at most 118 characters; all but the first are indented."""
    return "\n".join(
        textwrap.wrap(words, 118, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    )


def contradictions(kind: Kind) -> None:
    """Raise ValueError if the atlas, which the pictures show, differs from the probe's findings."""
    known = atlas.KINDS[kind.name]
    for operand, registers, places in (("a", 4, kind.a), ("b", 2, kind.b)):
        table = known.places(operand)
        at = places if operand == "a" else places[:, ::-1]
        want = np.stack(kind.where(np.arange(len(places)), registers), axis=-1)
        if (table[at[:, 0], at[:, 1]] != want).any():
            raise ValueError(f"{kind.name}: the atlas has elements of {operand} where the probe does not find them")


def kind_page(kind: Kind) -> tuple[str, dict[str, str]]:
    """Return the page of a kind, and its pictures by name."""
    known, facts = atlas.KINDS[kind.name], FACTS[kind.name]
    contradictions(kind)
    pictures = {operand: picture(known, operand) for operand in ("a", "b", "c")}
    types = ", ".join(known.types)
    parts = [
        f"# {kind.name}\n\n`{known.instruction}`\n\n",
        f"| | |\n|---|---|\n| types of A and B | {types} |\n| accumulators | {known.accumulator} |\n",
        f"| machine code | `{facts.sass}` |\n| rate, bf16 = 1 | {facts.rate} |\n",
        f"| found by | `{known.probe}` and `probe_mma_registers`, `ptxrt probe {kind.name}`, on the emulator |\n\n",
        wrapped(f"An emulator's map is not silicon's. {SILICON.get(kind.name, _NO_CARD)}") + "\n\n",
        f"{wrapped(facts.order)}\n\n{wrapped('What must be zero: ' + facts.zero)}\n\n## Layout\n\n",
    ]
    for operand, words in (("a", "A"), ("b", "B"), ("c", "C and D")):
        parts.append(f"![Lanes and registers of {words}]({pictures[operand][0]})\n\n")
    if known.scales:
        parts.append(f"## Scales\n\n{known.scales.type}, one for each {known.depth // known.scales.blocks} k.\n\n")
        parts.append(scale_tables(kind, known.scales.bytes) + "\n")
    parts.append("## Codes and sums\n\nFound on the emulator with `hardware` arithmetic. Of all candidate rules, only ")
    parts.append("those listed reproduce every sum.\n\n" + told(kind.name) + "\n")
    mistakes = [wrapped(f"{number}. {words}", "   ") for number, words in enumerate(facts.mistakes, 1)]
    parts.append("## Three mistakes\n\n" + "\n".join(mistakes) + "\n")
    return "".join(parts), dict(pictures.values())


def pages(found: dict[str, dict[str, np.ndarray]]) -> dict[str, str]:
    """Return all files, by path below docs/."""
    files = {"fragments/lacking.md": _LACKING}
    rows = ["| kind | instruction | K | rate, bf16 = 1 |\n|---|---|---|---|\n"]
    known_places: dict[tuple, Kind] = {}
    for name in KINDS:
        kind = kind_of(found, name)
        same = known_places.setdefault((kind.width, kind.found["meets"].tobytes()), kind)
        kind.__dict__.update(a=same.a, b=same.b)  # probes with the same findings share the lookup
        page, pictures = kind_page(kind)
        files[f"fragments/{name}.md"] = page
        files |= {f"fragments/{file}": text for file, text in pictures.items()}
        known = atlas.KINDS[name]
        rows.append(f"| [{name}](fragments/{name}.md) | `{known.instruction}` | {known.depth} | {FACTS[name].rate} |\n")
    loads = found["probe_ldmatrix"]
    parts = [HEAD, *rows, _RATES, "\n## Accumulators\n\n", accumulator_table(found["probe_fragments"])]
    parts.append("\n## Loads of matrices\n\nFound by `probe_ldmatrix`. Lane i gives the address of row i.\n")
    for name, title, per_byte in LOADS:
        parts.append(f"\n### {title}\n\n{load_table(loads[name], per_byte)}")
    parts.append("\n## Stores of matrices\n")
    for name, title in STORES:
        parts.append(f"\n### {title}\n\n{store_table(loads[name])}")
    return {"fragments.md": "".join(parts), **files}


def write(files: dict[str, str], folder: Path) -> None:
    """Write the files, and remove files of older versions."""
    for old in (folder / "fragments").glob("*"):
        if f"fragments/{old.name}" not in files:
            old.unlink()
    for name, text in files.items():
        target = folder / name
        target.parent.mkdir(exist_ok=True)
        target.write_text(text, encoding="utf-8", newline="\n")
