"""The measurements on a suite's runs, by model and length, one value a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from alibi_lm.experiments.claims.statistics import Estimate, estimate


class Missing(LookupError):
    """The suite lacks a model, a length or a measurement."""


@dataclass
class Measurements:
    """Measurements by group and model, one a seed in the order of the suite's seeds."""

    runs: dict[tuple[str, str], list[dict[str, Any]]]
    cost: dict[str, Any] | None = None
    training_lengths: dict[tuple[str, str], int] = field(default_factory=dict)

    def of(self, group: str, model: str) -> list[dict[str, Any]]:
        """The measurements of a model.

        Raises:
            Missing: the suite does not train it, or it has not been trained from every seed.
        """
        runs = self.runs.get((group, model))
        if not runs:
            raise Missing(
                f"{group} model {model} is not in the suite, or not trained from every seed"
            )
        return runs

    def trained(self, model: str, group: str = "text") -> int:
        """Tokens of a training sample of a model."""
        self.of(group, model)
        return self.training_lengths[group, model]

    def losses(self, model: str, length: int, kind: str = "losses") -> np.ndarray:
        """Mean loss in nats a token in windows of `length`, `[seeds]`.

        `kind="windowed"` is the loss with a hard window of the training length in every layer.

        Raises:
            Missing: it was not measured.
        """
        values = [run.get(kind, {}).get(str(length)) for run in self.of("text", model)]
        if None in values:
            raise Missing(f"{kind} of {model} at {length} tokens were not measured")
        return np.array(values, dtype=np.float64)

    def lengths(self, model: str) -> list[int]:
        """Lengths at which a text model was measured, ascending."""
        return sorted(int(n) for n in self.of("text", model)[0]["losses"])

    def recall(
        self, model: str, *, beyond: bool, variant: str = "plain", how: str = "ranking"
    ) -> np.ndarray:
        """Share of needles found, `[seeds]`.

        `beyond`: of needles farther away than the training length L; otherwise of those in
        prompts of at most L tokens.

        Raises:
            Missing: it was not measured.
        """
        limit, rates = self.trained(model, "recall"), []
        for run in self.of("recall", model):
            cells = run.get("variants", {}).get(variant)
            if cells is None:
                raise Missing(f"recall of {model}, {variant}, was not measured")
            chosen = [
                cell
                for cell in cells
                if (cell["distance"] > limit if beyond else cell["length"] <= limit)
            ]
            trials = sum(cell["trials"] for cell in chosen)
            if not trials:
                raise Missing(f"no needle of {model} lies {'beyond' if beyond else 'within'} L")
            rates.append(sum(cell[how] for cell in chosen) / trials)
        return np.array(rates)

    def accuracy(self, model: str, *, beyond: bool, tasks: Sequence[str] = ()) -> np.ndarray:
        """Mean exact-match accuracy of generalization tasks, `[seeds]`.

        `beyond`: at more items than trained; otherwise at up to the trained number.
        """
        rates = []
        for run in self.of("generalization", model):
            cells = [
                cell
                for cell in run["cells"]
                if (cell["items"] > run["trained_items"]) == beyond
                and (not tasks or cell["task"] in tasks)
            ]
            if not cells:
                raise Missing(f"{model} was not asked {'beyond' if beyond else 'within'} training")
            rates.append(float(np.mean([cell["rate"] for cell in cells])))
        return np.array(rates)

    def ratio(
        self, kind: str, scheme: str, baseline: str, length: int, baseline_length: int
    ) -> Estimate:
        """Time or memory of a training step relative to another scheme's, over repetitions.

        Raises:
            Missing: one of them was not measured.
        """
        rows = {} if self.cost is None else self.cost.get(kind, {})
        try:
            a, b = rows[scheme][str(length)], rows[baseline][str(baseline_length)]
        except KeyError as error:
            raise Missing(f"{kind} of {error.args[0]} was not measured") from None
        return estimate(np.array(a) / np.array(b))
