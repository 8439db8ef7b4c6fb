"""A model that trains in a process of its own, one step whenever it is asked to."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from alibi_lm.bench.baselines import SIZES, Shape, become, import_packages, make
from alibi_lm.bench.interleaved_timing import timed
from alibi_lm.bench.roofline import profile_step
from alibi_lm.bench.worker import Worker, answer
from alibi_lm.config import Config
from alibi_lm.config_loading import build
from alibi_lm.train.entry import quiet_libraries
from alibi_lm.utils.memory import (
    keep_freed_memory,
    peak_resident_bytes,
    resident_bytes,
    use_huge_pages,
)


@dataclass(frozen=True)
class Job:
    """One model and its steps."""

    names: tuple[str, ...]
    """One, or several of `peers.SAME_PARAMETERS`: the model is each of them in turn."""
    shape: Shape
    num_tokens: int
    """Tokens of a step: as many sequences as fit, and one micro-batch."""
    num_threads: int


class Trainee(Worker):
    """A process that trains a model; `step` gives the seconds of one step."""

    def __init__(self, job: Job) -> None:
        super().__init__(", ".join(job.names), _serve, job)

    def step(self, name: str) -> float:
        """Seconds of a forward pass, backward pass and update as one of the job's models."""
        return float(self.ask(name))

    def memory(self) -> int:
        """Bytes by which the process's peak is above what it held before it made the model."""
        return int(self.ask("memory"))

    def profile(self) -> dict[str, float]:
        """Seconds of processor time of one step of the first model by what they went to."""
        return dict(self.ask("profile"))


def _serve(pipe: Connection, job: Job) -> None:
    quiet_libraries()
    # What a launcher would set; the benchmark is one of the CPU path. torch's profiler is to be
    # quiet.
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
        # What the step needs: memory is counted from here on.
        importlib.import_module("alibi_lm.train.engine.base")
        for name in job.names:
            import_packages(name)
        before = resident_bytes()
        steps = _steps(job)
        answer(pipe, {
            **{name: timed(step) for name, step in steps.items()},
            "memory": lambda: peak_resident_bytes() - before,
            "profile": lambda: profile_step(steps[job.names[0]]),
        })  # fmt: skip
        dist.destroy_process_group()


def _steps(job: Job) -> dict[str, Callable[[], None]]:
    """A training step of each of the job's models under DeepSpeed, as a run does it."""
    import deepspeed

    from alibi_lm.train.engine.base import parameter_groups
    from alibi_lm.train.engine.deepspeed_config import deepspeed_block, deepspeed_config

    sequences = job.num_tokens // job.shape.sequence_length
    config = build(Config, {
        "run": {"dir": "unused"},
        "model": SIZES[job.shape.size],
        "data": {"corpora": [{"prefix": "unused"}]},
        "train": {"sequence_length": job.shape.sequence_length, "micro_batch_size": sequences,
                  "global_batch_size": sequences, "precision": "bf16", "num_steps": 1},
    })  # fmt: skip
    model = make(job.names[0], job.shape)
    with contextlib.redirect_stdout(io.StringIO()):
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=parameter_groups(model, config.train.weight_decay),
            config=deepspeed_config(config, deepspeed_block(config), 1),
        )
    generator = torch.Generator().manual_seed(0)
    size = (sequences, job.shape.sequence_length + 1)
    tokens = torch.randint(SIZES[job.shape.size]["vocab_size"], size, generator=generator)

    def step(name: str) -> None:
        if len(job.names) > 1:
            become(model, name, job.shape)
        engine.backward(engine(tokens))
        engine.step()
        use_huge_pages()

    return {name: partial(step, name) for name in job.names}
