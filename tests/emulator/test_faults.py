"""The exact messages of faults: every mistake of tests/data/faults.cu; docs/emulator.md lists the same lines."""

from pathlib import Path

import numpy as np
import pytest
from programs import launch, text

from ptxrt.emulator import Emulator
from ptxrt.errors import EmulatorFault

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "emulator.md"


def numbers(count):
    return np.zeros(count, np.int32)


# entry -> arguments, launch options, emulator options, and a description of the mistake.
MISTAKES = {
    "outside": ([numbers(32)], dict(grid=2), {}, "one block too many"),
    "misaligned": ([numbers(32)], {}, {}, "4 bytes at every third byte"),
    "past_shared": ([numbers(64)], dict(block=64), {}, "one element past a shared array"),
    "unwritten": ([numbers(32), 5], {}, {}, "reads what its loop left out"),
    "no_wait": ([numbers(128), numbers(128)], {}, {}, "no wait for `cp.async`, or for too few groups"),
    "parted": ([numbers(32)], {}, {}, "`__shfl_sync(0xffffffff, ...)` in half a warp"),
    "half_a_warp": ([numbers(32)], {}, {}, "`ldmatrix` in half a warp"),
    "deadlock": ([numbers(64)], dict(block=64), {}, "two warps wait at two barriers"),
    "no_barrier": ([numbers(64)], dict(block=64), dict(races=True), "no `__syncthreads()`, with `races=True`"),
    "endless": ([numbers(32)], {}, dict(budget=20_000), "an endless loop, with `budget=20_000`"),
}


@pytest.mark.parametrize("entry", MISTAKES)
def test_the_message_is_the_documented_one(entry):
    arguments, sizes, options, words = MISTAKES[entry]
    sizes = {"grid": 1, "block": 32, **sizes}
    shape = {name: (size, 1, 1) for name, size in sizes.items()}
    with pytest.raises(EmulatorFault) as caught:
        launch(text("faults.ptx"), entry, *arguments, **shape, emulator=Emulator(**options), name="faults.ptx")
    fault = caught.value
    line = f"| {words} | `{fault}` |"
    assert line in DOCUMENT.read_text(encoding="utf-8").splitlines(), f"docs/emulator.md should hold:\n{line}"
    assert fault.kernel == entry and fault.line > 0
