"""Export a checkpoint as a Hugging Face folder: write, read back, compare, then rename."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch

from alibi_lm.checkpoint.folder import verify
from alibi_lm.checkpoint.step import Checkpoint, open_checkpoint
from alibi_lm.config_loading import flatten
from alibi_lm.data.tokenizer import Tokenizer
from alibi_lm.hf.exporting.custom_code import CUSTOM_CODE, check_code_parity, write_code
from alibi_lm.hf.exporting.model_card import model_card
from alibi_lm.hf.exporting.tokenizer import convert_tokenizer
from alibi_lm.hf.exporting.weights import SHARD_BYTES, StepWeights, unset_weights, write_shards
from alibi_lm.hf.manifest import EXPORT_MANIFEST, check_manifest, file_digests
from alibi_lm.hf.parity.check import (
    MULTIPLES,
    ModelPair,
    ParityLevel,
    check_export_parity,
    check_tokenizer_parity,
    choose_parity,
    parity_summary,
    sample_tokens,
)
from alibi_lm.hf.parity.transformers_reference import reference_config
from alibi_lm.hf.specs import EXPORT_SPECS, IMPORT_SPECS
from alibi_lm.hf.specs.base import ExportSpec, TokenIds, check_code, check_model, config_json
from alibi_lm.hf.weights_reader import WeightsReader, read_json
from alibi_lm.model.flops import num_parameters
from alibi_lm.utils.atomic_directory import atomic_directory
from alibi_lm.utils.errors import CheckpointError, ConfigError, Problem
from alibi_lm.utils.files import write_json, write_text
from alibi_lm.utils.logging import console
from alibi_lm.utils.progress import Progress

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SMALLEST_MAX_LENGTH = 65_536
"""Lower limit of an exported max_seq_len. `MptForCausalLM` builds a bias of max_seq_len per head in
every call (16 heads: 4 MiB, about 1 ms) and refuses longer inputs; its T x T scores run out of
memory much earlier."""


def open_to_export(path: Path) -> Checkpoint:
    """Open a run and verify the checkpoint's digests, with a progress bar.

    Raises:
        CheckpointError: there is no complete checkpoint, or one of its files is damaged.
    """
    checkpoint = open_checkpoint(path, check=False)
    total = sum(entry["bytes"] for entry in checkpoint.meta["files"].values())
    with Progress("check the checkpoint", total) as progress:
        verify(checkpoint.folder, progress.advance)
    return checkpoint


def export(
    checkpoint: Checkpoint,
    out: Path,
    *,
    precision: Literal["fp32", "bf16", "fp16"] | str = "fp32",
    format: Literal["mpt", "bloom"] | str | None = None,
    tokenizer: bool = True,
    shard_bytes: int = SHARD_BYTES,
    parity: ParityLevel | str | None = None,
    with_code: bool = False,
) -> dict[str, Any]:
    """Write `step` as a Hugging Face folder `out` and check parity with `transformers`.

    The folder is written beside `out` under a temporary name and renamed after the parity check;
    an error leaves nothing behind. If `out` already holds this export, nothing is written.

    Args:
        step: the checkpoint.
        out: the folder to create.
        precision: that of the stored weights.
        format: the class to write for; by default the one that fits `model.architecture`.
        tokenizer: export the run's tokenizer too, if it has one.
        shard_bytes: largest weights file.
        parity: what to compare, see `parity.check.ParityLevel`; by default logits, one block at a
            time if memory is too short for both models (weights only with `with_code`). All other
            work, writing included, holds one tensor at a time.
        with_code: write our own modeling file, for `trust_remote_code`, beside the weights. It
            also computes models that no `transformers` class supports.

    Returns:
        The content of alibi_lm_export.json: source, settings, parity check and versions.

    Raises:
        ConfigError: an unknown precision or format, or a model that the class cannot compute.
        CheckpointError: `out` holds something else or a damaged export, the parity check fails,
            or the disk is full.
    """
    export_spec = _export_spec(checkpoint, precision, format, with_code)
    level = _parity_level(parity, checkpoint, export_spec)
    source = tokenizer and checkpoint.tokenizer() is not None
    settings = {"format": export_spec.name, "precision": precision, "tokenizer": source}
    with Progress("digest of the weights", 4 * num_parameters(checkpoint.config.model)) as progress:
        digest = checkpoint.weights_digest(progress.advance)
    identity = {"checkpoint": {"step": checkpoint.step, "weights": digest}, "settings": settings}
    existing = _existing(out, identity)
    if existing is not None:
        _verify_existing(out)
        console.info(f"export {out}: already exported from step {checkpoint.step:,}")
        return existing
    with atomic_directory(out) as folder:
        manifest = _write(checkpoint, export_spec, folder, out, identity, shard_bytes, level)
    console.info(
        f"export {out}: {export_spec.class_name}, {precision}; {parity_summary(manifest['parity'])}"
    )
    return manifest


def _export_spec(
    checkpoint: Checkpoint, precision: str, format: str | None, with_code: bool
) -> ExportSpec:
    problems = []
    for key, value, choices in (
        ("precision", precision, DTYPES),
        ("format", format or "mpt", EXPORT_SPECS),
    ):
        if value not in choices:
            rule = f"is not one of {', '.join(choices)}"
            problems.append(Problem(key, value, rule, "choose one of them"))
    if format is not None and with_code:
        rule = "names a transformers class, which needs no code"
        problems.append(Problem("format", format, rule, "leave out one of the two"))
    if problems:
        raise ConfigError(*problems)
    if with_code:
        check_code(checkpoint.config.model)
        return CUSTOM_CODE
    export_spec = EXPORT_SPECS[format or checkpoint.config.model.architecture]
    check_model(checkpoint.config.model, export_spec)
    return export_spec


def _parity_level(
    parity: ParityLevel | str | None, checkpoint: Checkpoint, export_spec: ExportSpec
) -> ParityLevel:
    """The requested parity level, or the most thorough one that memory allows.

    Raises:
        ConfigError: there is no such level, or it does not apply to custom code.
    """
    level = choose_parity(parity, checkpoint.config.model)
    if export_spec is CUSTOM_CODE and level == "blockwise":
        if parity is not None:
            rule = "needs a transformers class, and this is our own modeling file"
            raise ConfigError(Problem("parity", parity, rule, "choose logits or weights"))
        console.warning("memory is too short for both models: weights are compared, logits are not")
        return "weights"
    return level


def _existing(out: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """The manifest of an export already in `out`, or None if `out` is empty.

    Raises:
        CheckpointError: `out` holds something else.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    try:
        manifest = json.loads((out / EXPORT_MANIFEST).read_text(encoding="utf-8"))
        same = all(manifest.get(key) == value for key, value in identity.items())
    except (OSError, ValueError, AttributeError):
        raise CheckpointError(Problem(str(out), None, "exists and is not an export of a run",
                                      "name another folder"))  from None  # fmt: skip
    if not same:
        before, now = flatten({key: manifest.get(key) for key in identity}), flatten(identity)
        keys = sorted(key for key in before.keys() | now if before.get(key) != now.get(key))
        rule = f"holds another export, or one of an earlier version (differs in {', '.join(keys)})"
        raise CheckpointError(Problem(str(out), None, rule, "name another folder, or remove it"))
    return dict(manifest)


def _verify_existing(out: Path) -> None:
    """Refuse an existing export with missing or changed files."""
    try:
        check_manifest(out)
    except CheckpointError as error:
        fix = f"remove {out}, and export again"
        raise CheckpointError(*(replace(p, fix=fix) for p in error.problems)) from None


def _write(
    checkpoint: Checkpoint,
    export_spec: ExportSpec,
    folder: Path,
    out: Path,
    identity: dict[str, Any],
    shard_bytes: int,
    level: ParityLevel,
) -> dict[str, Any]:
    """Write the folder, check parity, and return the manifest."""
    dtype = DTYPES[identity["settings"]["precision"]]
    model, length = checkpoint.config.model, checkpoint.config.train.sequence_length
    tokenizer = checkpoint.tokenizer() if identity["settings"]["tokenizer"] else None
    max_length = max(SMALLEST_MAX_LENGTH, 64 * length)
    name = str(dtype).removeprefix("torch.")
    preserved = dict(checkpoint.meta.get("imported", {}).get("config", {}))
    max_length = preserved.get("max_seq_len", max_length)
    ids = TokenIds(preserved.get("eos_token_id"), preserved.get("pad_token_id"))
    if tokenizer is not None:
        convert_tokenizer(tokenizer, folder)
        ids = _tokenizer_ids(tokenizer, ids)
    if preserved:
        preserved |= {"eos_token_id": ids.eos, "pad_token_id": ids.pad}
    content = config_json(export_spec, model, max_length, name, ids, preserved)
    write_json(folder / "config.json", content)
    write_json(folder / "generation_config.json", _generation_config(ids))
    meta = unset_weights(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in export_spec.tensors(model, meta)}
    with checkpoint.reader() as reader:
        weights = StepWeights(reader, dtype)
        with weights.progress("write"):
            write_shards(folder, shapes, export_spec.tensors(model, weights), dtype, shard_bytes)
        parity = _check_parity(checkpoint, export_spec, folder, out, weights, level)
    if tokenizer is not None:
        parity["tokenizer"] = check_tokenizer_parity(checkpoint, tokenizer, folder, out, ids)
    manifest = {
        **identity,
        "run": checkpoint.run_folder.name,
        "num_parameters": sum(tensor.numel() for tensor in meta.values()),
        "max_length": max_length,
        "training_length": length,
        "tokenizer_digest": None if tokenizer is None else tokenizer.digest,
        "parity": parity,
        "versions": {name: version(name) for name in ("alibi_lm", "torch", "transformers",
                                                      "tokenizers", "safetensors")},
        "files": file_digests(folder),
    }  # fmt: skip
    write_text(folder / "README.md", model_card(checkpoint, manifest, export_spec))
    write_json(folder / EXPORT_MANIFEST, manifest)
    return manifest


def _check_parity(
    checkpoint: Checkpoint,
    export_spec: ExportSpec,
    folder: Path,
    out: Path,
    weights: StepWeights,
    level: ParityLevel,
) -> dict[str, Any]:
    model = checkpoint.config.model
    if export_spec is CUSTOM_CODE:
        write_code(folder)
        length = min(checkpoint.config.train.sequence_length, model.max_positions or sys.maxsize)
        longest = min(max(MULTIPLES) * length, model.max_positions or sys.maxsize)
        texts = sample_tokens(checkpoint, longest, model)
        return check_code_parity(folder, model, weights, level, texts, length, out)
    import_spec = replace(IMPORT_SPECS[export_spec.name], export_spec=export_spec)
    config = reference_config(folder, read_json(folder, "config.json"), import_spec)
    with WeightsReader(folder, import_spec.prefix) as source:
        pair = ModelPair(folder, source, import_spec, config, model, weights)
        return check_export_parity(checkpoint, pair, level, out)


def _tokenizer_ids(tokenizer: Tokenizer, imported: TokenIds) -> TokenIds:
    """The tokenizer's end and padding ids, for config.json; imported ones where they agree."""
    stop = tokenizer.stop_ids
    stated = imported.eos if isinstance(imported.eos, list) else [imported.eos]
    eos = list(stop) if len(stop) > 1 else stop[0]
    pad = imported.pad if tokenizer.pad_id is None else tokenizer.pad_id
    return TokenIds(imported.eos if set(stated) == set(stop) else eos, pad)


def _generation_config(ids: TokenIds) -> dict[str, Any]:
    """Greedy decoding that stops at the end of a document; the caller chooses the length.

    A max_new_tokens here would override the max_length of callers such as
    lm-evaluation-harness.
    """
    first = ids.eos[0] if isinstance(ids.eos, list) else ids.eos
    special = {"bos_token_id": first, "eos_token_id": ids.eos, "pad_token_id": ids.pad}
    return {"do_sample": False, **{k: v for k, v in special.items() if v is not None}}
