"""Evaluating models on long contexts, and reports of the results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from alibi_lm.cli.arguments import DEVICE, OVERRIDES, Commands
from alibi_lm.cli.distributed import on_ranks
from alibi_lm.utils.logging import console

if TYPE_CHECKING:
    from alibi_lm.evals.base import Eval
    from alibi_lm.evals.models.base import EvalModel
    from alibi_lm.evals.models.sharded import EvalRanks


def _load_plugins(_: click.Context, __: click.Parameter, modules: Sequence[str]) -> Sequence[str]:
    from alibi_lm.evals.registry import load_plugins

    if modules:
        load_plugins(modules)
    return modules


EVAL_MODEL = click.argument("eval_model", metavar="RUN|hf:MODEL")
PLUGIN = click.option(
    "--plugin",
    metavar="MODULE",
    multiple=True,
    is_eager=True,
    expose_value=False,
    callback=_load_plugins,
    help="Import a Python module that adds evals or tasks; can be repeated.",
)
ENGINE = click.option(
    "--engine",
    type=click.Choice(["native", "hf"]),
    help="What computes a Hugging Face model: native, imported into memory (BLOOM and MPT; the "
    "default for them), or hf, the class of transformers (any causal language model).",
)
OUT = click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the results; by default RUN/evals/step_XXXXXXXX, or evals/hf/NAME-DIGEST "
    "below the current folder for a Hugging Face model.",
)
OPTIONS = (
    EVAL_MODEL,
    OVERRIDES,
    click.option("--suite", type=click.Path(path_type=Path), help="YAML with eval settings."),
    DEVICE,
    click.option("--force", is_flag=True, help="Run again even if the result is there."),
    ENGINE,
    OUT,
    click.option("--local_rank", type=int, default=0, hidden=True),  # deepspeed's
)


class _Evals(Commands):
    """A command for each registered eval, then the others."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*(name.replace("_", "-") for name in _evals()), *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = super().get_command(ctx, cmd_name)
        each = None if command else _evals().get(cmd_name.replace("-", "_"))
        return command if each is None else _command(each)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for name in self.list_commands(ctx):
            if command := self.get_command(ctx, name):
                self.commands.setdefault(name, command)
        self.commands = {name: self.commands[name] for name in self.list_commands(ctx)}
        super().format_commands(ctx, formatter)


def _evals() -> dict[str, Eval[Any, Any]]:
    from alibi_lm.evals.registry import EVALS, load_plugins

    load_plugins()
    return EVALS


@click.group("eval", cls=_Evals)
@PLUGIN
def eval_group() -> None:
    """Evaluate a model on long contexts: a run (its newest checkpoint), a step folder, or hf:MODEL.

    hf:MODEL is a Hugging Face folder, or a model's name on the hub. Several ranks share the work:
    `deepspeed --num_gpus N --module alibi_lm eval perplexity RUN parallel.tp=N`.
    """  # noqa: E501


def _command(each: Eval[Any, Any]) -> click.Command:
    def run(
        eval_model: str,
        overrides: Sequence[str],
        suite: Path | None,
        force: bool,
        engine: Any,
        out: Path | None,
        device: str | None,
        local_rank: int,
    ) -> None:
        from alibi_lm.evals.models.base import EvalOptions
        from alibi_lm.evals.models.resolve import resolve_model
        from alibi_lm.evals.results import evaluate
        from alibi_lm.evals.suite import read_suite

        def work(settings: Any, ranks: EvalRanks) -> None:
            options = EvalOptions.of(settings, engine, out, ranks, device)
            model = resolve_model(eval_model, options)
            evaluate(each, model, getattr(settings, each.name), force=force)

        on_ranks(lambda: read_suite(suite, overrides, each.name), work, local_rank, device)

    for option in reversed(OPTIONS):
        run = option(run)
    return click.command(each.name.replace("_", "-"), help=each.help)(run)


def _opened(
    names: Sequence[str], overrides: Sequence[str] = (), engine: Any = None, out: Path | None = None
) -> list[EvalModel]:
    """The models of a command that measures nothing."""
    from alibi_lm.evals.models.base import EvalOptions
    from alibi_lm.evals.models.resolve import resolve_model
    from alibi_lm.evals.models.sharded import ONE_PROCESS
    from alibi_lm.evals.suite import read_suite

    _evals()
    options = EvalOptions.of(read_suite(None, overrides), engine, out, ONE_PROCESS)
    return [resolve_model(name, options) for name in names]


@click.command()
@EVAL_MODEL
@OVERRIDES
@PLUGIN
@ENGINE
@OUT
def report(eval_model: str, overrides: Sequence[str], engine: Any, out: Path | None) -> None:
    """Write a model's evals as one HTML page and print their summary."""
    from alibi_lm.evals.report.report import summary_lines, write_report

    (model,) = _opened([eval_model], overrides, engine, out)
    write_report(model)
    for line in summary_lines(model):
        console.info(line)


@click.command()
@click.argument("eval_models", metavar="RUN|hf:MODEL ...", nargs=-1, required=True)
@PLUGIN
@click.option(
    "--page",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="The HTML file to write; its pictures lie beside it.",
)
def compare(eval_models: Sequence[str], page: Path) -> None:
    """Put the evals of several models on one HTML page. Measures nothing."""
    from alibi_lm.evals.report.comparison import write_comparison

    models = _opened(eval_models)
    write_comparison(models, page)
    console.info(f"comparison: {page}")
