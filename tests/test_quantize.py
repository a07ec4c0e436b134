"""quantize, dequantize, QuantizedArray and the layouts of scales: bytes on every machine, shapes, files, errors."""

import io
import zipfile

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import exact_blocks
import ptxrt
from ptxrt.blocks import BLOCK_FORMATS, nvfp4, swizzled_offsets
from ptxrt.formats import ue4m3_values
from ptxrt.ops.quantize import quantize_reference
from ptxrt.ops.quantizers import QUANTIZE

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]
FORMATS = list(BLOCK_FORMATS)
RULES = [(name, rule) for name, f in BLOCK_FORMATS.items() for rule in f.rules]
ELEMENTS = {**exact_blocks.MX, "nvfp4": exact_blocks.E2M1}
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
each_format = pytest.mark.parametrize("format", FORMATS)
each_rule = pytest.mark.parametrize("format, rule", RULES)


def exact(x, format, rule=None, global_scale=None):
    """Codes, scales and global scale in exact arithmetic, with blocks along the last axis."""
    x = np.asarray(x, np.float32)
    if format != "nvfp4":
        return *exact_blocks.encode(x, format, rule or "floor"), None
    g = exact_blocks.global_scale(x) if global_scale is None else np.float32(global_scale)
    return *exact_blocks.encode_nvfp4(x, g, rule or "amax"), g


def assert_bytes(q, codes, scales, global_scale=None):
    np.testing.assert_array_equal(q.scales, scales)
    np.testing.assert_array_equal(q.codes, codes)
    assert q.global_scale == global_scale


def assert_same(got, want):
    assert got.layout == want.layout
    assert_bytes(got, want.codes, want.scales, want.global_scale)


@each_rule
def test_hard_blocks_byte_for_byte(machine, format, rule):
    """Rounding boundaries, subnormals, outliers, zeros of both signs, NaN and infinity."""
    x = exact_blocks.hard_blocks(ELEMENTS[format], BLOCK_FORMATS[format].block)
    assert_bytes(ptxrt.quantize(x, format, scale_rule=rule), *exact(x, format, rule))


@each_rule
def test_scales_at_every_decision(machine, format, rule):
    """The decision boundaries of each rule and two float32 steps to either side, from the smallest subnormal to the
    largest number."""
    x = exact_blocks.decision_blocks(ELEMENTS[format], BLOCK_FORMATS[format].block)
    given = dict(global_scale=1.0) if format == "nvfp4" else {}
    q = ptxrt.quantize(x, format, scale_rule=rule, **given)
    assert_same(q, quantize_reference(x, format, scale_rule=rule, **given))
    assert_bytes(ptxrt.quantize(x[::16], format, scale_rule=rule, **given), *exact(x[::16], format, rule, **given))


@pytest.mark.parametrize("rule", BLOCK_FORMATS["nvfp4"].rules)
@pytest.mark.parametrize(
    "g", [1.0, 2.0**-149, 3 * 2.0**-149, 1e-41, 2.0**-126, 1e-10, 1 / 2688, 0.37, 17.0, 1e10, 3e38]
)
def test_nvfp4_under_any_global_scale(machine, rng, rule, g):
    sizes = np.repeat(2.0 ** np.array([-149, -140, -127, -126, -60, -8, -1, 0, 1, 5, 30, 100, 120]), 8)[:, None]
    x = (rng.standard_normal((sizes.size, 16)) * sizes).astype(np.float32)
    x = np.concatenate([x, exact_blocks.special_blocks(16)])
    assert_bytes(ptxrt.quantize(x, "nvfp4", scale_rule=rule, global_scale=g), *exact(x, "nvfp4", rule, g))


E2M1_BOUNDARIES = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


def boundary_blocks(g: np.float32) -> np.ndarray:
    """Blocks of 16 for each scale of e4m3: their quotients by f32(g * scale) lie on the boundaries of e2m1 and within
    two steps."""
    step = g * np.float32(exact_blocks.E4M3.magnitudes[1:])
    near = (E2M1_BOUNDARIES[:, None] * step).astype(np.float32).view(np.uint32)[..., None] + np.arange(-2, 3)
    values = np.moveaxis(near, 1, 0).reshape(step.size, -1).astype(np.uint32).view(np.float32)  # 35 for each scale
    blocks = np.pad(values, ((0, 0), (0, 10))).reshape(step.size, 3, 15)
    return (
        np.concatenate([blocks, np.repeat((6 * step)[:, None, None], 3, 1)], axis=2).reshape(-1, 16).astype(np.float32)
    )


@pytest.mark.parametrize("rule", BLOCK_FORMATS["nvfp4"].rules)
def test_nvfp4_quotients_are_correctly_rounded(machine, rng, rule):
    """A quotient with an error in its last bit would fall on the wrong side of a tie."""
    for g in np.exp2(rng.uniform(-30, 30, 12)).astype(np.float32):
        x = boundary_blocks(g)
        q = ptxrt.quantize(x, "nvfp4", scale_rule=rule, global_scale=g)
        assert_same(q, quantize_reference(x, "nvfp4", scale_rule=rule, global_scale=g))
    assert_bytes(q, *exact(x, "nvfp4", rule, g))


@pytest.mark.parametrize(
    "format, rule, text",
    [(*each, "portable") for each in RULES] + [("nvfp4", rule, "native") for rule in BLOCK_FORMATS["nvfp4"].rules],
)
def test_values_of_any_size_in_every_layout(rng, format, rule, text):
    """In every dtype, with NaN and infinity, along rows and down columns; a lane has four columns or fewer."""
    f = BLOCK_FORMATS[format]
    sizes = np.repeat(2.0 ** np.array([-149, -140, -130, -126, -124, -100, -60, -24, -14, -8, 0, 5, 30, 120]), 4)[
        :, None
    ]
    values = (rng.standard_normal((sizes.size, f.block)) * sizes).astype(np.float32)
    values = np.concatenate([values, exact_blocks.special_blocks(f.block)])
    values = values[: len(values) // 4 * 4]
    with ptxrt.using("emulator", ptx=text):
        for dtype in DTYPES:
            with np.errstate(over="ignore"):
                blocks = values.astype(dtype)
            for given in [dict(global_scale=g) for g in (1.0, 3 * 2.0**-149, 3e38)] if f.two_level else [{}]:
                for x, axis in ((blocks, -1), (blocks.T.copy(), 0), (blocks[:-1].T.copy(), 0)):
                    for scale_layout in ("linear", "128x4"):
                        choices = dict(given, axis=axis, scale_rule=rule, scale_layout=scale_layout)
                        assert_same(ptxrt.quantize(x, format, **choices), quantize_reference(x, format, **choices))


def narrow_boundary_blocks(rng, g: np.float32, dtype) -> np.ndarray:
    """Blocks of 16 in a narrow dtype. Largest values range from 0 and too small for a scale to too large; the other
    values lie within two steps of a boundary."""
    largest = (g * np.exp2(rng.uniform(-8, 12, 96), dtype=np.float32)).astype(dtype)
    largest[:4] = 0
    scales = nvfp4.encode(np.repeat(largest[:, None], 16, 1), g)[1]
    near = (E2M1_BOUNDARIES * g * ue4m3_values(scales)).astype(dtype).view(np.uint16)[..., None].astype(
        int
    ) + np.arange(-2, 3)
    values = np.maximum(near, 0).astype(np.uint16).view(dtype).reshape(96, 35)
    blocks = np.pad(values, ((0, 0), (0, 10))).reshape(96, 3, 15)
    blocks = np.concatenate(
        [np.minimum(blocks, largest[:, None, None]), np.repeat(largest[:, None, None], 3, 1)], axis=2
    ).reshape(-1, 16)
    return np.where(rng.random(blocks.shape) < 0.5, -blocks, blocks)


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("dtype, g", [(ml_dtypes.bfloat16, g) for g in (1.0, 0.37, 1 / 2688, 2.0**-56, 1e-18, 2.0**80, 3e24)] + [(np.float16, g) for g in (1.0, 0.37, 1 / 2688, 2.0**-12, 2.0**-17, 8.0)])  # fmt: skip
def test_nvfp4_codes_of_narrow_dtypes_change_at_the_right_value(machine, rng, dtype, g, axis):
    """The portable build does not divide in these dtypes: it compares with the smallest value of each code."""
    x = narrow_boundary_blocks(rng, np.float32(g), dtype).reshape(-1, 96)
    x = np.ascontiguousarray(x.T) if axis == 0 else x
    x[:, 40:] = np.where(rng.random(x[:, 40:].shape) < 0.002, dtype(np.nan), x[:, 40:])  # these blocks divide
    for scale_layout in ("linear", "128x4"):
        choices = dict(axis=axis, global_scale=np.float32(g), scale_layout=scale_layout)
        with ptxrt.using("emulator", ptx="portable") if machine.name == "emulator" else ptxrt.using(machine.name):
            q = ptxrt.quantize(x, "nvfp4", **choices)
        assert_same(q, quantize_reference(x, "nvfp4", **choices))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=lambda d: np.dtype(d).name)
@each_format
def test_every_value_of_a_narrow_dtype(machine, format, dtype):
    x = np.arange(65536, dtype=np.uint16).view(dtype).reshape(-1, 64)
    assert_same(ptxrt.quantize(x, format), quantize_reference(x, format))
    finite = x[np.isfinite(x.astype(np.float32))]
    shuffled = np.random.default_rng(1).permutation(finite)[:8192].reshape(-1, 64)
    assert_bytes(ptxrt.quantize(shuffled, format), *exact(shuffled, format))


@each_dtype
@each_format
def test_random_values_of_any_size(machine, rng, format, dtype):
    x = (rng.standard_normal((37, 96)) * 2.0 ** rng.integers(-20, 12, (37, 96))).astype(dtype)
    assert_bytes(ptxrt.quantize(x, format), *exact(x, format))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_shape_axis_layout_and_value(emulator, data):
    """Random shapes, values and options, against the reference on the host, with a round trip."""
    format = data.draw(st.sampled_from(FORMATS))
    dtype = np.dtype(data.draw(st.sampled_from(DTYPES)))
    shape = tuple(data.draw(st.lists(st.integers(0, 70), min_size=1, max_size=3)))
    choices = dict(
        axis=data.draw(st.integers(-len(shape), len(shape) - 1)),
        scale_rule=data.draw(st.sampled_from([None, *BLOCK_FORMATS[format].rules])),
        scale_layout=data.draw(st.sampled_from(["linear", "128x4"])),
        pad=True,
    )
    bits = np.random.default_rng(data.draw(st.integers(0, 99))).integers(0, 2**32, shape, np.uint32)
    exponents = data.draw(st.sampled_from([0x00FFFFFF, 0x3FFFFFFF, 0xFFFFFFFF]))
    with np.errstate(over="ignore", invalid="ignore"):
        x = (bits & np.uint32(exponents | 0x80000000)).view(np.float32).astype(dtype)
    q = ptxrt.quantize(x, format, **choices)
    assert_same(q, quantize_reference(x, format, **choices))
    values = ptxrt.dequantize(q)
    assert values.shape == shape and np.array_equal(values, np.asarray(q), equal_nan=True)


@pytest.mark.parametrize("shape", [(64,), (1, 32), (3, 5, 64), (2, 1, 2, 3, 32), (0, 64), (2, 0, 32), (0,)])
@each_format
def test_any_leading_axes(machine, rng, format, shape):
    f = BLOCK_FORMATS[format]
    x = rng.standard_normal(shape).astype(np.float32)
    q = ptxrt.quantize(x, format)
    assert (q.shape, q.format, q.axis, q.scale_layout) == (shape, format, -1, "linear")
    assert q.codes.shape == (*shape[:-1], shape[-1] * f.bits // 8) and q.scales.shape == (
        *shape[:-1],
        shape[-1] // f.block,
    )
    assert q.nbytes == x.size * f.bits // 8 + x.size // f.block
    y = ptxrt.dequantize(q)
    assert y.shape == shape and y.dtype == np.float32
    np.testing.assert_array_equal(y, np.asarray(q))
    assert_bytes(q, *exact(x, format))


@pytest.mark.parametrize(
    "shape, axis", [((64,), 0), ((64, 3), 0), ((5, 32, 7), 1), ((5, 32, 7), -2), ((96, 2, 3, 1), 0), ((4, 32, 1, 1), 1)]
)
@each_format
def test_any_axis(machine, rng, format, shape, axis):
    """Codes and scales equal those along the last axis, moved to `axis`."""
    x = rng.standard_normal(shape).astype(np.float32)
    q = ptxrt.quantize(x, format, axis=axis)
    assert q.axis == axis - len(shape) * (axis >= 0)
    codes, scales, g = exact(np.moveaxis(x, axis, -1), format)
    assert_bytes(q, np.moveaxis(codes, -1, axis), np.moveaxis(scales, -1, axis), g)
    values = ptxrt.dequantize(q)
    assert values.shape == shape
    np.testing.assert_array_equal(values, np.asarray(q))


@pytest.mark.parametrize("shape, axis", [((3, 40), -1), ((33,), 0), ((2, 50, 7), 1), ((7, 3), 0), ((4, 1), -1)])
@each_dtype
@each_format
def test_padding(machine, rng, format, shape, axis, dtype):
    """The padding has codes and scales of zeros; values have the original shape."""
    f = BLOCK_FORMATS[format]
    x = rng.standard_normal(shape).astype(dtype)
    q = ptxrt.quantize(x, format, axis=axis, pad=True)
    widths = [(0, 0)] * len(shape)
    widths[axis] = (0, -shape[axis] % f.block)
    whole = ptxrt.quantize(np.pad(x, widths), format, axis=axis, global_scale=q.global_scale)
    assert q.shape == shape
    assert_bytes(q, whole.codes, whole.scales, whole.global_scale)
    back = ptxrt.dequantize(q, dtype)
    assert back.shape == shape and back.dtype == dtype
    kept = tuple(slice(size) for size in shape)
    np.testing.assert_array_equal(back, ptxrt.dequantize(whole, dtype)[kept])
    np.testing.assert_array_equal(np.asarray(q), np.asarray(whole)[kept])


@each_dtype
@each_format
def test_every_code_under_many_scales_dequantizes(machine, format, dtype):
    f = BLOCK_FORMATS[format]
    count = max(256, 2 * f.block)
    numbers = np.resize(np.arange(1 << f.bits, dtype=np.uint8), count)
    codes = np.tile(exact_blocks.pack(numbers[None], f.bits), (256, 1))
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], count // f.block, 1)
    g = dict(global_scale=0.3) if f.two_level else {}
    q = ptxrt.QuantizedArray(codes, scales, format=format, shape=(256, count), **g)
    got = ptxrt.dequantize(q, dtype)
    table = f.element.values[numbers].astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        if f.two_level:
            step = np.float32(0.3) * np.abs(scales[:, :1].view(ml_dtypes.float8_e4m3fn).astype(np.float32))
            want = (f.element.values[numbers] * step).astype(dtype)
        else:
            want = (
                (table * scales[:, :1].view(ml_dtypes.float8_e8m0fnu).astype(np.float64))
                .astype(np.float32)
                .astype(dtype)
            )
    bits = f"u{np.dtype(dtype).itemsize}"
    nan = np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
    np.testing.assert_array_equal(got[~nan].view(bits), want[~nan].view(bits))


# The global scale of NVFP4


@pytest.mark.parametrize("count", [1, 4095, 4096, 4097, 40000])
@each_dtype
def test_the_global_scale_is_of_the_largest_finite_value(machine, rng, dtype, count):
    x = rng.standard_normal(count).astype(dtype)
    x[rng.integers(count)] = -300.0
    if count > 1:
        x[:: max(count // 7, 2)] = np.inf
        x[1 :: max(count // 5, 2)] = np.nan
    q = ptxrt.quantize(x, "nvfp4", pad=True)
    assert q.global_scale.dtype == np.float32 and q.global_scale.shape == ()
    assert q.global_scale == exact_blocks.global_scale(x)


def test_arrays_without_a_finite_value_have_a_global_scale_of_1(machine):
    for x in (
        np.zeros((2, 16), np.float32),
        np.full(16, np.nan, np.float32),
        np.full(16, 1e-44, np.float32),
        np.zeros((0, 16), np.float32),
    ):
        assert ptxrt.quantize(x, "nvfp4").global_scale == 1


def test_the_global_scale_is_rounded_once(machine, rng):
    """Also if it is subnormal or halfway between two subnormals, and at both ends of float32."""
    multiples = 1344 * np.arange(1, 12, dtype=np.uint32)  # subnormals whose quotient lies halfway: 1344 = 2688 / 2
    bits = [
        *multiples,
        1,
        1343,
        1345,
        0x007FFFFF,
        0x00800000,
        0x7F7FFFFF,
        *rng.integers(1, 0x7F800000, 12, dtype=np.uint32),
    ]
    for largest in np.array(bits, np.uint32).view(np.float32):
        quotient = np.float32(largest) / np.float32(2688)  # one float32 division, rounded once
        (got,) = np.asarray(ptxrt.kernels()["nvfp4_global_scale"](np.array([largest], np.float32)))
        assert got == (quotient or 1), largest


def test_a_given_global_scale_is_kept(machine, rng):
    x = rng.standard_normal((4, 64)).astype(np.float32)
    for g in (0.01, np.float64(0.01), np.array([0.01]), ml_dtypes.bfloat16(0.01), 2):
        q = ptxrt.quantize(x, "nvfp4", global_scale=g)
        assert_bytes(q, *exact(x, "nvfp4", global_scale=np.float32(g).item() if np.ndim(g) == 0 else 0.01))
    on_device = ptxrt.to_device(np.float32([0.5]))
    q = ptxrt.quantize(ptxrt.to_device(x), "nvfp4", global_scale=on_device)
    assert isinstance(q.global_scale, ptxrt.DeviceArray) and q.global_scale.address == on_device.address
    assert_bytes(q.to_numpy(), *exact(x, "nvfp4", global_scale=0.5))


# The 128x4 layout of scales


@pytest.mark.parametrize(
    "shape, axis",
    [
        ((5, 3), -1),
        ((128, 4), -1),
        ((130, 9), -1),
        ((2, 3, 5), -1),
        ((2, 5, 70), 1),
        ((5,), 0),
        ((0, 4), -1),
        ((4, 0), -1),
    ],
)
def test_scales_swizzle_and_come_back(machine, rng, shape, axis):
    scales = rng.integers(0, 256, shape, dtype=np.uint8)
    swizzled = ptxrt.swizzle_scales(scales, axis=axis)
    matrix = np.moveaxis(scales, axis, -1).reshape(-1, shape[axis]) if scales.size else np.zeros((0, 0), np.uint8)
    offsets = swizzled_offsets(*matrix.shape)
    assert swizzled.dtype == np.uint8 and swizzled.ndim == 1 and swizzled.size % 512 == 0
    np.testing.assert_array_equal(swizzled[offsets], matrix)
    assert np.count_nonzero(swizzled) == np.count_nonzero(scales)
    np.testing.assert_array_equal(ptxrt.unswizzle_scales(swizzled, shape, axis=axis), scales)
    on_device = ptxrt.swizzle_scales(ptxrt.to_device(scales), axis=axis)
    assert isinstance(on_device, ptxrt.DeviceArray)
    np.testing.assert_array_equal(on_device.to_numpy(), swizzled)


@each_format
@pytest.mark.parametrize("axis", [-1, 0])
def test_quantizing_to_128x4(machine, rng, format, axis):
    x = rng.standard_normal((192, 160)).astype(np.float32)
    linear = ptxrt.quantize(x, format, axis=axis)
    tiled = ptxrt.quantize(x, format, axis=axis, scale_layout="128x4")
    assert tiled.scale_layout == "128x4" and tiled.scales.ndim == 1
    assert_bytes(tiled, linear.codes, ptxrt.swizzle_scales(linear.scales, axis=axis), linear.global_scale)
    np.testing.assert_array_equal(ptxrt.dequantize(tiled), ptxrt.dequantize(linear))
    np.testing.assert_array_equal(np.asarray(tiled), np.asarray(linear))


# Rows and blocks of the scale matrix just before, at and after the edges of tiles, and some batches of matrices.
TILED = [
    *(
        ((rows, blocks), -1)
        for rows, blocks in [(1, 1), (3, 2), (31, 5), (33, 4), (127, 3), (128, 4), (129, 9), (257, 8)]
    ),
    *(((blocks, rows), 0) for rows, blocks in [(1, 1), (5, 3), (64, 4), (127, 6), (132, 5), (256, 8)]),
    *(((3, blocks, rows), 1) for rows, blocks in [(2, 3), (43, 4), (128, 2)]),
    *[((2, 0), -1), ((0, 3), -1), ((0, 2), 0), ((2, 0, 3), 1)],
]


@pytest.mark.parametrize("shape, axis", TILED)
@pytest.mark.parametrize("format, rule", [(name, f.rules[i]) for name, f in BLOCK_FORMATS.items() for i in (0, -1)])
def test_tiles_are_those_of_swizzle_scales_in_one_launch(text_machine, rng, format, rule, shape, axis):
    """In full and partial tiles, on memory with other contents."""
    f = BLOCK_FORMATS[format]
    sizes = list(shape)
    sizes[axis] *= f.block
    dtype = DTYPES[sum(shape) % len(DTYPES)]
    x = ptxrt.to_device((rng.standard_normal(sizes) * np.exp2(rng.integers(-4, 5, sizes))).astype(dtype))
    choices = dict(axis=axis, scale_rule=rule) | (dict(global_scale=0.01) if f.two_level else {})
    linear = ptxrt.quantize(x, format, **choices)
    want = ptxrt.swizzle_scales(linear.scales, axis=axis).to_numpy()
    out = ptxrt.QuantizedArray(
        *(ptxrt.to_device(np.full(size, 0xA5, np.uint8)) for size in (linear.codes.shape, want.shape)),
        **dict(format=format, shape=x.shape, axis=axis, scale_layout="128x4"),
        global_scale=linear.global_scale,
    )
    with ptxrt.trace() as trace:
        assert ptxrt.quantize(x, format, out=out, scale_layout="128x4", **choices) is out
    columns = "_columns" if np.prod(sizes[axis:][1:] if axis < 0 else sizes[axis + 1 :]) != 1 else ""
    launched = [launch.kernel for launch in trace.launches if launch.kernel != "fill_f32"]
    assert launched == ([f"quantize_{format}{columns}"] if x.size else [])
    for got, expected in ((out.codes, linear.codes.to_numpy()), (out.scales, want)):
        np.testing.assert_array_equal(got.to_numpy().view(np.uint8), expected.view(np.uint8))


def test_tiles_in_captured_and_prepared_calls(machine, rng):
    x, y = (ptxrt.to_device(rng.standard_normal((130, 96)).astype(np.float32)) for _ in range(2))
    for format in ("mxfp8", "nvfp4"):
        want = [ptxrt.quantize(each, format).to_numpy() for each in (x, y)]
        out = ptxrt.quantize(x, format, scale_layout="128x4")
        prepared = ptxrt.prepare(ptxrt.quantize, x, format, scale_layout="128x4", out=out)
        for each, expected in zip((y, x), reversed(want)):
            prepared(each)
            np.testing.assert_array_equal(out.scales.to_numpy(), ptxrt.swizzle_scales(expected.scales))
        with ptxrt.graph() as graph:
            ptxrt.quantize(y, format, scale_layout="128x4", out=out)
        graph.launch()
        np.testing.assert_array_equal(out.scales.to_numpy(), ptxrt.swizzle_scales(want[1].scales))


@each_format
def test_a_quantizer_writes_tiles_of_the_right_size_alone(text_machine, rng, format):
    kernel, n = QUANTIZE[format], BLOCK_FORMATS[format].block
    x = rng.standard_normal((5, 3 * n)).astype(np.float32)
    level = (np.ones(1, np.float32),) if BLOCK_FORMATS[format].two_level else ()
    for sizes in (dict(scale_rows=2), dict(scale_cols=4), dict(scale_rows=1), dict(scale_cols=512), dict(covered=1)):
        with pytest.raises(ptxrt.ArgumentError, match="must be|has shape"):
            kernel(x, *level, **sizes, scales=np.zeros((1, 1), np.uint8))
    with pytest.raises(ptxrt.ArgumentError, match="multiple of"):
        kernel(x[:, : n + n // 2].copy(), *level)
    # Tiles do not fit an array for linear scales: the kernel must not write beyond its end.
    x, *level, scales = (ptxrt.to_device(array) for array in (x, *level, np.zeros((5, 3), np.uint8)))
    codes, _ = kernel(x, *level, scales=scales, swizzled=1)
    np.testing.assert_array_equal(codes.to_numpy(), kernel(x, *level)[0].to_numpy())


# Arrays in and out


def test_layouts_of_numpy_do_not_matter(emulator, rng):
    x = rng.standard_normal((64, 96)).astype(np.float32)
    for view in (np.asfortranarray(x), x[::-1, ::-1], x[:, ::3][:, :32], x.T[:, :64]):
        assert_bytes(ptxrt.quantize(view, "mxfp4"), *exact(np.ascontiguousarray(view), "mxfp4"))


@each_format
@pytest.mark.parametrize("choices", [{}, dict(axis=0), dict(scale_layout="128x4"), dict(pad=True)], ids=str)
def test_out_is_written_and_returned(machine, rng, format, choices):
    x = rng.standard_normal((64, 50 if choices.get("pad") else 64)).astype(np.float32)
    want = quantize_reference(x, format, **choices)
    for place in (np.asarray, ptxrt.to_device):
        out = ptxrt.quantize(place(np.zeros_like(x)), format, **choices)
        codes, scales, g = out.codes, out.scales, out.global_scale
        assert (
            ptxrt.quantize(place(x), format, out=out, **choices) is out and out.codes is codes and out.scales is scales
        )
        assert_same(out.to_numpy(), want)
        if format == "nvfp4" and place is ptxrt.to_device:
            assert out.global_scale.address == g.address
        for dtype in DTYPES:
            values = place(np.empty(x.shape, dtype))
            assert ptxrt.dequantize(out, out=values) is values
            got = values if place is np.asarray else values.to_numpy()
            np.testing.assert_array_equal(got, np.asarray(want).astype(dtype))


def test_out_may_be_a_view(emulator, rng):
    x = rng.standard_normal((4, 64)).astype(np.float32)
    q = ptxrt.quantize(x, "mxfp4")
    out = np.zeros((64, 4), np.float32)
    ptxrt.dequantize(q, out=out.T)
    np.testing.assert_array_equal(out.T, np.asarray(q))
    codes, scales = np.zeros((4, 64), np.uint8), np.zeros((2, 4), np.uint8)
    view = ptxrt.QuantizedArray(codes[:, ::2], scales.T, format="mxfp4", shape=(4, 64))
    ptxrt.quantize(x, "mxfp4", out=view)
    np.testing.assert_array_equal(codes[:, ::2], q.codes)
    np.testing.assert_array_equal(scales.T, q.scales)


@each_format
@pytest.mark.parametrize("axis", [0, -1])
def test_views_on_a_device_are_copied(emulator, rng, format, axis):
    """Views that begin at no multiple of 16 bytes, or with gaps."""
    x = rng.standard_normal((65, 40)).astype(np.float16)
    for view in (np.s_[1:], np.s_[1:2], np.s_[:, 4:36], np.s_[::2, ::-1]):
        got = ptxrt.quantize(ptxrt.to_device(x)[view], format, axis=axis, pad=True)
        assert_same(got.to_numpy(), quantize_reference(x[view].copy(), format, axis=axis, pad=True))


DESCRIBED = dict(format="nvfp4", shape=(32, 32))
LEVELS = {
    "quantize": (lambda x, **options: ptxrt.quantize(x, "nvfp4", **options), "global_scale"),
    "rmsnorm": (lambda x, **options: ptxrt.rmsnorm(x, **{"format": "nvfp4", **options}), "global_scale"),
    "matmul": (lambda x, **options: ptxrt.matmul(x, x, **{"out_format": "nvfp4", **options}), "out_global_scale"),
}


def made_with(scalar, q):
    """The codes and scales of q under a scalar that belongs to the array."""
    return ptxrt.QuantizedArray(**q.arrays | dict(global_scale=scalar), **DESCRIBED)


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("made_by", ["a call", "a call with out"])
def test_scalars_of_the_caller_are_never_written(emulator, rng, name, made_by):
    """A result refers to a given scalar until a call writes its global scale, then it has one of its own."""
    call, word = LEVELS[name]
    x, level = ptxrt.to_device(rng.standard_normal((32, 32)).astype(np.float16)), np.float32(0.01)
    for _ in range(3):
        scalar = ptxrt.to_device(level)
        other = call(x, **{word: scalar})
        out = call(x, **{word: scalar if made_by == "a call" else 2.0})
        if made_by == "a call with out":
            call(x, out=out, **{word: scalar})
        assert out.global_scale.address == other.global_scale.address == scalar.address
        assert call(x, out=out, **{word: 3.0}) is out and out.global_scale.to_numpy() == 3
        own = out.global_scale
        np.testing.assert_array_equal(out.to_numpy().codes, call(x, **{word: 3.0}).to_numpy().codes)
        call(x, out=out, **{word: 4.0})
        assert out.global_scale is own and own.to_numpy() == 4
        if name == "quantize":
            call(x, out=call(x, global_scale=scalar))
        call(x, out=out, **{word: scalar})
        call(x, out=out, **{word: scalar})
        assert out.global_scale.address == scalar.address
        assert scalar.to_numpy() == other.global_scale.to_numpy() == level


@pytest.mark.parametrize("name", LEVELS)
def test_scalars_that_an_array_was_made_with_are_written(emulator, rng, name):
    call, word = LEVELS[name]
    x = ptxrt.to_device(rng.standard_normal((32, 32)).astype(np.float16))
    for _ in range(3):
        scalar = ptxrt.to_device(np.float32(0.01))
        out = made_with(scalar, call(x, **{word: 1.0}))
        for value in (scalar, 3.0):
            call(x, out=out, **{word: value})
            assert out.global_scale.address == scalar.address
        assert scalar.to_numpy() == 3


@pytest.mark.parametrize("name", LEVELS)
def test_prepared_calls_never_write_scalars_of_the_caller(emulator, rng, name):
    call, word = LEVELS[name]
    x, level = ptxrt.to_device(rng.standard_normal((32, 32)).astype(np.float16)), np.float32(0.01)
    scalar = ptxrt.to_device(level)
    borrowing, owning = call(x, **{word: scalar}), call(x, **{word: 2.0})
    to_number = ptxrt.prepare(call, x, out=borrowing, **{word: 3.0})
    to_scalar = ptxrt.prepare(call, x, out=owning, **{word: scalar})
    for _ in range(3):
        assert to_number().global_scale.to_numpy() == 3
        assert to_scalar().global_scale.to_numpy() == level
        to_scalar(x, **{word: ptxrt.to_device(np.float32(5))})
        assert owning.global_scale.to_numpy() == 5
        assert scalar.to_numpy() == level
    for out in (borrowing, owning):
        call(x, out=out, **{word: 4.0})
        assert out.global_scale.to_numpy() == 4 and scalar.to_numpy() == level
    prepared = ptxrt.prepare(call, x, out=owning, **{word: 3.0})
    with pytest.raises(ptxrt.ArgumentError, match="read-only; it was prepared with"):
        prepared(x, out=call(x, **{word: scalar}))
    assert scalar.to_numpy() == level


@pytest.mark.parametrize("name", LEVELS)
def test_records_of_scalars_that_an_array_was_made_with_serve_no_other(emulator, rng, name):
    """Such an array goes on to own the scalar that is passed; another one must not."""
    call, word = LEVELS[name]
    x, level = ptxrt.to_device(rng.standard_normal((32, 32)).astype(np.float16)), np.float32(0.01)
    scalar = ptxrt.to_device(level)
    made = made_with(scalar, call(x, **{word: 1.0}))
    prepared = ptxrt.prepare(call, x, out=made, **{word: scalar})
    for _ in range(3):
        assert prepared().global_scale is scalar
        call(x, out=made, **{word: scalar})
    for _ in range(3):
        out = call(x, **{word: 2.0})
        with pytest.raises(ptxrt.ArgumentError, match="share no memory, those of the example do"):
            prepared(x, out=out)
        call(x, out=out, **{word: scalar})
        assert out.global_scale.to_numpy() == level
        call(x, out=out, **{word: 3.0})
        assert scalar.to_numpy() == level


@pytest.mark.parametrize("name", LEVELS)
def test_graphs_never_write_scalars_of_the_caller(emulator, rng, name):
    call, word = LEVELS[name]
    x, level = ptxrt.to_device(rng.standard_normal((32, 32)).astype(np.float16)), np.float32(0.01)
    scalar = ptxrt.to_device(level)
    out, other = call(x, **{word: scalar}), call(x, **{word: 2.0})
    with ptxrt.graph() as g:
        call(x, out=out, **{word: 3.0})
        call(x, out=other, **{word: scalar})
    for _ in range(2):
        g.launch()
        assert out.global_scale.to_numpy() == 3 and other.global_scale.address == scalar.address
        assert scalar.to_numpy() == level


@each_format
def test_device_arrays_give_device_arrays(machine, rng, format):
    x = rng.standard_normal((2, 3, 64)).astype(np.float32)
    q = ptxrt.quantize(ptxrt.to_device(x), format)
    assert q.on_device and isinstance(q.codes, ptxrt.DeviceArray) and q.codes.shape[:2] == (2, 3)
    assert q.global_scale is None or isinstance(q.global_scale, ptxrt.DeviceArray)
    y = ptxrt.dequantize(q)
    assert isinstance(y, ptxrt.DeviceArray) and y.shape == (2, 3, 64)
    np.testing.assert_array_equal(y.to_numpy(), np.asarray(q))
    assert_bytes(q.to_numpy(), *exact(x, format))


def test_bytes_of_ml_dtypes_are_taken_as_they_are(emulator, rng):
    q = ptxrt.quantize(rng.standard_normal((4, 64)).astype(np.float32), "mxfp8")
    codes, scales = q.codes.view(ml_dtypes.float8_e4m3fn), q.scales.view(ml_dtypes.float8_e8m0fnu)
    again = ptxrt.QuantizedArray(codes, scales, format="mxfp8", shape=(4, 64))
    np.testing.assert_array_equal(ptxrt.dequantize(again), np.asarray(q))
    np.testing.assert_array_equal(np.asarray(again), np.asarray(q))
    np.testing.assert_array_equal(ptxrt.swizzle_scales(scales), ptxrt.swizzle_scales(q.scales))


def test_values_are_decoded_on_the_host_in_any_dtype(emulator):
    q = ptxrt.quantize(np.linspace(-6, 6, 32, dtype=np.float32), "mxfp4")
    assert np.asarray(q).dtype == np.float32
    assert np.asarray(q, dtype=np.float64).dtype == np.float64
    np.testing.assert_array_equal(np.asarray(q), ptxrt.dequantize(q))


def test_better_formats_are_closer(emulator, rng):
    x = rng.standard_normal((64, 256)).astype(np.float32)
    loss = {name: ptxrt.compare(ptxrt.quantize(x, name), x).relative_l2 for name in FORMATS}
    assert loss["mxfp6_e2m3"] < loss["mxfp8"] < loss["mxfp6_e3m2"] < loss["nvfp4"] < loss["mxfp4"]
    assert loss["mxfp6_e3m2"] == pytest.approx(loss["mxfp8_e5m2"], rel=0.05)  # both have two mantissa bits


# Files


SAVED = [
    dict(format="mxfp4", shape=(2, 3, 64)),
    dict(format="mxfp6_e3m2", shape=(2, 60, 3), axis=-2),
    dict(format="nvfp4", shape=(3, 50), scale_layout="128x4", global_scale=0.25),
]


@pytest.fixture(params=SAVED, ids=lambda fields: fields["format"])
def saved(request, tmp_path, rng):
    x = rng.standard_normal(request.param["shape"]).astype(np.float32)
    q = quantize_reference(x, pad=True, **{name: value for name, value in request.param.items() if name != "shape"})
    path = tmp_path / "q.npz"
    q.save(path)
    return q, path


def test_files_come_back(saved):
    q, path = saved
    assert_same(ptxrt.QuantizedArray.load(path), q)
    assert [p.name for p in path.parent.iterdir()] == ["q.npz"]


def test_files_of_the_first_release_have_the_last_axis(tmp_path):
    path = tmp_path / "q.npz"
    path.write_bytes(_npz(**FIRST))
    q = ptxrt.QuantizedArray.load(path)
    assert (q.axis, q.scale_layout, q.shape) == (-1, "linear", (1, 32))


def test_saving_keeps_the_name_and_replaces_whole_files(saved, monkeypatch):
    q, path = saved
    other = path.with_name("weights")
    q.save(other)
    assert ptxrt.QuantizedArray.load(other).shape == q.shape
    before = path.read_bytes()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(ptxrt.FileError, match="disk full"):
        q.save(path)
    assert path.read_bytes() == before and sorted(p.name for p in path.parent.iterdir()) == ["q.npz", "weights"]


def test_every_truncation_is_a_file_error(saved):
    _, path = saved
    data = path.read_bytes()
    for length in range(0, len(data), 37):
        path.write_bytes(data[:length])
        with pytest.raises(ptxrt.FileError, match="no quantized array"):
            ptxrt.QuantizedArray.load(path)


def test_damage_is_a_file_error_or_found_by_its_checksum(saved):
    q, path = saved
    data = bytearray(path.read_bytes())
    for position in range(0, len(data), 11):
        damaged = bytearray(data)
        damaged[position] ^= 0xFF
        path.write_bytes(damaged)
        try:
            again = ptxrt.QuantizedArray.load(path)
        except ptxrt.FileError:
            continue
        np.testing.assert_array_equal(again.codes, q.codes)


def _npz(**fields):
    buffer = io.BytesIO()
    np.savez(buffer, **fields)
    return buffer.getvalue()


FIRST = dict(
    codes=np.zeros((1, 16), np.uint8),
    scales=np.zeros((1, 1), np.uint8),
    format=np.array("mxfp4"),
    shape=np.array([1, 32]),
)
GOOD = dict(FIRST, axis=np.array(-1), scale_layout=np.array("linear"))


@pytest.mark.parametrize(
    "fields, words",
    [
        (dict(codes=np.zeros((1, 15), np.uint8)), "codes is uint8 \\[1, 15\\]"),
        (dict(codes=np.zeros((1, 16), np.int16)), "codes is int16"),
        (dict(scales=np.zeros((1, 2), np.uint8)), "scales is uint8 \\[1, 2\\]"),
        (dict(format=np.array("mxfp5")), "format is 'mxfp5'"),
        (dict(format=np.array(4)), "format is no name"),
        (dict(axis=np.array(0.0)), "axis is no number"),
        (dict(axis=np.array(2)), "axis is 2"),
        (dict(axis=np.array(0)), "codes is uint8 \\[1, 16\\]"),
        (dict(scale_layout=np.array("4x128")), "scale_layout is '4x128'"),
        (dict(scale_layout=np.array(["linear"])), "scale_layout is no name"),
        (dict(scale_layout=np.array("128x4")), "scales of uint8 \\[512\\]"),
        (dict(global_scale=np.array(1.0)), "mxfp4 has none"),
        (dict(format=np.array("nvfp4"), scales=np.zeros((1, 2), np.uint8)), "has a global_scale"),
        (
            dict(format=np.array("nvfp4"), scales=np.zeros((1, 2), np.uint8), global_scale=np.array(-1.0)),
            "one positive number",
        ),
        (dict(shape=np.array([1.0, 32.0])), "no list of whole numbers"),
        (dict(shape=np.array([1, -32])), "shape is"),
        (dict(shape=np.array([[1, 32]])), "no list of whole numbers"),
        (dict(shape=np.array(32)), "no list of whole numbers"),
        (dict(codes=np.array([{}], object)), "pickled objects, which are never loaded"),
    ],
)
def test_foreign_contents_are_file_errors(tmp_path, fields, words):
    path = tmp_path / "q.npz"
    path.write_bytes(_npz(**{**GOOD, **fields}))
    with pytest.raises(ptxrt.FileError, match=words):
        ptxrt.QuantizedArray.load(path)


def test_files_of_other_kinds_are_file_errors(tmp_path):
    path = tmp_path / "q.npz"
    np.save(tmp_path / "q.npy", np.zeros(3))
    with zipfile.ZipFile(tmp_path / "plain.zip", "w") as archive:
        archive.writestr("codes", "text")
    contents = [
        b"",
        b"PK",
        b"hello",
        b"\x93NUMPY",
        (tmp_path / "q.npy").read_bytes(),
        (tmp_path / "plain.zip").read_bytes(),
    ]
    contents.append(_npz(codes=GOOD["codes"]))
    contents.append(_npz(**FIRST, axis=GOOD["axis"]))
    contents.append(_npz(**GOOD, more=np.zeros(3)))
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(ptxrt.FileError):
            ptxrt.QuantizedArray.load(path)
    with pytest.raises(ptxrt.FileError, match="does not exist"):
        ptxrt.QuantizedArray.load(tmp_path / "nothing.npz")


# Errors


def test_wrong_quantize_calls_say_what_to_do(emulator):
    x = np.zeros((4, 64), np.float32)
    read_only = quantize_reference(x, "mxfp4")
    read_only.codes.flags.writeable = False
    memory = np.zeros(4 * 32 + 4, np.uint8)
    parts = dict(codes=memory[:128].reshape(4, 32), scales=memory[120:128].reshape(4, 2))
    in_one_memory = ptxrt.QuantizedArray(**parts, format="mxfp4", shape=(4, 64))
    repeated = np.lib.stride_tricks.as_strided(np.zeros(64, np.float32), (4, 64), (0, 4))
    for call, words in [
        (lambda: ptxrt.quantize(x, "mxfp5"), "format is 'mxfp5'; there are 'mxfp4', 'mxfp8'"),
        (lambda: ptxrt.quantize(x, None), "format is None"),
        (lambda: ptxrt.quantize(x, ["mxfp4"]), "format is"),
        (
            lambda: ptxrt.quantize(x[:, :40], "mxfp4"),
            "axis -1 of x .*length 40; mxfp4 needs a multiple of 32. Pass pad=True .* to 64, or cut it to 32",
        ),
        (lambda: ptxrt.quantize(x[:, :8], "nvfp4"), "length 8; nvfp4 needs a multiple of 16. Pass pad=True .* to 16.$"),
        (lambda: ptxrt.quantize(x, "mxfp8", axis=0), "axis -2 of x .* has length 4"),
        (lambda: ptxrt.quantize(x, "mxfp4", axis=2), "axis is 2; an array of shape .* has axes -2 to 1"),
        (lambda: ptxrt.quantize(x, "mxfp4", axis=True), "axis is True"),
        (lambda: ptxrt.quantize(x, "mxfp4", axis="last"), "axis is 'last'"),
        (
            lambda: ptxrt.quantize(x, "mxfp4", scale_rule="round"),
            "scale_rule is 'round'; mxfp4 has 'floor', 'ceil', 'rceil', 'even'",
        ),
        (lambda: ptxrt.quantize(x, "nvfp4", scale_rule="floor"), "nvfp4 has 'amax', 'four_over_six'"),
        (lambda: ptxrt.quantize(x, "mxfp4", scale_rule=["floor"]), "scale_rule is"),
        (lambda: ptxrt.quantize(x, "mxfp4", scale_layout="tiled"), "scale_layout is 'tiled'; pass 'linear' or '128x4'"),
        (lambda: ptxrt.quantize(x, "mxfp4", global_scale=1.0), "mxfp4 has none"),
        (lambda: ptxrt.quantize(x, "nvfp4", global_scale=0), "global_scale is 0; pass one positive number"),
        (lambda: ptxrt.quantize(x, "nvfp4", global_scale=-1.0), "one positive number"),
        (lambda: ptxrt.quantize(x, "nvfp4", global_scale=1e300), "that float32 holds"),
        (lambda: ptxrt.quantize(x, "nvfp4", global_scale=np.nan), "one positive number"),
        (lambda: ptxrt.quantize(x, "nvfp4", global_scale=[1.0, 2.0]), r"global_scale has shape \[2\]"),
        (lambda: ptxrt.quantize(x, "nvfp4", global_scale="1"), "global_scale"),
        (
            lambda: ptxrt.quantize(x, "nvfp4", global_scale=ptxrt.to_device(np.float32(1))),
            "on the device, the input is a NumPy array",
        ),
        (
            lambda: ptxrt.quantize(ptxrt.to_device(x), "nvfp4", global_scale=ptxrt.to_device(np.float16(1))),
            "global_scale is float16",
        ),
        (
            lambda: ptxrt.quantize(x.astype(np.float64), "mxfp4"),
            "x is float64 .*convert it to float32, float16 or bfloat16",
        ),
        (lambda: ptxrt.quantize(np.float32(3), "mxfp4"), "single number"),
        (lambda: ptxrt.quantize("text", "mxfp4"), "single number|x is"),
        (lambda: ptxrt.quantize([[1, 2], [3]], "mxfp4"), "x is a list"),
        (lambda: ptxrt.quantize(x, "mxfp4", out=x), "pass a QuantizedArray of mxfp4"),
        (lambda: ptxrt.quantize(x, "mxfp4", out=ptxrt.quantize(x[:2], "mxfp4")), r"shape \[4, 64\]"),
        (lambda: ptxrt.quantize(x, "mxfp4", out=ptxrt.quantize(x, "mxfp4", scale_layout="128x4")), "scales 128x4"),
        (
            lambda: ptxrt.quantize(x, "mxfp4", out=ptxrt.quantize(ptxrt.to_device(x), "mxfp4")),
            "out.codes is on the device, x is a NumPy array",
        ),
        (
            lambda: ptxrt.quantize(ptxrt.to_device(x), "mxfp4", out=ptxrt.quantize(x, "mxfp4")),
            "out.codes is a NumPy array, x is on the device",
        ),
        (lambda: ptxrt.quantize(x, "mxfp4", out=read_only), "out.codes is read-only"),
        (lambda: ptxrt.quantize(x, "mxfp4", out=in_one_memory), "out.codes overlaps out.scales; pass memory of its"),
        (lambda: ptxrt.dequantize(x), "q is a ndarray"),
        (lambda: ptxrt.dequantize(quantize_reference(x, "mxfp4"), x), "dtype is array"),
        (lambda: ptxrt.dequantize(quantize_reference(x, "mxfp4"), np.float16(1)), r"dtype is np.float16\(1.0\); pass"),
        (lambda: ptxrt.dequantize(quantize_reference(x, "mxfp4"), out=repeated), "whose elements have memory of their"),
        (lambda: ptxrt.dequantize(ptxrt.quantize(x, "mxfp4"), np.float64), "dtype is .*float64"),
        (lambda: ptxrt.dequantize(ptxrt.quantize(x, "mxfp4"), "nothing"), "dtype is 'nothing'"),
        (lambda: ptxrt.dequantize(ptxrt.quantize(x, "mxfp4"), out=x[:2]), r"out has shape \[2, 64\]"),
        (lambda: ptxrt.dequantize(ptxrt.quantize(x, "mxfp4"), out=[1]), "out is a list"),
        (
            lambda: ptxrt.dequantize(ptxrt.quantize(x, "mxfp4"), out=ptxrt.to_device(x)),
            "out is on the device, q is a NumPy array",
        ),
        (lambda: ptxrt.swizzle_scales(x), "scales is float32"),
        (lambda: ptxrt.swizzle_scales(np.uint8(3)), "axis is -1; an array of shape .* has no axes"),
        (lambda: ptxrt.swizzle_scales(np.zeros((2, 2), np.uint8), axis=2), "axis is 2"),
        (lambda: ptxrt.unswizzle_scales(np.zeros(512, np.uint8), (129, 4)), "512 bytes came; .* have 1024"),
        (lambda: ptxrt.unswizzle_scales(np.zeros(512, np.int32), (128, 4)), "bytes is int32"),
        (lambda: ptxrt.unswizzle_scales(np.zeros(512, np.uint8), 128), "shape is 128"),
        (lambda: QUANTIZE["mxfp4"](x, rule=4), "rule is 4; declared as i32 of 0, 1, 2, 3"),
    ]:
        with pytest.raises(ptxrt.ArgumentError, match=words):
            call()


def test_a_quantized_array_checks_its_bytes():
    codes, scales = np.zeros((2, 16), np.uint8), np.zeros((2, 1), np.uint8)

    def make(codes=codes, scales=scales, format="mxfp4", shape=(2, 32), **rest):
        return ptxrt.QuantizedArray(codes, scales, format=format, shape=shape, **rest)

    assert make(scales=scales.view(ml_dtypes.float8_e8m0fnu)).shape == (2, 32)
    assert make(shape=(2, 17)).shape == (2, 17)
    assert make(format="nvfp4", scales=np.zeros((2, 2), np.uint8), global_scale=1).global_scale == 1
    for change, words in [
        (
            dict(codes=codes[:1]),
            "codes is uint8 \\[1, 16\\]; mxfp4 of shape \\[2, 32\\] has codes of uint8 \\[2, 16\\]",
        ),
        (dict(codes=codes.astype(np.int32)), "codes is int32"),
        (dict(scales=scales[:, :0]), "scales is uint8 \\[2, 0\\]"),
        (dict(shape=(2, 33)), r"codes of uint8 \[2, 32\]"),
        (dict(shape=()), "axis is -1; an array of shape .* has no axes"),
        (dict(axis=0), r"codes of uint8 \[16, 32\]"),
        (dict(axis=5), "axis is 5"),
        (dict(scale_layout="4x4"), "scale_layout is '4x4'"),
        (dict(scale_layout="128x4"), r"scales of uint8 \[512\]"),
        (dict(shape=7), "pass a tuple"),
        (dict(shape=(2, 32.5)), "pass a tuple"),
        (dict(format="nvfp5"), "format is 'nvfp5'"),
        (dict(format="nvfp4", scales=np.zeros((2, 2), np.uint8)), "nvfp4 has a global_scale; pass it, or 1"),
        (dict(global_scale=1.0), "global_scale is 1.0; mxfp4 has none"),
    ]:
        with pytest.raises(ptxrt.ArgumentError, match=words):
            make(**change)


@pytest.mark.parametrize("text", ["native", "portable"])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=lambda dtype: np.dtype(dtype).name)
def test_zeros_are_zeros_under_any_global_scale(text, dtype):
    """A block of zeros under a global scale so large that its step exceeds the dtype, next to an ordinary block."""
    x = np.zeros((2, 64), dtype)
    x[0, 16:32], x[1, ::3] = np.linspace(-60000, 60000, 16), -0.0
    with ptxrt.using("emulator", ptx=text):
        for scale in [2.0**power * factor for power in range(-20, 60, 5) for factor in (1, 1.37)]:
            for axis in (0, 1):
                source = x if axis else np.ascontiguousarray(x.T)
                got = ptxrt.quantize(source, "nvfp4", axis=axis, global_scale=scale)
                want = quantize_reference(source, "nvfp4", axis=axis, global_scale=scale)
                np.testing.assert_array_equal(got.codes, want.codes)
                np.testing.assert_array_equal(got.scales, want.scales)


def test_dequantized_views_of_a_device(machine):
    """Codes and scales may have gaps, or lie backwards."""
    q = ptxrt.quantize(np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32), "mxfp8")
    want, (codes, scales) = ptxrt.dequantize(q), (x.view(np.uint8) for x in (q.codes, q.scales))
    wide, twice = ptxrt.zeros((4, 96), np.uint8), ptxrt.to_device(np.concatenate([scales, scales], axis=1))
    wide[:, 8:72] = codes
    gaps = ptxrt.QuantizedArray(wide[:, 8:72], twice[:, :2], format="mxfp8", shape=(4, 64))
    back = (ptxrt.to_device(x)[::-1] for x in (codes, scales))
    backward = ptxrt.QuantizedArray(*back, format="mxfp8", shape=(4, 64))
    np.testing.assert_array_equal(ptxrt.dequantize(gaps).to_numpy(), want)
    np.testing.assert_array_equal(ptxrt.dequantize(backward).to_numpy(), want[::-1])
