"""The findings of the matrix instruction probes, against the tile code, the emulator's layouts and
docs/fragments.md."""

from pathlib import Path

import numpy as np
import pytest

from ptxrt import atlas
from ptxrt.emulator import mma
from scripts import script

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"

pytestmark = pytest.mark.skipif(not DOCS.is_dir(), reason="an installed package has no docs")

if DOCS.is_dir():
    fragments = script("docs/fragments.py")
    KINDS = {name: atlas.KINDS[name] for name in fragments.KINDS}
else:
    KINDS = {}

SCALED = [name for name, kind in KINDS.items() if kind.scales]


@pytest.fixture(scope="session", params=["emulator", pytest.param("native", marks=pytest.mark.gpu)])
def found(request, on_machine):
    """Findings of all probes on the emulator, and on a GPU if there is one."""
    with on_machine(request.param):
        return fragments.all_findings()


def tile_k(byte, element, width):
    """The k of an element in byte `byte` of a row in shared memory."""
    return {1: byte // 4, 2: byte // 2, 4: byte, 8: 2 * byte + element % 2}[width]


@pytest.mark.parametrize("name", KINDS)
def test_the_tile_code_loads_a_where_the_instruction_takes_it(found, name):
    kind = fragments.kind_of(found, name)
    assert sorted(map(tuple, kind.a.tolist())) == [(row, k) for row in range(16) for k in range(kind.depth)]
    for number, (row, k) in enumerate(kind.a.tolist()):
        lane, register, element = kind.where(number, 4)
        place = int(found["probe_fragments"]["a"][lane, register, element * 4 // kind.width])
        assert (place // 32, tile_k(place % 32, element, kind.width)) == (row, k)


@pytest.mark.parametrize("name", KINDS)
def test_the_tile_code_loads_b_where_the_instruction_takes_it(found, name):
    """For both neighboring tiles of columns. `Kind` itself compares the first with the columns of the products."""
    kind = fragments.kind_of(found, name)
    assert sorted(map(tuple, kind.b.tolist())) == [(column, k) for column in range(8) for k in range(kind.depth)]
    first, second = found["probe_fragments"]["b"].swapaxes(0, 1)
    assert (second == first + 32 * 8).all()


@pytest.mark.parametrize("name", ["bf16", "f16", "f16_f16"])
def test_the_transposed_load_brings_b_where_the_instruction_takes_it(found, name):
    kind = fragments.kind_of(found, name)
    for number, (column, k) in enumerate(kind.b.tolist()):
        lane, register, element = kind.where(number, 2)
        for tile in range(2):
            place = int(found["probe_fragments"]["b_transposed"][lane, tile, register, 2 * element])
            assert (place // 32, place % 32 // 2) == (k, column + 8 * tile)


@pytest.mark.parametrize("name", SCALED)
def test_the_tile_code_brings_scales_where_the_instruction_takes_them(found, name):
    """Thread pair p of a quad has word p of A's rows; thread t has the scales of the columns of B's tile t."""
    kind, tiles = fragments.kind_of(found, name), found["probe_fragments"]
    for index, selector in enumerate(KINDS[name].scales.bytes):
        for block in range(kind.blocks):
            for row in range(16):
                for thread in range(2):
                    number = kind.scale("a", row, block, index, thread)
                    assert tiles["scale_a"][divmod(number, 4)] == 8 * row + 4 * thread + selector + block
            for column in range(8):
                for thread in range(4):
                    number = kind.scale("b", column, block, index, thread)
                    assert tiles["scale_b"][divmod(number, 4)] == 4 * (8 * thread + column) + selector + block


def test_the_emulator_has_the_same_accumulators_and_scale_lanes(found):
    accumulator = found["probe_fragments"]["accumulator"]
    assert (accumulator[..., 0].T == mma._ROW).all() and (accumulator[..., 1].T == mma._COLUMN).all()
    for name in SCALED:
        kind = fragments.kind_of(found, name)
        for lanes, operand in ((mma._SCALE_LANES_A, "a"), (mma._SCALE_LANES_B, "b")):
            for thread, row in np.ndindex(lanes.shape):
                assert kind.scale(operand, row, 0, 0, thread) // 4 == lanes[thread, row]


def test_a_contradiction_between_probe_and_tile_code_is_an_error(found):
    tiles = dict(found["probe_fragments"])
    tiles["b"] = np.roll(tiles["b"], 4, axis=0)
    with pytest.raises(ValueError, match="loads columns of B to where other columns are multiplied"):
        fragments.Kind("wrong", 2, found["bf16"], tiles).b
    meets = found["bf16"]["meets"].copy()
    meets[7, meets[7] >= 0] = -2
    with pytest.raises(ValueError, match="element 7 of A does not meet one element of B"):
        fragments.Kind("wrong", 2, {"meets": meets}, found["probe_fragments"]).a
    meets = found["bf16"]["meets"].copy()
    meets[7] = meets[8]
    swapped = fragments.Kind("wrong", 2, {"meets": meets}, found["probe_fragments"])
    assert swapped.a[7].tolist() == swapped.a[8].tolist()


def test_the_atlas_has_every_kind():
    assert list(KINDS) == list(atlas.KINDS) == list(fragments.FACTS)


@pytest.mark.parametrize("name", KINDS)
def test_a_page_of_a_kind_says_all_there_is_to_say(name):
    """Pictures, rate class, order in a register, bits that must be zero, codes and sums, three mistakes, and the
    probe's name."""
    text = (DOCS / "fragments" / f"{name}.md").read_text(encoding="utf-8")
    for words in (
        "| rate, bf16 = 1 |",
        "| found by | `probe_mma_",
        "What must be zero: ",
        "\n- Sums: ",
        "## Three mistakes\n\n1. ",
        *("![Lanes and registers of A]", "![Lanes and registers of B]", "![Lanes and registers of C and D]", "\n3. "),
    ):
        assert words in text, words
    assert fragments.FACTS[name].order.split()[0] in text and "\nAn emulator's map is not silicon's. " in text
    assert ("## Scales" in text) == (name in SCALED)


def test_an_atlas_that_says_something_else_is_an_error(found, monkeypatch):
    places = atlas.Kind.places
    kind = fragments.kind_of(found, "tf32")
    fragments.contradictions(kind)
    monkeypatch.setattr(atlas.Kind, "places", lambda self, operand: np.roll(places(self, operand), 1, axis=0))
    with pytest.raises(ValueError, match="tf32: the atlas has elements of a where the probe does not find them"):
        fragments.contradictions(kind)


def test_the_pages_are_what_the_probes_find(found):
    files = fragments.pages(found)
    assert {str(path.relative_to(DOCS)) for path in (DOCS / "fragments").iterdir()} | {"fragments.md"} == set(files)
    for name, text in files.items():
        assert (DOCS / name).read_text(encoding="utf-8") == text, f"{name} is another: run `make docs`"
