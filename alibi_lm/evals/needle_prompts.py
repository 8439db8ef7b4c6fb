"""Needle prompts, put together from token ids so that their length is exact.

A prompt of length T asks for A answer tokens, so it has T - A tokens: the answer's room is part of
the length. It reads: haystack, needle (a line that states a number), haystack, question (that line
up to the number). No text is tokenised twice or joined before tokenising.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from alibi_lm.data.indexed import TokenFile
from alibi_lm.data.tokenizer import Tokenizer
from alibi_lm.errors import ConfigError, DataError, Problem
from alibi_lm.tasks.statements import ANSWER, END, KEYS, NUM_DIGITS, STATEMENT

NUM_CANDIDATES = 10
LARGEST_WALK = 256
"""Tokens walked back to a line's end before a needle is put exactly where asked."""

_POOL_DRAWS = 4000


@dataclass(frozen=True)
class Answer:
    """A number and its tokens."""

    number: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Trial:
    """One haystack with its key and answers; the needle goes to any depth."""

    haystack: np.ndarray
    """`[room + needle]` token ids: the control's whole haystack."""
    needle: np.ndarray
    question: np.ndarray
    key: str
    candidates: list[Answer]
    """The answer and its distractors, in random order."""
    truth: int
    """Index of the answer among the candidates."""
    line_ends: np.ndarray
    """Ascending positions of the haystack at which a line is over."""

    @property
    def room(self) -> int:
        """Haystack tokens of a prompt with a needle."""
        return len(self.haystack) - len(self.needle)

    @property
    def answer(self) -> Answer:
        """The number that the needle states."""
        return self.candidates[self.truth]

    def place(self, depth: float) -> tuple[int, bool]:
        """Haystack position of the needle, and whether a line ends there.

        The position is depth x room, walked back to the nearest end of a line; where none is
        within LARGEST_WALK tokens, it is taken exactly.
        """
        asked = round(depth * self.room)
        index = int(np.searchsorted(self.line_ends, asked, side="right")) - 1
        if index >= 0 and asked - self.line_ends[index] <= LARGEST_WALK:
            return int(self.line_ends[index]), True
        return asked, False

    def prompt(self, depth: float) -> np.ndarray:
        """The prompt with the needle at `depth`, `[length - answer tokens]`."""
        position, _ = self.place(depth)
        before, after = self.haystack[:position], self.haystack[position : self.room]
        return np.concatenate([before, self.needle, after, self.question])

    def control(self) -> np.ndarray:
        """The prompt without a needle, as long: the haystack just goes on."""
        return np.concatenate([self.haystack, self.question])


class PromptMaker:
    """Makes trials from the documents of token files; a pure function of (seed, length, index).

    Raises:
        DataError: the tokenizer cannot write enough numbers of one token length.
    """

    def __init__(self, tokenizer: Tokenizer, files: Sequence[TokenFile], seed: int) -> None:
        self._tokenizer = tokenizer
        self._files = files
        self._seed = seed
        self._text_of: dict[int, str] = {}
        self._answers = _answer_pool(tokenizer, seed)
        self._end = tokenizer.encode(END)

    @property
    def num_answer_tokens(self) -> int:
        """Tokens that every answer takes: the room left at the end of a prompt."""
        return len(self._answers[0].tokens)

    def shortest_length(self) -> int:
        """The least length whose haystack is at least as long as needle and question."""
        question = max(len(self._tokenizer.encode(STATEMENT.format(key=k))) for k in KEYS)
        needle = question + self.num_answer_tokens + len(self._end)
        return 2 * (needle + question) + self.num_answer_tokens

    def check(self, lengths: Sequence[int]) -> None:
        """Refuse lengths that have no room for a needle, or more tokens than any corpus.

        Raises:
            ConfigError: naming each such length.
        """
        problems = []
        shortest = self.shortest_length()
        most = max((int(file.num_tokens) for file in self._files), default=0)
        for length in lengths:
            if length < shortest:
                rule = f"needle, question and answer need at least {shortest} tokens"
                problems.append(Problem("needle.lengths", length, rule, "leave it out"))
            elif length > most:
                names = ", ".join(str(file.prefix) for file in self._files)
                rule = f"the longest haystack corpus ({names}) has {most:,} tokens"
                problems.append(Problem("needle.lengths", length, rule, "leave it out"))
        if problems:
            raise ConfigError(*problems)

    def trial(self, length: int, index: int) -> Trial:
        """Trial `index` of a prompt length, in time linear in the length.

        Raises:
            DataError: the haystack already holds every key or too many of the numbers.
        """
        generator = np.random.default_rng([self._seed, length, index])
        long_haystack = self._cut(generator, length)
        texts = self._texts(long_haystack)
        text = "".join(texts)
        key = self._free_key(generator, text)
        candidates = self._free_answers(generator, text)
        truth = int(generator.integers(len(candidates)))
        question = self._tokenizer.encode(STATEMENT.format(key=key))
        needle = [*question, *candidates[truth].tokens, *self._end]
        size = length - self.num_answer_tokens - len(question)
        haystack = long_haystack[:size]
        ends = _line_ends(texts[: size - len(needle)])
        return Trial(
            haystack=haystack,
            needle=np.array(needle, dtype=np.int64),
            question=np.array(question, dtype=np.int64),
            key=key,
            candidates=candidates,
            truth=truth,
            line_ends=ends,
        )

    def _cut(self, generator: np.random.Generator, length: int) -> np.ndarray:
        """`length` consecutive tokens from a random place of the corpora."""
        places = np.array([max(0, int(f.num_tokens) - length + 1) for f in self._files])
        place = int(generator.integers(places.sum()))
        which = int(np.searchsorted(np.cumsum(places), place, side="right"))
        start = place - int(places[:which].sum())
        return self._files[which].read(start, start + length).astype(np.int64)

    def _texts(self, tokens: np.ndarray) -> list[str]:
        """The text of each token on its own."""
        for token in np.unique(tokens).tolist():
            if token not in self._text_of:
                self._text_of[token] = self._tokenizer.decode([token])
        return [self._text_of[token] for token in tokens.tolist()]

    def _free_key(self, generator: np.random.Generator, text: str) -> str:
        for index in generator.permutation(len(KEYS)):
            if KEYS[index] not in text:
                return KEYS[index]
        raise DataError(
            Problem("needle", None, "a haystack holds every key", "choose another corpus")
        )

    def _free_answers(self, generator: np.random.Generator, text: str) -> list[Answer]:
        taken = set(_numbers_in(text))
        free = [answer for answer in self._answers if answer.number not in taken]
        if len(free) < NUM_CANDIDATES:
            rule = f"all but {len(free)} of {len(self._answers)} answers are in a haystack"
            raise DataError(Problem("needle", None, rule, "choose another corpus"))
        chosen = generator.choice(len(free), size=NUM_CANDIDATES, replace=False)
        return [free[index] for index in chosen]


def _numbers_in(text: str) -> Iterator[str]:
    """Every run of NUM_DIGITS digits in a text, those inside longer runs included."""
    for run in re.findall(rf"[0-9]{{{NUM_DIGITS},}}", text):
        for start in range(len(run) - NUM_DIGITS + 1):
            yield run[start : start + NUM_DIGITS]


def _line_ends(texts: Sequence[str]) -> np.ndarray:
    """Positions at which a line is over: the start, after a newline, before a token with one."""
    ends = [0]
    for position in range(1, len(texts) + 1):
        before = texts[position - 1].endswith("\n")
        after = position < len(texts) and texts[position].startswith("\n")
        if before or after:
            ends.append(position)
    return np.array(ends)


def _answer_pool(tokenizer: Tokenizer, seed: int) -> list[Answer]:
    """Different numbers that take equally many tokens: the most common count is taken."""
    generator = np.random.default_rng([seed, NUM_DIGITS])
    low = 10 ** (NUM_DIGITS - 1)
    drawn = low + generator.choice(9 * low, size=_POOL_DRAWS, replace=False)
    answers = []
    for number in map(str, drawn.tolist()):
        tokens = tuple(tokenizer.encode(ANSWER.format(number=number)))
        if tokenizer.decode(list(tokens)).strip() == number:
            answers.append(Answer(number, tokens))
    counts = Counter(len(answer.tokens) for answer in answers)
    commonest = max(counts, key=lambda count: (counts[count], -count), default=0)
    pool = [answer for answer in answers if len(answer.tokens) == commonest]
    if len(pool) < 2 * NUM_CANDIDATES:
        rule = f"writes only {len(pool)} of {_POOL_DRAWS} numbers in equally many tokens"
        fix = "use a tokenizer with digits"
        raise DataError(Problem("tokenizer", None, rule, fix))
    return pool


def says(text: str, number: str) -> bool:
    """Whether generated text begins with the number, and with no longer one."""
    return re.match(rf"\s*{number}(?![0-9])", text) is not None
