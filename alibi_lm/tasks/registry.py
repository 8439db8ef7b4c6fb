"""The retrieval tasks by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from alibi_lm.data.indexed import TokenFile
from alibi_lm.data.tokenizer import Tokenizer
from alibi_lm.tasks.associative_recall import Recall
from alibi_lm.tasks.config import ADDED_TASKS, QA, TaskSizes
from alibi_lm.tasks.haystack import Haystack
from alibi_lm.tasks.passkey import Passkey
from alibi_lm.tasks.prompt import Encoder, Task
from alibi_lm.tasks.ruler.niah import NIAH, Niah, NiahSetting
from alibi_lm.tasks.ruler.qa import QuestionAnswering
from alibi_lm.tasks.ruler.variable_tracking import Tracking
from alibi_lm.tasks.ruler.word_counting import CommonWords, FrequentWords
from alibi_lm.utils.errors import ConfigError, Problem

FROM_CORPUS = {
    "mqar",
    *(name for name, setting in NIAH.items() if setting.haystack == "corpus"),
}
"""Tasks whose haystack is a slice of the corpus."""


@dataclass(frozen=True)
class TaskInputs:
    """What tasks are made from."""

    encode: Encoder
    haystack: Haystack
    seed: int
    sizes: TaskSizes
    qa_files: Sequence[Path] = ()


def _niah(name: str, inputs: TaskInputs) -> Task:
    setting, budget = niah_setting(name, inputs.sizes), inputs.sizes.tokens_to_generate
    published = setting == NIAH[name]
    return Niah(name, setting, inputs.encode, inputs.haystack, inputs.seed, budget, published)


def _qa(name: str, inputs: TaskInputs) -> Task:
    file, budget = inputs.qa_files[QA.index(name)], inputs.sizes.tokens_to_generate
    return QuestionAnswering(name, file, inputs.encode, inputs.seed, budget)


FACTORIES: dict[str, Callable[[TaskInputs], Task]] = {
    "passkey": lambda inputs: Passkey(inputs.encode, inputs.seed, inputs.sizes),
    "mqar": lambda inputs: Recall(inputs.encode, inputs.haystack, inputs.seed, inputs.sizes),
    "vt": lambda inputs: Tracking(inputs.encode, inputs.seed, inputs.sizes),
    "cwe": lambda inputs: CommonWords(inputs.encode, inputs.seed, inputs.sizes),
    "fwe": lambda inputs: FrequentWords(inputs.encode, inputs.seed, inputs.sizes),
    **{name: partial(_niah, name) for name in NIAH},
    **{name: partial(_qa, name) for name in QA},
}
"""Makers of the tasks by name."""

Factory = TypeVar("Factory", bound=Callable[[TaskInputs], Task])


def register_task(name: str, *, from_corpus: bool = False) -> Callable[[Factory], Factory]:
    """Make a task known to `retrieval.tasks`: a decorator of its class or of a function.

    Args:
        name: in settings and results.
        from_corpus: whether its prompts are cut from the corpus, which then must be long enough.

    Raises:
        ConfigError: another task has that name.
    """

    def add(factory: Factory) -> Factory:
        known = FACTORIES.get(name)
        if known is not None and getattr(known, "__qualname__", "") != factory.__qualname__:
            raise ConfigError(Problem(name, None, "is the name of two tasks", "rename one"))
        FACTORIES[name] = factory
        if name not in ADDED_TASKS:
            ADDED_TASKS.append(name)
        if from_corpus:
            FROM_CORPUS.add(name)
        return factory

    return add


def make_tasks(
    names: Sequence[str],
    tokenizer: Tokenizer,
    files: Sequence[TokenFile],
    seed: int,
    sizes: TaskSizes,
    qa_files: Sequence[Path] = (),
) -> list[Task]:
    """The named tasks.

    Raises:
        DataError: a qa file that cannot be read, or a tokenizer that cannot write numbers.
    """
    inputs = TaskInputs(Encoder(tokenizer), Haystack(tokenizer, files), seed, sizes, qa_files)
    return [FACTORIES[name](inputs) for name in names]


def niah_setting(name: str, sizes: TaskSizes) -> NiahSetting:
    """RULER's setting of a niah task, with the sizes asked for."""
    published = NIAH[name]
    if name == "niah_multikey_1":
        return replace(published, num_keys=sizes.num_keys)
    if name == "niah_multivalue":
        return replace(published, num_values=sizes.num_values)
    if name == "niah_multiquery":
        return replace(published, num_keys=sizes.num_queries, num_queries=sizes.num_queries)
    return published
