"""The parameters that a rank holds, from the model's own code on torch's `meta` device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn

from alibi_lm.model.config import ModelConfig
from alibi_lm.model.layers import layers
from alibi_lm.parallel.mesh import ParallelDim
from alibi_lm.parallel.shard import shard_of
from alibi_lm.plan.planned_run import PlannedRun


@dataclass(frozen=True)
class HeldParameter:
    """A parameter of a rank."""

    name: str
    """Its name in a whole decoder of this rank."""
    numel: int
    """Elements held, padding of the vocabulary included."""
    owned: int
    """Elements of the whole model that are counted on this rank: over all ranks of a
    data-parallel place they sum to the model's."""
    is_matrix: bool
    """Whether it has weight decay, and so is in the first of the optimizer's groups."""


def held_parameters(run: PlannedRun, rank: int) -> list[HeldParameter]:
    """The parameters of a rank (before ZeRO splits them), in module order."""
    place = run.layout.place(rank)
    axis = ParallelDim(place.tensor, run.layout.tp)
    return _stage_parameters(run, place.stage, axis)


def _stage_parameters(run: PlannedRun, stage: int, axis: ParallelDim) -> list[HeldParameter]:
    model = run.config.model
    first, block, last = _layer_parameters(_key(model), axis.rank, axis.size)
    held: list[HeldParameter] = []
    for layer in run.stages[stage]:
        if layer == 0:
            held.extend(_named("embedding", first))
        elif layer <= model.num_layers:
            held.extend(_named(f"blocks.{layer - 1}", block))
        else:
            held.extend(_named("head", last))
    if model.tied_embeddings and run.layout.pp > 1 and stage == run.layout.pp - 1:
        held.append(_copy_of_embedding(first))
    return held


def _copy_of_embedding(embedding: tuple[HeldParameter, ...]) -> HeldParameter:
    """The last stage's copy of a tied matrix, which counts on the first stage."""
    weight = next(parameter for parameter in embedding if parameter.name == "weight")
    return HeldParameter("embedding.weight", weight.numel, 0, weight.is_matrix)


def _named(layer: str, parameters: tuple[HeldParameter, ...]) -> Iterator[HeldParameter]:
    for held in parameters:
        yield HeldParameter(f"{layer}.{held.name}", held.numel, held.owned, held.is_matrix)


def _key(model: ModelConfig) -> tuple[tuple[str, object], ...]:
    # Scaling changes no parameter.
    return tuple(sorted((key, value) for key, value in vars(model).items() if key != "scaling"))


@lru_cache(maxsize=64)
def _layer_parameters(
    model: tuple[tuple[str, object], ...], rank: int, size: int
) -> tuple[tuple[HeldParameter, ...], ...]:
    """Those of the Embedding, of one Block (all are alike) and of the Head."""
    config = ModelConfig(**dict(model))  # type: ignore[arg-type]
    makers = layers(config, ParallelDim(rank, size))
    with torch.device("meta"):
        modules = [makers[0](), makers[1](), makers[-1]()]
    return tuple(
        tuple(_held(name, parameter, rank) for name, parameter in module.named_parameters())
        for module in modules
    )


def _held(name: str, parameter: nn.Parameter, tensor_rank: int) -> HeldParameter:
    shard = shard_of(parameter)
    if shard is None:
        owned = parameter.numel() if tensor_rank == 0 else 0
    else:
        inner = math.prod(shard.shape) // shard.shape[shard.dim]
        owned = shard.is_primary_copy * inner * sum(part.length for part in shard.intervals)
    return HeldParameter(name, parameter.numel(), owned, parameter.ndim > 1)
