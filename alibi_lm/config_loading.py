"""YAML and `key=value` overrides to dataclasses, and back.

The field types understood are int, float, str, bool, `X | None`, `Literal[...]`, `list[X]`,
`dict[str, Any]` (kept as it is), unions of these, and nested dataclasses. Every problem of an
input is collected and raised at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

import yaml

from alibi_lm.utils.errors import ConfigError, Problem

T = TypeVar("T")


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

    A number as a path part indexes a list: `data.corpora.0.weight=0.5`.

    Raises:
        ConfigError: an override has no `=`, no key, or a value that is not YAML.
    """
    result = json_copy(raw)
    problems = []
    for override in overrides:
        key, equals, text = override.partition("=")
        try:
            if not equals or not key:
                raise ValueError("is not of the form section.key=value")
            _assign(result, key.split("."), yaml.load(text, _Loader))
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


def json_copy(value: Any) -> Any:
    """A deep copy of nested dicts and lists."""
    if isinstance(value, Mapping):
        return {key: json_copy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_copy(item) for item in value]
    return value


def build(cls: type[T], raw: Mapping[str, Any]) -> T:
    """Make a `cls` from nested mappings and check it.

    A dataclass may have a method `problems(self, key) -> Iterable[Problem]` with its own rules;
    `key` is the dotted path of the section, with a final dot where it is not empty.

    Raises:
        ConfigError: with every unknown key (and the nearest right one), every value of a wrong
            type, every missing key, and every rule broken in a section that has none of those.
    """
    value, problems = examine(cls, raw)
    if problems or value is None:
        raise ConfigError(*problems)
    return value


def examine(cls: type[T], raw: Mapping[str, Any]) -> tuple[T | None, list[Problem]]:
    """What `build` makes and all the problems that it would raise.

    Where only rules are broken there is a value all the same, for rules that know more to be
    asked too; None where a key or a type is wrong.
    """
    problems = _Found()
    value = _convert(cls, raw, "", problems)
    return value, [*problems, *problems.rules]


class _Found(list[Problem]):
    """Unknown keys, missing ones and wrong types; and, beside them, the rules broken."""

    def __init__(self) -> None:
        super().__init__()
        self.rules: list[Problem] = []

    def take(self, other: _Found) -> None:
        """Add what was found in a part."""
        self.extend(other)
        self.rules.extend(other.rules)


def _convert(kind: Any, raw: Any, key: str, problems: _Found) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _convert_section(kind, raw, key, problems)
    if origin in (Union, types.UnionType):
        return _convert_union(arguments, raw, key, problems)
    if origin is Literal:
        if raw in arguments and type(raw) in {type(argument) for argument in arguments}:
            return raw
        choices = ", ".join(str(argument) for argument in arguments)
        near = nearest(str(raw), [str(argument) for argument in arguments])
        fix = f"did you mean {near}?" if near else "choose one of them"
        problems.append(Problem(key, raw, f"is not one of {choices}", fix))
        return None
    if origin is list:
        if not isinstance(raw, list):
            problems.append(Problem(key, raw, "is not a list", "write [a, b]"))
            return None
        return [_convert(arguments[0], item, f"{key}.{i}", problems) for i, item in enumerate(raw)]
    if origin is dict or kind is dict:
        if not isinstance(raw, Mapping):
            problems.append(Problem(key, raw, "is not a mapping", "write key: value lines"))
            return None
        return json_copy(raw)
    return _convert_scalar(kind, raw, key, problems)


def _convert_union(kinds: Sequence[Any], raw: Any, key: str, problems: _Found) -> Any:
    if raw is None and type(None) in kinds:
        return None
    kinds = [kind for kind in kinds if kind is not type(None)]
    attempts: list[_Found] = []
    for kind in kinds:
        attempt = _Found()
        value = _convert(kind, raw, key, attempt)
        if not attempt:
            problems.take(attempt)
            return value
        attempts.append(attempt)
    mapping = isinstance(raw, Mapping)
    matching = [
        attempt
        for kind, attempt in zip(kinds, attempts, strict=True)
        if mapping == dataclasses.is_dataclass(kind)
    ]
    problems.take((matching or attempts)[0])
    return None


def _convert_scalar(kind: Any, raw: Any, key: str, problems: _Found) -> Any:
    if kind is Any:
        return json_copy(raw)
    if kind is float and isinstance(raw, int | float) and not isinstance(raw, bool):
        if math.isfinite(raw):
            return float(raw)
        problems.append(Problem(key, raw, "is not finite", "give a number"))
        return None
    if kind is int and isinstance(raw, float) and raw.is_integer():
        return int(raw)
    if type(raw) is kind:
        return raw
    names = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
    problems.append(Problem(key, raw, f"is not {names[kind]}", f"give {names[kind]}"))
    return None


def _convert_section(kind: Any, raw: Any, key: str, problems: _Found) -> Any:
    if raw is None:
        raw = {}
    if not isinstance(raw, Mapping):
        problems.append(Problem(key, raw, "is not a section", "write key: value lines under it"))
        return None
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    prefix = f"{key}." if key else ""
    found = _Found()
    for name in raw:
        if name not in fields:
            near = nearest(str(name), list(fields))
            fix = f"did you mean {prefix}{near}?" if near else f"keys here: {', '.join(fields)}"
            found.append(Problem(f"{prefix}{name}", None, "unknown key", fix))
    values = {}
    for name, field in fields.items():
        if name in raw:
            values[name] = _convert(hints[name], raw[name], f"{prefix}{name}", found)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            if dataclasses.is_dataclass(hints[name]):
                values[name] = _convert(hints[name], {}, f"{prefix}{name}", found)
            else:
                found.append(Problem(f"{prefix}{name}", None, "is missing", "set it"))
    problems.take(found)
    if found:
        return None
    value = kind(**values)
    if hasattr(value, "problems"):
        problems.rules.extend(value.problems(prefix))
    return value


def nearest(word: str, words: Sequence[str]) -> str | None:
    """The word of `words` most like `word`, or None where none is."""
    return next(iter(difflib.get_close_matches(word, words, n=1, cutoff=0.5)), None)


def to_dict(value: Any) -> Any:
    """Nested dataclasses as nested dicts, in field order."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_dict(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return json_copy(value) if not isinstance(value, list) else [to_dict(item) for item in value]


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
