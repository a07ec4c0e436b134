"""Calls of `KVCache.append` and `attention_paged`: rows against `quantize`, results against attention in float64, and
bits against the same sequences on other pages, in other splits, alone, and one query at a time."""

from __future__ import annotations

import random

import numpy as np

import ptxrt
from ptxrt.blocks import BLOCK_FORMATS
from ptxrt.ops.operands import operand_rule
from ptxrt.ops.quantize import quantize_reference

from . import exact
from .attention import _products, _window
from .common import DTYPES, ODD, host_of, maybe, shares, values_of
from .engine import Kind

FORMATS = ["bf16", "mxfp8", "mxfp4", "nvfp4"]
PAGES = [1, 2, 3, 7, 16, 17, 32, 64]
LENGTHS = [0, 1, 2, 15, 16, 17, 63, 64, 65, 100, 130, 256, 257, 300]
SPOILS = ["np.nan", "0.0", "-0.0", "6.0", "448.0", "1e-30"]
WRONG = [
    "q = q[0]",
    "q = q[..., 1:]",
    "q = np.zeros((len(lengths), heads * 2 + 1, 1, q.shape[-1]), np.float32) if heads > 1 else q.astype(np.int32)",
    "q = q.astype(np.float64)",
    "q = 'queries'",
    "table = np.float32(table)",
    "table = table[0]",
    "table = table[:, :0] if lengths.max(initial=0) else None",
    "lengths = lengths + 10**6",
    "lengths = lengths - 10**6",
    "lengths = np.float32(lengths)",
    "lengths = lengths[:0] if len(lengths) else None",
    "cache = None",
    "options['window'] = (-1, 0)",
    "options['window'] = 3",
    "options['scale'] = np.nan",
    "options['softcap'] = -1.0",
    "options['sinks'] = [0.0] * 99",
    "options['layout'] = 'sbhd'",
    "options['out_dtype'] = np.int8",
    "options['splits'] = 0",
    "options['splits'] = 1.5",
    "options['causal'] = 'yes'",
    "options['cu_seqlens_q'] = [1, 2]",
    "options['stream'] = 'default'",
    "cache.append(k, v[..., :1], slots)",
    "cache.append(k, v, slots[:-1] if len(slots) else None)",
    "cache.append(k.astype(np.float64), v, slots)",
    "cache.append(k, v, np.float32(slots))",
]


def draw(rng: random.Random) -> dict:
    """Draw a recipe of a small cache."""
    format = rng.choice(FORMATS)
    recipe = dict(
        seed=rng.randrange(2**32),
        format=format,
        heads=rng.choice([1, 1, 2, 3]),
        group=rng.choice([1, 1, 2, 3, 4, 5, 8]),
        queries=rng.choice([1, 1, 1, 2, 4, 16, 17, 20]),
        page=rng.choice(PAGES),
        lengths=[rng.choice(LENGTHS) for _ in range(rng.choice([1, 1, 2, 3]))],
        dtype=rng.choice(["float32", "float16", "bfloat16", "bfloat16"]),
    )
    maybe(rng, recipe, 0.2, format_v=rng.choice(FORMATS))
    blocks = format in BLOCK_FORMATS or recipe.get("format_v", format) in BLOCK_FORMATS
    recipe["dim"] = rng.choice([64, 128, 32, 96] if blocks else [64, 128, 8, 40, 96])
    if recipe.get("format_v", format) == format:
        maybe(rng, recipe, 0.1, dim=256, lengths=[rng.choice([17, 65])])
    for name, of in (("k_global", format), ("v_global", recipe.get("format_v", format))):
        if of == "nvfp4":
            maybe(rng, recipe, 0.4, **{name: rng.choice([0.25, 0.03125, 0.3])})
    maybe(rng, recipe, 0.15, mean=True)
    maybe(rng, recipe, 0.3, cuts=sorted(rng.random() for _ in range(rng.choice([1, 2]))))
    maybe(rng, recipe, 0.15, causal=False)
    maybe(rng, recipe, 0.3, window=rng.choice([(0, 0), (7, 0), (100, 0), (20, 5), (None, 0)]))
    maybe(rng, recipe, 0.2, scale=rng.choice([0.05, 0.5, 1e-3]))
    maybe(rng, recipe, 0.15, softcap=rng.choice([5.0, 30.0]))
    maybe(rng, recipe, 0.2, sinks=True)
    maybe(rng, recipe, 0.2, layout="bshd")
    maybe(rng, recipe, 0.5, out_dtype=rng.choice([*DTYPES]))
    maybe(rng, recipe, 0.3, splits=rng.choice([1, 2, 3]))
    maybe(rng, recipe, 0.3, device=True)
    maybe(rng, recipe, 0.4, other=rng.choice(PAGES))
    maybe(rng, recipe, 0.3, alone=True)
    count = rng.choice([0, 0, 0, 1])
    if count:
        recipe["spoils"] = [[rng.randrange(10**6), rng.choice(SPOILS)] for _ in range(count)]
    maybe(rng, recipe, 0.2, spread=sorted(rng.randrange(-4, 3) for _ in range(2)))
    kind = shares(rng)
    if kind == "wrong":
        recipe["wrong"] = rng.choice(WRONG)
    elif kind == "odd":
        names = [
            "window",
            "scale",
            "softcap",
            "sinks",
            "layout",
            "out_dtype",
            "splits",
            "causal",
            "cu_seqlens_q",
            "out",
        ]
        target = rng.choice(["q", "table", "lengths", "cache", *(f"options[{name!r}]" for name in names)])
        recipe["odd"] = f"{target} = {rng.choice(ODD)}"
    return recipe


def _cache(recipe: dict, name: str, page: str, table: str, order: str) -> list[str]:
    """Code of a cache whose tokens are appended in an order."""
    options = [f"format={recipe['format']!r}"]
    options += [f"{x}={recipe[x]!r}" for x in ("format_v", "k_global", "v_global") if x in recipe]
    options += ["k_mean=mean"] if recipe.get("mean") else []
    sizes = f"{table}.size + 1, {page}, heads, {recipe['dim']}"
    lines = [
        f"{name} = ptxrt.KVCache({sizes}, {', '.join(options)})",
        f"slots = ptxrt.slots_of({table}, sequences, positions, {page})",
    ]
    cuts = recipe.get("cuts", [])
    parts = [f"int({cut!r} * len(slots))" for cut in cuts]
    for first, last in zip(["0", *parts], [*parts, "len(slots)"]):
        part = f"{order}[{first} : {last}]"
        lines.append(f"{name}.append(k[{part}], v[{part}], slots[{part}])")
    return lines


def program(recipe: dict) -> str:
    """The calls as code."""
    at = recipe.get
    batch, heads, dim = len(recipe["lengths"]), recipe["heads"], recipe["dim"]
    tokens = sum(recipe["lengths"])
    q_shape = (batch, heads * recipe["group"], recipe["queries"], dim)
    lines = [
        f"rng, options, heads = np.random.default_rng({recipe['seed']}), {{}}, {heads}",
        f"lengths = np.array({recipe['lengths']!r}, np.int32)",
        *values_of(recipe, "k", (tokens, heads, dim), recipe["dtype"]),
        *values_of(recipe, "v", (tokens, heads, dim), recipe["dtype"]),
        *values_of({}, "q", q_shape, recipe["dtype"]),
        "q = q.transpose(0, 2, 1, 3); options['layout'] = 'bshd'" if at("layout") else "",
        f"mean = rng.standard_normal(({heads}, {dim}), dtype=np.float32)" if at("mean") else "",
        f"sequences = np.repeat(np.arange({batch}, dtype=np.int32), lengths)",
        "positions = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])",
        "def pages(page):",
        "    width = max(-(-int(lengths.max()) // page), 1) + 1",
        f"    return rng.permutation({batch} * width).astype(np.int32).reshape({batch}, width)",
        f"table = pages({recipe['page']})",
        *_cache(recipe, "cache", str(recipe["page"]), "table", "np.arange(len(slots))"),
    ]
    for name in ("causal", "window", "scale", "softcap", "splits"):
        lines += [f"options[{name!r}] = {recipe[name]!r}"] if name in recipe else []
    lines += [f"options['sinks'] = rng.standard_normal({q_shape[1]}).astype(np.float32)"] if at("sinks") else []
    lines += [f"options['out_dtype'] = {DTYPES[recipe['out_dtype']]}"] if at("out_dtype") else []
    lines += ["q = ptxrt.to_device(q)"] if at("device") else []
    lines += [recipe[name] for name in ("wrong", "odd") if name in recipe]
    lines += ["odd = True"] if "odd" in recipe else []
    lines.append("out, lse = ptxrt.attention_paged(q, cache, table, lengths, return_lse=True, **options)")
    if "wrong" not in recipe and "odd" not in recipe:
        if at("other"):
            lines += [
                f"moved_table = pages({recipe['other']})",
                *_cache(recipe, "moved", str(recipe["other"]), "moved_table", "np.arange(len(slots))[::-1]"),
                "more = {**options, 'splits': 1 if options.get('splits') != 1 else None}",
                "again = ptxrt.attention_paged(q, moved, moved_table, lengths, return_lse=True, **more)",
            ]
        if at("alone") and not at("layout"):
            lines += [
                f"alone = ptxrt.attention_paged(q[{batch - 1}:], cache, table[{batch - 1}:], lengths[{batch - 1}:], "
                "return_lse=True, **options)",
                "last = ptxrt.attention_paged(q[:, :, -1:], cache, table, lengths, return_lse=True, **options)",
            ]
    return "\n".join(line for line in lines if line)


def check(names: dict) -> None:
    """Check the cache's rows, results against float64, and bits against the same sequences otherwise."""
    if names.get("odd"):
        return
    cache, options, lengths = names["cache"], names["options"], names["lengths"]
    on_device = isinstance(names["q"], ptxrt.DeviceArray)
    assert all(isinstance(names[x], ptxrt.DeviceArray) == on_device for x in ("out", "lse")), "results lie elsewhere"
    out, lse, q = (host_of(names[x]) for x in ("out", "lse", "q"))
    keys, values = cache.read(names["table"], lengths)
    for name, read in (("k", keys), ("v", values)):
        _check_rows(names, name, read)
    for name in ("again", "alone", "last"):
        if name not in names:
            continue
        o, s = (host_of(x) for x in names[name])
        if name == "last" and (q.shape[2] > 16 or not options.get("causal", True)):
            continue
        part = {"again": np.s_[:], "alone": np.s_[-1:], "last": np.s_[:, :, -1:]}[name]
        assert o.tobytes() == np.ascontiguousarray(out[part]).tobytes(), f"{name}: the output has other bits"
        assert s.tobytes() == np.ascontiguousarray(lse[part]).tobytes(), f"{name}: the lse has other bits"
    turned = options.get("layout") == "bshd"
    multiplied = cache.multiplied(q.dtype)
    if turned:
        q, out = q.transpose(0, 2, 1, 3), out.transpose(0, 2, 1, 3)
    batch, heads, queries, dim = q.shape
    group, scale = heads // cache.heads, dim**-0.5 if options.get("scale") is None else options["scale"]
    count = keys.shape[2]
    with np.errstate(all="ignore"):
        rounded = q.astype(multiplied.dtype)
        scores, sizes, reach = _products(rounded, keys, group, scale)
        shift = np.zeros(scores.shape[:-1])
        if "mean" in names:
            of_mean = np.einsum("bhqd,hd->bhq", np.float64(q), np.repeat(np.float64(names["mean"]), group, axis=0))
            exact_q = np.float64(q) - np.float64(rounded)
            more = np.einsum("bhqd,hd->bhq", exact_q, np.repeat(np.float64(names["mean"]), group, axis=0)) * scale
            scores, shift = scores + more[..., None], abs(of_mean * scale)
    shown = np.zeros((batch, heads, queries, count), bool)
    for i, length in enumerate(lengths):
        shown[i, :, :, :length] = _window(queries, int(length), {"causal": True, **options})
    expected = exact.attention(
        *(scores, sizes, reach, np.repeat(np.float64(values), group, axis=1)),
        **dict(pv=multiplied.name, out_dtype=str(out.dtype), softcap=options.get("softcap", 0.0), mask=None),
        **dict(sinks=options.get("sinks"), shown=shown, shift=shift),
        spans=[(i, 0, int(length)) for i, length in enumerate(lengths)],
    )
    exact.compare(expected, out, lse, str(out.dtype))


def _check_rows(names: dict, name: str, read: np.ndarray) -> None:
    """What a cache holds is what `quantize` makes of each row."""
    cache, given = names["cache"], names[name]
    format = cache.format if name == "k" else cache.format_v
    x = np.float32(given)
    with np.errstate(all="ignore"):
        if name == "k" and "mean" in names:
            x = x - names["mean"]
        if format in BLOCK_FORMATS:
            level = getattr(cache, f"{name}_global")
            more = (
                {} if format != "nvfp4" else dict(global_scale=1.0 if level is None else float(host_of(level).flat[0]))
            )
            want = quantize_reference(x, format, scale_rule=operand_rule(format), **more) if x.size else x
            want = np.float32(np.asarray(ptxrt.dequantize(want))) if x.size else x
        else:
            want = np.float32(x.astype(ptxrt.formats.FORMATS[format].dtype))
        if name == "k" and "mean" in names:
            want = want + names["mean"]
    first = 0
    for i, length in enumerate(names["lengths"]):
        got, rows = read[i, :, :length].transpose(1, 0, 2), want[first : first + length]
        first += length
        off = 1e-6 * (abs(rows) + (abs(names["mean"]) if name == "k" and "mean" in names else 0))
        same = (got == rows) | (np.isnan(got) & np.isnan(rows)) | (abs(got - rows) <= off)
        assert same.all(), f"{name} of sequence {i}: {(~same).sum()} of {same.size} values are not those of quantize"


KIND = Kind(
    "pages", draw, program, check, needed=("format", "heads", "group", "queries", "page", "lengths", "dtype", "dim")
)
