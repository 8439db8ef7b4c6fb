"""Time and memory of a training step with each position scheme."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from alibi_lm.config_loading import build, to_dict
from alibi_lm.experiments.claims.config import CostConfig
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.decoder import Decoder
from alibi_lm.model.layers import set_pruning_tolerance
from alibi_lm.train.config import TrainConfig
from alibi_lm.utils.logging import console
from alibi_lm.utils.memory import (
    keep_freed_memory,
    peak_resident_bytes,
    resident_bytes,
    use_huge_pages,
)

SCHEMES = ("alibi", "sinusoidal", "rotary", "t5", "none")
MEMORY_SCHEMES = ("alibi", "sinusoidal")
"""Schemes whose memory the claims compare, each measured in its own process."""
MEMORY_REPEATS = 7


def measure_cost(settings: CostConfig) -> dict[str, Any]:
    """Seconds and bytes of a step by scheme and length, one value a repetition.

    Steps of all schemes and lengths are interleaved, so that a busy machine slows all alike. Bytes
    are the rise of a separate process's resident memory from the ready model to the peak of three
    steps. Attention and memory are set up as in training.
    """
    keep_freed_memory()
    steps = {
        (scheme, length): _step(settings, scheme, length)
        for scheme in SCHEMES
        for length in settings.lengths
    }
    seconds: dict[str, dict[str, list[float]]] = {scheme: {} for scheme in SCHEMES}
    for step in steps.values():
        step()
    for repeat in range(settings.repeats):
        for (scheme, length), step in steps.items():
            started = time.perf_counter()
            step()
            taken = time.perf_counter() - started
            seconds[scheme].setdefault(str(length), []).append(taken)
        console.info(f"claims: cost, repetition {repeat + 1} of {settings.repeats}")
    memory = {
        scheme: {
            str(length): [_memory(settings, scheme, length) for _ in range(MEMORY_REPEATS)]
            for length in settings.lengths
        }
        for scheme in MEMORY_SCHEMES
    }
    return {
        "seconds": seconds,
        "bytes": memory,
        "tokens": settings.tokens,
        "model": settings.model,
        "threads": torch.get_num_threads(),
    }


def _step(settings: CostConfig, scheme: str, length: int) -> Callable[[], None]:
    model = build(ModelConfig, settings.model | {"position": scheme})
    decoder = Decoder(model).to(torch.bfloat16)
    set_pruning_tolerance(decoder, TrainConfig().pruning_tolerance)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-4, fused=True)
    size = (settings.tokens // length, length + 1)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(int(model.vocab_size or 0), size, generator=generator)

    def step() -> None:
        decoder(tokens[:, :-1], tokens[:, 1:]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        use_huge_pages()

    return step


_PROGRAM = """
import json, sys
from alibi_lm.experiments.claims.config import CostConfig
from alibi_lm.experiments.claims.cost import peak_of_steps
from alibi_lm.config_loading import build
settings = build(CostConfig, json.loads(sys.argv[1]))
sys.stdout.write(str(peak_of_steps(settings, sys.argv[2], int(sys.argv[3]))))
"""


def _memory(settings: CostConfig, scheme: str, length: int) -> float:
    arguments = [json.dumps(to_dict(settings)), scheme, str(length)]
    command = [sys.executable, "-c", _PROGRAM, *arguments]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def peak_of_steps(settings: CostConfig, scheme: str, length: int) -> int:
    """Bytes by which this process's peak of resident memory rises in three steps."""
    keep_freed_memory()
    step = _step(settings, scheme, length)
    before = resident_bytes()
    for _ in range(3):
        step()
    return peak_resident_bytes() - before


def cost_lines(cost: Mapping[str, Any]) -> list[str]:
    """Medians relative to sinusoidal positions at the same length, for the terminal."""
    lines = []
    for scheme in SCHEMES:
        for length, seconds in cost["seconds"][scheme].items():
            base = statistics.median(cost["seconds"]["sinusoidal"][length])
            median = statistics.median(seconds)
            line = f"{scheme:<12} {length:>6}  {median:8.3f} s  {median / base:5.2f}x"
            if scheme in cost["bytes"]:
                line += f"  {statistics.median(cost['bytes'][scheme][length]) / 2**20:8.0f} MiB"
            lines.append(line)
    return lines
