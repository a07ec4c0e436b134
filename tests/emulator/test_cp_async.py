"""cp.async in isolation (PTX ISA 9.7.9.25.3): what it copies, and that the data becomes visible at the wait, not
before."""

import numpy as np
import pytest

from ptxrt.emulator.instruction import Unsupported, resolve
from ptxrt.errors import EmulatorFault

# 32 threads copy from `source` (each its own 16 bytes of the input array w) to the shared array, initialized to 0xEE.
SETUP = """
    .shared .align 16 .b8 tile[2048];
    .reg .b32 %to, %zero;
    .reg .b64 %from;
    mov.u32 %to, tile;
    mad.lo.u32 %to, %thread, 16, %to;
    mov.u32 %zero, 0xEEEEEEEE;
    st.shared.v4.b32 [%to], {%zero, %zero, %zero, %zero};
    st.shared.v4.b32 [%to + 512], {%zero, %zero, %zero, %zero};
    ld.param.u64 %from, [param_w];
    mad.lo.u64 %from, %index, 16, %from;
"""
LOAD = "ld.shared.v4.b32 {%o0, %o1, %o2, %o3}, [%to];"
OLD = 0xEE


def run(execute, body, registers=None, **options):
    """Return (source bytes (32, 16), destination bytes (32, 16))."""
    source = np.random.default_rng(0).integers(0, 200, (32, 16), dtype=np.uint8)
    # The parameter w holds 16 bytes for each of 32 threads, passed as one word for each of 128; the register that
    # receives that word is unused.
    inputs = {"w": ("b32", source.reshape(-1).view(np.uint32))} | (registers or {})
    inputs |= {name: (type_, np.resize(values, 128)) for name, (type_, values) in (registers or {}).items()}
    found = execute(f"setp.ge.u32 %skip, %thread, 32; @%skip bra done; {SETUP} {body} {LOAD} done:",
                    inputs | {"skip": ("pred", np.zeros(128))}, {f"o{i}": "b32" for i in range(4)}, **options)  # fmt: skip
    return source, np.stack([found[f"o{i}"][:32] for i in range(4)], axis=1).view(np.uint8).reshape(32, 16)


COMMIT_AND_WAIT = "cp.async.commit_group; cp.async.wait_group 0;"


@pytest.mark.parametrize("cache, size", [("ca", 4), ("ca", 8), ("ca", 16), ("cg", 16)])
@pytest.mark.parametrize("space", ["shared", "shared::cta"])
def test_sizes(execute, cache, size, space):
    source, found = run(execute, f"cp.async.{cache}.{space}.global [%to], [%from], {size}; {COMMIT_AND_WAIT}")
    assert (found[:, :size] == source[:, :size]).all() and (found[:, size:] == OLD).all()


@pytest.mark.parametrize(
    "hints, operand",
    [
        (".L2::64B", ""),
        (".L2::128B", ""),
        (".L2::256B", ""),
        (".L2::cache_hint", ", %policy"),
        (".L2::cache_hint.L2::128B", ", 16, %policy"),
    ],
)
def test_hints_change_nothing(execute, hints, operand):
    policy = {"policy": ("b64", np.full(128, 0x12F0000000000000, np.uint64))}
    source, found = run(
        execute, f"cp.async.cg.shared.global{hints} [%to], [%from], 16{operand}; {COMMIT_AND_WAIT}", policy
    )
    assert (found == source).all()


@pytest.mark.parametrize("size", [4, 8, 16])
def test_source_size_zero_fills(execute, size):
    available = np.arange(128) % (size + 1)
    source, found = run(
        execute,
        f"cp.async.ca.shared.global [%to], [%from], {size}, %n; {COMMIT_AND_WAIT}",
        {"n": ("b32", available.astype(np.uint32))},
    )
    for thread in range(32):
        expected = [source[thread, byte] if byte < available[thread] else 0 for byte in range(size)] + [OLD] * (
            16 - size
        )
        assert found[thread].tolist() == expected


def test_nothing_is_read_where_the_source_size_is_zero(execute):
    """Then the address may be invalid, as in a masked tail."""
    body = f"@%far mov.u64 %from, 16; cp.async.cg.shared.global [%to], [%from], 16, %n; {COMMIT_AND_WAIT}"
    far = np.arange(128) % 2
    registers = {"far": ("pred", far), "n": ("b32", np.where(far, 0, 16).astype(np.uint32))}
    source, found = run(execute, body, registers)
    assert (found[0::2] == source[0::2]).all() and not found[1::2].any()


def test_ignored_source(execute):
    ignore = np.arange(128) % 3 == 0
    source, found = run(
        execute, f"cp.async.cg.shared.global [%to], [%from], 16, %p; {COMMIT_AND_WAIT}", {"p": ("pred", ignore)}
    )
    assert (found == np.where(ignore[:32, None], 0, source)).all()


# When copies become visible. Without checks a read before the wait sees the old bytes; with checks it is a fault.

TWO_GROUPS = """
    cp.async.cg.shared.global [%to + 512], [%from], 16;
    cp.async.commit_group;
    cp.async.cg.shared.global [%to], [%from], 16;
    cp.async.commit_group;
"""


@pytest.mark.parametrize(
    "before, landed",
    [
        ("cp.async.cg.shared.global [%to], [%from], 16; cp.async.commit_group;", False),
        ("cp.async.cg.shared.global [%to], [%from], 16; cp.async.wait_group 0;", False),  # never committed
        ("cp.async.cg.shared.global [%to], [%from], 16; cp.async.wait_all;", True),
        (f"{TWO_GROUPS} cp.async.wait_group 2;", False),
        (f"{TWO_GROUPS} cp.async.wait_group 1;", False),
        (f"{TWO_GROUPS} cp.async.wait_group 0;", True),
        (f"{TWO_GROUPS} cp.async.commit_group; cp.async.wait_group 1;", True),  # an empty group counts
        (f"{TWO_GROUPS} cp.async.wait_all;", True),
    ],
)
def test_copies_land_at_their_wait(execute, before, landed):
    source, found = run(execute, before, checks=False)
    assert (found == (source if landed else OLD)).all()
    if landed:
        assert (run(execute, before)[1] == source).all()
    else:
        with pytest.raises(EmulatorFault):
            run(execute, before)


def test_groups_are_of_one_thread(execute):
    """Only even threads wait."""
    body = "cp.async.cg.shared.global [%to], [%from], 16; cp.async.commit_group; @%even cp.async.wait_group 0;"
    even = np.arange(128) % 2 == 0
    source, found = run(execute, body, {"even": ("pred", even)}, checks=False)
    assert (found == np.where(even[:32, None], source, OLD)).all()


@pytest.mark.parametrize(
    "copy",
    [
        "cp.async.ca.shared.global [%to + 4], [%from], 8;",  # misaligned destination
        "cp.async.cg.shared.global [%to], [%from + 8], 16;",  # misaligned source
        "cp.async.cg.shared.global [%to], [%from + 1048576], 16;",  # no such memory
        "cp.async.cg.shared.global [%to + 4096], [%from], 16;",
        "cp.async.cg.shared.global [%to], [%from], 8;",  # .cg copies 16 bytes only
        "cp.async.ca.shared.global [%to], [%from], 12;",
        "cp.async.ca.shared.global [%to], [%from], 4, 8;",  # source size above the copy size
    ],
)
def test_faults(execute, copy):
    with pytest.raises(EmulatorFault):
        run(execute, f"{copy} {COMMIT_AND_WAIT}")


@pytest.mark.parametrize(
    "opcode",
    [
        "cp.async.cs.shared.global",
        "cp.async.ca.global.shared",
        "cp.async.ca.shared::cluster.global",
        "cp.async.commit_group.x",
    ],
)
def test_other_forms_are_refused(opcode):
    with pytest.raises(Unsupported, match="is not implemented"):
        resolve(opcode)
