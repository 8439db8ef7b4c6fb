"""What every task makes: prompts of token ids, with the answers that are looked for."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from alibi_lm.data.tokenizer import Tokenizer

Metric = Literal["all", "part", "begins"]
Tokens = Sequence[int] | np.ndarray


@dataclass(frozen=True)
class Prompt:
    """One prompt and what is right."""

    tokens: np.ndarray
    """`[length - answer_budget]` int64 token ids."""
    answer_budget: int
    """Tokens that the answer may take: part of the length."""
    references: tuple[str, ...]
    """What is looked for in the answer."""
    distance: int
    """Tokens from the start of the farthest needed fact to the end of the prompt."""
    candidates: tuple[tuple[int, ...], ...] = ()
    """Closed set: continuations of equally many tokens, in random order; or none."""
    truth: int = 0
    """Index of the right candidate."""
    counts: dict[str, int] = field(default_factory=dict)
    """What it was made of: keys, values, words and so on."""

    @property
    def length(self) -> int:
        """Tokens of the prompt and of the answer's room."""
        return len(self.tokens) + self.answer_budget


class Task(Protocol):
    """A generator of prompts: a pure function of (seed, length, index, control)."""

    @property
    def name(self) -> str:
        """As results name it."""
        ...

    @property
    def metric(self) -> Metric:
        """How answers are scored: `alibi_lm.tasks.metrics`."""
        ...

    @property
    def chance(self) -> float | None:
        """Share that closed-set ranking gets by chance; None where the answer set is not closed."""
        ...

    @property
    def published(self) -> bool:
        """Whether every size is the published one."""
        ...

    def shortest(self, length: int) -> int:
        """The least length that a prompt needs, by the sizes that hold at `length`."""
        ...

    def prompt(self, length: int, index: int, control: bool = False) -> Prompt:
        """Prompt `index` of at most `length` tokens, the answer's room included.

        Time is linear in the length. With `control`, the needed facts are left out and something
        else of their kind or more haystack stands in their place.

        Raises:
            DataError: the haystack already holds what must be there once.
        """
        ...


class Encoder:
    """Encodes pieces of text, each on its own, and remembers those that recur."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._known: dict[str, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        """Token ids of a piece; the list must not be changed."""
        known = self._known.get(text)
        if known is None:
            known = self._known[text] = self.tokenizer.encode(text)
        return known

    def once(self, text: str) -> list[int]:
        """Token ids of a piece that does not recur."""
        return self.tokenizer.encode(text)


def generator_of(seed: int, task: str, length: int, index: int) -> np.random.Generator:
    """The randomness of one prompt, whatever was made before it."""
    return np.random.default_rng([seed, zlib.crc32(task.encode()), length, index])


def joined(parts: Iterable[Tokens]) -> np.ndarray:
    """Token ids of pieces one after another, int64."""
    arrays = [np.asarray(part, dtype=np.int64) for part in parts]
    return np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int64)


def listed(names: Sequence[str]) -> str:
    """Names as the published prompts list them: `a`, or `a, b, and c`."""
    return ", ".join(names[:-1]) + ", and " + names[-1] if len(names) > 1 else names[0]
