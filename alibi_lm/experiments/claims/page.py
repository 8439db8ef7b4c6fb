"""Writes the claims page, its plots, claims.md and claims.json."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from alibi_lm.config_loading import to_dict, to_yaml
from alibi_lm.evals.report import html_pages
from alibi_lm.experiments.claims.config import ClaimsConfig
from alibi_lm.experiments.claims.criteria import CLAIMS
from alibi_lm.experiments.claims.measurements import Measurements
from alibi_lm.experiments.claims.pictures import pictures
from alibi_lm.utils.files import write_json, write_text

PAGE, TABLE, DATA = "claims.html", "claims.md", "claims.json"


def claim_rows(measured: Measurements) -> list[dict[str, str]]:
    """Every claim with its verdict, as the page shows it."""
    rows = []
    for claim in CLAIMS:
        finding = claim.finding(measured)
        tone = finding.verdict if finding.verdict in ("confirmed", "refuted") else "open"
        rows.append({name: str(value) for name, value in vars(claim).items() if name != "untested"})
        rows[-1] |= {"verdict": finding.verdict, "tone": tone, "text": finding.text}
    return rows


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """The main table for a README."""
    lines = ["| Claim | Verdict | Measured here | Published |", "|---|---|---|---|"]
    columns = ("statement", "verdict", "text", "published")
    for row in rows:
        lines.append(f"| {' | '.join(row[key].replace('|', '/') for key in columns)} |")
    return "\n".join(lines) + "\n"


def write_page(suite: ClaimsConfig, name: str, measured: Measurements) -> list[dict[str, str]]:
    """Write the page, claims.json, claims.md and the PNGs; return the table's rows."""
    folder = Path(suite.results)
    folder.mkdir(parents=True, exist_ok=True)
    rows = claim_rows(measured)
    shown = {
        title: html_pages.picture(figure, folder / f"{title}.png")
        for title, figure in pictures(measured).items()
    }
    counts = Counter(row["verdict"] for row in rows)
    versions = {package: version(package) for package in ("alibi_lm", "torch", "deepspeed")}
    settings = to_dict(suite)
    page = html_pages.render(
        "alibi_lm.experiments.claims",
        PAGE,
        suite=name,
        counts=", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()),
        rows=rows,
        pictures=shown,
        lengths=_lengths(measured),
        losses=_loss_rows(measured),
        budgets=_budgets(suite, measured),
        versions=", ".join(f"{package} {number}" for package, number in versions.items()),
        settings=to_yaml(settings),
    )
    write_text(folder / PAGE, page)
    write_text(folder / TABLE, markdown(rows))
    measurements = {
        f"{group}/{model}": runs for (group, model), runs in sorted(measured.runs.items())
    }
    data = {
        "suite": name,
        "settings": settings,
        "versions": versions,
        "claims": [{k: v for k, v in row.items() if k != "tone"} for row in rows],
        "measurements": measurements,
        "cost": measured.cost,
    }
    write_json(folder / DATA, data)
    return rows


def _lengths(measured: Measurements) -> list[int]:
    names = [model for group, model in measured.runs if group == "text"]
    return measured.lengths(names[0]) if names else []


def _loss_rows(measured: Measurements) -> list[dict[str, Any]]:
    return [
        {
            "name": model,
            "trained": measured.trained(model),
            "perplexities": [
                f"{math.exp(float(measured.losses(model, n).mean())):.2f}"
                for n in measured.lengths(model)
            ],
        }
        for group, model in measured.runs
        if group == "text"
    ]


def _budgets(suite: ClaimsConfig, measured: Measurements) -> list[dict[str, str]]:
    rows = []
    for group, settings in suite.groups().items():
        models = {model: runs for (name, model), runs in measured.runs.items() if name == group}
        if not models:
            continue
        every = [run for runs in models.values() for run in runs]
        rows.append(
            {
                "group": group,
                "models": ", ".join(models),
                "seeds": ", ".join(map(str, settings.seeds)),
                "parameters": _range(run["num_parameters"] for run in every),
                "tokens": _range(run["tokens"] for run in every),
                "trained": _range(measured.trained(model, group) for model in models),
            }
        )
    return rows


def _range(values: Any) -> str:
    ordered = sorted(set(values))
    return f"{ordered[0]:,}" if len(ordered) == 1 else f"{ordered[0]:,} to {ordered[-1]:,}"
