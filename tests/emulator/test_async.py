"""Whole programs with asynchronous copies, compiled by nvcc from C++ (tests/data/async.cu)."""

import struct

import numpy as np
import pytest
from programs import launch, text

from ptxrt.emulator import Emulator
from ptxrt.emulator.tensor_map import encode_tiled

SCHEDULES = ("together", "warps")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_library_barrier(schedule, rng):
    x, out = rng.integers(0, 1000, 128, dtype=np.int32), np.zeros(128, np.int32)
    launch(text("async.ptx"), "library_barrier", out, x, block=128, emulator=Emulator(schedule=schedule))
    assert (out[:96] == x[::-1][32:] + 1).all() and not out[96:].any()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("tiles", [1, 5])
def test_library_pipeline(schedule, tiles, rng):
    x, out = rng.integers(0, 1000, (tiles, 128), dtype=np.int32), np.zeros(128, np.int32)
    launch(text("async.ptx"), "library_pipeline", out, x, tiles, block=128, emulator=Emulator(schedule=schedule))
    assert (out == x[:, ::-1].sum(axis=0)).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("races, blocks", [(False, 1), (False, 3), (True, 1), (True, 3)])
def test_ring(schedule, races, blocks, rng):
    """Tensor copies of seven tiles, the last one partial, through a ring of three stages; all blocks do the same
    work."""
    emulator = Emulator(schedule=schedule, races=races)
    module = emulator.load_text(text("async.ptx"), "async.ptx")
    x = rng.integers(0, 1000, (53, 64), dtype=np.uint16)
    source, target = emulator.alloc(x.nbytes), emulator.alloc(x.nbytes)
    emulator.write(source, x)
    maps = [encode_tiled("u16", address, (64, 53), (128,), (64, 8)) for address in (source, target)]
    emulator.launch(module.entries["ring"], blocks, 160, 0, b"".join(maps) + struct.pack("<i", 7))
    assert (emulator.read(target, np.empty_like(x)) == x + 1).all()
