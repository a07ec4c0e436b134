"""The paths of a tile through an attention kernel, found in its machine code by the contents of basic blocks.

A loop over tiles is a loop with MMAs of its own. If there are several, the one without blocks that hide keys is for
plain tiles; if two have equal MMAs, the one with more additions also sums exact weights. Of the others, one with blocks
that read the mean scores is for smoothed queries, if there is one without them. Blocks are recognized by their
instructions: hiding keys has many selections of -inf, raising a maximum many multiplications after a vote, reading mean
scores many loads of two numbers.

Decoding (attention_one) has another loop: over batches of a tile's keys and then of its values, with the softmax in
between. decoding_path() puts the passes of a tile together.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from .listing import Flow, Instruction, order, steady_path
from .rates import warp_bytes

MANY = 8  # characteristic instructions of a role in one block; code for single rows has fewer


def is_mma(instruction: Instruction) -> bool:
    return instruction.kind == "mma"


@dataclass
class TileLoops:
    """The loops over tiles of an entry, and the blocks in them by role."""

    code: list[Instruction]
    flow: Flow = field(init=False)

    def __post_init__(self):
        self.flow = Flow(self.code)
        multiplying = {head: body for head, body in self.flow.loops.items() if self.count(body, is_mma)}
        self.own: dict[int, set[int]] = {}
        self.leading: dict[int, set[int]] = {}
        for head, body in multiplying.items():
            nested = [other for start, other in multiplying.items() if start != head and start in body and other < body]
            blocks = body - set().union(*nested) if nested else set(body)
            if self.count(blocks, is_mma) >= 4:
                self.own[head] = blocks
                starts = {start for start in multiplying if start != head and start in body}
                self.leading[head] = {block for block in blocks - {head} if self._leads(block, starts, blocks - {head})}

    def _leads(self, block: int, starts: set[int], inside: set[int]) -> bool:
        """Whether a block with MMAs reaches one of the starts without leaving the blocks between."""
        if not self.count([block], is_mma):
            return False
        ahead = order(block, lambda i: [j for j in self.flow.after[i] if j in inside])
        return any(j in starts for i in ahead for j in self.flow.after[i])

    def count(self, blocks: Iterable[int], what) -> int:
        return sum(what(instruction) for block in blocks for instruction in self.flow.blocks[block])

    def _with_many(self, blocks: Iterable[int], what) -> set[int]:
        return {block for block in blocks if self.count([block], what) >= MANY}

    def hiding(self, head: int) -> set[int]:
        return self._with_many(self.own[head], lambda i: i.stem == "FSEL" and "-INF" in i.operands)

    def raising(self, head: int) -> set[int]:
        plain = {instruction.address for instruction in self.way(head)}
        votes = {block for block in self.own[head] if self.count([block], lambda i: i.stem == "VOTE")}
        products = self._with_many(self.own[head], lambda i: i.stem == "FMUL")
        return {b for b in products if votes & set(self.flow.before[b]) and self.flow.blocks[b][0].address not in plain}

    def reading_means(self, head: int) -> set[int]:
        """Return the blocks of a loop that read mean scores: from shared memory if there are any, else from global
        memory."""
        found = self._with_many(self.own[head], lambda i: i.stem == "LDS" and warp_bytes(i.opcode) > 128)
        found = found or self._with_many(self.own[head], lambda i: i.stem == "LDG" and ".64" in i.opcode)
        return {block for block in found if self.count([block], lambda i: i.stem == "FADD") >= MANY}

    def way(self, head: int, *through: set[int]) -> list[Instruction]:
        """Return the path once around a loop, with all its MMAs, through a block of each set, otherwise in the fewest
        instructions.

        MMAs at the start of an inner loop belong to the inner loop.
        """
        inside = self.own[head] - self.leading[head]
        return self.flow.path(head, inside, is_mma, through) if all(through) else []


def tile_paths(code: list[Instruction]) -> dict[str, list[Instruction]]:
    """Return the paths of a tile by name, if the code has them.

    plain: no keys hidden, no maximum raised. raising: plain, with a higher maximum of a row. masked: keys hidden by
    position, as in causal attention. sums: no keys hidden, in a loop of its own or in the loop for all tiles, as with
    return_lse. smooth_q: no keys hidden, starting at the mean scores. smooth_sums: the same in the loop for all tiles,
    as with return_lse. prologue, epilogue: from the start to the first tile, and from the last tile to the end.
    """
    loops = TileLoops(code)
    if not loops.own:
        return {}
    work = {head: loops.count(blocks, is_mma) for head, blocks in loops.own.items()}
    additions = {head: loops.count(blocks, lambda i: i.stem == "FADD") for head, blocks in loops.own.items()}
    by_work = sorted(loops.own, key=lambda head: -work[head])
    with_masks = [head for head in by_work if loops.hiding(head)]
    plain_loops = [head for head in by_work if not loops.hiding(head) and not loops.reading_means(head)]
    plain_loops.sort(key=lambda head: (-work[head], additions[head]))
    plain = plain_loops[0] if plain_loops else by_work[0]
    summing = [head for head in plain_loops[1:] if work[head] == work[plain]]
    reading = [head for head in by_work if loops.reading_means(head) and not loops.hiding(head)]
    others = [head for head in with_masks if head not in reading]
    general = (others or with_masks or [plain])[0]
    smooth = (reading or [general])[0]
    hides = loops.hiding(general)
    found = {
        "plain": loops.way(plain),
        "raising": loops.way(plain, loops.raising(plain)),
        "masked": loops.way(general, hides),
        "smooth_q": loops.way(smooth, loops.reading_means(smooth)),
    }
    if general != plain and any(
        instruction.opcode.startswith(("OMMA.SF", "QMMA.SF")) for instruction in found["plain"]
    ):
        found["sums"] = loops.way((summing or [general])[0])
    if smooth != general:
        found["smooth_sums"] = loops.way(general, loops.reading_means(general))
    flow = loops.flow
    outside = set(flow.order) - set().union(*loops.own.values())
    first = min(plain, general, key=lambda head: flow.order.index(head))
    found["prologue"] = flow.path(0, outside | {0}, is_mma, (), first)
    found["epilogue"] = _epilogue(loops, general, outside)
    return {name: path for name, path in found.items() if path}


def _epilogue(loops: TileLoops, general: int, outside: set[int]) -> list[Instruction]:
    """Return the path from the end of the loop to the end of the kernel, through 16-byte stores."""
    flow = loops.flow
    bodies = set().union(*loops.own.values())
    starts = [j for i in flow.order if i in bodies for j in flow.after[i] if j in outside]
    stores = {block for block in outside if any(i.stem == "STG" and ".128" in i.opcode for i in flow.blocks[block])}
    for start in sorted(set(starts), key=flow.order.index, reverse=True):
        path = flow.path(start, outside, is_mma, (stores,) if stores else ())
        if path:
            return path
    return []


def decoding_path(code: list[Instruction], keys: int, dim: int) -> list[Instruction]:
    """Return all instructions of a warp for one tile of `keys` keys in attention of one query; empty if not found.

    The loop goes over batches of keys, then of values, and has a branch with MMAs for each. All passes through it are
    strung together: as many on each branch as its MMAs need for the tile, with the most copies and otherwise the fewest
    instructions, and the softmax on the first pass of values, without masks and without a maximum that rises. If the
    MMAs of both branches are in loops of their own, the batch is taken to be one trip of these, the shortest possible.
    """
    flow = Flow(code)

    def count(block: int, what) -> int:
        return sum(map(what, flow.blocks[block]))

    weights = {i for i in flow.order if count(i, lambda instruction: instruction.stem == "MUFU") >= MANY}
    around = [head for head, body in flow.loops.items() if weights & body and any(count(i, is_mma) for i in body)]
    if not around:
        return []
    head = min(around, key=lambda each: len(flow.loops[each]))
    body = flow.loops[head]
    products = {i for i in body if count(i, is_mma)}
    fork = next((i for i in body if all(flow.dominates(i, j) for j in products) and _parts(flow, i, products)), None)
    if fork is None:
        return []
    nested = [inner for start, inner in flow.loops.items() if start in body and start != head and inner & products]

    def work(instruction: Instruction) -> int:
        return 1000 * is_mma(instruction) + (instruction.stem == "LDGSTS")

    half = (keys // 16) * (dim // 16)  # MMAs of one product: each 16 keys by 16 columns by 8 rows
    sides = []
    for side in _parts(flow, fork, products):
        # Of alternatives, that with the most instructions to an MMA.
        slowest = max(side, key=lambda i: len(flow.blocks[i]) / count(i, is_mma))
        sides.append((side, slowest, count(slowest, is_mma)))
    unrolled = [mmas for _, block, mmas in sides if not any(block in inner for inner in nested)]
    passes = half // (min(unrolled) if unrolled else max(mmas for *_, mmas in sides))
    found: list[Instruction] = []
    for side, block, mmas in sides:
        inside = body - (products - {block})
        inner = next((inner for inner in nested if block in inner), {block})
        addresses = {instruction.address for i in inner for instruction in flow.blocks[i]}
        for number in range(passes):
            softmax = weights if side is sides[-1][0] and number == 0 else set()
            path = flow.path(head, inside - weights | softmax, work, ({block}, *([weights] if softmax else [])))
            if not path:
                return []
            at = next(i for i, instruction in enumerate(path) if instruction.address in addresses)
            trip = [instruction for instruction in path if instruction.address in addresses]
            found += path[:at] + trip * max(half // passes // mmas, 1) + path[at + len(trip) :]
    return found


def _parts(flow: Flow, fork: int, products: set[int]) -> list[set[int]]:
    """Return the blocks of `products` behind each of two successors of a block; empty if not each is behind one."""
    parts = [{i for i in products if flow.dominates(start, i)} for start in flow.after[fork]]
    splits = len(parts) == 2 and all(parts) and sum(map(len, parts)) == len(products)
    return parts if splits and set().union(*parts) == products else []


def plain_path(code: list[Instruction]) -> list[Instruction]:
    """Return the steady path of any entry."""
    return steady_path(code)[0]


def without_absent(path: Iterable[Instruction], absent: Collection[int]) -> list[Instruction]:
    """Return the path with the guard @!PT on instructions that null pointers switch off.

    absent: offsets of the null pointers in the constant bank. A register loaded from there is zero until it is written
    again; a comparison of zeros for inequality clears its predicate, as does a conjunction with a cleared one.
    """
    zero: set[str] = {"RZ", "URZ"}
    false: set[str] = set()
    found = []
    for instruction in path:
        if instruction.guard.removeprefix("@") in false:
            found.append(replace(instruction, guard="@!PT"))
            continue
        found.append(instruction)
        opcode, always = instruction.opcode, not instruction.guard
        operands = [word.removesuffix(".reuse") for word in re.split(r",\s*", instruction.operands)]
        clears = always and _is_false(opcode, operands, zero, false)
        loaded = re.fullmatch(r"c\[0x0\]\[0x(\w+)\]", operands[-1])
        loads_null = always and loaded and opcode in ("LDC.64", "LDCU.64") and int(loaded[1], 16) in absent
        written = _written(opcode, operands[0])
        zero.difference_update(written)
        false.difference_update(operands[:2])
        if loads_null:
            zero.update(written)
        if clears:
            false.add(operands[0])
    return found


def _is_false(opcode: str, operands: list[str], zero: set[str], false: set[str]) -> bool:
    """Whether the first predicate that an instruction writes is known to be false."""
    if re.match(r"U?ISETP\.NE\.", opcode):  # two numbers, then predicates that the comparison is combined with
        return set(operands[2:4]) <= zero and set(operands[4:]) - {"PT", "UPT"} <= false
    if re.match(r"U?PLOP3\.LUT", opcode):
        return operands[5] == "0x80" and bool(set(operands[2:5]) & false)  # the conjunction of three predicates
    return False


def _written(opcode: str, first: str) -> list[str]:
    """The registers from the first operand on that an instruction writes, if that is a register."""
    match = re.fullmatch(r"(U?R)(\d+)", first)
    count = 4 if re.search(r"\.128|MMA|LDSM", opcode) else 2 if re.search(r"64|WIDE|^CS2R", opcode) else 1
    return [f"{match[1]}{int(match[2]) + i}" for i in range(count)] if match else []
