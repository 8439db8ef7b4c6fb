"""The data section of a run, and the recipe that prepares a corpus."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from alibi_lm.errors import Problem


@dataclass
class CorpusConfig:
    """One tokenised corpus of a run."""

    prefix: str
    """Path of the token files without their .bin and .idx endings."""
    weight: float = 1.0
    """Share of the samples, relative to the other corpora's weights."""

    def problems(self, key: str) -> Iterator[Problem]:
        """The rules of this section that are broken."""
        if self.weight <= 0:
            yield Problem(f"{key}weight", self.weight, "is not positive",
                          "give a positive weight or take the corpus out")  # fmt: skip


@dataclass
class DataConfig:
    """What a run reads."""

    corpora: list[CorpusConfig] = field(default_factory=list)
    """Token files to train on, blended by weight."""
    validation: list[str] = field(default_factory=list)
    """Prefixes of token files for validation and evals."""
    tokenizer: str | None = None
    """Tokenizer folder, .model or tokenizer.json that made the token files; copied into the run."""

    def problems(self, key: str) -> Iterator[Problem]:
        """The rules of this section that are broken."""
        if not self.corpora:
            yield Problem(f"{key}corpora", None, "is empty",
                          "list at least one corpus with its prefix")  # fmt: skip


@dataclass
class SourceConfig:
    """One corpus of a recipe: where its documents come from and which are kept."""

    name: str
    """Name of the corpus; its token files are NAME_train and NAME_validation."""
    path: list[str] | str
    """Files, globs or folders; or the name of a dataset on the Hugging Face hub."""
    format: Literal["text", "jsonl", "parquet", "arrow", "hub"] = "text"
    """How documents are stored; text is one document a file."""
    text_field: str = "text"
    """Field that holds the document (all formats but text)."""
    include: str = "*"
    """Which files of a folder count, as a file name pattern."""
    exclude: list[str] = field(default_factory=list)
    """Patterns of relative paths that do not count."""
    split: str = "train"
    """Split of a hub dataset."""
    subset: str | None = None
    """Configuration name of a hub dataset."""
    streaming: bool = True
    """Whether a hub dataset is streamed instead of downloaded whole."""
    min_chars: int = 1
    """Documents with fewer characters are left out."""
    max_chars: int | None = None
    """Documents with more characters are left out."""
    max_documents: int | None = None
    """Stop after this many kept documents."""
    not_utf8: Literal["refuse", "skip"] = "refuse"
    """What to do with a file that is not UTF-8: refuse it by name, or skip it and count it."""
    validation_fraction: float = 0.05
    """Share of documents that go to validation, chosen by the hash of their text."""
    min_long_validation: int = 0
    """Keep at least this many documents of long_chars or more for validation, by lowest hash."""
    long_chars: int = 0
    """Length in characters from which a document counts as long."""


@dataclass
class TokenizerConfig:
    """The tokenizer of a recipe: an existing one, or one to train."""

    path: str | None = None
    """An existing sentencepiece .model or tokenizer.json; by default one is trained."""
    kind: Literal["bpe", "unigram"] = "bpe"
    """Kind of sentencepiece model to train."""
    vocab_size: int = 4096
    """Number of pieces to train, control and byte pieces included."""
    max_bytes: int = 20_000_000
    """How many bytes of training documents the trainer reads at most."""
    character_coverage: float = 0.9995
    """Share of characters that get a piece; the rest become bytes."""


@dataclass
class RecipeConfig:
    """A recipe of `alibi-lm prepare`: sources to token files."""

    output: str
    """Folder that gets the tokenizer, the token files and manifest.json."""
    sources: list[SourceConfig]
    """The corpora to prepare."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """The tokenizer to use or train."""
    num_workers: int | None = None
    """Processes that tokenise; by default one a core."""
    seed: int = 0
    """Seed of the tokenizer trainer's choice of documents."""
