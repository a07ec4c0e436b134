"""What is found out beside the result: executions per PTX line."""

from __future__ import annotations


def line_counts(module, entry: str) -> dict[int, int]:
    """{PTX line: threads that executed it} of a translated entry; a line of several instances counts their sum."""
    code, counts = module.code(entry), module.counts[entry]
    found: dict[int, int] = {}
    for block, count in zip(code.program.blocks, counts):
        instructions = block.instructions + ([block.end] if block.end is not None else [])
        for line in {instruction.line for instruction in instructions}:
            found[line] = found.get(line, 0) + count
    return found
