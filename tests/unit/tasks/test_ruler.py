"""RULER's tasks, 200 seeded prompts each, property by property against their definitions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alibi_lm.data.indexed import TokenFile, TokenFileWriter
from alibi_lm.tasks.config import RULER, TaskSizes
from alibi_lm.tasks.prompt import Prompt, Task
from alibi_lm.tasks.registry import FROM_CORPUS, make_tasks
from alibi_lm.tasks.ruler.niah import NIAH
from alibi_lm.tasks.ruler.word_counting import CommonWords, FrequentWords
from alibi_lm.tasks.words import NUM_KEYS, key_word
from alibi_lm.utils.errors import DataError
from tests.unit.tasks.token_readers import PATTERNS, PieceTokenizer, corpus_of

NUM_PROMPTS = 200
LINE = re.compile(r"One of the special magic (numbers|uuids) for (\S+) is: (\S+)\.\n")
UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


@pytest.fixture(scope="module", params=PATTERNS)
def tokenizer(request: pytest.FixtureRequest) -> PieceTokenizer:
    return PieceTokenizer(PATTERNS[request.param])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, tokenizer: PieceTokenizer) -> TokenFile:
    return corpus_of(tmp_path_factory.mktemp("ruler"), tokenizer, 3000)


def task_of(name: str, tokenizer: Any, corpus: TokenFile, sizes: TaskSizes | None = None) -> Task:
    return make_tasks([name], tokenizer, [corpus], 0, sizes or TaskSizes())[0]


def prompts_of(task: Task, tokenizer: Any) -> Iterator[tuple[Prompt, str, int]]:
    """200 prompts with their text and the length asked for, from the shortest length on."""
    lengths = (task.shortest(512), 1600, 2500, 4096)
    for index in range(NUM_PROMPTS):
        length = max(task.shortest(lengths[index % 4]), lengths[index % 4])
        prompt = task.prompt(length, index)
        assert prompt.length <= length
        assert len(prompt.tokens) + prompt.answer_budget == prompt.length
        yield prompt, tokenizer.decode(prompt.tokens.tolist()), length


@pytest.mark.parametrize("name", NIAH)
def test_needles(name: str, tokenizer: PieceTokenizer, corpus: TokenFile) -> None:
    """Counts of keys, values and queries, each needle once, in the haystack of its kind."""
    task, setting = task_of(name, tokenizer, corpus), NIAH[name]
    for prompt, text, length in prompts_of(task, tokenizer):
        assert prompt.answer_budget == 128
        lines = LINE.findall(text)
        assert {kind for kind, _, _ in lines} == {setting.values}
        stated = {key: [v for _, k, v in lines if k == key] for _, key, _ in lines}
        question = text[text.rindex("\nWhat ") + 1 :]
        asked = re.findall(r"special magic \w+ for (.+?) mentioned in the provided text", question)
        assert len(asked) == 2
        assert asked[0] == asked[1]
        queries = re.split(r", and |, ", asked[0])
        assert len(queries) == len(set(queries)) == setting.num_queries
        order = sorted if setting.num_values > 1 else list  # values of a key: in any order
        assert order(prompt.references) == order(v for query in queries for v in stated[query])
        assert len(prompt.references) == setting.num_queries * setting.num_values
        values = [value for _, _, value in lines]
        assert len(set(values)) == len(values) == len({(k, v) for _, k, v in lines})
        assert all(text.count(f" is: {value}.\n") == 1 for value in prompt.references)
        if setting.haystack == "needle":
            assert len(stated) == len(lines)
            assert LINE.sub("", text).count("\n") == 1  # between head and question
        else:
            assert len(stated) == setting.num_keys
            assert len(lines) == setting.num_keys * setting.num_values
            assert (text.count(NOISE + "\n") > 0) == (setting.haystack == "noise")
        for key in stated:
            assert UUID.fullmatch(key) if setting.keys == "uuids" else re.fullmatch(
                "[a-z]+-[a-z]+", key)  # fmt: skip
        for value in values:
            assert UUID.fullmatch(value) if setting.values == "uuids" else re.fullmatch(
                "[1-9][0-9]{6}", value)  # fmt: skip
        _check_frame(text, setting.single, setting.values)
        _check_candidates(task, prompt, tokenizer)
        if name in FROM_CORPUS:
            assert prompt.length == length
        first = min(text.index(f" for {query} is: ") for query in queries)
        assert text.rindex("One of", 0, first) >= len(text) - len(
            tokenizer.decode(prompt.tokens[-prompt.distance :].tolist())
        )


def _check_frame(text: str, single: bool, kind: str) -> None:
    if single:
        assert text.startswith(f"A special magic {kind[:-1]} is hidden within the following text. "
                               f"Make sure to memorize it. I will quiz you about the {kind[:-1]} "
                               "afterwards.\n")  # fmt: skip
        assert text.endswith("mentioned in the provided text is")
        assert f"\nWhat is the special magic {kind[:-1]} for " in text
    else:
        assert text.startswith(f"Some special magic {kind} are hidden within the following text.")
        assert text.endswith("mentioned in the provided text are")
        assert f"\nWhat are all the special magic {kind} for " in text


def _check_candidates(task: Task, prompt: Prompt, tokenizer: PieceTokenizer) -> None:
    if task.chance is None:
        assert prompt.candidates == ()
        return
    assert len(set(prompt.candidates)) == round(1 / task.chance)
    assert len({len(candidate) for candidate in prompt.candidates}) == 1
    right = tokenizer.decode(prompt.candidates[prompt.truth])
    assert f": {prompt.references[0]}".startswith(right)
    for which, candidate in enumerate(prompt.candidates):
        beginning = tokenizer.decode(candidate)
        assert (f": {prompt.references[0]}".startswith(beginning)) == (which == prompt.truth)


@pytest.mark.parametrize(("num_chains", "num_hops"), [(1, 4), (2, 3)])
def test_variable_tracking(
    tokenizer: PieceTokenizer, corpus: TokenFile, num_chains: int, num_hops: int
) -> None:
    """Chains and hops, each assignment after the one it needs, all in noise; one example."""
    sizes = TaskSizes(vt_num_chains=num_chains, vt_num_hops=num_hops)
    task = task_of("vt", tokenizer, corpus, sizes)
    assert task.published == (num_chains == 1)
    for prompt, text, _ in prompts_of(task, tokenizer):
        assert prompt.answer_budget == 30
        example, main = (part for part in text.split("Memorize and track the chain(s) of variable "
                                                     "assignment hidden in the following text.\n\n")
                         if part)  # fmt: skip
        for body, letters, chains in ((example, 3, 1), (main, 5, num_chains)):
            value = re.search(r"assigned the value (\d{5}) in the text above", body)
            assert value is not None
            links = re.findall(r"^VAR ([A-Z]+) = (?:VAR ([A-Z]+) |(\d{5}))$", body, re.MULTILINE)
            assert len(links) == chains * (num_hops + 1)
            assert sum(bool(number) for _, _, number in links) == chains
            known: dict[str, str] = {}
            for name, before, number in links:
                assert len(name) == letters
                assert name not in known
                known[name] = number or known[before]
            names = [name for name, number in known.items() if number == value[1]]
            assert len(names) == num_hops + 1
            assert f"{num_hops + 1} variables are assigned the value {value[1]}" in body
            if body is main:
                assert tuple(names) == prompt.references
                assert body.endswith("they are: ")
            else:
                assert body.endswith("they are:  " + " ".join(names) + "\n\n")
            rest = re.sub(r"^VAR .*\n", "", body[: body.index("\nQuestion")], flags=re.MULTILINE)
            assert set(rest.split("\n")) == {NOISE} | ({""} if rest.endswith("\n") else set())
        start = prompt.tokens[-prompt.distance :].tolist()
        assert tokenizer.decode(start).startswith(f"VAR {prompt.references[0]} = ")


def test_common_words(tokenizer: PieceTokenizer, corpus: TokenFile) -> None:
    """Ten words 30 times and others 3 times (6 and 1 below 4096), numbered, after an example."""
    task = task_of("cwe", tokenizer, corpus)
    assert isinstance(task, CommonWords)
    lengths = set()
    for prompt, text, length in prompts_of(task, tokenizer):
        assert prompt.answer_budget == 120
        head = "Memorize the ones that appear most often.\n"
        _, example, main = text.split(head)
        sizes = ((3, 1, 20), (6, 1, None)) if length < 4096 else ((10, 3, 40), (30, 3, None))
        for body, (common, uncommon, num_words) in zip((example, main), sizes, strict=True):
            listed, question = body.split("\nQuestion: What are the 10 most common words in ")
            items = re.findall(r"(\d+)\. ([a-z]+)", listed)
            assert [int(number) for number, _ in items] == list(range(1, len(items) + 1))
            assert listed == " ".join(f"{number}. {word}" for number, word in items)
            counts = Counter(word for _, word in items)
            top = {word for word, count in counts.items() if count == common}
            assert len(top) == 10
            assert set(counts.values()) == {common, uncommon}
            assert num_words is None or len(counts) == num_words
            if body is main:
                assert top == set(prompt.references)
                assert question.endswith("that appear most often in the list are:")
                others = set(counts) - top
                assert not any(a in b or b in a for a in top for b in others)
            else:
                answer = re.findall(r"\d+\. ([a-z]+)", question)
                assert set(answer) == top
        lengths.add(length)
    assert max(lengths) >= 4096


def test_frequent_words(tokenizer: PieceTokenizer, corpus: TokenFile) -> None:
    """Words by a zeta distribution of exponent 2: dots first, then the three asked for."""
    task = task_of("fwe", tokenizer, corpus)
    assert isinstance(task, FrequentWords)
    for prompt, text, length in prompts_of(task, tokenizer):
        assert prompt.answer_budget == 50
        listed = text.split("Find the three most frequently appeared coded words. ")[1]
        counts = Counter(listed.split("\nQuestion: ")[0].split(" "))
        ranked = counts.most_common()
        assert ranked[0][0] == "..."
        assert {word for word, _ in ranked[1:4]} == set(prompt.references)
        assert all(re.fullmatch("[a-z]{6}", word) for word, _ in ranked[1:])
        assert len(counts) <= (length - 50) // 50
        # draws x k^-2 / zeta(2), cut to whole numbers, for the number of draws that the dots give.
        share = 6 / 3.141592653589793**2
        for rank, (_, number) in enumerate(ranked, 1):
            low, high = ranked[0][1] / rank**2, (ranked[0][1] + 1) / rank**2
            assert int(low) <= number <= high, (rank, share)
        assert ranked[3][1] > (ranked[4][1] if len(ranked) > 4 else 0)
        assert text.endswith("the three most frequently appeared words are:")


@pytest.mark.parametrize("name", [name for name in RULER if not name.startswith("qa")])
def test_controls_lack_what_is_asked_for(
    name: str, tokenizer: PieceTokenizer, corpus: TokenFile
) -> None:
    task = task_of(name, tokenizer, corpus)
    for index in range(20):
        length = max(task.shortest(3000), 3000)
        prompt, control = task.prompt(length, index), task.prompt(length, index, control=True)
        text = tokenizer.decode(control.tokens.tolist())
        body = text if name != "cwe" else text.rpartition("Memorize the ones")[2]
        assert control.references == prompt.references
        assert not any(reference in body for reference in prompt.references)
        assert 0.8 * length < control.length <= length


def test_prompts_are_a_function_of_seed_length_and_index(
    tokenizer: PieceTokenizer, corpus: TokenFile
) -> None:
    for name in RULER[:-2]:
        first, again = (task_of(name, tokenizer, corpus) for _ in range(2))
        length = max(4096, first.shortest(4096))
        again.prompt(length, 5)
        same = first.prompt(length, 1).tokens.tolist()
        assert same == again.prompt(length, 1).tokens.tolist()
        assert same != first.prompt(length, 2).tokens.tolist()


def test_the_published_lengths_fit_the_published_sizes(
    tokenizer: PieceTokenizer, corpus: TokenFile
) -> None:
    for name in RULER[:-2]:
        task = task_of(name, tokenizer, corpus)
        assert task.published
        assert task.shortest(4096) <= 4096 or name.endswith("multikey_3"), name


def test_a_corpus_that_holds_the_keys_is_refused(tmp_path: Path) -> None:
    tokenizer = PieceTokenizer(PATTERNS["words"])
    text = "\n".join(key_word(i) for i in range(NUM_KEYS)) + "\n"
    writer = TokenFileWriter(tmp_path / "v", np.uint16)
    writer.add_document(tokenizer.encode(text))
    corpus = writer.finish()
    task = task_of("niah_single_2", tokenizer, corpus)
    with pytest.raises(DataError, match="already contains most keys"):
        task.prompt(int(corpus.num_tokens), 0)
