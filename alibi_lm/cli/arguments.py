"""Arguments and options that several commands share, and the group that lists commands."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

OVERRIDES = click.argument("overrides", nargs=-1, metavar="[section.key=value]...")
RUN = click.argument("run", type=click.Path(path_type=Path))
DEVICE = click.option(
    "--device",
    help="Device to compute on, such as cpu, cuda or cuda:1.  [default: the accelerator, if any]",
)
_NO_LIMIT = 1000


class FiniteRange(click.FloatRange):
    """A range of finite numbers: `click.FloatRange` accepts NaN."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse a number, and refuse NaN and infinity."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class Commands(click.Group):
    """Lists commands in the order they are defined, each with its whole first sentence."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the commands, in order."""
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands."""
        rows = [(name, sub.get_short_help_str(_NO_LIMIT)) for name, sub in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
