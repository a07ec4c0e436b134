"""A static model of speed: what machine code reaches on a card, by rates, stall counts and scoreboards. Nothing runs.

`listing` reads machine code, `rates` has what instructions take and which cards there are, `paths` finds the ways that
a tile takes through attention, `simulate` runs the warps of a part of a multiprocessor in order, `model` makes TFLOPS,
GB/s and whole launches of it.
"""

from .model import (
    DOUBTS,
    SHAPES,
    TILE_WAYS,
    Entry,
    PathSpeed,
    Shape,
    doubts_of,
    entries_of,
    launch_tflops,
    launch_times,
    paths_of,
    speed_of_path,
    speeds_of,
)
from .rates import CARDS, Card
from .simulate import OFFSETS, Machine

__all__ = [
    "CARDS",
    "DOUBTS",
    "OFFSETS",
    "SHAPES",
    "TILE_WAYS",
    "Card",
    "Entry",
    "Machine",
    "PathSpeed",
    "Shape",
    "doubts_of",
    "entries_of",
    "launch_tflops",
    "launch_times",
    "paths_of",
    "speed_of_path",
    "speeds_of",
]
