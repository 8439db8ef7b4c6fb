"""Counting words, as RULER asks: common words (cwe) and frequent coded words (fwe)."""

from __future__ import annotations

from itertools import count
from string import ascii_lowercase

import numpy as np

from alibi_lm.tasks.config import TaskSizes
from alibi_lm.tasks.prompt import Encoder, Metric, Prompt, generator_of, joined
from alibi_lm.tasks.words import WORDS, compounds
from alibi_lm.utils.errors import DataError, Problem

CWE_TOKENS_TO_GENERATE = 120
CWE_HEAD = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n"
)
CWE_TAIL = (
    "\nQuestion: What are the {count} most common words in the above list? Answer: The top {count} "
    "words that appear most often in the list are:"
)
CWE_LONG_FROM = 4096
"""Length from which RULER repeats words 30 and 3 times instead of 6 and 1."""

FWE_TOKENS_TO_GENERATE = 50
FWE_HEAD = (
    "Read the following coded text and track the frequency of each coded word. Find the three most "
    "frequently appeared coded words."
)
FWE_TAIL = (
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three "
    "most frequently appeared words in the above coded text? Answer: According to the coded text "
    "above, the three most frequently appeared words are:"
)
DOTS = "..."
LETTERS = 6
NUM_ASKED = 3


class CommonWords:
    """cwe: a numbered list in which ten words appear more often than the others."""

    name = "cwe"
    metric: Metric = "all"
    chance = None

    def __init__(self, encode: Encoder, seed: int, sizes: TaskSizes) -> None:
        self._encode = encode
        self._seed = seed
        self._sizes = sizes
        self._answer_budget = sizes.tokens_to_generate or CWE_TOKENS_TO_GENERATE
        self._common = sizes.cwe_num_common
        lengths = sorted(len(encode(" " + word)) for word in WORDS)
        self._short = lengths[len(lengths) // 4]
        """Most tokens of a common word: the first quartile of all words."""
        self.published = self._answer_budget == CWE_TOKENS_TO_GENERATE and all(
            getattr(sizes, name) == getattr(TaskSizes(), name)
            for name in (
                "cwe_num_common",
                "cwe_common_repeats",
                "cwe_uncommon_repeats",
                "cwe_example",
            )
        )

    def repeats(self, length: int) -> tuple[int, int]:
        """Times that a common word and another word appear at a length."""
        common, uncommon = (30, 3) if length >= CWE_LONG_FROM else (6, 1)
        return (
            self._sizes.cwe_common_repeats or common,
            self._sizes.cwe_uncommon_repeats or uncommon,
        )

    def shortest(self, length: int) -> int:
        """Example, question, common words, another word, answer budget; with the longest words."""
        common, uncommon = self.repeats(length)
        size = self._frame_size() + self._list_size(common * self._common, uncommon)
        if self._sizes.cwe_example:
            shown, common, uncommon = self._example_sizes(length)
            short = common * self._common + uncommon * (shown - self._common)
            size += self._frame_size() + self._list_size(short, 0)
            # The answer's first number has a space before it.
            size += self._list_size(self._common, 0) + len(self._encode("\n")) + 1
        return size + self._answer_budget

    def _list_size(self, num_short: int, num_others: int) -> int:
        """The most tokens of a numbered list of so many short words and others."""
        widest = max(len(self._encode(" " + word)) for word in WORDS)
        words = num_short * self._short + num_others * widest
        numbers = range(1, num_short + num_others + 1)
        return words + sum(map(self._number_tokens, numbers))

    def _frame_size(self) -> int:
        return len(self._encode(CWE_HEAD)) + len(self._encode(CWE_TAIL.format(count=self._common)))

    def _example_sizes(self, length: int) -> tuple[int, int, int]:
        """Words of the example, and times that common ones and others appear."""
        shown, common, uncommon = (40, 10, 3) if length >= CWE_LONG_FROM else (20, 3, 1)
        return max(shown, self._common + 1), common, uncommon

    def prompt(self, length: int, index: int, control: bool = False) -> Prompt:
        """Prompt `index` of at most `length` tokens; a control has other words in the list."""
        generator = generator_of(self._seed, self.name, length, index)
        shuffled = self._shuffled(generator)
        example: list[int] = []
        if self._sizes.cwe_example:
            example, shuffled = self._example(generator, length, shuffled)
        space = length - self._answer_budget - len(example) - self._frame_size()
        common, uncommon = self.repeats(length)
        words, full = self._fitting(shuffled, space, common, uncommon)
        if not full:
            pairs = compounds()
            order = generator.choice(len(pairs), size=min(len(pairs), space), replace=False)
            words, full = self._fitting([pairs[i] for i in order], space, common, uncommon)
        asked, others = words[: self._common], words[self._common :]
        if len(others) == 0:
            rule = f"has room for {len(words)} different words"
            raise DataError(Problem(self.name, length, rule, "give a longer length"))
        shown = others[-self._common :] if control else asked
        rest = others[: -self._common] if control else others
        items = generator.permutation([*shown * common, *rest * uncommon]).tolist()
        tail = self._encode(CWE_TAIL.format(count=self._common))
        body = [self._encode(CWE_HEAD), self._numbered(items), tail]
        return Prompt(
            tokens=joined([example, *body]),
            answer_budget=self._answer_budget,
            references=tuple(asked),
            distance=sum(map(len, body)) - len(body[0]),
            counts={
                "words": len(shown) + len(rest),
                "items": len(items),
                "common_repeats": common,
                "uncommon_repeats": uncommon,
            },
        )

    def _shuffled(self, generator: np.random.Generator) -> list[str]:
        """All words in random order, but short ones first."""
        words = [WORDS[i] for i in generator.permutation(len(WORDS)).tolist()]
        return sorted(words, key=lambda word: len(self._encode(" " + word)) > self._short)

    def _fitting(
        self, words: list[str], space: int, common: int, uncommon: int
    ) -> tuple[list[str], bool]:
        """As many words as fit, the common ones first, and whether some were left out.

        No other word contains, or is part of, a common one: answers are matched as substrings.
        """
        chosen = words[: self._common]
        items = common * len(chosen)
        used = common * sum(len(self._encode(" " + word)) for word in chosen)
        used += sum(map(self._number_tokens, range(1, items + 1)))
        taken = list(chosen)
        for word in words[self._common :]:
            if any(word in other or other in word for other in chosen):
                continue
            more = uncommon * len(self._encode(" " + word))
            more += sum(self._number_tokens(items + 1 + i) for i in range(uncommon))
            if used + more > space:
                return taken, True
            used += more
            items += uncommon
            taken.append(word)
        return taken, False

    def _number_tokens(self, number: int) -> int:
        return len(self._encode(f" {number}." if number > 1 else "1."))

    def _numbered(self, items: list[str]) -> list[int]:
        tokens: list[int] = []
        for number, word in enumerate(items, 1):
            tokens += self._encode(f" {number}." if number > 1 else "1.")
            tokens += self._encode(" " + word)
        return tokens

    def _example(
        self, generator: np.random.Generator, length: int, words: list[str]
    ) -> tuple[list[int], list[str]]:
        """A solved list of short words to precede the question; and the words left."""
        shown, common, uncommon = self._example_sizes(length)
        asked, others, left = words[: self._common], words[self._common : shown], words[shown:]
        items = generator.permutation([*asked * common, *others * uncommon]).tolist()
        tail = self._encode(CWE_TAIL.format(count=self._common))
        answer = self._encode.uncached(" " + " ".join(f"{i}. {w}" for i, w in enumerate(asked, 1)))
        head = self._encode(CWE_HEAD)
        return [*head, *self._numbered(items), *tail, *answer, *self._encode("\n")], left


class FrequentWords:
    """fwe: coded words by a zeta distribution; the most frequent are dots, the next three asked."""

    name = "fwe"
    metric: Metric = "all"
    chance = None

    def __init__(self, encode: Encoder, seed: int, sizes: TaskSizes) -> None:
        self._encode = encode
        self._seed = seed
        self._alpha = sizes.fwe_alpha
        self._num_words = sizes.fwe_num_words
        self._answer_budget = sizes.tokens_to_generate or FWE_TOKENS_TO_GENERATE
        defaults = TaskSizes()
        self.published = (
            self._answer_budget == FWE_TOKENS_TO_GENERATE
            and self._alpha == defaults.fwe_alpha
            and self._num_words is None
        )

    def num_words(self, length: int) -> int:
        """Different words at a length, the dots among them: RULER's 1/50 of the tokens."""
        return self._num_words or (length - self._answer_budget) // 50

    def shortest(self, length: int) -> int:
        """The least with four different words whose top three are distinct in frequency."""
        frame = len(self._encode(FWE_HEAD)) + len(self._encode(FWE_TAIL)) + self._answer_budget
        draws = next(n for n in count(1) if self._distinguishable(n))
        widest = LETTERS + 1
        needed = frame + draws * max(len(self._encode(" " + DOTS)), widest)
        words = 0 if self._num_words else 50 * (NUM_ASKED + 1) + self._answer_budget
        return max(needed, words)

    def prompt(self, length: int, index: int, control: bool = False) -> Prompt:
        """Prompt `index` of at most `length` tokens; a control has other words for those asked."""
        generator = generator_of(self._seed, self.name, length, index)
        num_words = self.num_words(length)
        drawn = _coded(generator, num_words + NUM_ASKED)
        words = [DOTS, *drawn[1:num_words]]
        asked = words[1 : NUM_ASKED + 1]
        if control:
            words[1 : NUM_ASKED + 1] = drawn[num_words:]
        pieces = [self._encode.uncached(" " + word) for word in words]
        sizes = np.array([len(piece) for piece in pieces])
        frame = [self._encode(FWE_HEAD), self._encode(FWE_TAIL)]
        space = length - self._answer_budget - sum(map(len, frame))
        counts = self._counts(self._draws(sizes, space), num_words)
        order = generator.permutation(np.repeat(np.arange(num_words), counts)).tolist()
        body = joined(pieces[i] for i in order)
        return Prompt(
            tokens=joined([frame[0], body, frame[1]]),
            answer_budget=self._answer_budget,
            references=tuple(asked),
            distance=len(body) + len(frame[1]),
            counts={
                "words": int((counts > 0).sum()),
                "items": int(counts.sum()),
                "third": int(counts[NUM_ASKED]),
                "fourth": int(counts[NUM_ASKED + 1]) if num_words > NUM_ASKED + 1 else 0,
            },
        )

    def _counts(self, draws: int, num_words: int) -> np.ndarray:
        """Times that the word of each rank appears: draws x rank^-alpha / zeta(alpha), cut."""
        ranks = np.arange(1, num_words + 1, dtype=np.float64)
        return (draws * ranks**-self._alpha / _zeta(self._alpha)).astype(np.int64)

    def _draws(self, sizes: np.ndarray, space: int) -> int:
        """The most draws whose words fit, by bisection, as their tokens grow with the draws.

        Numbers of draws that give the third word no lead over the fourth are skipped.

        Raises:
            DataError: no number of draws fits.
        """
        low, high = 0, 4 * space
        while low < high:
            middle = (low + high + 1) // 2
            if int(self._counts(middle, len(sizes)) @ sizes) <= space:
                low = middle
            else:
                high = middle - 1
        for draws in range(low, 0, -1):
            if self._distinguishable(draws):
                return draws
        rule = f"has no room for its words in {space} tokens"
        raise DataError(Problem(self.name, None, rule, "give a longer length"))

    def _distinguishable(self, draws: int) -> bool:
        """Whether the third word is more frequent than the fourth."""
        counts = self._counts(draws, NUM_ASKED + 2)
        return bool(counts[NUM_ASKED] > counts[NUM_ASKED + 1])


def _zeta(alpha: float) -> float:
    """Riemann's zeta function, by Euler and Maclaurin's formula after 32 terms."""
    n = 32
    head = sum(k**-alpha for k in range(1, n))
    tail = n ** (1 - alpha) / (alpha - 1) + n**-alpha / 2
    return head + tail + alpha * n ** (-alpha - 1) / 12


def _coded(generator: np.random.Generator, count: int) -> list[str]:
    """Different words of six random letters."""
    words = []
    for code in generator.choice(26**LETTERS, size=count, replace=False).tolist():
        word = ""
        for _ in range(LETTERS):
            code, letter = divmod(code, 26)
            word += ascii_lowercase[letter]
        words.append(word)
    return words
