"""Windows: every target once, with context, at every length."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alibi_lm.data.indexed import TokenFile
from alibi_lm.evals.perplexity.windows import (
    document_windows,
    fixed_target_windows,
    non_overlapping_windows,
    sliding_windows,
    validation_batches,
    window_batches,
)
from alibi_lm.utils.errors import DataError
from tests.unit.evals.evals_fakes import write_documents


@given(num_tokens=st.integers(2, 300), length=st.integers(1, 320))
def test_windows_of_a_document_tile_its_targets(num_tokens: int, length: int) -> None:
    windows = document_windows(num_tokens, length)
    targets = [s + 1 + i for s, count in windows for i in range(count)]
    assert targets == list(range(1, num_tokens))
    assert all(count == length for _, count in windows[:-1])
    assert 1 <= windows[-1][1] <= length


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(2, 70), min_size=1, max_size=6),
    length=st.integers(1, 40),
    batch_tokens=st.integers(1, 200),
)
def test_batches_hold_every_target_of_every_document_once(
    sizes: list[int], length: int, batch_tokens: int
) -> None:
    offsets = np.cumsum([0, *sizes])
    documents = [np.arange(a, b) for a, b in zip(offsets, offsets[1:], strict=False)]
    seen: Counter[tuple[int, int]] = Counter()
    windows = non_overlapping_windows(documents, length)
    for batch in window_batches(documents, windows, batch_tokens):
        rows, width = batch.tokens.shape
        assert rows == 1 or rows * (width - 1) <= batch_tokens
        for tokens, window in zip(batch.tokens, batch.windows, strict=True):
            count = window.num_inputs
            assert np.array_equal(np.diff(tokens[: count + 1]), np.ones(count))
            assert window.first == window.start + 1
            seen.update((window.document, int(target)) for target in tokens[1 : count + 1])
    wanted = {(i, int(t)) for i, document in enumerate(documents) for t in document[1:]}
    assert set(seen) == wanted
    assert set(seen.values()) <= {1}


@given(num_tokens=st.integers(2, 90), length=st.integers(1, 40), stride=st.integers(1, 40))
def test_sliding_windows_score_every_target_once_with_the_stated_context(
    num_tokens: int, length: int, stride: int
) -> None:
    stride = min(stride, length)
    windows = sliding_windows([np.arange(num_tokens)], length, stride)
    targets = [target for window in windows for target in range(window.first, window.stop)]
    assert targets == list(range(1, num_tokens))
    assert [window.start for window in windows] == [stride * i for i in range(len(windows))]
    for window in windows:
        assert window.num_inputs <= length
        for target in range(window.first, window.stop):
            context = target - window.start
            assert 1 <= context <= length
            assert context == target or context > length - stride


@given(sizes=st.lists(st.integers(2, 60), max_size=5), length=st.integers(1, 40))
def test_fixed_targets_are_the_last_of_every_long_enough_document(
    sizes: list[int], length: int
) -> None:
    windows = fixed_target_windows([np.arange(size) for size in sizes], length, 1)
    long_enough = [index for index, size in enumerate(sizes) if size > length]
    assert [window.document for window in windows] == long_enough
    for window in windows:
        assert (window.first, window.stop) == (sizes[window.document] - 1, sizes[window.document])
        assert window.num_inputs == length


def test_validation_windows_score_the_same_targets_at_every_multiple(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "v", [range(0, 100), range(100, 333)])
    file = TokenFile(prefix)
    for length in (8, 16, 32, 64):
        batches = validation_batches(file, length, 256, batch_tokens=50)
        assert all(batch.shape[1] == length + 1 for batch in batches)
        assert all(len(batch) == 1 or batch.size - len(batch) <= 50 for batch in batches)
        assert np.concatenate([b[:, 1:].ravel() for b in batches]).tolist() == list(range(1, 257))


def test_validation_windows_at_the_edges_of_a_file(tmp_path: Path) -> None:
    file = TokenFile(write_documents(tmp_path / "v", [range(33)]))
    assert sum(map(len, validation_batches(file, 32, 1000, 64))) == 1
    assert sum(map(len, validation_batches(file, 16, 1000, 64))) == 2
    assert sum(map(len, validation_batches(file, 16, 1, 64))) == 1
    with pytest.raises(DataError, match="33 tokens, but a window needs 34"):
        validation_batches(file, 33, 1000, 64)
