"""Declarations in words, with the compiler's figures: for `show` and for docs/kernels.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from . import units
from .backend import Facts
from .declaration import Unit, half_of
from .errors import BuildError
from .kernel import Kernel


def entry_facts(unit: str) -> dict[str, Facts]:
    """Return the launch facts of every entry of a unit: those of the native code, if that has the entry."""
    texts = (units.launches(unit, compute) for compute in reversed(units.record(unit)["texts"]))
    return {name: Facts.of(name, launch["launch"]) for text in texts for name, launch in text.items()}


def has(unit: str, entry: str, target: str) -> bool:
    """Return whether an entry is in the text that a target's code is compiled from. Some are in the portable text
    alone.
    """
    return entry in units.record(unit)["texts"].get("compute_120f" if target.startswith("sm_12") else "compute_90", ())


TARGETS = ("sm_120a", "sm_121a", "sm_90", "sm_80")

#: Target -> entry -> registers and bytes spilled.
Recorded = Mapping[str, Mapping[str, Mapping[str, int]]]


def compiled_table(
    kernel: Kernel, chosen: Sequence[Unit] | None = None, partial: bool = False, recorded: Recorded | None = None
) -> list[list[str]]:
    """Return a header and one row for each entry: block, tile, shared memory, registers and spills by target.

    chosen: the units to list; None for all of the kernel. partial: whether cells may say that a unit is not built or
    not assembled for a target; otherwise that is a BuildError. recorded: figures to write in place of the build's, so
    that a page does not depend on the targets that were built.
    """
    rows, recorded = [], recorded or {}
    for unit in kernel.units if chosen is None else chosen:
        try:
            entries, facts = units.record(unit.name)["entries"], entry_facts(unit.name)
        except BuildError:
            if not partial:
                raise
            rows.append([unit.name, "not built: run `make`", *[""] * (2 + len(TARGETS))])
            continue
        for entry in (*kernel.entries(unit), *(half for half in map(half_of, kernel.entries(unit)) if half in facts)):
            figures, fact = entries.get(entry, {}), facts[entry]
            known = {target: found[entry] for target, found in recorded.items() if entry in found}
            if not figures and not partial and entry in kernel.entries(unit):
                raise BuildError(f"{entry} is not assembled; run `make`")
            static = next((f["shared_bytes"] for f in figures.values()), 0)
            absent = {
                target: "none" if figures or not has(unit.name, entry, target) else "not assembled"
                for target in TARGETS
            }
            written = {target: registers(found) for target, found in (figures | known).items()}
            cells = [written.get(target, absent[target]) for target in TARGETS]
            rows.append([entry, product(fact.threads), product(fact.tile), str(fact.shared_bytes + static), *cells])
    return [["entry", "block", "tile", "shared bytes", *(f"{target} registers" for target in TARGETS)], *rows]


def product(sizes) -> str:
    """Write sizes as `128` or `8 x 4 x 3`, without trailing ones."""
    kept = list(sizes)
    while len(kept) > 1 and kept[-1] == 1:
        kept.pop()
    return " x ".join(map(str, kept))


def registers(figures: Mapping[str, int]) -> str:
    """Write the registers of a thread, and the bytes it spills, if any."""
    spilled = max(figures.get(name, 0) for name in ("spill_store_bytes", "spill_load_bytes", "spill_bytes"))
    return f"{figures['registers']}" + (f" (spills {spilled} bytes)" if spilled else "")


def argument_rows(kernel: Kernel) -> list[list[str]]:
    """A header and one row for each argument."""
    rows = []
    for a in kernel.arguments:
        shape = "number" if a.direction == "scalar" else str(a.shape)
        notes = (
            ["optional"] * a.optional
            + [f"default {a.default}"] * (a.default is not None)
            + [str(a.placement)] * bool(a.placement.words)
        )
        note = ", ".join(notes)
        rows.append([a.name, a.direction, " or ".join(f.name for f in a.formats), shape, note])
    return [["argument", "direction", "format", "shape", "note"], *rows]


def grid_words(kernel: Kernel) -> str:
    """Describe what the grid covers, and the sizes that are compiled in or fixed."""
    words = ["grid x, y, z over " + ", ".join(map(str, kernel.grid))]
    words += ["along y up to one block more for each packed sequence"] * kernel.packed
    for axes, values in kernel.variants.items():
        sizes = ", ".join(" x ".join(map(str, v)) if isinstance(v, tuple) else str(v) for v in values)
        words.append(
            f"{' x '.join(axes.split())} compiled for {sizes}"
            + (", smaller ones are padded with zeros" if kernel.filled else "")
        )
    words += [f"{axis} always {size}" for axis, size in kernel.fixed.items()]
    words += [f"{axis} from the sizes of the arrays" for axis in kernel.derived]
    return "; ".join(words)


def tolerance_words(kernel: Kernel) -> list[str]:
    """Write one line for each output: its tolerance against the reference."""
    return [f"{a.name}: {kernel.tolerance(a.name)}" for a in kernel.written]


def text_table(rows: list[list[str]]) -> Iterator[str]:
    """Rows of cells as aligned lines."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()


def markdown_table(rows: list[list[str]]) -> Iterator[str]:
    """Rows of cells, the first of them the header, as a Markdown table."""
    head, *body = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    yield "| " + " | ".join(head) + " |"
    yield "|" + " --- |" * len(head)
    for row in body:
        yield "| " + " | ".join(row) + " |"


def kernel_lines(kernel: Kernel, chosen: Sequence[Unit]) -> Iterator[str]:
    """Describe a kernel and its chosen units for a terminal."""
    yield kernel.declaration
    yield ""
    yield from kernel.__doc__.splitlines()
    yield ""
    yield from text_table(argument_rows(kernel))
    yield ""
    yield grid_words(kernel)
    yield "tolerances"
    yield from (f"  {line}" for line in tolerance_words(kernel))
    yield ""
    yield from text_table(compiled_table(kernel, chosen, partial=True))
    yield ""
    yield "cases of `check`"
    yield from (f"  {case.id}" for case in kernel.cases)


def kernels_markdown(kernels: dict[str, Kernel], recorded: Recorded | None = None) -> str:
    """Write docs/kernels.md: every declared kernel. recorded: figures in place of the build's."""
    lines = [
        "# Kernels",
        "",
        "Generated by `make docs` from the declarations in `ptxrt/ops/` and the records of the build. "
        "Registers are those of",
        "one thread; shared memory is static and dynamic together, of the native code.",
    ]
    for kernel in kernels.values():
        lines += ["", f"## {kernel.name}", "", *kernel.__doc__.splitlines(), "", *markdown_table(argument_rows(kernel))]
        lines += ["", f"Launch: {grid_words(kernel)}.", "", "Tolerances:", ""]
        lines += [f"- {line}" for line in tolerance_words(kernel)]
        lines += ["", *markdown_table(compiled_table(kernel, recorded=recorded))]
    return "\n".join(lines) + "\n"
