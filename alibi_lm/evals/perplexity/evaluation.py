"""Perplexity at several window lengths over exactly the same targets."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from alibi_lm.evals import results
from alibi_lm.evals.config import PerplexityConfig
from alibi_lm.evals.models.base import EvalModel
from alibi_lm.evals.models.scorer import Scorer
from alibi_lm.evals.perplexity import protocols
from alibi_lm.evals.perplexity.documents import (
    Documents,
    choose_documents,
    tail_bytes,
    target_bytes,
)
from alibi_lm.evals.perplexity.protocols import target_losses
from alibi_lm.evals.perplexity.truncated_context import (
    TRUNCATED_CONTEXT,
    Sample,
    cut_losses,
    draw,
    loss_gap_rows,
)
from alibi_lm.evals.perplexity.windows import (
    Window,
    fixed_target_windows,
    non_overlapping_windows,
    sliding_windows,
)
from alibi_lm.evals.report import plots
from alibi_lm.evals.report.tables import perplexity_lines
from alibi_lm.evals.statistics import as_list, bootstrap_perplexity
from alibi_lm.evals.verdicts import context_verdict, perplexity_verdict
from alibi_lm.utils.errors import CheckpointError, ConfigError, Problem
from alibi_lm.utils.logging import console

NAME = "perplexity"
LARGEST_LOSS = 700
"""Nats a token: no language model's loss, and no float holds a perplexity of much more."""


@dataclass(frozen=True)
class Scores:
    """Losses in non-overlapping windows, nats."""

    sums: np.ndarray
    """`[lengths, documents]`."""
    longest: list[np.ndarray]
    """Of each target of each document, at the longest length."""
    sampled: np.ndarray | None
    """`[lengths, n]`, of the null model's sample, where there is one."""


def score_windows(
    scorer: Scorer,
    documents: Sequence[np.ndarray],
    lengths: Sequence[int],
    batch_tokens: int,
    sample: Sample | None,
) -> Scores:
    """Every target of every document at each length."""
    sums = np.zeros((len(lengths), len(documents)))
    sampled = []
    with _bar(len(lengths) * sum(len(document) - 1 for document in documents), NAME) as bar:
        for row, length in enumerate(lengths):
            bar.set_postfix_str(f"length {length}")
            windows = non_overlapping_windows(documents, length)
            losses = target_losses(scorer, documents, windows, batch_tokens, bar)
            sums[row] = [own.sum() for own in losses]
            if sample is not None:
                sampled.append(sample.of(losses))
    return Scores(sums, losses, np.stack(sampled) if sample is not None else None)


def _bar(total: int, name: str) -> tqdm[Any]:
    return tqdm(total=total, unit="tok", unit_scale=True, desc=name, disable=console.muted or None)


def evaluate(
    eval_model: EvalModel, config: PerplexityConfig, *, force: bool = False
) -> dict[str, Any]:
    """`run_perplexity` unless it is done already, and its result in the terminal.

    Raises:
        UserError: as `run_perplexity`.
    """
    return results.run_or_load(
        eval_model, NAME, config, run_perplexity, perplexity_lines, force=force
    )


def run_perplexity(
    eval_model: EvalModel, config: PerplexityConfig, scorer: Scorer | None = None
) -> dict[str, Any]:
    """Score a checkpoint, store perplexity.json and perplexity.png, and return the result.

    Args:
        scorer: what is scored instead of the checkpoint's own weights.

    Raises:
        DataError: no corpus, or no document longer than the longest length.
        ConfigError: a length that the model cannot take.
        CheckpointError: the model's losses are not finite.
    """
    lengths = results.chosen_lengths(eval_model, config)
    _check_protocols(config, lengths)
    files = results.open_corpora(eval_model, config)
    documents = choose_documents(files, lengths[-1], config.max_tokens)
    scorer = scorer or eval_model.scorer(config.precision, config.pruning_tolerance, config.scaling)
    training_length = eval_model.training_length
    reach = config.truncated_context_length or training_length
    sample = None
    if config.truncated_context_targets is not None and lengths[-1] > reach:
        sample = draw(documents.tokens, config.truncated_context_targets, config.seed)
    started = time.perf_counter()
    scores = score_windows(scorer, documents.tokens, lengths, config.batch_tokens, sample)
    seconds = time.perf_counter() - started
    _check_finite(eval_model, scores.sums, documents.num_targets, lengths)
    sizes = target_bytes(documents.tokens, eval_model.tokenizer())
    windows = [non_overlapping_windows(documents.tokens, length) for length in lengths]
    rows = length_rows(scores.sums, documents.num_targets, sizes, lengths, training_length, windows)
    num_targets = int(documents.num_targets.sum())
    result = {
        "eval": NAME,
        **results.run_facts(eval_model),
        "protocol": protocols.WINDOWS,
        "lengths": lengths,
        "stride": lengths,
        "corpus": [
            {**facts, "num_long_documents": count}
            for facts, count in zip(results.corpus_facts(files), documents.num_long, strict=True)
        ],
        "num_documents": len(documents.tokens),
        "num_tokens": num_targets,
        "num_bytes": None if sizes is None else int(sizes.sum()),
        "precision": config.precision,
        "model": scorer.describe(),
        "seconds": round(seconds, 3),
        "tokens_per_second": round(num_targets * len(lengths) / max(seconds, 1e-9), 1),
        "rows": rows,
        "verdict": perplexity_verdict(rows, training_length),
        **_other_protocols(eval_model, config, scorer, documents, lengths),
        "by_position": {
            "protocol": protocols.BY_POSITION,
            "length": lengths[-1],
            "rows": protocols.position_rows(scores.longest, lengths[-1]),
        },
        "truncated_context": _null(
            config, scorer, documents, lengths, reach, sample, scores.sampled
        ),
        "inputs": results.inputs_of(eval_model, config, files),
    }
    results.store(eval_model, NAME, result, lambda found: {NAME: plots.perplexity_figure(found)})
    return result


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


def _other_protocols(
    eval_model: EvalModel,
    config: PerplexityConfig,
    scorer: Scorer,
    documents: Documents,
    lengths: Sequence[int],
) -> dict[str, Any]:
    """Results with sliding windows and with fixed targets, None where they were not asked for."""
    tokens, training_length = documents.tokens, eval_model.training_length
    found: dict[str, Any] = {"sliding": None, "fixed_target": None}
    every = {
        "sliding": [sliding_windows(tokens, length, config.stride or 1) for length in lengths]
        if config.stride else None,
        "fixed_target": [fixed_target_windows(tokens, n, config.fixed_targets) for n in lengths]
        if config.fixed_targets else None,
    }  # fmt: skip
    for name, windows in every.items():
        if windows is None:
            continue
        counts, sizes = documents.num_targets, target_bytes(tokens, eval_model.tokenizer())
        facts: dict[str, Any] = {"protocol": protocols.SLIDING, "stride": config.stride}
        if name == "fixed_target":
            num = config.fixed_targets or 0
            counts = np.full(len(tokens), num)
            sizes = tail_bytes(tokens, eval_model.tokenizer(), num)
            facts = {"protocol": protocols.FIXED_TARGET, "num_targets": num}
        started = time.perf_counter()
        with _bar(int(counts.sum()) * len(lengths), name) as bar:
            sums = np.stack([
                protocols.document_sums(scorer, tokens, some, config.batch_tokens, bar)
                for some in windows
            ])  # fmt: skip
        _check_finite(eval_model, sums, counts, lengths)
        seconds = round(time.perf_counter() - started, 3)
        rows = length_rows(sums, counts, sizes, lengths, training_length, windows)
        found[name] = {**facts, "num_tokens": int(counts.sum()), "seconds": seconds, "rows": rows}
    return found


def _null(
    config: PerplexityConfig,
    scorer: Scorer,
    documents: Documents,
    lengths: Sequence[int],
    reach: int,
    sample: Sample | None,
    observed: np.ndarray | None,
) -> dict[str, Any] | None:
    if sample is None or observed is None:
        return None
    cut = cut_losses(scorer, documents.tokens, sample, reach, lengths, config.batch_tokens)
    rows = loss_gap_rows(sample, observed, cut, lengths, reach)
    return {
        "protocol": TRUNCATED_CONTEXT,
        "reach": reach,
        "num_targets": len(sample.target),
        "seed": config.seed,
        "rows": rows,
        "verdict": context_verdict(rows, reach),
    }


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
) -> list[dict[str, Any]]:
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
    rows: list[dict[str, Any]] = []
    for i, length in enumerate(lengths):
        bits = losses[i].sum() / math.log(2)
        rows.append(
            {
                "length": length,
                "multiple": length / training_length,
                "num_windows": len(windows[i]),
                "loss": float(means[i]),
                "perplexity": math.exp(means[i]),
                "perplexity_interval": as_list(intervals.perplexity[i] if intervals else None),
                "bits_per_byte": float(bits / total_bytes) if total_bytes else None,
                "ratio": math.exp(means[i] - means[reference]) if known else None,
                "ratio_interval": as_list(intervals.ratio[i] if intervals and known else None),
            }
        )
    return rows
