"""What a training step costs: benchmarks beside other implementations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from alibi_lm.cli.bench_parts import JSON, REPEATS

NAMES = ("alibi", "alibi-dense", "alibi-compiled", "alibi_learned", "none", "sinusoidal", "rotary",
         "t5", "mpt", "bloom", "x-transformers")  # fmt: skip


@click.command()
@click.option(
    "--size",
    type=click.Choice(["4m", "125m"]),
    default="4m",
    show_default=True,
    help="4m: 4 layers, 256 wide, 8 heads; 125m: 12 layers, 768 wide, 12 heads.",
)
@click.option("--sequence-length", type=click.IntRange(16), default=512, show_default=True,
              help="Tokens of a sequence.")  # fmt: skip
@click.option("--num-tokens", type=click.IntRange(16), default=4096, show_default=True,
              help="Tokens of a step.")  # fmt: skip
@click.option("--model", "names", multiple=True, default=("alibi", "none", "mpt", "bloom"),
              show_default=True, metavar="NAME", type=click.Choice(NAMES),
              help="A model; the first is what the others are compared with. One of "
              f"{', '.join(NAMES)}.")  # fmt: skip
@REPEATS
@click.option("--memory-starts", type=click.IntRange(1), default=1, show_default=True,
              help="Processes of each model whose peak memory is read.")  # fmt: skip
@JSON
def train(
    size: str,
    sequence_length: int,
    num_tokens: int,
    names: Sequence[str],
    repeats: int,
    memory_starts: int,
    path: Path | None,
) -> None:
    """Training steps of this project's model and of others of its size, in turns.

    alibi-dense leaves no keys out (train.pruning_tolerance 0), alibi-compiled goes through
    torch.compile (train.compile). mpt and bloom are transformers' own classes; x-transformers is
    its decoder with alibi_pos_bias, if that package is installed.
    """
    from alibi_lm.bench.train import TrainBenchmark, benchmark_train

    settings = TrainBenchmark(size, sequence_length, num_tokens, names, repeats, memory_starts)
    benchmark_train(settings, path)


@click.command("attention")
@click.option("--size", type=click.Choice(["4m", "125m"]), default="4m", show_default=True,
              help="Whose heads: 8 of width 32, or 12 of width 64.")  # fmt: skip
@click.option("--length", "lengths", type=click.IntRange(16), multiple=True, default=(512, 2048),
              show_default=True, help="Tokens of a sequence; give it several times.")  # fmt: skip
@click.option("--num-tokens", type=click.IntRange(16), default=4096, show_default=True,
              help="Tokens of a call.")  # fmt: skip
@REPEATS
@JSON
def attention_alone(
    size: str, lengths: Sequence[int], num_tokens: int, repeats: int, path: Path | None
) -> None:
    """Attention alone, forward and backward, beside torch's kernels and the eager way, in turns."""
    from alibi_lm.bench.attention import AttentionBenchmark, benchmark_attention

    settings = AttentionBenchmark(size, lengths, num_tokens, repeats=repeats)
    benchmark_attention(settings, path)
