"""The declarations of the kernels of matrix products, and products in float64, which are their reference."""

import math

import numpy as np

from ..accuracy import Tolerance
from ..blocks import BLOCK_FORMATS
from ..formats import bf16, f16, f32, i32, u8
from ..kernel import kernel
from ..declaration import Axis, In, Out, Scalar, loose, strided, unaligned
from .endings import ENDINGS, ending_layout

# Activations by the numbers that kernels know them by.
ACTIVATIONS = (None, "relu", "gelu", "gelu_tanh", "silu", "swiglu")
# Compiled tiles, named by their columns, and the rows of each.
TILE_ROWS = {64: 64, 128: 128, 256: 128}
# Tiles of C that fill a GPU (an RTX 5090 has 170 multiprocessors, an H200 132).
_FILLING_TILES = 150


def tile_for(rows: int, cols: int) -> int:
    """The tile for products of so many rows and columns: the largest of which there are enough. No bit of C depends on it."""
    for tile in (256, 128):
        if math.ceil(rows / TILE_ROWS[tile]) * math.ceil(cols / tile) >= _FILLING_TILES * 2 // 3:
            return tile
    return 64


def erf(x: np.ndarray) -> np.ndarray:
    """The error function in float64."""
    return np.vectorize(math.erf, otypes=[np.float64])(x)


def activate(x: np.ndarray, activation, limit=math.inf, gate_alpha=1.0, offset=0.0) -> np.ndarray:
    """An activation in float64; "swiglu" takes pairs of neighbouring columns, the gate before what it gates."""
    with np.errstate(over="ignore", invalid="ignore"):
        if activation == "relu":
            return np.where(x < 0, 0, x)
        if activation == "gelu":
            return 0.5 * x * (1 + erf(x / math.sqrt(2)))
        if activation == "gelu_tanh":
            return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        if activation == "silu":
            return x / (1 + np.exp(-x))
        if activation == "swiglu":
            gate, up = np.where(x[..., 0::2] > limit, limit, x[..., 0::2]), x[..., 1::2]
            up = np.where(np.isnan(up), up, np.clip(up, -limit, limit))
            return gate / (1 + np.exp(-gate_alpha * gate)) * (up + offset)
    return x


def multiply(a: np.ndarray, b: np.ndarray, options: dict, outputs: dict) -> None:
    """Write what kernels write, from operands in float64: a [batch, tokens, depth], b [groups, cols, depth]."""
    starts, order = options["group_starts"], options["order"]
    batch, groups = len(a), len(b)
    rows = len(order) if order is not None else a.shape[1] if starts is None else options["rows"]
    matrices = [(m, m, slice(0, rows)) for m in range(batch)]
    if starts is not None:
        matrices = [(0, g, slice(int(starts[g]), min(int(starts[g + 1]), rows))) for g in range(groups)]
    codes, scales = outputs["codes"], outputs["scales"]
    quantized = np.zeros((batch, rows, options["width"]), np.float32)
    for matrix, group, part in matrices:
        mine = a[matrix][part] if order is None else a[matrix][order[part]]
        with np.errstate(invalid="ignore", over="ignore"):
            c = mine @ b[group].T * options["factor"](group)
            biases = [options[f"bias_{name}"] for name in ("f32", "f16", "bf16")]
            c = c + next((x[group].astype(np.float64) for x in biases if x is not None), 0)
            numbers = (float(options[name]) for name in ("limit", "gate_alpha", "offset"))
            c = activate(c, ACTIVATIONS[int(options["activation"])], *numbers)
            more = [options[f"residual_{name}"] for name in ("f32", "f16", "bf16")]
            c = c + next((x[matrix, part].astype(np.float64) for x in more if x is not None), 0)
            for name in ("f32", "f16", "bf16"):
                if outputs[f"out_{name}"] is not None:
                    outputs[f"out_{name}"][matrix, part] = c
            quantized[matrix, part] = c
    if codes is not None:
        name = ENDINGS[int(options["ending"]) - 1]
        block, whole = BLOCK_FORMATS[name], quantized.reshape(batch * rows, -1)
        layout = ending_layout(name, whole.shape, bool(options["swizzled"]))
        levels = options["out_global"]
        parts = [(slice(None), 0)] if starts is None else [(part, group) for _, group, part in matrices]
        plain = [np.zeros((len(whole), n), np.uint8) for n in (layout.code_bytes, layout.blocks)]
        for part, group in parts:
            padded = np.pad(whole[part], [(0, 0), (0, layout.padded - layout.length)])
            level = [] if not block.two_level else [1.0 if levels is None else levels[min(group, len(levels) - 1)]]
            for target, values in zip(plain, block.encode(padded, *level, block.rules[int(options["rule"])])):
                target[part] = values
        codes[:], scales[:] = plain[0], layout.stored_scales(plain[1]).reshape(-1)


# Axes that follow from others where a call does not give them.
DERIVED = dict(
    rows=lambda axes: axes.get("rows", axes["tokens"]),
    width=lambda axes: axes.get("width", axes["cols"]),
    alpha_count=lambda axes: axes.get("alpha_count", 1),
    level_count=lambda axes: axes.get("level_count", 1),
    starts=lambda axes: axes.get("starts", 1),
    code_bytes=lambda axes: axes.get("code_bytes", 1),
    scale_bytes=lambda axes: axes.get("scale_bytes", 1),
    tile=lambda axes: axes.get("tile", tile_for(axes["rows"], axes["cols"])),
    # Where there are groups each may begin with a tile of its own.
    grid_rows=lambda axes: axes["rows"] + (axes["groups"] * TILE_ROWS[axes["tile"]] if axes["starts"] > 1 else 0),
)


def flops(*, batch, rows, cols, depth, **others) -> int:
    """A multiply-add for each product."""
    return 2 * batch * rows * cols * depth


def _small_integers(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    """Examples: normal values, or, where C is quantized, whole numbers, so that sums are exact and codes cannot differ."""
    if axes.get("code_bytes", 1) > 1:
        return rng.integers(-3, 4, shape).astype(member.dtype)
    return rng.standard_normal(shape, dtype=np.float32).astype(member.dtype)


def example_starts(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    """Groups of uneven sizes, the first of which is empty, that end at the last row."""
    inner = np.sort(rng.integers(0, axes["rows"] + 1, max(shape[0] - 3, 0)))
    return np.concatenate([[0, 0], inner, [axes["rows"]]])[: shape[0]].astype(np.int32)


def example_order(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    return rng.integers(0, axes["tokens"], shape).astype(np.int32)


def example_levels(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    """Powers of two."""
    return np.exp2(rng.integers(-2, 3, shape)).astype(np.float32)


def case(rows=70, cols=100, depth=64, batch=1, ending=None, swizzled=0, **rest) -> dict:
    """A declared case; `ending`: the block format of C."""
    axes = dict(batch=batch, tokens=rows, rows=rows, cols=cols, depth=depth, groups=batch, width=cols)
    axes |= dict(alpha_count=1, level_count=1, starts=1, code_bytes=1, scale_bytes=1)
    if ending:
        width = rest.get("width", cols)
        layout = ending_layout(ending, (batch * rows, width), bool(swizzled))
        axes |= dict(code_bytes=layout.code_bytes, scale_bytes=int(np.prod(layout.scales_shape)))
        rest |= dict(ending=ENDINGS.index(ending) + 1, swizzled=swizzled, codes=True, scales=True)
    return axes | rest


def epilogue_cases(tile: int) -> list[dict]:
    """Every kind of end, at one tile."""
    return [
        case(tile=tile, out_f32=True, bias_f32=True, activation=1),
        case(65, 72, 40, tile=tile, out_f16=True, bias_f16=True, activation=2, residual_f16=True, alpha=0.125),
        case(17, 129, 24, tile=tile, out_bf16=True, bias_bf16=True, activation=3, residual_bf16=True, alpha=0.25),
        case(3, 40, 136, 2, tile=tile, out_f32=True, activation=4, residual_f32=True, alpha=0.125, alphas=True),
        case(66, 136, 72, tile=tile, width=68, out_bf16=True, activation=5, bias_bf16=True, alpha=0.125),
        case(66, 136, 72, tile=tile, width=68, out_f32=True, activation=5, limit=2.0, gate_alpha=1.702, offset=1.0,
             alpha=0.5),
        case(70, 96, 32, tile=tile, ending="mxfp8", rule=2, activation=1),
        case(70, 90, 64, 2, tile=tile, ending="mxfp4", rule=3, swizzled=1),
        case(70, 80, 64, tile=tile, ending="nvfp4", out_global=True, bias_f32=True),
        case(130, 144, 32, tile=tile, ending="nvfp4", rule=1, swizzled=1),
    ]


def group_cases(tile: int) -> list[dict]:
    """Products of groups of rows, at one tile."""
    groups = dict(groups=4, starts=5, group_starts=True, tile=tile)
    return [
        case(150, 72, 40, **groups, out_f32=True, bias_f32=True, alphas=True, alpha_count=4),
        case(40, 64, 32, **groups, order=True, out_bf16=True) | dict(tokens=25),
        case(140, 64, 32, **groups, ending="nvfp4", out_global=True, level_count=4),
    ]


SUMS = Tolerance("float32 sums; approximate exponentials", relative_l2=4e-6)
OUTPUTS = dict(
    out_f32=SUMS,
    out_f16=Tolerance("rounded to float16", relative_l2=4e-4),
    out_bf16=Tolerance("rounded to bfloat16", relative_l2=3e-3),
)

TEXT = """Multiply A [rows, depth] of {a} by the transpose of B [cols, depth] of {b}: C = activation(alpha A B^T + bias) + residual.

Products are exact, sums float32 in ascending k; alpha is {alpha}one float32 number, bias and what follows are float32.
activation: 0 none,
1 relu, 2 gelu by erf, 3 gelu by tanh, 4 silu, 5 swiglu: of columns 2 i and 2 i + 1, g and u, column i is
g sigmoid(gate_alpha g) (u + offset) with g at most `limit` and u within it. Then C is rounded once: to nearest,
    ties to even, to the one of
out_f32, out_f16 and out_bf16 that is there; or quantized with the bytes of `quantize`: ending 1 mxfp8, 2 mxfp4, 3
nvfp4 under `out_global`,
by the rule of that number, scales in 128x4 tiles where `swizzled`.
group_starts: rows group_starts[g] to group_starts[g + 1] are multiplied by matrix g of B; the rows behind are not
written. order: row i of C
is made of row order[i] of A. in_place: the residual is what the array that is given as C holds. alphas,
    out_global: one number, or one a group. Whoever quantizes groups into 128x4 tiles clears their padding."""


def _gemm_bf16(
    a: In[bf16 | f16, "batch tokens depth", strided],
    b: In[bf16 | f16, "groups cols depth", strided],
    bias_f32: In[f32, "groups cols", loose] = None,
    bias_f16: In[f16, "groups cols", loose] = None,
    bias_bf16: In[bf16, "groups cols", loose] = None,
    residual_f32: In[f32, "batch rows width", loose] = None,
    residual_f16: In[f16, "batch rows width", loose] = None,
    residual_bf16: In[bf16, "batch rows width", loose] = None,
    alphas: In[f32, "alpha_count", unaligned] = None,
    out_global: In[f32, "level_count", unaligned] = None,
    group_starts: In[i32, "starts", unaligned] = None,
    order: In[i32, "rows", unaligned] = None,
    out_f32: Out[f32, "batch rows width", loose] = None,
    out_f16: Out[f16, "batch rows width", loose] = None,
    out_bf16: Out[bf16, "batch rows width", loose] = None,
    codes: Out[u8, "batch*rows code_bytes"] = None,
    scales: Out[u8, "scale_bytes"] = None,
    *,
    alpha: Scalar[f32] = 1.0,
    activation: Scalar[i32, 0, 1, 2, 3, 4, 5] = 0,
    limit: Scalar[f32] = math.inf,
    gate_alpha: Scalar[f32] = 1.0,
    offset: Scalar[f32] = 0.0,
    ending: Scalar[i32, 0, 1, 2, 3] = 0,
    rule: Scalar[i32, 0, 1, 2, 3] = 0,
    swizzled: Scalar[i32, 0, 1] = 0,
    in_place: Scalar[i32, 0, 1] = 0,
    rows: Axis,
    width: Axis,
):
    options = dict(locals())
    outputs = {name: options.pop(name) for name in ("out_f32", "out_f16", "out_bf16", "codes", "scales")}
    options["factor"] = lambda group: float(alpha) if alphas is None else float(alphas[min(group, len(alphas) - 1)])
    multiply(a.astype(np.float64), b.astype(np.float64), options, outputs)



_gemm_bf16.__name__ = _gemm_bf16.__qualname__ = "gemm_bf16"
_gemm_bf16.__doc__ = TEXT.format(a="bf16 or f16", b="the same", alpha="")
gemm_bf16 = kernel(
    grid="cols grid_rows batch",
    variants=dict(tile=tuple(TILE_ROWS)),
    derived=DERIVED,
    cases=[
        *(case(tile=tile, out_f32=True) for tile in TILE_ROWS),
        case(130, 260, 200, 2, tile=256, out_bf16=True),
        case(1, 8, 8, tile=64, out_f16=True),
        case(129, 257, 512, tile=256, out_f32=True, format="bf16"),
        *epilogue_cases(64),
        *(dict(x, format="bf16") for tile in (128, 256) for x in epilogue_cases(tile)),
        *group_cases(64),
        *(dict(x, format="bf16") for tile in (128, 256) for x in group_cases(tile)),
    ],
    tolerance=OUTPUTS,
    flops=flops,
    draw=dict(a=_small_integers, b=_small_integers, group_starts=example_starts, order=example_order,
              out_global=example_levels,
              alphas=example_levels),
)(_gemm_bf16)
