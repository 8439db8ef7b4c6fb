"""The claims: what is said, where, the published number, and how ours decides.

Each claim is put as an inequality over quantities with an interval over seeds; only an interval
wholly on one side decides. Differences are paired: equal seeds see equal samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from alibi_lm.experiments.claims.evidence import Evidence, Missing
from alibi_lm.experiments.claims.statistics import (
    Estimate,
    Verdict,
    above,
    all_of,
    any_of,
    below,
    estimate,
)

PAPER = "Press, Smith & Lewis 2021"


@dataclass(frozen=True)
class Finding:
    """What was found about a claim."""

    verdict: Verdict
    text: str


@dataclass(frozen=True)
class Claim:
    """One claim of the literature."""

    key: str
    statement: str
    source: str
    published: str
    criterion: str
    """What confirms it here; the opposite refutes it."""
    judge: Callable[[Evidence], Finding]

    def finding(self, evidence: Evidence) -> Finding:
        """The verdict; not tested here where a measurement is missing."""
        try:
            return self.judge(evidence)
        except Missing as error:
            return Finding("not tested here", f"{error.args[0]}.")


def shown(found: Estimate, digits: int = 3, unit: str = "") -> str:
    """A mean with its interval."""
    text = f"{found.mean:.{digits}f}"
    if found.low is not None and found.high is not None:
        text += f" [{found.low:.{digits}f}, {found.high:.{digits}f}]"
    return f"{text}{unit}"


def _ratio(evidence: Evidence, model: str) -> tuple[Estimate, int, int]:
    """Perplexity at the longest length over that at the training length."""
    trained, longest = evidence.trained(model), evidence.lengths(model)[-1]
    difference = evidence.losses(model, longest) - evidence.losses(model, trained)
    return estimate(difference).exponential(), trained, longest


def _collapse(evidence: Evidence) -> Finding:
    found, trained, longest = _ratio(evidence, "sinusoidal")
    text = f"Perplexity at {longest:,} over that at {trained}: {shown(found, 2)}."
    return Finding(above(found, 2.0), text)


def _holds(evidence: Evidence) -> Finding:
    found, trained, longest = _ratio(evidence, "alibi")
    text = f"Perplexity at {longest:,} over that at {trained}: {shown(found)}."
    return Finding(below(found, 1.05), text)


def _order(evidence: Evidence) -> Finding:
    names = ("alibi", "t5", "rotary", "sinusoidal")
    length = 4 * evidence.trained("alibi")
    losses = [evidence.losses(name, length) for name in names]
    steps = [estimate(after - before) for before, after in zip(losses, losses[1:], strict=False)]
    perplexities = ", ".join(
        f"{name} {math.exp(float(own.mean())):.2f}" for name, own in zip(names, losses, strict=True)
    )
    gaps = ", ".join(shown(step) for step in steps)
    text = f"At {length}: {perplexities}; steps between neighbors {gaps} nats."
    return Finding(all_of(*(above(step, 0.0) for step in steps)), text)


def _t5_slower(evidence: Evidence) -> Finding:
    length = evidence.trained("sinusoidal-double") if evidence.cost is None else _cost(evidence)[0]
    found = evidence.ratio("seconds", "t5", "sinusoidal", length, length)
    return Finding(above(found, 1.0), f"Step time at {length}, T5 over sinusoidal: {shown(found)}.")


def _cost(evidence: Evidence) -> list[int]:
    if evidence.cost is None:
        raise Missing("costs were not measured")
    return sorted(int(n) for n in evidence.cost["seconds"]["alibi"])


def _half_loss(evidence: Evidence) -> Finding:
    length = evidence.trained("sinusoidal-double")
    difference = evidence.losses("alibi", length) - evidence.losses("sinusoidal-double", length)
    found = estimate(difference)
    text = (
        f"Loss at {length} of ALiBi trained at {evidence.trained('alibi')} less that of sinusoidal "
        f"trained at {length}, equal tokens: {shown(found)} nats."
    )
    return Finding(below(found, 0.0), text)


def _half_cost(evidence: Evidence) -> Finding:
    short, long = _cost(evidence)[0], 2 * _cost(evidence)[0]
    time = evidence.ratio("seconds", "alibi", "sinusoidal", short, long)
    memory = evidence.ratio("bytes", "alibi", "sinusoidal", short, long)
    text = (
        f"A step of equal tokens, ALiBi at {short} over sinusoidal at {long}: time {shown(time)}, "
        f"memory {shown(memory)}."
    )
    return Finding(all_of(below(time, 1.0), below(memory, 1.0)), text)


def _free(evidence: Evidence) -> Finding:
    length = _cost(evidence)[-1]
    time = evidence.ratio("seconds", "alibi", "sinusoidal", length, length)
    memory = evidence.ratio("bytes", "alibi", "sinusoidal", length, length)
    text = f"At {length}, ALiBi over sinusoidal: time {shown(time)}, memory {shown(memory)}."
    return Finding(all_of(below(time, 1.01), below(memory, 1.01)), text)


def _rotary_at_length(evidence: Evidence) -> Finding:
    length = evidence.trained("alibi")
    found = estimate(evidence.losses("rotary", length) - evidence.losses("alibi", length))
    text = f"Loss at {length}, rotary less ALiBi: {shown(found)} nats."
    return Finding(below(found, 0.0), text)


def _invariance(evidence: Evidence) -> Finding:
    worst = {
        name: max(max(run["shift"].values()) for run in evidence.of("text", name))
        for name in ("alibi", "sinusoidal")
    }
    verdict: Verdict = "confirmed" if worst["alibi"] <= 1e-4 < worst["sinusoidal"] else "refuted"
    text = (
        "Largest change of a token's loss when its document starts up to 1,000 positions later: "
        f"{worst['alibi']:.1e} nats (sinusoidal: {worst['sinusoidal']:.2f})."
    )
    return Finding(verdict, text)


def _best_near_double(evidence: Evidence) -> Finding:
    trained, lengths = evidence.trained("alibi"), evidence.lengths("alibi")
    at_double = evidence.losses("alibi", 2 * trained)
    others = [n for n in lengths if n != 2 * trained]
    gaps = {n: estimate(evidence.losses("alibi", n) - at_double) for n in others}
    best = min(lengths, key=lambda n: float(evidence.losses("alibi", n).mean()))
    text = (
        f"Lowest mean loss at {best:,}. Loss less that at {2 * trained}: "
        + ", ".join(f"{n:,}: {shown(gap, 4)}" for n, gap in gaps.items())
        + "."
    )
    return Finding(all_of(*(above(gap, 0.0) for gap in gaps.values())), text)


def _early_tokens(evidence: Evidence) -> Finding:
    trained, longest = evidence.trained("alibi"), evidence.lengths("alibi")[-1]
    gain = estimate(evidence.losses("alibi", trained) - evidence.losses("alibi", longest))
    loss_gap = estimate([run["loss_gap"][str(longest)] for run in evidence.of("text", "alibi")])
    text = (
        f"Gain from {trained} to {longest:,}: {shown(gain, 4)} nats; loss at {longest:,} less that "
        f"with the input cut to {trained}: {shown(loss_gap, 4)} nats."
    )
    verdict, gained = above(loss_gap, -0.01), above(gain, 0.0)
    if verdict != "refuted" and gained == "refuted":
        raise Missing(f"There is no gain to explain. {text.removesuffix('.')}")
    return Finding(all_of(verdict, gained) if verdict == "confirmed" else verdict, text)


def _learned(evidence: Evidence) -> Finding:
    longest = evidence.lengths("alibi")[-1]
    theirs, ours = evidence.losses("alibi_learned", longest), evidence.losses("alibi", longest)
    found = estimate(theirs - ours)
    text = f"Loss at {longest:,}, learned less fixed slopes: {shown(found, 4)} nats."
    return Finding(above(found, 0.0), text)


def _window(evidence: Evidence) -> Finding:
    longest, trained = evidence.lengths("alibi")[-1], evidence.trained("alibi")
    plain = evidence.losses("alibi", longest)
    found = estimate(evidence.losses("alibi", longest, "windowed") - plain)
    text = (
        f"Loss at {longest:,} of the same weights with a window of {trained} in every layer less "
        f"that without: {shown(found, 4)} nats."
    )
    return Finding(below(found, 0.01), text)


def _short(evidence: Evidence) -> Finding:
    parts = []
    for ours, theirs in (("alibi-half", "sinusoidal-half"), ("alibi", "sinusoidal")):
        length = evidence.trained(ours)
        gap = estimate(evidence.losses(theirs, length) - evidence.losses(ours, length))
        parts.append((length, gap))
    text = "Loss at the training length, sinusoidal less ALiBi: " + ", ".join(
        f"L = {length}: {shown(gap)} nats" for length, gap in parts
    )
    return Finding(all_of(*(below(gap, 0.0) for _, gap in parts)), text + ".")


def _retrieves(evidence: Evidence, model: str) -> np.ndarray:
    within = evidence.recall(model, beyond=False)
    if float(within.mean()) < 0.5:
        raise Missing(
            f"{model} does not retrieve within its training length either ({within.mean():.0%})"
        )
    return within


def _recall_learnt(evidence: Evidence) -> Finding:
    names = [model for group, model in evidence.runs if group == "recall"]
    rates = {name: estimate(evidence.recall(name, beyond=False)) for name in names}
    if not rates:
        raise Missing("the suite has no recall models")
    generated = {name: evidence.recall(name, beyond=False, how="generation") for name in names}
    text = "Needles found in prompts of at most L tokens, by ranking (by generation): " + ", ".join(
        f"{name} {found.mean:.0%} ({generated[name].mean():.0%})" for name, found in rates.items()
    )
    return Finding(any_of(*(above(found, 0.9) for found in rates.values())), text + ".")


def _recall_fails(evidence: Evidence) -> Finding:
    within = _retrieves(evidence, "alibi")
    beyond = evidence.recall("alibi", beyond=True)
    found = estimate(beyond - within / 2)
    text = (
        f"ALiBi finds {estimate(within).mean:.0%} of needles in prompts of at most L tokens, "
        f"{shown(estimate(beyond), 2)} of those beyond (10% by chance)."
    )
    return Finding(below(found, 0.0), text)


def _nope_recall(evidence: Evidence) -> Finding:
    for name in ("nope", "alibi"):
        _retrieves(evidence, name)
    nope, alibi = (evidence.recall(name, beyond=True) for name in ("nope", "alibi"))
    found = estimate(nope - alibi)
    text = (
        f"Needles beyond the training length: NoPE {nope.mean():.0%}, ALiBi {alibi.mean():.0%}; "
        f"difference {shown(found, 2)}."
    )
    return Finding(above(found, 0.0), text)


def _scaled_recall(evidence: Evidence) -> Finding:
    _retrieves(evidence, "alibi")
    plain = evidence.recall("alibi", beyond=True)
    gains = {
        name: estimate(evidence.recall("alibi", beyond=True, variant=name) - plain)
        for name in ("linear", "ntk")
    }
    text = "Needles beyond the training length, scaled slopes less plain ones: " + ", ".join(
        f"{name} {shown(gain, 2)}" for name, gain in gains.items()
    )
    return Finding(all_of(*(above(gain, 0.0) for gain in gains.values())), text + ".")


def _reasoning(evidence: Evidence) -> Finding:
    names = [model for group, model in evidence.runs if group == "generalization"]
    if not {"nope", "alibi"} <= set(names):
        raise Missing("the suite has no generalization models nope and alibi")
    every = dict.fromkeys(
        cell["task"] for cell in evidence.of("generalization", "nope")[0]["cells"]
    )
    within = {
        (name, task): float(evidence.accuracy(name, beyond=False, tasks=[task]).mean())
        for name in names
        for task in every
    }
    tasks = [task for task in every if min(within["nope", task], within["alibi", task]) >= 0.5]
    if not tasks:
        best = ", ".join(f"{task} {within['alibi', task]:.0%}" for task in every)
        raise Missing(f"no task is learnt within the trained numbers of items (ALiBi: {best})")
    rates = {name: evidence.accuracy(name, beyond=True, tasks=tasks) for name in names}
    found = estimate(rates["nope"] - rates["alibi"])
    verdict = above(found, 0.0)
    if max(rates["nope"].mean(), rates["alibi"].mean()) < 0.05:
        verdict = "cannot tell at this scale"  # both on the floor: nothing is compared
    text = (
        f"Exact answers beyond the trained numbers of items ({', '.join(tasks)}): "
        + ", ".join(f"{name} {rate.mean():.0%}" for name, rate in rates.items())
        + f". NoPE less ALiBi: {shown(found, 2)}."
    )
    return Finding(verdict, text)


def _untested(reason: str) -> Callable[[Evidence], Finding]:
    return lambda _: Finding("not tested here", reason)


CLAIMS: tuple[Claim, ...] = (
    Claim("sinusoidal-collapses", "Sinusoidal positions collapse past the training length.", PAPER,
          "L = 512: 20.05 at 512, 406 at 15,512", "ratio of perplexities above 2", _collapse),
    Claim("alibi-holds", "ALiBi's perplexity holds past the training length.", PAPER,
          "L = 512: 19.73 at 512, 18.31 at 15,512", "ratio of perplexities below 1.05", _holds),
    Claim("order", "Past the training length the order is ALiBi, T5, rotary, sinusoidal.", PAPER,
          "L = 512 at 3,512: 18.40, 22.9, 35.5, 179", "each step's interval above 0", _order),
    Claim("t5-slower", "The T5 bias is slower to train with.", PAPER,
          "slower than sinusoidal, rotary and ALiBi", "ratio of step times above 1", _t5_slower),
    Claim("half-length-loss", "ALiBi trained at L does as well at 2L as sinusoidal trained at 2L.",
          PAPER, "1.3B: 8.92 against 8.83 at 2,048", "difference of losses below 0", _half_loss),
    Claim("half-length-cost", "... and training so is faster and takes less memory.", PAPER,
          "11% faster, 11% less memory", "both ratios below 1", _half_cost),
    Claim("free", "ALiBi costs within 1% of sinusoidal positions in time and memory.", PAPER,
          "within about 1%", "both ratios below 1.01", _free),
    Claim("rotary-at-length", "Rotary is slightly better at the training length itself.",
          "held by users of rotary models", f"{PAPER} have it the other way: 20.07 against 19.73",
          "difference of losses below 0", _rotary_at_length),
    Claim("translation", "Scores do not change when a document is shifted.", PAPER,
          "by construction", "no loss changes by more than 1e-4 nats", _invariance),
    Claim("best-near-double", "ALiBi is best near twice the training length.", PAPER,
          "perplexity is lowest at about 2L, and holds after", "losses at all other lengths above "
          "that at 2L", _best_near_double),
    Claim("early-tokens", "The gain from longer windows is the early-token curse, diluted: nothing "
          "beyond L is used.", f"{PAPER}, section on analysis",
          "sliding windows: 17.98 at 512, 18.30 at 3,072",
          "a gain, and loss less that of the input cut to L above -0.01 nats", _early_tokens),
    Claim("hard-window", "A hard window of L does as well as ALiBi past L.",
          "Chi et al. 2022 (receptive field)", "sliding window attention extrapolates as well",
          "the window costs less than 0.01 nats", _window),
    Claim("learned-slopes", "Learned slopes extrapolate worse than fixed ones.", PAPER,
          "said without a number", "difference of losses above 0", _learned),
    Claim("short-lengths", "At short training lengths sinusoidal positions may win at L itself.",
          PAPER, "28.03 against 28.46 at 64; 23.81 against 23.98 at 128",
          "both differences of losses below 0", _short),
    Claim("recall-learnt", "The curriculum teaches small models to retrieve within the training "
          "length.", "this project", "-", "one scheme finds more than 90%", _recall_learnt),
    Claim("recall-fails", "ALiBi's retrieval fails beyond the training length.",
          "reports on BLOOM and MPT; Al-Khateeb et al. 2023", "passkeys are lost past L",
          "fewer than half as many found beyond as within", _recall_fails),
    Claim("scaled-slopes", "Position Interpolation and NTK scaling of the slopes extend ALiBi's "
          "retrieval.", "Al-Khateeb et al. 2023", "to about twice the training length",
          "both gains above 0", _scaled_recall),
    Claim("nope-recall", "Without positions, retrieval reaches farther than with ALiBi.",
          "Kazemnejad et al. 2023", "mean reciprocal rank .69 against .50, ten tasks",
          "difference above 0", _nope_recall),
    Claim("nope-reasoning", "Copying, addition and sorting generalize to longer inputs better "
          "without positions than with ALiBi.", "Kazemnejad et al. 2023",
          "trained on 20 items, asked up to 40: NoPE first, then T5, ALiBi, rotary, absolute",
          "difference above 0", _reasoning),
    Claim("usable-to-10000", "A 1.3B model trained at 1,024 is usable to about 10,000 tokens only.",
          f"{PAPER} and its readers", "4.11 at 1,600 and 44 at 2,048 with fixed targets",
          "-", _untested("It needs a model that no CPU trains. `alibi-lm eval perplexity RUN "
                         "perplexity.fixed_targets=256` judges one.")),
    Claim("bloom-8k", "BLOOM, trained at 2,048, holds to 8,192.", "its model card's readers",
          "2k to 8k", "-", _untested("It needs BLOOM's weights: `alibi-lm eval perplexity "
                                     "hf:bigscience/bloom-7b1`.")),
)  # fmt: skip
"""Every claim, in the page's order."""
