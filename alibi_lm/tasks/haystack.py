"""Haystacks of real text, sampled from token files, and their line ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from alibi_lm.data.indexed import TokenFile
from alibi_lm.data.tokenizer import Tokenizer
from alibi_lm.utils.errors import Problem

LARGEST_WALK = 256
"""Most tokens that a fact moves back to reach a line end."""


@dataclass(frozen=True)
class Slice:
    """Consecutive tokens of a corpus, and the text of each token."""

    tokens: np.ndarray
    texts: list[str]

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.texts)


class Haystack:
    """Samples consecutive tokens from random places of token files."""

    def __init__(self, tokenizer: Tokenizer, files: Sequence[TokenFile]) -> None:
        self._tokenizer = tokenizer
        self._files = files
        self._text_of: dict[int, str] = {}

    @property
    def longest(self) -> int:
        """The largest possible slice, in tokens."""
        return max((int(file.num_tokens) for file in self._files), default=0)

    def problem(self, key: str, length: int) -> Problem | None:
        """The problem of a length that exceeds every corpus, or None."""
        if length <= self.longest:
            return None
        names = ", ".join(str(file.prefix) for file in self._files)
        rule = f"the longest haystack corpus ({names}) has {self.longest:,} tokens"
        return Problem(key, length, rule, "leave it out")

    def sample(self, generator: np.random.Generator, length: int) -> Slice:
        """`length` consecutive tokens from a random place of the corpora."""
        places = np.array([max(0, int(f.num_tokens) - length + 1) for f in self._files])
        place = int(generator.integers(places.sum()))
        which = int(np.searchsorted(np.cumsum(places), place, side="right"))
        start = place - int(places[:which].sum())
        tokens = self._files[which].read(start, start + length).astype(np.int64)
        return Slice(tokens, self.texts(tokens))

    def texts(self, tokens: np.ndarray) -> list[str]:
        """The text of each token on its own."""
        for token in np.unique(tokens).tolist():
            if token not in self._text_of:
                self._text_of[token] = self._tokenizer.decode([token])
        return [self._text_of[token] for token in tokens.tolist()]


def line_ends(texts: Sequence[str]) -> np.ndarray:
    """Positions of line ends: the start, after a newline, before a token that begins with one."""
    ends = [0]
    for position in range(1, len(texts) + 1):
        before = texts[position - 1].endswith("\n")
        after = position < len(texts) and texts[position].startswith("\n")
        if before or after:
            ends.append(position)
    return np.array(ends)


def place(ends: np.ndarray, asked: int) -> tuple[int, bool]:
    """Where to insert a fact wanted at position `asked`, and whether a line ends there.

    The nearest line end before it, or `asked` itself if none is within `LARGEST_WALK` tokens.
    """
    index = int(np.searchsorted(ends, asked, side="right")) - 1
    if index >= 0 and asked - ends[index] <= LARGEST_WALK:
        return int(ends[index]), True
    return asked, False
