"""`alibi-lm doctor`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from alibi_lm.cli.arguments import OVERRIDES
from alibi_lm.utils.errors import EXIT_USER_ERROR
from alibi_lm.utils.logging import console


@click.command()
@click.argument("config", type=click.Path(path_type=Path), required=False)
@OVERRIDES
@click.option("--hostfile", type=click.Path(path_type=Path), help="Check all of its hosts.")
@click.option("--num-ranks", type=click.IntRange(1), default=1, help="Ranks, without a hostfile.")
@click.option("--master-addr", help="Where the hosts connect.  [default: the first one's address]")
@click.option("--master-port", default=29500, help="Port of --master-addr.")
def doctor(
    config: Path | None,
    overrides: Sequence[str],
    hostfile: Path | None,
    num_ranks: int,
    master_addr: str | None,
    master_port: int,
) -> None:
    """Check that this machine, or the hosts of a hostfile, can run CONFIG.

    On every host: ssh, python, package versions, GPUs, the same config and data, the run folder
    writable and shared, free disk; between them: clocks, and an all-reduce with its bandwidth (on
    one machine between --num-ranks processes, at least 2). Exits with 2 and one line for each
    check that failed.
    """
    from alibi_lm.doctor.examine import examine

    master = (master_addr, master_port)
    problems = examine(config, overrides, hostfile, num_ranks, master, os.environ)
    for problem in problems:
        console.error(str(problem))
    sys.exit(EXIT_USER_ERROR if problems else 0)
