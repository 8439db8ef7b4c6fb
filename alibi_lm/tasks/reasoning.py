"""Copying, addition and sorting as text, to test generalization to more items than trained.

After Kazemnejad et al. 2023 (arXiv 2305.19466), who train on problems of up to 20 items and test on
up to 40. A problem is one line with its answer after a marker:

    copy: k a q = k a q
    sort: k a q = a k q
    add: 321+654=975

Items of copying and sorting are lower-case letters, with repetitions. The numbers of an addition
have as many digits as the problem has items, least significant digit first, and so has their sum,
with one digit more where there is a carry: an answer can then be written from left to right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from string import ascii_lowercase

import numpy as np

from alibi_lm.utils.errors import DataError, Problem

TASKS = ("copy", "addition", "sort")
END = "\n"
"""Ends a problem."""


@dataclass(frozen=True)
class Question:
    """One problem: the question up to its marker, and the answer."""

    prompt: str
    answer: str

    @property
    def pieces(self) -> tuple[str, str, str]:
        """The parts of the line, to be encoded one by one."""
        return self.prompt, self.answer, END


def question(task: str, length: int, generator: np.random.Generator) -> Question:
    """A random problem of `length` items."""
    if task == "addition":
        return _addition(length, generator)
    items = [ascii_lowercase[i] for i in generator.integers(len(ascii_lowercase), size=length)]
    answer = sorted(items) if task == "sort" else items
    return Question(f"{task}: {' '.join(items)} =", " " + " ".join(answer))


def _addition(length: int, generator: np.random.Generator) -> Question:
    """Two numbers of `length` digits without leading zeros, all written backwards."""
    terms = []
    for _ in range(2):
        digits = generator.integers(10, size=length)
        digits[-1] = generator.integers(1, 10)
        terms.append("".join(map(str, digits.tolist())))
    total = str(sum(int(term[::-1]) for term in terms))
    return Question(f"add: {terms[0]}+{terms[1]}=", total[::-1])


class ReasoningGenerator:
    """Makes documents of several problems; document i is a pure function of (settings, i).

    Raises:
        DataError: the longest problem of a task does not fit into `max_tokens`.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        lengths: tuple[int, int],
        max_tokens: int,
        seed: int,
        encode: Callable[[str], list[int]],
    ) -> None:
        """Set what documents are made of.

        Args:
            tasks: of TASKS; each problem is of one, drawn evenly.
            lengths: fewest and most items of a problem.
            max_tokens: tokens of a document, its end-of-sequence token included; a document has
                exactly as many where a line end is one token.
            seed: of everything that is drawn.
            encode: text to token ids.
        """
        self._tasks = tuple(tasks)
        self._lengths = lengths
        self._budget = max_tokens - 1
        self._seed = seed
        self._encode = encode
        self._end_size = len(encode(END))
        problems = []
        for task in dict.fromkeys(tasks):
            # The most that a few of the longest problems take: items may differ in tokens.
            longest = [
                question(task, lengths[1], np.random.default_rng([seed, i])) for i in range(8)
            ]
            size = max(map(self._size, longest))
            if size > self._budget:
                rule = (
                    f"has no room for {lengths[1]} items of task {task} ({size} tokens and an end)"
                )
                problems.append(Problem("reasoning.max_tokens", max_tokens, rule, "raise it"))
        if problems:
            raise DataError(*problems)

    def document(self, index: int) -> tuple[str, ...]:
        """The pieces of document `index`.

        The first problem has any number of items, as likely as another; more problems follow as
        long as they fit, and line ends fill what is left.
        """
        generator = np.random.default_rng([self._seed, index])
        pieces: list[str] = []
        left = self._budget
        while True:
            task = self._tasks[int(generator.integers(len(self._tasks)))]
            length = int(generator.integers(self._lengths[0], self._lengths[1] + 1))
            chosen = question(task, length, generator)
            size = self._size(chosen)
            if size > left:
                if not pieces:
                    continue  # a tokenizer that takes unusually many tokens for these items
                break
            pieces += chosen.pieces
            left -= size
        return (*pieces, *[END] * (left // self._end_size))

    def _size(self, chosen: Question) -> int:
        return sum(len(self._encode(piece)) for piece in chosen.pieces)
