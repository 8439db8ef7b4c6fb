"""One rank of a layout: trains several small models, and rank 0 trains them by itself too.

Started by `test_distributed_parallel`: RANK SIZE TP PP STORE OUT, with the variants in OUT's
folder as variants.json. Rank 0 writes OUT.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist

from alibi_lm.config import Config
from alibi_lm.config_loading import build
from alibi_lm.model import layers
from alibi_lm.model.decoder import Decoder
from alibi_lm.model.flops import num_parameters
from alibi_lm.model.slopes import alibi_slopes
from alibi_lm.parallel.mesh import Mesh, make_mesh
from alibi_lm.parallel.process_group import avoid_shared_memory
from alibi_lm.parallel.shard import shard_of
from alibi_lm.train.engine.base import Engine
from alibi_lm.train.engine.deepspeed_config import deepspeed_config
from alibi_lm.train.engine.plain import make_engine

STEPS, SAMPLES, LENGTH = 10, 4, 20
DEFAULTS: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 48, "num_heads": 4, "vocab_size": 61,
    "initializer_range": 0.1,
}  # fmt: skip
CLIPPING = 0.5
RATE = 1e-3


def config_of(model: dict[str, Any]) -> Config:
    train = {
        "sequence_length": LENGTH,
        "num_steps": STEPS,
        "micro_batch_size": 1,
        "global_batch_size": SAMPLES,
        "precision": model.pop("precision", "fp32"),
        "schedule": "constant",
        "learning_rate": RATE,
        "gradient_clipping": CLIPPING,
        "activation_checkpointing": model.pop("recompute", False),
        "compile": model.pop("compile", False),
    }
    data = {"corpora": [{"prefix": "none"}]}
    raw = {"run": {"dir": "none"}, "model": DEFAULTS | model, "data": data, "train": train}
    return build(Config, raw)


def samples(config: Config, step: int) -> torch.Tensor:
    """The global batch of a step; two batches take turns, so that there is something to learn."""
    generator = torch.Generator().manual_seed(step % 2)
    assert config.model.vocab_size is not None
    shape = (SAMPLES, LENGTH + 1)
    return torch.randint(0, config.model.vocab_size, shape, generator=generator)


def alone(config: Config) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step, by plain torch on one process."""
    decoder = Decoder(config.model, seed=config.train.seed)
    decay = config.train.weight_decay
    groups = [
        {"params": [p for p in decoder.parameters() if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in decoder.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    train = config.train
    optimizer = torch.optim.AdamW(
        groups, lr=RATE, betas=(train.beta1, train.beta2), eps=train.adam_epsilon
    )
    results = []
    for step in range(STEPS):
        tokens = samples(config, step)
        loss = decoder(tokens[:, :-1], tokens[:, 1:]).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(decoder.parameters(), CLIPPING)
        optimizer.step()
        results.append((loss.item(), norm.item()))
    return results


def run_on_all_ranks(config: Config, stage: int, mesh: Mesh) -> dict[str, Any]:
    block = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    with most_held() as held:
        engine = make_engine(config, deepspeed_config(config, block, mesh.dp.size), mesh)
    results = []
    for step in range(STEPS):
        own = samples(config, step).chunk(mesh.dp.size)[mesh.dp.rank]
        result = engine.step(list(own.split(1)), step)
        results.append((result.loss, result.grad_norm))
    tokens = samples(config, 0)
    facts = {
        "steps": results,
        "validation": engine.evaluate([tokens[:3], tokens[3:]]),
        "copies_differ": [] if stage == 3 else copies_that_differ(engine, mesh),
    }
    facts["most_held"] = held[0]
    facts["parameters"] = num_parameters(config.model)
    if mesh.pp.size == 1:
        with torch.no_grad():
            facts["losses"] = engine.deepspeed(tokens[:, :-1], tokens[:, 1:]).tolist()
            if stage != 3:
                facts["logits"] = engine.deepspeed(tokens[:, :-1]).float().tolist()
                facts["targets"] = tokens[:, 1:].tolist()
    engine.deepspeed.destroy()
    return facts


@contextlib.contextmanager
def most_held() -> Iterator[list[int]]:
    """The most elements that the parameters made meanwhile hold at once, seen at every new one."""
    made: list[weakref.ref[Any]] = []
    most = [0]
    register = torch.nn.Module.register_parameter

    def watch(module: torch.nn.Module, name: str, parameter: Any) -> None:
        register(module, name, parameter)
        if parameter is not None:
            made.append(weakref.ref(parameter))
        alive = {id(p): p.data.numel() for p in (ref() for ref in made) if p is not None}
        most[0] = max(most[0], sum(alive.values()))

    with mock.patch.object(torch.nn.Module, "register_parameter", watch):
        yield most


def copies_that_differ(engine: Engine, mesh: Mesh) -> list[str]:
    """Parameters whose elements differ between ranks that hold the same; padding that is not 0."""
    wrong = []
    if mesh.pp.size > 1 and engine.config.model.tied_embeddings:
        own = dict(engine.deepspeed.module.canonical_parameters()).get("embedding.weight")
        ends: list[Any] = [None] * mesh.pp.size
        sent = None if own is None else own.detach().clone()
        dist.all_gather_object(ends, sent, group=mesh.pp.group)
        if not torch.equal(ends[0], ends[-1]):
            wrong.append("the tied matrix")
    if mesh.tp.size == 1:
        return wrong
    for name, parameter in engine.deepspeed.module.canonical_parameters():
        everyone: list[Any] = [None] * mesh.tp.size
        dist.all_gather_object(everyone, parameter.detach(), group=mesh.tp.group)
        shard = shard_of(parameter)
        if shard is None:
            pairs = [(everyone[0], other) for other in everyone]
        elif name.rpartition(".")[2].startswith("copied_"):
            neighbors = itertools.groupby(range(mesh.tp.size), lambda r: r // copies(engine))
            pairs = [
                (everyone[first], everyone[other])
                for ranks in (list(group) for _, group in neighbors)
                for first, other in itertools.pairwise(ranks)
            ]
        else:
            held = sum(part.length for part in shard.intervals)
            padding = parameter.detach().narrow(shard.dim, held, shard.length - held)
            pairs = [(padding, torch.zeros_like(padding))]
        if not all(torch.equal(one, other) for one, other in pairs):
            wrong.append(name)
    return wrong


def copies(engine: Engine) -> int:
    return max(1, engine.mesh.tp.size // engine.config.model.kv_heads)


def slopes_of_local_heads(slopes: tuple[float, ...], rank: int, size: int) -> tuple[float, ...]:
    """The mistake: each rank makes a schedule for the heads that it holds."""
    return alibi_slopes(len(slopes) // size)


def main(rank: int, size: int, tp: int, pp: int, store: str, out: Path) -> None:
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=size)
    avoid_shared_memory()
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    mesh = make_mesh(tp, pp)
    results = {}
    for name, variant in json.loads((out.parent / "variants.json").read_text()).items():
        stages = variant.pop("stages")
        mistaken = variant.pop("local_slopes", False)
        config = config_of(variant)
        reference = alone(config) if rank == 0 else None
        for stage in stages:
            with (
                mock.patch.object(layers, "slice_slopes", slopes_of_local_heads)
                if mistaken
                else (contextlib.nullcontext())
            ):
                found = run_on_all_ranks(config, stage, mesh)
            results[f"{name} stage {stage}"] = found | {"alone": reference}
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, results)
    if rank == 0:
        for key, found in results.items():
            found["ranks_agree"] = all(
                other[key]["steps"] == found["steps"]
                and other[key].get("losses") == found.get("losses")
                for other in everyone
            )
            found["copies_differ"] = sorted({n for o in everyone for n in o[key]["copies_differ"]})
        out.write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    rank, size, tp, pp, store, out = sys.argv[1:]
    main(int(rank), int(size), int(tp), int(pp), store, Path(out))
