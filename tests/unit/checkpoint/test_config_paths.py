"""Corpora of a run are found from any folder, and after the run moved together with its data."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from alibi_lm.checkpoint.config_paths import CONFIG_FOLDERS, find_corpus, validation_corpora
from alibi_lm.checkpoint.convert import convert
from alibi_lm.checkpoint.folder import write_meta
from alibi_lm.checkpoint.step import open_checkpoint
from alibi_lm.cli.main import main
from alibi_lm.data.manifest import MANIFEST
from alibi_lm.hf.exporting.exporter import export
from alibi_lm.utils.errors import DataError
from tests.unit.hf.small_step import LINES, add_tokenizer, add_validation, write_step

PREFIX = "prepared/validation"
TRAINED = "prepared/code_train"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run and its data under relative paths; the current folder is another."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    checkpoint = write_step(
        Path("runs/a"), {"num_heads": 4}, validation=[PREFIX], corpora=[{"prefix": TRAINED}]
    )
    add_tokenizer(checkpoint, tmp_path)
    add_validation(checkpoint, Path(PREFIX), ["".join(LINES * 20), "".join(LINES * 30)])
    add_validation(checkpoint, Path(TRAINED), ["".join(LINES * 20)])
    manifest = {
        "recipe": {"sources": [{"name": "code", "path": "hub/some-code"}]},
        "tokenizer": {},
        "files": {"code_train.bin": {}},
    }
    Path("prepared", MANIFEST).write_text(json.dumps(manifest))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return folder


def evaluate(run: Path, *settings: str) -> Result:
    sizes = ["perplexity.lengths=[12,24]", "perplexity.truncated_context_targets=null"]
    return CliRunner().invoke(main, ["eval", "perplexity", str(run), *sizes, *settings])


def losses(run: Path) -> list[object]:
    """The measured numbers, and the corpus by its content."""
    result = json.loads((run / "evals/step_00000007/perplexity.json").read_text())
    return [result["inputs"]["corpora"], result["rows"]]


def strip_record(run: Path) -> None:
    """As older versions wrote it."""
    checkpoint = open_checkpoint(run, check=False)
    write_meta(checkpoint.folder, {k: v for k, v in checkpoint.meta.items() if k != CONFIG_FOLDERS})


def test_an_eval_gives_the_same_result_from_any_folder(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = project / "runs/a"
    done = evaluate(run)
    assert done.exit_code == 0, done.output
    elsewhere = losses(run)
    shutil.rmtree(run / "evals")
    monkeypatch.chdir(project)
    assert evaluate(Path("runs/a")).exit_code == 0
    assert losses(run) == elsewhere
    assert validation_corpora(open_checkpoint("runs/a")) == [PREFIX], "as the user wrote it"
    done = evaluate(run.resolve())
    assert "done before with the same settings" in done.output


def test_a_run_that_moved_with_its_data_reads_the_moved_data(project: Path, tmp_path: Path) -> None:
    copy = tmp_path / "deep" / "copy"
    shutil.copytree(project, copy)
    assert validation_corpora(open_checkpoint(copy / "runs/a")) == [str(copy / PREFIX)]
    shutil.rmtree(project)
    assert evaluate(copy / "runs/a").exit_code == 0
    alone = tmp_path / "alone"
    shutil.copytree(copy / "runs/a", alone)
    assert evaluate(alone).exit_code != 0
    shutil.copytree(copy, project)
    assert validation_corpora(open_checkpoint(alone)) == [str(project / PREFIX)]
    assert evaluate(alone).exit_code == 0, "by the absolute path"


@pytest.mark.parametrize("out", ["step", "b/checkpoints/step_00000007"])
def test_a_converted_step_finds_them_also_after_a_move(
    out: str, project: Path, tmp_path: Path
) -> None:
    (project / out).parent.mkdir(parents=True, exist_ok=True)
    convert(project / "runs/a", project / out)
    assert validation_corpora(open_checkpoint(project / out)) == [str(project / PREFIX)]
    moved = tmp_path / "moved"
    os.rename(project, moved)
    assert validation_corpora(open_checkpoint(moved / out)) == [str(moved / PREFIX)]


def test_corpora_not_found_are_named_with_every_place(project: Path, tmp_path: Path) -> None:
    moved, here = tmp_path / "moved", tmp_path / "elsewhere"
    (project / "prepared").rename(tmp_path / "data")
    os.rename(project, moved)
    done = evaluate(moved / "runs/a")
    places = ", ".join(f"{folder / PREFIX}.idx" for folder in (moved, project, here))
    message = (
        f"data.validation.0 = {PREFIX}: no such token files (looked for {places}); "
        "give corpus=PREFIX (token files without .bin) or text=FILES\n"
    )
    assert done.exit_code == 2
    assert done.output.endswith(message)
    for key in ("corpus", "perplexity.corpus"):
        done = evaluate(moved / "runs/a", f"{key}=nowhere/v")
        assert f"{key} = nowhere/v: no such token files" in done.output
        assert f"(looked for {here}/nowhere/v.idx); check the prefix" in done.output
        assert "leave out the ending" in evaluate(moved / "runs/a", f"{key}=v.bin").output
    assert evaluate(moved / "runs/a", f"corpus={tmp_path}/data/validation").exit_code == 0


def test_runs_of_older_versions_look_in_the_current_folder(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = project / "runs/a"
    strip_record(run)
    with pytest.raises(DataError, match=r"no such token files \(looked for [^,]*elsewhere/"):
        find_corpus(open_checkpoint(run), "data.validation.0", PREFIX, "put it back")
    monkeypatch.chdir(project)
    assert validation_corpora(open_checkpoint(run)) == [PREFIX]


def test_an_export_checks_the_run_s_text_from_any_folder(project: Path, tmp_path: Path) -> None:
    export(open_checkpoint(project / "runs/a"), tmp_path / "hf")
    manifest = json.loads((tmp_path / "hf/alibi_lm_export.json").read_text())
    assert f"validation text of {PREFIX}" in json.dumps(manifest["parity"])
    assert "hub/some-code" in (tmp_path / "hf/README.md").read_text()
    for path in (tmp_path / "hf").glob("*.*"):
        assert str(project).encode() not in path.read_bytes(), f"a local path in {path}"
