"""Relative paths of a run's config, found from any folder.

config.yaml keeps paths as the user wrote them: relative to the folder that training was started in.
meta.json names that folder twice: relative to the run folder, which still holds after the run was
moved together with its data, and absolute.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from alibi_lm.checkpoint.folder import run_of
from alibi_lm.checkpoint.step import Checkpoint
from alibi_lm.utils.errors import ConfigError, DataError, Problem

CONFIG_FOLDERS = "config_folders"
"""Key of meta.json: where relative paths of config.yaml are looked up, in this order."""


def config_folders(run: Path) -> list[str]:
    """What meta.json records for a run whose config is read in the current folder."""
    here = Path.cwd()
    return [os.path.relpath(here, run.resolve()), str(here)]


def moved_folders(folders: Iterable[str], old: Path, new: Path) -> list[str]:
    """The recorded folders of the step folder `old`, for its copy `new`."""
    old_run, new_run = run_of(old).resolve(), run_of(new).resolve()
    return [
        name if os.path.isabs(name) else os.path.relpath(old_run / name, new_run)
        for name in folders
    ]


def find_prefix(key: str, prefix: str, folders: Sequence[Path], fix: str) -> str:
    """A prefix of token files in the first of the folders that has them; as given in the current.

    Raises:
        DataError: none has them.
    """
    tried = list(dict.fromkeys(folder / prefix for folder in folders))
    for path in tried:
        # Not Path.exists, which raises where another user's folder may not be read.
        if any(os.path.exists(f"{path}{ending}") for ending in (".idx", ".bin")):
            return prefix if path == Path.cwd() / prefix else str(path)
    if prefix.endswith((".idx", ".bin")):
        fix = "leave out the ending"
    names = ", ".join(f"{path}.idx" for path in tried)
    raise DataError(Problem(key, prefix, f"no such token files (looked for {names})", fix))


def existing_path(key: str, value: str) -> Path:
    """The file or folder of a config that is read in the current folder.

    Raises:
        ConfigError: there is none.
    """
    path = Path(value)
    if not os.path.exists(path):
        rule, fix = f"no such file or folder ({Path.cwd() / path})", "check the path"
        raise ConfigError(Problem(key, value, rule, fix))
    return path


def find_corpus(checkpoint: Checkpoint, key: str, prefix: str, fix: str) -> str:
    """A prefix of token files in a run's config: beside the run, where it was trained, or here.

    Runs of older versions do not record where they were trained.

    Raises:
        DataError: no such files, naming the key and every place.
    """
    run = checkpoint.run_folder.resolve()
    recorded = [
        Path(os.path.normpath(run / name)) for name in checkpoint.meta.get(CONFIG_FOLDERS, ())
    ]
    return find_prefix(key, prefix, [*recorded, Path.cwd()], fix)


def validation_corpora(checkpoint: Checkpoint, fix: str = "put them back") -> list[str]:
    """Prefixes of a run's validation corpora.

    Raises:
        DataError: one of them is not found.
    """
    prefixes = enumerate(checkpoint.config.data.validation)
    return [find_corpus(checkpoint, f"data.validation.{n}", prefix, fix) for n, prefix in prefixes]
