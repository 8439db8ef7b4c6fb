"""READMEs and docs are true: links, paths, make targets, configs and tables in them."""

import re
from pathlib import Path

import pytest
import yaml

from alibi_lm.config import Config
from alibi_lm.config_loading import build
from alibi_lm.train.checkpointing.resume import MAY_CHANGE

REPOSITORY = Path(__file__).parents[2]
SCRIPT_FOLDERS = ("launch", "data", "evals", "configs")
READMES = sorted([REPOSITORY / "README.md", *REPOSITORY.glob("*/README.md")])
CONFIGS = sorted((REPOSITORY / "configs").rglob("*.yaml"))


def name_of(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def code_of(text: str) -> str:
    """Everything of a README that is code: fenced and indented blocks, and spans."""
    blocks = re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL)
    rest = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    blocks += re.findall(r"^ {4}.*$", rest, re.MULTILINE)
    return "\n".join([*blocks, *re.findall(r"`([^`\n]+)`", rest)])


def anchors(text: str) -> set[str]:
    """The anchors of a README's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("readme", READMES, ids=name_of)
def test_links_and_paths_of_readmes_exist(readme: Path) -> None:
    text = readme.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        linked = (readme.parent / file).resolve() if file else readme
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked.read_text(encoding="utf-8")), target
    folders = "|".join(("alibi_lm", "tests", *SCRIPT_FOLDERS))
    for path in re.findall(rf"(?<![\w./-])(?:{folders})/[\w./-]+\.\w+\b", code_of(text)):
        if "NAME" not in path:
            assert (REPOSITORY / path).exists(), path


@pytest.mark.parametrize("readme", READMES, ids=name_of)
def test_make_targets_of_readmes_exist(readme: Path) -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][\w-]*):", makefile, re.MULTILINE))
    named = re.findall(r"\bmake ([a-z][\w-]*)", code_of(readme.read_text(encoding="utf-8")))
    assert set(named) <= targets


def test_the_readme_lists_what_may_change_on_resume() -> None:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    listed = text.partition("**What may change**")[2].partition("Token files")[0]
    assert set(re.findall(r"`([\w.]+)`", listed)) == set(MAY_CHANGE)


def test_the_readmes_configs_are_configs() -> None:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        build(Config, yaml.safe_load(block))


def test_the_configs_readme_lists_every_config() -> None:
    text = (REPOSITORY / "configs/README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([\w.-]+\.yaml)` \|", text, re.MULTILINE)
    assert sorted(listed) == [path.name for path in CONFIGS]


def test_the_readme_shows_the_claims_as_they_were_found() -> None:
    table = (REPOSITORY / "evals" / "results" / "claims" / "claims.md").read_text()
    assert f"<!-- claims -->\n{table}<!-- /claims -->" in (REPOSITORY / "README.md").read_text()
