"""What ptxas made of each kernel, read from its machine code: `make sass` prints it, test_sass.py compares it with the record.

For every entry and target: registers, spilled bytes, shared memory, calls (the slow paths of divisions and the like),
byte-wide accesses to shared memory, and the instructions of its steady path: of a kernel with matrix instructions the loop
that holds most of them, counted per matrix instruction; of all others the loop, or else the straight line, that moves most
bytes of global memory, counted per element, or per byte where an entry has no type in its name. Where a path forks, it is the way that does all the work in the fewest
instructions. A loop inside the path counts once.

Instructions are those of a warp, an element is one of a lane: 1.0 per element means 32 elements for each issued instruction.
`python tests/sass.py --record` writes sass_figures.json: the figures, and a digest of the native code of each unit that they were
read from, by which code is known that need not be read again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path

from build_script import build

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ptxrt.disassembly import sass_of  # noqa: E402
from ptxrt.errors import BuildError  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
RECORD = Path(__file__).with_name("sass_figures.json")

NATIVE = build.TARGETS[0].cubins[0]
ARCHS = [arch for target in build.TARGETS for arch in target.cubins]

# A GeForce RTX 5090: each of an SM's four schedulers issues one instruction of a warp per clock.
SMS, SCHEDULERS, GIGAHERTZ, MEMORY_GB_PER_S = 170, 4, 2.407, 1792

# By the beginning of the opcode, a dot after it; the first that fits counts.
CLASSES = {
    "mma": "HMMA QMMA OMMA IMMA DMMA HGMMA QGMMA IGMMA",
    "global": "LDGSTS LDG. STG. ATOM. ATOMG RED. REDG LD. ST. UBLKCP UTMALDG UTMASTG",
    "shared": "LDSM STSM LDS STS ATOMS SYNCS",
    "local": "LDL STL",
    "special": "MUFU",
    "shuffle": "SHFL VOTE MATCH REDUX CREDUX ELECT",
    "convert": "F2F I2F F2I FRND I2I",
    "compare": "FMNMX HMNMX IMNMX VIMNMX VIADDMNMX VHMNMX FSEL SEL FSETP HSETP ISETP FSET PLOP3 FCHK",
    "float": "FADD FMUL FFMA HADD HMUL HFMA DADD DMUL DFMA FSWZADD",
    "integer": "IADD IMAD LEA LOP SHF SHL SHR PRMT VIADD IABS FLO POPC BMSK BREV SGXT P2R R2P IDP",
    "move": "MOV CS2R S2R LDC R2UR S2UR",
    "control": "BRA EXIT BSSY BSYNC RET CALL NOP WARPSYNC BAR DEPBAR LDGDEPBAR BREAK ENDCOLLECTIVE YIELD MEMBAR CCTL ERRBAR FENCE"
    " ACQBULK NANOSLEEP BMOV USETMAXREG",
    "uniform": "U",
}
WIDTH = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
ELEMENT_BYTES = {"f32": 4, "f16": 2, "bf16": 2}


@dataclass(frozen=True)
class Instruction:
    """One line of machine code."""

    address: int
    guard: str    # such as @!P0, or nothing
    opcode: str   # with its modifiers
    operands: str

    @property
    def stem(self) -> str:
        return self.opcode.split(".")[0]

    @property
    def kind(self) -> str:
        return class_of(self.opcode)

    @property
    def global_bytes(self) -> int:
        """Bytes that a lane moves from or to global memory."""
        if self.stem not in ("LDG", "STG", "LDGSTS"):
            return 0
        return next((WIDTH[word] for word in self.opcode.split(".") if word in WIDTH), 4)

    @property
    def stores(self) -> bool:
        return self.stem == "STG"

    @property
    def target(self) -> int | None:
        """Where a branch goes; None for what is no branch."""
        return int(self.operands.split()[-1], 16) if self.stem == "BRA" else None

    @property
    def ends(self) -> bool:
        """Whether what follows in memory never runs next."""
        if self.guard:
            return False
        return self.stem in ("EXIT", "RET") or self.stem == "BRA" and re.fullmatch(r"0x[0-9a-f]+", self.operands) is not None


@lru_cache(maxsize=None)
def class_of(opcode: str) -> str:
    """The class of an opcode; "other" where it is not in CLASSES."""
    return next((name for name, stems in CLASSES.items() if any(map((opcode + ".").startswith, stems.split()))), "other")


def parse(text: str) -> dict[str, list[Instruction]]:
    """The instructions of every function of a cuobjdump listing."""
    functions: dict[str, list[Instruction]] = {}
    code: list[Instruction] = []
    for line in text.splitlines():
        if match := re.match(r"\s+Function : (\S+)", line):
            code = functions.setdefault(match[1], [])
        elif match := re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*?)\s*;", line):
            code.append(Instruction(int(match[1], 16), match[2] or "", match[3], match[4]))
    return functions


# ---------------------------------------------------------------------------------------------------------------------
# The steady path


def order(start: int, following) -> list[int]:
    """What can be reached from `start`, each before all that `following` names for it but where that leads in a circle."""
    seen, found, stack = {start}, [], [(start, iter(following(start)))]
    while stack:
        block, rest = stack[-1]
        new = next((i for i in rest if i not in seen), None)
        if new is None:
            found.append(block)
            stack.pop()
        else:
            seen.add(new)
            stack.append((new, iter(following(new))))
    return found[::-1]


@dataclass
class Flow:
    """The basic blocks of a function, which follow which, and which dominate which."""

    code: list[Instruction]
    blocks: list[list[Instruction]] = field(init=False)
    after: list[list[int]] = field(init=False)

    def __post_init__(self):
        starts = {self.code[0].address}
        for here, following in zip(self.code, self.code[1:]):
            if here.target is not None:
                starts.add(here.target)
            if here.target is not None or here.stem in ("EXIT", "RET"):
                starts.add(following.address)
        self.blocks = []
        for instruction in self.code:
            if instruction.address in starts:
                self.blocks.append([])
            self.blocks[-1].append(instruction)
        number = {block[0].address: i for i, block in enumerate(self.blocks)}
        self.after = []
        for i, block in enumerate(self.blocks):
            last = block[-1]
            following = [number[last.target]] if last.target is not None else []
            if not last.ends and i + 1 < len(self.blocks):
                following.append(i + 1)
            self.after.append(following)

    @cached_property
    def order(self) -> list[int]:
        """The blocks that can run, each before those that follow it but for loops."""
        return order(0, self.after.__getitem__)

    @cached_property
    def before(self) -> dict[int, list[int]]:
        before: dict[int, list[int]] = {i: [] for i in self.order}
        for i in self.order:
            for j in self.after[i]:
                before[j].append(i)
        return before

    @cached_property
    def dominator(self) -> dict[int, int]:
        """Of each block the last block that every way to it passes (K. D. Cooper and others, A Simple, Fast Dominance Algorithm)."""
        place = {block: i for i, block in enumerate(self.order)}
        found, changed = {0: 0}, True
        while changed:
            changed = False
            for block in self.order[1:]:
                known = [i for i in self.before[block] if i in found]
                new = known[0]
                for other in known[1:]:
                    while new != other:
                        if place[new] > place[other]:
                            new = found[new]
                        else:
                            other = found[other]
                changed |= found.get(block) != new
                found[block] = new
        return found

    def dominates(self, one: int, other: int) -> bool:
        """Whether every way to `other` passes `one`."""
        while other not in (one, 0):
            other = self.dominator[other]
        return other == one

    @cached_property
    def loops(self) -> dict[int, set[int]]:
        """The blocks of each loop, by the block in which it begins."""
        found: dict[int, set[int]] = {}
        for latch in self.order:
            for head in self.after[latch]:
                if not self.dominates(head, latch):
                    continue
                body, todo = found.setdefault(head, {head}), [latch]
                while todo:
                    block = todo.pop()
                    if block not in body:
                        body.add(block)
                        todo += self.before[block]
        return found

    @cached_property
    def onward(self) -> dict[int, set[int]]:
        """What follows each block when no loop is run twice: from the end of a loop, what follows the loop."""
        exits = {head: {j for i in body for j in self.after[i]} - body for head, body in self.loops.items()}
        return {
            i: {k for j in self.after[i] for k in (exits[j] if j in exits and i in self.loops[j] else {j})} for i in self.order
        }

    def path(self, start: int, inside: set[int], work) -> list[Instruction]:
        """The way from a block to the end, or once round its loop, that does most work in the fewest instructions."""
        ahead = order(start, lambda i: self.onward[i] & inside)
        place = {block: i for i, block in enumerate(ahead)}
        best: dict[int, tuple[int, int, int | None]] = {}
        for i in reversed(ahead):
            ways = [(*best[j][:2], j) for j in self.onward[i] if j in best and place[j] > place[i]]
            if start in self.after[i] or self.blocks[i][-1].stem in ("EXIT", "RET"):
                ways.append((0, 0, None))
            # A block that is left backwards only, as where loops that wait are nested, ends its way.
            done, cost, following = max(ways or [(0, 0, None)], key=lambda way: way[:2])
            best[i] = (done + sum(map(work, self.blocks[i])), cost - len(self.blocks[i]), following)
        path, here = [], start
        while here is not None:
            path += self.blocks[here]
            here = best[here][2]
        return path


def steady_path(code: list[Instruction]) -> tuple[list[Instruction], bool]:
    """The steady path of an entry, and whether it is a loop."""
    flow = Flow(code)
    multiplies = any(instruction.kind == "mma" for instruction in code)

    def work(instruction):
        return (instruction.kind == "mma") if multiplies else instruction.global_bytes

    whole = flow.path(0, set(flow.order), work)
    loops = [flow.path(head, body, work) for head, body in flow.loops.items()]
    best = max(loops, key=lambda path: (sum(map(work, path)), -len(path)), default=[])
    in_loop = 2 * sum(map(work, best)) > sum(map(work, whole))
    return (best, True) if in_loop else (whole, False)


# ---------------------------------------------------------------------------------------------------------------------
# Figures


@dataclass(frozen=True)
class Figures:
    """What the machine code of one entry is like on one target."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    calls: int
    byte_wide_shared: int
    looped: bool            # whether the steady path is a loop
    work: float             # of the path: matrix instructions, elements, or bytes
    per: str                # what `work` counts: "mma", "element", or "byte" where an entry's name ends with no type
    global_bytes: int       # that a lane moves on the path
    instructions: Counter   # of the path, by class

    @property
    def total(self) -> float:
        """Instructions per matrix instruction, element or byte."""
        return self.instructions.total() / self.work

    @property
    def issue_bound(self) -> float:
        """GB/s of global memory at which a GeForce RTX 5090 would have no free issue slot left."""
        return 32 * self.global_bytes / self.instructions.total() * SMS * SCHEDULERS * GIGAHERTZ

    def recorded(self) -> dict:
        """The part that the record keeps."""
        return {
            "registers": self.registers,
            "spill_bytes": self.spill_bytes,
            "shared_bytes": self.shared_bytes,
            "calls": self.calls,
            "byte_wide_shared": self.byte_wide_shared,
            f"instructions_per_{self.per}": round(self.total, 3),
        }


def figures_of(entry: str, code: list[Instruction], usage: dict, dynamic_shared: int) -> Figures:
    """The figures of an entry from its machine code and what ptxas said of it."""
    path, looped = steady_path(code)
    moved = [sum(i.global_bytes for i in path if i.stores == stores) for stores in (False, True)]
    if work := sum(instruction.kind == "mma" for instruction in path):
        per = "mma"
    elif element := ELEMENT_BYTES.get(entry.rpartition("_")[2]):
        # The wider side is the elements, which a lane has in fours; what is beyond is a number for all, such as a global scale.
        per, work = "element", max(moved) // element // 4 * 4 or max(moved) / element
    else:
        per, work = "byte", max(moved)
    return Figures(
        registers=usage["registers"],
        spill_bytes=max(usage["spill_store_bytes"], usage["spill_load_bytes"]),
        shared_bytes=usage["shared_bytes"] + dynamic_shared,
        calls=sum(instruction.stem == "CALL" for instruction in code),
        byte_wide_shared=sum(i.stem in ("LDS", "STS") and bool({"U8", "S8"} & set(i.opcode.split("."))) for i in code),
        looped=looped,
        work=work or 1,
        per=per,
        global_bytes=sum(moved),
        instructions=Counter(instruction.kind for instruction in path),
    )


def figures_of_unit(unit, arch: str, modules: Path = build.MODULES) -> dict[str, Figures]:
    """The figures of every entry of a built unit on one target; BuildError without a disassembler."""
    record = build.assembled(unit, modules)
    text = next(target.compute for target in build.TARGETS if arch in target.cubins)
    suffix = next(suffix for suffix, images in build.FULL.fatbins.items() if arch in images)
    functions = parse(sass_of(modules / f"{unit.unit}{suffix}", arch))
    return {
        entry: figures_of(entry, functions[entry], record["entries"][entry][arch], launch["launch"][build.SHARED_BYTES])
        for entry, launch in record["texts"][text].items()
    }


def table(arch: str, figures: dict[str, Figures], per: str) -> list[list[str]]:
    """The rows of the printed table of one target, for the entries that count per `per`."""
    chosen = {entry: f for entry, f in figures.items() if f.per == per}
    classes = [name for name in (*CLASSES, "other") if any(f.instructions[name] for f in chosen.values())]
    bound = ["GB/s at full issue"] if per != "mma" and arch == NATIVE else []
    head = [f"{arch}, per {per}", "regs", "spill", "shared", "calls", "u8 shared", "path", per + "s", "all", *classes, *bound]
    rows = [head]
    for entry, f in chosen.items():
        counts = [f"{f.instructions[name] / f.work:.2f}" for name in classes]
        numbers = [f.registers, f.spill_bytes, f.shared_bytes, f.calls, f.byte_wide_shared]
        row = [entry, *map(str, numbers), "loop" if f.looped else "line", f"{f.work:g}", f"{f.total:.2f}", *counts]
        rows.append(row + ([f"{f.issue_bound:.0f}"] if bound else []))
    return rows


def code_of(unit, modules: Path = build.MODULES) -> str:
    """A digest of the native code of a built unit, and of this file, which reads it."""
    return hashlib.sha256(Path(__file__).read_bytes() + build.assembled(unit, modules)["cubins"][NATIVE].encode()).hexdigest()


def read_record() -> tuple[dict[str, dict[str, dict]], dict[str, str]]:
    """{target: {entry: figures}} and {unit: digest of its native code} of sass_figures.json."""
    figures = json.loads(RECORD.read_text(encoding="utf-8"))
    return figures, figures.pop("code", {})


def write_record(figures: dict[str, dict[str, Figures]], code: dict[str, str]) -> None:
    """Write sass_figures.json, an entry or unit to a line."""
    record = {arch: {entry: f.recorded() for entry, f in entries.items()} for arch, entries in figures.items()} | {"code": code}
    parts = []
    for part, found in record.items():
        lines = [f'  "{name}": {json.dumps(value)}' for name, value in sorted(found.items())]
        parts.append(f' "{part}": {{\n' + ",\n".join(lines) + "\n }")
    RECORD.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8", newline="\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="Print what ptxas made of each kernel, from its machine code.")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="NAME or 'NAME[axis=value]' alone (repeatable)")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name} (of all kernels)")
    options = parser.parse_args()
    try:
        units = build.select(build.find_units(build.SOURCES), options.only)
        with ThreadPoolExecutor(build.cores()) as pool:
            figures = {}
            for arch in ARCHS:
                found = pool.map(lambda unit: figures_of_unit(unit, arch), units)
                figures[arch] = {entry: f for of_unit in found for entry, f in of_unit.items()}
    except (build.BuildFailure, BuildError, OSError) as failure:
        print(f"{type(failure).__name__}: {failure}", file=sys.stderr)
        return 1
    for arch in ARCHS:
        for per in ("mma", "element", "byte"):
            if any(f.per == per for f in figures[arch].values()):
                print()
                build.print_table(table(arch, figures[arch], per))
    print(
        f"\nGB/s at full issue: where a GeForce RTX 5090 ({SMS} SMs x {SCHEDULERS} schedulers x {GIGAHERTZ} GHz) has issued all it can; "
        f"its memory gives {MEMORY_GB_PER_S} GB/s."
    )
    if options.record:
        if options.only:
            print("--record takes all kernels: leave --only out", file=sys.stderr)
            return 1
        # Code in which a test finds an opcode without a class is not known: it is read until the class is there.
        unclear = {entry for entry, f in figures[NATIVE].items() if f.instructions["other"]}
        entries = {unit.unit: build.assembled(unit, build.MODULES)["entries"] for unit in units}
        write_record(figures, {unit.unit: code_of(unit) for unit in units if not unclear & set(entries[unit.unit])})
        print(f"wrote {RECORD}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
