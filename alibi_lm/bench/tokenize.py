"""Speed of tokenizing with one process and with all cores, beside the library's own batch call."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

from alibi_lm.bench.interleaved_timing import interleaved, markdown, paired_ratio, publish, timed
from alibi_lm.data.config import RecipeConfig, SourceConfig
from alibi_lm.data.indexed import token_dtype
from alibi_lm.data.preparation.documents import Document, DocumentReader
from alibi_lm.data.preparation.tokenization import BATCH_BYTES
from alibi_lm.data.preparation.workers import Encoder, Workers, available_cores
from alibi_lm.data.tokenizer import Tokenizer

OURS, LIBRARY = "ours", "library"


def benchmark_tokenize(
    recipe: RecipeConfig,
    tokenizer: Tokenizer,
    num_workers: int | None = None,
    num_bytes: int = 16_000_000,
    repeats: int = 7,
    path: Path | None = None,
) -> dict[str, Any]:
    """Tokenize the start of a recipe's sources in four ways, in turns; say and return the result.

    Ours is what `prepare` does up to the arrays that it writes; the library's is one call with all
    documents and as many threads, up to its lists of ids. Both with one process or thread, and
    with several. Processes are started before the clock.

    Args:
        recipe: whose documents are tokenized, those that are made aside; short sources are read
            several times.
        tokenizer: what encodes them.
        num_workers: processes, or threads, of the parallel turns; by default one a core.
        num_bytes: text of one turn, in UTF-8.
        repeats: number of turns.
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
        ways: dict[str, Callable[[], float]] = {}
        for workers in (one, several)[: len(counts)]:
            threads = workers.num_workers
            ways[f"{OURS} {threads}"] = timed(partial(_encode, workers, batches))
            ways[f"{LIBRARY} {threads}"] = timed(partial(library, texts, threads))
        seconds = interleaved(ways, repeats)
    ours = {n: seconds[f"{OURS} {n}"] for n in counts}
    theirs = {n: seconds[f"{LIBRARY} {n}"] for n in counts}
    result = {
        "bytes": size,
        "tokenizer": tokenizer.kind,
        "repeats": repeats,
        "processes": counts,
        "megabytes_a_second": {name: size / 1e6 / median(seconds[name]) for name in ways},
        "seconds": seconds,
        "speed_to_library": {str(n): paired_ratio(theirs[n], ours[n]).as_dict() for n in counts},
        "speed_to_one": paired_ratio(ours[counts[0]], ours[counts[-1]]).as_dict(),
    }
    publish(result, benchmark_lines(result), path)
    return result


def _encode(workers: Workers, batches: list[list[str]]) -> None:
    for _ in workers.map((None, batch) for batch in batches):
        pass


def _library_call(tokenizer: Tokenizer) -> Callable[[list[str], int], object]:
    """The library's own call that encodes many texts with some threads."""
    if tokenizer.kind == "sentencepiece":
        from sentencepiece import SentencePieceProcessor

        model = SentencePieceProcessor(model_file=str(tokenizer.file))
        return lambda texts, threads: model.encode(texts, num_threads=threads)
    import tokenizers

    file = tokenizers.Tokenizer.from_file(str(tokenizer.file))
    file.no_truncation()
    file.no_padding()

    def encode(texts: list[str], threads: int) -> object:
        # The library has one pool with a thread a core; this says whether it is used.
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
        found = file.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in found]

    return encode


def benchmark_lines(result: dict[str, Any]) -> list[str]:
    """The result for the terminal, as a table."""
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
        f"{result['repeats']} interleaved repetitions",
        *markdown(["processes or threads", "ours", "the library's batch call", "speed"], rows),
        f"all processes to one: {result['speed_to_one']['median']:.2f} times",
    ]


def _batches(recipe: RecipeConfig, num_bytes: int) -> Iterator[list[str]]:
    documents: list[Document] = []
    read = [source for source in recipe.sources if not source.generated]
    for source in read:
        documents += _start(source, num_bytes // len(read) + 1)
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
