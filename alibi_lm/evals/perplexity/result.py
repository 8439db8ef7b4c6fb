"""The result of the perplexity eval."""

from __future__ import annotations

from dataclasses import dataclass

from alibi_lm.evals.base import CorpusInfo, Json, Result, Verdict
from alibi_lm.evals.statistics import Interval


@dataclass(kw_only=True)
class LengthRow:
    """Perplexity at a window length. Intervals are None for too few documents."""

    length: int
    multiple: float
    """Of the training length."""
    num_windows: int
    loss: float
    """Nats a token."""
    perplexity: float
    perplexity_interval: Interval | None
    bits_per_byte: float | None
    """None without a tokenizer."""
    ratio: float | None
    """To the perplexity at the training length; None where that is not among the lengths."""
    ratio_interval: Interval | None


@dataclass(kw_only=True)
class Windows:
    """Perplexity by one more way of cutting windows."""

    protocol: str
    num_tokens: int
    seconds: float
    rows: list[LengthRow]
    stride: int | None = None
    """Of sliding windows."""
    num_targets: int | None = None
    """Scored at the end of each document, of fixed targets."""


@dataclass(kw_only=True)
class PositionRow:
    """Mean loss of the targets with `first` to `last` tokens of context."""

    first: int
    last: int
    num_targets: int
    loss: float
    loss_interval: Interval | None


@dataclass(kw_only=True)
class ByPosition:
    """Loss by tokens of context, in windows of the longest length."""

    protocol: str
    length: int
    rows: list[PositionRow]


@dataclass(kw_only=True)
class LossGapRow:
    """Loss at a window length against the truncated-context baseline, nats a target."""

    length: int
    num_cut: int
    """Targets with more context than the baseline's."""
    share_cut: float
    loss: float
    truncated_context_loss: float
    loss_gap: float
    """Below 0: context beyond the baseline's helps."""
    loss_gap_interval: Interval | None


@dataclass(kw_only=True)
class TruncatedContext:
    """The truncated-context baseline."""

    protocol: str
    context_length: int
    num_targets: int
    seed: int
    rows: list[LossGapRow]
    verdict: Verdict


@dataclass(kw_only=True)
class ScoredCorpus(CorpusInfo):
    """A corpus of which long documents are scored."""

    num_long_documents: int


@dataclass(kw_only=True)
class PerplexityResult(Result):
    """Perplexity at several window lengths over the same targets."""

    protocol: str
    lengths: list[int]
    stride: list[int]
    corpus: list[ScoredCorpus]  # type: ignore[assignment]
    num_documents: int
    num_tokens: int
    num_bytes: int | None
    precision: str
    model: Json
    seconds: float
    tokens_per_second: float
    rows: list[LengthRow]
    sliding: Windows | None
    fixed_target: Windows | None
    by_position: ByPosition
    truncated_context: TruncatedContext | None
