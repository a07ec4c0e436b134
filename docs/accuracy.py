"""docs/accuracy.md with its pictures: errors of attention and products by format, data, scale rule; for `make
accuracy`.

python docs/accuracy.py [--machine emulator, portable or native] [--folder DIR]
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

import ptxrt  # noqa: E402
from ptxrt.accuracy import Comparison, Tolerance, compare  # noqa: E402
from ptxrt.bench import plots  # noqa: E402
from ptxrt.ops.attention import ATTENTION, exact_attention  # noqa: E402
from ptxrt.ops.gemm import PRODUCTS, call_of, exact_matmul, multiplied  # noqa: E402

# Formats and their error bounds


@dataclass(frozen=True)
class Formats:
    """One choice of formats. normal: error bounds for N(0,1) data, with lse in mean absolute error. sink: the bound on
    the rounding error of weights beside a sink.
    """

    qk: str
    pv: str
    quantize: str | None = None
    normal: Tolerance | None = None
    lse: float | None = None
    sink: float | None = None

    def __str__(self) -> str:
        return (self.qk if self.qk == self.pv else f"{self.qk}+{self.pv}") + (" in the kernel" if self.quantize else "")

    @property
    def words(self) -> dict[str, Any]:
        """The arguments of `attention`."""
        return dict(qk=self.qk, pv=self.pv, quantize=self.quantize)

    @property
    def way(self):
        """The implementation of `attention`."""
        return ATTENTION[self.qk, self.pv, self.quantize]

    @property
    def is_quantized_before(self) -> bool:
        """Whether operands are quantized to a block format before the kernel starts."""
        return bool(self.way.formats)


def _normal(relative_l2: float, cosine: float, gain: float) -> Tolerance:
    return Tolerance("what peers and emulations of the formats reach on normal data", relative_l2, cosine, gain)


FORMATS = (
    Formats("bf16", "bf16", normal=_normal(4e-3, 0.99999, 1e-3)),
    Formats("f16", "f16", normal=_normal(4e-3, 0.99999, 1e-3)),
    Formats("mxfp8", "mxfp8", normal=_normal(0.06, 0.998, 0.005), lse=0.008, sink=0.02),
    Formats("mxfp8", "bf16", normal=_normal(0.045, 0.999, 0.003), lse=0.008, sink=0.02),
    Formats("nvfp4", "bf16", normal=_normal(0.15, 0.99, 0.015), lse=0.015),
    Formats("nvfp4", "mxfp8", normal=_normal(0.15, 0.989, 0.015)),
    Formats("nvfp4", "nvfp4", normal=_normal(0.20, 0.980, 0.025), lse=0.015, sink=0.10),
    Formats("mxfp4", "mxfp8", normal=_normal(0.18, 0.984, 0.03), lse=0.035),
    Formats("mxfp4", "mxfp4", normal=_normal(0.27, 0.965, 0.05), lse=0.035),
    Formats("mxfp4", "bf16", normal=_normal(0.18, 0.984, 0.03), lse=0.035),
    Formats("mxfp4", "bf16", "in_kernel"),
)

# ---------------------------------------------------------------------------------------------------------------------
# Data


@dataclass(frozen=True)
class Data:
    """Queries, keys and values. options: arguments of `attention` for formats that are quantized before."""

    name: str
    text: str
    make: Callable[[], tuple[np.ndarray, np.ndarray, np.ndarray]]
    options: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return q, k and v."""
        return self.make()

    @cached_property
    def exact(self) -> tuple[np.ndarray, np.ndarray]:
        """Return output and lse in float64."""
        return exact_attention(*self.arrays)


def normal(
    batch: int,
    heads: int,
    length: int,
    dim: int,
    score_deviation: float = 1.0,
    bias: float = 0.0,
    query_bias: float = 0.0,
):
    """Return N(0,1) data. Queries are multiplied by a factor; keys and queries have a bias with the given deviations
    for each head and channel."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((batch, heads, length, dim), np.float32) for _ in range(3))
    of_keys, of_queries = (
        np.float32(size) * rng.standard_normal((batch, heads, 1, dim), np.float32) for size in (bias, query_bias)
    )
    return np.float32(score_deviation) * q + of_queries, k + of_keys, v


def beside_a_sink(bits: float, queries: int = 64, keys: int = 4096, dim: int = 128):
    """Return data with one key whose score is `bits` steps of log2 above the mean score of the others. The values of
    the others have a nonzero mean for each channel, so that losing their weights shows.

    Queries are a vector of signs with a little noise. The key is a multiple of that vector with the score ln 2 times
    `bits`.
    """
    rng = np.random.default_rng(0)
    signs = np.sign(rng.standard_normal(dim)).astype(np.float32)
    q = signs + np.float32(0.25) * rng.standard_normal((1, 1, queries, dim), np.float32)
    k = rng.standard_normal((1, 1, keys, dim), np.float32)
    k[:, :, keys // 2] = signs * np.float32(bits * np.log(2) / np.sqrt(dim))
    return q, k, rng.standard_normal((1, 1, 1, dim), np.float32) + rng.standard_normal((1, 1, keys, dim), np.float32)


def of_a_model():
    """Return the queries, keys and values of data/."""
    return tuple(np.load(ROOT / "data" / f"minilm_{name}.npy").astype(np.float32) for name in "qkv")


NORMAL = Data("N(0,1)", "N(0,1), B2 H4 S1024 D128", lambda: normal(2, 4, 1024, 128))
SMALL = Data("N(0,1)", "N(0,1), B1 H2 S512 D128", lambda: normal(1, 2, 512, 128))
BIAS = "keys with a bias of N(0, 6) for each channel, B1 H2 S512 D128"
BOTH = (
    "a quarter of N(0,1) about a bias of N(0,1) for queries, keys with a bias of N(0, 6) for each "
    "channel, B1 H2 S512 D128"
)
DATA = (
    NORMAL,
    Data(
        "scores N(0,2)",
        "N(0,1) with queries doubled, so that scores have a deviation of 2, B1 H2 S512 D128",
        lambda: normal(1, 2, 512, 128, 2.0),
    ),
    Data(
        "bias, smoothed",
        BIAS + ", `smooth_k=True` for formats quantized before",
        lambda: normal(1, 2, 512, 128, bias=6.0),
        dict(smooth_k=True),
    ),
    Data("bias, as it is", BIAS + ", `smooth_k=False`", lambda: normal(1, 2, 512, 128, bias=6.0), dict(smooth_k=False)),
    *(
        Data(
            f"both biased, {name}",
            f"{BOTH}, `{words}` for formats quantized before",
            lambda: normal(1, 2, 512, 128, 0.25, 6.0, 1.0),
            options,
        )
        for name, words, options in (
            ("smooth_k", "smooth_k=True", dict(smooth_k=True)),
            ("smooth_q", "smooth_k=True, smooth_q=True", dict(smooth_k=True, smooth_q=True)),
        )
    ),
    Data("a model", "layer 2 of all-MiniLM-L6-v2, B1 H12 S256 D32 (data/README.md)", of_a_model),
)
SINKS = {bits: Data(f"a sink of {bits} bits", "", lambda bits=bits: beside_a_sink(bits)) for bits in (8, 11, 14)}

# ---------------------------------------------------------------------------------------------------------------------
# Figures


@dataclass(frozen=True)
class Figures:
    """The errors of an output, and the mean absolute error of lse; None without lse."""

    out: Comparison
    lse: float | None = None

    def misses(self, formats: Formats) -> list[str]:
        """Return the violated error bounds for N(0,1) data, in words."""
        found = formats.normal.misses(self.out) if formats.normal else []
        return found + (
            [f"lse {self.lse:.4f} > {formats.lse}"] if formats.lse is not None and not self.lse <= formats.lse else []
        )


def measured(formats: Formats, data: Data, scale_rule: str | None = None) -> Figures:
    """Compare `attention` on the current machine with float64 attention of the same inputs. scale_rule: the rule of all
    operands."""
    arrays = data.arrays
    if scale_rule is not None:
        arrays = [
            ptxrt.quantize_operand(x, formats.way.formats[role], role=role, scale_rule=scale_rule)
            for role, x in zip("qkv", arrays)
        ]
    options = data.options if formats.is_quantized_before else {}
    out, lse = ptxrt.attention(*arrays, **formats.words, **options, return_lse=True)
    want, want_lse = data.exact
    return Figures(compare(out, want), float(np.abs(lse - want_lse).mean()))


def weights_alone(formats: Formats, data: Data, out: np.ndarray) -> Comparison:
    """Compare an output with float64 attention of the values that its operands hold: this leaves the rounding of
    weights and sums.
    """
    held = [np.asarray(x, np.float32) for x in formats.way.values(*data.arrays)]
    return compare(out, exact_attention(*held)[0])


def step_by_step(data: Data) -> Figures:
    """Compute attention step by step in bfloat16 arrays: scores, weights and output are each rounded."""

    def rounded(x: np.ndarray) -> np.ndarray:
        return x.astype(ml_dtypes.bfloat16).astype(np.float32)

    q, k, v = map(rounded, data.arrays)
    scores = rounded(rounded(q @ k.swapaxes(-1, -2)) * np.float32(q.shape[-1] ** -0.5))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return Figures(compare(rounded(rounded(weights / weights.sum(axis=-1, keepdims=True)) @ v), data.exact[0]))


# ---------------------------------------------------------------------------------------------------------------------
# The page


HEAD = """# Accuracy of attention

This page compares `attention` in each format with float64 attention of the same float32 inputs. The command

    {command}

wrote it on {machine}. `--machine portable` or `--machine native`
measures a card; `--folder DIR` writes elsewhere. Outputs are float32, the type of the inputs.

- *relative L2* is |got − want| / |want|. *gain* is the factor f that minimizes |got − f · want|; 1 is exact. The cosine
  does not depend on it, and saturation makes it less than 1. *lse* is the mean absolute error of the log-sum-exp.
- *asked* is the bound that tests check on smaller arrays of N(0,1): the largest relative L2, lse and |gain − 1|, and the
  smallest cosine. A figure beyond its bound is **bold**.
- The first format is that of Q and K, the second that of weights and V. One name stands for both.

![Relative L2 by format and data](accuracy_data.png)
"""

SINK_HEAD = """
## Beside a sink

The score of one key is 8, 11 or 14 steps of log2 above the mean of 4095 others, which hold {shares} of the
weight. Weights of about 2^-14 must survive beside a weight of 1: if they round to 0, the error is their share. S4096
D128, 64 queries, all keys in one run; the values have a mean for each channel. *weights* compares with float64
attention of the values of the quantized operands, which leaves only the rounding of the weights; the bound applies to
it. *inputs* compares with float64 attention of the inputs.
"""

RULES_HEAD = """
## Scale rules

[Numerics](numerics.md#scale-rules) defines the rules. Here Q, K and V have the same one; N(0,1), B1 H2 S512 D128.
`floor`, the default of `quantize` and the rule of OCP MX, saturates the largest values of a block. Scores and values
shrink, which increases the errors of gain and lse. The rules in *italics* are the defaults of `quantize_operand` and
`attention`. `four_over_six` is more accurate than `amax` and encodes every block twice.

![Gain by scale rule](accuracy_rules.png)
"""

RULED = [
    (formats, rule)
    for formats in FORMATS
    if formats.qk == formats.pv and formats.is_quantized_before
    for rule in ptxrt.blocks.BLOCK_FORMATS[formats.qk].rules
]


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]) + "\n"


def capital(text: str) -> str:
    """Capitalize the first letter."""
    return text[0].upper() + text[1:]


def bold(text: str, fails: bool) -> str:
    return f"**{text}**" if fails else text


def cells(figures: Figures, formats: Formats | None = None) -> list[str]:
    """Return the cells relative L2, cosine, gain, lse; those that violate a bound of `formats` are bold."""
    asked, out = formats and formats.normal, figures.out
    return [
        bold(f"{out.relative_l2:.2e}", bool(asked) and not out.relative_l2 <= asked.relative_l2),
        bold(f"{out.cosine:.6f}", bool(asked) and not out.cosine >= asked.cosine),
        bold(f"{out.gain:.4f}", bool(asked) and not abs(out.gain - 1) <= asked.gain),
        ""
        if figures.lse is None
        else bold(f"{figures.lse:.1e}", bool(formats and formats.lse) and not figures.lse <= formats.lse),
    ]


def asked_cells(formats: Formats) -> list[str]:
    """Return the bounds for `cells`."""
    if formats.normal is None:
        return ["", "", "", ""]
    bounds = formats.normal
    return [
        f"{bounds.relative_l2:g}",
        f"{bounds.cosine:g}",
        f"± {bounds.gain:g}",
        f"{formats.lse:g}" if formats.lse else "",
    ]


COLUMNS = ["relative L2", "cosine", "gain", "lse"]


def data_section(found: dict[tuple[str, str], Figures]) -> str:
    """Return a table for each data set."""
    parts = []
    for data in DATA:
        parts.append(f"## {capital(data.name)}\n\n{capital(data.text)}.\n")
        if data is not NORMAL:
            rows = [[str(formats), *cells(found[data.name, str(formats)])] for formats in FORMATS]
            parts.append(table(["format", *COLUMNS], rows))
            continue
        rows = []
        for formats in FORMATS:
            pairs = zip(cells(found[data.name, str(formats)], formats), asked_cells(formats))
            rows.append([str(formats), *(cell for pair in pairs for cell in pair)])
        extra = [cell for value in cells(step_by_step(data)) for cell in (value, "")]
        rows.insert(1, ["bf16, step by step in NumPy", *extra])
        parts.append(table(["format", *(name for column in COLUMNS for name in (column, "asked"))], rows))
    return "\n" + "\n".join(parts)


def share_beside(data: Data) -> float:
    """Return the mean total weight of all keys except the large one of `beside_a_sink`."""
    q, k, _ = data.arrays
    sink = k.shape[2] // 2
    return float(1 - np.exp(q.astype(np.float64) @ k[0, 0, sink] * q.shape[-1] ** -0.5 - data.exact[1]).mean())


def spoken(words: list[str]) -> str:
    """Return a list in words."""
    return ", ".join(words[:-1]) + " and " + words[-1]


def unsplit(formats: Formats, data: Data) -> np.ndarray:
    """Return attention of data in float32, with all keys in one run, as in calls of many rows: those of a packed
    sequence are never split."""
    bounds = {f"cu_seqlens_{name}": np.int32([0, x.shape[2]]) for name, x in zip("qk", data.arrays)}
    return ptxrt.attention(*data.arrays, **formats.words, **bounds, out_dtype=np.float32)


def sink_section() -> str:
    """Return the table of weights beside a sink."""
    rows = []
    for formats in FORMATS:
        row = [str(formats), f"{formats.sink:g}" if formats.sink else ""]
        for data in SINKS.values():
            out = unsplit(formats, data)
            alone, beside = weights_alone(formats, data, out).relative_l2, compare(out, data.exact[0])
            row += [bold(f"{alone:.1e}", bool(formats.sink) and not alone <= formats.sink), f"{beside.relative_l2:.1e}"]
        rows.append(row)
    return (
        SINK_HEAD.format(shares=spoken([f"{100 * share_beside(data):.0f} %" for data in SINKS.values()]))
        + "\n"
        + table(
            ["format", "asked", *(f"{bits} bits, {what}" for bits in SINKS for what in ("weights", "inputs"))], rows
        )
    )


def rules_section(found: dict[tuple[str, str], Figures]) -> str:
    """Return the table of scale rules."""
    rows = []
    for formats, rule in RULED:
        name = f"*{rule}*" if rule == ptxrt.ops.operands.operand_rule(formats.qk) else rule
        rows.append([str(formats), name, *cells(found[str(formats), rule], formats)])
    return RULES_HEAD + "\n" + table(["format", "rule", *COLUMNS], rows)


CACHE_HEAD = """
## Caches in pages

`attention_paged` computes the last 16 queries of each sequence on a `KVCache` of its keys and values. The figures
compare with float64 attention of the inputs. Scales run along the head dimension, also those of values. `k_mean` is the
mean of the first half of the keys, as a calibration would measure it.
"""
CACHE_FORMATS = ("bf16", "f16", "mxfp8", "nvfp4", "mxfp4")


def cached(format: str, data: Data, with_mean: bool) -> Figures:
    """Return the errors of the last 16 queries on a cache in a format."""
    q, k, v = data.arrays
    batch, heads, length, dim = k.shape
    mean = k[:, :, : length // 2].mean(axis=(0, 2)) if with_mean else None
    cache = ptxrt.KVCache(batch * -(-length // 16), 16, heads, dim, format=format, k_mean=mean)
    table = np.arange(cache.pages, dtype=np.int32).reshape(batch, -1)
    ids, places = (x.astype(np.int32) for x in (np.repeat(np.arange(batch), length), np.tile(np.arange(length), batch)))
    rows = [x.swapaxes(1, 2).reshape(-1, heads, dim) for x in (k, v)]
    cache.append(*rows, ptxrt.slots_of(table, ids, places, 16))
    last, lengths = q[:, :, -16:], [length] * batch
    out, lse = ptxrt.attention_paged(last, cache, table, lengths, return_lse=True, out_dtype=np.float32)
    want, want_lse = exact_attention(last, k, v, causal=True)
    return Figures(compare(out, want), float(np.abs(lse - want_lse).mean()))


def cache_section() -> str:
    """Return the table of caches, by format and data."""
    chosen = [data for data in (SMALL, *DATA[1:4], DATA[-1]) if data.name != "bias, as it is"]
    parts = []
    for data in chosen:
        means = (False, True) if data.name == "bias, smoothed" else (False,)
        for with_mean in means:
            name = capital(data.name.replace(", smoothed", "")) + (", with `k_mean`" if with_mean else "")
            rows = [[name, format, *cells(cached(format, data, with_mean))] for format in CACHE_FORMATS]
            parts += rows
    return CACHE_HEAD + "\n" + table(["data", "cache", *COLUMNS], parts)


PRODUCTS_HEAD = """
## Matrix products

`matmul` of A [128, 1024] and B [128, 1024] in float32, quantized by the call. *inputs* is the relative L2 against the
float64 product of the inputs: the error of rounding to the formats. *outliers* is the same with 8 of the 1024 columns
of A 30 times as large. *sums* is the larger relative L2 of both against the float64 product of the values of the
quantized operands; its bound is {bound:.1e} (1e-6 √K).
"""


def product_data(outliers: bool) -> list[np.ndarray]:
    """Return A and B."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((128, 1024)).astype(np.float32) for _ in range(2))
    if outliers:
        a[:, ::128] *= 30
    return [a, b]


def product_section() -> str:
    """Return the table of matrix products, by formats."""
    rows, bound = [], 1e-6 * 1024**0.5
    for pair in PRODUCTS:
        formats, figures = dict(a_format=pair[0], b_format=pair[1]), []
        for outliers in (False, True):
            a, b = product_data(outliers)
            got = ptxrt.matmul(a, b, **formats, out_dtype=np.float32)
            figures.append(compare(got, exact_matmul(a, b)).relative_l2)
            held = exact_matmul(*multiplied(call_of(a, b, **formats)))
            figures.append(compare(got, held).relative_l2)
        sums = max(figures[1::2])
        name = pair[0] if pair[0] == pair[1] else " x ".join(pair)
        rows.append([name, *(f"{x:.2e}" for x in figures[::2]), bold(f"{sums:.1e}", not sums <= bound)])
    return PRODUCTS_HEAD.format(bound=bound) + "\n" + table(["formats", "inputs", "outliers", "sums"], rows)


def draw(folder: Path, of_data: dict[tuple[str, str], Figures], of_rules: dict[tuple[str, str], Figures]) -> None:
    """Draw the two pictures."""
    values = [[of_data[data.name, str(f)].out.relative_l2 for data in DATA] for f in FORMATS]
    columns = [data.name for data in DATA]
    plots.heat_map(
        folder / "accuracy_data.png", [str(f) for f in FORMATS], columns, values, "relative L2 against float64"
    )

    rows = [
        dict(rule=f"{formats}, {rule}", shortfall=100 * (1 - of_rules[str(formats), rule].out.gain))
        for formats, rule in RULED
    ]
    plots.bars(
        folder / "accuracy_rules.png",
        rows,
        "rule",
        "shortfall",
        "outputs are smaller by so many percent",
        "gain by scale rule, N(0,1)",
    )


def main() -> None:
    """Measure everything and write the page and its pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--machine", default="emulator", choices=("emulator", "portable", "native"))
    parser.add_argument("--folder", type=Path, default=Path(__file__).resolve().parent)
    options = parser.parse_args()
    plots.check(options.folder / "accuracy_data.png")
    command = "python docs/accuracy.py" + ("" if options.machine == "emulator" else f" --machine {options.machine}")
    with ptxrt.using(options.machine) as backend:
        of_data = {(data.name, str(formats)): measured(formats, data) for data in DATA for formats in FORMATS}
        of_rules = {(str(formats), rule): measured(formats, SMALL, rule) for formats, rule in RULED}
        machine = (
            "the emulator, which runs the PTX for sm_120a"
            if options.machine == "emulator"
            else f"a card ({backend.describe()})"
        )
        page = (
            HEAD.format(command=command, machine=machine)
            + data_section(of_data)
            + sink_section()
            + rules_section(of_rules)
            + cache_section()
            + product_section()
        )
    (options.folder / "accuracy.md").write_text(page, encoding="utf-8", newline="\n")
    draw(options.folder, of_data, of_rules)
    print(f"wrote {options.folder / 'accuracy.md'} and its pictures")


if __name__ == "__main__":
    main()
