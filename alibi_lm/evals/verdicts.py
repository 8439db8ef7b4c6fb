"""Results in words, no stronger than their intervals allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from alibi_lm.evals.statistics import CONFIDENCE, wilson

HOLDS_WITHIN = 0.05
"""A ratio whose interval reaches 1 counts as holding if the interval stays this near to 1."""

USE_COUNTS_FROM = 0.001
"""Nats a token with context to cut: an excess nearer to 0 is not called a use of context, however
sure it is."""
NO_USE_WITHIN = 0.01
"""Nats a token with context to cut: an interval of the excess that stays above minus this excludes
a use of context."""

TRUNCATED_CONTEXT_CAVEAT = (
    "It says whether context beyond that reach lowers the loss on average over tokens; a rare use "
    "of it can hide in the average, and a use is not yet retrieval."
)
PERPLEXITY_CAVEAT = (
    "Lower perplexity in longer non-overlapping windows does not show that the longer context is "
    "used: a model that ignores everything beyond the training length gets it too, because fewer "
    "of its targets sit at the start of a window, where context is short."
)
NEEDLE_CAVEAT = (
    "A needle is one narrow kind of recall: finding one sentence says nothing about reasoning over "
    "a long input, and intervals are as wide as the number of trials makes them."
)


def perplexity_verdict(rows: Sequence[Mapping[str, Any]], training_length: int) -> dict[str, str]:
    """Whether perplexity at the longest length falls, holds or rises against the training length.

    Args:
        rows: a result's rows: length, perplexity, ratio and ratio_interval (None: no interval).

    Returns:
        `word` (falls, holds, rises, cannot tell), `text` (one sentence) and `caveat`.
    """
    longest = rows[-1]
    reference = next((row for row in rows if row["length"] == training_length), None)
    if reference is None or longest["length"] <= training_length:
        missing = "the training length itself" if reference is None else "a longer length"
        text = f"Cannot tell what happens past the training length: {missing} was not scored."
        return {"word": "cannot tell", "text": text, "caveat": PERPLEXITY_CAVEAT}
    word = _perplexity_word(longest["ratio_interval"])
    numbers = (
        f"{reference['perplexity']:.2f} at the training length of {training_length:,}, "
        f"{longest['perplexity']:.2f} at {longest['length']:,} "
        f"({longest['length'] / training_length:g} times as long), {_ratio(longest)}"
    )
    sentences = {
        "falls": "Perplexity falls past the training length",
        "holds": "Perplexity holds past the training length",
        "rises": "Perplexity rises past the training length",
        "cannot tell": "Too few documents to tell whether perplexity holds",
    }
    return {
        "word": word,
        "text": f"{sentences[word]}: {numbers}.",
        "caveat": PERPLEXITY_CAVEAT,
    }


def _perplexity_word(interval: Sequence[float] | None) -> str:
    if interval is None:
        return "cannot tell"
    low, high = interval
    if high < 1:
        return "falls"
    if low > 1:
        return "rises"
    return "holds" if low > 1 - HOLDS_WITHIN and high < 1 + HOLDS_WITHIN else "cannot tell"


def _ratio(row: Mapping[str, Any]) -> str:
    text = f"ratio {row['ratio']:.3f}"
    if row["ratio_interval"] is None:
        return f"{text} with no interval from so few documents"
    low, high = row["ratio_interval"]
    return f"{text}, {CONFIDENCE:.0%} interval {low:.3f} to {high:.3f}"


def context_verdict(rows: Sequence[Mapping[str, Any]], reach: int) -> dict[str, str]:
    """Whether context beyond `reach` tokens is used at the longest length, by the null model.

    Args:
        rows: length, excess and excess_interval (None: no interval), nats a token, and share_cut:
            how many of the tokens have more context than `reach`, of all.
        reach: tokens that the null model's input was cut to.

    Returns:
        `word` (yes, no, cannot tell), `text` (one sentence) and `caveat`.
    """
    row = rows[-1]
    share = row["share_cut"]
    word = _context_word(row["loss_gap_interval"], share)
    numbers = f"excess over the null model {row['loss_gap']:+.4f} nats a token"
    if not share:
        numbers += ", because no target has more context than that"
    elif row["loss_gap_interval"] is None:
        numbers += " with no interval from so few documents"
    else:
        low, high = row["loss_gap_interval"]
        numbers += f", {CONFIDENCE:.0%} interval {low:+.4f} to {high:+.4f}"
        if low > USE_COUNTS_FROM * share:
            numbers += ", so longer input does harm"
    text = f"Uses context beyond {reach:,}: {word} (at length {row['length']:,}: {numbers})."
    return {"word": word, "text": text, "caveat": TRUNCATED_CONTEXT_CAVEAT}


def _context_word(interval: Sequence[float] | None, share: float) -> str:
    if interval is None or not share:
        return "cannot tell"
    # The excess is a mean over all targets, 0 for those without context to cut: where those are
    # many, it is near 0 whatever the model does.
    low, high = interval[0] / share, interval[1] / share
    if high < -USE_COUNTS_FROM:
        return "yes"
    return "no" if low > -NO_USE_WITHIN else "cannot tell"


def needle_verdict(result: Mapping[str, Any]) -> dict[str, str]:
    """What a needle grid says about retrieval within and beyond the training length.

    "Above chance" allows for looking at many cells: the Wilson bound of closed-set ranking is
    taken at a confidence raised by Bonferroni's correction over all cells and lengths compared.

    Returns:
        `word` (does not retrieve, holds, fades, fails beyond, cannot tell), `text`, `caveat`.
    """
    training_length, chance = result["training_length"], result["chance"]
    rows, cells = result["by_length"], result["cells"]
    comparisons = len(rows) + len(cells)
    inside = [row for row in rows if row["length"] <= training_length]
    beyond = [row for row in rows if row["length"] > training_length]
    if not inside:
        text = (
            "Cannot tell: no prompt was within the training length, so a failure further out "
            "could be one to retrieve at all."
        )
        return {"word": "cannot tell", "text": text, "caveat": NEEDLE_CAVEAT}
    inside_cells = [cell for cell in cells if cell["length"] <= training_length]
    above = [g for g in (*inside, *inside_cells) if _above(g, chance, comparisons)]
    if not above:
        return _no_retrieval(inside_cells, training_length, chance)
    best = max(inside, key=lambda row: row["ranking"]["rate"])
    found = (
        f"Retrieves within the training length of {training_length:,} "
        f"(best length {best['length']:,}: {score_words(best['ranking'])} by ranking, "
        f"{score_words(best['generation'])} by generation; chance {chance:.0%})."
    )
    if not beyond:
        return {"word": "cannot tell", "text": f"{found} No longer prompt was tried.",
                "caveat": NEEDLE_CAVEAT}  # fmt: skip
    word, rest = _beyond(beyond, best, chance, comparisons)
    return {"word": word, "text": f"{found} {rest}", "caveat": NEEDLE_CAVEAT}


def _above(group: Mapping[str, Any], chance: float, comparisons: int) -> bool:
    ranking = group["ranking"]
    confidence = 1 - (1 - CONFIDENCE) / comparisons
    return wilson(ranking["correct"], group["trials"], confidence)[0] > chance


def score_words(score: Mapping[str, Any]) -> str:
    """A score with its interval, for example `40% (17% to 69%)`."""
    low, high = score["interval"]
    return f"{score['rate']:.0%} ({low:.0%} to {high:.0%})"


def _no_retrieval(
    inside_cells: Sequence[Mapping[str, Any]], training_length: int, chance: float
) -> dict[str, str]:
    best = max(inside_cells, key=lambda cell: cell["ranking"]["rate"])
    text = (
        f"Does not retrieve at all at any length up to the training length of {training_length:,} "
        f"(best of its cells {score_words(best['ranking'])} by ranking, chance {chance:.0%}, not "
        "above it once the number of cells is allowed for); so the grid says nothing about "
        "extrapolation."
    )
    return {"word": "does not retrieve", "text": text, "caveat": NEEDLE_CAVEAT}


def _beyond(
    beyond: Sequence[Mapping[str, Any]],
    best: Mapping[str, Any],
    chance: float,
    comparisons: int,
) -> tuple[str, str]:
    above = [row["length"] for row in beyond if _above(row, chance, comparisons)]
    lost = [row["length"] for row in beyond if not _above(row, chance, comparisons)]
    longest = beyond[-1]
    numbers = f"at {longest['length']:,}: {score_words(longest['ranking'])} by ranking"
    if not above:
        text = f"Beyond it, not above chance at any length ({numbers})."
        return "fails beyond", text
    if lost:
        kept, gone = lengths_words(above), lengths_words(lost)
        text = f"Beyond it, above chance at {kept} but not at {gone} ({numbers})."
        return "fades", text
    if longest["ranking"]["interval"][1] < best["ranking"]["interval"][0]:
        return "fades", f"Beyond it, above chance at every length, but lower ({numbers})."
    return "holds", f"Beyond it, above chance at every length ({numbers})."


def lengths_words(lengths: Sequence[int]) -> str:
    """Lengths, for example `1,024, 2,048`."""
    return ", ".join(f"{length:,}" for length in lengths)
