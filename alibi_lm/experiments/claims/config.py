"""A claims suite: the models to train, what is measured on them, and where the page goes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from alibi_lm.utils.errors import Problem


@dataclass
class GroupConfig:
    """Models that differ in a few settings, each trained from the same seeds."""

    base: dict[str, Any] = field(default_factory=dict)
    """Config of every run of the group, without `run` and `train.seed`."""
    models: dict[str, Any] = field(default_factory=dict)
    """Name of a model: the settings in which it differs from `base`, dotted or nested."""
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    """train.seed of each model's runs. Equal seeds see the same samples: differences are paired."""
    lengths: list[int] = field(default_factory=list)
    """Lengths to judge the models at: tokens, or items of generalization tasks."""
    num_trials: int = 50
    """Prompts a cell, where prompts are put to the models."""
    max_tokens: int | None = None
    """Tokens of the validation corpora that are scored; by default all of long documents."""
    truncated_context_targets: int = 2000
    """Size of the sample on which the null model is scored."""

    def problems(self, key: str) -> Iterator[Problem]:
        """The rules of this section that are broken."""
        if self.models and not self.seeds:
            yield Problem(f"{key}seeds", self.seeds, "is empty", "give for example [0, 1, 2]")
        if len(set(self.seeds)) != len(self.seeds) or any(seed < 0 for seed in self.seeds):
            yield Problem(f"{key}seeds", self.seeds, "names a seed twice or a negative one",
                          "give different seeds of 0 or more")  # fmt: skip
        if self.models and (not self.lengths or min(self.lengths) < 1):
            yield Problem(f"{key}lengths", self.lengths, "is empty or not positive",
                          "give lengths of at least 1")  # fmt: skip
        for name in ("num_trials", "max_tokens", "truncated_context_targets"):
            value = getattr(self, name)
            if value is not None and value < 1:
                yield Problem(f"{key}{name}", value, "is not positive", "give at least 1")
        for name in self.models:
            if not name.replace("-", "").replace("_", "").isalnum():
                yield Problem(f"{key}models.{name}", None, "is no plain name",
                              "use letters, digits, - and _")  # fmt: skip
        if "run" in self.base or "seed" in self.base.get("train", {}):
            yield Problem(f"{key}base", None, "sets run or train.seed, which the suite sets itself",
                          f"take them out; seeds are {key}seeds")  # fmt: skip


@dataclass
class CostConfig:
    """Training steps of several position schemes, timed in one process."""

    lengths: list[int] = field(default_factory=lambda: [512])
    """Tokens of a sample."""
    tokens: int = 4096
    """Tokens of a step."""
    repeats: int = 7
    """Interleaved repetitions of each."""
    model: dict[str, Any] = field(default_factory=dict)
    """The model, without its position scheme."""

    def problems(self, key: str) -> Iterator[Problem]:
        """The rules of this section that are broken."""
        if self.repeats < 3:
            yield Problem(f"{key}repeats", self.repeats, "is less than 3", "give at least 3")
        for length in self.lengths:
            if not 1 <= length <= self.tokens:
                yield Problem(f"{key}lengths", length, f"is not in 1 to {key}tokens", "change it")


@dataclass
class ClaimsConfig:
    """Everything that a claims suite's YAML can hold."""

    results: str = "evals/results/claims"
    """Folder of the page, its pictures and claims.json."""
    work: str = "runs/claims"
    """Folder of the runs: WORK/GROUP/MODEL/seed_N."""
    recipes: list[str] = field(default_factory=list)
    """Recipes to prepare first."""
    text: GroupConfig = field(default_factory=GroupConfig)
    """Language models of real text, judged by their losses past the training length."""
    recall: GroupConfig = field(default_factory=GroupConfig)
    """Models trained on the retrieval curriculum, judged by needles."""
    generalization: GroupConfig = field(default_factory=GroupConfig)
    """Models of copying, addition and sorting, judged past the trained number of items."""
    cost: CostConfig = field(default_factory=CostConfig)
    """Time and memory of a training step."""

    def groups(self) -> dict[str, GroupConfig]:
        """The groups by name."""
        return {
            "text": self.text,
            "recall": self.recall,
            "generalization": self.generalization,
        }
