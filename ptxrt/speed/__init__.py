"""A static model of speed: it predicts the throughput of machine code on a card from instruction rates, stall counts
and scoreboards. Nothing is executed.

`listing` parses machine code, `rates` has the rates of instructions and the cards, `paths` finds the paths of a tile
through attention, `simulate` issues the warps of one multiprocessor part in order, `model` derives TFLOPS, GB/s and the
times of whole launches.
"""

from .model import (
    DOUBTS,
    SHAPES,
    TILE_PATHS,
    Entry,
    PathSpeed,
    Shape,
    doubts_of,
    entries_of,
    launch_tflops,
    launch_times,
    launches_of,
    paths_of,
    speed_of_path,
    speeds_of,
    with_halves,
)
from .rates import CARDS, Card
from .simulate import OFFSETS, Machine

__all__ = [
    "CARDS",
    "DOUBTS",
    "OFFSETS",
    "SHAPES",
    "TILE_PATHS",
    "Card",
    "Entry",
    "Machine",
    "PathSpeed",
    "Shape",
    "doubts_of",
    "entries_of",
    "launch_tflops",
    "launch_times",
    "launches_of",
    "paths_of",
    "speed_of_path",
    "speeds_of",
    "with_halves",
]
