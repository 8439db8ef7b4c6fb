"""alibi_lm_export.json: what an exported folder says of itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from alibi_lm.hf.weights_reader import inside, read_json
from alibi_lm.utils.errors import CheckpointError, Problem
from alibi_lm.utils.files import sha256
from alibi_lm.utils.progress import Progress

FACTS = "alibi_lm_export.json"
_UNSIGNED = (FACTS, "README.md")


def file_digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file that the model is read from."""
    names = sorted(path.name for path in folder.iterdir() if path.name not in _UNSIGNED)
    with Progress("hash", sum((folder / name).stat().st_size for name in names)) as progress:
        return {name: sha256(folder / name, progress.advance) for name in names}


def check_own_files(folder: Path) -> None:
    """Compare the files of a folder that was exported here with what it says of them.

    Raises:
        CheckpointError: naming every file that is missing or was changed.
    """
    if not os.path.lexists(folder / FACTS):
        return
    digests: Any = read_json(folder, FACTS).get("files", {})
    problems = []
    fix = f"restore it, or take {FACTS} away if the change is meant"
    paths = {name: inside(folder, name) for name in digests} if isinstance(digests, dict) else {}
    with Progress("hash", sum(path.stat().st_size for path in paths.values())) as progress:
        for name, path in paths.items():
            if sha256(path, progress.advance) != digests[name]:
                problems.append(Problem(str(path), None, "was changed since its export", fix))
    if problems:
        raise CheckpointError(*problems)
