"""The forward passes of the examples' models in float64 NumPy, written from their formulas, and their tokenizers.

Sources: Touvron et al., Llama 2 (norms, gates, heads that share keys); Su et al., RoFormer (rotation); Devlin et al.,
BERT, and Reimers and Gurevych, Sentence-BERT (encoder, mean of tokens); GGUF, ggml-common.h (blocks of Q4_1 and Q8_0);
Sennrich et al., and Radford et al., GPT-2 (byte-level pairs); Wu et al., WordPiece.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable

import ml_dtypes
import numpy as np

from ptxrt.ops.quantize import quantize_reference

# ---------------------------------------------------------------------------------------------------------------------
# Operands of products


def exact(x: np.ndarray, format: str, rule: str | None = None, role: str = "") -> np.ndarray:
    """An operand unchanged."""
    return x


def rounded(x: np.ndarray, format: str, rule: str | None = None, role: str = "activations") -> np.ndarray:
    """An operand rounded to a format, as float64; nvfp4 has one scale level for activations, two for weights."""
    x = np.asarray(x, np.float32)
    if format == "bf16":
        return x.astype(ml_dtypes.bfloat16).astype(np.float64)
    level = dict(global_scale=1.0) if format == "nvfp4" and role == "activations" else {}
    return np.asarray(quantize_reference(x, format, scale_rule=rule, pad=True, **level)).astype(np.float64)


def as_held(model, dtype: type = np.float64) -> Callable[[str, str, np.ndarray], np.ndarray]:
    """The operands of an example model's products: weights decoded as the model holds them, activations rounded here.

    For a single forward pass, which takes the weights of each product layer by layer.
    """
    layer = dict.fromkeys(model.products.formats, 0)

    def operand(product: str, role: str, x: np.ndarray) -> np.ndarray:
        if role == "activations":
            format = model.products.formats[product][0]
            return rounded(x, format, model.products.rule(format)).astype(dtype, copy=False)
        name = product if product in model.products.placed else f"{product}.{layer[product]}"
        layer[product] += 1
        return np.asarray(model.products.placed[name].to_numpy()).astype(dtype)

    return operand


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# ---------------------------------------------------------------------------------------------------------------------
# Language model


def rmsnorm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def turned(x: np.ndarray, positions: np.ndarray, base: float, style: str = "pairs") -> np.ndarray:
    """x [tokens, heads, dim] rotated: values 2 i and 2 i + 1 ("halves": i and i + dim / 2) by the angle position *
    base^(-2 i / dim)."""
    dim = x.shape[-1]
    angle = positions[:, None, None] * base ** (-2 * np.arange(dim // 2) / dim)
    first, second = (
        (slice(0, None, 2), slice(1, None, 2)) if style == "pairs" else (slice(0, dim // 2), slice(dim // 2, None))
    )
    a, b, out = x[..., first], x[..., second], np.empty_like(x)
    out[..., first], out[..., second] = a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)
    return out


def language_model(
    ids,
    read: Callable[[str], np.ndarray],
    c,
    *,
    operand: Callable[[str, str, np.ndarray], np.ndarray] | None = None,
    style: str = "pairs",
    dtype: type = np.float64,
    kept: Callable[[np.ndarray], np.ndarray] = lambda x: x,
) -> np.ndarray:
    """Logits, float64 [tokens, vocabulary]. operand(product, role, x) returns an operand as it is multiplied; role is
    "activations" or "weights". dtype float32 halves the time, for formats whose rounding errors are a thousand times
    larger. kept(x) rounds what lies in memory between products: q, k, v and the output of attention. The
    residual stream is not rounded."""
    operand = operand or (lambda product, role, x: x)
    get = lambda name: np.asarray(read(name), dtype)
    multiply = lambda product, x, w: operand(product, "activations", x) @ operand(product, "weights", w).T
    ids, dim = np.asarray(ids), c["dim"]
    positions, group = np.arange(len(ids)), c["heads"] // c["kv_heads"]
    embedding = get("token_embd.weight")
    x = embedding[ids]
    hidden = np.triu(np.full((len(ids), len(ids)), -np.inf, dtype), 1)
    for i in range(c["layers"]):
        w = lambda name: get(f"blk.{i}.{name}.weight")
        y = rmsnorm(x, w("attn_norm"), c["eps"])
        qkv = kept(multiply("qkv", y, np.concatenate([w("attn_q"), w("attn_k"), w("attn_v")])))
        qkv = qkv.reshape(len(ids), -1, dim)
        q, k, v = np.split(qkv, [c["heads"], c["heads"] + c["kv_heads"]], axis=1)
        q, k = (kept(turned(part, positions, c["base"], style)) for part in (q, k))
        heads = []
        for head in range(c["heads"]):
            scores = q[:, head] @ k[:, head // group].T / math.sqrt(dim) + hidden
            heads.append(kept(softmax(scores) @ v[:, head // group]))
        x = x + multiply("out", np.concatenate(heads, axis=1), w("attn_output"))
        y = rmsnorm(x, w("ffn_norm"), c["eps"])
        # Gate and up are interleaved, so that a scale of the whole matrix covers both.
        both = multiply("gate_up", y, np.stack([w("ffn_gate"), w("ffn_up")], axis=1).reshape(-1, y.shape[1]))
        gate, up = both[:, ::2], both[:, 1::2]
        x = x + multiply("down", gate / (1 + np.exp(-gate)) * up, w("ffn_down"))
    return multiply("logits", rmsnorm(x, get("output_norm.weight"), c["eps"]), embedding)


def perplexity(logits: np.ndarray, ids) -> float:
    p = softmax(logits[:-1].astype(np.float64))
    return float(np.exp(-np.log(p[np.arange(len(ids) - 1), np.asarray(ids)[1:]]).mean()))


def from_gguf_blocks(data: np.ndarray, kind: str) -> np.ndarray:
    """Values of rows of blocks of 32, uint8 [rows, bytes]: Q4_1 x = d q + m, Q8_0 x = d q; d and m are float16."""
    size = {"Q4_1": 20, "Q8_0": 34}[kind]
    blocks = np.ascontiguousarray(data).reshape(-1, size)
    d = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    if kind == "Q8_0":
        return (d * blocks[:, 2:].view(np.int8)).reshape(len(data), -1)
    m = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
    q = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)  # low nibbles are the first 16 values
    return (d * q + m).reshape(len(data), -1)


def byte_pairs(text: str, words: dict[str, int], merges: dict[tuple[str, str], int]) -> list[int]:
    """Token ids of a text without special tokens: single digits; words with the preceding space; byte pairs merged in
    order of rank."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    letter = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    found = []
    for piece in _pieces(text):
        parts = [letter[b] for b in piece.encode()]
        while len(parts) > 1:
            rank, i = min((merges.get(pair, 1 << 30), i) for i, pair in enumerate(zip(parts, parts[1:])))
            if rank == 1 << 30:
                break
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        found += [words[part] for part in parts]
    return found


def _pieces(text: str) -> list[str]:
    """Split a text into single digits and, between them, contractions, runs of letters or of other characters with one
    space before, and white space."""
    pieces, i = [], 0
    kind = lambda ch: (
        "space"
        if ch.isspace()
        else "digit"
        if unicodedata.category(ch)[0] == "N"
        else "letter"
        if ch.isalpha()
        else "sign"
    )
    while i < len(text):
        if kind(text[i]) == "digit":
            pieces, i = [*pieces, text[i]], i + 1
            continue
        contraction = next((c for c in ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d") if text.startswith(c, i)), "")
        if contraction:
            pieces, i = [*pieces, contraction], i + len(contraction)
            continue
        start = i
        while i < len(text) and kind(text[i]) == "space":
            i += 1
        follows = i < len(text) and kind(text[i]) != "digit"
        if i > start and follows:  # the last space joins the next word; other white space does not
            cut = i - 1 if text[i - 1] == " " or i - start > 1 else i
            if cut > start:
                pieces.append(text[start:cut])
            if cut < i and text[i - 1] != " ":
                pieces.append(text[cut:i])
                cut = i
            start = cut
        elif i > start:
            pieces.append(text[start:i])
            continue
        what = kind(text[i])
        end = i
        while end < len(text) and kind(text[end]) == what:
            end += 1
        pieces.append(text[start:end])
        i = end
    return pieces


# ---------------------------------------------------------------------------------------------------------------------
# Encoder


def erf(x: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erf, otypes=[np.float64])(x)


def layernorm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float) -> np.ndarray:
    centered = x - x.mean(-1, keepdims=True)
    return centered / np.sqrt((centered**2).mean(-1, keepdims=True) + eps) * weight + bias


def encoder(
    ids, read: Callable[[str], np.ndarray], c, *, operand: Callable[[str, str, np.ndarray], np.ndarray] | None = None
) -> np.ndarray:
    """The embedding of one text, float64 [width]: the mean of its tokens, normalized to length 1."""
    operand = operand or (lambda product, role, x: x)
    get = lambda name: np.asarray(read(name), np.float64)
    linear = lambda product, x, *names: (
        operand(product, "activations", x)
        @ operand(product, "weights", np.concatenate([get(f"{n}.weight") for n in names])).T
        + np.concatenate([get(f"{n}.bias") for n in names])
    )
    norm = lambda x, name: layernorm(x, get(f"{name}.weight"), get(f"{name}.bias"), c["eps"])
    ids, dim = np.asarray(ids), c["width"] // c["heads"]
    words, places, kinds = (get(f"embeddings.{name}_embeddings.weight") for name in ("word", "position", "token_type"))
    x = norm(words[ids] + places[: len(ids)] + kinds[0], "embeddings.LayerNorm")
    for i in range(c["layers"]):
        at = f"encoder.layer.{i}"
        qkv = linear("qkv", x, *(f"{at}.attention.self.{n}" for n in ("query", "key", "value")))
        q, k, v = (part.reshape(len(ids), -1, dim) for part in np.split(qkv, 3, axis=1))
        heads = [softmax(q[:, h] @ k[:, h].T / math.sqrt(dim)) @ v[:, h] for h in range(c["heads"])]
        x = norm(
            x + linear("out", np.concatenate(heads, axis=1), f"{at}.attention.output.dense"),
            f"{at}.attention.output.LayerNorm",
        )
        h = linear("up", x, f"{at}.intermediate.dense")
        h = h * (1 + erf(h / math.sqrt(2))) / 2
        x = norm(x + linear("down", h, f"{at}.output.dense"), f"{at}.output.LayerNorm")
    mean = x.mean(0)
    return mean / np.linalg.norm(mean)


def word_pieces(text: str, vocabulary: dict[str, int]) -> list[int]:
    """Token ids of a text with [CLS] before and [SEP] after: lower case without accents, longest known piece first."""
    text = "".join(ch for ch in unicodedata.normalize("NFD", text.lower()) if unicodedata.category(ch) != "Mn")
    words = "".join(
        f" {ch} " if unicodedata.category(ch)[0] == "P" or ch in "$+<=>^`|~" or "\u4e00" <= ch <= "\u9fff" else ch
        for ch in text
    )
    found = [vocabulary["[CLS]"]]
    for word in words.split():
        parts, start = [], 0
        while start < len(word):
            ends = (e for e in range(len(word), start, -1) if "##" * (start > 0) + word[start:e] in vocabulary)
            end = next(ends, None)
            if end is None:
                parts = [vocabulary["[UNK]"]]
                break
            parts.append(vocabulary["##" * (start > 0) + word[start:end]])
            start = end
        found += parts
    return [*found, vocabulary["[SEP]"]]
