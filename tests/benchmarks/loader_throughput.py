"""Throughput of the training loader from a cold corpus, relative to the training that it feeds.

python tests/benchmarks/loader_throughput.py PREFIX [--gigabytes 28] [--repeats 7] [--json FILE]
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
import torch

from alibi_lm.bench.interleaved_timing import interleaved, markdown, paired_ratio, publish
from alibi_lm.config import Config
from alibi_lm.config_loading import build
from alibi_lm.data.indexed import TokenFileWriter, bin_path, idx_path
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.decoder import Decoder
from alibi_lm.model.flops import num_parameters
from alibi_lm.train.data import TrainingData, open_training_data
from alibi_lm.utils.errors import DataError, Problem
from alibi_lm.utils.memory import private_bytes

MODEL = {"num_layers": 6, "hidden_size": 320, "num_heads": 5, "vocab_size": 8192}
"""10M parameters."""
_CHUNK = 1 << 25
_MEAN_LENGTH = 1000


@dataclass(frozen=True)
class LoadBenchmark:
    """Settings of `benchmark_load`."""

    gigabytes: float = 28.0
    """Size of the corpus, in 1e9 bytes."""
    sequence_length: int = 512
    micro_batch_size: int = 8
    global_batch_size: int = 32
    loaded_steps: int = 64
    """Steps whose samples are read in one measurement."""
    trained_steps: int = 1
    """Steps trained in one measurement."""
    repeats: int = 7


def benchmark_load(
    prefix: Path, settings: LoadBenchmark, path: Path | None = None, *, keep: bool = False
) -> dict[str, Any]:
    """Read samples as training does and train a 10M model, interleaved; print the speeds' ratio.

    Unless files at `prefix` exist, a corpus of random tokens is written there, and removed
    afterwards unless `keep`. The page cache of the corpus is dropped before each measurement; a
    corpus larger than memory could not stay there anyway. Samples are read in training order,
    each once, from all over the file.

    Raises:
        DataError: the disk has no room for the corpus.
    """
    generated = not idx_path(prefix).exists()
    if generated:
        write_corpus(prefix, int(settings.gigabytes * 1e9))
    try:
        result = _measure(prefix, settings)
    finally:
        if generated and not keep:
            bin_path(prefix).unlink(missing_ok=True)
            idx_path(prefix).unlink(missing_ok=True)
    publish(result, benchmark_lines(result), path)
    return result


def write_corpus(prefix: Path, num_bytes: int) -> None:
    """Write token files of random documents."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(prefix.parent).free
    if num_bytes > 0.9 * free:
        rule = f"has {free / 1e9:.0f} GB free, too little for {num_bytes / 1e9:.0f} GB"
        raise DataError(Problem(str(prefix.parent), None, rule, "ask for less, or elsewhere"))
    writer = TokenFileWriter(prefix, np.uint16)
    generator = np.random.default_rng(0)
    left = num_bytes // 2
    while left:
        size = min(_CHUNK, left)
        tokens = generator.integers(0, MODEL["vocab_size"], size, dtype=np.uint16)
        writer.add(tokens, _lengths(generator, size))
        left -= size
    writer.finish()


def _lengths(generator: np.random.Generator, total: int) -> np.ndarray:
    """Document lengths that add up to `total`."""
    ends = np.unique(generator.integers(0, total, total // _MEAN_LENGTH))
    return np.diff(np.concatenate(([0], ends, [total]))).astype(np.int32)


def _measure(prefix: Path, settings: LoadBenchmark) -> dict[str, Any]:
    start = time.perf_counter()
    data = open_training_data(_config(prefix, settings))
    opened = time.perf_counter() - start
    drop_page_cache(bin_path(prefix))
    steps = count()
    memory_before = private_bytes()

    def load() -> float:
        drop_page_cache(bin_path(prefix))
        start = time.perf_counter()
        for _ in range(settings.loaded_steps):
            data.micro_batches(next(steps), 0, 1)
        return time.perf_counter() - start

    load()
    grown = private_bytes() - memory_before
    decoder = Decoder(build(ModelConfig, MODEL)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-4, fused=True)

    def train() -> float:
        batches = _batches(data, settings.trained_steps)
        start = time.perf_counter()
        for step in batches:
            for tokens in step:
                decoder(tokens[:, :-1], tokens[:, 1:]).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return time.perf_counter() - start

    seconds = interleaved({"load": load, "train": train}, settings.repeats)
    tokens = settings.global_batch_size * settings.sequence_length
    speeds = {
        "load": [settings.loaded_steps * tokens / taken for taken in seconds["load"]],
        "train": [settings.trained_steps * tokens / taken for taken in seconds["train"]],
    }
    return asdict(settings) | {
        "bytes": bin_path(prefix).stat().st_size,
        "memory_of_machine": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "documents": data.corpora[0].num_documents,
        "parameters": num_parameters(decoder.config),
        "threads": torch.get_num_threads(),
        "seconds_to_open": opened,
        "private_bytes_of_loading": grown,
        "tokens_a_second": speeds,
        "ratio": paired_ratio(speeds["load"], speeds["train"]).as_dict(),
    }


def _config(prefix: Path, settings: LoadBenchmark) -> Config:
    train = {
        "sequence_length": settings.sequence_length,
        "micro_batch_size": settings.micro_batch_size,
        "global_batch_size": settings.global_batch_size,
        "num_steps": 1,
    }
    data = {"corpora": [{"prefix": str(prefix)}]}
    run = {"dir": str(prefix.parent)}
    return build(Config, {"run": run, "data": data, "model": dict(MODEL), "train": train})


def _batches(data: TrainingData, num_steps: int) -> list[list[torch.Tensor]]:
    return [data.micro_batches(step, 0, 1) for step in range(num_steps)]


def drop_page_cache(path: Path) -> None:
    """Let the system drop the cached pages of a file that no process maps."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def benchmark_lines(result: dict[str, Any]) -> list[str]:
    """The result as a table."""
    speeds, ratio = result["tokens_a_second"], result["ratio"]
    training = f"training, {result['parameters'] / 1e6:.1f}M parameters, bf16"
    rows = [
        ["loader, from storage", f"{median(speeds['load']):,.0f}"],
        [training, f"{median(speeds['train']):,.0f}"],
    ]
    return [
        f"corpus of {result['bytes'] / 1e9:.1f} GB in {result['documents']:,} documents, the "
        f"machine's memory {result['memory_of_machine'] / 1e9:.1f} GB; windows of "
        f"{result['sequence_length']:,}, {result['threads']} threads; medians of "
        f"{result['repeats']} interleaved measurements",
        *markdown(["", "tokens a second"], rows),
        f"ratio {ratio['median']:.1f} [{ratio['low']:.1f}, {ratio['high']:.1f}]; opened in "
        f"{result['seconds_to_open']:.1f} s; memory of loading (without cached pages of the file) "
        f"{result['private_bytes_of_loading'] / 2**20:.1f} MiB",
    ]


@click.command()
@click.argument("prefix", type=click.Path(path_type=Path))
@click.option("--gigabytes", type=click.FloatRange(0.001), default=28.0)
@click.option("--keep", is_flag=True, help="Keep the corpus.")
@click.option("--repeats", type=click.IntRange(1), default=7)
@click.option("--json", "path", type=click.Path(path_type=Path, dir_okay=False))
def main(prefix: Path, gigabytes: float, keep: bool, repeats: int, path: Path | None) -> None:
    """Measure on token files at PREFIX, which are generated unless they exist."""
    benchmark_load(prefix, LoadBenchmark(gigabytes, repeats=repeats), path, keep=keep)


if __name__ == "__main__":
    main()
