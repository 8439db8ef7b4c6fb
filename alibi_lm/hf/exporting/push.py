"""Upload an exported folder to the Hugging Face Hub."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alibi_lm.hf.manifest import EXPORT_MANIFEST, check_manifest
from alibi_lm.hf.weights_reader import read_json
from alibi_lm.utils.errors import CheckpointError, ConfigError, Problem
from alibi_lm.utils.logging import console

_REPLACED = ("model*.safetensors", "model.safetensors.index.json", "tokenizer*")
"""Repository files that are deleted if the new export lacks them: `transformers` would read an old
shard or index in place of the new weights."""


def check_name(repo: str) -> None:
    """Check a repository name.

    Raises:
        ConfigError: the name is malformed.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        if not repo:
            raise HFValidationError("it is empty")
        validate_repo_id(repo)
    except HFValidationError as error:
        rule = f"is not a repository name ({_line(error)})"
        raise ConfigError(Problem("--push", repo, rule, "give NAME or USER/NAME")) from None


def check_login() -> None:
    """Check the Hub login before the export starts.

    Raises:
        CheckpointError: there is no token, the Hub rejects it, it is read-only, or the Hub cannot
            be reached.
    """
    from huggingface_hub import HfApi, get_token

    login = "log in with `hf auth login`, or set HF_TOKEN"
    if get_token() is None:
        raise CheckpointError(Problem("--push", None, "needs a login to the Hub", login))
    try:
        user = HfApi().whoami()
    except Exception as error:  # the Hub client raises errors of many kinds
        refused = getattr(getattr(error, "response", None), "status_code", None) == 401
        rule = (
            f"the Hub rejected the login ({_line(error)})"
            if refused
            else f"cannot reach the Hub ({_line(error)})"
        )
        fix = login if refused else "check the connection, or export without --push"
        raise CheckpointError(Problem("--push", None, rule, fix)) from None
    token = ((user.get("auth") or {}).get("accessToken")) or {}
    if token.get("role") == "read":
        rule = f"the token {token.get('displayName', '')} of {user.get('name')} is read-only"
        raise CheckpointError(Problem("--push", None, rule, "use a token with write access"))


def exported_files(folder: Path) -> dict[str, int]:
    """Bytes of each file that the export wrote; files added later are not listed."""
    names = [*read_json(folder, EXPORT_MANIFEST).get("files", {}), "README.md", EXPORT_MANIFEST]
    return {name: (folder / name).stat().st_size for name in names if (folder / name).is_file()}


def push(folder: Path, repo: str, *, private: bool = True, dry_run: bool = False) -> str | None:
    """Upload an exported folder to the Hub's model repository `repo`.

    The repository is created if it does not exist. An existing one keeps its visibility and its
    other files, except weights and tokenizer files that the export does not have.

    Args:
        folder: a folder written by `export`. Only its model card may have been edited.
        repo: `NAME` (of the logged-in user) or `USER/NAME`.
        private: visibility of a repository that is created.
        dry_run: list what would be uploaded without contacting the Hub.

    Returns:
        The commit's URL, or None for a dry run.

    Raises:
        ConfigError: the name is malformed.
        CheckpointError: a file was changed after the export, or the upload failed. The folder
            is left as it is.
    """
    check_name(repo)
    check_manifest(folder)
    files = exported_files(folder)
    visibility = "private" if private else "public"
    if dry_run:
        for name, size in files.items():
            console.info(f"{size:>16,} bytes  {name}")
    content = f"{len(files)} files, {sum(files.values()):,} bytes of {folder}"
    if dry_run:
        console.info(
            f"push {repo}: {content} would be uploaded ({visibility} if created); nothing was sent"
        )
        return None
    address = _upload(folder, repo, list(files), private)
    console.info(f"push {repo}: {content}; {address}")
    return address


def _upload(folder: Path, repo: str, names: list[str], private: bool) -> str:
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        with _bars_on_terminals_only():
            created = api.create_repo(repo, private=private, exist_ok=True)
            commit = api.upload_folder(
                repo_id=created.repo_id,
                folder_path=folder,
                allow_patterns=names,
                delete_patterns=list(_REPLACED),
                commit_message=f"Upload {folder.name}",
            )
    except Exception as error:  # the Hub client raises errors of many kinds
        rule = f"upload failed ({_line(error)})"
        fix = f"{folder} is complete: run the same command again to retry"
        raise CheckpointError(Problem("--push", repo, rule, fix)) from None
    return str(commit.commit_url)


@contextmanager
def _bars_on_terminals_only() -> Iterator[None]:
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if sys.stderr.isatty() or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _line(error: BaseException | Any) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
