"""A checkpoint as a Hugging Face folder: written, read back, compared, and only then in place."""

from __future__ import annotations

import errno
import glob
import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError

from alibi_lm.checkpoint.step import Step
from alibi_lm.console import console
from alibi_lm.errors import CheckpointError, ConfigError, Problem
from alibi_lm.files import sync, write_json, write_text
from alibi_lm.hf.bloom import BLOOM
from alibi_lm.hf.card import model_card
from alibi_lm.hf.layout import Layout, TokenIds, check_model, config_json
from alibi_lm.hf.mpt import MPT
from alibi_lm.hf.proof import prove
from alibi_lm.hf.shards import SHARD_BYTES, write_shards
from alibi_lm.hf.tokenizer import convert_tokenizer
from alibi_lm.model.decoder import Decoder

FACTS = "alibi_lm_export.json"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LAYOUTS = {layout.name: layout for layout in (MPT, BLOOM)}
SMALLEST_MAX_LENGTH = 65_536
"""The stock MPT class makes a bias of max_seq_len per head at every call (16 heads: 4 MiB, about
1 ms here) and stops at inputs longer than that; its own T x T scores end much earlier."""


def export(
    step: Step,
    out: Path,
    *,
    dtype: Literal["fp32", "bf16", "fp16"] | str = "fp32",
    format: Literal["mpt", "bloom"] | str | None = None,
    tokenizer: bool = True,
    shard_bytes: int = SHARD_BYTES,
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

    Returns:
        The content of alibi_lm_export.json: source, settings, proof and versions.

    Raises:
        ConfigError: an unknown dtype or format, or a model that no stock class holds.
        CheckpointError: `out` holds something else, the proof fails, or there is no room.
    """
    layout = _layout(step, dtype, format)
    source = tokenizer and step.tokenizer() is not None
    settings = {"format": layout.name, "dtype": dtype, "tokenizer": source}
    wanted = {"checkpoint": {"step": step.step, "digest": step.digest}, "settings": settings}
    done = _existing(out, wanted)
    if done is not None:
        console.say(f"export {out}: already made from step {step.step:,}")
        return done
    with _folder(out) as folder:
        facts = _write(step, layout, folder, out, wanted, shard_bytes)
    first, longest = facts["proof"]["logits"][0], facts["proof"]["logits"][-1]
    console.say(
        f"export {out}: {layout.class_name}, {dtype}; logits within {first['max_difference']:.1e} "
        f"at {first['length']:,} tokens and {longest['max_difference']:.1e} at "
        f"{longest['length']:,}, {facts['proof']['greedy_tokens_equal']} greedy tokens equal"
    )
    return facts


def _layout(step: Step, dtype: str, format: str | None) -> Layout:
    problems = []
    if dtype not in DTYPES:
        problems.append(Problem("dtype", dtype, f"is not one of {', '.join(DTYPES)}",
                                "choose one of them"))  # fmt: skip
    if format is not None and format not in LAYOUTS:
        problems.append(Problem("format", format, f"is not one of {', '.join(LAYOUTS)}",
                                "choose one of them"))  # fmt: skip
    if problems:
        raise ConfigError(*problems)
    layout = LAYOUTS[format or step.config.model.shape]
    check_model(step.config.model, layout)
    return layout


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
        found = {key: facts.get(key) for key in wanted}
        rule = f"holds another export ({json.dumps(found)})"
        raise CheckpointError(Problem(str(out), None, rule, "name another folder, or remove it"))
    return dict(facts)


@contextmanager
def _folder(out: Path) -> Iterator[Path]:
    """A temporary folder beside `out`, renamed to it at the end; nothing stays after an error."""
    _remove_leftovers(out)
    temporary = out.with_name(f".{out.name}.{socket.gethostname()}-{os.getpid()}.tmp")
    made = [parent for parent in (out.parent, *out.parent.parents) if not parent.exists()]
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for path in temporary.iterdir():
            sync(path)
        sync(temporary)
        os.rename(temporary, out)
        sync(out.parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        for parent in made:
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()
        if isinstance(error, OSError | SafetensorError):
            raise _write_problem(out, error) from error
        raise


def _remove_leftovers(out: Path) -> None:
    """Take away what killed exports to `out` on this machine left behind."""
    for path in out.parent.glob(f".{glob.escape(out.name)}.{socket.gethostname()}-*.tmp"):
        owner = path.name.removesuffix(".tmp").rpartition("-")[2]
        if not Path(f"/proc/{owner}").exists():
            shutil.rmtree(path, ignore_errors=True)


def _write_problem(out: Path, error: Exception) -> CheckpointError:
    full = getattr(error, "errno", None) == errno.ENOSPC or "os error 28" in str(error)
    detail = "no space left on the device" if full else " ".join(str(error).split())
    fix = "make room or name another folder; nothing was left behind"
    return CheckpointError(Problem(str(out), None, f"cannot be written ({detail})", fix))


def _write(
    step: Step, layout: Layout, folder: Path, out: Path, wanted: dict[str, Any], shard_bytes: int
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
    write_json(folder / "config.json", config_json(layout, model, max_length, name, ids))
    write_json(folder / "generation_config.json", _generation_config(ids))
    decoder = step.decoder()
    _round(decoder, dtype)
    write_shards(folder, layout.tensors(model, decoder.state_dict()), dtype, shard_bytes)
    facts = {
        **wanted,
        "run": step.run_folder.name,
        "num_parameters": decoder.num_parameters(),
        "max_length": max_length,
        "tokenizer_digest": None if tokenizer is None else tokenizer.digest,
        "proof": prove(step, decoder, folder, layout.class_name, out),
        "versions": {name: version(name) for name in ("alibi_lm", "torch", "transformers",
                                                      "tokenizers", "safetensors")},
    }  # fmt: skip
    write_text(folder / "README.md", model_card(step, facts, layout))
    write_json(folder / FACTS, facts)
    return facts


def _generation_config(ids: TokenIds) -> dict[str, Any]:
    """Greedy, ends with a document; how many tokens is left to the caller.

    A max_new_tokens here would overrule the max_length that callers such as
    lm-evaluation-harness give.
    """
    special = {"bos_token_id": ids.eos, "eos_token_id": ids.eos, "pad_token_id": ids.pad}
    return {"do_sample": False, **{k: v for k, v in special.items() if v is not None}}


@torch.no_grad()
def _round(decoder: Decoder, dtype: torch.dtype) -> None:
    """Give the weights the values that they have in `dtype`.

    Raises:
        CheckpointError: a value is not finite in `dtype`.
    """
    for name, parameter in decoder.named_parameters():
        rounded = parameter.to(dtype)
        if not bool(rounded.isfinite().all()):
            short = next(key for key, value in DTYPES.items() if value is dtype)
            rule = f"has values that {short} does not hold"
            raise CheckpointError(Problem(name, None, rule, "export it as bf16 or fp32"))
        parameter.copy_(rounded)
