"""Several models side by side on one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alibi_lm.evals import results
from alibi_lm.evals.base import Comparison, Eval, Result
from alibi_lm.evals.models.base import EvalModel
from alibi_lm.evals.registry import EVALS
from alibi_lm.evals.report import html_pages
from alibi_lm.utils.errors import ConfigError, DataError, Problem
from alibi_lm.utils.files import write_text
from alibi_lm.utils.logging import console

PAGE = "comparison.html"


@dataclass(frozen=True)
class Measured:
    """The comparable results of one eval."""

    each: Eval[Any, Any]
    results: Mapping[str, Result]
    """By the model's name."""
    notes: Sequence[str]
    """A line for each model or result that is left out."""


def names_of(eval_models: Sequence[EvalModel]) -> list[str]:
    """A short name of each model; its whole argument where short names are alike.

    Raises:
        ConfigError: a model is named twice.
    """
    names = [eval_model.title for eval_model in eval_models]
    for longer in (
        [eval_model.argument for eval_model in eval_models],
        [f"{eval_model.argument}, step {eval_model.step}" for eval_model in eval_models],
    ):
        names = [
            name if names.count(name) == 1 else other
            for name, other in zip(names, longer, strict=True)
        ]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(Problem("RUN", twice[0], "is named twice", "name each model once"))
    return names


def write_comparison(eval_models: Sequence[EvalModel], path: Path) -> Path:
    """Write what has been measured on several models as one page, its PNGs beside it.

    Warns of each model on which nothing has been measured.

    Raises:
        ConfigError: fewer than two models, or one twice.
        DataError: nothing has been measured on any of them, or nothing that can be compared.
    """
    if len(eval_models) < 2:
        rule = "is the only model"
        raise ConfigError(Problem("RUN", eval_models[0].argument, rule, "name at least two"))
    names = names_of(eval_models)
    models = dict(zip(names, eval_models, strict=True))
    found = [part for each in EVALS.values() if (part := _measured(each, models))]
    if not found:
        rule = "none of them has been measured"
        fix = "run alibi-lm eval perplexity on each"
        raise DataError(Problem(", ".join(names), None, rule, fix))
    page = html_pages.render(
        "alibi_lm.evals.report",
        PAGE,
        names=names,
        models=[_facts(name, eval_model) for name, eval_model in models.items()],
        parts=[_part(part, path) for part in found],
        unmeasured=unmeasured(names, found),
        verdicts=verdict_rows(names, found),
    )
    write_text(path, page)
    for name in unmeasured(names, found):
        console.warning(f"{name}: nothing has been measured; see `alibi-lm eval --help`")
    return path


def _measured(each: Eval[Any, Any], models: Mapping[str, EvalModel]) -> Measured | None:
    """The comparable results of most models; None where the eval was run on none.

    Of a model with several comparable results the first one of `results.stored` is taken.

    Raises:
        DataError: several models have results, and no two of them are comparable.
    """
    stored = {name: results.stored(each, model) for name, model in models.items()}
    stored = {name: entries for name, entries in stored.items() if entries}
    chosen: dict[str, results.Stored[Any]] = {}
    for candidate in (entry.result for entries in stored.values() for entry in entries):
        comparable = {
            name: entry
            for name, entries in stored.items()
            for entry in reversed(entries)  # the first one of the model is set last
            if each.comparable(candidate, entry.result)
        }
        if len(comparable) > len(chosen):
            chosen = comparable
    if not chosen:
        return None
    if len(chosen) == 1 < len(stored):
        texts = ", ".join(
            f"{name}: {', '.join(file.prefix for file in entries[0].result.corpus)}"
            for name, entries in stored.items()
        )
        rule = f"{each.name} was measured on different texts ({texts})"
        fix = "measure it with the same corpus, longest length and max_tokens"
        raise DataError(Problem(", ".join(stored), None, rule, fix))
    return Measured(each, {name: entry.result for name, entry in chosen.items()},
                    _notes(models, stored, chosen))  # fmt: skip


def _notes(
    models: Mapping[str, EvalModel],
    stored: Mapping[str, Sequence[results.Stored[Any]]],
    chosen: Mapping[str, results.Stored[Any]],
) -> list[str]:
    notes = []
    for name in models:
        if name not in stored:
            notes.append(f"{name}: not measured")
        elif name not in chosen:
            notes.append(f"{name}: measured on another text, so it is left out")
        else:
            shown = chosen[name]
            notes += [
                f"{name}: {entry.path.name} is left out ({entry.differences(shown.result)})"
                for entry in stored[name]
                if entry.path != shown.path
            ]
    return notes


def unmeasured(names: Sequence[str], found: Sequence[Measured]) -> list[str]:
    """Models on which nothing has been measured."""
    return [name for name in names if not any(name in part.results for part in found)]


def _part(part: Measured, path: Path) -> dict[str, Any]:
    """An eval's section of the page; its pictures are written beside the page."""
    compared = part.each.compare(part.results) or Comparison()
    pictures = {
        name: html_pages.picture(figure, path.with_name(f"{path.stem}_{name}.png"))
        for name, figure in compared.figures.items()
    }
    return {"title": part.each.title, "compared": compared, "pictures": pictures,
            "notes": part.notes}  # fmt: skip


def _facts(name: str, eval_model: EvalModel) -> dict[str, str]:
    model = eval_model.model_config
    return {
        "name": name,
        "argument": eval_model.argument,
        "which": eval_model.subtitle,
        "parameters": f"{eval_model.num_parameters:,}",
        "position": "as its own class has it" if model is None else model.position,
        "trained": f"{eval_model.training_length:,}",
    }


def verdict_rows(names: Sequence[str], found: Sequence[Measured]) -> list[dict[str, str]]:
    """Every verdict in words, model by model."""
    return [
        {"name": name, "eval": part.each.name, "word": verdict.word, "text": verdict.text}
        for name in names
        for part in found
        if name in part.results
        for verdict in part.each.verdicts(part.results[name])
    ]
