"""Paths and texts are UTF-8 in a locale that is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

LATIN = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


def test_accents_survive_a_locale_without_them(tmp_path: Path) -> None:
    folder = tmp_path / "textés"
    folder.mkdir()
    for index in range(40):
        (folder / f"é{index}.txt").write_text(f"text number {index} with words enough\n" * 9)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"output: {tmp_path}/outé\nsources: [{{name: a, path: {folder}}}]\n"
        "tokenizer: {vocab_size: 290}\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "alibi_lm", "prepare", str(recipe), "num_workers=2"]
    result = subprocess.run(
        command, env={**os.environ, **LATIN}, capture_output=True, check=False, timeout=300
    )
    assert result.returncode == 0, result.stderr.decode()
    assert (tmp_path / "outé" / "manifest.json").is_file()
    missing = [*command[:4], str(tmp_path / "né.yaml")]
    result = subprocess.run(
        missing, env={**os.environ, **LATIN}, capture_output=True, check=False, timeout=300
    )
    assert result.returncode == 2
    assert "né.yaml" in result.stderr.decode("utf-8")
    assert result.stderr.count(b"\n") == 1
