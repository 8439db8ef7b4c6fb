"""manifest.json: the content of a prepared folder and the recipe behind it."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import alibi_lm
from alibi_lm.config_loading import flatten, to_dict
from alibi_lm.data.config import DataConfig, RecipeConfig
from alibi_lm.data.tokenizer import Tokenizer
from alibi_lm.utils.errors import ConfigError, DataError, Problem

MANIFEST = "manifest.json"
FORMAT = 1
_FREE_KEYS = ("output", "num_workers")
"""Recipe keys that do not change the result."""


def read_manifest(path: Path) -> dict[str, Any] | None:
    """Read a manifest; None if the file does not exist.

    Raises:
        DataError: the file is not a manifest.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        detail = " ".join(str(error).split())
        fix = "prepare again with --overwrite"
        raise DataError(Problem(str(path), None, f"is not a manifest ({detail})", fix)) from None
    if not isinstance(content, dict) or not {"recipe", "tokenizer"} <= content.keys():
        fix = "prepare again with --overwrite"
        raise DataError(Problem(str(path), None, "is not a manifest", fix))
    return content


def manifest_for(prefix: str | Path) -> dict[str, Any] | None:
    """The manifest that lists a token file; None for files of another framework."""
    prefix = Path(prefix)
    try:
        manifest = read_manifest(prefix.parent / MANIFEST)
    except DataError:
        return None
    files = {} if manifest is None else manifest.get("files", {})
    return manifest if f"{prefix.name}.bin" in files else None


def check_tokenizer(prefix: str | Path, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer other than the one behind a token file; files without a manifest pass.

    Raises:
        DataError: the manifest beside the file names another tokenizer.
    """
    manifest = manifest_for(prefix)
    if manifest is None:
        return
    expected = manifest["tokenizer"]["digest"]
    if expected != tokenizer.digest:
        folder = Path(prefix).parent / "tokenizer"
        rule = f"is not the tokenizer of {prefix} ({tokenizer.digest[:12]}, not {expected[:12]})"
        raise DataError(Problem(str(tokenizer.file), None, rule, f"use {folder}"))


def versions() -> dict[str, str]:
    """Versions of the packages that determine token files."""
    packages = ("datasets", "numpy", "sentencepiece", "tokenizers")
    found = {"alibi_lm": alibi_lm.__version__, "python": platform.python_version()}
    return found | {package: version(package) for package in packages}


def comparable(recipe: RecipeConfig | dict[str, Any]) -> dict[str, Any]:
    """A recipe as dotted keys, sources by name, without the keys in `_FREE_KEYS`."""
    content = dict(to_dict(recipe))
    for key in _FREE_KEYS:
        content.pop(key, None)
    content["sources"] = {source["name"]: source for source in content["sources"]}
    return flatten(content)


def different_keys(old: dict[str, Any], new: RecipeConfig) -> Iterator[Problem]:
    """The keys in which a new recipe differs from the one a folder was prepared from."""
    before, now = comparable(old), comparable(new)
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            rule = f"was {before.get(key)!r} when {new.output} was prepared"
            fix = "name another output, or pass --overwrite"
            yield Problem(key, repr(now.get(key)), rule, fix)


def vocabulary_size(asked: int | None, data: DataConfig, tokenizer: Tokenizer | None) -> int | None:
    """Token ids of a run's model: `model.vocab_size` (`asked`), by default the tokenizer's.

    Without a tokenizer, the manifests beside the corpora say how many it had. None where nothing
    says.

    Raises:
        ConfigError: fewer ids are asked for than the tokenizer has.
    """
    known = None if tokenizer is None else tokenizer.vocab_size
    for corpus in data.corpora:
        manifest = manifest_for(Path(corpus.prefix)) if known is None else None
        if manifest is not None:
            known = int(manifest["tokenizer"]["vocab_size"])
    if asked is not None and known is not None and asked < known:
        rule = f"is less than the tokenizer's {known} ids"
        fix = f"set at least {known}, or leave it out"
        raise ConfigError(Problem("model.vocab_size", asked, rule, fix))
    return known if asked is None else asked
