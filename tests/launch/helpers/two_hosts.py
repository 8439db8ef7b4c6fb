"""Two hosts on one machine: namespaces of their own for network, processes, names and mounts.

Each host has an address, a host name, an ssh server and its own process ids (DeepSpeed ends a job
over pdsh by `pkill -f` on every host, which must not reach the machine's other jobs). A bridge
joins them, and either's cable can be pulled. Nothing of the machine itself is changed: /etc/ssh
and /etc/hosts are replaced in the hosts' own mount namespaces only, and all of it ends with the
process that made it, however that one ends.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

NAMES = ("host-a", "host-b")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
_PROGRAMS = ("ip", "unshare", "nsenter", "pdsh", "ssh", "ssh-keygen", "pkill", "hostname")
_NAMESPACES = ("--net", "--pid", "--uts", "--mount")
_SSHD = "/usr/sbin/sshd"

# The first process of a host. It ends, and every process of the host with it, when its standard
# input closes, that is when the process that holds the other end ends.
_INIT = """
set -e
hostname "$1"
mount --bind "$2" /etc/ssh
mount --bind "$2/hosts" /etc/hosts
mount -t tmpfs tmpfs /run
mkdir /run/sshd
ip link set lo up
{sshd} -D -e 2> "$3" &
echo up
read -r _ || true
"""

_SSHD_CONFIG = """\
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
PidFile none
"""

# A launcher waits for the ssh to each host: without ServerAlive it waits for a lost one for ever.
_SSH_CONFIG = """\
Host *
  IdentityFile {folder}/key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  StrictHostKeyChecking yes
  ServerAliveInterval 2
  ServerAliveCountMax 3
  ConnectTimeout 5
"""


def missing() -> str | None:
    """Why this machine cannot make two hosts; None where it can."""
    if os.geteuid() != 0:
        return "two hosts need root, to make network and process namespaces"
    absent = [name for name in _PROGRAMS if shutil.which(name) is None]
    if not Path(_SSHD).exists():
        absent.append("sshd")
    if absent:
        packages = "iproute2 openssh-server openssh-client pdsh procps"
        return f"two hosts need {', '.join(absent)} (Debian: {packages})"
    trial = subprocess.run(
        ["unshare", *_NAMESPACES, "--fork", "--mount-proc", "ip", "link", "add", "type", "bridge"],
        capture_output=True,
        text=True,
        check=False,
    )
    if trial.returncode != 0:
        return f"this machine lets no one make namespaces ({trial.stderr.strip()})"
    return None


@dataclass(frozen=True)
class Host:
    """One of the two hosts."""

    name: str
    address: str
    first_process: int
    """The process id, as the machine counts, of the host's first process."""

    def popen(
        self, command: Sequence[str], *, cwd: Path, env: Mapping[str, str], stdout: IO[str]
    ) -> subprocess.Popen[str]:
        """Start a command on this host, errors among its output."""
        enter = ["nsenter", "--target", str(self.first_process), "--all", f"--wd={cwd}"]
        return subprocess.Popen(
            [*enter, *command],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def processes(self, *parts: str) -> list[psutil.Process]:
        """The host's processes that have all of `parts` as arguments."""
        own = os.readlink(f"/proc/{self.first_process}/ns/pid")
        found = []
        for process in psutil.process_iter():
            try:
                if os.readlink(f"/proc/{process.pid}/ns/pid") != own:
                    continue
                if set(parts) <= set(process.cmdline()):
                    found.append(process)
            except (OSError, psutil.Error):
                continue
        return found


@dataclass(frozen=True)
class TwoHosts:
    """The pair, and the switch between them."""

    hosts: tuple[Host, Host]
    switch: int
    """Process id of the one process in the switch's network namespace."""

    def cut(self, host: Host) -> None:
        """Pull the host's cable: no packet reaches it any more, and nothing reports it."""
        self._port(host, "down")

    def mend(self, host: Host) -> None:
        """Plug the cable in again."""
        self._port(host, "up")

    def _port(self, host: Host, state: str) -> None:
        _in_network(self.switch, "ip", "link", "set", f"to-{host.name}", state)


@contextmanager
def two_hosts(folder: Path) -> Iterator[TwoHosts]:
    """Make two hosts that see this machine's files; their keys and settings go to `folder`."""
    folder.mkdir()
    _write_ssh_folder(folder)
    firsts: list[subprocess.Popen[str]] = []
    try:
        switch = _start(["unshare", "--net", "sh", "-c", "echo up; read _"], firsts)
        for command in ("link add name switch type bridge", "link set switch up"):
            _in_network(switch, "ip", *command.split())
        hosts = []
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            init = ["bash", "-c", _INIT.format(sshd=_SSHD), "bash", name]
            init += [str(folder), str(folder / f"sshd-{name}.log")]
            unshare = ["unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc"]
            outer = _start([*unshare, *init], firsts)
            (first,) = psutil.Process(outer).children()
            hosts.append(Host(name, address, first.pid))
            _connect(switch, hosts[-1])
        yield TwoHosts((hosts[0], hosts[1]), switch)
    finally:
        for process in firsts:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()


def _start(command: list[str], started: list[subprocess.Popen[str]]) -> int:
    """Start a first process and wait until it says `up`; returns its process id."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    started.append(process)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == "up\n", f"{command[0]} ended: {line}"
    return process.pid


def _connect(switch: int, host: Host) -> None:
    """Lay a cable from the host's eth0 to a port of the switch."""
    port, first = f"to-{host.name}", str(host.first_process)
    peer = ["peer", "name", "eth0", "netns", first]
    _in_network(switch, "ip", "link", "add", port, "type", "veth", *peer)
    _in_network(switch, "ip", "link", "set", port, "master", "switch", "up")
    _in_network(host.first_process, "ip", "addr", "add", f"{host.address}/24", "dev", "eth0")
    _in_network(host.first_process, "ip", "link", "set", "eth0", "up")


def _in_network(process: int, *command: str) -> None:
    enter = ["nsenter", "--target", str(process), "--net"]
    subprocess.run([*enter, *command], check=True, capture_output=True)


def _write_ssh_folder(folder: Path) -> None:
    """What lies in /etc/ssh of the hosts: keys, and the settings of client and server."""
    for key in ("key", "host_key"):
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
        subprocess.run(make, check=True, capture_output=True)
    public = (folder / "host_key.pub").read_text()
    known = [f"{','.join((*NAMES, *ADDRESSES))} {public}"]
    (folder / "known_hosts").write_text("".join(known))
    (folder / "ssh_config").write_text(_SSH_CONFIG.format(folder=folder))
    (folder / "sshd_config").write_text(_SSHD_CONFIG.format(folder=folder))
    lines = [f"{address} {name}\n" for name, address in zip(NAMES, ADDRESSES, strict=True)]
    (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))


def wait_for(what: str, condition: object, seconds: float = 120) -> None:
    """Wait until `condition()` holds; fail naming `what` when it never does."""
    assert callable(condition)
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, f"never came: {what}"
        time.sleep(0.02)
