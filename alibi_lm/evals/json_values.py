"""Dataclasses to JSON values and back."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar, Union

T = TypeVar("T")


def encode(value: Any) -> Any:
    """Nested dataclasses, mappings and sequences as dicts and lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    return [encode(item) for item in value] if isinstance(value, list | tuple) else value


def decode(kind: type[T], value: Any) -> T:
    """A dataclass from what `encode` gave; keys that it does not have are ignored.

    Field types: JSON's own, dataclasses, `list[X]`, `tuple[X, ...]`, `dict[str, X]` and `X | None`.

    Raises:
        LookupError, TypeError, ValueError: `value` has another shape.
    """
    converted: T = _decode(kind, value)
    return converted


def _decode(kind: Any, value: Any) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        names = [f.name for f in dataclasses.fields(kind) if f.name in value]
        return kind(**{name: _decode(hints[name], value[name]) for name in names})
    if origin in (Union, types.UnionType):
        inner = [argument for argument in arguments if argument is not types.NoneType]
        return None if value is None else _decode(inner[0], value)
    if origin is list:
        return [_decode(arguments[0], item) for item in value]
    if origin is tuple:
        kinds = [arguments[0]] * len(value) if arguments[-1] is ... else arguments
        return tuple(_decode(k, item) for k, item in zip(kinds, value, strict=True))
    if origin is dict:
        return {key: _decode(arguments[1], item) for key, item in value.items()}
    return value
