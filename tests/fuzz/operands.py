"""Calls of `quantize_operand`, its files and values: against the definition of `quantize` and means in float64."""

from __future__ import annotations

import random
import tempfile

import numpy as np

import ptxrt
from ptxrt.ops.quantize import quantize_reference

from .common import DTYPES, ODD, draw_values, maybe, shares, values_of
from .engine import Kind

FORMATS = ["mxfp8", "mxfp4", "nvfp4"]
RULES = {
    "mxfp8": ["floor", "ceil", "rceil", "even"],
    "mxfp4": ["floor", "ceil", "rceil", "even"],
    "nvfp4": ["amax", "four_over_six"],
    "bf16": [],
}
DEFAULT_RULE = {"mxfp8": "rceil", "mxfp4": "even", "nvfp4": "amax"}
WRONG = [
    "x = x[0]",
    "x = x.tolist() if x.size > 10**6 else 'x'",
    "x = np.zeros((1, 1, 4, 300), np.float32)",
    "x = np.zeros((1, 1, 4, 64), np.float64)",
    "x = np.zeros((1, 1, 4, 0), np.float32)",
    "format = 'mxfp6'",
    "format = 'bf16'; options['role'] = 'k'",
    "format = 7",
    "options['role'] = 'x'",
    "options['role'] = None",
    "options['role'] = 'v'; options['smooth'] = True",
    "options['smooth'] = 'yes'",
    "options['layout'] = 'sbhd'",
    "options['scale_rule'] = 'nearest'",
    "options['global_scale'] = -1",
    "options['key_lengths'] = [1] * 50",
    "options['key_lengths'] = [10**6] * len(x)",
    "options['key_lengths'] = [0.5] * len(x)",
    "options['cu_seqlens'] = [1, 2]",
    "options['cu_seqlens'] = [0, 10**6]",
    "options['cu_seqlens'] = 'all'",
    "options['dim'] = 100",
    "options['dim'] = 1",
    "options['dim'] = '64'",
    "options['stream'] = 'default'",
]


def draw(rng: random.Random) -> dict:
    """Draw a recipe of a small operand."""
    role = rng.choice("qkkvv")
    format = rng.choice(FORMATS + (["bf16"] if role == "v" else []))
    recipe = dict(
        seed=rng.randrange(2**32),
        role=role,
        format=format,
        heads=rng.choice([1, 1, 2, 3]),
        length=rng.choice([1, 2, 31, 33, 64, 65, 100, 130, 200]),
    )
    recipe["dim"] = rng.choice([64, 32, 24, 16, 1, 33, 40, 96, 128, rng.randrange(1, 65), rng.choice([160, 192, 256])])
    recipe["dtype"] = rng.choice([*DTYPES])
    if role != "q":
        if rng.random() < 0.2:
            recipe["cuts"] = sorted(rng.random() for _ in range(rng.randrange(0, 4)))
        else:
            maybe(rng, recipe, 0.3, key_lengths=[rng.random() for _ in range(3)])
    if "cuts" not in recipe:
        maybe(rng, recipe, 0.4, batch=rng.choice([2, 3]))
    if role != "v":
        maybe(rng, recipe, 0.5, smooth=rng.random() < 0.7)
    if RULES[format]:
        maybe(rng, recipe, 0.4, scale_rule=rng.choice(RULES[format]))
    if format == "nvfp4":
        maybe(rng, recipe, 0.3, global_scale=rng.choice(["1", "0.25", "3e5", "np.float32(0.3)"]))
    maybe(rng, recipe, 0.2, layout="bshd")
    maybe(rng, recipe, 0.4, device=True)
    maybe(rng, recipe, 0.3, back=rng.choice([*DTYPES]))
    draw_values(rng, recipe)
    kind = shares(rng)
    if kind == "wrong":
        recipe["wrong"] = rng.choice(WRONG)
        if "scale_rule" in recipe["wrong"] or "global_scale" in recipe["wrong"]:
            recipe["format"] = "nvfp4" if role != "q" else recipe["format"]
    elif kind == "odd":
        names = ["role", "smooth", "layout", "scale_rule", "global_scale", "key_lengths", "cu_seqlens", "dim", "stream"]
        recipe["odd"] = f"{rng.choice(['x', 'format', *(f'options[{name!r}]' for name in names)])} = {rng.choice(ODD)}"
    return recipe


def program(recipe: dict) -> str:
    """The calls as code."""
    at = recipe.get
    batch = 1 if "cuts" in recipe else at("batch", 1)
    shape = (batch, recipe["heads"], recipe["length"], recipe["dim"])
    if at("layout") == "bshd":
        shape = tuple(shape[i] for i in (0, 2, 1, 3))
    lines = [f"rng = np.random.default_rng({recipe['seed']})", *values_of(recipe, "x", shape, recipe["dtype"])]
    options = {name: recipe[name] for name in ("role", "smooth", "layout", "scale_rule") if name in recipe}
    if "cuts" in recipe:
        options["cu_seqlens"] = [0, *(int(cut * recipe["length"]) for cut in sorted(recipe["cuts"])), recipe["length"]]
    elif "key_lengths" in recipe:
        options["key_lengths"] = [int(share * (recipe["length"] + 1)) for share in (recipe["key_lengths"] * 3)[:batch]]
    lines.append(f"format, options = {recipe['format']!r}, {options!r}")
    lines += [f"options['global_scale'] = {recipe['global_scale']}"] if "global_scale" in recipe else []
    lines += ["x = ptxrt.to_device(x)"] if at("device") else []
    lines += [recipe[name] for name in ("wrong", "odd") if name in recipe]
    lines += ["odd = True"] if "odd" in recipe else []
    lines.append("operand = ptxrt.quantize_operand(x, format, **options)")
    lines += [f"back = ptxrt.dequantize(operand, {DTYPES[recipe['back']]})"] if at("back") else []
    return "\n".join(lines)


def check(names: dict) -> None:
    """Check means against float64, values against `quantize` of the differences, and a round trip through a file."""
    if names.get("odd"):
        return
    x, operand, options, format = names["x"], names["operand"], names["options"], names["format"]
    assert operand.on_device == isinstance(x, ptxrt.DeviceArray), "the operand lies on the other side"
    host, got = x.to_numpy() if operand.on_device else x, operand.to_numpy()
    host = host.transpose(0, 2, 1, 3) if options.get("layout") == "bshd" else host
    values, role = np.asarray(got), options["role"]
    assert operand.shape == host.shape and values.shape == host.shape, f"shape {operand.shape}, not {host.shape}"
    spans = [(i, 0, host.shape[2]) for i in range(len(host))]
    if options.get("cu_seqlens"):
        spans = [(0, *ends) for ends in zip(options["cu_seqlens"], options["cu_seqlens"][1:])]
    elif options.get("key_lengths"):
        spans = [(i, 0, length) for i, length in enumerate(options["key_lengths"])]
    with np.errstate(all="ignore"):
        _check_values(host.astype(np.float32), values, got, spans, options, format, role)
        if "back" in names:
            back = names["back"].to_numpy() if operand.on_device else names["back"]
            off = np.abs(np.float64(back) - np.float64(values))
            unit = {"float32": 2.0**-22, "float16": 2.0**-10, "bfloat16": 2.0**-7}[str(back.dtype)]
            largest = {"float16": 65504.0}.get(str(back.dtype), 3.3e38)
            fine = (
                (off <= unit * np.abs(values) + 1e-7)
                | ~np.isfinite(values)
                | (np.abs(values) >= largest)
                | (np.float64(back) == values)
            )
            assert fine.all(), f"dequantize gives {back[~fine][0]!r} where the operand holds {values[~fine][0]!r}"
    _check_file(got)


def _check_values(x, values, got, spans, options, format, role) -> None:
    left = x.copy()
    if got.mean is not None:
        mean = np.float32(got.mean_of_rows())
        left = x - mean
        run = 64 if role == "q" else None
        for i, first, last in spans:
            for start in range(first, last, run or max(last - first, 1)):
                rows = x[i, :, start : min(start + run, last) if run else last].astype(np.float64)
                want = rows.mean(axis=1)
                size = np.abs(rows).mean(axis=1)
                off = np.abs(mean[i, :, start] - want)
                fine = (off <= 1e-6 * size + 1e-37) | ~np.isfinite(want) | (size * rows.shape[1] > 1e38)
                assert fine.all(), f"a mean is {mean[i, :, start][~fine][0]!r}, wanted {want[~fine][0]!r}"
    if format == "bf16":
        want = x.astype(ptxrt.formats.bf16.dtype).astype(np.float32)
        for i, first, last in spans:
            a, b = values[i, :, first:last], want[i, :, first:last]
            assert ((a == b) | (np.isnan(a) & np.isnan(b))).all(), "values in bf16 are not those of x"
        return
    level = {} if got.global_scale is None else dict(global_scale=got.global_scale)
    if format == "nvfp4" and options.get("global_scale") is None and got.mean is None:
        seen = np.concatenate(
            [left[i, :, first:last].reshape(-1) for i, first, last in spans] or [np.zeros(0, np.float32)]
        )
        largest = float(np.abs(seen[np.isfinite(seen)]).max(initial=0))
        if largest > 1e-30 and largest < 1e37:
            want = 2.0 ** np.ceil(np.log2(np.float64(largest) / 448)) / 6
            assert np.isclose(float(got.global_scale), want, rtol=1e-6), (
                f"global scale {float(got.global_scale)!r}, wanted {want!r}"
            )
    rule = options.get("scale_rule") or DEFAULT_RULE[format]
    for i, first, last in spans:
        part = left[i, :, first:last]
        if part.size == 0:
            continue
        want = np.asarray(
            quantize_reference(
                np.ascontiguousarray(part), format, axis=1 if role == "v" else 2, scale_rule=rule, pad=True, **level
            )
        )
        a = values[i, :, first:last]
        if got.mean is not None:
            want = want + np.float32(got.mean_of_rows())[i, :, first:last]
        agrees = (a == want) | (np.isnan(a) & np.isnan(want))
        assert agrees.all(), (
            f"{(~agrees).sum()} of {a.size} values differ from those of quantize: {a[~agrees][0]!r}, not "
            f"{want[~agrees][0]!r}"
        )


def _check_file(got) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/x.npz"
        got.save(path)
        again = ptxrt.Operand.load(path)
    assert repr(again) == repr(got), f"a file gives back {again!r}"
    for name, array in got.arrays.items():
        assert np.array_equal(
            np.asarray(array).view(np.uint8) if name == "codes" else array,
            getattr(again, name),
            equal_nan=name not in ("codes", "scales"),
        ), name


KIND = Kind("operands", draw, program, check, needed=("role", "format", "heads", "length", "dim", "dtype"))
