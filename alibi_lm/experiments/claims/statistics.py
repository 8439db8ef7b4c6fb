"""Intervals over a few paired seeds, and what they say of a claim."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Verdict = Literal["confirmed", "refuted", "cannot tell at this scale", "not tested here"]

# 97.5% quantiles of Student's t for 1, 2, ... degrees of freedom (any table of it).
_T_QUANTILES = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
)


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its 95% interval; no interval from a single seed."""

    mean: float
    low: float | None
    high: float | None
    values: tuple[float, ...]
    """One a seed."""

    def exponential(self) -> Estimate:
        """The same for exp of the quantity."""
        low, high = (None if end is None else math.exp(end) for end in (self.low, self.high))
        return Estimate(math.exp(self.mean), low, high, tuple(map(math.exp, self.values)))


def estimate(values: Sequence[float] | np.ndarray) -> Estimate:
    """Mean and 95% interval (Student's t) of one value a seed."""
    found = np.asarray(values, dtype=np.float64)
    mean, count = float(found.mean()), len(found)
    if count < 2:
        return Estimate(mean, None, None, tuple(found.tolist()))
    quantile = _T_QUANTILES[min(count - 1, len(_T_QUANTILES)) - 1]
    half = quantile * float(found.std(ddof=1)) / math.sqrt(count)
    return Estimate(mean, mean - half, mean + half, tuple(found.tolist()))


def above(found: Estimate, threshold: float) -> Verdict:
    """Whether a quantity is above a threshold: only where its whole interval is on one side."""
    if found.low is None or found.high is None:
        return "cannot tell at this scale"
    if found.low > threshold:
        return "confirmed"
    return "refuted" if found.high <= threshold else "cannot tell at this scale"


def below(found: Estimate, threshold: float) -> Verdict:
    """`above` the other way round."""
    swap: dict[Verdict, Verdict] = {"confirmed": "refuted", "refuted": "confirmed"}
    verdict = above(found, threshold)
    return swap.get(verdict, verdict)


def all_of(*verdicts: Verdict) -> Verdict:
    """A claim of several parts: refuted by any, confirmed by all."""
    worst: tuple[Verdict, ...] = ("refuted", "not tested here", "cannot tell at this scale")
    return next((word for word in worst if word in verdicts), "confirmed")


def any_of(*verdicts: Verdict) -> Verdict:
    """A claim that one of several may bear out: confirmed by any, refuted by all."""
    best: tuple[Verdict, ...] = ("confirmed", "cannot tell at this scale", "not tested here")
    return next((word for word in best if word in verdicts), "refuted")
