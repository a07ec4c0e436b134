"""Calls of the driver that fail in the middle of a call here, interrupts, and finalizers that run there: what has begun
is not forgotten. On the stand-in for the driver, whose streams run as late as possible.
"""

import gc
import os
import sys
import threading
import time
import weakref

import numpy as np
import pytest

import fake_cuda
import ptxrt
from ptxrt import array, ops, selection
from ptxrt.staging import Staging
from test_driver import RESULT, install  # noqa: F401

transpose = ops.transpose.transpose_naive
OUT_OF_MEMORY = RESULT.CUDA_ERROR_OUT_OF_MEMORY


class Faulty(fake_cuda.FakeCuda):
    """A stand-in of which one call does something else: `at(name, number, action)` arms the number-th call from then
    on. An action is a result, an exception, or a function that is called ahead of the call. late: the call is made
    first, the exception raised then."""

    armed = None

    def at(self, name, number, action, late=False):
        self.armed = [name, number, action, late]

    def __getattribute__(self, name):
        call = super().__getattribute__(name)
        armed = object.__getattribute__(self, "armed") if name.startswith("cu") else None
        if armed is None or armed[0] != name:
            return call

        def counted(*arguments):
            armed[1] -= 1
            if armed[1]:
                return call(*arguments)
            _, _, action, late = armed
            if isinstance(action, type):
                if late:
                    call(*arguments)
                raise action("by the test")
            if callable(action):
                action()
                return call(*arguments)
            return action, None

        return counted

    def run(self, stream):
        self._run(stream if isinstance(stream, int) else stream.handle)


@pytest.fixture
def cuda(install):
    fake = install(Faulty())
    with ptxrt.using("portable"):
        yield fake
        fake.armed = None


def numbers(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def fails(call):
    with pytest.raises((ptxrt.PtxError, KeyboardInterrupt)):
        call()


def fails_behind(cuda, began, name, call, action=OUT_OF_MEMORY):
    """Make `call` fail at a driver call `name` that follows one called `began`: at the first for which that is so."""
    for number in range(1, 20):
        selection.current()._spare_events.clear()
        before = cuda.names().count(began)
        cuda.at(name, number, action, late=True)
        fails(call)
        if cuda.names().count(began) > before:
            cuda.armed = None
            return
    raise AssertionError(f"{name} does not follow {began}")


def check_reuse(cuda, held, stream):
    """The memory of the array in `held` serves another one, whose contents the failed call does not change, however
    late it runs."""
    address, shape = held[0].address, held[0].shape
    cuda.armed = None
    held.clear()
    gc.collect()
    z = ptxrt.to_device(np.zeros(shape, np.float32))
    assert z.address == address and (z.to_numpy() == 0).all()
    cuda.run(stream)
    assert (z.to_numpy() == 0).all()


# What was launched and could not be recorded


@pytest.mark.parametrize("name, action", [("cuEventRecord", OUT_OF_MEMORY), ("cuLaunchKernel", KeyboardInterrupt)])
def test_outputs_of_a_launch_that_is_not_recorded(cuda, name, action):
    x, y = ptxrt.to_device(numbers(8, 16)), [ptxrt.empty((16, 8), np.float32)]
    ptxrt.synchronize()
    fails_behind(cuda, "cuLaunchKernel", name, lambda: transpose(x, y=y[0], stream=55), action)
    check_reuse(cuda, y, 55)


def test_outputs_of_a_launch_that_is_interrupted(cuda):
    """In a stream of this library, whose end needs no event."""
    x, y, stream = ptxrt.to_device(numbers(8, 16)), [ptxrt.empty((16, 8), np.float32)], ptxrt.Stream()
    ptxrt.synchronize()
    fails_behind(
        cuda, "cuLaunchKernel", "cuLaunchKernel", lambda: transpose(x, y=y[0], stream=stream), KeyboardInterrupt
    )
    check_reuse(cuda, y, stream)


def test_outputs_of_a_launch_whose_uses_do_not_merge(cuda):
    """One use more than a memory records: the others become one, which takes an event."""
    x = ptxrt.to_device(numbers(8, 16))
    streams = [ptxrt.Stream() for _ in range(array.USES + 1)]
    y = [ptxrt.empty((16, 8), np.float32)]
    for stream in streams[:-1]:
        transpose(x, stream=stream)
    ptxrt.synchronize()
    fails_behind(cuda, "cuLaunchKernel", "cuEventCreate", lambda: transpose(x, y=y[0], stream=streams[-1]))
    check_reuse(cuda, y, streams[-1])


def test_outputs_of_a_launch_that_is_timed(cuda):
    x, stream = ptxrt.to_device(numbers(8, 16)), ptxrt.Stream()
    y = [ptxrt.empty((16, 8), np.float32)]
    ptxrt.synchronize()
    with ptxrt.trace(timing=True):
        fails_behind(cuda, "cuLaunchKernel", "cuEventCreate", lambda: transpose(x, y=y[0], stream=stream))
    check_reuse(cuda, y, stream)


def test_inputs_of_a_launch_that_is_not_recorded(cuda):
    x, y = ptxrt.to_device(numbers(8, 16)), ptxrt.empty((16, 8), np.float32)
    ptxrt.synchronize()
    fails_behind(cuda, "cuLaunchKernel", "cuEventRecord", lambda: transpose(x, y=y, stream=55))
    x[...] = np.zeros((8, 16), np.float32)
    ptxrt.synchronize()
    cuda.run(55)
    np.testing.assert_array_equal(y.to_numpy(), numbers(8, 16).T)


def test_writes_that_are_interrupted(cuda):
    """Of more bytes than staging memory takes: the call copies and waits."""
    stream, other, count = ptxrt.Stream(), ptxrt.Stream(), Staging.LARGEST // 4 + 1
    with other:
        y = [ptxrt.empty(count, np.float32)]
    ptxrt.synchronize()

    def write():
        with stream:
            y[0][...] = numbers(count)

    fails_behind(cuda, "cuMemcpyHtoDAsync", "cuMemcpyHtoDAsync", write, KeyboardInterrupt)
    with other:
        check_reuse(cuda, y, stream)


def test_graphs_that_are_not_recorded(cuda):
    x, y, stream = ptxrt.to_device(numbers(8, 16)), [ptxrt.empty((16, 8), np.float32)], ptxrt.Stream()
    with ptxrt.graph() as g:
        transpose(x, y=y[0])
    ptxrt.synchronize()
    cuda.at("cuGraphLaunch", 1, KeyboardInterrupt, late=True)
    fails(lambda: g.launch(stream))
    del g
    check_reuse(cuda, y, stream)


def test_page_locked_copies_that_are_not_recorded(cuda):
    sent, stream = ptxrt.PageLocked((16, 8), np.float32), ptxrt.Stream()
    y = [ptxrt.empty((16, 8), np.float32)]
    sent.array[...] = 3
    ptxrt.synchronize()
    cuda.at("cuMemcpyHtoDAsync", 1, KeyboardInterrupt, late=True)
    fails(lambda: sent.send(y[0], stream=stream))
    check_reuse(cuda, y, stream)


def test_staging_memory_of_a_copy_that_is_not_recorded(cuda):
    """It is filled again only when the copy is done."""
    count, stream = Staging.LARGEST // 4, ptxrt.Stream()
    host = np.ones(count, np.float32)
    with stream:
        x = ptxrt.empty(count, np.float32)
        selection.current()._spare_events.clear()
        cuda.at("cuEventCreate", 1, OUT_OF_MEMORY)
        fails(lambda: x.__setitem__(..., host))
        cuda.armed = None
    kept = []
    for value in range(2 * Staging.PARTS * Staging.PART // Staging.LARGEST):
        host[:] = value + 100
        kept.append(ptxrt.to_device(host))
    assert (x.to_numpy(stream=stream) == 1).all()


def test_downloads_that_are_interrupted_keep_their_memory(cuda):
    """It serves the next one, once the copy is done."""
    x = ptxrt.to_device(numbers(8, 16))
    x.to_numpy()
    before = len(cuda.page_locked)
    for name in ("cuMemcpyDtoHAsync", "cuStreamSynchronize"):
        for late in (False, True):
            cuda.at(name, 1, KeyboardInterrupt, late)
            fails(x.to_numpy)
            cuda.armed = None
            np.testing.assert_array_equal(x.to_numpy(), numbers(8, 16))
    assert len(cuda.page_locked) == before


# Slots that an append has claimed


@pytest.mark.parametrize("way", ["called", "prepared", "prepared with the cache", "prepared around it"])
@pytest.mark.parametrize("stream", [None, 55])
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(
    "name, action, late",
    [
        ("cuLaunchKernel", KeyboardInterrupt, True),
        ("cuLaunchKernel", KeyboardInterrupt, False),
        ("cuEventRecord", OUT_OF_MEMORY, False),
    ],
)
def test_slots_of_an_append_that_fails_are_free(cuda, rng, way, stream, name, number, action, late):
    """Else later tokens of higher numbers would lose them to tokens that were never written."""
    cache = ptxrt.KVCache(pages=4, page_size=4, heads=1, dim=32, format="bf16")

    def tokens():
        return ptxrt.to_device(rng.standard_normal((3, 1, 32)).astype(np.float32))

    k, v, slots = tokens(), tokens(), ptxrt.to_device(np.array([3, 5, 9]))
    call, arguments = cache.append, (k, v, slots)
    if way == "prepared with the cache":
        call, arguments = (lambda cache, k, v, slots: cache.append(k, v, slots)), (cache, k, v, slots)
    elif way == "prepared around it":
        call = lambda k, v, slots: cache.append(k, v, slots)
    call = call if way == "called" else ptxrt.prepare(call, *arguments)
    ptxrt.synchronize()
    cuda.at(name, number, action, late)
    try:
        call(*arguments, stream=stream)
    except (ptxrt.OutOfMemory, KeyboardInterrupt):
        pass
    cuda.armed = None
    later = tokens()
    cache.append(later, tokens(), ptxrt.to_device(np.array([7, 3, 5])), stream=stream)
    written = cache.arrays["k"].to_numpy(stream=stream).astype(np.float32).reshape(16, 32)[[7, 3, 5]]
    np.testing.assert_allclose(written, later.to_numpy()[:, 0], atol=0.02)


# Work that finalizers leave


@pytest.mark.parametrize("name", ["cuEventQuery", "cuEventCreate", "cuEventRecord"])
def test_lent_memory_is_kept_until_its_uses_are_known_to_be_done(cuda, name):
    class Lender:
        def __init__(self):
            self.array = ptxrt.to_device(numbers(8, 16))

        def __dlpack_device__(self):
            return (2, 0)

        def __dlpack__(self, **named):
            return self.array.__dlpack__(**named)

    lender, stream = Lender(), ptxrt.Stream()
    ptxrt.synchronize()
    x = ptxrt.to_device(lender)
    y = transpose(x, stream=stream)
    lent = weakref.ref(lender.array)
    del x, lender
    gc.collect()
    selection.current()._spare_events.clear()
    cuda.at(name, 1, OUT_OF_MEMORY)
    try:
        ptxrt.empty(1000, np.float32)
    except ptxrt.OutOfMemory:
        pass
    gc.collect()
    assert lent() is not None and cuda.streams[stream.handle][1], "released while a launch reads it"
    cuda.armed = None
    np.testing.assert_array_equal(y.to_numpy(stream=stream), numbers(8, 16).T)
    ptxrt.synchronize()
    ptxrt.trim_memory()
    gc.collect()
    assert lent() is None


@pytest.mark.parametrize("name", ["cuEventCreate", "cuThreadExchangeStreamCaptureMode"])
def test_memory_that_was_shared_is_not_lost(cuda, name):
    x = ptxrt.to_device(numbers(8, 16))
    ptxrt.synchronize()
    assert x.__cuda_array_interface__
    del x
    selection.current()._spare_events.clear()
    cuda.at(name, 1, OUT_OF_MEMORY)
    fails(lambda: ptxrt.empty(1000, np.float32))
    cuda.armed = None
    ptxrt.trim_memory()
    assert ptxrt.memory_info().used == 0 and not cuda.memory


def test_page_locked_memory_is_not_lost(cuda):
    locked = ptxrt.PageLocked((4,), np.float32)
    before = len(cuda.page_locked)
    del locked
    gc.collect()
    selection.current()._spare_events.clear()
    cuda.at("cuEventCreate", 1, OUT_OF_MEMORY)
    fails(lambda: ptxrt.empty(1000, np.float32))
    cuda.armed = None
    for _ in range(3):
        ptxrt.synchronize()
        ptxrt.trim_memory()
    assert len(cuda.page_locked) == before - 1


# Finalizers that use arrays, wherever the collector runs them


def test_a_finalizer_uploads_within_an_upload(cuda):
    x, inner = ptxrt.empty(4, np.float32), ptxrt.empty(4, np.float32)
    for name in ("cuMemcpyHtoDAsync", "cuEventCreate", "cuEventRecord"):
        stream = ptxrt.Stream()
        selection.current()._spare_events.clear()
        cuda.at(name, 1, lambda: inner.__setitem__(..., np.full(4, 7, np.float32)))
        with stream:
            x[...] = numbers(4)
        cuda.armed = None
        np.testing.assert_array_equal(x.to_numpy(), numbers(4))
        assert (inner.to_numpy() == 7).all()
        inner[...] = 0


def test_a_finalizer_allocates_within_the_pool(cuda):
    """A block that is done and one that is not: the inner call takes the first, the outer call must not take the
    second."""
    x, done, pending = ptxrt.to_device(numbers(8, 16)), ptxrt.Stream(), ptxrt.Stream()
    ptxrt.synchronize()
    ptxrt.trim_memory()
    one, two = (ptxrt.empty((16, 8), np.float32) for _ in range(2))
    transpose(x, y=one, stream=done), transpose(x, y=two, stream=pending)
    done.synchronize()
    free = one.address
    del one, two
    inner = []
    cuda.at("cuEventQuery", 1, lambda: inner.append(ptxrt.empty((16, 8), np.float32)))
    z = ptxrt.empty((16, 8), np.float32)
    cuda.armed = None
    assert len({z.address, inner[0].address}) == 2 and free in (z.address, inner[0].address)
    z[...] = np.zeros((16, 8), np.float32)
    ptxrt.synchronize()
    cuda.run(pending)
    assert (z.to_numpy() == 0).all()


def test_a_finalizer_launches_while_uses_merge(cuda):
    """The uses of both calls are recorded: a write waits for them."""
    x = ptxrt.to_device(numbers(8, 16))
    streams = [ptxrt.Stream() for _ in range(array.USES + 2)]
    outs = [ptxrt.empty((16, 8), np.float32) for _ in streams]
    ptxrt.synchronize()
    for stream, y in zip(streams[:-2], outs):
        transpose(x, y=y, stream=stream)
    selection.current()._spare_events.clear()
    cuda.at("cuEventCreate", 2, lambda: transpose(x, y=outs[-1], stream=streams[-1]))
    transpose(x, y=outs[-2], stream=streams[-2])
    cuda.armed = None
    x[...] = np.zeros((8, 16), np.float32)
    ptxrt.synchronize()
    for stream in streams:
        cuda.run(stream)
    for y in outs:
        np.testing.assert_array_equal(y.to_numpy(), numbers(8, 16).T)


# Forked processes


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_while_a_thread_records_a_use(emulator):
    """The child has no such thread: it must not wait for it."""
    x = ptxrt.to_device(numbers(8, 16))
    held, stop = threading.Event(), threading.Event()

    def hold():
        with array.noting:
            held.set()
            stop.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    child = os.fork()
    if not child:  # pragma: no cover
        try:
            y = transpose(x, stream=ptxrt.Stream()).to_numpy()
            os._exit(0 if (y == numbers(8, 16).T).all() else 1)
        finally:
            os._exit(2)
    stop.set()
    thread.join()
    for _ in range(300):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.1)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        raise AssertionError("the child hangs")
    assert os.waitstatus_to_exitcode(status) == 0


if sys.version_info >= (3, 12):  # a fork beside threads is what this test is about
    test_a_fork_while_a_thread_records_a_use = pytest.mark.filterwarnings("ignore::DeprecationWarning")(
        test_a_fork_while_a_thread_records_a_use
    )


# Interrupts within the runtime itself, behind a call that has had its effect


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("keep", [True, False])
def test_memory_is_given_back_once(install, monkeypatch, keep):
    """An interrupt behind the call that takes or frees a block: no two arrays get its memory."""
    monkeypatch.setenv("PTXRT_POOL", "1" if keep else "0")
    fake = install(Faulty())
    with ptxrt.using("portable"):
        x, stream = ptxrt.to_device(np.ones(1000, np.float32)), ptxrt.Stream()
        x.copy(stream=stream)
        ptxrt.synchronize()
        gc.collect()

        def interrupt(frame, event, called):
            done = frame.f_code.co_name == "_take_back" and getattr(called, "__name__", "") == "append"
            if event == "c_return" and done or event == "return" and frame.f_code.co_name == "give":
                sys.setprofile(None)
                raise KeyboardInterrupt

        sys.setprofile(interrupt)
        try:
            del x
            ptxrt.empty(1000, np.float32)
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        arrays = [ptxrt.empty(1000, np.float32) for _ in range(4)]
        assert len({array.address for array in arrays}) == 4
        del arrays
        gc.collect()
        ptxrt.trim_memory()
    assert fake.memory is not None


def test_handles_are_destroyed_once(cuda):
    """The driver refuses the last call of the mode in which a handle is destroyed."""
    stream = ptxrt.Stream()
    x, handle, backend = ptxrt.to_device(numbers(4, 5)), stream.handle, selection.current()
    transpose(x, stream=stream)
    ptxrt.synchronize()
    stream.synchronize()
    del stream, x
    gc.collect()
    for number in range(1, 8):
        cuda.at("cuThreadExchangeStreamCaptureMode", number, OUT_OF_MEMORY)
        try:
            backend._tidy()
        except ptxrt.PtxError:
            pass
        cuda.armed = None
    ptxrt.trim_memory()
    backend._tidy()
    destroyed = [int(arguments[0]) for name, arguments in cuda.calls if name.startswith("cuStreamDestroy")]
    assert destroyed.count(handle) == 1, destroyed


def test_the_emulator_goes_on_after_an_interrupt(emulator, monkeypatch):
    x = ptxrt.to_device(numbers(4))
    free, calls = emulator.emulator.free, []

    def interrupted(address):
        calls.append(address)
        if len(calls) == 1:
            raise KeyboardInterrupt
        free(address)

    monkeypatch.setattr(emulator.emulator, "free", interrupted)
    del x
    for _ in range(3):
        try:
            y = ptxrt.to_device(numbers(4))
        except KeyboardInterrupt:
            continue
        np.testing.assert_array_equal(y.to_numpy(), numbers(4))
    assert len(calls) >= 1


def test_many_blocks_of_a_size_are_taken_in_linear_time(cuda):
    """The newest ones first; each is found at once."""
    count = 4000
    stream = ptxrt.Stream()
    arrays = [ptxrt.empty(1000, np.float32) for _ in range(count)]
    addresses = [array.address for array in arrays]
    pool = selection.current()._pool
    x = ptxrt.to_device(numbers(8, 16))
    transpose(x, stream=stream)
    for array_ in arrays:
        array_.memory.readers = ((None, selection.current().own_queue),)  # a bin keeps them, not the queue
    del arrays, array_
    gc.collect()
    start = time.perf_counter()
    taken = [pool.alloc(4000, selection.current().own_queue) for _ in range(count)]
    spent = time.perf_counter() - start
    assert sorted(taken) == sorted(addresses) and spent < 2, spent
    for address in taken:
        pool.free(address, 4000, selection.current().own_queue, (), False)
