"""docs/models.md with its pictures: what formats cost the examples' models, in terms that a user knows.

    python docs/models.py [--machine emulator, portable or native] [--only NAME ...] [--missing] [--beside] [--tokens N]
        [--page]

Measurements are kept in docs/models.json, from which the page is written. `--only` repeats some of them, `--page` none.
A section has the numbers of one machine; `--beside` adds rows of another one, which have no times. `notes` in the file,
by section, are sentences of the page, which a measurement of the whole section removes.
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
from products import BF16  # noqa: E402

import ptxrt  # noqa: E402
from ptxrt.bench import plots  # noqa: E402
from ptxrt.ops.operands import operand_rule  # noqa: E402
from tests import model_reference as reference  # noqa: E402

# Formats of activations and weights.
BOTH = {
    "bf16": "bf16",
    "mxfp8": "mxfp8",
    "bf16 x mxfp8": ("bf16", "mxfp8"),
    "nvfp4": "nvfp4",
    "bf16 x nvfp4": ("bf16", "nvfp4"),
    "mxfp4": "mxfp4",
    "bf16 x mxfp4": ("bf16", "mxfp4"),
    "mxfp8 x mxfp4": ("mxfp8", "mxfp4"),
}
# The measurements of the language model: formats of activations and weights, format of the cache, scale rule.
LANGUAGE = [
    *((name, "bf16", None) for name in BOTH),
    ("mxfp4", "bf16", "rceil"),
    ("nvfp4", "bf16", "four_over_six"),
    ("bf16 x nvfp4", "bf16", "four_over_six"),
    *(("bf16", cache, None) for cache in ("mxfp8", "nvfp4", "mxfp4")),
]
# The measurements of the encoder: formats of activations and weights, formats of attention, scale rule.
ENCODER = [
    *((name, "bf16", None) for name in ("bf16", "mxfp8", "nvfp4", "bf16 x nvfp4", "mxfp4")),
    ("nvfp4", "bf16", "four_over_six"),
    ("bf16", "nvfp4+bf16", None),
    ("nvfp4", "nvfp4", None),
]
# Forward passes of which the spread of a perplexity is taken.
PASSES = 10
PASSAGES = (ROOT / "data" / "passages.txt").read_text().splitlines()
QUESTIONS = [
    "Which city is the capital of France?", "What are GPUs used for?", "Why does water boil sooner on a mountain?",
    "How do plants make sugar?", "How do I bake bread?", "What does the heart do?", "How are real numbers stored?",
    "Why do we see one side of the Moon?", "When is a game of chess over?", "How can rust be prevented?",
    "Where can I borrow books?", "Which river carries the most water?", "Why does a debt grow?",
    "What do bees collect?", "What turns source code into machine code?", "Do antibiotics help against the flu?",
]  # fmt: skip


def text_of(formats: str, other: str, rule: str | None) -> str:
    """Return the name of a measurement."""
    return " / ".join(word for word in (formats, other, rule) if word)


# ---------------------------------------------------------------------------------------------------------------------
# Measurements


@functools.cache
def opened(module: Any) -> Any:
    """Return the weights of a model; each tensor is read once."""
    there = module.load()
    there.read = functools.lru_cache(maxsize=None)(there.read)
    return there


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Return log softmax in float64. The exponentials of float32 logits are float32; this does not change the sum
    noticeably."""
    shifted = x - x.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True, dtype=np.float64))


def perplexity(log_p: np.ndarray, ids: np.ndarray) -> float:
    """Return the perplexity of a text from the log probabilities after each of its tokens."""
    return float(np.exp(-log_p[np.arange(len(ids) - 1), ids[1:]].mean()))


@functools.cache
def wanted(tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the token ids of the passages, and the log probabilities and probabilities after each token,
    in float64."""
    there = opened(smollm2)
    ids = np.array(there.tokenizer.encode("\n".join(PASSAGES)).ids[:tokens])
    log_p = log_softmax(reference.language_model(ids, there.read, there.config))
    return ids, log_p, np.exp(log_p)


def seconds(call: Callable[[], Any], times: int) -> tuple[float, Any]:
    """Return the seconds of one call, and its result. On a card: wall time averaged over `times` calls, after a first
    one that loads modules. On the emulator: CPU time of a single call."""
    clock = time.process_time
    if ptxrt.selection.current().is_cuda:
        call()
        clock = time.perf_counter
    else:
        times = 1
    start = clock()
    for _ in range(times):
        found = call()
    return (clock() - start) / times, found


def measured_language(formats: str, cache: str, rule: str | None, tokens: int) -> dict[str, Any]:
    """Measure perplexity and related numbers on the passages, and the time of a step of generation."""
    context = max(tokens, 64)
    model = smollm2.SmolLM2(BOTH[formats], cache, scale_rule=rule, context=context, weights=opened(smollm2))
    ids, want, p = wanted(tokens)
    took, logits = seconds(lambda: model.logits(ids), 3)
    got = log_softmax(logits)
    found: dict[str, Any] = dict(perplexity=perplexity(got, ids), exact=perplexity(want, ids), seconds=took)
    found["kl"] = float(np.einsum("tv,tv->t", p, want - got).mean())
    found["top"] = float((want.argmax(-1) == got.argmax(-1)).mean())
    if formats != "bf16":
        options = dict(operand=reference.as_held(model, np.float32), dtype=np.float32)
        same = reference.language_model(ids, model.weights.read, model.config, **options)
        found["same_operands"] = perplexity(log_softmax(same), ids)
    step = lambda: model.next_tokens(ids[-1:].astype(np.int32), np.array([len(ids) - 1]), more=False)
    step()  # captures
    found["step"], _ = seconds(step, 50)
    found["launches"] = len(model._steps[1].graph.launches)
    found["bytes"] = model.products.nbytes - (model.embedding.nbytes if "logits" in model.products.placed else 0)
    found["cache_bytes"] = sum(x.nbytes for x in model.caches) // (model.pages * smollm2.PAGE)
    return found


def measured_spread(formats: str, rule: str | None, tokens: int) -> dict[str, Any]:
    """Measure how far perplexities of equally good forward passes lie apart, in NumPy alone.

    Each pass multiplies the same quantized operands. Queries, keys, values and the output of attention are bfloat16, as
    in the kernels. Activations have random relative errors of up to 2^-16 before they are quantized, a few times those
    of float32 sums of another order.
    """
    there, (ids, _, _) = opened(smollm2), wanted(tokens)
    format = BOTH[formats]
    weights: dict[int, np.ndarray] = {}
    found = []
    for number in range(PASSES):
        rng, places = np.random.default_rng(number), iter(range(10_000))

        def operand(product: str, role: str, x: np.ndarray) -> np.ndarray:
            rounds = functools.partial(reference.rounded, format=format, rule=rule or operand_rule(format), role=role)
            if product == "logits":
                rounds = functools.partial(reference.rounded, format="bf16")
            if role == "weights":
                if (place := next(places)) not in weights:
                    weights[place] = rounds(x).astype(np.float32)
                return weights[place]
            return rounds(x * (1 + rng.uniform(-(2.0**-16), 2.0**-16, x.shape))).astype(np.float32)

        kept = lambda x: np.asarray(x).astype(BF16).astype(np.float32)
        options = dict(operand=operand, dtype=np.float32, kept=kept)
        logits = reference.language_model(ids, there.read, there.config, **options)
        found.append(perplexity(log_softmax(logits), ids))
    return dict(mean=float(np.mean(found)), deviation=float(np.std(found, ddof=1)), passes=PASSES)


def measured_encoder(formats: str, attention: str, rule: str | None) -> dict[str, Any]:
    """Measure how close embeddings are to float64 ones, and whether questions find the same passages."""
    model = minilm.MiniLM(BOTH[formats], attention=attention, scale_rule=rule, weights=opened(minilm))
    texts = [*QUESTIONS, *PASSAGES]
    took, got = seconds(lambda: model.encode(texts), 20)
    want = wanted_embeddings()
    count = len(QUESTIONS)
    near = lambda x: np.argsort(-(x[:count] @ x[count:].T), axis=-1, kind="stable")
    best, wanted = near(got), near(want)
    kept = [len({*a[:3]} & {*b[:3]}) / 3 for a, b in zip(best, wanted)]
    found = dict(cosine=float((got * want).sum(-1).min()), mean_cosine=float((got * want).sum(-1).mean()))
    found |= dict(found=float((best[:, 0] == np.arange(count)).mean()), kept=float(np.mean(kept)), seconds=took)
    model.encode(texts[:1])  # captures
    found["single"], _ = seconds(lambda: model.encode(texts[:1]), 50)
    ((graph, *_),) = model._graphs.values()
    return found | dict(bytes=model.products.nbytes, launches=len(graph.launches))


@functools.cache
def wanted_embeddings() -> np.ndarray:
    there = opened(minilm)
    ids = [there.tokenizer.encode(text).ids for text in [*QUESTIONS, *PASSAGES]]
    return np.stack([reference.encoder(one, there.read, there.config) for one in ids])


# ---------------------------------------------------------------------------------------------------------------------
# The page

HEAD = """# Models

This page shows how number formats change the output, size and speed of a language model and of a sentence encoder.
`make models` fetches the weights, and `make chat` asks the language model. `examples/smollm2.py` and
`examples/minilm.py` contain the models.

    python examples/chat.py "What is the capital of France?" --weights nvfp4 --activations bf16
    python examples/encode.py "How do plants make sugar?" --file data/passages.txt

`make model-figures` measures the figures and writes this page; each section names its machine. `PTXRT_MODELS` names a
folder with the files of weights, in place of the packages that `make models` installs. Weights are quantized once and
kept in the folder `PTXRT_CACHE`, or in the user's cache folder.

The column *products* names the format of the operands of products. One name stands for both operands; of two names
(`bf16 x nvfp4`) the first is that of activations. The embedding and the logits stay in bf16. Activations in nvfp4 have
block scales only, weights also have a global scale. A row without a scale rule uses the default of operands: `rceil`
for mxfp8, `even` for mxfp4, `amax` for nvfp4.
"""

# What the numbers are, by the kind of machine.
EMULATOR = "The emulator runs the PTX for sm_120a. Times are its CPU times; they say nothing about the speed of a card."
CARD = """Times are wall times and include the host's.
Cards other than sm_120 multiply block formats as expanded 16-bit values, so their times say nothing about an RTX
card."""

LANGUAGE_HEAD = """
## Language model

Measured on {machine}. {what}

The model is SmolLM2-135M-Instruct. Its weights are read from a GGUF file with 4 bits (Q4_1), so formats with 4 bits
round them a second time, which costs additional accuracy. The text is the first {tokens} tokens of
`data/passages.txt`.

- *perplexity* is that of this text; in float64 it is {exact:.2f}.
- *same operands* is the perplexity of a NumPy forward pass with the same quantized operands and an unquantized cache,
  which keeps float32 between products. With activations in bf16 the kernels come within 0.3 % of it, in mxfp8 within
  3 %.
- *spread* is the mean of {passes} such passes, with the standard deviation of a single one. In these passes queries,
  keys, values and the output of attention are bfloat16, as in the kernels. Their activations differ by at most 2^-16
  before they are quantized. The last bit of a sum moves an activation to another code, and later layers amplify the
  difference. {spread}The perplexity of
  one text tells no closer kernels apart.
- *KL* is the mean divergence from the distribution of the float64 forward pass, in nats; *top* is the share of
  positions with the same top token.
- *bytes* is the size of the weights of all layers; *cache bytes* is the size of one token in the caches of all layers.
- *step* is the time of one token at batch 1, a graph of *launches*; *text* is the time of the whole text in one call.

![Perplexity by format](models_perplexity.png)

"""

ENCODER_HEAD = """
## Sentence encoder

Measured on {machine}. {what}

The model is all-MiniLM-L6-v2. It embeds {questions} questions and the {passages} passages of `data/passages.txt`.

- *cosine* is the minimum and the mean of the cosines between embeddings and their float64 embeddings.
- *found* is the share of questions whose nearest passage answers them; *kept* is the share of the three nearest
  passages in float64 that are also among the three nearest.
- *bytes* is the size of the weights of all layers.
- *question* is the time of the first question, of ten tokens, a graph of *launches*; *all texts* is the time of all
  texts in one call.

![Neighbors kept by format](models_neighbors.png)

"""


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]) + "\n"


def page(kept: dict[str, Any]) -> str:
    """Return the page: a section for each model with kept measurements."""
    parts = [HEAD]
    if kept["language"]:
        parts += language_section(kept)
    if kept["encoder"]:
        parts += encoder_section(kept)
    return "".join(parts)


def measured_where(kept: dict[str, Any], kind: str) -> dict[str, str]:
    """Return the machine of a section's numbers, and what the numbers are."""
    machine = kept["machines"][kind]
    what = EMULATOR if machine.startswith("emulator") else CARD
    others = sorted({x["machine"] for x in kept[kind].values() if "machine" in x})
    notes = [f"Rows without times were measured on {' and on '.join(others)}."] * bool(others)
    notes += [note for section, note in kept.get("notes", {}).items() if section == kind]
    return dict(machine=machine, what="\n".join([what, *notes]))


def language_section(kept: dict[str, Any]) -> list[str]:
    """Return the table of the language model."""
    rows = []
    there = kept["language"]
    for formats, cache, rule in LANGUAGE:
        x = there.get(text_of(formats, cache, rule))
        if x is None:
            continue
        same = f"{x['same_operands']:.2f}" if "same_operands" in x else ""
        spread = kept["spread"].get(text_of(formats, "", rule)) if same else None
        spread = f"{spread['mean']:.2f} ± {spread['deviation']:.2f}" if spread else ""
        figures = (
            f"{x['perplexity']:.2f}",
            same,
            spread,
            f"{x['kl']:.4f}",
            f"{x['top']:.3f}",
            f"{x['bytes'] / 2**20:.0f} MB",
        )
        times = f"{x['launches']}", spelled(x["step"]), f"{1 / x['step']:.4g}", spelled(x["seconds"])
        times = [""] * len(times) if "machine" in x else times
        rows.append([formats, rule or "", cache, *figures, f"{x['cache_bytes']}", *times])
    exact = next(iter(there.values()))["exact"]
    head = ["products", "rule", "cache", "perplexity", "same operands", "spread", "KL", "top", "bytes", "cache bytes"]
    head += ["launches", "step", "tokens/s", "text"]
    return [
        LANGUAGE_HEAD.format(
            **measured_where(kept, "language"),
            tokens=kept["tokens"],
            exact=exact,
            passes=PASSES,
            spread=spread_of(kept),
        ),
        table(head, rows),
    ]


def spread_of(kept: dict[str, Any]) -> str:
    """Return the sentence that tells by how much forward passes with activations in 4 bits differ, or nothing."""
    four = [x["deviation"] / x["mean"] for name, x in kept["spread"].items() if name.startswith(("mxfp4", "nvfp4"))]
    if not four:
        return ""
    least, most = 100 * min(four), 100 * max(four)
    return f"In 4 bits equally good forward passes therefore differ by {least:.1f} to {most:.1f} % (one deviation). "


def spelled(seconds: float) -> str:
    """Return a time in the unit with the fewest digits."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def encoder_section(kept: dict[str, Any]) -> list[str]:
    """Return the table of the encoder."""
    rows = []
    for formats, attention, rule in ENCODER:
        x = kept["encoder"].get(text_of(formats, attention, rule))
        if x is None:
            continue
        shares = f"{x['found']:.3f}", f"{x['kept']:.3f}", f"{x['bytes'] / 2**20:.1f} MB"
        times = f"{x['launches']}", spelled(x["single"]), spelled(x["seconds"])
        times = [""] * len(times) if "machine" in x else times
        rows.append([formats, rule or "", attention, f"{x['cosine']:.5f}, {x['mean_cosine']:.5f}", *shares, *times])
    head = ["products", "rule", "attention", "cosine", "found", "kept", "bytes", "launches", "question", "all texts"]
    return [
        ENCODER_HEAD.format(**measured_where(kept, "encoder"), questions=len(QUESTIONS), passages=len(PASSAGES)),
        table(head, rows),
    ]


def draw(kept: dict[str, Any], folder: Path) -> None:
    """Draw the two pictures."""
    for kind, value, label, name in [
        ("language", "perplexity", "perplexity; products / cache / rule", "models_perplexity.png"),
        ("encoder", "kept", "neighbors kept of three; products / attention / rule", "models_neighbors.png"),
    ]:
        rows = [dict(name=key, value=x[value]) for key, x in kept[kind].items()]
        if rows:
            plots.bars(folder / name, rows, "name", "value", label, label)


def processor() -> str:
    """Return the processor's name and its number of cores."""
    try:
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        name = names[0].split(":")[1].strip()
    except (OSError, IndexError):
        name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


def jobs(tokens: int) -> list[tuple[str, str, Callable[[], dict[str, Any]]]]:
    """Return (kind, name, measurement) of all measurements."""
    encoder = [("encoder", text_of(*row), functools.partial(measured_encoder, *row)) for row in ENCODER]
    language = [("language", text_of(*row), functools.partial(measured_language, *row, tokens)) for row in LANGUAGE]
    rounded = dict.fromkeys((formats, rule) for formats, _, rule in LANGUAGE if isinstance(BOTH[formats], str))
    spread = [
        ("spread", text_of(formats, "", rule), functools.partial(measured_spread, formats, rule, tokens))
        for formats, rule in rounded
        if formats != "bf16"
    ]
    return encoder + language + spread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", default="emulator", choices=["emulator", "portable", "native"])
    parser.add_argument(
        "--only", nargs="*", help="'encoder', 'language' or 'spread', or one such as 'encoder: nvfp4 / bf16'"
    )
    parser.add_argument("--missing", action="store_true", help="leave out what was measured before")
    parser.add_argument("--beside", action="store_true", help="keep the measurements of other machines")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--page", action="store_true", help="write the page from what was measured before")
    parser.add_argument("--folder", type=Path, default=ROOT / "docs")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    path = given.folder / "models.json"
    kept = json.loads(path.read_text()) if path.exists() else dict(machines={}, language={}, encoder={}, spread={})
    if not given.page:
        with ptxrt.using(given.machine) as backend:
            there = backend.describe() + (f" on {processor()}" if given.machine == "emulator" else "")
            if kept.get("tokens") != given.tokens:
                kept |= dict(tokens=given.tokens, language={}, spread={})
            for kind, name, job in jobs(given.tokens):
                where = "NumPy" if kind == "spread" else there
                asked = not given.only or kind in given.only or f"{kind}: {name}" in given.only
                beside = given.beside and kept["machines"].get(kind, where) != where
                known = (beside or kept["machines"].get(kind) == where) and name in kept[kind]
                if not asked or (given.missing and known):
                    continue
                if kept["machines"].get(kind) != where and not beside:
                    kept[kind], kept["machines"][kind] = {}, where
                if not given.only and not given.missing:
                    kept.get("notes", {}).pop(kind, None)
                start = time.perf_counter()
                kept[kind][name] = job() | (dict(machine=where) if beside else {})
                path.write_text(json.dumps(kept, indent=1) + "\n")
                said = f"{kind}: {name}, {time.perf_counter() - start:.0f} s, {kept[kind][name]}"
                print(said, file=sys.stderr, flush=True)
    (given.folder / "models.md").write_text(page(kept))
    draw(kept, given.folder)


if __name__ == "__main__":
    main()
