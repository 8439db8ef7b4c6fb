"""Models that solve retrieval tasks by reading their text, as far back as they are let."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alibi_lm.evals.models.scorer import PromptScores
from tests.unit.evals.evals_fakes import VOCAB_SIZE

NIAH = re.compile(
    r"The special magic (?:number|uuid)s? for ([^\n]*) mentioned in the provided text (?:is|are)$"
)
VALUE = re.compile(r"assigned the value (\d+), they are: $")


def solve(text: str) -> str:
    """The continuation of a prompt, found by the words of its task alone."""
    if text.endswith("The pass key is"):
        return " " + "".join(re.findall(r"The pass key is (\d{5})\.", text)[:1])
    if match := re.search(r"\n([A-Z]{2}):$", text):
        return " " + "".join(re.findall(rf"\n{match[1]}: (\d\d)\n", text)[:1])
    if match := NIAH.search(text):
        keys = re.split(r", and |, ", match[1])
        stated = re.findall(r"One of the special magic \w+ for (\S+) is: (\S+)\.\n", text)
        return ": " + ", ".join(value for key in keys for k, value in stated if k == key)
    if match := VALUE.search(text):
        return " ".join(_chain(text.rpartition("Memorize and track")[2], match[1]))
    if text.endswith("words that appear most often in the list are:"):
        body = text.rpartition("Memorize the ones that appear most often.\n")[2]
        words = Counter(re.findall(r"\d+\. ([a-z]+)", body))
        asked = int(re.findall(r"The top (\d+) words", text)[-1])
        return " " + " ".join(word for word, _ in words.most_common(asked))
    if text.endswith("three most frequently appeared words are:"):
        body = text.partition("frequently appeared coded words. ")[2] or text
        words = Counter(re.findall(r"\b[a-z]{6}\b", body.partition("\nQuestion")[0]))
        return " " + " ".join(word for word, _ in words.most_common(3))
    if match := re.search(r"Question: Who is number (\d+)\? Answer:$", text):
        return " " + "".join(re.findall(rf"Number {match[1]} is (\w+)\.", text)[:1])
    raise AssertionError(f"no task ends so: {text[-80:]!r}")


def _chain(text: str, value: str) -> list[str]:
    found = re.findall(rf"VAR ([A-Z]+) = {value}\n", text)
    for name, before in re.findall(r"VAR ([A-Z]+) = VAR ([A-Z]+) \n", text):
        if before in found:
            found.append(name)
    return found


class SolvingScorer:
    """Solves what it can read: the last `context_limit` tokens, of prompts of at most `longest`."""

    vocab_size = VOCAB_SIZE
    dp_size = 1

    def __init__(
        self, tokenizer: Any, context_limit: int | None = None, longest: int | None = None,
        blind: bool = False,
    ) -> None:  # fmt: skip
        self._tokenizer = tokenizer
        self._context_limit = context_limit
        self._longest = longest
        self._blind = blind
        self._random = np.random.default_rng(0)

    def _solve(self, prompt: list[int]) -> str:
        if self._blind or (self._longest is not None and len(prompt) > self._longest):
            return ""
        tokens = prompt if self._context_limit is None else prompt[-self._context_limit :]
        return solve(self._tokenizer.decode(tokens))

    def loglikelihood_and_generate(
        self, prompts: Tensor, candidates: Tensor, max_new_tokens: int
    ) -> PromptScores:
        """The candidate that the solution begins with, or chance; and the solution."""
        shape = candidates.shape[:2]
        scores = torch.from_numpy(self._random.random(shape)).float()
        generated = torch.full((len(prompts), max_new_tokens), self._tokenizer.eos_id)
        for row, prompt in enumerate(prompts.tolist()):
            text = self._solve(prompt)
            tokens = self._tokenizer.encode(text)[:max_new_tokens]
            generated[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
            for which, candidate in enumerate(candidates[row].tolist()):
                if candidate and tokens[: len(candidate)] == candidate:
                    scores[row, which] += 1
        return PromptScores(scores, generated)

    def token_losses(self, tokens: Tensor) -> Tensor:
        """Not asked for."""
        raise NotImplementedError

    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
        """Not asked for."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """A name."""
        return {"kind": "solving"}
