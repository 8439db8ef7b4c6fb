"""`alibi-lm train`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from alibi_lm.cli.arguments import OVERRIDES


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@OVERRIDES
@click.option("--num-ranks", type=click.IntRange(1), default=1, help="Ranks on this machine.")
def train(config: Path, overrides: Sequence[str], num_ranks: int) -> None:
    """Start or resume the run of CONFIG (YAML) on this machine.

    Several ranks run under the deepspeed launcher; for several machines, call
    `deepspeed --hostfile ... --module alibi_lm.train.entry CONFIG` yourself.
    """
    arguments = [str(config), *overrides]
    if num_ranks == 1:
        from alibi_lm.train.entry import main as run_train

        sys.exit(run_train(arguments))
    sys.exit(_launch(arguments, num_ranks))


def _launch(arguments: Sequence[str], num_ranks: int) -> int:
    """Check the config and the data here, then start the ranks; the launcher's exit code.

    Raises:
        UserError: for what every rank would refuse, before any is started.
    """
    from alibi_lm.train.entry import quiet_libraries

    quiet_libraries()
    # Imported here: DeepSpeed picks its log level from the environment.
    from alibi_lm.train.data import open_training_data
    from alibi_lm.train.environment import free_port
    from alibi_lm.train.run import read_config

    config, _ = read_config(arguments[0], arguments[1:], num_ranks)
    open_training_data(config)
    launcher = Path(sys.executable).with_name("deepspeed")
    # Below errors, the launcher's log would hide a rank's own error line.
    options = ["--log_level", "error", "--num_gpus", str(num_ranks)]
    options += ["--master_port", str(free_port()), "--module"]
    command = [sys.executable, str(launcher), *options, "alibi_lm.train.entry", *arguments]
    return subprocess.call(command)
