"""Declarations of the row kernels between two matrix products: norms, activations and gates, with their references."""

import math

import numpy as np

from ..accuracy import Tolerance
from ..blocks import BLOCK_FORMATS
from ..declaration import Axis, In, Out, Scalar, loose, unaligned
from ..formats import bf16, f16, f32, i32, u8
from ..kernel import kernel
from .endings import ENDINGS, ending_layout
from .gemm_kernels import ACTIVATIONS, activate, example_levels

# Values that a lane holds of a row, its share, and lanes of a block.
SHARE, THREADS = 16, 256
# More blocks than this exceed what a GPU holds at a time.
_MANY_BLOCKS = 1024
# Rows of a tile of scales in the 128x4 layout.
SCALE_TILE_ROWS = 128


def written_rows(rows: int, swizzled: bool) -> int:
    """Return the rows to process: with scales in 128x4 tiles also those of padding."""
    return -(-rows // SCALE_TILE_ROWS) * SCALE_TILE_ROWS if swizzled else rows


# Blocks that a multiprocessor holds, `min_blocks` of the entries: for elements of 16 bits, and for float32.
HELD = dict(
    **dict(norm_rows=(2, 2), activate_rows=(4, 3), gate_rows=(3, 2), rope_rows=(2, 2), take_rows=(3, 3)),
    append_qkv=(2, 2),
)


def room_for(kernel: str, element_bytes: int, multiprocessors: int) -> int:
    """Return how many blocks of a kernel run at a time."""
    return HELD[kernel][element_bytes == 4] * multiprocessors


def _fewer(blocks: int, room: int, at_once: int | None = None) -> int:
    """Return a smaller number of blocks, each with the work of several, if there are many: a block loads its next rows
    while it works. at_once: the number, if it is not too large, with which no block has rows in turn.

    If the GPU has room for a quarter of them at most, as many as run at once, with equal work: no second wave begins,
    and none ends alone. A machine with room for few, such as the emulator, takes up to _MANY_BLOCKS, or an eighth.
    """
    if at_once is not None and at_once <= max(room, _MANY_BLOCKS // 8):
        return at_once
    if _MANY_BLOCKS // 8 <= room <= blocks // 4:
        return -(-blocks // -(-blocks // room))
    return max(min(blocks, _MANY_BLOCKS), -(-blocks // 8))


def share_blocks(rows: int, cols: int, room: int = 0) -> int:
    """Return the blocks of threads for rows whose shares are processed independently. room: how many run at a time.

    Two waves: blocks of equal work end at different times, and those of the second wave fill the gaps.
    """
    return _fewer(-(-rows * -(-cols // (2 * SHARE)) * 2 // THREADS), 2 * room)


def norm_blocks(rows: int, cols: int, room: int = 0) -> int:
    """Return the blocks of threads for norms: each row has as many lanes as hold it in registers, and each lane
    two threads if there are few rows."""
    lanes = 2
    while 2 * lanes * SHARE < cols and lanes < THREADS:
        lanes *= 2
    return _fewer(-(-rows * lanes // THREADS), room, -(-rows * 2 * lanes // THREADS))


def derived_blocks(blocks, rows: tuple[str, ...] = ("rows",)) -> dict:
    """Axes that are derived from others if a call does not give them.

    blocks: function of rows and columns that gives the blocks of threads. rows: the axes whose product is the number of
    rows.
    """
    count = lambda axes: math.prod(axes[axis] for axis in rows)
    return dict(
        level_count=lambda axes: axes.get("level_count", 1),
        code_bytes=lambda axes: axes.get("code_bytes", 1),
        scale_bytes=lambda axes: axes.get("scale_bytes", 1),
        blocks=lambda axes: axes.get("blocks", max(blocks(count(axes), axes["cols"]), 1)),
    )


def ending_case(rows: int, cols: int, ending: str | None = None, swizzled: int = 0, **rest) -> dict:
    """A declared case. ending: the block format of the result, or None."""
    axes = dict(rows=rows, cols=cols, level_count=1, code_bytes=1, scale_bytes=1)
    if ending:
        layout = ending_layout(ending, (rows, cols), bool(swizzled))
        axes |= dict(code_bytes=layout.code_bytes, scale_bytes=int(np.prod(layout.scales_shape)))
        rest |= dict(ending=ENDINGS.index(ending) + 1, swizzled=swizzled, codes=True, scales=True)
    return axes | rest


def _alternating(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    """Examples: normal values; if rows are quantized, one power of two for each row with alternating signs, so that
    norms are exact."""
    if axes.get("code_bytes", 1) > 1:
        signs = 1 - 2 * (np.arange(shape[1]) % 2)
        return (signs * np.exp2(np.arange(shape[0]) % 5 - 2.0)[:, None]).astype(member.dtype)
    return (rng.standard_normal(shape) * np.exp2(rng.integers(-3, 4, (shape[0], 1)))).astype(member.dtype)


def small_values(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    """Examples: normal values; if rows are quantized, small whole numbers, for which codes cannot differ."""
    if axes.get("code_bytes", 1) > 1:
        return rng.integers(-3, 4, shape).astype(member.dtype)
    return rng.standard_normal(shape, dtype=np.float32).astype(member.dtype)


def write(y: np.ndarray, outputs: dict, options: dict) -> None:
    """Write float64 rows [rows, cols] as kernels do: to the given float output, or quantized."""
    for name in ("out_f32", "out_f16", "out_bf16"):
        if outputs[name] is not None:
            outputs[name][:] = y.reshape(outputs[name].shape)
    if outputs["codes"] is not None:
        name = ENDINGS[int(options["ending"]) - 1]
        layout, block = ending_layout(name, y.shape, bool(options["swizzled"])), BLOCK_FORMATS[name]
        levels = options["out_global"]
        level = [] if not block.two_level else [1.0 if levels is None else levels[0]]
        padded = np.pad(y.astype(np.float32), [(0, 0), (0, layout.padded - layout.length)])
        outputs["codes"][:], plain = block.encode(padded, *level, block.rules[int(options["rule"])])
        outputs["scales"][:] = layout.stored_scales(plain).reshape(-1)


_PRODUCED = Tolerance("float32 arithmetic", relative_l2=4e-7)
OUTPUTS = dict(
    out_f32=_PRODUCED,
    out_f16=Tolerance("rounded to float16", relative_l2=5e-4),
    out_bf16=Tolerance("rounded to bfloat16", relative_l2=3e-3),
    total=Tolerance("rounded to x's type", relative_l2=3e-3),
)
_QUANTIZED = [
    ("mxfp8", 70, 96, 0, 2),
    ("mxfp4", 33, 90, 1, 3),
    ("nvfp4", 130, 144, 1, 1),
    ("nvfp4", 5, 40, 0, 0),
    ("mxfp8", 6, 40, 0, 0),
]


@kernel(
    grid="blocks",
    derived=derived_blocks(norm_blocks),
    cases=[
        ending_case(7, 100, out_f32=True, eps=1e-6),
        ending_case(3, 1, out_f32=True, eps=1e-6),
        ending_case(40, 384, out_bf16=True, weight_bf16=True, bias_bf16=True, eps=1e-12, centered=1),
        ending_case(40, 384, out_bf16=True, weight_bf16=True, eps=1e-6, blocks=1, format="bf16"),
        ending_case(
            40, 384, out_bf16=True, weight_bf16=True, bias_bf16=True, eps=1e-5, centered=1, blocks=1, format="bf16"
        ),
        ending_case(6, 576, out_f16=True, bias_f16=True, residual=True, eps=1e-5, rounds=1, format="f16"),
        ending_case(9, 577, out_f16=True, weight_f16=True, offset=1.0, residual=True, total=True, eps=1e-5, rounds=1),
        ending_case(5, 1536, out_f32=True, weight_f32=True, residual=True, total=True, eps=1e-5),
        ending_case(3, 8200, out_f32=True, weight_f32=True, bias_f32=True, eps=1e-5, centered=1, format="bf16"),
        ending_case(2, 9001, out_f32=True, bias_f16=True, residual=True, total=True, eps=1e-5, format="bf16"),
        ending_case(1, 9001, out_f16=True, residual=True, eps=1e-5, centered=1, rounds=1, format="f16"),
        *(
            ending_case(rows, cols, name, swizzled, rule=rule, eps=0.0)
            for name, rows, cols, swizzled, rule in _QUANTIZED
        ),
        ending_case(
            40, 800, out_bf16=True, weight_f32=True, bias_f32=True, eps=1e-5, centered=1, blocks=2, format="bf16"
        ),
        ending_case(
            5, 8192, out_bf16=True, weight_bf16=True, bias_bf16=True, eps=1e-5, centered=1, blocks=2, format="bf16"
        ),
        ending_case(5, 4096, out_f16=True, weight_f16=True, eps=0.5, blocks=2, format="f16"),
        ending_case(40, 96, out_f16=True, weight_f32=True, offset=1.0, eps=1e-6, blocks=1, format="f16"),
        ending_case(40, 96, "mxfp4", 1, eps=0.0, weight_f32=True, offset=0.5, blocks=1, format="bf16"),
        ending_case(40, 544, "nvfp4", eps=0.0, weight_bf16=True, centered=1, blocks=2, format="f16"),
        ending_case(10, 1200, "mxfp4", 1, rule=1, eps=0.0, weight_f32=True, centered=1, format="bf16"),
        ending_case(
            3, 8256, "nvfp4", 1, eps=0.0, out_global=True, weight_bf16=True, residual=True, total=True, format="f16"
        ),
        # Rows that two warps and more hold in registers, in each form; an eps at which values are small and roots are
        # those of numbers beyond 2^60.
        *(
            ending_case(2, cols, name, eps=2.0**124, centered=centered, format="bf16")
            for cols in (2080, 4128)
            for name in ENDINGS
            for centered in (0, 1)
        ),
        *(ending_case(3, 64, "nvfp4", rule=rule, eps=2.0**124, residual=True, format="bf16") for rule in (0, 1)),
    ],
    tolerance=OUTPUTS,
    draw=dict(
        x=_alternating,
        residual=_alternating,
        weight_f32=small_values,
        weight_f16=small_values,
        weight_bf16=small_values,
        out_global=example_levels,
    ),
)
def norm_rows(
    x: In[f32 | f16 | bf16, "rows cols", loose],
    residual: In[f32 | f16 | bf16, "rows cols", loose] = None,
    weight_f32: In[f32, "cols", unaligned] = None,
    weight_f16: In[f16, "cols", unaligned] = None,
    weight_bf16: In[bf16, "cols", unaligned] = None,
    bias_f32: In[f32, "cols", unaligned] = None,
    bias_f16: In[f16, "cols", unaligned] = None,
    bias_bf16: In[bf16, "cols", unaligned] = None,
    out_global: In[f32, "level_count", unaligned] = None,
    total: Out[f32 | f16 | bf16, "rows cols", loose] = None,
    out_f32: Out[f32, "rows cols", loose] = None,
    out_f16: Out[f16, "rows cols", loose] = None,
    out_bf16: Out[bf16, "rows cols", loose] = None,
    codes: Out[u8, "rows code_bytes"] = None,
    scales: Out[u8, "scale_bytes"] = None,
    *,
    eps: Scalar[f32],
    offset: Scalar[f32] = 0.0,
    centered: Scalar[i32, 0, 1] = 0,
    rounds: Scalar[i32, 0, 1] = 0,
    ending: Scalar[i32, 0, 1, 2, 3] = 0,
    rule: Scalar[i32, 0, 1, 2, 3] = 0,
    swizzled: Scalar[i32, 0, 1] = 0,
):
    """Normalize rows: y = (v - m) / sqrt(s + eps) (weight + offset) + bias, where v is x, or x + residual.

    m is the mean of the row if `centered`, else 0; s is the mean square of v - m. A missing weight counts as 1, a
    missing bias as 0. Arithmetic is float32, in an order that depends on `cols` alone: a row's bits depend on no other
    row. A row whose sum of squares overflows float32 becomes zeros. total: receives v in x's type. rounds: the sum with
    the residual, and the values that the weight multiplies, are rounded to x's type. An infinity or a NaN makes its row
    NaN; without `centered` finite values beside an infinity become zeros.

    Values are rounded once, to nearest, ties to even, to the type of the output among out_f32, out_f16 and out_bf16. Or
    they are quantized with the bytes of `quantize` of the float32 values: ending 1 mxfp8, 2 mxfp4, 3 nvfp4 under
    `out_global` (1 if missing), by the rule of that number, scales in 128x4 tiles if `swizzled`. A row that ends within
    a block is padded with zeros.
    """
    v = x.astype(np.float64)
    passed = lambda name: next((a.astype(np.float64) for a in options[name] if a is not None), None)
    options = dict(weight=(weight_f32, weight_f16, weight_bf16), bias=(bias_f32, bias_f16, bias_bf16))
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        if residual is not None:
            v = v + residual.astype(np.float64)
            v = v.astype(np.float32).astype(x.dtype).astype(np.float64) if rounds else v
        if total is not None:
            total[:] = v
        off = v - v.mean(axis=1, keepdims=True) if centered else v
        y = off / np.sqrt((off**2).mean(axis=1, keepdims=True) + np.float64(eps))
        y = y.astype(np.float32).astype(x.dtype).astype(np.float64) if rounds else y
        weight, bias = passed("weight"), passed("bias")
        y = y if weight is None else y * (weight + np.float64(offset))
        y = y if bias is None else y + bias
        outputs = dict(out_f32=out_f32, out_f16=out_f16, out_bf16=out_bf16, codes=codes, scales=scales)
        write(y, outputs, dict(ending=ending, rule=rule, swizzled=swizzled, out_global=out_global))


@kernel(
    grid="blocks",
    derived=derived_blocks(share_blocks),
    cases=[
        *(ending_case(7, 100, out_f32=True, activation=activation) for activation in range(1, 5)),
        ending_case(40, 384, out_bf16=True, activation=2),
        ending_case(70, 96, "mxfp8", 1, activation=1, blocks=1, format="bf16"),
        ending_case(3, 1, out_f16=True, activation=3),
        *(
            ending_case(rows, cols, name, swizzled, rule=rule, activation=1)
            for name, rows, cols, swizzled, rule in _QUANTIZED
        ),
        ending_case(3, 64, "nvfp4", out_global=True, activation=1),
        # Threads that have several shares in turn: rows with and without whole chunks.
        *(ending_case(70, cols, out_f32=True, activation=1, blocks=1, format="bf16") for cols in (40, 61)),
    ],
    tolerance=OUTPUTS,
    draw=dict(x=small_values, out_global=example_levels),
)
def activate_rows(
    x: In[f32 | f16 | bf16, "rows cols", loose],
    out_global: In[f32, "level_count", unaligned] = None,
    out_f32: Out[f32, "rows cols", loose] = None,
    out_f16: Out[f16, "rows cols", loose] = None,
    out_bf16: Out[bf16, "rows cols", loose] = None,
    codes: Out[u8, "rows code_bytes"] = None,
    scales: Out[u8, "scale_bytes"] = None,
    *,
    activation: Scalar[i32, 1, 2, 3, 4],
    ending: Scalar[i32, 0, 1, 2, 3] = 0,
    rule: Scalar[i32, 0, 1, 2, 3] = 0,
    swizzled: Scalar[i32, 0, 1] = 0,
):
    """Apply an activation to every value: 1 relu, 2 gelu by erf, 3 gelu by tanh, 4 silu; the functions of matrix
    products.

    Arithmetic is float32. NaN gives NaN, and so does -infinity in all but relu.

    Values are rounded once, to nearest, ties to even, to the type of the output among out_f32, out_f16 and out_bf16. Or
    they are quantized with the bytes of `quantize` of the float32 values: ending 1 mxfp8, 2 mxfp4, 3 nvfp4 under
    `out_global` (1 if missing), by the rule of that number, scales in 128x4 tiles if `swizzled`. A row that ends within
    a block is padded with zeros.
    """
    y = activate(x.astype(np.float64), ACTIVATIONS[int(activation)])
    outputs = dict(out_f32=out_f32, out_f16=out_f16, out_bf16=out_bf16, codes=codes, scales=scales)
    write(y, outputs, dict(ending=ending, rule=rule, swizzled=swizzled, out_global=out_global))


@kernel(
    grid="blocks",
    derived=derived_blocks(share_blocks),
    cases=[
        ending_case(7, 100, out_f32=True),
        ending_case(7, 100, out_f32=True, interleaved=1, limit=1.5, gate_alpha=1.702, offset=1.0),
        ending_case(40, 384, out_bf16=True, row_weights=True),
        ending_case(3, 1, out_f16=True, interleaved=1, rounds=1),
        *(
            ending_case(rows, cols, name, swizzled, rule=rule, gate_alpha=64.0, interleaved=rows % 2)
            for name, rows, cols, swizzled, rule in _QUANTIZED
        ),
        ending_case(3, 64, "nvfp4", out_global=True, gate_alpha=64.0, rounds=1),
        # Threads that have several shares in turn: rows with and without whole chunks.
        *(ending_case(70, cols, out_f32=True, blocks=1, format="bf16") for cols in (40, 61)),
    ],
    tolerance=OUTPUTS,
    draw=dict(x=small_values, out_global=example_levels),
)
def gate_rows(
    x: In[f32 | f16 | bf16, "rows 2*cols", loose],
    row_weights: In[f32, "rows", unaligned] = None,
    out_global: In[f32, "level_count", unaligned] = None,
    out_f32: Out[f32, "rows cols", loose] = None,
    out_f16: Out[f16, "rows cols", loose] = None,
    out_bf16: Out[bf16, "rows cols", loose] = None,
    codes: Out[u8, "rows code_bytes"] = None,
    scales: Out[u8, "scale_bytes"] = None,
    *,
    interleaved: Scalar[i32, 0, 1] = 0,
    limit: Scalar[f32] = math.inf,
    gate_alpha: Scalar[f32] = 1.0,
    offset: Scalar[f32] = 0.0,
    rounds: Scalar[i32, 0, 1] = 0,
    ending: Scalar[i32, 0, 1, 2, 3] = 0,
    rule: Scalar[i32, 0, 1, 2, 3] = 0,
    swizzled: Scalar[i32, 0, 1] = 0,
    cols: Axis,
):
    """Gate values: y = g sigmoid(gate_alpha g) (u + offset) row_weight, with g at most `limit` and u within [-limit,
    limit].

    g are the first `cols` columns of x and u the others; if `interleaved`, g is column 2 i and u column 2 i + 1.
    Arithmetic is float32, as in the activation swiglu of matrix products. y is NaN if g or u is NaN, or if g is
    -infinity. rounds: the result is rounded to x's type first.

    Values are rounded once, to nearest, ties to even, to the type of the output among out_f32, out_f16 and out_bf16. Or
    they are quantized with the bytes of `quantize` of the float32 values: ending 1 mxfp8, 2 mxfp4, 3 nvfp4 under
    `out_global` (1 if missing), by the rule of that number, scales in 128x4 tiles if `swizzled`. A row that ends within
    a block is padded with zeros.
    """
    pairs = x.astype(np.float64)
    if not interleaved:
        pairs = np.stack([pairs[:, :cols], pairs[:, cols:]], axis=-1).reshape(len(x), -1)
    y = activate(pairs, "swiglu", float(limit), float(gate_alpha), float(offset))
    with np.errstate(invalid="ignore", over="ignore"):
        y = y if row_weights is None else y * row_weights[:, None].astype(np.float64)
        y = y.astype(np.float32).astype(x.dtype).astype(np.float64) if rounds else y
    outputs = dict(out_f32=out_f32, out_f16=out_f16, out_bf16=out_bf16, codes=codes, scales=scales)
    write(y, outputs, dict(ending=ending, rule=rule, swizzled=swizzled, out_global=out_global))
