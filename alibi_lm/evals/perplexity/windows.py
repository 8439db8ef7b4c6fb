"""Cutting documents and token streams into windows: inputs x[s:s+L], targets x[s+1:s+L+1].

Consecutive windows share one token: the last target of a window is the first input of the next.
So every target is scored once, and every target has at least one token of context. Other protocols
give more inputs than they score targets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from alibi_lm.data.indexed import TokenFile
from alibi_lm.utils.errors import DataError, Problem


@dataclass(frozen=True)
class Window:
    """Inputs x[start:stop - 1] of a document x, of which the targets x[first:stop] are scored."""

    document: int
    """Index of the document."""
    start: int
    first: int
    stop: int

    @property
    def num_inputs(self) -> int:
        """Tokens that go into the model."""
        return self.stop - 1 - self.start


@dataclass(frozen=True)
class WindowBatch:
    """Windows that go through the model together."""

    tokens: np.ndarray
    """`[B, T + 1]` int64; a window shorter than T is filled up with zeros on the right."""
    windows: Sequence[Window]
    """The B windows."""


def document_windows(num_tokens: int, length: int) -> list[tuple[int, int]]:
    """(start, number of targets) of each window of a document of `num_tokens` tokens.

    The targets are tokens 1 to num_tokens - 1, whatever the length; the last window may be shorter.
    """
    num_targets = num_tokens - 1
    return [(s, min(length, num_targets - s)) for s in range(0, num_targets, length)]


def non_overlapping_windows(documents: Sequence[np.ndarray], length: int) -> list[Window]:
    """Windows that tile the documents."""
    return [
        Window(index, start, start + 1, start + count + 1)
        for index, document in enumerate(documents)
        for start, count in document_windows(len(document), length)
    ]


def sliding_windows(documents: Sequence[np.ndarray], length: int, stride: int) -> list[Window]:
    """Windows that start at 0, stride, 2 stride, ... and each score what none before it has.

    The first of a document scores `length` targets, each other `stride` (the last perhaps fewer)
    with more than length - stride tokens of context.
    """
    windows = []
    for index, document in enumerate(documents):
        start, done, num_targets = 0, 0, len(document) - 1
        while done < num_targets:
            end = min(start + length, num_targets)
            windows.append(Window(index, start, done + 1, end + 1))
            start, done = start + stride, end
    return windows


def fixed_target_windows(
    documents: Sequence[np.ndarray], length: int, num_targets: int
) -> list[Window]:
    """The last `num_targets` tokens of each document with the last `length` inputs.

    Documents of fewer inputs than that have none.
    """
    return [
        Window(index, len(x) - 1 - length, len(x) - num_targets, len(x))
        for index, x in enumerate(documents)
        if len(x) > length
    ]


def window_batches(
    documents: Sequence[np.ndarray],
    windows: Sequence[Window],
    batch_tokens: int,
    dp_size: int = 1,
    *,
    equal: bool = False,
) -> Iterator[WindowBatch]:
    """The windows, longest first, in batches of about `batch_tokens` inputs for each replica.

    A replica's share holds at least one window, however long. Deterministic. With `equal`, the
    windows of a batch are equally long, so that none is filled up.
    """
    # Windows of like length go together, so that little is filled up.
    ordered = sorted(windows, key=lambda window: -window.num_inputs)
    first = 0
    while first < len(ordered):
        longest = ordered[first].num_inputs
        group = ordered[first : first + dp_size * max(1, batch_tokens // longest)]
        if equal:
            group = [window for window in group if window.num_inputs == longest]
        tokens = np.zeros((len(group), longest + 1), dtype=np.int64)
        for row, window in enumerate(group):
            document = documents[window.document]
            tokens[row, : window.num_inputs + 1] = document[window.start : window.stop]
        yield WindowBatch(tokens, group)
        first += len(group)


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
