"""What must not grow, hang or break: memory and its uses, modules, streams, machines, finalizers, threads, forks.

Most tests use the stand-in for the driver, whose streams run as late as possible.
"""

import gc
import os
import signal
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

import fake_cuda
import ptxrt
from ptxrt import array, dlpack, driver, ops, selection
from ptxrt.pool import Pool
from ptxrt.turns import Turn
from test_driver import RESULT, cuda, install  # noqa: F401
from test_runtime import either, numbers  # noqa: F401

transpose = ops.transpose.transpose_naive

TEXT = """.version 8.8
.target sm_80
.address_size 64
.visible .entry put(.param .u64 p)
{
    .reg .b64 %rd<2>;
    .reg .b32 %r<2>;
    ld.param.u64 %rd1, [p];
    mov.u32 %r1, 7;
    st.global.u32 [%rd1], %r1;
    ret;
}
"""


@pytest.fixture
def program(tmp_path):
    """A file with one entry, which stores 7."""
    path = tmp_path / "put.ptx"
    path.write_text(TEXT)
    return path


def put_seven(address):
    fake_cuda.view(int.from_bytes(address, "little"), (1,), np.int32)[:] = 7


def is_flat(turn, count=10_000, sample=lambda: len(gc.get_objects())):
    """Call turn(i) `count` times; whether `sample` grows by less than 200 during the second half."""
    for i in range(count // 2):
        turn(i)
    gc.collect()
    before = sample()
    for i in range(count // 2, count):
        turn(i)
    gc.collect()
    return sample() - before < 200


def device_goes_on(fake):
    """Run all pending operations of streams, and forget the recorded calls and the streams."""
    for stream in list(fake.streams):
        fake._run(stream)
    for known in (fake.calls, fake.streams, fake.homes):
        known.clear()


# Uses of memory


def test_readers_of_fixed_memory_are_bounded(either):
    """One stream per request over weights that are never written: neither uses nor streams accumulate."""
    weights, y = ptxrt.to_device(numbers(2, 3)), ptxrt.empty((3, 2), np.float32)
    fake = either._driver if either.is_cuda else None

    def request(_):
        transpose(weights, y=y, stream=ptxrt.Stream())
        if fake:
            device_goes_on(fake)

    assert is_flat(request, 10_000 if fake else 2_000)
    assert len(weights.memory.readers) <= array.USES + 1


@pytest.mark.parametrize("streams", [3, array.USES, array.USES + 1, 5 * array.USES])
def test_what_writes_waits_for_every_reader(cuda, streams):
    x, other = ptxrt.to_device(numbers(4, 5)), ptxrt.to_device(-numbers(5, 4))
    results = [transpose(x, stream=ptxrt.Stream()) for _ in range(streams)]
    transpose(other, y=x)
    assert (x.to_numpy() == -numbers(5, 4).T).all()
    for result in results:
        np.testing.assert_array_equal(result.to_numpy(), numbers(4, 5).T)


@pytest.mark.parametrize("streams", [1, array.USES + 1, 3 * array.USES])
def test_memory_that_many_streams_read_is_reused_after_all_of_them(cuda, streams):
    x = ptxrt.to_device(numbers(4, 5))
    results = [transpose(x, stream=ptxrt.Stream()) for _ in range(streams)]
    address = x.address
    del x
    again = ptxrt.to_device(np.zeros((4, 5), np.float32))
    assert again.address != address
    for result in results:
        np.testing.assert_array_equal(result.to_numpy(), numbers(4, 5).T)


def test_a_stream_that_reads_again_does_not_wait_again(cuda):
    x, y, stream = ptxrt.to_device(numbers(4, 5)), ptxrt.empty((5, 4), np.float32), ptxrt.Stream()
    transpose(x, y=y, stream=stream)
    cuda.calls.clear()
    transpose(x, y=y, stream=stream)
    assert "cuStreamWaitEvent" not in cuda.names()
    transpose(ptxrt.to_device(-numbers(5, 4)), y=x)
    cuda.calls.clear()
    transpose(x, y=y, stream=stream)
    assert "cuStreamWaitEvent" in cuda.names()
    np.testing.assert_array_equal(y.to_numpy(), -numbers(5, 4))


def test_a_use_noted_while_others_are_waited_for_breaks_nothing(cuda, monkeypatch):
    """Simulates another thread that notes a use while this one calls the driver during its waits."""
    x, other = ptxrt.to_device(numbers(4, 5)), ptxrt.to_device(-numbers(5, 4))
    results = [transpose(x, stream=ptxrt.Stream()) for _ in range(3)]
    original = driver.DriverBackend.wait

    def wait(self, stream, mark):
        original(self, stream, mark)
        queue = self.new_queue()
        x.memory.release(queue, queue, False)

    monkeypatch.setattr(driver.DriverBackend, "wait", wait)
    transpose(other, y=x)
    monkeypatch.undo()
    assert len(results) == 3


def test_many_threads_read_one_array(cuda):
    x, failures = ptxrt.to_device(numbers(8, 8)), []

    def work():
        try:
            with ptxrt.using("portable"):
                for _ in range(60):
                    y = transpose(x, stream=ptxrt.Stream())
                    np.testing.assert_array_equal(y.to_numpy(), numbers(8, 8).T)
        except BaseException as error:
            failures.append(error)

    run_threads([work] * 6)
    assert not failures


def run_threads(works):
    """Run each function in its own thread, with the shortest switch interval."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)


# Modules


def test_loaded_files_are_unloaded_with_their_last_user(cuda, program):
    cuda.programs["put"] = put_seven
    y = ptxrt.empty(1, np.int32)
    entry = ptxrt.load(program)["put"]
    assert len(cuda.modules) == 1
    entry(1, 1, y)
    del entry
    gc.collect()
    ptxrt.synchronize(ptxrt.Stream())
    assert len(cuda.modules) == 1, "the launch has not run yet"
    assert y.to_numpy() == 7
    ptxrt.synchronize()
    assert not cuda.modules


def test_graphs_keep_the_modules_of_their_launches(cuda, program):
    cuda.programs["put"] = put_seven
    y = ptxrt.to_device(np.zeros(1, np.int32))
    with ptxrt.graph() as g:
        ptxrt.load(program)["put"](1, 1, y)
    gc.collect()
    ptxrt.synchronize()
    g.launch()
    assert y.to_numpy() == 7 and len(cuda.modules) == 1
    del g
    gc.collect()
    ptxrt.synchronize()
    assert not cuda.modules and "cuGraphExecDestroy" in cuda.names()


@pytest.mark.parametrize(
    "function", ["cuModuleGetFunction", "cuModuleGetFunctionCount", "cuModuleEnumerateFunctions", "cuFuncGetName"]
)
def test_a_module_whose_load_fails_halfway_is_unloaded(cuda, program, monkeypatch, function):
    if function != "cuModuleGetFunction":
        monkeypatch.setattr(driver, "_parsed", lambda data, name: None)  # then only the driver lists the entries
    cuda.fail[function] = RESULT.CUDA_ERROR_NOT_FOUND
    with pytest.raises(ptxrt.DriverError, match=function):
        ptxrt.load(program)
    assert not cuda.modules and cuda.names()[-1] == "cuModuleUnload"


def test_a_raised_limit_of_shared_memory_goes_with_its_module(cuda, program):
    """The driver may reuse a function handle: the function of a new module needs its limit raised again."""
    y = ptxrt.empty(1, np.int32)
    cuda.programs["put"] = put_seven
    for _ in range(2):
        cuda.calls.clear()
        ptxrt.load(program)["put"](1, 1, y, shared_bytes=60_000)
        assert cuda.names().count("cuFuncSetAttribute") == 1


# Growth


def test_loads_do_not_pile_up(cuda, program):
    def load(_):
        assert "put" in ptxrt.load(program)
        cuda.calls.clear()

    assert is_flat(load)
    ptxrt.synchronize()
    assert len(cuda.modules) <= 1


def test_loads_do_not_pile_up_in_the_emulator(emulator, program):
    program.write_text(TEXT.replace(".visible", ".global .b8 space[512];\n.visible", 1))
    y = ptxrt.empty(1, np.int32)
    modules, allocations = len(emulator.emulator.modules), len(emulator.emulator.memory.allocations)

    def load(_):
        ptxrt.load(program)["put"](1, 1, y)

    assert is_flat(load, 2_000) and y.to_numpy() == 7
    assert (
        len(emulator.emulator.modules) - modules <= 1 and len(emulator.emulator.memory.allocations) - allocations <= 1
    )


def test_sets_of_options_do_not_pile_up():
    x = numbers(2, 3)

    def use(i):
        with ptxrt.using("emulator", budget=1_000_000 + i):
            if i % 100 == 0:
                ptxrt.to_device(x)[0].to_numpy()

    def sample():
        return sum(type(thing).__name__ == "Emulator" for thing in gc.get_objects())

    def turn(i):
        use(i)
        if i % 500 == 499:
            gc.collect()

    assert is_flat(turn, sample=sample)
    assert sample() < 4 * selection.EMULATORS


def test_the_same_options_give_the_same_machine_while_it_is_used():
    with ptxrt.using("emulator", budget=77) as first:
        x = ptxrt.to_device(numbers(2, 3))
    for i in range(3 * selection.EMULATORS):
        with ptxrt.using("emulator", budget=100 + i):
            pass
    with ptxrt.using("emulator", budget=77) as again:
        assert again is first is x.backend


def test_integer_handles_do_not_pile_up(cuda):
    x, y = ptxrt.to_device(numbers(2, 3)), ptxrt.empty((3, 2), np.float32)

    def launch(i):
        transpose(x, y=y, stream=5000 + i)
        device_goes_on(cuda)

    assert is_flat(launch)
    assert len(selection.current()._by_handle) <= driver.HANDLES


def test_shapes_do_not_pile_up(emulator):
    remembered = emulator.remembered
    limit = type(remembered).LIMIT
    for i in range(limit + 50):
        type(remembered).add(remembered.calls, ("test", i), i)
    assert (
        len(remembered.calls) == limit and ("test", 0) not in remembered.calls and ("test", limit) in remembered.calls
    )
    remembered.calls.clear()


# Finalizers


def test_a_turn_settles_what_was_left_and_never_within_itself():
    settled = []
    turn = Turn(settled.append)
    turn.leave(1)
    assert not settled
    with turn:
        assert settled == [1]
        turn.leave(2)
        with turn:
            turn.settle()
            assert settled == [1]
    turn.settle()
    assert settled == [1, 2]


def test_what_cannot_be_settled_yet_is_tried_once_a_turn():
    tries = []

    def settle(item):
        tries.append(item)
        turn.leave(item)

    turn = Turn(settle)
    turn.leave("late")
    for count in (1, 2, 3):
        with turn:
            assert len(tries) == count


def test_finalizers_wait_for_no_thread():
    """Finalizers of two machines run while each machine's turn is held by a thread: with locks they would deadlock."""
    turns = [Turn(lambda item: None), Turn(lambda item: None)]
    both, done = threading.Barrier(2, timeout=20), []

    def work(mine, other):
        with mine:
            both.wait()
            other.leave("freed")
            other.settle()
            both.wait()
        done.append(True)

    run_threads([lambda: work(*turns), lambda: work(*turns[::-1])])
    assert len(done) == 2


def test_finalizers_call_no_driver(cuda):
    stream, x = ptxrt.Stream(), ptxrt.to_device(numbers(2, 3))
    with ptxrt.graph() as g:
        transpose(x)
    cuda.calls.clear()
    del stream, g, x
    gc.collect()
    assert not cuda.calls


def test_without_a_pool_counts_hold_while_threads_free(install, monkeypatch):
    monkeypatch.setenv("PTXRT_POOL", "0")
    fake = install(fake_cuda.FakeCuda())
    with ptxrt.using("portable") as chosen:

        def work():
            for i in range(400):
                array.allocate(chosen, (1 + i % 7,), np.dtype(np.uint8))

        run_threads([work] * 4)
        gc.collect()
        assert ptxrt.memory_info().used == 0 and not fake.memory


def test_a_finalizer_within_the_pool_gives_back_later(cuda, monkeypatch):
    """Also without reuse, where a finalizer returns memory to the driver: not while its thread is allocating."""
    chosen = selection.current()
    pool = Pool(chosen, list, keep=False)
    held = [pool.alloc(100, chosen.own_queue)]
    take = chosen.take

    def take_and_collect(nbytes):
        pool.free(held.pop(), 100, None, (), False)
        assert "cuMemFree" not in cuda.names()
        return take(nbytes)

    monkeypatch.setattr(chosen, "take", take_and_collect)
    pool.alloc(100, chosen.own_queue)
    assert pool.count() == (100, 0) and "cuMemFree" in cuda.names()


# Threads


def test_a_launch_takes_its_packet_in_one_step(cuda):
    """Another thread may take the last spare packet just before this one does."""
    x, y = ptxrt.to_device(numbers(2, 3)), ptxrt.empty((3, 2), np.float32)
    for _ in range(3):
        transpose(x, y=y)
    (recording,) = (found for found, _ in selection.current().remembered.calls.values())
    known = recording.replay.__globals__
    ((name, take),) = ((name, item) for name, item in known.items() if getattr(item, "__name__", "") == "pop")
    other_thread = []

    def late():
        other_thread.extend(take.__self__)
        take.__self__.clear()
        return take()

    known[name] = late
    transpose(x, y=y)
    assert len(other_thread) == 1
    np.testing.assert_array_equal(y.to_numpy(), numbers(2, 3).T)


def test_a_stream_lives_while_memory_waits_for_it(cuda):
    """Garbage holds memory and the only reference to its stream: the memory is reused only after the stream's work."""

    class Cycle:
        pass

    for _ in range(3):
        cycle = Cycle()
        cycle.itself, cycle.stream = cycle, ptxrt.Stream()
        with cycle.stream:
            cycle.kept = transpose(ptxrt.to_device(numbers(3, 7)))
            cycle.read = transpose(cycle.kept, stream=ptxrt.Stream())
        del cycle
        gc.collect()
        assert (transpose(ptxrt.to_device(numbers(3, 7))).to_numpy() == numbers(3, 7).T).all()
    used = ptxrt.memory_info().used
    gc.collect()
    assert ptxrt.memory_info().used == used == 0
    ptxrt.trim_memory()
    ptxrt.synchronize()
    assert ptxrt.memory_info().cached == 0
    gc.collect()
    ptxrt.synchronize()
    assert cuda.destroyed


def test_an_event_lives_while_memory_waits_for_it(cuda):
    """The same for the event of a stream given as an integer: its handle is not recorded again before."""
    cycle = type("Cycle", (), {})()
    cycle.itself = cycle
    cycle.x = ptxrt.to_device(numbers(3, 7))
    cycle.y = transpose(cycle.x, stream=88)
    addresses = {cycle.x.address, cycle.y.address}
    del cycle
    gc.collect()
    mine = ptxrt.Stream()
    for _ in range(20):  # events of an idle stream
        ptxrt.Stream().wait(mine)
    assert ptxrt.empty((7, 3), np.float32).address not in addresses
    cuda._run(88)
    assert ptxrt.empty((7, 3), np.float32).address != 0


def test_lent_memory_is_given_back_after_its_uses_also_among_garbage(cuda):
    from test_dlpack import Foreign

    x, before = ptxrt.to_device(numbers(3, 7)), len(dlpack._given)
    cycle = type("Cycle", (), {})()
    cycle.itself, cycle.taken = cycle, ptxrt.to_device(Foreign(x))
    y = transpose(cycle.taken, stream=ptxrt.Stream())
    del cycle
    gc.collect()
    assert len(dlpack._given) == before + 1, "given back while a launch still reads it"
    np.testing.assert_array_equal(y.to_numpy(), numbers(3, 7).T)
    selection.current().finish()
    ptxrt.synchronize()
    assert len(dlpack._given) == before


def test_blocks_of_a_stream_that_is_gone_are_reused_after_its_end(cuda):
    stream = ptxrt.Stream()
    with stream:
        x = ptxrt.to_device(numbers(3, 7))
        y = transpose(x)
    address, handle = x.address, stream.handle
    del x, stream
    y.memory.writer = None  # otherwise the result would keep the stream alive
    gc.collect()
    other = ptxrt.empty((3, 7), np.float32)
    assert other.address != address and handle not in cuda.destroyed
    cuda._run(handle)
    assert ptxrt.empty((3, 7), np.float32).address == address
    gc.collect()
    ptxrt.synchronize()
    assert handle in cuda.destroyed


def test_nothing_that_was_left_ends_a_capture(cuda, program):
    """Streams, exported memory, graphs and modules that die just before or during a capture."""
    cuda.programs["put"] = put_seven
    y = ptxrt.empty(1, np.int32)

    def leave_all():
        with ptxrt.Stream():
            transpose(ptxrt.to_device(numbers(2, 3)))
        ptxrt.to_device(numbers(2, 3)).__dlpack__()
        entry = ptxrt.load(program)["put"]
        entry(1, 1, y)
        gc.collect()

    x = ptxrt.to_device(numbers(2, 3))
    with ptxrt.graph() as first:
        transpose(x)
    leave_all()
    del first
    gc.collect()
    with ptxrt.graph() as g:
        ptxrt.empty((2, 3), np.float32)
        z = transpose(transpose(transpose(x)))
        ptxrt.Stream()
        ptxrt.empty((2, 3), np.float32)
    g.launch()
    np.testing.assert_array_equal(z.to_numpy(), numbers(2, 3).T)
    for _ in range(2):  # the first pass records an event, the second finds it done
        ptxrt.synchronize()
        selection.current().finish()
    ptxrt.synchronize()
    assert len(cuda.modules) == 1, "what had to wait for the end of the capture was done after it"


def test_threads_launch_one_graph_in_turns(either, monkeypatch):
    x = ptxrt.to_device(numbers(4, 4))
    y = ptxrt.empty((4, 4), np.float32)
    with ptxrt.graph() as g:
        transpose(x, y=y)
        transpose(y, y=x)
    running, most, run = [], [], ptxrt.graph._run

    def slowly(self, queue):
        running.append(None)
        most.append(len(running))
        time.sleep(0.001)
        run(self, queue)
        running.pop()

    monkeypatch.setattr(ptxrt.graph, "_run", slowly)

    def work():
        with ptxrt.using(either.name):
            for _ in range(10):
                g.launch(stream=ptxrt.Stream())

    run_threads([work] * 3)
    assert max(most) == 1
    np.testing.assert_array_equal(x.to_numpy(), numbers(4, 4))


def test_the_pool_leaves_captured_streams_alone(cuda):
    """The last use of a block was in a stream under capture: an event recorded there would become part of the graph."""
    with ptxrt.graph():
        address = ptxrt.empty((4, 5), np.float32).address
        with ptxrt.Stream():
            assert ptxrt.empty((4, 5), np.float32).address != address
    assert not cuda.captures


def test_memory_that_others_had_ends_no_capture_of_theirs(cuda):
    x, y = ptxrt.to_device(numbers(2, 3)), ptxrt.empty((3, 2), np.float32)
    transpose(x, y=y, stream=88)
    ptxrt.synchronize(88)
    ptxrt.empty((5, 5), np.float32).__cuda_array_interface__
    cuda.captures[88] = []
    transpose(x, y=y, stream=88)
    ptxrt.empty((5, 5), np.float32)
    assert len(cuda.captures.pop(88)) == 1


def test_a_stream_of_others_that_is_gone_is_not_asked_about(cuda):
    """A bare handle does not tell whether its stream still exists: the driver may crash on a destroyed one."""
    lent = ptxrt.to_device(numbers(5, 5))
    transpose(ptxrt.to_device(numbers(2, 3)), y=ptxrt.empty((3, 2), np.float32), stream=88)
    ptxrt.synchronize(88)
    cuda.destroyed.add(88)
    lent.__cuda_array_interface__
    del lent
    ptxrt.synchronize()
    assert ptxrt.empty((5, 5), np.float32).address


# Forks


def in_a_fork(action, seconds=20):
    """The type and message of the error that an action raises in a forked process."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(seconds)  # ends a hang
        try:
            action()
            words = "no error"
        except BaseException as error:
            words = f"{type(error).__name__}: {error}"
        os.write(write, words.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        words = pipe.read().decode()
    os.waitpid(child, 0)
    return words


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes do not fork here")


@needs_fork
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("where", ["the pool", "the modules", "opening", "nothing"])
def test_a_forked_process_gets_an_error(cuda, where):
    """Also if another thread held a lock at the time of the fork, which the child can never acquire."""
    chosen, x = selection.current(), ptxrt.to_device(numbers(2, 3))
    y = ptxrt.empty((3, 2), np.float32)
    prepared = ptxrt.prepare(transpose, x, y=y)
    prepared()
    for _ in range(3):
        transpose(x, y=y)
    calls = len(cuda.calls)
    lock = {"the pool": chosen._pool._turn, "the modules": chosen._turn, "opening": selection._opening}.get(where)
    held, leave = threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            leave.wait(60)

    thread = threading.Thread(target=hold if lock else held.set)
    thread.start()
    held.wait(60)
    try:
        actions = {
            "empty": lambda: ptxrt.empty(3, np.float32),
            "of a size that is kept": lambda: ptxrt.empty((2, 3), np.float32),
            "module": lambda: chosen.module("transpose_naive"),
            "call": lambda: transpose(x),
            "launch": lambda: transpose(x, y=y),
            "prepared": prepared,
            "to_numpy": x.to_numpy,
            "to_device": lambda: ptxrt.to_device(numbers(2, 3)),
            "stream": ptxrt.Stream,
            "synchronize": ptxrt.synchronize,
        }
        for name, action in actions.items():

            def and_no_call(action=action):
                try:
                    action()
                finally:
                    assert len(cuda.calls) == calls, "a forked process called the driver"

            assert in_a_fork(and_no_call).startswith("MachineError: this process was forked"), name
        if where == "opening":
            assert in_a_fork(lambda: ptxrt.using("emulator")) == "no error"
    finally:
        leave.set()
        thread.join()
    assert (transpose(x).to_numpy() == numbers(2, 3).T).all(), "the process that forked goes on"


@needs_fork
def test_a_turn_may_survive_a_fork_that_nobody_was_in():
    turn, other = Turn(lambda item: None, survives_fork=True), Turn(lambda item: None, survives_fork=True)

    def take():
        with turn:
            pass

    assert in_a_fork(take) == "no error"
    held, leave = threading.Event(), threading.Event()

    def hold():
        with other:
            held.set()
            leave.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    assert in_a_fork(take).startswith("MachineError"), "machines share what the other thread was in the middle of"
    leave.set()
    thread.join()


# Invalid operations on arrays


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda d: d[True], "a mask needs a copy"),
        (lambda d: d[False, 0], "a mask needs a copy"),
        (lambda d: d[np.True_], "a mask needs a copy"),
        (lambda d: ptxrt.empty((1,) * 65, np.uint8), "65 axes; arrays have at most 64"),
        (lambda d: d.reshape((1,) * 58 + d.shape + (1,) * 6), "66 axes"),
        (lambda d: d[(None,) * 63], "65 axes"),
        (lambda d: d.broadcast_to((1,) * 63 + d.shape), "65 axes"),
        (lambda d: ptxrt.empty(2**63, np.uint8), "which no memory holds"),
        (lambda d: ptxrt.empty((2**32, 2**31), np.uint8), "which no memory holds"),
        (lambda d: ptxrt.empty((0, 2**63), np.uint8), "which no memory holds"),
        (lambda d: ptxrt.empty(2**61, np.float32), "which no memory holds"),
        (lambda d: d[:1, :1].broadcast_to((2**32, 2**31)), "which no memory holds"),
        (
            lambda d: ptxrt.to_device(np.ma.masked_array([1.0, 2.0], [True, False])),
            "x is a masked array; pass x.filled",
        ),
        (lambda d: transpose(d, y=np.ma.masked_array(np.zeros((3, 2), np.float32))), "y is a masked array"),
        (lambda d: ptxrt.quantize(np.ma.masked_array(np.zeros((2, 32), np.float32)), "mxfp4"), "masked array"),
        (lambda d: ptxrt.compare(np.ma.masked_array([1.0]), [1.0]), "got is a masked array"),
    ],
)
def test_what_an_array_cannot_be_is_an_argument_error(either, call, words):
    with pytest.raises(ptxrt.ArgumentError, match=words):
        call(ptxrt.to_device(numbers(2, 3)))


def test_foreign_arrays_of_impossible_shapes_are_refused(cuda):
    for shape, words in [((1,) * 65, "65 axes"), ((2**40, 2**30), "no memory holds")]:
        theirs = SimpleNamespace(
            __cuda_array_interface__=dict(version=3, shape=shape, typestr="<f4", data=(0, False), stream=1)
        )
        with pytest.raises(ptxrt.ArgumentError, match=words):
            ptxrt.to_device(theirs)


@pytest.mark.parametrize(
    "call",
    [
        lambda d: d[:1, :1].broadcast_to((2**28, 2**28)).to_numpy(),
        lambda d: ptxrt.to_device(np.broadcast_to(np.float32(1), (2**30, 2**28))),
        lambda d: ptxrt.empty(2**58, np.float32),
    ],
)
def test_memory_that_is_not_there_is_out_of_memory(either, call):
    d = ptxrt.to_device(numbers(2, 3))
    with pytest.raises(ptxrt.OutOfMemory, match="bytes") as caught:
        call(d)
    assert isinstance(caught.value, MemoryError)
    np.testing.assert_array_equal(d.to_numpy(), numbers(2, 3))
