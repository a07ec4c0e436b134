"""Attention compared with PyTorch's scaled_dot_product_attention in its FlashAttention-2 and cuDNN backends, in one
run.

    python benchmarks/attention_vs_torch.py [--machine portable] [--dtype bf16] [--side f16+f16]...
        [--shape b4h32s2048d128]... [--repeat 20] [--json]

Needs PyTorch for CUDA. Inputs and outputs of all sides are bf16, or the type of --dtype. In block formats this library
is measured twice, on operands quantized before and on arrays. Formats are those of ptxrt.bench.attention.RATES, shapes
those of SHAPES below. Long shapes are reported in TFLOPS (half of the pairs with a causal mask). Decoding, a few
queries on many keys, is reported in GB/s of K and V as the side reads them, beside a copy. If a side refuses a shape,
its message is reported. Docs: docs/benchmarks.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import peers

import ptxrt
from ptxrt.bench.attention import COMBINATIONS, QUANTIZED, Shape, quantize_of, quantized_operands, sides_of
from ptxrt.bench.timing import FLUSHED, WARM, Clock, about, title
from ptxrt.describe import text_table
from ptxrt.formats import FORMATS

FLASH = "SDPA FlashAttention-2"
SHAPES = [
    *map(Shape.parse, ("b4h32s2048d128", "b1h32s4096d128", "b1h16s8192d128", "b4h32s2048d64", "b1h32s512d128")),
    *map(Shape.parse, ("b1h32g8q1k32768d128", "b1h8q1k32768d128", "b1h32g8q16k32768d128", "b1h8q16k32768d128")),
]
DECODING_QUERIES = 16


@dataclass(frozen=True)
class Side:
    """One way to compute attention. call: computes the output. keys: K and V as it reads them."""

    call: Callable[[], Any]
    keys: Callable[[], tuple]

    @property
    def key_bytes(self) -> int:
        """Bytes of K and V, scales included."""
        return sum(x.nbytes for x in self.keys())


def problems(shapes):
    """Yield (shape, causal, decoding): long shapes with and without the mask, decoding without."""
    for shape in shapes:
        decodes = shape.queries <= DECODING_QUERIES < shape.keys
        yield shape, False, decodes
        if not decodes:
            yield shape, True, False


def torch_sides(torch, q, k, v, causal: bool) -> dict:
    """Return SDPA by backend: name -> Side."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def by(kind):
        def call():
            with sdpa_kernel(kind):
                grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, **grouped)

        return Side(call, lambda: (k, v))

    return {FLASH: by(SDPBackend.FLASH_ATTENTION), "SDPA cuDNN": by(SDPBackend.CUDNN_ATTENTION)}


def our_sides(torch, arrays, causal: bool, combinations: Sequence[tuple[str, str]] = COMBINATIONS) -> dict:
    """Return `ptxrt.attention` by formats and operands: name -> Side. The output has the type of the arrays and is
    written to the same memory each time."""

    def by(qk, pv, operands):
        out = ptxrt.empty(arrays[0].shape, arrays[0].dtype)
        tensor = torch.from_dlpack(out)

        @cache
        def given():
            return quantized_operands(*arrays, qk, pv) if operands == QUANTIZED else arrays

        def call():
            ptxrt.attention(*given(), qk=qk, pv=pv, quantize=quantize_of(operands), causal=causal, out=out)
            return tensor

        return Side(call, lambda: given()[1:])

    return {f"ptxrt {qk}+{pv}, {operands}": by(qk, pv, operands) for qk, pv, operands in sides_of(combinations)}


def tried(torch, sides: dict) -> tuple[dict, dict]:
    """Return the outputs of the sides that support the shape, and the messages of the others."""
    outputs, refused = {}, {}
    for name, side in sides.items():
        try:
            outputs[name] = side.call()
            torch.cuda.synchronize()
        except (ptxrt.ArgumentError, RuntimeError) as error:
            refused[name] = str(error).splitlines()[0]
    return outputs, refused


def measure(torch, shapes, repeat: int, dtype: str, combinations: Sequence[tuple[str, str]]) -> list[dict]:
    """Return a row for each shape and side, on inputs of one type."""
    stream, side = peers.common_stream(torch)
    rows = []
    with stream, torch.cuda.stream(side):
        clock = Clock(stream, repeat)
        for shape, causal, decodes in problems(shapes):
            l2 = FLUSHED if decodes else WARM
            arrays, tensors = zip(*(peers.both(torch, x.astype(FORMATS[dtype].dtype), stream) for x in shape.arrays()))
            sides = our_sides(torch, arrays, causal, combinations) | torch_sides(torch, *tensors, causal)
            outputs, refused = tried(torch, sides)
            calls = {name: side.call for name, side in sides.items() if name in outputs}
            moved = {name: sides[name].key_bytes for name in calls}
            if decodes:
                source = torch.empty(shape.bytes(2) // 2, dtype=torch.uint8, device="cuda")
                target = torch.empty_like(source)
                calls["copy"], moved["copy"] = lambda: target.copy_(source), 2 * source.nbytes
            exact = reference(torch, *tensors, causal)
            times = clock.times(calls, l2)
            rates = {name: moved[name] / time.median / 1e6 for name, time in times.items()}
            for name, time in times.items():
                row = {"side": name, "dtype": dtype, "shape": vars(shape), "causal": causal, "l2": l2, **time.fields()}
                row["tflops"] = None if decodes else 2 * shape.flops(causal) / time.median / 1e9
                row["key_bytes"] = moved[name] if decodes else None
                row["gb_per_s"] = rates[name] if decodes else None
                row["share_of_copy"] = rates[name] / rates["copy"] if decodes else None
                row["relative_l2"] = None if name == "copy" else error_of(outputs[name], exact)
                row["times_flash"] = times[FLASH].median / time.median if FLASH in times else None
                rows.append(row)
            rows += [
                {"side": name, "dtype": dtype, "shape": vars(shape), "causal": causal, "l2": l2, "refused": why}
                for name, why in refused.items()
            ]
    return rows


def reference(torch, q, k, v, causal: bool):
    """Return float64 attention of the first head and at most the last 64 queries."""
    query, key, value = q[0, 0, -64:].double(), k[0, 0].double(), v[0, 0].double()
    scores = query @ key.T * q.shape[-1] ** -0.5
    if causal:
        keys, first = key.shape[0], key.shape[0] - query.shape[0]
        scores.masked_fill_(
            torch.arange(keys, device="cuda") > torch.arange(first, keys, device="cuda")[:, None], float("-inf")
        )
    return scores.softmax(-1) @ value


def error_of(result, exact) -> float:
    """Return the relative L2 error of the same slice of a result."""
    got = result[0, 0, -64:].double()
    return float((got - exact).norm() / exact.norm())


def table(head: dict, rows: list[dict]):
    """Format the rows for a terminal."""
    yield f"attention on {title(head['machine'])}; PyTorch {head['torch']}"
    yield (
        f"medians of {max(row.get('repeat', 0) for row in rows)}, all sides of a shape in turns; {rows[0]['dtype']} "
        "inputs and outputs; L2 warm, for decoding flushed"
    )
    cells = [
        [
            "shape",
            "mask",
            "side",
            "ms",
            "fastest..slowest",
            "TFLOPS",
            "GB/s",
            "of copy",
            "relative L2",
            "x FlashAttention-2",
        ]
    ]
    for row in rows:
        place = [str(Shape(**row["shape"])), "causal" if row["causal"] else "none", row["side"]]
        if "refused" in row:
            cells.append([*place, *[""] * 6, f"refused: {row['refused']}"])
            continue
        patterns = {
            "tflops": "{:.1f}",
            "gb_per_s": "{:.0f}",
            "share_of_copy": "{:.1%}",
            "relative_l2": "{:.1e}",
            "times_flash": "{:.2f}",
        }
        figures = ["" if row[name] is None else pattern.format(row[name]) for name, pattern in patterns.items()]
        cells.append([*place, f"{row['milliseconds']:.4f}", f"{row['fastest']:.4f}..{row['slowest']:.4f}", *figures])
    yield from text_table(cells)


def own_options(parser) -> None:
    """Add the options for the type of inputs and the pairs of formats."""
    sides = ["+".join(pair) for pair in COMBINATIONS]
    parser.add_argument("--dtype", choices=["bf16", "f16"], default="bf16", help="of inputs and outputs (%(default)s)")
    parser.add_argument("--side", choices=sides, action="append", help="measure this pair alone; may be repeated")


def main() -> None:
    """Print the table."""
    torch, options, backend = peers.torch_on_gpu(__doc__, Shape.parse, more=own_options)
    head = {"machine": about(backend), "torch": torch.__version__}
    combinations = [tuple(side.split("+")) for side in options.side or ()] or COMBINATIONS
    rows = measure(torch, options.shape or SHAPES, options.repeat, options.dtype, combinations)
    peers.report(options, head, rows, table(head, rows))


if __name__ == "__main__":
    main()
