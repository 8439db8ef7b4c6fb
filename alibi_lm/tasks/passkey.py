"""Passkey retrieval, as Landmark Attention and Position Interpolation ask it (arXiv 2306.15595).

A five-digit key is stated in the middle of repeated filler, and asked for at the end.
"""

from __future__ import annotations

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
"""Sentences that repeat in this order, each after the first with a space before it."""
KEY_LINE = "\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
QUESTION = "\nWhat is the pass key? The pass key is"
ANSWER = " {key}"
NUM_DIGITS = 5
