"""What is judged: a model with its text, its facts and the folder of its results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from alibi_lm.data.tokenizer import Tokenizer
from alibi_lm.evals.scorer import Scorer, native_scorer
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.decoder import Decoder

if TYPE_CHECKING:
    from alibi_lm.checkpoint.step import Step


class Subject(ABC):
    """A model that evals judge. Make one of a run with `NativeSubject(open_run(path))`."""

    @property
    @abstractmethod
    def argument(self) -> str:
        """What names it on the command line."""

    @property
    @abstractmethod
    def title(self) -> str:
        """Its name in a heading."""

    @property
    @abstractmethod
    def subtitle(self) -> str:
        """Which weights of that name these are."""

    @property
    @abstractmethod
    def step(self) -> int | None:
        """Optimizer steps done; None where nobody says."""

    @property
    @abstractmethod
    def digest(self) -> str:
        """Equal digests: equal weights and settings of the model."""

    @property
    @abstractmethod
    def training_length(self) -> int:
        """Tokens of a training sample, which results are related to."""

    @property
    @abstractmethod
    def longest_input(self) -> int | None:
        """Tokens that the model can take at most; None where any length goes."""

    @property
    @abstractmethod
    def num_parameters(self) -> int:
        """Its weights, each counted once."""

    @property
    @abstractmethod
    def model(self) -> ModelConfig | None:
        """The model in this project's own terms, or None where it is computed by other code."""

    @property
    @abstractmethod
    def validation(self) -> Sequence[str]:
        """Prefixes of the token files that are read by default."""

    @property
    @abstractmethod
    def evals_folder(self) -> Path:
        """Where results are written."""

    @property
    def settings(self) -> dict[str, Any]:
        """What the user chose of it, and a result depends on, beside the weights."""
        return {}

    @abstractmethod
    def tokenizer(self) -> Tokenizer | None:
        """Its tokenizer, or None where it has none."""

    @abstractmethod
    def scorer(
        self, precision: str, epsilon: float | None = 0.0, scaling: dict[str, Any] | None = None
    ) -> Scorer:
        """What scores text with it.

        Args:
            precision: `fp32` or `bf16`.
            epsilon: as `NativeScorer` takes it.
            scaling: scaling of positions instead of its own.

        Raises:
            ConfigError: it cannot be computed so.
        """

    @abstractmethod
    def decoder(self, dtype: torch.dtype = torch.float32) -> Decoder:
        """The model as our own module.

        Raises:
            ConfigError: it is computed by other code.
        """


class NativeSubject(Subject):
    """A checkpoint of a run."""

    def __init__(self, checkpoint: Step) -> None:
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
    def training_length(self) -> int:
        """The run's."""
        return self.checkpoint.config.train.sequence_length

    @property
    def longest_input(self) -> int | None:
        """Rows of a table of learned positions."""
        return self.checkpoint.config.model.max_positions

    @property
    def num_parameters(self) -> int:
        """By the shapes of the checkpoint."""
        shapes = self.checkpoint.meta["parameters"].values()
        return sum(int(torch.Size(shape).numel()) for shape in shapes)

    @property
    def model(self) -> ModelConfig | None:
        """The run's model."""
        return self.checkpoint.config.model

    @property
    def validation(self) -> Sequence[str]:
        """The run's validation corpora."""
        return self.checkpoint.config.data.validation

    @property
    def evals_folder(self) -> Path:
        """The step's folder among the run's evals."""
        return self.checkpoint.evals_folder

    def tokenizer(self) -> Tokenizer | None:
        """The run's tokenizer."""
        return self.checkpoint.tokenizer()

    def scorer(
        self, precision: str, epsilon: float | None = 0.0, scaling: dict[str, Any] | None = None
    ) -> Scorer:
        """As `native_scorer`."""
        return native_scorer(self.checkpoint, precision, epsilon, scaling)

    def decoder(self, dtype: torch.dtype = torch.float32) -> Decoder:
        """The model with this step's weights."""
        return self.checkpoint.decoder(dtype=dtype)


def open_subject(name: str) -> Subject:
    """The subject of a command: a run folder's newest complete step, or a step folder.

    Raises:
        CheckpointError: there is no complete checkpoint, or a file of it is damaged.
    """
    from alibi_lm.checkpoint.step import open_run

    return NativeSubject(open_run(name))
