"""The error of attention against float64 on N(0,1) data, with the bounds of docs/accuracy.md; and weights beside a
sink."""

from pathlib import Path

import pytest

import ptxrt
from scripts import script

DOCS = Path(__file__).resolve().parent.parent / "docs"

pytestmark = pytest.mark.skipif(not DOCS.is_dir(), reason="an installed package has no docs")

if DOCS.is_dir():
    accuracy = script("docs/accuracy.py")
    BOUNDED = [formats for formats in accuracy.FORMATS if formats.normal]
    NORMAL = accuracy.Data("N(0,1)", "", lambda: accuracy.normal(1, 1, 512, 128))  # two splits of the keys
    BIASED = accuracy.Data("bias", "", lambda: accuracy.normal(1, 1, 384, 128, bias=6.0))
    BOTH_BIASED = accuracy.Data("both", "", lambda: accuracy.normal(1, 1, 192, 128, 0.25, 6.0, 1.0))
    SINKS = {
        bits: accuracy.Data("sink", "", lambda bits=bits: accuracy.beside_a_sink(bits, queries=20))
        for bits in (8, 11, 14)
    }
    MODEL = accuracy.Data("model", "", accuracy.of_a_model)
else:
    BOUNDED = []


@pytest.fixture(params=["native", "portable"])
def text(request):
    """Run a test on each PTX text of the kernels."""
    with ptxrt.using("emulator", ptx=request.param):
        yield


@pytest.mark.parametrize("formats", BOUNDED, ids=str)
def test_normal_data(text, formats):
    assert accuracy.measured(formats, NORMAL).misses(formats) == []


@pytest.mark.gpu
@pytest.mark.parametrize("formats", BOUNDED, ids=str)
def test_normal_data_on_a_card(gpu, formats):
    assert accuracy.measured(formats, accuracy.NORMAL).misses(formats) == []


def test_bf16_against_the_same_step_by_step(emulator):
    """At most twice the error of rounding scores, weights and output to bfloat16 one after the other."""
    found = accuracy.measured(accuracy.FORMATS[0], NORMAL)
    assert found.out.relative_l2 <= 2 * accuracy.step_by_step(NORMAL).out.relative_l2


@pytest.mark.parametrize(
    "formats", [formats for formats in BOUNDED if formats.is_quantized_before and "4" in formats.qk], ids=str
)
def test_smoothing_undoes_a_bias_of_keys(emulator, formats):
    """Four-bit keys are smoothed by default: with a bias they are as accurate as without; unsmoothed they are
    useless."""
    assert accuracy.measured(formats, BIASED).out.cosine >= formats.normal.cosine
    plain = accuracy.Data("", "", lambda: BIASED.arrays, dict(smooth_k=False))
    assert accuracy.measured(formats, plain).out.cosine < 0.9


@pytest.mark.parametrize(
    "formats", [formats for formats in BOUNDED if formats.is_quantized_before and formats.pv == "mxfp8"], ids=str
)
def test_smoothing_of_queries(emulator, formats):
    """Smoothing queries that share a bias reduces the rounding error of queries; that of keys and weights remains."""
    errors = []
    for smooth_q in (False, True):
        data = accuracy.Data("", "", lambda: BOTH_BIASED.arrays, dict(smooth_k=True, smooth_q=smooth_q))
        errors.append(accuracy.measured(formats, data))
    assert errors[1].out.cosine >= formats.normal.cosine
    assert errors[1].out.relative_l2 < 0.95 * errors[0].out.relative_l2


@pytest.mark.parametrize("bits", [8, 11, 14])
@pytest.mark.parametrize("formats", [formats for formats in BOUNDED if formats.sink], ids=str)
def test_a_tail_beside_a_sink_survives(emulator, formats, bits):
    """One key beside 4095 others, each with 2^-bits of its weight, in one run: with splits most keys would not share
    one with the sink. There are more queries than the kernels for few take."""
    out = accuracy.unsplit(formats, SINKS[bits])
    assert accuracy.share_beside(SINKS[bits]) > 0.2
    assert accuracy.weights_alone(formats, SINKS[bits], out).relative_l2 <= formats.sink


@pytest.mark.parametrize("formats", BOUNDED, ids=str)
def test_the_data_of_a_model(emulator, formats):
    """The error on the queries, keys and values of data/ is close to that of normal data: at most .183 and .180 with
    mxfp4+mxfp8."""
    assert accuracy.measured(formats, MODEL).out.relative_l2 <= 1.05 * formats.normal.relative_l2


@pytest.mark.parametrize("format, worse", [("mxfp8", "floor"), ("mxfp4", "floor")])
def test_the_rules_of_operands_keep_the_gain(emulator, format, worse):
    """Under the rule of OCP MX saturation costs more gain than the bounds allow."""
    formats = next(f for f in BOUNDED if f.qk == f.pv == format)
    gains = [accuracy.measured(formats, NORMAL, rule).out.gain for rule in (None, worse)]
    assert 1 - gains[1] > 2 * abs(1 - gains[0])
