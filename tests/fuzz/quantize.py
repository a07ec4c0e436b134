"""Calls of `quantize` and `dequantize`: every format, rule, axis and layout, on arrays and device arrays, with and
without `out`."""

from __future__ import annotations

import random

import numpy as np

import ptxrt
from ptxrt.ops.quantize import quantize_reference

from .common import DTYPES, ODD, draw_values, maybe, shares, values_of
from .engine import Kind

# Values that share a scale.
FORMATS = {"mxfp4": 32, "mxfp8": 32, "mxfp8_e5m2": 32, "mxfp6_e3m2": 32, "mxfp6_e2m3": 32, "nvfp4": 16}
# (mantissa bits, smallest normal exponent, largest value) of the elements.
ELEMENTS = {
    "mxfp4": (1, 0, 6.0),
    "nvfp4": (1, 0, 6.0),
    "mxfp8": (3, -6, 448.0),
    "mxfp8_e5m2": (2, -14, 57344.0),
    "mxfp6_e3m2": (2, -2, 28.0),
    "mxfp6_e2m3": (3, 0, 7.5),
}
WRONG = [
    "x = x.astype(np.float64) if isinstance(x, np.ndarray) else 'x'",
    "x = np.zeros((4, 64), np.int32)",
    "x = None",
    "x = np.float32(3)",
    "x = ['a']",
    "format = 'mxfp5'",
    "format = None",
    "format = ['mxfp4']",
    "options['axis'] = x.ndim",
    "options['axis'] = -x.ndim - 1",
    "options['axis'] = True",
    "options['axis'] = 0.5",
    "options['scale_rule'] = 'nearest'",
    "options['scale_layout'] = '4x128'",
    "options['pad'] = 2",
    "options['global_scale'] = 0",
    "options['global_scale'] = -1.0",
    "options['global_scale'] = 'one'",
    "options['global_scale'] = np.ones(3)",
    "options['out'] = x",
    "options['out'] = 3",
    "options['stream'] = 'default'",
    "x = np.zeros((3, 37), np.float32); options = dict(axis=-1)",
]


def draw(rng: random.Random) -> dict:
    """Draw a recipe of a small array."""
    format = rng.choice([*FORMATS])
    rank = rng.choice([1, 2, 2, 3, 4])
    shape = [rng.choice([1, 2, 3, 5, 17, 32]) for _ in range(rank)]
    axis = rng.randrange(rank)
    shape[axis] = rng.choice([1, 2, 3, 4, 8]) * FORMATS[format]
    recipe = dict(
        seed=rng.randrange(2**32), format=format, shape=shape, axis=axis - rank if rng.random() < 0.5 else axis
    )
    recipe["dtype"] = rng.choice([*DTYPES])
    if rng.random() < 0.2:
        shape[axis] = rng.randrange(1, 100)
        recipe["pad"] = True
    rules = ["amax", "four_over_six"] if format == "nvfp4" else ["floor", "ceil", "rceil", "even"]
    maybe(rng, recipe, 0.5, scale_rule=rng.choice(rules))
    maybe(rng, recipe, 0.3, scale_layout=rng.choice(["linear", "128x4"]))
    if format == "nvfp4":
        maybe(rng, recipe, 0.4, global_scale=rng.choice(["1", "0.25", "2.0**-100", "3e5", "np.float32(0.3)"]))
    maybe(rng, recipe, 0.4, device=True)
    maybe(rng, recipe, 0.3, out=True)
    maybe(rng, recipe, 0.4, back=rng.choice([*DTYPES]))
    draw_values(rng, recipe)
    kind = shares(rng)
    if kind == "wrong":
        recipe["wrong"] = rng.choice(WRONG)
    elif kind == "odd":
        names = ["axis", "scale_rule", "scale_layout", "global_scale", "pad", "out", "stream"]
        place = rng.choice(["x", "format", *(f"options[{name!r}]" for name in names)])
        recipe["odd"] = f"{place} = {rng.choice(ODD)}"
    return recipe


def program(recipe: dict) -> str:
    """The calls as code."""
    at, shape = recipe.get, tuple(recipe["shape"])
    lines = [f"rng = np.random.default_rng({recipe['seed']})", *values_of(recipe, "x", shape, recipe["dtype"])]
    options = {name: recipe[name] for name in ("axis", "scale_rule", "scale_layout", "pad") if name in recipe}
    lines += [f"format, options = {recipe['format']!r}, {options!r}"]
    lines += [f"options['global_scale'] = {recipe['global_scale']}"] if "global_scale" in recipe else []
    lines += ["x = ptxrt.to_device(x)"] if at("device") else []
    if at("out"):
        lines.append("options['out'] = ptxrt.quantize(x, format, **options)")
        lines.append("codes, scales = options['out'].codes, options['out'].scales")
        lines.append(
            "kept = {name: a.to_numpy() if hasattr(a, 'to_numpy') else a.copy() for name, a in dict(codes=codes, "
            "scales=scales).items()}"
        )
    lines += [recipe[name] for name in ("wrong", "odd") if name in recipe]
    lines += ["odd = True"] if "odd" in recipe else []
    lines.append("q = ptxrt.quantize(x, format, **options)")
    if at("back"):
        lines.append(f"back = ptxrt.dequantize(q, {DTYPES[recipe['back']]})")
    return "\n".join(lines)


def check(names: dict) -> None:
    """Codes and scales follow the definition, each code is the nearest, and `dequantize` returns the values of codes
    and scales."""
    x, q = names["x"], names["q"]
    options = {name: value for name, value in names["options"].items() if name not in ("out", "stream")}
    if names.get("odd") and (not isinstance(x, (np.ndarray, ptxrt.DeviceArray)) or type(x) is np.ma.MaskedArray):
        return
    assert q.on_device == isinstance(x, ptxrt.DeviceArray), "results lie on the other side"
    if names["options"].get("out") is not None:
        assert q is names["options"]["out"], "out is not what is given back"
    host = x.to_numpy() if q.on_device else x
    want, got = quantize_reference(host, names["format"], **options), q.to_numpy()
    assert got.layout == want.layout, f"{got.layout}, not {want.layout}"
    assert want.global_scale is None or got.global_scale == want.global_scale, (
        f"global scale {got.global_scale}, not {want.global_scale}"
    )
    for name in ("scales", "codes"):
        a, b = (getattr(item, name).view(np.uint8) for item in (got, want))
        assert np.array_equal(a, b), (
            f"{(a != b).sum()} of {a.size} {name} differ, the first at {np.argwhere(a != b)[0].tolist()}"
        )
    values = np.asarray(got).astype(np.float64)
    _are_nearest(host.astype(np.float64), values, got)
    if "back" in names:
        back = names["back"].to_numpy() if q.on_device else names["back"]
        with np.errstate(over="ignore"):
            rounded = np.asarray(got).astype(back.dtype)
        assert back.tobytes() == rounded.tobytes() or _equal(back, rounded), (
            "dequantize gives other values than codes and scales stand for"
        )


def _equal(a, b) -> bool:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return bool(((a == b) & (np.signbit(a) == np.signbit(b)) | (np.isnan(a) & np.isnan(b))).all())


def _are_nearest(x: np.ndarray, values: np.ndarray, q) -> None:
    """Check that no value is further from its number than half a step of its code, unless the code is the largest."""
    axis, block = q.axis, FORMATS[q.format]
    x, values = (np.moveaxis(a, axis, -1) for a in (x, values))
    length = x.shape[-1]
    pad = [(0, 0)] * (x.ndim - 1) + [(0, -length % block)]
    x, values = (np.pad(a, pad).reshape(*a.shape[:-1], -1, block) for a in (x, values))
    scales = np.moveaxis(q.layout.linear_scales(q.scales.view(np.uint8)), axis, -1).astype(np.float64)
    if q.format == "nvfp4":
        mantissa, exponent = scales % 8, (scales // 8) % 16
        scale = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7)) * np.float64(
            q.global_scale
        )
        scale = np.where(scales % 128 == 127, np.nan, scale)
    else:
        scale = np.where(scales == 255, np.nan, 2.0 ** (scales - 127))
    scale = scale[..., None]
    bad = ~np.isfinite(x).all(axis=-1, keepdims=True)
    there = np.arange(x.shape[-2] * block).reshape(-1, block) < length
    assert np.isnan(values[np.broadcast_to(bad & there, values.shape)]).all(), (
        "a block with NaN or an infinity has numbers"
    )
    bits, smallest, largest = ELEMENTS[q.format]
    with np.errstate(all="ignore"):
        ratio = np.abs(x) / scale
        step = 2.0 ** (np.floor(np.log2(np.clip(ratio, 2.0**smallest, largest))) - bits)
        close = np.abs(values - x) <= (0.5 * step * (1 + 2.0**-20)) * scale
        at_end = (ratio >= largest * (1 - 2.0**-20)) & (np.abs(np.abs(values) / scale - largest) <= largest * 2.0**-20)
        tiny = (scale < 2.0**-120) | ~np.isfinite(scale)
        beyond = np.isinf(values) & (np.abs(x) >= 2.0**127)  # codes and scales may exceed float32
    wrong = ~(close | at_end | bad | tiny | beyond)
    assert not wrong.any(), (
        f"{wrong.sum()} of {wrong.size} codes are not the nearest: {x[wrong][0]!r} became {values[wrong][0]!r}"
    )


KIND = Kind("quantize", draw, program, check, needed=("format", "shape", "axis", "dtype", "pad"))
