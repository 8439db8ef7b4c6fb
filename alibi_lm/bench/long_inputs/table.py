"""The result of `bench long` as lines for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def benchmark_lines(result: Mapping[str, Any]) -> list[str]:
    """The result for the terminal."""
    lines = [
        f"{result['precision']}, {result['threads']} threads, "
        f"pruning tolerance {result['pruning_tolerance']:g}; "
        f"medians of {result['repeats']} repeats (3 where one takes over a minute)",
        f"{'tokens':>10}  {'us a token':>10}  {'to the shortest':>22}  {'cpu us':>8}  "
        f"{'peak MiB':>9}  perplexity",
    ]
    for row in result["scoring"]:
        lines.append(
            f"{row['length']:>10,}  {row['microseconds_a_token']:>10.1f}  "
            f"{_interval(row['ratio']):>22}  {row['cpu_microseconds_a_token']:>8.1f}  "
            f"{row['peak_kib'] / 1024:>9.0f}  {row['perplexity']:.4f}"
        )
    for before, after in zip(result["scoring"], result["scoring"][1:], strict=False):
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
    lines += _dense_lines(result) + _decoding_lines(result) + _curve_lines(result)
    return lines


def _interval(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"


def _dense_lines(result: Mapping[str, Any]) -> list[str]:
    lengths = [row["length"] for row in result["scoring"]]
    return [
        f"dense at {row['length']:,}: {row['microseconds_a_token']:.1f} us a token, "
        f"{_interval(row['ratio'])} times pruned at "
        f"{row['length'] if row['length'] in lengths else lengths[-1]:,}"
        for row in result["dense"]
    ]


def _decoding_lines(result: Mapping[str, Any]) -> list[str]:
    decoding = result.get("decoding")
    if decoding is None:
        return []
    words = ", ".join(
        f"{value:.2f} ms at {position:,}"
        for position, value in zip(
            decoding["positions"], decoding["milliseconds_a_token"], strict=True
        )
    )
    return [
        f"decoding a token: {words}: {_interval(decoding['ratio'])} times",
        f"sliding KV cache {decoding['sliding_kv_bytes'] / 2**20:.1f} MiB, "
        f"a dense cache of 131,072 tokens {decoding['dense_bytes_at_131072'] / 2**20:.1f} MiB: "
        f"{decoding['dense_bytes_at_131072'] / decoding['sliding_kv_bytes']:.1f} times; "
        f"{max(decoding['offload_share']):.2%} of queries read offloaded keys",
    ]


def _curve_lines(result: Mapping[str, Any]) -> list[str]:
    rows = result.get("curve")
    if not rows:
        return []
    lines = [f"perplexity of the same {min(row['tokens'] for row in rows):,} tokens:"]
    lines += [f"  {row['length']:>10,}  {row['perplexity']:.4f}  {row['seconds']:.1f} s"
              for row in rows]  # fmt: skip
    longest, wanted = rows[-1], result["curve_dense_seconds"]
    if wanted is not None:
        lines.append(
            f"one input of {longest['length']:,} tokens: {longest['seconds']:.0f} s; densely it "
            f"would take {wanted:,.0f} s, extrapolated from "
            f"{', '.join(format(row['length'], ',') for row in result['dense'])} tokens"
        )
    return lines
