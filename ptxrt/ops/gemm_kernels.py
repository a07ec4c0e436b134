"""Declarations of the kernels of matrix products, and float64 products, their reference."""

import inspect
import math
from collections.abc import Iterable

import numpy as np

from ..accuracy import Tolerance
from ..blocks import BLOCK_FORMATS
from ..declaration import Axis, In, Out, Scalar, loose, strided, unaligned
from ..formats import bf16, f16, f32, i32, pack, u8
from ..kernel import kernel
from .endings import ENDINGS, ending_layout

# Activations, indexed by the kernels' scalar `activation`.
ACTIVATIONS = (None, "relu", "gelu", "gelu_tanh", "silu", "swiglu")
# Those of kernels with a short epilogue.
PLAIN = (None, "swiglu")
# Compiled tiles: columns -> rows.
TILE_ROWS = {64: 64, 128: 128, 256: 128}
# (format of A, format of B) with at least one block format.
BLOCK_PAIRS = (
    *(("mxfp8", "mxfp8"), ("mxfp4", "mxfp4"), ("nvfp4", "nvfp4"), ("mxfp8", "mxfp4")),
    *(("bf16", "nvfp4"), ("bf16", "mxfp4"), ("bf16", "mxfp8")),
)
# The rate of each tile over that of the largest: operands in codes reach 0.52 to 0.62 and 0.80 on an H200, 0.55 to 0.86
# and 0.88 to 0.92 in the static model of an RTX 5090. In 16 bits tiles of 64 reach 0.59 to 0.69 of those of 128 on an
# H200: with a rate of 0.6 the faster tile is chosen for each of 64 sizes that were measured.
_RATES = {64: 0.55, 128: 0.85, 256: 1.0}
_RATES_OF_16_BITS = {64: 0.6, 128: 1.0}
# The depth of all tiles that a block walks over: beside a longer one, the beginning of a block costs little.
_LONGEST_WALK = 2048
# Rows and columns of the blocks that a launch has in place of few of the smallest tiles (op/gemm_narrow.cuh).
NARROW_ROWS, NARROW_COLS = 32, 16
# Multiprocessors where a call does not name them (an RTX 5090).
_MULTIPROCESSORS = 170


def tiles_of(a: str, b: str) -> tuple[int, ...]:
    """Return the tiles of a pair of formats: in 16 bits two blocks of 128 x 128 share a multiprocessor and surpass one
    of 128 x 256. If B alone is in codes, the largest tile has 128 columns or fewer where shared memory is little."""
    if a in BLOCK_FORMATS:
        return 64, 128, 256
    return (64, 256) if b in BLOCK_FORMATS else (64, 128)


def tile_for(rows: int, cols: int, matrices: int, multiprocessors: int, tiles: Iterable[int]) -> int:
    """Return the tile for a product: that of the least estimated time. No bit of C depends on it."""
    rates = _RATES if 256 in tiles else _RATES_OF_16_BITS

    def time(tile: int) -> float:
        """Of the multiprocessor with the most blocks, in elements of C at the rate of the largest tile."""
        blocks = matrices * math.ceil(rows / TILE_ROWS[tile]) * math.ceil(cols / tile)
        return math.ceil(blocks / multiprocessors) * TILE_ROWS[tile] * tile / rates[tile]

    return min(tiles, key=time)


def grid_rows(axes, block_rows: int) -> int:
    """Return how many rows blocks of `block_rows` rows must cover. Each group of least to most rows begins with a new
    block."""
    if axes["starts"] == 1:
        return axes["rows"]
    groups = min(axes["groups"], axes["rows"] // axes["least"])
    return min(axes["rows"] + groups * (block_rows - 1), groups * math.ceil(axes["most"] / block_rows) * block_rows)


def erf(x: np.ndarray) -> np.ndarray:
    """The error function in float64."""
    return np.vectorize(math.erf, otypes=[np.float64])(x)


def activate(x: np.ndarray, activation, limit=math.inf, gate_alpha=1.0, offset=0.0) -> np.ndarray:
    """Apply an activation in float64; "swiglu" takes pairs of neighboring columns, the gate first."""
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
    """Write what kernels write, from float64 operands: a [batch, tokens, depth], b [groups, cols, depth]."""
    starts, order = options["group_starts"], options["order"]
    batch, groups = len(a), len(b)
    rows = len(order) if order is not None else a.shape[1] if starts is None else options["rows"]
    matrices = [(m, m, slice(0, rows)) for m in range(batch)]
    if starts is not None:
        matrices = [(0, g, slice(int(starts[g]), min(int(starts[g + 1]), rows))) for g in range(groups)]
    codes, scales = outputs["codes"], outputs["scales"]
    quantized = np.zeros((batch, rows, options["width"]), np.float32)
    least, most = (int(options[name]) for name in ("least_rows", "most_rows"))
    if starts is not None:
        matrices = [x for x in matrices if least <= x[2].stop - x[2].start <= most]
    for matrix, group, part in matrices:
        mine = a[matrix][part] if order is None else a[matrix][order[part]]
        with np.errstate(invalid="ignore", over="ignore"):
            c = mine @ b[group].T * options["factor"](group)
            biases = [options[f"bias_{name}"] for name in ("f32", "f16", "bf16")]
            c = c + next((x[group].astype(np.float64) for x in biases if x is not None), 0)
            numbers = (float(options[name]) for name in ("limit", "gate_alpha", "offset"))
            c = activate(c, ACTIVATIONS[int(options["activation"])], *numbers)
            residuals = [options[f"residual_{name}"] for name in ("f32", "f16", "bf16")]
            c = c + next((x[matrix, part].astype(np.float64) for x in residuals if x is not None), 0)
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


# Axes that are derived from others if a call does not give them. multiprocessors: of the device. least, most: the rows
# of the groups that a launch multiplies, which size the grid.
DERIVED = dict(
    rows=lambda axes: axes.get("rows", axes["tokens"]),
    width=lambda axes: axes.get("width", axes["cols"]),
    alpha_count=lambda axes: axes.get("alpha_count", 1),
    level_count=lambda axes: axes.get("level_count", 1),
    starts=lambda axes: axes.get("starts", 1),
    code_bytes=lambda axes: axes.get("code_bytes", 1),
    scale_bytes=lambda axes: axes.get("scale_bytes", 1),
    multiprocessors=lambda axes: axes.get("multiprocessors", _MULTIPROCESSORS),
    least=lambda axes: axes.get("least", 1),
    most=lambda axes: axes.get("most", axes["rows"]),
)


def grid_cols(cols: int, depth: int, row_tiles: int, multiprocessors: int, tile: int) -> int:
    """Return how many columns of C blocks of one tile would cover, if each walks over consecutive tiles of a row: equal
    numbers that leave two rounds of blocks, with two blocks to a multiprocessor."""
    tiles = math.ceil(cols / tile)

    def suits(walk: int) -> bool:
        return tiles % walk == 0 and row_tiles * tiles // walk >= 2 * 2 * multiprocessors

    most = min(tiles, _LONGEST_WALK // max(depth, 1))
    return tiles // next(filter(suits, range(most, 1, -1)), 1) * tile


def is_narrow(axes) -> bool:
    """Return whether a product on the smallest tile has narrow blocks: if all run at once, two on a multiprocessor, and
    C is in floats, without a gate and groups."""
    plain = axes["starts"] == 1 and axes["code_bytes"] == 1 and axes["width"] == axes["cols"]
    if not plain or axes["tile"] != min(TILE_ROWS) or axes["cols"] <= NARROW_COLS:
        return False
    blocks = axes["batch"] * math.ceil(axes["rows"] / NARROW_ROWS) * math.ceil(axes["cols"] / NARROW_COLS)
    return blocks <= 2 * axes["multiprocessors"]


def _tile_axes(tiles, walks: bool = False, narrow: bool = False) -> dict:
    """Return the derived axes of a kernel with these tiles. walks: whether blocks walk over several of them. narrow:
    whether the smallest can be divided into narrow blocks."""

    def tile(axes):
        return axes.get("tile", tile_for(*(axes[x] for x in ("rows", "cols", "batch", "multiprocessors")), tiles))

    def walking(axes):
        row_tiles = axes["batch"] * math.ceil(axes["grid_rows"] / TILE_ROWS[axes["tile"]])
        return grid_cols(axes["cols"], axes["depth"], row_tiles, axes["multiprocessors"], axes["tile"])

    def rows(axes):
        block = TILE_ROWS[axes["tile"]]
        return math.ceil(axes["rows"] / NARROW_ROWS) * block if narrow and is_narrow(axes) else grid_rows(axes, block)

    def cols(axes):
        if narrow and is_narrow(axes):
            return math.ceil(axes["cols"] / NARROW_COLS) * axes["tile"]
        return walking(axes) if walks else axes["cols"]

    return dict(tile=tile, grid_rows=rows, grid_cols=cols)


def _few_axes(format_a: str) -> dict:
    """Return those of a kernel for few rows."""
    rows = 32 if format_a in BLOCK_FORMATS else 64
    return dict(grid_rows=lambda axes: grid_rows(axes, rows), grid_cols=lambda axes: axes["cols"])


def _flops(block: int):
    """Return a function that counts flops: two for each product. block: values of B that share a scale, if the depth is
    counted in scales."""

    def flops(*, batch, rows, cols, depth=None, b_blocks=None, **others) -> int:
        return 2 * batch * rows * cols * (depth if depth is not None else int(b_blocks) * block)

    return flops


def is_wide(format_a: str, format_b: str, rows: int, cols: int) -> bool:
    """Whether a product of up to 64 rows and so many columns of all matrices takes wide blocks: they pay if they occupy
    most multiprocessors, and with 17 rows already if A is not expanded."""
    if format_b not in BLOCK_FORMATS and rows > 32:
        return cols >= 4096
    return cols >= 5120 and rows > (32 if format_a in BLOCK_FORMATS else 16)


# Products of more columns do not norm rows of A, because each of their many blocks would do it.
NORMED_COLS = 8192


def normed_rows(depth: int) -> int:
    """Return how many rows of A a product of few rows can norm: a row has lanes of 32 values, a power of two of 256."""
    lanes = 2
    while 32 * lanes < depth:
        lanes *= 2
    return min(256 // lanes, 8) if depth % 32 == 0 else 0


def _values(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    """Examples: normal values, or small whole numbers if C is quantized, so that sums are exact and codes cannot
    differ.
    """
    if axes.get("code_bytes", 1) > 1:
        return rng.integers(-3, 4, shape).astype(member.dtype)
    return rng.standard_normal(shape, dtype=np.float32).astype(member.dtype)


def example_starts(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    """Group starts of uneven groups, the first empty, that end at the last row."""
    inner = np.sort(rng.integers(0, axes["rows"] + 1, max(shape[0] - 3, 0)))
    return np.concatenate([[0, 0], inner, [axes["rows"]]])[: shape[0]].astype(np.int32)


def example_order(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    return rng.integers(0, axes["tokens"], shape).astype(np.int32)


def example_levels(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    """Powers of two."""
    return np.exp2(rng.integers(-2, 3, shape)).astype(np.float32)


def case(rows=70, cols=100, depth=64, batch=1, ending=None, swizzled=0, **rest) -> dict:
    """A declared case. ending: the block format of C."""
    axes = dict(batch=batch, tokens=rows, rows=rows, cols=cols, depth=depth, groups=batch, width=cols)
    axes |= dict(alpha_count=1, level_count=1, starts=1, code_bytes=1, scale_bytes=1)
    if ending:
        width = rest.get("width", cols)
        layout = ending_layout(ending, (batch * rows, width), bool(swizzled))
        axes |= dict(code_bytes=layout.code_bytes, scale_bytes=int(np.prod(layout.scales_shape)))
        rest |= dict(ending=ENDINGS.index(ending) + 1, swizzled=swizzled, codes=True, scales=True)
    return axes | rest


def epilogue_cases(tile: int) -> list[dict]:
    """Cases of all endings, for one tile."""
    return [
        case(tile=tile, out_f32=True, bias_f32=True, activation=1),
        case(65, 72, 40, tile=tile, out_f16=True, bias_f16=True, activation=2, residual_f16=True, alpha=0.125),
        case(17, 129, 24, tile=tile, out_bf16=True, bias_bf16=True, activation=3, residual_bf16=True, alpha=0.25),
        case(3, 40, 136, 2, tile=tile, out_f32=True, activation=4, residual_f32=True, alpha=0.125, alphas=True),
        case(66, 136, 72, tile=tile, width=68, out_bf16=True, activation=5, bias_bf16=True, alpha=0.125),
        case(
            66,
            136,
            72,
            tile=tile,
            width=68,
            out_f32=True,
            activation=5,
            limit=2.0,
            gate_alpha=1.702,
            offset=1.0,
            alpha=0.5,
        ),
        case(66, 136, 40, tile=tile, width=68, out_f16=True, activation=5, bias_f16=True, alpha=0.125),
        case(17, 136, 40, tile=tile, width=68, out_f32=True, activation=5, bias_f32=True, alpha=0.125),
        case(70, 96, 32, tile=tile, ending="mxfp8", rule=2, activation=1, swizzled=1),
        case(70, 90, 64, 2, tile=tile, ending="mxfp4", rule=3, swizzled=1),
        case(70, 80, 64, tile=tile, ending="nvfp4", out_global=True, bias_f32=True),
        case(130, 144, 32, tile=tile, ending="nvfp4", rule=1, swizzled=1),
    ]


def group_cases(tile: int) -> list[dict]:
    """Cases of groups of rows, for one tile."""
    groups = dict(groups=4, starts=5, group_starts=True, tile=tile)
    return [
        case(150, 72, 40, **groups, out_f32=True, bias_f32=True, alphas=True, alpha_count=4),
        case(40, 64, 32, **groups, order=True, out_bf16=True) | dict(tokens=25),
        case(140, 64, 32, **groups, ending="nvfp4", out_global=True, level_count=4),
        case(90, 24, 16, groups=40, starts=41, group_starts=True, tile=tile, out_f32=True),
    ]


SUMS = Tolerance("float32 sums; approximate exponentials", relative_l2=4e-6)
OUTPUTS = dict(
    out_f32=SUMS,
    out_f16=Tolerance("rounded to float16", relative_l2=4e-4),
    out_bf16=Tolerance("rounded to bfloat16", relative_l2=3e-3),
)

TEXT = """Multiply A [rows, depth] of {a} by the transpose of B [cols, depth] of {b}, then apply an epilogue.

C = activation(alpha A B^T + bias) + residual. Products are exact, sums are float32 in ascending k.
alpha{alpha} is one float32 number; bias, activation and residual are in float32.
activation: 0 none, 1 relu, 2 gelu by erf, 3 gelu by tanh, 4 silu, 5 swiglu. swiglu: with g and u in columns 2 i and
2 i + 1, column i becomes g sigmoid(gate_alpha g) (u + offset), where g is clamped to at most `limit` and u to +-limit.
Then C is rounded once, to nearest, ties to even, to the type of the output among out_f32, out_f16 and out_bf16. Or C is
quantized with the bytes of `quantize`: ending 1 mxfp8, 2 mxfp4, 3 nvfp4 under `out_global` (1 if missing), by the rule
of that number, scales in 128x4 tiles if `swizzled`. in_place: the output array holds the residual before the call.
"""
BLOCKS_TEXT = """x is each operand in a block format, a or b. x_codes: rows of codes as `quantize` writes them, padded
with zeros to multiples of 16 bytes. x_scales: the scales of all rows of all matrices, x_blocks of each row, in 128x4
tiles if x_swizzled; those of matrix m begin at row x_first_row + m x_scale_rows. x_global: a factor of all
values, the global scale of NVFP4.
"""
FEW_TEXT = """For few rows: the depth is cut into eight runs of whole units of 32 values if B has 16 bits, else of 128.
Each run is summed separately; the sums are added in pairs. A row's bits depend on the depth and the formats alone.
"""
WIDE_TEXT = """\
For 17 to 64 rows, with the bits of the kernel for few rows. A block has more columns and all rows, so that
codes are converted less often. swiglu is the only activation, and C is not quantized.
"""
NORM_TEXT = """a_norm: rows of A are first divided by the root of their mean square plus a_eps, multiplied by a_norm and
rounded, with the bits of `norm_rows`: at most 8 rows, as long as 256 lanes of 32 values, a power of two for each row,
hold them all. halves: the 16-bit halves of a value of A: 1; 2 if the rows to norm are float32.
"""
LAST = """group_starts: rows group_starts[g] to group_starts[g + 1] are multiplied by matrix g of B. Rows after the last
group are not written, nor are groups of fewer than least_rows or more than most_rows rows. order: row i of C is
computed from row order[i] of A. alphas, out_global: one number, or one for each group."""


def _ends(
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
    least_rows: Scalar[i32] = 0,
    most_rows: Scalar[i32] = 2**31 - 1,
    rows: Axis,
    width: Axis,
):
    """The arguments of all kernels, after the operands."""


def _in_16_bits(a: In[bf16 | f16, "batch tokens depth", strided], b: In[bf16 | f16, "groups cols depth", strided]):
    """16-bit operands."""


def _normed_in_16_bits(
    a: In[bf16 | f16, "batch tokens halves*depth", strided],
    b: In[bf16 | f16, "groups cols depth", strided],
    a_norm: In[f32, "depth"] = None,
    *,
    a_eps: Scalar[f32] = 0.0,
    halves: Axis,
):
    """The same; rows of A may be normed first."""


def _in_blocks(
    a_codes: In[u8, "batch tokens a_bytes", strided],
    a_scales: In[u8, "a_scale_bytes", unaligned],
    b_codes: In[u8, "groups cols b_bytes", strided],
    b_scales: In[u8, "b_scale_bytes", unaligned],
    a_global: In[f32, "1", unaligned] = None,
    b_global: In[f32, "1", unaligned] = None,
    *,
    a_blocks: Scalar[i32],
    a_swizzled: Scalar[i32, 0, 1] = 0,
    a_scale_rows: Scalar[i32],
    a_first_row: Scalar[i32] = 0,
    b_blocks: Scalar[i32],
    b_swizzled: Scalar[i32, 0, 1] = 0,
    b_scale_rows: Scalar[i32],
    b_first_row: Scalar[i32] = 0,
):
    """Operands in codes and scales."""


def _half_in_blocks(
    a: In[bf16, "batch tokens depth", strided],
    b_codes: In[u8, "groups cols b_bytes", strided],
    b_scales: In[u8, "b_scale_bytes", unaligned],
    b_global: In[f32, "1", unaligned] = None,
    *,
    b_blocks: Scalar[i32],
    b_swizzled: Scalar[i32, 0, 1] = 0,
    b_scale_rows: Scalar[i32],
    b_first_row: Scalar[i32] = 0,
):
    """A in bf16, B in codes and scales."""


def _normed_half_in_blocks(
    a: In[bf16, "batch tokens halves*depth", strided],
    b_codes: In[u8, "groups cols b_bytes", strided],
    b_scales: In[u8, "b_scale_bytes", unaligned],
    a_norm: In[f32, "depth"] = None,
    b_global: In[f32, "1", unaligned] = None,
    *,
    a_eps: Scalar[f32] = 0.0,
    b_blocks: Scalar[i32],
    b_swizzled: Scalar[i32, 0, 1] = 0,
    b_scale_rows: Scalar[i32],
    b_first_row: Scalar[i32] = 0,
    halves: Axis,
):
    """The same; rows of A may be normed first."""


def _signature(*functions) -> inspect.Signature:
    """Join the parameters of several functions; keyword parameters come last."""
    signatures = [inspect.signature(function) for function in functions]
    parameters = [p for signature in signatures for p in signature.parameters.values()]
    ends = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    numbers = [p for p in signatures[-1].parameters.values() if p.kind is p.KEYWORD_ONLY]
    # in the order of the entries' parameters: numbers that all kernels have, then those of operands
    ends = numbers + [p for p in ends if p not in numbers]
    return inspect.Signature([p for p in parameters if p.kind is not p.KEYWORD_ONLY] + ends)


def _plain_ends():
    """The same for kernels without groups whose C is floats, without an activation or with a gate."""


_short = dict(activation=Scalar[(i32, *map(ACTIVATIONS.index, PLAIN))])
# What is missing, and what the reference takes in its place.
_MISSING = dict(out_global=None, group_starts=None, order=None, codes=None, scales=None)
_MISSING |= dict(ending=0, rule=0, swizzled=0, least_rows=0, most_rows=2**31 - 1)
_plain_ends.__signature__ = inspect.Signature(
    [
        p.replace(annotation=_short.get(name, p.annotation))
        for name, p in inspect.signature(_ends).parameters.items()
        if name not in _MISSING
    ]
)


def _declare(name: str, operands, read, text: str, ends=_ends, **options):
    """Declare a kernel. read: returns its operands in float64 from the arguments by name. ends: has the signature of
    the arguments after the operands."""

    def body(**options):
        options = _MISSING | options
        outputs = {x: options.pop(x) for x in ("out_f32", "out_f16", "out_bf16", "codes", "scales")}
        alpha, alphas = options["alpha"], options["alphas"]
        options["factor"] = lambda group: float(alpha if alphas is None else alphas[min(group, len(alphas) - 1)])
        multiply(*read(options), options, outputs)

    body.__name__ = body.__qualname__ = name
    body.__doc__ = text
    body.__signature__ = _signature(operands, ends)
    draw = dict(group_starts=example_starts, order=example_order, out_global=example_levels, alphas=example_levels)
    draw = {name: of for name, of in draw.items() if name in inspect.signature(ends).parameters} | options.pop("draw")
    common = dict(
        grid="grid_cols grid_rows batch",
        derived=DERIVED | options.pop("derived"),
        tolerance=OUTPUTS,
        flops=_flops(options.pop("block")),
    )
    return kernel(**common, draw=draw, **options)(body)


def few_cases(one) -> list[dict]:
    """Cases of few rows: one row and more, empty and long runs of the depth, all endings, groups."""
    groups = dict(groups=4, starts=5, group_starts=True)
    return [
        *(one(rows, 72, depth, out_f32=True) for rows, depth in ((5, 32), (5, 5216))),
        one(20, 40, 5216, out_f32=True, swizzled=1),
        one(9, 40, 5120, out_f32=True),  # pages of scales in one piece, but for runs that begin amid a page
        one(16, 40, 576, 2, out_bf16=True, bias_f32=True, activation=4),
        one(33, 136, 96, width=68, out_f32=True, activation=5, alpha=0.125),
        # shares of a gate, stored in chunks
        one(33, 192, 96, width=96, out_bf16=True, residual_bf16=True, activation=5, alpha=0.125),
        # a gate whose residual is added in chunks, but which is stored by elements: lanes without a row write nothing
        one(18, 136, 32, width=68, out_bf16=True, residual_f32=True, activation=5, alpha=0.125),
        *(
            one(40, 96, 160, ending=end, swizzled=swizzled)
            for end, swizzled in (("mxfp8", 0), ("nvfp4", 1), ("mxfp4", 1))
        ),
        one(75, 72, 64, **groups, out_f32=True, alphas=True, alpha_count=4),
        one(40, 64, 64, **groups, order=True, tokens=25, out_f16=True, alpha=2.0**-13),
        one(20, 40, 64, **groups, order=True, tokens=25, out_f32=True, swizzled=1),
        one(90, 40, 64, groups=70, starts=71, group_starts=True, out_f32=True),
        # up to eight rows, up to sixteen and more: biases and residuals of each type, scales at any address
        *(
            one(rows, 40, 160, out_f32=True, **{f"bias_{bias}": True, f"residual_{residual}": True})
            for rows in (5, 12, 20)
            for bias, residual in (("f32", "f16"), ("f16", "f32"))
        ),
        one(5, 40, 160, ending="mxfp8", swizzled=1),
    ]


def wide_cases(one) -> list[dict]:
    """Cases of 17 to 64 rows: all of them and fewer, empty and long runs of the depth, tails of K, columns that
    end amid a block, matrices."""
    return [
        one(64, 136, 5216, out_f32=True),
        one(33, 72, 32, 2, out_bf16=True, bias_f32=True, residual_bf16=True),
        one(50, 200, 1056, 2, out_f16=True, bias_f16=True, residual_f32=True, alpha=0.5, of_tiles=1),
        one(40, 136, 96, width=68, out_bf16=True, bias_f32=True, activation=5, alpha=0.125),
        one(64, 64, 96, width=32, out_f32=True, activation=5, limit=2.0, offset=1.0, residual_f32=True, alpha=0.125),
        one(90, 40, 160, 3, out_f32=True, alphas=True, alpha_count=3),
        one(12, 40, 32, out_f32=True, residual_f16=True, leveled=True),  # fewer rows
    ]


gemm_bf16 = _declare(
    "gemm_bf16",
    _in_16_bits,
    lambda options: [options.pop(x).astype(np.float64) for x in "ab"],
    TEXT.format(a="bf16 or f16", b="the same", alpha="") + LAST,
    block=1,
    variants=dict(tile=tiles_of("bf16", "bf16")),
    derived=_tile_axes(tiles_of("bf16", "bf16"), walks=True, narrow=True),
    cases=[
        *(case(tile=tile, out_f32=True) for tile in tiles_of("bf16", "bf16")),
        case(130, 260, 200, 2, tile=128, out_bf16=True),
        case(1, 8, 8, tile=64, out_f16=True),
        # blocks that walk: fewer slices than stages and more, few rows
        *(case(390, 270, depth, tile=128, out_bf16=True, bias_f32=True, multiprocessors=1) for depth in (8, 200)),
        case(70, 500, 72, 2, tile=64, out_f16=True, bias_f16=True, activation=2, residual_f16=True, multiprocessors=2),
        case(10, 500, 392, tile=64, ending="mxfp8", swizzled=1, multiprocessors=1),
        case(16, 70, 520, tile=64, out_bf16=True, residual_bf16=True, bias_bf16=True),
        case(129, 257, 512, tile=128, out_f32=True, format="bf16"),
        # rows stored as pairs of 16 bits: with a residual, activated, rows and columns that end amid a tile
        case(150, 200, 136, 2, tile=128, out_bf16=True, residual_bf16=True, bias_bf16=True, multiprocessors=1),
        case(70, 136, 72, tile=64, out_f16=True, residual_f16=True, bias_f16=True, activation=2, alpha=0.25),
        case(130, 128, 40, tile=128, out_bf16=True, activation=4, format="bf16"),
        *epilogue_cases(64),
        *(dict(x, format="bf16") for x in epilogue_cases(128)),
        # narrow blocks: fewer slices than stages and more, rows and columns that end amid a block
        case(16, 70, 1032, tile=64, out_bf16=True, residual_bf16=True, bias_bf16=True),
        case(5, 41, 136, 2, tile=64, out_f16=True, residual_f16=True, bias_f16=True, activation=4, alpha=0.5),
        case(70, 136, 392, tile=64, out_f32=True, residual_f32=True, bias_f32=True, activation=2, alphas=True),
        case(33, 18, 8, tile=64, out_bf16=True, activation=1, format="bf16"),
        # and whole tiles where others are narrow
        *(dict(x, multiprocessors=1) for x in epilogue_cases(64) if x["code_bytes"] == 1 and x["width"] == x["cols"]),
        case(16, 70, 520, tile=64, out_bf16=True, residual_bf16=True, bias_bf16=True, multiprocessors=1),
        case(
            *(70, 136, 72),
            **dict(tile=64, multiprocessors=1, out_f16=True, residual_f16=True, bias_f16=True, activation=2),
            alpha=0.25,
        ),
        *group_cases(64),
        *(dict(x, format="bf16") for x in group_cases(128)),
        case(16, 40, 72, tile=64, order=True, out_bf16=True) | dict(tokens=25),  # narrow blocks of gathered rows
    ],
    draw=dict(a=_values, b=_values),
)


def _normed_a(options) -> np.ndarray:
    """Return A of a kernel that may norm it, in float64."""
    a, weight = options.pop("a"), options.pop("a_norm", None)
    values = (a if options.pop("halves", 1) == 1 else a.view(np.float32)).astype(np.float64)
    if weight is None:
        return values
    means = np.square(values).mean(-1, keepdims=True)
    return (values / np.sqrt(means + float(options["a_eps"])) * weight).astype(a.dtype).astype(np.float64)


# Of cases of normed rows, (rows, depth): one share of a lane and two, one warp for a row and several.
_NORMED = (1, 576), (8, 1024), (3, 1536), (8, 32), (1, 8192)


def _few_case(*sizes, tokens=None, halves=1, **rest) -> dict:
    """A declared case of few rows in 16 bits."""
    return case(*sizes, halves=halves, **rest) | ({"tokens": tokens} if tokens else {})


gemm_few_bf16 = _declare(
    "gemm_few_bf16",
    _normed_in_16_bits,
    lambda options: [_normed_a(options), options.pop("b").astype(np.float64)],
    TEXT.format(a="bf16 or f16", b="the same", alpha="") + FEW_TEXT + NORM_TEXT + LAST,
    block=1,
    derived=_few_axes("bf16"),
    cases=[
        *few_cases(_few_case),
        *(
            _few_case(rows, 40, depth, halves=halves, out_bf16=True, a_norm=True, a_eps=1e-5)
            for rows, depth in _NORMED
            for halves in (1, 2)
        ),
        # up to eight rows: a gate and a bias, a residual
        _few_case(5, 136, 96, width=68, out_bf16=True, bias_f32=True, activation=5, alpha=0.125),
        _few_case(7, 70, 96, 2, out_f32=True, residual_f16=True, alpha=0.5),
    ],
    draw=dict(a=_values, b=_values),
)


gemm_wide_bf16 = _declare(
    "gemm_wide_bf16",
    _in_16_bits,
    lambda options: [options.pop(x).astype(np.float64) for x in "ab"],
    TEXT.format(a="bf16 or f16", b="the same", alpha="") + FEW_TEXT + WIDE_TEXT + LAST,
    ends=_plain_ends,
    block=1,
    derived=_few_axes("bf16"),
    cases=wide_cases(lambda *sizes, of_tiles=0, leveled=False, **rest: case(*sizes, **rest)),
    draw=dict(a=_values, b=_values),
)


def _of_blocks(name: str, format: str, options: dict) -> np.ndarray:
    """Return the values of an operand in codes and scales, [matrices, rows, depth]."""
    block = BLOCK_FORMATS[format]
    codes, scales = options.pop(f"{name}_codes"), options.pop(f"{name}_scales")
    blocks, rows, first = (int(options[f"{name}_{x}"]) for x in ("blocks", "scale_rows", "first_row"))
    matrices, count, _ = codes.shape
    codes = codes[..., : blocks * block.block * block.bits // 8]
    where = first + np.arange(matrices)[:, None] * rows + np.arange(count)
    layout = ending_layout(format, (int(where.max()) + 1, blocks * block.block), bool(options[f"{name}_swizzled"]))
    plain = layout.linear_scales(scales[: int(np.prod(layout.scales_shape))].reshape(layout.scales_shape))[where]
    level = options.pop(f"{name}_global")
    values = block.decode(codes, plain, *([1.0] if block.two_level else [])).astype(np.float64)
    return values * (1.0 if level is None else float(level[0]))


def _draw_codes(format: str):
    """Examples of codes: any but NaN; if C is quantized, codes of small whole numbers."""
    element = BLOCK_FORMATS[format].element

    def draw(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
        count = (*shape[:-1], shape[-1] * 8 // element.bits)
        if axes["code_bytes"] > 1:
            codes = element.encode(rng.integers(-3, 4, count).astype(np.float32))
        else:
            codes = rng.integers(0, element.largest_code + 1, count, dtype=np.uint8)
            codes |= rng.integers(0, 2, count, dtype=np.uint8) << np.uint8(element.bits - 1)
        return pack(codes, element.bits)

    return draw


def _draw_scales(format: str, unusual: int | None = None):
    """Examples of scales: around 1; exactly 1 if C is quantized. unusual: ue8m0 scales are those of usual weights and
    activations, so that few rows are multiplied in f16, except in cases whose rows modulo 3 are this number."""
    two_level = BLOCK_FORMATS[format].two_level
    low, one, high = (0x30, 0x38, 0x40) if two_level else (0x7B, 0x7F, 0x83)

    def draw(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
        if axes["code_bytes"] > 1:
            return np.full(shape, one, np.uint8)
        below = 0 if two_level or unusual in (None, axes["rows"] % 3) else 8
        return rng.integers(low - below, high - below, shape, dtype=np.uint8)

    return draw


def _operand_sizes(name: str, format: str, matrices: int, rows: int, depth: int, swizzled=0, shared=0) -> dict:
    """Axes and scalars of an operand of a declared case. shared: whether all matrices are the first one."""
    block = BLOCK_FORMATS[format]
    layout = ending_layout(format, (rows if shared else matrices * rows, depth), bool(swizzled))
    sizes = dict(bytes=-(-layout.code_bytes // 16) * 16, scale_bytes=int(np.prod(layout.scales_shape)))
    return {f"{name}_{key}": value for key, value in sizes.items()} | {
        f"{name}_blocks": layout.padded // block.block,
        f"{name}_swizzled": swizzled,
        f"{name}_scale_rows": 0 if shared else rows,
    }


def block_case(
    a: str, b: str, rows=70, cols=100, depth=192, batch=1, swizzled=0, shared=0, leveled=False, **rest
) -> dict:
    """A declared case of a pair of formats. shared: B has one matrix for the whole batch. leveled: operands have
    factors also in formats without a global scale."""
    result = case(rows, cols, depth, batch, swizzled=swizzled, **rest)
    tokens, groups = (rest.get(name, result[name]) for name in ("tokens", "groups"))
    operands = {} if a == "bf16" else _operand_sizes("a", a, batch, tokens, depth, swizzled)
    operands |= _operand_sizes("b", b, groups, cols, depth, swizzled, shared)
    if a != "bf16":
        del result["depth"]
    two_level = {name for name, format in (("a", a), ("b", b)) if format == "nvfp4" or leveled and format != "bf16"}
    return result | operands | {f"{name}_global": True for name in sorted(two_level) if batch == 1}


def block_cases(a: str, b: str) -> list[dict]:
    """Cases of all kinds of operands: ragged sizes, one slice of K and many, tails of K, both layouts of scales,
    batches, groups; and of endings."""

    def one(*sizes, **rest):
        return block_case(a, b, *sizes, **rest)

    groups = dict(groups=4, starts=5, group_starts=True)
    tiles = tiles_of(a, b)
    return [
        *(one(tile=tile, out_f32=True) for tile in tiles),
        *(one(130, 270, 544, tile=tile, out_f32=True, swizzled=1) for tile in tiles),
        one(20, 72, 1312, tile=64, out_f32=True),
        one(5, 72, 96, 3, tile=64, out_bf16=True, bias_f32=True),
        one(35, 40, 96, 3, tile=256, out_f16=True, shared=1, swizzled=1, alpha=2.0**-13),
        one(1, 8, 32, tile=64, out_f32=True),
        one(150, 72, 160, **groups, tile=256, out_f32=True, alphas=True, alpha_count=4),
        one(40, 64, 64, **groups, tile=64, order=True, tokens=25, out_bf16=True, swizzled=1),
        *(one(66, 136, 96, tile=tile, width=68, out_f32=True, activation=5, alpha=0.125) for tile in tiles),
        *(one(70, 160, 160, tile=tile, ending=end, swizzled=1) for tile in tiles for end in ENDINGS),
    ]


def _declare_blocks(a: str, b: str, few: bool = False, wide: bool = False):
    """Declare the kernel for a pair with at least one block format. few: that for few rows; wide: for many of them."""
    half = a == "bf16"
    name = "gemm_" + "few_" * few + "wide_" * wide + a + (f"_{b}" if a != b else "")
    drawn = {"a": _values} if half else {}
    for unusual, (side, format) in enumerate([("b", b)] if half else [("a", a), ("b", b)], 1):
        scales = _draw_scales(format, unusual if few or wide else None)
        drawn |= {f"{side}_codes": _draw_codes(format), f"{side}_scales": scales, f"{side}_global": example_levels}

    def read(options):
        first = _normed_a(options) if half else _of_blocks("a", a, options)
        second = _of_blocks("b", b, options)
        depth = min(first.shape[-1], second.shape[-1])
        return first[..., :depth], second[..., :depth]

    normed = few and half
    halves = {"halves": 1} if normed else {}
    if wide:
        cases = wide_cases(
            lambda *sizes, of_tiles=0, **rest: block_case(a, b, *sizes, swizzled=of_tiles, **rest),
        )
    elif few:
        cases = few_cases(lambda *sizes, **rest: block_case(a, b, *sizes, **halves, **rest))
        cases.append(block_case(a, b, 12, 40, 160, **halves, out_f16=True, bias_f16=True, leveled=True))
        if not half and a != "nvfp4":
            more = dict(out_bf16=True, bias_bf16=True, alphas=True, leveled=True)
            cases.append(block_case(a, b, 5, 40, 160, **more))
    else:
        cases = block_cases(a, b)
    if normed:
        cases += [
            block_case(a, b, rows, 40, depth, halves=halves, out_f32=True, a_norm=True, a_eps=1e-5)
            for halves, sizes in ((1, _NORMED[::2]), (2, _NORMED[:2]))
            for rows, depth in sizes
        ]
        # a row in few lanes of a warp; a gate, a bias and factors of up to eight rows
        more = dict(halves=1, width=20, out_bf16=True, bias_bf16=True, activation=5, alpha=0.125, leveled=True)
        cases.append(block_case(a, b, 8, 40, 96, **more, a_norm=True, a_eps=1e-5))
    return _declare(
        name,
        _normed_half_in_blocks if normed else _half_in_blocks if half else _in_blocks,
        read,
        TEXT.format(a=a, b="the same" if a == b else b, alpha=" times the global scales")
        + BLOCKS_TEXT
        + FEW_TEXT * (few or wide)
        + WIDE_TEXT * wide
        + NORM_TEXT * normed
        + LAST,
        ends=_plain_ends if wide else _ends,
        block=BLOCK_FORMATS[b].block,
        variants={} if few or wide else dict(tile=tiles_of(a, b)),
        derived=_few_axes("bf16" if wide else a) if few or wide else _tile_axes(tiles_of(a, b)),
        cases=cases,
        draw=drawn,
    )


# (format of A, format of B) -> the kernel for whole tiles, the one for few rows, and the one for many of them.
BLOCK_GEMM = {pair: _declare_blocks(*pair) for pair in BLOCK_PAIRS}
FEW_BLOCK_GEMM = {pair: _declare_blocks(*pair, few=True) for pair in BLOCK_PAIRS}
WIDE_BLOCK_GEMM = {pair: _declare_blocks(*pair, wide=True) for pair in BLOCK_PAIRS}
