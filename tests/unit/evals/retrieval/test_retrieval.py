"""Retrieval tasks put to models whose behavior is known by construction."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from alibi_lm.evals.config import RetrievalConfig
from alibi_lm.evals.models.base import NativeModel
from alibi_lm.evals.report.report import summary_lines, write_report
from alibi_lm.evals.results import evaluate, finished, run_and_store
from alibi_lm.evals.retrieval.display import retrieval_table
from alibi_lm.evals.retrieval.distance_bins import distance_bin
from alibi_lm.evals.retrieval.evaluation import Retrieval
from alibi_lm.evals.retrieval.ruler_table import ruler_table
from alibi_lm.evals.retrieval.scoring import equal_batches
from alibi_lm.evals.suite import read_suite
from alibi_lm.tasks.config import TASKS, TaskSizes, default_tasks
from alibi_lm.utils.errors import ConfigError, DataError
from tests.unit.evals.evals_fakes import (
    EOS,
    WordTokenizer,
    code_text,
    fake_step,
    write_documents,
)
from tests.unit.evals.retrieval.solving_scorer import SolvingScorer

LENGTH = 1024
LENGTHS = [1024, 2048, 4096]
BY_DISTANCE = [name for name in TASKS if name not in ("cwe", "fwe")]
"""Tasks whose answer stands at certain places; lists of words can be answered from a part."""


@pytest.fixture(scope="module")
def tokenizer() -> WordTokenizer:
    return WordTokenizer()


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory, tokenizer: WordTokenizer) -> Path:
    documents = [[*tokenizer.encode(code_text(seed, 400)), EOS] for seed in range(8)]
    return write_documents(tmp_path_factory.mktemp("retrieval") / "v", documents)


@pytest.fixture(scope="module")
def qa_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qa") / "qa.jsonl"
    lines = []
    for i in range(300):
        name = f"P{chr(97 + i % 26)}{chr(97 + i // 26)}q"
        context = f"Number {i} is {name}. " + "He likes tea and toast. " * 5
        question = f"Who is number {i}?"
        lines.append(json.dumps({"question": question, "answers": [name], "context": context}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def subject_of(folder: Path, prefix: Path, tokenizer: Any, length: int = LENGTH) -> NativeModel:
    step = fake_step(folder, [prefix], length=length)
    step.fake_tokenizer = tokenizer
    return NativeModel(step)


@pytest.fixture(scope="module")
def oracle_subject(
    tmp_path_factory: pytest.TempPathFactory, prefix: Path, tokenizer: WordTokenizer
) -> NativeModel:
    return subject_of(tmp_path_factory.mktemp("oracle"), prefix, tokenizer)


@pytest.fixture(scope="module")
def oracle(oracle_subject: NativeModel, tokenizer: WordTokenizer, qa_file: Path) -> Any:
    config = RetrievalConfig(lengths=LENGTHS, qa_files=[str(qa_file)] * 2)
    return run_and_store(Retrieval(), oracle_subject, config, SolvingScorer(tokenizer))


def run(
    folder: Path, prefix: Path, tokenizer: Any, qa_file: Path, scorer: Any, **settings: Any
) -> Any:
    config = RetrievalConfig(lengths=LENGTHS, qa_files=[str(qa_file)] * 2, **settings)
    return run_and_store(Retrieval(), subject_of(folder, prefix, tokenizer), config, scorer)


def test_an_oracle_is_right_in_every_cell_of_every_task(oracle: Any) -> None:
    assert [task.name for task in oracle.tasks] == list(TASKS)
    assert len(oracle.cells) == len(TASKS) * len(LENGTHS)
    for cell in oracle.cells:
        assert cell.score.rate == cell.whole.rate == 1, cell
        assert cell.trials == (80 if cell.task == "passkey" else 10)
        assert cell.control.trials == 5
        assert cell.control.whole.rate == 0, cell
        if cell.ranking is not None:
            assert cell.ranking.rate == 1
        low, high = cell.real_length
        assert 0.8 * cell.length < low <= high <= cell.length
    assert {verdict.word for verdict in oracle.verdicts} == {"holds"}
    assert oracle.verdict.word == "holds"
    assert "olds beyond the training length of 1,024: passkey, mqar" in oracle.verdict.text


def test_an_oracles_table_is_rulers(oracle: Any) -> None:
    table = oracle.table
    assert table.columns == list(TASKS[2:])
    assert [row.average for row in table.rows] == [100, 100, 100]
    assert table.average == table.increasing == table.decreasing == 100
    assert (table.threshold, table.effective_length) == (85.6, 4096)
    lines = "\n".join(retrieval_table(oracle))
    assert "Effective length at 85.6%: 4,096 or more." in lines
    assert "not of RULER's own sizes or texts: qa_1, qa_2" in lines
    for row in oracle.passkey.k_max:
        distances = [r.distance for r in oracle.passkey.rows if r.length == row.length]
        assert len(distances) == 8
        assert row.k_max == max(distances) > 0.9 * row.length


def test_the_report_shows_it(oracle: Any, oracle_subject: NativeModel) -> None:
    class Page(HTMLParser):
        text = ""

        def handle_data(self, data: str) -> None:
            self.text += data

    page = Page()
    source = write_report(oracle_subject).read_text(encoding="utf-8")
    page.feed(source)
    (table,) = re.findall(r'<div class="wide"><table class="narrow">(.*?)</table></div>', source,
                          re.DOTALL)  # fmt: skip
    assert re.findall("<th>(.*?)</th>", table)[-4:] == ["fwe", "qa 1", "qa 2", "average"]
    assert ".wide { overflow-x: auto; }" in source
    assert re.search(r"\.narrow th { white-space: normal;", source)
    for words in (
        "Effective length at 85.6%: 4,096 or more",
        "k_max, the largest distance",
        "niah_multikey_3: retrieves within 1,024",
        "Not of RULER's own sizes or texts: qa_1, qa_2.",
    ):
        assert words in page.text
    for name in ("retrieval", "passkey"):
        assert (oracle_subject.evals_folder / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    assert "passkey, length 4,096: k_max" in "\n".join(summary_lines(oracle_subject))


def test_a_model_that_sees_its_last_tokens_fails_beyond_them(
    tmp_path: Path, prefix: Path, tokenizer: WordTokenizer, qa_file: Path
) -> None:
    scorer = SolvingScorer(tokenizer, context_limit=LENGTH)
    result = run(tmp_path, prefix, tokenizer, qa_file, scorer, tasks=BY_DISTANCE)
    for verdict in result.verdicts:
        assert verdict.word == "fails beyond", verdict
        assert "facts more than 1,024 tokens back are not found at any length" in verdict.text
        assert "longer input itself breaks it" not in verdict.text
    assert result.verdict.word == "fails beyond"
    assert result.verdict.text.startswith("Retrieves up to 1,024, fails beyond 1,024: passk")
    for cell in result.cells:
        assert cell.near is None or cell.near.whole.rate == 1
        assert cell.far is None or cell.far.whole.rate == 0
    for row in result.by_distance:
        assert row.whole.rate == (row.up_to <= LENGTH), row
    for row in result.passkey.k_max:
        asked = [r.distance for r in result.passkey.rows if r.length == row.length]
        assert row.k_max == max(distance for distance in asked if distance <= LENGTH + 5)


def test_a_model_that_breaks_past_a_length_is_said_to_break_there(
    tmp_path: Path, prefix: Path, tokenizer: WordTokenizer, qa_file: Path
) -> None:
    scorer = SolvingScorer(tokenizer, longest=LENGTH)
    tasks = ["passkey", "niah_single_1", "niah_multiquery", "vt"]
    result = run(tmp_path, prefix, tokenizer, qa_file, scorer, tasks=tasks)
    for verdict in result.verdicts:
        assert verdict.word == "fails beyond", verdict
        nearer_shown = verdict.task in ("passkey", "niah_single_1")  # others: no prompt is all near
        assert ("so longer input itself breaks it" in verdict.text) == nearer_shown
    assert result.table.effective_length == 1024
    farther: Any = run_and_store(
        Retrieval(),
        subject_of(tmp_path / "b", prefix, tokenizer),
        RetrievalConfig(lengths=LENGTHS, tasks=tasks),
        SolvingScorer(tokenizer, longest=2048),
    )
    assert {verdict.word for verdict in farther.verdicts} == {"fades"}
    assert farther.table.effective_length == 2048


@pytest.mark.parametrize("seed", range(2))
def test_a_blind_model_scores_the_closed_book_rate(
    tmp_path: Path, prefix: Path, tokenizer: WordTokenizer, qa_file: Path, seed: int
) -> None:
    scorer = SolvingScorer(tokenizer, blind=True)
    result = run(tmp_path, prefix, tokenizer, qa_file, scorer, seed=seed, num_trials=20)
    chances = {task.name: task.chance for task in result.tasks}
    for task in TASKS:
        cells = [cell for cell in result.cells if cell.task == task]
        assert all(cell.score.rate == 0 for cell in cells)
        assert all(cell.control.score.rate == 0 for cell in cells)
        if chances[task] is not None:
            trials = sum(cell.trials for cell in cells)
            right = sum(cell.ranking.correct for cell in cells)
            spread = (chances[task] * (1 - chances[task]) / trials) ** 0.5
            assert abs(right / trials - chances[task]) < 4 * spread
    assert {verdict.word for verdict in result.verdicts} == {"does not retrieve"}
    assert result.verdict.text.startswith("Does not retrieve at all up to 1,024: passkey")
    assert result.table.effective_length is None


def test_lengths_that_do_not_fit_are_left_out_by_name_or_refused(
    tmp_path: Path, prefix: Path, tokenizer: WordTokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    eval_model = subject_of(tmp_path, prefix, tokenizer, length=128)
    tasks = ["passkey", "niah_single_2", "cwe"]
    config = RetrievalConfig(tasks=tasks, num_trials=1)
    result: Any = run_and_store(Retrieval(), eval_model, config, SolvingScorer(tokenizer))
    assert finished(Retrieval(), eval_model, config) is not None
    left = {(row.task, row.length) for row in result.left_out}
    assert {("niah_single_2", 64), ("niah_single_2", 128), ("cwe", 128)} <= left
    assert {(c.task, c.length) for c in result.cells}.isdisjoint(left)
    warned = capsys.readouterr().err
    assert "left out by default: niah_single_2 at 64, 128" in warned
    assert next(row for row in result.table.rows).average is None
    with pytest.raises(ConfigError) as error:
        run_and_store(
            Retrieval(), eval_model, RetrievalConfig(tasks=tasks, lengths=[128, 2048]), None
        )
    assert [problem.value for problem in error.value.problems] == [128, 128]
    assert "retrieval.sizes" in str(error.value)
    with pytest.raises(ConfigError, match="the longest haystack corpus"):
        run_and_store(
            Retrieval(), eval_model, RetrievalConfig(tasks=["mqar"], lengths=[10**6]), None
        )


def test_smaller_sizes_fit_and_are_not_called_rulers(
    tmp_path: Path, prefix: Path, tokenizer: WordTokenizer
) -> None:
    suite = read_suite(Path(__file__).parents[4] / "evals" / "retrieval-small.yaml").retrieval
    eval_model = subject_of(tmp_path, prefix, tokenizer, length=256)
    suite.num_trials = 2
    result = run_and_store(Retrieval(), eval_model, suite, SolvingScorer(tokenizer))
    assert {row.length for row in result.left_out} == {128, 256}
    assert {cell.task for cell in result.cells if cell.length == 256} >= {"vt", "cwe"}
    assert all(cell.score.rate == 1 for cell in result.cells)
    assert not any(task.published for task in result.tasks if task.ruler)
    assert "not of RULER's own sizes or texts: niah_single_1" in "\n".join(retrieval_table(result))


def test_wrong_settings_are_refused_together(
    tmp_path: Path, prefix: Path, tokenizer: WordTokenizer
) -> None:
    with pytest.raises(ConfigError) as error:
        read_suite(None, [
            "retrieval.tasks=[passkey,passkey,niah,qa_1]", "retrieval.threshold=0",
            "retrieval.sizes.mqar_num_queries=9", "retrieval.sizes.fwe_num_words=2",
            "retrieval.lengths=[0]",
        ])  # fmt: skip
    keys = {problem.key for problem in error.value.problems}
    assert keys == {
        "retrieval.tasks", "retrieval.threshold", "retrieval.sizes.mqar_num_queries",
        "retrieval.sizes.fwe_num_words", "retrieval.lengths.0",
    }  # fmt: skip
    eval_model = subject_of(tmp_path, prefix, tokenizer)
    with pytest.raises(DataError, match="no such file"):
        run_and_store(
            Retrieval(), eval_model, RetrievalConfig(qa_files=[str(tmp_path / "none")]), None
        )
    eval_model.checkpoint.fake_tokenizer = None  # type: ignore[attr-defined]
    with pytest.raises(DataError, match="no tokenizer"):
        run_and_store(Retrieval(), eval_model, RetrievalConfig(), None)


def test_evaluate_skips_what_is_done_and_reads_a_changed_file_again(
    tmp_path: Path, prefix: Path, tokenizer: WordTokenizer, qa_file: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(NativeModel, "scorer", lambda *_, **__: SolvingScorer(tokenizer))
    path = tmp_path / "qa.jsonl"
    path.write_text(qa_file.read_text())
    eval_model = subject_of(tmp_path, prefix, tokenizer)
    config = RetrievalConfig(tasks=["qa_1"], lengths=[512], num_trials=2, qa_files=[str(path)])
    first = evaluate(Retrieval(), eval_model, config)
    assert "qa_1" in capsys.readouterr().out
    assert evaluate(Retrieval(), eval_model, config) == first
    assert "done before" in capsys.readouterr().out
    path.write_text(qa_file.read_text().replace("tea", "milk"))
    evaluate(Retrieval(), eval_model, config)
    assert "done before" not in capsys.readouterr().out


def test_averages_weigh_lengths_as_rulers_table_does() -> None:
    """GPT-4's row of RULER's README: 96.6 96.3 95.2 93.2 87.0 81.2 gives 91.6, 89.0, 94.1, 64K."""
    scores = dict(zip((4, 8, 16, 32, 64, 128), (96.6, 96.3, 95.2, 93.2, 87.0, 81.2), strict=True))
    cells: Any = [
        SimpleNamespace(task="vt", length=length, score=SimpleNamespace(rate=score / 100))
        for length, score in scores.items()
    ]
    table: Any = ruler_table(cells, ["vt"], 85.6)
    assert table is not None
    assert round(table.average, 1) == 91.6
    assert round(table.increasing, 1) == 89.0
    assert round(table.decreasing, 1) == 94.1
    assert table.effective_length == 64
    assert ruler_table([], ["passkey"], 85.6) is None
    partly = ruler_table(cells, ["vt", "cwe"], 85.6)
    assert partly is not None
    assert partly.average is None


def test_batches_are_of_equal_length_and_bounded() -> None:
    class Fake:
        def __init__(self, size: int) -> None:
            self.tokens = [0] * size

    sizes = [10 + i % 7 for i in range(200)]
    held = 0

    def items() -> Any:
        nonlocal held
        for size in sizes:
            held += size
            assert held <= 4 * 60 + 2 * 60
            yield Fake(size), False

    out = []
    for batch in equal_batches(items(), 60):
        assert len({len(prompt.tokens) for prompt, _ in batch}) == 1
        held -= sum(len(prompt.tokens) for prompt, _ in batch)
        out += [len(prompt.tokens) for prompt, _ in batch]
    assert sorted(out) == sorted(sizes)


@pytest.mark.parametrize("length", [100, 128, 1000, 1024])
def test_the_training_length_is_an_edge_of_the_distance_bins(length: int) -> None:
    edges = set()
    for distance in range(1, 5 * length):
        low, high = distance_bin(distance, length)
        assert low < distance <= high or (low == 0 and distance <= high)
        edges.add((low, high))
    assert {high for _, high in edges} == {length // 8, length // 4, length // 2, length,
                                           2 * length, 4 * length, 8 * length}  # fmt: skip


def test_every_task_has_defaults() -> None:
    assert default_tasks(2) == list(TASKS)
    assert default_tasks(0) == [name for name in TASKS if not name.startswith("qa")]
    assert not list(TaskSizes().problems(""))
