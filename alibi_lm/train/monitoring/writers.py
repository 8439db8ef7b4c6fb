"""Metric writers: TensorBoard, Weights & Biases, and those that other packages add. Rank 0 only."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from alibi_lm.config import Config
from alibi_lm.config_loading import flatten
from alibi_lm.utils import plugins
from alibi_lm.utils.errors import ConfigError, Problem
from alibi_lm.utils.files import stored_object, write_json
from alibi_lm.utils.logging import console

WANDB_ID = "wandb.json"
"""The file of a run folder that holds its id at Weights & Biases."""
CURVES = ("train/loss",)
"""Curves in TensorBoard's table of hyperparameters, beside the validation losses."""


class MetricWriter(Protocol):
    """Shows curves and hyper-parameters."""

    def hyperparameters(self, config: Config) -> None:
        """Show the resolved config."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point at `step` to each of these curves."""

    def flush(self) -> None:
        """Write everything to the disk."""

    def close(self) -> None:
        """Flush and close."""


class TensorBoardWriter:
    """Event files in the run folder's tensorboard/."""

    def __init__(self, config: Config, start_step: int) -> None:
        """Points after `start_step`, the checkpoint that a run resumes from, are replaced."""
        folder = Path(config.run.dir) / "tensorboard"
        self._writer = SummaryWriter(str(folder), purge_step=start_step + 1)

    def hyperparameters(self, config: Config) -> None:
        """As a text, and for the table in which runs are compared."""
        values = flatten(config)
        text = "\n".join(f"    {key}: {value}" for key, value in values.items())
        self._writer.add_text("config", text, 0)
        kinds = (bool, int, float, str)
        shown = {k: v if isinstance(v, kinds) else str(v) for k, v in values.items()}
        curves = [*CURVES, *(f"validation/loss_{length}" for length in _lengths(config))]
        # `SummaryWriter.add_hparams` would put them into a run of their own.
        file_writer = self._writer.file_writer
        assert file_writer is not None
        for summary in hparams(shown, dict.fromkeys(curves, 0.0)):
            file_writer.add_summary(summary)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point at `step` to each of these curves."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Write everything to the disk."""
        self._writer.flush()

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


def _lengths(config: Config) -> list[int]:
    """Lengths of validation losses; none where the run has no validation."""
    train = config.train
    if train.validation_interval is None or not config.data.validation:
        return []
    return sorted(
        {int(multiple * train.sequence_length) for multiple in train.validation_multiples}
    )


class WandbWriter:
    """A run at Weights & Biases, which the same run folder resumes after a stop."""

    def __init__(self, config: Config) -> None:
        """Start or resume it.

        Raises:
            ConfigError: the server cannot be reached, and offline mode is not set.
        """
        import wandb

        settings, run = config.train.wandb, Path(config.run.dir)
        assert settings is not None
        known = stored_object(run / WANDB_ID)
        identity = str(known["id"]) if known else secrets.token_hex(4)
        try:
            self._run: Any = wandb.init(
                project=settings.project,
                entity=settings.entity,
                group=settings.group,
                name=run.resolve().name,
                id=identity,
                resume="allow",
                dir=str(run),
                # W&B must neither capture our log nor write to the terminal.
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.Error as error:
            rule = f"wandb cannot start ({' '.join(str(error).split())[:160]})"
            fix = "log in by `wandb login`, set WANDB_MODE=offline, or leave train.wandb out"
            problem = Problem("train.wandb.project", settings.project, rule, fix)
            raise ConfigError(problem) from None
        write_json(run / WANDB_ID, {"id": identity})
        # A resumed run repeats steps after its checkpoint: steps are an axis, not a counter.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        console.info(f"wandb {self._run.dir if self._run.offline else self._run.url}")

    def hyperparameters(self, config: Config) -> None:
        """As the run's config."""
        self._run.config.update(flatten(config), allow_val_change=True)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point at `step` to each of these curves."""
        self._run.log({"step": step, **values})

    def flush(self) -> None:
        """Do nothing: another process writes."""

    def close(self) -> None:
        """Wait until everything is written or sent."""
        self._run.finish()


OpenWriter = Callable[[Config, int], MetricWriter]
"""Opens a writer for a config and the number of steps done so far."""
WRITERS: Mapping[str, OpenWriter] = {"tensorboard": TensorBoardWriter}
"""By the names of `train.metric_writers`; other packages add theirs as entry points."""


def check_writers(config: Config) -> None:
    """Refuse a metric writer whose package is not installed.

    Raises:
        ConfigError: naming it.
    """
    if config.train.wandb is not None and find_spec("wandb") is None:
        rule = "needs the package wandb, which is not installed"
        fix = "pip install wandb, or leave train.wandb out"
        project = config.train.wandb.project
        raise ConfigError(Problem("train.wandb.project", project, rule, fix))


def open_writers(config: Config, start_step: int) -> list[MetricWriter]:
    """The metric writers of a run that starts or resumes after step `start_step`."""
    writers = [_opener(name)(config, start_step) for name in config.train.metric_writers]
    if config.train.wandb is not None:
        writers.append(WandbWriter(config))
    for writer in writers:
        writer.hyperparameters(config)
    return writers


def _opener(name: str) -> OpenWriter:
    return WRITERS.get(name) or plugins.load_plugin(plugins.METRIC_WRITERS, name)
