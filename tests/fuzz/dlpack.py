"""Exchange of arrays with other libraries: DLPack in both directions, `__cuda_array_interface__`, and broken
implementations of both."""

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
    "np.int64",
    "np.complex64",
]
FIELDS = {
    "shape": ["None", "('a',)", "(-1, 3)", "(2**70,)", "7"],
    "typestr": ["'?x'", "3", "'|O'", "None"],
    "data": ["None", "('a', 0)", "(4096,)", "()"],
    "strides": ["(1,)", "'ab'", "(1.5, 2.5)"],
    "stream": ["'x'", "-4"],
    "mask": ["host"],
}
# What the `__dlpack__` and `__dlpack_device__` of a broken implementation return or raise.
ANSWERS = [
    "None",
    "1",
    "'capsule'",
    "object()",
    "(1, 0)",
    "(2, 0)",
    "(1,)",
    "(99, 0)",
    "('a', 'b')",
    "ValueError('gone')",
    "RuntimeError('gone')",
    "KeyError(3)",
]
_PRETENDER = '''
class Pretender:
    """An array of somebody's that is broken."""
    answers = {answers}
    def answer(self, name):
        if isinstance(self.answers[name], Exception): raise self.answers[name]
        return self.answers[name]
    def __dlpack__(self, **named): return self.answer("capsule")
    def __dlpack_device__(self): return self.answer("device")
'''


def draw(rng: random.Random) -> dict:
    """Draw a recipe of one exchange."""
    recipe = dict(shape=[rng.choice([1, 2, 3, 5]) for _ in range(rng.choice([0, 1, 2, 3]))], dtype=rng.choice(DTYPES))
    recipe["way"] = rng.choice(["in", "out", "through", "old", "copy", "taken", "interface"])
    maybe(rng, recipe, 0.3, cut=rng.choice(["[::-1]", "[::2]", ".T", "[..., :0]", "[1:]"]))
    maybe(rng, recipe, 0.15, read_only=True)
    kind = rng.random()
    if kind < 0.2:
        answers = {"device": rng.choice(["(1, 0)", *ANSWERS]), "capsule": rng.choice(ANSWERS)}
        recipe["wrong"] = _PRETENDER.format(
            answers="{" + ", ".join(f"{name!r}: {value}" for name, value in answers.items()) + "}"
        )
        recipe["wrong"] += "\nptxrt.to_device(Pretender())"
    elif kind < 0.35:
        field = rng.choice([*FIELDS])
        whole = {
            "version": "3",
            "shape": "(2, 3)",
            "typestr": "'<f4'",
            "data": "(4096, False)",
            "strides": "None",
            "stream": "1",
        }
        whole[field] = rng.choice(FIELDS[field])
        members = ", ".join(f"{name!r}: {value}" for name, value in whole.items())
        recipe["wrong"] = (
            "Interface = type('Interface', (), "
            f"dict(__cuda_array_interface__={{{members}}}))\nptxrt.to_device(Interface())"
        )
    elif kind < 0.45:
        recipe["odd"] = rng.choice(
            [
                f"x.__dlpack__(stream={rng.choice(ODD)})",
                f"x.__dlpack__(max_version={rng.choice(ODD)})",
                f"x.__dlpack__(dl_device={rng.choice(ODD)})",
                f"x.__dlpack__(copy={rng.choice(ODD)})",
            ]
        )
        recipe["odd"] = f"from tests.fuzz.dlpack import refused; refused(lambda: {recipe['odd']})"
    return recipe


def refused(call) -> None:
    """Run a call of the protocol. Its errors may be BufferError, which DLPack specifies for arrays that cannot be
    exported, TypeError or ValueError; raise ArgumentError in their place."""
    try:
        call()
    except (BufferError, TypeError, ValueError) as error:
        raise ptxrt.ArgumentError(f"the protocol's own error, {type(error).__name__}: {error}") from None


def program(recipe: dict) -> str:
    """The exchange as code."""
    shape, dtype = tuple(recipe["shape"]), recipe["dtype"]
    cut = recipe.get("cut", "") if shape else ""
    lines = [f"host = (np.arange({int(np.prod(shape))}) % 100).astype({dtype}).reshape({shape}){cut}"]
    lines += ["host.flags.writeable = False"] if recipe.get("read_only") else []
    way = recipe["way"]
    if way == "in":  # an object with DLPack alone; NumPy exports only writeable arrays of plain dtypes
        lines.append("class Lender:")
        lines.append("    def __dlpack__(self, **named): return np.asarray(host).__dlpack__(**named)")
        lines.append("    def __dlpack_device__(self): return (1, 0)")
        simple = dtype not in ("ml_dtypes.bfloat16",)
        lines.append(f"x = ptxrt.to_device({'Lender()' if simple else 'host'})")
    else:
        lines.append("x = ptxrt.to_device(host)")
    if way in ("out", "through", "old", "copy") and dtype != "ml_dtypes.bfloat16":
        options = {"old": "", "copy": ", copy=True"}.get(way, "")
        lines.append("from tests.fuzz.dlpack import given")
        lines.append(f"back = given(x, {way!r}{options and ''})")
    elif way == "taken":
        lines.append("capsule = x.__dlpack__(max_version=(1, 0))")
        lines.append("del capsule  # nobody took it")
    lines += [recipe[name] for name in ("wrong", "odd") if name in recipe]
    lines += ["odd = True"] if "odd" in recipe else []
    return "\n".join(lines)


def given(x, way: str):
    """An array as NumPy imports it by DLPack from host memory; with `through`, after a copy to the device and back."""

    class Giver:
        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, **named):
            named = {} if way == "old" else dict(max_version=(1, 0))
            return x.__dlpack__(dl_device=(1, 0), copy=True if way == "copy" else None, **named)

    taken = np.from_dlpack(Giver())
    return ptxrt.to_device(taken).to_numpy() if way == "through" else taken


def check(names: dict) -> None:
    """Check that every array holds the bytes of the first."""
    host, x = names["host"], names["x"]
    assert x.shape == host.shape and x.dtype == host.dtype, f"{x!r} from {host.dtype} {host.shape}"
    assert x.to_numpy().tobytes() == host.tobytes(), "other bytes came in"
    if "back" in names:
        back = names["back"]
        assert back.shape == host.shape and back.dtype == host.dtype, f"{back.dtype} {back.shape} came back"
        assert back.tobytes() == host.tobytes(), "other bytes came back"


KIND = Kind("dlpack", draw, program, check, needed=("shape", "dtype", "way"))
