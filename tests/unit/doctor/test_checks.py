"""The doctor's judgment of what hosts say, and how it asks them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launching import write_config

from alibi_lm.doctor import hosts as hosts_module
from alibi_lm.doctor.checks import Host, collective_problems, host_problems, table
from alibi_lm.doctor.collective import seen
from alibi_lm.doctor.examine import examine
from alibi_lm.doctor.hosts import THIS, Answer, exported, read_hostfile, run_everywhere
from alibi_lm.doctor.probe import MARKER, probe
from alibi_lm.doctor.report import CollectiveReport, HostReport, ProbeRequest, dump, last_json
from alibi_lm.utils.errors import ConfigError

GOOD = Answer(0, "", "")
REPORT = HostReport(
    hostname="node-1",
    address="10.0.0.1",
    python="3.11.7 /opt/venv/bin/python",
    versions={"alibi_lm": "0.1.0 (aaaaaaaa)", "torch": "2.13.0", "deepspeed": "0.19.8"},
    config="c" * 64,
    data="d" * 64,
    run_folder="/shared/runs",
    needed_bytes=1 << 30,
    free_bytes=1 << 40,
)
COLLECTIVE = CollectiveReport(["node-1", "node-2"], 0.0, 3.0, 2, 1e9, "gloo")


def pair(**changes: Any) -> list[Host]:
    """Two good hosts, the second changed: fields of its report, or of its all-reduce."""
    of_report = {key: value for key, value in changes.items() if hasattr(REPORT, key)}
    of_collective = {key: value for key, value in changes.items() if key not in of_report}
    second = replace(REPORT, **({"hostname": "node-2"} | of_report))
    return [
        Host("node-1", GOOD, REPORT, COLLECTIVE),
        Host("node-2", GOOD, second, replace(COLLECTIVE, **of_collective)),
    ]


def lines(hosts: list[Host]) -> list[str]:
    return [str(problem) for problem in (*host_problems(hosts), *collective_problems(hosts))]


def test_good_hosts_have_no_problems() -> None:
    assert lines(pair()) == []
    assert lines([Host(THIS, GOOD, REPORT, CollectiveReport(["node-1"], 0.0, 3.0, 2))]) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"versions": REPORT.versions | {"torch": "2.12.1"}},
            "torch = 2.12.1: is 2.13.0 on node-1",
        ),
        ({"versions": REPORT.versions | {"alibi_lm": "0.1.0 (bbbbbbbb)"}}, "alibi_lm = 0.1.0 (b"),
        (
            {"python": "3.12.1 /opt/venv/bin/python"},
            "python = 3.12.1 /opt/venv/bin/python: is 3.11",
        ),
        ({"config": "e" * 64}, "config = eeeeeeee: differs from the resolved config on node-1"),
        ({"data": "e" * 64}, "data = eeeeeeee: differs from the data on node-1"),
        ({"free_bytes": 1 << 20}, "disk = 1 MiB: is free in /shared/runs; the run's checkpoints"),
        ({"clock": -42.0}, "clock = -42.0 s: differs by more than 5 s from node-1"),
        (
            {"seen": ["node-2"]},
            "run.dir: does not show the files that node-1 wrote there; put",
        ),
        ({"total": 2.0}, "all-reduce = 2.0: should give 3 from 2 processes"),
        (
            {"failure": "Connection refused", "total": None},
            "all-reduce: failed (Connection refused",
        ),
    ],
)
def test_each_difference_is_one_line_with_host_value_rule_and_fix(
    change: dict[str, Any], expected: str
) -> None:
    (line,) = lines(pair(**change))
    assert line.startswith(f"node-2: {expected}")
    assert "; " in line
    rows = table(pair(**change), {"node-2": {expected.split(" ")[0].rstrip(":")}})
    assert rows[2].count("!") == 1
    assert "!" not in rows[1]


def test_mistakes_of_the_config_are_said_once_and_a_hosts_own_by_its_name() -> None:
    everyones = "train.num_steps = 0: is not positive; give at least 1"
    own = "/data/corpus.bin: cannot be read (No such file); put it there"
    hosts = pair(problems=[everyones, own])
    hosts[0] = replace(hosts[0], report=replace(REPORT, problems=[everyones]))
    assert lines(hosts) == [everyones, f"node-2: {own}"]


def test_hosts_that_do_not_answer_are_named_with_what_they_said() -> None:
    unreachable = Answer(255, "", "banner\nssh: connect to host node-2: No route to host\n")
    no_package = Answer(1, "", "python: No module named alibi_lm\n")
    away = Answer(1, "", "Killed\n")
    hosts = [
        pair()[0],
        Host("node-2", unreachable, None),
        Host("node-3", no_package, None),
    ]
    first, second = [str(problem) for problem in host_problems(hosts)]
    assert first.startswith("node-2: ssh: cannot connect (ssh: connect to host node-2: No route")
    assert "`ssh node-2 hostname`" in first
    assert second.startswith("node-3: python: cannot run the package there (python: No module")
    rows = table(hosts, {"node-2": {"ssh"}, "node-3": {"python"}})
    assert rows[2].split()[:2] == ["node-2", "no!"]
    assert rows[3].split()[:3] == ["node-3", "yes", "-!"]
    (line,) = (
        str(p) for p in collective_problems([replace(pair()[0], answer=away, collective=None)])
    )
    assert line.startswith("node-1: all-reduce: did not finish (Killed)")


def test_the_table_is_one_line_a_host_and_columns_stand_under_their_heads() -> None:
    rows = table(pair(), {})
    assert len(rows) == 3
    for word in ("torch", "config", "all-reduce"):
        assert rows[1][rows[0].index(word)] != " "
    assert "gloo 1.00 GB/s" in rows[1]
    assert "1 TiB free" in rows[1].replace("1.0 TiB", "1 TiB")


def test_gpus_are_listed_and_counted() -> None:
    hosts = [replace(pair()[0], report=replace(REPORT, gpus=["H200"] * 4), slots=4)]
    assert lines(hosts[:1]) == []
    row = table(hosts, {})[1]
    assert "4 x H200" in row
    assert " none " in table(pair(), {})[1]
    (line,) = (str(p) for p in host_problems([replace(hosts[0], slots=8)]))
    assert line.startswith("node-1: gpus = 4 GPUs: are too few for 8 ranks there; lower the host")


def test_one_machine_runs_an_all_reduce_between_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    config = write_config(tmp_path)
    environment = dict(os.environ) | {"PYTHONPATH": str(Path(__file__).parents[3])}
    assert examine(config, [], None, 1, (None, 29500), environment) == []
    header, row = capsys.readouterr().out.splitlines()
    assert row[header.index("all-reduce") :].startswith("gloo ")
    assert row[header.index("gpus") :].startswith("none")
    assert row[header.index("run.dir") :].startswith("writable")
    assert not list(tmp_path.glob(".alibi_lm_doctor*"))


def test_hostfiles_are_read_as_the_launcher_does(tmp_path: Path) -> None:
    path = tmp_path / "hostfile"
    with pytest.raises(ConfigError, match="is no file"):
        read_hostfile(path)
    path.write_text("# two\nnode-1 slots=8\n\nnode-2 slots=4\n")
    assert read_hostfile(path) == {"node-1": 8, "node-2": 4}
    path.write_text("node-1 8\n")
    with pytest.raises(ConfigError, match="bad entry"):
        read_hostfile(path)
    path.write_text("node-1 slots=8\nnode-2 slots=0\n")
    with pytest.raises(ConfigError, match="gives node-2 no slots; delete the line"):
        read_hostfile(path)


def test_a_byte_order_mark_is_no_part_of_a_hosts_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "hostfile"
    path.write_bytes(b"\xef\xbb\xbfnode-1 slots=8\r\nnode-2 slots=4\r\n")
    assert read_hostfile(path) == {"node-1": 8, "node-2": 4}
    assert "byte-order mark" in capsys.readouterr().err


def test_variables_are_those_that_the_launcher_carries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts_module, "DEEPSPEED_ENVIRONMENT_PATHS", [str(tmp_path)])
    environment = {"PYTHONPATH": "/a", "PYTHONHASHSEED": "1", "HOME": "/root", "SECRET": "x"}
    found = exported(environment, Path("/work"))
    assert found == {"PYTHONPATH": "/work:/a", "PYTHONHASHSEED": "1"}
    (tmp_path / ".deepspeed_env").write_text("GLOO_SOCKET_IFNAME=eth0\nA=b=c\n")
    assert exported({}, Path("/work"))["A"] == "b=c"
    (tmp_path / ".deepspeed_env").write_text("A=b\n\n# a comment\n")
    with pytest.raises(ConfigError, match=r"no comments and no empty lines"):
        exported({}, Path("/work"))


def test_commands_run_in_the_folder_with_the_variables(tmp_path: Path) -> None:
    folder = tmp_path / "a folder's name"
    folder.mkdir()
    command = ["sh", "-c", 'echo "$PWD|$NAME|$1"; echo oops >&2; exit 3', "sh", "it's"]
    answer = run_everywhere({THIS: command}, folder, {"NAME": "a b"}, 30.0)[THIS]
    assert answer.output == f"{folder}|a b|it's\n"
    assert (answer.code, answer.exit_reason()) == (3, "oops")
    slow = run_everywhere({THIS: ["sleep", "30"]}, folder, {"A": "b"}, 0.2)[THIS]
    assert slow.code == 124


def test_answers_are_found_behind_a_greeting() -> None:
    text = "Welcome!\n{not json\n" + dump(COLLECTIVE) + "\nbye\n"
    content = last_json(text)
    assert content is not None
    assert CollectiveReport(**content) == COLLECTIVE
    assert last_json("Welcome!\n") is None


def test_a_probe_without_a_config_looks_at_the_machine_only(tmp_path: Path) -> None:
    report = probe(ProbeRequest("token", 1))
    assert report.versions["torch"].startswith("2.")
    assert report.config is report.data is report.run_folder is None


def test_a_probe_finds_the_runs_facts_and_leaves_a_marker(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    report = probe(ProbeRequest("token", 2, str(config), ["train.keep_last=3"]))
    assert report.problems == []
    assert report.run_folder == str(tmp_path)
    assert report.config is not None
    assert report.data is not None
    assert report.needed_bytes is not None
    assert report.needed_bytes > 0
    assert seen(tmp_path, "token") == [report.hostname]
    assert seen(tmp_path, "other") == []
    marker = tmp_path / f"{MARKER}token_{report.hostname}"
    assert marker.is_file()
    wrong = probe(ProbeRequest("token", 2, str(config), ["train.num_steps=0"]))
    assert wrong.problems == ["train.num_steps = 0: is not positive; give at least 1"]
    again = probe(ProbeRequest("token", 2, str(config), ["train.keep_last=3"]))
    assert (again.config, again.data) == (report.config, report.data)
