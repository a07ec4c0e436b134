"""Where emulation time goes: by PTX line, by source line, and by family of instructions.

With Emulator(profile=True) generated code calls `Profile.mark` before every instruction, which costs about 0.2 us. What
passes between two basic blocks, to choose threads and gather their registers, is `SCHEDULING`; `TRANSLATION` is spent
once for each entry and basic block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import perf_counter
from typing import NamedTuple

from ..ptx.ir import Instruction

SCHEDULING, TRANSLATION = 0, 1  # what is no instruction, by number
_OTHERS = ("scheduling", "translation")


class Place(NamedTuple):
    """An instruction of a text. `source`: file:line it comes from, empty where the text does not say."""

    module: str
    line: int
    opcode: str
    source: str

    @property
    def family(self) -> str:
        """The first word of the opcode; three words of what begins with cp.async."""
        words = self.opcode.split(".")
        return ".".join(words[:3] if words[:2] == ["cp", "async"] else words[:1])


class Row(NamedTuple):
    """One line of a table: a place or a family, its seconds, and how many times it was executed, by any number of
    threads."""

    name: str
    seconds: float
    calls: int
    opcode: str = ""
    source: str = ""


class Profile:
    """Seconds and calls by place. Times of everything that runs between a mark and the next belong to the first."""

    def __init__(self):
        self.places: list[Place | None] = [None, None]
        self.numbers: dict[Place, int] = {}
        self.seconds: list[float] = [0.0, 0.0]
        self.calls: list[int] = [0, 0]
        self.current, self.since = SCHEDULING, perf_counter()

    def number(self, module: str, instruction: Instruction, source: str) -> int:
        """The number by which generated code marks an instruction."""
        place = Place(module, instruction.line, instruction.opcode, source)
        if place not in self.numbers:
            self.numbers[place] = len(self.places)
            self.places.append(place)
            self.seconds.append(0.0)
            self.calls.append(0)
        return self.numbers[place]

    def start(self) -> None:
        """A launch begins: what passed before it is nobody's."""
        self.current, self.since = SCHEDULING, perf_counter()

    def mark(self, number: int) -> None:
        """What follows is of this number."""
        now = perf_counter()
        self.seconds[self.current] += now - self.since
        self.calls[number] += 1
        self.current, self.since = number, now

    # -- tables -------------------------------------------------------------------------------------------------

    @property
    def total(self) -> float:
        """Seconds of all launches."""
        return sum(self.seconds)

    def _rows(self, name: Callable[[Place], Row]) -> list[Row]:
        """Sums over places with the same name, the longest first; what is no instruction has rows of its own."""
        found: dict[str, Row] = {}
        for number, (place, seconds, calls) in enumerate(zip(self.places, self.seconds, self.calls)):
            row = Row(_OTHERS[number], 0.0, 0) if place is None else name(place)
            before = found.get(row.name, row)
            found[row.name] = row._replace(seconds=before.seconds + seconds, calls=before.calls + calls)
        return sorted(found.values(), key=lambda row: -row.seconds)

    def by_line(self) -> list[Row]:
        """By PTX line."""
        return self._rows(lambda place: Row(f"{place.module}:{place.line}", 0.0, 0, place.opcode, place.source))

    def by_source(self) -> list[Row]:
        """By source line, innermost; texts without -lineinfo have none."""
        return self._rows(lambda place: Row(place.source or f"{place.module} (no line)", 0.0, 0))

    def by_family(self) -> list[Row]:
        """By family of instructions."""
        return self._rows(lambda place: Row(place.family, 0.0, 0))

    def table(self, most: int = 12) -> Iterable[str]:
        """The lines of a report."""
        total = self.total or 1.0
        yield f"emulation took {self.total:.3f} s"
        for title, rows in (
            ("instructions", self.by_family()),
            ("source lines", self.by_source()),
            ("PTX lines", self.by_line()),
        ):
            yield f"  by {title}"
            for row in [row for row in rows if row.calls][:most]:
                words = "  ".join(filter(None, (row.opcode, row.source if row.opcode else "")))
                share = 100 * row.seconds / total
                yield f"    {row.seconds:8.3f} s {share:5.1f} % {row.calls:8d} calls  {row.name}  {words}".rstrip()
