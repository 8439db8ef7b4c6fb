"""Runs under the deepspeed CLI that resume in one layout after another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from launching import VOCAB_SIZE, error_lines, launch, metrics, write_config

from alibi_lm.checkpoint.fragments import KINDS
from alibi_lm.checkpoint.step import Checkpoint, open_checkpoint
from alibi_lm.parallel.layout import Layout

# Steps done by then, ranks (0: plain python), tensor-parallel ranks, stages, ZeRO stage.
CHAIN = [(4, 4, 2, 2, 1), (8, 0, 1, 1, 0), (12, 4, 2, 1, 3), (16, 2, 1, 2, 0), (20, 2, 1, 1, 2)]


def config(folder: Path) -> Path:
    """BLOOM's shape, untied, one key/value head, and a vocabulary that does not divide."""
    folder.mkdir()
    path = write_config(folder, checkpoint_interval=4, keep_last=10)
    raw = yaml.safe_load(path.read_text())
    raw["model"] |= {
        "architecture": "bloom", "tied_embeddings": False, "num_kv_heads": 1,
        "vocab_size": VOCAB_SIZE + 1, "hidden_size": 32,
    }  # fmt: skip
    raw["train"] |= {
        "learning_rate": 1e-3, "gradient_clipping": 0.5, "validation_interval": 4,
        "validation_tokens": 1024,
    }  # fmt: skip
    path.write_text(yaml.safe_dump(raw))
    return path


def states(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    with checkpoint.reader() as reader:
        return {f"{kind} {name}": t for kind in KINDS for name, t in reader.tensors(kind)}


def test_a_run_goes_on_in_any_layout(tmp_path: Path) -> None:
    whole = config(tmp_path / "whole")
    launch(whole, f"train.num_steps={CHAIN[-1][0]}", "deepspeed.zero_optimization.stage=0", ranks=0)
    parts = config(tmp_path / "parts")
    for steps, ranks, tp, pp, stage in CHAIN:
        done = launch(
            parts,
            f"train.num_steps={steps}",
            f"parallel.tp={tp}",
            f"parallel.pp={pp}",
            f"deepspeed.zero_optimization.stage={stage}",
            ranks=ranks,
        )
        layout = Layout(max(1, ranks // (tp * pp)), tp, pp)
        assert f" parameters, {layout.describe()}, ZeRO stage {stage}" in done.stdout

    ours, expected = (metrics(path.parent / "run") for path in (parts, whole))
    assert [line["step"] for line in ours] == list(range(1, CHAIN[-1][0] + 1))
    assert expected[0]["loss"] - expected[-1]["loss"] > 0.1
    for line, right in zip(ours, expected, strict=True):
        assert line["loss"] == pytest.approx(right["loss"], abs=1e-5)
        assert line["grad_norm"] == pytest.approx(right["grad_norm"], abs=1e-5)

    for steps, ranks, tp, pp, _ in CHAIN:
        step, other = (
            open_checkpoint(path.parent / f"run/checkpoints/step_{steps:08d}")
            for path in (parts, whole)
        )
        layout = Layout(max(1, ranks // (tp * pp)), tp, pp)
        assert layout == Layout(*(step.meta["layout"][name] for name in ("dp", "tp", "pp")))
        found, wanted = states(step), states(other)
        assert found.keys() == wanted.keys()
        for name, tensor in found.items():
            assert wanted[name].abs().max() > 0, name  # moments too have something to lose
            torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=1e-5, msg=name)
        assert step.decoder().embedding.weight.shape == (VOCAB_SIZE + 1, 32)
    first, second = ((p.parent / "run/validation.jsonl").read_text() for p in (parts, whole))
    assert len(first.splitlines()) == len(second.splitlines()) == len(CHAIN)


@pytest.mark.slow
def test_offloaded_states_are_the_same_states(tmp_path: Path) -> None:
    """DeepSpeed compiles its CPU Adam at the first start, for some minutes."""
    whole = config(tmp_path / "whole")
    launch(whole, "train.num_steps=16", "deepspeed.zero_optimization.stage=0", ranks=0)
    parts = config(tmp_path / "parts")
    zero = "deepspeed.zero_optimization"
    for steps, stage, parallel in ((4, 1, "tp"), (8, 2, ""), (12, 3, ""), (16, 1, "")):
        optimizer = [f"{zero}.offload_optimizer.device=cpu"] if steps < 16 else []
        parameters = [f"{zero}.offload_param.device=cpu"] if stage == 3 else []
        split = [f"parallel.{parallel}=2"] if parallel else []
        launch(parts, f"train.num_steps={steps}", f"{zero}.stage={stage}",
               *optimizer, *parameters, *split)  # fmt: skip
    ours, expected = (metrics(path.parent / "run") for path in (parts, whole))
    for line, right in zip(ours, expected, strict=True):
        assert line["loss"] == pytest.approx(right["loss"], abs=1e-5)
        assert line["grad_norm"] == pytest.approx(right["grad_norm"], abs=1e-5)


def test_a_layout_that_cannot_be_is_refused_at_the_start(tmp_path: Path) -> None:
    path = config(tmp_path / "run")
    done = launch(path, "parallel.tp=3", "parallel.pp=3", ranks=0, code=2)
    message = "\n".join(error_lines(done)) + done.stderr
    assert "does not divide model.num_heads = 4" in message
    assert "parallel.pp = 3: exceeds model.num_layers = 2" in message
    assert "does not divide 1 rank" in message
    assert not (path.parent / "run").exists()
