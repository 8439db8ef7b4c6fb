"""Benchmarks: speed ratios measured within one run on this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from alibi_lm.cli.arguments import RUN, Commands, FiniteRange
from alibi_lm.utils.errors import EXIT_USER_ERROR

MODELS = (
    *("alibi", "alibi-dense", "alibi-compiled", "alibi_learned"),
    *("none", "sinusoidal", "rotary", "t5", "mpt", "bloom", "x-transformers"),
)
REPEATS = click.option(
    "--repeats", type=click.IntRange(1), default=7, help="Measurements; the median counts."
)
JSON = click.option(
    "--json",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also write the result to this file.",
)


def _lengths(
    flag: str, name: str, least: int, default: Sequence[int], what: str
) -> Callable[[Any], Any]:
    """An option for a length, which can be repeated."""
    kind = click.IntRange(least)
    text = f"{what}; can be repeated."
    return click.option(flag, name, type=kind, multiple=True, default=default, help=text)


@click.group(cls=Commands, invoke_without_command=True)
@click.option("--gpu-check", is_flag=True, help="The same as the command gpu-check.")
@click.pass_context
def bench(context: click.Context, gpu_check: bool) -> None:
    """Measure speeds: ratios taken in one run on this machine."""
    if gpu_check and context.invoked_subcommand is None:
        context.invoke(check_gpu)
    elif context.invoked_subcommand is None:
        raise click.exceptions.NoArgsIsHelpError(context)


@bench.command("gpu-check")
@click.option(
    "--out", type=click.Path(path_type=Path), default="gpu_check.json", help="The result's file."
)
def check_gpu(out: Path) -> None:
    """Compare every attention kernel of this GPU with float64, and time it.

    Outputs and gradients for several head counts, shared key heads, windows and cached queries;
    then each kernel's time relative to torch's attention without a bias, and to a training step
    of 125M parameters. Exits with 2 if an error is too large.
    """
    from alibi_lm.bench.gpu_check import GpuCheck, gpu_check

    sys.exit(EXIT_USER_ERROR if gpu_check(GpuCheck(), out)["failed"] else 0)


@bench.command()
@click.option(
    "--size",
    type=click.Choice(["4m", "125m"]),
    default="4m",
    help="4m: 4 layers, width 256, 8 heads; 125m: 12 layers, width 768, 12 heads.",
)
@click.option(
    "--sequence-length", type=click.IntRange(16), default=512, help="Tokens of a sequence."
)
@click.option("--num-tokens", type=click.IntRange(16), default=4096, help="Tokens of a step.")
@click.option(
    "--model",
    "names",
    multiple=True,
    default=("alibi", "none", "mpt", "bloom"),
    metavar="NAME",
    type=click.Choice(MODELS),
    help="A model; can be repeated. The others are compared with the first. One of "
    f"{', '.join(MODELS)}.",
)
@REPEATS
@click.option(
    "--memory-starts",
    type=click.IntRange(1),
    default=1,
    help="Processes of each model whose peak memory is read.",
)
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
    """Time training steps of this project's model and of baselines, interleaved.

    alibi-dense does not prune (train.pruning_tolerance 0); alibi-compiled uses torch.compile
    (train.compile). mpt and bloom are the classes of transformers; x-transformers is its decoder
    with alibi_pos_bias, if that package is installed.
    """
    from alibi_lm.bench.train import TrainBenchmark, benchmark_train

    settings = TrainBenchmark(size, sequence_length, num_tokens, names, repeats, memory_starts)
    benchmark_train(settings, path)


@bench.command("attention")
@click.option(
    "--size",
    type=click.Choice(["4m", "125m"]),
    default="4m",
    help="4m: 8 heads of width 32; 125m: 12 heads of width 64.",
)
@_lengths("--length", "lengths", 16, (512, 2048), "Tokens of a sequence")
@click.option("--num-tokens", type=click.IntRange(16), default=4096, help="Tokens of a call.")
@REPEATS
@JSON
def attention_alone(
    size: str, lengths: Sequence[int], num_tokens: int, repeats: int, path: Path | None
) -> None:
    """Time attention alone, forward and backward, against torch's kernels and an eager one."""
    from alibi_lm.bench.attention import AttentionBenchmark, benchmark_attention

    settings = AttentionBenchmark(size, lengths, num_tokens, repeats=repeats)
    benchmark_attention(settings, path)


@bench.command("long")
@RUN
@click.option("--corpus", help="Prefix of token files.  [default: the run's first corpus]")
@_lengths("--length", "lengths", 4096, (32768, 131072), "Length to score with pruning")
@_lengths(
    "--dense-length",
    "dense_lengths",
    0,
    (4096, 8192, 16384, 131072),
    "Length to score densely, 0 for none",
)
@_lengths("--position", "positions", 4096, (20000, 100000), "Position at which decoding is timed")
@click.option(
    "--precision", type=click.Choice(["fp32", "bf16"]), default="bf16", help="Arithmetic."
)
@REPEATS
@click.option(
    "--curve",
    type=click.IntRange(0),
    default=0,
    help="Measure perplexity at lengths up to this one, such as 1048576; 0 for none.",
)
@click.option(
    "--pruning-tolerance",
    type=FiniteRange(0, 1, min_open=True, max_open=True),
    default=1e-6,
    help="Attention weight that each head may skip in a row.",
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
    """Time scoring and decoding of long inputs with RUN's model, pruned and dense.

    The result is written to RUN/evals/step_XXXXXXXX/bench_long.json; with
    --curve, `alibi-lm report RUN` plots it.
    """
    from alibi_lm.bench.long_inputs.benchmark import LongBenchmark, benchmark_long
    from alibi_lm.checkpoint.config_paths import find_corpus
    from alibi_lm.checkpoint.step import open_checkpoint
    from alibi_lm.utils.errors import ConfigError, Problem

    checkpoint = open_checkpoint(run)
    if corpus is None:
        if not checkpoint.config.data.corpora:  # an imported run
            raise ConfigError(
                Problem("--corpus", None, f"{run} names none", "give --corpus PREFIX")
            )
        prefix = checkpoint.config.data.corpora[0].prefix
        corpus = find_corpus(checkpoint, "data.corpora.0.prefix", prefix, "give --corpus PREFIX")
    settings = LongBenchmark(
        lengths=sorted(lengths),
        dense_lengths=sorted(length for length in dense_lengths if length),
        positions=sorted(positions),
        epsilon=pruning_tolerance,
        precision=precision,
        repeats=repeats,
        curve=[256 * 4**n for n in range(12) if 256 * 4**n <= curve],
    )
    benchmark_long(checkpoint, corpus, settings)
