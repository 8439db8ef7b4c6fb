"""Judging a model on long contexts, and the report of it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from alibi_lm.cli.arguments import DEVICE, OVERRIDES, Commands
from alibi_lm.cli.distributed import on_ranks
from alibi_lm.utils.logging import console

if TYPE_CHECKING:
    from alibi_lm.evals.config import SuiteConfig
    from alibi_lm.evals.models.sharded import EvalRanks

SUBJECT = click.argument("eval_model", metavar="RUN|hf:MODEL")
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
    SUBJECT,
    OVERRIDES,
    click.option("--suite", type=click.Path(path_type=Path), help="YAML with eval settings."),
    DEVICE,
    click.option("--force", is_flag=True, help="Run again even if the result is there."),
    ENGINE,
    OUT,
    click.option("--local_rank", type=int, default=0, hidden=True),  # deepspeed's
)
EVALS = {
    "perplexity": "Perplexity by length, over the same tokens at every length.",
    "needle": "Needle in a haystack, depth by length.",
    "retrieval": "The passkey, associative recall and RULER's tasks, by length.",
    "generalization": "Copying, addition and sorting with more items than were trained.",
    "attention_span": "How far each head provably, and truly, reads; a model with linear biases.",
}
"""The evals, by the section of a suite that has their name."""
MODULES = {
    "perplexity": "perplexity.evaluation",
    "needle": "retrieval.needle",
    "retrieval": "retrieval.evaluation",
    "generalization": "generalization.evaluation",
    "attention_span": "attention_span.evaluation",
}


@click.group("eval", cls=Commands)
def eval_group() -> None:
    """Evaluate a model on long contexts: a run (its newest checkpoint), a step folder, or hf:MODEL.

    hf:MODEL is a Hugging Face folder, or a model's name on the hub. Several ranks share the work:
    `deepspeed --num_gpus N --module alibi_lm eval perplexity RUN parallel.tp=N`.
    """  # noqa: E501


def _command(name: str, words: str) -> click.Command:
    """The command of an eval."""

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
        from alibi_lm.evals.suite import read_suite

        def work(settings: SuiteConfig, ranks: EvalRanks) -> None:
            evaluate = import_module(f"alibi_lm.evals.{MODULES[name]}").evaluate
            opened = resolve_model(eval_model, EvalOptions.of(settings, engine, out, ranks, device))
            evaluate(opened, getattr(settings, name), force=force)

        on_ranks(lambda: read_suite(suite, overrides, name), work, local_rank, device)

    for option in reversed(OPTIONS):
        run = option(run)
    return click.command(name.replace("_", "-"), help=words)(run)


for _name, _words in EVALS.items():
    eval_group.add_command(_command(_name, _words))


@click.command()
@SUBJECT
@OVERRIDES
@ENGINE
@OUT
def report(eval_model: str, overrides: Sequence[str], engine: Any, out: Path | None) -> None:
    """Write a model's evals as one HTML page and print their summary."""
    from alibi_lm.evals.models.base import EvalOptions
    from alibi_lm.evals.models.resolve import resolve_model
    from alibi_lm.evals.models.sharded import ONE_PROCESS
    from alibi_lm.evals.report.report import summary_lines, write_report
    from alibi_lm.evals.suite import read_suite

    settings = read_suite(None, overrides)
    opened = resolve_model(eval_model, EvalOptions.of(settings, engine, out, ONE_PROCESS))
    write_report(opened)
    for line in summary_lines(opened):
        console.info(line)


@click.command()
@click.argument("eval_models", metavar="RUN|hf:MODEL ...", nargs=-1, required=True)
@click.option("--page", type=click.Path(path_type=Path, dir_okay=False), required=True,
              help="The HTML file to write; its pictures lie beside it.")  # fmt: skip
def compare(eval_models: Sequence[str], page: Path) -> None:
    """Put the evals of several models on one HTML page. Measures nothing."""
    from alibi_lm.evals.models.base import EvalOptions
    from alibi_lm.evals.models.resolve import resolve_model
    from alibi_lm.evals.models.sharded import ONE_PROCESS
    from alibi_lm.evals.report.comparison import write_comparison
    from alibi_lm.evals.suite import read_suite

    choices = EvalOptions.of(read_suite(None, ()), None, None, ONE_PROCESS)
    write_comparison([resolve_model(name, choices) for name in eval_models], page)
    console.info(f"comparison: {page}")
