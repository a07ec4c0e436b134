"""Loads, stores, atomics and address conversions in isolation, and the memory checks."""

import math
import struct

import numpy as np
import pytest
from programs import launch, program, text

from ptxrt.emulator import Emulator, EmulatorFault
from ptxrt.emulator.check import conflicts
from ptxrt.emulator.instruction import Unsupported, resolve

IN_OUT = ".param .u64 out, .param .u64 in"
TWO = "ld.param.u64 %rd2, [in]; mul.wide.u32 %rd3, %r0, 32; add.s64 %rd4, %rd2, %rd3; ld.param.u64 %rd5, [out]; add.s64 %rd6, %rd5, %rd3;"


@pytest.mark.parametrize(
    "hint",
    [
        "",
        ".nc",
        ".volatile",
        ".relaxed.gpu",
        ".acquire.sys",
        ".nc.L1::no_allocate",
        ".L1::evict_last",
        ".ca.L2::128B",
        ".cs",
    ],
)
def test_hints_change_nothing(hint, rng):
    order = hint if hint.startswith((".volatile", ".relaxed", ".acquire")) else ""
    cache = "" if order else hint
    given, out = rng.integers(0, 2**32, 256, dtype=np.uint32), np.zeros(256, np.uint32)
    body = f"{TWO} ld{order}.global{cache}.v4.u32 {{%r1, %r2, %r3, %r4}}, [%rd4]; st.global.v4.b32 [%rd6], {{%r4, %r3, %r2, %r1}}; ld.global.v4.u32 {{%r1, %r2, %r3, %r4}}, [%rd4+16]; st.global.wt.v4.b32 [%rd6+16], {{%r1, %r2, %r3, %r4}};"
    launch(program(body, params=IN_OUT), "k", out, given)
    want = given.reshape(32, 8).copy()
    want[:, :4] = want[:, 3::-1]
    assert (out == want.reshape(-1)).all()


def test_eight_words_at_once(rng):
    given, out = rng.integers(0, 2**32, 256, dtype=np.uint32), np.zeros(256, np.uint32)
    registers = ", ".join(f"%r{i}" for i in range(1, 9))
    body = f"{TWO} ld.global.nc.v8.b32 {{{registers}}}, [%rd4]; add.u32 %r8, %r8, 1; st.global.v8.b32 [%rd6], {{{registers}}};"
    launch(program(body, params=IN_OUT), "k", out, given)
    given[7::8] += 1
    assert (out == given).all()


def test_narrow_values_in_wide_registers(rng):
    given = rng.integers(0, 2**32, 256, dtype=np.uint32)
    out = np.zeros(256, np.uint32)
    body = f"""{TWO}
    ld.global.u8 %r1, [%rd4+1]; st.global.u32 [%rd6], %r1;
    ld.global.s8 %r1, [%rd4+1]; st.global.u32 [%rd6+4], %r1;
    ld.global.s16 %r1, [%rd4+6]; st.global.u32 [%rd6+8], %r1;
    ld.global.s32 %rd7, [%rd4]; st.global.u64 [%rd6+16], %rd7;
    ld.global.u8 %rs1, [%rd4+3]; st.global.u16 [%rd6+12], %rs1;
    ld.global.u32 %r2, [%rd4+8]; st.global.u8 [%rd6+14], %r2; st.global.u8 [%rd6+15], 7;
    ld.global.b16 %rs2, [%rd4]; st.global.v2.u8 [%rd6+24], {{%rs2, %rs2}}; st.global.u16 [%rd6+26], %r2; st.global.f32 [%rd6+28], 0f3F800000;"""
    launch(program(body, params=IN_OUT), "k", out, given)
    words = given.reshape(32, 8)
    raw, got = words.view(np.uint8), out.reshape(32, 8).view(np.uint8)
    assert (got[:, 0:4].view(np.uint32)[:, 0] == raw[:, 1]).all()
    assert (got[:, 4:8].view(np.int32)[:, 0] == raw[:, 1].view(np.int8)).all()
    assert (got[:, 8:12].view(np.int32)[:, 0] == raw[:, 6:8].copy().view(np.int16)[:, 0]).all()
    assert (got[:, 16:24].view(np.int64)[:, 0] == words[:, 0].view(np.int32)).all()
    assert (got[:, 12:14].copy().view(np.uint16)[:, 0] == raw[:, 3]).all()
    assert (got[:, 14] == raw[:, 8]).all() and (got[:, 15] == 7).all()
    assert (got[:, 24] == raw[:, 0]).all() and (got[:, 25] == raw[:, 0]).all() and (got[:, 26:28] == raw[:, 8:10]).all()
    assert (got[:, 28:].copy().view(np.float32) == 1.0).all()


def test_guarded_accesses(rng):
    given, out = rng.integers(0, 100, (32, 8)).astype(np.uint32), np.full((32, 8), 77, np.uint32)
    body = f"""{TWO} mov.u32 %r5, 5; setp.lt.u32 %p1, %r0, 10; setp.gt.u32 %p2, %r0, 100;
    @%p1 ld.global.u32 %r5, [%rd4]; @!%p1 mov.u32 %r6, 9; @%p1 mov.u32 %r6, 8;
    @%p2 ld.global.u32 %r5, [%rd4+1000000]; @!%p2 add.u32 %r6, %r6, 1;
    @%p1 st.global.v2.u32 [%rd6], {{%r5, %r6}}; @!%p1 st.global.u32 [%rd6+4], %r6; @!%p1 st.global.u32 [%rd6], %r5;"""
    launch(program(body, params=IN_OUT), "k", out, given)
    first = np.arange(32) < 10
    assert (
        (out[:, 0] == np.where(first, given[:, 0], 5)).all()
        and (out[:, 1] == np.where(first, 9, 10)).all()
        and (out[:, 2:] == 77).all()
    )


def test_shared_and_generic_addresses():
    body = """
    mov.u32 %r1, buffer; shl.b32 %r2, %r0, 2; add.u32 %r3, %r1, %r2; mad.lo.u32 %r4, %r0, 3, 1; st.shared.u32 [%r3], %r4;
    mov.u64 %rd2, buffer; cvta.shared.u64 %rd3, %rd2; cvt.u64.u32 %rd4, %r2; add.s64 %rd3, %rd3, %rd4;
    st.local.u32 [frame], %r0; mov.u64 %rd5, frame; cvta.local.u64 %rd6, %rd5; st.u32 [%rd6+4], %r4;
    setp.lt.u32 %p1, %r0, 16; selp.b64 %rd7, %rd3, %rd6, %p1;
    ld.u32 %r5, [%rd7]; ld.local.u32 %r6, [frame+4];
    isspacep.shared %p2, %rd7; isspacep.local %p3, %rd7; isspacep.global %p4, %rd0; isspacep.global %p5, %rd7;
    selp.u32 %r7, 1, 0, %p2; selp.u32 %r8, 2, 0, %p3; selp.u32 %r9, 4, 0, %p4; selp.u32 %r10, 8, 0, %p5;
    add.u32 %r7, %r7, %r8; add.u32 %r7, %r7, %r9; add.u32 %r7, %r7, %r10;
    cvta.to.shared.u64 %rd8, %rd3; ld.shared.u32 %r11, [%rd8]; add.u32 %r6, %r6, %r11; shl.b32 %r7, %r7, 16; add.u32 %r7, %r7, %r6;
    st.global.v2.u32 [%rd0], {%r5, %r7};"""
    out = np.zeros((64, 2), np.uint32)
    launch(
        program(body, registers=".local .align 8 .b8 frame[8];", before=".shared .align 4 .b8 buffer[256];"),
        "k",
        out,
        block=64,
    )
    thread = np.arange(64)
    value = 3 * thread + 1
    assert out[:, 0].tolist() == np.where(thread < 16, value, thread).tolist()
    assert out[:, 1].tolist() == (((np.where(thread < 16, 1, 2) + 4) << 16) + 2 * value).tolist()


def test_mixed_generic_addresses_in_one_store():
    body = """
    mov.u64 %rd2, buffer; cvta.shared.u64 %rd3, %rd2; mov.u64 %rd5, frame; cvta.local.u64 %rd6, %rd5;
    rem.u32 %r1, %r0, 3; setp.eq.u32 %p1, %r1, 0; setp.eq.u32 %p2, %r1, 1;
    cvt.u64.u32 %rd9, %r0; shl.b64 %rd9, %rd9, 3; add.s64 %rd3, %rd3, %rd9;
    selp.b64 %rd7, %rd3, %rd6, %p1; selp.b64 %rd7, %rd0, %rd7, %p2;
    st.b64 [%rd7], %rd9; ld.u64 %rd8, [%rd7]; st.global.u64 [%rd0], %rd8;"""
    out = np.zeros(32, np.uint64)
    launch(
        program(body, registers=".local .align 8 .b8 frame[8];", before=".shared .align 8 .b8 buffer[256];"), "k", out
    )
    assert out.tolist() == [8 * i for i in range(32)]


def test_constants_and_initialized_variables():
    before = """
    .const .align 4 .u32 table[4] = {11, 22, 33};
    .global .align 8 .u64 pointers[2] = {generic(value), value+4};
    .global .align 4 .u32 value[2] = {5, 6};
    .const .align 4 .f32 half = 0.5;
    """
    body = """
    and.b32 %r1, %r0, 3; mul.wide.u32 %rd2, %r1, 4; mov.u64 %rd3, table; add.s64 %rd4, %rd3, %rd2; ld.const.u32 %r2, [%rd4];
    ld.const.u32 %r3, [table+4]; ld.global.u64 %rd5, [pointers]; ld.global.u64 %rd6, [pointers+8]; ld.u32 %r4, [%rd5]; ld.global.u32 %r5, [%rd6];
    ld.const.f32 %f1, [half]; mov.b32 %r6, %f1; add.u32 %r2, %r2, %r3; mad.lo.u32 %r2, %r4, 100, %r2; mad.lo.u32 %r2, %r5, 1000, %r2;
    st.global.v2.u32 [%rd0], {%r2, %r6};"""
    out = np.zeros((32, 2), np.uint32)
    emulator = Emulator()
    module = emulator.load_text(program(body, before=before), "constants.ptx")
    launch("", "k", out, emulator=emulator, module=module)
    assert (
        out[:4, 0].tolist() == [11 + 22 + 6500, 22 + 22 + 6500, 33 + 22 + 6500, 22 + 6500]
        and (out[:, 1] == 0x3F000000).all()
    )
    emulator.write(
        module.address("table"), np.array([0, 1, 2, 3], np.uint32)
    )  # the host may change it between launches
    launch("", "k", out, emulator=emulator, module=module)
    assert out[:4, 0].tolist() == [1 + 6500, 2 + 6500, 3 + 6500, 4 + 6500]
    assert module.constant("table") == bytes([11, 0, 0, 0, 22, 0, 0, 0, 33, 0, 0, 0, 0, 0, 0, 0])


def test_parameters():
    params = ".param .u64 out, .param .u8 small, .param .align 8 .b8 box[16], .param .s16 mid, .param .f64 wide"
    body = """
    ld.param.u8 %rs1, [small]; cvt.u32.u16 %r1, %rs1; ld.param.v2.u32 {%r2, %r3}, [box+8]; ld.param.s16 %r4, [mid]; ld.param.f64 %fd1, [wide];
    mov.b64 %rd2, box; ld.param.u32 %r5, [%rd2+4]; cvta.param.u64 %rd3, %rd2; ld.u32 %r6, [%rd3];
    add.u32 %r1, %r1, 1; add.u32 %r2, %r2, %r3; add.u32 %r4, %r4, %r1; add.u32 %r4, %r4, %r2; add.u32 %r4, %r4, %r5; add.u32 %r4, %r4, %r6;
    cvt.rzi.s32.f64 %r7, %fd1; st.global.v2.u32 [%rd0], {%r4, %r7};"""
    out = np.zeros((32, 2), np.int32)
    box = np.array([1000, 200, 30, 4], np.uint32).tobytes()
    launch(program(body, params=params), "k", out, 200, box, bytes([0xFE, 0xFF]), -7.5)
    assert (out == [200 + 1 + 34 - 2 + 200 + 1000, -7]).all()


# -- atomics --------------------------------------------------------------------------------------------------------


def sequential(operation, bits, start, values, other=None):
    """Apply an atomic for the threads in order; return the old value each thread read, and the final value."""
    mask = (1 << bits) - 1

    def signed(x):
        return x - (1 << bits) if x >> bits - 1 else x

    apply = {
        "add": lambda a, b: a + b, "exch": lambda a, b: b, "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
        "min.u": min, "max.u": max, "min.s": lambda a, b: min(signed(a), signed(b)), "max.s": lambda a, b: max(signed(a), signed(b)),
        "inc": lambda a, b: 0 if a >= b else a + 1, "dec": lambda a, b: b if a == 0 or a > b else a - 1,
    }[operation]  # fmt: skip
    olds, now = [], start
    for value in values:
        olds.append(now)
        now = apply(now, value) & mask
    return olds, now


CASES = [("add", "u32"), ("add", "s32"), ("add", "u64"), ("min", "s32"), ("max", "u32"), ("min", "u64"), ("max", "s64"), ("and", "b32"), ("or", "b64"),
         ("xor", "b32"), ("exch", "b32"), ("exch", "b64"), ("inc", "u32"), ("dec", "u32")]  # fmt: skip


def test_spaces_of_addresses():
    """Parameters lie in global memory, too (PTX ISA 9.7.9.21); constants do not."""
    body = """
    mov.b64 %rd2, out; cvta.param.u64 %rd2, %rd2; mov.u64 %rd3, fixed; cvta.const.u64 %rd3, %rd3;
    mov.u64 %rd4, buffer; cvta.shared.u64 %rd4, %rd4; mov.u32 %r5, 0;"""
    for position, address in enumerate(("%rd0", "%rd2", "%rd3", "%rd4")):
        for bit, space in enumerate(("global", "param", "const", "shared")):
            body += f"isspacep.{space} %p1, {address}; @%p1 or.b32 %r5, %r5, {1 << (4 * position + bit)};"
    body += "isspacep.param::entry %p1, %rd2; @%p1 or.b32 %r5, %r5, 0x10000; st.global.u32 [%rd0], %r5;"
    out = np.zeros(32, np.uint64)
    launch(program(body, before=".const .b32 fixed = 7;\n.shared .align 4 .b8 buffer[64];"), "k", out)
    assert (out == 0x1_8431).all()


PARAMS = ".param .u64 out, .param .u32 a, .param .u32 b, .param .u32 c"


@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize(
    "load, message",
    [
        (
            "ld.param.u64 %rd2, [b];",
            "reads 8 bytes at 0x[0-9a-f]+c of the kernel's parameters, which is no multiple of 8",
        ),
        ("ld.param.v2.u32 {%r2, %r3}, [b];", "which is no multiple of 8"),
        (
            "ld.param.u32 %r2, [b+8];",
            r"the nearest is the kernel's parameters \(20 bytes at .*\), 4 bytes past the end",
        ),
        ("ld.param.u32 %r2, [b+4096];", "4092 bytes past the end"),
        ("@%p1 ld.param.u64 %rd2, [b];", "which is no multiple of 8"),
        ("@%p1 ld.param.u64 %rd2, [b+8];", "8 bytes past the end"),
        ("mov.b64 %rd2, b; ld.param.u32 %r2, [%rd2+8];", "4 bytes past the end"),
        (
            "ld.const.u32 %r2, [fixed+8];",
            r"the nearest is the variable 'fixed' \(8 bytes at .*\), 4 bytes past the end",
        ),
        ("ld.const.u32 %r2, [fixed+2];", "of the variable 'fixed', which is no multiple of 4"),
        (
            "mov.b64 %rd2, b; cvta.param.u64 %rd2, %rd2; st.u32 [%rd2], 1;",
            "writes 4 bytes in the kernel's parameters .* which is constant",
        ),
    ],
)  # fmt: skip
def test_faulty_accesses_to_parameters_and_constants(load, message, checks):
    body = f"setp.eq.u32 %p1, %r0, 0; mov.u64 %rd2, 0; mov.u32 %r2, 0; \n{load}\n add.u32 %r2, %r2, 1;"
    text = program(body, params=PARAMS, before=".const .b32 fixed[2] = {7, 8};")
    line = 1 + next(i for i, each in enumerate(text.splitlines()) if each == load)
    emulator = Emulator(checks=checks)
    module = emulator.load_text(text, "test.ptx")
    for _ in range(2):  # of the second launch the values that all threads share are known before
        with pytest.raises(EmulatorFault, match=r"k: thread \(0, 0, 0\) of block \(0, 0, 0\) .*" + message) as caught:
            launch(text, "k", np.zeros(32, np.uint64), 1, 2, 3, emulator=emulator, module=module)
        assert caught.value.line == line and f"at PTX line {line} (" in str(caught.value)


def test_a_faulty_load_that_no_thread_executes_is_none():
    body = "setp.eq.u32 %p1, %r0, 99; @%p1 ld.param.u64 %rd2, [out+4096]; @%p1 ld.param.u64 %rd2, [out+4];"
    launch(program(body), "k", np.zeros(32, np.uint64))


@pytest.mark.parametrize("space", ["global", "shared", ""])
@pytest.mark.parametrize("operation,type", CASES)
def test_atom(operation, type, space, rng):
    bits = int(type[1:])
    r, size = ("%r", 4) if bits == 32 else ("%rd", 8)
    dtype = np.dtype(f"u{size}")
    values = rng.integers(0, 1 << bits, 64, dtype=dtype)
    values[::3] %= 7
    start = 4
    # Threads use three addresses in turn; shared memory is copied out at the end.
    body = f"""
    ld.param.u64 %rd2, [in]; mul.wide.u32 %rd3, %r0, {size}; add.s64 %rd4, %rd2, %rd3; ld.global.b{bits} {r}9, [%rd4];
    rem.u32 %r20, %r0, 3; mul.wide.u32 %rd21, %r20, {size};
    mov.u64 %rd22, buffer; add.s64 %rd23, %rd22, %rd21; mov.b{bits} {r}24, {start}; st.shared.b{bits} [%rd23], {r}24; bar.sync 0;
    ld.param.u64 %rd25, [cells]; add.s64 %rd26, %rd25, %rd21; cvta.shared.u64 %rd27, %rd23;
    atom{"." + space if space else ""}.{operation}.{type} {r}10, [{"%rd26" if space == "global" else "%rd23" if space == "shared" else "%rd27"}], {r}9;
    ld.param.u64 %rd28, [out]; add.s64 %rd29, %rd28, %rd3; st.global.b{bits} [%rd29], {r}10; bar.sync 0;
    """
    if space != "global":
        body += f"ld.shared.b{bits} {r}11, [%rd23]; st.global.b{bits} [%rd26], {r}11;"
    out, cells = np.zeros(64, dtype), np.full(3, start, dtype)
    launch(
        program(
            body, params=".param .u64 out, .param .u64 in, .param .u64 cells", before=".shared .align 8 .b8 buffer[24];"
        ),
        "k",
        out,
        values,
        cells,
        block=64,
    )
    name = f"{operation}.{type[0]}" if operation in ("min", "max") else operation
    for cell in range(3):
        olds, end = sequential(name, bits, start, values[cell::3].tolist())
        assert out[cell::3].tolist() == olds and int(cells[cell]) == end


def test_compare_and_swap_and_red():
    body = """
    ld.param.u64 %rd2, [in]; atom.global.cas.b32 %r1, [%rd2], %r0, 100; atom.global.acq_rel.gpu.cas.b64 %rd3, [%rd2+8], 0, 5;
    red.global.add.u32 [%rd2+16], %r0; red.global.max.s32 [%rd2+20], %r0; red.global.add.f32 [%rd2+24], 0f3F000000; red.relaxed.gpu.global.or.b32 [%rd2+28], %r0;
    setp.lt.u32 %p1, %r0, 3; @%p1 red.global.add.u64 [%rd2+32], 1;
    cvt.u32.u64 %r2, %rd3; st.global.v2.u32 [%rd0], {%r1, %r2};"""
    cells = np.zeros(10, np.uint32)
    cells[0] = 7
    out = np.zeros((32, 2), np.uint32)
    launch(program(body, params=IN_OUT), "k", out, cells)
    assert out[:, 0].tolist() == [7] * 8 + [100] * 24 and out[:, 1].tolist() == [0] + [5] * 31
    assert cells.tolist() == [100, 0, 5, 0, sum(range(32)), 31, int(np.float32(16).view(np.uint32)), 31, 3, 0]


def small_float(code, type):
    """The value of a float code as a Python float."""
    if type == "f32":
        return struct.unpack("<f", struct.pack("<I", code))[0]
    if type == "f16":
        return struct.unpack("<e", struct.pack("<H", code))[0]
    return struct.unpack("<f", struct.pack("<I", code << 16))[0]


def rounded_code(number, type):
    """The code of an exact sum, rounded to nearest even."""
    if math.isnan(number):
        return {"f32": 0x7FFFFFFF, "f16": 0x7FFF, "bf16": 0x7FFF}[type]
    if type == "f32":
        return struct.unpack("<I", struct.pack("<f", number))[0]
    if type == "f16":
        return struct.unpack("<H", struct.pack("<e", number))[0]
    bits = struct.unpack("<I", struct.pack("<f", number))[0]
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def in_turn(operation, type, now, value):
    """The code after one atomic update. min and max prefer a number to NaN; -0 is below +0."""
    left, right = small_float(now, type), small_float(value, type)
    if operation == "add":
        return rounded_code(left + right, type)
    if math.isnan(left) or math.isnan(right):
        return now if math.isnan(right) else value
    ordered = sorted([(left, math.copysign(1, left), now), (right, math.copysign(1, right), value)])
    return ordered[0 if operation == "min" else 1][2]


VECTORS = [
    (operation, type, lanes)
    for operation in ("add", "min", "max")
    for type in ("f16", "bf16", "f16x2", "bf16x2")
    for lanes in (2, 4, 8)
    if lanes < 8 or type[-2:] == "16"
]
VECTORS += [("add", "f32", 2), ("add", "f32", 4)]


@pytest.mark.parametrize("name", ["atom", "red"])
@pytest.mark.parametrize("operation, type, lanes", VECTORS)
def test_vector_atomics(name, operation, type, lanes, rng):
    """Each element of a vector is updated separately, in the order of the threads; threads use three vectors in
    turn."""
    element = type.removesuffix("x2")
    width, pack = (4, 1) if type == "f32" else (2, 2 if type.endswith("x2") else 1)
    numbers = rng.integers(-8, 9, (32, lanes * pack)) * rng.choice([0.25, 1.0, 33.0], (32, lanes * pack))
    codes = [[rounded_code(float(number), element) for number in row] for row in numbers]
    if operation != "add":
        codes[3][0], codes[4][1], codes[9][0] = 0x7FFF, 0x8000, 0x0000
    values = np.array(codes, f"u{width}")
    register, size = ("%rs", 16) if width * pack == 2 else ("%r", 32)
    low, high = (", ".join(f"{register}{first + lane}" for lane in range(lanes)) for first in (1, 21))
    loads = " ".join(f"ld.global.b{size} {register}{21 + lane}, [%rd4+{lane * width * pack}];" for lane in range(lanes))
    stores = " ".join(f"st.global.b{size} [%rd8+{lane * width * pack}], {register}{1 + lane};" for lane in range(lanes))
    total = width * pack * lanes
    noftz = "" if type == "f32" else ".noftz"
    body = f"""
    ld.param.u64 %rd2, [in]; mul.wide.u32 %rd3, %r0, {total}; add.s64 %rd4, %rd2, %rd3; {loads}
    rem.u32 %r20, %r0, 3; mul.wide.u32 %rd5, %r20, {total}; ld.param.u64 %rd6, [cells]; add.s64 %rd6, %rd6, %rd5;
    {name}.global.{operation}{noftz}.v{lanes}.{type} {"" if name == "red" else f"{{{low}}}, "}[%rd6], {{{high}}};
    ld.param.u64 %rd7, [out]; add.s64 %rd8, %rd7, %rd3; {stores if name == "atom" else ""}"""
    out, cells = np.zeros_like(values), np.full((3, lanes * pack), rounded_code(1.0, element), f"u{width}")
    want = [[rounded_code(1.0, element)] * (lanes * pack) for _ in range(3)]
    olds = []
    for thread, row in enumerate(codes):
        olds.append(want[thread % 3])
        want[thread % 3] = [in_turn(operation, element, now, value) for now, value in zip(want[thread % 3], row)]
    launch(program(body, params=".param .u64 out, .param .u64 in, .param .u64 cells"), "k", out, values, cells)
    assert cells.tolist() == want
    assert name == "red" or out.tolist() == olds


def test_vector_atomics_as_nvcc_writes_them_and_their_faults():
    body = "ld.param.u64 %rd2, [in]; {guard} atom{space}.add.v2.f32 {{_, %f2}}, [%rd2+{at}], {{0f3F800000, 0f40000000}}; st.global.b32 [%rd0], %f2;"
    out, cells = np.zeros(32, np.uint64), np.array([5, 0.5, 0, 0], np.float32)
    launch(program(body.format(space=".global", at=0, guard=""), params=IN_OUT), "k", out, cells)
    assert (
        cells.tolist() == [37, 64.5, 0, 0] and (out.astype(np.uint32).view(np.float32) == 0.5 + 2 * np.arange(32)).all()
    )
    launch(
        program(
            body.format(space="", at=8, guard="setp.eq.u32 %p1, %r0, 7; mov.b32 %f2, 0f00000000; @%p1"), params=IN_OUT
        ),
        "k",
        out,
        cells,
    )
    assert cells.tolist() == [37, 64.5, 1, 2]
    fault(body.format(space="", at=4, guard=""), "no multiple of 8", arrays=(cells,), params=IN_OUT)
    fault(
        body.format(space="", at=16, guard=""), "updates 8 bytes at .* in no allocation", arrays=(cells,), params=IN_OUT
    )
    for form in (
        "shared.add.v2.f32",
        "global.min.v2.f32",
        "global.add.v8.f32",
        "global.add.noftz.v8.f16x2",
        "global.and.v2.b32",
        "global.add.v2.f64",
    ):
        with pytest.raises(Unsupported, match="in global memory there is"):
            resolve(f"atom.{form}")


@pytest.mark.parametrize("space, sum", [("global", 0x00000000), ("shared", 0x00000003)])
def test_atomic_sums_of_floats_flush_in_global_memory_only(space, sum):
    """Sums of subnormals: ptxas emits ADD.F32.FTZ for global memory, and a loop with a plain FADD for shared memory."""
    cells = np.array([1, 0x80000001, 0x00800001], np.uint32)
    body = f"""
    .shared .align 4 .b8 raw[4]; .reg .b64 %at; ld.param.u64 %rd2, [in]; ld.global.b32 %r1, [%rd2]; st.shared.b32 [raw], %r1;
    mov.u64 %at, {"raw" if space == "shared" else "%rd2"}; atom.{space}.add.f32 %f1, [%at], 0f00000002;
    st.global.b32 [%rd0], %f1; ld.{space}.b32 %r2, [%at]; st.global.b32 [%rd0+4], %r2;"""
    out = np.zeros(1, np.uint64)
    launch(program(body, params=IN_OUT), "k", out, cells, block=1)
    assert out.view(np.uint32).tolist() == [1, sum]
    if space == "global":
        launch(
            program(
                body.replace("[%rd2]; st.sh", "[%rd2+8]; st.sh").replace("[%at], 0f00000002", "[%at+8], 0f80800000"),
                params=IN_OUT,
            ),
            "k",
            out,
            cells,
            block=1,
        )
        assert cells[2] == 0  # the difference of two normal numbers is subnormal
        launch(
            program(body.replace("[%at], 0f00000002", "[%at+4], 0f80000002"), params=IN_OUT), "k", out, cells, block=1
        )
        assert cells[1] == 0x80000000


# -- checks ---------------------------------------------------------------------------------------------------------


def fault(body, pattern, *, arrays=(), block=32, params=".param .u64 out", before="", registers="", **options):
    with pytest.raises(EmulatorFault, match=pattern) as caught:
        launch(
            program(body, params=params, before=before, registers=registers),
            "k",
            np.zeros(block, np.uint64),
            *arrays,
            block=block,
            emulator=Emulator(**options),
        )
    return caught.value


def test_out_of_bounds():
    found = fault(
        "st.global.u64 [%rd0+8], %rd0;",
        r"k: thread \(31, 0, 0\) of block \(0, 0, 0\) writes 8 bytes .* 8 bytes past the end.*PTX line 12 \(st.global.u64\)",
    )
    assert (found.kernel, found.thread, found.block, found.line) == ("k", (31, 0, 0), (0, 0, 0), 12)
    fault("st.global.u64 [%rd0+-8], %rd0;", r"thread \(0, 0, 0\) .* 8 bytes before the start")
    fault("ld.global.u32 %r1, [0];", "reads 4 bytes at 0x0, which lie in no allocation")
    fault(
        "mov.u32 %r1, b; st.shared.u32 [%r1+64], %r0;",
        r"writes 4 bytes at 0x440 of shared memory, which holds 0x400 to 0x440",
        before=".shared .align 4 .b8 b[64];",
    )
    fault("st.shared.u32 [0], %r0;", "of shared memory", before=".shared .align 4 .b8 b[64];")
    fault(
        "mov.u64 %rd2, f; add.s64 %rd2, %rd2, %rd1; st.local.u32 [%rd2], %r0;",
        r"thread \(2, 0, 0\).* of local memory",
        registers=".local .align 8 .b8 f[16];",
    )
    fault("mov.u64 %rd2, b; cvta.shared.u64 %rd3, %rd2; setp.eq.u32 %p1, %r0, 9; selp.b64 %rd4, %rd3, %rd0, %p1; st.u64 [%rd4+64], %rd0;", r"thread \(9, 0, 0\)", before=".shared .align 8 .b8 b[64];")  # fmt: skip


def test_guarded_access_names_the_right_thread():
    fault(
        "setp.gt.u32 %p1, %r0, 20; setp.gt.u32 %p2, %r0, 25; selp.b64 %rd0, 24, %rd0, %p2; @%p1 ld.global.u32 %r1, [%rd0];",
        r"thread \(26, 0, 0\)",
    )


def test_misaligned():
    fault("st.global.u32 [%rd0+2], %r0;", "no multiple of 4")
    fault(
        "mov.u32 %r1, b; st.shared.v4.u32 [%r1+8], {%r0, %r0, %r0, %r0};",
        "no multiple of 16",
        before=".shared .align 16 .b8 b[64];",
    )


def test_memory_that_nothing_wrote():
    fault(
        "mov.u32 %r1, b; ld.shared.u32 %r2, [%r1];",
        "reads 4 bytes at 0x400 of shared memory, 4 of them that nothing wrote",
        before=".shared .align 4 .b8 b[64];",
    )
    fault("ld.local.u32 %r2, [f];", "that nothing wrote", registers=".local .align 8 .b8 f[16];")
    before = ".shared .align 16 .b8 b[64];"
    fault(
        "mov.u32 %r1, b; st.shared.u8 [%r1+2], 1; ld.shared.v4.u32 {%r2, %r3, %r4, %r5}, [%r1];",
        "15 of them that nothing wrote",
        before=before,
    )
    launch(
        program("mov.u32 %r1, b; ld.shared.u32 %r2, [%r1];", before=before),
        "k",
        np.zeros(32, np.uint64),
        emulator=Emulator(checks=False),
    )
    emulator = Emulator()
    address = emulator.alloc(64)
    with pytest.raises(EmulatorFault, match="reads .* where no kernel wrote: 64 of 64 bytes"):
        emulator.read(address, np.zeros(64, np.uint8))
    emulator.write(address, np.zeros(60, np.uint8))
    with pytest.raises(EmulatorFault, match="4 of 64 bytes, the first at byte 60"):
        emulator.read(address, np.zeros(64, np.uint8))
    emulator.write(address + 60, bytes(4))
    emulator.read(address, np.zeros(64, np.uint8))


def test_freed_and_constant_memory():
    emulator = Emulator()
    address = emulator.alloc(256)
    emulator.free(address)
    with pytest.raises(EmulatorFault, match="freed twice"):
        emulator.free(address)
    with pytest.raises(EmulatorFault, match="lie in no allocation"):
        emulator.write(address, bytes(4))
    assert emulator.alloc(256) != address
    fault(
        "mov.u64 %rd2, table; st.global.u32 [%rd2], %r0;",
        "which is constant",
        before=".const .align 4 .u32 table[4] = {1, 2, 3, 4};",
    )


# -- bank conflicts -------------------------------------------------------------------------------------------------


def test_bank_conflicts():
    lanes = np.arange(32)
    assert conflicts(lanes, 4 * lanes, 4) == 0
    assert conflicts(lanes, 0 * lanes, 4) == 0  # one word for all
    assert conflicts(lanes, lanes, 1) == 0  # four lanes to a word
    assert conflicts(lanes, 8 * lanes, 4) == 1
    assert conflicts(lanes, 128 * lanes, 4) == 31
    assert conflicts(lanes, 132 * lanes, 4) == 0
    assert conflicts(lanes, 8 * lanes, 8) == 0
    assert conflicts(lanes, 16 * lanes, 16) == 0
    assert conflicts(lanes, 128 * lanes, 16) == 4 * 7
    assert conflicts(np.arange(64), 128 * np.arange(64), 8) == 2 * 2 * 15
    assert conflicts(lanes[:3], 128 * lanes[:3], 4) == 2


def test_bank_conflicts_per_line():
    body = "mov.u32 %r1, b; mad.lo.u32 %r2, %r0, 8, %r1;\n st.shared.u32 [%r2], %r0;\n ld.shared.u32 %r3, [%r1];\n shl.b32 %r4, %r0, 2; add.u32 %r4, %r4, %r1;\n st.shared.u32 [%r4], %r0;"
    emulator = Emulator(bank_conflicts=True)
    launch(
        program(body, before=".shared .align 4 .b8 b[256];"),
        "k",
        np.zeros(64, np.uint64),
        block=32,
        grid=2,
        emulator=emulator,
    )
    assert emulator.bank_conflicts == {"test.ptx": {"k": {13: 2}}}


@pytest.mark.parametrize(
    "opcode",
    [
        "ld.global.v3.u32",
        "ld.texture.u32",
        "st.const.u32",
        "atom.global.add.b32",
        "atom.shared.cas.u32",
        "red.global.exch.b32",
        "ld.shared.v8.b32",
        "cvta.to.shared.u32",
        "ld.global.u128",
    ],
)
def test_what_is_refused(opcode):
    with pytest.raises(Unsupported, match=opcode.split(".")[0]):
        resolve(opcode)


# -- padding bytes --------------------------------------------------------------------------------------------------

TAGGED = np.dtype([("tag", "i1"), ("value", "<i4")], align=True)
WIDE = np.dtype({"names": ["x", "y"], "formats": ["<f4", "<f8"], "offsets": [0, 8], "itemsize": 16})


def padded_structs(name, whole):
    """(emulator, module, address of 32 Tagged, address of 32 Wide), with unwritten padding. Unless `whole`, only the
    first field is written."""
    emulator = Emulator()
    module = emulator.load_text(text(name), name)
    tagged, wide = emulator.alloc(32 * TAGGED.itemsize), emulator.alloc(32 * WIDE.itemsize)
    emulator.launch(module.entries["fill"], 1, 32, params=np.array([tagged, wide, whole], np.uint64).tobytes()[:20])
    return emulator, module, tagged, wide


@pytest.mark.parametrize("name", ["padding.ptx", "padding.debug.ptx"])
@pytest.mark.parametrize("entry", ["copy_tagged", "copy_wide", "copy_through_calls"])
def test_padding_is_read_by_copies_of_structs(name, entry):
    emulator, module, tagged, wide = padded_structs(name, True)
    dtype, source = (WIDE, wide) if entry == "copy_wide" else (TAGGED, tagged)
    target = emulator.alloc(32 * dtype.itemsize)
    emulator.launch(module.entries[entry], 1, 32, params=np.array([target, source], np.uint64).tobytes())
    found, threads = np.zeros(32, dtype), np.arange(32)
    for field in dtype.names:  # the host reads only the fields: the padding may still be unwritten
        offset = dtype.fields[field][1]
        for thread in threads:
            emulator.read(target + int(thread) * dtype.itemsize + offset, found[field][thread : thread + 1])
    if entry == "copy_wide":
        assert (found["x"] == threads).all() and (found["y"] == 2 * threads).all()
    else:
        assert (found["tag"] == threads).all() and (
            found["value"] == 3 * threads + (entry == "copy_through_calls")
        ).all()


@pytest.mark.parametrize("name", ["padding.ptx", "padding.debug.ptx"])
@pytest.mark.parametrize(
    "entry, bytes", [("copy_tagged", "4 bytes"), ("copy_wide", "16 bytes"), ("copy_through_calls", "4 bytes")]
)
def test_fields_that_nothing_wrote_are_found_behind_padding(name, entry, bytes):
    emulator, module, tagged, wide = padded_structs(name, False)
    params = np.array([emulator.alloc(1024), wide if entry == "copy_wide" else tagged], np.uint64).tobytes()
    with pytest.raises(EmulatorFault, match=rf"reads {bytes} at .* of them that nothing wrote"):
        emulator.launch(module.entries[entry], 1, 32, params=params)


@pytest.mark.parametrize("mask", ["240", "0xf0"])
@pytest.mark.parametrize("space, window", [("shared", "raw"), ("local", "own")])
def test_used_bytes_mask(mask, space, window):
    body = f"""
    .shared .align 8 .b8 raw[256]; .local .align 8 .b8 own[256]; .reg .b64 %a;
    mov.u64 %a, {window}; st.{space}.u32 [%a+4], 9;
    .pragma "used_bytes_mask {mask}";
    ld.{space}.v2.u32 {{%r1, %r2}}, [%a];
    st.global.u32 [%rd0], %r2;"""
    out = np.zeros(1, np.uint64)
    launch(program(body), "k", out, block=1)
    assert out[0] == 9
    for wrong in (
        body.replace(mask, "255"),
        body.replace(mask, "16").replace("+4]", "]"),
        body.replace("ld.", "add.u32 %r3, 1, 2; ld."),
    ):
        with pytest.raises(EmulatorFault, match="of them that nothing wrote"):
            launch(program(wrong), "k", out, block=1)


def test_padding_behind_the_last_field_is_named():
    """nvcc reads trailing padding without a used_bytes_mask."""
    body = "st.local.b64 [own], 1; st.local.b8 [own+8], 2; ld.local.v2.b64 {%rd2, %rd3}, [own]; st.global.b64 [%rd0], %rd3;"
    fault(
        body,
        r"reads 16 bytes at 0x400 of local memory, 7 of them that nothing wrote, the last ones \(so do copies of a whole struct look",
        registers=".local .align 16 .b8 own[16];",
    )
    found = fault(
        body.replace("[own], 1", "[own], 1; st.local.b8 [own+12], 2"),
        "6 of them that nothing wrote",
        registers=".local .align 16 .b8 own[16];",
    )
    assert "struct" not in str(found)


def test_a_race_for_bytes_that_do_not_matter_is_none():
    body = """
    .shared .align 8 .b8 raw[8]; .reg .pred %q;
    setp.eq.u32 %q, %r0, 0; @%q bra first;
    setp.ne.u32 %q, %r0, 32; @%q bra done;
    st.shared.u32 [raw+4], 5; bra.uni done;
    first: st.shared.u32 [raw], 7; .pragma "used_bytes_mask 15"; ld.shared.v2.u32 {%r1, %r2}, [raw]; st.global.u32 [%rd0], %r1;
    done:"""
    out = np.zeros(64, np.uint64)
    launch(program(body), "k", out, block=64, emulator=Emulator(races=True))
    assert out[0] == 7
    with pytest.raises(EmulatorFault, match="a race"):
        launch(program(body.replace("mask 15", "mask 31")), "k", out, block=64, emulator=Emulator(races=True))
