"""HTML pages that stand alone: templates of the package, pictures within them."""

from __future__ import annotations

import base64
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from alibi_lm.evals.report import plots


def render(package: str, template: str, **values: Any) -> str:
    """A template of a package, filled in; values are escaped, and a missing one is an error."""
    source = files(package).joinpath(template).read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(source).render(**values)


def picture(figure: plots.Figure, path: Path) -> str:
    """Write a figure as a PNG file, and give it as the base64 that a page holds."""
    plots.save(figure, path)
    return base64.b64encode(path.read_bytes()).decode()
