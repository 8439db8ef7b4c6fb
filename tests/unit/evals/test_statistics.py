"""Intervals against published and closed-form values."""

from __future__ import annotations

import numpy as np
import pytest

from alibi_lm.evals.statistics import bootstrap_perplexity, wilson


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        # R. G. Newcombe, Statistics in Medicine 17 (1998), table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (29, 29, 0.8830, 1.0000),
    ],
)
def test_wilson_equals_published_values(
    successes: int, trials: int, low: float, high: float
) -> None:
    assert wilson(successes, trials) == pytest.approx((low, high), abs=5e-5)


def test_wilson_refuses_what_is_no_share() -> None:
    with pytest.raises(ValueError, match="not a share"):
        wilson(3, 2)
    with pytest.raises(ValueError, match="not a share"):
        wilson(0, 0)


def test_bootstrap_covers_the_mean_of_normal_documents() -> None:
    """With equal documents the interval is that of a mean: about 1.96 standard errors each way."""
    generator = np.random.default_rng(1)
    means = generator.normal(2.0, 0.1, size=400)
    tokens = np.full(400, 1000)
    losses = np.stack([means, means + 0.05]) * tokens
    intervals = bootstrap_perplexity(losses, tokens, reference=0)
    assert intervals is not None
    low, high = np.log(intervals.perplexity[0])
    error = means.std() / np.sqrt(400)
    assert low == pytest.approx(means.mean() - 1.96 * error, abs=0.2 * error)
    assert high == pytest.approx(means.mean() + 1.96 * error, abs=0.2 * error)
    # Every document differs by the same 0.05: the paired ratio has no spread at all.
    assert intervals.ratio[1] == pytest.approx((np.exp(0.05), np.exp(0.05)), rel=1e-9)
    assert intervals.ratio[0] == (1.0, 1.0)


def test_bootstrap_is_seeded_and_needs_two_documents() -> None:
    losses, tokens = np.random.default_rng(0).uniform(1, 2, (2, 9)) * 50, np.full(9, 50)
    assert bootstrap_perplexity(losses, tokens, 0) == bootstrap_perplexity(losses, tokens, 0)
    assert bootstrap_perplexity(losses[:, :1], tokens[:1], 0) is None
