"""The runtime on a real GPU: arrays of other libraries without copies, streams, graphs, memory, threads, processes."""

import gc
import multiprocessing
import os
import threading

import ml_dtypes
import numpy as np
import pytest

import ptxrt
from ptxrt import array
from test_lifetimes import TEXT, in_a_fork, run_threads

pytestmark = pytest.mark.gpu

KINDS = [np.float32, np.float16, ml_dtypes.bfloat16]


def data(rows=64, cols=256, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, cols), dtype=np.float32).astype(dtype)


def want(x):
    """The result of quantize for a NumPy array."""
    q = ptxrt.quantize(x, "mxfp4")
    return q.codes.view(np.uint8), q.scales.view(np.uint8)


def check(q, x):
    codes, scales = want(x)
    np.testing.assert_array_equal(q.codes.to_numpy().view(np.uint8), codes)
    np.testing.assert_array_equal(q.scales.to_numpy().view(np.uint8), scales)


# Other libraries. Each test shares memory in both directions, ordered by streams on both sides without a host wait.


def torch_on_gpu():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    return torch


@pytest.mark.parametrize("side", [False, True], ids=["default stream", "side stream"])
@pytest.mark.parametrize("dtype", KINDS)
def test_pytorch(gpu, dtype, side):
    torch = torch_on_gpu()
    name = {np.float32: torch.float32, np.float16: torch.float16}.get(dtype, torch.bfloat16)
    stream = torch.cuda.Stream() if side else torch.cuda.default_stream()
    with torch.cuda.stream(stream):
        source = torch.randn(256, 1024, device="cuda").to(name)
        torch.cuda._sleep(50_000_000)
        x = source * 2  # still pending: without a wait the next reader gets other values
        ours = ptxrt.to_device(x)
        assert ours.address == x.data_ptr() and ours.dtype == np.dtype(dtype)
        q = ptxrt.quantize(x, "mxfp4")
        codes = torch.from_dlpack(q.codes)
        assert codes.data_ptr() == q.codes.address
        copied = codes.clone()
        y = torch.from_dlpack(ptxrt.dequantize(q, dtype))
        assert y.dtype == name
        total = y.float().sum()
    stream.synchronize()
    host = (source.float() * 2).cpu().numpy().astype(dtype)
    np.testing.assert_array_equal(copied.cpu().numpy(), want(host)[0])
    np.testing.assert_allclose(
        total.item(),
        np.asarray(ptxrt.quantize(host, "mxfp4")).astype(dtype).astype(np.float32).sum(),
        rtol=1e-3,
        atol=1,
    )


def test_pytorch_by_stream_and_out(gpu):
    """As inference engines call it: with their stream and output buffers."""
    torch = torch_on_gpu()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.randn(256, 1024, device="cuda")
        codes = torch.empty(256, 512, dtype=torch.uint8, device="cuda")
        scales = torch.empty(256, 32, dtype=torch.uint8, device="cuda")
        out = ptxrt.QuantizedArray(codes, scales, format="mxfp4", shape=(256, 1024))
        torch.cuda._sleep(50_000_000)
        x += 1
        ptxrt.quantize(x, "mxfp4", out=out, stream=stream.cuda_stream)
        copied = codes.clone()
    stream.synchronize()
    np.testing.assert_array_equal(copied.cpu().numpy(), want(x.cpu().numpy())[0])
    if hasattr(stream, "__cuda_stream__"):
        ptxrt.quantize(x, "mxfp4", out=out, stream=stream)


def test_pytorch_captures_launches(gpu):
    torch = torch_on_gpu()
    x = torch.randn(64, 256, device="cuda")
    ours, q = ptxrt.to_device(x), ptxrt.quantize(ptxrt.to_device(x), "mxfp4")
    codes = torch.from_dlpack(q.codes)
    ptxrt.synchronize()
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=side):
        ptxrt.quantize(ours, "mxfp4", out=q, stream=torch.cuda.current_stream().cuda_stream)
    x.copy_(torch.randn(64, 256, device="cuda"))
    graph.replay()
    torch.cuda.synchronize()
    np.testing.assert_array_equal(codes.cpu().numpy(), want(x.cpu().numpy())[0])


def test_pytorch_keeps_and_gives_back_memory(gpu):
    torch = torch_on_gpu()
    before = ptxrt.memory_info().used
    y = torch.from_dlpack(ptxrt.to_device(data(1024, 1024)))
    gc.collect()
    assert ptxrt.memory_info().used > before
    assert float(y[3, 5]) == data(1024, 1024)[3, 5]
    del y
    gc.collect()
    assert ptxrt.memory_info().used == before
    tensor = torch.zeros(1 << 20, device="cuda")
    held = torch.cuda.memory_allocated()
    ours = ptxrt.to_device(tensor)
    del tensor
    assert torch.cuda.memory_allocated() == held
    del ours
    gc.collect()
    ptxrt.synchronize()
    assert torch.cuda.memory_allocated() < held


def test_cupy(gpu):
    cupy = pytest.importorskip("cupy")
    x = cupy.asarray(data())
    ours = ptxrt.to_device(x)
    assert ours.address == x.data.ptr
    q = ptxrt.quantize(x, "mxfp4")
    check(q, data())
    for taken in (cupy.from_dlpack(q.codes), cupy.asarray(q.codes)):
        assert taken.data.ptr == q.codes.address
        np.testing.assert_array_equal(taken.get(), want(data())[0])
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        late = cupy.asarray(data(seed=1)) * 1
        q = ptxrt.quantize(late, "mxfp4", stream=stream if hasattr(stream, "__cuda_stream__") else stream.ptr)
        taken = cupy.from_dlpack(q.codes).copy()
    stream.synchronize()
    np.testing.assert_array_equal(taken.get(), want(data(seed=1))[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_jax(gpu, dtype):
    jax = pytest.importorskip("jax")
    if not any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("JAX finds no GPU")
    x = jax.numpy.asarray(data(), dtype) * 2
    ours = ptxrt.to_device(x)
    assert ours.address == x.unsafe_buffer_pointer() and ours.dtype == np.dtype(x.dtype)
    q = ptxrt.quantize(x, "mxfp4")
    host = np.asarray(x)
    check(q, host)
    back = jax.numpy.from_dlpack(ptxrt.dequantize(q, host.dtype))
    assert back.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(back), np.asarray(ptxrt.quantize(host, "mxfp4")).astype(host.dtype))


def test_numpy_takes_a_copy(gpu):
    np.testing.assert_array_equal(np.from_dlpack(ptxrt.to_device(data()), device="cpu"), data())


# Streams and memory


def test_streams_wait_for_each_other(gpu):
    """A chain over many streams and reused blocks; each link reads what another stream has just written."""
    transpose = ptxrt.kernels()["transpose_tiled"]
    streams = [ptxrt.Stream(), None, ptxrt.Stream(priority=-1), 0, ptxrt.Stream()]
    x = data(512, 768)
    y = ptxrt.to_device(x)
    for i in range(400):
        y = transpose(y, stream=streams[i % len(streams)])
    np.testing.assert_array_equal(y.to_numpy(), x)
    for stream in streams[::2]:
        stream.synchronize()
        assert stream.done


def test_events_time_launches(gpu):
    x = ptxrt.to_device(data(4096, 4096))
    q = ptxrt.quantize(x, "mxfp4")
    start, stop = ptxrt.Event(), ptxrt.Event()
    start.record()
    for _ in range(10):
        ptxrt.quantize(x, "mxfp4", out=q)
    stop.record()
    assert 0.05 < start.elapsed_time(stop) < 1000 and start.done and stop.done
    with ptxrt.trace(timing=True) as t:
        ptxrt.quantize(x, "mxfp4", out=q)
    (row,) = t.rows()
    assert 0 < row["milliseconds"] < 100 and row["module"] and str(t)


def test_exhaustion_leaves_everything_usable(gpu):
    x = ptxrt.to_device(data())
    total = ptxrt.memory_info().total
    with pytest.raises(ptxrt.OutOfMemory, match="CUDA_ERROR_OUT_OF_MEMORY"):
        ptxrt.empty((2 * total,), np.uint8)
    check(ptxrt.quantize(x, "mxfp4"), data())
    held = []
    with pytest.raises(ptxrt.OutOfMemory):
        while True:
            held.append(ptxrt.empty((total // 16,), np.uint8))
    count = len(held)
    held.clear()
    # An allocation releases cached memory of other sizes before it fails.
    big = ptxrt.empty((total // 16 * (count - 1),), np.uint8)
    assert big.nbytes
    del big
    ptxrt.trim_memory()
    assert ptxrt.memory_info().cached == 0
    check(ptxrt.quantize(x, "mxfp4"), data())


def test_memory_is_reused(gpu):
    gc.collect()  # otherwise memory dropped by other tests is freed during this one
    x = ptxrt.to_device(data())
    for _ in range(3):
        check(ptxrt.quantize(x, "mxfp4"), data())
    before = ptxrt.memory_info()
    for _ in range(1000):
        ptxrt.quantize(x, "mxfp4")
    after = ptxrt.memory_info()
    # Free memory of the device also depends on other processes.
    assert (after.used, after.cached) == (before.used, before.cached)


def test_shared_memory_is_reused_only_when_all_is_done(gpu):
    """cuCtxRecordEvent: the next user of a block does not overwrite what another library still reads."""
    torch = torch_on_gpu()
    x = data(1024, 1024)
    side = torch.cuda.Stream()
    for i in range(20):
        y = ptxrt.to_device(x + i)
        with torch.cuda.stream(side):
            theirs = torch.from_dlpack(y)
            torch.cuda._sleep(5_000_000)
            copied = theirs.clone()
        del y, theirs
        other = ptxrt.to_device(np.zeros_like(x))
        side.synchronize()
        np.testing.assert_array_equal(copied.cpu().numpy(), x + i)
        del other


# Prepared calls and graphs


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8", "nvfp4"])
def test_prepared_calls(gpu, format):
    x, y = data(), data(seed=1)
    q = ptxrt.quantize(ptxrt.to_device(x), format)
    prepared = ptxrt.prepare(ptxrt.quantize, ptxrt.to_device(x), format, out=q)
    for values in (y, x, -y):
        prepared(ptxrt.to_device(values))
        host = ptxrt.quantize(values, format)
        np.testing.assert_array_equal(q.codes.to_numpy().view(np.uint8), host.codes.view(np.uint8))
        np.testing.assert_array_equal(q.scales.to_numpy().view(np.uint8), host.scales.view(np.uint8))


def test_graphs(gpu):
    x, y = ptxrt.to_device(data()), ptxrt.empty((64, 256), np.float32)
    transpose = ptxrt.kernels()["transpose_tiled"]
    q = ptxrt.quantize(x, "mxfp4")
    prepared = ptxrt.prepare(ptxrt.dequantize, q, out=y)
    with ptxrt.graph() as g:
        ptxrt.quantize(x, "mxfp4", out=q)
        prepared(q)
        z = transpose(y)
        level = ptxrt.quantize(x, "nvfp4")
    stream = ptxrt.Stream()
    for seed in range(3):
        values = data(seed=seed)
        transpose(ptxrt.to_device(values.T.copy()), y=x)
        g.launch(stream=stream if seed else None)
        np.testing.assert_array_equal(z.to_numpy(), np.asarray(ptxrt.quantize(values, "mxfp4")).T)
        np.testing.assert_array_equal(level.codes.to_numpy(), ptxrt.quantize(values, "nvfp4").codes)
    with pytest.raises(ptxrt.ArgumentError), ptxrt.graph():
        x.to_numpy()
    check(ptxrt.quantize(x, "mxfp4"), values)


def test_graphs_of_page_locked_arrays(gpu):
    """The kernel behind a copy waits for it, also one that may begin early; the copy behind a kernel waits for that."""
    x, weight = ptxrt.empty((64, 256), np.float32), ptxrt.to_device(np.ones(256, np.float32))
    sent, received = (ptxrt.PageLocked((64, 256), np.float32) for _ in range(2))
    with ptxrt.graph() as g:
        sent.send(x)
        received.receive(ptxrt.rmsnorm(ptxrt.rmsnorm(x, weight), weight))
    for seed in range(20):
        values = data(seed=seed)
        sent.array[:] = values
        g.launch()
        ptxrt.synchronize()
        want = ptxrt.rmsnorm(ptxrt.rmsnorm(ptxrt.to_device(values), weight), weight)
        np.testing.assert_array_equal(received.array, want.to_numpy())
    later = ptxrt.PageLocked((64, 256), np.float32)
    later.receive(x)
    del sent, received, g
    gc.collect()
    ptxrt.trim_memory()
    ptxrt.synchronize()
    np.testing.assert_array_equal(later.array, values)


# Threads, processes


def test_threads(gpu):
    results, shared = {}, ptxrt.to_device(data())
    out = ptxrt.quantize(shared, "mxfp4")
    prepared = ptxrt.prepare(ptxrt.quantize, shared, "mxfp4", out=out)

    def work(index):
        with ptxrt.using(gpu.name), ptxrt.Stream():
            for i in range(50):
                x = data(seed=index)
                q = ptxrt.quantize(ptxrt.to_device(x), "mxfp4")
                mine = ptxrt.quantize(shared, "mxfp4")
                prepared(shared, out=mine)
                results[index] = (q.to_numpy(), x)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for q, x in results.values():
        np.testing.assert_array_equal(q.codes, want(x)[0])
    assert len(results) == 8


def _in_a_child(machine, send):
    with ptxrt.using(machine):
        q = ptxrt.quantize(ptxrt.to_device(data()), "mxfp4")
        send.send((q.to_numpy().codes, ptxrt.memory_info().used))


def test_processes_that_are_spawned(gpu):
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=_in_a_child, args=(gpu.name, send))
    child.start()
    assert receive.poll(120)
    codes, used = receive.recv()
    child.join(30)
    assert child.exitcode == 0 and used >= 0
    np.testing.assert_array_equal(codes, want(data())[0])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes do not fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_processes_that_are_forked_get_an_error(gpu):
    x = ptxrt.to_device(data())
    transpose = ptxrt.kernels()["transpose_tiled"]
    y = transpose(x)
    for action in (lambda: ptxrt.empty(3, np.float32), lambda: transpose(x), lambda: transpose(x, y=y), x.to_numpy):
        words = in_a_fork(action)
        assert words.startswith("MachineError: this process was forked")
    np.testing.assert_array_equal(y.to_numpy(), data().T)


# Lifetimes


@pytest.mark.skipif(
    os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") != "1", reason="other processes of this run use the same memory"
)
def test_loaded_files_give_their_memory_back(gpu, tmp_path):
    """A file with a variable of 8 MiB, loaded more often than the device could hold at once: memory is released."""
    path = tmp_path / "large.ptx"
    path.write_text(TEXT.replace(".visible", ".global .align 4 .b8 space[8388608];\n.visible", 1))
    y = ptxrt.empty(1, np.int32)
    ptxrt.load(path)["put"](1, 1, y)
    ptxrt.synchronize()
    before = ptxrt.memory_info().free
    for _ in range(300):
        ptxrt.load(path)["put"](1, 1, y)
        ptxrt.synchronize()
    gc.collect()
    ptxrt.synchronize()
    assert y.to_numpy() == 7 and before - ptxrt.memory_info().free < 300 * 8388608 // 4


def test_a_launch_in_flight_keeps_its_module(gpu, tmp_path):
    path = tmp_path / "put.ptx"
    path.write_text(TEXT)
    y, stream = ptxrt.to_device(np.zeros(1, np.int32)), ptxrt.Stream()
    busy = ptxrt.kernels()["mma_rate_bf16"]
    a, b = (ptxrt.to_device(np.ones(shape, ml_dtypes.bfloat16)) for shape in ((2, 16, 16), (4, 8, 16)))
    busy(a, b, blocks=1, steps=200_000, stream=stream)
    entry = ptxrt.load(path)["put"]
    entry(1, 1, y, stream=stream)
    del entry
    gc.collect()
    for _ in range(3):
        ptxrt.empty(100, np.uint8)
        ptxrt.Stream()
    assert y.to_numpy(stream=stream) == 7


def test_threads_launch_one_graph(gpu):
    x, y = ptxrt.to_device(data()), ptxrt.empty((256, 64), np.float32)
    transpose = ptxrt.kernels()["transpose_tiled"]
    with ptxrt.graph() as g:
        transpose(x, y=y)
        transpose(y, y=x)

    def work():
        with ptxrt.using(gpu.name):
            for _ in range(200):
                g.launch(stream=ptxrt.Stream())

    run_threads([work] * 4)
    np.testing.assert_array_equal(x.to_numpy(), data())
    np.testing.assert_array_equal(y.to_numpy(), data().T)


def test_many_streams_read_fixed_memory(gpu):
    """One stream per request; a later write waits for all of them."""
    x, transpose = ptxrt.to_device(data()), ptxrt.kernels()["transpose_tiled"]
    late = []
    for i in range(2000):
        y = transpose(x, stream=ptxrt.Stream())
        if i % 100 == 0:
            late.append(y)
    assert len(x.memory.readers) <= array.USES + 1
    transpose(ptxrt.to_device(-data().T.copy()), y=x)
    for y in late:
        np.testing.assert_array_equal(y.to_numpy(), data().T)
    np.testing.assert_array_equal(x.to_numpy(), -data())


def test_nothing_that_was_left_ends_a_capture(gpu, tmp_path):
    """Streams, graphs, modules and exported memory that die just before or during a capture."""
    path = tmp_path / "put.ptx"
    path.write_text(TEXT)
    x, transpose, y = ptxrt.to_device(data()), ptxrt.kernels()["transpose_tiled"], ptxrt.empty(1, np.int32)
    for _ in range(30):
        with ptxrt.Stream(), ptxrt.graph():
            transpose(x)
        with ptxrt.Stream():
            transpose(transpose(x))
        ptxrt.empty((64, 256), np.float32).__cuda_array_interface__
        ptxrt.load(path)["put"](1, 1, y)
        gc.collect()
        with ptxrt.graph() as g:
            z = transpose(transpose(transpose(x)))
            ptxrt.Stream()
        g.launch()
        np.testing.assert_array_equal(z.to_numpy(), data().T)


def test_garbage_of_streams_and_memory(gpu):
    """Reference cycles of arrays and their streams: memory waits for a stream that only the cycle references."""
    transpose = ptxrt.kernels()["transpose_tiled"]
    for i in range(200):
        cycle = type("Cycle", (), {})()
        cycle.itself, cycle.stream = cycle, ptxrt.Stream()
        with cycle.stream:
            cycle.x = ptxrt.to_device(data(seed=i))
            cycle.y = transpose(cycle.x)
        cycle.z = transpose(cycle.y, stream=ptxrt.Stream())
        del cycle
        if i % 7 == 0:
            gc.collect()
    gc.collect()
    np.testing.assert_array_equal(transpose(ptxrt.to_device(data())).to_numpy(), data().T)
