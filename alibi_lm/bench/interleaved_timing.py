"""Interleaved measurements, and paired ratios of them with confidence intervals."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import comb
from pathlib import Path
from statistics import median
from typing import Any

from alibi_lm.utils.files import write_json
from alibi_lm.utils.logging import console

CONFIDENCE = 0.95
SLOW_SECONDS, SLOW_REPEATS = 60.0, 3
"""A measurement whose first value exceeds `SLOW_SECONDS` is repeated `SLOW_REPEATS` times only."""


@dataclass(frozen=True)
class Ratio:
    """The median of paired ratios."""

    median: float
    low: float
    high: float
    confidence: float
    """Probability that [low, high] contains the population median."""

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def as_dict(self) -> dict[str, float]:
        """The fields as JSON stores them."""
        return asdict(self)


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """The median ratio of values measured in the same rounds, with its interval.

    If one sequence is shorter, only the rounds that both have count.

    The interval runs from the k-th lowest to the k-th highest ratio, with the largest k that
    keeps a confidence of at least `CONFIDENCE` for any distribution (Conover 1999, Practical
    Nonparametric Statistics, section 3.2). Fewer than 6 rounds have no such k; their interval is
    the whole range.
    """
    ratios = sorted(a / b for a, b in zip(numerators, denominators, strict=False))
    count, outside = len(ratios), 0
    rank, confidence = 1, 1 - 2 / 2**count
    for k in range(1, count // 2 + 1):
        outside += comb(count, k - 1)
        if 1 - 2 * outside / 2**count < CONFIDENCE:
            break
        rank, confidence = k, 1 - 2 * outside / 2**count
    return Ratio(median(ratios), ratios[rank - 1], ratios[-rank], confidence)


def timed(action: Callable[[], object]) -> Callable[[], float]:
    """A measurement that returns the seconds `action` takes."""

    def measure() -> float:
        start = time.perf_counter()
        action()
        return time.perf_counter() - start

    return measure


def interleaved(
    measurements: Mapping[str, Callable[[], float]], repeats: int, warm_ups: int = 1
) -> dict[str, list[float]]:
    """Call every measurement once a round, for `repeats` rounds, and return their values.

    The order rotates and every other round runs backwards, so that each measurement follows every
    other one about equally often: none profits from what its predecessor left in the caches.
    """
    names = list(measurements)
    for _ in range(warm_ups):
        for measure in measurements.values():
            measure()
    values: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(repeats):
        first = round_ // 2 % len(names)
        order = (*names[first:], *names[:first])
        for name in order if round_ % 2 == 0 else reversed(order):
            if round_ < SLOW_REPEATS or values[name][0] <= SLOW_SECONDS:
                values[name].append(measurements[name]())
    return values


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def publish(result: dict[str, Any], lines: Sequence[str], path: Path | None) -> None:
    """Print the lines, and write the result to `path` if one is given."""
    for line in lines:
        console.info(line)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, result)
