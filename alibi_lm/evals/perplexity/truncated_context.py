"""The truncated-context baseline: the model's own score with its input cut to the last L tokens.

Perplexity in longer windows falls even for a model that never uses more than L tokens of context,
because fewer of its targets stand near a window's start. Only the paired difference between full
and truncated input shows whether it uses more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from alibi_lm.evals.models.scorer import Scorer
from alibi_lm.evals.perplexity.protocols import window_losses
from alibi_lm.evals.perplexity.result import LossGapRow
from alibi_lm.evals.perplexity.windows import Window
from alibi_lm.evals.statistics import MIN_DOCUMENTS, bootstrap_means
from alibi_lm.utils.progress import Progress

TRUNCATED_CONTEXT = (
    "Truncated-context baseline of L tokens. One seeded sample of targets, the same at every "
    "length. A target with q tokens of context in its non-overlapping window is scored again with "
    "the input cut to the last min(q, L) tokens. Loss gap = its loss less that one, in nats, "
    "paired target by target (0 where nothing is cut), averaged over the whole sample; below 0: "
    "context beyond L helps. Interval: 95% percentile bootstrap over documents."
)


def truncated_context_loss(
    first_loss: float, sliding_loss: float, context_length: int, length: int
) -> float:
    """Mean loss, in non-overlapping windows of `length`, of a model that uses L tokens only.

    [L p0 + (length - L) ps] / length: a window's first L targets cost what they cost in a window
    of L, all others what they cost with exactly L tokens of context.

    Args:
        first_loss: p0, its mean loss in non-overlapping windows of L = `context_length`, nats.
        sliding_loss: ps, its mean loss in sliding windows of L with stride 1.
        context_length: L.
        length: at least L.

    Raises:
        ValueError: `length` is less than `context_length`.
    """
    if not 1 <= context_length <= length:
        raise ValueError(
            f"a window of {length} tokens is shorter than the context of {context_length}"
        )
    return (context_length * first_loss + (length - context_length) * sliding_loss) / length


def truncated_context_perplexity(
    first: float, sliding: float, context_length: int, length: int
) -> float:
    """`truncated_context_loss` for perplexities."""
    return math.exp(
        truncated_context_loss(math.log(first), math.log(sliding), context_length, length)
    )


@dataclass(frozen=True)
class Sample:
    """Targets drawn from the documents."""

    document: np.ndarray
    """`[n]`: index of the document."""
    target: np.ndarray
    """`[n]`: index of the token in it, at least 1."""

    def of(self, losses: Sequence[np.ndarray]) -> np.ndarray:
        """Their losses `[n]` among those of tokens 1 to N-1 of each document."""
        pairs = zip(self.document, self.target, strict=True)
        return np.array([losses[document][target - 1] for document, target in pairs])

    def context(self, length: int) -> np.ndarray:
        """Tokens of context `[n]` in non-overlapping windows of `length`."""
        return (self.target - 1) % length + 1

    def longest_context(self, lengths: Sequence[int]) -> np.ndarray:
        """The most tokens of context `[n]` that one of the lengths gives."""
        longest: np.ndarray = np.max([self.context(length) for length in lengths], axis=0)
        return longest


def draw(documents: Sequence[np.ndarray], size: int, seed: int) -> Sample:
    """`size` different targets, each as likely as any other; all of them where there are fewer."""
    edges = np.cumsum([0, *(len(document) - 1 for document in documents)])
    total = int(edges[-1])
    chosen = np.arange(total)
    if size < total:
        chosen = np.sort(np.random.default_rng(seed).choice(total, size, replace=False))
    document = np.searchsorted(edges, chosen, side="right") - 1
    return Sample(document, chosen - edges[document] + 1)


def cut_losses(
    scorer: Scorer,
    documents: Sequence[np.ndarray],
    sample: Sample,
    context_length: int,
    lengths: Sequence[int],
    batch_tokens: int,
    progress: Progress | None = None,
) -> np.ndarray:
    """Losses `[n]` with `context_length` tokens of context; NaN if no length gives more."""
    places = {
        (int(sample.document[i]), int(sample.target[i])): i
        for i in np.flatnonzero(sample.longest_context(lengths) > context_length)
    }
    windows = [Window(d, target - context_length, target, target + 1) for d, target in places]
    cut = np.full(len(sample.target), np.nan)
    for window, losses in window_losses(scorer, documents, windows, batch_tokens, progress):
        cut[places[window.document, window.first]] = losses[0]
    return cut


def loss_gap_rows(
    sample: Sample,
    observed: np.ndarray,
    cut: np.ndarray,
    lengths: Sequence[int],
    context_length: int,
) -> list[LossGapRow]:
    """Loss, loss of the baseline and their difference at each length, nats a target.

    Args:
        sample: n targets.
        observed: `[lengths, n]`: losses in non-overlapping windows.
        cut: `[n]`: losses of `cut_losses`.
        lengths: window lengths.
        context_length: L.
    """
    owners, index = np.unique(sample.document, return_inverse=True)
    counts = np.bincount(index, minlength=len(owners))
    rows = []
    for losses, length in zip(observed, lengths, strict=True):
        beyond = sample.context(length) > context_length
        baseline = np.where(beyond, cut, losses)
        differences = losses - baseline
        # Only documents with truncated targets carry evidence; the zeros of others would not.
        enough = not beyond.any() or len(np.unique(index[beyond])) >= MIN_DOCUMENTS
        sums = np.bincount(index, differences, minlength=len(owners))
        intervals = bootstrap_means(sums[None], counts) if enough else None
        rows.append(
            LossGapRow(
                length=length,
                num_cut=int(beyond.sum()),
                share_cut=float(beyond.mean()),
                loss=float(losses.mean()),
                truncated_context_loss=float(baseline.mean()),
                loss_gap=float(differences.mean()),
                loss_gap_interval=intervals[0] if intervals else None,
            )
        )
    return rows
