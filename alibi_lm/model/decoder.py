"""The decoder: the layers as one plain module."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from alibi_lm.errors import ConfigError
from alibi_lm.model.cache import Cache
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.initial import initialise
from alibi_lm.model.layers import Block, Embedding, Head, layers, vocab_size

# Logits held at once where only losses are wanted: 64 MiB in fp32.
LOGITS_AT_ONCE = 1 << 24


class Decoder(nn.Module):
    """A causal language model of any length.

    Attributes:
        activation_checkpointing: compute the blocks again in the backward pass, and keep only
            their inputs.
    """

    def __init__(self, config: ModelConfig, seed: int | None = 0) -> None:
        """Make the model, with weights drawn from `seed`; None leaves them unset.

        Raises:
            ConfigError: the config has no vocabulary size, or breaks a rule.
        """
        super().__init__()
        problems = list(config.problems("model."))
        if problems:
            raise ConfigError(*problems)
        self.config = config
        self.activation_checkpointing = False
        first, *middle, last = (make() for make in layers(config))
        self.embedding = cast(Embedding, first)
        self.blocks = nn.ModuleList(middle)
        self.head = cast(Head, last)
        if seed is not None:
            initialise(self, config, seed)

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, *, cache: Cache | None = None
    ) -> Tensor:
        """Logits [B, T, V] of tokens [B, T], or, given targets [B, T], their losses fp32 [B, T].

        With a cache, the tokens follow those that it holds, and are added to it.
        """
        if targets is None:
            return self.logits(self.hidden_states(tokens, cache))
        if not isinstance(targets, Tensor):
            raise TypeError(f"targets are a tensor, not {type(targets).__name__}; cache=... is one")
        return self.losses(tokens, targets, cache)

    def hidden_states(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """The residual stream [B, T, hidden_size] after the last block, before the final norm."""
        hidden = self.embedding(tokens, 0 if cache is None else cache.length)
        again = self.activation_checkpointing and cache is None and torch.is_grad_enabled()
        for index, block in enumerate(self.blocks):
            if again:
                hidden = checkpoint(cast(Block, block), hidden, use_reentrant=False)
            else:
                hidden = block(hidden, None if cache is None else cache.layers[index])
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of `hidden_states` [..., hidden_size]."""
        out = self.head(hidden)
        return self.embedding.logits(out) if self.config.tied_embeddings else out

    def losses(self, tokens: Tensor, targets: Tensor, cache: Cache | None = None) -> Tensor:
        """Cross entropy in nats of each target, fp32 [B, T], differentiable.

        Logits are made for some positions at a time, and made again in the backward pass where
        there is more than one portion. A target of -100 has loss 0.
        """
        hidden = self.hidden_states(tokens, cache).flatten(0, 1)
        flat = targets.flatten()
        portion = max(1, LOGITS_AT_ONCE // vocab_size(self.config))
        if flat.numel() <= portion:
            return self._losses(hidden, flat).view(targets.shape)
        parts = []
        for rows, labels in zip(hidden.split(portion), flat.split(portion), strict=True):
            if torch.is_grad_enabled():
                parts.append(checkpoint(self._losses, rows, labels, use_reentrant=False))
            else:
                parts.append(self._losses(rows, labels))
        return torch.cat(parts).view(targets.shape)

    def _losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(hidden).float(), targets, reduction="none")

    def new_cache(self) -> Cache:
        """An empty cache for decoding."""
        return Cache(self.config.num_layers)

    def num_parameters(self) -> int:
        """Number of weights; a shared one counts once."""
        return sum(parameter.numel() for parameter in self.parameters())
