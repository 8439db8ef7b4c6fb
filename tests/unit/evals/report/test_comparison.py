"""Models side by side, learned slopes in the report, and scalars for TensorBoard."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from alibi_lm.evals.config import NeedleConfig, PerplexityConfig
from alibi_lm.evals.models.base import NativeModel
from alibi_lm.evals.perplexity.evaluation import Perplexity
from alibi_lm.evals.report.comparison import write_comparison
from alibi_lm.evals.report.report import slope_rows, write_report
from alibi_lm.evals.report.tensorboard import FOLDER
from alibi_lm.evals.results import run_and_store
from alibi_lm.evals.retrieval.needle import Needle
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.decoder import Decoder
from alibi_lm.model.layers import Block
from alibi_lm.utils.errors import ConfigError, DataError
from tests.unit.evals.evals_fakes import (
    EOS,
    CopyingScorer,
    PlantedLosses,
    WordTokenizer,
    code_text,
    fake_step,
    write_documents,
)

LENGTHS = [64, 128, 512]


def eval_model(folder: Path, documents: int = 6) -> Any:
    folder.mkdir()
    tokenizer = WordTokenizer()
    texts = [[*tokenizer.encode(code_text(seed, 300)), EOS] for seed in range(documents)]
    fake = fake_step(folder, [write_documents(folder / "v", texts)], 128)
    fake.run_folder = folder
    fake.fake_tokenizer = tokenizer
    return NativeModel(fake)


def measure(own: Any, level: float, context: int = 8) -> None:
    planted = PlantedLosses(lambda t, p: level + 0 * t)
    run_and_store(
        Perplexity(), own, PerplexityConfig(lengths=LENGTHS, truncated_context_targets=50), planted
    )
    run_and_store(
        Needle(),
        own,
        NeedleConfig(lengths=[128, 512], num_trials=10),
        CopyingScorer(context=context),
    )


def test_two_models_stand_on_one_page(tmp_path: Path) -> None:
    one, two = eval_model(tmp_path / "one"), eval_model(tmp_path / "two")
    measure(one, 2.0)
    measure(two, 3.0)
    page = write_comparison([one, two], tmp_path / "both.html").read_text()
    text = re.sub(r"<[^>]+>", " ", page)
    assert "7.389" in text  # e^2
    assert "20.086" in text  # e^3
    assert page.count("data:image/png;base64,") == 3
    assert not re.search(r"https?://|<script|url\(|@import", page)
    for name in ("perplexity", "position", "needle"):
        assert (tmp_path / f"both_{name}.png").stat().st_size > 10_000
    rows = re.findall(r"<td>(one|two)</td><td>perplexity</td><td>([^<]*)</td>", page)
    assert rows.count(("one", "holds")) == 1
    assert rows.count(("two", "no")) == 1


def test_a_model_without_an_eval_is_left_out_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = eval_model(tmp_path / "one"), eval_model(tmp_path / "two")
    with pytest.raises(DataError, match="none of them has been measured"):
        write_comparison([one, two], tmp_path / "both.html")
    measure(one, 2.0)
    page = write_comparison([one, two], tmp_path / "both.html").read_text()
    assert "two: nothing has been measured" in capsys.readouterr().err
    assert page.count("<td>one</td><td>perplexity</td>") == 2
    assert "<td>two</td><td>perplexity</td>" not in page


def test_two_steps_of_one_run_have_their_own_names(tmp_path: Path) -> None:
    one = eval_model(tmp_path / "run")
    measure(one, 2.0)
    other = NativeModel(copy.copy(one.checkpoint))
    fake: Any = other.checkpoint
    fake.step = 3
    page = write_comparison([one, other], tmp_path / "both.html").read_text()
    assert f"{one.argument}, step 7" in page
    assert f"{one.argument}, step 3" in page


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    one, two = eval_model(tmp_path / "one"), eval_model(tmp_path / "two", documents=4)
    measure(one, 2.0)
    measure(two, 2.0)
    with pytest.raises(DataError, match="different texts"):
        write_comparison([one, two], tmp_path / "both.html")
    with pytest.raises(ConfigError, match="named twice"):
        write_comparison([one, one], tmp_path / "both.html")
    with pytest.raises(ConfigError, match="name at least two"):
        write_comparison([one], tmp_path / "both.html")
    assert not (tmp_path / "both.html").exists()


def test_the_report_writes_its_numbers_as_scalars(tmp_path: Path) -> None:
    own = eval_model(tmp_path / "run")
    write_report(own)
    assert not (own.evals_folder / FOLDER).exists()  # nothing measured
    measure(own, 2.0)
    for _ in range(2):  # the second replaces the first
        write_report(own)
    found = EventAccumulator(str(own.evals_folder / FOLDER)).Reload()
    assert len(list((own.evals_folder / FOLDER).iterdir())) == 1
    for length in LENGTHS:
        (point,) = found.Scalars(f"eval_perplexity/{length}")
        assert point.step == own.step
        assert point.value == pytest.approx(7.389, abs=1e-3)
    (point,) = found.Scalars("eval_needle_ranking/512")
    assert point.value == 1.0
    assert f"eval_loss_gap/{LENGTHS[-1]}" in found.Tags()["scalars"]


def test_learned_slopes_are_those_of_the_weights(tmp_path: Path) -> None:
    own = eval_model(tmp_path / "run")
    config = ModelConfig(num_layers=2, hidden_size=32, num_heads=4, vocab_size=4096,
                         position="alibi_learned")  # fmt: skip
    decoder = Decoder(config)
    block = decoder.blocks[1]
    assert isinstance(block, Block)
    with torch.no_grad():
        block.attention.log_slope_ratio[2] = 1.0
    own.checkpoint.config.model = config
    own.checkpoint.fake_decoder = decoder
    rows = {row["head"]: row["slope"] for row in slope_rows(own)}
    assert len(rows) == 8
    assert rows["layer 0, head 2"] == pytest.approx(2.0**-6)
    assert rows["layer 1, head 2"] == pytest.approx(2.0**-6 * 2.718281828, rel=1e-6)
    assert "layer 1, head 2" in write_report(own).read_text()
