"""An exported folder put on the Hugging Face hub, by the hub's own client."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alibi_lm.hf.manifest import FACTS, check_own_files
from alibi_lm.hf.weights_reader import read_json
from alibi_lm.utils.errors import CheckpointError, ConfigError, Problem
from alibi_lm.utils.logging import console

_OF_AN_EXPORT = ("model*.safetensors", "model.safetensors.index.json", "tokenizer*")
"""Files of the repository that go where the new export has none of that name: a shard or an index
of an earlier one would be read in place of the new weights."""


def check_name(repo: str) -> None:
    """Refuse what cannot be a repository's name.

    Raises:
        ConfigError: it is malformed.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        if not repo:
            raise HFValidationError("it is empty")
        validate_repo_id(repo)
    except HFValidationError as error:
        rule = f"is not a repository's name ({_line(error)})"
        raise ConfigError(Problem("--push", repo, rule, "give NAME or USER/NAME")) from None


def check_login() -> None:
    """Ask the hub who the user is, so that a mistake is told before the work and not after it.

    Raises:
        CheckpointError: there is no token, the hub does not take it, it may only read, or the hub
            cannot be reached.
    """
    from huggingface_hub import HfApi, get_token

    login = "log in with `hf auth login`, or set HF_TOKEN"
    if get_token() is None:
        raise CheckpointError(Problem("--push", None, "needs a login to the hub", login))
    try:
        user = HfApi().whoami()
    except Exception as error:  # the hub's client and what it stands on raise errors of many kinds
        refused = getattr(getattr(error, "response", None), "status_code", None) == 401
        rule = f"the hub does not let you in ({_line(error)})"
        fix = login if refused else "mend the connection, or export without it"
        raise CheckpointError(Problem("--push", None, rule, fix)) from None
    token = ((user.get("auth") or {}).get("accessToken")) or {}
    if token.get("role") == "read":
        rule = f"the token {token.get('displayName', '')} of {user.get('name')} may only read"
        raise CheckpointError(Problem("--push", None, rule, "take one that may write"))


def listed(folder: Path) -> dict[str, int]:
    """Bytes of each file of an exported folder; what somebody else put there is not among them."""
    names = [*read_json(folder, FACTS).get("files", {}), "README.md", FACTS]
    return {name: (folder / name).stat().st_size for name in names if (folder / name).is_file()}


def push(folder: Path, repo: str, *, private: bool = True, dry_run: bool = False) -> str | None:
    """Upload an exported folder to the hub's model repository `repo`.

    The repository is made if there is none; one that is there keeps who may see it, and its other
    files, except for weights and tokenizer files that the export does not have.

    Args:
        folder: a folder that `export` made. Its card may have been edited, nothing else.
        repo: `NAME` (of the user that is logged in) or `USER/NAME`.
        private: whether a repository that is made can be seen by its owner only.
        dry_run: only say what would be uploaded; the hub is not asked anything.

    Returns:
        The commit's address, None of a dry run.

    Raises:
        ConfigError: the name is malformed.
        CheckpointError: a file was changed since the export, or the hub refuses or cannot be
            reached. The folder stays as it is.
    """
    check_name(repo)
    check_own_files(folder)
    files = listed(folder)
    kind = "private" if private else "public"
    if dry_run:
        for name, size in files.items():
            console.info(f"{size:>16,} bytes  {name}")
    told = f"{len(files)} files, {sum(files.values()):,} bytes of {folder}"
    if dry_run:
        console.info(f"push {repo}: {told} would be uploaded ({kind}, if made); nothing was sent")
        return None
    address = _upload(folder, repo, list(files), private)
    console.info(f"push {repo}: {told}; {address}")
    return address


def _upload(folder: Path, repo: str, names: list[str], private: bool) -> str:
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        with _bars_on_terminals_only():
            made = api.create_repo(repo, private=private, exist_ok=True)
            commit = api.upload_folder(
                repo_id=made.repo_id,
                folder_path=folder,
                allow_patterns=names,
                delete_patterns=list(_OF_AN_EXPORT),
                commit_message=f"Upload {folder.name}",
            )
    except Exception as error:  # the hub's client and what it stands on raise errors of many kinds
        rule = f"could not be uploaded to ({_line(error)})"
        fix = f"{folder} is in place and proven: give the same command again"
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
