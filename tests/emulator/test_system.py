"""Functions of the driver: printf and assert, and those that cooperative groups need (tests/data/system.cu)."""

import ctypes
import ctypes.util
import math

import numpy as np
import pytest
from programs import launch, program, text

from ptxrt.emulator import Emulator
from ptxrt.emulator.instruction import Fault, Unsupported
from ptxrt.emulator.system import formatted
from ptxrt.errors import EmulatorFault


class Given:
    """The arguments of a call without a machine: every read takes the next value of a list."""

    def __init__(self, *values):
        self.values = list(values)

    def next(self, kind):
        value = self.values.pop(0)
        return float(value) if kind[0] == "f" else np.array([value], "i8" if value < 0 else "u8").astype(kind)[0].item()


INTEGERS = [0, 1, -1, 42, -(2**31), 2**31 - 1]
FORMATS = [
    *(f"%{flags}{width}{precision}{type}" for flags in ("", "-", "+", " ", "0", "#", "-#", "0#") for width in ("", "1", "9") for precision in ("", ".0", ".4") for type in "diuxXo"),
]  # fmt: skip


def printed_by_c(format, *arguments):
    library = ctypes.CDLL(ctypes.util.find_library("c"))
    buffer = ctypes.create_string_buffer(4096)
    library.snprintf(buffer, ctypes.c_size_t(4096), format.encode(), *arguments)
    return buffer.value.decode()


@pytest.mark.skipif(
    not ctypes.util.find_library("c") or not hasattr(ctypes.CDLL(None), "snprintf"), reason="no C library here"
)
class TestAgainstC:
    """Every conversion, with flags, widths and precisions, prints what the C library prints."""

    def test_integers(self):
        for format in FORMATS:
            for value in INTEGERS:
                assert formatted(format, Given(value)) == printed_by_c(format, ctypes.c_int32(value)), (format, value)

    def test_lengths(self):
        for value in (0, -1, 200, 40000, -(2**63), 2**40 + 5):
            for length, wide in (("hh", False), ("h", False), ("l", True), ("ll", True), ("z", True)):
                for type in "dux":
                    c_value = ctypes.c_int64(value) if wide else ctypes.c_int32(value)
                    format = f"[%{length}{type}]"
                    assert formatted(format, Given(c_value.value)) == printed_by_c(format, c_value), (format, value)

    def test_floats(self):
        for type in "fFeEgGaA":
            for flags in ("", "+", "-", " ", "0"):
                for width in ("", "14"):
                    for precision in ("", ".0", ".3") if type not in "aA" else ("",):
                        for value in (0.0, -0.0, 1.5, -2.75, 1e-7, 123456.789, 1e300, math.inf, -math.inf):
                            if type in "aA" and "0" in flags or ("0" in flags and math.isinf(value)):
                                continue  # zeros between 0x and the digits; C pads infinities with blanks
                            format = f"[%{flags}{width}{precision}{type}]"
                            expected = printed_by_c(format, ctypes.c_double(value))
                            assert formatted(format, Given(value)).lower() == expected.lower(), (format, value)

    def test_characters_and_stars(self):
        assert formatted("[%c|%5c|%-5c]", Given(65, 66, 67)) == printed_by_c(
            "[%c|%5c|%-5c]", *map(ctypes.c_int, (65, 66, 67))
        )
        for width, precision in ((8, 2), (-8, 2), (8, -1)):
            expected = printed_by_c("[%*.*f]", ctypes.c_int(width), ctypes.c_int(precision), ctypes.c_double(2.0 / 3))
            assert formatted("[%*.*f]", Given(width, precision, 2.0 / 3)) == expected


def test_a_conversion_that_does_not_exist():
    with pytest.raises(Fault, match="prints by '%n'"):
        formatted("%n", Given(0))


def test_printf(capsys):
    x = np.arange(40, dtype=np.int32)
    launch(text("system.ptx"), "printing", x, 40, grid=2, block=32)
    lines = capsys.readouterr().out.split("\n")
    every = [
        f"{i}: {i:5}|7     |+{i}|{i:05}|ff|0XFF|10|{chr(97 + i % 26)}|%|{i << 33}|9223372036854775808|-3|4"
        for i in range(0, 40, 3)
    ]
    other = "1.500000|    -2.062|1.234568e+04|1e-05|1E+20|0x1.8p+0|text|     abc|0x10|    42|3.14"
    assert lines == [every[0], "no arguments", other, *every[1:], ""]


def test_what_a_kernel_prints_before_a_fault_appears():
    printed = []
    x = np.full(32, 31, np.int32)
    source = text("system.ptx")
    emulator = Emulator(output=printed.append)
    with pytest.raises(EmulatorFault, match="reads 4 bytes at .* past the end"):
        launch(source, "printing", x, 64, grid=1, block=64, emulator=emulator)
    emulator = Emulator(output=printed.append)
    body = """{ .param .b64 p0; st.param.b64 [p0], %rd2; .param .b64 p1; st.param.b64 [p1], 0; .param .b32 q;
    call.uni (q), vprintf, (p0, p1); ld.param.b32 %r5, [q]; } st.global.u32 [%rd0], %r5; trap;"""
    declared = ".extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);\n.global .align 1 .b8 word[6] = {104, 101, 108, 108, 111, 10};"
    with pytest.raises(EmulatorFault, match="executes a trap"):
        launch(
            program(
                "mov.u64 %rd2, word; cvta.global.u64 %rd2, %rd2;" + body, before=declared.replace("word[6]", "word[7]")
            ),
            "k",
            np.zeros(2, np.uint64),
            block=2,
            emulator=emulator,
        )
    assert printed == ["hello\nhello\n"]


@pytest.mark.parametrize("address, count", [("word", 0), ("0", -1)])
def test_the_result_is_the_number_of_arguments(address, count):
    """A null format prints nothing, nor do threads whose guard is false."""
    printed = []
    declared = ".extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);\n.global .align 1 .b8 word[3] = {120, 10, 0};"
    body = f"""mov.u64 %rd2, {address}; mov.u32 %r5, 77; setp.ge.u32 %p1, %r0, 2;
    {{ .param .b64 p0; st.param.b64 [p0], %rd2; .param .b64 p1; st.param.b64 [p1], 0; .param .b32 q;
    @%p1 call (q), vprintf, (p0, p1); @%p1 ld.param.b32 %r5, [q]; }} st.global.s32 [%rd0], %r5;"""
    out = np.zeros(4, np.int64)
    launch(program(body, before=declared), "k", out, block=4, emulator=Emulator(output=printed.append))
    assert out.astype(np.int32).tolist() == [77, 77, count, count]
    assert printed == (["x\nx\n"] if count == 0 else [])


def test_assert():
    launch(text("system.ptx"), "asserting", np.arange(30, dtype=np.int32), block=30)
    with pytest.raises(EmulatorFault) as caught:
        launch(text("system.ptx"), "asserting", np.arange(32, dtype=np.int32))
    said = str(caught.value)
    assert said.startswith(
        "asserting: thread (30, 0, 0) of block (0, 0, 0) fails the assertion `x[threadIdx.x] < 30` of "
    )
    assert "system.cu:15, void asserting(const int *) at PTX line" in said and said.endswith("tests/data/system.cu:15")


def test_other_functions_without_a_body_are_refused():
    before = ".extern .func (.param .b64 r) malloc (.param .b64 a);"
    body = "{ .param .b64 p; st.param.b64 [p], %rd1; .param .b64 q; call (q), malloc, (p); }"
    with pytest.raises(Unsupported, match="call: 'malloc' is called and has no body here"):
        Emulator().load_text(program(body, before=before))


# Cooperative groups


@pytest.mark.parametrize("schedule", ["together", "warps"])
def test_a_grid_that_synchronizes(schedule):
    out = np.zeros(1, np.int32)
    for _ in range(2):
        launch(
            text("system.ptx"),
            "grid_sum",
            np.zeros(256, np.int32),
            out,
            grid=4,
            block=64,
            emulator=Emulator(schedule=schedule),
        )
        assert out[0] == 256 * 257 // 2


def test_a_grid_of_more_blocks_than_run_together_does_not_synchronize():
    message = "grid_sum synchronizes its grid: all 300 blocks of 64 threads have to run together, and 256 do; launch 256 blocks at most"
    with pytest.raises(EmulatorFault, match=message):
        launch(text("system.ptx"), "grid_sum", np.zeros(300 * 64, np.int32), np.zeros(1, np.int32), grid=300, block=64)


def test_tiles():
    x, out = np.arange(64, dtype=np.int32), np.zeros(64, np.int32)
    launch(text("system.ptx"), "tiles", x, out, block=64)
    sums = np.repeat(x.reshape(8, 8).sum(axis=1), 8)
    assert (out == sums + (sums > 100) + 255 * (sums & 1)).all()


def test_tiles_of_two_warps():
    """They synchronize through a word of the driver's reserved shared memory."""
    x, out = np.arange(128, dtype=np.int32), np.zeros(128, np.int32)
    launch(text("system.ptx"), "wide_tiles", x, out, block=128)
    group = np.arange(128) // 64
    assert (out == 40 + 64 * group + 1000 * group + 10000 * (group == 1)).all()


def test_memory_behind_the_reserved_part_is_out_of_bounds():
    body = "mov.u32 %r1, %reserved_smem_offset_1; ld.shared.u32 %r2, [%r1+{}]; st.global.u32 [%rd0], %r2;"
    launch(program(body.format(1020)), "k", np.zeros(32, np.uint64))
    with pytest.raises(EmulatorFault, match="of shared memory, which holds"):
        launch(program(body.format(1024)), "k", np.zeros(32, np.uint64))
