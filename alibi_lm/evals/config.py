"""Eval suites: what `alibi-lm eval` runs on a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from alibi_lm.tasks.config import TASKS, TaskSizes
from alibi_lm.utils.errors import Problem

MAX_DISTRACTORS = 100
RULER_THRESHOLD = 85.6


@dataclass
class PerplexityConfig:
    """Perplexity at several lengths over the same tokens."""

    lengths: list[int] | None = None
    """Window lengths in tokens; by default 1/2, 1, 2, 4, 8, 16 times the training length."""
    corpus: str | None = None
    """Prefix of the token files to score; by default the run's validation corpora."""
    max_tokens: int | None = None
    """Stop taking documents once this many tokens are reached; by default all long documents."""
    batch_tokens: int = 16384
    """Tokens put through the model at once."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the model; losses are fp32 always."""
    pruning_tolerance: float | None = None
    """Probability that a head may leave out of a row's far keys at lengths above 2,048; 0 is dense.
    By default 1e-6 where the model has linear biases and no window, else 0."""
    stride: int | None = None
    """Score sliding windows too, which move on by this many tokens; by default not."""
    fixed_targets: int | None = None
    """Score the last so many tokens of each document too, at every length; by default not."""
    truncated_context_targets: int | None = 2000
    """Size of the sample on which the null model is scored; null leaves it out."""
    truncated_context_length: int | None = None
    """Tokens that the null model's input is cut to; by default the training length."""
    seed: int = 0
    """Seed of that sample."""
    scaling: dict[str, Any] | None = None
    """`model.scaling` to score with, instead of the run's; the same factor at every length."""

    def problems(self, key: str) -> Iterator[Problem]:
        """The rules of this section that are broken."""
        yield from _length_problems(self.lengths, f"{key}lengths")
        yield from _positive_problems(self, key, (
            "max_tokens", "batch_tokens", "stride", "fixed_targets",
            "truncated_context_targets", "truncated_context_length",
        ))  # fmt: skip
        if self.seed < 0:
            yield Problem(f"{key}seed", self.seed, "is negative", "give 0 or more")
        yield from _tolerance_problems(self.pruning_tolerance, key)


@dataclass
class NeedleConfig:
    """Needle in a haystack: depth by length."""

    lengths: list[int] | None = None
    """Prompt lengths in tokens; by default 1/2, 1, 2, 4, 8, 16 times the training length."""
    depths: list[float] = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0])
    """Where the needle lies, as shares of the length."""
    num_trials: int = 10
    """Prompts a cell."""
    num_distractors: int = 0
    """Lines of the needle's kind, with other keys and numbers, in every haystack."""
    corpus: str | None = None
    """Prefix of the token files that the haystack is cut from."""
    batch_tokens: int = 16384
    """Tokens put through the model at once."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the model."""
    pruning_tolerance: float | None = None
    """Probability that a head may leave out of a row's far keys where prompt and answer are longer
    than 8,192 tokens; 0 is dense. By default 1e-6 where the model has linear biases and no window,
    else 0."""
    seed: int = 0
    """Seed of haystacks, keys and answers."""
    scaling: dict[str, Any] | None = None
    """`model.scaling` to answer with, instead of the run's; the same factor at every length."""

    def problems(self, key: str) -> Iterator[Problem]:
        """The rules of this section that are broken."""
        yield from _length_problems(self.lengths, f"{key}lengths")
        yield from _positive_problems(self, key, ("num_trials", "batch_tokens"))
        if not 0 <= self.num_distractors <= MAX_DISTRACTORS:
            rule = f"is not 0 to {MAX_DISTRACTORS}"
            yield Problem(f"{key}num_distractors", self.num_distractors, rule, "give fewer")
        if self.seed < 0:
            yield Problem(f"{key}seed", self.seed, "is negative", "give 0 or more")
        yield from _tolerance_problems(self.pruning_tolerance, key)
        if not self.depths:
            yield Problem(f"{key}depths", self.depths, "is empty", "give for example [0, 0.5, 1]")
        for depth in self.depths:
            if not 0 <= depth <= 1:
                yield Problem(f"{key}depths", depth, "is not a share", "give 0 to 1")
        if len(set(self.depths)) != len(self.depths):
            yield Problem(f"{key}depths", self.depths, "names a depth twice", "name it once")


@dataclass
class RetrievalConfig:
    """Retrieval tasks by length: the passkey, associative recall and RULER's."""

    tasks: list[str] | None = None
    """Which of passkey, mqar, niah_single_1 to _3, niah_multikey_1 to _3, niah_multivalue,
    niah_multiquery, vt, cwe, fwe, qa_1, qa_2; by default all, qa_1 and qa_2 as far as there are
    files for them."""
    lengths: list[int] | None = None
    """Prompt lengths in tokens, the answer's room included; by default 1/2, 1, 2, 4, 8, 16 times
    the training length. A task that does not fit a default length is left out there."""
    num_trials: int = 10
    """Prompts a task and length (for the passkey: and distance); half as many controls."""
    threshold: float = RULER_THRESHOLD
    """Average score in percent from which a length counts as effective: RULER's is Llama2-7B's at
    4096."""
    qa_files: list[str] = field(default_factory=list)
    """JSON lines files for qa_1 and qa_2: question, answers, context or documents."""
    sizes: TaskSizes = field(default_factory=TaskSizes)
    """Sizes of the tasks; by default RULER's own."""
    corpus: str | None = None
    """Prefix of the token files that haystacks are cut from."""
    batch_tokens: int = 16384
    """Tokens put through the model at once."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the model."""
    pruning_tolerance: float | None = None
    """Probability that a head may leave out of a row's far keys where prompt and answer are longer
    than 8,192 tokens; 0 is dense. By default 1e-6 where the model has linear biases and no window,
    else 0."""
    seed: int = 0
    """Seed of prompts."""
    scaling: dict[str, Any] | None = None
    """`model.scaling` to answer with, instead of the run's; the same factor at every length."""

    def problems(self, key: str) -> Iterator[Problem]:
        """The rules of this section that are broken."""
        yield from _length_problems(self.lengths, f"{key}lengths")
        yield from _positive_problems(self, key, ("num_trials", "batch_tokens"))
        if self.seed < 0:
            yield Problem(f"{key}seed", self.seed, "is negative", "give 0 or more")
        yield from _tolerance_problems(self.pruning_tolerance, key)
        if not 0 < self.threshold <= 100:
            rule = "is not a percentage"
            yield Problem(f"{key}threshold", self.threshold, rule, f"give {RULER_THRESHOLD}")
        if len(self.qa_files) > 2:
            yield Problem(f"{key}qa_files", self.qa_files, "are more than two", "give one or two")
        if self.tasks is None:
            return
        if not self.tasks:
            yield Problem(f"{key}tasks", self.tasks, "is empty", "give for example [passkey]")
        if len(set(self.tasks)) != len(self.tasks):
            yield Problem(f"{key}tasks", self.tasks, "names a task twice", "name it once")
        for task in self.tasks:
            if task not in TASKS:
                fix = f"give some of {', '.join(TASKS)}"
                yield Problem(f"{key}tasks", task, "is no task", fix)
            elif task.startswith("qa_") and len(self.qa_files) < int(task[-1]):
                yield Problem(f"{key}tasks", task, "has no file", f"set {key}qa_files")


@dataclass
class AttentionSpanConfig:
    """How far heads read."""

    num_tokens: int = 32768
    """Length of the text, from the start of the corpus, documents one after another; above 2,048,
    and best some times the longest reach."""
    num_queries: int = 128
    """Positions of its second half whose true reach is measured."""
    pruning_tolerance: float = 1e-6
    """Share of a row's probability that counts as nothing."""
    corpus: str | None = None
    """Prefix of the token files; by default the run's first validation corpus."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the model."""

    def problems(self, key: str) -> Iterator[Problem]:
        """The rules of this section that are broken."""
        yield from _positive_problems(self, key, ("num_tokens", "num_queries"))
        if not 0 < self.pruning_tolerance < 1:
            yield Problem(
                f"{key}pruning_tolerance",
                self.pruning_tolerance,
                "is not in (0, 1)",
                "give for example 1e-6",
            )


@dataclass
class RanksConfig:
    """How the ranks that `deepspeed` starts share the work."""

    tp: int = 1
    """Ranks that share one model, each with a slice of it; documents and prompts are shared among
    the groups of them. 1: every rank holds the whole model."""

    def problems(self, key: str) -> Iterator[Problem]:
        """The rules of this section that are broken."""
        yield from _positive_problems(self, key, ("tp",))


@dataclass
class GeneralizationConfig:
    """Copying, addition and sorting with more items than were trained."""

    tasks: list[Literal["copy", "addition", "sort"]] = field(
        default_factory=lambda: ["copy", "addition", "sort"]
    )
    """What is asked."""
    lengths: list[int] | None = None
    """Items of a problem; by default 5, 10, ... 40, without those that the model has no positions
    for."""
    trained_items: int = 20
    """Most items of a problem that the model was trained on."""
    num_trials: int = 100
    """Problems a task and length."""
    threshold: float = 0.9
    """Share of exact answers from which on a length counts as mastered."""
    batch_tokens: int = 16384
    """Tokens put through the model at once."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the model."""
    seed: int = 0
    """Seed of the problems."""
    scaling: dict[str, Any] | None = None
    """`model.scaling` to answer with, instead of the run's; the same factor at every length."""

    def problems(self, key: str) -> Iterator[Problem]:
        """The rules of this section that are broken."""
        yield from _length_problems(self.lengths, f"{key}lengths", unit="item")
        yield from _positive_problems(self, key, ("trained_items", "num_trials", "batch_tokens"))
        if self.seed < 0:
            yield Problem(f"{key}seed", self.seed, "is negative", "give 0 or more")
        if not self.tasks:
            yield Problem(f"{key}tasks", self.tasks, "is empty", "name at least one task")
        if len(set(self.tasks)) != len(self.tasks):
            yield Problem(f"{key}tasks", self.tasks, "names a task twice", "name it once")
        if not 0 < self.threshold <= 1:
            yield Problem(f"{key}threshold", self.threshold, "is not in (0, 1]",
                          "give a share such as 0.9")  # fmt: skip


@dataclass
class SuiteConfig:
    """Everything that an eval suite YAML can hold."""

    corpus: str | None = None
    """Prefix of the token files that every eval reads, where its own section names none; by
    default the run's validation corpora."""
    text: str | list[str] | None = None
    """Instead: text files, globs or folders, tokenized with the model's own tokenizer. A .jsonl,
    .parquet or .arrow file has documents in its field `text`; any other file is one document."""
    training_length: int | None = None
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

    def problems(self, key: str) -> Iterator[Problem]:
        """The rules that are broken between sections."""
        yield from _positive_problems(self, key, ("training_length",))
        if self.corpus is not None and self.text is not None:
            rule = "is given beside corpus"
            yield Problem(f"{key}text", str(self.text), rule, "leave one of them out")
        if self.text is not None and not self.text:
            yield Problem(f"{key}text", self.text, "is empty", "name files, globs or folders")


def _length_problems(lengths: list[int] | None, key: str, unit: str = "token") -> Iterator[Problem]:
    if lengths is None:
        return
    if not lengths:
        yield Problem(key, lengths, "is empty", f"give lengths in {unit}s, or leave it out")
    for length in lengths:
        if length < 1:
            yield Problem(key, length, "is not positive", f"give lengths of at least 1 {unit}")
    if len(set(lengths)) != len(lengths):
        yield Problem(key, lengths, "names a length twice", "name it once")


def _tolerance_problems(epsilon: float | None, key: str) -> Iterator[Problem]:
    if epsilon is not None and not 0 <= epsilon < 1:
        yield Problem(
            f"{key}pruning_tolerance", epsilon, "is not in [0, 1)", "give for example 1e-6"
        )


def _positive_problems(section: object, key: str, names: tuple[str, ...]) -> Iterator[Problem]:
    for name in names:
        value = getattr(section, name)
        if value is not None and value < 1:
            yield Problem(f"{key}{name}", value, "is not positive", "give at least 1")
