"""The training engine: DeepSpeed behind `step(batches)` and `evaluate(batches)`."""

from __future__ import annotations

import contextlib
import io
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from alibi_lm.checkpoint.fragments import FragmentReader
from alibi_lm.config import Config
from alibi_lm.model.layers import set_pruning_tolerance
from alibi_lm.parallel.mesh import Mesh
from alibi_lm.parallel.process_group import sum_over_ranks
from alibi_lm.train.engine import optimizer_state
from alibi_lm.train.engine.compile import compile_blocks
from alibi_lm.train.engine.deepspeed_config import zero_stage
from alibi_lm.train.schedule import learning_rate

_SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class NotFinite(Exception):
    """A loss or gradient norm that is not finite; says which."""


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step reports."""

    loss: float
    """Mean loss of all tokens of the global batch, in nats."""
    grad_norm: float
    """Global gradient norm before clipping."""
    learning_rate: float
    skipped: bool
    """Whether fp16 loss scaling skipped the update."""
    stop: bool = False
    """Whether any rank has been asked to stop."""


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices with decay, vectors (norms and biases) without."""
    matrices = [p for p in model.parameters() if len(getattr(p, "ds_shape", p.shape)) >= 2]
    vectors = [p for p in model.parameters() if len(getattr(p, "ds_shape", p.shape)) < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


class Engine(ABC):
    """This rank's part of a model under DeepSpeed. Every rank calls every method."""

    def __init__(
        self, config: Config, ds_config: dict[str, Any], mesh: Mesh, *, initial: bool = True
    ) -> None:
        """Set up the model and its optimizer; `initial` False leaves the weights to `load`."""
        self.config = config
        self.mesh = mesh
        self.stage = zero_stage(ds_config)
        self.deepspeed: DeepSpeedEngine
        # Silences the layers and memory that DeepSpeed prints; exceptions still pass.
        with contextlib.redirect_stdout(io.StringIO()):
            model, mpu = self._make_model(ds_config, config.train.seed if initial else None)
            set_pruning_tolerance(model, config.train.pruning_tolerance)
            if config.train.compile:
                compile_blocks(model)
            self.deepspeed, *_ = deepspeed.initialize(
                model=model,
                model_parameters=parameter_groups(model, config.train.weight_decay),
                config=ds_config,
                mpu=mpu,
            )

    @abstractmethod
    def _make_model(self, ds_config: dict[str, Any], seed: int | None) -> tuple[Any, Any]:
        """This rank's part of the model, and what `deepspeed.initialize` takes as mpu."""

    @property
    def reads_data(self) -> bool:
        """Whether this rank needs the micro-batches of a step."""
        return True

    @abstractmethod
    def step(self, batches: Sequence[torch.Tensor], step: int, stop: bool = False) -> StepResult:
        """One optimizer step over this rank's micro-batches, each int64 `[B, L + 1]`.

        `stop` says that this rank has been asked to stop; the result says whether any has.

        Raises:
            NotFinite: before the update, if the loss is not finite; after it, if the gradient
                norm is not (fp16 overflows aside, which loss scaling skips).
        """

    @abstractmethod
    def evaluate(self, batches: Sequence[torch.Tensor | None]) -> float:
        """Mean loss per token over all ranks' batches, each int64 `[B, L + 1]`.

        Ranks may hold different numbers of tokens but must pass equally many entries; None
        stands for no batch.
        """

    def _set_learning_rate(self, step: int) -> float:
        rate = learning_rate(self.config.train, step)
        for group in self.deepspeed.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _result(self, loss: float, norm: float, rate: float, stop: bool) -> StepResult:
        """The result of a step that has been done.

        Raises:
            NotFinite: the gradient norm is not finite.
        """
        if self.stage != 0:
            norm = float(self.deepspeed.get_global_grad_norm())
        skipped = bool(getattr(self.deepspeed.optimizer, "overflow", False))
        if not math.isfinite(norm) and self.config.train.precision != "fp16":
            raise NotFinite(f"gradient norm {norm}")
        return StepResult(loss, norm, rate, skipped, stop)

    def _clip_gradients(self) -> float:
        """Without ZeRO: clip the gradients, and return their global norm before that.

        DeepSpeed's own clipping treats later stages as copies of the first, counts a tied matrix
        twice, and does not return the norm.
        """
        tp, pp, dp = self.mesh.tp, self.mesh.pp, self.mesh.dp
        gradients = [p.grad for p in self.deepspeed.module.parameters() if p.grad is not None]
        counted = [
            p.grad
            for p in self.deepspeed.module.parameters()
            if p.grad is not None
            and (tp.rank == 0 or getattr(p, "tensor_model_parallel", False))
            and not getattr(p, "ds_pipe_replicated", False)
        ]
        norm = float(torch.nn.utils.get_total_norm(counted))
        if tp.size * pp.size > 1:
            norm = math.sqrt(sum_over_ranks(norm**2)[0] / dp.size)
        limit = self.config.train.gradient_clipping
        if limit and norm > limit:
            torch._foreach_mul_(gradients, limit / norm)
        return norm

    def loss_scaler_state(self) -> dict[str, float] | None:
        """The state of fp16's dynamic loss scaling, or None without it."""
        scaler = getattr(self.deepspeed.optimizer, "loss_scaler", None)
        if scaler is None or not getattr(scaler, "dynamic", False):
            return None
        return {name: getattr(scaler, name) for name in _SCALER_STATE}

    def load(self, step_folder: Path, meta: dict[str, Any], *, weights_only: bool = False) -> None:
        """Fill the states from a checkpoint of any layout; `weights_only` leaves Adam at its start.

        Raises:
            CheckpointError: the checkpoint lacks a part.
        """
        with FragmentReader(step_folder, meta) as reader:
            updates = None if weights_only else int(meta["optimizer_updates"])
            optimizer_state.load(self.deepspeed, self.mesh, reader, updates)
        saved = meta.get("loss_scaler")
        if saved and not weights_only and self.loss_scaler_state() is not None:
            for name in _SCALER_STATE:
                setattr(self.deepspeed.optimizer.loss_scaler, name, saved[name])
