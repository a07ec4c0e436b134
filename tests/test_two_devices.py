"""Two devices of one machine: where data lives and work runs, copies and order between them, and what is refused.

The same tests run on two emulators, on a stand-in for the driver whose streams run as late as possible, and on two
GPUs.
"""

import gc
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import fake_cuda
import ptxrt
from ptxrt import ops
from ptxrt.driver import probe
from test_driver import install  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent
FORMATS = list(ops.quantize.QUANTIZE)
transpose = ops.transpose.transpose_tiled


def two_gpus(machine):
    """Skip the test, with a one-line reason, unless the first two GPUs support this machine."""
    there = ptxrt.machines()[machine]
    if not there.available:
        pytest.skip(f"needs two GPUs: {there}")
    if len(probe().devices) < 2:
        pytest.skip(f"needs two GPUs: there is one, {there.device}")
    try:
        for device in (0, 1):
            ptxrt.selection.backend_for(machine, device)
    except ptxrt.MachineError as error:
        pytest.skip(f"needs two GPUs: {error}")


@pytest.fixture(
    params=[
        "emulator",
        "stand-in",
        pytest.param("portable", marks=pytest.mark.gpu),
        pytest.param("native", marks=pytest.mark.gpu),
    ]
)
def two(request):
    """A machine with two devices, the first of which is current."""
    name = request.param
    if name == "stand-in":
        request.getfixturevalue("install")(fake_cuda.FakeCuda(devices=2))
        name = "portable"
    elif name != "emulator":
        two_gpus(name)
    with ptxrt.using(name, device=0) as backend:
        yield backend
        for device in (0, 1):
            ptxrt.synchronize(backend.on_device(device).own_queue)
    gc.collect()


@pytest.fixture(params=["portable", "native"])
def gpus(request):
    """Two real GPUs."""
    two_gpus(request.param)
    with ptxrt.using(request.param, device=0) as backend:
        yield backend


def data(rows=64, cols=256, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal((rows, cols), dtype=np.float32).astype(dtype)


# Where data lives and work runs


def test_to_device_using_and_inputs_choose_the_device(two):
    x = ptxrt.to_device(data(), device=1)
    y = transpose(x)
    assert (
        x.device,
        y.device,
        ptxrt.empty((3,), np.float32, device=1).device,
        ptxrt.empty((3,), np.float32).device,
    ) == (1, 1, 1, 0)
    np.testing.assert_array_equal(y.to_numpy(), data().T)
    assert ptxrt.last_launches()[-1].detail == two.on_device(1).describe() != two.describe()
    with ptxrt.using(two.name, device=1) as chosen:
        assert chosen is x.backend and ptxrt.to_device(data()).device == 1 and ptxrt.Stream().backend is chosen
        np.testing.assert_array_equal(transpose(data()), data().T)
        assert ptxrt.last_launches()[-1].detail == chosen.describe()
        with ptxrt.using(two.name, device=0):
            assert ptxrt.to_device(data()).device == 0 and transpose(x).device == 1
        assert ptxrt.to_device(data()).device == 1
    assert ptxrt.to_device(data()).device == 0


@pytest.mark.parametrize("format", FORMATS)
def test_both_devices_give_the_same_bytes(two, format):
    x = data(130, 320, dtype=ml_dtypes.bfloat16)
    results = []
    for device in (0, 1):
        q = ptxrt.quantize(ptxrt.to_device(x, device=device), format, scale_layout="128x4")
        back = ptxrt.dequantize(q, np.float16)
        assert {a.device for a in (q.codes, q.scales, back)} == {device}
        results.append([a.to_numpy().view(np.uint8) for a in (q.codes, q.scales, back)])
    for here, there in zip(*results):
        np.testing.assert_array_equal(here, there)


def test_attention_runs_on_the_other_device(two):
    rng = np.random.default_rng(5)
    host = [rng.standard_normal((1, 2, rows, 32), np.float32).astype(np.float16) for rows in (40, 72, 72)]
    outputs = [ptxrt.attention(*(ptxrt.to_device(x, device=device) for x in host), causal=True) for device in (0, 1)]
    assert [out.device for out in outputs] == [0, 1]
    np.testing.assert_array_equal(*(out.to_numpy().view(np.uint16) for out in outputs))


# Copies and order between devices


def test_copies_between_devices_come_after_what_writes(two):
    """A chain between the two devices; each link reads what another stream has just written."""
    streams = {device: [ptxrt.Stream(device=device), None, ptxrt.Stream(device=device)] for device in (0, 1)}
    x = data(96, 160)
    y = ptxrt.to_device(x)
    for i in range(60):
        y = transpose(y, stream=streams[y.device][i % 3])
        y = ptxrt.to_device(y, device=1 - y.device, stream=streams[1 - y.device][(i + 1) % 3])
    assert y.device == 0
    np.testing.assert_array_equal(y.to_numpy(), x)


def test_what_was_copied_may_be_overwritten_at_once(two):
    """The copy is ordered in the target's stream; the next writer of the source waits for it."""
    x, y = ptxrt.to_device(data(512, 512)), ptxrt.to_device(data(512, 512, seed=1))
    for i in range(10):
        copied = ptxrt.to_device(x, device=1)
        transpose(y, y=x)
        np.testing.assert_array_equal(copied.to_numpy(), data(512, 512) if i == 0 else data(512, 512, seed=1).T)


def test_memory_of_a_copy_is_not_given_out_too_early(two):
    x = data(512, 512)
    for i in range(10):
        source = ptxrt.to_device(x + i)
        copied = ptxrt.to_device(source, device=1)
        del source
        other = ptxrt.to_device(np.zeros_like(x))  # takes the block that is still being read
        np.testing.assert_array_equal(copied.to_numpy(), x + i)
        del other


def test_streams_wait_across_devices(two):
    here, there = ptxrt.Stream(device=0), ptxrt.Stream(device=1)
    x = ptxrt.to_device(data(), device=1)
    y = transpose(x, stream=there)
    event = there.record()
    here.wait(event)
    here.wait(there)
    here.synchronize()
    assert event.done and event.backend is there.backend
    np.testing.assert_array_equal(y.to_numpy(stream=there), data().T)


def test_what_stays_on_its_device_is_not_copied(two):
    x = ptxrt.to_device(data(), device=1)
    assert ptxrt.to_device(x, device=1) is x
    with ptxrt.using(two.name, device=1):
        assert ptxrt.to_device(x) is x
    assert ptxrt.to_device(x) is x  # device arrays keep their device by default


def test_an_array_interface_is_taken_on_the_device_of_its_address(two):
    """The interface does not name a device. Arrays of the emulator have no such interface."""
    if not two.is_cuda:
        with pytest.raises(AttributeError, match="the emulator's memory is no CUDA memory"):
            ptxrt.to_device(data(), device=1).__cuda_array_interface__
        return
    for device in (1, 0):
        x = ptxrt.to_device(data(), device=device)
        taken = ptxrt.to_device(SimpleNamespace(__cuda_array_interface__=x.__cuda_array_interface__))
        assert (taken.device, taken.address) == (device, x.address)
        np.testing.assert_array_equal(transpose(taken).to_numpy(), data().T)


# Memory


def test_each_device_has_its_own_pool(two):
    def used():
        gc.collect()
        return [ptxrt.memory_info(device=device).used for device in (0, 1)]

    ptxrt.synchronize()
    before = used()
    x = ptxrt.empty((1 << 20,), np.uint8, device=1)
    assert [a - b for a, b in zip(used(), before)] == [0, x.nbytes]
    there = x.address
    del x
    assert used() == before
    if two.is_cuda:
        assert ptxrt.memory_info(device=1).cached >= 1 << 20
        again = ptxrt.empty((1 << 20,), np.uint8, device=1)
        assert again.address == there
        here = ptxrt.empty((1 << 20,), np.uint8, device=0)
        assert two.device_at(again.address) == 1 and two.device_at(here.address) == 0
        cached = ptxrt.memory_info(device=0).cached
        del again
        ptxrt.trim_memory(device=1)
        assert ptxrt.memory_info(device=1).cached == 0 and ptxrt.memory_info(device=0).cached == cached


def test_a_full_device_leaves_the_other_usable(two):
    if not two.is_cuda:
        with pytest.raises(ptxrt.PtxError):
            ptxrt.empty((1 << 60,), np.uint8, device=1)
    else:
        with pytest.raises(ptxrt.OutOfMemory, match="device 1"):
            ptxrt.empty((2 * ptxrt.memory_info(device=1).total,), np.uint8, device=1)
    for device in (0, 1):
        np.testing.assert_array_equal(transpose(ptxrt.to_device(data(), device=device)).to_numpy(), data().T)


# Prepared calls, graphs, traces


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_prepared_calls_and_graphs_stay_on_the_example_s_device(two, format):
    x = ptxrt.to_device(data(), device=1)
    q = ptxrt.quantize(x, format)
    prepared = ptxrt.prepare(ptxrt.quantize, x, format, out=q)
    prepared(ptxrt.to_device(data(seed=1), device=1))
    np.testing.assert_array_equal(q.codes.to_numpy(), ptxrt.quantize(data(seed=1), format).codes)
    with pytest.raises(ptxrt.ArgumentError):
        prepared(ptxrt.to_device(data(), device=0))
    with ptxrt.using(two.name, device=1), ptxrt.graph() as g:
        ptxrt.quantize(x, format, out=q)
    g.launch()
    np.testing.assert_array_equal(q.codes.to_numpy(), ptxrt.quantize(data(), format).codes)
    with pytest.raises(ptxrt.ArgumentError, match="the graph is for"), ptxrt.graph():
        ptxrt.quantize(x, format, out=q)  # a graph of device 0
    with pytest.raises(ptxrt.ArgumentError, match="stream of that device"):
        g.launch(stream=ptxrt.Stream(device=0))


def test_a_trace_tells_devices_apart(two):
    with ptxrt.trace(timing=True) as t:
        for device in (1, 0, 1):
            transpose(ptxrt.to_device(data(), device=device))
    assert [row["detail"] for row in t.rows()] == [two.on_device(device).describe() for device in (1, 0, 1)]
    assert all(row["milliseconds"] >= 0 for row in t.rows())


# Refusals


def test_devices_are_not_mixed(two):
    x, y = ptxrt.to_device(data()), ptxrt.empty((256, 64), np.float32, device=1)
    q = ptxrt.quantize(ptxrt.to_device(data(), device=1), "mxfp4")
    start, stop = ptxrt.Event(device=0).record(), ptxrt.Event(device=1).record()
    for call, words in [
        (lambda: transpose(x, y=y), "bring them to one device with ptxrt.to_device"),
        (lambda: ptxrt.quantize(x, "mxfp4", out=q), "device"),
        (lambda: ptxrt.dequantize(q, out=x), "device"),
        (
            lambda: ptxrt.attention(
                *(ptxrt.to_device(np.ones((1, 1, 32, 32), np.float32), device=d) for d in (0, 1, 0))
            ),
            "bring them to one device",
        ),
        (lambda: transpose(x, stream=ptxrt.Stream(device=1)), "pass a stream of that device"),
        (lambda: y.to_numpy(stream=ptxrt.Stream(device=0)), "pass a stream of that device"),
        (lambda: start.elapsed_time(stop), "of the same device"),
    ]:
        with pytest.raises(ptxrt.ArgumentError, match=words):
            call()
    np.testing.assert_array_equal(transpose(x).to_numpy(), data().T)


def test_a_stream_s_block_holds_for_its_own_device_alone(two):
    """An array of another device neither uses the block's stream nor is refused: it uses its own device's stream."""
    x = ptxrt.to_device(data(), device=1)
    with ptxrt.Stream(device=0):
        y = transpose(x)
    np.testing.assert_array_equal(y.to_numpy(), data().T)


# Threads, processes, other libraries


def test_a_thread_for_each_device(two):
    failures, name = [], two.name

    def work(device):
        try:
            with ptxrt.using(name, device=device), ptxrt.Stream():
                for seed in range(20):
                    x = ptxrt.to_device(data(seed=seed))
                    y = ptxrt.to_device(transpose(x), device=1 - device)
                    assert (x.device, y.device) == (device, 1 - device)
                    np.testing.assert_array_equal(y.to_numpy(), data(seed=seed).T)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i % 2,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_lender_lends_with_its_device_current(install, lent):
    """An exporter is called with its device current, as PyTorch needs; afterwards the previous device is current
    again."""
    fake = install(fake_cuda.FakeCuda(devices=2))

    class Lender:
        def __dlpack_device__(self):
            return 2, 1

        def __dlpack__(self, **named):
            assert fake.contexts[-1].device == 1
            return x.__dlpack__(**named)

    with ptxrt.using("portable", device=0):
        x = ptxrt.to_device(data(), device=1)
        taken = ptxrt.to_device(Lender())
        assert (taken.device, taken.address) == (1, x.address) and fake.contexts[-1].device == 0
        np.testing.assert_array_equal(transpose(taken).to_numpy(), data().T)
        del taken
        gc.collect()
        ptxrt.trim_memory(device=1)  # returns the imported memory
        assert not lent()


@pytest.mark.gpu
def test_a_process_ends_well_with_both_devices_in_use(gpus):
    code = (
        "import numpy as np, ptxrt; ptxrt.using('MACHINE'); x = np.ones((64, 64), np.float32)\n"
        "kept = [ptxrt.quantize(ptxrt.to_device(x, device=d), 'mxfp4') for d in (0, 1)]; streams = "
        "[ptxrt.Stream(device=d) for d in (0, 1)]"
    )
    done = subprocess.run(
        [sys.executable, "-c", code.replace("MACHINE", gpus.name)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.gpu
def test_pytorch_on_the_other_device(gpus):
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs: PyTorch finds fewer")
    tensor = torch.from_numpy(data()).to("cuda:1")
    with torch.cuda.device(1):
        torch.cuda._sleep(50_000_000)  # still pending: without a wait the next reader gets other values
    x = tensor * 2
    ours = ptxrt.to_device(x)
    assert ours.address == x.data_ptr() and ours.device == 1 and torch.cuda.current_device() == 0
    q = ptxrt.quantize(x, "mxfp4")
    codes = torch.from_dlpack(q.codes)
    assert (
        codes.device == torch.device("cuda:1")
        and codes.data_ptr() == q.codes.address
        and q.codes.__dlpack_device__() == (2, 1)
    )
    np.testing.assert_array_equal(codes.cpu().numpy(), ptxrt.quantize(data() * 2, "mxfp4").codes)
    copied = ptxrt.to_device(x, device=0)
    assert copied.device == 0
    np.testing.assert_array_equal(copied.to_numpy(), data() * 2)
    assert float((torch.ones(4, device="cuda:0") * 3).sum()) == 12  # PyTorch's current device is unchanged
    with pytest.raises(ptxrt.ArgumentError, match="bring them to one device"):
        transpose(x, y=torch.empty(256, 64, device="cuda:0"))


@pytest.mark.gpu
def test_a_clock_times_the_other_device(gpus):
    from ptxrt.bench.quantizers import quantizer_report

    with ptxrt.using(gpus.name, device=1):
        report = quantizer_report("quantize", formats=["mxfp4"], dtypes=["f32"], shapes=[(256, 1024)], repeat=3)
    assert report["machine"]["device"] == 1 and all(0 < row["milliseconds"] < 100 for row in report["rows"])
