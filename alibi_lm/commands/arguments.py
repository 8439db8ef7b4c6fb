"""What several commands take."""

from __future__ import annotations

from pathlib import Path

import click

OVERRIDES = click.argument("overrides", nargs=-1, metavar="[section.key=value]...")
RUN = click.argument("run", type=click.Path(path_type=Path))
