"""The models of examples/ in plain PyTorch, for benchmarks/models_vs_torch.py.

get(name, *shape) returns a tensor of the weights as float32, as `Weights.tensor` of examples/weights.py does.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


def _filled(module: nn.Module, **values: np.ndarray) -> nn.Module:
    """Set a module's parameters and return it."""
    with torch.no_grad():
        for name, value in values.items():
            getattr(module, name).copy_(torch.from_numpy(np.array(value, np.float32)))
    return module


def _linear(weight: np.ndarray, bias: np.ndarray | None = None) -> nn.Module:
    given = dict(weight=weight) if bias is None else dict(weight=weight, bias=bias)
    return _filled(nn.Linear(*weight.shape[::-1], bias=bias is not None), **given)


def _embedding(weight: np.ndarray) -> nn.Module:
    return _filled(nn.Embedding(*weight.shape), weight=weight)


class EncoderLayer(nn.Module):
    """x = norm(x + out(attention(x))), then x = norm(x + down(gelu(up(x))))."""

    def __init__(self, get, c, at: str):
        super().__init__()
        width, hidden, self.heads = c["width"], c["hidden"], c["heads"]
        dense = lambda name, n, k: _linear(get(f"{name}.weight", n, k), get(f"{name}.bias", n))
        whole = lambda part, *shape: np.concatenate(
            [get(f"{at}.attention.self.{n}.{part}", *shape) for n in ("query", "key", "value")]
        )
        self.qkv = _linear(whole("weight", width, width), whole("bias", width))
        self.out = dense(f"{at}.attention.output.dense", width, width)
        self.up = dense(f"{at}.intermediate.dense", hidden, width)
        self.down = dense(f"{at}.output.dense", width, hidden)
        self.first = _norm(get, f"{at}.attention.output.LayerNorm", c)
        self.second = _norm(get, f"{at}.output.LayerNorm", c)

    def forward(self, x):
        texts, tokens, width = x.shape
        q, k, v = self.qkv(x).view(texts, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(texts, tokens, width)
        x = self.first(x + self.out(a))
        return self.second(x + self.down(F.gelu(self.up(x))))


def _norm(get, name: str, c) -> nn.Module:
    width = c["width"]
    values = dict(weight=get(f"{name}.weight", width), bias=get(f"{name}.bias", width))
    return _filled(nn.LayerNorm(width, eps=c["eps"]), **values)


class Encoder(nn.Module):
    """all-MiniLM-L6-v2: ids int64 [texts, tokens], texts of one length, to embeddings float32 [texts, width]."""

    def __init__(self, get, c):
        super().__init__()
        table = lambda name, rows: get(f"embeddings.{name}_embeddings.weight", rows, c["width"])
        self.words = _embedding(table("word", c["vocabulary"]))
        self.places = _embedding(table("position", c["context"]) + table("token_type", 2)[0])
        self.norm = _norm(get, "embeddings.LayerNorm", c)
        self.layers = nn.ModuleList(EncoderLayer(get, c, f"encoder.layer.{i}") for i in range(c["layers"]))

    def forward(self, ids):
        x = self.norm(self.words(ids) + self.places.weight[: ids.shape[1]])
        for layer in self.layers:
            x = layer(x)
        return F.normalize(x.float().mean(1), dim=-1)


class LanguageLayer(nn.Module):
    """x += out(attention(norm(x))), then x += down(silu(gate(norm(x))) * up(norm(x)))."""

    def __init__(self, get, c, i: int, context: int):
        super().__init__()
        self.c, width, hidden, dim = c, c["width"], c["hidden"], c["dim"]
        at = lambda name, *shape: get(f"blk.{i}.{name}.weight", *shape)
        rows = dict(q=c["heads"] * dim, k=c["kv_heads"] * dim, v=c["kv_heads"] * dim)
        self.qkv = _linear(np.concatenate([at(f"attn_{name}", n, width) for name, n in rows.items()]))
        self.out = _linear(at("attn_output", width, rows["q"]))
        self.gate_up = _linear(np.concatenate([at(f"ffn_{name}", hidden, width) for name in ("gate", "up")]))
        self.down = _linear(at("ffn_down", width, hidden))
        self.first, self.second = (_rms_norm(at(f"{name}_norm", width), c) for name in ("attn", "ffn"))
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, c["kv_heads"], context, dim))

    def forward(self, x, cos, sin, positions, keys: int | None, mask):
        """Run the layer on x [1, tokens, width] at positions. keys: the number of keys in the cache including these
        tokens; None uses the whole cache with a mask."""
        c = self.c
        qkv = self.qkv(self.first(x)).view(1, x.shape[1], -1, c["dim"])
        qk, v = qkv.split([c["heads"] + c["kv_heads"], c["kv_heads"]], 2)
        a, b = qk.unflatten(-1, (-1, 2)).unbind(-1)
        qk = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2).transpose(1, 2)
        q, k = qk.split([c["heads"], c["kv_heads"]], 1)
        self.keys.index_copy_(2, positions, k)
        self.values.index_copy_(2, positions, v.transpose(1, 2))
        if keys is None:
            k, v = (part.repeat_interleave(c["heads"] // c["kv_heads"], 1) for part in (self.keys, self.values))
            a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            k, v, causal = self.keys[:, :, :keys], self.values[:, :, :keys], x.shape[1] > 1
            a = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        x = x + self.out(a.transpose(1, 2).reshape(1, x.shape[1], -1))
        gate, up = self.gate_up(self.second(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def _rms_norm(weight: np.ndarray, c) -> nn.Module:
    return _filled(nn.RMSNorm(len(weight), eps=c["eps"]), weight=weight)


class LanguageModel(nn.Module):
    """SmolLM2-135M: token ids int64 [tokens] that follow those in its cache, to logits [vocabulary] of the last one."""

    def __init__(self, get, c, context: int):
        super().__init__()
        self.embedding = _embedding(get("token_embd.weight", c["vocabulary"], c["width"]))
        self.norm = _rms_norm(get("output_norm.weight", c["width"]), c)
        self.layers = nn.ModuleList(LanguageLayer(get, c, i, context) for i in range(c["layers"]))
        angle = np.arange(context)[:, None] * c["base"] ** (-np.arange(0, c["dim"], 2) / c["dim"])
        for name, of in dict(cosines=np.cos, sines=np.sin).items():
            self.register_buffer(name, torch.from_numpy(of(angle)).float()[:, None])
        self.register_buffer("places", torch.arange(context))

    def forward(self, ids, positions, keys: int | None = None):
        """keys: the number of keys in the cache including these tokens, from position 0 on; None if
        positions decide."""
        cos, sin = self.cosines[positions], self.sines[positions]
        mask = self.places <= positions[:, None] if keys is None else None
        x = self.embedding(ids)[None]
        for layer in self.layers:
            x = layer(x, cos, sin, positions, keys, mask)
        return F.linear(self.norm(x[0, -1]), self.embedding.weight)
