"""Eval suites: what `alibi-lm eval` runs on a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from alibi_lm.tasks.config import TASKS, TaskSizes
from alibi_lm.utils.errors import Problem
from alibi_lm.utils.settings import Distinct, NotEmpty, Probability, Section, Share, rule

Lengths = Annotated[list[PositiveInt], NotEmpty, Distinct]

MAX_DISTRACTORS = 100
RULER_THRESHOLD = 85.6


@dataclass
class PerplexityConfig(Section):
    """Perplexity at several lengths over the same tokens."""

    lengths: Lengths | None = None
    """Window lengths in tokens; by default 1/2, 1, 2, 4, 8, 16 times the training length."""
    corpus: str | None = None
    """Prefix of the token files to score; by default the run's validation corpora."""
    max_tokens: PositiveInt | None = None
    """Stop taking documents once this many tokens are reached; by default all long documents."""
    batch_tokens: PositiveInt = 16384
    """Tokens put through the model at once."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the model; losses are fp32 always."""
    pruning_tolerance: Probability | None = None
    """Probability that a head may leave out of a row's far keys at lengths above 2,048; 0 is dense.
    By default 1e-6 where the model has linear biases and no window, else 0."""
    stride: PositiveInt | None = None
    """Score sliding windows too, which move on by this many tokens; by default not."""
    fixed_targets: PositiveInt | None = None
    """Score the last so many tokens of each document too, at every length; by default not."""
    truncated_context_targets: PositiveInt | None = 2000
    """Size of the sample on which the null model is scored; null leaves it out."""
    truncated_context_length: PositiveInt | None = None
    """Tokens that the null model's input is cut to; by default the training length."""
    seed: NonNegativeInt = 0
    """Seed of that sample."""
    scaling: dict[str, Any] | None = None
    """`model.scaling` to score with, instead of the run's; the same factor at every length."""


@dataclass
class NeedleConfig(Section):
    """Needle in a haystack: depth by length."""

    lengths: Lengths | None = None
    """Prompt lengths in tokens; by default 1/2, 1, 2, 4, 8, 16 times the training length."""
    depths: Annotated[list[Share], NotEmpty, Distinct] = field(
        default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0]
    )
    """Where the needle lies, as shares of the length."""
    num_trials: PositiveInt = 10
    """Prompts a cell."""
    num_distractors: Annotated[int, Field(ge=0, le=MAX_DISTRACTORS)] = 0
    """Lines of the needle's kind, with other keys and numbers, in every haystack."""
    corpus: str | None = None
    """Prefix of the token files that the haystack is cut from."""
    batch_tokens: PositiveInt = 16384
    """Tokens put through the model at once."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the model."""
    pruning_tolerance: Probability | None = None
    """Probability that a head may leave out of a row's far keys where prompt and answer are longer
    than 8,192 tokens; 0 is dense. By default 1e-6 where the model has linear biases and no window,
    else 0."""
    seed: NonNegativeInt = 0
    """Seed of haystacks, keys and answers."""
    scaling: dict[str, Any] | None = None
    """`model.scaling` to answer with, instead of the run's; the same factor at every length."""


@dataclass
class RetrievalConfig(Section):
    """Retrieval tasks by length: the passkey, associative recall and RULER's."""

    tasks: Annotated[list[str], NotEmpty, Distinct] | None = None
    """Which of passkey, mqar, niah_single_1 to _3, niah_multikey_1 to _3, niah_multivalue,
    niah_multiquery, vt, cwe, fwe, qa_1, qa_2; by default all, qa_1 and qa_2 as far as there are
    files for them."""
    lengths: Lengths | None = None
    """Prompt lengths in tokens, the answer's room included; by default 1/2, 1, 2, 4, 8, 16 times
    the training length. A task that does not fit a default length is left out there."""
    num_trials: PositiveInt = 10
    """Prompts a task and length (for the passkey: and distance); half as many controls."""
    threshold: Annotated[float, Field(gt=0, le=100)] = RULER_THRESHOLD
    """Average score in percent from which a length counts as effective: RULER's is Llama2-7B's at
    4096."""
    qa_files: Annotated[list[str], Field(max_length=2)] = field(default_factory=list)
    """JSON lines files for qa_1 and qa_2: question, answers, context or documents."""
    sizes: TaskSizes = field(default_factory=TaskSizes)
    """Sizes of the tasks; by default RULER's own."""
    corpus: str | None = None
    """Prefix of the token files that haystacks are cut from."""
    batch_tokens: PositiveInt = 16384
    """Tokens put through the model at once."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the model."""
    pruning_tolerance: Probability | None = None
    """Probability that a head may leave out of a row's far keys where prompt and answer are longer
    than 8,192 tokens; 0 is dense. By default 1e-6 where the model has linear biases and no window,
    else 0."""
    seed: NonNegativeInt = 0
    """Seed of prompts."""
    scaling: dict[str, Any] | None = None
    """`model.scaling` to answer with, instead of the run's; the same factor at every length."""

    @rule
    def _tasks_exist_and_have_files(self) -> Iterator[Problem]:
        for task in self.tasks or []:
            if task not in TASKS:
                yield Problem("tasks", task, "is no task", f"give some of {', '.join(TASKS)}")
            elif task.startswith("qa_") and len(self.qa_files) < int(task[-1]):
                yield Problem("tasks", task, "has no file", "set qa_files")


@dataclass
class AttentionSpanConfig(Section):
    """How far heads read."""

    num_tokens: PositiveInt = 32768
    """Length of the text, from the start of the corpus, documents one after another; above 2,048,
    and best some times the longest reach."""
    num_queries: PositiveInt = 128
    """Positions of its second half whose true reach is measured."""
    pruning_tolerance: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    """Share of a row's probability that counts as nothing."""
    corpus: str | None = None
    """Prefix of the token files; by default the run's first validation corpus."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the model."""


@dataclass
class RanksConfig(Section):
    """How the ranks that `deepspeed` starts share the work."""

    tp: PositiveInt = 1
    """Ranks that share one model, each with a slice of it; documents and prompts are shared among
    the groups of them. 1: every rank holds the whole model."""


@dataclass
class GeneralizationConfig(Section):
    """Copying, addition and sorting with more items than were trained."""

    tasks: Annotated[list[Literal["copy", "addition", "sort"]], NotEmpty, Distinct] = field(
        default_factory=lambda: ["copy", "addition", "sort"]
    )
    """What is asked."""
    lengths: Lengths | None = None
    """Items of a problem; by default 5, 10, ... 40, without those that the model has no positions
    for."""
    trained_items: PositiveInt = 20
    """Most items of a problem that the model was trained on."""
    num_trials: PositiveInt = 100
    """Problems a task and length."""
    threshold: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of exact answers from which on a length counts as mastered."""
    batch_tokens: PositiveInt = 16384
    """Tokens put through the model at once."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the model."""
    seed: NonNegativeInt = 0
    """Seed of the problems."""
    scaling: dict[str, Any] | None = None
    """`model.scaling` to answer with, instead of the run's; the same factor at every length."""


@dataclass
class SuiteConfig(Section):
    """Everything that an eval suite YAML can hold."""

    corpus: str | None = None
    """Prefix of the token files that every eval reads, where its own section names none; by
    default the run's validation corpora."""
    text: str | list[str] | None = None
    """Instead: text files, globs or folders, tokenized with the model's own tokenizer. A .jsonl,
    .parquet or .arrow file has documents in its field `text`; any other file is one document."""
    training_length: PositiveInt | None = None
    """Tokens of a training sample, where the model does not say; lengths are multiples of it."""
    parallel: RanksConfig = field(default_factory=RanksConfig)
    """How several ranks share the work."""
    perplexity: PerplexityConfig = field(default_factory=PerplexityConfig)
    """Settings of `alibi-lm eval perplexity`."""
    needle: NeedleConfig = field(default_factory=NeedleConfig)
    """Settings of `alibi-lm eval needle`."""
    retrieval: RetrievalConfig = field(default_factory=RetrievalConfig)
    """Settings of `alibi-lm eval retrieval`."""
    attention_span: AttentionSpanConfig = field(default_factory=AttentionSpanConfig)
    """Settings of `alibi-lm eval attention-span`."""
    generalization: GeneralizationConfig = field(default_factory=GeneralizationConfig)
    """Settings of `alibi-lm eval generalization`."""

    @rule
    def _one_text(self) -> Iterator[Problem]:
        if self.corpus is not None and self.text is not None:
            rule = "is given beside corpus"
            yield Problem("text", str(self.text), rule, "leave one of them out")
        if self.text is not None and not self.text:
            yield Problem("text", self.text, "is empty", "name files, globs or folders")
