"""Compiling the kernel: once, and where it cannot be, another one is used and said to be."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from alibi_lm.kernels.amx import build
from alibi_lm.model.attention.dispatch import attention
from tests.unit.kernels.needs_amx import needs_amx

pytestmark = needs_amx


@pytest.fixture
def _anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A machine on which nothing has been compiled."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    build.unavailable_reason.cache_clear()
    yield
    build.unavailable_reason.cache_clear()


def a_compiler(folder: Path, script: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.usefixtures("_anew")
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (None, "no C++ compiler"),
        ("[ $1 = --version ] || { echo old flags >&2; exit 3; }", "does not compile here (old"),
        ("[ $1 = --version ] || exit 3", "does not compile here (exit code 3)"),
        ("exit 0", "cannot be built or loaded"),
    ],
)
def test_without_it_attention_takes_torchs_kernel_and_says_so(
    script: str | None,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    compiler = str(tmp_path / "none") if script is None else a_compiler(tmp_path, script)
    monkeypatch.setattr(cpp_extension, "get_cxx_compiler", lambda: compiler)
    q = torch.randn(1, 8, 128, 16).bfloat16()
    found = attention(q, q, q, slopes=None)
    attention(q, q, q, slopes=None)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("torch's slower kernel") == 1
    assert reason in captured.err
    assert torch.equal(found, attention(q, q, q, slopes=None, kernel="sdpa_cpu"))
    assert not list(tmp_path.rglob("*.so")), "a half-made library is left"


@pytest.mark.usefixtures("_anew")
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_library_cut_short_is_made_again(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaded, it would end the process or stand for the slower kernel ever after."""
    compiler = cpp_extension.get_cxx_compiler()
    source, library = tmp_path / "one.cpp", tmp_path / "one.so"
    source.write_text("int one() { return 1; }\n")
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", library], check=True)
    content = library.read_bytes()
    made: list[Path] = []

    def compiled(_: str, path: Path) -> None:
        made.append(path)
        path.write_bytes(content)

    monkeypatch.setattr(build, "_compile", compiled)
    path = build._library(compiler)
    assert path.is_relative_to(tmp_path / "extensions"), "where torch keeps compiled extensions"
    assert build._library(compiler) == path
    assert len(made) == 1
    path.write_bytes(content[: int(share * len(content))])
    assert build._library(compiler) == path
    assert len(made) == 2
    assert path.read_bytes() == content


@pytest.mark.usefixtures("_anew")
def test_a_change_of_source_is_another_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = cpp_extension.get_cxx_compiler()
    before = build._fingerprint(compiler)
    sources = tmp_path / "sources"
    sources.mkdir()
    for file in build.SOURCES.glob("*.[hc]*"):
        (sources / file.name).write_text(file.read_text() + "\n")
    monkeypatch.setattr(build, "SOURCES", sources)
    assert build._fingerprint(compiler) != before


def test_the_library_brings_no_threads_of_its_own() -> None:
    """A second OpenMP would spin on the cores of the first."""
    assert build.unavailable_reason() is None
    path = build._library(cpp_extension.get_cxx_compiler())
    needed = subprocess.run(["ldd", str(path)], capture_output=True, text=True, check=True).stdout
    assert "libgomp.so.1 " not in needed
