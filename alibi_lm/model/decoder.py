"""The decoder: the layers as one plain module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from alibi_lm.model.config import ModelConfig
from alibi_lm.model.inference.kv_cache import KVCache
from alibi_lm.model.init import initialize
from alibi_lm.model.layers import Block, Embedding, Head, layers, vocab_size
from alibi_lm.model.vocab_parallel_cross_entropy import output_losses
from alibi_lm.parallel.mesh import NO_PARALLEL, ParallelDim
from alibi_lm.parallel.shard import Shard, StridedReader, StridedSlice, shard_of
from alibi_lm.utils.errors import ConfigError


class Decoder(nn.Module):
    """A causal language model of any length.

    Attributes:
        activation_checkpointing: compute the blocks again in the backward pass, and keep only
            their inputs.
    """

    def __init__(
        self, config: ModelConfig, seed: int | None = 0, tp: ParallelDim = NO_PARALLEL
    ) -> None:
        """Make the model, with weights drawn from `seed`; None leaves them unset.

        Each rank of `tp` has its slice of the same model, and all give the same results.

        Raises:
            ConfigError: the config has no vocabulary size, or breaks a rule.
        """
        super().__init__()
        problems = list(config.problems("model."))
        if problems:
            raise ConfigError(*problems)
        self.config = config
        self.tp = tp
        self.activation_checkpointing = False
        first, *middle, last = (make() for make in layers(config, tp))
        self.embedding = cast(Embedding, first)
        self.blocks = nn.ModuleList(middle)
        self.head = cast(Head, last)
        if seed is not None:
            initialize(self.named_parameters(), config, seed)

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, *, cache: KVCache | None = None
    ) -> Tensor:
        """Logits [B, T, V] of tokens [B, T], or, given targets [B, T], their losses fp32 [B, T].

        Ignored targets (-100) count in `.mean()`; for the mean over the others, take
        `losses.sum() / (targets != -100).sum()`.

        With a cache, the tokens follow those that it holds, and are added to it.
        """
        if targets is None:
            return self.logits(self.hidden_states(tokens, cache))
        if not isinstance(targets, Tensor):
            raise TypeError(f"targets are a tensor, not {type(targets).__name__}; cache=... is one")
        return self.losses(tokens, targets, cache)

    def hidden_states(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """The residual stream [B, T, hidden_size] after the last block, before the final norm."""
        hidden = self.embedding(tokens, 0 if cache is None else cache.length)
        recompute = self.activation_checkpointing and cache is None and torch.is_grad_enabled()
        for index, block in enumerate(self.blocks):
            if recompute:
                hidden = checkpoint(cast(Block, block), hidden, use_reentrant=False)
            else:
                hidden = block(hidden, None if cache is None else cache.layers[index])
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of `hidden_states` [..., hidden_size]."""
        out = self.head(hidden)
        return self.embedding.logits(out) if self.config.tied_embeddings else out

    def losses(self, tokens: Tensor, targets: Tensor, cache: KVCache | None = None) -> Tensor:
        """Cross entropy in nats of each target, fp32 [B, T], differentiable.

        The whole logits are never held where they are large. A target of -100 has loss 0.
        """
        return self.hidden_losses(self.hidden_states(tokens, cache), targets)

    def hidden_losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """`losses` of targets [B, T], given the `hidden_states` [B, T, hidden_size]."""
        normed = self.head.norm(hidden)
        weight = self.embedding.weight if self.config.tied_embeddings else self.head.weight
        return output_losses(normed, weight, targets, vocab_size(self.config), self.tp)

    def canonical_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters under the names that checkpoints use: here their own."""
        return self.named_parameters()

    def new_cache(self) -> KVCache:
        """An empty cache for decoding."""
        return KVCache(self.config.num_layers)

    def num_parameters(self) -> int:
        """Number of weights of this rank; a shared one counts once."""
        return sum(parameter.numel() for parameter in self.parameters())


@torch.no_grad()
def filled_decoder(
    config: ModelConfig,
    reader: StridedReader,
    dtype: torch.dtype = torch.float32,
    tp: ParallelDim = NO_PARALLEL,
) -> Decoder:
    """A decoder in evaluation mode, with the weights of `reader` in `dtype`.

    Each rank of `tp` reads its slice alone, one parameter at a time.
    """
    with torch.device("meta"):
        decoder = Decoder(config, seed=None, tp=tp)
    shards: dict[str, Shard | None] = {n: shard_of(p) for n, p in decoder.named_parameters()}
    decoder = decoder.to(dtype).to_empty(device="cpu")
    for name, parameter in decoder.named_parameters():
        shard, flat = shards[name], parameter.view(-1)
        if shard is None:
            slices = [(0, StridedSlice.contiguous(0, flat.numel()))]
        else:
            parameter.zero_()  # padding stays so
            name, slices = shard.canonical_name(name), list(shard.slices(0, flat.numel()))
        for first, strided in slices:
            flat[first : first + strided.numel] = reader.read_slice(name, "param", strided)
    return decoder.eval()
