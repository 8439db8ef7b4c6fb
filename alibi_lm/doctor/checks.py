"""Compares the hosts' reports. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from alibi_lm.doctor.hosts import THIS, Answer
from alibi_lm.doctor.report import CollectiveReport, HostReport
from alibi_lm.utils.errors import Problem
from alibi_lm.utils.text import counted

CLOCK_SECONDS = 5.0
"""Largest difference of clocks: logs of several hosts can still be read together."""
HEADER = (
    *("host", "ssh", "python", "alibi_lm", "torch", "deepspeed", "gpus", "config", "data"),
    *("run.dir", "disk", "clock", "all-reduce"),
)


@dataclass(frozen=True)
class Host:
    """One host, its last answer and its reports."""

    name: str
    answer: Answer
    report: HostReport | None
    collective: CollectiveReport | None = None
    slots: int = 1
    """Ranks that it is to run."""


def host_problems(hosts: Sequence[Host]) -> Iterator[Problem]:
    """Problems of the single hosts, and differences to the first host that answered."""
    reference = next((host for host in hosts if host.report is not None), None)
    common = _common_problems([host.report for host in hosts if host.report is not None])
    yield from (_parsed(text) for text in common)
    for host in hosts:
        report = host.report
        if report is None:
            yield _no_report(host)
            continue
        for text in report.problems:
            if text not in common:
                yield _parsed(text, f"{host.name}: ")
        assert reference is not None
        assert reference.report is not None
        yield from _differences(host.name, report, reference.name, reference.report)
        if report.gpus and len(report.gpus) < host.slots:
            rule = f"are too few for {counted(host.slots, 'rank')} there"
            fix = "lower the host's slots, or check CUDA_VISIBLE_DEVICES"
            yield Problem(f"{host.name}: gpus", counted(len(report.gpus), "GPU"), rule, fix)
        needed, free = report.needed_bytes, report.free_bytes
        if needed is not None and free is not None and free < needed:
            rule = f"is free in {report.run_folder}; the run's checkpoints take {_size(needed)}"
            fix = "make room, or lower train.keep_last"
            yield Problem(f"{host.name}: disk", _size(free), rule, fix)


def _common_problems(reports: Sequence[HostReport]) -> list[str]:
    """Problems that every host reports, such as those of the config."""
    if len(reports) < 2:
        return []
    return [t for t in reports[0].problems if all(t in other.problems for other in reports)]


def _parsed(text: str, host: str = "") -> Problem:
    key, _, rest = text.partition(": ")
    rule, _, fix = rest.rpartition("; ")
    return Problem(f"{host}{key}", None, rule, fix)


def _no_report(host: Host) -> Problem:
    reason = host.answer.exit_reason()
    if host.name != THIS and host.answer.code == 255:
        fix = f"make `ssh {host.name} hostname` work without a password"
        return Problem(f"{host.name}: ssh", None, f"cannot connect ({reason})", fix)
    fix = "install the package on every host at the same path, with the same versions"
    return Problem(f"{host.name}: python", None, f"cannot run the package there ({reason})", fix)


def _differences(
    host: str, report: HostReport, other_host: str, other: HostReport
) -> Iterator[Problem]:
    same = "install from the same constraints.txt and commit on every host"
    if report.python != other.python:
        yield Problem(f"{host}: python", report.python, f"is {other.python} on {other_host}", same)
    for name, version in report.versions.items():
        if version != other.versions.get(name):
            rule = f"is {other.versions.get(name)} on {other_host}"
            yield Problem(f"{host}: {name}", version, rule, same)
    if report.config != other.config and None not in (report.config, other.config):
        rule = f"differs from the resolved config on {other_host}"
        yield Problem(f"{host}: config", _short(report.config), rule, "share the file, or copy it")
    if report.data != other.data and None not in (report.data, other.data):
        rule = f"differs from the data on {other_host}"
        fix = "put the same token files and tokenizer at the same paths"
        yield Problem(f"{host}: data", _short(report.data), rule, fix)


def collective_problems(hosts: Sequence[Host]) -> Iterator[Problem]:
    """Problems of shared storage, clocks and the all-reduce."""
    names = {host.report.hostname: host.name for host in hosts if host.report is not None}
    for host in hosts:
        outcome = host.collective
        if outcome is None:
            rule = f"did not finish ({host.answer.exit_reason()})"
            yield Problem(f"{host.name}: all-reduce", None, rule, "look at that host")
            continue
        unseen = [name for hostname, name in names.items() if hostname not in outcome.seen]
        wrote = host.report is not None and host.report.run_folder is not None
        if wrote and unseen:
            rule = f"does not show the files that {', '.join(unseen)} wrote there"
            fix = "put run.dir on storage that all hosts share"
            yield Problem(f"{host.name}: run.dir", None, rule, fix)
        if outcome.failure is not None or outcome.total is None:
            rule = f"failed ({outcome.failure})"
            fix = "check --master-addr, GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME, and firewalls"
            yield Problem(f"{host.name}: all-reduce", None, rule, fix)
            continue
        size = outcome.num_processes
        expected = size * (size + 1) // 2
        if outcome.total != expected:
            rule = f"should give {expected} from {counted(size, 'process', 'processes')}"
            yield Problem(f"{host.name}: all-reduce", outcome.total, rule, "look at the network")
        if outcome.clock is not None and abs(outcome.clock) > CLOCK_SECONDS:
            rule = f"differs by more than {CLOCK_SECONDS:.0f} s from {hosts[0].name}"
            yield Problem(f"{host.name}: clock", f"{outcome.clock:+.1f} s", rule, "run chrony")


def table(hosts: Sequence[Host], failed: Mapping[str, set[str]]) -> list[str]:
    """One line a host; `!` marks the cells of failed checks."""
    rows = [list(HEADER)]
    for host in hosts:
        marks = failed.get(host.name, set())
        cells = zip(HEADER, _cells(host, len(hosts)), strict=True)
        rows.append([cell + "!" * (name in marks) for name, cell in cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _cells(host: Host, num_hosts: int) -> list[str]:
    report, outcome = host.report, host.collective
    if report is None:
        reached = "-" if host.name == THIS else ("no" if host.answer.code == 255 else "yes")
        return [host.name, reached, *["-"] * (len(HEADER) - 2)]
    versions = [report.versions.get(name, "-") for name in ("alibi_lm", "torch", "deepspeed")]
    gpus = f"{len(report.gpus)} x {report.gpus[0]}" if report.gpus else "none"
    disk = "-" if report.free_bytes is None else f"{_size(report.free_bytes)} free"
    if report.needed_bytes is not None:
        disk += f", {_size(report.needed_bytes)} needed"
    shared = "-" if report.run_folder is None else "writable"
    clock = speed = "-"
    if outcome is not None:
        if report.run_folder is not None and num_hosts > 1:
            shared = f"seen by {len(outcome.seen)}"
        if outcome.clock is not None and num_hosts > 1:
            clock = f"{outcome.clock:+.2f} s"
        if outcome.bytes_per_second is not None:
            speed = f"{outcome.backend} {outcome.bytes_per_second / 1e9:.2f} GB/s"
    ssh, python = "-" if host.name == THIS else "yes", report.python.split()[0]
    digests = [_short(report.config), _short(report.data)]
    return [host.name, ssh, python, *versions, gpus, *digests, shared, disk, clock, speed]


def _short(digest: str | None) -> str:
    return "-" if digest is None else digest[:8]


def _size(num_bytes: int) -> str:
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"
