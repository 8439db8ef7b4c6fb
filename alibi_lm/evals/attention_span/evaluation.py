"""How far each head reads on real text: the certified attention span and the true one."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from alibi_lm.data.indexed import TokenFile
from alibi_lm.evals.attention_span import result as shown
from alibi_lm.evals.attention_span.result import AttentionSpanResult, HeadRow
from alibi_lm.evals.base import Eval, register
from alibi_lm.evals.config import AttentionSpanConfig
from alibi_lm.evals.models.base import EvalModel
from alibi_lm.evals.models.scorer import DTYPES, Scorer
from alibi_lm.model.decoder import Decoder
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
from alibi_lm.utils.progress import Progress

PROTOCOL = (
    "The attention span of a query is the smallest distance such that all keys further away "
    "together have less than the pruning tolerance of the head's probability. Certified: proven "
    f"from the norms of queries and keys for each block of {BLOCK} queries, and measured from the "
    "block's first query. True: from the full softmax in float64, at single positions. Both are "
    "taken over the second half of the text. Prior: the bound from the largest norms alone. "
    "Through all layers: the sum over layers of the longest head's largest span."
)


@dataclass
class TrueSpans:
    """Measures true spans at some positions, as an observer of `long_losses`."""

    positions: Tensor
    """[N] int64, ascending."""
    length: int
    """Tokens of the text."""
    slopes: tuple[float, ...]
    tolerance: float
    spans: list[Tensor] = field(default_factory=list)
    """Of each layer, [H, N] int64."""
    largest_scores: list[Tensor] = field(default_factory=list)
    """Of each layer, [H]: the largest |q| times the largest |k|, over sqrt(D)."""
    progress: Progress | None = None
    """Advances by each query of each layer."""
    _queries: list[Tensor] = field(default_factory=list)
    _keys: list[Tensor] = field(default_factory=list)
    _norms: list[Tensor] = field(default_factory=list)

    def __call__(self, layer: int, first: int, q: Tensor, k: Tensor) -> None:
        """Collect a chunk; measure the layer with its last one."""
        stop = first + q.shape[1]
        if self.progress is not None:
            self.progress.advance(q.shape[1])
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
        self.spans.append(
            torch.stack(
                [self._head(queries[h], keys[h // group], m) for h, m in enumerate(self.slopes)]
            )
        )
        self._queries, self._keys, self._norms = [], [], []

    def _head(self, queries: Tensor, keys: Tensor, slope: float) -> Tensor:
        """[N]: spans of one head's queries [N, D] over its keys [T, D]."""
        keys = keys.double().T.contiguous()
        places = torch.arange(keys.shape[1])
        spans = []
        for some, at in zip(queries.split(16), self.positions.split(16), strict=True):
            distances = at.unsqueeze(1) - places
            scores = some @ keys / math.sqrt(keys.shape[0]) - slope * distances
            weights = scores.masked_fill_(distances < 0, -math.inf).softmax(dim=1)
            # Keys from the first one on whose mass, summed up, stays below the tolerance.
            farthest = (weights.cumsum(dim=1) < self.tolerance).sum(dim=1)
            spans.append(at - farthest)
        return torch.cat(spans)


@register
class AttentionSpan(Eval[AttentionSpanConfig, AttentionSpanResult]):
    """How far each head reads."""

    name = "attention_span"
    help = "How far each head provably, and truly, reads; a model with linear biases."
    title = "How far heads read"
    config = AttentionSpanConfig
    result = AttentionSpanResult
    template = "attention_span.html"

    def run(
        self, eval_model: EvalModel, config: AttentionSpanConfig, scorer: Scorer | None = None
    ) -> AttentionSpanResult:
        """Measure a model's heads.

        Raises:
            ConfigError: the model's spans have no bound, or num_tokens is too small to measure one.
            DataError: no corpus, or one shorter than num_tokens.
        """
        decoder = _checked_decoder(eval_model, config)
        files = self.open_corpora(eval_model, config)[:1]
        tokens = _text(files[0], config.num_tokens)
        slopes = head_slopes(decoder.config)
        assert slopes is not None
        half, tolerance = config.num_tokens // 2, config.pruning_tolerance
        count = min(config.num_queries, half)
        positions = torch.linspace(half, config.num_tokens - 1, count).long().unique()
        true = TrueSpans(positions, config.num_tokens, slopes, tolerance)
        report = LongScoringReport()
        started = time.perf_counter()
        total = decoder.config.num_layers * config.num_tokens
        with Progress(self.name, total, unit="tok") as true.progress:
            losses = long_losses(decoder, tokens[:-1], tokens[1:], tolerance, report, true)
        rows = _rows(report.heads()[:, half // BLOCK :], true, slopes, config)
        through_layers = shown.composed(rows)
        return AttentionSpanResult(
            **self.common(eval_model, config, files),
            protocol=PROTOCOL,
            num_tokens=config.num_tokens,
            num_queries=len(positions),
            pruning_tolerance=tolerance,
            precision=config.precision,
            loss=float(losses.double().mean()),
            seconds=round(time.perf_counter() - started, 3),
            slopes=list(slopes),
            rows=rows,
            composed=through_layers,
            verdict=shown.verdict(rows, through_layers, config.num_tokens, tolerance),
        )

    def table(self, result: AttentionSpanResult) -> list[str]:
        """Spans by head."""
        return shown.table(result)

    def figures(self, result: AttentionSpanResult) -> dict[str, Figure]:
        """Spans of every head."""
        return {self.name: shown.figure(result)}

    def expected_of(self, eval_model: EvalModel) -> bool:
        """Of models with linear biases."""
        model = eval_model.model_config
        return model is not None and model.position == "alibi"


def _checked_decoder(eval_model: EvalModel, config: AttentionSpanConfig) -> Decoder:
    if eval_model.ranks.size > 1:
        rule = "this eval runs in one process"
        fix = "start it without deepspeed"
        raise ConfigError(Problem("ranks", eval_model.ranks.size, rule, fix))
    decoder = eval_model.decoder(dtype=DTYPES[config.precision])
    reason = pruning_unsupported_reason(decoder)
    if reason is not None:
        fix = "this eval needs a model with linear biases and no window"
        raise ConfigError(Problem("model", decoder.config.position, reason, fix))
    if config.num_tokens <= DENSE_UP_TO:
        rule = f"is too short to measure a span: it must be above {DENSE_UP_TO:,}"
        raise ConfigError(
            Problem("attention_span.num_tokens", config.num_tokens, rule, "give 32768")
        )
    return decoder


def _text(file: TokenFile, num_tokens: int) -> Tensor:
    if file.num_tokens <= num_tokens:
        rule = f"has {file.num_tokens:,} tokens, not more than num_tokens"
        fix = "give a smaller attention_span.num_tokens, or another corpus"
        raise DataError(Problem(str(file.prefix), None, rule, fix))
    return torch.from_numpy(file.read(0, num_tokens + 1).astype(np.int64))


def _rows(
    certified: Tensor, true: TrueSpans, slopes: tuple[float, ...], config: AttentionSpanConfig
) -> list[HeadRow]:
    """One row a layer and head; `certified` is [layers, blocks, H]."""
    rows = []
    for layer, (blocks, spans, scores) in enumerate(
        zip(certified, true.spans, true.largest_scores, strict=True)
    ):
        for head, slope in enumerate(slopes):
            largest = float(scores[head])
            rows.append(
                HeadRow(
                    layer=layer,
                    head=head,
                    slope=slope,
                    certified_median=int(blocks[:, head].median()),
                    certified_max=int(blocks[:, head].max()),
                    true_median=int(spans[head].median()),
                    true_max=int(spans[head].max()),
                    largest_score=largest,
                    prior=prior_attention_span(largest, slope, config.pruning_tolerance),
                )
            )
    return rows
