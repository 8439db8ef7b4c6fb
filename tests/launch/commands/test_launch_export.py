"""Exports of runs trained in several layouts: the same folder where the weights are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from launching import VOCAB_SIZE, launch, write_config
from transformers import AutoModelForCausalLM

from alibi_lm.checkpoint.step import open_checkpoint
from alibi_lm.cli.main import main
from alibi_lm.config_loading import to_yaml
from alibi_lm.hf.exporting.exporter import export
from alibi_lm.model.inference.generation import generate
from tests.unit.hf.reference_models import reference_model

LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one": (0, []),
    "tp2_pp2": (4, ["parallel.tp=2", "parallel.pp=2"]),
    "zero3": (2, ["deepspeed.zero_optimization.stage=3"]),
}


@pytest.mark.slow
def test_the_same_weights_give_the_same_folder(tmp_path: Path) -> None:
    """Trained by steps too small to change a bit, in each layout, and exported from there."""
    vocab_size = VOCAB_SIZE + 1  # does not divide
    reference = reference_model("bloom", 12, False, vocab_size=vocab_size)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter[parameter.abs() < 1e-6] = 1e-6  # nothing is too small to change a 0
    reference.save_pretrained(tmp_path / "reference")
    imported = tmp_path / "imported"
    assert (
        CliRunner().invoke(main, ["import", str(tmp_path / "reference"), str(imported)]).exit_code
        == 0
    )
    config = write_config(tmp_path)
    folders = []
    for name, (ranks, layout) in LAYOUTS.items():
        run = tmp_path / name / "run"
        launch(config, f"run.dir={run}", f"train.init_from={imported}", "train.num_steps=1",
               "train.learning_rate=1e-30", "model.architecture=bloom", "model.num_heads=12",
               "model.hidden_size=96", "model.tied_embeddings=false",
               f"model.vocab_size={vocab_size}", *layout, ranks=ranks)  # fmt: skip
        export(open_checkpoint(run), run / "out", shard_bytes=150_000)
        folders.append({path.name: path.read_bytes() for path in (run / "out").iterdir()})
    assert folders[0] == folders[1] == folders[2]
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "one/run/out").state_dict()
    first = AutoModelForCausalLM.from_pretrained(tmp_path / "reference").state_dict()
    assert all(torch.equal(first[name], trained[name]) for name in first)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "heads", "kv_heads", "tied"),
    [("mpt", 8, None, False), ("bloom", 8, 2, True), ("mpt", 8, 1, True),
     ("bloom", 12, None, True), ("mpt", 12, 4, True), ("bloom", 12, 1, False),
     ("mpt", 40, None, True), ("bloom", 40, 8, False), ("bloom", 40, 1, False)],
)  # fmt: skip
def test_layouts_agree_with_each_other_and_with_the_stock_class(
    shape: str, heads: int, kv_heads: int | None, tied: bool, tmp_path: Path
) -> None:
    """Every pair of two settings occurs: shape, heads, key/value heads (all, some, one), tied."""
    model: dict[str, Any] = {"architecture": shape, "num_layers": 2, "hidden_size": 8 * heads,
                             "num_heads": heads, "num_kv_heads": kv_heads,
                             "vocab_size": VOCAB_SIZE + 1, "tied_embeddings": tied}  # fmt: skip
    config = write_config(tmp_path, num_steps=3)
    raw = config.read_text()
    config.write_text(raw[: raw.index("model:")] + to_yaml({"model": model})
                      + raw[raw.index("data:"):])  # fmt: skip
    tokens = torch.randint(4, VOCAB_SIZE, (1, 256), generator=torch.Generator().manual_seed(5))
    logits = []
    for name, (ranks, layout) in LAYOUTS.items():
        run = tmp_path / name
        launch(config, f"run.dir={run}", *layout, ranks=ranks)
        checkpoint = open_checkpoint(run)
        export(checkpoint, run / "out")
        loaded, decoder = AutoModelForCausalLM.from_pretrained(run / "out"), checkpoint.decoder()
        with torch.no_grad():
            for length in (64, 256):
                theirs = loaded(tokens[:, :length]).logits
                assert float((theirs - decoder(tokens[:, :length])).abs().max()) <= 1e-4
            logits.append(theirs)
        greedy = loaded.generate(tokens[:, :9], max_new_tokens=64, do_sample=False)[0, 9:].tolist()
        assert greedy == generate(decoder, tokens[:, :9], 64)[0]
        assert len(greedy) == 64
    assert all(float((other - logits[0]).abs().max()) <= 1e-4 for other in logits[1:])
