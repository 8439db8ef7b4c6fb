"""Scoring against RULER's published metrics on hand-made answers."""

from __future__ import annotations

import pytest

from alibi_lm.tasks.metrics import METRICS, begins, string_match_all, string_match_part

# Predictions, references, and what RULER's string_match_all and string_match_part say of them,
# worked out by hand: a reference counts when it is a substring, in any case of letters.
BY_HAND = [
    (" 1234567.", ["1234567"], 1, 1),
    (": 1234567, 7654321", ["1234567", "7654321", "1111111", "2222222"], 1 / 2, 1),
    ("91234567", ["1234567"], 1, 1),  # a substring, though of another number
    (" 123456", ["1234567"], 0, 0),
    ("ABCDE bcdef", ["abcde", "BCDEF"], 1, 1),
    ("", ["abcde"], 0, 0),
    ("word1\nword2\tword3", ["word1", "word2", "word3"], 1, 1),
    ("the answer is\x00 paris", ["Paris", "London"], 1 / 2, 1),
    ("  \n", ["x"], 0, 0),
    ("1. sun 2. moon 3. sea", ["sun", "moon", "star", "sea"], 3 / 4, 1),
    ("one\x0btwo", ["one two"], 0, 0),  # a control character becomes a newline
]


@pytest.mark.parametrize(("prediction", "references", "every", "part"), BY_HAND)
def test_metrics_agree_with_hand_made_answers(
    prediction: str, references: list[str], every: float, part: float
) -> None:
    assert string_match_all(prediction, references) == pytest.approx(every)
    assert string_match_part(prediction, references) == part
    assert METRICS["all"] is string_match_all


def test_ten_of_ten_and_the_mean_over_prompts_are_percentages_of_ruler() -> None:
    """RULER averages shares over prompts: 1/2, 1 and 0 make 50.00."""
    shares = [
        string_match_all(prediction, ["aa", "bb"]) for prediction in ("aa", "bb aa", "neither")
    ]
    assert round(100 * sum(shares) / 3, 2) == 50.00


@pytest.mark.parametrize(
    ("text", "right"),
    [(" 48213", 1), (" 48213.", 1), ("48213 is", 1), (" 482134", 0), (" 4821", 0), ("is 48213", 0)],
)
def test_an_answer_that_must_begin_with_the_number(text: str, right: float) -> None:
    assert begins(text, ["48213"]) == right
