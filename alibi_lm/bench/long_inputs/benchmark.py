"""The cost of long inputs, pruned and dense: ratios measured in one run on one machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from alibi_lm.bench.interleaved_timing import interleaved, paired_ratio
from alibi_lm.bench.long_inputs.perplexity_curve import dense_seconds, perplexity_curve
from alibi_lm.bench.long_inputs.table import benchmark_lines
from alibi_lm.data.indexed import TokenFile
from alibi_lm.evals.models.base import NativeModel
from alibi_lm.evals.models.scorer import DTYPES
from alibi_lm.model.decoder import Decoder
from alibi_lm.model.inference.generation import decoding_cache, prefill
from alibi_lm.model.inference.long_scoring import (
    DENSE_UP_TO,
    LongScoringReport,
    long_losses,
    pruning_unsupported_reason,
)
from alibi_lm.model.inference.pruned_kv_cache import PrunedKVCache
from alibi_lm.utils.errors import ConfigError, DataError, Problem
from alibi_lm.utils.files import write_json
from alibi_lm.utils.logging import console
from alibi_lm.utils.memory import peak_resident_bytes

if TYPE_CHECKING:
    from alibi_lm.checkpoint.step import Checkpoint

RESULT = "bench_long.json"
TOKENS_PER_REPEAT = 16
DECODING_REPEATS = 16


@dataclass
class LongBenchmark:
    """What `benchmark_long` is to measure."""

    lengths: Sequence[int] = (32768, 131072)
    """Lengths scored with pruning, ascending."""
    dense_lengths: Sequence[int] = (4096, 8192, 16384, 131072)
    """Lengths scored by the dense path too, ascending; none leaves it out."""
    same_length: int = 16384
    """Length at which both perplexities are compared, in fp32."""
    positions: Sequence[int] = (20000, 100000)
    """Positions at which decoding is timed; none leaves it out."""
    epsilon: float = 1e-6
    """Largest probability that a head may skip per query."""
    precision: str = "bf16"
    """Arithmetic of what is timed."""
    repeats: int = 7
    """Repetitions; medians are taken over them."""
    curve: Sequence[int] = ()
    """Lengths whose perplexity is wanted, ascending; none leaves it out."""
    curve_targets: int = 131072
    """Tokens that are scored at each of them: the last ones of the longest."""


def benchmark_long(checkpoint: Checkpoint, corpus: str, settings: LongBenchmark) -> dict[str, Any]:
    """Measure a checkpoint, write bench_long.json beside its evals, and say the result.

    An earlier result becomes bench_long.previous.json.

    Args:
        step: the checkpoint.
        corpus: prefix of the token files whose start is the text.
        settings: what is measured.

    Raises:
        ConfigError: the model cannot be pruned.
        DataError: the corpus is shorter than the longest length.
    """
    decoder = checkpoint.decoder(dtype=DTYPES[settings.precision])
    reason = pruning_unsupported_reason(decoder)
    if reason is not None:
        raise ConfigError(
            Problem("model", checkpoint.config.model.position, reason, "train an ALiBi run")
        )
    wanted = (*settings.lengths, settings.same_length, *settings.positions, *settings.curve,
              *settings.dense_lengths)  # fmt: skip
    text = _text(corpus, max(wanted))
    eval_model = NativeModel(checkpoint)
    result: dict[str, Any] = {
        "eval": "bench_long",
        "inputs": {"step": eval_model.digest, **asdict(settings)},
        "training_length": checkpoint.config.train.sequence_length,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "pruning_tolerance": settings.epsilon,
        "precision": settings.precision,
        "repeats": settings.repeats,
        "hidden_size": checkpoint.config.model.hidden_size,
        "num_layers": checkpoint.config.model.num_layers,
        "num_heads": checkpoint.config.model.num_heads,
    }
    path = checkpoint.evals_folder / RESULT
    parts: list[Callable[[], dict[str, Any]]] = [
        lambda: {
            "same": _same(
                checkpoint.decoder(), text[: settings.same_length + 1], settings.epsilon
            )
        },
        lambda: _scoring(decoder, text, settings),
        lambda: {"decoding": _decoding(decoder, text, settings)} if settings.positions else {},
        lambda: _curve(decoder, text, settings, result["dense"]) if settings.curve else {},
    ]  # fmt: skip
    unfinished = path.with_suffix(".unfinished.json")
    for part in parts:
        result |= part()
        write_json(unfinished, result)
    if path.exists():  # it may have taken hours, and hold lengths that this one does not
        path.replace(path.with_suffix(".previous.json"))
    unfinished.replace(path)
    for line in benchmark_lines(result):
        console.info(line)
    console.info(f"bench long: {path}")
    return result


def _text(corpus: str, longest: int) -> Tensor:
    file = TokenFile(corpus)
    if file.num_tokens <= longest:
        rule = f"has {file.num_tokens:,} tokens, but {longest + 1:,} are needed"
        fix = "give shorter lengths and positions, or another corpus"
        raise DataError(Problem(str(file.prefix), None, rule, fix))
    return torch.from_numpy(file.read(0, longest + 1).astype(np.int64))


def _same(decoder: Decoder, text: Tensor, epsilon: float) -> dict[str, Any]:
    """Mean loss of an fp32 model, pruned and dense."""
    pruned = long_losses(decoder, text[:-1], text[1:], epsilon).double().mean()
    with torch.inference_mode():
        dense = decoder.losses(text[None, :-1], text[None, 1:]).double().mean()
    return {
        "length": len(text) - 1,
        "perplexity": float(dense.exp()),
        "relative_difference": abs(float((pruned - dense).expm1())),
    }


def _scoring(decoder: Decoder, text: Tensor, settings: LongBenchmark) -> dict[str, Any]:
    """Seconds, peak memory and perplexity of each length, pruned and dense, interleaved."""
    long_losses(decoder, text[: DENSE_UP_TO * 2], text[1 : DENSE_UP_TO * 2 + 1], settings.epsilon)
    pruned = [_Scored(decoder, text[: n + 1], settings.epsilon) for n in settings.lengths]
    dense = [_Scored(decoder, text[: n + 1], 0.0) for n in settings.dense_lengths]
    # In the first repetition lengths ascend, so that the peak of each is its own.
    ways = {f"{kind} {each.length}": each.score
            for kind, some in (("pruned", pruned), ("dense", dense)) for each in some}  # fmt: skip
    interleaved(ways, settings.repeats, warm_ups=0)
    shortest, by_length = pruned[0].a_token(), {each.length: each for each in pruned}
    return {
        "scoring": [each.row(shortest) for each in pruned],
        "dense": [each.row(by_length.get(each.length, pruned[-1]).a_token()) for each in dense],
    }


def _curve(
    decoder: Decoder, text: Tensor, settings: LongBenchmark, dense: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    rows = perplexity_curve(decoder, text, settings.curve, settings.curve_targets, settings.epsilon)
    if len(dense) < 2:
        return {"curve": rows, "curve_dense_seconds": None}
    return {"curve": rows, "curve_dense_seconds": dense_seconds(dense, settings.curve[-1])}


class _Scored:
    """A length, and what scoring it took each time."""

    def __init__(self, decoder: Decoder, text: Tensor, epsilon: float) -> None:
        self.decoder, self.text, self.epsilon = decoder, text, epsilon
        self.length = len(text) - 1
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.first: dict[str, Any] = {}

    def score(self) -> float:
        """Score once; seconds."""
        report = LongScoringReport()
        start, cpu = time.perf_counter(), time.process_time()
        if self.epsilon:
            losses = long_losses(self.decoder, self.text[:-1], self.text[1:], self.epsilon, report)
        else:
            with torch.inference_mode():
                losses = self.decoder.losses(self.text[None, :-1], self.text[None, 1:])
        self.seconds.append(round(time.perf_counter() - start, 4))
        self.cpu_seconds.append(round(time.process_time() - cpu, 4))
        if not self.first:
            self.first = {
                "peak_kib": peak_resident_bytes() // 1024,
                "perplexity": float(losses.double().mean().exp()),
                "kept_tokens": report.kept,
                "recomputed": report.recomputed,
            }
            console.info(f"  {self.length:,} tokens, epsilon {self.epsilon:g}: {self.seconds[0]} s")
        return self.seconds[-1]

    def a_token(self) -> list[float]:
        """Seconds a token of each repetition."""
        return [value / self.length for value in self.seconds]

    def row(self, base: Sequence[float]) -> dict[str, Any]:
        """The measurements, and the paired ratio of the time a token to `base`."""
        return self.first | {
            "length": self.length,
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "microseconds_a_token": 1e6 * median(self.a_token()),
            "cpu_microseconds_a_token": 1e6 * median(self.cpu_seconds) / self.length,
            "ratio": paired_ratio(self.a_token(), base).as_dict(),
        }


def _decoding(decoder: Decoder, text: Tensor, settings: LongBenchmark) -> dict[str, Any]:
    """Time a token at each position, interleaved; bytes of the sliding and a dense KV cache."""
    caches: list[PrunedKVCache] = []
    with torch.inference_mode():
        for position in settings.positions:
            cache = decoding_cache(decoder, 2 * position + DENSE_UP_TO, settings.epsilon)
            assert isinstance(cache, PrunedKVCache)
            prefill(decoder, text[None, :position], cache)
            _decode(decoder, text, cache)
            caches.append(cache)
        seconds: list[list[float]] = [[] for _ in caches]
        for _ in range(DECODING_REPEATS):
            for times, cache in zip(seconds, caches, strict=True):
                times.append(_decode(decoder, text, cache) / TOKENS_PER_REPEAT)
    weight = decoder.embedding.weight
    config = decoder.config
    token = 2 * config.kv_heads * config.head_dim * weight.element_size() * config.num_layers
    last = caches[-1]
    return {
        "positions": list(settings.positions),
        "milliseconds_a_token": [1e3 * median(times) for times in seconds],
        "ratio": paired_ratio(seconds[-1], seconds[0]).as_dict(),
        "repeats": [[round(1e3 * value, 3) for value in times] for times in seconds],
        "sliding_kv_bytes": last.resident_kv_bytes,
        "offloaded_kv_bytes": last.offloaded_kv_bytes,
        "dense_bytes_at_131072": token * 131072,
        "offload_share": [cache.report.offload_share for cache in caches],
    }


def _decode(decoder: Decoder, text: Tensor, cache: PrunedKVCache) -> float:
    """Seconds to read the next tokens of the text, one at a time."""
    start = time.perf_counter()
    for _ in range(TOKENS_PER_REPEAT):
        place = cache.length % (len(text) - 1)
        prefill(decoder, text[None, place : place + 1], cache)
    return time.perf_counter() - start
