"""The engine without pipeline stages: tensor parallelism and ZeRO 0 to 3."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import deepspeed
import torch

from alibi_lm.config import Config
from alibi_lm.model.decoder import Decoder
from alibi_lm.model.init import InitialValues
from alibi_lm.parallel.device import get_device
from alibi_lm.parallel.mesh import Mesh, ModelParallelUnit
from alibi_lm.parallel.process_group import sum_over_ranks
from alibi_lm.train.engine import optimizer_state
from alibi_lm.train.engine.base import Engine, NotFinite, StepResult
from alibi_lm.train.engine.deepspeed_config import zero_stage


class PlainEngine(Engine):
    """A decoder that every rank runs from the first layer to the last."""

    def __init__(self, *args: Any, initial: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, initial=initial, **kwargs)
        if initial and self.stage == 3:
            shapes = optimizer_state.parameter_shapes(self.deepspeed)
            values = InitialValues(self.config.model, self.config.train.seed, shapes)
            optimizer_state.load(self.deepspeed, self.mesh, values, None)

    def _make_model(self, ds_config: dict[str, Any], seed: int | None) -> tuple[Any, Any]:
        config, mesh = self.config, self.mesh
        mpu = ModelParallelUnit(mesh) if mesh.tp.size > 1 else None
        if zero_stage(ds_config) == 3:
            # Each layer is partitioned as it is built: no rank ever holds the whole model.
            with deepspeed.zero.Init(
                data_parallel_group=mesh.dp.group, config_dict_or_path=ds_config, mpu=mpu
            ):
                decoder = Decoder(config.model, seed=None, tp=mesh.tp)
        else:
            decoder = Decoder(config.model, seed=seed, tp=mesh.tp)
        decoder.activation_checkpointing = config.train.activation_checkpointing
        return decoder, mpu

    def step(self, batches: Sequence[torch.Tensor], step: int, stop: bool = False) -> StepResult:
        """One optimizer step: see `Engine`."""
        engine = self.deepspeed
        engine.train()
        rate = self._set_learning_rate(step)
        total = torch.zeros((), dtype=torch.float64)
        mean = stops = norm = 0.0
        for index, batch in enumerate(batches):
            batch = batch.to(get_device())
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
                norm = self._clip_gradients()
            engine.step()
        return self._result(mean, norm, rate, stops > 0)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[torch.Tensor | None]) -> float:
        """Mean loss per token: see `Engine`."""
        engine = self.deepspeed
        engine.eval()
        total, count = 0.0, 0.0
        for batch in batches:
            if batch is None:
                # The same calls as on the other ranks: ZeRO-3 gathers weights in every forward.
                nothing = torch.zeros(1, 1, dtype=torch.int64, device=get_device())
                engine(nothing, nothing)
                continue
            batch = batch.to(get_device())
            losses = engine(batch[:, :-1], batch[:, 1:])
            total += float(losses.double().sum())
            count += losses.numel()
        total, count = sum_over_ranks(total, count)
        engine.train()
        return total / count


def make_engine(
    config: Config, ds_config: dict[str, Any], mesh: Mesh, *, initial: bool = True
) -> Engine:
    """The engine of a layout; `initial` False leaves the weights unset, to be loaded."""
    if mesh.pp.size == 1:
        return PlainEngine(config, ds_config, mesh, initial=initial)
    # Imported here: DeepSpeed's pipeline is needed by pipelines only.
    from alibi_lm.train.engine.pipeline import PipelineEngine

    return PipelineEngine(config, ds_config, mesh, initial=initial)
