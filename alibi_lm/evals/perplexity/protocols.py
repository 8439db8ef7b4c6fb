"""Perplexity protocols: which targets are scored, and with which context.

All go through one function, which scores windows; they differ in the windows alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from alibi_lm.evals.models.scorer import Scorer
from alibi_lm.evals.perplexity.result import PositionRow
from alibi_lm.evals.perplexity.windows import Window, window_batches
from alibi_lm.evals.statistics import bootstrap_means
from alibi_lm.utils.progress import Progress

WINDOWS = (
    "Non-overlapping windows. Window L of a document x takes inputs x[s:s+L] and targets "
    "x[s+1:s+L+1], s = 0, L, 2L, ...; the last window may be shorter and is scored too. Targets "
    "are tokens 1 to N-1 of each document (token 0 has no context), its end-of-document token "
    "included, each scored once at every length with at least one token of context from its own "
    "window. Only documents of more than the longest length are taken, so every length scores the "
    "same targets. Perplexity = exp(sum of losses / number of targets); intervals: 95% percentile "
    "bootstrap over documents, paired for ratios."
)
SLIDING = (
    "Sliding windows of L inputs x[s:s+L], s = 0, S, 2S, ... with stride S. The first window of a "
    "document scores its L targets, every other those that no window before it has: S of them (the "
    "last perhaps fewer), each with more than L-S tokens of context. The same documents and "
    "targets as with non-overlapping windows."
)
FIXED_TARGET = (
    "Fixed targets. The last n tokens of each document are scored at every length L, with the last "
    "L inputs x[N-1-L:N-1], so that nothing but the context changes: the i-th of them has L-n+i "
    "tokens of it. The same documents as with non-overlapping windows."
)
BY_POSITION = (
    "Loss by position: the mean loss of the targets that have so many tokens of context, over the "
    "full non-overlapping windows of the longest length, the same windows at every position. "
    "Intervals: 95% percentile bootstrap over documents."
)


def window_losses(
    scorer: Scorer,
    documents: Sequence[np.ndarray],
    windows: Sequence[Window],
    batch_tokens: int,
    progress: Progress | None = None,
) -> Iterator[tuple[Window, np.ndarray]]:
    """Each window, in any order, with the losses of its scored targets (float64, nats)."""
    equal = getattr(scorer, "length_dependent", False)
    for batch in window_batches(documents, windows, batch_tokens, scorer.dp_size, equal=equal):
        losses = scorer.token_losses(torch.from_numpy(batch.tokens)).double().numpy()
        for row, window in zip(losses, batch.windows, strict=True):
            yield window, row[window.first - 1 - window.start : window.num_inputs]
            if progress is not None:
                progress.advance(window.stop - window.first)


def target_losses(
    scorer: Scorer,
    documents: Sequence[np.ndarray],
    windows: Sequence[Window],
    batch_tokens: int,
    progress: Progress | None = None,
) -> list[np.ndarray]:
    """Losses of tokens 1 to N-1 of each document `[N - 1]`; the windows score each target once."""
    losses_of = [np.full(len(document) - 1, np.nan) for document in documents]
    for window, losses in window_losses(scorer, documents, windows, batch_tokens, progress):
        losses_of[window.document][window.first - 1 : window.stop - 1] = losses
    return losses_of


def document_sums(
    scorer: Scorer,
    documents: Sequence[np.ndarray],
    windows: Sequence[Window],
    batch_tokens: int,
    progress: Progress | None = None,
) -> np.ndarray:
    """Sum of the losses of each document's scored targets `[documents]`, float64 nats."""
    sums = np.zeros(len(documents))
    for window, losses in window_losses(scorer, documents, windows, batch_tokens, progress):
        sums[window.document] += losses.sum()
    return sums


def position_rows(losses: Sequence[np.ndarray], length: int) -> list[PositionRow]:
    """Mean loss by tokens of context, in ranges that double: 1, 2-3, 4-7, ... up to `length`.

    Args:
        losses: of tokens 1 to N-1 of each document, scored in non-overlapping windows of `length`.
    """
    whole = [x[: len(x) // length * length].reshape(-1, length) for x in losses]
    rows = []
    for power in range(length.bit_length()):
        first, stop = 1 << power, min(2 << power, length + 1)
        parts = [windows[:, first - 1 : stop - 1] for windows in whole]
        sums = np.array([part.sum() for part in parts])
        counts = np.array([part.size for part in parts])
        if not counts.sum():
            continue
        intervals = bootstrap_means(sums[None], counts)
        rows.append(
            PositionRow(
                first=first,
                last=stop - 1,
                num_targets=int(counts.sum()),
                loss=float(sums.sum() / counts.sum()),
                loss_interval=intervals[0] if intervals else None,
            )
        )
    return rows
