"""Compute embeddings of sentences with all-MiniLM-L6-v2, and find the sentences closest in meaning to the first.

    python examples/encode.py "Where is Paris?" "Paris is the capital of France." "Bees visit flowers."
    python examples/encode.py "Where is Paris?" --file data/passages.txt

`make models` installs the weights.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click
import numpy as np
from minilm import MiniLM

import ptxrt
from ptxrt.files import read_bytes
from ptxrt.npy import write_arrays

ROOT = Path(__file__).resolve().parent.parent


@click.command()
@click.argument("texts", nargs=-1)
@click.option("--file", "file", type=click.Path(path_type=Path), help="More texts, one a line.")
@click.option("--weights", default="bf16", show_default=True, help="Format of the weights.")
@click.option("--activations", help="Format of the activations that they are multiplied with; that of the weights.")
@click.option(
    "--attention", default="bf16", show_default=True, metavar="QK+PV", help="Formats of attention's products."
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Write the embeddings, float32 [texts, 384], .npy."
)
@click.option(
    "--compare", is_flag=True, help="Compare with the model in float64; fail beyond a cosine of 0.9999 in bf16."
)
def encode(texts, file, weights, activations, attention, output, compare):
    """Compute embeddings of TEXTS and list the cosine of all others with the first."""
    try:
        found = list(texts) + (_lines(file) if file else [])
        if not found:
            raise click.UsageError("there is no text: give some, or --file")
        start = time.perf_counter()
        model = MiniLM((activations or weights, weights), attention=attention)
        ready = time.perf_counter()
        embeddings = model.encode(found)
        end = time.perf_counter()
        where = ptxrt.selection.current().describe()
        said = f"{len(found)} texts in {end - ready:.1f} s, weights read in {ready - start:.1f} s, on {where}"
        print(said, file=sys.stderr)
        if output:
            write_arrays(output, {"embeddings": embeddings}, archive=False)
    except ptxrt.PtxError as error:
        raise click.ClickException(str(error)) from None
    cosines = embeddings[1:] @ embeddings[0]
    for i in np.argsort(-cosines, kind="stable"):
        print(f"{cosines[i]:7.4f}  {found[i + 1]}")
    if compare:
        _compare(model, found, embeddings, exact=(activations or weights, weights, attention) == ("bf16",) * 3)


def _lines(path: Path) -> list[str]:
    """Return the nonempty lines of a file. FileError if it cannot be read as text."""
    try:
        return [line for line in read_bytes(path).decode().splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise ptxrt.FileError(f"{path} is no text in UTF-8 ({error}); pass one") from None


def _compare(model: MiniLM, texts: list[str], embeddings: np.ndarray, exact: bool) -> None:
    """Print the least cosine with the embeddings of the float64 reference."""
    sys.path.append(str(ROOT))
    from tests.model_reference import encoder

    wanted = np.stack([encoder(ids, model.weights.read, model.config) for ids in model.ids(texts)])
    least = float((embeddings * wanted).sum(-1).min())
    print(f"cosine with float64: {least:.6f} or more")
    if exact and least < 0.9999:
        raise click.ClickException(f"the least cosine with float64 is {least:.6f}, in bf16 it must be 0.9999")


if __name__ == "__main__":
    encode()
