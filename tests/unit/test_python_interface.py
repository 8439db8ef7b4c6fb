"""The Python interface, its page of examples, and text generation from the command line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import alibi_lm
from alibi_lm import load_run
from alibi_lm.cli.main import main
from alibi_lm.loaded_run import Run, _certain
from tests.unit.hf.small_step import add_tokenizer, add_validation, write_step
from tests.unit.terminal import COMMAND, on_terminal

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    step = write_step(folder / "runs/demo", {"num_heads": 12})
    add_tokenizer(step, folder)
    add_validation(step, folder / "prepared/demo/stdlib_validation", ["def f(x):\n", "class A:\n"])
    return folder


@pytest.fixture(scope="module")
def run(place: Path) -> Run:
    return load_run(place / "runs/demo")


def test_the_examples_of_the_page_run(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 9
    exec(compile("\n".join(blocks), str(PAGE), "exec"), {})


def test_the_package_itself_imports_no_torch() -> None:
    script = "import sys, alibi_lm, alibi_lm.cli.main; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
    for name in alibi_lm.__all__:
        assert getattr(alibi_lm, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = alibi_lm.nothing


def test_the_interface_is_listed_and_a_run_is_shown_on_one_line(place: Path, run: Run) -> None:
    assert {"Decoder", "ModelConfig", "Run", "load_corpus", "load_run"} <= set(dir(alibi_lm))
    assert repr(run) == f"Run('{run.checkpoint.folder}', torch.float32)"


def test_streamed_batched_and_alone_are_the_same(run: Run) -> None:
    prompts = ["def f(x):", "class", "", "\tfor \U0001f600"]
    for settings in ({}, {"temperature": 1.0, "seed": 3}):
        together = run.generate(prompts, 40, **settings)  # type: ignore[arg-type]
        alone = [run.generate([prompt], 40, **settings)[0] for prompt in prompts]  # type: ignore[arg-type]
        streamed = ["".join(run.stream(p, 40, **settings)) for p in prompts]  # type: ignore[arg-type]
        assert streamed == alone
        # A row draws from its own generator, made from its index.
        assert together == alone if not settings else together[0] == alone[0]


def test_stop_texts(run: Run) -> None:
    (whole,) = run.generate(["def f(x):"], 40)
    assert len(whole) > 12
    stop = whole[6:9]
    (cut,) = run.generate(["def f(x):"], 40, stop=[stop, "never there"])
    assert cut == whole[: whole.index(stop)]
    assert "".join(run.stream("def f(x):", 40, stop=[stop, "never there"])) == cut
    assert _certain("abcab", ["abd"]) == 3
    assert _certain("ab\ufffd", []) == 2


def test_generate_command(place: Path, run: Run) -> None:
    def output(*arguments: str, given: str | None = None, code: int = 0) -> str:
        line = ["generate", str(place / "runs/demo"), "--max-new-tokens", "9", *arguments]
        done = CliRunner().invoke(main, line, input=given)
        assert done.exit_code == code, done.output
        return done.output

    first, second = (text + run.generate([text], 9)[0] + "\n" for text in ("def f", "class A"))
    both = f"==> prompt 1 <==\n{first}==> prompt 2 <==\n{second}"
    assert output("-p", "def f", "-p", "class A") == both
    assert output("-p", "-", given="def f\nclass A\n") == both
    assert output(given="def f\n") == first
    assert output("-p", "def f", "--stream") == first
    assert "streams a single prompt, and there are 2" in output(
        "-p", "a", "-p", "b", "--stream", code=2
    )
    refused = output("-p", "a", "--top-k", "3", "--top-p", "0.5", code=2)
    assert "--top-k = 3: has no effect: --temperature 0" in refused
    assert "--top-p = 0.5: has no effect: --temperature 0" in refused
    assert "is empty" in output("-p", "a", "--stop", "", code=2)


def test_on_a_terminal_and_in_a_pipe(place: Path) -> None:
    line = ["generate", str(place / "runs/demo"), "-p", "def f", "--max-new-tokens", "9"]
    piped = subprocess.run([*COMMAND, *line], capture_output=True, check=True)
    assert on_terminal(line) == (0, piped.stdout.decode())
    assert piped.stderr == b""
