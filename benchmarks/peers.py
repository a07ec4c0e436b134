"""Shared by the comparison scripts: the check for PyTorch and a GPU, options, and arrays for both sides."""

from __future__ import annotations

import argparse
import json
import sys

import ptxrt
from ptxrt.bench.timing import REPEAT


def skip(why: str):
    """End the script with success: there is nothing to compare with, or no GPU."""
    print(f"skipped: {why}")
    sys.exit(0)


def torch_on_gpu(description: str, parse_shape=None, more=None):
    """Return PyTorch, the parsed options, and the backend that they choose; end the script if one is missing.

    parse_shape: parses a shape; `options.shape` are the requested ones. None for scripts without shapes. more: adds the
    script's own options to the parser.
    """

    def shape(text: str):
        try:
            return parse_shape(text)
        except ptxrt.ArgumentError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", choices=["native", "portable"], help="the best that is there by default")
    if parse_shape is not None:
        parser.add_argument("--shape", type=shape, action="append", help="measure this shape alone; may be repeated")
    parser.add_argument("--repeat", type=int, default=REPEAT, help="how often each call is timed (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    if more is not None:
        more(parser)
    options = parser.parse_args()
    try:
        import torch
    except ImportError as error:
        skip(f"PyTorch cannot be imported ({error}); pip install torch")
    there = ptxrt.machines()
    machine = options.machine or next((name for name in ("native", "portable") if there[name].available), "portable")
    if not there[machine].available:
        skip(f"no GPU machine: {there[machine].detail}")
    if not torch.cuda.is_available():
        skip(f"PyTorch {torch.__version__} finds no GPU; install one that was built for CUDA")
    backend = ptxrt.using(machine).backend
    torch.cuda.set_device(backend.ordinal)
    torch.manual_seed(0)
    return torch, options, backend


def common_stream(torch):
    """Return a stream of this library, and the same stream for PyTorch: both sides are ordered on it without events."""
    stream = ptxrt.Stream()
    return stream, torch.cuda.ExternalStream(stream.handle)


def both(torch, host, stream):
    """Copy a host array to the device; return it as a DeviceArray and, on the same memory, as a tensor.

    The memory is this library's: it would not know the stream of PyTorch's memory, and would wait for the default one.
    """
    array = ptxrt.to_device(host, stream=stream)
    return array, torch.from_dlpack(array)


def report(options, head: dict, rows: list[dict], lines) -> None:
    """Print rows as JSON or as the lines of a table."""
    if options.json:
        print(json.dumps({**head, "rows": rows}, indent=1))
    else:
        for line in lines:
            print(line)
