"""Thousands of random wrong calls of quantization: each raises a typed error or gives the right bytes."""

import random

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

import ptxrt
from ptxrt.blocks import BLOCK_FORMATS
from ptxrt.commands import main
from ptxrt.ops.quantize import quantize_reference

KERNELS = [k for name, k in ptxrt.kernels().items() if "quantize_" in name or k.__module__.endswith("ops.scales")]


class Odd:
    """An object that no parameter accepts."""

    def __repr__(self):
        return "Odd()"


def arrays():
    """Arrays, most of them wrong for some call, and objects that are no arrays."""
    x = np.linspace(-7, 9, 128, dtype=np.float32).reshape(2, 64)
    return [
        x,
        x.astype(np.float16),
        x.astype(ml_dtypes.bfloat16),
        x.reshape(1, 128),
        x.reshape(4, 32),
        x.T,
        x[:, ::2],
        x[0],
        x[:, :33],
        x.reshape(2, 2, 32),
        x[:0],
        x[:, :0],
        x[0, 0],
        np.float32(3),
        np.zeros((0,), np.float32),
        np.asfortranarray(x),
        x.astype(np.float64),
        x.astype(np.int32),
        x.astype(np.uint8),
        x.astype(complex),
        x > 0,
        x.astype("S3"),
        x.astype(object),
        x.astype(">f4"),
        np.zeros(3, [("a", "f4")]),
        np.array(["text"]),
        np.array([None]),
        np.ma.masked_array(x, x > 0),
        x.tolist(),
        [[1.0], [2.0, 3.0]],
        "text",
        b"bytes",
        None,
        3,
        2.5,
        Odd(),
        {},
        [],
        (),
        {"codes": x},
        np.nan,
        range(32),
        type,
    ]


def device_arrays():
    x = np.linspace(-7, 9, 128, dtype=np.float32).reshape(2, 64)
    return [
        ptxrt.to_device(a)
        for a in (x, x.astype(ml_dtypes.bfloat16), x.astype(np.float64), x[0], x[:, :33], x.view(np.uint8), x[:0])
    ]


NUMBERS = [
    1,
    0,
    1,
    1,
    -1,
    2,
    7,
    -9,
    2**40,
    -(2**70),
    1.0,
    0.25,
    -2.5,
    1e300,
    1e-300,
    np.nan,
    np.inf,
    None,
    True,
    "1",
    "",
    b"1",
    1j,
    Odd(),
    [],
    [1],
    [1, 2],
    {},
]
NUMBERS += [
    np.int64(0),
    np.int8(-1),
    np.float16(2),
    np.float32(0.5),
    np.bool_(True),
    np.array(1),
    np.array([0.5]),
    np.array([[1, 2]]),
    np.array("1"),
]
LAYOUTS = ["linear", "128x4", "linear", "128x4", "tiles"]
RULES = [None, "floor", "even", "amax", "rceil", "four_over_six"]
WORDS = [
    None,
    "",
    "linear",
    "128x4",
    "4x128",
    "floor",
    "ceil",
    "rceil",
    "even",
    "amax",
    "four_over_six",
    "FLOOR",
    "mxfp5",
    "nvfp4 ",
    0,
    1.5,
    True,
]
WORDS += [b"floor", ["floor"], ("mxfp4",), {}, Odd(), np.str_("floor"), np.nan]
FORMATS = [*BLOCK_FORMATS] * 3 + WORDS
LAYOUTS += WORDS
RULES += WORDS
PADS = [True, False, True, np.bool_(True), None, "no", 2, np.zeros(2)]
DTYPES = [
    np.float32,
    np.float16,
    "bfloat16",
    ml_dtypes.bfloat16,
    "float32",
    np.float64,
    int,
    "text",
    None,
    3,
    Odd(),
    "f4,f4",
    object,
    bool,
    [],
    "O",
]
SHAPES = [
    (2, 64),
    [2, 64],
    (1, 128),
    (64,),
    (2, 33),
    (),
    (0, 64),
    (2, -64),
    (2.0, 64),
    (2, 64.5),
    64,
    None,
    "ab",
    (None,),
    ((2, 64),),
    Odd(),
    (2**70, 32),
    (np.int64(2), 64),
]


def outcome(function, *arguments, **named):
    """The result, or None if the call raised a typed error with an informative message."""
    try:
        return function(*arguments, **named)
    except ptxrt.PtxError as error:
        assert isinstance(error, ptxrt.ArgumentError) and len(str(error)) > 20, repr(error)
        return None


def some(rng, right=0.0, **pools):
    """Keyword arguments: each pool gives one with a probability of 0.4, with a probability of `right` from its first
    four values, which are valid."""
    chosen = {name: pool for name, pool in pools.items() if rng.random() < 0.4}
    return {name: rng.choice(pool[:4] if rng.random() < right else pool) for name, pool in chosen.items()}


def quantized_arrays():
    x = arrays()[0]
    made = [quantize_reference(x, format) for format in BLOCK_FORMATS]
    made += [
        quantize_reference(x[:, :33], "mxfp6_e3m2", pad=True),
        quantize_reference(x, "nvfp4", scale_layout="128x4", pad=True, axis=0),
    ]
    return made + [ptxrt.quantize(ptxrt.to_device(x), format) for format in ("mxfp4", "nvfp4")]


@pytest.fixture(autouse=True)
def on_the_emulator(emulator):
    """Run all calls on the emulator."""


def test_quantize():
    rng, inputs = random.Random(1), arrays() + device_arrays()
    given = 0
    for _ in range(2500):
        x = rng.choice(arrays()[:9] + device_arrays()[:2] if rng.random() < 0.8 else inputs)
        format = rng.choice(FORMATS[:6] if rng.random() < 0.9 else FORMATS)
        choices = some(rng, 0.5, axis=NUMBERS, scale_rule=RULES, scale_layout=LAYOUTS, global_scale=NUMBERS, pad=PADS)
        q = outcome(ptxrt.quantize, x, format, **choices)
        if q is None:
            continue
        given += 1
        host = x.to_numpy() if isinstance(x, ptxrt.DeviceArray) else np.asarray(x)
        want, got = quantize_reference(host.astype(host.dtype.newbyteorder("=")), format, **choices), q.to_numpy()
        assert got.layout == want.layout and got.global_scale == want.global_scale
        assert np.array_equal(got.codes, want.codes) and np.array_equal(got.scales, want.scales)
    assert 50 < given < 600


def test_quantize_to_out():
    """A refused call leaves its output unchanged."""
    rng, inputs, outputs = random.Random(2), arrays() + device_arrays(), quantized_arrays()
    for _ in range(1000):
        out = rng.choice(outputs if rng.random() < 0.8 else arrays())
        before = out.to_numpy().codes.copy() if isinstance(out, ptxrt.QuantizedArray) else None
        x = rng.choice(arrays()[:3] + device_arrays()[:2] if rng.random() < 0.8 else inputs)
        choices = some(rng, 0.8, axis=NUMBERS, scale_layout=LAYOUTS, global_scale=NUMBERS)
        result = outcome(ptxrt.quantize, x, rng.choice(FORMATS[:6]), out=out, **choices)
        assert result is None or result is out or out is None
        if result is None and before is not None:
            np.testing.assert_array_equal(out.to_numpy().codes, before)


def test_dequantize():
    rng, sources, outputs = random.Random(3), quantized_arrays(), arrays() + device_arrays()
    for _ in range(1500):
        q = rng.choice(sources if rng.random() < 0.9 else outputs)
        values = outcome(ptxrt.dequantize, q, *rng.sample(DTYPES, rng.randrange(2)), **some(rng, 0.3, out=outputs))
        assert values is None or values.shape == q.shape


def test_quantized_array():
    rng, quantized, given = random.Random(4), quantized_arrays(), 0
    bytes_ = [a for q in quantized for a in (q.codes, q.scales)]
    others = arrays() + device_arrays()
    for _ in range(2000):
        codes, scales = (rng.choice(bytes_ if rng.random() < 0.8 else others) for _ in range(2))
        if rng.random() < 0.5:
            q = rng.choice(quantized)
            codes, scales = q.codes, q.scales
        named = some(rng, 0.7, axis=NUMBERS, scale_layout=LAYOUTS, global_scale=NUMBERS)
        shape = rng.choice(SHAPES[:4] if rng.random() < 0.7 else SHAPES)
        q = outcome(ptxrt.QuantizedArray, codes, scales, format=rng.choice(FORMATS), shape=shape, **named)
        if q is not None:
            given += 1
            assert np.asarray(q).shape == q.shape and str(q)
    assert 20 < given < 1000


def test_swizzles():
    rng, inputs = (
        random.Random(5),
        arrays() + device_arrays() + [np.zeros(512, np.uint8), np.zeros((4, 1024), np.uint8)],
    )
    for _ in range(1000):
        outcome(ptxrt.swizzle_scales, rng.choice(inputs), **some(rng, axis=NUMBERS))
        outcome(ptxrt.unswizzle_scales, rng.choice(inputs), rng.choice(SHAPES), **some(rng, axis=NUMBERS))


def test_kernels():
    """Direct calls of declared kernels: a right call with some arguments replaced, left out or added."""
    rng, inputs, given = random.Random(6), arrays() + device_arrays(), 0
    for _ in range(800):
        kernel = rng.choice(KERNELS)
        named = kernel.example(rng.choice(kernel.cases[:3]), seed=rng.randrange(3))
        for name in rng.sample([*named], rng.randrange(2)):
            del named[name]
        odd = {name: NUMBERS for name in (*kernel.axes, *(a.name for a in kernel.scalars))}
        odd |= {a.name: inputs for a in kernel.arrays} | dict(dtype=DTYPES, nothing=[1])
        named |= {name: rng.choice(odd[name]) for name in rng.sample([*odd], rng.choice([0, 1, 1, 2]))}
        given += outcome(kernel, *(rng.choice(inputs) for _ in range(rng.choice([0, 0, 0, 1]))), **named) is not None
    assert 50 < given < 600


def test_compare():
    rng, inputs = random.Random(7), arrays() + device_arrays() + quantized_arrays()
    for _ in range(1000):
        outcome(ptxrt.compare, rng.choice(inputs), rng.choice(inputs))


def test_files_cut_and_damaged_anywhere(tmp_path):
    """Loading gives what was saved, or raises FileError."""
    rng, path = random.Random(8), tmp_path / "q.npz"
    for q in quantized_arrays()[-4:]:
        q.save(path)
        data, q = path.read_bytes(), q.to_numpy()
        for _ in range(400):
            damaged = bytearray(data)
            damaged[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(damaged if rng.random() < 0.7 else data[: rng.randrange(len(data))])
            try:
                again = ptxrt.QuantizedArray.load(path)
            except ptxrt.FileError:
                continue
            assert again.layout == q.layout and again.global_scale == q.global_scale
            assert np.array_equal(again.codes, q.codes) and np.array_equal(again.scales, q.scales)


def test_command_line(tmp_path):
    """Exit status 0, 1 or 2, an error message without traceback, and an output file only if the command succeeds."""
    rng, runner, files = random.Random(9), CliRunner(), []
    for i, x in enumerate(
        a for a in arrays() if isinstance(a, np.ndarray) and a.dtype != object and type(a) is np.ndarray
    ):
        np.save(tmp_path / f"{i}.npy", x)
        files.append(tmp_path / f"{i}.npy")
    for i, q in enumerate(quantized_arrays()[::2]):
        q.save(tmp_path / f"{i}.npz")
        files.append(tmp_path / f"{i}.npz")
    packed = files[-4:]
    good = files[0].read_bytes()
    for name, content in dict(cut=good[:-9], head=good[:40], empty=b"", text=b"hello").items():
        (tmp_path / name).write_bytes(content)
        files.append(tmp_path / name)
    files += [tmp_path / "missing.npy", tmp_path, ""]
    options = {
        "--format": [*BLOCK_FORMATS, "mxfp5", ""],
        "--axis": ["-1", "0", "1", "x", "9"],
        "--scale-rule": ["floor", "rceil", "amax", "four_over_six", "round"],
        "--scale-layout": ["linear", "128x4", "4x4"],
        "--global-scale": ["0.5", "1", "0", "nan", "x", "1e300"],
        "--dtype": ["f32", "bf16", "f64"],
        "--rule": ["0", "1", "4", "x"],
        "--outer": ["1", "-1"],
        "--bytes": ["512", "0", "1e9"],
        "--format-limit": ["0.5", "0", "nan"],
    }
    flags = ["--pad", "--compare", "--json", "--nothing"]
    kernels = {
        name: [f"--{a.name.replace('_', '-')}" for a in k.inputs] for name, k in ptxrt.kernels().items() if k in KERNELS
    }
    succeeded = 0
    for i in range(600):
        name = rng.choice(["quantize", "dequantize", rng.choice([*kernels])])
        wanted = {"quantize": ["--x"], "dequantize": ["--q"]}.get(name) or kernels[name]
        command = ["--machine", "emulator", "run", name]
        for option in wanted:
            right = files[:3] if option == "--x" else packed
            command += [option, rng.choice(right if rng.random() < 0.8 else files)] if rng.random() < 0.95 else []
        for option in rng.sample(
            [*options] if name != "dequantize" else ["--dtype", "--axis"], rng.choice([0, 1, 1, 2])
        ):
            command += [option, rng.choice(options[option])]
        suffix = "npz" if name.startswith("quantize") else "npy"
        output = tmp_path / f"out{i}.{suffix if rng.random() < 0.9 else rng.choice(['npy', 'npz', 'txt'])}"
        command += ["-o", output, *rng.sample(flags, rng.randrange(2))]
        result = runner.invoke(main, [str(word) for word in command])
        assert result.exception is None or isinstance(result.exception, SystemExit), (command, result.exception)
        assert result.exit_code in (0, 1, 2) and "Traceback" not in result.output
        # A failed comparison still writes its output for inspection.
        assert output.exists() == (result.exit_code == 0) or (
            "--compare" in command and "relative L2" in result.output
        ), command
        succeeded += result.exit_code == 0
    assert 50 < succeeded < 400
