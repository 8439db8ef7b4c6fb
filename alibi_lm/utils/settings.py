"""Sections of settings: dataclasses that check their values, whether made in Python or from YAML.

pydantic checks each field against its annotation (type, choices, range). Rules between fields are
methods marked with `rule`. All problems are reported at once, in one `ConfigError`.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, replace
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, WrapValidator
from pydantic_core import PydanticCustomError

from alibi_lm.utils.errors import ConfigError, Problem

S = TypeVar("S", bound="Section")
F = TypeVar("F", bound=Callable[..., Any])

_CONFIG = ConfigDict(
    strict=True, allow_inf_nan=False, extra="forbid", use_attribute_docstrings=True
)
_MOST_KEYS_LISTED = 15
_WRONG: Any = object()
"""In place of a value that cannot be used."""


def _cached(function: F) -> F:
    return typing.cast(F, functools.cache(function))


def _distinct(values: Any, check: Callable[[Any], Any]) -> Any:
    """Check a list's items, and that none is repeated."""
    errors: list[Any] = []
    try:
        values = check(values)
    except ValidationError as error:
        errors.extend(error.errors())
    items = values if isinstance(values, list) else []
    repeated = [item for i, item in enumerate(items) if item in items[:i]]
    if repeated:
        kind = PydanticCustomError("repeated", "names {value} twice", {"value": repeated[0]})
        errors.append({"type": kind, "loc": (), "input": values})
    if errors:
        raise ValidationError.from_exception_data("list", errors)
    return values


Share = Annotated[float, Field(ge=0, le=1)]
Probability = Annotated[float, Field(ge=0, lt=1)]
Distinct = WrapValidator(_distinct)
"""Annotation of a list that names nothing twice."""
NotEmpty = Field(min_length=1)
"""Annotation of a list or string that is not empty."""


class UnknownSetting(Exception):
    """A rule read a setting whose own value is wrong, so nothing can be said about it."""


def rule(method: F) -> F:
    """Mark a method of a section as a rule between its fields.

    It yields a `Problem` for each breach, with a key relative to the section. In its rule and fix
    a leading dot, as in `exceeds .num_steps`, marks the key of another field.
    """
    method.__dict__["is_rule"] = True
    return method


def applicable(problems: Iterable[Problem]) -> Iterator[Problem]:
    """The problems that a check finds before it reads a setting that is itself wrong."""
    try:
        yield from problems
    except UnknownSetting:
        return


class Section:
    """Base of the settings' dataclasses.

    Making one, or a copy by `dataclasses.replace`, raises `ConfigError` with every problem.
    Assigning to a field checks nothing; `problems` checks a section again.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG
    aliases: ClassVar[Mapping[str, str]] = {}
    """Of a field: its names in other frameworks, separated by spaces, for suggestions."""

    def __post_init__(self) -> None:
        examination = Examination(type(self))
        checked = examination.section(type(self), vars(self), "")
        if examination.problems:
            raise ConfigError(*examination.problems)
        vars(self).update(vars(checked))

    def problems(self, prefix: str = "") -> list[Problem]:
        """Everything wrong with the present values; `prefix` such as `model.` starts each key."""
        examination = Examination(type(self))
        examination.section(type(self), vars(self), prefix.removesuffix("."))
        return examination.problems


def examine(
    cls: type[S], raw: Mapping[str, Any], prefer: str | None = None
) -> tuple[S, list[Problem]]:
    """Make a section from nested mappings.

    Args:
        prefer: the subsection in which a misplaced key is probably meant.

    Returns:
        The section and all problems. If there are any, reading a field with a wrong value raises
        `UnknownSetting`, so that `applicable` can run checks that need the other fields.
    """
    examination = Examination(cls, prefer)
    return examination.section(cls, raw, ""), examination.problems


class Examination:
    """One pass over a section's values that collects every problem."""

    def __init__(self, root: type[Section], prefer: str | None = None) -> None:
        self.root, self.prefer = root, prefer
        self.problems: list[Problem] = []

    def section(self, cls: type[S], raw: Mapping[str, Any], key: str) -> S:
        """A `cls` with the good values of `raw`, and defaults for those not given."""
        prefix = f"{key}." if key else ""
        hints = field_types(cls)
        meant = dict.fromkeys(self._unknown_keys(cls, raw, prefix), _WRONG)
        values = {
            field.name: self._value(field, hints[field.name], raw, prefix)
            for field in dataclasses.fields(cls)  # type: ignore[arg-type]
        } | {name: value for name, value in meant.items() if name not in raw}
        wrong = [name for name, value in values.items() if value is _WRONG]
        made = object.__new__(_without(cls, wrong) if wrong else cls)
        vars(made).update({name: values[name] for name in hints if name not in wrong})
        for check in _rules(cls):
            self.problems.extend(_placed(p, prefix) for p in applicable(check(made)))
        return made

    def _value(self, field: Any, hint: Any, raw: Mapping[str, Any], prefix: str) -> Any:
        if field.name in raw:
            return self._convert(hint, raw[field.name], prefix + field.name)
        if field.default is not MISSING:
            return field.default
        if field.default_factory is not MISSING:
            return field.default_factory()
        if _is_section(hint):
            return self.section(hint, {}, prefix + field.name)
        self.problems.append(Problem(prefix + field.name, None, "is missing", "set it"))
        return _WRONG

    def _convert(self, hint: Any, raw: Any, key: str) -> Any:
        kinds = set(typing.get_args(hint) if _is_union(hint) else (hint,))
        if raw is None and type(None) in kinds:
            return None
        section = section_of(hint)
        if section is not None and typing.get_origin(hint) is not list:
            return self._subsection(section, {} if raw is None else raw, key)
        if section is not None:
            if not isinstance(raw, list | tuple):
                self.problems.append(Problem(key, raw, *_WORDS["list_type"]))
                return _WRONG
            items = [self._subsection(section, item, f"{key}.{i}") for i, item in enumerate(raw)]
            return _WRONG if any(item is _WRONG for item in items) else items
        try:
            return adapter(hint).validate_python(_plain(raw))
        except ValidationError as error:
            self.problems.extend(_problems(error, key, len(kinds - {type(None)}) > 1))
            return _WRONG

    def _subsection(self, cls: type[Section], raw: Any, key: str) -> Any:
        if isinstance(raw, cls):
            count = len(self.problems)
            made = self.section(cls, vars(raw), key)
            return raw if len(self.problems) == count else made
        if not isinstance(raw, Mapping):
            fix = "write key: value lines under it"
            self.problems.append(Problem(key, raw, "is not a section", fix))
            return _WRONG
        return self.section(cls, raw, key)

    def _unknown_keys(
        self, cls: type[Section], raw: Mapping[str, Any], prefix: str
    ) -> Iterator[str]:
        """Report the keys that are no fields; gives the fields that they probably stand for."""
        names = list(field_types(cls))
        for name in map(str, raw):
            if name in names:
                continue
            places = self._places(name)
            meant = (field for field, others in cls.aliases.items() if name in others.split())
            near = next(meant, None) or (None if places else nearest(name, names))
            if near is not None:
                yield near
                fix = f"did you mean {prefix}{near}?"
            elif places:
                fix = f"did you mean {_alternatives(places)}?"
            elif len(names) <= _MOST_KEYS_LISTED:
                fix = f"keys here: {', '.join(names)}"
            else:
                fix = "no key here resembles it; `alibi-lm config reference` lists them"
            self.problems.append(Problem(f"{prefix}{name}", None, "unknown key", fix))

    def _places(self, name: str) -> list[str]:
        """Where in the whole tree a key of this name (or with this alias) stands."""
        places = key_places(self.root).get(name, [])
        preferred = [key for key in places if key.split(".")[0] == self.prefer]
        return preferred or places


def _placed(problem: Problem, prefix: str) -> Problem:
    """A section's problem with whole keys."""
    rule, fix = (
        re.sub(r"(?<!\S)\.(?=[a-z])", prefix, text) for text in (problem.rule, problem.fix)
    )
    return Problem(prefix + problem.key, problem.value, rule, fix)


def _alternatives(words: Sequence[str]) -> str:
    """For example `a, b or c`."""
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def nearest(word: str, words: Iterable[str]) -> str | None:
    """The word of `words` that `word` is probably a misspelling of, or None."""
    return next(iter(difflib.get_close_matches(word, list(words), n=1, cutoff=0.75)), None)


@_cached
def field_types(cls: type[Section]) -> dict[str, Any]:
    """The annotation of each field."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}  # type: ignore[arg-type]


@_cached
def key_places(cls: type[Section], prefix: str = "") -> dict[str, list[str]]:
    """Every field name and alias of a tree of sections: the dotted keys that it stands for."""
    result: dict[str, list[str]] = {}
    for name, hint in field_types(cls).items():
        result.setdefault(name, []).append(prefix + name)
        kind = section_of(hint)
        if kind is not None and typing.get_origin(hint) is not list:
            for leaf, keys in key_places(kind, f"{prefix}{name}.").items():
                result.setdefault(leaf, []).extend(keys)
    for name, others in cls.aliases.items():
        for alias in others.split():
            result.setdefault(alias, []).append(prefix + name)
    return result


@_cached
def _rules(cls: type[Section]) -> list[Callable[[Any], Iterable[Problem]]]:
    checks = (check for base in reversed(cls.__mro__) for check in vars(base).values())
    return [check for check in checks if getattr(check, "is_rule", False)]


@_cached
def adapter(hint: Any) -> TypeAdapter[Any]:
    """pydantic's checker of an annotation."""
    return TypeAdapter(hint, config=None if _is_section(hint) else _CONFIG)


def section_of(hint: Any) -> type[Section] | None:
    """The section that a field holds: itself, an optional one, or a list of them."""
    return next((kind for kind in (hint, *typing.get_args(hint)) if _is_section(kind)), None)


def _is_section(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Section)


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _without(cls: type[S], names: Iterable[str]) -> type[S]:
    """A `cls` of which these fields cannot be read."""

    def unknown(self: Any) -> Any:
        raise UnknownSetting

    return type(cls.__name__, (cls,), {name: property(unknown) for name in names})


def _plain(raw: Any) -> Any:
    """YAML's value as pydantic's strict mode takes it: 1e4 is a whole number, a tuple a list."""
    if type(raw) is float and raw.is_integer():
        return int(raw)
    if isinstance(raw, list | tuple):
        return [_plain(item) for item in raw]
    return copy.deepcopy(raw)


_WORDS = {
    "int_type": ("is not a whole number", "give a whole number"),
    "float_type": ("is not a number", "give a number"),
    "string_type": ("is not a string", "give a string"),
    "bool_type": ("is not true or false", "give true or false"),
    "list_type": ("is not a list", "write [a, b]"),
    "dict_type": ("is not a mapping", "write key: value lines"),
    "finite_number": ("is not finite", "give a number"),
    "too_short": ("is empty", "give at least one"),
    "string_too_short": ("is empty", "give a name"),
    "repeated": ("", "name it once"),
}
"""pydantic's kind of error: the rule and the fix in our words."""
_BOUNDS = {
    "gt": ("is not above", "give more than"),
    "ge": ("is less than", "give at least"),
    "lt": ("is not below", "give less than"),
    "le": ("is more than", "give at most"),
}
_AT_ZERO = {
    ("gt", "0"): ("is not positive", "give a positive number"),
    ("ge", "0"): ("is negative", "give 0 or more"),
}
"""The rule and the fix of a bound, which follows them, and in other words where it is 0."""


def _problem(item: Any, key: str, location: Sequence[int | str]) -> Problem:
    """One of pydantic's errors as a problem of `key`, at a location inside its value."""
    kind, context, value = item["type"], item.get("ctx", {}), item["input"]
    key = ".".join(map(str, (key, *location)))
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", context["expected"])
        near = nearest(str(value), choices)
        fix = f"did you mean {near}?" if near else "choose one of them"
        return Problem(key, value, f"is not one of {', '.join(choices)}", fix)
    for name, (rule, fix) in _BOUNDS.items():
        if name in context:
            bound = context[name]
            shown = f"{bound:g}" if isinstance(bound, float) else str(bound)
            rule, fix = _AT_ZERO.get((name, shown), (f"{rule} {shown}", f"{fix} {shown}"))
            if (name, bound) == ("gt", 0) and isinstance(bound, int):
                fix = "give at least 1"
            return Problem(key, value, rule, fix)
    rule, fix = _WORDS.get(kind, ("", "change it"))
    return Problem(key, value, rule or item["msg"], fix)


def _problems(error: ValidationError, key: str, union: bool) -> list[Problem]:
    """pydantic's errors as problems; one problem where the value fits no alternative of a union.

    Locations of a union's errors begin with the alternative.
    """
    items = error.errors()
    if not union:
        return [_problem(item, key, item["loc"]) for item in items]
    inside = [item for item in items if len(item["loc"]) > 1]
    problems = [_problem(item, key, item["loc"][1:]) for item in inside or items]
    if inside:
        return problems
    words = [problem.rule.removeprefix("is not ") for problem in problems]
    return [replace(problems[0], rule=f"is not {' or '.join(dict.fromkeys(words))}")]
