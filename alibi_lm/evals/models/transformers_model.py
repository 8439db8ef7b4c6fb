"""Hugging Face folders and models to evaluate."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from alibi_lm.data.tokenizer import Tokenizer
from alibi_lm.evals.models.base import HF, Engine, EvalModel, EvalOptions
from alibi_lm.evals.models.scorer import DTYPES, Scorer, native_scorer
from alibi_lm.evals.models.transformers_scorer import TransformersScorer
from alibi_lm.hf.importing import loading
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.decoder import Decoder
from alibi_lm.parallel.mesh import NO_PARALLEL
from alibi_lm.utils.errors import ConfigError, Problem

RESULTS = Path("evals") / "hf"
"""Folder, below the current one, of results of Hugging Face models; theirs is not written to."""


def open_hf(name: str, options: EvalOptions) -> EvalModel:
    """The model of a folder, or of a name on the hub.

    Raises:
        CheckpointError: it cannot be used.
        ConfigError: the native engine is asked for, and cannot compute the model.
    """
    folder = loading.find_folder(name)
    reason = loading.unsupported_reason(folder)
    if options.engine == "native" and reason is not None:
        rule = f"cannot compute {HF}{name} ({reason})"
        raise ConfigError(Problem("--engine", "native", rule, "give --engine hf"))
    if options.engine == "hf" or reason is not None:
        return TransformersModel(name, folder, options)
    return ImportedModel(name, folder, options)


class HuggingFaceModel(EvalModel):
    """A Hugging Face folder, computed by either engine."""

    engine: Engine

    def __init__(self, name: str, folder: Path, options: EvalOptions) -> None:
        super().__init__(options)
        self.name, self.folder = name, folder

    @property
    def argument(self) -> str:
        """The name as it was given."""
        return HF + self.name

    @property
    def title(self) -> str:
        """The folder's or the model's name."""
        return self.folder.name if Path(self.name).is_dir() else self.name

    @property
    def subtitle(self) -> str:
        """The digest, and what computes it."""
        by = "this project's own model" if self.engine == "native" else "its class in transformers"
        return f"Files {self.digest[:12]}, computed by {by}"

    @property
    def step(self) -> int | None:
        """None: a Hugging Face folder does not state it."""
        return None

    @cached_property
    def digest(self) -> str:
        """Digest of the files that model and tokenizer are read from."""
        return loading.weights_digest(self.folder)

    @cached_property
    def declared_training_length(self) -> int | None:
        """From config.json or the manifest of an export."""
        return loading.training_length(self.folder)

    @property
    def default_corpora(self) -> Sequence[str]:
        """None: a Hugging Face folder names no corpus."""
        return []

    @property
    def default_evals_folder(self) -> Path:
        """A folder of its own below the current one."""
        name = self.title.replace("/", "--").replace("@", "--")
        return RESULTS / f"{name}-{self.digest[:8]}"

    @property
    def default_engine(self) -> Engine | None:
        """This project's own model, where it can compute the folder."""
        return "native" if loading.unsupported_reason(self.folder) is None else "hf"

    @property
    def settings(self) -> dict[str, Any]:
        """The user's options, and the engine."""
        return {**super().settings, "engine": self.engine}


class ImportedModel(HuggingFaceModel):
    """A BLOOM or MPT folder, imported into memory and computed by our own model."""

    engine: Engine = "native"

    def __init__(self, name: str, folder: Path, options: EvalOptions) -> None:
        super().__init__(name, folder, options)
        self._imported = loading.ImportedFolder(folder)

    @property
    def max_input_length(self) -> int | None:
        """None: linear biases take any length."""
        return None

    @cached_property
    def num_parameters(self) -> int:
        """Parameters of our own decoder."""
        with torch.device("meta"):
            return Decoder(self._imported.config.model, seed=None).num_parameters()

    @property
    def model_config(self) -> ModelConfig | None:
        """The config that the folder is imported with."""
        return self._imported.config.model

    def tokenizer(self) -> Tokenizer | None:
        """The folder's."""
        return self._imported.tokenizer()

    def _make_scorer(
        self, precision: str, pruning_tolerance: float | None, scaling: dict[str, Any] | None
    ) -> Scorer:
        self.ranks.check(self._imported.config)
        ranks, device = self.ranks, self.options.device
        return native_scorer(
            self._imported, precision, pruning_tolerance, scaling, ranks.tp, device
        )

    def decoder(self, dtype: torch.dtype = torch.float32) -> Decoder:
        """The model as our own module."""
        return self._imported.decoder(dtype, tp=NO_PARALLEL)


class TransformersModel(HuggingFaceModel):
    """Any causal language model, computed by its class in `transformers`."""

    engine: Engine = "hf"

    def __init__(self, name: str, folder: Path, options: EvalOptions) -> None:
        super().__init__(name, folder, options)
        self._hf_folder = loading.TransformersFolder(folder)
        self._tokenizer = self._hf_folder.tokenizer()

    @property
    def max_input_length(self) -> int | None:
        """Rows of the position table, if the class has one."""
        return self._hf_folder.longest_input

    @property
    def num_parameters(self) -> int:
        """Parameters of the class."""
        return self._hf_folder.num_parameters

    @property
    def model_config(self) -> ModelConfig | None:
        """None: `transformers` computes it."""
        return None

    def tokenizer(self) -> Tokenizer | None:
        """As `AutoTokenizer` gives it."""
        return self._tokenizer

    def _make_scorer(
        self, precision: str, pruning_tolerance: float | None, scaling: dict[str, Any] | None
    ) -> Scorer:
        self.ranks.check(None)
        problems = []
        if pruning_tolerance:
            rule = "only this project's own model prunes attention"
            problems.append(
                Problem(
                    "pruning_tolerance", pruning_tolerance, rule, "leave it out, or set it to 0"
                )
            )
        if scaling is not None:
            rule = "only this project's own model takes another scaling of positions"
            problems.append(Problem("scaling", scaling, rule, "leave it out"))
        if problems:
            raise ConfigError(*problems)
        model = self._hf_folder.load(DTYPES[precision])
        return TransformersScorer(model, self.max_input_length, self.options.device)

    def decoder(self, dtype: torch.dtype = torch.float32) -> Decoder:
        """Refused.

        Raises:
            ConfigError: always.
        """
        rule = "this eval needs this project's own model"
        fix = "give the folder of a BLOOM or MPT model, without --engine hf"
        raise ConfigError(Problem("--engine", self.engine, rule, fix))
