"""Small models of the examples' classes with random weights, and the real models where they are installed."""

import functools
import hashlib
import math
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import weights

import model_reference as reference
import ptxrt

BF16 = ml_dtypes.bfloat16


class Letters:
    """A tokenizer with one token per character; the last ids stand for the special tokens of the chat template."""

    def __init__(self, vocabulary: int):
        self.end = vocabulary - 1

    def encode(self, text, add_special_tokens=True):
        for name in ("<|im_start|>", "<|im_end|>"):
            text = text.replace(name, chr(self.end))
        return SimpleNamespace(ids=[ord(ch) % self.end if ord(ch) < self.end else self.end for ch in text])

    def decode(self, ids):
        return "".join(chr(i) for i in ids)

    def token_to_id(self, name):
        return self.end


def drawn(name: str, config: dict, shapes: dict, seed: int) -> weights.Weights:
    """Random weights: matrices that preserve the magnitude of their input, norms about 1."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for key, shape in shapes.items():
        if key.endswith("bias"):
            x = 0.2 * rng.standard_normal(shape)
        elif len(shape) == 1:
            x = 1 + 0.2 * rng.standard_normal(shape)
        else:
            x = rng.standard_normal(shape) * (1 if "embd" in key or "embeddings" in key else 1.5 / math.sqrt(shape[-1]))
        tensors[key] = x.astype(BF16).astype(np.float32)
    digest = hashlib.sha256(b"".join(x.tobytes() for x in tensors.values())).hexdigest()
    return weights.Weights(name, tensors.__getitem__, config, digest, Letters(config["vocabulary"]))


def small_language_model(seed: int = 0) -> weights.Weights:
    c = dict(
        layers=2, width=96, hidden=160, heads=3, kv_heads=1, dim=64, vocabulary=200, context=256, base=1000.0, eps=1e-5
    )
    shapes = {"token_embd.weight": (c["vocabulary"], c["width"]), "output_norm.weight": (c["width"],)}
    for i in range(c["layers"]):
        q, kv = c["heads"] * c["dim"], c["kv_heads"] * c["dim"]
        sizes = dict(
            attn_norm=(c["width"],),
            ffn_norm=(c["width"],),
            attn_q=(q, c["width"]),
            attn_k=(kv, c["width"]),
            attn_v=(kv, c["width"]),
        )
        sizes |= dict(
            attn_output=(c["width"], q),
            ffn_gate=(c["hidden"], c["width"]),
            ffn_up=(c["hidden"], c["width"]),
            ffn_down=(c["width"], c["hidden"]),
        )
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in sizes.items()}
    return drawn("small.gguf", c, shapes, seed)


def small_encoder(seed: int = 0) -> weights.Weights:
    c = dict(layers=2, width=96, hidden=160, heads=3, vocabulary=200, context=64, eps=1e-12)
    width, hidden = c["width"], c["hidden"]
    tables = dict(word=c["vocabulary"], position=c["context"], token_type=2)
    shapes = {f"embeddings.{name}_embeddings.weight": (rows, width) for name, rows in tables.items()}
    dense = {}
    for i in range(c["layers"]):
        at = f"encoder.layer.{i}"
        dense |= {f"{at}.attention.self.{name}": (width, width) for name in ("query", "key", "value")}
        dense |= {
            f"{at}.attention.output.dense": (width, width),
            f"{at}.intermediate.dense": (hidden, width),
            f"{at}.output.dense": (width, hidden),
        }
        dense |= {f"{at}.{name}.LayerNorm": (width,) for name in ("attention.output", "output")}
    for name, shape in {**dense, "embeddings.LayerNorm": (width,)}.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return drawn("small.safetensors", c, shapes, seed)


TEXT = [(7 * i * i + 3 * i) % 199 for i in range(40)]


@pytest.fixture(autouse=True)
def folder_of_quantized_weights(tmp_path, monkeypatch):
    """Keep quantized weights in a temporary folder, not in the user's."""
    monkeypatch.setenv("PTXRT_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept"


def relative_l2(got, want) -> float:
    return float(np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want))


def operands(model):
    """How a model multiplies, for the reference, in NumPy."""

    def operand(product, role, x):
        format = model.products.formats.get(product, ("bf16", "bf16"))[role == "weights"]
        return reference.rounded(x, format, model.products.rule(format), role)

    return operand


@pytest.fixture(scope="module")
def real():
    """The weights of both real models, each read once."""

    @functools.lru_cache
    def opened(module):
        try:
            there = module.load()
        except (ImportError, ptxrt.FileError) as error:
            if isinstance(error, ImportError) or str(error).startswith("the weights"):
                pytest.skip("the models' weights are not here: run `make models`")
            raise
        there.read = functools.lru_cache(maxsize=None)(there.read)
        return there

    return opened
