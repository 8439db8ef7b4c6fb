"""Finding the checkpoint to resume from, and whether the config allows it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from alibi_lm.checkpoint.folder import (
    CHECKPOINTS,
    CONFIG,
    damage,
    every_step_folder,
    latest_problem,
    read_meta,
)
from alibi_lm.config import Config, load_config
from alibi_lm.config_loading import flatten
from alibi_lm.parallel.process_group import gather, rank, world_size
from alibi_lm.train.config import TrainConfig
from alibi_lm.train.schedule import learning_rate
from alibi_lm.utils.errors import CheckpointError, ConfigError, Problem
from alibi_lm.utils.logging import console

# What may change on resume; everything else would make it another experiment.
RESUME_MAY_CHANGE = (
    "run.dir",
    "parallel",
    "deepspeed",
    "data.validation",
    "train.micro_batch_size",
    "train.gradient_accumulation_steps",
    "train.num_steps",
    "train.activation_checkpointing",
    "train.compile",
    "train.log_interval",
    "train.checkpoint_interval",
    "train.keep_last",
    "train.keep_every",
    "train.validation_interval",
    "train.validation_multiples",
    "train.validation_tokens",
    "train.peak_flops",
    "train.max_minutes",
    "train.heartbeat_timeout_seconds",
    "train.hang_timeout_minutes",
    "train.metric_writers",
    "train.wandb",
)

# Files may move; their content is compared by digest (see `data_problems`).
COMPARED_BY_CONTENT = ("data.corpora", "data.tokenizer")


def config_problems(old: Config, new: Config) -> Iterator[Problem]:
    """Every setting that differs from the run's and may not."""
    before, now = flatten(old), flatten(new)
    for key in sorted(before.keys() | now.keys()):
        if any(key == name or key.startswith(f"{name}.") for name in RESUME_MAY_CHANGE):
            continue
        if key in COMPARED_BY_CONTENT or before.get(key) == now.get(key):
            continue
        rule = f"was {before.get(key)!r} when the run began, and may not change"
        yield Problem(key, now.get(key), rule, "set it back, or give the new run its own run.dir")


def data_problems(meta: dict[str, Any], data: dict[str, Any]) -> Iterator[Problem]:
    """Corpora, weights or tokenizer that are not those the run was trained on."""
    fix = "give the same token files in the same order, or a new run.dir"
    if meta["data"]["corpora"] != data["corpora"]:
        yield Problem("data.corpora", None, "are not the run's corpora or weights", fix)
    if meta["data"]["tokenizer"] != data["tokenizer"]:
        yield Problem("data.tokenizer", None, "is not the run's tokenizer", fix)


def find_checkpoint(run: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest undamaged checkpoint of a run, or None where it has none at all.

    Every rank verifies its share of the files. Damaged ones are named and left in place.

    Raises:
        CheckpointError: on every rank, if there are checkpoints but none is whole.
    """
    damaged: list[Problem] = []
    folders = gather(every_step_folder(run))[0]
    for folder in reversed(folders):
        problems: list[Problem] = []
        meta: dict[str, Any] = {}
        try:
            meta = read_meta(folder)
            problems.extend(damage(folder, meta, rank(), world_size()))
        except CheckpointError as error:
            problems.extend(error.problems)
        found = list(dict.fromkeys(problem for part in gather(problems) for problem in part))
        if not found:
            if (stale := latest_problem(run, folder, folders[-1])) is not None:
                console.warning(str(stale))
            return folder, meta
        for problem in found:
            console.warning(f"damaged checkpoint: {problem}")
        damaged.extend(found)
    if damaged:
        rule = "holds no undamaged checkpoint"
        fix = "restore a file, or move the folder away to start from the beginning"
        raise CheckpointError(*damaged, Problem(str(run / CHECKPOINTS), None, rule, fix))
    return None


def schedule_change(old: TrainConfig, new: TrainConfig, step: int) -> str | None:
    """One line about how a new `num_steps` moves the learning rate of the next step, or None."""
    before, now = learning_rate(old, step), learning_rate(new, step)
    if math.isclose(before, now):
        return None
    return (
        f"train.num_steps = {new.num_steps:,} (was {old.num_steps:,}) changes the learning rate at "
        f"step {step:,} from {before:.3g} to {now:.3g}: schedule {new.schedule} depends on it"
    )


def check_resumable(
    folder: Path, meta: dict[str, Any], config: Config, data: dict[str, Any]
) -> Config:
    """Refuse to resume what would be another experiment.

    Returns:
        The config that the checkpoint was saved with.

    Raises:
        ConfigError: naming every setting that differs and may not.
    """
    old = load_config(folder / CONFIG)
    problems = [*config_problems(old, config), *data_problems(meta, data)]
    if meta.get("weights_only"):
        rule, fix = "holds no optimizer state to resume from", "give it to train.init_from instead"
        problems.append(Problem(str(folder), None, rule, fix))
    if int(meta["step"]) > config.train.num_steps:
        rule = f"the run has already done {meta['step']} steps"
        problems.append(
            Problem("train.num_steps", config.train.num_steps, rule, "give at least that many")
        )
    if problems:
        raise ConfigError(*problems)
    return old
