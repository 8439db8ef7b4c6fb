"""What long inputs cost by horizons, and densely: ratios taken in one run on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from alibi_lm.console import console
from alibi_lm.data.indexed import TokenFile
from alibi_lm.errors import ConfigError, DataError, Problem
from alibi_lm.evals.scorer import DTYPES
from alibi_lm.files import write_json
from alibi_lm.memory import peak_resident_bytes
from alibi_lm.model.decoder import Decoder
from alibi_lm.model.generation import decoding_cache, prefill
from alibi_lm.model.long import DENSE_UP_TO, LongReport, long_losses, why_dense
from alibi_lm.model.ring import RingCache

if TYPE_CHECKING:
    from alibi_lm.checkpoint.step import Step

RESULT = "bench_long.json"
TOKENS_A_TURN = 16
TURNS = 16
LONG_TURN = 100.0
"""Seconds of a length's first turn above which it has no other."""


@dataclass
class LongBenchmark:
    """What `benchmark_long` is to measure."""

    lengths: Sequence[int] = (32768, 131072)
    """Lengths scored by horizons, ascending."""
    dense_length: int | None = 131072
    """Length scored by the dense path too, once; None leaves it out."""
    same_length: int = 16384
    """Length at which both perplexities are compared, in fp32."""
    positions: Sequence[int] = (20000, 100000)
    """Positions at which decoding is timed; none leaves it out."""
    epsilon: float = 1e-6
    """What each head and row may leave out."""
    precision: str = "bf16"
    """Arithmetic of what is timed."""
    repeats: int = 3
    """Turns; medians are taken over them."""


def benchmark_long(step: Step, corpus: str, settings: LongBenchmark) -> dict[str, Any]:
    """Measure a checkpoint, write bench_long.json beside its evals, and say the result.

    Args:
        step: the checkpoint.
        corpus: prefix of the token files whose start is the text.
        settings: what is measured.

    Raises:
        ConfigError: the model has no horizons.
        DataError: the corpus is shorter than the longest length.
    """
    decoder = step.decoder(dtype=DTYPES[settings.precision])
    reason = why_dense(decoder)
    if reason is not None:
        raise ConfigError(
            Problem("model", step.config.model.position, reason, "train an ALiBi run")
        )
    text = _text(corpus, max(*settings.lengths, settings.same_length, *settings.positions))
    result: dict[str, Any] = {
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "epsilon": settings.epsilon,
        "precision": settings.precision,
        "repeats": settings.repeats,
        "hidden_size": step.config.model.hidden_size,
        "num_layers": step.config.model.num_layers,
        "num_heads": step.config.model.num_heads,
    }
    path = step.evals_folder / RESULT
    parts: list[Callable[[], dict[str, Any]]] = [
        lambda: {"same": _same(step.decoder(), text[: settings.same_length + 1], settings.epsilon)},
        lambda: {"scoring": _scoring(decoder, text, settings)},
        lambda: {"decoding": _decoding(decoder, text, settings)} if settings.positions else {},
        lambda: {"dense": _dense(decoder, text, settings)} if settings.dense_length else {},
    ]
    for part in parts:
        result |= part()
        write_json(path, result)
    for line in benchmark_lines(result):
        console.say(line)
    console.say(f"bench long: {path}")
    return result


def _text(corpus: str, longest: int) -> Tensor:
    file = TokenFile(corpus)
    if file.num_tokens <= longest:
        rule = f"has {file.num_tokens:,} tokens, but {longest + 1:,} are needed"
        fix = "give shorter lengths and positions, or another corpus"
        raise DataError(Problem(str(file.prefix), None, rule, fix))
    return torch.from_numpy(file.read(0, longest + 1).astype(np.int64))


def _same(decoder: Decoder, text: Tensor, epsilon: float) -> dict[str, Any]:
    """Mean loss by horizons and densely, of an fp32 model."""
    ours = long_losses(decoder, text[:-1], text[1:], epsilon).double().mean()
    with torch.inference_mode():
        dense = decoder.losses(text[None, :-1], text[None, 1:]).double().mean()
    return {
        "length": len(text) - 1,
        "perplexity": float(dense.exp()),
        "relative_difference": abs(float((ours - dense).expm1())),
    }


def _scoring(decoder: Decoder, text: Tensor, settings: LongBenchmark) -> list[dict[str, Any]]:
    """Seconds, peak memory and loss of each length, the lengths in turns."""
    long_losses(decoder, text[: DENSE_UP_TO * 2], text[1 : DENSE_UP_TO * 2 + 1], settings.epsilon)
    rows: list[dict[str, Any]] = [
        {"length": n, "seconds": [], "cpu_seconds": []} for n in settings.lengths
    ]
    for turn in range(settings.repeats):
        for row in rows:
            if turn and row["seconds"][0] > LONG_TURN:
                continue
            length, report = row["length"], LongReport()
            start, cpu = time.perf_counter(), time.process_time()
            losses = long_losses(
                decoder, text[:length], text[1 : length + 1], settings.epsilon, report
            )
            row["seconds"].append(round(time.perf_counter() - start, 3))
            row["cpu_seconds"].append(round(time.process_time() - cpu, 3))
            if turn == 0:
                row["peak_kib"] = peak_resident_bytes() // 1024
                row["perplexity"] = float(losses.double().mean().exp())
                row["kept_tokens"], row["made_again"] = report.kept, report.made_again
                console.say(f"  {length:,} tokens: {row['seconds'][0]} s")
    for row in rows:
        row["microseconds_a_token"] = 1e6 * median(row["seconds"]) / row["length"]
        row["cpu_microseconds_a_token"] = 1e6 * median(row["cpu_seconds"]) / row["length"]
    return rows


def _dense(decoder: Decoder, text: Tensor, settings: LongBenchmark) -> dict[str, Any]:
    length = settings.dense_length
    start, cpu = time.perf_counter(), time.process_time()
    with torch.inference_mode():
        losses = decoder.losses(text[None, :length], text[None, 1 : (length or 0) + 1])
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return {
        "length": length,
        "cpu_microseconds_a_token": 1e6 * cpu / losses.numel(),
        "seconds": round(seconds, 3),
        "microseconds_a_token": 1e6 * seconds / losses.numel(),
        "perplexity": float(losses.double().mean().exp()),
    }


def _decoding(decoder: Decoder, text: Tensor, settings: LongBenchmark) -> dict[str, Any]:
    """Time a token at each position, in turns, and the bytes of rings and of a dense cache."""
    caches: list[RingCache] = []
    with torch.inference_mode():
        for position in settings.positions:
            cache = decoding_cache(decoder, 2 * position + DENSE_UP_TO, settings.epsilon)
            assert isinstance(cache, RingCache)
            prefill(decoder, text[None, :position], cache)
            _decode(decoder, text, cache)
            caches.append(cache)
        seconds: list[list[float]] = [[] for _ in caches]
        for _ in range(TURNS):
            for times, cache in zip(seconds, caches, strict=True):
                times.append(_decode(decoder, text, cache) / TOKENS_A_TURN)
    weight = decoder.embedding.weight
    config = decoder.config
    token = 2 * config.kv_heads * config.head_dim * weight.element_size() * config.num_layers
    last = caches[-1]
    return {
        "positions": list(settings.positions),
        "milliseconds_a_token": [1e3 * median(times) for times in seconds],
        "turns": [[round(1e3 * value, 3) for value in times] for times in seconds],
        "ring_bytes": last.hot_bytes,
        "cold_bytes": last.cold_bytes,
        "dense_bytes_at_131072": token * 131072,
        "cold_share": [cache.report.cold_share for cache in caches],
    }


def _decode(decoder: Decoder, text: Tensor, cache: RingCache) -> float:
    """Seconds of some tokens, each of which is given."""
    start = time.perf_counter()
    for _ in range(TOKENS_A_TURN):
        place = cache.length % (len(text) - 1)
        prefill(decoder, text[None, place : place + 1], cache)
    return time.perf_counter() - start


def benchmark_lines(result: dict[str, Any]) -> list[str]:
    """The result for the terminal."""
    rows = result["scoring"]
    lines = [
        f"{result['precision']}, {result['threads']} threads, epsilon {result['epsilon']:g}; "
        f"medians of up to {result['repeats']} turns",
        f"{'tokens':>10}  {'us a token':>10}  {'to first':>8}  {'cpu us':>8}  {'to first':>8}  "
        f"{'peak MiB':>9}  perplexity",
    ]
    for row in rows:
        ratio, cpu_ratio = (
            row[key] / rows[0][key] for key in ("microseconds_a_token", "cpu_microseconds_a_token")
        )
        lines.append(
            f"{row['length']:>10,}  {row['microseconds_a_token']:>10.1f}  {ratio:>8.3f}  "
            f"{row['cpu_microseconds_a_token']:>8.1f}  {cpu_ratio:>8.3f}  "
            f"{row['peak_kib'] / 1024:>9.0f}  {row['perplexity']:.4f}"
        )
    for before, after in zip(rows, rows[1:], strict=False):
        more = 1024 * (after["peak_kib"] - before["peak_kib"])
        share = more / (after["length"] - before["length"]) / result["hidden_size"]
        lines.append(
            f"memory from {before['length']:,} to {after['length']:,}: "
            f"{share:.2f} x hidden size bytes a token"
        )
    same = result["same"]
    lines.append(
        f"perplexity at {same['length']:,} in fp32: {same['perplexity']:.4f}, relative difference "
        f"to dense {same['relative_difference']:.1e}"
    )
    if "dense" in result:
        dense = result["dense"]
        ours = next((row for row in rows if row["length"] == dense["length"]), rows[-1])
        ratio, cpu_ratio = (
            dense[key] / ours[key] for key in ("microseconds_a_token", "cpu_microseconds_a_token")
        )
        lines.append(
            f"dense at {dense['length']:,}: {dense['microseconds_a_token']:.1f} us a token, "
            f"{ratio:.1f} times ours at {ours['length']:,} (cpu time: {cpu_ratio:.1f})"
        )
    if "decoding" in result:
        found = result["decoding"]
        times = found["milliseconds_a_token"]
        words = ", ".join(
            f"{value:.2f} ms at {position:,}"
            for position, value in zip(found["positions"], times, strict=True)
        )
        lines.append(f"decoding a token: {words}: {times[-1] / times[0]:.3f} times")
        lines.append(
            f"rings {found['ring_bytes'] / 2**20:.1f} MiB, a dense cache of 131,072 tokens "
            f"{found['dense_bytes_at_131072'] / 2**20:.1f} MiB: "
            f"{found['dense_bytes_at_131072'] / found['ring_bytes']:.1f} times; "
            f"{max(found['cold_share']):.2%} of queries read older keys"
        )
    return lines
