"""The benchmark of long inputs measures what it says; its times are not tested."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from alibi_lm.bench.long_inputs.benchmark import LongBenchmark, benchmark_long
from alibi_lm.bench.long_inputs.perplexity_curve import dense_seconds
from alibi_lm.bench.long_inputs.table import benchmark_lines
from alibi_lm.cli.main import main
from alibi_lm.evals.models.base import NativeModel
from alibi_lm.evals.report.report import write_report
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.decoder import Decoder
from alibi_lm.utils.errors import ConfigError, DataError
from tests.unit.evals.evals_fakes import VOCAB_SIZE, fake_step, write_documents

SMALL = LongBenchmark([4096, 6000], [3000, 4096], 3000, [2100, 4000], 1e-6, "fp32", 2,
                      curve=[128, 2048, 3072, 6000], curve_targets=2048)  # fmt: skip


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
    step.evals_folder.mkdir(parents=True, exist_ok=True)
    (step.evals_folder / "bench_long.json").write_text("earlier")
    result = benchmark_long(step, str(prefix), SMALL)
    assert json.loads((step.evals_folder / "bench_long.json").read_text()) == result
    assert (step.evals_folder / "bench_long.previous.json").read_text() == "earlier"
    assert not (step.evals_folder / "bench_long.unfinished.json").exists()
    assert [row["length"] for row in result["scoring"]] == [4096, 6000]
    assert all(len(row["seconds"]) == 2 for row in result["scoring"])
    assert result["same"]["relative_difference"] < 1e-5
    perplexity = result["scoring"][0]["perplexity"]
    assert result["dense"][1]["perplexity"] == pytest.approx(perplexity, rel=1e-5)
    assert result["dense"][1]["ratio"]["median"] > 0
    assert result["decoding"]["dense_bytes_at_131072"] == 131072 * 2 * 2 * 32 * 4
    assert 0 < result["decoding"]["sliding_kv_bytes"] < result["decoding"]["dense_bytes_at_131072"]
    check_curve(result["curve"], np.random.default_rng(0).integers(0, VOCAB_SIZE, 6001))
    page = write_report(NativeModel(step)).read_text()
    for row in result["curve"]:
        assert f"<td>{row['length']:,}</td><td>{row['perplexity']:.4f}</td>" in page
    assert f"would take {result['curve_dense_seconds']:,.0f} seconds" in page
    assert "extrapolated, not measured, from 3,000, 4,096 tokens" in page
    assert (step.evals_folder / "long_inputs.png").is_file()
    said = capsys.readouterr().out
    assert all(line in said for line in benchmark_lines(result))


def check_curve(rows: list[dict[str, Any]], tokens: np.ndarray) -> None:
    """The same 2,048 targets at every length, against the model's plain losses of each window."""
    assert [row["length"] for row in rows] == [128, 2048, 3072, 6000]
    text, decoder = torch.from_numpy(tokens), model()
    for row in rows:
        length = row["length"]
        part = text[-max(length, 2048) - 1 :]
        with torch.inference_mode():
            losses = decoder.losses(part[:-1].view(-1, length), part[1:].view(-1, length))
        right = float(losses.flatten()[-2048:].double().mean().exp())
        assert row["perplexity"] == pytest.approx(right, rel=1e-5)


def test_dense_time_is_extrapolated_by_its_own_law() -> None:
    rows = [{"length": n, "seconds": [2e-4 * n + 3e-8 * n * n] * 2} for n in (1000, 3000, 9000)]
    assert dense_seconds(rows, 10**6) == pytest.approx(2e2 + 3e4)


def test_mistakes_are_named(tmp_path: Path) -> None:
    prefix = corpus(tmp_path)
    step = fake_step(tmp_path, [prefix], fake_decoder=model())
    with pytest.raises(DataError, match="9,000 are|9,001 are"):
        benchmark_long(step, str(prefix), LongBenchmark([9000], [], 3000, []))
    rotary = fake_step(tmp_path, [prefix], fake_decoder=model("rotary"))
    with pytest.raises(ConfigError, match="rotary"):
        benchmark_long(rotary, str(prefix), SMALL)


def test_a_run_without_a_corpus_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = SimpleNamespace(config=SimpleNamespace(data=SimpleNamespace(corpora=[])))
    monkeypatch.setattr("alibi_lm.checkpoint.step.open_checkpoint", lambda run: imported)
    done = CliRunner().invoke(main, ["bench", "long", "runs/imported"])
    assert done.exit_code == 2
    assert done.output == "error: --corpus: runs/imported names none; give --corpus PREFIX\n"
