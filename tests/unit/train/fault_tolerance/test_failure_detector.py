"""Which rank is lost or stuck, judged from signs of life alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from alibi_lm.train.fault_tolerance.failure_detector import (
    GRACE,
    FailureDetector,
    Heartbeat,
    Limits,
    Verdict,
)
from alibi_lm.train.fault_tolerance.heartbeat import COMPUTING, READING, SAVING, STARTING
from alibi_lm.utils.errors import EXIT_LOST, EXIT_STOPPED

HOSTS = ["node-1", "node-1", "node-2", "node-2"]
SAVED = Path("run/checkpoints/step_00000010")


def beats(judge: FailureDetector, *, but: tuple[int, ...] = (), count: int, step: int = 12) -> None:
    for rank in range(len(HOSTS)):
        if rank not in but:
            judge.heard(rank, Heartbeat(step, COMPUTING, count, warm=True))


def run(
    judge: FailureDetector, seconds: int, but: tuple[int, ...] = (), moves: bool = True
) -> Verdict | None:
    for second in range(seconds):
        beats(judge, but=but, count=second if moves else 0)
        if (verdict := judge.tick(1.0, SAVED)) is not None:
            return verdict
    return None


@pytest.fixture
def judge() -> FailureDetector:
    made = FailureDetector(HOSTS, Limits(silence=30.0, stuck=300.0))
    assert run(made, 50) is None
    return made


def test_a_silent_host_is_named_with_its_ranks_and_the_step(judge: FailureDetector) -> None:
    assert run(judge, 28, but=(2, 3)) is None
    verdict = run(judge, 5, but=(2, 3))
    assert verdict is not None
    assert verdict.code == EXIT_LOST
    assert verdict.line is not None
    assert verdict.line.startswith("ranks 2 and 3 on node-2 (all of that host): sent no heartbeat")
    assert "for 30 s" in verdict.line
    assert "while the job was at step 12; last seen at step 12, computing" in verdict.line
    assert verdict.line.endswith(f"resumes from the last checkpoint, {SAVED}")


def test_a_short_silence_is_none(judge: FailureDetector) -> None:
    for _ in range(5):
        assert run(judge, 25, but=(1,)) is None
        assert run(judge, 1) is None


def test_silence_counts_by_the_judges_own_ticks_not_by_a_clock(judge: FailureDetector) -> None:
    # A judge that was itself stopped for an hour sees one tick, not an hour.
    assert judge.tick(2.0, SAVED) is None


def test_silence_can_be_allowed_for_ever() -> None:
    judge = FailureDetector(HOSTS, Limits(silence=None, stuck=None))
    assert run(judge, 10_000, but=(1,), moves=False) is None


def test_a_process_that_ended_is_named_after_the_grace_and_not_if_it_comes_back(
    judge: FailureDetector,
) -> None:
    judge.closed(1)
    assert run(judge, 2, but=(1,)) is None
    assert run(judge, 20) is None
    judge.closed(1)
    verdict = run(judge, int(GRACE) + 1, but=(1,))
    assert verdict is not None
    assert verdict.line is not None
    assert verdict.line.startswith("rank 1 on node-1: died without an error")
    assert "at step 12" in verdict.line


def test_a_rank_that_has_done_its_work_may_go(judge: FailureDetector) -> None:
    judge.stopped(3)
    judge.closed(3)
    assert run(judge, 1000, but=(3,)) is None
    assert not judge.all_stopped(but=0)
    for rank in (1, 2):
        judge.stopped(rank)
    assert judge.all_stopped(but=0)


def test_the_rank_furthest_back_is_the_one_that_is_stuck(judge: FailureDetector) -> None:
    def still(seconds: int) -> Verdict | None:
        for _ in range(seconds):
            beats(judge, but=(2,), count=0, step=13)
            judge.heard(2, Heartbeat(13, READING, 7, warm=True))
            if (verdict := judge.tick(1.0, SAVED)) is not None:
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


def test_no_rank_is_stuck_while_any_moves(judge: FailureDetector) -> None:
    for second in range(2000):  # rank 0 writes a large file, the others wait for it
        for rank in range(4):
            judge.heard(rank, Heartbeat(20, SAVING, second if rank == 0 else 0, warm=True))
        assert judge.tick(1.0, SAVED) is None


def test_the_start_may_take_longer() -> None:
    judge = FailureDetector(HOSTS, Limits(silence=30.0, stuck=300.0))
    for second in range(1, 1000):
        for rank in range(4):
            judge.heard(rank, Heartbeat(0, STARTING, 0))
        verdict = judge.tick(1.0, None)
        assert (verdict is None) == (second < 900)
        if verdict is not None:
            assert verdict.line is not None
            assert "ranks 0 and 1 on node-1 (all of that host), ranks 2 and 3" in verdict.line
            assert verdict.line.endswith("starts over, as there is no checkpoint yet")
            return
    raise AssertionError("never stuck")


def test_after_a_failed_collective_less_is_enough(judge: FailureDetector) -> None:
    judge.heard(0, Heartbeat(12, COMPUTING, 1, warm=True, failed="Connection closed by peer"))
    for second in range(1, 20):
        judge.heard(0, Heartbeat(12, COMPUTING, 1, warm=True, failed="Connection closed by peer"))
        for rank in (1, 2):
            judge.heard(rank, Heartbeat(12, COMPUTING, second, warm=True))
        verdict = judge.tick(1.0, SAVED)
        if verdict is not None:
            assert second == 9  # the fixture's last second counts
            assert verdict.line is not None
            assert verdict.line.startswith("rank 3 on node-2: sent no heartbeat for 10 s")
            return
    raise AssertionError("never judged")


def test_one_that_leaves_with_its_own_line_takes_the_others_along_in_silence(
    judge: FailureDetector,
) -> None:
    judge.heard(2, Heartbeat(12, COMPUTING, 1, left=EXIT_STOPPED))
    assert run(judge, int(GRACE) - 1, but=(2,)) is None
    assert run(judge, 2, but=(2,)) == Verdict(EXIT_STOPPED, None)


def test_one_that_leaves_by_a_defect_is_named_with_its_error(judge: FailureDetector) -> None:
    judge.heard(2, Heartbeat(12, COMPUTING, 1, left=1, why="ValueError: wrong shape"))
    verdict = run(judge, int(GRACE) + 1, but=(2,))
    assert verdict is not None
    assert verdict.code == EXIT_LOST
    assert verdict.line is not None
    assert "rank 2 on node-2: failed with a defect at step 12, computing" in verdict.line
    assert "ValueError: wrong shape" in verdict.line


def test_many_lost_ranks_are_counted_not_listed() -> None:
    judge = FailureDetector([f"node-{rank // 8}" for rank in range(32)], Limits(30.0, None))
    judge.heard(0, Heartbeat(3, COMPUTING, 1))
    for _ in range(30):
        judge.heard(0, Heartbeat(3, COMPUTING, 1))
        verdict = judge.tick(1.0, None)
    assert verdict is not None
    assert verdict.line is not None
    assert "ranks 1, 2, 3, 4, 5, 6 and 7 on node-0, ranks 8, 9, 10" in verdict.line
    judge = FailureDetector([f"node-{rank // 8}" for rank in range(128)], Limits(30.0, None))
    for _ in range(30):
        judge.heard(0, Heartbeat(3, COMPUTING, 1))
        verdict = judge.tick(1.0, None)
    assert verdict is not None
    assert verdict.line is not None
    assert "node-3 (all of that host) and 12 more hosts: sent" in verdict.line
