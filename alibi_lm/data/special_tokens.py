"""Special tokens that the files beside a tokenizer declare: eos, bos, pad, unk and stop ids."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alibi_lm.utils.errors import DataError, Problem
from alibi_lm.utils.files import write_json

ROLES = ("eos", "bos", "pad", "unk")
CONFIG, GENERATION = "tokenizer_config.json", "generation_config.json"
_TOKEN_FILES = (CONFIG, "special_tokens_map.json")
DECLARING_FILES = (*_TOKEN_FILES, GENERATION)
"""Files that declare special tokens; an earlier one wins."""
USUAL_NAMES = {
    "eos": ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "[EOS]"),
    "bos": ("<s>", "<|begin_of_text|>", "<bos>", "[BOS]"),
    "pad": ("<pad>", "<|padding|>", "[PAD]"),
    "unk": ("<unk>", "[UNK]"),
}
"""Names that are tried for a role that no file declares."""


@dataclass(frozen=True)
class SpecialTokens:
    """Declared special tokens."""

    tokens: Mapping[str, str | None] = field(default_factory=dict)
    """Token by role, for the declared roles; None declares that there is none."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """File or setting that declares each role."""
    eos_ids: tuple[int, ...] = ()
    """`eos_token_id` of generation_config.json, or a list in config.json: ids that end a text."""

    def with_eos(self, token: str, source: str) -> SpecialTokens:
        """The same with another end-of-sequence token, which alone ends a text."""
        return SpecialTokens({**self.tokens, "eos": token}, {**self.sources, "eos": source}, ())


def read_special_tokens(folder: Path) -> SpecialTokens:
    """The special tokens that a tokenizer's folder declares.

    Raises:
        DataError: a declaring file is not JSON, or declares a token that is not one.
    """
    tokens: dict[str, str | None] = {}
    sources: dict[str, str] = {}
    for name in _TOKEN_FILES:
        content = _read(folder / name)
        for role in ROLES:
            key = f"{role}_token"
            if key in content and tokens.get(role) is None:
                tokens[role] = _token(folder / name, key, content[key])
                sources[role] = str(folder / name)
    eos_ids = _eos_ids(folder / GENERATION) or _eos_ids(folder / "config.json", lists_only=True)
    return SpecialTokens(tokens, sources, eos_ids)


def write_special_tokens(
    folder: Path, tokens: Mapping[str, str | None], eos_ids: tuple[int, ...]
) -> list[Path]:
    """Declare the special tokens of a tokenizer beside its file; the files written."""
    content = {f"{role}_token": tokens.get(role) for role in ROLES}
    write_json(folder / CONFIG, content)
    if len(eos_ids) < 2:
        return [folder / CONFIG]
    write_json(folder / GENERATION, {"eos_token_id": list(eos_ids)})
    return [folder / CONFIG, folder / GENERATION]


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError) as error:
        rule = f"cannot be read ({' '.join(str(error).split())[:80]})"
        raise DataError(Problem(str(path), None, rule, "repair or remove it")) from None
    return content if isinstance(content, dict) else {}


def _token(path: Path, key: str, value: Any) -> str | None:
    if isinstance(value, dict):  # an AddedToken
        value = value.get("content")
    if value is None or isinstance(value, str):
        return value or None
    raise DataError(Problem(f"{path}: {key}", repr(value), "is not a token", "give its text"))


def _eos_ids(path: Path, lists_only: bool = False) -> tuple[int, ...]:
    value = _read(path).get("eos_token_id")
    if lists_only and not isinstance(value, list):
        return ()  # a single id is often a class's default
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            rule = "is not a token id"
            raise DataError(Problem(f"{path}: eos_token_id", repr(token), rule, "give token ids"))
    return tuple(dict.fromkeys(ids))
