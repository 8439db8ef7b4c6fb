"""The training engine: DeepSpeed behind `step(batches)` and `evaluate(batches)`."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from alibi_lm.checkpoint.fragments import FragmentReader
from alibi_lm.config import Config
from alibi_lm.model.decoder import Decoder
from alibi_lm.parallel.mesh import Mesh, ModelParallelUnit
from alibi_lm.train import state
from alibi_lm.train.deepspeed_config import zero_stage
from alibi_lm.train.distributed import device, sum_over_ranks
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


class Engine:
    """A decoder under DeepSpeed. Every rank calls every method."""

    def __init__(self, config: Config, ds_config: dict[str, Any], mesh: Mesh) -> None:
        self.config = config
        self.mesh = mesh
        decoder = Decoder(config.model, seed=config.train.seed, tp=mesh.tp)
        decoder.activation_checkpointing = config.train.activation_checkpointing
        self.stage = zero_stage(ds_config)
        self.deepspeed: DeepSpeedEngine
        # BF16_Optimizer prints memory figures unasked; an exception is not swallowed by this.
        with contextlib.redirect_stdout(io.StringIO()):
            self.deepspeed, *_ = deepspeed.initialize(
                model=decoder,
                model_parameters=parameter_groups(decoder, config.train.weight_decay),
                config=ds_config,
                mpu=ModelParallelUnit(mesh) if mesh.tp.size > 1 else None,
            )

    def step(self, batches: Sequence[torch.Tensor], step: int, stop: bool = False) -> StepResult:
        """One optimizer step over this rank's micro-batches, each int64 `[B, L + 1]`.

        `stop` says that this rank has been asked to stop; the result says whether any has.

        Raises:
            NotFinite: before the update, if the loss is not finite; after it, if the gradient
                norm is not (fp16 overflows aside, which loss scaling skips).
        """
        engine = self.deepspeed
        engine.train()
        rate = learning_rate(self.config.train, step)
        for group in engine.optimizer.param_groups:
            group["lr"] = rate
        total = torch.zeros((), dtype=torch.float64)
        for index, batch in enumerate(batches):
            batch = batch.to(device())
            loss = engine(batch[:, :-1], batch[:, 1:]).mean()
            total += loss.detach().double().cpu()
            if index == len(batches) - 1:
                # Every data-parallel rank has equally many samples, and the ranks that share them
                # have the same loss, so the mean over all ranks is the mean.
                summed, ranks, stops = sum_over_ranks(float(total) / len(batches), 1.0, stop)
                mean = summed / ranks
                if not math.isfinite(mean):
                    raise NotFinite(f"loss {mean}")
            engine.backward(loss)
            if index == len(batches) - 1 and self.stage == 0:
                norm = self._plain_grad_norm()
            engine.step()
        if self.stage != 0:
            norm = float(engine.get_global_grad_norm())
        skipped = bool(getattr(engine.optimizer, "overflow", False))
        if not math.isfinite(norm) and self.config.train.precision != "fp16":
            raise NotFinite(f"gradient norm {norm}")
        return StepResult(mean, norm, rate, skipped, stop=stops > 0)

    def _plain_grad_norm(self) -> float:
        # Without ZeRO, DeepSpeed clips without saying what the norm was.
        tp = self.mesh.tp
        gradients = [
            p.grad
            for p in self.deepspeed.module.parameters()
            if p.grad is not None and (tp.rank == 0 or getattr(p, "tensor_model_parallel", False))
        ]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if tp.size == 1:
            return norm
        return math.sqrt(sum_over_ranks(norm**2, group=tp.group)[0])

    @torch.no_grad()
    def evaluate(self, batches: Sequence[torch.Tensor | None]) -> float:
        """Mean loss per token over all ranks' batches, each int64 `[B, L + 1]`.

        Ranks may hold different numbers of tokens but must pass equally many entries; None
        stands for no batch, which still takes part in the collectives of ZeRO-3.
        """
        engine = self.deepspeed
        engine.eval()
        total, count = 0.0, 0.0
        for batch in batches:
            if batch is None:
                # The same calls as the other ranks: ZeRO-3 gathers weights as modules ask for them.
                nothing = torch.zeros(1, 1, dtype=torch.int64, device=device())
                engine(nothing, nothing)
                continue
            batch = batch.to(device())
            losses = engine(batch[:, :-1], batch[:, 1:])
            total += float(losses.double().sum())
            count += losses.numel()
        total, count = sum_over_ranks(total, count, group=self.mesh.dp.group)
        engine.train()
        return total / count

    def loss_scaler_state(self) -> dict[str, float] | None:
        """What fp16's dynamic loss scaling remembers; None where there is none."""
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
            state.load(self.deepspeed, self.mesh, reader, updates)
        saved = meta.get("loss_scaler")
        if saved and not weights_only and self.loss_scaler_state() is not None:
            for name in _SCALER_STATE:
                setattr(self.deepspeed.optimizer.loss_scaler, name, saved[name])
