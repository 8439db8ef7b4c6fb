"""The examination: probe every host, run an all-reduce between them, and print one table."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from alibi_lm.doctor.checks import Host, collective_problems, host_problems, table
from alibi_lm.doctor.hosts import (
    THIS,
    exported,
    local_name,
    read_hostfile,
    run_everywhere,
    waits_for_ever,
)
from alibi_lm.doctor.probe import MARKER
from alibi_lm.doctor.report import CollectiveReport, HostReport, ProbeRequest, dump, last_json
from alibi_lm.train.environment import free_port
from alibi_lm.utils.errors import ConfigError, Problem
from alibi_lm.utils.logging import console

PROBE_SECONDS = 300.0
COLLECTIVE_SECONDS = 180.0


@dataclass(frozen=True)
class _Place:
    """Where commands run, with which variables."""

    folder: Path
    variables: Mapping[str, str]


def examine(
    config: Path | None,
    overrides: Sequence[str],
    hostfile: Path | None,
    num_ranks: int,
    master: tuple[str | None, int],
    environment: Mapping[str, str],
) -> list[Problem]:
    """Examine all hosts of a hostfile, or this machine without one, and print one table.

    Args:
        config, overrides: the run, if there is one.
        hostfile: the hosts and their ranks.
        num_ranks: ranks of this machine, without a hostfile.
        master: address (None: the first host's own) and port at which the hosts connect.
        environment: variables of this process.

    Returns:
        One problem for each check that failed.

    Raises:
        ConfigError: the hostfile or .deepspeed_env cannot be read.
    """
    slots = {THIS: num_ranks} if hostfile is None else read_hostfile(hostfile)
    place = _Place(Path.cwd(), exported(environment, Path.cwd()))
    path = None if config is None else str(config)
    request = ProbeRequest(secrets.token_hex(4), sum(slots.values()), path, list(overrides))
    hosts = _probe(slots, request, place)
    with _without_markers(hosts, request.token):
        problems = list(host_problems(hosts))
        if all(host.report is not None for host in hosts):
            hosts = _collective(hosts, request.token, master, place)
            problems += collective_problems(hosts)
    failed: dict[str, set[str]] = {}
    for problem in problems:
        name, _, key = problem.key.partition(": ")
        failed.setdefault(name, set()).add(key.split(" ")[0])
    for line in table(hosts, failed):
        console.info(line)
    for name in slots:
        if name != THIS and waits_for_ever(name):
            console.warning(
                f"ssh to {name} never notices a lost host, and the launcher waits for it: "
                "put ServerAliveInterval 15 into ~/.ssh/config"
            )
    return problems


def _probe(slots: Mapping[str, int], request: ProbeRequest, place: _Place) -> list[Host]:
    command = [sys.executable, "-m", "alibi_lm.doctor.probe", dump(request)]
    commands = dict.fromkeys(slots, command)
    answers = run_everywhere(commands, place.folder, place.variables, PROBE_SECONDS)
    hosts = []
    for name, answer in answers.items():
        content = last_json(answer.output) if answer.code == 0 else None
        report = None if content is None else HostReport(**content)
        hosts.append(Host(name, answer, report, slots=slots[name]))
    return hosts


def _collective(
    hosts: Sequence[Host], token: str, master: tuple[str | None, int], place: _Place
) -> list[Host]:
    """All-reduce between one process a host, or between several processes of a single host."""
    report = hosts[0].report
    assert report is not None
    if len(hosts) == 1:
        size = max(2, hosts[0].slots)
        size = min(size, len(report.gpus)) if report.gpus else size
        names = [local_name(rank) for rank in range(size)]
        owners, devices = dict.fromkeys(names, hosts[0]), list(range(size))
        address, port = "127.0.0.1", free_port()
    else:
        owners = {host.name: host for host in hosts}
        devices = [0] * len(hosts)
        address, port = master[0] or report.address or "", master[1]
        if not address:
            rule = "has no address of its own"
            raise ConfigError(Problem(hosts[0].name, None, rule, "give --master-addr"))
    commands = {}
    for rank, (name, host) in enumerate(owners.items()):
        assert host.report is not None
        where = [str(rank), str(len(owners)), str(devices[rank]), address, str(port)]
        arguments = [*where, host.report.run_folder or "", token]
        commands[name] = [sys.executable, "-m", "alibi_lm.doctor.collective", *arguments]
    answers = run_everywhere(commands, place.folder, place.variables, COLLECTIVE_SECONDS)
    results: dict[str, Host] = {}
    for name, host in owners.items():
        content = last_json(answers[name].output)
        outcome = None if content is None else CollectiveReport(**content)
        earlier = results.get(host.name)
        if earlier is None or outcome is None or (outcome.failure and earlier.collective):
            results[host.name] = replace(host, answer=answers[name], collective=outcome)
    return list(results.values())


@contextmanager
def _without_markers(hosts: Sequence[Host], token: str) -> Iterator[None]:
    """Remove the marker files afterwards, where this host sees them."""
    try:
        yield
    finally:
        for host in hosts:
            if host.report is not None and host.report.run_folder is not None:
                marker = f"{MARKER}{token}_{host.report.hostname}"
                with suppress(OSError):
                    os.unlink(Path(host.report.run_folder) / marker)
