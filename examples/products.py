"""The products of the examples' models: which formats they multiply in, and their weights, quantized once and kept."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from weights import Weights

import ptxrt
from ptxrt.ops.attention import ATTENTION
from ptxrt.ops.gemm import PRODUCTS
from ptxrt.ops.gemm_call import check_pair
from ptxrt.ops.operands import operand_rule

BF16 = np.dtype(ml_dtypes.bfloat16)
# What a model multiplies: its activations are bfloat16 or quantized. (activations, weights)
PAIRS = {pair: product for pair, product in PRODUCTS.items() if "f16" not in pair}

# ---------------------------------------------------------------------------------------------------------------------
# Formats


def formats_of(products: tuple[str, ...], formats: Any) -> dict[str, tuple[str, str]]:
    """(activations, weights) of each product.

    formats: one word for both operands of all products, a pair of words, or a mapping from products to these; products
    that the mapping leaves out are bf16. ArgumentError for products that the model does not have, and for formats that
    no kernel multiplies.
    """
    named = dict(formats) if isinstance(formats, Mapping) else dict.fromkeys(products, formats)
    for name in named.keys() - set(products):
        near = get_close_matches(str(name), products, 1)
        there = f"did you mean {near[0]!r}? " if near else ""
        raise ptxrt.ArgumentError(f"formats: there is no product {name!r}; {there}there are {', '.join(products)}")
    found = {}
    for product in products:
        given = named.get(product, "bf16")
        pair = (given, given) if isinstance(given, str) else tuple(given) if isinstance(given, (tuple, list)) else ()
        if len(pair) != 2 or not all(isinstance(word, str) for word in pair):
            raise ptxrt.ArgumentError(f"formats of {product}: {given!r} came; pass a format, or (activations, weights)")
        try:
            check_pair(PAIRS, *pair)
        except ptxrt.ArgumentError as error:
            raise ptxrt.ArgumentError(f"formats of {product}: {str(error).removeprefix('matmul: ')}") from None
        found[product] = pair
    return found


def attention_pair(words: str) -> tuple[str, str]:
    """The formats of both products of attention; ArgumentError where no kernel has them."""
    qk, _, pv = str(words).partition("+")
    pair = qk, pv or qk
    known = [key[:2] for key in ATTENTION if key[2] is None]
    if pair not in known:
        nearest = max(known, key=lambda one: (one[0] == pair[0]) + (one[1] == pair[1]))
        named = ", ".join("+".join(one) for one in known)
        near = "+".join(nearest)
        raise ptxrt.ArgumentError(
            f"attention: there is no kernel for {'+'.join(pair)}; nearest: {near}. There are {named}"
        )
    return pair


@dataclass
class Products:
    """The weights of a model's products on the device, and how their activations are quantized.

    scale_rule: of the block formats, for activations and weights; the formats' own where None.
    """

    weights: Weights
    formats: dict[str, tuple[str, str]]
    scale_rule: str | None = None
    placed: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.one = ptxrt.to_device(np.float32(1))  # where graphs find it

    def place(self, product: str, name: str, make: Callable[[], np.ndarray]) -> None:
        """Bring the weights [N, K] of a product to the device; `make` gives them as float32 where they are not kept."""
        format = self.formats[product][1]
        if format == "bf16":
            self.placed[name] = ptxrt.to_device(make().astype(BF16))
            return
        kept = self.folder and self.folder / f"{name}.{format}.npz"
        packed = _loaded(kept) if kept else None
        if packed is None:
            device = ptxrt.to_device(make())
            packed = ptxrt.quantize(device, format, scale_rule=self.rule(format)).to_numpy()
            _save(packed, kept)
        arrays = {key: ptxrt.to_device(x) for key, x in packed.arrays.items()}
        self.placed[name] = packed.with_arrays(arrays)

    def rule(self, format: str) -> str | None:
        """The scale rule of a format: where nothing else was asked, the one that products quantize operands by."""
        return None if format == "bf16" else self.scale_rule or operand_rule(format)

    def level(self, format: str) -> Any:
        """The global scale of activations: 1, a single level, so that rows do not know each other."""
        return self.one if format == "nvfp4" else None

    def ending(self, product: str) -> dict[str, Any]:
        """What makes a producer give the activations of a product in its format."""
        format = self.formats[product][0]
        if format == "bf16":
            return {}
        return dict(format=format, scale_rule=self.rule(format), global_scale=self.level(format))

    def multiply(self, product: str, x: Any, name: str, *, into: str | None = None, **options: Any) -> Any:
        """`matmul` of activations by weights; the activations are quantized here where their producer has not.

        into: the product that takes the result, in the format of its activations.
        """
        format = self.formats[product][0]
        if format != "bf16" and not isinstance(x, ptxrt.QuantizedArray):
            options |= dict(a_format=format, a_scale_rule=self.rule(format), a_global_scale=self.level(format))
        if into is not None:
            options |= {f"out_{key}": value for key, value in self.ending(into).items()}
        return ptxrt.matmul(x, self.placed[name], **options)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights of products on the device."""
        return sum(x.nbytes for x in self.placed.values())

    @cached_property
    def folder(self) -> Path | None:
        """Where quantized weights are kept, by file, scale rule and version; None where no folder can be had."""
        key = f"{self.weights.digest[:16]}-{self.scale_rule or 'default'}-{ptxrt.__version__}"
        try:
            folder = cache_folder() / key
            folder.mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError) as error:
            print(f"quantized weights are not kept: {error}", file=sys.stderr)
            return None
        return folder


# ---------------------------------------------------------------------------------------------------------------------
# Kept weights


def cache_folder() -> Path:
    """PTXRT_CACHE, else the folder of this user for what can be made again."""
    given = os.environ.get("PTXRT_CACHE")
    if given:
        return Path(given)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local", "ptxrt")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "ptxrt"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "ptxrt")


def _loaded(path: Path) -> Any:
    """What is kept in a file; None where there is none, or it is damaged."""
    try:
        return ptxrt.QuantizedArray.load(path)
    except ptxrt.FileError:
        return None


def _save(packed: Any, path: Path | None) -> None:
    """Keep quantized weights, whole or not at all; a folder that cannot be written costs time alone."""
    try:
        if path is not None:
            packed.save(path)
    except ptxrt.FileError as error:
        print(f"quantized weights are not kept: {error}", file=sys.stderr)
