"""Bulk and tensor copies alone (PTX ISA 9.7.9.25.4, 9.7.9.25.5): what is copied where, and when it lands."""

import itertools
import struct

import numpy as np
import pytest

from ptxrt.emulator import Emulator
from ptxrt.emulator.instruction import Unsupported, resolve
from ptxrt.emulator.tensor_map import encode_tiled
from ptxrt.errors import ArgumentError, EmulatorFault

BYTES = 4096
COMPLETES = "mbarrier::complete_tx::bytes"
HEADER = ".version 9.0\n.target sm_120a\n.address_size 64\n"


def kernel(body: str) -> str:
    """An entry `k(data, out, map)` of one warp: {body} is for lane 0; then all lanes store `tile` (4096 bytes) to out."""
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
    """(the tile at the end, the data at the end); `tensor` gives the arguments of encode_tiled without the address."""
    emulator = Emulator(**options)
    module = emulator.load_text(kernel(body), "bulk.ptx")
    source, out = emulator.alloc(data.nbytes), emulator.alloc(BYTES)
    emulator.write(source, data)
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
    copies = "".join(f"cp.async.bulk.shared::cta.global.{COMPLETES} [%tile + {512 * i}], [%data + {1024 * i}], 256, [%bar];" for i in range(4))
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
    [("cp.async.bulk.wait_group.read 0;", 0xEE), ("cp.async.bulk.wait_group 0;", 0xEE), ("cp.async.bulk.wait_group.read 1;", 1), ("", 1)],
)
def test_the_source_is_read_at_the_wait(wait, seen):
    _, data = run(f"{STORE} {COMMIT} {wait} st.shared.b8 [%tile], 1;", DATA)
    assert data[128] == seen


@pytest.mark.parametrize("wait, seen", [("cp.async.bulk.wait_group.read 0;", False), ("cp.async.bulk.wait_group 0;", True)])
def test_the_destination_is_written_at_the_wait(wait, seen):
    tile, _ = run(f"{STORE} {COMMIT} {wait} ld.global.b32 %x, [%data + 128]; st.shared.b32 [%tile + 512], %x;", DATA, checks=False)
    assert (tile[512:516] == (0xEE if seen else DATA[128:132])).all()


def test_prefetches_have_no_effect():
    tile, _ = run("cp.async.bulk.prefetch.L2.global [%data], 64; prefetch.tensormap [%map]; cp.async.bulk.prefetch.tensor.1d.L2.global.tile [%map, {%t}];", DATA)
    assert (tile == 0xEE).all()


# Tensors: every combination against loops over the elements


def expected_tile(tensor: np.ndarray, corner, box, steps, row: int, swizzle: int, fill: bytes) -> np.ndarray:
    """The tile after a copy; `tensor` has its innermost dimension last, the other arguments have it first."""
    tile = np.full(BYTES, 0xEE, np.uint8)
    counts = [box[0], *(-(-b // s) for b, s in zip(box[1:], steps[1:]))]
    place = 0
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
    return tile


CASES = [
    # element type, shape (innermost last), corner and box (innermost first), element strides, swizzle, fill
    ("u8", np.uint8, (300,), (17,), (64,), (1,), "none", "zero"),
    ("u8", np.uint8, (300,), (290,), (32,), (1,), "none", "zero"),
    ("f16", np.float16, (20, 40), (8, 3), (64, 9), (1, 1), "128b", "zero"),
    ("bf16", np.uint16, (20, 40), (-3, -2), (64, 16), (1, 1), "128b", "nan"),
    ("f32", np.float32, (20, 40), (25, 15), (16, 16), (1, 1), "64b", "nan"),
    ("s32", np.int32, (12, 12), (2, 1), (8, 7), (1, 1), "32b", "zero"),
    ("f32", np.float32, (30, 16), (0, 5), (16, 12), (1, 3), "none", "zero"),
    ("u16", np.uint16, (5, 6, 24), (3, 2, 1), (16, 3, 2), (1, 1, 1), "none", "zero"),
    ("u8", np.uint8, (3, 4, 5, 32), (0, 1, 1, 1), (32, 3, 2, 2), (1, 2, 1, 1), "32b", "zero"),
    ("f64", np.float64, (2, 3, 2, 3, 6), (2, 1, 0, 1, 0), (4, 2, 2, 2, 2), (1, 1, 1, 1, 1), "none", "nan"),
]
NANS = {"bf16": 0x7FFF, "f32": 0x7FFFFFFF, "f64": 0x7FF8000000000000}


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
    want = expected_tile(tensor, corner, box, steps, box[0] * size, int(swizzle[:-1]) if swizzle != "none" else 0, filling)
    bytes_ = size * box[0] * int(np.prod([-(-b // s) for b, s in zip(box[1:], steps[1:])]))
    copy = f"cp.async.bulk.tensor.{len(shape)}d.shared::cta.global.tile.{COMPLETES} [%tile], [%map, {coordinates(corner)}], [%bar];"
    tile, _ = run(f"{expect(bytes_)} {copy} {WAIT}", data, fields)
    assert (tile == want).all()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{len(case[2])}d-{case[6]}-{case[7]}")
def test_tensor_out_of_shared_memory(case):
    """A box is loaded, its origin moved by one row, and stored: what lies outside is not written."""
    name, dtype, shape, corner, box, steps, swizzle, fill = case
    data, tensor, fields = tensor_of(case)
    size = np.dtype(dtype).itemsize
    bytes_ = size * box[0] * int(np.prod([-(-b // s) for b, s in zip(box[1:], steps[1:])]))
    there = (*corner[:-1], corner[-1] - 1)
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
        (f"cp.async.bulk.tensor.2d.shared::cta.global.tile.{COMPLETES} [%tile + 64], [%map, {{0, 0}}], [%bar];", "no multiple of 128"),
        (f"cp.async.bulk.tensor.1d.shared::cta.global.tile.{COMPLETES} [%tile], [%map, {{0}}], [%bar];", "1 dimensions with a tensor map of 2"),
        (f"cp.async.bulk.tensor.2d.shared::cta.global.tile.{COMPLETES} [%tile], [%data, {{0, 0}}], [%bar];", "no tensor map"),
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
        ({"dims": (64,)}, "strides"),
        ({"dims": ()}, "dimensions"),
        ({"strides": (100,)}, "strides"),
        ({"box": (64, 257)}, "box"),
        ({"box": (12, 8), "swizzle": "none"}, "multiple of 16"),
        ({"box": (32, 8)}, "swizzle 128b expects 128"),
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
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster",
        "cp.async.bulk.tensor.6d.shared::cta.global.tile.mbarrier::complete_tx::bytes",
        "cp.async.bulk.tensor.3d.shared::cta.global.im2col.mbarrier::complete_tx::bytes",
        "cp.async.bulk.wait_group.write",
    ],
)
def test_other_forms_are_refused(opcode):
    with pytest.raises(Unsupported, match="is not implemented"):
        resolve(opcode)
