"""Settings from YAML and `key=value` overrides, and back."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from alibi_lm.utils.errors import ConfigError, Problem
from alibi_lm.utils.settings import Section, examine

S = TypeVar("S", bound=Section)

_INDEX = re.compile(r"\[(\d+)\]")
"""A list index in brackets."""


# PyYAML lets errors of the values it makes (dates, huge numbers, list keys) through as they are.
_NOT_YAML = (yaml.YAMLError, ValueError, TypeError, OverflowError, RecursionError)


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with floats such as 3e-4, and without silently doubled keys."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=deep)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d[\d_]*)(?:\.[\d_]*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)


def load_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML mapping.

    Raises:
        ConfigError: the file is missing, is not UTF-8 YAML, or is not a mapping.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(Problem(str(path), None, "no such file", "check the path")) from None
    except IsADirectoryError:
        fix = "name a YAML file"
        raise ConfigError(Problem(str(path), None, "is a folder", fix)) from None
    except UnicodeDecodeError:
        raise ConfigError(
            Problem(str(path), None, "is not UTF-8 text", "name a YAML file")
        ) from None
    except (OSError, ValueError) as error:
        rule = f"cannot be read ({error})"
        raise ConfigError(Problem(str(path), None, rule, "check the path")) from None
    try:
        raw = yaml.load(text, _Loader)
    except _NOT_YAML as error:
        detail = " ".join(str(error).split())
        fix = "mend the YAML"
        raise ConfigError(Problem(str(path), None, f"is not YAML ({detail})", fix)) from None
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        fix = "write `section:` with indented `key: value` lines"
        raise ConfigError(Problem(str(path), None, "is not a mapping", fix))
    return raw


def apply_overrides(raw: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of `raw` with each `section.key=value` set; values are read as YAML.

    A number as a path part indexes a list: `data.corpora.0.weight=0.5` or
    `data.corpora[0].weight=0.5`.

    Raises:
        ConfigError: an override has no `=`, no key, or a value that is not YAML.
    """
    result = to_dict(raw)
    problems = []
    for override in overrides:
        key, equals, text = override.partition("=")
        try:
            if not equals or not key:
                raise ValueError("is not of the form section.key=value")
            _assign(result, _INDEX.sub(r".\1", key).split("."), yaml.load(text, _Loader))
        except _NOT_YAML as error:
            detail = " ".join(str(error).split())
            problems.append(Problem(override, None, detail, "write section.key=value"))
    if problems:
        raise ConfigError(*problems)
    return result


def _assign(tree: Any, parts: list[str], value: Any) -> None:
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        if isinstance(tree, list):
            if not part.isdigit() or int(part) >= len(tree):
                raise ValueError(f"{part!r} is not an index of a list of {len(tree)}")
            index: Any = int(part)
        elif isinstance(tree, dict):
            index = part
        else:
            raise ValueError(f"{'.'.join(parts[:depth])!r} is not a section")
        if last:
            tree[index] = value
            return
        if isinstance(tree, dict) and tree.get(index) is None:
            tree[index] = {}
        tree = tree[index]


def build(cls: type[S], raw: Mapping[str, Any], prefer: str | None = None) -> S:
    """Make a section from nested mappings and check it; `prefer` as in `settings.examine`.

    Raises:
        ConfigError: with every unknown key, missing key, wrong value and broken rule.
    """
    value, problems = examine(cls, raw, prefer)
    if problems:
        raise ConfigError(*problems)
    return value


def to_dict(value: Any) -> Any:
    """Nested dataclasses as nested dicts, in field order; plain values are copied."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_dict(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: to_dict(item) for key, item in value.items()}
    return [to_dict(item) for item in value] if isinstance(value, list | tuple) else value


def to_yaml(value: Any) -> str:
    """A dataclass (or nested dict) as YAML that `load_yaml` and `build` read back equal."""
    # Escaped: PyYAML writes some line separators of Unicode raw and reads them as spaces.
    return yaml.safe_dump(to_dict(value), sort_keys=False, allow_unicode=False)


def digest(value: Any) -> str:
    """SHA-256 of a dataclass's or dict's content, independent of key order."""
    text = json.dumps(to_dict(value), sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def flatten(value: Any, key: str = "") -> dict[str, Any]:
    """Nested dataclasses or dicts as one dict from dotted key to leaf; lists are leaves."""
    value = to_dict(value)
    if not isinstance(value, dict) or not value:
        return {key: value}
    result: dict[str, Any] = {}
    for name, item in value.items():
        result.update(flatten(item, f"{key}.{name}" if key else str(name)))
    return result
