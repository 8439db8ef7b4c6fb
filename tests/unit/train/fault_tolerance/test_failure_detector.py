"""Which rank is lost or stuck, decided from heartbeats alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from alibi_lm.train.fault_tolerance.failure_detector import (
    GRACE,
    FailureDetector,
    FailureVerdict,
    Heartbeat,
    Limits,
)
from alibi_lm.train.fault_tolerance.heartbeat import COMPUTING, READING, SAVING, STARTING
from alibi_lm.utils.errors import EXIT_LOST, EXIT_STOPPED

HOSTS = ["node-1", "node-1", "node-2", "node-2"]
SAVED = Path("run/checkpoints/step_00000010")


def send_heartbeats(
    detector: FailureDetector, *, but: tuple[int, ...] = (), count: int, step: int = 12
) -> None:
    for rank in range(len(HOSTS)):
        if rank not in but:
            detector.heard(rank, Heartbeat(step, COMPUTING, count, warmed_up=True))


def run(
    detector: FailureDetector, seconds: int, but: tuple[int, ...] = (), moves: bool = True
) -> FailureVerdict | None:
    for second in range(seconds):
        send_heartbeats(detector, but=but, count=second if moves else 0)
        if (verdict := detector.tick(1.0, SAVED)) is not None:
            return verdict
    return None


@pytest.fixture
def detector() -> FailureDetector:
    detector = FailureDetector(HOSTS, Limits(heartbeat_timeout=30.0, hang_timeout=300.0))
    assert run(detector, 50) is None
    return detector


def test_a_silent_host_is_named_with_its_ranks_and_the_step(detector: FailureDetector) -> None:
    assert run(detector, 28, but=(2, 3)) is None
    verdict = run(detector, 5, but=(2, 3))
    assert verdict is not None
    assert verdict.code == EXIT_LOST
    assert verdict.line is not None
    assert verdict.line.startswith("ranks 2 and 3 on node-2 (all of that host): sent no heartbeat")
    assert "for 30 s" in verdict.line
    assert "while the job was at step 12; last seen at step 12, computing" in verdict.line
    assert verdict.line.endswith(f"resumes from the last checkpoint, {SAVED}")


def test_a_short_silence_is_none(detector: FailureDetector) -> None:
    for _ in range(5):
        assert run(detector, 25, but=(1,)) is None
        assert run(detector, 1) is None


def test_silence_counts_by_ticks_not_by_a_clock(detector: FailureDetector) -> None:
    # A detector that was itself stopped for an hour sees one tick, not an hour.
    assert detector.tick(2.0, SAVED) is None


def test_silence_can_be_allowed_for_ever() -> None:
    detector = FailureDetector(HOSTS, Limits(heartbeat_timeout=None, hang_timeout=None))
    assert run(detector, 10_000, but=(1,), moves=False) is None


def test_a_process_that_ended_is_named_after_the_grace_and_not_if_it_comes_back(
    detector: FailureDetector,
) -> None:
    detector.closed(1)
    assert run(detector, 2, but=(1,)) is None
    assert run(detector, 20) is None
    detector.closed(1)
    verdict = run(detector, int(GRACE) + 1, but=(1,))
    assert verdict is not None
    assert verdict.line is not None
    assert verdict.line.startswith("rank 1 on node-1: died without an error")
    assert "at step 12" in verdict.line


def test_a_rank_that_has_done_its_work_may_go(detector: FailureDetector) -> None:
    detector.stopped(3)
    detector.closed(3)
    assert run(detector, 1000, but=(3,)) is None
    assert not detector.all_stopped(but=0)
    for rank in (1, 2):
        detector.stopped(rank)
    assert detector.all_stopped(but=0)


def test_the_rank_furthest_back_is_the_one_that_is_stuck(detector: FailureDetector) -> None:
    def still(seconds: int) -> FailureVerdict | None:
        for _ in range(seconds):
            send_heartbeats(detector, but=(2,), count=0, step=13)
            detector.heard(2, Heartbeat(13, READING, 7, warmed_up=True))
            if (verdict := detector.tick(1.0, SAVED)) is not None:
                return verdict
        return None

    assert still(299) is None
    verdict = still(3)
    assert verdict is not None
    assert verdict.line is not None
    assert verdict.line.startswith(
        "rank 2 on node-2: makes no progress: stuck for 300 s at step 13"
    )
    assert "reading data; the other ranks wait" in verdict.line


def test_no_rank_is_stuck_while_any_moves(detector: FailureDetector) -> None:
    for second in range(2000):  # rank 0 writes a large file, the others wait for it
        for rank in range(4):
            detector.heard(rank, Heartbeat(20, SAVING, second if rank == 0 else 0, warmed_up=True))
        assert detector.tick(1.0, SAVED) is None


def test_the_start_may_take_longer() -> None:
    detector = FailureDetector(HOSTS, Limits(heartbeat_timeout=30.0, hang_timeout=300.0))
    for second in range(1, 1000):
        for rank in range(4):
            detector.heard(rank, Heartbeat(0, STARTING, 0))
        verdict = detector.tick(1.0, None)
        assert (verdict is None) == (second < 900)
        if verdict is not None:
            assert verdict.line is not None
            assert "ranks 0 and 1 on node-1 (all of that host), ranks 2 and 3" in verdict.line
            assert verdict.line.endswith("starts over, as there is no checkpoint yet")
            return
    raise AssertionError("never stuck")


def test_after_a_failed_collective_less_is_enough(detector: FailureDetector) -> None:
    detector.heard(
        0, Heartbeat(12, COMPUTING, 1, warmed_up=True, failed="Connection closed by peer")
    )
    for second in range(1, 20):
        detector.heard(
            0, Heartbeat(12, COMPUTING, 1, warmed_up=True, failed="Connection closed by peer")
        )
        for rank in (1, 2):
            detector.heard(rank, Heartbeat(12, COMPUTING, second, warmed_up=True))
        verdict = detector.tick(1.0, SAVED)
        if verdict is not None:
            assert second == 9  # the fixture's last second counts
            assert verdict.line is not None
            assert verdict.line.startswith("rank 3 on node-2: sent no heartbeat for 10 s")
            return
    raise AssertionError("never detected")


def test_one_that_leaves_with_its_own_line_takes_the_others_along_in_silence(
    detector: FailureDetector,
) -> None:
    detector.heard(2, Heartbeat(12, COMPUTING, 1, exit_code=EXIT_STOPPED))
    assert run(detector, int(GRACE) - 1, but=(2,)) is None
    assert run(detector, 2, but=(2,)) == FailureVerdict(EXIT_STOPPED, None)


def test_one_that_leaves_by_a_defect_is_named_with_its_error(detector: FailureDetector) -> None:
    detector.heard(2, Heartbeat(12, COMPUTING, 1, exit_code=1, error="ValueError: wrong shape"))
    verdict = run(detector, int(GRACE) + 1, but=(2,))
    assert verdict is not None
    assert verdict.code == EXIT_LOST
    assert verdict.line is not None
    assert "rank 2 on node-2: failed with a defect at step 12, computing" in verdict.line
    assert "ValueError: wrong shape" in verdict.line


def test_many_lost_ranks_are_counted_not_listed() -> None:
    detector = FailureDetector([f"node-{rank // 8}" for rank in range(32)], Limits(30.0, None))
    detector.heard(0, Heartbeat(3, COMPUTING, 1))
    for _ in range(30):
        detector.heard(0, Heartbeat(3, COMPUTING, 1))
        verdict = detector.tick(1.0, None)
    assert verdict is not None
    assert verdict.line is not None
    assert "ranks 1, 2, 3, 4, 5, 6 and 7 on node-0, ranks 8, 9, 10" in verdict.line
    detector = FailureDetector([f"node-{rank // 8}" for rank in range(128)], Limits(30.0, None))
    for _ in range(30):
        detector.heard(0, Heartbeat(3, COMPUTING, 1))
        verdict = detector.tick(1.0, None)
    assert verdict is not None
    assert verdict.line is not None
    assert "node-3 (all of that host) and 12 more hosts: sent" in verdict.line
