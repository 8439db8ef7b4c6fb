"""Parts that other packages add by name, through entry points.

A package outside this repository adds, say, a schedule with one file and three lines of its
pyproject.toml, and a config then chooses it by its name:

    [project.entry-points."alibi_lm.schedules"]
    one_cycle = "my_package.one_cycle:one_cycle"
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

SCHEDULES = "alibi_lm.schedules"
"""Learning rates after the warm-up: see `train.schedule.Schedule`."""
METRIC_WRITERS = "alibi_lm.metric_writers"
"""Where a run's curves are shown: see `train.monitoring.writers.MetricWriter`."""


@cache
def plugins(group: str) -> Mapping[str, EntryPoint]:
    """The entry points of a group by name, of all installed packages; nothing is imported."""
    return {point.name: point for point in entry_points(group=group)}


def load_plugin(group: str, name: str) -> Any:
    """Import what a package offers under a name of a group."""
    return plugins(group)[name].load()
