"""Run PTX programs on a fresh emulator with NumPy arrays as parameters."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from ptxrt.emulator import Emulator

DATA = Path(__file__).parent.parent / "data"
_SCALARS = {
    "f32": "<f",
    "f64": "<d",
    "u64": "<Q",
    "s64": "<q",
    "b64": "<Q",
    "s32": "<i",
    "u32": "<I",
    "b32": "<I",
    "u16": "<H",
    "u8": "<B",
}


def text(name: str) -> str:
    """A PTX text of tests/data."""
    return (DATA / name).read_text()


def launch(
    source,
    entry: str,
    *arguments,
    grid=1,
    block=32,
    shared_bytes: int = 0,
    emulator=None,
    name: str = "test.ptx",
    module=None,
):
    """Run an entry of a PTX text and return the emulator.

    Arguments are arrays (passed by address and updated in place), bytes (a struct by value) or numbers.
    """
    if emulator is None:
        emulator = Emulator()
    module = module or emulator.load_text(source, name)
    kernel = module.entries[entry]
    packed, arrays = b"", []
    for parameter, argument in zip(kernel.params, arguments, strict=True):
        if isinstance(argument, np.ndarray):
            address = emulator.alloc(argument.nbytes)
            emulator.write(address, argument)
            arrays.append((address, argument))
            argument = address
        if not isinstance(argument, bytes):
            code = _SCALARS[parameter.type]
            argument = struct.pack(
                code.upper() if code[1] in "iq" and argument > 2 ** (8 * parameter.bytes - 1) else code, argument
            )
        packed = packed.ljust(parameter.offset, b"\0") + argument
    emulator.launch(kernel, grid, block, shared_bytes, packed)
    for address, array in arrays:
        emulator.read(address, array)
    return emulator


_HEADER = ".version 9.0\n.target sm_120f\n.address_size 64\n"


def program(body: str, *, registers: str = "", params: str = ".param .u64 out", before: str = "") -> str:
    """A PTX text with one entry `k` around a body; %r, %s, %f, %rd, %fd, %rs, %h, %p are declared.

    %rd0 is the first parameter plus 8 bytes times the thread's index, %r0 the thread's index in its block.
    """
    return f"""{_HEADER}{before}
.visible .entry k({params})
{{
    .reg .pred %p<20>; .reg .b16 %rs<40>; .reg .b32 %r<60>; .reg .b32 %f<40>; .reg .b64 %rd<40>; .reg .b64 %fd<20>; {registers}
    mov.u32 %r0, %tid.x;
    ld.param.u64 %rd0, [out];
    mul.wide.u32 %rd1, %r0, 8;
    add.s64 %rd0, %rd0, %rd1;
    {body}
    ret;
}}
"""
