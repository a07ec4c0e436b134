"""Fixtures shared by all tests, above all the machines."""

import gc
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

import ptxrt
from ptxrt import backend as backends
from ptxrt import dlpack, selection
from ptxrt.disassembly import find_disassembler
from ptxrt.emulator import check

# JAX reserves three quarters of a device's memory in every process unless this is set before JAX starts.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# How long an example takes depends on what else the machine does.
settings.register_profile("any_machine", deadline=None)
settings.load_profile("any_machine")

# Parsed texts are millions of long-lived objects. Collecting at the default thresholds takes a tenth of the run time.
gc.set_threshold(100_000, 50, 1000)


def pytest_sessionfinish():
    """Write the counts of `make coverage` here: pytest-xdist kills a worker ten seconds after its last test."""
    if collector := check.collector():
        collector.write()
    gc.freeze()  # else the interpreter collects millions of objects before it ends


def on(name: str):
    """Choose a machine for the length of a test; skip the test, with the reason, where the machine is missing."""
    there = ptxrt.machines()[name]
    if not there.available:
        pytest.skip(str(there))
    return ptxrt.using(name)


@pytest.fixture(scope="session")
def disassembler():
    """The folder of CUDA's disassembler; without one, tests that read machine code are skipped."""
    try:
        return find_disassembler()
    except ptxrt.BuildError as missing:
        pytest.skip(str(missing))


@pytest.fixture
def lent():
    """A function that counts the DLPack structs that this test has exported and that are still alive. Those of earlier
    tests do not count: the fixture collects garbage and sweeps unconsumed capsules first."""
    gc.collect()
    dlpack._sweep()
    before = dict(dlpack._given)
    return lambda: sum(before.get(block) is not entry for block, entry in dlpack._given.items())


@pytest.fixture(scope="session")
def on_machine():
    """`on`, for fixtures that choose a machine themselves."""
    return on


@pytest.fixture(
    params=["emulator", pytest.param("portable", marks=pytest.mark.gpu), pytest.param("native", marks=pytest.mark.gpu)]
)
def machine(request):
    """Run a test on every machine: always on the emulator, and on the GPU machines where there is a device for them."""
    with on(request.param) as backend:
        yield backend


TEXTS_AND_GPUS = [
    "native",
    "portable",
    *(pytest.param(f"{x} gpu", marks=pytest.mark.gpu) for x in ("portable", "native")),
]


@pytest.fixture(params=TEXTS_AND_GPUS)
def text_machine(request):
    """Run a test on the emulator with each PTX text, and on the GPU's machines where there are any."""
    name, _, gpu = request.param.partition(" ")
    with on(name) if gpu else ptxrt.using("emulator", ptx=name) as backend:
        yield backend


@pytest.fixture(params=["portable", "native"])
def gpu(request):
    """Run a test that is too large for the emulator on every GPU machine that is available."""
    with on(request.param) as backend:
        yield backend
        ptxrt.synchronize(backend.own_queue)


def resident() -> int:
    """Resident memory of this process in bytes; 0 where the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


@pytest.fixture(scope="module", autouse=True)
def quick_collections():
    """Freeze all objects before a test module, so that collections scan only objects of its own tests. Scanning every
    text parsed so far takes many seconds.

    Objects stay frozen until the process is large: thawing them would make the next module scan them all again. Only the
    young ones are scanned before: after a module of many kernels, a full collection takes a quarter of a minute.
    """
    gc.collect(1)
    gc.freeze()


def memory() -> float:
    """Bytes of memory of this machine, or of the container; 0 where the system does not report it."""
    try:
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 0
    try:
        return min(there, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no such file, or no limit
        return there


#: Bytes of a process that are never too many: its share of 0.7 of the memory, between 2e9 and 9e9.
LEAST = min(max(2e9, 0.7 * memory() / int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))), 9e9)


@pytest.fixture(scope="session")
def allowance():
    """How large the process may become, in bytes: [number]."""
    return [LEAST]


@pytest.fixture(autouse=True)
def bounded_memory(allowance):
    """Drop the emulators and their translated kernels when the process is large; tests that need them rebuild them.

    Finished launches are collected first: they are younger than most objects, and may be enough.
    """
    if resident() < allowance[0] or check.collector():
        return
    gc.collect(1)
    if resident() < allowance[0]:
        return
    kept = [backend for backend in selection._kept if not backend.is_cuda]
    # Translations go at once, without a search for cycles among tens of millions of objects.
    for module in [module for backend in kept for module in backend.emulator.modules]:
        module._codes.clear()
    for backend in kept:
        del selection._kept[backend]
    del kept
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    allowance[0] = max(LEAST, 1.3 * resident())


@pytest.fixture(autouse=True)
def scope_of_its_own():
    """Restore the machine after a test that calls `ptxrt.using` without leaving it."""
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
    """A random generator with the same seed in every run."""
    return np.random.default_rng(20240607)
