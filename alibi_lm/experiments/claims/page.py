"""The claims page, its pictures and claims.json."""

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
from alibi_lm.experiments.claims.evidence import Evidence
from alibi_lm.experiments.claims.pictures import pictures
from alibi_lm.experiments.claims.statements import CLAIMS
from alibi_lm.utils.files import write_json, write_text

PAGE, TABLE, DATA = "claims.html", "claims.md", "claims.json"


def claim_rows(evidence: Evidence) -> list[dict[str, str]]:
    """Every claim with its verdict."""
    rows = []
    for claim in CLAIMS:
        finding = claim.finding(evidence)
        tone = finding.verdict if finding.verdict in ("confirmed", "refuted") else "open"
        rows.append({
            "key": claim.key,
            "statement": claim.statement,
            "source": claim.source,
            "published": claim.published,
            "criterion": claim.criterion,
            "verdict": finding.verdict,
            "tone": tone,
            "text": finding.text,
        })  # fmt: skip
    return rows


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """The main table for a README."""
    lines = ["| Claim | Verdict | Measured here | Published |", "|---|---|---|---|"]
    lines += [
        "| " + " | ".join(row[key].replace("|", "/") for key in
                          ("statement", "verdict", "text", "published")) + " |"
        for row in rows
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def write_page(suite: ClaimsConfig, name: str, evidence: Evidence) -> list[dict[str, str]]:
    """Write the page, claims.json, claims.md and the PNGs; return the table's rows."""
    folder = Path(suite.results)
    folder.mkdir(parents=True, exist_ok=True)
    rows = claim_rows(evidence)
    shown = {
        title: html_pages.picture(figure, folder / f"{title}.png")
        for title, figure in pictures(evidence).items()
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
        lengths=_lengths(evidence),
        losses=_loss_rows(evidence),
        budgets=_budgets(suite, evidence),
        versions=", ".join(f"{package} {number}" for package, number in versions.items()),
        settings=to_yaml(settings),
    )
    write_text(folder / PAGE, page)
    write_text(folder / TABLE, markdown(rows))
    measurements = {
        f"{group}/{model}": runs for (group, model), runs in sorted(evidence.runs.items())
    }
    write_json(folder / DATA, {
        "suite": name,
        "settings": settings,
        "versions": versions,
        "claims": [{k: v for k, v in row.items() if k != "tone"} for row in rows],
        "measurements": measurements,
        "cost": evidence.cost,
    })  # fmt: skip
    return rows


def _lengths(evidence: Evidence) -> list[int]:
    names = [model for group, model in evidence.runs if group == "text"]
    return evidence.lengths(names[0]) if names else []


def _loss_rows(evidence: Evidence) -> list[dict[str, Any]]:
    return [
        {
            "name": model,
            "trained": evidence.trained(model),
            "perplexities": [
                f"{math.exp(float(evidence.losses(model, n).mean())):.2f}"
                for n in evidence.lengths(model)
            ],
        }
        for group, model in evidence.runs
        if group == "text"
    ]


def _budgets(suite: ClaimsConfig, evidence: Evidence) -> list[dict[str, str]]:
    rows = []
    for group, settings in suite.groups().items():
        own = {model: runs for (name, model), runs in evidence.runs.items() if name == group}
        if not own:
            continue
        every = [run for runs in own.values() for run in runs]
        rows.append({
            "group": group,
            "models": ", ".join(own),
            "seeds": ", ".join(map(str, settings.seeds)),
            "parameters": _range(run["num_parameters"] for run in every),
            "tokens": _range(run["tokens"] for run in every),
            "trained": _range(evidence.trained(model, group) for model in own),
        })  # fmt: skip
    return rows


def _range(values: Any) -> str:
    found = sorted(set(values))
    return f"{found[0]:,}" if len(found) == 1 else f"{found[0]:,} to {found[-1]:,}"
