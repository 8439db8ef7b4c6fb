"""Import a BLOOM or MPT folder as a run with one checkpoint."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from alibi_lm.checkpoint.config_paths import CONFIG_FOLDERS, config_folders
from alibi_lm.checkpoint.folder import (
    CHECKPOINTS,
    CONFIG,
    LATEST,
    TOKENIZER,
    step_name,
    write_meta,
)
from alibi_lm.checkpoint.fragments import PARAM, fragment_key
from alibi_lm.checkpoint.safetensors_io import write_stream
from alibi_lm.checkpoint.step import open_checkpoint
from alibi_lm.config import Config
from alibi_lm.config_loading import apply_overrides, build, to_dict, to_yaml
from alibi_lm.data.special_tokens import DECLARING_FILES
from alibi_lm.data.tokenizer import Tokenizer, load_tokenizer
from alibi_lm.hf.exporting.weights import SHARD_BYTES, StepWeights, unset_weights
from alibi_lm.hf.manifest import EXPORT_MANIFEST, check_manifest
from alibi_lm.hf.parity.check import (
    ModelPair,
    check_import_parity,
    check_imported_tokenizer,
    choose_parity,
    parity_summary,
)
from alibi_lm.hf.parity.transformers_reference import reference_config
from alibi_lm.hf.specs import IMPORT_SPECS
from alibi_lm.hf.specs.base import PRESERVED_FIELDS, ImportSpec
from alibi_lm.hf.weights_reader import WeightsReader, plain_file, read_json
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.layers import LAYER_NORM_EPSILON, vocab_size
from alibi_lm.utils.atomic_directory import atomic_directory
from alibi_lm.utils.errors import CheckpointError, ConfigError, DataError, Problem
from alibi_lm.utils.files import sha256, write_json, write_text
from alibi_lm.utils.logging import console
from alibi_lm.utils.progress import Progress

DEFAULT_LENGTH = 2048
"""Training length of a model whose config does not state one."""
_ELEMENTS_AT_ONCE = 1 << 22


def import_folder(
    folder: Path,
    run: Path,
    *,
    overrides: Sequence[str] = (),
    tokenizer: bool = True,
    allow_pickle: bool = False,
    parity: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> dict[str, Any]:
    """Write the BLOOM or MPT model of `folder` as the run folder `run`, and check parity.

    The run has one checkpoint, step 0 without optimizer state. It can be evaluated, exported,
    used for generation, and named in `train.init_from`. Weights are copied one tensor at a time.
    `run` appears only after the parity check against `transformers`; an error leaves nothing.

    The number of heads changes no tensor's shape, so it comes from config.json: verified by its
    digest in a folder that was exported here, believed in any other (a line says so).

    Args:
        folder: a folder written by `save_pretrained`, or a snapshot in the Hub cache.
        run: the run folder to create.
        overrides: `section.key=value` for the run's config, for example `data.validation`.
        tokenizer: import the folder's tokenizer, if it has one.
        allow_pickle: read pickled weights (tensors only).
        parity: what to compare, see `parity.check.ParityLevel`.
        shard_bytes: largest checkpoint file, unless one tensor is larger.

    Returns:
        The checkpoint's `imported` entry: class, preserved config fields, parity check.

    Raises:
        CheckpointError: the folder cannot be used, `run` is not empty, or the models differ.
        ConfigError: an override breaks a rule.
    """
    if run.exists() and (not run.is_dir() or any(run.iterdir())):
        raise CheckpointError(Problem(str(run), None, "already exists", "name another folder"))
    if not folder.is_dir():
        raise CheckpointError(Problem(str(folder), None, "no such folder", "check the path"))
    raw = read_json(folder, "config.json")
    import_spec = import_spec_of(folder, raw)
    hf_config = checked_config(folder, raw, import_spec)
    check_manifest(folder)
    run_tokenizer = folder_tokenizer(folder) if tokenizer else None
    config = run_config(folder, run, import_spec, hf_config, run_tokenizer, overrides)
    with (
        WeightsReader(folder, import_spec.prefix, allow_pickle=allow_pickle) as source,
        atomic_directory(run) as partial,
    ):
        names = tensor_names(folder, source, import_spec, config)
        level = choose_parity(parity, config.model)
        step = partial / CHECKPOINTS / step_name(0)
        step.mkdir(parents=True)
        imported = {
            "class": import_spec.export_spec.class_name,
            "source": folder.resolve().name,
            "config": dict(_preserved_fields(import_spec, hf_config)),
        }
        _write_step(step, source, import_spec, config, names, run_tokenizer, imported, shard_bytes)
        write_text(step.parent / LATEST, step.name + "\n")
        write_text(partial / CONFIG, to_yaml(config))
        written = open_checkpoint(partial)
        with written.reader() as reader:
            weights = StepWeights(reader)
            pair = ModelPair(folder, source, import_spec, hf_config, config.model, weights)
            parity_check = check_import_parity(pair, level)
        if run_tokenizer is not None:
            check_imported_tokenizer(run_tokenizer, folder, hf_config)
        imported["parity"] = parity_check
        write_json(partial / "import.json", imported)
    class_name = import_spec.export_spec.class_name
    console.info(f"import {run}: {class_name}, {parity_summary(parity_check)}")
    if not (folder / EXPORT_MANIFEST).is_file():
        heads = config.model.num_heads
        console.info(f"import {run}: {heads} heads, as config.json states; tensors do not show it")
    return imported


def import_spec_of(folder: Path, raw: dict[str, Any]) -> ImportSpec:
    """The import spec of a config.json.

    Raises:
        CheckpointError: its class is not supported.
    """
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in IMPORT_SPECS:
        rule = f"is not one of {', '.join(IMPORT_SPECS)}, the ALiBi classes that can be imported"
        key = f"{folder}/config.json: model_type"
        raise CheckpointError(Problem(key, kind, rule, "name another folder"))
    return IMPORT_SPECS[kind]


def checked_config(folder: Path, raw: dict[str, Any], import_spec: ImportSpec) -> Any:
    """config.json as an instance of the class's config.

    Raises:
        CheckpointError: the class cannot read it, or this model would compute other logits.
    """
    where, fix = f"{folder}/config.json: ", "such a model cannot be imported"
    problems = []
    for alias, name in import_spec.aliases.items():
        if alias in raw and name in raw and raw[alias] != raw[name]:
            rule = f"contradicts {name} = {raw[name]}"
            problems.append(Problem(where + alias, raw[alias], rule, "restore the folder"))
    config = reference_config(folder, raw, import_spec)
    for key, value, rule in import_spec.refused(config):
        problems.append(Problem(where + key, value, rule, fix))
    if config.layer_norm_epsilon != LAYER_NORM_EPSILON:
        rule = f"is not {LAYER_NORM_EPSILON}, the epsilon of this model"
        value = config.layer_norm_epsilon
        problems.append(Problem(where + "layer_norm_epsilon", value, rule, fix))
    if problems:
        raise CheckpointError(*problems)
    return config


def _preserved_fields(import_spec: ImportSpec, hf_config: Any) -> Iterator[tuple[str, Any]]:
    for name in (*PRESERVED_FIELDS, *import_spec.preserved):
        if hasattr(hf_config, name):
            value = getattr(hf_config, name)
            if hasattr(value, "to_dict"):
                fields = type(value).__annotations__
                value = {key: part for key, part in value.to_dict().items() if key in fields}
            yield name, value


def folder_tokenizer(folder: Path) -> Tokenizer | None:
    """The folder's tokenizer: tokenizer.model, or else tokenizer.json; None if it has neither."""
    for name in ("tokenizer.model", "tokenizer.json"):
        if (folder / name).is_file():
            path = plain_file(folder, name)
            for other in DECLARING_FILES:
                if os.path.lexists(folder / other):
                    plain_file(folder, other)
            try:
                return load_tokenizer(path)
            except DataError as error:
                fix = "repair it, or import with --no-tokenizer"
                problems = (Problem(p.key, p.value, p.rule, fix) for p in error.problems)
                raise CheckpointError(*problems) from None
    return None


def run_config(
    folder: Path,
    run: Path,
    import_spec: ImportSpec,
    hf_config: Any,
    tokenizer: Tokenizer | None,
    overrides: Sequence[str],
) -> Config:
    """The run's config: the model section from config.json, then the overrides."""
    model = {
        "architecture": import_spec.export_spec.name,
        **import_spec.model(hf_config),
        "vocab_size": hf_config.vocab_size,
        "tied_embeddings": bool(hf_config.tie_word_embeddings),
    }
    if hf_config.initializer_range > 0:
        model["initializer_range"] = hf_config.initializer_range
    length = import_spec.length(hf_config)
    train = {"sequence_length": length if length else DEFAULT_LENGTH}
    raw: dict[str, Any] = {"run": {"dir": str(run)}, "model": dict(model), "train": train}
    if tokenizer is not None:
        place = run / CHECKPOINTS / step_name(0) / TOKENIZER
        raw["data"] = {"tokenizer": str(place)}
    try:
        build(Config, raw)
    except ConfigError as error:
        where = f"{folder}/config.json: "
        problems = (Problem(where + p.key, p.value, p.rule, "restore it") for p in error.problems)
        raise CheckpointError(*problems) from None
    config = build(Config, apply_overrides(raw, overrides))
    changed = [key for key, value in model.items() if getattr(config.model, key) != value]
    stated = to_dict(build(Config, raw).model)
    changed += [key for key in stated if key not in model
                and getattr(config.model, key) != stated[key]]  # fmt: skip
    if changed or config.run.dir != str(run):
        key = f"model.{changed[0]}" if changed else "run.dir"
        raise ConfigError(Problem(key, None, "is set by the import", "leave it out"))
    if tokenizer is not None and tokenizer.vocab_size > hf_config.vocab_size:
        rule = f"has {tokenizer.vocab_size} ids, and the model {hf_config.vocab_size}"
        fix = "repair it, or import with --no-tokenizer"
        raise CheckpointError(Problem(str(tokenizer.file), None, rule, fix))
    return config


def tensor_names(
    folder: Path, source: WeightsReader, import_spec: ImportSpec, config: Config
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Canonical name to the class's name and shape, after checking that the folder matches."""
    _check_sizes(folder, source, import_spec, config.model)
    shapes = {name: tuple(t.shape) for name, t in unset_weights(config.model).items()}
    names = {name: (hf_name, shapes[name]) for name, hf_name in import_spec.names(config.model)}
    assert names.keys() == shapes.keys()
    tied = "lm_head.weight" if config.model.tied_embeddings else None
    problems = source.problems(dict(names.values()), tied)
    if problems:
        raise CheckpointError(*problems)
    if tied in source.shapes:
        first = source.tensor(names["embedding.weight"][0])
        if not torch.equal(source.tensor(str(tied)), first):
            rule = "differs from the embedding, to which config.json ties it"
            raise CheckpointError(Problem(f"{folder}: {tied}", None, rule, "restore the folder"))
    return {name: names[name] for name in shapes}


def _check_sizes(
    folder: Path, source: WeightsReader, import_spec: ImportSpec, model: ModelConfig
) -> None:
    """Refuse sizes that the folder cannot have, before shapes of a billion blocks are listed."""
    if model.num_layers > len(source.shapes):
        rule = f"is more than the {len(source.shapes)} tensors of the folder"
        key = f"{folder}/config.json: number of blocks"
        raise CheckpointError(Problem(key, model.num_layers, rule, "restore it"))
    name = next(hf for native, hf in import_spec.names(model) if native == "embedding.weight")
    error = source.shape_error(name, (vocab_size(model), model.hidden_size))
    if error is not None:
        raise CheckpointError(Problem(f"{folder}: {name}", None, error, "restore the folder"))


def canonical(import_spec: ImportSpec, model: ModelConfig, name: str, stored: Tensor) -> Tensor:
    """A stored tensor in the canonical layout, in its stored dtype."""
    return import_spec.rows(model, stored) if ".qkv." in name else stored


def _write_step(
    step: Path,
    source: WeightsReader,
    import_spec: ImportSpec,
    config: Config,
    names: Mapping[str, tuple[str, tuple[int, ...]]],
    tokenizer: Tokenizer | None,
    imported: dict[str, Any],
    shard_bytes: int,
) -> None:
    """Write the step folder, one tensor at a time."""
    write_text(step / CONFIG, to_yaml(config))
    if tokenizer is not None:
        (step / TOKENIZER).mkdir()
        tokenizer.save(step / TOKENIZER)
    files = {
        str(path.relative_to(step)): {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(step.rglob("*"))
        if path.is_file()
    }
    shards: list[dict[str, int]] = [{}]
    size = 0
    for name, (_, shape) in names.items():
        numel = math.prod(shape)
        if shards[-1] and size + 4 * numel > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = numel
        size += 4 * numel
    with Progress("write", 4 * sum(math.prod(shape) for _, shape in names.values())) as progress:
        for number, shard in enumerate(shards):
            flat = {fragment_key(name, PARAM, 0): (numel,) for name, numel in shard.items()}
            blocks = (
                block
                for name in shard
                for block in _blocks(names[name][0], canonical(
                    import_spec, config.model, name, source.tensor(names[name][0])), progress)
            )  # fmt: skip
            file = f"shard_{number:05d}.safetensors"
            files[file] = write_stream(step / file, flat, blocks)
    write_meta(step, {
        "step": 0,
        "tokens": 0,
        "consumed_samples": 0,
        "optimizer_updates": 0,
        "weights_only": True,
        "parameters": {name: list(shape) for name, (_, shape) in names.items()},
        "layout": {"world_size": 1, "dp": 1, "tp": 1, "pp": 1, "zero_stage": 0},
        "data": {"corpora": [], "tokenizer": None if tokenizer is None else tokenizer.digest},
        "imported": imported,
        CONFIG_FOLDERS: config_folders(Path(config.run.dir)),
        "saved_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": {name: version(name) for name in ("alibi_lm", "torch", "transformers")},
        "shards": [f"shard_{number:05d}.safetensors" for number in range(len(shards))],
        "files": files,
    })  # fmt: skip


def _blocks(name: str, tensor: Tensor, progress: Progress) -> Iterator[Tensor]:
    """The tensor's elements in fp32, in flat blocks.

    Raises:
        CheckpointError: an element is not finite.
    """
    for block in tensor.reshape(-1).split(_ELEMENTS_AT_ONCE):
        if not bool(block.isfinite().all()):
            rule = "has elements that are not finite"
            raise CheckpointError(Problem(name, None, rule, "restore the folder"))
        yield block.float()
        progress.advance(4 * block.numel())
