"""`alibi-lm eval claims`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import click

from alibi_lm.cli.arguments import OVERRIDES


@click.command()
@click.argument("suite", type=click.Path(path_type=Path))
@OVERRIDES
@click.option(
    "--jobs",
    type=click.IntRange(1),
    default=1,
    help="Runs trained at the same time, each on its share of the cores.",
)
@click.option("--no-train", is_flag=True, help="Make the page of the runs trained so far.")
def claims(suite: Path, overrides: Sequence[str], jobs: int, no_train: bool) -> None:
    """Train SUITE's models and test published claims about ALiBi on them.

    Finished runs are kept: repeat the command to resume an interrupted suite.
    """
    from alibi_lm.experiments.claims.run import run_claims

    run_claims(suite, overrides, os.environ, jobs=jobs, train=not no_train)
