"""Mistakes through the real entry point: one line, exit code 2, nothing written."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import environment, error_lines, launch, launch_by_deepspeed, metrics, write_config

from alibi_lm.checkpoint.step import open_checkpoint
from alibi_lm.utils.errors import CheckpointError
from alibi_lm.utils.locking import exclusive_lock


def test_every_problem_in_one_line_on_rank_0(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    done = launch_by_deepspeed(
        config,
        "train.num_stps=3",
        "model.num_heads=7",
        "deepspeed.zero_optimisation.stage=2",
        "deepspeed.gradient_clipping=1.0",
        "deepspeed.zero_optimization.overlap_com=true",
        code=2,
    )
    (line,) = error_lines(done)
    assert "train.num_stps: unknown key; did you mean train.num_steps?" in line
    assert "deepspeed.zero_optimisation: is no key of DeepSpeed" in line
    assert "did you mean deepspeed.zero_optimization?" in line
    assert "use train.gradient_clipping" in line
    assert "deepspeed.zero_optimization.overlap_com" in line
    assert "did you mean overlap_comm?" in line
    assert "Traceback" not in done.stderr + done.stdout
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["train.micro_batch_size=3"], "is no multiple of train.micro_batch_size = 3"),
        (["train.gradient_accumulation_steps=3"], "1 data-parallel ranks = 6"),
        (["model.num_heads=7"], "does not divide model.hidden_size"),
        (["model.vocab_size=100"], "outside"),
        (["data.corpora.0.prefix=nowhere/corpus"], "data.corpora.0.prefix = nowhere/corpus: no"),
        (["data.tokenizer=nowhere/tokenizer"], "data.tokenizer = nowhere/tokenizer: no such file"),
        (["train.init_from=nowhere/run"], "train.init_from = nowhere/run: no such file or folder"),
        (["train.sequence_length=100000"], "fewer than one window"),
        (["model.position=learned", "model.max_positions=32"], "train.sequence_length = 64"),
        (["train.precision=bf16", "deepspeed.zero_optimization.stage=0"], "use stage 1 or higher"),
        (["parallel.tp=2"], "parallel = tp 2 x pp 1: does not divide 1 rank"),
        (["run.dir=''"], "run.dir"),
        (["run.dir=/proc/xx/run"], "/proc/xx"),
        (
            ["train.validation_interval=1", "train.validation_multiples=[1,4000]"],
            "train.validation_multiples = 4000",
        ),
    ],
)
def test_a_mistake_is_named(overrides: list[str], part: str, tmp_path: Path) -> None:
    done = launch(write_config(tmp_path), *overrides, ranks=0, code=2)
    (line,) = error_lines(done)
    assert part in line
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("train.num_stps=3", "train.num_stps: unknown key; did you mean train.num_steps?"),
        ("train.global_batch_size=9", "train.global_batch_size"),
        ("data.corpora.0.prefix=nowhere/corpus", "nowhere/corpus"),
    ],
)
def test_a_mistake_is_one_line_before_any_rank_starts(
    override: str, part: str, tmp_path: Path
) -> None:
    config = str(write_config(tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", "alibi_lm", "train", config, "--num-ranks", "2", override],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, ""), "the launcher would print here"
    assert done.stderr.startswith("error: ")
    assert part in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    config = write_config(tmp_path, checkpoint_interval=2, gradient_clipping=0.0)
    launch(config, "train.num_steps=2", ranks=0)
    broken = tmp_path / "broken"
    done = launch_by_deepspeed(
        config, f"run.dir={broken}", "train.learning_rate=1e18", "train.log_interval=1", code=3
    )
    (line,) = error_lines(done)
    assert "samples 8 to 15" in line or "samples 16 to 23" in line
    assert "last good checkpoint" in line
    assert "Traceback" not in done.stderr
    assert open_checkpoint(tmp_path / "run").step == 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_one_line_and_harms_no_earlier_checkpoint(
    tmp_path: Path, small_disk: Path
) -> None:
    config = write_config(tmp_path, keep_last=10)
    run = small_disk / "run"
    done = launch(config, f"run.dir={run}", "train.checkpoint_interval=1", code=2)
    (line,) = error_lines(done)
    assert "make room" in line
    good = open_checkpoint(run)
    assert good.step >= 1
    assert not list((run / "checkpoints").glob(".partial*"))
    done = launch(config, f"run.dir={run}", "train.keep_last=1", "train.num_steps=3", code=2)
    assert "make room" in error_lines(done)[0]
    assert open_checkpoint(run).step == good.step
    assert [line["step"] for line in metrics(run)][: good.step] == list(range(1, good.step + 1))


def test_a_run_is_trained_by_one_job_at_a_time(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    with exclusive_lock(tmp_path / "run", CheckpointError):
        done = launch(config, code=2)
    assert "is in use by another process" in error_lines(done)[0]
    assert not list((tmp_path / "run").iterdir())
    launch(config, "train.num_steps=1", ranks=0)


def test_weights_that_an_update_broke_are_not_saved(tmp_path: Path) -> None:
    config = write_config(tmp_path, num_steps=1, learning_rate=1e39)
    done = launch(config, ranks=2, code=3)
    assert "weights are not finite" in error_lines(done)[0]
    assert not list((tmp_path / "run" / "checkpoints").glob("*"))
