"""The run and train sections of a config."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from alibi_lm.utils.errors import Problem

Precision = Literal["fp32", "bf16", "fp16"]
Schedule = Literal["cosine", "linear", "inverse_sqrt", "constant", "wsd"]


@dataclass
class RunConfig:
    """Where a run lives."""

    dir: str
    """Run folder; on storage that all hosts share."""

    def problems(self, key: str) -> Iterator[Problem]:
        """The rules of this section that are broken."""
        if not self.dir.strip() or "\0" in self.dir:
            yield Problem(f"{key}dir", self.dir, "is no folder name", "name the run's folder")


@dataclass
class WandbConfig:
    """Where Weights & Biases shows the run. Its own WANDB_* variables count, such as WANDB_MODE."""

    project: str
    """The project there."""
    entity: str | None = None
    """User or team; by default the one logged in."""
    group: str | None = None
    """Runs of one group are shown together."""

    def problems(self, key: str) -> Iterator[Problem]:
        """The rules of this section that are broken."""
        for name in ("project", "entity", "group"):
            value = getattr(self, name)
            if value is not None and not value.strip():
                yield Problem(f"{key}{name}", value, "is empty", "give a name, or leave it out")


@dataclass
class TrainConfig:
    """How the model is trained."""

    sequence_length: int = 256
    """Tokens of a training sample (inputs)."""
    num_steps: int = 1000
    """Optimizer steps of the whole run."""
    micro_batch_size: int = 4
    """Samples a rank puts through the model at once."""
    global_batch_size: int = 8
    """Samples of one optimizer step over all ranks."""
    gradient_accumulation_steps: int | None = None
    """Micro-batches of a step on each rank; by default what the two sizes and the ranks give."""
    precision: Precision = "bf16"
    """Arithmetic of forward and backward; master weights and accumulation are fp32."""
    seed: int = 0
    """Seed of the initial weights and of the order of samples."""
    init_from: str | None = None
    """Run or step folder whose weights the new run starts from."""

    learning_rate: float = 1e-3
    """Peak learning rate of AdamW."""
    min_learning_rate: float = 0.0
    """Learning rate at the end of the decay."""
    schedule: Schedule = "cosine"
    """After the warm-up: cosine, linear, inverse_sqrt, constant, or wsd (stable, then decay)."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly from 0."""
    decay_steps: int | None = None
    """wsd: steps of the final decay; by default a tenth of num_steps."""
    beta1: float = 0.9
    """Decay of AdamW's first moment."""
    beta2: float = 0.95
    """Decay of AdamW's second moment."""
    adam_epsilon: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.1
    """Decoupled weight decay of the matrices; vectors have none."""
    gradient_clipping: float = 1.0
    """Largest global gradient norm; 0 clips nothing."""
    activation_checkpointing: bool = False
    """Whether blocks are computed again in the backward pass instead of kept."""
    compile: bool = False
    """Whether torch.compile fuses what lies between a block's attention, products and collectives;
    takes a minute at the start, and needs a C++ compiler or Triton."""

    pruning_tolerance: float = 1e-6
    """Probability that a head may leave out of each row of long samples; 0 computes all of it."""

    log_interval: int = 10
    """Steps between log lines, metrics.jsonl lines and TensorBoard points."""
    max_minutes: float | None = None
    """Save and stop after this many minutes, to be started again; by default never."""
    heartbeat_timeout_seconds: float | None = 120.0
    """Seconds without a sign of life after which a rank or its host is lost; null: never."""
    hang_timeout_minutes: float | None = 8.0
    """Minutes in which no rank moves on, after which the job ends; null: never."""
    checkpoint_interval: int = 500
    """Steps between checkpoints; the last step always has one."""
    keep_last: int = 3
    """How many of the newest checkpoints are kept."""
    keep_every: int | None = None
    """Checkpoints whose step is a multiple of this are kept for good."""
    validation_interval: int | None = None
    """Steps between validation losses; by default none."""
    validation_multiples: list[float] = field(default_factory=lambda: [1.0, 2.0, 4.0])
    """Validation lengths as multiples of sequence_length."""
    validation_tokens: int = 65536
    """Tokens scored at each validation length."""
    peak_flops: float | None = None
    """FLOP/s of one device for MFU; by default from a table of GPUs, on CPU measured at start."""
    wandb: WandbConfig | None = None
    """Weights & Biases (`pip install 'alibi_lm[wandb]'`) shows the curves too; by default not."""

    def problems(self, key: str) -> Iterator[Problem]:
        """The rules of this section that are broken."""
        at_least_one = (
            "sequence_length",
            "num_steps",
            "micro_batch_size",
            "global_batch_size",
            "gradient_accumulation_steps",
            "log_interval",
            "checkpoint_interval",
            "keep_last",
            "keep_every",
            "validation_interval",
            "validation_tokens",
        )
        for name in at_least_one:
            value = getattr(self, name)
            if value is not None and value < 1:
                yield Problem(f"{key}{name}", value, "is not positive", "give at least 1")
        positive = (
            "learning_rate",
            "adam_epsilon",
            "peak_flops",
            "max_minutes",
            "hang_timeout_minutes",
        )
        for name in positive:
            value = getattr(self, name)
            if value is not None and value <= 0:
                yield Problem(f"{key}{name}", value, "is not positive", "give a positive number")
        for name in (
            "min_learning_rate",
            "warmup_steps",
            "decay_steps",
            "weight_decay",
            "gradient_clipping",
            "seed",
        ):
            value = getattr(self, name)
            if value is not None and value < 0:
                yield Problem(f"{key}{name}", value, "is negative", "give 0 or more")
        if self.heartbeat_timeout_seconds is not None and self.heartbeat_timeout_seconds < 5:
            rule = "is less than 5; signs of life come once a second"
            yield Problem(
                f"{key}heartbeat_timeout_seconds",
                self.heartbeat_timeout_seconds,
                rule,
                "give at least 5",
            )
        for name, example in (("beta1", 0.9), ("beta2", 0.9), ("pruning_tolerance", 1e-6)):
            value = getattr(self, name)
            if not 0 <= value < 1:
                yield Problem(
                    f"{key}{name}", value, "is not in [0, 1)", f"give for example {example}"
                )
        yield from self._relations(key)

    def _relations(self, key: str) -> Iterator[Problem]:
        if self.min_learning_rate > self.learning_rate:
            yield Problem(
                f"{key}min_learning_rate",
                self.min_learning_rate,
                f"is above {key}learning_rate = {self.learning_rate}",
                "lower it",
            )
        if self.decay_steps is not None and self.schedule != "wsd":
            yield Problem(
                f"{key}decay_steps",
                self.decay_steps,
                "only schedule: wsd has a separate decay",
                "leave it out",
            )
        if self.warmup_steps + (self.decay_steps or 0) > self.num_steps:
            yield Problem(
                f"{key}warmup_steps",
                self.warmup_steps,
                f"warm-up and decay are longer than {key}num_steps = {self.num_steps}",
                "shorten them",
            )
        for multiple in self.validation_multiples:
            length = multiple * self.sequence_length
            if length < 1 or length != int(length):
                yield Problem(
                    f"{key}validation_multiples",
                    multiple,
                    f"times {self.sequence_length} tokens is not a length",
                    "give multiples that make whole lengths",
                )
