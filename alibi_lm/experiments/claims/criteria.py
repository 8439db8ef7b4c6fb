"""How each claim of claims.yaml is decided.

A claim is an inequality over a quantity with a confidence interval over seeds, and an interval
wholly on one side decides it. Differences are paired: equal seeds see equal samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files

import numpy as np
import yaml

from alibi_lm.experiments.claims.measurements import Measurements, Missing
from alibi_lm.experiments.claims.statistics import (
    ClaimVerdict,
    Estimate,
    above,
    all_of,
    any_of,
    below,
    estimate,
)


@dataclass(frozen=True)
class Finding:
    """The verdict on a claim, and the numbers behind it."""

    verdict: ClaimVerdict
    text: str


Criterion = Callable[[Measurements], Finding]
_CRITERIA: dict[str, Criterion] = {}


@dataclass(frozen=True)
class Claim:
    """A paired-seed claim: a published statement, tested on models trained from equal seeds."""

    key: str
    statement: str
    source: str
    published: str
    criterion: str
    """What confirms it here; the opposite refutes it."""
    untested: str = ""
    """Why it is not tested, where it is not."""

    def finding(self, measurements: Measurements) -> Finding:
        """The verdict; "not tested here" if a measurement is missing."""
        if self.untested:
            return Finding("not tested here", self.untested)
        try:
            return _CRITERIA[self.key](measurements)
        except Missing as error:
            return Finding("not tested here", f"{error.args[0]}.")


CLAIMS = tuple(
    Claim(**row)
    for row in yaml.safe_load(
        files("alibi_lm.experiments.claims").joinpath("claims.yaml").read_text("utf-8")
    )
)
"""Every claim, in the page's order."""


def _decides(key: str) -> Callable[[Criterion], Criterion]:
    """Register the criterion of a claim."""

    def register(criterion: Criterion) -> Criterion:
        _CRITERIA[key] = criterion
        return criterion

    return register


def shown(value: Estimate, digits: int = 3, unit: str = "") -> str:
    """A mean with its interval."""
    text = f"{value.mean:.{digits}f}"
    if value.low is not None and value.high is not None:
        text += f" [{value.low:.{digits}f}, {value.high:.{digits}f}]"
    return f"{text}{unit}"


def _ratio(measured: Measurements, model: str) -> tuple[Estimate, int, int]:
    """Perplexity at the longest length over that at the training length."""
    trained, longest = measured.trained(model), measured.lengths(model)[-1]
    difference = measured.losses(model, longest) - measured.losses(model, trained)
    return estimate(difference).exponential(), trained, longest


@_decides("sinusoidal-collapses")
def _collapse(measured: Measurements) -> Finding:
    ratio, trained, longest = _ratio(measured, "sinusoidal")
    text = f"Perplexity at {longest:,} over that at {trained}: {shown(ratio, 2)}."
    return Finding(above(ratio, 2.0), text)


@_decides("alibi-holds")
def _holds(measured: Measurements) -> Finding:
    ratio, trained, longest = _ratio(measured, "alibi")
    text = f"Perplexity at {longest:,} over that at {trained}: {shown(ratio)}."
    return Finding(below(ratio, 1.05), text)


@_decides("order")
def _order(measured: Measurements) -> Finding:
    names = ("alibi", "t5", "rotary", "sinusoidal")
    length = 4 * measured.trained("alibi")
    losses = [measured.losses(name, length) for name in names]
    steps = [estimate(after - before) for before, after in zip(losses, losses[1:], strict=False)]
    perplexities = ", ".join(
        f"{name} {math.exp(float(loss.mean())):.2f}"
        for name, loss in zip(names, losses, strict=True)
    )
    gaps = ", ".join(shown(step) for step in steps)
    text = f"At {length}: {perplexities}; steps between neighbors {gaps} nats."
    return Finding(all_of(*(above(step, 0.0) for step in steps)), text)


@_decides("t5-slower")
def _t5_slower(measured: Measurements) -> Finding:
    length = measured.trained("sinusoidal-double") if measured.cost is None else _cost(measured)[0]
    ratio = measured.ratio("seconds", "t5", "sinusoidal", length, length)
    return Finding(above(ratio, 1.0), f"Step time at {length}, T5 over sinusoidal: {shown(ratio)}.")


def _cost(measured: Measurements) -> list[int]:
    if measured.cost is None:
        raise Missing("costs were not measured")
    return sorted(int(n) for n in measured.cost["seconds"]["alibi"])


@_decides("half-length-loss")
def _half_loss(measured: Measurements) -> Finding:
    length = measured.trained("sinusoidal-double")
    losses = measured.losses("alibi", length) - measured.losses("sinusoidal-double", length)
    difference = estimate(losses)
    text = (
        f"Loss at {length} of ALiBi trained at {measured.trained('alibi')} less that of sinusoidal "
        f"trained at {length}, equal tokens: {shown(difference)} nats."
    )
    return Finding(below(difference, 0.0), text)


@_decides("half-length-cost")
def _half_cost(measured: Measurements) -> Finding:
    short, long = _cost(measured)[0], 2 * _cost(measured)[0]
    time = measured.ratio("seconds", "alibi", "sinusoidal", short, long)
    memory = measured.ratio("bytes", "alibi", "sinusoidal", short, long)
    text = (
        f"A step of equal tokens, ALiBi at {short} over sinusoidal at {long}: time {shown(time)}, "
        f"memory {shown(memory)}."
    )
    return Finding(all_of(below(time, 1.0), below(memory, 1.0)), text)


@_decides("free")
def _free(measured: Measurements) -> Finding:
    length = _cost(measured)[-1]
    time = measured.ratio("seconds", "alibi", "sinusoidal", length, length)
    memory = measured.ratio("bytes", "alibi", "sinusoidal", length, length)
    text = f"At {length}, ALiBi over sinusoidal: time {shown(time)}, memory {shown(memory)}."
    return Finding(all_of(below(time, 1.01), below(memory, 1.01)), text)


@_decides("rotary-at-length")
def _rotary_at_length(measured: Measurements) -> Finding:
    length = measured.trained("alibi")
    difference = estimate(measured.losses("rotary", length) - measured.losses("alibi", length))
    text = f"Loss at {length}, rotary less ALiBi: {shown(difference)} nats."
    return Finding(below(difference, 0.0), text)


@_decides("translation")
def _invariance(measured: Measurements) -> Finding:
    worst = {
        name: max(max(run["shift"].values()) for run in measured.of("text", name))
        for name in ("alibi", "sinusoidal")
    }
    verdict: ClaimVerdict = (
        "confirmed" if worst["alibi"] <= 1e-4 < worst["sinusoidal"] else "refuted"
    )
    text = (
        "Largest change of a token's loss when its document starts up to 1,000 positions later: "
        f"{worst['alibi']:.1e} nats (sinusoidal: {worst['sinusoidal']:.2f})."
    )
    return Finding(verdict, text)


@_decides("best-near-double")
def _best_near_double(measured: Measurements) -> Finding:
    trained, lengths = measured.trained("alibi"), measured.lengths("alibi")
    at_double = measured.losses("alibi", 2 * trained)
    others = [n for n in lengths if n != 2 * trained]
    gaps = {n: estimate(measured.losses("alibi", n) - at_double) for n in others}
    best = min(lengths, key=lambda n: float(measured.losses("alibi", n).mean()))
    text = (
        f"Lowest mean loss at {best:,}. Loss less that at {2 * trained}: "
        + ", ".join(f"{n:,}: {shown(gap, 4)}" for n, gap in gaps.items())
        + "."
    )
    return Finding(all_of(*(above(gap, 0.0) for gap in gaps.values())), text)


@_decides("early-tokens")
def _early_tokens(measured: Measurements) -> Finding:
    trained, longest = measured.trained("alibi"), measured.lengths("alibi")[-1]
    gain = estimate(measured.losses("alibi", trained) - measured.losses("alibi", longest))
    loss_gap = estimate([run["loss_gap"][str(longest)] for run in measured.of("text", "alibi")])
    text = (
        f"Gain from {trained} to {longest:,}: {shown(gain, 4)} nats; loss at {longest:,} less that "
        f"with the input cut to {trained}: {shown(loss_gap, 4)} nats."
    )
    verdict, gained = above(loss_gap, -0.01), above(gain, 0.0)
    if verdict != "refuted" and gained == "refuted":
        raise Missing(f"There is no gain to explain. {text.removesuffix('.')}")
    return Finding(all_of(verdict, gained) if verdict == "confirmed" else verdict, text)


@_decides("learned-slopes")
def _learned(measured: Measurements) -> Finding:
    longest = measured.lengths("alibi")[-1]
    learned, fixed = measured.losses("alibi_learned", longest), measured.losses("alibi", longest)
    difference = estimate(learned - fixed)
    text = f"Loss at {longest:,}, learned less fixed slopes: {shown(difference, 4)} nats."
    return Finding(above(difference, 0.0), text)


@_decides("hard-window")
def _window(measured: Measurements) -> Finding:
    longest, trained = measured.lengths("alibi")[-1], measured.trained("alibi")
    plain = measured.losses("alibi", longest)
    difference = estimate(measured.losses("alibi", longest, "windowed") - plain)
    text = (
        f"Loss at {longest:,} of the same weights with a window of {trained} in every layer less "
        f"that without: {shown(difference, 4)} nats."
    )
    return Finding(below(difference, 0.01), text)


@_decides("short-lengths")
def _short(measured: Measurements) -> Finding:
    parts = []
    for alibi, sinusoidal in (("alibi-half", "sinusoidal-half"), ("alibi", "sinusoidal")):
        length = measured.trained(alibi)
        gap = estimate(measured.losses(sinusoidal, length) - measured.losses(alibi, length))
        parts.append((length, gap))
    text = "Loss at the training length, sinusoidal less ALiBi: " + ", ".join(
        f"L = {length}: {shown(gap)} nats" for length, gap in parts
    )
    return Finding(all_of(*(below(gap, 0.0) for _, gap in parts)), text + ".")


def _retrieves(measured: Measurements, model: str) -> np.ndarray:
    within = measured.recall(model, beyond=False)
    if float(within.mean()) < 0.5:
        raise Missing(
            f"{model} does not retrieve within its training length either ({within.mean():.0%})"
        )
    return within


@_decides("recall-learnt")
def _recall_learnt(measured: Measurements) -> Finding:
    names = [model for group, model in measured.runs if group == "recall"]
    rates = {name: estimate(measured.recall(name, beyond=False)) for name in names}
    if not rates:
        raise Missing("the suite has no recall models")
    generated = {name: measured.recall(name, beyond=False, how="generation") for name in names}
    text = "Needles rate in prompts of at most L tokens, by ranking (by generation): " + ", ".join(
        f"{name} {rate.mean:.0%} ({generated[name].mean():.0%})" for name, rate in rates.items()
    )
    return Finding(any_of(*(above(rate, 0.9) for rate in rates.values())), text + ".")


@_decides("recall-fails")
def _recall_fails(measured: Measurements) -> Finding:
    within = _retrieves(measured, "alibi")
    beyond = measured.recall("alibi", beyond=True)
    difference = estimate(beyond - within / 2)
    text = (
        f"ALiBi finds {estimate(within).mean:.0%} of needles in prompts of at most L tokens, "
        f"{shown(estimate(beyond), 2)} of those beyond (10% by chance)."
    )
    return Finding(below(difference, 0.0), text)


@_decides("nope-recall")
def _nope_recall(measured: Measurements) -> Finding:
    for name in ("nope", "alibi"):
        _retrieves(measured, name)
    nope, alibi = (measured.recall(name, beyond=True) for name in ("nope", "alibi"))
    difference = estimate(nope - alibi)
    text = (
        f"Needles beyond the training length: NoPE {nope.mean():.0%}, ALiBi {alibi.mean():.0%}; "
        f"difference {shown(difference, 2)}."
    )
    return Finding(above(difference, 0.0), text)


@_decides("scaled-slopes")
def _scaled_recall(measured: Measurements) -> Finding:
    _retrieves(measured, "alibi")
    plain = measured.recall("alibi", beyond=True)
    gains = {
        name: estimate(measured.recall("alibi", beyond=True, variant=name) - plain)
        for name in ("linear", "ntk")
    }
    text = "Needles beyond the training length, scaled slopes less plain ones: " + ", ".join(
        f"{name} {shown(gain, 2)}" for name, gain in gains.items()
    )
    return Finding(all_of(*(above(gain, 0.0) for gain in gains.values())), text + ".")


@_decides("nope-reasoning")
def _reasoning(measured: Measurements) -> Finding:
    names = [model for group, model in measured.runs if group == "generalization"]
    if not {"nope", "alibi"} <= set(names):
        raise Missing("the suite has no generalization models nope and alibi")
    every = dict.fromkeys(
        cell["task"] for cell in measured.of("generalization", "nope")[0]["cells"]
    )
    within = {
        (name, task): float(measured.accuracy(name, beyond=False, tasks=[task]).mean())
        for name in names
        for task in every
    }
    tasks = [task for task in every if min(within["nope", task], within["alibi", task]) >= 0.5]
    if not tasks:
        best = ", ".join(f"{task} {within['alibi', task]:.0%}" for task in every)
        raise Missing(f"no task is learnt within the trained numbers of items (ALiBi: {best})")
    rates = {name: measured.accuracy(name, beyond=True, tasks=tasks) for name in names}
    difference = estimate(rates["nope"] - rates["alibi"])
    verdict = above(difference, 0.0)
    if max(rates["nope"].mean(), rates["alibi"].mean()) < 0.05:
        verdict = "cannot tell at this scale"  # both on the floor: nothing is compared
    text = (
        f"Exact answers beyond the trained numbers of items ({', '.join(tasks)}): "
        + ", ".join(f"{name} {rate.mean():.0%}" for name, rate in rates.items())
        + f". NoPE less ALiBi: {shown(difference, 2)}."
    )
    return Finding(verdict, text)
