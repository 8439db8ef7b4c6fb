"""Words against made-up results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from alibi_lm.evals.base import Verdict
from alibi_lm.evals.perplexity.result import LengthRow
from alibi_lm.evals.perplexity.verdicts import perplexity_verdict
from alibi_lm.evals.retrieval.needle_verdict import needle_verdict
from alibi_lm.evals.retrieval.result import NeedleCell, NeedleRow, NeedleScores
from alibi_lm.evals.statistics import Interval, Share

LENGTHS = (128, 256, 512, 1024, 2048, 4096)


def scores(correct: int, trials: int) -> dict[str, Any]:
    share = Share.of(correct, trials)
    return {"trials": trials, "ranking": share, "generation": share}


def verdict_of(correct: np.ndarray, trials: int) -> Verdict:
    """The verdict on a needle grid of right answers `[lengths, depths]`, trained at 256."""
    depths = correct.shape[1]
    cells = [
        NeedleCell(length=length, depth=d / depths, **scores(int(correct[i, d]), trials))
        for i, length in enumerate(LENGTHS)
        for d in range(depths)
    ]
    control = NeedleScores(**scores(0, 1))
    rows = [
        NeedleRow(length=length, control=control, **scores(int(correct[i].sum()), trials * depths))
        for i, length in enumerate(LENGTHS)
    ]
    return needle_verdict(rows, cells, 256, 0.1)


def test_guessing_is_seldom_taken_for_retrieval() -> None:
    """300 grids of pure guessing: a correction for many cells must hold, or the best cell fools."""
    generator = np.random.default_rng(0)
    words = [verdict_of(generator.binomial(20, 0.1, size=(6, 5)), 20).word for _ in range(300)]
    assert words.count("does not retrieve") >= 0.95 * len(words)


def test_one_lucky_cell_is_not_retrieval() -> None:
    correct = np.ones((6, 5), dtype=int)
    correct[1, 2] = 4
    verdict = verdict_of(correct, 10)
    assert verdict.word == "does not retrieve"
    assert "best of its cells 40% (17% to 69%)" in verdict.text


@pytest.mark.parametrize(
    ("by_length", "word"),
    [
        ((19, 19, 19, 19, 19, 19), "holds"),
        ((19, 19, 19, 10, 8, 8), "fades"),
        ((19, 19, 12, 2, 2, 2), "fades"),
        ((19, 19, 2, 2, 1, 3), "fails beyond"),
        ((2, 2, 19, 19, 19, 19), "does not retrieve"),
    ],
)
def test_needle_words(by_length: tuple[int, ...], word: str) -> None:
    correct = np.repeat(np.array(by_length)[:, None], 5, axis=1)
    assert verdict_of(correct, 20).word == word


@pytest.mark.parametrize(
    ("interval", "word"),
    [
        ((0.90, 0.99), "falls"),
        ((0.99, 1.01), "holds"),
        ((1.001, 1.002), "rises"),
        ((0.8, 1.2), "cannot tell"),
        (None, "cannot tell"),
    ],
)
def test_perplexity_words(interval: Interval | None, word: str) -> None:
    facts: dict[str, Any] = {"num_windows": 1, "loss": 2.0, "perplexity_interval": None,
                             "bits_per_byte": None}  # fmt: skip
    rows = [
        LengthRow(length=256, multiple=1, perplexity=10.0, ratio=1.0, ratio_interval=(1, 1),
                  **facts),
        LengthRow(length=4096, multiple=16, perplexity=9.5, ratio=0.95, ratio_interval=interval,
                  **facts),
    ]  # fmt: skip
    verdict = perplexity_verdict(rows, 256)
    assert verdict.word == word
    assert "16 times as long" in verdict.text
    assert "does not show" in verdict.caveat
