"""The runtime on a stand-in whose streams run as late as possible: order, memory, devices, prepared calls, graphs,
traces.

Here a missing wait gives wrong numbers, and waits of the host are counted.
"""

import asyncio
import copy
import gc
import json
import threading

import ml_dtypes
import numpy as np
import pytest

import fake_cuda
import ptxrt
from ptxrt import backend, ops, selection
from ptxrt.array import Memory
from ptxrt.pool import LARGE, PAGE, Pool, rounded
from ptxrt.staging import Staging
from test_driver import RESULT, Foreign, cuda, install  # noqa: F401

transpose = ops.transpose.transpose_naive


@pytest.fixture
def two(install):
    """Two fake devices; the first is selected as the machine `portable`."""
    fake = install(fake_cuda.FakeCuda(devices=2))
    with ptxrt.using("portable"):
        yield fake


@pytest.fixture(params=["emulator", "fake"])
def either(request):
    """Run a test on the emulator and on the fake GPU."""
    if request.param == "emulator":
        with ptxrt.using("emulator") as chosen:
            yield chosen
    else:
        request.getfixturevalue("cuda")
        yield selection.current()


def numbers(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def waits_of_the_host(fake):
    return [
        name
        for name in fake.names()
        if name in ("cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize", "cuMemFree")
    ]


# Order


def test_the_stand_in_is_late(cuda):
    y = ptxrt.empty((3, 2), np.float32)
    transpose(ptxrt.to_device(numbers(2, 3)), y=y)
    assert (fake_cuda.view(y.address, (3, 2), np.uint8) == 0xA5).all()
    assert (y.to_numpy() == numbers(2, 3).T).all()


@pytest.mark.parametrize(
    "streams", [(None, 55), (55, None), (55, 66), ("ours", None), (None, "ours"), ("ours", "ours"), (0, 55)]
)
def test_what_reads_waits_for_what_writes(cuda, streams):
    first, second = (ptxrt.Stream() if s == "ours" else s for s in streams)
    x = ptxrt.to_device(numbers(4, 5))
    y = transpose(x, stream=first)
    z = transpose(y.reshape(5, 4), stream=second)
    np.testing.assert_array_equal(z.to_numpy(stream=second), numbers(4, 5))


@pytest.mark.parametrize("streams", [(None, 55), (55, None), (55, 66), ("ours", None), (None, "ours")])
def test_what_writes_waits_for_what_reads(cuda, streams):
    """The host waits for the writer's stream only; the earlier reader must still have run before the write."""
    first, second = (ptxrt.Stream() if s == "ours" else s for s in streams)
    x, other = ptxrt.to_device(numbers(4, 5)), ptxrt.to_device(-numbers(5, 4))
    y = transpose(x, stream=first)
    transpose(other, y=x, stream=second)
    assert (x.to_numpy(stream=second) == -numbers(5, 4).T).all()
    np.testing.assert_array_equal(y.to_numpy(), numbers(4, 5).T)


def test_memory_is_reused_in_the_order_of_streams(cuda):
    """While a late stream still reads a freed block, another stream must not write it."""
    stream = ptxrt.Stream()
    x = ptxrt.to_device(numbers(8, 16))
    address = x.address
    y = transpose(x, stream=stream)
    del x
    again = ptxrt.to_device(np.zeros((8, 16), np.float32))
    assert again.address != address
    np.testing.assert_array_equal(y.to_numpy(), numbers(8, 16).T)
    del again
    assert ptxrt.empty((8, 16), np.float32).address != 0


def test_a_block_goes_to_another_stream_with_a_wait_where_nothing_else_is_left(install):
    fake = install(fake_cuda.FakeCuda(total=3 * 512))
    with ptxrt.using("portable"):
        stream = ptxrt.Stream()
        x = ptxrt.to_device(numbers(8, 16))
        y = transpose(x, stream=stream)
        z = ptxrt.empty((8, 16), np.float32)
        address = x.address
        del x
        fake.calls.clear()
        again = ptxrt.empty((16, 8), np.float32)
        assert again.address == address and not waits_of_the_host(fake)
        transpose(z, y=again)
        again.to_numpy()
        np.testing.assert_array_equal(y.to_numpy(), numbers(8, 16).T)


def test_streams_hold_for_a_block(cuda):
    stream, x = ptxrt.Stream(priority=-1), ptxrt.to_device(numbers(2, 3))
    with stream as entered:
        assert entered is stream and selection.current().queue() is stream.queue
        transpose(x)
        with ptxrt.Stream() as inner:
            assert selection.current().queue() is inner.queue
        assert selection.current().queue() is stream.queue
    assert selection.current().queue() is selection.current().own_queue
    launch = [arguments for name, arguments in cuda.calls if name == "cuLaunchKernel"][-1]
    assert int(launch[8]) == stream.handle == stream.__cuda_stream__()[1] and not stream.done
    stream.synchronize()
    assert stream.done


def test_threads_leave_the_blocks_that_they_entered(either):
    """Two threads use one stream at once. Each has its own stream back when it leaves."""
    one, two, shared = (ptxrt.Stream() for _ in range(3))
    inside, left, seen = threading.Event(), threading.Event(), []

    def other():
        with ptxrt.using(either.name), two:
            with shared:
                inside.set()
                left.wait(10)
                seen.append(selection.current().queue() is shared.queue)
            seen.append(selection.current().queue() is two.queue)

    thread = threading.Thread(target=other)
    with one:
        with shared:
            thread.start()
            assert inside.wait(10)
        assert selection.current().queue() is one.queue
        left.set()
        thread.join()
    assert seen == [True, True] and selection.current().queue() is selection.current().own_queue


def test_blocks_may_end_in_another_context(either):
    """In another task or thread there is nothing to restore."""
    stream, machine = ptxrt.Stream(), ptxrt.using(either.name)

    async def steps():
        with stream, machine:
            yield 1

    async def run():
        generator = steps()
        await asyncio.create_task(generator.__anext__())
        with pytest.raises(StopAsyncIteration):
            await asyncio.create_task(generator.__anext__())

    asyncio.run(run())
    thread = threading.Thread(target=lambda: machine.__exit__(None, None, None))
    thread.start()
    thread.join()
    assert selection.current().queue() is selection.current().own_queue


def test_tasks_that_enter_one_choice_leave_it_alike():
    seen = []

    async def run():
        choice = ptxrt.using("emulator", ptx="portable")

        async def task():
            with choice as chosen:
                await asyncio.sleep(0.01)
                assert selection.current() is chosen
            seen.append(backend.scope().backend)

        await asyncio.gather(task(), task())

    asyncio.run(run())
    assert seen == [None, None]


@pytest.mark.parametrize("priority", ["high", 1.5, None, True, 2**31, np.zeros(2)])
def test_a_priority_is_a_whole_number(either, priority):
    with pytest.raises(ptxrt.ArgumentError, match="priority is .*; pass a whole number"):
        ptxrt.Stream(priority=priority)
    assert ptxrt.Stream(priority=np.int64(-1)).done


def test_events_order_and_time(either):
    stream, start, stop = ptxrt.Stream(), ptxrt.Event(), ptxrt.Event()
    x = ptxrt.to_device(numbers(2, 3))
    start.record(stream)
    transpose(x, stream=stream)
    stop.record(stream)
    ptxrt.Stream().wait(stop)
    stream.wait(ptxrt.Stream())
    assert start.elapsed_time(stop) >= 0 and stop.done and stream.record().elapsed_time(stop) is not None
    for call, words in [
        (lambda: ptxrt.Event().synchronize(), "never recorded"),
        (lambda: start.elapsed_time(3), "pass an Event"),
    ]:
        with pytest.raises(ptxrt.ArgumentError, match=words):
            call()


def test_a_stream_of_another_device_is_refused(two):
    stream = ptxrt.Stream(device=1)
    with pytest.raises(ptxrt.ArgumentError, match="pass a stream of that device"):
        transpose(ptxrt.to_device(numbers(2, 3)), stream=stream)


def test_streams_are_destroyed_with_their_last_user(cuda):
    stream = ptxrt.Stream()
    y = transpose(ptxrt.to_device(numbers(2, 3)), stream=stream)
    del stream
    gc.collect()
    assert "cuStreamDestroy" not in cuda.names()
    assert (y.to_numpy() == numbers(2, 3).T).all()
    del y
    ptxrt.trim_memory()
    selection.current().remembered.calls.clear()  # remembered calls keep the stream of their latest launch
    gc.collect()
    assert "cuStreamDestroy" not in cuda.names(), "a finalizer called the driver"
    ptxrt.synchronize()
    assert "cuStreamDestroy" in cuda.names()


# Memory


def test_sizes_waste_little():
    for nbytes in (1, 512, 513, 5000, 1 << 20, (1 << 20) + 1, LARGE, LARGE + 1, 10**9):
        size = rounded(nbytes)
        assert (
            size >= nbytes
            and rounded(size) == size
            and size - nbytes <= max(512, nbytes // 8 + 1, PAGE * (nbytes > LARGE))
        )


def test_memory_info_counts(cuda):
    before = ptxrt.memory_info()
    assert (before.used, before.cached) == (0, 0) and before.total == cuda.total
    x = ptxrt.empty((1024, 256), np.float32)
    held = ptxrt.memory_info()
    assert held.used == 1 << 20 and held.free == before.free - (1 << 20)
    del x
    kept = ptxrt.memory_info()
    assert (kept.used, kept.cached, kept.free) == (0, 1 << 20, held.free)
    ptxrt.trim_memory()
    assert ptxrt.memory_info() == before


def test_nothing_is_freed_or_waited_for_on_the_way(cuda):
    x = ptxrt.to_device(numbers(64, 64))
    transpose(x)
    cuda.calls.clear()
    for _ in range(20):
        transpose(x)
    assert set(cuda.names()) == {"cuLaunchKernel"}


def test_exhaustion_is_an_error_that_leaves_all_else_usable(install):
    install(fake_cuda.FakeCuda(total=1 << 20))
    with ptxrt.using("portable"):
        x = ptxrt.to_device(numbers(64, 64))
        with pytest.raises(
            ptxrt.OutOfMemory, match="cuMemAlloc.*bytes on portable.*CUDA_ERROR_OUT_OF_MEMORY.*free device arrays"
        ) as caught:
            ptxrt.empty((1 << 20,), np.float32)
        assert (
            isinstance(caught.value, (MemoryError, ptxrt.DriverError))
            and caught.value.result == "CUDA_ERROR_OUT_OF_MEMORY"
        )
        assert (transpose(x).to_numpy() == numbers(64, 64).T).all()
        # An allocation releases cached memory before it fails.
        big = ptxrt.empty((900 << 10,), np.uint8)
        del big
        assert ptxrt.memory_info().cached
        ptxrt.empty((100, 2000), np.float32)


def test_without_a_pool_memory_goes_straight_back(install, monkeypatch):
    monkeypatch.setenv("PTXRT_POOL", "0")
    fake = install(fake_cuda.FakeCuda())
    with ptxrt.using("portable"):
        x = ptxrt.empty((100,), np.uint8)
        assert ptxrt.memory_info().used == 100 and x.address in fake.memory
        del x
        assert not fake.memory and ptxrt.memory_info().used == 0
        y = ptxrt.empty((100,), np.uint8)
        fake.fail["cuMemFree"] = RESULT.CUDA_ERROR_ILLEGAL_ADDRESS
        del y  # freeing memory of a lost context raises nothing


def test_memory_that_others_had_waits_for_the_whole_device(cuda):
    x = ptxrt.to_device(numbers(4, 4))
    address = x.address
    theirs = 77
    x.__cuda_array_interface__
    selection.current()._driver.cuMemcpyHtoDAsync(address, numbers(4, 4).ctypes.data, 64, theirs)
    del x
    other = ptxrt.empty((4, 4), np.float32)
    assert other.address != address
    cuda._run(theirs)
    selection.current().finish()
    assert ptxrt.empty((4, 4), np.float32).address == address


def test_the_pool_may_be_given_memory_at_any_time():
    """A finalizer may free memory while its own thread is inside the pool."""

    class Source:
        count = 0

        def take(self, nbytes):
            self.count += 512
            pool.free(held.pop(), 10, None, (), False) if held else None
            return self.count

        def reached(self, mark):
            return True

    pool, held = Pool(Source(), list), []
    queue = backend.Queue(None, 1)
    held.append(pool.alloc(10, queue))
    assert pool.alloc(2000, queue) and pool.alloc(20, queue) == 512


# Devices


def test_arrays_live_and_run_on_their_device(two):
    x = ptxrt.to_device(numbers(2, 3), device=1)
    assert x.device == 1 and two.owners[x.address] == 1 and "device 1" in repr(x.backend.describe())
    y = transpose(x)
    assert y.device == 1 and two.owners[y.address] == 1
    np.testing.assert_array_equal(y.to_numpy(), numbers(2, 3).T)
    assert ptxrt.last_launches()[-1].detail == "portable, Fake GPU (device 1)"
    assert ptxrt.empty(3, np.float32, device=1).device == 1 and ptxrt.empty(3, np.float32).device == 0
    with ptxrt.using("portable", device=1) as chosen:
        assert (
            chosen is x.backend and ptxrt.to_device(numbers(2)).device == 1 and transpose(numbers(2, 3)).shape == (3, 2)
        )
    with ptxrt.using("portable", device=0) as chosen, ptxrt.using("portable") as default:
        assert chosen is default


def test_arrays_are_copied_between_devices(two):
    x = ptxrt.to_device(numbers(2, 3))
    y = ptxrt.to_device(transpose(x), device=1)
    assert y.device == 1 and two.names().count("cuMemcpyPeerAsync") == 1
    np.testing.assert_array_equal(y.to_numpy(), numbers(2, 3).T)
    assert ptxrt.to_device(y, device=1) is y


@pytest.mark.parametrize("machine", ["portable", "emulator"])
def test_mixed_devices_are_refused(two, machine):
    with ptxrt.using(machine):
        x, y = ptxrt.to_device(numbers(2, 3)), ptxrt.empty((3, 2), np.float32, device=1)
        with pytest.raises(
            ptxrt.ArgumentError,
            match=r"y is on .*device 1.*, but x on .*; bring them to one device with ptxrt.to_device",
        ):
            transpose(x, y=y)


@pytest.mark.parametrize("device, error, words", [(2, ptxrt.MachineError, "no device 2; this computer has 2"), (-1, ptxrt.ArgumentError, "device is -1"), ("0", ptxrt.ArgumentError, "device is '0'"), (True, ptxrt.ArgumentError, "device is True")])  # fmt: skip
def test_devices_that_are_not_there(two, device, error, words):
    with pytest.raises(error, match=words):
        ptxrt.using("portable", device=device)


def test_emulators_have_devices_too(emulator):
    x = ptxrt.to_device(numbers(2, 3), device=1)
    np.testing.assert_array_equal(transpose(x).to_numpy(), numbers(2, 3).T)
    np.testing.assert_array_equal(ptxrt.to_device(x, device=0).to_numpy(), numbers(2, 3))
    assert ptxrt.memory_info(device=1).used == x.nbytes and ptxrt.memory_info().total is None


def test_threads_use_one_device(cuda):
    x, results = ptxrt.to_device(numbers(16, 8)), {}

    def work(index):
        with ptxrt.using("portable"), ptxrt.Stream():
            for _ in range(20):
                results[index] = transpose(ptxrt.to_device(numbers(16, 8) + index)).to_numpy()
                prepared(x)

    prepared = ptxrt.prepare(transpose, x)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(4):
        np.testing.assert_array_equal(results[index], (numbers(16, 8) + index).T)


# Prepared calls


def test_a_prepared_call_does_nothing_but_its_launch(cuda):
    x, q = ptxrt.to_device(numbers(4, 64)), ptxrt.quantize(ptxrt.to_device(numbers(4, 64)), "mxfp4")
    prepared = ptxrt.prepare(ptxrt.quantize, x, "mxfp4", out=q)
    prepared(x)
    cuda.calls.clear()
    assert prepared(x, "mxfp4", out=q) is q and prepared(x) is q and prepared() is q
    assert cuda.names() == ["cuLaunchKernel"] * 3


def test_prepared_calls_take_other_arrays(either):
    x, y = ptxrt.to_device(numbers(4, 64)), ptxrt.to_device(-3 * numbers(4, 64))
    q, r = ptxrt.quantize(x, "mxfp4"), ptxrt.quantize(x, "mxfp4")
    prepared = ptxrt.prepare(ptxrt.quantize, x, "mxfp4", out=q)
    assert prepared(y, "mxfp4", out=r) is r
    want = ptxrt.quantize(-3 * numbers(4, 64), "mxfp4")
    np.testing.assert_array_equal(r.codes.to_numpy(), want.codes)
    np.testing.assert_array_equal(r.scales.to_numpy(), want.scales)
    np.testing.assert_array_equal(q.codes.to_numpy(), ptxrt.quantize(numbers(4, 64), "mxfp4").codes)
    assert [launch.kernel for launch in prepared.launches] == ["quantize_mxfp4"] and ptxrt.last_launches()[
        -1
    ].kernel == "quantize_mxfp4"


@pytest.mark.parametrize("format", ["mxfp4", "mxfp6_e3m2", "nvfp4"])
@pytest.mark.parametrize("options", [{}, dict(axis=0), dict(scale_layout="128x4"), dict(pad=True)])
def test_prepared_calls_of_several_launches(either, format, options):
    x, y = numbers(64, 64), -numbers(64, 64) / 7
    prepared = ptxrt.prepare(ptxrt.quantize, ptxrt.to_device(x), format, **options)
    got = prepared(ptxrt.to_device(y))
    want = ptxrt.quantize(y, format, **options)
    for name in ("codes", "scales"):
        np.testing.assert_array_equal(getattr(got, name).to_numpy().view(np.uint8), getattr(want, name).view(np.uint8))
    if format == "nvfp4":
        assert got.global_scale.to_numpy() == want.global_scale


def test_prepared_functions_of_ones_own(either):
    def there_and_back(x, out):
        return ptxrt.dequantize(ptxrt.quantize(x.reshape(-1, 32), "mxfp4"), out=out.reshape(-1, 32)).reshape(out.shape)

    x, out = ptxrt.to_device(numbers(2, 2, 32)), ptxrt.empty((2, 2, 32), np.float32)
    prepared = ptxrt.prepare(there_and_back, x, out)
    other, target = ptxrt.to_device(numbers(2, 2, 32)[::-1]), ptxrt.empty((2, 2, 32), np.float32)
    result = prepared(other, target)
    np.testing.assert_array_equal(result.to_numpy(), np.asarray(ptxrt.quantize(numbers(2, 2, 32)[::-1], "mxfp4")))
    assert result.address == target.address


def test_numbers_of_prepared_kernels_may_change(either):
    attention = ptxrt.kernels()["attention_mxfp4_bf16_in_kernel"]
    example = attention.example(attention.cases[0])
    arrays = {name: ptxrt.to_device(example.pop(name)) for name in "qkv"}
    prepared = ptxrt.prepare(attention, **arrays, **example)
    for scale in (example["scale"], 0.5, 0.0, -0.0):
        got = prepared(scale=scale)
        want = attention(**arrays, **dict(example, scale=scale))
        for mine, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(mine.to_numpy(), other.to_numpy())
    with pytest.raises(ptxrt.ArgumentError, match="scale is 'much'"):
        prepared(scale="much")


def test_prepared_calls_refuse_what_is_not_alike(either):
    x = ptxrt.to_device(numbers(4, 64))
    q = ptxrt.quantize(x, "mxfp4")
    prepared = ptxrt.prepare(ptxrt.quantize, x, "mxfp4", out=q)
    half = ptxrt.to_device(numbers(4, 64).astype(np.float16))
    for call, words in [
        (lambda: prepared(half), r"argument 0 is float16 \[4, 64\] on .*; it was prepared with float32 \[4, 64\]"),
        (lambda: prepared(x.reshape(8, 32)), r"float32 \[8, 32\]"),
        (lambda: prepared(numbers(4, 64)), "argument 0 is a ndarray; pass a device array"),
        (lambda: prepared(3), "argument 0 is a int"),
        (lambda: prepared(x, "mxfp8"), "argument 1 is 'mxfp8'; it was prepared with 'mxfp4'"),
        (lambda: prepared(x, out=x), "out is a DeviceArray; pass a QuantizedArray"),
        (lambda: prepared(x, out=ptxrt.quantize(x, "mxfp6_e3m2")), "out is .*; it was prepared with"),
        (lambda: ptxrt.prepare(ptxrt.quantize, numbers(4, 64), "mxfp4"), "argument 0 is a NumPy array"),
        (lambda: ptxrt.prepare(ptxrt.quantize), "no argument of quantize is a device array"),
        (
            lambda: ptxrt.prepare(lambda x: transpose(x).to_numpy(), x),
            "ptxrt.prepare records launches.*waits for the device",
        ),
        (lambda: ptxrt.prepare(lambda x: ptxrt.to_device(numbers(3)), x), "NumPy array would be copied"),
    ]:
        with pytest.raises(ptxrt.ArgumentError, match=words):
            call()


class Layer:
    """An object with an array, as users write it."""

    def __init__(self, weight, eps):
        self.weight, self.eps, self.scales = weight, eps, [1.0]


def test_prepared_calls_find_what_changed_in_lists_and_objects(emulator):
    """Parts that are no arrays are those of the example's call, also where the same object is passed again."""
    x, two, seven = (ptxrt.to_device(np.full(shape, value, np.float32)) for shape, value in
                     (((2, 64), 1), (64, 2), (64, 7)))  # fmt: skip
    layer = Layer(two, 1.0)
    prepared = ptxrt.prepare(lambda x, layer: ptxrt.rmsnorm(x, layer.weight, eps=layer.eps), x, layer)
    want = prepared().to_numpy()
    for change, words in [
        (dict(eps=2.0), "eps differs"),
        (dict(scales=[1.0, 2.0]), "scales differs"),
        (dict(more=1), "more differs"),
        (dict(weight=3), "weight differs"),
    ]:
        before = dict(vars(layer))
        vars(layer).update(change)
        for arguments in ((), (x, layer)):
            with pytest.raises(ptxrt.ArgumentError, match=words):
                prepared(*arguments)
        vars(layer).clear(), vars(layer).update(before)
        np.testing.assert_array_equal(prepared(x, layer).to_numpy(), want)
    layer.scales.append(3.0)
    with pytest.raises(ptxrt.ArgumentError, match="scales differs"):
        prepared()
    layer.scales.pop()
    layer.weight = seven  # arrays may be others
    np.testing.assert_array_equal(prepared(x, layer).to_numpy(), want * np.float32(3.5))

    for held in ({"weight": two}, [[two]], {"weight": two, "eps": np.ones(3)}):
        prepared = ptxrt.prepare(lambda x, held: ptxrt.rmsnorm(x, two), x, held)
        np.testing.assert_array_equal(prepared(x, held).to_numpy(), want_of(x, two))
        np.testing.assert_array_equal(prepared(x, copy.copy(held)).to_numpy(), want_of(x, two))
        if isinstance(held, list):
            held[0][0] = seven
        elif len(held) > 1:
            held["eps"][1] = 2
        else:
            held["weight"] = seven
        for arguments in ((), (x, held), (x, copy.deepcopy(held))):
            with pytest.raises(ptxrt.ArgumentError, match="which has changed since|it was prepared with"):
                prepared(*arguments)


def test_prepared_calls_find_arrays_that_were_added(emulator):
    x, other = (ptxrt.to_device(np.full((2, 64), value, np.float32)) for value in (1, 5))
    held, layer = [x], Layer(x, 1.0)
    del layer.eps, layer.scales
    for value, add in ((held, lambda: held.append(other)), (layer, lambda: setattr(layer, "more", other))):
        prepared = ptxrt.prepare(lambda x, value: ptxrt.rmsnorm(x), x, value)
        prepared(x, value)
        add()
        for arguments in ((), (x, value)):
            with pytest.raises(ptxrt.ArgumentError, match="item 1 differs|more differs"):
                prepared(*arguments)


def test_prepared_calls_take_containers_within_themselves_and_any_names(emulator):
    x = ptxrt.to_device(numbers(2, 64))
    loop: dict = {}
    loop["loop"] = loop
    ring: list = [x]
    ring.append(ring)
    for value in (loop, ring):
        prepared = ptxrt.prepare(lambda x, value: ptxrt.rmsnorm(x), x, value)
        np.testing.assert_array_equal(prepared(x, value).to_numpy(), ptxrt.rmsnorm(x).to_numpy())
    for name in ("_rest", "_others", "__rest", "rest"):
        prepared = ptxrt.prepare(lambda x, **named: ptxrt.rmsnorm(x), x, **{name: 1})
        prepared(x, **{name: 1})
        with pytest.raises(ptxrt.ArgumentError, match=f"{name} is 2"):
            prepared(x, **{name: 2})
        with pytest.raises(ptxrt.ArgumentError, match="the argument more came"):
            prepared(x, more=2)


def test_prepared_calls_compare_the_bytes_of_host_arrays(emulator):
    x = ptxrt.to_device(numbers(2, 64))
    objects = np.empty(2, object)
    objects[1] = x
    for host in (np.array([np.nan, 0.0]), objects, np.ones((3, 4))[:, ::2], np.zeros(0)):
        prepared = ptxrt.prepare(lambda x, held: ptxrt.rmsnorm(x), x, [host])
        prepared(x, [host]), prepared(x, [host.copy()])
        if host.size:
            with pytest.raises(ptxrt.ArgumentError, match="it was prepared with"):
                prepared(x, [np.full_like(host, 7)])


def want_of(x, weight):
    return ptxrt.rmsnorm(x, weight).to_numpy()


@pytest.mark.parametrize("kind", [list, tuple])
def test_prepared_calls_take_lists_of_arrays(emulator, kind):
    arrays = [ptxrt.to_device(np.full((1, 2, 4, 64), value, np.float32)) for value in (1, 3, 5)]
    lse = ptxrt.to_device(np.zeros((1, 2, 4), np.float32))
    prepared = ptxrt.prepare(ptxrt.merge, kind(arrays[:2]), kind([lse, lse]))
    for pair in ([0, 1], [1, 2], [0, 0]):
        got, _ = prepared(kind(arrays[i] for i in pair))
        assert (got.to_numpy() == sum(2 * i + 1 for i in pair) / 2).all()
    for wrong, words in [
        (kind(arrays), "item 2 differs"),
        (kind(arrays[:1]), "item 1 differs"),
        (kind([arrays[0], 3]), "item 1 differs"),
        (kind([arrays[0], arrays[1][..., :32]]), r"argument 0 is float32 \[1, 2, 4, 32\]"),
        ({list: tuple, tuple: list}[kind](arrays[:2]), f"pass a {kind.__name__} as in the example"),
        (arrays[0], f"pass a {kind.__name__}"),
    ]:
        with pytest.raises(ptxrt.ArgumentError, match=words):
            prepared(wrong)


def test_prepared_calls_refuse_arguments_that_the_example_lacks(either):
    x = ptxrt.to_device(numbers(4, 64))
    prepared = ptxrt.prepare(ptxrt.quantize, x, "mxfp4", axis=-1)
    for call, words in [
        (lambda: prepared(x, "mxfp4", x), "3 arguments came; quantize was prepared with 2 by position, axis"),
        (lambda: prepared(x, pad=True), "the argument pad came"),
        (lambda: prepared(x, pad=True, out=None), "the arguments pad, out came"),
    ]:
        with pytest.raises(ptxrt.ArgumentError, match=words):
            call()


def test_prepared_calls_refuse_arrays_of_another_emulator():
    with ptxrt.using("emulator"):
        x = ptxrt.to_device(numbers(4, 64))
        prepared = ptxrt.prepare(ptxrt.quantize, x, "mxfp8")
        with ptxrt.using("emulator", races=True) as other:
            y = ptxrt.to_device(numbers(4, 64))
        assert other.describe().endswith("races=True")
        with pytest.raises(ptxrt.ArgumentError, match="races=True; it was prepared with"):
            prepared(y)


def test_prepared_calls_refuse_overlaps(either):
    memory = ptxrt.to_device(numbers(8, 8))
    x, y = ptxrt.to_device(numbers(8, 8)), ptxrt.empty((8, 8), np.float32)
    prepared = ptxrt.prepare(transpose, x, y=y)
    with pytest.raises(ptxrt.ArgumentError, match="y and argument 0 overlap in memory"):
        prepared(memory, y=memory)


def test_prepared_calls_wait_as_others_do(cuda):
    stream = ptxrt.Stream()
    x, y = ptxrt.to_device(numbers(4, 5)), ptxrt.empty((5, 4), np.float32)
    prepared = ptxrt.prepare(transpose, x, y=y)
    prepared(x, y=y, stream=stream)
    np.testing.assert_array_equal(y.to_numpy(), numbers(4, 5).T)
    with stream:
        prepared(x)
    prepared(x, stream=55)
    np.testing.assert_array_equal(transpose(y).to_numpy(), numbers(4, 5))


def test_prepared_calls_that_repeat_find_what_changed(cuda):
    """A call on the example's arrays skips tests that the call before passed, unless a use of any memory changed."""
    stream = ptxrt.Stream()
    x, y, negative = ptxrt.to_device(numbers(4, 5)), ptxrt.empty((5, 4), np.float32), ptxrt.to_device(-numbers(5, 4))
    prepared = ptxrt.prepare(transpose, x, y=y)
    prepared()
    cuda.calls.clear()
    prepared(), prepared(x)
    assert cuda.names() == ["cuLaunchKernel"] * 2
    kept = transpose(y, stream=stream)  # the next call writes y, and waits for this
    transpose(negative, y=x)
    prepared()
    np.testing.assert_array_equal(kept.to_numpy(), numbers(4, 5))
    np.testing.assert_array_equal(y.to_numpy(), -numbers(5, 4))
    prepared()
    transpose(ptxrt.to_device(numbers(5, 4)), y=x, stream=stream)  # the next call reads x, and waits for this
    prepared()
    np.testing.assert_array_equal(y.to_numpy(), numbers(5, 4))
    for _ in range(2):  # as does the stream of the call
        with stream:
            prepared()
        transpose(negative, y=x)
    np.testing.assert_array_equal(y.to_numpy(), -numbers(5, 4))
    with ptxrt.trace() as seen:
        prepared()
    assert len(seen.rows()) == 1


def test_prepared_calls_follow_the_arrays_of_their_arguments(either):
    """An argument may hold other arrays than in the call before."""
    x = ptxrt.to_device(numbers(4, 64))
    q, other = (ptxrt.quantize(ptxrt.to_device(np.zeros((4, 64), np.float32)), "mxfp4") for _ in range(2))
    prepared = ptxrt.prepare(ptxrt.quantize, x, "mxfp4", out=q)
    prepared(), prepared()
    codes, q.codes = q.codes, other.codes
    fresh = q.codes.to_numpy()
    assert prepared() is q and (other.codes.to_numpy() != fresh).any()
    np.testing.assert_array_equal(other.codes.to_numpy(), codes.to_numpy())


def test_calls_that_are_remembered_are_checked_all_the_same(cuda):
    x = ptxrt.to_device(numbers(4, 64))
    q = ptxrt.quantize(x, "mxfp4")
    for _ in range(3):
        assert ptxrt.quantize(x, "mxfp4", out=q) is q
    cuda.calls.clear()
    y = ptxrt.to_device(-numbers(4, 64))
    assert (
        ptxrt.quantize(y, "mxfp4", out=q) is q and cuda.names()[-1] == "cuLaunchKernel" and not waits_of_the_host(cuda)
    )
    np.testing.assert_array_equal(q.codes.to_numpy(), ptxrt.quantize(-numbers(4, 64), "mxfp4").codes)
    with pytest.raises(ptxrt.ArgumentError):
        ptxrt.quantize(x, "mxfp8", out=q)
    with pytest.raises(ptxrt.ArgumentError):
        ptxrt.quantize(x.reshape(8, 32), "mxfp4", out=q)
    with ptxrt.using("emulator"), pytest.raises(ptxrt.ArgumentError, match="on portable"):
        ptxrt.quantize(x, "mxfp4", out=q)


FUNCTIONS = {
    "quantize": lambda x: ptxrt.quantize(x, "mxfp4"),
    "quantize nvfp4": lambda x: ptxrt.quantize(x, "nvfp4", scale_layout="128x4"),
    "quantize columns": lambda x: ptxrt.quantize(x, "mxfp8", axis=0, pad=True),
    "back": lambda x: ptxrt.dequantize(ptxrt.quantize(x, "mxfp6_e3m2"), np.float16),
    "kernel": lambda x: transpose(x),
    "kernel of a view": lambda x: transpose(x[:4]),
}


def bits_of(result):
    arrays = result.arrays.values() if isinstance(result, ptxrt.QuantizedArray) else [result]
    return [np.atleast_1d(array.to_numpy()).view(np.uint8) for array in arrays]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_calls_without_out_give_results_of_their_own(either, name):
    """The first call runs the function, the second records it, later ones only launch: all give the same result, each
    in new memory."""
    function = FUNCTIONS[name]
    inputs = [ptxrt.to_device(numbers(32, 64) * sign) for sign in (1, -1, 0.5, -3, 7)]
    results = [function(x) for x in inputs]
    with ptxrt.using("emulator", budget=10**9):
        want = [bits_of(function(ptxrt.to_device(x.to_numpy()))) for x in inputs]
    addresses = [
        array.address for r in results for array in (r.arrays.values() if isinstance(r, ptxrt.QuantizedArray) else [r])
    ]
    assert len(set(addresses)) == len(addresses)
    for result, parts in zip(results, want):
        assert type(result) is type(results[0])
        for mine, theirs in zip(bits_of(result), parts, strict=True):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_remembered_calls_keep_no_memory(either, name):
    function = FUNCTIONS[name]
    used = ptxrt.memory_info().used
    for _ in range(4):
        function(ptxrt.to_device(numbers(32, 64)))
    gc.collect()
    assert ptxrt.memory_info().used == used


@pytest.mark.parametrize("name", FUNCTIONS)
def test_remembered_calls_do_nothing_but_their_launches(cuda, name):
    function, x = FUNCTIONS[name], ptxrt.to_device(numbers(32, 64))
    for _ in range(3):
        function(x)
    cuda.calls.clear()
    for _ in range(5):
        function(x)
    assert set(cuda.names()) == {"cuLaunchKernel"}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_remembered_calls_wait_are_gathered_and_traced_as_others(either, name):
    function, x = FUNCTIONS[name], ptxrt.to_device(numbers(32, 64))
    want = bits_of(function(x))
    function(x)
    stream = ptxrt.Stream()
    with stream:
        late = function(x)
    elsewhere = function(x) if not either.is_cuda else function(ptxrt.to_device(numbers(32, 64)))
    with ptxrt.graph() as g:
        gathered = function(x)
    g.launch()
    with ptxrt.trace() as t:
        traced = function(x)
    prepared = ptxrt.prepare(function, x)
    assert len(t) == len(prepared.launches) >= 1
    for result in (late, elsewhere, gathered, traced, prepared(x)):
        for mine, theirs in zip(bits_of(result), want, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_remembered_kernels_take_their_numbers_as_they_come(either):
    x = ptxrt.empty(64, np.float32)
    for value in (1.0, 2.5, -0.0, 0.0, np.float32(3), 7, np.float64(1e-3)):
        filled = ops.scales.fill_f32(x=x, value=value, count=64)
        np.testing.assert_array_equal(filled.to_numpy().view(np.uint32), np.full(64, value, np.float32).view(np.uint32))
    with pytest.raises(ptxrt.ArgumentError, match="value is 'much'"):
        ops.scales.fill_f32(x=x, value="much", count=64)


def test_a_remembered_call_knows_which_array_is_which(either):
    """Objects of one class may differ in the order of their attributes."""
    x = ptxrt.to_device(numbers(4, 64))
    q = ptxrt.quantize(x, "mxfp4")
    want = ptxrt.dequantize(q).to_numpy()
    other = object.__new__(ptxrt.QuantizedArray)
    for name in reversed(vars(q)):
        setattr(other, name, getattr(q, name))
    for each in (q, other, q, other, q, other):
        np.testing.assert_array_equal(ptxrt.dequantize(each).to_numpy(), want)


def test_arguments_may_have_any_names(either):
    """Argument names must not clash with names in the code generated for a prepared call."""

    def double(observers, memory, own, queue, here, words, q, receipt):
        return transpose(transpose(queue, y=own), y=observers)

    arrays = {
        name: ptxrt.to_device(numbers(4, 4) * i)
        for i, name in enumerate(("observers", "memory", "own", "queue", "here"))
    }
    prepared = ptxrt.prepare(double, **arrays, words=1, q=None, receipt="x")
    np.testing.assert_array_equal(prepared(queue=ptxrt.to_device(-numbers(4, 4))).to_numpy(), -numbers(4, 4))


def test_a_lost_context_is_found_and_restored(cuda):
    """A launch does not check whose context is current. A thread without a context keeps the device's."""
    x, y = ptxrt.to_device(numbers(2, 3)), ptxrt.empty((3, 2), np.float32)
    prepared = ptxrt.prepare(transpose, x, y=y)
    other = fake_cuda.Handle()
    cuda.contexts.append(other)
    prepared(x)
    assert cuda.contexts[-1] is other
    cuda.contexts.clear()
    prepared(x)
    assert cuda.contexts == [cuda.primary]
    cuda.fail["cuLaunchKernel"] = RESULT.CUDA_ERROR_LAUNCH_FAILED
    with pytest.raises(ptxrt.DriverError, match=r"cuLaunchKernel \(transpose_naive, grid .*CUDA_ERROR_LAUNCH_FAILED"):
        prepared(x)


# Graphs


def test_graphs_give_what_calls_give(either):
    x, y = ptxrt.to_device(numbers(4, 64)), ptxrt.empty((4, 64), np.float32)
    q = ptxrt.quantize(x, "mxfp4")
    with ptxrt.graph() as g:
        ptxrt.quantize(x, "mxfp4", out=q)
        ptxrt.dequantize(q, out=y)
        z = transpose(y)
    assert [launch.kernel for launch in g.launches] == ["quantize_mxfp4", "dequantize_mxfp4", "transpose_naive"]
    for values in (numbers(4, 64), -numbers(4, 64) / 3):
        transpose(ptxrt.to_device(values.T.copy()), y=x)
        g.launch()
        assert ptxrt.last_launches()[-1].kernel == "graph of 3"
        want = ptxrt.dequantize(ptxrt.quantize(values, "mxfp4"))
        np.testing.assert_array_equal(z.to_numpy(), want.T)
    assert "graph of 3 launches" in repr(g)


def test_graphs_run_nothing_while_they_gather(cuda):
    x, y = ptxrt.to_device(numbers(2, 3)), ptxrt.to_device(numbers(3, 2))
    prepared = ptxrt.prepare(transpose, x, y=y)
    cuda.calls.clear()
    with ptxrt.graph() as g:
        prepared(x)
        transpose(y, y=x)
    assert not waits_of_the_host(cuda) and (y.to_numpy() == numbers(3, 2)).all()
    cuda.calls.clear()
    g.launch(stream=ptxrt.Stream())
    assert cuda.names().count("cuGraphLaunch") == 1 and not waits_of_the_host(cuda)
    assert (y.to_numpy() == numbers(2, 3).T).all() and (x.to_numpy() == numbers(2, 3)).all()


def test_graphs_keep_their_memory(either):
    x = ptxrt.to_device(numbers(4, 5))
    with ptxrt.graph() as g:
        z = transpose(transpose(x))
    del x
    others = [ptxrt.to_device(np.zeros((4, 5), np.float32)) for _ in range(4)]
    g.launch()
    np.testing.assert_array_equal(z.to_numpy(), numbers(4, 5))
    assert others


def test_graphs_refuse_what_cannot_be_gathered(either):
    x, late, recorded = ptxrt.to_device(numbers(2, 3)), ptxrt.graph(), ptxrt.Stream().record()
    with pytest.raises(ptxrt.ArgumentError, match="the graph is new"):
        late.launch()
    for call, words in [
        (lambda: x.to_numpy(), "ptxrt.graph records launches on device arrays; to_numpy waits"),
        *(
            (call, "ptxrt.graph records launches on device arrays; synchronize waits")
            for call in (ptxrt.synchronize, ptxrt.Stream().synchronize, recorded.synchronize)
        ),
        (lambda: ptxrt.trim_memory(), "trim_memory waits"),
        (lambda: ptxrt.Event().record(), "an event would be recorded"),
        (lambda: ptxrt.Stream().record(), "an event would be recorded"),
        (lambda: ptxrt.Stream().wait(None), "a stream would wait"),
        (lambda: transpose(numbers(2, 3)), "given none"),
        (lambda: ptxrt.to_device(numbers(2)), "copied"),
        (lambda: transpose(x, stream=ptxrt.Stream()), "names another stream"),
        (lambda: ptxrt.graph().__enter__(), "within another"),
    ]:
        g = ptxrt.graph()
        with pytest.raises(ptxrt.ArgumentError, match=words), g:
            transpose(x)
            call()
        with pytest.raises(ptxrt.ArgumentError, match="the graph is failed"):
            g.launch()
    assert backend.scope().recorder is None and (transpose(x).to_numpy() == numbers(2, 3).T).all()
    with ptxrt.graph() as empty:
        pass
    empty.launch()


# Small arrays of the host


@pytest.mark.parametrize("stream", [None, "ours", 55], ids=str)
def test_small_arrays_go_to_the_device_without_a_wait(cuda, stream):
    """The array may change right away; more arrays than the staging memory holds wait for copies that lie back."""
    stream = ptxrt.Stream() if stream == "ours" else stream
    size = Staging.LARGEST // 4
    host, arrays = np.empty(size, np.float32), []
    for i in range(3 * Staging.PARTS * Staging.PART // Staging.LARGEST):
        host[:] = i
        arrays.append(ptxrt.to_device(host[: size - i % 2], stream=stream))
        if i < Staging.PARTS * Staging.PART // Staging.LARGEST:
            assert not waits_of_the_host(cuda)
    host[:] = -1
    assert set(waits_of_the_host(cuda)) == {"cuEventSynchronize"}
    assert len(cuda.page_locked) == 1
    for i, array in enumerate(arrays):
        assert array.shape == (size - i % 2,) and (array.to_numpy(stream=stream) == i).all()


@pytest.mark.parametrize("stream", [None, "ours", 55], ids=str)
def test_what_uses_an_upload_waits_for_it(cuda, stream):
    """In another stream, and when the memory is used again."""
    stream = ptxrt.Stream() if stream == "ours" else stream
    x = ptxrt.to_device(numbers(4, 5), stream=stream)
    np.testing.assert_array_equal(transpose(x, stream=66).to_numpy(stream=66), numbers(4, 5).T)
    ptxrt.to_device(-numbers(4, 5), stream=stream)  # freed before it has arrived
    y = ptxrt.empty((4, 5), np.float32)
    y[...] = numbers(4, 5)
    ptxrt.synchronize()
    ptxrt.synchronize(stream=stream)
    np.testing.assert_array_equal(y.to_numpy(), numbers(4, 5))


def test_staging_memory_waits_for_every_queue(cuda):
    """Also for streams of which no reference is left."""
    host, arrays = np.empty(Staging.LARGEST // 4, np.float32), []
    for i in range(3 * Staging.PARTS * Staging.PART // Staging.LARGEST):
        host[:] = i
        stream = ptxrt.Stream()
        arrays.append(ptxrt.to_device(host, stream=stream))
        del stream
    gc.collect()
    for i, array in enumerate(arrays):
        assert (array.to_numpy() == i).all()


def test_small_arrays_come_back_through_page_locked_memory(cuda):
    """A read uses the memory of the one before. Memory of a read that failed is not used again, since its copy may be
    under way."""
    host = numbers(5, 7)
    x = ptxrt.to_device(host)
    before = len(cuda.page_locked)
    for i in range(3):
        x[...] = host + i
        np.testing.assert_array_equal(x.to_numpy(), host + i)
        np.testing.assert_array_equal(x[1:, ::2].to_numpy(), (host + i)[1:, ::2])
    assert len(cuda.page_locked) == before + 1
    cuda.fail["cuStreamSynchronize"] = RESULT.CUDA_ERROR_UNKNOWN
    with pytest.raises(ptxrt.DriverError):
        x.to_numpy()
    cuda.fail.clear()
    np.testing.assert_array_equal(x.to_numpy(), host + 2)
    assert len(cuda.page_locked) == before + 2
    results: dict[int, bool] = {}

    def read(i: int) -> None:
        y = ptxrt.to_device(host * i)
        results[i] = all((y.to_numpy() == host * i).all() for _ in range(20))

    threads = [threading.Thread(target=read, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(results[i] for i in range(4))


def test_large_arrays_wait(cuda):
    host = numbers(Staging.LARGEST // 4 + 1)
    x = ptxrt.to_device(host)
    assert waits_of_the_host(cuda) == ["cuStreamSynchronize"] and not cuda.page_locked
    np.testing.assert_array_equal(x.to_numpy(), host)


def test_a_row_major_part_is_written_without_a_launch(cuda):
    """In the order of the stream, after earlier uses in others and before later ones, without a wait of the host."""
    host = numbers(6, 8)
    x, other = ptxrt.to_device(host), ptxrt.Stream()
    y = transpose(x, stream=other)
    cuda.calls.clear()
    for key, value in ((2, -host[2]), (np.s_[3:5], np.ones((1, 2, 8), np.float32)), (np.s_[5, 3:4], [7.0])):
        x[key] = value
        host[key] = value
    names = cuda.names()
    assert names.count("cuMemcpyHtoDAsync") == 3 and "cuLaunchKernel" not in names and not waits_of_the_host(cuda)
    assert names.index("cuStreamWaitEvent") < names.index("cuMemcpyHtoDAsync")
    np.testing.assert_array_equal(transpose(x, stream=other).to_numpy(), host.T)
    np.testing.assert_array_equal(y.to_numpy(), numbers(6, 8).T)


def test_a_captured_stream_takes_no_copy_from_staging_memory(cuda):
    cuda.captures[88] = []
    with pytest.raises(AssertionError, match="a wait for a stream that is captured"):  # as the driver refuses it
        ptxrt.to_device(numbers(2, 3), stream=88)
    assert not cuda.page_locked


def test_a_graph_that_one_stream_has_launched_waits_for_others(cuda):
    """After launches that depended on nothing else, a write and a read in another stream are waited for."""
    x, y, other = ptxrt.to_device(numbers(4, 5)), ptxrt.empty((5, 4), np.float32), ptxrt.Stream()
    with ptxrt.graph() as graph:
        transpose(x, y=y)
    for _ in range(3):
        graph.launch()
    np.testing.assert_array_equal(y.to_numpy(), numbers(4, 5).T)
    transpose(transpose(ptxrt.to_device(-numbers(4, 5))), y=x, stream=other)
    graph.launch()
    np.testing.assert_array_equal(y.to_numpy(), -numbers(4, 5).T)
    for _ in range(3):
        graph.launch()
    before = transpose(y, stream=other)
    x[...] = numbers(4, 5)
    graph.launch()
    np.testing.assert_array_equal(before.to_numpy(), -numbers(4, 5))
    np.testing.assert_array_equal(y.to_numpy(), numbers(4, 5).T)


@pytest.mark.parametrize("stream", [None, "ours"], ids=str)
def test_graphs_settle_in_any_lasting_stream(cuda, monkeypatch, stream):
    """Of memory that other streams wrote once, until it is used elsewhere."""
    stream = ptxrt.Stream() if stream == "ours" else stream
    x, y, other = ptxrt.to_device(numbers(4, 5)), ptxrt.empty((5, 4), np.float32), ptxrt.Stream()
    with ptxrt.graph() as graph:
        transpose(x, y=y)
    looks, real = [], Memory.acquire
    monkeypatch.setattr(Memory, "acquire", lambda *a: (looks.append(1), real(*a))[1])
    for _ in range(5):
        graph.launch(stream)
    assert len(looks) <= 2 * 2 * len("xy")
    looks.clear()
    graph.launch(stream)
    assert not looks
    transpose(ptxrt.to_device(-numbers(5, 4)), y=x, stream=other)
    graph.launch(stream)
    np.testing.assert_array_equal(y.to_numpy(), -numbers(5, 4))


def test_graphs_on_lent_memory_wait_each_time(cuda):
    lent = {**ptxrt.to_device(numbers(4, 5)).__cuda_array_interface__, "stream": 77}
    x, y = ptxrt.to_device(Foreign(lent)), ptxrt.empty((5, 4), np.float32)
    with ptxrt.graph() as graph:
        transpose(x, y=y)
    for _ in range(4):
        cuda.calls.clear()
        graph.launch()
        assert cuda.names().count("cuStreamWaitEvent") == 2  # for the lender, and the lender for it


def test_somebody_elses_capture_is_left_alone(cuda):
    """A launch with out= in a stream that another library captures issues no wait and no event, only the launch."""
    x, y = ptxrt.to_device(numbers(2, 3)), ptxrt.empty((3, 2), np.float32)
    transpose(x, y=y)
    ptxrt.synchronize()
    cuda.captures[88] = []
    cuda.calls.clear()
    transpose(x, y=y, stream=88)
    assert not {"cuStreamWaitEvent", "cuMemAlloc", "cuStreamSynchronize", "cuEventQuery"} & set(cuda.names())
    assert len(cuda.captures.pop(88)) == 1


# Page-locked arrays


@pytest.mark.parametrize("stream", [None, "ours", 55], ids=str)
def test_page_locked_arrays_are_copied_without_a_wait(cuda, stream):
    """Each copy is at its place in the stream, and ordered with other streams like a launch."""
    stream = ptxrt.Stream() if stream == "ours" else stream
    x, y = ptxrt.empty((4, 5), np.float32), ptxrt.empty((5, 4), np.float32)
    sent, first, second = (ptxrt.PageLocked(shape, np.float32) for shape in ((4, 5), (5, 4), (5, 4)))
    sent.array[:] = numbers(4, 5)
    sent.send(x, stream=stream)
    transpose(x, y=y)
    first.receive(y, stream=stream)
    transpose(ptxrt.to_device(-numbers(4, 5)), y=y)
    second.receive(y)
    assert not waits_of_the_host(cuda)
    ptxrt.synchronize(stream)
    np.testing.assert_array_equal(first.array, numbers(4, 5).T)
    ptxrt.synchronize()
    np.testing.assert_array_equal(second.array, -numbers(4, 5).T)
    np.testing.assert_array_equal(x.to_numpy(), numbers(4, 5))


def test_graphs_copy_page_locked_arrays(either):
    """Each launch sends what the array holds then; a graph may hold copies alone."""
    x = ptxrt.empty((4, 5), np.float32)
    sent, received = ptxrt.PageLocked((4, 5), np.float32), ptxrt.PageLocked((5, 4), np.float32)
    sent.array[:] = 7
    with ptxrt.graph() as graph:
        sent.send(x)
        received.receive(transpose(x))
    assert len(graph.launches) == 1
    views = sent.array, received.array
    del sent, received  # the graph holds their memory
    gc.collect()
    for sign in (1, -1):
        views[0][:] = sign * numbers(4, 5)
        graph.launch()
        ptxrt.synchronize()
        np.testing.assert_array_equal(views[1], sign * numbers(4, 5).T)
    mine = ptxrt.PageLocked((4, 5), np.float32)
    with ptxrt.graph() as copies:
        mine.receive(x)
    with ptxrt.trace() as seen:
        copies.launch()
    ptxrt.synchronize()
    np.testing.assert_array_equal(mine.array, -numbers(4, 5))
    assert [row["kernel"] for row in seen.rows()] == ["graph of 0"] and "graph of 0 launches" in repr(copies)


def test_page_locked_memory_ends_with_its_last_use(cuda):
    x, before = ptxrt.to_device(numbers(8)), len(cuda.page_locked)
    locked = ptxrt.PageLocked((8,), np.float32)
    array = locked.array[2:]
    locked.receive(x)
    del locked
    gc.collect()
    ptxrt.synchronize()
    assert len(cuda.page_locked) == before + 1 and (array == numbers(8)[2:]).all()
    ptxrt.PageLocked((8,), np.float32).receive(x)  # the copy may be under way
    del array
    gc.collect()
    ptxrt.trim_memory()
    assert len(cuda.page_locked) == before


def test_wrong_copies_of_page_locked_arrays(two):
    locked = ptxrt.PageLocked((4, 6), np.float32)
    x, there = ptxrt.empty((4, 6), np.float32), ptxrt.empty((4, 6), np.float32, device=1)
    readonly = ptxrt.empty((1, 6), np.float32).broadcast_to((4, 6))
    for call, message in [
        (lambda: ptxrt.PageLocked((-1,), np.float32), "PageLocked: shape is .-1,.; pass one whole number"),
        (lambda: ptxrt.PageLocked((1,), object), "PageLocked: dtype is .*; pass a dtype of numbers"),
        (lambda: locked.send(numbers(4, 6)), r"PageLocked.send: a ndarray came; pass a device array float32 \[4, 6\]"),
        (lambda: locked.send(x.view(np.int32)), r"PageLocked.send: .*int32.* came; pass a device array float32"),
        (lambda: locked.receive(x.T), r"PageLocked.receive: .* came; pass a device array float32 \[4, 6\]"),
        (lambda: locked.receive(ptxrt.empty((4, 12), np.float32)[:, ::2]), "has gaps between its elements; pass"),
        (lambda: locked.send(readonly), "pass the whole array, or a copy"),
        (lambda: locked.send(there), r"is on portable, .* .device 1., the page-locked array is of .*; bring it there"),
        (lambda: locked.send(x, stream=ptxrt.Stream(device=1)), "pass a stream of that device"),
        (
            lambda: ptxrt.prepare(lambda y: locked.send(y), x),
            "ptxrt.prepare records launches; PageLocked.send is a copy",
        ),
    ]:
        with pytest.raises(ptxrt.ArgumentError, match=message):
            call()
    with pytest.raises(ptxrt.ArgumentError, match="names another stream"), ptxrt.graph():
        locked.send(x, stream=ptxrt.Stream())
    empty = ptxrt.PageLocked((0, 3), np.float32)
    empty.send(ptxrt.empty((0, 3), np.float32)), empty.receive(ptxrt.empty((0, 3), np.float32))


# Traces


def test_traces_hold_every_launch(either):
    x = ptxrt.to_device(numbers(4, 64))
    q = ptxrt.quantize(x, "mxfp4")
    prepared = ptxrt.prepare(ptxrt.quantize, x, "mxfp4", out=q)
    with ptxrt.graph() as g:
        prepared()
    with ptxrt.trace(timing=True) as t, ptxrt.trace() as plain:
        transpose(x)
        prepared()
        g.launch()
    transpose(x)
    assert (
        [launch.kernel for launch in t]
        == ["transpose_naive", "quantize_mxfp4", "graph of 1"]
        == [r.kernel for r in plain.launches]
    )
    first = t.rows()[0]
    digest = selection.current().module("transpose_naive").digest
    assert (first["machine"], first["bytes"], first["module"], len(digest)) == (either.name, 2 * 4 * 64 * 4, digest, 64)
    assert all(row["milliseconds"] >= 0 for row in t.rows()) and plain.milliseconds() == [None] * 3
    assert json.loads(t.json()) == t.rows() and "GB/s" in str(t) and len(str(plain).splitlines()) == 4


# Conversion of inputs and outputs


def test_a_numpy_scalar_is_no_foreign_array(emulator):
    assert ptxrt.to_device(np.float32(2)).shape == ()


def test_bfloat16_and_narrow_types_have_their_signatures(emulator):
    for dtype in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
        assert ptxrt.empty(16, dtype).signature is ptxrt.empty(16, dtype).signature
