"""Every rank's part of the fp32 weights and Adam moments, whatever the ZeRO stage.

DeepSpeed keeps the states in flat buffers that differ by stage. Here each becomes a list of
`Fragment`: which elements of which (flattened) parameter this rank holds, and where. Saving
writes the fragments; loading fills them from any checkpoint, written under any layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from alibi_lm.checkpoint.fragments import MOMENTS, PARAM, FragmentReader
from alibi_lm.train.distributed import rank, world_size


@dataclass(frozen=True)
class Fragment:
    """Elements [start, start + numel) of a flattened parameter, held by this rank."""

    name: str
    parameter: torch.nn.Parameter
    start: int
    numel: int
    flat: torch.Tensor
    """The optimizer's own tensor, whose elements from `offset` on are the fragment."""
    offset: int
    owned: bool = True
    """Whether this rank is the one that writes the fragment to a checkpoint."""

    def master(self) -> torch.Tensor:
        """The fp32 weights of the fragment, a view."""
        return self.flat.detach().view(-1).narrow(0, self.offset, self.numel)


def fragments(engine: DeepSpeedEngine) -> Iterator[Fragment]:
    """This rank's fragments, in the order of the model's parameters."""
    stage = engine.zero_optimization_stage()
    for name, parameter in engine.module.named_parameters():
        if stage == 0:
            yield from _replicated(name, parameter)
        elif stage == 3:
            yield from _fully_sharded(engine, name, parameter)
        else:
            yield from _optimizer_sharded(engine, name, parameter)


def _replicated(name: str, parameter: torch.nn.Parameter) -> Iterator[Fragment]:
    # Every rank holds everything; each writes its share, and each must load everything.
    numel, ranks, me = parameter.numel(), world_size(), rank()
    for part in range(ranks):
        low, high = numel * part // ranks, numel * (part + 1) // ranks
        if low < high:
            yield Fragment(name, parameter, low, high - low, parameter, low, owned=part == me)


def _optimizer_sharded(
    engine: DeepSpeedEngine, name: str, parameter: torch.nn.Parameter
) -> Iterator[Fragment]:
    mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]
    if mapping is None:
        return
    group = mapping.param_group_index
    optimizer = engine.optimizer
    flats = getattr(optimizer, "single_partition_of_fp32_groups", None)
    flat = (optimizer.fp32_groups_flat_partition if flats is None else flats)[group]
    address, target = mapping.lp_fragment_address, mapping.hp_fragment_address
    yield Fragment(name, parameter, address.start, address.numel, flat, target.start)


def _fully_sharded(
    engine: DeepSpeedEngine, name: str, parameter: torch.nn.Parameter
) -> Iterator[Fragment]:
    optimizer = engine.optimizer
    group, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
    size = parameter.ds_tensor.ds_numel  # type: ignore[attr-defined]
    start = size * rank()
    numel = min(size, parameter.ds_numel - start)  # type: ignore[attr-defined]
    if numel > 0:
        flat = optimizer.fp32_partitioned_groups_flat[group]
        yield Fragment(name, parameter, start, numel, flat, offset)


def parameter_shapes(engine: DeepSpeedEngine) -> dict[str, list[int]]:
    """The full shape of every parameter by canonical name."""
    return {
        name: list(getattr(parameter, "ds_shape", parameter.shape))
        for name, parameter in engine.module.named_parameters()
    }


def base_optimizer(engine: DeepSpeedEngine) -> torch.optim.Optimizer:
    """The AdamW that DeepSpeed wraps; its state is keyed by the flat tensors."""
    return engine.basic_optimizer


def _moments(engine: DeepSpeedEngine, flat: torch.Tensor) -> dict[str, Any]:
    """AdamW's state of a flat tensor, made with zeros before the first step."""
    state = base_optimizer(engine).state[flat]
    if "exp_avg" not in state:
        fused_torch = isinstance(base_optimizer(engine), torch.optim.AdamW)
        device = flat.device
        state["step"] = torch.zeros((), dtype=torch.float32, device=device) if fused_torch else 0
        for kind in MOMENTS:
            state[kind] = torch.zeros_like(flat, dtype=torch.float32).detach()
    return state


def _flats(engine: DeepSpeedEngine) -> list[torch.Tensor]:
    """The optimizer's flat tensors; ZeRO-3 takes them out of the groups between steps."""
    return list({id(fragment.flat): fragment.flat for fragment in fragments(engine)}.values())


def num_updates(engine: DeepSpeedEngine) -> int:
    """How many times Adam has stepped; below the training step where fp16 skipped some."""
    optimizer = base_optimizer(engine)
    counts = {int(group["step"]) for group in optimizer.param_groups if "step" in group}
    states = [optimizer.state[flat] for flat in _flats(engine) if flat in optimizer.state]
    counts |= {int(state["step"]) for state in states if "step" in state}
    if len(counts) > 1:
        raise AssertionError(f"parts of the optimizer disagree on their step: {sorted(counts)}")
    return counts.pop() if counts else 0


def owned_tensors(engine: DeepSpeedEngine) -> Iterator[tuple[Fragment, str, torch.Tensor]]:
    """What this rank writes to a checkpoint: (fragment, kind, fp32 view on the device)."""
    for fragment in fragments(engine):
        if not fragment.owned:
            continue
        yield fragment, PARAM, fragment.master()
        state = _moments(engine, fragment.flat)
        for kind in MOMENTS:
            yield fragment, kind, _slice(state[kind], fragment)


def _slice(tensor: torch.Tensor, fragment: Fragment) -> torch.Tensor:
    return tensor.view(-1).narrow(0, fragment.offset, fragment.numel)


@torch.no_grad()
def load(engine: DeepSpeedEngine, reader: FragmentReader, updates: int | None) -> None:
    """Fill this rank's states from a checkpoint; `updates` None loads the weights only."""
    for fragment in fragments(engine):
        where = (fragment.start, fragment.numel)
        fragment.master().copy_(reader.read(fragment.name, PARAM, *where))
        if updates is None:
            continue
        state = _moments(engine, fragment.flat)
        for kind in MOMENTS:
            _slice(state[kind], fragment).copy_(reader.read(fragment.name, kind, *where))
    if updates is not None:
        _set_updates(engine, updates)
    _refresh_module(engine, reader)


def _set_updates(engine: DeepSpeedEngine, updates: int) -> None:
    for group in base_optimizer(engine).param_groups:
        if "step" in group:
            group["step"] = updates
    for flat in _flats(engine):
        state = _moments(engine, flat)
        if isinstance(state["step"], torch.Tensor):
            state["step"].fill_(updates)
        else:
            state["step"] = updates


def _refresh_module(engine: DeepSpeedEngine, reader: FragmentReader) -> None:
    """Set the weights that forward uses to the rounded fp32 ones."""
    if engine.zero_optimization_stage() == 3:
        for fragment in fragments(engine):
            shard = fragment.parameter.ds_tensor  # type: ignore[attr-defined]
            shard.narrow(0, 0, fragment.numel).copy_(fragment.master())
        return
    for name, parameter in engine.module.named_parameters():
        parameter.copy_(reader.tensor(name))
