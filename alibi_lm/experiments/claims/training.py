"""Training the models of a claims suite, one run a model and seed, each only once."""

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

from alibi_lm.checkpoint.step import Step, open_run
from alibi_lm.config import Config
from alibi_lm.config_loading import apply_overrides, build, flatten, to_dict, to_yaml
from alibi_lm.experiments.claims.config import ClaimsConfig
from alibi_lm.train.checkpointing.resume import config_problems
from alibi_lm.utils.errors import CheckpointError, ConfigError, Problem
from alibi_lm.utils.files import write_text
from alibi_lm.utils.logging import console

CONFIG = "claims_run.yaml"


@dataclass(frozen=True)
class Member:
    """One run of a suite: a model of a group, from one seed."""

    group: str
    model: str
    seed: int
    folder: Path
    config: Config

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.group}/{self.model} seed {self.seed}"

    def checkpoint(self) -> Step:
        """Its finished checkpoint, every file compared with its digest.

        Raises:
            CheckpointError: it has not been trained to its end.
        """
        step = open_run(self.folder)
        if step.step < self.config.train.num_steps:
            rule = f"ends at step {step.step:,} of {self.config.train.num_steps:,}"
            fix = "run alibi-lm eval claims again"
            raise CheckpointError(Problem(str(self.folder), None, rule, fix))
        return step


def members(suite: ClaimsConfig) -> list[Member]:
    """Every run of a suite, seed by seed, so that a suite cut short has whole pairs.

    Raises:
        ConfigError: with the problems of all runs' configs.
    """
    found: list[Member] = []
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
                found.append(Member(group, model, seed, folder, config))
    if problems:
        raise ConfigError(*problems)
    return found


def _config(base: Mapping[str, Any], changes: Mapping[str, Any], seed: int, folder: Path) -> Config:
    raw = to_dict(base)
    raw["run"] = {"dir": str(folder)}
    settings = flatten(changes) if changes else {}
    texts = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    return build(Config, apply_overrides(raw, [*texts, f"train.seed={seed}"]))


def is_finished(member: Member, *, whole: bool = False) -> bool:
    """Whether a run has been trained to its end with the suite's settings.

    Args:
        member: the run.
        whole: a last checkpoint with a damaged file does not count.

    Raises:
        CheckpointError: it was trained with other settings, or for another number of steps.
    """
    try:
        step = open_run(member.folder, check=False)
    except CheckpointError:
        return False
    mine = member.config
    problems = [
        problem
        for problem in config_problems(step.config, mine)
        # A run's own config names the vocabulary that the suite leaves to the tokenizer.
        if problem.key != "model.vocab_size" or mine.model.vocab_size is not None
    ]
    keys = [problem.key for problem in problems]
    if step.config.train.num_steps != mine.train.num_steps:
        # A run may go on for longer, but then its budget and its schedule are not the others'.
        keys.append("train.num_steps")
    if keys:
        rule = f"was trained with another {', '.join(keys)}"
        fix = "remove the folder, or give the suite another work folder"
        raise CheckpointError(Problem(str(member.folder), None, rule, fix))
    if step.step < mine.train.num_steps:
        return False
    try:
        open_run(member.folder, check=whole)
    except CheckpointError as error:
        console.warning(f"{member.name} is trained again: {error}")
        return False
    return True


def train_all(runs: Sequence[Member], jobs: int, environment: Mapping[str, str]) -> None:
    """Train every run that is not finished, `jobs` at a time on equal shares of the cores.

    Raises:
        CheckpointError: a run ended without its last checkpoint; the others are still trained.
    """
    waiting = [member for member in runs if not is_finished(member, whole=True)]
    done = len(runs) - len(waiting)
    if done:
        console.info(f"claims: {done} of {len(runs)} runs are trained already")
    failed: list[Problem] = []
    threads = max(1, len(os.sched_getaffinity(0)) // jobs)
    own = {**environment, "OMP_NUM_THREADS": str(threads)}
    with ThreadPoolExecutor(jobs) as pool:
        for number, problem in enumerate(pool.map(lambda member: _train(member, own), waiting), 1):
            name = f"{waiting[number - 1].name} ({number}/{len(waiting)})"
            if problem is not None:
                failed.append(problem)
                console.warning(f"claims: could not train {name}")
            else:
                console.info(f"claims: trained {name}")
    if failed:
        raise CheckpointError(*failed)


def _train(member: Member, environment: Mapping[str, str]) -> Problem | None:
    member.folder.mkdir(parents=True, exist_ok=True)
    console.info(f"claims: training {member.name}, log in {member.folder / 'train.log'}")
    path = member.folder / CONFIG
    write_text(path, to_yaml(to_dict(member.config)))
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
    said = " ".join(result.stderr.strip().splitlines()[-3:])
    rule = f"training {member.name} ended with exit code {result.returncode}: {said}"
    return Problem(str(member.folder), None, rule, f"see {member.folder / 'train.log'}")
