"""Emulators in several threads and processes: finalizers during launches, shared translations, forks."""

import gc
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
from programs import program

import ptxrt
from ptxrt.emulator.translate import Translator

PROGRAM = program("ld.global.u32 %r1, [%rd0]; add.u32 %r1, %r1, %r0; st.global.u32 [%rd0], %r1;")


def launch(backend, times):
    emulator = backend.emulator
    with backend._turn:
        module = emulator.load_text(PROGRAM, "t.ptx")
    for _ in range(times):
        x = ptxrt.to_device(np.zeros(32, np.uint64))
        with backend._turn:
            emulator.launch(module.entries["k"], 1, 32, 0, np.uint64(x.address).tobytes())
        assert (x.to_numpy() == np.arange(32)).all()


def test_a_finalizer_inside_a_translation_that_two_emulators_share(monkeypatch):
    """One thread translates, and its garbage collection frees arrays of the other emulator, which waits for the
    translation."""
    first, second = (ptxrt.using("emulator", budget=10_000 + i).backend for i in range(2))
    ptxrt.using("emulator")
    with ptxrt.using("emulator", budget=10_001):
        arrays = [ptxrt.to_device(np.zeros(32, np.uint32)) for _ in range(3)]
    inside, waiting = threading.Event(), threading.Event()
    compile_block = Translator.compile

    def slow(translator, index, block):
        if threading.current_thread().name == "translates":
            inside.set()
            waiting.wait(10)
            time.sleep(0.2)  # by now the other thread waits for the translation and holds its emulator
            arrays.clear()
            gc.collect()
        compile_block(translator, index, block)

    monkeypatch.setattr(Translator, "compile", slow)
    done = []

    def run(backend):
        with ptxrt.using("emulator", budget=backend.emulator.budget):
            if threading.current_thread().name != "translates":
                inside.wait(10)
                waiting.set()
            launch(backend, 1)
        done.append(backend)

    threads = [
        threading.Thread(target=run, args=(each,), name=name, daemon=True)
        for each, name in ((first, "translates"), (second, "waits"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(done) == 2, "the two emulators wait for each other"
    before = second.memory_info().used
    assert before == sum(second._sizes.values()) and not second._turn.left


def test_a_collection_inside_a_launch_changes_nothing_of_it(monkeypatch):
    """Arrays that are freed while a kernel looks up the allocation of an address remain until the launch ends."""
    from ptxrt.emulator.memory import Access, GlobalMemory

    with ptxrt.using("emulator", budget=12_345) as backend:
        victims = [ptxrt.to_device(np.zeros(8, np.uint32)) for _ in range(50)]
        find = GlobalMemory.find

        def collecting(memory, address):
            if (
                victims
                and memory is backend.emulator.memory
                and sys._getframe(1).f_code is Access._locate_global.__code__
            ):
                bases = len(memory.bases)
                victims.clear()
                gc.collect()
                assert len(memory.bases) == bases
            return find(memory, address)

        monkeypatch.setattr(GlobalMemory, "find", collecting)
        used = backend.memory_info().used
        launch(backend, 2)
        assert not victims and backend.memory_info().used < used


def test_freed_memory_is_gone_at_the_next_launch():
    with ptxrt.using("emulator", budget=12_346) as backend:
        x = ptxrt.to_device(np.zeros(32, np.uint64))
        address = x.address
        del x
        module = backend.emulator.load_text(PROGRAM, "t.ptx")
        with backend._turn, pytest.raises(ptxrt.EmulatorFault, match="lie in no allocation"):
            backend.emulator.launch(module.entries["k"], 1, 32, 0, np.uint64(address).tobytes())


def test_many_threads_with_arrays_that_end_anywhere():
    failures = []

    def run(number):
        try:
            with ptxrt.using("emulator", budget=20_000 + number % 2) as backend:
                launch(backend, 60)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        gc.collect()
    for thread in threads:
        thread.join()
    assert not failures


FORK = """
    import os, sys, threading, time
    import numpy as np
    import ptxrt
    sys.path.insert(0, {folder!r})
    from programs import program

    backend = ptxrt.using("emulator").backend
    x = ptxrt.to_device(np.zeros(4, np.float32))
    module = backend.emulator.load_text(program("mov.u32 %r1, 0; L: add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 400000; @%p1 bra L;"))

    def work():
        with ptxrt.using("emulator"), backend._turn:
            backend.emulator.launch(module.entries["k"], 1, 32, 0, bytes(8))

    thread = threading.Thread(target=work)
    if {busy}:
        thread.start()
        time.sleep(0.3)
    child = os.fork()
    if child == 0:
        try:
            x.to_numpy()
            code = 2
        except ptxrt.MachineError as error:
            print(error, flush=True)
            code = 3
        del x
        with ptxrt.using("emulator", checks=False):
            ptxrt.to_device(np.zeros(4, np.float32)).to_numpy()
        os._exit(code)
    thread.join() if {busy} else None
    _, status = os.waitpid(child, 0)
    sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="this system has no fork")
@pytest.mark.parametrize("busy, code", [(True, 3), (False, 2)])
def test_a_forked_process(busy, code):
    """If another thread was using the emulator, the child cannot use it but can create a new one; an idle one keeps
    working."""
    source = textwrap.dedent(FORK.format(folder=__file__.rsplit("/", 1)[0], busy=busy))
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done
    assert ("this process was forked from one that used the machine" in done.stdout) == busy
