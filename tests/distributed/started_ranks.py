"""Starting the ranks of a script and waiting for what they found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_ranks(script: Path, folder: Path, num_ranks: int, *arguments: int) -> dict[str, Any]:
    """Start `script RANK SIZE *arguments STORE OUT` once a rank; the JSON that OUT holds then."""
    out = folder / "out.json"
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                str(script),
                *map(str, (rank, num_ranks, *arguments, folder / "store", out)),
            ],
            env=environment | {"LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        errors = [rank.communicate(timeout=600)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(e[-2000:] for e in errors)
    found: dict[str, Any] = json.loads(out.read_text())
    return found
