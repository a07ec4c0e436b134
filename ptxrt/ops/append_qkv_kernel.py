"""The declaration of the kernel that follows the projection of an attention layer: norms, rotation, and writes to a
cache."""

import math

import numpy as np

from ..blocks import BLOCK_FORMATS
from ..declaration import In, InOut, Out, Scalar, loose, strided, unaligned
from ..formats import bf16, f16, f32, i32, i64, u8
from ..kernel import kernel
from .append import UNCLAIMED, named_claims, own_slots, owners_of, written_rows
from .endings import ENDINGS
from .gemm_kernels import example_levels
from .produce_kernels import SHARE, THREADS
from .rotation_kernels import example_positions, turned

# Formats of caches, indexed by the scalar `holds`.
CACHE_FORMATS = ("bf16", "f16", "mxfp8", "mxfp4", "nvfp4")


# The most rounds of rows of a block, with which blocks of several waves fill the gaps at the end; and the least room of
# a GPU.
ROUNDS, MANY_BLOCKS = 12, 128


def qkv_blocks(tokens: int, rows: int, dim: int, room: int = 0) -> int:
    """Blocks of threads for `tokens` of `rows` rows each. room: how many run at a time.

    As many as that, each with whole tokens: a block loads the next rows while it processes some. On a machine with room
    for few, such as the emulator, a block takes as many tokens as its lanes hold, at least one.
    """
    lanes = 2
    while 2 * lanes * SHARE < dim:
        lanes *= 2
    at_once = THREADS // lanes
    if room < MANY_BLOCKS:
        return -(-tokens // max(at_once // rows, 1))
    return -(-tokens // max(min(-(-tokens // room), ROUNDS * at_once // rows), 1))


def _powers(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    """Examples of rows: one power of two with alternating signs, so that norms are exact."""
    signs = 1 - 2 * (np.arange(shape[-1]) % 2)
    return (signs * np.exp2(rng.integers(-2, 3, (*shape[:-1], 1)))).astype(member.dtype)


def _quarter_turns(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    """Examples of tables whose rotations are exact."""
    angles = rng.integers(0, 4, (shape[0], shape[1] // 2)) * (np.pi / 2)
    return np.round(np.concatenate([np.cos(angles), np.sin(angles)], axis=1)).astype(member.dtype)


def _weights(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    return rng.integers(1, 4, shape).astype(member.dtype)


def _case(holds: str, dim: int, width: int, ending: str | None = None, **rest) -> dict:
    """A declared case; holds: the format of the cache."""
    case = dict(tokens=9, heads=5, heads_kv=2, dim=dim, dim_v=dim, width=width, length=6, pages=5, page=7, count=35)
    case |= dict(level_count=1, code_bytes=1, blocks=1, k_blocks=1, v_blocks=1)
    case |= dict(holds=CACHE_FORMATS.index(holds), **rest)
    for side, size in (("k", dim), ("v", case["dim_v"])):
        block = BLOCK_FORMATS.get(holds)
        case[f"{side}_bytes"] = size * (block.bits if block else 16) // 8
        if block:
            case |= {f"{side}_blocks": size // block.block, f"{side}_scales": True}
    if ending is None:
        return case | dict(out=True)
    block = BLOCK_FORMATS[ending]
    blocks = -(-dim // block.block)
    sizes = dict(blocks=blocks, code_bytes=blocks * block.block * block.bits // 8)
    return case | dict(codes=True, scales=True, ending=ENDINGS.index(ending) + 1, **sizes)


@kernel(
    grid="grid",
    derived=dict(
        count=lambda axes: axes["pages"] * axes["page"],
        **{
            axis: lambda axes, axis=axis: axes.get(axis, 1)
            for axis in ("level_count", "code_bytes", "blocks", "k_blocks", "v_blocks")
        },
        grid=lambda axes: (
            axes.get("grid") or qkv_blocks(axes["tokens"], axes["heads"] + 2 * axes["heads_kv"], axes["dim"])
        ),
    ),
    cases=[
        _case("bf16", 64, 64, q_weight=True, k_weight=True, claims=True),
        _case("bf16", 64, 64, pairs=1, format="bf16"),
        _case("f16", 40, 22, first=3, pairs=1, k_mean=True, k_global=True),
        _case("mxfp8", 96, 64, "mxfp8", first=32, k_weight=True, claims=True, format="bf16"),
        _case("mxfp4", 128, 128, "mxfp4", q_weight=True, k_rule=3, v_rule=1, v_global=True, format="f16"),
        _case("nvfp4", 64, 32, "nvfp4", dim_v=160, pairs=1, out_global=True, k_global=True, claims=True, format="f32"),
        _case("nvfp4", 256, 256, heads=140, k_weight=True, claims=True, format="bf16"),
        _case("bf16", 64, 64, heads=140, q_weight=True, k_weight=True, claims=True, format="bf16"),
        # Rows of several warps: rotated whole, and in part.
        *(
            _case(holds, dim, width, ending, tokens=2, heads=1, heads_kv=1, q_weight=True, k_weight=True, **rest)
            for holds, dim, width, ending, rest in (
                ("bf16", 2048, 2048, None, dict(format="bf16", k_mean=True)),
                ("f16", 1056, 64, "nvfp4", dict(format="f16", out_global=True)),
                ("f16", 1056, 64, None, dict(format="f32")),
            )
        ),
    ],
    draw=dict(
        **{name: _powers for name in "qkv"},
        **{name: _weights for name in ("q_weight", "k_weight", "k_mean")},
        **{name: example_levels for name in ("k_global", "v_global", "out_global")},
        table=_quarter_turns,
        positions=example_positions,
        slots=lambda rng, member, shape, axes: own_slots(np.random.default_rng(0), member, shape, axes),
        claims=named_claims,
    ),
)
def append_qkv(
    q: In[f32 | f16 | bf16, "tokens heads dim", loose],
    k: In[f32 | f16 | bf16, "tokens heads_kv dim", loose],
    v: In[f32 | f16 | bf16, "tokens heads_kv dim_v", loose],
    table: In[f32, "length width", unaligned],
    positions: In[i32, "tokens", unaligned],
    slots: In[i64, "tokens", unaligned],
    claims: InOut[i32, "count"] = None,
    q_weight: In[f32, "dim", unaligned] = None,
    k_weight: In[f32, "dim", unaligned] = None,
    k_mean: In[f32, "heads_kv dim", unaligned] = None,
    k_global: In[f32, "heads_kv", unaligned] = None,
    v_global: In[f32, "heads_kv", unaligned] = None,
    out_global: In[f32, "level_count", unaligned] = None,
    *,
    k_codes: InOut[u8, "pages heads_kv page k_bytes", strided],
    v_codes: InOut[u8, "pages heads_kv page v_bytes", strided],
    k_scales: InOut[u8, "pages heads_kv page k_blocks", loose] = None,
    v_scales: InOut[u8, "pages heads_kv page v_blocks", loose] = None,
    out: Out[f32 | f16 | bf16, "tokens heads dim"] = None,
    codes: Out[u8, "tokens*heads code_bytes"] = None,
    scales: Out[u8, "tokens*heads blocks"] = None,
    first: Scalar[i32] = 0,
    pairs: Scalar[i32, 0, 1] = 0,
    eps: Scalar[f32] = 0.0,
    holds: Scalar[i32, 0, 1, 2, 3, 4],
    k_rule: Scalar[i32, 0, 1, 2, 3] = 0,
    v_rule: Scalar[i32, 0, 1, 2, 3] = 0,
    ending: Scalar[i32, 0, 1, 2, 3] = 0,
    rule: Scalar[i32, 0, 1, 2, 3] = 0,
):
    """Normalize and rotate the queries and keys of tokens; store the queries, write keys and values to their slots in
    pages.

    Rows of q, if q_weight is given, and of k, if k_weight is given, are normalized as by `norm_rows` with `eps` and
    rounded to their type. Then they are rotated as by `rope_rows` and rounded to their type. q is stored in `out`, or
    as codes and scales: ending 1 mxfp8, 2 mxfp4, 3 nvfp4 under `out_global` (1 if missing), with the scale rule of that
    number. k and v are written as by the kernels `append_NAME`: holds 0 bf16, 1 f16, 2 mxfp8, 3 mxfp4, 4 nvfp4. k_rule,
    v_rule, k_global, v_global and k_mean, which is subtracted from keys, mean the same as in these kernels.
    Tokens are not written if their slot is negative or past the end, or if claims[slot] is not their number; their
    queries are still stored. The claims of written slots are set back to 0x7f7fffff. Without claims no two tokens may
    have the same slot.
    """
    rounds = lambda y: y.astype(np.float32).astype(q.dtype).astype(np.float64)

    def finished(x, weight):
        y = x.astype(np.float64)
        if weight is not None:
            y = rounds(y / np.sqrt((y**2).mean(axis=-1, keepdims=True) + float(eps)) * weight.astype(np.float64))
        return rounds(turned(y, table, positions, int(first), pairs))

    queries = finished(q, q_weight)
    if out is not None:
        out[:] = queries
    else:
        block = BLOCK_FORMATS[ENDINGS[int(ending) - 1]]
        level = [1.0 if out_global is None else out_global[0]] if block.two_level else []
        rows = queries.astype(np.float32).reshape(-1, q.shape[-1])
        padded = np.pad(rows, [(0, 0), (0, scales.shape[1] * block.block - rows.shape[1])])
        codes[:], scales[:] = block.encode(padded, *level, block.rules[int(rule)])
    owners = owners_of(slots, claims, math.prod(k_codes.shape[::2][:2]))
    tokens, places = written_rows(slots, owners)
    page = k_codes.shape[2]
    name = CACHE_FORMATS[int(holds)]
    block = BLOCK_FORMATS.get(name)
    sides = [(finished(k, k_weight), k_mean, k_global, k_codes, k_scales, k_rule)]
    sides += [(v, None, v_global, v_codes, v_scales, v_rule)]
    for x, mean, global_scale, to, to_scales, which in sides:
        x = x.astype(np.float32)[tokens]
        x = x if mean is None else x - mean
        if global_scale is not None and not (block and block.two_level):
            x = x / global_scale[:, None]
        for head in range(x.shape[1]):
            at = (places // page, head, places % page)
            if block is None:
                kind = {"bf16": bf16, "f16": f16}[name].dtype
                to[at] = np.ascontiguousarray(x[:, head].astype(kind)).view(np.uint8)
                continue
            level = [1.0 if global_scale is None else global_scale[head]] if block.two_level else []
            to[at], to_scales[at] = block.encode(x[:, head], *level, block.rules[int(which)])
    if claims is not None:
        claims[places] = UNCLAIMED
