"""The `alibi-lm` command: its group, and errors as one line each."""

from __future__ import annotations

import io
import os
import sys
from typing import Any, NoReturn

import click

from alibi_lm import __version__
from alibi_lm.cli.arguments import Commands
from alibi_lm.cli.bench import bench
from alibi_lm.cli.checkpoint import checkpoint
from alibi_lm.cli.claims import claims
from alibi_lm.cli.config import config
from alibi_lm.cli.doctor import doctor
from alibi_lm.cli.evaluate import compare, eval_group, report
from alibi_lm.cli.generate import generate
from alibi_lm.cli.hf import export, import_command
from alibi_lm.cli.plan import plan
from alibi_lm.cli.prepare import prepare
from alibi_lm.cli.train import train
from alibi_lm.utils.errors import EXIT_INTERRUPTED, EXIT_USER_ERROR, UserError, path_error
from alibi_lm.utils.logging import console
from alibi_lm.utils.utf8 import ensure_utf8

NAME = "alibi-lm"


class _Main(Commands):
    """Reports each error on one line."""

    def main(  # type: ignore[override]
        self, args: Any = None, prog_name: str | None = None, **extra: Any
    ) -> Any:
        """Run a command line; scripts run under the name of the command too."""
        return super().main(args, prog_name or NAME, **extra)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the options of `alibi-lm` itself."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            _exit_with_usage_error(ctx, error)

    def invoke(self, ctx: click.Context) -> Any:
        """Parse and run the rest of the command line."""
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            _exit_with_usage_error(ctx, error)
        except UserError as error:
            console.error(str(error))
            ctx.exit(error.exit_code)
        except OSError as error:
            mistake = path_error(error)
            if mistake is None:
                raise
            console.error(str(mistake))
            ctx.exit(mistake.exit_code)
        except KeyboardInterrupt as interrupt:
            console.critical(str(interrupt) or "interrupted")
            ctx.exit(EXIT_INTERRUPTED)


def _exit_with_usage_error(ctx: click.Context, error: click.UsageError) -> NoReturn:
    """Report a mistake in the command line by the command's own name."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        raise error
    command = error.ctx.command_path if error.ctx is not None else NAME
    message = " ".join(error.format_message().split()).rstrip(".")
    message = message[:1].lower() + message[1:]
    console.error(f"{command}: {message}; see `{command} --help`")
    ctx.exit(EXIT_USER_ERROR)


@click.group(
    NAME,
    cls=_Main,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.version_option(__version__, prog_name=NAME)
@click.option("--local_rank", type=int, hidden=True, expose_value=False)  # deepspeed --module's
def main() -> None:
    """Pretrain ALiBi language models, evaluate them on long contexts, export them.

    Exit codes: 0 success, 2 a mistake in config, command line or data (one line names it), 3 a
    loss that is not finite, 4 stopped on request after a save, 5 a rank or host was lost (repeat
    the command to resume), 130 interrupted.
    """
    ensure_utf8()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a locale's encoding may lack a text's characters
            stream.reconfigure(errors="backslashreplace")
    # https://no-color.org: any value but an empty one.
    console.colored = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


for _command in (prepare, train, plan, doctor, eval_group, export, import_command, generate):
    main.add_command(_command)
for _command in (report, compare, checkpoint, config, bench):
    main.add_command(_command)
eval_group.add_command(claims)
