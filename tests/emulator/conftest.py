"""Run a few PTX instructions in isolation: NumPy arrays fill the input registers and receive the output registers."""

import math

import numpy as np
import pytest

_DTYPES = {"b8": np.uint8, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64, "f32": np.float32, "f64": np.float64}
_LINEAR_THREAD = """
    mov.u32 %thread, %tid.x;
    mov.u32 %block, %ctaid.x;
    mov.u32 %threads, %ntid.x;
    mad.lo.u32 %thread, %block, %threads, %thread;
    cvt.u64.u32 %index, %thread;
"""


def entry_text(body: str, inputs: dict, outputs: dict, declarations: str = "") -> str:
    """A PTX module with one entry `alone`: each thread loads the input registers, runs `body` and stores the
    outputs."""
    registers, loads, stores = [], [], []
    names = [*inputs, *(f"out_{name}" for name in outputs)]
    for name in inputs:
        type_, values = inputs[name]
        registers.append(f".reg .{type_} %{name};")
        stored = "b32" if type_ == "pred" else type_
        size = np.dtype(_DTYPES[stored]).itemsize
        loads.append(f"ld.param.u64 %base, [param_{name}]; mad.lo.u64 %base, %index, {size}, %base;")
        if type_ == "pred":
            loads.append(f"ld.global.b32 %word, [%base]; setp.ne.u32 %{name}, %word, 0;")
        else:
            loads.append(f"ld.global.{stored} %{name}, [%base];")
    for name, type_ in outputs.items():
        if name not in inputs:
            registers.append(f".reg .{type_} %{name};")
        stored = "b32" if type_ == "pred" else type_
        size = np.dtype(_DTYPES[stored]).itemsize
        stores.append(f"ld.param.u64 %base, [param_out_{name}]; mad.lo.u64 %base, %index, {size}, %base;")
        if type_ == "pred":
            stores.append(f"selp.u32 %word, 1, 0, %{name}; st.global.b32 [%base], %word;")
        else:
            stores.append(f"st.global.{stored} [%base], %{name};")
    parameters = ",\n".join(f".param .u64 param_{name}" for name in names)
    lines = "\n    ".join
    return f"""
.version 9.0
.target sm_120a
.address_size 64
{declarations}
.visible .entry alone(
{parameters}
)
{{
    .reg .b32 %thread, %block, %threads, %word;
    .reg .b64 %index, %base;
    {lines(registers)}
    {_LINEAR_THREAD}
    {lines(loads)}
    {body}
    {lines(stores)}
    ret;
}}
"""


@pytest.fixture(scope="session")
def execute():
    """execute(body, inputs, outputs): run PTX on every thread and return the output registers by name.

    `inputs` maps a register's name to (type, values of all threads), `outputs` to its type; the text writes both as
    %name. `block` is the number of threads in a block, at most 128 by default. Further keywords are options of the
    emulator.
    """
    from ptxrt.emulator import Emulator

    def run(body, inputs, outputs, *, block=None, declarations="", shared_bytes=0, threads=None, **options):
        counts = {len(np.atleast_1d(values)) for _, values in inputs.values()}
        threads = threads or (max(counts) if counts else 32)
        block = block or math.gcd(threads, 128)
        assert threads % block == 0
        emulator = Emulator(**options)
        module = emulator.load_text(entry_text(body, inputs, outputs, declarations), name="alone.ptx")
        addresses = []
        for type_, values in inputs.values():
            dtype = _DTYPES["b32" if type_ == "pred" else type_]
            values = np.ascontiguousarray(np.broadcast_to(np.asarray(values), threads))
            values = (
                values.view(dtype)
                if type_ != "pred" and values.dtype.itemsize == np.dtype(dtype).itemsize
                else values.astype(dtype)
            )
            addresses.append(emulator.alloc(values.nbytes))
            emulator.write(addresses[-1], values)
        results = {}
        for name, type_ in outputs.items():
            results[name] = np.empty(threads, _DTYPES["b32" if type_ == "pred" else type_])
            addresses.append(emulator.alloc(results[name].nbytes))
        parameters = np.array(addresses, np.uint64).tobytes()
        emulator.launch(
            module.entries["alone"],
            grid=(threads // block, 1, 1),
            block=(block, 1, 1),
            shared_bytes=shared_bytes,
            params=parameters,
        )
        for address, (name, type_) in zip(addresses[len(inputs) :], outputs.items()):
            emulator.read(address, results[name])
            if type_ == "pred":
                results[name] = results[name].astype(bool)
        return results

    return run
