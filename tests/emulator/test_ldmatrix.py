"""ldmatrix, stmatrix and movmatrix in isolation, against the figures of PTX ISA 9.7.14.5 in plain Python."""

import random

import numpy as np
import pytest

from ptxrt.emulator.instruction import Unsupported, resolve
from ptxrt.errors import EmulatorFault

TILE = """
    .shared .align 16 .b8 tile[1024];
    .reg .b32 %tile, %address;
    mov.u32 %tile, tile;
    mad.lo.u32 %address, %thread, 16, %tile;
    st.shared.v4.b32 [%address], {%w0, %w1, %w2, %w3};
    bar.sync 0;
    add.u32 %address, %tile, %row;
"""


def run(execute, instruction, memory, rows, outputs, extra=None):
    """Fill 512 bytes of shared memory from `memory`, then execute; %address of lane i is its row offset `rows[i]`."""
    words = np.asarray(memory, np.uint8).view(np.uint32).reshape(32, 4)
    inputs = (
        {f"w{i}": ("b32", words[:, i]) for i in range(4)} | {"row": ("b32", np.array(rows, np.uint32))} | (extra or {})
    )
    return execute(TILE + instruction, inputs, outputs)


def shuffled_rows(seed):
    rows = [16 * row for row in range(32)]
    random.Random(seed).shuffle(rows)
    return rows


def halfword(memory, address, index):
    return int(memory[address + 2 * index]) | int(memory[address + 2 * index + 1]) << 8


@pytest.fixture(scope="module")
def memory():
    return np.random.default_rng(0).integers(0, 256, 512, dtype=np.uint8)


def registers(count):
    names = [f"r{i}" for i in range(count)]
    return "{" + ", ".join(f"%{name}" for name in names) + "}", {name: "b32" for name in names}


@pytest.mark.parametrize("space", [".shared", ".shared::cta"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_m8n8(execute, memory, count, transposed, space):
    rows = shuffled_rows(count)
    vector, outputs = registers(count)
    trans = ".trans" if transposed else ""
    found = run(
        execute, f"ldmatrix.sync.aligned.m8n8.x{count}{trans}{space}.b16 {vector}, [%address];", memory, rows, outputs
    )
    for matrix in range(count):
        for lane in range(32):
            for element in range(2):
                row, column = lane // 4, 2 * (lane % 4) + element
                if transposed:
                    row, column = column, row
                expected = halfword(memory, rows[8 * matrix + row], column)
                assert int(found[f"r{matrix}"][lane]) >> 16 * element & 0xFFFF == expected


def test_generic_address(execute, memory):
    rows = shuffled_rows(9)
    instruction = """
        .reg .b64 %wide;
        cvt.u64.u32 %wide, %address;
        cvta.shared.u64 %wide, %wide;
        ldmatrix.sync.aligned.m8n8.x1.b16 {%r0}, [%wide];
    """
    found = run(execute, instruction, memory, rows, {"r0": "b32"})["r0"]
    assert int(found[5]) & 0xFFFF == halfword(memory, rows[1], 2)


@pytest.mark.parametrize("count", [1, 2])
def test_m16n16_bytes(execute, memory, count):
    """Lanes 0-15 address the rows of the first matrix, 16-31 of the second; registers 2 m and 2 m + 1 hold the columns
    of matrix m."""
    rows = shuffled_rows(count)
    vector, outputs = registers(2 * count)
    found = run(
        execute, f"ldmatrix.sync.aligned.m16n16.x{count}.trans.shared.b8 {vector}, [%address];", memory, rows, outputs
    )
    check_m16n16(found, rows, count, lambda address, column: int(memory[address + column]))


def check_m16n16(found, rows, count, element):
    for matrix in range(count):
        for half in range(2):
            for lane in range(32):
                for byte in range(4):
                    row, column = 4 * (lane % 4) + byte, lane // 4 + 8 * half
                    expected = element(rows[16 * matrix + row], column)
                    assert int(found[f"r{2 * matrix + half}"][lane]) >> 8 * byte & 0xFF == expected


def nibble(memory, address, index):
    return int(memory[address + index // 2]) >> 4 * (index % 2) & 15


def six_bits(memory, address, index):
    word = int.from_bytes(memory[address : address + 12].tobytes(), "little")
    return word >> 6 * index & 63


@pytest.mark.parametrize("source, element", [("b4x16_p64", nibble), ("b6x16_p32", six_bits)])
def test_padded_rows(execute, memory, source, element):
    """16 elements of 4 or 6 bits in the first 8 or 12 bytes of a row expand to one byte each; the padding is
    ignored."""
    rows = shuffled_rows(3)
    for count in (1, 2, 4):
        vector, outputs = registers(count)
        found = run(
            execute,
            f"ldmatrix.sync.aligned.m8n16.x{count}.shared.b8x16.{source} {vector}, [%address];",
            memory,
            rows,
            outputs,
        )
        for matrix in range(count):
            for lane in range(32):
                for byte in range(4):
                    expected = element(memory, rows[8 * matrix + lane // 4], 4 * (lane % 4) + byte)
                    assert int(found[f"r{matrix}"][lane]) >> 8 * byte & 0xFF == expected
    vector, outputs = registers(4)
    found = run(
        execute,
        f"ldmatrix.sync.aligned.m16n16.x2.trans.shared.b8x16.{source} {vector}, [%address];",
        memory,
        rows,
        outputs,
    )
    check_m16n16(found, rows, 2, lambda address, column: element(memory, address, column))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix(execute, memory, count, transposed):
    rows = shuffled_rows(count)
    values = np.random.default_rng(count).integers(0, 1 << 32, (count, 32), dtype=np.uint32)
    vector = "{" + ", ".join(f"%s{i}" for i in range(count)) + "}"
    trans = ".trans" if transposed else ""
    instruction = f"""
        stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%address], {vector};
        bar.sync 0;
        mad.lo.u32 %address, %thread, 16, %tile;
        ld.shared.v4.b32 {{%o0, %o1, %o2, %o3}}, [%address];
    """
    extra = {f"s{i}": ("b32", values[i]) for i in range(count)}
    found = run(execute, instruction, memory, rows, {f"o{i}": "b32" for i in range(4)}, extra)
    expected = memory.copy()
    for matrix in range(count):
        for lane in range(32):
            for element in range(2):
                row, column = lane // 4, 2 * (lane % 4) + element
                if transposed:
                    row, column = column, row
                half = int(values[matrix, lane]) >> 16 * element & 0xFFFF
                address = rows[8 * matrix + row] + 2 * column
                expected[address], expected[address + 1] = half & 0xFF, half >> 8
    stored = np.stack([found[f"o{i}"] for i in range(4)], axis=1).reshape(-1).view(np.uint8)
    assert (stored == expected).all()


@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix_of_bytes(execute, memory, count):
    """Byte e of lane l is row l / 4 + 8 (e / 2), column 2 (l % 4) + e % 2 of a 16 x 8 matrix; stmatrix stores its
    columns."""
    rows = shuffled_rows(count)
    values = np.random.default_rng(count).integers(0, 1 << 32, (count, 32), dtype=np.uint32)
    vector = "{" + ", ".join(f"%s{i}" for i in range(count)) + "}"
    instruction = f"""
        stmatrix.sync.aligned.m16n8.x{count}.trans.shared.b8 [%address], {vector};
        bar.sync 0;
        mad.lo.u32 %address, %thread, 16, %tile;
        ld.shared.v4.b32 {{%o0, %o1, %o2, %o3}}, [%address];
    """
    extra = {f"s{i}": ("b32", values[i]) for i in range(count)}
    found = run(execute, instruction, memory, rows, {f"o{i}": "b32" for i in range(4)}, extra)
    expected = memory.copy()
    for matrix in range(count):
        for lane in range(32):
            for element in range(4):
                row, column = lane // 4 + 8 * (element // 2), 2 * (lane % 4) + element % 2
                expected[rows[8 * matrix + column] + row] = int(values[matrix, lane]) >> 8 * element & 0xFF
    stored = np.stack([found[f"o{i}"] for i in range(4)], axis=1).reshape(-1).view(np.uint8)
    assert (stored == expected).all()


def test_movmatrix(execute):
    a = np.random.default_rng(1).integers(0, 1 << 32, 64, dtype=np.uint32)
    found = execute("movmatrix.sync.aligned.m8n8.trans.b16 %d, %a;", {"a": ("b32", a)}, {"d": "b32"})["d"]
    for warp in range(2):
        halves = a[32 * warp : 32 * warp + 32].view(np.uint16).reshape(8, 8)
        result = found[32 * warp : 32 * warp + 32].view(np.uint16).reshape(8, 8)
        assert all(result[row][column] == halves[column][row] for row in range(8) for column in range(8))


def test_only_the_lanes_of_the_matrices_give_addresses(execute, memory):
    """x1 reads the addresses of lanes 0-7 and ignores those of other lanes."""
    rows = [16 * lane if lane < 8 else 0xFFFFFFF1 for lane in range(32)]
    found = run(execute, "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r0}, [%address];", memory, rows, {"r0": "b32"})[
        "r0"
    ]
    assert (found == memory[:128].view(np.uint32)).all()


@pytest.mark.parametrize(
    "instruction",
    [
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%row}, [%address];",
        "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%address], {%row};",
    ],
)
def test_rows_are_aligned_to_16_bytes(execute, memory, instruction):
    rows = [16 * lane for lane in range(32)]
    rows[6] += 8
    with pytest.raises(EmulatorFault, match=r"thread \(6, 0, 0\).*multiple of 16"):
        run(execute, instruction, memory, rows, {"row": "b32"})


def test_bytes_that_nothing_wrote(execute, memory):
    rows = [16 * lane for lane in range(32)]
    rows[3] = 512  # beyond the initialized bytes
    with pytest.raises(EmulatorFault):
        run(execute, "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%row}, [%address];", memory, rows, {"row": "b32"})


@pytest.mark.parametrize(
    "instruction",
    [
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%row}, [%address];",
        "movmatrix.sync.aligned.m8n8.trans.b16 %row, %row;",
    ],
)
def test_a_part_of_a_warp_is_a_fault(execute, memory, instruction):
    body = f".reg .pred %q; setp.lt.u32 %q, %thread, 31; @%q {instruction}"
    with pytest.raises(EmulatorFault):
        run(execute, body, memory, [16 * lane for lane in range(32)], {"row": "b32"})


@pytest.mark.parametrize(
    "opcode",
    [
        "ldmatrix.sync.aligned.m8n8.x3.shared.b16",
        "ldmatrix.sync.aligned.m8n8.x1.shared.b8",
        "ldmatrix.sync.aligned.m16n16.x4.trans.shared.b8",
        "ldmatrix.sync.aligned.m16n16.x1.shared.b8",
        "ldmatrix.sync.aligned.m8n16.x1.trans.shared.b8x16.b4x16_p64",
        "ldmatrix.sync.aligned.m8n16.x1.shared.b8x16",
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16.b4x16_p64",
        "stmatrix.sync.aligned.m16n8.x1.shared.b8",
        "movmatrix.sync.aligned.m8n8.b16",
    ],
)
def test_other_forms_are_refused(opcode):
    with pytest.raises(Unsupported, match="is not implemented"):
        resolve(opcode)
