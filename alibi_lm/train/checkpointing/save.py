"""Writing checkpoints so that a folder named after a step is always complete."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError

from alibi_lm import __version__
from alibi_lm.checkpoint.config_paths import CONFIG_FOLDERS, config_folders
from alibi_lm.checkpoint.folder import (
    CHECKPOINTS,
    CONFIG,
    LATEST,
    TOKENIZER,
    step_folders,
    step_name,
    write_meta,
)
from alibi_lm.checkpoint.fragments import fragment_key
from alibi_lm.checkpoint.safetensors_io import save_tensors
from alibi_lm.config import Config
from alibi_lm.config_loading import to_yaml
from alibi_lm.data.tokenizer import Tokenizer
from alibi_lm.parallel.errors import gather_results, run_on_all_ranks
from alibi_lm.parallel.process_group import gather, rank, world_size
from alibi_lm.train.engine import optimizer_state
from alibi_lm.train.engine.base import Engine
from alibi_lm.utils.errors import CheckpointError, NotFiniteError, Problem
from alibi_lm.utils.files import sha256, sync, write_text

T = TypeVar("T")

_PARTIAL = ".partial_"


def save(
    engine: Engine, config: Config, step: int, facts: Mapping[str, Any], tokenizer: Tokenizer | None
) -> Path:
    """Write the checkpoint of `step` from every rank, and point `latest` at it.

    All files are written into a temporary folder, each rank hashing its own; when they are on
    the disk, rank 0 writes meta.json, renames the folder and moves `latest`.

    Raises:
        CheckpointError: on every rank, if any could not write; earlier checkpoints are untouched.
        NotFiniteError: on every rank, if a weight is not finite; nothing is written.
    """
    run_on_all_ranks(lambda: _check_finite(engine, step))
    root = Path(config.run.dir) / CHECKPOINTS
    partial = root / f"{_PARTIAL}{step_name(step)}"
    final = root / step_name(step)
    _check_space(engine, root)
    try:
        _on_rank0(lambda: _start(partial, config, tokenizer), partial)
        files = _write_files(engine, partial)
        folders = {CONFIG_FOLDERS: config_folders(Path(config.run.dir))}
        meta = _meta(engine, step, {**facts, **folders}, files)
        _on_rank0(lambda: _finish(partial, final, meta), partial)
    except CheckpointError:
        _on_rank0(lambda: shutil.rmtree(partial, ignore_errors=True), partial)
        raise
    return final


def _write_files(engine: Engine, partial: Path) -> dict[str, Any]:
    """Write every rank's shard; size and sha256 of all files of the checkpoint, by name."""
    shard = f"shard_{rank():05d}.safetensors"
    # No rank lists files while another still has temporary ones.
    run_on_all_ranks(
        lambda: _try_to_write(partial / shard, lambda: _write_shard(engine, partial / shard))
    )

    def size_and_digest() -> dict[str, Any]:
        names = [shard] if rank() else [shard, *_small_files(partial)]
        return {name: _file_facts(partial / name) for name in names}

    parts = gather_results(lambda: _try_to_write(partial, size_and_digest), None)
    return {name: entry for part in parts for name, entry in part.items()}


def _on_rank0(action: Callable[[], object], path: Path) -> None:
    """Run `action` on rank 0; a disk error there is raised on every rank."""
    run_on_all_ranks(lambda: _try_to_write(path, action) if rank() == 0 else None)


def _try_to_write(path: Path, action: Callable[[], T]) -> T:
    try:
        return action()
    except (OSError, SafetensorError) as failure:
        rule = f"cannot be written ({' '.join(str(failure).split())})"
        fix = "make room and start again; earlier checkpoints are untouched"
        raise CheckpointError(Problem(str(path), None, rule, fix)) from None


def _check_finite(engine: Engine, step: int) -> None:
    """Refuse to save weights that the last update made non-finite, before a loss reveals it."""
    for part in optimizer_state.fragments(engine.deepspeed, engine.mesh):
        if part.owned and not bool(torch.isfinite(part.master()).all()):
            rule = f"weights are not finite after it, among them {part.name}"
            fix = "nothing was overwritten; lower train.learning_rate"
            raise NotFiniteError(Problem(f"step {step}", None, rule, fix))


def _check_space(engine: Engine, root: Path) -> None:
    """Refuse a save that the disk cannot hold, before anything is written."""
    needed = sum(gather(_shard_bytes(engine))) * 1.02 + 2**20

    def check() -> None:
        root.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(root).free
        if free < needed:
            rule = f"has {free / 2**20:,.1f} MiB free; a checkpoint needs {needed / 2**20:,.1f}"
            fix = "make room or move run.dir; earlier checkpoints are untouched"
            raise CheckpointError(Problem(str(root), None, rule, fix))

    run_on_all_ranks(lambda: check() if rank() == 0 else None)


def _shard_bytes(engine: Engine) -> int:
    owned = (
        part for part in optimizer_state.fragments(engine.deepspeed, engine.mesh) if part.owned
    )
    return sum(3 * 4 * part.run.numel for part in owned)


def _start(partial: Path, config: Config, tokenizer: Tokenizer | None) -> None:
    if partial.exists():
        shutil.rmtree(partial)  # left by a killed save
    partial.mkdir(parents=True)
    write_text(partial / CONFIG, to_yaml(config))
    if tokenizer is not None:
        tokenizer.save(partial / TOKENIZER)


def _write_shard(engine: Engine, path: Path) -> None:
    tensors = {
        fragment_key(fragment.name, kind, fragment.run): tensor.detach().float().cpu()
        for fragment, kind, tensor in optimizer_state.owned_tensors(engine.deepspeed, engine.mesh)
    }
    save_tensors(path, tensors)
    sync(path)


def _small_files(partial: Path) -> list[str]:
    return [
        str(path.relative_to(partial))
        for path in sorted(partial.rglob("*"))
        if path.is_file() and not path.name.startswith("shard_")
    ]


def _file_facts(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def _meta(
    engine: Engine, step: int, facts: Mapping[str, Any], files: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "step": step,
        **facts,
        "optimizer_updates": optimizer_state.num_updates(engine.deepspeed, engine.mesh),
        "loss_scaler": engine.loss_scaler_state(),
        "parameters": _all_shapes(engine),
        "layout": {
            "world_size": world_size(),
            "dp": engine.mesh.dp.size,
            "tp": engine.mesh.tp.size,
            "pp": engine.mesh.pp.size,
            "zero_stage": engine.stage,
        },
        "versions": {
            "alibi_lm": __version__,
            "torch": torch.__version__,
            "deepspeed": version("deepspeed"),
            "python": platform.python_version(),
        },
        "saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "shards": sorted(name for name in files if name.startswith("shard_")),
        "files": dict(sorted(files.items())),
    }


def _all_shapes(engine: Engine) -> dict[str, list[int]]:
    """The whole shapes of the parameters of all stages, first stage first."""
    stages = gather(optimizer_state.parameter_shapes(engine.deepspeed))
    return {name: shape for stage in stages for name, shape in stage.items()}


def _finish(partial: Path, final: Path, meta: dict[str, Any]) -> None:
    write_meta(partial, meta)
    for folder in (partial / TOKENIZER, partial):
        if folder.is_dir():
            sync(folder)
    if final.exists():
        # Only the step of a damaged checkpoint is saved again; keep the old folder for inspection.
        os.rename(final, _free_name(final))
    os.rename(partial, final)
    sync(final.parent)
    write_text(final.parent / LATEST, final.name + "\n")


def _free_name(path: Path) -> Path:
    number = 1
    while (candidate := path.with_name(f"damaged_{path.name}_{number}")).exists():
        number += 1
    return candidate


def remove_old(
    run: Path,
    newest: int,
    keep_last: int,
    keep_every: int | None,
    damaged: Collection[str] = (),
) -> list[Path]:
    """Delete the checkpoints that retention no longer keeps; step `newest` is never deleted.

    Later steps are damaged ones that the run resumed before: they are neither counted nor deleted,
    and neither are those in `damaged`, which training has passed without saving them again.
    """
    removed = []
    folders = [path for path in step_folders(run) if path.name not in damaged]
    steps = [(int(path.name.removeprefix("step_")), path) for path in folders]
    for step, folder in [entry for entry in steps if entry[0] <= newest][:-keep_last]:
        if keep_every is not None and step % keep_every == 0:
            continue
        # Renamed first, so that a kill in the middle of the deletion leaves no half checkpoint.
        doomed = folder.with_name(f"{_PARTIAL}removed_{folder.name}")
        os.rename(folder, doomed)
        shutil.rmtree(doomed)
        removed.append(folder)
    return removed


def clear_leftovers(run: Path) -> None:
    """Delete what killed saves and deletions left behind."""
    for path in (run / CHECKPOINTS).glob(f"{_PARTIAL}*"):
        shutil.rmtree(path)
