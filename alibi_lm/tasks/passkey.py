"""Passkey retrieval, as in Landmark Attention and Position Interpolation (arXiv 2306.15595).

A five-digit key is stated somewhere in repeated filler, and asked for at the end. Distances are
absolute: tokens from the statement to the end of the prompt.
"""

from __future__ import annotations

import numpy as np

from alibi_lm.tasks.answer_pools import Answer, answer_pool
from alibi_lm.tasks.config import TaskSizes
from alibi_lm.tasks.prompt import Encoder, Metric, Prompt, generator_of, joined

HEAD = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. "
    "I will quiz you about the important information there.\n"
)
FILLER = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
"""Sentences that repeat in this order, joined by spaces."""
KEY_LINE = "\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
QUESTION = "\nWhat is the pass key? The pass key is"
ANSWER = " {key}"
NUM_DIGITS = 5
NUM_CANDIDATES = 10
SUCCESS = 0.2
"""Accuracy that Position Interpolation's k_max requires."""


class Passkey:
    """The passkey task; prompts have exactly the length asked for."""

    name = "passkey"
    metric: Metric = "begins"
    chance = 1 / NUM_CANDIDATES
    published = True

    def __init__(self, encode: Encoder, seed: int, sizes: TaskSizes) -> None:
        """Make the pool of keys.

        Raises:
            DataError: the tokenizer cannot write enough keys of one token length.
        """
        self._encode = encode
        self._seed = seed
        self.num_distances = sizes.passkey_num_distances
        self._pool = answer_pool(encode.tokenizer, seed, ANSWER, NUM_DIGITS, 2 * NUM_CANDIDATES)
        pieces = [encode(FILLER[0]), *(encode(" " + text) for text in FILLER[1:])]
        again = [encode(" " + FILLER[0]), *pieces[1:]]
        self._first, self._cycle = pieces, again
        self._widest = max(map(len, again))

    def _line(self, answer: Answer) -> list[int]:
        before, middle, after = KEY_LINE.split("{key}")
        parts = (before, answer.tokens, middle, answer.tokens, after)
        return [
            token
            for part in parts
            for token in (self._encode(part.rstrip(" ")) if isinstance(part, str) else part)
        ]

    def shortest(self, length: int) -> int:
        """Head, key, question, answer, and one round of filler."""
        line = len(self._line(self._pool[0]))
        round_ = sum(map(len, self._cycle))
        return (
            len(self._encode(HEAD))
            + line
            + round_
            + len(self._encode(QUESTION))
            + self.answer_budget
        )

    @property
    def answer_budget(self) -> int:
        """Tokens of an answer."""
        return len(self._pool[0].tokens)

    def distances(self, length: int) -> list[int]:
        """The distances tested at a length: evenly spaced up to the whole prompt."""
        nearest = len(self._line(self._pool[0])) + len(self._encode(QUESTION))
        farthest = length - self.answer_budget - len(self._encode(HEAD))
        steps = np.arange(1, self.num_distances + 1) / self.num_distances
        return [max(nearest, round(step * farthest)) for step in steps.tolist()]

    def prompt(self, length: int, index: int, control: bool = False) -> Prompt:
        """Prompt `index`, at distance `index` modulo the number of distances.

        The statement stands at the start of the sentence in which that distance falls, so at most
        one sentence nearer. A control has filler in its place.
        """
        generator = generator_of(self._seed, self.name, length, index)
        chosen = generator.choice(len(self._pool), size=NUM_CANDIDATES, replace=False)
        candidates = [self._pool[i] for i in chosen.tolist()]
        truth = int(generator.integers(NUM_CANDIDATES))
        head, tail = self._encode(HEAD), self._encode(QUESTION)
        asked = self.distances(length)[index % self.num_distances]
        line = self._line(candidates[truth])
        after = self._sentences(asked - len(line) - len(tail))
        middle = [] if control else line
        size = length - self.answer_budget - len(head) - len(middle) - len(after) - len(tail)
        before = self._filled(size)
        return Prompt(
            tokens=joined([head, before, middle, after, tail]),
            answer_budget=self.answer_budget,
            references=(candidates[truth].number,),
            distance=len(line) + len(after) + len(tail),
            candidates=tuple(candidate.tokens for candidate in candidates),
            truth=truth,
            counts={"asked": asked, "keys": 0 if control else 1},
        )

    def _sentences(self, size: int) -> list[int]:
        """Whole sentences, as many as fit into `size` tokens."""
        tokens: list[int] = []
        position = 0
        while True:
            pieces = self._cycle if tokens else self._first
            piece = pieces[position % len(FILLER)]
            if len(tokens) + len(piece) > size:
                return tokens
            tokens += piece
            position += 1

    def _filled(self, size: int) -> np.ndarray:
        """Exactly `size` tokens of filler, truncated at the beginning."""
        round_ = joined(self._cycle)
        whole = np.tile(round_, size // len(round_) + 1)
        return whole[len(whole) - size :]


def k_max(rates: list[tuple[int, float]]) -> int | None:
    """Position Interpolation's effective window: the largest distance below which all succeed.

    Args:
        rates: distances and accuracies.

    Returns:
        None if even the smallest distance fails.
    """
    largest = None
    for distance, rate in sorted(rates):
        if rate < SUCCESS:
            break
        largest = distance
    return largest
