"""Evals on several ranks: which rank scores which rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from alibi_lm.config import Config
from alibi_lm.evals.models.scorer import PromptScores, Scorer
from alibi_lm.parallel.config import ParallelConfig
from alibi_lm.parallel.errors import gather_results
from alibi_lm.parallel.mesh import NO_PARALLEL, ParallelDim
from alibi_lm.parallel.rules import layout_problems
from alibi_lm.utils.errors import ConfigError, Problem


@dataclass(frozen=True)
class EvalRanks:
    """The processes of a job: `tp` share a model, `dp` share the documents and prompts."""

    rank: int = 0
    tp: ParallelDim = NO_PARALLEL
    dp: ParallelDim = NO_PARALLEL

    @property
    def size(self) -> int:
        """Processes in all."""
        return self.tp.size * self.dp.size

    def check(self, config: Config | None) -> None:
        """Raise if these ranks cannot share the model; None: one computed by `transformers`.

        Raises:
            ConfigError: naming every rule broken.
        """
        if self.tp.size == 1:
            return
        if config is None:
            rule = "only this project's own model is split over ranks"
            fix = "leave it out; documents are shared among ranks all the same"
            raise ConfigError(Problem("parallel.tp", self.tp.size, rule, fix))
        split = Config(
            run=config.run, model=config.model, parallel=ParallelConfig(tp=self.tp.size)
        )  # fmt: skip
        problems = list(layout_problems(split, self.size))
        if problems:
            raise ConfigError(*problems)


ONE_PROCESS = EvalRanks()
"""A job of one process."""


class ShardedScorer:
    """Splits the rows of a batch over the data-parallel ranks; all of them get all results.

    Every rank calls it with the same input. A rank without rows waits for the others.
    """

    def __init__(self, scorer: Scorer, ranks: EvalRanks) -> None:
        self._scorer, self._dp = scorer, ranks.dp
        self.length_dependent = getattr(scorer, "length_dependent", False)
        self._facts = {"data_parallel": ranks.dp.size, "tensor_parallel": ranks.tp.size}

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self._scorer.vocab_size

    @property
    def dp_size(self) -> int:
        """Number of data-parallel ranks."""
        return self._dp.size

    def token_losses(self, tokens: Tensor) -> Tensor:
        """As `Scorer.token_losses`."""
        rows = self._rows(len(tokens))
        local = tokens[rows]
        parts = gather_results(
            lambda: self._scorer.token_losses(local) if len(local) else None, self._dp.group
        )
        return torch.cat([part for part in parts if part is not None])

    def loglikelihood_and_generate(
        self, prompts: Tensor, candidates: Tensor, max_new_tokens: int
    ) -> PromptScores:
        """As `Scorer.loglikelihood_and_generate`."""
        rows = self._rows(len(prompts))

        def score() -> PromptScores | None:
            if len(prompts[rows]) == 0:
                return None
            return self._scorer.loglikelihood_and_generate(
                prompts[rows], candidates[rows], max_new_tokens
            )

        parts = [part for part in gather_results(score, self._dp.group) if part is not None]
        return PromptScores(
            torch.cat([part.loglikelihoods for part in parts]),
            torch.cat([part.generated for part in parts]),
        )

    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
        """As `Scorer.generate`; every rank does the same."""
        return self._scorer.generate(prompt, max_new_tokens)

    def describe(self) -> dict[str, Any]:
        """As `Scorer.describe`, and the ranks."""
        return {**self._scorer.describe(), "ranks": self._facts}

    def _rows(self, count: int) -> slice:
        """This rank's rows of `count`."""
        share, more = divmod(count, self._dp.size)
        first = self._dp.rank * share + min(self._dp.rank, more)
        return slice(first, first + share + (self._dp.rank < more))
