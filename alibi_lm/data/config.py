"""The data section of a run, and the recipe that prepares a corpus."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from alibi_lm.utils.errors import Problem
from alibi_lm.utils.settings import NotEmpty, Probability, Section, Share, rule


@dataclass
class CorpusConfig(Section):
    """One tokenized corpus of a run."""

    prefix: str
    """Path of the token files without their .bin and .idx endings."""
    weight: PositiveFloat = 1.0
    """Share of the samples, relative to the other corpora's weights."""


@dataclass
class DataConfig(Section):
    """What a run reads."""

    corpora: list[CorpusConfig] = field(default_factory=list)
    """Token files to train on, blended by weight."""
    validation: list[str] = field(default_factory=list)
    """Prefixes of token files for validation and evals."""
    tokenizer: str | None = None
    """Tokenizer folder, .model or tokenizer.json that made the token files; copied into the run."""

    def training_problems(self) -> Iterator[Problem]:
        """The rules that are broken for training; an imported model has no corpora."""
        if not self.corpora:
            fix = "list at least one corpus with its prefix"
            yield Problem("data.corpora", None, "is empty", fix)


GENERATED = {"recall": 1, "reasoning": 1}
"""Formats whose documents are made, not read, and the version of their making: raised by one when
the same settings begin to give other documents."""


@dataclass
class RecallConfig(Section):
    """Synthetic documents that train retrieval: facts, filler, and queries with their answers."""

    max_tokens: PositiveInt
    """Tokens of a document, its end included: the training length, so that a document is exactly
    one training sample, and no answer lies out of reach of its query."""
    kinds: Annotated[list[Literal["statements", "passkey", "pairs"]], NotEmpty] = field(
        default_factory=lambda: ["statements", "passkey", "pairs"]
    )
    """What the documents ask, in the words of the evals: statements (the needle's line), passkey,
    pairs (multi-query associative recall). One named twice comes twice as often."""
    dense: Share = 0.5
    """Share of documents with as many facts as fit; the others have a random number of them."""
    filler: str | None = None
    """Source of the recipe whose training documents give the text between facts; by default a few
    sentences that repeat."""
    filler_bytes: PositiveInt = 4_000_000
    """How much of that source is taken, from its start."""
    seed: NonNegativeInt = 0
    """Seed of everything that is drawn."""


@dataclass
class ReasoningConfig(Section):
    """Synthetic problems of copying, addition and sorting, several a document."""

    max_tokens: PositiveInt
    """Tokens of a document, its end included: the training length, so that a document is exactly
    one training sample."""
    tasks: Annotated[list[Literal["copy", "addition", "sort"]], NotEmpty] = field(
        default_factory=lambda: ["copy", "addition", "sort"]
    )
    """What the problems are. One named twice comes twice as often."""
    lengths: list[PositiveInt] = field(default_factory=lambda: [1, 20])
    """Fewest and most items of a problem."""
    seed: NonNegativeInt = 0
    """Seed of everything that is drawn."""

    @rule
    def _lengths_are_a_range(self) -> Iterator[Problem]:
        if len(self.lengths) != 2 or self.lengths[0] > self.lengths[-1]:
            fix = "give the fewest and the most, such as [1, 20]"
            yield Problem("lengths", self.lengths, "is not a range", fix)


@dataclass
class SourceConfig(Section):
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
    min_chars: NonNegativeInt = 1
    """Documents with fewer characters are left out."""
    max_chars: PositiveInt | None = None
    """Documents with more characters are left out."""
    max_documents: PositiveInt | None = None
    """Stop after this many kept documents."""
    not_utf8: Literal["refuse", "skip"] = "refuse"
    """What to do with a file (jsonl: a line) that is not UTF-8: refuse it by name, or skip it,
    count it and name it in the manifest."""
    validation_fraction: Probability = 0.05
    """Share of documents that go to validation, chosen by the hash of their text."""
    min_long_validation: NonNegativeInt = 0
    """Keep at least this many documents of long_chars or more for validation, by lowest hash."""
    long_chars: NonNegativeInt = 0
    """Length in characters from which a document counts as long."""

    @property
    def paths(self) -> list[str]:
        """`path` as a list."""
        return [self.path] if isinstance(self.path, str) else list(self.path)

    @property
    def generated(self) -> bool:
        """Whether documents are made, not read."""
        return self.format in GENERATED

    @rule
    def _name_is_a_file_name(self) -> Iterator[Problem]:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            fix = "use letters, digits, dot, dash and underscore"
            yield Problem("name", self.name, "is not usable in a file name", fix)

    @rule
    def _a_read_source_has_a_path(self) -> Iterator[Problem]:
        if not self.generated and (not self.paths or not all(self.paths)):
            yield Problem("path", self.path, "is empty", "name files, globs or folders")
        elif self.format == "hub" and len(self.paths) != 1:
            fix = "write one source for each"
            yield Problem("path", self.path, "is more than one hub dataset", fix)

    @rule
    def _some_document_is_short_enough(self) -> Iterator[Problem]:
        if self.max_chars is not None and self.max_chars < self.min_chars:
            rule = f"is less than min_chars = {self.min_chars}, which leaves no document"
            yield Problem("max_chars", self.max_chars, rule, "raise it, or leave it out")

    @rule
    def _long_is_defined(self) -> Iterator[Problem]:
        if self.min_long_validation > 0 and self.long_chars < 1:
            rule = "does not say what min_long_validation counts as long"
            yield Problem("long_chars", self.long_chars, rule, "give a number of characters")
        if self.max_chars is not None and self.long_chars > self.max_chars:
            rule = f"exceeds max_chars = {self.max_chars}"
            yield Problem("long_chars", self.long_chars, rule, "lower it")

    @rule
    def _a_generator_has_its_section(self) -> Iterator[Problem]:
        for name in GENERATED:
            settings = getattr(self, name)
            if (settings is not None) != (self.format == name):
                rule = f"belongs to format: {name}, and to no other"
                given = None if settings is None else "given"
                yield Problem(name, given, rule, "give both or neither")

    @rule
    def _generated_documents_are_counted_not_read(self) -> Iterator[Problem]:
        if not self.generated:
            return
        if self.paths:
            rule = f"is not read by format: {self.format}"
            yield Problem("path", self.path, rule, "leave it out")
        if self.max_documents is None:
            rule = f"must say how many documents format: {self.format} generates"
            yield Problem("max_documents", None, rule, "give a number")
        if self.min_long_validation:
            rule = f"is not available with format: {self.format}"
            yield Problem("min_long_validation", self.min_long_validation, rule, "leave it out")


@dataclass
class TokenizerConfig(Section):
    """The tokenizer of a recipe: an existing one, or one to train."""

    path: str | None = None
    """An existing sentencepiece .model or tokenizer.json; by default one is trained."""
    kind: Literal["bpe", "unigram"] = "bpe"
    """Kind of sentencepiece model to train."""
    vocab_size: Annotated[int, Field(ge=261)] = 4096
    """Number of pieces to train, control and byte pieces included."""
    max_bytes: PositiveInt = 20_000_000
    """How many bytes of training documents the trainer reads at most."""
    character_coverage: Annotated[float, Field(ge=0.98, le=1)] = 0.9995
    """Share of characters that get a piece; the rest become bytes."""


@dataclass
class RecipeConfig(Section):
    """A recipe of `alibi-lm prepare`: sources to token files."""

    output: Annotated[str, NotEmpty]
    """Folder that gets the tokenizer, the token files and manifest.json."""
    sources: list[SourceConfig]
    """The corpora to prepare."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """The tokenizer to use or train."""
    num_workers: PositiveInt | None = None
    """Processes that tokenize; by default one a core."""
    seed: NonNegativeInt = 0
    """Seed of the tokenizer trainer's choice of documents."""

    @rule
    def _sources_have_their_own_names(self) -> Iterator[Problem]:
        if not self.sources:
            yield Problem("sources", None, "is empty", "list at least one source")
        names = [source.name for source in self.sources]
        for index, name in enumerate(names):
            # Files of `a` and of `A` are the same ones on some file systems.
            if name.lower() in [earlier.lower() for earlier in names[:index]]:
                fix = "give every source its own name"
                yield Problem(f"sources.{index}.name", name, "is another source's name", fix)

    @rule
    def _fillers_are_sources(self) -> Iterator[Problem]:
        read = [source.name for source in self.sources if not source.generated]
        for index, source in enumerate(self.sources):
            filler = source.recall.filler if source.recall else None
            if filler is not None and filler not in read:
                rule = "is not a source of this recipe that is read"
                fix = f"name one of: {', '.join(read) or 'none'}"
                yield Problem(f"sources.{index}.recall.filler", filler, rule, fix)
