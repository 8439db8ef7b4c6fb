"""The words of a needle: a line that states a number for a key."""

from __future__ import annotations

STATEMENT = "\n# The secret number of {key} is"
"""The needle up to its answer, and the question."""
ANSWER = " {number}"
END = ".\n"
NUM_DIGITS = 5

NAMES = (
    *("Alpha", "Bravo", "Charlie", "Delta", "Echo", "Foxtrot", "Golf", "Hotel", "India"),
    *("Juliett", "Kilo", "Lima", "Mike", "November", "Oscar", "Papa", "Quebec", "Romeo"),
    *("Sierra", "Tango", "Uniform", "Victor", "Whiskey", "Xray", "Yankee", "Zulu"),
)
KEYS = tuple(f"{name}-{number}" for name in NAMES for number in range(1, 10))
