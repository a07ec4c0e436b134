"""The files of the examples' models: finding, checking and reading them."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import ptxrt


def model_file(name: str, folder: str, package: str) -> Path:
    """Return the path of a file in a package that `make models` installs; in the folder PTXRT_MODELS if that is set.

    FileError if the file is missing.
    """
    given = os.environ.get("PTXRT_MODELS")
    if given:
        path = Path(given) / name
    else:
        found = importlib.util.find_spec(package)  # without running the package
        path = Path(found.submodule_search_locations[0], folder, name) if found else None
    if path is None or not path.is_file():
        where = f"not in {given}, which PTXRT_MODELS names" if given else "not installed"
        raise ptxrt.FileError(f"the weights {name} are {where}; run `make models`")
    return path


@dataclass
class Weights:
    """The tensors of a model. read: returns one by name, as float32. digest: the hash of their file.

    config: the sizes and numbers of the model's forward pass. tokenizer: one of `tokenizers`; None if texts are given
    as token ids.
    """

    name: str
    read: Callable[[str], np.ndarray]
    config: Mapping[str, Any]
    digest: str
    tokenizer: Any = None

    def tensor(self, name: str, *shape: int) -> np.ndarray:
        """Return a tensor as float32; FileError if it is missing or has another shape."""
        try:
            found = self.read(name)
        except KeyError:
            raise ptxrt.FileError(f"{self.name} is not the model: it has no tensor {name}; run `make models`") from None
        if found.shape != shape:
            shapes = f"{name} has shape {list(found.shape)}, the model {list(shape)}"
            raise ptxrt.FileError(f"{self.name} is not the model: {shapes}; run `make models`")
        return found


def reader(name: str) -> Any:
    """Import a module that reads weights; FileError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ptxrt.FileError(
            f"the weights are read by {name}, which cannot be used ({error}); run `make models`"
        ) from None


def checked_digest(path: Path, wanted: str) -> str:
    """Return the SHA-256 of a file; FileError if it is not that of the model."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != wanted:
        came = f"{path} has SHA-256 {digest[:16]}.., the model's file {wanted[:16]}.."
        raise ptxrt.FileError(f"{came}: it is another file, or damaged; run `make models`")
    return digest


def gguf_weights(path: Path, digest: str, architecture: str, numbers: Mapping[str, str]) -> Weights:
    """Return the tensors of a GGUF file, its byte-level BPE tokenizer, and numbers of its header. numbers: name -> key
    in the header."""
    gguf, tokenizers = reader("gguf"), reader("tokenizers")
    file = gguf.GGUFReader(path)
    tensors = {x.name: x for x in file.tensors}
    contents = lambda name: file.fields[name].contents()
    words, merges, kinds = (contents(f"tokenizer.ggml.{x}") for x in ("tokens", "merges", "token_type"))
    bpe = tokenizers.models.BPE({word: i for i, word in enumerate(words)}, [tuple(pair.split(" ")) for pair in merges])
    tokenizer = tokenizers.Tokenizer(bpe)
    cut = tokenizers.pre_tokenizers
    digits = cut.Split(tokenizers.Regex(r"\p{N}"), "isolated")
    tokenizer.pre_tokenizer = cut.Sequence([digits, cut.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    control = [word for word, kind in zip(words, kinds) if kind == gguf.TokenType.CONTROL]
    tokenizer.add_special_tokens([tokenizers.AddedToken(word, normalized=False) for word in control])
    config = {key: contents(f"{architecture}.{name}") for key, name in numbers.items()}
    read = lambda name: gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type)
    return Weights(path.name, read, config, digest, tokenizer)


def check_text(name: str, text: str) -> None:
    """Raise ArgumentError, with the text's name, if a text has a character that UTF-8 does not encode: a surrogate.
    Python reads bytes that are no UTF-8 as such, for example in the arguments of a program."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        came = f"{name} has character {text[error.start]!r} at index {error.start}, which UTF-8 does not encode"
        raise ptxrt.ArgumentError(f"{came}; pass text in UTF-8, or decode its bytes by their encoding first") from None


def token_ids(tokenizer: Any, name: str, text: str, **options: Any) -> list[int]:
    """Return the token ids of a text; ArgumentError, with the text's name, if the tokenizer cannot read it.

    options: of the tokenizer's `encode`.
    """
    if tokenizer is None:
        raise ptxrt.ArgumentError(f"{name} is a string, but these weights have no tokenizer; pass token ids")
    check_text(name, text)
    return tokenizer.encode(text, **options).ids


def checked_ids(
    name: Callable[[int], str], texts: Sequence[Any], vocabulary: int, context: int, more: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return the token ids of all texts, int32 [tokens], one text behind the other, and the length of each text.
    ArgumentError, with the text's name, if a text has none, too many, or invalid ones.

    name: from the number of a text. more: the message's advice for too long a text.
    """
    texts = _arrays(name, texts)
    sizes = [ids.size for ids in texts]
    lengths = np.array(sizes, np.int32)
    if not texts:
        return np.zeros(0, np.int32), lengths
    kinds = {dtype.kind for dtype in {ids.dtype for ids in texts}}
    if not kinds <= {"i", "u"} or {ids.ndim for ids in texts} != {1} or not 1 <= min(sizes) <= max(sizes) <= context:
        for i, ids in enumerate(texts):
            if not ids.size:
                raise ptxrt.ArgumentError(f"{name(i)} is empty; pass one of at least one token")
            if ids.ndim != 1 or ids.dtype.kind not in "iu":
                came = f"{name(i)} has ids {ids.dtype} {list(ids.shape)}"
                raise ptxrt.ArgumentError(f"{came}; pass a string, or whole numbers of one axis")
            if len(ids) > context:
                raise ptxrt.ArgumentError(f"{name(i)} has {len(ids)} tokens, the context {context}; {more}")
    whole = texts[0] if len(texts) == 1 else np.concatenate(texts)
    if whole.min() < 0 or whole.max() >= vocabulary:
        i, ids = next((i, ids) for i, ids in enumerate(texts) if ids.min() < 0 or ids.max() >= vocabulary)
        came = ids.min() if ids.min() < 0 else ids.max()
        raise ptxrt.ArgumentError(f"{name(i)} has id {came}, which is none of the {vocabulary} tokens")
    return whole.astype(np.int32, copy=False), lengths


def _arrays(name: Callable[[int], str], texts: Sequence[Any]) -> list[np.ndarray]:
    """Return the token ids of each text as an array; ArgumentError, with the text's name, if they are none, such as
    rows of several lengths."""
    found = []
    for i, ids in enumerate(texts):
        try:
            found.append(np.asarray(ids))
        except (TypeError, ValueError) as error:
            came = f"{name(i)} is no array ({error})"
            raise ptxrt.ArgumentError(f"{came}; pass a string, or whole numbers of one axis") from None
    return found
