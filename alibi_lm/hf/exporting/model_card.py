"""The model card (README.md) of an exported folder."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from alibi_lm.checkpoint.config_paths import find_corpus
from alibi_lm.checkpoint.step import Checkpoint
from alibi_lm.data.manifest import manifest_for
from alibi_lm.hf.specs.base import ExportSpec
from alibi_lm.utils.errors import DataError

TEMPLATE = "card.md"


def model_card(checkpoint: Checkpoint, manifest: Mapping[str, Any], export_spec: ExportSpec) -> str:
    """The card as Markdown with a YAML header.

    Args:
        step: the checkpoint.
        manifest: the content of alibi_lm_export.json.
        export_spec: the class that the folder is for.
    """
    source = files("alibi_lm.hf.exporting").joinpath(TEMPLATE).read_text(encoding="utf-8")
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters["percent"] = _percent
    return environment.from_string(source).render(
        name=checkpoint.run_folder.name,
        checkpoint=checkpoint,
        model=checkpoint.config.model,
        train=checkpoint.config.train,
        export_spec=export_spec,
        manifest=manifest,
        tokens=checkpoint.meta.get("tokens"),
        data=_data(checkpoint),
        loss=_last_line(checkpoint, "metrics.jsonl", "loss"),
        validation=_last_line(checkpoint, "validation.jsonl", "losses"),
        perplexity=_result(checkpoint, "perplexity"),
        needle=_result(checkpoint, "needle"),
        exp=math.exp,
    )


def _percent(score: Mapping[str, Any]) -> str:
    """A rate with its interval, such as `40% (17% to 69%)`."""
    low, high = score["interval"]
    return f"{score['rate']:.0%} ({low:.0%} to {high:.0%})"


def _data(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Name, tokens and share of each training corpus, without local paths."""
    corpora = checkpoint.config.data.corpora
    recorded = (checkpoint.meta.get("data") or {}).get("corpora") or [{}] * len(corpora)
    weights = sum(corpus.weight for corpus in corpora)
    rows = []
    for corpus, entry in zip(corpora, recorded, strict=True):
        rows.append({
            "name": Path(corpus.prefix).name.removesuffix("_train"),
            "tokens": entry.get("tokens"),
            "share": corpus.weight / weights,
            "source": _source(checkpoint, corpus.prefix),
        })  # fmt: skip
    return rows


def _source(checkpoint: Checkpoint, prefix: str) -> str | None:
    """Source of a prepared corpus, from the recipe in its manifest; None where it is not found."""
    try:
        found = find_corpus(checkpoint, "data.corpora", prefix, "put it back")
    except DataError:
        return None
    recipe = (manifest_for(found) or {}).get("recipe", {})
    for source in recipe.get("sources", []):
        if f"{source['name']}_train" == Path(prefix).name:
            path = source["path"]
            return ", ".join([path] if isinstance(path, str) else path)
    return None


def _last_line(checkpoint: Checkpoint, name: str, key: str) -> dict[str, Any] | None:
    """The last line of a run's log, up to this step, that has `key`."""
    path = checkpoint.run_folder / name
    last = None
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:  # the cut-off last line of a killed run
            continue
        if row.get("step", 0) <= checkpoint.step and row.get(key) is not None:
            last = row
    return last


def _result(checkpoint: Checkpoint, name: str) -> dict[str, Any] | None:
    """A stored eval result, or None if that eval has not run."""
    path = checkpoint.evals_folder / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
