"""The engine of a model that is split into pipeline stages, with tensor parallelism and ZeRO 0, 1.

DeepSpeed's pipeline engine runs the schedule. Two of its instructions are replaced, because
DeepSpeed updates without checking that the loss is finite, and skips some tied gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from alibi_lm.model.cross_entropy import IGNORED
from alibi_lm.parallel.process_group import sum_over_ranks
from alibi_lm.train.engine.base import Engine, NotFinite, StepResult
from alibi_lm.train.engine.pipeline_module import (
    OptimizerStep,
    PipelineDecoder,
    ReduceTiedGrads,
)
from alibi_lm.train.engine.pipeline_module import PipelineEngine as DeepSpeedPipelineEngine


class PipelineEngine(Engine):
    """A decoder of which this rank runs some layers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._loss = self._norm = self._stops = 0.0
        self._asked = False
        self.deepspeed.set_batch_fn(self._take_targets)
        self.deepspeed._INSTRUCTION_MAP = DeepSpeedPipelineEngine._INSTRUCTION_MAP | {
            OptimizerStep: self._check_and_update,
            ReduceTiedGrads: _reduce_tied_gradients,
        }

    def _make_model(self, ds_config: dict[str, Any], seed: int | None) -> tuple[Any, Any]:
        module = PipelineDecoder(self.config.model, self.mesh, seed)
        module.activation_checkpointing = self.config.train.activation_checkpointing
        return module, None

    @property
    def reads_data(self) -> bool:
        """Whether this is the first stage, which embeds, or the last, which compares."""
        return self.mesh.pp.rank in (0, self.mesh.pp.size - 1)

    @property
    def _is_last(self) -> bool:
        return self.mesh.pp.rank == self.mesh.pp.size - 1

    def step(self, batches: Sequence[Tensor], step: int, stop: bool = False) -> StepResult:
        """One optimizer step: see `Engine`."""
        rate = self._set_learning_rate(step)
        self._asked = stop
        self.deepspeed.train_batch((batch[:, :-1], batch[:, 1:]) for batch in batches)
        return self._result(self._loss, self._norm, rate, self._stops > 0)

    def _take_targets(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Give the last stage the targets of a micro-batch, loaded just before its pass."""
        self.deepspeed.module.targets = batch[1]
        return batch

    def _check_and_update(self, engine: Any, lr_kwargs: Any = None) -> None:
        """Agree on the loss and on whether to stop; then clip (without ZeRO) and update."""
        own = float(engine.total_loss) / engine.micro_batches if self._is_last else 0.0
        summed, ranks, self._stops = sum_over_ranks(own, float(self._is_last), self._asked)
        self._loss = summed / ranks
        if not math.isfinite(self._loss):
            raise NotFinite(f"loss {self._loss}")
        if self.stage == 0:
            self._norm = self._clip_gradients()
        DeepSpeedPipelineEngine._exec_optimizer_step(engine, lr_kwargs)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Tensor | None]) -> float:
        """Mean loss per token: see `Engine`."""
        module = self.deepspeed.module
        module.evaluated = [0.0, 0.0]
        # The stages make their buffers for one shape, so all batches get the largest.
        self.deepspeed.reset_activation_shape()
        padded = list(_padded(batches))
        self.deepspeed.eval_batch(iter(padded), num_micro_batches=len(padded))
        self.deepspeed.reset_activation_shape()
        total, count = sum_over_ranks(*module.evaluated)
        return total / count


def _padded(batches: Sequence[Tensor | None]) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and targets [B, L] of every entry, all of one shape; what is added has no loss."""
    shapes = [batch.shape for batch in batches if batch is not None]
    rows = max((shape[0] for shape in shapes), default=1)
    width = max((shape[1] for shape in shapes), default=2) - 1
    for batch in batches:
        tokens = torch.zeros(rows, width, dtype=torch.int64)
        targets = torch.full_like(tokens, IGNORED)
        if batch is not None:
            tokens[: len(batch), : batch.shape[1] - 1] = batch[:, :-1]
            targets[: len(batch), : batch.shape[1] - 1] = batch[:, 1:]
        yield tokens, targets


def _reduce_tied_gradients(engine: Any) -> None:
    """Sum a tied matrix's gradients of the first and the last stage, wherever they are kept.

    DeepSpeed's own instruction passes over one that is kept in fp32 beside fp16 weights.
    """
    for weight, group in engine.module.get_tied_weights_and_groups():
        if engine.using_bf16_optimizer:
            gradient = weight._hp_grad
        else:
            gradient = getattr(weight, "grad_accum", None)
            gradient = weight.grad if gradient is None else gradient
        assert gradient is not None, "a tied matrix has no gradient"
        dist.all_reduce(gradient, group=group)
