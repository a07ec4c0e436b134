"""Fixtures that all tests share: the machines."""

import gc
import os
from pathlib import Path

import numpy as np
import pytest

import ptxrt
from ptxrt import backend as backends
from ptxrt import dlpack, selection
from ptxrt.disassembly import find_disassembler
from ptxrt.emulator import check

# JAX takes three quarters of a device's memory in every process that uses it, unless it is told otherwise before it
# starts.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# Parsed texts are millions of objects that live on: to look for garbage among them as often as usual takes a tenth of
# the time.
gc.set_threshold(100_000, 50, 1000)


def pytest_sessionfinish():
    """Write what `make coverage` counts while there is time: a process of pytest-xdist is killed ten seconds after its
    last test."""
    if collector := check.collector():
        collector.write()


def on(name: str):
    """A machine for the length of a test, which is skipped with the reason where it is not there."""
    there = ptxrt.machines()[name]
    if not there.available:
        pytest.skip(str(there))
    return ptxrt.using(name)


@pytest.fixture(scope="session")
def disassembler():
    """The folder of CUDA's disassembler; tests that read machine code are skipped where there is none."""
    try:
        return find_disassembler()
    except ptxrt.BuildError as missing:
        pytest.skip(str(missing))


@pytest.fixture
def lent():
    """A function that counts the DLPack structs which this test has out. Those of earlier tests do not count: garbage is
    collected first, and what nobody took is swept."""
    gc.collect()
    dlpack._sweep()
    before = dict(dlpack._given)
    return lambda: sum(before.get(block) is not entry for block, entry in dlpack._given.items())


@pytest.fixture(scope="session")
def on_machine():
    """`on`, for fixtures that choose a machine by themselves."""
    return on


@pytest.fixture(
    params=["emulator", pytest.param("portable", marks=pytest.mark.gpu), pytest.param("native", marks=pytest.mark.gpu)]
)
def machine(request):
    """Run a test on every machine: the emulator always, the GPU ones where there is a device for them."""
    with on(request.param) as backend:
        yield backend


TEXTS_AND_GPUS = [
    "native",
    "portable",
    *(pytest.param(f"{x} gpu", marks=pytest.mark.gpu) for x in ("portable", "native")),
]


@pytest.fixture(params=TEXTS_AND_GPUS)
def text_machine(request):
    """Run a test on the emulator, once with each text, and on the machines of the GPU at hand."""
    name, _, gpu = request.param.partition(" ")
    with on(name) if gpu else ptxrt.using("emulator", ptx=name) as backend:
        yield backend


@pytest.fixture(params=["portable", "native"])
def gpu(request):
    """Run a test on every GPU machine that is there: what is too large for the emulator."""
    with on(request.param) as backend:
        yield backend
        ptxrt.synchronize(backend.own_queue)


def resident() -> int:
    """Bytes of memory that this process has; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


@pytest.fixture(scope="module", autouse=True)
def quick_collections():
    """Let collections in a test look at what the tests of its file made, not at every text parsed so far (many
    seconds).

    Nothing is thawed before the process is large, since the next file would begin by looking at all of it again.
    """
    gc.collect()
    gc.freeze()


LEAST = 2e9  # bytes of a process that are never too many


@pytest.fixture(scope="session")
def allowance():
    """How large the process may become, in bytes: [number]."""
    return [LEAST]


@pytest.fixture(autouse=True)
def bounded_memory(allowance):
    """Drop the emulators and what they translated where the process is large; tests that need them make them again."""
    if resident() < allowance[0] or check.collector():
        return
    for backend in [kept for kept in selection._kept if not kept.is_cuda]:
        del selection._kept[backend]
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    allowance[0] = max(LEAST, 2 * resident())


@pytest.fixture(autouse=True)
def scope_of_its_own():
    """What a test chooses with `ptxrt.using`, and never leaves, ends with it."""
    before = backends.scope()
    yield
    backends._scope.set(before)


@pytest.fixture
def emulator():
    """Run a test on the emulator alone."""
    with ptxrt.using("emulator") as backend:
        yield backend


@pytest.fixture
def rng():
    """Random numbers, the same in every run."""
    return np.random.default_rng(20240607)
