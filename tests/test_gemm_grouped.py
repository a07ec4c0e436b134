"""Grouped products, routing, and tokens through experts: groups against separate products, the whole against
float64."""

import ml_dtypes
import numpy as np
import pytest

import ptxrt
from ptxrt.errors import ArgumentError
from ptxrt.ops.gemm import PRODUCTS, exact_matmul
from ptxrt.ops.gemm_kernels import BLOCK_PAIRS, grid_rows

BF16 = ml_dtypes.bfloat16


def operand(format, *shape, seed=0):
    x = np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)
    if format == "bf16":
        return x.astype(BF16)
    return ptxrt.quantize(x, format, **(dict(global_scale=0.01) if format == "nvfp4" else {}))


def part(x, index):
    """Some rows, or one matrix, of an operand."""
    if isinstance(x, np.ndarray):
        return x[index]
    shape = np.empty(x.shape, np.bool_)[index].shape
    return ptxrt.QuantizedArray(
        x.codes[index], x.scales[index], format=x.format, shape=shape, global_scale=x.global_scale
    )


PAIRS = [
    *(("bf16", "bf16"), ("nvfp4", "nvfp4"), ("mxfp8", "mxfp4")),
    *(("bf16", "nvfp4"), ("bf16", "mxfp4"), ("bf16", "mxfp8")),
]
SIZES = [(3, 0, 70, 1), (0, 0, 5, 0), (64, 65, 0, 2)]


@pytest.mark.parametrize(
    "pair, sizes",
    [*((pair, SIZES[0]) for pair in PAIRS), *((pair, sizes) for pair in PAIRS[:2] for sizes in SIZES[1:])],
    ids=lambda x: "-".join(map(str, x)),
)
def test_groups_have_the_bits_of_products_alone(text_machine, pair, sizes):
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    rows, groups = starts[-1], len(sizes)
    a, b = operand(pair[0], rows, 160), operand(pair[1], groups, 72, 160, seed=1)
    alpha, bias = (
        np.exp2(np.arange(groups)).astype(np.float32),
        np.arange(groups * 72, dtype=np.float32).reshape(groups, 72),
    )
    options = dict(out_dtype=np.float32, activation="silu")
    got = ptxrt.matmul_grouped(a, b, starts, alpha=alpha, bias=bias, **options)
    for g in range(groups):
        mine = slice(starts[g], starts[g + 1])
        want = (
            ptxrt.matmul(part(a, mine), part(b, g), alpha=float(alpha[g]), bias=bias[g], **options)
            if sizes[g]
            else got[mine]
        )
        np.testing.assert_array_equal(got[mine], want)
    packed = ptxrt.matmul_grouped(a, b, starts, alpha=alpha, bias=bias, activation="silu", out_format="mxfp8")
    np.testing.assert_array_equal(packed.codes, ptxrt.quantize(got, "mxfp8", scale_rule="rceil", pad=True).codes)


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_matrices_may_lie_along_k_first(text_machine, on_device):
    """b [groups, K, N] gives the bits of b [groups, N, K]; group 1 is empty, group 2 has more than 64 rows."""
    starts = np.array([0, 3, 3, 73], np.int32)
    a, b = operand("bf16", 73, 40), operand("bf16", 3, 40, 24, seed=1)
    want = ptxrt.matmul_grouped(a, np.ascontiguousarray(b.swapaxes(-1, -2)), starts)
    if on_device:
        a, b = ptxrt.to_device(a), ptxrt.to_device(b)
    got = ptxrt.matmul_grouped(a, b, starts, transpose_b=False)
    np.testing.assert_array_equal(np.asarray(got.to_numpy() if on_device else got), want)
    exact = np.asarray(operand("bf16", 73, 40), np.float64)[4] @ np.asarray(operand("bf16", 3, 40, 24, seed=1))[2]
    np.testing.assert_allclose(want[4].astype(np.float64), exact, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("cols", [32, 64, 96, 128])
@pytest.mark.parametrize("format, rule", [("mxfp8", "rceil"), ("mxfp4", "even")])
@pytest.mark.parametrize("sizes", [(2, 3), (70, 0, 5, 1), (70, 65)], ids=str)
def test_gates_of_groups_end_in_whole_blocks(text_machine, cols, format, rule, sizes):
    """The kernel for few rows has 16 columns of a gate, half a block of an MX format; values differ between halves."""
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    a, b = operand("bf16", starts[-1], 64), operand("bf16", len(sizes), cols, 64, seed=1)
    b = b * np.where(np.arange(cols) // 32 % 2, 8, 1).astype(BF16)[:, None]
    wide = ptxrt.matmul_grouped(a, b, starts, activation="swiglu", out_dtype=np.float32)
    want = ptxrt.quantize(wide, format, scale_rule=rule, pad=True)
    got = ptxrt.matmul_grouped(a, b, starts, activation="swiglu", out_format=format)
    np.testing.assert_array_equal(got.codes, want.codes)
    np.testing.assert_array_equal(got.scales.view(np.uint8), want.scales.view(np.uint8))
    alone = ptxrt.matmul(a[: sizes[0]], b[0], activation="swiglu", out_format=format)
    np.testing.assert_array_equal(alone.codes, got.codes[: sizes[0]])


def test_no_rows_of_any_group(emulator):
    a, b = operand("bf16", 6, 64), operand("bf16", 2, 32, 64, seed=1)
    assert ptxrt.matmul_grouped(a, b, [0, 0, 0], rows=[]).shape == (0, 32)


def test_a_global_scale_for_each_group(text_machine):
    """Given in any form of floats, with the format or with `out`."""
    a, b, starts = operand("bf16", 6, 64), operand("bf16", 2, 32, 64, seed=1), [0, 2, 6]
    want = ptxrt.matmul_grouped(a, b, starts, out_format="nvfp4", out_global_scale=np.array([0.5, 0.25], np.float32))
    alone = ptxrt.matmul(a[2:], b[1], out_format="nvfp4", out_global_scale=0.25)
    np.testing.assert_array_equal(want.codes[2:], alone.codes)
    for given in ([0.5, 0.25], np.array([0.5, 0.25])):
        got = ptxrt.matmul_grouped(a, b, starts, out_format="nvfp4", out_global_scale=given)
        np.testing.assert_array_equal(got.codes, want.codes)
        out = ptxrt.quantize(np.zeros((6, 32), np.float32), "nvfp4", global_scale=1.0)
        ptxrt.matmul_grouped(a, b, starts, out=out, out_global_scale=given)
        np.testing.assert_array_equal(out.codes, want.codes)
        np.testing.assert_array_equal(out.scales.view(np.uint8), want.scales.view(np.uint8))


def test_values_of_groups_with_global_scales_of_their_own(emulator):
    """The result has 1 as its global scale, in the scalar of `out`; the scales are alphas of the next product."""
    a, b, starts = operand("bf16", 6, 64), operand("bf16", 2, 32, 64, seed=1), np.array([0, 2, 6], np.int32)
    scales, next_b = np.array([0.5, 0.25], np.float32), operand("nvfp4", 2, 16, 32, seed=2)
    place = ptxrt.to_device
    out = ptxrt.quantize(place(np.ones((6, 32), np.float32)), "nvfp4")
    scalar = out.global_scale
    ptxrt.matmul_grouped(place(a), place(b), place(starts), out=out, out_global_scale=scales)
    assert out.global_scale is scalar and scalar.to_numpy() == 1
    got = ptxrt.matmul_grouped(out, next_b, place(starts), alpha=scales, out_dtype=np.float32)
    alone = ptxrt.matmul(a[2:], b[1], out_format="nvfp4", out_global_scale=0.25)
    want = ptxrt.matmul(alone, part(next_b, 1), out_dtype=np.float32)
    np.testing.assert_array_equal(got.to_numpy()[2:], want)


@pytest.mark.parametrize("groups", [1, 3])
def test_global_scales_of_groups_are_alphas_of_the_next_product(emulator, groups):
    """Of one group, too, on the host and on the device, also beside inputs on the host."""
    a, b, next_b = operand("bf16", 6, 64), operand("bf16", groups, 32, 64, seed=1), operand("bf16", groups, 16, 32)
    starts = np.linspace(0, 6, groups + 1).astype(np.int32)
    scales = np.linspace(0.25, 0.5, groups, dtype=np.float32)
    parts = [slice(*starts[g : g + 2]) for g in range(groups)]
    want = []
    for g, rows in enumerate(parts):
        hidden = ptxrt.matmul(a[rows], b[g], out_format="nvfp4", out_global_scale=scales[g])
        want.append(ptxrt.matmul(hidden, next_b[g], b_format="nvfp4"))
    for put in (np.asarray, ptxrt.to_device):
        hidden = ptxrt.matmul_grouped(a, b, starts, out_format="nvfp4", out_global_scale=put(scales))
        assert hidden.on_device is (put is not np.asarray) and hidden.to_numpy().global_scale == 1
        got = ptxrt.matmul_grouped(hidden, next_b, starts, alpha=put(scales), b_format="nvfp4")
        for g, rows in enumerate(parts):
            np.testing.assert_array_equal(np.asarray(got.to_numpy() if hidden.on_device else got)[rows], want[g])


@pytest.mark.parametrize("scale_layout", ["linear", "128x4"])
def test_gates_of_groups_on_the_device(text_machine, scale_layout):
    """Rows behind the last group become zeros, and nothing that was not written is read."""
    a, b, starts = operand("bf16", 9, 64), operand("bf16", 2, 64, 64, seed=1), np.array([0, 2, 6], np.int32)
    options = dict(activation="swiglu", out_format="mxfp8", out_scale_layout=scale_layout)
    want = ptxrt.matmul_grouped(a[:6], b, starts, **options).to_numpy()
    got = ptxrt.matmul_grouped(*map(ptxrt.to_device, (a, b, starts)), **options).to_numpy()
    np.testing.assert_array_equal(got.codes[:6], want.codes)
    np.testing.assert_array_equal(np.asarray(got)[:6], np.asarray(want))
    assert not got.codes[6:].any()


def test_starts_on_the_device_and_gathered_rows(text_machine):
    a, b = operand("bf16", 9, 64), operand("bf16", 3, 40, 64, seed=1)
    order, starts = np.array([8, 0, 0, 3, 5, 7, 1], np.int32), np.array([0, 2, 2, 6], np.int32)
    out = ptxrt.to_device(np.full((7, 40), 5, np.float32))
    device = [ptxrt.to_device(x) for x in (a, b, starts, order)]
    assert ptxrt.matmul_grouped(*device[:3], rows=device[3], out=out) is out
    got = out.to_numpy()
    np.testing.assert_array_equal(got[:2], ptxrt.matmul(a[[8, 0]], b[0], out_dtype=np.float32))
    np.testing.assert_array_equal(got[2:6], ptxrt.matmul(a[[0, 3, 5, 7]], b[2], out_dtype=np.float32))
    assert (got[6] == 5).all()  # after the last group


@pytest.mark.parametrize("splits, kernels", [(None, {"gemm_few_bf16", "gemm_bf16"}), (1, {"gemm_bf16"})])
def test_entries_behind_the_last_group_are_not_read(text_machine, splits, kernels):
    """They name no row of A. Blocks have more rows than the groups."""
    a, b = operand("bf16", 9, 64), operand("bf16", 2, 40, 64, seed=1)
    order, starts = np.full(120, 1 << 24, np.int32), np.array([0, 5, 5], np.int32)
    order[:5] = [8, 0, 0, 3, 5]
    out = ptxrt.to_device(np.full((120, 40), 5, np.float32))
    on_device = [ptxrt.to_device(x) for x in (a, b, starts, order)]
    with ptxrt.trace() as seen:
        ptxrt.matmul_grouped(*on_device[:3], rows=on_device[3], out=out, splits=splits)
    assert {launch.kernel for launch in seen} == kernels
    want = ptxrt.matmul(a[order[:5]], b[0], out_dtype=np.float32, splits=splits)
    np.testing.assert_array_equal(out.to_numpy()[:5], want)
    assert (out.to_numpy()[5:] == 5).all()


@pytest.mark.parametrize("few", [True, False])
def test_kernels_write_the_rows_of_their_groups_alone(text_machine, few):
    """A kernel leaves rows of groups of other sizes, and rows after the last group, unchanged."""
    product = PRODUCTS["bf16", "bf16"]
    a, b = operand("bf16", 1, 90, 40), operand("bf16", 4, 24, 40, seed=1)
    starts = np.array([0, 70, 75, 80, 80], np.int32)
    out = ptxrt.to_device(np.full((1, 90, 24), 5, np.float32))
    kernel, sizes = (product.few, dict(least_rows=1, most_rows=64)) if few else (product.tiles, dict(least_rows=65))
    kernel(a, b, group_starts=starts, out_f32=out, **sizes)
    got, groups = out.to_numpy()[0], (range(70, 80) if few else range(70))
    parts = [exact_matmul(a[0, start:end], b[g]) for g, (start, end) in enumerate(zip(starts, starts[1:]))]
    want = np.concatenate(parts)
    assert ptxrt.compare(got[groups], want[groups]).relative_l2 < 1e-5
    assert (np.delete(got, groups, axis=0) == 5).all()


@pytest.mark.parametrize("transposed", [False, True])
def test_a_residual_may_be_out(emulator, transposed):
    a, b, added = operand("bf16", 9, 40), operand("bf16", 2, 24, 40, seed=1), operand("bf16", 9, 24, seed=2)
    want = ptxrt.matmul_grouped(a, b, [0, 4, 9], residual=added)
    a, b, starts = map(ptxrt.to_device, (a, b, np.array([0, 4, 9], np.int32)))
    for _ in range(3):  # the second call is recorded
        out = ptxrt.to_device(np.ascontiguousarray(added.T)).T if transposed else ptxrt.to_device(added)
        assert ptxrt.matmul_grouped(a, b, starts, residual=out, out=out) is out
        np.testing.assert_array_equal(out.to_numpy(), want)


def test_more_groups_than_lanes(text_machine):
    """A warp looks at 32 groups at a time. Groups of few and of many rows, and empty ones, lie in each 32."""
    sizes = np.random.default_rng(0).integers(0, 4, 71)
    sizes[[5, 40, 70]] = 66, 130, 65
    sizes[31:34] = 3, 0, 2
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-4, 5, shape).astype(BF16) for shape in ((starts[-1], 16), (71, 8, 16)))
    got = ptxrt.matmul_grouped(*map(ptxrt.to_device, (a, b, starts)), out_dtype=np.float32).to_numpy()
    for g in range(71):
        mine = slice(starts[g], starts[g + 1])
        np.testing.assert_array_equal(got[mine], a[mine].astype(np.float32) @ b[g].astype(np.float32).T)


@pytest.mark.parametrize(
    "rows, groups, least, most", [(70, 4, 1, 64), (70, 4, 65, 70), (200, 128, 1, 64), (9, 1, 1, 9)]
)
@pytest.mark.parametrize("block", [32, 64, 128])
def test_the_grid_covers_every_division_into_groups(rows, groups, least, most, block):
    """As many groups as fit, one row beyond a whole block each, take the most blocks."""
    axes = dict(rows=rows, groups=groups, least=least, most=most, starts=groups + 1)
    blocks = -(-grid_rows(axes, block) // block)
    for size in range(least, most + 1):
        sizes = np.full(min(groups, rows // size), size)
        sizes[-1] += min(rows - sizes.sum(), most - size)
        assert (-(-sizes // block)).sum() <= blocks
    assert blocks <= -(-rows // block) + groups


@pytest.mark.parametrize("splits", [None, 1])
@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
def test_scale_tiles_are_filled_where_groups_end_early(text_machine, format, splits):
    """In a 128x4 tile the scales of rows beyond C are 0; rows after the last group keep their bytes."""
    level = dict(out_global_scale=0.01) if format == "nvfp4" else {}
    a, b = operand("bf16", 9, 64), operand("bf16", 3, 48, 64, seed=1)
    starts = np.array([0, 2, 2, 6], np.int32)
    want = ptxrt.matmul_grouped(a[:6], b, starts, out_format=format, splits=splits, **level)
    out = ptxrt.quantize(np.ones((9, 48), np.float32), format, scale_layout="128x4", pad=True)
    before = out.codes.copy()
    out.scales.view(np.uint8)[:] = 0xAB
    out = out.with_arrays({name: ptxrt.to_device(x) for name, x in out.arrays.items()})
    device = [ptxrt.to_device(x) for x in (a, b, starts)]
    ptxrt.matmul_grouped(*device, out=out, splits=splits, **level)
    got = out.to_numpy()
    np.testing.assert_array_equal(got.codes[:6], want.codes)
    np.testing.assert_array_equal(got.codes[6:], before[6:])
    flat, blocks = got.scales.view(np.uint8), want.scales.shape[-1]
    tile = flat.reshape(-1, 32, 4, 4).transpose(2, 1, 0, 3).reshape(128, -1)  # rows of 32, interleaved by four
    np.testing.assert_array_equal(tile[:6, :blocks], want.scales.view(np.uint8))
    assert (tile[6:9, :blocks] == 0xAB).all() and not tile[9:].any() and not tile[:6, blocks:].any()


@pytest.mark.parametrize("pair", [("bf16", "bf16"), *BLOCK_PAIRS], ids="-".join)
def test_scale_tiles_are_filled_where_no_group_has_rows(text_machine, pair):
    a, b = operand(pair[0], 9, 32), operand(pair[1], 3, 40, 32, seed=1)
    out = ptxrt.quantize(np.ones((9, 40), np.float32), "mxfp8", scale_layout="128x4", pad=True)
    out.scales.view(np.uint8)[:] = 0xAB
    a, b, out = (
        ptxrt.to_device(x)
        if isinstance(x, np.ndarray)
        else x.with_arrays({name: ptxrt.to_device(of) for name, of in x.arrays.items()})
        for x in (a, b, out)
    )
    ptxrt.matmul_grouped(a, b, ptxrt.to_device(np.zeros(4, np.int32)), out=out)
    tile = out.to_numpy().scales.view(np.uint8).reshape(32, 4, 4).transpose(1, 0, 2).reshape(128, 4)
    assert (tile[:9, :2] == 0xAB).all() and not tile[9:].any()


@pytest.mark.parametrize("tokens, chosen, experts", [(1, 1, 1), (50, 3, 7), (200, 6, 128)])
def test_route(text_machine, tokens, chosen, experts):
    ids = np.random.default_rng(tokens).integers(-1, experts, (tokens, chosen))
    order, starts, places = ptxrt.route(ids, experts)
    flat = np.where(ids < 0, experts, ids).reshape(-1)
    want = np.argsort(flat, kind="stable")
    np.testing.assert_array_equal(order, want // chosen)
    np.testing.assert_array_equal(starts, np.searchsorted(flat[want], np.arange(experts + 1)))
    kept = ids.reshape(-1) >= 0
    np.testing.assert_array_equal(places.reshape(-1)[~kept], -1)
    np.testing.assert_array_equal(want[places.reshape(-1)[kept]], np.flatnonzero(kept))
    on_device = ptxrt.route(ptxrt.to_device(np.where(ids < 0, experts + 3, ids).astype(np.int32)), experts)
    for got, wanted in zip(on_device, (order, starts, places)):
        np.testing.assert_array_equal(got.to_numpy(), wanted)


def test_experts_end_to_end(text_machine):
    """Routing, gated products and their weighted sum, against a loop over tokens and experts in float64."""
    tokens, chosen, experts, width, hidden = 20, 2, 5, 64, 96
    rng = np.random.default_rng(0)
    x = rng.standard_normal((tokens, width)).astype(BF16)
    gate, up = (rng.standard_normal((experts, hidden, width)).astype(BF16) / 8 for _ in range(2))
    down = (rng.standard_normal((experts, width, hidden)) / 8).astype(BF16)
    gate, up = gate.astype(BF16), up.astype(BF16)
    ids, weights = rng.integers(-1, experts, (tokens, chosen)), rng.random((tokens, chosen)).astype(np.float32)
    routing = ptxrt.route(ids, experts)
    rows = routing.starts[-1]
    starts = np.append(routing.starts[:-1], rows).astype(np.int32)
    h = ptxrt.matmul_grouped(
        x, ptxrt.interleave_rows(gate, up), starts, rows=routing.order[:rows], activation="swiglu", out_dtype=np.float32
    )
    y = ptxrt.matmul_grouped(h, down, starts, a_format="bf16", out_dtype=np.float32)
    without_padding = ptxrt.combine(y, routing, weights)
    y = np.concatenate([y, np.full((routing.order.size - rows, width), np.nan, np.float32)])  # must not be read
    got = ptxrt.combine(y, routing, weights)
    np.testing.assert_array_equal(got, without_padding)
    want = np.zeros((tokens, width))
    for t, j in np.ndindex(tokens, chosen):
        if ids[t, j] >= 0:
            g, u = (x[t].astype(np.float64) @ w[ids[t, j]].astype(np.float64).T for w in (gate, up))
            act = (g / (1 + np.exp(-g)) * u).astype(BF16).astype(np.float64)
            want[t] += weights[t, j] * (down[ids[t, j]].astype(np.float64) @ act)
    assert ptxrt.compare(got, want).relative_l2 <= 1e-3


@pytest.mark.parametrize("rows", [0, 8])
def test_padding_alone_adds_up_to_zeros(emulator, rows):
    routing, weights = ptxrt.route(np.full((4, 2), -1), 3), np.ones((4, 2), np.float32)
    assert not routing.starts.any()
    y = ptxrt.matmul_grouped(A[:4], W, routing.starts, rows=routing.order[:0])
    assert y.shape == (0, 8)
    got = ptxrt.combine(np.full((rows, 8), np.nan, BF16), routing, weights)
    assert got.dtype == BF16 and got.shape == (4, 8) and not got.any()


def test_interleaved_rows_on_the_device(machine):
    gate, up = operand("bf16", 2, 5, 16), operand("bf16", 2, 5, 16, seed=1)
    got = ptxrt.interleave_rows(ptxrt.to_device(gate), ptxrt.to_device(up))
    np.testing.assert_array_equal(got.to_numpy(), ptxrt.interleave_rows(gate, up))


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("layout", ["linear", "128x4"])
@pytest.mark.parametrize("on_device", [False, True])
def test_interleaved_rows_of_quantized_weights(emulator, format, layout, on_device):
    gate, up = (np.random.default_rng(i).standard_normal((2, 40, 48)).astype(np.float32) for i in range(2))
    options = dict(scale_layout=layout, pad=True, **(dict(global_scale=0.01) if format == "nvfp4" else {}))
    place = ptxrt.to_device if on_device else lambda x: x
    got = ptxrt.interleave_rows(*(ptxrt.quantize(place(x), format, **options) for x in (gate, up)))
    want = ptxrt.quantize(ptxrt.interleave_rows(gate, up), format, **options)
    assert got.on_device == on_device and got.layout == want.layout
    np.testing.assert_array_equal(got.to_numpy().codes, want.codes)
    np.testing.assert_array_equal(got.to_numpy().scales, want.scales)


def test_interleaved_rows_of_other_libraries(emulator):
    class Lent:
        def __init__(self, x):
            self.__dlpack__, self.__dlpack_device__ = x.__dlpack__, x.__dlpack_device__

    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    np.testing.assert_array_equal(ptxrt.interleave_rows(Lent(x), Lent(-x)), ptxrt.interleave_rows(x, -x))


def test_numbers_of_groups_with_gaps_on_the_device(emulator):
    """They are copied, as NumPy arrays are; no message names an argument of a kernel."""
    a, b, starts = operand("bf16", 6, 40), operand("bf16", 3, 16, 40, seed=1), np.array([0, 2, 4, 6], np.int32)
    order, alpha = np.array([5, 0, 0, 3, 2, 1], np.int32), np.array([1, 2, 3], np.float32)
    want = ptxrt.matmul_grouped(a, b, starts, rows=order, alpha=alpha, out_format="nvfp4", out_global_scale=alpha)

    def gapped(x):
        return ptxrt.to_device(np.repeat(x, 2, axis=-1))[..., ::2]

    scales = dict(alpha=gapped(alpha), out_format="nvfp4", out_global_scale=gapped(alpha))
    got = ptxrt.matmul_grouped(ptxrt.to_device(a), b, gapped(starts), rows=gapped(order), **scales)
    np.testing.assert_array_equal(got.to_numpy().codes, want.codes)
    ids, weights, y = (
        np.array([[0, 1], [1, 2]], np.int32),
        np.array([[1, 2], [3, 4]], np.float32),
        operand("bf16", 4, 8),
    )
    routing = ptxrt.route(gapped(ids), 3)
    for mine, other in zip(routing, ptxrt.route(ids, 3)):
        np.testing.assert_array_equal(mine.to_numpy(), other)
    got = ptxrt.combine(gapped(y), routing, gapped(weights)).to_numpy()
    np.testing.assert_array_equal(got, ptxrt.combine(y, ptxrt.route(ids, 3), weights))
    backward = ptxrt.to_device(starts)[::-1]
    for words, call in [
        ("^matmul_grouped: group_starts", lambda: ptxrt.matmul_grouped(a, b, backward)),
        ("^matmul_grouped: rows", lambda: ptxrt.matmul_grouped(a, b, starts, rows=ptxrt.to_device(order)[::-1])),
        ("^matmul_grouped: alpha", lambda: ptxrt.matmul_grouped(a, b, starts, alpha=ptxrt.to_device(alpha)[::-1])),
        ("^route: expert_ids", lambda: ptxrt.route(ptxrt.to_device(ids)[::-1], 3)),
        ("^combine: weights", lambda: ptxrt.combine(y, routing, ptxrt.to_device(weights)[::-1])),
        ("^combine: y", lambda: ptxrt.combine(ptxrt.to_device(y)[::-1], routing, weights)),
    ]:
        with pytest.raises(ArgumentError, match=f"{words} .* has strides of .*; copy it"):
            call()


@pytest.mark.parametrize("experts", [0, -1, 2**31 - 1, 2.0, True, None, "3"])
def test_numbers_of_experts(experts):
    with pytest.raises(ArgumentError, match=f"route: experts is {experts!r}; pass a whole number from 1 to 2147483646"):
        ptxrt.route(np.zeros((2, 1), np.int32), experts)


def test_outputs_share_no_memory_with_numbers_of_groups(emulator):
    a, b, starts = A, W, np.array([0, 2, 4, 6], np.int32)
    memory = ptxrt.to_device(np.zeros(6 * 8 * 2, np.uint8))
    out = memory.view(BF16).reshape(6, 8)
    for name, options in dict(
        group_starts=dict(group_starts=memory[:16].view(np.int32)),
        rows=dict(rows=memory[:24].view(np.int32)),
        alpha=dict(alpha=memory[:12].view(np.float32)),
    ).items():
        with pytest.raises(ArgumentError, match=f"^matmul_grouped: out overlaps {name}; pass memory of its own$"):
            ptxrt.matmul_grouped(a, b, **{"group_starts": ptxrt.to_device(starts), **options}, out=out)
        options = {name: ptxrt.to_device(x.to_numpy()) for name, x in options.items()}
        with pytest.raises(ArgumentError, match=f"^matmul_grouped: out is a NumPy array, {name} is on the device"):
            ptxrt.matmul_grouped(a, b, **{"group_starts": starts, **options}, out=np.zeros((6, 8), BF16))


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("shape", [(0, 2), (2, 0), (0, 0)])
def test_routes_of_nothing(emulator, shape, on_device):
    place = ptxrt.to_device if on_device else lambda x: x
    routing = ptxrt.route(place(np.zeros(shape, np.int32)), 3)
    order, starts, places = (x.to_numpy() if on_device else x for x in routing)
    assert order.shape == (0,) and starts.tolist() == [0] * 4 and places.shape == shape
    got = ptxrt.combine(place(np.zeros((0, 8), BF16)), routing, place(np.zeros(shape, np.float32)))
    got = got.to_numpy() if on_device else got
    assert got.shape == (shape[0], 8) and got.dtype == BF16 and not got.any()


def test_ids_of_any_integer_type():
    for dtype in (np.uint8, np.int8, np.uint64, ">i8"):
        np.testing.assert_array_equal(ptxrt.route(np.array([[0, 1]], dtype), 3).starts, [0, 1, 2, 2])


A, W = np.zeros((6, 32), BF16), np.zeros((3, 8, 32), BF16)
IDS = np.zeros((4, 2), np.int32)
Y, WEIGHTS, PAIR = np.zeros((8, 4), np.float32), np.zeros((4, 2), np.float32), np.array([1, 2])


def test_experts_are_a_number_of_any_type(emulator):
    for experts in (np.int8(127), np.uint8(255), np.int64(2)):
        assert ptxrt.route(np.zeros((0, 2), np.int32), experts).starts.tolist() == [0] * (int(experts) + 1)


@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_matrices_of_numpy_are_interleaved_as_arrays(emulator):
    got = ptxrt.interleave_rows(np.asmatrix(A), np.asmatrix(A))
    np.testing.assert_array_equal(got, ptxrt.interleave_rows(A, A))


@pytest.mark.parametrize(
    "words, call",
    [
        ("never fall and end at 6", lambda: ptxrt.matmul_grouped(A, W, [0, 4, 2, 6])),
        ("begin at 0", lambda: ptxrt.matmul_grouped(A, W, [1, 2, 3, 6])),
        (r"end at 6; leave out what lies behind: a\[:5\]", lambda: ptxrt.matmul_grouped(A, W, [0, 2, 3, 5])),
        (r"behind: rows\[:1\]", lambda: ptxrt.matmul_grouped(A, W, [0, 1, 1, 1], rows=[0, 5])),
        ("end at 6$", lambda: ptxrt.matmul_grouped(A, W, [0, 2, 3, 7])),
        (r"pass int32 \[4\]", lambda: ptxrt.matmul_grouped(A, W, [0, 6])),
        ("rows go from", lambda: ptxrt.matmul_grouped(A, W, [0, 1, 1, 2], rows=[0, 6])),
        ("pass a \\[T, K\\]", lambda: ptxrt.matmul_grouped(A, W[0], [0, 6])),
        ("alpha is", lambda: ptxrt.matmul_grouped(A, W, [0, 1, 1, 6], alpha=np.ones(2, np.float32))),
        ("alpha is", lambda: ptxrt.matmul_grouped(A, W, [0, 1, 1, 6], alpha=np.array([1, 1e300, 1]))),
        ("alpha is None; pass a number, or one for each", lambda: ptxrt.matmul_grouped(A, W, [0, 2, 4, 6], alpha=None)),
        ("alpha is '1'; pass a number, or one for each", lambda: ptxrt.matmul_grouped(A, W, [0, 2, 4, 6], alpha="1")),
        (
            "out_global_scale is '1'; pass a number, or one for each",
            lambda: ptxrt.matmul_grouped(A, W, [0, 2, 4, 6], out_format="nvfp4", out_global_scale="1"),
        ),
        ("y is Quant.*ptxrt.dequantize", lambda: ptxrt.combine(ptxrt.quantize(A, "mxfp8"), ptxrt.route(IDS, 3), IDS)),
        (
            "group_starts is int64 .4. with 4294967296; pass int32",
            lambda: ptxrt.matmul_grouped(A, W, np.array([2**32, 2, 4, 6])),
        ),
        (
            "rows is int64 .*; pass int32",
            lambda: ptxrt.matmul_grouped(A, W, [0, 1, 1, 2], rows=np.array([0, 2**32 + 5])),
        ),
        (
            r"out_global_scale is float32 \[2\]; pass one number, or float32 \[3\]",
            lambda: ptxrt.matmul_grouped(A, W, [0, 2, 4, 6], out_format="nvfp4", out_global_scale=[0.5, 1.0]),
        ),
        (
            r"a has shape \[6, 32\], b \[32, 8\]; pass a \[T, K\] and b \[groups, K, N\]",
            lambda: ptxrt.matmul_grouped(A, W[0].T, [0, 6], transpose_b=False),
        ),
        (
            r"^matmul_grouped: transpose_b=False takes b of 16 bits",
            lambda: ptxrt.matmul_grouped(A, W, [0, 2, 4, 6], b_format="mxfp4", transpose_b=False),
        ),
        (
            r"^matmul_grouped: .*\[.., K, N\] has K = 8",
            lambda: ptxrt.matmul_grouped(A, W, [0, 2, 4, 6], transpose_b=False),
        ),
        (
            r"the other way round: pass transpose_b=False",
            lambda: ptxrt.matmul_grouped(A, W.swapaxes(-1, -2), [0, 2, 4, 6]),
        ),
        ("there are 3 experts", lambda: ptxrt.route(IDS + 3, 3)),
        ("experts is 0", lambda: ptxrt.route(IDS, 0)),
        ("pass whole numbers", lambda: ptxrt.route(IDS.astype(np.float32), 3)),
        ("pass what route gives", lambda: ptxrt.combine(A, None, IDS.astype(np.float32))),
        ("one row for each$", lambda: ptxrt.combine(A, ptxrt.route(IDS, 3), np.zeros((4, 2), np.float32))),
        (
            "has 6 rows, the routing 8; pass one row for each, or 7 without padding",
            lambda: ptxrt.combine(
                A, ptxrt.route(np.array([[0, 1], [1, 1], [2, -1], [0, 0]]), 3), np.ones((4, 2), np.float32)
            ),
        ),
        (
            "weights are",
            lambda: ptxrt.combine(np.zeros((8, 4), BF16), ptxrt.route(IDS, 3), np.zeros((4, 3), np.float32)),
        ),
        (
            "two of one format",
            lambda: ptxrt.interleave_rows(
                ptxrt.quantize(np.ones((4, 32), np.float32), "mxfp8"),
                ptxrt.quantize(np.ones((4, 32), np.float32), "mxfp4"),
            ),
        ),
        ("one shape and dtype", lambda: ptxrt.interleave_rows(A, A[:3])),
        (
            r"^matmul_grouped: b_format is \['bf16'\]",
            lambda: ptxrt.matmul_grouped(A, W, [0, 2, 4, 6], b_format=["bf16"], transpose_b=False),
        ),
        ("^matmul_grouped: out_format is array", lambda: ptxrt.matmul_grouped(A, W, [0, 2, 4, 6], out_format=PAIR)),
        (
            "^matmul_grouped: out_scale_layout is array",
            lambda: ptxrt.matmul_grouped(A, W, [0, 2, 4, 6], out_scale_layout=PAIR),
        ),
        ("routing.starts is None", lambda: ptxrt.combine(Y, ptxrt.route(IDS, 3)._replace(starts=None), WEIGHTS)),
        (
            "routing.order is float64 .*; pass int32 .T k., as route gives",
            lambda: ptxrt.combine(Y, ptxrt.route(IDS, 3)._replace(order=np.zeros(8)), WEIGHTS),
        ),
        (
            "routing.starts is int32 .0.; pass int32 .experts . 1.",
            lambda: ptxrt.combine(Y, ptxrt.route(IDS, 3)._replace(starts=IDS.reshape(-1)[:0]), WEIGHTS),
        ),
        (
            "routing.places go up to 8; y has 8 rows, pass places below, or -1 for padding",
            lambda: ptxrt.combine(Y, ptxrt.route(IDS, 3)._replace(places=IDS + 8), WEIGHTS),
        ),
        (
            "^combine: weights is Quant.*ptxrt.dequantize",
            lambda: ptxrt.combine(Y, ptxrt.route(IDS, 3), ptxrt.quantize(np.ones((4, 32), np.float32), "mxfp8")),
        ),
        (
            "^add_experts: places goes up to 9, rows is 8; .*Pass numbers below",
            lambda: ptxrt.kernels()["add_experts"](Y, IDS + 9, WEIGHTS),
        ),
    ],
)
def test_wrong_calls(words, call):
    with ptxrt.using("emulator"), pytest.raises(ArgumentError, match=words):
        call()
