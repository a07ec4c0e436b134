"""The driver backend and the modules above it, on a stand-in for the CUDA driver."""

import gc
import sys
import threading
from types import SimpleNamespace
from weakref import WeakValueDictionary

import ml_dtypes
import numpy as np
import pytest

import ptxrt
from ptxrt import driver, ops, selection

pytest.importorskip("cuda.bindings.driver", reason="cuda-python is not installed")

import fake_cuda

RESULT = fake_cuda.real.CUresult


@pytest.fixture
def install(monkeypatch):
    """Install a fake driver in place of the real one, without state of earlier drivers."""

    def put(fake):
        monkeypatch.setattr("cuda.bindings.driver", fake)
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", fake)
        monkeypatch.setattr(
            driver, "_library", lambda: SimpleNamespace(cuPointerGetAttribute=fake.library_pointer_attribute)
        )
        return fake

    monkeypatch.setattr(selection, "_opened", WeakValueDictionary())
    monkeypatch.setattr(selection, "_kept", {})
    monkeypatch.setattr(selection, "_defaults", {})
    monkeypatch.delenv("PTXRT_MACHINE", raising=False)
    driver.probe.cache_clear()
    yield put
    gc.collect()
    driver.probe.cache_clear()


@pytest.fixture
def cuda(install):
    """A fake sm_90 device, selected as the machine `portable`."""
    fake = install(fake_cuda.FakeCuda())
    with ptxrt.using("portable"):
        yield fake


# Which machines exist


def test_a_computer_without_driver_gets_the_emulator(install):
    install(fake_cuda.FakeCuda()).fail["cuInit"] = RuntimeError("no libcuda")
    assert selection.default_machine() == "emulator"
    assert "no CUDA driver" in ptxrt.machines()["native"].detail


def test_a_computer_without_device_gets_the_emulator(install):
    install(fake_cuda.FakeCuda()).fail["cuInit"] = RESULT.CUDA_ERROR_NO_DEVICE
    assert selection.default_machine() == "emulator"


def test_an_old_driver_is_an_error_that_names_the_new_one(install):
    install(fake_cuda.FakeCuda(version=12080))
    with pytest.raises(ptxrt.MachineError, match=r"supports CUDA 12\.8; driver 580 or newer.*using\('emulator'\)"):
        ptxrt.quantize(np.zeros((1, 32), np.float32), "mxfp4")
    with ptxrt.using("emulator") as chosen:
        assert chosen.name == "emulator"


def test_a_broken_driver_is_an_error(install):
    install(fake_cuda.FakeCuda()).fail["cuInit"] = RESULT.CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
    with pytest.raises(ptxrt.MachineError, match="cuInit returned CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"):
        selection.default_machine()


def test_an_old_gpu_is_an_error(install):
    install(fake_cuda.FakeCuda(capability=(7, 5)))
    with pytest.raises(ptxrt.MachineError, match=r"needs sm_80 or newer; there is Fake GPU \(sm_75\)"):
        selection.default_machine()


@pytest.mark.parametrize(
    "capability, machine", [((9, 0), "portable"), ((12, 0), "native"), ((12, 1), "native"), ((10, 0), "portable")]
)
def test_the_default_follows_the_gpu(install, capability, machine):
    install(fake_cuda.FakeCuda(capability=capability))
    assert selection.default_machine() == machine
    assert ptxrt.machines()[machine].available


def test_what_is_not_there_is_refused_with_its_reason(install):
    install(fake_cuda.FakeCuda(capability=(9, 0)))
    with pytest.raises(
        ptxrt.MachineError, match=r"native is not available: needs sm_120 or sm_121; there is Fake GPU \(sm_90\)"
    ):
        ptxrt.using("native")


def test_the_environment_chooses(install, monkeypatch):
    install(fake_cuda.FakeCuda())
    monkeypatch.setenv("PTXRT_MACHINE", "emulator")
    assert selection.current().name == "emulator"
    monkeypatch.setenv("PTXRT_MACHINE", "abacus")
    with pytest.raises(ptxrt.ArgumentError, match="'abacus'; there is native, portable, emulator"):
        selection.current()


# Launches


@pytest.mark.parametrize(
    "name",
    ["quantize_mxfp4", "dequantize_mxfp4", "transpose_tiled", "thread_identity", "attention_mxfp4_bf16_in_kernel"],
)
def test_parameters_arrive_as_the_entry_expects(cuda, name):
    kernel = ptxrt.kernels()[name]
    example = kernel.example(kernel.cases[-1])
    got = kernel(**example)
    want = kernel.reference(**example)
    for output, (name, wanted) in zip(got if isinstance(got, tuple) else (got,), want.items()):
        np.testing.assert_array_equal(output, wanted.astype(output.dtype))


def test_native_and_portable_load_their_own_files(install):
    for capability, machine in (((12, 0), "native"), ((12, 0), "portable"), ((9, 0), "portable"), ((8, 6), "portable")):
        fake = install(fake_cuda.FakeCuda(capability=capability))
        driver.probe.cache_clear()
        selection._opened.clear()
        selection._kept.clear()
        selection._defaults.clear()
        with ptxrt.using(machine):
            ops.transpose.transpose_naive(np.zeros((2, 3), np.float32))
        (image,) = next(arguments for name, arguments in fake.calls if name == "cuModuleLoadData")
        assert image == ptxrt.units.image("transpose_naive", machine == "portable", capability)
        if machine == "native" or capability < (12, 0):
            assert image == ptxrt.units.fatbin_path("transpose_naive", machine == "portable").read_bytes()


def test_the_receipt_says_what_ran(cuda):
    ops.transpose.transpose_tiled(np.zeros((40, 70), np.float32))
    receipt = ptxrt.last_launches()[-1]
    assert (receipt.kernel, receipt.machine, receipt.entry) == ("transpose_tiled", "portable", "transpose_tiled")
    assert receipt.grid == (3, 2, 1) and receipt.bytes_moved == 2 * 40 * 70 * 4
    assert "portable, Fake GPU" in str(receipt)


def test_large_shared_memory_is_asked_for_once(cuda):
    kernel = ptxrt.kernels()["attention_mxfp4_bf16_in_kernel"]
    example = kernel.example(next(c for c in kernel.cases if c.axes["dim"] == 256))
    kernel(**example)
    shared = ptxrt.last_launches()[-1].shared_bytes
    asked = [arguments[2] for name, arguments in cuda.calls if name == "cuFuncSetAttribute"]
    assert asked == ([shared] if shared > 49152 else [])
    kernel(**example)
    assert cuda.names().count("cuFuncSetAttribute") == len(asked)


def test_a_wrong_shared_size_names_the_limit(cuda):
    loaded = selection.current().module("transpose_tiled")
    cuda.fail["cuFuncSetAttribute"] = RESULT.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(
        ptxrt.DriverError,
        match="transpose_tiled needs 200000 bytes of shared memory, Fake GPU gives a block at most 101376",
    ):
        selection.current().packet(loaded.entries["transpose_tiled"], (1, 1, 1), (32, 1, 1), 200000, b"")


# Errors


def test_a_result_is_named_with_its_call_and_a_hint(cuda):
    cuda.fail["cuMemAlloc"] = RESULT.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(ptxrt.DriverError, match="cuMemAlloc.*CUDA_ERROR_OUT_OF_MEMORY.*split the call") as caught:
        ptxrt.empty((3, 4), np.float32)
    assert (caught.value.result, caught.value.code, caught.value.call) == ("CUDA_ERROR_OUT_OF_MEMORY", 2, "cuMemAlloc")
    del cuda.fail["cuMemAlloc"]
    assert ptxrt.empty((3, 4), np.float32).shape == (3, 4)


def test_code_for_another_gpu_is_explained(cuda):
    cuda.fail["cuModuleLoadData"] = RESULT.CUDA_ERROR_NO_BINARY_FOR_GPU
    with pytest.raises(ptxrt.DriverError, match="transpose_naive, portable.*holds no code for this GPU"):
        ops.transpose.transpose_naive(np.zeros((2, 3), np.float32))


def test_what_a_kernel_did_wrong_names_the_launch(cuda):
    y = np.full((3, 2), 7, np.float32)
    ops.transpose.transpose_naive(np.zeros((2, 3), np.float32))
    cuda.fail["cuStreamSynchronize"] = RESULT.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(ptxrt.DriverError, match="latest launch: transpose_naive.*CUDA_ERROR_ILLEGAL_ADDRESS.*restart"):
        ops.transpose.transpose_naive(np.zeros((2, 3), np.float32), y=y)
    assert (y == 7).all()


def test_an_output_is_written_whole_or_not_at_all(cuda):
    x = np.ones((4, 32), np.float32)
    out = ptxrt.quantize(x * 0, "mxfp4")
    cuda.fail["cuLaunchKernel"] = RESULT.CUDA_ERROR_LAUNCH_FAILED
    with pytest.raises(ptxrt.LaunchError):
        ptxrt.quantize(x, "mxfp4", out=out)
    assert not out.codes.any() and not out.scales.any()


# Device arrays


def test_device_arrays_stay_on_the_device_and_nothing_waits(cuda, rng):
    x = rng.standard_normal((8, 64)).astype(np.float32)
    on_device = ptxrt.to_device(x)
    before = cuda.names().count("cuStreamSynchronize")
    q = ptxrt.quantize(on_device, "mxfp4")
    y = ptxrt.dequantize(q, ml_dtypes.bfloat16)
    assert cuda.names().count("cuStreamSynchronize") == before
    assert isinstance(q.codes, ptxrt.DeviceArray) and y.machine == "portable" and y.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(y.to_numpy(), ptxrt.dequantize(ptxrt.quantize(x, "mxfp4"), "bfloat16"))


def test_out_on_the_device_is_written_there(cuda, rng):
    x = rng.standard_normal((4, 3)).astype(np.float32)
    y = ptxrt.empty((3, 4), np.float32)
    assert ops.transpose.transpose_naive(ptxrt.to_device(x), y=y) is y
    np.testing.assert_array_equal(y.to_numpy(), x.T)


def test_mixed_and_overlapping_outputs_are_refused(cuda):
    x = ptxrt.to_device(np.zeros((4, 4), np.float32))
    with pytest.raises(ptxrt.ArgumentError, match="y is a NumPy array, but x is on the device"):
        ops.transpose.transpose_naive(x, y=np.zeros((4, 4), np.float32))
    with pytest.raises(ptxrt.ArgumentError, match="y and x overlap"):
        ops.transpose.transpose_naive(x, y=x)


def test_arrays_of_another_machine_are_refused(cuda):
    x = ptxrt.to_device(np.zeros((4, 4), np.float32))
    with (
        ptxrt.using("emulator"),
        pytest.raises(ptxrt.ArgumentError, match="x is on portable, Fake GPU, but the call runs on emulator"),
    ):
        ops.transpose.transpose_naive(x)


def test_memory_is_given_back_with_the_last_array(cuda):
    x = ptxrt.to_device(np.zeros((4, 4), np.float32))
    view = x.reshape(16)
    address = x.address
    del x
    assert ptxrt.memory_info().used == 512 and ptxrt.empty((4, 4), np.float32).address != address
    del view
    assert ptxrt.memory_info().used == 0 and ptxrt.empty((4, 4), np.float32).address == address


def test_the_context_is_borrowed_and_given_back(cuda):
    other = fake_cuda.Handle()
    cuda.contexts.append(other)
    ops.transpose.transpose_naive(np.zeros((2, 3), np.float32))
    assert cuda.contexts[-1] is other
    cuda.contexts.clear()
    results = []
    thread = threading.Thread(target=lambda: results.append(ptxrt.selection.current().name))
    thread.start()
    thread.join()
    assert results == ["portable"]


# Streams


def test_every_kind_of_stream_reaches_the_launch(cuda):
    x = ptxrt.to_device(np.zeros((2, 3), np.float32))

    class Theirs:
        def __cuda_stream__(self):
            return (0, 77)

    own = selection.current().queue().handle
    for stream, handle in ((None, own), (0, 0), (55, 55), (np.int64(56), 56), (Theirs(), 77)):
        ops.transpose.transpose_naive(x, stream=stream)
        launch = [arguments for name, arguments in cuda.calls if name == "cuLaunchKernel"][-1]
        assert int(launch[8]) == handle
    with pytest.raises(ptxrt.ArgumentError, match="stream is 'mine'"):
        ops.transpose.transpose_naive(x, stream="mine")


def test_a_reader_on_another_stream_waits_for_the_writer(cuda):
    y = ops.transpose.transpose_naive(ptxrt.to_device(np.zeros((2, 3), np.float32)), stream=55)
    cuda.calls.clear()
    ops.transpose.transpose_naive(y, stream=66)
    names = cuda.names()
    assert names.index("cuStreamWaitEvent") < names.index("cuLaunchKernel")
    (stream, event, _flags) = next(arguments for name, arguments in cuda.calls if name == "cuStreamWaitEvent")
    assert stream == 66 and event.stream == 55
    cuda.calls.clear()
    ops.transpose.transpose_naive(y, stream=55)
    assert "cuStreamWaitEvent" not in cuda.names()


# __cuda_array_interface__


class Foreign:
    """An array of another library."""

    def __init__(self, interface):
        self.__cuda_array_interface__ = interface


def test_arrays_go_out_and_come_back(cuda, rng):
    x = rng.standard_normal((4, 6)).astype(np.float32)
    ours = ptxrt.to_device(x)
    interface = ours.__cuda_array_interface__
    assert interface == dict(
        version=3,
        shape=(4, 6),
        typestr="<f4",
        data=(ours.address, False),
        strides=None,
        stream=selection.current().queue().handle,
    )
    borrowed = ptxrt.to_device(Foreign(interface))
    assert borrowed.address == ours.address
    np.testing.assert_array_equal(borrowed.to_numpy(), x)
    np.testing.assert_array_equal(ops.transpose.transpose_naive(Foreign(interface)).to_numpy(), x.T)


def test_bfloat16_goes_out_as_uint16_and_comes_in_as_pytorch_names_it(cuda):
    ours = ptxrt.to_device(np.ones((2, 32), ml_dtypes.bfloat16))
    interface = ours.__cuda_array_interface__
    assert interface["typestr"] == "<u2"
    back = ptxrt.to_device(Foreign({**interface, "typestr": "<V2"}))
    assert back.dtype == ml_dtypes.bfloat16
    assert ptxrt.to_device(Foreign(interface)).view("bfloat16").dtype == ml_dtypes.bfloat16


def waits(cuda):
    """(waiting stream, awaited stream) of every wait on the device so far."""
    return [
        (int(stream), event.stream)
        for name, (stream, event, _) in ((n, a) for n, a in cuda.calls if n == "cuStreamWaitEvent")
    ]


@pytest.mark.parametrize("stream, lender", [(2, 2), (66, 66), ("absent", 1), (None, None)])
def test_lenders_and_launches_wait_for_each_other(cuda, stream, lender):
    ours = ptxrt.to_device(np.zeros((2, 3), np.float32))
    interface = {**ours.__cuda_array_interface__, "stream": stream}
    if stream == "absent":
        del interface["stream"]
    own = selection.current().queue().handle
    cuda.calls.clear()
    ops.transpose.transpose_naive(Foreign(interface))
    assert waits(cuda) == ([(own, lender), (lender, own)] if lender else [])
    cuda.calls.clear()
    ops.transpose.transpose_naive(Foreign(interface), stream=66)
    assert waits(cuda) == ([(66, lender), (lender, 66)] if lender not in (None, 66) else [])


def test_the_stream_of_a_lender_is_not_queried_after_it(cuda):
    """A lender may destroy its stream after the array that it lent; the driver crashes at a query of such a stream."""
    ours, stream = ptxrt.to_device(np.zeros((2, 3), np.float32)), ptxrt.Stream()
    handle = stream.queue.handle
    ops.transpose.transpose_naive(Foreign({**ours.__cuda_array_interface__, "stream": handle}))
    del stream
    gc.collect()
    ptxrt.synchronize()
    assert handle in cuda.destroyed
    selection.current().everything()


def test_a_result_written_for_another_library_is_ordered_before_its_stream(cuda):
    y = ptxrt.empty((3, 2), np.float32)
    theirs = Foreign({**y.__cuda_array_interface__, "stream": 2})
    cuda.calls.clear()
    ops.transpose.transpose_naive(ptxrt.to_device(np.zeros((2, 3), np.float32)), y=theirs)
    assert waits(cuda)[-1] == (2, selection.current().queue().handle)


def test_what_goes_out_is_ordered_before_the_default_stream(cuda):
    y = ops.transpose.transpose_naive(ptxrt.to_device(np.zeros((2, 3), np.float32)), stream=55)
    own = selection.current().queue().handle
    cuda.calls.clear()
    assert y.__cuda_array_interface__["stream"] == own
    assert waits(cuda) == [(own, 55), (1, own)]


def test_foreign_arrays_that_do_not_fit_are_refused(cuda):
    ours = ptxrt.to_device(np.zeros((4, 4), np.float32))
    interface = ours.__cuda_array_interface__
    with pytest.raises(ptxrt.ArgumentError, match=r"strides of \[4, 16\] bytes"):
        ops.transpose.transpose_naive(Foreign({**interface, "strides": (4, 16)}))
    with pytest.raises(ptxrt.ArgumentError, match="x starts at 0x.*4, which is no multiple of 16 bytes.*Copy it"):
        aligned = ours.address // 16 * 16
        ops.transpose.transpose_naive(Foreign({**interface, "data": (aligned + 4, False)}))
    with pytest.raises(ptxrt.ArgumentError, match="masked"):
        ptxrt.to_device(Foreign({**interface, "mask": ours}))
    with pytest.raises(ptxrt.ArgumentError, match="cannot be read"):
        ptxrt.to_device(Foreign({"shape": (1,)}))
    with pytest.raises(ptxrt.ArgumentError, match="y is read-only"):
        ops.transpose.transpose_naive(
            ptxrt.to_device(np.zeros((4, 4), np.float32)), y=Foreign({**interface, "data": (ours.address, True)})
        )
    with (
        ptxrt.using("emulator"),
        pytest.raises(ptxrt.ArgumentError, match="is a CUDA array, but the machine is the emulator"),
    ):
        ptxrt.to_device(Foreign(interface))


# Programs


def test_a_binary_is_launched_by_the_sizes_of_its_parameters(cuda):
    program = ptxrt.load(ptxrt.units.fatbin_path("transpose_naive", True))
    assert list(program) == ["transpose_naive"]
    x, y = np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros((3, 2), np.float32)
    sizes = [param.size for param in program["transpose_naive"]._entry.params]
    rows, cols = (np.dtype(f"i{size}").type(n) for size, n in zip(sizes[2:], (2, 3)))
    program["transpose_naive"](1, (32, 8), x, y, rows, cols)
    np.testing.assert_array_equal(y, x.T)
    with pytest.raises(ptxrt.ArgumentError, match="argument 2 is 2; the parameter is . bytes.*NumPy scalar"):
        program["transpose_naive"](1, (32, 8), x, y, 2, 3)
    with pytest.raises(ptxrt.ArgumentError, match="a int16 of 2 bytes"):
        program["transpose_naive"](1, (32, 8), x, y, np.int16(2), cols)


def test_a_text_is_launched_by_the_types_of_its_parameters(cuda, tmp_path):
    path = tmp_path / "transpose.ptx"
    path.write_text(ptxrt.units.text_path("transpose_naive", True).read_text())
    x, y = np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros((3, 2), np.float32)
    ptxrt.load(path)["transpose_naive"](1, (32, 8), x, y, 2, 3)
    np.testing.assert_array_equal(y, x.T)


def test_a_text_that_only_the_gpu_understands_runs_without_types(cuda, tmp_path, monkeypatch):
    path = tmp_path / "transpose.ptx"
    path.write_text(ptxrt.units.text_path("transpose_naive", True).read_text())

    def refuse(text, name):
        raise ptxrt.PtxError("unknown directive")

    monkeypatch.setattr(driver, "parse", refuse)
    assert [param.type for param in ptxrt.load(path)["transpose_naive"]._entry.params] == [None] * 4
