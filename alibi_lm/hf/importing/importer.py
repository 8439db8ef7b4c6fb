"""A Hugging Face folder of a stock ALiBi class as a run with one checkpoint."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
from alibi_lm.checkpoint.step import open_run
from alibi_lm.config import Config
from alibi_lm.config_loading import apply_overrides, build, to_dict, to_yaml
from alibi_lm.data.tokenizer import Tokenizer, load_tokenizer
from alibi_lm.hf.exporting.shards import SHARD_BYTES
from alibi_lm.hf.exporting.weights import StepWeights, unset_weights
from alibi_lm.hf.importing.head_count import check_heads
from alibi_lm.hf.manifest import check_own_files
from alibi_lm.hf.parity.check import Pair, check_import_parity, choose, told
from alibi_lm.hf.parity.transformers_reference import reference_config
from alibi_lm.hf.specs.base import KEPT, ImportSpec
from alibi_lm.hf.specs.bloom import BLOOM_IMPORT
from alibi_lm.hf.specs.mpt import MPT_IMPORT
from alibi_lm.hf.weights_reader import SourceFolder, inside, read_json
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.layers import LAYER_NORM_EPSILON, vocab_size
from alibi_lm.utils.atomic_directory import atomic_directory
from alibi_lm.utils.errors import CheckpointError, ConfigError, DataError, Problem
from alibi_lm.utils.files import sha256, write_json, write_text
from alibi_lm.utils.logging import console
from alibi_lm.utils.progress import Progress

READINGS = {import_spec.export_spec.name: import_spec for import_spec in (BLOOM_IMPORT, MPT_IMPORT)}
DEFAULT_LENGTH = 2048
"""Training length of a model whose config tells of none."""
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
    """Write the BLOOM or MPT model of `folder` as the run folder `run`, and prove it the same.

    The run has one checkpoint, of step 0 and without an optimizer's state: it can be judged,
    exported, generated from, and given to `train.init_from`. One tensor is in memory at a time.
    `run` is made when its logits have been compared with the stock class's; an error leaves
    nothing behind.

    Args:
        folder: what `save_pretrained` wrote, or the hub's cache of it.
        run: the run folder to make.
        overrides: `section.key=value` for the run's config, for example `data.validation`.
        tokenizer: whether the folder's tokenizer, if it has one, is taken over.
        allow_pickle: whether pickled weights are read (tensors only).
        proof: see `parity.check_import_parity`.
        shard_bytes: largest size of a file of the checkpoint, one tensor aside.

    Returns:
        The checkpoint's `imported` facts: class, kept config fields, proof.

    Raises:
        CheckpointError: the folder cannot be used, `run` is there already, or logits differ.
        ConfigError: an override breaks a rule.
    """
    if run.exists() and (not run.is_dir() or any(run.iterdir())):
        raise CheckpointError(Problem(str(run), None, "is there already", "name another folder"))
    if not folder.is_dir():
        raise CheckpointError(Problem(str(folder), None, "no such folder", "check the path"))
    raw = read_json(folder, "config.json")
    import_spec = import_spec_of(folder, raw)
    theirs = checked_config(folder, raw, import_spec)
    check_own_files(folder)
    found = folder_tokenizer(folder) if tokenizer else None
    config = run_config(folder, run, import_spec, theirs, found, overrides)
    kept = dict(_kept(import_spec, theirs))
    with (
        SourceFolder(folder, import_spec.prefix, allow_pickle=allow_pickle) as source,
        atomic_directory(run) as partial,
    ):
        names = tensor_names(folder, source, import_spec, config)
        kind = choose(parity, config.model)
        nats = None
        if kind == "logits":  # memory holds whole models, and more than bits is asked for

            def weight(model: ModelConfig, name: str) -> Tensor:
                return canonical(import_spec, model, name, source.tensor(names[name][0]))

            nats = check_heads(folder, config, found, weight)
        step = partial / CHECKPOINTS / step_name(0)
        step.mkdir(parents=True)
        imported = {
            "class": import_spec.export_spec.class_name,
            "source": folder.resolve().name,
            "config": kept,
            "nats_by_heads": nats,
        }
        _write_step(step, source, import_spec, config, names, found, imported, shard_bytes)
        write_text(step.parent / LATEST, step.name + "\n")
        write_text(partial / CONFIG, to_yaml(config))
        written = open_run(partial)
        with written.reader() as reader:
            weights = StepWeights(reader)
            pair = Pair(folder, source, import_spec, theirs, config.model, weights)
            facts = check_import_parity(pair, kind)
        imported["parity"] = facts
        write_json(partial / "import.json", imported)
    console.info(f"import {run}: {import_spec.export_spec.class_name}, {told(facts)}")
    return imported


def import_spec_of(folder: Path, raw: dict[str, Any]) -> ImportSpec:
    """How a folder with this config.json is read.

    Raises:
        CheckpointError: it is of another class.
    """
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in READINGS:
        rule = f"is not one of {', '.join(READINGS)}, the classes with linear biases as here"
        key = f"{folder}/config.json: model_type"
        raise CheckpointError(Problem(key, kind, rule, "name another folder"))
    return READINGS[kind]


def checked_config(folder: Path, raw: dict[str, Any], import_spec: ImportSpec) -> Any:
    """The class's own reading of config.json.

    Raises:
        CheckpointError: the class cannot read it, or this model would compute otherwise.
    """
    where, fix = f"{folder}/config.json: ", "no other model is imported"
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


def _kept(import_spec: ImportSpec, theirs: Any) -> Iterator[tuple[str, Any]]:
    for name in (*KEPT, *import_spec.kept):
        if hasattr(theirs, name):
            value = getattr(theirs, name)
            if hasattr(value, "to_dict"):
                fields = type(value).__annotations__
                value = {key: part for key, part in value.to_dict().items() if key in fields}
            yield name, value


def folder_tokenizer(folder: Path) -> Tokenizer | None:
    """The folder's tokenizer: tokenizer.json, or else a sentencepiece model."""
    for name in ("tokenizer.model", "tokenizer.json"):
        if (folder / name).is_file():
            path = inside(folder, name)
            try:
                return load_tokenizer(path)
            except DataError as error:
                fix = "mend it, or import with --no-tokenizer"
                rule = error.problems[0].rule
                raise CheckpointError(Problem(str(path), None, rule, fix)) from None
    return None


def run_config(
    folder: Path,
    run: Path,
    import_spec: ImportSpec,
    theirs: Any,
    tokenizer: Tokenizer | None,
    overrides: Sequence[str],
) -> Config:
    """The run's config, the model as the folder's class has it."""
    model = {
        "architecture": import_spec.export_spec.name,
        **import_spec.model(theirs),
        "vocab_size": theirs.vocab_size,
        "tied_embeddings": bool(theirs.tie_word_embeddings),
    }
    if theirs.initializer_range > 0:
        model["initializer_range"] = theirs.initializer_range
    length = import_spec.length(theirs)
    train = {"sequence_length": length if length else DEFAULT_LENGTH}
    raw: dict[str, Any] = {"run": {"dir": str(run)}, "model": dict(model), "train": train}
    if tokenizer is not None:
        place = run / CHECKPOINTS / step_name(0) / TOKENIZER
        raw["data"] = {"tokenizer": str(place)}
    try:
        build(Config, raw)
    except ConfigError as error:
        where = f"{folder}/config.json: "
        found = (Problem(where + p.key, p.value, p.rule, "restore it") for p in error.problems)
        raise CheckpointError(*found) from None
    config = build(Config, apply_overrides(raw, overrides))
    changed = [key for key, value in model.items() if getattr(config.model, key) != value]
    stated = to_dict(build(Config, raw).model)
    changed += [key for key in stated if key not in model
                and getattr(config.model, key) != stated[key]]  # fmt: skip
    if changed or config.run.dir != str(run):
        key = f"model.{changed[0]}" if changed else "run.dir"
        raise ConfigError(Problem(key, None, "is given by the command", "leave it out"))
    if tokenizer is not None and tokenizer.vocab_size > theirs.vocab_size:
        rule = f"has {tokenizer.vocab_size} ids, and the model {theirs.vocab_size}"
        fix = "mend it, or import with --no-tokenizer"
        raise CheckpointError(Problem(str(tokenizer.file), None, rule, fix))
    return config


def tensor_names(
    folder: Path, source: SourceFolder, import_spec: ImportSpec, config: Config
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """By canonical name, the class's name and shape of every tensor, all found in the folder."""
    _check_sizes(folder, source, import_spec, config.model)
    shapes = {name: tuple(t.shape) for name, t in unset_weights(config.model).items()}
    names = {ours: (theirs, shapes[ours]) for ours, theirs in import_spec.names(config.model)}
    assert names.keys() == shapes.keys()
    tied = "lm_head.weight" if config.model.tied_embeddings else None
    problems = source.problems({theirs: shape for theirs, shape in names.values()}, tied)
    if problems:
        raise CheckpointError(*problems)
    if tied in source.shapes:
        first = source.tensor(names["embedding.weight"][0])
        if not torch.equal(source.tensor(str(tied)), first):
            rule = "differs from the embedding, to which config.json ties it"
            raise CheckpointError(Problem(f"{folder}: {tied}", None, rule, "restore the folder"))
    return {name: names[name] for name in shapes}


def _check_sizes(
    folder: Path, source: SourceFolder, import_spec: ImportSpec, model: ModelConfig
) -> None:
    """Refuse sizes that the folder cannot have: shapes of a billion blocks would take for ever."""
    if model.num_layers > len(source.shapes):
        rule = f"is more than the {len(source.shapes)} tensors of the folder"
        key = f"{folder}/config.json: number of blocks"
        raise CheckpointError(Problem(key, model.num_layers, rule, "restore it"))
    name = next(theirs for ours, theirs in import_spec.names(model) if ours == "embedding.weight")
    amiss = source.amiss(name, (vocab_size(model), model.hidden_size))
    if amiss is not None:
        raise CheckpointError(Problem(f"{folder}: {name}", None, amiss, "restore the folder"))


def canonical(import_spec: ImportSpec, model: ModelConfig, name: str, stored: Tensor) -> Tensor:
    """A tensor of the class as the canonical one of this name, in its stored type."""
    return import_spec.rows(model, stored) if ".qkv." in name else stored


def _write_step(
    step: Path,
    source: SourceFolder,
    import_spec: ImportSpec,
    config: Config,
    names: Mapping[str, tuple[str, tuple[int, ...]]],
    tokenizer: Tokenizer | None,
    imported: dict[str, Any],
    shard_bytes: int,
) -> None:
    """Fill the step folder, tensor by tensor."""
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
        "saved_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": {name: version(name) for name in ("alibi_lm", "torch", "transformers")},
        "shards": [f"shard_{number:05d}.safetensors" for number in range(len(shards))],
        "files": files,
    })  # fmt: skip


def _blocks(name: str, tensor: Tensor, progress: Progress) -> Iterator[Tensor]:
    """The tensor's elements in fp32, some at a time.

    Raises:
        CheckpointError: one is not finite.
    """
    for block in tensor.reshape(-1).split(_ELEMENTS_AT_ONCE):
        if not bool(block.isfinite().all()):
            rule = "has elements that are not finite"
            raise CheckpointError(Problem(name, None, rule, "restore the folder"))
        yield block.float()
        progress.advance(4 * block.numel())
