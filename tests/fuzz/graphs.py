"""Graphs of random calls: recorded once, replayed on other contents; each replay must equal the calls themselves."""

from __future__ import annotations

import random

from .common import maybe
from .engine import Kind

FORMATS = ["mxfp4", "mxfp8", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "nvfp4"]
# What a graph cannot record.
WRONG = [
    "with ptxrt.graph() as g: ptxrt.quantize(np.ones((2, 64), np.float32), 'mxfp4')",
    "with ptxrt.graph() as g: x.to_numpy()",
    "with ptxrt.graph() as g: ptxrt.to_device(np.ones(3))",
    "with ptxrt.graph() as g: ptxrt.quantize(x, 'mxfp9')",
    "with ptxrt.graph() as g: ptxrt.quantize(x, 'mxfp4', stream='own')",
    "with ptxrt.graph() as g: ptxrt.quantize(x, 'mxfp4', stream=ptxrt.Stream())",
    "with ptxrt.graph() as g:\n    with ptxrt.graph() as h: pass",
    "g = ptxrt.graph(); g.launch()",
    "with ptxrt.graph() as g: g.launch()",
    "with ptxrt.graph() as g: pass\nwith g: pass",
    "with ptxrt.graph() as g: ptxrt.attention(np.ones((1, 1, 2, 8), np.float32), x, x)",
]


def draw(rng: random.Random) -> dict:
    """Draw a recipe of a few calls on one array [rows, 64 n]."""
    recipe = dict(
        seed=rng.randrange(2**32),
        rows=rng.choice([1, 3, 8, 17]),
        blocks=rng.choice([1, 2, 3]),
        dtype=rng.choice(["np.float32", "np.float16", "ml_dtypes.bfloat16"]),
    )
    calls = []
    for _ in range(rng.choice([1, 2, 3, 4])):
        calls.append(
            rng.choice(
                [
                    *(f"quantize {format}" for format in FORMATS),
                    "attention bf16",
                    "attention nvfp4",
                    "merge",
                    "operand mxfp8",
                    "operand nvfp4",
                ]
            )
        )
    recipe["calls"] = calls
    recipe["replays"] = rng.choice([1, 2, 3])
    maybe(rng, recipe, 0.4, out=True)
    maybe(rng, recipe, 0.2, stream=True)
    if rng.random() < 0.15:
        recipe["wrong"] = rng.choice(WRONG)
    return recipe


def program(recipe: dict) -> str:
    """The calls as code: `work` computes all results, the graph records it."""
    shape = (recipe["rows"], 64 * recipe["blocks"])
    lines = [
        f"rng = np.random.default_rng({recipe['seed']})",
        f"contents = [rng.standard_normal({shape}).astype({recipe['dtype']}) for _ in range({recipe['replays'] + 1})]",
    ]
    lines += [
        "x = ptxrt.to_device(contents[0])",
        "lses = ptxrt.to_device(np.float32(contents[0][:, 0]))",
        "outs = {}",
        "def work():",
        "    results = {}",
    ]
    for i, call in enumerate(recipe["calls"]):
        lines += [f"    {line}" for line in _lines(i, call, recipe)]
    lines.append("    return results")
    if recipe.get("out"):
        lines += ["outs = work()"]
    lines += [recipe["wrong"]] if "wrong" in recipe else []
    lines += ["with ptxrt.graph() as g:", "    recorded = work()"]
    lines += [
        "from tests.fuzz.graphs import bytes_of",
        "pairs = []",
        "stream = " + ("ptxrt.Stream()" if recipe.get("stream") else "None"),
    ]
    lines += ["for content in contents[1:]:"]
    lines += ["    x[...] = content"]
    lines += ["    g.launch(stream)", "    if stream: stream.synchronize()", "    got = bytes_of(recorded)"]
    lines += ["    outs = {}", "    pairs.append((got, bytes_of(work())))"]
    return "\n".join(lines)


def _lines(i: int, call: str, recipe: dict) -> list[str]:
    rows = recipe["rows"]
    what, _, format = call.partition(" ")
    out, view = f"out=outs.get({i})", f"x.reshape(1, {rows}, {recipe['blocks']}, 64).transpose(0, 2, 1, 3)"
    if what == "quantize":
        return [
            f"results[{i}] = ptxrt.quantize(x, {format!r}, {out})",
            f"results['values of {i}'] = ptxrt.dequantize(results[{i}])",
        ]
    if what == "attention":
        return [f"y = {view}", f"results[{i}] = ptxrt.attention(y, y, y, qk={format!r}, causal=True, {out})"]
    if what == "operand":
        return [f"results[{i}] = ptxrt.quantize_operand({view}, {format!r}, role='k')"]
    return [f"results['merged {i}'], results['lse of {i}'] = ptxrt.merge([x, x], [lses, lses])"]


def bytes_of(results: dict) -> list[bytes]:
    """The bytes of arrays and quantized arrays."""
    found = []
    for result in results.values():
        arrays = result.arrays.values() if hasattr(result, "arrays") else [result]
        found += [a.to_numpy().tobytes() for a in arrays]
    return found


def check(names: dict) -> None:
    """Check that every replay equals the calls."""
    for i, (got, want) in enumerate(names["pairs"]):
        assert len(got) == len(want), f"{len(got)} arrays, not {len(want)}"
        differ = [j for j, (a, b) in enumerate(zip(got, want)) if a != b]
        assert not differ, f"replay {i + 1} differs from the calls in the arrays {differ}"


KIND = Kind("graphs", draw, program, check, needed=("rows", "blocks", "dtype", "replays", "calls"))
