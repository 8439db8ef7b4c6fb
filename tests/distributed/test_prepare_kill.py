"""Tokenizing in real processes: same bytes as one process, and after SIGKILL at any moment."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from alibi_lm.data.indexed import token_dtype
from alibi_lm.data.preparation.prepare import load_recipe, prepare
from alibi_lm.data.preparation.workers import Encoder, Workers
from alibi_lm.data.tokenizer import load_tokenizer
from alibi_lm.utils.errors import DataError

REPOSITORY = Path(__file__).resolve().parents[2]
CHILD = """
import sys
from alibi_lm.data.preparation import tokenization
from alibi_lm.data.preparation.prepare import load_recipe, prepare
tokenization.BATCH_BYTES = 20_000
prepare(load_recipe(sys.argv[1], sys.argv[2:]), record_seconds=0.0)
"""


@pytest.fixture(scope="module")
def recipe_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe over 3 MB of text in 500 files."""
    folder = tmp_path_factory.mktemp("kill")
    rng = random.Random(1)
    words = ["".join(rng.choice("abcdefgh") for _ in range(rng.randint(1, 8))) for _ in range(500)]
    (folder / "corpus").mkdir()
    for number in range(500):
        text = " ".join(rng.choices(words, k=rng.randint(200, 2000))).replace(" a", "\r\n\ta")
        (folder / "corpus" / f"{number}.txt").write_bytes(text.encode())
    path = folder / "recipe.yaml"
    path.write_text(
        f"sources: [{{name: c, path: {folder / 'corpus'}, validation_fraction: 0.1,\n"
        "  min_long_validation: 60, long_chars: 3000}]\n"
        "tokenizer: {vocab_size: 500}\nnum_workers: 2\noutput: none\n"
    )
    return path


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "manifest.json"
    }


@pytest.fixture(scope="module")
def whole(recipe_path: Path) -> dict[str, str]:
    """What one process that nobody disturbs makes."""
    output = recipe_path.parent / "whole"
    prepare(load_recipe(recipe_path, [f"output={output}", "num_workers=1"]))
    return digests(output)


def start(recipe_path: Path, output: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", CHILD, str(recipe_path), f"output={output}"]
    return subprocess.Popen(command, cwd=REPOSITORY, start_new_session=True)


def position(output: Path) -> int:
    """How many documents the record in the folder counts."""
    try:
        record = json.loads((output / ".partial" / "c.progress.json").read_text())
    except FileNotFoundError:
        return 0
    return int(record["reader"]["position"])


def alive(session: int) -> list[int]:
    """Processes of a session that are not dead."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] not in "ZX":
                found.append(int(entry.name))
    return found


def test_killed_again_and_again_it_ends_with_the_same_bytes(
    recipe_path: Path, whole: dict[str, str], tmp_path: Path
) -> None:
    output = tmp_path / "out"
    reached = []
    for wanted in (0, 60, 180, 330):
        process = start(recipe_path, output)
        deadline = time.monotonic() + 120
        while position(output) <= wanted and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        process.kill()
        process.wait()
        reached.append(position(output))
        # the workers notice that their parent has gone
        while alive(process.pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert reached == sorted(set(reached))  # each restart went on from the last record
    assert not (output / "manifest.json").exists()
    assert start(recipe_path, output).wait() == 0
    assert digests(output) == whole
    assert not (output / ".partial").exists()


def test_killed_at_random_moments_it_ends_with_the_same_bytes(
    recipe_path: Path, whole: dict[str, str], tmp_path: Path
) -> None:
    rng = random.Random(2)
    output = tmp_path / "out"
    for _ in range(5):
        process = start(recipe_path, output)
        try:
            process.wait(timeout=rng.uniform(0.3, 3.5))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert start(recipe_path, output).wait() == 0
    assert digests(output) == whole


def test_workers_keep_the_order_and_all_of_them_work(recipe_path: Path, whole: object) -> None:
    tokenizer = load_tokenizer(recipe_path.parent / "whole" / "tokenizer")
    encoder = Encoder(tokenizer, token_dtype(tokenizer.vocab_size))
    batches = [(number, [f"abc {number} def\n" * 50] * 20) for number in range(40)]
    with Workers(encoder, 1) as one, Workers(encoder, 3) as three:
        expected = [(label, encoded.tokens.tolist()) for label, encoded in one.map(batches)]
        found = [(label, encoded.tokens.tolist()) for label, encoded in three.map(batches)]
        assert len(three._processes) == 3
    assert found == expected
    assert all(process.returncode is not None for process in three._processes)


def test_a_killed_worker_is_an_error_and_not_a_wait(recipe_path: Path, whole: object) -> None:
    tokenizer = load_tokenizer(recipe_path.parent / "whole" / "tokenizer")
    encoder = Encoder(tokenizer, token_dtype(tokenizer.vocab_size))
    with Workers(encoder, 2) as workers:
        results = workers.map((number, ["text " * 1000] * 10) for number in range(1000))
        next(results)
        workers._processes[0].kill()
        with pytest.raises(DataError, match="tokenizing process: died with exit code -9"):
            list(results)
