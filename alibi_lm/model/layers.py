"""Embedding, Block and Head: one tensor in, one tensor out.

The parameters are left unset here; `init.initialize` draws them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alibi_lm.model.attention.dispatch import attention
from alibi_lm.model.attention.qkv_split import split
from alibi_lm.model.config import Architecture, ModelConfig, Position
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
from alibi_lm.model.slopes import Slopes, learned_slopes, slice_slopes
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


def _is_bloom(config: ModelConfig) -> bool:
    """Whether the architecture is bloom and not mpt.

    Raises:
        ConfigError: it is neither, or the position scheme is unknown.
    """
    choices = (("architecture", Architecture), ("position", Position))
    for key, choice in choices:
        value, known = getattr(config, key), get_args(choice)
        if value not in known:
            rule = f"is not one of {', '.join(known)}"
            raise ConfigError(Problem(f"model.{key}", value, rule, "choose one of them"))
    return config.architecture == "bloom"


def _layer_norm(config: ModelConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=LAYER_NORM_EPSILON, bias=_is_bloom(config))


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
        if _is_bloom(config):
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
        epsilon: the probability that each head and row may drop in training; 0 drops nothing.
        exact_slopes: the rank's heads' slopes in double precision, which CPU kernels compute with;
            initial values of learned ones; None without linear biases.
        slopes: the same as an fp32 buffer [H] for kernels on a device. It moves with the module,
            stays fp32 whatever the module is cast to, and is not in the state dict.
    """

    slopes: Tensor | None

    def __init__(self, config: ModelConfig, tp: ParallelDim = NO_PARALLEL) -> None:
        super().__init__()
        self.config = config
        self.epsilon = 0.0
        bias, width = _is_bloom(config), config.hidden_size
        # Neighboring ranks hold a key/value head alike where there are fewer of them than ranks.
        copies = max(1, tp.size // config.kv_heads)
        keys = ColumnGroup(config.kv_heads * config.head_dim, copies)
        parts = [ColumnGroup(width), keys, keys]
        self.widths = [part.interval(0, tp).length for part in parts]
        if config.position == "rotary":
            self.rotation = rotation(config.head_dim, config.scaling)
        self.qkv = ColumnLinear(width, parts, bias=bias, tp=tp)
        self.output = RowLinear(width, width, bias=bias, tp=tp)
        slopes = head_slopes(config)
        self.set_slopes(None if slopes is None else slice_slopes(slopes, tp.rank, tp.size))
        if config.position == "t5":
            self.relative_bias = split_columns((NUM_BUCKETS, config.num_heads), tp)
        if config.position == "alibi_learned":
            self.log_slope_ratio = split_vector(config.num_heads, tp)

    def forward(self, hidden: Tensor, cache: LayerKVCache | None = None) -> Tensor:
        """hidden [B, T, hidden_size] to the same; the tokens follow those in the cache."""
        q, k, v = self.project(hidden)
        if self.config.position == "rotary":
            start = 0 if cache is None else cache.length
            rotary_args = (start, self.rotation.frequencies, self.rotation.magnitude)
            q, k = rotate(q, *rotary_args), rotate(k, *rotary_args)
        if isinstance(cache, PrunedKVLayer):
            assert self.exact_slopes is not None
            return self.output(cache.attend(q, k, v, self.exact_slopes).transpose(1, 2).flatten(2))
        if cache is not None:
            k, v = cache.append(k, v)
        bias = None
        if self.config.position == "t5":
            bias = self.relative_bias[relative_buckets(hidden.device)].T
        slopes: Slopes | None = self.exact_slopes if hidden.device.type == "cpu" else self.slopes
        if self.config.position == "alibi_learned":
            slopes = self._learned_slopes()
        epsilon = self.epsilon if self.training and cache is None else 0.0
        mixed = self.mix(q, k, v, slopes, bias, epsilon)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def mix(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slopes: Slopes | None,
        bias: Tensor | None,
        epsilon: float,
    ) -> Tensor:
        """`attention` within the config's window."""
        window = self.config.window
        return attention(q, k, v, slopes=slopes, window=window, bias=bias, epsilon=epsilon)

    def set_slopes(self, slopes: tuple[float, ...] | None) -> None:
        """Replace the fixed slopes, or the initial values of learned ones."""
        self.exact_slopes = slopes
        device = self.qkv.weight.device
        values = (
            None if slopes is None else torch.tensor(slopes, dtype=torch.float32, device=device)
        )
        self.register_buffer("slopes", values, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Attention:
        """Move or cast the module. Slopes keep fp32 and their values, also in `to_empty`."""
        super()._apply(fn, recurse)
        if self.slopes is not None:
            values, device = self.exact_slopes, self.slopes.device
            self.slopes = torch.tensor(values, dtype=torch.float32, device=device)
        return self

    def _learned_slopes(self) -> Tensor:
        assert self.slopes is not None
        assert self.exact_slopes is not None
        double = self.log_slope_ratio.dtype == torch.float64
        return learned_slopes(self.exact_slopes if double else self.slopes, self.log_slope_ratio)

    def current_slopes(self) -> tuple[float, ...] | None:
        """The rank's heads' slopes as they are now: learned ones change; None without any."""
        if self.config.position != "alibi_learned":
            return self.exact_slopes
        with torch.no_grad():
            return tuple(self._learned_slopes().tolist())

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
    """Set the pruning tolerance of every attention layer, for training."""
    for module in model.modules():
        if isinstance(module, Attention):
            module.epsilon = epsilon


class MLP(nn.Module):
    """Two linear layers around a GELU, four times as wide."""

    def __init__(self, config: ModelConfig, tp: ParallelDim = NO_PARALLEL) -> None:
        super().__init__()
        bias, width = _is_bloom(config), config.hidden_size
        self.approximate = "tanh" if bias else "none"
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
