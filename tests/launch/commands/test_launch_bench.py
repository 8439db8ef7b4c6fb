"""`alibi-lm bench start` starts both with the real deepspeed CLI; its times are not judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launching import environment, error_lines, write_config


@pytest.mark.slow
def test_both_get_to_their_first_step_and_mistakes_are_named(tmp_path: Path) -> None:
    config, path = write_config(tmp_path), tmp_path / "start.json"
    command = [sys.executable, "-m", "alibi_lm", "bench", "start", str(config), "--repeats", "1"]
    done = subprocess.run(
        [*command, "--json", str(path)],
        env=environment(), capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    ours, bare = result["seconds"]["ours"], result["seconds"]["bare"]
    assert len(ours) == len(bare) == 1
    assert result["ratio"]["median"] == pytest.approx(ours[0] / bare[0])
    assert result["model"]["vocab_size"] == 320
    assert f"| ours | {ours[0]:.2f} s |" in done.stdout
    assert not (tmp_path / "run").exists()

    wrong = [*command, f"data.corpora=[{{prefix: {tmp_path}/none}}]"]
    done = subprocess.run(
        wrong, env=environment(), capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 2
    assert len(error_lines(done)) == 1
