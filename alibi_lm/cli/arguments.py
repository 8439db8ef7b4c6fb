"""What several commands take."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

OVERRIDES = click.argument("overrides", nargs=-1, metavar="[section.key=value]...")
RUN = click.argument("run", type=click.Path(path_type=Path))
_WHOLE = 1000


class FiniteRange(click.FloatRange):
    """A range of numbers. `click.FloatRange` lets NaN through, as it compares with nothing."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number of a text."""
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return found


class Commands(click.Group):
    """Lists commands in the order a user meets them, each with its whole first sentence."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Their names, in order."""
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands."""
        rows = [(name, child.get_short_help_str(_WHOLE)) for name, child in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
