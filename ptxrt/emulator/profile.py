"""Profile of emulation time: by PTX line, by source line, and by family of instructions.

With Emulator(profile=True), generated code calls `Profile.mark` before every instruction, which costs about 0.2 us. The
time between two basic blocks, in which the scheduler chooses threads and gathers their registers, counts as
`SCHEDULING`. `TRANSLATION` is the time to compile an entry or a basic block, once each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import perf_counter
from typing import NamedTuple

from ..ptx.ir import Instruction

SCHEDULING, TRANSLATION = 0, 1  # the numbers of the two activities that are not instructions
_OTHERS = ("scheduling", "translation")


class Place(NamedTuple):
    """An instruction of a text. `source`: the file:line that it comes from, empty in texts without -lineinfo."""

    module: str
    line: int
    opcode: str
    source: str

    @property
    def family(self) -> str:
        """The first word of the opcode; the first three words for cp.async."""
        words = self.opcode.split(".")
        return ".".join(words[:3] if words[:2] == ["cp", "async"] else words[:1])


class Row(NamedTuple):
    """One line of a table: a place or a family, its seconds, and its executions (each by any number of threads)."""

    name: str
    seconds: float
    calls: int
    opcode: str = ""
    source: str = ""


class Profile:
    """Seconds and calls by place. The time between two marks belongs to the place of the first."""

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
        """A launch begins: drop the time since the last mark."""
        self.current, self.since = SCHEDULING, perf_counter()

    def mark(self, number: int) -> None:
        """Attribute the time from now on to this number."""
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
        """Sums over places with the same name, the longest first; scheduling and translation have their own rows."""
        found: dict[str, Row] = {}
        for number, (place, seconds, calls) in enumerate(zip(self.places, self.seconds, self.calls)):
            row = Row(_OTHERS[number], 0.0, 0) if place is None else name(place)
            before = found.get(row.name, row)
            found[row.name] = row._replace(seconds=before.seconds + seconds, calls=before.calls + calls)
        return sorted(found.values(), key=lambda row: -row.seconds)

    def by_line(self) -> list[Row]:
        """Rows by PTX line."""
        return self._rows(lambda place: Row(f"{place.module}:{place.line}", 0.0, 0, place.opcode, place.source))

    def by_source(self) -> list[Row]:
        """Rows by source line, that of the innermost inlined function; texts without -lineinfo have one row."""
        return self._rows(lambda place: Row(place.source or f"{place.module} (no line)", 0.0, 0))

    def by_family(self) -> list[Row]:
        """Rows by family of instructions."""
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
