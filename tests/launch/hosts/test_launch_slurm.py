"""A real Slurm of two nodes on this machine: the batch script and `deepspeed --launcher slurm`."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from comparing import curve, reaches
from launching import PRETRAIN, REPOSITORY, command, environment, launch, write_config
from ports import unused_port

from alibi_lm.checkpoint.step import open_checkpoint
from alibi_lm.utils.errors import EXIT_STOPPED

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
missing = [name for name in PROGRAMS if shutil.which(name) is None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}"),
    pytest.mark.skipif(os.geteuid() != 0, reason="Slurm's daemons need root"),
]

SLURM_CONF = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=node-1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=64 State=UNKNOWN
NodeName=node-2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=64 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a cluster with nodes node-1 and node-2."""
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool-node-1", "spool-node-2"):
        (folder / name).mkdir()
    ports = {name: unused_port() for name in ("controller", "first", "second")}
    host = socket.gethostname().partition(".")[0]
    conf = folder / "slurm.conf"
    conf.write_text(SLURM_CONF.format(folder=folder, host=host, **ports), encoding="utf-8")
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    variables = environment() | {
        "SLURM_CONF": str(conf), "MASTER_ADDR": "127.0.0.1", "RANKS_PER_NODE": "1",
        "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }  # fmt: skip
    files = {name: f"{folder}/munge.{name}" for name in ("key", "socket", "pid", "log", "seed")}
    munge = [f"--{name}-file={path}" for name, path in files.items() if name != "socket"]
    daemons = [
        ["munged", "--foreground", "--force", f"--socket={files['socket']}", *munge],
        ["slurmctld", "-D", "-c"],
        ["slurmd", "-D", "-N", "node-1"],
        ["slurmd", "-D", "-N", "node-2"],
    ]
    processes = []
    try:
        for line in daemons:
            with (folder / f"{line[0]}.out").open("ab") as out:
                processes.append(subprocess.Popen(line, env=variables, stdout=out, stderr=out))
            if line[0] == "munged":
                wait_for(lambda: Path(files["socket"]).exists(), "munged")
        wait_for(
            lambda: said(["sinfo", "-h", "-o", "%t %D"], variables) == "idle 2\n", "idle nodes"
        )
        yield variables
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(timeout=60)


def wait_for(condition: object, what: str, seconds: float = 240) -> None:
    """Wait until a condition holds; fails after a generous time."""
    assert callable(condition)
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, f"waited in vain for {what}"
        time.sleep(0.1)


def said(line: list[str], variables: dict[str, str], folder: Path | None = None) -> str:
    """What a short command prints."""
    done = subprocess.run(
        line, env=variables, cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout


def submit(checkout: Path, variables: dict[str, str], *arguments: str) -> str:
    """Submit the batch script; the job's number. Its nodes here have no GPUs."""
    port = {"MASTER_PORT": str(unused_port())}
    line = ["sbatch", "--parsable", "--gpus-per-node=0", "launch/slurm.sbatch", *arguments]
    job = said(line, variables | port, checkout).strip()
    assert job.isdigit(), job
    return job


def fact(name: str, job: str, variables: dict[str, str]) -> str:
    """What Slurm knows of a job by a name."""
    facts = said(["scontrol", "show", "job", "-o", job], variables).split()
    return next(part.partition("=")[2] for part in facts if part.startswith(f"{name}="))


def state(job: str, variables: dict[str, str]) -> str:
    """Slurm's word for where a job is."""
    return fact("JobState", job, variables)


def test_the_batch_script_stops_on_slurms_signal_and_goes_on(
    tmp_path: Path, slurm: dict[str, str]
) -> None:
    config, run = write_config(tmp_path, num_steps=5000, checkpoint_interval=5000), tmp_path / "run"
    shutil.copytree(REPOSITORY / "launch", tmp_path / "launch")
    (tmp_path / ".venv").symlink_to(Path(sys.executable).parents[1])
    job = submit(tmp_path, slurm, str(config))
    reached = reaches(run, 3)
    wait_for(lambda: reached() or state(job, slurm) not in ("PENDING", "RUNNING"), "three steps")
    log = tmp_path / f"alibi_lm-{job}.out"
    assert reached(), log.read_text()
    # What `#SBATCH --signal=USR1@300` does five minutes before the job's end.
    said(["scancel", "--signal=USR1", job], slurm)
    wait_for(lambda: state(job, slurm) not in ("RUNNING", "COMPLETING"), "the job's end")
    text = log.read_text(encoding="utf-8")
    assert "stopped by SIGUSR1" in text
    # No launcher has died of the signal and taken its ranks along before they had saved.
    assert "User defined signal" not in text
    # 143: Slurm ends the other host's launcher when the first one has left, all ranks having saved.
    assert fact("ExitCode", job, slurm) in (f"{EXIT_STOPPED}:0", "143:0")
    checkpoint = open_checkpoint(run)
    assert checkpoint.step == curve(run)[-1][0]
    assert checkpoint.meta["layout"]["world_size"] == 2
    last = f"train.num_steps={checkpoint.step + 2}"
    again = submit(tmp_path, slurm, str(config), last)
    wait_for(lambda: state(again, slurm) == "COMPLETED", "the second job's end")
    plain = tmp_path / "plain"
    launch(config, f"run.dir={plain}", last)
    assert curve(run) == curve(plain)
    assert not list((tmp_path / "runs").glob(".hostfile*"))


def test_the_slurm_launcher_trains_two_ranks(tmp_path: Path, slurm: dict[str, str]) -> None:
    config = write_config(tmp_path, num_steps=2)
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("node-1 slots=1\nnode-2 slots=1\n", encoding="utf-8")
    done = subprocess.run(
        [*command(PRETRAIN)[:2], "--hostfile", str(hostfile), "--no_ssh_check",
         "--launcher", "slurm", "--master_addr", "127.0.0.1", str(PRETRAIN), str(config)],
        env=slurm | {"MASTER_PORT": str(unused_port())},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cmd = srun -n 2 " in done.stdout
    assert "2 ranks, ZeRO stage 1" in done.stdout
    assert [step for step, _, _ in curve(tmp_path / "run")] == [1, 2]
