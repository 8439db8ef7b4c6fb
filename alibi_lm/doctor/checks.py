"""Comparing what the hosts said. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from alibi_lm.doctor.hosts import THIS, Answer
from alibi_lm.doctor.report import Meeting, Report
from alibi_lm.utils.errors import Problem

CLOCK_SECONDS = 5.0
"""How far apart clocks may be: logs of several hosts can still be read together."""


@dataclass(frozen=True)
class Examined:
    """What is known of one host."""

    host: str
    answer: Answer
    report: Report | None
    meeting: Meeting | None = None


def host_problems(hosts: Sequence[Examined]) -> Iterator[Problem]:
    """What is wrong before the hosts meet; the first host that answers is the measure."""
    reference = next((each for each in hosts if each.report is not None), None)
    everywhere = _said_by_all([each.report for each in hosts if each.report is not None])
    yield from (_problem_of("", text) for text in everywhere)
    for each in hosts:
        report = each.report
        if report is None:
            yield _no_report(each)
            continue
        for text in report.problems:
            if text not in everywhere:
                yield _problem_of(f"{each.host}: ", text)
        assert reference is not None
        assert reference.report is not None
        yield from _differences(each.host, report, reference.host, reference.report)
        needed, free = report.needed_bytes, report.free_bytes
        if needed is not None and free is not None and free < needed:
            rule = f"is free in {report.run_folder}; the run's checkpoints take {_size(needed)}"
            fix = "make room, or lower train.keep_last"
            yield Problem(f"{each.host}: disk", _size(free), rule, fix)


def _said_by_all(reports: Sequence[Report]) -> list[str]:
    """Mistakes of the config, which every host finds; said once."""
    if len(reports) < 2:
        return []
    return [t for t in reports[0].problems if all(t in other.problems for other in reports)]


def _problem_of(host: str, text: str) -> Problem:
    key, _, rest = text.partition(": ")
    rule, _, fix = rest.rpartition("; ")
    return Problem(f"{host}{key}", None, rule, fix)


def _no_report(each: Examined) -> Problem:
    words = each.answer.exit_reason()
    if each.host != THIS and each.answer.code == 255:
        fix = f"let `ssh {each.host} hostname` work without a password"
        return Problem(f"{each.host}: ssh", None, f"does not get there ({words})", fix)
    fix = "install the package on every host at the same path, with the same versions"
    return Problem(f"{each.host}: python", None, f"cannot run the package there ({words})", fix)


def _differences(host: str, ours: Report, other: str, theirs: Report) -> Iterator[Problem]:
    same = "install from the same constraints.txt and commit on every host"
    if ours.python != theirs.python:
        rule = f"is {theirs.python} on {other}"
        yield Problem(f"{host}: python", ours.python, rule, same)
    for name, version in ours.versions.items():
        if version != theirs.versions.get(name):
            rule = f"is {theirs.versions.get(name)} on {other}"
            yield Problem(f"{host}: {name}", version, rule, same)
    if ours.config != theirs.config and None not in (ours.config, theirs.config):
        rule = f"resolves to another config than on {other}"
        yield Problem(f"{host}: config", _short(ours.config), rule, "share the file, or copy it")
    if ours.data != theirs.data and None not in (ours.data, theirs.data):
        rule = f"are not those of {other}"
        fix = "put the same token files and tokenizer at the same paths"
        yield Problem(f"{host}: data", _short(ours.data), rule, fix)


def meeting_problems(hosts: Sequence[Examined]) -> Iterator[Problem]:
    """What is wrong with shared storage, clocks and the collective."""
    everyone = {each.report.hostname: each.host for each in hosts if each.report is not None}
    num_hosts = len(hosts)
    for each in hosts:
        meeting = each.meeting
        if meeting is None:
            rule = f"did not come to the meeting ({each.answer.exit_reason()})"
            yield Problem(f"{each.host}: all-reduce", None, rule, "look at that host")
            continue
        unseen = [name for host, name in everyone.items() if host not in meeting.seen]
        wrote = each.report is not None and each.report.run_folder is not None
        if wrote and unseen:
            rule = f"does not show what {', '.join(unseen)} wrote there"
            fix = "put run.dir on storage that all hosts share"
            yield Problem(f"{each.host}: run.dir", None, rule, fix)
        if meeting.failure is not None or meeting.total is None:
            rule = f"failed ({meeting.failure})"
            fix = "check --master-addr, GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME, and firewalls"
            yield Problem(f"{each.host}: all-reduce", None, rule, fix)
            continue
        if meeting.total != num_hosts * (num_hosts + 1) / 2:
            rule = f"should give {num_hosts * (num_hosts + 1) // 2} from {num_hosts} hosts"
            yield Problem(f"{each.host}: all-reduce", meeting.total, rule, "look at the network")
        if meeting.clock is not None and abs(meeting.clock) > CLOCK_SECONDS:
            rule = f"is more than {CLOCK_SECONDS:.0f} s from the clock of {hosts[0].host}"
            yield Problem(f"{each.host}: clock", f"{meeting.clock:+.1f} s", rule, "run chrony")


def table(hosts: Sequence[Examined], failed: Mapping[str, set[str]]) -> list[str]:
    """One line a host; a cell with something wrong is marked by an exclamation mark."""
    header = [
        "host", "ssh", "python", "alibi_lm", "torch", "deepspeed", "config", "data",
        "run.dir", "disk", "clock", "all-reduce",
    ]  # fmt: skip
    rows = [header]
    for each in hosts:
        marks = failed.get(each.host, set())
        cells = dict(zip(header, _cells(each), strict=True))
        known = [c + "!" if name in marks else c for name, c in cells.items()]
        rows.append(known)
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    return [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _cells(each: Examined) -> list[str]:
    report, meeting = each.report, each.meeting
    if report is None:
        reached = "-" if each.host == THIS else ("no" if each.answer.code == 255 else "yes")
        return [each.host, reached, *["-"] * 10]
    versions = [report.versions.get(name, "-") for name in ("alibi_lm", "torch", "deepspeed")]
    disk = "-" if report.free_bytes is None else f"{_size(report.free_bytes)} free"
    if report.needed_bytes is not None:
        disk += f", {_size(report.needed_bytes)} needed"
    clock = speed = "-"
    if meeting is not None and meeting.clock is not None:
        clock = f"{meeting.clock:+.2f} s"
    if meeting is not None and meeting.bytes_per_second is not None:
        speed = f"{meeting.backend} {meeting.bytes_per_second / 1e9:.2f} GB/s"
    shared = "-"
    if report.run_folder is not None:
        shared = "writable" if meeting is None else f"seen by {len(meeting.seen)}"
    return [
        each.host, "-" if each.host == THIS else "yes", report.python.split()[0], *versions,
        _short(report.config), _short(report.data), shared, disk, clock, speed,
    ]  # fmt: skip


def _short(digest: str | None) -> str:
    return "-" if digest is None else digest[:8]


def _size(num_bytes: int) -> str:
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"
