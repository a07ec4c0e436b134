"""The declarations of the kernels that write tokens to the pages of a cache."""

import numpy as np

from ..blocks import BLOCK_FORMATS
from ..declaration import In, InOut, Scalar, loose, strided, unaligned
from ..formats import bf16, f16, f32, i32, i64
from ..kernel import Kernel, kernel

# The claim of a free slot. It is above every token number; its bits are those of the largest float32.
UNCLAIMED = 0x7F7FFFFF

# The types of keys and values, each with arguments of its own. An entry contains the code once for each.
_TYPES = ("bf16", "f16", "f32")

_APPEND = """Write the keys and values of tokens, {what}, to their slots in pages.

A slot is page * page size + row. A token is skipped if its slot is negative or past the end, or if claims[slot] is not
its number. Without claims no two tokens may have the same slot. Keys and values have one of three types each; either
may be missing, with its codes. The mean is subtracted from them in float32.
{level}{quantized}
release: whether the claims of written slots are set back to 0x7f7fffff, as `claim_slots` requires."""


def written_rows(slots, claims) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that own their slots, and those slots."""
    tokens = np.array([i for i, slot in enumerate(slots) if 0 <= slot < len(claims) and claims[slot] == i], np.int64)
    return tokens, np.asarray(slots)[tokens].astype(np.int64)


def _slots(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    """Examples of slots: in any order, some twice, some negative or past the end."""
    slots = rng.integers(-2, axes["count"] + 2, shape, dtype=np.int64)
    return np.where(rng.random(shape) < 0.1, np.int64(2**40), slots)


def owners_of(slots, claims, count: int) -> np.ndarray:
    """The claims of `count` slots; if they are missing, those of slots that have one token each."""
    if claims is not None:
        return claims
    owners = np.full(count, UNCLAIMED, np.int32)
    for token, slot in enumerate(slots):
        if 0 <= slot < count:
            owners[slot] = token
    return owners


@kernel(
    grid="tokens",
    cases=[dict(tokens=1, count=4), dict(tokens=300, count=97)],
    draw=dict(slots=_slots, claims=lambda rng, member, shape, axes: np.full(shape, UNCLAIMED, np.int32)),
)
def claim_slots(slots: In[i64, "tokens", unaligned], claims: InOut[i32, "count"]):
    """Lower claims[slots[i]] to i for every token i with 0 <= slots[i] < count, so that the first token of a slot owns
    it.

    Tokens whose slot is negative or past the end are skipped. All claims must be 0x7f7fffff before the call."""
    for token, slot in enumerate(slots):
        if 0 <= slot < len(claims):
            claims[slot] = min(claims[slot], token)


def own_slots(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    """Examples of slots: four of five tokens have a slot of their own, which may be past the end; the
    others have -1."""
    return np.where(
        np.arange(shape[0]) % 5 == 3, -1, rng.permutation(np.arange(max(shape[0], axes["count"])))[: shape[0]]
    ).astype(np.int64)


def named_claims(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    """Examples of claims with which about half of the tokens own their slots."""
    claims = np.full(shape, UNCLAIMED, np.int32)
    slots = own_slots(np.random.default_rng(0), None, (axes["tokens"],), axes)
    for token, slot in enumerate(slots):
        if 0 <= slot < len(claims) and token % 3:
            claims[slot] = token
    return claims


def _finish(slots, claims, release, count: int, sides: list, divides: bool) -> None:
    """Write the rows of the tokens that own their slots, for each side (x in each type, mean, global scale, put) by
    put(slots, values), values [written tokens, heads, dim]."""
    owners = owners_of(slots, claims, count)
    tokens, places = written_rows(slots, owners)
    for types, mean, global_scale, put in sides:
        x = next((x for x in types if x is not None), None)
        if x is None:
            continue
        x = x.astype(np.float32)[tokens]
        if mean is not None:
            x = x - mean
        if divides and global_scale is not None:
            x = x / global_scale[:, None]
        put(places, x)
    if release and claims is not None:
        claims[places] = UNCLAIMED


def _declared(name: str, text: str, body, sizes: dict, cases: list) -> Kernel:
    """Declare a body as the kernel `append_NAME`."""
    body.__name__ = body.__qualname__ = f"append_{name}"
    body.__doc__ = text
    common = dict(tokens=9, heads=3, pages=5, page=7, count=35, claims=True)
    rest = [dict(common, **case) for case in cases]
    levels = lambda rng, member, shape, axes: rng.uniform(0.5, 2, shape).astype(np.float32)
    return kernel(
        grid="tokens",
        cases=[dict(common, dim=64, k_bf16=True, k_codes=True, release=1, **sizes), *rest],
        derived=dict(
            count=lambda axes: axes["pages"] * axes["page"],
            **{axis: lambda axes, axis=axis: axes.get(axis, 32) for axis in ("dim", "dim_v")},
        ),
        draw=dict(
            slots=lambda rng, member, shape, axes: own_slots(np.random.default_rng(0), member, shape, axes),
            claims=named_claims,
            k_global=levels,
            v_global=levels,
        ),
    )(body)


def _declare_plain() -> Kernel:
    """Declare the kernel for 16-bit caches."""

    def body(
        slots: In[i64, "tokens", unaligned],
        claims: InOut[i32, "count"] = None,
        k_codes: InOut[bf16 | f16, "pages heads page dim", strided] = None,
        v_codes: InOut[bf16 | f16, "pages heads page dim_v", strided] = None,
        k_bf16: In[bf16, "tokens heads dim", loose] = None,
        k_f16: In[f16, "tokens heads dim", loose] = None,
        k_f32: In[f32, "tokens heads dim", loose] = None,
        k_mean: In[f32, "heads dim", unaligned] = None,
        k_global: In[f32, "heads", unaligned] = None,
        v_bf16: In[bf16, "tokens heads dim_v", loose] = None,
        v_f16: In[f16, "tokens heads dim_v", loose] = None,
        v_f32: In[f32, "tokens heads dim_v", loose] = None,
        v_mean: In[f32, "heads dim_v", unaligned] = None,
        v_global: In[f32, "heads", unaligned] = None,
        *,
        release: Scalar[i32, 0, 1] = 1,
    ):
        def put_to(codes):
            def put(places, x):
                with np.errstate(over="ignore"):
                    codes[places // codes.shape[2], :, places % codes.shape[2]] = x.astype(codes.dtype)

            return put

        first = v_codes if k_codes is None else k_codes
        sides = [
            ((k_bf16, k_f16, k_f32), k_mean, k_global, put_to(k_codes)),
            ((v_bf16, v_f16, v_f32), v_mean, v_global, put_to(v_codes)),
        ]
        _finish(slots, claims, release, first.shape[0] * first.shape[2], sides, True)

    level = "The difference is divided by the global scale of its head."
    text = _APPEND.format(what="rounded to nearest, ties to even", quantized="", level=level)
    k, v = (dict.fromkeys([f"{side}_codes", f"{side}_mean", f"{side}_global"], True) for side in "kv")
    cases = [
        dict(dim=40, k_f32=True, **k, release=0, format="bf16"),
        dict(dim=200, k_f16=True, k_codes=True, k_mean=True, dim_v=32, v_bf16=True, v_codes=True, format="f16"),
        dict(dim=264, k_bf16=True, k_codes=True, dim_v=40, v_f32=True, **v, heads=9, format="bf16"),
        *({"dim_v": 64, f"v_{x}": True, **v} for x in _TYPES),
        *({"dim": 64, f"k_{x}": True, **k, "dim_v": 64, f"v_{x}": True, **v, "claims": False} for x in _TYPES),
    ]
    return _declared("bf16", text, body, {}, cases)


def _declare_blocks(format: str) -> Kernel:
    """Declare the kernel for caches in a block format."""
    block = BLOCK_FORMATS[format]
    packed = "" if block.bits == 8 else "/2"

    def body(
        slots: In[i64, "tokens", unaligned],
        claims: InOut[i32, "count"] = None,
        k_codes: InOut[block.element.storage, f"pages heads page dim{packed}", strided] = None,
        v_codes: InOut[block.element.storage, f"pages heads page dim_v{packed}", strided] = None,
        k_scales: InOut[block.scale, f"pages heads page dim/{block.block}", loose] = None,
        v_scales: InOut[block.scale, f"pages heads page dim_v/{block.block}", loose] = None,
        k_bf16: In[bf16, "tokens heads dim", loose] = None,
        k_f16: In[f16, "tokens heads dim", loose] = None,
        k_f32: In[f32, "tokens heads dim", loose] = None,
        k_mean: In[f32, "heads dim", unaligned] = None,
        k_global: In[f32, "heads", unaligned] = None,
        v_bf16: In[bf16, "tokens heads dim_v", loose] = None,
        v_f16: In[f16, "tokens heads dim_v", loose] = None,
        v_f32: In[f32, "tokens heads dim_v", loose] = None,
        v_mean: In[f32, "heads dim_v", unaligned] = None,
        v_global: In[f32, "heads", unaligned] = None,
        *,
        k_rule: Scalar[(i32, *range(len(block.rules)))] = 0,
        v_rule: Scalar[(i32, *range(len(block.rules)))] = 0,
        release: Scalar[i32, 0, 1] = 1,
    ):
        def put_to(codes, scales, global_scale, rule):
            def put(places, x):
                at = (places // codes.shape[2], slice(None), places % codes.shape[2])
                for head in range(codes.shape[1]):
                    level = [1.0 if global_scale is None else global_scale[head]] if block.two_level else []
                    row = (at[0], head, at[2])
                    codes[row], scales[row] = block.encode(x[:, head], *level, rule=block.rules[rule])

            return put

        first = v_codes if k_codes is None else k_codes
        sides = [
            ((k_bf16, k_f16, k_f32), k_mean, k_global, put_to(k_codes, k_scales, k_global, k_rule)),
            ((v_bf16, v_f16, v_f32), v_mean, v_global, put_to(v_codes, v_scales, v_global, v_rule)),
        ]
        _finish(slots, claims, release, first.shape[0] * first.shape[2], sides, not block.two_level)

    if block.two_level:
        level = "The global scale is that of the head, 1 if omitted."
    else:
        level = "The difference is divided by the global scale of its head."
    text = _APPEND.format(
        what=f"quantized to {format}",
        quantized=f" The bytes are those of `quantize_{format}` by its rule.",
        level=level,
    )
    k, v = (dict.fromkeys([f"{side}_codes", f"{side}_scales"], True) for side in "kv")
    most = len(block.rules) - 1
    cases = [
        dict(dim=32, k_f32=True, **k, k_mean=True, k_global=True, release=0),
        dict(dim=160, k_f16=True, **k, k_mean=True, dim_v=32, v_f32=True, **v, heads=9),
        dict(dim=544, k_bf16=True, **k),
        *(dict(dim=64, k_bf16=True, **k, k_rule=rule) for rule in range(1, most)),
        *({"dim_v": 64, f"v_{x}": True, **v, "v_mean": True, "v_global": True, "claims": False} for x in _TYPES),
        *({"dim": 32, f"k_{x}": True, **k, "dim_v": 64, f"v_{x}": True, **v, "v_rule": most} for x in _TYPES),
    ]
    sizes = dict(k_scales=True)
    return _declared(format, text, body, sizes, cases)


# Format of a cache -> the kernel that writes it.
APPEND = {"bf16": _declare_plain(), **{format: _declare_blocks(format) for format in ("mxfp8", "mxfp4", "nvfp4")}}
