"""Clusters of one block (PTX ISA 9.7.13.4, 9.7.9.23, 9.7.9.24)."""

import numpy as np
import pytest

from ptxrt.emulator import Emulator
from ptxrt.emulator.instruction import Unsupported, resolve
from ptxrt.errors import EmulatorFault

NUMBERS = {"t": ("b32", np.arange(96, dtype=np.uint32)), "p": ("pred", np.zeros(96))}
EXCHANGE = """
    .shared .align 4 .b8 box[1024];
    .reg .b32 %at, %place;
    mov.u32 %at, box; mad.lo.u32 %place, %t, 4, %at; {late}
    st.shared::cluster.b32 [%place], %t;
    {barrier}
    add.u32 %place, %t, 32; rem.u32 %place, %place, 96; mad.lo.u32 %place, %place, 4, %at;
    mapa.shared::cluster.u32 %place, %place, 0;
    ld.shared::cluster.b32 %d, [%place];
"""
# The last warp counts first, so that the others wait.
LATE = ".reg .b32 %n; mov.u32 %n, 0; setp.lt.u32 %p, %t, 64; @%p bra go; count: add.u32 %n, %n, 1; setp.lt.u32 %p, %n, 20; @%p bra count; go:"


@pytest.mark.parametrize("schedule", ["together", "warps"])
@pytest.mark.parametrize("late", ["", LATE])
@pytest.mark.parametrize(
    "barrier",
    [
        "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;",
        "barrier.cluster.arrive; barrier.cluster.wait;",
    ],
)
def test_barrier(execute, barrier, late, schedule):
    """Twice, to test that the barrier can be reused."""
    body = EXCHANGE.format(late=late, barrier=barrier * 2)
    assert (execute(body, NUMBERS, {"d": "b32"}, block=96, schedule=schedule)["d"] == (np.arange(96) + 32) % 96).all()


STORE, LOAD = "st.shared.b32 [%place], %t;", "ld.shared.b32 %d, [%other];"


@pytest.mark.parametrize("schedule", ["together", "warps"])
@pytest.mark.parametrize(
    "before, between, after, races",
    [
        (STORE, "", LOAD, False),
        ("", STORE, LOAD, True),
        (STORE, LOAD, "", True),
        ("", "", STORE + LOAD, True),
    ],
)
def test_what_an_arrival_orders(execute, before, between, after, races, schedule):
    """Accesses between the arrival and the wait are not ordered with those of other threads there."""
    body = f"""
        .shared .align 4 .b8 box[1024]; .reg .b32 %at, %place, %other;
        mov.u32 %at, box; mad.lo.u32 %place, %t, 4, %at; xor.b32 %other, %t, 32; mad.lo.u32 %other, %other, 4, %at;
        mov.u32 %d, 0; {LATE.replace("64", "32")}
        {before} barrier.cluster.arrive; {between} barrier.cluster.wait; {after}
    """
    numbers = {"t": ("b32", np.arange(64, dtype=np.uint32)), "p": ("pred", np.zeros(64))}
    run = lambda: execute(body, numbers, {"d": "b32"}, block=64, races=True, checks=False, schedule=schedule)
    if not races:
        assert (run()["d"] == np.arange(64) ^ 32).all()
        return
    with pytest.raises(EmulatorFault, match="a race"):
        run()


def test_registers_and_ranks(execute):
    body = """
        .shared .align 4 .b8 box[4]; .reg .b32 %a, %b; .reg .b64 %w; .reg .pred %e;
        mov.u32 %a, box; mapa.shared::cluster.u32 %b, %a, 0; sub.u32 %d, %a, %b;
        cvt.u64.u32 %w, %a; cvta.shared::cluster.u64 %w, %w; mapa.u64 %w, %w, 0;
        getctarank.u64 %a, %w; add.u32 %d, %d, %a; getctarank.shared::cluster.u32 %a, %b; add.u32 %d, %d, %a;
        mov.u32 %a, %cluster_ctarank; add.u32 %d, %d, %a; mov.u32 %a, %cluster_nctarank; add.u32 %d, %d, %a;
        mov.u32 %a, %cluster_nctaid.x; add.u32 %d, %d, %a; mov.u32 %a, %cluster_ctaid.x; add.u32 %d, %d, %a;
        mov.u32 %a, %nclusterid.x; add.u32 %d, %d, %a; mov.u32 %a, %clusterid.x; mul.lo.u32 %a, %a, 100; add.u32 %d, %d, %a;
        isspacep.shared::cluster %e, %w; selp.u32 %a, 1000, 0, %e; add.u32 %d, %d, %a;
    """
    found = execute(body, {"t": ("b32", np.zeros(64))}, {"d": "b32"}, block=32)["d"]
    assert (found == 1000 + 1 + 1 + 2 + 100 * (np.arange(64) // 32)).all()


@pytest.mark.parametrize(
    "body, message",
    [
        ("barrier.cluster.wait;", "without arriving"),
        ("barrier.cluster.arrive; barrier.cluster.arrive;", "twice"),
        ("setp.lt.u32 %p, %t, 32; @%p barrier.cluster.arrive; @%p barrier.cluster.wait; bar.sync 0;", "deadlock"),
        ("mapa.shared::cluster.u32 %d, %t, 1;", "has one"),
    ],
)
def test_faults(execute, body, message):
    with pytest.raises(EmulatorFault, match=message):
        execute(body + "mov.u32 %d, 1;", NUMBERS, {"d": "b32"}, block=96)


def test_larger_clusters_are_refused():
    text = ".version 9.0\n.target sm_120a\n.address_size 64\n.visible .entry k() .reqnctapercluster 2 { ret; }"
    emulator = Emulator()
    with pytest.raises(EmulatorFault, match="clusters of 2"):
        emulator.launch(emulator.load_text(text).entries["k"], 2, 32)


@pytest.mark.parametrize("opcode", ["barrier.cluster.sync", "mapa.shared.u32", "getctarank.b32"])
def test_other_forms_are_refused(opcode):
    with pytest.raises(Unsupported, match="is not implemented"):
        resolve(opcode)
