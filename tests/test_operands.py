"""Tiles of keys and values, and quantize_operand: bytes on every machine, round trips, files, errors."""

import ml_dtypes
import numpy as np
import pytest

import exact_blocks
import ptxrt
from ptxrt.blocks import BLOCK_FORMATS
from ptxrt.ops.operands import Operand, operand_rule
from ptxrt.ops.packers import PACK_KEYS, PACK_VALUES
from ptxrt.ops.quantized import Packed
from ptxrt.tiles import TILE_DIMS, TILE_KEYS, tile_layout

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]
BLOCKS = ["mxfp8", "mxfp4", "nvfp4"]
RULES = [(name, rule) for name in BLOCKS for rule in BLOCK_FORMATS[name].rules]
ROLES = [*(("k", name) for name in BLOCKS), *(("v", name) for name in TILE_DIMS)]
ELEMENTS = {**exact_blocks.MX, "nvfp4": exact_blocks.E2M1}
LAYOUTS = [tile_layout(format, role, dim) for role, format in ROLES for dim in TILE_DIMS[format]]
each_operand = pytest.mark.parametrize("role, format", ROLES)


# Layouts


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_byte_has_one_place(layout):
    """Codes fill the first bytes, scales follow them, and no two bytes share a place."""
    places = np.concatenate([layout.codes_places.ravel(), layout.scale_places.ravel()])
    assert len(np.unique(places)) == len(places) and places.max() < layout.nbytes
    np.testing.assert_array_equal(np.sort(layout.codes_places.ravel()), np.arange(layout.code_bytes))
    assert layout.nbytes % 128 == 0  # consecutive tiles stay aligned for bulk copies and swizzles


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_split_undoes_join(layout, rng):
    codes, scales = (
        rng.integers(0, 256, (3, *places.shape), dtype=np.uint8)
        for places in (layout.codes_places, layout.scale_places)
    )
    for got, want in zip(layout.split(layout.join(codes, scales)), (codes, scales)):
        np.testing.assert_array_equal(got, want)


# The rows that a matrix of ldmatrix reads together, by the order of keys for a format of weights (block_tiles.cuh).
ORDERS = {
    "natural": lambda j, column: 8 * j + column,
    "fours": lambda j, column: 16 * (j // 2) + 4 * (column // 2) + 2 * (j % 2) + column % 2,
    "eights": lambda j, column: 32 * (j // 4) + 8 * (column // 2) + 2 * (j % 4) + column % 2,
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout.role == "k"], ids=str)
def test_ldmatrix_meets_no_bank_conflict(layout, order):
    """The eight rows of a matrix lie in eight different groups of four banks."""
    for j in range(TILE_KEYS // 8):
        rows = [ORDERS[order](j, column) for column in range(8)]
        for chunk in range(layout.codes_places.shape[1] // 16):
            banks = layout.codes_places[rows, 16 * chunk] // 16 % 8
            assert len(set(banks)) == 8


# Kernels


def packed(role, format, x, **options):
    return (PACK_KEYS if role == "k" else PACK_VALUES)[format](x, **options)


def as_values(blocks: np.ndarray, role: str) -> np.ndarray:
    """Blocks [n, size] as x [1, 1, keys, 64]: along the last axis for k, down the columns for v."""
    size = blocks.shape[1]
    blocks = np.resize(blocks, (-(-blocks.size // (64 * 64)) * 64 * 64 // size, size))
    rows = (blocks if role == "k" else blocks.reshape(-1, 64, size).transpose(0, 2, 1)).reshape(-1, 64)
    return np.ascontiguousarray(rows[None, None], np.float32)


@pytest.mark.parametrize("format, rule", RULES)
@pytest.mark.parametrize("role", ["k", "v"])
@pytest.mark.parametrize("text", ["native", "portable"])
def test_hard_blocks_byte_for_byte(text, role, format, rule):
    """Rounding boundaries, subnormals, outliers, zeros of both signs, NaN and infinity: codes and scales equal exact
    arithmetic."""
    block = BLOCK_FORMATS[format]
    x = as_values(exact_blocks.hard_blocks(ELEMENTS[format], block.block), role)
    level = dict(global_scale=np.float32([0.37])) if block.two_level else {}
    with ptxrt.using("emulator", ptx=text):
        tiles = packed(role, format, x, rule=block.rules.index(rule), **level)
    codes, scales = tile_layout(format, role, 64).split(tiles[0, 0])
    runs = (
        x[0, 0] if role == "k" else np.ascontiguousarray(x[0, 0].reshape(-1, 64, 64).transpose(0, 2, 1)).reshape(-1, 64)
    )
    if role == "v":
        codes, scales = codes.transpose(0, 2, 1), scales.transpose(0, 2, 1)
    want = (
        exact_blocks.encode_nvfp4(runs, np.float32(0.37), rule)
        if block.two_level
        else exact_blocks.encode(runs, format, rule)
    )
    np.testing.assert_array_equal(scales.reshape(want[1].shape), want[1])
    np.testing.assert_array_equal(codes.reshape(want[0].shape), want[0])


@pytest.mark.parametrize("rule", BLOCK_FORMATS["nvfp4"].rules)
@pytest.mark.parametrize("role", "kv")
def test_global_scales_of_any_size(machine, rng, role, rule):
    """Divisors whose reciprocal is no normal float32, and ordinary ones."""
    for level in (2.0**-100, 0.37, 2.0**121):
        level = np.float32([level])
        x = (rng.standard_normal((1, 1, 3, 192)) * 40).astype(np.float32) * level
        got = packed(role, "nvfp4", x, global_scale=level, rule=BLOCK_FORMATS["nvfp4"].rules.index(rule))
        np.testing.assert_array_equal(got, tile_layout("nvfp4", role, 192).encode(x, global_scale=level, rule=rule))


@each_operand
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("cols, gap", [(64, 0), (64, 8), (64, 3), (40, 0), (41, 0)])
def test_rows_anywhere_in_memory(machine, rng, role, format, dtype, cols, gap):
    """Rows at any stride: of [B, S, H, D], with gaps that are multiples of 16 bytes or not, and with unaligned
    starts."""
    storage = rng.standard_normal((2, 70, 3, cols + gap)).astype(dtype)
    view = ptxrt.to_device(storage).transpose(0, 2, 1, 3)[..., gap:]
    want = tile_layout(format, role, 64).encode(storage.transpose(0, 2, 1, 3)[..., gap:])
    np.testing.assert_array_equal(packed(role, format, view, dim=64).to_numpy(), want)


@each_operand
def test_packed_sequences_have_tiles_of_their_own(machine, rng, role, format):
    """Tiles equal those of each sequence alone, with zeros between them; values equal those of each sequence."""
    cu = np.concatenate([[0], np.cumsum([1, 63, 64, 0, 65, 130, 0])])
    x = rng.standard_normal((1, 2, cu[-1], 40)).astype(np.float32)
    x += 2 * rng.standard_normal((1, 2, 1, 40)).astype(np.float32)
    whole = ptxrt.quantize_operand(x, format, role=role, cu_seqlens=cu)
    tile = whole.layout.tile
    tiles = np.repeat(tile.encode(np.zeros((1, 2, 1, 1), np.float32), key_ends=[0]), whole.codes.shape[2], axis=2)
    values = np.empty(x.shape, np.float32)
    for i, keys in enumerate(map(slice, cu, cu[1:])):
        alone = ptxrt.quantize_operand(x[:, :, keys], format, role=role)
        values[:, :, keys] = np.asarray(alone)
        if whole.global_scale is not None:  # values are the same under any power of two, scales are not
            alone = ptxrt.quantize_operand(x[:, :, keys], format, role=role, global_scale=whole.global_scale)
        first = cu[i] // TILE_KEYS + i
        tiles[:, :, first : first + alone.codes.shape[2]] = alone.codes
        if whole.mean is not None:
            np.testing.assert_array_equal(whole.mean[i], alone.mean[0])
    np.testing.assert_array_equal(whole.codes, tiles)
    np.testing.assert_array_equal(np.asarray(whole), values)
    np.testing.assert_array_equal(ptxrt.dequantize(whole), values)


def test_means_of_packed_sequences_are_those_of_each_alone(machine, rng):
    """Sequences of several runs, one after the other at any offset."""
    cu = np.concatenate([[0], np.cumsum([300, 1, 0, 2600, 255])])
    x = rng.standard_normal((1, 1, cu[-1], 8)).astype(np.float32)
    whole = ptxrt.quantize_operand(x, "mxfp4", role="k", cu_seqlens=cu)
    for i, keys in enumerate(map(slice, cu, cu[1:])):
        np.testing.assert_array_equal(whole.mean[i], ptxrt.quantize_operand(x[:, :, keys], "mxfp4", role="k").mean[0])


@each_operand
def test_garbage_behind_the_last_key_is_not_read(machine, rng, role, format):
    x = rng.standard_normal((3, 2, 130, 64)).astype(np.float32)
    ends = np.array([0, 65, 130], np.int32)
    clean = x.copy()
    for batch, end in enumerate(ends):
        x[batch, :, end:], clean[batch, :, end:] = np.nan, 0
    got = ptxrt.quantize_operand(x, format, role=role, key_lengths=ends)
    want = ptxrt.quantize_operand(clean, format, role=role, key_lengths=ends)
    np.testing.assert_array_equal(got.codes, want.codes)
    assert np.isfinite(np.asarray(got)).all()


def test_wrong_sizes_of_tiles_are_refused(emulator, rng):
    x = rng.standard_normal((1, 1, 64, 64)).astype(np.float32)
    with pytest.raises(ptxrt.ArgumentError, match="tile_bytes is 4096 in the call; it must be 4352"):
        packed("k", "mxfp8", x, tile_bytes=4096)
    with pytest.raises(ptxrt.ArgumentError, match="tiles is 2 in the call; it must be 1"):
        packed("k", "mxfp8", x, tiles=2)
    with pytest.raises(ptxrt.ArgumentError, match="dim is 32 in the call; it must be 64"):
        packed("k", "mxfp8", x, dim=32)
    with pytest.raises(ptxrt.ArgumentError, match="dim is 100 in the call; compiled for 32"):
        packed("k", "mxfp8", x, dim=100)
    with pytest.raises(ptxrt.ArgumentError, match="compiled for .*256. Nearest: the largest is 256"):
        packed("k", "mxfp8", np.zeros((1, 1, 64, 300), np.float32))


# quantize_operand


def held(x, format, role, **options):
    """The values of an operand of x, by quantize and dequantize of x [B, H, S, D] padded with zeros."""
    if format == "bf16":
        return np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float32)
    return ptxrt.dequantize(ptxrt.quantize(x, format, axis=-2 if role == "v" else -1, pad=True, **options))


def random_operand(rng, *shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("role, format", [*ROLES, *(("q", name) for name in BLOCKS)])
@pytest.mark.parametrize("shape", [(1, 2, 70, 64), (2, 1, 64, 40), (1, 1, 1, 1), (1, 2, 130, 100)], ids=str)
def test_operands_hold_what_quantize_gives(machine, rng, role, format, shape):
    x = random_operand(rng, *shape)
    operand = ptxrt.quantize_operand(x, format, role=role, **(dict(smooth=False) if role == "k" else {}))
    assert (operand.role, operand.format, operand.shape, operand.mean) == (role, format, shape, None)
    level = dict(global_scale=operand.global_scale) if format == "nvfp4" else {}
    want = held(x, format, role, scale_rule=operand_rule(format), **level)
    np.testing.assert_array_equal(np.asarray(operand), want)
    np.testing.assert_array_equal(ptxrt.dequantize(operand), want)
    np.testing.assert_array_equal(ptxrt.dequantize(operand, ml_dtypes.bfloat16), want.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("role, format", [("q", "mxfp8"), ("q", "nvfp4"), *ROLES])
def test_a_layout_is_strides_alone(machine, rng, role, format):
    x = random_operand(rng, 2, 70, 3, 64, dtype=np.float16)
    turned = ptxrt.quantize_operand(x, format, role=role, layout="bshd")
    plain = ptxrt.quantize_operand(np.ascontiguousarray(x.transpose(0, 2, 1, 3)), format, role=role)
    assert turned.shape == plain.shape == (2, 3, 70, 64)
    np.testing.assert_array_equal(turned.codes, plain.codes)
    if role == "q":
        np.testing.assert_array_equal(turned.scales, plain.scales)
    on_device = ptxrt.quantize_operand(ptxrt.to_device(x), format, role=role, layout="bshd")
    assert on_device.on_device
    out = ptxrt.empty((2, 3, 70, 64), np.float32)
    want = np.asarray(plain)
    np.testing.assert_array_equal(np.asarray(on_device), want)
    np.testing.assert_array_equal(ptxrt.dequantize(on_device).to_numpy(), want)
    assert ptxrt.dequantize(on_device, out=out) is out
    np.testing.assert_array_equal(out.to_numpy(), want)


def test_views_are_taken_where_they_lie(machine, rng):
    """Views with repeated or strided rows; where kernels cannot use the strides, of a copy."""
    x = random_operand(rng, 1, 2, 70, 80)
    base = ptxrt.to_device(x)
    for view, want in [
        (base[..., 8:], x[..., 8:]),
        (base[..., ::2], x[..., ::2]),
        (base[:, :1].broadcast_to((1, 4, 70, 80)), x[:, [0] * 4]),
    ]:
        for role in ("q", "k", "v"):
            got = ptxrt.quantize_operand(view, "mxfp8", role=role)
            np.testing.assert_array_equal(
                got.to_numpy().codes, ptxrt.quantize_operand(np.ascontiguousarray(want), "mxfp8", role=role).codes
            )


@pytest.mark.parametrize("format", BLOCKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_smoothing_takes_the_mean(machine, rng, format, dtype):
    """The mean of keys with a bias per channel, the tiles of the differences, and the sum of both."""
    x = (random_operand(rng, 2, 2, 300, 64) + 8 * random_operand(rng, 1, 2, 1, 64)).astype(dtype)
    operand = ptxrt.quantize_operand(x, format, role="k", smooth=True)
    exact = x.astype(np.float64).mean(axis=2)
    assert np.abs(operand.mean - exact).max() <= 1e-5  # float32 sums of 300 numbers up to 30
    tile = tile_layout(format, "k", 64)
    np.testing.assert_array_equal(
        operand.codes,
        tile.encode(
            x.astype(np.float32), rule=operand_rule(format), mean=operand.mean, global_scale=operand.global_scale
        ),
    )
    values = np.asarray(operand)
    np.testing.assert_array_equal(
        values, tile.decode(operand.codes, operand.global_scale)[:, :, :300] + operand.mean[:, :, None]
    )
    np.testing.assert_array_equal(ptxrt.dequantize(operand), values)
    assert (
        ptxrt.compare(values, x.astype(np.float32)).relative_l2
        < ptxrt.compare(ptxrt.dequantize(ptxrt.quantize(x, format)), x.astype(np.float32)).relative_l2
    )


def test_keys_of_four_bits_are_smoothed_unless_asked(machine, rng):
    x = random_operand(rng, 1, 1, 70, 64)
    assert [ptxrt.quantize_operand(x, format, role="k").mean is not None for format in BLOCKS] == [False, True, True]
    assert ptxrt.quantize_operand(x, "mxfp4", role="k", smooth=False).mean is None
    assert ptxrt.quantize_operand(x, "mxfp4", role="v").mean is None


def test_the_mean_is_of_the_keys_that_are_there(machine, rng):
    x = random_operand(rng, 3, 2, 600, 64)
    lengths = np.array([0, 257, 600])
    operand = ptxrt.quantize_operand(x, "mxfp4", role="k", key_lengths=lengths)
    for batch, length in enumerate(lengths):
        want = x[batch, :, :length].mean(axis=1, dtype=np.float64) if length else 0
        assert np.abs(operand.mean[batch] - want).max() <= 1e-6  # float32 sums of 600 numbers around 1


@pytest.mark.parametrize("role", ["q", "k", "v"])
def test_global_scales_are_powers_of_two_over_six(machine, rng, role):
    """The smallest that covers all finite values; twice that for smoothed keys, whose differences may be twice as
    large."""
    for size in (1.0, 0.37, 3e-20, 1e30):
        x = random_operand(rng, 1, 2, 70, 64) * np.float32(size)
        x[0, 1, 3, 7] = np.nan
        operand = ptxrt.quantize_operand(x, "nvfp4", role=role, **(dict(smooth=False) if role == "k" else {}))
        mantissa, exponent = np.frexp(np.float32(np.nanmax(np.abs(x))) / np.float32(448))
        assert operand.global_scale == np.ldexp(np.float32(1 / 6), exponent - (mantissa == 0.5))
    x = random_operand(rng, 1, 2, 70, 64)
    assert (
        ptxrt.quantize_operand(x, "nvfp4", role="k").global_scale
        == 2 * ptxrt.quantize_operand(x, "nvfp4", role="k", smooth=False).global_scale
    )
    assert ptxrt.quantize_operand(0 * x, "nvfp4", role=role).global_scale == 1
    assert ptxrt.quantize_operand(x, "nvfp4", role=role, global_scale=0.3).global_scale == np.float32(0.3)


@pytest.mark.parametrize("role, format", [("q", "nvfp4"), *ROLES])
def test_a_batch_is_its_items(machine, rng, role, format):
    """Codes and scales do not depend on the other items of a batch."""
    x = random_operand(rng, 3, 2, 90, 64) * np.float32([1, 7, 0.02])[:, None, None, None]
    whole = ptxrt.quantize_operand(x, format, role=role)
    for i in range(3):
        item = ptxrt.quantize_operand(x[i : i + 1], format, role=role)
        np.testing.assert_array_equal(np.asarray(whole)[i], np.asarray(item)[0])
        if item.global_scale is None:
            np.testing.assert_array_equal(whole.codes[i], item.codes[0])


@pytest.mark.parametrize("role, format", [("q", "nvfp4"), *ROLES])
def test_prepared_calls(machine, rng, role, format):
    """A prepared call only launches kernels, on any device array."""
    first, second = (ptxrt.to_device(random_operand(rng, 1, 2, 70, 64)) for _ in range(2))
    call = ptxrt.prepare(ptxrt.quantize_operand, first, format, role=role)
    want = [np.asarray(ptxrt.quantize_operand(x, format, role=role)) for x in (first, second)]
    for x, values in zip((second, first), reversed(want)):
        np.testing.assert_array_equal(np.asarray(call(x)), values)


@pytest.mark.parametrize("shape", [(1, 2, 0, 64), (0, 2, 70, 64), (1, 0, 70, 64)], ids=str)
@pytest.mark.parametrize("role, format", [("q", "mxfp8"), ("q", "nvfp4"), *ROLES])
def test_empty_operands(emulator, role, format, shape):
    operand = ptxrt.quantize_operand(np.zeros(shape, np.float32), format, role=role)
    assert ptxrt.dequantize(operand).shape == np.asarray(operand).shape == operand.shape == shape


# Files and construction


@pytest.mark.parametrize("role, format", [("q", "nvfp4"), ("q", "mxfp8"), *ROLES])
def test_files_keep_the_role(emulator, rng, tmp_path, role, format):
    operand = ptxrt.quantize_operand(random_operand(rng, 1, 2, 70, 60), format, role=role)
    operand.save(tmp_path / "x.npz")
    back = Operand.load(tmp_path / "x.npz")
    assert isinstance(back, Operand) and repr(back) == repr(operand) and back.dim == operand.dim
    for name in ("codes", "scales", "global_scale", "mean"):
        np.testing.assert_array_equal(getattr(back, name), getattr(operand, name))


def test_each_class_loads_its_own_files(emulator, rng, tmp_path):
    ptxrt.quantize_operand(random_operand(rng, 1, 2, 70, 60), "mxfp8", role="k").save(tmp_path / "operand.npz")
    ptxrt.quantize(np.ones((2, 32), np.float32), "mxfp8").save(tmp_path / "array.npz")
    with pytest.raises(ptxrt.FileError, match="holds Operand data, which Operand.load reads"):
        ptxrt.QuantizedArray.load(tmp_path / "operand.npz")
    with pytest.raises(ptxrt.FileError, match="holds QuantizedArray data, which QuantizedArray.load reads"):
        Operand.load(tmp_path / "array.npz")
    for name, wanted in (("operand", Operand), ("array", ptxrt.QuantizedArray)):
        assert type(Packed.load(tmp_path / f"{name}.npz")) is wanted
    assert not issubclass(Operand, ptxrt.QuantizedArray)


def test_files_keep_packed_sequences(emulator, rng, tmp_path):
    operand = ptxrt.quantize_operand(random_operand(rng, 1, 2, 70, 60), "nvfp4", role="k", cu_seqlens=[0, 3, 70])
    operand.save(tmp_path / "x.npz")
    back = Operand.load(tmp_path / "x.npz")
    assert repr(back) == repr(operand) and back.cu_seqlens.tolist() == [0, 3, 70]
    np.testing.assert_array_equal(np.asarray(back), np.asarray(operand))


def test_damaged_files_are_refused(emulator, rng, tmp_path):
    operand = ptxrt.quantize_operand(random_operand(rng, 1, 1, 70, 64), "mxfp4", role="k")
    operand.save(tmp_path / "x.npz")
    with np.load(tmp_path / "x.npz") as archive:
        fields = dict(archive)
    for change in (
        dict(role=np.array("w")),
        dict(role=np.array(3)),
        dict(dim=np.array(128)),
        dict(codes=fields["codes"][..., :-1]),
        dict(mean=fields["mean"][..., :-1]),
        dict(format=np.array("bf16")),
        dict(more=np.array(1)),
        dict(code_order=np.array([2])),
        dict(code_order=np.array("2")),
    ):
        np.savez(tmp_path / "y.npz", **{**fields, **change})
        with pytest.raises(ptxrt.FileError):
            Operand.load(tmp_path / "y.npz")


@pytest.mark.parametrize("order", [None, 1, 3])
def test_files_with_another_order_of_codes_are_refused(emulator, rng, tmp_path, order):
    operand = ptxrt.quantize_operand(random_operand(rng, 1, 1, 70, 64), "mxfp4", role="k")
    operand.save(tmp_path / "x.npz")
    with np.load(tmp_path / "x.npz") as archive:
        fields = dict(archive)
    del fields["code_order"]
    np.savez(tmp_path / "y.npz", **fields, **({} if order is None else dict(code_order=np.array(order))))
    with pytest.raises(
        ptxrt.FileError, match=f"order {order or 1} of bytes, where 2 is read; quantize the values again"
    ):
        Operand.load(tmp_path / "y.npz")


def test_wrong_calls_say_what_to_do(emulator, rng):
    x = random_operand(rng, 1, 2, 70, 64)

    def refused(match, **options):
        with pytest.raises(ptxrt.ArgumentError, match=match):
            ptxrt.quantize_operand(**{**dict(x=x, format="mxfp8", role="k"), **options})

    refused("role is 'w'; pass 'q', 'k' or 'v'", role="w")
    refused("format is 'mxfp6_e3m2'; role 'k' has 'mxfp4', 'mxfp8', 'nvfp4'", format="mxfp6_e3m2")
    refused("attention takes keys in bf16 as they are", format="bf16")
    refused("only queries and keys are smoothed", role="v", smooth=True)
    refused("smooth is 'auto'; pass True, False or None", smooth="auto")
    refused("layout is 'sbhd'", layout="sbhd")
    refused(r"x has shape \[.*\]; pass four axes, \[B, H, S, D\]", x=x[0])
    refused(r"x is float64 .*: x.astype\(numpy.float32\)$", x=x.astype(np.float64))
    refused("x is int64", x=x.astype(np.int64))
    refused("the head dimension is 257; mxfp8 takes 1 to 256", x=np.zeros((1, 1, 1, 257), np.float32))
    refused("format is array", format=np.array(["mxfp8", "bf16"]))
    refused("dim is array", dim=np.array([64, 128]))
    refused("dim is 32 for a head dimension of 64; mxfp8 has 64, 96, 128", dim=32)
    refused("scale_rule is 'amax'; mxfp8 has 'floor'", scale_rule="amax")
    refused("global_scale is 2; mxfp8 has none", global_scale=2)
    refused("bf16 has no scales", format="bf16", role="v", scale_rule="floor")
    refused("queries have no dim", role="q", dim=64)
    refused("key_lengths is float64", key_lengths=np.array([3.0]))
    refused(r"key_lengths is \[71\]; x has 70 keys", key_lengths=[71])
    refused("cu_seqlens is float64", cu_seqlens=np.array([0.0, 70.0]))
    refused(r"cu_seqlens is \[0, 71\]; pass N \+ 1 whole numbers that rise from 0 to 70", cu_seqlens=[0, 71])
    refused("that rise from 0 to 70", cu_seqlens=[0, 50, 40, 70])
    refused("key_lengths beside cu_seqlens came", cu_seqlens=[0, 70], key_lengths=[70])
    refused("packed sequences have a batch of 1, 2 came", x=np.zeros((2, 2, 70, 64), np.float32), cu_seqlens=[0, 70])
    refused(
        "queries have no dim and no key_lengths, and cu_seqlens where smooth=True alone", role="q", cu_seqlens=[0, 70]
    )
    refused("cu_seqlens is on the device", cu_seqlens=ptxrt.to_device(np.array([0, 70], np.int32)))
    refused("key_lengths is on the device", key_lengths=ptxrt.to_device(np.array([3], np.int32)))


def test_wrong_operands_say_what_to_do(emulator, rng):
    good = ptxrt.quantize_operand(random_operand(rng, 1, 2, 70, 64), "mxfp8", role="k", smooth=True)
    fields = dict(codes=good.codes, format="mxfp8", role="k", shape=good.shape, mean=good.mean)
    for match, change in [
        ("padded to 64 has uint8", dict(codes=good.codes[..., 1:])),
        ("padded to 128 has uint8", dict(dim=128)),
        ("scales of role 'k' stand in the tiles", dict(scales=good.codes)),
        ("it has float32", dict(mean=good.mean[:, :1])),
        ("mean of role 'v'", dict(role="v")),
        ("pass .batch, heads, length, dim.", dict(shape=(2, 70, 64))),
        ("mxfp8 has none", dict(global_scale=1)),
        ("padded to 64 of 2 packed sequences has uint8", dict(cu_seqlens=[0, 64, 70])),
        ("rise from 0 to 70", dict(cu_seqlens=[0, 71])),
        (
            "codes and cu_seqlens are on different machines",
            dict(cu_seqlens=ptxrt.to_device(np.array([0, 70], np.int32))),
        ),
    ]:
        with pytest.raises(ptxrt.ArgumentError, match=match):
            Operand(**{**fields, **change})


# Operands from other libraries


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("role", ["q", "k", "v"])
@pytest.mark.parametrize("shape, dim", [((2, 3, 70, 64), None), ((1, 2, 64, 96), 128)])
def test_operands_of_codes_and_scales_of_others(machine, rng, format, role, shape, dim):
    """`quantize` codes and scales in row-major order become the operand that `quantize_operand` makes of the values."""
    axis, dim = -2 if role == "v" else -1, None if role == "q" else dim
    if role == "v":
        shape = (*shape[:2], shape[2] // 32 * 32, shape[3])
    x = rng.standard_normal(shape, dtype=np.float32)
    rule, level = operand_rule(format), {"global_scale": 0.25} if format == "nvfp4" else {}
    plain = ptxrt.quantize(x, format, axis=axis, scale_rule=rule, **level)
    smooth = {} if role == "v" else {"smooth": False}
    want = ptxrt.quantize_operand(x, format, role=role, dim=dim, **level, **smooth)
    for codes, scales in ((plain.codes, plain.scales), [ptxrt.to_device(a) for a in (plain.codes, plain.scales)]):
        got = ptxrt.Operand.of(codes, scales, format=format, role=role, axis=axis, dim=dim, **level)
        assert got.shape == want.shape and (role == "q" or got.layout == want.layout)
        got = got.to_numpy() if got.on_device else got
        np.testing.assert_array_equal(got.codes, want.codes)
        if role == "q":
            np.testing.assert_array_equal(got.scales, want.scales)
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_imported_values_with_scales_along_the_head_dimension_are_16_bit_values(machine, rng):
    v = rng.standard_normal((1, 2, 70, 64), dtype=np.float32)
    for format in ("mxfp8", "mxfp4", "nvfp4"):
        plain = ptxrt.quantize(v, format, **({"global_scale": 0.5} if format == "nvfp4" else {}))
        got = ptxrt.Operand.of(plain.codes, plain.scales, format=format, role="v", global_scale=plain.global_scale)
        assert got.format == "bf16"
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(plain))
    raw = rng.integers(0, 0x50, (1, 2, 70, 64), dtype=np.uint8)  # plain FP8
    got = ptxrt.Operand.of(raw, format="mxfp8", role="k")
    np.testing.assert_array_equal(np.asarray(got, np.float32), raw.view(ml_dtypes.float8_e4m3fn).astype(np.float32))


@pytest.mark.parametrize("format, keys", [("mxfp8", 96), ("mxfp4", 32), ("nvfp4", 80)])
def test_imported_values_with_scales_along_the_keys(machine, rng, format, keys):
    """A partial last tile, also without scales; and a global scale that is no power of two."""
    v, level = (
        rng.standard_normal((1, 2, keys, 64), dtype=np.float32),
        {"global_scale": 0.3} if format == "nvfp4" else {},
    )
    plain = ptxrt.quantize(v, format, axis=-2, scale_rule=operand_rule(format), **level)
    want = ptxrt.quantize_operand(v, format, role="v", **level)
    for given in ((plain.codes, plain.scales), [ptxrt.to_device(a) for a in (plain.codes, plain.scales)]):
        got = ptxrt.Operand.of(*given, format=format, role="v", axis=-2, **level)
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    ones = ptxrt.Operand.of(plain.codes, format=format, role="v", axis=-2)
    scales = np.full(plain.scales.shape, 0x38 if format == "nvfp4" else 0x7F, np.uint8)
    np.testing.assert_array_equal(
        np.asarray(ones), np.asarray(ptxrt.Operand.of(plain.codes, scales, format=format, role="v", axis=-2))
    )
    rows = ptxrt.quantize(v, format, **level)
    values = ptxrt.Operand.of(rows.codes, rows.scales, format=format, role="v", **level)
    np.testing.assert_array_equal(np.asarray(values), np.asarray(rows).astype(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.parametrize("role", ["q", "v"])
def test_imports_of_strided_codes_can_be_captured(emulator, rng, role):
    """[B, S, H, bytes] seen as [B, H, S, bytes]: copied on the device."""
    x = rng.standard_normal((1, 70, 2, 64), dtype=np.float32)
    plain = ptxrt.quantize(x, "mxfp8")
    codes, scales = (ptxrt.to_device(a.view(np.uint8)).transpose(0, 2, 1, 3) for a in (plain.codes, plain.scales))
    want = ptxrt.Operand.of(codes, scales, format="mxfp8", role=role)  # also loads modules
    with ptxrt.graph() as graph:
        got = ptxrt.Operand.of(codes, scales, format="mxfp8", role=role)
    graph.launch()
    np.testing.assert_array_equal(np.asarray(got.to_numpy()), np.asarray(want.to_numpy()))


def test_wrong_imports(emulator):
    codes, scales = np.zeros((1, 2, 70, 64), np.uint8), np.zeros((1, 2, 70, 2), np.uint8)
    of = ptxrt.Operand.of
    for call, words in [
        (lambda: of(codes, scales, format="fp8", role="k"), "format is 'fp8'; pass 'mxfp8'"),
        (lambda: of(codes, scales, format="mxfp8", role="w"), "role is 'w'"),
        (lambda: of(codes, scales, format=["mxfp8"], role="k"), "format is .*; pass 'mxfp8'"),
        (lambda: of(codes, scales, format="mxfp8", role=np.array(["q", "k"])), "role is array"),
        (lambda: of(codes, scales, format="mxfp8", role="k", axis=np.array([-1, 2])), "axis is array"),
        (lambda: of(codes, scales, format="mxfp8", role="k", axis=-1.0), "axis is -1.0"),
        (
            lambda: of(codes, scales, format="mxfp8", role="k", axis=-2),
            "axis is -2; scales of queries and keys lie along -1",
        ),
        (
            lambda: of(codes, scales[:, :1], format="mxfp8", role="k"),
            r"scales have shape \[1, 1, 70, 2\].* take \[1, 2, 70, 2\]",
        ),
        (lambda: of(codes.astype(np.float32), scales, format="mxfp8", role="k"), "codes is float32"),
        *(
            (lambda x=x: of(x, scales, format="mxfp8", role="k"), f"codes is {x.dtype} .*the bytes of e4m3.*view")
            for x in (codes.view(ml_dtypes.float8_e5m2), codes.view(np.int8), codes.view(ml_dtypes.float8_e4m3fnuz))
        ),
        (lambda: of(codes.view(ml_dtypes.float4_e2m1fn), format="nvfp4", role="k"), "codes is float4_e2m1fn"),
        (lambda: of(codes, scales.view(np.bool_), format="mxfp8", role="k"), "scales is bool"),
        (lambda: of(codes, scales, format="mxfp8", role="q", dim=128), "dim is 128; queries have no dim"),
        (
            lambda: of(codes, scales, format="mxfp8", role="v", axis=-2),
            "codes .* have 70 values along axis -2, no multiple of 32",
        ),
        (lambda: of(codes, scales, format="mxfp8", role="k", global_scale=2.0), "mxfp8 has none"),
        *(
            (lambda role=role, bad=bad: of(codes, format="nvfp4", role=role, global_scale=bad), "global_scale is")
            for role in "qkv"
            for bad in (-1.0, 0.0, np.nan, np.inf)
        ),
        (lambda: of(codes, format="nvfp4", role="v", global_scale="a"), "global_scale is a string"),
        (lambda: of(ptxrt.to_device(codes), scales, format="mxfp8", role="k"), "on different machines"),
    ]:
        with pytest.raises(ptxrt.ArgumentError, match=words):
            call()


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
def test_calls_that_need_tables_or_numbers_are_recorded(emulator, rng, format):
    """What the host makes for a call is on the device before the launches, also where the first call is recorded."""
    x = ptxrt.to_device(rng.standard_normal((1, 2, 70, 40)).astype(np.float32))
    level = dict(global_scale=0.5) if format == "nvfp4" else {}
    emulator.remembered.tables.clear()
    for role in ("k", "v", "q"):
        want = ptxrt.quantize_operand(x.to_numpy(), format, role=role, **level)

        def call(x):
            operand = ptxrt.quantize_operand(x, format, role=role, **level)
            return operand, ptxrt.dequantize(operand)

        with ptxrt.graph() as g:
            recorded = call(x)
        prepared = ptxrt.prepare(call, x)
        for launch in (lambda: g.launch() or recorded, prepared, lambda: call(x)):
            operand, values = launch()
            assert {n: a.to_numpy().tobytes() for n, a in operand.arrays.items()} == {
                n: a.tobytes() for n, a in want.arrays.items()
            }
            np.testing.assert_array_equal(values.to_numpy(), np.asarray(want))


def test_quantized_values_are_not_quantized_again(emulator, rng):
    x = rng.standard_normal((1, 2, 70, 64)).astype(np.float32)
    for x in (x, ptxrt.to_device(x)):
        for q in (ptxrt.quantize(x, "mxfp8"), ptxrt.quantize_operand(x, "mxfp8", role="k")):
            for call in (
                lambda: ptxrt.quantize(q, "mxfp4", pad=True),
                lambda: ptxrt.quantize_operand(q, "mxfp8", role="k"),
            ):
                with pytest.raises(ptxrt.ArgumentError, match="x is .*; pass floats"):
                    call()
