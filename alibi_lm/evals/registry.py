"""All evals: this package's, those of installed packages, and those of `--plugin` modules."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

# Importing an eval's module registers it; the order is that of reports.
from alibi_lm.evals.perplexity import evaluation as _perplexity  # isort: skip
from alibi_lm.evals.retrieval import needle as _needle  # isort: skip
from alibi_lm.evals.retrieval import evaluation as _retrieval  # isort: skip
from alibi_lm.evals.generalization import evaluation as _generalization  # isort: skip
from alibi_lm.evals.attention_span import evaluation as _attention_span  # isort: skip
from alibi_lm.evals.base import EVALS
from alibi_lm.utils.errors import ConfigError, Problem
from alibi_lm.utils.plugins import load_plugin, plugins

GROUPS = ("alibi_lm.evals", "alibi_lm.tasks")
"""Groups of entry points whose objects register evals and retrieval tasks when imported."""

__all__ = ["EVALS", "load_plugins"]
_BUILT_IN = (_perplexity, _needle, _retrieval, _generalization, _attention_span)


def load_plugins(modules: Sequence[str] = ()) -> None:
    """Import the modules that add evals or tasks: those of entry points, then `modules`.

    Raises:
        ConfigError: there is no such module.
    """
    for group in GROUPS:
        for name in plugins(group):
            load_plugin(group, name)
    for name in modules:
        try:
            import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            fix = "install its package, or put its folder on PYTHONPATH"
            raise ConfigError(Problem("--plugin", name, "no module has that name", fix)) from None
