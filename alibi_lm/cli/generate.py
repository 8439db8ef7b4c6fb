"""`alibi-lm generate`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from alibi_lm.cli.arguments import DEVICE, RUN, FiniteRange
from alibi_lm.utils.errors import ConfigError, DataError, Problem
from alibi_lm.utils.logging import console

_ASCII = ("ascii", "us-ascii", "646", "ansi_x3.4-1968")


@click.command()
@RUN
@click.option(
    "--prompt",
    "-p",
    "prompts",
    multiple=True,
    help="Text to continue; can be repeated. `-` reads standard input, one prompt a line; without "
    "this option all of standard input is one prompt.",
)
@click.option("--max-new-tokens", type=click.IntRange(1), default=64, help="Most tokens to add.")
@click.option(
    "--temperature", type=FiniteRange(0), default=0.0, help="0 takes the likeliest token."
)
@click.option(
    "--top-k",
    type=click.IntRange(1),
    help="Sample from the k likeliest tokens; with --temperature.",
)
@click.option(
    "--top-p",
    type=FiniteRange(0, 1, min_open=True),
    help="Sample from the likeliest tokens of this total probability; with --temperature.",
)
@DEVICE
@click.option("--seed", default=0, help="Seed of the sampling.")
@click.option("--stop", "stops", multiple=True, help="Stop before this text; can be repeated.")
@click.option(
    "--stream/--no-stream",
    default=None,
    help="Write text as it is generated.  [default: for one prompt on a terminal]",
)
@click.option(
    "--pruning-tolerance",
    type=FiniteRange(0, 1, max_open=True),
    default=1e-6,
    help="Attention weight that each head may skip in a row, beyond 2,048 tokens; 0 is dense.",
)
def generate(
    run: Path,
    prompts: Sequence[str],
    stops: Sequence[str],
    stream: bool | None,
    device: str | None,
    **options: Any,
) -> None:
    """Continue prompts with RUN's model.

    Several prompts are continued in one batch, independently of each other, and each text is
    printed under a line `==> prompt N <==`.
    """
    texts = _texts(prompts)
    options["stop"] = [_argument("--stop", stop) for stop in stops]
    _check(len(texts), stream, options)
    # Imported here: torch takes seconds.
    from alibi_lm.loaded_run import load_run

    loaded = load_run(run, device=device)
    if stream is None:
        stream = len(texts) == 1 and sys.stdout.isatty()
    if stream:
        console.write(texts[0])
        for piece in loaded.stream(texts[0], **options):
            console.write(piece)
        console.write("\n")
        return
    continuations = loaded.generate(texts, **options)
    for number, (text, more) in enumerate(zip(texts, continuations, strict=True), 1):
        if len(texts) > 1:
            console.info(f"==> prompt {number} <==")
        console.info(text + more)


def _check(num_prompts: int, stream: bool | None, options: dict[str, Any]) -> None:
    """Refuse combinations of options that contradict each other."""
    problems = []
    if "" in options["stop"]:
        problems.append(Problem("--stop", "", "is empty", "give a text, or leave it out"))
    if stream and num_prompts > 1:
        rule = f"streams a single prompt, and there are {num_prompts}"
        problems.append(Problem("--stream", None, rule, "leave it out"))
    for key in ("top_k", "top_p"):
        if options[key] is not None and options["temperature"] == 0:
            flag = "--" + key.replace("_", "-")
            rule = "has no effect: --temperature 0 takes the likeliest token"
            problems.append(Problem(flag, options[key], rule, "set --temperature, or leave it out"))
    if problems:
        raise ConfigError(*problems)


def _texts(prompts: Sequence[str]) -> list[str]:
    if not prompts:
        return [_standard_input().removesuffix("\n")]
    texts: list[str] = []
    for prompt in prompts:
        texts += _lines() if prompt == "-" else [_argument("--prompt", prompt)]
    return texts


def _lines() -> list[str]:
    # No str.splitlines: it also splits at form feeds and other characters of a text.
    text = _standard_input().removesuffix("\n")
    return text.split("\n") if text else []


def _standard_input() -> str:
    """All of standard input, as UTF-8 or as what PYTHONIOENCODING or the locale declares."""
    if sys.stdin is None:
        return ""
    # An ASCII locale says only that nobody has set one.
    encoding = "utf-8" if sys.stdin.encoding.lower() in _ASCII else sys.stdin.encoding
    text = _decoded("standard input", sys.stdin.buffer.read(), encoding)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _argument(option: str, text: str) -> str:
    """The text of an option, which Python decodes by the locale: bytes it cannot are UTF-8."""
    if not any("\udc80" <= character <= "\udcff" for character in text):
        return text
    return _decoded(option, os.fsencode(text), "utf-8")


def _decoded(source: str, raw: bytes, encoding: str) -> str:
    """Decode bytes strictly.

    Raises:
        DataError: names the source, its encoding and the first wrong byte.
    """
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError as error:
        rule = f"is not {encoding.upper()}: byte 0x{raw[error.start]:02x} at offset {error.start}"
        fix = "convert it to UTF-8, for example with iconv"
        raise DataError(Problem(source, None, rule, fix)) from None
