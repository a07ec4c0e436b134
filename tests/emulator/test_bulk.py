"""Bulk and tensor copies in isolation (PTX ISA 9.7.9.25.4, 9.7.9.25.5): what they copy, where to, and when it is
visible."""

import itertools
import struct

import numpy as np
import pytest

from ptxrt.emulator import Emulator
from ptxrt.emulator.instruction import Unsupported, resolve
from ptxrt.emulator.tensor_map import encode_im2col, encode_tiled
from ptxrt.errors import ArgumentError, EmulatorFault

BYTES = 4096
COMPLETES = "mbarrier::complete_tx::bytes"
HEADER = ".version 9.0\n.target sm_120a\n.address_size 64\n"


def kernel(body: str) -> str:
    """An entry `k(data, out, map)` of one warp: lane 0 runs {body}; then all lanes copy `tile` (4096 bytes) to out."""
    return f"""{HEADER}
.visible .entry k(.param .u64 data, .param .u64 out, .param .align 64 .b8 map[128])
{{
    .shared .align 1024 .b8 tile[{BYTES}]; .shared .align 8 .b64 bar;
    .reg .pred %p, %first; .reg .b32 %t, %at, %bar, %tile, %x, %y, %z; .reg .b64 %data, %out, %map, %far, %policy, %s;
    ld.param.u64 %data, [data]; ld.param.u64 %out, [out]; mov.b64 %map, map;
    mov.u32 %t, %tid.x; setp.eq.u32 %first, %t, 0; mov.u32 %bar, bar; mov.u32 %tile, tile;
    mov.u32 %x, 0xEEEEEEEE; mad.lo.u32 %at, %t, 4, %tile; mov.u32 %y, 0;
fill:
    st.shared.b32 [%at], %x; add.u32 %at, %at, 128; add.u32 %y, %y, 1; setp.lt.u32 %p, %y, {BYTES // 128}; @%p bra fill;
    @%first mbarrier.init.shared.b64 [%bar], 1;
    bar.sync 0;
    @!%first bra done;
    {body}
done:
    barrier.sync 0;
    cvt.u64.u32 %far, %t; mad.lo.u64 %out, %far, 4, %out; mad.lo.u32 %at, %t, 4, %tile; mov.u32 %y, 0;
drain:
    ld.shared.b32 %x, [%at]; st.global.b32 [%out], %x; add.u32 %at, %at, 128; add.u64 %out, %out, 128;
    add.u32 %y, %y, 1; setp.lt.u32 %p, %y, {BYTES // 128}; @%p bra drain;
    ret;
}}
"""


def expect(bytes: int) -> str:
    return f"mbarrier.arrive.expect_tx.shared.b64 _, [%bar], {bytes};"


WAIT = "ready: mbarrier.try_wait.parity.shared.b64 %p, [%bar], 0; @!%p bra ready;"


def run(body: str, data: np.ndarray, tensor=None, **options):
    """(final tile, final data). `tensor`: arguments of encode_tiled without the address, or a function of the address
    that returns the tensor map."""
    emulator = Emulator(**options)
    module = emulator.load_text(kernel(body), "bulk.ptx")
    source, out = emulator.alloc(data.nbytes), emulator.alloc(BYTES)
    emulator.write(source, data)
    if callable(tensor):
        map = tensor(source)
    else:
        map = encode_tiled(tensor[0], source, *tensor[1:-1], **tensor[-1]) if tensor else bytes(128)
    parameters = struct.pack("<QQ", source, out).ljust(64, b"\0") + map
    emulator.launch(module.entries["k"], 1, 32, 0, parameters)
    return emulator.read(out, np.empty(BYTES, np.uint8)), emulator.read(source, np.empty_like(data))


DATA = np.random.default_rng(1).integers(0, 200, 8192, dtype=np.uint8)


# Linear copies


@pytest.mark.parametrize("target", ["shared::cta", "shared::cluster"])
@pytest.mark.parametrize("size", [16, 48, 2048])
def test_into_shared_memory(target, size):
    copy = f"cp.async.bulk.{target}.global.{COMPLETES} [%tile + 64], [%data + 32], {size}, [%bar];"
    tile, _ = run(f"{expect(size)} {copy} {WAIT}", DATA)
    assert (tile[64 : 64 + size] == DATA[32 : 32 + size]).all()
    assert (tile[:64] == 0xEE).all() and (tile[64 + size :] == 0xEE).all()


def test_bytes_may_be_expected_after_the_copy():
    copy = f"cp.async.bulk.shared::cta.global.{COMPLETES}.L2::cache_hint [%tile], [%data], 64, [%bar], %policy;"
    tile, _ = run(f"mov.b64 %policy, 0; {copy} {expect(64)} {WAIT}", DATA)
    assert (tile[:64] == DATA[:64]).all()


def test_within_shared_memory():
    body = f"""
        st.shared.b32 [%tile], 77; fence.proxy.async.shared::cta; {expect(16)}
        cp.async.bulk.shared::cluster.shared::cta.{COMPLETES} [%tile + 256], [%tile], 16, [%bar]; {WAIT}
    """
    assert run(body, DATA)[0][256:260].view(np.uint32) == 77


def test_several_copies_complete_one_phase():
    copies = "".join(
        f"cp.async.bulk.shared::cta.global.{COMPLETES} [%tile + {512 * i}], [%data + {1024 * i}], 256, [%bar];"
        for i in range(4)
    )
    tile, _ = run(f"{copies} {expect(1024)} {WAIT}", DATA)
    for i in range(4):
        assert (tile[512 * i : 512 * i + 256] == DATA[1024 * i : 1024 * i + 256]).all()


LOAD = f"{expect(64)} cp.async.bulk.shared::cta.global.{COMPLETES} [%tile], [%data], 64, [%bar];"


def test_a_copy_lands_when_its_phase_is_waited_for():
    assert (run(LOAD, DATA, checks=False)[0][:64] == 0xEE).all()
    with pytest.raises(EmulatorFault, match="asynchronous copy is still writing"):
        run(LOAD, DATA)
    with pytest.raises(EmulatorFault, match="asynchronous copy is still writing"):
        run(f"{LOAD} st.shared.b32 [%tile + 8], 1; {WAIT}", DATA)


def test_too_few_bytes_are_a_deadlock():
    with pytest.raises(EmulatorFault, match=r"deadlock.*lacks 0 of 1 arrivals and 16 bytes"):
        run(LOAD.replace("[%bar], 64", "[%bar], 80") + WAIT, DATA)


STORE = "cp.async.bulk.global.shared::cta.bulk_group [%data + 128], [%tile], 64;"
COMMIT = "cp.async.bulk.commit_group;"


@pytest.mark.parametrize("wait", ["cp.async.bulk.wait_group 0;", "cp.async.bulk.wait_group.read 0;", ""])
def test_out_of_shared_memory(wait):
    _, data = run(f"st.shared.b32 [%tile], 5; fence.proxy.async; {STORE} {COMMIT} {wait}", DATA)
    assert data[128:132].view(np.uint32) == 5 and (data[132:192] == 0xEE).all()
    assert (data[:128] == DATA[:128]).all() and (data[192:] == DATA[192:]).all()


@pytest.mark.parametrize(
    "wait, seen",
    [
        ("cp.async.bulk.wait_group.read 0;", 0xEE),
        ("cp.async.bulk.wait_group 0;", 0xEE),
        ("cp.async.bulk.wait_group.read 1;", 1),
        ("", 1),
    ],
)
def test_the_source_is_read_at_the_wait(wait, seen):
    _, data = run(f"{STORE} {COMMIT} {wait} st.shared.b8 [%tile], 1;", DATA)
    assert data[128] == seen


@pytest.mark.parametrize(
    "wait, seen", [("cp.async.bulk.wait_group.read 0;", False), ("cp.async.bulk.wait_group 0;", True)]
)
def test_the_destination_is_written_at_the_wait(wait, seen):
    tile, _ = run(
        f"{STORE} {COMMIT} {wait} ld.global.b32 %x, [%data + 128]; st.shared.b32 [%tile + 512], %x;", DATA, checks=False
    )
    assert (tile[512:516] == (0xEE if seen else DATA[128:132])).all()


def test_prefetches_have_no_effect():
    tile, _ = run(
        "cp.async.bulk.prefetch.L2.global [%data], 64; prefetch.tensormap [%map]; cp.async.bulk.prefetch.tensor.1d.L2.global.tile [%map, {%t}];",
        DATA,
    )
    assert (tile == 0xEE).all()


@pytest.mark.parametrize("mask, hint", [("1", ""), ("%mask", ".L2::cache_hint")])
@pytest.mark.parametrize("tensor", [False, True])
def test_multicast_to_the_own_block(mask, hint, tensor):
    source, count = ("[%map, {0, 1}]", "") if tensor else ("[%data + 64]", "64")
    form = "tensor.2d.shared::cluster.global.tile" if tensor else "shared::cluster.global"
    operands = ", ".join(filter(None, ["[%tile]", source, count, "[%bar]", mask, "%policy" if hint else ""]))
    body = f".reg .b16 %mask; mov.b16 %mask, WHICH; mov.b64 %policy, 0; {expect(64)} cp.async.bulk.{form}.{COMPLETES}.multicast::cluster{hint} {operands}; {WAIT}"
    fields = ("u8", (64, 64), (64,), (64, 1), (1, 1), {})
    tile, _ = run(body.replace("WHICH", "1"), DATA, fields)
    assert (tile[:64] == DATA[64:128]).all() and (tile[64:] == 0xEE).all()
    if mask != "1":
        for wrong in (0, 2, 3):
            with pytest.raises(
                EmulatorFault, match=f"multicasts to the blocks 0x{wrong:x} of its cluster, which has one"
            ):
                run(body.replace("WHICH", str(wrong)), DATA, fields)


# Reductions: elements of the tile are combined with those in global or shared memory


def value_of(code: int, type: str):
    """The number that a code represents."""
    size = int(type[-2:]) // 8 if type != "bf16" else 2
    if type[0] == "s":
        return code - (1 << 8 * size) if code >> (8 * size - 1) else code
    if type == "bf16":
        return struct.unpack("<f", struct.pack("<I", code << 16))[0]
    if type[0] == "f":
        return struct.unpack({2: "<e", 4: "<f", 8: "<d"}[size], code.to_bytes(size, "little"))[0]
    return code


def code_of(number, type: str) -> int:
    """The code of a number: integers wrap, floats round to nearest even."""
    bits = 16 if type == "bf16" else int(type[-2:])
    if type == "bf16":
        code = struct.unpack("<I", struct.pack("<f", number))[0]
        return (code + 0x7FFF + (code >> 16 & 1)) >> 16
    if type[0] == "f":
        return int.from_bytes(struct.pack({16: "<e", 32: "<f", 64: "<d"}[bits], number), "little")
    return number % (1 << bits)


def combined(operation: str, type: str, old: int, new: int) -> int:
    """An element after a reduction."""
    a, b = value_of(old, type), value_of(new, type)
    return {
        "add": lambda: code_of(a + b, type), "min": lambda: old if a <= b else new, "max": lambda: old if a >= b else new,
        "inc": lambda: 0 if old >= new else old + 1, "dec": lambda: new if old == 0 or old > new else old - 1,
        "and": lambda: old & new, "or": lambda: old | new, "xor": lambda: old ^ new,
    }[operation]()  # fmt: skip


REDUCTIONS = [("add", type) for type in ("u32", "s32", "u64", "f32", "f64", "f16", "bf16")]
REDUCTIONS += [
    (operation, type) for operation in ("min", "max") for type in ("u32", "s32", "u64", "s64", "f16", "bf16")
]
REDUCTIONS += [("inc", "u32"), ("dec", "u32")] + [
    (operation, type) for operation in ("and", "or", "xor") for type in ("b32", "b64")
]


def elements(type: str, count: int, seed: int) -> list[int]:
    """Codes of a type: for integers the ends of the range, for floats small numbers and subnormals."""
    generator = np.random.default_rng(seed)
    if type[0] == "f" or type == "bf16":
        return [code_of(float(number), type) for number in generator.integers(-40, 40, count - 2) / 4] + [1, 3]
    bits = int(type[1:])
    edges = [0, 1, (1 << bits) - 1, 1 << bits - 1, (1 << bits - 1) - 1]
    return (edges + [int.from_bytes(generator.bytes(bits // 8), "little") for _ in range(count)])[:count][
        :: 1 if seed % 2 else -1
    ]


def reduced(operation, type):
    """(new bytes, old bytes, bytes after the reduction), 64 bytes each."""
    size = 2 if type == "bf16" else int(type[-2:]) // 8
    new, old = elements(type, 64 // size, 1), elements(type, 64 // size, 2)
    after = [combined(operation, type, a, b) for a, b in zip(old, new)]
    return [
        np.frombuffer(b"".join(code.to_bytes(size, "little") for code in codes), np.uint8)
        for codes in (new, old, after)
    ]


def words_into_tile(raw: np.ndarray) -> str:
    """PTX that stores 64 bytes at the start of the tile."""
    return " ".join(f"st.shared.b32 [%tile + {4 * i}], {word};" for i, word in enumerate(raw.view(np.uint32).tolist()))


@pytest.mark.parametrize("operation, type", REDUCTIONS)
def test_reductions_into_global_memory(operation, type):
    new, old, after = reduced(operation, type)
    data = DATA.copy()
    data[128:192] = old
    noftz = ".noftz" if operation == "add" and type in ("f16", "bf16") else ""
    copy = f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{operation}{noftz}.{type} [%data + 128], [%tile], 64;"
    _, found = run(
        f"{words_into_tile(new)} fence.proxy.async; {copy} {COMMIT} cp.async.bulk.wait_group 0;", data, races=True
    )
    data[128:192] = after
    assert (found == data).all()


@pytest.mark.parametrize(
    "operation, type", [case for case in REDUCTIONS if case[1] in ("u32", "s32", "b32") or case == ("add", "u64")]
)
def test_reductions_into_shared_memory(operation, type):
    new, old, after = reduced(operation, type)
    copy = f"cp.reduce.async.bulk.shared::cluster.shared::cta.{COMPLETES}.{operation}.{type} [%tile + 64], [%tile], 64, [%bar];"
    body = f"{words_into_tile(new)} {words_into_tile(old).replace('%tile + ', '%tile + 64 + ')} fence.proxy.async; {expect(64)} {copy} {WAIT}"
    for i in range(16):
        body = body.replace(f"[%tile + 64 + {4 * i}]", f"[%tile + {64 + 4 * i}]")
    tile, _ = run(body, DATA, races=True)
    assert (tile[64:128] == after).all() and (tile[:64] == new).all() and (tile[128:] == 0xEE).all()


@pytest.mark.parametrize(
    "operation, dtype",
    [("add", "f32"), ("add", "bf16"), ("max", "s32"), ("xor", "u64"), ("inc", "u32"), ("min", "f16")],
)
def test_reductions_of_tensors(operation, dtype):
    """A box of two rows that extends beyond the right edge: memory outside the tensor is not written."""
    type = f"b{dtype[1:]}" if operation == "xor" else dtype
    size = 2 if dtype == "bf16" else int(dtype[-2:]) // 8
    new, old, after = reduced(operation, type)
    data = np.full((4, 64), 7, np.uint8)
    columns = 32 // size
    data[1, 32:64], data[2, 32:64] = old[:32], old[32:]
    want = data.copy()
    want[1, 32:48], want[2, 32:48] = after[:16], after[32:48]
    copy = f"cp.reduce.async.bulk.tensor.2d.global.shared::cta.{operation}.tile.bulk_group [%map, {{{columns}, 1}}], [%tile];"
    fields = (dtype, (48 // size, 4), (64,), (columns, 2), (1, 1), {})
    _, found = run(
        f"{words_into_tile(new)} fence.proxy.async; {copy} {COMMIT} cp.async.bulk.wait_group 0;", data, fields
    )
    assert (found == want).all()


REDUCE = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%data + 128], [%tile], 64;"


def test_reductions_add_up_and_are_performed_at_the_wait():
    data = np.zeros(8192, np.uint8)
    ones = words_into_tile(np.ones(16, np.uint32).view(np.uint8)) + "fence.proxy.async;"
    _, found = run(f"{ones} {REDUCE} {COMMIT} {REDUCE} {REDUCE} {COMMIT} cp.async.bulk.wait_group 0;", data)
    assert (found.view(np.uint32)[32:48] == 3).all() and found.view(np.uint32).sum() == 48
    tile, _ = run(
        f"{ones} {REDUCE} {COMMIT} cp.async.bulk.wait_group.read 0; ld.global.b32 %x, [%data + 128]; st.shared.b32 [%tile], %x;",
        data,
    )
    assert tile[:4].view(np.uint32) == 0


@pytest.mark.parametrize(
    "body, message",
    [
        (REDUCE.replace("[%data + 128]", "[%data + 136]"), "multiples of 16"),
        (REDUCE.replace("[%data + 128]", "[%data + 8160]"), "starts a copy that updates 16 bytes .* in no allocation"),
        (REDUCE.replace("[%data + 128]", "[%out]"), "of them that nothing wrote"),
        (
            "cp.reduce.async.bulk.tensor.2d.global.shared::cta.inc.bulk_group [%map, {0, 0}], [%tile];",
            "reduces a box with .inc, which there is not for a tensor of u8",
        ),
    ],
)
def test_faults_of_reductions(body, message):
    with pytest.raises(EmulatorFault, match=message):
        run(body, DATA, ("u8", (64, 64), (64,), (64, 8), (1, 1), {}))


# Tensors: every combination against loops over the elements


def expected_tile(tensor: np.ndarray, corner, box, steps, row: int, swizzle: int, fill: bytes) -> np.ndarray:
    """The tile after a copy. `tensor` has its innermost dimension last, the other arguments have it first."""
    tile = np.full(BYTES, 0xEE, np.uint8)
    counts = [box[0], *(-(-b // s) for b, s in zip(box[1:], steps[1:]))]
    place, pitch = 0, max(row, swizzle)
    for index in itertools.product(*(range(count) for count in reversed(counts))):
        at = [corner[axis] + i * (steps[axis] if axis else 1) for axis, i in enumerate(reversed(index))]
        inside = all(0 <= a < size for a, size in zip(at, reversed(tensor.shape)))
        value = tensor[tuple(reversed(at))].tobytes() if inside else fill
        for byte in value:
            chunk, low = divmod(place, 16)
            if swizzle:
                chunk ^= (place // 128) % (swizzle // 16)
            tile[16 * chunk + low] = byte
            place += 1
        if place % pitch == row:  # next row: skip to the next multiple of the pitch
            place += pitch - row
    return tile


CASES = [
    # element type, shape (innermost last), corner and box (innermost first), element strides, swizzle, fill
    ("u8", np.uint8, (300,), (16,), (64,), (1,), "none", "zero"),
    ("u8", np.uint8, (300,), (288,), (32,), (1,), "none", "zero"),
    ("f16", np.float16, (20, 40), (8, 3), (64, 9), (1, 1), "128b", "zero"),
    ("bf16", np.uint16, (20, 40), (-8, -2), (64, 16), (1, 1), "128b", "nan"),
    ("f32", np.float32, (20, 40), (28, 15), (16, 16), (1, 1), "64b", "nan"),
    ("s32", np.int32, (12, 12), (8, 1), (8, 7), (1, 1), "32b", "zero"),
    ("f16", np.float16, (20, 40), (8, 13), (16, 11), (1, 1), "128b", "nan"),
    ("u16", np.uint16, (5, 6, 24), (16, 2, 1), (24, 3, 4), (1, 1, 1), "64b", "zero"),
    ("f32", np.float32, (20, 40), (4, 15), (4, 16), (1, 2), "32b", "nan"),
    ("f32", np.float32, (30, 16), (0, 5), (16, 12), (1, 3), "none", "zero"),
    ("u16", np.uint16, (5, 6, 24), (16, 2, 1), (16, 3, 2), (1, 1, 1), "none", "zero"),
    ("u8", np.uint8, (3, 4, 5, 32), (0, 1, 1, 1), (32, 3, 2, 2), (1, 2, 1, 1), "32b", "zero"),
    ("f64", np.float64, (2, 3, 2, 3, 6), (2, 1, 0, 1, 0), (4, 2, 2, 2, 2), (1, 1, 1, 1, 1), "none", "nan"),
]
NANS = {"bf16": 0x7FFF, "f32": 0x7FFFFFFF, "f64": 0x7FF8000000000000, "f16": 0x7FF7}


def tensor_of(case):
    name, dtype, shape, corner, box, steps, swizzle, fill = case
    pitched = (*shape[:-1], -(-shape[-1] * np.dtype(dtype).itemsize // 16) * 16 // np.dtype(dtype).itemsize)
    data = np.random.default_rng(3).integers(1, 100, pitched).astype(dtype)
    tensor = data[..., : shape[-1]]
    strides = tuple(reversed(data.strides[:-1]))
    fields = (name, tuple(reversed(shape)), strides, box, steps, {"swizzle": swizzle, "fill": fill})
    return data, tensor, fields


def coordinates(corner) -> str:
    return "{" + ", ".join(str(c) for c in corner) + "}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{len(case[2])}d-{case[6]}-{case[7]}")
def test_tensor_into_shared_memory(case):
    name, dtype, shape, corner, box, steps, swizzle, fill = case
    data, tensor, fields = tensor_of(case)
    size = np.dtype(dtype).itemsize
    filling = NANS[name].to_bytes(size, "little") if fill == "nan" else bytes(size)
    want = expected_tile(
        tensor, corner, box, steps, box[0] * size, int(swizzle[:-1]) if swizzle != "none" else 0, filling
    )
    bytes_ = size * box[0] * int(np.prod([-(-b // s) for b, s in zip(box[1:], steps[1:])]))
    copy = f"cp.async.bulk.tensor.{len(shape)}d.shared::cta.global.tile.{COMPLETES} [%tile], [%map, {coordinates(corner)}], [%bar];"
    tile, _ = run(f"{expect(bytes_)} {copy} {WAIT}", data, fields)
    assert (tile == want).all()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{len(case[2])}d-{case[6]}-{case[7]}")
def test_tensor_out_of_shared_memory(case):
    """Load a box, move its origin by one row (for one dimension: by 16 bytes) and store it; nothing outside the tensor
    is written."""
    name, dtype, shape, corner, box, steps, swizzle, fill = case
    data, tensor, fields = tensor_of(case)
    size = np.dtype(dtype).itemsize
    bytes_ = size * box[0] * int(np.prod([-(-b // s) for b, s in zip(box[1:], steps[1:])]))
    there = (*corner[:-1], corner[-1] - (1 if len(shape) > 1 else 16 // size))
    body = f"""
        {expect(bytes_)}
        cp.async.bulk.tensor.{len(shape)}d.shared::cta.global.{COMPLETES} [%tile], [%map, {coordinates(corner)}], [%bar]; {WAIT}
        cp.async.bulk.tensor.{len(shape)}d.global.shared::cta.tile.bulk_group [%map, {coordinates(there)}], [%tile];
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    """
    want = data.copy()
    nan = np.frombuffer(NANS[name].to_bytes(size, "little"), dtype)[0] if fill == "nan" else dtype(0)
    counts = [box[0], *(-(-b // s) for b, s in zip(box[1:], steps[1:]))]
    for index in itertools.product(*(range(count) for count in reversed(counts))):
        offset = [i * (steps[axis] if axis else 1) for axis, i in enumerate(reversed(index))]
        at = tuple(reversed([c + o for c, o in zip(corner, offset)]))
        to = tuple(reversed([c + o for c, o in zip(there, offset)]))
        if all(0 <= t < s for t, s in zip(to, shape)):
            want[to] = tensor[at] if all(0 <= a < s for a, s in zip(at, shape)) else nan
    _, found = run(body, data, fields)
    assert found.tobytes() == want.tobytes()


# im2col: the pixels that a convolution reads for one element of its filter, derived from the convolution

CONVOLUTIONS = [
    # image W, H, D; filter, padding, stride and dilation in each; first output pixel, filter element
    ((9,), (3,), (1,), (1,), (1,), 0, (0,)),
    ((9,), (3,), (1,), (2,), (2,), 3, (2,)),
    ((7, 5), (3, 3), (1, 1), (1, 1), (1, 1), 0, (0, 0)),
    ((7, 5), (3, 3), (1, 1), (1, 1), (1, 1), 30, (2, 1)),
    ((8, 6), (3, 2), (1, 0), (2, 1), (1, 2), 5, (1, 1)),
    ((7, 5), (3, 4), (2, 1), (3, 2), (1, 1), 0, (0, 3)),
    ((5, 4, 3), (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), 17, (1, 2, 0)),
    ((6, 5, 4), (2, 1, 3), (0, 0, 1), (2, 1, 2), (1, 1, 1), 2, (1, 0, 2)),
]


@pytest.mark.parametrize("swizzle, channels", [("none", 8), ("64b", 16)])
@pytest.mark.parametrize("convolution", CONVOLUTIONS, ids=str)
def test_columns_of_pixels(convolution, swizzle, channels):
    size, reach, padding, stride, dilation, first, element = convolution
    images, all_channels, pixels, at_channel = 2, 24, 37, 8
    data = np.random.default_rng(4).integers(1, 60000, (images, *reversed(size), all_channels)).astype(np.uint16)
    lower = [-p for p in padding]
    upper = [p - (r - 1) * d for p, r, d in zip(padding, reach, dilation)]
    outputs = [
        (s + 2 * p - (r - 1) * d - 1) // step + 1 for s, p, r, d, step in zip(size, padding, reach, dilation, stride)
    ]
    want = np.full((BYTES // 2,), 0xEEEE, np.uint16)
    pitch = max(channels, {"none": 0, "64b": 32}[swizzle])
    for pixel in range(pixels):
        image, place = divmod(first + pixel, int(np.prod(outputs)))
        output = np.unravel_index(place, outputs, order="F")
        at = [o * step - p + e * d for o, step, p, e, d in zip(output, stride, padding, element, dilation)]
        inside = image < images and all(0 <= a < s for a, s in zip(at, size))
        for i in range(channels):
            byte = 2 * (pixel * pitch + i)
            byte ^= (byte >> 7 & 3) << 4 if swizzle == "64b" else 0
            want[byte // 2] = data[(image, *reversed(at), at_channel + i)] if inside else 0
    image, place = divmod(first, int(np.prod(outputs)))
    start = [int(o) * step - p for o, step, p in zip(np.unravel_index(place, outputs, order="F"), stride, padding)]
    strides = tuple(reversed(data.strides[:-1]))
    dims = tuple(reversed(data.shape))

    def map(address):
        return encode_im2col(
            "u16", address, dims, strides, lower, upper, channels, pixels, (1, *stride, 1), swizzle=swizzle
        )

    corner, moves = coordinates((at_channel, *start, image)), coordinates([e * d for e, d in zip(element, dilation)])
    copy = f"cp.async.bulk.tensor.{len(dims)}d.shared::cta.global.im2col.{COMPLETES} [%tile], [%map, {corner}], [%bar], {moves};"
    prefetch = f"cp.async.bulk.prefetch.tensor.{len(dims)}d.L2.global.im2col [%map, {corner}], {moves};"
    tile, _ = run(f"{prefetch} {expect(2 * pixels * channels)} {copy} {WAIT}", data, map)
    assert (tile.view(np.uint16) == want).all()


def test_the_mode_of_a_map_is_that_of_the_instruction():
    load = f"cp.async.bulk.tensor.3d.shared::cta.global.im2col.{COMPLETES} [%tile], [%map, {{0, 0, 0}}], [%bar], {{0}};"
    with pytest.raises(EmulatorFault, match="copies by .im2col with a tensor map for .tile"):
        run(load, DATA, ("u8", (16, 16, 16), (16, 256), (16, 2, 2), (1, 1, 1), {}))
    with pytest.raises(EmulatorFault, match="copies by .tile with a tensor map for .im2col"):
        run(
            load.replace("im2col.", "").replace(", {0};", ";"),
            DATA,
            lambda at: encode_im2col("u8", at, (16, 16, 16), (16, 256), (0,), (0,), 16, 4),
        )


@pytest.mark.parametrize("corner, message", [((0, 8, 0, 0), "W = 8, outside of -1 to 7"), ((0, -2, 0, 0), "W = -2"), ((0, 0, 5, 0), "H = 5, outside of 0 to 4"), ((4, 0, 0, 0), "byte 8 of a row")])  # fmt: skip
def test_columns_begin_inside_of_their_part_of_the_image(corner, message):
    def map(address):
        return encode_im2col("u16", address, (32, 8, 6, 2), (64, 512, 3072), (-1, 0), (0, -1), 16, 8)

    load = f"cp.async.bulk.tensor.4d.shared::cta.global.im2col.{COMPLETES} [%tile], [%map, {coordinates(corner)}], [%bar], {{0, 0}};"
    with pytest.raises(EmulatorFault, match=message):
        run(load, DATA, map)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"dims": (32, 8), "strides": (64,), "lower": (), "upper": ()}, "3 to 5"),
        ({"upper": (0,)}, "corners"),
        ({"lower": (-129, 0)}, "corners"),
        ({"channels": 257}, "channels"),
        ({"pixels": 1025}, "pixels"),
        ({"channels": 64}, "swizzle 64b spans 64"),
        ({"element_strides": (1, 1, 1)}, "element strides"),
    ],
)
def test_maps_of_columns_that_are_refused(change, message):
    good = dict(
        dtype="u16",
        address=4096,
        dims=(32, 8, 6, 2),
        strides=(64, 512, 3072),
        lower=(-1, -1),
        upper=(-1, -1),
        channels=32,
        pixels=64,
        swizzle="64b",
    )
    assert len(encode_im2col(**good)) == 128
    with pytest.raises(ArgumentError, match=message):
        encode_im2col(**good | change)


@pytest.mark.parametrize(
    "body, message",
    [
        (LOAD.replace("[%tile]", "[%tile + 8]"), "multiples of 16"),
        (LOAD.replace("[%data]", "[%data + 4]"), "multiples of 16"),
        (LOAD.replace("64, [%bar]", "40, [%bar]"), "multiples of 16"),
        (LOAD.replace("[%data]", "[%data + 8160]"), "lie in no allocation"),
        (LOAD.replace("[%tile]", "[%tile + 8192]"), "of shared memory"),
        (LOAD.replace("64, [%bar]", "64, [%bar + 8]"), "mbarrier|of shared memory"),
        (STORE.replace("[%data + 128]", "[%data + 8160]"), "lie in no allocation"),
        (
            f"cp.async.bulk.tensor.2d.shared::cta.global.tile.{COMPLETES} [%tile + 64], [%map, {{0, 0}}], [%bar];",
            "no multiple of 128",
        ),
        (
            f"cp.async.bulk.tensor.2d.shared::cta.global.tile.{COMPLETES} [%tile], [%map, {{8, 0}}], [%bar];",
            "byte 8 of a row",
        ),
        (
            f"cp.async.bulk.tensor.1d.shared::cta.global.tile.{COMPLETES} [%tile], [%map, {{0}}], [%bar];",
            "1 dimensions with a tensor map of 2",
        ),
        (
            f"cp.async.bulk.tensor.2d.shared::cta.global.tile.{COMPLETES} [%tile], [%data, {{0, 0}}], [%bar];",
            "no tensor map",
        ),
    ],
)
def test_faults(body, message):
    with pytest.raises(EmulatorFault, match=message):
        run(body, DATA, ("u8", (64, 64), (64,), (64, 8), (1, 1), {}))


GOOD = dict(dtype="f16", address=4096, dims=(64, 8), strides=(128,), box=(64, 8), swizzle="128b")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"dtype": "f8"}, "dtype"),
        ({"address": 4104}, "address"),
        ({"dims": (64,), "box": (64,)}, "strides"),
        ({"dims": (), "box": ()}, "dimensions"),
        ({"strides": (100,)}, "strides"),
        ({"box": (64, 257)}, "box"),
        ({"box": (12, 8), "swizzle": "none"}, "multiple of 16"),
        ({"box": (72, 8)}, "swizzle 128b spans 128"),
        ({"element_strides": (1, 9)}, "element strides"),
        ({"dtype": "u16", "fill": "nan"}, "NaN"),
        ({"interleave": "16b"}, "interleave"),
        ({"swizzle": "256b"}, "swizzle"),
    ],
)
def test_maps_that_are_refused(change, message):
    assert len(encode_tiled(**GOOD)) == 128
    with pytest.raises(ArgumentError, match=message):
        encode_tiled(**GOOD | change)


@pytest.mark.parametrize(
    "opcode",
    [
        "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes.multicast::cluster",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.s64",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f16",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.f32",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.min.f32",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group",
        "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.and.b64",
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.exch.bulk_group",
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.im2col_no_offs.bulk_group",
        "cp.async.bulk.tensor.6d.shared::cta.global.tile.mbarrier::complete_tx::bytes",
        "cp.async.bulk.tensor.2d.shared::cta.global.im2col.mbarrier::complete_tx::bytes",
        "cp.async.bulk.tensor.3d.shared::cta.global.tile.im2col.mbarrier::complete_tx::bytes",
        "cp.async.bulk.tensor.3d.shared::cta.global.im2col::w.mbarrier::complete_tx::bytes",
        "cp.async.bulk.tensor.3d.global.shared::cta.im2col_no_offs.bulk_group",
        "cp.async.bulk.wait_group.write",
    ],
)
def test_other_forms_are_refused(opcode):
    with pytest.raises(Unsupported, match="is not implemented"):
        resolve(opcode)
