"""The examples' language model: a small one with random weights against its formulas in float64, and the real one."""

import json
import math
import os
import sys
from pathlib import Path

import chat
import decoding
import minilm
import numpy as np
import pytest
import smollm2
import weights
from click.testing import CliRunner

import model_reference as reference
import ptxrt
from small_models import TEXT, folder_of_quantized_weights, operands, real, relative_l2, small_language_model  # noqa: F401  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent
PASSAGES = (ROOT / "data" / "passages.txt").read_text().splitlines()

# ---------------------------------------------------------------------------------------------------------------------
# Small models


def test_logits_are_those_of_the_formulas(text_machine):
    model = smollm2.SmolLM2(context=64, weights=small_language_model())
    want = reference.language_model(TEXT, model.weights.read, model.config)
    assert relative_l2(model.logits(TEXT), want) < 0.02


@pytest.mark.parametrize("formats", ["mxfp8", "mxfp4", "nvfp4", ("bf16", "nvfp4")], ids=str)
def test_logits_of_block_formats_are_those_of_the_same_operands(machine, formats):
    """A value near a tie may round to the other side, which changes whole codes; the bounds allow for that."""
    model = smollm2.SmolLM2(formats, context=64, weights=small_language_model())
    want = reference.language_model(TEXT, model.weights.read, model.config, operand=operands(model))
    got = model.logits(TEXT)
    plain = reference.language_model(TEXT, model.weights.read, model.config)
    assert relative_l2(got, want) < 0.7 * relative_l2(want, plain)  # closer than the formats' own error


def test_pairs_are_turned_as_the_file_has_them(emulator):
    model = smollm2.SmolLM2(context=64, weights=small_language_model())
    other = reference.language_model(TEXT, model.weights.read, model.config, style="halves")
    assert relative_l2(model.logits(TEXT), other) > 0.1


@pytest.mark.parametrize("cache, bound", [("mxfp8", 0.1), ("nvfp4", 0.35), ("mxfp4", 0.45)])
def test_keys_and_values_in_block_formats(emulator, cache, bound):
    model = smollm2.SmolLM2(cache=cache, context=64, weights=small_language_model())
    want = reference.language_model(TEXT, model.weights.read, model.config)
    assert relative_l2(model.logits(TEXT), want) < bound


def test_calls_of_few_tokens_have_the_bits_of_one_at_a_time(text_machine):
    """Draft tokens verified together thus equal single tokens; a call of the whole text differs within float32 sums."""
    model = smollm2.SmolLM2(context=64, weights=small_language_model())
    one = model.logits(TEXT[:18], chunk=1)
    for chunk in (5, 16):
        assert (model.logits(TEXT[:18], chunk=chunk).view(np.uint32) == one.view(np.uint32)).all()
    assert relative_l2(model.logits(TEXT[:18]), one.astype(np.float64)) < 0.01


def test_answers_depend_on_no_other_prompt(text_machine):
    model = smollm2.SmolLM2(context=256, batch=3, weights=small_language_model())
    prompts = ["one", "another prompt", "third"]
    alone = [model.generate(prompt, 4) for prompt in prompts]
    assert model.generate(prompts, 4) == alone
    assert model.generate(prompts[1:2], 4) == alone[1:2]
    assert "".join(model.generate("one", 4, stream=True)) == alone[0]


def test_generated_tokens_are_the_likeliest_of_the_logits(emulator):
    model = smollm2.SmolLM2(context=256, weights=small_language_model())
    ids = model.ids(smollm2.CHAT.format("one"))
    answer = [ord(ch) for ch in model.generate("one", 5)]
    assert 0 < len(answer) <= 5
    rows = model.logits([*ids, *answer[:-1]], chunk=16)[len(ids) - 1 :]
    assert rows.argmax(-1).tolist() == answer


def test_the_numbers_of_a_step_are_those_of_its_lengths(emulator):
    """The step replaces its tokens by the next ones."""
    model = smollm2.SmolLM2(context=256, batch=2, weights=small_language_model())
    text = model.ids("x" * 24)[None]
    for row in range(2):
        model.forward(model.step([row], text, [0]))
    for i, lengths in enumerate([(20, 20), (21, 21), (5, 22), (6, -1), (7, -1), (7, -1), (8, 3)]):
        tokens = np.array([65 + i, 97 - i], np.int32)
        best = model.next_tokens(tokens, np.array(lengths))
        assert (model._steps[2].numbers.to_numpy() == model.numbers(range(2), best[:, None], lengths)).all()


def calls_of(monkeypatch, thing, name):
    """Count the calls of a method."""
    calls, real = [], getattr(thing, name)
    monkeypatch.setattr(thing, name, lambda *a, **k: (calls.append(1), real(*a, **k))[1])
    return calls


def test_steps_ahead_change_no_token(emulator, monkeypatch):
    """Whatever the caller asks for after a step: the likely one, one of other tokens or lengths, or none."""
    make = lambda: smollm2.SmolLM2(context=32, batch=2, weights=small_language_model())
    plain, ahead = make(), make()
    ahead.overlaps = True
    launched, made = calls_of(monkeypatch, decoding.Step, "launch"), []
    text = plain.ids("x" * 24)
    for model in (plain, ahead):
        for row in range(2):
            model.forward(model.step([row], text[None], [0]))
    tokens, lengths = np.array([65, 97], np.int32), np.array([24, 20])
    for i in range(14):
        want = plain.next_tokens(tokens, lengths)
        before = len(launched)
        got = ahead.next_tokens(tokens, lengths)
        made.append(len(launched) - before)
        assert (got == want).all()
        tokens, lengths = want, lengths + (lengths >= 0)
        got[:] = 0  # the caller's array
        if i == 2:  # a text ends
            lengths[1] = -1
        if i == 4:  # another token than the likely one
            tokens = tokens ^ 1
        if i == 5:  # texts that were read meanwhile, with the same next token and length
            for model in (plain, ahead):
                model.logits([1] * int(lengths[0]))
        if i == 7:
            lengths = np.array([8, 8])
    # One new step in each call, another where the step ahead was lost; none where a text fills the context.
    assert made == [2, 1, 1, 2, 1, 2, 2, 0, 2, 1, 1, 1, 1, 1]
    graph = ahead._steps[2].graph
    monkeypatch.setattr(graph, "launch", lambda: (_ for _ in ()).throw(ptxrt.LaunchError("broken")))
    assert (ahead.next_tokens(tokens, lengths) == plain.next_tokens(tokens, lengths)).all()  # launched before
    with pytest.raises(ptxrt.LaunchError, match="broken"):
        ahead.next_tokens(want, lengths + 1)


def test_texts_are_the_same_with_steps_ahead(emulator, monkeypatch):
    """Of one text and of several, in pieces, one that is not read to its end, and where the context ends."""
    make = lambda: smollm2.SmolLM2(context=150, batch=2, weights=small_language_model())
    plain, ahead = make(), make()
    plain.overlaps, ahead.overlaps = False, True
    monkeypatch.setattr(smollm2.SmolLM2, "chat", "{}")
    for prompt, tokens in ((["one", "another prompt"], 3), ("x" * 145, 40), ("one", 4)):
        want = plain.generate(prompt, tokens)
        assert ahead.generate(prompt, tokens) == want
    begun = ahead.generate("one", 9, stream=True)
    assert next(begun) + next(begun) == want[:2]
    launched = calls_of(monkeypatch, decoding.Step, "launch")
    assert "".join(ahead.generate("one", 4, stream=True)) == want
    assert len(launched) == 3, "a step after the last token"


def test_an_answer_ends_where_the_context_does(emulator):
    model = smollm2.SmolLM2(context=256, weights=small_language_model())
    count = 256 - len(model.ids(smollm2.CHAT.format("")))
    prompt = "x" * (count - 3)
    assert 0 < len(model.generate(prompt, 50)) <= 4


def test_one_graph_serves_all_steps_and_a_layer_has_at_most_nine_launches(emulator):
    model = smollm2.SmolLM2(context=256, weights=small_language_model())
    with ptxrt.trace() as seen:
        model.generate("one", 5)
    graphs = [launch for launch in seen if launch.kernel.startswith("graph of")]
    assert len(graphs) == 4 and len(set(map(str, graphs))) == 1
    launches = model._steps[1].graph.launches
    around = 4  # embedding rows, last norm, logits, argmax
    assert len(launches) <= 9 * model.config["layers"] + around
    assert {launch.entry.rsplit("_", 1)[0] for launch in launches}


def test_make_chat_builds_what_the_model_launches(emulator):
    """The texts that the Makefile names suffice for prompts of few and of many tokens."""
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    (names,) = (line.split(":=")[1].split() for line in makefile.splitlines() if line.startswith("CHAT :="))
    there = {name.strip("'").split("[")[0] for name in names}
    with ptxrt.trace() as seen:
        model = smollm2.SmolLM2(context=256, weights=small_language_model())
        model.generate("one", 3)
        model.logits(TEXT)
    launches = [*seen, *model._steps[1].graph.launches]
    # The tile of products follows their sizes.
    units = {name.strip("'").replace("[", "_").replace("=", "").replace("]", "") for name in names}
    assert {launch.entry.rpartition("_")[0] for launch in launches if launch.kernel == "gemm_bf16"} <= units
    launched = {launch.kernel for launch in launches}
    launched = {name for name in launched if not name.startswith("graph of")}
    assert launched <= there
    assert "attention_bf16" in launched and "gemm_few_bf16" in launched


def test_nothing_but_tokens_and_places_is_copied(emulator, monkeypatch):
    """Between the upload of a step's inputs and its output token nothing is copied to or from the host."""
    model = smollm2.SmolLM2(context=256, weights=small_language_model())
    model.generate("one", 3)
    copied = []
    backend = type(emulator)
    for name in ("read", "write"):
        real = getattr(backend, name)

        def counted(self, address, host, *rest, real=real, name=name, **options):
            copied.append((name, host.nbytes))
            return real(self, address, host, *rest, **options)

        monkeypatch.setattr(backend, name, counted)
    model.next_tokens(np.int32([5]), np.array([20]))
    assert [size for name, size in copied if name == "read"] == [4]
    assert sum(size for name, size in copied if name == "write") <= 4 + 4 + 8 + 4 * model.pages + 4


def test_every_call_of_a_layer_is_what_its_formula_says(emulator, monkeypatch):
    """Each call is compared on its own inputs, so that a failure names its kernel."""
    model = smollm2.SmolLM2(context=64, weights=small_language_model())
    checked = []

    def watch(name, want):
        real = getattr(ptxrt, name)

        def call(*arguments, **options):
            before = [
                np.asarray(x.to_numpy(), np.float64) if isinstance(x, ptxrt.DeviceArray) else x for x in arguments
            ]
            extra = {
                k: np.asarray(v.to_numpy(), np.float64) if isinstance(v, ptxrt.DeviceArray) else v
                for k, v in options.items()
            }
            got = real(*arguments, **options)
            wanted = want(*before, **extra)
            if wanted is not None:
                error = relative_l2(np.asarray(got.to_numpy()), wanted)
                assert error < 4e-3, f"{name} of {[getattr(x, 'shape', x) for x in before]}: relative L2 {error:.2e}"
            checked.append(name)
            return got

        monkeypatch.setattr(ptxrt, name, call)

    def product(a, b, *, activation=None, residual=None, a_norm=None, a_eps=0.0, **formats):
        c = (a if a_norm is None else reference.rmsnorm(a, a_norm, a_eps)) @ b.T
        if activation:
            c = c[:, ::2] / (1 + np.exp(-c[:, ::2])) * c[:, 1::2]
        return c if residual is None else c + residual

    def appended(qkv, cache, slots, positions, table, *, heads, style):
        """The rotated queries; also compares the cache with the expected keys and values."""
        x = qkv.reshape(len(qkv), -1, cache.dim)
        keys = heads + cache.heads
        held = cache.read(np.arange(model.pages, dtype=np.int32)[None], [len(x)])
        k = reference.turned(x[:, heads:keys], positions, model.config["base"], style)
        for got, want in zip(held, (k, x[:, keys:])):
            error = relative_l2(got[0].swapaxes(0, 1), want)
            assert error < 4e-3, f"append_qkv of {qkv.shape} into the cache: relative L2 {error:.2e}"
        return reference.turned(x[:, :heads], positions, model.config["base"], style)

    def attended(q, cache, table, lengths, *, layout):
        k, v = (
            np.repeat(x, q.shape[2] // x.shape[1], axis=1)[0].astype(np.float64)
            for x in cache.read(np.int32(table), np.int32(lengths))
        )
        scores = q[0].swapaxes(0, 1) @ k.swapaxes(1, 2) / math.sqrt(q.shape[-1]) + np.triu(
            np.full((q.shape[1], k.shape[1]), -np.inf), 1
        )
        return (reference.softmax(scores) @ v).swapaxes(0, 1)[None]

    watch("take_rows", lambda table, ids, *, out_dtype: table[ids.astype(int)])
    watch("matmul", product)
    watch("append_qkv", appended)
    watch("attention_paged", attended)
    model.logits(TEXT[:12])
    in_layers = ["matmul", "append_qkv", "attention_paged", "matmul", "matmul", "matmul"]
    assert checked == ["take_rows", *in_layers * 2, "matmul"]


def test_perplexity_is_that_of_the_logits(emulator):
    model = smollm2.SmolLM2(context=64, weights=small_language_model())
    assert math.isclose(model.perplexity(TEXT), reference.perplexity(model.logits(TEXT), TEXT), rel_tol=1e-9)


# ---------------------------------------------------------------------------------------------------------------------
# Wrong inputs


def test_wrong_texts_are_refused(emulator):
    model = smollm2.SmolLM2(context=32, weights=small_language_model())
    for wrong, message in [
        ([], "the text is empty"),
        ("", "the text is empty"),
        ([1.5], "the text has ids float64 .1.; pass a string, or whole numbers"),
        ([[1]], "one axis"),
        ([200], "the text has id 200, which is none of the 200"),
        ([-1], "id -1"),
        (range(33), "33 tokens, the context 32; shorten it .up to 256"),
        ([[1], [2, 3]], "the text is no array .*inhomogeneous.*; pass a string, or whole numbers of one axis"),
        (["a", [1]], "the text is no array"),
        (None, "the text has ids object"),
        ("caf\udce9", r"the text has character '\\udce9' at index 3, which UTF-8 does not encode; pass text"),
    ]:
        with pytest.raises(ptxrt.ArgumentError, match=message):
            model.logits(wrong)
    with pytest.raises(ptxrt.ArgumentError, match="one token; pass one of at least two"):
        model.perplexity([3])
    with pytest.raises(ptxrt.ArgumentError, match="the prompt is empty"):
        model.generate(" ")
    with pytest.raises(ptxrt.ArgumentError, match=r"2 prompts came; batch is 1: pass SmolLM2\(batch=2\)"):
        model.generate(["a", "b"])
    with pytest.raises(ptxrt.ArgumentError, match="stream=True takes one prompt"):
        model.generate(["a"], stream=True)
    for prompt in ([], None, 3):
        with pytest.raises(ptxrt.ArgumentError, match="generate: prompt is .*pass a text, or a list of at least one"):
            model.generate(prompt)
    with pytest.raises(ptxrt.ArgumentError, match=r"generate: the prompt has character '\\udce9' at index 3"):
        model.generate("caf\udce9")
    with pytest.raises(ptxrt.ArgumentError, match=r"generate: prompt 1 has character '\\ud83d' at index 0"):
        smollm2.SmolLM2(context=32, batch=2, weights=small_language_model()).generate(["a", "\ud83d"])
    model.tokenizer = None
    with pytest.raises(ptxrt.ArgumentError, match="the text is a string, but these weights have no tokenizer"):
        model.logits("a")


@pytest.mark.parametrize("wrong", [0, -1, 1.5, 2.0, "1", True, np.True_, np.float32(1), [1]], ids=repr)
def test_counts_are_whole_numbers_of_at_least_one(emulator, monkeypatch, wrong):
    """The message names the model's argument; nothing is read before."""
    model = smollm2.SmolLM2(context=256, weights=small_language_model())
    monkeypatch.setattr(smollm2, "load", lambda: pytest.fail("the weights are read"))
    for name, call in [
        ("batch", lambda: smollm2.SmolLM2(batch=wrong)),
        ("context", lambda: smollm2.SmolLM2(context=wrong)),
        ("generate: tokens", lambda: model.generate("a", wrong or None)),  # 0 is a number of tokens
        ("generate: tokens", lambda: model.generate("a", wrong or None, stream=True)),
        ("logits: chunk", lambda: model.logits([3, 4], chunk=wrong)),
        ("logits: chunk", lambda: model.perplexity([3, 4], chunk=wrong)),
    ]:
        with pytest.raises(ptxrt.ArgumentError) as error:
            call()
        least, came = (0, wrong or None) if name == "generate: tokens" else (1, wrong)
        assert str(error.value).startswith(f"{name} is {came!r}; pass a whole number of at least {least}")


def test_counts_of_numpy(emulator):
    """Those of 8 bits hold no larger places, which are computed as int."""
    model, same = (
        smollm2.SmolLM2(context=context, batch=batch, weights=small_language_model())
        for context, batch in ((np.uint8(200), np.int64(2)), (200, 2))
    )
    assert (model.context, model.batch, model.pages) == (same.context, same.batch, same.pages)
    assert model.generate("a", np.uint8(3)) == same.generate("a", 3)
    text = [3] * 200
    assert (model.logits(text, chunk=np.uint8(150)) == same.logits(text, chunk=150)).all()


def test_a_context_that_the_model_has_not(emulator):
    with pytest.raises(ptxrt.ArgumentError, match="context is 257; the model takes texts of 1 to 256"):
        smollm2.SmolLM2(context=257, weights=small_language_model())


def test_caches_and_rules_that_there_are_not(emulator, monkeypatch, folder_of_quantized_weights):
    monkeypatch.setattr(smollm2, "load", lambda: pytest.fail("the weights are read"))
    for options, message in [
        (dict(cache="mxfp6"), "^cache is 'mxfp6'; pass one of 'bf16', "),
        (dict(cache=["bf16"]), "^cache is .'bf16'.; pass one of 'bf16', "),
        (dict(formats="mxfp8", scale_rule="floored"), "^scale_rule is 'floored'; mxfp8 has 'floor', 'ceil'"),
        (dict(formats="nvfp4", scale_rule="rceil"), "^scale_rule is 'rceil'; nvfp4 has 'amax', 'four_over_six'; pass"),
        (dict(scale_rule="x"), "^scale_rule is 'x', but all formats are bf16.*: mxfp8 has 'floor'"),
        (dict(cache="mxfp8", scale_rule="floor"), "^scale_rule is 'floor', but all formats are bf16"),
        (dict(formats="mxfp4", scale_rule="/../escaped"), "^scale_rule is '/../escaped'; mxfp4 has 'floor'"),
    ]:
        with pytest.raises(ptxrt.ArgumentError, match=message):
            smollm2.SmolLM2(**options)
    assert not folder_of_quantized_weights.exists()


def test_files_that_are_missing_or_others(tmp_path, monkeypatch):
    pytest.importorskip("gguf"), pytest.importorskip("tokenizers")
    monkeypatch.setenv("PTXRT_MODELS", str(tmp_path))
    with pytest.raises(ptxrt.FileError, match=f"the weights {smollm2.FILE} are not in .*; run `make models`"):
        smollm2.load()
    (tmp_path / smollm2.FILE).write_bytes(b"GGUF")
    with pytest.raises(ptxrt.FileError, match="has SHA-256 .*another file, or damaged; run `make models`"):
        smollm2.load()
    done = CliRunner().invoke(chat.chat, ["hello"])
    assert done.exit_code == 1 and "run `make models`" in done.stderr.splitlines()[-1]


# ---------------------------------------------------------------------------------------------------------------------
# Command line


def test_chat_prints_the_answer_and_its_launches(emulator, monkeypatch):
    small = small_language_model()
    monkeypatch.setattr(
        chat, "SmolLM2", lambda *formats, **options: smollm2.SmolLM2(*formats, context=256, weights=small, **options)
    )
    done = CliRunner().invoke(
        chat.chat,
        ["one", "--tokens", "4", "--weights", "nvfp4", "--activations", "bf16", "--cache", "mxfp8", "--trace"],
    )
    assert done.exit_code == 0, done.output
    assert (
        done.stdout == smollm2.SmolLM2(("bf16", "nvfp4"), "mxfp8", context=256, weights=small).generate("one", 4) + "\n"
    )
    for said in ("layer", "graph of", "gemm_few_bf16_nvfp4", "first token after"):
        assert said in done.stderr


def test_chat_refuses_a_prompt_that_is_no_utf_8(emulator, monkeypatch):
    monkeypatch.setattr(chat, "SmolLM2", lambda *_, **__: smollm2.SmolLM2(context=256, weights=small_language_model()))
    done = CliRunner().invoke(chat.chat, [os.fsdecode(b"caf\xe9"), "--tokens", "1"])
    assert done.exit_code == 1 and done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        "Error: generate: the prompt has character '\\udce9' at index 3, which UTF-8 does not encode"
    )


# ---------------------------------------------------------------------------------------------------------------------
# The page of figures


def test_the_page_of_figures_is_measured_and_written(emulator, monkeypatch, tmp_path):
    from docs import models as page
    from small_models import small_encoder

    small = {smollm2: small_language_model(), minilm: small_encoder()}
    monkeypatch.setattr(page, "opened", small.get)
    monkeypatch.setattr(page, "PASSAGES", ["abcdef ghij", "klm nop"])
    monkeypatch.setattr(page, "QUESTIONS", ["abc?", "nop?"])
    monkeypatch.setattr(page, "LANGUAGE", [("nvfp4", "mxfp8", None), ("bf16", "bf16", None)])
    monkeypatch.setattr(page, "ENCODER", [("bf16", "bf16", None)])
    page.wanted.cache_clear(), page.wanted_embeddings.cache_clear()
    run = lambda *arguments: (
        monkeypatch.setattr(sys, "argv", ["", "--folder", str(tmp_path), *arguments]),
        page.main(),
    )
    monkeypatch.setattr(page, "PASSES", 3)
    run("--tokens", "8", "--only", "language: nvfp4 / mxfp8", "encoder", "spread")
    page.wanted.cache_clear(), page.wanted_embeddings.cache_clear()
    kept = json.loads((tmp_path / "models.json").read_text())
    row = kept["language"]["nvfp4 / mxfp8"]
    assert row["launches"] >= 9 * 2 and row["cache_bytes"] == 2 * 2 * (64 + 2) and 0 <= row["top"] <= 1
    assert kept["encoder"]["bf16 / bf16"]["cosine"] > 0.9999 and kept["tokens"] == 8
    spread = kept["spread"]["nvfp4"]
    # Random weights are surprised by every token: 25 nats here, of which 2 are the noise of eight tokens.
    assert spread["passes"] == 3 and spread["deviation"] > 0
    assert abs(math.log(spread["mean"] / row["same_operands"])) < 3
    text = (tmp_path / "models.md").read_text()
    assert (
        "| nvfp4 |  | mxfp8 |" in text
        and "| bf16 |  | bf16 | 0.999" in text
        and (tmp_path / "models_perplexity.png").exists()
    )
    (tmp_path / "models.md").unlink()
    run("--page", "--tokens", "8")
    assert (tmp_path / "models.md").read_text() == text
    # Rows of another machine beside those of a card: they have no times.
    kept = json.loads((tmp_path / "models.json").read_text())
    kept["machines"]["language"], kept["notes"] = "a card", {"language": "Times are of earlier kernels."}
    (tmp_path / "models.json").write_text(json.dumps(kept))
    run("--tokens", "8", "--only", "language: bf16 / bf16", "--beside")
    kept = json.loads((tmp_path / "models.json").read_text())
    assert kept["language"]["nvfp4 / mxfp8"] == row and kept["language"]["bf16 / bf16"]["machine"].startswith(
        "emulator"
    )
    section = (tmp_path / "models.md").read_text().partition("## Sentence encoder")[0]
    assert "Measured on a card." in section and "Rows without times were measured on emulator" in section
    assert "Times are of earlier kernels." in section and section.count("|  |  |  |  |") == 1


# ---------------------------------------------------------------------------------------------------------------------
# The reference's own parts


def test_blocks_of_gguf_are_read_by_their_formulas():
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((6, 96)).astype(np.float32)
    for kind in ("Q4_1", "Q8_0"):
        number = gguf.GGMLQuantizationType[kind]
        data = gguf.quants.quantize(x, number)
        assert (reference.from_gguf_blocks(data, kind) == gguf.quants.dequantize(data, number)).all()


# ---------------------------------------------------------------------------------------------------------------------
# The real model


def test_tokens_of_the_language_model(real):
    there = real(smollm2)
    vocabulary = there.tokenizer.get_vocab()
    from gguf import GGUFReader

    fields = GGUFReader(weights.model_file(smollm2.FILE, ".", smollm2.PACKAGE)).fields
    merges = {tuple(pair.split(" ")): i for i, pair in enumerate(fields["tokenizer.ggml.merges"].contents())}
    for text in [*PASSAGES[:3], "In 1987 it's 3.14,  don't\n\n  x=12; caf\u00e9 \u4f60\u597d \U0001f600 9"]:
        assert there.tokenizer.encode(text).ids == reference.byte_pairs(text, vocabulary, merges)
        assert there.tokenizer.decode(there.tokenizer.encode(text).ids) == text
    assert there.tokenizer.encode("<|im_start|>hi 123<|im_end|>").ids == [1, 6004, 216, 33, 34, 35, 2]
    template = fields["tokenizer.chat_template"].contents()
    for part in smollm2.CHAT.split("{}")[0].split("<|im_start|>")[1].split("<|im_end|>")[:1]:
        assert part.removeprefix("system\n") in template


def test_the_language_model_says_what_its_formulas_say(real, machine):
    """The same top token wherever the reference is sure, over 200 tokens that begin with a question and its answer."""
    there = real(smollm2)
    model = smollm2.SmolLM2(context=256, weights=there)
    asked = model.ids(smollm2.CHAT.format("What is the capital of France?"))
    answer = model.ids("The capital of France is Paris.<|im_end|>")
    ids = np.concatenate([asked, answer, model.ids("\n" + "\n".join(PASSAGES[1:7]))])[:200]
    got, want = model.logits(ids), reference.language_model(ids, there.read, there.config)
    best = np.sort(want, axis=-1)[:, -2:]
    margin = best[:, 1] - best[:, 0]
    same = got.argmax(-1) == want.argmax(-1)
    # The reference gives this answer. It is unsure of the first token (a margin of 0.08) and sure of all others.
    answers = slice(len(asked) - 1, len(asked) - 1 + len(answer))
    assert want[answers].argmax(-1).tolist() == answer.tolist() and (margin[answers][1:] > 0.2).all()
    assert same[margin > 0.2].all() and same[margin > 0.05].mean() >= 0.99
    assert abs(reference.perplexity(got, ids) / reference.perplexity(want, ids) - 1) < 5e-3


@pytest.mark.parametrize("formats, bound", [("mxfp8", 2e-2), (("bf16", "nvfp4"), 4e-3)], ids=str)
def test_two_real_layers_in_block_formats(real, emulator, formats, bound):
    """Logits, since two layers alone predict nothing: equally good passes with mxfp8 activations, whose inputs differ by
    2^-16, have perplexities that differ by 3 %, and logits that differ by 6e-3."""
    there = real(smollm2)
    short = weights.Weights(there.name, there.read, dict(there.config, layers=2), there.digest, there.tokenizer)
    model = smollm2.SmolLM2(formats, context=64, weights=short)
    ids = model.ids(PASSAGES[0])
    want = reference.language_model(ids, there.read, model.config, operand=reference.as_held(model))
    assert relative_l2(model.logits(ids), want) < bound


@pytest.mark.parametrize(
    "formats, bound", [("mxfp8", 0.02), (("bf16", "nvfp4"), 0.02), ("nvfp4", 0.05), ("mxfp4", 0.05)], ids=str
)
def test_the_real_model_in_block_formats(real, gpu, formats, bound):
    """On 512 tokens. With 4-bit activations, rounding errors between products move codes to their neighbors, which adds
    noise to every token's probability. docs/models.md has the spread of equally good passes."""
    there = real(smollm2)
    model = smollm2.SmolLM2(formats, context=512, weights=there)
    ids = np.array(there.tokenizer.encode("\n".join(PASSAGES)).ids[:512])
    options = dict(operand=reference.as_held(model, np.float32), dtype=np.float32)
    want = reference.language_model(ids, there.read, model.config, **options)
    assert abs(reference.perplexity(model.logits(ids), ids) / reference.perplexity(want, ids) - 1) < bound


def test_the_language_model_answers(real, gpu):
    """Generation through a graph; `make chat` runs it on the emulator."""
    there = real(smollm2)
    prompts = ["What is the capital of France?", "Name a color."]
    model = smollm2.SmolLM2(context=256, batch=2, weights=there)
    answers = model.generate(prompts, 20)
    assert "Paris" in answers[0]
    assert [model.generate(prompt, 20) for prompt in prompts] == answers
