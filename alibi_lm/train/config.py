"""The `run` and `train` sections of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from alibi_lm.utils import plugins
from alibi_lm.utils.errors import Problem
from alibi_lm.utils.settings import Distinct, Probability, Section, nearest, rule

Precision = Literal["fp32", "bf16", "fp16"]
SCHEDULES = ("cosine", "linear", "inverse_sqrt", "constant", "wsd")
METRIC_WRITERS = ("tensorboard",)


@dataclass
class RunConfig(Section):
    """Where the run is stored."""

    dir: str
    """Run folder, on storage that all hosts share."""

    @rule
    def _dir_is_a_path(self) -> Iterator[Problem]:
        if not self.dir.strip() or "\0" in self.dir:
            yield Problem("dir", self.dir, "is no folder name", "name the run's folder")


@dataclass
class WandbConfig(Section):
    """Weights & Biases. Its own environment variables apply too, such as WANDB_MODE."""

    project: str
    """Project that the run is logged to."""
    entity: str | None = None
    """User or team; by default the logged-in user."""
    group: str | None = None
    """Group that the run is shown in."""

    @rule
    def _names_are_not_empty(self) -> Iterator[Problem]:
        for name in ("project", "entity", "group"):
            value = getattr(self, name)
            if value is not None and not value.strip():
                yield Problem(name, value, "is empty", "give a name, or leave it out")


@dataclass
class TrainConfig(Section):
    """How the model is trained."""

    aliases: ClassVar[Mapping[str, str]] = {
        "sequence_length": "seq_len seq_length max_seq_len max_seq_length context_length",
        "num_steps": "steps max_steps train_steps train_iters iterations",
        "micro_batch_size": "train_micro_batch_size_per_gpu per_device_train_batch_size",
        "global_batch_size": "batch_size train_batch_size",
        "gradient_accumulation_steps": "grad_accum_steps",
        "precision": "dtype",
        "learning_rate": "lr max_lr",
        "min_learning_rate": "min_lr",
        "schedule": "scheduler lr_scheduler lr_scheduler_type",
        "warmup_steps": "warmup",
        "beta1": "betas",
        "adam_epsilon": "eps epsilon",
        "weight_decay": "wd",
        "gradient_clipping": "grad_clip clip_grad max_grad_norm",
        "activation_checkpointing": "gradient_checkpointing",
        "pruning_tolerance": "attention_epsilon",
        "heartbeat_timeout_seconds": "silence_seconds",
        "hang_timeout_minutes": "hang_minutes",
        "checkpoint_interval": "save_interval save_steps",
        "validation_interval": "eval_interval eval_steps",
    }

    sequence_length: PositiveInt = 256
    """Input tokens of a training sample."""
    num_steps: PositiveInt = 1000
    """Optimizer steps of the whole run."""
    micro_batch_size: PositiveInt = 4
    """Samples per rank in one forward pass."""
    global_batch_size: PositiveInt = 8
    """Samples per optimizer step, over all ranks."""
    gradient_accumulation_steps: PositiveInt | None = None
    """Micro-batches per step on each rank; by default derived from both batch sizes."""
    precision: Precision = "bf16"
    """Precision of the forward and backward pass; master weights and accumulation are fp32."""
    seed: NonNegativeInt = 0
    """Seed of the initial weights and of the order of samples."""
    init_from: str | None = None
    """Run or step folder whose weights a new run starts from."""

    learning_rate: PositiveFloat = 1e-3
    """Peak learning rate of AdamW."""
    min_learning_rate: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay."""
    schedule: str = "cosine"
    """Learning rate after the warm-up: cosine, linear, inverse_sqrt, constant, wsd (stays at the
    peak, then decays linearly), or the name of one that an installed package adds."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises linearly from 0."""
    decay_steps: NonNegativeInt | None = None
    """Steps of the final decay of wsd; by default a tenth of num_steps."""
    beta1: Probability = 0.9
    """Decay of AdamW's first moment."""
    beta2: Probability = 0.95
    """Decay of AdamW's second moment."""
    adam_epsilon: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay of matrices; vectors have none."""
    gradient_clipping: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0 disables clipping."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass instead of storing them."""
    compile: bool = False
    """Fuse operations between a layer's attention, products and collectives by torch.compile; needs
    a C++ compiler or Triton, and a minute at the start."""

    pruning_tolerance: Probability = 1e-6
    """Largest attention probability per query to skip in long samples; 0 disables pruning."""

    log_interval: PositiveInt = 10
    """Steps between log lines, metrics.jsonl lines and TensorBoard points."""
    max_minutes: PositiveFloat | None = None
    """Minutes after which the run saves and stops, to be resumed; by default never."""
    heartbeat_timeout_seconds: Annotated[float, Field(ge=5)] | None = 120.0
    """Seconds without a heartbeat after which a rank or host counts as lost; null disables it."""
    hang_timeout_minutes: PositiveFloat | None = 8.0
    """Minutes without progress on any rank after which the job ends; null disables it."""
    checkpoint_interval: PositiveInt = 500
    """Steps between checkpoints; the last step is always saved."""
    keep_last: PositiveInt = 3
    """Number of newest checkpoints to keep."""
    keep_every: PositiveInt | None = None
    """Keep every checkpoint whose step is a multiple of this; by default none."""
    validation_interval: PositiveInt | None = None
    """Steps between validation losses; by default none."""
    validation_multiples: list[float] = field(default_factory=lambda: [1.0, 2.0, 4.0])
    """Validation lengths as multiples of sequence_length."""
    validation_tokens: PositiveInt = 65536
    """Tokens to score at each validation length."""
    peak_flops: PositiveFloat | None = None
    """FLOP/s of one device, for MFU; by default from a table of GPUs, or measured on CPU."""
    metric_writers: Annotated[list[str], Distinct] = field(
        default_factory=lambda: list(METRIC_WRITERS)
    )
    """What shows the curves besides metrics.jsonl: tensorboard, or names of metric writers that
    installed packages add."""
    wandb: WandbConfig | None = None
    """Log to Weights & Biases too (needs the package `wandb`); by default off."""

    @rule
    def _schedule_exists(self) -> Iterator[Problem]:
        yield from _unknown("schedule", self.schedule, SCHEDULES, plugins.SCHEDULES)

    @rule
    def _metric_writers_exist(self) -> Iterator[Problem]:
        for index, name in enumerate(self.metric_writers):
            key = f"metric_writers.{index}"
            yield from _unknown(key, name, METRIC_WRITERS, plugins.METRIC_WRITERS)

    @rule
    def _the_decay_goes_down(self) -> Iterator[Problem]:
        if self.min_learning_rate > self.learning_rate:
            rule = f"is above .learning_rate = {self.learning_rate}"
            yield Problem("min_learning_rate", self.min_learning_rate, rule, "lower it")

    @rule
    def _only_wsd_has_a_separate_decay(self) -> Iterator[Problem]:
        if self.decay_steps is not None and self.schedule != "wsd":
            rule = "only schedule: wsd has a separate decay"
            yield Problem("decay_steps", self.decay_steps, rule, "leave it out")

    @rule
    def _warmup_and_decay_fit_the_run(self) -> Iterator[Problem]:
        decay = self.decay_steps or 0
        if self.warmup_steps + decay > self.num_steps:
            more = f" with .decay_steps = {decay}" if decay else ""
            rule = f"exceeds .num_steps = {self.num_steps}{more}"
            yield Problem("warmup_steps", self.warmup_steps, rule, "lower it")

    @rule
    def _multiples_are_lengths(self) -> Iterator[Problem]:
        for index, multiple in enumerate(self.validation_multiples):
            length = multiple * self.sequence_length
            if length < 1 or length != int(length):
                rule = f"times .sequence_length = {self.sequence_length} is no whole length"
                fix = "give multiples that make whole lengths"
                yield Problem(f"validation_multiples.{index}", multiple, rule, fix)


def _unknown(key: str, name: str, built_in: Sequence[str], group: str) -> Iterator[Problem]:
    """A problem if a name is neither built in nor an entry point of a group."""
    names = [*built_in, *plugins.plugins(group)]
    if name not in names:
        near = nearest(name, names)
        fix = f"did you mean {near}?" if near else f"choose one, or install what adds it to {group}"
        yield Problem(key, name, f"is not one of {', '.join(names)}", fix)
