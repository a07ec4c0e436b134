"""Registers that warps release and acquire (PTX ISA 9.7.19.5): with .maxntid 384, 384 threads start with 168 each."""

import pytest

from ptxrt.emulator import Emulator
from ptxrt.emulator.instruction import Unsupported, resolve
from ptxrt.emulator.registers import entry_registers
from ptxrt.errors import EmulatorFault


@pytest.mark.parametrize(
    "directives, registers",
    [
        ({"maxntid": (384,)}, 168),
        ({"maxntid": (128, 1, 1)}, 256),
        ({"maxntid": (128,), "minnctapersm": (4,)}, 128),
        ({"reqntid": (1024,)}, 64),
        ({"maxnreg": (100,)}, 104),
        ({}, None),
    ],
)
def test_registers_at_entry(directives, registers):
    assert entry_registers(directives) == registers


def run_registers(body: str, directive: str = ".maxntid 384") -> None:
    text = f"""
.version 9.0
.target sm_120a
.address_size 64
.visible .entry k() {directive}
{{
    .reg .pred %p; .reg .b32 %t;
    mov.u32 %t, %tid.x; setp.lt.u32 %p, %t, 128;
    @%p bra producer;
    {body}
    ret;
}}
"""
    emulator = Emulator()
    emulator.launch(emulator.load_text(text, "registers.ptx").entries["k"], 1, 384)


CONSUMER = "setmaxnreg.inc.sync.aligned.u32 {}; ret; producer: {}"
GIVES = "setmaxnreg.dec.sync.aligned.u32 {};"


def test_warps_take_what_others_gave():
    """168 x 3 = 24 + 2 x 240."""
    run_registers(CONSUMER.format(240, GIVES.format(24)))
    run_registers(CONSUMER.format(240, "ret;"))  # an exit releases all registers
    run_registers(CONSUMER.format(256, ""), directive="")  # no effect if the registers at entry are unknown


@pytest.mark.parametrize(
    "body, message",
    [
        (
            CONSUMER.format(240, GIVES.format(32) + "bar.sync 0;").replace("ret;", "bar.sync 0; ret;"),
            "deadlock.*32 threads wait at setmaxnreg.inc to 240",
        ),
        (CONSUMER.format(160, ""), "has 168 registers and would grow to 160"),
        (CONSUMER.format(168, GIVES.format(176)), "has 168 registers and would shrink to 176"),
        (CONSUMER.format(168, GIVES.format(20)), "multiple of 8"),
        (CONSUMER.format(168, GIVES.format(44)), "multiple of 8"),
        (
            "setp.lt.u32 %p, %t, 133; @%p setmaxnreg.dec.sync.aligned.u32 40; bar.sync 0; ret; producer: bar.sync 0;",
            "aligned",
        ),
    ],
)
def test_register_faults(body, message):
    with pytest.raises(EmulatorFault, match=message):
        run_registers(body)


@pytest.mark.parametrize("opcode", ["setmaxnreg.inc.u32", "setmaxnreg.sync.aligned.u32"])
def test_other_forms_are_refused(opcode):
    with pytest.raises(Unsupported, match="is not implemented"):
        resolve(opcode)
