"""The models that evals measure: weights, tokenizer, corpora and the folder of the results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch

from alibi_lm.checkpoint.config_paths import find_prefix, validation_corpora
from alibi_lm.data.tokenizer import Tokenizer
from alibi_lm.evals.config import SuiteConfig
from alibi_lm.evals.models.scorer import Scorer, native_scorer
from alibi_lm.evals.models.sharded import ONE_PROCESS, EvalRanks, ShardedScorer
from alibi_lm.evals.text_corpus import tokenized
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.decoder import Decoder
from alibi_lm.parallel.errors import run_on_all_ranks
from alibi_lm.utils.errors import ConfigError, DataError, Problem

if TYPE_CHECKING:
    from alibi_lm.checkpoint.step import Checkpoint


Engine = Literal["native", "hf"]
HF = "hf:"
"""Prefix of the name of a Hugging Face folder or model."""


@dataclass(frozen=True)
class EvalOptions:
    """Options that apply to any model."""

    engine: Engine | None = None
    """What computes a Hugging Face model: our own decoder, or its class in `transformers`."""
    out: Path | None = None
    """Where results are written, instead of the model's own folder."""
    corpus: str | None = None
    """Prefix of the token files to read, instead of the model's own."""
    text: Sequence[str] = ()
    """Text files, globs or folders to read instead, tokenized with the model's tokenizer."""
    training_length: int | None = None
    """Tokens of a training sample, instead of what the model says."""
    ranks: EvalRanks = ONE_PROCESS
    """The processes that score together."""
    device: str | None = None
    """The device to compute on, as `get_device` takes it."""

    @classmethod
    def of(
        cls,
        suite: SuiteConfig,
        engine: Engine | None,
        out: Path | None,
        ranks: EvalRanks,
        device: str | None = None,
    ) -> Self:
        """A suite's options and a command's."""
        text = [suite.text] if isinstance(suite.text, str) else suite.text or ()
        return cls(engine, out, suite.corpus, tuple(text), suite.training_length, ranks, device)


DEFAULTS = EvalOptions()


class EvalModel(ABC):
    """A model to evaluate. Make one from a run with `NativeModel(open_checkpoint(path))`."""

    def __init__(self, options: EvalOptions = DEFAULTS) -> None:
        self.options = options

    @property
    def ranks(self) -> EvalRanks:
        """The processes that score together."""
        return self.options.ranks

    @property
    @abstractmethod
    def argument(self) -> str:
        """Its name on the command line."""

    @property
    @abstractmethod
    def title(self) -> str:
        """Its name in a heading."""

    @property
    @abstractmethod
    def subtitle(self) -> str:
        """Which weights these are."""

    @property
    @abstractmethod
    def step(self) -> int | None:
        """Optimizer steps done, if known."""

    @property
    @abstractmethod
    def digest(self) -> str:
        """Equal digests: equal weights and settings of the model."""

    @property
    def training_length(self) -> int:
        """Tokens of a training sample; results are relative to it.

        Raises:
            ConfigError: neither the model nor the user states it.
        """
        length = self.options.training_length or self.declared_training_length
        if length is None:
            rule = f"{self.argument} does not say how long its training samples were"
            fix = "give training_length=TOKENS"
            raise ConfigError(Problem("training_length", None, rule, fix))
        return length

    @property
    @abstractmethod
    def declared_training_length(self) -> int | None:
        """Tokens of a training sample, if the model states it."""

    @property
    @abstractmethod
    def max_input_length(self) -> int | None:
        """Longest input in tokens; None if any length is allowed."""

    @property
    @abstractmethod
    def num_parameters(self) -> int:
        """Number of parameters; shared ones count once."""

    @property
    @abstractmethod
    def model_config(self) -> ModelConfig | None:
        """The model's config, or None for a model computed by its class in `transformers`."""

    @property
    def corpora(self) -> Sequence[str]:
        """Prefixes of the token files that are read by default; text is tokenized into one.

        Raises:
            DataError: the text cannot be read, there is no tokenizer for it, or a validation
                corpus of the run is not found.
        """
        if self.options.corpus is not None:
            return [find_prefix("corpus", self.options.corpus, [Path.cwd()], "check the prefix")]
        if self.options.text:
            return [str(tokenized(self.options.text, self.tokenizer(), self.argument,
                                  self.evals_folder / "text"))]  # fmt: skip
        return self.default_corpora

    @property
    @abstractmethod
    def default_corpora(self) -> Sequence[str]:
        """Prefixes of the validation corpora of the model's run.

        Raises:
            DataError: one of them is not found.
        """

    @property
    def evals_folder(self) -> Path:
        """Where results are written."""
        return self.options.out or self.default_evals_folder

    @property
    @abstractmethod
    def default_evals_folder(self) -> Path:
        """Where results are written by default."""

    @property
    def default_engine(self) -> Engine | None:
        """The default engine; None for a model that has only one."""
        return None

    @property
    def settings(self) -> dict[str, Any]:
        """User options that change results, other than the weights."""
        length = self.options.training_length
        return {} if length is None else {"training_length": length}

    @abstractmethod
    def tokenizer(self) -> Tokenizer | None:
        """Its tokenizer, or None where it has none."""

    def require_tokenizer(self, what: str) -> Tokenizer:
        """Its tokenizer, to write `what` with.

        Raises:
            DataError: it has none.
        """
        tokenizer = self.tokenizer()
        if tokenizer is None:
            rule = f"has no tokenizer to write {what} with"
            fix = "train with data.tokenizer set, or put its tokenizer into the Hugging Face folder"
            raise DataError(Problem(self.argument, None, rule, fix))
        return tokenizer

    def scorer(
        self,
        precision: str,
        pruning_tolerance: float | None = 0.0,
        scaling: dict[str, Any] | None = None,
    ) -> Scorer:
        """A scorer of text with this model.

        Args:
            precision: `fp32` or `bf16`.
            pruning_tolerance: as `NativeScorer` takes it.
            scaling: scaling of positions instead of its own.

        Raises:
            ConfigError: the model does not allow these settings, or these ranks cannot share it.
        """
        scorer = run_on_all_ranks(lambda: self._make_scorer(precision, pruning_tolerance, scaling))
        return scorer if self.ranks.size == 1 else ShardedScorer(scorer, self.ranks)

    @abstractmethod
    def _make_scorer(
        self, precision: str, pruning_tolerance: float | None, scaling: dict[str, Any] | None
    ) -> Scorer:
        """This rank's scorer."""

    @abstractmethod
    def decoder(self, dtype: torch.dtype = torch.float32) -> Decoder:
        """The model as our own module.

        Raises:
            ConfigError: it is computed by its class in `transformers`.
        """


class NativeModel(EvalModel):
    """A checkpoint of a run."""

    def __init__(self, checkpoint: Checkpoint, options: EvalOptions = DEFAULTS) -> None:
        super().__init__(options)
        self.checkpoint = checkpoint

    @property
    def argument(self) -> str:
        """The run folder."""
        return str(self.checkpoint.run_folder)

    @property
    def title(self) -> str:
        """The run folder's name."""
        return self.checkpoint.run_folder.name

    @property
    def subtitle(self) -> str:
        """Step and date."""
        saved = self.checkpoint.meta.get("saved_at", "")
        return f"Checkpoint of step {self.checkpoint.step:,}, saved {saved}"

    @property
    def step(self) -> int | None:
        """Optimizer steps done."""
        return self.checkpoint.step

    @property
    def digest(self) -> str:
        """The checkpoint's."""
        return self.checkpoint.digest

    @property
    def declared_training_length(self) -> int | None:
        """The run's."""
        return self.checkpoint.config.train.sequence_length

    @property
    def max_input_length(self) -> int | None:
        """Rows of a table of learned positions."""
        return self.checkpoint.config.model.max_positions

    @property
    def num_parameters(self) -> int:
        """From the shapes in the checkpoint."""
        shapes = self.checkpoint.meta["parameters"].values()
        return sum(int(torch.Size(shape).numel()) for shape in shapes)

    @property
    def model_config(self) -> ModelConfig | None:
        """The run's model."""
        return self.checkpoint.config.model

    @property
    def default_corpora(self) -> Sequence[str]:
        """The run's validation corpora."""
        fix = "give corpus=PREFIX (token files without .bin) or text=FILES"
        return validation_corpora(self.checkpoint, fix)

    @property
    def default_evals_folder(self) -> Path:
        """The step's folder among the run's evals."""
        return self.checkpoint.evals_folder

    def tokenizer(self) -> Tokenizer | None:
        """The run's tokenizer."""
        return self.checkpoint.tokenizer()

    def _make_scorer(
        self, precision: str, pruning_tolerance: float | None, scaling: dict[str, Any] | None
    ) -> Scorer:
        self.ranks.check(self.checkpoint.config)
        ranks, device = self.ranks, self.options.device
        return native_scorer(
            self.checkpoint, precision, pruning_tolerance, scaling, ranks.tp, device
        )

    def decoder(self, dtype: torch.dtype = torch.float32) -> Decoder:
        """The model with this step's weights."""
        return self.checkpoint.decoder(dtype=dtype)
