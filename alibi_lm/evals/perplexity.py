"""Perplexity at several window lengths over exactly the same targets."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tqdm import tqdm

from alibi_lm.data.indexed import TokenFile
from alibi_lm.data.tokenizer import Tokenizer
from alibi_lm.errors import CheckpointError, DataError, Problem
from alibi_lm.evals import plots, results
from alibi_lm.evals.config import PerplexityConfig
from alibi_lm.evals.intervals import as_list, bootstrap_perplexity
from alibi_lm.evals.scorer import Scorer, native_scorer
from alibi_lm.evals.tables import perplexity_lines
from alibi_lm.evals.verdicts import perplexity_verdict
from alibi_lm.evals.windows import window_batches

if TYPE_CHECKING:
    from alibi_lm.checkpoint.step import Step

NAME = "perplexity"
PROTOCOL = (
    "Non-overlapping windows. Window L of a document x takes inputs x[s:s+L] and targets "
    "x[s+1:s+L+1], s = 0, L, 2L, ...; the last window may be shorter and is scored too. Targets "
    "are tokens 1 to N-1 of each document (token 0 has no context), its end-of-document token "
    "included, each scored once at every length with at least one token of context from its own "
    "window. Only documents of more than the longest length are taken, so every length scores the "
    "same targets. Perplexity = exp(sum of losses / number of targets); intervals: 95% percentile "
    "bootstrap over documents, paired for ratios."
)


@dataclass(frozen=True)
class Documents:
    """The documents that are scored."""

    tokens: list[np.ndarray]
    """Token ids of each document, `[N]`, N above the longest length."""
    num_long: list[int]
    """How many long enough documents each corpus has, before max_tokens."""

    @property
    def num_targets(self) -> np.ndarray:
        """`[documents]`: targets of each document."""
        return np.array([len(document) - 1 for document in self.tokens])


def choose_documents(files: Sequence[TokenFile], longest: int, max_tokens: int | None) -> Documents:
    """Every document of more than `longest` tokens; with `max_tokens`, a fixed random part.

    Documents are added whole until `max_tokens` targets are reached.

    Raises:
        DataError: no document is long enough.
    """
    places = [
        (file, int(index))
        for file in files
        for index in np.flatnonzero(np.asarray(file.document_lengths) > longest)
    ]
    if not places:
        _raise_too_short(files, longest)
    num_long = [sum(1 for owner, _ in places if owner is file) for file in files]
    if max_tokens is not None:
        places = [places[i] for i in np.random.default_rng(0).permutation(len(places))]
    chosen: list[np.ndarray] = []
    total = 0
    for file, index in places:
        if max_tokens is not None and total >= max_tokens:
            break
        chosen.append(file.document(index))
        total += len(chosen[-1]) - 1
    return Documents(chosen, num_long)


def _raise_too_short(files: Sequence[TokenFile], longest: int) -> None:
    have = max((int(max(file.document_lengths, default=0)) for file in files), default=0)
    names = ", ".join(str(file.prefix) for file in files)
    rule = (
        f"no document has more than {longest:,} tokens, the longest length; "
        f"the longest document has {have:,}"
    )
    fix = f"give lengths below {have:,}, or a corpus with longer documents"
    raise DataError(Problem(names, None, rule, fix))


def document_losses(
    scorer: Scorer, documents: Sequence[np.ndarray], lengths: Sequence[int], batch_tokens: int
) -> np.ndarray:
    """Sum of the losses of each document's targets at each length: `[lengths, documents]`, nats.

    Sums are taken in float64.
    """
    sums = np.zeros((len(lengths), len(documents)))
    total = len(lengths) * sum(len(document) - 1 for document in documents)
    with tqdm(total=total, unit="tok", unit_scale=True, desc=NAME, disable=None) as bar:
        for row, length in enumerate(lengths):
            for batch in window_batches(documents, length, batch_tokens):
                losses = scorer.token_losses(torch.from_numpy(batch.tokens)).double().numpy()
                scored = np.arange(losses.shape[1]) < batch.num_targets[:, None]
                np.add.at(sums[row], batch.document, np.where(scored, losses, 0).sum(1))
                bar.update(int(batch.num_targets.sum()))
            bar.set_postfix_str(f"length {length}")
    return sums


def target_bytes(documents: Sequence[np.ndarray], tokenizer: Tokenizer | None) -> np.ndarray | None:
    """UTF-8 bytes of the text that each document's targets spell, `[documents]`.

    That is the document's text less the text of token 0, which is not scored. End-of-document
    tokens spell nothing. None without a tokenizer.
    """
    if tokenizer is None:
        return None
    sizes = []
    for document in documents:
        ids = [int(token) for token in document if token != tokenizer.eos_id]
        size = len(tokenizer.decode(ids).encode()) - len(tokenizer.decode(ids[:1]).encode())
        sizes.append(max(0, size))
    return np.array(sizes)


def evaluate(step: Step, config: PerplexityConfig, *, force: bool = False) -> dict[str, Any]:
    """`run_perplexity` unless it is done already, and its result in the terminal.

    Raises:
        UserError: as `run_perplexity`.
    """
    return results.once(step, NAME, config, run_perplexity, perplexity_lines, force=force)


def run_perplexity(
    step: Step, config: PerplexityConfig, scorer: Scorer | None = None
) -> dict[str, Any]:
    """Score a checkpoint, store perplexity.json and perplexity.png, and return the result.

    Args:
        scorer: what is scored instead of the checkpoint's own weights.

    Raises:
        DataError: no corpus, or no document longer than the longest length.
        ConfigError: a length that the model cannot take.
        CheckpointError: the model's losses are not finite.
    """
    lengths = results.chosen_lengths(step, config)
    files = results.open_corpora(step, config)
    documents = choose_documents(files, lengths[-1], config.max_tokens)
    scorer = scorer or native_scorer(step, config.precision, config.epsilon)
    started = time.perf_counter()
    losses = document_losses(scorer, documents.tokens, lengths, config.batch_tokens)
    seconds = time.perf_counter() - started
    _check_finite(step, losses, lengths)
    sizes = target_bytes(documents.tokens, step.tokenizer())
    training_length = step.config.train.sequence_length
    rows = length_rows(losses, documents.num_targets, sizes, lengths, training_length)
    num_targets = int(documents.num_targets.sum())
    result = {
        "eval": NAME,
        **results.run_facts(step),
        "protocol": PROTOCOL,
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
        "inputs": results.inputs_of(step, config, files),
    }
    path = results.store(step, NAME, result)
    plots.save(plots.perplexity_figure(result), path.with_suffix(".png"))
    return result


def _check_finite(step: Step, losses: np.ndarray, lengths: Sequence[int]) -> None:
    # exp(loss) must fit a float too: 700 nats a token is no language model's loss.
    bad = [n for n, row in zip(lengths, losses, strict=True) if not np.isfinite(row).all()]
    if bad:
        rule = f"losses at lengths {bad} are not finite"
        fix = "use precision=fp32, or an earlier step"
        raise CheckpointError(Problem(str(step.folder), None, rule, fix))


def length_rows(
    losses: np.ndarray,
    num_targets: np.ndarray,
    num_bytes: np.ndarray | None,
    lengths: Sequence[int],
    training_length: int,
) -> list[dict[str, Any]]:
    """One row a length: perplexity, bits per byte, ratio to the training length, intervals.

    Args:
        losses: `[lengths, documents]`, nats.
        num_targets: `[documents]`.
        num_bytes: `[documents]` or None.

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
                "stride": length,
                "multiple": length / training_length,
                "num_windows": int(sum(-(-int(count) // length) for count in num_targets)),
                "loss": float(means[i]),
                "perplexity": math.exp(means[i]),
                "perplexity_interval": as_list(intervals.perplexity[i] if intervals else None),
                "bits_per_byte": float(bits / total_bytes) if total_bytes else None,
                "ratio": math.exp(means[i] - means[reference]) if known else None,
                "ratio_interval": as_list(intervals.ratio[i] if intervals and known else None),
            }
        )
    return rows
