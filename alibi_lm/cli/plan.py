"""`alibi-lm plan`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from alibi_lm.cli.arguments import OVERRIDES
from alibi_lm.utils.logging import console


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@OVERRIDES
@click.option("--num-ranks", type=click.IntRange(1), required=True, help="Ranks of the run.")
@click.option("--rank", type=click.IntRange(0), help="Show everything about this rank.")
@click.option("--slopes", is_flag=True, help="List the slopes of all heads.")
def plan(
    config: Path, overrides: Sequence[str], num_ranks: int, rank: int | None, slopes: bool
) -> None:
    """Show what each rank of CONFIG's run would hold, compute and send. Starts nothing."""
    from alibi_lm.plan.planner import make_plan
    from alibi_lm.plan.table import plan_lines, rank_lines
    from alibi_lm.utils.errors import ConfigError, Problem
    from alibi_lm.utils.text import counted

    if rank is not None and rank >= num_ranks:
        rule = f"the run has {counted(num_ranks, 'rank')}"
        raise ConfigError(Problem("--rank", rank, rule, f"give 0 to {num_ranks - 1}"))
    result = make_plan(config, overrides, num_ranks)
    for line in plan_lines(result, slopes=slopes) if rank is None else rank_lines(result, rank):
        console.info(line)
