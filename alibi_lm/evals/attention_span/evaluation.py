"""How far each head reads: what is proven of it, and what is true, on real text."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alibi_lm.data.indexed import TokenFile
from alibi_lm.evals import results
from alibi_lm.evals.config import AttentionSpanConfig
from alibi_lm.evals.models.base import EvalModel
from alibi_lm.evals.models.scorer import DTYPES
from alibi_lm.evals.report import plots
from alibi_lm.evals.report.tables import attention_span_lines
from alibi_lm.model.inference.long_scoring import (
    DENSE_UP_TO,
    LongScoringReport,
    long_losses,
    pruning_unsupported_reason,
)
from alibi_lm.model.position_scaling import head_slopes
from alibi_lm.model.pruning.block_sparse import BLOCK
from alibi_lm.model.pruning.bounds import prior_attention_span
from alibi_lm.utils.errors import ConfigError, DataError, Problem

NAME = "attention_span"
PROTOCOL = (
    "Reach of a query: the largest distance at which keys have to be read, so that all keys "
    "further away together have less than epsilon of the head's probability. Certified: proven "
    f"from norms of queries and keys for each block of {BLOCK} queries, the distance from its "
    "first one. True: from the full softmax in float64 at single positions. Both over the second "
    "half of the text. Prior: the bound from the largest norms alone. Through all layers: the sum "
    "over layers of the longest head's largest reach."
)


@dataclass
class TrueReach:
    """Measures reaches at some positions, as an observer of `long_losses`."""

    positions: Tensor
    """[N] int64, ascending."""
    length: int
    """Tokens of the text."""
    slopes: tuple[float, ...]
    epsilon: float
    reaches: list[Tensor] = field(default_factory=list)
    """Of each layer, [H, N] int64."""
    largest_scores: list[Tensor] = field(default_factory=list)
    """Of each layer, [H]: the largest |q| times the largest |k|, over sqrt(D)."""
    _queries: list[Tensor] = field(default_factory=list)
    _keys: list[Tensor] = field(default_factory=list)
    _norms: list[Tensor] = field(default_factory=list)

    def __call__(self, layer: int, first: int, q: Tensor, k: Tensor) -> None:
        """Take up a chunk; with the last one, measure the layer."""
        stop = first + q.shape[1]
        inside = self.positions[(self.positions >= first) & (self.positions < stop)]
        self._queries.append(q[:, inside - first].double())
        self._norms.append(q.float().norm(dim=-1).amax(dim=1))
        self._keys.append(k.float())
        if stop < self.length:
            return
        queries, keys = torch.cat(self._queries, dim=1), torch.cat(self._keys, dim=1)
        group = q.shape[0] // k.shape[0]
        largest_key = keys.norm(dim=-1).amax(dim=1).repeat_interleave(group)
        largest = torch.stack(self._norms).amax(dim=0) * largest_key / math.sqrt(q.shape[-1])
        self.largest_scores.append(largest)
        self.reaches.append(
            torch.stack(
                [self._head(queries[h], keys[h // group], m) for h, m in enumerate(self.slopes)]
            )
        )
        self._queries, self._keys, self._norms = [], [], []

    def _head(self, queries: Tensor, keys: Tensor, slope: float) -> Tensor:
        """[N]: reaches of one head's queries [N, D] over its keys [T, D]."""
        keys = keys.double().T.contiguous()
        places = torch.arange(keys.shape[1])
        reaches = []
        for some, at in zip(queries.split(16), self.positions.split(16), strict=True):
            distances = at.unsqueeze(1) - places
            scores = some @ keys / math.sqrt(keys.shape[0]) - slope * distances
            weights = scores.masked_fill_(distances < 0, -math.inf).softmax(dim=1)
            # Mass of a key and of all further away; the first key where it is not nothing.
            farthest = (weights.cumsum(dim=1) < self.epsilon).sum(dim=1)
            reaches.append(at - farthest)
        return torch.cat(reaches)


def evaluate(
    eval_model: EvalModel, config: AttentionSpanConfig, *, force: bool = False
) -> dict[str, Any]:
    """`run_attention_span` unless it is done already, and its result in the terminal.

    Raises:
        UserError: as `run_attention_span`.
    """
    return results.run_or_load(
        eval_model, NAME, config, run_attention_span, attention_span_lines, force=force
    )


def run_attention_span(eval_model: EvalModel, config: AttentionSpanConfig) -> dict[str, Any]:
    """Measure a checkpoint's heads and store attention_span.json and attention_span.png.

    Raises:
        ConfigError: the model has no horizons, or num_tokens is too small for any.
        DataError: no corpus, or one shorter than num_tokens.
    """
    if eval_model.ranks.size > 1:
        rule = "this eval is of one process"
        fix = "start it without deepspeed"
        raise ConfigError(Problem("ranks", eval_model.ranks.size, rule, fix))
    decoder = eval_model.decoder(dtype=DTYPES[config.precision])
    reason = pruning_unsupported_reason(decoder)
    if reason is not None:
        fix = "this eval is of models with linear biases and no window"
        raise ConfigError(Problem("model", decoder.config.position, reason, fix))
    if config.num_tokens <= DENSE_UP_TO:
        rule = f"is too short to show a horizon: it must be above {DENSE_UP_TO:,}"
        raise ConfigError(
            Problem("attention_span.num_tokens", config.num_tokens, rule, "give 32768")
        )
    files = results.open_corpora(eval_model, config)[:1]
    tokens = _text(files[0], config.num_tokens)
    slopes = head_slopes(decoder.config)
    assert slopes is not None
    half = config.num_tokens // 2
    count = min(config.num_queries, half)
    positions = torch.linspace(half, config.num_tokens - 1, count).long().unique()
    true = TrueReach(positions, config.num_tokens, slopes, config.pruning_tolerance)
    report = LongScoringReport()
    started = time.perf_counter()
    losses = long_losses(decoder, tokens[:-1], tokens[1:], config.pruning_tolerance, report, true)
    certified = report.heads()[:, half // BLOCK :]
    rows = _rows(certified, true, slopes, config)
    result = {
        "eval": NAME,
        **results.run_facts(eval_model),
        "protocol": PROTOCOL,
        "corpus": results.corpus_facts(files),
        "num_tokens": config.num_tokens,
        "num_queries": len(positions),
        "pruning_tolerance": config.pruning_tolerance,
        "precision": config.precision,
        "loss": float(losses.double().mean()),
        "seconds": round(time.perf_counter() - started, 3),
        "slopes": list(slopes),
        "rows": rows,
        "composed": {kind: _composed(rows, kind) for kind in ("certified", "true")},
        "inputs": results.inputs_of(eval_model, config, files),
    }
    result["verdict"] = verdict(result)
    results.store(
        eval_model, NAME, result, lambda found: {NAME: plots.attention_span_figure(found)}
    )
    return result


def _text(file: TokenFile, num_tokens: int) -> Tensor:
    if file.num_tokens <= num_tokens:
        rule = f"has {file.num_tokens:,} tokens, not more than num_tokens"
        fix = "give a smaller attention_span.num_tokens, or another corpus"
        raise DataError(Problem(str(file.prefix), None, rule, fix))
    return torch.from_numpy(file.read(0, num_tokens + 1).astype(np.int64))


def _rows(
    certified: Tensor, true: TrueReach, slopes: tuple[float, ...], config: AttentionSpanConfig
) -> list[dict[str, Any]]:
    """One row a layer and head; `certified` is [layers, blocks, H]."""
    rows = []
    for layer, (blocks, reaches, scores) in enumerate(
        zip(certified, true.reaches, true.largest_scores, strict=True)
    ):
        for head, slope in enumerate(slopes):
            largest = float(scores[head])
            rows.append(
                {
                    "layer": layer,
                    "head": head,
                    "slope": slope,
                    "certified_median": int(blocks[:, head].median()),
                    "certified_max": int(blocks[:, head].max()),
                    "true_median": int(reaches[head].median()),
                    "true_max": int(reaches[head].max()),
                    "largest_score": largest,
                    "prior": prior_attention_span(largest, slope, config.pruning_tolerance),
                }
            )
    return rows


def _composed(rows: list[dict[str, Any]], kind: str) -> int:
    layers = {row["layer"] for row in rows}
    return sum(max(row[f"{kind}_max"] for row in rows if row["layer"] == layer) for layer in layers)


def verdict(result: dict[str, Any]) -> dict[str, str]:
    """What is proven, in a sentence."""
    longest = max(result["rows"], key=lambda row: row["certified_max"])
    half = result["num_tokens"] // 2
    if longest["certified_max"] >= half:
        return {
            "word": "not bounded",
            "text": f"No reach below {half:,} tokens, half of this text, could be proven for head "
            f"{longest['head']} of layer {longest['layer']}: nothing is said of how far it reads.",
            "caveat": "A longer text (attention_span.num_tokens) may show its horizon.",
        }
    return {
        "word": "bounded",
        "text": f"No head gives {result['pruning_tolerance']:g} of its probability to keys "
        f"more than {longest['certified_max']:,} tokens back. Through all layers the output at a "
        f"token depends on the last {result['composed']['certified']:,} tokens, beside such "
        "remainders.",
        "caveat": "Proven for the second half of this text. Of other text it need not hold; "
        "scoring and decoding prove it anew for every input.",
    }
