"""The matrix products of the examples' models: their formats, and their weights, quantized once and kept on disk."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from weights import Weights

import ptxrt
from ptxrt.blocks import BLOCK_FORMATS, BlockFormat
from ptxrt.ops.attention import ATTENTION
from ptxrt.ops.gemm import PRODUCTS
from ptxrt.ops.gemm_call import check_pair
from ptxrt.ops.operands import operand_rule

BF16 = np.dtype(ml_dtypes.bfloat16)
# The products of models, by (activations, weights): activations are bfloat16 or quantized.
PAIRS = {pair: product for pair, product in PRODUCTS.items() if "f16" not in pair}

# ---------------------------------------------------------------------------------------------------------------------
# Formats


def formats_of(products: tuple[str, ...], formats: Any) -> dict[str, tuple[str, str]]:
    """Return (activations, weights) of each product.

    formats: one word for both operands of all products, a pair of words, or a mapping from products to these; products
    missing in the mapping are bf16. ArgumentError for products that the model does not have, and for formats without a
    kernel.
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


def checked_rule(pairs: Mapping[str, tuple[str, str]], rule: Any) -> str | None:
    """Return the scale rule of the block formats of products; None is the default of each format. ArgumentError for a
    rule that one of these formats does not have, and for any rule if there are no block formats."""
    if rule is None:
        return None
    used = _block_formats(pairs.values())
    if used and isinstance(rule, str) and all(rule in block.rules for block in used):
        return rule
    there = "; ".join(f"{one.name} has {', '.join(map(repr, one.rules))}" for one in used or _block_formats(PAIRS))
    if not used:
        came = f"scale_rule is {rule!r}, but all formats are bf16, which has no scales"
        raise ptxrt.ArgumentError(f"{came}; leave it out, or pass other formats: {there}")
    advice = "pass one that all have" if len(used) > 1 else "pass one of these"
    raise ptxrt.ArgumentError(f"scale_rule is {rule!r}; {there}; {advice}, or leave it out")


def _block_formats(pairs: Iterable[tuple[str, str]]) -> list[BlockFormat]:
    """Return the block formats in pairs, each once."""
    names = dict.fromkeys(word for pair in pairs for word in pair)
    return [BLOCK_FORMATS[name] for name in names if name in BLOCK_FORMATS]


def attention_pair(words: str) -> tuple[str, str]:
    """Return the formats of both products of attention; ArgumentError without a kernel."""
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

    scale_rule: the rule of block formats, for activations and weights, as `checked_rule` returns it; None is the
    default of each format.
    """

    weights: Weights
    formats: dict[str, tuple[str, str]]
    scale_rule: str | None = None
    placed: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.one = ptxrt.to_device(np.float32(1))  # on the device, for graphs

    def place(self, product: str, name: str, make: Callable[[], np.ndarray]) -> None:
        """Copy the weights [N, K] of a product to the device. make: returns them as float32, called if they are not
        kept."""
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
        """Return the scale rule of a format; the default is the one of operands of products."""
        return None if format == "bf16" else self.scale_rule or operand_rule(format)

    def level(self, format: str) -> Any:
        """Return the global scale of activations: 1, so that no row depends on others."""
        return self.one if format == "nvfp4" else None

    def ending(self, product: str) -> dict[str, Any]:
        """Return the arguments with which a producer outputs the activations of a product in its format."""
        format = self.formats[product][0]
        if format == "bf16":
            return {}
        return dict(format=format, scale_rule=self.rule(format), global_scale=self.level(format))

    def multiply(self, product: str, x: Any, name: str, *, into: str | None = None, **options: Any) -> Any:
        """Multiply activations by weights; the activations are quantized here if their producer has not done so.

        into: the product that uses the result; the result has the format of its activations. Other results are
        bfloat16, unless out_dtype says otherwise.
        """
        format = self.formats[product][0]
        if not isinstance(x, ptxrt.QuantizedArray):
            options |= dict(a_format=format, a_scale_rule=self.rule(format), a_global_scale=self.level(format))
        ending = {} if into is None else self.ending(into)
        if not ending:
            options.setdefault("out_dtype", BF16)
        options |= {f"out_{key}": value for key, value in ending.items()}
        return ptxrt.matmul(x, self.placed[name], **options)

    @property
    def nbytes(self) -> int:
        """The bytes of all weights on the device."""
        return sum(x.nbytes for x in self.placed.values())

    @cached_property
    def folder(self) -> Path | None:
        """The folder of kept quantized weights, by file, scale rule and version; None if it cannot be made."""
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
    """Return PTXRT_CACHE, else the user's cache folder."""
    given = os.environ.get("PTXRT_CACHE")
    if given:
        return Path(given)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local", "ptxrt")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "ptxrt"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "ptxrt")


def _loaded(path: Path) -> Any:
    """Return the weights kept in a file; None if there are none, or they are damaged."""
    try:
        return ptxrt.QuantizedArray.load(path)
    except ptxrt.FileError:
        return None


def _save(packed: Any, path: Path | None) -> None:
    """Write quantized weights atomically. A folder that cannot be written is not an error; it only costs time."""
    try:
        if path is not None:
            packed.save(path)
    except ptxrt.FileError as error:
        print(f"quantized weights are not kept: {error}", file=sys.stderr)
