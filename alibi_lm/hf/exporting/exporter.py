"""A checkpoint as a Hugging Face folder: written, read back, compared, and only then in place."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch

from alibi_lm.checkpoint.folder import verify
from alibi_lm.checkpoint.step import Step, open_run
from alibi_lm.config_loading import flatten
from alibi_lm.hf.exporting.custom_code import CODE, prove_code, write_code
from alibi_lm.hf.exporting.model_card import model_card
from alibi_lm.hf.exporting.shards import SHARD_BYTES, write_shards
from alibi_lm.hf.exporting.tokenizer import convert_tokenizer
from alibi_lm.hf.exporting.weights import StepWeights, unset_weights
from alibi_lm.hf.manifest import FACTS, check_own_files, file_digests
from alibi_lm.hf.parity.check import (
    MULTIPLES,
    Pair,
    ParityLevel,
    check_export_parity,
    choose,
    prove_tokenizer,
    sample_tokens,
    told,
)
from alibi_lm.hf.parity.transformers_reference import reference_config
from alibi_lm.hf.specs.base import ExportSpec, TokenIds, check_code, check_model, config_json
from alibi_lm.hf.specs.bloom import BLOOM, BLOOM_IMPORT
from alibi_lm.hf.specs.mpt import MPT, MPT_IMPORT
from alibi_lm.hf.weights_reader import SourceFolder, read_json
from alibi_lm.model.flops import num_parameters
from alibi_lm.utils.atomic_directory import atomic_directory
from alibi_lm.utils.errors import CheckpointError, ConfigError, Problem
from alibi_lm.utils.files import write_json, write_text
from alibi_lm.utils.logging import console
from alibi_lm.utils.progress import Progress

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
READINGS = {"mpt": MPT_IMPORT, "bloom": BLOOM_IMPORT}
LAYOUTS = {export_spec.name: export_spec for export_spec in (MPT, BLOOM)}
SMALLEST_MAX_LENGTH = 65_536
"""The stock MPT class makes a bias of max_seq_len per head at every call (16 heads: 4 MiB, about
1 ms here) and stops at inputs longer than that; its own T x T scores end much earlier."""


def open_to_export(path: Path) -> Step:
    """`open_run`, with a bar over the files that are compared with their sha256.

    Raises:
        CheckpointError: there is no complete checkpoint, or a file of it is damaged.
    """
    step = open_run(path, check=False)
    total = sum(facts["bytes"] for facts in step.meta["files"].values())
    with Progress("check the checkpoint", total) as progress:
        verify(step.folder, progress.advance)
    return step


def export(
    step: Step,
    out: Path,
    *,
    dtype: Literal["fp32", "bf16", "fp16"] | str = "fp32",
    format: Literal["mpt", "bloom"] | str | None = None,
    tokenizer: bool = True,
    shard_bytes: int = SHARD_BYTES,
    parity: ParityLevel | str | None = None,
    with_code: bool = False,
) -> dict[str, Any]:
    """Write `step` as a Hugging Face folder `out` and prove that stock `transformers` agrees.

    The folder is made beside `out` under a temporary name, and gets its name when the proof is
    done; whatever goes wrong leaves nothing behind. An `out` that holds this very export is left
    as it is.

    Args:
        step: the checkpoint.
        out: the folder to make.
        dtype: type of the stored weights.
        format: the class to write for; by default the one that fits the model's shape.
        tokenizer: whether the run's tokenizer, if it has one, is exported too.
        shard_bytes: largest size of a weights file.
        parity: what is compared, see `parity.ParityLevel`; by default logits, one block at a
            time where memory is short for both models (with our own modeling file, bits only).
            What only one tensor is needed for at a time, the writing above all, holds no more.
        with_code: write our own modeling file, for `trust_remote_code`, beside the weights. It
            holds every model, those too that no stock class does.

    Returns:
        The content of alibi_lm_export.json: source, settings, proof and versions.

    Raises:
        ConfigError: an unknown dtype or format, or a model that no stock class holds.
        CheckpointError: `out` holds something else or a damaged export, the proof fails, or there
            is no room.
    """
    export_spec = _layout(step, dtype, format, with_code)
    kind = _kind(parity, step, export_spec)
    source = tokenizer and step.tokenizer() is not None
    settings = {"format": export_spec.name, "dtype": dtype, "tokenizer": source}
    with Progress("digest of the weights", 4 * num_parameters(step.config.model)) as progress:
        digest = step.weights_digest(progress.advance)
    wanted = {"checkpoint": {"step": step.step, "weights": digest}, "settings": settings}
    done = _existing(out, wanted)
    if done is not None:
        _check_done(out)
        console.info(f"export {out}: already made from step {step.step:,}")
        return done
    with atomic_directory(out) as folder:
        facts = _write(step, export_spec, folder, out, wanted, shard_bytes, kind)
    console.info(f"export {out}: {export_spec.class_name}, {dtype}; {told(facts['parity'])}")
    return facts


def _layout(step: Step, dtype: str, format: str | None, with_code: bool) -> ExportSpec:
    problems = []
    if dtype not in DTYPES:
        problems.append(Problem("dtype", dtype, f"is not one of {', '.join(DTYPES)}",
                                "choose one of them"))  # fmt: skip
    if format is not None and format not in LAYOUTS:
        problems.append(Problem("format", format, f"is not one of {', '.join(LAYOUTS)}",
                                "choose one of them"))  # fmt: skip
    if format is not None and with_code:
        problems.append(Problem("format", format, "is of a stock class, which needs no code",
                                "leave out one of the two"))  # fmt: skip
    if problems:
        raise ConfigError(*problems)
    if with_code:
        check_code(step.config.model)
        return CODE
    export_spec = LAYOUTS[format or step.config.model.architecture]
    check_model(step.config.model, export_spec)
    return export_spec


def _kind(parity: ParityLevel | str | None, step: Step, export_spec: ExportSpec) -> ParityLevel:
    """The proof asked for, or the one that memory is enough for.

    Raises:
        ConfigError: there is no such proof, or not of this layout.
    """
    kind = choose(parity, step.config.model)
    if export_spec is CODE and kind == "blockwise":
        if parity is not None:
            rule = "takes a stock class apart, and this is our own modeling file"
            raise ConfigError(Problem("parity", parity, rule, "choose logits or weights"))
        console.warn("memory does not hold both models: bits are compared, and logits are not")
        return "weights"
    return kind


def _existing(out: Path, wanted: dict[str, Any]) -> dict[str, Any] | None:
    """The facts of an export that is already there, or None where there is nothing.

    Raises:
        CheckpointError: something else is there.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    try:
        facts = json.loads((out / FACTS).read_text(encoding="utf-8"))
        same = all(facts.get(key) == value for key, value in wanted.items())
    except (OSError, ValueError, AttributeError):
        raise CheckpointError(Problem(str(out), None, "exists and is not an export of a run",
                                      "name another folder"))  from None  # fmt: skip
    if not same:
        before, now = flatten({key: facts.get(key) for key in wanted}), flatten(wanted)
        keys = sorted(key for key in before.keys() | now if before.get(key) != now.get(key))
        rule = f"holds another export, or one of an earlier version (other {', '.join(keys)})"
        raise CheckpointError(Problem(str(out), None, rule, "name another folder, or remove it"))
    return dict(facts)


def _check_done(out: Path) -> None:
    """Refuse to call an export made whose files have been lost or changed since."""
    try:
        check_own_files(out)
    except CheckpointError as error:
        fix = f"remove {out}, and export again"
        raise CheckpointError(*(replace(p, fix=fix) for p in error.problems)) from None


def _write(
    step: Step,
    export_spec: ExportSpec,
    folder: Path,
    out: Path,
    wanted: dict[str, Any],
    shard_bytes: int,
    kind: ParityLevel,
) -> dict[str, Any]:
    """Fill the folder, prove it, and return the facts that it holds."""
    dtype = DTYPES[wanted["settings"]["dtype"]]
    model, length = step.config.model, step.config.train.sequence_length
    tokenizer = step.tokenizer() if wanted["settings"]["tokenizer"] else None
    ids = TokenIds()
    if tokenizer is not None:
        convert_tokenizer(tokenizer, folder)
        ids = TokenIds(tokenizer.eos_id, tokenizer.pad_id)
    max_length = max(SMALLEST_MAX_LENGTH, 64 * length)
    name = str(dtype).removeprefix("torch.")
    kept = step.meta.get("imported", {}).get("config", {})
    if kept:
        ids = TokenIds(kept["eos_token_id"], kept["pad_token_id"])
        max_length = kept.get("max_seq_len", max_length)
    content = config_json(export_spec, model, max_length, name, ids, kept)
    write_json(folder / "config.json", content)
    write_json(folder / "generation_config.json", _generation_config(ids))
    meta = unset_weights(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in export_spec.tensors(model, meta)}
    with step.reader() as reader:
        weights = StepWeights(reader, dtype)
        with weights.progress("write"):
            write_shards(folder, shapes, export_spec.tensors(model, weights), dtype, shard_bytes)
        parity = _proved(step, export_spec, folder, out, weights, kind)
    if tokenizer is not None:
        parity["tokenizer"] = prove_tokenizer(step, tokenizer, folder, out)
    facts = {
        **wanted,
        "run": step.run_folder.name,
        "num_parameters": sum(tensor.numel() for tensor in meta.values()),
        "max_length": max_length,
        "training_length": length,
        "tokenizer_digest": None if tokenizer is None else tokenizer.digest,
        "parity": parity,
        "versions": {name: version(name) for name in ("alibi_lm", "torch", "transformers",
                                                      "tokenizers", "safetensors")},
        "files": file_digests(folder),
    }  # fmt: skip
    write_text(folder / "README.md", model_card(step, facts, export_spec))
    write_json(folder / FACTS, facts)
    return facts


def _proved(
    step: Step,
    export_spec: ExportSpec,
    folder: Path,
    out: Path,
    weights: StepWeights,
    kind: ParityLevel,
) -> dict[str, Any]:
    model = step.config.model
    if export_spec is CODE:
        write_code(folder)
        length = min(step.config.train.sequence_length, model.max_positions or sys.maxsize)
        longest = min(max(MULTIPLES) * length, model.max_positions or sys.maxsize)
        texts = sample_tokens(step, longest, model)
        return prove_code(folder, model, weights, kind, texts, length, out)
    import_spec = replace(READINGS[export_spec.name], export_spec=export_spec)
    config = reference_config(folder, read_json(folder, "config.json"), import_spec)
    with SourceFolder(folder, import_spec.prefix) as source:
        pair = Pair(folder, source, import_spec, config, model, weights)
        return check_export_parity(step, pair, kind, out)


def _generation_config(ids: TokenIds) -> dict[str, Any]:
    """Greedy, ends with a document; how many tokens is left to the caller.

    A max_new_tokens here would overrule the max_length that callers such as
    lm-evaluation-harness give.
    """
    special = {"bos_token_id": ids.eos, "eos_token_id": ids.eos, "pad_token_id": ids.pad}
    return {"do_sample": False, **{k: v for k, v in special.items() if v is not None}}
