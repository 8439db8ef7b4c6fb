"""One rank that trains small models for a few steps, counting what it sends and what it holds.

Started by `test_distributed_plan`: RANK SIZE STORE OUT, with the cases in OUT's folder as
cases.json: name to overrides of config.yaml beside it. Rank 0 writes OUT: for each case and rank,
the plan's figures and those found.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from collectives import counted
from torch import Tensor

from alibi_lm.parallel.layout import Layout
from alibi_lm.parallel.mesh import make_mesh
from alibi_lm.parallel.process_group import avoid_shared_memory
from alibi_lm.plan.planner import Plan, RankPlan, make_plan
from alibi_lm.train.engine import optimizer_state
from alibi_lm.train.engine.base import Engine
from alibi_lm.train.engine.deepspeed_config import deepspeed_config
from alibi_lm.train.engine.plain import make_engine
from alibi_lm.train.run import read_config

WARM_UP = 2
"""Steps before the one that is counted: ZeRO-3 gathers ahead only once it knows the order."""


def storages(tensors: Iterable[Tensor | None]) -> dict[int, int]:
    """Bytes of the tensors' memory by address; what several share is there once."""
    found = (tensor.untyped_storage() for tensor in tensors if tensor is not None)
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def held(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the tensors' memory."""
    return sum(storages(tensors).values())


def kinds(sent: Counter[tuple[tuple[int, ...], str]], layout: Layout, rank: int) -> dict[str, int]:
    """Bytes sent by the plan's kinds, and `other`."""

    def mine(groups: list[list[int]]) -> tuple[int, ...]:
        return next(tuple(ranks) for ranks in groups if rank in ranks)

    tensor, data = mine(layout.tensor_groups()), mine(layout.data_groups())
    stages = mine(layout.pipeline_groups())
    tied = (stages[0], stages[-1])
    found: Counter[str] = Counter()
    for (ranks, operation), size in sent.items():
        if operation == "send":
            kind = "pipeline"
        elif ranks == tensor and len(tensor) > 1:
            kind = "tensor" if operation == "all_reduce" else "pipeline_gathers"
        elif ranks == data and len(data) > 1:
            kind = "weights" if operation == "all_gather" else "gradients"
        elif ranks == tied and len(stages) > 1 and operation == "all_reduce":
            kind = "tied"
        else:
            kind = "other"
        found[kind] += int(size)
    return dict(found)


def gradients(engine: Engine) -> list[Tensor | None]:
    """Every tensor that holds gradients, buckets aside."""
    optimizer: Any = engine.deepspeed.optimizer
    found = [parameter.grad for parameter in engine.deepspeed.module.parameters()]
    found += [getattr(p, "grad_accum", None) for p in engine.deepspeed.module.parameters()]
    found += getattr(optimizer, "fp32_groups_gradients_flat", [])
    found.append(getattr(optimizer, "grad_partitions_flat_buffer", None))
    for name in ("averaged_gradients", "all_grad_tensors"):
        for part in getattr(optimizer, name, {}).values():
            found += part or []
    return found


def buckets(engine: Engine) -> list[Tensor]:
    """What gradients are copied into to be reduced."""
    found = getattr(engine.deepspeed.optimizer, "ipg_buckets", {}).values()
    buffers = [bucket.buffer for bucket in found if bucket.buffer is not None]
    return [b for buffer in buffers for b in (buffer if isinstance(buffer, list) else [buffer])]


def watch_gradients(engine: Engine) -> dict[str, int]:
    """Bytes of gradients and of buckets, the most before, while and after they are reduced."""
    most = {"gradients": 0, "buffers": 0}
    moments = [
        (engine.deepspeed, "allreduce_gradients"),
        (engine.deepspeed, "buffered_allreduce_fallback"),
        (engine.deepspeed, "_take_model_step"),
        (engine.deepspeed.optimizer, "reduce_ipg_grads"),
    ]
    for owner, name in moments:
        method = getattr(owner, name, None)
        if method is None:
            continue

        def look_first(*given: Any, _method: Any = method, **options: Any) -> Any:
            in_buckets = storages(buckets(engine))
            rest = storages(gradients(engine)).items() - in_buckets.items()
            most["buffers"] = max(most["buffers"], sum(in_buckets.values()))
            most["gradients"] = max(most["gradients"], sum(size for _, size in rest))
            return _method(*given, **options)

        setattr(owner, name, look_first)
    flatten = engine.deepspeed.flatten

    def look_after(tensors: list[Tensor]) -> Tensor:
        joined: Tensor = flatten(tensors)
        copied = storages([joined]).items() - storages(tensors).items()
        most["buffers"] = max(most["buffers"], sum(size for _, size in copied))
        return joined

    engine.deepspeed.flatten = look_after
    return most


def states(engine: Engine) -> dict[str, int]:
    """Bytes of weights, fp32 weights and moments, and of what goes into a checkpoint."""
    stage = engine.deepspeed.zero_optimization_stage()
    parameters = list(engine.deepspeed.module.parameters())
    weights = [getattr(p, "ds_tensor", p) for p in parameters]
    fragments = list(optimizer_state.fragments(engine.deepspeed, engine.mesh))
    flats = {id(part.flat): part.flat for part in fragments}.values()
    of_flats = [optimizer_state.base_optimizer(engine.deepspeed).state[flat] for flat in flats]
    return {
        "num_parameters": sum(getattr(p, "ds_numel", p.numel()) for p in parameters),
        "weights": held(weights),
        "master": held(flats) if stage else 0,
        "moments": held(found[kind] for found in of_flats for kind in ("exp_avg", "exp_avg_sq")),
        "checkpoint": sum(12 * part.run.numel for part in fragments if part.owned),
    }


def least_gradients(part: RankPlan) -> int:
    """Bytes of gradients that must be seen; the most may come where nothing looks."""
    stage = part.run.zero.stage
    if part.run.bf16_optimizer or stage in (0, 3):
        return part.states.gradients
    return 4 * part.num_parameters if stage == 1 else part.states.master


def trained(plan: Plan, block: dict[str, Any], rank: int) -> dict[str, Any]:
    run = plan.run
    config, layout = run.config, run.layout
    mesh = make_mesh(layout.tp, layout.pp)
    assert mesh.layout == layout
    engine = make_engine(config, deepspeed_config(config, block, layout.dp), mesh)
    most = watch_gradients(engine)
    part = plan.rank(rank)
    for step in range(WARM_UP + 1):
        generator = torch.Generator().manual_seed(step)
        shape = (config.train.global_batch_size, config.train.sequence_length + 1)
        assert config.model.vocab_size is not None
        tokens = torch.randint(0, config.model.vocab_size, shape, generator=generator)
        batches = [tokens[indices] for indices in part.samples()]
        with counted() as sent:
            engine.step(batches, step)
    found = states(engine) | most
    engine.deepspeed.destroy()
    return {
        "sent": kinds(sent, layout, rank),
        "planned": dataclasses.asdict(part.sent),
        "held": found,
        "planned_states": dataclasses.asdict(part.states),
        "gradients_at_least": least_gradients(part),
        "planned_parameters": part.num_parameters,
        "planned_checkpoint": plan.checkpoint_bytes,
    }


def main(rank: int, size: int, store: str, out: Path) -> None:
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=size)
    avoid_shared_memory()
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    results = {}
    path = out.with_name("config.yaml")
    for name, overrides in json.loads(out.with_name("cases.json").read_text()).items():
        plan = make_plan(path, overrides, size)
        _, block = read_config(path, overrides, size)
        results[name] = trained(plan, block, rank)
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, results)
    if rank == 0:
        found = {name: [other[name] for other in everyone] for name in results}
        out.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    rank, size, store, out = sys.argv[1:]
    main(int(rank), int(size), store, Path(out))
