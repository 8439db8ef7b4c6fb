"""READMEs and docs are true: links, paths, commands, make targets, configs and tables in them."""

import re
import shlex
import tomllib
from dataclasses import is_dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args, get_type_hints

import click
import pytest
import yaml

import alibi_lm
from alibi_lm.cli.main import main
from alibi_lm.config import Config
from alibi_lm.config_loading import build
from alibi_lm.evals.suite import suite_class
from alibi_lm.train.checkpointing.resume import RESUME_MAY_CHANGE

REPOSITORY = Path(__file__).parents[2]
SCRIPT_FOLDERS = ("launch", "data", "evals", "configs")
README = REPOSITORY / "README.md"
PAGES = sorted((REPOSITORY / "docs").glob("*.md"))
READMES = sorted(
    [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("*/README.md"), *REPOSITORY.glob("*/*/README.md")]
)
TEXTS = sorted({*READMES, *PAGES})
CONFIGS = sorted((REPOSITORY / "configs").rglob("*.yaml"))
HISTORY = REPOSITORY / "CHANGELOG.md"
"""It names commands and paths that are gone."""
GENERATED = REPOSITORY / "docs/configuration.md"
"""By `make reference`; another test compares it with the settings, of all kinds of files."""


def name_of(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def code_of(text: str) -> str:
    """Everything of a page that is code: fenced and indented blocks, and spans."""
    blocks = re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL)
    rest = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    blocks += re.findall(r"^ {4}.*$", rest, re.MULTILINE)
    return "\n".join([*blocks, *re.findall(r"`([^`\n]+)`", rest)])


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", TEXTS, ids=name_of)
def test_links_and_paths_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked.read_text(encoding="utf-8")), target
    if page == HISTORY:
        return
    folders = "|".join(("alibi_lm", "tests", "docs", *SCRIPT_FOLDERS))
    for path in re.findall(rf"(?<![\w./-])(?:{folders})/[\w./-]+\.\w+\b", code_of(text)):
        if "NAME" not in path:
            assert (REPOSITORY / path).exists(), path


@pytest.mark.parametrize("page", TEXTS, ids=name_of)
def test_make_targets_exist(page: Path) -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][\w-]*):", makefile, re.MULTILINE))
    named = re.findall(r"\bmake ([a-z][\w-]*)", code_of(page.read_text(encoding="utf-8")))
    assert set(named) <= targets


def command_of(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that the words of a command line name, and the words after it."""
    command: click.Command = main
    while isinstance(command, click.Group) and words and re.fullmatch(r"[a-z][a-z-]*", words[0]):
        found = command.get_command(click.Context(command), words[0])
        assert found is not None, words
        command, words = found, words[1:]
    return command, words


@pytest.mark.parametrize("page", [page for page in TEXTS if page != HISTORY], ids=name_of)
def test_commands_and_their_options_exist(page: Path) -> None:
    code = code_of(page.read_text(encoding="utf-8")).replace("\\\n", " ")
    for line in re.findall(r"^\s*alibi-lm (.+)$", code, re.MULTILINE):
        words = [word.strip("[]") for word in shlex.split(line, comments=True)]
        command, rest = command_of(words)
        options = {name for parameter in command.params for name in parameter.opts}
        options |= {name for parameter in command.params for name in parameter.secondary_opts}
        options |= {"--help", "-h"}
        assert {word for word in rest if re.match(r"-{1,2}[a-z]", word)} <= options, line


def has_key(section: Any, names: list[str]) -> bool:
    """Whether a section of a config, or a section in it, has the key."""
    hints = get_type_hints(section)
    if names[0] not in hints:
        return False
    inner = [kind for kind in (hints[names[0]], *get_args(hints[names[0]])) if is_dataclass(kind)]
    return len(names) == 1 or not inner or any(has_key(kind, names[1:]) for kind in inner)


@pytest.mark.parametrize(
    "page", [page for page in TEXTS if page not in (HISTORY, GENERATED)], ids=name_of
)
def test_settings_exist(page: Path) -> None:
    """Keys that stand alone in a code span, and those before a = in a command."""
    code = code_of(page.read_text(encoding="utf-8"))
    sections = "|".join({*get_type_hints(Config), *get_type_hints(suite_class())} - {"deepspeed"})
    pattern = rf"(?:^|[\s\"'])((?:{sections})(?:\.[a-z_0-9]+)+)(?==|$)"
    for key in re.findall(pattern, code, re.MULTILINE):
        names = key.split(".")
        if names[-1] not in ("json", "yaml", "png", "log", "py"):
            assert has_key(Config, names) or has_key(suite_class(), names), key


def test_the_checkpoints_page_lists_what_may_change_on_resume() -> None:
    text = (REPOSITORY / "docs/checkpoints.md").read_text(encoding="utf-8")
    listed = text.partition("**What may change**")[2].partition("Token files")[0]
    assert set(re.findall(r"`([\w.]+)`", listed)) == set(RESUME_MAY_CHANGE)


@pytest.mark.parametrize("page", ["getting-started.md", "own-corpus.md"])
def test_configs_in_the_docs_are_configs(page: str) -> None:
    text = (REPOSITORY / "docs" / page).read_text(encoding="utf-8")
    (block,) = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    build(Config, yaml.safe_load(block))


def test_the_configs_readme_lists_every_config() -> None:
    text = (REPOSITORY / "configs/README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([\w.-]+\.yaml)` \|", text, re.MULTILINE)
    assert sorted(listed) == [path.name for path in CONFIGS]


def test_the_claims_page_shows_the_claims_as_they_were_found() -> None:
    results = REPOSITORY / "evals" / "results" / "claims"
    page = (REPOSITORY / "docs/claims.md").read_text(encoding="utf-8")
    table = (results / "claims.md").read_text(encoding="utf-8")
    assert f"<!-- claims -->\n{table}<!-- /claims -->" in page
    shown = REPOSITORY / "docs" / "images" / "perplexity.png"
    assert shown.read_bytes() == (results / "perplexity.png").read_bytes()


def test_modules_in_the_changelog_are_where_it_says() -> None:
    moved = HISTORY.read_text(encoding="utf-8").partition("### Moved")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `[\w.]+` \| `([\w.]+)`", moved, re.MULTILINE)
    assert rows
    for name in rows:
        path = REPOSITORY / "alibi_lm" / name.replace(".", "/")
        assert path.with_suffix(".py").exists() or path.is_dir(), name


def test_the_readme_is_short_and_names_every_page() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    linked = set(re.findall(r"\]\(docs/([\w-]+\.md)\)", text))
    assert linked == {page.name for page in PAGES} - {"README.md"}


def test_the_version_is_said_once() -> None:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" not in settings["project"]
    assert settings["tool"]["setuptools"]["dynamic"]["version"]["attr"] == "alibi_lm.__version__"
    assert version("alibi_lm") == alibi_lm.__version__


def test_pre_commit_runs_what_make_check_runs() -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    checks = re.search(r"^check: (.+)$", makefile, re.MULTILINE)
    settings = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    (repository,) = settings["repos"]
    assert checks
    assert [hook["entry"] for hook in repository["hooks"]] == [
        f"make {name}" for name in checks[1].split()
    ]


def test_continuous_integration_runs_the_script_for_it() -> None:
    path = REPOSITORY / ".github" / "workflows" / "ci.yml"
    (job,) = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values()
    assert job["steps"][-1] == {"run": ".ci/run"}
    script = (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8")
    assert script.endswith("make check\nmake test\n")
