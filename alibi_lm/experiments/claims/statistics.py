"""Confidence intervals over a few paired seeds, and the verdicts that follow from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

ClaimVerdict = Literal["confirmed", "refuted", "cannot tell at this scale", "not tested here"]

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
    array = np.asarray(values, dtype=np.float64)
    mean, count = float(array.mean()), len(array)
    if count < 2:
        return Estimate(mean, None, None, tuple(array.tolist()))
    quantile = _T_QUANTILES[min(count - 1, len(_T_QUANTILES)) - 1]
    half = quantile * float(array.std(ddof=1)) / math.sqrt(count)
    return Estimate(mean, mean - half, mean + half, tuple(array.tolist()))


def above(value: Estimate, threshold: float) -> ClaimVerdict:
    """Whether a quantity is above a threshold: only where its whole interval is on one side."""
    if value.low is None or value.high is None:
        return "cannot tell at this scale"
    if value.low > threshold:
        return "confirmed"
    return "refuted" if value.high <= threshold else "cannot tell at this scale"


def below(value: Estimate, threshold: float) -> ClaimVerdict:
    """Whether a quantity is below a threshold, by the same rule."""
    swap: dict[ClaimVerdict, ClaimVerdict] = {"confirmed": "refuted", "refuted": "confirmed"}
    verdict = above(value, threshold)
    return swap.get(verdict, verdict)


def all_of(*verdicts: ClaimVerdict) -> ClaimVerdict:
    """Verdict on a claim of several parts: refuted by any, confirmed by all."""
    worst: tuple[ClaimVerdict, ...] = ("refuted", "not tested here", "cannot tell at this scale")
    return next((word for word in worst if word in verdicts), "confirmed")


def any_of(*verdicts: ClaimVerdict) -> ClaimVerdict:
    """Verdict on a claim that one of several parts confirms: confirmed by any, refuted by all."""
    best: tuple[ClaimVerdict, ...] = ("confirmed", "cannot tell at this scale", "not tested here")
    return next((word for word in best if word in verdicts), "refuted")
