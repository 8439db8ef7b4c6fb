"""Measures the finished runs of a suite, and keeps the results in the run folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alibi_lm.checkpoint.config_paths import validation_corpora
from alibi_lm.checkpoint.step import Checkpoint
from alibi_lm.config_loading import build, to_dict
from alibi_lm.data.indexed import TokenFile
from alibi_lm.evals.config import GeneralizationConfig, NeedleConfig
from alibi_lm.evals.generalization.evaluation import make_trials, score_trials
from alibi_lm.evals.json_values import encode
from alibi_lm.evals.models.scorer import NativeScorer, native_scorer
from alibi_lm.evals.perplexity import protocols
from alibi_lm.evals.perplexity.documents import choose_documents, target_bytes
from alibi_lm.evals.perplexity.truncated_context import cut_losses, draw, loss_gap_rows
from alibi_lm.evals.perplexity.windows import non_overlapping_windows
from alibi_lm.evals.retrieval.needle import score_grid
from alibi_lm.evals.retrieval.needle_prompts import PromptMaker
from alibi_lm.experiments.claims.config import GroupConfig
from alibi_lm.experiments.claims.training import SuiteRun
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.decoder import Decoder
from alibi_lm.model.inference.kv_cache import KVCache, LayerKVCache
from alibi_lm.utils.files import stored_object, write_json
from alibi_lm.utils.progress import Progress

RESULT = "claims_measurements.json"
BATCH_TOKENS = 16384
SHIFTS = (1, 128, 1000)
"""Positions by which a document is shifted."""


def load_or_measure(
    run: SuiteRun,
    settings: GroupConfig,
    measure: Callable[[Checkpoint, GroupConfig], dict[str, Any]],
) -> dict[str, Any]:
    """The measurements of a finished run: stored ones if their inputs are the same, or new ones."""
    path = Path(run.folder) / RESULT
    step = run.checkpoint()
    inputs = {
        "step": step.digest,
        "lengths": settings.lengths,
        "num_trials": settings.num_trials,
        "max_tokens": settings.max_tokens,
        "truncated_context_targets": settings.truncated_context_targets,
    }
    stored = stored_object(path)
    if stored and stored.get("inputs") == inputs:
        return stored
    result = measure(step, settings) | {"inputs": inputs, "tokens": step.meta["tokens"]}
    result["num_parameters"] = step.decoder().num_parameters()
    write_json(path, result)
    return result


def measure_text(checkpoint: Checkpoint, settings: GroupConfig) -> dict[str, Any]:
    """Losses in non-overlapping windows of each length, and what explains them.

    Every length scores the same targets. Beside them: the truncated-context baseline at L, a hard
    window of L in every layer, and a shift of positions.

    Losses are means in nats a token, computed in fp32.
    """
    lengths, trained = sorted(settings.lengths), checkpoint.config.train.sequence_length
    files = [TokenFile(prefix) for prefix in validation_corpora(checkpoint)]
    documents = choose_documents(files, lengths[-1], settings.max_tokens).tokens
    decoder = checkpoint.decoder()
    scorer = NativeScorer(decoder)
    windows = {length: non_overlapping_windows(documents, length) for length in lengths}
    losses = {}
    targets = sum(len(document) - 1 for document in documents)
    with Progress(str(checkpoint.run_folder), targets * len(lengths), unit="tok") as progress:
        for length in lengths:
            losses[length] = protocols.target_losses(
                scorer, documents, windows[length], BATCH_TOKENS, progress
            )
    sizes = target_bytes(documents, checkpoint.tokenizer())
    result: dict[str, Any] = {
        "losses": {
            str(n): float(sum(document.sum() for document in kept)) / targets
            for n, kept in losses.items()
        },
        "num_documents": len(documents),
        "num_targets": targets,
        "num_bytes": None if sizes is None else int(sizes.sum()),
        "shift": {
            str(shift): change
            for shift, change in shift_differences(decoder, documents[0], trained).items()
        },
    }
    sample = draw(documents, settings.truncated_context_targets, seed=0)
    cut = cut_losses(scorer, documents, sample, trained, lengths, BATCH_TOKENS)
    observed = np.stack([sample.of(losses[length]) for length in lengths])
    rows = loss_gap_rows(sample, observed, cut, lengths, trained)
    result["loss_gap"] = {str(row.length): row.loss_gap for row in rows}
    if checkpoint.config.model.position == "alibi":
        model = build(ModelConfig, to_dict(checkpoint.config.model) | {"window": trained})
        windowed = NativeScorer(checkpoint.decoder(model=model))
        result["windowed"] = {}
        for n in (n for n in lengths if n > trained):
            sums = protocols.document_sums(windowed, documents, windows[n], BATCH_TOKENS)
            result["windowed"][str(n)] = float(sums.sum()) / targets
    return result


def measure_recall(checkpoint: Checkpoint, settings: GroupConfig) -> dict[str, Any]:
    """Needles found at each length and distance; with ALiBi also under scaled slopes.

    The factor of the scaling is the longest length over the training length, at every length.
    """
    lengths, trained = sorted(settings.lengths), checkpoint.config.train.sequence_length
    tokenizer = checkpoint.tokenizer()
    assert tokenizer is not None
    files = [TokenFile(prefix) for prefix in validation_corpora(checkpoint)]
    config = NeedleConfig(lengths=lengths, num_trials=settings.num_trials)
    maker = PromptMaker(tokenizer, files, config.seed)
    maker.check(lengths)
    variants: dict[str, dict[str, Any] | None] = {"plain": None}
    if checkpoint.config.model.position == "alibi" and lengths[-1] > trained:
        factor = lengths[-1] / trained
        variants |= {kind: {"kind": kind, "factor": factor} for kind in ("linear", "ntk")}
    results: dict[str, list[dict[str, Any]]] = {}
    for name, scaling in variants.items():
        scorer = native_scorer(checkpoint, "fp32", scaling=scaling)
        results[name] = [
            {
                "length": length,
                "distance": high,
                "ranking": tally.ranked,
                "generation": tally.generated,
                "trials": tally.trials,
            }
            for length in lengths
            for (_, high), tally in sorted(
                score_grid(scorer, maker, tokenizer, [length], config, trained)[0].bins.items()
            )
        ]
    return {"variants": results}


def measure_generalization(checkpoint: Checkpoint, settings: GroupConfig) -> dict[str, Any]:
    """Exact-match accuracy on longer problems than were trained, by task and number of items."""
    tokenizer = checkpoint.tokenizer()
    assert tokenizer is not None
    config = GeneralizationConfig(lengths=settings.lengths, num_trials=settings.num_trials)
    scorer = native_scorer(checkpoint, "fp32")
    cells = []
    for task in config.tasks:
        for items in sorted(settings.lengths):
            trials = make_trials(tokenizer, task, items, config)
            tally = score_trials(scorer, tokenizer, trials, config.batch_tokens)
            cells.append(encode(tally.cell(task, items)))
    return {"cells": cells, "trained_items": config.trained_items}


class _ShiftedLayer(LayerKVCache):
    """Holds nothing, but reports a length of `shift` tokens."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.length = shift

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return keys, values


class _Shifted(KVCache):
    def __init__(self, num_layers: int, shift: int) -> None:
        super().__init__(num_layers)
        self.layers = [_ShiftedLayer(shift) for _ in range(num_layers)]


@torch.inference_mode()
def shift_differences(decoder: Decoder, document: np.ndarray, length: int) -> dict[int, float]:
    """Largest change of a loss, in nats, when a document starts at a later position than 0.

    Tokens and attention mask stay the same: only the positions move.
    """
    tokens = torch.from_numpy(document[: length + 1].astype(np.int64))[None]
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    plain = decoder.losses(inputs, targets)
    changes = {}
    for shift in SHIFTS:
        moved = decoder.losses(inputs, targets, _Shifted(decoder.config.num_layers, shift))
        changes[shift] = float((moved - plain).abs().max())
    return changes


MEASURES: dict[str, Callable[[Checkpoint, GroupConfig], dict[str, Any]]] = {
    "text": measure_text,
    "recall": measure_recall,
    "generalization": measure_generalization,
}
"""The measurement of each group's runs."""
