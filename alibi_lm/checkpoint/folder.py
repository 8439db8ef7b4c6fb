"""The run folder on disk: names of its parts, finding and verifying its checkpoints."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from alibi_lm.utils.errors import CheckpointError, Problem
from alibi_lm.utils.files import json_text, sha256, sha256_of_text, write_text
from alibi_lm.utils.logging import console

CHECKPOINTS = "checkpoints"
LATEST = "latest"
META = "meta.json"
CONFIG = "config.yaml"
TOKENIZER = "tokenizer"
FORMAT = 3
"""What this version writes. 2: strided fragments; 3: meta.json holds a digest of itself."""
READABLE = (1, 2, 3)
"""Formats that this version reads."""
DIGEST = "sha256"
"""The key of meta.json's own digest, the last one."""
_SIGNED_SINCE = 3
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


def incomplete_folders(run: Path) -> list[Path]:
    """Step folders without meta.json, oldest first.

    A checkpoint is renamed to its step when it is complete, so these were damaged later.
    """
    folders = (path for path in (run / CHECKPOINTS).glob("step_*") if _STEP.match(path.name))
    lacking = (path for path in folders if path.is_dir() and not (path / META).is_file())
    return sorted(lacking, key=_number)


def every_step_folder(run: Path) -> list[Path]:
    """The checkpoints of a run, complete or not, oldest first."""
    return sorted([*step_folders(run), *incomplete_folders(run)], key=_number)


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def step_number(folder: Path) -> int | None:
    """The step that a folder's name says, if it is a step folder's name."""
    match = _STEP.match(folder.name)
    return None if match is None else int(match.group(1))


def run_of(step_folder: Path) -> Path:
    """The run that a step folder belongs to; the step folder itself where it stands alone."""
    parent = step_folder.parent
    return parent.parent if parent.name == CHECKPOINTS else step_folder


def write_meta(step_folder: Path, meta: Mapping[str, Any]) -> None:
    """Write meta.json, the last file of a checkpoint, with a digest of itself.

    `format` is set to this version's.
    """
    content = {"format": FORMAT} | {key: meta[key] for key in meta if key != "format"}
    write_text(step_folder / META, _meta_text(content))


def _meta_text(content: Mapping[str, Any]) -> str:
    """The one way to write this content, with its digest; any other text is damaged."""
    return json_text({**content, DIGEST: sha256_of_text(json_text(content))})


def read_meta(step_folder: Path) -> dict[str, Any]:
    """The meta.json of a checkpoint.

    Raises:
        CheckpointError: it is missing, damaged, or of a newer format.
    """
    path = step_folder / META
    fix = "choose another step, or restore the file"
    try:
        text = path.read_bytes().decode()
        meta = json.loads(text)
    except FileNotFoundError:
        rule = "is missing, so this is no complete checkpoint"
        raise CheckpointError(Problem(str(path), None, rule, fix)) from None
    except OSError as error:
        rule = f"cannot be read ({error.strerror})"
        raise CheckpointError(Problem(str(path), None, rule, fix)) from None
    except ValueError:
        raise CheckpointError(Problem(str(path), None, "is damaged", fix)) from None
    if not isinstance(meta, dict) or not _is_whole(meta, step_folder.name):
        raise CheckpointError(Problem(str(path), None, "is damaged", fix))
    digest = meta.pop(DIGEST, None)
    if meta["format"] not in READABLE:
        rule = f"is of checkpoint format {meta['format']}; this version reads {READABLE}"
        raise CheckpointError(Problem(str(path), None, rule, "use the version that wrote it"))
    # Formats 1 and 2 have no digest; if there is one, a bit of the format flipped.
    signed = meta["format"] >= _SIGNED_SINCE
    if signed != (digest is not None) or (signed and text != _meta_text(meta)):
        raise CheckpointError(Problem(str(path), None, "does not match its own sha256", fix))
    return meta


def _is_whole(meta: dict[str, Any], folder_name: str) -> bool:
    """Whether meta.json has the keys that are read, and the step of its folder's name."""
    files = meta.get("files")
    if not isinstance(files, dict) or not isinstance(meta.get("step"), int):
        return False
    if not isinstance(meta.get("format"), int):
        return False
    if not all(isinstance(facts, dict) and {"bytes", "sha256"} <= facts.keys()
               for facts in files.values()):  # fmt: skip
        return False
    return step_number(Path(folder_name)) in (None, meta["step"])


def damage(
    step_folder: Path,
    meta: dict[str, Any],
    part: int = 0,
    parts: int = 1,
    advance: Callable[[int], None] | None = None,
) -> Iterator[Problem]:
    """Every file of a checkpoint that is missing, cut short or changed, by meta.json.

    With `parts` readers, reader `part` checks every `parts`-th file. `advance` is called with
    the bytes of each piece read.
    """
    fix = "restore the file, or use an earlier step"
    for name, facts in list(meta["files"].items())[part::parts]:
        path = step_folder / name
        try:
            rule = _rule_broken(path, facts, advance)
        except OSError as error:
            rule = f"cannot be read ({error.strerror})"
        if rule is not None:
            yield Problem(str(path), None, rule, fix)


def _rule_broken(
    path: Path, facts: Mapping[str, Any], advance: Callable[[int], None] | None
) -> str | None:
    if not path.is_file():
        return "is missing"
    if (size := path.stat().st_size) != facts["bytes"]:
        return f"has {size} of {facts['bytes']} bytes"
    return None if sha256(path, advance) == facts["sha256"] else "does not match its sha256"


def verify(step_folder: Path, advance: Callable[[int], None] | None = None) -> dict[str, Any]:
    """Check every file of a checkpoint against meta.json and return it.

    `advance` is called with the bytes of each piece read.

    Raises:
        CheckpointError: naming every damaged file.
    """
    meta = read_meta(step_folder)
    problems = list(damage(step_folder, meta, advance=advance))
    if problems:
        raise CheckpointError(*problems)
    return meta


def resolve_step(path: Path) -> Path:
    """The step folder meant by a run folder (its newest complete step) or a step folder.

    Raises:
        CheckpointError: there is no such folder, or no complete checkpoint in it.
    """
    if str(path).startswith("hf:"):
        rule, fix = "is for evals, and a run is needed here", "make one with `alibi-lm import`"
        raise CheckpointError(Problem(str(path), None, rule, fix))
    if not path.is_dir():
        raise CheckpointError(Problem(str(path), None, "no such folder", "check the path"))
    if (path / META).is_file():
        return path
    folders = step_folders(path)
    if not folders:
        if (path / "config.json").is_file():
            rule = "is a Hugging Face folder, and a run is needed here"
            fix = "evaluate it as hf:FOLDER, or make a run of it with `alibi-lm import`"
        elif _STEP.match(path.name):
            rule, fix = "is not a complete checkpoint (no meta.json)", "choose another step"
        else:
            rule, fix = "holds no complete checkpoint", "train first, or check the path"
        raise CheckpointError(Problem(str(path), None, rule, fix))
    for folder in incomplete_folders(path):
        if _number(folder) > _number(folders[-1]):
            console.warning(f"damaged checkpoint: {folder / META} is missing; using an older step")
    return folders[-1]


def folders_meant(path: Path) -> list[Path]:
    """Every step folder, whole or not, of a run folder, oldest first; or the step folder given.

    Raises:
        CheckpointError: there is no such folder, or no checkpoint in it.
    """
    if (path / META).is_file() or (_STEP.match(path.name) and path.is_dir()):
        return [path]
    return every_step_folder(path) or [resolve_step(path)]


def verify_all(path: Path) -> Iterator[tuple[Path, list[Problem]]]:
    """Each step folder of a run (or the one given) with what is damaged in it.

    Raises:
        CheckpointError: there is no such folder, or no checkpoint in it.
    """
    for folder in folders_meant(path):
        try:
            yield folder, list(damage(folder, read_meta(folder)))
        except CheckpointError as error:
            yield folder, list(error.problems)


def latest_problem(run: Path, *expected: Path) -> Problem | None:
    """What is wrong with `latest` unless it names one of the expected step folders.

    No reader relies on it. A kill between the end of a save and its writing leaves it one save
    behind.
    """
    path = run / CHECKPOINTS / LATEST
    names = [folder.name for folder in expected]
    try:
        wrong = path.read_bytes() not in [f"{name}\n".encode() for name in names]
        rule = f"does not name {' or '.join(dict.fromkeys(names))} (damage, or a kill in a save)"
    except FileNotFoundError:
        wrong, rule = True, "is missing"
    except OSError as error:
        wrong, rule = True, f"cannot be read ({error.strerror})"
    fix = "nothing to do: steps are found without it, and the next save writes it"
    return Problem(str(path), None, rule, fix) if wrong else None
