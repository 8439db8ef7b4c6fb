"""Measurements in turns, and their ratios with intervals."""

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
LONG, FEW = 60.0, 3


@dataclass(frozen=True)
class Ratio:
    """A median of paired ratios."""

    median: float
    low: float
    high: float
    confidence: float
    """That the interval holds the median of all such pairs."""

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def as_dict(self) -> dict[str, float]:
        """As JSON holds it."""
        return asdict(self)


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """The median ratio of values that were measured in the same turns, and its interval.

    Where one has fewer turns, the turns that both have count.

    The interval goes from the k-th lowest to the k-th highest ratio, for the largest k with at
    least `CONFIDENCE` that the median lies between them, whatever the distribution (Conover 1999,
    Practical Nonparametric Statistics, section 3.2). With fewer than 6 turns there is no such k,
    and it goes from the lowest to the highest.
    """
    ratios = sorted(a / b for a, b in zip(numerators, denominators, strict=False))
    count, outside = len(ratios), 0
    taken, confidence = 1, 1 - 2 / 2**count
    for k in range(1, count // 2 + 1):
        outside += comb(count, k - 1)
        if 1 - 2 * outside / 2**count < CONFIDENCE:
            break
        taken, confidence = k, 1 - 2 * outside / 2**count
    return Ratio(median(ratios), ratios[taken - 1], ratios[-taken], confidence)


def timed(action: Callable[[], object]) -> Callable[[], float]:
    """An action as a way that takes its own time."""

    def way() -> float:
        start = time.perf_counter()
        action()
        return time.perf_counter() - start

    return way


def interleaved(
    ways: Mapping[str, Callable[[], float]], repeats: int, warm_ups: int = 1
) -> dict[str, list[float]]:
    """What each way measures, in seconds, `repeats` times in turns.

    Turns start with each way in turn, and every other turn goes backwards, so that each way comes
    after each other one alike: what the one before left in caches is then no advantage. A way that
    takes more than `LONG` seconds the first time has `FEW` turns.
    """
    names = list(ways)
    for _ in range(warm_ups):
        for way in ways.values():
            way()
    found: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(repeats):
        first = turn // 2 % len(names)
        order = (*names[first:], *names[:first])
        for name in order if turn % 2 == 0 else reversed(order):
            if turn < FEW or found[name][0] <= LONG:
                found[name].append(ways[name]())
    return found


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table for a README."""
    lines = [headings, ["---"] * len(headings), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def publish(result: dict[str, Any], lines: Sequence[str], path: Path | None) -> None:
    """Say a result, and write it where that was asked for."""
    for line in lines:
        console.info(line)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, result)
