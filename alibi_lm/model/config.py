"""The model section of a config."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from alibi_lm.utils.errors import Problem

Architecture = Literal["mpt", "bloom"]
Position = Literal["alibi", "alibi_learned", "sinusoidal", "learned", "rotary", "t5", "none"]
ScalingKind = Literal["linear", "ntk", "yarn", "longrope"]

SCALES: dict[ScalingKind, tuple[Position, ...]] = {
    "linear": ("alibi", "alibi_learned", "rotary"),
    "ntk": ("alibi", "alibi_learned", "rotary"),
    "yarn": ("rotary",),
    "longrope": ("rotary",),
}
"""The positions that each kind of scaling is defined for."""


@dataclass
class ScalingConfig:
    """Positions squeezed by a fixed factor, so that longer inputs look like those trained on.

    The factor is the same for every input, however long: it never depends on the input's length.
    """

    kind: ScalingKind
    """linear (Position Interpolation), ntk (NTK-aware), yarn or longrope."""
    factor: float
    """How many times longer inputs are meant to be; 1 changes nothing."""
    original_length: int | None = None
    """The length trained at, in tokens; needed by, and only for, yarn and longrope."""
    factors: list[float] | None = None
    """One divisor a pair of a head's dimensions; needed by, and only for, longrope."""


@dataclass
class ModelConfig:
    """The architecture of the decoder."""

    architecture: Architecture = "mpt"
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
    """How positions enter: alibi (linear biases), alibi_learned (each head of each block learns its
    slope, from the paper's on) or one of the schemes they are compared with."""
    scaling: ScalingConfig | None = None
    """Squeezes the positions of alibi, alibi_learned or rotary; by default they are as they are."""
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
        yield from self._scaling_problems(f"{key}scaling.")

    def _scaling_problems(self, key: str) -> Iterator[Problem]:
        scaling = self.scaling
        if scaling is None:
            return
        if scaling.factor < 1:
            yield Problem(f"{key}factor", scaling.factor, "is less than 1", "give 1 or more")
        if self.position not in SCALES[scaling.kind]:
            yield Problem(f"{key}kind", scaling.kind,
                          f"is not defined for position: {self.position}",
                          f"it goes with {', '.join(SCALES[scaling.kind])}")  # fmt: skip
        original, factors = scaling.original_length, scaling.factors
        if (scaling.kind in ("yarn", "longrope")) != (original is not None):
            yield Problem(f"{key}original_length", original,
                          "is needed by kinds yarn and longrope, and by no other",
                          "set it with them, leave it out otherwise")  # fmt: skip
        elif original is not None and original < 2:
            yield Problem(f"{key}original_length", original, "is less than 2",
                          "give the length trained at, in tokens")  # fmt: skip
        if (scaling.kind == "longrope") != (factors is not None):
            yield Problem(f"{key}factors", factors, "is needed by kind longrope, and by no other",
                          "set it with longrope, leave it out otherwise")  # fmt: skip
        elif factors is not None and (
            min(factors, default=0) <= 0
            or (self.num_heads >= 1 and len(factors) != self.head_dim // 2)
        ):
            yield Problem(f"{key}factors", factors,
                          "is not one positive number for each pair of a head's dimensions",
                          f"give {self.head_dim // 2 if self.num_heads >= 1 else 'as many'}"
                          )  # fmt: skip
        if scaling.kind != "ntk":
            return
        if self.position == "rotary" and self.num_heads >= 1 and self.head_dim < 4:
            yield Problem(f"{key}kind", "ntk", f"a head has {self.head_dim} dimensions, all of one "
                          "wavelength", "choose heads of at least 4, or kind: linear")  # fmt: skip
        elif self.position != "rotary" and self.num_heads == 1:
            yield Problem(f"{key}kind", "ntk", "one head has no steepest and flattest slope",
                          "choose more heads, or kind: linear")  # fmt: skip
