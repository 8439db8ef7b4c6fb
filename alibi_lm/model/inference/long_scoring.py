"""Losses of a long input in linear time and memory: layer by layer, up to the pruning bound.

A layer goes over the whole input before the next one starts, chunk by chunk, so that the norms of
all keys before a query are known when something is left out. What is kept for every token is the
layer's input and its output: at most 8 x hidden size bytes in fp32 (of the last layer only losses
are kept). Keys and values are kept as far back as recent chunks have read. Keys further back are
recomputed from the layer's input, so every query's output is equally close to the dense one. Heads
may be split over ranks: each rank reads up to the pruning bound of its own heads. Ranks do not
communicate for this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
from torch import Tensor

from alibi_lm.model.decoder import Decoder
from alibi_lm.model.layers import Block
from alibi_lm.model.pruning.block_sparse import BLOCK, CHUNK, LOCAL_KEYS, BlockSpans, attend
from alibi_lm.model.pruning.bounds import KeyNormBound

Observer = Callable[[int, int, Tensor, Tensor], None]
"""Called for every layer and chunk: the layer, the first position, q [H, n, D], k [KV, n, D]."""

DENSE_UP_TO = 2048
"""Inputs of at most this many tokens are computed densely: pruning would save nothing."""
MOST_KEPT = 32768
"""Keys and values kept at most, in tokens."""


@dataclass
class LongScoringReport:
    """How far the heads of each layer read, and how often that was further than what was kept."""

    spans: list[list[BlockSpans]] = field(default_factory=list)
    """Of each layer, chunk by chunk."""
    num_tokens: int = 0
    """Queries of one layer."""
    recomputed: int = 0
    """Keys, over all layers, that were recomputed because a query read that far back."""
    kept: int = 0
    """Most keys and values that a layer kept, in tokens."""

    def heads(self) -> Tensor:
        """[layers, blocks, H] int64: keys read before each block, all inputs one after another."""
        return torch.stack([torch.cat([part.keys.T for part in spans]) for spans in self.spans])

    def add(self, layer: int, spans: list[BlockSpans], recomputed: int, kept: int) -> None:
        """Record one chunk of a layer."""
        while len(self.spans) <= layer:
            self.spans.append([])
        self.spans[layer] += spans
        self.recomputed += recomputed
        self.kept = max(self.kept, kept)


def pruning_unsupported_reason(decoder: Decoder) -> str | None:
    """Why attention cannot be pruned for this model, or None where it can."""
    config = decoder.config
    if config.position != "alibi":
        return f"positions are {config.position}, and only alibi's biases make distant keys vanish"
    if config.window is not None:
        return f"the model has a window of {config.window} keys already"
    weight = decoder.embedding.weight
    if weight.device.type != "cpu" or weight.dtype == torch.float64:
        return f"there is no kernel for {weight.dtype} on {weight.device.type}"
    return None


def long_losses(
    decoder: Decoder,
    tokens: Tensor,
    targets: Tensor,
    epsilon: float,
    report: LongScoringReport | None = None,
    observe: Observer | None = None,
) -> Tensor:
    """`Decoder.losses` of one sequence, each head and row within `epsilon` of its probability.

    Args:
        decoder: a model for which `pruning_unsupported_reason` is None.
        tokens: [T] int64.
        targets: [T] int64.
        epsilon: probability that each head and row may leave out, above 0 and below 1.
        report: records what was read.
        observe: sees all queries and keys.

    Returns:
        Losses fp32 [T].

    Raises:
        ValueError: the model has no pruning bound, or epsilon is out of range.
    """
    reason = pruning_unsupported_reason(decoder)
    if reason is not None:
        raise ValueError(f"no pruning bound: {reason}")
    if not 0 < epsilon < 1:
        raise ValueError(f"epsilon = {epsilon} is not in (0, 1)")
    report = LongScoringReport() if report is None else report
    report.num_tokens += len(tokens)
    losses = torch.empty(len(tokens), dtype=torch.float32)
    with torch.no_grad():
        _run(decoder, tokens, targets, epsilon, report, losses, observe)
    return losses


def _run(
    decoder: Decoder,
    tokens: Tensor,
    targets: Tensor,
    epsilon: float,
    report: LongScoringReport,
    losses: Tensor,
    observe: Observer | None,
) -> None:
    weight = decoder.embedding.weight
    buffers = [
        weight.new_empty(len(tokens), weight.shape[1]) for _ in range(min(2, len(decoder.blocks)))
    ]
    chunks = [(first, min(first + CHUNK, len(tokens))) for first in range(0, len(tokens), CHUNK)]
    # All at once, because ranks that share the table look tokens up together.
    for first, stop in chunks:
        buffers[0][first:stop] = decoder.embedding(tokens[None, first:stop], first)[0]
    for index, block in enumerate(decoder.blocks):
        layer = _Layer(cast(Block, block), buffers[index % 2], epsilon)
        if observe is not None:
            layer.observe = partial(observe, index)
        last = index + 1 == len(decoder.blocks)
        for first, stop in chunks:
            before = layer.recomputed
            hidden, spans = layer.chunk(first, stop)
            report.add(index, spans, layer.recomputed - before, layer.keys.shape[1])
            if last:
                target = targets[None, first:stop]
                losses[first:stop] = decoder.hidden_losses(hidden[None], target)[0]
            else:
                buffers[1 - index % 2][first:stop] = hidden


class _Layer:
    """One block on its way over the input: the `KVSource` of its keys and values so far."""

    def __init__(self, block: Block, inputs: Tensor, epsilon: float) -> None:
        assert block.attention.exact_slopes is not None
        self.block, self.inputs, self.epsilon = block, inputs, epsilon
        self.slopes = block.attention.exact_slopes
        self.start = 0
        self.recomputed = 0
        self.observe: Callable[[int, Tensor, Tensor], None] | None = None
        self._keep = 0

    def chunk(self, first: int, stop: int) -> tuple[Tensor, list[BlockSpans]]:
        """The block's output [n, hidden_size] at positions [first, stop), and its spans."""
        hidden = self.inputs[None, first:stop]
        q, k, v = (x[0] for x in self.block.attention.project(self.block.attention_norm(hidden)))
        if self.observe is not None:
            self.observe(first, q, k)
        self._append(k, v, first)
        mixed, spans = attend(q, self, first, self.slopes, self.epsilon)
        self._keep = max(LOCAL_KEYS, *(int(part.keys.max()) for part in spans))
        hidden = hidden + self.block.attention.output(mixed.transpose(0, 1).flatten(1)[None])
        return (hidden + self.block.mlp(self.block.mlp_norm(hidden)))[0], spans

    def read(self, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values [KV, n, D] of positions that are no longer kept."""
        self.recomputed += stop - first
        normed = self.block.attention_norm(self.inputs[None, first:stop])
        _, k, v = self.block.attention.project(normed)
        return k[0], v[0]

    def _append(self, k: Tensor, v: Tensor, first: int) -> None:
        """Add a chunk's keys and values; keep of those before what the last chunk has read."""
        if first == 0:
            self.key_norms = KeyNormBound(k)
            self.keys, self.values = k.contiguous(), v.contiguous()
        else:
            keep = min(-(-self._keep // BLOCK) * BLOCK, MOST_KEPT, self.keys.shape[1])
            self.start = first - keep
            self.keys = torch.cat([self.keys[:, self.keys.shape[1] - keep :], k], dim=1)
            self.values = torch.cat([self.values[:, self.values.shape[1] - keep :], v], dim=1)
        self.key_norms.add(k)
