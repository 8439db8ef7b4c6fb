"""The `model` section of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from alibi_lm.utils.errors import Problem
from alibi_lm.utils.settings import Section, rule

Architecture = Literal["mpt", "bloom"]
Position = Literal["alibi", "alibi_learned", "sinusoidal", "learned", "rotary", "t5", "none"]
ScalingKind = Literal["linear", "ntk", "yarn", "longrope"]

SCALES: dict[ScalingKind, tuple[Position, ...]] = {
    "linear": ("alibi", "alibi_learned", "rotary"),
    "ntk": ("alibi", "alibi_learned", "rotary"),
    "yarn": ("rotary",),
    "longrope": ("rotary",),
}
"""The position schemes that each kind of scaling is defined for."""


@dataclass
class ScalingConfig(Section):
    """Positions divided by a fixed factor, so that longer inputs look like those trained on.

    The factor is the same for every input: it never depends on the input's length.
    """

    kind: ScalingKind
    """linear (Position Interpolation), ntk (NTK-aware), yarn or longrope."""
    factor: Annotated[float, Field(ge=1)]
    """How many times longer inputs may be; 1 changes nothing."""
    original_length: Annotated[int, Field(ge=2)] | None = None
    """Training length in tokens; required by yarn and longrope, not allowed otherwise."""
    factors: list[PositiveFloat] | None = None
    """One divisor per pair of head dimensions; required by longrope, not allowed otherwise."""

    @rule
    def _length_goes_with_its_kinds(self) -> Iterator[Problem]:
        if (self.kind in ("yarn", "longrope")) != (self.original_length is not None):
            rule = "is needed by kinds yarn and longrope, and by no other"
            fix = "set it with them, leave it out otherwise"
            yield Problem("original_length", self.original_length, rule, fix)

    @rule
    def _factors_go_with_longrope(self) -> Iterator[Problem]:
        if (self.kind == "longrope") != (self.factors is not None):
            rule = "is needed by kind longrope, and by no other"
            fix = "set it with longrope, leave it out otherwise"
            yield Problem("factors", self.factors, rule, fix)


@dataclass
class ModelConfig(Section):
    """The architecture of the decoder."""

    aliases: ClassVar[Mapping[str, str]] = {
        "architecture": "shape",
        "num_layers": "n_layer n_layers num_hidden_layers layers depth",
        "hidden_size": "d_model n_embd dim width",
        "num_heads": "n_head n_heads heads num_attention_heads",
        "num_kv_heads": "n_kv_heads kv_heads num_key_value_heads",
        "vocab_size": "n_vocab vocabulary_size",
        "position": "pos_emb position_embedding",
        "scaling": "rope_scaling",
        "window": "sliding_window",
        "max_positions": "max_position_embeddings",
        "tied_embeddings": "tie_word_embeddings",
        "initializer_range": "init_std",
    }

    architecture: Architecture = "mpt"
    """mpt (no biases, exact GELU) or bloom (biases, embedding LayerNorm, tanh GELU)."""
    num_layers: PositiveInt = 4
    """Number of transformer layers."""
    hidden_size: PositiveInt = 256
    """Width of the residual stream."""
    num_heads: PositiveInt = 8
    """Number of query heads."""
    num_kv_heads: PositiveInt | None = None
    """Number of key/value heads: num_heads (default), 1 (multi-query) or a divisor (grouped)."""
    vocab_size: PositiveInt | None = None
    """Number of token ids; by default the tokenizer's."""
    position: Position = "alibi"
    """Position scheme: alibi (linear biases), alibi_learned (each head of each layer learns its
    slope, starting from the paper's) or one of the schemes they are compared with."""
    scaling: ScalingConfig | None = None
    """Divides the positions of alibi, alibi_learned or rotary; by default they are not scaled."""
    window: PositiveInt | None = None
    """Sliding window: keys that a query sees, itself included; by default all before it."""
    max_positions: PositiveInt | None = None
    """Rows of the position table; required by position: learned, not allowed otherwise."""
    tied_embeddings: bool = True
    """Whether the output layer shares the embedding's weight."""
    initializer_range: PositiveFloat = 0.02
    """Standard deviation of the initial weights; residual outputs get it over sqrt(2 layers)."""

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads, the default filled in."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @rule
    def _heads_divide_the_width(self) -> Iterator[Problem]:
        if self.hidden_size % self.num_heads:
            rule = f"does not divide .hidden_size = {self.hidden_size}"
            yield Problem("num_heads", self.num_heads, rule, "change one of them")

    @rule
    def _key_heads_divide_the_heads(self) -> Iterator[Problem]:
        if self.num_heads % self.kv_heads:
            rule = f"does not divide .num_heads = {self.num_heads}"
            yield Problem("num_kv_heads", self.num_kv_heads, rule, "give 1 or a divisor")

    @rule
    def _rotary_turns_pairs(self) -> Iterator[Problem]:
        if self.position == "rotary" and self.head_dim % 2:
            rule = f"rotary turns pairs of dimensions, but a head has {self.head_dim}"
            yield Problem("position", self.position, rule, "choose an even head width")

    @rule
    def _learned_positions_have_a_table(self) -> Iterator[Problem]:
        if (self.position == "learned") != (self.max_positions is not None):
            rule = "is needed by position: learned, and by no other"
            fix = "set it with learned, leave it out otherwise"
            yield Problem("max_positions", self.max_positions, rule, fix)

    @rule
    def _scaling_suits_the_position(self) -> Iterator[Problem]:
        if self.scaling is not None and self.position not in SCALES[self.scaling.kind]:
            rule = f"is not defined for position: {self.position}"
            fix = f"it goes with {', '.join(SCALES[self.scaling.kind])}"
            yield Problem("scaling.kind", self.scaling.kind, rule, fix)

    @rule
    def _scaling_factors_fit_a_head(self) -> Iterator[Problem]:
        if self.scaling is None or self.scaling.kind != "longrope":
            return
        factors = self.scaling.factors
        if factors is not None and len(factors) != self.head_dim // 2:
            rule = "is not one positive number for each pair of a head's dimensions"
            yield Problem("scaling.factors", factors, rule, f"give {self.head_dim // 2}")

    @rule
    def _ntk_has_something_to_scale(self) -> Iterator[Problem]:
        if self.scaling is None or self.scaling.kind != "ntk":
            return
        if self.position == "rotary" and self.head_dim < 4:
            rule = f"a head has {self.head_dim} dimensions, all of one wavelength"
            fix = "choose heads of at least 4, or kind: linear"
            yield Problem("scaling.kind", "ntk", rule, fix)
        elif self.position != "rotary" and self.num_heads == 1:
            rule = "one head has no steepest and flattest slope"
            yield Problem("scaling.kind", "ntk", rule, "choose more heads, or kind: linear")
