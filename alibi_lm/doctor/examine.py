"""The whole examination: ask every host, let them meet, compare, and say it in one table."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from alibi_lm.doctor.checks import Examined, host_problems, meeting_problems, table
from alibi_lm.doctor.hosts import (
    THIS,
    exported,
    read_hostfile,
    run_everywhere,
    waits_for_ever,
)
from alibi_lm.doctor.probe import MARKER
from alibi_lm.doctor.report import Meeting, Report, Request, dump, last_json
from alibi_lm.utils.errors import ConfigError, Problem
from alibi_lm.utils.logging import console

PROBE_SECONDS = 300.0
MEETING_SECONDS = 180.0


def examine(
    config: Path | None,
    overrides: Sequence[str],
    hostfile: Path | None,
    num_ranks: int,
    master: tuple[str | None, int],
    environment: Mapping[str, str],
) -> list[Problem]:
    """Examine all hosts of a hostfile, or without one this machine, and print one table.

    Returns one problem for each check that failed.

    `num_ranks` counts where there is no hostfile; `master` is the address (None: what the first
    host says of itself) and port at which the hosts meet.

    Raises:
        ConfigError: the hostfile or .deepspeed_env cannot be read.
    """
    slots = {THIS: num_ranks} if hostfile is None else read_hostfile(hostfile)
    folder = Path.cwd()
    variables = exported(environment, folder)
    path = None if config is None else str(config)
    request = Request(secrets.token_hex(4), sum(slots.values()), path, list(overrides))
    hosts = _probe(list(slots), request, folder, variables)
    with _without_markers(hosts, request.token):
        problems = list(host_problems(hosts))
        if len(hosts) > 1 and all(each.report is not None for each in hosts):
            hosts = _meet(hosts, request.token, master, folder, variables)
            problems += meeting_problems(hosts)
    failed: dict[str, set[str]] = {}
    for problem in problems:
        host, _, key = problem.key.partition(": ")
        failed.setdefault(host, set()).add(key.split(" ")[0])
    for line in table(hosts, failed):
        console.info(line)
    for host in slots:
        if host != THIS and waits_for_ever(host):
            console.warning(
                f"ssh to {host} never notices that a host is gone, and the launcher waits for it: "
                "put ServerAliveInterval 15 into ~/.ssh/config"
            )
    return problems


def _probe(
    names: Sequence[str], request: Request, folder: Path, variables: Mapping[str, str]
) -> list[Examined]:
    command = [sys.executable, "-m", "alibi_lm.doctor.probe", dump(request)]
    answers = run_everywhere(dict.fromkeys(names, command), folder, variables, PROBE_SECONDS)
    found = []
    for host, answer in answers.items():
        said = last_json(answer.output)
        good = answer.code == 0 and said is not None
        found.append(Examined(host, answer, Report(**said) if good and said else None))
    return found


def _meet(
    hosts: Sequence[Examined],
    token: str,
    master: tuple[str | None, int],
    folder: Path,
    variables: Mapping[str, str],
) -> list[Examined]:
    first = hosts[0].report
    assert first is not None
    address = master[0] or first.address
    if address is None:
        rule = "names no address of its own"
        raise ConfigError(Problem(hosts[0].host, None, rule, "give --master-addr"))
    commands = {}
    for rank, each in enumerate(hosts):
        assert each.report is not None
        place = [str(rank), str(len(hosts)), address, str(master[1])]
        arguments = [*place, each.report.run_folder or "", token]
        commands[each.host] = [sys.executable, "-m", "alibi_lm.doctor.collective", *arguments]
    answers = run_everywhere(commands, folder, variables, MEETING_SECONDS)
    met = []
    for each in hosts:
        said = last_json(answers[each.host].output)
        meeting = None if said is None else Meeting(**said)
        met.append(replace(each, answer=answers[each.host], meeting=meeting))
    return met


@contextmanager
def _without_markers(hosts: Sequence[Examined], token: str) -> Iterator[None]:
    """Take away what the examination wrote, where this host sees it."""
    try:
        yield
    finally:
        for each in hosts:
            if each.report is not None and each.report.run_folder is not None:
                marker = f"{MARKER}{token}_{each.report.hostname}"
                with suppress(OSError):
                    os.unlink(Path(each.report.run_folder) / marker)
