"""Runs a claims suite, from its recipes to its page; finished parts are reused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alibi_lm.config_loading import apply_overrides, build, load_yaml, to_dict
from alibi_lm.data.preparation.prepare import load_recipe, prepare
from alibi_lm.experiments.claims.config import ClaimsConfig
from alibi_lm.experiments.claims.cost import cost_lines, measure_cost
from alibi_lm.experiments.claims.measure import MEASURES, load_or_measure
from alibi_lm.experiments.claims.measurements import Measurements
from alibi_lm.experiments.claims.page import PAGE, write_page
from alibi_lm.experiments.claims.training import SuiteRun, is_finished, suite_runs, train_all
from alibi_lm.utils.files import stored_object, write_json
from alibi_lm.utils.logging import console

COST = "cost.json"


def load_claims(path: str | Path, overrides: Sequence[str] = ()) -> ClaimsConfig:
    """Read a claims suite's YAML and apply `key=value` overrides.

    Raises:
        ConfigError: with every problem found, those of the runs' configs included.
    """
    suite = build(ClaimsConfig, apply_overrides(load_yaml(path), overrides))
    suite_runs(suite)
    return suite


def run_claims(
    path: str | Path,
    overrides: Sequence[str],
    environment: Mapping[str, str],
    *,
    jobs: int = 1,
    train: bool = True,
) -> list[dict[str, str]]:
    """Prepare, train, measure and write the page of a suite; return the rows of its table.

    Args:
        path: the suite.
        overrides: `key=value` settings that take precedence.
        environment: of the training processes.
        jobs: runs trained at the same time.
        train: False makes the page of the runs trained so far.

    Raises:
        UserError: a mistake in the suite, a recipe or a run.
    """
    suite = load_claims(path, overrides)
    runs = suite_runs(suite)
    # An unwritable folder must show before hours of training.
    Path(suite.results).mkdir(parents=True, exist_ok=True)
    if train:
        for recipe in suite.recipes:
            prepare(load_recipe(recipe))
        train_all(runs, jobs, environment)
    measured = gather(suite, [run for run in runs if is_finished(run)])
    measured.cost = _cost(suite) if train else _stored_cost(suite)
    rows = write_page(suite, str(path), measured)
    for row in rows:
        console.info(f"{row['verdict']:<25} {row['statement']}")
        console.info(f"{'':<25} {row['text']}")
    console.info(f"claims: {Path(suite.results) / PAGE}")
    return rows


def gather(suite: ClaimsConfig, finished: Sequence[SuiteRun]) -> Measurements:
    """Measure finished runs; a model counts once all of its seeds are trained."""
    groups = suite.groups()
    measured = Measurements({})
    for group, settings in groups.items():
        for model in settings.models:
            runs = [run for run in finished if (run.group, run.model) == (group, model)]
            if len(runs) < len(settings.seeds):
                continue
            measured.runs[group, model] = [
                load_or_measure(run, settings, MEASURES[group]) for run in runs
            ]
            measured.training_lengths[group, model] = runs[0].config.train.sequence_length
    return measured


def _stored_cost(suite: ClaimsConfig) -> dict[str, Any] | None:
    stored = stored_object(Path(suite.work) / COST)
    return stored if stored and stored.get("settings") == to_dict(suite.cost) else None


def _cost(suite: ClaimsConfig) -> dict[str, Any] | None:
    if not suite.cost.model:
        return None
    cost = _stored_cost(suite)
    if cost is None:
        cost = {**measure_cost(suite.cost), "settings": to_dict(suite.cost)}
        write_json(Path(suite.work) / COST, cost)
    for line in cost_lines(cost):
        console.info(line)
    return cost
