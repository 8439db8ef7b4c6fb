"""Reading eval suites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from alibi_lm.config_loading import apply_overrides, build, load_yaml
from alibi_lm.evals.config import SuiteConfig
from alibi_lm.evals.registry import EVALS
from alibi_lm.utils.settings import adapter, field_types


def read_suite(
    path: str | Path | None, overrides: Sequence[str] = (), name: str | None = None
) -> Any:
    """Read a suite's YAML (the defaults where `path` is None) and apply `key=value` overrides.

    Args:
        path: the YAML.
        overrides: settings of the command line.
        name: the eval that will run: a key outside any section is probably meant for its section.

    Returns:
        A `SuiteConfig` that has the config of every registered eval as a field of its name.

    Raises:
        ConfigError: with every problem found.
    """
    raw = {} if path is None else load_yaml(path)
    return build(suite_class(), apply_overrides(raw, overrides), prefer=name)


def suite_class() -> type[SuiteConfig]:
    """`SuiteConfig` with a section for each registered eval."""
    # pydantic does not find docstrings of inherited fields.
    described = adapter(SuiteConfig).json_schema()["properties"]
    inherited = [
        (each.name, Annotated[kind, Field(description=described[each.name]["description"])], each)
        for each, kind in zip(fields(SuiteConfig), field_types(SuiteConfig).values(), strict=True)
        if "description" in described[each.name]
    ]
    sections = [
        (name, each.config, field(default_factory=each.config)) for name, each in EVALS.items()
    ]
    return make_dataclass(
        SuiteConfig.__name__, [*inherited, *sections], bases=(SuiteConfig,),
        namespace={"__doc__": SuiteConfig.__doc__},
    )  # fmt: skip
