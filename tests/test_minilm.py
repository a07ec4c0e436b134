"""The examples' sentence encoder, and what both examples' models share: formats, missing files, cached weights."""

import os
import sys
from pathlib import Path

import encode
import minilm
import numpy as np
import products
import pytest
import weights
from click.testing import CliRunner

import model_reference as reference
import ptxrt
from small_models import TEXT, folder_of_quantized_weights, operands, real, relative_l2, small_encoder  # noqa: F401

PASSAGES = (Path(__file__).resolve().parent.parent / "data" / "passages.txt").read_text().splitlines()

# ---------------------------------------------------------------------------------------------------------------------
# Encoder

TEXTS = [TEXT[:9], TEXT[5:36], TEXT[20:22], TEXT]


def test_embeddings_are_those_of_the_formulas(text_machine):
    """A single text replays the graph of its length; in a batch it has other neighbors. The bits are the same."""
    model = minilm.MiniLM(weights=small_encoder())
    want = np.stack([reference.encoder(ids, model.weights.read, model.config) for ids in TEXTS])
    got = model.encode(TEXTS)
    assert got.dtype == np.float32 and got.shape == (4, 96)
    assert (got * want).sum(-1).min() > 0.9999
    for i in range(2):
        assert (model.encode(TEXTS[i : i + 1]).view(np.uint32) == got[i].view(np.uint32)).all()
    assert (model.encode([TEXTS[1][:9]]) != got[0]).any()  # replays the graph of 9 tokens with another text
    assert (model.encode(TEXTS[:1]).view(np.uint32) == got[0].view(np.uint32)).all()


@pytest.mark.parametrize(
    "formats, attention", [("mxfp8", "bf16"), ("nvfp4", "bf16"), (("bf16", "nvfp4"), "nvfp4+bf16")], ids=str
)
def test_embeddings_in_block_formats_are_those_of_the_same_operands(machine, formats, attention):
    model = minilm.MiniLM(formats, attention=attention, weights=small_encoder())
    want, plain = (
        np.stack([reference.encoder(ids, model.weights.read, model.config, operand=how) for ids in TEXTS])
        for how in (operands(model), None)
    )
    got = model.encode(TEXTS)
    if attention == "bf16":
        assert relative_l2(got, want) < 0.8 * relative_l2(want, plain)
    assert (got * plain).sum(-1).min() > 0.8
    assert (model.encode(TEXTS[:1]).view(np.uint32) == got[0].view(np.uint32)).all()


def test_a_layer_of_the_encoder_has_seven_launches(emulator):
    model = minilm.MiniLM(weights=small_encoder())
    model.encode(TEXTS[:1])
    ((graph, *_),) = model._graphs.values()
    assert len(graph.launches) <= 7 * model.config["layers"] + 3


def test_graphs_of_lengths_that_came_long_ago_go(emulator, monkeypatch):
    monkeypatch.setattr(minilm, "MOST_GRAPHS", 2)
    model = minilm.MiniLM(weights=small_encoder())
    for count in (2, 3, 4):
        model.encode([TEXT[:count]])
    assert list(model._graphs) == [3, 4]


def test_long_lists_are_cut_into_calls(emulator, monkeypatch):
    model = minilm.MiniLM(weights=small_encoder())
    whole = model.encode(TEXTS)
    monkeypatch.setattr(minilm, "MOST_TOKENS", 40)
    assert (model.encode(TEXTS) == whole).all()
    assert model.encode([]).shape == (0, 96)


# ---------------------------------------------------------------------------------------------------------------------
# Wrong inputs


def test_formats_that_no_kernel_has_name_their_product():
    with pytest.raises(ptxrt.ArgumentError, match="formats of qkv: there is no product mxfp8 x nvfp4.*nearest: "):
        minilm.MiniLM(("mxfp8", "nvfp4"))
    with pytest.raises(ptxrt.ArgumentError, match="formats of down: .*nearest: "):
        minilm.MiniLM({"down": ("bf16", "mxfp6")})
    with pytest.raises(ptxrt.ArgumentError, match="no product 'dwon'; did you mean 'down'"):
        minilm.MiniLM({"dwon": "mxfp8"})
    with pytest.raises(ptxrt.ArgumentError, match=r"formats of up: 7 came; pass a format, or \(activations, weights\)"):
        minilm.MiniLM({"up": 7})
    with pytest.raises(ptxrt.ArgumentError, match=r"no kernel for mxfp4\+nvfp4; nearest: "):
        minilm.MiniLM(attention="mxfp4+nvfp4")


def test_scale_rules_are_checked_before_anything_is_read_or_written(emulator, monkeypatch, tmp_path):
    monkeypatch.setenv("PTXRT_CACHE", str(tmp_path / "a" / "b" / "c"))
    monkeypatch.setattr(minilm, "load", lambda: pytest.fail("the weights are read"))
    mx, nv = "'floor', 'ceil', 'rceil', 'even'", "'amax', 'four_over_six'"
    for rule in ("/../../../escaped", "bogus\0", "", "amax", 3, ["floor"]):
        with pytest.raises(ptxrt.ArgumentError) as error:
            minilm.MiniLM("mxfp8", scale_rule=rule)
        assert str(error.value) == f"scale_rule is {rule!r}; mxfp8 has {mx}; pass one of these, or leave it out"
    with pytest.raises(ptxrt.ArgumentError, match=f"'even'; nvfp4 has {nv}; pass one of these"):
        minilm.MiniLM(("bf16", "nvfp4"), scale_rule="even")
    with pytest.raises(ptxrt.ArgumentError, match=f"'amax'; nvfp4 has {nv}; mxfp4 has {mx}; pass one that all have"):
        minilm.MiniLM({"qkv": "nvfp4", "down": ("bf16", "mxfp4")}, scale_rule="amax")
    for rule in ("bogus", "even"):
        with pytest.raises(ptxrt.ArgumentError, match=f"'{rule}', but all formats are bf16.*mxfp8 has {mx}.*has {nv}"):
            minilm.MiniLM("bf16", scale_rule=rule)
    assert not list(tmp_path.iterdir())
    model = minilm.MiniLM({"qkv": "mxfp8", "down": "mxfp4"}, scale_rule="ceil", weights=small_encoder())
    assert [folder.name.split("-")[1] for folder in (tmp_path / "a" / "b" / "c").iterdir()] == ["ceil"]
    assert model.products.rule("mxfp4") == "ceil"


def test_wrong_texts_are_refused(emulator):
    model = minilm.MiniLM(weights=small_encoder())
    for texts, message in [
        (["a", " "], "text 1 is empty"),
        ([range(65)], "65 tokens, the context 64"),
        ([[3, 200]], "text 0 has id 200, which is none of the 200 tokens"),
        ("a", "texts is a string"),
        (None, "encode: texts is None; pass a list of texts"),
        (5, "encode: texts is 5; pass a list of texts"),
        (np.array(5), "pass a list of texts"),
        ([[[1], [2, 3]]], "encode: text 0 is no array .*inhomogeneous.*; pass a string, or whole numbers of one axis"),
        ([[1], [2, [3]]], "encode: text 1 is no array"),
        ([None], "text 0 has ids object"),
        (
            ["a", "caf\udce9"],
            r"encode: text 1 has character '\\udce9' at index 3, which UTF-8 does not encode; pass text",
        ),
        (["\ud83d\ude00"], r"encode: text 0 has character '\\ud83d' at index 0"),
    ]:
        for use in (model.encode, model.ids):
            with pytest.raises(ptxrt.ArgumentError, match=message):
                use(texts)
    assert model.encode(iter(["a", "b"])).shape == (2, 96)
    assert model.encode(["caf\xe9"]).shape == (1, 96)
    model.weights.tokenizer = None
    with pytest.raises(ptxrt.ArgumentError, match="text 0 is a string, but these weights have no tokenizer"):
        model.encode(["a"])


def test_an_element_that_raises_is_no_wrong_argument(emulator):
    model = minilm.MiniLM(weights=small_encoder())
    with pytest.raises(TypeError, match="can only concatenate"):
        model.encode(text + 1 for text in ["a"])


def test_wrong_ids_are_refused_while_the_graph_of_their_length_runs(emulator):
    model = minilm.MiniLM(weights=small_encoder())
    ids = np.array([3, 1, 4, 1, 5], np.int32)
    want = model.encode([ids])
    for wrong in (ids - 4, ids + 196, ids * np.float32(1), ids.astype(str), ids[None]):
        with pytest.raises(ptxrt.ArgumentError, match="text 0 has id"):
            model.encode([wrong])
    for same in ([ids], [list(ids)], ids[None], [ids.astype(np.int64)], [np.array(ids[::-1])[::-1]]):
        assert (model.encode(same) == want).all()
    assert len(model._graphs) == 1


def test_files_that_are_missing_or_others(tmp_path, monkeypatch):
    name = minilm.FILE
    pytest.importorskip("safetensors"), pytest.importorskip("tokenizers")
    monkeypatch.setenv("PTXRT_MODELS", str(tmp_path))
    with pytest.raises(
        ptxrt.FileError, match=f"the weights {name} are not in .*, which PTXRT_MODELS names; run `make models`"
    ) as error:
        minilm.load()
    assert "\n" not in str(error.value)
    (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ptxrt.FileError, match="has SHA-256 .*another file, or damaged; run `make models`"):
        minilm.load()


@pytest.mark.parametrize("name", ["gguf", "tokenizers", "safetensors"])
def test_readers_that_are_not_installed(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ptxrt.FileError, match=f"the weights are read by {name}, .*; run `make models`"):
        weights.reader(name)


def test_packages_that_are_not_installed(monkeypatch):
    monkeypatch.delenv("PTXRT_MODELS", raising=False)
    with pytest.raises(ptxrt.FileError, match="are not installed; run `make models`"):
        weights.model_file("x.gguf", ".", "no_such_package_of_weights")


def test_tensors_of_another_shape_are_refused(emulator):
    there = small_encoder()
    other = weights.Weights(there.name, lambda name: there.read(name)[:-1], there.config, "0", there.tokenizer)
    with pytest.raises(ptxrt.FileError, match=r"position_embeddings.weight has shape \[63, 96\], the model \[64, 96\]"):
        minilm.MiniLM(weights=other)
    with pytest.raises(ptxrt.FileError, match="it has no tensor embeddings.position_embeddings.weight"):
        minilm.MiniLM(weights=weights.Weights("x", {}.__getitem__, there.config, "0"))


# ---------------------------------------------------------------------------------------------------------------------
# Command line


def test_encode_lists_the_nearest_first(emulator, monkeypatch, tmp_path):
    small = small_encoder()
    monkeypatch.setattr(encode, "MiniLM", lambda *formats, **options: minilm.MiniLM(*formats, weights=small, **options))
    (tmp_path / "more.txt").write_text("xyz\n\nabc\n")
    done = CliRunner().invoke(
        encode.encode,
        ["abcd", "hello", "--file", str(tmp_path / "more.txt"), "-o", str(tmp_path / "e.npy"), "--compare"],
    )
    assert done.exit_code == 0, done.output
    written = np.load(tmp_path / "e.npy")
    assert written.shape == (4, 96) and written.dtype == np.float32
    names = [line.split()[-1] for line in done.stdout.splitlines()[:3]]
    assert names == [["hello", "xyz", "abc"][i] for i in np.argsort(-(written[1:] @ written[0]))]
    assert "cosine with float64: 0.9999" in done.stdout
    assert CliRunner().invoke(encode.encode, []).exit_code == 2
    (tmp_path / "more.txt").write_bytes(b"\xff\xfe")
    for path, message in [(tmp_path / "more.txt", "is no text in UTF-8"), (tmp_path / "none.txt", "none.txt")]:
        done = CliRunner().invoke(encode.encode, ["a", "--file", str(path)])
        assert done.exit_code == 1 and message in done.stderr


def test_encode_refuses_text_that_is_no_utf_8(emulator, monkeypatch):
    monkeypatch.setattr(encode, "MiniLM", lambda *formats, **options: minilm.MiniLM(weights=small_encoder()))
    done = CliRunner().invoke(encode.encode, ["hello", os.fsdecode(b"caf\xe9")])
    assert done.exit_code == 1 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        "Error: encode: text 1 has character '\\udce9' at index 3, which UTF-8 does not encode; pass"
    )


def test_encode_says_in_one_line_what_is_missing(monkeypatch, tmp_path):
    pytest.importorskip("safetensors"), pytest.importorskip("tokenizers")
    monkeypatch.setenv("PTXRT_MODELS", str(tmp_path))
    done = CliRunner().invoke(encode.encode, ["hello"])
    assert done.exit_code == 1 and "run `make models`" in done.stderr.splitlines()[-1]
    done = CliRunner().invoke(encode.encode, ["hello", "--weights", "mxfp8", "--activations", "nvfp4"])
    assert done.exit_code == 1 and "formats of qkv: there is no product nvfp4 x mxfp8" in done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# Cached quantized weights


def quantizing(monkeypatch) -> list:
    """Record the shapes that `quantize` is called on from now on."""
    seen, real = [], ptxrt.quantize
    monkeypatch.setattr(
        ptxrt, "quantize", lambda x, *rest, **options: (seen.append(tuple(x.shape)), real(x, *rest, **options))[1]
    )
    return seen


def test_weights_are_quantized_once(emulator, monkeypatch, folder_of_quantized_weights):
    seen = quantizing(monkeypatch)
    make = lambda **options: minilm.MiniLM(
        options.pop("formats", "nvfp4"), weights=small_encoder(options.pop("seed", 0)), **options
    )
    first = make().encode([TEXT[:3]])
    assert len(seen) == 8
    assert (make().encode([TEXT[:3]]) == first).all() and len(seen) == 8
    make(formats="mxfp4"), make(seed=1), make(scale_rule="four_over_six")
    assert len(seen) == 4 * 8
    files = sorted(folder_of_quantized_weights.rglob("*.npz"))
    assert len(files) == len(seen)
    # A damaged or missing file is written again.
    kept = next(path for path in files if path.name == "down.0.nvfp4.npz" and "default" in str(path))
    kept.write_bytes(kept.read_bytes()[:100])
    del seen[:]
    assert make().products.placed["down.0"].format == "nvfp4"
    make(seed=1), make()
    assert len(seen) in (1, 9)


def test_a_folder_that_cannot_be_written_costs_time_alone(emulator, monkeypatch, tmp_path, capsys):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("PTXRT_CACHE", str(tmp_path / "file"))
    model = minilm.MiniLM("mxfp8", weights=small_encoder())
    assert model.encode([TEXT[:2]]).shape == (1, 96)
    assert capsys.readouterr().err.count("quantized weights are not kept") == 1


def test_an_error_while_weights_are_saved_leaves_the_old_file(emulator, monkeypatch, folder_of_quantized_weights):
    minilm.MiniLM("mxfp8", weights=small_encoder())
    before = {path: path.read_bytes() for path in folder_of_quantized_weights.rglob("*.npz")}
    monkeypatch.setattr(products, "_loaded", lambda path: None)

    def killed(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        minilm.MiniLM("mxfp8", weights=small_encoder())
    assert {path: path.read_bytes() for path in folder_of_quantized_weights.rglob("*.npz")} == before


def test_the_users_folder_where_nothing_names_another(monkeypatch, tmp_path):
    monkeypatch.delenv("PTXRT_CACHE")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert products.cache_folder() == tmp_path / "ptxrt"


# ---------------------------------------------------------------------------------------------------------------------
# The real model


def test_the_tokenizers_refuse_surrogates(real):
    """Both take any other character, so that the check of texts refuses nothing else."""
    import smollm2

    for module in (minilm, smollm2):
        tokenizer = real(module).tokenizer
        with pytest.raises(ptxrt.ArgumentError, match="^the text has character '.udfff' at index 2"):
            weights.token_ids(tokenizer, "the text", "a \udfff")
        for text in ("a\0b", "\ufffe\uffff", "\ue000", "\U0010ffff", "caf\xe9"):
            assert weights.token_ids(tokenizer, "the text", text) == tokenizer.encode(text).ids


def test_embeddings_find_passages(real, machine):
    there = real(minilm)
    vocabulary = there.tokenizer.get_vocab()
    model = minilm.MiniLM(weights=there)
    texts = ["How do plants turn light into sugar?", PASSAGES[3], PASSAGES[10]]
    for text, ids in zip(texts, model.ids(texts)):
        assert ids.tolist() == reference.word_pieces(text, vocabulary)
    got = model.encode(texts)
    want = np.stack([reference.encoder(ids, there.read, there.config) for ids in model.ids(texts)])
    assert (got * want).sum(-1).min() >= 0.9999
    assert got[0] @ got[1] > 0.5 > 0.3 > got[0] @ got[2]
