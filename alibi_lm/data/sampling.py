"""The tokens of sample i of a run: a pure function of (seed, i).

Only `batch_indices` knows about ranks, micro-batches, accumulation and steps: it lists the samples
of each micro-batch. So the data state of a run is one number, the samples consumed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from alibi_lm.data.indexed import TokenFile
from alibi_lm.data.permutation import Permutation, count_below, hash64
from alibi_lm.data.token_stream import TokenStream
from alibi_lm.utils.errors import ConfigError, DataError, Problem

_MODULUS = 2**64
_STEP = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio, odd: its multiples modulo 2^64 fill the circle most evenly."""


class Mixture:
    """Chooses a corpus for every sample by weight.

    Sample i lies at u_i = (STEP * i + start(seed)) mod 2^64 on a circle that is cut into one arc a
    corpus, as long as the corpus's weight. Multiples of the golden ratio are a low-discrepancy
    sequence (Kesten 1966; Niederreiter 1992, section 3.1): over any n consecutive samples the
    share of an arc is off by O(log n / n), about 4e-4 at most for n = 10,000. How many earlier
    samples fell into an arc is a floor sum, so no table and no replay is needed.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        total = sum(weights)
        if not weights or min(weights) < 0 or not 0 < total < float("inf"):
            fix = "give finite weights that are positive"
            raise ConfigError(Problem("data.corpora", list(weights), "has unusable weights", fix))
        edges = [0]
        for index in range(1, len(weights)):
            share = sum(weights[:index]) / total
            edges.append(min(_MODULUS, max(edges[-1], round(share * _MODULUS))))
        self._edges = [*edges, _MODULUS]
        self._start = hash64("mixture", seed)

    def where(self, index: int) -> tuple[int, int]:
        """The corpus of sample `index`, and how many earlier samples were of that corpus."""
        position = (_STEP * index + self._start) % _MODULUS
        corpus = bisect_right(self._edges, position) - 1
        return corpus, self.count(index, corpus)

    def count(self, num_samples: int, corpus: int) -> int:
        """How many of the first `num_samples` samples are of `corpus`."""
        low, high = self._edges[corpus], self._edges[corpus + 1]
        return self._below(num_samples, high) - self._below(num_samples, low)

    def _below(self, num_samples: int, edge: int) -> int:
        if edge in (0, _MODULUS):
            return num_samples if edge else 0
        return count_below(num_samples, _MODULUS, _STEP, self._start, edge)


class Blend:
    """Training samples of several corpora, blended by weight, reshuffled every epoch.

    Each corpus is one stream of tokens cut into windows of `sequence_length` inputs; a window's
    last target is the next window's first input. Its k-th sample is entry k mod n of a permutation
    of its n windows that is chosen by (seed, corpus, k div n).

    Raises:
        DataError: a corpus has fewer than sequence_length + 1 tokens.
        ConfigError: there is no corpus or a weight is unusable.
    """

    def __init__(
        self,
        corpora: Sequence[tuple[TokenFile, float]],
        sequence_length: int,
        seed: int,
        eos_id: int | None = None,
    ) -> None:
        """Blend the corpora.

        Args:
            corpora: token files and their relative weights.
            sequence_length: tokens that a sample feeds to the model (it holds one more).
            seed: the run's seed.
            eos_id: end a document by this token where its file does not; None adds nothing.
        """
        self.sequence_length = sequence_length
        self.seed = seed
        self.mixture = Mixture([weight for _, weight in corpora], seed)
        self.streams = [TokenStream(file, eos_id) for file, _ in corpora]
        self.num_windows = [(stream.num_tokens - 1) // sequence_length for stream in self.streams]
        problems = [
            Problem(
                str(stream.file.prefix),
                None,
                f"has {stream.num_tokens:,} tokens, fewer than one window of "
                f"{sequence_length:,} + 1",
                "take more text or a smaller train.sequence_length",
            )
            for stream, count in zip(self.streams, self.num_windows, strict=True)
            if count < 1
        ]
        if problems:
            raise DataError(*problems)
        self._permutation = lru_cache(maxsize=64)(self._make_permutation)

    def __getstate__(self) -> dict[str, object]:
        state = dict(self.__dict__)
        del state["_permutation"]
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._permutation = lru_cache(maxsize=64)(self._make_permutation)

    def _make_permutation(self, corpus: int, epoch: int) -> Permutation:
        return Permutation(self.num_windows[corpus], hash64("windows", self.seed, corpus, epoch))

    def where(self, index: int) -> tuple[int, int, int]:
        """Corpus, epoch of that corpus, and window in it of sample `index`."""
        if index < 0:
            raise IndexError(f"sample {index}")
        corpus, earlier = self.mixture.where(index)
        epoch, position = divmod(earlier, self.num_windows[corpus])
        return corpus, epoch, self._permutation(corpus, epoch)(position)

    def sample(self, index: int) -> NDArray[np.int64]:
        """[sequence_length + 1] tokens of sample `index`: inputs [:-1], targets [1:]."""
        stream, start, stop = self._place(index)
        return stream.read(start, stop)

    def samples(self, indices: Iterable[int]) -> NDArray[np.int64]:
        """[n, sequence_length + 1] tokens of the given samples."""
        places = [self._place(index) for index in indices]
        for stream, start, stop in places:
            stream.expect(start, stop)
        rows = [stream.read(start, stop) for stream, start, stop in places]
        return np.stack(rows) if rows else np.empty((0, self.sequence_length + 1), np.int64)

    def _place(self, index: int) -> tuple[TokenStream, int, int]:
        corpus, _, window = self.where(index)
        start = window * self.sequence_length
        return self.streams[corpus], start, start + self.sequence_length + 1


def batch_indices(
    step: int, global_batch_size: int, rank: int, num_ranks: int, micro_batch_size: int
) -> list[list[int]]:
    """The samples that one data-parallel rank reads in one step, micro-batch by micro-batch.

    Sample j of micro-batch m of rank r is step * G + (m * num_ranks + r) * micro_batch_size + j:
    whatever the ranks, the micro-batch and the accumulation, step s reads exactly the samples
    [s G, (s + 1) G), so s G samples have been consumed before it.

    Args:
        step: number of finished steps.
        global_batch_size: samples a step over all ranks, G.
        rank, num_ranks: this data-parallel rank and their number.
        micro_batch_size: samples a rank reads at a time.

    Raises:
        ValueError: G is not a multiple of num_ranks * micro_batch_size, or rank is out of range.
    """
    per_micro_step = num_ranks * micro_batch_size
    if per_micro_step < 1 or global_batch_size % per_micro_step or not 0 <= rank < num_ranks:
        raise ValueError(
            f"rank {rank} of {num_ranks}, micro-batch {micro_batch_size}, "
            f"global batch {global_batch_size}"
        )
    first = step * global_batch_size + rank * micro_batch_size
    return [
        list(range(start, start + micro_batch_size))
        for start in range(first, first + global_batch_size, per_micro_step)
    ]
