"""The training loop: steps, reports, validation, checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import torch

from alibi_lm.checkpoint.folder import step_folders, step_name
from alibi_lm.config import Config
from alibi_lm.model.flops import flops_per_token
from alibi_lm.parallel.errors import disk_error, raise_on_all_ranks, run_on_all_ranks
from alibi_lm.parallel.process_group import rank, world_size
from alibi_lm.train.checkpointing.save import remove_old, save
from alibi_lm.train.data import TrainingData
from alibi_lm.train.engine.base import Engine, NotFinite, StepResult
from alibi_lm.train.fault_tolerance.heartbeat import (
    COMPUTING,
    READING,
    SAVING,
    VALIDATING,
    ActivityTracker,
)
from alibi_lm.train.fault_tolerance.preemption import Preemption
from alibi_lm.train.monitoring.metrics import Metrics
from alibi_lm.utils.errors import DataError, NotFiniteError, Problem, UserError
from alibi_lm.utils.logging import console
from alibi_lm.utils.memory import use_huge_pages


class Loop:
    """Trains from `step` (steps done so far) to the end. Every rank runs it."""

    def __init__(
        self,
        engine: Engine,
        training_data: TrainingData,
        config: Config,
        metrics: Metrics | None,
        peak_flops: float | None,
        preemption: Preemption,
        activity: ActivityTracker,
    ) -> None:
        self.engine = engine
        self.training_data = training_data
        self.config = config
        self.metrics = metrics
        self.preemption = preemption
        self.activity = activity
        self.run_folder = Path(config.run.dir)
        self._damaged: set[str] = set()
        self._pending_disk_error: UserError | None = None
        """The disk error of the metrics files, on the rank that writes them."""
        train = config.train
        self.tokens_per_step = train.global_batch_size * train.sequence_length
        self.flops_per_token = flops_per_token(config.model, train.sequence_length)
        self.peak_flops = None if peak_flops is None else peak_flops * world_size()

    def run(self, step: int) -> bool:
        """Train until `num_steps` (True), or until asked to stop (False, with a checkpoint).

        Raises:
            NotFiniteError: a loss or gradient is not finite; nothing of that step is saved.
            CheckpointError: a checkpoint cannot be written.
        """
        train = self.config.train
        # A run resumes from its newest good checkpoint, so any newer ones are damaged.
        newer = [path.name for path in step_folders(self.run_folder)]
        self._damaged = {name for name in newer if name > step_name(step)}
        while step < train.num_steps:
            self.activity.at(READING, step + 1)
            batches = self._batches(step)
            self.activity.at(COMPUTING, step + 1)
            try:
                asked = self.preemption.asked() or self._pending_disk_error is not None
                result = self.engine.step(batches, step, asked)
            except NotFinite as failure:
                raise self._not_finite(step, failure) from None
            use_huge_pages()
            step += 1
            if result.stop:
                raise_on_all_ranks(self._pending_disk_error)
            if step % train.log_interval == 0:
                self._log(step, result)
            interval = train.validation_interval
            if interval is not None and (step % interval == 0 or step == train.num_steps):
                self._paused(self._validate, step)
            due = step % train.checkpoint_interval == 0 or step == train.num_steps
            if due or result.stop:
                self._paused(self._save, step)
            if result.stop and step < train.num_steps:
                self._report_stop(step)
                return False
        return True

    def _report_stop(self, step: int) -> None:
        self.preemption.acknowledge()
        reason = self.preemption.reason or "another rank's request"
        console.info(f"stopped by {reason} after step {step:,}; re-run the same command to resume")

    def _batches(self, step: int) -> list[torch.Tensor]:
        if not self.engine.reads_data:
            return []
        mesh = self.engine.mesh
        try:
            return self.training_data.micro_batches(step, mesh.dp.rank, mesh.dp.size)
        except DataError:
            # Only the ranks that read the bad data know of it, and one of them reports it.
            console.muted = mesh.tp.rank + mesh.pp.rank > 0
            raise

    def _log(self, step: int, result: StepResult) -> None:
        if self.metrics is None:
            return
        try:
            self.metrics.log(
                step,
                result,
                tokens=step * self.tokens_per_step,
                tokens_per_step=self.tokens_per_step,
                flops_per_token=self.flops_per_token,
                peak_flops=self.peak_flops,
            )
        except OSError as failure:
            # The other ranks do not write; they learn of it with the next step.
            self._pending_disk_error = disk_error(failure, self.run_folder)

    def _paused(self, action: Callable[[int], None], step: int) -> None:
        """Run something that is not training, and leave its time out of the speed figures."""
        start = time.perf_counter()
        action(step)
        if self.metrics is not None:
            self.metrics.pause(time.perf_counter() - start)

    def _validate(self, step: int) -> None:
        self.activity.at(VALIDATING, step)
        train, dp = self.config.train, self.engine.mesh.dp
        losses = {}
        for multiple in train.validation_multiples:
            length = int(multiple * train.sequence_length)
            windows = self.training_data.validation_windows(length, dp.rank, dp.size)
            losses[length] = self.engine.evaluate(windows)
            if not math.isfinite(losses[length]):
                failure = NotFinite(f"validation loss {losses[length]} at length {length}")
                raise self._not_finite(step - 1, failure)
        run_on_all_ranks(lambda: self._validated(step, losses), self.run_folder)

    def _validated(self, step: int, losses: dict[int, float]) -> None:
        if self.metrics is not None:
            self.metrics.validation(step, losses)

    def _save(self, step: int) -> None:
        self.activity.at(SAVING, step)
        run_on_all_ranks(self._flush, self.run_folder)
        facts = {
            "tokens": step * self.tokens_per_step,
            "consumed_samples": step * self.config.train.global_batch_size,
            "data": self.training_data.facts(),
        }
        saved = save(self.engine, self.config, step, facts, self.training_data.tokenizer)
        self.activity.saved = saved
        run_on_all_ranks(lambda: self._saved(step), self.run_folder)

    def _flush(self) -> None:
        if self._pending_disk_error is not None:
            raise self._pending_disk_error
        if self.metrics is not None:
            self.metrics.flush()

    def _saved(self, step: int) -> None:
        console.info(f"checkpoint {self.activity.saved}")
        if rank() == 0:
            train = self.config.train
            self._damaged.discard(step_name(step))
            last, every = train.keep_last, train.keep_every
            remove_old(self.run_folder, step, last, every, self._damaged)

    def _not_finite(self, step: int, failure: NotFinite) -> NotFiniteError:
        good = self.activity.saved or "none yet"
        return NotFiniteError(
            Problem(
                f"step {step + 1}",
                None,
                f"{failure} on {self.training_data.where(step)}; last good checkpoint: {good}",
                "nothing was overwritten; lower train.learning_rate or look at that data",
            )
        )
