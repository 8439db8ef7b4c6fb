"""`alibi-lm checkpoint`."""

from __future__ import annotations

from pathlib import Path

import click

from alibi_lm.cli.arguments import RUN, Commands
from alibi_lm.utils.logging import console


@click.group(cls=Commands)
def checkpoint() -> None:
    """List, verify or convert a run's checkpoints."""


@checkpoint.command("list")
@RUN
def list_checkpoints(run: Path) -> None:
    """List the complete checkpoints of RUN (or of one step folder), and name damaged ones."""
    from alibi_lm.checkpoint.folder import folders_meant, read_meta
    from alibi_lm.utils.errors import CheckpointError, Problem
    from alibi_lm.utils.text import counted

    problems: list[Problem] = []
    for folder in folders_meant(run):
        try:
            meta = read_meta(folder)
        except CheckpointError as error:
            problems.extend(error.problems)
            continue
        size = sum(file["bytes"] for file in meta["files"].values()) / 2**20
        layout = meta["layout"]
        console.info(
            f"{folder.name}  step {meta['step']:,}  {meta['tokens']:,} tokens  {size:,.1f} MiB  "
            f"{counted(layout['world_size'], 'rank')}, tp {layout.get('tp', 1)}, "
            f"pp {layout.get('pp', 1)}, ZeRO {layout['zero_stage']}  {meta['saved_at']}"
        )
    if problems:
        raise CheckpointError(*problems)


@checkpoint.command("verify")
@RUN
def verify_checkpoints(run: Path) -> None:
    """Compare every file of RUN's checkpoints (or of one step folder) with its sha256."""
    from alibi_lm.checkpoint.folder import latest_problem, verify_all
    from alibi_lm.utils.errors import CheckpointError, Problem

    problems: list[Problem] = []
    folders: list[Path] = []
    good: list[Path] = []
    for folder, damaged in verify_all(run):
        folders.append(folder)
        problems.extend(damaged)
        if not damaged:
            good.append(folder)
            console.info(f"{folder.name}  good")
    stale = latest_problem(run, *good[-1:], folders[-1]) if folders != [run] else None
    if stale is not None:
        console.warning(str(stale))
    if problems:
        raise CheckpointError(*problems)


@checkpoint.command("convert")
@RUN
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--shards", type=click.IntRange(1), default=1, help="Files to split tensors into.")
@click.option("--weights-only", is_flag=True, help="Leave out the optimizer state.")
def convert_checkpoint(run: Path, out: Path, shards: int, weights_only: bool) -> None:
    """Write RUN's newest checkpoint (or a step folder) as the step folder OUT.

    A run does not need this to change its layout. OUT has the same tensors bit by bit in --shards
    files, and works on its own wherever a step folder does.
    """
    from alibi_lm.checkpoint.convert import convert

    written = convert(run, out, num_shards=shards, weights_only=weights_only)
    console.info(f"checkpoint {written}")
