"""The retrieval tasks by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from alibi_lm.data.indexed import TokenFile
from alibi_lm.data.tokenizer import Tokenizer
from alibi_lm.tasks.associative_recall import Recall
from alibi_lm.tasks.config import QA, TaskSizes
from alibi_lm.tasks.haystack import Haystack
from alibi_lm.tasks.passkey import Passkey
from alibi_lm.tasks.prompt import Encoder, Task
from alibi_lm.tasks.ruler.niah import NIAH, Niah, NiahSetting
from alibi_lm.tasks.ruler.qa import QuestionAnswering
from alibi_lm.tasks.ruler.variable_tracking import Tracking
from alibi_lm.tasks.ruler.word_counting import CommonWords, FrequentWords

FROM_CORPUS = (
    "mqar",
    *(name for name, setting in NIAH.items() if setting.haystack == "corpus"),
)
"""Tasks whose haystack is a slice of the corpus."""


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
    encode = Encoder(tokenizer)
    haystack = Haystack(tokenizer, files)
    return [_make(name, encode, haystack, seed, sizes, qa_files) for name in names]


def _make(
    name: str,
    encode: Encoder,
    haystack: Haystack,
    seed: int,
    sizes: TaskSizes,
    qa_files: Sequence[Path],
) -> Task:
    if name == "passkey":
        return Passkey(encode, seed, sizes)
    if name == "mqar":
        return Recall(encode, haystack, seed, sizes)
    if name == "vt":
        return Tracking(encode, seed, sizes)
    if name == "cwe":
        return CommonWords(encode, seed, sizes)
    if name == "fwe":
        return FrequentWords(encode, seed, sizes)
    answer_budget = sizes.tokens_to_generate
    if name in QA:
        return QuestionAnswering(name, qa_files[QA.index(name)], encode, seed, answer_budget)
    setting = niah_setting(name, sizes)
    return Niah(name, setting, encode, haystack, seed, answer_budget, setting == NIAH[name])


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
