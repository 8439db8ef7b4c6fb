"""The `alibi-lm` command."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from alibi_lm import __version__
from alibi_lm.cli.arguments import OVERRIDES, RUN, Commands
from alibi_lm.cli.bench_long import long_inputs
from alibi_lm.cli.bench_parts import load, loss, start, tokenize
from alibi_lm.cli.bench_train import attention_alone
from alibi_lm.cli.bench_train import train as bench_train
from alibi_lm.cli.config import config as config_group
from alibi_lm.cli.evaluate import compare, eval_group, report
from alibi_lm.cli.generate import generate
from alibi_lm.cli.hf import export, import_command
from alibi_lm.utils.errors import EXIT_INTERRUPTED, EXIT_USER_ERROR, UserError, path_error
from alibi_lm.utils.logging import console


class _Commands(Commands):
    """Turns user errors into one line."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            console.error(str(error))
            ctx.exit(error.exit_code)
        except OSError as error:
            mistake = path_error(error)
            if mistake is None:
                raise
            console.error(str(mistake))
            ctx.exit(mistake.exit_code)
        except KeyboardInterrupt:
            ctx.exit(EXIT_INTERRUPTED)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="alibi-lm")
@click.option("--local_rank", type=int, hidden=True, expose_value=False)  # deepspeed --module's
def main() -> None:
    """Pretrain ALiBi language models, evaluate them on long contexts, export them.

    Exit codes: 0 done, 2 a mistake to fix (one line says which), 3 a loss that is not finite,
    4 asked to stop, and saved, 5 a rank or host lost: the same command resumes, 130 interrupted.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a locale's encoding may lack a text's characters
            stream.reconfigure(errors="backslashreplace")
    # https://no-color.org: any value but an empty one.
    console.colored = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


@main.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@OVERRIDES
@click.option("--overwrite", is_flag=True, help="Replace an output made by another recipe.")
def prepare(recipe: Path, overrides: Sequence[str], overwrite: bool) -> None:
    """Turn the corpora of RECIPE (YAML) into a tokenizer and token files."""
    from alibi_lm.data.preparation.prepare import load_recipe
    from alibi_lm.data.preparation.prepare import prepare as run_prepare

    run_prepare(load_recipe(recipe, list(overrides)), overwrite=overwrite)


@main.command(context_settings={"ignore_unknown_options": True})
@click.argument("config", type=click.Path(path_type=Path))
@OVERRIDES
@click.option(
    "--num-ranks",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Ranks on this machine.",
)
def train(config: Path, overrides: Sequence[str], num_ranks: int) -> None:
    """Start or resume the run of CONFIG (YAML) on this machine.

    Several ranks run under the deepspeed launcher; for several machines, call
    `deepspeed --hostfile ... --module alibi_lm.train.entry CONFIG` yourself.
    """
    from alibi_lm.train.entry import main as run_train

    arguments = [str(config), *overrides]
    if num_ranks == 1:
        sys.exit(run_train(arguments))
    from alibi_lm.train.environment import free_port

    launcher = Path(sys.executable).with_name("deepspeed")
    options = ["--num_gpus", str(num_ranks), "--master_port", str(free_port()), "--module"]
    command = [sys.executable, str(launcher), *options, "alibi_lm.train.entry", *arguments]
    sys.exit(subprocess.call(command))


@main.command()
@click.argument("config", type=click.Path(path_type=Path))
@OVERRIDES
@click.option("--num-ranks", type=click.IntRange(1), required=True, help="Ranks of the run.")
@click.option("--rank", type=click.IntRange(0), help="Show everything about this rank.")
@click.option("--slopes", is_flag=True, help="List the slopes of all heads.")
def plan(
    config: Path, overrides: Sequence[str], num_ranks: int, rank: int | None, slopes: bool
) -> None:
    """What each rank of CONFIG's run would hold, compute and send. Starts nothing."""
    from alibi_lm.plan.planner import make_plan
    from alibi_lm.plan.table import plan_lines, rank_lines
    from alibi_lm.utils.errors import ConfigError, Problem

    if rank is not None and rank >= num_ranks:
        fix = f"give 0 to {num_ranks - 1}"
        raise ConfigError(Problem("--rank", rank, f"is not one of {num_ranks} ranks", fix))
    made = make_plan(config, overrides, num_ranks)
    for line in plan_lines(made, slopes=slopes) if rank is None else rank_lines(made, rank):
        console.info(line)


@main.command()
@click.argument("config", type=click.Path(path_type=Path), required=False)
@OVERRIDES
@click.option("--hostfile", type=click.Path(path_type=Path), help="Examine all of its hosts.")
@click.option("--num-ranks", type=click.IntRange(1), default=1, show_default=True,
              help="Ranks, without a hostfile.")  # fmt: skip
@click.option("--master-addr", help="Where the hosts meet; by default the first one's address.")
@click.option("--master-port", default=29500, show_default=True, help="Port of the meeting.")
def doctor(
    config: Path | None,
    overrides: Sequence[str],
    hostfile: Path | None,
    num_ranks: int,
    master_addr: str | None,
    master_port: int,
) -> None:
    """Check that the hosts of a run can do it; CONFIG adds its files, disk and run folder.

    On every host: ssh, python, package versions, the same config and data, the run folder writable
    and shared, free disk; between them: clocks, and an all-reduce with its bandwidth. Exits with 2
    and one line for each check that failed.
    """
    from alibi_lm.doctor.examine import examine

    master = (master_addr, master_port)
    problems = examine(config, overrides, hostfile, num_ranks, master, os.environ)
    for problem in problems:
        console.error(str(problem))
    sys.exit(EXIT_USER_ERROR if problems else 0)


main.add_command(config_group)
main.add_command(eval_group)


@eval_group.command()
@click.argument("suite", type=click.Path(path_type=Path))
@OVERRIDES
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True,
              help="Runs trained at the same time, each on its share of the cores.")  # fmt: skip
@click.option("--no-train", is_flag=True, help="Make the page of what has been trained so far.")
def claims(suite: Path, overrides: Sequence[str], jobs: int, no_train: bool) -> None:
    """Train SUITE's models and put the literature's claims about linear biases to them.

    What is done is not done again: the same command goes on after a kill.
    """
    from alibi_lm.experiments.claims.run import run_claims

    run_claims(suite, overrides, os.environ, jobs=jobs, train=not no_train)


main.add_command(export)
main.add_command(import_command)
main.add_command(generate)
main.add_command(report)
main.add_command(compare)


@main.group(cls=Commands)
def checkpoint() -> None:
    """Look at a run's checkpoints, or rewrite one."""


@checkpoint.command("list")
@RUN
def list_checkpoints(run: Path) -> None:
    """The complete checkpoints of RUN (or the step folder RUN); says which are damaged at sight."""
    from alibi_lm.checkpoint.folder import folders_meant, read_meta
    from alibi_lm.utils.errors import CheckpointError, Problem

    problems: list[Problem] = []
    for folder in folders_meant(run):
        try:
            meta = read_meta(folder)
        except CheckpointError as error:
            problems.extend(error.problems)
            continue
        size = sum(facts["bytes"] for facts in meta["files"].values()) / 2**20
        layout = meta["layout"]
        console.info(
            f"{folder.name}  step {meta['step']:,}  {meta['tokens']:,} tokens  {size:,.1f} MiB  "
            f"{layout['world_size']} ranks, tp {layout.get('tp', 1)}, pp {layout.get('pp', 1)}, "
            f"ZeRO {layout['zero_stage']}  {meta['saved_at']}"
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
    for folder, found in verify_all(run):
        folders.append(folder)
        problems.extend(found)
        if not found:
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
@click.option(
    "--shards",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Files that the tensors are divided over.",
)
@click.option("--weights-only", is_flag=True, help="Leave the optimizer's state out.")
def convert_checkpoint(run: Path, out: Path, shards: int, weights_only: bool) -> None:
    """Write RUN's newest checkpoint (or a step folder) as the step folder OUT.

    A run does not need this to change its layout. OUT stands alone, has the same tensors bit by
    bit in --shards files, and can be used wherever a step folder can.
    """
    from alibi_lm.checkpoint.convert import convert

    written = convert(run, out, num_shards=shards, weights_only=weights_only)
    console.info(f"checkpoint {written}")


@main.group(cls=Commands, invoke_without_command=True)
@click.option("--gpu-check", is_flag=True, help="The same as the command gpu-check.")
@click.pass_context
def bench(context: click.Context, gpu_check: bool) -> None:
    """Measure speeds: ratios taken in one run on this machine."""
    if gpu_check and context.invoked_subcommand is None:
        context.invoke(check_gpu)
    elif context.invoked_subcommand is None:
        raise click.exceptions.NoArgsIsHelpError(context)


@bench.command("gpu-check")
@click.option("--out", type=click.Path(path_type=Path), default="gpu_check.json",
              show_default=True, help="Where the result goes.")  # fmt: skip
def check_gpu(out: Path) -> None:
    """Compare every attention kernel of this GPU with float64, and time it.

    Output and gradients with head counts, shared key heads, windows and cached queries; then the
    time of each to torch's attention without biases, and of a training step of 125M parameters.
    Exits with 2 where an error is too large.
    """
    from alibi_lm.bench.gpu_check import GpuCheck, gpu_check

    sys.exit(EXIT_USER_ERROR if gpu_check(GpuCheck(), out)["failed"] else 0)


for _part in (bench_train, attention_alone, long_inputs, tokenize, load, loss, start):
    bench.add_command(_part)
