"""What feeds and ends a training step: benchmarks of the data, the loss and the start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from alibi_lm.cli.arguments import OVERRIDES, FiniteRange

REPEATS = click.option("--repeats", type=click.IntRange(1), default=7, show_default=True,
                       help="Turns; medians are taken over them.")  # fmt: skip
JSON = click.option("--json", "path", type=click.Path(path_type=Path, dir_okay=False),
                    help="Write the result to this file too.")  # fmt: skip


@click.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@OVERRIDES
@click.option("--megabytes", type=FiniteRange(0.1, 1e5), default=16.0, show_default=True,
              help="Text of one measurement.")  # fmt: skip
@REPEATS
@JSON
def tokenize(
    recipe: Path, overrides: Sequence[str], megabytes: float, repeats: int, path: Path | None
) -> None:
    """Tokenize the start of RECIPE's corpora, beside the tokenizer library's own batch call.

    With one process and with all cores. The recipe must have been prepared: its tokenizer is the
    one measured.
    """
    from alibi_lm.bench.tokenize import benchmark_tokenize
    from alibi_lm.data.preparation.prepare import load_recipe
    from alibi_lm.data.tokenizer import load_tokenizer

    loaded = load_recipe(recipe, list(overrides))
    tokenizer = load_tokenizer(Path(loaded.output) / "tokenizer")
    size = int(megabytes * 1e6)
    benchmark_tokenize(loaded, tokenizer, num_bytes=size, repeats=repeats, path=path)


@click.command()
@click.argument("prefix", type=click.Path(path_type=Path))
@click.option("--gigabytes", type=FiniteRange(0.001, 1e5), default=28.0, show_default=True,
              help="Size of the corpus that is made; more than the machine's memory.")  # fmt: skip
@click.option("--keep", is_flag=True, help="Leave the corpus there for another time.")
@REPEATS
@JSON
def load(prefix: Path, gigabytes: float, keep: bool, repeats: int, path: Path | None) -> None:
    """Read training samples from a cold corpus, and train a model of 10M parameters, in turns.

    The corpus, random tokens, is made at PREFIX unless its files are there.
    """
    from alibi_lm.bench.load import LoadBenchmark, benchmark_load

    settings = LoadBenchmark(gigabytes=gigabytes, repeats=repeats)
    benchmark_load(prefix, settings, path, keep=keep)


@click.command()
@click.option("--precision", type=click.Choice(["fp32", "bf16"]), default="bf16", show_default=True,
              help="Arithmetic of what is measured.")  # fmt: skip
@click.option("--vocab-size", type=click.IntRange(2), default=250_880, show_default=True,
              help="Rows of the output matrix.")  # fmt: skip
@click.option("--hidden-size", type=click.IntRange(1), default=1024, show_default=True,
              help="Its width.")  # fmt: skip
@click.option("--num-tokens", type=click.IntRange(1), default=4096, show_default=True,
              help="Tokens of one loss.")  # fmt: skip
@REPEATS
@JSON
def loss(
    precision: str,
    vocab_size: int,
    hidden_size: int,
    num_tokens: int,
    repeats: int,
    path: Path | None,
) -> None:
    """Time, memory and exactness of the output layer's loss, beside the plain way and torch's own.

    At the default sizes the plain way takes 12 GiB.
    """
    from alibi_lm.bench.loss import LossBenchmark, benchmark_loss

    settings = LossBenchmark(vocab_size, hidden_size, num_tokens, precision, repeats)
    benchmark_loss(settings, path)


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@OVERRIDES
@click.option("--num-ranks", type=click.IntRange(1), default=2, show_default=True,
              help="Ranks on this machine.")  # fmt: skip
@REPEATS
@JSON
def start(
    config: Path, overrides: Sequence[str], num_ranks: int, repeats: int, path: Path | None
) -> None:
    """From `deepspeed` to the first optimizer step of CONFIG's run, beside a bare script's.

    The bare script has as large a model and the same DeepSpeed config. CONFIG's data must have
    been prepared; its run folder is not touched.
    """
    from alibi_lm.bench.start import StartBenchmark, benchmark_start
    from alibi_lm.data.preparation.workers import available_cores

    settings = StartBenchmark(config, list(overrides), num_ranks, repeats)
    benchmark_start(settings, available_cores(), path)
