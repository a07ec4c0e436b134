"""What the side-by-side scripts share: PyTorch or a word about what is missing, options, and arrays of both sides."""

from __future__ import annotations

import argparse
import json
import sys

import ptxrt
from ptxrt.bench.timing import REPEAT


def skip(why: str):
    """End the script in peace: there is nothing to compare with, or on."""
    print(f"skipped: {why}")
    sys.exit(0)


def torch_on_gpu(description: str, parse_shape=None, more=None):
    """PyTorch, the options of the command line, and the backend that they choose; ends the script where one is not
    there.

    parse_shape: a shape of the script's from its text; `options.shape` are those asked for. Scripts without shapes
    leave it out. more: adds the script's own options to the parser.
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
    """A stream of this library's, and the same as PyTorch has it: an order that both keep without events in between."""
    stream = ptxrt.Stream()
    return stream, torch.cuda.ExternalStream(stream.handle)


def both(torch, host, stream):
    """An array of the host on the device, as a DeviceArray and, the same memory, as a tensor.

    The memory is this library's: of what PyTorch lends it cannot know the stream, and would wait for the default one.
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
