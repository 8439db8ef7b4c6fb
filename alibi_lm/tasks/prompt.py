"""The interface of a task: prompts of token ids, with the right answers."""

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
    """One prompt and its right answers."""

    tokens: np.ndarray
    """`[length - answer_budget]` int64 token ids."""
    answer_budget: int
    """Tokens that the answer may take: part of the length."""
    references: tuple[str, ...]
    """Texts that the answer should contain."""
    distance: int
    """Tokens from the start of the farthest needed fact to the end of the prompt."""
    candidates: tuple[tuple[int, ...], ...] = ()
    """Closed set of continuations of equal length in random order; empty if there is none."""
    truth: int = 0
    """Index of the right candidate."""
    counts: dict[str, int] = field(default_factory=dict)
    """Numbers of its parts: keys, values, words and so on."""

    @property
    def length(self) -> int:
        """Tokens of the prompt and of the answer budget."""
        return len(self.tokens) + self.answer_budget


class Task(Protocol):
    """A generator of prompts: a pure function of (seed, length, index, control)."""

    @property
    def name(self) -> str:
        """The name in results."""
        ...

    @property
    def metric(self) -> Metric:
        """How answers are scored, see `alibi_lm.tasks.metrics`."""
        ...

    @property
    def chance(self) -> float | None:
        """Accuracy of closed-set ranking by chance; None if the answer set is open."""
        ...

    @property
    def published(self) -> bool:
        """Whether every size is the published one."""
        ...

    def shortest(self, length: int) -> int:
        """The least length that a prompt needs, with the sizes used at `length`."""
        ...

    def prompt(self, length: int, index: int, control: bool = False) -> Prompt:
        """Prompt `index` of at most `length` tokens, the answer budget included.

        Time is linear in the length. With `control`, something of the same kind or more
        haystack replaces the needed facts.

        Raises:
            DataError: the haystack already contains the facts.
        """
        ...


class Encoder:
    """Encodes pieces of text one by one, and caches those that recur."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._known: dict[str, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        """Token ids of a piece; the list must not be changed."""
        known = self._known.get(text)
        if known is None:
            known = self._known[text] = self.tokenizer.encode(text)
        return known

    def uncached(self, text: str) -> list[int]:
        """Token ids of a piece that does not recur."""
        return self.tokenizer.encode(text)


def generator_of(seed: int, task: str, length: int, index: int) -> np.random.Generator:
    """The random generator of one prompt, independent of all others."""
    return np.random.default_rng([seed, zlib.crc32(task.encode()), length, index])


def joined(parts: Iterable[Tokens]) -> np.ndarray:
    """Token ids of consecutive pieces, int64."""
    arrays = [np.asarray(part, dtype=np.int64) for part in parts]
    return np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int64)


def listed(names: Sequence[str]) -> str:
    """Names as the published prompts enumerate them: `a`, or `a, b, and c`."""
    return ", ".join(names[:-1]) + ", and " + names[-1] if len(names) > 1 else names[0]
