"""`append_qkv` writes the same bytes as `rmsnorm`, `rope` and `cache.append` in sequence, in every format."""

import ml_dtypes
import numpy as np
import pytest

import ptxrt
from ptxrt.errors import ArgumentError

BF16 = ml_dtypes.bfloat16


def normal(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def cache_of(format, dim, **options):
    """A cache for 2 heads and 12 tokens, zeroed so that unwritten parts compare equal."""
    cache = ptxrt.KVCache(3, 4, 2, dim, format=format, **options)
    for x in cache.arrays.values():
        if x is not None:
            x[...] = 0
    return cache


def contents(cache):
    return {name: x.to_numpy().view(np.uint8) for name, x in cache.arrays.items() if x is not None}


def in_turn(parts, cache, slots, positions, table, *, q_weight=None, k_weight=None, eps=1e-6, **turns):
    """Run the three functions: return q and write k and v to the cache."""
    normed = [x if w is None else ptxrt.rmsnorm(x, w, eps=eps) for x, w in zip(parts, (q_weight, k_weight, None))]
    q, k = (ptxrt.rope(x, table, positions, **turns) for x in normed[:2])
    cache.append(k, parts[2], slots)
    return q


def parts_of(qkv, heads, dim, dim_v):
    q, k, v = np.split(qkv, [heads * dim, (heads + 2) * dim], axis=1)
    return q.reshape(-1, heads, dim), k.reshape(-1, 2, dim), v.reshape(-1, 2, dim_v)


# Cache formats, head dimension, columns that rotate, first of them, style, norms, and other options.
CASES = [
    ("bf16", 64, 64, 0, "halves", "qk", {}),
    ("bf16", 256, 64, 192, "pairs", "", {}),
    ("f16", 40, 22, 3, "halves", "k", dict(k_global=[2.0, 0.5])),
    ("mxfp8", 128, 128, 0, "halves", "qk", dict(scale_rule="floor")),
    ("mxfp8", 96, 96, 0, "halves", "qk", dict(dim_v=224, v_global=0.3)),
    ("mxfp4", 64, 64, 0, "pairs", "q", dict(k_mean=normal(2, 64))),
    ("nvfp4", 128, 64, 64, "halves", "qk", dict(k_global=0.02, v_global=[0.01, 0.1])),
    ("nvfp4", 32, 32, 0, "halves", "k", dict(scale_rule="four_over_six", dim_v=64)),
    ("mxfp4", 64, 64, 0, "halves", "k", dict(dim_v=96)),
    ("f16", 64, 64, 0, "halves", "qk", dict(k_mean=normal(2, 64), k_global=[2.0, 0.5])),
    ("f16", 64, 64, 0, "halves", "qk", {}),
    ("bf16", 64, 64, 0, "pairs", "", {}),
    ("f16", 128, 128, 0, "pairs", "qk", {}),
    ("bf16", 256, 256, 0, "pairs", "k", {}),
    ("f16", 256, 256, 0, "halves", "q", {}),
    ("mxfp4", 96, 38, 3, "pairs", "qk", dict(k_global=[2.0, 0.5])),
    ("mxfp8", 96, 38, 2, "pairs", "k", {}),
    # Values in another format than keys.
    ("bf16", 64, 64, 0, "halves", "qk", dict(format_v="mxfp8")),
    ("bf16", 64, 64, 0, "halves", "", dict(format_v="nvfp4", dim_v=32)),
    ("f16", 64, 64, 0, "halves", "k", dict(format_v="nvfp4")),
    ("mxfp8", 128, 128, 0, "halves", "k", dict(format_v="mxfp4", v_global=[2.0, 0.5])),
    ("mxfp4", 64, 38, 3, "pairs", "", dict(format_v="mxfp8", k_mean=normal(2, 64))),
    ("mxfp4", 64, 64, 0, "halves", "q", dict(format_v="nvfp4", v_global=0.02)),
    ("nvfp4", 64, 64, 0, "halves", "qk", dict(format_v="bf16", k_global=0.02)),
    ("nvfp4", 32, 32, 0, "halves", "k", dict(format_v="f16", dim_v=64)),
]


@pytest.mark.parametrize(
    "format, dim, width, first, style, norms, options", CASES, ids=lambda x: str(x) if isinstance(x, (str, int)) else ""
)
def test_the_bytes_of_the_parts_in_turn(text_machine, format, dim, width, first, style, norms, options):
    dim_v = options.get("dim_v", dim)
    table = ptxrt.rope_table(width, 50)
    slots = [3, -1, 11, 0, 3, 12, 7]  # with padding, a repeated slot, and one past the end
    positions = np.array([0, 9, 49, 3, 4, 5, 17])
    weights = {f"{name}_weight": normal(dim, seed=ord(name)) for name in norms}
    turns = dict(style=style, first=first)
    for dtype in (np.float32, np.float16 if format == "f16" else BF16)[dim != 96 :]:
        qkv = normal(7, 4 * dim + 2 * dim + 2 * dim_v, dtype=dtype)
        parts = parts_of(qkv, 4, dim, dim_v)
        caches = [cache_of(format, dim, **options) for _ in range(3)]
        want = in_turn(parts, caches[0], slots, positions, table, **weights, **turns)
        for given, cache in ((qkv, caches[1]), (parts, caches[2]))[: 2 if format == "bf16" else 1]:
            q = ptxrt.append_qkv(given, cache, slots, positions, table, heads=4, **weights, **turns)
            assert q.dtype == dtype
            np.testing.assert_array_equal(q, want)
            for name, x in contents(cache).items():
                np.testing.assert_array_equal(x, contents(caches[0])[name], err_msg=name)
    assert contents(caches[0])["k"].any()
    if format not in ("bf16", "nvfp4"):
        return
    cache = caches[1]  # no slot remains claimed
    ptxrt.append_qkv(qkv[::-1], cache, slots, positions, table, heads=4, **weights, **turns)
    in_turn([x[::-1] for x in parts], caches[0], slots, positions, table, **weights, **turns)
    for name, x in contents(cache).items():
        np.testing.assert_array_equal(x, contents(caches[0])[name], err_msg=name)


@pytest.mark.parametrize("style", ["halves", "pairs"])
@pytest.mark.parametrize("format", ["bf16", "mxfp8"])
def test_positions_outside_the_table(text_machine, format, style):
    """Positions on a device are not checked: queries and keys become NaN there, as by `rope`; values do not."""
    qkv, table = normal(3, 8 * 64, dtype=BF16), ptxrt.to_device(ptxrt.rope_table(64, 5))
    positions = ptxrt.to_device(np.array([5, 4, -1], np.int32))
    slots, caches = ptxrt.to_device(np.array([2, 1, 5], np.int64)), [cache_of(format, 64) for _ in range(2)]
    parts = [ptxrt.to_device(np.ascontiguousarray(part)) for part in parts_of(qkv, 4, 64, 64)]
    want = in_turn(parts, caches[0], slots, positions, table, style=style)
    q = ptxrt.append_qkv(ptxrt.to_device(qkv), caches[1], slots, positions, table, heads=4, style=style)
    np.testing.assert_array_equal(q.to_numpy().view(np.uint16), want.to_numpy().view(np.uint16))
    assert np.isnan(q.to_numpy().astype(np.float32))[[0, 2]].all()
    for name, x in contents(caches[0]).items():
        np.testing.assert_array_equal(contents(caches[1])[name], x)


@pytest.mark.parametrize("format_v", [None, "nvfp4"])
@pytest.mark.parametrize("q_format", ["mxfp8", "mxfp4", "nvfp4"])
def test_queries_as_an_operand(text_machine, q_format, format_v):
    table = ptxrt.rope_table(64, 50)
    cases = [(64, None), (80, 0.01)] if format_v is None else [(64, 0.01)]
    for dim, level in cases[1:] if q_format == "mxfp4" and len(cases) > 1 else cases:
        qkv = normal(5, 8 * dim, dtype=BF16)
        parts = parts_of(qkv, 4, dim, dim)
        cache, other = (cache_of("bf16", dim, format_v=format_v) for _ in range(2))
        options = dict(q_global=level) if q_format == "nvfp4" and level else {}
        got = ptxrt.append_qkv(qkv, cache, np.arange(5), np.arange(5), table, heads=4, q_format=q_format, **options)
        want = in_turn(parts, other, np.arange(5), np.arange(5), table)
        scales = dict(global_scale=level or 1.0) if q_format == "nvfp4" else {}
        want = ptxrt.quantize_operand(want.transpose(1, 0, 2)[None], q_format, role="q", **scales)
        assert got.shape == want.shape == (1, 4, 5, dim) and got.role == "q"
        np.testing.assert_array_equal(got.codes, want.codes)
        np.testing.assert_array_equal(got.scales, want.scales)
        for name, x in contents(cache).items():
            np.testing.assert_array_equal(x, contents(other)[name], err_msg=name)


def test_many_heads_and_one_token(text_machine):
    """More rows than a block has lanes for; a single token takes one launch."""
    table, qkv = ptxrt.rope_table(128, 9), normal(1, 84 * 128, dtype=BF16)
    cache, other = cache_of("nvfp4", 128), cache_of("nvfp4", 128)
    weights = dict(q_weight=normal(128), k_weight=normal(128, seed=1))
    q = ptxrt.append_qkv(qkv, cache, [5], [8], table, heads=80, **weights)
    np.testing.assert_array_equal(q, in_turn(parts_of(qkv, 80, 128, 128), other, [5], [8], table, **weights))
    for name, x in contents(cache).items():
        np.testing.assert_array_equal(x, contents(other)[name], err_msg=name)
    arrays = (ptxrt.to_device(x) for x in (qkv, np.array([5]), np.array([8], np.int32), table))
    qkv, slots, positions, table = arrays
    ptxrt.append_qkv(qkv, cache, slots, positions, table, heads=80)
    last = ptxrt.last_launches()[-2:]
    assert "append_qkv" in str(last[1]) and "claim" not in str(last[0])


@pytest.mark.parametrize("format_v", [None, "mxfp8"])
def test_in_a_graph_with_other_tokens(text_machine, format_v):
    table = ptxrt.to_device(ptxrt.rope_table(32, 50))
    cache, other = (cache_of("mxfp4", 32, format_v=format_v) for _ in range(2))
    qkv = ptxrt.to_device(normal(3, 8 * 32, dtype=BF16))
    slots, positions = ptxrt.to_device(np.array([0, 1, 2])), ptxrt.to_device(np.array([0, 1, 2], np.int32))
    with ptxrt.graph() as graph:
        q = ptxrt.append_qkv(qkv, cache, slots, positions, table, heads=4)
    for seed, where, at in ((1, [4, 4, -1], [7, 8, 49]), (2, [0, 11, 5], [1, 0, 3])):
        new = normal(3, 8 * 32, dtype=BF16, seed=seed)
        qkv[...], slots[...], positions[...] = new, np.array(where), np.array(at, np.int32)
        graph.launch()
        want = in_turn(parts_of(new, 4, 32, 32), other, where, at, table.to_numpy())
        np.testing.assert_array_equal(q.to_numpy(), want)
        for name, x in contents(cache).items():
            np.testing.assert_array_equal(x, contents(other)[name], err_msg=name)
    positions[...] = np.array([49, 50, -1], np.int32)  # the table ends at 49
    graph.launch()
    assert np.isnan(q.to_numpy().astype(np.float32)).any(axis=(1, 2)).tolist() == [False, True, True]


@pytest.mark.parametrize("format_v", [None, "mxfp8"])
def test_no_tokens(text_machine, format_v):
    cache, table, none = cache_of("bf16", 32, format_v=format_v), ptxrt.rope_table(32, 5), np.zeros(0, np.int64)
    for numbers in (none, []):
        q = ptxrt.append_qkv(np.zeros((0, 256), BF16), cache, numbers, numbers, table, heads=4)
        assert q.shape == (0, 4, 32)
    q = ptxrt.append_qkv(np.zeros((0, 256), BF16), cache, none, none, table, heads=4, q_format="mxfp8")
    assert q.shape == (1, 4, 0, 32)


def wrong(words, **change):
    return pytest.param(words, change, id=words)


@pytest.mark.parametrize(
    "words, change",
    [
        wrong("cache is a dict", cache={}),
        wrong("heads is 3", heads=3),
        wrong("heads is True", heads=True),
        wrong("qkv is .*have .tokens, 256", qkv=normal(3, 255)),
        wrong("qkv has 2 parts", qkv=(normal(3, 4, 32), normal(3, 2, 32))),
        wrong("k has shape", qkv=(normal(3, 4, 32), normal(3, 4, 32), normal(3, 2, 32))),
        wrong("v is float16", qkv=(normal(3, 4, 32), normal(3, 2, 32), normal(3, 2, 32, dtype=np.float16))),
        wrong("slots is", slots=[0, 1]),
        wrong("slots is", slots=[0.0, 1.0, 2.0]),
        wrong("positions go", positions=[0, 1, 9]),
        wrong("positions have shape", positions=[0, 1]),
        wrong("q_weight is", q_weight=np.ones(31)),
        wrong("eps is -1", eps=-1),
        wrong("q_format is 'mxfp6", q_format="mxfp6_e3m2"),
        wrong("q_global is 0; pass one positive number", q_format="nvfp4", q_global=0),
        wrong("q_global is 2.0; it belongs to q_format='nvfp4'", q_global=2.0),
        wrong("q_global is on the device, qkv is", q_format="nvfp4", q_global="device"),
        wrong("first is 1", first=1),
        wrong("style is 'x'", style="x"),
    ],
)
def test_wrong_calls(words, change):
    with ptxrt.using("emulator"):
        call = (
            dict(
                qkv=normal(3, 256),
                cache=cache_of("bf16", 32),
                slots=[0, 1, 2],
                positions=[0, 1, 2],
                table=ptxrt.rope_table(32, 9),
                heads=4,
            )
            | change
        )
        if call.get("q_global") == "device":
            call["q_global"] = ptxrt.to_device(np.float32(1))
        with pytest.raises(ArgumentError, match=words):
            ptxrt.append_qkv(**call)


@pytest.mark.parametrize("format", ["bf16", "nvfp4"])
def test_blocks_of_many_tokens(emulator, monkeypatch, format):
    """On a machine with room for many blocks a block has several rounds of rows; here it has room for two."""
    tokens, heads, dim = 70, 4, 128
    qkv, table = normal(tokens, (heads + 4) * dim, dtype=BF16), ptxrt.rope_table(dim, tokens)
    rng = np.random.default_rng(5)
    slots, positions = rng.integers(-1, 40, tokens), rng.permutation(tokens).astype(np.int32)
    weight = normal(dim, seed=1)
    options = dict(q_weight=weight, k_weight=weight)
    caches = [ptxrt.KVCache(10, 4, 2, dim, format=format) for _ in range(2)]
    for cache in caches:
        for x in cache.arrays.values():
            if x is not None:
                x[...] = 0
    want = in_turn(parts_of(qkv, heads, dim, dim), caches[0], slots, positions, table, **options)
    monkeypatch.setattr("ptxrt.ops.append_qkv_kernel.MANY_BLOCKS", 1)
    got = ptxrt.append_qkv(qkv, caches[1], slots, positions, table, heads=heads, **options)
    assert ptxrt.last_launches()[-1].grid[0] == 2
    np.testing.assert_array_equal(got.view(np.uint16), want.view(np.uint16))
    for name, x in contents(caches[0]).items():
        np.testing.assert_array_equal(contents(caches[1])[name], x)
