"""Self-contained HTML pages from templates of the package, with pictures embedded."""

from __future__ import annotations

import base64
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from alibi_lm.evals.report import plots


def render(package: str, template: str, **values: Any) -> str:
    """A filled-in template; values are escaped, and a missing one is an error.

    A template may import others as `PACKAGE/FILE`.
    """
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, loader=jinja2.FunctionLoader(_source)
    )
    return environment.get_template(f"{package}/{template}").render(**values)


def _source(name: str) -> str:
    package, _, template = name.rpartition("/")
    return files(package).joinpath(template).read_text(encoding="utf-8")


def embedded(figure: plots.Figure) -> str:
    """A figure as the base64 that a page holds."""
    return base64.b64encode(plots.png(figure)).decode()


def picture(figure: plots.Figure, path: Path) -> str:
    """Write a figure as a PNG file, and give it as the base64 that a page holds."""
    plots.save(figure, path)
    return base64.b64encode(path.read_bytes()).decode()
