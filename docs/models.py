"""docs/models.md with its pictures: what formats cost the examples' models, in words that a user knows.

    python docs/models.py [--machine emulator, portable or native] [--only NAME ...] [--missing] [--tokens N] [--page]

Every measurement is kept in docs/models.json, from which the page is written: `--only` measures some of them again,
`--page` none.
"""

import argparse
import functools
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import minilm  # noqa: E402
import smollm2  # noqa: E402

import ptxrt  # noqa: E402
from ptxrt.bench import plots  # noqa: E402
from tests import model_reference as reference  # noqa: E402

BOTH = {"bf16": "bf16", "mxfp8": "mxfp8", "mxfp4": "mxfp4", "nvfp4": "nvfp4", "bf16 x nvfp4": ("bf16", "nvfp4")}
# What is measured of the language model: formats of activations and weights, of the cache, and the scale rule.
LANGUAGE = [
    *((name, "bf16", None) for name in ("bf16", "mxfp8", "nvfp4", "bf16 x nvfp4", "mxfp4")),
    ("mxfp4", "bf16", "rceil"),
    ("nvfp4", "bf16", "four_over_six"),
    ("bf16 x nvfp4", "bf16", "four_over_six"),
    *(("bf16", cache, None) for cache in ("mxfp8", "nvfp4", "mxfp4")),
]
# Of the encoder: formats of activations and weights, of attention, and the scale rule.
ENCODER = [
    *((name, "bf16", None) for name in ("bf16", "mxfp8", "nvfp4", "bf16 x nvfp4", "mxfp4")),
    ("nvfp4", "bf16", "four_over_six"),
    ("bf16", "nvfp4+bf16", None),
    ("nvfp4", "nvfp4", None),
]
PASSAGES = (ROOT / "data" / "passages.txt").read_text().splitlines()
QUESTIONS = [
    "Which city is the capital of France?", "What are GPUs used for?", "Why does water boil sooner on a mountain?",
    "How do plants make sugar?", "How do I bake bread?", "What does the heart do?", "How are real numbers stored?",
    "Why do we see one side of the Moon?", "When is a game of chess over?", "How can rust be prevented?",
    "Where can I borrow books?", "Which river carries the most water?", "Why does a debt grow?",
    "What do bees collect?", "What turns source code into machine code?", "Do antibiotics help against the flu?",
]  # fmt: skip


def text_of(formats: str, other: str, rule: str | None) -> str:
    """The name of a measurement."""
    return " / ".join(word for word in (formats, other, rule) if word)


# ---------------------------------------------------------------------------------------------------------------------
# Measurements


@functools.cache
def opened(module: Any) -> Any:
    """The weights of a model, each tensor read once."""
    there = module.load()
    there.read = functools.lru_cache(maxsize=None)(there.read)
    return there


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@functools.cache
def wanted_logits(tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids of the passages, and their log probabilities in float64."""
    there = opened(smollm2)
    ids = np.array(there.tokenizer.encode("\n".join(PASSAGES)).ids[:tokens])
    return ids, log_softmax(reference.language_model(ids, there.read, there.config))


def as_multiplied(model: Any) -> Any:
    """The operands of a model's products for the reference: its weights decoded, activations quantized in NumPy."""
    layer: dict[str, int] = {}

    def operand(product: str, role: str, x: np.ndarray) -> np.ndarray:
        format = model.products.formats.get(product, ("bf16", "bf16"))[role == "weights"]
        if role == "activations":
            return reference.rounded(x, format, model.products.rule(format))
        i = layer[product] = layer.get(product, -1) + 1
        name = product if product == "logits" else f"{product}.{i}"
        held = model.products.placed[name]
        return np.asarray(held.to_numpy()).astype(np.float64)

    return operand


def measured_language(formats: str, cache: str, rule: str | None, tokens: int) -> dict[str, Any]:
    """Perplexity and its neighbours on the passages."""
    model = smollm2.SmolLM2(BOTH[formats], cache, scale_rule=rule, context=tokens, weights=opened(smollm2))
    ids, want = wanted_logits(tokens)
    start = time.process_time()
    got = log_softmax(model.logits(ids))
    took = time.process_time() - start
    found = dict(perplexity=reference.perplexity(got, ids), exact=reference.perplexity(want, ids), seconds=took)
    found["kl"] = float((np.exp(want) * (want - got)).sum(-1).mean())
    found["top"] = float((want.argmax(-1) == got.argmax(-1)).mean())
    if formats != "bf16":
        same = reference.language_model(ids, model.weights.read, model.config, operand=as_multiplied(model))
        found["same_operands"] = reference.perplexity(same, ids)
    found["bytes"] = model.products.nbytes - (model.embedding.nbytes if "logits" in model.products.placed else 0)
    found["cache_bytes"] = sum(x.nbytes for x in model.caches) // (model.pages * smollm2.PAGE)
    return found


def measured_steps() -> dict[str, Any]:
    """Launches of a layer and the time of a token in bf16."""
    model = smollm2.SmolLM2(context=64, weights=opened(smollm2))
    model.next_tokens(np.int32([1]), np.array([0]))
    start, wall = time.process_time(), time.perf_counter()
    for i in range(3):
        model.next_tokens(np.int32([1]), np.array([1 + i]))
    count = len(model._steps[1].graph.launches)
    seconds = (time.process_time() - start) / 3
    return dict(launches=count, seconds=seconds, wall=(time.perf_counter() - wall) / 3)


def measured_encoder(formats: str, attention: str, rule: str | None) -> dict[str, Any]:
    """How near embeddings are to those in float64, and whether questions find the same passages."""
    model = minilm.MiniLM(BOTH[formats], attention=attention, scale_rule=rule, weights=opened(minilm))
    texts = [*QUESTIONS, *PASSAGES]
    start = time.process_time()
    got = model.encode(texts)
    took = time.process_time() - start
    want = wanted_embeddings()
    count = len(QUESTIONS)
    near = lambda x: np.argsort(-(x[:count] @ x[count:].T), axis=-1, kind="stable")
    best, wanted = near(got), near(want)
    kept = [len({*a[:3]} & {*b[:3]}) / 3 for a, b in zip(best, wanted)]
    found = dict(cosine=float((got * want).sum(-1).min()), mean_cosine=float((got * want).sum(-1).mean()))
    found |= dict(found=float((best[:, 0] == np.arange(count)).mean()), kept=float(np.mean(kept)), seconds=took)
    start = time.process_time()
    model.encode(texts[:1])  # captures
    model.encode(texts[:1])
    ((graph, *_),) = model._graphs.values()
    return found | dict(
        bytes=model.products.nbytes, launches=len(graph.launches), single=(time.process_time() - start) / 2
    )


@functools.cache
def wanted_embeddings() -> np.ndarray:
    there = opened(minilm)
    ids = [there.tokenizer.encode(text).ids for text in [*QUESTIONS, *PASSAGES]]
    return np.stack([reference.encoder(one, there.read, there.config) for one in ids])


# ---------------------------------------------------------------------------------------------------------------------
# The page

HEAD = """# Models

What formats cost a language model and a sentence encoder, in words that a user knows. `make models` fetches the
weights, `make chat` asks the language model; `examples/smollm2.py` and `examples/minilm.py` are the models.

    python examples/chat.py "What is the capital of France?" --weights nvfp4 --activations bf16
    python examples/encode.py "How do plants make sugar?" --file data/passages.txt

`make model-figures` measures the figures and writes this page. They are of
{machine}, which runs the PTX for sm_120a.
Seconds are those of the processor; they are no speed of a card.

Operands of products are in the format named, activations first where the two differ (`bf16 x nvfp4`); where one format
is named, both have it. The embedding and the logits stay in bf16. Activations in nvfp4 have a single level, weights a
global scale. The scale rule is that of operands where none is named: `rceil` of mxfp8, `even` of mxfp4, `amax` of
nvfp4.
"""

LANGUAGE_HEAD = """
## Language model

SmolLM2-135M-Instruct, whose weights come in 4 bits already (GGUF, Q4_1): a second rounding to 4 bits is hard on them.
The text is the first {tokens} tokens of `data/passages.txt`. *Perplexity* is of this text; {exact:.2f} in float64.
*Same operands* is the perplexity of a float64 forward with the same quantized operands, which the kernels must come
within 2 % of; it does not quantize the cache. *KL* is the mean divergence from the float64 forward's distribution in
nats, *top* the share of positions with its top token. *Bytes* are of the weights of all layers; a token takes the bytes
of *cache* in all layers.

![Perplexity by format](models_perplexity.png)

"""

ENCODER_HEAD = """
## Sentence encoder

all-MiniLM-L6-v2 on {questions} questions and the {passages} passages of `data/passages.txt`. *Cosine* is the least and
the mean of embeddings with those in float64. *Found* is the share of questions whose nearest passage answers them,
*kept* the share of the three nearest passages in float64 that are among the three nearest. *Bytes* are of the weights
of all layers.

![Neighbors kept by format](models_neighbors.png)

"""


def table(head: list[str], rows: list[list[str]]) -> str:
    """Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]) + "\n"


def page(kept: dict[str, Any]) -> str:
    """The page of what is kept: a section of each model that something was measured of."""
    parts = [HEAD.format(machine=kept["machine"])]
    if kept["language"]:
        parts += language_section(kept)
    if kept["encoder"]:
        parts += encoder_section(kept)
    return "".join(parts)


def language_section(kept: dict[str, Any]) -> list[str]:
    """The table of the language model, and what a step takes."""
    rows = []
    there = kept["language"]
    for formats, cache, rule in LANGUAGE:
        x = there.get(text_of(formats, cache, rule))
        if x is None:
            continue
        same = f"{x['same_operands']:.2f}" if "same_operands" in x else ""
        figures = f"{x['perplexity']:.2f}", same, f"{x['kl']:.4f}", f"{x['top']:.3f}", f"{x['bytes'] / 2**20:.0f} MB"
        rows.append([formats, rule or "", cache, *figures, f"{x['cache_bytes']}", f"{x['seconds']:.0f}"])
    exact = next(iter(there.values()))["exact"]
    head = ["products", "rule", "cache", "perplexity", "same operands", "KL", "top", "bytes", "cache", "seconds"]
    parts = [LANGUAGE_HEAD.format(tokens=kept["tokens"], exact=exact), table(head, rows)]
    if step := kept["step"]:
        parts.append(
            f"\nA decoding step in bf16 is one graph of {step['launches']} launches. It takes "
            f"{step['seconds']:.1f} s of"
            " one core on the emulator.\n"
        )
    return parts


def encoder_section(kept: dict[str, Any]) -> list[str]:
    """The table of the encoder, and what a text takes."""
    rows = []
    for formats, attention, rule in ENCODER:
        x = kept["encoder"].get(text_of(formats, attention, rule))
        if x is None:
            continue
        shares = f"{x['found']:.3f}", f"{x['kept']:.3f}", f"{x['bytes'] / 2**20:.1f} MB", f"{x['seconds']:.0f}"
        rows.append([formats, rule or "", attention, f"{x['cosine']:.5f}, {x['mean_cosine']:.5f}", *shares])
    head = ["products", "rule", "attention", "cosine", "found", "kept", "bytes", "seconds"]
    parts = [ENCODER_HEAD.format(questions=len(QUESTIONS), passages=len(PASSAGES)), table(head, rows)]
    if x := kept["encoder"].get(text_of(*ENCODER[0])):
        parts.append(
            f"\nA single text in bf16 is one graph of {x['launches']} launches. A question of ten tokens\n"
            f"takes {x['single']:.1f} s of one core on the emulator, the first launch of its kernels included.\n"
        )
    return parts


def draw(kept: dict[str, Any], folder: Path) -> None:
    """The two pictures."""
    for kind, value, label, name in [
        ("language", "perplexity", "perplexity; products / cache / rule", "models_perplexity.png"),
        ("encoder", "kept", "neighbors kept of three; products / attention / rule", "models_neighbors.png"),
    ]:
        rows = [dict(name=key, value=x[value]) for key, x in kept[kind].items()]
        if rows:
            plots.bars(folder / name, rows, "name", "value", label, label)


def processor() -> str:
    """The processor's name and how many cores there are."""
    try:
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        name = names[0].split(":")[1].strip()
    except (OSError, IndexError):
        name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


def jobs(tokens: int) -> list[tuple[str, str, Callable[[], dict[str, Any]]]]:
    """(kind, name, measurement) of all there are."""
    steps = [("step", "", measured_steps)]
    encoder = [("encoder", text_of(*row), functools.partial(measured_encoder, *row)) for row in ENCODER]
    language = [("language", text_of(*row), functools.partial(measured_language, *row, tokens)) for row in LANGUAGE]
    return steps + encoder + language


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", default="emulator", choices=["emulator", "portable", "native"])
    parser.add_argument(
        "--only", nargs="*", help="'step', 'encoder' or 'language', or one such as 'encoder: nvfp4 / bf16'"
    )
    parser.add_argument("--missing", action="store_true", help="leave out what was measured before")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--page", action="store_true", help="write the page from what was measured before")
    parser.add_argument("--folder", type=Path, default=ROOT / "docs")
    given = parser.parse_args()
    path = given.folder / "models.json"
    kept = json.loads(path.read_text()) if path.exists() else dict(language={}, encoder={}, step={})
    if not given.page:
        with ptxrt.using(given.machine) as backend:
            where = backend.describe()
            where += f" on {processor()}" if given.machine == "emulator" else ""
            if kept.get("machine") != where:
                kept = dict(machine=where, language={}, encoder={}, step={})
            if kept.get("tokens") != given.tokens:
                kept |= dict(tokens=given.tokens, language={})
            for kind, name, job in jobs(given.tokens):
                asked = not given.only or kind in given.only or f"{kind}: {name}" in given.only
                if not asked or (given.missing and name in kept[kind]):
                    continue
                kept[kind] |= {name: job()} if name else job()
                path.write_text(json.dumps(kept, indent=1) + "\n")
                print(kind, name, kept[kind], file=sys.stderr, flush=True)
    (given.folder / "models.md").write_text(page(kept))
    draw(kept, given.folder)


if __name__ == "__main__":
    main()
