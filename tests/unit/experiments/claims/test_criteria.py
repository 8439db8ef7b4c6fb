"""Planted measurements give each claim the verdict that they were made for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from alibi_lm.experiments.claims.criteria import CLAIMS, Finding
from alibi_lm.experiments.claims.measurements import Measurements
from alibi_lm.experiments.claims.statistics import above, all_of, any_of, below, estimate

LENGTHS = (64, 128, 256, 512, 1024, 2048)
BY_KEY = {claim.key: claim for claim in CLAIMS}
NOISE = (-0.001, 0.0, 0.001)


def text_run(losses: list[float], noise: float, **more: Any) -> dict[str, Any]:
    values = {str(n): loss + noise for n, loss in zip(LENGTHS, losses, strict=True)}
    shift = {"1": 0.0, "128": 0.0, "1000": 0.0}
    return {"losses": values, "shift": shift, "loss_gap": dict.fromkeys(values, 0.0), **more}


def recall_cells(within: int, beyond: int) -> list[dict[str, int]]:
    return [
        {"length": 128, "distance": 128, "ranking": within, "generation": within, "trials": 100},
        {"length": 512, "distance": 128, "ranking": 50, "generation": 0, "trials": 100},
        {"length": 512, "distance": 512, "ranking": beyond, "generation": 0, "trials": 100},
    ]


def reasoning(within: float, beyond: float) -> dict[str, Any]:
    cells = [{"task": "copy", "items": 10, "rate": within},
             {"task": "copy", "items": 40, "rate": beyond}]  # fmt: skip
    return {"cells": cells, "trained_items": 20}


def as_published() -> Measurements:
    """Measurements that agree with every claim that can be tested."""
    curves = {
        "alibi": [4.0, 3.9, 3.88, 3.885, 3.887, 3.89],
        "alibi_learned": [4.0, 3.9, 3.9, 3.95, 4.0, 4.1],
        "t5": [4.0, 3.88, 3.9, 4.0, 4.2, 4.5],
        "rotary": [4.0, 3.85, 4.0, 4.4, 4.8, 5.0],
        "sinusoidal": [4.0, 3.89, 4.9, 5.5, 6.0, 6.5],
        "sinusoidal-double": [4.1, 3.95, 3.9, 5.0, 6.0, 6.5],
        "alibi-half": [4.1, 4.0, 3.99, 3.98, 3.98, 3.98],
        "sinusoidal-half": [4.05, 5.0, 6.0, 6.5, 7.0, 7.0],
    }
    runs: dict[tuple[str, str], list[Any]] = {}
    lengths = {}
    for name, curve in curves.items():
        runs["text", name] = [text_run(curve, noise) for noise in NOISE]
        lengths["text", name] = 256 if "double" in name else 64 if "half" in name else 128
    for run in runs["text", "alibi"]:
        run["windowed"] = {n: loss + 0.001 for n, loss in run["losses"].items()}
    for run in runs["text", "sinusoidal"]:
        run["shift"] = {"1": 1.0, "128": 2.0, "1000": 5.0}
    counts = {"alibi": (95, 12), "nope": (96, 60)}
    for name, (within, beyond) in counts.items():
        runs["recall", name] = [
            {
                "variants": {
                    "plain": recall_cells(within, beyond + seed),
                    "linear": recall_cells(within, 50 + seed),
                    "ntk": recall_cells(within, 45 + seed),
                }
            }
            for seed in range(3)
        ]
        lengths["recall", name] = 128
    for name, rate in (("nope", 0.5), ("alibi", 0.2)):
        runs["generalization", name] = [reasoning(0.99, rate + noise) for noise in NOISE]
        lengths["generalization", name] = 128
    return Measurements(runs, costs(1.0), lengths)


def costs(alibi: float) -> dict[str, Any]:
    jitter = [1.0, 1.001, 0.999, 1.0, 1.0005]
    seconds = {"alibi": (alibi, 2.1 * alibi), "sinusoidal": (1.0, 2.3), "t5": (2.0, 5.0)}
    rows = {
        name: {"512": [short * j for j in jitter], "1024": [long * j for j in reversed(jitter)]}
        for name, (short, long) in seconds.items()
    }
    return {"seconds": rows, "bytes": {name: own for name, own in rows.items() if name != "t5"}}


def contradicted() -> Measurements:
    """The same with every quantity on the other side."""
    found = as_published()
    flat = [4.0, 3.9, 3.9, 3.9, 3.9, 3.9]
    rising = [4.0, 3.9, 4.2, 4.4, 4.6, 4.8]
    for name, curve in {
        "alibi": rising, "sinusoidal": flat, "t5": flat, "rotary": [x + 0.1 for x in flat],
        "alibi_learned": [x - 0.1 for x in rising], "sinusoidal-double": flat,
        "alibi-half": flat, "sinusoidal-half": [x + 0.1 for x in flat],
    }.items():  # fmt: skip
        found.runs["text", name] = [text_run(curve, noise) for noise in NOISE]
    for run in found.runs["text", "alibi"]:
        run["windowed"] = {n: loss + 0.5 for n, loss in run["losses"].items()}
        run["loss_gap"] = dict.fromkeys(run["losses"], -0.2)
        run["shift"] = {"1": 0.3}
    for seed, run in enumerate(found.runs["recall", "alibi"]):
        run["variants"] = {"plain": recall_cells(80, 80 + seed), "linear": recall_cells(80, 20),
                           "ntk": recall_cells(80, 30)}  # fmt: skip
    for run in found.runs["recall", "nope"]:
        run["variants"]["plain"] = recall_cells(70, 20)
    found.runs["generalization", "nope"] = [reasoning(0.9, 0.1 + noise) for noise in NOISE]
    found.cost = costs(1.2)
    found.cost["seconds"]["t5"] = {n: [x / 3 for x in own]
                                   for n, own in found.cost["seconds"]["t5"].items()}  # fmt: skip
    return found


TESTED = [key for key in BY_KEY if key not in ("usable-to-10000", "bloom-8k")]


def finding(key: str, measured: Measurements) -> Finding:
    return BY_KEY[key].finding(measured)


@pytest.mark.parametrize("key", TESTED)
def test_planted_agreement_is_confirmed(key: str) -> None:
    found = finding(key, as_published())
    assert found.verdict == "confirmed", found.text


@pytest.mark.parametrize("key", TESTED)
def test_planted_contradiction_is_refuted(key: str) -> None:
    measured = contradicted()
    if key == "half-length-cost":
        measured.cost = costs(3.0)
    found = finding(key, measured)
    assert found.verdict == "refuted", found.text


@pytest.mark.parametrize("key", [k for k in TESTED if k not in ("translation", "recall-learnt")])
def test_noise_larger_than_the_effect_cannot_tell(key: str) -> None:
    measured = as_published()
    generator = np.random.default_rng(0)
    for (group, _), runs in measured.runs.items():
        for seed, run in enumerate(runs):
            swing = (-6.0, 6.5, 0.0)[seed]
            if group == "text":
                for table in ("losses", "windowed", "loss_gap"):
                    own = run.get(table, {})
                    for n in own:
                        own[n] += swing * float(generator.normal())
            elif group == "recall":
                for cells in run["variants"].values():
                    for cell in cells:
                        if cell["distance"] > 128:
                            cell["ranking"] = int(generator.integers(0, 101))
            else:
                run["cells"][1]["rate"] = float(generator.random())
    assert measured.cost is not None
    for table in ("seconds", "bytes"):
        for rows in measured.cost[table].values():
            for n in rows:
                rows[n] = [abs(float(generator.normal())) + 0.1 for _ in rows[n]]
    assert finding(key, measured).verdict == "cannot tell at this scale"


def test_what_is_missing_is_not_tested_and_says_what() -> None:
    empty = Measurements({})
    for key in BY_KEY:
        assert finding(key, empty).verdict == "not tested here"
    assert "text model sinusoidal" in finding("sinusoidal-collapses", empty).text


def test_a_model_that_retrieves_nowhere_settles_nothing_beyond() -> None:
    measured = as_published()
    for run in measured.runs["recall", "alibi"]:
        run["variants"]["plain"] = recall_cells(12, 11)
    for key in ("recall-fails", "scaled-slopes", "nope-recall"):
        found = finding(key, measured)
        assert found.verdict == "not tested here"
        assert "does not retrieve within" in found.text
    assert finding("recall-learnt", measured).verdict == "confirmed"  # NoPE does


def test_problems_that_nobody_learnt_settle_nothing() -> None:
    measured = as_published()
    measured.runs["generalization", "alibi"] = [reasoning(0.3, 0.0) for _ in NOISE]
    found = finding("nope-reasoning", measured)
    assert found.verdict == "not tested here"
    assert "copy 30%" in found.text


@pytest.mark.parametrize(
    ("rates", "verdict"),
    [((95, 96, 97), "confirmed"), ((89, 91, 99), "cannot tell at this scale"),
     ((100, 100), "confirmed"), ((99,), "cannot tell at this scale"), ((60, 61, 62), "refuted")],
)  # fmt: skip
def test_whether_recall_is_learnt_needs_an_interval_too(
    rates: tuple[int, ...], verdict: str
) -> None:
    """The other model's 40% neither helps nor harms: one that retrieves is enough."""
    other = [{"variants": {"plain": recall_cells(40 + seed, 10)}} for seed in range(len(rates))]
    runs = {("recall", "nope"): [{"variants": {"plain": recall_cells(n, 10)}} for n in rates]}
    lengths = {("recall", "nope"): 128, ("recall", "alibi"): 128}
    measured = Measurements(runs | {("recall", "alibi"): other}, None, lengths)
    assert finding("recall-learnt", measured).verdict == verdict


def test_two_models_on_the_floor_are_not_compared() -> None:
    measured = as_published()
    for name in ("nope", "alibi"):
        measured.runs["generalization", name] = [reasoning(0.9, 0.0) for _ in NOISE]
    assert finding("nope-reasoning", measured).verdict == "cannot tell at this scale"


def test_where_nothing_is_gained_no_curse_explains_it() -> None:
    measured = as_published()
    for run in measured.runs["text", "alibi"]:
        run["losses"]["2048"] = run["losses"]["128"] + 0.3
    found = finding("early-tokens", measured)
    assert found.verdict == "not tested here"
    assert "no gain to explain" in found.text


def test_the_interval_is_students() -> None:
    """Its quantile from the density itself, integrated."""
    for count in (2, 3, 4, 8):
        values = np.random.default_rng(count).normal(size=count)
        found = estimate(values)
        assert found.high is not None
        error = float(values.std(ddof=1)) / math.sqrt(count)
        quantile, freedom = (found.high - found.mean) / error, count - 1
        x = np.linspace(0, quantile, 400_001)
        scale = math.gamma((freedom + 1) / 2) / (
            math.sqrt(freedom * math.pi) * math.gamma(freedom / 2)
        )
        density = scale * (1 + x**2 / freedom) ** (-(freedom + 1) / 2)
        area = float(((density[1:] + density[:-1]) / 2 * np.diff(x)).sum())
        assert area == pytest.approx(0.475, abs=1e-5)


def test_only_a_whole_interval_decides() -> None:
    wide, narrow = estimate([-1.0, 0.0, 1.5]), estimate([0.9, 1.0, 1.1])
    assert above(wide, 0.0) == below(wide, 0.0) == "cannot tell at this scale"
    assert (above(narrow, 0.0), below(narrow, 0.0)) == ("confirmed", "refuted")
    assert above(estimate([5.0]), 0.0) == "cannot tell at this scale"
    assert all_of("confirmed", "cannot tell at this scale") == "cannot tell at this scale"
    assert all_of("confirmed", "refuted", "not tested here") == "refuted"
    assert all_of("confirmed", "confirmed") == "confirmed"
    assert any_of("confirmed", "refuted") == "confirmed"
    assert any_of("cannot tell at this scale", "refuted") == "cannot tell at this scale"
    assert any_of("refuted", "refuted") == "refuted"
