"""Rewriting a checkpoint as a self-contained folder with its tensors in a few files.

A run writes one shard a rank, split by its layout. A converted checkpoint has the same format, with
the tensors one after another in the requested number of files.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from alibi_lm.checkpoint.config_paths import CONFIG_FOLDERS, moved_folders
from alibi_lm.checkpoint.folder import (
    damage,
    read_meta,
    resolve_step,
    step_number,
    verify,
    write_meta,
)
from alibi_lm.checkpoint.fragments import KINDS, PARAM, FragmentReader, fragment_key
from alibi_lm.checkpoint.safetensors_io import write_stream
from alibi_lm.parallel.shard import StridedSlice
from alibi_lm.utils.errors import CheckpointError, Problem
from alibi_lm.utils.files import sync
from alibi_lm.utils.locking import exclusive_lock

_AT_ONCE = 1 << 18
"""Elements that are in memory at a time."""


@dataclass(frozen=True)
class _Part:
    """Elements [start, start + numel) of a flattened tensor of one kind."""

    name: str
    kind: str
    start: int
    numel: int


def convert(source: Path, out: Path, *, num_shards: int = 1, weights_only: bool = False) -> Path:
    """Write a run's newest checkpoint, or a step folder, as the step folder `out`.

    The tensors lie one after another in `num_shards` files of equal size (fewer where there are
    fewer elements); bits do not change. `weights_only` leaves Adam's moments out: such a folder
    can be evaluated, exported and given to `train.init_from`, but no run can resume from it.
    Besides the file cache, a few MiB of memory are used, whatever the size of the model.

    Raises:
        CheckpointError: `out` is there already, or its name is another step's; there is no
            checkpoint, or a file of it is damaged; what was written does not read back.
    """
    folder = resolve_step(source)
    if out.exists():
        raise CheckpointError(Problem(str(out), None, "is there already", "name another folder"))
    meta = verify(folder)
    if CONFIG_FOLDERS in meta:
        meta[CONFIG_FOLDERS] = moved_folders(meta[CONFIG_FOLDERS], folder, out)
    if step_number(out) not in (None, meta["step"]):
        rule = f"is the name of another step than {meta['step']}"
        raise CheckpointError(Problem(str(out), None, rule, f"call it {folder.name}"))
    partial = out.with_name(f".partial_{out.name}")
    with exclusive_lock(partial, CheckpointError):
        try:
            _clear(partial)
            _write(folder, meta, partial, num_shards, weights_only)
            os.rename(partial, out)
            sync(out.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return out


def _clear(folder: Path) -> None:
    """Delete what a killed conversion left in the folder."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _write(
    folder: Path, meta: dict[str, Any], partial: Path, num_shards: int, weights_only: bool
) -> None:
    files: dict[str, Any] = {}
    for name in sorted(set(meta["files"]) - set(meta["shards"])):
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / name, partial / name)
        sync(partial / name)
        files[name] = meta["files"][name]
    with FragmentReader(folder, meta) as reader:
        kinds = [kind for kind in reader.kinds if kind == PARAM or not weights_only]
        shards = {
            f"shard_{number:05d}.safetensors": parts
            for number, parts in enumerate(_split(reader.shapes, kinds, num_shards))
        }
        for name, parts in shards.items():
            files[name] = _write_shard(reader, parts, partial / name)
    content = {key: value for key, value in meta.items() if key != "weights_only"}
    if len(kinds) < len(KINDS):
        content["weights_only"] = True
    content |= {"shards": sorted(shards), "files": dict(sorted(files.items()))}
    wrong = [*damage(partial, content)]
    if wrong:
        raise CheckpointError(*wrong)
    write_meta(partial, content)
    for path in (*(path for path in partial.iterdir() if path.is_dir()), partial):
        sync(path)
    read_meta(partial)


def _split(
    shapes: dict[str, tuple[int, ...]], kinds: list[str], num_shards: int
) -> Iterator[list[_Part]]:
    """Cut the tensors, laid end to end, into equally long rows of parts."""
    tensors = [(name, kind, math.prod(shapes[name])) for name in shapes for kind in kinds]
    total = sum(numel for _, _, numel in tensors)
    num_shards = max(1, min(num_shards, total))
    for shard in range(num_shards):
        low, high = (total * edge // num_shards for edge in (shard, shard + 1))
        parts, begin = [], 0
        for name, kind, numel in tensors:
            first, last = max(low, begin), min(high, begin + numel)
            if first < last:
                parts.append(_Part(name, kind, first - begin, last - first))
            begin += numel
        yield parts


def _write_shard(reader: FragmentReader, parts: list[_Part], path: Path) -> dict[str, Any]:
    """Write a safetensors file piece by piece; returns its size and sha256."""
    shapes = {
        fragment_key(part.name, part.kind, StridedSlice.contiguous(part.start, part.numel)): (
            part.numel,
        )
        for part in parts
    }
    return write_stream(path, shapes, (block for part in parts for block in _blocks(reader, part)))


def _blocks(reader: FragmentReader, part: _Part) -> Iterator[Tensor]:
    for start in range(part.start, part.start + part.numel, _AT_ONCE):
        numel = min(_AT_ONCE, part.start + part.numel - start)
        yield reader.read(part.name, part.kind, start, numel)
