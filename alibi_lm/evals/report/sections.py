"""The evals' part of a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from alibi_lm.evals import results
from alibi_lm.evals.base import Eval, Result
from alibi_lm.evals.models.base import EvalModel
from alibi_lm.evals.registry import EVALS
from alibi_lm.evals.report import html_pages

Measured = tuple[Eval[Any, Any], Result | None, Sequence[str]]
"""An eval, the result that is shown, and a line for each other one."""


def measured(eval_model: EvalModel) -> list[Measured]:
    """What has been measured, and what could be: an eval without a result is to be named."""
    found: list[Measured] = []
    for each in EVALS.values():
        entries = results.stored(each, eval_model)
        if not entries:
            if each.expected_of(eval_model):
                found.append((each, None, ()))
            continue
        result = entries[0].result
        others = [
            f"{entry.path.relative_to(eval_model.evals_folder)}: {entry.differences(result)}"
            for entry in entries[1:]
        ]
        found.append((each, result, others))
    return found


def command_of(each: Eval[Any, Any], eval_model: EvalModel) -> str:
    """The command that runs an eval on a model."""
    return f"alibi-lm eval {each.name.replace('_', '-')} {eval_model.argument}"


@dataclass(frozen=True)
class Section:
    """An eval's section of the page."""

    title: str
    html: str
    command: str | None
    """What runs it, where it has not been run."""
    others: Sequence[str]


def section_of(
    each: Eval[Any, Any], result: Result | None, others: Sequence[str], eval_model: EvalModel
) -> Section:
    """The section of an eval, by its own template where it has one."""
    if result is None:
        return Section(each.title, "", command_of(each, eval_model), ())
    package, template = "alibi_lm.evals.report", "section.html"
    if each.template is not None:
        package, template = type(each).__module__.rpartition(".")[0], each.template
    pictures = {name: html_pages.embedded(figure) for name, figure in each.figures(result).items()}
    page = html_pages.render(
        package,
        template,
        result=result,
        lines=each.table(result),
        pictures=pictures,
        **each.report_values(result),
    )
    return Section(each.title, page, None, others)


def summary(found: Sequence[Measured], eval_model: EvalModel) -> list[str]:
    """The same in terminal lines."""
    lines: list[str] = []
    for each, result, others in found:
        if result is None:
            lines += [f"{each.name}: not measured yet: {command_of(each, eval_model)}", ""]
        else:
            lines += [*each.table(result), *(f"also measured: {line}" for line in others), ""]
    return lines


def meaning(found: Sequence[Measured], eval_model: EvalModel) -> list[str]:
    """What the results show and what they do not, a sentence or two each."""
    lines = []
    for each, result, _ in found:
        if result is None:
            lines.append(f"{each.title}: this has not been measured.")
        else:
            lines += [f"{verdict.text} {verdict.caveat}" for verdict in each.verdicts(result)]
    lines.append(
        f"All numbers are of one model of {eval_model.num_parameters:,} parameters, one seed and "
        "the corpora named above. Larger models, other text or other seeds can behave differently; "
        "intervals cover the choice of documents and prompts, not the choice of seed."
    )
    return lines
