"""Throughput of `prepare`'s tokenization, relative to the tokenizer library's own batch call.

python tests/benchmarks/tokenizer_throughput.py RECIPE [key=value ...] [--json FILE]
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import click

from alibi_lm.bench.interleaved_timing import interleaved, markdown, paired_ratio, publish, timed
from alibi_lm.data.config import RecipeConfig, SourceConfig
from alibi_lm.data.indexed import token_dtype
from alibi_lm.data.preparation.documents import Document, DocumentReader
from alibi_lm.data.preparation.prepare import load_recipe
from alibi_lm.data.preparation.tokenization import BATCH_BYTES
from alibi_lm.data.preparation.workers import Encoder, Workers, available_cores
from alibi_lm.data.tokenizer import Tokenizer, load_tokenizer

OURS, LIBRARY = "ours", "library"


def benchmark_tokenize(
    recipe: RecipeConfig,
    tokenizer: Tokenizer,
    num_workers: int | None = None,
    num_bytes: int = 16_000_000,
    repeats: int = 7,
    path: Path | None = None,
) -> dict[str, Any]:
    """Tokenize the start of a recipe's sources in four ways, interleaved; print the result.

    Ours is what `prepare` does, up to the arrays that it writes. The library's is one call with
    all documents and as many threads, up to its lists of ids. Both run with one process or
    thread, and with several; processes start before the clock.

    Args:
        recipe: whose documents are tokenized, except generated ones; short sources repeat.
        tokenizer: what encodes them.
        num_workers: processes or threads of the parallel measurements; by default one a core.
        num_bytes: UTF-8 bytes of text in one measurement.
        repeats: number of measurements.
        path: where the result is written too.
    """
    batches = list(_batches(recipe, num_bytes))
    texts = [text for batch in batches for text in batch]
    size = sum(len(text.encode()) for text in texts)
    library = _library_call(tokenizer)
    encoder = Encoder(tokenizer, token_dtype(tokenizer.vocab_size))
    counts = sorted({1, num_workers or available_cores()})
    with Workers(encoder, counts[0]) as one, Workers(encoder, counts[-1]) as several:
        for workers in (one, several):  # the processes start with their first batch
            _encode(workers, batches[: 8 * workers.num_workers])
        measurements: dict[str, Callable[[], float]] = {}
        for workers in (one, several)[: len(counts)]:
            threads = workers.num_workers
            measurements[f"{OURS} {threads}"] = timed(partial(_encode, workers, batches))
            measurements[f"{LIBRARY} {threads}"] = timed(partial(library, texts, threads))
        seconds = interleaved(measurements, repeats)
    ours = {n: seconds[f"{OURS} {n}"] for n in counts}
    library_seconds = {n: seconds[f"{LIBRARY} {n}"] for n in counts}
    result = {
        "bytes": size,
        "tokenizer": tokenizer.kind,
        "repeats": repeats,
        "processes": counts,
        "megabytes_a_second": {name: size / 1e6 / median(seconds[name]) for name in measurements},
        "seconds": seconds,
        "speed_to_library": {
            str(n): paired_ratio(library_seconds[n], ours[n]).as_dict() for n in counts
        },
        "speed_to_one": paired_ratio(ours[counts[0]], ours[counts[-1]]).as_dict(),
    }
    publish(result, benchmark_lines(result), path)
    return result


def _encode(workers: Workers, batches: list[list[str]]) -> None:
    for _ in workers.map((None, batch) for batch in batches):
        pass


def _library_call(tokenizer: Tokenizer) -> Callable[[list[str], int], object]:
    """The library's own call that encodes many texts on several threads."""
    if tokenizer.kind == "sentencepiece":
        from sentencepiece import SentencePieceProcessor

        model = SentencePieceProcessor(model_file=str(tokenizer.file))
        return lambda texts, threads: model.encode(texts, num_threads=threads)
    import tokenizers

    file = tokenizers.Tokenizer.from_file(str(tokenizer.file))
    file.no_truncation()
    file.no_padding()

    def encode(texts: list[str], threads: int) -> object:
        # The library's pool has a thread a core; this switches it on or off.
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
        encodings = file.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    return encode


def benchmark_lines(result: dict[str, Any]) -> list[str]:
    """The result as a table."""
    speeds = result["megabytes_a_second"]
    rows = []
    for n in result["processes"]:
        ratio = result["speed_to_library"][str(n)]
        rows.append(
            [
                str(n),
                f"{speeds[f'{OURS} {n}']:.2f} MB/s",
                f"{speeds[f'{LIBRARY} {n}']:.2f} MB/s",
                f"{ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]",
            ]
        )
    return [
        f"tokenizing {result['bytes'] / 1e6:.1f} MB ({result['tokenizer']}); medians of "
        f"{result['repeats']} interleaved measurements",
        *markdown(["processes or threads", "ours", "the library's batch call", "speed"], rows),
        f"all processes relative to one: {result['speed_to_one']['median']:.2f} times",
    ]


def _batches(recipe: RecipeConfig, num_bytes: int) -> Iterator[list[str]]:
    documents: list[Document] = []
    sources = [source for source in recipe.sources if not source.generated]
    for source in sources:
        documents += _start(source, num_bytes // len(sources) + 1)
    batch: list[str] = []
    size = total = 0
    for document in cycle(documents):
        batch.append(document.text)
        size += document.num_bytes
        total += document.num_bytes
        if size >= BATCH_BYTES or total >= num_bytes:
            yield batch
            batch, size = [], 0
        if total >= num_bytes:
            return


def _start(source: SourceConfig, num_bytes: int) -> Iterator[Document]:
    """Documents from the start of a source until there are `num_bytes` of them."""
    total = 0
    for document in DocumentReader(source):
        yield document
        total += document.num_bytes
        if total >= num_bytes:
            return


@click.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@click.option("--megabytes", type=click.FloatRange(0.1), default=16.0)
@click.option("--repeats", type=click.IntRange(1), default=7)
@click.option("--json", "path", type=click.Path(path_type=Path, dir_okay=False))
def main(
    recipe: Path, overrides: Sequence[str], megabytes: float, repeats: int, path: Path | None
) -> None:
    """Tokenize the start of RECIPE's corpora with the tokenizer that `prepare` left."""
    loaded = load_recipe(recipe, list(overrides))
    tokenizer = load_tokenizer(Path(loaded.output) / "tokenizer")
    size = int(megabytes * 1e6)
    benchmark_tokenize(loaded, tokenizer, num_bytes=size, repeats=repeats, path=path)


if __name__ == "__main__":
    main()
