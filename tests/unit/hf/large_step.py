"""Checkpoints of random weights as several ranks would have written them, made without training,
and exports of them in a process whose memory is watched."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from alibi_lm.checkpoint.folder import CONFIG, write_meta
from alibi_lm.checkpoint.fragments import KINDS, PARAM, fragment_key
from alibi_lm.checkpoint.safetensors_io import write_stream
from alibi_lm.config import Config
from alibi_lm.config_loading import build, to_yaml
from alibi_lm.hf.exporting.weights import unset_weights
from alibi_lm.parallel.shard import StridedSlice
from alibi_lm.utils.files import sha256, write_text

_AT_ONCE = 1 << 22

ShardLayout = Literal["zero3", "tp"]
"""Ranks hold equal runs of every flattened tensor, or equal slices of every matrix's columns."""


def write_large_step(
    folder: Path,
    model: dict[str, Any],
    length: int,
    layout: ShardLayout,
    *,
    ranks: int = 4,
    moments: bool = False,
) -> int:
    """Make a run with one checkpoint, a block of numbers in memory at a time.

    Returns:
        The bytes of the fp32 weights.
    """
    raw = {
        "run": {"dir": str(folder)},
        "model": model,
        "data": {"corpora": [{"prefix": "code_train"}]},
        "train": {"sequence_length": length},
    }
    config = build(Config, raw)
    shapes = {name: tuple(t.shape) for name, t in unset_weights(config.model).items()}
    step = folder / "checkpoints" / "step_00000007"
    step.mkdir(parents=True)
    write_text(step / CONFIG, to_yaml(config))
    path = step / CONFIG
    files = {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)}}
    shards = []
    for rank in range(ranks):
        parts = {
            fragment_key(name, kind, run): (run.numel,)
            for name, shape in shapes.items()
            for kind in (KINDS if moments else (PARAM,))
            if (run := _part(shape, rank, ranks, layout)).numel
        }
        shards.append(f"shard_{rank:05d}.safetensors")
        files[shards[-1]] = write_stream(step / shards[-1], parts, _drawn(parts, rank))
    write_meta(step, {
        "step": 7,
        "tokens": 7 * 8 * length,
        "weights_only": not moments,
        "parameters": {name: list(shape) for name, shape in shapes.items()},
        "shards": shards,
        "versions": {},
        "files": files,
    })  # fmt: skip
    return 4 * sum(math.prod(shape) for shape in shapes.values())


def _part(shape: tuple[int, ...], rank: int, ranks: int, layout: ShardLayout) -> StridedSlice:
    """What a rank holds of a tensor."""
    numel = math.prod(shape)
    if layout == "tp" and len(shape) == 2:
        width = shape[1] // ranks
        assert width * ranks == shape[1]
        return StridedSlice(rank * width, shape[0] * width, width, shape[1])
    share = -(-numel // ranks)
    start = min(rank * share, numel)
    return StridedSlice.contiguous(start, min(share, numel - start))


def _drawn(parts: dict[str, tuple[int]], seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for key, (numel,) in parts.items():
        name, kind, _ = key.rsplit("|", 2)
        for start in range(0, numel, _AT_ONCE):
            size = min(_AT_ONCE, numel - start)
            values = torch.empty(size).normal_(0.0, 0.02, generator=generator)
            yield values + 1 if kind == PARAM and name.endswith("norm.weight") else values


@dataclass
class Watched:
    """What an export in a process of its own took and wrote."""

    peak_bytes: int
    """Anonymous and shared memory at its peak: not the pages of mapped files."""
    seconds: float
    output: str
    """Standard output; nothing was a terminal."""
    errors: str


def watched(arguments: list[str], folder: Path) -> Watched:
    """Run `alibi-lm` with these arguments and sample its memory from outside, to the end."""
    start, peak = time.monotonic(), 0
    with (folder / "output").open("w") as output, (folder / "errors").open("w") as errors:
        command = [sys.executable, "-m", "alibi_lm", *arguments]
        process = subprocess.Popen(command, stdout=output, stderr=errors)
        while process.poll() is None:
            peak = max(peak, _anonymous(process.pid))
            time.sleep(0.02)
    seconds = time.monotonic() - start
    outputs = [(folder / name).read_text() for name in ("output", "errors")]
    assert process.returncode == 0, outputs
    return Watched(peak, seconds, *outputs)


def _anonymous(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it has just ended
        return 0
    sizes = (line.split()[1] for line in lines if line.startswith(("RssAnon", "RssShmem")))
    return sum(int(size) * 1024 for size in sizes)
