"""Text from a run's model."""

from __future__ import annotations

from pathlib import Path

import click

from alibi_lm.commands.arguments import RUN
from alibi_lm.console import console


@click.command()
@RUN
@click.option("--prompt", "-p", required=True, help="Text to go on from.")
@click.option(
    "--max-new-tokens",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    help="Tokens to add at most.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(0),
    default=0.0,
    show_default=True,
    help="0 takes the likeliest token.",
)
@click.option("--top-k", type=click.IntRange(1), help="Sample from the k likeliest tokens.")
@click.option(
    "--top-p",
    type=click.FloatRange(0, 1, min_open=True),
    help="Sample from the likeliest tokens of this total share.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of the sampling.")
def generate(
    run: Path,
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
) -> None:
    """Let RUN's model go on from a prompt."""
    from alibi_lm.checkpoint.step import open_run
    from alibi_lm.errors import CheckpointError, Problem
    from alibi_lm.model.generation import generate as run_generate

    step = open_run(run)
    tokenizer = step.tokenizer()
    if tokenizer is None:
        rule = "has no tokenizer"
        raise CheckpointError(
            Problem(str(step.folder), None, rule, "train with data.tokenizer set")
        )
    ids = tokenizer.encode(prompt) or [tokenizer.eos_id]
    tokens = run_generate(
        step.decoder(),
        [ids],
        max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        eos_id=tokenizer.eos_id,
    )
    console.say(prompt + tokenizer.decode([t for t in tokens[0] if t != tokenizer.eos_id]))
