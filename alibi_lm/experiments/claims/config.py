"""A claims suite: the models to train, what is measured on them, and where the page goes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveInt

from alibi_lm.utils.errors import Problem
from alibi_lm.utils.settings import Distinct, Section, rule


@dataclass
class GroupConfig(Section):
    """Models that differ in a few settings, each trained from the same seeds."""

    base: dict[str, Any] = field(default_factory=dict)
    """Config of every run of the group, without `run` and `train.seed`."""
    models: dict[str, Any] = field(default_factory=dict)
    """Settings in which each model, by name, differs from `base`; dotted or nested."""
    seeds: Annotated[list[NonNegativeInt], Distinct] = field(default_factory=lambda: [0, 1, 2])
    """train.seed of each model's runs; runs of one seed see the same samples, so they pair."""
    lengths: list[PositiveInt] = field(default_factory=list)
    """Lengths to evaluate at: tokens, or items of generalization problems."""
    num_trials: PositiveInt = 50
    """Prompts per cell, in evals that use prompts."""
    max_tokens: PositiveInt | None = None
    """Tokens of the validation corpora to score at most; by default every long document."""
    truncated_context_targets: PositiveInt = 2000
    """Targets of the truncated-context baseline."""

    @rule
    def _models_have_seeds_and_lengths(self) -> Iterator[Problem]:
        if self.models and not self.seeds:
            yield Problem("seeds", self.seeds, "is empty", "give for example [0, 1, 2]")
        if self.models and not self.lengths:
            yield Problem("lengths", self.lengths, "is empty", "give at least one length")

    @rule
    def _models_have_plain_names(self) -> Iterator[Problem]:
        for name in self.models:
            if not name.replace("-", "").replace("_", "").isalnum():
                fix = "use letters, digits, - and _"
                yield Problem(f"models.{name}", None, "is no plain name", fix)

    @rule
    def _the_suite_sets_run_and_seed(self) -> Iterator[Problem]:
        if "run" in self.base or "seed" in self.base.get("train", {}):
            rule = "sets run or train.seed, which the suite sets itself"
            yield Problem("base", None, rule, "take them out; seeds go into .seeds")


@dataclass
class CostConfig(Section):
    """Training steps of several position schemes, timed in one process."""

    lengths: list[PositiveInt] = field(default_factory=lambda: [512])
    """Tokens per sample."""
    tokens: PositiveInt = 4096
    """Tokens per step."""
    repeats: Annotated[int, Field(ge=3)] = 7
    """Interleaved repetitions of each measurement."""
    model: dict[str, Any] = field(default_factory=dict)
    """The model, without its position scheme."""

    @rule
    def _lengths_fit_a_step(self) -> Iterator[Problem]:
        for index, length in enumerate(self.lengths):
            if length > self.tokens:
                rule = f"exceeds .tokens = {self.tokens}"
                yield Problem(f"lengths.{index}", length, rule, "lower it")


@dataclass
class ClaimsConfig(Section):
    """A claims suite."""

    results: str = "evals/results/claims"
    """Folder for the page, its pictures and claims.json."""
    work: str = "runs/claims"
    """Folder for the runs, as WORK/GROUP/MODEL/seed_N."""
    recipes: list[str] = field(default_factory=list)
    """Recipes to prepare first."""
    text: GroupConfig = field(default_factory=GroupConfig)
    """Language models of real text, evaluated by their losses past the training length."""
    recall: GroupConfig = field(default_factory=GroupConfig)
    """Models trained on recall documents, evaluated by needles."""
    generalization: GroupConfig = field(default_factory=GroupConfig)
    """Models of copying, addition and sorting, evaluated past the trained number of items."""
    cost: CostConfig = field(default_factory=CostConfig)
    """Time and memory of a training step."""

    def groups(self) -> dict[str, GroupConfig]:
        """The groups by name."""
        return {name: getattr(self, name) for name in ("text", "recall", "generalization")}
