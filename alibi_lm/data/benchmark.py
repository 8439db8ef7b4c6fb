"""How much faster tokenising is with all cores than with one, measured in one run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from statistics import median

from alibi_lm.console import console
from alibi_lm.data.config import RecipeConfig, SourceConfig
from alibi_lm.data.corpora import Document, Reader
from alibi_lm.data.indexed import token_dtype
from alibi_lm.data.tokenise import BATCH_BYTES
from alibi_lm.data.tokenizer import Tokenizer
from alibi_lm.data.worker import Encoder, Workers, available_cores


@dataclass
class Speed:
    """What `benchmark_tokenise` measured."""

    num_bytes: int
    """UTF-8 bytes of each measurement."""
    num_workers: int
    """Processes of the parallel measurement."""
    one: float
    """MB/s of one process that does all itself."""
    all: float
    """MB/s of `num_workers` processes."""

    @property
    def ratio(self) -> float:
        """How many times faster they are together."""
        return self.all / self.one


def benchmark_tokenise(
    recipe: RecipeConfig,
    tokenizer: Tokenizer,
    num_workers: int | None = None,
    num_bytes: int = 16_000_000,
    repeats: int = 3,
) -> Speed:
    """Tokenise the start of a recipe's sources with one process and with several, in turns.

    The processes are started before the clock. The medians of `repeats` turns are compared.

    Args:
        recipe: whose documents are tokenised, those that are made aside; short sources are read
            several times.
        tokenizer: what encodes them.
        num_workers: processes of the parallel turns; by default one a core.
        num_bytes: text of one turn.
        repeats: number of turns of each kind.
    """
    batches = list(_batches(recipe, num_bytes))
    size = sum(len(text.encode()) for batch in batches for text in batch)
    encoder = Encoder(tokenizer, token_dtype(tokenizer.vocab_size))
    counts = (1, num_workers or available_cores())
    seconds: dict[int, list[float]] = {0: [], 1: []}
    with Workers(encoder, counts[0]) as one, Workers(encoder, counts[1]) as several:
        for turn in range(-1, repeats):
            for index, workers in enumerate((one, several)):
                # A first, short turn starts the processes.
                work = batches if turn >= 0 else batches[: 8 * counts[1]]
                start = time.perf_counter()
                for _ in workers.map((None, batch) for batch in work):
                    pass
                if turn >= 0:
                    seconds[index].append(time.perf_counter() - start)
    speeds = [size / 1e6 / median(seconds[index]) for index in (0, 1)]
    speed = Speed(size, counts[1], speeds[0], speeds[1])
    console.say(
        f"tokenising {size / 1e6:.1f} MB: {speed.one:.2f} MB/s with one process, "
        f"{speed.all:.2f} MB/s with {speed.num_workers}: {speed.ratio:.2f} times"
    )
    return speed


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
    for document in Reader(source):
        yield document
        total += document.num_bytes
        if total >= num_bytes:
            return
