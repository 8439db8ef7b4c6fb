"""Cutting documents and token streams into windows: inputs x[s:s+L], targets x[s+1:s+L+1].

Consecutive windows share one token: the last target of a window is the first input of the next.
So every target is scored once, and every target has at least one token of context.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from alibi_lm.data.indexed import TokenFile
from alibi_lm.errors import DataError, Problem


@dataclass(frozen=True)
class WindowBatch:
    """Windows that go through the model together."""

    tokens: np.ndarray
    """`[B, T + 1]` int64; a window shorter than T is filled up with zeros on the right."""
    num_targets: np.ndarray
    """`[B]`: how many of a row's T targets are scored."""
    document: np.ndarray
    """`[B]`: index of the document that a window was cut from."""


def document_windows(num_tokens: int, length: int) -> list[tuple[int, int]]:
    """(start, number of targets) of each window of a document of `num_tokens` tokens.

    The targets are tokens 1 to num_tokens - 1, whatever the length; the last window may be shorter.
    """
    num_targets = num_tokens - 1
    return [(s, min(length, num_targets - s)) for s in range(0, num_targets, length)]


def window_batches(
    documents: Sequence[np.ndarray], length: int, batch_tokens: int
) -> Iterator[WindowBatch]:
    """All windows of all documents, full windows first, in batches of about `batch_tokens` inputs.

    A batch holds at least one window, however long. Deterministic.
    """
    full: list[tuple[int, int, int]] = []
    tails: list[tuple[int, int, int]] = []
    for index, document in enumerate(documents):
        for start, count in document_windows(len(document), length):
            (full if count == length else tails).append((index, start, count))
    # Tails of like length go together, so that little is filled up.
    tails.sort(key=lambda tail: -tail[2])
    for group in (full, tails):
        first = 0
        while first < len(group):
            size = max(1, batch_tokens // group[first][2])
            yield _batch(documents, group[first : first + size])
            first += size


def _batch(documents: Sequence[np.ndarray], group: Sequence[tuple[int, int, int]]) -> WindowBatch:
    longest = max(count for _, _, count in group)
    tokens = np.zeros((len(group), longest + 1), dtype=np.int64)
    for row, (index, start, count) in enumerate(group):
        tokens[row, : count + 1] = documents[index][start : start + count + 1]
    return WindowBatch(
        tokens,
        np.array([count for _, _, count in group]),
        np.array([index for index, _, _ in group]),
    )


def validation_batches(
    token_file: TokenFile, length: int, num_tokens: int, batch_tokens: int
) -> list[np.ndarray]:
    """Windows over the concatenated stream of a token file, from its start, for training.

    Returns:
        Arrays `[b, length + 1]` int64 that together hold about `num_tokens` targets (rounded down
        to whole windows, at least one, at most what the file has). With num_tokens a multiple of
        every length asked for, all lengths score the same targets.

    Raises:
        DataError: the file is shorter than one window.
    """
    available = (token_file.num_tokens - 1) // length
    if available < 1:
        rule = f"has {token_file.num_tokens} tokens, but a window needs {length + 1}"
        fix = "prepare more validation text, or leave that validation multiple out"
        raise DataError(Problem(str(token_file.prefix), None, rule, fix))
    num_windows = min(available, max(1, num_tokens // length))
    size = max(1, batch_tokens // length)
    batches = []
    for first in range(0, num_windows, size):
        last = min(first + size, num_windows)
        stream = token_file.read(first * length, last * length + 1).astype(np.int64)
        rows = np.arange(last - first)[:, None] * length + np.arange(length + 1)[None]
        batches.append(stream[rows])
    return batches
