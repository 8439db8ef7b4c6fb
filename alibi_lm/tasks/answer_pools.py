"""Numbers as answers: pools of equal token length, and the numbers in a text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from alibi_lm.data.tokenizer import Tokenizer
from alibi_lm.utils.errors import DataError, Problem

POOL_DRAWS = 4000


@dataclass(frozen=True)
class Answer:
    """A number and its tokens."""

    number: str
    tokens: tuple[int, ...]


def answer_pool(
    tokenizer: Tokenizer, seed: int, form: str, num_digits: int, at_least: int
) -> list[Answer]:
    """Different numbers of equally many tokens, the most common count among random ones.

    Args:
        form: how an answer is written, with one field, for example ` {number}`.

    Raises:
        DataError: fewer than `at_least` numbers take equally many tokens.
    """
    generator = np.random.default_rng([seed, num_digits])
    low = 10 ** (num_digits - 1)
    drawn = low + generator.choice(9 * low, size=min(POOL_DRAWS, 9 * low), replace=False)
    pool = equally_long(tokenizer, form, list(map(str, drawn.tolist())))
    if len(pool) < at_least:
        rule = f"writes only {len(pool)} of {len(drawn)} numbers in the same number of tokens"
        raise DataError(Problem("tokenizer", None, rule, "use a tokenizer with digits"))
    return pool


def equally_long(tokenizer: Tokenizer, form: str, texts: list[str]) -> list[Answer]:
    """The texts that the tokenizer can write in the most common number of tokens."""
    field = re.search(r"\{\w+\}", form)
    if field is None:
        raise ValueError(f"{form!r} has no field")
    answers = []
    for text in texts:
        tokens = tuple(tokenizer.encode(form.replace(field[0], text)))
        if tokenizer.decode(list(tokens)).strip() == text:
            answers.append(Answer(text, tokens))
    counts = Counter(len(answer.tokens) for answer in answers)
    commonest = max(counts, key=lambda count: (counts[count], -count), default=0)
    return [answer for answer in answers if len(answer.tokens) == commonest]


def numbers_in(text: str, num_digits: int) -> Iterator[str]:
    """Every sequence of `num_digits` digits in a text, also inside longer ones."""
    for digits in re.findall(rf"[0-9]{{{num_digits},}}", text):
        for start in range(len(digits) - num_digits + 1):
            yield digits[start : start + num_digits]
