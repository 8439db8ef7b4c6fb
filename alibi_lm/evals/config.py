"""Eval suites: the settings of `alibi-lm eval`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from alibi_lm.tasks.config import ADDED_TASKS, TASKS, TaskSizes
from alibi_lm.utils.errors import Problem
from alibi_lm.utils.settings import Distinct, NotEmpty, Probability, Section, Share, rule

Lengths = Annotated[list[PositiveInt], NotEmpty, Distinct]

MAX_DISTRACTORS = 100
RULER_THRESHOLD = 85.6


@dataclass
class PerplexityConfig(Section):
    """Perplexity at several lengths over the same tokens."""

    aliases: ClassVar[Mapping[str, str]] = {
        "pruning_tolerance": "epsilon",
        "truncated_context_targets": "null_targets",
        "truncated_context_length": "null_reach",
    }

    lengths: Lengths | None = None
    """Window lengths in tokens; by default 1/2, 1, 2, 4, 8, 16 times the training length."""
    corpus: str | None = None
    """Prefix of the token files to score; by default the run's validation corpora."""
    max_tokens: PositiveInt | None = None
    """Tokens to score at most, in whole documents; by default every long document."""
    batch_tokens: PositiveInt = 16384
    """Tokens in one forward pass."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of the model; losses are always fp32."""
    pruning_tolerance: Probability | None = None
    """Largest attention probability per query that pruning may skip at lengths above 2,048; 0
    computes every key. By default 1e-6 for linear biases without a window, else 0."""
    stride: PositiveInt | None = None
    """Step in tokens of sliding windows, which are then scored too; by default they are not."""
    fixed_targets: PositiveInt | None = None
    """Last tokens of each document that are scored at every length too; by default none."""
    truncated_context_targets: PositiveInt | None = 2000
    """Targets of the truncated-context baseline; null leaves the baseline out."""
    truncated_context_length: PositiveInt | None = None
    """Context in tokens of the truncated-context baseline; by default the training length."""
    seed: NonNegativeInt = 0
    """Seed of the sample that the truncated-context baseline scores."""
    scaling: dict[str, Any] | None = None
    """`model.scaling` to use instead of the run's, the same at every length."""


@dataclass
class NeedleConfig(Section):
    """Needle in a haystack: depth by length."""

    aliases: ClassVar[Mapping[str, str]] = {"pruning_tolerance": "epsilon"}

    lengths: Lengths | None = None
    """Prompt lengths in tokens; by default 1/2, 1, 2, 4, 8, 16 times the training length."""
    depths: Annotated[list[Share], NotEmpty, Distinct] = field(
        default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0]
    )
    """Positions of the needle, as fractions of the length."""
    num_trials: PositiveInt = 10
    """Prompts per length and depth."""
    num_distractors: Annotated[int, Field(ge=0, le=MAX_DISTRACTORS)] = 0
    """Lines like the needle, with other keys and numbers, in every haystack."""
    corpus: str | None = None
    """Prefix of the token files that haystacks are cut from; by default the suite's `corpus`."""
    batch_tokens: PositiveInt = 16384
    """Tokens in one forward pass."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of the model."""
    pruning_tolerance: Probability | None = None
    """Largest attention probability per query that pruning may skip in inputs above 8,192 tokens;
    0 computes every key. By default 1e-6 for linear biases without a window, else 0."""
    seed: NonNegativeInt = 0
    """Seed of haystacks, keys and answers."""
    scaling: dict[str, Any] | None = None
    """`model.scaling` to use instead of the run's, the same at every length."""


@dataclass
class RetrievalConfig(Section):
    """Retrieval tasks by length: passkey, associative recall and the tasks of RULER."""

    aliases: ClassVar[Mapping[str, str]] = {"pruning_tolerance": "epsilon"}

    tasks: Annotated[list[str], NotEmpty, Distinct] | None = None
    """Any of passkey, mqar, niah_single_1 to _3, niah_multikey_1 to _3, niah_multivalue,
    niah_multiquery, vt, cwe, fwe, qa_1, qa_2; by default all that have the files they need."""
    lengths: Lengths | None = None
    """Prompt lengths in tokens, answer included; by default 1/2, 1, 2, 4, 8, 16 times the training
    length, without the tasks that do not fit one of them."""
    num_trials: PositiveInt = 10
    """Prompts per task and length (passkey: also per distance); half as many controls."""
    threshold: Annotated[float, Field(gt=0, le=100)] = RULER_THRESHOLD
    """Average score in percent that an effective length needs; RULER's is Llama2-7B's at 4,096."""
    qa_files: Annotated[list[str], Field(max_length=2)] = field(default_factory=list)
    """JSON lines files of qa_1 and qa_2, with question, answers, and context or documents."""
    sizes: TaskSizes = field(default_factory=TaskSizes)
    """Sizes of the tasks; by default RULER's own."""
    corpus: str | None = None
    """Prefix of the token files that haystacks are cut from; by default the suite's `corpus`."""
    batch_tokens: PositiveInt = 16384
    """Tokens in one forward pass."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of the model."""
    pruning_tolerance: Probability | None = None
    """Largest attention probability per query that pruning may skip in inputs above 8,192 tokens;
    0 computes every key. By default 1e-6 for linear biases without a window, else 0."""
    seed: NonNegativeInt = 0
    """Seed of prompts."""
    scaling: dict[str, Any] | None = None
    """`model.scaling` to use instead of the run's, the same at every length."""

    @rule
    def _tasks_exist_and_have_files(self) -> Iterator[Problem]:
        for task in self.tasks or []:
            if task not in (*TASKS, *ADDED_TASKS):
                known = ", ".join((*TASKS, *ADDED_TASKS))
                yield Problem("tasks", task, "is no task", f"give some of {known}")
            elif task.startswith("qa_") and len(self.qa_files) < int(task[-1]):
                yield Problem("tasks", task, "has no file", "set .qa_files")


@dataclass
class AttentionSpanConfig(Section):
    """The certified attention span: how far back each head reads."""

    aliases: ClassVar[Mapping[str, str]] = {"pruning_tolerance": "epsilon"}

    num_tokens: PositiveInt = 32768
    """Length of the text, which is documents from the start of the corpus; above 2,048, and best
    several times the longest span."""
    num_queries: PositiveInt = 128
    """Positions in the text's second half whose true span is measured."""
    pruning_tolerance: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    """Attention probability per query that a span may leave out."""
    corpus: str | None = None
    """Prefix of the token files; by default the run's first validation corpus."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of the model."""


@dataclass
class RanksConfig(Section):
    """How several ranks share the work."""

    tp: PositiveInt = 1
    """Ranks that split one model between them; groups of them split documents and prompts. With 1
    every rank holds the whole model."""


@dataclass
class GeneralizationConfig(Section):
    """Copying, addition and sorting with more items than in training."""

    tasks: Annotated[list[Literal["copy", "addition", "sort"]], NotEmpty, Distinct] = field(
        default_factory=lambda: ["copy", "addition", "sort"]
    )
    """Tasks to run."""
    lengths: Lengths | None = None
    """Items per problem; by default 5, 10, ... 40, as far as the model has positions."""
    trained_items: PositiveInt = 20
    """Largest number of items per problem in training."""
    num_trials: PositiveInt = 100
    """Problems per task and length."""
    threshold: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Fraction of exact answers that a mastered length needs."""
    batch_tokens: PositiveInt = 16384
    """Tokens in one forward pass."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of the model."""
    seed: NonNegativeInt = 0
    """Seed of the problems."""
    scaling: dict[str, Any] | None = None
    """`model.scaling` to use instead of the run's, the same at every length."""


@dataclass
class SuiteConfig(Section):
    """An eval suite; `suite.suite_class` adds a section for each eval."""

    aliases: ClassVar[Mapping[str, str]] = {"attention_span": "horizon"}

    corpus: str | None = None
    """Prefix of the token files of every eval whose section names none; by default the run's
    validation corpora."""
    text: str | list[str] | None = None
    """Text files, globs or folders to use instead of `corpus`, tokenized with the model's own
    tokenizer. .jsonl, .parquet and .arrow files have documents in the field `text`; any other file
    is one document."""
    training_length: PositiveInt | None = None
    """Tokens per training sample, for models that do not say; the default lengths depend on it."""
    parallel: RanksConfig = field(default_factory=RanksConfig)
    """How several ranks share the work."""

    @rule
    def _one_text(self) -> Iterator[Problem]:
        if self.corpus is not None and self.text is not None:
            rule = "is given beside .corpus"
            yield Problem("text", str(self.text), rule, "leave one of them out")
        if self.text is not None and not self.text:
            yield Problem("text", self.text, "is empty", "name files, globs or folders")
