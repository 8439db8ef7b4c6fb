"""What a training step costs: benchmarks beside other implementations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from alibi_lm.commands.bench_parts import JSON, REPEATS


@click.command()
@click.option("--size", type=click.Choice(["4m", "125m"]), default="4m", show_default=True)
@click.option("--sequence-length", type=click.IntRange(16), default=512, show_default=True)
@click.option("--num-tokens", type=click.IntRange(16), default=4096, show_default=True,
              help="Tokens of a step.")  # fmt: skip
@click.option("--model", "names", multiple=True, default=("alibi", "none", "mpt", "bloom"),
              show_default=True, help="A model; the first is what the others are compared with.",
              type=click.Choice(["alibi", "none", "sinusoidal", "rotary", "t5", "mpt", "bloom",
                                 "x-transformers"]))  # fmt: skip
@REPEATS
@JSON
def train(
    size: str,
    sequence_length: int,
    num_tokens: int,
    names: Sequence[str],
    repeats: int,
    path: Path | None,
) -> None:
    """Training steps of this project's model and of others of its size, in turns.

    mpt and bloom are transformers' own classes; x-transformers is its decoder with
    alibi_pos_bias, if that package is installed.
    """
    from alibi_lm.bench.train import TrainBenchmark, benchmark_train

    benchmark_train(TrainBenchmark(size, sequence_length, num_tokens, names, repeats), path)
