"""Scores of answers: RULER's published metrics, and that of the passkey."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from alibi_lm.tasks.prompt import Metric

_CONTROL = re.compile("[\x00-\x1f]")


def cleaned(prediction: str) -> str:
    """A prediction as RULER scores it: stripped, with control characters as newlines."""
    return _CONTROL.sub("\n", prediction.strip()).strip()


def string_match_all(prediction: str, references: Sequence[str]) -> float:
    """The share of references that the prediction contains, ignoring case."""
    text = cleaned(prediction).lower()
    return sum(reference.lower() in text for reference in references) / len(references)


def string_match_part(prediction: str, references: Sequence[str]) -> float:
    """1 if the prediction contains at least one reference, ignoring case."""
    text = cleaned(prediction).lower()
    return float(any(reference.lower() in text for reference in references))


def begins(prediction: str, references: Sequence[str]) -> float:
    """1 if the prediction begins with a reference that no further digit follows."""
    return float(any(says(prediction, reference) for reference in references))


def says(text: str, number: str) -> bool:
    """Whether generated text begins with the number, and no further digit follows."""
    return re.match(rf"\s*{re.escape(number)}(?![0-9])", text) is not None


METRICS: Mapping[Metric, Callable[[str, Sequence[str]], float]] = {
    "all": string_match_all,
    "part": string_match_part,
    "begins": begins,
}
