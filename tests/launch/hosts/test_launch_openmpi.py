"""`deepspeed --launcher openmpi`: bare processes that read their rank from Open MPI's variables."""

import os
import shutil
import sys
from pathlib import Path

import pytest
from comparing import curve, reaches
from launching import PRETRAIN, environment, launch, run_until, write_config
from ports import unused_port

from alibi_lm.checkpoint.step import open_checkpoint
from alibi_lm.utils.errors import EXIT_STOPPED

needs_openmpi = pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs Open MPI's mpirun")


@needs_openmpi
def test_two_ranks_train_and_stop_under_mpirun(tmp_path: Path) -> None:
    config, run = write_config(tmp_path, num_steps=5000, checkpoint_interval=5000), tmp_path / "run"
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("localhost slots=2\n", encoding="utf-8")
    # One host needs --force_multi, or deepspeed starts the ranks itself. mpirun refuses root.
    options = ["--force_multi", "--no_ssh_check", "--master_addr", "127.0.0.1"]
    if os.geteuid() == 0:
        options.append("--launcher_args=--allow-run-as-root")
    launcher = str(Path(sys.executable).with_name("deepspeed"))
    code, output = run_until(
        [sys.executable, launcher, "--hostfile", str(hostfile), "--launcher", "openmpi", *options,
         str(PRETRAIN), str(config)],
        environment() | {"MASTER_PORT": str(unused_port())},
        when=reaches(run, 3),
        then=lambda _: (run / "STOP").touch(),
    )  # fmt: skip
    assert "cmd = mpirun -n 2 " in output
    assert "2 ranks, ZeRO stage 1" in output
    assert code == EXIT_STOPPED, output
    assert not (run / "STOP").exists()
    checkpoint = open_checkpoint(run)
    assert checkpoint.meta["layout"]["world_size"] == 2
    plain = tmp_path / "plain"
    launch(config, f"run.dir={plain}", f"train.num_steps={checkpoint.step}")
    assert curve(run) == curve(plain)
