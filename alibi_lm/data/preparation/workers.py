"""Tokenize in several processes, with results in the order of the input.

A worker is a plain interpreter that reads pickled batches from standard input and writes pickled
results to standard output. `multiprocessing` would import the caller's main module into every
worker (torch and DeepSpeed, about ten seconds). When the parent is killed, the worker's input ends
and it exits.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from alibi_lm.data.tokenizer import Tokenizer
from alibi_lm.utils.errors import DataError, Problem

T = TypeVar("T")

Text = str | tuple[str, ...]
"""A document, or its pieces, which are encoded separately."""

_START = """
import sys
sys.path.insert(0, sys.argv[1])
from alibi_lm.data.preparation.workers import serve
serve()
"""


class Interrupted(DataError):
    """Work was interrupted (disk full, process killed); re-running the command resumes it."""


@dataclass
class Encoded:
    """Tokens of a batch of documents, each followed by one eos."""

    tokens: NDArray[Any]
    """All documents concatenated, in the token files' dtype."""
    lengths: NDArray[np.int32]
    """[documents] tokens of each, eos included."""
    num_lossy: int = 0
    """Documents that do not decode to themselves, if counted."""
    failed: tuple[int, Problem] | None = None
    """Index of the first document that cannot be encoded, and why."""


@dataclass
class Encoder:
    """Encodes documents; every worker has one."""

    tokenizer: Tokenizer
    dtype: np.dtype[Any]
    """Dtype of a stored token."""
    count_lossy: bool = False
    """Decode every document again and compare."""

    def __call__(self, texts: Sequence[Text]) -> Encoded:
        """Encode a batch."""
        pieces, lengths, num_lossy = [], [], 0
        eos = np.array([self.tokenizer.eos_id], self.dtype)
        for number, text in enumerate(texts):
            try:
                ids = self._encode(text)
            except DataError as error:
                empty = np.empty(0, self.dtype)
                return Encoded(empty, np.empty(0, np.int32), 0, (number, error.problems[0]))
            if self.count_lossy and self.tokenizer.decode(ids.tolist()) != "".join(text):
                num_lossy += 1
            pieces += [ids.astype(self.dtype), eos]
            lengths.append(len(ids) + 1)
        tokens = np.concatenate(pieces) if pieces else np.empty(0, self.dtype)
        return Encoded(tokens, np.array(lengths, np.int32), num_lossy)

    def _encode(self, text: Text) -> NDArray[np.integer]:
        if isinstance(text, str):
            return self.tokenizer.encode_array(text)
        return np.concatenate([self.tokenizer.encode_array(piece) for piece in text])


def available_cores() -> int:
    """Number of cores available to this process."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Workers:
    """Processes that encode batches; a single worker runs in the calling process."""

    def __init__(self, encoder: Encoder, num_workers: int) -> None:
        self._encoder = encoder
        self.num_workers = num_workers
        self.dtype = encoder.dtype
        self._local = threading.local()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()
        self._closing = False
        self._pool = ThreadPoolExecutor(num_workers) if num_workers > 1 else None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._closing = True
            for process in self._processes:
                process.kill()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def map(self, batches: Iterable[tuple[T, Sequence[Text]]]) -> Iterator[tuple[T, Encoded]]:
        """Encode the texts of each (label, texts), in order, a few batches ahead.

        Raises:
            Interrupted: a worker died (killed, or out of memory).
        """
        if self._pool is None:
            for label, texts in batches:
                yield label, self._encoder(texts)
            return
        waiting: deque[tuple[T, Future[Encoded]]] = deque()
        for label, texts in batches:
            waiting.append((label, self._pool.submit(self._encode_remotely, texts)))
            if len(waiting) > 3 * self.num_workers:
                label, future = waiting.popleft()
                yield label, future.result()
        while waiting:
            label, future = waiting.popleft()
            yield label, future.result()

    def _encode_remotely(self, texts: Sequence[Text]) -> Encoded:
        """Runs in a pool thread; each thread has its own process."""
        process = getattr(self._local, "process", None) or self._start()
        try:
            _send(cast(BinaryIO, process.stdin), texts)
            return cast(Encoded, pickle.load(cast(BinaryIO, process.stdout)))
        except (EOFError, OSError, pickle.UnpicklingError):
            code = process.wait()
            rule = f"died with exit code {code} (killed, or out of memory)"
            fix = "run the same command again, with a lower num_workers if memory is short"
            raise Interrupted(Problem("a tokenizing process", None, rule, fix)) from None

    def _start(self) -> subprocess.Popen[bytes]:
        root = str(Path(__file__).resolve().parents[2])
        with self._lock:
            if self._closing:
                raise EOFError("the workers are being closed")
            process = subprocess.Popen(
                [sys.executable, "-c", _START, root], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            self._processes.append(process)
        self._local.process = process
        _send(cast(BinaryIO, process.stdin), self._encoder)
        return process


def _send(pipe: BinaryIO, value: Any) -> None:
    pickle.dump(value, pipe, protocol=pickle.HIGHEST_PROTOCOL)
    pipe.flush()


def serve() -> None:
    """Main loop of a worker: read an encoder, then batches until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops us
    # One process a core: the Rust tokenizers must not start threads of their own.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output printed by libraries must not mix with results
    try:
        encoder = cast(Encoder, pickle.load(source))
        while True:
            _send(sink, encoder(pickle.load(source)))
    except (EOFError, BrokenPipeError, pickle.UnpicklingError):
        # The parent is gone and the pipe is broken: skip the flush at exit.
        os._exit(0)
