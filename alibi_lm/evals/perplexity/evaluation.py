"""Perplexity at several window lengths over exactly the same targets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from alibi_lm.evals import json_values
from alibi_lm.evals.base import Comparison, Eval, Verdict, chosen_lengths, register
from alibi_lm.evals.config import PerplexityConfig
from alibi_lm.evals.models.base import EvalModel
from alibi_lm.evals.models.scorer import Scorer
from alibi_lm.evals.parts import Parts
from alibi_lm.evals.perplexity import display, protocols
from alibi_lm.evals.perplexity.documents import (
    Documents,
    choose_documents,
    tail_bytes,
    target_bytes,
)
from alibi_lm.evals.perplexity.protocols import target_losses
from alibi_lm.evals.perplexity.result import (
    ByPosition,
    LengthRow,
    PerplexityResult,
    PositionRow,
    ScoredCorpus,
    TruncatedContext,
    Windows,
)
from alibi_lm.evals.perplexity.truncated_context import (
    TRUNCATED_CONTEXT,
    Sample,
    cut_losses,
    draw,
    loss_gap_rows,
)
from alibi_lm.evals.perplexity.verdicts import context_verdict, perplexity_verdict
from alibi_lm.evals.perplexity.windows import (
    Window,
    fixed_target_windows,
    non_overlapping_windows,
    sliding_windows,
)
from alibi_lm.evals.statistics import bootstrap_perplexity
from alibi_lm.utils.errors import CheckpointError, ConfigError, Problem
from alibi_lm.utils.progress import Progress

LARGEST_LOSS = 700
"""Nats a token: no language model's loss, and no float holds a perplexity of much more."""


@dataclass(frozen=True)
class WindowScores:
    """Losses in non-overlapping windows, nats."""

    sums: np.ndarray
    """`[lengths, documents]`."""
    by_position: list[PositionRow]
    """Of the longest length."""
    sampled: np.ndarray | None
    """`[lengths, n]`, of the truncated-context baseline's sample, where there is one."""
    seconds: float


def score_windows(
    scorer: Scorer,
    documents: Sequence[np.ndarray],
    lengths: Sequence[int],
    batch_tokens: int,
    sample: Sample | None,
    parts: Parts,
) -> WindowScores:
    """Every target of every document at each length; each length is a part."""
    size = sum(len(document) - 1 for document in documents)

    def score(length: int) -> dict[str, Any]:
        windows = non_overlapping_windows(documents, length)
        losses = target_losses(scorer, documents, windows, batch_tokens, progress)
        sums = [float(each.sum()) for each in losses]
        rows = []
        if length == lengths[-1] and np.isfinite(sums).all():
            rows = protocols.position_rows(losses, length)
        return {
            "sums": sums,
            "sampled": None if sample is None else sample.of(losses).tolist(),
            "by_position": json_values.encode(rows),
        }

    with Progress("perplexity", len(lengths) * size, unit="tok") as progress:
        scored = [parts.run(str(n), partial(score, n), progress, size) for n in lengths]
    values = [part.value for part in scored]
    return WindowScores(
        np.array([value["sums"] for value in values]),
        [json_values.decode(PositionRow, row) for row in values[-1]["by_position"]],
        None if sample is None else np.array([value["sampled"] for value in values]),
        sum(part.seconds for part in scored),
    )


@register
class Perplexity(Eval[PerplexityConfig, PerplexityResult]):
    """Perplexity by window length, over the same targets at every length."""

    name = "perplexity"
    help = "Perplexity by length, over the same tokens at every length."
    title = "Perplexity by window length"
    config = PerplexityConfig
    result = PerplexityResult
    template = "perplexity.html"

    def run(
        self, eval_model: EvalModel, config: PerplexityConfig, scorer: Scorer | None = None
    ) -> PerplexityResult:
        """Score a model.

        Raises:
            DataError: no corpus, or no document longer than the longest length.
            ConfigError: a length that the model cannot take.
            CheckpointError: the model's losses are not finite.
        """
        lengths = chosen_lengths(eval_model, config.lengths)
        _check_protocols(config, lengths)
        files = self.open_corpora(eval_model, config)
        documents = choose_documents(files, lengths[-1], config.max_tokens)
        own = None
        if scorer is None:
            scorer = own = eval_model.scorer(
                config.precision, config.pruning_tolerance, config.scaling
            )
        training_length = eval_model.training_length
        context_length = config.truncated_context_length or training_length
        sample = None
        if config.truncated_context_targets is not None and lengths[-1] > context_length:
            sample = draw(documents.tokens, config.truncated_context_targets, config.seed)
        protocols_by_length = 1 + sum(x is not None for x in (config.stride, config.fixed_targets))
        total = protocols_by_length * len(lengths) + (sample is not None)
        with self.parts(eval_model, config, files, own, total) as parts:
            scores = score_windows(
                scorer, documents.tokens, lengths, config.batch_tokens, sample, parts
            )
            _check_finite(eval_model, scores.sums, documents.num_targets, lengths)
            sliding, fixed_target = _other_windows(
                eval_model, config, scorer, documents, lengths, parts
            )
            baseline = _truncated_context(
                config, scorer, documents, lengths, context_length, sample, scores.sampled, parts
            )
        sizes = target_bytes(documents.tokens, eval_model.tokenizer())
        windows = [non_overlapping_windows(documents.tokens, length) for length in lengths]
        rows = length_rows(
            scores.sums, documents.num_targets, sizes, lengths, training_length, windows
        )
        num_targets = int(documents.num_targets.sum())
        common = self.common(eval_model, config, files)
        common["corpus"] = [
            ScoredCorpus(**vars(info), num_long_documents=count)
            for info, count in zip(common["corpus"], documents.num_long, strict=True)
        ]
        seconds = scores.seconds
        return PerplexityResult(
            **common,
            protocol=protocols.WINDOWS,
            lengths=lengths,
            stride=lengths,
            num_documents=len(documents.tokens),
            num_tokens=num_targets,
            num_bytes=None if sizes is None else int(sizes.sum()),
            precision=config.precision,
            model=scorer.describe(),
            seconds=round(seconds, 3),
            tokens_per_second=round(num_targets * len(lengths) / max(seconds, 1e-9), 1),
            rows=rows,
            verdict=perplexity_verdict(rows, training_length),
            sliding=sliding,
            fixed_target=fixed_target,
            by_position=ByPosition(
                protocol=protocols.BY_POSITION, length=lengths[-1], rows=scores.by_position
            ),
            truncated_context=baseline,
        )

    def table(self, result: PerplexityResult) -> list[str]:
        """Perplexity by length, protocol by protocol."""
        return display.table(result)

    def figures(self, result: PerplexityResult) -> dict[str, Figure]:
        """Perplexity against window length."""
        return {self.name: display.figure(result)}

    def scalars(self, result: PerplexityResult) -> Iterator[tuple[str, float]]:
        """Perplexity, bits per byte and loss gap by length."""
        for row in result.rows:
            yield f"eval_perplexity/{row.length}", row.perplexity
            if row.bits_per_byte is not None:
                yield f"eval_bits_per_byte/{row.length}", row.bits_per_byte
        for gap in result.truncated_context.rows if result.truncated_context else ():
            yield f"eval_loss_gap/{gap.length}", gap.loss_gap

    def verdicts(self, result: PerplexityResult) -> list[Verdict]:
        """Of perplexity by length, and of the truncated-context baseline."""
        baseline = result.truncated_context
        return [result.verdict, *([baseline.verdict] if baseline else [])]

    def compare(self, results: Mapping[str, PerplexityResult]) -> Comparison:
        """Perplexity and bits per byte at each length."""
        return display.compare(results)

    def comparable(self, first: PerplexityResult, second: PerplexityResult) -> bool:
        """Whether two results are of the same text: as many bytes, or else tokens."""
        if first.num_bytes is not None and second.num_bytes is not None:
            return first.num_bytes == second.num_bytes
        return first.num_tokens == second.num_tokens


def _check_protocols(config: PerplexityConfig, lengths: Sequence[int]) -> None:
    problems = [
        Problem(
            f"perplexity.{name}",
            value,
            f"is more than the shortest length, {lengths[0]}",
            "give less, or leave short lengths out",
        )  # fmt: skip
        for name, value in (("stride", config.stride), ("fixed_targets", config.fixed_targets))
        if value is not None and value > lengths[0]
    ]
    if problems:
        raise ConfigError(*problems)


def _other_windows(
    eval_model: EvalModel,
    config: PerplexityConfig,
    scorer: Scorer,
    documents: Documents,
    lengths: Sequence[int],
    parts: Parts,
) -> tuple[Windows | None, Windows | None]:
    """Results with sliding windows, and with fixed targets; None where not asked for."""
    tokens, tokenizer = documents.tokens, eval_model.tokenizer()

    def scored(
        name: str, protocol: str, windows: Sequence[Sequence[Window]], counts: np.ndarray,
        sizes: np.ndarray | None, **setting: int,
    ) -> Windows:  # fmt: skip
        total = int(counts.sum())

        def score(some: Sequence[Window]) -> list[float]:
            sums = protocols.document_sums(scorer, tokens, some, config.batch_tokens, progress)
            return [float(each) for each in sums]

        with Progress(name, total * len(lengths), unit="tok") as progress:
            scored = [
                parts.run(f"{name} {length}", partial(score, some), progress, total)
                for length, some in zip(lengths, windows, strict=True)
            ]
        sums = np.array([part.value for part in scored])
        _check_finite(eval_model, sums, counts, lengths)
        rows = length_rows(sums, counts, sizes, lengths, eval_model.training_length, windows)
        seconds = round(sum(part.seconds for part in scored), 3)
        return Windows(protocol=protocol, num_tokens=total, seconds=seconds, rows=rows, **setting)

    sliding = fixed_target = None
    if stride := config.stride:
        windows = [sliding_windows(tokens, length, stride) for length in lengths]
        counts, sizes = documents.num_targets, target_bytes(tokens, tokenizer)
        sliding = scored("sliding", protocols.SLIDING, windows, counts, sizes, stride=stride)
    if num := config.fixed_targets:
        windows = [fixed_target_windows(tokens, length, num) for length in lengths]
        counts, sizes = np.full(len(tokens), num), tail_bytes(tokens, tokenizer, num)
        fixed_target = scored(
            "fixed_target", protocols.FIXED_TARGET, windows, counts, sizes, num_targets=num
        )
    return sliding, fixed_target


def _truncated_context(
    config: PerplexityConfig,
    scorer: Scorer,
    documents: Documents,
    lengths: Sequence[int],
    context_length: int,
    sample: Sample | None,
    observed: np.ndarray | None,
    parts: Parts,
) -> TruncatedContext | None:
    if sample is None or observed is None:
        return None
    tokens = documents.tokens
    size = int((sample.longest_context(lengths) > context_length).sum())

    def score() -> list[float | None]:
        losses = cut_losses(
            scorer, tokens, sample, context_length, lengths, config.batch_tokens, progress
        )
        return [None if math.isnan(loss) else loss for loss in losses.tolist()]

    with Progress("truncated context", size, unit="tok") as progress:
        part = parts.run("truncated context", score, progress, size)
    cut = np.array(part.value, dtype=np.float64)
    rows = loss_gap_rows(sample, observed, cut, lengths, context_length)
    return TruncatedContext(
        protocol=TRUNCATED_CONTEXT,
        context_length=context_length,
        num_targets=len(sample.target),
        seed=config.seed,
        rows=rows,
        verdict=context_verdict(rows, context_length),
    )


def _check_finite(
    eval_model: EvalModel, losses: np.ndarray, num_targets: np.ndarray, lengths: Sequence[int]
) -> None:
    # exp(loss) must fit a float too, in every resample of the documents.
    largest = [float(np.max(row / num_targets)) for row in losses]
    bad = [n for n, loss in zip(lengths, largest, strict=True) if not loss < LARGEST_LOSS]
    if bad:
        rule = f"losses at lengths {bad} are not finite, or above {LARGEST_LOSS} nats a token"
        fix = "use precision=fp32, or an earlier step"
        raise CheckpointError(Problem(eval_model.argument, None, rule, fix))


def length_rows(
    losses: np.ndarray,
    num_targets: np.ndarray,
    num_bytes: np.ndarray | None,
    lengths: Sequence[int],
    training_length: int,
    windows: Sequence[Sequence[Window]],
) -> list[LengthRow]:
    """One row a length: perplexity, bits per byte, ratio to the training length, intervals.

    Args:
        losses: `[lengths, documents]`, nats.
        num_targets: `[documents]`.
        num_bytes: `[documents]` or None.
        lengths: window lengths.
        training_length: the one that ratios are taken to.
        windows: the windows of each length.

    Ratios are None where the training length is not among the lengths.
    """
    known = training_length in lengths
    reference = lengths.index(training_length) if known else 0
    means = losses.sum(1) / num_targets.sum()
    intervals = bootstrap_perplexity(losses, num_targets, reference)
    total_bytes = 0 if num_bytes is None else int(num_bytes.sum())
    rows = []
    for i, length in enumerate(lengths):
        bits = losses[i].sum() / math.log(2)
        rows.append(
            LengthRow(
                length=length,
                multiple=length / training_length,
                num_windows=len(windows[i]),
                loss=float(means[i]),
                perplexity=math.exp(means[i]),
                perplexity_interval=intervals.perplexity[i] if intervals else None,
                bits_per_byte=float(bits / total_bytes) if total_bytes else None,
                ratio=math.exp(means[i] - means[reference]) if known else None,
                ratio_interval=intervals.ratio[i] if intervals and known else None,
            )
        )
    return rows
