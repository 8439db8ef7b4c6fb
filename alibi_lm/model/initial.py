"""Initial weights, drawn parameter by parameter from (seed, canonical name).

So every layout of a run, and every rank of it, starts from the same model, and a rank can draw
what it holds without drawing the rest.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from alibi_lm.model.config import ModelConfig
from alibi_lm.parallel.shard import shard_of

_RESIDUAL_OUTPUTS = ("attention.output.weight", "mlp.down.weight")


def generator(seed: int, key: str | int) -> torch.Generator:
    """A CPU generator whose stream depends on (seed, key) and on nothing else."""
    digest = hashlib.sha256(f"{seed}/{key}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def initial_value(config: ModelConfig, name: str, shape: Sequence[int], seed: int) -> Tensor:
    """The initial value of one whole parameter, fp32 on the CPU.

    Norm weights are 1 and biases 0. Matrices are normal with `initializer_range`; those that
    write to the residual stream are divided by sqrt(2 num_layers), so that its variance does not
    grow with depth (Radford et al. 2019, section 2.3).

    Args:
        config: the model's config.
        name: canonical name, for example `blocks.0.mlp.up.weight`.
        shape: whole (unsharded) shape.
        seed: the run's seed.
    """
    if name.endswith("norm.weight"):
        return torch.ones(*shape, dtype=torch.float32, device="cpu")
    if name.endswith(".bias"):
        return torch.zeros(*shape, dtype=torch.float32, device="cpu")
    deviation = config.initializer_range
    if name.endswith(_RESIDUAL_OUTPUTS):
        deviation /= math.sqrt(2 * config.num_layers)
    value = torch.empty(*shape, dtype=torch.float32, device="cpu")
    return value.normal_(0.0, deviation, generator=generator(seed, name))


@torch.no_grad()
def initialise(decoder: nn.Module, config: ModelConfig, seed: int) -> None:
    """Set every parameter to its initial value, or to the rank's slice of it."""
    for name, parameter in decoder.named_parameters():
        if parameter.is_meta:
            continue
        shard = shard_of(parameter)
        if shard is None:
            parameter.copy_(initial_value(config, name, parameter.shape, seed))
        else:
            whole = initial_value(config, shard.canonical_name(name), shard.shape, seed)
            parameter.copy_(shard.take(whole))
