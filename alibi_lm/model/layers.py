"""Embedding, Block and Head: one tensor in, one tensor out.

The parameters are left unset here; `initial.initialize` draws them.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alibi_lm.model.attention.dispatch import attention
from alibi_lm.model.attention.qkv_split import split
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.inference.kv_cache import LayerKVCache
from alibi_lm.model.inference.pruned_kv_cache import PrunedKVLayer
from alibi_lm.model.position_scaling import head_slopes, rotation
from alibi_lm.model.positions import (
    NUM_BUCKETS,
    check_learned,
    relative_buckets,
    rotate,
    sinusoidal,
)
from alibi_lm.model.slopes import learned_slopes, slice_slopes
from alibi_lm.parallel.mesh import NO_PARALLEL, ParallelDim
from alibi_lm.parallel.tensor_parallel import (
    ColumnGroup,
    ColumnLinear,
    RowLinear,
    split_columns,
    split_vector,
    vocabulary_embedding,
    vocabulary_logits,
    vocabulary_weight,
)
from alibi_lm.utils.errors import ConfigError, Problem

LAYER_NORM_EPSILON = 1e-5


def layers(config: ModelConfig, tp: ParallelDim = NO_PARALLEL) -> list[partial[nn.Module]]:
    """Makers of the layers, first to last: Embedding, the Blocks, Head.

    Each rank of `tp` has its slice of them; what passes between them is the same on every rank.
    """
    kinds: list[type[nn.Module]] = [Embedding, *[Block] * config.num_layers, Head]
    return [partial(kind, config, tp) for kind in kinds]


def _layer_norm(config: ModelConfig) -> nn.LayerNorm:
    bias = config.architecture == "bloom"
    return nn.LayerNorm(config.hidden_size, eps=LAYER_NORM_EPSILON, bias=bias)


def vocab_size(config: ModelConfig) -> int:
    """The vocabulary's size.

    Raises:
        ConfigError: it is not set.
    """
    if config.vocab_size is None:
        fix = "set it, or let the data's tokenizer do so"
        raise ConfigError(Problem("model.vocab_size", None, "is needed to make a model", fix))
    return config.vocab_size


class Embedding(nn.Module):
    """Token ids to the residual stream; also the output matrix of a tied model."""

    def __init__(self, config: ModelConfig, tp: ParallelDim = NO_PARALLEL) -> None:
        super().__init__()
        self.config = config
        self.tp = tp
        self.weight = vocabulary_weight(vocab_size(config), config.hidden_size, tp)
        if config.architecture == "bloom":
            self.norm = _layer_norm(config)
        if config.position == "learned":
            assert config.max_positions is not None
            self.position = nn.Parameter(torch.empty(config.max_positions, config.hidden_size))

    def forward(self, tokens: Tensor, start: int = 0) -> Tensor:
        """tokens [B, T] int64, the first at position `start`, to [B, T, hidden_size].

        Raises:
            ConfigError: a learned table has no row for a position.
        """
        hidden = vocabulary_embedding(tokens, self.weight, self.tp)
        if self.config.position == "sinusoidal":
            # Scaled by sqrt(width), so that the table does not drown the tokens (Vaswani et al.
            # 2017, section 3.4).
            table = sinusoidal(start, tokens.shape[1], self.config.hidden_size, tokens.device)
            hidden = hidden * math.sqrt(self.config.hidden_size) + table.to(hidden.dtype)
        elif self.config.position == "learned":
            stop = start + tokens.shape[1]
            check_learned(stop, self.config.max_positions or 0)
            hidden = hidden + self.position[start:stop]
        return self.norm(hidden) if self.config.architecture == "bloom" else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """The tied output layer: normed [..., hidden_size] to [..., vocab_size]."""
        return vocabulary_logits(hidden, self.weight, vocab_size(self.config), self.tp)


class Attention(nn.Module):
    """Causal self-attention with the config's positions, window and key/value heads.

    Attributes:
        epsilon: probability that a head and row may leave out in training; 0 leaves out nothing.
    """

    def __init__(self, config: ModelConfig, tp: ParallelDim = NO_PARALLEL) -> None:
        super().__init__()
        self.config = config
        self.epsilon = 0.0
        bias, width = config.architecture == "bloom", config.hidden_size
        # Neighboring ranks hold a key/value head alike where there are fewer of them than ranks.
        copies = max(1, tp.size // config.kv_heads)
        keys = ColumnGroup(config.kv_heads * config.head_dim, copies)
        parts = [ColumnGroup(width), keys, keys]
        self.widths = [part.interval(0, tp).length for part in parts]
        slopes = head_slopes(config)
        self.slopes = None if slopes is None else slice_slopes(slopes, tp.rank, tp.size)
        if config.position == "rotary":
            self.rotation = rotation(config.head_dim, config.scaling)
        self.qkv = ColumnLinear(width, parts, bias=bias, tp=tp)
        self.output = RowLinear(width, width, bias=bias, tp=tp)
        if config.position == "t5":
            self.relative_bias = split_columns((NUM_BUCKETS, config.num_heads), tp)
        if config.position == "alibi_learned":
            self.log_slope_ratio = split_vector(config.num_heads, tp)

    def forward(self, hidden: Tensor, cache: LayerKVCache | None = None) -> Tensor:
        """hidden [B, T, hidden_size] to the same; the tokens follow those in the cache."""
        q, k, v = self.project(hidden)
        if self.config.position == "rotary":
            start = 0 if cache is None else cache.length
            how = (start, self.rotation.frequencies, self.rotation.magnitude)
            q, k = rotate(q, *how), rotate(k, *how)
        if isinstance(cache, PrunedKVLayer):
            assert isinstance(self.slopes, tuple)
            return self.output(cache.attend(q, k, v, self.slopes).transpose(1, 2).flatten(2))
        if cache is not None:
            k, v = cache.append(k, v)
        bias = None
        if self.config.position == "t5":
            bias = self.relative_bias[relative_buckets(hidden.device)].T
        slopes: tuple[float, ...] | Tensor | None = self.slopes
        if self.config.position == "alibi_learned":
            assert self.slopes is not None
            slopes = learned_slopes(self.slopes, self.log_slope_ratio)
        epsilon = self.epsilon if self.training and cache is None else 0.0
        mixed = self.mix(q, k, v, slopes, bias, epsilon)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def mix(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slopes: tuple[float, ...] | Tensor | None,
        bias: Tensor | None,
        epsilon: float,
    ) -> Tensor:
        """`attention` within the config's window."""
        window = self.config.window
        return attention(q, k, v, slopes=slopes, window=window, bias=bias, epsilon=epsilon)

    def current_slopes(self) -> tuple[float, ...] | None:
        """The rank's heads' slopes as they are now: learned ones change; None without any."""
        if self.config.position != "alibi_learned":
            return self.slopes
        assert self.slopes is not None
        with torch.no_grad():
            return tuple(learned_slopes(self.slopes, self.log_slope_ratio).tolist())

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, H, T, D], k and v [B, KV, T, D] of hidden [B, T, hidden_size], no position yet.

        They are views of one product: the kernel reads them where they lie.
        """
        q, k, v = (
            part.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
            for part in split(self.qkv(hidden), self.widths)
        )
        return q, k, v


def set_pruning_tolerance(model: nn.Module, epsilon: float) -> None:
    """Let the attention of all of a model's blocks leave out so much in training."""
    for module in model.modules():
        if isinstance(module, Attention):
            module.epsilon = epsilon


class MLP(nn.Module):
    """Two linear layers around a GELU, four times as wide."""

    def __init__(self, config: ModelConfig, tp: ParallelDim = NO_PARALLEL) -> None:
        super().__init__()
        bias, width = config.architecture == "bloom", config.hidden_size
        self.approximate = "tanh" if config.architecture == "bloom" else "none"
        self.up = ColumnLinear(width, [ColumnGroup(4 * width)], bias=bias, tp=tp)
        self.down = RowLinear(4 * width, width, bias=bias, tp=tp)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, T, hidden_size] to the same."""
        return self.down(F.gelu(self.up(hidden), approximate=self.approximate))


class Block(nn.Module):
    """A pre-LayerNorm transformer block."""

    def __init__(self, config: ModelConfig, tp: ParallelDim = NO_PARALLEL) -> None:
        super().__init__()
        self.attention_norm = _layer_norm(config)
        self.attention = Attention(config, tp)
        self.mlp_norm = _layer_norm(config)
        self.mlp = MLP(config, tp)

    def forward(self, hidden: Tensor, cache: LayerKVCache | None = None) -> Tensor:
        """hidden [B, T, hidden_size] to the same; the tokens follow those in the cache."""
        hidden = hidden + self.attention(self.attention_norm(hidden), cache)
        return hidden + self.mlp(self.mlp_norm(hidden))


class Head(nn.Module):
    """The final norm and, where the embeddings are not tied, the output matrix."""

    def __init__(self, config: ModelConfig, tp: ParallelDim = NO_PARALLEL) -> None:
        super().__init__()
        self.config = config
        self.tp = tp
        self.norm = _layer_norm(config)
        if not config.tied_embeddings:
            self.weight = vocabulary_weight(vocab_size(config), config.hidden_size, tp)
        self.tied = config.tied_embeddings

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., hidden_size] to logits [..., vocab_size].

        Tied: to the normed hidden states, of which `Embedding.logits` makes the logits.
        """
        normed = self.norm(hidden)
        return normed if self.tied else self.logits(normed)

    def logits(self, normed: Tensor) -> Tensor:
        """The untied output layer: normed [..., hidden_size] to [..., vocab_size]."""
        return vocabulary_logits(normed, self.weight, vocab_size(self.config), self.tp)
