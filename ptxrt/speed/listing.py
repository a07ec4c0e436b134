"""Parser for listings of machine code: instructions with their control words, basic blocks, and paths through them.

If the listing has encodings, instructions have control words: the cycles until the warp's next instruction, the
scoreboards that it waits for, and those that it sets. Source of the bits: the encodings of Volta and later, 128 bits to
an instruction.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cache, cached_property

# Classes by prefix of the opcode, to which a dot is appended; the first match counts.
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
    "control": "BRA BRX BRXU EXIT BSSY BSYNC RET CALL NOP WARPSYNC BAR DEPBAR LDGDEPBAR BREAK ENDCOLLECTIVE YIELD"
    " MEMBAR CCTL ERRBAR FENCE ACQBULK NANOSLEEP BMOV USETMAXREG",
    "uniform": "U",
}
WIDTH = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}


@dataclass(frozen=True)
class Control:
    """The control word that ptxas attaches to an instruction."""

    stall: int  # cycles until the warp may issue its next instruction
    sets: int | None  # the scoreboard that is released when its result is written
    reads: int | None  # the scoreboard that is released when its operands are read
    waits: int  # bit mask of the scoreboards that it waits for

    @classmethod
    def of(cls, word: int) -> Control:
        """Decode the second word of an encoding."""
        bits = word >> 41
        sets, reads = bits >> 5 & 7, bits >> 8 & 7
        return cls(bits & 15, None if sets == 7 else sets, None if reads == 7 else reads, bits >> 11 & 63)


@dataclass(frozen=True)
class Instruction:
    """One line of machine code."""

    address: int
    guard: str  # predicate, such as @!P0, or empty
    opcode: str  # with modifiers
    operands: str
    control: Control | None = None  # None without encodings

    @property
    def stem(self) -> str:
        return self.opcode.split(".")[0]

    @property
    def kind(self) -> str:
        return class_of(self.opcode)

    @property
    def global_bytes(self) -> int:
        """Bytes that a lane loads from or stores to global memory."""
        if self.stem not in ("LDG", "STG", "LDGSTS"):
            return 0
        return next((WIDTH[word] for word in self.opcode.split(".") if word in WIDTH), 4)

    @property
    def stores(self) -> bool:
        return self.stem == "STG"

    @property
    def target(self) -> int | None:
        """The target address of a branch; None for other instructions."""
        return int(self.operands.split()[-1], 16) if self.stem == "BRA" else None

    @property
    def ends(self) -> bool:
        """Whether control never continues with the next instruction in memory."""
        if self.guard:
            return False
        return (
            self.stem in ("EXIT", "RET")
            or self.stem == "BRA"
            and re.fullmatch(r"0x[0-9a-f]+", self.operands) is not None
        )


@cache
def class_of(opcode: str) -> str:
    """The class of an opcode; "other" if it is not in CLASSES."""
    return next(
        (name for name, stems in CLASSES.items() if any(map((opcode + ".").startswith, stems.split()))), "other"
    )


_LINE = re.compile(
    r"\s+/\*(?P<address>[0-9a-f]{4,})\*/\s+(?:(?P<guard>@!?U?P\w+)\s+)?"
    r"(?P<opcode>[A-Z][\w.]*)\s*(?P<operands>[^;]*?)\s*;"
    r"(?:\s*/\* 0x[0-9a-f]{16} \*/\s*/\* 0x(?P<control>[0-9a-f]{16}) \*/)?"
)


def parse(text: str) -> dict[str, list[Instruction]]:
    """Return the instructions of each function of a cuobjdump listing, with or without encodings."""
    functions: dict[str, list[Instruction]] = {}
    for part in text.split("Function : ")[1:]:
        code = functions.setdefault(part.split(None, 1)[0], [])
        for match in _LINE.finditer(part):
            control = Control.of(int(match["control"], 16)) if match["control"] else None
            code.append(
                Instruction(
                    int(match["address"], 16), match["guard"] or "", match["opcode"], match["operands"], control
                )
            )
    return functions


# ---------------------------------------------------------------------------------------------------------------------
# The steady path


def order(start: int, following) -> list[int]:
    """Return the nodes reachable from `start` in reverse postorder: each before its successors `following`, except
    along back edges."""
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
    """The control-flow graph of a function: basic blocks, successors, dominators."""

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
        """The reachable blocks in reverse postorder: each before its successors, except along back edges."""
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
        """The immediate dominator of each block.

        Source: K. D. Cooper and others, A Simple, Fast Dominance Algorithm.
        """
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
        """Whether `one` dominates `other`."""
        while other not in (one, 0):
            other = self.dominator[other]
        return other == one

    @cached_property
    def loops(self) -> dict[int, set[int]]:
        """The blocks of each natural loop, by its header."""
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
        """Successors of each block if every loop runs once: the end of a loop continues after the loop."""
        exits = {head: {j for i in body for j in self.after[i]} - body for head, body in self.loops.items()}
        return {
            i: {k for j in self.after[i] for k in (exits[j] if j in exits and i in self.loops[j] else {j})}
            for i in self.order
        }

    def path(
        self,
        start: int,
        inside: Collection[int],
        work: Callable,
        through: tuple[Collection[int], ...] = (),
        stop: int | None = None,
    ) -> list[Instruction]:
        """Return the path from a block to the end, or once around its loop, with the most work in the fewest
        instructions.

        through: sets of blocks; the path contains a block of each. stop: the block before which the path ends, instead
        of the end. The result is empty if there is no such path.
        """
        inside = set(inside)
        ahead = order(start, lambda i: self.onward[i] & inside)
        place = {block: i for i, block in enumerate(ahead)}
        marks = {i: sum(1 << bit for bit, blocks in enumerate(through) if i in blocks) for i in ahead}
        # For each block, by the bit mask of the sets that the rest of the path passes: work, cost, next block and the
        # next block's mask.
        best: dict[int, dict[int, tuple[int, int, int | None, int]]] = {}
        for i in reversed(ahead):
            ways: list[tuple[int, int, int | None, int]] = [
                (done, cost, j, passed)
                for j in self.onward[i]
                if place.get(j, -1) > place[i]
                for passed, (done, cost, *_) in best[j].items()
            ]
            if stop is not None:
                ends = stop in self.after[i]
            else:
                ends = start in self.after[i] or self.blocks[i][-1].stem in ("EXIT", "RET")
            # Blocks whose only successors are along back edges, as in nested waiting loops, end the path.
            if ends or (not ways and stop is None):
                ways.append((0, 0, None, 0))
            found = best[i] = {}
            own, length = sum(map(work, self.blocks[i])), len(self.blocks[i])
            for done, cost, following, passed in ways:
                way = (own + done, cost - length, following, passed)
                key = passed | marks[i]
                if key not in found or way[:2] > found[key][:2]:
                    found[key] = way
        here: int | None = start
        passed, path = (1 << len(through)) - 1, []
        if passed not in best[start]:
            return []
        while here is not None:
            path += self.blocks[here]
            here, passed = best[here][passed][2:]
        return path


def steady_path(code: list[Instruction]) -> tuple[list[Instruction], bool]:
    """Return the steady-state path of an entry, and whether it is a loop."""
    flow = Flow(code)
    multiplies = any(instruction.kind == "mma" for instruction in code)

    def work(instruction):
        return (instruction.kind == "mma") if multiplies else instruction.global_bytes

    whole = flow.path(0, set(flow.order), work)
    loops = {head: flow.path(head, body, work) for head, body in flow.loops.items()}
    works = {head: sum(map(work, path)) for head, path in loops.items()}
    best = max(loops, key=lambda head: (works[head], -len(loops[head])), default=None)
    if best is None:
        return whole, False
    # Loops of equal MMAs one behind the other are ways to the same product, of which the whole path takes all.
    taken = {instruction.address for instruction in whole if multiplies}
    others = [
        head
        for head, body in flow.loops.items()
        if works[head] == works[best] and not body & flow.loops[best] and flow.blocks[head][0].address in taken
    ]
    in_loop = 2 * works[best] > sum(map(work, whole)) - len(others) * works[best]
    return (loops[best], True) if in_loop else (whole, False)
