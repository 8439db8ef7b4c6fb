"""Reading eval suites."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from alibi_lm.config_loading import apply_overrides, build, load_yaml
from alibi_lm.evals.config import SuiteConfig


def read_suite(
    path: str | Path | None, overrides: Sequence[str] = (), name: str | None = None
) -> SuiteConfig:
    """Read a suite's YAML (the defaults where `path` is None) and apply `key=value` overrides.

    Args:
        name: the eval that will run: a key outside any section is probably meant for its section.

    Raises:
        ConfigError: with every problem found.
    """
    raw = {} if path is None else load_yaml(path)
    return build(SuiteConfig, apply_overrides(raw, overrides), prefer=name)
