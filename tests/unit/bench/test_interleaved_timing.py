"""Ratios of what was measured in turns, and their intervals."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import pairwise, permutations

import numpy as np
import pytest

from alibi_lm.bench.interleaved_timing import interleaved, markdown, paired_ratio


def test_each_way_comes_after_each_other_alike() -> None:
    calls: list[str] = []

    def measure(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    found = interleaved({name: partial(measure, name) for name in "abc"}, repeats=6, warm_ups=1)
    assert "".join(calls) == "abc" + "abc" + "cba" + "bca" + "acb" + "cab" + "bac"
    assert found["a"] == [4.0, 9.0, 12.0, 13.0, 17.0, 20.0]
    after = Counter(pairwise(calls[3:]))
    assert {after[pair] for pair in permutations("abc", 2)} == {2, 3}


def test_what_takes_long_has_few_turns() -> None:
    found = interleaved({"long": lambda: 61.0, "short": lambda: 1.0}, repeats=5)
    assert found == {"long": [61.0] * 3, "short": [1.0] * 5}
    assert paired_ratio(found["long"], found["short"]).confidence == pytest.approx(0.75)


def test_a_ratio_is_of_pairs_and_not_of_medians() -> None:
    found = paired_ratio([2.0, 40.0, 9.0], [1.0, 10.0, 3.0])
    assert (found.median, found.low, found.high) == (3.0, 2.0, 4.0)
    assert found.confidence == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("count", "position", "confidence"), [(6, 1, 0.96875), (7, 1, 0.984375), (20, 6, 0.9586)]
)
def test_intervals_are_those_of_the_published_table(
    count: int, position: int, confidence: float
) -> None:
    """Order statistics of a median's 95% interval, as tabulated for the sign test."""
    found = paired_ratio([float(n) for n in range(1, count + 1)], [1.0] * count)
    assert (found.low, found.high) == (position, count + 1 - position)
    assert found.confidence == pytest.approx(confidence, abs=1e-4)


def test_intervals_hold_the_median_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(2000):
        found = paired_ratio(np.exp(rng.standard_normal(9)).tolist(), [1.0] * 9)
        held += found.low <= 1.0 <= found.high
    assert held / 2000 == pytest.approx(found.confidence, abs=0.015)


def test_a_table_of_a_readme() -> None:
    assert markdown(["a", "b"], [["1", "2"]]) == ["| a | b |", "| --- | --- |", "| 1 | 2 |"]
