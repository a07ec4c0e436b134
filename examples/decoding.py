"""Text by a language model, a token at a time: one graph for all steps, greedy, for one text or several at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from weights import checked_ids

import ptxrt

PAGE = 16  # tokens


class Step:
    """What one call of the model is about, on the device: the last tokens of some sequences, as many of each.

    tokens, positions: int32 [sequences * tokens]; slots: int64, where their keys and values go; lengths: int32, of each
    sequence with these tokens. All are parts of `numbers`, so that one write changes them. table: the pages of each
    sequence. graph: of the call; best: the likeliest tokens that it writes.
    """

    def __init__(self, numbers: np.ndarray, table: np.ndarray, tokens: int):
        self.numbers, self.table = ptxrt.to_device(numbers), ptxrt.to_device(table)
        self.slots = self.numbers[:2].reshape(-1).view(np.int64)[:tokens]
        self.tokens, self.positions = (self.numbers[row, :tokens] for row in (2, 3))
        self.lengths = self.numbers[4, : len(table)]
        self.graph = self.best = None


class Decoder(ABC):
    """What a language model does with texts. The model has `forward` of a Step, which gives logits, and names the
    template that is written around a prompt (`chat`) and the token that ends an answer (`end`).

    context, batch: tokens of a text and texts at a time, at most, that the cache has pages for.
    """

    chat: str
    end: str

    def __init__(self, config: Any, tokenizer: Any, context: int, batch: int):
        if not 1 <= context <= config["context"]:
            raise ptxrt.ArgumentError(f"context is {context}; the model takes texts of 1 to {config['context']} tokens")
        self.config, self.tokenizer = config, tokenizer
        self.context, self.batch, self.pages = context, batch, -(-context // PAGE)
        self._steps: dict[int, Step] = {}

    @abstractmethod
    def forward(self, step: Step, last: bool = False) -> Any:
        """Logits, float32 [tokens, vocabulary] on the device; where `last`, of the last token of each sequence."""

    # Steps

    def numbers(self, rows: Any, tokens: np.ndarray, starts: Any) -> np.ndarray:
        """What a Step holds of new tokens [sequences, tokens] behind texts of these lengths, in rows of the cache.

        A length of -1 stands for a sequence that has ended: its token is worked on and written nowhere.
        """
        rows, starts = np.int64(rows)[:, None], np.int32(starts)[:, None]
        positions = np.maximum(starts, 0) + np.arange(tokens.shape[1], dtype=np.int32)
        found = np.zeros((5, -(-tokens.size // 4) * 4), np.int32)  # each row begins at 16 bytes
        slots = np.where(starts < 0, -1, rows * self.pages * PAGE + positions)  # pages of a sequence stand in a row
        found[:2].reshape(-1).view(np.int64)[: tokens.size] = slots.reshape(-1)
        found[2, : tokens.size], found[3, : tokens.size] = tokens.reshape(-1), positions.reshape(-1)
        found[4, : len(rows)] = positions[:, -1] + 1
        return found

    def step(self, rows: Any, tokens: np.ndarray, starts: Any) -> Step:
        """The step of new tokens [sequences, tokens]."""
        table = (np.int64(rows)[:, None] * self.pages + np.arange(self.pages)).astype(np.int32)
        return Step(self.numbers(rows, tokens, starts), table, tokens.size)

    def next_tokens(self, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """The likeliest tokens, int32 [sequences], behind the tokens that come after texts of these lengths.

        One graph, captured once for each number of sequences.
        """
        rows, tokens = range(len(tokens)), tokens[:, None]
        step = self._steps.get(len(tokens))
        if step is None:
            step = self._steps[len(tokens)] = self.step(rows, tokens, lengths)
            step.graph = ptxrt.graph()
            with step.graph:
                step.best = ptxrt.argmax_rows(self.forward(step))
        else:
            step.numbers[...] = self.numbers(rows, tokens, lengths)
        step.graph.launch()
        return step.best.to_numpy()

    # Texts

    def ids(self, text: str | Sequence[int]) -> np.ndarray:
        """Token ids of a text, int32; of ids themselves. ArgumentError where there are none, too many, or others."""
        if isinstance(text, str):
            if self.tokenizer is None:
                raise ptxrt.ArgumentError("these weights have no tokenizer; pass token ids")
            text = self.tokenizer.encode(text, add_special_tokens=False).ids
        more = f"shorten it (up to {self.config['context']} by SmolLM2(context=))"
        return checked_ids("the text", text, self.config["vocabulary"], self.context, more)

    def logits(self, text: str | Sequence[int], *, chunk: int | None = None) -> np.ndarray:
        """Logits behind every token, float32 [tokens, vocabulary]; chunk: tokens a call, at most, all where None.

        Calls of at most 16 tokens have the bits of one token at a time, longer ones those of other sums.
        """
        ids = self.ids(text)
        parts = [ids[i : i + (chunk or len(ids))] for i in range(0, len(ids), chunk or len(ids))]
        starts = np.cumsum([0, *map(len, parts)])
        return np.concatenate([self.forward(self.step([0], x[None], [i])).to_numpy() for x, i in zip(parts, starts)])

    def perplexity(self, text: str | Sequence[int], *, chunk: int | None = None) -> float:
        """exp of the mean of -log p of every token but the first, given those before it; p in float64."""
        ids = self.ids(text)
        if len(ids) < 2:
            raise ptxrt.ArgumentError("perplexity: the text has one token; pass one of at least two")
        logits = self.logits(ids, chunk=chunk)[:-1].astype(np.float64)
        logits -= logits.max(-1, keepdims=True)
        chosen = logits[np.arange(len(ids) - 1), ids[1:]]
        return float(np.exp((np.log(np.exp(logits).sum(-1)) - chosen).mean()))

    def generate(self, prompt: Any, tokens: int = 100, *, stream: bool = False) -> Any:
        """The answer to a prompt, of at most so many tokens and within the context: the likeliest token each time.

        prompt: a text, which the chat template is written around; a list of texts, at most `batch`, gives a list.
        stream: an iterator over pieces of the answer, as they come.
        """
        many = not isinstance(prompt, str)
        if many and (stream or len(prompt) > self.batch):
            why = (
                "stream=True takes one prompt"
                if stream
                else f"batch is {self.batch}: pass SmolLM2(batch={len(prompt)})"
            )
            raise ptxrt.ArgumentError(f"generate: {len(prompt)} prompts came; {why}")
        if tokens < 0:
            raise ptxrt.ArgumentError(f"generate: {tokens} tokens are asked for; pass a number from 0 on")
        prompts = list(prompt) if many else [prompt]
        if any(not isinstance(text, str) or not text.strip() for text in prompts):
            raise ptxrt.ArgumentError("generate: the prompt is empty; pass a text")
        pieces = self._pieces([self.ids(self.chat.format(text)) for text in prompts], tokens)
        if stream:
            return (piece for (piece,) in pieces)
        answers = list(zip(*pieces)) or [()] * len(prompts)
        texts = ["".join(parts) for parts in answers]
        return texts if many else texts[0]

    def _pieces(self, prompts: list[np.ndarray], tokens: int) -> Iterator[list[str]]:
        """What each token adds to the answer to each prompt."""
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
            texts = [self.tokenizer.decode(ids).rstrip("\ufffd") for ids in answers]  # half a character waits
            yield [text[len(before) :] for text, before in zip(texts, said)]
            said = texts
            if (lengths < 0).all() or count + 1 == tokens:
                return
            found = self.next_tokens(found, lengths)
            lengths[lengths >= 0] += 1
