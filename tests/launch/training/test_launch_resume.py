"""Stopping and going on: kills, layout changes, damage, what may change."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from comparing import assert_same_states, curve
from launching import error_lines, launch, metrics, write_config

from alibi_lm.checkpoint.folder import step_folders
from alibi_lm.checkpoint.step import open_checkpoint


def test_layout_changes_on_resume_and_the_run_says_when_it_is_done(tmp_path: Path) -> None:
    plain, changing = tmp_path / "a", tmp_path / "b"
    for folder in (plain, changing):
        folder.mkdir()
    launch(write_config(plain, num_steps=12), ranks=0)
    config = write_config(changing, num_steps=3)
    layouts = [(2, 1, 3), (2, 3, 6), (0, 2, 9), (2, 0, 12)]
    for ranks, stage, steps in layouts:
        stage_key = f"deepspeed.zero_optimization.stage={stage}"
        launch(config, stage_key, f"train.num_steps={steps}", ranks=ranks)
    for a, b in zip(curve(plain / "run"), curve(changing / "run"), strict=True):
        assert a[0] == b[0]
        assert a[1:] == pytest.approx(b[1:], abs=1e-5)
    assert_same_states(plain / "run", changing / "run", tolerance=2e-5)
    before = metrics(changing / "run")
    again = launch(config, "train.num_steps=12", ranks=0)
    assert "has already done its 12 steps" in again.stdout
    assert metrics(changing / "run") == before


def test_what_may_not_change_is_refused_by_name(tmp_path: Path) -> None:
    config, run = write_config(tmp_path), tmp_path / "run"
    launch(config, "train.num_steps=5", ranks=0)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    changed = ["train.learning_rate=1e-4", "model.num_heads=8", "train.seed=3"]
    done = launch(config, *changed, ranks=2, code=2)
    (line,) = error_lines(done)
    for key in ("train.learning_rate", "model.num_heads", "train.seed"):
        assert key in line
    assert "Traceback" not in done.stderr
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_damaged_newest_step_is_named_and_left_and_an_older_one_used(tmp_path: Path) -> None:
    config, run = write_config(tmp_path, checkpoint_interval=2), tmp_path / "run"
    launch(config, "train.num_steps=4", ranks=0)
    shard = run / "checkpoints/step_00000004/shard_00000.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[:-100])
    done = launch(config, "train.num_steps=6", ranks=2)
    assert f"{shard}: has {len(data) - 100} of {len(data)} bytes" in done.stderr
    assert "from step_00000002" in done.stdout
    assert [line["step"] for line in metrics(run)] == [1, 2, 3, 4, 5, 6]
    kept = run / "checkpoints/damaged_step_00000004_1/shard_00000.safetensors"
    assert kept.read_bytes() == data[:-100]
    assert open_checkpoint(run).step == 6

    for folder in step_folders(run):
        flipped = folder / "shard_00000.safetensors"
        content = bytearray(flipped.read_bytes())
        content[-1] ^= 1
        flipped.write_bytes(content)
    done = launch(config, "train.num_steps=8", ranks=0, code=2)
    (line,) = error_lines(done)
    assert "does not match its sha256" in line
    assert "step_00000006" in line


def test_a_checkpoint_without_meta_is_not_started_over(tmp_path: Path) -> None:
    config, run = write_config(tmp_path), tmp_path / "run"
    launch(config, "train.num_steps=5", ranks=0)
    (run / "checkpoints/step_00000005/meta.json").unlink()
    done = launch(config, ranks=0, code=2)
    assert "is no complete checkpoint" in error_lines(done)[0]


def test_retention_keeps_the_newest_and_every_mth(tmp_path: Path) -> None:
    config = write_config(tmp_path, checkpoint_interval=1, keep_last=2, keep_every=4)
    launch(config, ranks=0)
    names = [folder.name for folder in step_folders(tmp_path / "run")]
    assert names == [f"step_{step:08d}" for step in (4, 8, 9, 10)]
    latest = (tmp_path / "run/checkpoints/latest").read_text().strip()
    assert latest == "step_00000010"


def test_init_from_takes_the_weights_and_not_the_moments(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for folder in (first, second):
        folder.mkdir()
    launch(write_config(first), ranks=0)
    config = write_config(second, sequence_length=128, init_from=str(first / "run"))
    done = launch(config, "train.num_steps=1", ranks=2)
    assert "with the weights of" in done.stdout
    assert metrics(second / "run")[0]["loss"] < metrics(first / "run")[0]["loss"] - 0.05
    assert open_checkpoint(second / "run").meta["optimizer_updates"] == 1
    other = launch(config, "model.num_layers=3", "run.dir=" + str(tmp_path / "c"), ranks=0, code=2)
    assert "model.num_layers = 3: is 2 in" in error_lines(other)[0]
    assert not (tmp_path / "c").exists()


def test_a_step_folder_stands_alone(tmp_path: Path) -> None:
    launch(write_config(tmp_path), ranks=0)
    moved = tmp_path / "elsewhere"
    shutil.copytree(tmp_path / "run/checkpoints/step_00000010", moved)
    checkpoint = open_checkpoint(moved)
    assert checkpoint.step == 10
    assert json.loads((moved / "meta.json").read_text())["step"] == 10
    tokens = torch.arange(4, 20)[None]
    assert torch.equal(
        checkpoint.decoder()(tokens), open_checkpoint(tmp_path / "run").decoder()(tokens)
    )


def test_a_time_limit_saves_and_stops(tmp_path: Path) -> None:
    config = write_config(tmp_path, num_steps=100000, checkpoint_interval=100000, max_minutes=0.05)
    done = launch(config, ranks=0, code=4)
    assert "stopped by train.max_minutes" in done.stdout
    assert 1 <= open_checkpoint(tmp_path / "run").step < 100000
