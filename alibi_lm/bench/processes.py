"""Worker processes that measure on request.

Each has its own memory, and several can be measured in an interleaved order.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from alibi_lm.bench.baselines import SIZES, ModelSize, become, import_packages, make
from alibi_lm.bench.interleaved_timing import timed
from alibi_lm.bench.roofline import Rate, matmul_rate, memory_bandwidth, profile_step
from alibi_lm.config import Config
from alibi_lm.config_loading import build
from alibi_lm.train.entry import quiet_libraries
from alibi_lm.utils.memory import (
    keep_freed_memory,
    peak_resident_bytes,
    resident_bytes,
    use_huge_pages,
)


class Worker:
    """A spawned process that runs `serve(pipe, job)`, which ends in `_answer`."""

    def __init__(self, name: str, serve: Callable[[Connection, Any], None], job: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other, job), daemon=True)
        self._process.start()
        other.close()
        self.name = name

    def ask(self, request: str) -> Any:
        """The answer to a request.

        Raises:
            RuntimeError: the process has ended.
        """
        try:
            self._pipe.send(request)
            return self._pipe.recv()
        except (EOFError, ConnectionResetError, BrokenPipeError):
            self._process.join()
            message = f"the process of {self.name} ended with {self._process.exitcode}"
            raise RuntimeError(message) from None

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join()


def _answer(pipe: Connection, answers: Mapping[str, Callable[[], Any]]) -> None:
    """Answer requests until the other side closes the pipe."""
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(answers[pipe.recv()]())


class RooflineProcess(Worker):
    """Measures the machine's limits: matrix products of a model's sizes, and copies."""

    def __init__(self, size: Mapping[str, int], num_tokens: int, num_threads: int) -> None:
        super().__init__("the roofline", _serve_roofline, (size, num_tokens, num_threads))

    def measure(self) -> tuple[Rate, float]:
        """FLOP/s of the products, and bytes/s of a copy."""
        rate, bandwidth = self.ask("rates")
        return rate, bandwidth


def _serve_roofline(pipe: Connection, job: tuple[Mapping[str, int], int, int]) -> None:
    size, num_tokens, num_threads = job
    torch.set_num_threads(num_threads)
    keep_freed_memory()
    rate, bandwidth = matmul_rate(size, num_tokens), memory_bandwidth()
    use_huge_pages()
    _answer(pipe, {"rates": lambda: (rate(), bandwidth())})


@dataclass(frozen=True)
class Job:
    """What a training process trains."""

    names: tuple[str, ...]
    """One model, or several of `baselines.SAME_PARAMETERS` that share its weights."""
    size: ModelSize
    num_tokens: int
    """Tokens a step, in one micro-batch."""
    num_threads: int


class TrainingProcess(Worker):
    """Trains a model one step at a time."""

    def __init__(self, job: Job) -> None:
        super().__init__(", ".join(job.names), _serve_training, job)

    def step(self, name: str) -> float:
        """Seconds of a forward pass, backward pass and update of one of the job's models."""
        return float(self.ask(name))

    def memory(self) -> int:
        """Peak bytes above what the process held before it made the model."""
        return int(self.ask("memory"))

    def profile(self) -> dict[str, float]:
        """CPU seconds of one step of the first model, by part of the step."""
        return dict(self.ask("profile"))


def _serve_training(pipe: Connection, job: Job) -> None:
    quiet_libraries()
    # What a launcher would set, on the CPU, with torch's profiler silenced.
    os.environ |= {"LOCAL_RANK": "0", "DS_ACCELERATOR": "cpu", "KINETO_LOG_LEVEL": "99"}
    torch.set_num_threads(job.num_threads)
    keep_freed_memory()
    # Imported here: DeepSpeed picks its log level from the environment.
    import deepspeed

    from alibi_lm.parallel.process_group import avoid_shared_memory

    avoid_shared_memory()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        # Import what a step needs first: memory is counted from here on.
        importlib.import_module("alibi_lm.train.engine.base")
        for name in job.names:
            import_packages(name)
        before = resident_bytes()
        steps = _training_steps(job)
        answers: dict[str, Callable[[], Any]] = {name: timed(step) for name, step in steps.items()}
        answers["memory"] = lambda: peak_resident_bytes() - before
        answers["profile"] = lambda: profile_step(steps[job.names[0]])
        _answer(pipe, answers)
        dist.destroy_process_group()


def _training_steps(job: Job) -> dict[str, Callable[[], None]]:
    """A training step of each of the job's models under DeepSpeed, set up as a run does it."""
    import deepspeed

    from alibi_lm.train.engine.base import parameter_groups
    from alibi_lm.train.engine.deepspeed_config import deepspeed_block, deepspeed_config

    length = job.size.sequence_length
    sequences = job.num_tokens // length
    sections: dict[str, Any] = {
        "run": {"dir": "unused"},
        "model": SIZES[job.size.name],
        "data": {"corpora": [{"prefix": "unused"}]},
        "train": {
            "sequence_length": length,
            "micro_batch_size": sequences,
            "global_batch_size": sequences,
            "precision": "bf16",
            "num_steps": 1,
        },
    }
    config = build(Config, sections)
    model = make(job.names[0], job.size)
    with contextlib.redirect_stdout(io.StringIO()):
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=parameter_groups(model, config.train.weight_decay),
            config=deepspeed_config(config, deepspeed_block(config), 1),
        )
    generator = torch.Generator().manual_seed(0)
    vocab_size = SIZES[job.size.name]["vocab_size"]
    tokens = torch.randint(vocab_size, (sequences, length + 1), generator=generator)

    def step(name: str) -> None:
        if len(job.names) > 1:
            become(model, name, job.size)
        engine.backward(engine(tokens))
        engine.step()
        use_huge_pages()

    return {name: partial(step, name) for name in job.names}
