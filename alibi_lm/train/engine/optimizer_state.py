"""Every rank's part of the fp32 weights and Adam moments, whatever the ZeRO stage and the split.

DeepSpeed keeps the states in flat buffers that differ by stage. Here each becomes a list of
`Fragment`: which elements of which (flattened) whole tensor this rank holds, and where. Saving
writes the fragments; loading fills them from any checkpoint, written under any layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from alibi_lm.checkpoint.fragments import MOMENTS, PARAM
from alibi_lm.parallel.mesh import Mesh
from alibi_lm.parallel.shard import StridedReader, StridedSlice, shard_of


@dataclass(frozen=True)
class Fragment:
    """Elements of a flattened whole tensor, held by this rank."""

    name: str
    """The whole tensor's canonical name."""
    run: StridedSlice
    """Which of its elements."""
    parameter: torch.nn.Parameter
    start: int
    """The first of them in the rank's own flattened parameter, where they lie in one run."""
    flat: torch.Tensor
    """The optimizer's own tensor, whose elements from `offset` on are the fragment."""
    offset: int
    owned: bool = True
    """Whether this rank is the one that writes the fragment to a checkpoint."""

    def part_of(self, flat: torch.Tensor) -> torch.Tensor:
        """The fragment's elements of a tensor that is laid out as `flat`, a view."""
        return flat.view(-1).narrow(0, self.offset, self.run.numel)

    def master(self) -> torch.Tensor:
        """The fp32 weights of the fragment, a view."""
        return self.part_of(self.flat.detach())


@dataclass(frozen=True)
class _LocalSlice:
    """Elements [start, start + numel) of a rank's own flattened parameter, held by this rank."""

    start: int
    numel: int
    flat: torch.Tensor
    offset: int
    owned: bool = True


def fragments(engine: DeepSpeedEngine, mesh: Mesh) -> Iterator[Fragment]:
    """This rank's fragments, in the order of the model's parameters."""
    stage = engine.zero_optimization_stage()
    for name, parameter in engine.module.canonical_parameters():
        if stage == 0:
            parts = _replicated(parameter, mesh)
        elif stage == 3:
            parts = _fully_sharded(engine, parameter, mesh)
        else:
            parts = _optimizer_sharded(engine, parameter)
        for part in parts:
            yield from _in_the_whole(name, parameter, part, mesh)


def _in_the_whole(
    name: str, parameter: torch.nn.Parameter, part: _LocalSlice, mesh: Mesh
) -> Iterator[Fragment]:
    """What is held, in the coordinates of the whole tensor."""
    shard = shard_of(parameter)
    # The last stage's copy of a tied matrix is the first stage's to write.
    ours = part.owned and not getattr(parameter, "ds_pipe_replicated", False)
    if shard is None:
        strided = StridedSlice.contiguous(part.start, part.numel)
        owned = ours and mesh.tp.rank == 0
        yield Fragment(name, strided, parameter, part.start, part.flat, part.offset, owned)
        return
    name, owned = shard.canonical_name(name), ours and shard.is_primary_copy
    for start, strided in shard.slices(part.start, part.numel):
        offset = part.offset + start - part.start
        yield Fragment(name, strided, parameter, start, part.flat, offset, owned)


def _replicated(parameter: torch.nn.Parameter, mesh: Mesh) -> Iterator[_LocalSlice]:
    # Every rank holds everything; each writes its share, and each must load everything.
    numel, ranks, me = parameter.numel(), mesh.dp.size, mesh.dp.rank
    for part in range(ranks):
        low, high = numel * part // ranks, numel * (part + 1) // ranks
        if low < high:
            yield _LocalSlice(low, high - low, parameter, low, owned=part == me)


def _optimizer_sharded(
    engine: DeepSpeedEngine, parameter: torch.nn.Parameter
) -> Iterator[_LocalSlice]:
    mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]
    if mapping is None:
        return
    group = mapping.param_group_index
    optimizer = engine.optimizer
    flats = getattr(optimizer, "single_partition_of_fp32_groups", None)
    flat = (optimizer.fp32_groups_flat_partition if flats is None else flats)[group]
    address, target = mapping.lp_fragment_address, mapping.hp_fragment_address
    yield _LocalSlice(address.start, address.numel, flat, target.start)


def _fully_sharded(
    engine: DeepSpeedEngine, parameter: torch.nn.Parameter, mesh: Mesh
) -> Iterator[_LocalSlice]:
    optimizer = engine.optimizer
    group, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
    size = parameter.ds_tensor.ds_numel  # type: ignore[attr-defined]
    start = size * mesh.dp.rank
    numel = min(size, parameter.ds_numel - start)  # type: ignore[attr-defined]
    if numel > 0:
        flat = optimizer.fp32_partitioned_groups_flat[group]
        yield _LocalSlice(start, numel, flat, offset)


def parameter_shapes(engine: DeepSpeedEngine) -> dict[str, list[int]]:
    """The whole shape of every parameter of this rank's stage, by canonical name."""
    shapes = {}
    for name, parameter in engine.module.canonical_parameters():
        shard = shard_of(parameter)
        if shard is None:
            shapes[name] = list(getattr(parameter, "ds_shape", parameter.shape))
        else:
            shapes[shard.canonical_name(name)] = list(shard.shape)
    return shapes


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


def _flats(engine: DeepSpeedEngine, mesh: Mesh) -> list[torch.Tensor]:
    """The optimizer's flat tensors; ZeRO-3 takes them out of the groups between steps."""
    return list({id(part.flat): part.flat for part in fragments(engine, mesh)}.values())


def num_updates(engine: DeepSpeedEngine, mesh: Mesh) -> int:
    """How many times Adam has stepped; below the training step where fp16 skipped some."""
    optimizer = base_optimizer(engine)
    counts = {int(group["step"]) for group in optimizer.param_groups if "step" in group}
    states = [optimizer.state[flat] for flat in _flats(engine, mesh) if flat in optimizer.state]
    counts |= {int(state["step"]) for state in states if "step" in state}
    if len(counts) > 1:
        raise AssertionError(f"parts of the optimizer disagree on their step: {sorted(counts)}")
    return counts.pop() if counts else 0


def owned_tensors(
    engine: DeepSpeedEngine, mesh: Mesh
) -> Iterator[tuple[Fragment, str, torch.Tensor]]:
    """What this rank writes to a checkpoint: (fragment, kind, fp32 view on the device)."""
    for fragment in fragments(engine, mesh):
        if not fragment.owned:
            continue
        yield fragment, PARAM, fragment.master()
        state = _moments(engine, fragment.flat)
        for kind in MOMENTS:
            yield fragment, kind, fragment.part_of(state[kind])


@torch.no_grad()
def load(engine: DeepSpeedEngine, mesh: Mesh, reader: StridedReader, updates: int | None) -> None:
    """Fill this rank's states from a checkpoint (or with the initial weights).

    `updates` None loads the weights only.
    """
    for fragment in fragments(engine, mesh):
        fragment.master().copy_(reader.read_slice(fragment.name, PARAM, fragment.run))
        if updates is None:
            continue
        state = _moments(engine, fragment.flat)
        for kind in MOMENTS:
            stored = reader.read_slice(fragment.name, kind, fragment.run)
            fragment.part_of(state[kind]).copy_(stored)
    if updates is not None:
        _set_updates(engine, mesh, updates)
    _refresh_module(engine, mesh, reader)


def _set_updates(engine: DeepSpeedEngine, mesh: Mesh, updates: int) -> None:
    for group in base_optimizer(engine).param_groups:
        if "step" in group:
            group["step"] = updates
    for flat in _flats(engine, mesh):
        state = _moments(engine, flat)
        if isinstance(state["step"], torch.Tensor):
            state["step"].fill_(updates)
        else:
            state["step"] = updates


def _refresh_module(engine: DeepSpeedEngine, mesh: Mesh, reader: StridedReader) -> None:
    """Set the weights that forward uses to the rounded fp32 ones."""
    if engine.zero_optimization_stage() == 3:
        for fragment in fragments(engine, mesh):
            held = fragment.parameter.ds_tensor  # type: ignore[attr-defined]
            start = fragment.start - mesh.dp.rank * held.ds_numel
            held.view(-1).narrow(0, start, fragment.run.numel).copy_(fragment.master())
        return
    for name, parameter in engine.module.canonical_parameters():
        everything = _LocalSlice(0, parameter.numel(), parameter, 0)
        for part in _in_the_whole(name, parameter, everything, mesh):
            part.master().copy_(reader.read_slice(part.name, PARAM, part.run))
