"""The same run under every ZeRO stage and number of ranks."""

import json
from pathlib import Path

import pytest
from launching import launch, launch_by_deepspeed, metrics, write_config
from started_ranks import needs_fp16

LAYOUTS = [(2, 0), (2, 1), (2, 2), (2, 3), (0, 0)]


# 5 windows in batches of 2: one of two ranks has a batch less than the other.
VALIDATION = {"validation_interval": 5, "validation_tokens": 320, "validation_multiples": [1, 2]}


def validation(folder: Path) -> list[float]:
    """The validation losses of all steps and lengths."""
    lines = (folder / "run" / "validation.jsonl").read_text(encoding="utf-8").splitlines()
    return [loss for line in lines for loss in json.loads(line)["losses"].values()]


def losses(folder: Path, ranks: int, stage: int, *overrides: str) -> list[tuple[float, float]]:
    """(loss, gradient norm) of the first 10 steps."""
    config = write_config(folder, checkpoint_interval=100, **VALIDATION)
    start = launch_by_deepspeed if (ranks, stage) == (2, 1) else launch
    done = start(config, f"deepspeed.zero_optimization.stage={stage}", *overrides, ranks=ranks)
    assert "shm_comm_op" not in done.stdout  # it would leave shared memory behind
    return [(line["loss"], line["grad_norm"]) for line in metrics(folder / "run")]


def test_zero_stages_and_one_process_give_the_same_losses(tmp_path: Path) -> None:
    results = []
    for ranks, stage in LAYOUTS:
        folder = tmp_path / f"{ranks}_{stage}"
        folder.mkdir()
        results.append(losses(folder, ranks, stage))
    reference = results[-1]
    assert len(reference) == 10
    assert reference[0][0] - reference[-1][0] > 0.05  # it learns, so the updates are compared too
    for result in results[:-1]:
        for (loss, norm), (loss_0, norm_0) in zip(result, reference, strict=True):
            assert loss == pytest.approx(loss_0, abs=1e-5)
            assert norm == pytest.approx(norm_0, abs=1e-5)
    expected = validation(tmp_path / "0_0")
    assert len(expected) == 4
    for ranks, stage in LAYOUTS[:-1]:
        assert validation(tmp_path / f"{ranks}_{stage}") == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=needs_fp16)])
def test_half_precisions_follow_fp32_in_every_stage(precision: str, tmp_path: Path) -> None:
    reference_folder = tmp_path / "fp32"
    reference_folder.mkdir()
    reference = losses(reference_folder, 0, 0)
    for stage in (1, 2, 3):
        folder = tmp_path / str(stage)
        folder.mkdir()
        scale = ["deepspeed.fp16.initial_scale_power=8"] if precision == "fp16" else []
        result = losses(folder, 2, stage, f"train.precision={precision}", *scale)
        for (loss, _), (loss_0, _) in zip(result, reference, strict=True):
            assert loss == pytest.approx(loss_0, abs=2e-2)
