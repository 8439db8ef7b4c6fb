"""What long inputs cost: by horizons and densely."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from alibi_lm.cli.arguments import RUN, FiniteRange


@click.command("long")
@RUN
@click.option("--corpus", help="Prefix of token files; by default the run's first corpus.")
@click.option(
    "--length",
    "lengths",
    type=click.IntRange(4096),
    multiple=True,
    default=(32768, 131072),
    show_default=True,
    help="Length to score; give it several times.",
)
@click.option(
    "--dense-length",
    "dense_lengths",
    type=click.IntRange(0),
    multiple=True,
    default=(4096, 8192, 16384, 131072),
    show_default=True,
    help="Length to score densely too; give it several times, or 0 to leave it out.",
)
@click.option(
    "--position",
    "positions",
    type=click.IntRange(4096),
    multiple=True,
    default=(20000, 100000),
    show_default=True,
    help="Position at which to time decoding; give it several times.",
)
@click.option("--precision", type=click.Choice(["fp32", "bf16"]), default="bf16", show_default=True,
              help="Arithmetic of what is measured.")  # fmt: skip
@click.option("--repeats", type=click.IntRange(1), default=7, show_default=True,
              help="Turns; medians are taken over them.")  # fmt: skip
@click.option(
    "--curve",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Measure perplexity at lengths up to this one, such as 1048576; 0 leaves it out.",
)
@click.option(
    "--pruning-tolerance",
    "pruning_tolerance",
    type=FiniteRange(0, 1, min_open=True, max_open=True),
    default=1e-6,
    show_default=True,
    help="What each head may leave out of a row.",
)
def long_inputs(
    run: Path,
    corpus: str | None,
    lengths: Sequence[int],
    dense_lengths: Sequence[int],
    positions: Sequence[int],
    precision: str,
    repeats: int,
    curve: int,
    pruning_tolerance: float,
) -> None:
    """Score and decode long inputs with RUN's model, by horizons and densely.

    The result is written to RUN/evals/step_XXXXXXXX/bench_long.json; with
    --curve, `alibi-lm report RUN` plots it.
    """
    from alibi_lm.bench.long_inputs.benchmark import LongBenchmark, benchmark_long
    from alibi_lm.checkpoint.step import open_run
    from alibi_lm.utils.errors import ConfigError, Problem

    step = open_run(run)
    if corpus is None:
        if not step.config.data.corpora:  # an imported run
            raise ConfigError(
                Problem("--corpus", None, f"{run} names none", "give --corpus PREFIX")
            )
        corpus = step.config.data.corpora[0].prefix
    settings = LongBenchmark(
        sorted(lengths), sorted(length for length in dense_lengths if length), 16384,
        sorted(positions), pruning_tolerance, precision, repeats,
        [256 * 4**n for n in range(12) if 256 * 4**n <= curve],
    )  # fmt: skip
    benchmark_long(step, corpus, settings)
