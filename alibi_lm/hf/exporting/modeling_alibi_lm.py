"""A decoder of alibi_lm that no class of `transformers` holds, for `trust_remote_code=True`.

This file stands beside the weights in an exported folder and needs `transformers` and torch only.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

NUM_BUCKETS, MAX_DISTANCE, BASE = 32, 128, 10000.0
_FIELDS = {field.name for field in dataclasses.fields(CausalLMOutputWithPast)}
_CACHE = "cache" if "cache" in _FIELDS else "past_key_values"  # renamed in transformers 5


class AlibiLmConfig(PretrainedConfig):
    """The architecture of the decoder."""

    model_type = "alibi_lm"

    def __init__(
        self,
        architecture: str = "mpt",
        num_hidden_layers: int = 2,
        hidden_size: int = 64,
        num_attention_heads: int = 4,
        num_key_value_heads: int = 4,
        vocab_size: int = 256,
        position: str = "alibi",
        window: int | None = None,
        max_positions: int | None = None,
        tied_embeddings: bool = True,
        layer_norm_epsilon: float = 1e-5,
        **kwargs: Any,
    ) -> None:
        """Keep the settings."""
        self.architecture, self.position, self.window = architecture, position, window
        self.num_hidden_layers, self.hidden_size = num_hidden_layers, hidden_size
        self.num_attention_heads, self.num_key_value_heads = (
            num_attention_heads,
            num_key_value_heads,
        )
        self.vocab_size, self.max_positions = vocab_size, max_positions
        self.tied_embeddings, self.layer_norm_epsilon = tied_embeddings, layer_norm_epsilon
        super().__init__(**{**kwargs, "tie_word_embeddings": False})


def _slopes(num_heads: int) -> list[float]:
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * head / power) for head in range(1, power + 1)]
    finer = [2.0 ** (-4.0 * head / power) for head in range(1, 2 * power + 1)]
    return slopes + finer[::2][: num_heads - power]


def _angles(positions: Tensor, num_waves: int, width: int) -> Tensor:
    waves = torch.arange(num_waves, dtype=torch.float64, device=positions.device)
    return positions[..., None].double() * BASE ** (-2 * waves / width)


def _buckets(distances: Tensor) -> Tensor:
    exact = NUM_BUCKETS // 2
    share = (distances.clamp(min=1).float() / exact).log() / math.log(MAX_DISTANCE / exact)
    far = (exact + (share * (NUM_BUCKETS - exact)).to(torch.int64)).clamp(max=NUM_BUCKETS - 1)
    return torch.where(distances < exact, distances, far)


def _norm(config: AlibiLmConfig) -> nn.LayerNorm:
    bias = config.architecture == "bloom"
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon, bias=bias)


class Embedding(nn.Module):
    """Token ids to the residual stream."""

    def __init__(self, config: AlibiLmConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        if config.architecture == "bloom":
            self.norm = _norm(config)
        if config.position == "learned":
            self.position = nn.Parameter(torch.empty(config.max_positions or 0, config.hidden_size))

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """[B, T] and their positions to [B, T, hidden_size]."""
        hidden, width = F.embedding(tokens, self.weight), self.config.hidden_size
        if self.config.position == "sinusoidal":
            angles = _angles(positions, (width + 1) // 2, width)
            table = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)[..., :width]
            hidden = hidden * math.sqrt(width) + table.to(hidden.dtype)
        elif self.config.position == "learned":
            if int(positions.max()) >= len(self.position):
                raise ValueError(f"the model has {len(self.position)} positions only")
            hidden = hidden + self.position[positions]
        return self.norm(hidden) if self.config.architecture == "bloom" else hidden


class Attention(nn.Module):
    """Causal self-attention, scores and softmax in fp32."""

    def __init__(self, config: AlibiLmConfig, index: int) -> None:
        super().__init__()
        self.config, self.index = config, index
        heads, groups, width = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.hidden_size,
        )
        self.head_dim = width // heads
        bias = config.architecture == "bloom"
        self.widths = [width, groups * self.head_dim, groups * self.head_dim]
        self.qkv = nn.Linear(width, sum(self.widths), bias=bias)
        self.output = nn.Linear(width, width, bias=bias)
        if config.position == "t5":
            self.relative_bias = nn.Parameter(torch.empty(NUM_BUCKETS, heads))

    def _rotate(self, x: Tensor, start: int) -> Tensor:
        positions = torch.arange(start, start + x.shape[2], device=x.device)
        angles = _angles(positions, self.head_dim // 2, self.head_dim)
        cosine, sine = angles.cos().float(), angles.sin().float()
        first, second = x.float().chunk(2, dim=-1)
        turned = (first * cosine - second * sine, second * cosine + first * sine)
        return torch.cat(turned, dim=-1).to(x.dtype)

    def forward(self, hidden: Tensor, mask: Tensor, cache: Any) -> Tensor:
        """[B, T, hidden_size] to the same; `mask` [B or 1, 1, T, keys] says what is not seen."""
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in self.qkv(hidden).split(self.widths, dim=-1)
        )
        start = mask.shape[-1] - mask.shape[-2]
        if self.config.position == "rotary":
            q, k = self._rotate(q, start), self._rotate(k, start)
        if cache is not None:
            k, v = cache.update(k, v, self.index)
        repeats = self.config.num_attention_heads // self.config.num_key_value_heads
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        compute = torch.promote_types(q.dtype, torch.float32)
        scores = q.to(compute) @ k.to(compute).transpose(-1, -2) / math.sqrt(self.head_dim)
        keys = torch.arange(mask.shape[-1], device=q.device)
        distances = (keys[start:, None] - keys).clamp(min=0)
        if self.config.position == "alibi":
            slopes = torch.tensor(_slopes(self.config.num_attention_heads), dtype=compute)
            scores = scores - slopes.to(q.device)[:, None, None] * distances
        elif self.config.position == "t5":
            scores = scores + self.relative_bias[_buckets(distances)].permute(2, 0, 1).to(compute)
        scores = scores.masked_fill(mask, torch.finfo(compute).min)
        mixed = (scores.softmax(dim=-1) @ v.to(compute)).to(hidden.dtype)
        return self.output(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linear layers around a GELU, four times as wide."""

    def __init__(self, config: AlibiLmConfig) -> None:
        super().__init__()
        bias, width = config.architecture == "bloom", config.hidden_size
        self.approximate = "tanh" if config.architecture == "bloom" else "none"
        self.up = nn.Linear(width, 4 * width, bias=bias)
        self.down = nn.Linear(4 * width, width, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, T, hidden_size] to the same."""
        return self.down(F.gelu(self.up(hidden), approximate=self.approximate))


class Block(nn.Module):
    """A pre-LayerNorm transformer block."""

    def __init__(self, config: AlibiLmConfig, index: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = _norm(config), _norm(config)
        self.attention, self.mlp = Attention(config, index), MLP(config)

    def forward(self, hidden: Tensor, mask: Tensor, cache: Any) -> Tensor:
        """[B, T, hidden_size] to the same."""
        hidden = hidden + self.attention(self.attention_norm(hidden), mask, cache)
        return hidden + self.mlp(self.mlp_norm(hidden))


class Head(nn.Module):
    """The final norm and, where the embeddings are not tied, the output matrix."""

    def __init__(self, config: AlibiLmConfig) -> None:
        super().__init__()
        self.norm = _norm(config)
        if not config.tied_embeddings:
            self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))


class AlibiLmForCausalLM(PreTrainedModel, GenerationMixin):
    """The whole decoder, with a cache and padding on the left."""

    config_class = AlibiLmConfig

    def __init__(self, config: AlibiLmConfig) -> None:
        super().__init__(config)
        self.embedding = Embedding(config)
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.head = Head(config)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """The folder has every weight; none is drawn."""

    def get_input_embeddings(self) -> nn.Module:
        """The embedding."""
        return self.embedding

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int = 0,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        """Logits [B, T, V] of input_ids [B, T]; the tokens follow those in the cache."""
        state = cache if cache is not None else past_key_values
        if state is None and use_cache:
            state = DynamicCache()
        past = 0 if state is None else int(state.get_seq_length())
        total = past + input_ids.shape[1]
        keys = torch.arange(total, device=input_ids.device)
        distances = keys[past:, None] - keys
        unseen = distances < 0
        if self.config.window is not None:
            unseen = unseen | (distances >= self.config.window)
        mask, positions = unseen[None, None], keys[None]
        if attention_mask is not None:
            mask = mask | (attention_mask[:, None, None, :total] == 0)
            positions = (attention_mask[:, :total].cumsum(-1) - 1).clamp(min=0)
        hidden = self.embedding(input_ids, positions[:, past:])
        for block in self.blocks:
            hidden = block(hidden, mask, state)
        normed = self.head.norm(hidden[:, -logits_to_keep:])
        tied = self.config.tied_embeddings
        logits = F.linear(normed, self.embedding.weight if tied else self.head.weight)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{_CACHE: state})
