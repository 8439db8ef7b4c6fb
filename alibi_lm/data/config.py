"""The `data` section of a run, and the recipe that prepares a corpus."""

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
    """Path of the token files without the endings .bin and .idx."""
    weight: PositiveFloat = 1.0
    """Weight in the blend: samples are drawn in proportion to it."""


@dataclass
class DataConfig(Section):
    """The token files of a run, and their tokenizer."""

    corpora: list[CorpusConfig] = field(default_factory=list)
    """Token files to train on, blended by weight."""
    validation: list[str] = field(default_factory=list)
    """Prefixes of token files for validation and evals."""
    tokenizer: str | None = None
    """Tokenizer of the token files (folder, .model or tokenizer.json); copied into the run."""

    def training_problems(self) -> Iterator[Problem]:
        """What keeps a run from training; a run of an imported model has no corpora."""
        if not self.corpora:
            fix = "list at least one corpus with its prefix"
            yield Problem("data.corpora", None, "is empty", fix)


GENERATED = {"recall": 1, "reasoning": 1}
"""Formats whose documents are generated, and the version of each generator: it is raised when the
same settings begin to give other documents."""


@dataclass
class RecallConfig(Section):
    """Synthetic documents that train retrieval: facts, filler, and queries with their answers."""

    max_tokens: PositiveInt
    """Tokens of a document, its end token included. Set it to the training length, so that each
    document is one training sample and contains the answer to each of its queries."""
    kinds: Annotated[list[Literal["statements", "passkey", "pairs"]], NotEmpty] = field(
        default_factory=lambda: ["statements", "passkey", "pairs"]
    )
    """Kinds of documents: statements (as in the needle eval), passkey, pairs (multi-query
    associative recall). A kind named twice comes twice as often."""
    dense: Share = 0.5
    """Fraction of documents with as many facts as fit; the others have a random number."""
    filler: str | None = None
    """Source of the recipe whose training documents fill the space between facts; by default a few
    repeated sentences."""
    filler_bytes: PositiveInt = 4_000_000
    """Bytes of filler taken from the start of that source."""
    seed: NonNegativeInt = 0
    """Seed of all random choices."""


@dataclass
class ReasoningConfig(Section):
    """Synthetic problems of copying, addition and sorting, several per document."""

    max_tokens: PositiveInt
    """Tokens of a document, its end token included. Set it to the training length, so that each
    document is one training sample."""
    tasks: Annotated[list[Literal["copy", "addition", "sort"]], NotEmpty] = field(
        default_factory=lambda: ["copy", "addition", "sort"]
    )
    """Kinds of problems. A kind named twice comes twice as often."""
    lengths: list[PositiveInt] = field(default_factory=lambda: [1, 20])
    """Fewest and most items per problem."""
    seed: NonNegativeInt = 0
    """Seed of all random choices."""

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
    """Files, globs or folders, or (format: hub) the name of a dataset on the Hugging Face hub.
    ${python:stdlib} and ${python:packages} at the start of a path stand for Python's standard
    library and its installed packages."""
    format: Literal["text", "jsonl", "parquet", "arrow", "hub", "recall", "reasoning"] = "text"
    """Format of the documents. text is one document per file; a jsonl file may also be one JSON
    array. Files may be compressed (gz, bz2, xz, zst) and texts in UTF-16 with a byte-order mark.
    recall and reasoning generate max_documents documents."""
    recall: RecallConfig | None = None
    """Settings of format: recall."""
    reasoning: ReasoningConfig | None = None
    """Settings of format: reasoning."""
    text_field: str = "text"
    """Field that holds the document (all formats but text); meta.text is field text of meta."""
    include: str = "*"
    """File name pattern of the files that are read from a folder."""
    exclude: list[str] = field(default_factory=list)
    """Patterns of paths to leave out, relative to the folder (of a glob: to the folder before its
    first wildcard). * matches / too, so test/* leaves out all of test."""
    split: str = "train"
    """Split of a hub dataset."""
    subset: str | None = None
    """Subset (configuration name) of a hub dataset."""
    streaming: bool = True
    """Stream a hub dataset instead of downloading it."""
    min_chars: NonNegativeInt = 1
    """Fewest characters of a document; shorter ones are left out."""
    max_chars: PositiveInt | None = None
    """Most characters of a document; longer ones are left out."""
    max_documents: PositiveInt | None = None
    """Most documents to keep; by default all."""
    not_utf8: Literal["refuse", "skip"] = "refuse"
    """What happens to a file (jsonl: a line, or a binary file) that is not UTF-8: an error, or skip
    it and name it in the manifest."""
    validation_fraction: Probability = 0.05
    """Fraction of documents used for validation, chosen by the hash of their text."""
    min_long_validation: NonNegativeInt = 0
    """Fewest long documents (of long_chars or more) in validation, chosen by lowest hash."""
    long_chars: NonNegativeInt = 0
    """Characters from which a document counts as long."""

    @property
    def paths(self) -> list[str]:
        """`path` as a list."""
        return [self.path] if isinstance(self.path, str) else list(self.path)

    @property
    def generated(self) -> bool:
        """Whether documents are generated, not read."""
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
            rule = f"is less than .min_chars = {self.min_chars}, which leaves no document"
            yield Problem("max_chars", self.max_chars, rule, "raise it, or leave it out")

    @rule
    def _long_is_defined(self) -> Iterator[Problem]:
        if self.min_long_validation > 0 and self.long_chars < 1:
            rule = "does not say what .min_long_validation counts as long"
            yield Problem("long_chars", self.long_chars, rule, "give a number of characters")
        if self.max_chars is not None and self.long_chars > self.max_chars:
            rule = f"exceeds .max_chars = {self.max_chars}"
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
    """The tokenizer of a recipe: an existing one, or a new one."""

    path: str | None = None
    """Existing sentencepiece .model, tokenizer.json or folder; by default one is trained."""
    eos: str | None = None
    """End-of-sequence token of an existing tokenizer; by default the one declared beside it."""
    kind: Literal["bpe", "unigram"] = "bpe"
    """Kind of sentencepiece model to train."""
    vocab_size: Annotated[int, Field(ge=261)] = 4096
    """Number of pieces to train, control and byte pieces included."""
    max_bytes: PositiveInt = 20_000_000
    """Most bytes of training documents that the trainer reads."""
    character_coverage: Annotated[float, Field(ge=0.98, le=1)] = 0.9995
    """Fraction of character occurrences covered by pieces; the rest become bytes."""

    @rule
    def _eos_needs_an_existing_tokenizer(self) -> Iterator[Problem]:
        if self.eos is not None and self.path is None:
            text = "names a token of an existing tokenizer, and tokenizer.path is not set"
            yield Problem("eos", self.eos, text, "leave it out or set tokenizer.path")


@dataclass
class RecipeConfig(Section):
    """A recipe of `alibi-lm prepare`: sources to token files."""

    output: Annotated[str, NotEmpty]
    """Folder for the tokenizer, the token files and manifest.json."""
    sources: list[SourceConfig]
    """The corpora to prepare."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """The tokenizer to use or train."""
    num_workers: PositiveInt | None = None
    """Processes that tokenize; by default one per core."""
    seed: NonNegativeInt = 0
    """Seed of the choice of documents that train the tokenizer."""

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
