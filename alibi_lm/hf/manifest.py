"""alibi_lm_export.json: source, settings, parity check and file digests of an export."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from alibi_lm.hf.weights_reader import plain_file, read_json
from alibi_lm.utils.errors import CheckpointError, Problem
from alibi_lm.utils.files import sha256
from alibi_lm.utils.progress import Progress

EXPORT_MANIFEST = "alibi_lm_export.json"
_UNSIGNED = (EXPORT_MANIFEST, "README.md")


def file_digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of the folder except the manifest and the model card."""
    names = sorted(path.name for path in folder.iterdir() if path.name not in _UNSIGNED)
    with Progress("hash", sum((folder / name).stat().st_size for name in names)) as progress:
        return {name: sha256(folder / name, progress.advance) for name in names}


def check_manifest(folder: Path) -> None:
    """Compare the files of an export with the digests in its manifest, if it has one.

    Raises:
        CheckpointError: lists every file that is missing or was changed.
    """
    if not os.path.lexists(folder / EXPORT_MANIFEST):
        return
    digests: Any = read_json(folder, EXPORT_MANIFEST).get("files", {})
    problems = []
    fix = f"restore it, or remove {EXPORT_MANIFEST} if the change is intended"
    paths = (
        {name: plain_file(folder, name) for name in digests} if isinstance(digests, dict) else {}
    )
    with Progress("hash", sum(path.stat().st_size for path in paths.values())) as progress:
        for name, path in paths.items():
            if sha256(path, progress.advance) != digests[name]:
                problems.append(Problem(str(path), None, "was changed after its export", fix))
    if problems:
        raise CheckpointError(*problems)
