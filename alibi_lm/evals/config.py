"""Eval suites: what `alibi-lm eval` runs on a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from alibi_lm.errors import Problem


@dataclass
class PerplexityConfig:
    """Perplexity at several lengths over the same tokens."""

    lengths: list[int] | None = None
    """Window lengths in tokens; by default 1/2, 1, 2, 4, 8, 16 times the training length."""
    corpus: str | None = None
    """Prefix of the token files to score; by default the run's validation corpora."""
    max_tokens: int | None = None
    """Stop taking documents once this many tokens are reached; by default all long documents."""
    batch_tokens: int = 16384
    """Tokens put through the model at once."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the model; losses are fp32 always."""


@dataclass
class NeedleConfig:
    """Needle in a haystack: depth by length."""

    lengths: list[int] | None = None
    """Prompt lengths in tokens; by default 1/2, 1, 2, 4, 8, 16 times the training length."""
    depths: list[float] = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0])
    """Where the needle lies, as shares of the length."""
    num_trials: int = 10
    """Prompts a cell."""
    corpus: str | None = None
    """Prefix of the token files that the haystack is cut from."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the model."""
    seed: int = 0
    """Seed of haystacks, keys and answers."""

    def problems(self, key: str) -> Iterator[Problem]:
        """The rules of this section that are broken."""
        for depth in self.depths:
            if not 0 <= depth <= 1:
                yield Problem(f"{key}depths", depth, "is not a share", "give 0 to 1")


@dataclass
class SuiteConfig:
    """Everything that an eval suite YAML can hold."""

    perplexity: PerplexityConfig = field(default_factory=PerplexityConfig)
    """Settings of `alibi-lm eval perplexity`."""
    needle: NeedleConfig = field(default_factory=NeedleConfig)
    """Settings of `alibi-lm eval needle`."""
