"""Perplexity results in words."""

from __future__ import annotations

from collections.abc import Sequence

from alibi_lm.evals.base import Verdict
from alibi_lm.evals.perplexity.result import LengthRow, LossGapRow
from alibi_lm.evals.statistics import CONFIDENCE, Interval

HOLDS_WITHIN = 0.05
"""A ratio whose interval contains 1 counts as holding if the interval stays this near to 1."""
USE_COUNTS_FROM = 0.001
"""Nats a token with context to cut: a smaller loss gap is not called a use of context, however
significant it is."""
NO_USE_WITHIN = 0.01
"""Nats a token with context to cut: an interval of the loss gap that stays above minus this
excludes a use of context."""

TRUNCATED_CONTEXT_CAVEAT = (
    "It says whether context beyond that length lowers the loss on average over tokens; a rare use "
    "of it can hide in the average, and a use is not yet retrieval."
)
PERPLEXITY_CAVEAT = (
    "Lower perplexity in longer non-overlapping windows does not show that the longer context is "
    "used: a model that ignores everything beyond the training length gets it too, because fewer "
    "of its targets sit at the start of a window, where context is short."
)
SENTENCES = {
    "falls": "Perplexity falls past the training length",
    "holds": "Perplexity holds past the training length",
    "rises": "Perplexity rises past the training length",
    "cannot tell": "Too few documents to tell whether perplexity holds",
}


def perplexity_verdict(rows: Sequence[LengthRow], training_length: int) -> Verdict:
    """Whether perplexity at the longest length falls, holds or rises against the training length.

    Returns:
        With the word falls, holds, rises or cannot tell.
    """
    longest = rows[-1]
    reference = next((row for row in rows if row.length == training_length), None)
    if reference is None or longest.length <= training_length:
        missing = "the training length itself" if reference is None else "a longer length"
        text = f"Cannot tell what happens past the training length: {missing} was not scored."
        return Verdict("cannot tell", text, PERPLEXITY_CAVEAT)
    word = _perplexity_word(longest.ratio_interval)
    numbers = (
        f"{reference.perplexity:.2f} at the training length of {training_length:,}, "
        f"{longest.perplexity:.2f} at {longest.length:,} "
        f"({longest.length / training_length:g} times as long), {_ratio(longest)}"
    )
    return Verdict(word, f"{SENTENCES[word]}: {numbers}.", PERPLEXITY_CAVEAT)


def _perplexity_word(interval: Interval | None) -> str:
    if interval is None:
        return "cannot tell"
    low, high = interval
    if high < 1:
        return "falls"
    if low > 1:
        return "rises"
    return "holds" if low > 1 - HOLDS_WITHIN and high < 1 + HOLDS_WITHIN else "cannot tell"


def _ratio(row: LengthRow) -> str:
    text = f"ratio {row.ratio:.3f}"
    if row.ratio_interval is None:
        return f"{text} with no interval from so few documents"
    low, high = row.ratio_interval
    return f"{text}, {CONFIDENCE:.0%} interval {low:.3f} to {high:.3f}"


def context_verdict(rows: Sequence[LossGapRow], context_length: int) -> Verdict:
    """Whether context beyond `context_length` tokens is used at the longest length.

    Args:
        rows: loss gaps to the truncated-context baseline.
        context_length: tokens that the baseline's input was cut to.

    Returns:
        With the word yes, no or cannot tell.
    """
    row = rows[-1]
    word = _context_word(row.loss_gap_interval, row.share_cut)
    numbers = f"loss gap to the truncated-context baseline {row.loss_gap:+.4f} nats a token"
    if not row.share_cut:
        numbers += ", because no target has more context than that"
    elif row.loss_gap_interval is None:
        numbers += " with no interval from so few documents"
    else:
        low, high = row.loss_gap_interval
        numbers += f", {CONFIDENCE:.0%} interval {low:+.4f} to {high:+.4f}"
        if low > USE_COUNTS_FROM * row.share_cut:
            numbers += ", so longer input does harm"
    text = f"Uses context beyond {context_length:,}: {word} (at length {row.length:,}: {numbers})."
    return Verdict(word, text, TRUNCATED_CONTEXT_CAVEAT)


def _context_word(interval: Interval | None, share: float) -> str:
    if interval is None or not share:
        return "cannot tell"
    # The loss gap is a mean over all targets, 0 for those without context to cut: where those are
    # many, it is near 0 whatever the model does.
    low, high = interval[0] / share, interval[1] / share
    if high < -USE_COUNTS_FROM:
        return "yes"
    return "no" if low > -NO_USE_WITHIN else "cannot tell"
