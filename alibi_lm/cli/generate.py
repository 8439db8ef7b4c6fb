"""Text from a run's model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from alibi_lm.cli.arguments import RUN, FiniteRange
from alibi_lm.utils.logging import console


@click.command()
@RUN
@click.option("--prompt", "-p", "prompts", multiple=True,
              help="Text to go on from; may be given several times. `-` reads standard input, "
              "a prompt a line; without any, all of standard input is one prompt.")  # fmt: skip
@click.option("--max-new-tokens", type=click.IntRange(1), default=64, show_default=True,
              help="Tokens to add at most.")  # fmt: skip
@click.option("--temperature", type=FiniteRange(0), default=0.0, show_default=True,
              help="0 takes the likeliest token.")  # fmt: skip
@click.option("--top-k", type=click.IntRange(1),
              help="Sample from the k likeliest tokens; with --temperature.")  # fmt: skip
@click.option("--top-p", type=FiniteRange(0, 1, min_open=True),
              help="Sample from the likeliest tokens of this total share; with "
              "--temperature.")  # fmt: skip
@click.option("--seed", default=0, show_default=True, help="Seed of the sampling.")
@click.option("--stop", "stops", multiple=True,
              help="End before this text; may be given several times.")  # fmt: skip
@click.option("--stream/--no-stream", default=None,
              help="Write text as it comes; by default on a terminal, for one prompt.")  # fmt: skip
@click.option(
    "--pruning-tolerance",
    "pruning_tolerance",
    type=FiniteRange(0, 1, max_open=True),
    default=1e-6,
    show_default=True,
    help="What each head may leave out of a row, beyond 2,048 tokens; 0 is dense.",
)
def generate(
    run: Path,
    prompts: Sequence[str],
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    stops: Sequence[str],
    stream: bool | None,
    pruning_tolerance: float,
) -> None:
    """Let RUN's model go on from prompts.

    Several prompts are continued together; what comes after one does not depend on the others.
    """
    from alibi_lm.loaded_run import load_run
    from alibi_lm.utils.errors import ConfigError, Problem

    texts = _texts(prompts)
    if any(not stop for stop in stops):
        raise ConfigError(Problem("--stop", "", "is empty", "give a text, or leave it out"))
    if stream and len(texts) > 1:
        rule = f"writes one text as it comes, and there are {len(texts)} prompts"
        raise ConfigError(Problem("--stream", None, rule, "leave it out"))
    given = {"--top-k": top_k, "--top-p": top_p}
    unused = [
        Problem(key, value, "says from which tokens to sample, and --temperature 0 takes the "
                            "likeliest one", "give --temperature too, or leave it out")
        for key, value in given.items() if value is not None and temperature == 0
    ]  # fmt: skip
    if unused:
        raise ConfigError(*unused)
    loaded = load_run(run)
    if stream is None:
        stream = len(texts) == 1 and sys.stdout.isatty()
    if stream:
        console.write(texts[0])
        for piece in loaded.stream(
            texts[0],
            max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop=stops,
            pruning_tolerance=pruning_tolerance,
        ):
            console.write(piece)
        console.write("\n")
        return
    continued = loaded.generate(
        texts,
        max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=stops,
        pruning_tolerance=pruning_tolerance,
    )
    for text, more in zip(texts, continued, strict=True):
        console.info(text + more)


def _texts(prompts: Sequence[str]) -> list[str]:
    texts: list[str] = []
    for prompt in prompts:
        texts += _lines() if prompt == "-" else [prompt]
    return texts if prompts else [_standard_input().removesuffix("\n")]


def _lines() -> list[str]:
    # No str.splitlines: it also cuts at form feeds and other characters of a text.
    text = _standard_input().removesuffix("\n")
    return text.split("\n") if text else []


def _standard_input() -> str:
    from alibi_lm.utils.errors import DataError, Problem

    try:
        return "" if sys.stdin is None else sys.stdin.read()
    except UnicodeDecodeError as error:
        rule = f"cannot be read as text ({error})"
        raise DataError(Problem("standard input", None, rule, "give UTF-8")) from None
