"""What a run reads: corpora blended into samples, validation windows, and the tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from alibi_lm.checkpoint.config_paths import existing_path, find_prefix
from alibi_lm.config import Config
from alibi_lm.data.indexed import TokenFile
from alibi_lm.data.manifest import check_tokenizer, vocabulary_size
from alibi_lm.data.sampling import Blend, batch_indices
from alibi_lm.data.tokenizer import Tokenizer, load_tokenizer
from alibi_lm.evals.perplexity.windows import validation_batches
from alibi_lm.utils.errors import ConfigError, DataError, Problem, UserError

_LOOKED_AT = 1 << 22
"""Tokens of each file whose ids are checked at the start."""


@dataclass(frozen=True)
class TrainingData:
    """The opened inputs of a run."""

    config: Config
    blend: Blend
    corpora: list[TokenFile]
    validation: list[TokenFile]
    tokenizer: Tokenizer | None

    def micro_batches(self, step: int, rank: int, num_ranks: int) -> list[torch.Tensor]:
        """This rank's micro-batches of a step, each int64 `[micro_batch_size, L + 1]`.

        Raises:
            DataError: a token id is outside the model's vocabulary.
        """
        train = self.config.train
        batches = []
        for indices in batch_indices(
            step, train.global_batch_size, rank, num_ranks, train.micro_batch_size
        ):
            samples = self.blend.samples(indices)
            _check_ids(f"samples {indices[0]} to {indices[-1]}", samples, self.config)
            batches.append(torch.from_numpy(samples))
        return batches

    def validation_windows(
        self, length: int, rank: int, num_ranks: int
    ) -> list[torch.Tensor | None]:
        """This rank's share of the validation windows at a length; None fills up."""
        train = self.config.train
        share = train.validation_tokens // len(self.validation)
        batch_tokens = train.micro_batch_size * train.sequence_length
        batches: list[torch.Tensor | None] = [
            torch.from_numpy(batch)
            for file in self.validation
            for batch in validation_batches(file, length, share, batch_tokens)
        ]
        while len(batches) % num_ranks:
            batches.append(None)
        return batches[rank::num_ranks]

    def facts(self) -> dict[str, Any]:
        """What identifies the training data, for meta.json."""
        weights = [corpus.weight for corpus in self.config.data.corpora]
        return {
            "corpora": [
                {"digest": file.digest, "tokens": int(file.num_tokens), "weight": weight}
                for file, weight in zip(self.corpora, weights, strict=True)
            ],
            "tokenizer": None if self.tokenizer is None else self.tokenizer.digest,
        }

    def where(self, step: int) -> str:
        """Where step `step`'s samples come from, for an error message."""
        size = self.config.train.global_batch_size
        first, last = step * size, (step + 1) * size - 1
        corpus, epoch, window = self.blend.where(first)
        prefix = self.config.data.corpora[corpus].prefix
        return (
            f"samples {first} to {last} (the first is window {window} of {prefix}, epoch {epoch})"
        )


def open_training_data(config: Config) -> TrainingData:
    """Open and check everything that a run reads, and fill in `model.vocab_size`.

    Raises:
        UserError: with every problem found.
    """
    problems: list[Problem] = []

    def attempt(action: Any) -> Any:
        try:
            return action()
        except UserError as error:
            problems.extend(error.problems)
            return None

    data = config.data
    tokenizer = None
    if path := data.tokenizer:
        tokenizer = attempt(lambda: load_tokenizer(existing_path("data.tokenizer", path)))
    corpora = [
        attempt(lambda n=n, p=corpus.prefix: _open(f"data.corpora.{n}.prefix", p))
        for n, corpus in enumerate(data.corpora)
    ]
    validation = [
        attempt(lambda n=n, p=prefix: _open(f"data.validation.{n}", p))
        for n, prefix in enumerate(data.validation)
    ]
    if tokenizer is not None:
        for prefix in (*(c.prefix for c in data.corpora), *data.validation):
            attempt(lambda p=prefix: check_tokenizer(Path(p), tokenizer))
    if config.train.validation_interval is not None and not data.validation:
        rule, fix = "there is no validation corpus", "list one in data.validation"
        interval = config.train.validation_interval
        problems.append(Problem("train.validation_interval", interval, rule, fix))
    if not problems:
        problems.extend(_validation_problems(config, validation))
    if problems:
        raise DataError(*problems)
    size = vocabulary_size(config.model.vocab_size, data, tokenizer)
    if size is None:
        rule = "is not set, and the data names no tokenizer"
        fix = "set it, or set data.tokenizer"
        raise ConfigError(Problem("model.vocab_size", None, rule, fix))
    config.model.vocab_size = size
    for file in (*corpora, *validation):
        # The rest is looked at as it is read: a corpus can be larger than a start may take.
        _check_ids(f"{file.prefix}.bin", file.read(0, min(file.num_tokens, _LOOKED_AT)), config)
    weights = [corpus.weight for corpus in data.corpora]
    blend = Blend(
        list(zip(corpora, weights, strict=True)),
        config.train.sequence_length,
        config.train.seed,
        eos_id=None if tokenizer is None else tokenizer.eos_id,
    )
    return TrainingData(config, blend, corpora, validation, tokenizer)


def _open(key: str, prefix: str) -> TokenFile:
    return TokenFile(find_prefix(key, prefix, [Path.cwd()], "check the prefix"))


def _validation_problems(config: Config, files: list[TokenFile]) -> Iterator[Problem]:
    """Validation lengths that the corpora or the model are too short for."""
    train, limit = config.train, config.model.max_positions
    if train.validation_interval is None:
        return
    for multiple in train.validation_multiples:
        length = int(multiple * train.sequence_length)
        for file in files:
            if file.num_tokens < length + 1:
                rule = f"needs {length + 1} tokens; {file.prefix} has {file.num_tokens}"
                yield Problem("train.validation_multiples", multiple, rule, "leave it out")
        if limit is not None and length > limit:
            rule = f"is {length} tokens, and model.max_positions is {limit}"
            yield Problem("train.validation_multiples", multiple, rule, "leave it out")


def _check_ids(what: str, tokens: np.ndarray, config: Config) -> None:
    size = config.model.vocab_size
    assert size is not None
    low, high = (int(tokens.min()), int(tokens.max())) if tokens.size else (0, 0)
    if low < 0 or high >= size:
        rule = f"holds token id {low if low < 0 else high}, outside model.vocab_size = {size}"
        raise DataError(Problem(what, None, rule, "use the corpus's own tokenizer"))
