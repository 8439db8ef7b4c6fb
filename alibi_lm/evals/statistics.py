"""Intervals for the numbers that the evals print."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Self

import numpy as np

CONFIDENCE = 0.95
BOOTSTRAP_SAMPLES = 2000

Interval = tuple[float, float]


def wilson(successes: float, trials: int, confidence: float = CONFIDENCE) -> Interval:
    """Wilson's score interval for a share (E. B. Wilson, 1927), without continuity correction.

    Unlike the normal interval it stays within [0, 1] and is not empty at 0 or `trials` successes.
    For a sum of scores in [0, 1] it is wide rather than narrow: no score of that mean varies more
    than right or wrong does.
    """
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(f"{successes} of {trials} is not a share")
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share = successes / trials
    shrunk = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials)
    half *= math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    low = 0.0 if successes == 0 else shrunk - half
    high = 1.0 if successes == trials else shrunk + half
    return low, high


@dataclass
class Share:
    """A share of right answers with Wilson's interval."""

    correct: float
    rate: float
    interval: Interval

    def __str__(self) -> str:
        """For example `40% (17% to 69%)`."""
        low, high = self.interval
        return f"{self.rate:.0%} ({low:.0%} to {high:.0%})"

    @classmethod
    def of(cls, correct: float, trials: int) -> Self:
        """So many right answers of so many."""
        return cls(correct, correct / trials, wilson(correct, trials))


def significantly_greater(
    first: tuple[float, int], second: tuple[float, int], confidence: float = CONFIDENCE
) -> bool:
    """Whether the first share is larger, by Newcombe's interval of a difference (1998, method 10).

    Args:
        first, second: successes and trials.
    """
    (low, _), (_, high) = wilson(*first, confidence), wilson(*second, confidence)
    one, other = first[0] / first[1], second[0] / second[1]
    return one - other > math.hypot(one - low, high - other)


@dataclass(frozen=True)
class Bootstrap:
    """Intervals of perplexities, and of their ratios to a reference length's perplexity."""

    perplexity: list[Interval]
    ratio: list[Interval]


MIN_DOCUMENTS = 5


def bootstrap_perplexity(
    losses: np.ndarray, tokens: np.ndarray, reference: int, seed: int = 0
) -> Bootstrap | None:
    """Percentile bootstrap over documents.

    Every resample draws the same documents for all lengths, so a ratio's interval is the paired
    one: what the documents have in common cancels.

    Args:
        losses: `[lengths, documents]`, sums of nats.
        tokens: `[documents]`, targets scored in each.
        reference: row of `losses` that ratios are taken to.

    Returns:
        None for fewer than `MIN_DOCUMENTS`: resampling so few says little of their spread.
    """
    num_documents = losses.shape[1]
    if num_documents < MIN_DOCUMENTS:
        return None
    generator = np.random.default_rng(seed)
    even = np.full(num_documents, 1 / num_documents)
    counts = generator.multinomial(num_documents, even, size=BOOTSTRAP_SAMPLES)
    means = (counts @ losses.T) / (counts @ tokens)[:, None]
    return Bootstrap(
        perplexity=_percentiles(np.exp(means)),
        ratio=_percentiles(np.exp(means - means[:, [reference]])),
    )


def _percentiles(samples: np.ndarray) -> list[Interval]:
    edges = [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]
    low, high = np.quantile(samples, edges, axis=0)
    return [(float(a), float(b)) for a, b in zip(low, high, strict=True)]


def bootstrap_means(sums: np.ndarray, counts: np.ndarray, seed: int = 0) -> list[Interval] | None:
    """Percentile bootstrap, over documents, of means: one interval a row of sums.

    Args:
        sums: `[rows, documents]`.
        counts: `[documents]`, what each sum is of.

    Returns:
        None for fewer than `MIN_DOCUMENTS` documents that count.
    """
    taken = counts > 0
    sums, counts = sums[:, taken], counts[taken]
    num_documents = len(counts)
    if num_documents < MIN_DOCUMENTS:
        return None
    even = np.full(num_documents, 1 / num_documents)
    drawn = np.random.default_rng(seed).multinomial(num_documents, even, size=BOOTSTRAP_SAMPLES)
    return _percentiles((drawn @ sums.T) / (drawn @ counts)[:, None])
