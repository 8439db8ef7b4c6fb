"""Sampling: property-based, against brute force."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject
from numpy.typing import NDArray

from alibi_lm.data.indexed import TokenFile, TokenFileWriter
from alibi_lm.data.permutation import Permutation, count_below, floor_sum
from alibi_lm.data.sampling import Blend, Mixture, batch_indices
from alibi_lm.data.token_stream import TokenStream
from alibi_lm.utils.errors import ConfigError, DataError

WEIGHTS = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=4)


def token_file(prefix: Path, documents: list[list[int]]) -> TokenFile:
    writer = TokenFileWriter(prefix, np.uint16)
    for document in documents:
        writer.add_document(document)
    return writer.finish()


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> list[TokenFile]:
    """Four corpora of 7, 40, 101 and 3 windows of 8; token t of corpus c is 1000 c + t."""
    folder = tmp_path_factory.mktemp("corpora")
    return [
        token_file(folder / f"c{c}", [list(range(1000 * c, 1000 * c + n * 8 + 1 + c))])
        for c, n in enumerate((7, 40, 101, 3))
    ]


@given(st.integers(1, 3000), st.integers(0, 2**64))
@settings(max_examples=60, deadline=None)
def test_permutation_is_a_bijection(size: int, key: int) -> None:
    permutation = Permutation(size, key)
    assert sorted(map(permutation, range(size))) == list(range(size))


def test_permutation_of_a_huge_range_stays_inside_and_does_not_collide() -> None:
    size = 10**15 + 37
    images = {Permutation(size, 3)(i) for i in range(0, size, size // 5000)}
    assert len(images) == 5001
    assert all(0 <= image < size for image in images)


def test_permutation_looks_random() -> None:
    """Displacement, neighbors and halves as expected of a random permutation, 4 sigma wide."""
    size = 4096
    for key in range(8):
        images = np.array([Permutation(size, key)(i) for i in range(size)])
        assert abs((images == np.arange(size)).sum() - 1) <= 5
        assert (np.abs(np.diff(images)) == 1).sum() <= 12
        assert abs((images[: size // 2] < size // 2).sum() - size // 4) < 4 * np.sqrt(size) / 4
        assert abs(np.corrcoef(np.arange(size), images)[0, 1]) < 4 / np.sqrt(size)


@given(st.integers(0, 60), st.integers(1, 50), st.integers(0, 90), st.integers(0, 90), st.data())
def test_floor_sum_and_count_by_brute_force(
    count: int, modulus: int, step: int, start: int, data: DataObject
) -> None:
    values = [step * i + start for i in range(count)]
    assert floor_sum(count, modulus, step, start) == sum(v // modulus for v in values)
    limit = data.draw(st.integers(0, modulus))
    below = sum(v % modulus < limit for v in values)
    assert count_below(count, modulus, step, start, limit) == below


@given(WEIGHTS, st.integers(0, 2**63))
@settings(max_examples=200, deadline=None)
def test_achieved_proportions(weights: list[float], seed: int) -> None:
    mixture = Mixture(weights, seed)
    for number in range(10_000, 200_001, 10_000):
        counts = [mixture.count(number, corpus) for corpus in range(len(weights))]
        assert sum(counts) == number
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count / number - weight / sum(weights)) < 1e-3
    for start in (12_345, 10**9):  # and in any stretch of 10,000
        for corpus, weight in enumerate(weights):
            count = mixture.count(start + 10_000, corpus) - mixture.count(start, corpus)
            assert abs(count / 10_000 - weight / sum(weights)) < 1e-3


@given(WEIGHTS, st.integers(0, 2**63), st.integers(0, 500))
@settings(max_examples=40, deadline=None)
def test_place_in_a_corpus_is_its_number_of_earlier_samples(
    weights: list[float], seed: int, first: int
) -> None:
    mixture = Mixture(weights, seed)
    seen = [mixture.count(first, corpus) for corpus in range(len(weights))]
    for index in range(first, first + 300):
        corpus, earlier = mixture.where(index)
        assert earlier == seen[corpus]
        seen[corpus] += 1


@given(WEIGHTS, st.integers(0, 2**63))
@settings(max_examples=25, deadline=None)
def test_each_epoch_has_every_window_once(
    corpora: list[TokenFile], weights: list[float], seed: int
) -> None:
    blend = Blend(list(zip(corpora, weights, strict=False)), 8, seed)
    assert blend.num_windows == [7, 40, 101, 3][: len(weights)]
    seen: Counter[tuple[int, int, int]] = Counter(blend.where(i) for i in range(600))
    assert max(seen.values()) == 1
    for corpus, count in enumerate(blend.num_windows):
        epochs = blend.mixture.count(600, corpus) // count
        for epoch in range(epochs):
            windows = {w for c, e, w in seen if (c, e) == (corpus, epoch)}
            assert windows == set(range(count))


def test_epochs_and_seeds_are_shuffled_differently(corpora: list[TokenFile]) -> None:
    orders = [
        tuple(Blend([(corpora[2], 1.0)], 8, seed).where(101 * epoch + i)[2] for i in range(101))
        for seed in (0, 1)
        for epoch in (0, 1)
    ]
    assert len(set(orders)) == 4


def test_a_sample_is_its_window_of_the_corpus(corpora: list[TokenFile]) -> None:
    blend = Blend([(file, 1.0 + c) for c, file in enumerate(corpora)], 8, seed=5)
    again = pickle.loads(pickle.dumps(blend))
    for index in range(200):
        corpus, _, window = blend.where(index)
        start = 1000 * corpus + 8 * window
        expected = np.arange(start, start + 9)
        assert blend.sample(index).dtype == np.int64
        np.testing.assert_array_equal(blend.sample(index), expected)
        np.testing.assert_array_equal(again.sample(index), expected)
    np.testing.assert_array_equal(blend.samples([4, 9])[1], blend.sample(9))
    assert blend.samples([]).shape == (0, 9)


def test_a_corpus_without_a_window_is_refused(tmp_path: Path, corpora: list[TokenFile]) -> None:
    small = token_file(tmp_path / "small", [list(range(8))])
    with pytest.raises(DataError, match="small: has 8 tokens"):
        Blend([(corpora[0], 1.0), (small, 1.0)], 8, seed=0)
    assert Blend([(small, 1.0)], 7, seed=0).num_windows == [1]
    with pytest.raises(ConfigError, match="weights"):
        Blend([], 8, seed=0)


LAYOUTS = st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4))


@given(LAYOUTS, st.integers(0, 10**9))
def test_every_layout_reads_the_same_samples_in_a_step(
    layout: tuple[int, int, int], step: int
) -> None:
    ranks, micro, accumulation = layout
    size = ranks * micro * accumulation
    batches = [batch_indices(step, size, rank, ranks, micro) for rank in range(ranks)]
    assert {len(batch) for batch in batches} == {accumulation}
    assert {len(indices) for batch in batches for indices in batch} == {micro}
    flat = sorted(index for batch in batches for indices in batch for index in indices)
    assert flat == list(range(step * size, (step + 1) * size))
    # one process that reads micro-batch after micro-batch meets them in the same order
    whole = [indices for number in range(accumulation) for batch in batches
             for indices in [batch[number]]]  # fmt: skip
    assert whole == batch_indices(step, size, 0, 1, micro)


@given(st.lists(st.tuples(st.integers(1, 5), LAYOUTS), min_size=1, max_size=5))
def test_nothing_lost_or_repeated_over_stops_and_resumes(
    parts: list[tuple[int, tuple[int, int, int]]],
) -> None:
    """Each part trains some steps in a layout; the checkpoint holds the steps done."""
    size = 720  # a multiple of every product of ranks up to 6 and micro-batches up to 4
    seen: list[int] = []
    step = 0
    for num_steps, (ranks, micro, _) in parts:
        for _ in range(num_steps):
            for rank in range(ranks):
                for indices in batch_indices(step, size, rank, ranks, micro):
                    seen.extend(indices)
            step += 1
    assert sorted(seen) == list(range(step * size))


def test_a_layout_that_does_not_divide_is_an_error() -> None:
    for rank, ranks, micro in ((0, 3, 4), (2, 2, 4), (0, 0, 4)):
        with pytest.raises(ValueError, match="global batch"):
            batch_indices(0, 16, rank, ranks, micro)


DOCUMENTS = st.lists(st.lists(st.integers(0, 4), max_size=6), min_size=1, max_size=8)


@given(DOCUMENTS, st.booleans())
@settings(max_examples=80, deadline=None)
def test_stream_has_one_eos_after_each_document(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], ended: bool
) -> None:
    """eos is 1: none, some or all of the documents end in it already."""
    if ended:
        documents = [[*document, 1] for document in documents]
    file = token_file(tmp_path_factory.mktemp("stream") / "c", documents)
    expected: list[int] = []
    for document in documents:
        expected += document if not document or document[-1] == 1 else [*document, 1]
    stream = TokenStream(file, eos_id=1)
    assert stream.num_tokens == len(expected)
    for start in range(len(expected) + 1):
        for stop in range(start, len(expected) + 1):
            assert stream.read(start, stop).tolist() == expected[start:stop]
    plain = TokenStream(file, eos_id=None)
    assert plain.read(0, plain.num_tokens).tolist() == sum(documents, [])


class WatchedFile(TokenFile):
    """Remembers the tokens that were asked for ahead, and that they came before they were read."""

    def __init__(self, prefix: Path) -> None:
        super().__init__(prefix)
        self.expected: set[int] = set()

    def expect(self, start: int, stop: int) -> None:
        super().expect(start, stop)
        self.expected |= set(range(start, stop))

    def read(self, start: int, stop: int) -> NDArray[Any]:
        assert set(range(start, stop)) <= self.expected
        return super().read(start, stop)


@given(DOCUMENTS, st.booleans(), st.data())
@settings(max_examples=60, deadline=None)
def test_what_is_read_was_asked_for_ahead_and_little_else(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[list[int]],
    ends: bool,
    data: DataObject,
) -> None:
    prefix = tmp_path_factory.mktemp("watched") / "c"
    token_file(prefix, documents)
    file = WatchedFile(prefix)
    stream = TokenStream(file, eos_id=1 if ends else None)
    start = data.draw(st.integers(0, stream.num_tokens))
    stop = data.draw(st.integers(start, stream.num_tokens))
    stream.expect(start, stop)
    stream.read(start, stop)
    assert len(file.expected) <= stop - start


def test_the_samples_of_a_batch_are_asked_for_before_the_first_is_read(tmp_path: Path) -> None:
    token_file(tmp_path / "c", [list(range(400))])
    file = WatchedFile(tmp_path / "c")
    seen: list[int] = []
    blend = Blend([(file, 1.0)], 8, seed=0)
    read = file.read
    file.read = lambda *span: seen.append(len(file.expected)) or read(*span)  # type: ignore
    expected = [blend.where(index)[2] * 8 for index in range(6)]
    samples = blend.samples(range(6))
    assert samples.tolist() == [list(range(start, start + 9)) for start in expected]
    assert set(seen) == {len({t for start in expected for t in range(start, start + 9)})}


def test_blend_over_a_foreign_file_without_ends(tmp_path: Path) -> None:
    file = token_file(tmp_path / "c", [[2, 3], [4], [5, 6, 7]])
    blend = Blend([(file, 1.0)], 2, seed=0, eos_id=1)
    windows = {blend.where(i)[2]: blend.sample(i).tolist() for i in range(blend.num_windows[0])}
    assert windows == {0: [2, 3, 1], 1: [1, 4, 1], 2: [1, 5, 6], 3: [6, 7, 1]}
