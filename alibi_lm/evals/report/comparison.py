"""Several models side by side on one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alibi_lm.evals import results
from alibi_lm.evals.models.base import EvalModel
from alibi_lm.evals.report import comparison_plots, html_pages
from alibi_lm.utils.errors import ConfigError, DataError, Problem
from alibi_lm.utils.files import write_text

EVALS = ("perplexity", "needle", "retrieval", "generalization", "attention_span")
PAGE = "comparison.html"

Found = Mapping[str, dict[str, Any]]
"""Results of one eval by the model's name."""


def names_of(eval_models: Sequence[EvalModel]) -> list[str]:
    """A short name of each model, its whole argument where short ones are alike.

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

    Raises:
        ConfigError: fewer than two models, or one twice.
        DataError: nothing has been measured on any of them, or perplexities of different texts.
    """
    if len(eval_models) < 2:
        rule = "is the only model"
        raise ConfigError(Problem("RUN", eval_models[0].argument, rule, "name at least two"))
    names = names_of(eval_models)
    found: dict[str, Found] = {}
    for name in EVALS:
        stored = {
            label: results.stored(eval_model, name)
            for label, eval_model in zip(names, eval_models, strict=True)
        }
        found[name] = {label: result for label, result in stored.items() if result is not None}
    if not any(found.values()):
        rule = "none of them has been measured"
        fix = "run alibi-lm eval perplexity on each"
        raise DataError(Problem(", ".join(names), None, rule, fix))
    _check_same_text(found["perplexity"])
    figures = comparison_plots.figures(found)
    pictures = {}
    for name, figure in figures.items():
        pictures[name] = html_pages.picture(figure, path.with_name(f"{path.stem}_{name}.png"))
    page = html_pages.render(
        "alibi_lm.evals.report",
        PAGE,
        names=names,
        models=[
            _facts(name, eval_model) for name, eval_model in zip(names, eval_models, strict=True)
        ],
        pictures=pictures,
        perplexity=perplexity_table(found["perplexity"]),
        retrieval=retrieval_table(found["needle"], found["retrieval"]),
        verdicts=verdict_rows(names, found),
    )
    write_text(path, page)
    return path


def _check_same_text(found: Found) -> None:
    """Perplexities of different tokens cannot stand side by side; bits per byte can, of one text.

    Raises:
        DataError: two models were scored on documents of different text.
    """
    sizes = {name: result["num_bytes"] for name, result in found.items()}
    counts = {name: result["num_tokens"] for name, result in found.items()}
    known = {size for size in sizes.values() if size is not None}
    if len(known) > 1 or (None in sizes.values() and len(set(counts.values())) > 1):
        measured = ", ".join(f"{name}: {sizes[name] or counts[name]:,}" for name in found)
        rule = f"were scored on different texts (bytes or tokens: {measured})"
        fix = "score them with the same corpus, longest length and max_tokens"
        raise DataError(Problem(", ".join(found), None, rule, fix))


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


def perplexity_table(found: Found) -> dict[str, Any] | None:
    """Perplexity and bits per byte of each model at each length."""
    if not found:
        return None
    lengths = sorted({row["length"] for result in found.values() for row in result["rows"]})
    rows = []
    for name, result in found.items():
        own = {row["length"]: row for row in result["rows"]}
        null = (result.get("truncated_context") or {}).get("verdict")
        rows.append({
            "name": name,
            "trained": result["training_length"],
            "cells": [own.get(length) for length in lengths],
            "truncated_context": null["word"] if null else None,
        })  # fmt: skip
    return {"lengths": lengths, "rows": rows}


def retrieval_table(needle: Found, retrieval: Found) -> list[dict[str, Any]]:
    """Needles, and each retrieval task, by length: one row a model and task."""
    rows = []
    for name, result in needle.items():
        scores = {row["length"]: row["ranking"]["rate"] for row in result["by_length"]}
        rows.append({"task": "needle (ranking)", "name": name, "scores": scores})
    for name, result in retrieval.items():
        for task in result["tasks"]:
            scores = {
                cell["length"]: cell["score"]["rate"]
                for cell in result["cells"]
                if cell["task"] == task["name"]
            }
            rows.append({"task": task["name"], "name": name, "scores": scores})
    order = {task: index for index, task in enumerate(dict.fromkeys(row["task"] for row in rows))}
    return sorted(rows, key=lambda row: order[row["task"]])


def verdict_rows(names: Sequence[str], found: Mapping[str, Found]) -> list[dict[str, str]]:
    """Every verdict in words, model by model."""
    return [
        {"name": name, "eval": eval_name, "word": verdict["word"], "text": verdict["text"]}
        for name in names
        for eval_name in EVALS
        if name in found[eval_name]
        for verdict in _verdicts(found[eval_name][name])
    ]


def _verdicts(result: Mapping[str, Any]) -> list[Mapping[str, str]]:
    null = result.get("truncated_context") or {}
    return [result["verdict"], *([null["verdict"]] if null.get("verdict") else [])]
