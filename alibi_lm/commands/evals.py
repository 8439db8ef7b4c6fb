"""Judging a model on long contexts, and the report of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from alibi_lm.commands.arguments import OVERRIDES
from alibi_lm.console import console

SUBJECT = click.argument("subject", metavar="RUN")
SUITE = click.option("--suite", type=click.Path(path_type=Path), help="YAML with eval settings.")
FORCE = click.option("--force", is_flag=True, help="Run again even if the result is there.")


@click.group("eval")
def eval_group() -> None:
    """Judge a run's checkpoint (the newest, or a step folder) on long contexts."""


@eval_group.command()
@SUBJECT
@OVERRIDES
@SUITE
@FORCE
def perplexity(subject: str, overrides: Sequence[str], suite: Path | None, force: bool) -> None:
    """Perplexity by length, over the same tokens at every length."""
    from alibi_lm.evals.perplexity import evaluate
    from alibi_lm.evals.subject import open_subject
    from alibi_lm.evals.suite import read_suite

    evaluate(open_subject(subject), read_suite(suite, overrides).perplexity, force=force)


@eval_group.command()
@SUBJECT
@OVERRIDES
@SUITE
@FORCE
def needle(subject: str, overrides: Sequence[str], suite: Path | None, force: bool) -> None:
    """Needle in a haystack, depth by length."""
    from alibi_lm.evals.needle import evaluate
    from alibi_lm.evals.subject import open_subject
    from alibi_lm.evals.suite import read_suite

    evaluate(open_subject(subject), read_suite(suite, overrides).needle, force=force)


@eval_group.command()
@SUBJECT
@OVERRIDES
@SUITE
@FORCE
def retrieval(subject: str, overrides: Sequence[str], suite: Path | None, force: bool) -> None:
    """The passkey, associative recall and RULER's tasks, by length."""
    from alibi_lm.evals.retrieval import evaluate
    from alibi_lm.evals.subject import open_subject
    from alibi_lm.evals.suite import read_suite

    evaluate(open_subject(subject), read_suite(suite, overrides).retrieval, force=force)


@eval_group.command()
@SUBJECT
@OVERRIDES
@SUITE
@FORCE
def horizon(subject: str, overrides: Sequence[str], suite: Path | None, force: bool) -> None:
    """How far each head provably, and truly, reads; a model with linear biases."""
    from alibi_lm.evals.horizon import evaluate
    from alibi_lm.evals.subject import open_subject
    from alibi_lm.evals.suite import read_suite

    evaluate(open_subject(subject), read_suite(suite, overrides).horizon, force=force)


@eval_group.command()
@SUBJECT
@OVERRIDES
@SUITE
@FORCE
def generalisation(subject: str, overrides: Sequence[str], suite: Path | None, force: bool) -> None:
    """Copying, addition and sorting with more items than were trained."""
    from alibi_lm.evals.generalisation import evaluate
    from alibi_lm.evals.subject import open_subject
    from alibi_lm.evals.suite import read_suite

    evaluate(open_subject(subject), read_suite(suite, overrides).generalisation, force=force)


@click.command()
@SUBJECT
def report(subject: str) -> None:
    """Write RUN's evals as one HTML page and print their summary."""
    from alibi_lm.evals.report import summary_lines, write_report
    from alibi_lm.evals.subject import open_subject

    opened = open_subject(subject)
    write_report(opened)
    for line in summary_lines(opened):
        console.say(line)
