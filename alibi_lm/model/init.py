"""Initial weights, drawn parameter by parameter from (seed, canonical name).

So every layout of a run, and every rank of it, starts from the same model, and a rank can draw
what it holds without drawing the rest.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from alibi_lm.model.config import ModelConfig
from alibi_lm.parallel.shard import StridedReader, shard_of

DRAWN_AT_ONCE = 1 << 24
"""Elements that come from one generator."""

_RESIDUAL_OUTPUTS = ("attention.output.weight", "mlp.down.weight")


def generator(seed: int, key: str | int) -> torch.Generator:
    """A CPU generator whose stream depends on (seed, key) and on nothing else."""
    digest = hashlib.sha256(f"{seed}/{key}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def initial_value(config: ModelConfig, name: str, shape: Sequence[int], seed: int) -> Tensor:
    """The initial value of one whole parameter, fp32 on the CPU: see `initial_elements`."""
    return initial_elements(config, name, shape, 0, math.prod(shape), seed).view(*shape)


def initial_elements(
    config: ModelConfig, name: str, shape: Sequence[int], start: int, numel: int, seed: int
) -> Tensor:
    """Elements [start, start + numel) of one flattened whole parameter, fp32 on the CPU.

    Norm weights are 1; biases and the logarithms of learned slopes' ratios are 0. Matrices are
    normal with `initializer_range`; those that write to the residual stream are divided by
    sqrt(2 num_layers), so that its variance does not grow with depth (Radford et al. 2019, section
    2.3). They are drawn in portions, each from its own generator: a rank draws what it holds
    without drawing the rest.

    Args:
        config: the model's config.
        name: canonical name, for example `blocks.0.mlp.up.weight`.
        shape: whole (unsharded) shape.
        start: first element.
        numel: number of elements.
        seed: the run's seed.
    """
    if name.endswith("norm.weight"):
        return torch.ones(numel, dtype=torch.float32, device="cpu")
    if name.endswith((".bias", ".log_slope_ratio")):
        return torch.zeros(numel, dtype=torch.float32, device="cpu")
    deviation = config.initializer_range
    if name.endswith(_RESIDUAL_OUTPUTS):
        deviation /= math.sqrt(2 * config.num_layers)
    result = torch.empty(numel, dtype=torch.float32, device="cpu")
    stop = start + numel
    for portion in range(start // DRAWN_AT_ONCE, -(-stop // DRAWN_AT_ONCE)):
        first = portion * DRAWN_AT_ONCE
        # A portion is always drawn whole: torch draws other values for another size.
        size = min(DRAWN_AT_ONCE, math.prod(shape) - first)
        low, high = max(start, first), min(stop, first + size)
        drawn = (
            torch.empty(size, dtype=torch.float32, device="cpu")
            if size > high - low
            else (result[low - start : high - start])
        )
        key = f"{name}/{portion}" if portion else name
        drawn.normal_(0.0, deviation, generator=generator(seed, key))
        if size > high - low:
            result[low - start : high - start] = drawn[low - first : high - first]
    return result


@dataclass(frozen=True)
class InitialValues(StridedReader):
    """The initial model, read like a checkpoint: any part of any parameter."""

    config: ModelConfig
    seed: int
    shapes: Mapping[str, Sequence[int]]
    """Whole shapes by canonical name."""

    def read(self, name: str, kind: str, start: int, numel: int) -> Tensor:
        """Elements [start, start + numel) of a flattened whole parameter, fp32 `[numel]`."""
        assert kind == "param", f"initial weights have no {kind}"
        return initial_elements(self.config, name, self.shapes[name], start, numel, self.seed)


@torch.no_grad()
def initialize(
    parameters: Iterable[tuple[str, nn.Parameter]], config: ModelConfig, seed: int
) -> None:
    """Set every parameter, given by canonical name, to its initial value or the rank's slice."""
    for name, parameter in parameters:
        if parameter.is_meta:
            continue
        shard = shard_of(parameter)
        if shard is None:
            parameter.copy_(initial_value(config, name, parameter.shape, seed))
            continue
        name = shard.canonical_name(name)
        values = InitialValues(config, seed, {name: shard.shape})
        parameter.zero_()  # padding stays so
        flat = parameter.view(-1)
        for first, strided in shard.slices(0, parameter.numel()):
            flat[first : first + strided.numel] = values.read_slice(name, "param", strided)
