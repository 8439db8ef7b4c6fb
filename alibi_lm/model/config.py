"""The model section of a config."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from alibi_lm.errors import Problem

Shape = Literal["mpt", "bloom"]
Position = Literal["alibi", "sinusoidal", "learned", "rotary", "t5", "none"]


@dataclass
class ModelConfig:
    """The shape of the decoder."""

    shape: Shape = "mpt"
    """mpt (no biases, exact GELU) or bloom (biases, embedding LayerNorm, tanh GELU)."""
    num_layers: int = 4
    """Number of transformer blocks."""
    hidden_size: int = 256
    """Width of the residual stream."""
    num_heads: int = 8
    """Number of query heads."""
    num_kv_heads: int | None = None
    """Number of key/value heads: num_heads (default), 1 (multi-query) or a divisor (grouped)."""
    vocab_size: int | None = None
    """Number of token ids; by default what the data's tokenizer has."""
    position: Position = "alibi"
    """How positions enter: alibi (linear biases) or one of the schemes it is compared with."""
    window: int | None = None
    """Sliding window: a query sees this many keys, itself included; by default all before it."""
    max_positions: int | None = None
    """Rows of the position table; needed by, and only for, position: learned."""
    tied_embeddings: bool = True
    """Whether the output layer shares the embedding's weight."""
    initializer_range: float = 0.02
    """Standard deviation of the initial weights; residual outputs get it over sqrt(2 layers)."""

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads, the default filled in."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    def problems(self, key: str) -> Iterator[Problem]:
        """The rules of this section that are broken."""
        for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "vocab_size",
                     "window", "max_positions"):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                yield Problem(f"{key}{name}", value, "is not positive", "give at least 1")
        if self.initializer_range <= 0:
            yield Problem(f"{key}initializer_range", self.initializer_range, "is not positive",
                          "give a small standard deviation such as 0.02")  # fmt: skip
        if self.num_heads >= 1 and self.hidden_size % self.num_heads:
            yield Problem(f"{key}num_heads", self.num_heads,
                          f"does not divide {key}hidden_size = {self.hidden_size}",
                          "change one of them")  # fmt: skip
        if self.kv_heads >= 1 and self.num_heads % self.kv_heads:
            yield Problem(f"{key}num_kv_heads", self.num_kv_heads,
                          f"does not divide {key}num_heads = {self.num_heads}",
                          "give 1 or a divisor")  # fmt: skip
        if self.position == "rotary" and self.num_heads >= 1 and self.head_dim % 2:
            yield Problem(f"{key}position", self.position,
                          f"rotary turns pairs of dimensions, but a head has {self.head_dim}",
                          "choose an even head width")  # fmt: skip
        if (self.position == "learned") != (self.max_positions is not None):
            yield Problem(f"{key}max_positions", self.max_positions,
                          "is needed by position: learned, and by no other",
                          "set it with learned, leave it out otherwise")  # fmt: skip
