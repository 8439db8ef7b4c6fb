"""`alibi-lm config`: the reference page of every setting, and a JSON schema for editors."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from alibi_lm.cli.arguments import Commands
from alibi_lm.utils.logging import console

if TYPE_CHECKING:
    from alibi_lm.utils.settings import Section

OUT = click.argument("out", type=click.Path(path_type=Path, dir_okay=False), required=False)
FILES = {
    "run": "A training run: `configs/*.yaml`, for `train`, `plan` and `doctor`",
    "recipe": "A data recipe: `data/*.yaml`, for `prepare`",
    "suite": "An eval suite: `evals/*.yaml`, for `eval`",
    "claims": "A claims suite: `evals/suites/*.yaml`, for `eval claims`",
}
"""The kinds of YAML that are read, with their headings in the reference."""
HEADER = """# Configuration reference

Every key of every YAML file; `make reference` writes this page from the settings' types and
docstrings. [Run configs](run-configs.md) says how a file is read and checked. The same settings are
dataclasses in Python, such as `ModelConfig(num_layers=12)`, and are checked there by the same
rules.

Editors that know JSON schemas complete and check keys as you type: the configs in `configs/` name
`configs/schema.json` in their first line. `alibi-lm config schema OUT --kind recipe` writes the
schema of another kind of file.
"""


@click.group(cls=Commands)
def config() -> None:
    """Describe the settings: a reference of every key, and a JSON schema for editors."""


@config.command()
@OUT
def reference(out: Path | None) -> None:
    """Write the reference of every key as Markdown to OUT, or to standard output."""
    _write(reference_page(), out)


@config.command()
@OUT
@click.option("--kind", type=click.Choice(list(FILES)), default="run", help="Kind of file.")
def schema(out: Path | None, kind: str) -> None:
    """Write the JSON schema of a kind of YAML file to OUT, or to standard output."""
    _write(schema_text(kind), out)


def _write(text: str, out: Path | None) -> None:
    from alibi_lm.utils.files import write_text

    if out is None:
        console.write(text)
    else:
        write_text(out, text)


def _root(kind: str) -> type[Section]:
    from alibi_lm.config import Config
    from alibi_lm.data.config import RecipeConfig
    from alibi_lm.evals.suite import suite_class
    from alibi_lm.experiments.claims.config import ClaimsConfig

    roots: dict[str, type[Section]]
    roots = {"run": Config, "recipe": RecipeConfig, "suite": suite_class(), "claims": ClaimsConfig}
    return roots[kind]


def schema_text(kind: str) -> str:
    """The JSON schema of a kind of YAML file."""
    from alibi_lm.utils.settings import adapter

    content = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    content |= _without_titles(adapter(_root(kind)).json_schema())
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _without_titles(node: Any) -> Any:
    """pydantic titles every field with its own name."""
    if isinstance(node, dict):
        return {
            key: _without_titles(value)
            for key, value in node.items()
            if not (key == "title" and isinstance(value, str))
        }
    return [_without_titles(item) for item in node] if isinstance(node, list) else node


def reference_page() -> str:
    """Every key of every kind of file, with type, default and description."""
    lines = [HEADER]
    for kind, title in FILES.items():
        lines += [f"## {title}", "", *_section(_root(kind), "")]
    return "\n".join(lines)


def _section(cls: type[Section], prefix: str) -> Iterator[str]:
    """A table of the section's own keys, then its subsections."""
    from alibi_lm.utils.settings import adapter, field_types, section_of

    properties = adapter(cls).json_schema()["properties"]
    subsections = {name: section_of(hint) for name, hint in field_types(cls).items()}
    rows = [
        f"| `{prefix}{field.name}` | {_type(properties[field.name])} | {_default(field)} | "
        f"{_cell(properties[field.name].get('description', ''))} |"
        for field in dataclasses.fields(cls)  # type: ignore[arg-type]
        if subsections[field.name] is None
    ]
    if rows:
        yield from ("| Key | Type | Default | Meaning |", "| --- | --- | --- | --- |", *rows, "")
    for name, section in subsections.items():
        if section is None:
            continue
        key, about = prefix + name, [section.__doc__ or ""]
        if properties[name].get("type") == "array":
            about.insert(0, properties[name]["description"] + " N counts its items from 0.")
            name += ".N"
        elif "anyOf" in properties[name]:
            about.insert(0, properties[name]["description"])
        paragraphs = "\n\n".join(" ".join(text.split()) for text in about)
        yield from (f"### `{key}`", "", paragraphs, "", *_section(section, f"{prefix}{name}."))


def _type(node: dict[str, Any]) -> str:
    """A field's JSON schema in words."""
    if "anyOf" in node:
        return " or ".join(_type(option) for option in node["anyOf"])
    if "enum" in node or "const" in node:
        return ", ".join(f"`{value}`" for value in node.get("enum", [node.get("const")]))
    if node["type"] == "array":
        return f"list of {_type(node['items'])}"
    names = {"object": "mapping", "boolean": "true or false"}
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {node[key]:g}" for key, sign in signs.items() if key in node]
    return " ".join([names.get(node["type"], node["type"]), ", ".join(bounds)]).strip()


def _default(field: Any) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return f"`{json.dumps(field.default_factory())}`"
    if field.default is dataclasses.MISSING:
        return "required"
    return f"`{json.dumps(field.default)}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
