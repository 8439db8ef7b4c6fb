"""Words against made-up results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from alibi_lm.evals.verdicts import needle_verdict, perplexity_verdict

from alibi_lm.evals.statistics import wilson

LENGTHS = (128, 256, 512, 1024, 2048, 4096)


def scores(correct: int, trials: int) -> dict[str, Any]:
    score = {
        "correct": correct,
        "rate": correct / trials,
        "interval": list(wilson(correct, trials)),
    }
    return {"trials": trials, "ranking": score, "generation": score}


def grid(correct: np.ndarray, trials: int) -> dict[str, Any]:
    """A needle result from right answers `[lengths, depths]`, trained at 256."""
    depths = correct.shape[1]
    return {
        "training_length": 256,
        "chance": 0.1,
        "cells": [
            {"length": length, "depth": d / depths, **scores(int(correct[i, d]), trials)}
            for i, length in enumerate(LENGTHS)
            for d in range(depths)
        ],
        "by_length": [
            {"length": length, **scores(int(correct[i].sum()), trials * depths)}
            for i, length in enumerate(LENGTHS)
        ],
    }


def test_guessing_is_seldom_taken_for_retrieval() -> None:
    """300 grids of pure guessing: a correction for many cells must hold, or the best cell fools."""
    generator = np.random.default_rng(0)
    words = [
        needle_verdict(grid(generator.binomial(20, 0.1, size=(6, 5)), 20)).word for _ in range(300)
    ]
    assert words.count("does not retrieve") >= 0.95 * len(words)


def test_one_lucky_cell_is_not_retrieval() -> None:
    correct = np.ones((6, 5), dtype=int)
    correct[1, 2] = 4
    verdict = needle_verdict(grid(correct, 10))
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
    assert needle_verdict(grid(correct, 20)).word == word


@pytest.mark.parametrize(
    ("interval", "word"),
    [
        ([0.90, 0.99], "falls"),
        ([0.99, 1.01], "holds"),
        ([1.001, 1.002], "rises"),
        ([0.8, 1.2], "cannot tell"),
        (None, "cannot tell"),
    ],
)
def test_perplexity_words(interval: list[float] | None, word: str) -> None:
    rows: list[dict[str, Any]] = [
        {"length": 256, "perplexity": 10.0, "ratio": 1.0, "ratio_interval": [1.0, 1.0]},
        {"length": 4096, "perplexity": 9.5, "ratio": 0.95, "ratio_interval": interval},
    ]
    verdict = perplexity_verdict(rows, 256)
    assert verdict.word == word
    assert "16 times as long" in verdict.text
    assert "does not show" in verdict.caveat
