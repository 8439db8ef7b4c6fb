"""English words for keys and word lists, from words.txt: adjectives, an empty line, nouns."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from itertools import product

ADJECTIVES, NOUNS = (
    tuple(block.split())
    for block in files("alibi_lm.tasks").joinpath("words.txt").read_text("utf-8").split("\n\n")
)
WORDS = tuple(sorted({*ADJECTIVES, *NOUNS}))
"""Single words."""
NUM_KEYS = len(ADJECTIVES) * len(NOUNS)


def key_word(index: int) -> str:
    """Key `index` of `NUM_KEYS`: adjective-noun."""
    adjective, noun = divmod(index, len(NOUNS))
    return f"{ADJECTIVES[adjective]}-{NOUNS[noun]}"


@cache
def compounds() -> tuple[str, ...]:
    """Pairs of words written together, for lists that need more than `WORDS`."""
    return tuple(sorted({first + second for first, second in product(ADJECTIVES, NOUNS)}))
