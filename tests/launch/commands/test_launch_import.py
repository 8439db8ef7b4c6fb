"""Training from an imported folder, against the reference class trained by plain torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from launching import VOCAB_SIZE, launch, metrics, write_corpus

from alibi_lm.cli.main import main
from alibi_lm.train.data import open_training_data
from alibi_lm.train.run import read_config
from tests.unit.hf.reference_models import reference_model

NUM_STEPS = 5


def losses_of_plain_torch(
    model: torch.nn.Module, config: Path, overrides: list[str]
) -> list[float]:
    """Losses of steps of torch's AdamW on the samples that the run will see."""
    settings, _ = read_config(config, overrides, 1)
    inputs, train = open_training_data(settings), settings.train
    model.train()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, train.learning_rate, (train.beta1, train.beta2), train.adam_epsilon
    )
    losses = []
    for step in range(NUM_STEPS):
        samples = torch.cat(inputs.micro_batches(step, 0, 1))
        logits = model(samples[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), samples[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize(
    ("shape", "heads", "tied", "ranks", "layout"),
    [
        ("bloom", 12, True, 0, []),
        pytest.param("mpt", 12, False, 0, [], marks=pytest.mark.slow),
        pytest.param("bloom", 12, False, 2, ["parallel.tp=2"], marks=pytest.mark.slow),
        pytest.param("mpt", 16, True, 2, ["parallel.tp=2"], marks=pytest.mark.slow),
    ],
)
def test_losses_are_those_of_the_stock_class(
    shape: str, heads: int, tied: bool, ranks: int, layout: list[str], tmp_path: Path
) -> None:
    model = reference_model(shape, heads, tied, vocab_size=VOCAB_SIZE)
    model.save_pretrained(tmp_path / "reference")
    run = tmp_path / "imported"
    done = CliRunner().invoke(main, ["import", str(tmp_path / "reference"), str(run)])
    assert done.exit_code == 0, done.output
    corpus = write_corpus(tmp_path / "corpus")
    overrides = [
        f"run.dir={tmp_path / 'run'}", f"train.init_from={run}",
        f"data.corpora=[{{prefix: {corpus}}}]", "train.sequence_length=64",
        f"train.num_steps={NUM_STEPS}", "train.micro_batch_size=2", "train.global_batch_size=8",
        "train.precision=fp32", "train.schedule=constant", "train.learning_rate=3e-3",
        "train.log_interval=1",
    ]  # fmt: skip
    expected = losses_of_plain_torch(model, run / "config.yaml", overrides)
    started = launch(run / "config.yaml", *overrides, *layout, ranks=ranks)
    assert "with the weights of" in started.stdout
    found = [row["loss"] for row in metrics(tmp_path / "run")]
    assert len(found) == NUM_STEPS
    assert expected[-1] < expected[0] - 0.1
    assert found == pytest.approx(expected, abs=1e-4)
