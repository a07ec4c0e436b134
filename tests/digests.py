"""Digests of kernel results, to check that a change leaves every bit as it was.

The record covers every declared case of every kernel, and every format pair of `attention` with every head dimension
and every option, on the emulator in the native and in the portable PTX text. Where a kernel has half blocks, `attention`
runs in half and in whole blocks. Inputs come from fixed seeds.

    python tests/digests.py before.json [PATTERN]...
    python tests/digests.py after.json [PATTERN]... --compare before.json

PATTERN selects names, as in 'attention_nvfp4*'; with a prefix, as in 'native/*', it also selects the text. Names begin
with the kernel, or with `attention/` for calls of `attention`. With --compare the exit status is 1 if a digest differs;
names in only one of the two records are counted.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import ptxrt  # noqa: E402
from ptxrt import launch  # noqa: E402
from ptxrt.ops.attention import ATTENTION  # noqa: E402
from ptxrt.ops.attention_kernels import HEAD_DIMS  # noqa: E402

TEXTS = ("native", "portable")
BATCH, HEADS, HEADS_KV, QUERIES, KEYS = 2, 4, 2, 21, 150
# Half blocks of these head dimensions: those of block formats exist in the native text, of 16 bits in the portable one.
HALVED_DIMS = ((64, 64), (128, 128))
IN_16_BITS = ("bf16", "f16")

# Name -> options of a call. A string that names an array of `_arrays` stands for that array.
OPTIONS: dict[str, dict] = {
    "plain": {},
    "lse": dict(return_lse=True),
    "causal": dict(causal=True, return_lse=True),
    "window": dict(window=(40, 5)),
    "softcap": dict(softcap=2.0, return_lse=True),
    "scale": dict(scale=-0.25),
    "mask": dict(mask="mask"),
    "allowed": dict(mask="allowed", causal=True),
    "sinks": dict(sinks="sinks", return_lse=True),
    "key_lengths": dict(key_lengths="key_lengths"),
    "packed": dict(cu_seqlens_q="cu_seqlens_q", cu_seqlens_k="cu_seqlens_k", causal=True),
    "unnormalized": dict(normalize=False),
    "smooth_k": dict(smooth_k=True, return_lse=True),
    "smooth_q": dict(smooth_q=True),
    "smooth_q, lse": dict(smooth_q=True, return_lse=True),
    "layout": dict(layout="bshd", causal=True),
    "float32": dict(out_dtype=np.float32),
    "float16": dict(out_dtype=np.float16),
    "one query": dict(queries=1),
    "one head": dict(heads=HEADS_KV),
    "ragged": dict(dim_less=7),
    "float16 inputs": dict(dtype=np.float16),
}


def digest(arrays) -> str:
    """The first 24 hex digits of the SHA-256 of shapes, dtypes and bytes; device arrays are copied to the host."""
    whole = hashlib.sha256()
    for array in arrays if isinstance(arrays, tuple) else (arrays,):
        array = np.ascontiguousarray(array.to_numpy() if isinstance(array, ptxrt.DeviceArray) else array)
        whole.update(f"{array.dtype.name} {array.shape} ".encode())
        whole.update(array.view(np.uint8).tobytes() if array.size else b"")
    return whole.hexdigest()[:24]


def _kernel_case(name: str, case_id: str):
    """The outputs of a kernel in a declared case."""
    kernel = ptxrt.kernels()[name]
    case = next(case for case in kernel.cases if case.id == case_id)
    return kernel(**kernel.example(case))


def _arrays(
    rng: np.random.Generator, dim: int, dim_v: int, queries: int, heads: int, packed: bool
) -> dict[str, np.ndarray]:
    """q, k, v and the arrays that options name."""
    batch = 1 if packed else BATCH
    shapes = dict(q=(batch, heads, queries, dim), k=(batch, HEADS_KV, KEYS, dim), v=(batch, HEADS_KV, KEYS, dim_v))
    arrays = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    arrays["mask"] = rng.standard_normal((batch, heads, queries, KEYS), dtype=np.float32)
    arrays["allowed"] = rng.random((queries, KEYS)) < 0.7
    arrays["sinks"] = rng.standard_normal(heads, dtype=np.float32)
    arrays["key_lengths"] = np.array([KEYS - 17, 70], np.int32)
    arrays["cu_seqlens_q"] = np.array([0, 9, 9, queries], np.int32)
    arrays["cu_seqlens_k"] = np.array([0, 70, 90, KEYS], np.int32)
    return arrays


def _attention(formats: tuple, dims: tuple[int, int], options: dict, halved: bool | None = None):
    """The result of a call of `attention`; the message of an ArgumentError counts as a result, too. halved: whether
    kernels that have half blocks take them; None leaves the choice to the launch."""
    if halved is not None:
        with patch.object(launch, "takes_halves", lambda *_: halved):
            return _attention(formats, dims, options)
    options = dict(options)
    less, dtype = options.pop("dim_less", 0), options.pop("dtype", np.float32)
    queries, heads = options.pop("queries", QUERIES), options.pop("heads", HEADS)
    arrays = _arrays(
        np.random.default_rng(7), dims[0] - less, dims[1] - less, queries, heads, "cu_seqlens_q" in options
    )
    q, k, v = (arrays[name].astype(dtype) for name in "qkv")
    options = {
        name: arrays[given] if isinstance(given, str) and given in arrays else given for name, given in options.items()
    }
    if options.get("layout") == "bshd":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    qk, pv, quantize = formats
    try:
        return ptxrt.attention(q, k, v, qk=qk, pv=pv, quantize=quantize, **options)
    except ptxrt.ArgumentError as error:
        return np.frombuffer(str(error).encode(), np.uint8)


def runs(text: str) -> Iterator[tuple[str, Callable]]:
    """(name, function that returns the arrays) of every recorded run in a PTX text."""
    for kernel in ptxrt.kernels().values():
        for case in kernel.cases:
            yield f"{kernel.name}/{case.id}", partial(_kernel_case, kernel.name, case.id)
    for formats in ATTENTION:
        spelled = "+".join(word for word in formats if word)
        for i, dims in enumerate(HEAD_DIMS):
            for j, (option, options) in enumerate(OPTIONS.items()):
                # These head dimensions get every option; each other one gets every len(HEAD_DIMS)-th.
                if dims in HALVED_DIMS or j % len(HEAD_DIMS) == i:
                    name, run = f"attention/{spelled}/{dims[0]}x{dims[1]}/{option}", partial(_attention, formats, dims)
                    halved = dims in HALVED_DIMS and text == ("portable" if formats[0] in IN_16_BITS else "native")
                    for blocks, choice in dict(half=True, whole=False).items() if halved else [("", None)]:
                        yield f"{name}/{blocks}".rstrip("/"), partial(run, options, choice)


def _record(text: str, name: str, run: Callable) -> tuple[str, str]:
    with ptxrt.using("emulator", ptx=text):
        return f"{text}/{name}", digest(run())


def chosen(patterns: list[str]) -> list[tuple[str, str, Callable]]:
    """(text, name, function that returns the arrays) of the runs that match any pattern; of all runs without
    patterns."""

    def asked(text: str, name: str) -> bool:
        return not patterns or any(fnmatch(name, pattern) or fnmatch(f"{text}/{name}", pattern) for pattern in patterns)

    return [(text, name, run) for text in TEXTS for name, run in runs(text) if asked(text, name)]


def differences(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """The names whose digests differ, among those in both records."""
    return [name for name in before if name in after and before[name] != after[name]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, help="where the digests are written, as JSON")
    parser.add_argument("patterns", nargs="*", metavar="PATTERN")
    parser.add_argument("--compare", type=Path, metavar="BEFORE", help="a record from before the change")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    asked = chosen(options.patterns)
    if not asked:
        parser.error(f"nothing has a name like {' or '.join(options.patterns)}")
    if options.jobs > 1:
        with ProcessPoolExecutor(options.jobs) as pool:
            found = dict(pool.map(_record, *zip(*asked), chunksize=16))
    else:
        found = dict(_record(*each) for each in asked)
    options.record.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n", encoding="utf-8")
    print(f"{len(found)} digests in {options.record}")
    if not options.compare:
        return 0
    before = json.loads(options.compare.read_text(encoding="utf-8"))
    wrong = differences(before, found)
    for name in wrong:
        print(f"differs: {name}")
    common = len(before.keys() & found.keys())
    alone = f"{len(before) - common} only in {options.compare}, {len(found) - common} only in {options.record}"
    print(f"{common} compared, {len(wrong)} differ; {alone}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
