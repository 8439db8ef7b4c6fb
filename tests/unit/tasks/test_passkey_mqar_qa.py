"""The passkey, associative recall and questions, prompt by prompt; and that time is linear."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from alibi_lm.data.indexed import TokenFile
from alibi_lm.tasks.associative_recall import Recall
from alibi_lm.tasks.config import TASKS, TaskSizes
from alibi_lm.tasks.passkey import FILLER, Passkey, k_max
from alibi_lm.tasks.registry import make_tasks
from alibi_lm.tasks.ruler.qa import read_questions
from alibi_lm.tasks.words import compounds
from alibi_lm.utils.errors import DataError
from tests.unit.lines_run import lines_run
from tests.unit.tasks.token_readers import PATTERNS, PieceTokenizer, corpus_of


@pytest.fixture(scope="module", params=PATTERNS)
def tokenizer(request: pytest.FixtureRequest) -> PieceTokenizer:
    return PieceTokenizer(PATTERNS[request.param])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, tokenizer: PieceTokenizer) -> TokenFile:
    return corpus_of(tmp_path_factory.mktemp("others"), tokenizer, 12000)


@pytest.fixture(scope="module")
def qa_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qa") / "qa.jsonl"
    lines = [
        {"question": f"Who is number {i}?", "answers": [f"Q{i:05d}", "nobody"],
         "documents": [f"Number {i} is Q{i:05d}.", f"More of number {i}. " + "It rains. " * 20]}
        for i in range(1500)
    ]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path


def task_of(
    name: str, tokenizer: Any, corpus: TokenFile, qa_file: Path | None = None, **sizes: Any
) -> Any:
    files = [qa_file] * 2 if qa_file else []
    return make_tasks([name], tokenizer, [corpus], 0, TaskSizes(**sizes), files)[0]


def test_200_passkeys(tokenizer: PieceTokenizer, corpus: TokenFile) -> None:
    """Length exact, key stated in one place, distance within a sentence of the asked one."""
    task = task_of("passkey", tokenizer, corpus)
    assert isinstance(task, Passkey)
    sentence = max(len(tokenizer.encode(" " + text)) for text in FILLER)
    lengths = (task.shortest(0), 512, 1000, 4096)
    for index in range(200):
        length = lengths[index % 4]
        prompt, control = task.prompt(length, index), task.prompt(length, index, control=True)
        assert prompt.length == control.length == length
        text = tokenizer.decode(prompt.tokens.tolist())
        (key,) = prompt.references
        line = f"\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
        assert text.count(line) == 1
        assert text.count(key) == 2
        assert text.startswith("There is an important info hidden inside")
        assert text.endswith("\nWhat is the pass key? The pass key is")
        assert key not in tokenizer.decode(control.tokens.tolist())
        asked = task.distances(length)[index % 8]
        assert prompt.counts["asked"] == asked
        assert asked - sentence < prompt.distance <= asked
        after = tokenizer.decode(prompt.tokens[-prompt.distance :].tolist())
        assert after.startswith(line)
        assert after[len(line) :].startswith(("The grass is green.", "\nWhat"))
        assert len(set(prompt.candidates)) == 10
        assert tokenizer.decode(prompt.candidates[prompt.truth]) == f" {key}"
    distances = task.distances(4096)
    steps = {b - a for a, b in zip(distances, distances[1:], strict=False)}
    assert max(steps) - min(steps) <= 1
    assert distances[-1] > 0.95 * 4096


def test_k_max_is_the_largest_distance_with_success_at_all_smaller() -> None:
    assert k_max([(100, 1.0), (200, 0.2), (300, 0.19), (400, 1.0)]) == 200
    assert k_max([(200, 0.5), (100, 0.1)]) is None
    assert k_max([(300, 0.5), (100, 0.3), (200, 0.2)]) == 300


def test_200_recall_prompts(tokenizer: PieceTokenizer, corpus: TokenFile) -> None:
    """Pairs with different keys and values, then queries; only the last one's value is missing."""
    task = task_of("mqar", tokenizer, corpus, mqar_num_pairs=6, mqar_num_queries=3)
    assert isinstance(task, Recall)
    assert task.chance == 1 / 6
    lengths = (task.shortest(0), 200, 1024, 4096)
    for index in range(200):
        length = lengths[index % 4]
        prompt = task.prompt(length, index)
        assert prompt.length == length
        text = tokenizer.decode(prompt.tokens.tolist())
        match = re.match(r"((?:\n[A-Z]{2}: \d\d)+)\n", text)
        assert match is not None
        pairs = dict(re.findall(r"\n([A-Z]{2}): (\d\d)", match[1]))
        assert len(pairs) == len(set(pairs.values())) == 6
        queries = re.findall(r"\n([A-Z]{2}):(?: (\d\d))?", text[match.end() - 1 :])
        assert len(queries) == len({key for key, _ in queries}) == 3
        assert all(pairs[key] == value for key, value in queries[:-1])
        last, missing = queries[-1]
        assert missing == ""
        assert text.endswith(f"\n{last}:")
        assert prompt.references == (pairs[last],)
        assert text.count(f"\n{last}:") == 2
        values = [tokenizer.decode(candidate).strip() for candidate in prompt.candidates]
        assert sorted(values) == sorted(pairs.values())
        assert values[prompt.truth] == pairs[last]
        start = tokenizer.decode(prompt.tokens[-prompt.distance :].tolist())
        assert start.startswith(f"\n{last}: {pairs[last]}\n")
        control = task.prompt(length, index, control=True)
        assert control.length == length
        assert tokenizer.decode(control.tokens.tolist()).count(f"\n{last}:") == 1


def test_200_questions(tokenizer: PieceTokenizer, corpus: TokenFile, qa_file: Path) -> None:
    """The question's documents once each, no other one with an answer, filled up to the length."""
    task = task_of("qa_1", tokenizer, corpus, qa_file)
    for index in range(200):
        length = (task.shortest(0) + 8, 1000, 4096)[index % 3]
        prompt = task.prompt(length, index)
        text = tokenizer.decode(prompt.tokens.tolist())
        number = re.search(r"\nQuestion: Who is number (\d+)\? Answer:$", text)
        assert number is not None
        assert prompt.references == (f"Q{int(number[1]):05d}", "nobody")
        assert text.count(prompt.references[0]) == 1
        documents = re.findall(r"^Document (\d+):$", text, re.MULTILINE)
        assert [int(which) for which in documents] == list(range(1, len(documents) + 1))
        assert text.count(f"ore of number {number[1]}.") == 1
        assert text.count("Only give me the answer and do not output any other words.") == 2
        assert (length < 1000) or length - 100 < prompt.length <= length
        control = task.prompt(length, index, control=True)
        assert prompt.references[0] not in tokenizer.decode(control.tokens.tolist())
        assert not task.published
    with pytest.raises(DataError, match="too few for 10,000,000"):
        task.shortest(10_000_000)


def test_wrong_files_of_questions_are_named_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "qa.jsonl"
    lines = (
        '{"question": "a?", "answer": "x", "context": "y"}',
        *("not json", '{"question": "b?"}', "[1]"),
        '{"question": "c?", "answers": [1], "context": "y"}',
    )  # fmt: skip
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError) as error:
        read_questions(path)
    keys = [problem.key for problem in error.value.problems]
    assert keys == [f"{path}:{line}" for line in (2, 3, 4, 5)]
    path.write_text("\n")
    with pytest.raises(DataError, match="holds no question"):
        read_questions(path)
    path.write_text('{"question": "a?", "answer": "x", "context": "y"}\n')
    questions, documents = read_questions(path)
    assert (questions[0].answers, documents) == (("x",), ["y"])


@pytest.mark.parametrize("name", TASKS)
def test_making_a_prompt_takes_steps_linear_in_its_length(
    name: str, tokenizer: PieceTokenizer, corpus: TokenFile, qa_file: Path
) -> None:
    """Four times the tokens: at most four times the lines run, and the characters encoded."""
    compounds()  # made once, whatever the length
    steps, characters = [], []
    # cwe joins words together once a list is longer than the plain ones reach.
    for length in (32768, 131072) if name == "cwe" else (8192, 32768):
        fresh = task_of(name, tokenizer, corpus, qa_file)
        before = tokenizer.num_characters
        steps.append(lines_run(partial(fresh.prompt, length, 0)))
        characters.append(tokenizer.num_characters - before)
    assert steps[1] <= 4.4 * steps[0] + 2000
    assert characters[1] <= 4.4 * characters[0] + 2000
