"""The benchmark of long inputs measures what it says; its times are not judged here."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from alibi_lm.errors import ConfigError, DataError
from alibi_lm.evals.benchmark_long import LongBenchmark, benchmark_lines, benchmark_long
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.decoder import Decoder
from tests.unit.evals.evals_fakes import VOCAB_SIZE, fake_step, write_documents

SMALL = LongBenchmark([4096, 6000], 4096, 3000, [2100, 4000], 1e-6, "fp32", 2)


def corpus(folder: Path) -> Path:
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, 6001)
    return write_documents(folder / "text", [tokens.tolist()])


def model(position: str = "alibi") -> Decoder:
    shape = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": VOCAB_SIZE}
    return Decoder(ModelConfig(**shape, position=position)).eval()  # type: ignore[arg-type]


def test_everything_is_measured_and_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = corpus(tmp_path)
    step = fake_step(tmp_path, [prefix], fake_decoder=model())
    result = benchmark_long(step, str(prefix), SMALL)
    assert json.loads((step.evals_folder / "bench_long.json").read_text()) == result
    assert [row["length"] for row in result["scoring"]] == [4096, 6000]
    assert all(len(row["seconds"]) == 2 for row in result["scoring"])
    assert result["same"]["relative_difference"] < 1e-5
    perplexity = result["scoring"][0]["perplexity"]
    assert result["dense"]["perplexity"] == pytest.approx(perplexity, rel=1e-5)
    assert result["decoding"]["dense_bytes_at_131072"] == 131072 * 2 * 2 * 32 * 4
    assert 0 < result["decoding"]["ring_bytes"] < result["decoding"]["dense_bytes_at_131072"]
    said = capsys.readouterr().out
    assert all(line in said for line in benchmark_lines(result))


def test_mistakes_are_named(tmp_path: Path) -> None:
    prefix = corpus(tmp_path)
    step = fake_step(tmp_path, [prefix], fake_decoder=model())
    with pytest.raises(DataError, match="9,000 are|9,001 are"):
        benchmark_long(step, str(prefix), LongBenchmark([9000], None, 3000, []))
    rotary = fake_step(tmp_path, [prefix], fake_decoder=model("rotary"))
    with pytest.raises(ConfigError, match="rotary"):
        benchmark_long(rotary, str(prefix), SMALL)
