"""Starting or resuming a run: what `alibi_lm.train.entry` does on every rank."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from alibi_lm.checkpoint.config_paths import existing_path
from alibi_lm.checkpoint.folder import CONFIG, read_meta, resolve_step
from alibi_lm.checkpoint.step import open_checkpoint
from alibi_lm.config import Config
from alibi_lm.config_loading import apply_overrides, digest, load_yaml, to_dict, to_yaml
from alibi_lm.model.flops import num_parameters
from alibi_lm.parallel.errors import raise_if_different, run_on_all_ranks
from alibi_lm.parallel.mesh import make_mesh
from alibi_lm.parallel.process_group import join_process_group, rank, world_size
from alibi_lm.parallel.rules import layout_problems
from alibi_lm.train.checkpointing.resume import check_resumable, find_checkpoint, schedule_change
from alibi_lm.train.checkpointing.save import clear_leftovers
from alibi_lm.train.data import TrainingData, open_training_data
from alibi_lm.train.engine.base import Engine
from alibi_lm.train.engine.compile import check_compiler
from alibi_lm.train.engine.deepspeed_config import (
    batch_problems,
    block_problems,
    deepspeed_block,
    deepspeed_config,
    stage_problems,
)
from alibi_lm.train.engine.plain import make_engine
from alibi_lm.train.fault_tolerance.failure_detector import Limits
from alibi_lm.train.fault_tolerance.heartbeat import ActivityTracker
from alibi_lm.train.fault_tolerance.preemption import Preemption
from alibi_lm.train.fault_tolerance.watchdog import watched
from alibi_lm.train.loop import Loop
from alibi_lm.train.monitoring.hardware import peak_flops
from alibi_lm.train.monitoring.metrics import Metrics
from alibi_lm.train.monitoring.writers import check_writers, open_writers
from alibi_lm.utils.errors import CheckpointError, ConfigError, Problem
from alibi_lm.utils.files import write_json, write_text
from alibi_lm.utils.locking import exclusive_lock
from alibi_lm.utils.logging import console
from alibi_lm.utils.settings import UnknownSetting, applicable, examine

INIT_MAY_CHANGE = ("window", "scaling", "initializer_range")
"""Keys of the model that may differ from those of `train.init_from`."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def read_config(
    path: str | Path, overrides: Sequence[str], num_ranks: int
) -> tuple[Config, dict[str, Any]]:
    """The checked config of a run on `num_ranks` ranks and its `deepspeed:` block.

    Raises:
        ConfigError: with every problem of every section at once.
    """
    raw = apply_overrides(load_yaml(path), overrides)
    config, problems = examine(Config, raw)
    block: dict[str, Any] = {}
    with suppress(UnknownSetting):
        try:
            block = deepspeed_block(config)
        except ConfigError as error:
            problems.extend(error.problems)
    wrong_keys = list(block_problems(block))
    problems.extend(wrong_keys or stage_problems(config, block))
    problems.extend(applicable(config.data.training_problems()))
    problems.extend(layout_problems(config, num_ranks))
    problems.extend(applicable(batch_problems(config, num_ranks)))
    if problems:
        raise ConfigError(*problems)
    return config, block


def pretrain(path: str | Path, overrides: Sequence[str], local_rank: int, address: str) -> bool:
    """Start the run of a config, or resume it from its newest good checkpoint.

    Returns True after the last step, False if the run was asked to stop and has saved.

    The process group must not exist yet; it is made here from the launcher's environment.
    `address` is that of rank 0's host. The process ends inside with EXIT_LOST if another rank dies.

    Raises:
        UserError: on every rank alike, for everything that the user can fix.
    """
    join_process_group(local_rank)
    config, block = run_on_all_ranks(lambda: read_config(path, overrides, world_size()))
    raise_if_different("the resolved config", digest(config))
    run_on_all_ranks(lambda: check_writers(config) if rank() == 0 else None)
    run_on_all_ranks(lambda: check_compiler(config))
    train, activity = config.train, ActivityTracker()
    limits = Limits(
        train.heartbeat_timeout_seconds,
        train.hang_timeout_minutes and 60 * train.hang_timeout_minutes,
    )
    with watched(address, limits, activity, Path(config.run.dir) / "train.log"):
        return _pretrain(config, block, activity)


def _pretrain(config: Config, block: dict[str, Any], activity: ActivityTracker) -> bool:
    training_data = run_on_all_ranks(lambda: open_training_data(config))
    run = Path(config.run.dir)
    found = find_checkpoint(run)
    schedule_note = None
    if found is not None:
        saved = run_on_all_ranks(lambda: check_resumable(*found, config, training_data.facts()))
        schedule_note = schedule_change(saved.train, config.train, int(found[1]["step"]))
        if int(found[1]["step"]) == config.train.num_steps:
            done = config.train.num_steps
            console.info(
                f"{run} has already done its {done:,} steps; newest checkpoint: {found[0]}"
            )
            return True
    source = (
        run_on_all_ranks(lambda: _initial_weights(config, training_data)) if found is None else None
    )
    mesh = make_mesh(config.parallel.tp, config.parallel.pp)
    ds_config = deepspeed_config(config, block, mesh.dp.size)
    fresh = found is None and source is None
    engine = make_engine(config, json.loads(json.dumps(ds_config)), mesh, initial=fresh)
    with _run_folder_lock(run):
        line = _start_line(config, training_data, engine, found, source)
        run_on_all_ranks(lambda: _prepare_run_folder(run, config, ds_config, line), run)
        if schedule_note is not None:
            console.warning(schedule_note)
        if found is not None:
            engine.load(*found)
        elif source is not None:
            engine.load(source, read_meta(source), weights_only=True)
        activity.follow(engine.deepspeed.module)
        finished = _train(engine, training_data, config, found, activity)
    # Launchers end the other ranks when one exits with a code other than 0; mpirun does so at once.
    dist.barrier()
    return finished


@contextmanager
def _run_folder_lock(run: Path) -> Iterator[None]:
    """Lock the run folder, so that no second job trains the same run."""
    with ExitStack() as stack:
        hold = exclusive_lock(run, CheckpointError) if rank() == 0 else nullcontext()
        run_on_all_ranks(lambda: stack.enter_context(hold))
        yield


def _initial_weights(config: Config, training_data: TrainingData) -> Path | None:
    """The step folder of `train.init_from`, whose model and tokenizer must be the run's."""
    name = config.train.init_from
    if name is None:
        return None
    is_hf = name.startswith("hf:")  # which `resolve_step` refuses
    folder = resolve_step(Path(name) if is_hf else existing_path("train.init_from", name))
    checkpoint = open_checkpoint(folder, check=rank() == 0)
    source, model = to_dict(checkpoint.config.model), to_dict(config.model)
    fix = "use the same model and tokenizer as train.init_from"
    # Window, scaling and the spread of initial weights do not change what a weight means.
    problems = [
        Problem(f"model.{key}", model[key], f"is {source[key]!r} in {folder}", fix)
        for key in model
        if model[key] != source[key] and key not in INIT_MAY_CHANGE
    ]
    tokenizer = None if training_data.tokenizer is None else training_data.tokenizer.digest
    if tokenizer != checkpoint.meta["data"]["tokenizer"]:
        rule = f"is not the tokenizer of {folder}"
        problems.append(Problem("data.tokenizer", config.data.tokenizer, rule, fix))
    if problems:
        raise CheckpointError(*problems)
    return folder


def _prepare_run_folder(run: Path, config: Config, ds_config: dict[str, Any], line: str) -> None:
    if rank() == 0:
        run.mkdir(parents=True, exist_ok=True)
        clear_leftovers(run)
        write_text(run / CONFIG, to_yaml(config))
        write_json(run / "ds_config.json", ds_config)
        console.log_to(run / "train.log")
        console.info(line)


def _start_line(
    config: Config,
    training_data: TrainingData,
    engine: Engine,
    found: tuple[Path, dict[str, Any]] | None,
    source: Path | None,
) -> str:
    train = config.train
    how = f"start {config.run.dir}"
    if found is not None:
        how = f"resume {config.run.dir} from {found[0].name} ({found[1]['step']:,} steps done)"
    elif source is not None:
        how += f" with the weights of {source}"
    tokens = train.num_steps * train.global_batch_size * train.sequence_length
    epochs = tokens / sum(file.num_tokens for file in training_data.corpora)
    return (
        f"{how}: {num_parameters(config.model):,} parameters, {engine.mesh.layout.describe()}, "
        f"ZeRO stage {engine.stage}, {train.precision}, {tokens:,} training tokens in all "
        f"({epochs:.2f} epochs of the corpora)"
    )


def _train(
    engine: Engine,
    training_data: TrainingData,
    config: Config,
    found: tuple[Path, dict[str, Any]] | None,
    activity: ActivityTracker,
) -> bool:
    step = 0 if found is None else int(found[1]["step"])
    run = Path(config.run.dir)
    peak = config.train.peak_flops
    source = "train.peak_flops"
    if peak is None:
        peak, source = peak_flops(DTYPES[config.train.precision])
    shown = "unknown" if peak is None else f"{peak / 1e12:.3g} TFLOP/s a rank"
    metrics = run_on_all_ranks(lambda: _open_metrics(config, step, f"{shown} ({source})"), run)
    try:
        preemption = Preemption(run if rank() == 0 else None, config.train.max_minutes)
        activity.saved = found[0] if found else None
        return Loop(engine, training_data, config, metrics, peak, preemption, activity).run(step)
    finally:
        if metrics is not None:
            metrics.close()
        sys.stdout.flush()


def _open_metrics(config: Config, step: int, peak: str) -> Metrics | None:
    if rank() != 0:
        return None
    console.info(f"mfu is measured against {peak}")
    writers = open_writers(config, step)
    return Metrics(Path(config.run.dir), config.train.num_steps, step, writers)
