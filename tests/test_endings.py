"""The epilogue that kernels share: float32 values in lanes give the bytes of `quantize`, in both layouts, for any
values."""

import numpy as np
import pytest

import ptxrt
from ptxrt.ops.endings import ENDINGS, WAYS, ending_layout, probe_ending
from ptxrt.ops.quantize import quantize_reference

RULES = {
    "mxfp8": ("floor", "ceil", "rceil", "even"),
    "mxfp4": ("floor", "ceil", "rceil", "even"),
    "nvfp4": ("amax", "four_over_six"),
}


def values_of_every_kind(rows, cols, seed=0):
    """Normal values at scales from subnormal to nearly infinite, zeros of both signs, NaN and infinities."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, cols)).astype(np.float32)
    x = np.ldexp(x, rng.integers(-140, 120, (rows, 1))).astype(np.float32)
    x[0], x[1] = 0, -0.0
    x[2, cols // 2], x[3, 5], x[4, cols - 1] = np.nan, np.inf, -np.inf
    x[5] = 6 * rng.choice([-1, 1], cols)  # ties and largest values
    x[6] = rng.choice([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6], cols)
    x[7] = np.float32(3.4e38) * rng.choice([-1, 1], cols)
    return x


def run(x, format, rule, swizzled, way, global_scale):
    layout = ending_layout(format, x.shape, swizzled)
    return probe_ending(
        x,
        codes=True,
        scales=True,
        code_bytes=layout.code_bytes,
        scale_bytes=int(np.prod(layout.scales_shape)),
        ending=ENDINGS.index(format) + 1,
        rule=RULES[format].index(rule),
        swizzled=int(swizzled),
        way=way,
        global_scale=global_scale,
    )


def check_bytes(x, format, rule, swizzled, way, global_scale):
    level = dict(global_scale=global_scale) if format == "nvfp4" else {}
    layout = "128x4" if swizzled else "linear"
    want = quantize_reference(x, format, scale_rule=rule, scale_layout=layout, pad=True, **level)
    codes, scales = run(x, format, rule, swizzled, way, global_scale)
    np.testing.assert_array_equal(codes, want.codes)
    np.testing.assert_array_equal(scales.reshape(want.scales.shape), want.scales)


CHOICES = [(format, rule) for format in ENDINGS for rule in RULES[format]]


@pytest.mark.parametrize("text", ["native", "portable"])
@pytest.mark.parametrize("way", range(len(WAYS)), ids=WAYS)
@pytest.mark.parametrize("format, rule", CHOICES)
def test_the_bytes_of_quantize(text, format, rule, way):
    with ptxrt.using("emulator", ptx=text):
        for i, swizzled in enumerate((False, True)):
            check_bytes(values_of_every_kind(40, 128, i), format, rule, swizzled, way, (0.37, 2.0**-70)[i])


@pytest.mark.gpu
@pytest.mark.parametrize("way", range(len(WAYS)), ids=WAYS)
@pytest.mark.parametrize("format, rule", CHOICES)
def test_the_bytes_of_quantize_on_a_gpu(gpu, format, rule, way):
    for i, cols in enumerate((128, 1024, 208)):
        check_bytes(values_of_every_kind(400, cols, i), format, rule, bool(i % 2), way, (0.37, 1.0, 2.0**-70)[i])


@pytest.mark.parametrize("text", ["native", "portable"])
def test_the_kernel_quantize_gives_the_same(text):
    x = values_of_every_kind(24, 96)
    with ptxrt.using("emulator", ptx=text):
        for format in ENDINGS:
            level = dict(global_scale=0.5) if format == "nvfp4" else {}
            want = ptxrt.quantize(x, format, **level)
            codes, scales = run(x, format, RULES[format][0], False, 1, 0.5)
            np.testing.assert_array_equal(codes, want.codes)
            np.testing.assert_array_equal(scales.reshape(want.scales.shape), want.scales)
