"""The run folder on disk: names of its parts, finding and verifying its checkpoints."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from alibi_lm.errors import CheckpointError, Problem
from alibi_lm.files import sha256

CHECKPOINTS = "checkpoints"
LATEST = "latest"
META = "meta.json"
CONFIG = "config.yaml"
TOKENIZER = "tokenizer"
FORMAT = 2
READABLE = (1, 2)
"""Formats that this version reads."""
_STEP = re.compile(r"^step_(\d{8,})$")


def step_name(step: int) -> str:
    """Folder name of a step's checkpoint, evals and export."""
    return f"step_{step:08d}"


def step_folders(run: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first. A folder without meta.json is none."""
    found = []
    folder = run / CHECKPOINTS
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _STEP.match(path.name)
        if match and (path / META).is_file():
            found.append((int(match.group(1)), path))
    return [path for _, path in sorted(found)]


def read_meta(step_folder: Path) -> dict[str, Any]:
    """The meta.json of a checkpoint.

    Raises:
        CheckpointError: it is missing, cut short, or of a newer format.
    """
    path = step_folder / META
    fix = "choose another step, or restore the file"
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(Problem(str(path), None, "is missing", fix)) from None
    except (UnicodeDecodeError, json.JSONDecodeError):
        raise CheckpointError(Problem(str(path), None, "is damaged", fix)) from None
    if not isinstance(meta, dict) or not _is_whole(meta, step_folder.name):
        raise CheckpointError(Problem(str(path), None, "is damaged", fix))
    if meta.get("format") not in READABLE:
        rule = f"is of checkpoint format {meta.get('format')}; this version reads {READABLE}"
        raise CheckpointError(Problem(str(path), None, rule, "use the version that wrote it"))
    return meta


def _is_whole(meta: dict[str, Any], folder_name: str) -> bool:
    """Whether meta.json has what is read of it, and is of the folder that it lies in."""
    files = meta.get("files")
    if not isinstance(files, dict) or not isinstance(meta.get("step"), int):
        return False
    if not all(isinstance(facts, dict) and {"bytes", "sha256"} <= facts.keys()
               for facts in files.values()):  # fmt: skip
        return False
    match = _STEP.match(folder_name)
    return match is None or int(match.group(1)) == meta["step"]


def damage(
    step_folder: Path, meta: dict[str, Any], part: int = 0, parts: int = 1
) -> Iterator[Problem]:
    """Every file of a checkpoint that is missing, cut short or changed, by meta.json.

    With `parts` readers, reader `part` looks at every `parts`-th file.
    """
    fix = "restore the file, or use an earlier step"
    for name, facts in list(meta["files"].items())[part::parts]:
        path = step_folder / name
        if not path.is_file():
            yield Problem(str(path), None, "is missing", fix)
        elif path.stat().st_size != facts["bytes"]:
            size = path.stat().st_size
            yield Problem(str(path), None, f"has {size} of {facts['bytes']} bytes", fix)
        elif sha256(path) != facts["sha256"]:
            yield Problem(str(path), None, "does not match its sha256", fix)


def verify(step_folder: Path) -> dict[str, Any]:
    """Check every file of a checkpoint against meta.json and return it.

    Raises:
        CheckpointError: naming every damaged file.
    """
    meta = read_meta(step_folder)
    problems = list(damage(step_folder, meta))
    if problems:
        raise CheckpointError(*problems)
    return meta


def resolve_step(path: Path) -> Path:
    """The step folder meant by a run folder (its newest complete step) or a step folder.

    Raises:
        CheckpointError: there is no such folder, or no complete checkpoint in it.
    """
    if not path.is_dir():
        raise CheckpointError(Problem(str(path), None, "no such folder", "check the path"))
    if (path / META).is_file():
        return path
    folders = step_folders(path)
    if not folders:
        if _STEP.match(path.name):
            rule, fix = "is not a complete checkpoint (no meta.json)", "choose another step"
        else:
            rule, fix = "holds no complete checkpoint", "train first, or check the path"
        raise CheckpointError(Problem(str(path), None, rule, fix))
    return folders[-1]
