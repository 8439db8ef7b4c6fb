"""Forked ranks are processes as the launcher's are: arguments, environment, output, exit code."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import finished, start_forked

SCRIPT = """
import os, sys, time
assert __name__ == "__main__"
print(sys.argv[1:], os.environ["RANK"], os.environ["WORLD_SIZE"], flush=True)
print("error of", os.environ["RANK"], file=sys.stderr)
if len(sys.argv) > 2 and os.environ["RANK"] == "1":
    os._exit(3)
if len(sys.argv) > 2:
    time.sleep(1000)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


def test_each_rank_has_its_arguments_and_environment(script: Path) -> None:
    done = finished(start_forked(script))
    assert sorted(done.stdout.splitlines()) == [
        "['--local_rank=0'] 0 2",
        "['--local_rank=1'] 1 2",
    ]
    assert sorted(done.stderr.splitlines()) == ["error of 0", "error of 1"]
    merged, errors = start_forked(script, merged=True).communicate(timeout=60)
    assert len(merged.splitlines()) == len(errors.splitlines()) == 4


def test_the_first_failure_is_the_jobs_and_ends_the_other_ranks(script: Path) -> None:
    job = start_forked(script, "fail")
    assert finished(job, code=3).returncode == 3
    assert [rank.exitcode for rank in job.ranks] == [-15, 3]
