"""The watchdog's threads over real connections: server and clients, all in this process."""

from __future__ import annotations

import json
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from alibi_lm.model.config import ModelConfig
from alibi_lm.model.decoder import Decoder
from alibi_lm.train.fault_tolerance import heartbeat_server
from alibi_lm.train.fault_tolerance.connection import Connection, listen
from alibi_lm.train.fault_tolerance.failure_detector import FailureVerdict, Heartbeat, Limits
from alibi_lm.train.fault_tolerance.heartbeat import COMPUTING, STARTING, ActivityTracker
from alibi_lm.train.fault_tolerance.heartbeat_server import HeartbeatClient, HeartbeatServer
from alibi_lm.train.fault_tolerance.watchdog import is_communication_failure
from alibi_lm.utils.errors import EXIT_LOST, EXIT_NOT_FINITE

TOKEN = "a token"
HOSTS = ["node-1", "node-1", "node-2"]


class Team:
    """Three ranks whose ends are recorded instead of carried out."""

    def __init__(self, silence: float | None = 60.0) -> None:
        self.ends: queue.Queue[tuple[int, FailureVerdict, bool]] = queue.Queue()
        self.activity = [ActivityTracker() for _ in HOSTS]
        for each in self.activity:
            each.at(COMPUTING, 7)
        self.limits = Limits(silence, None)
        listener = listen()
        self.port = listener.getsockname()[1]
        self.server = HeartbeatServer(
            listener, TOKEN, HOSTS, self.limits, self.activity[0], self._ends(0)
        )
        self.clients = [self._client(rank) for rank in (1, 2)]
        for watcher in (self.server, *self.clients):
            watcher.start()
        self.wait(lambda: len(self.server._connections) == 2)

    def _client(self, rank: int) -> HeartbeatClient:
        place = ("127.0.0.1", self.port, TOKEN)
        connection = Connection.connect("127.0.0.1", self.port, 5.0)
        connection.send({"rank": rank, "token": TOKEN})
        pids = [os.getpid()] * len(HOSTS)
        return HeartbeatClient(
            rank, place, connection, HOSTS, pids, self.limits, self.activity[rank], self._ends(rank)
        )

    def _ends(self, rank: int) -> Callable[[FailureVerdict, bool], None]:
        def end(verdict: FailureVerdict, speak: bool) -> None:
            self.ends.put((rank, verdict, speak))

        return end

    def wait(self, condition: Callable[[], bool]) -> None:
        give_up = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < give_up
            time.sleep(0.005)

    def end(self) -> tuple[int, FailureVerdict, bool]:
        return self.ends.get(timeout=30)

    def stop(self) -> None:
        threads = [
            threading.Thread(target=watcher.stop, args=(None, 10.0))
            for watcher in (*self.clients, self.server)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat_server, "INTERVAL", 0.02)


def test_a_clean_end_is_nobodys_death(quick: None) -> None:
    team = Team()
    time.sleep(0.2)
    team.stop()
    assert team.ends.empty()
    assert not any(watcher.is_alive() for watcher in (team.server, *team.clients))


def test_a_dead_rank_is_reported_to_all_and_printed_once(quick: None) -> None:
    team = Team()
    dead = team.clients[1]
    dead._exchange = lambda message: [{}] * dead._stopping.wait(60)  # type: ignore[method-assign]
    assert team.clients[1]._connection is not None
    team.clients[1]._connection._socket.shutdown(socket.SHUT_RDWR)  # what the kernel does at an end
    ends = sorted([team.end(), team.end()], key=lambda end: end[0])
    assert [end[0] for end in ends] == [0, 1]
    assert [end[2] for end in ends] == [True, False]
    assert ends[0][1] == ends[1][1]
    assert ends[0][1].code == EXIT_LOST
    assert ends[0][1].line is not None
    assert ends[0][1].line.startswith("rank 2 on node-2: died without an error")
    team.clients[1].stop(None, 10.0)


def test_a_broken_connection_is_reopened(quick: None) -> None:
    team = Team()
    before = team.server._connections[1]
    assert team.clients[0]._connection is not None
    team.clients[0]._connection._socket.shutdown(socket.SHUT_RDWR)
    team.wait(lambda: team.server._connections.get(1, before) is not before)
    time.sleep(0.2)
    team.stop()
    assert team.ends.empty()


def test_rank_0_silent_is_said_by_the_first_rank_of_each_host(quick: None) -> None:
    team = Team(silence=0.5)
    team.server._send_to_all = lambda message: None  # type: ignore[method-assign]
    ends = sorted([team.end(), team.end()], key=lambda end: end[0])
    assert [(rank, speak) for rank, _, speak in ends] == [(1, True), (2, True)]
    for _, verdict, _ in ends:
        assert verdict.code == EXIT_LOST
        assert verdict.line is not None
        assert verdict.line.startswith("rank 0 on node-1: sent no heartbeat")
        assert "at step 7" in verdict.line
    team.server.stop(None, 10.0)


def test_last_words_reach_rank_0_before_the_connection_goes(quick: None) -> None:
    team = Team()
    team.clients[1].stop(Heartbeat(exit_code=EXIT_NOT_FINITE), 10.0)
    ends = sorted([team.end(), team.end()], key=lambda end: end[0])
    assert [end[0] for end in ends] == [0, 1]
    assert {end[1] for end in ends} == {FailureVerdict(EXIT_NOT_FINITE, None)}


def test_rank_0_leaving_takes_the_others_along(quick: None) -> None:
    team = Team()
    team.server.stop(Heartbeat(exit_code=1, error="ValueError: no"), 10.0)
    ends = [team.end(), team.end()]
    assert {end[0] for end in ends} == {1, 2}
    for _, verdict, speak in ends:
        assert not speak
        assert verdict.code == EXIT_LOST


def test_a_defect_of_the_watchdog_ends_no_job(
    quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    for broken in ("client", "server"):
        team = Team()
        if broken == "client":
            team.clients[1]._as_message = lambda: 1 / 0  # type: ignore
            team.clients[1].join(10.0)
        else:
            team.server._detector.tick = lambda *_: 1 / 0  # type: ignore
            team.server.join(10.0)
        time.sleep(0.3)
        assert team.ends.empty()
        team.stop()
        assert "the watchdog has stopped: ZeroDivisionError" in capsys.readouterr().err


def test_strangers_are_not_heard(quick: None) -> None:
    team = Team()
    for first in (b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'{"rank": 1, "token": "guess"}\n'):
        with socket.create_connection(("127.0.0.1", team.port)) as stranger:
            stranger.sendall(first)
            stranger.settimeout(10)
            assert stranger.recv(100) == b""
    assert set(team.server._connections) == {1, 2}
    team.stop()
    assert team.ends.empty()


def test_a_message_before_the_end_of_a_connection_is_not_lost() -> None:
    with listen() as listener:
        connection = Connection.connect("127.0.0.1", listener.getsockname()[1], 5.0)
        one, _ = listener.accept()
    one.sendall(b'{"a": 1}\n{"b"')
    one.sendall(b": 2}\n")
    one.close()
    select.select([connection], [], [], 10.0)
    assert connection.receive() == [{"a": 1}, {"b": 2}]
    with pytest.raises(ConnectionError):
        connection.receive()
    connection.close()


def test_progress_moves_with_phases_layers_files_and_debuggers(tmp_path: Path) -> None:
    activity = ActivityTracker()
    activity.count()
    assert activity.doing == STARTING
    assert activity.count() == activity.count()
    for change in (
        lambda: activity.at(COMPUTING, 1),
        lambda: (tmp_path / "file").write_bytes(bytes(3 << 20)),
    ):
        before = activity.count()
        change()
        assert activity.count() > before
    model = Decoder(ModelConfig(num_layers=1, hidden_size=8, num_heads=2, vocab_size=16))
    activity.follow(model)
    before = activity.count()
    model(torch.zeros(1, 2, dtype=torch.int64))
    assert activity.count() > before
    assert not activity.warmed_up
    activity.at(COMPUTING, 2)
    assert activity.warmed_up


def test_a_rank_in_a_debugger_is_not_stuck() -> None:
    activity = ActivityTracker()
    source = "def look(activity): return [activity.count() for _ in range(3)]"
    names: dict[str, object] = {"__name__": "pdb"}
    exec(source, names)
    counts = names["look"](activity)  # type: ignore[operator]
    assert len(set(counts)) == 3


def test_messages_are_json_lines() -> None:
    heartbeat = heartbeat_server.dataclasses.asdict(Heartbeat(3, COMPUTING, 4, failed="x"))
    assert Heartbeat(**json.loads(json.dumps(heartbeat))) == Heartbeat(3, COMPUTING, 4, failed="x")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[/x/gloo/transport/tcp/pair.cc:537] Connection closed by peer"), True),
        (dist.DistBackendError("NCCL communicator was aborted"), True),
        (dist.DistNetworkError("no route"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("gloo/transport"), False),
        (KeyError("x"), False),
    ],
)
def test_only_failures_of_communication_are_laid_on_other_ranks(
    error: Exception, expected: bool
) -> None:
    assert is_communication_failure(error) is expected
