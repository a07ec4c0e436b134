"""Calls of `matmul` and `matmul_grouped`: against float64 products of the operands' values, element by element."""

from __future__ import annotations

import random
from math import erf, pi, sqrt

import numpy as np

import ptxrt
from ptxrt.blocks import BLOCK_FORMATS
from ptxrt.ops.gemm import PRODUCTS
from ptxrt.ops.operands import operand_rule
from ptxrt.ops.quantize import quantize_reference

from .common import DTYPES, ODD, host_of, maybe, shares, values_of
from .engine import Kind
from .exact import LARGEST, OUTPUTS, _first

PAIRS = [*PRODUCTS]
ROWS = [1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 64, 65, 100, 130]
COLS = [2, 8, 32, 34, 40, 64, 66, 96, 136]
DEPTHS = [32, 64, 96, 160, 288]
LEVELS = ["1", "0.25", "np.float32(0.3)"]
ACTIVATIONS = ["relu", "gelu", "gelu_tanh", "silu", "swiglu"]
SPOILS = ["np.nan", "0.0", "-0.0", "6.0", "448.0", "2.0**-20"]
WRONG = [
    "a = np.zeros((2, 48), np.float32); options['a_format'] = 'bf16'",
    "a = np.zeros((0, 5, 3), np.float32); options.pop('a_format', None)",
    "b = 'weights'",
    "b = np.zeros((4, 32), np.float64)",
    "b = np.zeros(32, np.float32)",
    "options['a_format'] = 'mxfp6'",
    "options['a_format'], options['b_format'] = 'nvfp4', 'mxfp8'",
    "options['alpha'] = np.nan",
    "options['alpha'] = 'one'",
    "options['bias'] = np.zeros(3, np.float32)",
    "options['bias'] = [1.0]",
    "options['activation'] = 'tanh'",
    "options['activation'] = ('swiglu', dict(limit=-1))",
    "options['activation'] = ('swiglu', dict(beta=1))",
    "options['residual'] = np.zeros((3, 5), np.float32)",
    "options['out_format'] = 'bf16'",
    "options['out_format'] = 'nvfp4'; options.pop('out_global_scale', None); options.pop('out', None)",
    "options['out_scale_rule'] = 'nearest'",
    "options['out_dtype'] = np.float64; options.pop('out_format', None)",
    "options['out'] = np.zeros((1, 1), np.float32)",
    "options['stream'] = 'default'",
]
WRONG_MATRIX = [
    "options['splits'] = 2",
    "options['transpose_b'] = 'no'",
    "options['a_norm'] = np.zeros(3, np.float32)",
    "options['a_eps'] = -1.0",
]
WRONG_GROUPED = [
    "starts[-1] += 1",
    "starts[0] = 1",
    "starts = starts[:-1]",
    "starts = np.float32(starts)",
    "starts = None",
    "options['rows'] = np.zeros(3, np.float64)",
    "options['alpha'] = np.zeros(50, np.float32)",
]


def draw(rng: random.Random) -> dict:
    """Draw a recipe of a small product."""
    pair = rng.choice(PAIRS)
    recipe = dict(
        seed=rng.randrange(2**32),
        pair=list(pair),
        rows=rng.choice(ROWS),
        cols=rng.choice(COLS),
        depth=rng.choice(DEPTHS),
    )
    if pair[1] in ("bf16", "f16"):
        maybe(rng, recipe, 0.4, depth=rng.choice([1, 8, 15, 40, 130]))
        maybe(rng, recipe, 0.2, turned=True)
    for name, format in zip("ab", pair):
        recipe[name] = _draw_operand(rng, format)
    grouped = rng.random() < 0.25 and not recipe.get("turned")
    if grouped:
        recipe["cuts"] = sorted(rng.random() for _ in range(rng.choice([0, 1, 2, 5])))
        maybe(rng, recipe, 0.4, gathered=True)
    else:
        maybe(rng, recipe, 0.25, batch=rng.choice([[2, 1], [2, 2], [1, 3], [3, 3]]))
        maybe(rng, recipe, 0.2, splits=1)
    maybe(rng, recipe, 0.3, alpha=rng.choice([-1.5, 0.125, 3.0]))
    maybe(rng, recipe, 0.4, bias=rng.choice([*DTYPES]))
    maybe(rng, recipe, 0.5, activation=rng.choice(ACTIVATIONS))
    maybe(rng, recipe, 0.3, gate=dict(limit=2.0, alpha=1.5, offset=1.0))
    maybe(rng, recipe, 0.4, residual=rng.choice([*DTYPES]))
    if rng.random() < 0.3:
        recipe["out_format"] = rng.choice(["mxfp8", "mxfp4", "nvfp4"])
        maybe(rng, recipe, 0.3, layout="128x4")
        recipe["cols"] = rng.choice([64, 128])
    else:
        maybe(rng, recipe, 0.6, out_dtype=rng.choice([*DTYPES]))
    maybe(rng, recipe, 0.4, device=True)
    if not grouped and "batch" not in recipe and all(recipe[x]["as"] == "array" for x in "ab"):
        maybe(rng, recipe, 0.6, alone=rng.random())
    count = rng.choice([0, 0, 1, 2])
    if count:
        recipe["spoils"] = [[rng.randrange(10**6), rng.choice(SPOILS)] for _ in range(count)]
    maybe(rng, recipe, 0.3, spread=sorted(rng.randrange(-6, 5) for _ in range(2)))
    kind = shares(rng)
    if kind == "wrong":
        recipe["wrong"] = rng.choice(WRONG + 2 * (WRONG_GROUPED if grouped else WRONG_MATRIX))
    elif kind == "odd":
        names = ["alpha", "bias", "activation", "residual", "out_dtype", "out_scale_rule", "a_format", "stream", "out"]
        target = rng.choice(["a", "b", *(f"options[{name!r}]" for name in names)])
        recipe["odd"] = f"{target} = {rng.choice(ODD)}"
    return recipe


def _draw_operand(rng: random.Random, format: str) -> dict:
    if format in ("bf16", "f16"):
        return {"as": "array", "dtype": rng.choice(["float32", "bfloat16" if format == "bf16" else "float16"])}
    operand = {"as": rng.choice(["array", "quantized"]), "dtype": rng.choice([*DTYPES])}
    if format == "nvfp4":
        operand["level"] = rng.choice(LEVELS)
    if operand["as"] == "quantized":
        maybe(rng, operand, 0.4, layout="128x4")
    return operand


def program(recipe: dict) -> str:
    """The calls as code."""
    at = recipe.get
    rows, cols, depth = (recipe[name] for name in ("rows", "cols", "depth"))
    batch_a, batch_b = recipe.get("batch", ((), ()))
    groups = len(recipe["cuts"]) + 1 if "cuts" in recipe else 0
    shapes = {
        "a": (*([batch_a] if at("batch") else []), rows, depth),
        "b": (*([groups] if groups else [batch_b] if at("batch") else []), cols, depth),
    }
    lines = [f"rng, options = np.random.default_rng({recipe['seed']}), {{}}"]
    for name, format in zip("ab", recipe["pair"]):
        operand, shape = recipe[name], shapes[name]
        turned = name == "b" and at("turned")
        lines += values_of(recipe, name, (shape[:-2] + (depth, cols)) if turned else shape, operand["dtype"])
        lines += [f"{name} = ptxrt.to_device({name})"] if at("device") else []
        lines += [f"{name}_level = {operand['level']}"] if "level" in operand else []
        if operand["as"] == "quantized":
            more = "".join(
                [
                    f", scale_rule={operand_rule(format)!r}",
                    f", scale_layout={operand['layout']!r}" if "layout" in operand else "",
                    f", global_scale={name}_level" if "level" in operand else "",
                ]
            )
            lines.append(f"{name} = ptxrt.quantize({name}, {format!r}{more})")
        elif format in BLOCK_FORMATS or operand["dtype"] == "float32":
            lines.append(f"options['{name}_format'] = {format!r}")
            lines += [f"options['{name}_global_scale'] = {name}_level"] if "level" in operand else []
    lines += ["options['transpose_b'] = False"] if at("turned") else []
    gated = at("activation") == "swiglu"
    width, batch = cols // 2 if gated else cols, max(batch_a, batch_b) if at("batch") else None
    of_c = (*([batch] if batch else []), rows, width)
    for name in ("alpha", "splits"):
        lines += [f"options[{name!r}] = {recipe[name]!r}"] if name in recipe else []
    if at("activation"):
        value = ("swiglu", recipe["gate"]) if gated and at("gate") else recipe["activation"]
        lines.append(f"options['activation'] = {value!r}")
    for name, shape in (("bias", (cols,)), ("residual", of_c)):
        if at(name):
            lines += values_of({}, name, shape, recipe[name]) + [f"options[{name!r}] = {name}"]
    if groups:
        cuts = [0, *(int(cut * (rows + 1)) for cut in recipe["cuts"]), rows]
        lines.append(f"starts = np.array({cuts}, np.int32)")
        lines += [f"options['rows'] = rng.integers(0, {rows}, {rows}).astype(np.int32)"] if at("gathered") else []
    call = "ptxrt.matmul_grouped(a, b, starts, **{})" if groups else "ptxrt.matmul(a, b, **{})"
    if at("out_format"):
        lines.append("plain = " + call.format("{**options, 'out_dtype': np.float32}"))
        lines.append(f"options['out_format'] = {recipe['out_format']!r}")
        lines += [f"options['out_scale_layout'] = {recipe['layout']!r}"] if at("layout") else []
        lines += ["options['out_global_scale'] = 0.25"] if recipe["out_format"] == "nvfp4" else []
    elif at("out_dtype"):
        lines.append(f"options['out_dtype'] = {DTYPES[recipe['out_dtype']]}")
    lines += [recipe[name] for name in ("wrong", "odd") if name in recipe]
    lines += ["odd = True"] if "odd" in recipe else []
    lines.append("out = " + call.format("options"))
    if "alone" in recipe and not at("out_format"):
        row = int(recipe["alone"] * rows)
        lines.append(f"row, one = {row}, dict(options)")
        lines += [f"one['residual'] = residual[{row} : {row + 1}]"] if at("residual") else []
        lines.append(f"alone = ptxrt.matmul(a[{row} : {row + 1}], b, **one)")
    return "\n".join(lines)


def check(names: dict) -> None:
    """Check C against float64, quantized C against `quantize` of C in float32, and a row against that row alone."""
    if names.get("odd"):
        return
    options, out = names["options"], names["out"]
    on_device = any(isinstance(getattr(x, "codes", x), ptxrt.DeviceArray) for x in (names["a"], names["b"]))
    arrays = (out.codes, out.scales) if isinstance(out, ptxrt.QuantizedArray) else (out,)
    assert all(isinstance(x, ptxrt.DeviceArray) == on_device for x in arrays), "C lies on the other side"
    if isinstance(out, ptxrt.QuantizedArray):
        plain = host_of(names["plain"])
        got, level = out.to_numpy() if on_device else out, options.get("out_global_scale")
        rule = operand_rule(options["out_format"])
        want = quantize_reference(
            plain,
            options["out_format"],
            scale_rule=rule,
            scale_layout=options.get("out_scale_layout", "linear"),
            global_scale=level,
        )
        assert np.array_equal(got.codes, want.codes), "codes are not those of the product in float32"
        assert np.array_equal(got.scales, want.scales), "scales are not those of the product in float32"
        out = names["plain"]
    got = host_of(out)
    _compare(names, got)
    if "alone" in names:
        one = host_of(names["alone"])[0]
        if got.shape[0] <= 64 or options.get("splits") == 1:  # calls of more rows do not cut K
            assert one.tobytes() == got[names["row"]].tobytes(), "a row alone has other bits"


def _values(names: dict, name: str) -> np.ndarray:
    """The values that an operand stands for, float64 [.., rows, K]."""
    x, options = names[name], names["options"]
    format = options.get(f"{name}_format")
    if isinstance(x, ptxrt.QuantizedArray):
        return np.float64(host_of(ptxrt.dequantize(x)))
    host = host_of(x)
    if name == "b" and options.get("transpose_b") is False:
        host = host.swapaxes(-1, -2)
    if format in BLOCK_FORMATS:
        level = options.get(f"{name}_global_scale")
        quantized = quantize_reference(
            np.ascontiguousarray(host),
            format,
            scale_rule=operand_rule(format),
            global_scale=level,
        )
        return np.float64(np.asarray(ptxrt.dequantize(quantized)))
    return np.float64(host if format is None else host.astype(ptxrt.formats.FORMATS[format].dtype))


def _compare(names: dict, got: np.ndarray) -> None:
    a, b, options = _values(names, "a"), _values(names, "b"), names["options"]
    with np.errstate(all="ignore"):
        nan_a, nan_b = np.isnan(a).any(axis=-1), np.isnan(b).any(axis=-1)
        a, b = np.nan_to_num(a), np.nan_to_num(b)
        if "starts" in names:
            order = options.get("rows")
            if order is not None:
                a, nan_a = a[order], nan_a[order]
            group = np.searchsorted(names["starts"], np.arange(len(a)), side="right") - 1
            sums, sizes = (np.einsum("tk,tnk->tn", x, y[group]) for x, y in ((a, b), (abs(a), abs(b))))
            nan = nan_a[:, None] | nan_b[group]
        else:
            sums, sizes = a @ b.swapaxes(-1, -2), abs(a) @ abs(b).swapaxes(-1, -2)
            nan = nan_a[..., :, None] | nan_b[..., None, :]
        alpha = options.get("alpha", 1.0)
        bound = abs(alpha) * sizes * (a.shape[-1] / 8 + 8) * 2.0**-22
        y = alpha * sums
        if options.get("bias") is not None:
            y = y + np.float64(options["bias"])
            bound = bound + abs(y) * 2.0**-23
        y, bound, nan = _activated(y, bound, nan, options.get("activation"))
        if options.get("residual") is not None:
            residual = np.float64(host_of(options["residual"]))
            y = y + residual
            bound = bound + (abs(y) + abs(residual)) * 2.0**-23
        dtype = str(got.dtype)
        smallest = {"float16": 2.0**-25, "bfloat16": 1e-38, "float32": 1e-38}[dtype]
        bound = 1.05 * (bound + (abs(y) + bound) * OUTPUTS[dtype]) + smallest
        assert got.shape == y.shape, f"shape {got.shape}, not {y.shape}"
        values = got.astype(np.float64)
        _first("C where an operand is no number", nan & ~np.isnan(values), values, y)
        fine = nan | (abs(values - y) <= bound) | (abs(y) + bound >= LARGEST[dtype])
    _first("C", ~fine, values, y, bound)


def _activated(y, bound, nan, activation):
    """The values behind an activation, their bounds, and where NaN is due."""
    name, gate = activation if isinstance(activation, tuple) else (activation, {})

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    if name is None:
        return y, bound, nan
    if name == "swiglu":
        g, u, of_g, of_u = y[..., 0::2], y[..., 1::2], bound[..., 0::2], bound[..., 1::2]
        scale, offset = gate.get("alpha", 1.0), gate.get("offset", 0.0)
        if "limit" in gate:
            g, u = np.minimum(g, gate["limit"]), np.clip(u, -gate["limit"], gate["limit"])
        gated = g * sigmoid(scale * g)
        value = gated * (u + offset)
        error = 1.2 * of_g * abs(u + offset) + of_u * abs(gated) + 4e-6 * (abs(value) + abs(gated))
        return value, error, nan[..., 0::2] | nan[..., 1::2]
    value = {
        "relu": lambda: np.maximum(y, 0),
        "gelu": lambda: 0.5 * y * (1 + np.vectorize(erf, otypes=[float])(y / sqrt(2))),
        "gelu_tanh": lambda: 0.5 * y * (1 + np.tanh(sqrt(2 / pi) * (y + 0.044715 * y**3))),
        "silu": lambda: y * sigmoid(y),
    }[name]()
    return value, 1.2 * bound + 2e-6 * abs(y), nan


KIND = Kind("products", draw, program, check, needed=("pair", "rows", "cols", "depth", "a", "b"))
