"""`ptxrt layout`: element places of every kind of mma.sync, as text, JSON and pictures."""

import json
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from click.testing import CliRunner

from ptxrt import atlas
from ptxrt.commands import main
from ptxrt.emulator import mma
from ptxrt.errors import ArgumentError


def run(*arguments, code=0, **options):
    done = CliRunner().invoke(main, ["layout", *map(str, arguments)], **options)
    assert done.exit_code == code, done.output
    return done.output


def named(kind):
    """The operands of a kind, each with all its selectors."""
    for operand in atlas.OPERANDS:
        if not operand.startswith("scales"):
            yield operand, 0, 0
        elif kind.scales:
            threads = 2 if operand == "scales_a" else 4
            yield from ((operand, byte, thread) for byte in kind.scales.bytes for thread in range(threads))


@pytest.mark.parametrize("kind", atlas.KINDS.values(), ids=lambda kind: kind.name)
def test_every_place_is_held_once(kind):
    for operand, byte, thread in named(kind):
        places = kind.places(operand, byte, thread).reshape(-1, 3)
        assert len(set(map(tuple, places.tolist()))) == len(places)
        if not operand.startswith("scales"):
            registers = {"a": 4, "b": 2, "c": 2 if kind.accumulator == "f16" else 4}[operand]
            assert places[:, 0].max() == 31 and places[:, 1].max() == registers - 1
            assert len(places) == 32 * registers * 32 // kind.bits(operand)


def test_places_by_hand():
    """From the figures of the PTX ISA: 9.7.14.5 for elements, 9.7.14.3 for scales."""
    found = atlas.KINDS
    assert str(found["bf16"].who_holds("a", 9, 3)) == "lane 5, register 1, bits 31..16"
    assert str(found["tf32"].who_holds("b", 6, 2)) == "lane 10, register 1, bits 31..0"
    assert str(found["fp8"].who_holds("a", 2, 21)) == "lane 9, register 2, bits 15..8"
    assert str(found["mxf4"].who_holds("b", 17, 3)) == "lane 14, register 0, bits 7..4"
    assert str(found["f16_f16"].who_holds("c", 12, 5)) == "lane 18, register 1, bits 31..16"
    assert str(found["int8"].who_holds("c", 12, 5)) == "lane 18, register 3, bits 31..0"
    assert str(found["mxf4"].who_holds("scales_a", 11, 1, 2, 1)) == "lane 15, register 0, bits 31..24"
    assert str(found["mxf4nvf4"].who_holds("scales_b", 2, 6, 0, 3)) == "lane 27, register 0, bits 23..16"


def test_the_emulator_has_the_same_outputs_and_scales():
    kind = atlas.KINDS["mxf8f6f4"]
    for lane, i in np.ndindex(32, 4):
        assert kind.places("c")[mma._ROW[i, lane], mma._COLUMN[i, lane]].tolist() == [lane, i, 0]
    for thread in range(4):
        assert (kind.places("scales_b", 3, thread)[0, :, 0] == mma._SCALE_LANES_B[thread]).all()


def test_maps_as_text():
    text = run("mxf4", "--operand", "scales_a", "--selectors", "2,1")
    assert "scales of A of mxf4, byte 2, thread 1: mma.sync.aligned.kind::mxf4" in text
    assert "row\\k   0-31  32-63" in text and "    9   7.s2   7.s3" in text
    text = run("bf16")
    assert all(title in text for title in ("A of bf16", "B of bf16", "C and D of bf16")) and "scales" not in text
    assert "row\\k    0-1    2-3" in text and "\x1b[" not in text
    assert "\x1b[38;2;0;0;0m\x1b[48;2;128;184;238m   0.a0\x1b[0m" in run("bf16", "--operand", "a", color=True)
    assert "row\\col" in run("f16_f16", "--operand", "c") and "0.c0" in run("f16_f16", "--operand", "c")


def test_kinds_elements_and_json():
    assert set(json.loads(run("--json"))) == set(atlas.KINDS)
    assert all(name in run() for name in atlas.KINDS)
    assert run("mxf4", "--operand", "b", "--element", "17,3") == "b[17, 3] of mxf4: lane 14, register 0, bits 7..4\n"
    assert json.loads(run("mxf4", "--operand", "b", "--element", "17,3", "--json")) == dict(
        lane=14, register=0, position=1, bits=4
    )
    assert np.shape(json.loads(run("tf32", "--json"))["places"]["a"]) == (16, 8, 3)


def test_pictures(tmp_path):
    svg = tmp_path / "a.svg"
    run("mxf8f6f4", "--operand", "a", "--svg", svg)
    root = ElementTree.parse(svg).getroot()
    words = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert words.count("5.a2") == 1 and len([each for each in words[1:] if ".a" in each]) == 128
    pytest.importorskip("matplotlib")
    run("tf32", "--operand", "b", "--png", tmp_path / "b.png")
    assert (tmp_path / "b.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "there is no folder" in run(
        "tf32", "--operand", "b", "--svg", svg, "--png", tmp_path / "no" / "b.png", code=1
    )


@pytest.mark.parametrize(
    "arguments, part",
    [
        (["mxf5"], "no kind of mma.sync is called 'mxf5'; there is bf16, f16,"),
        (["--operand", "a"], "name a kind: bf16,"),
        (["bf16", "--element", "1,1"], "--element, --selectors, --svg and --png want one operand"),
        (["bf16", "--operand", "a", "--element", "1"], "expected two whole numbers with a comma between"),
        (["bf16", "--operand", "a", "--element", "16,0"], "it has 16 rows and 16 columns"),
        (["bf16", "--operand", "scales_a"], "bf16 has no scales; kinds with scales are mxf8f6f4,"),
        (["mxf4", "--operand", "a", "--selectors", "2,0"], "selectors 2,0 choose scales"),
        (["mxf4", "--operand", "scales_a", "--selectors", "1,0"], "the byte is one of 0, 2, the thread one of 0, 1"),
    ],
)
def test_wrong_calls(arguments, part):
    done = CliRunner().invoke(main, ["layout", *arguments])
    assert done.exit_code not in (0, None) and part in " ".join(done.output.split())


def test_operands_have_names():
    with pytest.raises(ArgumentError, match="operand is 'd'; there is a, b, c, scales_a, scales_b"):
        atlas.KINDS["bf16"].places("d")
