"""Two hosts under `deepspeed --hostfile` over pdsh and ssh: training, stopping, a lost host."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from launching import RECORDING, environment, launch, metrics, write_config
from ports import unused_port
from two_hosts import Host, TwoHosts, missing, two_hosts, wait_for

from alibi_lm.checkpoint.folder import verify
from alibi_lm.checkpoint.step import open_checkpoint
from alibi_lm.utils.errors import EXIT_STOPPED

SILENCE = 10
NUM_STEPS = 100_000
LAYOUT = ("parallel.tp=2", f"train.heartbeat_timeout_seconds={SILENCE}")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with two_hosts(tmp_path_factory.mktemp("hosts") / "ssh") as made:
        yield made


# What reaches the ranks of the other host; read from the folder that deepspeed starts in.
VARIABLES = {"GLOO_SOCKET_IFNAME": "eth0", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


def write_launch_files(folder: Path, hosts: list[Host]) -> Path:
    hostfile = folder / "hostfile"
    hostfile.write_text("".join(f"{each.name} slots=2\n" for each in hosts))
    lines = [f"{name}={value}\n" for name, value in VARIABLES.items()]
    (folder / ".deepspeed_env").write_text("".join(lines))
    return hostfile


class Job:
    """A `deepspeed` started on one host, for that host alone or for both."""

    def __init__(self, host: Host, folder: Path, hosts: list[Host], *arguments: str) -> None:
        self.host = host
        self.output = folder / f"output-{time.monotonic_ns()}.txt"
        hostfile = write_launch_files(folder, hosts)
        launcher = str(Path(sys.executable).with_name("deepspeed"))
        options = ["--hostfile", str(hostfile), "--master_port", str(unused_port())]
        script = str(RECORDING)
        with self.output.open("w") as stdout:
            self.process = host.popen(
                [sys.executable, launcher, *options, script, *arguments],
                cwd=folder,
                env=environment() | VARIABLES,
                stdout=stdout,
            )

    def read(self) -> str:
        return self.output.read_text()

    def wait(self, seconds: float = 120) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"does not end:\n{self.read()}") from None

    def main_process(self) -> psutil.Process:
        """The `deepspeed` process itself, inside the host's namespaces."""
        (main,) = psutil.Process(self.process.pid).children()
        return main


def ranks(host: Host) -> list[psutil.Process]:
    script = str(RECORDING)
    found = host.processes(sys.executable, script)
    return [each for each in found if each.cmdline()[2] == script]


def last_step(run: Path) -> int:
    return max((line["step"] for line in metrics(run)), default=0)


def curve(run: Path) -> list[tuple[int, float, float]]:
    return [(line["step"], line["loss"], line["grad_norm"]) for line in metrics(run)]


def test_a_run_over_two_hosts_is_stopped_loses_a_host_and_goes_on_alone(
    pair: TwoHosts, tmp_path: Path
) -> None:
    first, second = pair.hosts
    settings = {"checkpoint_interval": NUM_STEPS, "learning_rate": 1e-3}
    config = write_config(tmp_path, num_steps=NUM_STEPS, **settings)
    run = tmp_path / "run"

    # SIGTERM to `deepspeed`: the step in progress is saved by all ranks of both hosts.
    job = Job(first, tmp_path, [first, second], str(config), *LAYOUT)
    wait_for("three steps", lambda: last_step(run) >= 3 or job.process.poll() is not None)
    assert job.process.poll() is None, job.read()
    assert [len(ranks(host)) for host in pair.hosts] == [2, 2]
    job.main_process().send_signal(signal.SIGTERM)
    assert job.wait() == 1
    wait_for("the ranks' end", lambda: not ranks(first) and not ranks(second))
    codes = {path.name: path.read_text() for path in tmp_path.glob("exit_*")}
    assert codes == {f"exit_{rank}": str(EXIT_STOPPED) for rank in range(4)}
    stopped = open_checkpoint(run)
    assert 3 <= stopped.step < NUM_STEPS, job.read()
    assert stopped.meta["layout"] | {"dp": 2, "tp": 2, "world_size": 4} == stopped.meta["layout"]
    assert len(stopped.meta["shards"]) == 4
    verify(stopped.folder)
    assert re.search(rf"stopped by .* after step {stopped.step};", (run / "train.log").read_text())

    # The same command resumes; then one host's cable is pulled in mid-step.
    saves = f"train.checkpoint_interval={stopped.step + 2}"  # there, and not again
    job = Job(first, tmp_path, [first, second], str(config), *LAYOUT, saves)
    wait_for(
        "steps after a new checkpoint",
        lambda: last_step(run) >= stopped.step + 4 or job.process.poll() is not None,
    )
    assert job.process.poll() is None, job.read()
    pair.cut(second)
    began = time.monotonic()
    code = job.wait(SILENCE + 60)
    took = time.monotonic() - began
    output = job.read()
    wait_for("the lost host's ranks' end", lambda: not ranks(second), SILENCE + 60)
    pair.mend(second)
    (line,) = [text for text in output.splitlines() if "error: rank" in text]
    assert "error: ranks 2 and 3 on host-b (all of that host): sent no heartbeat" in line
    assert re.search(r"while the job was at step \d+", line)
    assert f"checkpoints/step_{stopped.step + 2:08d}" in line
    assert "Traceback" not in output
    assert code == 255  # the largest: ssh's, for the lost host
    assert took < SILENCE + 40
    assert line.split("error: ")[1] in (run / "train.log").read_text()

    # The other host alone, in another layout, to the end; all of it is one run.
    end = stopped.step + 6
    job = Job(first, tmp_path, [first], str(config), *LAYOUT, f"train.num_steps={end}")
    assert job.wait() == 0, job.read()
    assert f"from step_{stopped.step + 2:08d}" in job.read()
    finished = open_checkpoint(run)
    assert (finished.step, finished.meta["layout"]["world_size"]) == (end, 2)
    (tmp_path / "plain").mkdir()
    launch(write_config(tmp_path / "plain", num_steps=end, **settings), ranks=0)
    for ours, right in zip(curve(run), curve(tmp_path / "plain/run"), strict=True):
        assert ours == (right[0], pytest.approx(right[1], abs=1e-5), pytest.approx(right[2], 1e-4))


@pytest.mark.slow
def test_without_rank_0s_host_the_other_goes_on(pair: TwoHosts, tmp_path: Path) -> None:
    first, second = pair.hosts
    config = write_config(tmp_path, num_steps=NUM_STEPS, checkpoint_interval=3)
    run = tmp_path / "run"
    job = Job(first, tmp_path, [first, second], str(config), *LAYOUT)
    wait_for("five steps", lambda: last_step(run) >= 5 or job.process.poll() is not None)
    assert job.process.poll() is None, job.read()
    pair.cut(first)
    assert job.wait(SILENCE + 60) != 0
    wait_for("the ranks' end", lambda: not ranks(first) and not ranks(second), SILENCE + 60)
    pair.mend(first)
    # The hosts share this machine's files, so the log has what each of them says of the other.
    log = (run / "train.log").read_text()
    assert log.count("rank 0 on host-a: sent no heartbeat") == 1
    assert log.count("ranks 2 and 3 on host-b (all of that host): sent no heartbeat") == 1
    saved = open_checkpoint(run).step
    job = Job(second, tmp_path, [second], str(config), *LAYOUT, f"train.num_steps={saved + 3}")
    assert job.wait() == 0, job.read()
    assert f"from step_{saved:08d}" in job.read()
    assert open_checkpoint(run).step == saved + 3


def examine(pair: TwoHosts, folder: Path, *arguments: str) -> tuple[int, str]:
    output = folder / "doctor.txt"
    with output.open("w") as stdout:
        process = pair.hosts[0].popen(
            [sys.executable, "-m", "alibi_lm", "doctor", *arguments],
            cwd=folder,
            env=environment() | VARIABLES,
            stdout=stdout,
        )
        code = process.wait(180)
    return code, output.read_text()


def test_the_doctor_examines_both_hosts(pair: TwoHosts, tmp_path: Path) -> None:
    config = write_config(tmp_path)
    hostfile = write_launch_files(tmp_path, list(pair.hosts))
    arguments = (str(config), "parallel.tp=2", "--hostfile", str(hostfile))
    code, output = examine(pair, tmp_path, *arguments)
    assert code == 0, output
    header, *rows = output.splitlines()[-3:]
    assert [row.split()[0] for row in rows] == [host.name for host in pair.hosts]
    for row in rows:
        for column, cell in (("ssh", "yes"), ("run.dir", "seen by 2"), ("all-reduce", "gloo ")):
            assert row[header.index(column) :].startswith(cell), output
        assert float(row.split("gloo ")[1].split()[0]) > 0
    assert "ServerAliveInterval" not in output  # the hosts' ssh settings have it
    assert not list(tmp_path.glob(".alibi_lm_doctor*"))

    pair.cut(pair.hosts[1])
    code, output = examine(pair, tmp_path, *arguments)
    pair.mend(pair.hosts[1])
    assert code == 2, output
    (line,) = [text for text in output.splitlines() if text.startswith("error: ")]
    assert line.startswith("error: host-b: ssh: cannot connect (ssh: connect to host host-b")
    assert "Traceback" not in output
