"""One-line bugs in a copy of the examples' models: the comparison with the formulas on small weights catches each, and
the models themselves pass."""

import importlib
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import model_reference as reference
import ptxrt
from seeded_bugs import Bug
from small_models import TEXT, folder_of_quantized_weights, operands, relative_l2, small_encoder, small_language_model  # noqa: F401

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
MODULES = ("smollm2", "minilm", "decoding", "products", "weights")
LOGITS, TEXTS, BLOCKS, EMBEDDINGS = "logits", "texts in turn", "block formats", "embeddings"

# `kernel` of these bugs is the check that must fail.
BUGS = [
    Bug("conventions", "halves_for_pairs", LOGITS, "smollm2.py", 'style="pairs"', 'style="halves"'),
    Bug(
        "conventions",
        "values_where_keys_are",
        LOGITS,
        "smollm2.py",
        'k=c["kv_heads"] * dim, v=c["kv_heads"] * dim',
        'v=c["kv_heads"] * dim, k=c["kv_heads"] * dim',
    ),
    Bug("conventions", "up_gates", LOGITS, "smollm2.py", '("gate", "up")', '("up", "gate")'),
    Bug("conventions", "another_base", LOGITS, "smollm2.py", 'context, c["base"])', "context)"),
    Bug(
        "conventions",
        "positions_begin_anew",
        TEXTS,
        "decoding.py",
        "np.maximum(starts, 0) + np.arange(",
        "np.maximum(starts, 0) * 0 + np.arange(",
    ),
    Bug(
        "conventions",
        "sequences_share_pages",
        TEXTS,
        "decoding.py",
        "rows * self.pages * PAGE + positions",
        "rows * PAGE + positions",
    ),
    Bug("conventions", "the_last_key_unseen", LOGITS, "decoding.py", "positions[:, -1] + 1", "positions[:, -1]"),
    Bug("sums", "attention_replaces_the_stream", LOGITS, "smollm2.py", 'f"out.{i}", residual=x, ', 'f"out.{i}", '),
    Bug("sums", "gates_replace_the_stream", LOGITS, "smollm2.py", 'f"down.{i}", residual=x, ', 'f"down.{i}", '),
    Bug("norms", "first_norm_twice", LOGITS, "smollm2.py", "**of_norm(1)", "**of_norm(0)"),
    Bug(
        "norms",
        "last_norm_of_a_layer",
        LOGITS,
        "smollm2.py",
        "a_norm=self.last_norm",
        "a_norm=self.norms[0][0]",
    ),
    Bug(
        "scales",
        "level_of_activations_is_largest_scale",
        BLOCKS,
        "products.py",
        "ptxrt.to_device(np.float32(1))",
        "ptxrt.to_device(np.float32(448))",
    ),
    Bug(
        "scales",
        "scale_of_gates_alone",
        BLOCKS,
        "smollm2.py",
        "lambda: ptxrt.interleave_rows(*gate_up())",
        "lambda: ptxrt.interleave_rows(gate_up()[0], 2 * gate_up()[1])",
    ),
    Bug("conventions", "keys_ask", EMBEDDINGS, "minilm.py", '("query", "key", "value")]', '("key", "query", "value")]'),
    Bug(
        "conventions",
        "heads_before_parts",
        EMBEDDINGS,
        "minilm.py",
        'x.shape[0], 3, c["heads"], -1)',
        'x.shape[0], c["heads"], 3, -1).transpose(0, 1, 3, 2, 4)',
    ),
    Bug("conventions", "the_second_kind", EMBEDDINGS, "minilm.py", "places + kinds[0]", "places + kinds[1]"),
    Bug(
        "conventions",
        "positions_go_on_in_the_next_text",
        EMBEDDINGS,
        "minilm.py",
        " - np.repeat(starts[:-1], lengths)",
        "",
    ),
    Bug(
        "sums",
        "no_residual",
        EMBEDDINGS,
        "minilm.py",
        'self.linear("out", i, a, residual=x)',
        'self.linear("out", i, a)',
    ),
    Bug("sums", "not_normalized", EMBEDDINGS, "minilm.py", "normalize=True", "normalize=False"),
    Bug("norms", "norms_exchanged", EMBEDDINGS, "minilm.py", "(first, second) = self", "(second, first) = self"),
]


def logits(smollm2) -> bool:
    model = smollm2.SmolLM2(context=32, weights=small_language_model())
    return (
        relative_l2(model.logits(TEXT[:10]), reference.language_model(TEXT[:10], model.weights.read, model.config))
        < 0.02
    )


def texts_in_turn(smollm2) -> bool:
    """Two texts in one step, after earlier tokens."""
    model = smollm2.SmolLM2(context=32, batch=2, weights=small_language_model())
    ids = np.int32([TEXT[:6], TEXT[9:15]])
    for first in (0, 4):
        step = model.step(range(2), ids[:, first : first + 4], [first] * 2)
        got = model.forward(step, last=True).to_numpy()
    want = [reference.language_model(one, model.weights.read, model.config)[-1] for one in ids]
    return relative_l2(got, np.stack(want)) < 0.02


def block_formats(smollm2) -> bool:
    model = smollm2.SmolLM2("nvfp4", context=32, weights=small_language_model())
    forward = lambda how: reference.language_model(TEXT[:10], model.weights.read, model.config, operand=how)
    want = forward(operands(model))
    return relative_l2(model.logits(TEXT[:10]), want) < 0.7 * relative_l2(want, forward(None))


def embeddings(minilm) -> bool:
    model = minilm.MiniLM(weights=small_encoder())
    texts = [TEXT[:5], TEXT[7:10]]
    want = np.stack([reference.encoder(ids, model.weights.read, model.config) for ids in texts])
    return relative_l2(model.encode(texts), want) < 0.01


CHECKS = {
    LOGITS: ("smollm2", logits),
    TEXTS: ("smollm2", texts_in_turn),
    BLOCKS: ("smollm2", block_formats),
    EMBEDDINGS: ("minilm", embeddings),
}


def holds(name: str) -> bool:
    """Whether a check of the imported modules passes; a fault or a refusal fails it."""
    module, check = CHECKS[name]
    try:
        return check(importlib.import_module(module))
    except ptxrt.PtxError:
        return False


@pytest.mark.parametrize("name", CHECKS)
def test_the_models_pass(emulator, name):
    assert holds(name)


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_every_bug_is_caught(emulator, monkeypatch, tmp_path, bug):
    folder = tmp_path / "examples"
    shutil.copytree(EXAMPLES, folder, ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / bug.file
    path.write_text(bug.planted_in(path.read_text()))
    monkeypatch.syspath_prepend(folder)
    for name in MODULES:
        importlib.import_module(name)
        monkeypatch.delitem(sys.modules, name)
    assert not holds(bug.kernel)
