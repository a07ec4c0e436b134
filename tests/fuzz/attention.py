"""Calls of `attention`: every pair of formats with every option, on arrays, operands and device arrays, with NaN and
infinities anywhere."""

from __future__ import annotations

import random

import numpy as np

import ptxrt
from ptxrt.blocks import BLOCK_FORMATS
from ptxrt.ops.attention_kernels import in_mxfp4

from . import exact
from .engine import Kind

PAIRS = [
    *(("bf16", "bf16"), ("f16", "f16"), ("mxfp8", "mxfp8"), ("mxfp4", "mxfp4"), ("nvfp4", "nvfp4")),
    *(("nvfp4", "mxfp8"), ("mxfp4", "mxfp8"), ("nvfp4", "bf16"), ("mxfp4", "bf16"), ("mxfp8", "bf16")),
]
IN_KERNEL = ("mxfp4", "bf16", "in_kernel")
SPOILS = ["np.nan", "np.nan", "np.inf", "-np.inf", "3e38", "-3e38", "1e-40", "65504", "0.0"]
# Code that makes a right call wrong.
WRONG = [
    "call['scale'] = float('nan')",
    "call['scale'] = 'fast'",
    "call['scale'] = np.ones(2)",
    "call['softcap'] = -1.0",
    "call['softcap'] = float('inf')",
    "call['causal'] = 'yes'",
    "call['window'] = (-1, 3)",
    "call['window'] = (1.5, 3)",
    "call['window'] = 7",
    "call['qk'] = 'nvfp5'",
    "call['pv'] = 'int8'",
    "call['pv'] = ['bf16']",
    "call['quantize'] = 'later'",
    "call['layout'] = 'sbhd'",
    "call['out_dtype'] = np.float64",
    "call['out_dtype'] = 'nothing'",
    "call['out'] = [1, 2]",
    "call['return_lse'] = 'lse'",
    "call['normalize'] = None",
    "call['smooth_k'] = 'sometimes'",
    "call['smooth_q'] = 2",
    "call['key_lengths'] = [k.shape[2] + 10**6] * q.shape[0]",
    "call['key_lengths'] = [1.5] * q.shape[0]",
    "call['key_lengths'] = [-1] * q.shape[0]",
    "call['cu_seqlens_q'] = [0, 3, 2]",
    "call['cu_seqlens_k'] = [5, 4]",
    "call['mask'] = np.zeros((3, 5, 7, 11, 13), bool)",
    "call['mask'] = 'causal'",
    "call['mask'] = np.zeros((1, 1, 1, 1), complex)",
    "call['sinks'] = np.zeros(q.shape[1] * q.shape[2] + 2, np.float32)",
    "call['sinks'] = 'none'",
    "call['stream'] = 'default'",
    "q = q.tolist() if isinstance(q, np.ndarray) and q.size > 10**6 else None",
    "q = q[..., :0] if isinstance(q, np.ndarray) else 3",
    "k = 'keys'",
    "v = v.shape",
    "q = np.asarray(q).astype(np.complex64) if isinstance(q, np.ndarray) else object()",
    "k = np.zeros((1, 2, 3), np.float32)",
    "v = np.zeros((7, 1, 3, 8), np.float32)",
    "call['out'] = np.zeros((1, 2, 3, 4), np.int32)",
]
ODD = [
    "None",
    "True",
    "0",
    "-1",
    "2**70",
    "1.5",
    "np.nan",
    "'text'",
    "b'b'",
    "()",
    "[]",
    "{}",
    "[1, [2]]",
    "object()",
    "type",
    "1j",
    "range(3)",
]
ODD += [
    "np.array(['a'])",
    "np.array([None])",
    "np.float64(2)",
    "np.zeros((2, 2))",
    "np.ma.masked_array([1.0], [True])",
    "np.zeros(0)",
]
OPTIONS = [
    "causal",
    "window",
    "scale",
    "softcap",
    "mask",
    "sinks",
    "key_lengths",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "smooth_k",
    "smooth_q",
]
OPTIONS += ["return_lse", "normalize", "layout", "out_dtype", "out", "stream", "qk", "pv", "quantize"]


def draw(rng: random.Random) -> dict:
    """Draw a recipe of a small call."""
    formats = IN_KERNEL if rng.random() < 0.05 else (*rng.choice(PAIRS), None)
    qk, pv, quantize = formats
    blocks = qk in BLOCK_FORMATS and quantize is None
    dim = rng.choice([64, 64, 32, 24, 16, 8, 1, 33, 64, 96, 128] + [rng.randrange(1, 65), rng.choice([160, 192, 256])])
    recipe = dict(
        seed=rng.randrange(2**32),
        formats=formats,
        heads_kv=rng.choice([1, 1, 2, 3]),
        queries=rng.choice([1, 2, 5, 16, 17, 33, 70]),
    )
    recipe |= dict(keys=rng.choice([1, 2, 31, 32, 33, 63, 64, 65, 100, 130, 200]), dim=dim)
    recipe["dtype"] = rng.choice(["float32", "float32", "float16", "bfloat16"])

    def maybe(chance: float, **values) -> None:
        if rng.random() < chance:
            recipe.update(values)

    maybe(0.3, causal=True)
    maybe(0.3, scale=rng.choice([1.0, 0.01, 0.5, 0.0, -0.3, 3.0]))
    maybe(0.3, out_dtype=rng.choice(["float32", "bfloat16"]))
    maybe(0.4, return_lse=True)
    maybe(0.3, device=True)
    maybe(0.1, sizes=[rng.choice(["q", "k", "v"]), rng.choice([-120, -80, -60, -30, -10, 3, 10])])
    maybe(0.4, group=rng.choice([1, 2, 3, 4]))
    maybe(0.3, dim_v=rng.choice([8, 40, 64, rng.randrange(1, 65)]))
    maybe(0.25, window=(rng.choice([None, 0, 3, 40, 300]), rng.choice([None, 0, 3, 40])))
    maybe(0.25, softcap=rng.choice([0.5, 2.0, 30.0]))
    maybe(0.35, mask=rng.choice(["bool", "float", "steep", "float16"]), mask_axes=rng.randrange(16))
    maybe(0.25, sinks=rng.choice(["float32", "float16", "list"]))
    maybe(0.2, layout="bshd")
    maybe(0.3, smooth_k=rng.choice([True, False]) if blocks else "auto")
    if "out_dtype" not in recipe:
        maybe(0.2, out_dtype="float16")
    if rng.random() < 0.15:
        recipe["cuts"] = sorted((rng.random(), rng.random()) for _ in range(rng.randrange(0, 3)))
    else:
        maybe(0.3, batch=rng.choice([2, 3]))
        maybe(0.25, key_lengths=[rng.random() for _ in range(3)])
    if blocks:
        maybe(0.25, smooth_q=True)
        maybe(0.3, operands=rng.choice(["q", "k", "v", "kv", "qkv"]))
    if "return_lse" not in recipe and recipe.get("out_dtype", "float32") == "float32":
        maybe(0.15, normalize=False)
    maybe(0.4, usual=True)
    if recipe.get("normalize", True) and rng.random() < 0.15:
        recipe["out"] = True
    for _ in range(rng.choice([0, 0, 0, 1, 1, 2])):
        recipe.setdefault("spoils", []).append(
            [rng.choice(["q", "k", "v", "mask", "sinks"]), rng.randrange(10**6), rng.choice(SPOILS)]
        )
    kind = rng.random()
    if kind < 0.2:
        recipe["wrong"] = rng.choice(WRONG)
    elif kind < 0.3:
        recipe["odd"] = (
            f"call[{rng.choice(OPTIONS)!r}] = {rng.choice(ODD)}"
            if rng.random() < 0.7
            else f"{rng.choice('qkv')} = {rng.choice(ODD)}"
        )
    return recipe


def program(recipe: dict) -> str:
    """The call as code."""
    at = recipe.get
    qk, pv, quantize = recipe["formats"]
    batch = 1 if "cuts" in recipe else at("batch", 1)
    heads = recipe["heads_kv"] * at("group", 1)
    dim_v = at("dim_v", recipe["dim"])
    shapes = dict(
        q=(batch, heads, recipe["queries"], recipe["dim"]),
        k=(batch, recipe["heads_kv"], recipe["keys"], recipe["dim"]),
        v=(batch, recipe["heads_kv"], recipe["keys"], dim_v),
    )
    dtype = "ml_dtypes.bfloat16" if recipe["dtype"] == "bfloat16" else f"np.{recipe['dtype']}"
    lines = [f"rng = np.random.default_rng({recipe['seed']})"]
    for name, shape in shapes.items():
        size, power = at("sizes", (None, 0))
        factor = f" * np.float32(2.0**{power})" if size == name else ""
        lines.append(f"{name} = (rng.standard_normal({shape}, dtype=np.float32){factor}).astype({dtype})")
    call = dict(qk=qk, pv=pv)
    if at("usual") and qk == pv == ("f16" if recipe["dtype"] == "float16" else "bf16"):
        call = {}  # rely on the defaults
    if quantize:
        call["quantize"] = quantize
    names = (
        "causal",
        "scale",
        "window",
        "softcap",
        "layout",
        "smooth_k",
        "smooth_q",
        "return_lse",
        "normalize",
        "out_dtype",
    )
    call |= {name: recipe[name] for name in names if name in recipe}
    if at("layout") == "bshd":
        lines.append("q, k, v = (np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in (q, k, v))")
    lines.append(f"call = {call!r}")
    if "mask" in recipe:
        whole = (batch, heads, recipe["queries"], recipe["keys"])
        shape = tuple(size if at("mask_axes", 15) >> axis & 1 else 1 for axis, size in enumerate(whole))
        made = {
            "bool": f"rng.random({shape}) < 0.7",
            "float": f"rng.standard_normal({shape}, dtype=np.float32)",
            "float16": f"rng.standard_normal({shape}).astype(np.float16)",
            "steep": f"rng.choice(np.float32([0, 0, -1e4, -1e9, -3e38, -np.inf]), {shape})",
        }
        lines.append(f"call['mask'] = {made[recipe['mask']]}")
    if "sinks" in recipe:
        made = f"rng.standard_normal({heads}, dtype=np.float32)"
        kind = recipe["sinks"]
        lines.append(
            f"call['sinks'] = {made}"
            + (".astype(np.float16)" if kind == "float16" else ".tolist()" if kind == "list" else "")
        )
    if "cuts" in recipe:
        for name, i, size in (("cu_seqlens_q", 0, recipe["queries"]), ("cu_seqlens_k", 1, recipe["keys"])):
            lines.append(f"call[{name!r}] = {[0, *sorted(int(cut[i] * size) for cut in recipe['cuts']), size]}")
    elif "key_lengths" in recipe:
        lengths = [int(share * (recipe["keys"] + 1)) for share in recipe["key_lengths"]]
        lines.append(f"call['key_lengths'] = {(lengths * 3)[:batch]}")
    for name, place, value in at("spoils", ()):
        target = name if name in "qkv" else f"call[{name!r}]"
        if name in "qkv" or (name in recipe and recipe[name] not in ("bool", "list")):
            lines.append(f"{target}.flat[{place} % {target}.size] = {value}")
    if at("device"):
        lines.append("q, k, v = map(ptxrt.to_device, (q, k, v))")
    if at("operands"):
        packed = dict(cu_seqlens="call.get('cu_seqlens_k')", key_lengths="call.get('key_lengths')")
        for name in at("operands"):
            more = "".join(f", {option}={value}" for option, value in packed.items() if name != "q")
            if name != "q":
                more += f", dim={_dims(qk, pv, recipe['dim'], dim_v)[name == 'v']}"
            if name == "k":
                more += ", smooth=None if call.get('smooth_k', 'auto') == 'auto' else call['smooth_k']"
            if name == "q" and at("smooth_q"):
                more += ", smooth=True, cu_seqlens=call.get('cu_seqlens_q')"
            format, layout = pv if name == "v" else qk, at("layout", "bhsd")
            lines.append(f"{name} = ptxrt.quantize_operand({name}, {format!r}, role={name!r}, layout={layout!r}{more})")
    if at("out"):
        order = (0, 2, 1, 3) if at("layout") == "bshd" else (0, 1, 2, 3)
        shape = tuple((batch, heads, recipe["queries"], dim_v)[i] for i in order)
        kind = at("out_dtype", "bfloat16")
        lines.append(f"out = np.full({shape}, 7, {'ml_dtypes.bfloat16' if kind == 'bfloat16' else f'np.{kind}'})")
        lines.append("kept = dict(out=out.copy())")
        lines.append("call['out'] = " + ("out = ptxrt.to_device(out)" if at("device") else "out"))
    lines += [recipe[name] for name in ("wrong", "odd") if name in recipe]
    if "odd" in recipe:
        lines.append("odd = True")
    return "\n".join([*lines, "result = ptxrt.attention(q, k, v, **call)"])


def _dims(qk: str, pv: str, dim: int, dim_v: int) -> tuple[int, int]:
    """The smallest compiled (D, Dv) with D >= dim and Dv >= dim_v."""
    wide = "fp4" in qk or "fp4" in pv  # tiles of 4-bit codes have a multiple of 64 columns
    there = [(n, n) for n in ((64, 128, 192, 256) if wide else (32, 64, 96, 128, 192, 256))] + [(192, 128)]
    return min((pair for pair in there if pair[0] >= dim and pair[1] >= dim_v), key=lambda pair: pair[0] * pair[1])


def check(names: dict) -> None:
    """Check that the results of a call are within the bounds of `exact`."""
    if names.get("odd"):
        return
    call, arrays = names["call"], [names[name] for name in "qkv"]
    result = names["result"]
    result = result if isinstance(result, tuple) else (result,)
    on_device = any(isinstance(x, ptxrt.DeviceArray) or getattr(x, "on_device", False) for x in arrays)
    assert all(isinstance(x, ptxrt.DeviceArray) == on_device for x in result), "results lie on the other side"
    result = [x.to_numpy() if on_device else x for x in result]
    turned = call.get("layout") == "bshd"
    expected = reference(arrays, call, out_dtype=str(result[0].dtype) if call.get("normalize", True) else "float32")
    out = result[0].transpose(0, 2, 1, 3) if turned else result[0]
    if call.get("normalize", True):
        exact.compare(expected, out, result[1] if call.get("return_lse") else None, str(out.dtype))
        return
    row_max, row_sum = (np.float64(x) for x in result[1:])
    with np.errstate(all="ignore"):
        empty = np.isneginf(expected.lse) & ~expected.nan
        assert (row_sum[empty & ~expected.either] == 0).all(), "rows without keys have a sum"
        divided = np.where(empty[..., None], 0.0, np.float64(out) / np.where(row_sum == 0, 1.0, row_sum)[..., None])
        whole = np.isfinite(row_max) & ~expected.either & ~expected.nan
    assert (row_max[whole] == np.rint(row_max[whole])).all(), "row_max is no whole number"
    exact.compare(expected, divided)


def reference(arrays, call: dict, out_dtype: str) -> exact.Exact:
    """The expected result of a call, in float64."""
    usual = "f16" if all(getattr(x, "dtype", None) == np.float16 for x in arrays) else "bf16"
    qk, pv, quantize = call.get("qk", usual), call.get("pv", usual), call.get("quantize")
    turned = call.get("layout") == "bshd"
    q, k, v = (x if isinstance(x, ptxrt.Operand) else _host(x, turned) for x in arrays)
    batch, heads, queries, dim = q.shape
    keys, group = k.shape[2], heads // k.shape[1]
    scale = dim**-0.5 if call.get("scale") is None else call["scale"]
    cu_q, cu_k, lengths = (call.get(name) for name in ("cu_seqlens_q", "cu_seqlens_k", "key_lengths"))
    in_blocks = qk in BLOCK_FORMATS and quantize is None
    shift = np.zeros(q.shape[:3])
    with np.errstate(all="ignore"):
        if in_blocks:
            scores, sizes, reach, v, shift = _block_scores(q, k, v, call, scale)
        else:
            if quantize:
                q, k = in_mxfp4(q), in_mxfp4(k)
            else:
                q, k = (x.astype(_dtype(qk)) for x in (q, k))
            v = v.astype(_dtype(pv))
            scores, sizes, reach = _products(q, k, group, scale)
    shown = np.zeros((batch, heads, queries, keys), bool)
    spans = []
    for i, rows, columns in _sequences(batch, queries, keys, cu_q, cu_k, lengths):
        spans.append((i, columns.start, columns.stop))
        shown[i, :, rows, columns] = _window(rows.stop - rows.start, columns.stop - columns.start, call)
    mask = call.get("mask")
    return exact.attention(
        *(scores, sizes, reach, np.repeat(np.float64(v), group, axis=1)),
        **dict(
            pv=pv,
            out_dtype=out_dtype,
            softcap=call.get("softcap", 0.0),
            mask=None if mask is None else np.asarray(mask),
        ),
        **dict(sinks=call.get("sinks"), shown=shown, spans=spans, shift=shift),
    )


def _host(x, turned: bool) -> np.ndarray:
    x = x.to_numpy() if isinstance(x, ptxrt.DeviceArray) else x
    return x.transpose(0, 2, 1, 3) if turned else x


def _dtype(format: str):
    return ptxrt.formats.bf16.dtype if format == "bf16" else np.float16


def _products(q, k, group: int, scale: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scaled scores [B, H, Sq, Sk], the sums of the magnitudes of their terms, and these sums before scaling."""
    q, k = np.float64(q), np.repeat(np.float64(k), group, axis=1).swapaxes(-1, -2)
    reach = np.abs(q) @ np.abs(k)
    return q @ k * scale, reach * abs(scale), reach


def _block_scores(q, k, v, call: dict, scale: float):
    """Scores as kernels on operands compute them: the mean of the keys is multiplied with unquantized queries if the
    call has these."""
    ends = dict(cu_seqlens=call.get("cu_seqlens_k"), key_lengths=call.get("key_lengths"))
    smooth_k = call.get("smooth_k", "auto")
    given = q
    if not isinstance(q, ptxrt.Operand):
        cu = dict(cu_seqlens=call.get("cu_seqlens_q")) if call.get("smooth_q") else {}
        q = ptxrt.quantize_operand(q, call["qk"], role="q", smooth=bool(call.get("smooth_q")), **cu)
    if not isinstance(k, ptxrt.Operand):
        k = ptxrt.quantize_operand(
            k, call["qk"], role="k", smooth=None if isinstance(smooth_k, str) else smooth_k, **ends
        )
    if not isinstance(v, ptxrt.Operand):
        v = ptxrt.quantize_operand(v, call["pv"], role="v", **ends)
    q, k, v = (x.to_numpy() for x in (q, k, v))
    given = np.asarray(given if not isinstance(given, ptxrt.Operand) else q).astype(np.float32)
    group = q.shape[1] // k.shape[1]
    codes_of_k = _without_mean(k)
    scores, sizes, reach = _products(_without_mean(q), codes_of_k, group, scale)
    levels = [float(np.asarray(x.global_scale)) for x in (q, k) if x.global_scale is not None]
    if len(levels) == 2 and abs(scale) * levels[0] * levels[1] > 2e38:  # their product with log2(e) overflows float32
        reach = np.full_like(reach, np.inf)
    if q.mean is not None:  # the kernel splits means into two bfloat16, exact within 2^-17
        more, their_sizes, their_reach = _products(q.mean_of_rows(), codes_of_k, group, scale)
        scores, sizes, reach = scores + more, sizes + 8 * their_sizes, reach + their_reach
    shift = np.zeros(scores.shape[:-1])
    if k.mean is not None:
        more, their_sizes, their_reach = _products(given, np.float32(k.mean_of_rows()), group, scale)
        scores, sizes, reach = scores + more, sizes + their_sizes, reach + their_reach
        shift = np.abs(more).max(axis=-1, initial=0.0)
    # The magnitudes of smoothed NVFP4 keys count twice, and twice their value must be a float32 number
    # (docs/numerics.md, Operands).
    if call["qk"] == "nvfp4" and any(np.nanmax(np.abs(x), initial=0) > 2.0**120 for x in (given, np.asarray(k))):
        shift = np.full_like(shift, np.inf)
    return scores, sizes, reach, np.asarray(v), shift


def _without_mean(x) -> np.ndarray:
    """The values of codes and scales alone."""
    if x.mean is None:
        return np.asarray(x)
    arrays = {
        name: array
        for name, array in x.arrays.items()
        if name != "mean" and not (x.role == "q" and name == "cu_seqlens")
    }
    return np.asarray(ptxrt.Operand(**arrays, **x.description))


def _sequences(batch: int, queries: int, keys: int, cu_q, cu_k, lengths):
    """(batch, slice of queries, slice of keys) of each sequence."""
    if cu_q is not None:
        yield from (
            (0, slice(*rows), slice(*columns)) for rows, columns in zip(zip(cu_q, cu_q[1:]), zip(cu_k, cu_k[1:]))
        )
        return
    for i in range(batch):
        yield i, slice(0, queries), slice(0, keys if lengths is None else int(lengths[i]))


def _window(queries: int, keys: int, call: dict) -> np.ndarray:
    distance = np.arange(keys) - (np.arange(queries)[:, None] + keys - queries)
    left, right = call.get("window") or (None, None)
    right = 0 if call.get("causal") else right
    shown = np.ones((queries, keys), bool)
    shown &= True if left is None else distance >= -left
    return shown & (True if right is None else distance <= right)


KIND = Kind("attention", draw, program, check, needed=("formats", "heads_kv", "queries", "keys", "dim", "dtype"))
