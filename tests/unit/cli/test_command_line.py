"""The habits of the command: help at every level, completion, versions, terminals and pipes."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from alibi_lm import __version__
from alibi_lm.cli.main import main
from alibi_lm.utils import errors
from tests.unit.hf.small_step import add_tokenizer, write_step
from tests.unit.terminal import COMMAND, on_terminal

REPOSITORY = Path(__file__).parents[3]


def levels(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every command and group."""
    yield path
    for name, child in getattr(command, "commands", {}).items():
        yield from levels(child, (*path, name))


def command_at(path: tuple[str, ...]) -> click.Command:
    command: click.Command = main
    for name in path:
        assert isinstance(command, click.Group)
        command = command.commands[name]
    return command


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("command") / "run"
    write_step(folder, {"num_heads": 8})
    return folder


@pytest.mark.parametrize("path", list(levels(main)), ids=lambda path: " ".join(path) or "alibi-lm")
def test_help_reads_well_at_every_level(path: tuple[str, ...]) -> None:
    runner = CliRunner()
    long = runner.invoke(main, [*path, "--help"], prog_name="alibi-lm")
    assert long.exit_code == 0
    assert long.output == runner.invoke(main, [*path, "-h"], prog_name="alibi-lm").output
    lines = long.output.splitlines()
    assert lines[0].startswith(" ".join(["Usage: alibi-lm", *path]))
    assert max(map(len, lines)) <= 80
    command = command_at(path)
    assert command.help, "it says what it does"
    assert command.get_short_help_str(limit=1000).endswith("."), "in a sentence"
    if isinstance(command, click.Group):
        for name, child in command.commands.items():
            assert child.help
            sentence = child.get_short_help_str(limit=1000)
            assert f"{name} {sentence}" in " ".join(long.output.split()), "whole sentences"
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden:
            assert option.help, f"{option.name} has no help"


def test_versions() -> None:
    wanted = f"alibi-lm, version {__version__}\n"
    assert CliRunner().invoke(main, ["--version"]).output == wanted
    module = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, check=True)
    assert (module.stdout, module.stderr) == (wanted, "")


def test_exit_codes_are_documented() -> None:
    codes = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert codes == {2, 3, 4, 5, 130}
    listed = (
        CliRunner().invoke(main, ["--help"]).output.split("Exit codes:")[1].split("Options:")[0]
    )
    assert {int(code) for code in re.findall(r"\b\d+\b", listed)} == codes | {0}
    table = (REPOSITORY / "docs/faults.md").read_text().split("## Exit codes")[1].split("\n\n")[1]
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)} == codes | {0}


@pytest.mark.skipif(sys.platform == "win32", reason="bash")
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["ex"], ["export"]),
        (["checkpoint", ""], ["convert", "list", "verify"]),
        (["export", "--par"], ["--parity"]),
        (["export", "--precision", "f"], ["fp16", "fp32"]),
        (["eval", "perp"], ["perplexity"]),
    ],
    ids=" ".join,
)
def test_bash_completes(typed: list[str], offered: list[str], tmp_path: Path) -> None:
    command = tmp_path / "alibi-lm"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m alibi_lm "$@"\n')
    command.chmod(0o755)
    words = " ".join(f"'{word}'" for word in ["alibi-lm", *typed])
    # What a user puts into ~/.bashrc, then what bash does at a press of the tab key.
    script = f"""
        set -e
        eval "$(_ALIBI_LM_COMPLETE=bash_source alibi-lm)"
        function=$(complete -p alibi-lm | sed -E 's/.* -F ([^ ]+) .*/\\1/')
        COMP_WORDS=({words}) COMP_CWORD={len(typed)}
        "$function" alibi-lm
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(["bash", "--norc", "-c", script], env=os.environ | {"PATH": path},
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == offered


def test_an_error_is_red_on_a_terminal_alone() -> None:
    line = ["generate", "nowhere", "-p", "a"]
    plain = "error: nowhere: no such folder; check the path\n"
    piped = subprocess.run([*COMMAND, *line], capture_output=True, text=True, check=False)
    assert (piped.returncode, piped.stdout, piped.stderr) == (2, "", plain)
    assert on_terminal(line) == (2, plain.replace("error:", "\x1b[31merror:\x1b[0m"))
    assert on_terminal(line, NO_COLOR="1") == (2, plain)
    assert on_terminal(line, NO_COLOR="")[1] != plain, "an empty NO_COLOR counts for nothing"
    assert on_terminal(line, TERM="dumb") == (2, plain)


def test_a_bar_on_a_terminal_and_one_line_in_a_pipe(run: Path, tmp_path: Path) -> None:
    def line(name: str) -> list[str]:
        return ["export", str(run), str(tmp_path / name), "--parity", "blockwise"]

    piped = subprocess.run([*COMMAND, *line("a")], capture_output=True, text=True, check=True)
    assert piped.stderr == ""
    assert re.fullmatch(r"export .*: MptForCausalLM, fp32; logits within .*\n", piped.stdout)
    code, shown = on_terminal(line("b"))
    assert code == 0
    bars = ["check the checkpoint", "digest of the weights", "write", "read back",
            "compare 24 tokens", "compare 96 tokens", "generate 4 tokens", "hash"]  # fmt: skip
    places = [shown.index(f"\r{bar}:") for bar in bars]
    assert places == sorted(places), "each part of the work has a bar"
    # A bar is wiped before a line is written: what stays on the screen is what the pipe has.
    kept = [part.split("\r")[-1] for part in shown.split("\n")]
    assert "\n".join(kept) == piped.stdout.replace(str(tmp_path / "a"), str(tmp_path / "b"))


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (command, option)
        for command in levels(main)
        for option in command_at(command).params
        if isinstance(option.type, click.types.FloatParamType)
    ],
    ids=lambda part: " ".join(part) if isinstance(part, tuple) else part.name,
)
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_number_that_is_none_is_refused(
    command: tuple[str, ...], option: click.Parameter, value: str
) -> None:
    needed = ["here" for each in command_at(command).params if isinstance(each, click.Argument)]
    done = CliRunner().invoke(main, [*command, *needed, option.opts[0], value])
    assert done.exit_code == 2
    assert f"invalid value for '{option.opts[0]}'" in done.output


def test_prompts_are_the_lines_of_standard_input(tmp_path: Path) -> None:
    add_tokenizer(write_step(tmp_path / "run", {"num_heads": 8}), tmp_path)
    line = [*COMMAND, "generate", str(tmp_path / "run"), "--max-new-tokens", "1"]
    environment = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}

    def given(content: bytes, *more: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run([*line, *more], input=content, env=environment, capture_output=True,
                              check=False)  # fmt: skip

    text = "a\x0cb\u2028c d"
    lines = given(text.encode() + b"\n\n", "-p", "-").stdout.decode().split("\n")
    headings = [line for line in lines if line.startswith("==>")]
    assert headings == ["==> prompt 1 <==", "==> prompt 2 <=="], "a form feed ends no prompt"
    assert lines[1].startswith(text)
    assert given(b"", "-p", "-").stdout == b""
    wrong = given(b"a\xff")
    assert (wrong.returncode, wrong.stdout) == (2, b"")
    assert wrong.stderr == (
        b"error: standard input: is not UTF-8: byte 0xff at offset 1; convert it to UTF-8, for "
        b"example with iconv\n"
    )
    latin = environment | {"PYTHONIOENCODING": "latin-1"}
    declared = subprocess.run(line, input=b"\xfc", env=latin, capture_output=True, check=True)
    assert declared.stdout.startswith(b"\xfc"), "the declared encoding is used"
    environment["PYTHONIOENCODING"] = "ascii"
    shown = given(b"", "-p", "\u00fc")
    assert (shown.returncode, shown.stdout[:4]) == (0, b"\\xfc"), "what a terminal lacks is spelt"
    script = f"exec {shlex.join(line)} <&-"
    assert subprocess.run(["sh", "-c", script], capture_output=True, check=False).returncode == 0


def test_a_prompt_is_utf_8_in_every_locale(tmp_path: Path) -> None:
    add_tokenizer(write_step(tmp_path / "run", {"num_heads": 8}), tmp_path)
    line = [*COMMAND, "generate", str(tmp_path / "run"), "--max-new-tokens", "1", "-p"]
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    prompt = "\u00fc".encode()
    done = subprocess.run([*line, prompt], env=os.environ | plain, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(prompt), "Python is restarted in its UTF-8 mode"
    piped = subprocess.run(
        line[:-1], input=prompt, env=os.environ | plain, capture_output=True, check=False
    )
    assert piped.stdout.startswith(prompt)
    wrong = subprocess.run([*line, b"a\xff"], capture_output=True, check=False)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith(b"error: --prompt: is not UTF-8: byte 0xff at offset 1; ")


@pytest.mark.parametrize("path", list(levels(main)), ids=lambda path: " ".join(path) or "alibi-lm")
def test_a_mistake_in_the_command_line_is_one_line_in_the_commands_name(
    path: tuple[str, ...],
) -> None:
    name = " ".join(["alibi-lm", *path])
    done = CliRunner().invoke(main, [*path, "--dry-rum"])
    assert done.exit_code == 2
    assert done.output.startswith(f"error: {name}: no such option")
    assert "--dry-rum" in done.output
    assert done.output.endswith(f"; see `{name} --help`\n")
    assert done.output.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["trian"], "alibi-lm: no such command 'trian'"),
        (["train"], "alibi-lm train: missing argument 'CONFIG'"),
        (["train", "c.yaml", "--num-ranks", "0"], "alibi-lm train: invalid value for '--num-r"),
        (["plan", "c.yaml"], "alibi-lm plan: missing option '--num-ranks'"),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, list) else "",
)
def test_other_mistakes_in_the_command_line(line: list[str], expected: str) -> None:
    done = CliRunner().invoke(main, line)
    assert done.exit_code == 2
    assert done.output.startswith(f"error: {expected}")
    assert done.output.count("\n") == 1


@pytest.mark.parametrize(
    ("program", "name"),
    [
        (["launch/pretrain.py"], "pretrain.py"),
        (["-m", "alibi_lm.train.entry"], "python -m alibi_lm.train.entry"),
        (["evals/evaluate.py", "perplexity"], "alibi-lm eval perplexity"),
        (["data/prepare.py"], "alibi-lm prepare"),
        (["-m", "alibi_lm", "report"], "alibi-lm report"),
    ],
    ids=lambda part: part[-1] if isinstance(part, list) else "",
)
def test_scripts_and_modules_name_an_unknown_option_on_one_line(
    program: list[str], name: str
) -> None:
    command = [sys.executable, *program, "some.yaml", "--dry-rum"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {name}: ")
    assert "--dry-rum" in done.stderr
    assert done.stderr.count("\n") == 1
    other = [sys.executable, "launch/pretrain.py", "some.yaml", "--dry-rum"]
    environment = os.environ | {"RANK": "1"}
    muted = subprocess.run(other, cwd=REPOSITORY, env=environment, capture_output=True, check=False)
    assert (muted.returncode, muted.stderr) == (2, b""), "rank 0 alone speaks"


WAITING = """
import signal
import time
import alibi_lm.loaded_run

# A job in the background of a shell starts with the signal ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

def load_run(path, **settings):
    print("ready", flush=True)
    time.sleep(600)

alibi_lm.loaded_run.load_run = load_run
from alibi_lm.cli.main import main
main(["generate", "run", "--prompt", "a"])
"""


def test_an_interrupted_command_has_its_code_and_one_line() -> None:
    process = subprocess.Popen([sys.executable, "-c", WAITING], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    output, errors_ = process.communicate(timeout=60)
    assert (process.returncode, output) == (errors.EXIT_INTERRUPTED, b"")
    assert errors_ == b"interrupted\n"
