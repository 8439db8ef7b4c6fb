"""The page docs/extending.md: an eval and a task of another package, run by the command line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from alibi_lm.cli.main import main
from tests.unit.hf.small_step import LINES, add_tokenizer, add_validation, write_step

PAGE = Path(__file__).parents[3] / "docs" / "extending.md"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's files, with the entry points of an installed package for the task alone."""
    folder = tmp_path_factory.mktemp("package")
    blocks = re.findall(r"```python\n# (my_evals|my_tasks)\.py\n(.*?)```", PAGE.read_text(), re.S)
    assert [name for name, _ in blocks] == ["my_evals", "my_tasks"]
    for name, text in blocks:
        (folder / f"{name}.py").write_text(text)
    (points,) = re.findall(
        r'\[project.entry-points."(alibi_lm.tasks)"\]\n(.*?)\n`', PAGE.read_text()
    )
    info = folder / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 1.0\n")
    entry = points[1].replace('"', "")
    (info / "entry_points.txt").write_text(f"[{points[0]}]\n{entry}\n")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    step = write_step(folder / "run", {"num_heads": 4})
    add_tokenizer(step, folder)
    add_validation(step, folder / "validation", ["".join(LINES) * 30] * 2)
    corpus = step.config.data.validation.pop()
    (folder / "corpus").write_text(corpus)
    return folder / "run"


def alibi_lm(package: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "alibi_lm", *arguments], check=False, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(package)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def stored(run: Path, name: str) -> dict[str, Any]:
    (path,) = (run / "evals").glob(f"*/{name}.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_an_eval_of_one_file_runs_and_is_reported(package: Path, run: Path) -> None:
    corpus = f"corpus={(run.parent / 'corpus').read_text()}"
    said = alibi_lm(package, "eval", "--plugin", "my_evals", "repetition", str(run), corpus,
                    "repetition.new_tokens=12")  # fmt: skip
    result = stored(run, "repetition")
    assert f"repetition: {result['repeated']:.1%}" in said
    assert result["inputs"]["settings"]["new_tokens"] == 12
    assert "of the generated tokens occurred before." in result["verdict"]["text"]
    said = alibi_lm(package, "report", "--plugin", "my_evals", str(run))
    assert f"repetition: {result['repeated']:.1%}" in said
    (page,) = (run / "evals").glob("*/report.html")
    assert "<h2>Repetition</h2>" in page.read_text()


def test_a_task_of_one_file_is_found_by_its_entry_point(package: Path, run: Path) -> None:
    corpus = f"corpus={(run.parent / 'corpus').read_text()}"
    alibi_lm(package, "eval", "retrieval", str(run), corpus, "retrieval.tasks=[first_number]",
             "retrieval.lengths=[128]", "retrieval.num_trials=2")  # fmt: skip
    (cell,) = stored(run, "retrieval")["cells"]
    assert (cell["task"], cell["length"], cell["trials"]) == ("first_number", 128, 2)
    assert 100 < cell["real_length"][0] <= 128


def test_a_module_that_does_not_exist_is_refused_in_one_line() -> None:
    done = CliRunner().invoke(main, ["eval", "--plugin", "no_such_module", "perplexity", "RUN"])
    assert done.exit_code == 2
    assert "--plugin = no_such_module: no module has that name; install its package" in done.output
    done = CliRunner().invoke(main, ["eval", "perplexitty", "RUN"])
    assert done.exit_code == 2
    assert "perplexitty" in done.output
