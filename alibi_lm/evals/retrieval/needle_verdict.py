"""What a needle grid shows, in words."""

from __future__ import annotations

from collections.abc import Sequence

from alibi_lm.evals.base import Verdict
from alibi_lm.evals.retrieval.result import NeedleCell, NeedleRow, NeedleScores
from alibi_lm.evals.retrieval.verdict import lengths_words
from alibi_lm.evals.statistics import CONFIDENCE, wilson

NEEDLE_CAVEAT = (
    "A needle is one narrow kind of recall: finding one sentence says nothing about reasoning over "
    "a long input, and intervals are as wide as the number of trials makes them."
)


def needle_verdict(
    rows: Sequence[NeedleRow], cells: Sequence[NeedleCell], training_length: int, chance: float
) -> Verdict:
    """What a needle grid says about retrieval within and beyond the training length.

    "Above chance" allows for looking at many cells: the Wilson bound of closed-set ranking is
    taken at a confidence raised by Bonferroni's correction over all cells and lengths compared.

    Returns:
        With the word does not retrieve, holds, fades, fails beyond or cannot tell.
    """
    comparisons = len(rows) + len(cells)
    inside = [row for row in rows if row.length <= training_length]
    beyond = [row for row in rows if row.length > training_length]
    if not inside:
        text = (
            "Cannot tell: no prompt was within the training length, so a failure further out "
            "could be one to retrieve at all."
        )
        return Verdict("cannot tell", text, NEEDLE_CAVEAT)
    inside_cells = [cell for cell in cells if cell.length <= training_length]
    groups = [*inside, *inside_cells]
    if not any(_above(group, chance, comparisons) for group in groups):
        best_cell = max(inside_cells, key=lambda cell: cell.ranking.rate)
        text = (
            "Does not retrieve at all at any length up to the training length of "
            f"{training_length:,} (best of its cells {best_cell.ranking} by ranking, chance "
            f"{chance:.0%}, not above it once the number of cells is allowed for); so the grid "
            "says nothing about extrapolation."
        )
        return Verdict("does not retrieve", text, NEEDLE_CAVEAT)
    best = max(inside, key=lambda row: row.ranking.rate)
    known = (
        f"Retrieves within the training length of {training_length:,} "
        f"(best length {best.length:,}: {best.ranking} by ranking, "
        f"{best.generation} by generation; chance {chance:.0%})."
    )
    if not beyond:
        return Verdict("cannot tell", f"{known} No longer prompt was tried.", NEEDLE_CAVEAT)
    word, rest = _beyond(beyond, best, chance, comparisons)
    return Verdict(word, f"{known} {rest}", NEEDLE_CAVEAT)


def _above(group: NeedleScores, chance: float, comparisons: int) -> bool:
    confidence = 1 - (1 - CONFIDENCE) / comparisons
    return wilson(group.ranking.correct, group.trials, confidence)[0] > chance


def _beyond(
    beyond: Sequence[NeedleRow], best: NeedleRow, chance: float, comparisons: int
) -> tuple[str, str]:
    above = [row.length for row in beyond if _above(row, chance, comparisons)]
    lost = [row.length for row in beyond if row.length not in above]
    longest = beyond[-1]
    numbers = f"at {longest.length:,}: {longest.ranking} by ranking"
    if not above:
        return "fails beyond", f"Beyond it, not above chance at any length ({numbers})."
    if lost:
        kept, gone = lengths_words(above), lengths_words(lost)
        return "fades", f"Beyond it, above chance at {kept} but not at {gone} ({numbers})."
    if longest.ranking.interval[1] < best.ranking.interval[0]:
        return "fades", f"Beyond it, above chance at every length, but lower ({numbers})."
    return "holds", f"Beyond it, above chance at every length ({numbers})."
