"""Matrix products: exact ones bit for bit, others against float64, epilogues against separate launches, and wrong
calls."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ptxrt
from ptxrt.errors import ArgumentError
from ptxrt.ops.gemm import exact_matmul
from ptxrt.ops.gemm_kernels import (
    BLOCK_PAIRS,
    NARROW_COLS,
    NARROW_ROWS,
    gemm_bf16,
    tile_for,
    tiles_of,
)

BF16 = ml_dtypes.bfloat16


def normal(*shape, dtype=BF16, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def integers(*shape, dtype=BF16, seed=0, largest=4):
    return np.random.default_rng([seed, *shape]).integers(-largest, largest + 1, shape).astype(dtype)


def host(x):
    return x if isinstance(x, np.ndarray) else x.to_numpy()


@pytest.fixture(params=["host", "device"])
def either_side(emulator, request):
    """A function that puts an array on one side."""
    return ptxrt.to_device if request.param == "device" else lambda x: x


def is_close(got, want, depth):
    """Within the error of float32 sums of `depth` products."""
    return ptxrt.compare(got, want).relative_l2 <= 1e-6 * np.sqrt(max(depth, 1))


@pytest.mark.parametrize("dtype", [BF16, np.float16])
@pytest.mark.parametrize("tile", tiles_of("bf16", "bf16"))
def test_an_identity_gives_the_other_operand(text_machine, tile, dtype):
    """Each element of an operand comes out at its place, wherever it lies in tiles, stages and fragments."""
    depth = 136
    values = integers(70, depth, dtype=dtype, largest=200)
    eye = np.eye(depth, dtype=dtype)
    got = gemm_bf16(values[None], eye[None], out_f32=True, tile=tile)[0]
    np.testing.assert_array_equal(got, values.astype(np.float32))
    got = gemm_bf16(eye[None], values[None], out_f32=True, tile=tile)[0]
    np.testing.assert_array_equal(got, values.astype(np.float32).T)


@pytest.mark.parametrize(
    "rows, cols, depth", [(1, 1, 8), (64, 64, 64), (65, 63, 72), (130, 260, 264), (128, 256, 96), (5, 384, 1000)]
)
def test_integers_are_exact(text_machine, rows, cols, depth):
    a, b = integers(rows, depth), integers(cols, depth, seed=1)
    got = ptxrt.matmul(a, b, out_dtype=np.float32)
    np.testing.assert_array_equal(got, a.astype(np.float32) @ b.astype(np.float32).T)


def test_no_bit_depends_on_the_tile_or_on_other_rows(text_machine):
    a, b = normal(1, 70, 200), normal(1, 130, 200, seed=1)
    whole = [gemm_bf16(a, b, out_f32=True, tile=tile) for tile in tiles_of("bf16", "bf16")]
    for other in whole[1:]:
        np.testing.assert_array_equal(other, whole[0])
    np.testing.assert_array_equal(gemm_bf16(a[:, 33:34], b, out_f32=True), whole[0][:, 33:34])
    np.testing.assert_array_equal(gemm_bf16(a, b[:, 65:70], out_f32=True), whole[0][:, :, 65:70])


@pytest.mark.parametrize("rows, cols, depth", [(1, 17, 8), (16, 384, 392), (33, 70, 1544), (64, 64, 64)])
def test_narrow_blocks_have_the_bits_of_whole_tiles(text_machine, rows, cols, depth):
    a, b = normal(2, rows, depth), normal(2, cols, depth, seed=1)
    bias, residual = normal(2, cols, seed=2), normal(2, rows, cols, seed=3)
    epilogue = dict(bias_bf16=bias, residual_bf16=residual, alpha=0.3, activation=2, tile=64)
    for out in ("out_f32", "out_bf16"):
        narrow, whole = (
            gemm_bf16(a, b, **epilogue, **{out: True}, multiprocessors=count)
            for count in (2 * -(-rows // NARROW_ROWS) * -(-cols // NARROW_COLS), 1)
        )
        np.testing.assert_array_equal(narrow.view(np.uint8), whole.view(np.uint8))


@pytest.mark.parametrize("multiprocessors", [132, 170])
@pytest.mark.parametrize(
    "rows, in_16_bits, in_codes",
    [(128, 64, 64), (256, 64, 64), (512, 128, 128), (1024, 128, 256), (8192, 128, 256)],
)
def test_the_tile_keeps_multiprocessors_busy(rows, in_16_bits, in_codes, multiprocessors):
    """Products by 4096 x 4096: small tiles where large ones would leave multiprocessors idle."""
    for a, tile in (("bf16", in_16_bits), ("nvfp4", in_codes)):
        assert tile_for(rows, 4096, 1, multiprocessors, tiles_of(a, a)) == tile
    assert tile_for(640, 4096, 1, multiprocessors, tiles_of("bf16", "bf16")) == 128
    assert tile_for(128, 512, 32, multiprocessors, (64, 128)) == tile_for(4096, 512, 1, multiprocessors, (64, 128))


@pytest.mark.parametrize(
    "a_shape, b_shape",
    [
        ((5, 24), (2, 7, 24)),
        ((2, 3, 5, 24), (7, 24)),
        ((2, 1, 5, 24), (3, 7, 24)),
        ((1, 2, 1, 2, 3, 24), (2, 1, 1, 3, 24)),
    ],
)
def test_leading_axes_broadcast(text_machine, a_shape, b_shape):
    a, b = normal(*a_shape), normal(*b_shape, seed=1)
    got, want = ptxrt.matmul(a, b, out_dtype=np.float32), exact_matmul(a, b)
    assert got.shape == want.shape and is_close(got, want, 24)
    packed = ptxrt.matmul(a, b, out_format="mxfp8")
    np.testing.assert_array_equal(packed.codes, ptxrt.quantize(got, "mxfp8", scale_rule="rceil", pad=True).codes)
    if len(got.shape) == 3:  # a batch item has the same bits as a separate product
        np.testing.assert_array_equal(ptxrt.matmul(a if a.ndim < 3 else a[1], b[1], out_dtype=np.float32), got[1])


def test_operands_of_any_strides(text_machine):
    a, b = normal(30, 2, 70), normal(90, 45, seed=1)
    views = (a[::2, 1, 3::2], b[::3, ::-1][:, :34]), (a[:, 0].T[:34], b[:34].T[:30].T.copy()[:, ::1])
    for x, y in views:
        depth = min(x.shape[-1], y.shape[-1])
        x, y = x[..., :depth], y[..., :depth]
        assert is_close(ptxrt.matmul(x, y, out_dtype=np.float32), exact_matmul(x, y), depth)
    x = ptxrt.to_device(normal(40, 70))
    got = ptxrt.matmul(x[5:25, 3:61], ptxrt.to_device(normal(33, 58, seed=2)), out_dtype=np.float32)
    assert is_close(got.to_numpy(), exact_matmul(normal(40, 70)[5:25, 3:61], normal(33, 58, seed=2)), 58)
    got = ptxrt.matmul(x[:20], x.transpose(1, 0)[:, :33], transpose_b=False, out_dtype=np.float32)
    assert is_close(got.to_numpy(), exact_matmul(normal(40, 70)[:20], normal(40, 70)[:33]), 70)


ACTIVATIONS = ["relu", "gelu", "gelu_tanh", "silu", "swiglu", ("swiglu", dict(limit=1.5, alpha=1.702, offset=1.0))]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activations(text_machine, activation):
    a, b, bias = normal(20, 40), normal(70, 40, seed=1), normal(70, dtype=np.float32, seed=2)
    residual = normal(20, 35 if "swiglu" in activation else 70, dtype=np.float16)
    options = dict(alpha=0.3, bias=bias, activation=activation, residual=residual)
    got = ptxrt.matmul(a, b, out_dtype=np.float32, **options)
    comparison = ptxrt.compare(got, exact_matmul(a, b, **options))
    assert comparison.relative_l2 <= 4e-6, comparison


@pytest.mark.parametrize("dtype", [np.float16, BF16])
@pytest.mark.parametrize("rows", [3, 20, 70])
def test_gated_results_in_16_bits_are_those_in_32_rounded(text_machine, rows, dtype):
    """For rows of any width, as far as chunks of 16 bytes are aligned and beyond."""
    for cols in (64, 70, 320):
        a, b = normal(rows, 40), normal(cols, 40, seed=1)
        whole = ptxrt.matmul(a, b, activation="swiglu", out_dtype=np.float32)
        got = ptxrt.matmul(a, b, activation="swiglu", out_dtype=dtype)
        np.testing.assert_array_equal(got, whole.astype(dtype))


@pytest.mark.parametrize("activation", [None, "silu", "swiglu"])
@pytest.mark.parametrize(
    "format, rule", [("mxfp8", None), ("mxfp8", "floor"), ("mxfp4", None), ("nvfp4", None), ("nvfp4", "four_over_six")]
)
@pytest.mark.parametrize("layout", ["linear", "128x4"])
def test_quantizing_ends_have_the_bytes_of_quantize(text_machine, format, rule, layout, activation):
    level = dict(out_global_scale=0.013) if format == "nvfp4" else {}
    for shape in ((70, 40), (2, 65, 72)):
        a, b = normal(*shape), normal(140, shape[-1], seed=1)
        plain = ptxrt.matmul(a, b, activation=activation, out_dtype=np.float32)
        got = ptxrt.matmul(
            a, b, activation=activation, out_format=format, out_scale_rule=rule, out_scale_layout=layout, **level
        )
        rules = rule or {"mxfp8": "rceil", "mxfp4": "even", "nvfp4": "amax"}[format]
        level_of = dict(global_scale=0.013) if format == "nvfp4" else {}
        want = ptxrt.quantize(plain, format, scale_rule=rules, scale_layout=layout, pad=True, **level_of)
        np.testing.assert_array_equal(got.codes, want.codes)
        np.testing.assert_array_equal(got.scales, want.scales)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
def test_results_where_the_caller_wants_them(text_machine, dtype):
    a, b = integers(20, 32), integers(24, 32, seed=1)
    want = a.astype(np.float32) @ b.astype(np.float32).T
    whole = np.full((20, 60), 7, dtype)
    given = whole[:, 10:58:2]
    assert ptxrt.matmul(a, b, out=given) is given
    np.testing.assert_array_equal(given.astype(np.float32), want.astype(dtype).astype(np.float32))
    assert (whole[:, 11:58:2] == 7).all() and (whole[:, :10] == 7).all()
    device = ptxrt.to_device(integers(20, 24, dtype=dtype, seed=5))
    assert ptxrt.matmul(ptxrt.to_device(a), ptxrt.to_device(b), residual=device, out=device) is device
    np.testing.assert_array_equal(
        device.to_numpy().astype(np.float32),
        (want + integers(20, 24, dtype=np.float32, seed=5)).astype(dtype).astype(np.float32),
    )


def test_quantized_results_where_the_caller_wants_them(text_machine):
    a, b = integers(20, 32), integers(64, 32, seed=1)
    want = ptxrt.matmul(a, b, out_format="mxfp4")
    out = ptxrt.quantize(np.zeros((20, 64), np.float32), "mxfp4")
    assert ptxrt.matmul(a, b, out=out) is out
    np.testing.assert_array_equal(out.codes, want.codes)


def test_outputs_share_no_array_with_quantized_operands(either_side):
    a = QUANTIZED(normal(6, 64).astype(np.float32), "mxfp8")
    a, b = (x.with_arrays({n: either_side(part.copy()) for n, part in x.arrays.items()}) for x in (a, a))
    new = either_side(np.zeros((6, 32), np.uint8)), either_side(np.zeros((6, 1), np.uint8))
    whole = either_side(np.zeros((6, 33), np.uint8))
    for codes, scales, words in [
        (new[0], a.scales[:, :1], "out.scales overlaps a.scales"),
        (new[0], b.scales[:, 1:], "out.scales overlaps b.scales"),
        (a.codes[:, :32], new[1], "out.codes overlaps a.codes"),
        (whole[:, :32], whole[:, 5:6], "out.codes overlaps out.scales"),
    ]:
        out = ptxrt.QuantizedArray(codes, scales, format="mxfp8", shape=(6, 6))
        with pytest.raises(ArgumentError, match=words):
            ptxrt.matmul(a, b, out=out)


def test_outputs_beside_an_input(either_side):
    """Columns of one array that share no element, though the bytes of both reach over each other."""
    both, b = normal(40, 80, dtype=np.float16), normal(40, 40, dtype=np.float16)
    want = ptxrt.matmul(both[:, :40].copy(), b)
    both, b = either_side(both), either_side(b)
    with pytest.raises(ArgumentError, match="out overlaps a"):
        ptxrt.matmul(both[:, :40], b, out=both[:, 39:79])
    ptxrt.matmul(both[:, :40], b, out=both[:, 40:])
    np.testing.assert_array_equal(host(both)[:, 40:], want)


def test_global_scales_of_out_are_written_in_place(emulator):
    """A number goes to the scalar that `out` has, unless it is an input's; a device scalar replaces it."""
    a, b = ptxrt.to_device(normal(6, 48)), ptxrt.to_device(normal(40, 48))
    want = ptxrt.matmul(a, b, out_format="nvfp4", out_global_scale=0.02).to_numpy()
    ones = ptxrt.to_device(np.ones((6, 40), np.float32))
    for _ in range(3):
        out = ptxrt.quantize(ones, "nvfp4", pad=True)
        scalar = out.global_scale
        assert ptxrt.matmul(a, b, out=out, out_global_scale=0.02) is out and out.global_scale is scalar
        np.testing.assert_array_equal(out.to_numpy().codes, want.codes)
        assert scalar.to_numpy() == np.float32(0.02)
    given = ptxrt.to_device(np.float32(0.03))
    for own in (given, None, given, None):
        out = ptxrt.quantize(ones, "nvfp4", pad=True, global_scale=own)
        ptxrt.matmul(a, b, out=out, out_global_scale=given)
        assert out.global_scale.address == given.address and given.to_numpy() == np.float32(0.03)
    q = ptxrt.quantize(a, "nvfp4")
    before, want = q.global_scale.to_numpy(), ptxrt.matmul(q, q, out_format="nvfp4", out_global_scale=0.02).to_numpy()
    for _ in range(3):
        codes, scales = (ptxrt.to_device(np.zeros_like(x)) for x in (want.codes, want.scales))
        out = ptxrt.QuantizedArray(codes, scales, format="nvfp4", shape=(6, 6), global_scale=q.global_scale)
        ptxrt.matmul(q, q, out=out, out_global_scale=0.02)
        np.testing.assert_array_equal(out.codes.to_numpy(), want.codes)
        assert q.global_scale.to_numpy() == before and out.global_scale.to_numpy() == np.float32(0.02)


def test_interleaved_weights_have_a_global_scale_of_their_own(emulator):
    x = ptxrt.to_device(normal(8, 32))
    gate, up = (ptxrt.quantize(x, "nvfp4", global_scale=0.01) for _ in range(2))
    both = ptxrt.interleave_rows(gate, up)
    before = np.asarray(both)
    ptxrt.quantize(x, "nvfp4", global_scale=3.0, out=gate)
    np.testing.assert_array_equal(np.asarray(both), before)


def test_views_of_device_arrays_that_are_refused(emulator):
    a, b, c = (ptxrt.to_device(x) for x in (normal(6, 40), normal(8, 40), normal(6, 8)))
    vector = ptxrt.to_device(np.ones(40, np.float32))
    for name, call in dict(
        a=lambda: ptxrt.matmul(a[::-1], b),
        b=lambda: ptxrt.matmul(a, b[:, ::-1]),
        bias=lambda: ptxrt.matmul(a, b, bias=vector[7::-1]),
        residual=lambda: ptxrt.matmul(a, b, residual=c[::-1]),
        a_norm=lambda: ptxrt.matmul(a, b, a_norm=vector[::-1]),
        out=lambda: ptxrt.matmul(a, b, out=c[::-1]),
    ).items():
        with pytest.raises(ArgumentError, match=f"^matmul: {name} .* has strides of .*; copy it"):
            call()
    with pytest.raises(ArgumentError, match="^matmul: out is read-only"):
        ptxrt.matmul(a, b, out=c[:1].broadcast_to((6, 8)))


def test_global_scales_on_the_device_of_the_other_operand(emulator):
    a, b, one = normal(6, 64), normal(32, 64), ptxrt.to_device(np.float32(1))
    got = ptxrt.matmul(a, ptxrt.to_device(b), out_format="nvfp4", out_global_scale=one)
    np.testing.assert_array_equal(
        got.to_numpy().codes, ptxrt.matmul(a, b, out_format="nvfp4", out_global_scale=1).codes
    )
    both = dict(a_format="nvfp4", b_format="nvfp4")
    got = ptxrt.matmul(a, ptxrt.to_device(b), **both, a_global_scale=one)
    np.testing.assert_array_equal(got.to_numpy(), ptxrt.matmul(a, b, **both, a_global_scale=1))
    with pytest.raises(ArgumentError, match="out_global_scale is on the device"):
        ptxrt.matmul(a, b, out_format="nvfp4", out_global_scale=one)


def test_residuals_in_float64(emulator):
    a, b = normal(6, 40), normal(8, 40)
    got = ptxrt.matmul(a, b, residual=np.full((6, 8), 0.1))
    np.testing.assert_array_equal(got, ptxrt.matmul(a, b, residual=np.full((6, 8), 0.1, np.float32)))


def test_empty_products(text_machine):
    a, b = normal(3, 0), normal(4, 0)
    np.testing.assert_array_equal(
        ptxrt.matmul(a, b, bias=np.arange(4.0), residual=np.ones((3, 4), np.float32)).astype(int),
        np.arange(4) + np.ones((3, 1), int),
    )
    assert ptxrt.matmul(normal(0, 8), normal(4, 8)).shape == (0, 4)
    assert ptxrt.matmul(normal(2, 5, 8), normal(0, 8)).shape == (2, 5, 0)
    assert ptxrt.matmul(normal(0, 8), normal(32, 8), out_format="mxfp8").shape == (0, 32)


def test_what_is_not_finite_stays_in_its_row_and_column(text_machine):
    a, b = integers(20, 40).astype(np.float32), integers(24, 40, seed=1).astype(np.float32)
    a[3, 7], b[5, 11] = np.nan, np.inf
    got = ptxrt.matmul(a, b, a_format="bf16", b_format="bf16", out_dtype=np.float32)
    want = exact_matmul(a, b)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(got[~np.isnan(want)], want[~np.isnan(want)])


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_sizes(data):
    rows, cols, depth = (data.draw(st.integers(1, 150)) for _ in range(3))
    dtype = data.draw(st.sampled_from([BF16, np.float16]))
    kept = [tuple(slice(gap, None, data.draw(st.sampled_from([1, 2, 3]))) for gap in (0, 1)) for _ in "ab"]
    a, b = (
        integers(3 * n, 3 * depth + 1, dtype=dtype, seed=seed)[part][:n, :depth]
        for seed, (n, part) in enumerate(zip((rows, cols), kept))
    )
    with ptxrt.using("emulator", ptx=data.draw(st.sampled_from(["native", "portable"]))):
        want = a.astype(np.float32) @ b.astype(np.float32).T
        np.testing.assert_array_equal(ptxrt.matmul(a, b, out_dtype=np.float32), want)
        wide = [
            ptxrt.to_device(integers(3 * n, 3 * depth + 1, dtype=dtype, seed=seed))[part][:n, :depth]
            for seed, (n, part) in enumerate(zip((rows, cols), kept))
        ]
        np.testing.assert_array_equal(ptxrt.matmul(*wide, out_dtype=np.float32).to_numpy(), want)


@pytest.mark.parametrize("dtype", [BF16, np.float16])
def test_up_to_eight_rows_end_as_more_rows_do(text_machine, dtype):
    """A thread has one sum of up to eight rows, and a share of a row of more."""
    for depth, cols in ((40, 70), (576, 128)):
        a, b = (ptxrt.to_device(normal(n, depth, dtype=dtype, seed=n)) for n in (20, cols))
        for activation in (None, "swiglu", ("swiglu", dict(limit=0.5, alpha=1.702, offset=1.0)), "gelu"):
            width = cols // 2 if activation and activation != "gelu" else cols
            for out in (BF16, np.float16, np.float32):
                bias = normal(cols, dtype=out, seed=3)
                residual = ptxrt.to_device(normal(20, width, dtype=out, seed=4))
                every = {}, dict(bias=bias), dict(residual=residual), dict(bias=bias, residual=residual)
                for options in every if depth == 40 else every[-1:]:
                    whole = ptxrt.matmul(a, b, alpha=0.75, activation=activation, out_dtype=out, **options).to_numpy()
                    for rows in (slice(3, 4), slice(7, 15)):
                        part = {k: v[rows] if k == "residual" else v for k, v in options.items()}
                        got = ptxrt.matmul(a[rows], b, alpha=0.75, activation=activation, out_dtype=out, **part)
                        assert got.to_numpy().tobytes() == whole[rows].tobytes(), (activation, out, options.keys())
                target = residual[3:8].copy()
                ptxrt.matmul(a[3:8], b, activation=activation, residual=target, out=target)
                want = ptxrt.matmul(a, b, activation=activation, residual=residual, out_dtype=out)
                assert target.to_numpy().tobytes() == want.to_numpy()[3:8].tobytes()


@pytest.mark.parametrize("dtype", [BF16, np.float16])
def test_normed_rows_have_the_bits_of_both_calls(text_machine, dtype):
    """In one launch if the rows are few and multiplied in 16 bits, else in two; special values included."""
    wide = lambda x: ptxrt.to_device(np.concatenate([x, x], -1))[:, : x.shape[1]]  # rows with gaps
    for rows, cols, depth, one_launch in [
        *((1, 40, 576, True), (8, 72, 1024, True), (4, 40, 2048, True), (7, 33, 32, True), (1, 40, 8192, True)),
        *((5, 40, 1056, False), (9, 40, 64, False), (70, 40, 64, False), (2, 40, 72, False)),
    ]:
        a, b, weight = normal(rows, depth, dtype=dtype), normal(cols, depth, dtype=dtype, seed=1), normal(depth, seed=2)
        a *= 2.0 ** (np.arange(rows) % 7 - 3)[:, None]
        a[-1, 5:9] = [np.nan, np.inf, -0.0, 0.0][rows % 4]
        bias, residual = normal(cols, dtype=np.float32, seed=3), normal(rows, cols, dtype=dtype, seed=4)
        a, b, weight, bias, residual = wide(a), *map(ptxrt.to_device, (b, weight.astype(np.float32), bias, residual))
        options = dict(bias=bias, activation="silu", residual=residual)
        with ptxrt.trace() as seen:
            got = ptxrt.matmul(a, b, a_norm=weight, a_eps=1e-5, **options)
        assert len(list(seen)) == 2 - one_launch, (rows, cols, depth)
        want = ptxrt.matmul(ptxrt.rmsnorm(a, weight, eps=1e-5), b, **options)
        np.testing.assert_array_equal(got.to_numpy().view(np.uint16), want.to_numpy().view(np.uint16))
        # rows of float32, which are rounded when they are normed
        a = normal(rows, depth, dtype=np.float32)
        a[-1, 5:9] = [np.nan, np.inf, -0.0, 0.0][rows % 4]
        a, options = ptxrt.to_device(a), options | dict(out_dtype=dtype)
        format = {BF16: "bf16"}.get(dtype, "f16")
        with ptxrt.trace() as seen:
            got = ptxrt.matmul(a, b, a_format=format, a_norm=weight, a_eps=1e-5, **options)
        assert len(list(seen)) == 2 - one_launch, (rows, cols, depth)
        want = ptxrt.matmul(ptxrt.rmsnorm(a, weight, eps=1e-5, out_dtype=dtype), b, **options)
        np.testing.assert_array_equal(got.to_numpy().view(np.uint16), want.to_numpy().view(np.uint16))


def test_normed_rows_of_any_kind(text_machine):
    """Rows that are rounded or quantized, weights in 16 bits, batches, many columns: as both calls in turn."""
    a, b = normal(3, 96, dtype=np.float32), normal(40, 96, seed=1)
    weight = normal(96, seed=2)
    got = ptxrt.matmul(a, b, a_format="bf16", a_norm=weight, out_dtype=np.float32)
    want = ptxrt.matmul(ptxrt.rmsnorm(a, weight, out_dtype=BF16), b, out_dtype=np.float32)
    np.testing.assert_array_equal(got, want)
    got = ptxrt.matmul(a[None], b, a_format="bf16", a_norm=weight, out_format="mxfp8")
    want = ptxrt.matmul(ptxrt.rmsnorm(a[None], weight, out_dtype=BF16), b, out_format="mxfp8")
    assert (got.codes == want.codes).all() and (got.scales == want.scales).all()
    for format, level in (("mxfp8", None), ("nvfp4", 0.5)):
        options = dict(b_format=format, out_dtype=np.float32)
        got = ptxrt.matmul(a, b, a_format=format, a_global_scale=level, a_norm=weight, a_eps=0, **options)
        rows = ptxrt.rmsnorm(a, weight, eps=0, format=format, global_scale=level)
        np.testing.assert_array_equal(got, ptxrt.matmul(rows, b, **options))
    many = ptxrt.ops.gemm_kernels.NORMED_COLS + 8
    rows, weights = normal(1, 32), np.ones(32, np.float32)
    with ptxrt.trace() as seen:
        ptxrt.matmul(rows, normal(many, 32), a_norm=weights)
    assert {launch.kernel for launch in seen} == {"norm_rows", "gemm_few_bf16"}
    assert ptxrt.matmul(np.zeros((2, 0), BF16), np.zeros((8, 0), BF16), a_norm=np.ones(0)).tolist() == [[0] * 8] * 2
    assert ptxrt.matmul(np.zeros((0, 32), BF16), normal(8, 32), a_norm=weights).shape == (0, 8)


@pytest.mark.parametrize("pair", [("bf16", "bf16"), ("f16", "f16"), *BLOCK_PAIRS], ids="-".join)
def test_wide_blocks_have_the_bits_of_few_rows(text_machine, monkeypatch, pair):
    """Special values and scales that f16 does not hold included."""
    a, b = normal(64, 1312, dtype=np.float32), normal(72, 1312, dtype=np.float32, seed=1)
    a[3, 700:800] *= 2.0**-40
    a[5, 40], a[40, 1300], b[9, 1000:1100] = np.nan, np.inf, 0
    bias, residual = normal(72, dtype=np.float32, seed=2), normal(64, 72, dtype=np.float32, seed=3)
    gate = ("swiglu", dict(limit=1.5, alpha=1.702, offset=1.0))
    for rows, options in (
        (64, dict(out_dtype=np.float32)),
        (37, dict(out_dtype=BF16, bias=bias, residual=residual[:37].astype(BF16), alpha=0.3)),
        (50, dict(out_dtype=np.float16, residual=residual[:50])),
        (64, dict(out_dtype=BF16, bias=bias, activation=gate)),
    ):
        got = []
        for wide in (True, False):
            monkeypatch.setattr(ptxrt.ops.gemm, "is_wide", lambda *_, wide=wide: wide)
            with ptxrt.trace() as seen:
                formats = dict(a_format=pair[0], b_format=pair[1])
                got.append(ptxrt.matmul(a[:rows], b, **formats, **options))
            assert ("gemm_wide" if wide else "gemm_few") in [launch.kernel for launch in seen][-1]
        assert got[0].tobytes() == got[1].tobytes(), (rows, list(options))


def test_which_products_of_few_rows_take_wide_blocks():
    rows_of_b = normal(5120, 32, seed=1)
    for rows, cols, formats, options, kernel in (
        (33, 4096, "bf16 bf16", {}, "gemm_wide_bf16"),
        (33, 4088, "bf16 bf16", {}, "gemm_few_bf16"),
        (32, 4096, "f16 f16", {}, "gemm_few_bf16"),
        (17, 5120, "f16 f16", {}, "gemm_wide_bf16"),
        (16, 5120, "bf16 bf16", {}, "gemm_few_bf16"),
        (17, 5120, "bf16 mxfp8", {}, "gemm_wide_bf16_mxfp8"),
        (33, 5112, "mxfp8 mxfp8", {}, "gemm_few_mxfp8"),
        (33, 5120, "mxfp8 mxfp8", dict(activation="swiglu"), "gemm_wide_mxfp8"),
        (32, 5120, "mxfp8 mxfp8", {}, "gemm_few_mxfp8"),
        (64, 5120, "mxfp8 mxfp8", dict(activation="relu"), "gemm_few_mxfp8"),
        (64, 5120, "mxfp8 mxfp8", dict(out_format="mxfp8"), "gemm_few_mxfp8"),
        (64, 5120, "mxfp8 mxfp8", dict(splits=1), "gemm_mxfp8"),
    ):
        a_format, b_format = formats.split()
        a, b = normal(rows, 32).astype(np.float32), rows_of_b[:cols].astype(np.float32)
        with ptxrt.trace() as seen:
            ptxrt.matmul(a, b, a_format=a_format, b_format=b_format, **options)
        assert [launch.kernel for launch in seen][-1] == kernel


@pytest.mark.gpu
@pytest.mark.parametrize(
    "rows, cols, depth",
    [(1, 11008, 4096), (64, 8192, 1096), (77, 5120, 2880), (1000, 2880, 4096), (4096, 4097, 1024), (300, 14336, 1111)],
)
def test_sizes_of_models(gpu, rows, cols, depth):
    a, b = normal(rows, depth), normal(cols, depth, seed=1)
    want = a.astype(np.float32) @ b.astype(np.float32).T
    comparison = ptxrt.compare(ptxrt.matmul(a, b, out_dtype=np.float32), want)
    assert comparison.relative_l2 <= 2e-6 * np.sqrt(depth), comparison


A, B = normal(6, 32), normal(8, 32)
QUANTIZED = ptxrt.quantize


@pytest.mark.parametrize(
    "words, call",
    [
        ("K = 32.*K = 16", lambda m: m(A, normal(8, 16))),
        ("transpose_b=False", lambda m: m(normal(6, 8), normal(8, 9))),
        ("float32; say a_format", lambda m: m(A.astype(np.float32), B)),
        ("a_format is 'fp8'", lambda m: m(A, B, a_format="fp8")),
        ("no product bf16 x f16", lambda m: m(A, B.astype(np.float16))),
        ("do not broadcast", lambda m: m(normal(2, 6, 32), normal(3, 8, 32))),
        ("at least two axes", lambda m: m(A[0], B)),
        ("convert it to float16 or bfloat16, .* or to float32 beside a_format", lambda m: m(A.astype(np.int32), B)),
        ("alpha is 1e.39; pass a number that is finite in float32", lambda m: m(A, B, alpha=1e39)),
        ("limit of swiglu is 1e.39", lambda m: m(A, B, activation=("swiglu", dict(limit=1e39)))),
        ("a_eps is 1e.39", lambda m: m(A, B, a_norm=np.ones(32), a_eps=1e39)),
        ("out_scale_layout is 'x', but the result is not quantized", lambda m: m(A, B, out_scale_layout="x")),
        ("out_scale_layout is '128x4'.*pass out_format", lambda m: m(A, B, out_scale_layout="128x4")),
        ("residual is Quant.*ptxrt.dequantize", lambda m: m(A, A, residual=QUANTIZED(A[:, :6], "mxfp8", pad=True))),
        ("bias is Quant.*ptxrt.dequantize", lambda m: m(A, A, bias=QUANTIZED(A[0, :6], "mxfp8", pad=True))),
        (
            "strides of .0, 4. bytes; pass an array whose",
            lambda m: m(A, B, out=np.lib.stride_tricks.as_strided(np.zeros(8, np.float32), (6, 8), (0, 4))),
        ),
        ("alpha is nan", lambda m: m(A, B, alpha=np.nan)),
        ("alpha is inf", lambda m: m(A, B, alpha=np.inf)),
        ("splits is 3", lambda m: m(A, B, splits=3)),
        ("activation is 'relu6'", lambda m: m(A, B, activation="relu6")),
        ("activation is", lambda m: m(A, B, activation=("relu", dict(limit=1)))),
        ("limit of swiglu is -1", lambda m: m(A, B, activation=("swiglu", dict(limit=-1)))),
        ("even N", lambda m: m(A, B[:7], activation="swiglu")),
        ("bias is .*before the gate", lambda m: m(A, B, activation="swiglu", bias=np.zeros(4))),
        ("bias is", lambda m: m(A, B, bias=np.zeros(9))),
        ("residual is", lambda m: m(A, B, residual=np.zeros((6, 9), np.float32))),
        ("out_format is 'mxfp6", lambda m: m(A, B, out_format="mxfp6_e3m2")),
        ("needs out_global_scale", lambda m: m(A, B, out_format="nvfp4")),
        ("out_global_scale is", lambda m: m(A, B, out_global_scale=1.0)),
        ("beside out_format", lambda m: m(A, B, out_format="mxfp8", out_dtype=np.float32)),
        ("beside out_format", lambda m: m(A, B, out_format="mxfp8", out=np.zeros((6, 8), np.float32))),
        ("scale_rule is 'up'", lambda m: m(A, B, out_format="mxfp8", out_scale_rule="up")),
        ("scale_layout is", lambda m: m(A, B, out_format="mxfp8", out_scale_layout="tiles")),
        ("out_dtype", lambda m: m(A, B, out_dtype=np.int32)),
        ("out has shape", lambda m: m(A, B, out=np.zeros((8, 6), np.float32))),
        ("overlaps a", lambda m: m(A, A, out=A[:, :6])),
        ("not quantized in this call", lambda m: m(A, B, a_scale_rule="even")),
        ("axis -2", lambda m: m(QUANTIZED(A, "mxfp8", axis=0, pad=True), B)),
        ("transpose_b is", lambda m: m(A, B, transpose_b=2)),
        ("matmul: out_global_scale is -1.0;", lambda m: m(A, B, out_format="nvfp4", out_global_scale=-1.0)),
        ("matmul: out_scale_rule is 'amax';", lambda m: m(A, B, out_format="mxfp8", out_scale_rule="amax")),
        ("matmul: out_scale_layout is 'x';", lambda m: m(A, B, out_format="mxfp8", out_scale_layout="x")),
        ("matmul: b_scale_rule is 'amax';", lambda m: m(A, B, a_format="mxfp8", b_format="mxfp8", b_scale_rule="amax")),
        ("matmul: a_global_scale is 0;", lambda m: m(A, B, a_format="nvfp4", b_format="nvfp4", a_global_scale=0)),
        ("16 bits", lambda m: m(A, B, b_format="mxfp4", transpose_b=False)),
        (r"b_format is \['bf16'\]", lambda m: m(A, B, b_format=["bf16"], transpose_b=False)),
        ("out_scale_layout is array", lambda m: m(A, B, out_scale_layout=np.array([1, 2]))),
        ("alpha is np.True_", lambda m: m(A, B, alpha=np.True_)),
        ("a_eps is np.True_", lambda m: m(A, B, a_norm=np.ones(32), a_eps=np.True_)),
        ("offset of swiglu is np.True_", lambda m: m(A, B, activation=("swiglu", dict(offset=np.True_)))),
        ("out_dtype=array", lambda m: m(A, B, out_dtype=np.zeros(2, np.float32))),
        ("out_dtype=np.float32.1", lambda m: m(A, B, out_dtype=np.float32(1))),
        ("a_norm is float32 .33.", lambda m: m(A, B, a_norm=np.ones(33, np.float32))),
        ("a_eps is -1", lambda m: m(A, B, a_norm=np.ones(32), a_eps=-1)),
        ("a_norm came, but a is", lambda m: m(QUANTIZED(A, "mxfp8"), B, b_format="mxfp8", a_norm=np.ones(32))),
        ("without a_global_scale", lambda m: m(A, B, a_format="nvfp4", b_format="nvfp4", a_norm=np.ones(32))),
    ],
)
def test_wrong_calls(words, call):
    with ptxrt.using("emulator"), pytest.raises(ArgumentError, match=words):
        call(ptxrt.matmul)
