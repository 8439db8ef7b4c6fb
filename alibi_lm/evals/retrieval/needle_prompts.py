"""Needle prompts, assembled from token ids so that their length is exact.

A prompt of length T reserves A tokens for the answer, so it has T - A tokens. It reads: haystack,
needle (a line that states a number), haystack, question (that line up to the number).
Distractors, lines of the needle's kind with other keys, are part of the haystack. No text is
tokenized twice or joined before tokenizing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from alibi_lm.data.indexed import TokenFile
from alibi_lm.data.tokenizer import Tokenizer
from alibi_lm.tasks.answer_pools import Answer, answer_pool, numbers_in
from alibi_lm.tasks.haystack import LARGEST_WALK, Haystack, line_ends, place
from alibi_lm.tasks.metrics import says
from alibi_lm.tasks.prompt import joined
from alibi_lm.tasks.statements import ANSWER, END, KEYS, NUM_DIGITS, STATEMENT
from alibi_lm.utils.errors import ConfigError, DataError, Problem

NUM_CANDIDATES = 10

__all__ = ["LARGEST_WALK", "NUM_CANDIDATES", "PromptMaker", "NeedleTrial", "says"]


@dataclass(frozen=True)
class NeedleTrial:
    """One haystack with its key and answers; the needle goes to any depth."""

    haystack: np.ndarray
    """`[haystack_budget + needle]` token ids: the control's whole haystack."""
    needle: np.ndarray
    question: np.ndarray
    key: str
    candidates: list[Answer]
    """The answer and its distractors, in random order."""
    truth: int
    """Index of the answer among the candidates."""
    line_ends: np.ndarray
    """Ascending positions of the haystack at which a line is over."""
    distractors: tuple[tuple[str, str], ...] = ()
    """Keys and numbers of the lines of its kind in the haystack."""

    @property
    def haystack_budget(self) -> int:
        """Haystack tokens of a prompt with a needle."""
        return len(self.haystack) - len(self.needle)

    @property
    def answer(self) -> Answer:
        """The number that the needle states."""
        return self.candidates[self.truth]

    def place(self, depth: float) -> tuple[int, bool]:
        """Haystack position of the needle, and whether a line ends there.

        The position is depth x haystack_budget, walked back to the nearest end of a line; where
        none is within LARGEST_WALK tokens, it is taken exactly.
        """
        return place(self.line_ends, round(depth * self.haystack_budget))

    def distance(self, depth: float) -> int:
        """Tokens from the needle's start to the end of the prompt."""
        position, _ = self.place(depth)
        return len(self.needle) + self.haystack_budget - position + len(self.question)

    def prompt(self, depth: float) -> np.ndarray:
        """The prompt with the needle at `depth`, `[length - answer tokens]`."""
        position, _ = self.place(depth)
        before, after = self.haystack[:position], self.haystack[position : self.haystack_budget]
        return np.concatenate([before, self.needle, after, self.question])

    def control(self) -> np.ndarray:
        """The prompt without a needle: equally long, with more haystack in its place."""
        return np.concatenate([self.haystack, self.question])


class PromptMaker:
    """Makes trials from the documents of token files; a pure function of (seed, length, index).

    Raises:
        DataError: the tokenizer cannot write enough numbers of one token length.
    """

    def __init__(
        self, tokenizer: Tokenizer, files: Sequence[TokenFile], seed: int, num_distractors: int = 0
    ) -> None:
        self._tokenizer = tokenizer
        self._haystack = Haystack(tokenizer, files)
        self._seed = seed
        self._num_distractors = num_distractors
        self._answers = answer_pool(tokenizer, seed, ANSWER, NUM_DIGITS, 2 * NUM_CANDIDATES)
        self._end = tokenizer.encode(END)

    @property
    def num_answer_tokens(self) -> int:
        """Tokens that every answer takes: reserved at the end of a prompt."""
        return len(self._answers[0].tokens)

    def shortest_length(self) -> int:
        """The least length with a haystack as long as needle, distractors and question."""
        question = max(len(self._tokenizer.encode(STATEMENT.format(key=k))) for k in KEYS)
        needle = question + self.num_answer_tokens + len(self._end)
        lines = (1 + self._num_distractors) * needle
        return 2 * (lines + question) + self.num_answer_tokens

    def check(self, lengths: Sequence[int]) -> None:
        """Refuse lengths too short for a needle, or with more tokens than any corpus.

        Raises:
            ConfigError: naming each such length.
        """
        problems = []
        shortest = self.shortest_length()
        for length in lengths:
            if length < shortest:
                rule = f"needle, question and answer need at least {shortest} tokens"
                problems.append(Problem("needle.lengths", length, rule, "leave it out"))
            elif problem := self._haystack.problem("needle.lengths", length):
                problems.append(problem)
        if problems:
            raise ConfigError(*problems)

    def trial(self, length: int, index: int) -> NeedleTrial:
        """Trial `index` of a prompt length, in time linear in the length.

        Raises:
            DataError: the haystack already holds every key or too many of the numbers.
        """
        generator = np.random.default_rng([self._seed, length, index])
        cut = self._haystack.sample(generator, length)
        text = cut.text
        keys = self._free_keys(generator, text)
        candidates = self._free_answers(generator, text)
        truth = int(generator.integers(NUM_CANDIDATES))
        answer = candidates[truth]
        others = [candidate for candidate in candidates if candidate is not answer]
        question = self._tokenizer.encode(STATEMENT.format(key=keys[0]))
        needle = [*question, *answer.tokens, *self._end]
        distractors = list(zip(keys[1:], others, strict=False))
        size = length - self.num_answer_tokens - len(question)
        haystack, ends = self._filled(generator, cut.tokens, cut.texts, distractors, size,
                                      len(needle))  # fmt: skip
        return NeedleTrial(
            haystack=haystack,
            needle=np.array(needle, dtype=np.int64),
            question=np.array(question, dtype=np.int64),
            key=keys[0],
            candidates=candidates[:NUM_CANDIDATES],
            truth=truth,
            line_ends=ends,
            distractors=tuple((key, other.number) for key, other in distractors),
        )

    def _filled(
        self, generator: np.random.Generator, tokens: np.ndarray, texts: list[str],
        distractors: Sequence[tuple[str, Answer]], size: int, needle: int,
    ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        """A haystack of `size` tokens with the distractors, and the ends of its lines.

        Distractors lie in what a prompt with a needle shows too, all but its last `needle` tokens.
        """
        if not distractors:
            return tokens[:size], line_ends(texts[: size - needle])
        lines = [
            [*self._tokenizer.encode(STATEMENT.format(key=key)), *other.tokens, *self._end]
            for key, other in distractors
        ]
        total = size - sum(map(len, lines))
        shown = total - needle
        ends = line_ends(texts[:shown])
        spots = generator.integers(shown + 1, size=len(lines)).tolist()
        placed = sorted((place(ends, spot)[0], i) for i, spot in enumerate(spots))
        parts: list[np.ndarray | list[int]] = []
        last = 0
        for position, which in placed:
            parts += [tokens[last:position], lines[which]]
            last = position
        haystack = joined([*parts, tokens[last:total]])
        return haystack, line_ends(self._haystack.texts(haystack[: size - needle]))

    def _free_keys(self, generator: np.random.Generator, text: str) -> list[str]:
        """A key for the needle, and one for each distractor."""
        count = 1 + self._num_distractors
        order = (KEYS[i] for i in generator.permutation(len(KEYS)).tolist())
        free = list(islice((key for key in order if key not in text), count))
        if len(free) < count:
            rule = f"a haystack leaves {len(free)} of the {count} keys needed"
            raise DataError(Problem("needle", None, rule, "choose another corpus"))
        return free

    def _free_answers(self, generator: np.random.Generator, text: str) -> list[Answer]:
        """The candidates, then numbers of further distractors."""
        count = max(NUM_CANDIDATES, 1 + self._num_distractors)
        taken = set(numbers_in(text, NUM_DIGITS))
        free = [answer for answer in self._answers if answer.number not in taken]
        if len(free) < count:
            rule = f"all but {len(free)} of {len(self._answers)} answers are in a haystack"
            raise DataError(Problem("needle", None, rule, "choose another corpus"))
        chosen = generator.choice(len(free), size=count, replace=False)
        return [free[index] for index in chosen]
