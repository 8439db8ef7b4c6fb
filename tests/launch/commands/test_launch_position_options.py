"""Learned slopes and scaled positions under the real launcher: trained, resumed, taken over."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from launching import error_lines, launch, metrics, write_config

from alibi_lm.checkpoint.step import open_checkpoint

SCALING = "model.scaling={kind: ntk, factor: 2.0}"


@pytest.mark.slow
def test_learned_slopes_change_their_layout_and_scaling_goes_on_from_weights(
    tmp_path: Path,
) -> None:
    config = write_config(tmp_path)
    raw = yaml.safe_load(config.read_text())
    raw["model"] |= {"position": "alibi_learned"}
    config.write_text(yaml.safe_dump(raw))
    whole, halves, longer = (tmp_path / name for name in ("whole", "halves", "longer"))
    launch(config, f"run.dir={whole}", ranks=0)
    launch(config, f"run.dir={halves}", "parallel.tp=2", "train.num_steps=5", ranks=2)
    launch(config, f"run.dir={halves}", ranks=0)
    expected, found = metrics(whole), metrics(halves)
    assert [line["loss"] for line in found] == pytest.approx(
        [line["loss"] for line in expected], abs=1e-5
    )
    weights, others = open_checkpoint(whole).weights(), open_checkpoint(halves).weights()
    names = [name for name in weights if name.endswith("log_slope_ratio")]
    assert len(names) == 2
    for name in names:
        assert weights[name].shape == (4,)
        assert weights[name].abs().max() > 3e-3  # several steps of Adam
        assert others[name].tolist() == pytest.approx(weights[name].tolist(), abs=1e-4)
    # A scaled model continues from the weights of an unscaled one, but is not the same run.
    new = (f"train.init_from={whole}", f"run.dir={longer}", "train.sequence_length=128", SCALING)
    launch(config, *new, "train.num_steps=1", ranks=0)
    checkpoint = open_checkpoint(longer)
    assert checkpoint.config.model.scaling is not None
    assert checkpoint.config.model.scaling.factor == 2
    assert metrics(longer)[0]["loss"] < expected[0]["loss"] - 0.05
    refused = error_lines(launch(config, f"run.dir={whole}", SCALING, ranks=0, code=2))[0]
    assert "model.scaling.kind = ntk: was None when the run began" in refused
