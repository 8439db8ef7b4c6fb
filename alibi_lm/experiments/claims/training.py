"""Trains the models of a claims suite: one run for each model and seed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alibi_lm.checkpoint.step import Checkpoint, open_checkpoint
from alibi_lm.config import Config
from alibi_lm.config_loading import apply_overrides, build, flatten, to_dict, to_yaml
from alibi_lm.experiments.claims.config import ClaimsConfig
from alibi_lm.train.checkpointing.resume import config_problems
from alibi_lm.utils.errors import CheckpointError, ConfigError, Problem
from alibi_lm.utils.files import write_text
from alibi_lm.utils.logging import console

CONFIG = "claims_run.yaml"


@dataclass(frozen=True)
class SuiteRun:
    """One run of a suite: a model of a group with one seed."""

    group: str
    model: str
    seed: int
    folder: Path
    config: Config

    @property
    def name(self) -> str:
        """The run's name in messages."""
        return f"{self.group}/{self.model} seed {self.seed}"

    def checkpoint(self) -> Checkpoint:
        """The finished checkpoint, after comparing every file with its digest.

        Raises:
            CheckpointError: training has not finished.
        """
        checkpoint = open_checkpoint(self.folder)
        if checkpoint.step < self.config.train.num_steps:
            rule = f"ends at step {checkpoint.step:,} of {self.config.train.num_steps:,}"
            fix = "run alibi-lm eval claims again"
            raise CheckpointError(Problem(str(self.folder), None, rule, fix))
        return checkpoint


def suite_runs(suite: ClaimsConfig) -> list[SuiteRun]:
    """Every run of a suite, seed by seed, so that an interrupted suite has whole pairs.

    Raises:
        ConfigError: with the problems of all runs' configs.
    """
    runs: list[SuiteRun] = []
    problems: list[Problem] = []
    for group, settings in suite.groups().items():
        for seed in settings.seeds:
            for model, changes in settings.models.items():
                folder = Path(suite.work) / group / model / f"seed_{seed}"
                try:
                    config = _config(settings.base, changes or {}, seed, folder)
                except ConfigError as error:
                    problems.extend(
                        Problem(f"{group}.models.{model}: {p.key}", p.value, p.rule, p.fix)
                        for p in error.problems
                    )
                    continue
                runs.append(SuiteRun(group, model, seed, folder, config))
    if problems:
        raise ConfigError(*problems)
    return runs


def _config(base: Mapping[str, Any], changes: Mapping[str, Any], seed: int, folder: Path) -> Config:
    raw = to_dict(base)
    raw["run"] = {"dir": str(folder)}
    settings = flatten(changes) if changes else {}
    texts = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    return build(Config, apply_overrides(raw, [*texts, f"train.seed={seed}"]))


def is_finished(run: SuiteRun, *, whole: bool = False) -> bool:
    """Whether a run has finished training with the suite's settings.

    Args:
        run: the run.
        whole: whether every file of the last checkpoint is compared with its digest.

    Raises:
        CheckpointError: it was trained with other settings, or for another number of steps.
    """
    try:
        checkpoint = open_checkpoint(run.folder, check=False)
    except CheckpointError:
        return False
    wanted = run.config
    problems = [
        problem
        for problem in config_problems(checkpoint.config, wanted)
        # The run's config states the vocabulary size that the suite leaves to the tokenizer.
        if problem.key != "model.vocab_size" or wanted.model.vocab_size is not None
    ]
    keys = [problem.key for problem in problems]
    if checkpoint.config.train.num_steps != wanted.train.num_steps:
        # Budget and schedule must be those of the other runs.
        keys.append("train.num_steps")
    if keys:
        rule = f"was trained with another {', '.join(keys)}"
        fix = "remove the folder, or give the suite another work folder"
        raise CheckpointError(Problem(str(run.folder), None, rule, fix))
    if checkpoint.step < wanted.train.num_steps:
        return False
    try:
        open_checkpoint(run.folder, check=whole)
    except CheckpointError as error:
        console.warning(f"{run.name} is trained again: {error}")
        return False
    return True


def train_all(runs: Sequence[SuiteRun], jobs: int, environment: Mapping[str, str]) -> None:
    """Train the unfinished runs, `jobs` at a time on equal shares of the cores.

    Raises:
        CheckpointError: a run failed; the others are still trained.
    """
    waiting = [run for run in runs if not is_finished(run, whole=True)]
    done = len(runs) - len(waiting)
    if done:
        console.info(f"claims: {done} of {len(runs)} runs are trained already")
    failed: list[Problem] = []
    threads = max(1, len(os.sched_getaffinity(0)) // jobs)
    variables = {**environment, "OMP_NUM_THREADS": str(threads)}
    with ThreadPoolExecutor(jobs) as pool:
        for number, problem in enumerate(pool.map(lambda run: _train(run, variables), waiting), 1):
            name = f"{waiting[number - 1].name} ({number}/{len(waiting)})"
            if problem is not None:
                failed.append(problem)
                console.warning(f"claims: could not train {name}")
            else:
                console.info(f"claims: trained {name}")
    if failed:
        raise CheckpointError(*failed)


def _train(run: SuiteRun, environment: Mapping[str, str]) -> Problem | None:
    run.folder.mkdir(parents=True, exist_ok=True)
    console.info(f"claims: training {run.name}, log in {run.folder / 'train.log'}")
    path = run.folder / CONFIG
    write_text(path, to_yaml(to_dict(run.config)))
    result = subprocess.run(
        [sys.executable, "-m", "alibi_lm", "train", str(path)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if result.returncode == 0:
        return None
    last_lines = " ".join(result.stderr.strip().splitlines()[-3:])
    rule = f"training {run.name} ended with exit code {result.returncode}: {last_lines}"
    return Problem(str(run.folder), None, rule, f"see {run.folder / 'train.log'}")
