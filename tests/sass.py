"""Figures of each kernel's machine code: `make sass` prints them, test_sass.py compares them with the record.

For every entry and target: registers, spilled bytes, shared memory, calls (slow paths, for example of divisions),
byte-wide accesses to shared memory, and the instructions of the steady path. In a kernel with matrix instructions the
steady path is the loop that holds most of them, and instructions count per matrix instruction. In any other kernel it
is the loop, or else the straight-line code, that moves most bytes of global memory; instructions count per element, or
per byte if the entry's name has no type. Where the path forks, it follows the branches that do all the work in the
fewest instructions. A loop inside the path counts once.

Instructions count per warp and elements per lane: 1.0 per element means 32 elements for each issued instruction.
`python tests/sass.py --record` writes sass_figures.json: the figures, and digests of each unit's native code and of the
text that it was assembled from. The tests do not read code again whose digest is the recorded one, and a quick build
does not assemble the recorded text again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from scripts import script

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ptxrt.disassembly import sass_of
from ptxrt.errors import BuildError
from ptxrt.speed import listing
from ptxrt.speed.listing import CLASSES, Instruction, parse, steady_path

build = script("build.py")
ROOT = Path(__file__).resolve().parent.parent
RECORD = Path(__file__).with_name("sass_figures.json")

NATIVE = build.TARGETS[0].cubins[0]
ARCHS = [arch for target in build.TARGETS for arch in target.cubins]

# A GeForce RTX 5090: each of an SM's four schedulers issues one instruction of a warp per clock.
SMS, SCHEDULERS, GIGAHERTZ, MEMORY_GB_PER_S = 170, 4, 2.407, 1792

# Units whose code tests read even if it is the recorded one: quick builds assemble them.
READ = (
    "add_mean",
    "amax",
    "attention_bf16_dim128_dim_v128",
    "attention_bf16_dim64_dim_v64",
    "attention_nvfp4_dim128_dim_v128",
    "attention_one_dim128_held4",
    "attention_one_dim64_held1",
    "quantize_mxfp4",
    "transpose_naive",
)

ELEMENT_BYTES = {"f32": 4, "f16": 2, "bf16": 2}


# ---------------------------------------------------------------------------------------------------------------------
# Figures


@dataclass(frozen=True)
class Figures:
    """Figures of one entry's machine code on one target."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    calls: int
    byte_wide_shared: int
    looped: bool  # whether the steady path is a loop
    work: float  # of the path: number of matrix instructions, elements, or bytes
    per: str  # unit of `work`: "mma", "element", or "byte" if the entry's name ends with no type
    global_bytes: int  # that a lane moves on the path
    instructions: Counter  # of the path, by class

    @property
    def total(self) -> float:
        """Instructions per matrix instruction, element or byte."""
        return self.instructions.total() / self.work

    @property
    def issue_bound(self) -> float:
        """GB/s of global memory at which a GeForce RTX 5090 would have no free issue slot left."""
        return 32 * self.global_bytes / self.instructions.total() * SMS * SCHEDULERS * GIGAHERTZ

    def recorded(self) -> dict:
        """The figures that the record keeps."""
        return {
            "registers": self.registers,
            "spill_bytes": self.spill_bytes,
            "shared_bytes": self.shared_bytes,
            "calls": self.calls,
            "byte_wide_shared": self.byte_wide_shared,
            f"instructions_per_{self.per}": round(self.total, 3),
        }


def figures_of(entry: str, code: list[Instruction], usage: dict, dynamic_shared: int) -> Figures:
    """The figures of an entry, from its machine code and from the resource usage that ptxas reported."""
    path, looped = steady_path(code)
    moved = [sum(i.global_bytes for i in path if i.stores == stores) for stores in (False, True)]
    if work := sum(instruction.kind == "mma" for instruction in path):
        per = "mma"
    elif element := ELEMENT_BYTES.get(entry.rpartition("_")[2]):
        # Elements are the wider of loads and stores. A lane has a multiple of four; the remainder is a value common to
        # all lanes, such as a global scale.
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


def before_the_wait(code: list[Instruction]) -> list[Instruction]:
    """Return the instructions of an entry that use global memory, or end a thread, on some way from its begin that has
    not met griddepcontrol.wait. The assembler may move loads with .nc to the front of it."""
    at, wrong, seen, todo = {i.address: n for n, i in enumerate(code)}, [], set(), [0]
    while todo:
        n = todo.pop()
        if n in seen or n == len(code):
            continue
        seen.add(n)
        one = code[n]
        if one.stem == "ACQBULK" and not one.guard:
            continue
        if one.kind == "global" or one.stem == "EXIT":
            wrong.append(one)
        todo += [at[target] for target in [one.target] if target is not None] + [n + 1] * (not one.ends)
    return wrong


def wrong_copies(code: list[Instruction]) -> list[Instruction]:
    """Return the asynchronous copies whose shared address has a part in a uniform register. ptxas 13.0 has named UR0
    there, and UR1 as the descriptor, though nothing had written either; an H200 called the instruction illegal."""
    return [one for one in code if one.stem == "LDGSTS" and re.match(r"\[[^\]]*\+UR\d+", one.operands)]


def figures_of_unit(unit, arch: str, modules: Path = build.MODULES) -> dict[str, Figures]:
    """The figures of every entry of a built unit on one target; BuildError without a disassembler."""
    record = build.assembled(unit, modules)
    text = next(target.compute for target in build.TARGETS if arch in target.cubins)
    suffix = next(suffix for suffix, images in build.FULL.fatbins.items() if arch in images)
    functions = parse(sass_of(modules / f"{unit.unit}{suffix}", arch))
    for entry, launch in record["texts"][text].items():
        if launch.get("waits") and (early := before_the_wait(functions[entry])):
            raise BuildError(f"{entry} on {arch}: {early[0]} stands before griddepcontrol.wait")
        if wrong := wrong_copies(functions[entry]):
            raise BuildError(
                f"{entry} on {arch}: {wrong[0]} adds a uniform register to a shared address, which ptxas 13.0 assembles "
                "wrongly; compute the address of each lane from a number that differs among lanes"
            )
    return {
        entry: figures_of(entry, functions[entry], record["entries"][entry][arch], launch["launch"][build.SHARED_BYTES])
        for entry, launch in record["texts"][text].items()
    }


def table(arch: str, figures: dict[str, Figures], per: str) -> list[list[str]]:
    """The rows of the printed table of one target, for the entries that count per `per`."""
    chosen = {entry: f for entry, f in figures.items() if f.per == per}
    classes = [name for name in (*CLASSES, "other") if any(f.instructions[name] for f in chosen.values())]
    bound = ["GB/s at full issue"] if per != "mma" and arch == NATIVE else []
    head = [
        f"{arch}, per {per}",
        "regs",
        "spill",
        "shared",
        "calls",
        "u8 shared",
        "path",
        per + "s",
        "all",
        *classes,
        *bound,
    ]
    rows = [head]
    for entry, f in chosen.items():
        counts = [f"{f.instructions[name] / f.work:.2f}" for name in classes]
        numbers = [f.registers, f.spill_bytes, f.shared_bytes, f.calls, f.byte_wide_shared]
        row = [entry, *map(str, numbers), "loop" if f.looped else "line", f"{f.work:g}", f"{f.total:.2f}", *counts]
        rows.append(row + ([f"{f.issue_bound:.0f}"] if bound else []))
    return rows


def code_of(unit, modules: Path = build.MODULES) -> dict[str, str]:
    """Digests of a unit's native code: "cubin", and "read" with the files that read it."""
    readers = Path(__file__).read_bytes() + Path(listing.__file__).read_bytes()
    cubin = build.assembled(unit, modules)["cubins"][NATIVE]
    return {"cubin": cubin, "read": hashlib.sha256(readers + cubin.encode()).hexdigest()}


def text_of(unit, modules: Path = build.MODULES) -> dict[str, str]:
    """The key of the text that the code of a built unit was assembled from; {} for a unit of READ."""
    if unit.unit in READ:
        return {}
    text = (modules / f"{unit.unit}{build.TARGETS[0].keep}").read_text(encoding="utf-8")
    return {"text": build.text_key(text, build.assembled(unit, modules)["compiler"])}


def read_record() -> tuple[dict[str, dict[str, dict]], dict[str, dict[str, str]]]:
    """{target: {entry: figures}} and {unit: digests of its native code and text} of sass_figures.json."""
    figures = json.loads(RECORD.read_text(encoding="utf-8"))
    return figures, figures.pop("code", {})


def write_record(figures: dict[str, dict[str, dict]], code: dict[str, dict[str, str]]) -> None:
    """Write sass_figures.json, one entry or unit per line."""
    parts = []
    for part, found in (figures | {"code": code}).items():
        lines = [f'  "{name}": {json.dumps(value)}' for name, value in sorted(found.items())]
        parts.append(f' "{part}": {{\n' + ",\n".join(lines) + "\n }")
    RECORD.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8", newline="\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="Print what ptxas made of each kernel, from its machine code.")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="NAME or 'NAME[axis=value]' alone (repeatable)"
    )
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name} (of all kernels)")
    options = parser.parse_args()
    try:
        units = build.select(build.find_units(build.SOURCES), options.only)
        entries = {unit.unit: build.assembled(unit, build.MODULES) for unit in units}
        whole = {unit for unit, record in entries.items() if build.extent_of(record) is build.FULL}
        entries = {unit: record["entries"] for unit, record in entries.items()}
        archs = ARCHS if whole else [NATIVE]
        if len(whole) < len(units):
            print(f"A quick build has {NATIVE} alone; a record keeps what it has of other targets. `make` builds all.")
        with ThreadPoolExecutor(build.cores()) as pool:
            figures = {}
            for arch in archs:
                built = [unit for unit in units if arch == NATIVE or unit.unit in whole]
                found = pool.map(lambda unit: figures_of_unit(unit, arch), built)
                figures[arch] = {entry: f for of_unit in found for entry, f in of_unit.items()}
    except (build.BuildFailure, BuildError, OSError) as failure:
        print(f"{type(failure).__name__}: {failure}", file=sys.stderr)
        return 1
    for arch in archs:
        for per in ("mma", "element", "byte"):
            if any(f.per == per for f in figures[arch].values()):
                print()
                build.print_table(table(arch, figures[arch], per))
    print(
        f"\nGB/s at full issue: where a GeForce RTX 5090 ({SMS} SMs x {SCHEDULERS} schedulers x {GIGAHERTZ} GHz) has "
        "issued all it can; "
        f"its memory gives {MEMORY_GB_PER_S} GB/s."
    )
    if options.record:
        if options.only:
            print("--record takes all kernels: leave --only out", file=sys.stderr)
            return 1
        # A unit with an opcode of no known class gets no digest, so that tests read it until the opcode has a class.
        unclear = {entry for entry, f in figures[NATIVE].items() if f.instructions["other"]}
        code = {unit.unit: code_of(unit) | text_of(unit) for unit in units if not unclear & set(entries[unit.unit])}
        recorded, known = {}, read_record()[0]
        for arch in ARCHS:
            # Half blocks are entries of some targets only.
            kept = set().union(*(found for unit, found in entries.items() if arch != NATIVE and unit not in whole))
            recorded[arch] = {entry: f for entry, f in known[arch].items() if entry.removesuffix("_half") in kept}
            recorded[arch] |= {entry: f.recorded() for entry, f in figures.get(arch, {}).items()}
        write_record(recorded, code)
        print(f"wrote {RECORD}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
