"""The committed reference of all settings, and the schema for editors, are the generated ones."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from alibi_lm.cli.config import FILES
from alibi_lm.cli.main import main
from alibi_lm.config_loading import flatten, load_yaml

REPOSITORY = Path(__file__).parents[3]
CONFIGS = sorted((REPOSITORY / "configs").glob("*.yaml"))


def output(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["config", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


@pytest.mark.parametrize(
    ("path", "command"), [("docs/configuration.md", "reference"), ("configs/schema.json", "schema")]
)
def test_the_committed_file_is_the_generated_one(path: str, command: str, tmp_path: Path) -> None:
    assert (REPOSITORY / path).read_text(encoding="utf-8") == output(command), "run make reference"
    output(command, str(tmp_path / "out"))
    assert (tmp_path / "out").read_text(encoding="utf-8") == output(command)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_configs_name_the_schema_and_have_only_its_keys(path: Path) -> None:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first == "# yaml-language-server: $schema=schema.json"
    schema = json.loads((REPOSITORY / "configs/schema.json").read_text(encoding="utf-8"))
    for key in flatten(load_yaml(path)):
        assert allowed(schema, schema, key.split(".")), key


def allowed(schema: dict[str, Any], node: dict[str, Any], parts: list[str]) -> bool:
    """Whether a dotted key stands somewhere in a schema."""
    if "$ref" in node:
        node = schema["$defs"][node["$ref"].rpartition("/")[2]]
    if not parts or node.get("additionalProperties") is True:
        return True
    options = [node["properties"][parts[0]]] if parts[0] in node.get("properties", {}) else []
    if options:
        return allowed(schema, options[0], parts[1:])
    return any(allowed(schema, option, parts) for option in node.get("anyOf", []))


@pytest.mark.parametrize("kind", FILES)
def test_every_kind_of_file_has_a_strict_schema(kind: str) -> None:
    schema = json.loads(output("schema", "--kind", kind))
    assert schema["additionalProperties"] is False
    for section in schema["$defs"].values():
        assert section["additionalProperties"] is False
        assert all(field["description"] for field in section["properties"].values())


def test_the_reference_names_types_defaults_and_meanings() -> None:
    page = output("reference")
    for line in (
        "| `train.learning_rate` | number > 0 | `0.001` | Peak learning rate of AdamW. |",
        "| `run.dir` | string | required |",
        '| `train.precision` | `fp32`, `bf16`, `fp16` | `"bf16"` |',
        "| `data.corpora.N.weight` | number > 0 | `1.0` |",
        "| `needle.depths` | list of number ≥ 0, ≤ 1 | `[0.0, 0.25, 0.5, 0.75, 1.0]` |",
        "### `model.scaling`",
        "| `sources.N.recall.max_tokens` | integer > 0 | required |",
    ):
        assert line in page
