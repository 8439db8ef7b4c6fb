"""The benchmark of the loader measures what it says; its times are not judged here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from alibi_lm.data.indexed import TokenFile
from alibi_lm.utils.errors import DataError
from tests.benchmarks.loader_throughput import LoadBenchmark, benchmark_load, write_corpus

SMALL = LoadBenchmark(0.002, 64, 2, 4, loaded_steps=3, trained_steps=1, repeats=2)


def test_everything_is_measured_and_the_corpus_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix, path = tmp_path / "corpus" / "random", tmp_path / "load.json"
    result = benchmark_load(prefix, SMALL, path)
    assert json.loads(path.read_text()) == result
    assert result["bytes"] == 2_000_000
    assert result["parameters"] == pytest.approx(10e6, rel=0.02)
    speeds = result["tokens_a_second"]
    pairs = zip(speeds["load"], speeds["train"], strict=True)
    assert result["ratio"]["high"] == max(load / train for load, train in pairs)
    assert "| loader, from storage |" in capsys.readouterr().out
    assert list(prefix.parent.iterdir()) == []


def test_a_corpus_that_is_there_is_left_there(tmp_path: Path) -> None:
    prefix = tmp_path / "random"
    write_corpus(prefix, 1_000_000)
    file = TokenFile(prefix)
    assert file.num_tokens == 500_000
    assert 300 < file.num_documents < 700
    digest = file.digest
    assert benchmark_load(prefix, SMALL)["bytes"] == 1_000_000
    assert TokenFile(prefix).digest == digest


def test_a_corpus_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="GB free"):
        benchmark_load(tmp_path / "random", LoadBenchmark(gigabytes=1e7))
    assert list(tmp_path.iterdir()) == []
