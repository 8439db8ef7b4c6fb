"""The data section of a run, and the recipe that prepares a corpus."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from alibi_lm.utils.errors import Problem


@dataclass
class CorpusConfig:
    """One tokenized corpus of a run."""

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

    def training_problems(self, key: str) -> Iterator[Problem]:
        """The rules that are broken for training; an imported model has no corpora."""
        if not self.corpora:
            yield Problem(f"{key}corpora", None, "is empty",
                          "list at least one corpus with its prefix")  # fmt: skip


GENERATED = {"recall": 1, "reasoning": 1}
"""Formats whose documents are made, not read, and the version of their making: raised by one when
the same settings begin to give other documents."""


@dataclass
class RecallConfig:
    """Synthetic documents that train retrieval: facts, filler, and queries with their answers."""

    max_tokens: int
    """Tokens of a document, its end included: the training length, so that a document is exactly
    one training sample, and no answer lies out of reach of its query."""
    kinds: list[Literal["statements", "passkey", "pairs"]] = field(
        default_factory=lambda: ["statements", "passkey", "pairs"]
    )
    """What the documents ask, in the words of the evals: statements (the needle's line), passkey,
    pairs (multi-query associative recall). One named twice comes twice as often."""
    dense: float = 0.5
    """Share of documents with as many facts as fit; the others have a random number of them."""
    filler: str | None = None
    """Source of the recipe whose training documents give the text between facts; by default a few
    sentences that repeat."""
    filler_bytes: int = 4_000_000
    """How much of that source is taken, from its start."""
    seed: int = 0
    """Seed of everything that is drawn."""

    def problems(self, key: str) -> Iterator[Problem]:
        """The rules of this section that are broken."""
        for name in ("max_tokens", "filler_bytes"):
            if getattr(self, name) < 1:
                yield Problem(f"{key}{name}", getattr(self, name), "is not positive",
                              "give a positive number")  # fmt: skip
        if not self.kinds:
            yield Problem(f"{key}kinds", self.kinds, "is empty", "name at least one kind")
        if not 0 <= self.dense <= 1:
            yield Problem(f"{key}dense", self.dense, "is not in [0, 1]", "give a share such as 0.5")
        if self.seed < 0:
            yield Problem(f"{key}seed", self.seed, "is negative", "give 0 or more")


@dataclass
class ReasoningConfig:
    """Synthetic problems of copying, addition and sorting, several a document."""

    max_tokens: int
    """Tokens of a document, its end included: the training length, so that a document is exactly
    one training sample."""
    tasks: list[Literal["copy", "addition", "sort"]] = field(
        default_factory=lambda: ["copy", "addition", "sort"]
    )
    """What the problems are. One named twice comes twice as often."""
    lengths: list[int] = field(default_factory=lambda: [1, 20])
    """Fewest and most items of a problem."""
    seed: int = 0
    """Seed of everything that is drawn."""

    def problems(self, key: str) -> Iterator[Problem]:
        """The rules of this section that are broken."""
        if self.max_tokens < 1:
            yield Problem(f"{key}max_tokens", self.max_tokens, "is not positive",
                          "give a positive number")  # fmt: skip
        if not self.tasks:
            yield Problem(f"{key}tasks", self.tasks, "is empty", "name at least one task")
        if len(self.lengths) != 2 or not 1 <= self.lengths[0] <= self.lengths[-1]:
            yield Problem(f"{key}lengths", self.lengths, "is not a range of at least 1 item",
                          "give the fewest and the most, such as [1, 20]")  # fmt: skip
        if self.seed < 0:
            yield Problem(f"{key}seed", self.seed, "is negative", "give 0 or more")


@dataclass
class SourceConfig:
    """One corpus of a recipe: where its documents come from and which are kept."""

    name: str
    """Name of the corpus; its token files are NAME_train and NAME_validation."""
    path: list[str] | str = field(default_factory=list)
    """Files, globs or folders; or the name of a dataset on the Hugging Face hub. A path that
    starts with ${python:stdlib} lies in the running Python's standard library, one that starts
    with ${python:packages} among its installed packages."""
    format: Literal["text", "jsonl", "parquet", "arrow", "hub", "recall", "reasoning"] = "text"
    """How documents are stored; text is one document a file, jsonl may be compressed (.gz). Those
    of recall and reasoning are made, as many as max_documents says."""
    recall: RecallConfig | None = None
    """Which documents format: recall makes."""
    reasoning: ReasoningConfig | None = None
    """Which documents format: reasoning makes."""
    text_field: str = "text"
    """Field that holds the document (all formats but text)."""
    include: str = "*"
    """Which files of a folder count, as a file name pattern."""
    exclude: list[str] = field(default_factory=list)
    """Patterns of paths that do not count; a path is relative to its folder (of a glob: to the
    folder before the first wildcard) and * matches / too, so test/* leaves out all of test."""
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
    """What to do with a file (jsonl: a line) that is not UTF-8: refuse it by name, or skip it,
    count it and name it in the manifest."""
    validation_fraction: float = 0.05
    """Share of documents that go to validation, chosen by the hash of their text."""
    min_long_validation: int = 0
    """Keep at least this many documents of long_chars or more for validation, by lowest hash."""
    long_chars: int = 0
    """Length in characters from which a document counts as long."""

    @property
    def paths(self) -> list[str]:
        """`path` as a list."""
        return [self.path] if isinstance(self.path, str) else list(self.path)

    @property
    def generated(self) -> bool:
        """Whether documents are made, not read."""
        return self.format in GENERATED

    def problems(self, key: str) -> Iterator[Problem]:
        """The rules of this section that are broken."""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            yield Problem(f"{key}name", self.name, "is not usable in a file name",
                          "use letters, digits, dot, dash and underscore")  # fmt: skip
        yield from self._generated_problems(key)
        if not self.generated and (not self.paths or not all(self.paths)):
            yield Problem(f"{key}path", self.path, "is empty", "name files, globs or folders")
        if self.format == "hub" and len(self.paths) != 1:
            yield Problem(f"{key}path", self.path, "is more than one hub dataset",
                          "write one source for each")  # fmt: skip
        if self.min_chars < 0:
            yield Problem(f"{key}min_chars", self.min_chars, "is negative", "give 0 or more")
        if self.max_chars is not None and self.max_chars < max(1, self.min_chars):
            yield Problem(f"{key}max_chars", self.max_chars, "leaves no document",
                          "give at least min_chars and 1, or leave it out")  # fmt: skip
        if self.max_documents is not None and self.max_documents < 1:
            yield Problem(f"{key}max_documents", self.max_documents, "is not positive",
                          "give a positive number or leave it out")  # fmt: skip
        if not 0 <= self.validation_fraction < 1:
            yield Problem(f"{key}validation_fraction", self.validation_fraction,
                          "is not in [0, 1)", "give a share such as 0.01")  # fmt: skip
        if self.min_long_validation < 0:
            yield Problem(f"{key}min_long_validation", self.min_long_validation, "is negative",
                          "give 0 or more")  # fmt: skip
        if self.min_long_validation > 0 and self.long_chars < 1:
            yield Problem(f"{key}long_chars", self.long_chars, "does not say what long is",
                          "give the characters of a long document")  # fmt: skip
        if self.max_chars is not None and self.long_chars > self.max_chars:
            yield Problem(f"{key}long_chars", self.long_chars, "is more than max_chars",
                          "make it smaller than max_chars")  # fmt: skip

    def _generated_problems(self, key: str) -> Iterator[Problem]:
        for name in GENERATED:
            settings = getattr(self, name)
            if (settings is not None) != (self.format == name):
                yield Problem(f"{key}{name}", None if settings is None else "given",
                              f"belongs to format: {name}, and to no other",
                              "give both or neither")  # fmt: skip
        if not self.generated:
            return
        if self.paths:
            yield Problem(f"{key}path", self.path, f"is nothing that format: {self.format} reads",
                          "leave it out")  # fmt: skip
        if self.max_documents is None:
            yield Problem(f"{key}max_documents", None,
                          f"must say how many documents format: {self.format} makes",
                          "give a number")  # fmt: skip
        if self.min_long_validation:
            yield Problem(f"{key}min_long_validation", self.min_long_validation,
                          f"cannot be had with format: {self.format}", "leave it out")  # fmt: skip


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

    def problems(self, key: str) -> Iterator[Problem]:
        """The rules of this section that are broken."""
        if self.vocab_size < 261:
            yield Problem(f"{key}vocab_size", self.vocab_size,
                          "is less than the 4 control and 256 byte pieces and one more",
                          "give 261 or more")  # fmt: skip
        if self.max_bytes < 1:
            yield Problem(f"{key}max_bytes", self.max_bytes, "is not positive",
                          "give some megabytes")  # fmt: skip
        if not 0.98 <= self.character_coverage <= 1:
            yield Problem(f"{key}character_coverage", self.character_coverage,
                          "is not in [0.98, 1]", "give a share such as 0.9995")  # fmt: skip


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
    """Processes that tokenize; by default one a core."""
    seed: int = 0
    """Seed of the tokenizer trainer's choice of documents."""

    def problems(self, key: str) -> Iterator[Problem]:
        """The rules of this section that are broken."""
        if not self.output:
            yield Problem(f"{key}output", self.output, "is empty", "name a folder")
        if not self.sources:
            yield Problem(f"{key}sources", None, "is empty", "list at least one source")
        names = [source.name for source in self.sources]
        for index, name in enumerate(names):
            # Files of `a` and of `A` are the same ones on some file systems.
            if name.lower() in [earlier.lower() for earlier in names[:index]]:
                yield Problem(f"{key}sources.{index}.name", name, "is another source's name",
                              "give every source its own name")  # fmt: skip
        read = [source.name for source in self.sources if not source.generated]
        for index, source in enumerate(self.sources):
            filler = source.recall.filler if source.recall else None
            if filler is not None and filler not in read:
                yield Problem(f"{key}sources.{index}.recall.filler", filler,
                              "is no source of this recipe that is read",
                              f"name one of: {', '.join(read) or 'none'}")  # fmt: skip
        if self.num_workers is not None and self.num_workers < 1:
            yield Problem(f"{key}num_workers", self.num_workers, "is not positive",
                          "give 1 or more, or leave it out for one a core")  # fmt: skip
