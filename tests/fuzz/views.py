"""Views of device arrays: chains of slices, transpositions and reshapes, against the same chain on NumPy arrays."""

from __future__ import annotations

import random

import numpy as np

import ptxrt

from .common import ODD, maybe
from .engine import Kind

DTYPES = [
    "np.float32",
    "np.float16",
    "ml_dtypes.bfloat16",
    "np.uint8",
    "np.int32",
    "np.bool_",
    "np.float64",
    "np.int16",
]
WRONG = [
    "x[x.shape[0] if x.ndim else 0, ...]",
    "x[-x.shape[0] - 1 if x.ndim else 0, ...]",
    "x[(0,) * (x.ndim + 1)]",
    "x[..., ...]",
    "x[[0, 1]]",
    "x['a']",
    "x[0.0]",
    "x[::0]",
    "x[np.zeros(x.shape, bool)]",
    "x[np.array([0])]",
    "x.reshape(x.size + 1)",
    "x.reshape(-1, -1)",
    "x.reshape('a')",
    "x.reshape(2.5)",
    "x.transpose(0, 0)",
    "x.transpose(*range(x.ndim + 1))",
    "x.transpose('ab')",
    "x.broadcast_to((3, -1))",
    "x.broadcast_to(x.shape[1:]) if x.ndim else x.broadcast_to('b')",
    "x.broadcast_to('a')",
    "x.view('O')",
    "x.view('nothing')",
    "x.view(None)",
    "ptxrt.empty((-1,), np.float32)",
    "ptxrt.empty((2.5,), np.float32)",
    "ptxrt.empty('a', np.float32)",
    "ptxrt.empty((2**40, 2**40), np.float32)",
    "ptxrt.empty((3,), 'O')",
    "ptxrt.empty((3,), np.float32, device='one')",
    "ptxrt.to_device(np.array([None]))",
    "ptxrt.to_device({})",
    "ptxrt.to_device(None)",
    "ptxrt.to_device([[1.0], [2.0, 3.0]])",
    "ptxrt.to_device(np.ones(3)).to_numpy(stream='default')",
]


def draw(rng: random.Random) -> dict:
    """Draw a recipe of an array and the steps applied to it."""
    recipe = dict(
        shape=[rng.choice([1, 1, 2, 3, 4, 5, 8]) for _ in range(rng.choice([0, 1, 2, 2, 3, 4, 5]))],
        dtype=rng.choice(DTYPES),
    )
    maybe(rng, recipe, 0.1, empty=rng.randrange(5))
    steps = []
    for _ in range(rng.choice([1, 1, 2, 3, 4])):
        steps.append(_step(rng))
    recipe["steps"] = steps
    maybe(
        rng,
        recipe,
        0.3,
        assign=rng.choice(
            ["1", "host[...][..., ::-1].copy() if host.ndim else host", "x.copy()", "ptxrt.zeros(x.shape, x.dtype)"]
        ),
    )
    kind = rng.random()
    if kind < 0.2:
        recipe["wrong"] = f"x = {rng.choice(WRONG)}"
    elif kind < 0.35:
        item = rng.choice(ODD)
        recipe["odd"] = "x = " + rng.choice(
            [
                f"x[{item}]",
                f"x.reshape({item})",
                f"x.transpose({item})",
                f"x.view({item})",
                f"x.broadcast_to({item})",
                f"ptxrt.to_device({item})",
                f"x[0, {item}]",
            ]
        )
    return recipe


def _step(rng: random.Random) -> str:
    """Code of one step; a step that raises in NumPy must raise here, too."""

    def key() -> str:
        kind = rng.random()
        if kind < 0.25:
            return str(rng.randrange(-3, 4))
        if kind < 0.35:
            return "None"
        if kind < 0.45:
            return "..."
        ends = [rng.choice(["", str(rng.randrange(-6, 7))]) for _ in range(2)]
        return ":".join(ends) + rng.choice(["", "", f":{rng.choice([1, 2, 3, -1, -2])}"])

    kind = rng.random()
    if kind < 0.5:
        return f"[{', '.join(key() for _ in range(rng.choice([1, 1, 2, 3])))}]"
    if kind < 0.7:
        order = list(range(rng.choice([2, 3, 4])))
        rng.shuffle(order)
        return rng.choice([".transpose()", f".transpose({', '.join(map(str, order))})", ".T"])
    if kind < 0.9:
        return f".reshape({', '.join(str(rng.choice([-1, 1, 2, 3, 4, 6, 8])) for _ in range(rng.choice([1, 2, 3])))})"
    if kind < 0.93:
        return ".copy()"
    if kind < 0.95:
        return ".reshape(-1)"
    return f".view({rng.choice([dtype for dtype in DTYPES if dtype != 'np.bool_'])})"  # bytes other than 0 and 1 are no bool


def program(recipe: dict) -> str:
    """The chain as code, for both arrays."""
    shape = list(recipe["shape"])
    if "empty" in recipe and shape:
        shape[recipe["empty"] % len(shape)] = 0
    lines = ["from tests.fuzz.views import along", f"shape, dtype = {tuple(shape)}, {recipe['dtype']}"]
    lines.append("host = np.arange(int(np.prod(shape))).astype(np.uint8).astype(dtype).reshape(shape)")
    lines.append("x = ptxrt.to_device(host)")
    lines.append(f"host, x = along(host, x, {recipe['steps']!r})")
    if "assign" in recipe:
        lines += [
            f"value = {recipe['assign']}",
            "host = host.copy()",
            "x[...] = value",
            "host[...] = value.to_numpy() if hasattr(value, 'to_numpy') else value",
        ]
    lines += [recipe[name] for name in ("wrong", "odd") if name in recipe]
    lines += ["odd = True"] if "odd" in recipe else []
    return "\n".join(lines)


def along(host: np.ndarray, x, steps: list[str]):
    """Both arrays after the steps that NumPy accepts; AssertionError if they differ."""
    names = {"np": np, "ml_dtypes": __import__("ml_dtypes")}
    for step in steps:
        if step == ".T" and not hasattr(x, "T"):
            step = ".transpose()"
        try:
            wanted = eval(f"a{step}", names, {"a": host})
        except (IndexError, ValueError, TypeError):
            wanted = None
        try:
            got = eval(f"a{step}", names, {"a": x})
        except ptxrt.ArgumentError as error:
            copied = wanted is not None and not np.shares_memory(wanted, host) and wanted.size
            # NumPy copies if no view is possible, and `view` to another item size works along strided axes, too.
            assert wanted is None or copied or ".view" in step or "strides" in str(error), f"{step} of {x!r}: {error}"
            continue
        if wanted is None:
            assert ".view" in step and x.size == 0, f"{step} of {x!r} is taken where NumPy takes it not: {got!r}"
            continue
        wanted = np.asarray(wanted)
        assert got.shape == wanted.shape and got.dtype == wanted.dtype, (
            f"{step} of {x!r} is {got!r}, wanted {wanted.dtype} {wanted.shape}"
        )
        host, x = wanted, got
        _alike(host, x)
    return host, x


def _alike(host, x) -> None:
    assert x.to_numpy().tobytes() == host.tobytes(), f"{x!r} with strides {x.strides} holds other bytes than NumPy's"


def check(names: dict) -> None:
    """Check that the bytes are NumPy's."""
    if not names.get("odd"):
        _alike(names["host"], names["x"])
    elif isinstance(names["x"], ptxrt.DeviceArray):
        names["x"].to_numpy()


KIND = Kind("views", draw, program, check, needed=("shape", "dtype", "steps"))
