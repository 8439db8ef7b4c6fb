"""The lines of long work."""

from __future__ import annotations

import pytest

from alibi_lm.utils.progress import Progress


def test_a_line_each_half_minute(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    with Progress("needle", 1000, unit="tok", clock=lambda: now[0]) as progress:
        for seconds in (0, 29, 30, 31, 59, 60, 89, 95, 124, 125):
            now[0] = seconds
            progress.advance(100)
    lines = capsys.readouterr().out.splitlines()
    assert [line[: line.index("[") - 1] for line in lines] == [
        "needle:  30% 300/1.00k",
        "needle:  60% 600/1.00k",
        "needle:  80% 800/1.00k",
        "needle: 100% 1.00k/1.00k",
    ]
    assert "[00:30<01:10, 10.0tok/s]" in lines[0]


def test_what_an_earlier_process_did_does_not_count_in_the_speed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = [0.0]
    with Progress("needle", 1000, unit="tok", clock=lambda: now[0]) as progress:
        progress.skip(500)
        now[0] = 50.0
        progress.advance(250)
    assert capsys.readouterr().out == "needle:  75% 750/1.00k [00:50<00:50, 5.00tok/s]\n"
