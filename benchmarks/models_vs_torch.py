"""The models of examples/, compared with the same models in plain PyTorch in bf16, eager and compiled, in one run.

    python benchmarks/models_vs_torch.py [--random] [--machine portable] [--only passages] [--torch eager] [--json]

Needs PyTorch for CUDA. It measures a batch of passages and one sentence (a graph on our side) through the sentence
encoder, and generation by the language model at batch 1 after a prompt. Every call begins with token ids on the host
and ends with its result there, so host time counts on both sides; the device times of our graphs are reported too.
Weights are those of `make models`; --random draws them in the same shapes. Docs: docs/benchmarks.md.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

import minilm
import peers
import smollm2
from weights import Weights

import ptxrt
from ptxrt.bench.timing import Clock, about, title, turns
from ptxrt.describe import text_table

# The sizes of the language model, as in its file.
LANGUAGE = dict(layers=30, width=576, hidden=1536, heads=9, kv_heads=3, dim=64, vocabulary=49152, context=8192)
LANGUAGE |= dict(base=1e5, eps=1e-5)
EAGER, COMPILED, GRAPHS = "eager", "compile", "reduce-overhead"
TORCH = {EAGER: "PyTorch eager", COMPILED: "torch.compile", GRAPHS: "torch.compile, reduce-overhead"}
# Formats of activations and weights for generation.
GENERATED = {"ptxrt bf16": "bf16", "ptxrt nvfp4 weights": ("bf16", "nvfp4")}
CASES = ("passages", "sentence", "generation")


@dataclass(frozen=True)
class Sizes:
    """The sizes of the cases: a batch of passages of one length, a sentence, tokens after a prompt."""

    passages: int = 256
    length: int = 256
    sentence: int = 16
    prompt: int = 32
    tokens: int = 64
    context: int = 1024


@dataclass(frozen=True)
class Side:
    """One way to run a case. call: returns the result on the host.

    device: only our graph. more: further fields of the row. launched: the same work, launch by launch.
    """

    call: Callable[[], np.ndarray]
    device: Callable[[], Any] | None = None
    more: dict[str, Any] = field(default_factory=dict)
    launched: Callable[[], Any] | None = None


# Functions that make the sides, by name; they are called in turn, because some models take long to compile, or fail.
Makers = dict[str, Callable[[], Side]]


def drawn(name: str, config: dict[str, Any]) -> Weights:
    """Return random weights in the requested shapes, the same for every reader."""
    kept: dict[str, np.ndarray] = {}

    def draw(name: str, *shape: int) -> np.ndarray:
        if name not in kept:
            x = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32)
            kept[name] = 1 + x / 8 if len(shape) == 1 and "norm" in name.lower() else x / math.sqrt(shape[-1])
        return kept[name]

    weights = Weights(name, kept.__getitem__, config, "0" * 64)
    weights.tensor = draw  # the caller gives the shape
    return weights


# ---------------------------------------------------------------------------------------------------------------------
# Our sides


def our_encoding(there: Weights, texts: np.ndarray) -> Makers:
    """Return our sides for embeddings of texts [texts, tokens]; a single text is a graph."""
    return {"ptxrt bf16" if len(texts) > 1 else "ptxrt bf16, a graph": lambda: _encoding(there, texts)}


def _encoding(there: Weights, texts: np.ndarray) -> Side:
    model = minilm.MiniLM(weights=there)
    call = lambda: model.encode(list(texts))
    call()
    graph = next((graph for graph, *_ in model._graphs.values()), None)
    if graph is None:
        return Side(call, launched=call)
    given = (texts[0], *minilm.places_of(np.array([texts.size])))
    forward = lambda: model.forward(*map(ptxrt.to_device, given))
    return Side(call, graph.launch, dict(launches=len(graph.launches)), forward)


def our_generation(there: Weights, prompt: np.ndarray, sizes: Sizes) -> Makers:
    """Return our sides for tokens generated after a prompt, which is read before."""
    return {name: partial(_generation, there, formats, prompt, sizes) for name, formats in GENERATED.items()}


def _generation(there: Weights, formats: Any, prompt: np.ndarray, sizes: Sizes) -> Side:
    model = smollm2.SmolLM2(formats, context=sizes.context, weights=there)
    first = ptxrt.argmax_rows(model.forward(model.step([0], prompt[None], [0]), last=True)).to_numpy()

    def call() -> np.ndarray:
        found = [first]
        for i in range(sizes.tokens):
            found.append(model.next_tokens(found[-1], np.array([len(prompt) + i])))
        return np.concatenate(found)

    call()
    step = model._steps[1]
    more = dict(launches=len(step.graph.launches), bytes=model.products.nbytes)
    return Side(call, step.graph.launch, more, lambda: ptxrt.argmax_rows(model.forward(step)))


# ---------------------------------------------------------------------------------------------------------------------
# PyTorch's


def compiled(torch, how: str, model: Any) -> Any:
    """Return a model as it is, or compiled by torch.compile."""
    if how == EAGER:
        return model
    return torch.compile(model, dynamic=False, **(dict(mode="reduce-overhead") if how == GRAPHS else {}))


def torch_encoding(torch, there: Weights, texts: np.ndarray, hows, device: str = "cuda") -> Makers:
    """Return PyTorch's sides for embeddings of texts [texts, tokens]."""
    import torch_models

    model = torch_models.Encoder(there.tensor, there.config).to(device, torch.bfloat16)

    def by(how: str) -> Side:
        run = compiled(torch, how, model)

        def call() -> np.ndarray:
            with torch.inference_mode():
                return run(torch.from_numpy(texts.astype(np.int64)).to(device)).cpu().numpy()

        call()
        return Side(call)

    return {TORCH[how]: partial(by, how) for how in hows}


def torch_generation(torch, there: Weights, prompt: np.ndarray, sizes: Sizes, hows, device: str = "cuda") -> Makers:
    """Return PyTorch's sides for tokens after a prompt. Eager reads the filled part of its cache; compiled reads all of
    it under a mask."""
    import torch_models

    model = torch_models.LanguageModel(there.tensor, there.config, sizes.context).to(device, torch.bfloat16)
    places = torch.arange(sizes.context, device=device)

    def best(ids, positions, keys=None):
        return model(ids, positions, keys).argmax(-1, keepdim=True)

    def by(how: str) -> Side:
        with torch.inference_mode():
            first = best(torch.from_numpy(prompt.astype(np.int64)).to(device), places[: len(prompt)], len(prompt))
        run = compiled(torch, how, best)

        def call() -> np.ndarray:
            token, found = first, [int(first)]
            with torch.inference_mode():
                for i in range(len(prompt), len(prompt) + sizes.tokens):
                    token = run(token, places[i : i + 1], i + 1 if how == EAGER else None)
                    token = token.clone() if how == GRAPHS else token  # the next run overwrites this memory
                    found.append(int(token))
            return np.array(found, np.int32)

        call()
        return Side(call)

    return {TORCH[how]: partial(by, how) for how in hows}


# ---------------------------------------------------------------------------------------------------------------------
# Measuring


def made(makers: Makers, settle: Callable[[], None]) -> tuple[dict[str, Side], dict[str, str]]:
    """Make the sides and call each once; return them, and the messages of those that failed."""
    sides, refused = {}, {}
    for name, make in makers.items():
        start = time.perf_counter()
        try:
            sides[name] = make()
            settle()
        except Exception as error:  # torch.compile fails in many ways; measure the others anyway
            refused[name] = (str(error).strip() or repr(error)).splitlines()[0]
        print(f"{name}: made in {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    return sides, refused


def agreement(got: np.ndarray, wanted: np.ndarray) -> float:
    """Return the least cosine of embeddings, or the share of tokens before the first difference."""
    if got.dtype.kind == "f":
        norms = np.linalg.norm(got, axis=-1) * np.linalg.norm(wanted, axis=-1)
        return float(((got * wanted).sum(-1) / norms).min())
    return float(np.cumprod(got == wanted).mean())


def kernels_of(call: Callable[[], Any]) -> dict[str, float]:
    """Return the milliseconds of each kernel in a call, longest first, with each launch between two events of its own.

    Launches wait for the host here, so the sum exceeds the time of the call.
    """
    call()
    with ptxrt.trace(timing=True) as seen:
        call()
    found: dict[str, float] = {}
    for row in seen.rows():
        found[row["entry"]] = found.get(row["entry"], 0.0) + row["milliseconds"]
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def rows_of(case: str, sides: dict[str, Side], repeat: int, settle: Callable[[], None], clock=None) -> list[dict]:
    """Return a row for each side. The first is eager PyTorch if it is measured."""
    times = turns({name: side.call for name, side in sides.items()}, 1, repeat, settle)
    eager = TORCH[EAGER] if TORCH[EAGER] in sides else next(iter(sides))
    wanted, rows = sides[eager].call(), []
    for name, side in sides.items():
        spent = [x / 1e3 for x in times[name]]
        row = dict(case=case, side=name, milliseconds=median(spent), fastest=min(spent), slowest=max(spent))
        row |= dict(repeat=len(spent), times_eager=median(times[eager]) / median(times[name]), **side.more)
        row["agreement"] = agreement(side.call(), wanted)
        if side.device is not None and clock is not None:
            row["device_milliseconds"] = clock.times({name: side.device})[name].median
        if side.launched is not None:
            row["kernels"] = kernels_of(side.launched)
        rows.append(row)
    return rows


def measure(torch, sizes: Sizes, random: bool, cases, hows, repeat: int) -> list[dict]:
    """Return a row for each case and side."""
    rng, rows, clock = np.random.default_rng(0), [], Clock(repeat=repeat)
    settle = lambda: (torch.cuda.synchronize(), ptxrt.synchronize())
    sentences = drawn("random encoder", minilm.CONFIG) if random else minilm.load()
    language = drawn("random language model", LANGUAGE) if random else smollm2.load()
    ids = lambda *shape: rng.integers(0, minilm.CONFIG["vocabulary"], shape, np.int32)
    texts = dict(passages=ids(sizes.passages, sizes.length), sentence=ids(1, sizes.sentence))
    prompt = ids(sizes.prompt)
    for case in cases:
        if case == "generation":
            makers = torch_generation(torch, language, prompt, sizes, hows)
            makers |= our_generation(language, prompt, sizes)
        else:
            makers = torch_encoding(torch, sentences, texts[case], hows) | our_encoding(sentences, texts[case])
        sides, refused = made(makers, settle)
        found = rows_of(case, sides, repeat, settle, clock) if sides else []
        for row in found:
            row["tokens_per_second"] = _tokens(case, sizes) / row["milliseconds"] * 1e3
        rows += found + [dict(case=case, side=name, refused=why) for name, why in refused.items()]
        print(*rows[len(rows) - len(found) - len(refused) :], sep="\n", file=sys.stderr, flush=True)
    return rows


def _tokens(case: str, sizes: Sizes) -> int:
    """Return the tokens of one call of a case."""
    return dict(passages=sizes.passages * sizes.length, sentence=sizes.sentence, generation=sizes.tokens)[case]


def table(head: dict, rows: list[dict]):
    """Format the rows for a terminal."""
    yield f"models of examples/ on {title(head['machine'])}; PyTorch {head['torch']}; {head['weights']}"
    sizes = Sizes(**head["sizes"])
    yield f"passages: {sizes.passages} of {sizes.length} tokens; sentence: one of {sizes.sentence} tokens"
    yield f"generation: {sizes.tokens} tokens at batch 1 behind {sizes.prompt}"
    yield "medians, all sides of a case in turns, from token ids of the host to results there; device: our graph alone"
    cells = [["case", "side", "ms", "fastest..slowest", "tokens/s", "x eager", "device ms", "launches", "agreement"]]
    for row in rows:
        if "refused" in row:
            cells.append([row["case"], row["side"], *[""] * 6, f"refused: {row['refused']}"])
            continue
        spread = f"{row['fastest']:.3f}..{row['slowest']:.3f}"
        figures = [f"{row['milliseconds']:.3f}", spread, f"{row['tokens_per_second']:.0f}", f"{row['times_eager']:.2f}"]
        device = f"{row['device_milliseconds']:.3f}" if "device_milliseconds" in row else ""
        more = [device, f"{row.get('launches', '')}", f"{row['agreement']:.4f}"]
        cells.append([row["case"], row["side"], *figures, *more])
    yield from text_table(cells)
    for row in rows:
        if "kernels" in row:
            most = list(row["kernels"].items())[:6]
            yield f"{row['case']}, {row['side']}, ms of kernels: " + ", ".join(f"{name} {ms:.3f}" for name, ms in most)


def add_options(parser) -> None:
    """Add the script's own options."""
    parser.add_argument("--random", action="store_true", help="draw weights of the models' shapes at random")
    parser.add_argument("--only", choices=CASES, action="append", help="measure this case alone; may be repeated")
    parser.add_argument(
        "--torch", choices=list(TORCH), action="append", help="measure PyTorch in this way alone; may be repeated"
    )
    for name, value in vars(Sizes()).items():
        parser.add_argument(f"--{name}", type=int, default=value, help="(%(default)s)")


def main() -> None:
    """Print the table."""
    torch, options, backend = peers.torch_on_gpu(__doc__, more=add_options)
    sizes = Sizes(**{name: getattr(options, name) for name in vars(Sizes())})
    head = {"machine": about(backend), "torch": torch.__version__, "sizes": vars(sizes)}
    head["weights"] = "weights of these shapes drawn at random" if options.random else "the models' own weights"
    chosen = options.only or CASES, options.torch or list(TORCH)
    with tempfile.TemporaryDirectory() as folder:
        if options.random:
            os.environ["PTXRT_CACHE"] = folder
        rows = measure(torch, sizes, options.random, *chosen, options.repeat)
    peers.report(options, head, rows, table(head, rows))


if __name__ == "__main__":
    main()
