"""`KVCache` and `attention_paged`: what they write and read, and results whose bits depend on the sequence alone."""

import itertools
import threading

import ml_dtypes
import numpy as np
import pytest

import ptxrt
from ptxrt.blocks import BLOCK_FORMATS
from ptxrt.emulator.backend import EmulatorBackend
from ptxrt.ops import cache as cache_module
from ptxrt.ops.attention import exact_attention
from ptxrt.ops.attention_few import FEW_QUERIES, ONE_DIMS
from ptxrt.ops.operands import operand_rule
from scripts import script

BF16 = ml_dtypes.bfloat16
FORMATS = ("bf16", "f16", "mxfp8", "mxfp4", "nvfp4")
HEADS, DIM = 2, 64


def normal(rng, *shape, dtype=BF16):
    return rng.standard_normal(shape, dtype=np.float32).astype(dtype)


def table_of(rng, lengths, page, pages, width=None):
    """A page table for sequences of these lengths, with pages in random order; entries after the last page are
    invalid."""
    counts = [-(-n // page) for n in lengths]
    order, table = iter(rng.permutation(pages)), np.full((len(lengths), width or max(1, *counts)), -12345, np.int32)
    for row, count in zip(table, counts):
        row[:count] = [next(order) for _ in range(count)]
    return table


def filled(rng, k, v, lengths, page=16, spare=3, width=None, **options):
    """(cache, table): the keys and values of sequences, [tokens, heads, dim] each, in randomly ordered pages."""
    pages = sum(-(-n // page) for n in lengths) + spare
    dims = (k[0].shape[2], v[0].shape[2])
    cache = ptxrt.KVCache(pages, page, k[0].shape[1], *dims, **options)
    table = table_of(rng, lengths, page, pages, width)
    ids = np.repeat(np.arange(len(lengths)), lengths).astype(np.int32)
    places = np.concatenate([np.arange(n) for n in lengths]).astype(np.int32)
    mixed = rng.permutation(len(ids))
    slots = ptxrt.slots_of(table, ids, places, page)
    k, v = (np.concatenate([x[:n] for x, n in zip(rows, lengths)]) for rows in (k, v))
    cache.append(k[mixed], v[mixed], slots[mixed])
    return cache, table


def sequences(rng, lengths, heads=HEADS, dim=DIM, dtype=BF16):
    return [[normal(rng, max(n, 1), heads, dim, dtype=dtype) for n in lengths] for _ in range(2)]


def bits(results):
    return [np.asarray(x).view({2: np.uint16, 4: np.uint32}[np.asarray(x).itemsize]) for x in results]


def assert_same_bits(got, want):
    for a, b in zip(got, want):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(*bits((a, b)))


# Writing


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32])
def test_append_writes_the_bytes_of_quantize_and_no_others(machine, rng, format, dtype):
    cache = ptxrt.KVCache(
        5, 7, HEADS, 64, 32, format=format, k_global=[0.5, 2.0], k_mean=normal(rng, HEADS, 64, dtype=np.float32)
    )
    arrays = {name: x for name, x in cache.arrays.items() if x is not None}
    marks = {name: np.full(x.shape, 77 if x.dtype == np.uint8 else 7, x.dtype) for name, x in arrays.items()}
    marked = {name: ptxrt.to_device(x) for name, x in marks.items()}
    for name, x in marked.items():
        setattr(cache, name, x)
    k, v = normal(rng, 9, HEADS, 64, dtype=dtype), normal(rng, 9, HEADS, 32, dtype=dtype)
    k[2, 0, 3], v[3, 1, 0] = np.nan, np.inf
    slots = np.array([4, 34, -1, 0, 35, 4, 20, -(2**40), 34])
    assert cache.append(k, v, slots) is None
    mean, levels = cache.k_mean.to_numpy(), np.float32([0.5, 2.0])
    for token in (0, 1, 3, 6):  # the first token of each valid slot
        page, row = divmod(int(slots[token]), 7)
        for name, x, level in (
            ("k", k[token].astype(np.float32) - mean, levels),
            ("v", v[token].astype(np.float32), np.ones(2, np.float32)),
        ):
            block = BLOCK_FORMATS.get(format)
            for head in range(HEADS):
                if block is None:
                    marks[name][page, head, row] = (x[head] / level[head]).astype(marks[name].dtype)
                    continue
                x_here = x[head] if block.two_level else x[head] / level[head]
                rule = dict(rule=operand_rule(format))
                codes, scales = (
                    block.encode(x_here, level[head], **rule) if block.two_level else block.encode(x_here, **rule)
                )
                marks[name][page, head, row], marks[f"{name}_scales"][page, head, row] = codes, scales
    for name, want in marks.items():
        np.testing.assert_array_equal(cache.arrays[name].to_numpy(), want)
    cache.append(k[:0], v[:0], slots[:0])


@pytest.mark.parametrize("format", ["bf16", "nvfp4"])
def test_tokens_appended_at_once_and_one_at_a_time(machine, rng, format):
    caches = [ptxrt.KVCache(3, 8, HEADS, DIM, format=format) for _ in range(2)]
    fused = ptxrt.to_device(normal(rng, 24, 3 * HEADS, DIM))  # keys and values are slices of a fused projection
    k, v, slots = fused[:, HEADS : 2 * HEADS], fused[:, 2 * HEADS :], ptxrt.to_device(rng.permutation(24))
    caches[0].append(k, v, slots)
    for i in range(24):
        caches[1].append(k[i : i + 1], v[i : i + 1], slots[i : i + 1])
    for name, x in caches[0].arrays.items():
        if x is not None:
            np.testing.assert_array_equal(x.to_numpy(), caches[1].arrays[name].to_numpy())


@pytest.mark.parametrize("format", ["bf16", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("dtype", [BF16, np.float32])
def test_rows_that_begin_anywhere(text_machine, rng, format, dtype):
    """Rows at odd addresses, of heads that leave lanes idle, give the bytes of aligned rows."""
    k, v = normal(rng, 6, 5, 96, dtype=dtype), normal(rng, 6, 5, 32, dtype=dtype)
    apart = [ptxrt.to_device(np.pad(x, [(0, 0), (0, 0), (1, 2)]))[:, :, 1:-2] for x in (k, v)]
    caches = [ptxrt.KVCache(3, 2, 5, 96, 32, format=format) for _ in range(2)]
    slots = rng.permutation(6)
    for cache, rows in zip(caches, (map(ptxrt.to_device, (k, v)), apart)):
        cache.append(*rows, ptxrt.to_device(slots))
    for name, x in caches[0].arrays.items():
        if x is not None:
            np.testing.assert_array_equal(x.to_numpy(), caches[1].arrays[name].to_numpy())


def test_two_threads_append_to_different_pages(machine, rng):
    """Each thread has a stream of its own; the pages hold what a single thread writes."""
    lengths, table = [60, 45], np.array([[0, 1, 2, 3], [4, 5, 6, -1]], np.int32)
    k, v = sequences(rng, lengths)
    cache, alone = (ptxrt.KVCache(7, 16, HEADS, DIM) for _ in range(2))
    failures = []

    def write(sequence):
        try:
            with ptxrt.using(machine.name), ptxrt.Stream():
                for first in range(0, lengths[sequence], 7):
                    places = np.arange(first, min(first + 7, lengths[sequence]), dtype=np.int32)
                    slots = ptxrt.slots_of(table, np.full_like(places, sequence), places, 16)
                    cache.append(k[sequence][places], v[sequence][places], slots)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=[sequence]) for sequence in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for sequence, length in enumerate(lengths):
        places = np.arange(length, dtype=np.int32)
        slots = ptxrt.slots_of(table, np.full_like(places, sequence), places, 16)
        alone.append(k[sequence], v[sequence], slots)
    assert_same_bits(cache.read(table, lengths), alone.read(table, lengths))


@pytest.mark.parametrize("fails_at", range(5))
def test_a_cache_without_room_leaves_nothing_behind(emulator, monkeypatch, fails_at):
    allocations, empty = [], cache_module.empty

    def limited(*arguments, **options):
        allocations.append(arguments)
        return empty((2**58,), np.float32) if len(allocations) > fails_at else empty(*arguments, **options)

    monkeypatch.setattr(cache_module, "empty", limited)
    before = ptxrt.memory_info().used
    with pytest.raises(ptxrt.OutOfMemory):
        ptxrt.KVCache(4, 16, HEADS, DIM, format="nvfp4")
    assert len(allocations) == fails_at + 1 and ptxrt.memory_info().used == before


def test_copied_pages_are_forks(machine, rng):
    k, v = sequences(rng, [40])
    cache, table = filled(rng, k, v, [40], spare=4)
    free = sorted(set(range(cache.pages)) - set(table[0].tolist()))
    fork = np.array([[*table[0, :2], free[0]]], np.int32)
    cache.copy_pages(table[0, 2:3], fork[0, 2:3], tokens=[8])
    q = normal(rng, 1, HEADS, 1, DIM)
    before = ptxrt.attention_paged(q, cache, table, [40])
    assert_same_bits([ptxrt.attention_paged(q, cache, fork, [40])], [before])
    cache.append(*(normal(rng, 1, HEADS, DIM) for _ in "kv"), ptxrt.slots_of(fork, [0], [40], 16))
    assert_same_bits([ptxrt.attention_paged(q, cache, table, [40])], [before])
    assert (ptxrt.attention_paged(q, cache, fork, [41]) != before).any()


def test_tables_of_no_pages():
    for indptr in ([0], [0, 0, 0]):
        table = ptxrt.block_table_from_csr(indptr, [])
        assert table.shape == (len(indptr) - 1, 0) and table.dtype == np.int32


def test_slots_and_tables():
    table = ptxrt.block_table_from_csr([0, 2, 2, 5], [7, 3, 9, 1, 0])
    assert table.tolist() == [[7, 3, -1], [-1, -1, -1], [9, 1, 0]] and table.dtype == np.int32
    ids, places = np.array([0, 0, 0, 2, 1, 3, -1], np.int32), np.array([0, 5, 8, 11, 0, 0, 0], np.int32)
    want = [28, 13, -1, 3, -1, -1, -1]
    with ptxrt.using("emulator"):
        assert ptxrt.slots_of(table, ids, places, 4).tolist() == want
        assert ptxrt.slots_of(*(ptxrt.to_device(x) for x in (table, ids, places)), 4).to_numpy().tolist() == want


def test_swizzled_scales_come_in_order(rng):
    scales = rng.integers(0, 256, (3, 8, 2, 4), dtype=np.uint8).swapaxes(1, 2)  # [pages, heads, tokens, D / 16]
    swizzled = np.empty_like(scales)
    for token, byte in itertools.product(range(8), range(4)):
        at = 4 * byte + token % 4
        swizzled[:, :, token // 4 * 4 + at // 4, at % 4] = scales[:, :, token, byte]
    for given in (swizzled, swizzled.view(ml_dtypes.float8_e4m3fn)):
        found = ptxrt.KVCache.unswizzle_values(given)
        assert found.dtype == np.uint8
        np.testing.assert_array_equal(found, scales)


# Reading


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32])
def test_attention_on_a_cache(machine, rng, format, dtype):
    lengths, group = [70, 0, 300, 1], 3
    k, v = sequences(rng, lengths)
    levels = dict(k_global=[1.5, 0.75], v_global=3.0)
    cache, table = filled(
        rng, k, v, lengths, page=7, format=format, k_mean=0.5 * normal(rng, HEADS, DIM, dtype=np.float32), **levels
    )
    q, sinks = (
        normal(rng, 4, group * HEADS, 2, DIM).astype(dtype),
        normal(rng, group * HEADS, dtype=np.float32),
    )  # exact in 16 bits
    held = cache.read(table, lengths)
    for options in (dict(), dict(sinks=sinks, window=(100, 0)), dict(softcap=3.0, causal=False, scale=0.3)):
        out, lse = ptxrt.attention_paged(q, cache, table, lengths, return_lse=True, out_dtype=np.float32, **options)
        raw, top, total = ptxrt.attention_paged(q, cache, table, lengths, normalize=False, **options)
        for b, length in enumerate(lengths):
            if not length:
                assert (out[b] == 0).all()
                np.testing.assert_allclose(
                    lse[b], np.repeat(sinks, 2).reshape(-1, 2) if "sinks" in options else -np.inf, rtol=1e-6
                )
                continue
            exact = dict(causal=True) | options
            multiplied = q[b : b + 1].astype(cache.multiplied(q.dtype).dtype)
            want, want_lse = exact_attention(multiplied, *(x[b : b + 1, :, :length] for x in held), **exact)
            assert ptxrt.compare(out[b], want[0]).relative_l2 <= 2.5e-3
            finite = want_lse[0] > -np.inf
            assert (np.abs(lse[b] - want_lse[0])[finite] <= 1e-5 * np.maximum(1, np.abs(want_lse[0][finite]))).all()
            np.testing.assert_array_equal(lse[b] == -np.inf, ~finite)
            seen = total[b] > 0
            assert ptxrt.compare((raw[b] / np.where(seen, total[b], 1)[..., None]), out[b]).relative_l2 <= 1e-6
            np.testing.assert_allclose(
                (top[b] + np.log2(np.where(seen, total[b], 1)))[finite] * np.log(2), lse[b][finite], atol=1e-5
            )


@pytest.mark.parametrize("format, dtype", [("mxfp8", BF16), ("mxfp4", BF16), ("nvfp4", BF16), ("nvfp4", np.float16)])
def test_a_quantized_cache_equals_the_16_bit_cache_that_holds_its_values(machine, rng, format, dtype):
    lengths = [330, 17]
    k, v = sequences(rng, lengths, dim=128)
    cache, table = filled(rng, k, v, lengths, format=format)
    held = cache.read(table, lengths)
    plain = [[x[b, :, :n].swapaxes(0, 1).astype(dtype) for b, n in enumerate(lengths)] for x in held]
    for x, y in zip(
        itertools.chain(*plain),
        itertools.chain(*([x[b, :, :n].swapaxes(0, 1) for b, n in enumerate(lengths)] for x in held)),
    ):
        np.testing.assert_array_equal(x.astype(np.float32), y)
    other, other_table = filled(rng, *plain, lengths, page=32, format="f16" if dtype == np.float16 else "bf16")
    q = normal(rng, 2, 4 * HEADS, 3, 128, dtype=dtype)
    results = [
        ptxrt.attention_paged(q, c, t, lengths, return_lse=True) for c, t in ((cache, table), (other, other_table))
    ]
    assert_same_bits(*results)


def test_scales_of_mxfp4_up_to_two_and_above(machine, rng):
    """Tiles of keys whose largest scale is 2, 4 or 1/4, and one with a mixture, against a 16-bit cache."""
    lengths, powers = [256], np.repeat(np.float32([1, 2, 0.125]), 64)
    powers = np.concatenate([powers, np.float32(2) ** rng.integers(-3, 3, 64)])[:, None, None]
    k, v = ([(rng.uniform(-11.5, 11.5, (256, HEADS, 128)) * powers).astype(BF16)] for _ in "kv")
    cache, table = filled(rng, k, v, lengths, spare=0, format="mxfp4")
    scales = cache.arrays["k_scales"].to_numpy()
    assert {128, 129} <= set(scales.reshape(-1).tolist())
    held = [[x[0].swapaxes(0, 1).astype(BF16)] for x in cache.read(table, lengths)]
    other, other_table = filled(rng, *held, lengths, format="bf16")
    q = normal(rng, 1, 2 * HEADS, 1, 128)
    results = [
        ptxrt.attention_paged(q, c, t, lengths, scale=0.01, return_lse=True)
        for c, t in ((cache, table), (other, other_table))
    ]
    assert_same_bits(*results)


@pytest.mark.parametrize("queries", [1.0, 2.0**-30, 2.0**9])
def test_keys_of_mxfp8_that_f16_holds_and_others(machine, rng, queries):
    """Tiles of keys with scales from 2^-13 to 2^-1 and beyond, with queries that are normal in f16 or not, against a
    16-bit cache."""
    lengths, powers = [320], np.repeat(np.float32(2) ** [0, 5, -20, 9, 0], 64)
    powers[32:64], powers[256:] = np.float32(2) ** rng.integers(-4, 6, 32), np.float32(2) ** rng.integers(-13, 9, 64)
    k, v = ([(normal(rng, 320, HEADS, 128) * powers[:, None, None]).astype(BF16)] for _ in "kv")
    cache, table = filled(rng, k, v, lengths, spare=0, format="mxfp8")
    scales = cache.arrays["k_scales"].to_numpy()
    assert scales.min() < 114 and scales.max() > 126
    held = [[x[0].swapaxes(0, 1).astype(BF16)] for x in cache.read(table, lengths)]
    other, other_table = filled(rng, *held, lengths, format="bf16")
    q = normal(rng, 1, 2 * HEADS, 1, 128, dtype=BF16)
    q[0, 0, 0, 5], q[0, 1, 0, 7] = 0, BF16(queries)
    results = [
        ptxrt.attention_paged(q, c, t, lengths, scale=0.0005, return_lse=True)
        for c, t in ((cache, table), (other, other_table))
    ]
    assert_same_bits(*results)


PAIRS = [
    ("bf16", "nvfp4"),
    ("mxfp8", "mxfp4"),
    ("mxfp4", "bf16"),
    ("nvfp4", "mxfp8"),
    ("f16", "nvfp4"),
    ("nvfp4", "f16"),
]


@pytest.mark.parametrize("format, format_v", PAIRS)
def test_keys_and_values_of_two_formats(machine, rng, format, format_v):
    """Bit-identical to a 16-bit cache with the same values, for few and for many queries."""
    lengths = [130, 17]
    k, v = sequences(rng, lengths)
    cache, table = filled(rng, k, v, lengths, format=format, format_v=format_v)
    plain, dtype = ("f16", np.float16) if "f16" in (format, format_v) else ("bf16", BF16)
    held = [
        [x[b, :, :n].swapaxes(0, 1).astype(dtype) for b, n in enumerate(lengths)] for x in cache.read(table, lengths)
    ]
    other, other_table = filled(rng, *held, lengths, page=32, format=plain)
    for queries in (2, 17):
        q = normal(rng, 2, 3 * HEADS, queries, DIM, dtype=dtype)
        results = [
            ptxrt.attention_paged(q, c, t, lengths, return_lse=True) for c, t in ((cache, table), (other, other_table))
        ]
        assert_same_bits(*results)


OPERANDS = [("nvfp4", "nvfp4"), ("mxfp8", "mxfp8"), ("mxfp4", "mxfp8"), ("nvfp4", "bf16")]


def operands(rng, qk, pv, shape):
    """Unsmoothed operands of q, k and v; blocks along either axis represent the values of v exactly."""
    batch, heads, keys, dim = shape
    levels = {format: {"global_scale": 1.0} if format == "nvfp4" else {} for format in (qk, pv)}
    v = rng.choice(np.float32([-3, -1, -0.5, 0, 0.5, 1.5, 2, 4, 6]), shape)
    v[:, :, np.add.outer(np.arange(keys), np.arange(dim)) % 16 == 0] = 6
    q, k = normal(rng, batch, 3 * heads, 5, dim), normal(rng, *shape)
    q = ptxrt.quantize_operand(q, qk, role="q", **levels[qk])
    k = ptxrt.quantize_operand(k, qk, role="k", smooth=False, **levels[qk])
    return q, k, ptxrt.quantize_operand(v, pv, role="v", **levels[pv])


@pytest.mark.parametrize("qk, pv", OPERANDS)
def test_few_queries_on_operands_have_the_bits_of_pages(machine, rng, qk, pv):
    lengths = [170, 64]
    q, k, v = operands(rng, qk, pv, (2, HEADS, 192, DIM))
    rows = [[np.asarray(x)[b, :, :n].swapaxes(0, 1) for b, n in enumerate(lengths)] for x in (k, v)]
    cache, table = filled(rng, *rows, lengths, format=qk, format_v=pv)
    options = dict(causal=True, window=(90, 0), return_lse=True)
    want = ptxrt.attention_paged(np.asarray(q).astype(BF16), cache, table, lengths, **options)
    got = ptxrt.attention(q, k, v, qk=qk, pv=pv, key_lengths=lengths, **options)
    assert_same_bits(got, want)
    one = ptxrt.attention(
        *(x.to_numpy() for x in (q, k, v)),
        qk=qk,
        pv=pv,
        key_lengths=lengths,
        softcap=4.0,
        sinks=np.ones(3 * HEADS, np.float32),
    )
    exact, _ = exact_attention(
        *(np.asarray(x) for x in (q, k, v)), key_lengths=np.array(lengths), softcap=4.0, sinks=np.ones(3 * HEADS)
    )
    assert ptxrt.compare(one.astype(np.float32), exact).relative_l2 <= 4e-3


def test_nan_behind_the_keys_of_an_operand(machine, rng):
    """Tile contents of hidden keys are multiplied by zeros, even if they are NaN."""
    k, v = normal(rng, 1, 1, 64, DIM), normal(rng, 1, 1, 64, DIM)
    q = normal(rng, 1, 2, 1, DIM)
    clean = ptxrt.attention(
        q,
        *(ptxrt.quantize_operand(x, "mxfp8", role=r, smooth=None) for x, r in ((k, "k"), (v, "v"))),
        qk="mxfp8",
        key_lengths=[32],
    )
    k[:, :, 40], v[:, :, 40] = np.nan, np.nan
    holes = [ptxrt.quantize_operand(x, "mxfp8", role=r) for x, r in ((k, "k"), (v, "v"))]
    assert_same_bits([ptxrt.attention(q, *holes, qk="mxfp8", key_lengths=[32])], [clean])


@pytest.mark.parametrize("qk, pv", [("nvfp4", "nvfp4"), ("mxfp8", "bf16")])
def test_few_and_many_queries_on_packed_operands(machine, rng, qk, pv):
    """Every sequence gives the bits of a separate call, packed or not."""
    counts, lengths = [3, 20, 16, 0], [70, 130, 20, 5]
    cu_q, cu_k = (np.cumsum([0, *sizes]).astype(np.int32) for sizes in (counts, lengths))
    q, k, v = (normal(rng, 1, heads, n, DIM) for heads, n in ((4, cu_q[-1]), (HEADS, cu_k[-1]), (HEADS, cu_k[-1])))
    options = dict(qk=qk, pv=pv, smooth_k=False, return_lse=True, causal=True)

    def operand(x, format, role, **packing):
        level = {"global_scale": 0.5} if format == "nvfp4" else {}
        return ptxrt.quantize_operand(x, format, role=role, smooth=False if role == "k" else None, **level, **packing)

    q, k, v = operand(q, qk, "q"), operand(k, qk, "k", cu_seqlens=cu_k), operand(v, pv, "v", cu_seqlens=cu_k)
    out, lse = ptxrt.attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)
    for i in range(3):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        sides = ((q, rows, qk, "q"), (k, keys, qk, "k"), (v, keys, pv, "v"))
        parts = [operand(np.asarray(x)[:, :, s].astype(np.float32), format, role) for x, s, format, role in sides]
        assert_same_bits([out[:, :, rows], lse[:, :, rows]], ptxrt.attention(*parts, **options))


# Bits that do not depend on the call


@pytest.mark.parametrize(
    "format, group",
    [
        *(("bf16", 1), ("bf16", 8), ("nvfp4", 3), ("nvfp4", 5), ("nvfp4", 8)),
        *(("mxfp8", 2), ("mxfp8", 6), ("mxfp4", 4), ("mxfp4", 7)),
    ],
)
def test_bits_depend_on_the_sequence_alone(machine, rng, format, group):
    """Splits, batch size and order, the placement of pages and the table's width do not matter; drafts equal single
    queries."""
    lengths = [2049, 255, 1, 1090]
    k, v = sequences(rng, lengths, heads=1)
    q = normal(rng, len(lengths), group, 4, DIM)
    options = dict(return_lse=True, window=(1500, 0))
    cache, table = filled(rng, k, v, lengths, format=format)
    want = ptxrt.attention_paged(q, cache, table, lengths, **options)
    for splits in (1, 2, 3, 50):
        assert_same_bits(ptxrt.attention_paged(q, cache, table, lengths, splits=splits, **options), want)
    order = rng.permutation(len(lengths))
    other, wide = filled(
        rng, *([x[i] for i in order] for x in (k, v)), [lengths[i] for i in order], page=24, width=200, format=format
    )
    got = ptxrt.attention_paged(q[order], other, wide, [lengths[i] for i in order], splits=2, **options)
    assert_same_bits(got, [x[order] for x in want])
    for b, length in enumerate(lengths):
        alone = ptxrt.attention_paged(q[b : b + 1], cache, table[b : b + 1], lengths[b : b + 1], **options)
        assert_same_bits(alone, [x[b : b + 1] for x in want])
        for i in range(4):
            if length - 3 + i > 0:
                one = ptxrt.attention_paged(
                    q[b : b + 1, :, i : i + 1], cache, table[b : b + 1], [length - 3 + i], **options
                )
                assert_same_bits(one, [x[b : b + 1, :, i : i + 1] for x in want])


@pytest.mark.parametrize("group", range(1, 9))
def test_the_heads_of_a_group_are_those_of_calls_of_their_own(machine, rng, group):
    """Rows of a block that belong to other heads, or to none, do not change a bit."""
    lengths = [300]
    k, v = sequences(rng, lengths, heads=1)
    cache, table = filled(rng, k, v, lengths, format="mxfp8", format_v="nvfp4")
    q = normal(rng, 1, group, 5, DIM)
    out, lse = ptxrt.attention_paged(q, cache, table, lengths, window=(250, 0), return_lse=True)
    for head in {0, group // 2, group - 1}:
        one = slice(head, head + 1)
        assert_same_bits(
            (out[:, one], lse[:, one]),
            ptxrt.attention_paged(q[:, one], cache, table, lengths, window=(250, 0), return_lse=True),
        )


@pytest.mark.parametrize("format, group, window", [("bf16", 3, None), ("nvfp4", 9, None), ("mxfp8", 2, (70, 0))])
@pytest.mark.parametrize("dim", [64, 128])
def test_few_nodes_are_finished_without_a_merge(machine, rng, format, group, window, dim):
    """Tables with room for one node, for two and for more than a block merges, in one split and in two, give the same
    bits, whether warps share a chunk or have their own.
    """
    lengths = [1, 65, 256, 257, 1000]
    levels = dict(k_global=[0.5, 2.0], v_global=[0.75, 1.5], k_mean=normal(rng, HEADS, dim, dtype=np.float32))
    keys = [[normal(rng, n, HEADS, dim) for n in lengths] for _ in "kv"]
    cache, table = filled(rng, *keys, lengths, width=64, format=format, **levels)
    wide, widest = (np.pad(table, ((0, 0), (0, n)), constant_values=-1) for n in (1, 16 * 64 + 1))
    q = normal(rng, len(lengths), HEADS * group, 2, dim)
    sinks = normal(rng, HEADS * group, dtype=np.float32)
    for options in (
        dict(return_lse=True),
        dict(sinks=sinks, return_lse=True, out_dtype=np.float32),
        dict(sinks=sinks, normalize=False),
        dict(softcap=3.0, sinks=sinks, return_lse=True),
    ):
        found = []
        for some, splits, last in (
            (table, 1, "attention_few"),
            (wide, 1, "attention_few"),
            (wide, 2, "attention_few"),
            (widest, 2, "attention_merge"),
        ):
            results = ptxrt.attention_paged(q, cache, some, np.int32(lengths), window=window, splits=splits, **options)
            found.append(results)
            assert ptxrt.last_launches()[-1].kernel == last
        for results in found[1:]:
            assert_same_bits(results, found[0])


def test_as_many_nodes_as_a_block_merges(machine, rng):
    """16 nodes in one split or several, some of which a sequence lacks, have the bits of a merge of 17 nodes."""
    lengths = [15 * 1024 + 1, 1025, 0, 9 * 1024, 4 * 1024]
    cache, table = filled(rng, *sequences(rng, lengths, heads=1), lengths, page=64, width=256, format="mxfp8")
    wide = np.pad(table, ((0, 0), (0, 1)), constant_values=-1)
    q = normal(rng, len(lengths), 3, 1, DIM)
    found = []
    for some, splits, last in (
        (wide, 1, "attention_merge"),
        (table, 1, "attention_one"),
        (table, 3, "attention_one"),
        (table, 16, "attention_one"),
    ):
        found.append(ptxrt.attention_paged(q, cache, some, lengths, splits=splits))
        assert ptxrt.last_launches()[-1].kernel == last
        assert_same_bits(found[-1:], found[:1])


@pytest.mark.parametrize("format", ["bf16", "mxfp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("dim, window", [(64, None), (128, (300, 0))])
def test_chunks_with_blocks_of_their_own_have_the_bits_of_nodes(rng, monkeypatch, format, dim, window):
    """Where a device has many multiprocessors, lengths around tiles and chunks, also with a window that begins in any
    of them."""
    lengths = [0, 1, 65, 257, 300, 520, 832, 1025, 1500]
    monkeypatch.setattr(EmulatorBackend, "multiprocessors", 132)
    with ptxrt.using("emulator"):
        cache, table = filled(rng, *sequences(rng, lengths, dim=dim), lengths, width=100, format=format)
        q = normal(rng, len(lengths), HEADS * 3, 1, dim)
        options = dict(window=window, return_lse=True, sinks=normal(rng, HEADS * 3, dtype=np.float32))
        want = ptxrt.attention_paged(q, cache, table, lengths, splits=1, **options)
        assert ptxrt.last_launches()[-1].grid == (HEADS, 1, len(lengths))
        got = ptxrt.attention_paged(q, cache, table, lengths, **options)
        assert ptxrt.last_launches()[-1].grid == (7 * HEADS, 1, len(lengths))
    assert_same_bits(got, want)


def test_counters_are_zeros_after_each_launch(machine, rng):
    """Calls of several splits, in any order on one cache, find the counters as the first one did."""
    lengths = [3000, 5, 2100]
    cache, table = filled(rng, *sequences(rng, lengths), lengths, width=200, format="nvfp4")
    queries = {n: normal(rng, len(lengths), HEADS * group, n, DIM) for n, group in ((1, 3), (2, 9))}
    want = {n: ptxrt.attention_paged(q, cache, table, lengths, splits=1) for n, q in queries.items()}
    for n, splits in ((1, 2), (2, 3), (1, 4), (2, 2), (1, 2)):
        assert_same_bits([ptxrt.attention_paged(queries[n], cache, table, lengths, splits=splits)], [want[n]])
        assert not cache.arrivals((1, 1, 1, 8192)).to_numpy().any()


def test_counters_are_zeros_after_a_launch_that_faults(emulator, rng):
    """A page that does not exist ends a launch of which some blocks may have counted."""
    lengths = [1030]
    cache, table = filled(rng, *sequences(rng, lengths, heads=1), lengths, page=64, format="nvfp4")
    q, wrong = ptxrt.to_device(normal(rng, 1, 2, 1, DIM)), ptxrt.to_device(np.full_like(table, 99999))
    cache.arrivals((1, 1, 2, 1))[:] = 1
    with pytest.raises(ptxrt.EmulatorFault):
        ptxrt.attention_paged(q, cache, wrong, ptxrt.to_device(np.int32(lengths)), splits=2)
    assert not cache.arrivals((1, 1, 1, 8192)).to_numpy().any()
    got = [ptxrt.attention_paged(q, cache, table, lengths, splits=n) for n in (2, 1)]
    assert_same_bits(*([x.to_numpy()] for x in got))


def test_more_rows_than_counters_are_merged(machine, rng):
    from ptxrt.ops.attention_few import ARRIVALS

    lengths = [1025]
    cache, table = filled(rng, *sequences(rng, lengths), lengths, width=80, format="mxfp4")
    table = table.repeat(ARRIVALS // (HEADS * 16) + 1, axis=0)
    q = normal(rng, len(table), HEADS * 16, 1, DIM)
    assert cache.arrivals((len(table), HEADS, 16, 1)) is None
    got = ptxrt.attention_paged(q[:2], cache, table[:2], lengths * 2, splits=2)
    assert ptxrt.last_launches()[-1].kernel == "attention_few"
    whole = ptxrt.attention_paged(q, cache, table, lengths * len(table), splits=2)
    assert ptxrt.last_launches()[-1].kernel == "attention_merge"
    assert_same_bits([whole[:2]], [got])


def test_as_many_segments_as_a_merge_takes(machine, rng):
    """4096 segments, merged as a tree: sums of integers are exact, so that every segment must count. More are
    refused."""
    partial, row_max = (
        rng.integers(-4, 5, (4096, 1, 1, 2, 4)).astype(np.float32),
        np.full((4096, 1, 1, 2), 3, np.float32),
    )
    row_max[::7] = -np.inf
    row_sum = rng.integers(1, 9, row_max.shape).astype(np.float32)
    names = ("out_f32", "merged_max", "merged_sum")
    results = ptxrt.kernels()["attention_merge"](partial, row_max, row_sum, **{name: True for name in names}, dim_v=4)
    seen = row_max > -np.inf
    for got, want in zip(results, ((partial * seen[..., None]).sum(0), np.full((1, 1, 2), 3), (row_sum * seen).sum(0))):
        np.testing.assert_array_equal(got, want)
    with pytest.raises(ptxrt.ArgumentError, match="merge: 4097 segments came; a call takes 4096"):
        ptxrt.merge(np.zeros((4097, 1, 4), np.float32), np.zeros((4097, 1), np.float32))


def test_pages_of_sequences_that_grow_fork_and_end(emulator, rng):
    """examples/pages.py: a fork shares pages until one of the sequences writes to them."""
    pages = script("examples/pages.py").Pages(  # docs/ has a module of this name, too
        ptxrt.KVCache(10, 8, HEADS, DIM, format="bf16")
    )
    written = {}

    def append(name, count):
        k, v = normal(rng, count, HEADS, DIM), normal(rng, count, HEADS, DIM)
        pages.append(name, k, v)
        before = written.get(name, (k[:0], v[:0]))
        written[name] = tuple(np.concatenate(x) for x in zip(before, (k, v)))

    def check(*names):
        table, lengths = pages.table(names)
        for i, found in enumerate(zip(*pages.cache.read(table, lengths))):
            for got, want in zip(found, written[names[i]]):
                np.testing.assert_array_equal(got[:, : lengths[i]], want.astype(np.float32).swapaxes(0, 1))

    append("prompt", 20)
    for name in ("a", "b"):
        pages.fork("prompt", name)
        written[name] = written["prompt"]
    assert len(pages.free) == 10 - 3
    append("a", 1)
    append("b", 13)
    append("prompt", 2)
    check("prompt", "a", "b")
    assert len(pages.free) == 10 - 3 - 1 - 3
    pages.end("prompt")
    check("b", "a")
    pages.end("a")
    pages.end("b")
    assert sorted(pages.free) == list(range(10)) and not any(pages.uses)


def test_pages_that_are_used_up(emulator, rng):
    """examples/pages.py: what cannot be done changes nothing, and no page is lost or freed twice."""
    pages = script("examples/pages.py").Pages(ptxrt.KVCache(2, 16, HEADS, DIM, format="bf16"))
    append = lambda name, count: pages.append(name, *(normal(rng, count, HEADS, DIM) for _ in "kv"))
    append("prompt", 20)
    pages.fork("prompt", "answer")
    with pytest.raises(MemoryError, match="answer needs 1 more pages, and 0 are free"):
        append("answer", 1)
    with pytest.raises(MemoryError, match="other needs 3 more pages"):
        append("other", 40)
    with pytest.raises(ValueError, match="there is a sequence answer"):
        pages.fork("prompt", "answer")
    assert pages.uses == [2, 2] and not pages.free and set(pages.pages) == {"prompt", "answer"}
    pages.end("prompt")
    assert pages.uses == [1, 1] and not pages.free
    with pytest.raises(ptxrt.ArgumentError):
        pages.append("answer", np.zeros((1, HEADS + 1, DIM)), np.zeros((1, HEADS, DIM)))
    assert pages.lengths == {"answer": 20}
    append("answer", 1)  # alone now: nothing is copied
    pages.end("answer")
    assert sorted(pages.free) == [0, 1]
    append("none", 0)
    append("some", 5)
    table, lengths = pages.table(["some", "none"])
    assert lengths.tolist() == [5, 0] and len(table) == 2 and pages.table([])[0].shape[0] == 0


@pytest.mark.parametrize("format", ["bf16", "mxfp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("dim", ONE_DIMS)
@pytest.mark.parametrize("page", [7, 16, 64])
def test_one_query_has_the_bits_of_the_kernel_for_few(machine, rng, format, dim, page):
    """One query of a sequence has a kernel of its own; packed queries, two of them and soft caps have not."""
    lengths = [1, 63, 64, 65, 256, 257, 700, 1025, 1100]
    levels = dict(k_global=[0.5, 2.0], v_global=[0.75, 1.5], k_mean=normal(rng, HEADS, dim, dtype=np.float32))
    cache, table = filled(rng, *sequences(rng, lengths, dim=dim), lengths, page, format=format, **levels)
    q, cu = normal(rng, len(lengths), 3 * HEADS, 1, dim), np.arange(len(lengths) + 1, dtype=np.int32)
    packed = q.transpose(2, 1, 0, 3)
    for options in (
        dict(return_lse=True, sinks=normal(rng, 3 * HEADS, dtype=np.float32)),
        dict(window=(300, 0), out_dtype=np.float32, splits=2),
        dict(window=(70, 0), normalize=False),
    ):
        with ptxrt.trace() as launched:
            one = ptxrt.attention_paged(q, cache, table, np.int32(lengths), **options)
            few = ptxrt.attention_paged(packed, cache, table, np.int32(lengths), cu_seqlens_q=cu, **options)
        assert [x.kernel for x in launched.launches if x.kernel in ("attention_one", "attention_few")] == [
            "attention_one",
            "attention_few",
        ]
        one, few = (x if isinstance(x, tuple) else (x,) for x in (one, few))
        assert_same_bits(one, [np.moveaxis(x, 2, 0).reshape(y.shape) for x, y in zip(few, one)])
    for last, options in (
        ("attention_few", dict(softcap=2.0)),
        ("attention_few", dict(scale=-0.1)),
        ("attention_one", {}),
    ):
        with ptxrt.trace() as launched:
            ptxrt.attention_paged(q, cache, table, np.int32(lengths), **options)
        assert last in {launch.kernel for launch in launched.launches}


@pytest.mark.parametrize("dim", ONE_DIMS)
@pytest.mark.parametrize("format, block", [("mxfp4", 32), ("nvfp4", 16)])
@pytest.mark.parametrize("before, behind", [(1, 0), (0, 2)])
def test_one_query_reads_scales_at_any_address(machine, rng, format, block, dim, before, behind):
    """Rows of scales that begin anywhere, or have unwritten bytes behind them, give the bits of aligned ones."""
    lengths = [144, 48]  # whole pages
    cache, table = filled(rng, *sequences(rng, lengths, dim=dim), lengths, spare=0, format=format)
    q = normal(rng, 2, 4 * HEADS, 1, dim)
    want = ptxrt.attention_paged(q, cache, table, lengths)
    arrays = cache.arrays
    for name in ("k_scales", "v_scales"):
        scales, row = arrays[name], dim // block
        wide = ptxrt.empty((*scales.shape[:3], before + row + behind), scales.dtype)[..., before : before + row]
        wide[...] = scales
        arrays[name] = wide
    found = ptxrt.attention_paged(q, ptxrt.KVCache.over(*arrays.values(), format=format), table, lengths)
    assert_same_bits([found], [want])


@pytest.mark.parametrize("format, dim", [("bf16", 64), ("mxfp8", 128), ("mxfp4", 64), ("nvfp4", 64)])
def test_one_query_of_a_single_chunk(text_machine, rng, format, dim):
    """The warps of a block share its tiles. Rows of codes or scales have gaps, or pages an odd number of rows."""
    length, level = 192, dict(global_scale=1.0) if format == "nvfp4" else {}
    arrays = {}
    for name in ("k", "v"):
        rows = normal(rng, length, dim)
        quantized = None if format == "bf16" else ptxrt.quantize(rows, format, **level)
        arrays[name] = rows if quantized is None else quantized.codes
        arrays[f"{name}_scales"] = None if quantized is None else quantized.scales
    q, got = normal(rng, 1, 1, 1, dim), []
    calls, kernels = [dict(window=(100, 0))], {"attention_one"}
    if format == "mxfp4":  # words with scales of one row and of two
        calls, kernels = [*calls, dict(softcap=20.0)], kernels | {"attention_few"}
    for page, gaps in ((64, {}), (16, dict(k=16, v=16)), (16, dict(k_scales=2, v_scales=2)), (7, {})):
        pages, placed = -(-length // page), []
        for name, rows in arrays.items():
            if rows is not None:
                wide = np.zeros((pages * page, rows.shape[1] + gaps.get(name, 0)), rows.dtype)
                wide[:length, : rows.shape[1]] = rows
                rows = ptxrt.to_device(wide).reshape(pages, 1, page, -1)[..., : rows.shape[1]]
            placed.append(rows)
        cache = ptxrt.KVCache.over(*placed, format=format)
        with ptxrt.trace() as launched:
            for options in calls:
                got.append(ptxrt.attention_paged(q, cache, np.arange(pages, dtype=np.int32)[None], [length], **options))
        assert {launch.kernel for launch in launched} == kernels
    assert_same_bits(got[len(calls) :], 3 * got[: len(calls)])


def test_the_border_between_the_families(machine, rng):
    """Up to 16 queries at the end of a sequence have the bits of one at a time; 17 are computed by other kernels."""
    length = 100
    k, v = sequences(rng, [length])
    cache, table = filled(rng, k, v, [length])
    q = normal(rng, 1, 2 * HEADS, FEW_QUERIES + 1, DIM)
    few, one_more = (
        ptxrt.attention_paged(q[:, :, -queries:], cache, table, [length]) for queries in (FEW_QUERIES, FEW_QUERIES + 1)
    )
    for i in range(FEW_QUERIES):
        last = length - FEW_QUERIES + 1 + i
        alone = ptxrt.attention_paged(q[:, :, i + 1 : i + 2], cache, table, [last])
        assert_same_bits([few[:, :, i : i + 1]], [alone])
    assert ptxrt.compare(one_more[:, :, 1:], few).relative_l2 < 4e-3
    with ptxrt.trace() as launched:
        ptxrt.attention_paged(q[:, :, 1:], cache, table, [length])
    assert {launch.kernel for launch in launched.launches} == {"attention_few"}
    with ptxrt.trace() as launched:
        ptxrt.attention_paged(q, cache, table, [length])
    assert "attention_bf16" in {launch.kernel for launch in launched.launches}


@pytest.mark.parametrize("format", FORMATS)
def test_many_queries(machine, rng, format):
    """More than 16 queries use another family of kernels, whose bits also do not depend on batch, pages or
    placement."""
    lengths, group = [150, 40, 20], 2
    k, v = sequences(rng, lengths)
    levels = dict(k_global=[0.5, 1.5], v_global=[2.0, 0.75])
    cache, table = filled(rng, k, v, lengths, format=format, **levels)
    other, other_table = filled(rng, k[::-1], v[::-1], lengths[::-1], page=9, format=format, width=40, **levels)
    q, sinks = normal(rng, 3, group * HEADS, 20, DIM), normal(rng, group * HEADS, dtype=np.float32)
    held = cache.read(table, lengths)
    for options in (dict(window=(64, 0)), dict(sinks=sinks, causal=False), dict(softcap=2.0)):
        out, lse = got = ptxrt.attention_paged(q, cache, table, lengths, return_lse=True, **options)
        for b, length in enumerate(lengths):
            want, want_lse = exact_attention(
                q[b : b + 1], *(x[b : b + 1, :, :length] for x in held), **dict(causal=True) | options
            )
            assert ptxrt.compare(out[b].astype(np.float32), want[0]).relative_l2 <= 4e-3
            assert np.abs(lse[b] - want_lse[0]).max() <= 1e-4 * np.abs(want_lse).max()
        device = [ptxrt.to_device(x) for x in (q[::-1].copy(), other_table, np.array(lengths[::-1], np.int32))]
        turned = ptxrt.attention_paged(device[0], other, *device[1:], return_lse=True, **options)
        assert_same_bits([x.to_numpy()[::-1] for x in turned], got)
    plain = ptxrt.KVCache.over(*cache.arrays.values(), format=format)
    powers = ptxrt.KVCache.over(*cache.arrays.values(), format=format, k_global=0.5, v_global=2.0)
    direct = ptxrt.attention_paged(q, plain, table, lengths, scale=0.0625, return_lse=True)
    doubled = ptxrt.attention_paged(q, powers, table, lengths, return_lse=True)  # differs by a power of two
    assert_same_bits(direct[:1], [(doubled[0].astype(np.float32) / 2).astype(BF16)])
    np.testing.assert_allclose(direct[1], doubled[1], rtol=1e-6)


def test_few_and_many_packed_queries(machine, rng):
    """Every sequence of a call with few and many queries gives the bits of a separate call."""
    lengths, counts = [65, 130, 20], [3, 33, 1]
    k, v = sequences(rng, lengths)
    cache, table = filled(rng, k, v, lengths, format="nvfp4")
    q, cu = normal(rng, 1, 4, sum(counts), DIM), np.cumsum([0, *counts]).astype(np.int32)
    out, lse = ptxrt.attention_paged(q, cache, table, lengths, cu_seqlens_q=cu, return_lse=True)
    for b, (start, count) in enumerate(zip(cu, counts)):
        rows = slice(start, start + count)
        alone = ptxrt.attention_paged(q[:, :, rows], cache, table[b : b + 1], lengths[b : b + 1], return_lse=True)
        assert_same_bits([out[:, :, rows], lse[:, :, rows]], alone)


def test_packed_queries_are_those_of_calls_of_their_own(machine, rng):
    lengths, counts = [65, 130, 20], [1, 16, 0]
    k, v = sequences(rng, lengths)
    cache, table = filled(rng, k, v, lengths, format="nvfp4")
    q, cu = normal(rng, 1, 4, 17, DIM), np.cumsum([0, *counts]).astype(np.int32)
    out, lse = ptxrt.attention_paged(q, cache, table, lengths, cu_seqlens_q=cu, return_lse=True)
    for b, (start, count) in enumerate(zip(cu, counts)):
        if count:
            rows = slice(start, start + count)
            alone = ptxrt.attention_paged(q[:, :, rows], cache, table[b : b + 1], lengths[b : b + 1], return_lse=True)
            assert_same_bits([out[:, :, rows], lse[:, :, rows]], alone)


@pytest.mark.parametrize("queries", [6, 40])
@pytest.mark.parametrize("format", ["bf16", "nvfp4", "mxfp8"])
def test_what_is_not_finite_reaches_the_queries_that_see_it(machine, rng, format, queries):
    length, bad = 140, 137
    k, v = sequences(rng, [length])
    v[0][bad, 0, 5] = np.nan
    cache, table = filled(rng, k, v, [length], format=format)
    q = normal(rng, 1, 2 * HEADS, queries, DIM)
    got = ptxrt.attention_paged(q, cache, table, [length]).astype(np.float32)
    v[0][bad, 0, 5] = 0
    clean, clean_table = filled(rng, k, v, [length], format=format)
    want = ptxrt.attention_paged(q, clean, clean_table, [length]).astype(np.float32)
    sees = np.arange(queries) + length - queries >= bad
    assert np.isnan(got[0, :2, sees]).any(axis=-1).all()
    np.testing.assert_array_equal(got[0, :, ~sees], want[0, :, ~sees])
    np.testing.assert_array_equal(got[0, 2:], want[0, 2:])


def test_rows_that_are_nan_for_another_reason_stay_so(machine, rng):
    """A query that sees NaN in K is NaN everywhere, also in the column of an infinity in V."""
    k, v = sequences(rng, [60])
    k[0][50, 0, 3], v[0][20, 0, 5] = np.nan, np.inf
    cache, table = filled(rng, k, v, [60], format="bf16")
    got = ptxrt.attention_paged(normal(rng, 1, 2 * HEADS, 40, DIM), cache, table, [60]).astype(np.float32)
    sees = np.arange(40) + 20 >= 50
    assert np.isnan(got[0, :2, sees]).all() and np.isposinf(got[0, :2, ~sees, 5]).all()
    assert np.isfinite(got[0, 2:]).all()


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("format", ["bf16", "f16"])
@pytest.mark.parametrize("options", [{}, dict(window=(20, 0)), dict(causal=False), dict(layout="bshd")], ids=str)
def test_values_that_are_not_finite_in_calls_of_many_queries(machine, rng, format, options, normalize):
    """Three packed sequences, of which one has few queries and one only finite values."""
    lengths, counts = [90, 150, 70], [40, 9, 30]
    k, v = sequences(rng, lengths)
    clean, clean_table = filled(rng, k, v, lengths, format=format)
    spoiled = [x.copy() for x in v]
    spoiled[0][60, 0, 5], spoiled[0][70, 0, 5], spoiled[0][75, 0, 6] = np.inf, -np.inf, -np.inf
    spoiled[0][65, 1, 7], spoiled[1][145, 1, 0] = np.inf, np.nan
    cache, table = filled(rng, k, spoiled, lengths, format=format)
    q, cu = normal(rng, 1, 2 * HEADS, sum(counts), DIM), np.cumsum([0, *counts]).astype(np.int32)
    given = q.swapaxes(1, 2) if "layout" in options else q
    options = dict(options, cu_seqlens_q=cu, normalize=normalize, out_dtype=np.float32)
    got, want = (ptxrt.attention_paged(given, *of, lengths, **options) for of in ((cache, table), (clean, clean_table)))
    if not normalize:
        np.testing.assert_array_equal(got[1], want[1])
        np.testing.assert_array_equal(got[2], want[2])
        got, want = got[0], want[0]
    if "layout" in options:
        got, want = (x.swapaxes(1, 2) for x in (got, want))
    want = want.copy()
    left, right = options.get("window", (10**6, 0 if options.get("causal", True) else 10**6))
    for sequence in range(2):
        for i in range(counts[sequence]):
            at = lengths[sequence] - counts[sequence] + i
            seen = slice(max(at - left, 0), max(min(at + right + 1, lengths[sequence]), 0))
            with np.errstate(invalid="ignore"):
                bad = np.where(np.isfinite(spoiled[sequence]), 0, spoiled[sequence])[seen].sum(axis=0)
            for head, column in zip(*np.nonzero(~np.isfinite(bad))):
                want[0, 2 * head : 2 * head + 2, cu[sequence] + i, column] = bad[head, column]
    np.testing.assert_array_equal(got, want)
    assert np.isnan(got).any() and np.isneginf(got).any() and np.isposinf(got).any()


def test_a_graph_serves_every_length(machine, rng):
    """Lengths, tables and slots change on the device between launches of the graph."""
    cache = ptxrt.KVCache(40, 16, HEADS, DIM, format="nvfp4")
    table, lengths = (ptxrt.to_device(x) for x in (np.zeros((2, 18), np.int32), np.zeros(2, np.int32)))
    slots, places = ptxrt.to_device(np.zeros(2, np.int64)), ptxrt.to_device(np.zeros(2, np.int32))
    k, v, q = (ptxrt.to_device(normal(rng, *shape)) for shape in ((2, HEADS, DIM), (2, HEADS, DIM), (2, 4, 1, DIM)))
    out = ptxrt.to_device(np.zeros((2, 4, 1, DIM), BF16))
    with ptxrt.graph() as graph:
        cache.append(k, v, slots)
        ptxrt.attention_paged(q, cache, table, lengths, out=out)
    del places
    cast = ptxrt.kernels()["cast"]

    def put(target, value):
        """Write new contents to the same memory."""
        words = np.ascontiguousarray(value).view(np.float32).reshape(1, 1, 1, -1)
        flat = target.view(np.float32).reshape(words.shape)
        cast(ptxrt.to_device(words), y_f32=flat)

    rows, pages = sequences(rng, [50, 280]), table_of(rng, [50, 280], 16, 40, width=18)
    whole, whole_table = filled(np.random.default_rng(1), *rows, [50, 280], format="nvfp4")
    used = np.where(pages < 0, 0, pages)
    for b, n in enumerate((49, 279)):
        cache.append(
            rows[0][b][:n],
            rows[1][b][:n],
            ptxrt.slots_of(used, np.full(n, b, np.int32), np.arange(n, dtype=np.int32), 16),
        )
    put(table, used)
    put(lengths, np.array([50, 280], np.int32))
    put(slots, ptxrt.slots_of(used, np.array([0, 1], np.int32), np.array([49, 279], np.int32), 16))
    for target, source in ((k, rows[0]), (v, rows[1])):
        put(target, np.stack([x[n - 1] for x, n in zip(source, (50, 280))]))
    graph.launch()
    want = ptxrt.attention_paged(q.to_numpy(), whole, whole_table, [50, 280])
    assert_same_bits([out.to_numpy()], [want])


# Memory of other libraries, and wrong calls


@pytest.mark.parametrize("layout", ["hnd", "nhd"])
def test_a_cache_over_memory_of_an_engine(machine, rng, layout):
    """Each page holds codes and scales of the keys, then codes and scales of the values."""
    sizes = [8 * HEADS * DIM // 2, 8 * HEADS * DIM // 16] * 2
    pool = ptxrt.empty((9, sum(sizes)), np.uint8)
    ends = np.cumsum(sizes)
    shape = (HEADS, 8) if layout == "hnd" else (8, HEADS)
    views = [pool[:, end - size : end].reshape(9, *shape, size // HEADS // 8) for end, size in zip(ends, sizes)]
    cache = ptxrt.KVCache.over(*views, format="nvfp4", layout=layout)
    assert (cache.pages, cache.page_size, cache.heads, cache.dim, cache.dim_v) == (9, 8, HEADS, DIM, DIM)
    k, v = sequences(rng, [60])
    table = table_of(rng, [60], 8, 9)
    cache.append(k[0], v[0], ptxrt.slots_of(table, np.zeros(60, np.int32), np.arange(60, dtype=np.int32), 8))
    own, own_table = filled(rng, k, v, [60], format="nvfp4")
    q = normal(rng, 1, 4, 1, DIM)
    assert_same_bits([ptxrt.attention_paged(q, cache, table, [60])], [ptxrt.attention_paged(q, own, own_table, [60])])


def wrong(call, words):
    with pytest.raises(ptxrt.ArgumentError, match=words):
        call()


def test_wrong_calls_of_the_cache(emulator, rng):
    make = lambda **options: ptxrt.KVCache(**{**dict(pages=4, page_size=8, heads=HEADS, dim=DIM), **options})
    wrong(lambda: make(format="fp4"), "format is 'fp4'; pass one of 'bf16'")
    wrong(lambda: make(dim=40), "dim is 40; nvfp4 takes multiples of 32 up to 256, such as 64")
    wrong(lambda: make(pages=0), "pages is 0")
    wrong(lambda: make(format="f16", format_v="mxfp8"), "'f16' and 'mxfp8' have no type that holds both; take 'bf16'")
    wrong(lambda: make(format="bf16", format_v="f16"), "no type that holds both")
    wrong(
        lambda: make(dim=256, format="bf16", format_v="nvfp4"),
        "'bf16' beside 'nvfp4' takes head dimensions up to 128, 256 came",
    )
    wrong(lambda: make(k_global=0.0), "k_global is 0.0; pass positive")
    wrong(lambda: make(v_global=[1.0, np.nan]), "v_global")
    wrong(lambda: make(k_mean=np.zeros((1, DIM))), "k_mean is float64 \\[1, 64\\]")
    wrong(lambda: make(scale_rule="floor"), "scale_rule is 'floor'; nvfp4 takes 'amax'")
    for value in (1e300, np.nan):
        wrong(lambda value=value: make(k_mean=np.full((HEADS, DIM), value)), "k_mean has values that are not finite")
    wrong(lambda: ptxrt.KVCache.over(5, None, None, None, format="bf16"), "k_codes is a int; pass a device array")
    wrong(lambda: ptxrt.KVCache.over(np.zeros(3), None, None, None, format="bf16"), "k_codes is a ndarray; pass a dev")
    wrong(lambda: ptxrt.block_table_from_csr([0, 1], [-3]), "indices has page -3")
    wrong(lambda: ptxrt.KVCache.unswizzle_values(np.zeros((4, 4), bool)), "v_scales is bool")
    cache = make()
    k = normal(rng, 3, HEADS, DIM)
    wrong(lambda: cache.append(k, k[:2], [0, 1, 2]), "v is bfloat16 \\[2, 2, 64\\].*pass float32")
    wrong(lambda: cache.append(k, k.astype(np.float64), [0, 1, 2]), "v is float64 .*: v.astype\\(numpy.float32\\)$")
    wrong(lambda: cache.append(k, k, [0.0, 1.0, 2.0]), "slots .*pass int64")
    wrong(lambda: cache.append(k[:0], k[:0], np.empty(0, np.float32)), "slots .*pass int64")
    cache.append(k[:0], k[:0], [])
    wrong(lambda: cache.copy_pages([0, 1], [2, 2]), "a page can be a target once")
    wrong(lambda: ptxrt.block_table_from_csr(ptxrt.to_device(np.int32([0, 1])), [3]), "indptr is on .*indptr.to_numpy")
    wrong(lambda: ptxrt.block_table_from_csr([0, 1], ptxrt.to_device(np.int32([3]))), "indices is on ")
    fixed = cache.v.broadcast_to(cache.v.shape)  # read-only
    lent = ptxrt.KVCache.over(cache.k, cache.k_scales, fixed, cache.v_scales, format="nvfp4")
    for call in (lambda: lent.append(k, k, [0, 1, 2]), lambda: lent.copy_pages([0], [1])):
        wrong(call, "v of the cache is read-only; make it over memory that can be written")
    for tokens in ([9], [-1]):
        wrong(lambda: cache.copy_pages([0], [1], tokens=tokens), "tokens is .*; a page has 0 to 8")
    cache.append(k[:0], k[:0], [])
    wrong(lambda: cache.copy_pages([0], [4]), "targets is \\[4\\]; the cache has pages 0 to 3")
    wrong(
        lambda: cache.copy_pages([0, 1], [1, 2]),
        "sources is \\[0, 1\\], targets is \\[1, 2\\]; no page can be both: copy in two calls",
    )
    codes, scales = ptxrt.empty((4, HEADS, 8, 32), np.uint8), ptxrt.empty((4, HEADS, 8, 4), np.uint8)
    over = ptxrt.KVCache.over
    wrong(lambda: over(codes, None, codes, scales, format="nvfp4"), "k_scales is missing; pass scales \\[4, 2, 8, 4\\]")
    wrong(lambda: over(codes, scales[:3], codes, scales, format="nvfp4"), "k_scales is uint8 \\[3, 2, 8, 4\\]")
    wrong(lambda: over(codes, scales, codes, scales, format="bf16"), "k_codes is uint8|dim is")
    wrong(lambda: over(codes.to_numpy, scales, codes, scales, format="nvfp4"), "k_codes")
    read_only = ptxrt.KVCache.over(codes.broadcast_to((4, HEADS, 8, 32)), scales, codes, scales, format="nvfp4")
    wrong(lambda: read_only.append(k, k, [0, 1, 2]), "k of the cache is read-only")


def test_memory_that_a_cache_cannot_be_over(emulator):
    """Bytes of other formats, sizes of 0, formats that do not exist."""
    over, shape = ptxrt.KVCache.over, (4, HEADS, 8)
    codes, scales = ptxrt.empty((*shape, 32), np.uint8), ptxrt.empty((*shape, 4), np.uint8)
    whole, twos = ptxrt.empty((*shape, 64), np.uint8), ptxrt.empty((*shape, 2), np.uint8)
    for other in (ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fnuz, np.int8, np.bool_):
        wrong(
            lambda: over(whole.view(other), twos, whole, twos, format="mxfp8"),
            f"k_codes is {np.dtype(other)} .*it must be uint8 .*in the bytes of e4m3",
        )
    wrong(lambda: over(whole, twos, whole, twos.view(ml_dtypes.float8_e4m3fn), format="mxfp8"), "v_scales is .*ue8m0")
    wrong(lambda: over(codes.view(ml_dtypes.float4_e2m1fn), scales, codes, scales, format="nvfp4"), "k_codes is float4")
    e4m3, e8m0 = whole.view(ml_dtypes.float8_e4m3fn), twos.view(ml_dtypes.float8_e8m0fnu)
    assert over(e4m3, e8m0, e4m3, e8m0, format="mxfp8").dim == 64
    for empty in (np.s_[:0], np.s_[:, :0], np.s_[:, :, :0], np.s_[..., :0]):
        arrays = [x[empty] for x in (codes, scales)] * 2
        wrong(lambda: over(*arrays, format="nvfp4"), "k_codes has shape .*; no size may be 0")
    for formats in (dict(format=["nvfp4"]), dict(format="nvfp4", format_v=["nvfp4"])):
        wrong(lambda: over(codes, scales, codes, scales, **formats), "is \\['nvfp4'\\]; pass one of 'bf16'")
    shared = over(codes, scales, codes, scales, format="nvfp4")
    k = np.zeros((1, HEADS, DIM), BF16)
    wrong(lambda: shared.append(k, k, [0]), "k and v of the cache overlap in memory; make it over separate arrays")
    with pytest.raises(ptxrt.ArgumentError, match="a new cache would be initialized by them alone"):
        with ptxrt.graph():
            ptxrt.KVCache(2, 16, HEADS, 64)


def test_a_scale_rule_is_that_of_the_formats_with_scales(emulator):
    make = lambda **formats: ptxrt.KVCache(2, 16, HEADS, DIM, **formats)
    assert make(format="bf16", format_v="nvfp4", scale_rule="four_over_six").scale_rule["v"] == "four_over_six"
    assert make(format="mxfp8", format_v="mxfp4", scale_rule="ceil").scale_rule == dict(k="ceil", v="ceil")
    wrong(lambda: make(format="mxfp8", format_v="nvfp4", scale_rule="amax"), "scale_rule is 'amax'; mxfp8 takes")
    wrong(lambda: make(format="bf16", scale_rule="amax"), "scale_rule is 'amax'; bf16 has no scales")


def test_numbers_of_a_read_are_checked_on_a_device_too(emulator, rng):
    k, v = sequences(rng, [10])
    cache, table = filled(rng, k, v, [10])
    lengths = ptxrt.to_device(np.int32([10]))
    assert_same_bits(cache.read(ptxrt.to_device(table), lengths), cache.read(table, [10]))
    wrong(lambda: cache.read(table, ptxrt.to_device(np.int32([4000]))), "read: key_lengths is \\[4000\\]")
    wrong(lambda: cache.read(ptxrt.to_device(np.full_like(table, 99)), lengths), "read: block_table names page 99")


def test_slots_of_tables_without_rows(emulator):
    for shape in ((0, 2), (2, 0), (0, 0)):
        assert ptxrt.slots_of(np.zeros(shape, np.int32), [0, 1], [0, 0], 16).tolist() == [-1, -1]
        found = ptxrt.slots_of(ptxrt.to_device(np.zeros(shape, np.int32)), [0, 1], [0, 0], 16)
        assert found.to_numpy().tolist() == [-1, -1]
    gapped = ptxrt.to_device(np.int32([[3, 9, 4, 9]]))[:, ::2]
    assert ptxrt.slots_of(gapped, [0, 0], [1, 17], 16).to_numpy().tolist() == [49, 65]
    wrong(lambda: ptxrt.slots_of(np.int32([[0]]), [0], [0], 2**31), "slots_of: page_size is 2147483648; pass less")


def test_arguments_of_any_strides_and_floats(machine, rng):
    """Views on a device that go backwards or have gaps, and sinks in 16 bits."""
    lengths = [20, 37]
    k, v = sequences(rng, lengths)
    cache, table = filled(rng, k, v, lengths)
    sinks = normal(rng, 4)
    on = ptxrt.to_device
    for queries in (2, 20):
        q = normal(rng, 2, 4, queries, DIM)
        want = ptxrt.attention_paged(q, cache, table, lengths, sinks=sinks.astype(np.float32), return_lse=True)
        got = ptxrt.attention_paged(
            on(q[:, ::-1].copy())[:, ::-1],
            cache,
            on(np.repeat(table, 2, axis=1))[:, ::2],
            on(np.repeat(np.int32(lengths), 2))[::2],
            sinks=on(np.repeat(sinks, 2))[::2],
            return_lse=True,
        )
        assert_same_bits([x.to_numpy() for x in got], want)
        assert_same_bits(ptxrt.attention_paged(q, cache, table, lengths, sinks=sinks, return_lse=True), want)
        out = on(np.zeros_like(q))
        wrong(
            lambda: ptxrt.attention_paged(on(q), cache, table, lengths, out=out[:, ::-1]),
            "attention_paged: out .* has strides",
        )
        wrong(
            lambda: ptxrt.attention_paged(out, cache, table, lengths, out=out),
            "attention_paged: out and q overlap in memory; pass separate arrays",
        )


def test_a_soft_cap_near_zero(machine, rng):
    """Caps from 2^-100 on are told apart from none; smaller ones count as 2^-100."""
    k, v = sequences(rng, [10])
    cache, table = filled(rng, k, v, [10])
    for queries in (1, 20):
        q = normal(rng, 1, 4, queries, DIM)
        for cap in (1e-30, 1e-50):
            out, lse = ptxrt.attention_paged(q, cache, table, [10], causal=False, softcap=cap, return_lse=True)
            np.testing.assert_allclose(lse, np.log(10), rtol=1e-5)
            assert np.isfinite(out.astype(np.float32)).all()


@pytest.mark.parametrize("format, format_v", [("bf16", "bf16"), ("nvfp4", "nvfp4"), ("nvfp4", "mxfp8")])
def test_a_refused_append_costs_no_later_one_its_rows(machine, rng, format, format_v):
    """The tokens of a refused call own no slots, and neither keys nor values were written."""
    cache = ptxrt.KVCache(2, 32, HEADS, DIM, format=format, format_v=format_v)
    zeros, slots = np.zeros((64, HEADS, DIM), BF16), np.arange(64)
    cache.append(zeros, zeros, slots)
    before = {name: x.to_numpy() for name, x in cache.arrays.items() if x is not None}
    k = ptxrt.to_device(normal(rng, 8, HEADS, DIM))
    codes = cache.v.view(np.uint8)  # 64 bytes or more of a row, as tokens of 32 values in 16 bits
    inside = codes.reshape(codes.size)[: 8 * HEADS * DIM * 2].view(BF16).reshape(8, HEADS, DIM)
    wrong(lambda: cache.append(k, inside, slots[:8]), "overlap")
    for name, x in before.items():
        np.testing.assert_array_equal(cache.arrays[name].to_numpy().view(np.uint8), x.view(np.uint8))
    cache.append(k, k, slots[:8][::-1].copy())
    other = ptxrt.KVCache(2, 32, HEADS, DIM, format=format, format_v=format_v)
    other.append(zeros, zeros, slots)
    other.append(k.to_numpy()[::-1], k.to_numpy()[::-1], slots[:8])
    for name in before:
        np.testing.assert_array_equal(
            cache.arrays[name].to_numpy().view(np.uint8), other.arrays[name].to_numpy().view(np.uint8)
        )


@pytest.mark.parametrize("format", ["bf16", "nvfp4"])
@pytest.mark.parametrize("shape", [(), (1,), (HEADS,), "strided"], ids=str)
def test_factors_on_the_device(machine, rng, format, shape):
    """One or one for each head, with the bits of numbers."""
    numbers = np.array([0.5, 2.0], np.float32) if shape not in ((), (1,)) else np.full(HEADS, 0.5, np.float32)
    if shape == "strided":
        factors = ptxrt.to_device(np.repeat(numbers, 2))[::2]
    else:
        factors = ptxrt.to_device(numbers[: 1 if shape in ((), (1,)) else HEADS].reshape(shape))
    q, k, v = normal(rng, 1, 4, 1, DIM), normal(rng, 40, HEADS, DIM), normal(rng, 40, HEADS, DIM)
    results = []
    for given in (numbers, factors):
        cache, table = filled(rng, [k], [v], [40], format=format, k_global=given, v_global=given)
        few = ptxrt.attention_paged(q, cache, table, [40], return_lse=True)
        results.append([*few, *(x if isinstance(x, np.ndarray) else x.to_numpy() for x in cache.read(table, [40]))])
        with ptxrt.trace() as launched:
            results[-1].append(ptxrt.attention_paged(np.repeat(q, 20, axis=2), cache, table, [40], window=(9, 0)))
        assert "attention_adjusted" in {launch.kernel for launch in launched}
    assert_same_bits(*results)


@pytest.mark.parametrize("cut", [np.s_[:, :, ::2], np.s_[::-1, :, :DIM], np.s_[:, ::-1, :DIM]], ids=str)
def test_tokens_on_any_strides(machine, rng, cut):
    """Rows with gaps and rows in reverse, on the host and on the device."""
    x, slots = normal(rng, 9, HEADS, 2 * DIM), np.arange(9)[::-1].copy()
    caches = [ptxrt.KVCache(2, 8, HEADS, DIM) for _ in range(3)]
    plain = np.ascontiguousarray(x[cut])
    for cache, part in zip(caches, (plain, x[cut], ptxrt.to_device(x)[cut])):
        cache.append(part, part, slots)
    table = np.array([[0, 1]], np.int32)
    want, *others = ([y.to_numpy() if hasattr(y, "to_numpy") else y for y in c.read(table, [9])] for c in caches)
    for got in others:
        assert_same_bits(got[0], want[0])
        assert_same_bits(got[1], want[1])


def test_sequences_without_pages(machine, rng):
    """`block_table_from_csr` of empty sequences: outputs are 0, an lse is -inf, and no position has a slot."""
    cache, table = ptxrt.KVCache(4, 8, HEADS, DIM), ptxrt.block_table_from_csr([0, 0, 0], [])
    assert table.shape == (2, 0)
    for queries in (1, 20):
        out, lse = ptxrt.attention_paged(normal(rng, 2, 4, queries, DIM), cache, table, [0, 0], return_lse=True)
        assert not out.any() and (lse == -np.inf).all()
    sinks = np.zeros(4, np.float32)
    _, lse = ptxrt.attention_paged(normal(rng, 2, 4, 1, DIM), cache, table, [0, 0], return_lse=True, sinks=sinks)
    assert (lse == 0).all()
    for tables in (table, ptxrt.to_device(table)):
        slots = ptxrt.slots_of(tables, [0, 1, 1], [0, 0, 3], 8)
        slots = slots if isinstance(slots, np.ndarray) else slots.to_numpy()
        np.testing.assert_array_equal(slots, [-1, -1, -1])


def test_prepared_calls_take_caches_that_were_written_or_not(emulator, rng):
    """Prepared calls serve caches of equal description: one for all layers of a model."""
    make = lambda **options: ptxrt.KVCache(2, 16, HEADS, DIM, **options)
    k, v = (ptxrt.to_device(normal(rng, 4, HEADS, DIM)) for _ in "kv")
    slots, table, lengths = (ptxrt.to_device(x) for x in (np.arange(4), np.int32([[0]]), np.int32([4])))
    q, out = ptxrt.to_device(normal(rng, 1, 4, 1, DIM)), ptxrt.empty((1, 4, 1, DIM), np.float32)
    caches = [make() for _ in range(3)]
    attend = ptxrt.prepare(ptxrt.attention_paged, q, caches[0], table, lengths, out=out)
    append = ptxrt.prepare(ptxrt.KVCache.append, caches[0], k, v, slots)
    for cache in caches[::-1]:
        append(cache, k, v, slots)
        attend(q, cache, table, lengths)
        want = ptxrt.attention_paged(q, cache, table, lengths, out_dtype=np.float32)
        np.testing.assert_array_equal(out.to_numpy(), want.to_numpy())
    wrong(lambda: attend(q, make(k_global=0.5), table, lengths), "argument 1 is KVCache.* and k_global differ")
    wrong(lambda: attend(q, make(k_mean=np.ones((HEADS, DIM))), table, lengths), "and k_mean differ")
    levels = ptxrt.prepare(ptxrt.attention_paged, q, make(v_global=0.5), table, lengths, out=out)
    wrong(lambda: levels(q, caches[0], table, lengths), "and v_global differ")


def test_copies_of_pages_in_any_order(emulator, rng):
    """Page numbers on a device may lie backwards."""
    cache = ptxrt.KVCache(4, 4, HEADS, DIM, format="bf16")
    k = normal(rng, 16, HEADS, DIM)
    cache.append(k, k, np.arange(16))
    sources, targets = (ptxrt.to_device(np.int32(x))[::-1] for x in ([0, 1], [2, 3]))
    cache.copy_pages(sources, targets)
    np.testing.assert_array_equal(cache.k.to_numpy()[2:], cache.k.to_numpy()[:2])


def test_wrong_calls_of_attention(emulator, rng):
    cache, q = ptxrt.KVCache(4, 8, HEADS, DIM), normal(rng, 1, 4, 1, DIM)
    table, call = np.zeros((1, 2), np.int32), ptxrt.attention_paged
    wrong(
        lambda: call(q[:, :3], cache, table, [5]), "3 heads of q are no multiple of the 2 of the cache; nearest: 2 or 4"
    )
    wrong(lambda: call(q[..., :32], cache, table, [5]), "q has a head dimension of 32, the cache 64")
    wrong(lambda: call(q, cache, table, [17]), "key_lengths is \\[17\\]; 2 pages of 8 tokens hold 0 to 16")
    wrong(lambda: call(q, cache, table + 9, [5]), "block_table names page 9; the cache has 4")
    wrong(lambda: call(q, cache, table.astype(np.float32), [5]), "block_table is float32")
    wrong(lambda: call(q, cache, table[0], [5]), "block_table")
    wrong(lambda: call(q, cache, np.zeros((2, 2), np.int32), [5, 5]), "block_table has 2 rows, q a batch of 1")
    wrong(lambda: call(q, "cache", table, [5]), "cache is a str")
    wrong(lambda: call(q.astype(np.float64), cache, table, [5]), "q is float64 .*: q.astype\\(numpy.float32\\)$")
    wrong(lambda: call(q, cache, table, [5], splits=0), "splits is 0")
    wrong(lambda: call(q, cache, table, [5], window=3), "attention_paged: window is 3")
    wrong(lambda: call(q, cache, table, [5], scale=1e39), "attention_paged: scale is 1e\\+39")
    for name, value in dict(scale="0.5", softcap="3").items():
        wrong(lambda name=name, value=value: call(q, cache, table, [5], **{name: value}), f"{name} is '{value}'")
    wrong(lambda: call(q, cache, table, [5], scale=np.complex64(1 + 5j)), "scale is .*pass a finite number")
    wrong(lambda: call(q, cache, table, [5], scale=b"1"), "scale is b'1'")
    wrong(lambda: call(q, cache, table, [2**31]), "key_lengths has 2147483648; pass numbers that int32 holds")
    wrong(lambda: call(q, cache, np.int64(table) + 2**40, [5]), "block_table has 1099511627776")
    wrong(lambda: call(ptxrt.quantize_operand(q, "nvfp4", role="q"), cache, table, [5]), "q is Operand.*dequantize")
    wrong(lambda: call(q, cache, table, [5], sinks=np.zeros(3, np.float32)), "sinks are float32 \\[3\\]")
    plain = ptxrt.KVCache(4, 8, HEADS, DIM, format="bf16")
    inside = plain.k.reshape(4, HEADS * 8, 1, DIM)[:1, :4]
    wrong(lambda: call(ptxrt.to_device(q), plain, table, [5], out=inside), "out and k of the cache overlap")
    mean = ptxrt.to_device(np.zeros((HEADS, DIM), np.float32))
    less, out = ptxrt.KVCache(4, 8, HEADS, DIM, k_mean=mean), mean.view(BF16).reshape(1, 4, 1, DIM)
    wrong(lambda: call(ptxrt.to_device(q), less, table, [5], out=out), "out and k_mean of the cache overlap")
