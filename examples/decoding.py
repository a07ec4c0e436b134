"""Greedy text generation by a language model, token by token, for one text or several at once; one graph runs all
steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from weights import check_text, checked_ids, token_ids

import ptxrt

PAGE = 16  # tokens


def checked_count(name: str, value: Any, more: str = "", least: int = 1) -> int:
    """Return a whole number from `least` on as an int; ArgumentError for any other value. more: the message's end."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < least:
        raise ptxrt.ArgumentError(f"{name} is {value!r}; pass a whole number of at least {least}{more}")
    return int(value)


class Result:
    """A copy of device memory on its way to the host. Later work in the stream does not delay it."""

    def __init__(self, source: Any):
        self.source, self.copied, self.end = source, ptxrt.PageLocked(source.shape, source.dtype), ptxrt.Event()

    def receive(self) -> None:
        """Start the copy."""
        self.copied.receive(self.source)
        self.end.record()

    def take(self) -> np.ndarray:
        """Wait for the copy and return it."""
        self.end.synchronize()
        return self.copied.array.copy()


class Step:
    """The input of one call of the model, on the device: the last tokens of some sequences, the same number of each.

    positions: int32 [sequences * tokens]. slots: int64, where their keys and values are written. lengths: int32, of
    each sequence including these tokens. tokens: int32. All are views of `numbers`, so that one write updates them;
    `places` are all but the tokens. table: the pages of each sequence. graph: of a step that is repeated, the graph of
    the call, which replaces the tokens by the most likely next ones.
    """

    def __init__(self, numbers: np.ndarray, table: np.ndarray, tokens: int):
        self.numbers, self.table = ptxrt.to_device(numbers), ptxrt.to_device(table)
        self.places = self.numbers[:4]
        self.slots = self.numbers[:2].reshape(-1).view(np.int64)[:tokens]
        self.positions, self.tokens = (self.numbers[row, :tokens] for row in (2, 4))
        self.lengths = self.numbers[3, : len(table)]
        self.graph: Any = None
        self.results: deque[Result] = deque()  # beside the graph: of this step and of the one ahead

    def launch(self) -> Result:
        """Run the graph and return the most likely next tokens, which are on their way to the host."""
        self.graph.launch()
        self.results.rotate()
        self.results[0].receive()
        return self.results[0]


class Ahead(NamedTuple):
    """A step that was launched before the caller asked for it, with the tokens and lengths that it is right for."""

    step: Step
    tokens: np.ndarray
    lengths: np.ndarray
    best: Result

    def serves(self, step: Step, tokens: np.ndarray, lengths: np.ndarray) -> bool:
        """Return whether this is the step that the caller asks for."""
        return self.step is step and (self.tokens == tokens).all() and (self.lengths == lengths).all()


class Decoder(ABC):
    """A language model that generates text. Subclasses define `forward`, which returns the logits of a Step, the
    template of a prompt (`chat`) and the token that ends an answer (`end`).

    context, batch: the most tokens of a text and the most texts at a time, as `checked_count` returns them; the cache
    has pages for these.
    """

    chat: str
    end: str

    def __init__(self, config: Any, tokenizer: Any, context: int, batch: int):
        if context > config["context"]:
            raise ptxrt.ArgumentError(
                f"context is {context!r}; the model takes texts of 1 to {config['context']} tokens"
            )
        self.config, self.tokenizer = config, tokenizer
        self.context, self.batch, self.pages = context, batch, -(-context // PAGE)
        self._steps: dict[int, Step] = {}
        self._ahead: Ahead | None = None
        # Whether the device computes while the host goes on, so that a step ahead costs no time.
        self.overlaps = ptxrt.empty((1,), np.int32).machine != "emulator"

    @abstractmethod
    def forward(self, step: Step, last: bool = False) -> Any:
        """Return logits, float32 [tokens, vocabulary] on the device; if `last`, only of the last token of each
        sequence."""

    # Steps

    def numbers(self, rows: Any, tokens: np.ndarray, starts: Any) -> np.ndarray:
        """Return the numbers of a Step for new tokens [sequences, tokens] after texts of lengths `starts`, in rows of
        the cache.

        A length of -1 marks a sequence that has ended: its token is computed, but not written to the cache.
        """
        rows, starts = np.int64(rows)[:, None], np.int32(starts)[:, None]
        positions = np.maximum(starts, 0) + np.arange(tokens.shape[1], dtype=np.int32)
        found = np.zeros((5, -(-tokens.size // 4) * 4), np.int32)  # rows start at multiples of 16 bytes
        slots = np.where(starts < 0, -1, rows * self.pages * PAGE + positions)  # each sequence has consecutive pages
        found[:2].reshape(-1).view(np.int64)[: tokens.size] = slots.reshape(-1)
        found[2, : tokens.size], found[4, : tokens.size] = positions.reshape(-1), tokens.reshape(-1)
        found[3, : len(rows)] = positions[:, -1] + 1
        return found

    def step(self, rows: Any, tokens: np.ndarray, starts: Any) -> Step:
        """Return the Step of new tokens [sequences, tokens]."""
        self._ahead = None  # the caller is about to change the cache
        table = (np.int64(rows)[:, None] * self.pages + np.arange(self.pages)).astype(np.int32)
        return Step(self.numbers(rows, tokens, starts), table, tokens.size)

    def next_tokens(self, tokens: np.ndarray, lengths: np.ndarray, *, more: bool = True) -> np.ndarray:
        """Return the most likely tokens, int32 [sequences], after `tokens` that follow texts of these lengths.

        One graph runs this; it is captured once for each number of sequences. more: whether the caller will probably
        ask for the tokens after these. That step is then launched before this one has ended, since its tokens are on
        the device, so that the device does not wait for the host. If the caller asks for another step, it is lost: it
        has written to the cache only what the step of these tokens writes there, or what lies behind the text.
        """
        step = self._steps.get(len(tokens)) or self._captured(tokens, lengths)
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.serves(step, tokens, lengths):
            best = ahead.best
        else:
            step.numbers[...] = self.numbers(range(len(tokens)), tokens[:, None], lengths)
            best = step.launch()
        likely = lengths + (lengths >= 0)  # each text becomes longer by its token
        following = self._launched_ahead(step, likely) if more and self.overlaps else None
        found = best.take()
        if following is not None:
            self._ahead = Ahead(step, found.copy(), likely, following)
        return found

    def _captured(self, tokens: np.ndarray, lengths: np.ndarray) -> Step:
        """Return a Step with its graph."""
        step = self.step(range(len(tokens)), tokens[:, None], lengths)
        step.graph = ptxrt.graph()
        with step.graph:
            ptxrt.argmax_rows(self.forward(step), out=step.tokens)
        step.results.extend(Result(step.tokens) for _ in range(2))
        self._steps[len(tokens)] = step
        return step

    def _launched_ahead(self, step: Step, lengths: np.ndarray) -> Any:
        """Launch the step after the one in flight; None if a text fills the context, or if that fails, because nobody
        has asked for it."""
        if (lengths >= self.context).any():
            return None
        try:
            step.places[...] = self.numbers(range(len(lengths)), np.zeros((len(lengths), 1), np.int32), lengths)[:4]
            return step.launch()
        except ptxrt.PtxError:
            return None

    # Texts

    def ids(self, text: str | Sequence[int]) -> np.ndarray:
        """Return the token ids of a text, int32; token ids are returned as they are. ArgumentError if there are none,
        too many, or invalid ones."""
        if isinstance(text, str):
            text = token_ids(self.tokenizer, "the text", text, add_special_tokens=False)
        more = f"shorten it (up to {self.config['context']} by SmolLM2(context=))"
        return checked_ids(lambda _: "the text", [text], self.config["vocabulary"], self.context, more)[0]

    def logits(self, text: str | Sequence[int], *, chunk: int | None = None) -> np.ndarray:
        """Return the logits after every token, float32 [tokens, vocabulary]. chunk: the most tokens of a call; None
        means all.

        Calls of at most 16 tokens have the bits of calls of one token; longer ones add in another order.
        """
        if chunk is not None:
            chunk = checked_count("logits: chunk", chunk, ", or None for all tokens")
        ids = self.ids(text)
        parts = [ids[i : i + (chunk or len(ids))] for i in range(0, len(ids), chunk or len(ids))]
        starts = np.cumsum([0, *map(len, parts)])
        return np.concatenate([self.forward(self.step([0], x[None], [i])).to_numpy() for x, i in zip(parts, starts)])

    def perplexity(self, text: str | Sequence[int], *, chunk: int | None = None) -> float:
        """Return exp(mean(-log p)) over all tokens but the first, with p the probability given the tokens before, in
        float64."""
        ids = self.ids(text)
        if len(ids) < 2:
            raise ptxrt.ArgumentError("perplexity: the text has one token; pass one of at least two")
        logits = self.logits(ids, chunk=chunk)[:-1].astype(np.float64)
        logits -= logits.max(-1, keepdims=True)
        chosen = logits[np.arange(len(ids) - 1), ids[1:]]
        return float(np.exp((np.log(np.exp(logits).sum(-1)) - chosen).mean()))

    def generate(self, prompt: Any, tokens: int = 100, *, stream: bool = False) -> Any:
        """Return the answer to a prompt, of at most `tokens` tokens and within the context: each time the most likely
        token.

        prompt: a text, which is put into the chat template; a list of at most `batch` texts gives a list of answers.
        stream: return an iterator over the pieces of the answer as they are generated.
        """
        tokens = checked_count("generate: tokens", tokens, least=0)
        many = not isinstance(prompt, str)
        if many and not (isinstance(prompt, (list, tuple)) and prompt):
            raise ptxrt.ArgumentError(f"generate: prompt is {prompt!r}; pass a text, or a list of at least one")
        if many and (stream or len(prompt) > self.batch):
            why = (
                "stream=True takes one prompt"
                if stream
                else f"batch is {self.batch}: pass SmolLM2(batch={len(prompt)})"
            )
            raise ptxrt.ArgumentError(f"generate: {len(prompt)} prompts came; {why}")
        prompts = list(prompt) if many else [prompt]
        if any(not isinstance(text, str) or not text.strip() for text in prompts):
            raise ptxrt.ArgumentError("generate: the prompt is empty; pass a text")
        for i, text in enumerate(prompts):
            check_text(f"generate: prompt {i}" if many else "generate: the prompt", text)
        pieces = self._pieces([self.ids(self.chat.format(text)) for text in prompts], tokens)
        if stream:
            return (piece for (piece,) in pieces)
        answers = list(zip(*pieces)) or [()] * len(prompts)
        texts = ["".join(parts) for parts in answers]
        return texts if many else texts[0]

    def _pieces(self, prompts: list[np.ndarray], tokens: int) -> Iterator[list[str]]:
        """Yield the text that each token adds to the answer of each prompt."""
        end = self.tokenizer.token_to_id(self.end)
        best = [self.forward(self.step([row], ids[None], [0]), last=True) for row, ids in enumerate(prompts)]
        found = np.concatenate([ptxrt.argmax_rows(x).to_numpy() for x in best])
        lengths = np.array([len(ids) for ids in prompts])
        answers: list[list[int]] = [[] for _ in prompts]
        said = [""] * len(prompts)
        for count in range(tokens):
            lengths[(found == end) | (lengths >= self.context)] = -1
            for row in np.flatnonzero(lengths >= 0):
                answers[row].append(int(found[row]))
            texts = [self.tokenizer.decode(ids).rstrip("\ufffd") for ids in answers]  # incomplete characters wait
            yield [text[len(before) :] for text, before in zip(texts, said)]
            said = texts
            if (lengths < 0).all() or count + 1 == tokens:
                return
            found = self.next_tokens(found, lengths, more=count + 2 < tokens)
            lengths[lengths >= 0] += 1
