"""Starting the ranks of a script and waiting for what they found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Forked
from launching import environment, finished

needs_fp16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    reason="DeepSpeed trains in fp16 on CPUs with fp16 arithmetic only",
)


def run_ranks(script: Path, folder: Path, num_ranks: int, *arguments: int) -> dict[str, Any]:
    """Start `script RANK SIZE *arguments STORE OUT` once a rank; the JSON that OUT holds then."""
    out = folder / "out.json"
    commands = [
        (
            [str(script), *map(str, (rank, num_ranks, *arguments, folder / "store", out))],
            environment() | {"LOCAL_RANK": str(rank)},
        )
        for rank in range(num_ranks)
    ]
    finished(Forked(commands))
    found: dict[str, Any] = json.loads(out.read_text())
    return found
