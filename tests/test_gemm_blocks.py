"""Products of operands in block formats: exact ones bit for bit, scales one by one, both layouts, and wrong calls."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ptxrt
from ptxrt.blocks import BLOCK_FORMATS
from ptxrt.errors import ArgumentError
from ptxrt.formats import pack
from ptxrt.ops import gemm_kernels
from ptxrt.ops.gemm import PRODUCTS, exact_matmul

BF16 = ml_dtypes.bfloat16
PAIRS = [pair for pair in PRODUCTS if set(pair) & set(BLOCK_FORMATS)]
TILES = [64, 128, 256]


def _nearest(tile, tiles):
    return tile if tile in tiles else max(tiles)


@pytest.fixture(params=TILES)
def tile(request, monkeypatch):
    """Every tile, or the largest of pairs that lack it. Remembered calls do not know the tile, so each tile uses its
    own sizes."""
    monkeypatch.setattr(gemm_kernels, "tile_for", lambda *sizes: _nearest(request.param, sizes[-1]))
    return request.param


def drawn(format, rows, depth, seed=0, layout="linear"):
    """Random codes with scales around 1, as an operand."""
    rng = np.random.default_rng([seed, rows, depth])
    if format == "bf16":
        return rng.standard_normal((rows, depth)).astype(BF16)
    x = rng.standard_normal((rows, depth)).astype(np.float32) * np.exp2(rng.integers(-3, 4, (rows, 1)))
    level = dict(global_scale=1.0) if format == "nvfp4" else {}
    return ptxrt.quantize(x.astype(np.float32), format, scale_layout=layout, pad=True, **level)


def held(format, x):
    """Values that the codes of a format hold, as an operand with scales of 1."""
    if format == "bf16":
        return x.astype(BF16)
    block = BLOCK_FORMATS[format]
    codes, scales = (
        pack(block.element.encode(x), block.bits),
        np.full((x.shape[0], x.shape[1] // block.block), 0x38 if block.two_level else 0x7F, np.uint8),
    )
    level = dict(global_scale=1.0) if block.two_level else {}
    return ptxrt.QuantizedArray(codes, scales, format=format, shape=x.shape, **level)


def unit(format, depth):
    """The identity as an operand with scales of 1."""
    return held(format, np.eye(depth, dtype=np.float32))


@pytest.mark.parametrize("rows", [5, 50, 70])
@pytest.mark.parametrize("pair", [("bf16", "bf16"), *PAIRS], ids="-".join)
def test_integers_are_exact(text_machine, pair, rows):
    """All sums are integers that float32 holds."""
    rng = np.random.default_rng(rows)
    a, b = (rng.choice(np.float32([-6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6]), (n, 288)) for n in (rows, 72))
    got = ptxrt.matmul(held(pair[0], a), held(pair[1], b), out_dtype=np.float32)
    np.testing.assert_array_equal(got, a @ b.T)


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("rows", [5, 70])
def test_operands_on_the_device_are_read_where_they_lie(emulator, format, rows):
    """One launch, without copies of codes or scales, also of rows with gaps of whole chunks."""
    a, b = np.ones((rows, 96), BF16), drawn(format, 24, 96)
    codes = ptxrt.to_device(np.concatenate([b.codes.view(np.uint8)] * 2, axis=-1))[:, : b.codes.shape[-1]]
    level = {} if b.global_scale is None else dict(global_scale=ptxrt.to_device(np.float32(b.global_scale)))
    given = ptxrt.QuantizedArray(codes, ptxrt.to_device(b.scales), format=format, shape=(24, 96), **level)
    with ptxrt.trace() as launches:
        got = ptxrt.matmul(ptxrt.to_device(a), given, out_dtype=np.float32)
    assert len(list(launches)) == 1
    np.testing.assert_array_equal(got.to_numpy(), ptxrt.matmul(a, b, out_dtype=np.float32))


@pytest.mark.parametrize(
    "format, depth", [("mxfp8", 96), ("mxfp4", 96), ("mxfp4", 32), ("nvfp4", 96), ("nvfp4", 48), ("nvfp4", 80)]
)
def test_codes_and_scales_anywhere_on_the_device(machine, format, depth):
    """Parts of a larger array that begin at any byte, and scales with gaps: as on the host."""
    a, b = np.random.default_rng(0).standard_normal((5, depth)).astype(BF16), drawn(format, 3 * 7, depth)
    codes, scales = (x.view(np.uint8).reshape(3, 7, -1) for x in (b.codes, b.scales))
    fields = dict(format=format, shape=(7, depth), global_scale=b.global_scale)
    wide = ptxrt.to_device(np.concatenate([scales, scales], axis=-1))[..., : scales.shape[-1]]
    for part in range(3):
        want = ptxrt.matmul(a, ptxrt.QuantizedArray(codes[part], scales[part], **fields), out_dtype=np.float32)
        for placed in (ptxrt.to_device(scales), wide):
            level = dict(fields)
            if b.global_scale is not None:
                level["global_scale"] = ptxrt.to_device(np.float32(b.global_scale))
            given = ptxrt.QuantizedArray(ptxrt.to_device(codes)[part], placed[part], **level)
            got = ptxrt.matmul(ptxrt.to_device(a), given, out_dtype=np.float32)
            np.testing.assert_array_equal(got.to_numpy(), want)


def test_codes_with_gaps_between_bytes(emulator):
    a, b = np.ones((5, 96), BF16), drawn("nvfp4", 7, 96)
    want = ptxrt.matmul(a, b)
    codes = ptxrt.to_device(np.repeat(b.codes.view(np.uint8), 2, axis=-1))[:, ::2]
    fields = dict(format="nvfp4", shape=(7, 96), global_scale=ptxrt.to_device(np.float32(b.global_scale)))
    got = ptxrt.matmul(ptxrt.to_device(a), ptxrt.QuantizedArray(codes, ptxrt.to_device(b.scales), **fields))
    np.testing.assert_array_equal(got.to_numpy(), want)


@pytest.mark.parametrize("layout", ["linear", "128x4"])
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_an_identity_gives_the_other_operand(text_machine, tile, pair, layout):
    """Every code and scale meets its counterpart, in every slice, step and selector; also with a tail of K."""
    depth = 288 + 32 * TILES.index(tile)
    a, b = drawn(pair[0], 70, depth, layout=layout), drawn(pair[1], 90, depth, 1, layout)
    np.testing.assert_array_equal(
        ptxrt.matmul(a, unit(pair[1], depth), out_dtype=np.float32), np.asarray(a).astype(np.float32)
    )
    np.testing.assert_array_equal(
        ptxrt.matmul(unit(pair[0], depth), b, out_dtype=np.float32), np.asarray(b).astype(np.float32).T
    )


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("which", "ab")
def test_each_scale_counts_for_its_block_alone(text_machine, tile, pair, which):
    format = pair["ab".index(which)]
    if format == "bf16":
        return
    depth, rows, block = 320 - 64 * TILES.index(tile), 40, BLOCK_FORMATS[format]
    ones = {x: drawn_ones(f, rows if x == which else 24, depth) for x, f in zip("ab", pair)}
    blocks = depth // block.block
    one, two = (0x38, 0x40) if format == "nvfp4" else (0x7F, 0x80)
    scales = np.full((rows, blocks), one, np.uint8)
    for i in range(rows):
        scales[i, i % blocks] = two  # a different block in each row
    ones[which].scales[:] = scales
    got = ptxrt.matmul(ones["a"], ones["b"], out_dtype=np.float32)
    want = np.full(rows, depth + block.block, np.float32)
    np.testing.assert_array_equal(got if which == "a" else got.T, np.repeat(want[:, None], 24, axis=1))


def drawn_ones(format, rows, depth):
    x = np.ones((rows, depth), np.float32)
    if format == "bf16":
        return x.astype(BF16)
    # Built by hand so that every scale byte is that of 1.
    block = BLOCK_FORMATS[format]
    code = block.element.encode(np.float32(1))
    codes = np.full((rows, depth * block.bits // 8), int(code) * (0x11 if block.bits == 4 else 1), np.uint8)
    scales = np.full((rows, depth // block.block), 0x38 if format == "nvfp4" else 0x7F, np.uint8)
    return ptxrt.QuantizedArray(
        codes, scales, format=format, shape=(rows, depth), **(dict(global_scale=1.0) if format == "nvfp4" else {})
    )


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("rows, cols, depth", [(1, 8, 32), (70, 130, 416), (130, 40, 80), (5, 300, 1056)])
def test_against_float64_and_in_both_layouts(text_machine, pair, rows, cols, depth):
    a, b = drawn(pair[0], rows, depth), drawn(pair[1], cols, depth, 1)
    got = ptxrt.matmul(a, b, out_dtype=np.float32)
    assert ptxrt.compare(got, exact_matmul(a, b)).relative_l2 <= 1e-6 * np.sqrt(depth)
    tiled = ptxrt.matmul(
        drawn(pair[0], rows, depth, 0, "128x4"), drawn(pair[1], cols, depth, 1, "128x4"), out_dtype=np.float32
    )
    np.testing.assert_array_equal(got, tiled)
    some = slice(rows // 2, rows // 2 + 1)
    if pair[0] == "bf16":
        whole = ptxrt.matmul(a, b, out_dtype=np.float32, splits=1)
        np.testing.assert_array_equal(ptxrt.matmul(a[some], b, out_dtype=np.float32, splits=1), whole[some])


def rows_of(x, index):
    """Some rows of an operand with linear scales."""
    if isinstance(x, np.ndarray):
        return x[index]
    shape = (len(range(x.shape[0])[index]), x.shape[1])
    return ptxrt.QuantizedArray(
        x.codes[index], x.scales[index], format=x.format, shape=shape, global_scale=x.global_scale
    )


@pytest.mark.parametrize("pair", [("bf16", "bf16"), *PAIRS], ids="-".join)
def test_bits_of_few_rows_depend_on_no_others(text_machine, pair):
    """They depend neither on other rows nor on other columns, wherever they lie in a block; K has 35 blocks in several
    splits."""
    a, b = drawn(pair[0], 20, 1120), drawn(pair[1], 40, 1120, 1)
    whole = ptxrt.matmul(a, b, out_dtype=np.float32)
    assert ptxrt.compare(whole, exact_matmul(a, b)).relative_l2 <= 1e-6 * np.sqrt(1120)
    alone = ptxrt.matmul(rows_of(a, slice(17, 18)), rows_of(b, slice(33, 40)), out_dtype=np.float32)
    np.testing.assert_array_equal(alone, whole[17:18, 33:])


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_any_sizes(data):
    """Few and many rows, any number of splits and slices, with and without tails, both layouts of scales."""
    pair = data.draw(st.sampled_from(PAIRS))
    rows, cols = data.draw(st.integers(1, 90)), data.draw(st.integers(1, 80))
    depth = data.draw(st.one_of(st.integers(1, 200), st.integers(1, 160).map(lambda n: 32 * n)))
    layout = data.draw(st.sampled_from(["linear", "128x4"]))
    a, b = drawn(pair[0], rows, depth, 0, layout), drawn(pair[1], cols, depth, 1, layout)
    with ptxrt.using("emulator", ptx=data.draw(st.sampled_from(["native", "portable"]))):
        got = ptxrt.matmul(a, b, out_dtype=np.float32)
    assert ptxrt.compare(got, exact_matmul(a, b)).relative_l2 <= 1e-6 * np.sqrt(max(depth, 32))


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_arrays_are_quantized_first(text_machine, pair):
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal((n, 100)).astype(np.float32) for n in (20, 36))
    rules = {"mxfp8": "rceil", "mxfp4": "even", "nvfp4": "amax"}
    got = ptxrt.matmul(a, b, a_format=pair[0], b_format=pair[1], out_dtype=np.float32)

    def quantized(x, format):
        if format == "bf16":
            return x.astype(BF16)
        level = {}
        if format == "nvfp4":
            level = dict(global_scale=float(np.ldexp(1 / 6, np.frexp(np.float32(np.abs(x).max()) / 448)[1])))
        return ptxrt.quantize(x, format, scale_rule=rules[format], pad=True, **level)

    np.testing.assert_array_equal(got, ptxrt.matmul(quantized(a, pair[0]), quantized(b, pair[1]), out_dtype=np.float32))


BATCHES = [((2, 3), (1, 3)), ((3,), (3,)), ((3,), ()), ((), (3,)), ((2, 1), (3,))]


@pytest.mark.parametrize(
    "pair, batches",
    [*((pair, BATCHES[0]) for pair in PAIRS), *((pair, b) for pair in (PAIRS[0], PAIRS[-1]) for b in BATCHES[1:])],
    ids=str,
)
def test_leading_axes_broadcast(text_machine, pair, batches):
    def operand(format, batch, rows, seed):
        x = np.random.default_rng(seed).standard_normal((*batch, rows, 64)).astype(np.float32)
        return (
            x.astype(BF16)
            if format == "bf16"
            else ptxrt.quantize(x, format, scale_layout="128x4" if seed else "linear")
        )

    a, b = operand(pair[0], batches[0], 5, 0), operand(pair[1], batches[1], 40, 1)
    got, want = ptxrt.matmul(a, b, out_dtype=np.float32), exact_matmul(a, b)
    assert got.shape == want.shape and ptxrt.compare(got, want).relative_l2 <= 1e-5
    packed = ptxrt.matmul(a, b, out_format="mxfp4", out_scale_layout="128x4")
    want = ptxrt.quantize(got, "mxfp4", scale_rule="even", scale_layout="128x4", pad=True)
    np.testing.assert_array_equal(packed.codes, want.codes)
    np.testing.assert_array_equal(packed.scales, want.scales)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_a_block_that_is_not_finite_makes_its_row_nan(text_machine, pair):
    rng = np.random.default_rng(5)
    a, b = (rng.standard_normal((n, 128)).astype(np.float32) for n in (20, 36))
    a[3, 70], b[5, 20] = np.nan, np.inf
    level = [dict(global_scale=0.01) if format == "nvfp4" else {} for format in pair]
    a, b = (x.astype(BF16) if f == "bf16" else ptxrt.quantize(x, f, **more) for x, f, more in zip((a, b), pair, level))
    got = ptxrt.matmul(a, b, out_dtype=np.float32)
    wrong = np.zeros(got.shape, bool)
    wrong[3], wrong[:, 5] = True, True
    assert np.isnan(got[wrong & ~(np.arange(36) != 5)[None] | (np.arange(20) == 3)[:, None]]).all()
    assert np.isfinite(got[~wrong]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("rows, cols, depth", [(300, 5120, 2880), (2048, 2880, 4096), (17, 11008, 4096)])
def test_sizes_of_models(gpu, pair, rows, cols, depth):
    a, b = drawn(pair[0], rows, depth), drawn(pair[1], cols, depth, 1)
    want = np.asarray(a).astype(np.float32) @ np.asarray(b).astype(np.float32).T
    assert ptxrt.compare(ptxrt.matmul(a, b, out_dtype=np.float32), want).relative_l2 <= 2e-6 * np.sqrt(depth)


A, B = np.zeros((6, 64), np.float32), np.zeros((8, 64), np.float32)


@pytest.mark.parametrize(
    "words, call",
    [
        ("no product nvfp4 x mxfp8: scales", lambda: ptxrt.matmul(A, B, a_format="nvfp4", b_format="mxfp8")),
        ("no product mxfp6", lambda: ptxrt.matmul(ptxrt.quantize(A, "mxfp6_e3m2"), ptxrt.quantize(B, "mxfp6_e3m2"))),
        ("leave out b_format", lambda: ptxrt.matmul(A, ptxrt.quantize(B, "mxfp8"), a_format="mxfp8", b_format="mxfp4")),
        (
            "an operand of attention",
            lambda: ptxrt.matmul(
                A, ptxrt.quantize_operand(B.reshape(1, 1, 8, 64), "mxfp8", role="q"), a_format="mxfp8"
            ),
        ),
        (
            "b_global_scale came",
            lambda: ptxrt.matmul(A, ptxrt.quantize(B, "nvfp4"), a_format="nvfp4", b_global_scale=1.0),
        ),
        ("mxfp8 has none", lambda: ptxrt.matmul(A, B, a_format="mxfp8", b_format="mxfp8", a_global_scale=1.0)),
        ("scale_rule is 'best'", lambda: ptxrt.matmul(A, B, a_format="mxfp8", b_format="mxfp8", a_scale_rule="best")),
        (
            "transpose_b=False takes b of 16 bits",
            lambda: ptxrt.matmul(A, ptxrt.quantize(B, "mxfp8"), a_format="mxfp8", transpose_b=False),
        ),
    ],
)
def test_wrong_calls(words, call):
    with ptxrt.using("emulator"), pytest.raises(ArgumentError, match=words):
        call()


MX_PAIRS = [pair for pair in PAIRS if all(format in ("mxfp8", "mxfp4") for format in pair)]


@pytest.mark.parametrize("rows, ptx", [(5, "native"), (12, "portable"), (20, "native")])
@pytest.mark.parametrize("pair", MX_PAIRS, ids="-".join)
def test_scales_of_few_rows_move_no_bit(pair, rows, ptx):
    """Few rows are multiplied in f16 under usual scales, and in bf16 from the first other scale of a run on."""
    depth = 5120  # a run of a warp has 20 scales, in two pages
    a, b = drawn(pair[0], rows, depth), drawn(pair[1], 8, depth)
    with ptxrt.using("emulator", ptx=ptx, arithmetic="hardware"):
        want = ptxrt.matmul(a, b, out_dtype=np.float32)

        def of(a_scales, b_scales):
            operands = [
                ptxrt.QuantizedArray(x.codes, scales.astype(np.uint8), format=x.format, shape=x.shape)
                for x, scales in ((a, a_scales), (b, b_scales))
            ]
            return ptxrt.matmul(*operands, out_dtype=np.float32)

        assert np.array_equal(of(a.scales, b.scales + 40), want * np.float32(2.0**40))
        assert np.array_equal(of(a.scales - 30, b.scales), want * np.float32(2.0**-30))
        # Sums that began in f16 go on in bf16: scales of one row are larger in the second page of every warp's run.
        for side in range(2):
            scales = [a.scales.copy(), b.scales.copy()]
            row = scales[side][2].reshape(8, -1)
            row[:, 16:] += 40
            later = of(*scales)
            scales[side][2] -= 40
            at_once = of(*scales)
            line = (slice(None), 2) if side else 2
            assert np.array_equal(later[line], at_once[line] * np.float32(2.0**40))


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_scales_of_few_rows_lie_at_any_address(text_machine, monkeypatch, pair):
    """They are copied 16 bytes or 4 at a time or one by one, for up to 8 rows, up to 16 and more, and in wide blocks.
    Runs have two pages of scales; from the fifth warp on, some of B are too large for f16."""
    depth = 4608  # runs of 640 values, of which some begin at multiples of 16 scales
    a, b = drawn(pair[0], 20, depth), drawn(pair[1], 8, depth, 1)
    if pair[0] == "mxfp4":
        a.scales[:] -= 8  # as of usual activations and weights
    if pair[1] in ("mxfp4", "mxfp8"):
        b.scales[:] -= 8 if pair[1] == "mxfp4" else 4
        b.scales[:, 80::20] += 12

    def at(x, offset):
        """An operand on the device whose scales begin `offset` bytes behind a multiple of 16."""
        if isinstance(x, np.ndarray):
            return ptxrt.to_device(x)
        some = ptxrt.to_device(np.zeros(offset + x.scales.size, np.uint8))
        scales = some[offset:].reshape(x.scales.shape)
        scales[...] = x.scales.view(np.uint8)
        return x.with_arrays({name: ptxrt.to_device(array) for name, array in x.arrays.items()} | dict(scales=scales))

    want = None
    for rows, wide in ((20, False), (12, False), (5, False), (18, True)):
        monkeypatch.setattr(ptxrt.ops.gemm, "is_wide", lambda *_, wide=wide: wide)
        for offset in (0, 1) if 5 < rows != 18 or pair in MX_PAIRS else (0,):  # declared cases have the others
            operands = at(rows_of(a, slice(rows)), offset), at(b, offset)
            with ptxrt.trace() as seen:
                got = ptxrt.matmul(*operands, out_dtype=np.float32).to_numpy()
            assert [launch.kernel.startswith("gemm_wide" if wide else "gemm_few") for launch in seen] == [True]
            if want is None:
                want = got
                assert ptxrt.compare(want, exact_matmul(a, b)).relative_l2 <= 1e-6 * np.sqrt(depth)
            np.testing.assert_array_equal(got, want[:rows])


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "nvfp4"])
def test_operands_on_a_device_begin_anywhere(emulator, format):
    """Also where the call quantizes a view that begins at no multiple of 16 bytes."""
    a, b = (np.random.default_rng(i).standard_normal((7, 36)).astype(np.float16) for i in range(2))
    both = dict(a_format=format, b_format=format)
    got = ptxrt.matmul(ptxrt.to_device(a)[1:], ptxrt.to_device(b)[1:], **both)
    np.testing.assert_array_equal(got.to_numpy(), ptxrt.matmul(a[1:], b[1:], **both))
