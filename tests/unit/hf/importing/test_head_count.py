"""A wrong number of heads that fits every shape: a trained model shows it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from alibi_lm.cli.main import main
from alibi_lm.data.indexed import TokenFileWriter
from alibi_lm.data.tokenizer import load_tokenizer
from alibi_lm.hf.exporting.tokenizer import convert_tokenizer
from alibi_lm.hf.importing.head_count import other_counts
from alibi_lm.model.config import ModelConfig
from tests.unit.hf.folders import reference_model, write_reference
from tests.unit.hf.small_step import LINES

KEY = {"bloom": "n_head", "mpt": "n_heads"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stock models that plain torch had learn some rows by heart, and one of the rows as text.

    No token tells the next one: only attention to those before it does.
    """
    folder = tmp_path_factory.mktemp("trained")
    rows = torch.randint(4, 24, (4, 40), generator=torch.Generator().manual_seed(3))
    for shape in KEY:
        model = reference_model(shape, 4, True, vocab_size=64, initializer_range=0.02).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(120):
            loss = model(rows, labels=rows).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert float(loss.detach()) < 0.5, "it has learned them"
        model.eval().save_pretrained(folder / shape)
    writer = TokenFileWriter(folder / "text", np.uint16)
    writer.add_document(rows[0].tolist())
    writer.finish()
    return folder


@pytest.mark.parametrize("shape", KEY)
def test_another_count_than_the_weights_were_trained_with_is_refused(
    shape: str, trained: Path, tmp_path: Path
) -> None:
    text = f"data.validation=[{trained / 'text'}]"
    good = ["import", str(trained / shape), str(tmp_path / "good"), text]
    assert CliRunner().invoke(main, good).exit_code == 0
    nats = json.loads((tmp_path / "good" / "import.json").read_text())["nats_by_heads"]
    assert list(nats)[0] == "4"
    assert nats["4"] == min(nats.values())
    folder = tmp_path / "stock"
    shutil.copytree(trained / shape, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {KEY[shape]: 8}))
    line = ["import", str(folder), str(tmp_path / "run"), text]
    refused = CliRunner().invoke(main, line)
    assert refused.exit_code == 2, refused.output
    assert refused.output.count("\n") == 1
    assert "number of heads = 8: is not what the weights were trained with" in refused.output
    assert "with 4 heads" in refused.output
    assert not (tmp_path / "run").exists()
    assert CliRunner().invoke(main, [*line, "--parity", "weights"]).exit_code == 0


def test_an_untrained_model_is_never_refused(tmp_path: Path) -> None:
    write_reference(tmp_path / "stock", "bloom", heads=4)
    from sentencepiece import SentencePieceTrainer

    SentencePieceTrainer.train(
        sentence_iterator=iter(LINES * 20),
        model_prefix=str(tmp_path / "t"), model_type="bpe", vocab_size=300, byte_fallback=True,
        normalization_rule_name="identity", add_dummy_prefix=False,
        remove_extra_whitespaces=False, unk_id=0, eos_id=1, bos_id=2, pad_id=3, minloglevel=2,
        hard_vocab_limit=False,
    )  # fmt: skip
    convert_tokenizer(load_tokenizer(tmp_path / "t.model"), tmp_path / "stock")
    done = CliRunner().invoke(main, ["import", str(tmp_path / "stock"), str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    nats = json.loads((tmp_path / "run" / "import.json").read_text())["nats_by_heads"]
    assert list(nats) == ["4", "1", "2", "8"], "the tokenizer's own sample was scored"
    assert max(nats.values()) - min(nats.values()) < 1


def test_without_a_text_nothing_is_computed(tmp_path: Path) -> None:
    write_reference(tmp_path / "stock", "mpt")
    line = ["import", str(tmp_path / "stock"), str(tmp_path / "run")]
    assert CliRunner().invoke(main, line).exit_code == 0
    assert json.loads((tmp_path / "run" / "import.json").read_text())["nats_by_heads"] is None


def test_other_counts() -> None:
    published = ModelConfig(hidden_size=2560, num_heads=32)
    assert other_counts(published) == [16, 20, 40, 64]
    assert other_counts(ModelConfig(hidden_size=96, num_heads=12)) == [1, 6, 24]
