"""Both programs start under the real deepspeed CLI; their times are not judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launching import environment, write_config

SCRIPT = Path(__file__).with_name("startup_time.py")


@pytest.mark.slow
def test_both_reach_their_first_step(tmp_path: Path) -> None:
    config, path = write_config(tmp_path), tmp_path / "start.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(config), "--repeats", "1", "--json", str(path)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    ours, baseline = result["seconds"]["ours"], result["seconds"]["baseline"]
    assert len(ours) == len(baseline) == 1
    assert result["ratio"]["median"] == pytest.approx(ours[0] / baseline[0])
    assert result["model"]["vocab_size"] == 320
    assert f"| ours | {ours[0]:.2f} s |" in done.stdout
    assert not (tmp_path / "run").exists()
